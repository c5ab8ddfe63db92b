"""Questions to the kernel over a netlink socket, and their answers taken apart."""

import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_MULTI, NLM_F_ACK = 0x1, 0x2, 0x4
NLM_F_DUMP_INTR, NLM_F_DUMP = 0x10, 0x300
NLA_F_NESTED = 0x8000
HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
SO_SNDBUFFORCE = 32
ROOM = 1 << 16  # bytes that a socket sends at once without being told to, and the kernel at most
RETRIES = 10  # of a dump during which something changed
MOST_CODES = 4095  # of errors

Attributes = dict[int, bytes]
Answer = tuple[tuple[int, ...], Attributes]
Picked = TypeVar("Picked")


def ask(netlink: socket.socket, kind: int, flags: int, body: bytes, layout: str) -> list[Answer]:
    """The answers to one question, each as its fixed part (of that layout) and its attributes."""
    return picked(netlink, kind, flags, body, layout, lambda answer: answer)


def picked(  # noqa: PLR0913, PLR0917 - a question, and what to make of its answers
    netlink: socket.socket,
    kind: int,
    flags: int,
    body: bytes,
    layout: str,
    pick: Callable[[Answer], Picked | None],
) -> list[Picked]:
    """What is made of each answer as it comes, unless that is None: of hundreds of thousands, few
    may be of interest. A dump during which something changed may lack what was there all the time,
    and is never taken for a whole one."""
    alone = not flags & (NLM_F_DUMP | NLM_F_ACK)
    for _ in range(RETRIES):
        size = HEADER.size + len(body)
        netlink.send(HEADER.pack(size, kind, NLM_F_REQUEST | flags, 1, 0) + body)
        found, whole = _receive(netlink, struct.Struct(layout), pick, alone=alone)
        if whole:
            return found
    raise OSError(errno.EINTR, f"something changed during each of {RETRIES} tries")


def transact(netlink: socket.socket, batch: bytes) -> list[tuple[int, bytes]]:
    """Send a batch whose last message is to be acknowledged; all of it is done, or nothing. What
    the kernel echoes, by kind.

    The kernel has said everything when the sending is done. Where it refuses, it answers several
    messages: none of that may be left for whoever asks next.
    """
    if len(batch) > ROOM:
        _make_room(netlink, 2 * len(batch))
    netlink.send(batch)
    answers = list(_answered(netlink))
    codes = [_code(body) for kind, body in answers if kind == NLMSG_ERROR]
    refused = [code for code in codes if code] or ([] if codes else [errno.ENOMSG])
    if refused:
        raise OSError(refused[0], os.strerror(refused[0]))
    return [(kind, body) for kind, body in answers if kind != NLMSG_ERROR]


def _make_room(netlink: socket.socket, size: int) -> None:
    try:
        netlink.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size)
    except PermissionError:
        netlink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def _answered(netlink: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Each message that there is."""
    while True:
        try:
            data = _heard(netlink, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            yield NLMSG_ERROR, struct.pack("=i", -errno.ENOBUFS)  # more than there is room to tell
            continue
        for kind, _, body in messages(data):
            yield kind, body


def _heard(netlink: socket.socket, flags: int = 0) -> bytes:
    """What the kernel says next. Whoever may administer a namespace, as root of a container may,
    can send to the sockets that we have there: nothing of that is listened to."""
    while True:
        data, sender = netlink.recvfrom(ROOM, flags)
        if sender[0] == 0:
            return data


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, flags and body of each message that came in one piece."""
    start = 0
    while start < len(data):
        if len(data) - start < HEADER.size:
            raise _nonsense()
        length, kind, flags, _, _ = HEADER.unpack_from(data, start)
        if not HEADER.size <= length <= len(data) - start:
            raise _nonsense()
        yield kind, flags, data[start + HEADER.size : start + length]
        start += (length + 3) & ~3


def _nonsense() -> OSError:
    return OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def _code(body: bytes) -> int:
    """The error in a message that tells of one; 0: there was none."""
    if len(body) < 4:
        raise _nonsense()
    return min(max(-int(struct.unpack_from("=i", body)[0]), 0), MOST_CODES)


def number(raw: bytes) -> int:
    """A 32-bit number in the byte order of this machine."""
    return int.from_bytes(raw[:4], sys.byteorder)


def _receive(
    netlink: socket.socket,
    layout: struct.Struct,
    pick: Callable[[Answer], Picked | None],
    *,
    alone: bool,
) -> tuple[list[Picked], bool]:
    """What is picked of the answers, and whether nothing changed while a dump was taken. The kernel
    goes on with a dump when we ask for more: however slow we are, nothing is lost. Of an answer
    that comes alone, conntrack says that it is one of many, and never that it was the last."""
    found: list[Picked] = []
    whole = True
    while True:
        answers, ended, undisturbed = taken(_heard(netlink), layout)
        found += [one for answer in answers if (one := pick(answer)) is not None]
        whole = whole and undisturbed
        if ended or (alone and answers):
            return found, whole


def taken(data: bytes, layout: struct.Struct) -> tuple[list[Answer], bool, bool]:
    """The answers that came in one piece, whether they are the last, and whether nothing changed
    meanwhile."""
    answers: list[Answer] = []
    whole = True
    for kind, flags, body in messages(data):
        whole = whole and not flags & NLM_F_DUMP_INTR
        if kind in (NLMSG_DONE, NLMSG_ERROR):
            code = _code(body) if kind == NLMSG_ERROR or len(body) >= 4 else 0
            if code:  # a dump that failed half-way, or that nobody is there to make
                raise OSError(code, os.strerror(code))
            return answers, True, whole
        if len(body) < layout.size:
            raise _nonsense()
        answers.append((layout.unpack_from(body), attributes(body[layout.size :])))
        if not flags & NLM_F_MULTI:
            return answers, True, whole
    return answers, False, whole


def attribute(kind: int, value: bytes, *, nested: bool = False) -> bytes:
    """One attribute, padded as the next one needs it."""
    kind |= NLA_F_NESTED if nested else 0
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: memoryview | bytes) -> Attributes:
    """The attributes of a message or of another attribute, by their kind."""
    found: Attributes = {}
    raw, start = bytes(data), 0
    while start <= len(raw) - ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(raw, start)
        if not ATTRIBUTE.size <= length <= len(raw) - start:
            break  # nonsense, which might never end
        found[kind & 0x3FFF] = raw[start + ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3
    return found
