"""Plans to the commands of libnftables, or to a script for nft; rules/nft_listing.py reads them
back."""

from collections.abc import Iterable, Iterator

from rules.model import Chain, Family, Lookup, Protocol, Rule
from rules.nft_steps import (
    AddLookup,
    AddRule,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    EraseStray,
    Fill,
    MakeChain,
    MakeMap,
    MakeTable,
    Step,
    steps,
)
from rules.plan import Plan
from rules.ports import PortRange
from rules.shapes import name

NAME = "portranger"
TABLE = {"family": "inet", "name": NAME}
OURS = {"family": "inet", "table": NAME}
PRIORITY = {Chain.PREROUTING: -101, Chain.OUTPUT: -101, Chain.POSTROUTING: 99}
NFPROTO = {Family.IP: "ipv4", Family.IP6: "ipv6"}
ADDRESSES = {Family.IP: "ipv4_addr", Family.IP6: "ipv6_addr"}

Json = dict[str, object]


def encode(plan: Plan) -> list[Json]:
    """The commands of one transaction; empty where the rules need nothing done."""
    return commands(steps(plan))


def commands(found: Iterable[Step]) -> list[Json]:
    """Steps in the words of libnftables."""
    return [_command(step) for step in found]


def _command(step: Step) -> Json:
    match step:
        case DropTable():
            return {"delete": {"table": TABLE}}
        case MakeTable(exclusive):
            return {"create" if exclusive else "add": {"table": TABLE}}
        case MakeChain(chain):
            return {"add": {"chain": chain_spec(chain)}}
        case DropRule(chain, handle):
            return {"delete": {"rule": {**OURS, "chain": chain, "handle": handle}}}
        case DropStray(kind, stray):
            return {"delete": {kind: {**OURS, "name": stray}}}
        case EraseStray(stray, ports):
            keys: list[object] = [_span_json(*ports)]
            return {"delete": {"element": {**OURS, "name": stray, "elem": keys}}}
        case DropMap(lookup):
            return {"delete": {"map": {**OURS, "name": name(lookup)}}}
        case Erase(lookup, rules):
            keys = [ports_json(rule.ports) for rule in rules]
            return {"delete": {"element": {**OURS, "name": name(lookup), "elem": keys}}}
        case MakeMap(lookup):
            return {"add": {"map": map_spec(lookup)}}
        case Fill(lookup, rules):
            pairs = [element(rule) for rule in rules]
            return {"add": {"element": {**OURS, "name": name(lookup), "elem": pairs}}}
        case AddRule(rule, first):
            return {_put(first): {"rule": _rule(rule)}}
        case AddLookup(lookup, first):
            return {_put(first): {"rule": lookup_rule(lookup)}}


def _put(first: bool) -> str:
    return "insert" if first else "add"


def script(plan: Plan) -> str:
    """The same transaction as text for `nft -f`."""
    return "".join(f"{_line(step)}\n" for step in steps(plan))


def _line(step: Step) -> str:
    match step:
        case DropTable():
            return f"delete table inet {NAME}"
        case MakeTable(exclusive):
            return f"{'create' if exclusive else 'add'} table inet {NAME}"
        case MakeChain(chain):
            return (
                f"add chain inet {NAME} {chain.value} {{ type nat hook {chain.value}"
                f" priority {PRIORITY[chain]}; policy accept; }}"
            )
        case DropRule(chain, handle):
            return f"delete rule inet {NAME} {chain} handle {handle}"
        case DropStray(kind, stray):
            return f"delete {kind} inet {NAME} {stray}"
        case EraseStray(stray, (first, last)):
            return f"delete element inet {NAME} {stray} {{ {first}-{last} }}"
        case DropMap(lookup):
            return f"delete map inet {NAME} {name(lookup)}"
        case Erase(lookup, rules):
            keys = ", ".join(str(rule.ports) for rule in rules)
            return f"delete element inet {NAME} {name(lookup)} {{ {keys} }}"
        case MakeMap(lookup):
            return f"add map inet {NAME} {map_words(lookup)}"
        case Fill(lookup, rules):
            pairs = ", ".join(f'{r.ports} comment "{r.owner}" : {r.to}' for r in rules)
            return f"add element inet {NAME} {name(lookup)} {{ {pairs} }}"
        case AddRule(rule, first):
            return f"{_put(first)} rule inet {NAME} {rule.chain.value} {statement(rule)}"
        case AddLookup(lookup, first):
            where = f"{_put(first)} rule inet {NAME} {lookup.chain.value}"
            return f"{where} {lookup_statement(lookup)}"


def statement(rule: Rule) -> str:
    """A rule in the words of nft."""
    words: list[str] = []
    if rule.interface is not None:
        words.append(f'{link_key(rule.chain)} "{rule.interface}"')
    if rule.source is None and rule.destination is None:
        words.append(f"meta nfproto {NFPROTO[rule.family]}")
    if rule.source is not None:
        words.append(f"{rule.family.value} saddr {rule.source}")
    if rule.destination is not None:
        words.append(f"{rule.family.value} daddr {rule.destination}")
    if rule.protocol is not None:
        words.append(f"{rule.protocol.value} dport {rule.ports}")
    words.append("counter")
    words.append(_itself(rule) if rule.to is None else _translation(rule))
    words.append(f'comment "{rule.owner}"')
    return " ".join(words)


def lookup_statement(lookup: Lookup) -> str:
    """The rule of a map in the words of nft."""
    words = [f'iifname "{lookup.interface}"'] if lookup.interface is not None else []
    if lookup.destination is None:
        words.append(f"meta nfproto {NFPROTO[lookup.family]}")
    else:
        words.append(f"{lookup.family.value} daddr {lookup.destination}")
    target = f"{lookup.protocol.value} dport map @{name(lookup)}"
    return " ".join([*words, "counter", f"dnat {lookup.family.value} to {target}"])


