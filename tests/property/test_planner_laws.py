"""The laws of the planner, over arbitrary ports, machines, namespaces, rules and listings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from ipaddress import ip_address
from itertools import combinations, pairwise, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.kernel.memory import MemoryNamespace
from rules.conflicts import conflicts
from rules.desired import LABEL_BYTES, desire, label
from rules.flows import forgotten, still_due
from rules.model import (
    FORWARDED,
    Address,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Lookup,
    Machine,
    Observed,
    Protocol,
    Rule,
    Surroundings,
)
from rules.model import NUMBERS as NUMBERS_OF
from rules.nft import element
from rules.nft_batch import batch
from rules.nft_foreseen import are_elements, carried_out, is_for
from rules.nft_listing import decode
from rules.nft_script import script
from rules.places import LOOPBACK
from rules.plan import Plan, Table, diff
from rules.ports import ALL_PORTS, HIGHEST, LOWEST, PortRange, coalesce, subtract
from rules.render import plan_json, plan_text, summary
from rules.shapes import FEW, MANY, count, lookup_of
from rules.stale import Flow
from rules.trace import Packet, matches
from rules.values import replace
from tests.property.strategies import (
    ADDRESSES,
    LOOKUPS,
    NUMBERS,
    PORTS,
    ListedTable,
    arbitrary_desireds,
    crowded_desireds,
    crowds,
    desireds,
    garbage,
    held,
    link_names,
    looked_into,
    machine_lists,
    mutilated,
    peaceable_machines,
    range_lists,
    rules,
    strangers,
    surroundings,
)
from tests.unit.samples import POD, encode, script_lines, trace
from tests.unit.samples import steps as steps_of

# ---------------------------------------------------------------------------------------- ports


@given(range_lists)
def test_coalesced_ranges_hold_exactly_the_same_ports(ranges: list[PortRange]) -> None:
    assert held(coalesce(ranges)) == held(ranges)


@given(range_lists)
def test_coalesced_ranges_are_as_few_as_can_be(ranges: list[PortRange]) -> None:
    beginnings = [port for port in held(ranges) if not any(port - 1 in one for one in ranges)]
    assert len(coalesce(ranges)) == len(beginnings)


@given(range_lists)
def test_coalesced_ranges_ascend_with_a_gap_between_them(ranges: list[PortRange]) -> None:
    assert all(one.last + 1 < other.first for one, other in pairwise(coalesce(ranges)))


@given(range_lists)
def test_coalescing_twice_is_coalescing_once(ranges: list[PortRange]) -> None:
    assert coalesce(coalesce(ranges)) == coalesce(ranges)


@given(range_lists, st.randoms(use_true_random=False))
def test_neither_order_nor_duplicates_matter_to_coalesce(
    ranges: list[PortRange], random: Any
) -> None:
    shuffled = [*ranges, *ranges]
    random.shuffle(shuffled)
    assert coalesce(shuffled) == coalesce(ranges)


@given(range_lists, range_lists)
def test_subtract_is_the_difference_of_sets(
    ranges: list[PortRange], holes: list[PortRange]
) -> None:
    left = subtract(ranges, holes)
    assert held(left) == held(ranges) - held(holes)
    assert left == coalesce(left)


@given(range_lists, range_lists)
def test_ranges_overlap_where_their_ports_meet(
    one: list[PortRange], other: list[PortRange]
) -> None:
    for a, b in zip(one, other, strict=False):
        assert a.overlaps(b) == bool(held([a]) & held([b])) == b.overlaps(a)


# ---------------------------------------------------------------------------------------- desired


def naive(machines: list[Machine]) -> dict[tuple[Protocol, int], str]:
    """The owner of every port: what a rule for each single port would do."""
    owners: dict[tuple[Protocol, int], str] = {}
    for machine in machines:
        if machine.masquerade is None:
            continue
        if machine.masquerade.claims is None:
            owners |= {(protocol, port): machine.name for protocol in FORWARDED for port in PORTS}
            continue
        for claim in machine.masquerade.claims:
            owners |= {(claim.protocol, port): machine.name for port in held([claim.ports])}
    return owners


@given(peaceable_machines)
def test_exactly_the_declared_ports_are_forwarded(machines: list[Machine]) -> None:
    oracle = naive(machines)
    by_label = {label(machine.owner): machine for machine in machines}
    entering = in_chain(desire(machines, None), Chain.PREROUTING)
    for family in Family:
        for protocol in FORWARDED:
            for port in PORTS:
                owner = oracle.get((protocol, port))
                for link in ("eth0", "eth1"):
                    packet = Packet(family=family, protocol=protocol, port=port, interface=link)
                    rule = trace(entering, Chain.PREROUTING, packet)
                    machine = by_label[rule.owner] if rule else None
                    if owner is None or not enters_on(machines, owner, link):
                        assert machine is None
                        continue
                    assert machine is not None
                    assert machine.masquerade is not None
                    assert rule is not None
                    assert machine.name == owner
                    assert rule.to in {guest.address for guest in machine.masquerade.guests}


def in_chain(desired: Desired, chain: Chain) -> list[Rule]:
    return [rule for rule in desired.rules if rule.chain is chain]


def enters_on(machines: list[Machine], name: str, link: str) -> bool:
    (machine,) = (machine for machine in machines if machine.name == name)
    return machine.masquerade is not None and (machine.masquerade.entry or "eth0") == link


@given(peaceable_machines)
def test_from_inside_the_same_ports_are_forwarded_wherever_there_is_a_gateway(
    machines: list[Machine],
) -> None:
    oracle = naive([machine for machine in machines if has_gateway(machine)])
    inside = in_chain(desire(machines, None), Chain.OUTPUT)
    assert {rule.family for rule in inside} <= {Family.IP}  # there is no way back to ::1
    for protocol in FORWARDED:
        for port in PORTS:
            packet = Packet(family=Family.IP, protocol=protocol, port=port, destination=LOOPBACK)
            rule = trace(inside, Chain.OUTPUT, packet)
            assert (rule is not None) == ((protocol, port) in oracle)


def has_gateway(machine: Machine) -> bool:
    return machine.masquerade is not None and machine.masquerade.guests[0].gateway is not None


@given(peaceable_machines, surroundings)
def test_no_two_forwards_take_the_same_packet(
    machines: list[Machine], around: Surroundings | None
) -> None:
    desired = desire(machines, around)
    for chain in (Chain.PREROUTING, Chain.OUTPUT):
        forwards = [rule for rule in in_chain(desired, chain) if not rule.guards]
        for one, other in combinations(forwards, 2):
            assert apart(one, other), (one, other)


@given(peaceable_machines, surroundings)
def test_beside_kubevirt_what_is_not_forwarded_is_guarded_unless_nobody_declared_anything(
    machines: list[Machine], around: Surroundings | None
) -> None:
    desired = desire(machines, around)
    shared = around.kubevirt if around else frozenset()
    declared = {label(one.owner) for one in machines if one.masquerade and one.masquerade.claims}
    for rule in in_chain(desired, Chain.PREROUTING):
        assert rule.family in shared or not rule.guards
        if rule.family not in shared or rule.owner not in declared:
            continue
        for protocol, port in product(Protocol, PORTS):
            packet = Packet(
                family=rule.family, protocol=protocol, port=port, interface=rule.interface
            )
            assert trace(desired.rules, Chain.PREROUTING, packet) is not None


@given(peaceable_machines, surroundings)
def test_two_rules_for_what_leaves_take_the_same_packet_only_to_do_the_same(
    machines: list[Machine], around: Surroundings | None
) -> None:
    # Two machines may be said to have one guest address; then both masquerade it.
    leaving = in_chain(desire(machines, around), Chain.POSTROUTING)
    for one, other in combinations(leaving, 2):
        assert apart(one, other) or one.to == other.to, (one, other)


def apart(one: Rule, other: Rule) -> bool:
    """Whether no packet can be taken by both."""
    pairs = (
        (one.family, other.family),
        (one.protocol, other.protocol),
        (one.interface, other.interface),
        (one.source, other.source),
        (one.destination, other.destination),
    )
    if any(a is not None and b is not None and a != b for a, b in pairs):
        return True
    return one.ports is not None and other.ports is not None and not one.ports.overlaps(other.ports)


@given(rules(), rules(), st.sampled_from(NUMBERS), st.sampled_from(FORWARDED))
def test_rules_apart_never_take_one_packet(
    one: Rule, other: Rule, port: int, protocol: Protocol
) -> None:
    # The check of the two laws above, held against trace.
    for link in ("eth0", "eth1", "k6t-eth0"):
        for address in ADDRESSES[one.family]:
            packet = Packet(
                family=one.family,
                protocol=protocol,
                port=port,
                interface=link,
                source=address,
                destination=address,
            )
            assert not (apart(one, other) and matches(one, packet) and matches(other, packet))


@given(machine_lists(), surroundings)
def test_every_machine_of_ours_is_served_or_pending(
    machines: list[Machine], around: Surroundings | None
) -> None:
    desired = desire(machines, around)
    served = {rule.owner for rule in desired.rules}
    pending = {pending.owner for pending in desired.pending}
    assert not served & pending
    shared = around.kubevirt if around else frozenset()
    ours = {label(m.owner): m.masquerade for m in machines if m.masquerade is not None}
    left = {owner for owner, one in ours.items() if one.claims is None and shared}
    assert served | pending <= ours.keys() <= served | pending | left


@given(machine_lists(), surroundings)
def test_rules_and_settings_name_links_that_can_be(
    machines: list[Machine], around: Surroundings | None
) -> None:
    desired = desire(machines, around)
    assert all(len(rule.interface or "") <= 15 for rule in desired.rules)
    entries = {rule.interface for rule in desired.rules if rule.chain is Chain.PREROUTING}
    assert entries <= set(link_names(around))
    localnet = {one.name.split(".")[3] for one in desired.sysctls if "route_localnet" in one.name}
    assert not localnet & {*entries, "lo"}
    assert localnet <= {*link_names(around), *([] if around else ["k6t-eth1"])}


@given(machine_lists(), surroundings, st.randoms(use_true_random=False))
def test_the_order_of_machines_does_not_matter(
    machines: list[Machine], around: Surroundings | None, random: Any
) -> None:
    shuffled = random.sample(machines, len(machines))
    assert desire(shuffled, around) == desire(machines, around)


@given(machine_lists(netns=("blue", "red")))
def test_conflicts_are_those_of_brute_force(machines: list[Machine]) -> None:
    found = sorted(problem.what.partition(" (")[0] for problem in conflicts(machines))
    expected = 0
    for one, other in combinations(machines, 2):
        expected += len(list(meetings(one, other)))
    assert len(found) == expected
    assert len(set(found)) == expected
    for one, other in combinations(machines, 2):
        named = [what for what in found if f" {one.owner}" in what and f" {other.owner}" in what]
        assert bool(named) == bool(list(meetings(one, other)))


def meetings(one: Machine, other: Machine) -> list[tuple[Protocol, PortRange, PortRange]]:
    """Every pair of contiguous ranges, one of each machine, that share a port."""
    if one.netns != other.netns:
        return []
    return [
        (protocol, a, b)
        for protocol in FORWARDED
        for a in contiguous(one, protocol)
        for b in contiguous(other, protocol)
        if held([a]) & held([b])
    ]


def contiguous(machine: Machine, protocol: Protocol) -> tuple[PortRange, ...]:
    if machine.masquerade is None:
        return ()
    if machine.masquerade.claims is None:
        return (PortRange(LOWEST, HIGHEST),)
    return coalesce(c.ports for c in machine.masquerade.claims if c.protocol is protocol)


@given(st.text(max_size=300), st.text(max_size=300))
def test_labels_fit_and_stay_and_tell_owners_apart(one: str, other: str) -> None:
    one, other = (text.encode(errors="ignore").decode() for text in (one, other))
    assert len(label(one).encode()) <= LABEL_BYTES
    assert label(label(one)) == label(one)
    assert (label(one) == label(other)) == (one == other)


@given(st.text("ab/-ü", min_size=100, max_size=140), st.sampled_from("abc"))
def test_labels_of_long_owners_differ_where_the_owners_do(stem: str, end: str) -> None:
    assert label(f"{stem}{end}") != label(f"{stem}d")


# ----------------------------------------------------------------------------------------- plans


def settled(namespace: MemoryNamespace, desired: Desired) -> Plan:
    """Plan and commit; what is returned is the plan."""
    plan = diff("blue", desired, namespace.observe([s.name for s in desired.sysctls]))
    if not plan.empty:
        namespace.commit(plan)
    return plan


either_desired = desireds | arbitrary_desireds


@given(either_desired, either_desired, st.lists(strangers, max_size=5))
def test_after_a_commit_the_next_plan_is_empty(
    before: Desired, after: Desired, added: list[Rule | Foreign]
) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    if namespace.observe().table:
        for stranger in added:
            namespace.insert(stranger)
    settled(namespace, after)
    observed = namespace.observe([sysctl.name for sysctl in after.sysctls])
    assert diff("blue", after, observed).empty
    assert after.rules <= {live.rule for live in observed.live}
    assert all(live.rule in after.rules or waits(after, live.rule) for live in observed.live)
    assert observed.foreign == ()


def waits(desired: Desired, rule: Rule) -> bool:
    """Whether the rule stays until its family has an address again."""
    return rule in desired.kept or rule.owner in {one.owner for one in desired.pending}


@given(either_desired, either_desired)
def test_what_is_in_both_keeps_its_handle_and_its_counters(before: Desired, after: Desired) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    counted = [
        replace(live, packets=live.handle, octets=60 * live.handle) for live in namespace.held.live
    ]
    namespace.held = replace(namespace.held, live=tuple(counted))
    settled(namespace, after)
    kept = {live.rule: live for live in namespace.observe().live}
    for live in counted:
        if live.rule in after.rules:
            assert kept[live.rule] == live


@given(either_desired, either_desired, st.lists(strangers, max_size=5), st.randoms())
def test_a_plan_does_not_depend_on_the_order_of_what_it_compares(
    before: Desired, after: Desired, added: list[Rule | Foreign], random: Any
) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    for stranger in added:
        namespace.insert(stranger)
    observed = namespace.observe()
    distinct = tuple({live.rule: live for live in observed.live}.values())  # of twins either may go
    straight = replace(observed, live=distinct)
    shuffled = replace(observed, live=tuple(random.sample(distinct, len(distinct))))
    again = replace(after, rules=frozenset(random.sample(list(after.rules), len(after.rules))))
    one, other = diff("blue", after, straight), diff("blue", again, shuffled)
    assert replace(one, unchanged=()) == replace(other, unchanged=())
    assert set(one.unchanged) == set(other.unchanged)


@given(either_desired, either_desired, st.lists(strangers, max_size=5))
def test_every_rule_is_in_a_plan_exactly_once(
    before: Desired, after: Desired, added: list[Rule | Foreign]
) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    for stranger in added:
        namespace.insert(stranger)
    observed = namespace.observe()
    plan = diff("blue", after, observed)
    there: list[Live | Foreign] = [*observed.live, *observed.foreign]
    told = [*plan.remove, *(live for live, _ in plan.change), *plan.unchanged]
    assert sorted(one.handle for one in told) == sorted(one.handle for one in there)
    new = [*plan.add, *(rule for _, rule in plan.change)]
    new += [live.rule for live in plan.unchanged if not waits(after, live.rule)]
    assert sorted(map(str, new)) == sorted(map(str, after.rules))


@given(either_desired, either_desired, st.lists(strangers, max_size=5))
def test_a_plan_says_something_exactly_where_it_does_something(
    before: Desired, after: Desired, added: list[Rule | Foreign]
) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    for stranger in added:
        namespace.insert(stranger)
    plan = diff("blue", after, namespace.observe([sysctl.name for sysctl in after.sysctls]))
    assert plan.empty == (not plan_text(plan))
    assert plan.empty == (not plan_json([plan], [])["changes"])
    assert plan.empty == summary([plan]).startswith("No changes.")
    assert plan.same_rules == (not encode(plan)) == (not script(plan))


GUEST = ADDRESSES[Family.IP][1]


def rules_of(owners: str, most: int) -> st.SearchStrategy[frozenset[Rule]]:
    """Rules that meet often: in one family, of few ports and addresses; some let pass."""
    made = st.builds(
        lambda ends, **content: Rule(
            **content, family=Family.IP, ports=ends and PortRange(*sorted(ends))
        ),
        st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
        chain=st.sampled_from([Chain.PREROUTING, Chain.FORWARD, Chain.EGRESS]),
        owner=st.sampled_from(owners),
        protocol=st.sampled_from([None, Protocol.TCP, Protocol.UDP]),
        source=st.sampled_from([None, None, GUEST]),
        destination=st.sampled_from([None, GUEST]),
        accepts=st.booleans(),
    )
    return st.frozensets(made, max_size=most)


def is_in_the_way(wanted: Rule, rule: Rule) -> bool:
    """Whether one that is wanted tells that another is not: by its owner, or by its packets. What
    lets pass is of policies, which may be for others too."""
    filters = rule.chain in (Chain.FORWARD, Chain.EGRESS)
    if wanted.owner == rule.owner and not (filters and rule.accepts and not rule.resumes):
        return True
    return (
        (wanted.chain, wanted.family, wanted.source) == (rule.chain, rule.family, rule.source)
        and (wanted.destination == rule.destination or not filters)
        and (wanted.protocol is rule.protocol or None in (wanted.protocol, rule.protocol))
        and (wanted.ports or ALL_PORTS).overlaps(rule.ports or ALL_PORTS)
    )


@given(rules_of("ab", 3), rules_of("bcd", 12))
def test_what_nobody_claims_stays_where_nothing_that_is_wanted_is_in_its_way(
    wanted: frozenset[Rule], there: frozenset[Rule]
) -> None:
    observed = Observed(table=True, live=tuple(Live(rule, n) for n, rule in enumerate(there)))
    plan = diff("blue", Desired(rules=wanted, unclaimed_stay=True), observed)
    stays = {rule for rule in there if not any(is_in_the_way(one, rule) for one in wanted)}
    assert {live.rule for live in plan.unchanged} == stays | (there & wanted)


# ----------------------------------------------------------------------------------------- codec


@given(either_desired)
def test_what_is_encoded_decodes_to_the_same(desired: Desired) -> None:
    table = ListedTable()
    table.run(encode(diff("blue", desired, Observed())))
    observed = table.observed()
    assert {live.rule for live in observed.live} == desired.rules
    assert len(observed.live) == len(desired.rules)
    assert (observed.foreign, observed.unsound) == ((), "")
    assert observed.table == bool(desired.rules)
    assert observed.chains == {rule.chain for rule in desired.rules}


@given(either_desired, either_desired, st.booleans())
def test_the_commands_lead_from_any_table_to_any_other(
    before: Desired, after: Desired, dormant: bool
) -> None:
    table = ListedTable()
    table.run(encode(diff("blue", before, Observed())))
    if dormant and table.entries:
        table.entries[0]["table"]["flags"] = ["dormant"]
    observed = table.observed()
    table.run(encode(diff("blue", after, observed)))
    now = table.observed()
    assert diff("blue", replace(after, sysctls=frozenset()), now).empty
    if not dormant:
        stay = {live for live in observed.live if live.rule in after.rules}
        assert stay <= set(now.live)


@given(either_desired, either_desired)
def test_a_script_has_one_line_for_each_command(before: Desired, after: Desired) -> None:
    namespace = MemoryNamespace(POD)
    settled(namespace, before)
    plan = diff("blue", after, namespace.observe())
    lines = script_lines(plan)
    verbs = [(verb, *target) for command in encode(plan) for verb, target in command.items()]  # type: ignore[misc]  # a mapping, as the encoder makes them
    assert [tuple(line.split()[:2]) for line in lines] == verbs


@given(st.lists(garbage | st.dictionaries(st.sampled_from(["rule", "chain", "table"]), garbage)))
def test_no_garbage_is_taken_for_a_rule(listing: list[Any]) -> None:
    observed = decode([entry for entry in listing if isinstance(entry, dict)])
    assert observed.live == ()
    assert diff("blue", Desired(), observed).add == ()


@given(rules(), st.data())
def test_a_mutilated_rule_is_foreign_or_another_rule_that_says_what_it_does(
    rule: Rule, data: st.DataObject
) -> None:
    table = ListedTable()
    table.run(encode(diff("blue", Desired(rules=frozenset({rule})), Observed())))
    whole = table.entries[-1]["rule"]
    broken = data.draw(mutilated(whole))
    if not isinstance(broken, dict):
        return
    observed = decode([*table.entries[:-1], {"rule": broken}])
    diff("blue", Desired(rules=frozenset({rule})), observed)  # whatever it is can be compared
    for live in observed.live:
        assert says(live, broken)
        if live.rule == rule:
            assert same_conditions(broken, whole)


def says(live: Live, listed: dict[str, Any]) -> bool:
    """Whether the rule, written again, is what was listed."""
    (command,) = encode(Plan(netns="blue", add=(live.rule,)))
    written: Any = command["add"]
    return same_conditions(written["rule"], listed)


def same_conditions(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return conditions(one) == conditions(other)


def conditions(listed: dict[str, Any]) -> tuple[str, set[str]]:
    """The chain and what is matched and done there, but for order and counters."""
    return listed["chain"], {
        str(item) for item in listed["expr"] if "counter" not in item and "nfproto" not in str(item)
    }


# ---------------------------------------------------------------------------------------- shapes


def written(*steps: Desired) -> ListedTable:
    """A table that came to hold these, one after the other."""
    table = ListedTable()
    for desired in steps:
        table.run(encode(diff("blue", desired, seen(table))))
    return table


def seen(table: ListedTable) -> Observed:
    return table.observed() if table.entries else Observed(mapped={})


def ranges_of(observed: Observed) -> dict[Lookup, int]:
    return dict(+count(live.rule for live in observed.live))


def in_a_map(live: Live) -> bool:
    return not live.handle


@given(crowded_desireds())
def test_many_ranges_decode_to_what_was_encoded(desired: Desired) -> None:
    observed = seen(written(desired))
    assert Counter(live.rule for live in observed.live) == Counter(desired.rules)
    assert (observed.foreign, observed.unsound) == ((), "")
    worth = {lookup for lookup, number in ranges_of(observed).items() if number >= MANY}
    assert observed.mapped is not None
    assert observed.mapped.keys() == worth
    assert all(in_a_map(live) == (lookup_of(live.rule) in worth) for live in observed.live)


def _emptied(table: ListedTable) -> None:
    for one in table.of("map"):
        one.pop("elem", None)


def _strange(table: ListedTable) -> None:
    for one in table.of("map"):
        one["elem"].append([{"elem": {"val": "*", "counter": {}}}, "10.0.2.2"])


def _without(table: ListedTable, *, lookups: bool) -> None:
    """A stranger deletes the rules that look into maps, or all others."""
    table.entries = [
        entry
        for entry in table.entries
        if "rule" not in entry or bool(looked_into(entry["rule"])) is not lookups
    ]


def _twice(table: ListedTable) -> None:
    """A stranger writes as a rule what is in a map already, and looks into the map once more."""
    for live in table.observed().live:
        (command,) = encode(Plan(netns="blue", add=(live.rule,)))
        table.run([command])
    for rule in [one for one in table.of("rule") if looked_into(one)]:
        table.handle += 1
        table.entries.append({"rule": rule | {"handle": table.handle}})


HARM: dict[str, Callable[[ListedTable], None]] = {
    "nothing": lambda _: None,
    "flags": lambda table: table.of("table")[0].update(flags=["dormant"]),
    "a chain": lambda table: table.entries.append({"chain": {"name": "extra"}}),
    "a map": lambda table: table.entries.append({"map": {"name": "extra"}}),
    "no elements": _emptied,
    "a strange element": _strange,
    "no lookups": lambda table: _without(table, lookups=True),
    "no rules": lambda table: _without(table, lookups=False),
    "everything twice": _twice,
}


@given(
    st.lists(crowded_desireds(), min_size=1, max_size=3),
    crowded_desireds(),
    st.sampled_from(sorted(HARM)),
)
def test_the_commands_lead_from_any_shape_to_any_other(
    before: list[Desired], after: Desired, harm: str
) -> None:
    table = written(*before)
    if table.entries:
        HARM[harm](table)
    found = seen(table)
    plan = diff("blue", after, found)
    table.run(encode(plan))
    now = seen(table)
    assert diff("blue", after, now).empty
    rules = Counter(live.rule for live in now.live)
    assert rules >= Counter(after.rules)
    assert all(rule in after.rules or waits(after, rule) for rule in rules)
    assert all(number == 1 for number in rules.values())
    for lookup, number in ranges_of(now).items():
        there = bool(found.mapped) and lookup in (found.mapped or {})
        as_map = number >= MANY or (number > FEW and there)
        assert (lookup in (now.mapped or {})) is as_map
    if plan.table is Table.KEEP:
        first = {live.rule: live for live in reversed(found.live)}
        stay = {live for rule, live in first.items() if rule in after.rules}
        reshaped = {*plan.gathering, *plan.spreading}
        assert {one for one in stay if lookup_of(one.rule) not in reshaped} <= set(now.live)


@given(crowded_desireds(), crowded_desireds(), st.randoms(use_true_random=False))
def test_a_plan_for_many_ranges_does_not_depend_on_their_order(
    before: Desired, after: Desired, random: Any
) -> None:
    found = seen(written(before))
    shuffled = replace(found, live=tuple(random.sample(found.live, len(found.live))))
    again = replace(after, rules=frozenset(random.sample(list(after.rules), len(after.rules))))
    one, other = diff("blue", after, found), diff("blue", again, shuffled)
    assert replace(one, unchanged=()) == replace(other, unchanged=())
    assert set(one.unchanged) == set(other.unchanged)


@given(st.lists(crowded_desireds(), max_size=2), crowded_desireds(), st.sampled_from(sorted(HARM)))
def test_a_plan_for_many_ranges_says_what_it_does_in_every_form(
    before: list[Desired], after: Desired, harm: str
) -> None:
    table = written(*before)
    if table.entries:
        HARM[harm](table)
    found = seen(table)
    plan = diff("blue", after, found)
    assert plan.empty == (not plan_text(plan))
    assert plan.empty == (not plan_json([plan], [])["changes"])
    assert plan.empty == summary([plan]).startswith("No changes.")
    assert plan.same_rules == (not encode(plan)) == (not script(plan))
    verbs = [(verb, *target) for command in encode(plan) for verb, target in command.items()]  # type: ignore[misc]  # a mapping, as the encoder makes them
    assert [tuple(line.split()[:2]) for line in script_lines(plan)] == verbs
    told = [*plan.remove, *(live for live, _ in plan.change), *plan.unchanged]
    assert Counter(map(str, told)) == Counter(map(str, [*found.live, *found.foreign]))


@given(st.lists(crowded_desireds(), min_size=2, max_size=4), st.integers(1, 9))
def test_a_batch_of_elements_does_what_the_commands_do(steps: list[Desired], some: int) -> None:
    """Only now and then are two arbitrary crowds held in the same maps: so we also go from each to
    one that differs in a few ranges."""
    table = ListedTable()
    for desired in steps:
        for wanted in (desired, replace(desired, rules=frozenset([*desired.rules][some:]))):
            found = seen(table)
            plan = diff("blue", wanted, found)
            table.run(encode(plan))
            if are_elements(plan):
                predicted = carried_out(steps_of(plan), found)
                now = seen(table)
                assert is_for(plan, found)
                assert {live.rule for live in predicted.live} == {live.rule for live in now.live}
                assert len(predicted.live) == len(now.live)
                assert replace(predicted, live=()) == replace(now, live=())
                written_anew = {*plan.add, *(rule for _, rule in plan.change)}
                assert {one for one in now.live if one.rule not in written_anew} <= set(found.live)
                assert batch(steps_of(plan), 1)


@given(
    crowded_desireds(),
    crowded_desireds() | st.none(),
    st.frozensets(st.sampled_from([one for some in ADDRESSES.values() for one in some[1:3]])),
    st.randoms(use_true_random=False),
)
def test_a_flow_is_forgotten_exactly_where_its_port_leads_elsewhere(
    before: Desired, after: Desired | None, guests: frozenset[Address], random: Any
) -> None:
    """Of what is translated: for each guest, brute force over its rules before and after. What
    enters can be reached from inside as well, and may go on being so. Where a guard is new, or new
    to a guest, all goes that it would have kept out."""
    inside = {
        replace(rule, chain=Chain.OUTPUT, interface=None, destination=LOOPBACK)
        for rule in before.rules
        if lookup_of(rule) == LOOKUPS[0]
    }
    others = {rule for rule in before.rules if lookup_of(rule) != LOOKUPS[2]}
    before = replace(before, rules=frozenset({*others, *inside}))
    if after is None:
        some = random.sample(list(before.rules), random.randint(0, len(before.rules)))
        after = replace(before, rules=frozenset(some))
    found = seen(written(before))
    plan = diff("blue", replace(after, guests=guests), found)
    due = forgotten(plan)
    was = {live.rule for live in found.live}
    now = {*after.rules, *(live.rule for live in plan.unchanged)}
    ends = [end for rule in [*was - now][:12] for end in ends_of(rule)] or [22]
    for family, protocol, port in product(Family, FORWARDED, ends):
        for guest in ADDRESSES[family][1:3]:
            flow = Flow(
                family=family,
                protocol=NUMBERS_OF[protocol],
                port=port,
                destination=ADDRESSES[family][3],
                answerer=guest,
                answering_port=port,
            )
            there = protocol, port, flow.destination, guest
            cut = leads(was, *there) and not leads(now, *there)
            cut |= kept_out(plan, now, protocol, port, guest)
            assert any(one.holds(flow, set()) for one in due) == cut


@given(crowded_desireds(), crowded_desireds(), crowded_desireds())
def test_what_is_still_due_after_another_change_is_all_that_it_does_not_lead_there(
    before: Desired, between: Desired, after: Desired
) -> None:
    """Of a change whose flows could not be forgotten before the next one."""
    steps = (before, between, after)
    found, later = seen(written(steps[0])), seen(written(*steps[:2]))
    first, second = diff("blue", steps[1], found), diff("blue", steps[2], later)
    due, left = forgotten(first), list(still_due(forgotten(first), second))
    new = {*second.add, *(rule for _, rule in second.change)}
    gone = {live.rule for live in found.live} - steps[1].rules
    ends = [end for rule in [*gone][:12] for end in ends_of(rule)]
    for family, protocol, port in product(Family, FORWARDED, ends):
        for guest in ADDRESSES[family][1:3]:
            flow = Flow(
                family=family,
                protocol=NUMBERS_OF[protocol],
                port=port,
                destination=ADDRESSES[family][3],
                answerer=guest,
                answering_port=port,
            )
            was = any(one.holds(flow, set()) for one in due)
            led = leads(new, protocol, port, flow.destination, guest)
            assert any(one.holds(flow, set()) for one in left) == (was and not led)


def kept_out(plan: Plan, now: Set[Rule], protocol: Protocol, port: int, guest: Address) -> bool:
    """Whether a guard is new, or new to the guest, that would have kept a flow from beginning."""
    written = {*plan.add, *(rule for _, rule in plan.change)}
    written = {rule for rule in written if rule.chain in (Chain.PREROUTING, Chain.OUTPUT)}
    there = {rule for rule in now if rule.chain in (Chain.PREROUTING, Chain.OUTPUT)}
    family = Family.of(guest)
    if guest not in plan.guests or not written:
        return False
    if not any(rule.guards and rule.family is family for rule in there):
        return False
    new = any(rule.guards and rule.family is family for rule in written)
    unknown = not any(rule.to == guest for rule in there - written)
    led = any(
        rule.to == guest
        and rule.protocol in (None, protocol)
        and (rule.ports is None or port in rule.ports)
        for rule in there
    )
    return (new or unknown) and not led


def ends_of(rule: Rule) -> set[int]:
    """The first and the last of its ports, and those beside them."""
    if rule.ports is None:
        return set()
    first, last = rule.ports.first, rule.ports.last
    return {port for port in (first - 1, first, last, last + 1) if 0 < port < 65536}


def leads(rules: Set[Rule], protocol: Protocol, port: int, sent: Address, guest: Address) -> bool:
    """Whether some rule leads that port, unshifted, to the guest; loopback is where they are sent
    from inside, and counts for all."""
    return any(
        rule.chain is not Chain.POSTROUTING
        and rule.to == guest
        and (rule.destination in (None, sent) or rule.destination.is_loopback)
        and rule.protocol in (None, protocol)
        and (rule.ports is None or port in rule.ports)
        for rule in rules
    )


@given(crowds(LOOKUPS[0]), st.data())
def test_a_mutilated_map_is_unsound_or_another_map_that_says_what_it_holds(
    crowd: frozenset[Rule], data: st.DataObject
) -> None:
    table = written(Desired(rules=crowd))
    if not table.of("map"):
        return
    broken = data.draw(mutilated(table.of("map")[0]))
    rest = [entry for entry in table.entries if "map" not in entry]
    observed = decode([*rest, {"map": broken}])
    diff("blue", Desired(rules=crowd), observed)  # whatever it is can be compared
    for live in observed.live:
        told = element(live.rule)
        assert any(same_element(told, one) for one in broken["elem"])
    if not observed.unsound:
        told_of = len(observed.live) + sum(one.kind == "element" for one in observed.foreign)
        assert told_of == len(broken.get("elem", [])) or not observed.mapped


def same_element(told: list[Any], listed: Any) -> bool:
    """Whether they are one element, but for its counter and for how an absent owner is said."""
    if not isinstance(listed, list) or len(listed) != 2:
        return False
    inner = listed[0]["elem"]
    return bool(
        {"comment": "", **inner, "counter": 0} == {**told[0]["elem"], "counter": 0}
        and ip_address(listed[1]) == ip_address(told[1])
    )
