"""Forgets flows that the kernel tracks in the namespace this thread is in, with sockets of its own:
one of them may be left in the middle of an answer."""

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from agent.kernel.conntrack import (
    CT_DELETE,
    CT_GET,
    CT_NEW,
    CTA_ID,
    CTA_IP_DST,
    CTA_IP_SRC,
    CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_STATUS,
    CTA_TIMEOUT,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    CTA_ZONE,
    FAMILIES,
    HEADER,
    NETLINK_NETFILTER,
    VERSIONS,
    counted,
    flow_of,
    nested,
    port_of,
)
from agent.kernel.netlink import (
    NLM_F_ACK,
    NLM_F_DUMP,
    Answer,
    Attributes,
    ask,
    attribute,
    attributes,
    picked,
)
from rules.model import Address, Family
from rules.sieve import Question, Sieve, Signs, questions_of, signs_of
from rules.stale import Displaced, Due, Forgotten
from rules.values import Value

LASTING = 1 << 3 | 1 << 10  # confirmed, as what is written always is, and with a fixed timeout
MOST_SOUGHT = 16  # addresses, from which on a closer look takes less
MOST_AT_ONCE = 20_000  # flows in one pass, which bounds its memory and its time: 0.07 ms for each
# Flows that are told in about the time that a walk takes: 20 ms.
WORTH_A_WALK = 4000
EVERYTHING = bytes(4)
CTA_FILTER, CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS = 25, 1, 2  # since Linux 5.8
FILTER_SRC, FILTER_DST, FILTER_PROTO = 1 << 0, 1 << 1, 1 << 3
REFUSED = (errno.EOPNOTSUPP, errno.EINVAL)
ATTEMPTS = 5  # to be faster than a guest that never rests
CREATE = 0x600  # NLM_F_CREATE and NLM_F_EXCL
BARRED = 600  # seconds
_BEFORE = struct.calcsize(HEADER)  # of the attributes in a key


class Found(Value):
    """A flow that is to be forgotten: by what to find it again, and who answers it."""

    key: bytes
    reply: bytes
    shuts: bool  # whether nobody has its port now
    displaced: bool  # whether it would come to be again, while another still has its port


class _Enough(Exception):
    """As many were found as one pass is for."""


def forget(due: Sequence[Due], own: Set[Address], most: int = MOST_AT_ONCE) -> int:
    """Forget these flows of a namespace with these addresses; returns how many there were."""
    total, more = 0, True
    while more:
        found, more = find(due, own, most)
        count = delete(found)
        total += count
        more = more and count > 0  # what ends by itself is no reason to go on
    return total


def find(
    due: Sequence[Due], own: Set[Address], most: int = MOST_AT_ONCE, worth: int = WORTH_A_WALK
) -> tuple[list[Found], bool]:
    """As many of these flows as one pass is for, and whether there may be more. Of all flows, only
    what it takes to delete some is kept. Where there are many flows for each walk that it takes,
    the kernel tells only those with some of the addresses that are due."""
    glance, sieve = Glance(signs_of(due)), Sieve(due, own)
    found: list[Found] = []

    def pick(answer: Answer) -> None:
        header, entry = answer
        if glance.catches(entry) and (one := _held(sieve, header, entry)) is not None:
            found.append(one)
            if len(found) >= most:
                raise _Enough

    try:
        _walk(_questions(due, own, worth), pick)
    except _Enough:
        return found, True
    return found, False


def _questions(due: Sequence[Due], own: Set[Address], worth: int) -> list[bytes]:
    """How to ask for them. Each question has the kernel walk over all flows of the machine."""
    questions = questions_of(due, own)
    if questions is None or counted() <= worth * len(questions):
        return [EVERYTHING]
    return list(dict.fromkeys(map(_asking, questions)))


def _asking(question: Question) -> bytes:
    family = question.family
    if family is Family.IP6:
        # Asked for an address of IPv6, the kernel leaves out just the flows that have it (seen on
        # 6.18: its comparison is the wrong way round). So it is asked for all of that family.
        return struct.pack(HEADER, VERSIONS[family], 0, 0)
    at_source = question.answers or question.sends
    place = (CTA_IP_SRC if at_source else CTA_IP_DST)[family]
    packed = attribute(place, question.address.packed)
    ends = attribute(CTA_TUPLE_IP, packed, nested=True)
    flags = FILTER_SRC if at_source else FILTER_DST
    if question.protocol is not None:
        number = attribute(CTA_PROTO_NUM, bytes([question.protocol]))
        ends += attribute(CTA_TUPLE_PROTO, number, nested=True)
        flags |= FILTER_PROTO
    which, flagged = (
        (CTA_TUPLE_REPLY, CTA_FILTER_REPLY_FLAGS)
        if question.answers
        else (CTA_TUPLE_ORIG, CTA_FILTER_ORIG_FLAGS)
    )
    filtering = attribute(flagged, struct.pack("=I", flags))
    return (
        struct.pack(HEADER, VERSIONS[family], 0, 0)
        + attribute(which, ends, nested=True)
        + attribute(CTA_FILTER, filtering, nested=True)
    )


def _walk(questions: Iterable[bytes], pick: Callable[[Answer], None]) -> None:
    """Where a kernel refuses to choose, all flows are told."""
    for question in questions:
        try:
            with _netlink() as netlink:
                picked(netlink, CT_GET, NLM_F_DUMP, question, HEADER, pick)
        except OSError as error:
            if question == EVERYTHING or error.errno not in REFUSED:
                raise
            _walk([EVERYTHING], pick)
            return


