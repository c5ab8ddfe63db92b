"""The laws of publishing, over arbitrary Services, endpoints and nodes: each against what a plain
dictionary of single ports, or a count of them, says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.kernel.memory import MemoryNamespace
from rules.allotment import Allotment, allot, holder_of, name_of, wishes
from rules.model import (
    OWN,
    Address,
    Chain,
    Desired,
    Detour,
    Family,
    Live,
    Observed,
    Protocol,
    Rule,
    Share,
)
from rules.nft_batch import batch, can_write
from rules.nft_foreseen import carried_out, has_copies, is_for
from rules.nft_steps import AddLookup, AddRule, BridgeStep
from rules.node_ports import Allocations, Bands, Holder
from rules.occupied import Listener, Occupied, Translation
from rules.plan import Table, diff
from rules.ports import PortRange
from rules.publish import CELLS, FEWEST, Face, Node, Publishing, clients, desire_node, faces
from rules.render import plan_json, plan_text, summary
from rules.service_conflicts import refuse
from rules.services import Endpoint, Publication, Service, ServicePort, ServiceType
from rules.shapes import FEW, MANY, lookup_of, weight
from rules.trace import Packet, traced
from rules.values import replace
from tests.property.strategies import ListedTable
from tests.unit.samples import LO, POD, encode, link, script_lines, space, steps, trace

# ------------------------------------------------------------------------------------- strategies

NODE: dict[Family, Address] = {
    Family.IP: IPv4Address("198.51.100.2"),
    Family.IP6: IPv6Address("2001:db8:5::2"),
}
VIPS = [ip_address("203.0.113.7"), ip_address("2001:db8:9::7")]  # allowed, and nobody's own
AWAY = [ip_address("192.0.2.77")]  # neither
AROUND = space(LO, link("eth0", *(f"{one}/24" for one in NODE.values())))
HOW = Publishing(allowed=(ip_network("203.0.113.0/24"), ip_network("2001:db8:9::/64")))
PLACES: dict[Family, list[Address]] = {
    Family.IP: [ip_address(f"10.1.0.{number}") for number in (2, 3, 11, 12, 200)],
    Family.IP6: [ip_address(f"fd01::{number}") for number in (2, 3, 11, 12, 200)],
}
FIRST, LAST = 1, 24  # of the ports of Services, so that they often meet
BANDS = Bands(PortRange(30000, 30029))
NAMES = ["a", "b", "c", "x" * 140]


@st.composite
def port_lists(draw: st.DrawFn) -> tuple[ServicePort, ...]:
    """Ports of one Service: two of one protocol never meet, nor do their node ports."""
    found: list[ServicePort] = []
    for name in draw(st.lists(st.sampled_from(["", "m", "n", "o"]), max_size=4, unique=True)):
        first = draw(st.integers(FIRST, LAST) | st.integers(30000, 30024))
        count = draw(st.sampled_from([1, 1, 2, 5, 9]))
        wish = draw(st.none() | st.integers(30000 - 2, 30029))
        one = ServicePort(
            name=name,
            protocol=draw(st.sampled_from(Protocol)),
            ports=_run(first, count),
            target=_run(draw(st.sampled_from([first, 1, 7, 60000])), count),
            node_ports=None if wish is None else _run(wish, count),
            ranged=draw(st.booleans()),
        )
        if not any(_collide(one, other) for other in found):
            found.append(one)
    return tuple(found)


def _run(first: int, count: int) -> PortRange:
    return PortRange(first, first + count - 1)


def _collide(one: ServicePort, other: ServicePort) -> bool:
    if one.protocol is not other.protocol:
        return False
    wishes = one.node_ports and other.node_ports and one.node_ports.overlaps(other.node_ports)
    return one.ports.overlaps(other.ports) or bool(wishes)


@st.composite
def services(draw: st.DrawFn, name: str) -> Service:
    addresses = st.lists(st.sampled_from([*NODE.values(), *VIPS, *AWAY]), max_size=2, unique=True)
    kind = draw(st.sampled_from([ServiceType.NODE_PORT, *ServiceType]))
    return Service(
        namespace="shop",
        name=name,
        type=kind,
        ports=draw(port_lists()),
        headless=draw(st.sampled_from([False] * 5 + [kind is ServiceType.CLUSTER_IP])),
        external=tuple(draw(addresses)),
        ingress=tuple(draw(addresses)),
        affinity=draw(st.sampled_from([None, 10800])),
        allocates=draw(st.booleans()),
        local=draw(st.booleans()),
    )


@st.composite
def publications(draw: st.DrawFn, name: str) -> Publication:
    service = draw(services(name))
    places = st.lists(st.sampled_from([*PLACES[Family.IP], *PLACES[Family.IP6]]), max_size=4)
    found = []
    for port in service.ports:
        assert isinstance(port.target, PortRange)
        elsewhere = port.target.first if port.ranged else 4321  # as a named port may be
        ends = [
            Endpoint(
                address=address,
                port=draw(st.sampled_from([port.target.first, elsewhere])),
                local=int(address) % 2 == 0,
            )
            for address in draw(places)
        ]
        found.append(tuple(ends))
    return Publication(service=service, endpoints=tuple(found))


@st.composite
def publication_lists(draw: st.DrawFn) -> list[Publication]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    return [draw(publications(name)) for name in names]


chances = st.randoms(use_true_random=False)
hows = st.builds(
    lambda addresses, ranges_only: replace(HOW, addresses=addresses, ranges_only=ranges_only),
    st.sampled_from([(), (), (NODE[Family.IP],), (NODE[Family.IP6], VIPS[0])]),
    st.booleans(),
)
endpoint_lists = st.sampled_from(Family).flatmap(
    lambda family: st.lists(st.integers(1, 60), min_size=1, max_size=9, unique=True).map(
        lambda numbers: [PLACES[family][0] + number for number in sorted(numbers)]
    )
)


def at(addresses: Iterable[Address], *, sticky: bool) -> Face:
    """A face with these endpoints."""
    port = ServicePort(name="m", protocol=Protocol.UDP, ports=_run(5, 3), target=_run(5, 3))
    service = Service(
        namespace="shop",
        name="a",
        type=ServiceType.NODE_PORT,
        ports=(port,),
        affinity=60 if sticky else None,
    )
    ends = tuple(Endpoint(address=one, port=5) for one in addresses)
    family = Family.of(ends[0].address)
    return Face(
        service=service, port=port, family=family, at=OWN[family], ports=_run(5, 3), endpoints=ends
    )


# ----------------------------------------------------------------------------------------- shares


def owners(addresses: Iterable[Address], *, sticky: bool, chain: Chain) -> list[Address]:
    """Who gets each number: exactly one does."""
    rules = desire_node([at(addresses, sticky=sticky)], None, HOW).rules
    here = [rule for rule in rules if rule.chain is chain]
    assert len({rule.share and (rule.share.of, rule.share.client) for rule in here}) == 1
    takers: dict[int, list[Address]] = {}
    for rule in here:
        assert rule.to is not None
        for number in rule.share.at if rule.share else [0]:
            takers.setdefault(number, []).append(rule.to)
    share = here[0].share
    assert sorted(takers) == [*range(share.of if share else 1)]
    assert {len(some) for some in takers.values()} == {1}
    return [takers[number][0] for number in sorted(takers)]


@given(endpoint_lists, st.booleans(), st.sampled_from([Chain.PREROUTING, Chain.OUTPUT]))
def test_every_number_is_for_exactly_one_endpoint(
    addresses: list[Address], sticky: bool, chain: Chain
) -> None:
    found = owners(addresses, sticky=sticky, chain=chain)
    assert set(found) == set(addresses), "everybody gets some"
    if not sticky:
        assert max(Counter(found).values()) == min(Counter(found).values()), "as many each"


@given(endpoint_lists, st.booleans())
def test_what_comes_in_and_what_the_node_sends_go_to_the_same_endpoint(
    addresses: list[Address], sticky: bool
) -> None:
    entering, sent = (
        owners(addresses, sticky=sticky, chain=chain) for chain in (Chain.PREROUTING, Chain.OUTPUT)
    )
    assert entering == sent


@given(endpoint_lists, st.data())
def test_a_client_moves_only_if_its_endpoint_goes_or_to_one_that_comes(
    addresses: list[Address], data: st.DataObject
) -> None:
    if not 3 <= len(addresses) <= FEWEST // CELLS:
        return  # a single one has all, and more have other numbers
    gone = data.draw(st.sampled_from(addresses))
    left = [one for one in addresses if one != gone]
    before = owners(addresses, sticky=True, chain=Chain.PREROUTING)
    after = owners(left, sticky=True, chain=Chain.PREROUTING)
    assert len(before) == len(after)
    for was, now in zip(before, after, strict=True):
        assert was in (now, gone)  # and the other way round, when it comes


def spread(count: int, seed: int) -> tuple[int, list[list[int]]]:
    return clients([ip_address((10 << 24) + seed + 7 * place) for place in range(count)])


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9, 20, 50, 100, 257, 500, 1000])
@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=3, deadline=None)
def test_every_endpoint_gets_a_fair_share_of_the_clients(count: int, seed: int) -> None:
    of, numbers = spread(count, seed)
    assert sum(map(len, numbers)) == of
    assert sorted(number for some in numbers for number in some) == [*range(of)]
    fair = of / count
    assert min(map(len, numbers)) > fair / 4
    assert max(map(len, numbers)) < fair * 3


@pytest.mark.parametrize("count", [8, 16, 64, 256])
@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=3, deadline=None)
def test_few_clients_move_where_one_more_endpoint_takes_more_numbers(count: int, seed: int) -> None:
    (fewer, before), (more, after) = spread(count, seed), spread(count + 1, seed)
    assert more == 2 * fewer
    was = {number: place for place, some in enumerate(before) for number in some}
    now = {number: place for place, some in enumerate(after) for number in some}
    moved = sum(now[n] not in (was[n % fewer], count) for n in range(more))
    assert moved / more < 0.12


@given(endpoint_lists, st.booleans(), chances)
def test_the_order_of_endpoints_does_not_matter(
    addresses: list[Address], sticky: bool, random: Any
) -> None:
    given = Publication(
        service=at(addresses, sticky=sticky).service,
        endpoints=(tuple(Endpoint(address=one, port=5) for one in addresses),),
    )
    ends = given.endpoints[0]
    shuffled = replace(given, endpoints=(tuple(random.sample(ends, len(ends))),))
    known = Allocations(BANDS, {Holder("Service/shop/a", "m", Protocol.UDP): _run(30000, 3)})
    assert faces([given], known, None, HOW) == faces([shuffled], known, None, HOW)


# -------------------------------------------------------------------------- what packets meet

Way = tuple[str, str, Address, PortRange]  # a Service, its port, at which address with which
Ends = frozenset[tuple[Address, int]]
Seen = dict[int, Ends]  # where each single port leads


def naive(one: Publication, known: Allocations, how: Publishing) -> dict[Way, Seen]:
    """Every port that a Service shows, one by one, as a person would write it down."""
    service = one.service
    found: dict[Way, Seen] = {}
    if service.headless or service.type is ServiceType.EXTERNAL_NAME:
        return found
    for port, endpoints in zip(service.ports, one.endpoints, strict=True):
        if how.ranges_only and not port.ranged:
            continue
        firsts: list[tuple[Address, int]] = []
        holds = known.held.get(Holder(str(service), port.name, port.protocol))
        if holds is not None:
            firsts += [(address, holds.first) for address in how.addresses or OWN.values()]
        for address in {*service.external, *service.ingress}:
            if address in NODE.values() or address in VIPS:
                firsts.append((address, port.ports.first))
        for address, first in firsts:
            ends = {
                (end.address, end.port)
                for end in endpoints
                if end.address.version == address.version and (end.local or not service.local)
            }
            seen = {
                first + step: frozenset((to, number + step) for to, number in ends)
                for step in range(len(port.ports))
            }
            if ends:
                found[str(service), port.name, address, _run(first, len(port.ports))] = seen
    return found


def published(
    given: list[Publication], how: Publishing
) -> tuple[list[Face], Allocations, frozenset[Rule]]:
    known = allot(Allocations(BANDS), given).allocations
    shown, _ = faces(given, known, frozenset(NODE.values()), how)
    occupied = Occupied(own=frozenset(NODE.values()))
    kept, _, _ = refuse(shown, [], occupied)
    return kept, known, desire_node(kept, None, how).rules


@given(publication_lists(), hows)
def test_a_service_shows_exactly_what_is_written_down(
    given: list[Publication], how: Publishing
) -> None:
    known = allot(Allocations(BANDS), given).allocations
    shown, _ = faces(given, known, frozenset(NODE.values()), how)
    found: dict[Way, Seen] = {}
    for face in shown:
        if face.ours:
            seen = {
                port: frozenset((end.address, end.port + step) for end in face.endpoints)
                for step, port in enumerate(range(face.ports.first, face.ports.last + 1))
            }
            way = str(face.service), face.port.name, face.at, face.ports
            assert way not in found
            found[way] = seen
    expected: dict[Way, Seen] = {}
    for one in given:
        expected |= naive(one, known, how)
    assert found == expected


@given(publication_lists(), hows)
def test_every_packet_goes_where_a_dictionary_of_single_ports_says(
    given: list[Publication], how: Publishing
) -> None:
    kept, known, rules = published(given, how)
    shown = {(str(face.service), face.port.name, face.at, face.ports) for face in kept}
    expected: dict[tuple[Protocol, Address, int], Ends] = {}
    for one in given:
        protocols = {port.name: port.protocol for port in one.service.ports}
        for way, seen in naive(one, known, how).items():
            for port, ends in seen.items() if way in shown else ():
                spot = protocols[way[1]], way[2], port
                assert spot not in expected
                expected[spot] = ends
    addresses = [*OWN.values(), *NODE.values(), *VIPS, *AWAY]
    numbers = {near for _, _, port in expected for near in (port - 1, port, port + 1) if near}
    for chain in (Chain.PREROUTING, Chain.OUTPUT):
        here = [rule for rule in rules if rule.chain is chain]
        for protocol, address, port in product(Protocol, addresses, numbers):
            packet = Packet(
                family=Family.of(address), protocol=protocol, port=port, destination=address
            )
            found = traced(here, chain, packet)
            ends = frozenset(where(rule, port) for rule in found)
            assert ends == expected.get((protocol, address, port), frozenset())
            assert len({one.owner for one in found}) <= 1
            assert trace(here, chain, packet) == (found[0] if found else None)
            takers = Counter(number for rule in found for number in numbers_of(rule, found))
            assert set(takers.values()) <= {1}, "two rules for one flow"


def where(rule: Rule, port: int) -> tuple[Address, int]:
    assert rule.to is not None
    assert rule.ports is not None
    shift = 0 if rule.to_port is None else rule.to_port - rule.ports.first
    return rule.to, port + shift


def numbers_of(rule: Rule, found: list[Rule]) -> tuple[int, ...]:
    """The numbers of flows that it takes."""
    assert (rule.share is None) == (len(found) == 1)
    return rule.share.at if rule.share else (0,)


# --------------------------------------------------------------------------------------- conflicts

Spot = tuple[Protocol, Address, int]
MANY_OWN = frozenset(NODE.values())

listeners = st.builds(
    lambda protocol, family, here, port: Listener(
        protocol=protocol, family=family, address=here[family], port=port
    ),
    st.sampled_from(Protocol),
    st.sampled_from(Family),
    st.sampled_from(
        [
            dict.fromkeys(Family),
            NODE,
            {Family.IP: ip_address("127.0.0.1"), Family.IP6: ip_address("::1")},
            {Family.IP: VIPS[0], Family.IP6: VIPS[1]},
        ]
    ),
    st.integers(FIRST, LAST) | st.integers(30000, 30029),
)
translations = st.builds(
    lambda protocol, first, count, destination: Translation(
        where="a table",
        family=Family.of(destination) if destination else None,
        protocol=protocol,
        ports=(_run(first, count),),
        destination=destination,
    ),
    st.none() | st.sampled_from(Protocol),
    st.integers(FIRST, LAST) | st.integers(30000, 30029),
    st.sampled_from([1, 4]),
    st.none() | st.sampled_from([*NODE.values(), *VIPS]),
)
occupieds = st.builds(
    lambda hearing, translating: Occupied(
        listeners=tuple(hearing), translations=tuple(translating), own=MANY_OWN
    ),
    st.lists(listeners, max_size=3),
    st.lists(translations, max_size=2),
)


def spots(face: Face) -> set[Spot]:
    """Every single port that it takes, at every single address; the node has one of each family."""
    where = NODE[face.family] if face.at == OWN[face.family] else face.at
    return {
        (face.port.protocol, where, port) for port in range(face.ports.first, face.ports.last + 1)
    }


def are_one(one: Face, other: Face) -> bool:
    """The same ports of the same Service, at two addresses: whichever counts, it leads there."""
    return (one.service, one.port, one.ports) == (other.service, other.port, other.ports) and (
        one.at != other.at
    )


def used(occupied: Occupied, face: Face) -> set[Spot]:
    """What of a face's spots somebody else uses."""
    found: set[Spot] = set()
    for spot in spots(face):
        protocol, address, port = spot
        for one in occupied.listeners:
            if (one.protocol, one.family, one.port) == (protocol, face.family, port):
                at = one.address
                hears = address in MANY_OWN if at is None else at == address
                # Who listens at an address has it, or expects it: it may come to be the node's.
                hears |= face.at == OWN[face.family] and at is not None and not at.is_loopback
                found |= {spot} if hears else set()
        for other in occupied.translations:
            if (
                other.protocol in (None, protocol)
                and any(port in ports for ports in other.ports)
                and other.destination in (None, address)
            ):
                found.add(spot)
    return found


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Face], list[Rule], Occupied]:
    """What is wanted, what is live of it, and what others use."""
    given = draw(publication_lists())
    known = allot(Allocations(BANDS), given).allocations
    shown, _ = faces(given, known, MANY_OWN, draw(hows))
    if draw(st.booleans()):
        shown = list(dict.fromkeys(draw(st.lists(rivals(), min_size=2, max_size=6))))
    ours = [face for face in shown if face.ours]
    live = draw(st.lists(st.sampled_from(ours), max_size=3)) if ours else []
    return shown, [*desire_node(live, None, HOW).rules], draw(occupieds)


