"""Signals to stop or to reload, told to one who waits in a poll; and a bound for stopping."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def heard(tell: Callable[[int], None]) -> Iterator[socket.socket]:
    """Within the block, signals to stop or to reload are told, and end a wait for this socket."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda n, _: tell(n)) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            yield reader
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)


class Deadline:
    """Has something done where the process is not gone so many seconds after it was told to stop,
    by a thread that waits from the start: a signal may arrive in the middle of anything, also of
    starting a thread."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds, self._late = seconds, late
        self._told = os.eventfd(0, os.EFD_CLOEXEC)
        with suppress(RuntimeError):  # the system allows no more threads
            threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def begin(self) -> None:
        """Stopping has begun; a signal handler may say so."""
        os.eventfd_write(self._told, 1)

    def _wait(self) -> None:
        os.eventfd_read(self._told)
        time.sleep(self._seconds)
        self._late()


def drain(wake: socket.socket) -> None:
    """Take what only was to end the wait."""
    with suppress(BlockingIOError):
        while wake.recv(4096):
            pass
