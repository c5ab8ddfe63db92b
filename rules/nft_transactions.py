"""A plan as transactions, so that at every moment each port that is declared before and after is
served: by rules, or by a map that the running transaction does not touch.

A transaction swaps all rules at once. Maps and sets are not swapped with them: a packet can meet
old rules and no longer the elements that they ask for, or new rules and not yet theirs. So what is
to take packets over is there first, then rules change, and what nobody asks for any more goes last,
when the packets that were on their way have passed. A range that is cut, grown or led elsewhere
keeps some of its place in the map, where its element must go and come back: meanwhile a plain rule
serves it, in a chain of its own before ours, which is a bridge that goes in the end.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain as joined

from rules import nft_sets
from rules.flattened import each
from rules.model import (
    CHAIN,
    ELEMENT,
    FILTERS,
    MAP,
    POLICED,
    RULE,
    SET,
    Chain,
    Family,
    Foreign,
    Live,
    Lookup,
    Members,
    Network,
    Peers,
    Protocol,
    Rule,
)
from rules.nft import bridge_name
from rules.nft_sets import SetStep
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    EraseStray,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    Step,
)
from rules.plan import Plan, Table
from rules.ports import ALL_PORTS, PortRange, coalesce, have
from rules.shapes import lookup_of, name

MOST_BRIDGES = 4096  # rules; with more, a bridge would be slower to build than its map to edit
MOST_SHIFTED = 16384  # ports of shifted ranges among them: each is an element of its own
NAT_CHAINS = (Chain.PREROUTING, Chain.OUTPUT)
NOBODY: Members = frozenset()


class Stage(enum.IntEnum):
    """When a step is done; neighbours are one transaction where nothing stands against it."""

    PREPARE = 0  # what nobody asks for yet, and what joins
    BRIDGE = 1  # what takes over from what goes
    SWITCH = 2  # rules, and elements in the place of others
    ERASE = 3  # what nobody asks for any more


Staged = tuple[Stage, Step]


def transactions(plan: Plan) -> list[list[Step]]:
    """The steps of each; none where the rules need nothing done."""
    if plan.table is Table.DELETE:
        return _deleted_table(plan)
    if plan.table is Table.REMAKE:
        return _anew(plan)
    if plan.table is Table.CREATE:
        return _created(plan)
    return _Edit(plan).transactions()


# -------------------------------------------------------------------------- a table that is there


class _Edit:
    """Of a table that stays."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rules, self._elements = _shaped(plan, _written(plan))
        self._new_maps = frozenset(plan.gathering)
        self._erased = _erased(plan)
        self._strays = _stray_elements(plan)
        self._new = _Cover(joined(self._rules, *self._elements.values()))
        self._left = _left_bridges(plan)
        others = _newly_guarded(self._rules) | _served_by(self._left)
        self._gone = _Cover(_gone(plan), everything=others)
        self._replacing, self._replaced = self._clashes()
        self._bridged = _bridgeable(self._in_need_of_a_bridge())
        self._sets = list(self._set_steps())
        self._ends = _guarded_ends(plan, self._rules)
        self._kept_maps = self._maps_with_kept()
        visible = bool(self._bridged) or any(map(self._is_early, joined(*self._live_fills())))
        self._early = Stage.BRIDGE if visible else Stage.SWITCH

    def transactions(self) -> list[list[Step]]:
        found = list(self._staged())
        cuts = {Stage.SWITCH}
        if self._needs_preparation():
            cuts.add(Stage.PREPARE)
        if self._needs_a_bridge(found):
            cuts.add(Stage.BRIDGE)
        parts: list[list[Step]] = []
        stages: list[Stage] = []
        for stage in Stage:
            stages.append(stage)
            if stage in cuts or stage is Stage.ERASE:
                part = [step for at, step in found if at in stages]
                parts += [part] if part else []
                stages = []
        return parts

    def _staged(self) -> Iterator[Staged]:
        """All steps; those of one stage are in the order that they must be in."""
        plan = self._plan
        yield from ((Stage.PREPARE, MakeChain(chain)) for chain in plan.chains)
        yield from self._strangers()
        yield from (one for one in self._sets if not isinstance(one[1], nft_sets.DropSet))
        later = Stage.ERASE if self._erases_later() else Stage.SWITCH
        for drop, rule in _deleted(plan):
            yield self._dropped(rule, later), drop
        for lookup in plan.spreading:
            yield Stage.SWITCH, DropRule(lookup.chain.value, plan.mapped[lookup])
        for lookup in plan.spreading:
            at = Stage.ERASE if lookup in self._kept_maps else Stage.SWITCH
            yield from ((at, DropMap(*each)) for each in _maps(lookup))
        for lookup, gone in self._erased.items():
            for at, some in _by_stage(gone, self._erasing):
                yield from ((at, Erase(one, some, ports)) for one, ports in _maps(lookup))
        for lookup in plan.gathering:
            yield from ((Stage.PREPARE, MakeMap(*each)) for each in _maps(lookup))
        for lookup, rules in self._elements.items():
            for at, some in _by_stage(rules, self._filling):
                yield from ((at, Fill(one, some, ports)) for one, ports in _maps(lookup))
        yield from self._bridges()
        yield from self._added()
        yield from (one for one in self._sets if isinstance(one[1], nft_sets.DropSet))
        yield from self._unbridged()

    # ------------------------------------------------------------------------------- elements

    def _clashes(self) -> tuple[frozenset[Rule], frozenset[Rule]]:
        """Elements that take the place of others in their map, and those whose place they take."""
        new: set[Rule] = set()
        old: set[Rule] = set()
        for lookup, rules in self._elements.items():
            gone = self._erased.get(lookup, [])
            strays = self._strays.get(name(lookup), [])
            if lookup not in self._plan.mapped or not (gone or strays):
                continue
            going = coalesce(joined((rule.ports for rule in gone if rule.ports), strays))
            coming = coalesce(rule.ports for rule in rules if rule.ports)
            new.update(rule for rule in rules if _meets(going, rule))
            old.update(rule for rule in gone if _meets(coming, rule))
        return frozenset(new), frozenset(old)

    def _in_need_of_a_bridge(self) -> Iterator[Rule]:
        """Elements that take the place of others, and all else that takes over from those with the
        switch only, which is when they go."""
        yield from self._replacing
        going = _Cover(self._replaced)
        maps = (rules for lookup, rules in self._elements.items() if lookup in self._new_maps)
        for rule in joined(self._rules, *maps):
            if rule.chain in NAT_CHAINS and not rule.guards and going.meets(rule):
                yield rule

    def _live_fills(self) -> Iterator[list[Rule]]:
        """What is put into maps that packets are looked up in."""
        live = self._plan.mapped
        return (rules for lookup, rules in self._elements.items() if lookup in live)

    def _is_early(self, rule: Rule) -> bool:
        """Whether it takes over from what goes, without taking its place in the map."""
        return rule not in self._replacing and self._gone.meets(rule)

    def _filling(self, rule: Rule) -> Stage:
        if lookup_of(rule) not in self._plan.mapped:
            return Stage.PREPARE
        return Stage.BRIDGE if self._is_early(rule) else Stage.SWITCH

    def _erasing(self, rule: Rule) -> Stage:
        late = rule not in self._replaced and self._new.meets(rule)
        return Stage.ERASE if late else Stage.SWITCH

    def _maps_with_kept(self) -> frozenset[Lookup]:
        """Maps that go, of which something is served by others from now on."""
        spreading = frozenset(self._plan.spreading)
        here = joined(self._plan.unchanged, _olds(self._plan)) if spreading else ()
        held = ((live.rule, lookup_of(live.rule)) for live in here if not live.handle)
        return frozenset(
            lookup
            for rule, lookup in held
            if lookup is not None and lookup in spreading and self._new.meets(rule)
        )

    def _erases_later(self) -> bool:
        late = any(self._erasing(rule) is Stage.ERASE for rule in joined(*self._erased.values()))
        return late or bool(self._kept_maps)

    # ---------------------------------------------------------------------------------- rules

    def _dropped(self, rule: Rule | None, later: Stage) -> Stage:
        """Sources are put in for as long as something is sent on. What a filter lets pass, and is
        closed from now on, is closed before more is sent on to it."""
        if rule is None:
            return Stage.SWITCH
        if rule.chain is Chain.POSTROUTING:
            return later
        if rule.chain in FILTERS and _end(rule) in self._ends:
            return self._early
        return Stage.SWITCH

    def _added(self) -> Iterator[Staged]:
        plan, written = self._plan, self._rules
        guarded, resuming = _guarded(plan), _resuming(plan)
        for rule in (rule for rule in written if rule.resumes):
            yield self._early, AddRule(rule, rule.chain in guarded)
        for rule in written:
            if not rule.guards and not rule.resumes:
                behind = resuming.get(rule.chain, 0)
                first = rule.chain in guarded and not behind
                yield self._adding(rule), AddRule(rule, first, behind)
        for lookup in plan.gathering:
            yield Stage.SWITCH, AddLookup(lookup, lookup.chain in guarded)
        for rule in (rule for rule in written if rule.guards):
            yield self._adding(rule), AddRule(rule)

    def _adding(self, rule: Rule) -> Stage:
        return Stage.SWITCH if rule.chain in NAT_CHAINS else self._early

    # --------------------------------------------------------------------------------- bridges

    def _bridges(self) -> Iterator[Staged]:
        for chain in _chains_of(self._bridged):
            if (chain, False) in self._left:
                yield Stage.BRIDGE, FlushBridge(chain)
            else:
                yield Stage.BRIDGE, MakeBridge(chain)
        yield from ((Stage.BRIDGE, AddBridge(rule)) for rule in self._bridged)

    def _unbridged(self) -> Iterator[Staged]:
        there = {*self._left, *((chain, False) for chain in _chains_of(self._bridged))}
        for chain in Chain:
            for behind in (False, True):
                if (chain, behind) in there:
                    yield Stage.ERASE, DropBridge(chain, behind)

    def _needs_preparation(self) -> bool:
        """Whether a rule that changes asks what was prepared, for packets that were served."""
        kept = any(
            self._gone.meets(rule)
            for lookup in self._plan.gathering
            for rule in self._elements.get(lookup, ())
        )
        touched = {step.peers for at, step in self._sets if at is Stage.PREPARE}
        return kept or any(rule.peers in touched for rule in self._rules)

    def _needs_a_bridge(self, found: Iterable[Staged]) -> bool:
        """Whether what takes over must have done so before something goes with the switch."""
        if self._bridged:
            return True
        if self._early is not Stage.BRIDGE:
            return False
        return any(
            at is Stage.SWITCH and isinstance(step, DropRule | Erase | EraseStray)
            for at, step in found
        )

    # ------------------------------------------------------------------------------- strangers

    def _strangers(self) -> Iterator[Staged]:
        """What is not ours goes: rules before what they may use. Where a map or set has the name of
        one that is to be made, that is first."""
        foreign = [old for old in self._plan.remove if isinstance(old, Foreign)]
        stray = [one for one in foreign if one.kind in (MAP, SET)]
        at = Stage.PREPARE if stray else Stage.SWITCH
        for one in foreign:
            if one.kind == RULE:
                yield at, DropRule(one.chain, one.handle)
        for one in foreign:
            if one.kind == ELEMENT:
                yield Stage.SWITCH, EraseStray(one.name, one.ports)
        yield from ((at, DropStray(one.kind, one.name)) for one in stray)

    # ------------------------------------------------------------------------------------ sets

    def _set_steps(self) -> Iterator[tuple[Stage, SetStep]]:
        """Who comes is first, and who goes is last, if what else changes may let him pass."""
        before, after = self._plan.sets_before, self._plan.sets
        entering, leaving = nft_sets.entering(before, after), nft_sets.leaving(before, after)
        late = Stage.ERASE if self._are_let_pass(entering) else Stage.SWITCH
        crossed = {one for one in after if _cross(before.get(one, NOBODY), after[one])}
        for step in entering:
            at = late if isinstance(step, nft_sets.Leave) else Stage.PREPARE
            if step.peers in crossed:  # a network in the place of a part of it, or the other way
                at = Stage.SWITCH
            yield at, step
        yield from ((late, step) for step in leaving)

    def _are_let_pass(self, entering: Iterable[SetStep]) -> bool:
        """Whether who leaves a set may be let pass by what else changes."""
        if any(rule.chain in FILTERS for rule in self._rules):
            return True
        filters = (old.rule for old in _olds(self._plan) if old.rule.chain in FILTERS)
        if any(rule.guards for rule in filters):
            return True
        left: set[Network] = set()
        come: set[Network] = set()
        for step in entering:
            if isinstance(step, nft_sets.Leave):
                left |= step.members
            elif isinstance(step, nft_sets.Join):
                come |= step.members
        return overlap(left, come)


