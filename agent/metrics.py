"""What the daemon did and how it stands, in numbers for Prometheus.

The loop counts here what it does. All else is read at the time of the scrape, in the thread that
serves it: how the node stands from the newest Status, what went through the rules from the kernel.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.errors import Failure
from agent.status import Standing, State, Status
from rules.allotment import DYNAMIC, STATIC
from rules.model import Chain, Live, Rule
from rules.problems import printable
from rules.shapes import spot
from rules.values import Value

PREFIX = "portranger"
MOST_SERIES = 2_000  # of one metric; the rest is summed up under the name OTHER
MOST_PROCESSES = 50
OTHER = "other"
FRESH = 1.0  # seconds for which counters are not read again
REMEMBERED = 3600.0  # seconds after which a range that went is forgotten
LONGEST_LABEL = 250  # an owner has 128 bytes at the most
DROPPED = "forward, dropped"  # in the place of a chain
RANGE_LABELS = ("netns", "owner", "family", "chain", "protocol", "ports")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

TRAFFIC = {
    "kubernetes_requests": "Requests made of the API server.",
    "kubernetes_received_bytes": "Bytes that the API server answered.",
    "kubernetes_events_sent": "Events that were written to instances, or counted up.",
    "kubernetes_events_dropped": "Events that were left out, to spare the API server.",
    "kubernetes_events_failed": "Events that the API server did not take.",
}

Numbers = tuple[int, int]
Counted = Mapping[object, Numbers]
Series = tuple[str, ...]
Readings = dict[object, Numbers]


class Metrics:
    """Everything at /metrics. `counters` asks the kernel: handle → (packets, bytes)."""

    def __init__(
        self,
        status: Callable[[], Status],
        counters: Callable[[Standing], Counted],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # As many series again, of no use to anybody; the library leaves the function unannotated.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_Standings(status, Ranges(counters, clock)))
        # As all our names, the process's own start with ours.
        ProcessCollector(PREFIX, registry=self._registry)
        self._duration = Histogram(
            "reconcile_duration_seconds",
            "How long it took to compare and mend one namespace.",
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self._registry,
        )
        self._commits = self._counter("commits", "Transactions that changed a namespace.")
        self._failures = self._counter("failures", "Tries that failed; each is made again.")
        self._passes = self._counter("passes", "Wake-ups that looked at something.")
        self._forgotten = self._counter(
            "conntrack_forgotten", "Flows forgotten because their ports were closed or moved."
        )
        self._refused = self._counter(
            "pods_refused", "Times that what was found in the place of a pod was not trusted."
        )
        self._lost = self._counter(
            "events_lost", "Times the kernel dropped events, so that everything was looked at."
        )
        self._drift = self._counter(
            "drift_repaired", "Changes by others that were undone, by the process.", ("process",)
        )
        self._given = self._counter(
            "nodeport_allocator_allocation", "Times that node ports were given.", ("scope",)
        )
        self._ungiven = self._counter(
            "nodeport_allocator_allocation_errors",
            "Times that node ports were not to be had.",
            ("scope",),
        )
        for scope in (STATIC, DYNAMIC):
            self._given.labels(scope)
            self._ungiven.labels(scope)
        self._allocated = self._gauge(
            "nodeport_allocator_allocated_ports", "Node ports that Services have."
        )
        self._available = self._gauge(
            "nodeport_allocator_available_ports", "Node ports that nobody has."
        )
        self._lock = Lock()
        self._processes: set[str] = set()

    def _counter(self, name: str, words: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, words, labels, namespace=PREFIX, registry=self._registry)

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(name, words, namespace=PREFIX, registry=self._registry)

    def allotted(self, allocated: int, available: int) -> None:
        """So many node ports are in use, and so many are left."""
        self._allocated.set(allocated)
        self._available.set(available)

    def gave(self, scope: str, given: int, refused: int) -> None:
        """Node ports to so many that had none, and none to so many others."""
        self._given.labels(scope).inc(given)
        self._ungiven.labels(scope).inc(refused)

    def reconciled(self, seconds: float) -> None:
        """One namespace was compared, and mended where need be."""
        self._duration.observe(seconds)

    def committed(self) -> None:
        self._commits.inc()

    def failed(self) -> None:
        self._failures.inc()

    def passed(self) -> None:
        self._passes.inc()

    def forgot(self, count: int) -> None:
        self._forgotten.inc(count)

    def refused(self) -> None:
        self._refused.inc()

    def lost_events(self) -> None:
        self._lost.inc()

    def drifted(self, process: str) -> None:
        """Anybody can name a process: only so many names are kept."""
        name = _label(process) or "unknown"
        with self._lock:
            if name not in self._processes and len(self._processes) >= MOST_PROCESSES:
                name = OTHER
            else:
                self._processes.add(name)
        self._drift.labels(name).inc()

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)


class Odometer:
    """Counters that go on counting where the rules behind them are rewritten and begin at zero.

    A series is fed what its rules say, each under a key that changes when the rule does. What was
    counted between the last look and the end of a rule is lost; nothing is counted twice.
    """

    def __init__(self) -> None:
        self._seen: dict[Series, Readings] = {}
        self._totals: dict[Series, Numbers] = {}
        self._times: dict[Series, float] = {}

    def advance(self, series: Series, readings: Readings, now: float) -> Numbers:
        """Take in what its rules say now; by how much that is more. Without readings the rules
        could not be asked, and the next ones are compared with those before."""
        before = self._seen.get(series, {})
        gained = _sum(_gain(before.get(key), new) for key, new in readings.items())
        self._times[series] = now
        self._totals[series] = _sum((self.total(series), gained))
        if readings or series not in self._seen:
            self._seen[series] = readings
        return gained

    def total(self, series: Series) -> Numbers:
        return self._totals.get(series, (0, 0))

    def forget(self, before: float) -> None:
        """Let go of series that nobody fed since then."""
        for series in [series for series, at in self._times.items() if at < before]:
            del self._seen[series], self._totals[series], self._times[series]

    def __len__(self) -> int:
        return len(self._times)


def _gain(old: Numbers | None, new: Numbers) -> Numbers:
    if old is None or new[0] < old[0] or new[1] < old[1]:
        return new
    return new[0] - old[0], new[1] - old[1]


def _sum(numbers: Iterable[Numbers]) -> Numbers:
    packets, octets = 0, 0
    for more in numbers:
        packets, octets = packets + more[0], octets + more[1]
    return packets, octets


class Reading(Value):
    """The totals of the ranges; how many have none of their own, and how many namespaces could not
    be asked."""

    totals: Mapping[Series, Numbers]
    left_out: int = 0
    unread: int = 0


class Ranges:
    """What went through each range, read from the kernel when it is asked for."""

    def __init__(self, counters: Callable[[Standing], Counted], clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self._lock = Lock()  # two who read at once would count backwards
        self._odometer = Odometer()
        self._rest: Numbers | None = None  # what went through the ranges that have no series
        self._read_at: float | None = None
        self._last = Reading({})

    def read(self, standings: Iterable[Standing]) -> Reading:
        """The newest numbers, or those of a moment ago."""
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= FRESH:
                self._last = self._reading(standings, now)
                self._read_at = now
            return self._last

    def _reading(self, standings: Iterable[Standing], now: float) -> Reading:
        found: dict[Series, Readings] = {}
        unread = 0
        for standing in standings:
            try:
                counted = self._numbers(standing)
            except Failure:
                counted, unread = {}, unread + 1
            for live in filter(_forwards, standing.live):
                readings = found.setdefault(_series(standing.netns, live.rule), {})
                key = _key(standing, live)
                if key in counted:
                    readings[standing.identity, key] = counted[key]
        return self._advanced(found, unread, now)

    def _numbers(self, standing: Standing) -> Mapping[object, Numbers]:
        """By the key of each rule. Only nftables is asked: the numbers of iptables come with its
        rules, and reading these takes longer than a scrape may."""
        if standing.backend == "iptables":
            return {_key(standing, one): (one.packets, one.octets) for one in standing.live}
        if standing.identity is None or not any(map(_forwards, standing.live)):
            return {}
        return dict(self._counters(standing).items())

    def _advanced(self, found: Mapping[Series, Readings], unread: int, now: float) -> Reading:
        totals: dict[Series, Numbers] = {}
        for place, series in enumerate(sorted(found)):
            gained = self._odometer.advance(series, found[series], now)
            if place < MOST_SERIES:
                totals[series] = self._odometer.total(series)
            else:
                self._rest = _sum((self._rest or (0, 0), gained))
        if self._rest is not None:
            totals[(OTHER,) * len(RANGE_LABELS)] = self._rest
        self._odometer.forget(now - REMEMBERED)
        return Reading(totals, max(0, len(found) - MOST_SERIES), unread)


def _forwards(live: Live) -> bool:
    """Whether it is a range, or what policies accept or drop."""
    rule = live.rule
    if rule.chain is Chain.FORWARD:
        return not rule.resumes
    return rule.chain is not Chain.POSTROUTING and not rule.guards


def _key(standing: Standing, live: Live) -> object:
    """What tells a rule apart from the one that takes its place: in iptables, a handle is no more
    than a place in the chain."""
    return live.rule if standing.backend == "iptables" else spot(live)


def _series(netns: str, rule: Rule) -> Series:
    return (
        _label(netns),
        _label(rule.owner),
        rule.family.value,
        DROPPED if rule.chain is Chain.FORWARD and rule.guards else rule.chain.value,
        rule.protocol.value if rule.protocol else "any",
        str(rule.ports) if rule.ports else "any",
    )


def _label(text: str) -> str:
    """What others named, so that it can be written: not every name is Unicode."""
    if len(text) <= LONGEST_LABEL and text.isprintable():
        return text
    return printable(text, LONGEST_LABEL)


class _Standings:
    """How the node stands at the time of the scrape."""

    def __init__(self, status: Callable[[], Status], ranges: Ranges) -> None:
        self._status, self._ranges = status, ranges

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _node(status)
        yield from _source(status.traffic)
        yield from _namespaces(status.namespaces)
        yield from _ranges(self._ranges.read(status.namespaces))


def _node(status: Status) -> Iterator[Metric]:
    info = _gauge("build_info", "Always 1: which version runs.", labels=("version",))
    info.add_metric((_label(status.version),), 1)
    yield info
    yield _gauge("ready", "1 when every namespace was tried since the start.", status.ready)
    yield _gauge("manifests", "Manifests that were read.", status.manifests)
    yield _gauge("manifest_problems", "What is wrong in manifests.", len(status.problems))
    yield _gauge(
        "manifests_on_last_good",
        "Files that are bad now, and go on with their last good meaning.",
        len(status.held),
    )
    yield _gauge(
        "source_readable", "1 while the source of manifests can be read.", not status.unreadable
    )
    yield _gauge(
        "last_sync_timestamp_seconds",
        "When everything was last in sync or waiting, in seconds of the epoch; 0: never.",
        status.synced or 0,
    )


def _source(traffic: Mapping[str, int]) -> Iterator[Metric]:
    for name, words in TRAFFIC.items():
        if name in traffic:
            family = CounterMetricFamily(f"{PREFIX}_{name}", words)
            family.add_metric((), traffic[name])
            yield family


def _namespaces(standings: Sequence[Standing]) -> Iterator[Metric]:
    states = _gauge("namespaces", "Network namespaces by how they stand.", labels=("state",))
    for state in State:
        count = sum(standing.state is state for standing in standings)
        states.add_metric((state.name.lower(),), count)
    yield states
    rules: dict[str, int] = {}
    ranges: dict[str, int] = {}
    for place, one in enumerate(sorted(standings, key=lambda standing: standing.netns)):
        name = _label(one.netns) if place < MOST_SERIES else OTHER
        rules[name] = rules.get(name, 0) + len(one.live)
        ranges[name] = ranges.get(name, 0) + len(one.ranges)
    yield _by_netns("rules", "Rules of ours in a network namespace.", rules)
    yield _by_netns("ranges", "Port ranges forwarded into a network namespace.", ranges)
    yield _gauge(
        "netns_series_left_out",
        f'Network namespaces without a series of their own: they are summed under "{OTHER}".',
        max(0, len(standings) - MOST_SERIES),
    )


def _ranges(reading: Reading) -> Iterator[Metric]:
    for place, name, words in (
        (0, "range_packets", "Packets that began a flow through a range: one a flow, as in NAT."),
        (1, "range_bytes", "Bytes of the packets that began a flow through a range."),
    ):
        family = CounterMetricFamily(f"{PREFIX}_{name}", words, labels=RANGE_LABELS)
        for series, numbers in reading.totals.items():
            family.add_metric(series, numbers[place])
        yield family
    yield _gauge(
        "range_series_left_out",
        f'Ranges without a series of their own: they are summed under "{OTHER}".',
        reading.left_out,
    )
    yield _gauge(
        "counters_unreadable",
        "Network namespaces whose counters could not be read, so that theirs stand still.",
        reading.unread,
    )


def _by_netns(name: str, words: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = _gauge(name, words, labels=("netns",))
    for netns, value in values.items():
        family.add_metric((netns,), value)
    return family


def _gauge(
    name: str, words: str, value: float | None = None, labels: Sequence[str] | None = None
) -> GaugeMetricFamily:
    number = None if value is None else float(value)
    return GaugeMetricFamily(f"{PREFIX}_{name}", words, value=number, labels=labels)
