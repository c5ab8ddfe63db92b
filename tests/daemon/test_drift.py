"""What others do to our rules is undone at once, and told with who did it; what they do elsewhere,
and what we do ourselves, is no reason for anything."""

from __future__ import annotations

import http.client
import io
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent import keeper as keeping
from agent.keeper import Keeper
from agent.kernel.deferred import Deferred
from agent.kernel.live import LiveKernel
from agent.log import Log
from agent.metrics import Metrics
from agent.status import State, Status
from rules.model import Chain
from tests.daemon.running import Node, Running, comes_to_forward, forwarded, handles
from tests.spaces import (
    ROOT,
    eventually,
    has_initial_pids,
    legacy,
    manifest,
    observed,
    pod,
    run,
    using,
    vm,
    within,
)


@pytest.fixture
def served(node: Node, blue: str) -> Iterator[tuple[Running, str]]:
    """A daemon that has done all there is to do."""
    node.save("a.yaml", manifest(blue, "22,8000-8010/udp"))
    with node.running() as daemon:
        yield daemon, blue


def nft(netns: str, script: str) -> int:
    """Somebody's nft, and its pid: `ip` becomes `nft`."""
    words = ("ip", "netns", "exec", netns, "nft", "-f", "-")
    child = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=ROOT)
    child.communicate(os.fsencode(script), timeout=20)
    assert child.returncode == 0
    return child.pid


def a_rule(netns: str) -> str:
    """Words that name one rule of ours."""
    live = next(one for one in observed(netns).live if one.rule.chain is Chain.PREROUTING)
    return f"inet portranger prerouting handle {live.handle}"


BREAKAGES = {
    "everything is flushed": "flush ruleset",
    "our table is deleted": "delete table inet portranger",
    "our rules are flushed": "flush table inet portranger",
    "one rule is deleted": "delete rule {rule}",
    "a rule is added": "add rule inet portranger prerouting tcp dport 9999 dnat ip to 10.0.2.2",
    "a rule is made to accept": "insert rule inet portranger prerouting accept",
    "a rule is added at which libnftables aborts": (
        'add rule inet portranger prerouting iifname "\udcff" accept'
    ),
    "a chain is added": "add chain inet portranger mine",
    "it is put to sleep": "add table inet portranger {{ flags dormant; }}",
}


def test_whatever_others_do_is_undone_and_told_with_their_name_and_pid(
    served: tuple[Running, str],
) -> None:
    daemon, netns = served
    wanted = {live.rule for live in observed(netns).live}
    for times, (what, script) in enumerate(BREAKAGES.items(), 1):
        time.sleep(1.05 if times % 5 == 0 else 0)  # seven in a second would be a fight
        pid = nft(netns, script.format(rule=a_rule(netns)))
        assert eventually(lambda: daemon.standing(netns)["drifts"] == times), what  # noqa: B023
        assert daemon.standing(netns)["last_drift"]["process"] == "nft", what
        told = daemon.standing(netns)["last_drift"]["pid"]
        assert told == pid if has_initial_pids() else told > 0, what
        seen = observed(netns)
        assert {live.rule for live in seen.live} == wanted, what
        assert not seen.foreign, what
        assert not seen.unsound, what
    assert daemon.metric("drift_repaired_total", process="nft") == len(BREAKAGES)
    assert daemon.metric("drift_repaired_total") == len(BREAKAGES)
    assert len(daemon.said("drift repaired", process="nft", netns=netns)) == len(BREAKAGES)
    assert daemon.standing(netns)["state"] == "in sync"


def test_only_what_was_broken_is_written_again(served: tuple[Running, str]) -> None:
    _, netns = served
    before = handles(netns)
    nft(netns, f"delete rule {a_rule(netns)}")
    assert eventually(lambda: len(handles(netns)) == len(before))
    assert len(handles(netns) & before) == len(before) - 1


def test_a_setting_that_others_change_is_mended_at_the_next_resync(node: Node, blue: str) -> None:
    node.configure(resync_seconds=1)
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        within(blue, "sysctl", "-qw", "net.ipv4.ip_forward=0")
        assert eventually(
            lambda: within(blue, "sysctl", "-n", "net.ipv4.ip_forward").strip() == "1", 5
        )
        assert daemon.says("drift repaired", process="unknown")


# --------------------------------------------------------------------------------------- quiet


def settled_passes(daemon: Running) -> float:
    """How often it has looked, once it has stopped looking."""
    last = [-1.0, daemon.metric("passes_total")]
    while last[-1] != last[-2]:
        assert len(last) < 100, "it never comes to rest"
        time.sleep(0.1)
        last.append(daemon.metric("passes_total"))
    return last[-1]


