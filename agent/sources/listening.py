"""Lists and watches the objects at one path of an API server, on a thread of its own, and hands on
what it hears; when that breaks off it is taken up again where it was."""

import random
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, Protocol, TypeVar

from agent.backoff import Backoff
from agent.errors import Failure
from agent.log import timestamp
from agent.sources import api
from agent.sources.answers import Away, Denied, Gone, Missing, Object
from agent.sources.api import Api, Listed, Query, Trim
from agent.sources.boundary import fault_of, guarded, problem, trimming
from agent.sources.told import name_of
from rules.problems import Problem
from rules.values import Value

RETRIES = Backoff(first=0.2, longest=30.0)
# What a watch has told since a list does not count here: else one event for each would be enough
# to have everything listed again and again. The first time in a minute is at once.
RELISTS = Backoff(first=0.2, longest=30.0, free=1, row=60.0, forgiven_after=60.0)
SLOWLY = 60.0  # seconds between looks for a kind that the API server does not know
SHORT = 1.0  # seconds: a watch that lasted less was none
FROM_CACHE = "0"  # whatever version the server has at hand: it need not ask its database

Clock = Callable[[], float]


class Trouble(Value):
    """Why nothing is heard, and since when."""

    since: float
    why: str

    def __str__(self) -> str:
        return f"{self.why} (since {timestamp(self.since)})"


class Subject(Value, kw_only=True):
    """What is asked for."""

    path: str
    query: Query
    trim: Trim
    kind: str  # as rights name it
    absent: str = ""  # what it means that the API server does not know the kind


class Taker(Protocol):
    """Who is handed what is heard."""

    def take(self, listed: Listed) -> None:
        """These are all there are."""

    def hear(self, event: api.Event) -> None:
        """This has happened since."""

    def go_on(self) -> None:
        """A watch has ended, and another has begun where it was."""


