"""The results of all kernels as tables, for the terminal and for docs/kernels.md."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.guest import PROCESSORS
from tests.kernels.job import Result
from tests.kernels.suites import CONTROL, Verdict, kinds, summary, verdict
from tests.spaces import ROOT

PAGE = ROOT / "docs" / "kernels.md"
TEXT = """\
# Kernels

`make test-kernels` boots kernels of Debian under qemu (software emulation, {processors} processors)
and runs on each: `portranger demo`, the hitless suite (`python -m bench hitless`) and a choice of
the tests. It needs root, and for the first run the network; it keeps about 1.3 GB in
`~/.cache/portranger`. `KERNELS="6.1 6.12"` chooses kernels, and `ARGS=--write` renews this page.
Measured on {day}, on a machine with Linux {host}:

{matrix}

A flow is lost when it is refused or not answered although its port was declared before and after
the change. Emulation carries a few hundred new flows a second; the same suite without emulation
opens thousands.

{counts}

**Single transaction** is the control: the same client on the same kernel, but every change is
written in one transaction. A range of a map that grows or shrinks is then absent for a moment on
these kernels, and flows to ports that it keeps are lost. The moment is short: a control of few
changes may show no loss.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Everything that one kernel did."""

    version: str
    release: str
    results: Sequence[Result]

    @property
    def good(self) -> bool:
        """Whether all suites passed; the control is not one of them."""
        return all(verdict(one) is Verdict.PASSED for one in self.results if one.name != CONTROL)


def matrix(rows: Sequence[Row]) -> str:
    """Kernel by suite."""
    suites = [one.name for one in rows[0].results]
    lines = [("kernel", *suites)]
    lines += [(f"{row.version} ({row.release})", *map(summary, row.results)) for row in rows]
    return table(lines)


def counts(rows: Sequence[Row]) -> str:
    """What the hitless suite counted, by kind of change."""
    lines: list[tuple[str, ...]] = [
        ("kernel", "suite", "kind of change", "changes", "flows", "refused", "timed out")
    ]
    for row in rows:
        for result in row.results:
            for one in kinds(result):
                numbers = (one.changes, one.flows, one.refused, one.timed_out)
                cells = (f"{number:,}" for number in numbers)
                lines.append((row.version, result.name, one.name, *cells))
    return table(lines) if len(lines) > 1 else "The hitless suite did not run."


def table(lines: Sequence[Sequence[str]]) -> str:
    """A table that is as readable at a terminal as on a page."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([head, rule, *body])


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Renew the page of the documentation."""
    page.write_text(
        TEXT.format(
            processors=PROCESSORS,
            day=datetime.datetime.now(datetime.UTC).date(),
            host=os.uname().release.partition("-")[0],
            matrix=matrix(rows),
            counts=counts(rows),
        )
    )
