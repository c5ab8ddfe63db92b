"""What manifests are answered with: tables of YAML, codes, and the fields they are found at."""

from __future__ import annotations

import ast
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.sources import yaml_text
from rules.manifests import CODES, Reading, read
from rules.model import Claim, Guest, Machine, NotOurs, Protocol
from rules.ports import PortRange
from rules.problems import (
    ABSENT,
    OddNumeral,
    Problem,
    dotted,
    shown,
)

INTERFACE = "spec.domain.devices.interfaces[0]"
NETWORK = "spec.networks[0]"

VMI = """
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: web, %(metadata)s}
spec:
  domain:
    devices:
      interfaces:
      - {name: red, %(binding)s, %(interface)s}
  networks:
  - {name: red, %(network)s}
"""


def parse(text: str) -> object:
    documents, problems = yaml_text.parse(text)
    assert not problems, [str(problem) for problem in problems]
    assert len(documents) == 1
    return documents[0][0]


def vmi(
    interface: str = "",
    *,
    binding: str = "masquerade: {}",
    network: str = "pod: {}",
    metadata: str = "",
) -> Any:
    """A VirtualMachineInstance with one interface and one network."""
    parts = {"interface": interface, "binding": binding, "network": network, "metadata": metadata}
    return parse(VMI % parts)


def annotated(**annotations: str) -> str:
    """Metadata with annotations of ours."""
    pairs = (
        f"portranger.io/{key.replace('_', '-')}: '{text}'" for key, text in annotations.items()
    )
    return f"annotations: {{{', '.join(pairs)}}}"


def found(reading: Reading) -> list[tuple[str, str]]:
    return [(problem.code, problem.field) for problem in reading.problems]


def only(reading: Reading) -> Machine:
    """The one machine of a reading without problems."""
    assert [str(problem) for problem in reading.problems] == []
    [machine] = reading.machines
    return machine


def claims(document: object) -> list[str]:
    """What the machine of a document forwards, such as 22/tcp."""
    masquerade = only(read(document)).masquerade
    assert masquerade
    assert masquerade.claims is not None
    return [f"{claim.ports}/{claim.protocol.value}" for claim in masquerade.claims]


# -------------------------------------------------------------------------- what is accepted

ACCEPTED = {
    "a range": ("portRanges: [{start: 1000, end: 8000}]", ["1000-8000/tcp"]),
    "a range of one port": ("portRanges: [{start: 22, end: 22, protocol: UDP}]", ["22/udp"]),
    "every port": ("portRanges: [{start: 1, end: 65535}]", ["1-65535/tcp"]),
    "ranges that touch": (
        "portRanges: [{start: 1, end: 5}, {start: 6, end: 9}]",
        ["1-5/tcp", "6-9/tcp"],
    ),
    "ranges of two protocols": (
        "portRanges: [{start: 1, end: 5}, {start: 1, end: 5, protocol: UDP}]",
        ["1-5/tcp", "1-5/udp"],
    ),
    "ranges out of order": (
        "portRanges: [{start: 6, end: 9}, {start: 1, end: 5}]",
        ["6-9/tcp", "1-5/tcp"],
    ),
    "a port": ("ports: [{port: 22}]", ["22/tcp"]),
    "a port with everything": ("ports: [{name: dns, protocol: UDP, port: 53}]", ["53/udp"]),
    "a port twice": ("ports: [{port: 22}, {port: 22, name: ssh}]", ["22/tcp", "22/tcp"]),
    "a port with an end": ("ports: [{port: 22, end: 30}]", ["22-30/tcp"]),
    "a named port that ends where it starts": ("ports: [{port: 22, end: 22, name: a}]", ["22/tcp"]),
    "ports beside empty ranges": ("ports: [{port: 22}], portRanges: []", ["22/tcp"]),
    "ranges beside ports that are null": (
        "ports: null, portRanges: [{start: 1, end: 2}]",
        ["1-2/tcp"],
    ),
}


