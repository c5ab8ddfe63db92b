"""One daemon for one state directory."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.errors import TryAgain

NAME = "lock"


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


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        who = f"pid {holder}" if holder.isdecimal() else "another process"
        raise TryAgain(
            f"{who} is running with the state directory {path.parent} already",
            "Stop it first, or give this one a state_dir of its own",
        ) from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
