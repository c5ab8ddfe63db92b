"""The kernel of this machine, a namespace at a time: what reconcile observes and commits to."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress

from agent.errors import BackendMissing, Failure, NoNamespace, NotPermitted, TryAgain
from agent.kernel import counters, rtnetlink, sysctl
from agent.kernel import netns as namespaces
from agent.kernel.backends import ASKED, AUTO, IPTABLES, NFTABLES, Workers, chosen, legacy_is_live
from agent.kernel.conntrack import is_idle, tracked
from agent.kernel.deferred import AtOnce, Deferred, Flush, identity_of
from agent.kernel.events import Events
from agent.kernel.foreign_filters import filters
from agent.kernel.iptables import Iptables, require
from agent.kernel.kinds import Beat, Flushed, Generation, Glimpse, Known
from agent.kernel.legacy_tables import FORWARDING, known_by
from agent.kernel.nftables import Nftables, generation_of, has_table, kubevirt_in, netlink
from agent.kernel.node import look
from agent.kernel.pods import POD, Pods
from agent.kernel.translations import Found
from agent.kernel.turns import Turns
from rules.flows import forbidden, forgotten, unmade
from rules.foreign_filters import Filter
from rules.load import Tracking
from rules.model import (
    NODE,
    POLICED,
    Address,
    Family,
    Foreign,
    Live,
    Members,
    Observed,
    Peers,
    Rule,
    Surroundings,
)
from rules.plan import Plan, SysctlChange, Table, loopback_settings
from rules.publish import Node
from rules.stale import Due
from rules.values import replace

SERVICES = "Services are always published with nftables"
KUBELET_ROOT = "/var/lib/kubelet"
ROUTE_LOCALNET = ".route_localnet"  # of a link


class LiveNamespace:
    """An opened namespace; closing it lets it die if it must."""

    def __init__(  # noqa: PLR0913 - what a namespace is worked in with
        self,
        netns: str,
        descriptor: int,
        backend: str,
        workers: Workers,
        *,
        later: AtOnce | Deferred,
        turns: Turns,
        nsid: int | None = None,
        known: Known | None = None,
        proving: bool = False,
    ) -> None:
        self.nsid = nsid
        self._proving = proving
        self._netns = netns
        self._descriptor = descriptor
        self._workers, self._later, self._turns = workers, later, turns
        with self._inside():
            why = SERVICES if netns == NODE else ASKED
            self._backends = chosen(backend, descriptor, workers, known, why)
            self.legacy = known_by(FORWARDING)
        self.backend, self.reason = self._backends.name, self._backends.reason
        self._due: list[Plan] = []  # whose flows are to be forgotten after the next whole commit
        self._deleted = False  # something, so that closing takes its time
        self.identity = identity_of(descriptor)

    @property
    def generation(self) -> Generation | None:
        return self._backends.generation

    @property
    def known(self) -> Known | None:
        return self._backends.known

    def surroundings(self) -> Surroundings:
        with self._inside():
            found = rtnetlink.surroundings()
        return replace(found, kubevirt=self._backends.kubevirt)

    def node(self, endpoints: Iterable[Address], *, others: bool) -> Node:
        surroundings = self.surroundings()
        with self._inside():
            foreign = self._workers.foreign.nat(self._descriptor) if others else Found()
            return look(surroundings, endpoints, foreign)

    def filters(self) -> tuple[Filter, ...]:
        with self._inside():
            if self._netns == NODE:
                return self._workers.foreign.filters(self._descriptor)
            return filters()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        other = self._backends.other.observe() if self._backends.other else Observed()
        leftovers: tuple[Live | Foreign, ...] = (*other.live, *other.foreign)
        if other.table and not leftovers:
            leftovers = (Foreign("its tables", 0, "nothing in a place of ours"),)
        found = self._backends.tables.observe()
        with self._inside():
            names = {*sysctls, *loopback_settings(found.live), *loopback_settings(leftovers)}
            return replace(found, sysctls=sysctl.read(names), leftovers=leftovers)

    def recounted(self, live: Sequence[Live]) -> tuple[Live, ...]:
        if self.backend != NFTABLES:
            return tuple(live)  # here every look reads them
        with self._inside():
            return counters.recounted(self._netns, live)

    def tracked(self) -> Tracking:
        with self._inside():
            return tracked()

    def commit(self, plan: Plan) -> None:
        """Settings first: where they may not be made, the rules would lead nowhere. Only loopback
        is routed last, when the rules are there that keep the guest's side from it; and no longer
        routed before these go. What the other
        backend holds goes last: a flow that the first one has translated is left alone by the
        second, so for that moment no port is forwarded twice, and at no moment none."""
        self._backends.require(plan)
        loopback = [one for one in plan.sysctls if one.name.endswith(ROUTE_LOCALNET)]
        late = [one for one in loopback if one.after == "1"]
        with self._inside():
            sysctl.require(one.name for one in late)
        self._set(one for one in plan.sysctls if one not in loopback)
        with suppress(NotPermitted):  # who may not make the setting did not make it
            self._set(one for one in loopback if one not in late)
        self._due.append(plan)  # a stale commit may have done a part of it
        self._later.announce(self._netns, self.identity, plan)
        self._deleted |= not plan.only_adds
        self._backends.tables.commit(plan)
        if isinstance(self._backends.tables, Nftables) and self._backends.tables.advanced:
            self._workers.foreign.committed(*self._backends.tables.advanced)
        if self._proving:
            self._backends.forget()
        if plan.leftovers and self._backends.other:
            gone = Plan(netns=plan.netns, table=Table.DELETE, remove=plan.leftovers)
            self._backends.other.commit(gone)
        self._set(late)
        plans, self._due = self._due, []
        self._forget(lambda: [one for plan in plans for one in forgotten(plan)], plans)

    def _set(self, changes: Iterable[SysctlChange]) -> None:
        with self._inside():
            for change in changes:
                sysctl.write(change.name, change.after)

    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        filters = [rule for rule in rules if rule.chain in POLICED]
        self._forget(lambda: [*unmade(rules, guests), *forbidden(filters, sets)])

    def _forget(self, due: Callable[[], Sequence[Due]], plans: Sequence[Plan] = ()) -> None:
        with self._inside():
            idle = is_idle()
        if idle:
            self._later.idle(self._netns, self.identity)
            return
        flush = Flush(netns=self._netns, identity=self.identity, due=due, plans=tuple(plans))
        self._later.forget(flush, self._descriptor)

    def exclusive(self) -> AbstractContextManager[None]:
        """Others of us wait their turn."""
        return self._turns.taken(self._descriptor)

    def close(self) -> None:
        """Let go of the namespace."""
        self._later.conclude(self._netns, self.identity)
        if self._deleted:
            self._later.close(self._backends.close)
        else:
            self._backends.close()

    def _inside(self) -> AbstractContextManager[None]:
        return _inside(self._descriptor, self._netns)


@contextmanager
def _inside(descriptor: int, netns: str) -> Iterator[None]:
    try:
        with namespaces.inside(descriptor, netns):
            yield
    except InterruptedError as error:
        raise TryAgain(f"cannot look at namespace {netns}: {error.strerror}") from error
    except OSError as error:
        raise Failure(f"cannot work in namespace {netns}: {error}") from error


class LiveKernel:
    """Every namespace of this machine. Who keeps many of them has what can wait done later, and
    calls `afterwards` when the rules of all are made."""

    def __init__(
        self,
        backend: str = AUTO,
        *,
        later: Deferred | None = None,
        events: Events | None = None,
        pods: Pods | None = None,
        proving: bool = False,
    ) -> None:
        """With events, every namespace that is opened is heard of from then on. Those of pods have
        names such as pod:<UID>. With proving, what was committed is always looked at."""
        self._proving = proving
        self._backend = backend
        self.pods = pods or Pods(KUBELET_ROOT)
        self._events = events
        self._workers = Workers()
        self._later = later or AtOnce()
        self._turns = Turns()

    def names(self) -> list[str]:
        """Those that have one, and our own if it has none."""
        named = namespaces.names()
        own = namespaces.identity(NODE)
        return named if own in map(namespaces.identity, named) else [*named, NODE]

    def identity(self, netns: str) -> object:
        if netns.startswith(POD):
            return self.pods.identity(netns.removeprefix(POD))
        return namespaces.identity(netns)

    def found(self, netns: str) -> AbstractContextManager[int]:
        """A descriptor of the namespace; it keeps the namespace alive while it is open."""
        if netns.startswith(POD):
            return self.pods.opened(netns.removeprefix(POD))
        return namespaces.opened(netns)

    @contextmanager
    def opened(self, netns: str, known: Known | None = None) -> Iterator[LiveNamespace]:
        with self.found(netns) as descriptor:
            nsid = self._nsid(descriptor, netns)
            namespace = LiveNamespace(
                netns,
                descriptor,
                NFTABLES if netns == NODE else self._backend,  # shares of flows take nftables
                self._workers,
                later=self._later,
                turns=self._turns,
                nsid=nsid,
                known=known,
                proving=self._proving,
            )
            try:
                yield namespace
            finally:
                namespace.close()

    def holds_rules(self, netns: str) -> bool:
        with self.found(netns) as descriptor, _inside(descriptor, netns):
            with netlink() as asking:
                if has_table(asking):
                    return True
            if self._backend == NFTABLES or netns == NODE or not legacy_is_live():
                return False
            with suppress(BackendMissing):
                return Iptables(descriptor, self._workers.iptables).observe().table
            return False

    def _nsid(self, descriptor: int, netns: str) -> int | None:
        try:
            return self._events.nsid(descriptor) if self._events else None
        except OSError as error:  # a plain file, which `ip netns` makes first and leaves last
            raise NoNamespace(f"there is no network namespace {netns}") from error

    def links(self, netns: str) -> tuple[object, Surroundings]:
        with self.found(netns) as descriptor:
            nsid = self._nsid(descriptor, netns)
            with _inside(descriptor, netns):
                return nsid, rtnetlink.surroundings()

    def glimpse(self, netns: str, before: Glimpse) -> Glimpse:
        with self.found(netns) as descriptor, _inside(descriptor, netns):
            status = os.fstat(descriptor)
            generation, kubevirt = _asked(before)
            return Glimpse(
                identity=(status.st_dev, status.st_ino),
                generation=None if legacy_is_live() else generation,
                legacy=known_by(FORWARDING),
                surroundings=replace(rtnetlink.surroundings(), kubevirt=kubevirt),
                sysctls=sysctl.read(before.sysctls),
            )

    def resources(self, netns: str) -> Mapping[str, str]:
        return self.pods.resources(netns.removeprefix(POD)) if netns.startswith(POD) else {}

    def afterwards(self, beat: Beat = lambda: None) -> Flushed:
        return self._later.flushed(beat, self.found)

    def check(self) -> None:
        """Whether we may do here, in our own namespace, what is to be done in others. Nothing is
        left behind: merely to read the legacy tables would make the kernel register them."""
        with namespaces.opened(NODE) as descriptor, namespaces.inside(descriptor, "of our own"):
            if self._backend == IPTABLES:
                require()
                return
            try:
                tables = Nftables(descriptor, self._workers.libnftables)
            except BackendMissing:
                if self._backend == AUTO:  # a namespace with legacy rules can still be served
                    return
                raise
            try:
                tables.observe()
            finally:
                self._later.close(tables.close)

    def close(self) -> None:
        """End the worker processes, if any were needed."""
        self._workers.stop()


def _asked(before: Glimpse) -> tuple[Generation | None, frozenset[Family]]:
    """What nftables tells of the namespace this thread is in."""
    try:
        with netlink() as asking:
            generation = generation_of(asking)
            if generation == before.generation:
                return generation, before.surroundings.kubevirt
            return generation, kubevirt_in(asking)
    except OSError:
        return None, frozenset()
