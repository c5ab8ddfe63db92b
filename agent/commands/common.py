"""What several commands share: reading manifests, telling problems, and making plans."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from agent.console import Console
from agent.errors import BadManifest, Failure, NoNamespace
from agent.reconcile import Intent, by_namespace, intend, intend_from_nothing, wish_of
from agent.sources.files import Snapshot
from rules.conflicts import conflicts
from rules.desired import desire
from rules.fences import fenced, idle, unprotected
from rules.model import NODE, Address, Desired, Surroundings
from rules.places import node_addresses
from rules.plan import Plan
from rules.problems import Problem
from rules.render import plan_text, summary
from rules.selection import select
from rules.values import replace
from rules.words import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Kernel, Namespace

OK, CHANGES, BAD_MANIFEST = 0, 2, 65


def reported(snapshot: Snapshot, console: Console) -> list[Problem]:
    """Every problem of what was read, after telling each of them."""
    problems = [*snapshot.problems, *conflicts(snapshot.machines)]
    for line in snapshot.skipped:
        console.warn(line)
    for problem in problems:
        console.warn(str(problem))
    if not snapshot.count and not problems:
        console.warn("portranger: there is nothing of a kind that is read in what was given.")
    if problems:
        console.warn(
            f"{counted(len(problems), 'problem')} in {counted(snapshot.count, 'manifest')}."
        )
    return problems


def intents(
    snapshot: Snapshot, kernel: "Kernel | None", node: str = NODE
) -> tuple[list[Intent], list[Failure]]:
    """What to do in each namespace, and which of them could not be looked at. The node's addresses
    are those of the namespace `node`."""
    found: list[Intent] = []
    failures: list[Failure] = []
    names: dict[object, str] = {}
    links: dict[str, Surroundings] = {}
    unknown: set[str] = set()
    laws = replace(snapshot.laws, node=_node_addresses(snapshot, kernel, node))
    fences = fenced(snapshot.machines, laws, _known_links(snapshot, kernel))
    for name, group in by_namespace(fences).items():
        ours = any(machine.masquerade is not None for machine in group)
        if kernel is None:
            found += [intend_from_nothing(name, desire(group, None))] if ours else []
            continue
        try:
            with kernel.opened(name) as namespace:
                first = names.setdefault(namespace.identity, name)
                if first != name:
                    raise BadManifest(
                        f"{first} and {name} are one and the same namespace",
                        "Write the same name for it in every manifest",
                    )
                found.append(intend(name, wish_of(group), namespace))
                links[name] = namespace.surroundings()
        except BadManifest:
            raise
        except Failure as failure:
            unknown |= set() if isinstance(failure, NoNamespace) else {name}
            if ours:  # else nobody needs the namespace, and nothing of ours can be in it
                failures.append(failure)
    if snapshot.services:
        found.append(on_the_node(snapshot, kernel, links, unknown))
    return found, failures


def _node_addresses(
    snapshot: Snapshot, kernel: "Kernel | None", node: str
) -> frozenset[Address] | None:
    """With which policies always allow traffic, where there are any policies. In a plan against
    nothing none is known: a pipeline plans alike wherever it runs."""
    if not snapshot.laws.policies:
        return None
    if kernel is None:
        return frozenset()
    from agent.config import load  # whoever has no policies does not need it

    if not load(None).policy.allow_node:
        return None
    _, links = kernel.links(node)
    return node_addresses(links)


def _known_links(snapshot: Snapshot, kernel: "Kernel | None") -> dict[str, Surroundings]:
    """Of the machines' namespaces, where policies need them: peers are known by their addresses."""
    found: dict[str, Surroundings] = {}
    if kernel is None or not snapshot.laws.policies:
        return found
    for name in by_namespace(snapshot.machines):
        with (
            suppress(Failure),
            kernel.opened(name) as namespace,
        ):  # which is told where it is needed
            found[name] = namespace.surroundings()
    return found


def on_the_node(
    snapshot: Snapshot,
    kernel: "Kernel | None",
    links: Mapping[str, Surroundings] | None = None,
    unknown: Collection[str] = (),
) -> Intent:
    """What to do there; links are those of the machines' namespaces."""
    from agent.config import Config, load  # whoever has no Services needs neither
    from agent.publisher import published, published_from_nothing, publishing

    selection = select(snapshot.services, snapshot.machines, links if kernel else None, unknown)
    # A pipeline plans alike wherever it runs, and by whomever.
    config = Config() if kernel is None else load(None)
    how, bands = publishing(replace(config, source="files"))
    how = replace(how, reserve=False)  # nobody would give the ports back: only the daemon knows its
    if kernel is None:
        return intend_from_nothing(NODE, published_from_nothing(selection, how, bands))

    def wish(here: "Namespace", _: Surroundings) -> Desired:
        return published(selection, here, how, bands).desired

    with kernel.opened(NODE) as namespace:
        return intend(NODE, wish, namespace)


def say_plans(console: Console, plans: Sequence[Plan]) -> None:
    """Every change, and their sum."""
    for plan in plans:
        console.say_plan(plan_text(plan))
    console.say(summary(plans))


def say_notes(console: Console, snapshot: Snapshot, found: Sequence[Intent]) -> None:
    """What gets no rule, and why: not ours, or not yet."""
    machines, laws = snapshot.machines, snapshot.laws
    for machine in machines:
        for other in machine.not_ours:
            name = f"{machine}/{other.interface}" if other.interface else str(machine)
            console.say(f"not ours: {name}: {other.reason}")
    for line in (*unprotected(machines, laws), *idle(machines, laws)):
        console.say(f"no effect: {line}")
    for intent in found:
        for note in intent.desired.notes:
            console.say(f"note in namespace {intent.plan.netns}: {note}")
        for pending in intent.desired.pending:
            where = f"namespace {intent.plan.netns}"
            stay = [
                live
                for live in intent.plan.unchanged
                if live.rule.owner == pending.owner and live.rule not in intent.desired.rules
            ]
            more = f"; {counted(len(stay), 'rule')} of before stay until then" if stay else ""
            console.say(f"pending in {where}: {pending.owner}: {pending.reason}{more}")


def refusals(found: Sequence[Intent]) -> list[Failure]:
    """What cannot be published, or not all of it, each as a failure; the rest goes on."""
    return [
        Failure(
            f"{one.owner} is {'partly published' if one.partly else 'refused'}: "
            + one.reason.removesuffix(".")
        )
        for intent in found
        for one in intent.desired.refused
    ]


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
