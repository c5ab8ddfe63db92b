"""From the moment when it is known what a namespace should hold until it holds it: by the agent, in
its process, and by the processes a person would start instead. All find what they need prepared.
"""

import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Protocol as Shape

from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.sources.files import load
from bench.machines import machine
from bench.measure import Action, Number, Table, interleaved, numbers, ratio, table, undisturbed
from bench.process import manifest
from rules import nft_script
from rules.desired import Made, desire
from rules.model import Claim, Desired, Guest, Machine, Protocol, Surroundings
from rules.plan import diff
from rules.ports import PortRange
from rules.shapes import Lives
from rules.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Known

GUEST, GATEWAY = IPv4Address("10.0.2.2"), IPv4Address("10.0.2.1")
ROUNDS = 40
FEWER_ROUNDS = 9  # where a round takes a second
PHASES = SET_UP, CHANGE, REMOVAL = "set-up", "change", "removal"
OURS, LEGACY, NFT = "portranger, in process", "iptables-legacy-restore", "nft -f"
LEGACY_BOUND = 1.0
NFT_BOUND = 0.1
FROM_NOTHING_BOUND = 1.5  # of nft -f
MORE_BOUND = 5.0  # ms
PORTS_BOUND = 1.25  # 60,000 ports, of ten
MANY = 5000
PRESENT = (10, 100, 1000, MANY)
CHANGED = (1, 100, 500, 1000)
MANIFESTS = 1000
FIRST, STEP, WIDTH = 1000, 12, 6
# IPv4 only: what iptables does with one process.
LINKS = """\
link add eth0 type veth peer name k6t-eth0
link set lo up
link set eth0 addrgenmode none
link set k6t-eth0 addrgenmode none
link set eth0 up
link set k6t-eth0 up
addr add 192.0.2.2/24 dev eth0
addr add 10.0.2.1/24 dev k6t-eth0
"""


def one_range() -> Table:
    """Both protocols get the ports 1000 to 8000, TCP one more, and all goes again."""
    taken = race(ROUNDS)
    made = table("TCP and UDP 1000-8000 in a namespace", taken)
    return numbers(made, [against(taken, phase, other) for other, phase in _promised()])


def race(rounds: int, who: Sequence[str] = (OURS, LEGACY, NFT)) -> dict[str, list[float]]:
    """Milliseconds of each phase by each of them, by `phase: who`."""
    makers: dict[str, Callable[[str], Contestant]] = {OURS: Ours, LEGACY: Legacy, NFT: Nft}
    with undisturbed(), ExitStack() as stack:
        contestants = {
            name: stack.enter_context(_ended(makers[name](stack.enter_context(_pod(number)))))
            for number, name in enumerate(who)
        }
        actions = {
            f"{phase}: {name}": one.towards(_both(phase))
            for phase in PHASES
            for name, one in contestants.items()
        }
        interleaved(actions, 2)  # to get warm
        return interleaved(actions, rounds)


def _both(phase: str, ports: int = 7001) -> tuple[Machine, ...]:
    last = FIRST + ports - 1 + (phase == CHANGE)
    if phase == REMOVAL:
        return ()
    tcp, udp = PortRange(FIRST, last), PortRange(FIRST, FIRST + ports - 1)
    return (_machine([Claim(Protocol.TCP, tcp), Claim(Protocol.UDP, udp)]),)


def _promised() -> list[tuple[str, str]]:
    return [(LEGACY, phase) for phase in PHASES] + [(NFT, phase) for phase in PHASES]


def against(taken: dict[str, list[float]], phase: str, other: str) -> Number:
    """How long we take for a phase, measured by another."""
    bound = LEGACY_BOUND if other == LEGACY else None if phase == SET_UP else NFT_BOUND
    value = ratio(taken[f"{phase}: {OURS}"], taken[f"{phase}: {other}"])
    return Number(name=f"{phase}, of {other}", value=value, unit="x", bound=bound)


def any_ports() -> Table:
    """The same with ten and with 60,000 ports."""
    with undisturbed(), ExitStack() as stack:
        actions: dict[str, Action] = {}
        for number, ports in enumerate((10, 60_000)):
            ours = stack.enter_context(_ended(Ours(stack.enter_context(_pod(number)))))
            for phase in PHASES:
                actions[f"{phase}, {ports} ports"] = ours.towards(_both(phase, ports))
        interleaved(actions, 2)
        taken = interleaved(actions, ROUNDS)
    found: list[Number] = []
    for phase in PHASES:
        value = ratio(taken[f"{phase}, 60000 ports"], taken[f"{phase}, 10 ports"])
        name = f"{phase}, 60,000 ports, of 10"
        found.append(Number(name=name, value=value, unit="x", bound=PORTS_BOUND))
    return numbers(table("However many ports a range has", taken), found)


def many_ranges() -> Table:
    """Thousands of ranges from nothing, against nft given the same maps."""
    taken = _filled(FEWER_ROUNDS)
    return numbers(table(f"{MANY} ranges in a namespace, from nothing", taken), [_of_nft(taken)])


