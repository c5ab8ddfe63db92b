"""Laws of what stands in front of a machine: random policies come to rules and sets that judge
every packet as the documentation says, that are found again however they are written, and of which
nothing but a set changes when somebody comes or goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from itertools import pairwise, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.kernel.memory import MemoryNamespace
from rules.desired import desire
from rules.fences import Laws, fenced
from rules.flows import forbidden
from rules.model import (
    NODE,
    NUMBERS,
    POLICED,
    Address,
    Chain,
    Desired,
    Family,
    Live,
    Machine,
    Masquerade,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.nft import commands
from rules.nft_batch import batch, can_write
from rules.nft_foreseen import carried_out
from rules.nft_script import script
from rules.nft_sets import Join, Leave
from rules.nft_transactions import transactions
from rules.plan import Plan, Table, diff
from rules.policies import Direction, NetworkPolicy, apart
from rules.ports import PortRange
from rules.render import plan_json, plan_text, summary
from rules.services import Pod as Known
from rules.services import PodPort
from rules.stale import Flow
from rules.trace import Packet as Traced
from rules.trace import admitting
from rules.values import replace
from tests.policies import Packet, Pod, World, allowing, peer_matches, selected, types
from tests.property.strategies import ADDRESSES, ListedTable, mutilated, port_ranges
from tests.property.strategies import rules as any_rules
from tests.property.test_policy_laws import (
    IPS,
    PACKETS,
    PORTS,
    PROTOCOLS,
    machine,
    namespaces,
    pods,
    port_names,
    register,
    sorted_labels,
    subjects,
    understood,
    worlds,
)
from tests.unit.samples import GUESTS, POD, encode, script_lines
from tests.unit.samples import steps as steps_of

GUEST = {Family.of(one.address): one.address for one in GUESTS}
OURS = Masquerade(name="default", entry=None, guests=GUESTS, claims=())

# Port 0 is in no range of ours, not even in that of all ports: nobody can listen on it.
ASKED = [packet for packet in PACKETS if packet.port != 0]


# ---------------------------------------------------------------------------- a world, as manifests


def known(pod: Pod, number: int) -> Known:
    return Known(
        namespace=pod.namespace,
        name=f"pod-{number}",
        labels=sorted_labels(dict(pod.labels)),
        addresses=tuple(map(ip_address, pod.ips)),
        ports=tuple(
            PodPort(container="", name=name, protocol=protocol, ports=PortRange(port, port))
            for name, protocol, port in port_names(pod)
        ),
    )


def other(pod: Pod, number: int) -> Machine:
    """The same as a machine, said to be at these addresses; some of them are ours."""
    return replace(
        machine(pod),
        name=f"vm-{number}",
        netns=f"vm-{number}",
        addresses=tuple(map(ip_address, pod.ips)),
        masquerade=OURS if number % 2 else None,
    )


def ward(pod: Pod) -> Machine:
    """Whom it is all about."""
    return replace(machine(pod), masquerade=OURS)


def laws(world: World, policies: Sequence[NetworkPolicy] | None = None) -> Laws:
    """Of the parties every third is a machine."""
    return Laws(
        policies=tuple(understood(world.policies) if policies is None else policies),
        pods=tuple(known(one, at) for at, one in enumerate(world.pods) if at % 3),
        namespaces=tuple(namespaces(world)),
        node=frozenset(map(ip_address, world.node)) if world.node else None,
    )


def wanted(world: World, pod: Pod, policies: Sequence[NetworkPolicy] | None = None) -> Desired:
    """What the namespace of one machine should hold."""
    others = [other(one, at) for at, one in enumerate(world.pods) if not at % 3]
    first, *_ = fenced([ward(pod), *others], laws(world, policies), {})
    return desire([first], POD)


def filters(desired: Desired) -> list[Rule]:
    return [rule for rule in desired.rules if rule.chain in POLICED]


def guest_of(peer: Address) -> Address:
    return GUEST[Family.of(peer)]


def judged(desired: Desired, packet: Packet) -> list[Rule] | None:
    """The rules that let a packet pass, as `explain` finds them."""
    peer = ip_address(packet.peer)
    protocol = Protocol[packet.protocol] if packet.protocol in PROTOCOLS else None
    ends: Any = {"destination" if packet.direction == "Ingress" else "source": guest_of(peer)}
    asked = Traced(
        family=Family.of(peer),
        protocol=protocol,  # type: ignore[arg-type]  # ICMP has none: only a rule for all takes it
        port=packet.port or 0,
        **ends,
    )
    return admitting(desired.rules, desired.sets, asked, peer)


# --------------------------------------------------------------------------------------- verdicts


@given(worlds(), subjects)
def test_every_packet_is_judged_as_the_documentation_says(world: World, pod: Pod) -> None:
    desired = wanted(world, pod)
    selecting = {
        direction.value.capitalize(): set(
            map(str, register(world).selecting(machine(pod), direction))
        )
        for direction in Direction
    }
    for packet in ASKED:
        expected = allowing(world, pod, packet)
        found = judged(desired, packet)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            continue
        assert bool(found) == bool(expected)
        if found:  # rules are joined: of their owners, some may be for other ports of a range
            names = {name for rule in found for name in rule.owner.split(",")}
            assert names <= selecting[packet.direction]
            assert names & {f"NetworkPolicy/shop/{name}" for name in expected}


@given(worlds(), subjects, st.sets(st.sampled_from(IPS), min_size=1, max_size=3))
def test_the_node_itself_is_never_cut_off_and_nobody_else_is_let_in(
    world: World, pod: Pod, node: set[str]
) -> None:
    desired = wanted(world._replace(node=sorted(node)), pod)
    without = wanted(world, pod)
    for packet in ASKED:
        expected = allowing(world._replace(node=sorted(node)), pod, packet)
        found = judged(desired, packet)
        assert (found is None or bool(found)) == (expected is None or bool(expected))
        if packet.peer not in node:
            before = judged(without, packet)
            assert (found if found is None else {*found}) == (
                before if before is None else {*before}
            )
        elif found is not None:
            assert NODE in {rule.owner for rule in found}


@given(worlds(), subjects, st.data())
def test_a_broken_policy_opens_nothing(world: World, pod: Pod, data: st.DataObject) -> None:
    sound = understood(world.policies)
    partly = [one.shut() if data.draw(st.booleans()) else one for one in sound]
    before, after = wanted(world, pod, sound), wanted(world, pod, partly)
    guards = [{rule for rule in filters(one) if rule.guards} for one in (before, after)]
    assert guards[0] == guards[1]
    for packet in ASKED:
        assert not judged(after, packet) or judged(before, packet)


@given(worlds(), subjects, st.randoms(use_true_random=False))
def test_no_order_matters(world: World, pod: Pod, chance: Any) -> None:
    shuffled = World(
        chance.sample(list(world.policies), len(world.policies)),
        world.pods,
        dict(chance.sample(list(world.namespaces.items()), len(world.namespaces))),
    )
    assert wanted(world, pod) == wanted(shuffled, pod)


@given(worlds(), subjects)
def test_rules_are_joined_and_sets_are_named_and_sound(world: World, pod: Pod) -> None:
    desired = wanted(world, pod)
    found = filters(desired)
    assert {rule.peers for rule in found if rule.peers} == desired.sets.keys()
    for peers, members in desired.sets.items():
        assert all(Family.of(one.network_address) is peers.family for one in members)
        assert frozenset(apart(members)) == members
    gates = [rule for rule in found if rule.accepts and not rule.resumes]
    ranges: dict[object, list[PortRange]] = {}
    for rule in gates:
        assert (rule.ports is None) == (rule.protocol is None)
        place = rule.source, rule.destination, rule.protocol, rule.peers
        if rule.ports:
            ranges.setdefault(place, []).append(rule.ports)
    for some in ranges.values():
        ends = sorted((one.first, one.last) for one in some)
        assert all(one[1] + 1 < two[0] for one, two in pairwise(ends))
    for rule in gates:  # nobody lets anything pass where there is nothing to pass through
        assert any(
            (one.source, one.destination) == (rule.source, rule.destination)
            for one in found
            if one.guards
        )
    assert {rule.family for rule in found if rule.guards} == {
        rule.family for rule in found if rule.resumes
    }


# -------------------------------------------------------------------------------- who comes or goes


def numbers(world: World, pod: Pod) -> set[object]:
    """The ports that somebody has for a name by which some policy calls them."""
    found: set[object] = set()
    for policy in world.policies:
        spec, own = policy["spec"], policy["metadata"].get("namespace", "default")
        if own != pod.namespace or "Egress" not in types(spec):
            continue
        if not selected(spec.get("podSelector"), pod.labels):
            continue
        for place, rule in enumerate(spec.get("egress") or []):
            for port, whose in product(rule.get("ports") or [], world.pods):
                if not isinstance(port.get("port"), str) or not is_meant(world, own, rule, whose):
                    continue
                asked = port["port"], port.get("protocol") or "TCP"
                numbers = [number for *name, number in whose.ports if tuple(name) == asked]
                found |= (
                    {(policy["metadata"]["name"], place, *asked, *numbers[:1])}
                    if numbers
                    else set()
                )
    return found


def is_meant(world: World, own: str, rule: Any, whose: Pod) -> bool:
    peers = rule.get("to") or []
    return any(
        not peers
        or any(
            peer_matches(world, own, Packet("Egress", ip, "TCP", 1), peer, whose) for peer in peers
        )
        for ip in whose.ips
    )


@given(worlds(), subjects, pods, st.booleans())
def test_who_comes_or_goes_changes_sets_and_no_rule(
    world: World, pod: Pod, party: Pod, plain: bool
) -> None:
    """Unless nobody else has that number for a port that is called by a name."""
    party = party._replace(ports=()) if plain else party
    more = world._replace(pods=[*world.pods, party])
    before, after = wanted(world, pod), wanted(more, pod)
    if numbers(world, pod) != numbers(more, pod):
        assert not plain
        return
    assert before.rules == after.rules
    assert before.sets.keys() == after.sets.keys()
    own = set(map(ip_network, party.ips))
    for peers, members in before.sets.items():
        assert held(members) <= held(after.sets[peers])
        assert held(after.sets[peers]) <= held(members | own)
    for one, two in ((before, after), (after, before)):
        plan = diff("vm", two, seen(written(one)))
        assert (plan.add, plan.change, plan.remove, plan.table) == ((), (), (), Table.KEEP)
        assert all(isinstance(step, Join | Leave) for step in steps_of(plan))
        assert len(transactions(plan)) == (before.sets != after.sets)


def held(members: Iterable[Any]) -> set[str]:
    """Which addresses of the world these networks hold."""
    return {ip for ip in IPS if any(ip_address(ip) in one for one in members)}


# ----------------------------------------------------------------------------------- arbitrary ones

networks = {
    Family.IP: st.builds(
        lambda place, bits: ip_network((10 << 24 | place >> bits << bits, 32 - bits)),
        st.integers(0, 15),
        st.integers(0, 3),
    )
    | st.sampled_from(["0.0.0.0/0", "0.0.0.0/32", "255.255.255.255/32", "128.0.0.0/1"]).map(
        ip_network
    ),
    Family.IP6: st.builds(
        lambda place, bits: ip_network((0xFD << 120 | place >> bits << bits, 128 - bits)),
        st.integers(0, 15),
        st.integers(0, 3),
    )
    | st.sampled_from(["::/0", "::/128", "ffff::/16", "8000::/1"]).map(ip_network),
}
NAMES = [Peers(family, key) for family in Family for key in ("a1", "b2")]


@st.composite
def sets(draw: st.DrawFn, peers: Peers) -> Members:
    return frozenset(apart(draw(st.lists(networks[peers.family], max_size=5))))


@st.composite
def gates(draw: st.DrawFn) -> Rule:
    """Any rule in forward that we make."""
    family = draw(st.sampled_from(Family))
    plain = Rule(
        chain=Chain.FORWARD, family=family, owner=draw(st.sampled_from(["a", "b", "ü" * 60]))
    )
    if draw(st.integers(0, 5)) == 0:
        return replace(plain, accepts=True, chain=draw(st.sampled_from([*POLICED])))
    end = draw(st.sampled_from(["source", "destination"]))
    plain = replace(plain, **{end: draw(st.sampled_from(ADDRESSES[family][1:]))})
    if end == "source" and draw(st.integers(0, 3)):  # else as of the release before both had one
        plain = replace(plain, chain=Chain.EGRESS)
    if draw(st.integers(0, 2)) == 0:
        return plain
    protocol = draw(st.none() | st.sampled_from(Protocol))
    return replace(
        plain,
        accepts=True,
        protocol=protocol,
        ports=draw(port_ranges) if protocol else None,
        peers=draw(st.none() | st.sampled_from([one for one in NAMES if one.family is family])),
    )


@st.composite
def arbitrary(draw: st.DrawFn) -> Desired:
    others = any_rules().filter(lambda one: one.chain not in POLICED)
    rules = draw(st.frozensets(gates(), max_size=10)) | draw(st.frozensets(others, max_size=3))
    named = sorted({rule.peers for rule in rules if rule.peers}, key=str)
    return Desired(rules=rules, sets={peers: draw(sets(peers)) for peers in named})


desireds = arbitrary() | st.builds(wanted, worlds(), subjects).map(
    lambda made: replace(made, sysctls=frozenset())
)


# -------------------------------------------------------------------------------------------- plans


def committed(namespace: MemoryNamespace, desired: Desired) -> Plan:
    plan = diff("vm", desired, namespace.observe())
    if not plan.empty:
        namespace.commit(plan)
    return plan


@given(desireds, desireds, st.lists(gates() | any_rules(), max_size=3))
def test_after_a_commit_the_next_plan_is_empty(
    before: Desired, after: Desired, added: list[Rule]
) -> None:
    namespace = MemoryNamespace(POD)
    committed(namespace, before)
    if namespace.observe().table:
        for rule in added:
            namespace.insert(rule)
    committed(namespace, after)
    now = namespace.observe()
    assert diff("vm", after, now).empty
    assert Counter(live.rule for live in now.live) == Counter(after.rules)
    assert now.sets == after.sets


@given(desireds, desireds)
def test_a_plan_says_something_exactly_where_it_does_something(
    before: Desired, after: Desired
) -> None:
    found = seen(written(before))
    plan = diff("vm", after, found)
    assert plan.empty == (before.rules == after.rules and before.sets == after.sets)
    assert plan.empty == (not plan_text(plan))
    assert plan.empty == (not plan_json([plan], [])["changes"])
    assert plan.empty == summary([plan]).startswith("No changes.")
    assert plan.same_rules == (not encode(plan)) == (not script(plan))
    told = [one for one in plan_json([plan], [])["changes"] if one.get("kind") == "set"]  # type: ignore[attr-defined]  # a list
    both = {*before.sets, *after.sets}
    assert {(one["before"] or one["after"])["name"] for one in told} == {
        str(one) for one in both if before.sets.get(one) != after.sets.get(one)
    }


@given(desireds, desireds)
def test_a_plan_only_adds_where_nothing_goes(before: Desired, after: Desired) -> None:
    plan = diff("vm", after, seen(written(before)))
    nobody: Members = frozenset()
    goes = not before.rules <= after.rules or any(
        not members <= after.sets.get(peers, nobody) for peers, members in before.sets.items()
    )
    assert plan.only_adds == (not goes) or plan.gathering or plan.spreading


@given(desireds, desireds)
def test_a_script_has_one_line_for_each_command(before: Desired, after: Desired) -> None:
    """But for where rules come: a script can say behind which."""
    plan = diff("vm", after, seen(written(before)))
    verbs = [(verb, *target) for command in encode(plan) for verb, target in command.items()]  # type: ignore[misc]  # a mapping, as the encoder makes them
    said = [tuple(line.split()[:2]) for line in script_lines(plan)]
    for one, other in zip(verbs, said, strict=True):
        assert one[1] == other[1]
        assert one[0] == other[0] or (one, other) == (("insert", "rule"), ("add", "rule"))


@given(desireds, st.booleans())
def test_filters_stay_where_it_is_not_known_what_is_allowed(before: Desired, harm: bool) -> None:
    table = written(before)
    if harm and table.entries:
        table.entries.append({"chain": {"name": "extra"}})
    there = {rule for rule in before.rules if rule.chain in POLICED}
    table.run(encode(diff("vm", Desired(filters_stay=True), seen(table))))
    now = seen(table)
    assert {live.rule for live in now.live} == there
    assert now.sets == before.sets


# -------------------------------------------------------------------------------------------- codec


def written(*wishes: Desired) -> ListedTable:
    table = ListedTable()
    for desired in wishes:
        table.run(encode(diff("vm", desired, seen(table))))
    return table


def seen(table: ListedTable) -> Observed:
    return table.observed() if table.entries else Observed(mapped={})


@given(desireds)
def test_what_is_encoded_decodes_to_the_same(desired: Desired) -> None:
    observed = seen(written(desired))
    assert Counter(live.rule for live in observed.live) == Counter(desired.rules)
    assert observed.sets == desired.sets
    assert (observed.foreign, observed.unsound) == ((), "")
    assert observed.chains == {rule.chain for rule in desired.rules}
    assert_guards_come_last(written(desired))


def assert_guards_come_last(table: ListedTable) -> None:
    for chain in Chain:
        verdicts = [
            "drop" in rule["expr"][-1] for rule in table.of("rule") if rule["chain"] == chain.value
        ]
        assert verdicts == sorted(verdicts)


def _stranger(table: ListedTable, value: Any) -> None:
    table.handle += 1
    table.entries.append({"rule": {**value, "handle": table.handle}})


def _scribble(table: ListedTable) -> None:
    if table.of("chain"):
        chain = table.of("chain")[0]["name"]
        _stranger(table, {"chain": chain, "expr": [{"accept": None}]})


def _guards_first(table: ListedTable) -> None:
    drops = [e for e in table.entries if "rule" in e and "drop" in e["rule"]["expr"][-1]]
    others = [e for e in table.entries if e not in drops]
    first = next((i for i, e in enumerate(others) if "rule" in e), len(others))
    table.entries = others[:first] + drops + others[first:]


def _twice(table: ListedTable) -> None:
    for rule in table.of("rule"):
        _stranger(table, rule)


def _other_members(table: ListedTable) -> None:
    for one in table.of("set"):
        v4 = one["type"] == "ipv4_addr"
        one["elem"] = [*one.get("elem", [])[1:]]
        for text in ("77.7.7.7", "77.7.7.8") if v4 else ("7777::7", "7777::8"):
            if not any(ip_address(text) in _net(member) for member in one["elem"]):
                one["elem"].append(text)


def _net(element: Any) -> Any:
    if isinstance(element, str):
        return ip_network(element)
    return ip_network((element["prefix"]["addr"], element["prefix"]["len"]))


def _other_kind(table: ListedTable) -> None:
    """As a stranger can have it: he makes the set anew, and all rules that look into it."""
    for one in table.of("set"):
        one["flags"] = ["interval", "timeout"]
        one["timeout"] = 60


def _set_of_our_name(table: ListedTable) -> None:
    table.entries = [e for e in table.entries if "set" not in e and "@peers" not in str(e)]
    for peers in NAMES:
        table.entries.append({"set": {"name": str(peers), "type": "inet_service", "handle": 1}})


PLACE = {"family": "inet", "table": "portranger", "handle": 1}
HARM: dict[str, Callable[[ListedTable], None]] = {
    "nothing": lambda _: None,
    "a stranger's rule": _scribble,
    "guards first": _guards_first,
    "everything twice": _twice,
    "other members": _other_members,
    "another kind of set": _other_kind,
    "sets of our names": _set_of_our_name,
    "a stray set": lambda table: table.entries.append({"set": {"name": "extra"}}),
    "an unused set": lambda table: table.entries.append(
        {"set": {"name": "peers-ip-beef", "type": "ipv4_addr", "flags": ["interval"], **PLACE}}
    ),
    "a stray chain": lambda table: table.entries.append({"chain": {"name": "extra"}}),
}


@given(
    st.lists(desireds, min_size=1, max_size=2),
    desireds,
    st.sampled_from(sorted(HARM)),
    st.booleans(),
)
def test_the_commands_lead_from_any_table_to_any_other(
    before: list[Desired], after: Desired, harm: str, at_once: bool
) -> None:
    table = written(*before)
    if table.entries:
        HARM[harm](table)
    found = seen(table)
    plan = diff("vm", after, found)
    parts = [steps_of(plan)] if at_once else transactions(plan)
    for part in parts:
        table.run(commands(part))
        assert can_write(part)
        assert batch(part)
    now = seen(table)
    assert diff("vm", after, now).empty
    assert Counter(live.rule for live in now.live) == Counter(after.rules)
    assert (now.sets, now.foreign) == (after.sets, ())
    assert_guards_come_last(table)
    if plan.table is Table.KEEP:
        stay = {live for live in plan.unchanged if live.rule in after.rules}
        assert stay <= set(now.live)


@given(st.lists(desireds, min_size=2, max_size=4))
def test_what_is_foreseen_is_what_is_found(wishes: list[Desired]) -> None:
    table = ListedTable()
    for desired in wishes:
        found = seen(table)
        was = {rule["handle"] for rule in table.of("rule")}
        plan = diff("vm", desired, found)
        steps = [step for part in transactions(plan) for step in part]
        table.run(commands(steps))
        made = sorted({rule["handle"] for rule in table.of("rule")} - was)
        predicted, now = carried_out(steps, found, made), seen(table)
        assert Counter(map(identity, predicted.live)) == Counter(map(identity, now.live))
        assert replace(predicted, live=()) == replace(now, live=())


def identity(live: Live) -> tuple[Rule, int]:
    return live.rule, live.handle


@given(sets(NAMES[0]) | sets(NAMES[2]), st.data())
def test_a_mutilated_set_is_not_ours_or_another_that_says_what_it_holds(
    members: Members, data: st.DataObject
) -> None:
    family = Family.of(next(iter(members)).network_address) if members else Family.IP
    peers = Peers(family, "a1")
    gate = Rule(chain=Chain.FORWARD, family=family, owner="a", accepts=True, peers=peers)
    gate = replace(gate, source=ADDRESSES[family][1])
    desired = Desired(rules=frozenset({gate}), sets={peers: members})
    table = written(desired)
    (whole,) = table.of("set")
    broken = data.draw(mutilated(whole))
    rest = [entry for entry in table.entries if "set" not in entry]
    table.entries = [*rest[:1], {"set": broken}, *rest[1:]]
    observed = seen(table)
    diff("vm", desired, observed)  # whatever it is can be compared
    if observed.sets.get(peers) == members:
        assert {str(_net(one)) for one in broken.get("elem", [])} == set(map(str, members))
        same = {key: broken.get(key) for key in ("name", "type", "flags", "table", "family")}
        assert same == {key: whole[key] for key in same}


# -------------------------------------------------------------------------------------------- flows

OWN: set[Address] = {ip_address("10.0.0.1"), ip_address("fd00::1")}


@given(
    worlds(),
    subjects,
    st.lists(
        st.tuples(
            st.sampled_from(IPS),
            st.booleans(),
            st.sampled_from([*NUMBERS.values(), 1, 47, 58]),
            st.sampled_from(PORTS),
            st.sampled_from(PORTS),
        ),
        min_size=20,
        max_size=60,
    ),
)
def test_a_flow_is_forbidden_exactly_where_no_rule_admits_it(
    world: World, pod: Pod, flows: list[tuple[str, bool, int, int, int]]
) -> None:
    desired = wanted(world, pod)
    cut = forbidden(filters(desired), desired.sets)
    protocols = {number: protocol for protocol, number in NUMBERS.items()}
    for ip, incoming, number, port, answering in flows:
        peer = ip_address(ip)
        family, guest = Family.of(peer), guest_of(peer)
        flow = Flow(
            family=family,
            protocol=number,
            port=port,
            sender=peer if incoming else guest,
            destination=ip_address("10.9.9.9" if family is Family.IP else "fd09::9")
            if incoming
            else peer,
            answerer=guest if incoming else peer,
            answering_port=answering,
        )
        seen_port = answering if incoming else port  # where it was translated to, if it was
        known = number in protocols
        packet = Packet(
            "Ingress" if incoming else "Egress",
            ip,
            protocols[number].name if known else "ICMP",
            seen_port if known else None,
        )
        admitted = judged(desired, packet)
        expected = admitted == [] and peer not in OWN
        assert any(one.holds(flow, OWN) for one in cut) == expected
        elsewhere = replace(flow, sender=peer, answerer=peer, destination=peer)
        assert not any(one.holds(elsewhere, OWN) for one in cut)
        assert not any(one.holds(replace(flow, sender=None), OWN) for one in cut)
