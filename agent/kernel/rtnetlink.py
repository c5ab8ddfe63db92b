"""Links, addresses and the default route of the namespace this thread is in.

Two dumps over one socket, and the names from libc. pyroute2 can do this too, for 250 ms and 24 MiB
at its import.
"""

import socket
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Interface, IPv6Interface

from agent.kernel.netlink import NLM_F_DUMP, Answer, ask, number
from rules.model import InterfaceAddress, Link, Surroundings

RTM_GETADDR, RTM_GETROUTE = 22, 26
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_OIF, RTA_PRIORITY, RTA_MULTIPATH = 4, 6, 9
RT_TABLE_MAIN, RTN_UNICAST, RTPROT_RA = 254, 1, 9
SOL_NETLINK, NETLINK_GET_STRICT_CHK = 270, 12  # Linux 4.20
SIZES: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}  # of addresses
# What to ask, with what, and the layout of the answers.
ADDRESSES = RTM_GETADDR, bytes(8), "=BBBBi"
ROUTES = RTM_GETROUTE, bytes([0, 0, 0, 0, RT_TABLE_MAIN, 0, 0, 0, 0, 0, 0, 0]), "=BBBBBBBBI"
MEMORY = 4096  # addresses


def surroundings() -> Surroundings:
    """What this namespace has that forwarding depends on."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        # So that the kernel leaves out the routes that are in other tables, which are most.
        netlink.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
        names = dict(socket.if_nameindex())
        addresses: dict[int, list[tuple[str, InterfaceAddress]]] = {}
        for index, address in addresses_of(_dumped(netlink, *ADDRESSES)):
            addresses.setdefault(index, []).append(address)
        routes = sorted(default_routes(_dumped(netlink, *ROUTES)))
    links = (
        Link(name, tuple(address for _, address in sorted(addresses.get(index, ()))))
        for name, index in sorted((name, index) for index, name in names.items())
    )
    default = next((names[index] for *_, index in routes if index in names), None)
    return Surroundings(tuple(links), default)


def _dumped(netlink: socket.socket, kind: int, body: bytes, layout: str) -> list[Answer]:
    return ask(netlink, kind, NLM_F_DUMP, body, layout)


def advised_links() -> list[str]:
    """The links over which default routes lead that a router has advertised."""
    found: set[int] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for header, attributes in _dumped(netlink, *ROUTES):
            family, length, _, _, _, protocol, _, _, _ = header
            if (family, length, protocol) == (socket.AF_INET6, 0, RTPROT_RA):
                hop = attributes.get(RTA_OIF) or attributes.get(RTA_MULTIPATH, b"")[4:8]
                found |= {number(hop)} if hop else set()
    names = dict(socket.if_nameindex())
    return sorted(names[index] for index in found if index in names)


def addresses_of(answers: Iterable[Answer]) -> Iterator[tuple[int, tuple[str, InterfaceAddress]]]:
    """Each with the number of its link."""
    for header, attributes in answers:
        family, prefix, _, _, index = header
        raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
        if raw is not None and len(raw) == SIZES.get(family) and prefix <= 8 * len(raw):
            yield index, _address(raw, prefix)


@lru_cache(MEMORY)
def _address(raw: bytes, prefix: int) -> tuple[str, InterfaceAddress]:
    """With its text, by which they are sorted. Most namespaces have the same few, and have them
    again at the next look."""
    made = IPv4Interface((raw, prefix)) if len(raw) == 4 else IPv6Interface((raw, prefix))
    return str(made), made


def default_routes(answers: Iterable[Answer]) -> Iterator[tuple[int, int, int]]:
    """Family, metric and link of each; IPv4 and the lowest metric sort first."""
    for header, attributes in answers:
        family, length, _, _, table, _, _, kind, _ = header
        if length or table != RT_TABLE_MAIN or kind != RTN_UNICAST:
            continue
        hop = attributes.get(RTA_OIF) or attributes.get(RTA_MULTIPATH, b"")[4:8]
        if hop:
            yield family, number(attributes.get(RTA_PRIORITY, b"\0\0\0\0")), number(hop)
