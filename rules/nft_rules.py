"""One rule of a listing, taken apart: what we could have written, or in a few words what it is."""

from collections.abc import Mapping
from ipaddress import ip_address

from rules import nft_sets
from rules.model import (
    FILTERS,
    POLICED,
    Address,
    Chain,
    Family,
    Foreign,
    Live,
    Lookup,
    Protocol,
    Rule,
    link_name,
)
from rules.nft import (
    BOUND_FOR_LOOPBACK,
    NFPROTO,
    RESUMING,
    Json,
    link_key,
    lookup_verdict,
    peers_end,
    verb,
    verdict,
)
from rules.nft_terms import Terms, field
from rules.places import LOOPBACK_NETWORK
from rules.ports import PortRange

HIGHEST_HANDLE = (1 << 64) - 1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def decode_lookup(value: Json) -> Lookup | None:
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


def handle_of(value: Json) -> int:
    handle = value.get("handle")
    return handle if isinstance(handle, int) and 0 < handle <= HIGHEST_HANDLE else 0


def decode_rule(value: Json, known: dict[tuple[str, str, str], Rule]) -> Live | Foreign:
    """The rule, or why it cannot be one of ours: then it is foreign."""
    chain, expr = value.get("chain"), value.get("expr")
    place = (str(chain) if str(chain).isprintable() else "?", handle_of(value))
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
    resumes, shields = RESUMING in conditions, BOUND_FOR_LOOPBACK in conditions
    conditions = [one for one in conditions if one not in (RESUMING, BOUND_FOR_LOOPBACK)]
    families: set[Family] = set()
    target: dict[str, object] = {}
    if expr.count(BOUND_FOR_LOOPBACK) != (chain is Chain.RAW):
        raise ValueError(expr)
    if shields:
        families.add(Family.IP)
        target["peer"] = LOOPBACK_NETWORK
    if last in ({"accept": None}, {"drop": None}):
        if chain not in FILTERS:
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
    elif chain in POLICED and isinstance(right, str) and right.startswith("@"):
        protocol, name = _payload(left)
        peers = nft_sets.named(right[1:])
        if peers is None or Family(protocol) is not peers.family:
            raise ValueError(right)
        families.add(peers.family)
        found = {"peers": peers, "end": name}
    elif left == {"meta": {"key": link_key(chain)}}:
        found = {"interface": link_name(text(right))}
    else:
        protocol, name = _payload(left)
        if name == "dport":
            found = {"protocol": Protocol(protocol), "ports": ports_of(right)}
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


def text(right: object) -> str:
    """One name or address; a set, a prefix or a range of them is a mapping."""
    if not isinstance(right, str):
        raise TypeError(right)
    return right


def _address(right: object, families: set[Family]) -> Address:
    address = ip_address(text(right))
    families.add(Family.of(address))
    return address


def ports_of(right: object) -> PortRange:
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
