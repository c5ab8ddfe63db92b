"""Which published ports meet what others have on a node: another Service, a socket that listens, a
translation of somebody else. Ports that are taken are left out, and the rest of a run is shown."""

from collections.abc import Iterable, Mapping

from rules.model import OWN, Family, Pending, Protocol, Rule
from rules.occupied import Occupied, Translation
from rules.ports import ALL_PORTS, PortRange, coalesce, subtract
from rules.publish import Face
from rules.values import replace

UNREAD = "a table of others may translate it, and cannot be read"
LivePorts = Mapping[tuple[object, ...], tuple[PortRange, ...]]


def refuse(
    wanted: Iterable[Face], live: Iterable[Rule], occupied: Occupied, *, proxied: bool = False
) -> tuple[list[Face], list[Pending], list[str]]:
    """The faces that can be shown, what is refused, and what a person should know.

    Of a run, the ports are left out that somebody else uses, and the rest is shown. A socket that
    comes to listen on a port which is live takes nothing away, but is noted; a translation of
    others does, as its owner would lose the traffic. While a table of others cannot be read, what
    is live stays and nothing else is shown. Where a proxy serves the first port of each run
    (proxied), its translation of that port is no conflict."""
    there = _live_ports(live)
    kept: list[Face] = []
    refused: list[Pending] = []
    notes: list[str] = []
    taken: dict[tuple[Protocol, Family, int], list[Face]] = {}
    for face in sorted(wanted, key=lambda one: (one.ours, _newness(one, there), *_order(one))):
        near = [taken.setdefault(one, []) for one in _blocks(face)]
        if not face.ours:
            _hold(near, face)
            continue
        others = (other for block in near for other in block)
        rival = next((other for other in others if _meets(face, other, occupied)), None)
        if rival is not None:
            refused.append(Pending(face.name, f"{face} is held by {rival.name} ({rival})"))
            continue
        left, why, more = _left_out(face, _new_ports(face, there), occupied, proxied=proxied)
        pieces = _pieces(face, left)
        refused += why
        if pieces:
            notes += more
            _hold(near, face)
            kept += pieces
    return kept, list(dict.fromkeys(refused)), notes


def _left_out(
    face: Face, new: list[PortRange], occupied: Occupied, *, proxied: bool
) -> tuple[list[PortRange], list[Pending], list[str]]:
    """The ports of a face that others have, who they are, and who is only to be noted."""
    met: list[tuple[list[PortRange], str]] = []
    notes: list[str] = []
    for one in occupied.meeting(face.port.protocol, face.family, face.ports, face.at):
        foreign = isinstance(one, Translation) and one.foreign
        within: Iterable[PortRange] = [face.ports] if foreign else new
        if foreign and proxied:
            within = subtract(within, [PortRange(face.ports.first, face.ports.first)])
        ports = common(one.ranges, within)
        if ports:
            met.append((ports, str(one)))
        elif not (foreign and proxied):
            notes.append(f"{face.name}: {face} is published, but {one}")
    unread = [f"{UNREAD}: {one}" for one in occupied.unreadable]
    met += [(new, one) for one in unread if new]
    notes += [f"{face.name}: {face} is published, but {one}" for one in unread if not new]
    left = [ports for some, _ in met for ports in some]
    whole = not subtract([face.ports], left)
    refused = [
        Pending(
            face.name,
            f"{face} cannot be published: {who}"
            if whole
            else f"{replace(face, ports=ports)} is left out: {who}",
            not whole,
        )
        for some, who in met
        for ports in some
    ]
    return left, refused, notes


def common(some: Iterable[PortRange], others: Iterable[PortRange]) -> list[PortRange]:
    """The ports that are in both."""
    return list(subtract(coalesce(some), subtract([ALL_PORTS], others)))


def _pieces(face: Face, left: Iterable[PortRange]) -> list[Face]:
    """What remains of a face without these ports; each port leads where it did."""
    ranges = subtract([face.ports], left)
    return [face if ports == face.ports else piece(face, ports) for ports in ranges]


def piece(face: Face, ports: PortRange) -> Face:
    offset = ports.first - face.ports.first
    endpoints = tuple(replace(one, port=one.port + offset) for one in face.endpoints)
    return replace(face, ports=ports, endpoints=endpoints)


def _blocks(face: Face) -> list[tuple[Protocol, Family, int]]:
    """Where those are that it may meet: of thousands, only neighbours are compared."""
    blocks = range(face.ports.first >> 8, (face.ports.last >> 8) + 1)
    return [(face.port.protocol, face.family, block) for block in blocks]


def _hold(near: Iterable[list[Face]], face: Face) -> None:
    for block in near:
        block.append(face)


def _live_ports(live: Iterable[Rule]) -> LivePorts:
    """The ports that each owner has already, at each address."""
    found: dict[tuple[object, ...], list[PortRange]] = {}
    for rule in live:
        if rule.ports is not None:
            found.setdefault((rule.owner, rule.protocol, rule.destination), []).append(rule.ports)
    return {key: coalesce(ports) for key, ports in found.items()}


def _new_ports(face: Face, there: LivePorts) -> list[PortRange]:
    """Those that are not live."""
    live = there.get((face.owner, face.port.protocol, face.at), ())
    return [] if live == (face.ports,) else list(subtract([face.ports], live))


def _newness(face: Face, there: LivePorts) -> int:
    """0: all of it is live; 1: a part; 2: nothing."""
    new = _new_ports(face, there)
    return 0 if not new else 2 if new == [face.ports] else 1


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
    """The faces that are not there yet, or not whole."""
    there = _live_ports(live)
    return [face for face in wanted if face.ours and _new_ports(face, there)]
