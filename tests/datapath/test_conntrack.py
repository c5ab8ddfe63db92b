"""With packets: what a change takes away is closed for open flows too, and nothing else is."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest

from agent.kernel.flush import find
from agent.kernel.kinds import Namespace
from agent.kernel.lab import CLIENT, GUEST, POD, Lab, built
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.probe import asks, connected, echoing
from agent.reconcile import converge
from rules.desired import desire
from rules.model import FORWARDED, Address, Family, Protocol
from rules.ports import PortRange
from rules.stale import Forgotten
from tests.spaces import require, vm, within

PORTS = (1500, 7000)


@pytest.fixture(params=["nftables", "iptables"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Lab, Namespace]]:
    require(request.param)
    kernel = LiveKernel(request.param)
    servers = [(protocol, port) for protocol in FORWARDED for port in PORTS]
    try:
        with (
            built(f"prk{os.getpid()}") as lab,
            kernel.opened(lab.pod) as namespace,
            echoing(lab, lab.guest, servers),
        ):
            yield lab, namespace
    finally:
        kernel.close()


def serve(namespace: Namespace, tcp: int, udp: int) -> None:
    """Forward TCP and UDP from 1000 to these."""
    machine = vm("a", f"1000-{tcp}/tcp,1000-{udp}/udp")
    converge("x", desire([machine], namespace.surroundings()), namespace)


def answers(flow: socket.socket) -> bool:
    flow.settimeout(0.5)
    try:
        return asks(flow) in PORTS
    except OSError:
        return False


@pytest.mark.parametrize("family", Family)
def test_the_kernel_tells_the_same_flows_when_it_is_asked_for_some(
    place: tuple[Lab, Namespace], family: Family
) -> None:
    """As it is where there are thousands."""
    lab, namespace = place
    serve(namespace, 8000, 8000)
    index = list(Family).index(family)
    guest = GUEST[index].ip
    due = [
        Forgotten(family=family, protocol=protocol, ports=(PortRange(7000, 7000),), answerer=guest)
        for protocol in FORWARDED
    ]
    with contextlib.ExitStack() as stack:
        for protocol in FORWARDED:
            for port in PORTS:
                flow = connected(lab, lab.client, POD[index].ip, protocol, port)
                assert asks(stack.enter_context(flow)) == port
        with opened(lab.pod) as descriptor, inside(descriptor, lab.pod):
            all_told, _ = find(due, set(), worth=1000)
            some_told, _ = find(due, set(), worth=0)
    assert len(all_told) == len(FORWARDED)
    assert sorted(one.key for one in some_told) == sorted(one.key for one in all_told)


@pytest.mark.parametrize("address", [one.ip for one in POD], ids=["IPv4", "IPv6"])
def test_only_the_flows_of_ports_that_go_are_cut(
    place: tuple[Lab, Namespace], address: Address
) -> None:
    lab, namespace = place
    serve(namespace, 8000, 8000)
    flows = {
        (protocol, port): connected(lab, lab.client, address, protocol, port)
        for protocol in FORWARDED
        for port in PORTS
    }
    try:
        assert all(answers(flow) for flow in flows.values())
        serve(namespace, 5000, 8000)
        assert {key for key, flow in flows.items() if not answers(flow)} == {(Protocol.TCP, 7000)}
        serve(namespace, 5000, 5000)
        assert {key for key, flow in flows.items() if not answers(flow)} == {
            (Protocol.TCP, 7000),
            (Protocol.UDP, 7000),
        }
    finally:
        for flow in flows.values():
            flow.close()


def test_a_connection_that_never_rests_is_cut_as_well(place: tuple[Lab, Namespace]) -> None:
    """What the guest says while its port goes must not begin the connection anew from its side.
    Without the setting that forbids it, that is what became of every fourth."""
    lab, namespace = place
    for _ in range(12):
        serve(namespace, 8000, 8000)
        with connected(lab, lab.client, POD[0].ip, Protocol.TCP, 7000) as flow:
            assert answers(flow)
            cut = Event()
            talking = Thread(target=talk, args=[flow, cut])
            talking.start()
            serve(namespace, 5000, 8000)
            assert cut.wait(5)
            talking.join(5)


@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_a_guest_that_sends_by_itself_does_not_keep_its_port_open(
    place: tuple[Lab, Namespace], family: int
) -> None:
    """As a phone does: without being asked, a hundred times a second."""
    lab, namespace = place
    address = GUEST[family].ip
    with lab.socket(lab.guest, Family.of(address), socket.SOCK_DGRAM) as guest:
        guest.bind((str(address), 7777))
        guest.settimeout(2)
        for _ in range(3):
            serve(namespace, 8000, 8000)
            with connected(lab, lab.client, POD[family].ip, Protocol.UDP, 7777) as flow:
                flow.send(b"ring")
                _, peer = guest.recvfrom(100)
                over = Event()
                calling = Thread(target=call, args=[guest, peer, over])
                calling.start()
                try:
                    flow.settimeout(1)
                    assert flow.recv(100) == b"media"
                    serve(namespace, 8000, 5000)
                    assert is_silent(flow)
                    flow.send(b"are you there")
                    assert is_silent(flow)
                    assert lasting(lab, 7777) > 500, "whoever sends meanwhile"
                    serve(namespace, 8000, 8000)
                    flow.send(b"again")
                    assert guest.recvfrom(100) == (b"again", peer), "opened again at once"
                    flow.settimeout(1)
                    assert flow.recv(100) == b"media"
                finally:
                    over.set()
                    calling.join(5)


def lasting(lab: Lab, port: int) -> int:
    """The seconds that what is in the place of a flow to this port of the pod will last."""
    listed = within(lab.pod, "conntrack", "-L", "-p", "udp", "--orig-port-dst", str(port))
    listed += within(lab.pod, "conntrack", "-L", "-f", "ipv6", "-p", "udp")
    lines = [line.split() for line in listed.splitlines() if f"dport={port} " in line]
    return max(int(words[2]) for words in lines)


def call(guest: socket.socket, peer: Any, over: Event) -> None:
    for _ in range(3000):
        if over.wait(0.01):
            return
        guest.sendto(b"media", peer)


def is_silent(flow: socket.socket) -> bool:
    """Whether nothing comes but what was on its way."""
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        flow.settimeout(0.1)
        with contextlib.suppress(OSError):
            flow.recv(100)
    flow.settimeout(0.3)
    try:
        flow.recv(100)
    except OSError:
        return True
    return False


def talk(flow: socket.socket, cut: Event) -> None:
    """Without a pause, until nobody answers; but for a while only."""
    flow.settimeout(1)
    for _ in range(100_000):
        try:
            asks(flow)
        except OSError:
            cut.set()
            return


def test_a_flow_from_before_does_not_shadow_a_new_udp_port(place: tuple[Lab, Namespace]) -> None:
    lab, namespace = place
    with (
        lab.socket(lab.pod, Family.IP, socket.SOCK_DGRAM) as local,
        connected(lab, lab.client, POD[0].ip, Protocol.UDP, 1500) as flow,
    ):
        local.bind((str(POD[0].ip), 1500))
        flow.send(b"before")
        assert local.recv(100) == b"before"
        serve(namespace, 8000, 8000)
        assert asks(flow) == 1500


def test_the_guests_own_flow_to_such_a_port_stays_as_it_is(place: tuple[Lab, Namespace]) -> None:
    lab, namespace = place
    serve(namespace, 1001, 1001)
    with (
        lab.socket(lab.client, Family.IP, socket.SOCK_DGRAM) as outside,
        connected(lab, lab.guest, CLIENT[0].ip, Protocol.UDP, 1500) as flow,
    ):
        outside.bind((str(CLIENT[0].ip), 1500))
        outside.settimeout(2)
        flow.send(b"1")
        _, before = outside.recvfrom(100)
        serve(namespace, 8000, 8000)
        outside.sendto(b"answer", before)
        assert flow.recv(100) == b"answer"