@st.composite
def rivals(draw: st.DrawFn) -> Face:
    """One of those that want much the same."""
    port = ServicePort(
        name="m",
        protocol=draw(st.sampled_from([Protocol.TCP, Protocol.TCP, Protocol.UDP])),
        ports=_run(draw(st.integers(FIRST, FIRST + 9)), draw(st.sampled_from([1, 5]))),
        target=draw(st.just("http")),
    )
    service = Service(
        namespace="shop",
        name=draw(st.sampled_from(NAMES)),
        type=ServiceType.NODE_PORT,
        ports=(port,),
    )
    family = draw(st.sampled_from([Family.IP, Family.IP, Family.IP6]))
    return Face(
        service=service,
        port=port,
        family=family,
        at=draw(st.sampled_from([OWN[family], NODE[family], VIPS[family is Family.IP6]])),
        ports=port.ports,
        endpoints=(Endpoint(address=PLACES[family][0], port=9),),
        ours=draw(st.sampled_from([True, True, True, False])),
    )


@given(scenes())
def test_of_what_is_kept_no_two_meet(scene: tuple[list[Face], list[Rule], Occupied]) -> None:
    wanted, live, occupied = scene
    kept, _, _ = refuse(wanted, live, occupied)
    holders = [face for face in wanted if not face.ours]
    for one, other in [*combinations(kept, 2), *product(kept, holders)]:
        assert are_one(one, other) or not spots(one) & spots(other)


