"""The sets of addresses that rules in forward name: as steps of a transaction, as commands, words
and bytes of it, and back from a listing. An address that comes or goes is one element, and no rule.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network

from rules.model import NODE_KEY, Family, Members, Network, Peers
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KINDS = {Family.IP: "ipv4_addr", Family.IP6: "ipv6_addr"}
PREFIX = "peers-"
DIGITS = frozenset("0123456789abcdef")
NEWSET, DELSET, NEWSETELEM, DELSETELEM = ((10 << 8) | kind for kind in (9, 11, 12, 14))
REQUEST, CREATE, NESTED = 0x1, 0x400, 0x8000
TYPES = {Family.IP: (7, 4), Family.IP6: (8, 16)}  # how nft numbers types; lengths
BIG_ENDIAN = struct.pack("=BBI", 0, 4, 2)  # what nft notes of such a set
INTERVAL, END = 0x4, 1
AT_ONCE = 400  # elements in one message: an attribute holds 64 KiB at most

Json = dict[str, object]


class MakeSet(Value):
    """Yet empty."""

    peers: Peers


class DropSet(Value):
    """With all addresses; the rules that name it must have gone."""

    peers: Peers


class Join(Value):
    """Addresses that come."""

    peers: Peers
    members: Members


class Leave(Value):
    """Addresses that go."""

    peers: Peers
    members: Members


SetStep = MakeSet | DropSet | Join | Leave


def entering(before: Mapping[Peers, Members], after: Mapping[Peers, Members]) -> list[SetStep]:
    """What makes sets as they should be, before any rule needs it; what goes from one goes first,
    as a network may take the place of a part of it."""
    found: list[SetStep] = []
    for peers in sorted(after, key=str):
        was, now = before.get(peers), after[peers]
        if was is None:
            found.append(MakeSet(peers))
        if gone := (was or frozenset()) - now:
            found.append(Leave(peers, gone))
        if new := now - (was or frozenset()):
            found.append(Join(peers, new))
    return found


def leaving(before: Iterable[Peers], after: Mapping[Peers, Members]) -> list[SetStep]:
    """The sets that nobody names any more."""
    return [DropSet(peers) for peers in sorted(before, key=str) if peers not in after]


def carried_out(
    steps: Iterable[object], before: Mapping[Peers, Members]
) -> Mapping[Peers, Members]:
    """The sets after these steps, if the table is not made anew by them."""
    sets = dict(before)
    for step in steps:
        match step:
            case MakeSet(peers):
                sets[peers] = frozenset()
            case DropSet(peers):
                del sets[peers]
            case Join(peers, members):
                sets[peers] |= members
            case Leave(peers, members):
                sets[peers] -= members
    return sets


def cross(before: Members, after: Members) -> bool:
    """Whether an address that stays is in another network than before."""
    return before != after and overlap(before - after, after - before)


def overlap(some: Iterable[Network], others: Iterable[Network]) -> bool:
    """Whether an address is in one of each."""
    spans = sorted(
        (one.version, int(one.network_address), int(one.broadcast_address), which)
        for which, networks in enumerate((some, others))
        for one in networks
    )
    furthest: dict[tuple[int, int], int] = {}
    for version, first, last, which in spans:
        if furthest.get((version, 1 - which), -1) >= first:
            return True
        furthest[version, which] = max(last, furthest.get((version, which), -1))
    return False


def _ordered(members: Members) -> list[Network]:
    return sorted(members, key=lambda one: (int(one.network_address), one.prefixlen))


# --------------------------------------------------------------------------- commands and words


def command(step: SetStep, ours: Json) -> Json:
    """A step in the words of libnftables."""
    name = str(step.peers)
    match step:
        case MakeSet(peers):
            return {"add": {"set": set_spec(peers, ours)}}
        case DropSet():
            return {"delete": {"set": {**ours, "name": name}}}
        case Join(_, members):
            pairs = [network_json(one) for one in _ordered(members)]
            return {"add": {"element": {**ours, "name": name, "elem": pairs}}}
        case Leave(_, members):
            pairs = [network_json(one) for one in _ordered(members)]
            return {"delete": {"element": {**ours, "name": name, "elem": pairs}}}


def set_spec(peers: Peers, ours: Json) -> Json:
    """A set of ours as it must be."""
    kind = KINDS[peers.family]
    return {**ours, "name": str(peers), "type": kind, "flags": ["interval"]}


def network_json(one: Network) -> object:
    """An address, or several."""
    if one.prefixlen == one.max_prefixlen:
        return str(one.network_address)
    return {"prefix": {"addr": str(one.network_address), "len": one.prefixlen}}


def line(step: SetStep, table: str) -> str:
    """A step in the words of nft."""
    match step:
        case MakeSet(peers):
            return f"add set {table} {peers} {{ type {KINDS[peers.family]}; flags interval; }}"
        case DropSet(peers):
            return f"delete set {table} {peers}"
        case Join(peers, members):
            words = ", ".join(map(str, _ordered(members)))
            return f"add element {table} {peers} {{ {words} }}"
        case Leave(peers, members):
            words = ", ".join(map(str, _ordered(members)))
            return f"delete element {table} {peers} {{ {words} }}"


# ---------------------------------------------------------------------------------------- bytes


def messages(step: SetStep, ours: bytes) -> Iterator[tuple[int, int, bytes]]:
    """A step as messages of a netlink batch: kind, flags and body of each."""
    place = ours + attribute(2, str(step.peers).encode() + b"\0")
    match step:
        case MakeSet(peers):
            kind, length = TYPES[peers.family]
            words = enumerate((INTERVAL, kind, length), 3)
            body = b"".join(attribute(at, number(value)) for at, value in words)
            body += attribute(10, number(1)) + attribute(13, BIG_ENDIAN)
            yield NEWSET, REQUEST | CREATE, place + body
        case DropSet():
            yield DELSET, REQUEST, place
        case Join(_, members):
            yield from _elements(NEWSETELEM, REQUEST | CREATE, place, members)
        case Leave(_, members):
            yield from _elements(DELSETELEM, REQUEST, place, members)


def _elements(
    kind: int, flags: int, place: bytes, members: Members
) -> Iterator[tuple[int, int, bytes]]:
    found = [_interval(one) for one in _ordered(members)]
    for start in range(0, len(found), AT_ONCE):
        listed = attribute(3 | NESTED, b"".join(found[start : start + AT_ONCE]))
        yield kind, flags, place + listed


def _interval(one: Network) -> bytes:
    """The first address, and the one behind the last, where there is one."""
    made = _end(int(one.network_address), one, b"")
    behind = int(one.broadcast_address) + 1
    if behind >> one.max_prefixlen:
        return made
    return made + _end(behind, one, attribute(3, number(END)))


def _end(place: int, one: Network, rest: bytes) -> bytes:
    value = attribute(1, place.to_bytes(one.max_prefixlen // 8, "big"))
    return attribute(1 | NESTED, attribute(1 | NESTED, value) + rest)


def attribute(kind: int, content: bytes) -> bytes:
    """Padded as the next one needs it."""
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def number(value: int) -> bytes:
    """Of 32 bits, in the order of the network."""
    return struct.pack(">I", value & 0xFFFFFFFF)


# ----------------------------------------------------------------------------------------- back


def named(text: object) -> Peers | None:
    """The set that has that name, if it is one of ours."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return None
    family, _, key = text.removeprefix(PREFIX).partition("-")
    families = {one.value: one for one in Family}
    if family not in families or not key:
        return None
    if key != NODE_KEY and not DIGITS.issuperset(key):
        return None
    return Peers(families[family], key)


def decode(value: Json, peers: Peers, ours: Json) -> Members | None:
    """What a set of ours holds; None where it is not as we make it."""
    spec = set_spec(peers, ours)
    flags = value.get("flags")  # from nft 1.1.4 on, a single one is no list
    listed = {**value, "flags": [flags]} if isinstance(flags, str) else value
    if any(listed.get(key) != want for key, want in spec.items()):
        return None
    if listed.keys() - spec.keys() - {"handle", "elem"}:
        return None
    try:
        return frozenset(_member(one, peers.family) for one in listed.get("elem", []))  # type: ignore[attr-defined]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _member(element: "Any", family: Family) -> Network:
    if isinstance(element, str):
        made = ip_network(element)
    else:
        if element.keys() != {"prefix"}:
            raise ValueError(element)
        made = ip_network((element["prefix"]["addr"], element["prefix"]["len"]))
    if (made.version == 4) is not (family is Family.IP):
        raise ValueError(element)
    return made
