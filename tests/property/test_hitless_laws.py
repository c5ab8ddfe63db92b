"""At no moment of an edit is a port refused that is declared before and after it: neither between
transactions, nor while one runs, nor if we are killed between two and somebody else goes on."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from rules.model import Chain, Desired, Family, Peers, Protocol, Rule, Share
from rules.nft_sets import Leave
from rules.nft_steps import Step
from rules.nft_transactions import transactions
from rules.plan import Plan, diff
from rules.ports import PortRange
from tests.property.packet_table import (
    DROPPED,
    GUARDED,
    HERE,
    LINK,
    PASSES,
    Flow,
    PacketTable,
    moments,
    resting,
)

GUESTS = [ip_address(f"10.0.{n}.2") for n in (1, 2, 3)]
SETS = [Peers(Family.IP, key) for key in ("aa", "bb")]
NETWORKS = [ip_network(f"10.9.0.{n}/32") for n in range(3)] + [ip_network("10.8.0.0/24")]
SOURCES = [ip_address("10.9.0.0"), ip_address("10.9.0.1"), ip_address("10.8.0.7")]
SHIFT = 1000
LAST = 70


def translations(random: Any, most: int) -> frozenset[Rule]:
    """Ranges that are apart, as machines and Services have them: led to a guest, shifted or not, or
    shared by two or three."""
    if random.random() < 0.05:
        return frozenset({forward(None, GUESTS[0])})
    ends = sorted(random.sample(range(1, LAST), min(2 * random.randint(0, most), LAST - 2)))
    found: set[Rule] = set()
    for first, last in zip(ends[::2], ends[1::2], strict=True):
        ports = PortRange(first, last)
        shift = random.choice([None, None, None, first + SHIFT])
        kind = random.choice("abcd" if most > 4 else "ab")
        if kind in "ab":
            found.add(forward(ports, GUESTS["ab".index(kind)], shift))
        else:
            of = random.choice([2, 3])
            for number, guest in enumerate(random.sample(GUESTS, of)):
                found.add(forward(ports, guest, shift, Share(of, (number,))))
    if random.random() < 0.3:
        guard = Rule(chain=Chain.PREROUTING, family=Family.IP, owner="guard", interface=LINK)
        found.add(guard)
    return frozenset(found)


def forward(
    ports: PortRange | None, to: Any, to_port: int | None = None, share: Share | None = None
) -> Rule:
    return Rule(
        chain=Chain.PREROUTING,
        family=Family.IP,
        owner="a",
        protocol=Protocol.TCP if ports else None,
        ports=ports,
        interface=None if share else LINK,
        destination=HERE if share else None,
        to=to,
        to_port=to_port,
        share=share,
    )


def filters(random: Any) -> tuple[frozenset[Rule], dict[Peers, frozenset[Any]]]:
    """What policies say of some of the guests."""
    found: set[Rule] = set()
    for guest in random.sample(GUESTS, random.choice([0, 0, 1, 2])):
        found.add(filtering(guest, owner=random.choice("pq")))
        for _ in range(random.randint(0, 3)):
            first = random.randint(1, 40)
            ports = random.choice([None, PortRange(first, first + 30)])
            found.add(filtering(guest, ports, random.choice([*SETS, None]), accepts=True))
    if found:
        found.add(Rule(chain=Chain.FORWARD, family=Family.IP, owner="a", accepts=True))
    named = {rule.peers for rule in found if rule.peers}
    return frozenset(found), {
        one: frozenset(random.sample(NETWORKS, random.randint(0, 4)))
        for one in sorted(named, key=str)
    }


def filtering(
    guest: Any,
    ports: PortRange | None = None,
    peers: Peers | None = None,
    *,
    owner: str = "p",
    accepts: bool = False,
) -> Rule:
    return Rule(
        chain=Chain.FORWARD,
        family=Family.IP,
        owner=owner,
        protocol=Protocol.TCP if ports else None,
        ports=ports,
        destination=guest,
        peers=peers,
        accepts=accepts,
    )


@st.composite
def desireds(draw: st.DrawFn) -> Desired:
    random = draw(st.randoms(use_true_random=False))
    some, sets = filters(random)
    return Desired(rules=translations(random, random.choice([3, 12, 30])) | some, sets=sets)


@st.composite
def edits(draw: st.DrawFn) -> tuple[Desired, Desired]:
    """What was and what is to be: often nearly the same."""
    before, other = draw(desireds()), draw(desireds())
    random = draw(st.randoms(use_true_random=False))
    if random.random() < 0.3:
        return before, other
    return before, nearly(before, random)


def nearly(before: Desired, random: Any) -> Desired:
    """Some ranges grown, cut, moved, led elsewhere, gone or come."""
    groups: dict[PortRange, list[Rule]] = {}
    rest = [rule for rule in before.rules if rule.chain is Chain.FORWARD or not rule.ports]
    for rule in before.rules.difference(rest):
        assert rule.ports is not None
        groups.setdefault(rule.ports, []).append(rule)
    made: set[Rule] = set(rest)
    spans = sorted(groups)
    ends = [0, *(ports.last for ports in spans)]
    for place, ports in enumerate(spans):
        first, last = ports.first, ports.last
        free = (spans[place + 1].first if place + 1 < len(spans) else LAST) - 1
        fate = random.choice(["same", "same", "same", "grow", "cut", "lead", "go", "share"])
        if fate == "grow":
            first, last = random.randint(ends[place] + 1, first), random.randint(last, free)
        elif fate == "cut":
            first = random.randint(first, last)
            last = random.randint(first, last)
        elif fate == "go":
            continue
        ends[place + 1] = last
        if fate in ("lead", "share"):
            of = random.choice([2, 3])
            shift = random.choice([None, first + SHIFT, first + SHIFT + 1])
            if fate == "lead":
                made.add(forward(PortRange(first, last), random.choice(GUESTS), shift))
            else:
                for number, guest in enumerate(random.sample(GUESTS, of)):
                    made.add(forward(PortRange(first, last), guest, shift, Share(of, (number,))))
            continue
        for rule in groups[ports]:
            shift = rule.to_port and first + SHIFT
            made.add(forward(PortRange(first, last), rule.to, shift, rule.share))
    if random.random() < 0.3:
        some, sets = filters(random)
        made = {rule for rule in made if rule.chain is not Chain.FORWARD} | some
        return Desired(rules=frozenset(made), sets=sets)
    again = {one: frozenset(random.sample(NETWORKS, random.randint(0, 4))) for one in before.sets}
    return Desired(rules=frozenset(made), sets=again)


FLOWS = [
    Flow(Chain.PREROUTING, port, number) for port in range(1, LAST + 2) for number in range(6)
] + [
    Flow(Chain.FORWARD, port, 0, source, guest)
    for port in (1, 20, 40, 60)
    for source in SOURCES
    for guest in GUESTS
]


def carried_out(table: PacketTable, parts: Iterable[list[Step]]) -> list[PacketTable]:
    """The table before, between and after."""
    states = [table]
    for part in parts:
        states.append(states[-1].after(part))
    return states


def planned(desired: Desired, table: PacketTable, unsound: str = "") -> Plan:
    return diff("blue", desired, table.observed(unsound))


def held(desired: Desired) -> PacketTable:
    """A table that holds it."""
    plan = planned(desired, PacketTable())
    return carried_out(PacketTable(), transactions(plan))[-1]


def lost(states: list[PacketTable], parts: list[list[Step]]) -> list[tuple[Flow, object]]:
    """Flows that are served before and after, and in between neither as before nor as after."""
    before, after = resting(states[0]), resting(states[-1])
    watched = []
    leave = any(isinstance(step, Leave) for part in parts for step in part)
    for flow in FLOWS:
        fates = before.outcome(flow), after.outcome(flow)
        if flow.chain is Chain.FORWARD:
            # Who leaves a set that is named by more rules from now on is let in until he has left.
            if fates[0] == fates[1] and not (fates[0] == DROPPED and leave):
                watched.append((flow, fates))
        elif fates[0] != GUARDED and fates[1] not in (GUARDED, PASSES):
            watched.append((flow, fates))
    return [
        (flow, (*fates, outcome))
        for view in moments(states, parts)
        for flow, fates in watched
        if (outcome := view.outcome(flow)) not in fates
    ]


@given(edits())
def test_no_edit_refuses_what_is_declared_before_and_after(edit: tuple[Desired, Desired]) -> None:
    table = held(edit[0])
    parts = transactions(planned(edit[1], table))
    states = carried_out(table, parts)
    assert not lost(states, parts)
    assert planned(edit[1], states[-1]).same_rules


@given(edits())
def test_a_table_that_is_made_anew_refuses_nothing(edit: tuple[Desired, Desired]) -> None:
    assume(edit[1].rules)  # else the table goes as it is
    table = held(edit[0])
    parts = transactions(planned(edit[1], table, "flags"))
    states = carried_out(table, parts)
    assert not lost(states, parts)
    assert planned(edit[1], states[-1]).same_rules


@given(edits(), edits(), st.randoms(use_true_random=False))
def test_whoever_goes_on_after_a_kill_refuses_nothing(
    edit: tuple[Desired, Desired], others: tuple[Desired, Desired], random: Any
) -> None:
    """An edit is killed after any of its transactions, perhaps while it made the table anew, and so
    is the next one, perhaps: what each finds is a table that somebody left in between. What is then
    wanted may be what was wanted when it was killed, what was before, nearly one of these, or
    something else. Each flow that the table as left leads to a guest or lets pass (whether by what
    was there before the kill, by what had come already, or by a bridge), and that is declared by
    what is wanted now, goes where the one or the other leads it, at every moment; what filters say
    of it before and after, they say all the time."""
    table = held(edit[0])
    wishes = [*edit, *others]
    wanted = edit[1]
    for last in random.choice([(False, True), (False, True), (False, False, True)]):
        anew = "flags" if wanted.rules and random.random() < 0.15 else ""
        parts = transactions(planned(wanted, table, anew))
        states = carried_out(table, parts)
        assert not lost(states, parts)
        assert planned(wanted, states[-1]).same_rules
        table = states[-1 if last or len(parts) < 2 else random.randint(1, len(parts) - 1)]
        wanted = random.choice([*wishes, nearly(edit[0], random), nearly(edit[1], random)])


@given(edits())
def test_what_stays_is_not_written_again(edit: tuple[Desired, Desired]) -> None:
    table = held(edit[0])
    plan = planned(edit[1], table)
    after = carried_out(table, transactions(plan))[-1]
    reshaped = {*plan.gathering, *plan.spreading}
    for live in plan.unchanged:
        if live.rule.lookup not in reshaped:
            assert live in after.observed().live


def test_one_transaction_for_all_would_refuse() -> None:
    """What this suite is for: the same steps at once lose flows."""
    ranges = [PortRange(n, n + 5) for n in range(1, 61, 6)]
    before = Desired(rules=frozenset(forward(one, GUESTS[0]) for one in ranges))
    cut = [PortRange(1, 3), *ranges[1:]]
    after = Desired(rules=frozenset(forward(one, GUESTS[0]) for one in cut))
    table = held(before)
    parts = transactions(planned(after, table))
    assert len(parts) == 3
    whole = [[step for part in parts for step in part]]
    assert lost(carried_out(table, whole), whole)
    assert not lost(carried_out(table, parts), parts)


def test_a_bridge_that_was_left_leads_until_what_is_wanted_now_does() -> None:
    """The killed edit led the first range elsewhere, over a bridge; its map still has the old."""
    ranges = [PortRange(n, n + 5) for n in range(1, 61, 6)]
    rest = [forward(one, GUESTS[0]) for one in ranges[2:]]
    second = forward(ranges[1], GUESTS[0])
    before = Desired(rules=frozenset([forward(ranges[0], GUESTS[0]), second, *rest]))
    killed = Desired(rules=frozenset([forward(ranges[0], GUESTS[1]), second, *rest]))
    moved = [forward(ranges[0], GUESTS[2], SHIFT), forward(PortRange(7, 9), GUESTS[0])]
    wanted = Desired(rules=frozenset([*moved, *rest]))
    table = held(before)
    left = carried_out(table, transactions(planned(killed, table))[:1])[-1]
    assert resting(left).outcome(Flow(Chain.PREROUTING, 1)) == (str(GUESTS[1]), 1)
    parts = transactions(planned(wanted, left))
    assert not lost(carried_out(left, parts), parts)


def test_a_range_that_is_hidden_behind_another_is_never_met() -> None:
    """The killed edit had filled the shifted range into its map, and the other was still there."""
    ranges = [PortRange(n, n + 5) for n in range(1, 61, 6)]
    shifted = [forward(PortRange(61, 62), GUESTS[0], SHIFT)]
    rest = [*(forward(one, GUESTS[0]) for one in ranges[2:]), *shifted]
    second = forward(ranges[1], GUESTS[0])
    before = Desired(rules=frozenset([forward(ranges[0], GUESTS[0]), second, *rest]))
    killed = Desired(rules=frozenset([forward(ranges[0], GUESTS[1], SHIFT), second, *rest]))
    wanted = Desired(rules=frozenset([forward(PortRange(1, 12), GUESTS[0]), *shifted]))
    table = held(before)
    left = carried_out(table, transactions(planned(killed, table))[:1])[-1]
    assert resting(left).outcome(Flow(Chain.PREROUTING, 1)) == (str(GUESTS[0]), 1)
    parts = transactions(planned(wanted, left))
    assert not lost(carried_out(left, parts), parts)
