"""`portranger plan`: what would change; against nothing, it needs neither root nor a kernel."""

from collections.abc import Sequence

from agent.commands.common import (
    BAD_MANIFEST,
    CHANGES,
    OK,
    failed,
    failure_json,
    intents,
    refusals,
    reported,
    say_notes,
    say_plans,
)
from agent.console import Console
from agent.errors import Usage
from agent.sources.files import load
from rules.manifests import MOST_ENTRIES
from rules.model import NODE
from rules.plan import Plan
from rules.render import plan_json, summary
from rules.words import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Kernel

OUTPUTS = ("text", "json", "nft", "iptables")


def plan(  # noqa: PLR0913 - the options of the command
    paths: Sequence[str],
    console: Console,
    *,
    kernel: "Kernel | None",
    netns: str | None = None,
    most: int = MOST_ENTRIES,
    output: str = "text",
    detailed: bool = False,
    verbose: bool = False,
) -> int:
    snapshot = load(paths, console.stdin, netns=netns, most=most)
    problems = reported(snapshot, console)
    if problems:
        if output == "json":
            console.say_json({**plan_json([], problems), "pending": []})
        return BAD_MANIFEST
    found, failures = intents(snapshot, kernel)
    failures += refusals(found)
    plans = [intent.plan for intent in found]
    if output == "json":
        pending = [
            {"netns": intent.plan.netns, "owner": one.owner, "reason": one.reason}
            for intent in found
            for one in intent.desired.pending
        ]
        told = [*map(failure_json, failures)]
        answer = plan_json(plans, [])
        console.say_json({**answer, "problems": told, "pending": pending})
    elif output in ("nft", "iptables"):
        _say_script(console, plans, output)
    else:
        for intent in found if verbose and kernel else ():
            console.say(f"namespace {intent.plan.netns}: {intent.backend} ({intent.reason})")
        if plans or not failures:
            say_plans(console, plans)
        say_notes(console, snapshot, found)
    if failures:
        return failed(console, failures)
    return CHANGES if detailed and any(not one.empty for one in plans) else OK


def _say_script(console: Console, plans: Sequence[Plan], output: str) -> None:
    from rules import nft_script, xtables  # only where they are asked for

    if len(plans) > 1:
        raise Usage(
            f"-o {output} prints one namespace's script, not"
            f" {', '.join(one.netns for one in plans)}",
            "Give the manifests of one namespace",
        )
    if output == "iptables" and any(one.netns == NODE for one in plans):
        raise Usage("Services are published with nftables only", "Ask for -o nft")
    for one in plans:
        console.say(f"# portranger, namespace {one.netns}. {summary([one])}")
        for change in one.sysctls:
            console.say(f"# sysctl -w {change.name}={change.after}")
        if one.leftovers:
            left = counted(len(one.leftovers), "rule")
            console.say(f"# {left} of ours in the other backend, to be removed by apply")
        script = nft_script.script(one) if output == "nft" else xtables.script(one)
        for line in script.splitlines():
            console.say(line)
