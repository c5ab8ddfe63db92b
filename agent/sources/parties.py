"""Whom policies speak of beside the machines of a node: Pods and Namespaces as the API server tells
of them, cut down to their labels and addresses, and those of them that matter here. Pure.

A cluster has tens of thousands of Pods. Each becomes a value of less than 1 KB as soon as it is
decoded, and only those that some policy of a machine here may mean are handed on.
"""

from collections.abc import Hashable, Iterable, Mapping
from sys import getsizeof
from typing import TypeVar

from agent.sources.answers import Object
from agent.sources.told import mapping, mappings, some
from agent.sources.vmis import FINAL
from rules.manifests.pod import given_addresses
from rules.model import Machine, Protocol
from rules.policies import (
    METADATA_NAME,
    Direction,
    IpBlock,
    Labels,
    Namespace,
    NetworkPolicy,
    Peers,
    PolicyRule,
    Selector,
)
from rules.ports import HIGHEST, LOWEST, PortRange
from rules.services import Pod, PodPort
from rules.values import Value

PODS, NAMESPACES = "/api/v1/pods", "/api/v1/namespaces"
POD, NAMESPACE = "Pod", "Namespace"
RUNNING = ",".join(f"status.phase!={phase}" for phase in FINAL)  # or about to: a field selector
HELD = "pod"  # where a trimmed object has what became of it

_PROTOCOLS = {one.name: one for one in Protocol}
_NAMED = ("namespace", "name", "resourceVersion")
_CONTAINERS = ("containers", "initContainers")
_LARGE = 1 << 13  # bytes of a value; nobody has the like of a larger one
_MOST_ALIKE = 1 << 23  # bytes of all that are known; beyond that it begins anew

Name = tuple[str, Protocol]  # of a port
Wards = frozenset[tuple[str, Labels]]  # by what policies may select machines: namespace, labels


Same = TypeVar("Same", bound=Hashable)


class Alike:
    """Makes one of what is equal: the Pods of a Deployment have the same labels and ports. Who has
    it cannot be known, so as many are kept as cost little even if nobody does any more."""

    __slots__ = ("_known", "_size")

    def __init__(self) -> None:
        self._known: dict[tuple[type, Hashable], Hashable] = {}
        self._size = 0

    def one(self, value: Same) -> Same:
        key = type(value), value
        if key in self._known:
            return self._known[key]  # type: ignore[return-value]  # of that type
        size = getsizeof(key) + _size(value)
        if size > _LARGE:
            return value
        if self._size + size > _MOST_ALIKE:
            self._known, self._size = {}, 0
        self._known[key] = value
        self._size += size
        return value


def _size(value: object) -> int:
    """Of the memory that it takes; what is shared counts again."""
    parts: Iterable[object] = ()
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, Value):
        parts = (getattr(value, name) for name in value.__match_args__)
    return getsizeof(value) + sum(map(_size, parts))


class Home(Value, kw_only=True):
    """A namespace, by the labels that policies choose it by."""

    name: str
    labels: Labels

    @property
    def content(self) -> "Home":
        """By which it is told whether there is something new in it."""
        return self


# ----------------------------------------------------------------------------------- as they are


def trimmed_pod(thing: Object, alike: Alike) -> Object:
    """For whoever decodes JSON: a Pod becomes a value at once, as what it is made of would take
    several times as much until the last of all is there. In a list no kind is named."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not ("spec" in thing or thing.get("kind") == POD):
        return thing
    return {"metadata": some(metadata, _NAMED), HELD: _pod(metadata, thing, alike)}


def pod(thing: Mapping[str, object]) -> Pod | None:
    """The Pod that a trimmed object is; None where it has no address of its own."""
    found = thing.get(HELD)
    return found if isinstance(found, Pod) else None


def _pod(metadata: Mapping[str, object], thing: Object, alike: Alike) -> Pod | None:
    """Addresses of the node are everybody's there, and those of a Pod that has ended are soon
    another's."""
    spec, status = mapping(thing, "spec"), mapping(thing, "status")
    if spec.get("hostNetwork") or status.get("phase") in FINAL:
        return None
    addresses = given_addresses(status)
    namespace, name = metadata.get("namespace"), metadata.get("name")
    if not addresses or not isinstance(namespace, str) or not isinstance(name, str):
        return None
    return Pod(
        namespace=alike.one(namespace),
        name=name,
        ports=alike.one(tuple(_ports(spec))),
        labels=alike.one(_labels(metadata)),
        addresses=addresses,
    )


