"""Translations of others, from the rules of a table in the form that rules/netlink_rules.py gives
them (that of libnftables' JSON); what iptables saves is read by rules/saved_translations.py.

Anybody may have written them. What cannot be understood is left out; a condition that says nothing
of ports, protocols or destinations is taken to hold. Jumps are followed with what the jumping rules
ask for: kube-proxy, Docker and the portmap plugin match a port in one chain and translate it in
another. A rule that names neither ports nor a destination, on its own or by the way to it, is none.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from ipaddress import ip_address
from operator import and_

from rules.model import Address, Family, Protocol
from rules.nft import NAME, NFPROTO
from rules.occupied import Translation
from rules.ports import ALL_PORTS, HIGHEST, LOWEST, PortRange, coalesce, subtract
from rules.problems import printable
from rules.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Rule = dict[str, Any]
    Condition = tuple[Any, str, Any]  # what is compared, how, with what
    Sets = dict[tuple[str, str, str], Any]

VERDICTS = ("dnat", "redirect", "tproxy")
TARGETS = ("DNAT", "REDIRECT", "TPROXY")
JUMPS = ("jump", "goto")
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
MOST = 1_000_000  # ways through the chains of a table
MANY = 1000  # translations of a table; more are told together
DEEPEST = 64  # jumps; nftables allows 16
LIMIT = 120  # characters that say where a rule is
STRANGE = (AttributeError, LookupError, TypeError, ValueError)


class TooMany(Exception):
    """There are more ways through the chains of a table than are followed."""


class Packets(Value):
    """Those that conditions let pass, as far as they can be compared. Made by position where there
    are thousands: by name takes five times as long."""

    families: frozenset[Family] = BOTH
    protocols: frozenset[Protocol] | None = None  # None: any
    ports: tuple[PortRange, ...] | None = None  # None: any
    destination: Address | None = None  # None: any, or more than one

    def __and__(self, other: "Packets") -> "Packets":
        if other is ANY:
            return self
        if self is ANY:
            return other
        protocols, ports = other.protocols, other.ports
        if protocols is None:
            protocols = self.protocols
        elif self.protocols is not None:
            protocols &= self.protocols
        if ports is None:
            ports = self.ports
        elif self.ports is not None:
            ports = subtract(ports, subtract([ALL_PORTS], self.ports))
        families = self.families & other.families
        return Packets(families, protocols, ports, other.destination or self.destination)

    @property
    def none(self) -> bool:
        """Whether there are no such packets."""
        return self.ports == () or self.protocols == frozenset() or not self.families


ANY = Packets()
Branch = tuple[Packets, str | None]  # where such packets go: to a chain; None: they are translated


class Chains:
    """The chains of a table, with what translates in them and where their rules jump."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._branches: dict[str, dict[Branch, None]] = {}
        self._bases: dict[str, None] = {}
        self._found: dict[str, dict[Packets, str]] = {}
        self._left = MOST

    def base(self, chain: str) -> None:
        """Packets come to that chain from the kernel."""
        self._bases[chain] = None

    def add(self, chain: str, branches: "Iterable[Branch]") -> None:
        """A rule of that chain does this."""
        self._branches.setdefault(chain, {}).update(dict.fromkeys(branches))

    def translations(self) -> Iterator[Translation]:
        """All of them. A chain that nothing jumps to counts like one that packets come to: the jump
        may be made in a moment."""
        targets = {to for branches in self._branches.values() for _, to in branches}
        roots = [*self._bases, *(one for one in self._branches if one not in targets)]
        told: dict[tuple[Packets, str], None] = {}
        for root in dict.fromkeys(roots):
            told.update(dict.fromkeys(self._through(root, 0).items()))
        for packets, chain in _merged(told) if len(told) > MANY else told:
            yield from _translated(packets, f"{self._where}, chain {chain}")

    def _through(self, chain: str, depth: int) -> "dict[Packets, str]":
        """What is translated of what comes to a chain, and in which chain it is told apart."""
        if chain in self._found:
            return self._found[chain]
        if depth > DEEPEST:
            raise TooMany
        found: dict[Packets, str] = {}
        self._found[chain] = {}  # what leads back to it leads nowhere else
        for packets, to in self._branches.get(chain, ()):
            onward = {ANY: chain} if to is None else self._through(to, depth + 1)
            for there, where in onward.items():
                both = packets & there
                if not both.none:
                    closer = there.ports is None and (
                        both.ports is not None or there.destination is None
                    )
                    found.setdefault(both, chain if closer else where)
            self._left -= len(onward)
            if self._left < 0:
                raise TooMany
        self._found[chain] = found
        return found


