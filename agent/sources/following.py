"""Follows the VirtualMachineInstances that carry one label, on a thread of its own: lists them,
watches them, and when that breaks off takes it up again where it was.

A node needs two: for those that run here, and for those that are about to migrate here. When a
migration ends, an instance leaves the one and enters the other, in two streams of which either may
be late; so whoever loses one that was not deleted asks whether the other will have it. Nothing is
ever dropped because nobody answers.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Event, Lock, Thread

from agent.backoff import Backoff
from agent.errors import Failure
from agent.log import timestamp
from agent.sources import api
from agent.sources.answers import Away, Denied, Gone, Missing
from agent.sources.api import Api
from agent.sources.vmis import NODE, PATH, TARGET, Vmi, heard, trimmed
from rules.values import Value, replace

RETRIES = Backoff(first=0.2, longest=30.0)
SLOWLY = 60.0  # seconds between looks for a KubeVirt that is not installed
SHORT = 1.0  # seconds: a watch that lasted less was none
FROM_CACHE = "0"  # whatever version the server has at hand: it need not ask its database

Clock = Callable[[], float]
Seen = Mapping[str, Vmi]  # by label


class Trouble(Value):
    """Why nothing is heard, and since when."""

    since: float
    why: str

    def __str__(self) -> str:
        return f"{self.why} (since {timestamp(self.since)})"


class Shared:
    """What the followers of one node have in common."""

    def __init__(self, node: str, changed: Callable[[], None]) -> None:
        self.node, self.changed = node, changed
        self.turn = Lock()  # of whoever changes what is seen, or looks at all of it
        self.stop = Event()
        self.followers: list[Follower] = []


class Follower:
    """Of the instances whose label names our node."""

    def __init__(
        self, server: Api, key: str, shared: Shared, *, calendar: Clock = time.time
    ) -> None:
        self._api, self._aside = server, server.another()
        self._shared, self._calendar = shared, calendar
        self.query = {"labelSelector": f"{key}={shared.node}"}
        self._version = ""  # the last that was heard of; "": none, so list first
        self._from = FROM_CACHE  # which version a list may have; "": the newest
        self._retries = RETRIES
        self._handed: set[str] = set()  # of those seen, the ones that the label has left
        self.seen: Seen = {}
        self.listed = False
        self.lists = self.events = 0
        self.trouble: Trouble | None = None
        self._thread = Thread(target=self._run, name=key, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        """Whatever it waits for, it waits no longer."""
        self._api.interrupt()
        self._aside.interrupt()

    def ended(self, seconds: float) -> bool:
        """Whether the thread is at its end within that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def requests(self) -> int:
        return self._api.requests + self._aside.requests

    @property
    def received(self) -> int:
        return self._api.received + self._aside.received

    # ------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while not self._shared.stop.is_set():
            self._shared.stop.wait(self._attempt())
        self._api.close()
        self._aside.close()

    def _attempt(self) -> float:
        """List if need be, and watch until it ends; how long to wait before the next time."""
        watching: float | None = None
        events, trouble = self.events, False
        least = longest = 0.0
        try:
            again = bool(self._version)
            if not again:
                self._list()
            happening = self._api.watch(PATH, self.query, self._version, trimmed)
            watching = time.monotonic()
            self._out_of_trouble()
            if again:
                self._check_handed()
            for event in happening:
                self._hear(event)
        except Gone:
            # A cache may be what is behind: this time the newest is asked for.
            self._version, self._from = "", ""
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
            if not trouble:
                return 0.0  # every watch ends some time
        self._retries = self._retries.struck(max(now, self._retries.until))
        return least + random.uniform(0, longest or self._retries.wait)  # noqa: S311 - no secret

    def _list(self) -> None:
        listed = self._api.listed(PATH, {**self.query, "resourceVersion": self._from}, trimmed)
        self.lists += 1
        found = {vmi.label: vmi for vmi in _each(listed.items)}
        gone = [vmi for label, vmi in self.seen.items() if label not in found]
        handed = self._elsewhere(gone, listed.version)
        with self._shared.turn:
            self._set({**found, **handed}, handed)
        self.listed, self.trouble = True, None
        self._version, self._from = listed.version, FROM_CACHE
        self._shared.changed()

    def _hear(self, event: api.Event) -> None:
        vmi = heard(event.object)
        self.events += 1
        if vmi is not None and event.type in ("ADDED", "MODIFIED"):
            self._have(vmi)
        elif vmi is not None and event.type == "DELETED":
            self._lose(vmi)
        metadata = event.object.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if isinstance(version, str) and version:
            self._version = version

    # ------------------------------------------------------------------------- what is seen

    def _have(self, vmi: Vmi) -> None:
        with self._shared.turn:
            before = self.seen.get(vmi.label)
            self._set({**self.seen, vmi.label: vmi}, self._handed - {vmi.label})
        if before is None or (before.uid, before.text) != (vmi.uid, vmi.text):
            self._shared.changed()

    def _lose(self, vmi: Vmi) -> None:
        """It no longer carries the label, or is no more."""
        handed = self._elsewhere([vmi], vmi.version)
        with self._shared.turn:
            left = {label: one for label, one in self.seen.items() if label != vmi.label}
            self._set({**left, **handed}, self._handed - {vmi.label} | handed.keys())
        self._shared.changed()

    def _set(self, seen: Seen, handed: Collection[str]) -> None:
        """This is seen now; whoever calls has the turn. What carries the label of one follower is
        not held by another any more."""
        theirs = {label for other in self._others for label in other.seen}
        self._handed = {label for label in handed if label not in theirs}
        self.seen = {
            label: vmi
            for label, vmi in seen.items()
            if label in self._handed or label not in handed
        }
        for other in self._others:
            held = other._handed & (self.seen.keys() - self._handed)
            if held:
                other._handed -= held
                other.seen = {label: vmi for label, vmi in other.seen.items() if label not in held}

    def _elsewhere(self, gone: Iterable[Vmi], version: str) -> dict[str, Vmi]:
        """Of those that were lost, the ones that another follower will have, and has not yet; as
        they are at that version or later."""
        found: dict[str, Vmi] = {}
        for other in self._others:
            lost = {vmi.label: vmi for vmi in gone if not vmi.deleted}
            asked = [vmi for label, vmi in lost.items() if label not in other.seen]
            for vmi in self._asked(other, asked, version):
                if vmi.label in lost and vmi.uid == lost[vmi.label].uid:
                    found[vmi.label] = vmi
        return found

    def _asked(self, other: "Follower", lost: list[Vmi], version: str) -> list[Vmi]:
        """What carries the other's label: one that is looked for by its name, several all at
        once."""
        if not lost:
            return []
        path = PATH
        query = {
            **other.query,
            "resourceVersion": version,
            "resourceVersionMatch": "NotOlderThan",
        }
        if len(lost) == 1:
            path = PATH.replace("/virtual", f"/namespaces/{lost[0].namespace}/virtual")
            query["fieldSelector"] = f"metadata.name={lost[0].name}"
        try:
            return _each(self._aside.listed(path, query, trimmed).items)
        except Failure:
            self._version = ""  # only a list tells again what was lost
            raise

    def _check_handed(self) -> None:
        """What nobody has taken over for as long as a watch lasts may be gone altogether."""
        with self._shared.turn:
            held = [self.seen[label] for label in self._handed]
        for vmi in held:
            self._lose(replace(vmi, version=FROM_CACHE))

    @property
    def _others(self) -> "list[Follower]":
        return [follower for follower in self._shared.followers if follower is not self]

    # ----------------------------------------------------------------------------- troubles

    def _in_trouble(self, failure: Failure) -> None:
        if self._shared.stop.is_set():
            return
        why = _explained(failure)
        if self.trouble is None or self.trouble.why != why:
            since = self.trouble.since if self.trouble else self._calendar()
            self.trouble = Trouble(since, why)
            self._shared.changed()

    def _waits(self, failure: Failure) -> tuple[float, float]:
        """The seconds to wait in any case, and at random on top; 0: as often as it failed."""
        match failure:
            case Away():
                return failure.retry_after, 0.0
            case Missing() if not self.listed:
                return SLOWLY / 2, SLOWLY / 2
            case _:
                return 0.0, 0.0

    def _out_of_trouble(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            self._shared.changed()


def followed(server: Api, shared: Shared) -> list[Follower]:
    """The followers that a node needs."""
    shared.followers = [Follower(server, NODE, shared), Follower(server.another(), TARGET, shared)]
    return shared.followers


def _each(items: Iterable[object]) -> list[Vmi]:
    found = [heard(item) for item in items if isinstance(item, dict)]
    return [vmi for vmi in found if vmi is not None]


def _explained(failure: Failure) -> str:
    """What to tell the administrator."""
    match failure:
        case Missing():
            return (
                "KubeVirt is not installed: the API server knows no"
                " virtualmachineinstances.kubevirt.io. They are looked for every minute"
            )
        case Denied() if failure.known:
            return (
                f"{failure.what}. Let the agent's service account {failure.verb}"
                " virtualmachineinstances.kubevirt.io in all namespaces"
            )
        case _:
            return f"{failure.what}. {failure.fix}" if failure.fix else failure.what