@pytest.mark.parametrize(("interface", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_declared_is_claimed(interface: str, expected: list[str]) -> None:
    assert claims(vmi(interface)) == expected


@pytest.mark.parametrize("interface", ["", "ports: []", "portRanges: null", "ports: [], tag: x"])
def test_nothing_declared_means_no_claims_at_all(interface: str) -> None:
    masquerade = only(read(vmi(interface))).masquerade
    assert masquerade
    assert masquerade.claims is None


@pytest.mark.parametrize(
    "interface",
    [
        "macAddress: 'de:ad:00:00:be:af'",
        "macAddress: DE-AD-00-00-BE-AF",
        "macAddress: 10:20:30:40:50:59",  # in YAML 1.1, a number in base sixty
        "model: virtio",
        "model: e1000",
        "model: igb",
        "acpiIndex: 1, bootOrder: 1, dhcpOptions: {}, tag: t, later: x",
        "pciAddress: '0000:81:01.7', state: up",
        "pciAddress: '', state: '', macAddress: '', model: ''",
        "pciAddress: null, state: null, macAddress: null, model: null",
    ],
)
def test_other_fields_of_an_interface_are_left_alone(interface: str) -> None:
    assert only(read(vmi(interface))).masquerade


# --------------------------------------------------------------------- what is wrong with ports

R = INTERFACE + ".portRanges"
P = INTERFACE + ".ports"

BAD_INTERFACES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "ports is a mapping": ("ports: {port: 22}", [("not-a-list", P)]),
    "portRanges is text": ("portRanges: 1-5", [("not-a-list", R)]),
    "a port is a number": ("ports: [22]", [("not-a-mapping", P + "[0]")]),
    "a range is null": ("portRanges: [null]", [("not-a-mapping", R + "[0]")]),
    "an empty port": ("ports: [{}]", [("missing", P + "[0].port")]),
    "an empty range": (
        "portRanges: [{}]",
        [("missing", R + "[0].start"), ("missing", R + "[0].end")],
    ),
    "start is text": (
        "portRanges: [{start: '1', end: 2}]",
        [("not-an-integer", R + "[0].start")],
    ),
    "start is true": (
        "portRanges: [{start: true, end: 2}]",
        [("not-an-integer", R + "[0].start")],
    ),
    "start is a float": (
        "portRanges: [{start: 1.0, end: 2}]",
        [("not-an-integer", R + "[0].start")],
    ),
    "end is null": ("portRanges: [{start: 1, end: }]", [("not-an-integer", R + "[0].end")]),
    "port is a list": ("ports: [{port: [22]}]", [("not-an-integer", P + "[0].port")]),
    "the end of a port is null": (
        "ports: [{port: 22, end: null}]",
        [("not-an-integer", P + "[0].end")],
    ),
    "zero": ("ports: [{port: 0}]", [("port-out-of-range", P + "[0].port")]),
    "65536": (
        "portRanges: [{start: 1, end: 65536}]",
        [("port-out-of-range", R + "[0].end")],
    ),
    "a negative port": ("ports: [{port: -1}]", [("port-out-of-range", P + "[0].port")]),
    "both ends wrong": (
        "portRanges: [{start: 0, end: 70000}]",
        [("port-out-of-range", R + "[0].start"), ("port-out-of-range", R + "[0].end")],
    ),
    "end below start": (
        "portRanges: [{start: 9, end: 5}]",
        [("end-before-start", R + "[0].end")],
    ),
    "end below port": ("ports: [{port: 9, end: 5}]", [("end-before-start", P + "[0].end")]),
    "lower-case protocol": (
        "ports: [{port: 22, protocol: tcp}]",
        [("bad-protocol", P + "[0].protocol")],
    ),
    "SCTP": ("ports: [{port: 22, protocol: SCTP}]", [("bad-protocol", P + "[0].protocol")]),
    "protocol is zero": (
        "portRanges: [{start: 1, end: 2, protocol: 0}]",
        [("bad-protocol", R + "[0].protocol")],
    ),
    "a port with a fraction": (
        "portRanges: [{start: 80.0, end: 90}]",
        [("not-an-integer", R + "[0].start")],
    ),
    "ranges overlap by one": (
        "portRanges: [{start: 1, end: 5}, {start: 5, end: 9}]",
        [("overlap", R + "[1]")],
    ),
    "a range within another, written first": (
        "portRanges: [{start: 3, end: 4}, {start: 1, end: 9}]",
        [("overlap", R + "[1]")],
    ),
    "a range twice": (
        "portRanges: [{start: 7, end: 7}, {start: 7, end: 7}]",
        [("overlap", R + "[1]")],
    ),
    "two ranges within one": (
        "portRanges: [{start: 1, end: 9}, {start: 2, end: 3}, {start: 5, end: 6}]",
        [("overlap", R + "[1]"), ("overlap", R + "[2]")],
    ),
    "a port within a range": (
        "ports: [{port: 1, end: 9}, {port: 5}]",
        [("overlap", P + "[1]")],
    ),
    "both spellings": (
        "ports: [{port: 1}], portRanges: [{start: 1, end: 2}]",
        [("ports-and-ranges", R), ("overlap", R + "[0]")],
    ),
    "a name that is too long": (
        "ports: [{port: 1, name: abcdefghijklmnop}]",
        [("bad-port-name", P + "[0].name")],
    ),
    "a name without a letter": (
        "ports: [{port: 1, name: '80'}]",
        [("bad-port-name", P + "[0].name")],
    ),
    "a name that is a number": ("ports: [{port: 1, name: 80}]", [("not-a-string", P + "[0].name")]),
    "a name that is an odd number": (
        "ports: [{port: 1, name: 0x10}]",
        [("not-a-string", P + "[0].name")],
    ),
    "a name with two dashes": (
        "ports: [{port: 1, name: a--b}]",
        [("bad-port-name", P + "[0].name")],
    ),
    "a name with a dash in front": (
        "ports: [{port: 1, name: -a}]",
        [("bad-port-name", P + "[0].name")],
    ),
    "a name with a dash behind": (
        "ports: [{port: 1, name: a-}]",
        [("bad-port-name", P + "[0].name")],
    ),
    "an upper-case name": ("ports: [{port: 1, name: Http}]", [("bad-port-name", P + "[0].name")]),
    "a name twice": (
        "ports: [{port: 1, name: a}, {port: 2, name: a}]",
        [("duplicate-port-name", P + "[1].name")],
    ),
    "a name on a range": (
        "ports: [{port: 1, end: 2, name: a}]",
        [("name-on-range", P + "[0].name")],
    ),
    "an unknown key in a range": (
        "portRanges: [{start: 1, end: 2, protcol: UDP}]",
        [("unknown-key", R + "[0].protcol")],
    ),
    "a key of the other spelling": (
        "portRanges: [{port: 1, end: 2}]",
        [("unknown-key", R + "[0].port"), ("missing", R + "[0].start")],
    ),
    "many things at once": (
        "macAddress: x, model: y, ports: [{port: a}, {port: 0, end: 0, protocol: x}]",
        [
            ("bad-model", INTERFACE + ".model"),
            ("bad-mac", INTERFACE + ".macAddress"),
            ("not-an-integer", P + "[0].port"),
            ("bad-protocol", P + "[1].protocol"),
            ("port-out-of-range", P + "[1].port"),
            ("port-out-of-range", P + "[1].end"),
        ],
    ),
    "a model that is a number": ("model: 1000", [("not-a-string", INTERFACE + ".model")]),
    "a MAC that is too short": (
        "macAddress: 'de:ad:00:00:be'",
        [("bad-mac", INTERFACE + ".macAddress")],
    ),
    "a MAC in both notations": (
        "macAddress: 'de:ad:00-00-be-af'",
        [("bad-mac", INTERFACE + ".macAddress")],
    ),
    "the MAC of the bridge": (
        "macAddress: '02:00:00:00:00:00'",
        [("bad-mac", INTERFACE + ".macAddress")],
    ),
    "a PCI address that is short": (
        "pciAddress: '81:01.0'",
        [("bad-pci-address", INTERFACE + ".pciAddress")],
    ),
    "a PCI address with colons only": (
        "pciAddress: '0000:81:01:0'",
        [("bad-pci-address", INTERFACE + ".pciAddress")],
    ),
    "a PCI function beyond 7": (
        "pciAddress: '0000:81:01.8'",
        [("bad-pci-address", INTERFACE + ".pciAddress")],
    ),
    "a PCI address that is a number": (
        "pciAddress: 8101",
        [("not-a-string", INTERFACE + ".pciAddress")],
    ),
    "an unknown state": ("state: Up", [("bad-state", INTERFACE + ".state")]),
    "a masquerade that is unplugged": ("state: absent", [("bad-state", INTERFACE + ".state")]),
}


@pytest.mark.parametrize("protocol", ["''", "null"])
@pytest.mark.parametrize(
    "ports", ["ports: [{port: 5, end: 6, ", "portRanges: [{start: 5, end: 6, "]
)
def test_an_empty_protocol_is_tcp_as_in_the_api(ports: str, protocol: str) -> None:
    assert claims(vmi(f"{ports} protocol: {protocol}}}]")) == claims(vmi(f"{ports}}}]"))


@pytest.mark.parametrize("name", ["''", "null"])
def test_an_empty_name_of_a_port_is_none(name: str) -> None:
    machine = only(read(vmi(f"ports: [{{port: 5, name: {name}}}, {{port: 6, name: {name}}}]")))
    assert machine.names == ()


@pytest.mark.parametrize(("interface", "expected"), BAD_INTERFACES.values(), ids=BAD_INTERFACES)
def test_every_problem_of_an_interface_is_found(
    interface: str, expected: list[tuple[str, str]]
) -> None:
    reading = read(vmi(interface))
    assert found(reading) == expected
    assert reading.machines == ()
    assert reading.count == 1


@pytest.mark.parametrize(
    "numeral", ["0o17", "017", "1_000", "0x10", "0b1", "+80", "1:30", "08", "9" * 401]
)
def test_a_number_that_can_be_misread_is_never_taken(numeral: str) -> None:
    reading = read(vmi(f"ports: [{{port: {numeral}}}]"))
    assert found(reading) == [("ambiguous-number", P + "[0].port")]
    assert "decimal" in reading.problems[0].fix
    assert f"(it is {numeral[:40]}" in str(reading.problems[0])


def test_a_number_that_is_too_large_is_no_port() -> None:
    assert found(read(vmi(f"ports: [{{port: {'9' * 25}}}]"))) == [
        ("port-out-of-range", P + "[0].port")
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("portRange", "port_ranges", "portranges", "Ports", "port", "PortRanges", "port-ranges"),
        *("protRanges", "prots", "portsRange", "forwardPorts"),
    ],
)
def test_a_near_miss_of_ports_is_not_taken_for_no_ports_at_all(key: str) -> None:
    reading = read(vmi(f"{key}: [{{start: 1, end: 2}}]"))
    assert found(reading) == [("unknown-key", f"{INTERFACE}.{key}")]
    assert reading.problems[0].fix in ("Write ports instead.", "Write portRanges instead.")


