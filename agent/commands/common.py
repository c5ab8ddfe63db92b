"""What several commands share: reading manifests, telling problems, and making plans."""

from collections.abc import Sequence

from agent.console import Console
from agent.errors import BadManifest, Failure
from agent.reconcile import Intent, by_namespace, intend, intend_from_nothing
from agent.sources.files import Snapshot
from rules.conflicts import conflicts
from rules.model import Machine
from rules.plan import Plan
from rules.problems import Problem
from rules.render import plan_text, summary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Kernel

OK, CHANGES, BAD_MANIFEST = 0, 2, 65


def reported(snapshot: Snapshot, console: Console) -> list[Problem]:
    """Every problem of what was read, after telling each of them."""
    problems = [*snapshot.problems, *conflicts(snapshot.machines)]
    for line in snapshot.skipped:
        console.warn(line)
    for problem in problems:
        console.warn(str(problem))
    if problems:
        console.warn(
            f"{counted(len(problems), 'problem')} in {counted(snapshot.count, 'manifest')}."
        )
    return problems


def counted(number: int, noun: str) -> str:
    """1 manifest, 2 manifests."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def intents(
    machines: Sequence[Machine], kernel: "Kernel | None"
) -> tuple[list[Intent], list[Failure]]:
    """What to do in each namespace, and which of them could not be looked at."""
    found: list[Intent] = []
    failures: list[Failure] = []
    names: dict[object, str] = {}
    for name, group in by_namespace(machines).items():
        ours = any(machine.masquerade is not None for machine in group)
        if kernel is None:
            found += [intend_from_nothing(name, group)] if ours else []
            continue
        try:
            with kernel.opened(name) as namespace:
                first = names.setdefault(namespace.identity, name)
                if first != name:
                    raise BadManifest(
                        f"{first} and {name} are one and the same namespace",
                        "Write the same name for it in every manifest",
                    )
                found.append(intend(name, group, namespace))
        except BadManifest:
            raise
        except Failure as failure:
            if ours:  # else nobody needs the namespace, and nothing of ours can be in it
                failures.append(failure)
    return found, failures


def say_plans(console: Console, plans: Sequence[Plan]) -> None:
    """Every change, and their sum."""
    for plan in plans:
        console.say_plan(plan_text(plan))
    console.say(summary(plans))


def say_notes(console: Console, machines: Sequence[Machine], found: Sequence[Intent]) -> None:
    """What gets no rule, and why: not ours, or not yet."""
    for machine in machines:
        for other in machine.not_ours:
            name = f"{machine}/{other.interface}" if other.interface else str(machine)
            console.say(f"not ours: {name}: {other.reason}")
    for intent in found:
        for note in intent.desired.notes:
            console.say(f"note in namespace {intent.plan.netns}: {note}")
        for pending in intent.desired.pending:
            where = f"namespace {intent.plan.netns}"
            console.say(f"pending in {where}: {pending.owner}: {pending.reason}")


def failure_json(failure: Failure) -> dict[str, object]:
    """A failure beside the problems of manifests: of no file, but with an exit code."""
    return {
        "problem": failure.what,
        "fix": failure.fix,
        "code": type(failure).__name__,
        "exit_code": failure.exit_code,
    }


def failed(console: Console, failures: Sequence[Failure]) -> int:
    """The exit code after telling what failed; 0 if nothing did."""
    for words in dict.fromkeys(map(str, failures)):  # each once
        console.warn(f"portranger: {words}")
    return failures[0].exit_code if failures else OK
