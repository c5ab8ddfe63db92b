"""Says how a namespace stands and what was done there: in its Standing, to the log, to the metrics,
and to whoever declared what concerns them."""

from collections.abc import Callable, Iterable, Sequence

from agent.kept import Kept
from agent.log import Level, Log
from agent.metrics import Metrics
from agent.reconcile import Outcome
from agent.sources.meaning import Tiding
from agent.status import Change, Drift, State
from rules.model import NODE, Members, Pending
from rules.plan import Plan
from rules.values import replace
from rules.words import few

MOST_TOLD = 20  # ranges in one message
NOBODY: Members = frozenset()

Tell = Callable[[Iterable[object], Tiding, str], None]  # whom it concerns, what, in which words


class Teller:
    """For all namespaces of a node. `calendar` gives seconds of the epoch."""

    def __init__(
        self, log: Log, metrics: Metrics, tell: Tell, calendar: Callable[[], float]
    ) -> None:
        self._log, self._metrics, self._tell, self._calendar = log, metrics, tell, calendar
        self._news = False
        self._unresolved: dict[str, str] = {}  # policies that met a bug, with which

    def news(self) -> bool:
        """Whether some namespace stands otherwise than when this was last asked."""
        news, self._news = self._news, False
        return news

    # ---------------------------------------------------------------------- how it stands

    def stand(self, kept: Kept, state: State, why: str = "", since: float | None = None) -> None:
        known = kept.standing
        if (known.state, known.why) == (state, why):
            return
        self._news = True
        if since is None:
            since = known.since if known.state is state else self._calendar()
        kept.standing = replace(known, state=state, since=since, why=why)
        level: Level = "info" if state in (State.IN_SYNC, State.PENDING) else "warning"
        fields = {"why": why} if why else {}
        self._log.once(("state", kept.netns), level, state.value, netns=kept.netns, **fields)

    def judge(self, kept: Kept, contested: str | None, outdated: tuple[str, float] | None) -> None:
        """How one stands that was looked at with success; contested: why some are refused there;
        outdated: which manifests are invalid, so that their last valid version is in use, and
        since when."""
        if kept.proven is None:
            return
        standing = kept.standing
        if contested is not None:
            self.stand(kept, State.CONFLICT, contested)
        elif standing.refused:
            self.stand(kept, State.CONFLICT, _reasons(standing.refused))
        elif standing.unmanaged:
            self.stand(kept, State.UNMANAGED, unmanaged_reason(kept.netns, standing.unmanaged))
        elif outdated is not None:
            self.stand(kept, State.OUTDATED, *outdated)
        elif standing.pending:
            self.stand(kept, State.PENDING, _reasons(standing.pending))
        else:
            self.stand(kept, State.IN_SYNC)

    def unresolved(self, policy: str, why: str, so: str) -> None:
        """A policy cannot be resolved to addresses because of a bug."""
        if self._unresolved.get(policy) != why:
            self._unresolved[policy] = why
            self._log.error("policy not resolved", policy=policy, why=why, so=so)
            self._tell([policy], Tiding.REJECTED, f"{why}. {so.capitalize()}.")

    def dropped(self, kept: Kept) -> None:
        """Nobody need know of it any more."""
        self._log.settled(("state", kept.netns))
        self._news = True

    # --------------------------------------------------------------------- what was done

    def done(
        self, kept: Kept, outcome: Outcome, unmanaged: tuple[str, ...], next_repair: float
    ) -> None:
        """A look ended well, and left rules of these owners that no valid manifest declares; where
        it undid what others did, the next of these may have to wait for so many seconds."""
        desired = outcome.desired
        new = set(desired.refused) - set(kept.standing.refused)
        kept.standing = replace(
            kept.standing,
            live=outcome.live,
            beside=bool(outcome.surroundings.kubevirt),
            pending=desired.pending,
            refused=desired.refused,
            notes=desired.notes,
            unmanaged=unmanaged,
        )
        for one in sorted(new, key=str):
            event = "partly published" if one.partly else "not published"
            self._log.warning(event, what=one.owner, why=one.reason)
            self._tell([one.owner.rpartition("/")[0], one.owner], Tiding.CONFLICT, one.reason)
        if outcome.drift:
            self._drifted(kept, outcome.drift, next_repair)
        if not outcome.done.empty:
            self._metrics.committed()
            what = _words(outcome.done)
            kept.standing = replace(kept.standing, change=Change(self._calendar(), what))
            self._log.info("applied", netns=kept.netns, changes=what)
            if not outcome.drift:
                self._tell(kept.machines, Tiding.APPLIED, _applied(kept, what))

    def _drifted(self, kept: Kept, changes: int, next_repair: float) -> None:
        process, pid = kept.culprits[-1] if kept.culprits else ("", 0)
        self._metrics.drifted(process)
        drift = Drift(at=self._calendar(), process=process, pid=pid, changes=changes)
        kept.standing = replace(kept.standing, drift=drift, drifts=kept.standing.drifts + 1)
        who = f"{process} (pid {pid})" if process else "somebody"
        message = f"{who} had made {changes} changes to the rules in {kept.netns}: undone"
        self._tell(kept.machines, Tiding.REPAIRED, message)
        self._log.warning(
            "drift repaired",
            netns=kept.netns,
            process=process or "unknown",
            pid=pid,
            changes=changes,
            next_repair_in=round(next_repair, 1),
        )

    def distrusted(self, kept: Kept, why: str) -> None:
        """What was found in the place of a pod is not what it should be."""
        self._metrics.refused()
        self._tell(kept.machines, Tiding.REFUSED, why)


