"""What a run of the bench measured, for docs/bench: all of it as JSON, with the machine it was
measured on, and the curves as SVG, drawn by hand."""

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from bench.measure import Table, rounded
from rules.values import Value

FOLDER = Path(__file__).parent.parent / "docs" / "bench"
RESULTS = "results.json"
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
# As far from black as from white, so that a reader's background may be either.
INK = "#7a7f87"
COLOURS = ("#d9822b", "#2b8ad9", "#3aa05a", "#a05ac8")

Points = tuple[tuple[float, float], ...]


class Plot(Value, kw_only=True):
    """A picture of some of the series of a section."""

    section: str
    file: str
    title: str
    across: str
    up: str
    series: tuple[str, ...] = ()  # none: all
    logarithmic: bool = True


PLOTS = (
    Plot(
        section="flows-udp",
        file="new-flow.svg",
        title="A new UDP flow, by the number of ranges (the last is hit)",
        across="ranges in the namespace",
        up="processor time, µs",
    ),
    Plot(
        section="control-one-of",
        file="change-one.svg",
        title="One range is changed",
        across="ranges in the namespace",
        up="until it is effective, ms",
        series=("one range changed",),
    ),
    Plot(
        section="control-one-of",
        file="change-many.svg",
        title="Some of 5,000 ranges are changed",
        across="ranges changed",
        up="until they are effective, ms",
        series=("of 5000 ranges",),
        logarithmic=False,
    ),
)


def write(measured: Mapping[str, Table], folder: Path = FOLDER) -> list[Path]:
    """Put these sections into the results, beside those of other runs, and draw what there is to
    draw; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RESULTS
    results = json.loads(file.read_text()) if file.exists() else {}
    sections = results.get("sections", {})
    described = machine()
    for name, made in measured.items():
        sections[name] = {
            "title": made.lines[0],
            "bounds kept": made.kept,
            "date": described["date"],
            "figures": made.figures,
            "series": {
                label: [[x, rounded(y)] for x, y in points] for label, points in made.series.items()
            },
        }
    content = {"machine": described, "sections": dict(sorted(sections.items()))}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=dict) + "\n")
    drawn = [folder / plot.file for plot in PLOTS if plot.section in measured]
    for plot in PLOTS:
        if plot.section in measured:
            series = measured[plot.section].series
            chosen = {name: series[name] for name in plot.series or series}
            (folder / plot.file).write_text(drawing(plot, chosen))
    return [file, *drawn]


def machine() -> dict[str, str | int]:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    said = subprocess.run(["nft", "--version"], capture_output=True, text=True, check=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "nft": said.stdout.split()[1],
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


# --------------------------------------------------------------------------------------- drawing


class Scale(Value, kw_only=True):
    """From numbers to places on one axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def place(self, number: float) -> float:
        low, high = self._even(self.low), self._even(self.high)
        share = (self._even(number) - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    def _even(self, number: float) -> float:
        return math.log10(number) if self.logarithmic else number

    @property
    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [10.0**power for power in powers]
        else:
            step = 10 ** math.floor(math.log10(self.high / 2))
            step *= next(times for times in (1, 2, 5) if self.high / (step * times) <= 6)
            found = [step * number for number in range(7)]
        return [tick for tick in found if self.low <= tick <= self.high]


def drawing(plot: Plot, series: Mapping[str, Points]) -> str:
    """The picture: axes, grid, and a line with a name for each series."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    across = _scale(xs, LEFT, WIDTH - RIGHT, logarithmic=plot.logarithmic)
    up = _scale(ys, HEIGHT - BOTTOM, TOP, logarithmic=plot.logarithmic)
    style = f'font-family="sans-serif" font-size="12" fill="{INK}" text-anchor="middle"'
    middle, turned = HEIGHT / 2, f"rotate(-90 16 {HEIGHT / 2})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>',
        f"<title>{escape(plot.title)}</title>",
        f'<text x="{WIDTH / 2}" y="20" font-size="15">{escape(plot.title)}</text>',
        *_grid(across, up),
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}">{escape(plot.across)}</text>',
        f'<text x="16" y="{middle}" transform="{turned}">{escape(plot.up)}</text>',
    ]
    for number, (name, points) in enumerate(series.items()):
        lines += _curve(name, points, COLOURS[number % len(COLOURS)], across, up, number)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _scale(numbers: list[float], start: float, end: float, *, logarithmic: bool) -> Scale:
    low, high = 0.0, max(numbers)
    if logarithmic:  # at least two ticks
        low = 10.0 ** math.floor(math.log10(min(numbers)))
        high = max(high, 10 * low)
    return Scale(low=low, high=high, start=start, end=end, logarithmic=logarithmic)


def _grid(across: Scale, up: Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>'
    for tick in across.ticks:
        x = across.place(tick)
        yield f'<path d="M{x} {TOP}V{bottom + 4}" stroke="{INK}" stroke-opacity=".25"/>'
        yield f'<text x="{x}" y="{bottom + 18}">{_named(tick)}</text>'
    for tick in up.ticks:
        y = up.place(tick)
        yield f'<path d="M{LEFT - 4} {y}H{right}" stroke="{INK}" stroke-opacity=".25"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_named(tick)}</text>'


def _named(tick: float) -> str:
    return f"{tick:,.0f}" if tick >= 1 or tick == 0 else f"{tick:g}"


def _curve(  # noqa: PLR0913, PLR0917 - a line, and where it goes
    name: str, points: Points, colour: str, across: Scale, up: Scale, number: int
) -> Iterator[str]:
    places = [(across.place(x), up.place(y)) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
    y = TOP + 8 + 18 * number
    yield f'<path d="M{LEFT + 12} {y}h20" stroke="{colour}" stroke-width="2"/>'
    start = f'x="{LEFT + 38}" y="{y + 4}" text-anchor="start"'
    yield f'<text {start} fill="{colour}">{escape(name)}</text>'
