"""At which addresses a Service is served, and to whom, proved by packets: external ones only where
they are the node's own or allowed, and the machines behind it get back to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rules.model import FORWARDED, Family, Protocol
from tests.datapath.publishing import (
    AT,
    FLOWS,
    FROM,
    answerers,
    everywhere,
    publishing,
    serving,
)
from tests.nodes import NODE4, NODE6, Net, asked, net, service_manifest, vm_manifest
from tests.spaces import ip, run, space, within

RANGES = "1-1000,1-1000/udp"
PORTS = (
    "name: web, port: 80, nodePort: 20080",
    "name: quic, protocol: UDP, port: 80, nodePort: 20080",
)
OWN_PORTS = ("name: web, port: 80", "name: quic, protocol: UDP, port: 80")
ENDS = "web: 89, quic: 89"
SERVED = [(protocol, port) for protocol in FORWARDED for port in range(79, 91)]

ELSEWHERE = {Family.IP: "203.0.113.7", Family.IP6: "2001:db8:7::7"}
ALLOWED = {"node_ports.external": ["203.0.113.0/24", "2001:db8:7::/64"]}
EXTERNAL = "externalIPs: [{}, '{}', {}, '{}']".format(NODE4, NODE6, *ELSEWHERE.values())


# --------------------------------------------------------------------------- external addresses


@contextmanager
def wider() -> Iterator[Net]:
    """With somebody else behind the node, who has addresses and ports of his own."""
    with net(2) as lab, space() as other:
        ip(
            lab.node,
            f"link add other type veth peer name eth0 netns {other}",
            "addr add 203.0.113.1/24 dev other",
            "addr add 2001:db8:7::1/64 dev other nodad",
            "link set other up",
        )
        ip(
            other,
            f"addr add {ELSEWHERE[Family.IP]}/24 dev eth0",
            f"addr add {ELSEWHERE[Family.IP6]}/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 203.0.113.1",
            "route add default via 2001:db8:7::1",
        )
        ip(
            lab.client,
            f"route add 203.0.113.0/24 via {NODE4}",
            f"route add 2001:db8:7::/64 via {NODE6}",
        )
        with everywhere(lab, SERVED), serving(other, "other", SERVED):
            yield lab


@pytest.fixture(scope="module")
def wide() -> Iterator[Net]:
    with wider() as lab:
        yield lab


def external(kind: str) -> str:
    """A Service with external addresses, or with those that a load balancer gave it."""
    if kind != "ingress":
        return service_manifest(OWN_PORTS, kind=kind, ends=ENDS, more=EXTERNAL)
    addresses = [NODE4, NODE6, *ELSEWHERE.values()]
    listed = ", ".join(f"{{ip: '{address}'}}" for address in addresses)
    text = service_manifest(
        OWN_PORTS,
        kind="LoadBalancer",
        ends=ENDS,
        more="allocateLoadBalancerNodePorts: false",
    )
    return text.removesuffix("---\n") + f"status: {{loadBalancer: {{ingress: [{listed}]}}}}\n---\n"


@pytest.mark.parametrize("kind", ["ClusterIP", "ingress"])
def test_an_external_address_counts_where_it_is_the_nodes_own_or_allowed(
    wide: Net, tmp_path: Path, kind: str
) -> None:
    with publishing(tmp_path / "node", wide, external(kind), RANGES) as published:
        for family, protocol in FLOWS:
            assert_is_served(wide, AT[family], family, protocol)
            assert_is_others(wide, family, protocol)
        assert all(address in published.notes for address in ELSEWHERE.values())

        published.node.configure(**ALLOWED)
        published.changed(published.daemon.reload)
        for family, protocol in FLOWS:
            assert_is_served(wide, AT[family], family, protocol)
            assert_is_served(wide, ELSEWHERE[family], family, protocol)
            assert asked(wide.client, protocol, ELSEWHERE[family], 79).startswith("other 79 ")
            assert asked(wide.client, protocol, ELSEWHERE[family], 90).startswith("other 90 ")

        published.node.configure(**{"node_ports.external": []})
        published.changed(published.daemon.reload)
        for family, protocol in FLOWS:
            assert_is_others(wide, family, protocol)
        published.changed(lambda: published.node.remove("service.yaml"))


def assert_is_served(lab: Net, at: str, family: Family, protocol: Protocol) -> None:
    """By the machines, with the ports of the Service, each to its own."""
    for port in (80, 85, 89):
        assert asked(lab.client, protocol, at, port).split() in (
            ["one", str(port), FROM[family]],
            ["two", str(port), FROM[family]],
        )
    if at == AT[family]:
        assert [asked(lab.client, protocol, at, port) for port in (79, 90)] == ["", ""]


def assert_is_others(lab: Net, family: Family, protocol: Protocol) -> None:
    """Nobody touches what the node only passes on."""
    for port in (79, 80, 85, 89):
        answer = asked(lab.client, protocol, ELSEWHERE[family], port)
        assert answer == f"other {port} {FROM[family]}"


def test_a_node_port_is_at_all_own_addresses_and_nowhere_else(wide: Net, tmp_path: Path) -> None:
    service = service_manifest(PORTS, ends=ENDS, more=EXTERNAL)
    with publishing(tmp_path / "node", wide, service, RANGES) as published:
        for family, protocol in FLOWS:
            assert_is_served(wide, AT[family], family, protocol)
            assert asked(wide.client, protocol, AT[family], 20085).split()[1:] == [
                "85",
                FROM[family],
            ]
            assert asked(wide.client, protocol, ELSEWHERE[family], 20080) == ""
        published.changed(lambda: published.node.remove("service.yaml"))


# -------------------------------------------------------------------------------- the way back


def bridged(nf: int, hairpin: str) -> Iterator[Net]:
    """The machines on one bridge, which may hand packets to the node's rules itself."""
    with net(2) as lab:
        if Path("/proc/sys/net/bridge").exists():
            for name in ("iptables", "ip6tables"):
                within(lab.node, "sysctl", "-qw", f"net.bridge.bridge-nf-call-{name}={nf}")
        for vm in lab.vms:
            run(
                *("ip", "-n", lab.node, "link", "set", f"vm{vm.number}"),
                *("type", "bridge_slave", "hairpin", hairpin),
            )
        yield lab


