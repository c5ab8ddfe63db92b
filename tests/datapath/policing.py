"""What tests of NetworkPolicies have in common: the daemon on a node, machines behind it that
policies select, neighbours that policies speak of, and questions asked by all of them at once."""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from agent.commands.common import intents
from agent.sources.files import load
from rules.model import NODE, POLICED, Family, Live, Protocol
from rules.values import replace
from tests.daemon.running import Node, Running
from tests.datapath.publishing import TCP, UDP, Ports, serving
from tests.nodes import KINDS, NODE4, NODE6, Net, Vm, net, socket_in
from tests.spaces import NFTABLES, eventually, ip, kernel, observed, within

PATIENCE = 20.0  # seconds, for what should happen
A_MOMENT = 0.25  # for what should not; over links like these a packet takes microseconds
POLICY = "policy.yaml"  # the file

# Neighbours are addresses of the client, by their last number; all but these two are Pods.
STRANGER, ODD = "stranger", "odd"
NEIGHBOURS = {
    STRANGER: 9, ODD: 77,
    "front": 21, "friend": 22, "keeper": 23, "other": 24, "lost": 25, "bare": 26,
}  # fmt: skip
MACHINE = "machine"  # the second, which is a neighbour of the first

PODS = {  # namespace, labels, ports
    "front": ("default", "role: web, tier: front", "name: http, containerPort: 8080"),
    "friend": ("friends", "role: web, tier: front", "name: http, containerPort: 8090"),
    "keeper": ("friends", "role: db", "name: dns, containerPort: 5005, protocol: UDP"),
    "other": ("others", "role: web", "containerPort: 80"),
    "lost": ("nowhere", "role: web", "containerPort: 80"),  # of which there is no Namespace
    "bare": ("default", "", "containerPort: 80"),
}
SPACES = {
    "default": "stage: prod",
    "friends": "team: friends, stage: test",
    "others": "team: others, stage: prod",
}

SERVED = [
    *((TCP, port) for port in (80, 85, 89, 90, 443, 8080, 8090)),
    *((UDP, port) for port in (53, 85, 5000, 5005, 5006)),
]
PORTS = (  # of both machines; the second calls another port http
    "port: 81, end: 84",
    "port: 86, end: 99",
    "port: 443",
    "port: 8080, end: 8090",
    "name: dns, port: 53, protocol: UDP",
    "port: 85, protocol: UDP",
    "port: 5000, end: 5010, protocol: UDP",
)
FIRST = ("name: http, port: 80", "port: 85", *PORTS)
SECOND = ("port: 80", "name: http, port: 85", *PORTS)
LABELS = "app: phone, tier: back"  # of the first


def address(who: str, family: Family) -> str:
    """Of a neighbour."""
    number = NEIGHBOURS[who]
    return f"198.51.100.{number}" if family is Family.IP else f"2001:db8:5::{number}"


def at(vm: Vm, family: Family) -> str:
    """Where others reach a machine."""
    return vm.address if family is Family.IP else vm.address6


# ------------------------------------------------------------------------------------ manifests


def machine(vm: Vm, ports: Sequence[str], labels: str) -> str:
    """A machine whose guest has these ports, as items of YAML; none: everything is forwarded."""
    listed = "".join(f"              - {{{port}}}\n" for port in ports)
    return f"""\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: vm{vm.number}, annotations: {{portranger.io/netns: {vm.pod}}}}}
spec:
  template:
    metadata: {{labels: {{{labels}}}}}
    spec:
      domain:
        devices:
          interfaces:
            - name: red
              masquerade: {{}}
{"              ports:" if listed else ""}
{listed}
      networks: [{{name: red, pod: {{}}}}]
---
"""


