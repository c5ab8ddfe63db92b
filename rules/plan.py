"""The difference between what should be and what is: a set difference, as a value."""

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rules.model import (
    POLICED,
    Address,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Lookup,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
    Sysctl,
)
from rules.places import route_localnet
from rules.ports import ALL_PORTS, PortRange, coalesce, have
from rules.shapes import Lives, gathered, lives, lookup_of, name, weight
from rules.values import Value


class Table(enum.Enum):
    """What a plan does to the table (or chains) as a whole."""

    KEEP = "keep"
    CREATE = "create"
    REMAKE = "remake"
    DELETE = "delete"


class SysctlChange(Value):
    """A setting to be made; before is None where there is no namespace to ask."""

    name: str
    before: str | None
    after: str


class Plan(Value, kw_only=True):
    """What to change in one namespace, and how much stays."""

    netns: str
    table: Table = Table.KEEP
    unsound: str = ""  # why the table is made anew
    chains: tuple[Chain, ...] = ()  # to be created
    add: tuple[Rule, ...] = ()
    change: tuple[tuple[Live, Rule], ...] = ()
    remove: tuple[Live | Foreign, ...] = ()
    leftovers: tuple[Live | Foreign, ...] = ()  # to be removed from the other backend
    unchanged: tuple[Live, ...] = ()
    standing: frozenset[tuple[Family, Chain]] = frozenset()  # as observed, for iptables
    jumped: frozenset[tuple[Family, Chain]] = frozenset()
    behind: frozenset[tuple[Family, Chain]] = frozenset()
    sysctls: tuple[SysctlChange, ...] = ()
    mapped: Mapping[Lookup, int] = MappingProxyType({})  # as observed, for nftables
    maps: frozenset[Lookup] = frozenset()  # what is to be a map afterwards
    sets_before: Mapping[Peers, Members] = MappingProxyType({})  # as observed, for nftables
    sets: Mapping[Peers, Members] = MappingProxyType({})  # as they are to be
    guests: frozenset[Address] = frozenset()  # that are wanted, whether or not a rule names them

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.same_rules and not self.sysctls

    @property
    def same_rules(self) -> bool:
        """Whether the rules need nothing done."""
        written = self.chains or self.add or self.change or self.remove or self.leftovers
        same = self.maps == self.mapped.keys() and self.sets == self.sets_before
        return self.table is Table.KEEP and not written and same

    @property
    def only_adds(self) -> bool:
        """Whether nothing that is there goes."""
        anew = self.table in (Table.REMAKE, Table.DELETE)
        gone = anew or self.change or self.remove or self.leftovers or self._leave()
        return not gone and not self.spreading and (not self.gathering or not self.unchanged)

    def _leave(self) -> bool:
        """Whether addresses go from sets."""
        nobody: Members = frozenset()
        return any(not was <= self.sets.get(one, nobody) for one, was in self.sets_before.items())

    @property
    def gathering(self) -> list[Lookup]:
        """What becomes a map."""
        return sorted(self.maps - self.mapped.keys(), key=name)

    @property
    def spreading(self) -> list[Lookup]:
        """What is no longer a map."""
        return sorted(self.mapped.keys() - self.maps, key=name)


def diff(netns: str, desired: Desired, observed: Observed) -> Plan:
    """What leads from the observed to the desired; rules that wait for an address stay."""
    live = lives(observed)
    missing = desired.rules.difference(live.by_rule)
    surplus = [*_surplus(live, desired, missing), *_copies(live)]
    unchanged = tuple(live.by_rule.values())
    if surplus:
        stay = live.by_rule.copy()
        for one in surplus:
            if stay.get(one.rule) is one:
                del stay[one.rule]
        unchanged = tuple(stay.values())
    add, change, remove = _pair(surplus, missing)
    return Plan(
        netns=netns,
        table=_table(bool(desired.rules) or bool(unchanged), observed),
        unsound=observed.unsound,
        chains=_lacking(desired, observed),
        add=add,
        change=change,
        remove=(*remove, *observed.foreign),
        leftovers=observed.leftovers,
        unchanged=unchanged,
        standing=observed.standing,
        jumped=observed.jumped,
        behind=observed.behind,
        sysctls=(
            *_loopback_shut(desired, unchanged, observed),
            *(
                SysctlChange(sysctl.name, observed.sysctls.get(sysctl.name), sysctl.value)
                for sysctl in sorted(desired.sysctls, key=_turn)
                if observed.sysctls.get(sysctl.name) != sysctl.value
            ),
        ),
        mapped=observed.mapped or {},
        maps=_maps(live, surplus, missing, observed),
        sets_before=observed.sets,
        sets=_sets(desired, unchanged, observed),
        guests=desired.guests,
    )