def _cross(before: Members, after: Members) -> bool:
    return before != after and overlap(before - after, after - before)


def overlap(some: Iterable[Network], others: Iterable[Network]) -> bool:
    """Whether an address is in one of each."""
    spans = sorted(
        (one.version, int(one.network_address), int(one.broadcast_address), which)
        for which, networks in enumerate((some, others))
        for one in networks
    )
    furthest: dict[tuple[int, int], int] = {}
    for version, first, last, which in spans:
        if furthest.get((version, 1 - which), -1) >= first:
            return True
        furthest[version, which] = max(last, furthest.get((version, which), -1))
    return False


# -------------------------------------------------------------------- a table that is made, or anew


def _created(plan: Plan) -> list[list[Step]]:
    """One transaction; two where something is guarded: what others sent on so far goes on until
    our maps and sets are filled."""
    rules, elements = _shaped(plan, _written(plan))
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
    written = _written(plan)
    rules, elements = _shaped(plan, written)
    chains = _chains_of(written)
    made: list[Step] = [DropTable(), MakeTable(exclusive=False)]
    made += _filled(plan, chains, elements)
    ours = _in_order(rules, plan.gathering)
    if _flat_size(written, plan.sets) > MOST_BRIDGES or _shifted(written) > MOST_SHIFTED:
        return [[*made, *ours]]
    flat = _by_turn(each(written, plan.sets))
    bridge = [*_bridge(flat, behind=True)]
    drop: list[Step] = [DropBridge(chain, behind=True) for chain in chains]
    parts = [[*made, *bridge], ours] if elements or plan.sets else [[*made, *bridge, *ours]]
    parts += [drop]
    olds = [*plan.unchanged, *_olds(plan)]
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
    olds = [old for old in _olds(plan) if old.rule.chain in FILTERS]
    if plan.unsound or not any(old.rule.peers for old in olds):
        return [[DropTable()]]
    return [[DropRule(old.rule.chain.value, old.handle) for old in olds], [DropTable()]]


