"""Run inside the guest: do the steps of a job one after another, each within its time limit.

`python -m tests.kernels.job RESULTS` reads `job.json` in the working directory, writes the output
of each step and `results.json` into RESULTS, and reports progress on the console.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

JOB, RESULTS = "job.json", "results.json"
MARK = "kernels: "
"""What a line of progress begins with, among what the kernel writes on the console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command to run in the clone; with `loud`, its output is progress."""

    name: str
    words: tuple[str, ...]
    seconds: int
    environment: dict[str, str] = field(default_factory=dict)
    loud: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step ended; without a code it was stopped at its time limit, or never ran."""

    name: str
    code: int | None = None
    seconds: float = 0
    output: str = ""


def run(step: Step, folder: Path) -> Result:
    """Run one step, and end all its processes when its time is up."""
    log = folder / f"{step.name}.log"
    always = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, *step.words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **always, **step.environment},
            start_new_session=True,
        )
    code = wait(child, step, log)
    return Result(name=step.name, code=code, seconds=round(time.monotonic() - started, 1))


def wait(child: subprocess.Popen[bytes], step: Step, log: Path) -> int | None:
    """The exit code of a step; None if it had to be stopped."""
    end = time.monotonic() + step.seconds
    with log.open(errors="replace") as lines:
        while True:
            ended = child.poll()
            for line in lines if step.loud else ():
                tell(f"{step.name}: {line.rstrip()}")
            if ended is not None:
                return ended
            if time.monotonic() > end:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return None
            time.sleep(0.2)


def tell(text: str) -> None:
    print(f"{MARK}{text}", flush=True)  # noqa: T201 - the console of the guest


def main(folder: Path) -> None:
    tell(f"Linux {platform.release()}, {os.cpu_count()} processors")
    done = []
    for step in read(Path(JOB)):
        tell(f"{step.name} started")
        done.append(run(step, folder))
        (folder / RESULTS).write_text(json.dumps([asdict(one) for one in done]))
        ending = "stopped" if done[-1].code is None else f"exit code {done[-1].code}"
        tell(f"{step.name} ended after {done[-1].seconds:.0f} s: {ending}")


def read(path: Path) -> list[Step]:
    """The steps of a job that was written as JSON."""
    return [Step(**{**one, "words": tuple(one["words"])}) for one in json.loads(path.read_text())]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
