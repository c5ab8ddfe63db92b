"""Which backend a namespace gets, and why; and how one takes over from the other."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent.kernel.live import LiveKernel
from agent.reconcile import converge
from rules.model import Family, Observed, Rule
from rules.plan import diff
from tests.spaces import (
    BACKENDS,
    IPTABLES,
    NFTABLES,
    applied,
    emptied,
    kernel,
    legacy,
    manifest,
    nft,
    observed,
    pod,
    portranger,
    require,
    saved,
    vm,
    wanted,
    within,
)

DESKTOP = vm("desktop", "1000-8000,1000-8000/udp")
HIS = "-A POSTROUTING -s 198.51.100.0/24 -p tcp -j MASQUERADE"


@pytest.fixture(scope="module")
def only() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    return emptied(only)


def other_than(backend: str) -> str:
    return NFTABLES if backend == IPTABLES else IPTABLES


def chosen(netns: str) -> tuple[str, str]:
    with kernel("auto").opened(netns) as namespace:
        return namespace.backend, namespace.reason


def rules_of(seen: Observed) -> Counter[Rule]:
    return Counter(live.rule for live in seen.live)


def held(netns: str) -> set[str]:
    """The backends that hold something of ours, as their own tools tell it."""
    found = {NFTABLES} if "inet portranger" in within(netns, "nft", "list", "tables") else set()
    return found | ({IPTABLES} if "PORTRANGER" in saved(netns) else set())


# ----------------------------------------------------------------------------------- the choice

Setting = Callable[[str], object]


def nothing(_: str) -> None:
    """Leaves it empty."""


def looks(netns: str) -> None:
    """The table comes to life by being looked at, and stays empty."""
    within(netns, "iptables-legacy", "-w", "-t", "nat", "-S")


def filters(netns: str) -> None:
    within(netns, "iptables-legacy", "-w", "-A", "INPUT", "-p", "tcp", "-j", "ACCEPT")


def translates(netns: str) -> None:
    legacy(netns, HIS, families=[Family.IP])


def translates_ipv6(netns: str) -> None:
    legacy(netns, "-A PREROUTING -p udp -j ACCEPT", families=[Family.IP6])


def translates_with_iptables_nft(netns: str) -> None:
    within(netns, "iptables-nft", "-w", "-t", "nat", *HIS.split())


def has_a_table(netns: str) -> None:
    nft(netns, "add table ip nat; add chain ip nat p { type nat hook prerouting priority -100; }")


def ours_in_nftables(netns: str) -> None:
    applied(netns, DESKTOP, backend=NFTABLES)


def ours_in_iptables(netns: str) -> None:
    applied(netns, DESKTOP, backend=IPTABLES)


NO_LEGACY = "no legacy NAT rules here"
CHOICES: dict[str, tuple[tuple[Setting, ...], str, str]] = {
    "nothing": ((nothing,), NFTABLES, NO_LEGACY),
    "an empty legacy table": ((looks,), NFTABLES, NO_LEGACY),
    "legacy rules that filter": ((filters,), NFTABLES, NO_LEGACY),
    "legacy rules that translate": ((translates,), IPTABLES, "1 rule of others"),
    "legacy rules of IPv6": ((translates_ipv6,), IPTABLES, "1 rule of others"),
    "legacy rules of both": ((translates, translates_ipv6), IPTABLES, "2 rules of others"),
    "iptables-nft": ((translates_with_iptables_nft,), NFTABLES, "iptables-nft writes is nftables"),
    "an nftables table": ((has_a_table,), NFTABLES, NO_LEGACY),
    "both": ((has_a_table, translates), IPTABLES, "1 rule of others"),
    "ours in nftables": ((ours_in_nftables,), NFTABLES, "our table is there"),
    "ours in iptables": ((ours_in_iptables,), IPTABLES, "our chains are in the legacy tables"),
    "ours in nftables, his in iptables": (
        (ours_in_nftables, translates),
        NFTABLES,
        "our table is there",
    ),
    "ours in iptables, his in nftables": (
        (ours_in_iptables, has_a_table),
        IPTABLES,
        "our chains are in the legacy tables",
    ),
}


@pytest.mark.parametrize(("settings", "backend", "reason"), CHOICES.values(), ids=CHOICES)
def test_the_choice_follows_what_is_live_and_stays(
    netns: str, settings: tuple[Setting, ...], backend: str, reason: str
) -> None:
    require(backend)
    for act in settings:
        act(netns)
    first = chosen(netns)
    assert first[0] == backend
    assert reason in first[1]
    assert chosen(netns) == first, "another choice at the second look"
    applied(netns, DESKTOP)
    assert held(netns) == {backend}
    for _ in range(3):
        assert chosen(netns)[0] == backend
        assert applied(netns, DESKTOP).empty
    applied(netns, vm("desktop", "22"))
    assert held(netns) == {backend}
    applied(netns)
    assert held(netns) == set()


def test_what_others_do_later_does_not_change_the_choice(netns: str) -> None:
    require(IPTABLES)
    applied(netns, DESKTOP)
    translates(netns)
    assert chosen(netns)[0] == NFTABLES
    emptied(netns)
    translates(netns)
    applied(netns, DESKTOP)
    legacy(netns, HIS.replace("-A", "-D", 1), families=[Family.IP])
    has_a_table(netns)
    assert chosen(netns)[0] == IPTABLES
    assert applied(netns, DESKTOP).empty


def test_the_reason_is_told_by_plan_and_show(netns: str) -> None:
    require(IPTABLES)
    translates(netns)
    told = f"{IPTABLES} (the legacy NAT tables hold 1 rule of others)"
    planned = portranger("plan", "-v", "-f", "-", stdin=manifest(netns, "22"))
    assert f"namespace {netns}: {told}" in planned.stdout
    assert portranger("apply", "--yes", "-f", "-", stdin=manifest(netns, "22")).returncode == 0
    assert held(netns) == {IPTABLES}
    shown = portranger("show", "--netns", netns).stdout
    assert f"namespace {netns} ({IPTABLES}: our chains are in the legacy tables)" in shown
    listed = json.loads(portranger("show", "--netns", netns, "-o", "json").stdout)
    (one,) = listed["namespaces"]
    assert (one["backend"], one["reason"]) == (IPTABLES, "our chains are in the legacy tables")
    assert len(one["rules"]) == len(observed(netns).live)
    asked = portranger("plan", "-v", "--backend", NFTABLES, "-f", "-", stdin=manifest(netns, "22"))
    assert f"namespace {netns}: {NFTABLES} (asked for)" in asked.stdout


def test_the_node_has_nftables_for_its_services_though_nobody_asked() -> None:
    with pod() as name:
        shown = within(name, sys.executable, "-m", "agent.entry", "show", "--netns", "node:self")
    assert "namespace node:self (nftables: Services are always published with nftables)" in shown


# ----------------------------------------------------------------------- from one to the other


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_shows_what_is_left_over_and_apply_moves_it(
    netns: str, backend: str, tmp_path: Path
) -> None:
    require(IPTABLES)
    other = other_than(backend)
    applied(netns, DESKTOP, backend=backend)
    count = len(observed(netns).live)
    path = tmp_path / "vm.yaml"
    path.write_text(manifest(netns, "1000-8000,1000-8000/udp"))

    planned = portranger("plan", "--backend", other, "--detailed-exitcode", "-f", path)
    assert planned.returncode == 2, planned.stderr
    assert planned.stdout.count("(left over in the other backend)") == count
    assert f"{count} to add, 0 to change, {count} to remove" in planned.stdout
    assert held(netns) == {backend}, "a plan changed something"

    moved = portranger("apply", "--yes", "--backend", other, "-f", path)
    assert moved.returncode == 0, moved.stderr
    assert held(netns) == {other}
    assert rules_of(observed(netns, other)) == Counter(wanted(netns, [DESKTOP]).rules)
    again = portranger("plan", "--backend", other, "--detailed-exitcode", "-f", path)
    assert (again.returncode, again.stdout.split(".")[0]) == (0, "No changes")
    assert chosen(netns)[0] == other, "the choice does not stick"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_somebody_left_over_in_the_other_backend_is_found_and_removed(
    netns: str, backend: str
) -> None:
    """As a crash in the middle of a move leaves it: both hold everything."""
    other = other_than(backend)
    applied(netns, DESKTOP, backend=other)
    left = observed(netns, other).live
    with kernel(backend).opened(netns) as namespace:
        plan = diff(netns, wanted(netns, [DESKTOP]), namespace.observe())
        namespace._backends.tables.commit(plan)  # and then it crashed
    assert held(netns) == set(BACKENDS)
    seen = observed(netns, backend)
    assert Counter(one.rule for one in seen.leftovers) == Counter(  # type: ignore[union-attr]
        one.rule for one in left
    )
    before = seen.live
    done = applied(netns, DESKTOP, backend=backend)
    assert len(done.leftovers) == len(left)
    assert not done.add
    assert held(netns) == {backend}
    assert observed(netns, backend).live == before, "what was right was written again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_clear_clears_both(netns: str, backend: str) -> None:
    applied(netns, DESKTOP, backend=backend)
    with kernel(other_than(backend)).opened(netns) as namespace:
        plan = diff(netns, wanted(netns, [DESKTOP]), namespace.observe())
        namespace._backends.tables.commit(plan)
    assert held(netns) == set(BACKENDS)
    translates(netns)
    assert portranger("clear", "--yes", "--netns", netns).returncode == 0
    assert held(netns) == set()
    assert "198.51.100.0/24" in saved(netns)


def test_a_move_leaves_the_rules_of_others_alone(netns: str) -> None:
    translates(netns)
    has_a_table(netns)
    before = saved(netns), within(netns, "nft", "list", "table", "ip", "nat")
    for backend in (*BACKENDS, *BACKENDS):
        applied(netns, DESKTOP, backend=backend)
        assert held(netns) == {backend}
    applied(netns)
    assert (saved(netns), within(netns, "nft", "list", "table", "ip", "nat")) == before


def test_two_kernels_with_workers_of_their_own_agree(netns: str) -> None:
    require(IPTABLES)
    with closing(LiveKernel(IPTABLES)) as one, closing(LiveKernel(IPTABLES)) as other:
        for number in range(3):
            for each in (one, other):
                with each.opened(netns) as namespace:
                    converge(netns, wanted(netns, [vm("a", f"{1000 + number}")]), namespace)
                    assert rules_of(namespace.observe()) == rules_of(observed(netns))
