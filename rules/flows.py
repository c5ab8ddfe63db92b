"""Which open flows a change has to forget: those of ports that were taken away or point elsewhere
now, and those that would keep a newly forwarded UDP port from being forwarded. No others."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set

from rules.model import FORWARDED, Address, Chain, Family, Live, Protocol, Rule
from rules.plan import Plan
from rules.ports import ALL_PORTS, PortRange, coalesce, subtract
from rules.values import Value


class Flow(Value, kw_only=True):
    """A tracked flow: where its first packet was going, and who answers it."""

    family: Family
    protocol: int  # its number: other protocols than ours are tracked, too
    port: int
    destination: Address
    answerer: Address


class Forgotten(Value, kw_only=True):
    """Flows to these ports that one machine answers; where that is None, flows to an address of the
    namespace itself that were not translated."""

    family: Family
    protocol: Protocol | None  # None: of those that have no ports
    ports: tuple[PortRange, ...]
    answerer: Address | None

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        """Whether the flow is one of them, in a namespace with these addresses of its own."""
        if self.answerer is None and flow.destination not in own:
            return False  # what the guest sends out to others has such ports, too
        if self.answerer is not None and flow.destination == self.answerer:
            return False  # nobody translated it: it was sent to the guest itself
        answerer = self.answerer or flow.destination
        if flow.family is not self.family or flow.answerer != answerer:
            return False
        if self.protocol is None:
            return flow.protocol not in NUMBERS.values()
        return flow.protocol == NUMBERS[self.protocol] and any(flow.port in p for p in self.ports)


NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17}
TRANSLATING = (Chain.PREROUTING, Chain.OUTPUT)

_Way = tuple[Family, Protocol | None, Address | None, int | None]


def forgotten(plan: Plan) -> tuple[Forgotten, ...]:
    """What a plan takes away or points elsewhere, and what would shadow its new UDP ports."""
    gone_rules = [*plan.remove, *plan.leftovers, *(live for live, _ in plan.change)]
    before = _ways(old.rule for old in gone_rules if isinstance(old, Live))
    new = _ways([*plan.add, *(rule for _, rule in plan.change)])
    taken = {
        way: gone for way, ports in before.items() if (gone := subtract(ports, new.get(way, [])))
    }
    stays = _ways(_meeting((live.rule for live in plan.unchanged), taken.values()))
    found = [
        Forgotten(family=way[0], protocol=way[1], ports=gone, answerer=way[2])
        for way, ports in taken.items()
        if (gone := subtract(ports, stays.get(way, [])))
    ]
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=fresh, answerer=None)
        for (family, protocol, _, _), ports in new.items()
        if protocol is Protocol.UDP and (fresh := subtract(ports, _of(before, family, protocol)))
    ]
    if any(rule.guards for rule in plan.add):
        stay = [live.rule for live in plan.unchanged]
        found += _strays(_ways([*stay, *plan.add, *(rule for _, rule in plan.change)]))
    return tuple(found)


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
    ways = _ways(rules)
    found = _strays(ways)
    found += [
        Forgotten(family=family, protocol=Protocol.UDP, ports=tuple(ports), answerer=None)
        for (family, protocol, _, _), ports in ways.items()
        if protocol is Protocol.UDP
    ]
    return tuple(found)


def _strays(ways: dict[_Way, list[PortRange]]) -> list[Forgotten]:
    """The flows to guests that none of these ways is for."""
    guests = {(family, to) for family, _, to, _ in ways}
    return [
        Forgotten(family=family, protocol=protocol, ports=gone, answerer=guest)
        for family, guest in guests
        for protocol in FORWARDED
        if (gone := subtract([ALL_PORTS], _to(ways, family, protocol, guest)))
    ]


def _to(
    ways: dict[_Way, list[PortRange]], family: Family, protocol: Protocol, guest: Address | None
) -> list[PortRange]:
    return [
        one
        for (other, of, to, _), ports in ways.items()
        if (other, of, to) == (family, protocol, guest)
        for one in ports
    ]


def _ways(rules: Iterable[Rule]) -> dict[_Way, list[PortRange]]:
    """The ports of each way a packet can be sent."""
    ways: dict[_Way, list[PortRange]] = {}
    for rule in rules:
        if rule.chain in TRANSLATING and not rule.guards:
            shift = rule.to_port - rule.ports.first if rule.to_port and rule.ports else None
            for protocol in [rule.protocol] if rule.protocol else [*Protocol, None]:
                way = (rule.family, protocol, rule.to, shift)
                ways.setdefault(way, []).append(rule.ports or ALL_PORTS)
    return {way: list(coalesce(ports)) for way, ports in ways.items()}


def _of(
    ways: dict[_Way, list[PortRange]], family: Family, protocol: Protocol | None
) -> list[PortRange]:
    return [
        one
        for (other, of, _, _), ports in ways.items()
        if other is family and of is protocol
        for one in ports
    ]
