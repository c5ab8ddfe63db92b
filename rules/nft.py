"""Plans to the commands of libnftables, or to a script for nft; rules/nft_listing.py reads them
back."""

from collections.abc import Iterator

from rules.model import Chain, Family, Foreign, Live, Lookup, Protocol, Rule
from rules.plan import Plan, Table
from rules.ports import PortRange
from rules.shapes import count, lookup_of, name

NAME = "portranger"
TABLE = {"family": "inet", "name": NAME}
OURS = {"family": "inet", "table": NAME}
PRIORITY = {Chain.PREROUTING: -101, Chain.OUTPUT: -101, Chain.POSTROUTING: 99}
NFPROTO = {Family.IP: "ipv4", Family.IP6: "ipv6"}
ADDRESSES = {Family.IP: "ipv4_addr", Family.IP6: "ipv6_addr"}

Json = dict[str, object]


def encode(plan: Plan) -> list[Json]:
    """The commands of one transaction; empty where the rules need nothing done."""
    if plan.table is Table.DELETE:
        return [{"delete": {"table": TABLE}}]
    commands = list(_table_commands(plan))
    commands += [{"add": {"chain": chain_spec(chain)}} for chain in _new_chains(plan)]
    commands += [{"delete": {"rule": place}} for place in _deleted(plan)]
    commands += [{"delete": {"map": {**OURS, "name": name(one)}}} for one in _dissolved(plan)]
    for lookup, gone in _erased(plan).items():
        keys = [ports_json(live.rule.ports) for live in gone]
        commands.append({"delete": {"element": {**OURS, "name": name(lookup), "elem": keys}}})
    written, guards, elements = _shaped(plan)
    commands += [{"add": {"map": map_spec(lookup)}} for lookup in plan.gathering]
    for lookup, rules in elements.items():
        targets = {rule.to: str(rule.to) for rule in rules}
        pairs = [element(rule, targets[rule.to]) for rule in rules]
        commands.append({"add": {"element": {**OURS, "name": name(lookup), "elem": pairs}}})
    guarded = _guarded(plan)
    commands += [{_put(rule.chain, guarded): {"rule": _rule(rule)}} for rule in written]
    commands += [
        {_put(lookup.chain, guarded): {"rule": lookup_rule(lookup)}} for lookup in plan.gathering
    ]
    commands += [{"add": {"rule": _rule(rule)}} for rule in guards]
    return commands


def _guarded(plan: Plan) -> frozenset[Chain]:
    """The chains whose guard stays where it is."""
    if plan.table is not Table.KEEP:
        return frozenset()
    return frozenset(live.rule.chain for live in plan.unchanged if live.rule.guards)


def _put(chain: Chain, guarded: frozenset[Chain]) -> str:
    """How a rule gets to its place: before the guard, if one is there."""
    return "insert" if chain in guarded else "add"


def in_turn(plan: Plan) -> list[list[Json]]:
    """The same commands as one transaction or, where rules become a map, two: it is filled before
    anything looks into it.

    Since nft_set_rbtree has an array (Linux 7.0, 6.18.y) a map made by a transaction is empty to
    packets until the transaction's end, when its rules are long in use. New flows that came in
    between were not forwarded.
    """
    commands = encode(plan)
    if plan.table is not Table.KEEP or not plan.gathering:
        return [commands] if commands else []
    served = count(live.rule for live in (*plan.unchanged, *(old for old, _ in plan.change)))
    maps = {name(lookup) for lookup in plan.gathering if served[lookup]}
    first = [command for command in commands if _filled(command) in maps]
    rest = [command for command in commands if _filled(command) not in maps]
    return [part for part in (first, rest) if part]


def _filled(command: Json) -> object:
    """The name of the map that a command makes, or puts elements into."""
    target = command.get("add")
    value = target.get("map", target.get("element")) if isinstance(target, dict) else None
    return value["name"] if value else None


