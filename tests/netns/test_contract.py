"""What every backend keeps to: one table of befores, strangers and afters, for all of them.

After converge the kernel holds what is desired and nothing else of ours, what was right before
was not touched, and a second converge finds nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from agent.errors import NoNamespace, Stale
from agent.reconcile import converge
from rules.desired import desire
from rules.model import (
    POLICED,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Machine,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.plan import Plan, Table, diff
from rules.ports import PortRange
from rules.values import replace
from tests.netns.arenas import ARENAS, Arena, entered
from tests.spaces import NFTABLES, SURROUNDINGS, emptied, nft, observed, pod, vm, wanted, within
from tests.spaces import applied as apply_live

Stranger = Callable[[Arena], None]


@pytest.fixture(scope="module", params=ARENAS)
def one_of_each(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with ARENAS[request.param]() as made:
        yield made


@pytest.fixture
def arena(one_of_each: Arena) -> Arena:
    one_of_each.reset()
    return one_of_each


def apply(arena: Arena, *machines: Machine) -> Plan:
    with entered(arena) as namespace:
        return converge(arena.name, desire(machines, namespace.surroundings()), namespace)


def look(arena: Arena) -> Observed:
    with entered(arena) as namespace:
        return namespace.observe(["net.ipv4.ip_forward"])


def left_to_do(arena: Arena, *machines: Machine) -> Plan:
    with entered(arena) as namespace:
        desired = desire(machines, namespace.surroundings())
        seen = namespace.observe([sysctl.name for sysctl in desired.sysctls])
    return diff(arena.name, desired, seen)


def the_rule(arena: Arena, ports: str | None = None, chain: Chain = Chain.PREROUTING) -> Live:
    return next(
        live
        for live in look(arena).live
        if live.rule.chain is chain and (ports is None or str(live.rule.ports) == ports)
    )


# ---------------------------------------------------------------- what a stranger may do to us


def nobody(_: Arena) -> None:
    """Leaves everything as it is."""


def scribbles(arena: Arena) -> None:
    arena.scribble()


def scribbles_thrice(arena: Arena) -> None:
    for _ in range(3):
        arena.scribble()


def writes_a_look_alike(arena: Arena) -> None:
    rule = the_rule(arena).rule
    arena.write(replace(rule, protocol=Protocol.TCP, ports=PortRange(31000, 31009)))


def writes_for_another_owner(arena: Arena) -> None:
    arena.write(replace(the_rule(arena).rule, owner="VirtualMachine/default/stranger/red"))


def writes_without_an_owner(arena: Arena) -> None:
    arena.write(replace(the_rule(arena).rule, owner=""))


def duplicates(arena: Arena) -> None:
    arena.write(the_rule(arena).rule)


def duplicates_everything(arena: Arena) -> None:
    for live in look(arena).live:
        arena.write(live.rule)


def widens(arena: Arena) -> None:
    live = the_rule(arena)
    arena.rewrite(live, replace(live.rule, protocol=Protocol.TCP, ports=PortRange(1, 65535)))


def widens_a_little(arena: Arena) -> None:
    live = the_rule(arena)
    assert live.rule.ports is not None
    ports = PortRange(live.rule.ports.first, live.rule.ports.last + 2)
    arena.rewrite(live, replace(live.rule, ports=ports))


def diverts(arena: Arena) -> None:
    live = the_rule(arena)
    arena.rewrite(live, replace(live.rule, to=IPv4Address("203.0.113.66")))


def moves_to_another_link(arena: Arena) -> None:
    live = the_rule(arena)
    arena.rewrite(live, replace(live.rule, interface="eth6"))


def renames_the_owner(arena: Arena) -> None:
    live = the_rule(arena)
    arena.rewrite(live, replace(live.rule, owner="somebody else"))


def turns_snat_into_masquerade(arena: Arena) -> None:
    live = next(one for one in look(arena).live if one.rule.chain is Chain.POSTROUTING)
    other = None if live.rule.to else IPv4Address("192.0.2.9")
    arena.rewrite(live, replace(live.rule, to=other))


def erases(arena: Arena) -> None:
    arena.erase(the_rule(arena))


def erases_all_of_a_chain(arena: Arena) -> None:
    for live in look(arena).live:
        if live.rule.chain is Chain.OUTPUT:
            arena.erase(live)


def flushes(arena: Arena) -> None:
    arena.flush()


def drops(arena: Arena) -> None:
    arena.drop()


def does_it_all(arena: Arena) -> None:
    for act in (duplicates_everything, scribbles, diverts, erases_all_of_a_chain, widens):
        act(arena)


def does_much(arena: Arena) -> None:
    for act in (writes_a_look_alike, scribbles, diverts, erases_all_of_a_chain, widens_a_little):
        act(arena)


# ---------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Case:
    """Machines before, what a stranger does, machines after."""

    says: str
    before: tuple[Machine, ...]
    after: tuple[Machine, ...]
    stranger: Stranger = nobody


BOTH = "1000-8000,1000-8000/udp"
DESKTOP = (vm("desktop", BOTH),)
NEIGHBOURS = (vm("desktop", "1000-1999"), vm("server", "2000-2999"))
CUSTOM = {"ipv4": "172.16.9.0/29", "ipv6": "fd77:9::/64"}


def crowd(*more: str, number: int = 20) -> tuple[Machine, ...]:
    """Two machines with so many ranges in one family that nftables holds them in maps."""
    tcp = [f"{first}-{first + 5}" for first in range(1000, 1000 + 10 * number, 10)]
    udp = [f"{first}-{first + 5}/udp" for first in range(5000, 5000 + 10 * number, 10)]
    mine = ",".join([*tcp[::2], *udp, *more])
    return (vm("desktop", mine, entry="eth0.100"), vm("server", ",".join(tcp[1::2]), **SERVER))


SERVER = {"entry": "eth0.100", **CUSTOM}
CROWD = crowd()

CASES = [
    Case("nothing becomes nothing", (), ()),
    Case("a first range is set up", (), DESKTOP),
    Case("a first single port is set up", (), (vm("a", "22"),)),
    Case("the lowest and the highest port are set up", (), (vm("a", "1,65535,1/udp,65535/udp"),)),
    Case("all ports of one protocol are set up", (), (vm("a", "1-65535"),)),
    Case("a machine that declares nothing gets everything", (), (vm("a", None),)),
    Case("what is there stays", DESKTOP, DESKTOP),
    Case("a catch-all that is there stays", (vm("a", None),), (vm("a", None),)),
    Case("the last machine takes the table with it", DESKTOP, ()),
    Case("a catch-all takes the table with it", (vm("a", None),), ()),
    Case("a range is added", (vm("a", "80"),), (vm("a", "80,443"),)),
    Case("a range is removed", (vm("a", "80,443"),), (vm("a", "80"),)),
    Case("a range grows", (vm("a", "80,1000-2000"),), (vm("a", "80,1000-3000"),)),
    Case("a range shrinks", (vm("a", "80,1000-2000"),), (vm("a", "80,1000-1500"),)),
    Case("a range is split", (vm("a", "1000-2000"),), (vm("a", "1000-1400,1600-2000"),)),
    Case("two ranges are joined", (vm("a", "1000-1400,1600-2000"),), (vm("a", "1000-2000"),)),
    Case("touching ranges are one", (vm("a", "1-5,6-9"),), (vm("a", "1-9"),)),
    Case("a protocol changes", (vm("a", "53,80"),), (vm("a", "53/udp,80"),)),
    Case("ranges become a catch-all", DESKTOP, (vm("desktop", None),)),
    Case("a catch-all becomes ranges", (vm("desktop", None),), DESKTOP),
    Case("a second machine comes", NEIGHBOURS[:1], NEIGHBOURS),
    Case("a second machine goes", NEIGHBOURS, NEIGHBOURS[1:]),
    Case("a machine takes the place of another", NEIGHBOURS[:1], (vm("other", "1000-1999"),)),
    Case("an interface is renamed", DESKTOP, (vm("desktop", BOTH, interface="blue"),)),
    Case("an entry with a dot in its name", (), (vm("a", BOTH, entry="eth0.100"),)),
    Case("the entry moves", DESKTOP, (vm("desktop", BOTH, entry="eth0.100"),)),
    Case("an entry that has IPv6 only", (), (vm("a", BOTH, entry="eth6"),)),
    Case("a network of its own", (), (vm("a", BOTH, **CUSTOM),)),
    Case("the network moves", DESKTOP, (vm("desktop", BOTH, **CUSTOM),)),
    Case("an owner of 128 bytes", (), (vm("n" * (128 - 27), "80"),)),
    Case("an owner of 300 bytes", (), (vm("n" * 250, "80", interface="i" * 25),)),
    Case("two long owners that differ at the end", (), (vm("n" * 250, "80"), vm("n" * 251, "81"))),
    Case("a foreign rule goes", DESKTOP, DESKTOP, scribbles),
    Case("foreign rules go", DESKTOP, (vm("desktop", "22"),), scribbles_thrice),
    Case("a foreign rule goes with the table", DESKTOP, (), scribbles),
    Case("a look-alike goes", DESKTOP, DESKTOP, writes_a_look_alike),
    Case("a rule of a machine that is not there goes", DESKTOP, DESKTOP, writes_for_another_owner),
    Case("a rule without an owner goes", DESKTOP, DESKTOP, writes_without_an_owner),
    Case("a duplicate goes", DESKTOP, DESKTOP, duplicates),
    Case("every duplicate goes", DESKTOP, DESKTOP, duplicates_everything),
    Case("a widened range is repaired", DESKTOP, DESKTOP, widens),
    Case("a diverted range is repaired", DESKTOP, DESKTOP, diverts),
    Case("a range on another link is repaired", DESKTOP, DESKTOP, moves_to_another_link),
    Case("a renamed owner is repaired", DESKTOP, DESKTOP, renames_the_owner),
    Case("a changed source NAT is repaired", DESKTOP, DESKTOP, turns_snat_into_masquerade),
    Case("an erased rule comes back", DESKTOP, DESKTOP, erases),
    Case("an erased chain comes back", DESKTOP, DESKTOP, erases_all_of_a_chain),
    Case("a flushed table comes back", DESKTOP, DESKTOP, flushes),
    Case("a flushed table goes", DESKTOP, (), flushes),
    Case("a dropped table comes back", DESKTOP, DESKTOP, drops),
    Case("a dropped table stays away", DESKTOP, (), drops),
    Case("everything at once is repaired", DESKTOP, (vm("desktop", None),), does_it_all),
    Case("everything at once goes", DESKTOP, (), does_it_all),
]
CROWDED_CASES = [
    Case("many ranges are set up", (), CROWD),
    Case("many ranges that are there stay", CROWD, CROWD),
    Case("many ranges take the table with them", CROWD, ()),
    Case("a range is added to many", CROWD, crowd("7")),
    Case("a range up to the last port is added to many", CROWD, crowd("65000-65535")),
    Case("a range is removed from many", crowd("7"), CROWD),
    Case("a range of many grows", crowd("7-8"), crowd("7-9")),
    Case("a range of many grows to its neighbour", crowd("7-8"), crowd("7-999")),
    Case("a range of many is split", crowd("7-20"), crowd("7-10,12-20")),
    Case("two ranges of many are joined", crowd("7-10,12-20"), crowd("7-20")),
    Case("many ranges become a catch-all", CROWD, (vm("desktop", None),)),
    Case("a catch-all becomes many ranges", (vm("desktop", None),), CROWD),
    Case("one of two machines with many ranges goes", CROWD, CROWD[:1]),
    Case("a foreign rule beside many goes", CROWD, CROWD, scribbles),
    Case("a look-alike beside many goes", CROWD, CROWD, writes_a_look_alike),
    Case("a rule without an owner beside many goes", CROWD, CROWD, writes_without_an_owner),
    Case("a duplicate of one of many goes", CROWD, CROWD, duplicates),
    Case("every duplicate of many goes", CROWD, CROWD, duplicates_everything),
    Case("a widened range of many is repaired", CROWD, CROWD, widens_a_little),
    Case("a diverted range of many is repaired", CROWD, CROWD, diverts),
    Case("one of many on another link is repaired", CROWD, CROWD, moves_to_another_link),
    Case("a renamed owner of one of many is repaired", CROWD, CROWD, renames_the_owner),
    Case("an erased one of many comes back", CROWD, CROWD, erases),
    Case("an erased chain of many comes back", CROWD, CROWD, erases_all_of_a_chain),
    Case("a flushed table with many comes back", CROWD, CROWD, flushes),
    Case("a flushed table with many goes", CROWD, (), flushes),
    Case("a dropped table with many comes back", CROWD, CROWD, drops),
    Case("much at once is repaired among many", CROWD, crowd("7"), does_much),
    Case("much at once goes with many", CROWD, (), does_much),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says.replace(" ", "-"))
def test_the_kernel_comes_to_hold_what_is_desired(arena: Arena, case: Case) -> None:
    assert_comes_true(arena, case)


@pytest.mark.parametrize("one_of_each", ["memory", NFTABLES], indirect=True)
@pytest.mark.parametrize("case", CROWDED_CASES, ids=lambda case: case.says.replace(" ", "-"))
def test_the_kernel_comes_to_hold_many_ranges(arena: Arena, case: Case) -> None:
    """Only nftables has another shape for them; iptables would take a while for nothing new."""
    assert_comes_true(arena, case)


def assert_comes_true(arena: Arena, case: Case) -> None:
    apply(arena, *case.before)
    case.stranger(arena)
    arena.brand()
    before = look(arena)

    apply(arena, *case.after)

    after = look(arena)
    desired = desire(case.after, SURROUNDINGS)
    assert left_to_do(arena, *case.after).empty
    rules = [live.rule for live in after.live if live.rule not in desired.kept]
    assert Counter(rules) == Counter(desired.rules)
    assert not after.foreign
    assert not after.unsound
    assert after.table is bool(case.after)
    assert identities_of_what_stays(arena, before, desired) <= identities(arena, after)
    assert apply(arena, *case.after) == Plan(netns=arena.name), "the second converge did something"
    assert look(arena) == after


def identities(arena: Arena, seen: Observed) -> set[tuple[int, object]]:
    return {(arena.identity(live), live.rule) for live in seen.live}


def identities_of_what_stays(
    arena: Arena, before: Observed, desired: Desired
) -> set[tuple[int, object]]:
    """The first of each rule that is there and should be: the same rule must be there after."""
    found: dict[object, int] = {}
    for live in before.live:
        if live.rule in desired.rules:
            found.setdefault(live.rule, arena.identity(live))
    return {(identity, rule) for rule, identity in found.items()}


# --------------------------------------------------------------------------------------- filters

GUESTS = {Family.IP: ip_address("10.0.2.2"), Family.IP6: ip_address("fd10:0:2::2")}
SOME = ("10.1.0.0/16", "10.3.4.5/32", "fd00:1::/32", "2001:db8::7/128")
NOBODY: Desired = Desired()


def fence(*ranges: str, peers: tuple[str, ...] | None = SOME, end: str = "destination") -> Desired:
    """The guest is cut off at one end, but for these TCP ports to or from these peers."""
    sets = {
        Peers(family, "a1"): frozenset(
            one for one in map(ip_network, peers or ()) if Family.of(one.network_address) is family
        )
        for family in Family
    }
    rules: set[Rule] = set()
    for family, guest in GUESTS.items():
        chain = Chain.FORWARD if end == "destination" else Chain.EGRESS
        rule = Rule(chain=chain, family=family, owner="NetworkPolicy/default/web")
        guard = replace(rule, **{end: guest})
        rules |= {replace(rule, accepts=True), guard}
        for text in ranges:
            first, _, last = text.partition("-")
            ports = PortRange(int(first), int(last or first))
            name = Peers(family, "a1") if peers is not None else None
            rules.add(replace(guard, accepts=True, protocol=Protocol.TCP, ports=ports, peers=name))
    named = {rule.peers for rule in rules}
    return Desired(
        rules=frozenset(rules), sets={one: held for one, held in sets.items() if one in named}
    )


def both(*wishes: Desired) -> Desired:
    return Desired(
        rules=frozenset(rule for one in wishes for rule in one.rules),
        sets={peers: held for one in wishes for peers, held in one.sets.items()},
    )


def ranges(*machines: Machine) -> Desired:
    return replace(desire(machines, SURROUNDINGS), sysctls=frozenset())


def filters(arena: Arena) -> list[Live]:
    return [live for live in look(arena).live if live.rule.chain in POLICED]


def the_guard(arena: Arena) -> Live:
    return next(live for live in filters(arena) if live.rule.guards)


def who_is_let_in(arena: Arena) -> Live:
    return next(live for live in filters(arena) if live.rule.ports)


def scribbles_among_filters(arena: Arena) -> None:
    arena.scribble(Chain.FORWARD)


def lets_all_ports_in(arena: Arena) -> None:
    live = who_is_let_in(arena)
    arena.rewrite(live, replace(live.rule, ports=PortRange(1, 65535)))


def lets_everybody_in(arena: Arena) -> None:
    live = who_is_let_in(arena)
    arena.rewrite(live, replace(live.rule, peers=None, peer=None))


def takes_the_guard_away(arena: Arena) -> None:
    arena.erase(the_guard(arena))


def turns_the_guard_around(arena: Arena) -> None:
    live = the_guard(arena)
    arena.rewrite(live, replace(live.rule, accepts=True))


def puts_the_guard_first(arena: Arena) -> None:
    guard = the_guard(arena)
    arena.erase(guard)
    arena.shove(guard.rule)


def puts_another_guard_first(arena: Arena) -> None:
    arena.shove(the_guard(arena).rule)


def duplicates_all_filters(arena: Arena) -> None:
    for live in filters(arena):
        arena.write(live.rule)


@dataclass(frozen=True)
class Filtered:
    """What is desired before, what a stranger does, what is desired after."""

    says: str
    before: Desired
    after: Desired
    stranger: Stranger = nobody


WEB = fence("80-90", "443")
FILTER_CASES = [
    Filtered("a first fence is set up", NOBODY, WEB),
    Filtered("a fence without a gate is set up", NOBODY, fence()),
    Filtered("a fence with a gate for everybody is set up", NOBODY, fence("22", peers=None)),
    Filtered("a fence with a gate for nobody is set up", NOBODY, fence("22", peers=())),
    Filtered("a fence around what leaves is set up", NOBODY, fence("53", end="source")),
    Filtered("a fence that is there stays", WEB, WEB),
    Filtered("a fence goes", WEB, NOBODY),
    Filtered("a gate is added", WEB, fence("80-90", "443", "8000-9000")),
    Filtered("a gate is removed", WEB, fence("443")),
    Filtered("a gate grows", WEB, fence("80-95", "443")),
    Filtered("gates become one", WEB, fence("80-443")),
    Filtered("a peer comes", WEB, fence("80-90", "443", peers=(*SOME, "10.9.9.9/32"))),
    Filtered("a peer goes", WEB, fence("80-90", "443", peers=SOME[1:])),
    Filtered("every peer goes", WEB, fence("80-90", "443", peers=())),
    Filtered("the other end is fenced as well", WEB, both(WEB, fence("53", end="source"))),
    Filtered("one of two ends is opened", both(WEB, fence("53", end="source")), WEB),
    Filtered("a fence and ranges are set up", NOBODY, both(WEB, ranges(*DESKTOP))),
    Filtered("a fence and ranges go", both(WEB, ranges(*DESKTOP)), NOBODY),
    Filtered("a fence comes before ranges", ranges(*DESKTOP), both(WEB, ranges(vm("a", "80")))),
    Filtered("a fence leaves ranges", both(WEB, ranges(*DESKTOP)), ranges(vm("a", "80"))),
    Filtered(
        "a fence and ranges change",
        both(WEB, ranges(*DESKTOP)),
        both(fence("443", "22"), ranges(vm("desktop", "22,80"))),
    ),
    Filtered("a foreign filter goes", WEB, WEB, scribbles_among_filters),
    Filtered("a foreign filter goes with the fence", WEB, NOBODY, scribbles_among_filters),
    Filtered("a widened gate is repaired", WEB, WEB, lets_all_ports_in),
    Filtered("a gate for everybody is repaired", WEB, WEB, lets_everybody_in),
    Filtered("a missing guard comes back", WEB, WEB, takes_the_guard_away),
    Filtered("a guard that accepts is repaired", WEB, WEB, turns_the_guard_around),
    Filtered("a guard before others is put behind them", WEB, WEB, puts_the_guard_first),
    Filtered("a second guard before others goes", WEB, WEB, puts_another_guard_first),
    Filtered("duplicates of filters go", WEB, WEB, duplicates_all_filters),
    Filtered("a flushed fence comes back", WEB, WEB, flushes),
    Filtered("a dropped fence comes back", WEB, WEB, drops),
    Filtered("a flushed fence goes", WEB, NOBODY, flushes),
]


@pytest.mark.parametrize("case", FILTER_CASES, ids=lambda case: case.says.replace(" ", "-"))
def test_the_kernel_comes_to_hold_filters(arena: Arena, case: Filtered) -> None:
    before, after = arena.held(case.before), arena.held(case.after)
    with entered(arena) as namespace:
        converge(arena.name, before, namespace)
    case.stranger(arena)
    arena.brand()
    was = look(arena)
    with entered(arena) as namespace:
        converge(arena.name, after, namespace)
    now = look(arena)
    assert diff(arena.name, after, now).empty
    assert Counter(live.rule for live in now.live) == Counter(after.rules)
    assert not now.foreign
    assert now.table is bool(after.rules)
    assert identities_of_what_stays(arena, was, after) <= identities(arena, now)
    with entered(arena) as namespace:
        assert converge(arena.name, after, namespace) == Plan(netns=arena.name), (
            "the second converge did something"
        )
    assert look(arena) == now


def test_every_arena_has_the_same_links(arena: Arena) -> None:
    with entered(arena) as namespace:
        assert namespace.surroundings() == SURROUNDINGS


def test_settings_are_made_and_stay_when_the_machine_goes(arena: Arena) -> None:
    assert look(arena).sysctls == {"net.ipv4.ip_forward": "0"}
    done = apply(arena, *DESKTOP)
    assert {change.name: change.after for change in done.sysctls} == {
        "net.ipv4.ip_forward": "1",
        "net.ipv4.conf.k6t-eth0.route_localnet": "1",
        "net.ipv6.conf.all.forwarding": "1",
        "net.netfilter.nf_conntrack_tcp_loose": "0",
    }
    apply(arena)
    assert look(arena).sysctls == {"net.ipv4.ip_forward": "1"}


def test_counters_of_unchanged_rules_go_on_over_edits(arena: Arena) -> None:
    kept = "7000-7999/udp"
    apply(arena, vm("a", kept))
    for number in range(10):
        arena.knock(7500)
        apply(arena, vm("a", f"{kept},{1000 + number}-{2000 + number}"))
        scribbles(arena)
        apply(arena, vm("a", kept))
    live = next(
        one
        for one in look(arena).live
        if one.rule.chain is Chain.OUTPUT and one.rule.family is Family.IP
    )
    assert str(live.rule.ports) == "7000-7999"
    assert live.packets == 10


def test_a_commit_with_one_stale_handle_changes_nothing(arena: Arena) -> None:
    apply(arena, vm("a", "22,80,443"))
    with entered(arena) as namespace:
        desired = desire([vm("a", "22,8080,9000-9999")], namespace.surroundings())
        plan = diff(arena.name, desired, namespace.observe())
        assert len(plan.remove) > 2
        assert plan.add
        arena.erase(the_rule(arena, "443"))
        before = namespace.observe()
        with pytest.raises(Stale) as refusal:
            namespace.commit(plan)
        assert refusal.value.exit_code == 75
        assert namespace.observe() == before


def test_a_plan_for_a_table_that_has_gone_changes_nothing(arena: Arena) -> None:
    apply(arena, vm("a", "22"))
    with entered(arena) as namespace:
        desired = desire([vm("a", "22,80")], namespace.surroundings())
        plan = diff(arena.name, desired, namespace.observe())
        arena.drop()
        with pytest.raises(Stale):
            namespace.commit(plan)
        assert not namespace.observe().table


@pytest.mark.parametrize("ranges", ["22", ",".join(map(str, range(100, 140, 2)))])
def test_rules_of_a_pending_machine_stay(arena: Arena, ranges: str) -> None:
    away = vm("away", ranges, entry="eth0.100")
    apply(arena, away, vm("b", "80"))
    before = look(arena)
    still = tuple(replace(link, addresses=()) for link in SURROUNDINGS.links)
    desired = desire([away, vm("b", "81")], replace(SURROUNDINGS, links=still))
    assert {pending.owner for pending in desired.pending} == {away.owner, vm("b", "").owner}
    with entered(arena) as namespace:
        assert converge(arena.name, desired, namespace).empty
    assert look(arena) == before


def test_ports_of_a_pending_machine_can_be_given_to_another(arena: Arena) -> None:
    """From inside, both are reached at 127.0.0.1: one map cannot hold a port twice."""
    ranges = [f"{first}-{first + 5}" for first in range(1000, 1200, 10)]
    away, other = vm("away", ",".join(ranges), entry="eth0.100"), vm("other", "1002-1003")
    apply(arena, away)
    gone = {"eth0.100": ()}
    links = [replace(x, addresses=gone.get(x.name, x.addresses)) for x in SURROUNDINGS.links]
    away = vm("away", ",".join(ranges[1:]), entry="eth0.100")
    desired = desire([away, other], replace(SURROUNDINGS, links=tuple(links)))
    with entered(arena) as namespace:
        converge(arena.name, desired, namespace)
        inside = [x.rule for x in namespace.observe().live if x.rule.chain is Chain.OUTPUT]
    owners = {str(rule.ports): rule.owner for rule in inside}
    assert owners == {**dict.fromkeys(ranges[1:], away.owner), "1002-1003": other.owner}


def test_thousands_of_ranges_go_in_at_once_and_one_of_them_out(arena: Arena) -> None:
    ranges = [f"{first}-{first + 8}" for first in range(1, 10 * arena.many, 10)]
    all_of_them = desire([vm("a", ",".join(ranges), entry="eth0.100")], SURROUNDINGS)
    ranges.remove("2001-2009")
    all_but_one = desire([vm("a", ",".join(ranges), entry="eth0.100")], SURROUNDINGS)
    with entered(arena) as namespace:
        converge(arena.name, all_of_them, namespace)
        arena.brand()
        before = namespace.observe()
        converge(arena.name, all_but_one, namespace)
        after = namespace.observe()
    assert len(before.live) == 2 * arena.many + 3  # of one family
    assert {live.rule for live in before.live} == all_of_them.rules
    assert {live.rule for live in after.live} == all_but_one.rules
    assert identities(arena, after) < identities(arena, before)


def test_a_namespace_that_is_not_there_is_said_so(arena: Arena) -> None:
    nothing = "there is no network namespace nowhere"
    with pytest.raises(NoNamespace, match=nothing), arena.kernel.opened("nowhere"):
        pass


# ---------------------------------------------------------------------------- nftables alone

OTHER_TABLES = """
table inet other {
    comment "not yours"
    set ports { type inet_service; flags interval; elements = { 1000-8000 } }
    map guests { type inet_service : ipv4_addr; elements = { 80 : 10.0.2.2 } }
    chain prerouting {
        type nat hook prerouting priority -100; policy accept;
        tcp dport @ports counter packets 7 bytes 420 dnat ip to 10.0.2.9 comment "portranger"
    }
}
table ip portranger {
    chain prerouting { type nat hook prerouting priority -101; tcp dport 5 dnat to 10.0.2.9; }
}
table ip6 portranger {
    chain odd { counter packets 1 bytes 2 drop; }
}
table inet portranger2 {
    chain output { type nat hook output priority -101; policy accept; }
}
table ip nat {
    chain KUBEVIRT_PREINBOUND { counter packets 3 bytes 4 dnat to 10.0.2.2; }
    chain prerouting {
        type nat hook prerouting priority -100; iifname "eth0" jump KUBEVIRT_PREINBOUND;
    }
}
"""
OTHERS = ("inet other", "ip portranger", "ip6 portranger", "inet portranger2", "ip nat")

STRAYS = {
    "a foreign set": "add set inet portranger mine { type ipv4_addr; }",
    "a foreign set in use": (
        "add set inet portranger mine { type ipv4_addr; elements = { 192.0.2.66 } };"
        " insert rule inet portranger prerouting ip saddr @mine accept"
    ),
    "a foreign map": "add map inet portranger mine { type inet_service : ipv4_addr; }",
    "a set that a foreign rule fills": (
        "add set inet portranger mine { type ipv4_addr; flags dynamic; };"
        " insert rule inet portranger prerouting add @mine { ip saddr }"
    ),
}
MADE_UNSOUND = {
    "a dormant table": "add table inet portranger { flags dormant; }",
    "a foreign chain": "add chain inet portranger extra; add rule inet portranger extra counter",
    "a foreign base chain": (
        "add chain inet portranger block { type filter hook input priority 0; policy drop; }"
    ),
    "a chain our rules jump to": (
        "add chain inet portranger trap; add rule inet portranger trap drop;"
        " insert rule inet portranger prerouting jump trap"
    ),
    "a foreign counter": "add counter inet portranger mine",
    "a foreign quota": "add quota inet portranger mine { over 1 mbytes }",
    "another chain priority": (
        "delete chain inet portranger prerouting;"
        " add chain inet portranger prerouting { type nat hook prerouting priority -90; }"
    ),
    "another chain policy": (
        "add chain inet portranger prerouting"
        " { type nat hook prerouting priority -101; policy drop; }"
    ),
    "a chain of another type": (
        "delete chain inet portranger output;"
        " add chain inet portranger output { type filter hook output priority -101; }"
    ),
    "a chain at another hook": (
        "delete chain inet portranger output;"
        " add chain inet portranger output { type nat hook input priority -101; }"
    ),
    "a chain without a hook": (
        "delete chain inet portranger output; add chain inet portranger output"
    ),
}

FOREIGN_RULES = {
    "a verdict": "prerouting accept",
    "another protocol": "prerouting sctp dport 80 counter dnat ip to 10.0.2.2",
    "a set of ports": "prerouting tcp dport { 80, 443 } counter dnat ip to 10.0.2.2",
    "a set of links": (
        'prerouting iifname { "eth0", "eth6" } meta nfproto ipv4 tcp dport 80 counter'
        " dnat ip to 10.0.2.2"
    ),
    "a set of sources": "prerouting ip saddr { 192.0.2.1, 192.0.2.7 } counter dnat ip to 10.0.2.2",
    "a prefix of sources": "prerouting ip saddr 192.0.2.0/24 counter dnat ip to 10.0.2.2",
    "a negation": "prerouting tcp dport != 80 counter dnat ip to 10.0.2.2",
    "a shifted port": "prerouting tcp dport 80 counter dnat ip to 10.0.2.2:8080",
    "a range of targets": "prerouting tcp dport 80 counter dnat ip to 10.0.2.2-10.0.2.9",
    "a map of targets": "prerouting counter dnat ip to tcp dport map { 80 : 10.0.2.2 }",
    "a flag": "prerouting tcp dport 80 counter dnat ip to 10.0.2.2 persistent",
    "no counter": "prerouting tcp dport 80 dnat ip to 10.0.2.2",
    "two counters": "prerouting tcp dport 80 counter counter dnat ip to 10.0.2.2",
    "a redirect": "prerouting tcp dport 80 counter redirect to :8080",
    "a link by index": "prerouting iif lo tcp dport 80 counter dnat ip to 10.0.2.2",
    "a wildcard link": 'prerouting iifname "eth*" tcp dport 80 counter dnat ip to 10.0.2.2',
    "a mark": "prerouting meta mark set 0x1 counter",
    "a limit": "prerouting limit rate 1/second tcp dport 80 counter dnat ip to 10.0.2.2",
    "a log": "prerouting tcp dport 80 counter log dnat ip to 10.0.2.2",
    "raw bytes": "prerouting @th,16,16 80 counter dnat ip to 10.0.2.2",
    "source NAT to a range": "postrouting ip saddr 10.0.2.2 counter snat ip to 192.0.2.2-192.0.2.4",
    "a masquerade with ports": (
        "postrouting ip saddr 10.0.2.2 tcp dport 80 counter masquerade to :1024-2048"
    ),
    "a masquerade with a flag": "postrouting ip saddr 10.0.2.2 counter masquerade random",
    "a conntrack match": "output ct state new tcp dport 80 counter dnat ip to 10.0.2.2",
    "a comment of ours": ('prerouting counter accept comment "VirtualMachine/default/desktop/red"'),
}


@pytest.fixture(scope="module")
def only() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    return emptied(only)


class TestNftables:
    """What only nftables has."""

    @pytest.mark.parametrize("script", MADE_UNSOUND.values(), ids=MADE_UNSOUND)
    def test_a_table_that_is_not_as_we_make_it_is_made_anew_or_goes(
        self, netns: str, script: str
    ) -> None:
        apply_live(netns, *DESKTOP)
        nft(netns, script)
        assert observed(netns).unsound
        done = apply_live(netns, *DESKTOP)
        assert done.table is Table.REMAKE
        self.assert_holds(netns, DESKTOP)
        nft(netns, script)
        assert apply_live(netns).table is Table.DELETE
        assert within(netns, "nft", "list", "tables") == ""

    @pytest.mark.parametrize("script", STRAYS.values(), ids=STRAYS)
    def test_a_stray_set_or_map_goes_with_what_uses_it_and_ours_stay(
        self, netns: str, script: str
    ) -> None:
        apply_live(netns, *DESKTOP)
        before = observed(netns)
        nft(netns, script)
        done = apply_live(netns, *DESKTOP)
        assert done.table is Table.KEEP
        assert "mine" in {one.name for one in done.remove if isinstance(one, Foreign)}
        assert observed(netns) == before
        assert "mine" not in within(netns, "nft", "list", "ruleset")

    @pytest.mark.parametrize("text", FOREIGN_RULES.values(), ids=FOREIGN_RULES)
    def test_a_rule_that_we_never_make_is_removed_and_ours_stay(
        self, netns: str, text: str
    ) -> None:
        apply_live(netns, *DESKTOP)
        before = observed(netns)
        nft(netns, f"add rule inet portranger {text}")
        done = apply_live(netns, *DESKTOP)
        assert len(done.remove) == 1
        assert observed(netns) == before

    def test_a_table_that_somebody_else_made_is_taken_over(self, netns: str) -> None:
        nft(netns, "add table inet portranger; add chain inet portranger prerouting")
        apply_live(netns, *DESKTOP)
        self.assert_holds(netns, DESKTOP)

    def test_an_empty_table_is_filled_and_emptied_again(self, netns: str) -> None:
        nft(netns, "add table inet portranger")
        apply_live(netns, *DESKTOP)
        self.assert_holds(netns, DESKTOP)
        apply_live(netns)
        assert within(netns, "nft", "list", "tables") == ""

    def test_what_is_outside_our_table_stays_byte_for_byte(self, netns: str) -> None:
        nft(netns, OTHER_TABLES)
        before = self.others(netns)
        assert len(before) == len(OTHERS)
        for machines in (DESKTOP, (vm("desktop", "22"),), (vm("desktop", None),), DESKTOP):
            apply_live(netns, *machines)
            assert self.others(netns) == before
        nft(netns, MADE_UNSOUND["a dormant table"])
        assert apply_live(netns, *DESKTOP).table is Table.REMAKE
        assert self.others(netns) == before
        apply_live(netns)
        assert self.others(netns) == before
        assert "inet portranger\n" not in within(netns, "nft", "list", "tables")

    def test_nothing_is_written_where_nothing_is_wanted(self, netns: str) -> None:
        nft(netns, OTHER_TABLES)
        before = within(netns, "nft", "-a", "list", "ruleset")
        apply_live(netns)
        assert within(netns, "nft", "-a", "list", "ruleset") == before

    def test_our_chains_hook_one_step_before_the_usual(self, netns: str) -> None:
        apply_live(netns, *DESKTOP)
        listing = within(netns, "nft", "-y", "list", "table", "inet", "portranger")
        assert [line.strip() for line in listing.splitlines() if " hook " in line] == [
            "type filter hook prerouting priority -301; policy accept;",
            "type nat hook prerouting priority -101; policy accept;",
            "type nat hook output priority -101; policy accept;",
            "type nat hook postrouting priority 99; policy accept;",
        ]

    def test_one_rule_holds_a_contiguous_range(self, netns: str) -> None:
        ports = ",".join(str(port) for port in range(8000, 999, -1))
        apply_live(netns, vm("a", ports, entry="eth0.100"))
        chain = within(netns, "nft", "list", "chain", "inet", "portranger", "prerouting")
        assert chain.count("dnat") == 1
        assert 'iifname "eth0.100" meta nfproto ipv4 tcp dport 1000-8000 counter' in chain

    def test_the_owner_is_the_comment_to_the_last_of_its_bytes(self, netns: str) -> None:
        machine = vm("n" * (128 - 27), "80")
        assert len(machine.owner) == 128
        apply_live(netns, machine)
        assert {live.rule.owner for live in observed(netns).live} == {machine.owner}
        assert f'comment "{machine.owner}"' in within(netns, "nft", "list", "ruleset")

    def assert_holds(self, netns: str, machines: tuple[Machine, ...]) -> None:
        seen = observed(netns)
        desired = wanted(netns, machines)
        assert Counter(live.rule for live in seen.live) == Counter(desired.rules)
        assert not seen.foreign
        assert not seen.unsound
        assert apply_live(netns, *machines).empty

    def others(self, netns: str) -> dict[str, str]:
        return {name: within(netns, "nft", "-a", "list", "table", *name.split()) for name in OTHERS}
