"""Policies never cut off the node itself: the kubelet probes a machine from there, and Kubernetes
always allows traffic between a pod and its own node. With packets, in both backends."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from rules.model import NODE, Family
from tests.daemon.running import Node
from tests.datapath.policing import (
    CLOSED,
    PATIENCE,
    STRANGER,
    Ask,
    Town,
    address,
    answered,
    at,
    served,
    wired,
    written,
)
from tests.datapath.publishing import TCP, serving
from tests.nodes import NODE4, NODE6, Net
from tests.spaces import BACKENDS, NFTABLES, eventually, ip, observed

POLICY = "policy.yaml"
ADDRESSES = {Family.IP: NODE4, Family.IP6: NODE6}
BRIDGE = {Family.IP: "10.1.0.1", Family.IP6: "fd01::1"}
NEW = {Family.IP: "198.51.100.50", Family.IP6: "2001:db8:5::50"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    with wired() as made, served(made), serving(made.node, "node", [(TCP, 80)]):
        yield made


def probes(lab: Net, **sources: str) -> list[Ask]:
    """What a kubelet asks the first machine, from whichever address the kernel takes."""
    source = sources or {"ip": "", "ip6": ""}
    return [
        Ask(lab.node, source[family.value], TCP, at(lab.vms[0], family), 80) for family in Family
    ]


def strangers(lab: Net) -> list[Ask]:
    return [
        Ask(lab.client, address(STRANGER, family), TCP, at(lab.vms[0], family), 80)
        for family in Family
    ]


def leaving(lab: Net, to: dict[Family, str]) -> list[Ask]:
    return [Ask(lab.vms[0].guest, "", TCP, to[family], 80) for family in Family]


def enforced(node: Node, lab: Net, backend: str) -> bool:
    """Whether the machine is cut off in both directions and families."""
    live = observed(lab.vms[0].pod, backend).live
    return sum(one.rule.guards and one.rule.owner != NODE for one in live) >= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_deny_allows_kubelet_probes_and_nobody_else(
    lab: Net, tmp_path: Path, backend: str
) -> None:
    node = written(tmp_path / "node", lab)
    node.configure(backend=backend)
    node.save(POLICY, CLOSED)
    with node.running():
        assert eventually(lambda: enforced(node, lab, backend), PATIENCE)
        wanted = {
            *probes(lab),
            *probes(lab, ip=ADDRESSES[Family.IP], ip6=ADDRESSES[Family.IP6]),
            *leaving(lab, ADDRESSES),
            *leaving(lab, BRIDGE),
        }
        others = leaving(lab, {family: address(STRANGER, family) for family in Family})
        asks = [*wanted, *strangers(lab), *others]
        assert answered(asks, wanted) == wanted


def test_an_address_that_the_node_gets_or_loses_is_an_element(lab: Net, tmp_path: Path) -> None:
    node = written(tmp_path / "node", lab)
    node.configure(backend=NFTABLES)
    node.save(POLICY, CLOSED)
    asks = probes(lab, ip=NEW[Family.IP], ip6=NEW[Family.IP6])
    pod = lab.vms[0].pod

    def members() -> set[str]:
        sets = observed(pod, NFTABLES).sets.items()
        return {str(one[0]) for peers, some in sets if peers.key == "node" for one in some}

    with node.running():
        assert eventually(lambda: ADDRESSES[Family.IP] in members(), PATIENCE)
        before = observed(pod, NFTABLES)
        added = [f"addr add {NEW[Family.IP]}/24 dev eth0"]
        added += [f"addr add {NEW[Family.IP6]}/64 dev eth0 preferred_lft 0 nodad"]
        ip(lab.node, *added)
        try:
            assert eventually(lambda: set(NEW.values()) <= members(), PATIENCE)
            assert answered(asks, asks) == set(asks)
            now = observed(pod, NFTABLES)
            assert {(x.rule, x.handle) for x in now.live} == {
                (x.rule, x.handle) for x in before.live
            }
        finally:
            ip(
                lab.node,
                f"addr del {NEW[Family.IP]}/24 dev eth0",
                f"addr del {NEW[Family.IP6]}/64 dev eth0",
            )
        assert eventually(lambda: not set(NEW.values()) & members(), PATIENCE)
        assert observed(pod, NFTABLES).sets == before.sets


def test_without_the_exemption_the_node_is_cut_off_like_everybody(lab: Net, tmp_path: Path) -> None:
    node = written(tmp_path / "node", lab)
    node.configure(backend=NFTABLES)
    node.config.write_text(f"{node.config.read_text()}[policy]\nallow_node = false\n")
    node.save(POLICY, CLOSED)
    with node.running():
        assert eventually(lambda: enforced(node, lab, NFTABLES), PATIENCE)
        assert answered([*probes(lab), *leaving(lab, ADDRESSES)]) == set()


def test_addresses_of_the_node_that_are_no_way_to_it_are_left_out() -> None:
    from ipaddress import ip_interface

    from rules.model import Link, Surroundings
    from rules.places import node_addresses

    texts = {
        "lo": ("127.0.0.1/8", "::1/128"),
        "eth0": ("192.0.2.7/24", "2001:db8::7/64", "fe80::7/64"),
        "cali1": ("169.254.1.1/32",),
        "kube-ipvs0": ("10.96.0.1/32", "fd96::1/128"),
    }
    links = tuple(Link(name, tuple(map(ip_interface, some))) for name, some in texts.items())
    found = node_addresses(Surroundings(links))
    assert found == set(map(ip_address, ("192.0.2.7", "2001:db8::7", "169.254.1.1")))


def test_the_daemon_is_a_town_like_any_other(lab: Net, tmp_path: Path) -> None:
    """What another finds who reads the same files on that node is what the daemon has done."""
    node = written(tmp_path / "node", lab)
    node.configure(backend=NFTABLES)
    node.save(POLICY, CLOSED)
    with node.running() as daemon:
        Town(lab, node, daemon).settle()
