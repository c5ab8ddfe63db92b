"""What policies leave of the world for one machine, as a register answers it: each way that a rule
of theirs opens by itself, and none joined to another. So every packet can be asked for."""

from __future__ import annotations

from typing import NamedTuple

from rules.isolation import Register
from rules.model import Address, Family, Machine, Protocol
from rules.policies import Direction, Network
from rules.ports import PortRange

Question = tuple[Family, Address, Protocol | None, int | None]  # ICMP has neither


class Allowance(NamedTuple):
    """What one policy allows in one direction: with these peers, to these ports."""

    policy: str
    family: Family
    peers: tuple[Network, ...] | None  # None: everybody
    protocol: Protocol | None  # None: any, also those without ports
    ports: PortRange | None  # None: any

    def admits(
        self, family: Family, peer: Address, protocol: Protocol | None, port: int | None
    ) -> bool:
        return (
            family is self.family
            and self.protocol in (None, protocol)
            and (self.ports is None or (port is not None and port in self.ports))
            and (self.peers is None or any(peer in network for network in self.peers))
        )


def isolation(
    register: Register, machine: Machine, direction: Direction
) -> frozenset[Allowance] | None:
    """What is left for a machine; None: no policy selects it, so everything passes."""
    selecting = register.selecting(machine, direction)
    if not selecting:
        return None
    names = machine.names if direction is Direction.INGRESS else ()
    return frozenset(
        Allowance(str(policy), family, peers, protocol, ports)
        for policy in selecting
        for rule in policy.rules(direction) or ()
        for protocol, ports, reach in register.ways(policy.namespace, rule, direction, names)
        for family, peers in reach.items()
    )


def admitting(isolation: frozenset[Allowance], asked: Question) -> set[str]:
    """The policies that let a packet pass; none: it is refused."""
    return {one.policy for one in isolation if one.admits(*asked)}
