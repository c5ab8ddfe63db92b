"""Steps as the bytes of a netlink batch, for the kernel itself.

libnftables asks for the whole ruleset before it writes, and for a whole map before it adds to it:
milliseconds, and 30 of them for 5,000 ranges, where the kernel needs microseconds. What is written
here it reads back, and `nft` lists it as if it had written it. Numbers are those of
linux/netfilter/nf_tables.h.
"""

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache

from rules import nft_sets
from rules.model import FILTERS, NUMBERS, OWN, Address, Chain, Family, Lookup, Rule, Share
from rules.nft import (
    NAME,
    PRIORITY,
    TYPES,
    bridge_name,
    bridge_priority,
    map_name,
    peers_end,
    port_pairs,
)
from rules.nft_sets import NESTED, SetStep, attribute, number
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    BridgeStep,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    EraseStray,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    RuleStep,
    Step,
)
from rules.nft_terms import SEED
from rules.ports import HIGHEST
from rules.shapes import name, port_name

BATCH_BEGIN, BATCH_END = 16, 17
NEWTABLE, DELTABLE, NEWCHAIN, DELCHAIN, NEWRULE, DELRULE, NEWSET, DELSET, NEWSETELEM, DELSETELEM = (
    (10 << 8) | kind for kind in (0, 2, 3, 5, 6, 8, 9, 11, 12, 14)
)
REQUEST, ACK, ECHO, EXCL, CREATE, APPEND = 0x1, 0x4, 0x8, 0x200, 0x400, 0x800
BATCH_GENID = 1
INET, SUBSYSTEM = 1, 10
AT_ONCE = 200  # elements in one message: an attribute holds 64 KiB at most
COMMENT = 0  # the kind of what nft keeps in the user data of a rule or an element
HOOKS = {"prerouting": 0, "forward": 2, "output": 3, "postrouting": 4}
VERSIONS = {Family.IP: 2, Family.IP6: 10}
IIFNAME, OIFNAME, NFPROTO, L4PROTO = 6, 7, 15, 16
NETWORK, TRANSPORT = 1, 2  # headers
PLACES = {Family.IP: (12, 16, 4), Family.IP6: (8, 24, 16)}  # of source, destination; their length
EQUAL, OTHER, UP_TO, FROM = 0, 1, 3, 5
LOOPBACK = {Family.IP: b"\x7f", Family.IP6: bytes(15) + b"\1"}  # as nft compares: the first byte
ADDRESS_TYPE, OF_DESTINATION, LOCAL = 3, 2, struct.pack("=I", 2)
SECOND, BEHIND = 2, {Family.IP: 13, Family.IP6: 3}  # registers: for an address, and the next
PORT_GIVEN = 2
MAP, INTERVAL_MAP = 0x8, 0x4 | 0x8
PORTS, ADDRESSES = 13, nft_sets.TYPES  # how nft numbers types
BIG_ENDIAN = struct.pack("=BBIBBIBBI", 0, 4, 2, 1, 4, 2, 6, 4, 0)  # what nft notes of such a map
MOST_ECHOED = 64  # rules whose handles the kernel tells: more would not fit into a socket
MEMORY = 256  # expressions of a kind that are remembered

Message = tuple[int, int, bytes]  # its kind, its flags, its body


def can_write(steps: Iterable[Step]) -> bool:
    """Whether there are bytes for all of them: some rules have a map or set of their own, which
    libnftables numbers."""
    return not any(
        (isinstance(step, AddRule | AddBridge) and _has_a_set(step.rule))
        or (isinstance(step, AddLookup) and _is_scattered(step.lookup.share))
        for step in steps
    )


def _has_a_set(rule: Rule) -> bool:
    """Of a shifted range it is from port to port, of others the links, addresses or numbers."""
    ranged = rule.to_port is not None and rule.ports is not None and len(rule.ports) > 1
    return ranged or rule.detour is not None or _is_scattered(rule.share)


def _is_scattered(share: Share | None) -> bool:
    return share is not None and len(share.at) > 1


def batch(steps: Iterable[Step], generation: int | None = None) -> bytes:
    """The transaction. Only the last of its messages is acknowledged, whatever is refused is told
    anyway: a socket has no room for hundreds of answers. Where a generation of the ruleset is
    named, the kernel takes the batch only if there has been no other since."""
    content = [one for step in steps for one in _messages(step)]
    echoed = sum(kind == NEWRULE for kind, _, _ in content) <= MOST_ECHOED
    edge = struct.pack(">BBH", 0, 0, SUBSYSTEM)
    begin = b"" if generation is None else attribute(BATCH_GENID, number(generation))
    data = [_message(BATCH_BEGIN, REQUEST, edge + begin)]
    for left, (kind, flags, body) in enumerate(content, 1 - len(content)):
        asked = (ECHO if echoed and kind == NEWRULE else 0) | (0 if left else ACK)
        data.append(_message(kind, flags | asked, body))
    return b"".join([*data, _message(BATCH_END, REQUEST, edge)])


