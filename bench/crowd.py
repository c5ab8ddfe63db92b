"""What many namespaces cost: a node of its own with hundreds of them, and the daemon there.

They live in a private mount namespace that a shell holds: whatever happens to us, they are gone
with it, all at once, and nobody else on the machine sees them come or go.
"""

import http.client
import itertools
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from agent.kernel.netns import inside, opened
from agent.kernel.nftables import generation_of, netlink
from bench.measure import Number, Table, numbers
from bench.process import PATIENCE, Daemon, configure, manifest, running, save, scratch, until

COUNT = 1000
SOME = 100
RANGES = ("1000-1999/tcp", "3000-3999/tcp", "5000-5999/udp", "7000-7999/udp")
OTHER_RANGES = (*RANGES[:3], "7000-7998/udp")
LISTEN = "127.0.0.1:9788"
ROUNDS = 9
RESYNCS = 3
IDLE = 10.0  # seconds
RESYNC = 5  # seconds, while it is measured
START_BOUND = 3.0  # seconds
RESYNC_BOUND = 0.5  # seconds
IDLE_BOUND = 0.2  # % of a core
MEMORY_BOUND = 80.0  # MiB
SOME_MEMORY_BOUND = 64.0  # MiB
BUILD = """
set -eu
mount -t tmpfs tmpfs /run/netns
ip link set lo up
seq $2 | sed 's/^/netns add vm/' | ip -batch -
seq $2 | while read -r number; do ip -n vm$number -batch "$1"; done
echo built
exec cat
"""
UNSHARE = ("unshare", "--mount", "--net", "--propagation", "private")
# No bridges: while the kernel takes down a thousand, nobody gets a new namespace for 20 seconds.
LINKS = """\
link add eth0 type veth peer name k6t-eth0
link set eth0 up
link set k6t-eth0 up
addr add 192.0.2.2/24 dev eth0
addr add 10.0.2.1/24 dev k6t-eth0
"""


def crowd() -> Table:
    """From the first start to the next one."""
    with scratch() as folder, _node(folder, COUNT) as node:
        found: list[Number] = []
        manifests = _declared(folder, COUNT, resync_seconds=RESYNC)
        first = "start until ready, rules to be made"
        with _started(first, folder, node, found, START_BOUND) as daemon:
            found += _resync(daemon, node)
            configure(folder, listen=LISTEN)
            found.append(_timed("reload, all looked at from the ground up", daemon, daemon.reload))
            daemon.rests(RESYNC + 1)  # until the last resync of before
            found.append(_saved(daemon, node, manifests))
            found.append(_stranger(daemon, node))
            found += _scraped(daemon, node)
            found.append(_idle(daemon))
            found += _held(daemon)
        with _started("start until ready, rules there", folder, node, found):
            pass
    return numbers(Table((f"{COUNT} namespaces of {len(RANGES)} ranges each",)), found)


def some() -> Table:
    """What a daemon holds that has done its work in a hundred namespaces, and been asked."""
    with scratch() as folder, _node(folder, SOME) as node:
        _declared(folder, SOME, resync_seconds=RESYNC)
        found: list[Number] = []
        with _started("start until ready", folder, node, found, count=SOME) as daemon:
            _one_resync(daemon, node, SOME)
            name = "resident memory, idle"
            bound = SOME_MEMORY_BOUND
            found.append(Number(name=name, value=daemon.memory, unit="MiB", bound=bound))
    return numbers(Table((f"{SOME} namespaces of {len(RANGES)} ranges each",)), found)


def _declared(folder: Path, count: int, *, resync_seconds: int) -> Path:
    """A manifest for each namespace; where they are."""
    manifests = configure(folder, listen=LISTEN, resync_seconds=resync_seconds)
    for number in range(1, count + 1):
        save(manifests / f"vm{number}.yaml", manifest(f"vm{number}", f"vm{number}", RANGES))
    return manifests


