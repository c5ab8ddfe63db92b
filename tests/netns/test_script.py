"""`plan -o nft` is the same transaction as apply: nft accepts the script, it leads to the same
rules, and after it there is nothing left to do. So is `plan -o iptables`, family by family."""

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
from agent.kernel.netns import inside, opened
from rules import nft_script as nft_codec
from rules import xtables
from rules.model import Desired, Family, Observed, Rule
from rules.plan import Table, diff
from tests.netns.arenas import IptablesArena, NftablesArena
from tests.spaces import (
    BACKENDS,
    IPTABLES,
    LEGACY,
    NFTABLES,
    applied,
    asked,
    emptied,
    kernel,
    legacy,
    manifest,
    nft,
    observed,
    pod,
    portranger,
    run,
    saved,
    using,
    vm,
    wanted,
    within,
)

SCRIPTS = {NFTABLES: "nft", IPTABLES: "iptables"}
CODECS = {NFTABLES: nft_codec.script, IPTABLES: xtables.script}


@pytest.fixture(scope="module", params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test is run with each backend that it is not about."""
    with using(request.param) as asked_for:
        yield asked_for


only_nftables = pytest.mark.parametrize("backend", [NFTABLES], indirect=True)
only_iptables = pytest.mark.parametrize("backend", [IPTABLES], indirect=True)


@pytest.fixture(scope="module")
def pods() -> Iterator[tuple[str, str]]:
    with pod() as one, pod() as other:
        yield one, other


@pytest.fixture
def twins(pods: tuple[str, str]) -> tuple[str, str]:
    """Two namespaces that are alike: one for the script, one for apply."""
    return emptied(pods[0]), emptied(pods[1])


def planned(netns: str, ranges: str | None, *, output: str = "script") -> str:
    """What `portranger plan` prints for that namespace."""
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, lambda: manifest(netns, ranges).encode())
    form = SCRIPTS[asked()] if output == "script" else output
    assert plan(["-"], console, kernel=kernel(asked()), output=form) == 0, err.getvalue()
    return out.getvalue()


def carry_out(netns: str, script: str) -> None:
    """Check the script, then let the tool and the reader of its comments do what it says."""
    for words in tools(netns, "-c" if asked() == NFTABLES else "--test"):
        run(*words, stdin=script)
    for name, value in re.findall(r"^# sysctl -w (\S+)=(\S+)$", script, re.MULTILINE):
        with opened(netns) as descriptor, inside(descriptor, netns):
            sysctl.write(name, value)
    for transaction in re.split(r"^# transaction .*$", script, flags=re.MULTILINE):
        for words in tools(netns):
            run(*words, stdin=transaction)


def tools(netns: str, *more: str) -> list[list[str]]:
    """What to pipe a script to."""
    there = ["ip", "netns", "exec", netns]
    if asked() == NFTABLES:
        return [[*there, "nft", *more, "-f", "-"]]
    return [[*there, f"{tool}-restore", "-w", "--noflush", *more] for tool in LEGACY.values()]


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
        ",".join(f"{first}-{first + 5}" for first in range(1000, 2200, 10)),
        ",".join(f"{first}-{first + 6}" for first in range(1000, 2200, 20)),
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
    arena = NftablesArena(netns) if asked() == NFTABLES else IptablesArena(netns)
    carry_out(netns, planned(netns, "22,80"))
    arena.brand()
    before = {live.rule: arena.identity(live) for live in observed(netns).live}
    carry_out(netns, planned(netns, "22,443"))
    after = {live.rule: arena.identity(live) for live in observed(netns).live}
    stayed = before.keys() & after.keys()
    assert {str(rule.ports) for rule in stayed if rule.ports} == {"22"}
    assert all(before[rule] == after[rule] for rule in stayed)


@only_nftables
@pytest.mark.parametrize(
    "harm",
    [
        "add table inet portranger { flags dormant; }",
        "add chain inet portranger extra",
        "add counter inet portranger mine",
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
    if asked() == NFTABLES:
        nft(netns, "insert rule inet portranger prerouting tcp dport { 22, 23 } drop")
    else:
        legacy(netns, "-I PORTRANGER-PREROUTING -p tcp -m multiport --dports 22,23 -j ACCEPT")
    carry_out(netns, planned(netns, "22"))
    assert observed(netns) == before


@pytest.mark.parametrize(
    ("backend", "harm"),
    [
        (NFTABLES, ""),
        (NFTABLES, "add chain inet portranger extra"),
        (IPTABLES, "-A PREROUTING -s 203.0.113.7 -j ACCEPT"),
        (IPTABLES, "-A PORTRANGER-PREROUTING -s 203.0.113.7 -j ACCEPT"),
        (IPTABLES, "-A PREROUTING -m comment --comment portranger -j PORTRANGER-PREROUTING"),
    ],
    indirect=["backend"],
)
def test_the_script_deletes_the_table_when_nothing_is_desired(
    twins: tuple[str, str], harm: str
) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22"))
    if asked() == NFTABLES:
        nft(netns, harm)
    else:
        legacy(netns, harm, families=[Family.IP])
    removal = diff(netns, Desired(), observed(netns))
    assert removal.table is Table.DELETE
    carry_out(netns, CODECS[asked()](removal))
    assert within(netns, "nft", "list", "tables") == ""
    assert "PORTRANGER" not in saved(netns)
    assert ("203.0.113.7" in saved(netns)) == harm.startswith("-A PREROUTING -s")


def test_a_script_from_an_old_look_changes_nothing(twins: tuple[str, str]) -> None:
    netns, _ = twins
    applied(netns, vm("desktop", "22,80"))
    script = planned(netns, "443")
    applied(netns, vm("desktop", "80"))
    before = observed(netns)
    for words in tools(netns):
        assert run(*words, stdin=script, code=None).returncode != 0
    assert observed(netns) == before


def test_the_command_prints_a_script_for_a_pipe(twins: tuple[str, str], tmp_path: Path) -> None:
    netns, _ = twins
    path = tmp_path / "vm.yaml"
    path.write_text(manifest(netns, "1000-8000,1000-8000/udp"))
    form = SCRIPTS[asked()]
    script = portranger("plan", "-o", form, "-f", path)
    assert script.returncode == 0, script.stderr
    assert not script.stderr
    carry_out(netns, script.stdout)
    again = portranger("plan", "--detailed-exitcode", "-f", path)  # which finds out the backend
    assert (again.returncode, again.stdout.split(".")[0]) == (0, "No changes")
    nothing = portranger("plan", "-o", form, "-f", path)
    carry_out(netns, nothing.stdout)
    assert not applied(netns).empty


def test_a_plan_against_nothing_is_accepted(twins: tuple[str, str], tmp_path: Path) -> None:
    netns, _ = twins
    path = tmp_path / "vm.yaml"
    path.write_text(manifest(netns, "1000-8000"))
    form = SCRIPTS[asked()]
    script = portranger("plan", "--against", "empty", "-o", form, "-f", path).stdout
    carry_out(netns, script)
    assert planned(netns, "1000-8000", output="text").startswith("No changes. ")


@only_iptables
@pytest.mark.parametrize("ranges", ["1000-8000,1000-8000/udp,22", None])
def test_the_script_is_accepted_by_iptables_nft_too(
    twins: tuple[str, str], ranges: str | None
) -> None:
    netns, _ = twins
    script = planned(netns, ranges)
    for tool in ("iptables-nft-restore", "ip6tables-nft-restore"):
        within(netns, tool, "--noflush", "--test", stdin=script)
    assert within(netns, "nft", "list", "ruleset") == ""


def test_an_owner_of_128_bytes_passes_through_a_script(twins: tuple[str, str]) -> None:
    netns, _ = twins
    desired = wanted(netns, [vm("n" * (128 - 27), "80")])
    carry_out(netns, CODECS[asked()](diff(netns, desired, observed(netns))))
    assert {live.rule for live in observed(netns).live} == desired.rules
