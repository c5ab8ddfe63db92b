"""Port ranges from one spelling to another, as plain values and in the text they are read from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.sources import yaml_text
from rules.convert import ANNOTATIONS, PORTS, RANGES, convert
from rules.manifests import read
from rules.manifests.ports import is_service_name
from rules.port_lists import fresh, numbered

END = "portrange.alpha.kubernetes.io/port-end-"


def parse(text: str) -> Any:
    documents, problems = yaml_text.parse(text)
    assert not problems, [str(problem) for problem in problems]
    [(document, _)] = documents
    return document


def converted(document: object, to: str) -> Any:
    """The document in another spelling; valid before, valid after."""
    assert [str(problem) for problem in read(document).problems] == []
    made = convert(document, to)
    assert [str(problem) for problem in read(made).problems] == []
    return made


# -------------------------------------------------------------------- the examples of document 004

POD = """
apiVersion: v1
kind: Pod
metadata:
  name: test-pod
  annotations:
    portrange.alpha.kubernetes.io/port-end-sip: "5064"
    portrange.alpha.kubernetes.io/port-end-rtp: "65050"
spec:
  containers:
  - name: a
    image: a:a
    ports:
      - name: http
        containerPort: 80
        protocol: TCP
      - name: sip
        containerPort: 5060
        protocol: TCP
      - name: rtp
        containerPort: 65000
        protocol: UDP
"""
SERVICE = """
{
    "kind": "Service",
    "apiVersion": "v1",
    "metadata": {
        "name": "a-service",
        "annotations": {
          "portrange.alpha.kubernetes.io/port-end-sip": "5064",
          "portrange.alpha.kubernetes.io/port-end-rtp": "65050"
        }
    },
    "spec": {
        "selector": {
            "app": "a-core"
        },
        "ports": [
            {
                "name": "http",
                "protocol": "TCP",
                "port": 80,
                "targetPort": 80
            },
            {
                "name": "sip",
                "protocol": "TCP",
                "port": 5060,
                "targetPort": 5060
            },
             {
                "name": "rtp",
                "protocol": "UDP",
                "port": 65000,
                "targetPort": 65000
            }
        ]
    }
}
"""


def container_port(name: str, port: int, protocol: str) -> dict[str, object]:
    return {"name": name, "containerPort": port, "protocol": protocol}


def service_port(name: str, port: int, protocol: str) -> dict[str, object]:
    return {"name": name, "protocol": protocol, "port": port, "targetPort": port}


EXPANDED_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "test-pod"},
    "spec": {
        "containers": [
            {
                "name": "a",
                "image": "a:a",
                "ports": [
                    container_port("http", 80, "TCP"),
                    *(container_port(f"sip{at}", 5060 + at, "TCP") for at in range(5)),
                    *(container_port(f"rtp{at}", 65000 + at, "UDP") for at in range(51)),
                ],
            }
        ]
    },
}
EXPANDED_SERVICE = {
    "kind": "Service",
    "apiVersion": "v1",
    "metadata": {"name": "a-service"},
    "spec": {
        "selector": {"app": "a-core"},
        "ports": [
            service_port("http", 80, "TCP"),
            *(service_port(f"sip{at}", 5060 + at, "TCP") for at in range(5)),
            *(service_port(f"rtp{at}", 65000 + at, "UDP") for at in range(51)),
        ],
    },
}
EXAMPLES = {"pod": (POD, EXPANDED_POD), "service": (SERVICE, EXPANDED_SERVICE)}


@pytest.mark.parametrize(("text", "expanded"), EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_becomes_single_ports_and_comes_back(text: str, expanded: object) -> None:
    document = parse(text)
    made = converted(document, PORTS)
    assert json.dumps(made) == json.dumps(expanded)  # the order of keys included
    for to in (ANNOTATIONS, RANGES):
        assert json.dumps(converted(made, to)) == json.dumps(document)


def test_the_end_is_the_last_port_so_65000_to_65050_are_51() -> None:
    """The document's pod has rtp51 at 65051, one too many; its Service ends with rtp50."""
    [last] = converted(parse(POD), PORTS)["spec"]["containers"][0]["ports"][-1:]
    assert last == container_port("rtp50", 65050, "UDP")


