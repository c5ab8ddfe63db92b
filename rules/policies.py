"""What NetworkPolicies say, as values: whom they select, and what they allow those to hear and to
say; and everybody whom they may speak of, by labels and addresses."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, summarize_address_range
from operator import attrgetter

from rules.model import Address, Machine, Protocol, Word
from rules.ports import PortRange
from rules.services import Pod
from rules.values import Value, replace

Network = IPv4Network | IPv6Network
Labels = tuple[tuple[str, str], ...]

METADATA_NAME = "kubernetes.io/metadata.name"  # the label that every namespace has: its name

_START = attrgetter("network_address")


class Direction(Word):
    """Of a flow's first packet, seen from the machine."""

    INGRESS = "ingress"
    EGRESS = "egress"


class Operator(Word):
    """How a label is compared."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class Requirement(Value):
    """What one label must be."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()  # sorted

    def __post_init__(self) -> None:
        if bool(self.values) != (self.operator in (Operator.IN, Operator.NOT_IN)):
            raise ValueError(f"{self.operator.value} with the values {self.values}")

    def holds(self, labels: Labels) -> bool:
        value = next((text for key, text in labels if key == self.key), None)
        match self.operator:
            case Operator.IN:
                return value in self.values
            case Operator.NOT_IN:
                return value not in self.values  # also where there is no such label
            case Operator.EXISTS:
                return value is not None
            case Operator.DOES_NOT_EXIST:
                return value is None


class Selector(Value):
    """A choice by labels; what requires nothing chooses everybody."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Labels) -> bool:
        return all(requirement.holds(labels) for requirement in self.requirements)

    def surely_matches(self, labels: Labels) -> bool:
        """The same where there may be more labels: none is known to be missing."""
        keys = {key for key, _ in labels}
        return all(one.key in keys and one.holds(labels) for one in self.requirements)


class IpBlock(Value):
    """The addresses of a network, but for those of some networks in it."""

    network: Network
    excepted: tuple[Network, ...] = ()

    def __post_init__(self) -> None:
        for hole in self.excepted:
            if not is_strictly_inside(hole, self.network):
                raise ValueError(f"{hole} is not strictly inside {self.network}")

    def __contains__(self, address: Address) -> bool:
        return address in self.network and not any(address in hole for hole in self.excepted)

    def networks(self) -> Iterator[Network]:
        """The fewest networks that hold exactly these addresses, in order."""
        # From gap to gap, as address_exclude would walk over all that is left for every exception.
        whole, made = self.network, type(self.network.network_address)
        first = int(whole.network_address)
        for hole in collapsed(self.excepted):
            if int(hole.network_address) > first:
                yield from _between(made(first), hole.network_address - 1)
            first = int(hole.broadcast_address) + 1
        if first <= int(whole.broadcast_address):
            yield from _between(made(first), whole.broadcast_address)


def is_strictly_inside(inner: Network, outer: Network) -> bool:
    """Whether one network is a part of another, and not all of it."""
    return (
        inner.version == outer.version
        and inner.prefixlen > outer.prefixlen
        and inner.network_address in outer
    )


def collapsed(networks: Sequence[Network]) -> tuple[Network, ...]:
    """The fewest networks of one family that hold exactly the addresses of these, in order."""
    return tuple(collapse_addresses(networks))  # type: ignore[type-var]  # of one family


def apart(networks: Iterable[Network]) -> tuple[Network, ...]:
    """These networks of one family without those inside of others, in order. Neighbours are not
    joined: one that comes or goes is one element of a set, and touches no other."""
    found: list[Network] = []
    for one in sorted(set(networks), key=lambda one: (int(one.network_address), one.prefixlen)):
        if not found or int(one.network_address) > int(found[-1].broadcast_address):
            found.append(one)
    return tuple(found)


def _between(first: Address, last: Address) -> Iterator[Network]:
    return summarize_address_range(first, last)


class Peers(Value, kw_only=True):
    """Everybody known who has these labels, in the policy's own namespace or in those that have
    those."""

    pods: Selector = Selector()
    namespaces: Selector | None = None  # None: the policy's own


class PolicyPort(Value):
    """A port, a range, a port that each machine has its own number for, or None: all ports."""

    protocol: Protocol
    port: PortRange | str | None = None


class PolicyRule(Value, kw_only=True):
    """Some peers, and what may be said between them and the machine."""

    peers: tuple[IpBlock | Peers, ...] | None = None  # None: everybody
    ports: tuple[PolicyPort, ...] | None = None  # None: everything, also without ports

    def __post_init__(self) -> None:
        if self.peers == () or self.ports == ():
            raise ValueError("in Kubernetes an empty list means everything: say None")


class NetworkPolicy(Value, kw_only=True):
    """One NetworkPolicy. Where it has rules for a direction, also none, what it selects is cut off
    from all but what they, or another policy's, allow; None: it does not speak of it."""

    namespace: str
    name: str
    selector: Selector
    ingress: tuple[PolicyRule, ...] | None
    egress: tuple[PolicyRule, ...] | None
    broken: bool = False  # it could not be understood: it selects, and allows nothing
    origin: str = ""  # file:line, for messages

    def __post_init__(self) -> None:
        if self.broken and (self.ingress or self.egress):
            raise ValueError(f"{self} is broken, and would allow something")

    def __str__(self) -> str:
        return f"NetworkPolicy/{self.namespace}/{self.name}"

    def rules(self, direction: Direction) -> tuple[PolicyRule, ...] | None:
        """Those of one direction; None: it does not isolate in it."""
        return self.ingress if direction is Direction.INGRESS else self.egress

    def shut(self) -> "NetworkPolicy":
        """The same, where something about it cannot be trusted: it selects, and allows nothing."""
        return replace(
            self,
            ingress=None if self.ingress is None else (),
            egress=None if self.egress is None else (),
            broken=True,
        )


