"""Listeners that begin and end while the agent runs, and what all of them have cost so far."""

from collections.abc import Callable
from threading import Event

from agent.sources.api import Api
from agent.sources.listening import FROM_CACHE, Listener, Subject, Taker


class Ear:
    """Who listens to one subject until it is told to end."""

    def __init__(
        self,
        server: Api,
        subject: Subject,
        taker: Taker,
        *,
        since: str,
        changed: Callable[[], None],
    ) -> None:
        self._stop = Event()
        self.listener = Listener(
            server, subject, taker, stop=self._stop, changed=changed, since=since
        )
        self.listener.start()

    def end(self) -> None:
        self._stop.set()
        self.listener.interrupt()


class Ears:
    """All of one source."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._open: list[Ear] = []
        self._ending: list[Ear] = []  # whose threads may still run
        self._past = (0, 0)  # requests of those who have ended, and what they received

    def open(self, server: Api, subject: Subject, taker: Taker, since: str = FROM_CACHE) -> Ear:
        """Listen to one more subject; the first list has what happened up to that version."""
        ear = Ear(server, subject, taker, since=since, changed=self._changed)
        self._open.append(ear)
        return ear

    def dismiss(self, ear: Ear) -> None:
        ear.end()
        self._open.remove(ear)
        self._ending.append(ear)

    def part(self) -> bool:
        """From those whose threads are at their end, and who still hold all they heard; whether
        some are left."""
        for ear in [one for one in self._ending if one.listener.ended(0)]:
            self._ending.remove(ear)
            requests, received = self._past
            self._past = requests + ear.listener.requests, received + ear.listener.received
        return bool(self._ending)

    @property
    def _listeners(self) -> list[Listener]:
        return [one.listener for one in (*self._open, *self._ending)]

    @property
    def requests(self) -> int:
        return self._past[0] + sum(one.requests for one in self._listeners)

    @property
    def received(self) -> int:
        return self._past[1] + sum(one.received for one in self._listeners)

    def interrupt(self) -> None:
        """Whatever they wait for, they wait no longer."""
        for ear in self._open:
            ear.end()

    def ended(self, seconds: float) -> bool:
        """Whether all threads are at their end, each within that time."""
        return all(one.ended(seconds) for one in self._listeners)
