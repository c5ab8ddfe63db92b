"""The Pods of a cluster, as a listener tells of them, and those that policies here may mean. Of all
is remembered who they are, as policies come and go; but only of those that may be meant is anything
news."""

from collections.abc import Callable, Mapping
from threading import Lock

from agent.sources import api
from agent.sources.api import Listed
from agent.sources.parties import Choice, Wanted, pod
from agent.sources.told import name_of
from rules.policies import Labels
from rules.services import Pod


class Crowd:
    """Whoever looks at those that are chosen has the turn."""

    def __init__(self, turn: Lock, changed: Callable[[], None]) -> None:
        self._turn, self._changed = turn, changed
        self._everybody: dict[str, Pod] = {}
        self._choice = Choice(Wanted(), {})
        self._made_of: object = None
        self.chosen: dict[str, Pod] = {}
        self.age = 0  # how often something was new

    def take(self, listed: Listed) -> None:
        """These are all there are."""
        found = {
            name_of(item): one
            for item in listed.items
            if isinstance(item, dict) and (one := pod(item)) is not None
        }
        with self._turn:
            self._everybody = found
            self._choose()

    def hear(self, event: api.Event) -> None:
        """This has happened since."""
        if event.type == "BOOKMARK":
            return
        now = None if event.type == "DELETED" else pod(event.object)
        name = name_of(event.object)
        with self._turn:
            self._everybody.pop(name, None)
            before = self.chosen.pop(name, None)
            if now is not None:
                self._everybody[name] = now
                if self._choice.takes(now):
                    self.chosen[name] = now
            new = before != self.chosen.get(name)
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
