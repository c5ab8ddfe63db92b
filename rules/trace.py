"""A packet's way through a set of rules: the oracle of the tests, and what `explain` answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rules.model import NODE, OWN, POLICED, Address, Chain, Family, Members, Peers, Protocol, Rule
from rules.places import LOOPBACK
from rules.ports import PortRange
from rules.values import Value, replace
from rules.words import share

NOBODY: Mapping[Peers, Members] = MappingProxyType({})


class Packet(Value, kw_only=True):
    """The first packet of a flow, as one chain sees it."""

    family: Family
    protocol: Protocol
    port: int
    interface: str | None = None  # the link entered on; in postrouting, the link left on
    source: Address | None = None
    destination: Address | None = None


def matches(rule: Rule, packet: Packet) -> bool:
    """Whether the rule takes the packet."""
    return (
        rule.family is packet.family
        and rule.protocol in (None, packet.protocol)
        and (rule.ports is None or packet.port in rule.ports)
        and rule.interface in (None, packet.interface)
        and rule.source in (None, packet.source)
        and rule.destination in (None, packet.destination)
        and rule.detour is None
    )


def traced(rules: Iterable[Rule], chain: Chain, packet: Packet) -> list[Rule]:
    """The rule of that chain that takes the packet or, where several share the flows, those that
    may. Of a desired set there is never a second, but for the guard behind all others."""
    found = [rule for rule in rules if rule.chain is chain and matches(rule, packet)]
    sharing = [rule for rule in found if rule.share is not None]
    return sharing or sorted(found, key=lambda rule: rule.guards)[:1]


def explained(
    rules: Sequence[Rule],
    protocol: Protocol,
    port: int,
    sender: Address | None,
    sets: Mapping[Peers, Members] = NOBODY,
) -> Iterator[str]:
    """In words, what becomes of a new flow to that port; without a sender, of one from anywhere."""
    if not rules:
        yield "nothing of ours is here: no packet is forwarded by us"
        return
    flows = list(_flows(rules, protocol, port, sender))
    if not flows:
        yield f"{protocol.value}/{port} is not forwarded: no rule of ours lets it in"
    for packet, chain, place in flows:
        found = traced(rules, chain, packet)
        flow = f"{NAMES[packet.family]} {protocol.value}/{port} {place}"
        fate = " or ".join(
            _fate(rule, packet) + _judged(rules, sets, rule, packet) for rule in found
        )
        yield f"{flow}: {fate or _why_not(rules, chain, packet)}"


NAMES = {Family.IP: "IPv4", Family.IP6: "IPv6"}


def _flows(
    rules: Sequence[Rule], protocol: Protocol, port: int, sender: Address | None
) -> Iterator[tuple[Packet, Chain, str]]:
    """The flows the question is about, each with the chain that decides."""
    wanted = [Family.of(sender)] if sender is not None else list(Family)
    for family in wanted:
        here = [rule for rule in rules if rule.family is family]
        if sender is not None and any(
            rule.source == sender and rule.chain is Chain.POSTROUTING and rule.to is None
            for rule in here
        ):
            packet = Packet(family=family, protocol=protocol, port=port, source=sender)
            yield packet, Chain.POSTROUTING, f"from the guest {sender}"
        elif sender is not None and sender.is_loopback:
            own = LOOPBACK if family is Family.IP else sender
            packet = Packet(
                family=family, protocol=protocol, port=port, source=sender, destination=own
            )
            yield packet, Chain.OUTPUT, f"to {own} from inside the namespace"
        else:
            yield from _entering(here, protocol, port, sender)
            links = {rule.interface for rule in here if rule.chain is Chain.PREROUTING}
            for link in sorted(link for link in links if link is not None):
                packet = Packet(
                    family=family, protocol=protocol, port=port, interface=link, source=sender
                )
                yield (
                    packet,
                    Chain.PREROUTING,
                    f"entering on {link}" + (f" from {sender}" if sender else ""),
                )


def _entering(
    rules: Sequence[Rule], protocol: Protocol, port: int, sender: Address | None
) -> Iterator[tuple[Packet, Chain, str]]:
    """Flows to the addresses at which a node publishes."""
    for family in Family:
        published = {
            rule.destination
            for rule in rules
            if rule.chain is Chain.PREROUTING and rule.family is family and rule.destination
        }
        for at in sorted(published):
            packet = Packet(
                family=family, protocol=protocol, port=port, source=sender, destination=at
            )
            where = "the node" if at == OWN[family] else str(at)
            yield packet, Chain.PREROUTING, f"to {where}" + (f" from {sender}" if sender else "")


def _fate(rule: Rule, packet: Packet) -> str:
    what = f"{rule.protocol.value} {rule.ports}" if rule.protocol else "everything"
    if rule.guards:
        return f"is not declared: the guard of {rule.owner} keeps it from the guest"
    if rule.chain is Chain.POSTROUTING:
        return f"leaves with the address of the link it leaves on, by the rule of {rule.owner}"
    to = f"[{rule.to}]" if packet.family is Family.IP6 else str(rule.to)
    port = _to_port(rule, packet)
    part = f" ({share(rule.share)})" if rule.share else ""
    return f"goes to {to}:{port}{part}, by the rule for {what} of {rule.owner}"


def admitting(
    rules: Iterable[Rule],
    sets: Mapping[Peers, Members],
    packet: Packet,
    peer: Address | None,
) -> list[Rule] | None:
    """The rules of policies that let a new flow pass: to the guest that is its destination, or from
    the one that is its source; None: nothing is forbidden to that guest. A peer of None is any that
    some rule knows."""
    there = [
        rule
        for rule in rules
        if rule.chain in POLICED
        and not rule.resumes
        and (rule.destination, rule.source) == (packet.destination, packet.source)
    ]
    if not any(rule.guards for rule in there):
        return None
    return [
        rule
        for rule in there
        if rule.accepts
        and rule.protocol in (None, packet.protocol)
        and (rule.ports is None or packet.port in rule.ports)
        and _knows(rule, sets, peer)
    ]


def _knows(rule: Rule, sets: Mapping[Peers, Members], peer: Address | None) -> bool:
    if peer is None:
        return True
    if rule.peers is not None:
        return any(peer in network for network in sets.get(rule.peers, ()))
    return rule.peer is None or peer in rule.peer


def _judged(
    rules: Sequence[Rule], sets: Mapping[Peers, Members], rule: Rule, packet: Packet
) -> str:
    """What policies say to a flow that a rule would translate."""
    incoming = rule.chain is Chain.PREROUTING and rule.to is not None
    if incoming:
        behind = _to_port(rule, packet)
        asked = replace(packet, port=behind, source=None, destination=rule.to, interface=None)
        found = admitting(rules, sets, asked, packet.source)
    elif rule.chain is Chain.POSTROUTING and packet.source is not None:
        asked = replace(packet, destination=None, interface=None)
        found = admitting(rules, sets, asked, None)
    else:
        return ""
    if found is None:
        return ""
    way = "in" if incoming else "out"
    if not found:
        return f"; but no policy lets it {way}: it is dropped"
    certain = incoming and packet.source is not None
    names = sorted({one.owner for one in found} - {NODE})
    if not names and certain:
        return "; the node itself is always let in"
    if not names:
        other = f"unless it is {'from' if incoming else 'for'} the node itself"
        return f"; but no policy lets it {way}: it is dropped, {other}"
    whom = "" if certain else " from some sources" if incoming else " to some destinations"
    return f"; {' and '.join(names)} {'lets' if len(names) == 1 else 'let'} it {way}{whom}"


def _to_port(rule: Rule, packet: Packet) -> int:
    if rule.ports is None or rule.to_port is None:
        return packet.port
    return packet.port + rule.to_port - rule.ports.first


def _why_not(rules: Sequence[Rule], chain: Chain, packet: Packet) -> str:
    others = sorted(
        rule.ports
        for rule in rules
        if rule.chain is chain
        and rule.ports is not None
        and matches(replace(rule, ports=None), packet)
    )
    if chain is Chain.OUTPUT and packet.family is Family.IP6:
        return "is not forwarded: from inside only 127.0.0.1 leads to the guest"
    if not others:
        return f"is not forwarded: no {packet.protocol.value} port is declared"
    if run := _run_around(rules, chain, packet):
        return f"is not forwarded: {run}"
    nearest = min(others, key=lambda r: min(abs(r.first - packet.port), abs(r.last - packet.port)))
    return f"is not forwarded: no range holds it (the nearest declared is {nearest})"


def _run_around(rules: Sequence[Rule], chain: Chain, packet: Packet) -> str:
    """Of which published range the port is left out; empty: of none."""
    runs: dict[str, list[PortRange]] = {}
    for rule in rules:
        here = rule.chain is chain and rule.ports is not None and rule.destination is not None
        if here and rule.ports and matches(replace(rule, ports=None), packet):
            runs.setdefault(rule.owner, []).append(rule.ports)
    for owner, pieces in sorted(runs.items()):
        run = PortRange(min(one.first for one in pieces), max(one.last for one in pieces))
        if packet.port in run:
            return f"it is left out of {packet.protocol.value} {run} of {owner}"
    return ""
