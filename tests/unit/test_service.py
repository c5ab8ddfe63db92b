"""What Services and Pods are answered with: tables of YAML, codes, and the fields they are found
at; and the examples of document 004, "Port ranges in pods and services"."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from agent.sources import yaml_text
from rules.manifests import Reading, read
from rules.model import Family, Protocol
from rules.ports import PortRange
from rules.services import Pod, PodPort, Service, ServicePort, ServiceType
from tests.unit.samples import ports

END = "portrange.alpha.kubernetes.io/port-end-"

SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: phone, namespace: shop, %(metadata)s}
spec: {%(spec)s}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: phone, %(metadata)s}
spec:
  containers:
  - {name: a, image: a, ports: [%(ports)s]}
  %(more)s
"""


def parse(text: str) -> Any:
    documents, problems = yaml_text.parse(text)
    assert not problems, [str(problem) for problem in problems]
    [(document, _)] = documents
    return document


def ends(**names: str) -> str:
    """Metadata with port-end annotations; in the names of ports, _ stands for -."""
    pairs = (f"{END}{name.replace('_', '-')}: '{text}'" for name, text in names.items())
    return f"annotations: {{{', '.join(pairs)}}}"


def service(
    written: str = "{name: sip, port: 5060}", *, metadata: str = "", spec: str = "selector: {}"
) -> Any:
    """A Service with these ports."""
    return parse(SERVICE % {"metadata": metadata, "spec": f"{spec}, ports: [{written}]"})


def pod(written: str, *, metadata: str = "", more: str = "") -> Any:
    """A Pod whose first container has these ports."""
    return parse(POD % {"metadata": metadata, "ports": written, "more": more})


def found(reading: Reading) -> list[tuple[str, str]]:
    return [(problem.code, problem.field) for problem in reading.problems]


def only(document: object) -> Service:
    """The one Service of a document without problems."""
    reading = read(document)
    assert [str(problem) for problem in reading.problems] == []
    [made] = reading.services
    assert reading.service_places == ((),)
    assert reading.count == 1
    return made


def told(document: object) -> list[str]:
    """Its ports in short: name 5060-5064/tcp > 7060-7064, node ports behind an @."""
    return [
        f"{port.name} {port.ports}/{port.protocol.value} > {port.target}"
        + (f" @{port.node_ports}" if port.node_ports else "")
        + (" +" if port.ranged else "")
        for port in only(document).ports
    ]


# -------------------------------------------------------------------------- what is accepted

ACCEPTED = {
    "a port": ("{port: 80}", {}, [" 80/tcp > 80"]),
    "a port that leads elsewhere": (
        "{port: 80, targetPort: 8080}",
        {},
        [" 80/tcp > 8080"],
    ),
    "a target of nought is none": ("{port: 80, targetPort: 0}", {}, [" 80/tcp > 80"]),
    "a name for a target": ("{port: 80, targetPort: web}", {}, [" 80/tcp > web"]),
    "a name on a range of one port": (
        "{name: a, port: 80, targetPort: web}",
        {"a": "80"},
        ["a 80/tcp > web +"],
    ),
    "a range": ("{name: sip, port: 5060}", {"sip": "5064"}, ["sip 5060-5064/tcp > 5060-5064 +"]),
    "a range that leads elsewhere": (
        "{name: sip, port: 5060, targetPort: 7060, protocol: UDP}",
        {"sip": "5064"},
        ["sip 5060-5064/udp > 7060-7064 +"],
    ),
    "a range up to the last port": (
        "{name: a, port: 1, targetPort: 65531}",
        {"a": "5"},
        ["a 1-5/tcp > 65531-65535 +"],
    ),
    "every port": ("{name: a, port: 1}", {"a": "65535"}, ["a 1-65535/tcp > 1-65535 +"]),
    "ranges that touch": (
        "{name: a, port: 1}, {name: b, port: 6}",
        {"a": "5", "b": "9"},
        ["a 1-5/tcp > 1-5 +", "b 6-9/tcp > 6-9 +"],
    ),
    "one range of three protocols": (
        "{name: a, port: 1}, {name: b, port: 1, protocol: UDP}, {name: c, port: 1, protocol: SCTP}",
        {"a": "2", "b": "2", "c": "2"},
        ["a 1-2/tcp > 1-2 +", "b 1-2/udp > 1-2 +", "c 1-2/sctp > 1-2 +"],
    ),
    "two ways to one target": (
        "{name: a, port: 1, targetPort: 50}, {name: b, port: 11, targetPort: 50}",
        {"a": "5", "b": "15"},
        ["a 1-5/tcp > 50-54 +", "b 11-15/tcp > 50-54 +"],
    ),
    "a long name, as Kubernetes takes it": (
        "{name: signalling-of-telephones, port: 5060}",
        {"signalling_of_telephones": "5061"},
        ["signalling-of-telephones 5060-5061/tcp > 5060-5061 +"],
    ),
    "null and empty fields": (
        "{name: '', port: 80, protocol: null, targetPort: '', nodePort: null, appProtocol: http}",
        {},
        [" 80/tcp > 80"],
    ),
}


