"""From policies and everybody known to what is left for one machine: who may speak to it, and to
whom it may speak, as addresses and ports. Policies only add to each other, so their order does not
matter; what no policy understands is not in here, and so stays shut."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from itertools import chain, pairwise
from types import MappingProxyType

from rules.model import Address, Family, Machine, Protocol
from rules.policies import (
    METADATA_NAME,
    Allowance,
    Direction,
    IpBlock,
    Isolation,
    Labels,
    Namespace,
    Network,
    NetworkPolicy,
    Party,
    Peers,
    PolicyRule,
    Selector,
    collapsed,
    holder,
    number_of,
)
from rules.ports import PortRange, coalesce
from rules.values import replace

# Among more allowances, or more networks, nobody looks for what others make needless: it does no
# harm, and to find it each is held against all. A tenant could write that for hours.
MOST_COMPARED = 128

Names = tuple[tuple[str, Protocol, int], ...]
Reach = Mapping[Family, tuple[Network, ...] | None]  # None: everybody; no such family: nobody
Way = tuple[Protocol | None, PortRange | None, Reach]

WHOLE = {Family.IP: (ip_network("0.0.0.0/0"),), Family.IP6: (ip_network("::/0"),)}
_EVERYBODY: Reach = MappingProxyType(dict.fromkeys(Family))


class Register:
    """All policies and everybody known, each question about them answered once."""

    __slots__ = ("_answers", "_granted", "_labels", "_parties", "_policies", "_reaches")

    def __init__(
        self,
        policies: Iterable[NetworkPolicy],
        parties: Iterable[Party],
        namespaces: Iterable[Namespace] = (),
    ) -> None:
        self._policies: dict[str, list[NetworkPolicy]] = defaultdict(list)
        self._parties: dict[str, list[Party]] = defaultdict(list)
        self._labels: dict[str, Labels | None] = {}
        self._reaches: dict[object, Reach] = {}
        self._granted: dict[object, tuple[Allowance, ...]] = {}
        self._answers: dict[object, Isolation] = {}
        for policy in sorted(set(policies), key=str):
            self._policies[policy.namespace].append(policy)
        for party in parties:
            self._parties[party.namespace].append(party)
        for one in namespaces:
            said = self._labels.setdefault(one.name, one.labels)
            if said != one.labels:  # two manifests of one namespace: who knows which is true
                self._labels[one.name] = None

    def isolation(self, machine: Machine, direction: Direction) -> Isolation | None:
        """What is left for a machine; None: no policy selects it, so everything passes."""
        selecting = self.selecting(machine, direction)
        if not selecting:
            return None
        names = machine.names if direction is Direction.INGRESS else ()
        key = direction, names, selecting
        if key not in self._answers:
            self._answers[key] = self._isolation(selecting, direction, names)
        return self._answers[key]

    def selecting(self, machine: Machine, direction: Direction) -> tuple[NetworkPolicy, ...]:
        """The policies that cut a machine off."""
        return tuple(
            policy
            for policy in self._policies.get(machine.namespace, ())
            if policy.rules(direction) is not None and policy.selector.matches(machine.labels)
        )

    def _isolation(
        self, selecting: Sequence[NetworkPolicy], direction: Direction, names: Names
    ) -> Isolation:
        granted = [one for policy in selecting for one in self._grants(policy, direction, names)]
        return Isolation(
            policies=tuple(sorted({str(policy) for policy in selecting})),
            broken=tuple(sorted({str(policy) for policy in selecting if policy.broken})),
            allowances=fewest(granted),
            granted=tuple(sorted(granted, key=lambda one: one.key)),
        )

    def _grants(
        self, policy: NetworkPolicy, direction: Direction, names: Names
    ) -> tuple[Allowance, ...]:
        """What one policy allows whoever it selects and has ports of those names."""
        key = policy, direction, names
        if key not in self._granted:
            self._granted[key] = fewest(
                Allowance(
                    family=family,
                    peers=peers,
                    protocol=protocol,
                    ports=ports,
                    policies=(str(policy),),
                )
                for rule in policy.rules(direction) or ()
                for protocol, ports, reach in self.ways(policy.namespace, rule, direction, names)
                for family, peers in reach.items()
            )
        return self._granted[key]

    def ways(
        self, namespace: str, rule: PolicyRule, direction: Direction, names: Names
    ) -> Iterator[Way]:
        """What a rule allows: protocol, ports, and with whom."""
        reach = self._reach(namespace, rule.peers)
        if rule.ports is None:
            yield None, None, reach
            return
        for one in rule.ports:
            if not isinstance(one.port, str):
                yield one.protocol, one.port, reach
            elif direction is Direction.EGRESS:
                yield from self._named(namespace, rule, one.port, one.protocol)
            elif (number := number_of(names, one.port, one.protocol)) is not None:
                yield one.protocol, PortRange(number, number), reach

    def _named(
        self, namespace: str, rule: PolicyRule, name: str, protocol: Protocol
    ) -> Iterator[Way]:
        """The way to each number that peers have for a port of that name."""
        numbers: dict[int, list[Network]] = defaultdict(list)
        for peer in rule.peers or (IpBlock(whole) for [whole] in WHOLE.values()):
            for party, address in self._met(namespace, peer):
                if (number := party.number(name, protocol)) is not None:
                    numbers[number].append(ip_network(address))
        for number, networks in numbers.items():
            yield protocol, PortRange(number, number), _by_family(networks)

    def _reach(self, namespace: str, peers: tuple[IpBlock | Peers, ...] | None) -> Reach:
        """The addresses of a rule's peers."""
        if peers is None:
            return _EVERYBODY
        key = namespace, peers
        if key not in self._reaches:
            self._reaches[key] = _by_family(
                [
                    network
                    for peer in peers
                    for network in (
                        peer.networks()
                        if isinstance(peer, IpBlock)
                        else (ip_network(address) for _, address in self._met(namespace, peer))
                    )
                ]
            )
        return self._reaches[key]

    def _met(self, namespace: str, peer: IpBlock | Peers) -> Iterator[tuple[Party, Address]]:
        """Everybody known that a policy of that namespace means, at each of his addresses."""
        if isinstance(peer, IpBlock):
            for party in chain.from_iterable(self._parties.values()):
                yield from ((party, address) for address in party.addresses if address in peer)
            return
        for home, parties in self._parties.items():
            if self._is_meant(home, namespace, peer.namespaces):
                for party in parties:
                    if party.addresses and peer.pods.matches(party.labels):
                        yield from ((party, address) for address in party.addresses)

    def _is_meant(self, home: str, own: str, selector: Selector | None) -> bool:
        if selector is None:
            return home == own
        name = METADATA_NAME, home
        known = self._labels.get(home, ())
        if known is None:  # of labels that nobody knows, none is there, and none is missing
            certain = all(one.key == METADATA_NAME for one in selector.requirements)
            return certain and selector.matches((name,))
        return selector.matches((name, *known))


