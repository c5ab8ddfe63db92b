"""`make fuzz`: each fuzzer for some seconds, guided by what its inputs reach where atheris can be
had, and by chance elsewhere. What breaks something is written to a file, to be played again."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.everything import TARGETS
from tests.fuzz.target import timed

PATIENCE = 120  # seconds beyond what was asked for, until a fuzzer is taken for stuck


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="corpus and findings")
    parser.add_argument("--replay", type=Path, help="a finding")
    asked = parser.parse_args()
    if asked.replay:
        return replayed(asked.replay)
    strange = sorted({*asked.targets} - TARGETS.keys())
    if strange:
        parser.error(f"no such target: {', '.join(strange)}; there are {', '.join(TARGETS)}")
    names = asked.targets or [*TARGETS]
    broken = [name for name in names if not fuzzed(name, asked.folder, asked.seconds)]
    say(f"{len(names)} fuzzers, {len(broken)} with findings", *broken)
    return bool(broken)


def fuzzed(name: str, folder: Path, seconds: int) -> bool:
    """Run one in a process of its own, which it may bring to its end; whether it found nothing."""
    findings = folder / "findings" / name
    before = {*findings.glob("*")}
    words = [sys.executable, "-m", "tests.fuzz.guided", name, str(folder), str(seconds)]
    try:
        done = subprocess.run(words, capture_output=True, timeout=seconds + PATIENCE, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as stuck:
        output, code = (stuck.stdout or b"") + (stuck.stderr or b""), 1
    text = output.decode(errors="replace")
    say(f"{name}: {told(text)}")
    if code:
        log = folder / f"{name}.log"
        log.write_text(text)
        say(*raised(text), f"all of it is in {log}", between="\n  ")
    for path in sorted({*findings.glob("*")} - before):
        say(f"  play it again: make fuzz ARGS='--replay {path}'")
    return not code


def told(text: str) -> str:
    """What it did: how often it ran, and how many branches were taken."""
    runs = re.findall(r"(\d+) runs", text) or re.findall(r"executed_units: +(\d+)", text)
    branches = re.findall(r" cov: (\d+)", text)
    guided = f"{branches[-1]} branches" if branches else "by chance, as atheris is not there"
    return f"{runs[-1] if runs else 'unknown'} runs, {guided}"


def raised(text: str) -> list[str]:
    """The last lines of what it raised, or else of all that it said."""
    lines = text.partition("=== Uncaught Python exception: ===")[2].partition("\n\n")[0] or text
    return lines.splitlines()[-30:]


def say(*words: str, between: str = " ") -> None:
    sys.stdout.write(f"{between.join(words)}\n")
    sys.stdout.flush()


def replayed(path: Path) -> int:
    """Raises what was found, if it is there still."""
    with TARGETS[path.parent.name].opened() as run:
        timed(run)(path.read_bytes())
    say(f"{path} breaks nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
