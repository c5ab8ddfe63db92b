"""Timing in interleaved rounds: on a noisy machine only ratios of one run mean something."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from rules.values import Value

Action = tuple[Callable[[], object], Callable[[], object]]  # prepared untimed, then timed


class Table(Value):
    """What a section prints, and whether every number in it keeps its bound."""

    lines: tuple[str, ...]
    kept: bool = True


class Number(Value, kw_only=True):
    """Something measured, and what it may be at the most."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def kept(self) -> bool:
        return self.bound is None or self.value <= self.bound

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.unit else f"{self.value:.0f}"
        line = f"  {self.name:44}{value:>10} {self.unit:4}"
        if self.bound is not None:
            line += f"  at most {self.bound:g} {self.unit}{'' if self.kept else ': BROKEN'}"
        return line.rstrip()


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


def table(title: str, taken: Mapping[str, list[float]]) -> Table:
    """Medians, spread between the quartiles, and the ratio of each median to the first's."""
    unit = statistics.median(next(iter(taken.values())))
    lines = [title, f"  {'':28}{'median':>10}{'quartiles':>20}{'ratio':>8}"]
    for name, times in taken.items():
        low, middle, high = statistics.quantiles(times, n=4)
        spread = f"{low:.2f} to {high:.2f} ms"
        lines.append(f"  {name:28}{middle:7.2f} ms{spread:>20}{middle / unit:8.2f}")
    return Table(tuple(lines))


def numbers(above: Table, found: Iterable[Number]) -> Table:
    """A table with these numbers below, each beside its bound."""
    rows = tuple(found)
    kept = above.kept and all(row.kept for row in rows)
    return Table((*above.lines, *map(str, rows)), kept)
