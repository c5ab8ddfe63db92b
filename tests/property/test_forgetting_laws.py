"""However much is due: a flow is forgotten for exactly what the plain definition says, which is to
hold it against everything; and nothing that is due is passed over at a glance."""

from __future__ import annotations

import struct
from ipaddress import ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from agent.kernel.conntrack import flow_of
from agent.kernel.flush import Glance
from agent.kernel.netlink import Attributes, attribute
from rules.model import NUMBERS, OWN, Family, Protocol
from rules.ports import PortRange, coalesce
from rules.sieve import Sieve, questions_of, signs_of
from rules.stale import Displaced, Due, Flow, Forbidden, Forgotten
from rules.values import replace

ADDRESSES = {
    Family.IP: [ip_address(f"10.0.2.{last}") for last in range(4)],
    Family.IP6: [ip_address(f"fd10::{last}") for last in range(4)],
}
POD = {some[0] for some in ADDRESSES.values()}
PEERS = {Family.IP: ip_network("10.0.2.2/31"), Family.IP6: ip_network("fd10::2/127")}
VERSIONS = {Family.IP: 2, Family.IP6: 10}

# Few of each, so that what is due often meets, overlaps and holds.
families = st.sampled_from(list(Family))
port_numbers = st.integers(1, 12)
ranges = st.tuples(port_numbers, port_numbers).map(lambda two: PortRange(min(two), max(two)))
some_ports = st.lists(ranges, min_size=1, max_size=4).map(coalesce)
numbers = st.sampled_from([*NUMBERS.values(), 1, 47])


@st.composite
def forgottens(draw: st.DrawFn) -> Forgotten:
    family = draw(families)
    addresses = st.sampled_from(ADDRESSES[family])
    endpoints = draw(st.frozensets(addresses, max_size=2))
    ports = draw(some_ports)
    return Forgotten(
        family=family,
        protocol=draw(st.sampled_from([None, *Protocol])),
        ports=ports,
        answerer=draw(st.none() | addresses),
        destination=draw(st.none() | st.just(OWN[family]) | addresses),
        endpoints=endpoints,
        shut=ports[:1],
    )


@st.composite
def others(draw: st.DrawFn) -> Displaced | Forbidden:
    family = draw(families)
    guest = draw(st.sampled_from(ADDRESSES[family]))
    if draw(st.booleans()):
        return Displaced(family=family, guest=guest, ports=draw(some_ports))
    whom = st.sampled_from([None, (), (PEERS[family],)])
    protocols = st.sampled_from([None, *Protocol])
    allowed = st.lists(st.tuples(whom, protocols, st.none() | some_ports), max_size=2)
    return Forbidden(
        family=family, guest=guest, incoming=draw(st.booleans()), allowed=tuple(draw(allowed))
    )


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    family = draw(families)
    addresses = st.sampled_from(ADDRESSES[family])
    number = draw(numbers)
    ports = port_numbers if number in NUMBERS.values() else st.just(0)
    return Flow(
        family=family,
        protocol=number,
        port=draw(ports),
        destination=draw(addresses),
        answerer=draw(addresses),
        sender=draw(addresses),
        answering_port=draw(ports),
        sending_port=draw(ports),
        answered_port=draw(ports),
    )


def plain(due: list[Due], flow: Flow) -> list[Due]:
    return [one for one in due if one.holds(flow, POD)]


@given(st.lists(forgottens() | others(), max_size=30), st.lists(flows(), min_size=5, max_size=20))
def test_a_flow_is_held_against_few_and_forgotten_for_the_same(
    due: list[Due], some: list[Flow]
) -> None:
    sieve = Sieve(due, POD)
    for flow in some:
        assert sorted(map(repr, sieve.holding(flow))) == sorted(map(repr, plain(due, flow)))


@given(flows(), st.lists(ranges, max_size=12))
def test_of_ranges_that_overlap_all_are_found_that_have_the_port(
    flow: Flow, some: list[PortRange]
) -> None:
    due: list[Due] = [
        Forgotten(family=Family.IP, protocol=Protocol.TCP, ports=(one,), answerer=flow.answerer)
        for one in some
    ]
    known = replace(flow, family=Family.IP, protocol=NUMBERS[Protocol.TCP])
    for port in range(1, 13):
        there = replace(known, port=port)
        found = Sieve(due, POD).holding(there)
        assert sorted(map(repr, found)) == sorted(map(repr, plain(due, there)))


@given(st.lists(forgottens() | others(), max_size=3), st.lists(flows(), min_size=5, max_size=20))
def test_what_is_to_be_forgotten_is_never_passed_over_at_a_glance(
    due: list[Due], some: list[Flow]
) -> None:
    glance = Glance(signs_of(due))
    for flow in some:
        entry = written(flow)
        assert flow_of((VERSIONS[flow.family],), entry) == flow
        assert glance.catches(entry) or not plain(due, flow)


@given(st.lists(forgottens() | others(), max_size=3), st.lists(flows(), min_size=5, max_size=20))
def test_what_is_to_be_forgotten_is_among_what_the_kernel_is_asked_for(
    due: list[Due], some: list[Flow]
) -> None:
    questions = questions_of(due, POD)
    if questions is not None:
        for flow in some:
            assert any(one.holds(flow) for one in questions) or not plain(due, flow)


@given(flows(), st.lists(forgottens(), min_size=1, max_size=30))
def test_a_flow_of_no_port_and_nobody_that_is_due_is_passed_over(
    flow: Flow, due: list[Forgotten]
) -> None:
    """On a node: there, what is due has a destination, and its ports."""
    published = [one for one in due if one.destination is not None and one.protocol is not None]
    glance = Glance(signs_of(published))
    assert glance.catches(written(flow)) == any(
        flow.protocol == NUMBERS[one.protocol] and any(flow.port in ports for ports in one.ports)
        for one in published
        if one.protocol is not None
    )


def written(flow: Flow) -> Attributes:
    """The flow as the kernel tells it."""
    source, destination = (1, 2) if flow.family is Family.IP else (3, 4)

    def direction(sender: bytes, receiver: bytes, sending: int, receiving: int) -> bytes:
        addresses = attribute(source, sender) + attribute(destination, receiver)
        ports = attribute(1, bytes([flow.protocol]))
        if flow.protocol in NUMBERS.values():
            ports += attribute(2, struct.pack(">H", sending))
            ports += attribute(3, struct.pack(">H", receiving))
        return attribute(1, addresses, nested=True) + attribute(2, ports, nested=True)

    assert flow.sender is not None
    sender, answerer = flow.sender.packed, flow.answerer.packed
    return {
        1: direction(sender, flow.destination.packed, flow.sending_port, flow.port),
        2: direction(answerer, sender, flow.answering_port, flow.answered_port),
    }