def _ports(spec: Mapping[str, object]) -> Iterable[PodPort]:
    """Those that have a name: policies may call them by it."""
    for kind in _CONTAINERS:
        for container in mappings(spec, kind):
            for port in mappings(container, "ports"):
                name, number = port.get("name"), port.get("containerPort")
                protocol = _PROTOCOLS.get(str(port.get("protocol") or "TCP"))
                if (
                    isinstance(name, str)
                    and name
                    and protocol is not None
                    and type(number) is int
                    and LOWEST <= number <= HIGHEST
                ):
                    whole = PortRange(number, number)
                    yield PodPort(container="", name=name, protocol=protocol, ports=whole)


def trimmed_namespace(thing: Object) -> Object:
    """For whoever decodes JSON, as with Pods."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not ("spec" in thing or thing.get("kind") == NAMESPACE):
        return thing
    return {"metadata": {**some(metadata, _NAMED), "labels": mapping(metadata, "labels")}}


def home(thing: Mapping[str, object]) -> Home | None:
    """The namespace that a trimmed object is; None where it is none that could be named."""
    metadata = mapping(thing, "metadata")
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        return None
    return Home(name=name, labels=_labels(metadata))


def _labels(metadata: Mapping[str, object]) -> Labels:
    labels = mapping(metadata, "labels")
    return tuple(sorted((key, text) for key, text in labels.items() if isinstance(text, str)))


# --------------------------------------------------------------------------------- who is meant


class Wanted(Value, kw_only=True):
    """Whom policies that select a machine here speak of."""

    peers: frozenset[tuple[str, Peers]] = frozenset()  # each with the namespace of its policy
    names: frozenset[Name] = frozenset()  # of ports, that whoever is spoken to may have

    @property
    def pods(self) -> bool:
        """Whether Pods are among them."""
        return bool(self.peers or self.names)

    @property
    def namespaces(self) -> bool:
        """Whether it takes more than the names of namespaces to tell who they are."""
        return any(
            requirement.key != METADATA_NAME
            for _, peers in self.peers
            if peers.namespaces is not None
            for requirement in peers.namespaces.requirements
        )


def wards(machines: Iterable[Machine]) -> Wards:
    """By what policies may select some of the machines."""
    return frozenset((one.namespace, one.labels) for one in machines if one.masquerade is not None)


def wanted(policies: Iterable[NetworkPolicy], selectable: Wards) -> Wanted:
    """Whom those policies speak of that select some of the machines."""
    peers: set[tuple[str, Peers]] = set()
    names: set[Name] = set()
    there: dict[str, list[Labels]] = {}
    for namespace, labels in selectable:
        there.setdefault(namespace, []).append(labels)
    for policy in policies:
        if not any(map(policy.selector.matches, there.get(policy.namespace, ()))):
            continue
        for direction in Direction:
            for rule in policy.rules(direction) or ():
                some_peers = [one for one in rule.peers or () if isinstance(one, Peers)]
                peers.update((policy.namespace, one) for one in some_peers)
                if direction is Direction.EGRESS:
                    names.update(_names(rule))
    return Wanted(peers=frozenset(peers), names=frozenset(names))


def _names(rule: PolicyRule) -> Iterable[Name]:
    """Of ports that are looked up at whoever is at some address."""
    if rule.peers is None or any(isinstance(one, IpBlock) for one in rule.peers):
        for port in rule.ports or ():
            if isinstance(port.port, str):
                yield port.port, port.protocol


class Choice:
    """Tells of Pods whether they may be meant: all that are, and few that are not."""

    __slots__ = ("_homes", "_selectors", "_wanted")

    def __init__(self, wanted: Wanted, homes: Mapping[str, Labels]) -> None:
        """Where the labels of a namespace are not known, its Pods may be meant."""
        self._wanted, self._homes = wanted, homes
        self._selectors: dict[str, tuple[Selector, ...]] = {}

    def takes(self, one: Pod) -> bool:
        namespace = one.namespace
        selectors = self._selectors.get(namespace)
        if selectors is None:
            selectors = self._selectors[namespace] = tuple(self._meaning(namespace))
        names = self._wanted.names
        return any(selector.matches(one.labels) for selector in selectors) or (
            bool(names) and any((port.name, port.protocol) in names for port in one.ports)
        )

    def _meaning(self, namespace: str) -> Iterable[Selector]:
        """How Pods of a namespace are chosen."""
        for policy_in, peers in self._wanted.peers:
            if peers.namespaces is None:
                meant = policy_in == namespace
            else:
                meant = self._may_match(namespace, peers.namespaces)
            if meant:
                yield peers.pods

    def _may_match(self, namespace: str, selector: Selector) -> bool:
        labels, own = self._homes.get(namespace), (METADATA_NAME, namespace)
        if labels is not None:
            return selector.matches((own, *labels))
        named = [one for one in selector.requirements if one.key == METADATA_NAME]
        return all(one.holds((own,)) for one in named)


def known(homes: Mapping[str, Labels]) -> tuple[Namespace, ...]:
    """The namespaces that were told of."""
    return tuple(Namespace(name=name, labels=labels) for name, labels in homes.items())
