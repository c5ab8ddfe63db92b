"""Which node ports a Service gets where no API server decides it: on bare metal.

The range has two bands, as in Kubernetes (KEP-3668): who wishes for ports names any of the range;
who does not gets some of the upper band, at random, and of the lower only when the upper has none
left, so that wishes find the lower one free. Kubernetes knows single ports; here it is runs.

As in Kubernetes, a number belongs to one Service whatever the protocol, though the kernel could
tell two apart (kubernetes#91404): what works here works in a cluster, and a Service can add the
other protocol later. Two ports of one Service may share numbers if their protocols differ: as the
API server does for DNS, wish for udp what tcp was given.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from rules.model import Protocol
from rules.ports import HIGHEST, PortRange
from rules.problems import Problem
from rules.values import Value

Pick = Callable[[int], int]  # any of 0 to n - 1, like random.Random().randrange
Held = tuple["Holder", PortRange]
Gap = tuple[int, int]  # the first and the last of some free ports; there are too many for Values


class Bands(Value):
    """The range of node ports: the lower band is for wishes, the upper for everybody else."""

    ports: PortRange

    @property
    def offset(self) -> int:
        """How many ports the lower band has; like Kubernetes, none of 16, which would be all."""
        size = len(self.ports)
        return min(max(16, size // 32), 128) if size > 16 else 0

    @property
    def lower(self) -> PortRange | None:
        first = self.ports.first
        return PortRange(first, first + self.offset - 1) if self.offset else None

    @property
    def upper(self) -> PortRange:
        return PortRange(self.ports.first + self.offset, self.ports.last)


class Holder(Value):
    """What node ports are held for: one port, or port range, of a Service."""

    owner: str  # Service/namespace/name
    port: str  # its name there; empty if it has none
    protocol: Protocol

    def __str__(self) -> str:
        port = f" port {self.port}" if self.port else ""
        return f"{self.owner}{port} ({self.protocol.value})"


class Allocations(Value):
    """Who holds what. Begin with none, or rebuild them."""

    bands: Bands
    held: Mapping[Holder, PortRange] = MappingProxyType({})

    @property
    def pairs(self) -> list[Held]:
        """All of them, in order."""
        return sorted(self.held.items(), key=_order)

    def available(self, within: PortRange) -> int:
        """How many numbers of the range, or of a band, nobody holds for any protocol."""
        return sum(b - a + 1 for a, b in _between(within.first, within.last, _gaps(self)))


def rebuild(bands: Bands, live: Iterable[Held]) -> Allocations:
    """What was found in the state, then in the kernel; where two disagree, the earlier counts.

    What is outside the range, because that was changed, is left out: its holder must ask anew.
    """
    kept, numbers = dict[Holder, PortRange](), set[int]()
    for holder, ports in live:
        if holder in kept:
            continue
        mine = range(ports.first, ports.last + 1)
        others = () if numbers.isdisjoint(mine) else kept.items()  # mostly none to compare with
        if _unfit(bands, others, holder, ports) is None:
            kept[holder] = ports
            numbers.update(mine)
    return Allocations(bands, kept)


def assign(known: Allocations, holder: Holder, wish: PortRange) -> Allocations | Problem:
    """These very ports, of either band, in place of what it may hold."""
    if known.held.get(holder) == wish:
        return known
    rest = release(known, holder)
    why = _unfit(known.bands, rest.held.items(), holder, wish)
    return why or Allocations(known.bands, {**rest.held, holder: wish})


def allocate(
    known: Allocations, holder: Holder, count: int, pick: Pick, avoid: Iterable[PortRange] = ()
) -> Allocations | Problem:
    """So many ports in a row: what it holds, cut or grown in place if possible, or any at random.

    None that are to be avoided, such as those the node listens on; but what is held is kept.
    """
    bands, held = known.bands, known.held.get(holder)
    if held and len(held) == count:
        return known
    rest = release(known, holder)
    gaps = _gaps(rest, avoid)
    first = held.first if held and _stays(held, count, gaps) else _found(bands, count, gaps, pick)
    if first is None:
        return _exhausted(bands, count, gaps)
    return Allocations(bands, {**rest.held, holder: PortRange(first, first + count - 1)})


def release(known: Allocations, *holders: Holder) -> Allocations:
    """Without what these hold, if they do."""
    if known.held.keys().isdisjoint(holders):
        return known
    return Allocations(known.bands, {one: p for one, p in known.held.items() if one not in holders})


def _order(held: Held) -> tuple[str, str, str]:
    return held[0].owner, held[0].port, held[0].protocol.value


def outside(wish: PortRange, ports: PortRange) -> Problem:
    """Nobody gets node ports but of these."""
    what = f"{wish} is not within the node ports {ports}"
    fix = "Choose from these, or change node_ports.range."
    return _problem("node-port-outside", what, fix)


def _unfit(bands: Bands, held: Iterable[Held], holder: Holder, wish: PortRange) -> Problem | None:
    """Why these ports cannot be its own."""
    if not bands.ports.holds(wish):
        return outside(wish, bands.ports)
    for other, ports in sorted((one for one in held if one[1].overlaps(wish)), key=_order):
        if other.owner != holder.owner or other.protocol is holder.protocol:
            what = f"{wish} cannot be given: node port {ports} is held by {other}"
            fix = "Choose another, or none to be given one."
            return _problem("node-port-taken", what, fix)
    return None


def _exhausted(bands: Bands, count: int, gaps: Sequence[Gap]) -> Problem:
    run = f"{count} node ports in a row are" if count > 1 else "node port is"
    longest = max((PortRange(*gap) for gap in gaps), key=len, default=None)
    left = f"the longest free run is {longest} ({len(longest)})" if longest else "all are taken"
    what = f"no {run} free in {bands.ports}: {left}"
    fix = "Ask for fewer, remove Services, or change node_ports.range."
    return _problem("node-ports-exhausted", what, fix)


def _problem(code: str, what: str, fix: str) -> Problem:
    """Why somebody does not get what it asked for; only the asker knows the path to add."""
    return Problem(code=code, path=(), what=what, fix=fix)


def _gaps(known: Allocations, avoid: Iterable[PortRange] = ()) -> list[Gap]:
    """What is free, in order."""
    gaps, first = list[Gap](), 0
    for start, end in sorted((one.first, one.last) for one in (*known.held.values(), *avoid)):
        gaps.append((first, start - 1))  # may be none
        first = max(first, end + 1)
    return _between(known.bands.ports.first, known.bands.ports.last, [*gaps, (first, HIGHEST)])


def _between(lowest: int, highest: int, gaps: Iterable[Gap], count: int = 1) -> list[Gap]:
    """What of them lies there, where it is a run of so many."""
    cut = ((max(first, lowest), min(last, highest)) for first, last in gaps)
    return [(first, last) for first, last in cut if last - first + 1 >= count]


def _stays(held: PortRange, count: int, gaps: Sequence[Gap]) -> bool:
    """Whether it can be so long where it begins: what it keeps then leads where it did."""
    last = held.first + count - 1
    return last <= held.last or any(a <= held.last + 1 and last <= b for a, b in gaps)


def _found(bands: Bands, count: int, gaps: Sequence[Gap], pick: Pick) -> int | None:
    """Where a run can begin: in the upper band, else where it takes the least of the lower."""
    upper = bands.upper.first
    wide = _between(upper, HIGHEST, gaps, count) or _between(0, HIGHEST, gaps, count)
    if not wide:
        return None
    across = wide[-1][0] < upper <= wide[-1][1]
    return wide[-1][1] - count + 1 if across else _drawn(wide, count, pick)


def _drawn(gaps: Sequence[Gap], count: int, pick: Pick) -> int:
    """Where a run begins: anywhere, but of 8 draws the one in the shortest gap, so that long ones
    last; and at an end of it unless that has ample room. The property tests tell how well it does.
    """
    ways = list(accumulate(last - first + 2 - count for first, last in gaps))
    draws = [(bisect_right(ways, way), way) for way in (pick(ways[-1]) for _ in range(8))]
    place, way = min(draws, key=lambda draw: gaps[draw[0]][1] - gaps[draw[0]][0])
    first, last = gaps[place][0], gaps[place][1] - count + 1
    at = last - (ways[place] - 1 - way)
    if count == 1 or last - first >= 31 * count:
        return at
    return first if at - first < last - at else last
