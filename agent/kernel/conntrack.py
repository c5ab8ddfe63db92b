"""The flows that the kernel tracks in the namespace this thread is in: found, and forgotten."""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from ipaddress import ip_address

from agent.kernel import sysctl
from agent.kernel.netlink import NLM_F_ACK, NLM_F_DUMP, Attributes, ask, attribute, attributes
from rules.flows import Displaced, Due, Flow, Forbidden, Forgotten
from rules.load import Tracked, Tracking, Way
from rules.model import Address, Family

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
MOST_FLOWS = 1 << 18  # that a kernel tracks, if nobody tells it otherwise
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

    def forget(self, due: Sequence[Due], own: Set[Address]) -> int:
        """Forget these flows of a namespace with these addresses, all in one pass; returns how
        many there were."""
        signs, untranslated = _signs(due)
        count = 0
        for flow, entry in list(_flows(self._netlink, signs, untranslated=untranslated)):
            holding = [one for one in due if one.holds(flow, own)]
            if holding:
                count += _delete(self._netlink, flow.family, entry)
            if any(isinstance(one, Forgotten) and one.shuts(flow) for one in holding):
                with contextlib.suppress(OSError):  # where a kernel refuses, it is still forgotten
                    _bar(self._netlink, flow.family, entry)
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
        answers = ask(netlink, CT_GET, NLM_F_DUMP, bytes(4) + wanted, "=BBH")
    found = [tracked_of(header, entry) for header, entry in answers]
    return Tracking(tuple(one for one in found if one is not None), counting)


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


def _signs(due: Sequence[Due]) -> tuple[list[bytes], bool]:
    """The addresses one of which a flow must have, or be untranslated, to be one of these; no
    address: it may have any. Nodes have a hundred thousand flows, and few are meant."""
    found: set[bytes] = set()
    untranslated = False
    for one in due:
        if isinstance(one, (Forbidden, Displaced)):
            found.add(one.guest.packed)
        elif one.answerer is not None:
            found.add(one.answerer.packed)
        elif one.endpoints:
            return [], False
        else:
            untranslated = True
    return list(found), untranslated


def _may_be(entry: Attributes, signs: Sequence[bytes], *, untranslated: bool) -> bool:
    """Whether a closer look is worth it."""
    original, reply = entry.get(CTA_TUPLE_ORIG, b""), entry.get(CTA_TUPLE_REPLY, b"")
    if any(sign in reply or sign in original for sign in signs):
        return True
    if not untranslated:
        return not signs
    there, back = (attributes(attributes(one).get(CTA_TUPLE_IP, b"")) for one in (original, reply))
    return any(
        there.get(CTA_IP_DST[family]) == back.get(CTA_IP_SRC[family]) is not None
        for family in Family
    )


def _flows(
    netlink: socket.socket, signs: Sequence[bytes] = (), *, untranslated: bool = False
) -> Iterator[tuple[Flow, Attributes]]:
    for header, entry in ask(netlink, CT_GET, NLM_F_DUMP, bytes(4), "=BBH"):
        if _may_be(entry, signs, untranslated=untranslated):
            flow = flow_of(header, entry)
            if flow is not None:
                yield flow, entry


def flow_of(header: Sequence[int], entry: Attributes) -> Flow | None:
    """What an entry tells, if it makes sense."""
    try:
        family = FAMILIES[header[0]]
        original, reply = _nested(entry, CTA_TUPLE_ORIG), _nested(entry, CTA_TUPLE_REPLY)
        protocol = _nested(original, CTA_TUPLE_PROTO)
        return Flow(
            family=family,
            protocol=protocol[CTA_PROTO_NUM][0],
            port=_port(protocol, CTA_PROTO_DST_PORT),
            destination=ip_address(_nested(original, CTA_TUPLE_IP)[CTA_IP_DST[family]]),
            answerer=ip_address(_nested(reply, CTA_TUPLE_IP)[CTA_IP_SRC[family]]),
            sender=ip_address(_nested(original, CTA_TUPLE_IP)[CTA_IP_SRC[family]]),
            answering_port=_port(_nested(reply, CTA_TUPLE_PROTO), CTA_PROTO_SRC_PORT),
            sending_port=_port(protocol, CTA_PROTO_SRC_PORT),
            answered_port=_port(_nested(reply, CTA_TUPLE_PROTO), CTA_PROTO_DST_PORT),
        )
    except (LookupError, ValueError):
        return None


def _port(protocol: Attributes, which: int) -> int:
    return int.from_bytes(protocol.get(which, b"\0\0"), "big")


def _nested(entry: Attributes, kind: int) -> Attributes:
    return attributes(memoryview(entry[kind]))


def _delete(netlink: socket.socket, family: Family, entry: Attributes) -> int:
    """By its tuple and its number: a flow that came since then under the same tuple stays."""
    kinds = (CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE)
    body = b"".join(
        attribute(kind, entry[kind], nested=kind == CTA_TUPLE_ORIG)
        for kind in kinds
        if kind in entry
    )
    with contextlib.suppress(FileNotFoundError):  # it ended by itself meanwhile
        ask(netlink, CT_DELETE, NLM_F_ACK, _header(family) + body, "=BBH")
        return 1
    return 0


def _bar(netlink: socket.socket, family: Family, entry: Attributes) -> None:
    """In the place of a flow that was forgotten comes one that was never translated. What its guest
    says from then on gets another port from the source NAT, and means nothing to who sent to the
    old one."""
    place = b"".join(
        attribute(kind, entry[kind], nested=kind == CTA_TUPLE_ORIG)
        for kind in (CTA_TUPLE_ORIG, CTA_ZONE)
        if kind in entry
    )
    back = attribute(CTA_TUPLE_REPLY, _turned(family, entry[CTA_TUPLE_ORIG]), nested=True)
    lasting = attribute(CTA_TIMEOUT, BARRED.to_bytes(4, "big"))
    lasting += attribute(CTA_STATUS, LASTING.to_bytes(4, "big"))  # whoever sends meanwhile
    body = place + back + lasting
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            ask(netlink, CT_NEW, NLM_F_ACK | CREATE, _header(family) + body, "=BBH")
            return
        # Who was faster: the sender, whose flow does just as well, or the guest.
        with contextlib.suppress(FileNotFoundError):
            [(_, other)] = ask(netlink, CT_GET, 0, _header(family) + place, "=BBH")
            if other.get(CTA_TUPLE_ORIG) == entry[CTA_TUPLE_ORIG]:
                return
            _delete(netlink, family, other)


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


def _header(family: Family) -> bytes:
    return struct.pack("=BBH", VERSIONS[family], 0, 0)
