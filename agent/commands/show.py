"""`portranger show`: what is live, with what went through it."""

from collections.abc import Sequence

from agent.commands.common import failed, failure_json
from agent.console import Console
from agent.errors import Failure, NoNamespace
from agent.kernel.kinds import Kernel
from rules.model import Live, Observed
from rules.plan import order
from rules.values import Value
from rules.words import live_text, rule_json


class Held(Value):
    """What a namespace holds of ours, and where."""

    observed: Observed
    backend: str
    reason: str

    @property
    def live(self) -> list[Live]:
        return sorted(self.observed.live, key=lambda one: order(one.rule))


def show(netns: Sequence[str], console: Console, *, kernel: Kernel, output: str = "text") -> int:
    found, failures = held(netns, kernel)
    if output == "json":
        namespaces = [_json(name, one) for name, one in found.items()]
        told = [failure_json(failure) for failure in failures]
        console.say_json({"namespaces": namespaces, "problems": told})
    elif found or not failures:
        _say(console, found)
    return failed(console, failures)


def held(netns: Sequence[str], kernel: Kernel) -> tuple[dict[str, Held], list[Failure]]:
    """What these namespaces hold of ours; without names, all that hold something."""
    found: dict[str, Held] = {}
    failures: list[Failure] = []
    for name in netns or kernel.names():
        try:
            with kernel.opened(name) as namespace:
                observed = namespace.observe()
        except NoNamespace as failure:
            failures += [failure] if netns else []  # a name that outlived its namespace
        except Failure as failure:
            failures.append(failure)
        else:
            if observed.table or observed.leftovers or netns:
                found[name] = Held(observed, namespace.backend, namespace.reason)
    return found, failures


def _json(netns: str, one: Held) -> dict[str, object]:
    rules = [{**rule_json(x.rule), "packets": x.packets, "bytes": x.octets} for x in one.live]
    return {"netns": netns, "backend": one.backend, "reason": one.reason, "rules": rules}


def _say(console: Console, found: dict[str, Held]) -> None:
    if not found:
        console.say("Nothing of ours is live. `portranger apply -f FILE` sets it up.")
    for name, one in found.items():
        console.say(f"namespace {name} ({one.backend}: {one.reason})")
        for line in live_text(one.live) or ["nothing of ours"]:
            console.say(f"  {line}")
        if one.observed.leftovers:
            count = len(one.observed.leftovers)
            console.say(
                f"  and {count} left over in the other backend; the next apply removes them"
            )
