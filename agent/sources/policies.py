"""A NetworkPolicy as the API server tells of it, and what it says. Pure.

What cannot be understood still selects, and allows nothing: it was written to close.
"""

from collections.abc import Mapping

from agent.sources.answers import Object
from agent.sources.told import IDENTITY, MOST_PROBLEMS, Told, named, some
from agent.sources.vmis import decoded
from rules.manifests import read
from rules.policies import NetworkPolicy, Selector
from rules.problems import Problem
from rules.values import replace

API, KIND = "networking.k8s.io/v1", "NetworkPolicy"
PATH = f"/apis/{API}/networkpolicies"
MOST_ENTRIES = 4096  # of one policy: all of a cluster share the memory of every node


def trimmed(thing: Object) -> Object:
    """For whoever decodes JSON: a policy becomes what it says as soon as it is decoded. In a list
    no kind is named."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not ("spec" in thing or thing.get("kind") == KIND):
        return thing
    return {
        "apiVersion": API,
        "kind": KIND,
        "metadata": some(metadata, IDENTITY),
        **some(thing, ("spec",)),
    }


def heard(thing: Mapping[str, object]) -> Told | None:
    """The policy that a trimmed object is; None where it is none that could be named."""
    return named(thing, API, KIND)


def understood(told: Told) -> tuple[NetworkPolicy, tuple[Problem, ...]]:
    """The policy that it declares, broken where something is wrong with it, and what that is."""
    reading = read(decoded(told.text), limit=MOST_ENTRIES, most_told=MOST_PROBLEMS)
    problems = tuple(problem.at(told.label, 0) for problem in reading.problems)
    found = reading.policies[0] if reading.policies else closed(told)
    return replace(found, origin=f"{told.label}:0"), problems


def closed(told: Told) -> NetworkPolicy:
    """Whom it selects, and in which direction, nobody knows: so everybody there, in both."""
    return NetworkPolicy(
        namespace=told.namespace,
        name=told.name,
        selector=Selector(),
        ingress=(),
        egress=(),
        broken=True,
    )
