"""The flows that the kernel tracks in the namespace this thread is in: found, and forgotten."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache, partial
from ipaddress import ip_address

from agent.kernel import sysctl
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
from rules.load import Tracked, Tracking, Way
from rules.model import Address, Family
from rules.sieve import Sieve, Signs, signs_of
from rules.stale import Due, Flow, Forgotten

NETLINK_NETFILTER = 12
CT_NEW, CT_GET, CT_DELETE = (1 << 8) | 0, (1 << 8) | 1, (1 << 8) | 2  # of ctnetlink
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_ID, CTA_ZONE = 1, 2, 12, 18
CTA_STATUS, CTA_STATUS_MASK, CTA_PROTOINFO, CTA_TIMEOUT = 3, 26, 4, 7
CTA_COUNTERS = (9, 10)  # of both directions
CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES = 1, 2
CTA_PROTOINFO_TCP, CTA_PROTOINFO_TCP_STATE = 1, 1
TCP_OVER = (7, 8)  # TIME_WAIT and CLOSE
# Bits of the status; the second: to another address.
SEEN_REPLY, TRANSLATED = 1 << 1, 1 << 5
LASTING = 1 << 3 | 1 << 10  # confirmed, as what is written always is, and with a fixed timeout
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_IP_SRC = {Family.IP: 1, Family.IP6: 3}
CTA_IP_DST = {Family.IP: 2, Family.IP6: 4}
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
VERSIONS = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
FAMILIES = {int(version): family for family, version in VERSIONS.items()}
HEADER = "=BBH"  # of every message: family, version, and nothing of ours
MOST_FLOWS = 1 << 18  # that a kernel tracks, if nobody tells it otherwise
MOST_SOUGHT = 16  # addresses, from which on a closer look takes less
ATTEMPTS = 5  # to be faster than a guest that never rests
CREATE = 0x600  # NLM_F_CREATE and NLM_F_EXCL
BARRED = 600  # seconds
COUNT = "net.netfilter.nf_conntrack_count"
ACCOUNTING = "net.netfilter.nf_conntrack_acct"


class Conntrack:
    """Made by a thread that is in the namespace. Its socket stays open: to close one of this kind
    after rules were deleted waits until the kernel has destroyed them, for 15 ms."""

    def __init__(self) -> None:
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)

    def forget(
        self, due: Sequence[Due], own: Set[Address], beat: Callable[[], None] = lambda: None
    ) -> int:
        """Forget these flows of a namespace with these addresses, all in one pass; returns how
        many there were. Of all flows, only what it takes to delete some is kept."""
        pick = partial(_found, Glance(signs_of(due)), Sieve(due, own), beat)
        try:
            found = picked(self._netlink, CT_GET, NLM_F_DUMP, bytes(4), HEADER, pick)
        except Exception:
            self._netlink.close()  # what is left of the dump is no answer to another question
            raise
        count = 0
        for key, shuts in found:
            beat()
            count += _delete(self._netlink, key)
            if shuts:
                with contextlib.suppress(OSError):  # where a kernel refuses, it is still forgotten
                    _bar(self._netlink, key)
        return count

    def close(self) -> None:
        self._netlink.close()


def is_idle() -> bool:
    """Whether the namespace this thread is in tracks no flow: a pass over all flows of the machine,
    which takes milliseconds, would find none."""
    return sysctl.read([COUNT]).get(COUNT) == "0"


def tracked() -> Tracking:
    """The flows of the namespace this thread is in that were sent on to another address, all in one
    pass. Newer kernels pick them out by their status; of older ones we get all."""
    counting = sysctl.read([ACCOUNTING]).get(ACCOUNTING) == "1"
    if is_idle():
        return Tracking((), counting)
    status = TRANSLATED.to_bytes(4, "big")
    wanted = attribute(CTA_STATUS, status) + attribute(CTA_STATUS_MASK, status)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        question = bytes(4) + wanted
        found = picked(netlink, CT_GET, NLM_F_DUMP, question, HEADER, lambda one: tracked_of(*one))
    return Tracking(tuple(found), counting)


def tracked_of(header: Sequence[int], entry: Attributes) -> Tracked | None:
    """What an entry tells, if it makes sense and is about a flow that was sent on."""
    try:
        status = int.from_bytes(entry[CTA_STATUS], "big")
        if not status & TRANSLATED:
            return None
        return Tracked(
            key=entry[CTA_ID] + entry[CTA_TUPLE_ORIG],
            way=_way(FAMILIES[header[0]], entry[CTA_TUPLE_ORIG], entry[CTA_TUPLE_REPLY]),
            answered=bool(status & SEEN_REPLY),
            over=_is_over(entry),
            counted=_counted(entry),
        )
    except LookupError:
        return None


@lru_cache(MOST_FLOWS)
def _way(family: Family, original: bytes, reply: bytes) -> Way:
    """Taken apart once: a flow stays where it is, and is seen again at every look."""
    there, back = attributes(original), attributes(reply)
    protocol = _nested(there, CTA_TUPLE_PROTO)
    return Way(
        family=family,
        protocol=protocol[CTA_PROTO_NUM][0],
        port=_port(protocol, CTA_PROTO_DST_PORT),
        destination=_nested(there, CTA_TUPLE_IP)[CTA_IP_DST[family]],
        answerer=_nested(back, CTA_TUPLE_IP)[CTA_IP_SRC[family]],
    )


def _is_over(entry: Attributes) -> bool:
    """Whether it is a TCP connection that has ended, and is only remembered."""
    info = attributes(entry.get(CTA_PROTOINFO, b""))
    state = attributes(info.get(CTA_PROTOINFO_TCP, b"")).get(CTA_PROTOINFO_TCP_STATE, b"")
    return bool(state) and state[0] in TCP_OVER


def _counted(entry: Attributes) -> tuple[int, int] | None:
    sides = [attributes(entry[side]) for side in CTA_COUNTERS if side in entry]
    if not sides:
        return None
    packets, octets = (
        sum(int.from_bytes(side.get(kind, b""), "big") for side in sides)
        for kind in (CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES)
    )
    return packets, octets


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
        return counts is not None and bool(counts[_port(protocol, CTA_PROTO_DST_PORT)])


def _is_untranslated(original: bytes, reply: bytes) -> bool:
    there, back = (attributes(attributes(one).get(CTA_TUPLE_IP, b"")) for one in (original, reply))
    return any(
        there.get(CTA_IP_DST[family]) == back.get(CTA_IP_SRC[family]) is not None
        for family in Family
    )


def _found(
    glance: Glance, sieve: Sieve, beat: Callable[[], None], answer: Answer
) -> tuple[bytes, bool] | None:
    """By what to find a flow again that is to be forgotten, and whether its port is shut."""
    beat()
    header, entry = answer
    flow = flow_of(header, entry) if glance.catches(entry) else None
    if flow is None or not (due := sieve.holding(flow)):
        return None
    shuts = any(isinstance(one, Forgotten) and one.shuts(flow) for one in due)
    return _key(flow.family, entry), shuts


def flow_of(header: Sequence[int], entry: Attributes) -> Flow | None:
    """What an entry tells, if it makes sense."""
    try:
        family = FAMILIES[header[0]]
        original, reply = _nested(entry, CTA_TUPLE_ORIG), _nested(entry, CTA_TUPLE_REPLY)
        there, back = _nested(original, CTA_TUPLE_IP), _nested(reply, CTA_TUPLE_IP)
        to, of = _nested(original, CTA_TUPLE_PROTO), _nested(reply, CTA_TUPLE_PROTO)
        return Flow(
            family=family,
            protocol=to[CTA_PROTO_NUM][0],
            port=_port(to, CTA_PROTO_DST_PORT),
            destination=ip_address(there[CTA_IP_DST[family]]),
            answerer=ip_address(back[CTA_IP_SRC[family]]),
            sender=ip_address(there[CTA_IP_SRC[family]]),
            answering_port=_port(of, CTA_PROTO_SRC_PORT),
            sending_port=_port(to, CTA_PROTO_SRC_PORT),
            answered_port=_port(of, CTA_PROTO_DST_PORT),
        )
    except (LookupError, ValueError):
        return None


def _port(protocol: Attributes, which: int) -> int:
    return int.from_bytes(protocol.get(which, b"")[:2], "big")


def _nested(entry: Attributes, kind: int) -> Attributes:
    return attributes(memoryview(entry[kind]))


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
    family, entry = FAMILIES[key[0]], attributes(key[struct.calcsize(HEADER) :])
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
    addresses, protocol = _nested(there, CTA_TUPLE_IP), _nested(there, CTA_TUPLE_PROTO)
    source, destination = CTA_IP_SRC[family], CTA_IP_DST[family]
    turned = attribute(source, addresses[destination]) + attribute(destination, addresses[source])
    ports = attribute(CTA_PROTO_NUM, protocol[CTA_PROTO_NUM])
    ports += attribute(CTA_PROTO_SRC_PORT, protocol[CTA_PROTO_DST_PORT])
    ports += attribute(CTA_PROTO_DST_PORT, protocol[CTA_PROTO_SRC_PORT])
    return attribute(CTA_TUPLE_IP, turned, nested=True) + attribute(
        CTA_TUPLE_PROTO, ports, nested=True
    )
