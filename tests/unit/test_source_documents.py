"""Every example manifest of the two source documents, VEP 168 and "Interfaces and networks"."""

from __future__ import annotations

import pytest

from agent.sources import yaml_text
from rules.manifests import read
from rules.model import Machine

OLD = """
kind: VM
spec:
  domain:
    devices:
      interfaces:
      - name: red
        %s
  networks:
  - name: red
    %s
"""
VEP = """
apiVersion: kubevirt.io/v1
kind: VirtualMachine
spec:
  template:
    spec:
      domain:
        devices:
          interfaces:
          - name: red
            masquerade: {}
            %s
      networks:
      - name: red
        pod: {}
"""


def only(text: str) -> Machine:
    documents, problems = yaml_text.parse(text)
    reading = read(documents[0][0])
    assert [str(problem) for problem in (*problems, *reading.problems)] == []
    [machine] = reading.machines
    return machine


FORWARDED = {
    "VEP 168, portRanges": (
        (
            "portRanges: [{start: 1000, end: 8000, protocol: TCP},"
            " {start: 1000, end: 8000, protocol: UDP}]"
        ),
        ["1000-8000/tcp", "1000-8000/udp"],
    ),
    "VEP 168, the alternative: ports with an end": (
        "ports: [{port: 22, name: ssh, protocol: TCP}, {port: 1000, end: 8000, protocol: UDP}]",
        ["22/tcp", "1000-8000/udp"],
    ),
}


@pytest.mark.parametrize(("interface", "expected"), FORWARDED.values(), ids=FORWARDED)
def test_the_examples_of_vep_168_are_forwarded(interface: str, expected: list[str]) -> None:
    masquerade = only(VEP % interface).masquerade
    assert masquerade
    assert masquerade.name == "red"
    claims = masquerade.claims or ()
    assert [f"{claim.ports}/{claim.protocol.value}" for claim in claims] == expected


NOT_OURS = {
    "pod": (
        "{macAddress: 'de:ad:00:00:be:af', model: e1000, bridge: {}}",
        "pod: {} # Stock pod network",
        "bridge binding",
    ),
    "resource": (
        "{bridge: {}}",
        "resource:\n      resourceName: bridge.network.kubevirt.io/red",
        "resource network",
    ),
    "frontend": (
        "{model: e1000, bridge: {}, ports: [{name: http, port: 80}]}",
        "pod: {}",
        "bridge binding",
    ),
    "bridge": ("{bridge: {}}", "pod: {}", "bridge binding"),
    "slirp": ("{slirp: {}}", "pod: {}", "slirp binding"),
}


@pytest.mark.parametrize(("interface", "network", "reason"), NOT_OURS.values(), ids=NOT_OURS)
def test_the_examples_of_interfaces_and_networks_are_not_ours_for_a_reason(
    interface: str, network: str, reason: str
) -> None:
    machine = only(OLD % (f"<<: {interface}", network))
    assert machine.masquerade is None
    [not_ours] = machine.not_ours
    assert not_ours.interface == "red"
    assert not_ours.reason.startswith(reason)


def test_a_machine_without_its_interfaces_has_no_network() -> None:
    text = "kind: VM\nspec:\n  domain:\n    devices:\n      autoattachPodInterface: false\n"
    machine = only(text)
    assert machine.masquerade is None
    assert [one.reason for one in machine.not_ours] == ["no network is attached"]


@pytest.mark.parametrize("model", ["e1000", "e1000e", "ne2k_pci", "pcnet", "rtl8139", "virtio"])
def test_every_listed_model_is_known(model: str) -> None:
    assert only(OLD % (f"<<: {{model: {model}, bridge: {{}}}}", "pod: {}")).not_ours


@pytest.mark.parametrize("mac", ["ff:ff:ff:ff:ff:ff", "FF-FF-FF-FF-FF-FF", "de:ad:00:00:be:af"])
def test_both_notations_of_a_mac_are_known(mac: str) -> None:
    assert only(OLD % (f"<<: {{macAddress: {mac}, bridge: {{}}}}", "pod: {}")).not_ours
