"""Links, addresses and the default route of the namespace this thread is in.

Three dumps over one socket. pyroute2 can do this too, for 250 ms and 24 MiB at its import.
"""

import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Interface, IPv6Interface

from rules.model import InterfaceAddress, Link, Surroundings

NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_DUMP, NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE = 18, 22, 26
IFLA_IFNAME = 3
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_OIF, RTA_PRIORITY, RTA_MULTIPATH = 4, 6, 9
RT_TABLE_MAIN, RTN_UNICAST = 254, 1
INTERRUPTED_DUMPS = 10

Attributes = dict[int, bytes]


def surroundings() -> Surroundings:
    """What this namespace has that forwarding depends on."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.bind((0, 0))
        names = dict(_links(netlink))
        addresses: dict[int, list[InterfaceAddress]] = {}
        for index, address in _addresses(netlink):
            addresses.setdefault(index, []).append(address)
        routes = sorted(_default_routes(netlink))
    links = (Link(name, tuple(sorted(addresses.get(i, ()), key=str))) for i, name in names.items())
    default = next((names[index] for *_, index in routes if index in names), None)
    return Surroundings(tuple(sorted(links, key=lambda link: link.name)), default)


def _links(netlink: socket.socket) -> Iterator[tuple[int, str]]:
    for header, attributes in _dump(netlink, RTM_GETLINK, "=BxHiII"):
        yield header[2], attributes[IFLA_IFNAME].rstrip(b"\0").decode(errors="surrogateescape")


def _addresses(netlink: socket.socket) -> Iterator[tuple[int, InterfaceAddress]]:
    for header, attributes in _dump(netlink, RTM_GETADDR, "=BBBBi"):
        family, prefix, _, _, index = header
        raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
        if raw is None:
            continue
        if family == socket.AF_INET:
            yield index, IPv4Interface((raw, prefix))
        elif family == socket.AF_INET6:
            yield index, IPv6Interface((raw, prefix))


def _default_routes(netlink: socket.socket) -> Iterator[tuple[int, int, int]]:
    """Family, metric and link of each; IPv4 and the lowest metric sort first."""
    for header, attributes in _dump(netlink, RTM_GETROUTE, "=BBBBBBBBI"):
        family, length, _, _, table, _, _, kind, _ = header
        if length or table != RT_TABLE_MAIN or kind != RTN_UNICAST:
            continue
        hop = attributes.get(RTA_OIF) or attributes.get(RTA_MULTIPATH, b"")[4:8]
        if hop:
            yield family, _number(attributes.get(RTA_PRIORITY, b"\0\0\0\0")), _number(hop)


def _number(raw: bytes) -> int:
    return int(struct.unpack("=I", raw)[0])


def _dump(
    netlink: socket.socket, kind: int, layout: str
) -> list[tuple[tuple[int, ...], Attributes]]:
    answers: list[tuple[tuple[int, ...], Attributes]] = []
    for _ in range(INTERRUPTED_DUMPS):
        header = struct.pack("=IHHII", 16 + 16, kind, NLM_F_REQUEST | NLM_F_DUMP, 1, 0)
        netlink.send(header + bytes(16))
        answers, whole = _receive(netlink, layout)
        if whole:
            break
    return answers


def _receive(
    netlink: socket.socket, layout: str
) -> tuple[list[tuple[tuple[int, ...], Attributes]], bool]:
    """The answers to a dump, and whether nothing changed while it was taken."""
    answers: list[tuple[tuple[int, ...], Attributes]] = []
    whole = True
    while True:
        data = memoryview(netlink.recv(1 << 18))
        while data:
            length, kind, flags = struct.unpack_from("=IHH", data)
            whole = whole and not flags & NLM_F_DUMP_INTR
            if kind == NLMSG_DONE:
                return answers, whole
            if kind == NLMSG_ERROR:
                number = -struct.unpack_from("=i", data, 16)[0]
                raise OSError(number, os.strerror(number))
            body = data[16:length]
            size = struct.calcsize(layout)
            answers.append((struct.unpack_from(layout, body), _attributes(body[size:])))
            data = data[(length + 3) & ~3 :]


def _attributes(data: memoryview) -> Attributes:
    found: Attributes = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = bytes(data[4:length])
        data = data[(length + 3) & ~3 :]
    return found
