"""A table as packets meet it: what a kernel makes of our steps, and what becomes of a packet at
each moment of an edit, if all that a transaction touches is missing as long as it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address
from itertools import chain as joined
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from rules.model import (
    CHAIN,
    MAP,
    Chain,
    Family,
    Foreign,
    Live,
    Lookup,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.nft import bridge_name
from rules.nft_sets import DropSet, Join, Leave, MakeSet
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    Step,
    takes_away,
)
from rules.shapes import name, port_name

LINK, HERE = "eth0", IPv4Address("192.0.2.1")
PASSES, GUARDED, ACCEPTED, DROPPED = "passes", "guarded", "accepted", "dropped"


class Flow(NamedTuple):
    """The first packet of one; its number is what shares are made of."""

    chain: Chain
    port: int
    number: int = 0
    source: Any = None
    guest: Any = None
    protocol: Protocol = Protocol.TCP
    family: Family = Family.IP


class PacketTable:
    """All of it, at one moment."""

    def __init__(self) -> None:
        self.table = False
        self.rules: dict[Chain, list[tuple[int, Rule | Lookup]]] = {}
        self.bridges: dict[tuple[Chain, bool], list[Rule]] = {}
        self.elements: dict[str, set[tuple[Rule, int]]] = {}  # with when each was put there
        self.sets: dict[Peers, frozenset[tuple[Any, int]]] = {}
        self.count = 0

    def copy(self) -> PacketTable:
        made = PacketTable()
        made.table, made.count, made.sets = self.table, self.count, dict(self.sets)
        made.rules = {chain: list(rules) for chain, rules in self.rules.items()}
        made.bridges = {chain: list(rules) for chain, rules in self.bridges.items()}
        made.elements = {one: set(some) for one, some in self.elements.items()}
        return made

    def after(self, steps: Iterable[Step]) -> PacketTable:
        """The same when a transaction is through."""
        made = self.copy()
        for step in steps:
            made._take(step)
        return made

    def _take(self, step: Step) -> None:  # noqa: PLR0912, PLR0915 - a case for each step
        self.count += 1
        match step:
            case DropTable():
                self.__dict__.update(PacketTable().__dict__, count=self.count)
            case MakeTable():
                self.table = True
            case MakeChain(chain):
                self.rules.setdefault(chain, [])
            case DropRule(chain_name, handle):
                rules = self.rules[Chain(chain_name)]
                (gone,) = (one for one in rules if one[0] == handle)
                rules.remove(gone)
            case DropStray(_, stray):
                del self.elements[stray]
            case MakeMap(lookup, ports):
                assert called(lookup, ports) not in self.elements
                self.elements[called(lookup, ports)] = set()
            case DropMap(lookup, ports):
                assert all(one != lookup for _, one in joined(*self.rules.values()))
                del self.elements[called(lookup, ports)]
            case Erase(lookup, rules, ports):
                here = self.elements[called(lookup, ports)]
                gone_rules = set(rules)
                assert gone_rules <= {rule for rule, _ in here}
                here -= {one for one in here if one[0] in gone_rules}
            case Fill(lookup, rules, ports):
                here = self.elements[called(lookup, ports)]
                for rule in rules:
                    assert rule.ports is not None
                    assert not any(rule.ports.overlaps(one.ports) for one, _ in here if one.ports)
                    here.add((rule, self.count))
            case AddRule(rule, first, behind):
                assert not (rule.peers and rule.peers not in self.sets)
                self._put(rule.chain, rule, first=first, behind=behind)
            case AddLookup(lookup, first):
                assert name(lookup) in self.elements
                self._put(lookup.chain, lookup, first=first)
            case MakeBridge(chain, aside):
                self.bridges.setdefault((chain, aside), [])
            case FlushBridge(chain, aside):
                self.bridges[chain, aside].clear()
            case AddBridge(rule, aside):
                self.bridges[rule.chain, aside].append(rule)
            case DropBridge(chain, aside):
                del self.bridges[chain, aside]
            case MakeSet(peers):
                assert peers not in self.sets
                self.sets[peers] = frozenset()
            case DropSet(peers):
                named = (one for _, one in joined(*self.rules.values()) if isinstance(one, Rule))
                assert all(rule.peers != peers for rule in named)
                del self.sets[peers]
            case Join(peers, members):
                self.sets[peers] |= {(one, self.count) for one in members}
            case Leave(peers, members):
                here_now = self.sets[peers]
                self.sets[peers] = frozenset(one for one in here_now if one[0] not in members)
            case _:
                raise AssertionError(step)

    def _put(
        self, chain: Chain, what: Rule | Lookup, *, first: bool = False, behind: int = 0
    ) -> None:
        rules = self.rules[chain]
        place = 0 if first else len(rules)
        if behind:
            place = next(i for i, one in enumerate(rules) if one[0] == behind) + 1
        rules.insert(place, (self.count, what))

    def observed(self, unsound: str = "") -> Observed:
        """What a look would find."""
        live = [Live(one, at) for at, one in joined(*self.rules.values()) if isinstance(one, Rule)]
        mapped = {one: at for at, one in joined(*self.rules.values()) if isinstance(one, Lookup)}
        looked_into = {name(one) for one in mapped} | {port_name(one) for one in mapped}
        for lookup in mapped:
            live += [Live(rule, 0) for rule, _ in self.elements[name(lookup)]]
        strays = sorted(self.elements.keys() - looked_into)
        return Observed(
            live=tuple(live),
            foreign=(
                *(Foreign("", 0, one, MAP, one) for one in strays),
                *(
                    Foreign(one.value, 0, "left", CHAIN, bridge_name(one, behind))
                    for one, behind in self.bridges
                ),
            ),
            chains=frozenset() if unsound else frozenset(self.rules),
            table=self.table,
            mapped={} if unsound else mapped,
            sets={peers: members_of(some) for peers, some in self.sets.items()},
            unsound=unsound,
        )


def called(lookup: Lookup, ports: bool) -> str:
    return port_name(lookup) if ports else name(lookup)


def members_of(some: frozenset[tuple[Any, int]]) -> Members:
    return frozenset(one for one, _ in some)


class View:
    """A moment: the rules of each chain as they were when the packet came there, and the elements
    that are there for certain."""

    def __init__(self, *rules: PacketTable, during: list[PacketTable]) -> None:
        """The rules as they were at the bridge before our chain, at ours, and behind it."""
        self._before, self._rules, self._behind = rules
        self._during = during
        self._found: dict[str, dict[int, Rule]] = {}  # by map and port

    def outcome(self, flow: Flow) -> object:
        """Where a new flow goes."""
        if flow.chain is Chain.FORWARD:
            verdicts = [
                self._filtered(self._before.bridges.get((flow.chain, False), ()), flow),
                self._filtered((one for _, one in self._rules.rules.get(flow.chain, ())), flow),
                self._filtered(self._behind.bridges.get((flow.chain, True), ()), flow),
            ]
            return DROPPED if DROPPED in verdicts else ACCEPTED
        for rule in self._before.bridges.get((flow.chain, False), ()):
            if takes(rule, flow):
                return target(rule, flow)
        for _, one in self._rules.rules.get(flow.chain, ()):
            if isinstance(one, Lookup):
                found = self._looked_up(one, flow)
                if found is not None:
                    return found
            elif takes(one, flow):
                return target(one, flow)
        for rule in self._behind.bridges.get((flow.chain, True), ()):
            if takes(rule, flow):
                return target(rule, flow)
        return PASSES

    def _looked_up(self, lookup: Lookup, flow: Flow) -> object | None:
        if not asks(lookup, flow):
            return None
        found = self._element(name(lookup), flow)
        if found is None or (lookup.shifted and self._element(port_name(lookup), flow) is None):
            return None
        return target(found, flow)

    def _element(self, where: str, flow: Flow) -> Rule | None:
        if where not in self._found:
            sure = set.intersection(*(one.elements.get(where, set()) for one in self._during))
            ports = ((rule, rule.ports) for rule, _ in sure if rule.ports)
            self._found[where] = {
                port: rule for rule, some in ports for port in range(some.first, some.last + 1)
            }
        return self._found[where].get(flow.port)

    def _filtered(self, rules: Iterable[Rule | Lookup], flow: Flow) -> str:
        for rule in rules:
            assert isinstance(rule, Rule)
            if rule.resumes or not takes(rule, flow):
                continue
            if rule.peers is None or self._is_member(rule.peers, flow):
                return ACCEPTED if rule.accepts else DROPPED
        return ACCEPTED

    def _is_member(self, peers: Peers, flow: Flow) -> bool:
        sure = frozenset.intersection(*(one.sets.get(peers, frozenset()) for one in self._during))
        return any(flow.source in network for network in members_of(sure))


def takes(rule: Rule, flow: Flow) -> bool:
    ends = (
        rule.destination in (None, HERE)
        if flow.chain is not Chain.FORWARD
        else (rule.destination == flow.guest)
    )
    return (
        rule.family is flow.family
        and rule.protocol in (None, flow.protocol)
        and (rule.ports is None or flow.port in rule.ports)
        and rule.interface in (None, LINK)
        and ends
        and (rule.share is None or flow.number % rule.share.of in rule.share.at)
        and (rule.peer is None or flow.source in rule.peer)
    )


def asks(lookup: Lookup, flow: Flow) -> bool:
    return (
        lookup.family is flow.family
        and lookup.protocol is flow.protocol
        and lookup.interface in (None, LINK)
        and lookup.destination in (None, HERE)
        and (lookup.share is None or flow.number % lookup.share.of in lookup.share.at)
    )


def target(rule: Rule, flow: Flow) -> object:
    if rule.to is None:
        return GUARDED
    assert rule.to_port is None or rule.ports is not None
    shift = rule.to_port - rule.ports.first if rule.to_port and rule.ports else 0
    return str(rule.to), flow.port + shift


def moments(states: list[PacketTable], parts: list[list[Step]]) -> Iterator[View]:
    """All that a packet may meet from before the first transaction until after the last. Before one
    that takes something away, packets that came before the one before it have passed."""
    oldest = 0
    for turn, part in enumerate(parts, 1):
        if turn > 1 and takes_away(part, parts[turn - 2]):
            oldest = turn - 1
        for before, rules, behind in combinations_with_replacement(range(oldest, turn + 1), 3):
            during = states[max(rules - 1, oldest) : turn + 1]
            yield View(states[before], states[rules], states[behind], during=during)


def resting(state: PacketTable) -> View:
    """Nobody edits."""
    return View(state, state, state, during=[state])
