"""Whoever has CAP_NET_ADMIN in a namespace can send to the netlink sockets that we open there, as
if it were the kernel that speaks. It is not listened to."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_interface

import pytest

from agent.kernel.events import NEWGEN
from agent.kernel.netlink import (
    HEADER,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    ask,
    attribute,
    transact,
)
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import NFT_MSG_GETGEN, netlink
from agent.kernel.rtnetlink import ADDRESSES, IFA_LOCAL
from tests.spaces import ip, space

pytestmark = pytest.mark.needs_root

ADDRESS = ip_interface("192.0.2.9/24")
NEWADDR = 20
FORGED = {
    "acknowledgement": HEADER.pack(20, NLMSG_ERROR, 0, 1, 0) + bytes(4),
    "end": HEADER.pack(20, NLMSG_DONE, 2, 1, 0) + bytes(4),
    "error": HEADER.pack(20, NLMSG_ERROR, 0, 1, 0) + struct.pack("=i", -1),
    "answer": HEADER.pack(32, NEWADDR, 0, 1, 0) + bytes(8) + attribute(IFA_LOCAL, b"\6\6\6\6"),
    "no length": bytes(64),
    "half a header": b"\x10\0\0",
}


@pytest.fixture(scope="module")
def netns() -> Iterator[int]:
    with space() as name:
        ip(name, f"addr add {ADDRESS} dev lo", "link set lo up")
        with opened(name) as descriptor, inside(descriptor, name):
            yield descriptor


def told(listening: socket.socket, forged: bytes) -> None:
    """Have another socket say that to it."""
    protocol = listening.proto
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as forger:
        forger.sendto(forged, (listening.getsockname()[0], 0))


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_an_answer_that_is_not_the_kernels_is_none(netns: int, forged: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.bind((0, 0))
        asking.settimeout(5)
        told(asking, forged)
        kind, body, layout = ADDRESSES
        answers = ask(asking, kind, NLM_F_DUMP, body, layout)
    assert ADDRESS.packed in [found.get(IFA_LOCAL) for _, found in answers]


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_an_echo_that_is_not_the_kernels_is_none(netns: int, forged: bytes) -> None:
    question = HEADER.pack(20, NFT_MSG_GETGEN, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + bytes(4)
    with netlink() as writing:
        writing.bind((0, 0))
        told(writing, forged)
        assert [kind for kind, _ in transact(writing, question)] == [NEWGEN]