@given(scenes())
def test_a_port_is_shown_unless_a_rival_or_somebody_else_has_it(
    scene: tuple[list[Face], list[Rule], Occupied],
) -> None:
    wanted, live, occupied = scene
    kept, refused, _ = refuse(wanted, live, occupied)
    holders = [face for face in wanted if not face.ours]
    for face in [face for face in wanted if face.ours]:
        pieces = [one for one in kept if is_piece(one, face)]
        shown = {spot for one in pieces for spot in spots(one)}
        there = {
            (one.protocol, spot[1], port)
            for one in live
            for spot in [next(iter(spots(face)))]
            if (one.owner, one.protocol, one.destination)
            == (face.owner, face.port.protocol, face.at)
            and one.ports
            for port in range(one.ports.first, one.ports.last + 1)
        }
        heard = used(replace(occupied, translations=()), face) - there
        taken = heard | used(replace(occupied, listeners=()), face)
        rivals = [
            one
            for one in (*kept, *holders)
            if not is_piece(one, face) and not are_one(face, one) and spots(face) & spots(one)
        ]
        assert shown == spots(face) - taken or (rivals and not shown) or not shown
        if not shown:
            assert rivals or spots(face) <= taken or is_held(face, wanted)
        if shown != spots(face):
            assert any(one.owner == face.name for one in refused)
        for one in pieces:
            offset = one.ports.first - face.ports.first
            assert [end.port - offset for end in one.endpoints] == [
                end.port for end in face.endpoints
            ]
    assert len(kept) == len(set(kept))


