"""What our netlink readers find in a namespace, pyroute2 finds, too: links, addresses, default
routes, listening sockets and flows of namespaces made at random."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyroute2 import DiagSocket, IPRoute, NetlinkError, NFCTSocket
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from agent.kernel import conntrack, rtnetlink, sockets, sysctl
from agent.kernel.netlink import NLM_F_DUMP, picked
from agent.kernel.netns import inside, opened
from rules.model import Family, InterfaceAddress, Protocol
from rules.stale import Flow
from rules.values import Value
from tests.spaces import ip, nft, run, space

Read = TypeVar("Read")
Message = Any  # of pyroute2, which has no types
VERSIONS = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
LOCAL = {Family.IP: ("127.0.0.1", "127.1.2.3"), Family.IP6: ("::1", "fd00::1", "fd00::2")}
LISTENING, UNCONNECTED = 1 << 10, 1 << 7
SEEN_REPLY, DST_NAT = 1 << 1, 1 << 5
ROUNDS = 10  # flows end by themselves: what is compared was the same before and after

few = settings(
    max_examples=max(int(os.environ.get("EXAMPLES", "60")) // 6, 1),  # each makes a namespace
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller example takes minutes
)


@contextmanager
def entered(netns: str) -> Iterator[None]:
    with opened(netns) as descriptor, inside(descriptor, netns):
        yield


@contextmanager
def made(*lines: str) -> Iterator[str]:
    with space() as name:
        ip(name, "link set lo addrgenmode none", "link set lo up", *lines)
        yield name


# ------------------------------------------------------------------- links, addresses and routes

KINDS = (
    "link add name {0} type bridge",
    "link add name {0} type veth peer name p~{0}",
    "link add name {0} type dummy",
    "link add name {0} type vxlan id {2} dstport 4789",
    "link add link {1} name {0} type vlan id {2}",
    "link add link {1} name {0} type macvlan",
    "tuntap add dev {0} mode tap",
    "tuntap add dev {0} mode tun",
)
NAMES = st.from_regex(r"n[a-zA-Z0-9._-]{0,10}", fullmatch=True)
ROUTES = (
    "{3} dev {0} metric {2}",
    "{3} metric {2} nexthop {4} dev {0} nexthop {4} dev {1}",
    "unreachable {3} metric {2}",
    "{3} dev {0} metric {2} table 100",
    "{3} dev {0} metric {2} proto ra",
)


@functools.cache
def kinds() -> tuple[str, ...]:
    """Those that this kernel has."""
    with space() as netns:
        ip(netns, KINDS[0].format("base"))
        tried = (line.format(f"x{n}", "base", n) for n, line in enumerate(KINDS))
        codes = [run("ip", "-n", netns, *line.split(), code=None).returncode for line in tried]
    return tuple(line for line, code in zip(KINDS, codes, strict=True) if code == 0)


@st.composite
def networks(draw: st.DrawFn) -> tuple[str, ...]:
    """Lines for `ip`, which make links of several kinds with addresses, and routes over them."""
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique_by=str.lower))
    lines = [KINDS[0].format(names[0])]
    for number, name in enumerate(names[1:], 1):
        line = draw(st.sampled_from(kinds()))
        lines.append(line.format(name, names[0], number))
    for name in names:
        lines += [f"link set dev {name} addrgenmode none", f"link set dev {name} up"]
        lines += draw(st.lists(addresses(name), max_size=3, unique_by=address_of))
    for everywhere, via in (("0.0.0.0/0", ""), ("::/0", "via fe80::1")):
        for metric in draw(st.lists(st.integers(1, 2000), max_size=4, unique=True)):
            route = draw(st.sampled_from(ROUTES))
            one, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
            if one == other:
                route = ROUTES[0]
            lines.append(f"route append {route.format(one, other, metric, everywhere, via)}")
    return tuple(lines)


def addresses(name: str) -> st.SearchStrategy[str]:
    four = st.integers(0x0B000000, 0x7E000000).map(IPv4Address)
    six = st.integers(0xFD00 << 112, (0xFD01 << 112) - 1).map(IPv6Address)
    return st.one_of(
        st.builds("addr add {}/{} dev {}".format, four, st.integers(8, 32), st.just(name)),
        st.builds("addr add {} peer {}/{} dev {}".format, four, four, st.just(32), st.just(name)),
        st.builds("addr add {}/{} dev {} nodad".format, six, st.integers(48, 128), st.just(name)),
        st.builds(
            "addr add {} peer {}/{} dev {} nodad".format, six, six, st.just(128), st.just(name)
        ),
    )


def address_of(line: str) -> str:
    return line.split()[2].partition("/")[0]


Links = dict[str, set[InterfaceAddress]]


def links_of(ip_route: IPRoute) -> tuple[dict[int, str], Links]:
    names = {one["index"]: one.get_attr("IFLA_IFNAME") for one in ip_route.get_links()}
    found: Links = {name: set() for name in names.values()}
    for one in ip_route.get_addr():
        text = one.get_attr("IFA_LOCAL") or one.get_attr("IFA_ADDRESS")
        found[names[one["index"]]].add(ip_interface(f"{text}/{one['prefixlen']}"))
    return names, found


def defaults_of(ip_route: IPRoute, names: dict[int, str]) -> Iterator[tuple[tuple[int, int], str]]:
    """Family and metric of each default route, the link, and who made it."""
    for family in VERSIONS.values():
        for one in ip_route.get_routes(family=family):
            table = one.get_attr("RTA_TABLE") or one["table"]
            if one["dst_len"] or table != 254 or one["type"] != 1:
                continue
            hops = one.get_attr("RTA_MULTIPATH")
            index = hops[0]["oif"] if hops else one.get_attr("RTA_OIF")
            yield (int(family), one.get_attr("RTA_PRIORITY") or 0), names[index]


@few
@given(networks())
def test_links_addresses_and_default_routes_are_those_that_pyroute2_reads(
    lines: tuple[str, ...],
) -> None:
    with made(*lines) as netns, IPRoute(netns=netns) as ip_route:
        with entered(netns):
            ours, advised = rtnetlink.surroundings(), rtnetlink.advised_links()
        names, links = links_of(ip_route)
        assert {link.name: set(link.addresses) for link in ours.links} == links
        assert [link.name for link in ours.links] == sorted(links)
        defaults = sorted(defaults_of(ip_route, names))
        best = {name for key, name in defaults if key == defaults[0][0]}
        assert (ours.default_link in best) if defaults else ours.default_link is None
        routers = {
            names[one.get_attr("RTA_OIF")]
            for one in ip_route.get_routes(family=socket.AF_INET6)
            if not one["dst_len"] and one["proto"] == 9 and one["table"] == 254
        }
        assert advised == sorted(routers)
    for line in lines:
        if line.startswith("addr"):
            assert ip_address(address_of(line)) in {
                one.ip for some in links.values() for one in some
            }


# --------------------------------------------------------------------------------------- sockets


class Bound(Value, kw_only=True):
    """A socket as it is to be made."""

    family: Family
    kind: socket.SocketKind
    address: str
    port: int
    v6only: bool


@st.composite
def bindings(draw: st.DrawFn) -> Bound:
    family = draw(st.sampled_from(tuple(Family)))
    places = {
        Family.IP: ("0.0.0.0", *LOCAL[Family.IP]),
        Family.IP6: ("::", "::ffff:127.0.0.1", *LOCAL[Family.IP6]),
    }
    return Bound(
        family=family,
        kind=draw(st.sampled_from((socket.SOCK_STREAM, socket.SOCK_DGRAM))),
        address=draw(st.sampled_from(places[family])),
        port=draw(st.sampled_from((1, 53, 80, 8080, 65535))),
        v6only=draw(st.booleans()),
    )


def open_sockets(stack: ExitStack, wanted: Sequence[Bound]) -> None:
    """In the namespace this thread is in, as far as they can be there together."""
    for one in wanted:
        made = stack.enter_context(socket.socket(VERSIONS[one.family], one.kind))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, one.port % 2)
        if one.family is Family.IP6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, one.v6only)
        with suppress(OSError):  # taken, or an address of the other family
            made.bind((one.address, one.port))
            if one.kind is socket.SOCK_STREAM:
                made.listen()


Place = tuple[Protocol, Family, str, int]


def places_of(diag: DiagSocket) -> Iterator[Place]:
    for protocol, number, states in (
        (Protocol.TCP, socket.IPPROTO_TCP, LISTENING),
        (Protocol.UDP, socket.IPPROTO_UDP, UNCONNECTED),
    ):
        for version in VERSIONS.values():
            for one in diag.get_sock_stats(family=version, states=states, protocol=number):
                yield from place_of(protocol, one)


def place_of(protocol: Protocol, one: Message) -> Iterator[Place]:
    address, port = ip_address(one["idiag_src"]), one["idiag_sport"]
    if one["idiag_family"] == socket.AF_INET6 and isinstance(address, IPv4Address):
        address = IPv6Address(f"::ffff:{address}")  # which pyroute2 shortens, and :: to nothing
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if not port:
        return
    wide = not int(address)
    yield protocol, Family.of(address), "" if wide else str(address), port
    if wide and address.version == 6 and not one.get_attr("INET_DIAG_SKV6ONLY"):
        yield protocol, Family.IP, "", port


@few
@given(st.lists(bindings(), max_size=8))
def test_listening_sockets_are_those_that_pyroute2_reads(wanted: list[Bound]) -> None:
    addresses = [f"addr add {one}/128 dev lo" for one in LOCAL[Family.IP6][1:]]
    with made(*addresses) as netns, ExitStack() as stack, entered(netns):
        open_sockets(stack, wanted)
        ours = [
            (one.protocol, one.family, str(one.address or ""), one.port)
            for one in sockets.listeners()
        ]
        with DiagSocket() as diag:
            diag.bind()
            theirs = set(places_of(diag))
    assert len(ours) == len(set(ours))
    assert set(ours) == theirs


# ----------------------------------------------------------------------------------------- flows

NAT = """
table inet t {
    chain out {
        type nat hook output priority -100
        meta nfproto ipv4 meta l4proto { tcp, udp } th dport 1000-1999 dnat ip to 127.0.0.1:7
        meta nfproto ipv6 meta l4proto { tcp, udp } th dport 1000-1999 dnat ip6 to [::1]:7
    }
}
"""


class Sent(Value, kw_only=True):
    """One packet, or a connection."""

    family: Family
    kind: socket.SocketKind
    to: str
    port: int
    reset: bool


class Tuple(Value, kw_only=True):
    """An entry that is put into the table of flows."""

    protocol: int
    ends: tuple[str, str, str, str]  # of the way there, and of the way back
    ports: tuple[int, int, int, int]


@st.composite
def sendings(draw: st.DrawFn) -> Sent:
    family = draw(st.sampled_from(tuple(Family)))
    return Sent(
        family=family,
        kind=draw(st.sampled_from((socket.SOCK_STREAM, socket.SOCK_DGRAM))),
        to=draw(st.sampled_from(LOCAL[family])),
        port=draw(st.one_of(st.integers(1000, 1999), st.integers(2000, 65535))),
        reset=draw(st.booleans()),
    )


@st.composite
def tuples(draw: st.DrawFn) -> Tuple:
    some = draw(
        st.sampled_from(
            (
                st.integers(0x0B000000, 0x7E000000).map(lambda n: str(IPv4Address(n))),
                st.integers(0xFD00 << 112, (0xFD01 << 112) - 1).map(lambda n: str(IPv6Address(n))),
            )
        )
    )
    port = st.integers(1, 65535)
    return Tuple(
        protocol=draw(st.sampled_from((socket.IPPROTO_TCP, socket.IPPROTO_UDP))),
        ends=draw(st.tuples(some, some, some, some)),
        ports=draw(st.tuples(port, port, port, port)),
    )


def send(stack: ExitStack, one: Sent) -> None:
    made = stack.enter_context(socket.socket(VERSIONS[one.family], one.kind))
    refused = made.connect_ex((one.to, one.port))
    if one.kind is socket.SOCK_DGRAM:
        made.send(b"x")
    elif one.reset and not refused:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()


def put(one: Tuple) -> None:
    version = socket.AF_INET6 if ":" in one.ends[0] else socket.AF_INET
    there, back = (
        NFCTAttrTuple(
            family=version,
            saddr=one.ends[n],
            daddr=one.ends[n + 1],
            proto=one.protocol,
            sport=one.ports[n],
            dport=one.ports[n + 1],
        )
        for n in (0, 2)
    )
    with NFCTSocket(nfgen_family=version) as table, suppress(NetlinkError):  # it is there already
        table.entry("add", timeout=600, tuple_orig=there, tuple_reply=back)


def dumped() -> Iterator[tuple[Family, Message]]:
    for family, version in VERSIONS.items():
        with NFCTSocket(nfgen_family=version) as table:
            for one in table.dump():
                yield family, one


def flow_of(family: Family, one: Message) -> Flow:
    ends = {Family.IP: "CTA_IP_V4_{}", Family.IP6: "CTA_IP_V6_{}"}[family]
    there, back = one.get_attr("CTA_TUPLE_ORIG"), one.get_attr("CTA_TUPLE_REPLY")
    to, of = there.get_attr("CTA_TUPLE_PROTO"), back.get_attr("CTA_TUPLE_PROTO")
    sender, destination = (
        ip_address(there.get_attr("CTA_TUPLE_IP").get_attr(ends.format(end)))
        for end in ("SRC", "DST")
    )
    answerer = ip_address(back.get_attr("CTA_TUPLE_IP").get_attr(ends.format("SRC")))
    return Flow(
        family=family,
        protocol=to.get_attr("CTA_PROTO_NUM"),
        port=to.get_attr("CTA_PROTO_DST_PORT"),
        destination=destination,
        answerer=answerer,
        sender=sender,
        answering_port=of.get_attr("CTA_PROTO_SRC_PORT"),
        sending_port=to.get_attr("CTA_PROTO_SRC_PORT"),
        answered_port=of.get_attr("CTA_PROTO_DST_PORT"),
    )


def our_flows() -> list[Flow]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, conntrack.NETLINK_NETFILTER) as netlink:
        return picked(
            netlink,
            conntrack.CT_GET,
            NLM_F_DUMP,
            bytes(4),
            conntrack.HEADER,
            lambda one: conntrack.flow_of(*one),
        )


Way = tuple[Family, int, int, bytes, bytes, bool, bool, tuple[int, int] | None]


def our_translated() -> list[Way]:
    return [
        (
            *(one.way.family, one.way.protocol, one.way.port),
            *(one.way.destination, one.way.answerer, one.answered, one.over, one.counted),
        )
        for one in conntrack.tracked().flows
    ]


def translated_of(family: Family, one: Message) -> Way:
    flow = flow_of(family, one)
    state = None
    if info := one.get_attr("CTA_PROTOINFO"):
        tcp = info.get_attr("CTA_PROTOINFO_TCP")
        state = tcp.get_attr("CTA_PROTOINFO_TCP_STATE") if tcp else None
    sides = [one.get_attr(f"CTA_COUNTERS_{side}") for side in ("ORIG", "REPLY")]
    counted = None
    if all(sides):
        packets, octets = (
            sum(side.get_attr(f"CTA_COUNTERS_{what}") for side in sides)
            for what in ("PACKETS", "BYTES")
        )
        counted = packets, octets
    return (
        *(flow.family, flow.protocol, flow.port),
        *(flow.destination.packed, flow.answerer.packed),
        *(bool(one.get_attr("CTA_STATUS") & SEEN_REPLY), state in (7, 8), counted),
    )


def steady(ours: Callable[[], list[Read]], theirs: Callable[[], list[Read]]) -> list[Read]:
    """What theirs is, read while ours does not change; ours is compared with it."""
    for _ in range(ROUNDS):
        before, other, after = ours(), theirs(), ours()
        if sorted(map(repr, before)) == sorted(map(repr, after)):
            assert sorted(map(repr, before)) == sorted(map(repr, other))
            return other
    return pytest.fail(f"flows changed during each of {ROUNDS} tries")


@few
@given(st.lists(sendings(), max_size=6), st.lists(tuples(), max_size=3), st.booleans())
def test_flows_are_those_that_pyroute2_reads(
    sent: list[Sent], given: list[Tuple], accounting: bool
) -> None:
    addresses = [f"addr add {one}/128 dev lo" for one in LOCAL[Family.IP6][1:]]
    with made(*addresses) as netns:
        nft(netns, NAT)
        with ExitStack() as stack, entered(netns):
            sysctl.write("net.netfilter.nf_conntrack_acct", str(int(accounting)))
            stack.enter_context(
                socket.create_server(("::", 7), family=socket.AF_INET6, dualstack_ipv6=True)
            )
            for packet in sent:
                send(stack, packet)
            for one in given:
                put(one)
            found = steady(our_flows, lambda: [flow_of(*one) for one in dumped()])
            translated = steady(
                our_translated,
                lambda: [
                    translated_of(*one)
                    for one in dumped()
                    if one[1].get_attr("CTA_STATUS") & DST_NAT
                ],
            )
            assert conntrack.counted() == len(found)
            assert conntrack.is_idle() == (not found)
    assert bool(translated) == any(1000 <= one.port <= 1999 for one in sent)
