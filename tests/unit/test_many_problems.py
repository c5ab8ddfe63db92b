"""An object of a cluster with more mistakes than anybody reads: a tenant writes it, and every node
would hold all of them, log them and serve them."""

from __future__ import annotations

from typing import Any

import pytest

from agent.sources import policies, services, vmis
from agent.sources.told import MOST_PROBLEMS
from rules.problems import Problem

METADATA = {"name": "a", "namespace": "b", "uid": "c"}
MANY = 3 * MOST_PROBLEMS


def of_an_instance(count: int) -> tuple[Problem, ...]:
    devices: dict[str, Any] = {"interfaces": [{"name": "x", "masquerade": {}}]}
    thing: dict[str, object] = {
        "apiVersion": "kubevirt.io/v1",
        "kind": vmis.KIND,
        "metadata": METADATA,
        "spec": {"domain": {"devices": devices}, "networks": [{"name": "x", "pod": {}}]},
    }
    devices["interfaces"][0]["ports"] = [{"port": 0}] * count
    found = vmis.heard(vmis.trimmed(thing))
    assert found
    return vmis.understood(found, vmis.decoded(found.text))[1]


def of_a_service(count: int) -> tuple[Problem, ...]:
    ends = {f"portrange.alpha.kubernetes.io/port-end-{n}": "5" for n in range(count)}
    spec = {"ports": [{"name": "x", "port": 1, "nodePort": 30000}], "type": "NodePort"}
    thing: dict[str, object] = {
        "kind": "Service",
        "metadata": {**METADATA, "annotations": ends},
        "spec": spec,
    }
    found = services.heard(services.trimmed(thing))
    assert found
    return services.understood(found)[1]


def of_a_policy(count: int) -> tuple[Problem, ...]:
    spec = {"podSelector": {}, "ingress": [{"ports": [{"port": 0}] * count}]}
    found = policies.heard(policies.trimmed({"metadata": METADATA, "spec": spec}))
    assert found
    return policies.understood(found)[1]


@pytest.mark.parametrize("problems_of", [of_an_instance, of_a_service, of_a_policy])
def test_of_an_object_of_a_cluster_a_hundred_problems_are_told_and_how_many_there_are(
    problems_of: Any,
) -> None:
    assert len(problems_of(MOST_PROBLEMS)) == MOST_PROBLEMS
    problems = problems_of(MANY)
    assert len(problems) == MOST_PROBLEMS + 1
    assert "too-many-problems" not in {one.code for one in problems[:-1]}
    assert problems[-1].code == "too-many-problems"
    assert problems[-1].what == f"has {MANY} problems, of which {MOST_PROBLEMS} are told"
