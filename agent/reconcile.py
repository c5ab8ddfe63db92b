"""One pass over one namespace: look, plan, commit, look again.

Nothing is remembered between passes. Whatever was left behind by a crash, a stranger or an older
version is a difference like any other.
"""

from collections.abc import Iterable, Sequence

from agent.errors import Failure, Stale, TryAgain
from rules.desired import desire
from rules.model import Desired, Machine, Observed
from rules.plan import Plan, diff
from rules.render import plan_text
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Namespace

ATTEMPTS = 5


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


def intend(netns: str, machines: Sequence[Machine], namespace: "Namespace") -> Intent:
    """What should change, without changing it."""
    desired = desire(machines, namespace.surroundings())
    plan = diff(netns, desired, _observe(namespace, desired))
    return Intent(plan, desired, namespace.backend, namespace.reason)


def intend_from_nothing(netns: str, machines: Sequence[Machine]) -> Intent:
    """What would be done in a namespace that is not there to ask."""
    desired = desire(machines, None)
    return Intent(diff(netns, desired, Observed()), desired)


def converge(netns: str, desired: Desired, namespace: "Namespace") -> Plan:
    """Make it so, and prove it; returns what the last commit did.

    A stranger who edits between our look and our commit makes the commit fail whole, and we look
    again: a bounded number of times.
    """
    with namespace.exclusive():
        return _converge(netns, desired, namespace)


def _converge(netns: str, desired: Desired, namespace: "Namespace") -> Plan:
    done = Plan(netns=netns)
    for _ in range(ATTEMPTS):
        plan = diff(netns, desired, _observe(namespace, desired))
        if plan.empty:
            return done
        try:
            namespace.commit(plan)
        except Stale:
            continue
        done = plan
    left = diff(netns, desired, _observe(namespace, desired))
    if left.empty:
        return done
    raise _unconverged(left, done)


def _observe(namespace: "Namespace", desired: Desired) -> Observed:
    return namespace.observe([sysctl.name for sysctl in desired.sysctls])


def _unconverged(left: Plan, done: Plan) -> Failure:
    what = f"namespace {left.netns} did not become as planned after {ATTEMPTS} attempts"
    if done.empty:
        return TryAgain(f"{what}: somebody else keeps changing our table", "Stop them, then retry")
    lines = "; ".join(line.strip() for line in plan_text(left)[1:])
    return Failure(f"{what}: {lines}", "Somebody else undoes it, or this kernel differs")
