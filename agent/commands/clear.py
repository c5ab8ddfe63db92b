"""`portranger clear`: remove everything of ours from namespaces."""

from collections.abc import Callable, Sequence

from agent.commands.beside import undone
from agent.commands.common import failed
from agent.commands.show import held
from agent.config import Config
from agent.console import Console
from agent.errors import Failure
from agent.kernel.kinds import Kernel
from agent.reconcile import converge
from rules.model import Desired
from rules.plan import diff
from rules.render import plan_text
from rules.words import counted


def clear(
    netns: Sequence[str],
    console: Console,
    *,
    kernel: Kernel,
    daemon: Config | None = None,
    confirm: Callable[[str], bool],
) -> int:
    found, failures = held(netns, kernel)
    plans = [diff(name, Desired(), one.observed) for name, one in found.items()]
    due = [plan for plan in plans if not plan.empty]
    for plan in due:
        console.say_plan(plan_text(plan))
    if not due:
        if not failures:
            console.say("Nothing to clear.")
    elif not confirm(f"Remove everything of ours from {counted(len(due), 'namespace')}?"):
        raise Failure("nothing was removed", "Answer y, or give --yes")
    cleared: dict[str, Desired] = {}
    for plan in due:
        try:
            with kernel.opened(plan.netns) as namespace:
                converge(plan.netns, Desired(), namespace)
        except Failure as failure:
            failures.append(failure)
        else:
            cleared[plan.netns] = Desired()
            left = "its other kernel settings" if plan.sysctls else "its kernel settings"
            console.say(f"Cleared namespace {plan.netns}; {left} stay as they are.")
    failures += undone(cleared, kernel, daemon)
    return failed(console, failures)
