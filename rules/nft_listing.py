"""Listings of our nftables table to what is observed: the way back from rules/nft.py.

Comparison happens on decoded values only: nft writes some things differently from how it reads
them. What does not decode to a rule that we could have written is foreign.
"""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from rules import nft_sets
from rules.model import (
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
    Protocol,
    Rule,
)
from rules.nft import (
    NFPROTO,
    OURS,
    RESUMING,
    Json,
    chain_spec,
    link_key,
    lookup_verdict,
    map_spec,
    peers_end,
    port_map_spec,
    verb,
    verdict,
)
from rules.nft_terms import Terms, field
from rules.ports import HIGHEST, PortRange
from rules.problems import shown
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
    chains = [(value, _decode_chain(value)) for value in kinds.pop("chain", [])]
    tables = kinds.pop("table", [])
    unsound = ["somebody set flags on the table" for value in tables if value.get("flags")]
    unsound += [
        f"chain {shown(value.get('name'))} is not as we make it"
        for value, chain in chains
        if chain is None
    ]
    found: list[Live | Foreign] = []
    mapped: dict[Lookup, int] = {}
    rules = kinds.pop("rule", [])
    for value in rules:
        lookup = _decode_lookup(value)
        if lookup is None:
            found.append(_decode_rule(value, known))
        elif mapped.setdefault(lookup, _handle(value)) != _handle(value):
            found.append(Foreign(lookup.chain.value, _handle(value), "looks into a map once more"))
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
                unsound.append(f"there is a {kind} {shown(value.get('name'))} in it, not ours")
    return Observed(
        live=Lives(rule for rule in found if isinstance(rule, Live)),
        foreign=tuple(rule for rule in found if isinstance(rule, Foreign)),
        chains=frozenset() if unsound else frozenset(chain for _, chain in chains if chain),
        table=bool(tables),
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


def _decode_lookup(value: Json) -> Lookup | None:
    """The lookup that a rule makes, if it is one of ours."""
    try:
        return _parse_lookup(value)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _parse_lookup(value: "Any") -> Lookup | None:
    *conditions, counter, last = value["expr"]
    if "counter" not in counter or "map" not in last["dnat"]["addr"]:
        return None
    chain = Chain(value["chain"])
    family, fields, terms = _parse_matches(chain, conditions)
    word, _ = _payload(last["dnat"]["addr"]["map"]["key"])
    protocol, shifted = Protocol(word), "port" in last["dnat"]
    share = terms.share(family, protocol)
    lookup = Lookup(
        chain=chain, family=family, protocol=protocol, share=share, shifted=shifted, **fields
    )
    return lookup if last == lookup_verdict(lookup) and "comment" not in value else None


def _handle(value: Json) -> int:
    handle = value.get("handle")
    return handle if isinstance(handle, int) else 0


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
        value.get("chain"): place
        for place, value in enumerate(rules)
        if _handle(value) not in guards
    }
    early = {
        _handle(value)
        for place, value in enumerate(rules)
        if _handle(value) in guards and place < last.get(value.get("chain"), -1)
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
        to = ip_address(_text(target))
        if Family.of(to) is not lookup.family:
            raise ValueError(target)
        targets[target] = to
    ports = _ports(inner["val"])
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
        if all(value.get(key) == want for key, want in chain_spec(chain).items()):
            return chain
    return None


def _decode_rule(value: Json, known: dict[tuple[str, str, str], Rule]) -> Live | Foreign:
    """The rule, or why it cannot be one of ours: then it is foreign."""
    chain, expr = value.get("chain"), value.get("expr")
    place = (str(chain) if str(chain).isprintable() else "?", _handle(value))
    try:
        packets, octets, rest = _counted(expr)
        owner = str(value.get("comment", ""))
        content = (str(chain), owner, str(rest))
        rule = known.get(content)
        if rule is None:
            rule = known[content] = _parse(Chain(chain), owner, rest)
    except (AttributeError, LookupError, TypeError, ValueError):
        return Foreign(*place, text=_gist(expr))
    return Live(rule, place[1], packets, octets)


def _counted(expr: object) -> tuple[int, int, list[Json]]:
    """Packets and bytes of a rule, and the rest of its expressions."""
    if not isinstance(expr, list):
        raise TypeError(expr)
    rest = [item for item in expr if "counter" not in item]
    (counter,) = (item["counter"] for item in expr if "counter" in item)
    return int(counter["packets"]), int(counter["bytes"]), rest


def _parse(chain: Chain, owner: str, expr: list[Json]) -> Rule:
    """Raises for what we could not have written: the ways to differ are too many to name."""
    if not owner.isprintable():
        raise ValueError(owner)
    *conditions, last = expr
    resumes = RESUMING in conditions
    conditions = [one for one in conditions if one != RESUMING]
    families: set[Family] = set()
    target: dict[str, object] = {}
    if last in ({"accept": None}, {"drop": None}):
        if chain is not Chain.FORWARD:
            raise ValueError(last)
        target["accepts"] = last == {"accept": None}
    elif last not in ({"masquerade": None}, {"redirect": None}):
        goal = last[verb(chain)]
        if len(last) > 1 or not isinstance(goal, dict):
            raise ValueError(last)
        families.add(Family(goal["family"]))
        target["to"] = _address(goal["addr"], families)
        if "port" in goal:
            target["to_port"] = _first_port(goal["port"])
    family, fields, terms = _parse_matches(chain, conditions, families)
    share = terms.share(family, fields.get("protocol"))
    end = fields.pop("end", None)
    rule = Rule(chain=chain, family=family, owner=owner, share=share, **fields, **target)  # type: ignore[arg-type]
    if verdict(rule) != last or resumes != rule.resumes:
        raise ValueError(last)
    if end is not None and end != peers_end(rule):
        raise ValueError(end)
    return rule


def _first_port(port: object) -> int:
    """Of the target; whether all others follow it is for the caller to see."""
    if isinstance(port, int):
        return port
    pairs = port["map"]["data"]["set"]  # type: ignore[index]
    return int(min(pairs)[1])


def _parse_matches(
    chain: Chain, conditions: list[Json], families: set[Family] | None = None
) -> "tuple[Family, dict[str, Any], Terms]":
    """What a rule compares packets with; of one family, that its target may name as well."""
    families = set() if families is None else families
    fields: dict[str, Any] = {}
    terms = Terms()
    for condition in conditions:
        if not terms.take(condition):
            _parse_match(chain, condition, fields, families)
    more = terms.told(families, fields)
    if fields.keys() & more.keys():
        raise ValueError("matched twice")
    (family,) = families
    return family, {**fields, **more}, terms


def _parse_match(
    chain: Chain, condition: Json, fields: dict[str, object], families: set[Family]
) -> None:
    match = condition["match"]
    if len(condition) > 1 or not isinstance(match, dict):
        raise ValueError(condition)
    if match["op"] != "==":
        raise ValueError(match["op"])
    left, right = match["left"], match["right"]
    found: dict[str, object] = {}
    if left == {"meta": {"key": "nfproto"}}:
        families.add(_FAMILIES[right])
    elif chain is Chain.FORWARD and isinstance(right, str) and right.startswith("@"):
        protocol, name = _payload(left)
        peers = nft_sets.named(right[1:])
        if peers is None or Family(protocol) is not peers.family:
            raise ValueError(right)
        families.add(peers.family)
        found = {"peers": peers, "end": name}
    elif left == {"meta": {"key": link_key(chain)}}:
        found = {"interface": _text(right)}
    else:
        protocol, name = _payload(left)
        if name == "dport":
            found = {"protocol": Protocol(protocol), "ports": _ports(right)}
        else:
            families.add(Family(protocol))
            found = {_ENDS[name]: _address(right, families)}
    if fields.keys() & found.keys():
        raise ValueError("matched twice")
    fields.update(found)


_FAMILIES: Mapping[object, Family] = {name: family for family, name in NFPROTO.items()}
_ENDS = {"saddr": "source", "daddr": "destination"}


def _payload(left: object) -> tuple[str, str]:
    protocol, name = left["payload"]["protocol"], left["payload"]["field"]  # type: ignore[index]
    if left != field(protocol, name):
        raise ValueError(left)
    return protocol, name


def _text(right: object) -> str:
    """One name or address; a set, a prefix or a range of them is a mapping."""
    if not isinstance(right, str):
        raise TypeError(right)
    return right


def _address(right: object, families: set[Family]) -> Address:
    address = ip_address(_text(right))
    families.add(Family.of(address))
    return address


def _ports(right: object) -> PortRange:
    if isinstance(right, int):
        return PortRange(right, right)
    if isinstance(right, dict) and set(right) == {"range"}:
        first, last = right["range"]
        return PortRange(first, last)
    raise ValueError(right)


def _gist(expr: object) -> str:
    """A foreign rule in a few words, for the plan."""
    if not isinstance(expr, list) or not expr:
        return "an empty rule"
    return " ".join(_word(item) for item in expr)


def _word(item: object) -> str:
    """What a match looks at, or what kind of statement it is."""
    if not isinstance(item, dict) or not item:
        return "?"
    match = item.get("match")
    left = match.get("left") if isinstance(match, dict) else None
    for seen in left.values() if isinstance(left, dict) else ():
        if isinstance(seen, dict):
            name = seen.get("field") or seen.get("key")
            if isinstance(name, str) and name.isalnum():
                return name
    name = next(iter(item))
    return name if isinstance(name, str) and name.isprintable() else "?"
