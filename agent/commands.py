"""What each command does, without knowing how its options were read.

A command writes results to one stream and diagnostics to another, and returns its exit code.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TextIO

from agent.errors import Failure, Usage
from agent.reconcile import (
    Intent,
    Kernel,
    by_namespace,
    converge,
    intend,
    intend_from_nothing,
)
from agent.sources.files import Snapshot, load
from rules import nft
from rules.desired import conflicts, desire
from rules.model import Address, Desired, Live, Machine, Protocol, Rule
from rules.plan import Plan, diff, order
from rules.ports import HIGHEST, LOWEST
from rules.problems import Problem
from rules.render import live_text, plan_json, plan_text, rule_json, summary
from rules.trace import explained

OK, CHANGES, BAD_MANIFEST = 0, 2, 65
GLYPH_COLORS = {"+": "\033[32m", "~": "\033[33m", "-": "\033[31m"}


@dataclass(frozen=True, slots=True)
class Console:
    """Where a command reads and writes."""

    out: TextIO
    err: TextIO
    stdin: Callable[[], bytes]
    color: bool = False

    def say(self, line: str) -> None:
        print(line, file=self.out)

    def warn(self, line: str) -> None:
        print(line, file=self.err)

    def say_plan(self, lines: Iterable[str]) -> None:
        for line in lines:
            paint = GLYPH_COLORS.get(line.lstrip()[:1]) if self.color else None
            self.say(f"{paint}{line}\033[0m" if paint else line)


def validate(paths: Sequence[str], console: Console) -> int:
    """Every problem, or that there is none."""
    snapshot = load(paths, console.stdin)
    problems = _report(snapshot, console)
    if problems:
        return BAD_MANIFEST
    console.say(f"{snapshot.count} manifests, all valid")
    return OK


def plan(  # noqa: PLR0913 - the options of the command
    paths: Sequence[str],
    console: Console,
    *,
    kernel: Kernel | None,
    netns: str | None = None,
    output: str = "text",
    detailed: bool = False,
) -> int:
    """What would change; without a kernel, what would be set up in a namespace not there yet."""
    snapshot = load(paths, console.stdin, netns=netns)
    problems = _report(snapshot, console)
    if problems:
        if output == "json":
            _say_json(console, plan_json([], problems))
        return BAD_MANIFEST
    intents, failures = _intents(snapshot.machines, kernel)
    _say_plans(console, [intent.plan for intent in intents], output)
    if output == "text":
        _say_notes(console, snapshot.machines, intents)
    if failures:
        return _fail(console, failures)
    changes = any(not intent.plan.empty for intent in intents)
    return CHANGES if detailed and changes else OK


def apply(
    paths: Sequence[str],
    console: Console,
    *,
    kernel: Kernel,
    netns: str | None = None,
    confirm: Callable[[str], bool],
) -> int:
    """Make the namespaces of these manifests hold what they declare."""
    snapshot = load(paths, console.stdin, netns=netns)
    if _report(snapshot, console):
        console.warn("Nothing was applied: mend the manifests first.")
        return BAD_MANIFEST
    intents, failures = _intents(snapshot.machines, kernel)
    plans = [intent.plan for intent in intents]
    _say_plans(console, plans, "text")
    _say_notes(console, snapshot.machines, intents)
    due = [intent for intent in intents if not intent.plan.empty]
    if due and not confirm("Apply this plan?"):
        raise Failure("nothing was applied", "Answer y, or give --yes")
    for intent in due:
        try:
            with kernel.opened(intent.plan.netns) as namespace:
                converge(intent.plan.netns, intent.desired, namespace)
        except Failure as failure:
            failures.append(failure)
        else:
            console.say(f"Applied in namespace {intent.plan.netns}; the kernel holds it now.")
    return _fail(console, failures) if failures else OK


def show(netns: Sequence[str], console: Console, *, kernel: Kernel, output: str = "text") -> int:
    """What is live, with packets and bytes."""
    failures: list[Failure] = []
    found: dict[str, Sequence[Live]] = {}
    for name in netns or kernel.names():
        try:
            with kernel.opened(name) as namespace:
                observed = namespace.observe()
        except Failure as failure:
            if netns:
                failures.append(failure)
        else:
            if observed.table or netns:
                found[name] = sorted(observed.live, key=lambda live: order(live.rule))
    if output == "json":
        _say_json(console, {"namespaces": [_live_json(*entry) for entry in found.items()]})
    else:
        _say_live(console, found)
    return _fail(console, failures) if failures else OK


def explain(  # noqa: PLR0913 - the options of the command
    what: str,
    console: Console,
    *,
    paths: Sequence[str] = (),
    kernel: Kernel | None = None,
    netns: str | None = None,
    source: str | None = None,
) -> int:
    """Which rule takes a packet where, or why none does."""
    protocol, port = _protocol_and_port(what)
    sender = _address(source) if source else None
    if kernel is not None:
        answers = _live_rules(kernel, netns)
    else:
        snapshot = load(paths, console.stdin, netns=netns)
        if _report(snapshot, console):
            return BAD_MANIFEST
        answers = {
            name: sorted(desire(machines, None).rules, key=order)
            for name, machines in by_namespace(snapshot.machines).items()
        }
        for machine in snapshot.machines:
            for other in machine.not_ours:
                console.say(f"{machine}/{other.interface}: not ours: {other.reason}")
    for name, rules in answers.items():
        console.say(f"namespace {name}")
        for line in explained(rules, protocol, port, sender):
            console.say(f"  {line}")
    return OK


def clear(
    netns: Sequence[str], console: Console, *, kernel: Kernel, confirm: Callable[[str], bool]
) -> int:
    """Remove everything of ours from these namespaces, or from all."""
    due: list[Plan] = []
    failures: list[Failure] = []
    for name in netns or kernel.names():
        try:
            with kernel.opened(name) as namespace:
                removal = diff(name, Desired(), namespace.observe())
        except Failure as failure:
            if netns:
                failures.append(failure)
        else:
            due += [] if removal.empty else [removal]
    for removal in due:
        console.say_plan(plan_text(removal) or [f"namespace {removal.netns}", "  - an empty table"])
    if not due:
        console.say("Nothing to clear.")
    elif not confirm(f"Remove everything of ours from {len(due)} namespaces?"):
        raise Failure("nothing was removed", "Answer y, or give --yes")
    for removal in due:
        try:
            with kernel.opened(removal.netns) as namespace:
                converge(removal.netns, Desired(), namespace)
        except Failure as failure:
            failures.append(failure)
        else:
            console.say(f"Cleared namespace {removal.netns}; its kernel settings stay as they are.")
    return _fail(console, failures) if failures else OK


def _report(snapshot: Snapshot, console: Console) -> list[Problem]:
    problems = [*snapshot.problems, *conflicts(snapshot.machines)]
    for line in snapshot.skipped:
        console.warn(line)
    for problem in problems:
        console.warn(str(problem))
    if problems:
        console.warn(f"{len(problems)} problems in {snapshot.count} manifests")
    return problems


def _intents(
    machines: Sequence[Machine], kernel: Kernel | None
) -> tuple[list[Intent], list[Failure]]:
    intents: list[Intent] = []
    failures: list[Failure] = []
    for name, group in by_namespace(machines).items():
        if all(machine.masquerade is None for machine in group):
            continue
        if kernel is None:
            intents.append(intend_from_nothing(name, group))
            continue
        try:
            with kernel.opened(name) as namespace:
                intents.append(intend(name, group, namespace))
        except Failure as failure:
            failures.append(failure)
    return intents, failures


def _say_plans(console: Console, plans: Sequence[Plan], output: str) -> None:
    if output == "json":
        _say_json(console, plan_json(plans, []))
    elif output == "nft":
        _say_script(console, plans)
    else:
        for one in plans:
            console.say_plan(plan_text(one))
        console.say(summary(plans))


def _say_script(console: Console, plans: Sequence[Plan]) -> None:
    if len(plans) > 1:
        names = ", ".join(one.netns for one in plans)
        raise Usage(
            f"-o nft prints the script of one namespace, and this plan has {names}",
            "Give the manifests of one namespace",
        )
    for one in plans:
        console.say(f"# portranger, namespace {one.netns}; {summary([one])}")
        for change in one.sysctls:
            console.say(f"# sysctl -w {change.name}={change.after}")
        console.say(nft.script(one).rstrip("\n"))


def _say_notes(console: Console, machines: Sequence[Machine], intents: Sequence[Intent]) -> None:
    for machine in machines:
        for other in machine.not_ours:
            console.say(f"not ours: {machine}/{other.interface}: {other.reason}")
    for intent in intents:
        for pending in intent.desired.pending:
            console.say(
                f"pending in namespace {intent.plan.netns}: {pending.owner}: {pending.reason}"
            )


def _say_json(console: Console, value: object) -> None:
    console.say(json.dumps(value, indent=2))


def _fail(console: Console, failures: Sequence[Failure]) -> int:
    for failure in failures:
        console.warn(f"portranger: {failure}")
    return failures[0].exit_code


def _live_json(netns: str, live: Sequence[Live]) -> dict[str, object]:
    return {
        "netns": netns,
        "backend": "nftables",
        "rules": [
            {**rule_json(one.rule), "packets": one.packets, "bytes": one.octets} for one in live
        ],
    }


def _say_live(console: Console, found: dict[str, Sequence[Live]]) -> None:
    if not found:
        console.say("Nothing of ours is live. `portranger apply -f FILE` sets it up.")
    for name, live in found.items():
        console.say(f"namespace {name} (nftables)")
        for line in live_text(live):
            console.say(f"  {line}")


def _live_rules(kernel: Kernel, netns: str | None) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for name in [netns] if netns else kernel.names():
        with kernel.opened(name) as namespace:
            observed = namespace.observe()
        if observed.table or netns:
            found[name] = sorted((live.rule for live in observed.live), key=order)
    return found


def _protocol_and_port(what: str) -> tuple[Protocol, int]:
    protocol, _, port = what.lower().partition("/")
    try:
        number = int(port) if port.isascii() and port.isdecimal() else 0
        if LOWEST <= number <= HIGHEST:
            return Protocol(protocol), number
    except ValueError:
        pass
    raise Usage(f"{what!r} is not a protocol and port", "Write, for example, tcp/8080 or udp/53")


def _address(text: str) -> Address:
    try:
        return ip_address(text)
    except ValueError as error:
        raise Usage(f"{text!r} is not an address", "Write, for example, 192.0.2.7") from error
