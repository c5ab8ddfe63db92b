"""Listings of our nftables table to what is observed: the way back from rules/nft.py.

Comparison happens on decoded values only: nft writes some things differently from how it reads
them. What does not decode to a rule that we could have written is foreign.
"""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from rules.model import Address, Chain, Family, Foreign, Live, Observed, Protocol, Rule
from rules.nft import NFPROTO, Json, chain_spec, field, link_key, verb, verdict
from rules.ports import PortRange
from rules.problems import shown


def decode(
    listing: Iterable[Mapping[str, object]], known: dict[tuple[str, str, str], Rule] | None = None
) -> Observed:
    """What a listing of our table holds; `known` remembers rules from one listing to the next."""
    known = {} if known is None else known
    found: list[Live | Foreign] = []
    chains: set[Chain] = set()
    unsound: list[str] = []
    table = False
    for entry in listing:
        kind, value = next(iter(entry.items()), ("", None))
        if not isinstance(value, dict):
            continue
        if kind == "table":
            table = True
            if value.get("flags"):
                unsound.append("somebody set flags on the table")
        elif kind == "chain":
            chain = _decode_chain(value)
            if chain is None:
                unsound.append(f"chain {shown(value.get('name'))} is not as we make it")
            else:
                chains.add(chain)
        elif kind == "rule":
            found.append(_decode_rule(value, known))
        elif kind != "metainfo":
            unsound.append(f"there is a {kind} {shown(value.get('name'))} in it that is not ours")
    return Observed(
        live=tuple(rule for rule in found if isinstance(rule, Live)),
        foreign=tuple(rule for rule in found if isinstance(rule, Foreign)),
        chains=frozenset() if unsound else frozenset(chains),
        table=table,
        unsound="; ".join(sorted(set(unsound))),
    )


def _decode_chain(value: Json) -> Chain | None:
    for chain in Chain:
        if all(value.get(key) == want for key, want in chain_spec(chain).items()):
            return chain
    return None


def _decode_rule(value: Json, known: dict[tuple[str, str, str], Rule]) -> Live | Foreign:
    """The rule, or why it cannot be one of ours: then it is foreign."""
    chain, handle, expr = value.get("chain"), value.get("handle"), value.get("expr")
    name = str(chain) if str(chain).isprintable() else "?"
    place = (name, handle if isinstance(handle, int) else 0)
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
    fields: dict[str, object] = {}
    families: set[Family] = set()
    for condition in conditions:
        _parse_match(chain, condition, fields, families)
    if last != {"masquerade": None} or chain is not Chain.POSTROUTING:
        target = last[verb(chain)]
        if len(last) > 1 or not isinstance(target, dict):
            raise ValueError(last)
        families.add(Family(target["family"]))
        fields["to"] = _address(target["addr"], families)
        if "port" in target:
            fields["to_port"] = _first_port(target["port"])
    (family,) = families
    rule = Rule(chain=chain, family=family, owner=owner, **fields)  # type: ignore[arg-type]
    if rule.to is not None and verdict(rule) != last:
        raise ValueError(last)
    return rule


def _first_port(port: object) -> int:
    """Of the target; whether all others follow it is for the caller to see."""
    if isinstance(port, int):
        return port
    pairs = port["map"]["data"]["set"]  # type: ignore[index]
    return int(min(pairs)[1])


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
