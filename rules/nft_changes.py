"""What a plan writes and takes away, as nftables holds it: rules, and elements of maps."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain as joined

from rules.model import (
    CHAIN,
    ELEMENT,
    FILTERS,
    POLICED,
    Chain,
    Family,
    Foreign,
    Live,
    Lookup,
    Protocol,
    Rule,
)
from rules.nft import bridge_name
from rules.nft_steps import (
    DropRule,
)
from rules.plan import Plan, Table
from rules.ports import ALL_PORTS, PortRange, coalesce, have
from rules.shapes import lookup_of

MOST_BRIDGES = 4096  # rules; with more, a bridge would be slower to build than its map to edit
MOST_SHIFTED = 16384  # ports of shifted ranges among them: each is an element of its own
NAT_CHAINS = (Chain.PREROUTING, Chain.OUTPUT)


class Cover:
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

    def __bool__(self) -> bool:
        return bool(self._everything or self._ports)

    def meets(self, rule: Rule) -> bool:
        place = rule.chain, rule.family
        if place in self._everything:
            return True
        at = self._ports.get(place, {})
        protocols = at if rule.protocol is None else (rule.protocol, None)
        return any(meet(at.get(one, ()), rule) for one in protocols)


def meet(ranges: Sequence[PortRange], rule: Rule) -> bool:
    ports = rule.ports or ALL_PORTS
    return have(ranges, ports.first, ports.last)


def unwanted(plan: Plan) -> list[Live]:
    """What is not wanted any more."""
    olds = (*plan.remove, *(live for live, _ in plan.change))
    return [old for old in olds if isinstance(old, Live)]


def reshaped(plan: Plan) -> list[Live]:
    """What stays, but in another shape."""
    shapes = {*plan.gathering, *plan.spreading}
    if not shapes:
        return []
    return [live for live in plan.unchanged if lookup_of(live.rule) in shapes]


def gone_rules(plan: Plan) -> Iterator[Rule]:
    return (live.rule for live in joined(unwanted(plan), reshaped(plan)))


def written_by(plan: Plan) -> list[Rule]:
    """What is new, and what stays but in another shape."""
    again = plan.unchanged if plan.table is Table.REMAKE else reshaped(plan)
    return [*(live.rule for live in again), *(rule for _, rule in plan.change), *plan.add]


def shaped(plan: Plan, written: Iterable[Rule]) -> tuple[list[Rule], dict[Lookup, list[Rule]]]:
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


def erased_by(plan: Plan) -> dict[Lookup, list[Rule]]:
    """What goes as an element, but for those that go with their map."""
    found: dict[Lookup, list[Rule]] = {}
    spreading = frozenset(plan.spreading)
    for old in unwanted(plan):
        lookup = None if old.handle else lookup_of(old.rule)
        if lookup is not None and lookup not in spreading:
            found.setdefault(lookup, []).append(old.rule)
    return found


def stray_elements(plan: Plan) -> dict[str, list[PortRange]]:
    """The ports of elements that are not ours, by the name of their map."""
    found: dict[str, list[PortRange]] = {}
    for old in plan.remove:
        if isinstance(old, Foreign) and old.kind == ELEMENT and old.ports[1] > 0:
            ports = PortRange(max(old.ports[0], 1), old.ports[1])
            found.setdefault(old.name, []).append(ports)
    return found


def deleted_by(plan: Plan) -> Iterator[tuple[DropRule, Rule]]:
    """What goes as a rule: what is not wanted, and what becomes an element."""
    for old in joined(unwanted(plan), reshaped(plan)):
        if old.handle:
            yield DropRule(old.rule.chain.value, old.handle), old.rule


def maps_of(lookup: Lookup) -> list[tuple[Lookup, bool]]:
    return [(lookup, False), (lookup, True)] if lookup.shifted else [(lookup, False)]


def resuming_rules(plan: Plan) -> dict[Chain, int]:
    """The handle of each chain's rule that is for most packets, so that others come behind it."""
    found: dict[Chain, int] = {}
    for live in plan.unchanged:
        if live.rule.chain in POLICED and live.rule.resumes:
            found[live.rule.chain] = max(live.handle, found.get(live.rule.chain, 0))
    return found


def guarded_chains(plan: Plan) -> frozenset[Chain]:
    """The chains whose guard stays where it is, so that nothing may come behind it."""
    return frozenset(live.rule.chain for live in plan.unchanged if live.rule.guards)


