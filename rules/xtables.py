"""The same for iptables: plans to steps on rule dictionaries or a restore script, listings back.

A listing is what the worker of one family finds of ours: our chains with their rules, and the
jumps to them. A rule's handle is its place in its chain; a commit carries the digest of the listing
it was planned on, so a place always means the rule that stood there.
"""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_interface

from rules.model import Address, Chain, Family, Foreign, Live, Observed, Protocol, Rule
from rules.plan import Plan, Table
from rules.ports import PortRange

PREFIX = "PORTRANGER-"
JUMP_COMMENT = "portranger"

Json = dict[str, object]
Step = list[object]


def name(chain: Chain) -> str:
    """Our chain for that place: PORTRANGER-PREROUTING."""
    return PREFIX + built_in(chain)


def built_in(chain: Chain) -> str:
    """The kernel's own chain at that place: PREROUTING."""
    return chain.value.upper()


CHAINS = {name(chain): chain for chain in Chain}


def steps(plan: Plan, family: Family) -> list[Step]:
    """What the worker of that family has to do in one commit; empty where it is nothing."""
    if plan.table is Table.DELETE:
        return [["drop"]]
    # Deletions first: a jump that is put back would move the places behind it.
    made: list[Step] = [["delete", chain, place] for chain, place in _deleted(plan, family)]
    made += [["ensure", name(chain), built_in(chain)] for chain in _ensured(plan, family)]
    made += [
        ["append", name(rule.chain), encode(rule)]
        for rule in _written(plan)
        if rule.family is family
    ]
    return made


def encode(rule: Rule) -> Json:
    """A rule as python-iptables takes it."""
    fields: Json = {}
    if rule.interface is not None:
        fields[_link_key(rule.chain)] = rule.interface
    if rule.source is not None:
        fields["src"] = str(rule.source)
    if rule.destination is not None:
        fields["dst"] = str(rule.destination)
    if rule.protocol is not None and rule.ports is not None:
        protocol = rule.protocol.value
        fields |= {"protocol": protocol, protocol: {"dport": _dport(rule.ports)}}
    fields["comment"] = {"comment": rule.owner}
    verb, key = _verb(rule.chain)
    fields["target"] = _itself(rule) if rule.to is None else {verb: {key: _target(rule)}}
    return fields


def _itself(rule: Rule) -> str:
    return "REDIRECT" if rule.guards else "MASQUERADE"


def _target(rule: Rule) -> str:
    """The address, and for a shifted range its ports, counted from the port behind the slash."""
    if rule.ports is None or rule.to_ports is None:
        return str(rule.to)
    address = f"[{rule.to}]" if rule.family is Family.IP6 else str(rule.to)
    base = f"/{rule.ports.first}" if len(rule.ports) > 1 else ""
    return f"{address}:{rule.to_ports}{base}"


def decode(listings: Mapping[Family, Mapping[str, object]]) -> Observed:
    """What the listings of both families hold of ours."""
    live: list[Live] = []
    foreign: list[Foreign] = []
    made: set[Chain] = set()
    broken: set[Chain] = set()
    standing: set[tuple[Family, Chain]] = set()
    jumped: set[tuple[Family, Chain]] = set()
    for family, listing in listings.items():
        chains: dict[str, list[Json]] = listing["chains"]  # type: ignore[assignment]
        jumps: dict[str, list[int]] = listing["jumps"]  # type: ignore[assignment]
        for chain_name, rules in chains.items():
            if chain_name not in CHAINS:
                continue
            chain = CHAINS[chain_name]
            places = jumps.get(chain_name, [])
            standing.add((family, chain))
            if places:
                jumped.add((family, chain))
            if places or rules:  # an empty chain that nothing leads to is as good as none
                (made if places else broken).add(chain)
            foreign += [
                Foreign(f"{family.value} {built_in(chain)}", place, "a second jump to our chain")
                for place in list(places)[1:]
            ]
            for place, fields in enumerate(rules):
                found = _decode_rule(family, chain, place, fields)
                if isinstance(found, Live):
                    live.append(found)
                else:
                    foreign.append(found)
    return Observed(
        live=tuple(live),
        foreign=tuple(foreign),
        chains=frozenset(made - broken),
        table=bool(standing),
        standing=frozenset(standing),
        jumped=frozenset(jumped),
    )


def script(plan: Plan) -> str:
    """The same change for both `iptables-restore --noflush` and `ip6tables-restore --noflush`: each
    passes over the lines of the other family."""
    lines = [
        line
        for family, flag in ((Family.IP, "-4"), (Family.IP6, "-6"))
        for line in _script_lines(plan, family, flag)
    ]
    return "".join(f"{line}\n" for line in ["*nat", *lines, "COMMIT"])


def _script_lines(plan: Plan, family: Family, flag: str) -> Iterator[str]:
    if plan.table is Table.DELETE:
        yield from _dropped(plan, family, flag)
        return
    for chain_name, place in _deleted(plan, family):
        yield f"{flag} -D {chain_name} {place + 1}"
    for chain in _ensured(plan, family):
        if (family, chain) not in plan.standing:
            yield f"{flag} -N {name(chain)}"
        if (family, chain) not in plan.jumped:
            yield f"{flag} -I {built_in(chain)} {_jump(chain)}"
    for rule in _written(plan):
        if rule.family is family:
            yield f"{flag} -A {name(rule.chain)} {statement(rule)}"


