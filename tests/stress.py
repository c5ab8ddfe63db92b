"""`make test-stress`: whether the whole suite passes every time. It runs `make test` several times
on the machine as it is, then several times beside busy loops, and prints a table of the results.

    python -m tests.stress [--idle N] [--busy N] [--loops N]

The output of each run is kept in the directory that the last line names. The exit code is 1 if a
run failed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.stress", description="Run all tests again and again, idle and under load."
    )
    parser.add_argument("--idle", type=int, default=5, help="runs on the machine as it is")
    parser.add_argument("--busy", type=int, default=3, help="runs beside busy loops")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside each of these")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="test-stress-"))
    passed = True
    for kind, count, loops in (("idle", options.idle, 0), ("busy", options.busy, options.loops)):
        for number in range(1, count + 1):
            log = folder / f"{kind}-{number}.log"
            passed &= run(f"{kind} {number} of {count}", loops, log)
    tell(f"The output of each run is in {folder}.")
    return 0 if passed else 1


def run(name: str, loops: int, log: Path) -> bool:
    """Run the suite once and print its result: the last line of pytest, and every failed test."""
    started = time.monotonic()
    with log.open("w") as output, busy(loops):
        code = subprocess.run(
            ["make", "test"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    summary = next((line.strip("= ") for line in reversed(lines) if " passed" in line), "no result")
    result = "passed" if code == 0 else f"FAILED (exit code {code})"
    tell(f"{name}: {result} after {time.monotonic() - started:.0f} s: {summary}")
    for line in failed:
        tell(f"  {line}")
    return code == 0


def tell(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it speaks to a person at a terminal


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Processes that take all processor time they get."""
    with ExitStack() as stack:
        for _ in range(loops):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


if __name__ == "__main__":
    os.environ.pop("MAKEFLAGS", None)  # of the `make` that runs this
    sys.exit(main(sys.argv[1:]))