def is_piece(one: Face, face: Face) -> bool:
    whole = (face.service, face.port, face.family, face.at)
    return (one.service, one.port, one.family, one.at) == whole and face.ports.holds(one.ports)


def is_held(face: Face, wanted: list[Face]) -> bool:
    """Whether another that is wanted may have taken its place, though not all of its ports."""
    return any(
        other is not face and not are_one(face, other) and spots(face) & spots(other)
        for other in wanted
    )


@given(scenes())
def test_two_faces_are_kept_exactly_where_their_ports_do_not_meet(
    scene: tuple[list[Face], list[Rule], Occupied],
) -> None:
    ours = [face for face in scene[0] if face.ours]
    for one, other in combinations(ours[:8], 2):
        kept, _, _ = refuse([one, other], [], Occupied(own=MANY_OWN))
        assert (len(kept) == 2) == (are_one(one, other) or not spots(one) & spots(other))


@given(scenes())
def test_who_is_live_gives_way_only_to_who_is_live_or_kube_proxys(
    scene: tuple[list[Face], list[Rule], Occupied],
) -> None:
    wanted, live, occupied = scene
    there = {(one.owner, one.protocol, one.destination, one.ports) for one in live}
    early = [f for f in wanted if f.ours and (f.owner, f.port.protocol, f.at, f.ports) in there]
    theirs = [face for face in wanted if not face.ours]
    kept, _, _ = refuse(wanted, live, occupied)
    alone, _, _ = refuse([*early, *theirs], live, occupied)
    assert [one for one in kept if any(is_piece(one, face) for face in early)] == alone