def _dropped(plan: Plan, family: Family, flag: str) -> Iterator[str]:
    for chain_name, place in _deleted(plan, family):
        if chain_name not in CHAINS:  # a second jump
            yield f"{flag} -D {chain_name} {place + 1}"
    for chain in (chain for chain in Chain if (family, chain) in plan.standing):
        if (family, chain) in plan.jumped:
            yield f"{flag} -D {built_in(chain)} {_jump(chain)}"
        yield f"{flag} -F {name(chain)}"
        yield f"{flag} -X {name(chain)}"


def _jump(chain: Chain) -> str:
    return f"-m comment --comment {JUMP_COMMENT} -j {name(chain)}"


def statement(rule: Rule) -> str:
    """A rule in the words of iptables."""
    words: list[str] = []
    if rule.interface is not None:
        words.append(f"-{'o' if rule.chain is Chain.POSTROUTING else 'i'} {rule.interface}")
    if rule.source is not None:
        words.append(f"-s {rule.source}")
    if rule.destination is not None:
        words.append(f"-d {rule.destination}")
    if rule.protocol is not None and rule.ports is not None:
        protocol = rule.protocol.value
        words.append(f"-p {protocol} -m {protocol} --dport {_dport(rule.ports)}")
    words.append(f'-m comment --comment "{rule.owner}"')
    verb, key = _verb(rule.chain)
    to = _itself(rule) if rule.to is None else f"{verb} --{key} {_target(rule)}"
    words.append(f"-j {to}")
    return " ".join(words)


def _ensured(plan: Plan, family: Family) -> list[Chain]:
    """The chains that may have to be made, or jumped to: those that are written to, and those
    that are to be put back, with what they still hold."""
    held = [live.rule for live in plan.unchanged if live.rule.chain in plan.chains]
    used = {rule.chain for rule in (*_written(plan), *held) if rule.family is family}
    return [chain for chain in Chain if chain in used]


def _written(plan: Plan) -> list[Rule]:
    return [*(rule for _, rule in plan.change), *plan.add]


def _deleted(plan: Plan, family: Family) -> list[tuple[str, int]]:
    """Chain and place of every rule that goes, from the last place on, so that places stay true."""
    gone: list[tuple[str, int]] = []
    for old in (*plan.remove, *(live for live, _ in plan.change)):
        if isinstance(old, Live):
            if old.rule.family is family:
                gone.append((name(old.rule.chain), old.handle))
        else:
            of, _, chain = old.chain.partition(" ")
            if of == family.value:
                gone.append((chain, old.handle))
    return sorted(gone, key=lambda entry: (entry[0], -entry[1]))


def _decode_rule(family: Family, chain: Chain, place: int, fields: Json) -> Live | Foreign:
    try:
        packets, octets = map(int, fields["counters"])  # type: ignore[call-overload]
        rule = _parse(family, chain, fields)
        if encode(rule) != _normal(fields):
            raise ValueError(fields)
    except (AttributeError, LookupError, TypeError, ValueError):
        gist = " ".join(sorted(key for key in fields if key != "counters"))
        return Foreign(f"{family.value} {name(chain)}", place, gist or "an empty rule")
    return Live(rule, place, packets, octets)


def _parse(family: Family, chain: Chain, fields: Mapping[str, object]) -> Rule:
    """The rule with the fields we know; the caller finds out whether there are others."""
    protocol = Protocol(fields["protocol"]) if "protocol" in fields else None
    match: Mapping[str, str] = fields[protocol.value] if protocol else {}  # type: ignore[assignment]
    target = fields["target"]
    verb, key = _verb(chain)
    to, to_port = None, None
    if target not in ("MASQUERADE", "REDIRECT"):
        to, to_port = _parse_target(family, target[verb][key])  # type: ignore[index]
    link = fields.get(_link_key(chain))
    rule = Rule(
        chain=chain,
        family=family,
        owner=_text(fields["comment"]["comment"]),  # type: ignore[index]
        protocol=protocol,
        ports=_ports(match["dport"]) if protocol else None,
        interface=None if link is None else _text(link),
        source=_host(fields["src"]) if "src" in fields else None,
        destination=_host(fields["dst"]) if "dst" in fields else None,
        to=to,
        to_port=to_port,
    )
    if any(end and Family.of(end) is not family for end in (rule.source, rule.destination, to)):
        raise ValueError(fields)
    return rule


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError(value)
    return value


def _parse_target(family: Family, text: str) -> tuple[Address, int | None]:
    if family is Family.IP6:
        address, _, ports = text.removeprefix("[").partition("]:")
    else:
        address, _, ports = text.partition(":")
    first = ports.partition("/")[0].partition("-")[0]
    return ip_address(address), int(first) if first else None


def _normal(fields: Json) -> Json:
    """What python-iptables lists, in the form in which it takes it."""
    ends = ("src", "dst")
    return {
        key: str(_host(value)) if key in ends else value
        for key, value in fields.items()
        if key != "counters"
    }


def _host(text: object) -> Address:
    found = ip_interface(str(text))
    if found.network.num_addresses != 1:
        raise ValueError(text)
    return found.ip


def _ports(text: str) -> PortRange:
    first, _, last = text.partition(":")
    return PortRange(int(first), int(last or first))


def _dport(ports: PortRange) -> str:
    return str(ports).replace("-", ":")


def _verb(chain: Chain) -> tuple[str, str]:
    return ("SNAT", "to-source") if chain is Chain.POSTROUTING else ("DNAT", "to-destination")


def _link_key(chain: Chain) -> str:
    return "out-interface" if chain is Chain.POSTROUTING else "in-interface"
