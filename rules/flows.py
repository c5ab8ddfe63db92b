"""Which open flows a change has to forget: those of ports that were taken away or point elsewhere
now, and those that would keep a newly forwarded UDP port from being forwarded. No others."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from rules.model import (
    FORWARDED,
    NUMBERS,
    OWN,
    Address,
    Chain,
    Family,
    Live,
    Members,
    Network,
    Peers,
    Protocol,
    Rule,
)
from rules.plan import Plan
from rules.policies import holder
from rules.ports import ALL_PORTS, PortRange, coalesce, have, subtract
from rules.values import Value

Whom = tuple[Network, ...] | None  # in order and apart; None: everybody


class Flow(Value, kw_only=True):
    """A tracked flow: where its first packet was going, and who answers it."""

    family: Family
    protocol: int  # its number: other protocols than ours are tracked, too
    port: int
    destination: Address
    answerer: Address
    sender: Address | None = None
    answering_port: int = 0  # where it was translated to
    sending_port: int = 0
    answered_port: int = 0  # where the answers go: another one, where that was taken


class Forgotten(Value, kw_only=True):
    """Flows to these ports that one machine answers; where that is None, flows to an address of the
    namespace itself that were not translated. With a destination, only those that were sent there;
    with endpoints, those that anybody else answers."""

    family: Family
    protocol: Protocol | None  # None: of those that have no ports
    ports: tuple[PortRange, ...]  # in order and apart
    answerer: Address | None
    destination: Address | None = None  # or any of its own
    endpoints: frozenset[Address] = frozenset()
    shut: tuple[PortRange, ...] = ()  # of these, for UDP: those that nobody has now

    def shuts(self, flow: Flow) -> bool:
        """Whether nobody has the port of such a flow now, but its guest could go on with it: of UDP
        nobody can tell an answer from a beginning."""
        return have(self.shut, flow.port, flow.port)

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        """Whether the flow is one of them, in a namespace with these addresses of its own."""
        if flow.family is not self.family or not self._is_sent_there(flow, own):
            return False
        if not (self._is_misled(flow) if self.endpoints else self._is_answered(flow, own)):
            return False
        if self.protocol is None:
            return flow.protocol not in KNOWN
        return flow.protocol == NUMBERS[self.protocol] and have(self.ports, flow.port, flow.port)

    def _is_sent_there(self, flow: Flow, own: Set[Address]) -> bool:
        if self.destination == OWN[self.family]:
            return flow.destination in own
        return self.destination in (None, flow.destination)

    def _is_answered(self, flow: Flow, own: Set[Address]) -> bool:
        if self.answerer is None:  # what the guest sends out to others has such ports, too
            return flow.destination in own and flow.answerer == flow.destination
        # Where both are the same nobody translated it: it was sent to the guest itself.
        return flow.answerer == self.answerer != flow.destination

    def _is_misled(self, flow: Flow) -> bool:
        """Where the node itself answers, TCP was its own before, but UDP goes on for ever."""
        own = flow.answerer == flow.destination and self.protocol is not Protocol.UDP
        return flow.answerer not in self.endpoints and not own


class Displaced(Value, kw_only=True):
    """Flows that a guest began from these UDP ports while somebody else had them, so that it is
    seen at another. They would keep those who sent to its ports before from being heard as such."""

    family: Family
    guest: Address
    ports: tuple[PortRange, ...]  # in order and apart

    def holds(self, flow: Flow, own: Set[Address]) -> bool:  # noqa: ARG002 - as the others
        return (
            flow.sender == self.guest
            and flow.protocol == NUMBERS[Protocol.UDP]
            and flow.sending_port != flow.answered_port
            and have(self.ports, flow.sending_port, flow.sending_port)
        )


class Forbidden(Value, kw_only=True):
    """Flows of a machine, in one direction, that no rule would let begin now."""

    family: Family
    guest: Address
    incoming: bool
    # With whom, and which ports, in order and apart; None: all of them.
    allowed: tuple[tuple[Whom, Protocol | None, tuple[PortRange, ...] | None], ...]

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        """Whether the flow is one of them; what programs of the namespace itself send the guest is
        nobody's to forbid."""
        if flow.family is not self.family or flow.sender is None:
            return False
        if self.incoming:
            if flow.answerer != self.guest or flow.sender in own:
                return False
            peer, port = flow.sender, flow.answering_port
        else:
            if flow.sender != self.guest or flow.answerer in own:
                return False
            peer, port = flow.destination, flow.port
        return not any(
            (protocol is None or flow.protocol == NUMBERS[protocol])
            and (ports is None or have(ports, port, port))
            and (who is None or holder(who, peer) is not None)
            for who, protocol, ports in self.allowed
        )


