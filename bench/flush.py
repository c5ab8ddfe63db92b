"""How long a repair takes while flows are forgotten in another namespace."""

import os
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.kernel.conntrack import CT_NEW, NETLINK_NETFILTER, counted
from agent.kernel.lab import GUEST, POD, Lab, built
from agent.kernel.netlink import HEADER, NLM_F_REQUEST, attribute
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import generation_of
from bench.measure import Number, Table, numbers, table
from bench.process import configure, manifest, running, save, scratch, until

FLOWS = 50_000  # of the 262,144 that a kernel has room for, for all namespaces of the machine
ROUNDS = 6
QUIET = 1.2  # seconds after which a row of repairs is forgotten: see agent.backoff
BOUND = 20.0  # ms that a repair may take longer
PORT = 7000
CREATE = 0x600
KEPT, CLOSING = "1000-2000/tcp", "7000-7010/tcp"


def repair_elsewhere() -> Table:
    """Somebody flushes the rules of one namespace while a range is closed in another, which has
    many flows: from the flush until the rules are there again."""
    with (
        scratch() as folder,
        built(f"prbench-{os.getpid()}a") as busy,
        built(f"prbench-{os.getpid()}b") as other,
    ):
        manifests = configure(folder)
        save(manifests / "busy.yaml", manifest("busy", busy.pod, [KEPT, CLOSING]))
        save(manifests / "other.yaml", manifest("other", other.pod, [KEPT]))
        with running(folder) as daemon, _asking(busy) as crowd, _asking(other) as rules:
            daemon.says("READY=1")
            taken: dict[str, list[float]] = {"nothing else to do": [], "flows to be forgotten": []}
            lasted: list[float] = []
            for _ in range(ROUNDS):
                daemon.rests()
                taken["nothing else to do"].append(_repair(other, rules))
                _fill(crowd)
                started, closing = time.perf_counter(), generation_of(crowd)
                _close(manifests / "busy.yaml", busy)
                until(lambda closing=closing: generation_of(crowd) != closing)  # type: ignore[misc]
                taken["flows to be forgotten"].append(_repair(other, rules))
                until(lambda: _count(busy) < FLOWS // 100)
                lasted.append((time.perf_counter() - started) * 1000)
                save(manifests / "busy.yaml", manifest("busy", busy.pod, [KEPT, CLOSING]))
                time.sleep(QUIET)
    quiet, during = (statistics.median(times) for times in taken.values())
    taken[f"until {FLOWS} flows are forgotten"] = lasted
    return numbers(
        table("The rules of a namespace are flushed, until they are repaired", taken),
        [
            Number(
                name="more with flows to be forgotten", value=during - quiet, unit="ms", bound=BOUND
            )
        ],
    )


def _close(file: Path, lab: Lab) -> None:
    save(file, manifest("busy", lab.pod, [KEPT]))


def _repair(lab: Lab, rules: socket.socket) -> float:
    """Milliseconds between somebody's commit and ours."""
    before = generation_of(rules)
    with opened(lab.pod) as descriptor, inside(descriptor, lab.pod):
        child = subprocess.Popen(["nft", "flush", "ruleset"])
    with child:
        until(lambda: generation_of(rules) != before)
        started, flushed = time.perf_counter(), before.after(1)
        until(lambda: generation_of(rules) != flushed)
        ended = time.perf_counter()
    assert child.returncode == 0
    return (ended - started) * 1000


@contextmanager
def _asking(lab: Lab) -> Iterator[socket.socket]:
    """A socket of netfilter in that namespace."""
    with opened(lab.pod) as descriptor, inside(descriptor, lab.pod):
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    with netlink:
        yield netlink


def _count(lab: Lab) -> int:
    with opened(lab.pod) as descriptor, inside(descriptor, lab.pod):
        return counted()


def _fill(netlink: socket.socket) -> None:
    """Connections to a port of the pod that the guest answers, written to conntrack itself."""
    for start in range(0, FLOWS, 100):
        bodies = [_flow(number) for number in range(start, start + 100)]
        netlink.send(
            b"".join(
                HEADER.pack(HEADER.size + len(body), CT_NEW, NLM_F_REQUEST | CREATE, 1, 0) + body
                for body in bodies
            )
        )


def _flow(number: int) -> bytes:
    client = (0x0B000000 + number).to_bytes(4, "big")
    there = _tuple(client, POD[0].ip.packed, 40000, PORT)
    back = _tuple(GUEST[0].ip.packed, client, PORT, 40000)
    established = attribute(4, attribute(1, attribute(1, b"\3"), nested=True), nested=True)
    return (
        struct.pack("=BBH", socket.AF_INET, 0, 0)
        + attribute(1, there, nested=True)
        + attribute(2, back, nested=True)
        + attribute(7, struct.pack(">I", 600))
        + attribute(3, struct.pack(">I", 1 << 3 | 1 << 1))  # confirmed, and answered
        + established
    )


def _tuple(sender: bytes, receiver: bytes, sending: int, receiving: int) -> bytes:
    addresses = attribute(1, sender) + attribute(2, receiver)
    ports = attribute(1, b"\6") + attribute(2, struct.pack(">H", sending))
    ports += attribute(3, struct.pack(">H", receiving))
    return attribute(1, addresses, nested=True) + attribute(2, ports, nested=True)
