"""A NetworkPolicy as the API server tells of it, and what it says. Pure.

What cannot be understood still selects, and allows nothing: it was written to close.
"""

import json
from collections.abc import Mapping

from agent.sources.services import IDENTITY, mapping, some
from agent.sources.vmis import Object, Reference, decoded
from rules.manifests import read
from rules.policies import NetworkPolicy, Selector
from rules.problems import Problem
from rules.values import Value, replace

API, KIND = "networking.k8s.io/v1", "NetworkPolicy"
PATH = f"/apis/{API}/networkpolicies"
MOST_PORTS = 4096  # of one rule: all policies of a cluster share the memory of every node


class Told(Value, kw_only=True):
    """One policy, as last heard of."""

    namespace: str
    name: str
    uid: str
    version: str  # of the object
    text: str  # what it says, as JSON; the same as long as nothing of it changes

    @property
    def label(self) -> str:
        """Its name in messages, as that of the policy that it declares."""
        return f"{KIND}/{self.namespace}/{self.name}"

    @property
    def content(self) -> tuple[str, str]:
        """By which it is told whether there is something new in it."""
        return self.uid, self.text

    @property
    def reference(self) -> Reference:
        return Reference(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            resource_version=self.version,
            api_version=API,
            kind=KIND,
        )


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
    metadata = dict(mapping(thing, "metadata"))
    version = metadata.pop("resourceVersion", "")
    names = [metadata.get(key) for key in ("namespace", "name", "uid")]
    if not all(isinstance(one, str) and one for one in names):
        return None
    namespace, name, uid = map(str, names)
    return Told(
        namespace=namespace,
        name=name,
        uid=uid,
        version=str(version),
        text=json.dumps({**thing, "metadata": metadata}, sort_keys=True, separators=(",", ":")),
    )


def understood(told: Told) -> tuple[NetworkPolicy, tuple[Problem, ...]]:
    """The policy that it declares, broken where something is wrong with it, and what that is."""
    reading = read(decoded(told.text), limit=MOST_PORTS)
    problems = tuple(problem.at(told.label, 0) for problem in reading.problems)
    found = reading.policies[0] if reading.policies else _unreadable(told)
    return replace(found, origin=f"{told.label}:0"), problems


def _unreadable(told: Told) -> NetworkPolicy:
    """Whom it selects, and in which direction, nobody knows: so everybody there, in both."""
    return NetworkPolicy(
        namespace=told.namespace,
        name=told.name,
        selector=Selector(),
        ingress=(),
        egress=(),
        broken=True,
    )