KNOWN = frozenset(NUMBERS[protocol] for protocol in FORWARDED)
TRANSLATING = (Chain.PREROUTING, Chain.OUTPUT)

# Which packets, to whom, how far shifted, and to which address they were sent, where that matters.
_Way = tuple[Family, Protocol | None, Address | None, int | None, Address | None]


Due = Forgotten | Forbidden | Displaced


def forgotten(plan: Plan) -> tuple[Due, ...]:
    """What a plan takes away or points elsewhere, what would shadow its new UDP ports, and what it
    forbids."""
    gone_rules = [*plan.remove, *plan.leftovers, *(live for live, _ in plan.change)]
    before = _ways(old.rule for old in gone_rules if isinstance(old, Live))
    new = _ways([*plan.add, *(rule for _, rule in plan.change)])
    taken = {
        way: gone for way, ports in before.items() if (gone := subtract(ports, new.get(way, [])))
    }
    stays = _ways(_meeting((live.rule for live in plan.unchanged), taken.values()))
    held = {one: [*_at(new, one, None), *_at(stays, one, None)] for one in Family}
    found = [
        Forgotten(
            family=way[0],
            protocol=way[1],
            ports=gone,
            answerer=way[2],
            destination=way[4],
            shut=_shut(way[1], gone, held[way[0]]) if way[4] is None else (),
        )
        for way, ports in taken.items()
        if (gone := subtract(ports, stays.get(way, [])))
    ]
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=fresh, answerer=None, destination=at)
        for family, at in dict.fromkeys((way[0], way[4]) for way in new)
        if (fresh := subtract(_at(new, family, at), _at(before, family, at)))
    ]
    displaced = [
        Displaced(family=family, guest=guest, ports=fresh)
        for (family, protocol, guest, shift, at), ports in new.items()
        if protocol is Protocol.UDP and guest is not None and shift is None and at is None
        if (fresh := subtract(ports, before.get((family, protocol, guest, shift, at), [])))
    ]
    if any(rule.guards and rule.chain in TRANSLATING for rule in plan.add):
        stay = [live.rule for live in plan.unchanged]
        found += _strays(_ways([*stay, *plan.add, *(rule for _, rule in plan.change)]))
    return (*found, *displaced, *_forbidden(plan))


def _forbidden(plan: Plan) -> list[Forbidden]:
    """Where filters changed: of every guest that is guarded, what is not accepted now."""
    written = [*plan.add, *(rule for _, rule in plan.change)]
    old = [one.rule for one in plan.remove if isinstance(one, Live)]
    old += [live.rule for live, _ in plan.change]
    filters = any(rule.chain is Chain.FORWARD for rule in (*written, *old))
    if not filters and plan.sets == plan.sets_before:
        return []
    now = [*written, *(live.rule for live in plan.unchanged)]
    return forbidden([rule for rule in now if rule.chain is Chain.FORWARD], plan.sets)


def forbidden(rules: Sequence[Rule], sets: Mapping[Peers, Members]) -> list[Forbidden]:
    """The flows that these rules in forward would not let begin."""
    found: list[Forbidden] = []
    members = {peers: tuple(sorted(some, key=_place)) for peers, some in sets.items()}
    for guard in rules:
        guest = guard.destination or guard.source
        if not guard.guards or guest is None:
            continue
        alike: dict[tuple[Peers | Network | None, Protocol | None], list[PortRange | None]] = {}
        for rule in rules:
            ends = rule.family, rule.source, rule.destination
            same = ends == (guard.family, guard.source, guard.destination)
            if same and rule.accepts and not rule.resumes:
                alike.setdefault((rule.peer or rule.peers, rule.protocol), []).append(rule.ports)
        accepting = [
            (_whom(peers, members), protocol, _joined(ports))
            for (peers, protocol), ports in alike.items()
        ]
        incoming = guard.destination is not None
        found.append(
            Forbidden(family=guard.family, guest=guest, incoming=incoming, allowed=tuple(accepting))
        )
    return found


def _whom(peers: Peers | Network | None, members: Mapping[Peers, tuple[Network, ...]]) -> Whom:
    if peers is None:
        return None
    return members.get(peers, ()) if isinstance(peers, Peers) else (peers,)


