"""One rule of ours in the legacy tables: as the dictionary that python-iptables takes and lists, in
the words of iptables, and back."""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network

from rules.model import (
    FILTERS,
    POLICED,
    Address,
    Chain,
    Family,
    Foreign,
    Live,
    Network,
    Protocol,
    Rule,
    link_name,
)
from rules.places import LOOPBACK_NETWORK
from rules.ports import PortRange
from rules.problems import printable

PREFIX = "PORTRANGER-"
FILTER, MANGLE, NAT = "filter", "mangle", "nat"
TABLES = (MANGLE, FILTER, NAT)
OPEN_FLOWS = "RELATED,ESTABLISHED"  # in the order in which it is listed
INGRESS, EGRESS = " (ingress)", " (egress)"
ENDS = ("src", "dst")
LONGEST_GIST = 200  # characters of a rule that is not ours

Json = dict[str, object]


def name(chain: Chain) -> str:
    """Our chain for that place: PORTRANGER-PREROUTING."""
    return PREFIX + built_in(chain)


def built_in(chain: Chain) -> str:
    """The kernel's own chain at that place: PREROUTING."""
    return chain.hook.upper()


def table(chain: Chain) -> str:
    """The table that our chain for that place is in. A RETURN ends one chain and not the other, so
    the verdicts for both directions are in two tables: mangle is asked before filter."""
    return _TABLES.get(chain, NAT)


_TABLES = {Chain.RAW: MANGLE, Chain.EGRESS: MANGLE, Chain.FORWARD: FILTER}


def spot(chain: Chain) -> str:
    """What tells our chain for that place from all others: nat PORTRANGER-PREROUTING."""
    return f"{table(chain)} {name(chain)}"


CHAINS = {spot(chain): chain for chain in Chain}


def encode(rule: Rule) -> Json:
    """A rule as python-iptables takes it."""
    fields: Json = {}
    if rule.interface is not None:
        fields[_link_key(rule.chain)] = rule.interface
    fields |= _ends(rule)
    if rule.protocol is not None and rule.ports is not None:
        protocol = rule.protocol.value
        fields |= {"protocol": protocol, protocol: {"dport": _dport(rule.ports)}}
    if rule.resumes:
        fields["conntrack"] = {"ctstate": OPEN_FLOWS}
    fields["comment"] = {"comment": _comment(rule)}
    verb, key = _verb(rule.chain)
    fields["target"] = _verdict(rule) if rule.to is None else {verb: {key: _target(rule)}}
    return fields


def statement(rule: Rule) -> str:
    """A rule in the words of iptables."""
    words: list[str] = []
    if rule.interface is not None:
        words.append(f"-{'o' if rule.chain is Chain.POSTROUTING else 'i'} {rule.interface}")
    words += [f"-{end[0]} {text}" for end, text in _ends(rule).items()]
    if rule.protocol is not None and rule.ports is not None:
        protocol = rule.protocol.value
        words.append(f"-p {protocol} -m {protocol} --dport {_dport(rule.ports)}")
    if rule.resumes:
        words.append(f"-m conntrack --ctstate {OPEN_FLOWS}")
    words.append(f'-m comment --comment "{_comment(rule)}"')
    verb, key = _verb(rule.chain)
    to = _verdict(rule) if rule.to is None else f"{verb} --{key} {_target(rule)}"
    words.append(f"-j {to}")
    return " ".join(words)


def _ends(rule: Rule) -> dict[str, str]:
    """Where packets come from and go to."""
    if rule.peers is not None:  # left out, it would accept everybody
        raise ValueError(f"these tables have no set {rule.peers}")
    peer = None if rule.peer is None else _short(rule.peer)
    if rule.chain is Chain.RAW:
        return {"dst": peer} if peer else {}
    ends = {
        "src": peer if rule.source is None else str(rule.source),
        "dst": peer if rule.destination is None else str(rule.destination),
    }
    return {end: text for end, text in ends.items() if text is not None}


def _comment(rule: Rule) -> str:
    """The owner and, with a peer, which end is the guest: of two hosts, the rest does not tell."""
    if rule.peer is None or rule.chain is Chain.RAW:
        return rule.owner
    return rule.owner + (EGRESS if rule.destination is None else INGRESS)