def test_65000_to_65000_as_announced_is_a_port() -> None:
    """The document's text says rtp (65000-65000/udp), and its annotation 65050."""
    document = parse(POD.replace("65050", "65000"))
    assert len(read(document).pods[0].ports[2].ports) == 1
    [last] = converted(document, PORTS)["spec"]["containers"][0]["ports"][-1:]
    assert last == container_port("rtp", 65000, "UDP")


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "count", "taken", "first", "last"),
    [
        ("sip", 5, [], "sip0", "sip4"),
        ("sip", 1000, [], "sip0", "sip999"),
        ("rtp1", 12, [], "rtp10", "rtp111"),
        ("a-b", 2, [], "a-b0", "a-b1"),
        ("signalling-tcp", 51, [], "signalling-tc0", "signalling-tc50"),
        ("abcdefghijklmno", 2, [], "abcdefghijklmn0", "abcdefghijklmn1"),
        ("abcdefghijklm-o", 2, [], "abcdefghijklm-0", "abcdefghijklm-1"),
        ("sip", 3, ["sip2"], "sipa0", "sipa2"),
        ("sip", 3, ["sip2", "sipa1", "sipc0"], "sipb0", "sipb2"),
        ("abcdefghijklmno", 2, ["abcdefghijklmn1"], "abcdefghijklma0", "abcdefghijklma1"),
        ("a--b", 2, [], "a-b0", "a-b1"),
        ("5060", 2, [], "p50600", "p50601"),
        ("12345678901234567890a", 2, [], "p12345678901230", "p12345678901231"),
    ],
)
def test_ports_of_a_range_are_named_by_their_place(
    name: str, count: int, taken: list[str], first: str, last: str
) -> None:
    names = numbered(name, count, taken)
    assert (names[0], names[-1], len(names)) == (first, last, count)
    assert all(map(is_service_name, names))


def test_there_is_always_another_name() -> None:
    taken: set[str] = set()
    for _ in range(800):
        names = numbered("sip", 10, taken)
        assert all(map(is_service_name, names))
        assert taken.isdisjoint(names)
        taken.update(names)


def test_ranges_without_a_name_are_called_by_their_protocol() -> None:
    assert fresh("TCP", []) == "tcp"
    assert fresh("UDP", ["udp", "udp-a"]) == "udp-b"


# ----------------------------------------------------------------------- Services, back and forth


def service(*ports: dict[str, object], **ends: str) -> dict[str, Any]:
    annotations = {f"{END}{name.replace('_', '-')}": text for name, text in ends.items()}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "annotations": annotations} if ends else {"name": "s"},
        "spec": {"type": "NodePort", "ports": list(ports)},
    }


def port(name: str, number: int, **more: object) -> dict[str, object]:
    return {"name": name, "port": number, **more}


def test_targets_and_node_ports_follow() -> None:
    short = service(port("rtp", 10, targetPort=20, nodePort=30), rtp="11")
    long = service(
        port("rtp0", 10, targetPort=20, nodePort=30), port("rtp1", 11, targetPort=21, nodePort=31)
    )
    assert converted(short, PORTS) == long
    assert converted(long, ANNOTATIONS) == short


def test_nought_is_not_a_port_that_could_follow() -> None:
    short = service(port("rtp", 10, targetPort=0, nodePort=0), rtp="11")
    ports = converted(short, PORTS)["spec"]["ports"]
    assert [(one["targetPort"], one["nodePort"]) for one in ports] == [(0, 0), (0, 0)]


