"""How busy ranges are, as a table: a whole one, or one that fits a screen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rules.holdings import listed
from rules.load import Load
from rules.model import NODE
from rules.values import Value

ACCOUNTING = "net.netfilter.nf_conntrack_acct=1"
SORTS: Mapping[str, str] = MappingProxyType(
    {"o": "open", "n": "new", "p": "packets", "b": "bytes", "r": "range"}
)  # by the keys for them
TITLES = (
    "open",
    "unanswered",
    "new/s",
    "packets/s",
    "bytes/s",
    "range",
    "namespace",
    "to",
    "owner",
)
NUMBERS = 5  # of these columns, to the right
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class View(Value, kw_only=True):
    """What there is to see at one moment."""

    loads: tuple[Load, ...] = ()
    unaccounted: tuple[str, ...] = ()  # namespaces in which nobody counts packets
    troubles: tuple[str, ...] = ()  # lines about those that could not be looked at


def table(view: View, sort: str, clock: str) -> list[str]:
    """Every range, and what there is to say about them all."""
    rows = _rows(_sorted(view.loads, sort)) if view.loads else []
    return [_summary(view.loads, sort, clock), *rows, *_said(view)]


def screen(view: View, sort: str, clock: str, size: tuple[int, int]) -> list[str]:
    """As much as fits; what does not is summed up, and a line that is cut ends with a sign."""
    width, height = size
    keys = ", ".join(f"{key} {name}" for key, name in SORTS.items())
    above = [_summary(view.loads, sort, clock), f"q quits; sort by: {keys}"]
    notes = [*_said(view), *view.troubles][: max(0, height // 2 - len(above))]
    room = max(0, height - len(above) - len(notes) - 1)  # below the titles
    ordered = _sorted(view.loads, sort)
    shown = ordered if len(ordered) <= room else ordered[: max(0, room - 1)]
    lines = [*above, *_rows(shown)]
    if len(shown) < len(ordered):
        lines.append(f"and {_sums(ordered[len(shown) :])}")
    return [_cut(line, width) for line in (*lines, *notes)][:height]


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


def _rows(loads: Iterable[Load]) -> list[str]:
    """Under their titles, in columns; the last may be of any length."""
    rows = [TITLES, *(_cells(one) for one in loads)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(TITLES))]
    return [
        "  ".join(
            f"{cell:>{width}}" if at < NUMBERS else f"{cell:{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(one: Load) -> tuple[str, ...]:
    held = one.holding
    numbers = (rate(one.new), rate(one.packets), rate(one.octets))
    whither = listed(held.targets)
    return (str(one.open), str(one.unanswered), *numbers, held.what, one.netns, whither, held.whose)


def rate(number: float | None) -> str:
    """A few digits and a unit: 0, 1.5, 230, 4.1k; a dash where it is not known."""
    if number is None:
        return "-"
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _said(view: View) -> Iterator[str]:
    if not view.loads and not view.troubles:
        yield "Nothing of ours is live. `portranger apply -f FILE` sets it up."
    if view.loads and view.unaccounted:
        where = listed(view.unaccounted)
        yield (
            f"to count packets and bytes of new flows: {enabling(view.unaccounted[0])}"
            f" (not counted: {where})"
        )
    if uncounted := sum(one.uncounted for one in view.loads if one.packets is not None):
        yield f"packets/s, bytes/s: without {uncounted} flows that began before they were counted"


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
