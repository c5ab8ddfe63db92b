"""A node with machines behind it, for what is published: throwaway namespaces, wired.

    client (198.51.100.9) ── eth0 (198.51.100.2) node br0 (10.1.0.1) ── eth0 (10.1.0.11) machine 1
                                                                    ── eth0 (10.1.0.12) machine 2

Behind k6t-eth0 of each machine's namespace is its guest (10.0.2.2), as virt-launcher would have it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from agent.kernel.netns import inside, opened
from rules.model import Protocol
from tests.spaces import ip, run, space

PATIENCE = 5.0
KINDS = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}
NODE4, NODE6 = "198.51.100.2", "2001:db8:5::2"
CLIENT4, CLIENT6 = "198.51.100.9", "2001:db8:5::9"


@dataclass
class Vm:
    """A machine's namespace and its guest's."""

    number: int
    pod: str
    guest: str

    @property
    def address(self) -> str:
        return f"10.1.0.{10 + self.number}"

    @property
    def address6(self) -> str:
        return f"fd01::{10 + self.number}"


@dataclass
class Net:
    """The names of the namespaces."""

    client: str
    node: str
    vms: list[Vm] = field(default_factory=list)


def _quiet(name: str) -> None:
    """No duplicate detection: nobody else is on these links, and it would take a second."""
    for scope in ("all", "default"):
        run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv6.conf.{scope}.accept_dad=0")


@contextmanager
def net(machines: int = 2, *, bridged: bool = True) -> Iterator[Net]:
    """So many machines behind a node; not bridged, each has a link of its own there."""
    with ExitStack() as stack:
        client, node = stack.enter_context(space()), stack.enter_context(space())
        made = Net(client, node)
        for name in (client, node):
            _quiet(name)
        ip(
            node,
            "link set lo up",
            f"link add eth0 type veth peer name eth0 netns {client}",
            f"addr add {NODE4}/24 dev eth0",
            f"addr add {NODE6}/64 dev eth0 nodad",
            "link set eth0 up",
            "link add br0 type bridge mcast_snooping 0",
            "addr add 10.1.0.1/24 dev br0",
            "addr add fd01::1/64 dev br0 nodad",
            "link set br0 up",
        )
        ip(
            client,
            "link set lo up",
            f"addr add {CLIENT4}/24 dev eth0",
            f"addr add {CLIENT6}/64 dev eth0 nodad",
            "link set eth0 up",
        )
        for number in range(1, machines + 1):
            made.vms.append(stack.enter_context(_vm(node, number, bridged=bridged)))
        yield made


@contextmanager
def _vm(node: str, number: int, *, bridged: bool) -> Iterator[Vm]:
    with space() as pod, space() as guest:
        vm = Vm(number, pod, guest)
        for name in (pod, guest):
            _quiet(name)
        link = f"vm{number}"
        lines = [f"link add {link} type veth peer name eth0 netns {pod}"]
        if bridged:
            lines += [f"link set {link} master br0 up"]
            gateway, gateway6, bits, bits6 = "10.1.0.1", "fd01::1", 24, 64
        else:
            lines += [
                f"link set {link} up",
                f"addr add 169.254.1.1/32 dev {link}",
                f"addr add fd02::{number:x}:1/128 dev {link} nodad",
                f"route add {vm.address}/32 dev {link}",
                f"route add {vm.address6}/128 dev {link}",
            ]
            gateway, gateway6, bits, bits6 = "169.254.1.1", f"fd02::{number:x}:1", 32, 128
        ip(node, *lines)
        ip(
            pod,
            "link set lo up",
            f"addr add {vm.address}/{bits} dev eth0",
            f"addr add {vm.address6}/{bits6} dev eth0 nodad",
            "link set eth0 up",
            *([] if bridged else [f"route add {gateway}/32 dev eth0"]),
            *([] if bridged else [f"route add {gateway6}/128 dev eth0"]),
            f"route add default via {gateway} dev eth0",
            f"route add default via {gateway6} dev eth0",
            "link add k6t-eth0 type bridge mcast_snooping 0",
            "addr add 10.0.2.1/24 dev k6t-eth0",
            "addr add fd10:0:2::1/120 dev k6t-eth0 nodad",
            "link set k6t-eth0 up",
            f"link add tap0 type veth peer name eth0 netns {guest}",
            "link set tap0 master k6t-eth0 up",
        )
        ip(
            guest,
            "link set lo up",
            "addr add 10.0.2.2/24 dev eth0",
            "addr add fd10:0:2::2/120 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.0.2.1",
            "route add default via fd10:0:2::1",
        )
        yield vm


# ---------------------------------------------------------------------------------------- packets


def socket_in(where: str, to: str, kind: socket.SocketKind, protocol: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with opened(where) as descriptor, inside(descriptor, where):
        made = socket.socket(family, kind, protocol)
    made.settimeout(PATIENCE)
    return made


@contextmanager
def answering(
    where: str, name: str, ports: Sequence[tuple[Protocol, int]], *, v6: bool = True
) -> Iterator[None]:
    """Servers that answer `name port peer`: who they are, on which port, and whom they see."""
    made: list[socket.socket] = []
    threads: list[threading.Thread] = []
    stop = threading.Event()
    try:
        for protocol, port in ports:
            for any_address in ("0.0.0.0", "::") if v6 else ("0.0.0.0",):
                server = socket_in(where, any_address, KINDS[protocol])
                made.append(server)
                if any_address == "::":
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((any_address, port))
                if protocol is Protocol.TCP:
                    server.listen(64)
                server.settimeout(0.1)
                work = _stream if protocol is Protocol.TCP else _datagrams
                thread = threading.Thread(target=work, args=(server, name, port, stop), daemon=True)
                thread.start()
                threads.append(thread)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        for server in made:
            server.close()


def _stream(server: socket.socket, name: str, port: int, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            connection, peer = server.accept()
        except OSError:
            continue
        thread = threading.Thread(
            target=_converse, args=(connection, f"{name} {port} {peer[0]}", stop), daemon=True
        )
        thread.start()


def _converse(connection: socket.socket, words: str, stop: threading.Event) -> None:
    connection.settimeout(0.1)
    with connection:
        while not stop.is_set():
            try:
                if not connection.recv(100):
                    return
                connection.sendall(words.encode())
            except TimeoutError:
                continue
            except OSError:
                return


def _datagrams(server: socket.socket, name: str, port: int, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            _, peer = server.recvfrom(100)
            server.sendto(f"{name} {port} {peer[0]}".encode(), peer)
        except OSError:
            continue


def asked(where: str, protocol: Protocol, to: str, port: int, source: str = "") -> str:
    """What is answered there; nothing where nobody does: who is refused hears that at once, and an
    answer may be late on a busy machine."""
    with socket_in(where, to, KINDS[protocol]) as client:
        client.settimeout(PATIENCE)
        try:
            if source:
                client.bind((source, 0))
            client.connect((to, port))
            client.send(b"?")
            return client.recv(100).decode()
        except OSError:
            return ""


# -------------------------------------------------------------------------------------- manifests


def vm_manifest(vm: Vm, ranges: str, labels: str = "app: phone") -> str:
    """A machine whose guest has these ports: `22,1000-8000/udp`."""
    return f"""\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: vm{vm.number}, annotations: {{portranger.io/netns: {vm.pod}}}}}
spec:
  template:
    metadata:
      labels: {{{labels}}}
      annotations: {{portranger.io/port-ranges: "{ranges}"}}
    spec:
      domain: {{devices: {{interfaces: [{{name: red, masquerade: {{}}}}]}}}}
      networks: [{{name: red, pod: {{}}}}]
---
"""


def service_manifest(  # noqa: PLR0913 - what a Service can say
    ports: Sequence[str],
    *,
    name: str = "phone",
    kind: str = "NodePort",
    ends: str = "",
    selector: str = "app: phone",
    more: str = "",
) -> str:
    """`ports` are items of YAML, `ends` annotations such as `rtp: 10999`."""
    annotations = "".join(
        f"    portrange.alpha.kubernetes.io/port-end-{pair.split(':')[0].strip()}:"
        f' "{pair.split(":")[1].strip()}"\n'
        for pair in ends.split(",")
        if pair
    )
    listed = "".join(f"    - {{{port}}}\n" for port in ports)
    return (
        f"apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n"
        + (f"  annotations:\n{annotations}" if annotations else "")
        + f"spec:\n  type: {kind}\n  selector: {{{selector}}}\n"
        + "".join(f"  {line}\n" for line in more.splitlines())
        + f"  ports:\n{listed}---\n"
    )
