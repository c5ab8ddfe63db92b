"""The daemon's log: one line per event, for people and journald as text, for collectors as JSON.
A log that cannot be written never stops the daemon: the line is lost, and counted."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Literal, Protocol

Format = Literal["text", "json"]
Level = Literal["info", "warning", "error"]
_PRIORITIES: dict[Level, str] = {"info": "<6>", "warning": "<4>", "error": "<3>"}
QUIET = 600.0  # seconds after which what was told is news again
MOST_REMEMBERED = 256  # of what is told seldom


class Stream(Protocol):
    """As much of a text stream as a log needs."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class Log:
    """Writes events to a stream; `lost` counts the lines it could not write."""

    def __init__(
        self,
        stream: Stream,
        form: Format = "text",
        *,
        journal: bool = False,
        clock: Callable[[], float],
    ) -> None:
        self.lost = 0
        self._stream, self._form, self._journal, self._clock = stream, form, journal, clock
        self._last: dict[object, tuple[object, ...]] = {}
        self._warned: dict[str, float] = {}  # when each was last to be told, in that order
        self._warning = Lock()

    def info(self, event: str, /, **fields: object) -> None:
        """Something went as it should, and is worth knowing."""
        self._say("info", event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Something is not as it should be, and is taken care of."""
        self._say("warning", event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Something failed, and somebody should look."""
        self._say("error", event, fields)

    def once(self, key: object, level: Level, event: str, /, **fields: object) -> None:
        """Say it unless it was the last thing said about that key.

        What counts up at each retry must not be a field: it would be news every time.
        """
        news = (level, event, {name: _plain(value) for name, value in fields.items()})
        if self._last.get(key) != news and self._say(level, event, fields):
            self._last[key] = news

    def seldom(self, what: str) -> None:
        """A warning that nobody tells the end of, from any thread: it is said unless it came up in
        the last minutes already."""
        with self._warning:
            now, last = self._clock(), self._warned.pop(what, -math.inf)
            if 0 <= now - last < QUIET or self._say("warning", "warning", {"what": what}):
                self._warned[what] = now
            while len(self._warned) > MOST_REMEMBERED:
                del self._warned[next(iter(self._warned))]

    def settled(self, key: object) -> None:
        """Forget what was said about that key: the next time, it is news again."""
        self._last.pop(key, None)

    def _say(self, level: Level, event: str, fields: Mapping[str, object]) -> bool:
        own: dict[str, object] = {"level": level, "event": event}
        if not self._journal:  # which writes down its own
            own = {"time": timestamp(self._clock()), **own}
        try:
            record = own | {name: _plain(value) for name, value in fields.items()} | own
            line = json.dumps(record) if self._form == "json" else logfmt(record)
            self._stream.write(f"{_PRIORITIES[level] if self._journal else ''}{line}\n")
            self._stream.flush()
        except (OSError, ValueError):  # Python's word for a closed stream is ValueError
            self.lost += 1
            return False
        return True


def timestamp(seconds: float) -> str:
    """2026-11-16T03:52:29.123Z, of seconds since the epoch."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{thousandths:03d}Z"


def logfmt(record: Mapping[str, object]) -> str:
    """name=value pairs; a value with more than plain letters is quoted as JSON would."""
    return " ".join(f"{name}={_word(value)}" for name, value in record.items())


def _word(value: object) -> str:
    if isinstance(value, list):
        value = ",".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    text = value if isinstance(value, str) else json.dumps(value)
    if text and text.isprintable() and not any(mark in text for mark in ' "='):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in quoted)


def _plain(value: object) -> object:
    """What JSON knows as it is, everything else as its text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


class Descriptor:
    """A text stream that keeps nothing back: Python's own ones hold on to what they failed to
    write, and send it later, in pieces, between other lines."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._torn = False

    def write(self, text: str, /) -> None:
        whole = f"\n{text}" if self._torn else text
        content = whole.encode(errors="backslashreplace")
        written = os.write(self.number, content)
        self._torn = written < len(content)
        if self._torn:
            raise BlockingIOError("only a part could be written")

    def flush(self) -> None:
        """There is nothing to flush."""


def read_by_journal(number: int, environ: Mapping[str, str]) -> bool:
    """Whether journald reads a descriptor: systemd names the device and inode of its stream.

    They are compared because the variable is inherited even where the stream was redirected.
    """
    try:
        status = os.fstat(number)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def this_process_log(form: Format = "text") -> Log:
    """A log on the standard error of this process."""
    number = sys.stderr.fileno() if sys.stderr is not None else -1  # -1: every line is lost
    journal = read_by_journal(number, os.environ)
    return Log(Descriptor(number), form, journal=journal, clock=time.time)
