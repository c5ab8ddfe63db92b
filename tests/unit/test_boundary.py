"""A bug that one object meets costs that object its newest version, and no other anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.sources import (
    files,
    following,
    instances,
    lawful,
    parties,
    policies,
    published,
    services,
    vmis,
)
from agent.sources import slices as slices_module
from agent.sources.boundary import FAULT
from agent.sources.directory import Directory
from agent.sources.kubernetes import Cluster
from agent.sources.meaning import Meaning
from agent.sources.parties import NAMESPACES, PODS
from agent.sources.policies import PATH as POLICIES
from agent.sources.services import PATH as SERVICES
from agent.sources.slices import PATH as SLICES
from agent.sources.store import Store
from agent.sources.vmis import PATH as VMIS
from agent.sources.watch import Watch
from rules.fences import Laws, fenced
from rules.isolation import Register
from rules.policies import NetworkPolicy
from tests.answering import answering
from tests.scripted import Script
from tests.spaces import eventually, manifest
from tests.unit.test_handover import cluster, known
from tests.unit.test_lawful import CLIENTS, NODE, TEAM, a_pod, machine, namespace, policy
from tests.unit.test_services_followed import READY, back, service, slice_of

Json = Any
Raises = Callable[..., Any]
READ, PLACE = "read", "place"  # names that modules import, and do not export
SECOND = "22222222-2222-3333-4444-555555555555"


def raising(real: Raises, name: str = "boom") -> Raises:
    """The same, but for what has that name."""

    def tried(*words: Any, **more: Any) -> Any:
        if any(f"'{name}'" in str(word) or f'"{name}"' in str(word) for word in words):
            raise ZeroDivisionError(name)
        return real(*words, **more)

    return tried


def boom() -> Json:
    made = machine("boom")
    made["status"]["activePods"] = {SECOND: NODE}
    return made


@pytest.fixture
def script() -> Iterator[Script]:
    lists = {
        VMIS: [machine(), boom()],
        SERVICES: [service(), service("boom")],
        SLICES: [
            slice_of(back("10.0.0.1", **READY)),
            slice_of(back("10.0.0.2", **READY), of="boom", name="boom"),
        ],
        POLICIES: [policy("web", CLIENTS, TEAM), policy("boom", CLIENTS)],
        PODS: [a_pod(), a_pod("boom", "10.0.0.2"), a_pod("far", "10.0.0.3", namespace="boom")],
        NAMESPACES: [namespace("ns"), namespace("boom", team="x")],
    }
    with answering() as server:
        yield Script(server, lists)


def comes_to(source: Cluster, true: Callable[[Meaning], object]) -> Meaning:
    """Once that is true; nothing but being woken makes it look."""

    def is_so() -> bool:
        if source.heard():
            source.look()
        return bool(true(source.meaning))

    assert eventually(is_so), source.meaning
    return source.meaning


def bugs(meaning: Meaning) -> list[str]:
    return sorted(one.file for one in meaning.problems if one.code == "internal-error")


# -------------------------------------------------------------------------------------- instances


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (vmis, "read"),
        (following, "trimmed"),
        (vmis, "heard"),
        (instances, "understood"),
    ],
)
def test_an_instance_that_meets_a_bug_is_closed_and_the_others_are_served(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    real = getattr(module, name)
    calls: list[object] = []

    def once(*words: Any, **more: Any) -> Any:
        """What reads who it is must succeed once the fault is known."""
        if name == "heard" and any(FAULT in str(word) for word in words):
            return real(*words, **more)
        calls.append(words)
        return raising(real)(*words, **more)

    monkeypatch.setattr(module, name, once)
    with closing(cluster(script, tmp_path)) as source:
        found = known(source)
        label = "VirtualMachineInstance/ns/boom"
        assert bugs(found) == [label]
        assert "unexpected ZeroDivisionError: boom" in str(found.problems)
        assert found.shut == (label,)
        wanted = {one.name: one.masquerade and one.masquerade.claims for one in found.machines}
        assert set(wanted) == {"vm", "boom"}
        assert wanted["boom"] == ()
        assert wanted["vm"]
        assert {one.netns for one in found.machines if one.name == "boom"} == {f"pod:{SECOND}"}
    assert calls


def test_an_instance_that_comes_to_meet_a_bug_keeps_its_last_valid_version(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(cluster(script, tmp_path)) as source:
        before = known(source).machines
        monkeypatch.setattr(vmis, "read", raising(getattr(vmis, READ)))
        changed = boom()
        changed["metadata"]["annotations"]["portranger.io/port-ranges"] = "99"
        script.tell(VMIS, "MODIFIED", changed)
        found = comes_to(source, lambda it: it.held)
        assert found.held == ("VirtualMachineInstance/ns/boom",)
        assert found.machines == before
        other = machine()
        other["metadata"]["annotations"]["portranger.io/port-ranges"] = "98"
        script.tell(VMIS, "MODIFIED", other)
        comes_to(source, lambda it: it.machines != before)
        monkeypatch.undo()
        changed["metadata"]["annotations"]["portranger.io/port-ranges"] = "97"
        script.tell(VMIS, "MODIFIED", changed)
        comes_to(source, lambda it: not it.held and not bugs(it))


def test_where_an_instance_is_stays_known_if_that_meets_a_bug(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(cluster(script, tmp_path)) as source:
        before = known(source).machines
        monkeypatch.setattr(instances, "place", raising(getattr(instances, PLACE)))
        script.tell(VMIS, "MODIFIED", {**boom(), "spec": machine()["spec"] | {"x": 1}})
        source.renew()
        source.look()
        assert source.meaning.machines == before


# --------------------------------------------------------------------------------------- Services


@pytest.mark.parametrize(
    ("module", "name"), [(services, "read"), (services, "trimmed"), (services, "heard")]
)
def test_a_service_that_meets_a_bug_is_not_published_and_the_others_are(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, raising(getattr(module, name)))
    with closing(cluster(script, tmp_path)) as source:
        found = known(source)
        assert set(bugs(found)) == {"Service/ns/boom"}
        ranged = [one.name for one in found.services if any(port.ranged for port in one.ports)]
        assert ranged == ["web"]


@pytest.mark.parametrize(("module", "name"), [(services, "read"), (published, "endpoints")])
def test_a_service_that_comes_to_meet_a_bug_goes_on(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    with closing(cluster(script, tmp_path)) as source:
        before = known(source)
        broken = _unless_boom if name == "endpoints" else raising(getattr(module, name))
        monkeypatch.setattr(module, name, broken)
        script.tell(SERVICES, "MODIFIED", service("boom", end="10003", version=20))
        found = comes_to(source, bugs)
        assert set(bugs(found)) == {"Service/ns/boom"}
        assert set(found.services) == set(before.services)
        assert found.endpoints == before.endpoints


def _unless_boom(one: Any, some: Any) -> Any:
    if one.name == "boom":
        raise ZeroDivisionError(one.name)
    return slices_module.endpoints(one, some)


def test_endpoints_that_meet_a_bug_stay_what_they_were(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(cluster(script, tmp_path)) as source:
        before = known(source).endpoints
        monkeypatch.setattr(slices_module, "heard", raising(slices_module.heard))
        script.tell(SLICES, "MODIFIED", slice_of(of="boom", name="boom", version=20))
        found = comes_to(source, bugs)
        assert bugs(found) == ["EndpointSlice/ns/boom"]
        assert found.endpoints == before
        monkeypatch.undo()
        script.tell(SLICES, "MODIFIED", slice_of(of="boom", name="boom", version=21))
        found = comes_to(source, lambda it: not bugs(it))
        assert found.endpoints
        assert found.endpoints["Service/ns/boom"] == ((),)


def test_endpoints_that_always_met_a_bug_are_not_known_and_others_are(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices_module, "trimmed", raising(slices_module.trimmed))
    with closing(cluster(script, tmp_path)) as source:
        found = known(source)
        assert bugs(found) == ["EndpointSlice/ns/boom"]
        assert found.endpoints
        there = [bool(found.endpoints[f"Service/ns/{name}"][0]) for name in ("web", "boom")]
        assert there == [True, False]


# --------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("module", "name"), [(policies, "read"), (policies, "heard"), (lawful, "understood")]
)
def test_a_policy_that_meets_a_bug_selects_and_allows_nothing(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, raising(getattr(module, name)))
    with closing(cluster(script, tmp_path)) as source:
        found = known(source)
        assert bugs(found) == ["NetworkPolicy/ns/boom"]
        assert found.shut == ("NetworkPolicy/ns/boom",)
        [shut] = [one for one in found.laws.policies if one.name == "boom"]
        assert (shut.broken, shut.ingress, shut.egress) == (True, (), ())
        assert len(found.laws.policies) == 2
        assert len(found.machines) == 2


def test_a_policy_that_comes_to_meet_a_bug_keeps_its_last_valid_version(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(cluster(script, tmp_path)) as source:
        before = known(source)
        monkeypatch.setattr(policies, "read", raising(getattr(policies, READ)))
        script.tell(POLICIES, "MODIFIED", policy("boom", version=20))
        found = comes_to(source, bugs)
        assert found.held == ("NetworkPolicy/ns/boom",)
        assert found.laws.policies == before.laws.policies


@pytest.mark.parametrize(
    ("name", "label", "left"),
    [
        ("_pod", "Pod/ns/boom", {"10.0.0.1", "10.0.0.3"}),
        ("home", "Namespace/boom", {"10.0.0.1", "10.0.0.2"}),
    ],
)
def test_a_peer_that_meets_a_bug_is_not_admitted_and_the_others_are(  # noqa: PLR0913, PLR0917
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    label: str,
    left: set[str],
) -> None:
    if name == "_pod":
        real = parties._pod
        made = raising(real)

        def tried(metadata: Json, thing: Json, alike: Any) -> Any:
            return real(metadata, thing, alike) if metadata["name"] != "boom" else made("'boom'")

        monkeypatch.setattr(parties, name, tried)
    else:
        monkeypatch.setattr(parties, name, raising(parties.home))
    with closing(cluster(script, tmp_path)) as source:
        found = known(source)
        assert bugs(found) == [label]
        admitted = {
            str(member).partition("/")[0]
            for one in fenced(found.machines, found.laws, {})
            for _, members in (one.hears.sets if one.hears else ())
            for member in members
        }
        assert admitted == left


def test_a_policy_that_cannot_be_resolved_allows_nothing_and_the_others_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rules.manifests import read

    laws = [read(policies.trimmed(policy(name, CLIENTS))).policies[0] for name in ("web", "boom")]
    real = Register.ways
    guilty = laws[1].ingress

    def tried(self: Register, space: str, rule: Any, *more: Any) -> Any:
        if guilty and rule is guilty[0]:
            raise ZeroDivisionError("boom")
        return real(self, space, rule, *more)

    monkeypatch.setattr(Register, "ways", tried)
    machines = read(machine(), netns="x").machines
    found: list[tuple[NetworkPolicy, str]] = []
    [one] = fenced(
        machines,
        Laws(policies=tuple(laws)),
        {},
        lambda which, error: found.append((which, str(error))),
    )
    assert found == [(laws[1], "boom")]
    assert one.hears
    assert "boom" in one.hears.policies
    assert [grant.policies for grant in one.hears.grants] == ["NetworkPolicy/ns/web"] * 2
    with pytest.raises(ZeroDivisionError):
        fenced(machines, Laws(policies=tuple(laws)), {})


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["read", "_parse"])
def test_a_file_that_meets_a_bug_keeps_its_last_valid_version_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for label in ("a", "b"):
        (tmp_path / f"{label}.yaml").write_text(manifest(label, "22", label))
    watch = Watch(str(tmp_path))
    with closing(Directory(str(tmp_path), Store(str(tmp_path / "state"), print), watch)) as source:
        before = source.read()
        assert len(before.machines) == 2
        real = getattr(files, name)

        def tried(what: Any, **options: Any) -> Any:
            if "boom" in str(what):
                raise ZeroDivisionError("boom")
            return real(what, **options)

        monkeypatch.setattr(files, name, tried)
        (tmp_path / "b.yaml").write_text(manifest("b", "80", "boom"))
        (tmp_path / "c.yaml").write_text(manifest("c", "80", "boom"))
        (tmp_path / "a.yaml").write_text(manifest("a", "99", "a"))
        found = source.read()
        assert bugs(found) == [str(tmp_path / "b.yaml"), str(tmp_path / "c.yaml")]
        assert found.held == (str(tmp_path / "b.yaml"),)
        assert [one.netns for one in found.machines] == ["a", "b"]
        assert found.machines[0] != before.machines[0]
        assert found.machines[1] == before.machines[1]
