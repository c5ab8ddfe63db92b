"""Packets for the datapath tests: many ports at once, pings, and flows that are watched while
something changes. Everything here runs in one thread, and every wait has an end."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import select
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from agent.kernel.netns import inside, opened
from agent.kernel.probe import KINDS
from rules.model import Address, Family, Protocol
from tests.spaces import eventually

PATIENCE = 5.0
BATCH = 100  # flows under way at once: fewer than a listening socket or a buffer can hold

AF = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
ANY = {Family.IP: "0.0.0.0", Family.IP6: "::"}


def sockets(
    where: str, family: Family, kind: socket.SocketKind, count: int, protocol: int = 0
) -> list[socket.socket]:
    """Sockets that live in that namespace."""
    made: list[socket.socket] = []
    with opened(where) as descriptor, inside(descriptor, where):
        try:
            for _ in range(count):
                made.append(socket.socket(AF[family], kind, protocol))  # noqa: PERF401 - see below
        except OSError:  # what was made until then is not to be lost
            for one in made:
                one.close()
            raise
    for one in made:
        one.settimeout(PATIENCE)
    return made


def allow_descriptors(count: int) -> None:
    """Raise the limit of this process where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(count, hard)))
    except (OSError, ValueError):
        pytest.skip(f"needs {count} descriptors, and this process may have {hard} at the most")


@contextmanager
def listening(
    where: str, family: Family, protocol: Protocol, ports: Sequence[int]
) -> Iterator[dict[int, socket.socket]]:
    """A real server socket on each of the ports."""
    allow_descriptors(len(ports) + 4 * BATCH + 200)
    with ExitStack() as stack:
        servers = sockets(where, family, KINDS[protocol], len(ports))
        for one in servers:
            stack.callback(one.close)
        for one, port in zip(servers, ports, strict=True):
            _serve(one, family, protocol, port)
        yield dict(zip(ports, servers, strict=True))


def _serve(server: socket.socket, family: Family, protocol: Protocol, port: int) -> None:
    if family is Family.IP6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    assert eventually(lambda: _is_bound(server, ANY[family], port)), f"{port} is taken"
    if protocol is Protocol.TCP:
        server.listen(8)


def _is_bound(server: socket.socket, address: str, port: int) -> bool:
    """A process that is just being started has what we had open for a moment longer."""
    try:
        server.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


@dataclass(frozen=True)
class Seen:
    """What came of an attempt: the port that answered, and whom its server saw asking."""

    port: int
    client: str


def probed(
    where: str, to: Address, protocol: Protocol, servers: dict[int, socket.socket]
) -> dict[int, Seen | None]:
    """Ask the port of every server at that address; None for a port that refused."""
    answers: dict[int, Seen | None] = {}
    ports = list(servers)
    for start in range(0, len(ports), BATCH):
        batch = ports[start : start + BATCH]
        if protocol is Protocol.TCP:
            answers |= _tcp(where, to, batch, servers)
        else:
            answers |= _udp(where, to, batch, servers)
    return answers


def _tcp(
    where: str, to: Address, ports: Sequence[int], servers: dict[int, socket.socket]
) -> dict[int, Seen | None]:
    answers: dict[int, Seen | None] = {}
    with ExitStack() as stack:
        clients = sockets(where, Family.of(to), socket.SOCK_STREAM, len(ports))
        for client in clients:
            stack.callback(client.close)
        for client, port in zip(clients, ports, strict=True):
            try:
                client.connect((str(to), port))
            except ConnectionRefusedError:
                answers[port] = None
                continue
            connection, peer = servers[port].accept()  # times out where another was reached
            with connection:
                connection.sendall(b"%d" % connection.getsockname()[1])
                answers[port] = Seen(int(client.recv(16)), peer[0])
    return answers