def _bridge(rules: Iterable[Rule], *, behind: bool) -> Iterator[Step]:
    rules = list(rules)
    for chain in _chains_of(rules):
        yield MakeBridge(chain, behind)
        yield FlushBridge(chain, behind)
    yield from (AddBridge(rule, behind) for rule in rules)


def _flat_size(rules: Iterable[Rule], sets: Mapping[Peers, Members]) -> int:
    return sum(len(sets.get(rule.peers, ())) if rule.peers else 1 for rule in rules)


def _shifted(rules: Iterable[Rule]) -> int:
    """The ports that take an element each."""
    return sum(len(rule.ports) for rule in rules if rule.to_port is not None and rule.ports)


def _filled(
    plan: Plan, chains: Iterable[Chain], elements: Mapping[Lookup, list[Rule]]
) -> Iterator[Step]:
    """All that rules need."""
    yield from map(MakeChain, chains)
    yield from nft_sets.entering({}, plan.sets)
    yield from (MakeMap(*each) for lookup in plan.gathering for each in _maps(lookup))
    for lookup, rules in elements.items():
        yield from (Fill(one, rules, ports) for one, ports in _maps(lookup))


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


# ----------------------------------------------------------------------------------------- bridges


def _bridgeable(rules: Iterable[Rule]) -> list[Rule]:
    """Those that a bridge has room for."""
    found: list[Rule] = []
    shifted = 0
    for rule in sorted(rules, key=lambda rule: rule.key):
        shifted += _shifted([rule])
        if len(found) == MOST_BRIDGES or shifted > MOST_SHIFTED:
            break
        found.append(rule)
    return found