@pytest.mark.parametrize(
    ("binding", "network", "path"),
    [
        ("masquerade: {portRanges: []}", "pod: {}", INTERFACE + ".masquerade.portRanges"),
        ("masquerade: {}", "pod: {}, ports: []", NETWORK + ".ports"),
        ("masquerade: {}", "pod: {portRange: []}", NETWORK + ".pod.portRange"),
    ],
)
def test_ports_in_the_wrong_place_are_a_problem(binding: str, network: str, path: str) -> None:
    assert found(read(vmi(binding=binding, network=network))) == [("unknown-key", path)]


def test_an_overlap_names_both_ranges_and_where_the_other_is() -> None:
    [problem] = read(vmi("portRanges: [{start: 1, end: 50}, {start: 9, end: 99}]")).problems
    assert problem.what == f"9-99/tcp overlaps 1-50/tcp of {R}[0]"
    assert problem.field == R + "[1]"


def test_the_nearest_known_key_is_suggested() -> None:
    fixes = [
        problem.fix
        for problem in read(
            vmi(
                "portRanges: [{start: 1, end: 2, Protocol: TCP, star: 1, qqqq: 1, 5: 6}]".replace(
                    "5: 6", f"{'x' * 99}: 6"
                )
            )
        ).problems
    ]
    assert fixes == [
        "Write protocol instead.",
        "Write start instead.",
        "The known ones are: protocol, start, end.",
        "The known ones are: protocol, start, end.",
    ]


def test_a_protocol_in_the_wrong_case_is_corrected() -> None:
    [problem] = read(vmi("ports: [{port: 22, protocol: ' udp'}]")).problems
    assert problem.fix == "Write UDP."


def test_port_names_are_unique_in_the_whole_machine() -> None:
    document = vmi("ports: [{port: 1, name: a}]")
    document["spec"]["domain"]["devices"]["interfaces"].append(
        {"name": "blue", "bridge": {}, "ports": [{"port": 2, "name": "a"}]}
    )
    document["spec"]["networks"].append({"name": "blue", "multus": {"networkName": "x"}})
    assert found(read(document)) == [
        ("duplicate-port-name", "spec.domain.devices.interfaces[1].ports[0].name")
    ]


@pytest.mark.parametrize("key", ["ports", "portRanges"])
def test_the_number_of_entries_has_a_limit_that_can_be_set(key: str) -> None:
    entry = "{port: %d}" if key == "ports" else "{start: %d, end: %d}"
    entries = ", ".join(entry.replace("%d", str(port)) for port in range(1, 4))
    document = vmi(f"{key}: [{entries}]")
    assert len(claims(document)) == 3
    assert found(read(document, limit=2)) == [("too-many-ranges", f"{INTERFACE}.{key}")]


def test_seven_thousand_single_ports_are_no_problem() -> None:
    document = vmi()
    ports = [{"port": port} for port in range(8000, 999, -1)]
    document["spec"]["domain"]["devices"]["interfaces"][0]["ports"] = ports
    assert len(claims(document)) == 7001


# ------------------------------------------------------------------- interfaces and networks

BINDINGS = {
    "bridge: {}": "bridge binding",
    "slirp: {}": "slirp binding",
    "sriov: {}": "sriov binding",
    "passtBinding: {}": "passt binding",
    "binding: {name: managedtap}": "plugin binding",
}


@pytest.mark.parametrize(("binding", "reason"), BINDINGS.items(), ids=BINDINGS)
def test_other_bindings_are_not_ours_for_a_reason(binding: str, reason: str) -> None:
    machine = only(read(vmi("ports: [{port: 80}]", binding=binding)))
    assert machine.masquerade is None
    [not_ours] = machine.not_ours
    assert not_ours.interface == "red"
    assert not_ours.reason.startswith(reason)


@pytest.mark.parametrize("binding", ["macvtap", "passt"])
def test_discontinued_bindings_are_refused_unless_the_cluster_has_them(binding: str) -> None:
    document = vmi(binding=f"{binding}: {{}}")
    assert found(read(document)) == [("discontinued-binding", f"{INTERFACE}.{binding}")]
    [not_ours] = only(read(document, tenant=True)).not_ours
    assert not_ours.reason.startswith(f"{binding} binding")


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("resource: {resourceName: bridge.network.kubevirt.io/red}", "resource network"),
        ("multus: {networkName: default/red}", "multus network"),
        ("multus: {networkName: red, default: true}", "multus network"),
        ("resourceClaim: {claimName: a, requestName: b}", "claimed network"),
    ],
)
def test_other_networks_are_not_ours_for_a_reason(network: str, reason: str) -> None:
    [not_ours] = only(read(vmi(binding="bridge: {}", network=network))).not_ours
    assert not_ours.reason.startswith(reason)


BAD_PARTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "no binding": ("tag: x", "pod: {}", [("binding", INTERFACE)]),
    "a binding that is null": ("masquerade: ", "pod: {}", [("binding", INTERFACE)]),
    "two bindings": ("masquerade: {}, bridge: {}", "pod: {}", [("binding", INTERFACE)]),
    "a binding that is true": (
        "masquerade: true",
        "pod: {}",
        [("not-a-mapping", INTERFACE + ".masquerade")],
    ),
    "no network type": ("bridge: {}", "x: 1", [("network-type", NETWORK)]),
    "a network type that is null": ("bridge: {}", "pod: ", [("network-type", NETWORK)]),
    "two network types": (
        "bridge: {}",
        "pod: {}, multus: {networkName: x}",
        [("network-type", NETWORK)],
    ),
    "a pod that is text": ("bridge: {}", "pod: yes!", [("not-a-mapping", NETWORK + ".pod")]),
    "masquerade on a resource": (
        "masquerade: {}",
        "resource: {resourceName: a/b}",
        [("resource-needs-bridge", INTERFACE)],
    ),
    "slirp on a resource": (
        "slirp: {}",
        "resource: {resourceName: a/b}",
        [("resource-needs-bridge", INTERFACE)],
    ),
    "masquerade on multus": (
        "masquerade: {}",
        "multus: {networkName: x}",
        [("masquerade-needs-pod", INTERFACE)],
    ),
    "passt on multus": (
        "passtBinding: {}",
        "multus: {networkName: x}",
        [("masquerade-needs-pod", INTERFACE)],
    ),
    "masquerade on a claim": (
        "masquerade: {}",
        "resourceClaim: {claimName: a, requestName: b}",
        [("masquerade-needs-pod", INTERFACE)],
    ),
    "multus with an empty name": (
        "bridge: {}",
        "multus: {networkName: ''}",
        [("missing", NETWORK + ".multus.networkName")],
    ),
    "the pod's own interface is unplugged": (
        "bridge: {}, state: absent",
        "pod: {}",
        [("bad-state", INTERFACE + ".state")],
    ),
    "the default interface is unplugged": (
        "bridge: {}, state: absent",
        "multus: {networkName: a, default: true}",
        [("bad-state", INTERFACE + ".state")],
    ),
    "the link of a device is down": (
        "sriov: {}, state: down",
        "multus: {networkName: a}",
        [("bad-state", INTERFACE + ".state")],
    ),
    "a resource without its name": (
        "bridge: {}",
        "resource: {}",
        [("missing", NETWORK + ".resource.resourceName")],
    ),
    "a resource of no plugin": (
        "bridge: {}",
        "resource: {resourceName: red}",
        [("bad-resource-name", NETWORK + ".resource.resourceName")],
    ),
    "multus without a name": (
        "bridge: {}",
        "multus: {default: 'yes'}",
        [
            ("missing", NETWORK + ".multus.networkName"),
            ("not-a-boolean", NETWORK + ".multus.default"),
        ],
    ),
}


