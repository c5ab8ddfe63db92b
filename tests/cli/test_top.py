"""`top` without a terminal: tables one after the other, over namespaces in memory."""

from __future__ import annotations

import io
from ipaddress import ip_address

import pytest

from agent.cli import run
from agent.commands.top import Lookout, Wish, top
from agent.console import Console
from agent.entry import guarded
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from rules.load import Tracked, Tracking, Way
from rules.model import Family, Live, Observed
from tests.unit.samples import POD, forward


def flows(count: int) -> Tracking:
    way = Way(
        family=Family.IP,
        protocol=6,
        port=22,
        destination=ip_address("192.0.2.2").packed,
        answerer=ip_address("10.0.2.2").packed,
    )
    return Tracking(
        tuple(
            Tracked(key=bytes([n]), way=way, answered=True, over=False, counted=(2, 80))
            for n in range(count)
        ),
        accounted=True,
    )


@pytest.fixture
def kernel() -> MemoryKernel:
    space = MemoryNamespace(POD)
    space.held = Observed(live=(Live(forward("tcp 22"), 1, 5, 300),), table=True)
    space.flows = flows(3)
    return MemoryKernel({"desktop": space, "empty": MemoryNamespace(POD)})


def told(kernel: MemoryKernel, wish: Wish) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = top(wish, Console(out, err, bytes), kernel=kernel)
    return code, out.getvalue(), err.getvalue()


def test_where_there_is_no_terminal_one_table_is_printed(kernel: MemoryKernel) -> None:
    code, out, err = told(kernel, Wish(interval=0.1))
    summary, titles, line = out.splitlines()
    assert (code, err) == (0, "")
    assert "1 namespace: 1 range, 3 open, 0 unanswered, 0 new/s; sorted by open" in summary
    assert titles.split()[:3] == ["open", "unanswered", "new/s"]
    assert line.split() == [
        "3", "0", "0", "0", "0", "tcp", "22", "desktop", "10.0.2.2",
        "VirtualMachine/default/vm/default",
    ]  # fmt: skip


def test_as_many_tables_are_printed_as_are_asked_for(kernel: MemoryKernel) -> None:
    _, out, _ = told(kernel, Wish(interval=0.1, count=3))
    assert out.count("sorted by open") == 3


def test_a_look_is_compared_with_the_one_before(kernel: MemoryKernel) -> None:
    moments = iter([10.0, 12.0, 13.0])
    lookout = Lookout(["desktop"], kernel, lambda: next(moments))
    lookout.look()
    space = kernel.spaces["desktop"]
    space.held = Observed(live=(Live(forward("tcp 22"), 1, 9, 540),), table=True)
    space.flows = flows(5)
    (load,) = lookout.look()[0].loads
    assert (load.new, load.packets, load.octets) == (2.0, 2.0, 80.0)
    (load,) = lookout.look()[0].loads
    assert (load.open, load.new, load.packets) == (5, 0.0, 0.0)


def test_a_namespace_that_is_asked_for_and_not_there_is_a_failure(kernel: MemoryKernel) -> None:
    code, out, err = told(kernel, Wish(netns=("nowhere",), interval=0.1))
    assert (code, out) == (75, "")
    assert "there is no network namespace nowhere" in err


def test_a_namespace_that_goes_is_told_beside_those_that_stay(kernel: MemoryKernel) -> None:
    lookout = Lookout(["desktop", "empty"], kernel, lambda: 0.0)
    lookout.look()
    del kernel.spaces["empty"]
    view, failures = lookout.look()
    assert [load.netns for load in view.loads] == ["desktop"]
    assert [failure.exit_code for failure in failures] == [75]
    assert view.troubles == ("portranger: there is no network namespace empty.",)


def test_what_cannot_be_looked_at_is_a_diagnostic_beside_the_table(kernel: MemoryKernel) -> None:
    code, out, err = told(kernel, Wish(netns=("desktop", "nowhere"), interval=0.1))
    assert code == 75
    assert "tcp 22" in out
    assert "nowhere" not in out
    assert err == "portranger: there is no network namespace nowhere.\n"


def test_nothing_of_ours_is_no_failure() -> None:
    code, out, _ = told(MemoryKernel({}), Wish(interval=0.1))
    assert code == 0
    assert "Nothing of ours is live." in out


@pytest.mark.parametrize(
    "words",
    [
        ["--interval", "0"],
        ["--interval", "soon"],
        ["-n", "0"],
        ["--sort", "colour"],
        ["--netns", ""],
    ],
    ids=" ".join,
)
def test_a_senseless_wish_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: run(["top", *words])) == 64
    assert capsys.readouterr().out == ""
