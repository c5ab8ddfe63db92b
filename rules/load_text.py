"""How busy ranges are, as a table: a whole one, or one that fits a screen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from types import MappingProxyType

from rules.holdings import listed
from rules.load import Load
from rules.model import NODE
from rules.values import Value

ACCOUNTING = "net.netfilter.nf_conntrack_acct=1"
SORTS: Mapping[str, str] = MappingProxyType(
    {"o": "open", "n": "new", "p": "packets", "b": "bytes", "r": "range"}
)  # by the keys for them
OPEN, UNANSWERED, NEW, PACKETS, BYTES = "open", "unanswered", "new/s", "packets/s", "bytes/s"
RANGE, NETNS, TO, OWNER = "range", "namespace", "to", "owner"
NUMBERS = (OPEN, UNANSWERED, NEW, PACKETS, BYTES)  # to the right of their columns
TABLE = (*NUMBERS, RANGE, NETNS, TO, OWNER)  # a script finds numbers where they always are
SCREEN = (RANGE, *NUMBERS, NETNS, TO, OWNER)  # a person looks for the range
SPARED = (TO, UNANSWERED, PACKETS, BYTES, NETNS, NEW, OWNER, OPEN)  # the first first
BETWEEN = "  "  # columns
LEAST = 16  # letters of a name that is cut: fewer would tell nobody apart
TALL = 12  # lines of a screen on which what is said around the table may go on in the next line
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class View(Value, kw_only=True):
    """What there is to see at one moment."""

    loads: tuple[Load, ...] = ()
    unaccounted: tuple[str, ...] = ()  # namespaces in which nobody counts packets
    troubles: tuple[str, ...] = ()  # lines about those that could not be looked at


Cells = dict[str, str]  # by the titles of their columns


def table(view: View, sort: str, clock: str) -> list[str]:
    """Every range, and what there is to say about them all."""
    cells = [_cells(one) for one in _sorted(view.loads, sort)]
    rows = _rows(cells, TABLE) if cells else []
    return [_summary(view.loads, sort, clock), *rows, *map(": ".join, _said(view))]


def screen(view: View, sort: str, clock: str, size: tuple[int, int]) -> list[str]:
    """As much as fits; what does not is summed up, and a line that is cut ends with a sign."""
    width, height = size
    keys = ", ".join(f"{key} {name}" for key, name in SORTS.items())
    above = [_summary(view.loads, sort, clock), f"q quits; sort by: {keys}"]
    if height >= TALL:
        above = [part for line in above for part in _wrapped(line, width)]
    free = height - len(above) - 1 - len(view.loads)  # titles, and all ranges
    notes = _notes(view, width, max(0, height // 2 - len(above), free))
    room = max(0, height - len(above) - len(notes) - 1)  # below the titles
    ordered = _sorted(view.loads, sort)
    shown = ordered if len(ordered) <= room else ordered[: max(0, room - 1)]
    lines = [*above, *_fitted([_cells(one) for one in shown], _wanted(view), sort, width)]
    if len(shown) < len(ordered):
        lines.append(f"and {_sums(ordered[len(shown) :])}")
    return [_cut(line, width) for line in (*lines, *notes)][:height]


def _notes(view: View, width: int, most: int) -> list[str]:
    """What there is to say, in so many lines at most. What one may want to copy begins a line, and
    is all there or ends with a sign."""
    found: list[str] = []
    for parts in (*_said(view), *((trouble,) for trouble in view.troubles)):
        whole = ": ".join(parts)
        lines = [whole]
        if len(whole) > width:
            broken = (*(f"{one}:" for one in parts[:-1]), parts[-1])
            lines = [line for one in broken for line in _wrapped(one, width)]
        found += lines if len(found) + len(lines) <= most else [whole]
    return found[:most]


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return wrap(line, max(width, LEAST), subsequent_indent=BETWEEN, break_on_hyphens=False)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 1)] + ">"


def _sorted(loads: Iterable[Load], sort: str) -> list[Load]:
    """The busiest first; among equals, and where ranges are asked for, by namespace and port."""

    def weight(one: Load) -> tuple[float, ...]:
        busy = {"open": one.open, "new": one.new, "packets": one.packets, "bytes": one.octets}
        first = busy.get(sort)
        return () if sort == "range" else (-(first or 0), -one.open, -(one.new or 0))

    return sorted(loads, key=weight)


def _summary(loads: Sequence[Load], sort: str, clock: str) -> str:
    namespaces = len({one.netns for one in loads})
    where = "1 namespace" if namespaces == 1 else f"{namespaces} namespaces"
    return f"{clock}  {where}: {_sums(loads)}; sorted by {sort}"


def _sums(loads: Sequence[Load]) -> str:
    ranges = "1 range" if len(loads) == 1 else f"{len(loads)} ranges"
    rates = [one.new for one in loads if one.new is not None]
    return (
        f"{ranges}, {sum(one.open for one in loads)} open,"
        f" {sum(one.unanswered for one in loads)} unanswered,"
        f" {rate(sum(rates) if rates else None)} new/s"
    )


def _cells(one: Load) -> Cells:
    held = one.holding
    return {
        OPEN: str(one.open),
        UNANSWERED: str(one.unanswered),
        NEW: rate(one.new),
        PACKETS: rate(one.packets),
        BYTES: rate(one.octets),
        RANGE: held.what,
        NETNS: one.netns,
        TO: listed(held.targets),
        OWNER: held.whose,
    }


def _wanted(view: View) -> list[str]:
    """The columns of a screen: none of what nobody counts."""
    if view.loads and len(view.unaccounted) == len({one.netns for one in view.loads}):
        return [title for title in SCREEN if title not in (PACKETS, BYTES)]
    return list(SCREEN)


def _fitted(cells: Sequence[Cells], titles: Sequence[str], sort: str, width: int) -> list[str]:
    """Within that width: without the kinds of owners, then without what can best be spared, and
    with the ends of names. What it is sorted by stays."""
    if _total(_widths(cells, titles)) <= width:
        return _rows(cells, titles)
    shorter = [{**one, OWNER: _kindless(one[OWNER])} for one in cells]
    widths = _widths(shorter, titles)
    alone = len({one[NETNS] for one in cells}) == 1
    for title in (TO, *([NETNS] if alone else []), *SPARED):
        if _total({name: _least(name, size) for name, size in widths.items()}) <= width:
            break
        if title.removesuffix("/s") != sort:
            widths.pop(title, None)
    for name in (OWNER, NETNS):
        if name in widths:
            over = max(0, _total(widths) - width)
            widths[name] = max(_least(name, widths[name]), widths[name] - over)
    cut = [{title: _end(one[title], size) for title, size in widths.items()} for one in shorter]
    return _rows(cut, tuple(widths))


def _rows(cells: Sequence[Cells], titles: Sequence[str]) -> list[str]:
    """Under their titles, in columns; the last may be of any length."""
    widths = _widths(cells, titles)
    return [
        BETWEEN.join(
            f"{row[title]:>{size}}" if title in NUMBERS else f"{row[title]:{size}}"
            for title, size in widths.items()
        ).rstrip()
        for row in ({title: title for title in titles}, *cells)
    ]


def _widths(cells: Sequence[Cells], titles: Sequence[str]) -> dict[str, int]:
    return {title: max(len(title), *(len(one[title]) for one in cells), 0) for title in titles}


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + len(BETWEEN) * (len(widths) - 1)


def _least(title: str, size: int) -> int:
    """How narrow a column can be that would like to have that size."""
    return min(size, LEAST) if title in (NETNS, OWNER) else size


def _kindless(owner: str) -> str:
    """default/desktop/red, of VirtualMachine/default/desktop/red."""
    return owner.partition("/")[2] or owner


def _end(name: str, size: int) -> str:
    return name if len(name) <= size else f"<{name[len(name) - size + 1 :]}"


def rate(number: float | None) -> str:
    """A few digits and a unit: 0, 1.5, 230, 4.1k; a dash where it is not known."""
    if number is None:
        return "-"
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _said(view: View) -> Iterator[tuple[str, ...]]:
    """Lines, some of them with a command behind what it is for."""
    if not view.loads and not view.troubles:
        yield ("Nothing of ours is live. `portranger apply -f FILE` sets it up.",)
    if view.loads and view.unaccounted:
        where = listed(view.unaccounted)
        words = f"to count packets and bytes of new flows (not counted: {where})"
        yield words, enabling(view.unaccounted[0])
    if uncounted := sum(one.uncounted for one in view.loads if one.packets is not None):
        words = f"without {uncounted} flows that began before they were counted"
        yield (f"packets/s, bytes/s: {words}",)


def enabling(netns: str) -> str:
    """The command that has the packets of flows counted in a namespace."""
    setting = f"sysctl -w {ACCOUNTING}"
    if netns == NODE:
        return setting
    if "/" in netns:
        return f"nsenter --net={netns} {setting}"
    if netns.startswith("pid:"):
        return f"nsenter -t {netns.removeprefix('pid:')} -n {setting}"
    if ":" in netns:
        return f"{setting} (in that namespace)"
    return f"ip netns exec {netns} {setting}"