def newly_guarded(rules: Iterable[Rule]) -> frozenset[tuple[Chain, Family]]:
    """Where others may have served any port so far."""
    guards = (rule for rule in rules if rule.guards and rule.chain in NAT_CHAINS)
    return frozenset((rule.chain, rule.family) for rule in guards)


def guarded_ends(plan: Plan, written: Iterable[Rule]) -> frozenset[tuple[object, ...]]:
    """Whom filters protect in the end."""
    found = joined((live.rule for live in plan.unchanged), written)
    guards = (rule for rule in found if rule.guards and rule.chain in FILTERS)
    return frozenset(map(end_of, guards))


def end_of(rule: Rule) -> tuple[object, ...]:
    return rule.chain, rule.family, rule.source, rule.destination


# ----------------------------------------------------------------------------------------- bridges


def count_shifted(rules: Iterable[Rule]) -> int:
    """The ports that take an element each."""
    return sum(len(rule.ports) for rule in rules if rule.to_port is not None and rule.ports)


def bridgeable(first: Iterable[Rule], others: Iterable[Rule]) -> list[Rule]:
    """Those that a bridge has room for."""
    found: dict[Rule, None] = {}
    shifted = 0
    for rules in (frozenset(first), frozenset(others)):
        for rule in sorted(rules.difference(found), key=lambda rule: rule.key):
            shifted += count_shifted([rule])
            if len(found) == MOST_BRIDGES or shifted > MOST_SHIFTED:
                return list(found)
            found[rule] = None
    return list(found)


def overlapping(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Translations that may be for the same packets. Of what was wanted at one time there are none:
    some were left by an edit that did not come to its end."""
    places: dict[tuple[Chain, Family], list[Rule]] = {}
    for rule in rules:
        if rule.chain in NAT_CHAINS and not rule.guards:
            places.setdefault((rule.chain, rule.family), []).append(rule)
    for some in places.values():
        apart = [
            get
            for get in (_protocol, _link, _address)
            if not any(get(rule) is None for rule in some)
        ]
        groups: dict[tuple[object, ...], list[Rule]] = {}
        for rule in some:
            groups.setdefault(tuple(get(rule) for get in apart), []).append(rule)
        for group in groups.values():
            yield from _crossing(group)


def _protocol(rule: Rule) -> object:
    return rule.protocol


def _link(rule: Rule) -> object:
    return rule.interface


def _address(rule: Rule) -> object:
    """A rule for one address comes before one for all of them, and both may be wanted."""
    return rule.destination


def _crossing(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Those whose ports are also those of others, and that do not share them with these."""
    for met in _met(rules):
        shares = [rule.share for rule in met if rule.share]
        numbers = [number for share in shares for number in share.at]
        alike = len({(rule.ports, rule.share.of, rule.share.client) for rule in met if rule.share})
        shared = len(shares) == len(met) and alike == 1 and len(set(numbers)) == len(numbers)
        if len(met) > 1 and not shared:
            yield from met


def _met(rules: Iterable[Rule]) -> Iterator[list[Rule]]:
    """Each with those that it meets, and that those meet."""
    met: list[Rule] = []
    reach = 0
    for rule in sorted(rules, key=lambda rule: (rule.ports or ALL_PORTS).first):
        ports = rule.ports or ALL_PORTS
        if ports.first > reach:
            yield met
            met = []
        met.append(rule)
        reach = max(reach, ports.last)
    yield met


def chains_of(rules: Iterable[Rule]) -> list[Chain]:
    used = {rule.chain for rule in rules}
    return [chain for chain in Chain if chain in used]


Bridges = frozenset[tuple[Chain, bool]]  # and whether behind


def left_bridges(plan: Plan) -> Bridges:
    """Of an edit that did not come to its end."""
    foreign = (old for old in plan.remove if isinstance(old, Foreign) and old.kind == CHAIN)
    chains = ((Chain(one.chain), one.name) for one in foreign)
    return frozenset((chain, called == bridge_name(chain, behind=True)) for chain, called in chains)


def served_by(left: Bridges) -> frozenset[tuple[Chain, Family]]:
    """What a bridge may serve that nobody else does."""
    return frozenset((chain, family) for chain, _ in left for family in Family)
