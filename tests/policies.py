"""What NetworkPolicies mean, plain and slow, written from the documentation of Kubernetes ("Network
Policies" under its concepts, and the comments of networking.k8s.io/v1) over the documents as they
are written. It shares nothing with rules/: it is what they are held against."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Document = Mapping[str, Any]


class Pod(NamedTuple):
    """Whoever can be selected, with its addresses and the names of its ports."""

    namespace: str
    labels: Mapping[str, str]
    ips: Sequence[str] = ()
    ports: Sequence[tuple[str, str, int]] = ()  # name, protocol in capitals, number


class World(NamedTuple):
    """Everything there is beside the packet."""

    policies: Sequence[Document]
    pods: Sequence[Pod]
    namespaces: Mapping[str, Mapping[str, str]]  # labels by name, of those that are known
    node: Sequence[str] = ()  # the addresses of the node that the pod is on


class Packet(NamedTuple):
    """The first of a flow, to the pod or from it."""

    direction: str  # Ingress, Egress
    peer: str
    protocol: str  # TCP, UDP, SCTP, or another, that has no ports
    port: int | None


def allowing(world: World, pod: Pod, packet: Packet) -> set[str] | None:
    """The names of the policies that allow it; None: the pod is not isolated from that peer, so it
    passes. As documented: 'traffic to and from the node where a Pod is running is always allowed,
    regardless of the IP address of the Pod or the node'."""
    if packet.peer in world.node:
        return None
    names: set[str] = set()
    isolated = False
    for policy in world.policies:
        if policy["metadata"].get("namespace", "default") != pod.namespace:
            continue
        if not selected(policy["spec"].get("podSelector"), pod.labels):
            continue
        if packet.direction not in types(policy["spec"]):
            continue
        isolated = True
        rules = policy["spec"].get(packet.direction.lower()) or []
        if any(rule_matches(world, pod, packet, rule) for rule in rules):
            names.add(policy["metadata"]["name"])
    return names if isolated else None


def types(spec: Document) -> Sequence[str]:
    """As documented: 'If no policyTypes are specified on a NetworkPolicy then by default Ingress
    will always be set and Egress will be set if the NetworkPolicy has any egress rules.'"""
    if spec.get("policyTypes"):
        return list(spec["policyTypes"])
    return ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]


def selected(selector: Document | None, labels: Mapping[str, str]) -> bool:
    """As documented: 'The result of matchLabels and matchExpressions are ANDed. An empty label
    selector matches all objects.'"""
    selector = selector or {}
    for key, value in (selector.get("matchLabels") or {}).items():
        if key not in labels or labels[key] != value:
            return False
    for one in selector.get("matchExpressions") or []:
        key, operator = one["key"], one["operator"]
        if operator == "In" and not (key in labels and labels[key] in one["values"]):
            return False
        if operator == "NotIn" and key in labels and labels[key] in one["values"]:
            return False
        if operator == "Exists" and key not in labels:
            return False
        if operator == "DoesNotExist" and key in labels:
            return False
    return True


def rule_matches(world: World, pod: Pod, packet: Packet, rule: Document) -> bool:
    """As documented: 'Each rule allows traffic which matches both the from and ports sections',
    where an empty or missing list matches all. A named port is one of the pod that is spoken to; if
    that is the peer, it depends on who is there."""
    peers = rule.get("from" if packet.direction == "Ingress" else "to") or []
    ports = rule.get("ports") or []
    for whose in identities(world, packet.peer):
        if peers and not any(peer_matches(world, pod.namespace, packet, p, whose) for p in peers):
            continue
        target = pod if packet.direction == "Ingress" else whose
        if not ports or any(port_matches(packet, port, target) for port in ports):
            return True
    return False


def identities(world: World, ip: str) -> Iterable[Pod | None]:
    """Who is at an address; None: just the address."""
    yield None
    yield from (pod for pod in world.pods if ip in pod.ips)


def peer_matches(world: World, own: str, packet: Packet, peer: Document, whose: Pod | None) -> bool:
    if peer.get("ipBlock") is not None:
        return in_block(packet.peer, peer["ipBlock"])
    if whose is None:
        return False
    if peer.get("namespaceSelector") is None:
        if whose.namespace != own:
            return False
    else:
        labels = dict(world.namespaces.get(whose.namespace, {}))
        labels["kubernetes.io/metadata.name"] = whose.namespace
        if not selected(peer["namespaceSelector"], labels):
            return False
    return selected(peer.get("podSelector"), whose.labels)


def in_block(ip: str, block: Document) -> bool:
    def inside(cidr: str) -> bool:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(cidr, strict=False)

    return inside(block["cidr"]) and not any(map(inside, block.get("except") or []))


def port_matches(packet: Packet, port: Document, target: Pod | None) -> bool:
    """As documented: 'If this field is not provided, this matches all port names and numbers', and
    of endPort, 'the range of ports from port to endPort, inclusive, should be allowed'."""
    if packet.protocol != (port.get("protocol") or "TCP"):
        return False
    wanted = port.get("port")
    if wanted is None:
        return True
    if isinstance(wanted, str):
        known = target.ports if target else ()
        named = [n for name, protocol, n in known if (name, protocol) == (wanted, packet.protocol)]
        return bool(named) and packet.port == named[0]
    last = port.get("endPort")
    return packet.port is not None and wanted <= packet.port <= (wanted if last is None else last)