def _udp(
    where: str, to: Address, ports: Sequence[int], servers: dict[int, socket.socket]
) -> dict[int, Seen | None]:
    answers: dict[int, Seen | None] = {}
    with ExitStack() as stack:
        clients = sockets(where, Family.of(to), socket.SOCK_DGRAM, len(ports))
        for client in clients:
            stack.callback(client.close)
        for client, port in zip(clients, ports, strict=True):
            client.connect((str(to), port))
            client.send(b"%d" % port)
        for client, port in zip(clients, ports, strict=True):
            if _refused(client) or not _arrived(servers[port]):
                answers[port] = None
                continue
            said, peer = servers[port].recvfrom(16)
            assert said == b"%d" % port
            servers[port].sendto(b"%d" % servers[port].getsockname()[1], peer)
            answers[port] = Seen(int(client.recv(16)), peer[0])
    return answers


def _refused(client: socket.socket) -> bool:
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def _arrived(server: socket.socket) -> bool:
    """Over a veth a datagram is there as soon as it is sent; a refusal may be held back, since the
    kernel sends only so many a second."""
    waiting = select.poll()  # select knows no descriptor above 1023
    waiting.register(server, select.POLLIN)
    return bool(waiting.poll(200))


_identifiers = itertools.count(os.getpid())


def pinged(where: str, to: Address, tries: int = 3) -> int | None:
    """The hops an answer to a ping had left; None where none came. Each has an identifier of its
    own: with the same one it would belong to the flow of the one before, which may be flushed."""
    family = Family.of(to)
    version6 = family is Family.IP6
    protocol = socket.IPPROTO_ICMPV6 if version6 else socket.IPPROTO_ICMP
    (raw,) = sockets(where, family, socket.SOCK_RAW, 1, protocol)
    identifier = next(_identifiers) & 0xFFFF
    with raw:
        raw.settimeout(1.0)
        if version6:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
        for sequence in range(tries):
            request, reply = (128, 129) if version6 else (8, 0)
            head = struct.pack("!BBHHH", request, 0, 0, identifier, sequence)
            if not version6:
                head = struct.pack("!BBH", request, 0, _checksum(head)) + head[4:]
            raw.sendto(head, (str(to), 0))
            for _ in range(10):  # other messages may come in between
                try:
                    data, extra, *_ = raw.recvmsg(512, 64)
                except TimeoutError:
                    break
                body = data if version6 else data[20:]
                if body[0] == reply and body[4:8] == head[4:8]:
                    return int.from_bytes(extra[0][2], sys.byteorder) if version6 else int(data[8])
    return None


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    return int(~(total + (total >> 16)) & 0xFFFF)


@contextmanager
def echo(where: str, flows: Iterable[tuple[Family, Protocol, int]]) -> Iterator[Echo]:
    """Servers in that namespace that say back what they hear."""
    with ExitStack() as stack:
        server = Echo(stack)
        for family, protocol, port in flows:
            server.listen(where, family, protocol, port)
        yield server


class Echo:
    """Answers when told to: `turn` handles all that has come."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._poll = select.epoll()
        stack.callback(self._poll.close)
        self._served: dict[int, tuple[socket.socket, str]] = {}
        self.peers: list[str] = []

    def listen(self, where: str, family: Family, protocol: Protocol, port: int) -> None:
        (server,) = sockets(where, family, KINDS[protocol], 1)
        self._stack.callback(server.close)
        _serve(server, family, protocol, port)
        self._add(server, "accept" if protocol is Protocol.TCP else "datagram")

    def _add(self, one: socket.socket, what: str) -> None:
        one.setblocking(False)
        self._served[one.fileno()] = one, what
        self._poll.register(one, select.EPOLLIN)

    def turn(self, wait: float = PATIENCE) -> None:
        """Handle what is there, or what comes first."""
        for number, _ in self._poll.poll(wait):
            one, what = self._served[number]
            if what == "accept":
                connection, peer = one.accept()
                self._stack.callback(connection.close)
                self.peers.append(peer[0])
                self._add(connection, "stream")
            elif what == "datagram":
                data, peer = one.recvfrom(65536)
                self.peers.append(peer[0])
                one.sendto(data, peer)
            elif data := one.recv(65536):
                one.sendall(data)
            else:
                self._poll.unregister(one)
