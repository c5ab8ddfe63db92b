"""Rules of others are understood from the bytes in which the kernel dumps them.

netlink_rules.json holds what Linux 6.18 on x86-64 dumped of rules that nft 1.0.6 and iptables 1.8.9
had loaded. What these versions do not write is put together here, attribute by attribute.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rules.netlink_rules import Elements, decoded, each, may_matter
from rules.nft_sets import attribute, number
from rules.translations import STRANGE as NOT_UNDERSTOOD

RECORDED = json.loads((Path(__file__).parent / "netlink_rules.json").read_text())
SETS = {
    name: Elements(one["interval"], tuple(map(bytes.fromhex, one["elements"])))
    for name, one in RECORDED["sets"].items()
}


def told(raw: bytes, sets: dict[str, Elements] = SETS) -> str:
    """What a rule says, shorter than the form of libnftables."""
    return "; ".join(map(_told, decoded(raw, sets.__getitem__)))


def _told(expression: dict[str, Any]) -> str:
    match expression:
        case {"match": {"left": {"unknown": None}}}:
            return "anything"
        case {"match": {"left": left, "op": operator, "right": right}}:
            return f"{_value(left)} {operator} {_value(right)}"
        case {"vmap": {"key": key, "data": {"set": data}}}:
            verdicts = [f"{_value(value)}: {_told(verdict)}" for value, verdict in data]
            return f"{_value(key)} vmap {{{', '.join(verdicts)}}}"
        case {"jump": {"target": chain}} | {"goto": {"target": chain}}:
            return f"{next(iter(expression))} {chain}"
        case {"xt": {"type": "target", "name": name}}:
            return f"target {name}"
        case {"dnat": {"family": family}}:
            return f"dnat {family}"
    return next(iter(expression))


def _value(value: Any) -> str:
    match value:
        case {"payload": {"protocol": protocol, "field": field}}:
            return f"{protocol} {field}"
        case {"meta": {"key": key}}:
            return str(key)
        case {"ct": {"key": key}}:
            return f"ct {key}"
        case {"prefix": {"addr": address, "len": length}}:
            return f"{address}/{length}"
        case {"range": [None, None]}:
            return "some"
        case {"range": [first, last]}:
            return f"{first}-{last}"
        case {"set": members}:
            return f"{{{', '.join(map(_value, members))}}}"
        case {"concat": parts}:
            return " . ".join(map(_value, parts))
        case {"unknown": None}:
            return "unknown"
    return str(value)


RULES = {
    "nft tcp dport 80 dnat ip to 10.0.0.2:8080": "l4proto == 6; th dport == 80; dnat ip",
    "nft udp dport != 53 redirect to :5353": "l4proto == 17; th dport != 53; redirect",
    "nft sctp dport 7000-7010 dnat ip6 to [fd00::2]:7000": (
        "l4proto == 132; th dport >= 7000; th dport <= 7010; dnat ip6"
    ),
    "nft tcp dport != 7000-7010 jump other": "l4proto == 6; th dport != 7000-7010; jump other",
    "nft tcp dport > 1023 jump other": "l4proto == 6; th dport > 1023; jump other",
    "nft tcp dport @ports jump other": (
        "l4proto == 6; th dport == {1000-1999, 3000, 65000-65535}; jump other"
    ),
    "nft tcp dport != @plain goto other": "l4proto == 6; th dport != {80, 443}; goto other",
    "nft tcp dport @empty jump other": "l4proto == 6; th dport == {}; jump other",
    "nft tcp dport != @empty jump other": "l4proto == 6; jump other",
    "nft ip daddr . tcp dport @hosts jump other": (
        "nfproto == ipv4; l4proto == 6; ip daddr . th dport == {10.0.0.1 . 80-90}; jump other"
    ),
    "nft tcp dport vmap @go": (
        "l4proto == 6; th dport vmap {8080: jump other, 8081: goto other, 8082: drop, *: accept}"
    ),
    "nft udp dport vmap @spans": "l4proto == 17; th dport vmap {*: return, 100-200: jump other}",
    "nft ip daddr . tcp dport vmap { 192.0.2.1 . 80 : jump other }": (
        "nfproto == ipv4; l4proto == 6; ip daddr . th dport vmap {192.0.2.1 . 80: jump other}"
    ),
    "nft dnat ip to tcp dport map { 80 : 10.0.0.2 }": "l4proto == 6; th dport == {80}; dnat ip",
    "nft meta l4proto . th dport { tcp . 80, udp . 53 } jump other": (
        "l4proto . th dport == {17 . 53, 6 . 80}; jump other"
    ),
    "nft tcp sport . tcp dport { 1 . 2 } jump other": (
        "l4proto == 6; unknown . th dport == {1 . 2}; jump other"
    ),
    "nft tcp sport 1 tcp dport 2 jump other": "l4proto == 6; th dport == 2; anything; jump other",
    "nft th sport { 68 } jump other": "anything; jump other",
    "nft iifname @links jump other": "iifname == {eth*, wan}; jump other",
    'nft iifname "eth0" jump other': "iifname == eth0; jump other",
    'nft oifname != "eth*" jump other': "oifname != eth*; jump other",
    "nft ip daddr 192.0.2.1 jump other": "nfproto == ipv4; ip daddr == 192.0.2.1; jump other",
    "nft ip daddr 192.0.2.0/24 jump other": "nfproto == ipv4; ip daddr == 192.0.2.0/24; jump other",
    "nft ip daddr 192.0.2.0/27 jump other": "nfproto == ipv4; ip daddr == 192.0.2.0/27; jump other",
    "nft ip daddr != 192.0.2.0/27 jump other": (
        "nfproto == ipv4; ip daddr != 192.0.2.0/27; jump other"
    ),
    "nft ip daddr { 192.0.2.0/24, 198.51.100.7 } jump other": (
        "nfproto == ipv4; ip daddr == {some, 198.51.100.7}; jump other"
    ),
    "nft ip daddr 192.0.2.1-192.0.2.5 jump other": (
        "nfproto == ipv4; ip daddr >= 192.0.2.1; ip daddr <= 192.0.2.5; jump other"
    ),
    "nft ip daddr != 192.0.2.1-192.0.2.5 jump other": (
        "nfproto == ipv4; ip daddr != some; jump other"
    ),
    "nft ip6 daddr 2001:db8::1 jump other": "nfproto == ipv6; ip6 daddr == 2001:db8::1; jump other",
    "nft ip6 daddr 2001:db8::/32 jump other": (
        "nfproto == ipv6; ip6 daddr == 2001:db8::/32; jump other"
    ),
    "nft ip6 daddr 2001:db8::/33 jump other": (
        "nfproto == ipv6; ip6 daddr == 2001:db8::/33; jump other"
    ),
    "nft ip daddr & 255.255.0.0 { 10.1.0.0 } jump other": (
        "nfproto == ipv4; ip daddr == 10.1.0.0/16; jump other"
    ),
    "nft ip protocol udp jump other": "nfproto == ipv4; ip protocol == 17; jump other",
    "nft ip6 nexthdr tcp jump other": "nfproto == ipv6; ip6 nexthdr == 6; jump other",
    "nft meta nfproto ipv6 jump other": "nfproto == ipv6; jump other",
    "nft ct state established,related jump other": "ct state in 6; jump other",
    "nft ct state { new, established } jump other": "ct state == {2, 8}; jump other",
    "nft ct state != new jump other": "ct state != 8; jump other",
    "nft ct status dnat jump other": "ct status in 32; jump other",
    "nft fib daddr type local jump other": "anything; jump other",
    "nft numgen random mod 2 == 0 jump other": "anything; jump other",
    "nft meta mark 1 jump other": "anything; jump other",
    "nft meta mark & 1 == 1 jump other": "anything; jump other",
    "nft meta mark != 1-5 jump other": "anything; jump other",
    "nft tcp flags syn jump other": "l4proto == 6; anything; jump other",
    "nft rt classid 1 tcp dport 80 jump other": (
        "anything; l4proto == 6; th dport == 80; jump other"
    ),
    "nft masquerade": "",
    "nft snat ip to 10.0.0.9": "snat",
    "nft meta l4proto tcp tproxy ip to :50080 accept": "l4proto == 6; tproxy; accept",
    "nft tcp dport 22 drop": "l4proto == 6; th dport == 22; drop",
    "nft tcp dport 22 reject": "l4proto == 6; th dport == 22; reject",
    "nft tcp dport set 23": "l4proto == 6",
    "nft meta mark set 1 ct mark set 2": "",
    "nft log counter return": "return",
    "nft counter continue": "continue",
    "iptables -p tcp --dport 80 -j DNAT --to 10.0.0.2": "l4proto == 6; th dport == 80; target DNAT",
    "iptables -p udp ! --dport 53 -j REDIRECT --to-ports 5353": (
        "l4proto == 17; th dport != 53; target REDIRECT"
    ),
    "iptables -p tcp -m tcp --sport 68 -j DNAT --to 10.0.0.2": (
        "l4proto == 6; anything; target DNAT"
    ),
    "iptables -p sctp -m sctp --dport 7000:7010 -j DNAT --to 10.0.0.2": (
        "l4proto == 132; th dport == {7000-7010}; target DNAT"
    ),
    "iptables -p sctp -m sctp ! --dport 7000 -j DNAT --to 10.0.0.2": (
        "l4proto == 132; th dport != {7000-7000}; target DNAT"
    ),
    "iptables -p tcp -m multiport --dports 80,1000:2000,443 -j DNAT --to 10.0.0.2": (
        "l4proto == 6; th dport == {80, 1000-2000, 443}; target DNAT"
    ),
    "iptables -p tcp -m multiport ! --dports 80 -j DNAT --to 10.0.0.2": (
        "l4proto == 6; th dport != {80}; target DNAT"
    ),
    "iptables -m conntrack --ctstate RELATED,ESTABLISHED -j DNAT --to 10.0.0.2": (
        "ct state in 6; target DNAT"
    ),
    "iptables -m conntrack --ctstate DNAT -j DNAT --to 10.0.0.2": "ct status in 32; target DNAT",
    "iptables -m conntrack ! --ctstate NEW -j DNAT --to 10.0.0.2": "anything; target DNAT",
    "iptables -m comment --comment hello -j DNAT --to 10.0.0.2": "target DNAT",
    "iptables -m addrtype --dst-type LOCAL -j DNAT --to 10.0.0.2": "anything; target DNAT",
    "iptables -i eth+ -d 192.0.2.0/24 -j DNAT --to 10.0.0.2": (
        "iifname == eth*; ip daddr == 192.0.2.0/24; target DNAT"
    ),
}


def test_every_recorded_rule_is_held_to_its_meaning() -> None:
    assert RULES.keys() == RECORDED["rules"].keys()


@pytest.mark.parametrize(("written", "meaning"), RULES.items(), ids=RULES.keys())
def test_a_recorded_rule_says_what_was_written(written: str, meaning: str) -> None:
    assert told(bytes.fromhex(RECORDED["rules"][written])) == meaning


WORDS_THAT_MATTER = ("dnat", "redirect", "tproxy", "target", "jump", "goto")
MATTERING = [one for one, said in RULES.items() if any(word in said for word in WORDS_THAT_MATTER)]


@pytest.mark.parametrize("written", MATTERING)
def test_a_rule_that_translates_or_jumps_may_matter(written: str) -> None:
    assert may_matter(bytes.fromhex(RECORDED["rules"][written]))


def test_a_rule_that_only_counts_does_not_matter() -> None:
    assert not may_matter(rule(expression("counter", {1: bytes(8)})))


# ------------------------------------------------------------------------- put together here

VERDICT, FIRST = number(0), number(1)  # registers: the verdict, and the first of 16 bytes
WORDS = [number(8 + place) for place in range(16)]  # the registers of 4 bytes
TRANSPORT, NETWORK = number(2), number(1)
EQUAL, UNEQUAL = number(0), number(1)


def expression(name: str, parts: dict[int, bytes]) -> bytes:
    data = b"".join(attribute(kind, value) for kind, value in parts.items())
    return attribute(1, attribute(1, name.encode() + b"\0") + attribute(2, data))


def rule(*expressions: bytes) -> bytes:
    return b"".join(expressions)


def value(raw: bytes) -> bytes:
    return attribute(1, raw)


def payload(base: bytes, offset: int, size: int, register: bytes = FIRST) -> bytes:
    return expression("payload", {1: register, 2: base, 3: number(offset), 4: number(size)})


def compared(raw: bytes, operator: bytes = EQUAL, register: bytes = FIRST) -> bytes:
    return expression("cmp", {1: register, 2: operator, 3: value(raw)})


def within(first: bytes, last: bytes, operator: bytes = EQUAL) -> bytes:
    parts = {1: FIRST, 2: operator, 3: value(first), 4: value(last)}
    return expression("range", parts)


def xt(name: str, info: bytes, revision: int = 0) -> bytes:
    return expression("match", {1: name.encode() + b"\0", 2: number(revision), 3: info})


def tcp(first: int, last: int, inverted: int = 0) -> bytes:
    """struct xt_tcp, as older versions of iptables-nft load it."""
    return struct.pack("=4H4B", 0, 0xFFFF, first, last, 0, 0, 0, inverted)


def udp(first: int, last: int, inverted: int = 0) -> bytes:
    return struct.pack("=4HBx", 0, 0xFFFF, first, last, inverted)


def multiport(which: int, *ports: int, begin: tuple[int, ...] = (), inverted: int = 0) -> bytes:
    """struct xt_multiport_v1; begin: places of the ports that begin a range."""
    filled = [*ports, *[0] * (15 - len(ports))]
    begins = [int(place in begin) for place in range(15)]
    return struct.pack("=2B15H15BB", which, len(ports), *filled, *begins, inverted)


def conntrack(flags: int, inverted: int, states: int) -> bytes:
    return bytes(146) + struct.pack("=HHH", flags, inverted, states) + bytes(8)


DPORT = payload(TRANSPORT, 2, 2)
BOTH_PORTS = payload(TRANSPORT, 0, 4)
DADDR = payload(NETWORK, 16, 4)

MADE = {
    "tcp of an older iptables": (xt("tcp", tcp(80, 90)), "th dport == {80-90}"),
    "tcp but not these": (xt("tcp", tcp(80, 80, 2)), "th dport != {80-80}"),
    "udp of an older iptables": (xt("udp", udp(53, 53)), "th dport == {53-53}"),
    "udp but not these": (xt("udp", udp(53, 53, 2)), "th dport != {53-53}"),
    "multiport of either side": (
        xt("multiport", multiport(2, 80, 90, 443, begin=(0,)), 1),
        "th port == {80-90, 443}",
    ),
    "multiport of neither side": (
        xt("multiport", multiport(2, 80, inverted=1), 1),
        "th dport != {80}; anything",
    ),
    "multiport of the sender": (xt("multiport", multiport(0, 80), 1), "anything"),
    "tcp of the sender": (
        xt("tcp", struct.pack("=4H4B", 68, 68, 0, 0xFFFF, 0, 0, 0, 0)),
        "anything",
    ),
    "tcp of both": (
        xt("tcp", struct.pack("=4H4B", 68, 68, 80, 80, 0, 0, 0, 0)),
        "th dport == {80-80}; anything",
    ),
    "tcp with flags": (
        xt("tcp", struct.pack("=4H4B", 0, 0xFFFF, 80, 80, 0, 2, 2, 0)),
        "th dport == {80-80}; anything",
    ),
    "udp not of the sender": (
        xt("udp", struct.pack("=4HBx", 0, 0xFFFF, 0, 0xFFFF, 1)),
        "anything",
    ),
    "a limit": (expression("limit", {1: bytes(8)}), "anything"),
    "a quota": (expression("quota", {1: bytes(8)}), "anything"),
    "a number of flows": (expression("connlimit", {1: number(5)}), "anything"),
    "a counter by its name": (expression("objref", {1: number(1), 2: b"a\0"}), ""),
    "a limit by its name": (expression("objref", {1: number(4), 2: b"a\0"}), "anything"),
    "an object from a map": (expression("objref", {3: FIRST, 4: b"a\0"}), "anything"),
    "a socket in the register of a port": (
        rule(DPORT, expression("socket", {1: number(0), 2: FIRST}), compared(b"\1")),
        "anything",
    ),
    "an address by a mask with gaps": (
        rule(
            DADDR,
            expression(
                "bitwise",
                {
                    1: FIRST,
                    2: FIRST,
                    3: number(4),
                    4: value(b"\xff\0\xff\0"),
                    5: value(bytes(4)),
                },
            ),
            compared(b"\x0a\0\2\0"),
        ),
        "ip daddr == some",
    ),
    "an address whose bits are moved": (
        rule(
            DADDR,
            expression("bitwise", {1: FIRST, 2: FIRST, 3: number(4), 6: number(2)}),
            compared(b"\0\0\0\x0a"),
        ),
        "anything",
    ),
    "conntrack of new flows and translated ones": (
        xt("conntrack", conntrack(1, 0, 128 | 8), 3),
        "ct status in 32",
    ),
    "multiport of all fifteen": (
        xt("multiport", multiport(1, *range(1, 16)), 1),
        f"th dport == {{{', '.join(map(str, range(1, 16)))}}}",
    ),
    "multiport of another revision": (xt("multiport", multiport(1, 80)), "anything"),
    "multiport whose last port begins a range": (
        xt("multiport", multiport(1, 80, begin=(0,)), 1),
        "anything",
    ),
    "conntrack of another revision": (xt("conntrack", conntrack(1, 0, 8), 2), "anything"),
    "conntrack that asks for more": (xt("conntrack", conntrack(3, 0, 8), 3), "anything"),
    "conntrack of new flows": (xt("conntrack", conntrack(1, 0, 8), 3), "ct state in 8"),
    "a match nobody knows": (xt("bpf", bytes(64)), "anything"),
    "both ports at once": (
        rule(BOTH_PORTS, compared(struct.pack(">HH", 1, 2))),
        "th dport == 2; anything",
    ),
    "not both ports at once": (
        rule(BOTH_PORTS, compared(struct.pack(">HH", 1, 2), UNEQUAL)),
        "anything",
    ),
    "a range of both ports": (
        rule(BOTH_PORTS, expression("range", {1: FIRST, 3: value(b"1234"), 4: value(b"2345")})),
        "anything",
    ),
    "a range of ports as nft from 1.1 on writes it": (
        rule(DPORT, within(b"\x03\xe8", b"\x1f\x40")),
        "th dport >= 1000; th dport <= 8000",
    ),
    "all ports but a range": (
        rule(DPORT, within(b"\x03\xe8", b"\x1f\x40", UNEQUAL)),
        "th dport != 1000-8000",
    ),
    "a range of addresses": (
        rule(DADDR, within(b"\xc0\0\2\1", b"\xc0\0\2\5")),
        "ip daddr >= 192.0.2.1; ip daddr <= 192.0.2.5",
    ),
    "a range of protocols": (
        rule(expression("meta", {1: FIRST, 2: number(16)}), within(b"\6", b"\x11")),
        "l4proto >= 6; l4proto <= 17",
    ),
    "a register of 4 bytes is the first of 16": (
        rule(DPORT, compared(b"\0\x50", register=WORDS[0])),
        "th dport == 80",
    ),
    "another register": (rule(DPORT, compared(b"\0\x50", register=WORDS[1])), "anything"),
    "a register that something unknown may have loaded": (
        rule(DPORT, expression("later", {1: FIRST}), compared(b"\0\x50")),
        "anything; anything",
    ),
    "a register that a number overwrites": (
        rule(DPORT, expression("immediate", {1: FIRST, 2: value(b"1234")}), compared(b"\0\x50")),
        "anything",
    ),
    "an address with bits turned": (
        rule(
            DADDR,
            expression(
                "bitwise",
                {1: FIRST, 2: FIRST, 3: number(4), 4: value(b"\xff" * 4), 5: value(b"\0\0\0\1")},
            ),
            compared(b"\x0a\0\0\1"),
        ),
        "anything",
    ),
    "the states that a flow has not": (
        rule(
            expression("ct", {1: FIRST, 2: number(0)}),
            expression(
                "bitwise",
                {1: FIRST, 2: FIRST, 3: number(4), 4: value(b"\x08\0\0\0"), 5: value(bytes(4))},
            ),
            compared(bytes(4)),
        ),
        "anything",
    ),
    "a source of the sender": (
        rule(expression("nat", {1: number(0), 2: number(2)})),
        "snat",
    ),
    "a destination of no family": (expression("nat", {1: number(1)}), "dnat"),
    "a verdict nobody knows": (
        expression("immediate", {1: VERDICT, 2: attribute(2, attribute(1, number(0xFFFFFFF0)))}),
        "continue",
    ),
    "a family nobody knows": (
        rule(expression("meta", {1: FIRST, 2: number(15)}), compared(b"\x07")),
        "nfproto == None",
    ),
    "a name of 16 bytes": (
        rule(expression("meta", {1: FIRST, 2: number(6)}), compared(b"abcdefghijklmnop")),
        "iifname == abcdefghijklmnop",
    ),
    "a name that is no text": (
        rule(expression("meta", {1: FIRST, 2: number(6)}), compared(b"\xff\0")),
        "iifname == \N{REPLACEMENT CHARACTER}",
    ),
}


@pytest.mark.parametrize(("raw", "meaning"), MADE.values(), ids=MADE.keys())
def test_a_rule_of_other_versions_says_what_it_holds(raw: bytes, meaning: str) -> None:
    assert told(raw) == meaning


def element(first: bytes, last: bytes = b"", flags: int = 0) -> bytes:
    raw = attribute(1, value(first)) if first else b""
    raw += attribute(3, number(flags)) if flags else b""
    return raw + (attribute(10, value(last)) if last else b"")


LOOKED_UP = {
    "a port that ends nowhere": (True, [element(b"\xff\xf0")], "th dport == {65520-65535}"),
    "the last port alone": (True, [element(b"\xff\xff")], "th dport == {65535}"),
    "an end without a begin": (True, [element(b"\0\x50", flags=1)], "th dport == {}"),
    "intervals out of order": (
        True,
        [element(b"\0\x65", flags=1), element(b"\0\x64")],
        "th dport == {100}",
    ),
    "any other": (False, [element(b"\0\x50"), element(b"", flags=2)], "th dport == {80, *}"),
    "only any": (False, [element(b"", flags=2)], "th dport == {*}"),
}


@pytest.mark.parametrize(
    ("interval", "elements", "meaning"), LOOKED_UP.values(), ids=LOOKED_UP.keys()
)
def test_the_members_of_a_set_are_told(interval: bool, elements: list[bytes], meaning: str) -> None:
    raw = rule(DPORT, expression("lookup", {1: b"s\0", 2: FIRST}))
    assert told(raw, {"s": Elements(interval, tuple(elements))}) == meaning


def test_a_set_is_asked_for_by_its_name_only_where_a_rule_looks_into_it() -> None:
    asked: list[str] = []

    def sets(name: str) -> Elements:
        asked.append(name)
        return Elements(False, ())

    decoded(rule(DPORT, compared(b"\0\x50")), sets)
    assert not asked
    decoded(rule(DPORT, expression("lookup", {1: b"s\0", 2: FIRST})), sets)
    assert asked == ["s"]


# --------------------------------------------------------------------------- malformed bytes

CUT = {
    "nothing": (b"", []),
    "less than a header": (b"\x08\0\1", []),
    "shorter than its header": (struct.pack("=HH", 3, 1), []),
    "longer than what is there": (struct.pack("=HH", 9, 1) + b"1234", []),
    "empty": (struct.pack("=HH", 4, 7), [(7, b"")]),
    "flags are left out": (struct.pack("=HH", 5, 0xC000 | 7) + b"x\0\0\0", [(7, b"x")]),
    "no padding behind the last": (struct.pack("=HH", 5, 7) + b"x", [(7, b"x")]),
    "a good one before a bad one": (attribute(7, b"1234") + b"\1\0\1\0", [(7, b"1234")]),
}


@pytest.mark.parametrize(("raw", "found"), CUT.values(), ids=CUT.keys())
def test_attributes_end_where_they_are_not_as_the_kernel_writes_them(
    raw: bytes, found: list[tuple[int, bytes]]
) -> None:
    assert list(each(raw)) == found
    assert list(each(memoryview(raw))) == found


@pytest.mark.parametrize("written", RULES)
def test_a_rule_that_is_cut_off_says_nothing_else(written: str) -> None:
    """An expression is there as a whole or not at all."""
    raw = bytes.fromhex(RECORDED["rules"][written])
    whole = decoded(raw, SETS.__getitem__)
    for length in range(0, len(raw), 4):
        found = decoded(raw[:length], SETS.__getitem__)
        assert found == whole[: len(found)]


SHORT = {
    "tcp": (tcp(80, 80), 0),
    "udp": (udp(80, 80)[:9], 0),  # without the padding
    "sctp": (struct.pack("=4H", 80, 80, 0, 0) + bytes(276) + struct.pack("=II", 2, 0), 0),
    "multiport": (multiport(1, 80), 1),
    "conntrack": (conntrack(1, 0, 8)[:152], 3),
}


@pytest.mark.parametrize(("name", "info", "revision"), [(n, *i) for n, i in SHORT.items()])
def test_a_match_of_iptables_that_is_too_short_is_taken_to_hold(
    name: str, info: bytes, revision: int
) -> None:
    assert told(xt(name, info, revision)) != "anything"
    for length in range(len(info)):
        assert told(xt(name, info[:length], revision)) in ("anything", "")


@pytest.mark.parametrize("count", [16, 255])
def test_a_multiport_that_counts_more_than_it_can_hold_gives_what_it_holds(count: int) -> None:
    info = bytearray(multiport(1, *range(1, 16)))
    info[1] = count
    assert told(xt("multiport", bytes(info), 1)) == MADE["multiport of all fifteen"][1]


STRANGE = {
    "an operator nobody knows": rule(DPORT, compared(b"\0\x50", number(6))),
    "an address of 5 bytes": rule(DADDR, compared(b"12345")),
    "a family of no bytes": rule(expression("meta", {1: FIRST, 2: number(15)}), compared(b"")),
    "a range with such an operator": rule(
        DPORT, expression("range", {1: FIRST, 2: number(99), 3: value(b"12"), 4: value(b"34")})
    ),
}


@pytest.mark.parametrize("raw", STRANGE.values(), ids=STRANGE.keys())
def test_what_no_kernel_writes_is_an_error_that_readers_expect(raw: bytes) -> None:
    with pytest.raises(NOT_UNDERSTOOD):
        told(raw)


def test_expressions_without_attributes_say_nothing_wrong() -> None:
    for name in ("payload", "meta", "ct", "bitwise", "fib", "counter", "immediate"):
        assert told(expression(name, {})) == ""
    for name in ("cmp", "range", "match"):
        assert told(expression(name, {})) == "anything"
