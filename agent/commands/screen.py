"""A person's terminal: how large it is, what it can show, and taken over as a whole for a while.

Whatever happens in between, it is given back as it was: its modes, its cursor and what was on it.
"""

import os
import select
import signal
import socket
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from agent.signals import drain, heard
from rules.port_axis import Paint, unpainted

USUAL = (80, 24)  # columns and lines of who is no terminal
COERCED = ("C.UTF-8", "C.utf8", "UTF-8")  # what Python itself makes of the locale C
COLORS = (36, 33, 35, 32, 34, 31)
ENTER, LEAVE = b"\033[?1049h\033[?25l", b"\033[?25h\033[?1049l"
TOP, WIPE = "\033[H", "\033[K"
CHUNK = 512  # bytes that a terminal takes at once
PATIENCE = 1.0  # seconds for one that takes nothing, when all is over
QUIT = (b"q", b"Q", b"\x03", b"\x04")  # and Ctrl-C and Ctrl-D, where they are no signals


def size(out: TextIO) -> tuple[int, int]:
    """Its columns and lines; COLUMNS and LINES say otherwise, as everywhere."""
    try:
        real = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):  # of a file, or of a test
        real = os.terminal_size(USUAL)
    found = [_number(os.environ.get(name)) for name in ("COLUMNS", "LINES")]
    return found[0] or real.columns or USUAL[0], found[1] or real.lines or USUAL[1]


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else 0


def speaks_unicode(out: TextIO) -> bool:
    """Whether a person sees more than ASCII there, by the locale; what goes to a file or a pipe is
    the same everywhere."""
    if not out.isatty() or out.encoding.lower().replace("-", "") != "utf8":
        return False
    kind = os.environ.get("LC_CTYPE", "")
    if sys.flags.utf8_mode and kind in COERCED:
        kind = ""
    locale = os.environ.get("LC_ALL") or kind or os.environ.get("LANG") or "C"
    return locale.lower().replace("-", "").endswith("utf8")


def painter(colored: bool) -> Paint:
    """What colours a letter, if anything does."""
    if not colored:
        return unpainted
    return lambda text, number: f"\033[{COLORS[number % len(COLORS)]}m{text}\033[0m"


def is_screen(out: TextIO, keys: TextIO | None) -> bool:
    """Whether it can be taken over, and somebody is there to give it back."""
    capable = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return capable and out.isatty() and keys is not None and keys.isatty()


class Viewer:
    """Somebody who looks on: their keys and signals, waited for together."""

    wake: socket.socket  # told of signals

    def __init__(self, keys: int | None) -> None:
        self.ended = False
        self.suspended = False
        self._stirred = False  # by a signal that came while something was written
        self._keys = keys

    @property
    def leaves(self) -> bool:
        """Whether to stop looking, for now or for good."""
        return self.ended or self.suspended

    def end(self, _number: int) -> None:
        self.ended = True

    def suspend(self, _number: int) -> None:
        self.suspended = True

    def wait(self, seconds: float) -> str:
        """The keys that were pressed; none where the time is over, or a signal came first."""
        if self._stirred or self.leaves:
            self._stirred = False
            return ""
        keys = [self._keys] if self._keys is not None else []
        ready, _, _ = select.select([self.wake.fileno(), *keys], [], [], max(0.0, seconds))
        drain(self.wake)
        return self._typed(keys[0]) if keys and keys[0] in ready else ""

    def put(self, out: int, text: str) -> None:
        """Write it all, unless the viewer leaves: a terminal at the other end of a dead line takes
        nothing for hours."""
        data = text.encode(errors="replace")
        while data and not self.leaves:
            ready, writable, _ = select.select([self.wake], [out], [])
            if ready:
                drain(self.wake)
                self._stirred = True
            try:
                data = data[os.write(out, data[:CHUNK]) :] if writable else data
            except OSError:  # the terminal has gone
                self.ended = True

    def _typed(self, keys: int) -> str:
        try:
            typed = os.read(keys, CHUNK)
        except OSError:
            typed = b""
        if not typed or any(key in typed for key in QUIT):
            self.ended = True
        return typed.decode("ascii", "ignore")


@contextmanager
def viewer(keys: int | None = None) -> Iterator[Viewer]:
    """Within the block signals only wake who waits: to end or, where there are keys, to stop for a
    while, or to see the new size. Who was told to ignore one still does."""
    made = Viewer(keys)
    wishes = {
        signal.SIGWINCH: _nothing,
        signal.SIGTSTP: made.suspend,
        signal.SIGQUIT: made.end,
    }
    with heard(made.end) as made.wake, _handled(wishes if keys is not None else {}):
        yield made


def _nothing(_number: int) -> None:
    """To be woken is all."""


@contextmanager
def _handled(wishes: Mapping[signal.Signals, Callable[[int], None]]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in wishes}
    heeded = [number for number in wishes if before[number] is not signal.SIG_IGN]
    try:
        for number in heeded:
            signal.signal(number, lambda n, _: wishes[signal.Signals(n)](n))
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


@contextmanager
def taken(out: int, keys: int) -> Iterator[None]:
    """The whole screen, without an echo of what is typed; given back whatever happens."""
    before = termios.tcgetattr(keys)
    quiet = termios.tcgetattr(keys)
    quiet[0] &= ~termios.IXON  # Ctrl-S would have all wait for Ctrl-Q
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    try:
        termios.tcsetattr(keys, termios.TCSANOW, quiet)
        os.write(out, ENTER)
        yield
    finally:
        with suppress(OSError, termios.error):  # where it has gone, nothing is to be given back
            termios.tcsetattr(keys, termios.TCSANOW, before)
            if select.select([], [out], [], PATIENCE)[1]:  # nobody may be reading any more
                os.write(out, LEAVE)


def frame(lines: Sequence[str], height: int) -> str:
    """These lines in the place of all that is on the screen. Each place is wiped first: behind a
    line that is as wide as the screen, its last letter would go."""
    filled = [*lines, *[""] * (height - len(lines))]
    return TOP + "\n".join(f"{WIPE}{line}" for line in filled)