def from_nothing(rounds: int) -> Number:
    """The same in a few rounds."""
    return replace(_of_nft(_filled(rounds)), name=f"{MANY} ranges from nothing, of nft -f")


def _filled(rounds: int) -> dict[str, list[float]]:
    with undisturbed(), ExitStack() as stack:
        ours = stack.enter_context(_ended(Ours(stack.enter_context(_pod(0)))))
        theirs = stack.enter_context(_ended(Nft(stack.enter_context(_pod(1)))))
        actions = {
            name: _from_nothing(one, _ranges(MANY)) for name, one in ((NFT, theirs), (OURS, ours))
        }
        interleaved(actions, 1)
        return interleaved(actions, rounds)


def _of_nft(taken: dict[str, list[float]]) -> Number:
    value = ratio(taken[OURS], taken[NFT])
    return Number(name="of nft -f", value=value, unit="x", bound=FROM_NOTHING_BOUND)


def one_of_many() -> Table:
    """One range is changed among others, and many of as many."""
    present, beforehand = _changes({f"one of {count}": (count, 1) for count in PRESENT}, ROUNDS)
    changed, _ = _changes({f"{count} of {MANY}": (MANY, count) for count in CHANGED}, FEWER_ROUNDS)
    made = table("Ranges are changed, among others", {**present, **changed})
    recognised = statistics.median(beforehand[f"one of {MANY}"])
    found = [
        more(present),
        Number(name=f"before it, rules for {MANY}", value=recognised, unit="ms"),
    ]
    return replace(
        numbers(made, found),
        series={
            "one range changed": tuple(zip(PRESENT, _medians(present), strict=True)),
            f"of {MANY} ranges": tuple(zip(CHANGED, _medians(changed), strict=True)),
        },
    )


def one_of_ten_and_many(rounds: int) -> Number:
    """The same for ten and for thousands only."""
    return more(_changes({f"one of {count}": (count, 1) for count in (10, MANY)}, rounds)[0])


def more(taken: dict[str, list[float]]) -> Number:
    """How much longer it takes among thousands."""
    pairs = zip(taken["one of 10"], taken[f"one of {MANY}"], strict=True)
    name = f"one of {MANY}, more than one of 10"
    return Number(
        name=name,
        value=statistics.median(many - few for few, many in pairs),
        unit="ms",
        bound=MORE_BOUND,
    )


def _medians(taken: dict[str, list[float]]) -> list[float]:
    return [statistics.median(times) for times in taken.values()]


