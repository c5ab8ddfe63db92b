"""How busy each range is: which of the tracked flows are its own, and what changed between two
looks. New flows are counted by the rules; what is open, and its packets, by conntrack."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

from rules.holdings import Holding
from rules.model import NUMBERS, OWN, Address, Family, Rule
from rules.ports import PortRange
from rules.values import Value


class Way(Value, kw_only=True):
    """Where the first packet of a flow was going, and who answers it."""

    family: Family
    protocol: int  # its number
    port: int
    destination: bytes
    answerer: bytes


class Tracked(Value, kw_only=True):
    """A flow that somebody sent on to another address, as conntrack knows it."""

    key: bytes  # tells it from all others
    way: Way
    answered: bool
    over: bool  # ended, and remembered for a while
    counted: tuple[int, int] | None  # packets and bytes of both directions, if anybody counts them


class Tracking(Value):
    """What conntrack says of a namespace."""

    flows: tuple[Tracked, ...] = ()
    accounted: bool = False  # packets of new flows are counted


class Look(Value, kw_only=True):
    """What a namespace forwards, and what is open there, at one moment."""

    at: float  # seconds
    held: tuple[Holding, ...]
    tracking: Tracking = Tracking()
    own: frozenset[Address] = frozenset()


class Load(Value, kw_only=True):
    """How busy a range is; None: nobody counts it, or there was no look before."""

    netns: str
    holding: Holding
    open: int = 0
    unanswered: int = 0  # of these
    uncounted: int = 0  # of these: they began before anybody counted packets
    new: float | None = None  # flows a second
    packets: float | None = None  # a second, of both directions
    octets: float | None = None


def loads(netns: str, now: Look, before: Look | None) -> list[Load]:
    """How busy the ranges of a namespace are, in the order of ports."""
    sums = _sums(now, before)
    span = now.at - before.at if before else 0.0
    known = {_key(one): one.packets for one in before.held} if before else {}

    def rate(number: int | None) -> float | None:
        return None if number is None or span <= 0 else number / span

    def new(one: Holding) -> int | None:
        was = known.get(_key(one))
        return None if was is None else max(0, one.packets - was)  # less, if it was rewritten

    return [
        Load(
            netns=netns,
            holding=one,
            open=sums[at].open,
            unanswered=sums[at].unanswered,
            uncounted=sums[at].uncounted,
            new=rate(new(one)),
            packets=rate(sums[at].packets if now.tracking.accounted else None),
            octets=rate(sums[at].octets if now.tracking.accounted else None),
        )
        for at, one in enumerate(now.held)
    ]


def _key(one: Holding) -> tuple[object, ...]:
    return one.owner, one.protocol, one.ports, one.to_port


class _Sum:
    """Of the flows of one range."""

    __slots__ = ("octets", "open", "packets", "unanswered", "uncounted")

    def __init__(self) -> None:
        self.open = self.unanswered = self.uncounted = self.packets = self.octets = 0


def _sums(now: Look, before: Look | None) -> list[_Sum]:
    owners = _Owners(now)
    sums = [_Sum() for _ in now.held]
    known = {flow.key: flow.counted for flow in before.tracking.flows} if before else {}
    for flow in now.tracking.flows:
        at = owners.of(flow.way)
        if at is None:
            continue
        mine = sums[at]
        mine.open += not flow.over
        mine.unanswered += not (flow.over or flow.answered)
        if flow.counted is None:
            mine.uncounted += not flow.over
        else:
            packets, octets = known.get(flow.key) or (0, 0)
            mine.packets += max(0, flow.counted[0] - packets)
            mine.octets += max(0, flow.counted[1] - octets)
    return sums


_Entry = tuple[PortRange, Rule, int]


class _Owners:
    """Finds the range that sent a flow on, in the time that a search takes: there may be thousands
    of ranges, and a hundred thousand flows."""

    def __init__(self, now: Look) -> None:
        self._own = {address.packed for address in now.own}
        found: dict[tuple[Family, int | None, bytes], list[_Entry]] = {}
        for at, holding in enumerate(now.held):
            number = NUMBERS[holding.protocol] if holding.protocol else None
            for live in holding.rules:
                to = live.rule.to.packed if live.rule.to else b""
                entry = holding.ports, live.rule, at
                found.setdefault((live.rule.family, number, to), []).append(entry)
        self._found = {key: _Ordered(entries) for key, entries in found.items()}

    def of(self, flow: Way) -> int | None:
        for protocol in (flow.protocol, None):
            ordered = self._found.get((flow.family, protocol, flow.answerer))
            for rule, at in ordered.around(flow.port) if ordered else ():
                if self._is_sent_there(rule, flow):
                    return at
        return None

    def _is_sent_there(self, rule: Rule, flow: Way) -> bool:
        if rule.destination is None:
            return True
        if rule.destination == OWN[rule.family]:
            return flow.destination in self._own
        return flow.destination == rule.destination.packed


class _Ordered:
    """Ranges by their first ports, each with how far it and those before it reach."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._entries = sorted(entries, key=lambda entry: entry[0].first)
        self._firsts = [ports.first for ports, _, _ in self._entries]
        self._reach = list(accumulate((ports.last for ports, _, _ in self._entries), max))

    def around(self, port: int) -> Iterator[tuple[Rule, int]]:
        """Those that hold the port. A protocol without ports is in those that hold all."""
        place = bisect_right(self._firsts, port or 1) - 1
        while place >= 0 and self._reach[place] >= port:
            ports, rule, at = self._entries[place]
            if ports.last >= port:
                yield rule, at
            place -= 1