@pytest.mark.parametrize(("written", "annotated", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_ports_of_services_are_read(
    written: str, annotated: dict[str, str], expected: list[str]
) -> None:
    assert told(service(written, metadata=ends(**annotated))) == expected


def test_node_ports_move_with_their_range() -> None:
    written = "{name: rtp, port: 10000, targetPort: 20000, nodePort: 30000, protocol: UDP}"
    document = service(written, metadata=ends(rtp="10999"), spec="type: NodePort")
    assert told(document) == ["rtp 10000-10999/udp > 20000-20999 @30000-30999 +"]


def test_everything_a_service_says_of_itself_is_read() -> None:
    document = service(
        "{port: 80}",
        spec="type: LoadBalancer, selector: {b: x, a: 'yes'},"
        " externalIPs: [192.0.2.7, '2001:db8::7'],"
        " sessionAffinity: ClientIP, externalTrafficPolicy: Local",
    )
    document["status"] = {
        "loadBalancer": {
            "ingress": [{"ip": "192.0.2.9"}, {"hostname": "x"}, {"ip": "nowhere"}, {"ip": "::1"}, 5]
        }
    }
    assert only(document) == Service(
        namespace="shop",
        name="phone",
        type=ServiceType.LOAD_BALANCER,
        ports=(
            ServicePort(
                name="", protocol=Protocol.TCP, ports=PortRange(80, 80), target=PortRange(80, 80)
            ),
        ),
        selector=(("a", "yes"), ("b", "x")),
        external=(ip_address("192.0.2.7"), ip_address("2001:db8::7")),
        ingress=(ip_address("192.0.2.9"),),
        affinity=10800,
        local=True,
    )
    assert str(only(document)) == "Service/shop/phone"


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ("sessionAffinity: None", None),
        ("sessionAffinity: ClientIP", 10800),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}", 60),
        ("sessionAffinity: null, sessionAffinityConfig: null", None),
    ],
)
def test_how_long_a_client_keeps_its_endpoint(spec: str, seconds: int | None) -> None:
    assert only(service(spec=spec)).affinity == seconds


@pytest.mark.parametrize(
    ("spec", "allocates"),
    [
        ("type: LoadBalancer", True),
        ("type: LoadBalancer, allocateLoadBalancerNodePorts: null", True),
        ("type: LoadBalancer, allocateLoadBalancerNodePorts: true", True),
        ("type: LoadBalancer, allocateLoadBalancerNodePorts: false", False),
        ("type: NodePort", True),
    ],
)
def test_whether_node_ports_are_to_be_found(spec: str, allocates: bool) -> None:
    assert only(service(spec=spec)).allocates is allocates


