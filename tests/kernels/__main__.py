"""`make test-kernels`: run the demo, the hitless suite and some tests on other kernels, under qemu.

    python -m tests.kernels [KERNEL ...] [--suites NAME ...] [--kinds WORDS ...] [--changes N]
                            [--seconds N] [--rate N] [--write]

It ends by itself, with exit code 1 if a suite failed on a kernel, or could not be run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kernels import guest, matrix, suites
from tests.kernels.images import SUITES, kernel, root
from tests.kernels.matrix import Row
from tests.kernels.packages import Unavailable
from tests.kernels.suites import Effort
from tests.spaces import ROOT
from tests.vm.image import why_not

DEFAULT = ("6.1", "6.12")
HITLESS = Effort(changes=200, seconds=40, rate=400)
CONTROL_TIMES = 6  # as much of the control: what it shows is rare
# For each suite as a whole, before it is stopped.
DEMO_SECONDS, HITLESS_SECONDS, CONTROL_SECONDS, TEST_SECONDS = 180, 2400, 480, 1200


def main(words: Sequence[str]) -> int:
    options = read(words)
    if os.geteuid() != 0:
        sys.exit("test-kernels: run it as root: it mounts file systems to make an image")
    if reason := why_not():
        sys.exit(f"test-kernels: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("test-kernels: stopped by a signal"))
    try:
        rows = []
        for version in options.kernels or DEFAULT:
            rows.append(run(version, options))
            if options.write:  # what there is, should the next one never end
                matrix.write(rows)
    except Unavailable as problem:
        sys.exit(f"test-kernels: {problem}")
    say(f"\n{matrix.matrix(rows)}\n\n{matrix.counts(rows)}")
    if options.write:
        say(f"\ntest-kernels: wrote {matrix.PAGE.relative_to(ROOT)}")
    return 0 if all(row.good for row in rows) else 1


def read(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="test-kernels", description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--suites", nargs="+", default=list(suites.NAMES), choices=suites.NAMES)
    hitless = parser.add_argument_group("of the hitless suite")
    hitless.add_argument("--kinds", nargs="+", default=[], help="words in the names of kinds")
    hitless.add_argument("--changes", type=int, default=HITLESS.changes, help="of each kind")
    hitless.add_argument("--seconds", type=int, default=HITLESS.seconds, help="for each kind")
    hitless.add_argument("--rate", type=int, default=HITLESS.rate, help="new flows a second")
    parser.add_argument("--write", action="store_true", help="renew docs/kernels.md")
    return parser.parse_args(words)


def run(version: str, options: argparse.Namespace) -> Row:
    """All chosen suites on one kernel."""
    tell = teller(version)
    tell("kernel and image, from the cache or from Debian's archive")
    found, image = kernel(version), root()
    effort = Effort(changes=options.changes, seconds=options.seconds, rate=options.rate)
    control = replace(
        effort, changes=CONTROL_TIMES * effort.changes, seconds=CONTROL_TIMES * effort.seconds
    )
    kinds = ("--kinds", *options.kinds) if options.kinds else ()
    steps = {
        suites.DEMO: suites.demo(DEMO_SECONDS),
        suites.HITLESS: suites.hitless(effort, kinds, HITLESS_SECONDS),
        suites.CONTROL: suites.control(control, CONTROL_SECONDS),
        suites.TESTS: suites.tests(TEST_SECONDS),
    }
    chosen = [step for name, step in steps.items() if name in options.suites]
    tell(f"booting {found.release}")
    with TemporaryDirectory() as folder:
        client = suites.compile_client(Path(folder))
        results = guest.run(found, image, chosen, {suites.CLIENT: client}, tell)
    for result in results:
        if suites.verdict(result) is not suites.Verdict.PASSED and result.name != suites.CONTROL:
            tell(f"{result.name}: {suites.summary(result)}; its output ends with:")
            say("\n".join(f"    {line}" for line in result.output.splitlines()[-40:]))
    return Row(version=version, release=found.release, results=results)


def teller(version: str) -> Callable[[str], None]:
    """What prints progress, with the time since now."""
    started = time.monotonic()
    return lambda text: say(f"{version}: {time.monotonic() - started:4.0f} s: {text}")


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it speaks to a person at a terminal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
