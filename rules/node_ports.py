"""Which node ports a Service gets, where no API server decides it: on bare metal.

The range has two bands, as in Kubernetes (KEP-3668): whoever wishes for a port names any of the
range, who wishes for none gets one of the upper band, at random, and of the lower band only when
the upper has none left. The lower band so stays free for wishes. Kubernetes hands out single
ports; here a holder gets a run of as many as it needs.

As in Kubernetes, a number belongs to one Service, over all protocols: another one cannot have its
UDP when the first has its TCP, though the kernel could tell them apart (kubernetes#91404). So what
works here works in a cluster, and a Service can add the other protocol later. Within a Service, two
ports of different protocols may share a number: for DNS, take for udp what tcp was given.

Everything here is a value; chance comes in as a function. Within, the ports of the range are the
bits of one number, the first port being the lowest: 2,768 of them are searched in microseconds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

from rules.model import Protocol
from rules.ports import PortRange
from rules.problems import Path, Problem
from rules.values import Value

Pick = Callable[[int], int]  # any of 0 to n - 1, as randrange of random.Random gives it

SMALLEST_LOWER, LARGEST_LOWER, STEP = 16, 128, 32

# Of this many places drawn, the one in the shortest free stretch is taken: still anywhere, but long
# stretches last. And a run that has not this many times its length round it goes to an end of the
# stretch. Under churn at 70 % load, one request in 250 then finds no run, of pure chance one in 4;
# ports just given back are the next to be given out half as often as with first fit.
DRAWS, ROOM = 8, 32


class Bands(Value):
    """The range of node ports: below those for wishes, above those for everybody else."""

    ports: PortRange

    @property
    def offset(self) -> int:
        """How many ports the lower band has; none, if that would be all of them."""
        size = len(self.ports)
        if size <= SMALLEST_LOWER:
            return 0
        return min(max(SMALLEST_LOWER, size // STEP), LARGEST_LOWER)

    @property
    def lower(self) -> PortRange | None:
        first = self.ports.first
        return PortRange(first, first + self.offset - 1) if self.offset else None

    @property
    def upper(self) -> PortRange:
        return PortRange(self.ports.first + self.offset, self.ports.last)


class Holder(Value):
    """What ports are held for: one port, or range of ports, of a Service."""

    owner: str  # Service/namespace/name
    port: str  # its name there; empty, if it is the only one
    protocol: Protocol

    def __str__(self) -> str:
        named = f" port {self.port}" if self.port else ""
        return f"{self.owner}{named} ({self.protocol.value})"

    @property
    def key(self) -> tuple[str, str, str]:
        """Where it stands in output."""
        return self.owner, self.port, self.protocol.value


Held = tuple[Holder, PortRange]


class Allocations(Value):
    """Who holds what: in order of the holders, nothing held twice, all within the range."""

    bands: Bands
    held: tuple[Held, ...] = ()

    def of(self, holder: Holder) -> PortRange | None:
        """What somebody holds."""
        place = _place(self.held, holder)
        found = self.held[place : place + 1]
        return found[0][1] if found and found[0][0] == holder else None


class Refused(Value, kw_only=True):
    """Why somebody did not get what it asked for."""

    code: str
    holder: Holder  # who asked
    what: str
    fix: str
    wish: PortRange | None = None
    held_by: Holder | None = None
    longest: PortRange | None = None  # the first of the longest runs that were free

    def problem(self, path: Path) -> Problem:
        """The same, told where the port is written."""
        return Problem(code=self.code, path=path, what=self.what, fix=self.fix)


class Rebuilt(Value):
    """What could be believed of what was found, and what could not."""

    allocations: Allocations
    refused: tuple[Refused, ...]


class Usage(Value):
    """How many numbers are held, by whatever protocol, and how many are not."""

    allocated: int
    available: int


def rebuild(bands: Bands, live: Iterable[Held]) -> Rebuilt:
    """The allocations found in the state or the kernel; where two disagree, the earlier counts.

    What lies outside the range, as it was changed, is refused: its holder must ask anew.
    """
    kept, refused, taken = dict[Holder, PortRange](), list[Refused](), 0
    for holder, ports in live:
        if kept.get(holder) == ports:
            continue
        bits = _bits(bands, ports)
        seen = holder in kept or bits & taken  # most are not, and need no comparison with all
        why = _unfit(bands, kept.items() if seen else (), holder, ports)
        if why:
            refused.append(why)
        else:
            kept[holder] = ports
            taken |= bits
    held = tuple(sorted(kept.items(), key=lambda pair: pair[0].key))
    return Rebuilt(Allocations(bands, held), tuple(refused))


def assign(known: Allocations, holder: Holder, wish: PortRange) -> Allocations | Refused:
    """These very ports, from either band, in place of what it may hold."""
    if known.of(holder) == wish:
        return known
    rest = release(known, holder)
    return _unfit(rest.bands, rest.held, holder, wish) or _with(rest, holder, wish)


def allocate(
    known: Allocations, holder: Holder, count: int, pick: Pick, avoid: Iterable[PortRange] = ()
) -> Allocations | Refused:
    """So many ports in a row: those it holds, as far as possible, or others at random.

    Never those to avoid, such as ports that the node itself listens on; but what is held is kept.
    """
    if count < 1:
        raise ValueError(f"nobody can be given {count} ports")
    held = known.of(holder)
    if held and len(held) == count:
        return known
    rest = release(known, holder)
    free = _free(rest, avoid)
    base = known.bands.ports.first
    first = held.first - base if held and _resizes(rest, held, count, free) else None
    if first is None:
        first = _found(free, known.bands.offset, count, pick)
    if first is None:
        return _exhausted(known.bands, holder, count, free)
    return _with(rest, holder, PortRange(base + first, base + first + count - 1))


def release(known: Allocations, *holders: Holder) -> Allocations:
    """Without what these hold; who holds nothing may be among them."""
    held = known.held
    for holder in holders:
        place = _place(held, holder)
        if place < len(held) and held[place][0] == holder:
            held = held[:place] + held[place + 1 :]
    return known if held is known.held else Allocations(known.bands, held)


def usage(known: Allocations, within: PortRange) -> Usage:
    """How full the range, or one of its bands, is."""
    available = (_free(known) & _bits(known.bands, within)).bit_count()
    return Usage(len(within) - available, available)


def _place(held: tuple[Held, ...], holder: Holder) -> int:
    return bisect_left(held, holder.key, key=lambda pair: pair[0].key)


def _with(known: Allocations, holder: Holder, ports: PortRange) -> Allocations:
    place = _place(known.held, holder)
    held = (*known.held[:place], (holder, ports), *known.held[place:])
    return Allocations(known.bands, held)


# ------------------------------------------------------------------------------------- refusals


def _unfit(
    bands: Bands, held: Iterable[Held], holder: Holder, wish: PortRange
) -> Refused | None:
    """Why these ports cannot be its own."""
    if wish.first < bands.ports.first or wish.last > bands.ports.last:
        return Refused(
            code="node-port-outside",
            holder=holder,
            what=f"{wish} is not within the node ports {bands.ports}",
            fix=f"Choose from {bands.ports}, or widen node_ports.range.",
            wish=wish,
        )
    for other, ports in held:
        same = other.owner == holder.owner and other.protocol is not holder.protocol
        if (wish.first <= ports.last and ports.first <= wish.last and not same) or other == holder:
            return Refused(
                code="node-port-taken",
                holder=holder,
                what=f"{wish} meets the node port {ports} of {other}",
                fix="Choose others, or leave them out and get some that are free.",
                wish=wish,
                held_by=other,
            )
    return None


def _exhausted(bands: Bands, holder: Holder, count: int, free: int) -> Refused:
    """There is no such run; the longest there is may help to decide."""
    text = bin(free)[:1:-1]  # the first port first
    run = max(text.split("0"), key=len)
    first = bands.ports.first + text.index(run)
    longest = PortRange(first, first + len(run) - 1) if run else None
    wanted = f"no {count} node ports in a row are" if count > 1 else "no node port is"
    there = f"the longest free run is {longest}, {len(run)} ports" if longest else "all are taken"
    return Refused(
        code="node-ports-exhausted",
        holder=holder,
        what=f"{wanted} free in {bands.ports}: {there}",
        fix="Ask for fewer, remove Services, or widen node_ports.range.",
        longest=longest,
    )


# ----------------------------------------------------------------------------------- the search


def _bits(bands: Bands, ports: PortRange) -> int:
    """The ports, as far as they are within the range."""
    first, last = max(ports.first, bands.ports.first), min(ports.last, bands.ports.last)
    return ((1 << (last - first + 1)) - 1) << (first - bands.ports.first) if first <= last else 0


def _free(known: Allocations, avoid: Iterable[PortRange] = ()) -> int:
    taken = 0
    for _, ports in known.held:
        taken |= _bits(known.bands, ports)
    for ports in avoid:
        taken |= _bits(known.bands, ports)
    return _bits(known.bands, known.bands.ports) & ~taken


def _resizes(rest: Allocations, held: PortRange, count: int, free: int) -> bool:
    """Whether it can shrink or grow where it is, so that the ports it keeps lead where they did."""
    if count <= len(held):
        return True
    last = held.first + count - 1
    if last > rest.bands.ports.last:
        return False
    more = _bits(rest.bands, PortRange(held.last + 1, last))
    return free & more == more


def _found(free: int, offset: int, count: int, pick: Pick) -> int | None:
    """Where a run begins: in the upper band; or across both, with the least of the lower; or there.

    Wishes live on the lower band, so every port of it that is left to them counts.
    """
    starts = _starts(free, count)
    if starts >> offset:
        return offset + _chosen(free >> offset, starts >> offset, count, pick)
    highest = starts.bit_length() - 1
    if not starts or highest + count > offset:
        return highest if starts else None
    return _chosen(free & ((1 << offset) - 1), starts, count, pick)


def _starts(free: int, count: int) -> int:
    """The ports that begin a free run of that length, found by doubling it."""
    length = 1
    while length < count:
        more = min(length, count - length)
        free &= free >> more
        length += more
    return free


def _chosen(free: int, starts: int, count: int, pick: Pick) -> int:
    """One of the starts, by chance, but rather where little is free than where much is."""
    ways = starts.bit_count()
    drawn = [_nth(starts, pick(ways)) for _ in range(DRAWS)]
    length, first, at = min(
        ((end - first, first, at) for at in drawn for first, end in [_stretch(free, at)]),
        key=lambda one: one[0],
    )
    if count == 1 or length >= ROOM * count:
        return at
    return first if at - first < length - count - (at - first) else first + length - count


def _nth(bits: int, n: int) -> int:
    """Where the n-th of the set bits is."""
    at, width = 0, bits.bit_length()
    while width > 1:
        half = width // 2
        low = bits & ((1 << half) - 1)
        ones = low.bit_count()
        if n < ones:
            bits, width = low, half
        else:
            bits, n, at, width = bits >> half, n - ones, at + half, width - half
    return at


def _stretch(free: int, at: int) -> tuple[int, int]:
    """The free ports round a free one: the first, and the one after the last."""
    above = free >> at
    first = (~free & ((1 << at) - 1)).bit_length()
    return first, at + (~above & (above + 1)).bit_length() - 1
