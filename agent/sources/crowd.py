"""The Pods of a cluster, as a listener tells of them, and those that policies here may mean. Of all
is remembered who they are, as policies come and go; but only of those that may be meant is anything
news."""

from collections.abc import Callable, Mapping
from threading import Lock

from agent.sources import api
from agent.sources.answers import Object
from agent.sources.api import Listed
from agent.sources.listening import heard
from agent.sources.parties import POD, Choice, Wanted, pod
from agent.sources.told import name_of
from rules.policies import Labels
from rules.problems import Problem
from rules.services import Pod


class Crowd:
    """Whoever looks at those that are chosen has the turn."""

    def __init__(self, turn: Lock, changed: Callable[[], None]) -> None:
        self._turn, self._changed = turn, changed
        self._everybody: dict[str, Pod] = {}
        self._choice = Choice(Wanted(), {})
        self._made_of: object = None
        self.chosen: dict[str, Pod] = {}
        self.faults: dict[str, Problem] = {}  # bugs that some met, who are as if not there
        self.age = 0  # how often something was new

    def take(self, listed: Listed) -> None:
        """These are all there are."""
        items = {name_of(item): item for item in listed.items if isinstance(item, dict)}
        found = {name: _heard(name, item) for name, item in items.items()}
        faults = {name: one for name, one in found.items() if isinstance(one, Problem)}
        with self._turn:
            self._everybody = {name: one for name, one in found.items() if isinstance(one, Pod)}
            self.age += faults != self.faults
            self.faults = faults
            self._choose()

    def hear(self, event: api.Event) -> None:
        """This has happened since."""
        if event.type == "BOOKMARK":
            return
        name = name_of(event.object)
        now = None if event.type == "DELETED" else _heard(name, event.object)
        with self._turn:
            self._everybody.pop(name, None)
            before, fault = self.chosen.pop(name, None), self.faults.pop(name, None)
            if isinstance(now, Problem):
                self.faults[name] = now
            elif now is not None:
                self._everybody[name] = now
                if self._choice.takes(now):
                    self.chosen[name] = now
            new = before != self.chosen.get(name) or fault != self.faults.get(name)
            self.age += new
        if new:
            self._changed()

    def go_on(self) -> None:
        """Nobody else was asked for anything."""

    def choose(self, wanted: Wanted, homes: Mapping[str, Labels], age: int) -> None:
        """From now on it is about these; age is that of what is known of namespaces."""
        with self._turn:
            if self._made_of != (wanted, age):
                self._made_of = wanted, age
                self._choice = Choice(wanted, homes)
                self._choose()

    def _choose(self) -> None:
        takes = self._choice.takes
        chosen = {name: one for name, one in self._everybody.items() if takes(one)}
        self.age += chosen != self.chosen
        self.chosen = chosen


def _heard(name: str, item: Object) -> Pod | Problem | None:
    return heard(lambda: pod(item), f"{POD}/{name}", item)
