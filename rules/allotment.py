"""Which node ports the Services of a node have: what they wish for, or were given before, or are
given now. Where the API server of a cluster gives them, only what it gave is checked."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from rules.desired import label
from rules.model import OWN, Address, Chain, Pending, Rule
from rules.node_ports import (
    Allocations,
    Bands,
    Held,
    Holder,
    Pick,
    allocate,
    assign,
    outside,
    rebuild,
    release,
)
from rules.ports import PortRange
from rules.problems import Problem
from rules.services import Publication, Service, ServicePort, ServiceType
from rules.values import Value

STATIC, DYNAMIC = "static", "dynamic"
_WITH_NODE_PORTS = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER)


class Scope(Value):
    """How many were given ports that they had not before, and who got none."""

    given: int = 0
    refused: tuple[Pending, ...] = ()


class Allotment(Value, kw_only=True):
    """Who has which node ports now."""

    allocations: Allocations
    static: Scope = Scope()  # of those who wish for certain ones
    dynamic: Scope = Scope()

    @property
    def refused(self) -> tuple[Pending, ...]:
        return (*self.static.refused, *self.dynamic.refused)


def holder_of(service: Service, port: ServicePort) -> Holder:
    """What its node ports are held for."""
    return Holder(str(service), port.name, port.protocol)


def name_of(service: Service, port: ServicePort) -> str:
    """Whose the rules of a port are."""
    return f"{service}/{port.name}" if port.name else str(service)


def wishes(service: Service) -> tuple[ServicePort, ...]:
    """The ports of a Service that are to have node ports."""
    if service.type not in _WITH_NODE_PORTS or service.headless:
        return ()
    if service.type is ServiceType.LOAD_BALANCER and not service.allocates:
        return tuple(port for port in service.ports if port.node_ports)
    return service.ports


def allot(
    known: Allocations,
    publications: Iterable[Publication],
    avoid: Iterable[PortRange] = (),
    *,
    runs_within: PortRange | None = None,
) -> Allotment:
    """Who has what already keeps it; then wishes come first, and then those without, so that nobody
    is given what somebody else names. With `runs_within` somebody else gave the first port of each:
    that is its own, whoever has it in a run, and a run ends where these ports end."""
    asking = [
        (one.service, port)
        for one in sorted(publications, key=lambda one: str(one.service))
        for port in wishes(one.service)
    ]
    wishing = {holder_of(*each): each[1].node_ports for each in asking}
    known = release(known, *(known.held.keys() - wishing.keys()))
    before = dict(known.held)
    leaving = [one for one, ports in before.items() if wishing[one] not in (None, ports)]
    trespassing = _trespassing(wishing) if runs_within else frozenset()
    known = release(known, *leaving, *trespassing)  # all at once, as two may change places
    asking.sort(key=lambda each: (holder_of(*each) in trespassing, _turn(each[0], each[1], before)))
    left, avoided = asking, tuple(avoid)
    while True:  # who moves or goes without leaves something for who was refused
        known, why = _granted(known, left, avoided, runs_within or known.bands.ports)
        if len(why) == len(left):
            break
        left = [each for each in left if holder_of(*each) in why]
    given = {STATIC: 0, DYNAMIC: 0}
    refused: dict[str, list[Pending]] = {STATIC: [], DYNAMIC: []}
    for service, port in asking:
        holder, scope = holder_of(service, port), STATIC if port.node_ports else DYNAMIC
        given[scope] += holder not in why and before.get(holder) != known.held[holder]
        if problem := why.get(holder):
            words = f"{problem.what}. {problem.fix}"
            refused[scope].append(Pending(name_of(service, port), words))
    return Allotment(
        allocations=known,
        static=Scope(given[STATIC], tuple(refused[STATIC])),
        dynamic=Scope(given[DYNAMIC], tuple(refused[DYNAMIC])),
    )


def _trespassing(wishing: Mapping[Holder, PortRange | None]) -> frozenset[Holder]:
    """Whose run has a port in it that is the first of somebody else's."""
    firsts = sorted({(ports.first, holder.owner) for holder, ports in wishing.items() if ports})
    found: set[Holder] = set()
    for holder, ports in wishing.items():
        if ports is not None:
            start = bisect_left(firsts, (ports.first, ""))
            end = bisect_left(firsts, (ports.last + 1, ""))
            if any(owner != holder.owner for _, owner in firsts[start:end]):
                found.add(holder)
    return frozenset(found)


