"""Where commands read and write: results to one stream, diagnostics to another."""

import io
import os
import sys
from collections.abc import Callable, Iterable

from agent.errors import Failure
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

MOST_INPUT = 1 << 26  # bytes: more than manifests may have together
GLYPH_COLORS = {"+": "\033[32m", "~": "\033[33m", "-": "\033[31m"}


class Console(Value):
    """The streams of a command, and whether a person sees colours on the first."""

    out: "TextIO"
    err: "TextIO"
    stdin: Callable[[], bytes]
    colored: bool = False

    def say(self, line: str) -> None:
        self.out.write(f"{line}\n")

    def warn(self, line: str) -> None:
        """After all that was said before, also where both go to one file."""
        self.out.flush()
        self.err.write(f"{line}\n")

    def say_plan(self, lines: Iterable[str]) -> None:
        for line in lines:
            paint = GLYPH_COLORS.get(line.lstrip()[:1]) if self.colored else None
            self.say(f"{paint}{line}\033[0m" if paint else line)

    def say_json(self, value: object) -> None:
        import json  # only where it is asked for

        self.say(json.dumps(value, indent=2))


def this_process(color: str = "auto") -> Console:
    """The console of this process."""
    if sys.stdout is None:
        raise Failure("standard output is closed", "Open it, to /dev/null if nobody reads it")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may lack the letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(sys.stdout, sys.stderr or _nowhere(), _read_stdin, _colored(color))


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer.read(MOST_INPUT)


def _nowhere() -> "TextIO":
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - for all our life


def _colored(asked: str) -> bool:
    """--color over NO_COLOR over TERM=dumb over whether a person is looking."""
    if asked != "auto":
        return asked == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()