@pytest.mark.parametrize(("binding", "network", "expected"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_every_problem_of_a_binding_or_network_is_found(
    binding: str, network: str, expected: list[tuple[str, str]]
) -> None:
    assert found(read(vmi(binding=binding, network=network))) == expected


@pytest.mark.parametrize("binding", ["bridge: {}", "slirp: {}"])
@pytest.mark.parametrize(
    ("interface", "path"),
    [("portRanges: [{start: 1, end: 2}]", R), ("ports: [{port: 1, end: 1}]", P)],
)
def test_ranges_are_for_masquerade_only(binding: str, interface: str, path: str) -> None:
    reading = read(vmi(interface, binding=binding))
    assert found(reading) == [("ranges-need-masquerade", path + "[0]")]


@pytest.mark.parametrize(
    "interface", ["portRanges: [{start: 1, end: 2}]", "ports: [{port: 1, end: 1}]"]
)
@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("multus: {networkName: x}", "multus network"),
        ("resource: {resourceName: a/b}", "resource network"),
    ],
)
def test_ranges_on_other_networks_are_not_ours(interface: str, network: str, reason: str) -> None:
    machine = only(read(vmi(interface, binding="bridge: {}", network=network)))
    assert machine.masquerade is None
    assert [other.reason.startswith(reason) for other in machine.not_ours] == [True]


SPECS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "an interface without a network": (
        "{domain: {devices: {interfaces: [{name: a, bridge: {}}]}}}",
        [("no-network", INTERFACE + ".name")],
    ),
    "a network without an interface": (
        "{networks: [{name: a, pod: {}}]}",
        [("no-interface", NETWORK + ".name")],
    ),
    "names that differ": (
        "{domain: {devices: {interfaces: [{name: a,bridge: {}}]}}, networks: [{name: b, pod: {}}]}",
        [("no-network", INTERFACE + ".name"), ("no-interface", NETWORK + ".name")],
    ),
    "no names": (
        "{domain: {devices: {interfaces: [{bridge: {}}]}}, networks: [{pod: {}}]}",
        [("missing", INTERFACE + ".name"), ("missing", NETWORK + ".name")],
    ),
    "names that are none": (
        (
            "{domain: {devices: {interfaces: [{name: a b, bridge: {}}]}},"
            " networks: [{name: a b, pod: {}}]}"
        ),
        [("bad-name", INTERFACE + ".name"), ("bad-name", NETWORK + ".name")],
    ),
    "names twice": (
        (
            "{domain: {devices: {interfaces: [{name: a, bridge: {}}, {name: a, bridge: {}}]}},"
            " networks: [{name: a, pod: {}}, {name: a, multus: {networkName: x}}]}"
        ),
        [
            ("duplicate-name", "spec.networks[1].name"),
            ("duplicate-name", "spec.domain.devices.interfaces[1].name"),
        ],
    ),
    "two pod networks": (
        (
            "{domain: {devices: {interfaces: [{name: a,masquerade: {}},{name: b,masquerade: {}}]}},"
            " networks: [{name: a, pod: {}}, {name: b, pod: {}}]}"
        ),
        [("second-pod-network", "spec.networks[1]")],
    ),
    "a pod network and a default multus": (
        (
            "{domain: {devices: {interfaces: [{name: a, masquerade: {}}, {name: b, bridge: {}}]}},"
            " networks: [{name: a, pod: {}}, {name: b, multus: {networkName: x, default: true}}]}"
        ),
        [("second-pod-network", "spec.networks[1]")],
    ),
    "ports among the devices": (
        "{domain: {devices: {portRanges: []}}}",
        [("unknown-key", "spec.domain.devices.portRanges")],
    ),
    "autoattachPodInterface is text": (
        "{domain: {devices: {autoattachPodInterface: 'false'}}}",
        [("not-a-boolean", "spec.domain.devices.autoattachPodInterface")],
    ),
    "domain is a list": ("{domain: []}", [("not-a-mapping", "spec.domain")]),
    "interfaces is a mapping": (
        "{domain: {devices: {interfaces: {}}}}",
        [("not-a-list", "spec.domain.devices.interfaces")],
    ),
    "spec is text": ("x", [("not-a-mapping", "spec")]),
    "spec is null": ("", [("missing", "spec")]),
}


@pytest.mark.parametrize(("spec", "expected"), SPECS.values(), ids=SPECS)
def test_every_problem_of_a_specification_is_found(
    spec: str, expected: list[tuple[str, str]]
) -> None:
    assert found(read(parse(f"kind: VirtualMachineInstance\nspec: {spec}"))) == expected


def test_no_interface_at_all_is_the_default_bridge() -> None:
    [not_ours] = only(read(parse("{kind: VirtualMachineInstance, spec: {}}"))).not_ours
    assert not_ours.interface == "default"
    assert "bridge" in not_ours.reason


def test_without_autoattach_there_is_no_interface() -> None:
    spec = "{domain: {devices: {autoattachPodInterface: false}}}"
    machine = only(read(parse(f"kind: VM\nspec: {spec}")))
    assert machine.masquerade is None
    assert machine.not_ours == (NotOurs("", "no network is attached"),)


def test_interfaces_of_several_kinds_live_side_by_side() -> None:
    machine = only(
        read(
            parse("""
kind: VirtualMachineInstance
spec:
  domain: {devices: {interfaces: [{name: b, bridge: {}}, {name: m, masquerade: {}}]}}
  networks: [{name: m, pod: {}}, {name: b, multus: {networkName: x}}]
""")
        )
    )
    assert machine.masquerade
    assert machine.masquerade.name == "m"
    assert [one.interface for one in machine.not_ours] == ["b"]


# ------------------------------------------------------------------------- the guest's addresses


def guests(**parts: str) -> tuple[Guest, ...]:
    masquerade = only(read(vmi(**parts))).masquerade
    assert masquerade
    return masquerade.guests


def guest(address: str, gateway: str | None) -> Guest:
    return Guest(ip_address(address), ip_address(gateway) if gateway else None)


