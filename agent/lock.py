"""One daemon for one state directory."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.errors import TryAgain

NAME = "lock"
PATIENCE = 1.0  # seconds: a process that one who was killed had just begun may have it for a moment


@contextmanager
def held(directory: str, warn: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, nobody else gets here. A directory that cannot be written to is no
    reason not to run: then there is no lock, and we say so."""
    path = Path(directory, NAME)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        warn(f"cannot lock {path}: {error.strerror}; see that only one of us runs")
        yield
        return
    try:
        _take(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def holder(directory: str) -> str:
    """The daemon that runs with that state directory, as `pid 17`; nothing where none does."""
    try:
        descriptor = os.open(Path(directory, NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(descriptor)
    finally:
        os.close(descriptor)
    return ""


def _named(descriptor: int) -> str:
    number = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
    return f"pid {number}" if number.isdecimal() else "another process"


def _taken(descriptor: int, path: Path) -> TryAgain:
    return TryAgain(
        f"{_named(descriptor)} is running with the state directory {path.parent} already",
        "Stop it first: two on one node undo each other's work",
    )


def _take(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise _taken(descriptor, path) from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