JOINED = {
    "counted from nought": (["a0 1", "a1 2", "a2 3"], ["a 1-3"]),
    "counted from one": (["a1 1", "a2 2"], ["a 1-2"]),
    "named by the port": (["udp-5000 5000", "udp-5001 5001"], ["udp 5000-5001"]),
    "counted over a ten": (["a8 1", "a9 2", "a10 3", "a11 4"], ["a 1-4"]),
    "a long count rather than two short ones": (
        [f"a{5000 + at} {at + 1}" for at in range(20)],
        ["a 1-20"],
    ),
    "with noughts before": (["a08 1", "a09 2", "a10 3"], ["a 1-3"]),
    "in any order, where the first of them stands": (
        ["a1 2", "b 9", "a2 3", "a0 1"],
        ["a 1-3", "b 9"],
    ),
    "with a stem that ends in a digit": (["a10 1", "a11 2"], ["a1 1-2"]),
    "with dashes": (["a-0 1", "a-1 2"], ["a 1-2"]),
    "not with another name": (["a 1", "b 2"], ["a 1", "b 2"]),
    "not over a gap": (["a0 1", "a1 3"], ["a0 1", "a1 3"]),
    "not over a gap in the count": (["a0 1", "a2 2"], ["a0 1", "a2 2"]),
    "not downwards": (["a0 2", "a1 1"], ["a0 2", "a1 1"]),
    "two ranges of one stem": (["a0 1", "a1 2", "a5 5", "a6 6"], ["a 1-2", "a5 5-6"]),
    "where the stem is somebody's name": (["a0 1", "a1 2", "a 9"], ["a0 1-2", "a 9"]),
    "where the stem is no name": (["0 1", "1 2"], ["0 1-2"]),
    "alone": (["a0 1"], ["a0 1"]),
}


@pytest.mark.parametrize(("singles", "expected"), JOINED.values(), ids=JOINED)
def test_ports_are_joined_whose_names_count_them(singles: list[str], expected: list[str]) -> None:
    ports = [one.split() for one in singles]
    document = service(*(port(name, int(number)) for name, number in ports))
    [made] = read(converted(document, ANNOTATIONS)).services
    assert [f"{one.name} {one.ports}" for one in made.ports] == expected


APART = {
    "another protocol": ({}, {"protocol": "UDP"}),
    "another distance of the target": ({"targetPort": 5}, {"targetPort": 7}),
    "a target at another distance than none": ({}, {"targetPort": 9}),
    "another distance of the node port": ({"nodePort": 5}, {"nodePort": 7}),
    "a node port where the other has none": ({"nodePort": 5}, {}),
    "another application": ({"appProtocol": "http"}, {"appProtocol": "https"}),
    "targets that are names": ({"targetPort": "x"}, {"targetPort": "x"}),
}


@pytest.mark.parametrize(("one", "other"), APART.values(), ids=APART)
def test_ports_that_differ_in_anything_else_are_not_joined(
    one: dict[str, object], other: dict[str, object]
) -> None:
    document = service(port("a0", 1, **one), port("a1", 2, **other))
    assert converted(document, ANNOTATIONS) == document


def test_ports_that_only_say_it_differently_are_joined() -> None:
    document = service(
        port("a0", 1), port("a1", 2, targetPort=2, protocol="TCP"), port("a2", 3, nodePort=0)
    )
    assert converted(document, ANNOTATIONS) == service(port("a", 1), a="3")


def test_a_name_that_no_annotation_can_hold_keeps_its_ports() -> None:
    long = "a" * 62
    document = service(port(f"{long}0", 1), port(f"{long}1", 2))
    assert converted(document, ANNOTATIONS) == document
    shorter = service(port(f"{'a' * 54}0", 1), port(f"{'a' * 54}1", 2))
    assert converted(shorter, ANNOTATIONS) == service(port("a" * 54, 1), **{"a" * 54: "2"})


def test_ranges_that_are_there_stay_as_they_are() -> None:
    document = service(port("a", 1), port("b", 6), port("c", 10), a="5", b="9", c="10")
    for to in (ANNOTATIONS, RANGES):
        assert converted(document, to) == document


def test_ranges_whose_ports_would_have_the_same_names_get_others() -> None:
    document = service(port("a", 1), port("a0", 20), port("a1", 40), a="12", a0="21", a1="42")
    names = [one["name"] for one in converted(document, PORTS)["spec"]["ports"]]
    assert names[:12] == [f"a{at}" for at in range(12)]
    assert names[12:] == ["a00", "a01", "a1a0", "a1a1", "a1a2"]


def test_other_annotations_stay_and_empty_metadata_goes() -> None:
    document = service(port("a", 1), a="2")
    document["metadata"]["annotations"]["else"] = "x"
    assert converted(document, PORTS)["metadata"] == {"name": "s", "annotations": {"else": "x"}}
    bare = {**service(port("a", 1), a="2")}
    del bare["metadata"]["name"]
    assert "metadata" not in converted(bare, PORTS)


