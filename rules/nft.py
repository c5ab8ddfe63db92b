"""Plans to libnftables commands or an nft script, and listings of our table to what is observed.

Comparison happens on decoded values only: nft writes some things differently from how it reads
them. What does not decode to a rule that we could have written is foreign.
"""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address

from rules.model import Address, Chain, Family, Foreign, Live, Observed, Protocol, Rule
from rules.plan import Plan, Table
from rules.ports import PortRange
from rules.problems import shown

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
    commands += [{"add": {"chain": _chain(chain)}} for chain in _new_chains(plan)]
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
        words.append(f'{_link_key(rule.chain)} "{rule.interface}"')
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
    words = f"{_verb(rule.chain)} {rule.family.value} to "
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


def _chain(chain: Chain) -> Json:
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
        "expr": [*_matches(rule), {"counter": None}, _verdict(rule)],
    }


def _matches(rule: Rule) -> Iterator[Json]:
    if rule.interface is not None:
        yield _equal({"meta": {"key": _link_key(rule.chain)}}, rule.interface)
    if rule.source is None and rule.destination is None:
        yield _equal({"meta": {"key": "nfproto"}}, NFPROTO[rule.family])
    if rule.source is not None:
        yield _equal(_field(rule.family.value, "saddr"), str(rule.source))
    if rule.destination is not None:
        yield _equal(_field(rule.family.value, "daddr"), str(rule.destination))
    if rule.protocol is not None and rule.ports is not None:
        first, last = rule.ports.first, rule.ports.last
        right = first if first == last else {"range": [first, last]}
        yield _equal(_field(rule.protocol.value, "dport"), right)


def _equal(left: Json, right: object) -> Json:
    return {"match": {"op": "==", "left": left, "right": right}}


def _field(protocol: str, field: str) -> Json:
    return {"payload": {"protocol": protocol, "field": field}}


def _verdict(rule: Rule) -> Json:
    if rule.to is None:
        return {"masquerade": None}
    target: Json = {"family": rule.family.value, "addr": str(rule.to)}
    if rule.protocol is not None and rule.ports is not None and rule.to_port is not None:
        target["port"] = _target_port(rule.protocol, rule.ports, rule.to_port)
    return {_verb(rule.chain): target}


def _target_port(protocol: Protocol, ports: PortRange, to_port: int) -> object:
    if len(ports) == 1:
        return to_port
    pairs = _port_pairs(ports, to_port)
    return {"map": {"key": _field(protocol.value, "dport"), "data": {"set": pairs}}}


def _verb(chain: Chain) -> str:
    return "snat" if chain is Chain.POSTROUTING else "dnat"


def _link_key(chain: Chain) -> str:
    return "oifname" if chain is Chain.POSTROUTING else "iifname"


def _decode_chain(value: Json) -> Chain | None:
    for chain in Chain:
        if all(value.get(key) == want for key, want in _chain(chain).items()):
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
        target = last[_verb(chain)]
        if len(last) > 1 or not isinstance(target, dict):
            raise ValueError(last)
        families.add(Family(target["family"]))
        fields["to"] = _address(target["addr"], families)
        if "port" in target:
            fields["to_port"] = _first_port(target["port"])
    (family,) = families
    rule = Rule(chain=chain, family=family, owner=owner, **fields)  # type: ignore[arg-type]
    if rule.to is not None and _verdict(rule) != last:
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
    elif left == {"meta": {"key": _link_key(chain)}}:
        found = {"interface": _text(right)}
    else:
        protocol, field = _payload(left)
        if field == "dport":
            found = {"protocol": Protocol(protocol), "ports": _ports(right)}
        else:
            families.add(Family(protocol))
            found = {_ENDS[field]: _address(right, families)}
    if fields.keys() & found.keys():
        raise ValueError("matched twice")
    fields.update(found)


_FAMILIES: Mapping[object, Family] = {name: family for family, name in NFPROTO.items()}
_ENDS = {"saddr": "source", "daddr": "destination"}


def _payload(left: object) -> tuple[str, str]:
    protocol, field = left["payload"]["protocol"], left["payload"]["field"]  # type: ignore[index]
    if left != _field(protocol, field):
        raise ValueError(left)
    return protocol, field


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
