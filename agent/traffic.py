"""What went through each range since the agent began, read from the kernel when it is asked for."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from agent.errors import Failure
from agent.status import Standing
from rules.model import POLICED, Chain, Live, Rule
from rules.problems import printable
from rules.shapes import spot
from rules.values import Value

MOST_SERIES = 2_000  # of one metric; the rest is summed up under the name OTHER
OTHER = "other"
FRESH = 1.0  # seconds for which counters are not read again
REMEMBERED = 3600.0  # seconds after which a range that went is forgotten
LONGEST_LABEL = 250  # an owner has 128 bytes at the most
DROPPED = "forward, dropped"  # in the place of a chain
RANGE_LABELS = ("netns", "owner", "family", "chain", "protocol", "ports")

Numbers = tuple[int, int]
Counted = Mapping[object, Numbers]
Series = tuple[str, ...]
Readings = dict[object, Numbers]


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

    def forget(self, before: float, most: int) -> None:
        """Let go of series that nobody fed since then, and of the longest unfed where there are too
        many."""
        old = sorted((at, series) for series, at in self._times.items())
        for place, (at, series) in enumerate(old):
            if at >= before and len(old) - place <= most:
                break
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
        crowds = Counter(series[0] for series in found)  # who has few is not to miss any for others
        for place, series in enumerate(sorted(found, key=lambda one: (crowds[one[0]], one))):
            gained = self._odometer.advance(series, found[series], now)
            if place < MOST_SERIES:
                totals[series] = self._odometer.total(series)
            else:
                self._rest = _sum((self._rest or (0, 0), gained))
        if self._rest is not None:
            totals[(OTHER,) * len(RANGE_LABELS)] = self._rest
        self._odometer.forget(now - REMEMBERED, len(found) + MOST_SERIES)
        return Reading(totals, max(0, len(found) - MOST_SERIES), unread)


def _forwards(live: Live) -> bool:
    """Whether it is a range, or what policies accept or drop."""
    rule = live.rule
    if rule.chain in POLICED:
        return not rule.resumes
    return rule.chain is not Chain.POSTROUTING and not rule.guards


def _key(standing: Standing, live: Live) -> object:
    """What tells a rule apart from the one that takes its place: in iptables, a handle is no more
    than a place in the chain."""
    return live.rule if standing.backend == "iptables" else spot(live)


def _series(netns: str, rule: Rule) -> Series:
    return (
        label(netns),
        label(rule.owner),
        rule.family.value,
        DROPPED if rule.chain in POLICED and rule.guards else rule.chain.hook,
        rule.protocol.value if rule.protocol else "any",
        str(rule.ports) if rule.ports else "any",
    )


def label(text: str) -> str:
    """What others named, so that it can be written: not every name is Unicode."""
    if len(text) <= LONGEST_LABEL and text.isprintable():
        return text
    return printable(text, LONGEST_LABEL)
