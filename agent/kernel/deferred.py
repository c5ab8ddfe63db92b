"""What comes after a commit: flows are forgotten, and sockets of netfilter closed.

A command does both at once. The daemon puts them off: one thread has flows forgotten, by a process
that walks conntrack, and another closes sockets, so that no namespace waits for the flows of
another. What is to be forgotten in a namespace is kept until it is, and is tried again with
back-off where it fails.
"""

import base64
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from agent.backoff import FAILURES
from agent.errors import Failure, NoNamespace
from agent.kernel import netns as namespaces
from agent.kernel import rtnetlink
from agent.kernel.flush import forget
from agent.kernel.flush_worker import DELETE, FIND
from agent.kernel.kinds import Beat, Flushed
from agent.kernel.worker import Json, Worker, module
from rules.flows import still_due
from rules.plan import Plan
from rules.stale import Due, merged
from rules.values import Value

MOST_TO_CLOSE = 32  # sockets and contexts that wait for it: each is memory, and keeps its namespace
WORKER = "agent.kernel.flush_worker"
PATIENCE = 180.0  # seconds for one pass, on the wall clock
LAST_WORDS = 5.0  # seconds to come to an end when we are stopped

Identity = tuple[int, int]
Found = Callable[[str], AbstractContextManager[int]]  # a descriptor of the namespace of that name


class Walking(Protocol):
    """Who walks conntrack: a worker process."""

    def ask(self, descriptor: int, question: Json) -> Json: ...
    def stop(self) -> None: ...


class Flush(Value, kw_only=True):
    """What a commit asks for: to forget flows that are found out when there is time for it. The
    plans that were committed may lead flows again that were to be forgotten before."""

    netns: str
    identity: Identity
    due: Callable[[], Sequence[Due]]
    plans: tuple[Plan, ...] = ()


