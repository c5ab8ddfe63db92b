"""What a node has learnt of its routers is not lost to forwarding: a real advertisement."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

from tests.nodes import net, service_manifest, socket_in, vm_manifest
from tests.spaces import eventually, within

ADVERTISEMENT = struct.pack(">BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
EVERY_NODE = "ff02::1"
ENTRY = (sys.executable, "-m", "agent.entry")


def advertise(where: str) -> bool:
    """As a router does, over its only link; whether that was up."""
    with socket_in(where, EVERY_NODE, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router:
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        index = int(within(where, "cat", "/sys/class/net/eth0/ifindex"))
        with suppress(OSError):
            router.sendto(ADVERTISEMENT, (EVERY_NODE, 0, 0, index))
            return True
    return False


def test_the_default_route_from_an_advertisement_outlives_forwarding() -> None:
    with net(1) as lab:

        def default() -> str:
            return within(lab.node, "ip", "-6", "route", "show", "default")

        assert eventually(lambda: advertise(lab.client) and "proto ra" in default())
        service = service_manifest(["name: web, port: 80, nodePort: 30080"])
        text = vm_manifest(lab.vms[0], "80") + service
        command = (*ENTRY, "apply", "--yes", "-f", "-")
        assert "~ sysctl net.ipv6.conf.eth0.accept_ra 1 -> 2" in within(
            lab.node, *command, stdin=text
        )
        forwarding = within(lab.node, "sysctl", "-n", "net.ipv6.conf.all.forwarding")
        assert forwarding.strip() == "1"
        assert "proto ra" in default()