def _joined(ports: Sequence[PortRange | None]) -> tuple[PortRange, ...] | None:
    some = [one for one in ports if one is not None]
    return coalesce(some) if len(some) == len(ports) else None


def _place(network: Network) -> int:
    return int(network.network_address)


def _meeting(rules: Iterable[Rule], taken: Iterable[Iterable[PortRange]]) -> Iterator[Rule]:
    """The rules that may go on serving some of the ports that were taken away."""
    gone = coalesce(one for ports in taken for one in ports)
    firsts = [one.first for one in gone]
    for rule in rules if gone else ():
        ports = rule.ports or ALL_PORTS
        before = bisect_right(firsts, ports.last)  # the last of these reaches furthest
        if before and gone[before - 1].last >= ports.first:
            yield rule


def unmade(rules: Iterable[Rule]) -> tuple[Forgotten, ...]:
    """The flows that these rules would not have made, although they lead to one of their guests or
    keep one of their UDP ports to the namespace itself: left by a commit whose end we never saw."""
    known = list(rules)
    ways = _ways(rule for rule in known if not _face(rule))
    found = _strays(ways)
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=tuple(ports), answerer=None)
        for (family, protocol, *_), ports in ways.items()
        if protocol is Protocol.UDP
    ]
    return (*found, *_misled(rule for rule in known if _face(rule)))


def _misled(rules: Iterable[Rule]) -> Iterator[Forgotten]:
    """The flows to published ports that none of their endpoints answers. What else leads to these
    endpoints may be of others: of kube-proxy, of Docker."""
    behind: dict[tuple[Family, Protocol, PortRange, Address], set[Address]] = {}
    for rule in rules:
        if rule.protocol and rule.ports and rule.destination and rule.to:
            key = rule.family, rule.protocol, rule.ports, rule.destination
            behind.setdefault(key, set()).add(rule.to)
    for (family, protocol, ports, at), endpoints in behind.items():
        yield Forgotten(
            family=family,
            protocol=protocol,
            ports=(ports,),
            answerer=None,
            destination=at,
            endpoints=frozenset(endpoints),
        )


def _strays(ways: dict[_Way, list[PortRange]]) -> list[Forgotten]:
    """The flows to guests that none of these ways is for."""
    guests = {(family, to) for family, _, to, *_ in ways}
    return [
        Forgotten(
            family=family,
            protocol=protocol,
            ports=gone,
            answerer=guest,
            shut=_shut(protocol, gone, _at(ways, family, None)),
        )
        for family, guest in guests
        for protocol in FORWARDED
        if (gone := subtract([ALL_PORTS], _to(ways, family, protocol, guest)))
    ]


def _shut(
    protocol: Protocol | None, gone: Iterable[PortRange], held: Iterable[PortRange]
) -> tuple[PortRange, ...]:
    return subtract(gone, held) if protocol is Protocol.UDP else ()


def _to(
    ways: dict[_Way, list[PortRange]], family: Family, protocol: Protocol, guest: Address | None
) -> list[PortRange]:
    return [
        one
        for (other, of, to, *_), ports in ways.items()
        if (other, of, to) == (family, protocol, guest)
        for one in ports
    ]


def _ways(rules: Iterable[Rule]) -> dict[_Way, list[PortRange]]:
    """The ports of each way a packet can be sent."""
    ways: dict[_Way, list[PortRange]] = {}
    for rule in rules:
        if rule.chain in TRANSLATING and not rule.guards:
            shift = rule.to_port - rule.ports.first if rule.to_port and rule.ports else None
            for protocol in [rule.protocol] if rule.protocol else [*FORWARDED, None]:
                way = (rule.family, protocol, rule.to, shift, _face(rule))
                ways.setdefault(way, []).append(rule.ports or ALL_PORTS)
    return {way: list(coalesce(ports)) for way, ports in ways.items()}


def _face(rule: Rule) -> Address | None:
    """The address that it publishes; loopback is one of many ways to the same guest."""
    at = rule.destination
    return None if at is None or at.is_loopback or rule.chain not in TRANSLATING else at


def _at(ways: dict[_Way, list[PortRange]], family: Family, at: Address | None) -> list[PortRange]:
    """The ports for UDP that are sent on from there."""
    return [
        one
        for (other, of, _, _, where), ports in ways.items()
        if (other, of, where) == (family, Protocol.UDP, at)
        for one in ports
    ]