class Namespace(Value, kw_only=True):
    """A namespace of Kubernetes, by the labels that policies choose it by."""

    name: str
    labels: Labels | None = ()  # None: they could not be read, so nobody knows which it has
    origin: str = ""

    def __str__(self) -> str:
        return f"Namespace/{self.name}"


class Party(Value, kw_only=True):
    """Somebody known, whom policies may name by labels."""

    namespace: str
    labels: Labels
    addresses: tuple[Address, ...]
    names: tuple[tuple[str, Protocol, int], ...] = ()  # of its ports
    all_labels: bool = True  # else it may have more

    def is_chosen(self, selector: Selector) -> bool:
        """Whether it is known that a selector means it."""
        choose = selector.matches if self.all_labels else selector.surely_matches
        return choose(self.labels)

    @staticmethod
    def of_pod(pod: Pod) -> "Party":
        # A range has one name, and policies know no ranges of that name: only its first port.
        return Party(
            namespace=pod.namespace,
            labels=pod.labels,
            addresses=pod.addresses,
            names=tuple((one.name, one.protocol, one.ports.first) for one in pod.ports if one.name),
        )

    @staticmethod
    def of_machine(
        machine: Machine, addresses: tuple[Address, ...] = (), *, all_labels: bool = True
    ) -> "Party":
        """A machine, at the addresses that were found for it, or else those it is said to have."""
        return Party(
            namespace=machine.namespace,
            labels=machine.labels,
            addresses=addresses or machine.addresses,
            names=machine.names,
            all_labels=all_labels,
        )


def number_of(
    names: Sequence[tuple[str, Protocol, int]], name: str, protocol: Protocol
) -> int | None:
    """The port of that name and protocol; of two, the first, as Kubernetes has it."""
    return next((port for one, of, port in names if one == name and of is protocol), None)


def holder(networks: Sequence[Network], address: Address) -> Network | None:
    """Which of the networks, that are of one family, in order and apart, has the address."""
    after = bisect_right(networks, address, key=_START)
    return networks[after - 1] if after and address in networks[after - 1] else None