def _verdict(rule: Rule) -> str:
    if rule.chain in FILTERS:
        # ACCEPT would keep rules of others from being asked, as nftables' accept does not.
        return "RETURN" if rule.accepts else "DROP"
    return "REDIRECT" if rule.guards else "MASQUERADE"


def _target(rule: Rule) -> str:
    """The address, and for a shifted range its ports, counted from the port behind the slash."""
    if rule.ports is None or rule.to_ports is None:
        return str(rule.to)
    address = f"[{rule.to}]" if rule.family is Family.IP6 else str(rule.to)
    base = f"/{rule.ports.first}" if len(rule.ports) > 1 else ""
    return f"{address}:{rule.to_ports}{base}"


def decode_rule(family: Family, chain: Chain, place: int, fields: Json) -> Live | Foreign:
    """What stands at a place of one of our chains."""
    try:
        packets, octets = map(int, fields["counters"])  # type: ignore[call-overload]
        rule = _parse(family, chain, fields)
        if encode(rule) != _normal(fields):
            raise ValueError(fields)
    except (AttributeError, LookupError, TypeError, ValueError):
        gist = " ".join(sorted(key for key in fields if key != "counters"))
        text = printable(gist, LONGEST_GIST) or "an empty rule"
        return Foreign(f"{family.value} {spot(chain)}", place, text)
    return Live(rule, place, packets, octets)


def _parse(family: Family, chain: Chain, fields: Mapping[str, object]) -> Rule:
    """The rule with the fields we know; the caller finds out whether there are others."""
    protocol = Protocol(fields["protocol"]) if "protocol" in fields else None
    match: Mapping[str, str] = fields[protocol.value] if protocol else {}  # type: ignore[assignment]
    target = fields["target"]
    verb, key = _verb(chain)
    to, to_port = None, None
    if target not in ("MASQUERADE", "REDIRECT", "RETURN", "DROP"):
        to, to_port = _parse_target(family, target[verb][key])  # type: ignore[index]
    link = fields.get(_link_key(chain))
    owner = _text(fields["comment"]["comment"])  # type: ignore[index]
    owner, source, destination, peer = _parse_ends(chain, owner, fields)
    rule = Rule(
        chain=chain,
        family=family,
        owner=owner,
        protocol=protocol,
        ports=_ports(match["dport"]) if protocol else None,
        interface=None if link is None else link_name(_text(link)),
        source=source,
        destination=destination,
        to=to,
        to_port=to_port,
        accepts=target == "RETURN",
        peer=peer,
    )
    ends = [end for end in (source, destination, to, peer) if end is not None]
    if any(end.version != (4 if family is Family.IP else 6) for end in ends):
        raise ValueError(fields)
    return rule


def _parse_ends(
    chain: Chain, comment: str, fields: Mapping[str, object]
) -> tuple[str, Address | None, Address | None, Network | None]:
    """The owner, source, destination and peer."""
    source, destination = (_network(fields[end]) if end in fields else None for end in ENDS)
    if chain is Chain.RAW:
        if destination != LOOPBACK_NETWORK:
            raise ValueError(destination)
        return comment, None, None, destination
    if chain in POLICED and source is not None and destination is not None:
        if comment.endswith(INGRESS):
            return comment.removesuffix(INGRESS), None, _host(destination), source
        if comment.endswith(EGRESS):
            return comment.removesuffix(EGRESS), _host(source), None, destination
    return comment, _one_host(source), _one_host(destination), None


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
    return {
        key: _short(_network(value)) if key in ENDS else value
        for key, value in fields.items()
        if key != "counters"
    }


def _network(text: object) -> Network:
    return ip_network(str(text))


def _host(network: Network) -> Address:
    if network.num_addresses != 1:
        raise ValueError(network)
    return network.network_address


def _one_host(network: Network | None) -> Address | None:
    return None if network is None else _host(network)


def _short(network: Network) -> str:
    """A network of one address is that address."""
    return str(network.network_address if network.num_addresses == 1 else network)


def _ports(text: str) -> PortRange:
    first, _, last = text.partition(":")
    return PortRange(int(first), int(last or first))


def _dport(ports: PortRange) -> str:
    return str(ports).replace("-", ":")


def _verb(chain: Chain) -> tuple[str, str]:
    return ("SNAT", "to-source") if chain is Chain.POSTROUTING else ("DNAT", "to-destination")


def _link_key(chain: Chain) -> str:
    return "out-interface" if chain is Chain.POSTROUTING else "in-interface"