@pytest.mark.parametrize(
    "spec",
    [
        "clusterIP: None",
        "type: ExternalName, externalName: example.org",
        "type: ExternalName, externalName: example.org.",
    ],
)
def test_some_services_need_no_ports(spec: str) -> None:
    made = only(parse(SERVICE % {"metadata": "", "spec": spec}))
    assert made.ports == ()
    assert made.headless == (spec == "clusterIP: None")


def test_ranges_of_one_port_of_a_service_have_one_length() -> None:
    with pytest.raises(ValueError, match="not of one length"):
        ServicePort(name="a", protocol=Protocol.TCP, ports=ports("1-2"), target=ports("1-3"))


# -------------------------------------------------------------------------- what is a problem

P = "spec.ports"
A = f"metadata.annotations['{END}"

REFUSED = {
    "an end without a port": (
        "{name: a, port: 80}",
        {"b": "90"},
        [("no-such-port", A + "b']")],
    ),
    "an end for a port without a name": ("{port: 80}", {"a": "90"}, [("no-such-port", A + "a']")]),
    "an end that is no number": (
        "{name: a, port: 80}",
        {"a": "x"},
        [("not-an-integer", A + "a']")],
    ),
    "an end that is hardly a number": (
        "{name: a, port: 80}",
        {"a": "0x60"},
        [("not-an-integer", A + "a']")],
    ),
    "an end that is empty": ("{name: a, port: 80}", {"a": ""}, [("not-an-integer", A + "a']")]),
    "an end of nought": ("{name: a, port: 80}", {"a": "0"}, [("port-out-of-range", A + "a']")]),
    "an end beyond all ports": (
        "{name: a, port: 80}",
        {"a": "65536"},
        [("port-out-of-range", A + "a']")],
    ),
    "an end before the port": (
        "{name: a, port: 80}",
        {"a": "79"},
        [("end-before-start", A + "a']")],
    ),
    "a target beyond all ports": (
        "{name: a, port: 1, targetPort: 65532}",
        {"a": "5"},
        [("range-too-high", P + "[0].targetPort")],
    ),
    "a target that is a name": (
        "{name: a, port: 1, targetPort: web}",
        {"a": "5"},
        [("named-target", P + "[0].targetPort")],
    ),
    "ranges that overlap": (
        "{name: a, port: 1}, {name: b, port: 5}",
        {"a": "5"},
        [("overlap", P + "[1].port")],
    ),
    "a range inside another": (
        "{name: a, port: 3}, {name: c, port: 9}, {name: b, port: 1}",
        {"a": "4", "b": "9"},
        [("overlap", P + "[2].port"), ("overlap", P + "[2].port")],
    ),
    "a port twice": (
        "{name: a, port: 80}, {name: b, port: 80}",
        {},
        [("overlap", P + "[1].port")],
    ),
    "a name twice": (
        "{name: a, port: 80}, {name: a, port: 81}",
        {},
        [("duplicate-port-name", P + "[1].name")],
    ),
    "an end for a name that is there twice": (
        "{name: a, port: 80}, {name: a, port: 90}",
        {"a": "95"},
        [("duplicate-port-name", P + "[1].name"), ("duplicate-port-name", A + "a']")],
    ),
    "several ports without names": (
        "{port: 80}, {name: '', port: 81}",
        {},
        [("missing", P + "[0].name"), ("missing", P + "[1].name")],
    ),
    "a name that is none": ("{name: A_b, port: 80}", {}, [("bad-port-name", P + "[0].name")]),
    "a name that is no text": ("{name: [], port: 80}", {}, [("not-a-string", P + "[0].name")]),
    "a name too long for a key": (
        f"{{name: {'a' * 55}, port: 80}}",
        {"a" * 55: "81"},
        [("bad-annotation", A + "a" * 55 + "']")],
    ),
    "a protocol in small letters": (
        "{port: 80, protocol: udp}",
        {},
        [("bad-protocol", P + "[0].protocol")],
    ),
    "a protocol that is none": (
        "{port: 80, protocol: [ICMP]}",
        {},
        [("bad-protocol", P + "[0].protocol")],
    ),
    "a port that is none": ("{port: 0}", {}, [("port-out-of-range", P + "[0].port")]),
    "a port that is not there": ("{name: a}", {"a": "5"}, [("missing", P + "[0].port")]),
    "a port in quotes": ("{port: '80'}", {}, [("not-an-integer", P + "[0].port")]),
    "a port in octal": ("{port: 080}", {}, [("ambiguous-number", P + "[0].port")]),
    "a target in quotes": (
        "{port: 80, targetPort: '8080'}",
        {},
        [("bad-port-name", P + "[0].targetPort")],
    ),
    "a target that cannot be a name": (
        "{port: 80, targetPort: -web-}",
        {},
        [("bad-port-name", P + "[0].targetPort")],
    ),
    "a target that is false": (
        "{port: 80, targetPort: false}",
        {},
        [("not-an-integer", P + "[0].targetPort")],
    ),
    "a target in base sixteen": (
        "{port: 80, targetPort: 0x50}",
        {},
        [("ambiguous-number", P + "[0].targetPort")],
    ),
    "a node port of a Service that has none": (
        "{port: 80, nodePort: 30080}",
        {},
        [("node-port-type", P + "[0].nodePort")],
    ),
    "an end beside the port": ("{port: 80, endPort: 90}", {}, [("unknown-key", P + "[0].endPort")]),
    "a key that is none": ("{port: 80, target: 90}", {}, [("unknown-key", P + "[0].target")]),
    "everything at once": (
        "{name: a, port: 70000}, {name: b, port: 5, protocol: tcp}, 7",
        {"a": "x", "b": "4"},
        [
            ("not-a-mapping", P + "[2]"),
            ("port-out-of-range", P + "[0].port"),
            ("bad-protocol", P + "[1].protocol"),
            ("not-an-integer", A + "a']"),
            ("end-before-start", A + "b']"),
        ],
    ),
}


