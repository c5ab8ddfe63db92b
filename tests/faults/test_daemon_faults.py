"""What can happen to the daemon: killed at any moment, namespaces that vanish under it, strangers
who race it, full disks, lost events, crowds and storms. It ends in the state that is wanted, or in
one that was, and says what it could not do."""

from __future__ import annotations

import ctypes
import functools
import gc
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from agent.errors import NotPermitted
from agent.keeper import Keeper
from agent.kernel.deferred import Deferred
from agent.kernel.events import Events, Lost, Moved
from agent.kernel.kinds import Beat, Flushed, Generation, Known, Namespace
from agent.kernel.live import LiveKernel, LiveNamespace
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from agent.log import Log
from agent.metrics import Metrics
from agent.status import Standing, State, Status
from rules.model import Address, Machine, Members, Observed, Peers, Rule, Surroundings
from rules.plan import Plan
from tests.daemon.running import Node, Running, comes_to_forward, forwarded
from tests.spaces import (
    SURROUNDINGS,
    eventually,
    ip,
    manifest,
    nft,
    observed,
    pod,
    run,
    unused_name,
    vm,
    wanted,
    within,
)


class Silent:
    """Takes what is logged, and keeps the last of it."""

    last = ""

    def write(self, text: str) -> None:
        self.last = text

    def flush(self) -> None:
        """There is nothing to flush."""


