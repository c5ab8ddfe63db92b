"""One pass over one namespace: look, plan, commit, look again.

Nothing is remembered between passes. Whatever was left behind by a crash, a stranger or an older
version is a difference like any other.
"""

from collections.abc import Callable, Iterable, Sequence

from agent.errors import Failure, Stale, TryAgain
from rules.desired import Made, desire, label
from rules.flattened import flattened
from rules.flows import TRANSLATING
from rules.foreign_filters import flows, warnings
from rules.model import Desired, Live, Machine, Observed, Pending, Surroundings
from rules.plan import Plan, diff
from rules.render import changes, plan_text
from rules.shapes import Lives, lives
from rules.values import Value, replace
from rules.words import few

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Generation, Namespace

ATTEMPTS = 5
UNLAWFUL = "policies are not known, and without a fence no port of it is opened"
FENCES_STAY = "policies are not known: what was enforced before stays"


# What a namespace should hold, given what it is like.
Wish = Callable[["Namespace", Surroundings], Desired]


def wish_of(machines: Sequence[Machine], made: Made | None = None) -> Wish:
    """Of machines."""
    return lambda _, surroundings: desire(machines, surroundings, made)


def wish_without_laws(machines: Sequence[Machine], made: Made | None = None) -> Wish:
    """Of machines while it is not known what policies say of them. Who has rules goes on, behind
    the fence that is there; who has none gets none: it may be that nobody is to reach it."""

    def wish(namespace: "Namespace", surroundings: Surroundings) -> Desired:
        served = {rule.owner for rule in lives(namespace.observe()).by_rule}
        old = [one for one in machines if label(one.owner) in served]
        new = {label(one.owner) for one in machines} - served
        desired = desire(old, surroundings, made)
        return replace(
            desired,
            pending=(*desired.pending, *(Pending(one, UNLAWFUL) for one in sorted(new))),
            notes=(*desired.notes, FENCES_STAY),
        )

    return wish


class Intent(Value):
    """What to do in a namespace, and towards what."""

    plan: Plan
    desired: Desired
    backend: str = ""
    reason: str = ""


def by_namespace(machines: Iterable[Machine]) -> dict[str, list[Machine]]:
    """The machines of each namespace, in order of its name."""
    found: dict[str, list[Machine]] = {}
    for machine in sorted(machines, key=lambda machine: (machine.netns, machine.owner)):
        found.setdefault(machine.netns, []).append(machine)
    return found


def intend(netns: str, wish: Wish, namespace: "Namespace") -> Intent:
    """What should change, without changing it."""
    desired = _wished(wish, namespace, namespace.surroundings())
    plan = diff(netns, desired, _observe(namespace, desired))
    return Intent(plan, desired, namespace.backend, namespace.reason)


def _wished(wish: Wish, namespace: "Namespace", surroundings: Surroundings) -> Desired:
    """What the namespace should hold, as its tables can hold it: iptables has no sets. With a note
    of each filter of others that may drop what is forwarded."""
    desired = wish(namespace, surroundings)
    told = _warned(namespace, desired, surroundings) if desired.rules else ()
    desired = replace(desired, notes=(*desired.notes, *told)) if told else desired
    return flattened(desired) if namespace.backend == "iptables" else desired


def _warned(
    namespace: "Namespace", desired: Desired, surroundings: Surroundings
) -> tuple[str, ...]:
    """A note is not worth a rule: where somebody wrote filters that cannot be made out, all else
    is done."""
    try:
        found = namespace.filters()
        return tuple(warnings(found, flows(desired.rules, surroundings))) if found else ()
    except Exception as error:  # a bug met in what others wrote must not stop us
        return (f"filters of others not checked: unexpected {type(error).__name__}: {error}",)


def intend_from_nothing(netns: str, desired: Desired) -> Intent:
    """What would be done in a namespace that is not there to ask."""
    return Intent(diff(netns, desired, Observed(mapped={})), desired)


