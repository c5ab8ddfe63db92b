"""From Services and what is behind them to the rules that a node should hold in its own namespace.

A Service shows several faces: its node ports at the node's addresses, its own ports at external
ones. Of each face one rule per endpoint takes its share of the new flows, both of what comes in and
of what the node itself sends; the shares of one face never meet, so the order of rules cannot
matter here either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

POINTS = 32  # of each endpoint on a ring: with more the shares are more even, and cost more
CELLS = 128  # of the ring for each endpoint: so many numbers its clients have
FEWEST = 1 << 10  # cells: up to 8 endpoints their number stays the same
NODE_OWNER = "node"  # of rules that are for all Services together
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
    share: tuple[PortRange, ...] = ()  # of these: ours, from earlier looks

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


# ----------------------------------------------------------------------------------------- rules


Made = dict[Face, tuple[Rule, ...]]


def desire_node(  # noqa: PLR0913 - what is shown, where, and what there was
    shown: Iterable[Face],
    node: Node | None,
    how: Publishing,
    *,
    pending: Iterable[Pending] = (),
    made: Made | None = None,
    live: Iterable[Rule] = (),
) -> Desired:
    """What a node should hold that shows these faces; without a node, there is nobody to ask. Of
    thousands, most are the same at the next look: then their rules are the very same. While some
    Service is pending, what is live of the rules that all share stays: its flows need it."""
    given, waiting = list(shown), tuple(sorted(pending, key=str))
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
        made_now = {rule for family in families for rule in _detours(given, family, node)}
        rules |= _joined(made_now, live) if waiting else made_now
        sysctls |= set(_settings(given, families, node, how, waiting=bool(waiting)))
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
        pending=waiting,
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
    """What each endpoint gets, by its place."""
    count = len(addresses)
    if count == 1:
        return ((0, None),)
    if not sticky:
        return tuple((place, _share(count, (place,))) for place in range(count))
    of, numbers = clients(addresses)
    return tuple((place, Share(of, tuple(numbers[place]), True)) for place in range(count))


def clients(addresses: Sequence[Address]) -> tuple[int, list[list[int]]]:
    """How many numbers clients have, and those of each endpoint, where clients keep theirs.

    Endpoints have points on a ring, and from each the ring is theirs to the next point of anybody:
    one that comes or goes changes nothing between the others. The ring is cut into cells, each of
    which belongs to whom its beginning belongs to. A cell has the number whose bits are its own
    turned round: when there are twice as many cells, because there are more endpoints, both halves
    of one have its number in their lower bits, and most clients stay where they are."""
    places = sorted(_points(addresses).items())
    count = max(FEWEST, CELLS * len(addresses))
    bits = (count - 1).bit_length()
    while True:
        found: list[list[int]] = [[] for _ in addresses]
        owner, after = places[-1][1], 0
        for cell in range(1 << bits):
            begin = cell << (32 - bits)
            while after < len(places) and places[after][0] <= begin:
                owner, after = places[after][1], after + 1
            found[owner].append(_turned(cell, bits))
        if all(found):
            return 1 << bits, [sorted(numbers) for numbers in found]
        bits += 1


def _points(addresses: Sequence[Address]) -> dict[int, int]:
    """The places of endpoints at their points on the ring."""
    from hashlib import blake2b  # most Services do without

    points: dict[int, tuple[bytes, int]] = {}
    seen: dict[Address, int] = {}
    for place, address in enumerate(addresses):
        seen[address] = seen.get(address, 0) + 1
        name = address.packed * seen[address]  # two at one address, with ports of their own
        for part in range(POINTS // 16):
            drawn = blake2b(bytes([part]) + name, digest_size=64).digest()
            for start in range(0, 64, 4):
                at = int.from_bytes(drawn[start : start + 4], "big")
                points[at] = min(points.get(at, (name, place)), (name, place))
    return {at: place for at, (_, place) in points.items()}


def _turned(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2)


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
        yield Rule(chain=Chain.POSTROUTING, family=family, owner=NODE_OWNER, detour=way)
    for one in {end.address for end in endpoints}:  # what bridges translate came in on no link
        if node.routes.get(one) in node.bridging:
            yield Rule(
                chain=Chain.POSTROUTING,
                family=family,
                owner=NODE_OWNER,
                source=one,
                destination=one,
            )


def _joined(wanted: Iterable[Rule], live: Iterable[Rule]) -> set[Rule]:
    """Those that are wanted and those that are there, each kind of detour as one rule."""
    found: set[Rule] = set()
    ways: dict[tuple[Family, bool], list[Detour]] = {}
    for rule in (*wanted, *live):
        if rule.chain is not Chain.POSTROUTING or rule.owner != NODE_OWNER:
            continue
        if rule.detour is None:
            found.add(rule)
        else:
            ways.setdefault((rule.family, bool(rule.detour.links)), []).append(rule.detour)
    for (family, _), some in ways.items():
        way = Detour(
            published=tuple(sorted({at for one in some for at in one.published})),
            links=tuple(sorted({link for one in some for link in one.links})),
            remote=tuple(sorted({at for one in some for at in one.remote})),
        )
        found.add(Rule(chain=Chain.POSTROUTING, family=family, owner=NODE_OWNER, detour=way))
    return found


def _settings(
    shown: Iterable[Face],
    families: Iterable[Family],
    node: Node,
    how: Publishing,
    *,
    waiting: bool,
) -> Iterator[Sysctl]:
    """A router does not listen to other routers unless it is told to: without, the node would lose
    the routes that it has from them."""
    if Family.IP6 in families:
        for link in node.advised:
            yield Sysctl(ROUTER_NEWS.format(link.replace(".", "/")), "2")
    ours = reservation(shown, node, how, waiting=waiting)
    if how.reserve or node.share:
        ports = coalesce([*subtract(node.reserved, node.share), *ours])
        yield Sysctl(RESERVED, ",".join(map(str, ports)))


def reservation(
    shown: Iterable[Face], node: Node, how: Publishing, *, waiting: bool
) -> tuple[PortRange, ...]:
    """The ports that are to be reserved on behalf of what is shown; what somebody else reserved is
    not ours. While some Service is pending, nothing is given back."""
    if not how.reserve:
        return ()
    wanted = [face.ports for face in shown] + (list(node.share) if waiting else [])
    return subtract(coalesce(wanted), subtract(node.reserved, node.share))


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
