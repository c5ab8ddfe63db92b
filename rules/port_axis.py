"""Ports drawn on a line of plain text, each range by a letter; what is to be seen where.

Nothing is left out unsaid: where there are more ranges than letters, the busiest have them; where
several are too close for the width, they are drawn again, larger.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from rules.holdings import Holding, listed
from rules.model import Protocol
from rules.ports import ALL_PORTS, HIGHEST, PortRange, coalesce
from rules.values import Value

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_AXES = 8  # of a namespace, by entrance; else one a protocol
MOST_CLOSE_UPS = 3  # of an axis
NARROWEST = 20  # columns of an axis, whatever the terminal has
MARGIN = "  "
LABEL = 8  # columns from one number below the axis to the next, at the least

Paint = Callable[[str, int], str]  # a text in the colour of the range with that number


def unpainted(text: str, _: int) -> str:
    """The paint of who sees no colours."""
    return text


class Style(Value, kw_only=True):
    """What is drawn with, and how wide."""

    width: int = 80
    free: str = "."
    other: str = "#"  # a range without a letter
    several: str = "*"
    bar: str = "#"
    tick: str = "|"
    paint: Paint = unpainted

    @property
    def columns(self) -> int:
        """Of an axis."""
        return max(NARROWEST, self.width - len(MARGIN))


class Axis(Value, kw_only=True):
    """What is drawn on one line: the ranges of a protocol that share an entrance."""

    title: str
    held: tuple[Holding, ...]
    mixed: bool = False  # in truth of many entrances, so that each says its own

    @property
    def used(self) -> tuple[PortRange, ...]:
        return coalesce(one.ports for one in self.held)

    @property
    def letters(self) -> dict[int, int]:
        """The numbers of the letters of the busiest, in the order of ports."""
        busiest = sorted(range(len(self.held)), key=lambda at: -self.held[at].packets)
        chosen = sorted(busiest[: len(LETTERS)])
        return {at: number for number, at in enumerate(chosen)}


class Span(Value):
    """The ports that some columns stand for, as evenly as it goes."""

    first: int
    last: int
    columns: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def column(self, port: int) -> int:
        """Where a port of the span is."""
        return (port - self.first) * self.columns // len(self)

    def covered(self, ports: PortRange) -> range:
        """The columns that hold any of these ports."""
        first, last = max(ports.first, self.first), min(ports.last, self.last)
        return range(self.column(first), self.column(last) + 1) if first <= last else range(0)

    def __str__(self) -> str:
        each = len(self) / self.columns
        size = "1 port" if each == 1 else f"{each:.1f} ports" if each < 10 else f"{each:.0f} ports"
        return f"{self.first} to {self.last}, {size} a column"


def axes(held: Sequence[Holding]) -> list[Axis]:
    """By protocol and entrance; by protocol alone, where there are too many of those."""
    found: dict[tuple[Protocol | None, str], list[Holding]] = {}
    for one in held:
        found.setdefault((one.protocol, listed(one.entrances)), []).append(one)
    mixed = len(found) > MOST_AXES
    if mixed:
        found = {}
        for one in held:
            found.setdefault((one.protocol, "wherever it comes in"), []).append(one)
    return [
        Axis(title=_title(protocol, where), held=tuple(group), mixed=mixed)
        for (protocol, where), group in found.items()
    ]


def _title(protocol: Protocol | None, where: str) -> str:
    return " ".join(filter(None, [protocol.value if protocol else "every protocol", where]))


def span_of(held: Iterable[Holding], columns: int) -> Span:
    """All ports; or where less than half of them are between the first and the last that is held,
    those, from one round number to another."""
    ports = [one.ports for one in held]
    first, last = min(one.first for one in ports), max(one.last for one in ports)
    step = 10 ** max(1, len(str(last - first)) - 1)
    first, last = first // step * step, (last // step + 1) * step
    if 2 * (last - first) > HIGHEST:
        first, last = ALL_PORTS.first, ALL_PORTS.last
    first, last = max(first, ALL_PORTS.first), min(last, ALL_PORTS.last)
    return Span(first, last, min(columns, last - first + 1))


def drawn(axis: Axis, whole: Span, style: Style) -> Iterator[str]:
    """The axis, and once more, larger, where several are in one column."""
    yield MARGIN + _cells(axis, whole, style)
    yield MARGIN + ruler(whole, style.tick)
    close = _close_ups(axis, whole, style.columns)
    for span in close[:MOST_CLOSE_UPS]:
        yield f"{MARGIN}closer: {span}"
        yield MARGIN + _cells(axis, span, style)
        yield MARGIN + ruler(span, style.tick)
    if (more := len(close) - MOST_CLOSE_UPS) > 0:
        yield f"{MARGIN}and {more} more places where several share a column"


def _cells(axis: Axis, span: Span, style: Style) -> str:
    letters = axis.letters

    def cell(here: Sequence[int]) -> str:
        if len(here) != 1:
            return style.several if here else style.free
        number = letters.get(here[0])
        return style.other if number is None else style.paint(LETTERS[number], number)

    return "".join(map(cell, seen(axis.held, span)))


def seen(held: Sequence[Holding], span: Span) -> list[list[int]]:
    """Which ranges are to be seen in each column. Who has others gives way to who has only this
    one: a single port beside a wide range must not be lost. Of neighbours that meet in a column the
    first has it; those that hold the same ports are all there."""
    narrow: list[list[int]] = [[] for _ in range(span.columns)]
    wide: list[list[int]] = [[] for _ in range(span.columns)]
    for at, one in enumerate(held):
        covered = span.covered(one.ports)
        only = len(covered) == 1 and one.ports.first >= span.first and one.ports.last <= span.last
        for column in covered:
            (narrow if only else wide)[column].append(at)
    return [few or _meeting(held, many) for few, many in zip(narrow, wide, strict=True)]


def _meeting(held: Sequence[Holding], here: list[int]) -> list[int]:
    same = any(held[a].ports.overlaps(held[b].ports) for a, b in pairwise(here))
    return here if same else here[:1]


def _close_ups(axis: Axis, whole: Span, columns: int) -> list[Span]:
    """The places where several share a column, the most crowded first; none that would show hardly
    more."""
    crowds: list[list[Holding]] = []
    before = -2
    for column, here in enumerate(seen(axis.held, whole)):
        if len(here) > 1:
            if column > before + 1:
                crowds.append([])
            crowds[-1] += [axis.held[at] for at in here]
            before = column
    spans = [span_of(crowd, columns) for crowd in sorted(crowds, key=len, reverse=True)]
    return [span for span in dict.fromkeys(spans) if 2 * len(span) < len(whole)]


def ruler(span: Span, tick: str) -> str:
    """Round numbers below the columns that they are in, as many as there is room for."""
    line = f"{tick}{span.first}"
    for port in range(span.first - span.first % (step := _step(span)) + step, span.last, step):
        column = span.column(port)
        if column >= len(line) + 1 and column + len(str(port)) < span.columns:
            line = f"{line:{column}}{tick}{port}"
    return line


def _step(span: Span) -> int:
    """The least of 1, 2, 5, 10, 20, ... ports that is as wide as a label."""
    least = len(span) * LABEL / span.columns
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
