"""`portranger show`: what is live, with what went through it."""

from collections.abc import Sequence

from agent.commands.common import failed
from agent.console import Console
from agent.errors import Failure
from agent.kernel.kinds import Kernel
from rules.model import Live, Observed
from rules.plan import order
from rules.render import live_text, rule_json


def show(netns: Sequence[str], console: Console, *, kernel: Kernel, output: str = "text") -> int:
    found, failures = held(netns, kernel)
    live = {name: _sorted(observed) for name, observed in found.items()}
    if output == "json":
        console.say_json({"namespaces": [_json(name, rules) for name, rules in live.items()]})
    else:
        _say(console, live)
    return failed(console, failures)


def held(netns: Sequence[str], kernel: Kernel) -> tuple[dict[str, Observed], list[Failure]]:
    """What these namespaces hold of ours; without names, all that hold something."""
    found: dict[str, Observed] = {}
    failures: list[Failure] = []
    for name in netns or kernel.names():
        try:
            with kernel.opened(name) as namespace:
                observed = namespace.observe()
        except Failure as failure:
            failures.append(failure)
        else:
            if observed.table or netns:
                found[name] = observed
    return found, failures


def _sorted(observed: Observed) -> list[Live]:
    return sorted(observed.live, key=lambda one: order(one.rule))


def _json(netns: str, live: Sequence[Live]) -> dict[str, object]:
    rules = [{**rule_json(one.rule), "packets": one.packets, "bytes": one.octets} for one in live]
    return {"netns": netns, "backend": "nftables", "rules": rules}


def _say(console: Console, live: dict[str, list[Live]]) -> None:
    if not live:
        console.say("Nothing of ours is live. `portranger apply -f FILE` sets it up.")
    for name, rules in live.items():
        console.say(f"namespace {name} (nftables)")
        for line in live_text(rules) or ["nothing of ours"]:
            console.say(f"  {line}")
