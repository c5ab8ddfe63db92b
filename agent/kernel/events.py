"""What the kernel says of its own accord about this namespace and all others that have a number
here: that rules were committed (and by whom), that links, addresses or default routes changed, that
a namespace is gone.

Two sockets for however many namespaces, and they keep none of them alive. All of it is a reason to
look sooner, never the only one: whoever looks finds the same without having been told.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

from agent.errors import Failure, NotPermitted
from agent.kernel.netlink import HEADER, NLM_F_ACK, Answer, ask, attribute, attributes
from rules.problems import printable
from rules.values import Value

NETLINK_NETFILTER = 12
SOL_NETLINK, ADD_MEMBERSHIP, LISTEN_ALL_NSID = 270, 1, 8
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33

NFNLGRP_NFTABLES = 7
NEWGEN = (10 << 8) | 15  # of the subsystem nftables
GEN_ID, GEN_PROC_PID, GEN_PROC_NAME = 1, 2, 3

# Links, IPv4 and IPv6 addresses, routes and settings, numbers of namespaces.
ROUTE_GROUPS = (1, 5, 9, 7, 11, 24, 25, 28)
NEWROUTE, DELROUTE = 24, 25
# NEW and DEL of LINK, ADDR and ROUTE, and NEW of NETCONF: forwarding was turned on or off.
RELINKING = frozenset((16, 17, 20, 21, NEWROUTE, DELROUTE, 80))
NEWNSID, DELNSID, GETNSID = 88, 89, 90
NETNSA_NSID, NETNSA_FD = 1, 3
ANY_NUMBER = struct.pack("=i", -1)
NSID_BODY = "=B3x"

# Classic BPF over a message: its type is the half-word at 4, the length of a route's destination
# the byte at 17. Half-words are loaded as of the network, a type is in the order of this machine.
LOAD_TYPE, LOAD_LENGTH = (0x28, 0, 0, 4), (0x30, 0, 0, 17)
TAKE, DROP = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
IF_EQUAL = 0x15  # with how many instructions to skip if it is, and if it is not

# A commit sends a message for each rule, but the generation comes in one of its own.
ONLY_GENERATIONS = (LOAD_TYPE, (IF_EQUAL, 0, 1, socket.htons(NEWGEN)), TAKE, DROP)
NO_ROUTES_BUT_DEFAULT = (
    LOAD_TYPE,
    (IF_EQUAL, 1, 0, socket.htons(NEWROUTE)),
    (IF_EQUAL, 0, 2, socket.htons(DELROUTE)),
    LOAD_LENGTH,
    (IF_EQUAL, 0, 1, 0),
    TAKE,
    DROP,
)


class Moved(Value):
    """Rules were committed in a namespace (None: in ours), which made this generation of them."""

    nsid: int | None
    generation: int
    pid: int  # as the initial pid namespace has it
    process: str


class Relinked(Value):
    """Links, addresses, default routes or settings of a namespace (None: of ours) have changed."""

    nsid: int | None


class Gone(Value):
    """The namespace that had this number is no more. The next one may have it by now: ask again."""

    nsid: int


class Lost(Value):
    """More happened than there was room for: look at everything."""


Event = Moved | Relinked | Gone | Lost
Message = tuple[int | None, int, bytes]  # the number of its namespace, its type, its body


class Events:
    """Made in the namespace that the numbers shall be of; read from wherever one is."""

    def __init__(self, room: int = 1 << 20, most: int = 5_000) -> None:
        """Room in bytes for what is not read yet, and how many messages of a socket to read at
        most at once."""
        self._asking = threading.Lock()  # several threads open namespaces
        with contextlib.ExitStack() as stack:
            self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, self._home)
            tables = stack.enter_context(_socket(NETLINK_NETFILTER))
            links = stack.enter_context(_socket(socket.NETLINK_ROUTE))
            self._questions = stack.enter_context(_socket(socket.NETLINK_ROUTE))
            self._tables, self._links = _Listener(tables, most), _Listener(links, most)
            _listen(tables, (NFNLGRP_NFTABLES,), ONLY_GENERATIONS, room)
            _listen(links, ROUTE_GROUPS, NO_ROUTES_BUT_DEFAULT, room)
            self._own = self._numbered(self._home)
            self._descriptors = stack.pop_all()

    def filenos(self) -> tuple[int, int]:
        return self._tables.netlink.fileno(), self._links.netlink.fileno()

    def read(self) -> list[Event]:
        """What was said up to now, or a good part of it; nothing is waited for."""
        tables, links = self._tables.drain(), self._links.drain()
        lost = self._tables.lost or self._links.lost
        if lost or any(kind == NEWNSID for _, kind, _ in links):
            self._own = self._numbered(self._home)  # somebody may have given us a number, too
        moved = (moving(self._seen(nsid), body) for nsid, kind, body in tables if kind == NEWGEN)
        # Other namespaces number their neighbours, too: that is none of ours.
        ours = (body for nsid, kind, body in links if kind == DELNSID and self._seen(nsid) is None)
        relinked = dict.fromkeys(self._seen(nsid) for nsid, kind, _ in links if kind in RELINKING)
        found = (Lost() if lost else None, *map(going, ours), *moved, *map(Relinked, relinked))
        return [event for event in found if event is not None]

    def nsid(self, descriptor: int) -> int | None:
        """The number of that namespace, given to it if it has none: without one, nothing is heard
        of it. None: it is the one that we were made in."""
        if os.path.sameopenfile(descriptor, self._home):
            return None
        if (number := self._numbered(descriptor)) is not None:
            return number
        body = bytes(4) + attribute(NETNSA_NSID, ANY_NUMBER) + _by(descriptor)
        try:
            self._asked(NEWNSID, NLM_F_ACK, body)
        except FileExistsError:  # somebody else was faster
            pass
        except PermissionError as error:
            raise _lacking("CAP_NET_ADMIN") from error
        if (number := self._numbered(descriptor)) is None:
            raise Failure("the kernel gave a namespace no number")
        return number

    def close(self) -> None:
        self._descriptors.close()

    def _numbered(self, descriptor: int) -> int | None:
        answers = self._asked(GETNSID, 0, bytes(4) + _by(descriptor))
        found = answers[0][1].get(NETNSA_NSID, ANY_NUMBER)
        return None if found == ANY_NUMBER else int.from_bytes(found, sys.byteorder)

    def _asked(self, kind: int, flags: int, body: bytes) -> list[Answer]:
        with self._asking:
            return ask(self._questions, kind, flags, body, NSID_BODY)

    def _seen(self, nsid: int | None) -> int | None:
        """Kernels without 88b126b39f97 (of May 2026) tell our own number, if we have one."""
        return None if nsid == self._own else nsid


class _Listener:
    """A socket that the kernel speaks to, and whether it had to leave something out."""

    def __init__(self, netlink: socket.socket, most: int) -> None:
        self.netlink, self.lost = netlink, False
        self._most, self._congested = most, False
        self._buffer = memoryview(bytearray(1 << 16))

    def drain(self) -> list[Message]:
        """Once the kernel has found no room it leaves out everything until we have read all there
        is, and says so only once: until then, whatever was looked at may have changed since."""
        messages: list[Message] = []
        self.lost = self._congested
        for _ in range(self._most):
            try:
                messages += self._receive()
            except BlockingIOError:
                self._congested = False
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self.lost = self._congested = True
        return messages

    def _receive(self) -> list[Message]:
        size, ancillary, _, sender = self.netlink.recvmsg_into([self._buffer], socket.CMSG_SPACE(4))
        if sender[0] != 0:  # not the kernel: root of some container
            return []
        nsid = origin(ancillary)
        return [(nsid, kind, body) for kind, body in messages(self._buffer[:size])]


def origin(ancillary: Iterable[tuple[int, int, bytes]]) -> int | None:
    """The number of the namespace that a message is from; None: ours, for which kernels without
    70f8592ee905 (of May 2026) may say -1."""
    for level, kind, data in ancillary:
        if (level, kind) == (SOL_NETLINK, LISTEN_ALL_NSID):
            number = int.from_bytes(data, sys.byteorder, signed=True)
            return number if number >= 0 else None
    return None


def messages(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """The types and bodies of what came in one piece, up to the first that makes no sense."""
    while len(data) >= HEADER.size:
        length, kind, *_ = HEADER.unpack_from(data)
        if length < HEADER.size:
            return
        yield kind, bytes(data[HEADER.size : length])
        data = data[(length + 3) & ~3 :]


def moving(nsid: int | None, body: bytes) -> Moved | None:
    """What a new generation tells, if it makes sense."""
    found = attributes(memoryview(body)[4:])
    if not {GEN_ID, GEN_PROC_PID, GEN_PROC_NAME} <= found.keys():
        return None
    generation, pid = (int.from_bytes(found[key], "big") for key in (GEN_ID, GEN_PROC_PID))
    name = found[GEN_PROC_NAME].split(b"\0")[0].decode(errors="replace")
    return Moved(nsid, generation, pid, printable(name, 64))


def going(body: bytes) -> Gone | None:
    """What the end of a number tells, if it makes sense."""
    number = attributes(memoryview(body)[4:]).get(NETNSA_NSID)
    return None if number is None else Gone(int.from_bytes(number, sys.byteorder))


def _socket(protocol: int) -> socket.socket:
    try:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    except OSError as error:
        raise Failure(f"cannot talk to the kernel over netlink: {error.strerror}") from error


def _listen(
    netlink: socket.socket, groups: Sequence[int], program: Sequence[tuple[int, ...]], room: int
) -> None:
    """The filter comes first: it would not take away what is in the queue already."""
    netlink.setblocking(False)
    netlink.bind((0, 0))
    try:
        netlink.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, room)
    except PermissionError:
        netlink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    attached = struct.pack("@HP", len(program), ctypes.addressof(code))
    netlink.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)
    _set(netlink, LISTEN_ALL_NSID, 1, "CAP_NET_BROADCAST")
    for group in groups:
        _set(netlink, ADD_MEMBERSHIP, group, "CAP_NET_ADMIN")


def _set(netlink: socket.socket, option: int, value: int, capability: str) -> None:
    try:
        netlink.setsockopt(SOL_NETLINK, option, value)
    except PermissionError as error:
        raise _lacking(capability) from error


def _lacking(capability: str) -> NotPermitted:
    return NotPermitted(
        "may not listen to what the kernel says of other namespaces",
        f"Run as root, or with {capability}",
    )


def _by(descriptor: int) -> bytes:
    return attribute(NETNSA_FD, struct.pack("=i", descriptor))