def _messages(step: Step) -> Iterator[Message]:
    if isinstance(step, SetStep):
        return nft_sets.messages(step, OURS)
    return _of_bridge(step) if isinstance(step, BridgeStep) else _of_rules(step)


def _of_bridge(step: BridgeStep) -> Iterator[Message]:
    match step:
        case MakeBridge(chain, behind):
            called, priority = bridge_name(chain, behind), bridge_priority(chain, behind)
            yield NEWCHAIN, REQUEST | CREATE, OURS + _chain(chain, called, priority)
        case FlushBridge(chain, behind):
            yield DELRULE, REQUEST, OURS + attribute(2, _text(bridge_name(chain, behind)))
        case DropBridge(chain, behind):
            yield DELCHAIN, REQUEST, OURS + attribute(3, _text(bridge_name(chain, behind)))
        case AddBridge(rule, behind):
            content = [*_matches(rule), COUNTER, *_verdict(rule)]
            comment = attribute(7, _comment(rule.owner))
            yield _rule(bridge_name(rule.chain, behind), content, comment)


def _of_rules(step: RuleStep) -> Iterator[Message]:
    match step:
        case DropTable():
            yield DELTABLE, REQUEST, OURS
        case MakeTable(exclusive):
            flags = REQUEST | CREATE | (EXCL if exclusive else 0)
            yield NEWTABLE, flags, OURS + attribute(2, number(0))
        case MakeChain(chain):
            yield NEWCHAIN, REQUEST | CREATE, OURS + _chain(chain, chain.value, PRIORITY[chain])
        case DropRule(chain, handle):
            place = attribute(2, _text(chain)) + attribute(3, struct.pack(">Q", handle))
            yield DELRULE, REQUEST, OURS + place
        case DropStray(_, stray):
            yield DELSET, REQUEST, OURS + attribute(2, _text(stray))
        case EraseStray(stray, ports):
            where = OURS + attribute(2, _text(stray))
            yield DELSETELEM, REQUEST, where + _nested(3, _interval(*ports))
        case DropMap(lookup, ports):
            yield DELSET, REQUEST, OURS + attribute(2, _text(map_name(lookup, ports)))
        case MakeMap(lookup, ports):
            yield NEWSET, REQUEST | CREATE, OURS + (_port_map if ports else _map)(lookup)
        case Erase(lookup, rules, ports):
            found = _ports(rules, whole=False) if ports else _intervals(rules, whole=False)
            yield from _elements(DELSETELEM, REQUEST, map_name(lookup, ports), found)
        case Fill(lookup, rules, ports):
            found = _ports(rules, whole=True) if ports else _intervals(rules, whole=True)
            yield from _elements(NEWSETELEM, REQUEST | CREATE, map_name(lookup, ports), found)
        case AddRule(rule, first, behind):
            rest = attribute(7, _comment(rule.owner))
            rest += attribute(6, struct.pack(">Q", behind)) if behind else b""
            content = [*_matches(rule), COUNTER, *_verdict(rule)]
            yield _rule(rule.chain.value, content, rest, first=first)
        case AddLookup(lookup, first):
            content = [*_matches(lookup), COUNTER, *_looked_up(lookup)]
            yield _rule(lookup.chain.value, content, first=first)


# ------------------------------------------------------------------------------------ attributes


def _nested(kind: int, *content: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(content))


def _numbers(*values: int) -> bytes:
    """The attributes from 1 on."""
    return b"".join(attribute(kind, number(value)) for kind, value in enumerate(values, 1))


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def _value(content: bytes) -> bytes:
    return attribute(1, content)


def _comment(owner: str) -> bytes:
    text = _text(owner)
    return bytes((COMMENT, len(text))) + text


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


OURS = struct.pack("=BBH", INET, 0, 0) + attribute(1, _text(NAME))  # what every body begins with


# -------------------------------------------------------------------------------- chains and maps


@lru_cache(MEMORY)
def _chain(chain: Chain, called: str, priority: int) -> bytes:
    hook = _nested(4, _numbers(HOOKS[chain.hook], priority))
    accept = attribute(5, number(1))
    return attribute(3, _text(called)) + hook + accept + attribute(7, _text(TYPES[chain]))


