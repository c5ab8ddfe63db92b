"""What every kernel offers, whichever holds the rules: the seam that reconcile works through."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

from rules.foreign_filters import Filter
from rules.load import Tracking
from rules.model import Address, Live, Members, Observed, Peers, Rule, Surroundings
from rules.plan import Plan
from rules.publish import Node
from rules.values import Value

Beat = Callable[[], None]  # called now and then by what may take long: we are alive

LAST_GENERATION = 0xFFFFFFFF  # the next one is 1


class Generation(Value):
    """Of the rules of a namespace: every change of them has another number. The cookie tells the
    namespace from all others, also from one that has the name or inode of one that died."""

    cookie: int
    number: int

    def after(self, commits: int) -> "Generation":
        """When there were so many."""
        return Generation(self.cookie, (self.number + commits - 1) % LAST_GENERATION + 1)


Known = tuple[Generation, Observed]  # and what the rules were


class Namespace(Protocol):
    """An opened namespace; which backend holds our rules there, and why."""

    backend: str
    reason: str

    @property
    def identity(self) -> object:
        """The same for two names of one namespace."""

    @property
    def nsid(self) -> object:
        """How events name the namespace."""

    @property
    def generation(self) -> Generation | None:
        """Of the rules at the last look; None where only another look can tell if they changed."""

    @property
    def legacy(self) -> bytes:
        """What the legacy forward filters of others were known by when it was opened, as they have
        no generation; empty: there are none."""

    @property
    def known(self) -> Known | None:
        """What spares whoever opens it again another look, if nothing changes until then."""

    def surroundings(self) -> Surroundings: ...
    def node(self, endpoints: Iterable[Address], *, others: bool) -> Node:
        """What publishing depends on, where it is a node's own; others: what they translate."""

    def filters(self) -> tuple[Filter, ...]:
        """What others have at the forward hook."""

    def observe(self, sysctls: Iterable[str] = ()) -> Observed: ...
    def commit(self, plan: Plan) -> None: ...
    def exclusive(self) -> AbstractContextManager[None]: ...
    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        """Forget flows to these guests that these rules would not have made, as after an
        interrupted commit."""


class Watched(Namespace, Protocol):
    """One whose traffic can be looked at, too."""

    def recounted(self, live: Sequence[Live]) -> tuple[Live, ...]:
        """What was observed, with its counters as they are now, at less cost than another look."""

    def tracked(self) -> Tracking:
        """The flows that are sent on to another address, by us or by others."""


class Glimpse(Value, kw_only=True):
    """What tells at little cost whether a namespace is as it was."""

    identity: object
    generation: Generation | None  # None: only a look can tell
    legacy: bytes = b""
    surroundings: Surroundings
    sysctls: Mapping[str, str]


class Flushed(Value, kw_only=True):
    """How far the forgetting of flows has come."""

    count: int = 0  # of flows that were forgotten since this was last asked
    asked: int = 0  # times that flows were to be forgotten, each after a commit or a look
    done: int = 0  # of these, so many from the first on are done
    open: frozenset[str] = frozenset()  # namespaces where some are still to be forgotten
    waiting: Mapping[str, str] = MappingProxyType({})  # namespaces where it failed, and why
    failures: tuple[str, ...] = ()  # why it is not known what was to be forgotten


class Kernel(Protocol):
    """Where namespaces are."""

    def names(self) -> list[str]: ...
    def identity(self, netns: str) -> object:
        """Which namespace has that name now; None: there is none."""

    def opened(self, netns: str, known: Known | None = None) -> AbstractContextManager[Watched]: ...
    def holds_rules(self, netns: str) -> bool:
        """Whether something of ours is in that namespace, at less cost than another look."""

    def links(self, netns: str) -> tuple[object, Surroundings]:
        """How events name that namespace, and the links that it has."""

    def glimpse(self, netns: str, before: Glimpse) -> Glimpse:
        """The same again, now; what only a change of the rules changes is not asked without one."""

    def resources(self, netns: str) -> Mapping[str, str]:
        """Which link of a pod backs each of its network resources, as the pod itself tells."""

    def afterwards(self, beat: Beat) -> Flushed:
        """Begin what was put off until every commit is made; how far it has come."""