DEFAULT_4 = guest("10.0.2.2", "10.0.2.1")
DEFAULT_6 = guest("fd10:0:2::2", "fd10:0:2::1")


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("pod: {}", (DEFAULT_4, DEFAULT_6)),
        ("pod: {vmNetworkCIDR: null}", (DEFAULT_4, DEFAULT_6)),
        ("pod: {vmNetworkCIDR: 10.9.0.0/16}", (guest("10.9.0.2", "10.9.0.1"), DEFAULT_6)),
        ("pod: {vmNetworkCIDR: 10.9.0.7/30}", (guest("10.9.0.6", "10.9.0.5"), DEFAULT_6)),
        ("pod: {vmIPv6NetworkCIDR: 'fd00::/64'}", (DEFAULT_4, guest("fd00::2", "fd00::1"))),
        ("pod: {vmIPv6NetworkCIDR: 'fd00::/126'}", (DEFAULT_4, guest("fd00::2", "fd00::1"))),
    ],
)
def test_the_guest_is_the_second_host(network: str, expected: tuple[Guest, ...]) -> None:
    assert guests(network=network) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.2.7", (guest("10.0.2.7", "10.0.2.1"), DEFAULT_6)),
        ("192.168.1.5", (guest("192.168.1.5", None), DEFAULT_6)),
        ("fd10:0:2::9", (DEFAULT_4, guest("fd10:0:2::9", "fd10:0:2::1"))),
        ("2001:4::5 , 10.0.2.9", (guest("10.0.2.9", "10.0.2.1"), guest("2001:4::5", None))),
    ],
)
def test_the_guest_can_be_placed(text: str, expected: tuple[Guest, ...]) -> None:
    assert guests(metadata=annotated(guest=text)) == expected


@pytest.mark.parametrize(
    "cidr",
    [
        *("10.0.2.0", "10.0.2.0/31", "10.0.2.1/32", "10.0.2.0/255.255.255.0", "10.0.2.0/33"),
        *("x", "", "'fd00::/64'", "0.0.0.0/0", "127.0.0.0/8", "224.0.0.0/8", "010.0.0.0/8"),
    ],
)
def test_a_network_without_room_for_a_guest_is_a_problem(cidr: str) -> None:
    cidr = cidr or "''"
    reading = read(vmi(network=f"pod: {{vmNetworkCIDR: {cidr}}}"))
    assert found(reading) == [("bad-cidr", NETWORK + ".pod.vmNetworkCIDR")]


@pytest.mark.parametrize(
    "cidr", ["fd00::/127", "fd00::/128", "10.0.2.0/24", "fe80::/64", "::/0", "fd00::%1/64"]
)
def test_an_ipv6_network_without_room_for_a_guest_is_a_problem(cidr: str) -> None:
    reading = read(vmi(network=f"pod: {{vmIPv6NetworkCIDR: '{cidr}'}}"))
    assert found(reading) == [("bad-cidr", NETWORK + ".pod.vmIPv6NetworkCIDR")]


def test_a_bad_network_is_found_whatever_the_binding() -> None:
    reading = read(vmi(binding="bridge: {}", network="pod: {vmNetworkCIDR: 10.0.0.0/32}"))
    assert found(reading) == [("bad-cidr", NETWORK + ".pod.vmNetworkCIDR")]


def test_a_network_that_is_a_number_is_a_problem() -> None:
    reading = read(vmi(network="pod: {vmNetworkCIDR: 10}"))
    assert found(reading) == [("not-a-string", NETWORK + ".pod.vmNetworkCIDR")]


# ------------------------------------------------------------------------------- annotations

A = "metadata.annotations['portranger.io/%s']"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("22", ["22/tcp"]),
        ("1000-8000/tcp,1000-8000/udp,22", ["1000-8000/tcp", "1000-8000/udp", "22/tcp"]),
        (" 1-2 , 3/UDP ", ["1-2/tcp", "3/udp"]),
        ("22,22", ["22/tcp", "22/tcp"]),
        ("5-5", ["5/tcp"]),
    ],
)
def test_the_port_ranges_annotation_is_claimed(text: str, expected: list[str]) -> None:
    assert claims(vmi(metadata=annotated(port_ranges=text))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("bad-annotation", "")]),
        ("22,", [("bad-annotation", "")]),
        ("a,b", [("bad-annotation", "a"), ("bad-annotation", "b")]),
        ("022", [("bad-annotation", "022")]),
        ("1 - 2", [("bad-annotation", "1 - 2")]),
        ("1-2-3", [("bad-annotation", "1-2-3")]),
        ("-5", [("bad-annotation", "-5")]),
        ("1-", [("bad-annotation", "1-")]),
        ("22/sctp", [("bad-protocol", "22/sctp")]),
        ("22/", [("bad-protocol", "22/")]),
        ("0", [("port-out-of-range", "0")]),
        ("1-65536", [("port-out-of-range", "1-65536")]),
        ("9" * 5000, [("port-out-of-range", "9" * 5000)]),
        ("9-5", [("end-before-start", "9-5")]),
        ("\N{FULLWIDTH DIGIT EIGHT}", [("bad-annotation", "\N{FULLWIDTH DIGIT EIGHT}")]),
    ],
)
def test_every_bad_item_of_the_annotation_is_a_problem(
    text: str, expected: list[tuple[str, str]]
) -> None:
    reading = read(vmi(metadata=annotated(port_ranges=text)))
    assert [(problem.code, problem.value) for problem in reading.problems] == expected
    assert {problem.field for problem in reading.problems} == {A % "port-ranges"}


BAD_ANNOTATIONS: dict[str, tuple[dict[str, str], list[tuple[str, str]]]] = {
    "ranges that overlap": ({"port_ranges": "1-5,5-9"}, [("overlap", A % "port-ranges")]),
    "an unknown one": ({"port_range": "1-5"}, [("unknown-key", A % "port-range")]),
    "a namespace that leads away": ({"netns": "../x"}, [("bad-annotation", A % "netns")]),
    "a path that leads away": ({"netns": "/run/../x"}, [("bad-annotation", A % "netns")]),
    "a namespace with a blank": ({"netns": "a b"}, [("bad-annotation", A % "netns")]),
    "a namespace without a name": ({"netns": ""}, [("bad-annotation", A % "netns")]),
    "a namespace that is a dot": ({"netns": "."}, [("bad-annotation", A % "netns")]),
    "a namespace that is a pod's": ({"netns": "pod:x"}, [("bad-annotation", A % "netns")]),
    "a namespace that is too long": ({"netns": "x" * 256}, [("bad-annotation", A % "netns")]),
    "a link that is too long": ({"interface": "x" * 16}, [("bad-annotation", A % "interface")]),
    "a link with a slash": ({"interface": "a/b"}, [("bad-annotation", A % "interface")]),
    "a link with a quote": ({"interface": 'a"b'}, [("bad-annotation", A % "interface")]),
    "no address": ({"guest": "x"}, [("bad-annotation", A % "guest")]),
    "an empty address": ({"guest": ""}, [("bad-annotation", A % "guest")]),
    "a loopback address": ({"guest": "127.0.0.1"}, [("bad-annotation", A % "guest")]),
    "no address in particular": ({"guest": "0.0.0.0"}, [("bad-annotation", A % "guest")]),
    "an address of this network": ({"guest": "0.0.0.1"}, [("bad-annotation", A % "guest")]),
    "a multicast address": ({"guest": "ff02::1"}, [("bad-annotation", A % "guest")]),
    "a broadcast address": ({"guest": "255.255.255.255"}, [("bad-annotation", A % "guest")]),
    "a link-local address": ({"guest": "fe80::1"}, [("bad-annotation", A % "guest")]),
    "an address with a scope": ({"guest": "fd00::1%eth0"}, [("bad-annotation", A % "guest")]),
    "an IPv4 address in disguise": (
        {"guest": "::ffff:10.0.2.2"},
        [("bad-annotation", A % "guest")],
    ),
    "two of one family": ({"guest": "10.0.2.3,10.0.2.4"}, [("bad-annotation", A % "guest")]),
    "the gateway": ({"guest": "10.0.2.1"}, [("bad-annotation", A % "guest")]),
    "the network itself": ({"guest": "10.0.2.0"}, [("bad-annotation", A % "guest")]),
    "its broadcast address": ({"guest": "10.0.2.255"}, [("bad-annotation", A % "guest")]),
    "a bad node address": ({"address": "x"}, [("bad-annotation", A % "address")]),
}