def identity_of(descriptor: int) -> Identity:
    """Which namespace it is; the same for two names of one."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class AtOnce:
    """For who opens one namespace after the other: what comes after a commit comes right after."""

    def forget(self, flush: Flush, descriptor: int) -> None:
        due = flush.due()
        if not due:
            return
        try:
            with namespaces.inside(descriptor, flush.netns):
                links = rtnetlink.surroundings().links
                forget(due, {address.ip for link in links for address in link.addresses})
        except OSError as error:
            raise _unable(flush.netns, error.strerror or str(error)) from error

    def announce(self, netns: str, identity: Identity, plan: Plan) -> None:
        """Nothing was put off."""

    def conclude(self, netns: str, identity: Identity) -> None:
        """Nothing was put off."""

    def idle(self, netns: str, identity: Identity) -> None:
        """Nothing was put off."""

    def close(self, task: Callable[[], None]) -> None:
        task()

    def flushed(self, beat: Beat, found: Found) -> Flushed:  # noqa: ARG002 - nothing was put off
        return Flushed()


class _Task:
    """What is to be forgotten in one namespace, for the commits with these numbers."""

    def __init__(self, netns: str, identity: Identity, number: int) -> None:
        self.netns, self.identity = netns, identity
        self.tried: tuple[Due, ...] = ()  # what is being forgotten, or could not be
        self.waiting: tuple[Due, ...] = ()  # what came since then
        self.announced: tuple[Plan, ...] = ()  # what is being committed there, or could not be
        self.first = self.last = number
        self.failures = FAILURES
        self.why = ""
        self.turn = 0  # when it last had one: nobody waits for all flows of another

    def lead(self, plans: Iterable[Plan]) -> None:
        """These were committed there since then."""
        self.tried, self.waiting = _without(self.tried, plans), _without(self.waiting, plans)

    def add(self, due: Iterable[Due], number: int) -> None:
        """This is due there for another commit."""
        self.waiting = (*self.waiting, *due)
        self.last = number


def _without(due: tuple[Due, ...], plans: Iterable[Plan]) -> tuple[Due, ...]:
    """What is still due when these plans were committed."""
    for plan in plans:
        due = tuple(still_due(due, plan))
    return due


class _Result(Value, kw_only=True):
    """What became of one pass."""

    count: int = 0
    more: bool = False
    gone: bool = False
    why: str = ""


class Deferred:
    """For who keeps many namespaces; `wake` is called by the other thread when there is news."""

    def __init__(
        self, wake: Callable[[], None] = lambda: None, worker: Walking | None = None
    ) -> None:
        self._wake, self._clock = wake, time.monotonic
        self._worker: Walking = worker or Worker(
            "the worker for conntrack", module(WORKER), patience=PATIENCE
        )
        self._asked: list[Flush] = []
        self._closing: queue.Queue[Callable[[], None]] | None = None
        # What both threads know is changed by who holds this.
        self._changed = threading.Condition()
        self._tasks: dict[tuple[str, Identity], _Task] = {}
        self._found: Found = namespaces.opened
        self._number = self._turn = self._count = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def forget(self, flush: Flush, descriptor: int) -> None:  # noqa: ARG002 - it is opened again
        """Once the rules of all namespaces are made. Nothing holds on to the namespace until then:
        it may go, and its flows with it. Several threads may ask."""
        with self._changed:
            self._asked.append(flush)
            task = self._tasks.get((flush.netns, flush.identity))
            if task is not None:
                task.lead(flush.plans)

    def announce(self, netns: str, identity: Identity, plan: Plan) -> None:
        """Before that is committed there: no flow is forgotten from now on that it leads."""
        with self._changed:
            task = self._tasks.get((netns, identity))
            if task is not None:
                task.announced = (*task.announced, plan)

    def conclude(self, netns: str, identity: Identity) -> None:
        """Nothing is being committed there any more, and what could not be leads nothing."""
        with self._changed:
            task = self._tasks.get((netns, identity))
            if task is not None and task.announced:
                task.announced = ()
                self._changed.notify_all()

    def idle(self, netns: str, identity: Identity) -> None:
        """There is no flow at all in that namespace, so nothing is left to be forgotten there."""
        here = netns, identity
        with self._changed:
            self._asked = [one for one in self._asked if (one.netns, one.identity) != here]
            self._tasks.pop(here, None)

    def flushed(self, beat: Beat, found: Found) -> Flushed:
        """Have done what was asked for, and tell how far that has come."""
        with self._changed:
            asked, self._asked = self._asked, []
        failures = []
        for flush in asked:
            beat()
            try:
                self._add(flush, tuple(flush.due()))
            except Exception as error:  # a bug met in one namespace must not stop the others
                why = f"unexpected {type(error).__name__}: {error}"
                failures.append(_unable(flush.netns, why).what)
        with self._changed:
            self._found = found
            count, self._count = self._count, 0
            if self._tasks and self._thread is None:
                failures += self._begin()
            self._changed.notify_all()
            return Flushed(
                count=count,
                asked=self._number,
                done=min((one.first for one in self._tasks.values()), default=self._number + 1) - 1,
                open=frozenset(one.netns for one in self._tasks.values()),
                waiting={one.netns: one.why for one in self._tasks.values() if one.why},
                failures=tuple(failures),
            )

    def _begin(self) -> list[str]:
        """Start the other thread; why that cannot be, if it cannot. The next call tries again."""
        thread = threading.Thread(target=self._run, name="flush", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            return [f"cannot forget flows: {error}"]
        self._thread = thread
        return []

    def _add(self, flush: Flush, due: tuple[Due, ...]) -> None:
        with self._changed:
            self._number += 1
            key = flush.netns, flush.identity
            if key in self._tasks or due:
                task = self._tasks.setdefault(key, _Task(*key, self._number))
                task.lead(flush.plans)  # also what else was asked for meanwhile
                task.add(due, self._number)

    def wait(self, seconds: float) -> bool:
        """Until everything is forgotten that was asked for, or could not be; whether it is."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(task.why for task in self._tasks.values()), timeout=seconds
            )
            return not self._tasks

    def stop(self) -> bool:
        """Come to an end soon; whether everything was done."""
        done = self.wait(LAST_WORDS) if self._thread else not self._tasks
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._worker.stop()
        if self._thread is not None:
            self._thread.join(1)
        return done

    def close(self, task: Callable[[], None]) -> None:
        """By another thread: to close a socket of netfilter after rules were deleted waits until
        the kernel has destroyed them."""
        if self._closing is None:
            self._closing = queue.Queue(MOST_TO_CLOSE)
            threading.Thread(target=_close_all, args=[self._closing], daemon=True).start()
        try:
            self._closing.put_nowait(task)
        except queue.Full:  # whoever holds one namespace must not keep others from being closed
            task()

    # -------------------------------------------------------------------- in the other thread

    def _run(self) -> None:
        for task, last in self._turns():
            result = self._pass(task)
            with self._changed:
                self._settle(task, last, result)
                self._changed.notify_all()
                if not self._stopped:
                    self._wake()

    def _turns(self) -> Iterator[tuple[_Task, int]]:
        """Each task when it is due, and the last commit that it is for then."""
        while True:
            with self._changed:
                while not self._stopped and (task := self._next()) is None:
                    self._changed.wait(self._pause())
                if self._stopped or task is None:
                    return
                task.tried, task.waiting = merged((*task.tried, *task.waiting)), ()
                self._turn += 1
                task.turn, last = self._turn, task.last
            yield task, last

    def _next(self) -> _Task | None:
        now = self._clock()
        due = [task for task in self._ready() if task.failures.until <= now]
        return min(due, key=lambda task: task.turn, default=None)

    def _pause(self) -> float | None:
        until = min((task.failures.until for task in self._ready()), default=None)
        return None if until is None else max(0.0, until - self._clock())

    def _ready(self) -> Iterator[_Task]:
        """Those where nothing is being committed right now."""
        return (task for task in self._tasks.values() if not task.announced)

    def _pass(self, task: _Task) -> _Result:
        try:
            with self._found(task.netns) as descriptor:
                if identity_of(descriptor) != task.identity:
                    return _Result(gone=True)
                return self._asked_worker(descriptor, task)
        except NoNamespace:
            return _Result(gone=True)
        except Failure as failure:
            return _Result(why=failure.what)
        except Exception as error:  # a bug met in one namespace must not stop the others
            return _Result(why=f"unexpected {type(error).__name__}: {error}")

    def _asked_worker(self, descriptor: int, task: _Task) -> _Result:
        """In two steps: flows that were found before a commit are none that it led."""
        due = task.tried
        found = self._ask(descriptor, FIND, due)
        with self._changed:
            now = _without(task.tried, task.announced)
        deleted = self._ask(descriptor, DELETE, None if now == due else now)
        count = int(str(deleted["count"]))
        return _Result(count=count, more=bool(found["more"]) and count > 0)

    def _ask(self, descriptor: int, step: str, due: tuple[Due, ...] | None) -> Json:
        text = b"" if due is None else base64.b64encode(pickle.dumps(due))
        answer = self._worker.ask(descriptor, {"step": step, "due": text.decode()})
        if "error" in answer:
            raise Failure(str(answer.get("text") or answer["error"]))
        return answer

    def _settle(self, task: _Task, last: int, result: _Result) -> None:
        self._count += result.count
        if result.why:
            task.failures = task.failures.struck(self._clock())
            task.why = result.why
            return
        task.failures, task.why = FAILURES, ""
        if result.more or (task.announced and not result.gone):
            return
        task.tried, task.first = (), last + 1
        key = task.netns, task.identity
        if (result.gone or not task.waiting) and self._tasks.get(key) is task:
            del self._tasks[key]


def _unable(netns: str, why: str) -> Failure:
    return Failure(f"cannot forget flows in namespace {netns}: {why}")


def _close_all(tasks: "queue.Queue[Callable[[], None]]") -> None:
    """For as long as the process lives: whoever has something to close waits where nobody does."""
    while True:
        with suppress(Exception):  # what cannot be closed is no reason to close nothing any more
            tasks.get()()
