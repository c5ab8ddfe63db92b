"""Timing in interleaved rounds: on a noisy machine only ratios of one run mean something."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from rules.values import Value

Action = tuple[Callable[[], object], Callable[[], object]]  # prepared untimed, then timed
Figures = dict[str, float | str | bool]


class Table(Value):
    """What a section prints, and whether every number in it keeps its bound. The same as figures,
    and as series of points for plots."""

    lines: tuple[str, ...]
    kept: bool = True
    figures: Mapping[str, Figures] = MappingProxyType({})
    series: Mapping[str, tuple[tuple[float, float], ...]] = MappingProxyType({})


class Number(Value, kw_only=True):
    """Something measured, and what it may be at the most, or at the least."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    least: float | None = None

    @property
    def kept(self) -> bool:
        return (self.bound is None or self.value <= self.bound) and (
            self.least is None or self.value >= self.least
        )

    @property
    def figures(self) -> Figures:
        found: Figures = {"value": rounded(self.value), "unit": self.unit}
        found |= {"at most": self.bound} if self.bound is not None else {}
        found |= {"at least": self.least} if self.least is not None else {}
        return found if self.kept else {**found, "broken": True}

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.unit else f"{self.value:.0f}"
        line = f"  {self.name:44}{value:>10} {self.unit:4}"
        if self.bound is not None:
            line += f"  at most {self.bound:g} {self.unit}{'' if self.kept else ': BROKEN'}"
        if self.least is not None:
            line += f"  at least {self.least:g} {self.unit}{'' if self.kept else ': BROKEN'}"
        return line.rstrip()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Before others, we and what we start: a process that wants to go on may else wait for 4 ms,
    which is more than most of what is measured takes."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def interleaved(actions: Mapping[str, Action], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every action in every round, all of them taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (prepare, run) in actions.items():
            prepare()
            started = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - started) * 1000)
    return taken


def table(title: str, taken: Mapping[str, list[float]], unit: str = "ms", to: str = "") -> Table:
    """Medians, spread between the quartiles, and the ratio of each to one of them, or the first."""
    base = taken[to] if to else next(iter(taken.values()))
    lines = [title, f"  {'':32}{'median':>10}{'quartiles':>22}{'ratio':>8}"]
    figures: dict[str, Figures] = {}
    for name, times in taken.items():
        low, middle, high = statistics.quantiles(times, n=4)
        of = ratio(times, base)
        spread = f"{low:.2f} to {high:.2f} {unit}"
        lines.append(f"  {name:32}{middle:7.2f} {unit}{spread:>22}{of:8.2f}")
        figures[name] = {
            "median": rounded(middle),
            "low quartile": rounded(low),
            "high quartile": rounded(high),
            "unit": unit,
            "ratio": rounded(of),
        }
    return Table(tuple(lines), figures=figures)


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios in each round: what slows down a whole round leaves these alone.
    Where not all took part in each round, the ratio of the medians."""
    if len(times) != len(base):
        return statistics.median(times) / statistics.median(base)
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def numbers(above: Table, found: Iterable[Number]) -> Table:
    """A table with these numbers below, each beside its bound."""
    rows = tuple(found)
    kept = above.kept and all(row.kept for row in rows)
    figures = {**above.figures, **{row.name.strip(): row.figures for row in rows}}
    return Table((*above.lines, *map(str, rows)), kept, figures, above.series)


def rounded(value: float) -> float:
    """Four digits: what comes after is noise."""
    return float(f"{value:.4g}")
