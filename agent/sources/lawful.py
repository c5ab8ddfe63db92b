"""The NetworkPolicies of a cluster, kept in view, and whom they speak of.

Pods, and Namespaces, are asked for only while a policy that selects a machine of this node cannot
be told without them; of all that are heard of, only those that it may mean are looked at. What
cannot be understood keeps its last good meaning, also over a restart, and what never had one is
shut. Nothing is dropped because nobody answers.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from agent.sources import parties, policies
from agent.sources.api import Api
from agent.sources.crowd import Crowd
from agent.sources.ears import Ear, Ears
from agent.sources.listening import Clock, Listener, Shelf, Subject, troubles
from agent.sources.meaning import Enough, Progress
from agent.sources.parties import NAMESPACES, PODS, Alike, Home, Wanted, Wards
from agent.sources.policies import understood
from agent.sources.readings import Readings
from agent.sources.store import Texts
from agent.sources.told import Reference, Told, carefully
from rules.fences import Laws
from rules.model import Machine
from rules.policies import NetworkPolicy
from rules.problems import Problem
from rules.values import Value

LINGER = 60.0  # seconds: whoever needs Pods now and then must not have all listed each time
PARTING = 1.0  # seconds until a thread that was told to end is looked after again
NEWEST = ""  # what the server has in its cache comes in one piece, which for all Pods is too much

_POLICIES = Subject(
    path=policies.PATH,
    query={},
    trim=policies.trimmed,
    kind="networkpolicies.networking.k8s.io",
)
_NAMESPACES = Subject(path=NAMESPACES, query={}, trim=parties.trimmed_namespace, kind="namespaces")


def _pods() -> Subject:
    alike = Alike()
    return Subject(
        path=PODS,
        query={"fieldSelector": parties.RUNNING},
        trim=lambda thing: parties.trimmed_pod(thing, alike),
        kind="pods",
    )


class View(Value, kw_only=True):
    """What is known of policies."""

    laws: Laws = Laws()
    problems: tuple[Problem, ...] = ()
    held: tuple[str, ...] = ()  # those that go on with their last good meaning
    shut: tuple[str, ...] = ()  # those without one, which allow nothing


class Lawful:
    """What policies say to the machines of a node."""

    def __init__(
        self,
        server: Api,
        changed: Callable[[], None],
        texts: Texts[str],
        *,
        left: Mapping[str, str] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`left` are the last good texts that the source before this one knew."""
        self._api, self._changed, self._clock = server, changed, clock
        self._turn = Lock()
        heard = carefully(policies.heard, policies.API, policies.KIND)
        self._shelf: Shelf[Told] = Shelf(policies.KIND, heard, self._turn, changed)
        self._homes: Shelf[Home] = Shelf(parties.NAMESPACE, parties.home, self._turn, changed)
        self._crowd = Crowd(self._turn, changed)
        self.ears = Ears(changed)
        self._first = self.ears.open(server, _POLICIES, self._shelf).listener
        self._others: dict[str, Ear] = {}  # to Pods and Namespaces
        self._until: dict[str, float] = {}  # when those end that nobody needs
        self.due: float | None = None  # when to attend again although nothing is new
        self._complete = False  # whether all was known once
        self._readings: Readings[NetworkPolicy] = Readings(
            policies.heard, understood, policies.closed, texts, left=left
        )
        self._age: int | None = None  # of what that was read
        self._wards: Wards | None = None  # whom it was then that policies may select
        self._wanted = Wanted()
        self._made: object = None  # of what the view was made
        self._view = View()

    # ------------------------------------------------------------------------------ listening

    def answered(self) -> bool:
        """Whether the API server has said something to everything it was asked, good or bad."""
        return all(one.listed or one.trouble for one in self._needed)

    def _attend(self) -> None:
        """Ask for what is needed now, and for nothing that was not for a while."""
        needed = {PODS: self._wanted.pods, NAMESPACES: self._wanted.namespaces}
        now = self._clock()
        for kind, is_needed in needed.items():
            if is_needed:
                self._until.pop(kind, None)
                if kind not in self._others:
                    self._others[kind] = self._listening(kind)
            elif kind in self._others and now >= self._until.setdefault(kind, now + LINGER):
                del self._until[kind]
                self.ears.dismiss(self._others.pop(kind))
                self._forget(kind)
        parting = [now + PARTING] if self.ears.part() else []
        self.due = min((*self._until.values(), *parting), default=None)

    def _listening(self, kind: str) -> Ear:
        server = self._api.another()
        if kind == PODS:
            return self.ears.open(server, _pods(), self._crowd, NEWEST)
        return self.ears.open(server, _NAMESPACES, self._homes)

    def _forget(self, kind: str) -> None:
        """What nobody listens to any more is soon no longer true."""
        if kind == PODS:
            self._crowd = Crowd(self._turn, self._changed)
        else:
            self._homes = Shelf(parties.NAMESPACE, parties.home, self._turn, self._changed)

    @property
    def _needed(self) -> list[Listener]:
        others = [ear for kind, ear in self._others.items() if kind not in self._until]
        return [self._first, *(ear.listener for ear in others)]

    # -------------------------------------------------------------------------------- looking

    @property
    def unknown(self) -> str:
        """Why nothing is known."""
        if self._complete:
            return ""
        return self.away or "the NetworkPolicies, or whom they speak of, were not listed yet"

    @property
    def away(self) -> str:
        """Why what is known may be old, or less than all."""
        return troubles(*self._needed)

    def reference(self, label: str) -> Reference | None:
        """The policy of that name, for what is to be told about it."""
        kind, _, name = label.partition("/")
        with self._turn:
            thing = self._shelf.things.get(name) if kind == policies.KIND else None
        return thing.reference if thing else None

    def look(self, machines: Iterable[Machine], beat: Progress, *, anew: bool = False) -> View:
        """What is known now; only policies of which something changed are read again."""
        wards = parties.wards(machines)
        if not self._first.listed:
            return View()
        with self._turn:
            age, seen = self._shelf.age, list(self._shelf.things.values())
        if anew or age != self._age:
            self._readings.look(seen, beat, anew=anew)
        if (age, wards) != (self._age, self._wards):
            self._age, self._wards = age, wards
            self._wanted = parties.wanted(self._meant(), wards)
        self._attend()
        if all(one.listed or (one.trouble and self._complete) for one in self._needed):
            self._complete = True
            self._view = self._viewed(age, wards)
        return self._view if self._complete else View()

    def texts(self) -> Mapping[str, str]:
        """The last good texts, as they would be stored."""
        return self._readings.texts()

    def remember(self, beat: Progress, enough: Enough) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        return self._readings.remember(beat, enough)

    def _meant(self) -> tuple[NetworkPolicy, ...]:
        """What policies mean now; one without a good meaning is broken, and so allows nothing."""
        return tuple(policy for _, policy in self._readings.meant)

    def _viewed(self, age: int, wards: Wards) -> View:
        """Where a kind cannot be listed that is needed only now, nobody of it is known: so nobody
        is let in for it, or out."""
        with self._turn:
            homes_age = self._homes.age
            homes = {one.name: one.labels for one in self._homes.things.values()}
        crowd = self._crowd
        crowd.choose(self._wanted, homes, homes_age)
        with self._turn:
            made = age, wards, crowd, crowd.age, homes_age
            pods = tuple(crowd.chosen.values())
            shelves = (self._shelf, self._homes, crowd)
            unread = tuple(one for shelf in shelves for one in shelf.faults.values())
        if made == self._made:
            return self._view
        self._made = made
        readings = self._readings
        return View(
            laws=Laws(
                policies=self._meant(),
                pods=pods,
                namespaces=parties.known(homes) if self._wanted.namespaces else (),
                # Also while they are being listed: then a selector that wants a label to be
                # missing would admit whoever is in a namespace that has it.
                all_labels=False,
            ),
            problems=(*readings.problems, *unread),
            held=readings.held,
            shut=readings.lost,
        )
