"""What tests of published Services have in common: the daemon on a node with machines behind it,
servers on many ports, and flows that are asked over while something changes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rules.model import FORWARDED, NODE, Family, Protocol
from tests.daemon.running import Node, Running
from tests.datapath.traffic import allow_descriptors, sockets
from tests.nodes import CLIENT4, CLIENT6, KINDS, NODE4, NODE6, Net, asked, socket_in, vm_manifest
from tests.spaces import eventually, ip, within

TCP, UDP, SCTP = Protocol
PATIENCE = 20.0  # seconds
AT = {Family.IP: NODE4, Family.IP6: NODE6}  # where the node is
FROM = {Family.IP: CLIENT4, Family.IP6: CLIENT6}
FLOWS = [(family, protocol) for family in Family for protocol in FORWARDED]
NAMES = ("one", "two", "three")  # of the machines, in what they answer
RANGE = {"node_ports.range": "20000-32767"}

Ports = Iterable[tuple[Protocol, int]]


# ----------------------------------------------------------------------------------- the daemon


class Publishing:
    """A daemon that publishes, and the files that tell it what."""

    def __init__(self, lab: Net, node: Node, daemon: Running) -> None:
        self.lab, self.node, self.daemon = lab, node, daemon

    def changed(self, change: Callable[[], object]) -> None:
        """Do it, and wait until the node's rules are others and all is applied, flows included."""
        before = len(self.daemon.said("applied", netns=NODE))
        change()
        assert self.daemon.says("applied", times=before + 1, netns=NODE), self.notes
        assert self.daemon.applied(), self.notes

    @property
    def notes(self) -> str:
        """What a person is told of the node."""
        standing = self.daemon.standing(NODE)
        return f"{standing.get('state')}: {standing.get('why')} {standing.get('notes')}"


@contextmanager
def publishing(
    folder: Path, lab: Net, service: str, ranges: str, **settings: object
) -> Iterator[Publishing]:
    """Every machine of the lab has these ranges, and the node publishes this Service."""
    node = Node(folder, lab.node, **{**RANGE, **settings})
    for vm in lab.vms:
        node.save(f"vm{vm.number}.yaml", vm_manifest(vm, ranges))
    node.save("service.yaml", service)
    _settle(lab)
    with node.running() as daemon:
        made = Publishing(lab, node, daemon)
        assert daemon.is_in("in sync", NODE, PATIENCE), made.notes
        yield made


def _settle(lab: Net) -> None:
    """A bridge has the lowest address of its links, and another one when that link goes: then all
    others would send to nobody for a while. And whoever asks for a closed port is told so, each
    time: else that is waited for."""
    ip(lab.node, "link set br0 address 02:00:00:00:00:01")
    names = ("net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
    for name in (lab.node, *(vm.pod for vm in lab.vms)):
        within(name, "sysctl", "-qw", *names)


# ------------------------------------------------------------------------------------- servers


@contextmanager
def everywhere(lab: Net, ports: Ports) -> Iterator[None]:
    """Servers in every guest, that answer as `serving` says."""
    wanted = list(ports)
    with ExitStack() as stack:
        for vm, name in zip(lab.vms, NAMES, strict=False):
            stack.enter_context(serving(vm.guest, name, wanted))
        yield


@contextmanager
def serving(where: str, name: str, ports: Ports) -> Iterator[None]:
    """Servers of both families that answer `name port peer`: who they are, on which port, and whom
    they see. All in one thread: there may be thousands."""
    wanted = list(ports)
    allow_descriptors(8 * len(wanted) + 500)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for family in Family:
            for protocol in FORWARDED:
                own = [port for of, port in wanted if of is protocol]
                made = sockets(where, family, KINDS[protocol], len(own))
                for server, port in zip(made, own, strict=True):
                    stack.callback(server.close)
                    _listen(server, family, protocol, port)
                    selector.register(server, selectors.EVENT_READ, (protocol, f"{name} {port}"))
        wake, woken = socket.socketpair()
        stack.callback(wake.close)
        stack.callback(woken.close)
        selector.register(woken, selectors.EVENT_READ, None)
        thread = threading.Thread(target=_serve, args=(selector, stack), daemon=True)
        thread.start()
        try:
            yield
        finally:
            wake.send(b"x")
            thread.join(PATIENCE)


def _listen(server: socket.socket, family: Family, protocol: Protocol, port: int) -> None:
    if family is Family.IP6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("::" if family is Family.IP6 else "0.0.0.0", port))
    if protocol is TCP:
        server.listen(64)
    server.setblocking(False)


