"""The commands over namespaces in memory: what they find, what they leave, and what they say."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from agent.commands.apply import apply
from agent.commands.clear import clear
from agent.commands.explain import explain
from agent.commands.plan import plan
from agent.commands.show import show
from agent.config import Config, Listen, NodePorts
from agent.console import Console
from agent.errors import BadConfiguration, BadManifest
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from agent.lock import held
from agent.server import Server
from agent.status import Standing, State, Status
from rules.model import Live
from rules.values import replace
from tests.unit.samples import POD, egress

DESKTOP = Path(__file__).parent.parent.parent / "examples" / "desktop.yaml"


ELSEWHERE = "name: desktop\n  annotations: {portranger.io/interface: eth7}"


class Spoken:
    """A console that remembers."""

    def __init__(self) -> None:
        self.streams = io.StringIO(), io.StringIO()
        self.console = Console(*self.streams, bytes)

    @property
    def out(self) -> str:
        return self.streams[0].getvalue()

    @property
    def err(self) -> str:
        return self.streams[1].getvalue()


@pytest.fixture
def spoken() -> Spoken:
    return Spoken()


@pytest.fixture
def kernel() -> MemoryKernel:
    return MemoryKernel({"desktop": MemoryNamespace(POD), "spare": MemoryNamespace(POD)})


def yes(_: str) -> bool:
    return True


def applied(kernel: MemoryKernel, path: Path = DESKTOP) -> None:
    assert apply([str(path)], Spoken().console, kernel=kernel, confirm=yes) == 0


@pytest.fixture
def bridged(tmp_path: Path) -> Path:
    """The same machine, whose interface is no longer ours to forward to."""
    path = tmp_path / "bridged.yaml"
    text = DESKTOP.read_text().replace("masquerade", "bridge")
    ranges, networks = text.index("              portRanges"), text.index("      networks")
    path.write_text(text[:ranges] + text[networks:])
    return path


def test_who_waits_is_told_what_stays_meanwhile(
    kernel: MemoryKernel, tmp_path: Path, spoken: Spoken
) -> None:
    applied(kernel)
    path = tmp_path / "elsewhere.yaml"
    path.write_text(DESKTOP.read_text().replace("name: desktop", ELSEWHERE, 1))
    assert plan([str(path)], spoken.console, kernel=kernel) == 0
    assert "there is no link eth7 yet; 10 rules of before stay until then" in spoken.out


def test_a_machine_that_is_no_longer_ours_loses_its_rules(
    kernel: MemoryKernel, bridged: Path, spoken: Spoken
) -> None:
    applied(kernel)
    assert plan([str(bridged)], spoken.console, kernel=kernel, detailed=True) == 2
    assert "Plan: 0 to add, 1 to change, 10 to remove; 0 unchanged." in spoken.out
    applied(kernel, bridged)
    assert not kernel.spaces["desktop"].observe().table


def test_ports_are_not_reserved_by_hand_as_nobody_would_give_them_back(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserving = Config(node_ports=NodePorts(reserve=True))
    monkeypatch.setattr("agent.config.load", lambda _: reserving)
    kernel = MemoryKernel({name: MemoryNamespace(POD) for name in ("desktop", "node:self")})
    service = DESKTOP.parent / "services" / "phone.yaml"
    assert apply([str(service)], spoken.console, kernel=kernel, confirm=yes) == 0
    assert "udp 31000-31099" in spoken.out
    assert "reserved" not in spoken.out
    assert not any("reserved" in name for name in kernel.spaces["node:self"].settings)


def test_only_where_there_are_services_is_the_configuration_read(
    kernel: MemoryKernel, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> NoReturn:
        raise BadConfiguration("it was read")

    monkeypatch.setattr("agent.config.load", refuse)
    assert plan([str(DESKTOP)], spoken.console, kernel=kernel) == 0
    applied(kernel)
    service = str(DESKTOP.parent / "services")
    assert plan([service], spoken.console, kernel=None) == 0
    with pytest.raises(BadConfiguration):
        plan([service], spoken.console, kernel=kernel)


def test_a_machine_that_is_not_ours_needs_no_namespace(bridged: Path, spoken: Spoken) -> None:
    assert plan([str(bridged)], spoken.console, kernel=MemoryKernel({})) == 0
    assert "not ours: VirtualMachine/default/desktop/red: bridge" in spoken.out
    assert spoken.err == ""


def test_a_plan_that_is_asked_says_which_backend_and_why(
    kernel: MemoryKernel, spoken: Spoken
) -> None:
    assert plan([str(DESKTOP)], spoken.console, kernel=kernel, verbose=True) == 0
    assert spoken.out.startswith("namespace desktop: memory (it is all there is)\n")


def test_show_says_where_the_rules_are_and_what_is_left_elsewhere(
    kernel: MemoryKernel, spoken: Spoken
) -> None:
    applied(kernel)
    desktop = kernel.spaces["desktop"]
    desktop.held = replace(desktop.held, leftovers=(Live(egress(), 3),))
    assert show([], spoken.console, kernel=kernel) == 0
    assert spoken.out.startswith("namespace desktop (memory: it is all there is)\n")
    assert spoken.out.endswith(
        "  and 1 left over in the other backend; the next apply removes them\n"
    )
    assert "spare" not in spoken.out


def test_show_in_json_says_where_the_rules_are(kernel: MemoryKernel, spoken: Spoken) -> None:
    applied(kernel)
    assert show([], spoken.console, kernel=kernel, output="json") == 0
    (desktop,) = json.loads(spoken.out)["namespaces"]
    assert (desktop["netns"], desktop["backend"]) == ("desktop", "memory")
    assert desktop["reason"] == "it is all there is"
    assert len(desktop["rules"]) == 10


def test_leftovers_are_planned_for_removal_and_go_with_an_apply(
    kernel: MemoryKernel, spoken: Spoken
) -> None:
    applied(kernel)
    desktop = kernel.spaces["desktop"]
    desktop.held = replace(desktop.held, leftovers=(Live(egress(), 3),))
    assert plan([str(DESKTOP)], spoken.console, kernel=kernel, detailed=True) == 2
    assert "(left over in the other backend)" in spoken.out
    applied(kernel)
    assert desktop.held.leftovers == ()
    assert len(desktop.held.live) == 10


@pytest.mark.parametrize(("count", "words"), [(1, "1 rule"), (2, "2 rules")])
def test_leftovers_are_counted(kernel: MemoryKernel, count: int, words: str) -> None:
    applied(kernel)
    desktop = kernel.spaces["desktop"]
    left = tuple(Live(egress(f"10.0.2.{number}"), number) for number in range(count))
    desktop.held = replace(desktop.held, leftovers=left)
    asked = Spoken()
    assert explain("tcp/22", asked.console, kernel=kernel) == 0
    assert asked.out.startswith(f"namespace desktop: {words} left over in the other backend\n")
    planned = Spoken()
    assert plan([str(DESKTOP)], planned.console, kernel=kernel, output="nft") == 0
    line = f"# {words} of ours in the other backend, to be removed by apply\n"
    assert line in planned.out.splitlines(keepends=True)


def test_clear_leaves_nothing_and_says_so(kernel: MemoryKernel, spoken: Spoken) -> None:
    applied(kernel)
    assert clear([], spoken.console, kernel=kernel, confirm=yes) == 0
    assert "Cleared namespace desktop" in spoken.out
    assert clear([], spoken.console, kernel=kernel, confirm=yes) == 0
    assert spoken.out.endswith("Nothing to clear.\n")


def test_two_names_of_one_namespace_are_refused(kernel: MemoryKernel, tmp_path: Path) -> None:
    kernel.spaces["laptop"] = kernel.spaces["desktop"]
    other = tmp_path / "laptop.yaml"
    other.write_text(DESKTOP.read_text().replace("name: desktop", "name: laptop"))
    with pytest.raises(BadManifest, match="desktop and laptop are one and the same namespace"):
        plan([str(DESKTOP), str(other)], Spoken().console, kernel=kernel)


@contextmanager
def running(status: Status, folder: Path) -> Iterator[Config]:
    """Somebody who says that he is a daemon with that configuration, and how he stands."""
    made = Server(
        "127.0.0.1", 0, status=lambda: status, beat=time.monotonic, metrics_text=bytes, log=print
    )
    with closing(made), held(str(folder), print):
        yield Config(state_dir=str(folder), listen=Listen(*made.address[:2]))


@pytest.mark.parametrize("same", [False, True], ids=["other ranges", "the same"])
def test_what_a_daemon_keeps_otherwise_is_told_to_be_undone(
    kernel: MemoryKernel, tmp_path: Path, spoken: Spoken, same: bool
) -> None:
    """It waits, or looks seldom: what was applied is still there when it is looked at again."""
    applied(kernel)
    live = tuple(kernel.spaces["desktop"].observe().live)
    one = Standing(netns="desktop", state=State.FAILING, since=0.0, live=live)
    kernel.spaces["desktop"] = MemoryNamespace(POD)  # somebody flushed it
    path = tmp_path / "edited.yaml"
    path.write_text(DESKTOP.read_text().replace("end: 8000", f"end: {8000 if same else 8001}"))
    status = Status(version="1", pid=1, started=0.0, namespaces=(one,))
    with running(status, tmp_path / "state") as daemon:
        code = apply([str(path)], spoken.console, kernel=kernel, daemon=daemon, confirm=yes)
    assert code == (0 if same else 75)
    told = "will undo it: other ranges are its own in namespace desktop"
    assert (told in spoken.err) is not same
