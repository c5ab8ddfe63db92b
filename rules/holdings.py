"""What a namespace forwards, range by range: the rules of both families, for packets from outside
and from inside, and for each endpoint of a Service, are one holding if they serve the same ports of
the same owner. The map and the live view of a namespace are made of these."""

from collections.abc import Iterable, Sequence

from rules.model import OWN, Address, Chain, Live, Protocol, Rule
from rules.ports import ALL_PORTS, PortRange
from rules.problems import printable
from rules.values import Value
from rules.words import destination, target

TRANSLATING = (Chain.PREROUTING, Chain.OUTPUT)
ORDER = {protocol: place for place, protocol in enumerate((*Protocol, None))}
NAMED = 2  # targets and entrances that are written out
LONGEST_NAME = 200


class Holding(Value, kw_only=True):
    """Ports that somebody holds, with all the rules that forward them."""

    owner: str
    protocol: Protocol | None  # None: every protocol
    ports: PortRange
    to_port: int | None = None  # the first of the target's, where the range is shifted
    rules: tuple[Live, ...]

    @property
    def packets(self) -> int:
        return sum(live.packets for live in self.rules)

    @property
    def octets(self) -> int:
        return sum(live.octets for live in self.rules)

    @property
    def what(self) -> str:
        """tcp 1000-8000."""
        return f"{self.protocol.value} {self.ports}" if self.protocol else "everything"

    @property
    def whose(self) -> str:
        """The owner, as it can be shown to a terminal."""
        return printable(self.owner, LONGEST_NAME)

    @property
    def is_for_own(self) -> bool:
        """Whether it depends on which addresses the namespace has."""
        return any(live.rule.destination == OWN[live.rule.family] for live in self.rules)

    @property
    def targets(self) -> tuple[str, ...]:
        """Where it goes: addresses and, where the range is shifted, their ports."""
        ends = {(_number(live.rule.to), target(live.rule)) for live in self.rules}
        return tuple(dict.fromkeys(text for _, text in sorted(ends)))

    @property
    def entrances(self) -> tuple[str, ...]:
        """Where packets for it come in; the way from inside only where there is no other."""
        rules = [live.rule for live in self.rules]
        outside = [rule for rule in rules if rule.chain is Chain.PREROUTING]
        return tuple(sorted({entrance(rule) for rule in outside or rules}))


def entrance(rule: Rule) -> str:
    """on eth0, to the node, to 192.0.2.7; or nothing, where it is for whatever comes in."""
    words = [f"on {printable(rule.interface, LONGEST_NAME)}"] if rule.interface else []
    words += [f"to {destination(rule)}"] if rule.destination else []
    return " ".join(words)


def holdings(live: Iterable[Live]) -> list[Holding]:
    """What these rules forward, by protocol and port."""
    found: dict[tuple[str, Protocol | None, PortRange, int | None], list[Live]] = {}
    for one in live:
        rule = one.rule
        if rule.chain in TRANSLATING and not rule.guards:
            key = rule.owner, rule.protocol, rule.ports or ALL_PORTS, rule.to_port
            found.setdefault(key, []).append(one)
    made = [
        Holding(owner=owner, protocol=protocol, ports=ports, to_port=to_port, rules=tuple(rules))
        for (owner, protocol, ports, to_port), rules in found.items()
    ]
    return sorted(made, key=_place)


def listed(words: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    rest = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _place(one: Holding) -> tuple[object, ...]:
    return ORDER[one.protocol], one.ports.first, one.ports.last, one.owner


def _number(address: Address | None) -> tuple[int, int]:
    return (address.version, int(address)) if address else (0, 0)