def test_metadata_is_made_before_the_spec_where_there_is_none() -> None:
    document = service(port("a0", 1), port("a1", 2))
    document["metadata"] = None
    made = converted(document, ANNOTATIONS)
    assert list(made) == ["apiVersion", "kind", "metadata", "spec"]
    assert made["metadata"] == {"annotations": {f"{END}a": "2"}}


# ------------------------------------------------------------------------------------------- pods


def pod(*containers: list[dict[str, object]], **ends: str) -> dict[str, Any]:
    listed = [{"name": f"c{at}", "ports": ports} for at, ports in enumerate(containers)]
    annotations = {f"{END}{name}": text for name, text in ends.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": annotations} if ends else {"name": "p"},
        "spec": {"containers": listed},
    }


def test_ports_of_the_host_follow() -> None:
    short = pod([{"name": "a", "containerPort": 1, "hostPort": 11}], a="2")
    singles: list[dict[str, object]] = [
        {"name": "a0", "containerPort": 1, "hostPort": 11},
        {"name": "a1", "containerPort": 2, "hostPort": 12},
    ]
    assert converted(short, PORTS) == pod(singles)
    assert converted(pod(singles), ANNOTATIONS) == short


def test_names_are_unique_over_all_containers() -> None:
    document = pod([{"name": "a", "containerPort": 1}], [{"name": "a0", "containerPort": 9}], a="2")
    assert converted(document, PORTS) == pod(
        [{"name": "aa0", "containerPort": 1}, {"name": "aa1", "containerPort": 2}],
        [{"name": "a0", "containerPort": 9}],
    )


def test_ports_without_names_are_joined_and_named() -> None:
    document = pod(
        [{"containerPort": 1}, {"containerPort": 2}], [{"name": "tcp", "containerPort": 9}]
    )
    made = pod(
        [{"name": "tcp-a", "containerPort": 1}],
        [{"name": "tcp", "containerPort": 9}],
        **{"tcp-a": "2"},
    )
    assert converted(document, ANNOTATIONS) == made


def test_containers_are_joined_each_by_itself() -> None:
    document = pod(
        [{"name": "a0", "containerPort": 1}, {"name": "a1", "containerPort": 2}],
        [{"name": "a2", "containerPort": 3}, {"name": "a3", "containerPort": 4}],
    )
    assert converted(document, ANNOTATIONS) == pod(
        [{"name": "a", "containerPort": 1}], [{"name": "a2", "containerPort": 3}], a="2", a2="4"
    )


def test_what_two_containers_have_is_not_joined() -> None:
    shared = [{"name": "a0", "containerPort": 1}, {"name": "a1", "containerPort": 2}]
    for other in ({"name": "b", "containerPort": 2}, {"name": "a1", "containerPort": 9}):
        document = pod([dict(one) for one in shared], [dict(other)])
        assert converted(document, ANNOTATIONS) == document


def test_init_containers_are_converted_too() -> None:
    document = pod([], a="2")
    document["spec"]["initContainers"] = [
        {"name": "i", "ports": [{"name": "a", "containerPort": 1}]}
    ]
    ports = converted(document, PORTS)["spec"]["initContainers"][0]["ports"]
    assert [one["name"] for one in ports] == ["a0", "a1"]


# ------------------------------------------------------------------------------ virtual machines

VMI = """
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: vm, annotations: {%(annotations)s}}
spec:
  domain:
    devices:
      interfaces:
      - {name: red, masquerade: {}, %(interface)s}
  networks:
  - {name: red, pod: {}}
"""


def vmi(interface: str, annotations: str = "") -> Any:
    document = parse(VMI % {"interface": interface, "annotations": annotations})
    if not annotations:
        del document["metadata"]["annotations"]
    return document


def end(**ends: str) -> str:
    return ", ".join(f"{END}{name.replace('_', '-')}: '{text}'" for name, text in ends.items())


