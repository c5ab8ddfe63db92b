"""The steps of a plan as commands of libnftables; rules/nft_listing.py reads them back."""

from collections.abc import Iterable, Iterator

from rules import nft_sets
from rules.model import FILTERS, Chain, Family, Lookup, Protocol, Rule
from rules.nft_sets import SetStep
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    BridgeStep,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    EraseStray,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    RuleStep,
    Step,
)
from rules.nft_terms import (
    destination_json,
    detour_json,
    equal,
    field,
    meta,
    share_json,
)
from rules.places import LOOPBACK_NETWORK
from rules.ports import PortRange
from rules.shapes import name, port_name

NAME = "portranger"
TABLE = {"family": "inet", "name": NAME}
OURS: "Json" = {"family": "inet", "table": NAME}
PRIORITY = {
    Chain.RAW: -301,
    Chain.PREROUTING: -101,
    Chain.OUTPUT: -101,
    Chain.POSTROUTING: 99,
    Chain.EGRESS: -2,
    Chain.FORWARD: -1,
}
TYPES = {chain: "filter" if chain in FILTERS else "nat" for chain in Chain}
NFPROTO = {Family.IP: "ipv4", Family.IP6: "ipv6"}
ADDRESSES = {Family.IP: "ipv4_addr", Family.IP6: "ipv6_addr"}

Json = dict[str, object]
BOUND_FOR_LOOPBACK = equal(
    field("ip", "daddr"),
    {"prefix": {"addr": str(LOOPBACK_NETWORK.network_address), "len": LOOPBACK_NETWORK.prefixlen}},
)
RESUMING = equal({"ct": {"key": "state"}}, ["established", "related"], "in")


def commands(found: Iterable[Step]) -> list[Json]:
    """Steps in the words of libnftables."""
    return [_command(step) for step in found]


def _command(step: Step) -> Json:
    if isinstance(step, SetStep):
        return nft_sets.command(step, OURS)
    return _bridge_command(step) if isinstance(step, BridgeStep) else _rule_command(step)


def _rule_command(step: RuleStep) -> Json:
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
        case EraseStray(stray, span):
            keys: list[object] = [_span_json(*span)]
            return {"delete": {"element": {**OURS, "name": stray, "elem": keys}}}
        case DropMap(lookup, ports):
            return {"delete": {"map": {**OURS, "name": map_name(lookup, ports)}}}
        case Erase(lookup, rules, ports):
            keys = [*shifted_ports(rules)] if ports else [ports_json(rule.ports) for rule in rules]
            return {"delete": {"element": {**OURS, "name": map_name(lookup, ports), "elem": keys}}}
        case MakeMap(lookup, ports):
            return {"add": {"map": port_map_spec(lookup) if ports else map_spec(lookup)}}
        case Fill(lookup, rules, ports):
            pairs = [*map(list, port_pairs(rules))] if ports else [element(rule) for rule in rules]
            return {"add": {"element": {**OURS, "name": map_name(lookup, ports), "elem": pairs}}}
        case AddRule(rule, first, behind):
            # In JSON libnftables (1.0.6) does not read which rule it comes behind, but adds it
            # behind all others, guards included: so before all others.
            return {put(first or bool(behind)): {"rule": _rule(rule)}}
        case AddLookup(lookup, first):
            return {put(first): {"rule": lookup_rule(lookup)}}


def _bridge_command(step: BridgeStep) -> Json:
    match step:
        case MakeBridge(chain, behind):
            return {"add": {"chain": bridge_spec(chain, behind)}}
        case FlushBridge(chain, behind):
            return {"flush": {"chain": {**OURS, "name": bridge_name(chain, behind)}}}
        case DropBridge(chain, behind):
            return {"delete": {"chain": {**OURS, "name": bridge_name(chain, behind)}}}
        case AddBridge(rule, behind):
            return {"add": {"rule": {**_rule(rule), "chain": bridge_name(rule.chain, behind)}}}


def put(first: bool) -> str:
    return "insert" if first else "add"


def chain_spec(chain: Chain) -> Json:
    """A chain of ours as it must be."""
    return {
        **OURS,
        "name": chain.value,
        "type": TYPES[chain],
        "hook": chain.hook,
        "prio": PRIORITY[chain],
        "policy": "accept",
    }


def bridge_name(chain: Chain, behind: bool) -> str:
    """What the chain is called that packets meet before or behind one of ours, while that is
    edited."""
    return f"bridge-{'behind' if behind else 'before'}-{chain.value}"


def bridge_priority(chain: Chain, behind: bool) -> int:
    """Right before or behind."""
    return PRIORITY[chain] + (1 if behind else -1)


