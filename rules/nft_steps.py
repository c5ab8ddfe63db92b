"""A plan as the steps of a transaction of nftables, in their order. How each is said is for others:
as a command of libnftables or a line of a script (rules/nft.py), or as bytes (rules/nft_batch.py).
"""

from collections.abc import Iterable, Iterator, Sequence, Set

from rules import nft_sets
from rules.model import ELEMENT, MAP, POLICED, RULE, SET, Chain, Foreign, Live, Lookup, Peers, Rule
from rules.nft_sets import SetStep
from rules.plan import Plan, Table
from rules.ports import PortRange, coalesce, subtract
from rules.shapes import lookup_of
from rules.values import Value


class DropTable(Value):
    """Our table, with all that is in it."""


class MakeTable(Value):
    """Our table; exclusive: it fails where somebody else was faster."""

    exclusive: bool


class MakeChain(Value):
    """One of our chains."""

    chain: Chain


class DropRule(Value):
    """Whosever rule it is."""

    chain: str
    handle: int


class DropStray(Value):
    """A map or set that is not ours; the rules that use it must have gone."""

    kind: str
    name: str


class EraseStray(Value):
    """An element from one of our maps that is not ours."""

    name: str
    ports: tuple[int, int]


class DropMap(Value):
    """With all elements; the rule that looks into it must have gone."""

    lookup: Lookup
    ports: bool = False  # the other one, from port to port


class Erase(Value):
    """Ranges from a map, or their ports from the other."""

    lookup: Lookup
    rules: Sequence[Rule]
    ports: bool = False


class MakeMap(Value):
    """Yet empty."""

    lookup: Lookup
    ports: bool = False


class Fill(Value):
    """A map, with these ranges, or the other with the port that each of their ports leads to."""

    lookup: Lookup
    rules: Sequence[Rule]
    ports: bool = False


class AddRule(Value):
    """To its chain, behind all others, or before them, or right behind the one with that handle."""

    rule: Rule
    first: bool = False
    behind: int = 0


class AddLookup(Value):
    """The rule that looks into a map, behind all others, or before them."""

    lookup: Lookup
    first: bool = False


RuleStep = (
    DropTable
    | MakeTable
    | MakeChain
    | DropRule
    | DropStray
    | EraseStray
    | DropMap
    | Erase
    | MakeMap
    | Fill
    | AddRule
    | AddLookup
)
Step = RuleStep | SetStep


def steps(plan: Plan) -> list[Step]:
    """The steps of one transaction; none where the rules need nothing done."""
    if plan.table is Table.DELETE:
        return [DropTable()]
    found: list[Step] = []
    if plan.table is Table.REMAKE:
        found += [DropTable(), MakeTable(exclusive=False)]
    elif plan.table is Table.CREATE:
        found += [MakeTable(exclusive=True)]
    found += [MakeChain(chain) for chain in _new_chains(plan)]
    remade = plan.table is Table.REMAKE
    found += [] if remade else _strangers(plan)  # of whom one may have the name of a set
    found += nft_sets.entering({} if remade else plan.sets_before, plan.sets)
    if not remade:
        found += _deleted(plan)
        found += [DropMap(*each) for lookup in plan.spreading for each in _maps(lookup)]
        for lookup, gone in _erased(plan).items():
            found += [Erase(one, gone, ports) for one, ports in _maps(lookup)]
    written, elements = _shaped(plan)
    found += [MakeMap(*each) for lookup in plan.gathering for each in _maps(lookup)]
    for lookup, rules in elements.items():
        found += [Fill(one, rules, ports) for one, ports in _maps(lookup)]
    guarded, resuming = _guarded(plan), _resuming(plan)
    found += [AddRule(rule, rule.chain in guarded) for rule in written if rule.resumes]
    for rule in written:
        if not rule.guards and not rule.resumes:
            behind = resuming.get(rule.chain, 0)
            found.append(AddRule(rule, rule.chain in guarded and not behind, behind))
    found += [AddLookup(lookup, lookup.chain in guarded) for lookup in plan.gathering]
    found += [AddRule(rule) for rule in written if rule.guards]
    found += [] if remade else nft_sets.leaving(plan.sets_before, plan.sets)
    return found


def _resuming(plan: Plan) -> dict[Chain, int]:
    """The handle of each chain's rule that is for most packets, so that others come behind it."""
    if plan.table is not Table.KEEP:
        return {}
    found: dict[Chain, int] = {}
    for live in plan.unchanged:
        if live.rule.chain in POLICED and live.rule.resumes:
            found[live.rule.chain] = max(live.handle, found.get(live.rule.chain, 0))
    return found


def _maps(lookup: Lookup) -> list[tuple[Lookup, bool]]:
    return [(lookup, False), (lookup, True)] if lookup.shifted else [(lookup, False)]


def _guarded(plan: Plan) -> frozenset[Chain]:
    """The chains whose guard stays where it is, so that nothing may come behind it."""
    if plan.table is not Table.KEEP:
        return frozenset()
    return frozenset(live.rule.chain for live in plan.unchanged if live.rule.guards)