def _chains_of(rules: Iterable[Rule]) -> list[Chain]:
    used = {rule.chain for rule in rules}
    return [chain for chain in Chain if chain in used]


Bridges = frozenset[tuple[Chain, bool]]  # and whether behind


def _left_bridges(plan: Plan) -> Bridges:
    """Of an edit that did not come to its end."""
    foreign = (old for old in plan.remove if isinstance(old, Foreign) and old.kind == CHAIN)
    chains = ((Chain(one.chain), one.name) for one in foreign)
    return frozenset((chain, called == bridge_name(chain, behind=True)) for chain, called in chains)


def _served_by(left: Bridges) -> frozenset[tuple[Chain, Family]]:
    """What a bridge may serve that nobody else does."""
    return frozenset((chain, family) for chain, _ in left for family in Family)


# ------------------------------------------------------------------------- what comes and what goes


class _Cover:
    """Which packets some translations are for, but for addresses and links."""

    def __init__(
        self, rules: Iterable[Rule], everything: frozenset[tuple[Chain, Family]] = frozenset()
    ) -> None:
        self._everything = everything
        found: dict[tuple[Chain, Family], dict[Protocol | None, list[PortRange]]] = {}
        for rule in rules:
            if rule.chain in NAT_CHAINS and not rule.guards:
                at = found.setdefault((rule.chain, rule.family), {})
                at.setdefault(rule.protocol, []).append(rule.ports or ALL_PORTS)
        self._ports = {
            place: {protocol: coalesce(ports) for protocol, ports in at.items()}
            for place, at in found.items()
        }

    def meets(self, rule: Rule) -> bool:
        place = rule.chain, rule.family
        if place in self._everything:
            return True
        at = self._ports.get(place, {})
        protocols = at if rule.protocol is None else (rule.protocol, None)
        return any(_meets(at.get(one, ()), rule) for one in protocols)


