"""Machines of one namespace that claim the same ports: found before any rule is made of them."""

from collections import Counter
from collections.abc import Iterable

from rules.desired import claimed
from rules.model import FORWARDED, Machine, Protocol
from rules.ports import PortRange
from rules.problems import Problem
from rules.values import Value


def conflicts(machines: Iterable[Machine]) -> tuple[Problem, ...]:
    """Every pair of machines of one namespace that claim the same port; neither is guessed."""
    return tuple(clash.problem() for clash in clashes(machines))


class Clash(Value):
    """Two machines of one namespace, and the ports of a protocol that both claim."""

    protocol: Protocol
    ports: PortRange
    one: Machine
    other: Machine

    def problem(self, at: Machine | None = None) -> Problem:
        """What is wrong, told at one of the two."""
        here = at or self.other
        there = self.one if here is self.other else self.other
        file, colon, line = here.origin.rpartition(":")
        return Problem(
            code="conflict",
            path=(),
            what=(
                f"in namespace {here.netns}, {self.protocol.value}"
                f" {_claimed(here, self)} of {here.owner}"
                f" meets {self.protocol.value} {_claimed(there, self)} of {there.owner}"
                + (f" ({there.origin})" if there.origin else "")
            ),
            fix="Give each port to one machine, or each machine a namespace of its own.",
            file=file,
            line=int(line) if colon and line.isdecimal() else 0,
        )


def _claimed(machine: Machine, clash: Clash) -> PortRange:
    """The range of a machine that the clash is about."""
    return next(ports for ports in claimed(machine, clash.protocol) if ports.overlaps(clash.ports))


def clashes(machines: Iterable[Machine]) -> list[Clash]:
    """Every two machines of one namespace that claim the same ports."""
    found: list[Clash] = []
    ours = [machine for machine in machines if machine.masquerade is not None]
    crowds = Counter(machine.netns for machine in ours)
    spans = sorted(
        (
            (machine.netns, protocol.value, ports, machine)
            for machine in ours
            if crowds[machine.netns] > 1
            for protocol in FORWARDED
            for ports in claimed(machine, protocol)
        ),
        key=lambda span: (span[0], span[1], span[2], span[3].owner, span[3].origin),
    )
    open_spans: list[tuple[str, str, PortRange, Machine]] = []
    for span in spans:
        netns, protocol, ports, machine = span
        open_spans = [
            earlier
            for earlier in open_spans
            if earlier[:2] == (netns, protocol) and earlier[2].last >= ports.first
        ]
        found.extend(
            Clash(
                Protocol(protocol),
                PortRange(ports.first, min(ports.last, earlier[2].last)),
                earlier[3],
                machine,
            )
            for earlier in open_spans
            if earlier[3] is not machine
        )
        open_spans.append(span)
    return found