def test_our_own_commits_do_not_wake_us(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = settled_passes(daemon)
        for turn in range(1, 6):
            node.save("a.yaml", manifest(blue, str(22 + turn)))
            assert comes_to_forward(blue, f"tcp {22 + turn}")
        assert settled_passes(daemon) == before + 5
        assert daemon.metric("commits_total") == 6
        assert daemon.metric("drift_repaired_total") == 0


def test_what_others_do_in_their_own_tables_is_looked_at_and_left_alone(
    served: tuple[Running, str],
) -> None:
    daemon, netns = served
    before = handles(netns)
    commits = daemon.metric("commits_total")
    nft(netns, "add table ip theirs\nadd chain ip theirs mine")
    settled_passes(daemon)
    assert daemon.metric("commits_total") == commits
    assert daemon.metric("drift_repaired_total") == 0
    assert handles(netns) == before
    assert "theirs" in within(netns, "nft", "list", "ruleset")


def test_an_idle_daemon_does_nothing_at_all(served: tuple[Running, str], red: str) -> None:
    """Not even when something happens in a namespace that is none of its own."""
    daemon, _ = served
    passes, cpu = settled_passes(daemon), daemon.cpu_seconds()
    for _ in range(20):
        nft(red, "add table ip theirs\ndelete table ip theirs")
    lines = len(daemon.said())
    assert settled_passes(daemon) == passes
    assert len(daemon.said()) == lines
    assert daemon.cpu_seconds() - cpu < 0.1


# ----------------------------------------------------------------------------------- who fights us

FIGHT = 2.0  # seconds
FLUSH = """
i=0
while [ $i -lt 100000 ]; do nft flush ruleset; i=$((i+1)); echo; done
"""


def test_who_fights_us_is_met_with_back_off_and_not_with_a_busy_loop(
    served: tuple[Running, str],
) -> None:
    daemon, netns = served
    commits, cpu = daemon.metric("commits_total"), daemon.cpu_seconds()
    words = ("ip", "netns", "exec", netns, "sh", "-c", FLUSH)
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) as fighter:
        try:
            time.sleep(FIGHT)
        finally:
            fighter.kill()
            flushes = len(fighter.communicate()[0])
    commits = daemon.metric("commits_total") - commits
    assert 5 <= commits <= 12
    assert flushes > 4 * commits
    assert daemon.cpu_seconds() - cpu < FIGHT / 4
    assert comes_to_forward(netns, "tcp 22", "udp 8000-8010", seconds=2 * FIGHT)
    assert daemon.standing(netns)["last_drift"]["process"] == "nft"


def test_who_waits_with_a_repair_does_not_say_that_all_is_well(
    served: tuple[Running, str],
) -> None:
    daemon, netns = served
    for _ in range(50):
        nft(netns, "flush ruleset")
        if daemon.standing(netns)["state"] == "failing":
            break
    standing = daemon.standing(netns)
    assert standing["state"] == "failing"
    assert standing["why"].startswith("nft (pid")
    assert daemon.get("/readyz")[0] == http.client.SERVICE_UNAVAILABLE
    assert daemon.is_in("in sync", netns)


def test_a_fight_in_one_namespace_keeps_no_other_waiting(
    node: Node, served: tuple[Running, str], red: str
) -> None:
    _, netns = served
    words = ("ip", "netns", "exec", netns, "sh", "-c", FLUSH)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT) as fighter:
        try:
            for port in range(100, 110):
                node.save("b.yaml", manifest(red, str(port), "other"))
                assert comes_to_forward(red, f"tcp {port}")
        finally:
            fighter.kill()


def test_forwarding_that_somebody_turns_off_is_turned_on_again(
    served: tuple[Running, str],
) -> None:
    _, netns = served
    run("ip", "netns", "exec", netns, "sysctl", "-qw", "net.ipv4.ip_forward=0")
    forwards = ("ip", "netns", "exec", netns, "cat", "/proc/sys/net/ipv4/ip_forward")
    assert eventually(lambda: run(*forwards).stdout == "1\n")


# ---------------------------------------------------------------------------- without events


def test_what_others_do_to_the_legacy_tables_is_found_by_the_timer(blue: str) -> None:
    now = [1000.0]
    log = Log(io.StringIO(), clock=time.time)
    metrics = Metrics(lambda: Status(version="", pid=0, started=0.0), lambda _: {})
    with using("iptables"), closing(LiveKernel("iptables", later=Deferred())) as kernel:
        keeper = Keeper(kernel, log, metrics, clock=lambda: now[0])
        keeper.want([vm("a", "22", netns=blue)])
        assert keeper.work(lambda: None, lambda: False)
        assert forwarded(blue) == {"tcp 22"}
        legacy(blue, "-F PORTRANGER-PREROUTING")
        assert not keeper.work(lambda: None, lambda: False)
        now[0] = keeper.due
        assert now[0] == 1000.0 + keeping.TIMED_LOOK
        assert keeper.work(lambda: None, lambda: False)
        assert forwarded(blue) == {"tcp 22"}
        (standing,) = keeper.standings
        assert standing.state is State.IN_SYNC
        assert standing.drifts == 1


def test_the_daemon_with_the_legacy_tables(node: Node, blue: str) -> None:
    """What it starts ends with it, however that comes about."""
    node.configure(backend="iptables")
    node.save("a.yaml", manifest(blue, "22"))
    with using("iptables"), node.running() as daemon:
        assert daemon.standing(blue)["backend"] == "iptables"
        node.save("a.yaml", manifest(blue, "23"))
        assert comes_to_forward(blue, "tcp 23")
        workers = daemon.workers()
        assert workers
        daemon.kill()
        assert eventually(lambda: not any(map(is_running, workers)))
        with node.running() as again:
            workers = again.workers()
            again.stop()
            assert eventually(lambda: not any(map(is_running, workers)))


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_pods_are_told_apart_in_drift(node: Node, blue: str) -> None:
    with pod() as other:
        node.save("a.yaml", manifest(blue, "22", "one"))
        node.save("b.yaml", manifest(other, "22", "two"))
        with node.running() as daemon:
            before = handles(other)
            nft(blue, "flush ruleset")
            assert eventually(lambda: daemon.standing(blue)["drifts"] == 1)
            assert daemon.standing(other)["last_drift"] is None
            assert handles(other) == before
