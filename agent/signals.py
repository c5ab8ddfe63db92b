"""Signals to stop or to reload, told to one who waits in a poll."""

import signal
import socket
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


def drain(wake: socket.socket) -> None:
    """Take what only was to end the wait."""
    with suppress(BlockingIOError):
        while wake.recv(4096):
            pass