def _merged(told: "Iterable[tuple[Packets, str]]") -> "Iterator[tuple[Packets, str]]":
    """With the ports of one chain together that are for the same packets otherwise."""
    ports: dict[tuple[Packets, str], list[PortRange]] = {}
    for one, chain in told:
        if one.ports is None:
            yield one, chain
        else:
            rest = Packets(one.families, one.protocols, None, one.destination)
            ports.setdefault((rest, chain), []).extend(one.ports)
    for (rest, chain), some in ports.items():
        yield replace(rest, ports=coalesce(some)), chain


def _translated(one: Packets, where: str) -> Iterator[Translation]:
    if one.none or (one.ports or one.destination) is None:
        return
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


def listed(listing: Iterable[Mapping[str, object]]) -> tuple[Translation, ...]:
    """What others translate in tables that have a nat chain, by what libnftables lists."""
    sets, tables, rules = _sorted_out(listing)
    for rule in rules:
        try:
            chains = tables[rule["family"], rule["table"]]
            chains.add(rule["chain"], branches(rule, sets))
        except STRANGE:
            continue
    return tuple(dict.fromkeys(one for chains in tables.values() for one in chains.translations()))


def _sorted_out(
    listing: Iterable[Mapping[str, object]],
) -> "tuple[Sets, dict[tuple[str, str], Chains], list[Rule]]":
    """The elements of each set and map, the chains of tables of others that have one for nat, and
    the rules."""
    sets: Sets = {}
    tables: dict[tuple[str, str], Chains] = {}
    rules: list[Rule] = []
    for entry in listing:
        try:
            kind, value = _only_entry(entry)
            table = (str(value["family"]), str(value["table"]))
        except STRANGE:
            continue
        if kind in ("set", "map"):
            sets[*table, str(value.get("name"))] = value.get("elem", [])
        elif kind == "chain" and value.get("type") == "nat" and table != ("inet", NAME):
            chains = tables.setdefault(table, Chains(f"table {table[0]} {table[1]}"))
            chains.base(str(value.get("name")))
        elif kind == "rule":
            rules.append(value)
    return sets, tables, rules


def _only_entry(entry: "Any") -> "tuple[str, dict[str, Any]]":
    ((kind, value),) = entry.items()
    if not isinstance(value, dict):
        raise TypeError(value)
    return kind, value


def branches(rule: "Rule", sets: "Sets") -> list[Branch]:
    """What a rule translates, and where it jumps; nothing, where it does neither."""
    target, family, table = _target(rule), rule["family"], rule["table"]
    jumps = [item[kind]["target"] for item in rule["expr"] for kind in JUMPS if kind in item]
    spread = [item["vmap"] for item in rule["expr"] if "vmap" in item]
    if target is None and not jumps and not spread:
        return []
    found = [ANY] if family == "inet" else [Packets(families=frozenset({FAMILIES[family]}))]
    matches = [item["match"] for item in rule["expr"] if "match" in item]
    conditions = [(match["left"], match["op"], match["right"]) for match in matches]
    for key, operator, right in (*conditions, *(target or ())):
        elements = _elements(right, (family, table), sets)
        found = _product(found, _compared(key, operator, elements))
    made: list[Branch] = [(one, None) for one in found if target is not None]
    made += [(one, to) for one in found for to in jumps]
    for one in spread:
        made += _spread(found, one, (family, table), sets)
    return [(packets, to) for packets, to in made if not packets.none]


