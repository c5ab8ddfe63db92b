"""From policies and everybody known to what is meant: which policies cut a machine off, and what
each rule of theirs allows, as addresses and ports. What no policy understands is not in here, and
so stays shut."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from itertools import chain
from types import MappingProxyType

from rules.model import Address, Family, Machine, Protocol
from rules.policies import (
    METADATA_NAME,
    Direction,
    IpBlock,
    Labels,
    Namespace,
    Network,
    NetworkPolicy,
    Party,
    Peers,
    PolicyPort,
    PolicyRule,
    Selector,
    apart,
    collapsed,
    number_of,
)
from rules.ports import PortRange

Names = tuple[tuple[str, Protocol, int], ...]
Reach = Mapping[Family, tuple[Network, ...] | None]  # None: everybody; no such family: nobody
Way = tuple[Protocol | None, PortRange | None, Reach]
# By the name and protocol of a port, whom each number is at.
_Numbers = dict[tuple[object, Protocol], dict[int, list[Network]]]

WHOLE = {Family.IP: (ip_network("0.0.0.0/0"),), Family.IP6: (ip_network("::/0"),)}
_EVERYBODY: Reach = MappingProxyType(dict.fromkeys(Family))


class Register:
    """All policies and everybody known, each question about them answered once."""

    __slots__ = ("_known", "_labels", "_others", "_parties", "_policies", "_reaches")

    def __init__(
        self,
        policies: Iterable[NetworkPolicy],
        parties: Iterable[Party],
        namespaces: Iterable[Namespace] = (),
        *,
        all_labels: bool = True,
    ) -> None:
        """Where `namespaces` are not all there are, the labels of any other are not known."""
        self._policies: dict[str, list[NetworkPolicy]] = defaultdict(list)
        self._parties: dict[str, list[Party]] = defaultdict(list)
        self._labels: dict[str, Labels | None] = {}
        self._others: Labels | None = () if all_labels else None
        self._reaches: dict[object, Reach] = {}
        self._known: dict[object, _Numbers] = {}
        for policy in sorted(set(policies), key=str):
            self._policies[policy.namespace].append(policy)
        for party in parties:
            self._parties[party.namespace].append(party)
        for one in namespaces:
            said = self._labels.setdefault(one.name, one.labels)
            if said != one.labels:  # two manifests of one namespace: who knows which is true
                self._labels[one.name] = None

    def selecting(self, machine: Machine, direction: Direction) -> tuple[NetworkPolicy, ...]:
        """The policies that cut a machine off."""
        return tuple(
            policy
            for policy in self._policies.get(machine.namespace, ())
            if policy.rules(direction) is not None and policy.selector.matches(machine.labels)
        )

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
                yield from self._named(namespace, rule, one)
            elif (number := number_of(names, one.port, one.protocol)) is not None:
                yield one.protocol, PortRange(number, number), reach

    def _named(self, namespace: str, rule: PolicyRule, port: PolicyPort) -> Iterator[Way]:
        """The way to each number that peers have for a port of that name."""
        numbers = self._numbers(namespace, rule).get((port.port, port.protocol), {})
        for number, networks in numbers.items():
            yield port.protocol, PortRange(number, number), _by_family(networks)

    def _numbers(self, namespace: str, rule: PolicyRule) -> _Numbers:
        """Of everybody that a rule means, who has which number for each name: asked once, however
        many names the rule has."""
        key = namespace, rule.peers
        if key not in self._known:
            found: _Numbers = {}
            for peer in rule.peers or (IpBlock(whole) for [whole] in WHOLE.values()):
                for party, address in self._met(namespace, peer):
                    first = {(name, of): number for name, of, number in reversed(party.names)}
                    for name, number in first.items():
                        at = found.setdefault(name, {})
                        at.setdefault(number, []).append(ip_network(address))
            self._known[key] = found
        return self._known[key]

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
                    if party.addresses and party.is_chosen(peer.pods):
                        yield from ((party, address) for address in party.addresses)

    def _is_meant(self, home: str, own: str, selector: Selector | None) -> bool:
        if selector is None:
            return home == own
        name = METADATA_NAME, home
        known = self._labels.get(home, self._others)
        if known is None:  # of labels that nobody knows, none is there, and none is missing
            certain = all(one.key == METADATA_NAME for one in selector.requirements)
            return certain and selector.matches((name,))
        return selector.matches((name, *known))


def _by_family(networks: Iterable[Network]) -> Reach:
    """These addresses in networks that are apart; all that there are of a family is everybody."""
    found: dict[Family, list[Network]] = {}
    for network in networks:
        found.setdefault(Family.of(network.network_address), []).append(network)
    return {
        family: None if collapsed(some) == WHOLE[family] else apart(some)
        for family, some in found.items()
    }
