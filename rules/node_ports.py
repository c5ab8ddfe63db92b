"""Which node ports a Service gets where no API server decides it: on bare metal.

The range has two bands, as in Kubernetes (KEP-3668): who wishes for ports names any of the range;
who does not gets some of the upper band, at random, and of the lower only when the upper has none
left, so that wishes find the lower one free. Kubernetes knows single ports; here it is runs.

As in Kubernetes, a number belongs to one Service whatever the protocol, though the kernel could
tell two apart (kubernetes#91404): what works here works in a cluster, and a Service can add the
other protocol later. Two ports of one Service may share numbers if their protocols differ: as the
API server does for DNS, wish for udp what tcp was given.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from rules.model import Protocol
from rules.ports import HIGHEST, PortRange
from rules.problems import Path, Problem
from rules.values import Value

Pick = Callable[[int], int]  # any of 0 to n - 1, like random.Random().randrange
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


Held = tuple[Holder, PortRange]


class Allocations(Value):
    """Who holds what, in order of the holders. Begin with none, or rebuild them."""

    bands: Bands
    held: tuple[Held, ...] = ()

    def of(self, holder: Holder) -> PortRange | None:
        found = self.held[(place := _place(self.held, holder)) : place + 1]
        return found[0][1] if found and found[0][0] == holder else None

    def available(self, within: PortRange) -> int:
        """How many numbers of the range, or of a band, nobody holds for any protocol."""
        gaps = _between(within.first, within.last, _gaps(self))
        return sum(last - first + 1 for first, last in gaps)


class Refused(Value, kw_only=True):
    """Why somebody does not get what it asked for."""

    holder: Holder
    code: str
    what: str
    fix: str
    held_by: Holder | None = None
    longest: PortRange | None = None  # free run, the first of several

    def problem(self, path: Path) -> Problem:
        return Problem(code=self.code, path=path, what=self.what, fix=self.fix)


def rebuild(bands: Bands, live: Iterable[Held]) -> tuple[Allocations, tuple[Refused, ...]]:
    """What was found in the state, then in the kernel; where two disagree, the earlier counts.

    What is outside the range, because that was changed, is refused: its holder must ask anew.
    """
    kept, refused, numbers = dict[Holder, PortRange](), list[Refused](), set[int]()
    for holder, ports in live:
        if kept.get(holder) == ports:
            continue
        mine = range(ports.first, ports.last + 1)
        lone = holder not in kept and numbers.isdisjoint(mine)  # most are: compare with no other
        if why := _unfit(bands, () if lone else kept.items(), holder, ports):
            refused.append(why)
        else:
            kept[holder] = ports
            numbers.update(mine)
    return Allocations(bands, tuple(sorted(kept.items(), key=_order))), tuple(refused)


def assign(known: Allocations, holder: Holder, wish: PortRange) -> Allocations | Refused:
    """These very ports, of either band, in place of what it may hold."""
    if known.of(holder) == wish:
        return known
    rest = release(known, holder)
    return _unfit(rest.bands, rest.held, holder, wish) or _with(rest, holder, wish)


def allocate(
    known: Allocations, holder: Holder, count: int, pick: Pick, avoid: Iterable[PortRange] = ()
) -> Allocations | Refused:
    """So many ports in a row: what it holds, cut or grown in place if possible, or any at random.

    None that are to be avoided, such as those the node listens on; but what is held is kept.
    """
    held = known.of(holder)
    if held and len(held) == count:
        return known
    rest = release(known, holder)
    gaps = _gaps(rest, avoid)
    first = _kept(held, count, gaps) or _found(known.bands, count, gaps, pick)
    if first is None:
        return _exhausted(known.bands, holder, count, gaps)
    return _with(rest, holder, PortRange(first, first + count - 1))


def release(known: Allocations, *holders: Holder) -> Allocations:
    """Without what these hold, if they do."""
    if not any(map(known.of, holders)):
        return known
    return Allocations(known.bands, tuple(one for one in known.held if one[0] not in holders))


def _with(known: Allocations, holder: Holder, ports: PortRange) -> Allocations:
    held, place = known.held, _place(known.held, holder)
    return Allocations(known.bands, (*held[:place], (holder, ports), *held[place:]))


def _place(held: tuple[Held, ...], holder: Holder) -> int:
    return bisect_left(held, (holder.owner, holder.port, holder.protocol.value), key=_order)


def _order(held: Held) -> tuple[str, str, str]:
    return held[0].owner, held[0].port, held[0].protocol.value


def _unfit(bands: Bands, held: Iterable[Held], holder: Holder, wish: PortRange) -> Refused | None:
    """Why these ports cannot be its own."""
    if wish.first < bands.ports.first or wish.last > bands.ports.last:
        what = f"{wish} is not within the node ports {bands.ports}"
        fix = "Choose from these, or change node_ports.range."
        return Refused(holder=holder, code="node-port-outside", what=what, fix=fix)
    for other, ports in held:
        may_share = other.owner == holder.owner and other.protocol is not holder.protocol
        if other == holder or (ports.overlaps(wish) and not may_share):
            what = f"{wish} cannot be given: node port {ports} is held by {other}"
            fix = "Choose another, or none to be given one."
            return Refused(holder=holder, code="node-port-taken", what=what, fix=fix, held_by=other)
    return None


def _exhausted(bands: Bands, holder: Holder, count: int, gaps: Sequence[Gap]) -> Refused:
    run = f"{count} node ports in a row are" if count > 1 else "node port is"
    longest = max((PortRange(*gap) for gap in gaps), key=len, default=None)
    left = f"the longest free run is {longest} ({len(longest)})" if longest else "all are taken"
    what = f"no {run} free in {bands.ports}: {left}"
    fix = "Ask for fewer, remove Services, or change node_ports.range."
    code = "node-ports-exhausted"
    return Refused(holder=holder, code=code, what=what, fix=fix, longest=longest)


def _gaps(known: Allocations, avoid: Iterable[PortRange] = ()) -> list[Gap]:
    """What is free, in order."""
    taken = [(ports.first, ports.last) for _, ports in known.held]
    taken += [(ports.first, ports.last) for ports in avoid]
    gaps, first = list[Gap](), 0
    for start, end in sorted(taken):
        if first < start:
            gaps.append((first, start - 1))
        first = max(first, end + 1)
    return _between(known.bands.ports.first, known.bands.ports.last, [*gaps, (first, HIGHEST)])


def _between(lowest: int, highest: int, gaps: Iterable[Gap], count: int = 1) -> list[Gap]:
    """What of them lies there, where it is a run of so many."""
    cut = ((max(first, lowest), min(last, highest)) for first, last in gaps)
    return [(first, last) for first, last in cut if last - first + 1 >= count]


def _kept(held: PortRange | None, count: int, gaps: Sequence[Gap]) -> int | None:
    """Where it begins now, if it can be so long there: what it keeps then leads where it did."""
    if not held:
        return None
    last = held.first + count - 1
    grows = any(first <= held.last + 1 and last <= end for first, end in gaps)
    return held.first if last <= held.last or grows else None


def _found(bands: Bands, count: int, gaps: Sequence[Gap], pick: Pick) -> int | None:
    """Where a run can begin: in the upper band, else where it takes the least of the lower."""
    highest, upper = bands.ports.last, bands.upper.first
    if wide := _between(upper, highest, gaps, count):
        return _drawn(wide, count, pick)
    wide = _between(bands.ports.first, highest, gaps, count)
    if wide and wide[-1][1] >= upper:
        return wide[-1][1] - count + 1
    return _drawn(wide, count, pick) if wide else None


def _drawn(gaps: Sequence[Gap], count: int, pick: Pick) -> int:
    """Where a run begins: anywhere, but of 8 draws the one in the shortest gap, so that long ones
    last, and at an end of it unless that has ample room.

    Under churn at 70 % load, one request in 250 so finds no run; by chance alone one in four.
    """
    ways = list(accumulate(last - first + 2 - count for first, last in gaps))
    draws = [(bisect_right(ways, way), way) for way in (pick(ways[-1]) for _ in range(8))]
    place, way = min(draws, key=lambda draw: gaps[draw[0]][1] - gaps[draw[0]][0])
    first, last = gaps[place][0], gaps[place][1] - count + 1
    at = last - (ways[place] - 1 - way)
    if count == 1 or last - first >= 31 * count:
        return at
    return first if at - first < last - at else last