MACHINES = {
    "portRanges to ports": (
        vmi("portRanges: [{start: 1, end: 2, protocol: UDP}, {start: 9, end: 9}]"),
        PORTS,
        vmi("ports: [{port: 1, protocol: UDP}, {port: 2, protocol: UDP}, {port: 9}]"),
    ),
    "ports to portRanges, without their names": (
        vmi("ports: [{name: a, port: 2}, {port: 9, protocol: UDP}, {port: 1}, {port: 2}]"),
        RANGES,
        vmi("portRanges: [{start: 1, end: 2, protocol: TCP}, {start: 9, end: 9, protocol: UDP}]"),
    ),
    "ends in ports to single ports": (
        vmi("ports: [{protocol: UDP, port: 1, end: 3}, {name: a, port: 9, end: 9}]"),
        PORTS,
        vmi(
            "ports: [{protocol: UDP, port: 1}, {protocol: UDP, port: 2}, {protocol: UDP, port: 3},"
            " {name: a, port: 9}]"
        ),
    ),
    "ends in ports to portRanges": (
        vmi("ports: [{port: 1, end: 3}, {port: 4}]"),
        RANGES,
        vmi("portRanges: [{start: 1, end: 4, protocol: TCP}]"),
    ),
    "ends in ports to annotations": (
        vmi("ports: [{name: a, port: 9, end: 9}, {port: 1, end: 3}, {name: b, port: 20}]"),
        ANNOTATIONS,
        vmi(
            "ports: [{name: a, port: 9}, {name: tcp, port: 1, protocol: TCP}, {name: b, port: 20}]",
            end(tcp="3"),
        ),
    ),
    "portRanges to annotations": (
        vmi("portRanges: [{start: 1, end: 2}, {start: 3, end: 4}, {start: 9, end: 9}]"),
        ANNOTATIONS,
        vmi("ports: [{name: tcp, port: 1, protocol: TCP}, {port: 9, protocol: TCP}]", end(tcp="4")),
    ),
    "our annotation to ports": (
        vmi("", "portranger.io/port-ranges: '1-2/udp, 9'"),
        PORTS,
        vmi(
            "ports: [{port: 1, protocol: UDP}, {port: 2, protocol: UDP}, {port: 9, protocol: TCP}]"
        ),
    ),
    "our annotation to portRanges": (
        vmi("ports: []", "portranger.io/port-ranges: '1-2/udp,9'"),
        RANGES,
        vmi("portRanges: [{start: 1, end: 2, protocol: UDP}, {start: 9, end: 9, protocol: TCP}]"),
    ),
    "our annotation to annotations of named ports": (
        vmi("", "portranger.io/guest: 10.0.2.5, portranger.io/port-ranges: '1-2,1-2/udp,8-9'"),
        ANNOTATIONS,
        vmi(
            "ports: [{name: tcp, port: 1, protocol: TCP}, {name: tcp-a, port: 8, protocol: TCP},"
            " {name: udp, port: 1, protocol: UDP}]",
            "portranger.io/guest: 10.0.2.5, " + end(tcp="2", tcp_a="9", udp="2"),
        ),
    ),
    "annotations of named ports to ports": (
        vmi("ports: [{name: a, port: 1}, {name: b, port: 9}]", end(a="2")),
        PORTS,
        vmi("ports: [{name: a0, port: 1}, {name: a1, port: 2}, {name: b, port: 9}]"),
    ),
    "and back": (
        vmi("ports: [{name: a0, port: 1}, {name: a1, port: 2}, {name: b, port: 9}]"),
        ANNOTATIONS,
        vmi("ports: [{name: a, port: 1}, {name: b, port: 9}]", end(a="2")),
    ),
    "annotations of named ports to portRanges": (
        vmi("ports: [{name: a, port: 1}, {name: b, port: 3}]", end(a="2")),
        RANGES,
        vmi("portRanges: [{start: 1, end: 3, protocol: TCP}]"),
    ),
    "a named port inside of a range without a name": (
        vmi("ports: [{port: 1}, {port: 2}, {port: 3}, {name: a, port: 2}, {port: 4}]"),
        ANNOTATIONS,
        vmi(
            "ports: [{port: 1, protocol: TCP}, {name: tcp, port: 3, protocol: TCP},"
            " {name: a, port: 2}]",
            end(tcp="4"),
        ),
    ),
    "a named port that others have, too": (
        vmi("ports: [{name: a0, port: 1}, {name: a1, port: 2}, {name: b, port: 2}]"),
        ANNOTATIONS,
        vmi("ports: [{name: a0, port: 1}, {name: a1, port: 2}, {name: b, port: 2}]"),
    ),
    "the fewest portRanges": (
        vmi("portRanges: [{start: 3, end: 4}, {start: 1, end: 2, protocol: TCP}]"),
        RANGES,
        vmi("portRanges: [{start: 1, end: 4, protocol: TCP}]"),
    ),
}


