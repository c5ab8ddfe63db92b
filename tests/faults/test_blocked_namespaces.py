"""Whoever is root in a namespace can hold its nftables lock for as long as they like: one
transaction of two megabytes takes the kernel seconds. That delays what is done there, and nothing
else: not the repair of another namespace, and not the sign of life that a watchdog waits for."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel.netlink import attribute
from agent.kernel.nftables import netlink
from rules.nft_batch import NEWCHAIN, NEWRULE, NEWTABLE
from tests.daemon.running import Node, Running, comes_to_forward, forwarded
from tests.daemon.test_signals import Manager, manager
from tests.spaces import eventually, manifest, nft, process, within

__all__ = ["manager"]

HELD = 15.0  # seconds at the most
RULES, BEHIND = 20_000, 20_000
LONG = 0.3
A_MOMENT = 2.0  # seconds on a busy machine, for what takes milliseconds
NFTA_RULE_ID, NFTA_RULE_POSITION_ID = 9, 10
CREATE, APPEND = 0x400, 0x800


def message(kind: int, flags: int, body: bytes) -> bytes:
    size = 16 + len(body)
    return struct.pack("=IHHII", size, kind, flags | 1, 0, 0) + body


def transaction() -> bytes:
    """Thousands of rules, each behind one that the kernel looks for among thousands."""
    edge, family = b"\0\0\0\x0a", bytes((2, 0, 0, 0))
    table = family + attribute(1, b"others\0")
    rule = table + attribute(2, b"c\0")
    seven = struct.pack(">I", 7)
    return b"".join(
        (
            message(16, 0, edge),
            message(NEWTABLE, CREATE, table),
            message(NEWTABLE + 2, 0, table),  # DELTABLE: whatever is left of the last one
            message(NEWTABLE, CREATE, table),
            message(NEWCHAIN, CREATE, table + attribute(3, b"c\0")),
            message(NEWRULE, CREATE | APPEND, rule) * RULES,
            message(NEWRULE, CREATE | APPEND, rule + attribute(NFTA_RULE_ID, seven)),
            message(NEWRULE, CREATE | APPEND, rule + attribute(NFTA_RULE_POSITION_ID, seven))
            * BEHIND,
            message(17, 0, edge),
        )
    )


HOLD = """
import time
from tests.faults.test_blocked_namespaces import HELD, hold
end = time.monotonic() + HELD
while time.monotonic() < end:
    hold()
"""


def hold() -> None:
    batch = transaction()
    with netlink() as here:
        here.setsockopt(socket.SOL_SOCKET, 32, 2 * len(batch))  # SO_SNDBUFFORCE
        here.send(batch)


def is_blocked(pid: int) -> bool:
    """Whether a thread of the process waits in the kernel, where nothing reaches it."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return "D" in states


def is_held(pid: int) -> bool:
    """Whether it waits for longer than for a grace period of RCU, as each of our edits does."""
    until = time.monotonic() + LONG
    while is_blocked(pid):
        if time.monotonic() > until:
            return True
        time.sleep(0.01)
    return False


def repaired_within(netns: str, ranges: str) -> float:
    """How long it takes until what somebody removed is back."""
    nft(netns, "delete table inet portranger")
    began = time.monotonic()
    assert eventually(lambda: forwarded(netns) == {ranges}, 60)
    return time.monotonic() - began


@pytest.fixture
def held(node: Node, blue: str, red: str, manager: Manager) -> Iterator[Running]:
    """A daemon that has to commit in one namespace (red), where somebody else does so all the
    time."""
    node.save("blue.yaml", manifest(blue, "22", "blue"))
    node.save("red.yaml", manifest(red, "22", "red"))
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"}
    with (
        node.running(environment=environment) as daemon,
        process(sys.executable, "-c", HOLD, netns=red),
    ):
        assert comes_to_forward(blue, "tcp 22")
        assert eventually(lambda: "others" in within(red, "nft", "list", "tables"), HELD)
        node.save("red.yaml", manifest(red, "23", "red"))
        assert eventually(lambda: is_held(daemon.pid), HELD), "nothing keeps it waiting"
        yield daemon


def test_a_namespace_that_blocks_our_commits_delays_no_other(
    held: Running, blue: str, red: str, manager: Manager
) -> None:
    took, fed, last = [], len(manager.order("WATCHDOG")), time.monotonic()
    gaps = []
    for _ in range(4):
        took.append(repaired_within(blue, "tcp 22"))
        while (count := len(manager.order("WATCHDOG"))) == fed:
            assert time.monotonic() - last < 60
            time.sleep(0.01)
        gaps.append(time.monotonic() - last)
        fed, last = count, time.monotonic()
    assert max(took) < A_MOMENT, took
    assert max(gaps) < A_MOMENT, gaps
    began = time.monotonic()
    assert held.metric("namespaces") == 2
    assert held.get("/healthz")[0] == 200
    assert time.monotonic() - began < 2 * A_MOMENT, "a scrape waits for it"
    assert comes_to_forward(red, "tcp 23")  # when it is its turn
    assert held.is_in("in sync", red)
