"""What many files mean together, where some cannot be understood or quarrel with others.

A file that turns bad keeps its last good meaning, and so does one whose change takes what another
file holds: what ran before goes on. Of two files that are both new, neither is guessed.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from agent.sources.files import Declared, Other, duplicates, file_of, without_instances
from rules.conflicts import Clash, clashes
from rules.desired import claimed
from rules.model import Machine
from rules.policies import NetworkPolicy
from rules.ports import subtract
from rules.problems import Problem
from rules.services import Service
from rules.values import Value

Kind = TypeVar("Kind", bound=Declared)
Quarreller = Machine | Service | NetworkPolicy
Meanings = Mapping[str, tuple[Kind, ...]]


class Settled(Value, Generic[Kind], kw_only=True):
    """What each file means now, and what is wrong between them."""

    meanings: Meanings[Kind]
    problems: tuple[Problem, ...] = ()
    held: frozenset[str] = frozenset()  # files that do not mean what they say
    left: tuple[str, ...] = ()  # a line for each machine that is left to its running instance
    machines: tuple[Machine, ...] = ()
    services: tuple[Service, ...] = ()
    others: tuple[Other, ...] = ()
    contested: Mapping[str, str] = MappingProxyType({})  # namespaces, with what is wrong there


def settle(before: Meanings[Kind], now: Mapping[str, tuple[Kind, ...] | None]) -> Settled[Kind]:
    """From what files meant before, and what they say now; None: it cannot be understood."""
    meanings = {file: before.get(file, ()) if said is None else said for file, said in now.items()}
    problems: dict[Problem, None] = {}
    contested: dict[str, str] = {}
    held = {file for file, said in now.items() if said is None}
    while True:
        declared = [one for said in meanings.values() for one in said]
        machines, left = without_instances([one for one in declared if isinstance(one, Machine)])
        services = [one for one in declared if isinstance(one, Service)]
        others = [one for one in declared if not isinstance(one, Machine | Service)]
        policies = [one for one in others if isinstance(one, NetworkPolicy)]
        quarrels = _quarrels(machines, [*services, *policies], before)
        if not quarrels:
            break
        problems.update(dict.fromkeys(problem for problem, _ in quarrels))
        contested |= {one.netns: str(why) for why, one in quarrels if isinstance(one, Machine)}
        for file in {file_of(one) for _, one in quarrels}:
            held.add(file)
            kept = before.get(file, ())
            meanings[file] = () if meanings[file] == kept else kept
    return Settled(
        meanings=meanings,
        problems=tuple(problems),
        held=frozenset(held),
        left=tuple(left),
        machines=tuple(machines),
        services=tuple(services),
        others=tuple(others),
        contested=contested,
    )


def _quarrels(
    machines: Sequence[Machine], others: Sequence[Service | NetworkPolicy], before: Meanings[Kind]
) -> list[tuple[Problem, Quarreller]]:
    """What two files cannot both say, told at each that has to give way: whoever did not have
    before what both want now, or both."""
    twice = duplicates([*machines, *others])
    if twice:  # a machine that is written twice is in conflict with itself, too
        had = [pair for pair in twice if _had(pair[1], before)]
        return [pair for pair in twice if pair not in had] or twice
    found: list[tuple[Problem, Quarreller]] = []
    for clash in clashes(machines):
        both = (clash.one, clash.other)
        new = [one for one in both if not _claimed_before(one, clash, before)]
        found += [(clash.problem(one), one) for one in new or both]
    return found


def _had(one: Quarreller, before: Meanings[Kind]) -> bool:
    return str(one) in map(str, before.get(file_of(one), ()))


def _claimed_before(machine: Machine, clash: Clash, before: Meanings[Kind]) -> bool:
    """Whether the file of a machine had all of the ports that are contested now."""
    ports = [
        one
        for other in before.get(file_of(machine), ())
        if isinstance(other, Machine) and other.netns == machine.netns
        for one in claimed(other, clash.protocol)
    ]
    return not subtract([clash.ports], ports)
