"""What arrives from the kernel: netlink, in which lengths may lie; tables, in which anybody may
have written anything; and the workers that read them for us."""

from __future__ import annotations

import errno
import functools
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

from agent.kernel import conntrack, counters, events, rtnetlink, sockets
from agent.kernel.netlink import (
    HEADER,
    NLM_F_MULTI,
    NLMSG_DONE,
    NLMSG_ERROR,
    Answer,
    attribute,
    messages,
    taken,
)
from agent.kernel.wire import LENGTH, received
from rules import translations, xtables
from rules.desired import desire
from rules.flattened import flattened
from rules.manifests import read
from rules.manifests.resources import PREFIX, backing_links
from rules.model import Family, Protocol
from rules.netlink_rules import Elements, decoded, each
from rules.nft_listing import decode
from rules.plan import diff
from rules.saved_translations import saved as saved_translations
from tests.fuzz.choices import Choices, edited, garbage, mutated
from tests.fuzz.manifests import AROUND, is_written_for_iptables, is_written_for_nft
from tests.fuzz.samples import INSTANCE, ROOT
from tests.fuzz.target import Run, Target, simple

NONSENSE = (AttributeError, LookupError, TypeError, ValueError)  # what is expected of workers
BODY = "=BBH"  # of what is asked of netfilter
LAYOUTS = (BODY, "=BBBBi", "=BBBBBBBBI", sockets.MESSAGE)
WANTED = desire(read(INSTANCE).machines, AROUND)

# -------------------------------------------------------------------------------------- netlink


def answers(data: bytes) -> None:
    """One piece of an answer: taken apart, or told to be nonsense."""
    for layout in LAYOUTS:
        with suppress(OSError):
            understood(taken(data, struct.Struct(layout))[0], layout)


def understood(found: list[Answer], layout: str) -> None:
    """What the answers tell to each who asks."""
    if layout == BODY:
        dict(counters.counted(found))
        dict(counters.elements("map", found))
        for header, entry in found:
            conntrack.flow_of(header, entry)
    elif layout == sockets.MESSAGE:
        for one in found:
            for listener in sockets.heard(Protocol.TCP, one):
                assert 0 < listener.port < 65536
    elif layout == rtnetlink.ADDRESSES[2]:
        sorted(rtnetlink.addresses_of(found))
    else:
        sorted(rtnetlink.default_routes(found))


def news(data: bytes) -> None:
    """A piece of what the kernel says of its own accord."""
    for kind, body in events.messages(memoryview(data)):
        moved, gone = events.moving(3, body), events.going(body)
        if moved is not None:
            assert moved.process.isprintable(), moved
            assert len(moved.process) <= 64, moved
        if gone is not None:
            assert gone.nsid >= 0, gone
        assert 0 <= kind < 1 << 16
    events.origin([(270, 8, data)])
    with suppress(OSError):
        for _ in messages(data):
            pass


def message(kind: int, body: bytes, flags: int = NLM_F_MULTI) -> bytes:
    whole = HEADER.pack(HEADER.size + len(body), kind, flags, 1, 0) + body
    return whole + bytes(-len(whole) % 4)


def spoken() -> Iterator[bytes]:
    """Real shapes of what is asked for here."""
    done = message(NLMSG_DONE, bytes(4))
    ends = [
        attribute(number, ip_address(text).packed)
        for number, text in ((1, "192.0.2.1"), (2, "10.0.2.2"))
    ]
    ports = attribute(1, b"\6") + attribute(2, b"\x1f\x90") + attribute(3, b"\0\x16")
    tuples = attribute(1, b"".join(ends), nested=True) + attribute(2, ports, nested=True)
    flow = attribute(1, tuples, nested=True) + attribute(2, tuples, nested=True)
    yield message(256, struct.pack(BODY, 2, 0, 0) + flow + attribute(12, b"\0\0\0\1")) + done
    numbers = attribute(1, bytes(7) + b"\1") + attribute(2, bytes(7) + b"\2")
    counter = counters.COUNTER + attribute(2, numbers, nested=True)
    listed = attribute(1, counter, nested=True)
    rule = attribute(3, bytes(8)) + attribute(4, listed, nested=True)
    yield message(0xA06, struct.pack(BODY, 1, 0, 0) + rule) + done
    key = attribute(1, attribute(1, b"\0\x16"), nested=True)
    element = attribute(1, key + attribute(7, counter, nested=True), nested=True)
    yield message(0xA0C, struct.pack(BODY, 1, 0, 0) + attribute(3, element, nested=True)) + done
    body = bytes([2, 24, 0, 0]) + struct.pack("=i", 2)
    yield message(20, body + attribute(2, b"\xc0\0\2\x09")) + done
    route = bytes([2, 0, 0, 0, 254, 0, 0, 1]) + bytes(4) + attribute(4, struct.pack("=I", 2))
    yield message(24, route) + done
    yield message(20, bytes(struct.calcsize(sockets.MESSAGE)) + attribute(12, bytes(128))) + done
    generation = attribute(1, b"\0\0\0\7") + attribute(2, b"\0\0\1\0") + attribute(3, b"nft\0")
    yield message(events.NEWGEN, bytes(4) + generation, 0)
    yield message(events.DELNSID, bytes(4) + attribute(1, struct.pack("=i", 4)), 0)
    yield message(NLMSG_ERROR, struct.pack("=i", -errno.EPERM) + bytes(16), 0)


