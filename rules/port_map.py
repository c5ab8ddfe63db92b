"""The ports of a namespace as a picture in plain text: an axis for each protocol and entrance, and
a legend that says whose each range is, where it goes, what went through, and what is free."""

from collections.abc import Iterator, Sequence

from rules.holdings import Holding, listed
from rules.port_axis import LETTERS, MARGIN, Axis, Span, Style, axes, drawn, seen, span_of
from rules.ports import ALL_PORTS, HIGHEST, PortRange, subtract
from rules.values import Value

BAR = 10  # columns of the longest


def port_map(held: Sequence[Holding], style: Style) -> Iterator[str]:
    """The picture of what a namespace forwards; all axes have one scale, to be compared."""
    if not held:
        return
    whole = span_of(held, style.columns)
    busiest = max(one.packets for one in held)
    yield f"ports {whole}"
    for axis in axes(held):
        ranges = "1 range" if len(axis.held) == 1 else f"{len(axis.held)} ranges"
        yield f"{axis.title}: {ranges}, {sum(map(len, axis.used))} of {HIGHEST} ports"
        yield from drawn(axis, whole, style)
        yield from _legend(axis, whole, busiest, style)


class Row(Value, kw_only=True):
    """A line of the legend: what is aligned with the others, and what may go to lines below."""

    first: int
    glyph: str
    cells: tuple[str, ...]
    bar: str = ""
    tail: tuple[str, ...] = ()


def _legend(axis: Axis, whole: Span, busiest: int, style: Style) -> Iterator[str]:
    letters = axis.letters
    rows = [_row(axis, at, number, busiest, style) for at, number in letters.items()]
    free = subtract([ALL_PORTS], axis.used)
    rest = [one for at, one in enumerate(axis.held) if at not in letters]
    if not rest:
        rows += [_free(ports, style) for ports in free]
        rows.sort(key=lambda row: row.first)
    if any(len(here) > 1 for here in seen(axis.held, whole)):
        yield f"{MARGIN}{style.several}  several in one column"
    yield from _written(rows, style)
    if rest:
        packets, octets = sum(one.packets for one in rest), sum(one.octets for one in rest)
        yield (
            f"{MARGIN}{style.other}  and {len(rest)} more that are less busy:"
            f" {packets} packets, {octets} bytes"
        )
        yield f"{MARGIN}{style.free}  {_free_in_all(free)}"


def _row(axis: Axis, at: int, number: int, busiest: int, style: Style) -> Row:
    one = axis.held[at]
    where = f" {listed(one.entrances)}" if axis.mixed else ""
    length = -(-one.packets * BAR // busiest) if busiest else 0
    return Row(
        first=one.ports.first,
        glyph=style.paint(LETTERS[number], number),
        cells=(
            f"{one.ports}{where}",
            "1 port" if len(one.ports) == 1 else f"{len(one.ports)} ports",
            f"{one.packets} packets",
            f"{one.octets} bytes",
        ),
        bar=style.bar * length,
        tail=(f"-> {listed(one.targets)}", one.whose),
    )


def _free(ports: PortRange, style: Style) -> Row:
    return Row(first=ports.first, glyph=style.free, cells=(str(ports), f"{len(ports)} free"))


def _free_in_all(free: Sequence[PortRange]) -> str:
    if not free:
        return "no port is free"
    largest = max(free, key=len)
    ports = sum(map(len, free))
    return f"{ports} free; the largest gap is {largest}, {len(largest)} ports"


def _written(rows: Sequence[Row], style: Style) -> Iterator[str]:
    """In columns; where a line would be too long, what is longest in all goes below."""
    widths = [
        max((len(row.cells[at]) for row in rows if at < len(row.cells)), default=0)
        for at in range(4)
    ]
    bars = max((len(row.bar) for row in rows), default=0)
    heads = [_head(row, widths, bars) for row in rows]
    indent = len(MARGIN) + 3
    whole = indent + max(map(len, heads), default=0)
    target = max((len(row.tail[0]) for row in rows if row.tail), default=0)
    owner = max((len(row.tail[1]) for row in rows if row.tail), default=0)
    for row, head in zip(rows, heads, strict=True):
        start = f"{MARGIN}{row.glyph}  "
        if not row.tail:
            yield f"{start}{head.rstrip()}"
        elif whole + 2 + target + 2 + owner <= style.width:
            yield f"{start}{head}  {row.tail[0]:{target}}  {row.tail[1]}"
        else:
            yield f"{start}{head.rstrip()}"
            together = indent + len(row.tail[0]) + 2 + len(row.tail[1]) <= style.width
            below = ["  ".join(row.tail)] if together else row.tail
            yield from (f"{'':{indent}}{words}" for words in below)


def _head(row: Row, widths: Sequence[int], bars: int) -> str:
    cells = [f"{row.cells[0]:{widths[0]}}"]
    cells += [f"{cell:>{width}}" for cell, width in zip(row.cells[1:], widths[1:], strict=False)]
    return "  ".join([*cells, f"{row.bar:{bars}}"] if row.tail and bars else cells)
