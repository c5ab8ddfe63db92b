"""Again and again, whoever gives node ports is killed in the middle of it: what is stored and what
the kernel holds never give a port to two, and nobody who stays is moved. This is done a hundred
times, or as often as the variable KILLS says."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from agent.kernel.deferred import Deferred
from agent.kernel.kinds import Known
from agent.kernel.live import LiveKernel
from agent.metrics import Metrics
from agent.publisher import Publisher
from agent.reconcile import keep
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from agent.status import Status
from rules.model import NODE, Chain, Protocol
from rules.node_ports import Bands
from rules.ports import PortRange
from rules.publish import Publishing
from rules.services import Service, ServicePort, ServiceType
from rules.values import replace
from tests.nodes import NODE4
from tests.spaces import NFTABLES, ip, kernel, space, vm

ROUNDS = int(os.environ.get("KILLS", "100"))
STEPS = 3  # for which there is time, if a child lives longest
LONGEST = 0.08  # seconds, however slow the machine is
MOST_STEPS = 1000
MEMORY = "/dev/shm"  # noqa: S108 - a disk is so slow that nobody would live to see the commit
BANDS = Bands(PortRange(30000, 30063))  # so few that what is freed is soon somebody else's
SELECTOR = (("app", "phone"),)
MACHINE = replace(
    vm("phone", "5000-5999"), labels=SELECTOR, addresses=(IPv4Address("198.51.100.7"),)
)
LASTING = {f"lasting-{number}": number + 1 for number in range(5)}  # and how many ports
CHANGING = {f"changing-{number}": number % 6 + 1 for number in range(12)}

Ports = Mapping[str, PortRange]
Step = dict[str, Service]


def service(name: str, count: int, wish: int | None = None) -> Service:
    ports = PortRange(5000, 5000 + count - 1)
    port = ServicePort(
        name="",
        protocol=Protocol.TCP,
        ports=ports,
        target=ports,
        node_ports=PortRange(wish, wish + count - 1) if wish else None,
    )
    return Service(
        namespace="default",
        name=name,
        type=ServiceType.NODE_PORT,
        ports=(port,),
        selector=SELECTOR,
    )


def wanted(turn: int, step: int) -> Step:
    """The Services of a step of a turn: some always, some now and then, some of these with a wish,
    which may be for what another has."""
    chance = random.Random(f"{turn}/{step}")
    found = {name: service(name, count) for name, count in LASTING.items()}
    for name, count in CHANGING.items():
        if chance.random() < 0.6:
            wish = chance.randrange(30000, 30058) if chance.random() < 0.3 else None
            found[name] = service(name, count, wish)
    return {str(one): one for one in found.values()}


class Giver:
    """All it takes to give node ports on a node, from the source's meaning to the kernel's rules:
    what is costly to make is made once, by who stays."""

    def __init__(self, netns: str, folder: Path) -> None:
        self.netns, self.folder = netns, folder
        self.metrics = Metrics(lambda: Status(version="", pid=0, started=0.0), lambda _: {})
        self.progress = mmap.mmap(-1, 4)  # the step that is being made; shared with who is killed
        self.child = self.turn = 0
        self.known: Known | None = None
        self.work(0, 1)
        self.stored, self.published = self.read()
        assert {name.split("/")[2] for name in self.stored} >= LASTING.keys()
        assert self.stored == self.published
        self.ways = [wanted(0, 0)]  # what the kernel may hold, and who was there since

    def work(self, turn: int, steps: int) -> None:
        """As the daemon does after a start."""
        store = Store(str(self.folder), complain)
        publisher = Publisher(store, self.metrics, Publishing(), BANDS)
        live = LiveKernel(NFTABLES, later=Deferred())
        before, known = None, self.known  # to list the table is slow, and tried elsewhere
        for step in range(steps):
            self.progress[:4] = step.to_bytes(4, "big")
            services = tuple(wanted(turn, step).values())
            publisher.want(Meaning(machines=(MACHINE,), services=services))
            publisher.select((MACHINE,), {}, ())
            with live.opened(self.netns, known) as namespace:
                before = keep(NODE, publisher.wish, namespace, before=before).desired
                known = namespace.known
            live.afterwards()
        live.close()

    def start(self, turn: int) -> None:
        """Somebody works until he is killed."""
        self.progress[:4] = bytes(4)
        self.turn, self.child = turn, os.fork()
        if self.child:
            return
        try:
            self.work(turn, MOST_STEPS)
        except BaseException:  # whatever it is, it must not become two pytests
            (self.folder / "failure").write_text(traceback.format_exc())
        finally:
            os._exit(1)

    def kill(self) -> None:
        """If there is still anybody: nobody else has heard of his end."""
        if not self.child:
            return
        os.kill(self.child, signal.SIGKILL)
        _, status = os.waitpid(self.child, 0)
        self.child = 0
        killed = os.WIFSIGNALED(status)
        assert killed, (self.folder / "failure").read_text()

    def read(self) -> tuple[Ports, Ports]:
        """What is stored, and what the kernel holds."""
        held = Store(str(self.folder), complain).node_ports()
        assert len({one.owner for one, _ in held}) == len(held)
        live: dict[str, set[PortRange]] = {}
        with kernel(NFTABLES).opened(self.netns) as namespace:
            seen = namespace.observe()
            self.known = namespace.known
        for one in seen.live:
            if one.rule.chain is Chain.PREROUTING and one.rule.ports:
                live.setdefault(one.rule.owner, set()).add(one.rule.ports)
        stored = {one.owner: ports for one, ports in held}
        published = {
            owner: ports
            for owner, ranges in live.items()
            for ports in ranges
            if not is_leftover(owner, ports, ranges, stored)
        }
        return stored, published

    def check(self) -> tuple[bool, bool]:
        """Whether what was stored and what was committed differ, and whether anything was."""
        steps = [
            wanted(self.turn, step) for step in range(int.from_bytes(self.progress[:4], "big") + 1)
        ]
        stored, published = self.read()
        assert nobody_shares(stored), (self.turn, stored)
        assert nobody_shares(published), (self.turn, published)
        for name in always([*self.ways, *steps]) & self.stored.keys():
            assert stored[name] == self.stored[name], (self.turn, name)
        self.ways = steps[-2:] if len(steps) > 1 else [*self.ways, *steps]
        for name in published.keys() & unchanged(self.ways):
            assert published[name] == stored[name], (self.turn, name)
        assert published.keys() <= {name for way in self.ways for name in way}
        found = published != stored, published != self.published
        self.stored, self.published = stored, published
        return found


def complain(what: str) -> None:
    """Nothing that was stored is ever corrupt."""
    raise AssertionError(what)


def is_leftover(owner: str, ports: PortRange, ranges: set[PortRange], stored: Ports) -> bool:
    """Whether a range is one that goes with the last transaction of a change: whoever is killed
    before that leaves it beside what has taken over."""
    if stored.get(owner) == ports:
        return False
    given = (one for other, one in stored.items() if other != owner)
    return stored.get(owner) in ranges or any(ports.overlaps(one) for one in given)


def nobody_shares(ports: Ports) -> bool:
    ranges = sorted(ports.values(), key=lambda one: one.first)
    apart = all(a.last < b.first for a, b in pairwise(ranges))
    return apart and all(BANDS.ports.first <= a.first <= a.last <= BANDS.ports.last for a in ranges)


def always(steps: Iterable[Step]) -> set[str]:
    """Who was there all the time, and named no ports."""
    each = [
        {name for name, one in step.items() if all(port.node_ports is None for port in one.ports)}
        for step in steps
    ]
    return set.intersection(*each)


def unchanged(steps: Sequence[Step]) -> set[str]:
    """Who wanted the same all the time."""
    first, *rest = steps
    return {name for name, one in first.items() if all(step.get(name) == one for step in rest)}


@contextmanager
def giving() -> Iterator[Giver]:
    with space() as netns, TemporaryDirectory(dir=MEMORY) as folder:
        ip(netns, "link add eth0 type bridge", "link set eth0 up", f"addr add {NODE4}/24 dev eth0")
        giver = Giver(netns, Path(folder))
        try:
            yield giver
        finally:
            giver.kill()


def test_nothing_is_given_twice_and_nobody_is_moved_by_a_kill() -> None:
    chance = random.Random(20260)
    torn = moved = 0
    with giving() as one, giving() as other:
        started = time.monotonic()
        one.work(0, STEPS)
        longest = min(time.monotonic() - started, LONGEST)
        one.ways += [wanted(0, step) for step in range(STEPS)]
        one.check()
        for turn in range(1, ROUNDS // 2 + 1):
            one.start(turn)
            other.start(ROUNDS + turn)
            started = time.monotonic()
            for giver in chance.sample((one, other), 2):
                lives = chance.uniform(0, longest) + started - time.monotonic()
                time.sleep(max(0.0, lives))
                giver.kill()
            for giver in (one, other):
                differs, done = giver.check()
                torn += differs
                moved += done
    assert torn, "no kill came between what is stored and what is committed"
    assert moved, "no kill came after what is committed"