def _spread(
    found: list[Packets], vmap: "Any", table: tuple[str, str], sets: "Sets"
) -> Iterator[Branch]:
    """Where the elements of a verdict map lead."""
    data = vmap["data"]
    elements = sets[*table, data[1:]] if isinstance(data, str) else data["set"]
    keys: dict[str, list[Any]] = {}
    for key, verdict in elements:
        for kind in JUMPS:
            if kind in _mapping(verdict):
                plain = key["elem"]["val"] if "elem" in _mapping(key) else key
                keys.setdefault(verdict[kind]["target"], []).append(plain)
    for to, some in keys.items():
        for packets in _product(found, _compared(vmap["key"], "==", some)):
            yield packets, to


def _product(some: list[Packets], others: list[Packets]) -> list[Packets]:
    if min(len(some), len(others)) > 1 and len(some) * len(others) > COMBINATIONS:
        raise ValueError(len(some))
    return [one & another for one in some for another in others]


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


def _compared(key: "Any", operator: str, elements: "list[Any]") -> list[Packets]:
    """What passes such a condition, ports of the same destination together."""
    if operator == "==" and len(elements) == 1:
        return [_element(key, elements[0])]
    if operator == "!=":
        return [_unlike(key, elements)]
    if operator in BOUNDS:
        elements = [{"range": BOUNDS[operator](bound)} for bound in elements]
    parts = [_element(key, element) for element in elements]
    if all(one.ports is None for one in parts):
        return list(dict.fromkeys(parts))
    ports: dict[Packets, list[PortRange]] = {}
    for one in parts:
        ports.setdefault(replace(one, ports=None), []).extend(one.ports or ())
    return [replace(one, ports=coalesce(all_)) for one, all_ in ports.items()]


def _element(key: "Any", element: "Any") -> Packets:
    if "concat" not in key:
        return _read(key, element)
    keys = key["concat"]
    values = element["concat"] if element != "*" else ["*"] * len(keys)
    return reduce(and_, map(_read, keys, values))


def _unlike(key: "Any", elements: "list[Any]") -> Packets:
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


def _read(key: "Any", value: "Any") -> Packets:
    """The packets in which that has this value."""
    match key:
        case {"payload": {"protocol": "th", "field": "dport" | "port"}}:
            return Packets(BOTH, None, ports_of(value), None)
        case {"payload": {"protocol": protocol, "field": "dport"}}:
            return Packets(protocols=protocols_of(protocol), ports=ports_of(value))
        case {"payload": {"protocol": "ip" | "ip6" as family, "field": "daddr"}}:
            plain = isinstance(value, str) and value != "*"
            address = ip_address(value) if plain else None
            return Packets(families=frozenset({FAMILIES[family]}), destination=address)
        case {"payload": {"field": "protocol" | "nexthdr"}} | {"meta": {"key": "l4proto"}}:
            ranged = isinstance(value, dict)  # of numbers, which nobody writes
            return ANY if ranged else Packets(BOTH, protocols_of(value), None, None)
        case {"meta": {"key": "nfproto"}}:
            return Packets(families=frozenset({VERSIONS[value]}))
    return ANY


def protocols_of(name: object) -> frozenset[Protocol]:
    """Those of the name that have ports of interest."""
    return frozenset({PROTOCOLS[name]} if name in PROTOCOLS else ())


def ports_of(value: "Any") -> tuple[PortRange, ...]:
    if value == "*":  # all that no other element holds
        return (ALL_PORTS,)
    first, last = value["range"] if isinstance(value, dict) else (value, value)
    return (PortRange(max(first, LOWEST), last),) if last >= LOWEST else ()