def loopback_settings(live: Iterable[Live | Foreign]) -> Iterator[str]:
    """The settings that lead loopback to where these rules keep it from whoever is there."""
    for one in live:
        if isinstance(one, Live) and one.rule.chain is Chain.RAW and one.rule.interface:
            yield route_localnet(one.rule.interface)


def _loopback_shut(
    desired: Desired, unchanged: Iterable[Live], observed: Observed
) -> Iterator[SysctlChange]:
    """Loopback is not led to a link any more once nothing keeps it from whoever is behind that: our
    drop says that we had it led there. Not where the guest's own traffic is not ours to translate:
    there it was KubeVirt that did."""
    ours = [one for one in (*observed.live, *observed.leftovers) if isinstance(one, Live)]
    owners = {
        one.rule.owner
        for one in ours
        if one.rule.chain is Chain.POSTROUTING and one.rule.source and one.rule.to is None
    }
    stay = {rule.interface for rule in desired.rules if rule.chain is Chain.RAW}
    stay |= {one.rule.interface for one in unchanged if one.rule.chain is Chain.RAW}
    gone = (x for x in ours if x.rule.owner in owners and x.rule.interface not in stay)
    for setting in sorted(set(loopback_settings(gone))):
        if observed.sysctls.get(setting) == "1":
            yield SysctlChange(setting, "1", "0")


def _turn(sysctl: Sysctl) -> tuple[bool, Sysctl]:
    """Links are told to listen to routers before forwarding would have them forget what they
    heard; the rest by name."""
    return not sysctl.name.endswith(".accept_ra"), sysctl


def _sets(
    desired: Desired, unchanged: Iterable[Live], observed: Observed
) -> Mapping[Peers, Members]:
    """As desired, and those of rules that stay although they are not."""
    if not desired.sets and not observed.sets:
        return observed.sets
    stay = {live.rule.peers for live in unchanged if live.rule.peers is not None}
    left = {one: now for one, now in observed.sets.items() if one in stay}
    return {**left, **desired.sets}


def _lacking(desired: Desired, observed: Observed) -> tuple[Chain, ...]:
    """The chains that are wanted and not there."""
    if all(chain in observed.chains for chain in Chain):
        return ()
    wanted = {rule.chain for rule in desired.rules}
    return tuple(c for c in Chain if c in wanted and c not in observed.chains)


def _surplus(live: Lives, desired: Desired, missing: Iterable[Rule]) -> Iterator[Live]:
    """What is there and not wanted, and need not wait either."""
    waiting = frozenset(pending.owner for pending in desired.pending)
    claimed = _by_lookup(missing) if waiting or desired.kept else {}
    wanted = _Wanted(desired.rules if desired.unclaimed_stay else ())
    for rule in frozenset(live.by_rule).difference(desired.rules):
        waits = rule in desired.kept or _waits(rule.owner, waiting)
        stays = waits and not _is_claimed(rule, claimed)
        stays = stays or (desired.filters_stay and rule.chain in POLICED)
        if not stays and not (desired.unclaimed_stay and wanted.leaves_alone(rule)):
            yield live.by_rule[rule]


def _waits(owner: str, waiting: frozenset[str]) -> bool:
    """Whether a rule is for who waits: for one, or for several who all do."""
    return owner in waiting or (bool(waiting) and waiting.issuperset(owner.split(",")))


def _by_lookup(rules: Iterable[Rule]) -> dict[Lookup | None, list[PortRange]]:
    """The ports of each lookup, in order."""
    found: dict[Lookup | None, list[PortRange]] = {}
    for rule in rules:
        if rule.ports is not None:
            found.setdefault(lookup_of(rule), []).append(rule.ports)
    return {lookup: list(coalesce(ports)) for lookup, ports in found.items() if lookup}


def _is_claimed(rule: Rule, claimed: Mapping[Lookup | None, Sequence[PortRange]]) -> bool:
    """Whether somebody wants ports of a rule that waits, where it is: one map cannot hold both."""
    ports = rule.ports or ALL_PORTS
    return have(claimed.get(lookup_of(rule), ()), ports.first, ports.last)


