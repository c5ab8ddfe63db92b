"""What the API server refuses by our policy, and that it is what `validate` refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rules.manifests import read
from rules.problems import Problem
from tests.kubernetes.admission_cases import (
    BRIDGE,
    END,
    GOOD,
    KINDS,
    MASQUERADE,
    RANGES,
    TABLE,
    VM,
    VMI,
    Case,
    says,
)
from tests.kubernetes.cluster import KUBEVIRT, Cluster
from tests.spaces import ROOT, eventually

Json = Any
POLICY = ROOT / "kubernetes" / "admission.yaml"
REFUSED = 422
ACTIVE = 60  # seconds until the API server goes by a new policy; it takes less than one
FAILURES = (
    "apiserver_admission_match_condition_evaluation_errors_total{",
    'apiserver_validating_admission_policy_check_total{enforcement_action="allow"',
)
BAD = says("bad", "bad-annotation", text="bad")


class Door:
    """Where the API server lets objects in, or does not."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self._path = f"{KUBEVIRT}/namespaces/{namespace}"

    def knock(self, manifest: Json) -> str:
        """What is said to an object that is not let in; nothing if it would be."""
        return self._said("POST", f"{self._resource(manifest['kind'])}?dryRun=All", manifest)

    def change(self, kind: str, patch: Json, subresource: str = "") -> str:
        """The same of a change to the bad object that was there before the policy."""
        path = f"{self._resource(kind)}/before{subresource}?dryRun=All"
        return self._said("PATCH", path, patch)

    def create(self, manifest: Json) -> None:
        self.cluster.ask("POST", self._resource(manifest["kind"]), manifest)

    def failures(self) -> int:
        """How often the policy could not be evaluated, and the object was let in."""
        _, text = self.cluster.request("GET", "/metrics")
        counted = re.findall(rf"^(?:{'|'.join(FAILURES)}).* (\d+)$", text, re.MULTILINE)
        return sum(map(int, counted))

    def _resource(self, kind: str) -> str:
        return f"{self._path}/{kind.lower()}s"

    def _said(self, method: str, path: str, body: Json) -> str:
        status, answer = self.cluster.request(method, path, body)
        assert status < 300 or status == REFUSED, answer
        return "" if status < 300 else answer["message"]


@pytest.fixture(scope="module")
def door(cluster: Cluster) -> Iterator[Door]:
    """With the policy, which goes afterwards: other tests want bad objects. There are two from
    before it."""
    with cluster.namespace() as namespace:
        made = Door(cluster, namespace)
        for kind in KINDS:
            made.create(BAD.manifest(kind, "before"))
        cluster.kubectl("apply", "-f", str(POLICY))
        try:
            assert eventually(lambda: bool(made.knock(BAD.manifest(VMI))), ACTIVE)
            yield made
        finally:
            cluster.kubectl("delete", "-f", str(POLICY))
            assert eventually(lambda: not made.knock(BAD.manifest(VMI)), ACTIVE)


def problems(manifest: Json) -> tuple[Problem, ...]:
    """What `validate` finds in a manifest that comes from Kubernetes."""
    return read(manifest, tenant=True).problems


def told(problem: Problem) -> str:
    """A problem in words. What to write in place of an unknown key is said in others: to find the
    one that was meant is too much for CEL."""
    text = str(problem)
    return text.partition(problem.fix)[0] if problem.code == "unknown-key" else text


def codes(message: str) -> list[str]:
    return sorted(re.findall(r"\[([a-z-]+)\](?: |$)", message))


@pytest.mark.parametrize(
    ("kind", "case"), TABLE, ids=[f"{kind}: {case.name}" for kind, case in TABLE]
)
def test_the_policy_says_what_validate_says(door: Door, kind: str, case: Case) -> None:
    manifest = case.manifest(kind)
    found = problems(manifest)
    assert sorted(problem.code for problem in found) == sorted(case.codes)
    message = door.knock(manifest)
    if case.lax:
        assert message == ""
    else:
        assert codes(message) == sorted(case.codes), message
        assert [text for text in map(told, found) if text not in message] == []


def test_more_problems_than_fit_are_counted(door: Door) -> None:
    message = door.knock(says("many", text=",".join("abcdefghijkl")).manifest(VMI))
    assert codes(message) == ["bad-annotation"] * 8
    assert message.endswith("And 4 more: `portranger validate` tells them all.")


def test_kubectl_shows_what_is_wrong(door: Door, cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(says("bad", text="9000-80").manifest(VM)))
    said = cluster.kubectl("create", "--dry-run=server", "-f", str(path), code=1)
    assert (
        "spec.template.metadata.annotations['portranger.io/port-ranges']: ends below its start"
        " (it is '9000-80'). Write items such as 22, 1000-8000 or 1000-8000/udp"
    ) in said


# ------------------------------------------------------------------------------- any manifest