def converge(netns: str, desired: Desired, namespace: "Namespace") -> Plan:
    """Make it so, and prove it; returns what the last commit did.

    A stranger who edits between our look and our commit makes the commit fail whole, and we look
    again: a bounded number of times.
    """
    with namespace.exclusive():
        return _converge(netns, desired, namespace, _observe(namespace, desired))[0]


def stands(netns: str, desired: Desired, namespace: "Namespace") -> bool:
    """Whether it is so."""
    return diff(netns, desired, _observe(namespace, desired)).empty


class Outcome(Value, kw_only=True):
    """What keeping a namespace came to."""

    desired: Desired
    done: Plan
    drift: int = 0  # changes that others had made since it was last as desired
    live: tuple[Live, ...] = ()
    generation: "Generation | None" = None  # of the rules when they were found as desired
    legacy: bytes = b""  # by which legacy filters of others were known then
    surroundings: Surroundings


def keep(  # noqa: PLR0913 - what is wanted, and what was
    netns: str,
    wish: Wish,
    namespace: "Namespace",
    *,
    before: Desired | None,
    links: Surroundings | None = None,
    unclaimed_stay: bool = False,
    filters_stay: bool = False,
) -> Outcome:
    """Make a namespace hold what is wished for there, and tell what others had done to it since it
    held what was wanted before and had these links; None: this is the first look of this run.

    On the first look, and where rules were missing, flows may be open that no rule stands for."""
    with namespace.exclusive():
        surroundings = namespace.surroundings()
        desired = _wished(wish, namespace, surroundings)
        desired = replace(
            desired,
            unclaimed_stay=unclaimed_stay or desired.unclaimed_stay,
            filters_stay=filters_stay,
        )
        found = _observe(namespace, desired)
        if isinstance(found.live, Lives):
            found.live.recognise(desired.rules)
        done, left = _converge(netns, desired, namespace, found)
        drift = 0
        if before is not None:
            drift = _drift(netns, before, found, settings=links == surroundings)
        if before is None or drift:
            waiting = (one.rule for one in left.live if one.rule.chain in TRANSLATING)
            namespace.sweep({*desired.rules, *waiting}, desired.sets, desired.guests)
        return Outcome(
            desired=desired,
            done=done,
            drift=drift,
            live=left.live,
            generation=namespace.generation,
            legacy=namespace.legacy,
            surroundings=surroundings,
        )


def _drift(netns: str, before: Desired, found: Observed, *, settings: bool) -> int:
    """How much of what was there before is not there now. Settings come and go with links: where
    these changed, they tell nothing of what somebody did."""
    looked_at = {one for one in before.sysctls if settings and one.name in found.sysctls}
    return changes(diff(netns, replace(before, sysctls=frozenset(looked_at)), found))


def _converge(
    netns: str, desired: Desired, namespace: "Namespace", observed: Observed
) -> tuple[Plan, Observed]:
    """What the last commit did, and what there is now."""
    done = Plan(netns=netns)
    for _ in range(ATTEMPTS):
        plan = diff(netns, desired, observed)
        if plan.empty:
            return done, observed
        try:
            namespace.commit(plan)
            done = plan
        except Stale:
            pass
        observed = _observe(namespace, desired)
    left = diff(netns, desired, observed)
    if left.empty:
        return done, observed
    raise _unconverged(left, done)


def _observe(namespace: "Namespace", desired: Desired) -> Observed:
    return namespace.observe([sysctl.name for sysctl in desired.sysctls])


def _unconverged(left: Plan, done: Plan) -> Failure:
    what = f"namespace {left.netns} did not become as planned after {ATTEMPTS} attempts"
    if done.empty:
        return TryAgain(f"{what}: somebody else keeps changing our table", "Stop them, then retry")
    lines = "; ".join(few([line.strip() for line in plan_text(left)[1:]]))
    return Failure(f"{what}: {lines}", "Somebody else undoes it, or this kernel differs")
