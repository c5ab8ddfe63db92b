"""Timing in interleaved rounds: on a noisy machine only ratios of one run mean something."""

import statistics
import time
from collections.abc import Callable, Mapping

Action = tuple[Callable[[], object], Callable[[], object]]  # prepared untimed, then timed


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


def table(title: str, taken: Mapping[str, list[float]]) -> list[str]:
    """Medians, spread between the quartiles, and the ratio of each median to the first's."""
    unit = statistics.median(next(iter(taken.values())))
    lines = [title, f"  {'':28}{'median':>10}{'quartiles':>20}{'ratio':>8}"]
    for name, times in taken.items():
        low, middle, high = statistics.quantiles(times, n=4)
        spread = f"{low:.2f} to {high:.2f} ms"
        lines.append(f"  {name:28}{middle:7.2f} ms{spread:>20}{middle / unit:8.2f}")
    return lines