@pytest.mark.parametrize(("document", "to", "expected"), MACHINES.values(), ids=MACHINES)
def test_machines_are_respelt(document: Any, to: str, expected: Any) -> None:
    assert converted(document, to) == expected


LEFT_ALONE = {
    "nothing declared": vmi("ports: [], portRanges: []"),
    "portRanges that are as few as can be": (
        vmi("portRanges: [{start: 8, end: 9}, {start: 1, end: 2, protocol: UDP}]")
    ),
    "another kind": {"apiVersion": "v1", "kind": "ConfigMap", "data": {"ports": [{"port": 1}]}},
    "a Service of another API": {"kind": "Service", "spec": {"ports": [{"port": 1}]}},
    "no manifest at all": None,
    "no interface": {"kind": "VM", "spec": {}},
    "an interface that is not ours": parse(
        (
            VMI
            % {"interface": "ports: [{name: a0, port: 1}, {name: a1, port: 2}]", "annotations": ""}
        ).replace("masquerade", "bridge")
    ),
}


@pytest.mark.parametrize("document", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_has_no_other_spelling_is_left_alone(document: object) -> None:
    assert converted(document, RANGES) == document


VM = """
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: vm, annotations: {%sa: '5', %sb: '12', else: x}}
spec:
  template:
    metadata: {annotations: {%sa: '2'}}
    spec:
      domain: {devices: {interfaces: [{name: red, masquerade: {},
        ports: [{name: a, port: 1}, {name: b, port: 11},
          {name: c0, port: 20}, {name: c1, port: 21}]}]}}
      networks: [{name: red, pod: {}}]
""" % (END, END, END)  # noqa: UP031 - the text is full of braces


def test_what_the_template_says_counts_first_and_new_annotations_go_there() -> None:
    document = parse(VM)
    made = converted(document, ANNOTATIONS)
    assert made["metadata"] == document["metadata"]
    assert made["spec"]["template"]["metadata"]["annotations"] == {f"{END}a": "2", f"{END}c": "21"}
    made = converted(document, PORTS)
    assert made["metadata"] == {"name": "vm", "annotations": {"else": "x"}}
    assert list(made["spec"]["template"]) == ["spec"]
    [interface] = made["spec"]["template"]["spec"]["domain"]["devices"]["interfaces"]
    names = ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert [one["name"] for one in interface["ports"]] == names


def test_a_template_without_metadata_gets_some() -> None:
    document = parse(VM)
    del document["spec"]["template"]["metadata"]
    made = converted(document, ANNOTATIONS)
    assert list(made["spec"]["template"]) == ["metadata", "spec"]


def test_the_oldest_machines_may_be_without_a_template() -> None:
    document = vmi("portRanges: [{start: 1, end: 2}]")
    document["kind"] = "VM"
    assert converted(document, PORTS)["spec"]["domain"]["devices"]["interfaces"] == [
        {"name": "red", "masquerade": {}, "ports": [{"port": 1}, {"port": 2}]}
    ]


def test_every_item_of_a_list_is_converted() -> None:
    items = [service(port("a", 1), a="2"), {"kind": "Other"}, parse(POD)]
    made = converted({"kind": "List", "items": items}, PORTS)
    assert made["items"] == [convert(item, PORTS) for item in items]
    assert made["items"][1] is not items[1]


def test_what_is_shared_by_an_alias_is_changed_in_one_place_only() -> None:
    document = pod([{"name": "a", "containerPort": 1}], a="2")
    document["spec"]["other"] = document["spec"]["containers"][0]["ports"]
    made = converted(document, PORTS)
    assert made["spec"]["other"] == [{"name": "a", "containerPort": 1}]
    assert document["spec"]["containers"][0]["ports"] == made["spec"]["other"]
