"""Which open flows a change has to forget: those of ports that were taken away or point elsewhere
now, and those that would keep a newly forwarded UDP port from being forwarded. No others."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rules.model import (
    FORWARDED,
    POLICED,
    Address,
    Chain,
    Family,
    Live,
    Members,
    Network,
    Peers,
    Protocol,
    Rule,
)
from rules.plan import Plan
from rules.ports import ALL_PORTS, PortRange, coalesce, have, subtract
from rules.stale import Displaced, Due, Forbidden, Forgotten, Led, Whom
from rules.values import replace

TRANSLATING = (Chain.PREROUTING, Chain.OUTPUT)

# Which packets, to whom, how far shifted, and to which address they were sent, where that matters.
_Way = tuple[Family, Protocol | None, Address | None, int | None, Address | None]


def forgotten(plan: Plan) -> tuple[Due, ...]:
    """What a plan takes away or points elsewhere, what would shadow its new UDP ports, and what it
    forbids."""
    gone_rules = [*plan.remove, *plan.leftovers, *(live for live, _ in plan.change)]
    before = _ways(old.rule for old in gone_rules if isinstance(old, Live))
    new = _ways([*plan.add, *(rule for _, rule in plan.change)])
    taken = {
        way: gone for way, ports in before.items() if (gone := subtract(ports, new.get(way, [])))
    }
    stays = _ways(_meeting((live.rule for live in plan.unchanged), taken.values()))
    led = _led(new, stays) if taken else {}
    held = {one: [*_at(new, one, None), *_at(stays, one, None)] for one in Family}
    found = [
        Forgotten(
            family=way[0],
            protocol=way[1],
            ports=gone,
            answerer=way[2],
            destination=way[4],
            shut=_shut(way[1], gone, held[way[0]]) if way[4] is None else (),
            spared=_meeting_led(led.get(way[:3], []), gone),
        )
        for way, ports in taken.items()
        if (gone := subtract(ports, stays.get(way, [])))
    ]
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=fresh, answerer=None, destination=at)
        for family, at in dict.fromkeys((way[0], way[4]) for way in new)
        if (fresh := subtract(_at(new, family, at), _at(before, family, at)))
    ]
    displaced = [
        Displaced(family=family, guest=guest, ports=fresh)
        for (family, protocol, guest, shift, at), ports in new.items()
        if protocol is Protocol.UDP and guest is not None and shift is None and at is None
        if (fresh := subtract(ports, before.get((family, protocol, guest, shift, at), [])))
    ]
    return (*found, *displaced, *_unguarded(plan), *_forbidden(plan))


def _unguarded(plan: Plan) -> list[Forgotten]:
    """Where guards were written, and where a guest is behind one to whom nothing led before: the
    flows to it that the guard would have kept from beginning, whoever let them begin. Where guard
    and forwards are from before, that was done then."""
    written = [*plan.add, *(rule for _, rule in plan.change)]
    if not any(rule.chain in TRANSLATING for rule in written):
        return []
    stay = [live.rule for live in plan.unchanged]
    fresh, guarded = _guarded(written), _guarded(stay)
    new = {guest for guest in plan.guests if Family.of(guest) in fresh}
    known = {guest for guest in plan.guests if Family.of(guest) in guarded} - new
    for rule in stay:
        if not known:
            break
        if rule.to in known and rule.chain in TRANSLATING:
            known.remove(rule.to)
    new |= known  # to whom nothing led
    strays = _strays(_ways([*written, *stay]), new) if new else []
    return [one for one in strays if one.answerer in new]


def _guarded(rules: Iterable[Rule]) -> set[Family]:
    return {
        rule.family
        for rule in rules
        if rule.to is None and rule.chain in TRANSLATING and rule.guards
    }


def _led(*several: dict[_Way, list[PortRange]]) -> dict[tuple[object, ...], list[Led]]:
    """Where flows are led now, by family, protocol and who gets them."""
    found: dict[tuple[object, ...], list[Led]] = {}
    for ways in several:
        for (family, protocol, to, shift, at), ports in ways.items():
            if to is not None:
                one = Led(ports=tuple(ports), to=to, shift=shift or 0, at=at)
                found.setdefault((family, protocol, to), []).append(one)
    return found


def _meeting_led(led: Iterable[Led], gone: Sequence[PortRange]) -> tuple[Led, ...]:
    """Those that lead some of the ports that go."""
    return tuple(
        one for one in led if any(have(gone, ports.first, ports.last) for ports in one.ports)
    )


def still_due(due: Iterable[Due], plan: Plan) -> Iterator[Due]:
    """What was due before a plan and was not done yet, without what the plan leads there again, and
    without what it decides anew."""
    new = _ways([*plan.add, *(rule for _, rule in plan.change)])
    led = _led(new)
    anew = _filters_change(plan)
    for one in due:
        if isinstance(one, Forgotten):
            again = _led_again(one, led)
            shut = subtract(one.shut, _at(new, one.family, None)) if one.shut else ()
            same = not again and shut == one.shut
            spared = tuple(dict.fromkeys((*one.spared, *again)))
            yield one if same else replace(one, spared=spared, shut=shut)
        elif not (anew and isinstance(one, Forbidden)):
            yield one


def _led_again(one: Forgotten, led: Mapping[tuple[object, ...], list[Led]]) -> list[Led]:
    return [
        way
        for (family, protocol, to), ways in led.items()
        if (family, protocol) == (one.family, one.protocol)
        and (to == one.answerer or one.endpoints)
        for way in _meeting_led(ways, one.ports)
    ]


def _filters_change(plan: Plan) -> bool:
    written = [*plan.add, *(rule for _, rule in plan.change)]
    old = [one.rule for one in plan.remove if isinstance(one, Live)]
    old += [live.rule for live, _ in plan.change]
    filters = any(rule.chain in POLICED for rule in (*written, *old))
    return filters or plan.sets != plan.sets_before


def _forbidden(plan: Plan) -> list[Forbidden]:
    """Where filters changed: of every guest that is guarded, what is not accepted now."""
    if not _filters_change(plan):
        return []
    written = [*plan.add, *(rule for _, rule in plan.change)]
    now = [*written, *(live.rule for live in plan.unchanged)]
    return forbidden([rule for rule in now if rule.chain in POLICED], plan.sets)


def forbidden(rules: Sequence[Rule], sets: Mapping[Peers, Members]) -> list[Forbidden]:
    """The flows that these rules of policies would not let begin."""
    found: list[Forbidden] = []
    members = {peers: tuple(sorted(some, key=_place)) for peers, some in sets.items()}
    for guard in rules:
        guest = guard.destination or guard.source
        if not guard.guards or guest is None:
            continue
        alike: dict[tuple[Peers | Network | None, Protocol | None], list[PortRange | None]] = {}
        for rule in rules:
            ends = rule.family, rule.source, rule.destination
            same = ends == (guard.family, guard.source, guard.destination)
            if same and rule.accepts and not rule.resumes:
                alike.setdefault((rule.peer or rule.peers, rule.protocol), []).append(rule.ports)
        accepting = [
            (_whom(peers, members), protocol, _joined(ports))
            for (peers, protocol), ports in alike.items()
        ]
        incoming = guard.destination is not None
        found.append(
            Forbidden(family=guard.family, guest=guest, incoming=incoming, allowed=tuple(accepting))
        )
    return found


def _whom(peers: Peers | Network | None, members: Mapping[Peers, tuple[Network, ...]]) -> Whom:
    if peers is None:
        return None
    return members.get(peers, ()) if isinstance(peers, Peers) else (peers,)


def _joined(ports: Sequence[PortRange | None]) -> tuple[PortRange, ...] | None:
    some = [one for one in ports if one is not None]
    return coalesce(some) if len(some) == len(ports) else None


def _place(network: Network) -> int:
    return int(network.network_address)


def _meeting(rules: Iterable[Rule], taken: Iterable[Iterable[PortRange]]) -> Iterator[Rule]:
    """The rules that may go on serving some of the ports that were taken away."""
    gone = coalesce(one for ports in taken for one in ports)
    firsts = [one.first for one in gone]
    for rule in rules if gone else ():
        ports = rule.ports or ALL_PORTS
        before = bisect_right(firsts, ports.last)  # the last of these reaches furthest
        if before and gone[before - 1].last >= ports.first:
            yield rule


def unmade(rules: Iterable[Rule], guests: Iterable[Address] = ()) -> tuple[Forgotten, ...]:
    """The flows that these rules would not have made, although they lead to one of their guests, or
    to one of these that no rule need name, or keep one of their UDP ports to the namespace itself:
    left by a commit whose end we never saw, or made by others before ours."""
    known = list(rules)
    ways = _ways(rule for rule in known if not _face(rule))
    found = _strays(ways, guests)
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=tuple(ports), answerer=None)
        for (family, protocol, *_), ports in ways.items()
        if protocol is Protocol.UDP
    ]
    return (*found, *_misled(rule for rule in known if _face(rule)))


def _misled(rules: Iterable[Rule]) -> Iterator[Forgotten]:
    """The flows to published ports that none of their endpoints answers. What else leads to these
    endpoints may be of others: of kube-proxy, of Docker."""
    behind: dict[tuple[Family, Protocol, PortRange, Address], set[Address]] = {}
    for rule in rules:
        if rule.protocol and rule.ports and rule.destination and rule.to:
            key = rule.family, rule.protocol, rule.ports, rule.destination
            behind.setdefault(key, set()).add(rule.to)
    for (family, protocol, ports, at), endpoints in behind.items():
        yield Forgotten(
            family=family,
            protocol=protocol,
            ports=(ports,),
            answerer=None,
            destination=at,
            endpoints=frozenset(endpoints),
        )


def _strays(ways: dict[_Way, list[PortRange]], guests: Iterable[Address]) -> list[Forgotten]:
    """The flows to these guests, and to those of the ways, that none of the ways is for."""
    known = {(family, to) for family, _, to, *_ in ways}
    known |= {(Family.of(guest), guest) for guest in guests}
    return [
        Forgotten(
            family=family,
            protocol=protocol,
            ports=gone,
            answerer=guest,
            shut=_shut(protocol, gone, _at(ways, family, None)),
        )
        for family, guest in known
        for protocol in [*FORWARDED, None]
        if (gone := subtract([ALL_PORTS], _to(ways, family, protocol, guest)))
    ]


def _shut(
    protocol: Protocol | None, gone: Iterable[PortRange], held: Iterable[PortRange]
) -> tuple[PortRange, ...]:
    return subtract(gone, held) if protocol is Protocol.UDP else ()


def _to(
    ways: dict[_Way, list[PortRange]],
    family: Family,
    protocol: Protocol | None,
    guest: Address | None,
) -> list[PortRange]:
    return [
        one
        for (other, of, to, *_), ports in ways.items()
        if (other, of, to) == (family, protocol, guest)
        for one in ports
    ]


def _ways(rules: Iterable[Rule]) -> dict[_Way, list[PortRange]]:
    """The ports of each way a packet can be sent."""
    ways: dict[_Way, list[PortRange]] = {}
    for rule in rules:
        if rule.chain in TRANSLATING and not rule.guards:
            shift = rule.to_port - rule.ports.first if rule.to_port and rule.ports else None
            for protocol in [rule.protocol] if rule.protocol else [*FORWARDED, None]:
                way = (rule.family, protocol, rule.to, shift, _face(rule))
                ways.setdefault(way, []).append(rule.ports or ALL_PORTS)
    return {way: list(coalesce(ports)) for way, ports in ways.items()}


def _face(rule: Rule) -> Address | None:
    """The address that it publishes; loopback is one of many ways to the same guest."""
    at = rule.destination
    return None if at is None or at.is_loopback or rule.chain not in TRANSLATING else at


def _at(ways: dict[_Way, list[PortRange]], family: Family, at: Address | None) -> list[PortRange]:
    """The ports for UDP that are sent on from there."""
    return [
        one
        for (other, of, _, _, where), ports in ways.items()
        if (other, of, where) == (family, Protocol.UDP, at)
        for one in ports
    ]
