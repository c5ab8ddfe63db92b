"""How many ranges are held: as a rule each, or from some number on as elements of one map.

A packet is compared with one rule after another, while a lookup takes the same time for any number
of ranges: as much as FEW rules do (`make bench ARGS=flows-crossover` measures where the two meet).
Between FEW and MANY all stays as it is, so that a range more or less does not rewrite the others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from rules.model import Live, Lookup, Observed, Rule, Share

FEW, MANY = 4, 8
PORTS = "/ports"  # how the names of maps from port to port end


class Lives(tuple[Live, ...]):
    """What was observed, with what is asked of it more than once."""

    @cached_property
    def by_rule(self) -> dict[Rule, Live]:
        """The first of each rule; sets are compared with it at the speed of C."""
        found: dict[Rule, Live] = {}
        for live in self:
            found.setdefault(live.rule, live)
        return found

    @cached_property
    def weights(self) -> Counter[Lookup]:
        found: Counter[Lookup] = Counter()
        for live in self:
            if lookup := live.rule.lookup:
                found[lookup] += weight(live.rule)
        return found

    def recognise(self, rules: Iterable[Rule]) -> None:
        """Know these by the very objects that they are: then sets of them are compared without a
        look at what is in them. What is known so, or was written by us, need not be again."""
        if not self.recognised:
            same = {rule: rule for rule in rules}
            index = {same.get(rule, rule): live for rule, live in self.by_rule.items()}
            self.__dict__.update(by_rule=index, recognised=True)

    @cached_property
    def recognised(self) -> bool:
        return not self

    def changed(self, gone: Iterable[Live], new: Iterable[Live]) -> "Lives":
        """After some went and others came."""
        index, weights = self.by_rule.copy(), self.weights.copy()
        for live in gone:
            del index[live.rule]
            if lookup := live.rule.lookup:
                weights[lookup] -= weight(live.rule)
        for live in new:
            index[live.rule] = live
            if lookup := live.rule.lookup:
                weights[lookup] += weight(live.rule)
        made = Lives(index.values())
        made.__dict__.update(by_rule=index, weights=weights, recognised=self.recognised)
        return made


def lives(observed: Observed) -> Lives:
    """What was observed, ready to be asked."""
    live = observed.live
    return live if isinstance(live, Lives) else Lives(live)


def count(rules: Iterable[Rule]) -> Counter[Lookup]:
    """How many ranges each lookup would hold."""
    return Counter(lookup for rule in rules if (lookup := lookup_of(rule)))


def lookup_of(rule: Rule) -> Lookup | None:
    """Where a rule could be an element."""
    return rule.lookup


def weight(rule: Rule) -> int:
    """What it counts for a map. A shifted range takes one anyway, from port to port: as a rule it
    would have one of its own."""
    return MANY if rule.to_port is not None and rule.ports and len(rule.ports) > 1 else 1


def gathered(weights: Mapping[Lookup, int], mapped: Iterable[Lookup]) -> frozenset[Lookup]:
    """The lookups that are worth it, among those that are there and those that could be."""
    worth = {lookup for lookup, number in weights.items() if number >= MANY}
    kept = {lookup for lookup in mapped if weights.get(lookup, 0) > FEW}
    return frozenset(worth | kept)


def name(lookup: Lookup) -> str:
    """What its map is called; nft takes letters, digits, dots, dashes, underscores and slashes,
    which no link has in its name."""
    words = [lookup.chain.value, lookup.family.value, lookup.protocol.value]
    words += [lookup.interface] if lookup.interface else []
    if lookup.destination and not lookup.destination.is_unspecified:
        words.append(str(lookup.destination).replace(":", "_"))
    made = "-".join(words)
    if lookup.destination and lookup.destination.is_unspecified:
        made += "/own"
    return f"{made}{_share(lookup.share)}{'/shifted' if lookup.shifted else ''}"


def _share(share: Share | None) -> str:
    if share is None:
        return ""
    kind = "c" if share.client else "f"
    if len(share.at) == 1:
        return f"/{kind}{share.at[0]}of{share.of}"
    return f"/{kind}x{_digest(share.at)}of{share.of}"


@lru_cache(1024)
def _digest(numbers: tuple[int, ...]) -> str:
    """Written out they would be too long for a name."""
    from hashlib import blake2b  # most Services do without

    return blake2b(",".join(map(str, numbers)).encode(), digest_size=8).hexdigest()


def port_name(lookup: Lookup) -> str:
    """What its other map is called, from port to port, where it takes one."""
    return f"{name(lookup)}{PORTS}"


def spot(live: Live) -> object:
    """What tells a rule from all others in its table: its handle, or the map it is in and
    its first port there."""
    lookup = None if live.handle else lookup_of(live.rule)
    if lookup is None or live.rule.ports is None:
        return live.handle
    return name(lookup), live.rule.ports.first
