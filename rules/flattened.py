"""What is desired, for tables that have no sets.

A rule that names a set of peers becomes one for each of its members: of a policy for 100 peers and
5 ranges, that is 500. Where one rule of iptables follows another for every new flow, and all of a
table is written for every change, that is the price of having no sets.
"""

from collections.abc import Iterable, Iterator, Mapping

from rules.model import Desired, Members, Peers, Rule
from rules.values import replace


def flattened(desired: Desired) -> Desired:
    """The same without sets."""
    if not desired.sets and not any(rule.peers for rule in (*desired.rules, *desired.kept)):
        return desired
    return replace(
        desired,
        rules=frozenset(each(desired.rules, desired.sets)),
        kept=frozenset(each(desired.kept, desired.sets)),
        sets={},
    )


def each(rules: Iterable[Rule], sets: Mapping[Peers, Members]) -> Iterator[Rule]:
    """These rules with a peer in place of peers; none for a set in which nobody is: nothing is
    accepted by it. A network of all addresses is no condition, as tables list none for it."""
    for rule in rules:
        if rule.peers is None:
            yield rule
            continue
        for network in sets.get(rule.peers, ()):
            yield replace(rule, peers=None, peer=network if network.prefixlen else None)
