"""Reads what is in the memory of a pod's process: its command line, its environment. Whoever owns
that memory can keep everybody from looking at it, for ever: a page of a file whose server (FUSE,
NFS) does not answer is waited for with the lock of the whole memory, and nothing ends that wait but
the end of the process. So a thread of its own reads, which is waited for a moment, and then left.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread

from agent.errors import TryAgain
from agent.kernel.processes import MOST_READ, drained
from rules.values import Value

PATIENCE = 1.0  # seconds for a process to let us read
HASTE = 0.1  # seconds, while we have none
BUSY = 10.0  # seconds more for a thread that gets no processor: that is the machine's fault
GRUDGE = 60.0  # seconds after a wait in vain without patience, and without a question to that pod
MOST_STUCK = 16  # threads; a pod that has one gets no other


class Unreadable(TryAgain):
    """A process does not let us know: that is not the same as having nothing to say."""


class _Left(Value):
    """A thread that is still reading, and until when its pod is not asked even if it has ended."""

    pod: str
    reading: "_Reading"
    until: float


class Aside:
    """For all pods of a node, and for several threads. Who keeps many from being read makes us wait
    once in a while, and not once for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = Lock()
        self._left: list[_Left] = []
        self._patient_from = 0.0

    def read(self, pod: str, descriptor: int, most: int = MOST_READ) -> bytes:
        """What a file of some process of the pod says; the descriptor is closed when it is read."""
        reading = _Reading(descriptor, most)
        try:
            patience = self._patience_with(pod)
            reading.start()
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, RuntimeError):  # there are too many threads
                raise _unreadable(pod) from error
            raise
        reading.join(patience)
        busy = self._clock() + BUSY
        while reading.is_alive() and reading.is_at_work() and self._clock() < busy:
            reading.join(HASTE)  # it waits for the processor, and for nobody else
        if reading.is_alive():
            self._leave(pod, reading, patience)
            raise _unreadable(pod)
        return reading.result()

    def _patience_with(self, pod: str) -> float:
        with self._turn:
            now = self._clock()
            self._left = [one for one in self._left if now < one.until or one.reading.is_alive()]
            stuck = sum(one.reading.is_alive() for one in self._left)
            if stuck >= MOST_STUCK or any(one.pod == pod for one in self._left):
                raise _unreadable(pod)
            return PATIENCE if now >= self._patient_from else HASTE

    def _leave(self, pod: str, reading: "_Reading", waited: float) -> None:
        with self._turn:
            now = self._clock()
            until = now + GRUDGE if waited == PATIENCE else now  # haste is nobody's fault
            self._left.append(_Left(pod, reading, until))
            self._patient_from = max(self._patient_from, until)


class _Reading(Thread):
    def __init__(self, descriptor: int, most: int) -> None:
        super().__init__(name="aside", daemon=True)
        self._descriptor, self._most = descriptor, most
        self._found: bytes | OSError = b""

    def run(self) -> None:
        try:
            self._found = drained(self._descriptor, self._most)
        except OSError as error:
            self._found = error
        finally:
            os.close(self._descriptor)

    def is_at_work(self) -> bool:
        """Whether it runs, or would if it got a processor, or the lock of the interpreter, which
        another thread of ours has; else it waits for somebody."""
        task = Path(f"/proc/self/task/{self.native_id}")
        try:
            stat, waits_in = (task / "stat").read_text(), (task / "wchan").read_text()
        except OSError:
            return True  # it has not begun, or has just ended
        return stat.rpartition(")")[2].split()[0] == "R" or "futex" in waits_in

    def result(self) -> bytes:
        if isinstance(self._found, OSError):
            raise self._found
        return self._found


def _unreadable(pod: str) -> Unreadable:
    return Unreadable(
        f"a process of pod {pod}, or of too many others, does not let its memory be read",
        "Nothing new is done there until it does; find out what it waits for",
    )