@pytest.mark.parametrize(("annotations", "expected"), BAD_ANNOTATIONS.values(), ids=BAD_ANNOTATIONS)
def test_every_bad_annotation_is_a_problem(
    annotations: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert found(read(vmi(metadata=annotated(**annotations)))) == expected


@pytest.mark.parametrize("text", ["blue", "../x", ""])
@pytest.mark.parametrize("key", ["netns", "interface", "guest", "address"])
def test_a_tenant_s_annotations_for_bare_metal_are_refused_whatever_they_say(
    key: str, text: str
) -> None:
    document = vmi(metadata=annotated(**{key: text}))
    assert found(read(document, tenant=True)) == [("tenant-annotation", A % key)]
    assert read(document, tenant=True).machines == ()


def test_a_tenant_s_other_annotations_are_his_to_write() -> None:
    reading = read(vmi(metadata=annotated(port_ranges="22")), tenant=True, netns="pod")
    assert only(reading).netns == "pod"
    assert only(reading).masquerade


def test_all_of_a_tenant_s_problems_are_told() -> None:
    metadata = annotated(netns="blue", guest="10.0.2.9", port_ranges="2-1")
    assert sorted(code for code, _ in found(read(vmi(metadata=metadata), tenant=True))) == [
        "end-before-start",
        "tenant-annotation",
        "tenant-annotation",
    ]


def test_in_a_template_they_are_refused_as_well() -> None:
    document = vmi()
    spec = document.pop("spec")
    annotations = {"portranger.io/netns": "blue"}
    document |= {
        "kind": "VirtualMachine",
        "spec": {"template": {"metadata": {"annotations": annotations}, "spec": spec}},
    }
    assert only(read(document)).netns == "blue"
    path = "spec.template.metadata.annotations['portranger.io/netns']"
    assert found(read(document, tenant=True)) == [("tenant-annotation", path)]


def test_annotations_place_the_machine() -> None:
    metadata = annotated(netns="blue", interface="ens3", address="192.0.2.1,2001:4::1")
    machine = only(read(vmi(metadata=metadata)))
    assert machine.netns == "blue"
    assert machine.masquerade
    assert machine.masquerade.entry == "ens3"
    assert machine.addresses == (ip_address("192.0.2.1"), ip_address("2001:4::1"))


@pytest.mark.parametrize(
    ("written", "netns"),
    [
        pytest.param("/run/netns/blue", "blue", id="a name as a path"),
        pytest.param("/var/run/netns/blue", "blue", id="the same by its old path"),
        pytest.param("/proc/7/ns/net", "/proc/7/ns/net", id="a path to something else"),
        pytest.param("/run/netns/a/b", "/run/netns/a/b", id="a path below, which is no name"),
    ],
)
def test_a_namespace_has_one_spelling(written: str, netns: str) -> None:
    assert only(read(vmi(metadata=annotated(netns=written)))).netns == netns
    assert only(read(vmi(), netns=written)).netns == netns


def test_a_path_out_of_the_directory_of_namespaces_is_no_name() -> None:
    assert only(read(vmi(), netns="/run/netns/..")).netns == "/run/netns/.."


def test_an_interface_that_is_being_unplugged_is_no_longer_ours() -> None:
    network = "multus: {networkName: x}"
    machine = only(read(vmi("state: absent", binding="bridge: {}", network=network)))
    assert machine.masquerade is None
    reason = "state: absent: the interface is being unplugged"
    assert [other.reason for other in machine.not_ours] == [reason]


def test_a_key_of_the_pod_network_that_is_nearly_one_of_ours_is_found() -> None:
    reading = read(vmi(network="pod: {vmNetworkCidr: 10.9.0.0/16}"))
    assert found(reading) == [("unknown-key", NETWORK + ".pod.vmNetworkCidr")]
    assert read(vmi(network="pod: {colour: red}")).problems == ()


def test_the_namespace_given_by_the_caller_comes_first() -> None:
    assert only(read(vmi(metadata=annotated(netns="blue")), netns="green")).netns == "green"


@pytest.mark.parametrize("text", ["22", "1-2"])
def test_the_annotation_stands_alone(text: str) -> None:
    reading = read(vmi("ports: [{port: 80}]", metadata=annotated(port_ranges=text)))
    assert found(reading) == [("annotation-and-spec", A % "port-ranges")]


def test_the_annotation_needs_a_masquerade_interface() -> None:
    metadata = annotated(port_ranges="22")
    expected = [("ranges-need-masquerade", A % "port-ranges")]
    assert found(read(vmi(binding="bridge: {}", metadata=metadata))) == expected
    nothing = parse(f"kind: VirtualMachineInstance\nmetadata: {{{metadata}}}\nspec: {{}}")
    assert found(read(nothing)) == expected


def test_the_annotation_has_the_limit_too() -> None:
    reading = read(vmi(metadata=annotated(port_ranges="1,2,3")), limit=2)
    assert found(reading) == [("too-many-ranges", A % "port-ranges")]


@pytest.mark.parametrize("value", ["22", "0x10", "null", "[22]"])
def test_an_annotation_is_text(value: str) -> None:
    metadata = f"annotations: {{portranger.io/netns: {value}}}"
    assert ("not-a-string", A % "netns") in found(read(vmi(metadata=metadata)))


def test_annotations_of_others_are_left_alone() -> None:
    metadata = "annotations: {example.org/port-ranges: 22, portrange: x, portrange.io/other: y}"
    assert only(read(vmi(metadata=metadata))).masquerade


def test_a_near_miss_of_our_prefix_is_a_problem() -> None:
    reading = read(vmi(metadata="annotations: {portrange.io/port-ranges: '22'}"))
    assert found(reading) == [("unknown-key", "metadata.annotations['portrange.io/port-ranges']")]
    assert reading.problems[0].fix == "Write portranger.io/port-ranges instead."


def test_the_template_s_annotations_come_before_the_machine_s_own() -> None:
    document = parse("""
kind: VirtualMachine
metadata: {name: web, annotations: {portranger.io/netns: outer, portranger.io/interface: eth1}}
spec:
  template:
    metadata: {annotations: {portranger.io/netns: inner}}
    spec:
      domain: {devices: {interfaces: [{name: red, masquerade: {}}]}}
      networks: [{name: red, pod: {}}]
""")
    machine = only(read(document))
    assert machine.netns == "inner"
    assert machine.masquerade
    assert machine.masquerade.entry == "eth1"


# ------------------------------------------------------------------ what Services choose by


def templated(metadata: str, template: str) -> Any:
    """A VirtualMachine with metadata of its own and in its template."""
    document = vmi(metadata=metadata)
    spec = {"template": {"metadata": parse(f"{{{template}}}"), "spec": document["spec"]}}
    return {**document, "kind": "VirtualMachine", "spec": spec}


LABELS: dict[str, tuple[str, str, list[str]]] = {
    "none": ("", "", []),
    "none, and null": ("labels: {}", "labels: null", []),
    "its own": ("labels: {b: x, a: 'yes'}", "", ["a=yes", "b=x"]),
    "those of the template": ("", "labels: {b: x, a: y}", ["a=y", "b=x"]),
    "both": ("labels: {a: own, c: own}", "labels: {a: t, b: t}", ["a=t", "b=t", "c=own"]),
    "an empty one": ("labels: {a: own}", "labels: {a: ''}", ["a="]),
    "whatever text": ("labels: {'_/-': 'a b'}", "", ["_/-=a b"]),
}


@pytest.mark.parametrize(("own", "template", "expected"), LABELS.values(), ids=LABELS)
def test_the_template_s_labels_come_before_the_machine_s_own(
    own: str, template: str, expected: list[str]
) -> None:
    machine = only(read(templated(own, template)))
    assert [f"{key}={text}" for key, text in machine.labels] == expected


def test_the_labels_of_an_instance_are_its_own() -> None:
    document = vmi(metadata="labels: {b: x, a: y}")
    assert only(read(document)).labels == (("a", "y"), ("b", "x"))
    assert only(read(document)).labels[0] is only(read(vmi(metadata="labels: {a: y}"))).labels[0]


def test_every_label_that_is_no_text_is_a_problem_beside_all_others() -> None:
    document = templated("labels: {a: 5, b: x}", "labels: {a: x, b: null, c: [z], 'd.e/f': true}")
    document["spec"]["template"]["spec"]["networks"][0]["name"] = "Blue"
    assert found(read(document))[:4] == [
        ("not-a-string", "spec.template.metadata.labels.b"),
        ("not-a-string", "spec.template.metadata.labels.c"),
        ("not-a-string", "spec.template.metadata.labels['d.e/f']"),
        ("not-a-string", "metadata.labels.a"),
    ]
    assert len(read(document).problems) > 4
    assert found(read(vmi(metadata="labels: [a]"))) == [("not-a-mapping", "metadata.labels")]


OURS, BRIDGED = "masquerade: {}", "bridge: {}"
SOME = "ports: [{name: web, port: 80}, {port: 81}, {name: dns, port: 53, protocol: UDP}]"
RTP_END = "annotations: {portrange.alpha.kubernetes.io/port-end-rtp: '5999'}"
WEB, DNS = ("web", Protocol.TCP, 80), ("dns", Protocol.UDP, 53)
RTP = ("rtp", Protocol.UDP, 5000)
NAMED: dict[str, tuple[str, str, str, tuple[tuple[str, Protocol, int], ...]]] = {
    "none": ("ports: [{port: 80}]", OURS, "", ()),
    "ranges have none": ("portRanges: [{start: 1, end: 5}]", OURS, "", ()),
    "some": (SOME, OURS, "", (WEB, DNS)),
    "those of a bridge": (SOME, BRIDGED, "", (WEB, DNS)),
    "a range": ("ports: [{name: rtp, port: 5000, protocol: UDP}]", OURS, RTP_END, (RTP,)),
}


@pytest.mark.parametrize(
    ("interface", "binding", "metadata", "expected"), NAMED.values(), ids=NAMED
)
def test_ports_that_have_names_are_known_by_them(
    interface: str,
    binding: str,
    metadata: str,
    expected: tuple[tuple[str, Protocol, int], ...],
) -> None:
    document = vmi(interface, binding=binding, metadata=metadata)
    assert only(read(document)).names == expected


# ------------------------------------------------------------------- the port-end annotations

END = "metadata.annotations['portrange.alpha.kubernetes.io/port-end-%s']"


def ending(name: str, text: str) -> str:
    return f"annotations: {{portrange.alpha.kubernetes.io/port-end-{name}: '{text}'}}"


@pytest.mark.parametrize(("text", "expected"), [("30", ["22-30/tcp"]), ("22", ["22/tcp"])])
def test_a_named_port_becomes_a_range(text: str, expected: list[str]) -> None:
    assert claims(vmi("ports: [{name: a, port: 22}]", metadata=ending("a", text))) == expected


@pytest.mark.parametrize(
    ("interface", "name", "text", "expected"),
    [
        ("ports: [{name: a, port: 22}]", "b", "30", [("no-such-port", END % "b")]),
        ("ports: [{name: a, port: 22}]", "a", "x", [("not-an-integer", END % "a")]),
        ("ports: [{name: a, port: 22}]", "a", "", [("not-an-integer", END % "a")]),
        ("ports: [{name: a, port: 22}]", "a", "070", [("not-an-integer", END % "a")]),
        ("ports: [{name: a, port: 22}]", "a", "70000", [("port-out-of-range", END % "a")]),
        ("ports: [{name: a, port: 22}]", "a", "21", [("end-before-start", END % "a")]),
        ("ports: [{name: a, port: 22, end: 22}]", "a", "23", [("end-and-annotation", END % "a")]),
        ("ports: [{name: a, port: 22}, {port: 25}]", "a", "30", [("overlap", P + "[1]")]),
        ("", "", "30", [("unknown-key", END % "")]),
    ],
)
def test_every_bad_end_is_a_problem(
    interface: str, name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    assert found(read(vmi(interface, metadata=ending(name, text)))) == expected


def test_an_annotated_end_needs_masquerade_too() -> None:
    document = vmi("ports: [{name: a, port: 22}]", binding="bridge: {}", metadata=ending("a", "30"))
    assert found(read(document)) == [("ranges-need-masquerade", P + "[0]")]


# ---------------------------------------------------------------------- kinds, names and lists


@pytest.mark.parametrize("api", ["kubevirt.io/v1", "kubevirt.io/v1alpha3"])
@pytest.mark.parametrize("kind", ["VirtualMachineInstance", "VM"])
def test_every_version_of_the_kinds_is_read(api: str, kind: str) -> None:
    machine = only(read(vmi() | {"kind": kind, "apiVersion": api}))
    assert (machine.kind, machine.namespace, machine.name, machine.netns) == (
        *(kind, "default", "web", "web"),
    )


def test_an_old_vm_may_have_a_template() -> None:
    document = vmi() | {"kind": "VM", "spec": {"template": {"spec": vmi()["spec"]}}}
    assert only(read(document)).masquerade


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ("{domain: {}}", "spec.template"),
        ("{template: {}}", "spec.template.spec"),
    ],
)
def test_a_virtual_machine_has_its_specification_in_a_template(spec: str, path: str) -> None:
    reading = read(parse(f"kind: VirtualMachine\nspec: {spec}"))
    assert found(reading) == [("missing", path)]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("{name: Web}", [("bad-name", "metadata.name")]),
        ("{name: ''}", [("bad-name", "metadata.name")]),
        ("{name: a..b}", [("bad-name", "metadata.name")]),
        ("{name: -a}", [("bad-name", "metadata.name")]),
        (f"{{name: {'a' * 254}}}", [("bad-name", "metadata.name")]),
        ("{name: no}", [("not-a-string", "metadata.name")]),
        ("{generateName: web-}", [("missing", "metadata.name")]),
        ("{name: a, namespace: a.b}", [("bad-name", "metadata.namespace")]),
        ("{name: a, namespace: ''}", [("bad-name", "metadata.namespace")]),
        ("{name: a, namespace: a-}", [("bad-name", "metadata.namespace")]),
        ("{name: a, annotations: []}", [("not-a-mapping", "metadata.annotations")]),
        ("x", [("not-a-mapping", "metadata")]),
    ],
)
def test_every_problem_of_the_metadata_is_found(
    metadata: str, expected: list[tuple[str, str]]
) -> None:
    document = parse(f"kind: VirtualMachineInstance\nmetadata: {metadata}\nspec: {{}}")
    assert found(read(document)) == expected


