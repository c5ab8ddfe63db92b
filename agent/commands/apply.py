"""`portranger apply`: make the namespaces of some manifests hold what these declare."""

from collections.abc import Callable, Sequence

from agent.commands.beside import undone
from agent.commands.common import (
    BAD_MANIFEST,
    failed,
    intents,
    refusals,
    reported,
    say_notes,
    say_plans,
)
from agent.config import Config
from agent.console import Console
from agent.errors import Failure, TryAgain
from agent.kernel.kinds import Kernel
from agent.reconcile import Intent, converge
from agent.sources.files import load
from rules.manifests import MOST_ENTRIES
from rules.model import NODE, Desired


def apply(  # noqa: PLR0913 - the options of the command
    paths: Sequence[str],
    console: Console,
    *,
    kernel: Kernel,
    netns: str | None = None,
    most: int = MOST_ENTRIES,
    daemon: Config | None = None,
    confirm: Callable[[str], bool],
) -> int:
    snapshot = load(paths, console.stdin, netns=netns, most=most)
    if reported(snapshot, console):
        console.warn("Nothing was applied: mend the manifests first.")
        return BAD_MANIFEST
    found, failures = intents(snapshot, kernel)
    failures += refusals(found)
    if found or not failures:
        say_plans(console, [intent.plan for intent in found])
    say_notes(console, snapshot, found)
    due = [intent for intent in found if not intent.plan.empty]
    if due and not confirm("Apply this plan?"):
        raise Failure("nothing was applied", "Answer y, or give --yes")
    applied: dict[str, Desired] = {}
    for intent in sorted(due, key=_turn):
        name = intent.plan.netns
        try:
            with kernel.opened(name) as namespace:
                converge(name, intent.desired, namespace)
        except Failure as failure:
            failures.append(failure)
        else:
            applied[name] = intent.desired
            console.say(f"Applied in namespace {name}: the kernel holds it now.")
    failures += undone(applied, kernel, daemon)
    if any(intent.desired.pending for intent in found):
        failures.append(
            TryAgain("some of it is pending", "Apply again when what it waits for is there")
        )
    return failed(console, failures)


def _turn(intent: Intent) -> int:
    """Services lead to what is there, and not to what is about to go."""
    if intent.plan.netns == NODE:
        return 1
    return 2 if intent.plan.remove and not intent.plan.add else 0
