"""A guest that is held to a policy gains nothing by giving itself another address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.daemon.running import Node
from tests.nodes import CLIENT4, CLIENT6, Net, net, socket_in, vm_manifest
from tests.spaces import eventually, ip, within

POLICY = """\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: quiet}
spec: {podSelector: {matchLabels: {app: phone}}, policyTypes: [Egress]}
"""
ADDRESSES = ["10.0.2.2", "10.0.2.77", "203.0.113.200", "fd10:0:2::2", "fd10:0:2::77"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Net, Node]]:
    with net(1) as made:
        guest = made.vms[0].guest
        for where in (made.node, made.client):
            within(where, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")
        for address in ADDRESSES[1:3]:
            ip(guest, f"addr add {address}/32 dev eth0")
        ip(guest, "addr add fd10:0:2::77/128 dev eth0 nodad")
        within(made.node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        within(made.node, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        ip(made.client, f"route add 10.1.0.0/24 via {NODE}", f"route add fd01::/64 via {NODE6}")
        yield made, Node(Path(tmp_path_factory.mktemp("quiet")) / "node", made.node)


NODE, NODE6 = "198.51.100.2", "2001:db8:5::2"


def arrives(lab: Net, source: str) -> bool:
    """Whether a datagram that the guest sends from that address comes to the client."""
    to = CLIENT6 if ":" in source else CLIENT4
    with (
        socket_in(lab.client, to, socket.SOCK_DGRAM) as server,
        socket_in(lab.vms[0].guest, to, socket.SOCK_DGRAM) as client,
    ):
        server.bind((to, 0))
        server.settimeout(0.3)
        client.bind((source, 0))
        client.sendto(b"?", server.getsockname())
        try:
            return server.recv(10) == b"?"
        except TimeoutError:
            return False


def test_it_is_silent_under_every_address(lab: tuple[Net, Node]) -> None:
    made, node = lab
    node.save("vm.yaml", vm_manifest(made.vms[0], "80"))
    with node.running() as daemon:
        assert daemon.is_in("in sync", made.vms[0].pod)
        assert [s for s in ADDRESSES if not eventually(partial(arrives, made, s))] == []
        node.save("policy.yaml", POLICY)
        assert eventually(lambda: daemon.status()["policies"]["count"] == 1)
        assert eventually(lambda: not arrives(made, ADDRESSES[0]))
        assert not any(arrives(made, source) for source in ADDRESSES)
        node.remove("policy.yaml")
        assert eventually(lambda: all(arrives(made, source) for source in ADDRESSES))
