"""Taking turns in a namespace with others of us. It is a courtesy: whoever can open the namespace
can hold its lock, so after a while we go on without, and a lost race is a stale commit as ever."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 5.0  # seconds for others to finish
GRUDGE = 60.0  # seconds after a wait in vain, in which nobody is waited for
PAUSE = 0.005


class Turns:
    """Of one process in all its namespaces: who holds many locks makes it wait once in a while, and
    not once for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0  # when we have patience again

    @contextmanager
    def taken(self, descriptor: int) -> Iterator[None]:
        self._take(descriptor)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _take(self, descriptor: int) -> None:
        now = self._clock()
        deadline = now if now < self._until else now + PATIENCE
        while not _locked(descriptor):
            if self._clock() >= deadline:
                self._until = max(self._until, self._clock() + GRUDGE)
                return
            time.sleep(PAUSE)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