def pod(name: str, namespace: str, labels: str, ports: str, *addresses: str) -> str:
    listed = ", ".join(f"{{ip: '{one}'}}" for one in addresses)
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}
spec: {{containers: [{{name: main, ports: [{{{ports}}}]}}]}}
status: {{podIPs: [{listed}]}}
---
"""


def everybody() -> str:
    """All Pods and Namespaces there are."""
    pods = [pod(name, *PODS[name], *(address(name, family) for family in Family)) for name in PODS]
    spaces = [
        f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n---\n"
        for name, labels in SPACES.items()
    ]
    return "".join(pods + spaces)


def policy(spec: str, name: str = "web", namespace: str = "default") -> str:
    """A policy of this specification, in one line of YAML."""
    return (
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"
        f"metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n---\n"
    )


Question = tuple[str, str, Protocol, int]  # which way, with whom, where
PHONE = "podSelector: {matchLabels: {app: phone}}"  # the first machine
ALL4, ALL6 = "{ipBlock: {cidr: 198.51.100.0/24}}", "{ipBlock: {cidr: '2001:db8:5::/64'}}"
BOTH = f"{PHONE}, policyTypes: [Ingress, Egress]"
CLOSED = policy(BOTH)


# ------------------------------------------------------------------------------------- the town


class Town:
    """A daemon on a node with machines, and the files that tell it what."""

    def __init__(self, lab: Net, node: Node, daemon: Running) -> None:
        self.lab, self.node, self.daemon = lab, node, daemon

    def save(self, text: str, name: str = POLICY) -> None:
        """Write a file, and wait until all that is written is enforced."""
        self.node.save(name, text)
        self.settle()

    def settle(self) -> None:
        assert self.daemon.applied(), self.daemon.log.read_text()
        assert self.is_settled(), self.daemon.log.read_text()

    def is_settled(self) -> bool:
        """Whether there is nothing left to do, as another one sees it who reads the same files."""
        snapshot = load([str(self.node.manifests)], bytes)
        assert not snapshot.problems, [str(one) for one in snapshot.problems]
        found, failures = intents(
            replace(snapshot, services=()), kernel(NFTABLES), node=self.lab.node
        )
        return not failures and all(one.plan.empty for one in found)

    def changed(self, change: Callable[[], object], vm: Vm) -> None:
        """Do it, and wait until the daemon says that rules of the machine are others."""
        before = len(self.daemon.said("applied", netns=vm.pod))
        change()
        assert self.daemon.says("applied", times=before + 1, netns=vm.pod)

    def cut(self, change: Callable[[], object]) -> None:
        """Do it, and wait until flows were forgotten because of it."""
        before = self.daemon.metric("conntrack_forgotten_total")
        self.changed(change, self.first)
        assert eventually(lambda: self.daemon.metric("conntrack_forgotten_total") > before)

    @property
    def first(self) -> Vm:
        """Whom policies select."""
        return self.lab.vms[0]

    def asked(
        self, way: str, who: str, protocol: Protocol, port: int, family: Family = Family.IP
    ) -> Ask:
        """The question of a neighbour to the first machine, or the other way round, and who should
        answer it and see whom."""
        one, two = self.lab.vms[0], self.lab.vms[-1]
        theirs = at(two, family) if who == MACHINE else address(who, family)
        if way == "in":
            where, source = (two.guest, "") if who == MACHINE else (self.lab.client, theirs)
            return Ask(where, source, protocol, at(one, family), port, f"one {port} {theirs}")
        server = "two" if who == MACHINE else "outside"
        answer = f"{server} {port} {at(one, family)}"
        return Ask(one.guest, "", protocol, theirs, port, answer)

    def passes(self, way: str, who: str, protocol: Protocol, port: int) -> bool:
        """Whether it does, in both families alike."""
        asks = [self.asked(way, who, protocol, port, family) for family in Family]
        found = answered(asks)
        assert len(found) != 1, found
        return bool(found)

    def assert_open(self, *wanted: Question, shut: Collection[Question] = ()) -> None:
        """That these pass, and those do not, in both families."""
        asks = {self.asked(*one, family): one for one in (*wanted, *shut) for family in Family}
        hoped = [ask for ask, one in asks.items() if one in wanted]
        assert answered(list(asks), hoped) == set(hoped)

    def fences(self, vm: Vm | None = None) -> list[Live]:
        """The rules of policies, in front of a machine; without one, of the first."""
        live = observed((vm or self.first).pod).live
        return [one for one in live if one.rule.chain in POLICED]

    def granted(self) -> set[str]:
        """What they accept of new flows: `ip tcp 80-89`."""
        rules = [live.rule for live in self.fences()]
        return {
            f"{one.family.value} {one.protocol.value if one.protocol else 'any'} {one.ports}"
            for one in rules
            if one.accepts and not one.resumes and one.owner != NODE
        }


OTHER = "preferred_lft 0 nodad"


@contextmanager
def wired() -> Iterator[Net]:
    """Two machines, and neighbours who know the way to them."""
    with net(2) as lab:
        within(
            *(lab.node, "sysctl", "-qw"),
            *("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"),
        )
        more = [who for who in NEIGHBOURS if who != STRANGER]
        ip(
            lab.client,
            *(f"addr add {address(who, Family.IP)}/24 dev eth0" for who in more),
            # Of several, the kernel would take any; of those that it is to prefer there is one.
            *(
                f"addr add {address(who, Family.IP6)}/64 dev eth0 preferred_lft 0 nodad"
                for who in more
            ),
            f"route add 10.1.0.0/24 via {NODE4}",
            f"route add fd01::/64 via {NODE6}",
        )
        yield lab


def written(folder: Path, lab: Net) -> Node:
    """What a daemon lives on: both machines, and everybody."""
    node = Node(folder, lab.node)
    node.save("vm1.yaml", machine(lab.vms[0], FIRST, LABELS))
    node.save("vm2.yaml", machine(lab.vms[1], SECOND, "role: client"))
    node.save("everybody.yaml", everybody())
    return node


@contextmanager
def policed(folder: Path, lab: Net) -> Iterator[Town]:
    """The daemon, that knows of no policy yet."""
    node = written(folder, lab)
    with node.running() as daemon:
        yield Town(lab, node, daemon)


@contextmanager
def served(lab: Net) -> Iterator[None]:
    """Servers of all neighbours, and in both guests."""
    with (
        outside(lab, SERVED),
        serving(lab.vms[0].guest, "one", SERVED),
        serving(lab.vms[1].guest, "two", SERVED),
    ):
        yield


@contextmanager
def outside(lab: Net, ports: Ports) -> Iterator[None]:
    """Servers of all neighbours."""
    wanted = list(ports)
    streams = [(protocol, port) for protocol, port in wanted if protocol is TCP]
    with serving(lab.client, "outside", streams), _datagrams(lab.client, "outside", wanted):
        yield


@contextmanager
def _datagrams(where: str, name: str, wanted: Ports) -> Iterator[None]:
    """Servers that answer from the address that was asked: of one socket for all, the kernel would
    choose it."""
    over = threading.Event()
    ports = [port for protocol, port in wanted if protocol is UDP]
    whose = [address(who, family) for who in NEIGHBOURS for family in Family]
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for to, port in itertools.product(whose, ports):
            made = stack.enter_context(socket_in(where, to, socket.SOCK_DGRAM))
            made.bind((to, port))
            selector.register(made, selectors.EVENT_READ, f"{name} {port}")

        def serve() -> None:
            while not over.is_set():
                for key, _ in selector.select(0.1):
                    made: socket.socket = key.fileobj  # type: ignore[assignment]  # nothing else is
                    with suppress(OSError):  # who asked went away
                        _, peer = made.recvfrom(100)
                        made.sendto(f"{key.data} {peer[0]}".encode(), peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE)


def bound(where: str, family: Family, kind: socket.SocketKind, port: int) -> socket.socket:
    """A socket of its own on all addresses of that family there."""
    anywhere = "::" if family is Family.IP6 else "0.0.0.0"
    made = socket_in(where, anywhere, kind)
    if family is Family.IP6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((anywhere, port))
    return made


# ------------------------------------------------------------------------------------ questions


class Ask(NamedTuple):
    """A question in a new flow, and its answer: who answers, at which port, and sees whom."""

    where: str
    source: str  # "": whichever the kernel takes
    protocol: Protocol
    to: str
    port: int
    answer: str = ""  # "": any


def answered(asks: Collection[Ask], hoped: Collection[Ask] | None = None) -> set[Ask]:
    """Those that were answered, all asked at once. It waits for those that should be, and then a
    moment for the others; without knowing which should be, a little longer."""
    heard: dict[Ask, str] = {}
    wanted = set(asks if hoped is None else hoped)
    end = time.monotonic() + (PATIENCE if hoped is not None else 4 * A_MOMENT)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for one in asks:
            made = stack.enter_context(socket_in(one.where, one.to, KINDS[one.protocol]))
            _begin(selector, made, one)
        while True:
            if hoped is not None and wanted <= heard.keys():
                end, hoped = time.monotonic() + A_MOMENT, None
            left = end - time.monotonic()
            if left <= 0 or len(heard) == len(asks):
                break
            for key, _ in selector.select(left):
                made = key.fileobj  # type: ignore[assignment]  # only these are registered
                if text := _continue(selector, made, key.data):
                    heard[key.data] = text
    odd = {one: text for one, text in heard.items() if one.answer not in ("", text)}
    assert not odd, odd
    return set(heard)


def _begin(selector: selectors.BaseSelector, made: socket.socket, one: Ask) -> None:
    if one.source:
        made.bind((one.source, 0))
    made.setblocking(False)
    made.connect_ex((one.to, one.port))
    if one.protocol is UDP:
        made.send(b"?")
    event = selectors.EVENT_WRITE if one.protocol is TCP else selectors.EVENT_READ
    selector.register(made, event, one)


def _continue(selector: selectors.BaseSelector, made: socket.socket, one: Ask) -> str:
    """What was answered; nothing yet, or for ever."""
    try:
        if selector.get_key(made).events & selectors.EVENT_WRITE:
            made.send(b"?")
            selector.modify(made, selectors.EVENT_READ, one)
            return ""
        text = made.recv(100).decode()
    except OSError:
        text = ""
    selector.unregister(made)
    return text
