"""What many files mean together, where some cannot be understood or quarrel with others.

A file that turns bad keeps its last good meaning, and so does one whose change takes what another
file holds: what ran before goes on. Of two files that are both new, neither is guessed.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agent.sources.files import duplicates, file_of, without_instances
from rules.desired import clashes
from rules.model import Machine
from rules.problems import Problem
from rules.values import Value

Meanings = Mapping[str, tuple[Machine, ...]]


class Settled(Value, kw_only=True):
    """What each file means now, and what is wrong between them."""

    meanings: Meanings
    problems: tuple[Problem, ...] = ()
    held: frozenset[str] = frozenset()  # files that do not mean what they say
    left: tuple[str, ...] = ()  # a line for each machine that is left to its running instance
    machines: tuple[Machine, ...] = ()
    contested: Mapping[str, str] = MappingProxyType({})  # namespaces, with what is wrong there


def settle(before: Meanings, now: Mapping[str, tuple[Machine, ...] | None]) -> Settled:
    """From what files meant before, and what they say now; None: it cannot be understood."""
    meanings = {file: before.get(file, ()) if said is None else said for file, said in now.items()}
    problems: dict[Problem, None] = {}
    contested: dict[str, str] = {}
    held = {file for file, said in now.items() if said is None}
    while True:
        machines, left = without_instances([one for said in meanings.values() for one in said])
        quarrels = _quarrels(machines)
        if not quarrels:
            break
        problems.update(dict.fromkeys(problem for problem, _ in quarrels))
        contested |= {one.netns: str(problem) for problem, between in quarrels for one in between}
        files = {file_of(one) for _, between in quarrels for one in between}
        changed = {file for file in files if meanings[file] != before.get(file, ())}
        held |= changed or files
        for file in changed or files:
            meanings[file] = before.get(file, ()) if changed else ()
    return Settled(
        meanings=meanings,
        problems=tuple(problems),
        held=frozenset(held),
        left=tuple(left),
        machines=tuple(machines),
        contested=contested,
    )


def _quarrels(machines: Sequence[Machine]) -> list[tuple[Problem, tuple[Machine, ...]]]:
    """What two files cannot both say, with the machines that it is between."""
    twice: list[tuple[Problem, tuple[Machine, ...]]]
    twice = [(problem, (machine,)) for problem, machine in duplicates(machines)]
    if twice:  # a machine that is written twice is in conflict with itself, too
        return twice
    return [(problem, (one, other)) for problem, one, other in clashes(machines)]