def _changes(
    wanted: dict[str, tuple[int, int]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds to change some of so many ranges, back and forth; and beforehand, to recognise
    what stays."""
    with undisturbed(), ExitStack() as stack:
        actions: dict[str, Action] = {}
        recognised: dict[str, list[float]] = {}
        for number, (name, (count, changed)) in enumerate(wanted.items()):
            ours = Ours(stack.enter_context(_pod(number)))
            stack.callback(ours.end)
            actions[name] = _back_and_forth(ours, count, changed)
            recognised[name] = ours.recognised
        interleaved(actions, 2)
        return interleaved(actions, rounds), recognised


def _back_and_forth(ours: "Ours", count: int, changed: int) -> Action:
    turns = itertools.cycle(_ranges(count, shorter) for shorter in (0, changed))

    def prepare() -> None:
        ours.towards(next(turns))[0]()

    return prepare, ours.become


def _from_nothing(one: "Contestant", wanted: tuple[Machine, ...]) -> Action:
    clear, fill = one.towards(()), one.towards(wanted)

    def prepare() -> None:
        for step in clear:
            step()
        fill[0]()

    return prepare, fill[1]


def _ranges(count: int, shorter: int = 0) -> tuple[Machine, ...]:
    """So many ranges, the last ones a port shorter."""
    claims = [
        Claim(Protocol.TCP, PortRange(first, first + WIDTH - 1 - (number >= count - shorter)))
        for number, first in enumerate(range(FIRST, FIRST + STEP * count, STEP))
    ]
    return (_machine(claims),)


def _machine(claims: Sequence[Claim]) -> Machine:
    return machine(claims, [Guest(GUEST, GATEWAY)])


def manifests() -> Table:
    """A directory of manifests is read."""
    ranges = ("1000-1999/tcp", "3000-3999/tcp", "5000-5999/udp", "7000-7999/udp")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(MANIFESTS):
            text = manifest(f"vm{number}", f"vm{number}", ranges)
            Path(folder, f"vm{number}.yaml").write_text(text)

        def read() -> None:
            snapshot = load([folder], bytes)
            assert len(snapshot.machines) == MANIFESTS
            assert not snapshot.problems

        with undisturbed():
            taken = interleaved({"read and understood": (lambda: None, read)}, FEWER_ROUNDS)
    return table(f"{MANIFESTS} manifests of {len(ranges)} ranges each", taken)


# ---------------------------------------------------------------------------------- contestants


class Contestant(Shape):
    """Who can make a namespace hold what machines want."""

    def towards(self, machines: tuple[Machine, ...]) -> Action:
        """What is done beforehand, and what is timed."""

    def end(self) -> None: ...


class Ours:
    """As the daemon does it: opens the namespace, with what it knows of it from the last time, and
    lets go of it when all is done."""

    def __init__(self, netns: str) -> None:
        self._netns = netns
        self._kernel = LiveKernel()
        self._known: Known | None = None
        self._open = ExitStack()
        with self._kernel.opened(netns) as namespace:
            self._links = namespace.surroundings()
        self._desired = Desired()
        self._made: Made = {}
        self._finish: Callable[[], None] = lambda: None
        self.recognised: list[float] = []  # ms until it is known what is wanted

    def towards(self, machines: tuple[Machine, ...]) -> Action:
        def prepare() -> None:
            self.end()
            started = time.perf_counter()
            self._desired = desire(machines, self._links, self._made)
            if self._known and isinstance(self._known[1].live, Lives):  # as agent.reconcile.keep
                self._known[1].live.recognise(self._desired.rules)
            self.recognised.append((time.perf_counter() - started) * 1000)

        return prepare, self.become

    def become(self) -> None:
        """Make it so."""
        namespace = self._open.enter_context(self._kernel.opened(self._netns, self._known))
        self._open.enter_context(namespace.exclusive())
        names = [one.name for one in self._desired.sysctls]
        found = namespace.observe(names)
        namespace.commit(diff(self._netns, self._desired, found))

        def finish() -> None:
            assert diff(self._netns, self._desired, namespace.observe(names)).empty
            self._known = namespace.known

        self._finish = finish

    def end(self) -> None:
        """What the daemon does when the rules are there."""
        self._finish()
        self._finish = lambda: None
        self._open.close()


class Nft:
    """A process that is given a ready script."""

    def __init__(self, netns: str) -> None:
        self._netns = netns
        self._kernel = LiveKernel()
        self._stack = ExitStack()
        self._namespace = self._stack.enter_context(self._kernel.opened(netns))
        self._descriptor = self._stack.enter_context(opened(netns))
        self._links: Surroundings = self._namespace.surroundings()
        self._script = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "script")

    def towards(self, machines: tuple[Machine, ...]) -> Action:
        def prepare() -> None:
            plan = diff(self._netns, desire(machines, self._links), self._namespace.observe())
            self._script.write_text(nft_script.script(plan))

        return prepare, self._run

    def _run(self) -> None:
        with inside(self._descriptor, self._netns):
            subprocess.run(["nft", "-f", self._script], check=True)

    def end(self) -> None:
        self._stack.close()


class Legacy:
    """A process that is given the same rules as iptables writes them."""

    def __init__(self, netns: str) -> None:
        self._netns = netns
        self._stack = ExitStack()
        self._descriptor = self._stack.enter_context(opened(netns))
        self._script = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "script")
        self._lines: list[str] = []

    def towards(self, machines: tuple[Machine, ...]) -> Action:
        wanted = [line for machine in machines for line in _iptables(machine)]

        def prepare() -> None:
            gone = [f"-D {line}" for line in self._lines if line not in wanted]
            new = [f"-A {line}" for line in wanted if line not in self._lines]
            lines = ["*nat", *gone, *new, "COMMIT"]
            self._script.write_text("".join(f"{line}\n" for line in lines))
            self._lines = wanted

        return prepare, self._run

    def _run(self) -> None:
        with inside(self._descriptor, self._netns), self._script.open() as script:
            command = ["iptables-legacy-restore", "--wait", "--noflush"]
            subprocess.run(command, stdin=script, check=True)

    def end(self) -> None:
        self._stack.close()


def _iptables(machine: Machine) -> Iterator[str]:
    assert machine.masquerade
    for claim in machine.masquerade.claims or ():
        ports = f"-p {claim.protocol.value} --dport {claim.ports.first}:{claim.ports.last}"
        yield f"PREROUTING -i eth0 {ports} -j DNAT --to-destination {GUEST}"
        yield f"OUTPUT -d 127.0.0.1 {ports} -j DNAT --to-destination {GUEST}"
    yield f"POSTROUTING -s {GUEST} -j MASQUERADE"
    yield f"POSTROUTING -o k6t-eth0 -s 127.0.0.1 -d {GUEST} -j SNAT --to-source {GATEWAY}"


@contextmanager
def _ended(one: "Contestant") -> Iterator["Contestant"]:
    try:
        yield one
    finally:
        one.end()


@contextmanager
def _pod(number: int) -> Iterator[str]:
    """A namespace with links that lead nowhere."""
    netns = f"prbench-{os.getpid()}-{number}"
    subprocess.run(["ip", "netns", "add", netns], check=True)
    try:
        wire(netns)
        yield netns
    finally:
        subprocess.run(["ip", "netns", "del", netns], check=True)


def wire(netns: str) -> None:
    """Give a namespace the links of a pod."""
    subprocess.run(["ip", "-n", netns, "-batch", "-"], input=LINKS, text=True, check=True)
