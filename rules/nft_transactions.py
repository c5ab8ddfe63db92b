"""A plan as transactions, so that at every moment each port that is declared before and after is
served: by rules, or by a map that the running transaction does not touch.

A transaction swaps all rules at once. Maps and sets are not swapped with them: a packet can meet
old rules and no longer the elements that they ask for, or new rules and not yet theirs. So what is
to take packets over is there first, then rules change, and what nobody asks for any more goes last,
when the packets that were on their way have passed. A range that is cut, grown or led elsewhere
keeps some of its place in the map, where its element must go and come back: meanwhile a plain rule
serves it, in a chain of its own before ours, which is a bridge that goes in the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rules import nft_sets
from rules.flattened import each
from rules.model import (
    FILTERS,
    Chain,
    Lookup,
    Members,
    Peers,
    Rule,
)
from rules.nft_changes import (
    MOST_BRIDGES,
    MOST_SHIFTED,
    NAT_CHAINS,
    chains_of,
    count_shifted,
    maps_of,
    shaped,
    unwanted,
    written_by,
)
from rules.nft_edit import Edit
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    DropBridge,
    DropRule,
    DropTable,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    Step,
)
from rules.plan import Plan, Table


def transactions(plan: Plan) -> list[list[Step]]:
    """The steps of each; none where the rules need nothing done."""
    if plan.table is Table.DELETE:
        return _deleted_table(plan)
    if plan.table is Table.REMAKE:
        return _anew(plan)
    if plan.table is Table.CREATE:
        return _created(plan)
    return Edit(plan).transactions()


def _created(plan: Plan) -> list[list[Step]]:
    """One transaction; two where something is guarded: what others sent on so far goes on until
    our maps and sets are filled."""
    rules, elements = shaped(plan, written_by(plan))
    made = [MakeTable(exclusive=True), *_filled(plan, plan.chains, elements)]
    written = _in_order(rules, plan.gathering)
    if any(rule.guards for rule in rules) and (elements or plan.sets):
        return [made, written]
    return [[*made, *written]]


def _anew(plan: Plan) -> list[list[Step]]:
    """All of it as plain rules too, as long as there is not all of it in ours.

    Before our chains of the old table, where that has maps or sets: with it they go at once, while
    packets are looked up. Then behind ours: packets come there who meet neither the old chain any
    more nor the new one yet. Ours follow where they have maps or sets, when those are filled: since
    nft_set_rbtree has an array (Linux 7.0, 6.18.y) those that a transaction makes are empty to
    packets until its end, when its rules are long in use.
    """
    written = written_by(plan)
    rules, elements = shaped(plan, written)
    chains = chains_of(written)
    made: list[Step] = [DropTable(), MakeTable(exclusive=False)]
    made += _filled(plan, chains, elements)
    ours = _in_order(rules, plan.gathering)
    if _flat_size(written, plan.sets) > MOST_BRIDGES or count_shifted(written) > MOST_SHIFTED:
        return [[*made, *ours]]
    flat = _by_turn(each(written, plan.sets))
    bridge = [*_bridge(flat, behind=True)]
    drop: list[Step] = [DropBridge(chain, behind=True) for chain in chains_of(flat)]
    parts = [[*made, *bridge], ours] if elements or plan.sets else [[*made, *bridge, *ours]]
    parts += [drop] if drop else []
    olds = [*plan.unchanged, *unwanted(plan)]
    if all(live.handle and live.rule.peers is None for live in olds):
        return parts
    before = [*_bridge([rule for rule in flat if rule.chain in NAT_CHAINS], behind=False)]
    asking = (live.rule for live in olds if live.rule.peers is not None)
    before += [AddRule(rule, first=True) for rule in each(asking, plan.sets_before)]
    return [before, *parts] if before else parts


def is_optional(part: Sequence[Step], later: Sequence[Sequence[Step]]) -> bool:
    """Whether a transaction is only for packets that are on their way, in a table that goes, and of
    which nobody knows what it would take."""
    return DropTable() not in part and any(DropTable() in one for one in later)


def _deleted_table(plan: Plan) -> list[list[Step]]:
    """Filters first, where they ask sets: what is let pass by them is let pass without them."""
    olds = [old for old in unwanted(plan) if old.rule.chain in FILTERS]
    if plan.unsound or not any(old.rule.peers for old in olds):
        return [[DropTable()]]
    return [[DropRule(old.rule.chain.value, old.handle) for old in olds], [DropTable()]]


def _bridge(rules: Iterable[Rule], *, behind: bool) -> Iterator[Step]:
    rules = list(rules)
    for chain in chains_of(rules):
        yield MakeBridge(chain, behind)
        if not behind:  # in the old table, where one may have been left
            yield FlushBridge(chain)
    yield from (AddBridge(rule, behind) for rule in rules)


def _flat_size(rules: Iterable[Rule], sets: Mapping[Peers, Members]) -> int:
    return sum(len(sets.get(rule.peers, ())) if rule.peers else 1 for rule in rules)


def _filled(
    plan: Plan, chains: Iterable[Chain], elements: Mapping[Lookup, list[Rule]]
) -> Iterator[Step]:
    """All that rules need."""
    yield from map(MakeChain, chains)
    yield from nft_sets.entering({}, plan.sets)
    yield from (MakeMap(*each) for lookup in plan.gathering for each in maps_of(lookup))
    for lookup, rules in elements.items():
        yield from (Fill(one, rules, ports) for one, ports in maps_of(lookup))


def _in_order(rules: Iterable[Rule], lookups: Iterable[Lookup]) -> list[Step]:
    """Rules that are written where there are none: guards come behind all others."""
    rules = _by_turn(rules)
    return [
        *(AddRule(rule) for rule in rules if not rule.guards),
        *map(AddLookup, lookups),
        *(AddRule(rule) for rule in rules if rule.guards),
    ]


def _by_turn(rules: Iterable[Rule]) -> list[Rule]:
    return sorted(rules, key=lambda rule: (not rule.resumes, rule.guards))