def bridge_spec(chain: Chain, behind: bool) -> Json:
    """Such a chain as it must be."""
    called, priority = bridge_name(chain, behind), bridge_priority(chain, behind)
    return {**chain_spec(chain), "name": called, "prio": priority}


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


def port_map_spec(lookup: Lookup) -> Json:
    """A map from port to port as it must be."""
    kind = "inet_service"
    return {**OURS, "name": port_name(lookup), "type": kind, "map": kind}


def map_name(lookup: Lookup, ports: bool) -> str:
    return port_name(lookup) if ports else name(lookup)


def port_pairs(rules: Iterable[Rule]) -> Iterator[tuple[int, int]]:
    """Every port of shifted ranges, with the one that it leads to: nft's own `dnat to G:7000-7009`
    sends every port of a range to the first."""
    for rule in rules:
        if rule.ports is not None and rule.to_port is not None:
            shift = rule.to_port - rule.ports.first
            yield from ((n, n + shift) for n in range(rule.ports.first, rule.ports.last + 1))


def shifted_ports(rules: Iterable[Rule]) -> list[int]:
    """The first of each pair."""
    return [port for port, _ in port_pairs(rules)]


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
        yield equal(meta("iifname"), lookup.interface)
    if lookup.destination is None:
        yield equal(meta("nfproto"), NFPROTO[lookup.family])
    else:
        yield from destination_json(lookup.destination, lookup.family)
    if lookup.share is not None:
        yield share_json(lookup.share, lookup.family, lookup.protocol)


def lookup_verdict(lookup: Lookup) -> Json:
    """Where its port leads a packet."""
    key = field(lookup.protocol.value, "dport")
    target: Json = {
        "family": lookup.family.value,
        "addr": {"map": {"key": key, "data": f"@{name(lookup)}"}},
    }
    if lookup.shifted:
        target["port"] = {"map": {"key": key, "data": f"@{port_name(lookup)}"}}
    return {"dnat": target}


def verdict_word(rule: Rule) -> str:
    """Without a target, it is the namespace's own address that is put in; or it is a filter."""
    if rule.chain in FILTERS:
        return "accept" if rule.accepts else "drop"
    return "redirect" if rule.guards else "masquerade"


def peers_end(rule: Rule) -> str:
    """Where the addresses of peers are: who is protected is at the other end."""
    return "saddr" if rule.destination is not None else "daddr"


def _rule(rule: Rule) -> Json:
    return {
        **OURS,
        "chain": rule.chain.value,
        "comment": rule.owner,
        "expr": [*_matches(rule), {"counter": None}, verdict(rule)],
    }


def _matches(rule: Rule) -> Iterator[Json]:
    if rule.interface is not None:
        yield equal(meta(link_key(rule.chain)), rule.interface)
    if rule.chain is Chain.RAW:
        yield BOUND_FOR_LOOPBACK
    elif rule.source is None and rule.destination is None:
        yield equal(meta("nfproto"), NFPROTO[rule.family])
    if rule.source is not None:
        yield equal(field(rule.family.value, "saddr"), str(rule.source))
    if rule.destination is not None:
        yield from destination_json(rule.destination, rule.family)
    if rule.protocol is not None and rule.ports is not None:
        yield equal(field(rule.protocol.value, "dport"), ports_json(rule.ports))
        if rule.share is not None:
            yield share_json(rule.share, rule.family, rule.protocol)
    if rule.detour is not None:
        yield from detour_json(rule.detour, rule.family)
    if rule.peers is not None:
        yield equal(field(rule.family.value, peers_end(rule)), f"@{rule.peers}")
    if rule.peer is not None and rule.chain is not Chain.RAW:
        yield equal(field(rule.family.value, peers_end(rule)), nft_sets.network_json(rule.peer))
    if rule.resumes:
        yield RESUMING


def verdict(rule: Rule) -> Json:
    """The last expression of a rule: where the packet goes, or whom it comes from."""
    if rule.to is None:
        return {verdict_word(rule): None}
    target: Json = {"family": rule.family.value, "addr": str(rule.to)}
    if rule.protocol is not None and rule.ports is not None and rule.to_port is not None:
        target["port"] = _target_port(rule.protocol, rule.ports, rule.to_port)
    return {verb(rule.chain): target}


def _target_port(protocol: Protocol, ports: PortRange, to_port: int) -> object:
    if len(ports) == 1:
        return to_port
    pairs = [[ports.first + i, to_port + i] for i in range(len(ports))]
    return {"map": {"key": field(protocol.value, "dport"), "data": {"set": pairs}}}


def verb(chain: Chain) -> str:
    """What a rule with a target does there."""
    return "snat" if chain is Chain.POSTROUTING else "dnat"


def link_key(chain: Chain) -> str:
    """How nft calls the link that matters there."""
    return "oifname" if chain is Chain.POSTROUTING else "iifname"
