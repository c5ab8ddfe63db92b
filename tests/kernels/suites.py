"""What is run on every kernel, and how its output is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from tests.kernels.job import Result, Step
from tests.kernels.packages import done
from tests.spaces import ROOT

CLIENT = "hitless-client"
"""The client of the hitless suite, compiled on this machine, in the clone of the guest."""

DEMO, HITLESS, CONTROL, TESTS = NAMES = ("demo", "hitless", "single transaction", "tests")

# Of the kinds of change, those that a single transaction is known to lose flows by on old kernels.
CONTROL_KINDS = ("of 50 grows",)
ANSWER_SECONDS = 20  # an emulated processor may be kept from running for seconds
COUNTS = ("changes", "flows", "flows/s", "refused", "timed out", "cut")
ROW = re.compile(r"(?m)^(\S.*?) " + r" +([\d,]+)" * len(COUNTS) + "$")

# Rules, maps and filters written and read back, and packets through maps; not what counts seconds.
CHOSEN_TESTS = (
    "tests/netns/test_shapes.py",
    "tests/netns/test_filter_rules.py",
    "tests/datapath/test_shapes.py",
)


class Verdict(Enum):
    """How a suite ended on a kernel."""

    PASSED = "passed"
    FAILED = "failed"
    STOPPED = "stopped at its time limit"
    MISSING = "did not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the hitless suite counted for one kind of change."""

    name: str
    changes: int
    flows: int
    refused: int
    timed_out: int

    @property
    def lost(self) -> int:
        return self.refused + self.timed_out


def demo(seconds: int) -> Step:
    return Step(name=DEMO, words=("-m", "agent.entry", "demo"), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the hitless suite does: changes and seconds of each kind, and flows a second."""

    changes: int
    seconds: int
    rate: int

    @property
    def words(self) -> tuple[str, ...]:
        numbers = {
            "--changes": self.changes,
            "--seconds": self.seconds,
            "--rate": self.rate,
            "--timeout": ANSWER_SECONDS,
        }
        return tuple(word for name, number in numbers.items() for word in (name, str(number)))


def hitless(effort: Effort, words: Sequence[str], seconds: int) -> Step:
    """The hitless suite, with more options for it; every flow must arrive."""
    return Step(
        name=HITLESS,
        words=("-m", "bench", "hitless", *effort.words, *words),
        seconds=seconds,
        environment={"HITLESS_CLIENT": f"./{CLIENT}"},
        loud=True,
    )


def control(effort: Effort, seconds: int) -> Step:
    """The negative control: the same with one transaction a change, which loses flows."""
    words = ("--single-transaction", "--kinds", *CONTROL_KINDS)
    return replace(hitless(effort, words, seconds), name=CONTROL)


def tests(seconds: int) -> Step:
    # Without what compiles or remembers: an emulated processor is slow, and the guest goes away.
    quiet = ("-q", "-ra", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist")
    return Step(name=TESTS, words=("-m", "pytest", *quiet, *CHOSEN_TESTS), seconds=seconds)


def compile_client(folder: Path) -> Path:
    """The client as a static program, for guests without a compiler."""
    made = folder / CLIENT
    done("gcc", "-O2", "-static", "-o", str(made), str(ROOT / "bench" / "hitless.c"))
    return made


# ------------------------------------------------------------------------------------- reading


def verdict(result: Result) -> Verdict:
    if result.code is None:
        return Verdict.STOPPED if result.seconds else Verdict.MISSING
    return Verdict.PASSED if result.code == 0 else Verdict.FAILED


def kinds(result: Result) -> list[Kind]:
    """The rows of the table that the hitless suite prints."""
    found = []
    for name, *numbers in ROW.findall(result.output):
        counts = dict(
            zip(COUNTS, (int(number.replace(",", "")) for number in numbers), strict=True)
        )
        found.append(
            Kind(
                name=name,
                changes=counts["changes"],
                flows=counts["flows"],
                refused=counts["refused"],
                timed_out=counts["timed out"],
            )
        )
    return found


def summary(result: Result) -> str:
    """One cell of the matrix."""
    ended = verdict(result)
    if result.name == CONTROL and ended is not Verdict.MISSING:
        lost = sum(one.lost for one in kinds(result))
        return f"{_lost(result)}, as expected" if lost else "inconclusive: no flow lost"
    if kinds(result):
        return f"{ended.value}: {_lost(result)}"
    if said := re.findall(r"(?m)^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", result.output):
        return str(said[-1])
    return ended.value


def _lost(result: Result) -> str:
    counted = kinds(result)
    lost, flows = sum(one.lost for one in counted), sum(one.flows for one in counted)
    changes = sum(one.changes for one in counted)
    return f"{lost:,} of {flows:,} flows lost in {changes:,} changes"
