"""Rules of others on the node are read by a worker process, and only when somebody changed them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.kernel.foreign_rules import ForeignRules
from agent.kernel.legacy_tables import FORWARDING, fingerprint
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.worker import Json, Worker
from agent.reconcile import converge
from rules.desired import desire
from rules.model import NODE
from tests.spaces import nft, pod, run, vm, within

pytestmark = pytest.mark.needs_root

BASE = "add table ip theirs\nadd chain ip theirs pre { type nat hook prerouting priority -100; }"
FILTER = "add table ip f\nadd chain ip f forward { type filter hook forward priority 0; }"


@pytest.fixture
def netns() -> Iterator[str]:
    """A new one: a legacy table that was used once stays in use."""
    with pod() as name:
        yield name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker was asked for."""
    found: list[str] = []
    ask = Worker.ask

    def counting(worker: Worker, descriptor: int, question: Json) -> Json:
        if "what" in question:
            found.append(str(question["what"]))
        return ask(worker, descriptor, question)

    monkeypatch.setattr(Worker, "ask", counting)
    return found


@contextmanager
def node(netns: str) -> Iterator[LiveKernel]:
    """A kernel whose own namespace is that one."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        kernel = LiveKernel("nftables")
        try:
            yield kernel
        finally:
            kernel.close()


def told(kernel: LiveKernel) -> list[str]:
    with kernel.opened(NODE) as namespace:
        found = namespace.node([], others=True).occupied
        assert found.unreadable == ()
        return sorted(
            f"{one.protocol.value if one.protocol else 'any'} {one.ports[0]}"
            for one in found.translations
        )


def rule(port: int) -> str:
    return f"add rule ip theirs pre tcp dport {port} dnat to 10.0.0.1"


def test_foreign_nat_that_nobody_changed_is_read_once(netns: str, asked: list[str]) -> None:
    nft(netns, f"{BASE}\n{rule(80)}")
    with node(netns) as kernel:
        assert [told(kernel) for _ in range(3)] == [["tcp 80"]] * 3
        assert asked == ["nat"]
        for ports in ("22", "22,1000-8000/udp"):  # what we commit ourselves changes nothing of it
            with kernel.opened(NODE) as namespace:
                desired = desire([vm("desktop", ports)], namespace.surroundings())
                assert not converge(NODE, desired, namespace).empty
            assert told(kernel) == ["tcp 80"]
        assert asked == ["nat"]
        nft(netns, rule(81))
        assert told(kernel) == ["tcp 80", "tcp 81"]
        assert asked == ["nat", "nat"]


def test_a_foreign_change_beside_a_commit_of_ours_is_read(netns: str, asked: list[str]) -> None:
    nft(netns, f"{BASE}\n{rule(80)}")
    with node(netns) as kernel:
        assert told(kernel) == ["tcp 80"]
        with kernel.opened(NODE) as namespace:
            desired = desire([vm("desktop", "22")], namespace.surroundings())
            namespace.observe()
            nft(netns, rule(81))
            converge(NODE, desired, namespace)
        assert told(kernel) == ["tcp 80", "tcp 81"]
        assert asked == ["nat", "nat"]


def test_where_others_have_no_tables_no_worker_is_needed(netns: str, asked: list[str]) -> None:
    with node(netns) as kernel:
        assert told(kernel) == []
        with kernel.opened(NODE) as namespace:
            assert namespace.filters() == ()
    assert asked == []


def test_many_foreign_rules_cost_this_process_little(netns: str, asked: list[str]) -> None:
    many = "\n".join(rule(port) for port in range(10000, 30000))
    nft(netns, f"{BASE}\n{many}")
    with node(netns) as kernel:
        before = os.times()
        assert told(kernel) == ["tcp 10000-29999"]
        ours = os.times()
        kernel.close()  # so that what the worker took is counted
        after = os.times()
    own = ours.user + ours.system - before.user - before.system
    worker = after.children_user + after.children_system
    worker -= before.children_user + before.children_system
    assert asked == ["nat"]
    assert own < worker / 10, f"{own:.2f} s, and {worker:.2f} s in the worker"


def test_a_worker_that_read_little_stays_however_much_memory_its_master_uses(netns: str) -> None:
    nft(netns, f"{BASE}\n{rule(80)}")
    large = bytearray(os.urandom(1 << 20) * 100)
    with node(netns) as kernel:
        assert told(kernel) == ["tcp 80"]
        worker = worker_of(kernel)
        nft(netns, rule(81))
        assert told(kernel) == ["tcp 80", "tcp 81"]
        assert worker_of(kernel) == worker
    assert large


def worker_of(kernel: LiveKernel) -> int:
    process = kernel._workers.foreign._worker._process
    assert process is not None
    return process.pid


def test_foreign_nat_that_takes_too_much_to_read_cannot_be_read(
    netns: str, asked: list[str]
) -> None:
    many = "\n".join(rule(port) for port in range(5000, 65000))
    nft(netns, f"{BASE}\n{many}")
    foreign = ForeignRules(processor=1)
    try:
        with opened(netns) as descriptor, inside(descriptor, netns):
            found = [foreign.nat(descriptor) for _ in range(2)]
            assert [one.translations for one in found] == [(), ()]
            reason = "rules of others: to read them takes more than 1 s of processor time"
            assert [one.unreadable for one in found] == [(reason,)] * 2
            assert asked == ["nat"], "it was tried again although nothing had changed"
            nft(netns, f"flush chain ip theirs pre\n{rule(80)}")
            assert foreign.nat(descriptor).unreadable == ()
    finally:
        foreign.stop()


def test_forward_filters_of_others_are_read_when_they_change(netns: str, asked: list[str]) -> None:
    nft(netns, FILTER)
    with node(netns) as kernel:

        def found() -> list[bool]:
            with kernel.opened(NODE) as namespace:
                return [one.drops for one in namespace.filters()]

        assert [found() for _ in range(3)] == [[False]] * 3
        assert asked == ["filters"]
        nft(netns, "add chain ip f forward { policy drop; }")
        assert found() == [True]
        assert asked == ["filters"] * 2
        within(netns, "iptables-legacy", "-A", "FORWARD", "-j", "ACCEPT")
        assert [found() for _ in range(3)] == [[True, False]] * 3
        within(netns, "iptables-legacy", "-P", "FORWARD", "DROP")
        assert found() == [True, True]
        assert asked == ["filters"] * 4


def test_legacy_nat_that_nobody_changed_is_read_once(netns: str, asked: list[str]) -> None:
    words = ("iptables-legacy", "-t", "nat", "-A", "PREROUTING", "-p", "tcp")
    to = ("-j", "DNAT", "--to-destination", "10.0.0.1")
    within(netns, *words, "--dport", "80", *to)
    with node(netns) as kernel:
        assert [told(kernel) for _ in range(2)] == [["tcp 80"]] * 2
        assert asked == ["nat"]
        within(netns, *words, "--dport", "81", *to)
        assert told(kernel) == ["tcp 80", "tcp 81"]
        assert asked == ["nat", "nat"]


SEND = "import socket; socket.socket(socket.{}, socket.SOCK_DGRAM).sendto(b'x', ('{}', 9))"


@pytest.mark.parametrize(
    ("program", "family", "address"),
    [("iptables-legacy", "AF_INET", "127.0.0.1"), ("ip6tables-legacy", "AF_INET6", "::1")],
)
def test_a_legacy_table_is_known_by_its_rules_and_not_by_its_counters(
    netns: str, program: str, family: str, address: str
) -> None:
    def seen() -> bytes:
        with opened(netns) as descriptor, inside(descriptor, netns):
            return fingerprint(FORWARDING)

    run("ip", "-n", netns, "link", "set", "lo", "up")
    assert seen() == b""
    assert within(netns, "cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names") == ""
    within(netns, program, "-A", "OUTPUT", "-j", "ACCEPT")
    first = seen()
    within(netns, "python3", "-c", SEND.format(family, address))
    assert "[0:0] -A OUTPUT" not in within(netns, f"{program}-save", "-c")
    assert seen() == first
    changes = (("-P", "FORWARD", "DROP"), ("-t", "mangle", "-A", "FORWARD", "-j", "DROP"))
    found = [first]
    for change in changes:
        within(netns, program, *change)
        found.append(seen())
    assert len(set(found)) == len(found)
