"""The namespace that this thread is in, as a node that publishes: what its programs and others use
already, which way its endpoints are, and what would change if it became a router."""

import os
import socket
from collections.abc import Iterable, Iterator

from agent.kernel import rtnetlink, sockets, sysctl
from agent.kernel.netlink import ask, attribute, attributes, number
from agent.kernel.translations import Found
from rules.model import Address, Family, Surroundings
from rules.occupied import Occupied
from rules.publish import ROUTER_NEWS, Node

RTM_GETROUTE, RTA_DST, RTA_OIF = 26, 1, 4
RTM_GETLINK, IFLA_IFNAME, IFLA_LINKINFO, IFLA_INFO_KIND = 18, 3, 18, 1
BRIDGE_CALLS = ("net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables")
VERSIONS = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
IPV6_FORWARDING = "net.ipv6.conf.all.forwarding"


def look(surroundings: Surroundings, endpoints: Iterable[Address], foreign: Found) -> Node:
    """What there is, beside what others translate."""
    occupied = Occupied(
        listeners=sockets.listeners(),
        translations=foreign.translations,
        unreadable=foreign.unreadable,
        own=frozenset(a.ip for link in surroundings.links for a in link.addresses),
        ephemeral=sockets.ephemeral(),
    )
    routes = dict(_routes(endpoints))
    return Node(
        surroundings=surroundings,
        occupied=occupied,
        routes=routes,
        bridging=tuple(_bridging({*routes.values()})),
        advised=tuple(_advised()),
        reserved=sockets.reserved(),
    )


def _routes(endpoints: Iterable[Address]) -> Iterator[tuple[Address, str]]:
    """The link that packets to each would leave by; none for who cannot be reached."""
    names = dict(socket.if_nameindex())
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for address in endpoints:
            version, bits = VERSIONS[Family.of(address)], address.max_prefixlen
            question = bytes([version, bits, *bytes(10)]) + attribute(RTA_DST, address.packed)
            try:
                ((_, found),) = ask(netlink, RTM_GETROUTE, 0, question, "=BBBBBBBBI")
            except OSError:
                continue
            name = names.get(number(found[RTA_OIF])) if RTA_OIF in found else None
            if name:
                yield address, name


def _bridging(links: Iterable[str]) -> Iterator[str]:
    """Those of the links that are bridges, where bridges have netfilter translate their packets."""
    if "1" not in sysctl.read(BRIDGE_CALLS).values():
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for link in sorted(links):
            name = attribute(IFLA_IFNAME, os.fsencode(link) + b"\0")
            try:
                ((_, found),) = ask(netlink, RTM_GETLINK, 0, bytes(16) + name, "=BBHiII")
            except OSError:
                continue  # it went meanwhile
            if attributes(found.get(IFLA_LINKINFO, b"")).get(IFLA_INFO_KIND) == b"bridge\0":
                yield link


def _advised() -> Iterator[str]:
    """The links by which the node has its way out from a router, as long as it is none itself."""
    if sysctl.read([IPV6_FORWARDING]).get(IPV6_FORWARDING) != "0":
        return
    for link in rtnetlink.advised_links():
        name = ROUTER_NEWS.format(link.replace(".", "/"))
        if sysctl.read([name]).get(name) == "1":
            yield link