@given(scenes(), chances)
def test_the_order_of_faces_does_not_matter(
    scene: tuple[list[Face], list[Rule], Occupied], random: Any
) -> None:
    wanted, live, occupied = scene
    shuffled = random.sample(wanted, len(wanted))
    assert refuse(shuffled, random.sample(live, len(live)), occupied) == refuse(
        wanted, live, occupied
    )


# -------------------------------------------------------------------------------------- allotment

bands = st.sampled_from([BANDS, BANDS, Bands(PortRange(30000, 30007)), Bands(PortRange(1, 65535))])


@st.composite
def allotments(draw: st.DrawFn) -> tuple[Allocations, list[Publication]]:
    """What some hold, as others left it, and who asks now."""
    around = draw(bands)
    known = Allocations(around)
    for before in draw(st.lists(publication_lists(), max_size=2)):
        known = allot(known, before).allocations
    return known, draw(publication_lists())


def askers(given: list[Publication]) -> Iterator[tuple[Holder, ServicePort]]:
    return ((holder_of(one.service, port), port) for one in given for port in wishes(one.service))


@given(allotments())
def test_nobodys_ports_overlap_but_for_two_protocols_of_a_service(
    asking: tuple[Allocations, list[Publication]],
) -> None:
    known, given = asking
    found = allot(known, given).allocations
    for (one, ports), (other, others) in combinations(found.held.items(), 2):
        if ports.overlaps(others):
            assert one.owner == other.owner
            assert one.protocol is not other.protocol
    within = found.bands.ports
    assert all(within.first <= p.first and p.last <= within.last for p in found.held.values())


@given(allotments())
def test_who_asks_has_what_it_asked_for_or_is_refused_and_nobody_else_has_any(
    asking: tuple[Allocations, list[Publication]],
) -> None:
    known, given = asking
    found = allot(known, given)
    held = found.allocations.held
    refused = Counter(one.owner for one in found.refused)
    for one in given:
        for port in wishes(one.service):
            mine = held.get(holder_of(one.service, port))
            assert refused[name_of(one.service, port)] == (mine is None)
            if mine is not None:
                assert len(mine) == len(port.ports)
                assert port.node_ports in (None, mine)
    assert held.keys() <= {holder for holder, _ in askers(given)}
    assert sum(refused.values()) == len(dict(askers(given))) - len(held)


@given(allotments())
def test_who_held_what_it_needs_keeps_it(asking: tuple[Allocations, list[Publication]]) -> None:
    known, given = asking
    found = allot(known, given)
    for holder, port in askers(given):
        before = known.held.get(holder)
        if before and len(before) == len(port.ports) and port.node_ports in (None, before):
            assert found.allocations.held[holder] == before