def _map(lookup: Lookup) -> bytes:
    kind, length = ADDRESSES[lookup.family]
    words = enumerate((INTERVAL_MAP, PORTS, 2, kind, length), 3)
    return (
        attribute(2, _text(name(lookup)))
        + b"".join(attribute(place, number(value)) for place, value in words)
        + attribute(10, number(1))
        + attribute(13, BIG_ENDIAN)
        + _nested(17, *COUNTING)
    )


def _port_map(lookup: Lookup) -> bytes:
    words = enumerate((MAP, PORTS, 2, PORTS, 2), 3)
    return (
        attribute(2, _text(port_name(lookup)))
        + b"".join(attribute(place, number(value)) for place, value in words)
        + attribute(10, number(1))
        + attribute(13, BIG_ENDIAN)
    )


def _elements(kind: int, flags: int, where: str, elements: Iterable[bytes]) -> Iterator[Message]:
    place = OURS + attribute(2, _text(where))
    found = list(elements)
    for start in range(0, len(found), AT_ONCE):
        yield kind, flags, place + _nested(3, *found[start : start + AT_ONCE])


def _ports(rules: Iterable[Rule], *, whole: bool) -> Iterator[bytes]:
    for port, to in port_pairs(rules):
        yield _end(port, _nested(2, _value(to.to_bytes(2, "big"))) if whole else b"")


def _intervals(rules: Iterable[Rule], *, whole: bool) -> Iterator[bytes]:
    """The kernel holds an interval as two elements: its first port, and the one after its last.
    Where the interval leads, and whose it is, is with the first of them."""
    to: Address | None = None
    owner, rest = "", b""
    for rule in rules:
        if rule.ports is None or rule.to is None:
            raise ValueError(rule)
        if whole and (to is None or rule.owner != owner or rule.to != to):  # mostly as the last
            to, owner = rule.to, rule.owner
            rest = _nested(2, _value(to.packed)) + attribute(6, _comment(owner))
        yield _interval(rule.ports.first, rule.ports.last, rest)


def _interval(first: int, last: int, rest: bytes = b"") -> bytes:
    start = _end(first, rest)
    return start + _end(last + 1, LAST) if last < HIGHEST else start


def _end(port: int, rest: bytes) -> bytes:
    """An element whose key is a port: thousands of them are made, so the layout is written out."""
    size = END.size + len(rest)
    return END.pack(size, 1 | NESTED, 12, 1 | NESTED, 6, 1, port.to_bytes(2, "big")) + rest


END = struct.Struct("=HHHHHH2sxx")
LAST = attribute(3, number(1))


# ----------------------------------------------------------------------------------------- rules


def _rule(
    chain: str, expressions: Iterable[bytes], rest: bytes = b"", *, first: bool = False
) -> Message:
    content = attribute(2, _text(chain)) + _nested(4, *expressions) + rest
    return NEWRULE, REQUEST | CREATE | (0 if first else APPEND), OURS + content


def _matches(what: Rule | Lookup) -> Iterator[bytes]:
    if what.interface is not None:
        key = OIFNAME if what.chain is Chain.POSTROUTING else IIFNAME
        yield from _is(_meta(key), what.interface.encode().ljust(16, b"\0"))
    yield from _is(_meta(NFPROTO), bytes([VERSIONS[what.family]]))
    source, destination, length = PLACES[what.family]
    if isinstance(what, Rule) and what.source is not None:
        yield from _is(_payload(NETWORK, source, length), what.source.packed)
    if what.chain is Chain.RAW:
        yield from _is(_payload(NETWORK, destination, 1), LOOPBACK[Family.IP])
    if what.destination == OWN[what.family]:
        loopback = LOOPBACK[what.family]
        yield _payload(NETWORK, destination, len(loopback))
        yield _compare(OTHER, loopback)
        yield from _is(_expression("fib", _numbers(1, ADDRESS_TYPE, OF_DESTINATION)), LOCAL)
    elif what.destination is not None:
        yield from _is(_payload(NETWORK, destination, length), what.destination.packed)
    if what.protocol is not None and (isinstance(what, Rule) or _reads_ports(what.share)):
        yield from _is(_meta(L4PROTO), bytes([NUMBERS[what.protocol]]))
    if isinstance(what, Rule) and what.ports is not None:
        yield _payload(TRANSPORT, 2, 2)
        first, last = (port.to_bytes(2, "big") for port in (what.ports.first, what.ports.last))
        yield from (
            [_compare(EQUAL, first)]
            if first == last
            else [
                _compare(FROM, first),
                _compare(UP_TO, last),
            ]
        )
    if what.share is not None:
        yield from _shared(what.share, what.family)
    if isinstance(what, Rule):
        yield from _filtered(what)


