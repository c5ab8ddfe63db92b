"""Listings of our nftables table to what is observed: the way back from rules/nft.py.

Comparison happens on decoded values only: nft writes some things differently from how it reads
them. What does not decode to a rule that we could have written is foreign.
"""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from rules import nft_sets
from rules.model import (
    CHAIN,
    ELEMENT,
    LINK_CHARACTERS,
    MAP,
    SET,
    Address,
    Chain,
    Family,
    Foreign,
    Live,
    Lookup,
    Members,
    Observed,
    Peers,
    Rule,
)
from rules.nft import (
    OURS,
    Json,
    bridge_name,
    bridge_spec,
    chain_spec,
    map_spec,
    port_map_spec,
)
from rules.nft_rules import decode_lookup, decode_rule, handle_of, ports_of, text
from rules.ports import HIGHEST, PortRange
from rules.problems import printable, shown
from rules.shapes import Lives, lookup_of, name, port_name

NAME_CHARACTERS = LINK_CHARACTERS | {"/"}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def decode(
    listing: Iterable[Mapping[str, object]], known: dict[tuple[str, str, str], Rule] | None = None
) -> Observed:
    """What a listing of our table holds; `known` remembers rules from one listing to the next."""
    known = {} if known is None else known
    kinds = _by_kind(listing)
    maps = {str(value.get("name")): value for value in kinds.pop("map", [])}
    listed = kinds.pop("chain", [])
    left = [bridge for value in listed if (bridge := _decode_bridge(value))]
    bridges = [bridge.name for bridge in left]
    chains = [(value, _decode_chain(value)) for value in listed if value.get("name") not in bridges]
    tables = kinds.pop("table", [])
    unsound = ["somebody set flags on the table" for value in tables if value.get("flags")]
    unsound += [
        f"chain {shown(value.get('name'))} is not as we make it"
        for value, chain in chains
        if chain is None
    ]
    found: list[Live | Foreign] = [*left]
    mapped: dict[Lookup, int] = {}
    rules = [value for value in kinds.pop("rule", []) if value.get("chain") not in bridges]
    # To delete a rule is to write the name of its chain, which in a script must be one.
    if not all(_is_name(value.get("chain")) for value in rules):
        unsound.append("there are rules in a chain that nft could not name")
    for value in rules:
        lookup = decode_lookup(value)
        if lookup is None:
            found.append(decode_rule(value, known))
        elif mapped.setdefault(lookup, handle_of(value)) != handle_of(value):
            found.append(
                Foreign(lookup.chain.value, handle_of(value), "looks into a map once more")
            )
    if mapped:
        found = [_misshapen(one, mapped) for one in found]
    if any(isinstance(one, Live) and one.rule.guards for one in found):
        found = _misplaced(found, rules)
    for lookup in mapped:
        pairs = _decode_ports(maps.pop(port_name(lookup), {}), lookup)
        elements, ours = _decode_map(maps.pop(name(lookup), {}), lookup, pairs)
        found += elements
        unsound += [] if ours else [f"map {name(lookup)} is not as we make it"]
    sets = _decode_sets(kinds.get(SET, []))
    kinds[SET] = [one for one in kinds.get(SET, []) if nft_sets.named(one.get("name")) not in sets]
    if kinds[SET]:
        found = [_misled(one, sets) for one in found]
    for kind, values in {**kinds, MAP: maps.values()}.items():
        for value in values:
            if kind in (MAP, SET) and _is_name(value.get("name")):
                found.append(_stray(kind, str(value["name"])))
            elif kind != "metainfo":
                unsound.append(
                    f"there is a {printable(kind, 40)} {shown(value.get('name'))} in it, not ours"
                )
    return Observed(
        live=Lives(rule for rule in found if isinstance(rule, Live)),
        foreign=tuple(rule for rule in found if isinstance(rule, Foreign)),
        chains=frozenset() if unsound else frozenset(chain for _, chain in chains if chain),
        table=bool(tables or rules),
        unsound="; ".join(sorted(set(unsound))),
        mapped={} if unsound else mapped,
        sets=sets,
    )


def _by_kind(listing: Iterable[Mapping[str, object]]) -> dict[str, list[Json]]:
    kinds: dict[str, list[Json]] = {}
    for entry in listing:
        kind, value = next(iter(entry.items()), ("", None))
        if isinstance(value, dict):
            kinds.setdefault(kind, []).append(value)
    return kinds


def _misshapen(one: Live | Foreign, mapped: Mapping[Lookup, int]) -> Live | Foreign:
    """A rule beside the map that it would be an element of is not of our making."""
    if isinstance(one, Foreign) or lookup_of(one.rule) not in mapped:
        return one
    return Foreign(one.rule.chain.value, one.handle, f"dport of {one.rule.owner}")


def _decode_sets(values: Iterable[Json]) -> dict[Peers, Members]:
    """Those that are ours."""
    found = ((nft_sets.named(value.get("name")), value) for value in values)
    sets = {peers: nft_sets.decode(value, peers, OURS) for peers, value in found if peers}
    return {peers: members for peers, members in sets.items() if members is not None}


def _misled(one: Live | Foreign, sets: Mapping[Peers, Members]) -> Live | Foreign:
    """A rule that asks a set of another kind, under a name of ours, goes: so that the set can."""
    if isinstance(one, Foreign) or one.rule.peers is None or one.rule.peers in sets:
        return one
    return Foreign(one.rule.chain.value, one.handle, f"asks {one.rule.peers}, not ours")


