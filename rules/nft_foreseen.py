"""What there is after a plan was carried out, known without a look: if nobody else did anything, as
the generation of the ruleset tells."""

from collections.abc import Iterable

from rules import nft_sets
from rules.model import Live, Lookup, Observed, Rule
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    DropMap,
    DropRule,
    DropTable,
    Erase,
    Fill,
    MakeChain,
    MakeTable,
    Step,
)
from rules.plan import Plan, Table
from rules.shapes import Lives, lives, lookup_of
from rules.values import replace


def are_elements(plan: Plan) -> bool:
    """Whether it only puts elements into maps, or takes them out: nothing that it names would tell
    the kernel that somebody has changed them since we looked."""
    if plan.table is not Table.KEEP or plan.chains or plan.maps != plan.mapped.keys():
        return False
    olds, news = (*plan.remove, *(live for live, _ in plan.change)), _new(plan)
    return (
        bool(olds or news)
        and all(isinstance(old, Live) and not old.handle for old in olds)
        and all(lookup_of(rule) in plan.maps for rule in news)
    )


def is_for(plan: Plan, observed: Observed) -> bool:
    """Whether it takes away what is there, and adds what is not."""
    here = lives(observed).by_rule
    if not here.keys().isdisjoint(_new(plan)):
        return False
    if has_copies(observed):
        there = {(live.rule, live.handle) for live in observed.live}
        return all((old.rule, old.handle) in there for old in _gone(plan))
    return all(old.rule in here and here[old.rule].handle == old.handle for old in _gone(plan))


def has_copies(observed: Observed) -> bool:
    """Whether some rule is there twice."""
    return len(lives(observed).by_rule) < len(observed.live)


def carried_out(  # noqa: PLR0912 - a case for each step
    steps: Iterable[Step], observed: Observed, handles: Iterable[int] = ()
) -> Observed:
    """What there is after these steps; the kernel gave the rules among them these handles."""
    steps, given = list(steps), iter(handles)
    here = lives(observed)
    chains, mapped = set(observed.chains), dict(observed.mapped or {})
    dropped: set[int] = set()
    spread: set[Lookup | None] = set()
    gone: list[Live] = []
    new: list[Live] = []
    for step in steps:
        match step:
            case DropTable():
                here, observed = Lives(), Observed(mapped={})
                chains, mapped = set(), {}
            case MakeChain(chain):
                chains.add(chain)
            case DropRule(_, handle):
                dropped.add(handle)
            case DropMap(lookup):
                spread.add(lookup)
                mapped.pop(lookup, None)
            case Erase(_, rules, False):
                gone += [here.by_rule[rule] for rule in rules]
            case Fill(_, rules, False):
                new += [Live(rule, 0) for rule in rules]
            case AddRule(rule):
                new.append(Live(rule, next(given)))
            case AddLookup(lookup):
                mapped[lookup] = next(given)
            case AddBridge():
                next(given, 0)  # it goes with its chain
            case MakeTable():
                observed = replace(observed, table=True)
            case _:  # what it does is told by other steps, or by nft_sets
                pass
    if dropped or spread:
        gone += [one for one in here if one.handle in dropped]
        gone += [one for one in here if not one.handle and lookup_of(one.rule) in spread]
    return replace(
        observed,
        live=here.changed(gone, new),
        foreign=(),
        chains=frozenset(chains),
        mapped=mapped,
        sets=nft_sets.carried_out(steps, observed.sets),
    )


def _gone(plan: Plan) -> list[Live]:
    olds = (*plan.remove, *(live for live, _ in plan.change))
    return [old for old in olds if isinstance(old, Live)]


def _new(plan: Plan) -> list[Rule]:
    return [*(rule for _, rule in plan.change), *plan.add]