@pytest.mark.parametrize(("written", "annotated", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_with_ports_of_services(
    written: str, annotated: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    reading = read(service(written, metadata=ends(**annotated)))
    assert found(reading) == expected
    assert (reading.services, reading.count) == ((), 1)


def test_a_range_of_node_ports_must_end_below_65536_and_overlap_no_other() -> None:
    written = "{name: a, port: 1, nodePort: 65534}, {name: b, port: 11, nodePort: 65530},"
    written += (
        "{name: c, port: 21, nodePort: 65534}, {name: d, port: 31, nodePort: 65534, protocol: UDP}"
    )
    document = service(written, metadata=ends(a="3", b="15"), spec="type: NodePort")
    assert found(read(document)) == [
        ("range-too-high", P + "[0].nodePort"),
        ("overlap", P + "[2].nodePort"),
    ]


SPECS = {
    "a node port of what has no address": (
        "type: NodePort, clusterIP: None",
        [("headless-type", "spec.clusterIP")],
    ),
    "a load balancer for what has no address": (
        "type: LoadBalancer, clusterIP: None",
        [("headless-type", "spec.clusterIP")],
    ),
    "a name that is not there": ("type: ExternalName", [("missing", "spec.externalName")]),
    "a name that is empty": (
        "type: ExternalName, externalName: ''",
        [("missing", "spec.externalName")],
    ),
    "a name that is none": (
        "type: ExternalName, externalName: a_b.example.org",
        [("bad-name", "spec.externalName")],
    ),
    "a name that is no text": (
        "type: ExternalName, externalName: [a]",
        [("not-a-string", "spec.externalName")],
    ),
    "node ports that are neither found nor not": (
        "type: LoadBalancer, allocateLoadBalancerNodePorts: 'no'",
        [("not-a-boolean", "spec.allocateLoadBalancerNodePorts")],
    ),
    "node ports that no load balancer asks for": (
        "type: NodePort, allocateLoadBalancerNodePorts: false",
        [("node-port-type", "spec.allocateLoadBalancerNodePorts")],
    ),
    "a type that is none": ("type: nodeport", [("bad-choice", "spec.type")]),
    "a type that is nothing like one": ("type: 5", [("not-a-string", "spec.type")]),
    "an affinity that is none": (
        "sessionAffinity: Cookie",
        [("bad-choice", "spec.sessionAffinity")],
    ),
    "an affinity that is too long": (
        "sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}",
        [("bad-choice", "spec.sessionAffinityConfig.clientIP.timeoutSeconds")],
    ),
    "an affinity that is no number": (
        "sessionAffinityConfig: {clientIP: {timeoutSeconds: long}}",
        [("not-an-integer", "spec.sessionAffinityConfig.clientIP.timeoutSeconds")],
    ),
    "an address that is none": (
        "externalIPs: [192.0.2.300, 7, 127.0.0.1, 192.0.2.3]",
        [("bad-address", f"spec.externalIPs[{at}]") for at in range(3)],
    ),
    "a label that is no text": ("selector: {app: 5}", [("not-a-string", "spec.selector.app")]),
    "a policy that is none": (
        "externalTrafficPolicy: Node",
        [("bad-choice", "spec.externalTrafficPolicy")],
    ),
}


@pytest.mark.parametrize(("spec", "expected"), SPECS.values(), ids=SPECS)
def test_what_is_wrong_with_the_rest_of_a_service(
    spec: str, expected: list[tuple[str, str]]
) -> None:
    assert found(read(service(spec=spec))) == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, [("missing", "spec")]),
        ({"spec": {}}, [("missing", "spec.ports")]),
        ({"spec": {"ports": 5}}, [("not-a-list", "spec.ports")]),
        ({"spec": []}, [("not-a-mapping", "spec")]),
        (
            {"metadata": {"name": "-"}, "spec": {"ports": [{"port": 1}]}},
            [("bad-name", "metadata.name")],
        ),
    ],
)
def test_what_is_hardly_a_service(document: Any, expected: list[tuple[str, str]]) -> None:
    assert found(read({"apiVersion": "v1", "kind": "Service", **document})) == expected


