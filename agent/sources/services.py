"""A Service as the API server tells of it, cut down to what concerns us: those with a range, and of
the others what they hold of every node, which no range may take. Pure.

A cluster has thousands; of one that has neither, no more is left than its name.
"""

from collections.abc import Mapping

from agent.sources.answers import Object
from agent.sources.told import IDENTITY, MOST_PROBLEMS, Told, mapping, mappings, named, some
from agent.sources.vmis import decoded
from rules.manifests import read
from rules.manifests.metadata import ENDS_PREFIX, PREFIX
from rules.manifests.service import HEADLESS
from rules.problems import Problem
from rules.services import Service
from rules.values import replace

API, KIND = "v1", "Service"
PATH = "/api/v1/services"
MOST_PORTS = 1024  # of one Service: all share the node's memory

_HELD = ("name", "protocol", "port", "nodePort")
_PORT = (*_HELD, "targetPort")
_AFFINITY = ("sessionAffinity", "sessionAffinityConfig")
_PLACE = ("type", "externalIPs", "externalName", "allocateLoadBalancerNodePorts")
_LIMITS = ("externalTrafficPolicy", "loadBalancerSourceRanges")
_SPEC = (*_PLACE, "selector", *_AFFINITY, *_LIMITS)
_PROXY = "Proxy"  # to such an address of a load balancer no packet ever comes


def trimmed(thing: Object) -> Object:
    """For whoever decodes JSON: a Service becomes what concerns us as soon as it is decoded. In a
    list no kind is named."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not ("spec" in thing or thing.get("kind") == KIND):
        return thing
    identity = some(metadata, IDENTITY)
    annotations = mapping(metadata, "annotations")
    ours = {key: annotations[key] for key in annotations if _concerns_us(key)}
    spec = mapping(thing, "spec")
    balancer = mapping(mapping(thing, "status"), "loadBalancer")
    ingress = [
        {"ip": one["ip"]}
        for one in mappings(balancer, "ingress")
        if "ip" in one and one.get("ipMode") != _PROXY
    ]
    ports = [some(one, _PORT if ours else _HELD) for one in mappings(spec, "ports")]
    holds = any(one.get("nodePort") for one in ports) or spec.get("externalIPs") or ingress
    if not ours and not holds:
        return {"metadata": identity}
    kept = some(spec, _SPEC if ours else _PLACE)
    if spec.get("clusterIP") == HEADLESS:
        kept["clusterIP"] = HEADLESS
    return {
        "apiVersion": API,
        "kind": KIND,
        "metadata": {**identity, **({"annotations": ours} if ours else {})},
        "spec": {**kept, "ports": ports},
        **({"status": {"loadBalancer": {"ingress": ingress}}} if ingress else {}),
    }


def heard(thing: Mapping[str, object]) -> Told | None:
    """The Service that a trimmed object is; None where it is none that concerns us."""
    return named(thing, API, KIND) if "spec" in thing else None


def understood(told: Told) -> tuple[Service | None, tuple[Problem, ...]]:
    """The Service that it declares, and what is wrong with it."""
    return _read(told, decoded(told.text))


def plain(told: Told) -> Service | None:
    """The same without its ranges: what it is to everybody but us."""
    document = decoded(told.text)
    metadata = {**mapping(document, "metadata"), "annotations": {}}
    return _read(told, {**document, "metadata": metadata})[0]


def _read(told: Told, document: Object) -> tuple[Service | None, tuple[Problem, ...]]:
    reading = read(document, limit=MOST_PORTS, most_told=MOST_PROBLEMS)
    problems = tuple(problem.at(told.label, 0) for problem in reading.problems)
    for service in reading.services:
        return replace(service, origin=f"{told.label}:0"), problems
    return None, problems


def _concerns_us(key: str) -> bool:
    return key.startswith((PREFIX, ENDS_PREFIX))
