"""The rows as a table of Markdown, which reads as well in a terminal, and as JSON."""

from collections.abc import Sequence

from rules.values import Value

HEADS = (
    "",
    "set up, ms",
    "change, ms",
    "remove, ms",
    "rules",
    "new flow",
    "MiB",
    "9000-9009 to 7000-7009",
    "after a flush",
    "open UDP flow",
)
LEGEND = """\
The job: TCP and UDP 1000-8000 from the pod's eth0 to the guest, IPv4; then TCP to 8001; then
nothing. Medians of rounds in which all take turns, each in namespaces of its own; that the job was
done is proven by packets. `~` is extrapolated, linearly, from as many ports as the notes name; `≥`
is measured with those only.

- new flow: time to send the first packet of a UDP flow, median over the range, relative to plain
  routing without rules or connection tracking
- MiB: resident in what must go on running, beside the guest
- open UDP flow: what becomes of one when its port is removed, on a node that has other rules too
"""


class Row(Value, kw_only=True):
    """A peer, as measured; or the reason why it was not."""

    name: str
    reason: str = ""
    how: str = ""
    set_up: float | None = None  # ms, as are the next two
    change: float | None = None
    remove: float | None = None
    measured: tuple[tuple[float, ...], ...] = ()  # every round of the three, in ms
    sample: int | None = None  # ports of each protocol that were really set up
    rules: int | None = None
    flow: float | None = None  # relative to plain routing
    memory: float | None = None  # MiB
    shifted: str = ""
    flushed: str = ""
    left_open: str = ""
    notes: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        about, at_least = ("~", "≥") if self.sample else ("", "")
        return (
            self.name,
            _number(self.set_up, about),
            _number(self.change, about),
            _number(self.remove, at_least),
            "-" if self.rules is None else f"{about}{self.rules:,}",
            "-" if self.flow is None else f"{self.flow:.2f}",
            "-" if self.memory is None else f"{self.memory:.1f}",
            self.shifted or "-",
            self.flushed,
            self.left_open,
        )

    def note(self) -> str:
        sampled = f"{self.sample} ports of each protocol measured" if self.sample else ""
        count = len(self.measured[0]) if self.measured else 0
        rounds = "1 round" if count == 1 else f"{count} rounds"
        return "; ".join(filter(None, (self.how, *self.notes, sampled, rounds)))


def _number(value: float | None, prefix: str) -> str:
    if value is None:
        return "-"
    return f"{prefix}{value:.2f}" if value < 10 else f"{prefix}{value:,.0f}"


def lines(rows: Sequence[Row], machine: Sequence[str]) -> list[str]:
    """Everything there is to say."""
    done = [row for row in rows if not row.reason]
    not_done = [row for row in rows if row.reason]
    made = [*_table([HEADS, *(row.cells() for row in done)]), ""]
    made += [*LEGEND.splitlines(), ""]
    made += [f"- {row.name}: {row.note()}" for row in done]
    if not_done:
        made += ["", "Not measured:", "", *(f"- {row.name}: {row.reason}" for row in not_done)]
    return [*made, "", *machine]


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    made = [_line(row, widths) for row in cells]
    return [made[0], _line(["-" * width for width in widths], widths), *made[1:]]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return f"| {' | '.join(texts)} |"


def as_json(rows: Sequence[Row], machine: Sequence[str]) -> dict[str, object]:
    fields: tuple[str, ...] = Row.__match_args__
    return {
        "machine": list(machine),
        "peers": [{field: getattr(row, field) for field in fields} for row in rows],
    }