@given(allotments())
def test_what_was_given_is_counted(asking: tuple[Allocations, list[Publication]]) -> None:
    known, given = asking
    found = allot(known, given)
    new = [
        port.node_ports is None
        for holder, port in askers(given)
        if holder in found.allocations.held
        and found.allocations.held[holder] != known.held.get(holder)
    ]
    assert (found.dynamic.given, found.static.given) == (sum(new), len(new) - sum(new))


@given(allotments())
def test_asking_again_changes_nothing(asking: tuple[Allocations, list[Publication]]) -> None:
    known, given = asking
    first = allot(known, given)
    again = allot(first.allocations, given)
    assert again == replace(
        first, static=replace(first.static, given=0), dynamic=replace(first.dynamic, given=0)
    )


@given(allotments(), chances)
def test_the_order_of_who_asks_does_not_matter(
    asking: tuple[Allocations, list[Publication]], random: Any
) -> None:
    known, given = asking
    shuffled = random.sample(given, len(given))
    pairs = [*known.held.items()]
    turned = Allocations(known.bands, dict(random.sample(pairs, len(pairs))))
    assert allot(turned, shuffled) == allot(known, given)


@given(allotments())
def test_nobody_is_given_what_somebody_names(
    asking: tuple[Allocations, list[Publication]],
) -> None:
    """Who wishes in vain was late: another had it, or wished for it as well, or it is outside."""
    known, given = asking
    found: Allotment = allot(known, given)
    held, within = found.allocations.held, known.bands.ports
    asked = dict(askers(given))
    for holder, port in asked.items():
        wish = port.node_ports
        if wish is None or holder in held or wish.first < within.first or wish.last > within.last:
            continue
        before = [pair for pair in known.held.items() if pair[0] in asked]
        named = [pair for pair in held.items() if asked[pair[0]].node_ports is not None]
        assert any(
            ports.overlaps(wish)
            and (other.owner != holder.owner or other.protocol is holder.protocol)
            for other, ports in (*before, *named)
        )


@given(allotments(), st.lists(st.integers(30000, 30029), max_size=6))
def test_what_is_to_be_avoided_is_drawn_for_nobody(
    asking: tuple[Allocations, list[Publication]], numbers: list[int]
) -> None:
    _, given = asking
    found = allot(Allocations(BANDS), given, [_run(one, 1) for one in numbers]).allocations.held
    asked = dict(askers(given))
    for holder, ports in found.items():
        alone = not any(one is not holder and other == ports for one, other in found.items())
        if asked[holder].node_ports is None and alone:
            assert not any(number in ports for number in numbers)


# ----------------------------------------------------------------------------- plans and listings


class PublishedTable(ListedTable):
    """What libnftables lists of shifted maps and of sets, beside what the other tells: a set of
    one is not told from what is in it, nor from 1.1.4 on one flag from a list of them."""

    newer = False

    def _put(self, value: dict[str, Any]) -> None:
        if not value["name"].endswith("/ports"):
            super()._put(value)
            return
        pairs = self._elements(value)
        for port, to in value["elem"]:
            assert all(to == there for other, there in pairs if other == port), "File exists"
            if [port, to] not in pairs:
                pairs.append([port, to])

    def _delete(self, kind: str, value: dict[str, Any]) -> None:
        if kind != "element" or not value["name"].endswith("/ports"):
            super()._delete(kind, value)
            return
        pairs = self._elements(value)
        for port in value["elem"]:
            (found,) = (pair for pair in pairs if pair[0] == port)
            pairs.remove(found)

    def observed(self) -> Observed:
        told = PublishedTable()
        told.entries = _listed(copy.deepcopy(self.entries), self.newer)
        return super(PublishedTable, told).observed()

    @property
    def shifted(self) -> list[list[list[int]]]:
        """The pairs of every map from port to port."""
        return [one.setdefault("elem", []) for one in self.of("map") if "/ports" in one["name"]]


def _listed(value: Any, newer: bool) -> Any:
    if isinstance(value, list):
        return [_listed(one, newer) for one in value]
    if not isinstance(value, dict):
        return value
    members = value.get("set")
    if isinstance(members, list) and len(members) == 1 and len(value) == 1:
        return members[0]
    if newer and len(value.get("flags", ())) == 1:
        value["flags"] = value["flags"][0]
    return {key: one if key == "data" else _listed(one, newer) for key, one in value.items()}