@pytest.mark.parametrize("kind", ["Service", "Pod"])
def test_a_name_that_is_to_be_generated_is_asked_for_in_words_that_fit(kind: str) -> None:
    spec = {"ports": [{"port": 1}]}
    document = {"apiVersion": "v1", "kind": kind, "metadata": {"generateName": "a"}, "spec": spec}
    [problem] = read(document).problems
    assert str(problem) == (
        "metadata.name: is missing; generateName is for an API server to fill in. "
        "Add name: with a name of its own. [missing]"
    )


def test_annotations_for_machines_are_refused_on_a_service() -> None:
    document = service(metadata="annotations: {portranger.io/port-ranges: 1-5}")
    [problem] = read(document).problems
    assert str(problem) == (
        "metadata.annotations['portranger.io/port-ranges']: is for virtual machines, and means "
        "nothing on a Service (it is '1-5'). Remove it; a range of a Service is a named port with "
        "portrange.alpha.kubernetes.io/port-end-<port name>. [bad-annotation]"
    )


def test_a_problem_tells_the_value_and_what_to_write_instead() -> None:
    written = "{name: rtp, port: 10000, targetPort: 65000, end: 5}"
    problems = read(service(written, metadata=ends(rtp="10999"))).problems
    unknown, too_high = map(str, problems)
    assert unknown == (
        "spec.ports[0].end: is not a known key here: the API has no ranges. Write the annotation "
        "portrange.alpha.kubernetes.io/port-end-rtp instead. [unknown-key]"
    )
    assert too_high == (
        "spec.ports[0].targetPort: is the first of 1000 ports, and the last would be 65999 "
        "(it is 65000). Write a number up to 64536, or let the range end earlier. [range-too-high]"
    )