def of_their_own() -> Iterator[Net]:
    """Each machine at a link of its own."""
    with net(2, bridged=False) as lab:
        yield lab


WIRINGS = {
    "bridge": lambda: bridged(0, "off"),
    "bridge with hairpin, and netfilter on it": lambda: bridged(1, "on"),
    "links": of_their_own,
}


@pytest.mark.parametrize("wiring", WIRINGS)
def test_machines_reach_their_own_service_and_each_other_over_the_node(
    tmp_path: Path, wiring: str
) -> None:
    service = service_manifest(PORTS, ends=ENDS, more=f"externalIPs: [{NODE4}, '{NODE6}']")
    with (
        contextmanager(WIRINGS[wiring])() as lab,
        everywhere(lab, SERVED),
        publishing(tmp_path / "node", lab, service, RANGES),
    ):
        for family, protocol in FLOWS:
            for vm in lab.vms:
                for where in (vm.pod, vm.guest):
                    for port in (20085, 85):
                        heard = answerers(where, protocol, AT[family], port, 24)
                        assert set(heard) == {"one", "two"}, (vm, where, port, heard)
            answer = asked(lab.client, protocol, AT[family], 20085)
            assert answer.split()[1:] == ["85", FROM[family]], "others are not concealed"


@pytest.mark.parametrize("hairpin", ["on", "off"])
def test_a_neighbour_on_the_bridge_is_served_without_hairpin_mode_too(
    tmp_path: Path, hairpin: str
) -> None:
    """Also where the bridge translates by itself; without, only the machine's own way is cut."""
    with (
        contextmanager(bridged)(1, hairpin) as lab,
        everywhere(lab, SERVED),
        publishing(tmp_path / "node", lab, service_manifest(PORTS, ends=ENDS), RANGES) as published,
    ):
        alone = vm_manifest(lab.vms[0], RANGES, labels="app: other")
        published.changed(lambda: published.node.save("vm1.yaml", alone))
        for family, protocol in FLOWS:
            for where in (lab.vms[0].pod, lab.vms[0].guest):
                assert set(answerers(where, protocol, AT[family], 20085, 12)) == {"two"}


def test_a_machine_of_its_own_link_sees_which_other_machine_asks(tmp_path: Path) -> None:
    """Only who would answer itself is concealed from itself."""
    service = service_manifest(PORTS, ends=ENDS)
    with (
        contextmanager(of_their_own)() as lab,
        everywhere(lab, SERVED),
        publishing(tmp_path / "node", lab, service, RANGES),
    ):
        first = lab.vms[0]
        own = {Family.IP: first.address, Family.IP6: first.address6}
        for family, protocol in FLOWS:
            answers = {asked(first.guest, protocol, AT[family], 20080) for _ in range(24)}
            seen = {answer.split()[0]: answer.split()[2] for answer in answers}
            assert seen["two"] == own[family]
            assert seen["one"] != own[family]
