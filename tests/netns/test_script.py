"""`plan -o nft` is the same transaction as apply: nft accepts the script, it leads to the same
rules, and after it there is nothing left to do."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.commands.plan import plan
from agent.console import Console
from agent.kernel import sysctl
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from rules import nft as codec
from rules.desired import desire
from rules.model import Desired, Observed, Rule
from rules.plan import Table, diff
from tests.spaces import applied, emptied, manifest, nft, observed, pod, portranger, run, vm, within


@pytest.fixture(scope="module")
def pods() -> Iterator[tuple[str, str]]:
    with pod() as one, pod() as other:
        yield one, other


@pytest.fixture
def twins(pods: tuple[str, str]) -> tuple[str, str]:
    """Two namespaces that are alike: one for the script, one for apply."""
    return emptied(pods[0]), emptied(pods[1])


def planned(netns: str, ranges: str | None, *, output: str = "nft") -> str:
    """What `portranger plan` prints for that namespace."""
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, lambda: manifest(netns, ranges).encode())
    assert plan(["-"], console, kernel=LiveKernel(), output=output) == 0, err.getvalue()
    return out.getvalue()


def carry_out(netns: str, script: str) -> None:
    """Check the script with nft, then let nft and the reader of its comments do what it says."""
    within(netns, "nft", "-c", "-f", "-", stdin=script)
    for name, value in re.findall(r"^# sysctl -w (\S+)=(\S+)$", script, re.MULTILINE):
        with opened(netns) as descriptor, inside(descriptor, netns):
            sysctl.write(name, value)
    nft(netns, script)


def rules_of(seen: Observed) -> Counter[Rule]:
    return Counter(live.rule for live in seen.live)


STEPS: dict[str, tuple[str | None, ...]] = {
    "creating": ("1000-8000,1000-8000/udp",),
    "creating a catch-all": (None,),
    "creating single ports": ("1,22,65535,53/udp",),
    "adding": ("22", "22,80,8000-9000/udp"),
    "editing": ("1000-8000,22", "1000-5000,22"),
    "splitting": ("1000-8000", "1000-3999,4001-8000"),
    "joining": ("1000-3999,4001-8000", "1000-8000"),
    "removing": ("22,80,443", "80"),
    "narrowing a catch-all": (None, "22"),
    "widening to a catch-all": ("22", None),
    "hundreds of ranges": (
        ",".join(f"{first}-{first + 5}" for first in range(1000, 4000, 10)),
        ",".join(f"{first}-{first + 6}" for first in range(1000, 4000, 20)),
    ),
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_script_leads_where_apply_leads(
    twins: tuple[str, str], steps: tuple[str | None, ...]
) -> None:
    by_script, by_apply = twins
    for ranges in steps:
        carry_out(by_script, planned(by_script, ranges))
        applied(by_apply, vm("desktop", ranges))
        assert rules_of(observed(by_script)) == rules_of(observed(by_apply))
        assert planned(by_script, ranges, output="text").startswith("No changes. ")


def test_the_script_keeps_the_rules_that_stay(twins: tuple[str, str]) -> None:
    netns, _ = twins
    carry_out(netns, planned(netns, "22,80"))
    before = {live.rule: live.handle for live in observed(netns).live}
    carry_out(netns, planned(netns, "22,443"))
    after = {live.rule: live.handle for live in observed(netns).live}
    stayed = before.keys() & after.keys()
    assert {str(rule.ports) for rule in stayed if rule.ports} == {"22"}
    assert all(before[rule] == after[rule] for rule in stayed)


@pytest.mark.parametrize(
    "harm",
    [
        "add table inet portranger { flags dormant; }",
        "add chain inet portranger extra",
        "add set inet portranger mine { type ipv4_addr; }",
    ],
)
def test_the_script_makes_an_unsound_table_anew(twins: tuple[str, str], harm: str) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22,1000-8000/udp"))
    nft(netns, harm)
    script = planned(netns, "22,1000-8000/udp")
    assert "delete table inet portranger" in script
    carry_out(netns, script)
    assert planned(netns, "22,1000-8000/udp", output="text").startswith("No changes. ")
    assert not observed(netns).unsound


def test_the_script_removes_what_a_stranger_wrote(twins: tuple[str, str]) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22"))
    before = observed(netns)
    nft(netns, "insert rule inet portranger prerouting tcp dport { 22, 23 } drop")
    carry_out(netns, planned(netns, "22"))
    assert observed(netns) == before


@pytest.mark.parametrize("harm", ["", "add chain inet portranger extra"])
def test_the_script_deletes_the_table_when_nothing_is_desired(
    twins: tuple[str, str], harm: str
) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22"))
    nft(netns, harm)
    removal = diff(netns, Desired(), observed(netns))
    assert removal.table is Table.DELETE
    carry_out(netns, codec.script(removal))
    assert within(netns, "nft", "list", "tables") == ""


def test_a_script_from_an_old_look_changes_nothing(twins: tuple[str, str]) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22,80"))
    script = planned(netns, "443")
    applied(netns, vm("desktop", "80"))
    before = observed(netns)
    run("ip", "netns", "exec", netns, "nft", "-f", "-", stdin=script, code=1)
    assert observed(netns) == before


def test_the_command_prints_a_script_for_a_pipe(twins: tuple[str, str], tmp_path: Path) -> None:
    netns, _ = twins
    path = tmp_path / "vm.yaml"
    path.write_text(manifest(netns, "1000-8000,1000-8000/udp"))
    script = portranger("plan", "-o", "nft", "-f", path)
    assert script.returncode == 0, script.stderr
    assert not script.stderr
    carry_out(netns, script.stdout)
    again = portranger("plan", "--detailed-exitcode", "-f", path)
    assert (again.returncode, again.stdout.split(".")[0]) == (0, "No changes")
    nothing = portranger("plan", "-o", "nft", "-f", path)
    carry_out(netns, nothing.stdout)


def test_a_plan_against_nothing_is_accepted_by_nft(twins: tuple[str, str], tmp_path: Path) -> None:
    netns, _ = twins
    path = tmp_path / "vm.yaml"
    path.write_text(manifest(netns, "1000-8000"))
    script = portranger("plan", "--against", "empty", "-o", "nft", "-f", path).stdout
    carry_out(netns, script)
    assert planned(netns, "1000-8000", output="text").startswith("No changes. ")


def test_an_owner_of_128_bytes_passes_through_a_script(twins: tuple[str, str]) -> None:
    netns, _ = twins
    machine = vm("n" * (128 - 27), "80")
    with LiveKernel().opened(netns) as namespace:
        desired = desire([machine], namespace.surroundings())
        carry_out(netns, codec.script(diff(netns, desired, namespace.observe())))
    assert {live.rule for live in observed(netns).live} == desired.rules