def _by_family(networks: Iterable[Network]) -> Reach:
    """These addresses in the fewest networks; all that there are of a family is everybody."""
    found: dict[Family, list[Network]] = {}
    for network in networks:
        found.setdefault(Family.of(network.network_address), []).append(network)
    made = {family: collapsed(some) for family, some in found.items()}
    return {family: None if some == WHOLE[family] else some for family, some in made.items()}


# ----------------------------------------------------------------------------- as few as possible


def fewest(granted: Iterable[Allowance]) -> tuple[Allowance, ...]:
    """The same, so that none can be joined to another with the same peers, and none be left out.

    Different peers stay apart, even for the same ports: so one who comes or goes is one address
    more or less in his own set, and no other set and no range changes."""
    alike: dict[object, list[Allowance]] = {}
    numbers: dict[object, int] = {}
    numbered: dict[int, int] = {}
    for one in granted:  # peers may be thousands, and are often the very same: hashed once
        number = numbered.get(id(one.peers))
        if number is None:
            number = numbered[id(one.peers)] = numbers.setdefault(one.peers, len(numbers))
        alike.setdefault((one.family, one.protocol, number, one.ports is None), []).append(one)
    joined = sorted(
        [whole for some in alike.values() for whole in _joined(some)], key=lambda one: one.key
    )
    whole = [one for one in joined if one.peers is None and one.ports is None]
    left = [
        one for one in joined if not any(one is not other and _meet(one, other) for other in whole)
    ]
    return tuple(left if len(left) > MOST_COMPARED else _needed(left))


def _joined(some: list[Allowance]) -> Iterator[Allowance]:
    """Those that differ in nothing but policies and ports, without ends that touch."""
    ranges = coalesce([one.ports for one in some if one.ports])
    firsts = [ports.first for ports in ranges]
    names: dict[PortRange | None, set[str]] = defaultdict(set)
    for one in some:
        whole = ranges[bisect_right(firsts, one.ports.first) - 1] if one.ports else None
        names[whole].update(one.policies)
    for ports, whose in names.items():
        yield replace(some[0], ports=ports, policies=tuple(sorted(whose)))


def _needed(joined: list[Allowance]) -> list[Allowance]:
    """Those without which something would be refused; of what is allowed twice, the wider stays."""
    left = dict(enumerate(joined))
    sizes = {id(one.peers): _size(one) for one in joined}
    for place in sorted(left, key=lambda place: (sizes[id(joined[place].peers)], -place)):
        one = left.pop(place)
        if not _is_covered(one, [other for other in left.values() if _meet(one, other)]):
            left[place] = one
    return [left[place] for place in sorted(left)]


def _size(one: Allowance) -> int:
    """How many addresses it is for."""
    return sum([network.num_addresses for network in _networks(one)])


def _networks(one: Allowance) -> tuple[Network, ...]:
    return WHOLE[one.family] if one.peers is None else one.peers


def _meet(one: Allowance, other: Allowance) -> bool:
    """Whether the other allows something of each kind that the one allows."""
    return (
        one.family is other.family
        and other.protocol in (None, one.protocol)
        and (other.ports is None or (one.ports is not None and one.ports.overlaps(other.ports)))
    )


def _is_covered(one: Allowance, others: list[Allowance]) -> bool:
    """Whether those that it meets allow all of it."""
    ends = [(one.ports.first, one.ports.last + 1)] if one.ports else [(0, 1)]
    ends += [(other.ports.first, other.ports.last + 1) for other in others if other.ports]
    edges = sorted({max(ends[0][0], min(ends[0][1], edge)) for pair in ends for edge in pair})
    return all(  # from edge to edge, every port is like the first
        _have(one, [other for other in others if other.ports is None or first in other.ports])
        for first, _ in pairwise(edges)
    )


def _have(one: Allowance, others: list[Allowance]) -> bool:
    """Whether the peers of the others are all of its peers, or more."""
    wanted, sets = _networks(one), list(map(_networks, others))
    near = [some for some in sets if holder(some, wanted[0].network_address)]
    if not near or any(_are_within(wanted, some) for some in near):
        return bool(near)
    together = list(chain.from_iterable(sets))
    return len(together) <= MOST_COMPARED and _are_within(wanted, collapsed(together))


def _are_within(networks: Sequence[Network], others: Sequence[Network]) -> bool:
    """Whether all of them are there; as the others are the fewest, each is in one of them."""
    homes = ((one, holder(others, one.network_address)) for one in networks)
    return all(home is not None and home.prefixlen <= one.prefixlen for one, home in homes)