class Listener:
    """To one subject; what is wrong is told to who is to be woken, as what is new."""

    def __init__(  # noqa: PLR0913 - the rest by name
        self,
        server: Api,
        subject: Subject,
        taker: Taker,
        *,
        stop: Event,
        changed: Callable[[], None],
        calendar: Clock = time.time,
        slowly: float = SLOWLY,
        since: str = FROM_CACHE,
    ) -> None:
        """The first list has what happened up to that version, or more."""
        self._api, self._subject, self._taker = server, subject, taker
        self._stop, self._changed, self._calendar = stop, changed, calendar
        self._trim = trimming(subject.trim)
        self._slowly = slowly
        self.version = ""  # the last that was heard of; "": none, so list first
        self._from = since  # which version a list may have; "": the newest
        self._retries, self._relists = RETRIES, RELISTS
        self.listed = False
        self.lists = self.events = 0
        self.trouble: Trouble | None = None
        self._thread = Thread(target=self._run, name=subject.kind, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def list_again(self) -> None:
        """Only a list tells again what could not be taken in."""
        self.version = ""

    def interrupt(self) -> None:
        """Whatever it waits for, it waits no longer."""
        self._api.interrupt()

    def ended(self, seconds: float) -> bool:
        """Whether the thread is at its end within that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def requests(self) -> int:
        return self._api.requests

    @property
    def received(self) -> int:
        return self._api.received

    # ------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self.attempt())
        self._api.close()

    def attempt(self) -> float:
        """List if need be, and watch until it ends; how long to wait before the next time."""
        watching: float | None = None
        events, trouble, gone = self.events, False, False
        least = longest = 0.0
        try:
            again = bool(self.version)
            if not again:
                self._list()
            subject = self._subject
            happening = self._api.watch(subject.path, subject.query, self.version, self._trim)
            watching = time.monotonic()
            self._out_of_trouble()
            if again:
                self._taker.go_on()
            for event in happening:
                self._hear(event)
        except Gone:
            # A cache may be what is behind: this time the newest is asked for.
            self.version, self._from, gone = "", "", True
        except Failure as failure:
            trouble = True
            least, longest = self._waits(failure)
            self._in_trouble(failure)
        except Exception as error:  # a bug must not end the only thread that listens
            trouble = True
            self._in_trouble(Failure(f"unexpected {type(error).__name__}: {error}"))
        now = time.monotonic()
        lasted = watching is not None and (now - watching >= SHORT or self.events > events)
        if lasted:
            self._retries = RETRIES
            if not trouble and not gone:
                return 0.0  # every watch ends some time
        if gone:
            self._relists = self._relists.struck(max(now, self._relists.until))
            return random.uniform(0, self._relists.wait)  # noqa: S311 - no secret
        self._retries = self._retries.struck(max(now, self._retries.until))
        return least + random.uniform(0, longest or self._retries.wait)  # noqa: S311 - no secret

    def _list(self) -> None:
        subject = self._subject
        query = {**subject.query, "resourceVersion": self._from}
        if self._from not in ("", FROM_CACHE):
            query["resourceVersionMatch"] = "NotOlderThan"
        listed = self._api.listed(subject.path, query, self._trim)
        self.lists += 1
        self._taker.take(listed)
        self.listed, self.trouble = True, None
        self.version, self._from = listed.version, FROM_CACHE
        self._changed()

    def _hear(self, event: api.Event) -> None:
        self.events += 1
        self._taker.hear(event)
        metadata = event.object.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if isinstance(version, str) and version:
            self.version = version

    # ----------------------------------------------------------------------------- troubles

    def _in_trouble(self, failure: Failure) -> None:
        if self._stop.is_set():
            return
        why = self._explained(failure)
        if self.trouble is None or self.trouble.why != why:
            since = self.trouble.since if self.trouble else self._calendar()
            self.trouble = Trouble(since, why)
            self._changed()

    def _waits(self, failure: Failure) -> tuple[float, float]:
        """The seconds to wait in any case, and at random on top; 0: as often as it failed."""
        match failure:
            case Away():
                return failure.retry_after, 0.0
            case Missing() if not self.listed:
                return self._slowly / 2, self._slowly / 2
            case _:
                return 0.0, 0.0

    def _out_of_trouble(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            self._changed()

    def _explained(self, failure: Failure) -> str:
        """What to tell the administrator."""
        kind = self._subject.kind
        match failure:
            case Missing():
                absent = self._subject.absent
                return f"{absent}the API server knows no {kind}. They are looked for every minute"
            case Denied() if failure.known:
                return (
                    f"{failure.what}. Let the agent's service account {failure.verb} {kind}"
                    " in all namespaces"
                )
            case _:
                return f"{failure.what}. {failure.fix}" if failure.fix else failure.what


class Heard(Protocol):
    """What tells by its content whether there is something new in it."""

    @property
    def content(self) -> object: ...


Thing = TypeVar("Thing", bound=Heard)
Read = TypeVar("Read")


class Shelf(Generic[Thing]):
    """What a listener has told of one kind, as far as it concerns us."""

    def __init__(
        self,
        kind: str,
        read: Callable[[Object], Thing | None],
        turn: Lock,
        changed: Callable[[], None],
        *,
        lasts: bool = False,
    ) -> None:
        """A thing that meets a bug stays what it was, if it lasts; else it is as if it were not
        there."""
        self._kind, self._read, self._lasts = kind, read, lasts
        self._turn, self._changed = turn, changed
        self.things: dict[str, Thing] = {}  # whoever looks at them has the turn
        self.faults: dict[str, Problem] = {}  # bugs that some of them met
        self.age = 0  # how often something was new

    def take(self, listed: Listed) -> None:
        """These are all there are."""
        items = {name_of(item): item for item in listed.items if isinstance(item, dict)}
        read = {name: self._heard(name, item) for name, item in items.items()}
        with self._turn:
            before, self.things, self.faults = self.things, {}, {}
            for name, thing in read.items():
                self._put(name, thing, before.get(name))
            self.age += 1

    def hear(self, event: api.Event) -> None:
        """This has happened since."""
        if event.type == "BOOKMARK":
            return
        name = name_of(event.object)
        thing = None if event.type == "DELETED" else self._heard(name, event.object)
        with self._turn:
            before, fault = self.things.pop(name, None), self.faults.pop(name, None)
            self._put(name, thing, before)
            now = self.things.get(name)
            new = (before and before.content) != (now and now.content)
            new |= fault != self.faults.get(name)
            self.age += new
        if new:
            self._changed()

    def go_on(self) -> None:
        """Nobody else was asked for anything."""

    def _heard(self, name: str, item: Object) -> Thing | Problem | None:
        label = f"{self._kind}/{name.removeprefix('None/')}"  # a namespace is in none
        return heard(lambda: self._read(item), label, item)

    def _put(self, name: str, thing: Thing | Problem | None, before: Thing | None) -> None:
        if isinstance(thing, Problem):
            self.faults[name] = thing
            thing = before if self._lasts else None
        if thing is not None:
            self.things[name] = thing


def heard(read: Callable[[], Read | None], label: str, item: Object) -> Read | Problem | None:
    """What is read of an object that was cut down while it was decoded; a problem where either met
    a bug. Objects that are named with their bug are handed on."""
    found = guarded(read, label)
    fault = fault_of(item)
    return problem(label, fault) if fault and not getattr(found, "fault", "") else found


def troubles(*listeners: Listener) -> str:
    """What keeps them from hearing anything, each trouble once, with when it began."""
    since: dict[str, float] = {}
    for one in listeners:
        trouble = one.trouble
        if trouble is not None:
            since[trouble.why] = min(trouble.since, since.get(trouble.why, trouble.since))
    return "; ".join(str(Trouble(began, why)) for why, began in sorted(since.items()))