def script(plan: Plan) -> str:
    """The same transaction as text for `nft -f`."""
    if plan.table is Table.DELETE:
        return f"delete table inet {NAME}\n"
    lines = {
        Table.KEEP: [],
        Table.CREATE: [f"create table inet {NAME}"],
        Table.REMAKE: [f"delete table inet {NAME}", f"add table inet {NAME}"],
    }[plan.table]
    lines += [
        f"add chain inet {NAME} {chain.value} {{ type nat hook {chain.value}"
        f" priority {PRIORITY[chain]}; policy accept; }}"
        for chain in _new_chains(plan)
    ]
    lines += [
        f"delete rule inet {NAME} {place['chain']} handle {place['handle']}"
        for place in _deleted(plan)
    ]
    lines += [f"delete map inet {NAME} {name(lookup)}" for lookup in _dissolved(plan)]
    for lookup, gone in _erased(plan).items():
        keys = ", ".join(str(live.rule.ports) for live in gone)
        lines.append(f"delete element inet {NAME} {name(lookup)} {{ {keys} }}")
    written, guards, elements = _shaped(plan)
    lines += [f"add map inet {NAME} {map_words(lookup)}" for lookup in plan.gathering]
    for lookup, rules in elements.items():
        pairs = ", ".join(f'{r.ports} comment "{r.owner}" : {r.to}' for r in rules)
        lines.append(f"add element inet {NAME} {name(lookup)} {{ {pairs} }}")
    guarded = _guarded(plan)
    lines += [
        f"{_put(r.chain, guarded)} rule inet {NAME} {r.chain.value} {statement(r)}" for r in written
    ]
    lines += [
        f"{_put(lookup.chain, guarded)} rule inet {NAME} {lookup.chain.value}"
        f" {lookup_statement(lookup)}"
        for lookup in plan.gathering
    ]
    lines += [f"add rule inet {NAME} {r.chain.value} {statement(r)}" for r in guards]
    return "".join(f"{line}\n" for line in lines)


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


def _table_commands(plan: Plan) -> Iterator[Json]:
    if plan.table is Table.REMAKE:
        yield {"delete": {"table": TABLE}}
        yield {"add": {"table": TABLE}}
    elif plan.table is Table.CREATE:
        yield {"create": {"table": TABLE}}  # fails where somebody else was faster


def _new_chains(plan: Plan) -> tuple[Chain, ...]:
    """The chains to create; a table made anew needs those of its unchanged rules too."""
    if plan.table is not Table.REMAKE:
        return plan.chains
    return tuple(c for c in Chain if c in {rule.chain for rule in _written(plan)})


def _deleted(plan: Plan) -> Iterator[Json]:
    """What goes as a rule: what is not wanted, what becomes an element, and the rules of maps."""
    if plan.table is Table.REMAKE:
        return
    gathering = frozenset(plan.gathering)
    olds = [*plan.remove, *(live for live, _ in plan.change)]
    if gathering:
        olds += [live for live in plan.unchanged if lookup_of(live.rule) in gathering]
    for old in olds:
        if old.handle:
            chain = old.chain if isinstance(old, Foreign) else old.rule.chain.value
            yield {**OURS, "chain": chain, "handle": old.handle}
    for lookup in plan.spreading:
        yield {**OURS, "chain": lookup.chain.value, "handle": plan.mapped[lookup]}


def _dissolved(plan: Plan) -> list[Lookup]:
    return [] if plan.table is Table.REMAKE else plan.spreading


def _erased(plan: Plan) -> dict[Lookup, list[Live]]:
    """What goes as an element, but for those that go with their map."""
    found: dict[Lookup, list[Live]] = {}
    if plan.table is Table.REMAKE:
        return found
    spreading = frozenset(plan.spreading)
    for old in (*plan.remove, *(live for live, _ in plan.change)):
        lookup = lookup_of(old.rule) if isinstance(old, Live) and not old.handle else None
        if isinstance(old, Live) and lookup is not None and lookup not in spreading:
            found.setdefault(lookup, []).append(old)
    return found


def _shaped(plan: Plan) -> tuple[list[Rule], list[Rule], dict[Lookup, list[Rule]]]:
    """What is written as rules, as the guards behind them, and as elements."""
    rules: list[Rule] = []
    guards: list[Rule] = []
    elements: dict[Lookup, list[Rule]] = {}
    for rule in _written(plan):
        lookup = lookup_of(rule) if plan.maps else None
        if lookup is not None and lookup in plan.maps:
            elements.setdefault(lookup, []).append(rule)
        else:
            (guards if rule.guards else rules).append(rule)
    return rules, guards, elements


def _written(plan: Plan) -> list[Rule]:
    """What is new, and what stays but in another shape."""
    again = plan.unchanged if plan.table is Table.REMAKE else ()
    reshaped = {*plan.gathering, *plan.spreading}
    if reshaped and plan.table is not Table.REMAKE:
        again = tuple(live for live in plan.unchanged if lookup_of(live.rule) in reshaped)
    return [*(live.rule for live in again), *(rule for _, rule in plan.change), *plan.add]


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


def element(rule: Rule, target: str) -> list[object]:
    """A range in its map, with where it leads."""
    return [{"elem": {"val": ports_json(rule.ports), "comment": rule.owner}}, target]


def ports_json(ports: PortRange | None) -> object:
    """A port, or several."""
    if ports is None:
        raise ValueError("all ports are no range of a map")
    return ports.first if len(ports) == 1 else {"range": [ports.first, ports.last]}


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
