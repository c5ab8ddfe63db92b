"""Threads for work that may block in the kernel for as long as somebody else likes.

Whoever is root in a network namespace can hold its nftables lock with a large transaction, and a
commit of ours, or merely closing a socket there, waits for it and cannot be interrupted. So the
main loop hands the work for one namespace to a thread and waits for it only for a moment.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

MOST_THREADS = 256  # that are at work or blocked
MOST_IDLE = 2
INITIAL_PIDS = "pid:[4026531836]"  # the same in every kernel

Result = TypeVar("Result")


class Work(Generic[Result]):
    """One task in a thread, and its result when it is done."""

    def __init__(self, task: Callable[[], Result]) -> None:
        self._task = task
        self._ended = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Return whether the task is done within that time."""
        return self._ended.wait(seconds)

    def run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Result:
        """Return what the task returned, or raise what it raised."""
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]  # it is set once the task is done
        finally:
            self._error = None  # which refers to frames, and these to this


class OwnThreads:
    """Tells which of the kernel's events are about commits of our own threads.

    An event has the number that the thread has in the initial pid namespace. In a container, which
    has its own, a thread cannot learn that number and is known by its name. Another process of
    that name is taken for ours then.
    """

    def __init__(self, most: int) -> None:
        self._numbered = str(Path("/proc/self/ns/pid").readlink()) == INITIAL_PIDS
        self._numbers: deque[int] = deque(maxlen=most)  # also of some that ended
        self._names = {thread_name()}

    def add_current(self) -> None:
        self._numbers.append(threading.get_native_id())
        self._names.add(thread_name())

    def include(self, name: str, number: int) -> bool:
        """Return whether the thread that an event names so is one of them."""
        if self._numbered:
            return number == os.getpid() or number in self._numbers
        return name in self._names


def thread_name() -> str:
    return Path("/proc/thread-self/comm").read_text(errors="replace").removesuffix("\n")


class Inline:
    """Runs each task at once, in the thread that asks: for a keeper without a main loop."""

    def __init__(self) -> None:
        self.threads = OwnThreads(0)

    def start(self, task: Callable[[], Result]) -> Work[Result] | None:
        work = Work(task)
        work.run()
        return work


class Workqueue:
    """Runs each task in a thread of its own. Its descriptor is readable when a task has ended since
    it was last drained."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self.threads = OwnThreads(2 * most)
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Work[object]]] = []
        self._threads = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._wake

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def start(self, task: Callable[[], Result]) -> Work[Result] | None:
        """Begin the task; None: too many threads are blocked already."""
        work = Work(task)
        with self._lock:
            if self._idle:
                self._idle.pop().put(work)  # type: ignore[arg-type]  # its result is not looked at
                return work
            if self._threads >= self._most:
                return None
            self._threads += 1
        tasks: SimpleQueue[Work[object]] = SimpleQueue()
        tasks.put(work)  # type: ignore[arg-type]  # as above
        try:
            threading.Thread(target=self._serve, args=[tasks], name="work", daemon=True).start()
        except RuntimeError:  # the system allows no more threads
            with self._lock:
                self._threads -= 1
            return None
        return work

    def _serve(self, tasks: "SimpleQueue[Work[object]]") -> None:
        self.threads.add_current()
        while True:
            tasks.get().run()
            with suppress(OSError):  # the counter is full: then it is readable anyway
                os.eventfd_write(self._wake, 1)
            with self._lock:
                if len(self._idle) >= MOST_IDLE:
                    self._threads -= 1
                    return
                self._idle.append(tasks)


class Bounded:
    """Runs one task at a time for each key, and waits for it for a bounded time only."""

    def __init__(self, patience: float, most: int = MOST_THREADS) -> None:
        self._patience = patience
        self._workqueue = Workqueue(most)
        self._late: dict[str, Work[object]] = {}

    def run(self, key: str, task: Callable[[], Result]) -> Result:
        """Return what the task returns. TimeoutError: it, or an earlier one, is not done yet."""
        late = self._late.get(key)
        if late is not None and not late.done:
            raise TimeoutError
        self._late.pop(key, None)
        work = self._workqueue.start(task)
        if work is None:
            raise TimeoutError
        if not work.wait(self._patience):
            self._late[key] = work  # type: ignore[assignment]  # its result is not looked at
            raise TimeoutError
        return work.result()
