"""Which ports of a Service lead to which of its endpoints, where these take only some of them: a
virtual machine gets what it declares, and nothing is sent to where its guard would refuse it."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter

from rules.allotment import name_of
from rules.budget import MOST_OF_A_FACE
from rules.desired import label
from rules.model import Address, Chain, Pending, Rule
from rules.ports import HIGHEST, PortRange, coalesce, subtract
from rules.publish import Face
from rules.service_conflicts import common, piece
from rules.services import Endpoint, Publication, ServicePort
from rules.values import replace

_FIRST = attrgetter("first")


def is_within(ports: PortRange, ranges: Sequence[PortRange]) -> bool:
    """Whether one of the ranges, which are in order and touch nowhere, holds all of the ports."""
    before = bisect_right(ranges, ports.first, key=_FIRST)
    return before > 0 and ports.last <= ranges[before - 1].last


def limited(end: Endpoint, count: int, declared: Sequence[PortRange] | None) -> Endpoint:
    """An endpoint for so many ports, of which it takes those that are declared; None: all."""
    wanted = PortRange(end.port, min(end.port + count - 1, HIGHEST))
    if declared is None or is_within(wanted, declared):
        return end
    return replace(end, only=tuple(common([wanted], declared)))


def staying(
    port: ServicePort, old: Sequence[Endpoint], new: Iterable[Endpoint]
) -> tuple[Endpoint, ...]:
    """The old endpoints, each without the ports that it will not take; ports that none of those who
    stay takes are left with who has them."""
    count = len(port.ports)
    after = {(one.address, one.port): one for one in new}
    if all(after.get((one.address, one.port)) == one for one in old):
        return tuple(old)
    kept: list[Sequence[PortRange]] = []
    for one in old:
        then = after.get((one.address, one.port))
        kept.append(common(_taken(one, count), _taken(then, count)) if then else ())
    covered = coalesce(ports for some in kept for ports in some)
    made = []
    for one, some in zip(old, kept, strict=True):
        places = coalesce([*some, *subtract(_taken(one, count), covered)])
        if places:
            shift = one.port - 1
            only = [PortRange(p.first + shift, p.last + shift) for p in places]
            made.append(limited(replace(one, only=None), count, only))
    return tuple(made)


def _taken(one: Endpoint, count: int) -> tuple[PortRange, ...]:
    """The places among the ports of a Service that an endpoint takes, from 1 on."""
    if one.only is None:
        return (PortRange(1, count),)
    shift = one.port - 1
    return tuple(PortRange(p.first - shift, p.last - shift) for p in one.only)


def declared(faces: Iterable[Face]) -> tuple[list[Face], list[Pending], list[str]]:
    """Each face in as many pieces as it takes for every port to lead to those who take it; the
    ports that nobody takes, and what a person should know."""
    kept: list[Face] = []
    refused: list[Pending] = []
    notes: list[str] = []
    for face in faces:
        if all(one.only is None for one in face.endpoints):
            kept.append(face)
            continue
        cuts, count = _cuts(face)
        if count < len(face.endpoints):
            words = f"{count} of {len(face.endpoints)} endpoints get flows"
            notes.append(f"{face.name}: {face} is declared in too many pieces: {words}")
        some = replace(face, endpoints=face.endpoints[:count])
        pieces = [_for_takers(piece(some, ports)) for ports in cuts]
        kept += [one for one in pieces if one.endpoints]
        nothing = not any(one.endpoints for one in pieces)
        for one in pieces:
            if not one.endpoints:
                how = "cannot be published" if nothing else "is left out"
                reason = f"{one} {how}: {_why(face, one)}"
                refused.append(Pending(face.name, reason, not nothing))
    return kept, list(dict.fromkeys(refused)), notes


def _cuts(face: Face) -> tuple[list[PortRange], int]:
    """The ports of a face, cut wherever an endpoint begins to take them or ends; and of how many
    endpoints, as what there is for all of them is bounded."""
    starts, count = {face.ports.first, face.ports.last + 1}, 0
    for end in face.endpoints:
        shift = face.ports.first - end.port
        more = {one for p in end.only or () for one in (p.first + shift, p.last + 1 + shift)}
        more = {one for one in more if face.ports.first < one <= face.ports.last}
        if len(starts | more) * (count + 1) > MOST_OF_A_FACE:
            break
        starts, count = starts | more, count + 1
    cuts = sorted(starts)
    return [PortRange(a, b - 1) for a, b in pairwise(cuts)], count


def _for_takers(face: Face) -> Face:
    """Where all endpoints take all of the ports or none: only those who take them."""
    takers = [
        replace(one, only=None)
        for one in face.endpoints
        if one.only is None or is_within(PortRange(one.port, one.port), one.only)
    ]
    return replace(face, endpoints=tuple(takers))


def _why(face: Face, left: Face) -> str:
    offset, count = left.ports.first - face.ports.first, len(left.ports)
    targets = {one.port + offset for one in face.endpoints}
    if len(targets) > 1:
        return "no backend declares its target ports"
    (first,) = targets
    return f"no backend declares {face.port.protocol.value} {PortRange(first, first + count - 1)}"


def unclaimed(
    publications: Iterable[Publication], live: Iterable[Rule], known: Collection[Address]
) -> tuple[list[Publication], list[Pending]]:
    """With the endpoints that are live and were never known: a manifest that cannot be read may
    declare them. And the ports that lead to such endpoints."""
    rules = list(live)
    away = {at for rule in rules if rule.detour for at in rule.detour.remote}
    found: dict[str, dict[Address, list[PortRange]]] = {}
    for rule in rules:
        targets = rule.to_ports or rule.ports
        if rule.chain is Chain.PREROUTING and rule.to and targets and rule.to not in known:
            found.setdefault(rule.owner, {}).setdefault(rule.to, []).append(targets)
    made: list[Publication] = []
    orphaned: list[Pending] = []
    for one in publications:
        ends = []
        for port, some in zip(one.service.ports, one.endpoints, strict=True):
            name = name_of(one.service, port)
            left = found.get(label(name), {})
            more = [_as_live(port, at, ranges, away) for at, ranges in left.items()]
            ends.append((*some, *more))
            if left:
                which = ", ".join(map(str, left))
                orphaned.append(Pending(name, f"{which} kept: an invalid manifest may declare it"))
        made.append(replace(one, endpoints=tuple(ends)))
    return made, orphaned


def _as_live(
    port: ServicePort, at: Address, ranges: Sequence[PortRange], away: Collection[Address]
) -> Endpoint:
    """An endpoint for what leads to it."""
    first = min(p.first for p in ranges)
    if isinstance(port.target, PortRange):
        first = port.target.first
    return limited(
        Endpoint(address=at, port=first, local=at not in away), len(port.ports), coalesce(ranges)
    )
