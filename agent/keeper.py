"""Keeps namespaces as their machines want them: knows which to look at, when, and how each stands.

Events only make it look sooner. A look begins with a glimpse: where nothing moved since the last
one, that is all. One namespace that fails, or that somebody fights over, waits for its own next try
and never keeps the others waiting. A look is made by a thread, one at a time for a namespace: who
keeps it from being done, as root there can, has it go on beside the others.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from agent.backoff import FAILURES
from agent.errors import BadManifest, Failure, NoNamespace, NotPermitted, TryAgain
from agent.flushing import Flushing
from agent.kept import Culprit, Kept, Look
from agent.kernel.kinds import Glimpse, Kernel
from agent.kernel.pods import POD, Tampered
from agent.log import Log
from agent.metrics import Metrics
from agent.node_addresses import NodeAddresses
from agent.publisher import Publisher
from agent.reconcile import Outcome, Wish, by_namespace, keep, wish_of, wish_without_laws
from agent.status import Standing, State, moment
from agent.teller import Tell, Teller, unmanaged_owners
from agent.unmanaged import Unmanaged
from agent.workqueue import Inline, Work, Workqueue
from rules.fences import Laws, fenced
from rules.model import NODE, Machine, Surroundings
from rules.node_ports import Allocations
from rules.plan import Table
from rules.policies import NetworkPolicy
from rules.values import replace

TIMED_LOOK = 10.0  # seconds between looks at what sends no events
POD_LOOK = 1.0  # a launcher's socket is there before anybody listens on it
BUDGET = 0.25  # seconds that a look may keep the others waiting
DISTRUST = 60.0  # seconds after one that took longer, in which that namespace is not waited for
LONGEST_REST = 30.0  # seconds without another look after one that took long
REPORT = 10.0  # seconds until a look that is not done counts as failing
MEANWHILE = 0.01  # seconds between two looks at what happens while the node takes long
NODE_WAIT = 5.0  # seconds that what is new waits for a look at the node
NODE_REPORT = 60.0  # as above, at the node, where others may have a hundred thousand rules
NODE_BLOCKED = (
    f"a look at the node is not done after {NODE_REPORT:g} s: a process may hold nftables with "
    "large transactions, or the machine is overloaded; other namespaces are served"
)
BLOCKED = (
    f"a change of its rules is not done after {REPORT:g} s: a process in this namespace may hold "
    "nftables with large transactions, or the machine is overloaded; other namespaces are served"
)
CROWDED = "too many namespaces block changes of their nftables rules"
MOST_CULPRITS = 16
HALF = 1 << 31  # of the numbers that a generation can have

Clock = Callable[[], float]
ROUNDS = 3  # of looks at once: what is found in one namespace is enforced in others
NO_LAWS = Laws()
UNKNOWN = (State.FAILING, State.REFUSED)  # so that what is in a namespace cannot be told


class Keeper:
    """All namespaces that some machine is in, or was in."""

    def __init__(  # noqa: PLR0913 - whom it works for and with
        self,
        kernel: Kernel,
        log: Log,
        metrics: Metrics,
        *,
        publisher: Publisher | None = None,
        clock: Clock = time.monotonic,
        calendar: Clock = time.time,
        tell: Tell = lambda _, __, ___: None,
        workqueue: Workqueue | Inline | None = None,
        node: NodeAddresses | None = None,
    ) -> None:
        self.kernel = kernel
        self._workqueue = workqueue or Inline()
        self._hear: Callable[[], None] = lambda: None
        self._stopping: Callable[[], bool] = lambda: False
        self._survey: Work[bool] | None = None  # of unmanaged namespaces, if it is not done
        self._telling = threading.RLock()  # while what is wanted changes; looks take all or nothing
        self._publisher = publisher
        self._machines: tuple[Machine, ...] = ()
        self._laws, self._filters_stay = NO_LAWS, False
        self._node = node
        # Whether addresses may have changed that policies depend on, and Services.
        self._refence = self._reselect = False
        self._fences = FAILURES  # of finding out what policies say
        self._unfenced = self._unselected = (
            False  # whether that, or what is published, is not known
        )
        self._teller = Teller(log, metrics, tell, calendar)
        self._log, self._metrics = log, metrics
        self._clock, self._calendar = clock, calendar
        self._kept: dict[str, Kept] = {}
        self._names: dict[object, str] = {}  # of namespaces that were looked at
        self._numbers: dict[object, set[str]] = {}  # names again, by what events call them
        self._looked = False
        self._unclaimed_stay = False
        self._contested: Mapping[str, str] = {}
        self._outdated: Mapping[str, tuple[str, float]] = {}
        self._unmanaged = Unmanaged(clock, calendar)
        self.flushing, self._flows_moved = Flushing(log, metrics), False
        self._contested_since = calendar()

    # ---------------------------------------------------------------------- what it is told

    def want(  # noqa: PLR0913 - everything that a source says
        self,
        machines: Iterable[Machine],
        *,
        unclaimed_stay: bool = False,
        unknown: Collection[str] | None = None,
        contested: Mapping[str, str] | None = None,
        outdated: Mapping[str, tuple[str, float]] | None = None,
        laws: Laws | None = NO_LAWS,
    ) -> None:
        """These are all the machines there are; in contested namespaces some are refused, in
        outdated ones some are as an earlier version of their manifest had them. Rules of owners
        who are not among them stay where there may be more that we cannot read. Where laws are not
        known, what is enforced stays, and nobody new is forwarded to."""
        with self._telling:
            self._machines, self._reselect, self._unselected = tuple(machines), True, False
            filters_stay = laws is None
            self._laws = NO_LAWS if laws is None else laws
            self._read_node()
            self._fence()
            if filters_stay != self._filters_stay:
                self._filters_stay = filters_stay
                self.renew()
            if unclaimed_stay != self._unclaimed_stay:
                self._unclaimed_stay = unclaimed_stay
                self.renew()
        if (contested or {}) != self._contested:
            self._contested_since = self._calendar()
        self._contested, self._outdated = contested or {}, outdated or {}
        self._unmanaged.want(unknown)
        for kept in self._kept.values():
            self._judge(kept)

    def _fence(self) -> None:
        """Put the machines into their namespaces, with what policies say of them as everybody is
        known now. Where that cannot be found out all goes on as it was: what was fenced last."""
        self._refence = self._unfenced = False
        try:
            laws = replace(self._laws, node=self._node.known) if self._node else self._laws
            machines = fenced(self._machines, laws, self._links(), self._unresolved)
            wanted = by_namespace(one for one in machines if one.masquerade is not None)
        except Exception as error:  # a bug met in one policy must not stop everything
            self._unfenced = True
            self._fences = self._fences.struck(self._clock())
            self._metrics.failed()
            so = "what was forwarded and enforced before goes on, and nothing new is"
            self._log.once(
                "fences", "error", "policies not understood", why=_unexpected(error), so=so
            )
            return
        self._fences = FAILURES
        self._log.settled("fences")
        with self._telling:
            self._place(wanted)

    def _unresolved(self, policy: NetworkPolicy, error: Exception) -> None:
        """A policy met a bug: it allows nothing, and all others hold."""
        self._metrics.failed()
        why, so = str(_unexpected(error)), "it allows nothing to what it selects"
        self._teller.unresolved(str(policy), why, so)

    def _read_node(self) -> bool:
        """Read the node's addresses if they may have changed and some policy needs them; return
        whether they are others."""
        if self._node is None or not self._node.stale or not self._laws.policies:
            return False
        return self._node.read(self.kernel)

    def _place(self, wanted: Mapping[str, list[Machine]]) -> None:
        """Look where something else is wanted than before, or nothing any more."""
        for netns, group in wanted.items():
            kept = self._known(netns)
            if kept.machines != group or kept.leaving:
                kept.machines, kept.leaving = group, False
                kept.look = kept.urgent = True
                kept.proven = None
        publishing = self._publisher is not None and self._publisher.wanted
        if publishing and self._known(NODE).leaving:
            self._kept[NODE].leaving = False
            self._kept[NODE].look = self._kept[NODE].urgent = True
        self.leave(self._kept.keys() - wanted.keys() - ({NODE} if publishing else set()))

    def _links(self) -> dict[str, Surroundings]:
        """Of the namespaces that were looked at."""
        others = [kept for kept in self._kept.values() if not kept.leaving]
        return {kept.netns: kept.links for kept in others if kept.links is not None}

    def leave(self, names: Iterable[str]) -> None:
        """Nothing of ours is wanted in these namespaces any more."""
        for netns in names:
            kept = self._known(netns, leaving=True)
            if not kept.leaving:
                kept.machines, kept.leaving, kept.proven = [], True, None
                kept.look = kept.urgent = True

    def moved(self, nsid: object, generation: int, culprit: Culprit) -> None:
        """Somebody, maybe we, made this generation of the rules of a namespace."""
        for kept in self._numbered(nsid):
            kept.heard = [*kept.heard[-MOST_CULPRITS:], (generation, culprit)]
            if kept.work is None:
                self._take_heard(kept)
            elif not self._workqueue.threads.include(*culprit):  # else the end of the look tells
                kept.culprits = [*kept.culprits[-MOST_CULPRITS:], culprit]

    def _take_heard(self, kept: Kept) -> None:
        """Have a namespace looked at where somebody changed rules since the last look."""
        heard, kept.heard = kept.heard, []
        for generation, culprit in heard:
            known = kept.proven.generation if kept.proven else None
            if known is not None and (known.number - generation) % (2 * HALF) < HALF:
                continue  # we have looked since
            if not self._workqueue.threads.include(*culprit):
                kept.culprits = [*kept.culprits[-MOST_CULPRITS:], culprit]
            if not kept.look:  # else who never rests could put off our look for ever
                kept.looks = kept.looks.struck(self._clock())
            kept.look = True
            kept.proven = None  # a glimpse would tell no more than that
            wait = kept.repairs.until - self._clock()
            if wait > 0 and kept.culprits and kept.standing.state is not State.FAILING:
                who = "{} (pid {})".format(*kept.culprits[-1])
                due = moment(self._calendar() + wait)
                why = f"{who} keeps changing our rules: the next repair is due at {due}"
                self._teller.stand(kept, State.FAILING, why)

    def relinked(self, nsid: object) -> None:
        """Links, addresses or settings of a namespace changed."""
        if self._node is not None and self._node.concerns(nsid):
            self._node.stale = True
        for kept in self._numbered(nsid):
            if not kept.relinked:
                kept.looks = kept.looks.struck(self._clock())
            kept.look = kept.relinked = True

    def gone(self, nsid: object) -> None:
        """The namespace with that number is no more."""
        for kept in self._numbered(nsid):
            kept.forget()

    def arrived(self) -> None:
        """Names of namespaces may have come or gone."""
        for kept in self._kept.values():
            if self.kernel.identity(kept.netns) != kept.seen:
                kept.forget()

    def look_at_all(self) -> None:
        """Anything may have happened."""
        if self._node is not None:
            self._node.stale = True
        there = [kept for kept in self._kept.values() if kept.identity]
        self._names = {kept.identity: kept.netns for kept in there}
        self._numbers = {}
        for kept in there:
            self._numbers.setdefault(kept.nsid, set()).add(kept.netns)
        for kept in self._kept.values():
            kept.look = True
        if NODE in self._kept:
            self._kept[NODE].proven = None  # who listens there sends no events

    def renew(self) -> None:
        """Look at everything from the ground up, without waiting for anyone's back-off."""
        if self._node is not None:
            self._node.stale = True
        for kept in self._kept.values():
            kept.look = kept.urgent = True
            kept.proven = None

    def use(self, kernel: Kernel) -> None:
        """From now on this is the kernel; what the other backend holds is nobody's drift."""
        self.kernel = kernel
        for kept in self._kept.values():
            kept.desired = None
            kept.void = True

    def _known(self, netns: str, *, leaving: bool = False) -> Kept:
        if netns not in self._kept:
            self._kept[netns] = Kept(netns, self._calendar(), leaving=leaving)
        return self._kept[netns]

    def _numbered(self, nsid: object) -> list[Kept]:
        names = [name for name in list(self._numbers.get(nsid, ())) if name in self._kept]
        found = [self._kept[name] for name in names]
        return [kept for kept in found if kept.identity and kept.nsid == nsid]

    def _drop(self, kept: Kept) -> None:
        """Nobody need know of it any more; names come and go for as long as a node runs."""
        del self._kept[kept.netns]
        self._teller.dropped(kept)

    # ----------------------------------------------------------------------- what it tells

    def news(self) -> bool:
        """Whether some namespace stands otherwise than when this was last asked."""
        moved, self._flows_moved = self._flows_moved, False
        return self._teller.news() or moved

    @property
    def due(self) -> float:
        """When the next look is due, on the monotonic clock."""
        kept = (one for one in self._kept.values() if not (self._unfenced and one.leaving))
        due = min((one.due for one in kept), default=math.inf)
        due = due if self._survey is not None else min(due, self._unmanaged.due)
        return min(due, self._fences.until) if self._unfenced else due

    @property
    def unfound(self) -> frozenset[str]:
        """The namespaces that some machine is in, and that are not there."""
        return frozenset(
            kept.netns for kept in self._kept.values() if not kept.leaving and not kept.identity
        )

    @property
    def leaving(self) -> frozenset[str]:
        """The namespaces that are still to be cleared."""
        return frozenset(kept.netns for kept in self._kept.values() if kept.leaving)

    @property
    def tried(self) -> bool:
        """Whether each was looked at, with whatever success."""
        return all(kept.tried for kept in self._kept.values())

    @property
    def unsettled(self) -> bool:
        """Whether some look is not done, and not reported as such."""
        return any(one.work is not None and one.report < math.inf for one in self._kept.values())

    @property
    def unapplied(self) -> dict[str, str]:
        """The namespaces that do not hold what is wanted there now, each with the reason. One that
        does not exist is not among them."""
        found = {
            kept.netns: _unapplied(kept)
            for kept in self._kept.values()
            if kept.urgent or not kept.applied or kept.standing.state in UNKNOWN
        }
        if self._unfenced:
            found |= dict.fromkeys(self._kept.keys() or {NODE}, "policies cannot be evaluated")
        return found

    @property
    def allocations(self) -> Allocations | None:
        """Who has which node ports; None where it is not for us to give them."""
        return None if self._publisher is None else self._publisher.allocations

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Also of namespaces in which nothing could be accepted, so that none is kept."""
        found = {netns: kept.standing for netns, kept in self._kept.items()}
        for netns in self._contested.keys() - found.keys():
            why = self._contested[netns]
            found[netns] = Standing(
                netns=netns, state=State.CONFLICT, since=self._contested_since, why=why
            )
        found = {one.netns: one for one in self._unmanaged.standings} | found
        return tuple(self.flushing.noted(found[netns]) for netns in sorted(found))

    # ------------------------------------------------------------------------ what it does

    def work(
        self,
        beat: Callable[[], None],
        stopping: Callable[[], bool],
        hear: Callable[[], None] = lambda: None,
    ) -> bool:
        """Look at what is due; whether anything was. Services lead away from what is about to go
        before it does, and to what is new when it is there. What is to be cleared is last: another
        name of the same namespace may be wanted. `hear` takes in the kernel's events."""
        now, self._looked = self._clock(), False
        self._hear, self._stopping = hear, stopping
        self._collect(now)
        if self._unfenced and self._fences.due(now):
            self._fence()
        self._refence |= self._read_node()
        if not stopping():
            self._withdraw(now, beat)
        for _ in range(ROUNDS):
            for kept in self._due(now):
                if not kept.leaving and kept.netns != NODE and not stopping():
                    self._look(kept, beat)
                    beat()
            if not self._refence or not self._laws.policies or stopping():
                break
            self._fence()  # who has which address may be known by now
        if not stopping():
            self._publish(now, beat)
        for kept in self._due(now):
            if kept.leaving and not self._unfenced and not stopping():
                self._look(kept, beat)
                beat()
        try:
            self._flows_moved |= self.flushing.heard(self.kernel.afterwards(beat))
        except Failure as failure:
            self._log.warning("flows not flushed", reason=failure)
        self._survey_unmanaged(now)
        return self._looked

    def _collect(self, now: float) -> None:
        """Settle what looks have come to that took long, and report those that still do."""
        for kept in [one for one in self._kept.values() if one.work is not None]:
            if kept.work is not None and kept.work.done:
                self._looked = True
                self._finish(kept)
            elif now >= kept.report:
                kept.report, kept.tried, kept.applied = math.inf, True, False
                self._metrics.failed()
                why = NODE_BLOCKED if kept.netns == NODE else BLOCKED
                self._teller.stand(kept, State.FAILING, why)

    def _survey_unmanaged(self, now: float) -> None:
        if self._survey is None and self._unmanaged.due <= now:
            task = partial(self._unmanaged.survey, self.kernel, frozenset(self._kept))
            self._survey = self._workqueue.start(task)
            if self._survey is None:
                self._unmanaged.due = now + TIMED_LOOK
            else:
                self._survey.wait(BUDGET)
        if self._survey is not None and self._survey.done:
            work, self._survey = self._survey, None
            try:
                self._looked |= work.result()
                self._log.settled("survey")
            except Exception as error:  # as in a look
                self._metrics.failed()
                self._log.once(
                    "survey", "warning", "unmanaged rules not checked", reason=_unexpected(error)
                )

    def _due(self, now: float) -> list[Kept]:
        """The node is first among equals: nothing is sent on to where nobody forwards it."""
        due = [one for one in self._kept.values() if one.work is None and one.due <= now]
        return sorted(due, key=lambda kept: (kept.netns != NODE, kept.netns))

    def _withdraw(self, now: float, beat: Callable[[], None]) -> None:
        """Look at the node where its Services lead to what is about to go."""
        node = self._kept.get(NODE)
        if node is None or self._publisher is None or not self._reselect:
            return
        if node.leaving or node.desired is None or node.work is not None or self._unselected:
            return
        try:
            less = self._publisher.withdraw(*self._selected_from())
        except Exception:  # it is met again, and reported, when Services are looked at
            return
        if less:
            node.look = node.urgent = True
            node.proven = None
            if node.due <= now:
                self._look(node, beat)

    def _publish(self, now: float, beat: Callable[[], None]) -> None:
        """Look at the node, whose Services lead to what was found in all others."""
        node = self._kept.get(NODE)
        if node is None or node.leaving or self._publisher is None:
            return
        if self._reselect and (node.due <= now or not self._unselected):
            try:
                new = self._select(self._publisher)
            except Exception as error:  # a bug met in one Service must not stop everything
                self._unselected, node.urgent = True, False
                self._failed(node, _unexpected(error))
                return
            self._reselect = self._unselected = False
            if new:
                node.look = node.urgent = True
                node.proven = None
        if node.work is None and node.due <= now and not self._unselected:
            self._look(node, beat)

    def _select(self, publisher: Publisher) -> bool:
        """Whether something else is behind Services than before."""
        return publisher.select(*self._selected_from())

    def _selected_from(self) -> tuple[tuple[Machine, ...], dict[str, Surroundings], set[str]]:
        """The machines, what their namespaces are like, and those of which that is not known."""
        others = [kept for kept in self._kept.values() if not kept.leaving]
        links = self._links()
        unknown = {one.netns for one in others if one.work or one.standing.state in UNKNOWN}
        return self._machines, links, unknown - links.keys()

    def _look(self, kept: Kept, beat: Callable[[], None]) -> None:
        """Begin a look, and wait for it for a moment. The node is waited for longer, so that
        Services lead away from what goes before it does; meanwhile others are repaired. Who is told
        to stop waits for nobody."""
        self._looked = True
        kept.applied &= not kept.urgent
        kept.look = kept.urgent = kept.relinked = kept.void = False
        kept.timer, kept.began = math.inf, self._clock()
        kept.work = self._workqueue.start(partial(self._kept_so, kept))
        on_node = kept.netns == NODE
        kept.report = kept.began + (NODE_REPORT if on_node else REPORT)
        if kept.work is None:
            kept.tried = True
            self._failed(kept, TryAgain(CROWDED, "Find out which processes hold nftables in them"))
            return
        trusted = kept.began >= kept.distrusted
        done = kept.work.wait(BUDGET if trusted else 0.0)
        until = kept.began + NODE_WAIT if on_node and trusted else -math.inf
        while not done and self._clock() < until and not self._stopping():
            beat()
            self._repair_others(beat)
            done = kept.work.wait(MEANWHILE)
        if done:
            self._finish(kept)

    def _repair_others(self, beat: Callable[[], None]) -> None:
        """Look where something happened while the node takes long, as it does where others have a
        hundred thousand rules. What is wanted anew keeps its order, and waits."""
        self._hear()
        for kept in self._due(self._clock()):
            known = kept.desired is not None and not kept.urgent and not kept.leaving
            if known and not self._stopping():
                self._look(kept, beat)

    def _finish(self, kept: Kept) -> None:
        """Settle what a look came to. What changed while it took long has it looked at again: until
        then nothing is proven."""
        work, kept.work = kept.work, None
        now = self._clock()
        took, kept.tried = now - kept.began, True
        if took > (NODE_WAIT if kept.netns == NODE else BUDGET):
            kept.distrusted = now + DISTRUST
        if took > BUDGET:
            kept.rests = now + min(took, LONGEST_REST)
        if work is None:
            return
        if kept.void:
            kept.forget()
            return
        try:
            self._settle(kept, work.result())
        except NoNamespace as failure:
            self._absent(kept, failure)
        except Failure as failure:
            self._failed(kept, failure)
        except Exception as error:  # a bug met in one namespace must not stop the others
            self._failed(kept, _unexpected(error))
        self._take_heard(kept)
        self._metrics.reconciled(took)

    def _settle(self, kept: Kept, look: Look | None) -> None:
        """A look ended well; None: nothing had moved."""
        if look is not None:
            kept.known = look.known
            kept.standing = replace(
                kept.standing, backend=look.backend, reason=look.reason, identity=look.identity
            )
            self._done(kept, look.outcome)
            if kept.netns == NODE and self._publisher is not None:
                self._publisher.looked(look.outcome.generation)
        kept.failures, kept.applied = FAILURES, not kept.urgent
        kept.culprits = []
        self._take_heard(kept)
        if kept.look:  # something happened since it was begun
            self._judge(kept)
            kept.proven = None
            return
        proven = kept.proven
        eventless = proven is None or proven.generation is None or bool(proven.legacy)
        if eventless or kept.standing.refused or (kept.netns == NODE and not kept.leaving):
            kept.timer = self._clock() + TIMED_LOOK  # on the node, others may begin to use iptables
        if kept.netns == NODE and not kept.leaving and self._publisher is not None:
            kept.timer = min(kept.timer, self._publisher.due)
        if kept.leaving and not self._may_be_claimed(kept):
            if self._publisher is not None and kept.netns == self._publisher.place:
                self._publisher.left()
            self._drop(kept)
        else:
            self._judge(kept)

    def _judge(self, kept: Kept) -> None:
        netns = kept.netns
        self._teller.judge(kept, self._contested.get(netns), self._outdated.get(netns))

    def _kept_so(self, kept: Kept) -> Look | None:
        """Look at a namespace and have it as it should be, in whichever thread; None: it is as it
        was when it was last proven."""
        kept.seen = self.kernel.identity(kept.netns)
        if self._is_as_proven(kept):
            return None
        with self.kernel.opened(kept.netns, kept.known) as namespace:
            other = self._same(kept, namespace.identity)
            if other is not None and kept.leaving:
                return None  # somebody wants what is there, under the other name
            if other is not None:
                raise BadManifest(
                    f"{other.netns} and {kept.netns} are one and the same namespace",
                    "Write the same name for it in every manifest",
                )
            before = kept.desired if kept.identity == namespace.identity else None
            kept.identity, kept.nsid = namespace.identity, namespace.nsid
            self._numbers.setdefault(kept.nsid, set()).add(kept.netns)
            with self._telling:
                wish, unclaimed_stay = self._wish(kept), self._may_be_claimed(kept)
                filters_stay = self._filters_stay and not kept.leaving
            outcome = keep(
                kept.netns,
                wish,
                namespace,
                before=before,
                links=kept.links,
                unclaimed_stay=unclaimed_stay,
                filters_stay=filters_stay,
            )
            return Look(
                outcome=outcome,
                identity=namespace.identity,
                known=namespace.known,
                backend=namespace.backend,
                reason=namespace.reason,
            )

    def _is_as_proven(self, kept: Kept) -> bool:
        """By a glimpse; False: only a look can tell."""
        proven = kept.proven
        if proven is None or proven.generation is None:
            return False
        if kept.desired is None or kept.standing.refused:
            return False
        if kept.netns == NODE and self._publisher and self._publisher.due <= self._clock():
            return False  # what others translate there is to be read again
        return self.kernel.glimpse(kept.netns, proven) == proven

    def _wish(self, kept: Kept) -> Wish:
        if kept.netns == NODE and not kept.leaving and self._publisher is not None:
            return partial(self._publisher.wish, unclaimed_stay=self._may_be_claimed(kept))
        if self._publisher is not None and kept.leaving and kept.netns == self._publisher.place:
            return self._publisher.farewell
        wish = wish_without_laws if self._filters_stay else wish_of
        return wish(kept.machines, kept.made)

    def _may_be_claimed(self, kept: Kept) -> bool:
        """Whether what nobody claims there may be what a manifest declares that we cannot read: not
        once we know of everything there where it is from."""
        return self._unclaimed_stay and not kept.sure

    def _same(self, kept: Kept, identity: object) -> Kept | None:
        """Another that is wanted, and is the same namespace by another name; also one whose look is
        not done, before we clear what it is about to make."""
        if kept.leaving:
            for one in list(self._kept.values()):
                if one.work and not one.leaving and one.seen == identity:
                    return one
        other = self._kept.get(self._names.get(identity, ""))
        if other is None or other is kept or other.leaving or other.identity != identity:
            self._names[identity] = kept.netns
            return None
        return other

    def _done(self, kept: Kept, outcome: Outcome) -> None:
        desired = outcome.desired
        if kept.links != outcome.surroundings:
            self._refence = self._reselect = True
        kept.desired, kept.links = desired, outcome.surroundings
        left = unmanaged_owners(outcome) if self._may_be_claimed(kept) else ()
        kept.sure |= not self._unclaimed_stay or outcome.done.table is Table.CREATE
        kept.proven = Glimpse(
            identity=kept.identity,
            generation=outcome.generation,
            legacy=outcome.legacy,
            surroundings=outcome.surroundings,
            sysctls={sysctl.name: sysctl.value for sysctl in desired.sysctls},
        )
        if outcome.drift:
            kept.repairs = kept.repairs.struck(self._clock())
        self._teller.done(kept, outcome, left, max(0.0, kept.repairs.until - self._clock()))

    def _absent(self, kept: Kept, failure: NoNamespace) -> None:
        self._refence = self._reselect = True
        if kept.leaving:
            self._drop(kept)
            return
        kept.forget()
        kept.seen = None  # the next of that name may get the number of this one
        kept.look = kept.urgent = False
        if kept.netns.startswith(POD):
            kept.timer = self._clock() + POD_LOOK
        elif "/" in kept.netns:
            kept.timer = self._clock() + TIMED_LOOK  # a process, or a place that sends no events
        kept.failures, kept.applied = FAILURES, True  # nothing is there that could be otherwise
        kept.standing = replace(kept.standing, live=(), backend="", reason="", identity=None)
        self._teller.stand(kept, State.PENDING, failure.what)

    def _failed(self, kept: Kept, failure: Failure) -> None:
        if kept.leaving and isinstance(failure, NotPermitted):
            self._drop(kept)
            so = f"it is left as it is; portranger clear --netns {kept.netns} would clear it"
            self._log.warning("not cleared", netns=kept.netns, why=failure, so=so)
            return
        self._refence = self._reselect = True
        kept.proven, kept.applied = None, False
        kept.failures = kept.failures.struck(self._clock())
        kept.look = True
        self._metrics.failed()
        if isinstance(failure, Tampered):
            self._teller.distrusted(kept, str(failure))
        if kept.leaving:
            why = f"no manifest is for it any more, and it cannot be cleared yet: {failure}"
            self._teller.stand(kept, State.PENDING, why)
        else:
            state = State.REFUSED if isinstance(failure, Tampered) else State.FAILING
            self._teller.stand(kept, state, str(failure))


def _unapplied(kept: Kept) -> str:
    standing = kept.standing
    if standing.state in UNKNOWN or (kept.leaving and kept.tried and standing.why):
        return f"{standing.state.value}: {standing.why}"
    return "its rules are not removed yet" if kept.leaving else "not checked yet"


def _unexpected(error: Exception) -> Failure:
    return Failure(f"unexpected {type(error).__name__}: {error}")