def test_a_machine_without_a_name_is_called_unnamed() -> None:
    machine = only(read(parse("{kind: VM, spec: {}}"), netns="blue"))
    assert (machine.name, machine.netns) == ("unnamed", "blue")
    assert str(machine) == "VM/default/unnamed"


@pytest.mark.parametrize("document", [None, {}, {"kind": "List", "items": None}])
def test_an_empty_document_is_nothing(document: object) -> None:
    assert read(document) == Reading()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("text", [("not-a-mapping", "")]),
        ([], [("not-a-mapping", "")]),
        (5, [("not-a-mapping", "")]),
        ({"metadata": {}}, [("missing", "kind")]),
        ({"kind": ""}, [("missing", "kind")]),
        ({"kind": 5}, [("not-a-string", "kind")]),
        ({"kind": "VM", "apiVersion": 1, "spec": {}}, [("not-a-string", "apiVersion")]),
        ({"kind": "virtualmachine", "spec": {}}, [("unknown-kind", "kind")]),
        ({"kind": "VirtualMachin", "spec": {}}, [("unknown-kind", "kind")]),
        ({"kind": "List"}, [("missing", "items")]),
        ({"kind": "VirtualMachineList"}, [("missing", "items")]),
        ({"kind": "List", "items": {}}, [("not-a-list", "items")]),
        ({"kind": "List", "items": [5]}, [("not-a-mapping", "items[0]")]),
        ({"kind": "List", "items": [{}, {"kind": "List"}]}, [("nested-list", "items[1]")]),
        ({"kind": "List", "items": [{"kind": "VM"}]}, [("missing", "items[0].spec")]),
    ],
)
def test_what_is_no_manifest_is_a_problem(
    document: object, expected: list[tuple[str, str]]
) -> None:
    assert found(read(document)) == expected


