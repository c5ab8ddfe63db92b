"""Rules of others, decoded from the attributes in which the kernel dumps them (NFT_MSG_GETRULE).

The result has the form in which libnftables writes JSON, reduced to what rules/foreign_nat.py and
rules/foreign_filters.py read: conditions on protocol, destination and ports, translations, verdicts
and jumps. Of any other condition nobody knows whether it holds: it is one on something unknown.
Sets are read when a rule looks into one.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Expression = dict[str, Any]

ATTRIBUTE = struct.Struct("=HH")
KIND = 0x3FFF  # without the flags for nested attributes and network byte order
EXPR_NAME, EXPR_DATA = 1, 2
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
ELEM_KEY, ELEM_DATA, ELEM_FLAGS, ELEM_KEY_END = 1, 2, 3, 10
INTERVAL_END, CATCHALL = 1, 2
DROP, ACCEPT, JUMP, GOTO, RETURN = 0, 1, 0xFFFFFFFD, 0xFFFFFFFC, 0xFFFFFFFB
VERDICTS = {DROP: "drop", ACCEPT: "accept", JUMP: "jump", GOTO: "goto", RETURN: "return"}
OPERATORS = ("==", "!=", "<", "<=", ">", ">=")
NETWORK, TRANSPORT = 1, 2
NFPROTO, L4PROTO = 15, 16
VERSIONS = {2: "ipv4", 10: "ipv6"}
DNAT = 1
WORD = 4  # bytes of a register

UNKNOWN: "Expression" = {"unknown": None}
ANYTHING: "Expression" = {"match": {"left": UNKNOWN, "op": "==", "right": None}}
NOTHING: "_Loaded" = (UNKNOWN, 4)
PORTS: "Expression" = {"ports": None}
DPORT: "Expression" = {"payload": {"protocol": "th", "field": "dport"}}
EITHER_PORT: "Expression" = {"payload": {"protocol": "th", "field": "port"}}
SOME: "Expression" = {"range": [None, None]}  # of which nobody knows where they begin and end
# What is loaded, by the header, where in it, and how many bytes.
PAYLOADS: "Mapping[tuple[int, int, int], Expression]" = {
    (TRANSPORT, 2, 2): DPORT,
    (NETWORK, 9, 1): {"payload": {"protocol": "ip", "field": "protocol"}},
    (NETWORK, 6, 1): {"payload": {"protocol": "ip6", "field": "nexthdr"}},
    (NETWORK, 16, 4): {"payload": {"protocol": "ip", "field": "daddr"}},
    **{
        (NETWORK, 16, size): {"payload": {"protocol": "ip", "field": "daddr"}} for size in (1, 2, 3)
    },
    **{
        (NETWORK, 24, size): {"payload": {"protocol": "ip6", "field": "daddr"}}
        for size in range(1, 17)
    },
}
CT = {0: {"ct": {"key": "state"}}, 2: {"ct": {"key": "status"}}}  # what is asked of a flow
NAMES_OF_LINKS = {6: "iifname", 7: "oifname"}
METAS: "Mapping[int, Expression]" = {
    **{key: {"meta": {"key": name}} for key, name in NAMES_OF_LINKS.items()},
    NFPROTO: {"meta": {"key": "nfproto"}},
    L4PROTO: {"meta": {"key": "l4proto"}},
}

Raw = memoryview | bytes


class Elements(Value):
    """What a set or map holds, as dumped: keys, ends of intervals, data."""

    interval: bool
    raw: tuple[bytes, ...]


_Loaded = tuple["Expression", int]  # what is in registers from one on, and how many bytes
Sets = Callable[[str], Elements]


def each(data: Raw) -> Iterator[tuple[int, bytes]]:
    """The attributes in their order; of a list, all are of one kind."""
    start, raw = 0, bytes(data)
    while start <= len(raw) - ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(raw, start)
        if not ATTRIBUTE.size <= length <= len(raw) - start:
            return  # not as the kernel writes it
        yield kind & KIND, raw[start + ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3


def decoded(expressions: bytes, sets: Sets) -> "list[Expression]":
    """The conditions and the verdict of a rule, in order."""
    registers: dict[int, _Loaded] = {}
    found: list[Expression] = []
    for _, raw in each(expressions):
        name, parts = _parsed(raw)
        decode = EXPRESSIONS.get(name)
        if decode is not None:
            found += decode(parts, registers, sets)
        else:
            registers.clear()  # whatever it loads is nothing that is compared here
            found += [] if name in UNCONDITIONAL else [ANYTHING]
    return found


# What only loads something that is compared then, or is done to each packet that comes to it.
UNCONDITIONAL = frozenset({"rt", "hash", "osf", "xfrm", "tunnel", "masq", "notrack", "dup", "last"})


@lru_cache(1024)
def _parsed(raw: bytes) -> tuple[str, "Parts"]:
    """Name and attributes of an expression: thousands of rules differ in one of theirs."""
    parts = dict(each(raw))
    return _text(parts.get(EXPR_NAME, b"")), dict(each(parts.get(EXPR_DATA, b"")))


def may_matter(expressions: bytes) -> bool:
    """Whether a rule may translate or jump: decoding takes 20 times as long."""
    return any(name in expressions for name in NAMES)


NAMES = (b"nat\0", b"redir\0", b"tproxy\0", b"target\0", b"immediate\0", b"lookup\0")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _number(raw: bytes | None) -> int:
    return int.from_bytes(raw or b"", "big")


def _place(raw: bytes | None) -> int:
    """The first of the 4-byte registers that a register is; the verdict is below all of them."""
    number = _number(raw)
    if number == 0:
        return -1
    return (number - 1) * 4 if number <= 4 else number - 8


Parts = dict[int, bytes]
Registers = dict[int, _Loaded]


def _payload(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    if 1 not in parts:
        return []  # it is written, not read
    place, base = _place(parts[1]), _number(parts.get(2))
    offset, size = _number(parts.get(3)), _number(parts.get(4))
    key = PAYLOADS.get((base, offset, size), UNKNOWN)
    if (base, offset, size) == (TRANSPORT, 0, 4):  # both ports at once
        key = PORTS
    registers[place] = key, size
    return []


def _meta(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    if 1 in parts:
        key = METAS.get(_number(parts.get(2)), UNKNOWN)
        registers[_place(parts[1])] = key, 16 if "name" in str(key) else 1
    return []


def _bitwise(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    """Networks are compared so, and what is one of several bits. Others than masks move bits, or
    take them from another register."""
    key, _size = registers.get(_place(parts.get(1)), NOTHING)
    mask = dict(each(parts.get(4, b""))).get(DATA_VALUE, b"")
    turned = any(dict(each(parts.get(5, b""))).get(DATA_VALUE, b"")) or _number(parts.get(6))
    masked = "ct" in key or "daddr" in str(key)
    made: Expression = {"masked": key, "by": mask} if masked and not turned else UNKNOWN
    registers[_place(parts.get(2))] = made, _number(parts.get(3))
    return []


def _ct(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    if 1 in parts:
        registers[_place(parts[1])] = CT.get(_number(parts.get(2)), UNKNOWN), WORD
    return []


def _masked(key: "Expression", operator: str, value: bytes) -> "Expression":
    of, mask = key["masked"], key["by"]
    if "ct" in of:
        (bits,) = struct.unpack("=I", mask[:4].ljust(4, b"\0"))
        return _match(of, "in", bits) if operator == "!=" and not any(value) else ANYTHING
    bits = "".join(f"{byte:08b}" for byte in mask)
    if "01" in bits:  # it has gaps
        return _match(of, operator, SOME)
    size = 4 if of["payload"]["protocol"] == "ip" else 16
    return _match(of, operator, _prefix(value, bits.count("1"), size))


def _prefix(raw: bytes, length: int, size: int) -> "Expression":
    whole = raw + bytes(size - len(raw))
    address = IPv4Address(whole) if size == 4 else IPv6Address(whole)
    return {"prefix": {"addr": str(address), "len": length}}


def _loads(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    """Something else, into the register that its first attribute names."""
    registers[_place(parts.get(1))] = UNKNOWN, WORD
    return []


def _loads_second(parts: Parts, registers: Registers, sets: Sets) -> "list[Expression]":
    return _loads({1: parts.get(2, b"")}, registers, sets)


def _cmp(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    key, _size = registers.get(_place(parts.get(1)), NOTHING)
    if key is UNKNOWN:
        return [ANYTHING]
    operator = OPERATORS[_number(parts.get(2))]
    value = dict(each(parts.get(3, b""))).get(DATA_VALUE, b"")
    if "masked" in key:
        return [_masked(key, operator, value)]
    if key is not PORTS:
        return [_match(key, operator, _value(key, value))]
    return (
        [_match(DPORT, operator, int.from_bytes(value[2:4], "big")), ANYTHING]
        if operator == "=="
        else [ANYTHING]
    )


def _range(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    key, _size = registers.get(_place(parts.get(1)), NOTHING)
    operator = OPERATORS[_number(parts.get(2))]
    first = dict(each(parts.get(3, b""))).get(DATA_VALUE, b"")
    last = dict(each(parts.get(4, b""))).get(DATA_VALUE, b"")
    if key is UNKNOWN or key is PORTS or "masked" in key:
        return [ANYTHING]
    if operator == "==":  # of nft from 1.1 on; before, it wrote two comparisons
        return [_match(key, ">=", _value(key, first)), _match(key, "<=", _value(key, last))]
    return [_match(key, operator, _interval(key, first, last))]


def _lookup(parts: Parts, registers: Registers, sets: Sets) -> "list[Expression]":
    """A condition, and in a map what becomes of what is found: with verdicts, jumps."""
    name, inverted = _text(parts.get(1, b"")), bool(_number(parts.get(5)) & 1)
    to = _place(parts[3]) if 3 in parts else None
    elements = sets(name)
    fields = list(_fields(_place(parts.get(2)), registers, elements))
    keys = [key for key, _ in fields]
    key: Expression = {"concat": keys} if len(keys) != 1 else keys[0]
    if to == -1:
        data = [[key, verdict] for key, verdict in _members(fields, elements) if verdict]
        return [{"vmap": {"key": key, "data": {"set": data}}}]
    if to is not None:
        registers[to] = UNKNOWN, WORD
    if not elements.raw:
        return [] if inverted else [_match(DPORT, "==", {"set": []})]  # nobody is in there
    if all(one is UNKNOWN for one in keys) or any("masked" in one for one in keys):
        return [ANYTHING]
    members = [member for member, _ in _members(fields, elements)]
    return [_match(key, "!=" if inverted else "==", {"set": members})]


def _fields(place: int, registers: Registers, elements: Elements) -> Iterator[_Loaded]:
    """What is in the registers that are looked up together: as many bytes as the keys have."""
    sizes = (len(_key(dict(each(raw)), ELEM_KEY)) for raw in elements.raw)
    left = next((size for size in sizes if size), WORD)
    while left > 0:
        loaded = registers.get(place, NOTHING)
        yield loaded
        words = max(1, -(-loaded[1] // WORD))
        place, left = place + words, left - words * WORD


def _members(fields: "list[_Loaded]", elements: Elements) -> "Iterator[tuple[Any, Any]]":
    """Each key, with the verdict of it where it has one."""
    found = [dict(each(raw)) for raw in elements.raw]
    if elements.interval and not any(ELEM_KEY_END in one for one in found):
        yield from _intervals(fields, found)
        return
    for one in found:
        if _number(one.get(ELEM_FLAGS)) & CATCHALL:
            yield "*", _verdict(one.get(ELEM_DATA, b""))
            continue
        first = _key(one, ELEM_KEY)
        last = _key(one, ELEM_KEY_END) if ELEM_KEY_END in one else first
        values, start = [], 0
        for key, size in fields:
            low, high = first[start : start + size], last[start : start + size]
            values.append(_interval(key, low, high) if low != high else _value(key, low))
            start += max(1, -(-size // WORD)) * WORD
        yield (
            values[0] if len(values) == 1 else {"concat": values},
            _verdict(one.get(ELEM_DATA, b"")),
        )


def _intervals(fields: "list[_Loaded]", found: list[Parts]) -> "Iterator[tuple[Any, Any]]":
    """Of a set of intervals, each has an element where it begins and one behind its end."""
    key = fields[0][0] if len(fields) == 1 else UNKNOWN
    marks = []
    for one in found:
        flags = _number(one.get(ELEM_FLAGS))
        if flags & CATCHALL:
            yield "*", _verdict(one.get(ELEM_DATA, b""))
        else:
            marks.append((_key(one, ELEM_KEY), not flags & INTERVAL_END, one))
    marks.sort(key=lambda mark: mark[:2])
    for (first, begins, one), after in zip(marks, [*marks[1:], None], strict=True):
        if begins:
            size = len(first)
            behind = int.from_bytes(after[0], "big") if after else 1 << (8 * size)
            last = max(behind - 1, int.from_bytes(first, "big")).to_bytes(size, "big")
            value = _value(key, first) if last == first else _interval(key, first, last)
            yield value, _verdict(one.get(ELEM_DATA, b""))


def _key(one: Parts, kind: int) -> bytes:
    return dict(each(one.get(kind, b""))).get(DATA_VALUE, b"")


def _match(key: "Expression", operator: str, value: object) -> "Expression":
    return {"match": {"left": key, "op": operator, "right": value}}


def _value(key: "Expression", raw: bytes) -> object:
    """As libnftables writes it."""
    match key:
        case {"payload": {"field": "daddr"}}:
            whole = 4 if key["payload"]["protocol"] == "ip" else 16
            if len(raw) < whole:  # the first bytes of an address
                return _prefix(raw, 8 * len(raw), whole)
            return str(IPv4Address(raw) if whole == 4 else IPv6Address(raw))
        case {"meta": {"key": "iifname" | "oifname"}}:
            name = raw.rstrip(b"\0").decode(errors="replace")
            return name if raw.endswith(b"\0") or len(raw) >= 16 else f"{name}*"
        case {"ct": _}:
            return int(struct.unpack("=I", raw[:4].ljust(4, b"\0"))[0])
        case {"meta": {"key": "nfproto"}}:
            return VERSIONS.get(raw[0])
    return int.from_bytes(raw, "big")


def _interval(key: "Expression", first: bytes, last: bytes) -> object:
    if "meta" in key and key["meta"]["key"] in NAMES_OF_LINKS.values():
        begin = first.rstrip(b"\0")
        if last == begin.ljust(len(last), b"\xff"):  # as "eth*" is written in a set
            return f"{begin.decode(errors='replace')}*"
    if key is not DPORT:
        return SOME
    return {"range": [int.from_bytes(first, "big"), int.from_bytes(last, "big")]}


def _verdict(data: bytes) -> "Expression | None":
    verdict = dict(each(data)).get(DATA_VERDICT)
    if verdict is None:
        return None
    parts = dict(each(verdict))
    name = VERDICTS.get(_number(parts.get(VERDICT_CODE)), "continue")
    if name in ("jump", "goto"):
        return {name: {"target": _text(parts.get(VERDICT_CHAIN, b""))}}
    return {name: None}


def _immediate(parts: Parts, registers: Registers, _: Sets) -> "list[Expression]":
    verdict = _verdict(parts.get(2, b""))
    if verdict is not None:
        return [verdict]
    registers[_place(parts.get(1))] = UNKNOWN, WORD
    return []


def _nat(parts: Parts, _: Registers, __: Sets) -> "list[Expression]":
    if _number(parts.get(1)) != DNAT:
        return [{"snat": None}]
    family = {2: "ip", 10: "ip6"}.get(_number(parts.get(2)))
    return [{"dnat": {"family": family} if family else None}]


def _redirect(_: Parts, __: Registers, ___: Sets) -> "list[Expression]":
    return [{"redirect": None}]


def _tproxy(_: Parts, __: Registers, ___: Sets) -> "list[Expression]":
    return [{"tproxy": None}]


def _reject(_: Parts, __: Registers, ___: Sets) -> "list[Expression]":
    return [{"reject": None}]


def _nothing(_: Parts, __: Registers, ___: Sets) -> "list[Expression]":
    return []


def _sometimes(_: Parts, __: Registers, ___: Sets) -> "list[Expression]":
    """What lets some packets pass."""
    return [ANYTHING]


def _object(parts: Parts, _: Registers, __: Sets) -> "list[Expression]":
    """One of the table's own, by its kind. A limit or quota lets some packets pass; which one a map
    gives is not known."""
    return [] if _number(parts.get(1)) in DONE_TO_ALL else [ANYTHING]


DONE_TO_ALL = (1, 3, 7, 8, 9)  # counters, helpers, timeouts, marks and expectations


def _target(parts: Parts, _: Registers, __: Sets) -> "list[Expression]":
    return [{"xt": {"type": "target", "name": _text(parts.get(1, b""))}}]


def _xt_match(parts: Parts, _: Registers, __: Sets) -> "list[Expression]":
    """A match of iptables: of those about ports, what they compare with."""
    name, revision, info = _text(parts.get(1, b"")), _number(parts.get(2)), parts.get(3, b"")
    try:
        if name in ("tcp", "udp"):
            *source, first, last = struct.unpack_from("=4H", info)
            inverted = info[11 if name == "tcp" else 8]
            more = source != [0, 0xFFFF] or inverted & ~DESTINATION
            more = more or (name == "tcp" and any(info[8:10]))  # an option, or flags
            return [*_ports_of(first, last, inverted), *([ANYTHING] if more else [])]
        if name == "sctp":
            first, last = struct.unpack_from("=HH", info)
            flags, inverted = struct.unpack_from("=II", info, SCTP_FLAGS)
            ports = _ports_of(first, last, inverted) if flags & DESTINATION else []
            return [*ports, *([ANYTHING] if flags & ~DESTINATION else [])]
        if name == "multiport" and revision == 1:
            return _multiport(info)
        if name == "conntrack" and revision == CONNTRACK:
            return _conntrack(info)
    except (struct.error, IndexError, StopIteration):
        return [ANYTHING]
    return [] if name == "comment" else [ANYTHING]


CONNTRACK = 3  # its revision
STATES = {2: 2, 4: 4, 8: 8}  # established, related, new: the bits that nftables has for them
XT_DNAT, XT_STATE = 128, 1


def _conntrack(info: bytes) -> "list[Expression]":
    """struct xt_conntrack_mtinfo3: only what asks for states, as `--ctstate` does."""
    flags, inverted, states = struct.unpack_from("=HHH", info, CONNTRACK_FLAGS)
    if flags != XT_STATE or inverted:
        return [ANYTHING]
    if states & XT_DNAT:
        return [_match(CT[2], "in", 32)]
    return [_match(CT[0], "in", sum(bit for xt, bit in STATES.items() if states & xt))]


# Behind eight addresses and masks, a time twice, the protocol and four ports.
CONNTRACK_FLAGS = 8 * 16 + 2 * 4 + 2 + 4 * 2


DESTINATION = 2  # in flags and inverted flags of xt_tcp, xt_udp and xt_sctp
SCTP_FLAGS = 8 + 256 + 4 + 4 * 3 + 4  # ports, chunks, how they match, their flags and how many


def _ports_of(first: int, last: int, inverted: int) -> "list[Expression]":
    if (first, last) == (0, 0xFFFF) and not inverted & DESTINATION:
        return []  # the ports are not asked for
    operator = "!=" if inverted & DESTINATION else "=="
    return [_match(DPORT, operator, {"set": [{"range": [first, last]}]})]


def _multiport(info: bytes) -> "list[Expression]":
    """struct xt_multiport_v1: which ports, how many, up to 15, which of them begin a range."""
    which, count = info[0], info[1]
    if which == 0:
        return [ANYTHING]  # of the sender
    ports = struct.unpack_from("=15H", info, 2)[:count]
    begins, inverted = info[32:47], info[47]
    values: list[object] = []
    left = iter(range(len(ports)))
    for place in left:
        if begins[place]:
            values.append({"range": [ports[place], ports[next(left)]]})
        else:
            values.append(ports[place])
    if which == 1:
        return [_match(DPORT, "!=" if inverted else "==", {"set": values})]
    if inverted:
        return [_match(DPORT, "!=", {"set": values}), ANYTHING]
    return [_match(EITHER_PORT, "==", {"set": values})]


EXPRESSIONS: "Mapping[str, Callable[[Parts, Registers, Sets], list[Expression]]]" = {
    "payload": _payload,
    "meta": _meta,
    "bitwise": _bitwise,
    "byteorder": _loads_second,
    "cmp": _cmp,
    "range": _range,
    "lookup": _lookup,
    "immediate": _immediate,
    "nat": _nat,
    "redir": _redirect,
    "tproxy": _tproxy,
    "reject": _reject,
    "match": _xt_match,
    "target": _target,
    "counter": _nothing,
    "log": _nothing,
    "limit": _sometimes,
    "quota": _sometimes,
    "objref": _object,
    "ct": _ct,
    "fib": _loads,
    "socket": _loads_second,
    "numgen": _loads,
}
