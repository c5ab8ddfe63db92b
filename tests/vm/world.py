"""A client, a guest and a daemon that forwards ports to it, and what is tried with them.

`python -m tests.vm.demo` tells it as a story, and tests/vm/test_guest.py holds it to be true.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from rules.model import Protocol
from rules.values import Value
from tests.daemon.running import Node, Running, comes_to_forward, made
from tests.nodes import KINDS, PATIENCE, socket_in
from tests.spaces import claims, manifest, within
from tests.vm.guest import CLIENT, POD, Guest, guest, wired
from tests.vm.image import Image

BELOW, FIRST, KEPT, LAST, ABOVE = 999, 1000, 4500, 8000, 8001
LISTENING = (BELOW, FIRST, KEPT, LAST, ABOVE)
SILENT = 2000  # in every range, but the guest does not listen there
BEFORE = f"{FIRST}-{LAST},{FIRST}-{LAST}/udp"
AFTER = f"{SILENT}-{ABOVE},{FIRST}-{LAST}/udp"
REFUSED, NO_ANSWER = "refused", "no answer"


class World(Value, kw_only=True):
    """What there is."""

    client: str
    pod: str
    guest: Guest
    node: Node
    daemon: Running

    def declare(self, ranges: str) -> bool:
        """Save the manifest with these ranges; whether they come to be forwarded."""
        self.node.save("vm.yaml", manifest(self.pod, ranges))
        wanted = (f"{claim.protocol.value} {claim.ports}" for claim in claims(ranges))
        return comes_to_forward(self.pod, *wanted)

    def answer(self, protocol: Protocol, to: str, port: int) -> str:
        """What the client gets who asks there."""
        try:
            with self.connected(protocol, to, port) as flow:
                return said(flow)
        except ConnectionRefusedError:
            return REFUSED
        except OSError:
            return NO_ANSWER

    def expected(self, protocol: Protocol, to: str, port: int) -> str:
        """What the guest answers there: its own kernel, and the client's true address."""
        return f"{self.guest.release} {protocol.value} {port} {CLIENT[POD.index(to)]}"

    def tracks(self, flow: socket.socket) -> bool:
        """Whether the pod's kernel still knows a flow of the client's."""
        version = "ipv6" if flow.family is socket.AF_INET6 else "ipv4"
        known = within(self.pod, "conntrack", "-L", "-f", version)
        return f"sport={flow.getsockname()[1]} " in known

    @contextmanager
    def connected(self, protocol: Protocol, to: str, port: int) -> Iterator[socket.socket]:
        """A flow from the client; for TCP the handshake is done."""
        with socket_in(self.client, to, KINDS[protocol]) as flow:
            flow.settimeout(PATIENCE)
            flow.connect((to, port))
            yield flow


def said(flow: socket.socket) -> str:
    """What is answered over an open flow."""
    flow.send(b"?")
    return flow.recv(200).decode()


def family(address: str) -> str:
    return f"IPv{ip_address(address).version}"


@contextmanager
def built(image: Image) -> Iterator[World]:
    """All of it, running but for the guest, which waits to be started."""
    with (
        TemporaryDirectory() as folder,
        wired() as (client, pod),
        made(Path(folder)) as node,
        guest(pod, image, LISTENING) as machine,
        node.running() as daemon,
    ):
        yield World(client=client, pod=pod, guest=machine, node=node, daemon=daemon)