def _granted(
    known: Allocations,
    asking: Iterable[tuple[Service, ServicePort]],
    avoid: tuple[PortRange, ...],
    runs: PortRange,
) -> tuple[Allocations, dict[Holder, Problem]]:
    """What they have when each was asked once, and who got nothing."""
    why: dict[Holder, Problem] = {}
    result: Allocations | Problem
    for service, port in asking:
        holder = holder_of(service, port)
        if port.node_ports is not None and port.ranged and not runs.holds(port.node_ports):
            result = outside(port.node_ports, runs)
        elif port.node_ports is not None:
            result = assign(known, holder, port.node_ports)
        else:
            result = _given(known, service, port, avoid)
        if isinstance(result, Problem):
            why[holder] = result
            known = release(known, holder)
        else:
            known = result
    return known, why


def _turn(
    service: Service, port: ServicePort, before: Mapping[Holder, PortRange]
) -> tuple[int, str, str, str]:
    """Who only keeps, who wishes, who needs more or fewer than before, who has none."""
    held, wish = before.get(holder_of(service, port)), port.node_ports
    if wish is not None:
        turn = 0 if wish == held else 1
    elif held is not None:
        turn = 0 if len(held) == len(port.ports) else 2
    else:
        turn = 3
    return turn, str(service), port.name, port.protocol.value


def _given(
    known: Allocations, service: Service, port: ServicePort, avoid: tuple[PortRange, ...]
) -> Allocations | Problem:
    """Where another protocol has the same ports of the Service it gets the same node ports, as from
    the API server. What is drawn depends on the name: who is planned for gets it when it comes to
    it, and loses nothing with the state."""
    holder, count = holder_of(service, port), len(port.ports)
    held = known.held.get(holder)
    for other in () if held and len(held) == count else service.ports:
        theirs = known.held.get(holder_of(service, other))
        if not theirs or len(theirs) != count:
            continue
        if other.ports == port.ports and other.protocol is not port.protocol:
            same = assign(known, holder, theirs)
            if isinstance(same, Allocations):
                return same
    return allocate(known, holder, count, _drawing(str(holder)), avoid)


def _drawing(name: str) -> Pick:
    """Draws that look random, and are the same each time for one name."""
    drawn = 0

    def pick(below: int) -> int:
        nonlocal drawn
        drawn += 1
        return int.from_bytes(blake2b(f"{name}/{drawn}".encode(), digest_size=8).digest()) % below

    return pick


def recalled(
    bands: Bands,
    stored: Iterable[Held],
    rules: Iterable[Rule],
    services: Iterable[Service],
    addresses: Iterable[Address] = (),
) -> Allocations:
    """What was given before: as it was written down, else as the rules in the kernel tell, for the
    node's own addresses or these."""
    at = {*OWN.values(), *addresses}
    live: dict[str, set[PortRange]] = {}
    for rule in rules:
        if rule.chain is Chain.PREROUTING and rule.destination in at and rule.ports:
            live.setdefault(rule.owner, set()).add(rule.ports)
    found = [
        (holder_of(service, port), ports)
        for service in services
        for port in wishes(service)
        # One of the addresses may be external, too: there it has its own ports.
        for ports in sorted(
            live.get(label(name_of(service, port)), ()), key=lambda one: (one == port.ports, one)
        )
        if len(ports) == len(port.ports)
    ]
    return rebuild(bands, [*stored, *found])