def in_turn(plan: Plan) -> list[list[Step]]:
    """The same steps as one transaction or, where a map takes the place of rules or of another map,
    two: it is filled before anything looks into it.

    Since nft_set_rbtree has an array (Linux 7.0, 6.18.y) a map made by a transaction is empty to
    packets until the transaction's end, when its rules are long in use. New flows that came in
    between were not forwarded.
    """
    found = steps(plan)
    if plan.table is not Table.KEEP or not (plan.gathering or plan.sets.keys() - plan.sets_before):
        return [found] if found else []
    served: dict[tuple[object, ...], list[PortRange]] = {}
    for old in (*plan.unchanged, *plan.remove, *(old for old, _ in plan.change)):
        if isinstance(old, Live) and old.rule.ports:
            served.setdefault(_packets(old.rule), []).append(old.rule.ports)
    fills = [step for step in found if isinstance(step, Fill) and step.lookup in plan.gathering]
    maps = {fill.lookup for fill in fills if _are_in(served.get(_packets(fill.lookup), ()), fill)}
    new = plan.sets.keys() - plan.sets_before
    first = [step for step in found if _fills(step) in maps or _is_of(step, new)]
    taken = set(map(id, first))  # there may be thousands
    # One of the strangers may have the name of such a map.
    strangers = _strangers(plan) if first else []
    if not any(isinstance(step, DropStray) for step in strangers):
        strangers = []
    rest = [step for step in found if id(step) not in taken and step not in strangers]
    return [part for part in ([*strangers, *first], rest) if part]


def _is_of(step: Step, new: Set[Peers]) -> bool:
    """Whether it makes or fills one of these sets."""
    return isinstance(step, nft_sets.MakeSet | nft_sets.Join) and step.peers in new


def _packets(what: Rule | Lookup) -> tuple[object, ...]:
    """Which it is for, but for their ports, and whose share they are: that changes with rules."""
    return what.chain, what.family, what.protocol, what.interface, what.destination


def _are_in(served: Iterable[PortRange], fill: Fill) -> bool:
    """Whether a map gets some of the ports that were served so far."""
    ports = [rule.ports for rule in fill.rules if rule.ports]
    return subtract(ports, served) != coalesce(ports)


def _fills(step: Step) -> Lookup | None:
    """The map that it makes, or puts elements into."""
    return step.lookup if isinstance(step, MakeMap | Fill) else None


def _new_chains(plan: Plan) -> tuple[Chain, ...]:
    """The chains to create; a table made anew needs those of its unchanged rules too."""
    if plan.table is not Table.REMAKE:
        return plan.chains
    return tuple(c for c in Chain if c in {rule.chain for rule in _written(plan)})


def _strangers(plan: Plan) -> list[Step]:
    """What is not ours goes: rules before what they may use."""
    foreign = [old for old in plan.remove if isinstance(old, Foreign)]
    found: list[Step] = [DropRule(one.chain, one.handle) for one in foreign if one.kind == RULE]
    found += [EraseStray(one.name, one.ports) for one in foreign if one.kind == ELEMENT]
    return found + [DropStray(one.kind, one.name) for one in foreign if one.kind in (MAP, SET)]


def _deleted(plan: Plan) -> Iterator[DropRule]:
    """What goes as a rule: what is not wanted, what becomes an element, and the rules of maps."""
    gathering = frozenset(plan.gathering)
    olds = [*plan.remove, *(live for live, _ in plan.change)]
    if gathering:
        olds += [live for live in plan.unchanged if lookup_of(live.rule) in gathering]
    for old in olds:
        if isinstance(old, Live) and old.handle:
            yield DropRule(old.rule.chain.value, old.handle)
    for lookup in plan.spreading:
        yield DropRule(lookup.chain.value, plan.mapped[lookup])


def _erased(plan: Plan) -> dict[Lookup, list[Rule]]:
    """What goes as an element, but for those that go with their map."""
    found: dict[Lookup, list[Rule]] = {}
    spreading = frozenset(plan.spreading)
    for old in (*plan.remove, *(live for live, _ in plan.change)):
        lookup = lookup_of(old.rule) if isinstance(old, Live) and not old.handle else None
        if isinstance(old, Live) and lookup is not None and lookup not in spreading:
            found.setdefault(lookup, []).append(old.rule)
    return found


def _shaped(plan: Plan) -> tuple[list[Rule], dict[Lookup, list[Rule]]]:
    """What is written, as rules and as elements."""
    rules: list[Rule] = []
    elements: dict[Lookup, list[Rule]] = {}
    for rule in _written(plan):
        lookup = lookup_of(rule) if plan.maps else None
        if lookup is not None and lookup in plan.maps:
            elements.setdefault(lookup, []).append(rule)
        else:
            rules.append(rule)
    return rules, elements


def _written(plan: Plan) -> list[Rule]:
    """What is new, and what stays but in another shape."""
    again = plan.unchanged if plan.table is Table.REMAKE else ()
    reshaped = {*plan.gathering, *plan.spreading}
    if reshaped and plan.table is not Table.REMAKE:
        again = tuple(live for live in plan.unchanged if lookup_of(live.rule) in reshaped)
    return [*(live.rule for live in again), *(rule for _, rule in plan.change), *plan.add]
