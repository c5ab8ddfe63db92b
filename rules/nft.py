"""Plans to the commands of libnftables, or to a script for nft; rules/nft_listing.py reads them
back."""

from collections.abc import Iterator

from rules.model import Chain, Family, Foreign, Protocol, Rule
from rules.plan import Plan, Table
from rules.ports import PortRange

NAME = "portranger"
TABLE = {"family": "inet", "name": NAME}
PRIORITY = {Chain.PREROUTING: -101, Chain.OUTPUT: -101, Chain.POSTROUTING: 99}
NFPROTO = {Family.IP: "ipv4", Family.IP6: "ipv6"}

Json = dict[str, object]


def encode(plan: Plan) -> list[Json]:
    """The commands of one transaction; empty where the rules need nothing done."""
    if plan.table is Table.DELETE:
        return [{"delete": {"table": TABLE}}]
    commands = list(_table_commands(plan))
    commands += [{"add": {"chain": chain_spec(chain)}} for chain in _new_chains(plan)]
    commands += [{"delete": {"rule": place}} for place in _deleted(plan)]
    commands += [{"add": {"rule": _rule(rule)}} for rule in _written(plan)]
    return commands


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
    lines += [f"add rule inet {NAME} {r.chain.value} {statement(r)}" for r in _written(plan)]
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
    words.append("masquerade" if rule.to is None else _translation(rule))
    words.append(f'comment "{rule.owner}"')
    return " ".join(words)


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
    if plan.table is Table.REMAKE:
        return
    for old in (*plan.remove, *(live for live, _ in plan.change)):
        chain = old.chain if isinstance(old, Foreign) else old.rule.chain.value
        yield {"family": "inet", "table": NAME, "chain": chain, "handle": old.handle}


def _written(plan: Plan) -> list[Rule]:
    again = plan.unchanged if plan.table is Table.REMAKE else ()
    return [*(live.rule for live in again), *(rule for _, rule in plan.change), *plan.add]


def chain_spec(chain: Chain) -> Json:
    """A chain of ours as it must be."""
    return {
        "family": "inet",
        "table": NAME,
        "name": chain.value,
        "type": "nat",
        "hook": chain.value,
        "prio": PRIORITY[chain],
        "policy": "accept",
    }


def _rule(rule: Rule) -> Json:
    return {
        "family": "inet",
        "table": NAME,
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
        first, last = rule.ports.first, rule.ports.last
        right = first if first == last else {"range": [first, last]}
        yield _equal(field(rule.protocol.value, "dport"), right)


def _equal(left: Json, right: object) -> Json:
    return {"match": {"op": "==", "left": left, "right": right}}


def field(protocol: str, name: str) -> Json:
    """A field of a header."""
    return {"payload": {"protocol": protocol, "field": name}}


def verdict(rule: Rule) -> Json:
    """The last expression of a rule: where the packet goes, or whom it comes from."""
    if rule.to is None:
        return {"masquerade": None}
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