def _copies(live: Lives) -> list[Live]:
    """What is there for a second time."""
    if len(live) == len(live.by_rule):
        return []
    return [one for one in live if live.by_rule[one.rule] is not one]


def _maps(
    live: Lives, surplus: Iterable[Live], missing: Iterable[Rule], observed: Observed
) -> frozenset[Lookup]:
    """Which ranges are to be held as maps, where the backend has any."""
    if observed.mapped is None:
        return frozenset()
    weights = dict(live.weights)
    for rule in missing:
        if lookup := rule.lookup:
            weights[lookup] = weights.get(lookup, 0) + weight(rule)
    for one in surplus:
        if lookup := one.rule.lookup:
            weights[lookup] -= weight(one.rule)
    return gathered(weights, observed.mapped)


class _Wanted:
    """Whose rules are wanted, and for which packets. There may be thousands, and as many that
    nobody claims: so what one of those could meet is looked up."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._owners = {rule.owner for rule in rules}
        met: dict[tuple[object, ...], list[PortRange]] = {}
        for rule in rules:
            # One for any protocol meets those for each, and is met by them.
            for protocol in (rule.protocol, None) if rule.protocol else (*Protocol, None):
                met.setdefault((_packets(rule), protocol), []).append(rule.ports or ALL_PORTS)
        self._met = {place: coalesce(ranges) for place, ranges in met.items()}

    def leaves_alone(self, rule: Rule) -> bool:
        """Whether nobody who is known owns the rule, or has another for the same packets. What
        filters let pass is owned by policies, which may be for several machines."""
        of_policies = rule.chain in POLICED and rule.accepts and not rule.resumes
        if rule.owner in self._owners and not of_policies:
            return False
        if rule.chain is Chain.RAW:
            return True  # it drops what nobody else is to have
        met = self._met.get((_packets(rule), rule.protocol), ())
        ports = rule.ports or ALL_PORTS
        return not have(met, ports.first, ports.last)


def _packets(rule: Rule) -> tuple[object, ...]:
    """Which packets a rule is for, but for protocol and ports. Whom they are for tells only filters
    apart: of translations, one may be for any of the namespace's own addresses."""
    end = rule.destination if rule.chain in POLICED else None
    return rule.chain, rule.family, rule.source, end


def _table(needed: bool, observed: Observed) -> Table:
    if not observed.table:
        return Table.CREATE if needed else Table.KEEP
    if not needed:
        return Table.DELETE
    return Table.REMAKE if observed.unsound else Table.KEEP


def _pair(
    surplus: Sequence[Live], missing: Iterable[Rule]
) -> tuple[tuple[Rule, ...], tuple[tuple[Live, Rule], ...], tuple[Live, ...]]:
    """Adds, changes and removes: a change is a rule that goes on serving some of its ports."""
    if not surplus:
        return tuple(sorted(missing, key=lambda rule: rule.key)), (), ()
    new: dict[tuple[object, ...], deque[Rule]] = {}
    for rule in sorted(missing, key=_by_port):
        new.setdefault(_place(rule), deque()).append(rule)
    add: list[Rule] = []
    change: list[tuple[Live, Rule]] = []
    remove: list[Live] = []
    for live in sorted(surplus, key=lambda live: _by_port(live.rule)):
        candidates = new.get(_place(live.rule), deque())
        ports = live.rule.ports or ALL_PORTS
        while candidates and (candidates[0].ports or ALL_PORTS).last < ports.first:
            add.append(candidates.popleft())
        if candidates and (candidates[0].ports or ALL_PORTS).first <= ports.last:
            change.append((live, candidates.popleft()))
        else:
            remove.append(live)
    add.extend(rule for rules in new.values() for rule in rules)
    return (
        tuple(sorted(add, key=lambda rule: rule.key)),
        tuple(sorted(change, key=lambda pair: pair[1].key)),
        tuple(sorted(remove, key=lambda live: live.rule.key)),
    )


def _by_port(rule: Rule) -> tuple[object, ...]:
    ports = rule.ports or ALL_PORTS
    return ports.first, ports.last, rule.key


def _place(rule: Rule) -> tuple[object, ...]:
    """Rules that differ in this are never one rule before and after a change."""
    return rule.chain, rule.family, rule.protocol, rule.to is None, rule.accepts, rule.peers
