"""Forwarding, proved by packets between throwaway namespaces: what is declared arrives at the
guest, on the same port and from the same sender; what is not, does not; and nothing that flows is
lost while other ranges change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

import pytest

from agent.kernel.lab import CLIENT, GATEWAY, POD, Lab
from agent.kernel.live import LiveKernel
from agent.kernel.probe import asks, connected, echoing, reached
from agent.reconcile import converge
from rules.desired import desire
from rules.model import FORWARDED, Address, Chain, Family, Live, Protocol
from rules.ports import PortRange
from rules.values import replace
from tests.datapath.traffic import Seen, echo, listening, pinged, probed, sockets
from tests.spaces import (
    BACKENDS,
    IPTABLES,
    LOOPBACK,
    NFTABLES,
    applied,
    asked,
    eventually,
    ip,
    kernel,
    lab,
    legacy,
    observed,
    saved,
    using,
    vm,
    wanted,
    within,
)

FLOWS = [(family, protocol) for family in Family for protocol in FORWARDED]
BOTH = "1000-8000,1000-8000/udp"


@pytest.fixture(scope="module", params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test is run with each backend."""
    with using(request.param) as asked_for:
        yield asked_for


@pytest.fixture
def wired(backend: str) -> Iterator[Lab]:
    with lab() as made:
        yield made


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[Lab]:
    """A lab for tests that say themselves what is to be forwarded in it."""
    with lab() as made:
        yield made


def at(addresses: tuple[Address, ...], family: Family) -> Address:
    return next(address for address in addresses if Family.of(address) is family)


POD_AT = tuple(address.ip for address in POD)
CLIENT_AT = tuple(address.ip for address in CLIENT)
GATEWAY_AT = tuple(address.ip for address in GATEWAY)


def flows_of(*ports: int) -> list[tuple[Family, Protocol, int]]:
    return [(family, protocol, port) for family, protocol in FLOWS for port in ports]


# --------------------------------------------------------------------------- what is forwarded


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_every_port_of_a_range_arrives_and_its_neighbours_do_not(
    wired: Lab, family: Family, protocol: Protocol
) -> None:
    applied(wired.pod, vm("desktop", BOTH))
    ports = range(999, 8002)
    with listening(wired.guest, family, protocol, ports) as servers:
        answers = probed(wired.client, at(POD_AT, family), protocol, servers)
    client = str(at(CLIENT_AT, family))
    expected: dict[int, Seen | None] = {port: Seen(port, client) for port in range(1000, 8001)}
    assert answers == {**expected, 999: None, 8001: None}