NETLINK_WORDS = (
    *(struct.pack("=H", length) for length in (0, 1, 3, 4, 5, 8, 0x7FFF, 0x8001, 0xFFFF)),
    *(
        struct.pack("=I", length)
        for length in (0, 3, 15, 16, 17, 20, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
    ),
)

# --------------------------------------------------------------------------------------- tables


@functools.cache
def listings() -> list[list[Any]]:
    """Those of the golden cases, and one of others."""
    paths = sorted(ROOT.glob("tests/golden/*/observed.json"))
    found = [json.loads(path.read_text())["listing"] for path in paths]
    return [one["nftables"] for one in found if one] + [OTHERS]


OTHERS: list[Any] = [
    {"table": {"family": "ip", "name": "nat", "handle": 1}},
    {"set": {"family": "ip", "name": "s", "table": "nat", "type": "inet_service", "elem": [1, 2]}},
    {"chain": {"family": "ip", "table": "nat", "name": "PREROUTING", "type": "nat"}},
    {
        "rule": {
            "family": "ip",
            "table": "nat",
            "chain": "PREROUTING",
            "handle": 4,
            "expr": [
                {
                    "match": {
                        "op": "==",
                        "left": {"payload": {"protocol": "tcp", "field": "dport"}},
                        "right": {"set": [80, {"range": [443, 445]}, "@s"]},
                    }
                },
                {"match": {"op": "!=", "left": {"meta": {"key": "l4proto"}}, "right": ["udp", 6]}},
                {"xt": {"type": "match", "name": "multiport"}},
                {"dnat": {"addr": "10.0.0.1", "port": 80}},
            ],
        }
    },
]


def listing(data: bytes) -> None:
    """What libnftables lists, of our table and of those of others."""
    choices = Choices(data)
    found = mutated(choices.pick(listings()), choices, 8)
    found = found if isinstance(found, list) else [found]
    entries = [one for one in found if isinstance(one, dict)]
    observed = decode(entries)
    is_written_for_nft(diff("blue", WANTED, observed))
    for one in translations.listed(entries):
        assert one.where.isprintable(), one


def dumped(data: bytes) -> None:
    """What the kernel dumps of a rule of others, and of the elements of a set."""
    elements = Elements(bool(len(data) % 2), tuple(v for _, v in each(data)))
    with suppress(*translations.STRANGE):
        rule = {"family": "inet", "table": "nat", "chain": "pre"}
        expr = decoded(data, lambda _: elements)
        translations.branches({**rule, "expr": expr}, {})


def expressions() -> Iterator[bytes]:
    """A port that is compared, and one that is looked up; then a translation."""

    def expression(name: bytes, *parts: tuple[int, bytes]) -> bytes:
        body = b"".join(attribute(kind, value) for kind, value in parts)
        both = attribute(1, name + b"\0") + attribute(2, body, nested=True)
        return attribute(1, both, nested=True)

    def number(value: int) -> bytes:
        return value.to_bytes(4, "big")

    port = expression(b"payload", (1, number(1)), (2, number(2)), (3, number(2)), (4, number(2)))
    value = attribute(1, (80).to_bytes(2, "big"))
    dnat = expression(b"nat", (1, number(1)), (2, number(2)))
    yield port + expression(b"cmp", (1, number(1)), (2, number(0)), (3, value)) + dnat
    yield port + expression(b"lookup", (1, b"ports\0"), (2, number(1)), (3, number(0)))


SAVED = """\
# Generated by iptables-save v1.8.9 on Mon Jan  1 00:00:00 2024
*nat
:PREROUTING ACCEPT [0:0]
-A PREROUTING -i eth0 -p tcp -m tcp --dport 8080:8090 -j DNAT --to-destination 10.0.0.1:80
-A PREROUTING -d 192.0.2.1/32 -p udp -m multiport --dports 53,100:200 -j REDIRECT --to-ports 53
-A PREROUTING ! -d 10.0.0.0/8 -p sctp -m comment --comment "a \\"b\\" -j DNAT" -j TPROXY --on-port 1
COMMIT
"""


def saved(data: bytes) -> None:
    """What iptables-save prints."""
    for family in Family:
        text = data.decode(errors="replace")
        for one in saved_translations(text, family, f"table {family.value} nat"):
            assert one.where.isprintable(), one


CHAINS = {
    name: [
        {**xtables.encode(rule), "counters": [1, 60]}
        for rule in sorted(WANTED.rules, key=str)
        if xtables.name(rule.chain) == name and rule.family is Family.IP
    ]
    for name in xtables.CHAINS
}
LISTED = {
    "chains": CHAINS,
    "jumps": {name: [0] for name in CHAINS},
    "others": 2,
    "unfit": "",
    "digest": "x",
}


def chains(data: bytes) -> None:
    """What a worker says of the chains of iptables: understood, or told to be nonsense."""
    choices = Choices(data)
    found = mutated(LISTED, choices, 8)
    found = found if isinstance(found, dict) else LISTED
    try:
        observed = xtables.decode({Family.IP: found, Family.IP6: LISTED})
    except NONSENSE:
        return
    plan = diff("blue", flattened(WANTED), observed)
    is_written_for_iptables(plan)


@contextmanager
def channel() -> Iterator[Run]:
    """A worker's answer, as bytes."""

    def run(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[: 1 << 16])
            theirs.close()
            with suppress(OSError, ValueError, TypeError, RecursionError):  # as for its reader
                assert isinstance(received(ours, 2.0), dict)

    yield run


def said() -> Iterator[bytes]:
    for content in (LISTED, {"error": "Stale", "text": "x"}, {}):
        text = json.dumps(content).encode()
        yield LENGTH.pack(len(text)) + text


def environment(data: bytes) -> None:
    """What a pod's user has in the environment of his processes."""
    choices = Choices(data)
    good = {"name": "plugin/net", "interfaces": [{"name": "net1", "protocol": "Ethernet"}]}
    text = json.dumps(mutated(good, choices))
    text = edited(text, choices) if choices.below(2) else text
    for resource, link in backing_links(
        [(PREFIX + "X", text), (PREFIX, str(garbage(choices)))]
    ).items():
        assert f"{resource}{link}".isprintable(), (resource, link)


TARGETS = (
    Target(
        name="netlink-answers",
        opened=simple(answers),
        seeds=spoken,
        words=NETLINK_WORDS,
        examples=400,
    ),
    Target(
        name="netlink-events", opened=simple(news), seeds=spoken, words=NETLINK_WORDS, examples=300
    ),
    Target(name="nft-listings", opened=simple(listing), examples=200),
    Target(
        name="nft-rules",
        opened=simple(dumped),
        seeds=expressions,
        words=NETLINK_WORDS,
        examples=400,
    ),
    Target(
        name="iptables-save",
        opened=simple(saved),
        seeds=lambda: [SAVED.encode()],
        words=(
            b'"',
            b"\\",
            b"!",
            b"-d ",
            b"--dport ",
            b"0:65536",
            b"-j DNAT",
            b"\n",
            b"\0",
            b"\xff",
        ),
        examples=300,
    ),
    Target(name="iptables-chains", opened=simple(chains), examples=200),
    Target(name="worker-answers", opened=channel, seeds=said, words=(*NETLINK_WORDS, b"[" * 5000)),
    Target(name="pod-environment", opened=simple(environment)),
)
