"""From Services and what is behind them to the rules that a node should hold in its own namespace.

A Service shows several faces: its node ports at the node's addresses, its own ports at external
ones. Of each face one rule per endpoint takes its share of the new flows, both of what comes in and
of what the node itself sends; the shares of one face never meet, so the order of rules cannot
matter here either.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from rules.allotment import holder_of, name_of, wishes
from rules.desired import label
from rules.model import (
    LONGEST_LINK_NAME,
    OWN,
    Address,
    Chain,
    Desired,
    Detour,
    Family,
    Network,
    Pending,
    Protocol,
    Rule,
    Share,
    Surroundings,
    Sysctl,
    is_link_name,
)
from rules.node_ports import Allocations
from rules.occupied import Occupied
from rules.places import is_global
from rules.ports import ALL_PORTS, PortRange, coalesce, subtract
from rules.problems import printable
from rules.services import Endpoint, Publication, Service, ServicePort, ServiceType
from rules.values import Value

NUMBERS = 256  # of clients that are to keep their endpoints: each endpoint gets some
ROUTER_NEWS = "net.ipv6.conf.{}.accept_ra"
RESERVED = "net.ipv4.ip_local_reserved_ports"


class Publishing(Value, kw_only=True):
    """How a node publishes."""

    addresses: tuple[Address, ...] = ()  # where node ports are; none: all its own but loopback
    allowed: tuple[Network, ...] = ()  # external addresses that count although not its own
    ranges_only: bool = False  # the rest is left to kube-proxy
    runs_within: PortRange = ALL_PORTS  # there: the first port of a run is given, but not its end
    reserve: bool = False  # keep the kernel from giving published ports to programs


class Face(Value, kw_only=True):
    """Ports of a Service at one address, and what is behind them."""

    service: Service
    port: ServicePort
    family: Family
    at: Address  # or any of the node's own
    ports: PortRange
    endpoints: tuple[Endpoint, ...]
    ours: bool = True  # to serve; kube-proxy serves the rest

    @property
    def name(self) -> str:
        return name_of(self.service, self.port)

    @property
    def owner(self) -> str:
        return label(self.name)

    def __str__(self) -> str:
        where = "" if self.at == OWN[self.family] else f" at {self.at}"
        return f"{self.port.protocol.value} {self.ports}{where}"


class Node(Value, kw_only=True):
    """What a node is like, as far as publishing depends on it."""

    surroundings: Surroundings
    occupied: Occupied = Occupied()
    routes: Mapping[Address, str]  # the link that leads to each endpoint, where one does
    bridging: tuple[str, ...] = ()  # links that bridge what was translated, instead of routing it
    advised: tuple[str, ...] = ()  # links that have their routes from routers, while not one itself
    reserved: tuple[PortRange, ...] = ()

    @property
    def own(self) -> frozenset[Address]:
        """The addresses at which others reach it."""
        links = self.surroundings.links
        return frozenset(a.ip for link in links for a in link.addresses if is_global(a.ip))


def faces(
    publications: Iterable[Publication],
    allocations: Allocations,
    own: frozenset[Address] | None,
    how: Publishing,
) -> tuple[list[Face], list[str]]:
    """Everything that Services show on a node with these addresses, and what a person should know
    of what they do not; None: a node that is not there to ask."""
    found: list[Face] = []
    notes: list[str] = []
    for one in publications:
        service = one.service
        if service.headless or service.type is ServiceType.EXTERNAL_NAME:
            continue  # names lead to it, whatever addresses it may have been given
        given = [*service.external, *(() if service.restricted else service.ingress)]
        if service.restricted and service.ingress:
            words = "it is not published there, as loadBalancerSourceRanges are not enforced"
            notes.append(f"{service}: {', '.join(map(str, service.ingress))}: {words}")
        accepted = [at for at in dict.fromkeys(given) if _is_ours(at, own, how)]
        for at in dict.fromkeys(given):
            if at not in accepted:
                words = "is not the node's, and node_ports.external does not allow it"
                notes.append(f"{service}: {at} {words}")
        for port, endpoints in zip(service.ports, one.endpoints, strict=True):
            ours = port.ranged or not how.ranges_only
            for at, ports in dict.fromkeys(_shown(service, port, accepted, allocations, how)):
                family = Family.of(at)
                if service.families and family not in service.families:
                    continue
                behind = _behind(endpoints, family, local=service.local)
                if behind or not ours:
                    face = Face(
                        service=service,
                        port=port,
                        family=family,
                        at=at,
                        ports=ports,
                        endpoints=behind,
                        ours=ours,
                    )
                    found.append(face)
            if ours and not one.pending and not endpoints:
                notes.append(f"{name_of(service, port)}: nothing is behind it yet")
    return found, notes


def _is_ours(at: Address, own: frozenset[Address] | None, how: Publishing) -> bool:
    return own is None or at in own or any(at in network for network in how.allowed)


def _shown(
    service: Service,
    port: ServicePort,
    accepted: Iterable[Address],
    allocations: Allocations,
    how: Publishing,
) -> Iterator[tuple[Address, PortRange]]:
    """At which addresses, with which ports."""
    ports = allocations.held.get(holder_of(service, port)) if port in wishes(service) else None
    if ports is not None:
        for at in how.addresses or OWN.values():
            yield at, ports
    for at in accepted:
        yield at, port.ports


def _behind(endpoints: Iterable[Endpoint], family: Family, *, local: bool) -> tuple[Endpoint, ...]:
    found = {
        one for one in endpoints if Family.of(one.address) is family and (one.local or not local)
    }
    return tuple(sorted(found, key=lambda one: (int(one.address), one.port)))


# ------------------------------------------------------------------------------------- conflicts


def refuse(
    wanted: Iterable[Face], live: Iterable[Rule], occupied: Occupied
) -> tuple[list[Face], list[Pending], list[str]]:
    """The faces that meet nobody, those that are refused, and what a person should know. What is
    live already is not taken away by who comes later, but said."""
    there = {_key(rule.owner, rule.protocol, rule.destination, rule.ports) for rule in live}
    kept: list[Face] = []
    refused: list[Pending] = []
    notes: list[str] = []
    taken: dict[tuple[Protocol, Family, int], list[Face]] = {}
    turns = sorted(wanted, key=lambda one: (one.ours, not _is_live(one, there), *_order(one)))
    for face in turns:
        protocol, near = face.port.protocol, [taken.setdefault(one, []) for one in _blocks(face)]
        if not face.ours:
            _hold(near, face)
            continue
        others = (other for block in near for other in block)
        rival = next((other for other in others if _meets(face, other, occupied)), None)
        met = occupied.meeting(protocol, face.family, face.ports, face.at)
        if rival is not None:
            refused.append(Pending(face.name, f"{face} is held by {rival.name} ({rival})"))
        elif met and not _is_live(face, there):
            refused += [Pending(face.name, f"{face} cannot be published: {one}") for one in met]
        else:
            notes += [f"{face.name}: {face} is published, but {one}" for one in met]
            _hold(near, face)
            kept.append(face)
    return kept, list(dict.fromkeys(refused)), notes


def _blocks(face: Face) -> list[tuple[Protocol, Family, int]]:
    """Where those are that it may meet: of thousands, only neighbours are compared."""
    blocks = range(face.ports.first >> 8, (face.ports.last >> 8) + 1)
    return [(face.port.protocol, face.family, block) for block in blocks]


def _hold(near: Iterable[list[Face]], face: Face) -> None:
    for block in near:
        block.append(face)


def _key(*content: object) -> tuple[object, ...]:
    return content


def _is_live(face: Face, there: set[tuple[object, ...]]) -> bool:
    return _key(face.owner, face.port.protocol, face.at, face.ports) in there


def _order(face: Face) -> tuple[object, ...]:
    return str(face.service), face.port.name, face.family.value, int(face.at), face.ports


def _meets(one: Face, other: Face, occupied: Occupied) -> bool:
    """Whether some packet would be for both."""
    if one.port == other.port and one.service == other.service and one.ports == other.ports:
        return one.at == other.at
    if not one.ports.overlaps(other.ports):
        return False
    any_own = OWN[one.family]
    if any_own in (one.at, other.at):
        at = other.at if one.at == any_own else one.at
        return at == any_own or occupied.own is None or at in occupied.own
    return one.at == other.at


def newcomers(wanted: Iterable[Face], live: Iterable[Rule]) -> list[Face]:
    """The faces that are not there yet."""
    there = {_key(rule.owner, rule.protocol, rule.destination, rule.ports) for rule in live}
    return [face for face in wanted if face.ours and not _is_live(face, there)]


# ----------------------------------------------------------------------------------------- rules


Made = dict[Face, tuple[Rule, ...]]


def desire_node(
    shown: Iterable[Face],
    node: Node | None,
    how: Publishing,
    *,
    pending: Iterable[Pending] = (),
    made: Made | None = None,
) -> Desired:
    """What a node should hold that shows these faces; without a node, there is nobody to ask. Of
    thousands, most are the same at the next look: then their rules are the very same."""
    given = list(shown)
    before = made or {}
    now = {face: before.get(face) or tuple(_made(face)) for face in given}
    if made is not None:
        made.clear()
        made.update(now)
    rules = {rule for some in now.values() for rule in some}
    families = {face.family for face in given}
    sysctls: set[Sysctl] = set()
    notes: list[str] = []
    if Family.IP in families:
        sysctls.add(Sysctl("net.ipv4.ip_forward", "1"))
    if Family.IP6 in families:
        sysctls.add(Sysctl("net.ipv6.conf.all.forwarding", "1"))
    if node is not None:
        rules |= {rule for family in families for rule in _detours(given, family, node)}
        sysctls |= set(_settings(given, families, node, how))
        notes += () if how.reserve else _ephemeral(given, node)
        notes += _unreachable(given, node)
        notes += _unanswered(given, node)
        notes += [
            f"{link} bridges translated packets itself (net.bridge.bridge-nf-call-iptables): a"
            " machine behind it reaches its own Service only if its port there is in hairpin mode"
            for link in (printable(one, LONGEST_LINK_NAME) for one in node.bridging)
        ]
    return Desired(
        rules=frozenset(rules),
        sysctls=frozenset(sysctls),
        pending=tuple(sorted(pending, key=str)),
        notes=tuple(sorted(notes)),
    )


def _made(face: Face) -> Iterator[Rule]:
    sticky = face.service.affinity is not None
    for place, share in _shares(tuple(one.address for one in face.endpoints), sticky):
        endpoint = face.endpoints[place]
        for chain in (Chain.PREROUTING, Chain.OUTPUT):
            yield Rule(
                chain=chain,
                family=face.family,
                owner=face.owner,
                protocol=face.port.protocol,
                ports=face.ports,
                destination=face.at,
                to=endpoint.address,
                to_port=None if endpoint.port == face.ports.first else endpoint.port,
                share=share,
            )


@lru_cache(256)
def _shares(addresses: tuple[Address, ...], sticky: bool) -> tuple[tuple[int, Share | None], ...]:
    """What each endpoint gets, by its place. Where clients keep theirs, one that comes or goes
    changes nothing between the others: each number is for the endpoint that draws highest."""
    count = len(addresses)
    if count == 1:
        return ((0, None),)
    if not sticky:
        return tuple((place, _share(count, (place,))) for place in range(count))
    from hashlib import blake2b  # most Services do without

    # Two at one address, with ports of their own, draw for themselves.
    names = [one.packed * (1 + addresses[:place].count(one)) for place, one in enumerate(addresses)]
    won: dict[int, list[int]] = {}
    for number in range(NUMBERS):
        draws = [
            blake2b(number.to_bytes(2, "big") + name, digest_size=8).digest() for name in names
        ]
        won.setdefault(draws.index(max(draws)), []).append(number)
    return tuple((place, Share(NUMBERS, tuple(won[place]), True)) for place in sorted(won))


@lru_cache(1024)
def _share(of: int, at: tuple[int, ...]) -> Share:
    return Share(of, at)


def _detours(shown: Iterable[Face], family: Family, node: Node) -> Iterator[Rule]:
    """Whose answers would go another way: of who reaches an endpoint over the link behind which it
    is itself, and of endpoints on other nodes."""
    here = [face for face in shown if face.family is family]
    endpoints = {one for face in here for one in face.endpoints}
    asked = {face.at for face in here} - {OWN[family]}
    if any(face.at == OWN[family] for face in here):
        asked |= {at for at in node.own if Family.of(at) is family}
    published = tuple(sorted(asked))
    reached = {node.routes[one.address] for one in endpoints if one.address in node.routes}
    links = {link for link in reached if is_link_name(link)}
    remote = {one.address for one in endpoints if not one.local}
    ways = []
    if published and links:
        ways.append(Detour(published=published, links=tuple(sorted(links))))
    if published and remote:
        ways.append(Detour(published=published, remote=tuple(sorted(remote))))
    for way in ways:
        yield Rule(chain=Chain.POSTROUTING, family=family, owner="node", detour=way)
    for one in {end.address for end in endpoints}:  # what bridges translate came in on no link
        if node.routes.get(one) in node.bridging:
            yield Rule(
                chain=Chain.POSTROUTING, family=family, owner="node", source=one, destination=one
            )


def _settings(
    shown: Iterable[Face], families: Iterable[Family], node: Node, how: Publishing
) -> Iterator[Sysctl]:
    """A router does not listen to other routers unless it is told to: without, the node would lose
    the routes that it has from them."""
    if Family.IP6 in families:
        for link in node.advised:
            yield Sysctl(ROUTER_NEWS.format(link.replace(".", "/")), "2")
    if how.reserve:
        ports = coalesce([*node.reserved, *(face.ports for face in shown)])
        yield Sysctl(RESERVED, ",".join(map(str, ports)))


def _ephemeral(shown: Iterable[Face], node: Node) -> Iterator[str]:
    given = node.occupied.ephemeral
    free = subtract([given] if given else [], node.reserved)
    for face in shown:
        if any(face.ports.overlaps(one) for one in free):
            words = f"meets the ports {given} that programs of the node are given at random"
            yield f"{face.name}: {face} {words} (net.ipv4.ip_local_port_range)"


def _unreachable(shown: Iterable[Face], node: Node) -> Iterator[str]:
    lost = {
        (face.name, one.address)
        for face in shown
        for one in face.endpoints
        if one.address not in node.routes
    }
    for name, address in sorted(lost, key=str):
        yield f"{name}: the node has no route to {address}"


def _unanswered(shown: Iterable[Face], node: Node) -> Iterator[str]:
    """Who is behind a link that no rule can name. On other nodes it is the endpoints that rules
    name."""
    odd = {address: link for address, link in node.routes.items() if not is_link_name(link)}
    met = {
        (face.name, one.address)
        for face in shown
        for one in face.endpoints
        if one.address in odd and one.local
    }
    for name, address in sorted(met, key=str):
        link = f"the link {printable(odd[address], LONGEST_LINK_NAME)}, which no rule can name"
        yield f"{name}: {address} is behind {link}: who comes in by it may get no answer"
