"""From policies and everybody known to the fences of machines: as grants that name sets of peers.

A set is called by what a policy says of its members, not by who they are: whoever comes or goes is
an element more or less, and no rule changes. Grants of several policies to the same peers are
joined.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from ipaddress import ip_network

from rules.desired import label
from rules.isolation import WHOLE, Names, Register
from rules.model import (
    NODE,
    NODE_KEY,
    Address,
    Family,
    Fence,
    Grant,
    Machine,
    Members,
    Peers,
    Protocol,
    Surroundings,
)
from rules.places import entry_link, global_addresses
from rules.policies import (
    Direction,
    IpBlock,
    Namespace,
    NetworkPolicy,
    Party,
    PolicyRule,
    apart,
)
from rules.policies import Peers as Named
from rules.ports import PortRange, coalesce
from rules.services import Pod
from rules.values import Value, replace


class Laws(Value, kw_only=True):
    """Policies, and whom they may speak of beside the machines."""

    policies: tuple[NetworkPolicy, ...] = ()
    pods: tuple[Pod, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    # The node's own addresses: traffic with them is always allowed. None: the node is not exempt.
    node: frozenset[Address] | None = None
    # Whether a label that is not told of is not there. Else nobody knows which labels a namespace
    # has that is not among them, and a machine may have more than are told of.
    all_labels: bool = True


_Kind = tuple[Family, Peers | None, Protocol | None]
_Ports = list[tuple[PortRange | None, str]]
_Gate = tuple[Family, Peers | None, Members | None, Protocol | None, PortRange | None]


Unresolved = Callable[[NetworkPolicy, Exception], None]


def fenced(
    machines: Sequence[Machine],
    laws: Laws,
    links: Mapping[str, Surroundings],
    unresolved: Unresolved | None = None,
) -> tuple[Machine, ...]:
    """The machines with what policies say of them; whom none selects is the very same. Links are
    those of their namespaces, as far as these are known: there machines have their addresses.
    A policy that meets a bug selects, and allows nothing, if there is who is told of it."""
    if not laws.policies:
        return tuple(machines)
    parties = [Party.of_pod(pod) for pod in laws.pods]
    parties += [
        Party.of_machine(one, _addresses(one, links.get(one.netns)), all_labels=laws.all_labels)
        for one in machines
    ]
    register = Register(laws.policies, parties, laws.namespaces, all_labels=laws.all_labels)
    found = (_fenced(machine, register, unresolved) for machine in machines)
    return tuple(one if laws.node is None else _exempting(one, laws.node) for one in found)


def unprotected(machines: Iterable[Machine], laws: Laws) -> list[str]:
    """Whom policies select although nothing of theirs passes through rules of ours."""
    others = [one for one in machines if one.masquerade is None] if laws.policies else []
    register = Register(laws.policies, ())
    return [
        f"{machine}: {', '.join(names)} select it, without effect: no interface is masqueraded"
        for machine in others
        if (names := _selecting(machine, register))
    ]


def idle(machines: Iterable[Machine], laws: Laws) -> list[str]:
    """Policies that select none of these machines."""
    register = Register(laws.policies, ())
    busy = {name for machine in machines for name in _selecting(machine, register)}
    return [
        f"{name} selects no machine of these manifests, so it changes nothing"
        for name in sorted({str(policy) for policy in laws.policies} - busy)
    ]


def _selecting(machine: Machine, register: Register) -> list[str]:
    return sorted({str(one) for way in Direction for one in register.selecting(machine, way)})


def _addresses(machine: Machine, links: Surroundings | None) -> tuple[Address, ...]:
    """Where others reach it: as it is said to be, or as its namespace has it."""
    if machine.addresses or machine.masquerade is None or links is None:
        return machine.addresses
    entry = entry_link(machine.masquerade, links)
    if entry is None:
        return ()
    return tuple(at for family in Family for at in global_addresses(entry, family, links))


def _fenced(machine: Machine, register: Register, unresolved: Unresolved | None) -> Machine:
    if machine.masquerade is None:
        return machine
    hears = _fence(machine, Direction.INGRESS, register, unresolved)
    says = _fence(machine, Direction.EGRESS, register, unresolved)
    if hears is None and says is None:
        return machine
    return replace(machine, hears=hears, says=says)


def _fence(
    machine: Machine, direction: Direction, register: Register, unresolved: Unresolved | None
) -> Fence | None:
    selecting = register.selecting(machine, direction)
    if not selecting:
        return None
    names = machine.names if direction is Direction.INGRESS else ()
    found: dict[_Kind, _Ports] = defaultdict(list)
    sets: dict[Peers, Members] = {}
    for policy in selecting:
        try:
            gates = list(_gates(policy, direction, register, names))
        except Exception as error:  # a bug met in one policy must not stop the others
            if unresolved is None:
                raise
            unresolved(policy, error)
            continue
        for family, peers, members, protocol, ports in gates:
            if peers is not None and members is not None:
                sets[peers] = _together(members, sets.get(peers, frozenset()))
            found[family, peers, protocol].append((ports, str(policy)))
    return Fence(
        policies=label(",".join(str(policy) for policy in selecting)),
        grants=tuple(sorted(_grants(found), key=str)),
        sets=tuple(sorted(sets.items(), key=lambda pair: str(pair[0]))),
    )


def _gates(
    policy: NetworkPolicy, direction: Direction, register: Register, names: Names
) -> Iterator[_Gate]:
    """What a policy allows, with the members of each set of peers, once."""
    for rule in policy.rules(direction) or ():
        said, families, vary = (
            _Said(policy.namespace, rule, direction),
            _families(rule),
            _vary(rule),
        )
        met: set[Peers] = set()
        for protocol, ports, reach in register.ways(policy.namespace, rule, direction, names):
            name = said.of(protocol, ports)
            for family in families:
                known = reach.get(family, ())
                peers = Peers(family, name) if known is not None or vary else None
                members: Members | None = None
                if peers is not None and (said.numbered or peers not in met):
                    met.add(peers)
                    members = frozenset(WHOLE[family] if known is None else known)
                yield family, peers, members, protocol, ports


def _exempting(machine: Machine, node: frozenset[Address]) -> Machine:
    """The same, with everything allowed between it and its node, as Kubernetes has it: the kubelet
    probes from there. The set is there also where the node has no such address: one that it gets is
    then an element, and no rule changes."""
    if machine.hears is None and machine.says is None:
        return machine
    sets = tuple(
        (
            Peers(family, NODE_KEY),
            frozenset(ip_network(one) for one in node if Family.of(one) is family),
        )
        for family in Family
    )
    exempt = tuple(_grant(peers.family, peers, None, None, [NODE]) for peers, _ in sets)
    hears, says = (
        fence and replace(fence, grants=(*fence.grants, *exempt), sets=(*fence.sets, *sets))
        for fence in (machine.hears, machine.says)
    )
    return replace(machine, hears=hears, says=says)


def _vary(rule: PolicyRule) -> bool:
    """Whether its peers come and go; if these ever are everybody, it is not for good."""
    return any(isinstance(peer, Named) for peer in rule.peers or ())


def _together(some: Members, others: Members) -> Members:
    """Networks that hold both: none may overlap."""
    both = some | others
    return both if both in (some, others) else frozenset(apart(both))


def _families(rule: PolicyRule) -> tuple[Family, ...]:
    """In which it can mean anybody: of blocks that is known for ever."""
    if rule.peers is None or _vary(rule):
        return tuple(Family)
    blocks = [peer.network for peer in rule.peers if isinstance(peer, IpBlock)]
    return tuple(one for one in Family if any(Family.of(b.network_address) is one for b in blocks))


class _Said:
    """What tells the peers of a rule from others, in a few letters: what is said of them, and in
    which namespace, where that matters. Of those who have a port of some name (`numbered`), which
    number it has: only then are the peers not the same for each port of the rule."""

    def __init__(self, namespace: str, rule: PolicyRule, direction: Direction) -> None:
        peers, ports = rule.peers or (), rule.ports or ()
        near = any(isinstance(one, Named) and one.namespaces is None for one in peers)
        parts = [namespace if near else "", *sorted(map(repr, peers))]
        named = any(isinstance(one.port, str) for one in ports)
        self.numbered = direction is Direction.EGRESS and named
        if self.numbered:
            parts.append(repr(rule.ports))
        self._digest = blake2b("\n".join(parts).encode(), digest_size=8)
        self._whole = self._digest.hexdigest()

    def of(self, protocol: Protocol | None, ports: PortRange | None) -> str:
        if not self.numbered:
            return self._whole
        digest = self._digest.copy()
        digest.update(f"\n{protocol}\n{ports}".encode())
        return digest.hexdigest()


def _grants(found: dict[_Kind, _Ports]) -> Iterator[Grant]:
    for (family, peers, protocol), ports in found.items():
        everything = [policy for one, policy in ports if one is None]
        if everything:
            yield _grant(family, peers, protocol, None, everything)
            continue
        whole = coalesce(one for one, _ in ports if one is not None)
        firsts = [one.first for one in whole]
        whose: dict[PortRange, set[str]] = defaultdict(set)
        for one, policy in ports:
            if one is not None:
                whose[whole[bisect_right(firsts, one.first) - 1]].add(policy)
        for joined, policies in whose.items():
            yield _grant(family, peers, protocol, joined, policies)


def _grant(
    family: Family,
    peers: Peers | None,
    protocol: Protocol | None,
    ports: PortRange | None,
    policies: Iterable[str],
) -> Grant:
    names = label(",".join(sorted(set(policies))))
    return Grant(family=family, peers=peers, protocol=protocol, ports=ports, policies=names)