class Kind:
    """Faces whose rules are for the same packets but for their ports."""

    def __init__(self, draw: st.DrawFn, shifts: list[list[int]]) -> None:
        self.family = draw(st.sampled_from(Family))
        vip = VIPS[self.family is Family.IP6]
        self.at = draw(st.sampled_from([OWN[self.family], vip]))
        self.protocol = draw(st.sampled_from(Protocol))
        self.ends = draw(st.integers(1, 3))
        self.sticky = draw(st.booleans())
        self.shifts = draw(st.sampled_from(shifts))

    def face(self, random: Any, first: int) -> Face:
        count = random.choice([1, 1, 3, 9])
        to = first + random.choice(self.shifts)
        port = ServicePort(
            name="m", protocol=self.protocol, ports=_run(first, count), target=_run(to, count)
        )
        service = Service(
            namespace="shop",
            name=random.choice(["a", "b", "c" * 140]),
            type=ServiceType.NODE_PORT,
            ports=(port,),
            affinity=60 if self.sticky else None,
        )
        some = random.sample(PLACES[self.family], self.ends)
        ends = [
            Endpoint(address=one, port=to, local=random.random() < 0.8)
            for one in sorted(some, key=int)
        ]
        return Face(
            service=service,
            port=port,
            family=self.family,
            at=self.at,
            ports=port.ports,
            endpoints=tuple(ends),
        )


STRAIGHT_OR_SHIFTED = [[0], [7], [0, 7], [0, -3, 7]]
SHIFTED = [[7], [-3, 7]]


@st.composite
def desireds(
    draw: st.DrawFn, least: int = 0, shifts: list[list[int]] = STRAIGHT_OR_SHIFTED
) -> Desired:
    """Few or many ranges of one or two kinds, often as many as their shape changes at."""
    random = draw(chances)
    shown: list[Face] = []
    for place in range(draw(st.integers(least, 2))):
        kind = Kind(draw, shifts)
        number = draw(st.sampled_from([1, FEW, FEW + 1, MANY - 1, MANY]) | st.integers(least, 20))
        slots = random.sample(range(100, 500, 10), number)
        shown += [kind.face(random, 1000 * place + slot) for slot in slots]
    routes = {end.address: random.choice(["br0", "br1"]) for f in shown for end in f.endpoints}
    node = draw(st.sampled_from([None, Node(surroundings=AROUND, routes=routes)]))
    return replace(desire_node(shown, node, HOW), notes=())


def settled(table: PublishedTable, desired: Desired) -> None:
    table.run(encode(diff("node:self", desired, seen(table))))


def seen(table: PublishedTable) -> Observed:
    return table.observed() if table.entries else Observed(mapped={})


def rules_only(desired: Desired) -> Desired:
    return replace(desired, sysctls=frozenset())


@given(desireds(), desireds())
def test_after_a_commit_the_next_plan_is_empty(before: Desired, after: Desired) -> None:
    namespace = MemoryNamespace(POD)
    for desired in (before, after):
        names = [sysctl.name for sysctl in desired.sysctls]
        plan = diff("node:self", desired, namespace.observe(names))
        if not plan.empty:
            namespace.commit(plan)
        found = namespace.observe(names)
        assert diff("node:self", desired, found).empty
        assert Counter(live.rule for live in found.live) == Counter(desired.rules)


@given(desireds(), st.booleans())
def test_what_is_encoded_decodes_to_the_same(desired: Desired, newer: bool) -> None:
    table = PublishedTable()
    table.newer = newer
    settled(table, desired)
    found = seen(table)
    assert Counter(live.rule for live in found.live) == Counter(desired.rules)
    assert (found.foreign, found.unsound) == ((), "")
    worth: Counter[Any] = Counter()
    for rule in desired.rules:
        worth[lookup_of(rule)] += weight(rule)
    assert found.mapped is not None
    assert found.mapped.keys() == {one for one, n in worth.items() if one and n >= MANY}


def _less(table: PublishedTable, random: Any) -> None:
    for pairs in table.shifted:
        pairs.remove(random.choice(pairs))


def _more(table: PublishedTable, _: Any) -> None:
    for pairs in table.shifted:
        pairs.append([9999, 8])


def _other(table: PublishedTable, random: Any) -> None:
    for pairs in table.shifted:
        random.choice(pairs)[1] += 1


def _none(table: PublishedTable, _: Any) -> None:
    for pairs in table.shifted:
        pairs.clear()


def _without_ranges(table: PublishedTable, _: Any) -> None:
    for one in table.of("map"):
        if "/ports" not in one["name"]:
            one["elem"] = []


HARM: dict[str, Callable[[PublishedTable, Any], None]] = {
    "nothing": lambda *_: None,
    "a pair less": _less,
    "a pair more": _more,
    "another pair": _other,
    "no pairs": _none,
    "no ranges": _without_ranges,
}


@given(desireds(1, SHIFTED), st.integers(0, 3), st.sampled_from(sorted(HARM)), chances)
def test_harm_to_shifted_maps_is_seen_and_undone_whatever_else_is_wanted_meanwhile(
    before: Desired, fewer: int, harm: str, random: Any
) -> None:
    table = PublishedTable()
    settled(table, before)
    hurt = bool(table.shifted) and harm != "nothing"
    HARM[harm](table, random)
    assert diff("node:self", rules_only(before), seen(table)).empty is not hurt
    ordered = sorted(before.rules, key=lambda rule: rule.key)
    less = replace(before, rules=frozenset(random.sample(ordered, max(0, len(ordered) - fewer))))
    leads_to(table, less)
    leads_to(table, before)


@given(
    st.lists(desireds(), min_size=1, max_size=2), desireds(), st.sampled_from(sorted(HARM)), chances
)
def test_the_commands_lead_from_any_table_to_any_other(
    before: list[Desired], after: Desired, harm: str, random: Any
) -> None:
    table = PublishedTable()
    for desired in before:
        settled(table, desired)
    HARM[harm](table, random)
    leads_to(table, after)


