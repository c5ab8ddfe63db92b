"""The sockets that listen in the namespace this thread is in, the processes that have them, and the
ports that the kernel gives to who asks for none."""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from agent.errors import BackendMissing
from agent.kernel import sysctl
from agent.kernel.netlink import NLM_F_DUMP, Answer, ask
from rules.model import Address, Family, Protocol
from rules.occupied import Listener
from rules.ports import LOWEST, PortRange
from rules.problems import printable
from rules.values import replace

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
INET_DIAG_SKV6ONLY, INET_DIAG_LOCALS = 11, 12
LISTENING, UNCONNECTED = 1 << 10, 1 << 7  # states, as bits: TCP_LISTEN, and TCP_CLOSE for UDP
NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
VERSIONS = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
REQUEST = struct.Struct("=BBBBI48s")  # family, protocol, extensions, states, any socket
MESSAGE = "=BBBBHH4I4I8I"  # its family first, port and address of its own, its inode last
STORAGE = struct.Struct("=HH4s16s104x")  # family, port and address in a list, of either family
RANGE, RESERVED = "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"
LONGEST_NAME = 64
READ = 500_000  # descriptors looked at for their processes; what is not found then has no name

Place = tuple[Protocol, Family, Address | None, int]


def listeners() -> tuple[Listener, ...]:
    """One for each protocol, address and port, however many sockets share them; a socket of both
    families is one in each."""
    found: dict[Place, Listener] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        for protocol in Protocol:
            for family in Family:
                for answer in _asked(netlink, protocol, family):
                    for one in heard(protocol, answer):
                        place = (one.protocol, one.family, one.address, one.port)
                        found.setdefault(place, one)
    return tuple(sorted(found.values(), key=_order))


def _order(one: Listener) -> tuple[str, int, str, int]:
    address = -1 if one.address is None else int(one.address)
    return one.protocol.value, one.port, one.family.value, address


def _asked(netlink: socket.socket, protocol: Protocol, family: Family) -> list[Answer]:
    states = UNCONNECTED if protocol is Protocol.UDP else LISTENING
    number = NUMBERS[protocol]
    question = REQUEST.pack(VERSIONS[family], number, 0, 0, states, bytes(48))
    try:
        return ask(netlink, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, question, MESSAGE)
    except FileNotFoundError as error:
        if protocol is Protocol.SCTP:
            return []  # most kernels have none until somebody uses it
        raise BackendMissing(
            f"this kernel does not tell its {protocol.value} sockets",
            f"It needs the module {protocol.value}_diag",
        ) from error


def heard(protocol: Protocol, answer: Answer) -> Iterator[Listener]:
    header, attributes = answer
    port = socket.ntohs(header[4])
    both = not any(attributes.get(INET_DIAG_SKV6ONLY, b""))
    places = _listed(attributes.get(INET_DIAG_LOCALS, b"")) or {
        _place(header[0], struct.pack("=4I", *header[6:10]))
    }
    for family, address in places if port else ():
        wide = both and family is Family.IP6 and address is None
        for each in Family if wide else (family,):
            yield Listener(
                protocol=protocol, family=each, address=address, port=port, inode=header[-1]
            )


def _listed(raw: bytes) -> set[tuple[Family, Address | None]]:
    """The addresses of a socket that can have several."""
    whole = raw[: len(raw) - len(raw) % STORAGE.size]
    return {
        _place(family, four if family == socket.AF_INET else sixteen)
        for family, _, four, sixteen in STORAGE.iter_unpack(whole)
    }


def _place(family: int, raw: bytes) -> tuple[Family, Address | None]:
    """A family and an address of it; None: any."""
    if family == socket.AF_INET:
        return Family.IP, IPv4Address(raw[:4]) if any(raw[:4]) else None
    address = IPv6Address(raw)
    if address.ipv4_mapped is not None:
        return _place(socket.AF_INET, address.ipv4_mapped.packed)
    return Family.IP6, address if int(address) else None


def named(unnamed: Iterable[Listener]) -> tuple[Listener, ...]:
    """The same with pid and program, where a process can be found that has the socket."""
    wanted = tuple(unnamed)
    holders = _holders({one.inode for one in wanted if one.inode})
    return tuple(
        replace(one, pid=holders[one.inode], program=_program(holders[one.inode]))
        if one.inode in holders
        else one
        for one in wanted
    )


def _holders(inodes: set[int]) -> dict[int, int]:
    """The first process that has each; what systemd listens on for others is theirs, once they
    run."""
    links = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    left = READ
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    for pid in sorted(pids, key=lambda pid: (pid == 1, pid)):
        if not links or left <= 0:
            break
        for link in _descriptors(pid):
            left -= 1
            if link in links:
                found[links.pop(link)] = pid
    return found


def _descriptors(pid: int) -> Iterator[str]:
    """What the descriptors of a process lead to, as long as it is there and can be asked."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - as strings: there are thousands
            with suppress(OSError):
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115


def _program(pid: int) -> str:
    """Its name, which may be anything."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n")
        return printable(name.decode(errors="replace"), LONGEST_NAME)
    return ""


def ephemeral() -> PortRange | None:
    """The ports that the kernel gives to who asks for none."""
    with suppress(ValueError):
        first, last = map(int, sysctl.read([RANGE]).get(RANGE, "").split())
        return PortRange(max(first, LOWEST), last)
    return None


def reserved() -> tuple[PortRange, ...]:
    """The ports of these that it does not give."""
    pairs = [part.partition("-") for part in sysctl.read([RESERVED]).get(RESERVED, "").split(",")]
    ends = [(int(first), int(last or first)) for first, _, last in pairs if first]
    return tuple(PortRange(max(first, LOWEST), last) for first, last in ends if last >= LOWEST)