def _filtered(rule: Rule) -> Iterator[bytes]:
    """What only rules of filters compare."""
    source, destination, length = PLACES[rule.family]
    address = source if peers_end(rule) == "saddr" else destination
    if rule.peer is not None and rule.chain is not Chain.RAW:
        yield _payload(NETWORK, address, length)
        if rule.peer.prefixlen < rule.peer.max_prefixlen:
            yield _masked(rule.peer.netmask.packed)
        yield _compare(EQUAL, rule.peer.network_address.packed)
    if rule.peers is not None:
        yield _payload(NETWORK, address, length)
        yield _expression("lookup", attribute(1, _text(str(rule.peers))), attribute(2, number(1)))
    if rule.resumes:
        yield from RESUMING


def _reads_ports(share: Share | None) -> bool:
    """Whether it must be known before that a packet has any; nft would list it where it is not."""
    return share is not None and not share.client


def _verdict(rule: Rule) -> Iterator[bytes]:
    if rule.chain in FILTERS:
        yield ACCEPT if rule.accepts else DROP
        return
    if rule.to is None:
        yield _expression("redir" if rule.guards else "masq")
        return
    yield _immediate(rule.to.packed)
    if rule.to_port is not None:
        yield _immediate(rule.to_port.to_bytes(2, "big"), SECOND)
    yield _nat(rule.chain, rule.family, rule.to_port is not None)


def _looked_up(lookup: Lookup) -> Iterator[bytes]:
    if not _reads_ports(lookup.share):  # else it was asked before
        yield from _is(_meta(L4PROTO), bytes([NUMBERS[lookup.protocol]]))
    yield from _found(name(lookup), 1)
    if lookup.shifted:
        yield from _found(port_name(lookup), SECOND)
    yield _nat(lookup.chain, lookup.family, lookup.shifted)


def _found(where: str, register: int) -> Iterator[bytes]:
    """What a map holds for the port that a packet is for."""
    yield _payload(TRANSPORT, 2, 2, register)
    registers = attribute(2, number(register)) + attribute(3, number(register))
    yield _expression("lookup", attribute(1, _text(where)), registers)


def _shared(share: Share, family: Family) -> Iterator[bytes]:
    """The number of a flow, made of who sends it."""
    source, _, length = PLACES[family]
    yield _payload(NETWORK, source, length, SECOND)
    if not share.client:
        yield _payload(TRANSPORT, 0, 2, BEHIND[family])
        length += 4  # a register is never filled by half
    yield _expression("hash", _numbers(SECOND, 1, length, share.of, SEED))
    yield _compare(EQUAL, struct.pack("=I", share.at[0]))


def _is(loaded: bytes, value: bytes) -> tuple[bytes, bytes]:
    return loaded, _compare(EQUAL, value)


# Rules are made of a few expressions again and again.


@lru_cache(MEMORY)
def _compare(how: int, value: bytes) -> bytes:
    return _expression("cmp", _numbers(1, how), _nested(3, _value(value)))


@lru_cache(MEMORY)
def _meta(key: int) -> bytes:
    return _expression("meta", _numbers(1, key))


@lru_cache(MEMORY)
def _payload(header: int, offset: int, length: int, register: int = 1) -> bytes:
    return _expression("payload", _numbers(register, header, offset, length))


def _masked(mask: bytes) -> bytes:
    """The bits of the first register that count."""
    zero = _nested(5, _value(bytes(len(mask))))
    return _expression("bitwise", _numbers(1, 1, len(mask)), _nested(4, _value(mask)), zero)


@lru_cache(MEMORY)
def _immediate(value: bytes, register: int = 1) -> bytes:
    return _expression("immediate", _numbers(register), _nested(2, _value(value)))


@lru_cache(MEMORY)
def _nat(chain: Chain, family: Family, ported: bool) -> bytes:
    """To the address in the first register, and the port in the second."""
    content = _numbers(int(chain is not Chain.POSTROUTING), VERSIONS[family], 1)
    if ported:
        content += attribute(5, number(SECOND)) + attribute(7, number(PORT_GIVEN))
    return _expression("nat", content)


def _expression(kind: str, *content: bytes) -> bytes:
    return _nested(1, attribute(1, _text(kind)), _nested(2, *content))


COUNTING = attribute(1, _text("counter")), _nested(2)
COUNTER = _nested(1, *COUNTING)
DROP, ACCEPT = (
    _expression("immediate", _numbers(0), _nested(2, _nested(2, _numbers(code)))) for code in (0, 1)
)
RESUMING = (  # established or related
    _expression("ct", attribute(1, number(1)), attribute(2, number(0))),
    _masked(struct.pack("=I", 2 | 4)),
    _compare(OTHER, bytes(4)),
)
