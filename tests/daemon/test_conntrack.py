"""With packets: a port that a save takes away is closed for open flows too, a port that it adds is
taken over, and nothing else loses a packet; also where we were killed in between."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from agent.kernel.conntrack import NETLINK_NETFILTER
from agent.kernel.lab import GUEST, POD, Lab
from agent.kernel.netns import inside, opened
from agent.kernel.probe import asks, connected, echoing
from rules.model import Family, Protocol
from tests.daemon.running import PATIENCE, Node, comes_to_forward, forwarded
from tests.netns.test_forgetting import fill, tracked
from tests.spaces import ROOT, eventually, lab, manifest, nft, run

HERE = POD[0].ip
KEPT, CLOSED = 1500, 7000
SHORT = 0.3  # seconds, for an answer that should not come


@pytest.fixture(scope="module")
def wired() -> Iterator[Lab]:
    servers = [(Protocol.UDP, port) for port in (KEPT, CLOSED, CLOSED + 1)]
    with lab() as made, echoing(made, made.guest, servers):
        yield made


@contextmanager
def flow(wired: Lab, port: int) -> Iterator[socket.socket]:
    with connected(wired, wired.client, HERE, Protocol.UDP, port) as client:
        yield client


def answered(client: socket.socket, seconds: float = PATIENCE) -> bool:
    client.settimeout(seconds)
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
            assert daemon.applied()
            assert not answered(closed, SHORT)
            node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
            assert daemon.applied()
            assert answered(closed)
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
        node.running() as daemon,
        flow(wired, CLOSED) as client,
    ):
        own.bind((str(HERE), CLOSED))
        client.send(b"before")
        assert own.recv(100) == b"before"
        node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000/udp"))
        assert daemon.applied()
        assert answered(client)


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
        with node.running() as daemon:
            assert daemon.applied()
            assert not answered(closed, SHORT)
            assert answered(kept)


MORTAL = """
import os, signal
from agent.kernel.deferred import Deferred
from agent.entry import main

flushed = Deferred.flushed

def mortal(deferred, *given):
    if deferred._asked:
        os.kill(os.getpid(), signal.SIGKILL)
    return flushed(deferred, *given)

Deferred.flushed = mortal
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
        with node.running() as daemon:
            assert daemon.applied()
            assert not answered(closed, SHORT)
            assert answered(kept)


# ------------------------------------------------------------------------------- many, and none


MANY = 40_000  # flows, in a table for 262,144 of all who are tested at the same time


def count(netns: str) -> int:
    with opened(netns) as descriptor, inside(descriptor, netns):
        return tracked()


def test_another_namespace_is_repaired_while_flows_are_forgotten(
    node: Node, wired: Lab, blue: str
) -> None:
    """However many they are: they take seconds, and who repairs does not wait for them."""
    node.save("a.yaml", manifest(wired.pod, "1000-2000,7000-7010"))
    node.save("b.yaml", manifest(blue, "22", "two"))
    with (
        node.running() as daemon,
        opened(wired.pod) as descriptor,
        inside(descriptor, wired.pod),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink,
    ):
        fill(netlink, MANY, CLOSED, to=HERE, answerer=GUEST[0].ip)
        node.save("a.yaml", manifest(wired.pod, "1000-2000"))
        assert comes_to_forward(wired.pod, "tcp 1000-2000")
        nft(blue, "flush ruleset")
        assert comes_to_forward(blue, "tcp 22")
        assert count(wired.pod) > MANY // 4, "the repair came after the flows"
        assert eventually(lambda: count(wired.pod) < MANY // 4, PATIENCE)
        assert eventually(lambda: daemon.metric("conntrack_forgotten_total") >= MANY, PATIENCE)


def test_all_flows_are_forgotten_although_the_worker_is_killed(node: Node, wired: Lab) -> None:
    node.save("a.yaml", manifest(wired.pod, "1000-2000,7000-7010"))
    with (
        node.running() as daemon,
        opened(wired.pod) as descriptor,
        inside(descriptor, wired.pod),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink,
    ):
        fill(netlink, MANY, CLOSED, to=HERE, answerer=GUEST[0].ip)
        node.save("a.yaml", manifest(wired.pod, "1000-2000"))
        assert eventually(lambda: bool(daemon.workers("flush_worker")))
        assert eventually(lambda: count(wired.pod) < MANY, PATIENCE)
        (worker,) = daemon.workers("flush_worker")
        os.kill(worker, signal.SIGKILL)
        assert count(wired.pod) > MANY // 4, "it was killed too late"
        assert eventually(lambda: count(wired.pod) < MANY // 100, PATIENCE)
        assert eventually(lambda: daemon.workers("flush_worker") not in ([], [worker]))
        assert eventually(lambda: daemon.metric("conntrack_unflushed") == 0)


REFUSED = """
from pathlib import Path
from agent.errors import Failure
from agent.kernel.deferred import Deferred

ask = Deferred._asked_worker

def refuse(deferred, *given):
    if not Path(__file__).with_suffix(".may").exists():
        raise Failure("not permitted")
    return ask(deferred, *given)

Deferred._asked_worker = refuse
"""


def test_flows_that_could_not_be_forgotten_are_told_of_and_forgotten_as_soon_as_they_can_be(
    node: Node, wired: Lab, tmp_path: Path
) -> None:
    """A file that Python reads at its start has the daemon fail."""
    script = tmp_path / "sitecustomize.py"
    script.write_text(REFUSED)
    note = "flows not flushed yet: not permitted"
    node.save("a.yaml", manifest(wired.pod, "1000-2000/udp,7000-7010/udp"))
    with (
        flow(wired, CLOSED) as closed,
        flow(wired, KEPT) as kept,
        node.running(environment={"PYTHONPATH": str(tmp_path)}) as daemon,
    ):
        assert eventually(lambda: answered(closed))
        assert answered(kept)
        node.save("a.yaml", manifest(wired.pod, "1000-2000/udp"))
        assert comes_to_forward(wired.pod, "udp 1000-2000")
        assert eventually(lambda: note in daemon.standing(wired.pod)["notes"])
        assert daemon.metric("conntrack_unflushed") == 1
        assert daemon.says("flows not flushed yet", netns=wired.pod)
        assert answered(closed), "somebody has forgotten it"
        script.with_suffix(".may").touch()
        assert eventually(lambda: not answered(closed, SHORT), PATIENCE)
        assert eventually(lambda: daemon.metric("conntrack_unflushed") == 0)
        assert note not in daemon.standing(wired.pod)["notes"]
        assert answered(kept)
