"""What is left of an instance, and where it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.sources.feedback import Bucket, over_all, per_object, shortened
from agent.sources.files import understood as understood_file
from agent.sources.vmis import (
    MOST_PODS,
    MOST_RANGES,
    Vmi,
    decoded,
    heard,
    kept,
    place,
    placed,
    recalled,
    shut,
    trimmed,
    understood,
)
from rules.model import Machine
from rules.problems import Problem

Json = Any
POD, OTHER = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"
WHOLE: Json = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "metadata": {
        "name": "web",
        "namespace": "ns",
        "uid": "u1",
        "resourceVersion": "17",
        "generation": 3,
        "labels": {"kubevirt.io/nodeName": "n1", "app": "web"},
        "annotations": {
            "portranger.io/port-ranges": "22",
            "sidecar.istio.io/inject": "true",
            "kubectl.kubernetes.io/last-applied-configuration": "{}" * 1000,
        },
        "managedFields": [{"manager": "virt-handler"}],
        "ownerReferences": [{"kind": "VirtualMachine", "name": "web"}],
    },
    "spec": {
        "domain": {
            "cpu": {"cores": 2},
            "devices": {
                "disks": [{"name": "root"}],
                "autoattachPodInterface": True,
                "interfaces": [
                    {
                        "name": "default",
                        "masquerade": {},
                        "model": "a new one",
                        "macAddress": "whatever",
                        "bootOrder": 1,
                    }
                ],
            },
        },
        "networks": [{"name": "default", "pod": {"vmNetworkCIDR": "10.9.0.0/24"}}],
        "volumes": [{"name": "root", "cloudInitNoCloud": {"userData": "secret"}}],
    },
    "status": {
        "phase": "Running",
        "nodeName": "n1",
        "activePods": {POD: "n1", OTHER: "n2"},
        "migrationTransport": "Unix",
        "conditions": [{"type": "Ready"}],
        "interfaces": [{"name": "default", "podInterfaceName": "net1", "ipAddress": "10.0.0.1"}],
        "migrationState": {"targetNode": "n2", "migrationUid": "x", "completed": False},
    },
}


def copy(**changes: Json) -> Json:
    return {**json.loads(json.dumps(WHOLE)), **changes}


def vmi(thing: Json = WHOLE) -> Vmi:
    found = heard(trimmed(thing))
    assert found
    return found


def test_what_concerns_us_is_kept_and_nothing_else() -> None:
    thing = copy()
    thing["metadata"]["annotations"]["portrange.alpha.kubernetes.io/port-end-x"] = "9"
    left = trimmed(thing)
    assert left == {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "web",
            "namespace": "ns",
            "uid": "u1",
            "resourceVersion": "17",
            "labels": {"kubevirt.io/nodeName": "n1", "app": "web"},
            "annotations": {
                "portranger.io/port-ranges": "22",
                "portrange.alpha.kubernetes.io/port-end-x": "9",
                "sidecar.istio.io/inject": "true",
            },
        },
        "spec": {
            "domain": {
                "devices": {
                    "autoattachPodInterface": True,
                    "interfaces": [{"name": "default", "masquerade": {}}],
                }
            },
            "networks": [{"name": "default", "pod": {"vmNetworkCIDR": "10.9.0.0/24"}}],
        },
        "status": {
            "phase": "Running",
            "nodeName": "n1",
            "activePods": {POD: "n1", OTHER: "n2"},
            "migrationTransport": "Unix",
            "interfaces": [{"name": "default", "podInterfaceName": "net1"}],
            "migrationState": {"targetNode": "n2", "completed": False},
        },
    }
    assert trimmed(left) == left


@pytest.mark.parametrize("state", ["up", "down", "of a later version"])
def test_the_state_of_a_link_is_left_to_kubevirt(state: str) -> None:
    thing = copy()
    (interface,) = thing["spec"]["domain"]["devices"]["interfaces"]
    interface["state"] = state
    (machine,), problems = understood(found := vmi(thing), decoded(found.text))
    assert machine.masquerade
    assert problems == ()


def test_a_list_is_trimmed_as_it_is_decoded() -> None:
    answer = json.dumps({"kind": "VirtualMachineInstanceList", "metadata": {}, "items": [WHOLE]})
    found = json.loads(answer, object_hook=trimmed)
    assert found == {
        "kind": "VirtualMachineInstanceList",
        "metadata": {},
        "items": [trimmed(copy())],
    }


@pytest.mark.parametrize("odd", [1, None, "x", [], [1], {"a": 1}])
@pytest.mark.parametrize("key", ["metadata", "spec", "status"])
def test_an_instance_of_any_form_is_borne(key: str, odd: Json) -> None:
    thing = trimmed(copy(**{key: odd}))
    found = heard(thing)
    if key == "metadata":
        assert found is None
        return
    assert found
    document = decoded(found.text)
    understood(found, document)
    place(document, "n1")


def test_two_versions_that_say_the_same_to_us_have_the_same_text() -> None:
    other = copy()
    other["metadata"] |= {"resourceVersion": "18", "generation": 4}
    other["status"]["conditions"] = []
    assert vmi(other).text == vmi().text
    assert vmi(other).newer(vmi())
    assert not vmi().newer(vmi(other))
    other["status"]["activePods"] = {}
    assert vmi(other).text != vmi().text


def test_a_machine_is_placed_in_each_of_its_pods() -> None:
    one = vmi()
    document = decoded(one.text)
    [machine], problems = understood(one, document)
    assert not problems
    where = place(document, "n1")
    assert where.pods == (POD,)
    there = placed(machine, where, POD)
    assert there.netns == f"pod:{POD}"
    assert there.masquerade
    assert there.masquerade.entry == "net1"
    assert there.masquerade.proxied
    assert place(document, "n2").pods == (OTHER,)
    assert place(document, "n3").pods == ()


@pytest.mark.parametrize("link", ["", "..", "a/b", "x" * 16])
def test_a_link_that_cannot_be_one_is_looked_for(link: str) -> None:
    thing = copy()
    thing["status"]["interfaces"][0]["podInterfaceName"] = link
    one = vmi(thing)
    document = decoded(one.text)
    [machine], _ = understood(one, document)
    there = placed(machine, place(document, "n1"), POD)
    assert there.masquerade
    assert there.masquerade.entry is None


@pytest.mark.parametrize("uid", ["", "..", "../x", POD + "/x", POD.upper() + "G", "a" * 36])
def test_only_a_uid_is_a_pod(uid: str) -> None:
    thing = copy()
    thing["status"]["activePods"] = {uid: "n1"}
    where = place(decoded(vmi(thing).text), "n1")
    assert where.pods == ()
    assert len(where.odd) == 1


def test_of_invented_pods_few_count_and_the_rest_is_told_in_one_line() -> None:
    thing = copy()
    invented = [f"{number:08x}-0000-0000-0000-000000000000" for number in range(10_000)]
    thing["status"]["activePods"] = dict.fromkeys([*invented, *map(str, range(10_000))], "n1")
    where = place(decoded(vmi(thing).text), "n1")
    assert where.pods == tuple(invented[:MOST_PODS])
    assert len(where.odd) == MOST_PODS + 1
    assert where.odd[-1] == f"status.activePods names 20000 pods here, and {MOST_PODS} count"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_what_has_ended_is_nowhere(phase: str) -> None:
    thing = copy()
    thing["status"]["phase"] = phase
    assert place(decoded(vmi(thing).text), "n1").pods == ()


def test_what_is_stored_has_the_last_good_words_and_the_present_place() -> None:
    good = decoded(vmi().text)
    bad = copy()
    bad["metadata"]["annotations"]["portranger.io/port-ranges"] = "nonsense"
    bad["status"]["activePods"] = {OTHER: "n1", POD: "n1"}
    text = kept(good, decoded(vmi(bad).text), [OTHER], "n1")
    found = recalled(text)
    assert found
    document = decoded(found.text)
    assert not understood(found, document)[1]
    assert place(document, "n1").pods == (OTHER,)
    assert found.uid == "u1"
    assert understood_file("x", text).machines == ()  # nobody takes it for a manifest


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"instance": 1}', '{"instance": {}}', "[" * 9999]
)
def test_what_was_stored_by_others_is_not_recalled(text: str) -> None:
    assert recalled(text) is None


# --------------------------------------------------------------------------- limits of feedback


def test_a_bucket_gives_so_many_at_once_and_then_so_many_a_second() -> None:
    bucket = Bucket(most=2.0, rate=0.5, left=2.0, at=100.0)
    for _ in range(2):
        assert bucket.wait(100.0) == 0
        bucket = bucket.taken(100.0)
    assert bucket.wait(100.0) == 2.0
    assert bucket.wait(101.0) == 1.0
    assert bucket.wait(102.0) == 0
    assert bucket.taken(1000.0).left == 1.0
    assert per_object(0.0).wait(0.0) == over_all(0.0).wait(0.0) == 0.0


@pytest.mark.parametrize(
    ("text", "most", "short"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "\N{HORIZONTAL ELLIPSIS}"),
        ("abcdefg", 6, "abc\N{HORIZONTAL ELLIPSIS}"),
        ("ab\N{SNOWMAN}cdefg", 7, "ab\N{HORIZONTAL ELLIPSIS}"),
        ("\ud800", 9, "?"),
    ],
)
def test_a_long_text_is_cut_between_characters(text: str, most: int, short: str) -> None:
    assert shortened(text, most) == short
    assert len(short.encode()) <= most


def test_one_instance_cannot_fill_the_memory_that_all_on_a_node_share() -> None:
    ranges = ",".join(str(port) for port in range(2, 2 * MOST_RANGES + 4, 2))
    said, problems = understood_as(ranges)
    assert not said
    assert [problem.code for problem in problems] == ["too-many-ranges"]
    said, problems = understood_as(ranges.rpartition(",")[0])
    assert said
    assert not problems


def understood_as(ranges: str) -> tuple[tuple[Machine, ...], tuple[Problem, ...]]:
    document = copy()
    document["metadata"]["annotations"]["portranger.io/port-ranges"] = ranges
    vmi = heard(trimmed(document))
    assert vmi is not None
    return understood(vmi, decoded(vmi.text))


def test_what_cannot_be_understood_is_a_machine_without_ports() -> None:
    def closed(**changes: Json) -> list[Machine]:
        document = copy()
        document["metadata"]["annotations"] = changes
        vmi = heard(trimmed(document))
        assert vmi is not None
        return list(shut(vmi, decoded(vmi.text)))

    (machine,) = closed(**{"portranger.io/port-ranges": "x", "portranger.io/netns": "y"})
    assert machine.masquerade
    assert machine.masquerade.claims == ()
    assert not closed(**{"portranger.io/netns": "y"})  # which declares no port at all