def _serve(selector: selectors.BaseSelector, stack: ExitStack) -> None:
    while True:
        for key, _ in selector.select():
            if key.data is None:
                return
            one: socket.socket = key.fileobj  # type: ignore[assignment]  # only these are registered
            try:
                _answer(selector, stack, one, *key.data)
            except OSError:
                continue  # the client went away: its own test will say so


def _answer(
    selector: selectors.BaseSelector,
    stack: ExitStack,
    one: socket.socket,
    protocol: Protocol | None,
    words: str,
) -> None:
    if protocol is TCP:
        connection, peer = one.accept()
        stack.callback(connection.close)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, (None, f"{words} {peer[0]}"))
    elif protocol is UDP:
        _, peer = one.recvfrom(100)
        one.sendto(f"{words} {peer[0]}".encode(), peer)
    else:
        try:
            if one.recv(100):
                one.sendall(words.encode())
                return
        except ConnectionError:
            pass  # as good as an end
        selector.unregister(one)
        one.close()


# ------------------------------------------------------------------------------------- clients


def answerers(where: str, protocol: Protocol, to: str, port: int, flows: int) -> list[str]:
    """Who answers so many new flows."""
    answers = [asked(where, protocol, to, port) for _ in range(flows)]
    return [answer.partition(" ")[0] for answer in answers]


class Flow:
    """An open flow, over which one can ask."""

    def __init__(self, where: str, protocol: Protocol, to: str, port: int) -> None:
        self._socket = socket_in(where, to, KINDS[protocol])
        self._socket.settimeout(PATIENCE)  # what is lost is never answered, however long one waits
        self._socket.connect((to, port))
        self._lock = threading.Lock()

    def close(self) -> None:
        self._socket.close()

    def ask(self) -> str:
        """What is answered; nothing where nobody does."""
        with self._lock:
            try:
                self._socket.send(b"?")
                return self._socket.recv(100).decode()
            except OSError:
                return ""

    @property
    def who(self) -> str:
        """Who answers."""
        return self.ask().partition(" ")[0]

    def is_cut(self) -> bool:
        """Whether it comes to be answered no more."""
        self._socket.settimeout(0.2)
        return eventually(lambda: not self.ask(), PATIENCE) and not self.ask()


def flow_to(who: str, where: str, protocol: Protocol, to: str, port: int) -> Flow:
    """An open flow that this machine answers."""
    for _ in range(64):
        made = Flow(where, protocol, to, port)
        if made.who == who:
            return made
        made.close()
    raise AssertionError(f"{who} answers nobody at {to} {port}")


@contextmanager
def asking(*flows: Flow) -> Iterator[list[set[str]]]:
    """Asks over all of them, again and again; what each was answered is there at the end."""
    answers: list[set[str]] = [set() for _ in flows]
    stop = threading.Event()
    rounds = 0

    def ask() -> None:
        nonlocal rounds
        while not stop.is_set():
            for flow, heard in zip(flows, answers, strict=True):
                heard.add(flow.ask())
            rounds += 1

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        assert eventually(lambda: rounds > 10, PATIENCE)
        yield answers
        after = rounds + 10
        assert eventually(lambda: rounds > after, PATIENCE)
    finally:
        stop.set()
        thread.join(PATIENCE)
