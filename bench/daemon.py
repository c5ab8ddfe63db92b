"""How soon the daemon acts: from a cause until a client's connection gets through."""

import errno
import itertools
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.kernel.lab import POD, Lab, built
from agent.kernel.live import LiveKernel
from agent.kernel.netns import RUN, inside, opened
from agent.kernel.probe import asks, echoing
from agent.reconcile import converge
from agent.sources.files import understood
from bench.measure import Action, Number, Table, interleaved, numbers, table
from bench.process import Daemon, configure, manifest, running, save, scratch, until
from rules import nft_script
from rules.desired import desire
from rules.model import Family, Protocol
from rules.plan import diff

PORT = 5000
CLOSED = ("22-22/tcp", "1000-8000/udp")
OPEN = (*CLOSED, "1000-8000/tcp")
SAVES = 30
FLUSHES = 15
ARRIVALS = 15
QUIET = 1.2  # seconds after which a row of repairs is forgotten: see agent.backoff
SAVE_BOUND = 50.0  # ms above nft
FLUSH_BOUND = 100.0  # ms


def save_to_port() -> Table:
    """A manifest is saved, against nft given a ready script: each until a connection succeeds."""
    prefix = f"prbench-{os.getpid()}"
    with (
        scratch() as folder,
        built(f"{prefix}-ours") as ours,
        built(f"{prefix}-theirs") as theirs,
        _guest(ours),
        _guest(theirs),
        _by_hand(theirs, folder / "change.nft") as by_hand,
    ):
        file = configure(folder) / "machine.yaml"
        closed, opening = (manifest("machine", ours.pod, ranges) for ranges in (CLOSED, OPEN))
        file.write_text(closed)
        with running(folder) as daemon:
            daemon.says("READY=1")

            def close() -> None:
                save(file, closed)
                until(lambda: _refused(ours))
                daemon.rests()

            def save_and_reach() -> None:
                save(file, opening)
                until(lambda: _answered(ours))

            actions = {
                "nft -f by hand": by_hand,
                "portranger, by its file": (close, save_and_reach),
            }
            taken = interleaved(actions, SAVES)
    hand, ours_taken = (statistics.median(times) for times in taken.values())
    return numbers(
        table("A range is added, until its ports can be reached", taken),
        [Number(name="more than by hand", value=ours_taken - hand, unit="ms", bound=SAVE_BOUND)],
    )


@contextmanager
def _by_hand(lab: Lab, script: Path) -> Iterator[Action]:
    """The same change of the same rules, where no daemon looks."""
    with opened(lab.pod) as descriptor, LiveKernel().opened(lab.pod) as namespace:
        links = namespace.surroundings()
        closed, opening = (
            desire(understood("by hand", manifest("machine", lab.pod, ranges)).machines, links)
            for ranges in (CLOSED, OPEN)
        )
        children: list[subprocess.Popen[bytes]] = []

        def wait() -> None:
            while children:
                assert children.pop().wait() == 0

        def close() -> None:
            wait()
            converge(lab.pod, closed, namespace)
            until(lambda: _refused(lab))
            script.write_text(nft_script.script(diff(lab.pod, opening, namespace.observe())))

        def change_and_reach() -> None:
            with inside(descriptor, lab.pod):
                children.append(subprocess.Popen(["nft", "-f", str(script)]))
            until(lambda: _answered(lab))

        try:
            yield close, change_and_reach
        finally:
            wait()


def flush_to_port() -> Table:
    """Somebody flushes all rules: from before their nft starts, and as long as clients notice."""
    with (
        scratch() as folder,
        built(f"prbench-{os.getpid()}") as lab,
        _guest(lab),
    ):
        save(configure(folder) / "machine.yaml", manifest("machine", lab.pod, OPEN))
        with running(folder) as daemon:
            daemon.says("READY=1")
            outages = (_outage(lab) for _ in range(2 * FLUSHES))
            found = list(itertools.islice(filter(None, outages), FLUSHES))
    assert len(found) == FLUSHES, "most repairs were sooner than a client could notice"
    taken = {
        "nft started until repaired": [whole for whole, _ in found],
        "of it, out of reach": [seen for _, seen in found],
    }
    worst = statistics.median(taken["nft started until repaired"])
    return numbers(
        table("A stranger flushes the ruleset, until the ports can be reached again", taken),
        [Number(name="until repaired", value=worst, unit="ms", bound=FLUSH_BOUND)],
    )


def _outage(lab: Lab) -> tuple[float, float] | None:
    """Milliseconds since nft was started, and since a client first noticed; None: it did not."""
    until(lambda: _answered(lab))
    time.sleep(QUIET)
    started = time.perf_counter()
    with opened(lab.pod) as descriptor, inside(descriptor, lab.pod):
        child = subprocess.Popen(["nft", "flush", "ruleset"])
    with child:
        try:
            until(lambda: _refused(lab), 1.0)
        except TimeoutError:
            return None
        noticed = time.perf_counter()
        until(lambda: _answered(lab))
        ended = time.perf_counter()
    assert child.returncode == 0
    return (ended - started) * 1000, (ended - noticed) * 1000


def arrival_to_port() -> Table:
    """A namespace gets the name that a manifest has been waiting for."""
    late = f"prbench-{os.getpid()}-late"
    with scratch() as folder:
        save(configure(folder) / "machine.yaml", manifest("machine", late, OPEN))
        with running(folder) as daemon:
            daemon.says("READY=1")
            taken = [_arrival(daemon, late) for _ in range(ARRIVALS)]
    return table(
        "A namespace appears, until the ports of its machine can be reached",
        {"mount started until reached": taken},
    )


def _arrival(daemon: Daemon, late: str) -> float:
    """Milliseconds from before a wired namespace gets that name; it goes again."""
    with built(f"prbench-{os.getpid()}") as lab, _guest(lab):
        assert _refused(lab)
        daemon.rests()
        started = time.perf_counter()
        with _named(lab.pod, late):
            until(lambda: _answered(lab))
            taken = time.perf_counter() - started
            daemon.rests()
            daemon.hears_nothing()
        daemon.says("1 pending")
    return taken * 1000


@contextmanager
def _named(netns: str, name: str) -> Iterator[None]:
    """Another name of a namespace, made as `ip netns add` makes one."""
    place = RUN / name
    place.touch()
    try:
        subprocess.run(["mount", "--bind", RUN / netns, place], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", place], check=True)
    finally:
        place.unlink()


@contextmanager
def _guest(lab: Lab) -> Iterator[None]:
    with echoing(lab, lab.guest, [(Protocol.TCP, PORT)]):
        yield


def _answered(lab: Lab) -> bool:
    """Whether a new connection from the client gets to the guest."""
    return _tried(lab) == PORT


def _refused(lab: Lab) -> bool:
    """Whether the pod itself turns the connection away: nobody is only slow."""
    return _tried(lab) == errno.ECONNREFUSED


def _tried(lab: Lab) -> int | None:
    """The port that answered, which is no small number; or what went wrong, at once as a rule."""
    with lab.socket(lab.client, Family.IP, socket.SOCK_STREAM) as client:
        client.settimeout(0.1)
        try:
            client.connect((str(POD[0].ip), PORT))
            return asks(client)
        except OSError as error:
            return error.errno