def unmanaged_owners(outcome: Outcome) -> tuple[str, ...]:
    """The owners of rules that stay because an invalid manifest may declare them, or what they
    lead to."""
    desired = outcome.desired
    known = {one.owner for one in desired.rules} | {one.owner for one in desired.pending}
    left = {
        one.rule.owner
        for one in outcome.live
        if one.rule not in desired.rules and one.rule not in desired.kept
    }
    return tuple(sorted((left - known).union(desired.orphaned)))


def unmanaged_reason(netns: str, owners: Sequence[str] = ()) -> str:
    """Why rules are left alone that no valid manifest declares."""
    of = f" of {', '.join(few(owners))}" if owners else ""
    what = "them or their backends" if netns == NODE else "them"
    return f"rules{of} are left as they are: no valid manifest declares {what}"


def _reasons(some: Iterable[Pending]) -> str:
    return "; ".join(few([f"{one.owner}: {one.reason}" for one in some]))


def _applied(kept: Kept, what: str) -> str:
    """What is forwarded now, for whoever declared it."""
    ranges = dict.fromkeys(
        f"{rule.protocol.value} {rule.ports}" if rule.protocol else "everything"
        for rule in sorted((one.rule for one in kept.standing.ranges), key=lambda rule: rule.key)
    )
    shown = [
        *list(ranges)[:MOST_TOLD],
        *([f"{len(ranges)} in all"] if len(ranges) > MOST_TOLD else []),
    ]
    return f"forwards {', '.join(shown) or 'nothing'} in {kept.netns} ({what})"


def _words(plan: Plan) -> str:
    """What a commit did, in a few words."""
    peers = sum(
        len(plan.sets.get(one, NOBODY) ^ plan.sets_before.get(one, NOBODY))
        for one in {*plan.sets, *plan.sets_before}
    )
    counts = {
        "added": len(plan.add),
        "changed": len(plan.change),
        "removed": len(plan.remove) + len(plan.leftovers),
        "address of peers" if peers == 1 else "addresses of peers": peers,
        "setting" if len(plan.sysctls) == 1 else "settings": len(plan.sysctls),
    }
    said = [f"{count} {word}" for word, count in counts.items() if count]
    return ", ".join(said) or f"table: {plan.table.value}"
