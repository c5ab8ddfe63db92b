"""What the daemon did and how it stands, in numbers for Prometheus.

The loop counts here what it does. All else is read at the time of the scrape, in the thread that
serves it: how the node stands from the newest Status, what went through the rules from the kernel.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from agent.status import Standing, State, Status
from agent.traffic import MOST_SERIES, OTHER, RANGE_LABELS, Counted, Ranges, Reading, label
from rules.allotment import DYNAMIC, STATIC
from rules.node_ports import Allocations

PREFIX = "portranger"
MOST_PROCESSES = 50
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

TRAFFIC = {
    "kubernetes_requests": "Requests made of the API server.",
    "kubernetes_received_bytes": "Bytes that the API server answered.",
    "kubernetes_events_sent": "Events that were written to instances, or counted up.",
    "kubernetes_events_dropped": "Events that were left out, to spare the API server.",
    "kubernetes_events_failed": "Events that the API server did not take.",
}


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
        self._unflushed = self._gauge(
            "conntrack_unflushed", "Namespaces where the last try to forget flows failed."
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

    def unflushed(self, count: int) -> None:
        """In so many namespaces flows are still to be forgotten."""
        self._unflushed.set(count)

    def refused(self) -> None:
        self._refused.inc()

    def lost_events(self) -> None:
        self._lost.inc()

    def drifted(self, process: str) -> None:
        """Anybody can name a process: only so many names are kept."""
        name = label(process) or "unknown"
        with self._lock:
            if name not in self._processes and len(self._processes) >= MOST_PROCESSES:
                name = OTHER
            else:
                self._processes.add(name)
        self._drift.labels(name).inc()

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)


class _Standings:
    """How the node stands at the time of the scrape."""

    def __init__(self, status: Callable[[], Status], ranges: Ranges) -> None:
        self._status, self._ranges = status, ranges

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _node(status)
        yield from _source(status.traffic)
        yield from _bands(status.allocations)
        yield from _namespaces(status.namespaces)
        yield from _ranges(self._ranges.read(status.namespaces))


def _node(status: Status) -> Iterator[Metric]:
    info = _gauge("build_info", "Always 1: which version runs.", labels=("version",))
    info.add_metric((label(status.version),), 1)
    yield info
    ready = "1 when every namespace was tried, none is failing, and the source can be read."
    yield _gauge("ready", ready, status.ready)
    yield _gauge(
        "revision_wanted",
        "The newest snapshot of desired state that was taken; 0: none yet.",
        status.revision.wanted,
    )
    yield _gauge(
        "revision_applied",
        "The newest snapshot that is in the kernel, with flows flushed; 0: none yet.",
        status.revision.applied,
    )
    yield _gauge("manifests", "Manifests that were read.", status.manifests)
    yield _gauge("manifest_problems", "What is wrong in manifests.", len(status.problems))
    yield _gauge(
        "manifests_on_last_good",
        "Files that are bad now, and go on with their last good meaning.",
        len(status.last_valid),
    )
    yield _gauge(
        "source_readable", "1 while the source of manifests can be read.", not status.unreadable
    )
    yield _gauge(
        "configuration_current",
        "1 while the configuration in the file is in use; 0: it was bad, another goes on.",
        not status.outdated,
    )
    yield _gauge("state_writable", "1 while the state can be written.", not status.unwritable)
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


def _bands(known: Allocations | None) -> Iterator[Metric]:
    """Nothing where an API server gives node ports; of a small range all are one band."""
    if known is None:
        return
    words = "Node ports of a band that Services have."
    taken = _gauge("nodeport_band_allocated_ports", words, labels=("band",))
    words = "Node ports of a band that nobody has."
    free = _gauge("nodeport_band_available_ports", words, labels=("band",))
    for band, ports in ((STATIC, known.bands.lower), (DYNAMIC, known.bands.upper)):
        if ports is not None:
            available = known.available(ports)
            taken.add_metric((band,), len(ports) - available)
            free.add_metric((band,), available)
    yield taken
    yield free


def _namespaces(standings: Sequence[Standing]) -> Iterator[Metric]:
    states = _gauge("namespaces", "Network namespaces by how they stand.", labels=("state",))
    for state in State:
        count = sum(standing.state is state for standing in standings)
        states.add_metric((state.name.lower(),), count)
    yield states
    rules: dict[str, int] = {}
    ranges: dict[str, int] = {}
    for place, one in enumerate(sorted(standings, key=lambda standing: standing.netns)):
        name = label(one.netns) if place < MOST_SERIES else OTHER
        rules[name] = rules.get(name, 0) + len(one.live)
        ranges[name] = ranges.get(name, 0) + len(one.ranges)
    refused = sum(len(one.refused) for one in standings)
    yield _gauge(
        "services_refused", "Ports of Services that are not published, or in part.", refused
    )
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