def test_an_overlap_names_both_ranges_and_the_place_of_the_other() -> None:
    written = "{name: a, port: 10}, {name: b, port: 14, protocol: TCP}"
    [problem] = read(service(written, metadata=ends(a="14"))).problems
    assert problem.what == "14/tcp overlaps 10-14/tcp of spec.ports[0]"


def test_too_many_ports_are_refused() -> None:
    document = service("{name: a, port: 1}, {name: b, port: 2}")
    assert found(read(document, limit=1)) == [("too-many-ranges", "spec.ports")]
    many = pod("{containerPort: 1}, {containerPort: 2}")
    assert found(read(many, limit=1)) == [("too-many-ranges", "spec.containers[0].ports")]


@pytest.mark.parametrize("api", ["serving.knative.dev/v1", "v2", ""])
@pytest.mark.parametrize("kind", ["Service", "Pod"])
def test_what_only_has_the_name_of_a_service_or_a_pod_is_skipped(api: str, kind: str) -> None:
    reading = read({"apiVersion": api, "kind": kind, "metadata": {"name": "a"}})
    of = f" of apiVersion {api}" if api else ""
    assert [str(skipped) for skipped in reading.skipped] == [
        f"{kind}/a{of} is not read by this version"
    ]
    assert (reading.count, reading.problems) == (0, ())


def test_a_list_of_several_kinds_is_read_one_by_one() -> None:
    home = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
    items = [service(), home, pod(""), service("{port: 0}")]
    reading = read({"kind": "List", "items": items})
    assert reading.service_places == (("items", 0),)
    assert reading.namespace_places == (("items", 1),)
    assert reading.pod_places == (("items", 2),)
    assert reading.count == 4
    assert found(reading) == [("port-out-of-range", "items[3].spec.ports[0].port")]


# -------------------------------------------------------------------------------------- pods


def told_of_pod(document: object) -> list[str]:
    """Its ports in short: container/name 5060-5064/tcp, ports of the host behind an @."""
    reading = read(document)
    assert [str(problem) for problem in reading.problems] == []
    [made] = reading.pods
    assert str(made) == "Pod/default/phone"
    return [
        f"{port.container}/{port.name} {port.ports}/{port.protocol.value}"
        + (f" @{port.host_ports}" if port.host_ports else "")
        + (" +" if port.ranged else "")
        for port in made.ports
    ]


BESIDE = "- {name: b, ports: [{name: b, containerPort: 80}]}"
BEFORE = "initContainers: [{name: i, ports: [{name: i, containerPort: 3, hostPort: 3}]}]"

PODS = {
    "a port": ("{containerPort: 80}", {}, "", ["a/ 80/tcp"]),
    "a range": (
        "{name: rtp, containerPort: 65000, protocol: UDP}",
        {"rtp": "65050"},
        "",
        ["a/rtp 65000-65050/udp +"],
    ),
    "a range that is the host's, too": (
        "{name: a, containerPort: 1, hostPort: 65531, hostIP: 192.0.2.1}",
        {"a": "5"},
        "",
        ["a/a 1-5/tcp @65531-65535 +"],
    ),
    "the same port in two containers": (
        "{name: b, containerPort: 80}",
        {},
        BESIDE,
        ["a/b 80/tcp", "b/b 80/tcp"],
    ),
    "a range over a port of a container that runs before": (
        "{name: a, containerPort: 1, hostPort: 1}",
        {"a": "5"},
        BEFORE,
        ["a/a 1-5/tcp @1-5 +", "i/i 3/tcp @3"],
    ),
    "one port of the host at two addresses": (
        "{containerPort: 1, hostPort: 9, hostIP: 192.0.2.1}, {containerPort: 2, hostPort: 9}",
        {},
        "",
        ["a/ 1/tcp @9", "a/ 2/tcp @9"],
    ),
}


@pytest.mark.parametrize(("written", "annotated", "more", "expected"), PODS.values(), ids=PODS)
def test_ports_of_pods_are_read(
    written: str, annotated: dict[str, str], more: str, expected: list[str]
) -> None:
    assert told_of_pod(pod(written, metadata=ends(**annotated), more=more)) == expected