@pytest.fixture(autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    while Keeping.kernels:
        Keeping.kernels.pop().close()


class Keeping:
    """A keeper of its own in this process, with a clock that moves when told."""

    kernels: ClassVar[list[LiveKernel]] = []  # to be closed

    def __init__(self, kernel: LiveKernel | MemoryKernel) -> None:
        if isinstance(kernel, LiveKernel):
            self.kernels.append(kernel)
        self.now, self.date = 1000.0, time.time()
        self.log = Silent()
        self.metrics = Metrics(lambda: Status(version="", pid=0, started=0.0), lambda _: {})
        self.keeper = Keeper(
            kernel,
            Log(self.log, clock=lambda: self.date),
            self.metrics,
            clock=lambda: self.now,
            calendar=lambda: self.date,
        )

    def want(self, *machines: Machine) -> None:
        self.keeper.want(machines)
        self.work()

    def work(self) -> bool:
        return self.keeper.work(lambda: None, lambda: False)

    def standing(self, netns: str) -> Standing:
        (found,) = (one for one in self.keeper.standings if one.netns == netns)
        return found

    def settle(self) -> None:
        """Work, and let the time pass that it takes."""
        for _ in range(50):
            if self.keeper.due > self.now + 100:
                return
            self.now = max(self.now, self.keeper.due)
            self.work()
        raise AssertionError(f"it never comes to rest: {self.keeper.standings}")


# ------------------------------------------------------------------------------- killed anywhere

KILLS = 200
OLD, NEW = "100-199,300/udp,22", "150-250,400-410/udp,23,24-30/udp"


def rules_of(netns: str) -> frozenset[Rule]:
    seen = observed(netns)
    assert not seen.foreign
    assert not seen.unsound
    return frozenset(live.rule for live in seen.live)


class Writer:
    """Saves now the one state and now the other."""

    def __init__(self, node: Node, spaces: Iterable[str]) -> None:
        self._node, self._spaces = node, tuple(spaces)
        self.state = OLD
        self.save()

    def save(self) -> None:
        """The other state, in every namespace."""
        self.state = NEW if self.state == OLD else OLD
        for netns in self._spaces:
            self._node.save(f"{netns}.yaml", manifest(netns, self.state, netns))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One save after another, as fast as it may."""
        stop = threading.Event()

        def write() -> None:
            while not stop.wait(0.003):
                self.save()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def test_killed_anywhere_it_leaves_the_old_rules_or_the_new_and_the_next_start_converges(
    node: Node, blue: str, red: str
) -> None:
    spaces = (blue, red)
    chance = random.Random(20261116)
    states = {
        (netns, state): wanted(netns, [vm(netns, state)]).rules
        for netns in spaces
        for state in (OLD, NEW)
    }
    writer = Writer(node, spaces)
    met: Counter[tuple[str, bool]] = Counter()
    with node.stem() as start:
        for kill in range(KILLS):
            daemon = start()
            try:
                if kill % 3 == 2:  # in the middle of its start, with something to do
                    time.sleep(chance.uniform(0, 0.04))
                else:
                    assert daemon.says("ready"), daemon.log.read_text()
                    for netns in spaces:
                        assert rules_of(netns) == states[netns, writer.state], f"after {kill} kills"
                    assert not daemon.said("warning"), "what it had stored is whole"
                    with writer.writing():
                        time.sleep(chance.uniform(0, 0.05))
                        daemon.kill()
            finally:
                daemon.kill()
            for netns in spaces:
                held = rules_of(netns)
                assert held in (states[netns, OLD], states[netns, NEW]), f"kill {kill}: a mix"
                met[netns, held == states[netns, NEW]] += 1
            writer.save()
    assert len(met) == 2 * len(spaces), f"always killed in the same state: {met}"


# --------------------------------------------------------------------- namespaces that vanish


Step = Callable[[str, str], None]  # in which namespace, and what comes next


def nothing(netns: str, what: str) -> None:
    """What happens between our steps, most of the time."""


class Stepped:
    """A namespace that tells of each step before it is taken."""

    def __init__(self, inner: Namespace, step: Step, netns: str) -> None:
        self._inner, self._step = inner, functools.partial(step, netns)
        self.backend, self.reason = inner.backend, inner.reason

    @property
    def identity(self) -> object:
        return self._inner.identity

    @property
    def nsid(self) -> object:
        return self._inner.nsid

    @property
    def generation(self) -> Generation | None:
        return self._inner.generation

    @property
    def known(self) -> Known | None:
        return self._inner.known

    @property
    def legacy(self) -> bytes:
        return self._inner.legacy

    def surroundings(self) -> Surroundings:
        self._step("surroundings")
        return self._inner.surroundings()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        self._step("observe")
        return self._inner.observe(sysctls)

    def commit(self, plan: Plan) -> None:
        self._step("commit")
        self._inner.commit(plan)

    def exclusive(self) -> AbstractContextManager[None]:
        self._step("lock")
        return self._inner.exclusive()

    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        self._step("sweep")
        self._inner.sweep(rules, sets, guests)


class SteppedKernel(LiveKernel):
    """The real kernel, with something that happens between our steps."""

    step: Step = staticmethod(nothing)

    @contextmanager
    def opened(self, netns: str, known: Known | None = None) -> Iterator[LiveNamespace]:
        self.step(netns, "open")
        with super().opened(netns, known) as inner:
            self.step(netns, "opened")
            yield Stepped(inner, self.step, netns)  # type: ignore[misc]  # as good as one
            self.step(netns, "close")

    def afterwards(self, beat: Beat = lambda: None) -> Flushed:
        self.step("", "afterwards")
        return super().afterwards(beat)


PLACE = (
    "link add eth0 type bridge",
    "addr add 192.0.2.2/24 dev eth0",
    "link add k6t-eth0 type bridge",
    "addr add 10.0.2.1/24 dev k6t-eth0",
)


@contextmanager
def fleeting() -> Iterator[str]:
    name = unused_name()
    try:
        yield name
    finally:
        run("ip", "netns", "del", name, code=None)


def build(netns: str) -> None:
    run("ip", "netns", "add", netns)
    ip(netns, *PLACE)


def test_a_namespace_may_vanish_between_any_two_steps(blue: str) -> None:
    """And come back, or not: whoever shares the node is served all the same."""
    steps: list[str] = []
    for last in range(100):
        with fleeting() as netns:
            steps = vanishing(netns, blue, last)
        if len(steps) <= last:
            break
    assert {"open", "observe", "commit", "afterwards"} <= set(steps)
    assert 8 < len(steps) < 100, "the last time, nothing vanished"


def vanishing(netns: str, other: str, last: int) -> list[str]:
    """The steps up to this one, before which the namespace vanishes; fewer if there is none."""
    steps: list[str] = []
    kernel = SteppedKernel(later=Deferred())
    keeping = Keeping(kernel)
    build(netns)
    keeping.want(vm("a", "22", netns=netns))

    def step(_: str, what: str) -> None:
        steps.append(what)
        if len(steps) == last + 1:
            run("ip", "netns", "del", netns)

    kernel.step = step
    port = str(1000 + last)
    keeping.want(vm("a", "22-23,80/udp", netns=netns), vm("b", port, netns=other))
    kernel.step = nothing
    assert forwarded(other) == {f"tcp {port}"}, steps
    keeping.keeper.arrived()
    keeping.work()
    gone = len(steps) > last
    expected = State.PENDING if gone else State.IN_SYNC
    assert keeping.standing(netns).state is expected, f"{steps}: {keeping.log.last}"
    if gone:
        build(netns)
        keeping.keeper.arrived()
        keeping.work()
    assert keeping.standing(netns).state is State.IN_SYNC, steps
    assert forwarded(netns) == {"tcp 22-23", "udp 80"}
    return steps


# ------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize("often", [3, 12], ids=["now and then", "longer than we are patient"])
def test_a_stranger_who_edits_before_every_commit_of_ours(blue: str, red: str, often: int) -> None:
    kernel = SteppedKernel(later=Deferred())
    keeping = Keeping(kernel)
    keeping.want(vm("a", OLD, netns=blue))
    raced: list[str] = []
    scripts = (
        "delete table inet portranger",
        "add table inet portranger { chain mine { } ; }",
    )

    def race(netns: str, what: str) -> None:
        if (netns, what) == (blue, "commit") and len(raced) < often:
            script = scripts[len(raced) % 2]
            nft(blue, script)
            raced.append(script)

    kernel.step = race
    keeping.want(vm("a", NEW, netns=blue), vm("b", "22", netns=red))
    assert forwarded(red) == {"tcp 22"}
    keeping.settle()
    assert len(raced) == often
    assert keeping.standing(blue).state is State.IN_SYNC
    assert rules_of(blue) == wanted(blue, [vm("a", NEW)]).rules


def test_one_namespace_that_may_not_be_entered_keeps_no_other_from_its_rules(
    blue: str, red: str
) -> None:
    class Forbidding(LiveKernel):
        tries = 0
        forbidden: str | None = blue

        @contextmanager
        def opened(self, netns: str, known: Known | None = None) -> Iterator[LiveNamespace]:
            if netns == self.forbidden:
                self.tries += 1
                raise NotPermitted(f"may not enter {netns}", "Run with CAP_SYS_ADMIN")
            with super().opened(netns, known) as one:
                yield one

    kernel = Forbidding(later=Deferred())
    keeping = Keeping(kernel)
    keeping.want(vm("a", "22", netns=blue), vm("b", "22", netns=red))
    assert forwarded(red) == {"tcp 22"}
    standing = keeping.standing(blue)
    assert standing.state is State.FAILING
    assert "CAP_SYS_ADMIN" in standing.why
    for second in range(600):
        keeping.now += 1.0
        keeping.work()
        if second == 300:
            keeping.want(vm("a", "22", netns=blue), vm("b", "23", netns=red))
            assert forwarded(red) == {"tcp 23"}
    assert 10 <= kernel.tries <= 25, "it backs off, and never gives up"
    kernel.forbidden = None
    keeping.now += 60.0
    keeping.work()
    assert keeping.standing(blue).state is State.IN_SYNC
    assert forwarded(blue) == {"tcp 22"}


# --------------------------------------------------------------------------------- lost events


BURST = """
import sys, nftables
stranger = nftables.Nftables()
for turn in range(int(sys.argv[1])):
    stranger.cmd("delete table ip theirs" if turn % 2 else "add table ip theirs")
stranger.cmd("flush ruleset")
"""


def burst(netns: str, count: int) -> None:
    """So many commits in a namespace, and a last one that takes our rules away."""
    within(netns, sys.executable, "-c", BURST, str(count))


def test_who_could_not_hear_everything_looks_at_everything(node: Node, blue: str, red: str) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    node.save("b.yaml", manifest(red, "22", "two"))
    with node.running() as daemon:
        daemon.tell(signal.SIGSTOP)
        burst(blue, 5000)
        nft(red, "flush ruleset")  # of which there is no room to tell
        daemon.tell(signal.SIGCONT)
        assert comes_to_forward(blue, "tcp 22")
        assert comes_to_forward(red, "tcp 22")
        assert eventually(lambda: daemon.metric("events_lost_total") >= 1)
        assert daemon.said("events lost")
        nft(red, "flush ruleset")
        assert comes_to_forward(red, "tcp 22")
        assert eventually(lambda: daemon.standing(red)["last_drift"]["process"] == "nft")


def test_a_small_room_for_events_is_told_to_be_too_small(blue: str) -> None:
    with closing(Events(room=4096)) as events:
        keeping = Keeping(LiveKernel(later=Deferred(), events=events))
        keeping.want(vm("a", "22", netns=blue))
        burst(blue, 100)
        heard = events.read()
        assert Lost() in heard
        keeping.keeper.look_at_all()
        keeping.work()
        assert forwarded(blue) == {"tcp 22"}
        events.read()
        nft(blue, "add table ip theirs")
        assert [one.process for one in events.read() if isinstance(one, Moved)] == ["nft"]


# -------------------------------------------------------------------------------- where to store


def mounted(options: str, folder: Path) -> tuple[str, ...]:
    """Words that run others where a small disk of their own is mounted."""
    folder.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} tmpfs {folder} && exec "$@"'
    return ("unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh")


def test_a_state_directory_that_is_read_only(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running(*mounted("ro", node.state)) as daemon:
        assert "cannot lock" in str(daemon.said("warning")[0])
        for port in range(30, 50):
            node.save("a.yaml", manifest(blue, str(port)))
            assert comes_to_forward(blue, f"tcp {port}")
        node.save("a.yaml", "[")
        assert daemon.says("bad manifest")
        assert forwarded(blue) == {"tcp 49"}
        assert len(daemon.said("warning")) <= 4, "once is enough"
        node.remove("a.yaml")
        assert comes_to_forward(blue)


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_hundreds_of_manifests_that_cannot_be_stored_keep_it_busy_no_longer(
    node: Node, blue: str, options: str
) -> None:
    for number in range(300):
        text = manifest(blue, str(1000 + 2 * number), f"vm-{number}")
        (node.manifests / f"{number}.yaml").write_text(text)
    with node.running(*mounted(options, node.state)) as daemon:
        assert len(forwarded(blue)) == 300
        assert eventually(lambda: daemon.metric("state_writable") == 0)
        assert " files)" in daemon.status()["state"]
        size, used = daemon.log.stat().st_size, daemon.cpu_seconds()
        time.sleep(3)
        assert daemon.cpu_seconds() - used < 1.0
        assert daemon.log.stat().st_size - size < 1000
        about = [one["what"] for one in daemon.said("warning") if "cannot write" in one["what"]]
        assert len(about) == 1
        assert " files)" in about[0]


def test_a_state_directory_that_is_full(node: Node, blue: str) -> None:
    with node.running(*mounted("size=64k", node.state)) as daemon:
        inside = Path(f"/proc/{daemon.pid}/root") / node.state.relative_to("/")
        for number in range(40):
            node.save(f"{number}.yaml", manifest(blue, str(1000 + 2 * number), f"vm-{number}"))
        assert eventually(lambda: len(forwarded(blue)) == 40)
        assert daemon.says("warning")
        assert any("No space left" in one["what"] for one in daemon.said("warning"))
        assert eventually(lambda: daemon.metric("state_writable") == 0)
        assert "No space left" in daemon.status()["state"]
        stored = list((inside / "last-good").glob("*.json"))
        assert 5 < len(stored) < 20
        assert all(json.loads(one.read_bytes()) for one in stored), "whole, or not at all"
        # What could not be written is tried again, so one may be there for a moment.
        assert eventually(lambda: not list(inside.rglob("*.new")))
        for number in range(1, 40):
            node.remove(f"{number}.yaml")
        assert comes_to_forward(blue, "tcp 1000")
        assert eventually(lambda: len(list((inside / "last-good").glob("*.json"))) <= 1)
        node.save("0.yaml", manifest(blue, "99", "vm-0"))
        assert comes_to_forward(blue, "tcp 99")
        assert eventually(lambda: any("99" in one.read_text() for one in inside.rglob("*.json")))
        assert eventually(lambda: daemon.metric("state_writable") == 1), daemon.status()["state"]


# -------------------------------------------------------------------------------------- clocks


def test_a_calendar_that_jumps_is_nothing_to_anybody(blue: str) -> None:
    keeping = Keeping(LiveKernel(later=Deferred()))
    for port, years in (("22", 0.0), ("23", -0.1), ("24", 20.0), ("25", -50.0)):
        keeping.date += years * 365 * 86400
        keeping.want(vm("a", port, netns=blue))
        assert forwarded(blue) == {f"tcp {port}"}
        standing = keeping.standing(blue)
        assert standing.state is State.IN_SYNC
        assert standing.change is not None
        assert standing.change.at == keeping.date
        nft(blue, "flush ruleset")
        keeping.keeper.look_at_all()
        keeping.now += 10.0
        keeping.work()
        assert forwarded(blue) == {f"tcp {port}"}
        assert keeping.keeper.due > keeping.now + 100


# -------------------------------------------------------------------------------------- crowds

CROWD = 10_000
STORM, PACE = 10.0, 300  # seconds, and saves in each


def crowd(node: Node, netns: str) -> None:
    """Manifests most of which wait for a namespace of their own, while a few share one."""
    text = json.dumps(yaml.safe_load(manifest("NETNS", "4", "NAME")))
    for number in range(CROWD):
        here = netns if number % 100 == 0 else f"{netns}-{number}"
        mine = text.replace("NETNS", here).replace("NAME", f"vm-{number}")
        ports = mine.replace(": 4,", f": {1000 + number // 50},")
        (node.manifests / f"{number}.json").write_text(ports)


def test_ten_thousand_manifests(node: Node, blue: str) -> None:
    crowd(node, blue)
    with_none = node.start()
    try:
        assert with_none.says("started")
        time.sleep(0.3)  # which is in the middle of reading them
        assert not with_none.said("ready"), "it is too fast for this"
        with_none.stop()
    finally:
        with_none.kill()
    started = time.monotonic()
    with node.running() as daemon:
        first = time.monotonic() - started
        assert daemon.status()["manifests"] == CROWD
        assert len(forwarded(blue)) == CROWD // 100
        took = []
        for turn in range(3):
            started = time.monotonic()
            node.save("one-more.yaml", manifest(blue, f"{60000 + turn}", "one-more"))
            assert eventually(lambda: f"tcp {60000 + turn}" in forwarded(blue))  # noqa: B023
            took.append(time.monotonic() - started)
        assert daemon.get("/healthz")[0] == http.client.OK
        print(f"start {first:.1f} s, one more {min(took) * 1000:.0f} ms")  # noqa: T201
        assert first < 60


def test_a_storm_of_saves_ends_in_the_last_state(node: Node, blue: str, red: str) -> None:
    """With few descriptors to be had, and somebody else who wants to be served meanwhile."""
    with node.running("prlimit", "--nofile=256") as daemon:
        before = daemon.descriptors()
        started = time.monotonic()
        count = int(STORM * PACE)
        for turn in range(count):
            node.save(f"{turn % 7}.yaml", manifest(blue, str(1000 + 2 * turn), f"vm-{turn % 7}"))
            if turn % PACE == PACE // 2:
                answers(daemon, node, red, 100 + turn)
            time.sleep(max(0.0, started + turn / PACE - time.monotonic()))
        last = {f"tcp {1000 + 2 * turn}" for turn in range(count - 7, count)}
        assert eventually(lambda: forwarded(blue) == last)
        assert daemon.status()["problems"] == []
        assert eventually(lambda: daemon.descriptors() <= before + 4)
        assert daemon.metric("failures_total") == 0


def answers(daemon: Running, node: Node, netns: str, port: int) -> None:
    """It serves another namespace, and says that all is well."""
    node.save("other.yaml", manifest(netns, str(port), "other"))
    assert eventually(lambda: f"tcp {port}" in forwarded(netns))
    assert daemon.get("/healthz")[0] == http.client.OK


# --------------------------------------------------------------------------------- for months

RECONCILES, REAL, ROUNDS = 5_000, 200, 5


def kilobytes() -> int:
    """That are in use: what other tests have left of the heap is given back first, or whoever takes
    more would be given that."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def descriptors() -> Counter[str]:
    """What is open, by kind."""
    found: Counter[str] = Counter()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found[str(one.readlink()).partition(":")[0]] += 1
    return found


def grown(keeping: Keeping, netns: str, count: int) -> int:
    """How many KiB are added by so many reconciles, every other of which changes something."""
    before = kilobytes()
    machines = vm("a", "22", netns=netns), vm("a", "23", netns=netns)
    for turn in range(count):
        keeping.keeper.want([machines[turn // 2 % 2]])
        keeping.keeper.renew()
        assert keeping.work()
    assert keeping.standing(netns).state is State.IN_SYNC
    return kilobytes() - before


def grows_always(keeping: Keeping, netns: str, count: int) -> bool:
    """Whether memory is taken up in every round: by a leak it is, by a heap that settles not."""
    return min(grown(keeping, netns, count // ROUNDS) for _ in range(ROUNDS)) > 64


def test_descriptors_and_memory_stay_as_they_are(blue: str) -> None:
    """In a process of its own: other tests of this one open files and take memory as well."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        alone.submit(stay_as_they_are, blue).result()


def stay_as_they_are(netns: str) -> None:
    live = Keeping(LiveKernel(later=Deferred()))
    grown(live, netns, REAL // 4)
    before = descriptors()
    assert not grows_always(live, netns, REAL)
    # Another thread closes the sockets of commits.
    assert eventually(lambda: descriptors() <= before, 60), descriptors() - before
    memory = Keeping(MemoryKernel({"x": MemoryNamespace(SURROUNDINGS)}))
    grown(memory, "x", 1000)
    assert not grows_always(memory, "x", RECONCILES - REAL)


def test_memory_that_is_kept_at_every_turn_is_found() -> None:
    class Hoarder(Keeping):
        def work(self) -> bool:
            kept.append(b"x" * 2**19)  # much more than a heap gives back meanwhile
            return super().work()

    kept: list[bytes] = []
    assert grows_always(Hoarder(MemoryKernel({"x": MemoryNamespace(SURROUNDINGS)})), "x", REAL)


def test_the_daemon_itself_stays_as_it_is(node: Node, blue: str) -> None:
    """Saves, drift and namespaces that come and go, and what it holds open and takes up after."""

    def live(turns: int) -> None:
        for turn in range(turns):
            node.save("a.yaml", manifest(blue, str(1000 + turn), "one"))
            assert comes_to_forward(blue, f"tcp {1000 + turn}", seconds=5)
            if turn % 10 == 0:
                with pod() as other:
                    node.save("b.yaml", manifest(other, "22", "two"))
                    assert comes_to_forward(other, "tcp 22", seconds=5)
                node.remove("b.yaml")

    with node.running() as daemon:
        live(30)
        assert eventually(lambda: not daemon.standing("nowhere"))
        descriptors, memory = daemon.descriptors(), [resident(daemon)]
        for _ in range(ROUNDS):
            live(12)
            memory.append(resident(daemon))
        assert eventually(lambda: daemon.descriptors() <= descriptors + 1)
        assert min(after - before for before, after in pairwise(memory)) < 64, memory


def resident(daemon: Running) -> int:
    text = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])
