"""Follows the VirtualMachineInstances that carry one label, as a listener tells of them.

A node needs two: for those that run here, and for those that are about to migrate here. When a
migration ends, an instance leaves the one and enters the other, in two streams of which either may
be late; so whoever loses one that was not deleted asks whether the other will have it. Nothing is
ever dropped because nobody answers.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Event, Lock

from agent.errors import Failure
from agent.sources import api, listening
from agent.sources.api import Api, Listed
from agent.sources.boundary import trimming
from agent.sources.listening import FROM_CACHE, Clock, Listener, Subject, Trouble
from agent.sources.vmis import NODE, PATH, TARGET, Vmi, carefully_heard, trimmed
from rules.values import replace

SLOWLY = listening.SLOWLY  # between looks for a KubeVirt that is not installed

Seen = Mapping[str, Vmi]  # by label


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
        self._aside, self._shared = server.another(), shared
        self.query = {"labelSelector": f"{key}={shared.node}"}
        self._handed: set[str] = set()  # of those seen, the ones that the label has left
        self.seen: Seen = {}
        self.listener = Listener(
            server,
            Subject(
                path=PATH,
                query=self.query,
                trim=trimmed,
                kind="virtualmachineinstances.kubevirt.io",
                absent="KubeVirt is not installed: ",
            ),
            self,
            stop=shared.stop,
            changed=shared.changed,
            calendar=calendar,
            slowly=SLOWLY,
        )

    def start(self) -> None:
        self.listener.start()

    def interrupt(self) -> None:
        """Whatever it waits for, it waits no longer."""
        self.listener.interrupt()
        self._aside.interrupt()

    def ended(self, seconds: float) -> bool:
        """Whether its thread is at its end within that time."""
        ended = self.listener.ended(seconds)
        if ended:
            self._aside.close()
        return ended

    @property
    def listed(self) -> bool:
        return self.listener.listed

    @property
    def trouble(self) -> Trouble | None:
        return self.listener.trouble

    @property
    def requests(self) -> int:
        return self.listener.requests + self._aside.requests

    @property
    def received(self) -> int:
        return self.listener.received + self._aside.received

    # -------------------------------------------------------------------------- what is heard

    def take(self, listed: Listed) -> None:
        """These carry the label."""
        found = {vmi.label: vmi for vmi in _each(listed.items)}
        gone = [vmi for label, vmi in self.seen.items() if label not in found]
        handed = self._elsewhere(gone, listed.version)
        with self._shared.turn:
            self._set({**found, **handed}, handed)

    def hear(self, event: api.Event) -> None:
        """This has happened to one that does, or did."""
        vmi = carefully_heard(event.object)
        if vmi is not None and event.type in ("ADDED", "MODIFIED"):
            self._have(vmi)
        elif vmi is not None and event.type == "DELETED":
            self._lose(vmi)

    def go_on(self) -> None:
        """What nobody has taken over for as long as a watch lasts may be gone altogether."""
        with self._shared.turn:
            held = [self.seen[label] for label in self._handed]
        for vmi in held:
            self._lose(replace(vmi, version=FROM_CACHE))

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
            return _each(self._aside.listed(path, query, trimming(trimmed)).items)
        except Failure:
            self.listener.list_again()
            raise

    @property
    def _others(self) -> "list[Follower]":
        return [follower for follower in self._shared.followers if follower is not self]


def followed(server: Api, shared: Shared) -> list[Follower]:
    """The followers that a node needs."""
    shared.followers = [Follower(server, NODE, shared), Follower(server.another(), TARGET, shared)]
    return shared.followers


def _each(items: Iterable[object]) -> list[Vmi]:
    found = [carefully_heard(item) for item in items if isinstance(item, dict)]
    return [vmi for vmi in found if vmi is not None]
