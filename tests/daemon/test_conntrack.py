"""With packets: a port that a save takes away is closed for open flows too, a port that it adds is
taken over, and nothing else loses a packet; also where we were killed in between."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from agent.kernel.lab import POD, Lab
from agent.kernel.probe import asks, connected, echoing
from rules.model import Family, Protocol
from tests.daemon.running import A_MOMENT, Node, comes_to_forward, forwarded
from tests.spaces import ROOT, eventually, lab, manifest, run

HERE = POD[0].ip
KEPT, CLOSED = 1500, 7000


@pytest.fixture(scope="module")
def wired() -> Iterator[Lab]:
    servers = [(Protocol.UDP, port) for port in (KEPT, CLOSED, CLOSED + 1)]
    with lab() as made, echoing(made, made.guest, servers):
        yield made


@contextmanager
def flow(wired: Lab, port: int) -> Iterator[socket.socket]:
    with connected(wired, wired.client, HERE, Protocol.UDP, port) as client:
        client.settimeout(0.3)
        yield client


def answered(client: socket.socket) -> bool:
    try:
        return asks(client) > 0
    except OSError:
        return False


class Stream:
    """Questions that go on and on, and how many of them nobody answered."""

    def __init__(self, client: socket.socket) -> None:
        client.settimeout(5)
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.asked = self.lost = 0
        self._thread.start()

    def _ask(self) -> None:
        while not self._stop.wait(0.0005):
            self.asked += 1
            try:
                asks(self._client, b"%d" % self.asked)
            except OSError:
                self.lost += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def test_a_range_that_goes_takes_its_flows_with_it_and_no_others(node: Node, wired: Lab) -> None:
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
    with (
        node.running() as daemon,
        flow(wired, CLOSED) as closed,
        flow(wired, KEPT) as kept,
        closing(Stream(kept)) as stream,
    ):
        assert answered(closed)
        for _ in range(3):
            node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
            assert comes_to_forward(wired.pod, "udp 1000-2000", seconds=A_MOMENT)
            assert eventually(lambda: not answered(closed), A_MOMENT)
            node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
            assert comes_to_forward(wired.pod, "udp 1000-2000", "udp 7000-7010", seconds=A_MOMENT)
            assert eventually(lambda: answered(closed), A_MOMENT)
        assert daemon.metric("conntrack_forgotten_total") >= 3
        asked = stream.asked
        assert eventually(lambda: stream.asked > asked)
    assert stream.asked > 100
    assert stream.lost == 0


def test_a_restart_loses_no_packet(node: Node, wired: Lab) -> None:
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
    with ExitStack() as stack:
        with node.running() as daemon:
            kept = stack.enter_context(flow(wired, KEPT))
            stream = stack.enter_context(closing(Stream(kept)))
            assert eventually(lambda: stream.asked > 10)
            daemon.kill()
        with node.running():
            asked = stream.asked
            assert eventually(lambda: stream.asked > asked + 10)
    assert stream.lost == 0


def test_a_new_udp_range_takes_over_a_flow_that_went_elsewhere(node: Node, wired: Lab) -> None:
    """Before, the pod itself had answered it."""
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
    with (
        wired.socket(wired.pod, Family.IP, socket.SOCK_DGRAM) as own,
        node.running(),
        flow(wired, CLOSED) as client,
    ):
        own.bind((str(HERE), CLOSED))
        client.send(b"before")
        assert own.recv(100) == b"before"
        node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000/udp"))
        assert comes_to_forward(wired.pod, "udp 1000-2000", "udp 7000", seconds=A_MOMENT)
        assert eventually(lambda: answered(client), A_MOMENT)


def test_ports_that_go_while_the_rules_are_gone_are_closed_too(node: Node, wired: Lab) -> None:
    """Somebody flushed the rules while nobody looked, so no rule tells what the flow was by."""
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
    with flow(wired, CLOSED) as closed, flow(wired, KEPT) as kept:
        with node.running() as daemon:
            assert answered(closed)
            assert answered(kept)
            daemon.kill()
        run("ip", "netns", "exec", wired.pod, "nft", "flush", "ruleset")
        node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
        with node.running():
            assert eventually(lambda: not answered(closed), A_MOMENT)
            assert answered(kept)


MORTAL = """
import os, signal
from agent.kernel.live import Deferred
from agent.entry import main

def forgotten(deferred, beat):
    if deferred._forgetting:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0

Deferred.forgotten = forgotten
main()
"""


def test_who_is_killed_before_the_flows_are_forgotten_leaves_them_to_the_next(
    node: Node, wired: Lab, tmp_path: Path
) -> None:
    """Killed by itself, at the very moment: the rules are committed, the flows still there."""
    script = tmp_path / "mortal.py"
    script.write_text(MORTAL)
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
    with flow(wired, CLOSED) as closed, flow(wired, KEPT) as kept:
        with node.running() as daemon:
            assert answered(closed)
            assert answered(kept)
            daemon.kill()
        node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
        words = node.words()
        place = words.index(sys.executable)
        mortal = (*words[:place], sys.executable, str(script), *words[place + 3 :])
        run(*mortal, code=-signal.SIGKILL, environment={"PYTHONPATH": str(ROOT)})
        assert forwarded(wired.pod) == {"udp 1000-2000"}
        assert answered(closed), "the flow should have outlived its rule, or this tests nothing"
        with node.running():
            assert eventually(lambda: not answered(closed), A_MOMENT)
            assert answered(kept)