@pytest.mark.parametrize(
    ("document", "line"),
    [
        (
            {"kind": "Service", "metadata": {"name": "web"}},
            "Service/web is not read by this version",
        ),
        ({"kind": "Pod", "metadata": 5}, "Pod is not read by this version"),
        ({"kind": "VM", "apiVersion": "v1"}, "VM of apiVersion v1 is not read by this version"),
        (
            {"kind": "VM", "apiVersion": "kubevirt.io/v2"},
            "VM of apiVersion kubevirt.io/v2 is not read by this version",
        ),
        ({"kind": "Network", "apiVersion": "v1"}, "Network is not read by this version"),
        (
            {"kind": "VirtualMachineInstancetype"},
            "VirtualMachineInstancetype is not read by this version",
        ),
    ],
)
def test_other_kinds_are_skipped_with_a_word(document: object, line: str) -> None:
    reading = read(document)
    assert [str(skipped) for skipped in reading.skipped] == [line]
    assert (reading.problems, reading.count) == ((), 0)


def test_a_list_is_taken_apart_and_its_good_machines_are_kept() -> None:
    items = [vmi(), {"kind": "Service"}, vmi("ports: [{port: 0}]"), None]
    reading = read({"kind": "List", "items": items[:3]})
    assert [machine.name for machine in reading.machines] == ["web"]
    assert reading.places == (("items", 0),)
    assert [skipped.path for skipped in reading.skipped] == [("items", 1)]
    assert found(reading) == [("port-out-of-range", "items[2]." + P + "[0].port")]
    assert reading.count == 2


def test_claims_are_values() -> None:
    masquerade = only(read(vmi("ports: [{port: 53, protocol: UDP}]"))).masquerade
    assert masquerade
    assert masquerade.claims == (Claim(Protocol.UDP, PortRange(53, 53)),)


# --------------------------------------------------------------------------------- problems


def test_a_problem_reads_as_a_sentence_with_its_place() -> None:
    problem = Problem(code="c", path=("a", 0, "b.c/d"), what="is wrong", fix="Mend it.", value=None)
    assert str(problem) == "a[0]['b.c/d']: is wrong (it is null). Mend it. [c]"
    assert str(problem.at("f.yaml", 7)).startswith("f.yaml:7: a[0]")
    assert str(problem.at("f.yaml", 0)).startswith("f.yaml: a[0]")
    bare = Problem(code="c", path=(), what="is wrong", fix="Mend it.")
    assert str(bare) == "is wrong. Mend it. [c]"
    assert repr(ABSENT) == "(absent)"


def test_problems_of_one_text_are_told_apart_by_their_hash() -> None:
    bad = ",".join(f"x{number}" for number in range(1024))
    problems = read(vmi(metadata=annotated(port_ranges=bad))).problems
    assert len({hash(problem) for problem in problems}) == 1024


@pytest.mark.parametrize(
    ("one", "same"),
    [(1, True), (1, 1.0), ("0x10", OddNumeral("0x10")), ([[1]], [[True]]), ({"a": []}, {"a": []})],
)
def test_equal_problems_have_the_same_hash(one: object, same: object) -> None:
    first, second = (
        Problem(code="c", path=("a",), what="is wrong", fix="Mend it.", value=value)
        for value in (one, same)
    )
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"),
        ("x" * 100, "'" + "x" * 58 + "\N{HORIZONTAL ELLIPSIS}"),
        ("\ud800", r"'\ud800'"),
        (-7, "-7"),
        (1.5, "1.5"),
        (True, "true"),
        (None, "null"),
        ({1: 2}, "a mapping"),
        ([1], "a list"),
        (OddNumeral("0x10"), "0x10"),
        (OddNumeral("\n"), "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_value_is_shown_on_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_beyond_python_s_patience_is_shown_too() -> None:
    assert shown(10**5000) == "a number of more than 76 digits"


def test_a_path_is_written_as_people_write_it() -> None:
    assert dotted(()) == ""
    assert dotted(("a", "b-c", 3, "d_e")) == "a.b-c[3].d_e"
    assert dotted(("", "a\n")) == r"['']['a\n']"


def test_every_code_in_use_is_documented_and_every_documented_one_is_in_use() -> None:
    root = Path(__file__).parents[2] / "rules" / "manifests"
    used = {
        node.value
        for file in root.glob("*.py")
        if file.name != "codes.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in CODES
    }
    assert used == set(CODES)
    called = {
        argument.value
        for file in root.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "problem"
        for argument in node.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if " " not in argument.value
    }
    assert called <= set(CODES)


def test_thousands_of_misspelt_annotations_are_told_in_a_few_problems() -> None:
    document: Any = vmi()
    written = {f"portranger.io/port-range{number}": "1-2" for number in range(8000)}
    document["metadata"] = {"name": "desktop", "annotations": written}
    reading = read(document)
    told = [str(problem) for problem in reading.problems]
    assert len(told) == 51
    assert "Write portranger.io/port-ranges instead" in told[0]
    assert "has 7950 more keys that are not known" in told[-1]