# Python takes these four for spaces, and Go does not.
NO_SEPARATORS = st.characters(codec="utf-8", exclude_characters="\x1c\x1d\x1e\x1f")
ITEMS = st.one_of(
    st.from_regex(r"[1-9][0-9]{0,2}(-[1-9][0-9]{2,3})?(/(tcp|udp|UDP))?", fullmatch=True),
    st.from_regex(r"[ 0-9/tcpudTCPU-]{0,12}", fullmatch=True),
    st.text(NO_SEPARATORS, max_size=3),
)
NUMBERS = st.sampled_from([*range(1, 10), 1, 5, 0, 65536, "5"])
PROTOCOLS = st.sampled_from(["TCP", "UDP", "TCP", "UDP", "tcp"])
NAMES = st.sampled_from(["a", "b", "c", "A"])
PORTS = st.fixed_dictionaries(
    {"port": st.integers(0, 9)}, optional={"end": NUMBERS, "protocol": PROTOCOLS, "name": NAMES}
)
SPANS = st.fixed_dictionaries({"start": NUMBERS, "end": NUMBERS}, optional={"protocol": PROTOCOLS})
INTERFACES = st.fixed_dictionaries(
    {},
    optional={"ports": st.lists(PORTS, max_size=3), "portRanges": st.lists(SPANS, max_size=3)},
)
ENDS = st.dictionaries(NAMES.map(END.__add__), NUMBERS.map(str), max_size=2)
ANY = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@ANY
@given(st.lists(ITEMS, min_size=1, max_size=6).map(",".join))
def test_the_policy_reads_any_annotation_as_validate_does(door: Door, text: str) -> None:
    manifest = says("any", text=text).manifest(VMI)
    assert bool(door.knock(manifest)) == bool(problems(manifest))


@ANY
@given(INTERFACES, INTERFACES, ENDS)
def test_the_policy_reads_any_ports_as_validate_does(
    door: Door, ours: Json, other: Json, ends: Json
) -> None:
    # There is a range always: plain ports are left to KubeVirt.
    interfaces = (MASQUERADE | ours, BRIDGE | other, BRIDGE | {"portRanges": []})
    manifest = Case(name="any", interfaces=interfaces, annotations=ends).manifest(VMI)
    assert bool(door.knock(manifest)) == bool(problems(manifest))


# ------------------------------------------------------------------------- what stays possible


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_bad_before_can_be_changed_in_all_else(door: Door, kind: str) -> None:
    machine = {"template": {"metadata": {"labels": {"a": "b"}}}, "runStrategy": "Halted"}
    assert door.change(kind, {"metadata": {"labels": {"a": "b"}}}) == ""
    assert door.change(kind, {"metadata": {"annotations": {"example.com/a": "b"}}}) == ""
    assert door.change(kind, {"spec": machine if kind == VM else {"hostname": "web"}}) == ""
    assert door.change(kind, {"status": {"phase": "Running"}}) == ""


def test_the_status_of_what_was_bad_before_can_be_written(door: Door) -> None:
    assert door.change(VM, {"status": {"ready": True}}, "/status") == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "code"), [("worse", "bad-annotation"), ("9-1", "end-before-start")]
)
def test_a_change_for_the_bad_is_refused(door: Door, kind: str, text: str, code: str) -> None:
    assert codes(door.change(kind, annotated(kind, text))) == [code]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["22", None])
def test_what_is_bad_can_be_mended(door: Door, kind: str, text: str | None) -> None:
    assert door.change(kind, annotated(kind, text)) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys", [{"portRanges": [{"start": 9, "end": 1}]}, {"ports": [{"port": 9, "end": 1}]}]
)
def test_a_bad_range_cannot_be_added(door: Door, kind: str, keys: Json) -> None:
    changed = Case(name="changed", interfaces=(MASQUERADE | keys,)).manifest(kind)
    said = door.change(kind, {"spec": changed["spec"]})
    assert codes(said) == ["annotation-and-spec", "bad-annotation", "end-before-start"], said


@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_that_an_annotation_speaks_of_cannot_be_taken_away(
    door: Door, kind: str
) -> None:
    changed = Case(name="changed", interfaces=(BRIDGE,)).manifest(kind)
    said = door.change(kind, {"spec": changed["spec"]})
    assert codes(said) == ["bad-annotation", "ranges-need-masquerade"], said


def annotated(kind: str, text: str | None) -> Json:
    """A change of the annotation."""
    patch = {"metadata": {"annotations": {RANGES: text}}}
    return {"spec": {"template": patch}} if kind == VM else patch


# --------------------------------------------------------------------------------- evaluation


def test_every_good_manifest_can_be_evaluated(door: Door) -> None:
    before = door.failures()
    for case in GOOD:
        for kind in KINDS:
            assert door.knock(case.manifest(kind)) == ""
    assert door.failures() == before


@pytest.mark.parametrize("odd", [5, [5]])
def test_what_cannot_be_evaluated_is_let_in(door: Door, odd: Json) -> None:
    before = door.failures()
    interface = MASQUERADE | {"portRanges": odd}
    case = Case(name="odd", interfaces=(interface,), annotations={RANGES: "bad"})
    assert door.knock(case.manifest(VMI)) == ""
    assert door.failures() == before + 1