def _misplaced(found: list[Live | Foreign], rules: list[Json]) -> list[Live | Foreign]:
    """A guard before a rule that sends packets on would keep them from it: it is not ours."""
    guards = {one.handle for one in found if isinstance(one, Live) and one.rule.guards}
    last = {
        str(value.get("chain")): place
        for place, value in enumerate(rules)
        if handle_of(value) not in guards
    }
    early = {
        handle_of(value)
        for place, value in enumerate(rules)
        if handle_of(value) in guards and place < last.get(str(value.get("chain")), -1)
    }
    return [
        Foreign(one.rule.chain.value, one.handle, f"guard of {one.rule.owner} before other rules")
        if isinstance(one, Live) and one.handle in early
        else one
        for one in found
    ]


def _stray(kind: str, stray: str) -> Foreign:
    return Foreign("", 0, f"{kind} {stray}", kind, stray)


def _is_name(text: object) -> bool:
    """Whether nft could have been told it; who speaks to the kernel himself can use any."""
    return isinstance(text, str) and text[:1].isalpha() and NAME_CHARACTERS.issuperset(text)


def _decode_ports(value: Json, lookup: Lookup) -> dict[int, int] | None:
    """The ports of a map from port to port, each with where it leads; None: it is not ours."""
    if not lookup.shifted:
        return {}
    spec = port_map_spec(lookup)
    pairs = value.get("elem", [])
    if {**value, **spec} != value or value.keys() - spec.keys() - {"handle", "elem"}:
        return None
    try:
        return {int(port): int(to) for port, to in pairs}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None


def _decode_map(
    value: Json, lookup: Lookup, shifts: dict[int, int] | None
) -> tuple[list[Live | Foreign], bool]:
    """The ranges of a map, and whether it is one of ours with nothing in it that we cannot name.
    Shifts are the ports that each port leads to, all of them in some range."""
    spec = map_spec(lookup)
    if shifts is None:
        return [], False
    flags = value.get("flags")  # from nft 1.1.4 on, a single one is no list
    listed = {**value, "flags": [flags]} if isinstance(flags, str) else value
    if any(listed.get(key) != want for key, want in spec.items()):
        return [], False
    pairs = listed.get("elem", [])
    if listed.keys() - spec.keys() - {"handle", "elem"} or not isinstance(pairs, list):
        return [], False
    targets: dict[object, Address] = {}
    found: list[Live | Foreign] = []
    for pair in pairs:
        try:
            found.append(_decode_element(pair, lookup, targets, shifts))
        except (AttributeError, LookupError, TypeError, ValueError):
            found += _strange_element(pair, lookup)
    return found, len(found) == len(pairs) and not shifts


def _shifted(ports: PortRange, shifts: dict[int, int]) -> int:
    """The port that the first of a range leads to, if all others follow; they are taken out."""
    to = shifts[ports.first]
    if any(shifts[port] - port != to - ports.first for port in range(ports.first, ports.last + 1)):
        raise ValueError(ports)
    for port in range(ports.first, ports.last + 1):
        del shifts[port]
    return to


def _strange_element(pair: "Any", lookup: Lookup) -> list[Foreign]:
    """One that is not ours, if its ports are told."""
    try:
        key, _ = pair
        value = key["elem"]["val"] if isinstance(key, dict) and "elem" in key else key
        first, last = value["range"] if isinstance(value, dict) else (value, value)
        if not 0 <= first <= last <= HIGHEST:
            return []
    except (LookupError, TypeError, ValueError):
        return []
    text = f"element {first}-{last} of map {name(lookup)}"
    return [Foreign("", 0, text, ELEMENT, name(lookup), (first, last))]


def _decode_element(
    pair: "Any", lookup: Lookup, targets: "dict[object, Address]", shifts: dict[int, int]
) -> Live:
    """Raises for what is not one of ours. Most elements lead to one of a few targets."""
    key, target = pair
    inner = key["elem"]
    counter = inner["counter"]
    owner = str(inner.get("comment", ""))
    if inner.keys() - {"val", "counter", "comment"} or not owner.isprintable():
        raise ValueError(pair)
    to = targets.get(target)
    if to is None:
        to = ip_address(text(target))
        if Family.of(to) is not lookup.family:
            raise ValueError(target)
        targets[target] = to
    ports = ports_of(inner["val"])
    rule = Rule(  # type: ignore[call-arg]  # in the order of its fields, as thousands are made
        lookup.chain,
        lookup.family,
        owner,
        lookup.protocol,
        ports,
        lookup.interface,
        None,
        lookup.destination,
        to,
        _shifted(ports, shifts) if lookup.shifted else None,
        lookup.share,
        None,
        None,
        False,
        None,
    )
    return Live(rule, 0, int(counter["packets"]), int(counter["bytes"]))


def _decode_chain(value: Json) -> Chain | None:
    for chain in Chain:
        if _is_as(value, chain_spec(chain)):
            return chain
    return None


def _decode_bridge(value: Json) -> Foreign | None:
    """A chain that an edit left behind."""
    for chain in Chain:
        for behind in (False, True):
            if _is_as(value, bridge_spec(chain, behind)):
                called = bridge_name(chain, behind)
                return Foreign(chain.value, 0, f"chain {called}, left by an edit", CHAIN, called)
    return None


def _is_as(value: Json, spec: Json) -> bool:
    return all(value.get(key) == want for key, want in spec.items())