def still(found: Iterable[Found], due: Sequence[Due], own: Set[Address]) -> list[Found]:
    """Those that are due all the same: meanwhile a rule may have come that leads there."""
    sieve = Sieve(due, own)
    again = (
        _held(sieve, one.key, {**attributes(one.key[_BEFORE:]), CTA_TUPLE_REPLY: one.reply})
        for one in found
    )
    return [one for one in again if one is not None]


def delete(found: Sequence[Found]) -> int:
    """Forget flows that were found; how many were still there."""
    count = 0
    if not found:
        return count
    with _netlink() as netlink:
        for one in sorted(found, key=lambda one: one.displaced):
            count += _delete(netlink, one.key)
            if one.shuts:
                with contextlib.suppress(OSError):  # where a kernel refuses, it is still forgotten
                    _bar(netlink, one.key)
    return count


def _held(sieve: Sieve, header: Sequence[int], entry: Attributes) -> Found | None:
    flow = flow_of(header, entry)
    if flow is None or not (due := sieve.holding(flow)):
        return None
    shuts = any(isinstance(one, Forgotten) and one.shuts(flow) for one in due)
    displaced = any(isinstance(one, Displaced) for one in due)
    return Found(_key(flow.family, entry), entry[CTA_TUPLE_REPLY], shuts, displaced)


@contextlib.contextmanager
def _netlink() -> Iterator[socket.socket]:
    """Closed by a thread: to close one waits for whoever changes rules in this namespace, and that
    may be somebody who never ends."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    try:
        yield netlink
    finally:
        try:
            threading.Thread(target=netlink.close, daemon=True).start()
        except RuntimeError:  # the system allows no more threads
            netlink.close()


class Glance:
    """Tells by an entry as it came whether a closer look is worth it, which takes far longer."""

    def __init__(self, signs: Signs) -> None:
        self._signs = signs
        self._addresses = [address.packed for address in signs.addresses]
        self._all = signs.none or len(self._addresses) > MOST_SOUGHT

    def catches(self, entry: Attributes) -> bool:
        original, reply = entry.get(CTA_TUPLE_ORIG, b""), entry.get(CTA_TUPLE_REPLY, b"")
        return (
            self._all
            or any(one in reply or one in original for one in self._addresses)
            or (bool(self._signs.ports) and self._is_to_such_a_port(original))
            or (self._signs.untranslated and _is_untranslated(original, reply))
        )

    def _is_to_such_a_port(self, original: bytes) -> bool:
        protocol = attributes(attributes(original).get(CTA_TUPLE_PROTO, b""))
        counts = self._signs.ports.get(int.from_bytes(protocol.get(CTA_PROTO_NUM, b""), "big"))
        return counts is not None and bool(counts[port_of(protocol, CTA_PROTO_DST_PORT)])


def _is_untranslated(original: bytes, reply: bytes) -> bool:
    there, back = (attributes(attributes(one).get(CTA_TUPLE_IP, b"")) for one in (original, reply))
    return any(
        there.get(CTA_IP_DST[family]) == back.get(CTA_IP_SRC[family]) is not None
        for family in Family
    )


def _key(
    family: Family, entry: Attributes, kinds: Iterable[int] = (CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE)
) -> bytes:
    """What says to the kernel which flow is meant: by its tuple and its number, so that one that
    came since then under the same tuple stays."""
    return struct.pack(HEADER, VERSIONS[family], 0, 0) + b"".join(
        attribute(kind, entry[kind], nested=kind == CTA_TUPLE_ORIG)
        for kind in kinds
        if kind in entry
    )


def _delete(netlink: socket.socket, key: bytes) -> int:
    with contextlib.suppress(FileNotFoundError):  # it ended by itself meanwhile
        ask(netlink, CT_DELETE, NLM_F_ACK, key, HEADER)
        return 1
    return 0


def _bar(netlink: socket.socket, key: bytes) -> None:
    """In the place of a flow that was forgotten comes one that was never translated. What its guest
    says from then on gets another port from the source NAT, and means nothing to who sent to the
    old one."""
    family, entry = FAMILIES[key[0]], attributes(key[_BEFORE:])
    place = _key(family, entry, (CTA_TUPLE_ORIG, CTA_ZONE))
    back = attribute(CTA_TUPLE_REPLY, _turned(family, entry[CTA_TUPLE_ORIG]), nested=True)
    lasting = attribute(CTA_TIMEOUT, BARRED.to_bytes(4, "big"))
    lasting += attribute(CTA_STATUS, LASTING.to_bytes(4, "big"))  # whoever sends meanwhile
    body = place + back + lasting
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            ask(netlink, CT_NEW, NLM_F_ACK | CREATE, body, HEADER)
            return
        # Who was faster: the sender, whose flow does just as well, or the guest.
        with contextlib.suppress(FileNotFoundError):
            [(_, other)] = ask(netlink, CT_GET, 0, place, HEADER)
            if other.get(CTA_TUPLE_ORIG) == entry[CTA_TUPLE_ORIG]:
                return
            _delete(netlink, _key(family, other))


def _turned(family: Family, original: bytes) -> bytes:
    """The tuple of the answers to a flow that nobody translates."""
    there = attributes(original)
    addresses, protocol = nested(there, CTA_TUPLE_IP), nested(there, CTA_TUPLE_PROTO)
    source, destination = CTA_IP_SRC[family], CTA_IP_DST[family]
    turned = attribute(source, addresses[destination]) + attribute(destination, addresses[source])
    ports = attribute(CTA_PROTO_NUM, protocol[CTA_PROTO_NUM])
    ports += attribute(CTA_PROTO_SRC_PORT, protocol[CTA_PROTO_DST_PORT])
    ports += attribute(CTA_PROTO_DST_PORT, protocol[CTA_PROTO_SRC_PORT])
    return attribute(CTA_TUPLE_IP, turned, nested=True) + attribute(
        CTA_TUPLE_PROTO, ports, nested=True
    )