def leads_to(table: PublishedTable, after: Desired) -> None:
    """Whether the plan for what is there leads to what is wanted, and says so in every form."""
    found = seen(table)
    plan = diff("node:self", rules_only(after), found)
    assert plan.empty == (not plan_text(plan)) == (not plan_json([plan], [])["changes"])
    assert plan.empty == summary([plan]).startswith("No changes.")
    assert len(script_lines(plan)) == len(encode(plan))
    table.run(encode(plan))
    now = seen(table)
    assert diff("node:self", rules_only(after), now).empty
    assert Counter(live.rule for live in now.live) == Counter(after.rules)
    if plan.table is Table.KEEP:
        reshaped = {*plan.gathering, *plan.spreading}
        stay = {live for live in found.live if live.rule in after.rules}
        assert {one for one in stay if lookup_of(one.rule) not in reshaped} <= set(now.live)


@given(desireds(), desireds(), st.integers(1, 5))
def test_what_is_foreseen_is_what_is_there(one: Desired, other: Desired, some: int) -> None:
    """Two arbitrary ones are seldom held in the same maps: so we also go from each to one that
    differs in a few rules."""
    table = PublishedTable()
    for desired in (one, other):
        ordered = sorted(desired.rules, key=lambda rule: rule.key)
        for rules in (ordered, ordered[some:], ordered[:-some]):
            before, given = seen(table), table.handle
            plan = diff("node:self", Desired(rules=frozenset(rules)), before)
            assert is_for(plan, before)
            assert not has_copies(before)
            table.run(encode(plan))
            written = [step for step in steps(plan) if not isinstance(step, BridgeStep)]
            handles = [
                rule["handle"]
                for rule in sorted(table.of("rule"), key=lambda rule: rule["handle"])
                if rule["handle"] > given
            ]
            assert len(handles) == sum(isinstance(step, AddRule | AddLookup) for step in written)
            predicted, now = carried_out(written, before, handles), seen(table)
            assert {bare(live) for live in predicted.live} == {bare(live) for live in now.live}
            assert len(predicted.live) == len(now.live)
            assert replace(predicted, live=()) == replace(now, live=())
            if can_write(written):
                assert batch(written, 1)


def bare(live: Live) -> tuple[Rule, int]:
    return live.rule, live.handle


@st.composite
def node_rules(draw: st.DrawFn) -> Rule:
    """Any that has to do with nodes and can be written, whether or not we ever would."""
    family = draw(st.sampled_from(Family))
    if draw(st.integers(0, 3)) == 0:
        some = partial(st.lists, min_size=1, max_size=3, unique=True)
        published = draw(some(st.sampled_from([NODE[family], *PLACES[family]])))
        remote = draw(some(st.sampled_from(PLACES[family])))
        links = draw(some(st.sampled_from(["br0", "a.100", "veth-1"])))
        by_link = draw(st.booleans())
        way = Detour(
            published=tuple(sorted(published)),
            links=tuple(sorted(links)) if by_link else (),
            remote=() if by_link else tuple(sorted(remote)),
        )
        return Rule(chain=Chain.POSTROUTING, family=family, owner="node", detour=way)
    of = draw(st.integers(1, 5))
    numbers = draw(st.lists(st.integers(0, of - 1), min_size=1, unique=True))
    share = Share(of, tuple(sorted(numbers)), draw(st.booleans()))
    count = draw(st.sampled_from([1, 4]))
    first = draw(st.integers(1, 20))
    return Rule(
        chain=draw(st.sampled_from([Chain.PREROUTING, Chain.OUTPUT])),
        family=family,
        owner=draw(st.sampled_from(["", "a", "ü" * 60])),
        protocol=draw(st.sampled_from(Protocol)),
        ports=_run(first, count),
        interface=draw(st.sampled_from([None, None, "eth0"])),
        destination=draw(st.sampled_from([None, OWN[family], NODE[family]])),
        to=draw(st.sampled_from(PLACES[family])),
        to_port=draw(st.sampled_from([None, 7, 65000])),
        share=draw(st.sampled_from([None, share])),
    )


@given(st.frozensets(node_rules(), max_size=8), st.booleans())
def test_any_rule_of_a_node_decodes_to_what_was_encoded(rules: frozenset[Rule], maps: bool) -> None:
    """As a rule of its own, or where there are maps and its ports are free there, in one."""
    free: dict[Any, list[PortRange]] = {}
    for rule in sorted(rules, key=lambda rule: rule.key):
        taken, ports = free.setdefault(lookup_of(rule), []), rule.ports
        if ports is None or not any(ports.overlaps(other) for other in taken):
            taken += [ports] if ports else []
        else:
            rules -= {rule}
    table = PublishedTable()
    table.run(
        encode(diff("node:self", Desired(rules=rules), Observed(mapped={} if maps else None)))
    )
    found = table.observed() if rules else Observed(mapped={})
    assert Counter(live.rule for live in found.live) == Counter(rules)
    assert (found.foreign, found.unsound) == ((), "")
