"""A kernel in memory that behaves as the real one does, for tests and for trying things out.

It takes the same plans, numbers its rules, keeps their counters while they are not rewritten, and
refuses a whole commit for one stale handle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext

from agent.errors import NoNamespace, Stale
from agent.kernel.kinds import Beat, Flushed, Generation, Glimpse, Known
from rules.foreign_filters import Filter
from rules.load import Tracking
from rules.model import Address, Foreign, Live, Members, Observed, Peers, Rule, Surroundings
from rules.plan import Plan, Table, loopback_settings
from rules.publish import Node
from rules.values import replace

DEFAULTS = {"net.netfilter.nf_conntrack_tcp_loose": "1"}  # all others are 0


class MemoryNamespace:
    """One namespace of the kernel in memory."""

    backend = "memory"
    reason = "it is all there is"

    @property
    def identity(self) -> object:
        return id(self)

    def __init__(self, surroundings: Surroundings) -> None:
        self.held = Observed()
        self.settings: dict[str, str] = {}
        self.links = surroundings
        self.flows = Tracking()
        self._handle = 0

    @property
    def nsid(self) -> object:
        return id(self)

    @property
    def generation(self) -> Generation | None:
        return None

    @property
    def known(self) -> Known | None:
        return None

    @property
    def legacy(self) -> bytes:
        return b""

    def surroundings(self) -> Surroundings:
        return self.links

    def node(self, endpoints: Iterable[Address], *, others: bool) -> Node:  # noqa: ARG002 - no others
        return Node(surroundings=self.links, routes=dict.fromkeys(endpoints, "eth0"))

    def filters(self) -> tuple[Filter, ...]:
        return ()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        names = {*sysctls, *loopback_settings(self.held.live)}
        settings = {name: self.settings.get(name, DEFAULTS.get(name, "0")) for name in names}
        return replace(self.held, sysctls=settings)

    def commit(self, plan: Plan) -> None:
        held = self._changed(plan)
        self.settings |= {change.name: change.after for change in plan.sysctls}
        self.held = held

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recounted(self, live: Sequence[Live]) -> tuple[Live, ...]:
        return tuple(live)

    def tracked(self) -> Tracking:
        return self.flows

    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        """There are no flows."""

    def insert(self, rule: Rule | Foreign) -> None:
        """What a stranger does: puts a rule into our table."""
        handle = self._next()
        if isinstance(rule, Foreign):
            foreign = (*self.held.foreign, replace(rule, handle=handle))
            self.held = replace(self.held, foreign=foreign)
        else:
            self.held = replace(self.held, live=(*self.held.live, Live(rule, handle)))

    def close(self) -> None:
        """Nothing is held."""

    def _changed(self, plan: Plan) -> Observed:
        if plan.leftovers:
            self.held, plan = replace(self.held, leftovers=()), replace(plan, leftovers=())
        if plan.same_rules:
            return self.held
        if plan.table is Table.DELETE and self.held.table:
            return Observed()
        if self.held.table is (plan.table is Table.CREATE):
            raise Stale("the table came or went while we looked at it")
        remade = plan.table is Table.REMAKE
        gone = {old.handle for old in plan.remove} | {live.handle for live, _ in plan.change}
        handles = {live.handle for live in self.held.live} | {f.handle for f in self.held.foreign}
        if not gone <= handles:
            raise Stale("a rule went while we looked at it")
        written = [*(new for _, new in plan.change), *plan.add]
        chains = {*plan.chains, *(() if remade else self.held.chains)}
        kept = tuple(live for live in self.held.live if live.handle not in gone)
        if remade:
            written = [*(live.rule for live in plan.unchanged), *written]
            kept = ()
            chains = {rule.chain for rule in written}
        return Observed(
            live=(*kept, *(Live(rule, self._next()) for rule in written)),
            foreign=() if remade else self._strangers(gone),
            chains=frozenset(chains),
            table=True,
            sets=plan.sets,
        )

    def _strangers(self, gone: set[int]) -> tuple[Foreign, ...]:
        return tuple(rule for rule in self.held.foreign if rule.handle not in gone)

    def _next(self) -> int:
        self._handle += 1
        return self._handle


class MemoryKernel:
    """Namespaces by name."""

    def __init__(self, spaces: dict[str, MemoryNamespace]) -> None:
        self.spaces = spaces

    def names(self) -> list[str]:
        return sorted(self.spaces)

    def identity(self, netns: str) -> object:
        return id(self.spaces[netns]) if netns in self.spaces else None

    @contextmanager
    def opened(
        self,
        netns: str,
        known: Known | None = None,  # noqa: ARG002 - a look costs nothing
    ) -> Iterator[MemoryNamespace]:
        if netns not in self.spaces:
            raise NoNamespace(f"there is no network namespace {netns}")
        yield self.spaces[netns]

    def links(self, netns: str) -> tuple[object, Surroundings]:
        with self.opened(netns) as space:
            return space.nsid, space.surroundings()

    def glimpse(self, netns: str, before: Glimpse) -> Glimpse:
        with self.opened(netns) as space:
            return Glimpse(
                identity=space.identity,
                generation=None,
                surroundings=space.surroundings(),
                sysctls=space.observe(before.sysctls).sysctls,
            )

    def holds_rules(self, netns: str) -> bool:
        with self.opened(netns) as space:
            return space.held.table

    def resources(self, netns: str) -> dict[str, str]:  # noqa: ARG002 - there are no pods
        return {}

    def afterwards(self, beat: Beat) -> Flushed:  # noqa: ARG002 - there are no flows
        return Flushed()