def _meets(ranges: Sequence[PortRange], rule: Rule) -> bool:
    ports = rule.ports or ALL_PORTS
    return have(ranges, ports.first, ports.last)


def _by_stage(
    rules: Iterable[Rule], stage: Callable[[Rule], Stage]
) -> Iterator[tuple[Stage, list[Rule]]]:
    found: dict[Stage, list[Rule]] = {}
    for rule in rules:
        found.setdefault(stage(rule), []).append(rule)
    return iter(found.items())


def _olds(plan: Plan) -> list[Live]:
    """What is not wanted any more."""
    olds = (*plan.remove, *(live for live, _ in plan.change))
    return [old for old in olds if isinstance(old, Live)]


def _reshaped(plan: Plan) -> list[Live]:
    """What stays, but in another shape."""
    shapes = {*plan.gathering, *plan.spreading}
    if not shapes:
        return []
    return [live for live in plan.unchanged if lookup_of(live.rule) in shapes]


def _gone(plan: Plan) -> Iterator[Rule]:
    return (live.rule for live in joined(_olds(plan), _reshaped(plan)))


def _written(plan: Plan) -> list[Rule]:
    """What is new, and what stays but in another shape."""
    again = plan.unchanged if plan.table is Table.REMAKE else _reshaped(plan)
    return [*(live.rule for live in again), *(rule for _, rule in plan.change), *plan.add]


def _shaped(plan: Plan, written: Iterable[Rule]) -> tuple[list[Rule], dict[Lookup, list[Rule]]]:
    """What is written, as rules and as elements."""
    rules: list[Rule] = []
    elements: dict[Lookup, list[Rule]] = {}
    for rule in written:
        lookup = lookup_of(rule) if plan.maps else None
        if lookup is not None and lookup in plan.maps:
            elements.setdefault(lookup, []).append(rule)
        else:
            rules.append(rule)
    return rules, elements


def _erased(plan: Plan) -> dict[Lookup, list[Rule]]:
    """What goes as an element, but for those that go with their map."""
    found: dict[Lookup, list[Rule]] = {}
    spreading = frozenset(plan.spreading)
    for old in _olds(plan):
        lookup = None if old.handle else lookup_of(old.rule)
        if lookup is not None and lookup not in spreading:
            found.setdefault(lookup, []).append(old.rule)
    return found


def _stray_elements(plan: Plan) -> dict[str, list[PortRange]]:
    """The ports of elements that are not ours, by the name of their map."""
    found: dict[str, list[PortRange]] = {}
    for old in plan.remove:
        if isinstance(old, Foreign) and old.kind == ELEMENT and old.ports[1] > 0:
            ports = PortRange(max(old.ports[0], 1), old.ports[1])
            found.setdefault(old.name, []).append(ports)
    return found


def _deleted(plan: Plan) -> Iterator[tuple[DropRule, Rule]]:
    """What goes as a rule: what is not wanted, and what becomes an element."""
    for old in joined(_olds(plan), _reshaped(plan)):
        if old.handle:
            yield DropRule(old.rule.chain.value, old.handle), old.rule


def _maps(lookup: Lookup) -> list[tuple[Lookup, bool]]:
    return [(lookup, False), (lookup, True)] if lookup.shifted else [(lookup, False)]


def _resuming(plan: Plan) -> dict[Chain, int]:
    """The handle of each chain's rule that is for most packets, so that others come behind it."""
    found: dict[Chain, int] = {}
    for live in plan.unchanged:
        if live.rule.chain in POLICED and live.rule.resumes:
            found[live.rule.chain] = max(live.handle, found.get(live.rule.chain, 0))
    return found


def _guarded(plan: Plan) -> frozenset[Chain]:
    """The chains whose guard stays where it is, so that nothing may come behind it."""
    return frozenset(live.rule.chain for live in plan.unchanged if live.rule.guards)


def _newly_guarded(rules: Iterable[Rule]) -> frozenset[tuple[Chain, Family]]:
    """Where others may have served any port so far."""
    guards = (rule for rule in rules if rule.guards and rule.chain in NAT_CHAINS)
    return frozenset((rule.chain, rule.family) for rule in guards)


def _guarded_ends(plan: Plan, written: Iterable[Rule]) -> frozenset[tuple[object, ...]]:
    """Whom filters protect in the end."""
    found = joined((live.rule for live in plan.unchanged), written)
    guards = (rule for rule in found if rule.guards and rule.chain in FILTERS)
    return frozenset(map(_end, guards))


def _end(rule: Rule) -> tuple[object, ...]:
    return rule.chain, rule.family, rule.source, rule.destination