@contextmanager
def _node(folder: Path, count: int) -> Iterator[int]:
    """A node with its namespaces; the pid of the shell that holds them."""
    links = folder / "links"
    links.write_text(LINKS)
    Path("/run/netns").mkdir(exist_ok=True)
    child = subprocess.Popen(
        [*UNSHARE, "sh", "-c", BUILD, "sh", links, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout
        assert child.stdout.readline() == b"built\n", "the namespaces could not be made"
        yield child.pid
    finally:
        child.communicate(timeout=PATIENCE)


def _inside(node: int) -> tuple[str, ...]:
    return ("nsenter", "--target", str(node), "--mount", "--net")


@contextmanager
def _started(  # noqa: PLR0913, PLR0917 - what, where, and what is told of it
    name: str,
    folder: Path,
    node: int,
    found: list[Number],
    bound: float | None = None,
    count: int = COUNT,
) -> Iterator[Daemon]:
    started = time.monotonic()
    with running(folder, _inside(node)) as daemon:
        daemon.says("READY=1")
        found += [
            Number(name=name, value=time.monotonic() - started, unit="s", bound=bound),
            Number(name="  its processor time", value=daemon.processor_seconds, unit="s"),
        ]
        assert _metric(node, 'portranger_namespaces{state="in_sync"}') == count
        yield daemon


def _resync(daemon: Daemon, node: int) -> list[Number]:
    """The quickest of a few, as others may keep the machine busy."""
    taken = min(_one_resync(daemon, node) for _ in range(RESYNCS))
    return [
        Number(name="resync, nothing to do", value=taken[0], unit="s", bound=RESYNC_BOUND),
        Number(name="  its processor time", value=taken[1], unit="s"),
    ]


def _one_resync(daemon: Daemon, node: int, count: int = COUNT) -> tuple[float, float]:
    """The next that looks at all, finds nothing to do, and is not met by our own questions."""
    looked, commits = "portranger_reconcile_duration_seconds_count", "portranger_commits_total"
    for _ in range(5):
        daemon.rests(0.5)
        before = _metric(node, looked), _metric(node, commits)
        daemon.rests()
        taken = daemon.works(2 * RESYNC)
        if (_metric(node, looked), _metric(node, commits)) == (before[0] + count, before[1]):
            return taken
    raise TimeoutError("no resync had the daemon to itself")


def _timed(name: str, daemon: Daemon, action: Callable[[], object]) -> Number:
    daemon.rests()
    started = time.monotonic()
    action()
    return Number(name=name, value=time.monotonic() - started, unit="s")


def _saved(daemon: Daemon, node: int, manifests: Path) -> Number:
    """One of all the manifests is saved; its rules have changed when their generation has."""
    vm = f"vm{COUNT // 2}"
    netns = f"/proc/{node}/root/run/netns/{vm}"
    with opened(netns) as descriptor, inside(descriptor, netns):
        asking = netlink()
    with asking:
        texts = itertools.cycle(manifest(vm, vm, ranges) for ranges in (OTHER_RANGES, RANGES))
        file = manifests / f"{vm}.yaml"
        taken = [_changed(daemon, file, next(texts), asking) for _ in range(ROUNDS)]
    return Number(name="one file saved until its rules are there", value=_middle(taken), unit="ms")


def _changed(daemon: Daemon, file: Path, text: str, asking: socket.socket) -> float:
    daemon.rests()
    before, started = generation_of(asking), time.perf_counter()
    save(file, text)
    until(lambda: generation_of(asking) != before)
    return (time.perf_counter() - started) * 1000


def _stranger(daemon: Daemon, node: int) -> Number:
    """What a namespace costs that no manifest names."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        daemon.rests()
        before = daemon.processor_seconds
        for verb in ("add", "del"):
            subprocess.run([*_inside(node), "ip", "netns", verb, "stranger"], check=True)
            daemon.rests()
        taken.append((daemon.processor_seconds - before) * 1000)
    name = "processor, as another's namespace comes, goes"
    return Number(name=name, value=_middle(taken), unit="ms")


def _scraped(daemon: Daemon, node: int) -> list[Number]:
    wall: list[float] = []
    processor: list[float] = []
    page = b""
    for _ in range(ROUNDS):
        daemon.rests(1.1)  # or it would answer with the numbers of before
        used, started = daemon.processor_seconds, time.perf_counter()
        page = _page(node)
        wall.append((time.perf_counter() - started) * 1000)
        processor.append((daemon.processor_seconds - used) * 1000)
    return [
        Number(name=f"/metrics, {len(page) // 1024} KiB", value=_middle(wall), unit="ms"),
        Number(name="  its processor time", value=_middle(processor), unit="ms"),
    ]


def _idle(daemon: Daemon) -> Number:
    daemon.rests(0.5)
    before, started = daemon.processor_seconds, time.monotonic()
    time.sleep(IDLE)
    used = (daemon.processor_seconds - before) / (time.monotonic() - started)
    return Number(name="idle, of a core", value=100 * used, unit="%", bound=IDLE_BOUND)


def _held(daemon: Daemon) -> list[Number]:
    return [
        Number(name="memory after all this", value=daemon.memory, unit="MiB", bound=MEMORY_BOUND),
        Number(name="open descriptors", value=daemon.descriptors, unit=""),
        Number(name="  at the most, in a start or reload", value=daemon.most_descriptors, unit=""),
    ]


def _metric(node: int, name: str) -> float:
    lines = _page(node).decode().splitlines()
    (value,) = (line.removeprefix(name) for line in lines if line.startswith(f"{name} "))
    return float(value)


def _page(node: int) -> bytes:
    """Asked beside the shell: the daemon itself is now in this namespace, now in that."""
    netns = f"pid:{node}"
    with (
        opened(netns) as descriptor,
        inside(descriptor, netns),
        closing(http.client.HTTPConnection(LISTEN, timeout=PATIENCE)) as connection,
    ):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == http.HTTPStatus.OK
        return answer.read()


def _middle(taken: list[float]) -> float:
    return statistics.median(taken)