def map_words(lookup: Lookup) -> str:
    """A map as nft defines it; every element counts for itself."""
    kind = f"inet_service : {ADDRESSES[lookup.family]}"
    return f"{name(lookup)} {{ type {kind}; flags interval; counter; }}"


def _itself(rule: Rule) -> str:
    """Without a target, it is the namespace's own address that is put in."""
    return "redirect" if rule.guards else "masquerade"


def _translation(rule: Rule) -> str:
    words = f"{verb(rule.chain)} {rule.family.value} to "
    if rule.ports is None or rule.to_port is None:
        return words + str(rule.to)
    words += f"[{rule.to}]:" if rule.family is Family.IP6 else f"{rule.to}:"
    if len(rule.ports) == 1:
        return words + str(rule.to_port)
    pairs = ", ".join(f"{port} : {to}" for port, to in _port_pairs(rule.ports, rule.to_port))
    return f"{words} {rule.protocol.value if rule.protocol else ''} dport map {{ {pairs} }}"


def _port_pairs(ports: PortRange, to_port: int) -> list[list[int]]:
    """Port by port: nft's own `dnat to G:7000-7009` sends every port of a range to the first."""
    return [[ports.first + i, to_port + i] for i in range(len(ports))]


def chain_spec(chain: Chain) -> Json:
    """A chain of ours as it must be."""
    return {
        **OURS,
        "name": chain.value,
        "type": "nat",
        "hook": chain.value,
        "prio": PRIORITY[chain],
        "policy": "accept",
    }


def map_spec(lookup: Lookup) -> Json:
    """A map of ours as it must be."""
    return {
        **OURS,
        "name": name(lookup),
        "type": "inet_service",
        "map": ADDRESSES[lookup.family],
        "flags": ["interval"],
        "stmt": [{"counter": None}],
    }


def element(rule: Rule) -> list[object]:
    """A range in its map, with where it leads."""
    return [{"elem": {"val": ports_json(rule.ports), "comment": rule.owner}}, str(rule.to)]


def ports_json(ports: PortRange | None) -> object:
    """A port, or several."""
    if ports is None:
        raise ValueError("all ports are no range of a map")
    return _span_json(ports.first, ports.last)


def _span_json(first: int, last: int) -> object:
    return first if first == last else {"range": [first, last]}


def lookup_rule(lookup: Lookup) -> Json:
    """The rule that looks into a map."""
    return {
        **OURS,
        "chain": lookup.chain.value,
        "expr": [*_lookup_matches(lookup), {"counter": None}, lookup_verdict(lookup)],
    }


def _lookup_matches(lookup: Lookup) -> Iterator[Json]:
    if lookup.interface is not None:
        yield _equal({"meta": {"key": "iifname"}}, lookup.interface)
    if lookup.destination is None:
        yield _equal({"meta": {"key": "nfproto"}}, NFPROTO[lookup.family])
    else:
        yield _equal(field(lookup.family.value, "daddr"), str(lookup.destination))


def lookup_verdict(lookup: Lookup) -> Json:
    """Where its port leads a packet."""
    key = field(lookup.protocol.value, "dport")
    return {
        "dnat": {
            "family": lookup.family.value,
            "addr": {"map": {"key": key, "data": f"@{name(lookup)}"}},
        }
    }


def _rule(rule: Rule) -> Json:
    return {
        **OURS,
        "chain": rule.chain.value,
        "comment": rule.owner,
        "expr": [*_matches(rule), {"counter": None}, verdict(rule)],
    }


def _matches(rule: Rule) -> Iterator[Json]:
    if rule.interface is not None:
        yield _equal({"meta": {"key": link_key(rule.chain)}}, rule.interface)
    if rule.source is None and rule.destination is None:
        yield _equal({"meta": {"key": "nfproto"}}, NFPROTO[rule.family])
    if rule.source is not None:
        yield _equal(field(rule.family.value, "saddr"), str(rule.source))
    if rule.destination is not None:
        yield _equal(field(rule.family.value, "daddr"), str(rule.destination))
    if rule.protocol is not None and rule.ports is not None:
        yield _equal(field(rule.protocol.value, "dport"), ports_json(rule.ports))


def _equal(left: Json, right: object) -> Json:
    return {"match": {"op": "==", "left": left, "right": right}}


def field(protocol: str, name: str) -> Json:
    """A field of a header."""
    return {"payload": {"protocol": protocol, "field": name}}


def verdict(rule: Rule) -> Json:
    """The last expression of a rule: where the packet goes, or whom it comes from."""
    if rule.to is None:
        return {_itself(rule): None}
    target: Json = {"family": rule.family.value, "addr": str(rule.to)}
    if rule.protocol is not None and rule.ports is not None and rule.to_port is not None:
        target["port"] = _target_port(rule.protocol, rule.ports, rule.to_port)
    return {verb(rule.chain): target}


def _target_port(protocol: Protocol, ports: PortRange, to_port: int) -> object:
    if len(ports) == 1:
        return to_port
    pairs = _port_pairs(ports, to_port)
    return {"map": {"key": field(protocol.value, "dport"), "data": {"set": pairs}}}


def verb(chain: Chain) -> str:
    """What a rule with a target does there."""
    return "snat" if chain is Chain.POSTROUTING else "dnat"


def link_key(chain: Chain) -> str:
    """How nft calls the link that matters there."""
    return "oifname" if chain is Chain.POSTROUTING else "iifname"
