"""`portranger show`: what is live, with what went through it."""

from collections.abc import Callable, Iterable, Sequence

from agent.commands.common import failed, failure_json
from agent.commands.screen import painter, size, speaks_unicode
from agent.console import Console
from agent.errors import Failure, NoNamespace
from agent.kernel.kinds import Kernel
from rules.holdings import holdings
from rules.model import Live, Observed
from rules.port_axis import Style
from rules.port_map import port_map
from rules.problems import printable
from rules.values import Value, replace
from rules.words import live_text, rule_json

FINE = Style(free="\u00b7", other="\u2592", bar="\u2588", tick="\u2575")


class Held(Value):
    """What a namespace holds of ours, and where."""

    observed: Observed
    backend: str
    reason: str

    @property
    def live(self) -> list[Live]:
        return sorted(self.observed.live, key=lambda one: one.rule.key)


def show(
    netns: Sequence[str],
    console: Console,
    *,
    kernel: Kernel,
    output: str = "text",
    as_map: bool = False,
) -> int:
    found, failures = held(netns, kernel)
    if output == "json":
        namespaces = [_json(name, one) for name, one in found.items()]
        told = [failure_json(failure) for failure in failures]
        console.say_json({"namespaces": namespaces, "problems": told})
    elif found or not failures:
        _say(console, found, _map_lines if as_map else _rule_lines)
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


def _say(
    console: Console, found: dict[str, Held], lines: Callable[[Held, Console], Iterable[str]]
) -> None:
    if not found:
        console.say("Nothing of ours is live. `portranger apply -f FILE` sets it up.")
    for name, one in found.items():
        console.say(f"namespace {printable(name, 1000)} ({one.backend}: {one.reason})")
        for line in lines(one, console):
            console.say(f"  {line}")
        if one.observed.leftovers:
            count = len(one.observed.leftovers)
            console.say(
                f"  and {count} left over in the other backend; the next apply removes them"
            )


def _rule_lines(one: Held, _: Console) -> Iterable[str]:
    return live_text(one.live) or ["nothing of ours"]


def _map_lines(one: Held, console: Console) -> Iterable[str]:
    """The picture; letters and signs alone tell everything, colours only help."""
    style = replace(
        FINE if speaks_unicode(console.out) else Style(),
        width=size(console.out)[0] - 2,
        paint=painter(console.colored),
    )
    return list(port_map(holdings(one.live), style)) or ["nothing is forwarded"]
