"""Translations of others, from what libnftables lists and from what iptables saves.

Anybody may have written them. What cannot be understood is left out; a condition that says nothing
of ports, protocols or destinations is taken to hold. A rule that names neither ports nor a
destination is none: the chains end so to which kube-proxy, KubeVirt and Docker jump by port.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from ipaddress import ip_address, ip_network
from operator import and_

from rules.model import Address, Family, Protocol
from rules.nft import NAME, NFPROTO
from rules.occupied import Translation
from rules.ports import ALL_PORTS, HIGHEST, LOWEST, PortRange, coalesce, subtract
from rules.problems import printable
from rules.values import Value, replace
from rules.xtables import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Rule = dict[str, Any]
    Condition = tuple[Any, str, Any]  # what is compared, how, with what
    Sets = dict[tuple[str, str, str], Any]

VERDICTS = ("dnat", "redirect", "tproxy")
TARGETS = ("DNAT", "REDIRECT", "TPROXY")
HIDING = ("tcp", "udp", "sctp", "multiport")  # matches of iptables: libnftables tells no ports
PROTOCOLS: Mapping[object, Protocol] = {
    **{one.value: one for one in Protocol},
    6: Protocol.TCP,
    17: Protocol.UDP,
    132: Protocol.SCTP,
}
FAMILIES: Mapping[object, Family] = {one.value: one for one in Family}
VERSIONS: Mapping[object, Family] = {name: family for family, name in NFPROTO.items()}
BOTH = frozenset(Family)
COMBINATIONS = 10_000  # of the elements of two sets in one rule; with more it is not understood
LIMIT = 120  # characters that say where a rule is
STRANGE = (AttributeError, LookupError, TypeError, ValueError)


class _Packets(Value, kw_only=True):
    """Those that conditions let pass, as far as they can be compared."""

    families: frozenset[Family] = BOTH
    protocols: frozenset[Protocol] | None = None  # None: any
    ports: tuple[PortRange, ...] | None = None  # None: any
    destination: Address | None = None  # None: any, or more than one

    def __and__(self, other: "_Packets") -> "_Packets":
        protocols, ports = other.protocols, other.ports
        if protocols is None:
            protocols = self.protocols
        elif self.protocols is not None:
            protocols &= self.protocols
        if ports is None:
            ports = self.ports
        elif self.ports is not None:
            ports = subtract(ports, subtract([ALL_PORTS], self.ports))
        return _Packets(
            families=self.families & other.families,
            protocols=protocols,
            ports=ports,
            destination=other.destination or self.destination,
        )


ANY = _Packets()


def _translated(packets: Iterable[_Packets], where: str) -> Iterator[Translation]:
    for one in packets:
        if one.ports == () or not one.families or (one.ports or one.destination) is None:
            continue
        named = [each for each in Protocol if each in (one.protocols or ())]
        for protocol in [None] if one.protocols is None else named:
            yield Translation(
                where=printable(where, LIMIT),
                family=None if one.families == BOTH else min(one.families, key=_value),
                protocol=protocol,
                ports=one.ports or (),
                destination=one.destination,
            )


def _value(family: Family) -> str:
    return family.value


# ------------------------------------------------------------------------------------- libnftables


def listed(listing: Iterable[Mapping[str, object]]) -> tuple[Translation, ...]:
    """What others translate in tables that have a nat chain."""
    sets, rules = _sorted_out(listing)
    found: dict[Translation, None] = {}
    for rule in rules:
        try:
            if not _hides_ports(rule):
                where = f"table {rule['family']} {rule['table']}, chain {rule['chain']}"
                found.update(dict.fromkeys(_translated(_packets(rule, sets), where)))
        except STRANGE:
            continue
    return tuple(found)


def hidden(listing: Iterable[Mapping[str, object]]) -> tuple[Family, ...]:
    """The families in which iptables made translations whose ports only iptables itself tells."""
    found = set()
    for rule in _sorted_out(listing)[1]:
        try:
            if _hides_ports(rule) and _target(rule) is not None:
                found.add(FAMILIES[rule["family"]])
        except STRANGE:
            continue
    return tuple(family for family in Family if family in found)


def _sorted_out(listing: Iterable[Mapping[str, object]]) -> "tuple[Sets, list[Rule]]":
    """The elements of each set and map, and the rules of others in tables with a nat chain."""
    sets: Sets = {}
    rules: list[tuple[object, Rule]] = []
    nat: set[object] = set()
    for entry in listing:
        try:
            kind, value = _only_entry(entry)
            table = (str(value["family"]), str(value["table"]))
        except STRANGE:
            continue
        if kind in ("set", "map"):
            sets[*table, str(value.get("name"))] = value.get("elem", [])
        elif kind == "chain" and value.get("type") == "nat":
            nat.add(table)
        elif kind == "rule" and table != ("inet", NAME):
            rules.append((table, value))
    return sets, [rule for table, rule in rules if table in nat]


def _only_entry(entry: "Any") -> "tuple[str, dict[str, Any]]":
    ((kind, value),) = entry.items()
    if not isinstance(value, dict):
        raise TypeError(value)
    return kind, value


def _hides_ports(rule: "Rule") -> bool:
    return any(
        item["xt"]["type"] == "match" and item["xt"]["name"] in HIDING
        for item in rule["expr"]
        if item.get("xt")
    )


def _packets(rule: "Rule", sets: "Sets") -> list[_Packets]:
    """What a rule translates: nothing, where that is not what it does."""
    target = _target(rule)
    if target is None:
        return []
    family, table = rule["family"], rule["table"]
    found = [_Packets(families=BOTH if family == "inet" else frozenset({FAMILIES[family]}))]
    matches = [item["match"] for item in rule["expr"] if "match" in item]
    conditions = [(match["left"], match["op"], match["right"]) for match in matches]
    for key, operator, right in (*conditions, *target):
        elements = _elements(right, (family, table), sets)
        some = _compared(key, operator, elements)
        if min(len(some), len(found)) > 1 and len(some) * len(found) > COMBINATIONS:
            raise ValueError(rule)
        found = [one & another for one in found for another in some]
    return found


def _target(rule: "Rule") -> "list[Condition] | None":
    """What the target of a translation asks for: its family, and a key of each map in which it is
    looked for. None: the rule is no translation."""
    for item in rule["expr"]:
        match item:
            case {"xt": {"type": "target", "name": name}} if name in TARGETS:
                return []
        for name in VERDICTS:
            if name in item:
                return _asked_by(item[name] or {})
    return None


def _asked_by(target: "dict[str, Any]") -> "list[Condition]":
    maps = [part["map"] for part in target.values() if "map" in _mapping(part)]
    asked: list[Condition] = [(one["key"], "==", one["data"]) for one in maps]
    if "family" in target:
        asked.append(({"meta": {"key": "nfproto"}}, "==", NFPROTO[FAMILIES[target["family"]]]))
    return asked


def _mapping(part: object) -> "Mapping[str, Any]":
    return part if isinstance(part, dict) else {}


def _elements(right: "Any", table: tuple[str, str], sets: "Sets") -> "list[Any]":
    """Each that is compared with: of maps, the keys."""
    elements = [right]
    if isinstance(right, str) and right.startswith("@"):
        elements = sets[*table, right[1:]]
    elif "set" in _mapping(right):
        elements = right["set"]
    keys = [each[0] if isinstance(each, list) else each for each in elements]
    return [key["elem"]["val"] if "elem" in _mapping(key) else key for key in keys]


def _compared(key: "Any", operator: str, elements: "list[Any]") -> list[_Packets]:
    """What passes such a condition, ports of the same destination together."""
    if operator == "!=":
        return [_unlike(key, elements)]
    if operator in BOUNDS:
        elements = [{"range": BOUNDS[operator](bound)} for bound in elements]
    parts = [_element(key, element) for element in elements]
    if all(one.ports is None for one in parts):
        return list(dict.fromkeys(parts))
    ports: dict[_Packets, list[PortRange]] = {}
    for one in parts:
        ports.setdefault(replace(one, ports=None), []).extend(one.ports or ())
    return [replace(one, ports=coalesce(all_)) for one, all_ in ports.items()]


def _element(key: "Any", element: "Any") -> _Packets:
    if "concat" not in key:
        return _read(key, element)
    keys = key["concat"]
    values = element["concat"] if element != "*" else ["*"] * len(keys)
    return reduce(and_, map(_read, keys, values))


def _unlike(key: "Any", elements: "list[Any]") -> _Packets:
    """All others than these: of ports only."""
    match key:
        case {"payload": {"field": "dport"}}:
            held = [_read(key, element) for element in elements]
            ports = [each for one in held for each in one.ports or ()]
            return replace(held[0] if held else ANY, ports=subtract([ALL_PORTS], ports))
        case {"payload": {"field": "daddr"}}:
            return _read(key, None)
    return ANY


BOUNDS: "Mapping[str, Callable[[Any], list[Any]]]" = {
    "<": lambda bound: [0, bound - 1],
    "<=": lambda bound: [0, bound],
    ">": lambda bound: [bound + 1, HIGHEST],
    ">=": lambda bound: [bound, HIGHEST],
}


def _read(key: "Any", value: "Any") -> _Packets:
    """The packets in which that has this value."""
    match key:
        case {"payload": {"protocol": "th", "field": "dport"}}:
            return _Packets(ports=_ports(value))
        case {"payload": {"protocol": protocol, "field": "dport"}}:
            return _Packets(protocols=_protocols(protocol), ports=_ports(value))
        case {"payload": {"protocol": "ip" | "ip6" as family, "field": "daddr"}}:
            plain = isinstance(value, str) and value != "*"
            address = ip_address(value) if plain else None
            return _Packets(families=frozenset({FAMILIES[family]}), destination=address)
        case {"payload": {"field": "protocol" | "nexthdr"}} | {"meta": {"key": "l4proto"}}:
            return _Packets(protocols=_protocols(value))
        case {"meta": {"key": "nfproto"}}:
            return _Packets(families=frozenset({VERSIONS[value]}))
    return ANY


def _protocols(name: object) -> frozenset[Protocol]:
    """Those of the name that have ports of interest."""
    return frozenset({PROTOCOLS[name]} if name in PROTOCOLS else ())


def _ports(value: "Any") -> tuple[PortRange, ...]:
    if value == "*":  # all that no other element holds
        return (ALL_PORTS,)
    first, last = value["range"] if isinstance(value, dict) else (value, value)
    return (PortRange(max(first, LOWEST), last),) if last >= LOWEST else ()


# ---------------------------------------------------------------------------------------- iptables


def saved(text: str, family: Family, table: str) -> tuple[Translation, ...]:
    """What others translate in the table nat, by what iptables-save says of it."""
    found: dict[Translation, None] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("*"):
            section = line.strip()
        if section == "*nat" and line.startswith("-A "):
            try:
                found.update(dict.fromkeys(_saved_rule(line, family, table)))
            except STRANGE:
                continue
    return tuple(found)


def _saved_rule(line: str, family: Family, table: str) -> Iterator[Translation]:
    from shlex import split

    # Most lines hold no quotes, and shlex goes over each character by itself.
    _, chain, *words = split(line) if set(line) & QUOTES else line.split()
    found, negated, target = _Packets(families=frozenset({family})), False, ""
    left = iter(words)
    for word in left:
        if word == "-j":
            target = next(left, "")
            break  # the rest is for the target
        if word in OPTIONS:
            found &= OPTIONS[word](next(left, ""), negated)
        negated = word == "!"
    if target in TARGETS and not chain.startswith(PREFIX):
        yield from _translated([found], f"{table}, chain {chain}")


def _saved_protocol(word: str, negated: bool) -> _Packets:
    number = int(word) if word.isdecimal() else word
    return ANY if negated else _Packets(protocols=_protocols(number))


def _saved_destination(word: str, negated: bool) -> _Packets:
    network = ip_network(word)
    plain = network.num_addresses == 1 and not negated
    return _Packets(destination=network.network_address) if plain else ANY


def _saved_ports(word: str, negated: bool) -> _Packets:
    pairs = [part.partition(":") for part in word.split(",")]
    ports = [
        each
        for first, _, last in pairs
        for each in _ports({"range": [int(first), int(last or first)]})
    ]
    return _Packets(ports=subtract([ALL_PORTS], ports) if negated else coalesce(ports))


QUOTES = frozenset("\"'\\")
OPTIONS: "Mapping[str, Callable[[str, bool], _Packets]]" = {
    "-p": _saved_protocol,
    "-d": _saved_destination,
    "--dport": _saved_ports,
    "--dports": _saved_ports,
    "--ports": _saved_ports,
    "--comment": lambda _word, _negated: ANY,
}