def test_a_range_is_of_its_protocol_only(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", "2000-2009,3000-3009/udp"))
    servers = [(protocol, port) for protocol in FORWARDED for port in (2000, 2009, 3000, 3009)]
    with echoing(shared, shared.guest, servers):
        answers = {
            (protocol, port): {
                reached(shared, shared.client, address, protocol, port) for address in POD_AT
            }
            for protocol, port in servers
        }
    declared = {(Protocol.TCP, 2000), (Protocol.TCP, 2009), (Protocol.UDP, 3000)}
    declared.add((Protocol.UDP, 3009))
    assert answers == {
        (protocol, port): {port if (protocol, port) in declared else None}
        for protocol, port in servers
    }


def test_what_the_guest_offers_but_nobody_declared_stays_shut(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", "80"))
    ports = (1, 22, 79, 81, 8080, 65535)
    for family, protocol in FLOWS:
        with listening(shared.guest, family, protocol, ports) as servers:
            answers = probed(shared.client, at(POD_AT, family), protocol, servers)
        assert answers == dict.fromkeys(ports), (family, protocol)


def test_single_ports_at_both_ends_of_the_number_space_are_forwarded(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", "1,65535,1/udp,65535/udp"))
    for family, protocol in FLOWS:
        with listening(shared.guest, family, protocol, (1, 2, 65534, 65535)) as servers:
            answers = probed(shared.client, at(POD_AT, family), protocol, servers)
        assert {port for port, seen in answers.items() if seen} == {1, 65535}


def test_the_pod_itself_answers_where_nothing_is_declared(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", "80"))
    for address in POD_AT:
        assert pinged(shared.client, address) == 64
    with echo(shared.pod, flows_of(8080)) as server:
        for family, protocol in FLOWS:
            with connected(shared, shared.client, at(POD_AT, family), protocol, 8080) as client:
                client.send(b"pod?")
                server.turn()
                server.turn(0.1)
                assert client.recv(16) == b"pod?"


def test_where_nothing_is_declared_everything_is_forwarded(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", None))
    ports = (1, 22, 999, 8001, 40000, 65535)
    for family, protocol in FLOWS:
        with listening(wired.guest, family, protocol, ports) as servers:
            answers = probed(wired.client, at(POD_AT, family), protocol, servers)
        client = str(at(CLIENT_AT, family))
        assert answers == {port: Seen(port, client) for port in ports}
    for address in POD_AT:
        assert pinged(wired.client, address) == 63, "one hop further than the pod: the guest"


def test_a_catch_all_leaves_neighbour_discovery_to_the_pod(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", None))
    for _ in range(2):  # a client that has never heard of the pod, and one that forgot it
        within(wired.client, "ip", "neigh", "flush", "all")
        within(wired.pod, "ip", "neigh", "flush", "all")
        for address in POD_AT:
            assert pinged(wired.client, address) == 63


def test_networks_of_its_own_are_forwarded_to(wired: Lab) -> None:
    ip(
        wired.pod,
        "addr flush dev k6t-eth0 scope global",
        "addr add 172.16.9.1/29 dev k6t-eth0",
        "addr add fd77:9::1/64 dev k6t-eth0 nodad",
    )
    ip(
        wired.guest,
        "addr flush dev eth0 scope global",
        "addr add 172.16.9.2/29 dev eth0",
        "addr add fd77:9::2/64 dev eth0 nodad",
        "route add default via 172.16.9.1",
        "route replace ::/0 via fd77:9::1",
    )
    applied(wired.pod, vm("desktop", BOTH, ipv4="172.16.9.0/29", ipv6="fd77:9::/64"))
    for family, protocol in FLOWS:
        with listening(wired.guest, family, protocol, (999, 1000, 8000, 8001)) as servers:
            answers = probed(wired.client, at(POD_AT, family), protocol, servers)
        assert [port for port, seen in answers.items() if seen] == [1000, 8000]
    with echoing(wired, wired.guest, [(Protocol.TCP, 1000)]):
        assert reached(wired, wired.pod, LOOPBACK[0], Protocol.TCP, 1000) == 1000


def test_an_ipv4_only_pod_gets_no_ipv6_rules() -> None:
    with lab((Family.IP,)) as made:
        applied(made.pod, vm("desktop", BOTH))
        assert {live.rule.family for live in observed(made.pod).live} == {Family.IP}
        assert "ip6" not in within(made.pod, "nft", "list", "ruleset")
        assert "PORTRANGER" not in within(made.pod, "ip6tables-legacy-save")
        with listening(made.guest, Family.IP, Protocol.TCP, (999, 1000)) as servers:
            answers = probed(made.client, POD_AT[0], Protocol.TCP, servers)
        assert [port for port, seen in answers.items() if seen] == [1000]


def test_an_ipv6_only_pod_gets_no_ipv4_rules() -> None:
    with lab((Family.IP6,)) as made:
        applied(made.pod, vm("desktop", BOTH))
        assert {live.rule.family for live in observed(made.pod).live} == {Family.IP6}
        with listening(made.guest, Family.IP6, Protocol.UDP, (999, 1000)) as servers:

            def reached() -> list[int]:
                answers = probed(made.client, POD_AT[1], Protocol.UDP, servers)
                return [port for port, seen in answers.items() if seen]

            # The first packet may be lost while neighbours look for each other.
            assert eventually(lambda: reached() == [1000])
            assert reached() == [1000]


# ------------------------------------------------------------------------ whose address is seen


def test_the_guest_sees_the_address_of_the_client(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", "1000-1001,1000-1001/udp"))
    for family, protocol in FLOWS:
        with listening(shared.guest, family, protocol, (1000, 1001)) as servers:
            answers = probed(shared.client, at(POD_AT, family), protocol, servers)
        client = str(at(CLIENT_AT, family))
        assert [seen.client for seen in answers.values() if seen] == [client, client]


@pytest.mark.parametrize("declared", ["1000-8000", None], ids=["ranges", "everything"])
def test_the_guest_goes_out_with_the_address_of_the_pod(shared: Lab, declared: str | None) -> None:
    applied(shared.pod, vm("desktop", declared))
    for family, protocol in FLOWS:
        with listening(shared.client, family, protocol, (53, 1000, 8001)) as servers:
            answers = probed(shared.guest, at(CLIENT_AT, family), protocol, servers)
        pod = str(at(POD_AT, family))
        assert answers == {port: Seen(port, pod) for port in (53, 1000, 8001)}
    for address in CLIENT_AT:
        assert pinged(shared.guest, address) == 63


def test_the_inside_reaches_the_guest_at_127_0_0_1_from_the_gateway(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", BOTH))
    for protocol in FORWARDED:
        with listening(shared.guest, Family.IP, protocol, (999, 1000, 8000, 8001)) as servers:
            answers = probed(shared.pod, LOOPBACK[0], protocol, servers)
        gateway = str(GATEWAY_AT[0])
        assert answers == {
            999: None,
            1000: Seen(1000, gateway),
            8000: Seen(8000, gateway),
            8001: None,
        }


def test_a_catch_all_takes_127_0_0_1_as_well(shared: Lab) -> None:
    applied(shared.pod, vm("desktop", None))
    for protocol in FORWARDED:
        with listening(shared.guest, Family.IP, protocol, (1, 40000)) as servers:
            answers = probed(shared.pod, LOOPBACK[0], protocol, servers)
        assert [seen.port for seen in answers.values() if seen] == [1, 40000]


def test_ipv6_loopback_is_left_to_the_programs_of_the_pod(shared: Lab) -> None:
    """Rules for ::1 would lead out but not back: see docs/decisions.md."""
    for declared in (BOTH, None):
        applied(shared.pod, vm("desktop", declared))
        for protocol in FORWARDED:
            with (
                listening(shared.guest, Family.IP6, protocol, (1000,)),
                listening(shared.pod, Family.IP6, protocol, (1000,)) as servers,
            ):
                answers = probed(shared.pod, LOOPBACK[1], protocol, servers)
            assert answers == {1000: Seen(1000, "::1")}


# ------------------------------------------------------------------- while other things change

EDITS = 200
KEPT = "5000-5999,5000-5999/udp"


def edited(backend: str, netns: str, stop: threading.Event, done: list[int]) -> None:
    """Change other ranges again and again: add, grow, move, split, remove."""
    own = LiveKernel(backend)  # a worker serves one thread
    with closing(own), own.opened(netns) as namespace:
        for number in range(EDITS):
            if stop.is_set():
                return
            first = 1000 + 7 * (number % 100)
            others = (
                f"{first}-{first + 90}",
                f"{first}-{first + 99},{first + 200}/udp",
                f"{first}-{first + 40},{first + 60}-{first + 99}",
                "",
            )[number % 4]
            machine = vm("desktop", f"{KEPT},{others}")
            plan = converge(netns, desire([machine], namespace.surroundings()), namespace)
            assert not plan.empty
            done.append(number)


class Editing(NamedTuple):
    """A thread that can be started, what it has done, and a way to stop it."""

    thread: threading.Thread
    done: list[int]
    stop: threading.Event


@pytest.fixture
def editing(wired: Lab) -> Iterator[Editing]:
    """A thread that edits other ranges while the test does something."""
    applied(wired.pod, vm("desktop", KEPT))
    stop, done = threading.Event(), list[int]()
    thread = threading.Thread(target=edited, args=(asked(), wired.pod, stop, done), daemon=True)
    try:
        yield Editing(thread, done, stop)
    finally:
        stop.set()
        if thread.ident:
            thread.join(30)


def test_flows_lose_nothing_while_other_ranges_are_edited(wired: Lab, editing: Editing) -> None:
    thread, done, _ = editing
    flows = {}
    with echo(wired.guest, flows_of(5000)) as server:
        for family, protocol in FLOWS:
            client = connected(wired, wired.client, at(POD_AT, family), protocol, 5000)
            flows[family, protocol] = client
        try:
            server.turn()
            thread.start()
            counted = 0
            while thread.is_alive() and counted < 200_000:
                counted += 1
                for client in flows.values():
                    client.send(counted.to_bytes(8, "big"))
                heard: dict[object, bytes] = dict.fromkeys(flows, b"")
                for _ in range(8 * len(flows)):
                    server.turn()
                    for key, client in flows.items():
                        heard[key] += _there(client)
                    if all(len(said) >= 8 for said in heard.values()):
                        break
                assert heard == dict.fromkeys(flows, counted.to_bytes(8, "big"))
        finally:
            for client in flows.values():
                client.close()
    thread.join(60)
    assert done == list(range(EDITS)), "the edits did not go through"
    assert counted > EDITS / 4, f"only {counted} rounds went by during {EDITS} edits"


def _there(client: socket.socket) -> bytes:
    """What has come, without waiting for it."""
    try:
        return client.recv(64, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def entering(netns: str) -> dict[tuple[Family, Protocol | None], Live]:
    return {
        (live.rule.family, live.rule.protocol): live
        for live in observed(netns).live
        if live.rule.chain is Chain.PREROUTING and str(live.rule.ports) == "5000-5999"
    }


def test_counters_of_a_range_go_on_while_others_are_edited(wired: Lab, editing: Editing) -> None:
    thread, done, stop = editing
    before = entering(wired.pod)
    assert len(before) == len(FLOWS)
    thread.start()
    rounds = 0
    for rounds in range(1, 40):  # noqa: B007 - counted for afterwards
        for family, protocol in FLOWS:
            with listening(wired.guest, family, protocol, (5000, 5999)) as servers:
                answers = probed(wired.client, at(POD_AT, family), protocol, servers)
            assert all(answers.values())
        if not thread.is_alive():
            break
    assert eventually(lambda: len(done) > EDITS / 4, 60), "the edits did not go through"
    stop.set()
    thread.join(30)
    for flow, live in entering(wired.pod).items():
        if asked() == NFTABLES:  # else a handle is a place, which shifts
            assert live.handle == before[flow].handle
        # A flow counts once, with its first packet; a client's port may have come up before.
        assert 2 * rounds - 6 <= live.packets <= 2 * rounds


def test_a_range_that_is_taken_away_takes_no_new_flow(shared: Lab) -> None:
    for family, protocol in FLOWS:
        applied(shared.pod, vm("desktop", "3000-3009,3000-3009/udp"))
        with listening(shared.guest, family, protocol, (3000, 3005, 3009)) as servers:
            answers = probed(shared.client, at(POD_AT, family), protocol, servers)
            assert all(answers.values())
            applied(shared.pod, vm("desktop", "3000-3004,3000-3004/udp"))
            answers = probed(shared.client, at(POD_AT, family), protocol, servers)
        assert [port for port, seen in answers.items() if seen] == [3000]


def remade(netns: str) -> None:
    """Everything of ours goes and comes back, with what brings that about in this backend."""
    if asked() == NFTABLES:
        within(netns, "nft", "add", "chain", "inet", "portranger", "extra")
    else:
        legacy(netns, "-F", "-X")
    assert not applied(netns, vm("desktop", BOTH)).empty


def test_an_established_connection_survives_the_remaking_of_the_table(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", BOTH))
    with echo(wired.guest, flows_of(4500)) as server:
        client = connected(wired, wired.client, POD_AT[0], Protocol.TCP, 4500)
        with client:
            server.turn()
            remade(wired.pod)
            client.sendall(b"still here?")
            server.turn()
            assert client.recv(64) == b"still here?"


# --------------------------------------------------------------------------- from one to the other


def other_than(backend: str) -> str:
    return NFTABLES if backend == IPTABLES else IPTABLES


def in_both(netns: str) -> tuple[bool, bool]:
    """Whether something of ours is in nftables, and in the legacy tables."""
    return (
        "inet portranger" in within(netns, "nft", "list", "tables"),
        "PORTRANGER" in saved(netns),
    )


def knocked(made: Lab, stop: threading.Event, failures: list[object], knocks: list[int]) -> None:
    """Begin new flows one after another, until told to stop."""
    while not stop.is_set() and len(knocks) < 20_000:
        failures += [
            (address, protocol, len(knocks))
            for address in POD_AT
            for protocol in FORWARDED
            if reached(made, made.client, address, protocol, 2000) != 2000
        ]
        knocks.append(1)


def test_a_change_of_backends_is_noticed_by_no_flow(wired: Lab, backend: str) -> None:
    applied(wired.pod, vm("desktop", BOTH))
    assert in_both(wired.pod) == ((True, False) if backend == NFTABLES else (False, True))
    stop, failures, knocks = threading.Event(), list[object](), list[int]()
    prober = threading.Thread(target=knocked, args=(wired, stop, failures, knocks), daemon=True)
    servers = [(protocol, 2000) for protocol in FORWARDED]
    with echoing(wired, wired.guest, servers), ExitStack() as stack:
        flows = [
            stack.enter_context(connected(wired, wired.client, address, protocol, 2000))
            for address in POD_AT
            for protocol in FORWARDED
        ]
        assert [asks(flow) for flow in flows] == [2000] * len(flows)
        prober.start()
        try:
            moved = applied(wired.pod, vm("desktop", BOTH), backend=other_than(backend))
            assert moved.leftovers
            assert moved.add
            assert in_both(wired.pod) == ((False, True) if backend == NFTABLES else (True, False))
            assert [asks(flow) for flow in flows] == [2000] * len(flows)
            so_far = len(knocks)
            for _ in range(5):  # back and forth, while new flows come in
                applied(wired.pod, vm("desktop", BOTH), backend=backend)
                applied(wired.pod, vm("desktop", BOTH), backend=other_than(backend))
            assert [asks(flow) for flow in flows] == [2000] * len(flows)
        finally:
            stop.set()
            prober.join(30)
    assert not failures
    assert len(knocks) > so_far, "nobody knocked during the moves"


# ------------------------------------------------------------------------------- shifted ranges

SHIFTED = {"9000-9009 to 7000": (9000, 9009, 7000), "80 to 8080": (80, 80, 8080)}


@pytest.mark.parametrize(("first", "last", "to_port"), SHIFTED.values(), ids=SHIFTED)
def test_a_shifted_range_arrives_port_by_port(
    shared: Lab, first: int, last: int, to_port: int
) -> None:
    applied(shared.pod)
    ports = PortRange(first, last)
    applied(shared.pod, vm("desktop", f"{ports},{ports}/udp"))
    desired = wanted(shared.pod, [vm("desktop", f"{ports},{ports}/udp")])
    rules = frozenset(
        replace(rule, to_port=to_port)
        if rule.ports is not None and rule.chain is not Chain.POSTROUTING
        else rule
        for rule in desired.rules
    )
    with kernel(asked()).opened(shared.pod) as namespace:
        plan = converge(shared.pod, replace(desired, rules=rules), namespace)
        assert len(plan.change) == 6, "a rule for each flow and two for 127.0.0.1"
        assert frozenset(live.rule for live in namespace.observe().live) == rules
    inside_ports = range(to_port, to_port + len(ports))
    for family, protocol in FLOWS:
        with listening(shared.guest, family, protocol, inside_ports) as servers:
            shifted = {first + i: servers[to_port + i] for i in range(len(ports))}
            answers = probed(shared.client, at(POD_AT, family), protocol, shifted)
            client = str(at(CLIENT_AT, family))
            assert answers == {first + i: Seen(to_port + i, client) for i in range(len(ports))}
            if family is Family.IP:
                answers = probed(shared.pod, LOOPBACK[0], protocol, shifted)
                assert [seen.port for seen in answers.values() if seen] == list(inside_ports)
    applied(shared.pod)


# ---------------------------------------------------------------------------------- the edges


def test_what_others_send_through_the_pod_is_not_ours(wired: Lab) -> None:
    """Only what enters on the pod's link is forwarded: the guest's own traffic to the pod's
    address, on a declared port, stays with the pod."""
    applied(wired.pod, vm("desktop", BOTH))
    with echo(wired.pod, [(Family.IP, Protocol.TCP, 1000)]) as server:
        with connected(wired, wired.guest, POD_AT[0], Protocol.TCP, 1000) as client:
            server.turn()
            client.sendall(b"pod?")
            server.turn()
            assert client.recv(16) == b"pod?"
        assert server.peers == ["10.0.2.2"]


def test_fragments_of_a_large_datagram_arrive_together(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", BOTH))
    for address in POD_AT:
        family = Family.of(address)
        (sender,) = sockets(wired.client, family, socket.SOCK_DGRAM, 1)
        with sender, echo(wired.guest, [(family, Protocol.UDP, 7000)]) as server:
            sender.connect((str(address), 7000))
            sender.send(b"x" * 9000)
            server.turn()
            assert sender.recv(65536) == b"x" * 9000


def test_the_addresses_of_the_lab_are_what_these_tests_think() -> None:
    assert (IPv4Address("192.0.2.2"), IPv6Address("2001:db8::2")) == POD_AT