C = "spec.containers[0].ports"
BAD_PODS = {
    "a long name": (
        "{name: signalling-of-telephones, containerPort: 80}",
        {},
        "",
        [("bad-port-name", C + "[0].name")],
    ),
    "a name twice in a container": (
        "{name: a, containerPort: 80}, {name: a, containerPort: 81}",
        {},
        "",
        [("duplicate-port-name", C + "[1].name")],
    ),
    "an end for a name in two containers": (
        "{name: b, containerPort: 90}",
        {"b": "95"},
        BESIDE,
        [("duplicate-port-name", A + "b']")],
    ),
    "a range over a port of another container": (
        "{name: a, containerPort: 70}",
        {"a": "80"},
        BESIDE,
        [("overlap", "spec.containers[1].ports[0].containerPort")],
    ),
    "a port of the host twice": (
        "{containerPort: 1, hostPort: 9}, {containerPort: 2, hostPort: 9}",
        {},
        "",
        [("overlap", C + "[1].hostPort")],
    ),
    "ports of the host beyond all": (
        "{name: a, containerPort: 1, hostPort: 65535}",
        {"a": "2"},
        "",
        [("range-too-high", C + "[0].hostPort")],
    ),
    "a range that overlaps another before": (
        "",
        {"i": "4"},
        BEFORE.replace("hostPort: 3}", "hostPort: 3}, {containerPort: 4}"),
        [("overlap", "spec.initContainers[0].ports[1].containerPort")],
    ),
    "a port of a Service": (
        "{port: 80}",
        {},
        "",
        [("unknown-key", C + "[0].port"), ("missing", C + "[0].containerPort")],
    ),
}


@pytest.mark.parametrize(
    ("written", "annotated", "more", "expected"), BAD_PODS.values(), ids=BAD_PODS
)
def test_what_is_wrong_with_ports_of_pods(
    written: str, annotated: dict[str, str], more: str, expected: list[tuple[str, str]]
) -> None:
    reading = read(pod(written, metadata=ends(**annotated), more=more))
    assert found(reading) == expected
    assert (reading.pods, reading.count) == ((), 1)


def test_a_pod_without_a_specification_is_none() -> None:
    assert found(read({"apiVersion": "v1", "kind": "Pod"})) == [("missing", "spec")]


def test_annotations_for_machines_may_be_on_their_pods() -> None:
    document = pod("{containerPort: 1}", metadata="annotations: {portranger.io/port-ranges: 1-5}")
    assert told_of_pod(document) == ["a/ 1/tcp"]


def test_a_container_needs_no_name_to_be_read() -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"ports": [{"containerPort": 1}]}]},
    }
    [made] = read(document).pods
    assert made == Pod(
        namespace="default",
        name="unnamed",
        ports=(PodPort(container="", name="", protocol=Protocol.TCP, ports=ports("1")),),
    )


@pytest.mark.parametrize(
    ("spec", "families", "restricted"),
    [
        ("", (), False),
        ("ipFamilies: [IPv6]", (Family.IP6,), False),
        ("ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack", tuple(Family), False),
        ("loadBalancerSourceRanges: [10.0.0.0/8]", (), True),
    ],
)
def test_whom_it_is_for(spec: str, families: tuple[Family, ...], restricted: bool) -> None:
    text = SERVICE % {"metadata": "", "spec": f"ports: [{{port: 80}}], {spec}"}
    (found,) = read(yaml_text.parse(text)[0][0][0]).services
    assert (found.families, found.restricted) == (families, restricted)


def test_a_family_that_is_none_is_a_problem() -> None:
    text = SERVICE % {"metadata": "", "spec": "ports: [{port: 80}], ipFamilies: [IPv5, 4]"}
    found = read(yaml_text.parse(text)[0][0][0])
    assert [one.field for one in found.problems] == ["spec.ipFamilies[0]", "spec.ipFamilies[1]"]
