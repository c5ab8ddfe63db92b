"""The Services of a cluster, kept in view: all that hold something of a node, and what is behind
those with ranges.

Only of these are the EndpointSlices asked for, by the names of the Services; when the names change,
whoever listens is relieved by another, and goes on until that one knows all. What cannot be
understood keeps its last good meaning, also over a restart, and nothing is dropped because nobody
answers.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from types import MappingProxyType

from agent.sources import services, slices
from agent.sources.api import Api
from agent.sources.boundary import guarded
from agent.sources.ears import Ear, Ears
from agent.sources.listening import FROM_CACHE, Clock, Listener, Shelf, Subject, troubles
from agent.sources.meaning import Enough, Progress
from agent.sources.readings import Readings
from agent.sources.services import plain, understood
from agent.sources.slices import Slice, endpoints, selector
from agent.sources.store import Texts
from agent.sources.told import Reference, Told, carefully
from rules.problems import Problem
from rules.services import Endpoint, Service
from rules.values import Value

RELIEF = 1.0  # seconds between two changes of whom slices are asked for

Endpoints = Mapping[str, tuple[tuple[Endpoint, ...], ...]]


class View(Value, kw_only=True):
    """What is known of Services."""

    services: tuple[Service, ...] = ()
    endpoints: Endpoints = MappingProxyType({})
    problems: tuple[Problem, ...] = ()
    held: tuple[str, ...] = ()  # those that go on with their last good meaning


class _Backs:
    """Who listens to the slices of the Services of some names."""

    def __init__(self, names: frozenset[str], shelf: Shelf[Slice], ear: Ear) -> None:
        self.names, self.shelf, self.ear = names, shelf, ear

    @property
    def listener(self) -> Listener:
        return self.ear.listener


class Published:
    """The Services that are, or could be, published on a node."""

    def __init__(  # noqa: PLR0913 - the rest by name
        self,
        server: Api,
        node: str,
        changed: Callable[[], None],
        texts: Texts[str],
        *,
        left: Mapping[str, str] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`left` are the last good texts that the source before this one knew."""
        self._api, self._node, self._changed, self._clock = server, node, changed, clock
        self._turn = Lock()
        heard = carefully(services.heard, services.API, services.KIND)
        self._shelf: Shelf[Told] = Shelf(services.KIND, heard, self._turn, changed)
        subject = Subject(path=services.PATH, query={}, trim=services.trimmed, kind="services")
        self.ears = Ears(changed)
        self._listener = self.ears.open(server, subject, self._shelf).listener
        self._backs: _Backs | None = None  # who knows all of the names they were asked for
        self._relief: _Backs | None = None  # who does not yet
        self._relieved = float("-inf")
        self.due: float | None = None  # when to attend again although nothing is new
        self._complete = False  # whether all was known once
        self._readings: Readings[Service | None] = Readings(
            services.heard,
            understood,
            lambda _: None,
            texts,
            lambda told: told.annotated,
            left=left,
        )
        self._made: object = None  # of what the view was made
        self._view = View()

    # ------------------------------------------------------------------------------ listening

    def answered(self) -> bool:
        """Whether the API server has said something to everything it is to be asked, good or
        bad."""
        listener = self._listener
        if not (listener.listed or listener.trouble):
            return False
        self.attend()
        relief = self._relief.listener if self._relief else listener
        return relief.listed or relief.trouble is not None

    def attend(self) -> None:
        """Ask for the slices of those that have ranges now, and no others."""
        if not self._listener.listed:
            return
        with self._turn:
            names = frozenset(one.name for one in self._shelf.things.values() if one.annotated)
        newest = self._relief or self._backs
        now = self._clock()
        self.due = None
        if names != (newest.names if newest else frozenset()):
            if names and now < self._relieved + RELIEF:
                self.due = self._relieved + RELIEF
            else:
                self._relieve(names, now)
        if self._relief is not None and self._relief.listener.listed:
            self._dismiss(self._backs)
            self._backs, self._relief = self._relief, None

    def _relieve(self, names: frozenset[str], now: float) -> None:
        backs = self._backs
        self._dismiss(self._relief)
        self._relief = None
        if not names:
            self._dismiss(backs)
            self._backs = None
        elif backs is None or backs.names != names:
            # Whatever server answers, it is to know what another has told of them already.
            since = backs.listener.version if backs else ""
            self._relief = self._listening(names, since or FROM_CACHE)
            self._relieved = now

    def _listening(self, names: frozenset[str], since: str) -> _Backs:
        shelf = Shelf(
            slices.KIND,
            lambda thing: slices.heard(thing, self._node, names),
            self._turn,
            self._changed,
            lasts=True,
        )
        subject = Subject(
            path=slices.PATH,
            query={"labelSelector": selector(names)},
            trim=slices.trimmed,
            kind="endpointslices.discovery.k8s.io",
        )
        return _Backs(names, shelf, self.ears.open(self._api.another(), subject, shelf, since))

    def _dismiss(self, backs: _Backs | None) -> None:
        if backs is not None:
            self.ears.dismiss(backs.ear)
            self.ears.part()

    # -------------------------------------------------------------------------------- looking

    @property
    def unknown(self) -> str:
        """Why nothing is known."""
        if self._complete:
            return ""
        return self.away or "the Services, or what is behind them, were not listed yet"

    @property
    def away(self) -> str:
        """Why what is known may be old."""
        backs = [one.listener for one in (self._backs, self._relief) if one]
        return troubles(self._listener, *backs)

    def reference(self, label: str) -> Reference | None:
        """The Service of that name, for what is to be told about it."""
        kind, _, name = label.partition("/")
        with self._turn:
            thing = self._shelf.things.get(name) if kind == services.KIND else None
        return thing.reference if thing else None

    def look(self, beat: Progress, *, anew: bool = False) -> View:
        """What is known now; only Services of which something changed are read again."""
        if not self._listener.listed:
            return View()
        self.attend()
        backs = self._backs
        with self._turn:
            made = self._shelf.age, backs, backs.shelf.age if backs else 0
            seen = list(self._shelf.things.values())
            behind = list(backs.shelf.things.values()) if backs else []
            unread = (*self._shelf.faults.values(), *(backs.shelf.faults.values() if backs else ()))
        self._complete |= self._relief is None
        if anew or made != self._made:
            self._made = made
            self._readings.look(seen, beat, anew=anew)
            self._view = self._viewed(behind, backs.names if backs else frozenset(), unread)
        return self._view if self._complete else View()

    def texts(self) -> Mapping[str, str]:
        """The last good texts, as they would be stored."""
        return self._readings.texts()

    def remember(self, beat: Progress, enough: Enough) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        return self._readings.remember(beat, enough)

    def _viewed(
        self, behind: Iterable[Slice], names: frozenset[str], unread: Iterable[Problem]
    ) -> View:
        found: dict[str, list[Slice]] = {}
        for some in behind:
            found.setdefault(some.service, []).append(some)
        readings = self._readings
        before = {str(one): one for one in self._view.services}
        meant: list[tuple[Service, tuple[tuple[Endpoint, ...], ...]]] = []
        faults: list[Problem] = []
        for told, last in readings.meant:
            made = guarded(lambda: _made(told, last, names, found), told.label)  # noqa: B023 - now
            if isinstance(made, Problem):
                faults.append(made)
                known = before.get(told.label)
                made = (known, self._view.endpoints[told.label]) if known else None
            if made:
                meant.append(made)
        return View(
            services=tuple(one for one, _ in meant),
            endpoints={str(one): leads_to for one, leads_to in meant},
            problems=(*readings.problems, *faults, *unread),
            held=readings.held,
        )


def _made(
    told: Told, last: Service | None, names: frozenset[str], behind: Mapping[str, list[Slice]]
) -> tuple[Service, tuple[tuple[Endpoint, ...], ...]] | None:
    """What a Service means now, with where it leads."""
    one = _meant(told, last, names)
    return None if one is None else (one, endpoints(one, behind.get(str(one), ())))


def _meant(told: Told, last: Service | None, names: frozenset[str]) -> Service | None:
    """What a Service means now. One without a meaning, or whose slices were not asked for until
    now, is what it is to kube-proxy: nothing else was ever published of it."""
    if last is None or (told.annotated and told.name not in names):
        return plain(told)
    return last
