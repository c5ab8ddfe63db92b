"""The flows that the kernel tracks in the namespace this thread is in, and how it tells of them.
agent/kernel/flush.py forgets them."""

import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

from agent.kernel import sysctl
from agent.kernel.netlink import (
    NLM_F_DUMP,
    Attributes,
    attribute,
    attributes,
    picked,
)
from rules.load import Tracked, Tracking, Way
from rules.model import Family
from rules.stale import Flow

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
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_IP_SRC = {Family.IP: 1, Family.IP6: 3}
CTA_IP_DST = {Family.IP: 2, Family.IP6: 4}
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
VERSIONS = {Family.IP: socket.AF_INET, Family.IP6: socket.AF_INET6}
FAMILIES = {int(version): family for family, version in VERSIONS.items()}
HEADER = "=BBH"  # of every message: family, version, and nothing of ours
MOST_FLOWS = 1 << 18  # that a kernel tracks, if nobody tells it otherwise
COUNT = "net.netfilter.nf_conntrack_count"
ACCOUNTING = "net.netfilter.nf_conntrack_acct"


def is_idle() -> bool:
    """Whether the namespace this thread is in tracks no flow: a pass over all flows of the machine,
    which takes milliseconds, would find none."""
    return sysctl.read([COUNT]).get(COUNT) == "0"


def counted() -> int:
    """How many flows it tracks; 0 where that cannot be told."""
    text = sysctl.read([COUNT]).get(COUNT, "")
    return int(text) if text.isdecimal() else 0


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
    protocol = nested(there, CTA_TUPLE_PROTO)
    return Way(
        family=family,
        protocol=protocol[CTA_PROTO_NUM][0],
        port=port_of(protocol, CTA_PROTO_DST_PORT),
        destination=nested(there, CTA_TUPLE_IP)[CTA_IP_DST[family]],
        answerer=nested(back, CTA_TUPLE_IP)[CTA_IP_SRC[family]],
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


def flow_of(header: Sequence[int], entry: Attributes) -> Flow | None:
    """What an entry tells, if it makes sense."""
    try:
        family = FAMILIES[header[0]]
        original, reply = nested(entry, CTA_TUPLE_ORIG), nested(entry, CTA_TUPLE_REPLY)
        there, back = nested(original, CTA_TUPLE_IP), nested(reply, CTA_TUPLE_IP)
        to, of = nested(original, CTA_TUPLE_PROTO), nested(reply, CTA_TUPLE_PROTO)
        return Flow(
            family=family,
            protocol=to[CTA_PROTO_NUM][0],
            port=port_of(to, CTA_PROTO_DST_PORT),
            destination=ip_address(there[CTA_IP_DST[family]]),
            answerer=ip_address(back[CTA_IP_SRC[family]]),
            sender=ip_address(there[CTA_IP_SRC[family]]),
            answering_port=port_of(of, CTA_PROTO_SRC_PORT),
            sending_port=port_of(to, CTA_PROTO_SRC_PORT),
            answered_port=port_of(of, CTA_PROTO_DST_PORT),
        )
    except (LookupError, ValueError):
        return None


def port_of(protocol: Attributes, which: int) -> int:
    return int.from_bytes(protocol.get(which, b"")[:2], "big")


def nested(entry: Attributes, kind: int) -> Attributes:
    return attributes(memoryview(entry[kind]))
