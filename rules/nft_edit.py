"""The transactions that lead from a table to one that it can become without being made anew."""

import enum
from collections.abc import Callable, Iterable, Iterator
from itertools import chain as joined

from rules import nft_sets
from rules.model import (
    ELEMENT,
    FILTERS,
    MAP,
    RULE,
    SET,
    Chain,
    Foreign,
    Lookup,
    Members,
    Network,
    Rule,
)
from rules.nft_changes import (
    NAT_CHAINS,
    Cover,
    bridgeable,
    chains_of,
    deleted_by,
    end_of,
    erased_by,
    gone_rules,
    guarded_chains,
    guarded_ends,
    left_bridges,
    maps_of,
    meet,
    newly_guarded,
    overlapping,
    resuming_rules,
    served_by,
    shaped,
    stray_elements,
    unwanted,
    written_by,
)
from rules.nft_sets import SetStep
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    Erase,
    EraseStray,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    Step,
)
from rules.plan import Plan
from rules.ports import coalesce
from rules.shapes import lookup_of, name

NOBODY: Members = frozenset()


class Stage(enum.IntEnum):
    """When a step is done; neighbours are one transaction where nothing stands against it."""

    PREPARE = 0  # what nobody asks for yet, and what joins
    BRIDGE = 1  # what takes over from what goes
    SWITCH = 2  # rules, and elements in the place of others
    ERASE = 3  # what nobody asks for any more


Staged = tuple[Stage, Step]


class Edit:
    """Of a table that stays."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rules, self._elements = shaped(plan, written_by(plan))
        self._new_maps = frozenset(plan.gathering)
        self._erased = erased_by(plan)
        self._strays = stray_elements(plan)
        self._new = Cover(joined(self._rules, *self._elements.values()))
        self._left = left_bridges(plan)
        others = newly_guarded(self._rules) | served_by(self._left)
        self._gone = Cover(gone_rules(plan), everything=others)
        self._replacing, self._replaced = self._clashes()
        self._bridged = bridgeable(self._in_need_of_a_bridge(), self._half_led())
        self._sets = list(self._set_steps())
        self._ends = guarded_ends(plan, self._rules)
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
        for drop, rule in deleted_by(plan):
            yield self._dropped(rule, later), drop
        for lookup in plan.spreading:
            yield Stage.SWITCH, DropRule(lookup.chain.value, plan.mapped[lookup])
        for lookup in plan.spreading:
            at = Stage.ERASE if lookup in self._kept_maps else Stage.SWITCH
            yield from ((at, DropMap(*each)) for each in maps_of(lookup))
        for lookup, gone in self._erased.items():
            for at, some in _by_stage(gone, self._erasing):
                yield from ((at, Erase(one, some, ports)) for one, ports in maps_of(lookup))
        for lookup in plan.gathering:
            yield from ((Stage.PREPARE, MakeMap(*each)) for each in maps_of(lookup))
        for lookup, rules in self._elements.items():
            for at, some in _by_stage(rules, self._filling):
                yield from ((at, Fill(one, some, ports)) for one, ports in maps_of(lookup))
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
            new.update(rule for rule in rules if meet(going, rule))
            old.update(rule for rule in gone if meet(coming, rule))
        return frozenset(new), frozenset(old)

    def _in_need_of_a_bridge(self) -> Iterator[Rule]:
        """Elements that take the place of others, and all else that takes over from those with the
        switch only, which is when they go."""
        yield from self._replacing
        going = Cover(self._replaced)
        maps = (rules for lookup, rules in self._elements.items() if lookup in self._new_maps)
        for rule in joined(self._rules, *maps):
            if rule.chain in NAT_CHAINS and not rule.guards and going.meets(rule):
                yield rule

    def _half_led(self) -> Iterator[Rule]:
        """What takes over from an edit that did not come to its end: from a bridge that it left, of
        which nobody knows what is in it, or from several that are for the same packets, of which
        another is met once the first is gone."""
        before = frozenset((chain, behind) for chain, behind in self._left if not behind)
        half = Cover(overlapping(gone_rules(self._plan)), everything=served_by(before))
        if half:
            stay = (live.rule for live in self._plan.unchanged)
            for rule in joined(stay, self._rules, *self._elements.values()):
                if rule.chain in NAT_CHAINS and not rule.guards and half.meets(rule):
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
        here = joined(self._plan.unchanged, unwanted(self._plan)) if spreading else ()
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

    def _dropped(self, rule: Rule, later: Stage) -> Stage:
        """Sources are put in for as long as something is sent on. What a filter lets pass, and is
        closed from now on, is closed before more is sent on to it."""
        if rule.chain is Chain.POSTROUTING:
            return later
        if rule.chain in FILTERS and end_of(rule) in self._ends:
            return self._early
        return Stage.SWITCH

    def _added(self) -> Iterator[Staged]:
        plan, written = self._plan, self._rules
        guarded, resuming = guarded_chains(plan), resuming_rules(plan)
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
        for chain in chains_of(self._bridged):
            if (chain, False) in self._left:
                yield Stage.BRIDGE, FlushBridge(chain)
            else:
                yield Stage.BRIDGE, MakeBridge(chain)
        yield from ((Stage.BRIDGE, AddBridge(rule)) for rule in self._bridged)

    def _unbridged(self) -> Iterator[Staged]:
        there = {*self._left, *((chain, False) for chain in chains_of(self._bridged))}
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
        asked = any(rule.peers in touched for rule in self._rules)
        return kept or asked or (bool(touched) and self._no_longer_accepts())

    def _no_longer_accepts(self) -> bool:
        """Whether a filter rule goes that let packets pass: a set that they join may take over."""
        return any(old.rule.chain in FILTERS and old.rule.accepts for old in unwanted(self._plan))

    def _needs_a_bridge(self, found: Iterable[Staged]) -> bool:
        """Whether what takes over must have done so before something goes with the switch, or what
        nobody takes is guarded."""
        if self._bridged:
            return True
        if self._early is not Stage.BRIDGE:
            return False
        if newly_guarded(self._rules):
            return True
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
        crossed = {one for one in after if nft_sets.cross(before.get(one, NOBODY), after[one])}
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
        filters = (old.rule for old in unwanted(self._plan) if old.rule.chain in FILTERS)
        if any(rule.guards for rule in filters):
            return True
        left: set[Network] = set()
        come: set[Network] = set()
        for step in entering:
            if isinstance(step, nft_sets.Leave):
                left |= step.members
            elif isinstance(step, nft_sets.Join):
                come |= step.members
        return nft_sets.overlap(left, come)


def _by_stage(
    rules: Iterable[Rule], stage: Callable[[Rule], Stage]
) -> Iterator[tuple[Stage, list[Rule]]]:
    found: dict[Stage, list[Rule]] = {}
    for rule in rules:
        found.setdefault(stage(rule), []).append(rule)
    return iter(found.items())
