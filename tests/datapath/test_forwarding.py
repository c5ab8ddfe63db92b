"""Forwarding, proved by packets between throwaway namespaces: what is declared arrives at the
guest, on the same port and from the same sender; what is not, does not; and nothing that flows is
lost while other ranges change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest

from agent.kernel.lab import CLIENT, GATEWAY, POD, Lab
from agent.kernel.live import LiveKernel
from agent.kernel.probe import connected, echoing, reached
from agent.reconcile import converge
from rules.desired import desire
from rules.model import Address, Chain, Family, Live, Protocol
from tests.datapath.traffic import Seen, echo, listening, pinged, probed, sockets
from tests.spaces import LOOPBACK, applied, ip, lab, observed, vm, within

FLOWS = [(family, protocol) for family in Family for protocol in Protocol]
BOTH = "1000-8000,1000-8000/udp"


@pytest.fixture
def wired() -> Iterator[Lab]:
    with lab() as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
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
    servers = [(protocol, port) for protocol in Protocol for port in (2000, 2009, 3000, 3009)]
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
        with listening(made.guest, Family.IP, Protocol.TCP, (999, 1000)) as servers:
            answers = probed(made.client, POD_AT[0], Protocol.TCP, servers)
        assert [port for port, seen in answers.items() if seen] == [1000]


def test_an_ipv6_only_pod_gets_no_ipv4_rules() -> None:
    with lab((Family.IP6,)) as made:
        applied(made.pod, vm("desktop", BOTH))
        assert {live.rule.family for live in observed(made.pod).live} == {Family.IP6}
        with listening(made.guest, Family.IP6, Protocol.UDP, (999, 1000)) as servers:
            answers = probed(made.client, POD_AT[1], Protocol.UDP, servers)
        assert [port for port, seen in answers.items() if seen] == [1000]


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
    for protocol in Protocol:
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
    for protocol in Protocol:
        with listening(shared.guest, Family.IP, protocol, (1, 40000)) as servers:
            answers = probed(shared.pod, LOOPBACK[0], protocol, servers)
        assert [seen.port for seen in answers.values() if seen] == [1, 40000]


def test_ipv6_loopback_needs_a_local_route_on_the_bridge_and_no_bridge_netfilter(
    wired: Lab,
) -> None:
    """The answer comes in on the bridge for ::1, and the kernel looks up loopback addresses on
    the link they came in on only (rt6_need_strict): without a route of ::1 there it has no way in.
    With bridge-nf-call-ip6tables it has got its ::1 already in the bridge, and ip6_rcv drops that.
    IPv4 has route_localnet for this; IPv6 has nothing."""
    applied(wired.pod, vm("desktop", BOTH))
    bridge_netfilter = "/proc/sys/net/bridge/bridge-nf-call-ip6tables"
    within(wired.pod, "sh", "-c", f"test ! -e {bridge_netfilter} || echo 0 >{bridge_netfilter}")
    with echoing(wired, wired.guest, [(Protocol.UDP, 1000), (Protocol.TCP, 1000)]):
        nowhere = within(
            wired.pod,
            *("ip", "route", "get", "::1", "from", "fd10:0:2::2", "iif", "k6t-eth0"),
            code=None,
        )
        assert not nowhere
        with connected(wired, wired.pod, LOOPBACK[1], Protocol.UDP, 1000) as client:
            client.settimeout(0.3)
            client.send(b"hello")
            with pytest.raises(OSError):  # noqa: PT011 - silence, or an ICMP error
                client.recv(16)
        ip(wired.pod, "route add local ::1 dev k6t-eth0 table local")
        for protocol in Protocol:
            assert reached(wired, wired.pod, LOOPBACK[1], protocol, 1000) == 1000


# ------------------------------------------------------------------- while other things change

EDITS = 200
KEPT = "5000-5999,5000-5999/udp"


def edited(netns: str, stop: threading.Event, done: list[int]) -> None:
    """Change other ranges again and again: add, grow, move, split, remove."""
    with LiveKernel().opened(netns) as namespace:
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


@pytest.fixture
def editing(wired: Lab) -> Iterator[tuple[threading.Thread, list[int]]]:
    """A thread that edits other ranges while the test does something."""
    applied(wired.pod, vm("desktop", KEPT))
    stop, done = threading.Event(), list[int]()
    thread = threading.Thread(target=edited, args=(wired.pod, stop, done), daemon=True)
    try:
        yield thread, done
    finally:
        stop.set()
        if thread.ident:
            thread.join(30)


def test_flows_lose_nothing_while_other_ranges_are_edited(
    wired: Lab, editing: tuple[threading.Thread, list[int]]
) -> None:
    thread, done = editing
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
    thread.join(30)
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


def test_counters_of_a_range_go_on_while_others_are_edited(
    wired: Lab, editing: tuple[threading.Thread, list[int]]
) -> None:
    thread, done = editing
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
    thread.join(30)
    assert done == list(range(EDITS)), "the edits did not go through"
    for flow, live in entering(wired.pod).items():
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


def test_an_established_connection_survives_the_remaking_of_the_table(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", BOTH))
    with echo(wired.guest, flows_of(4500)) as server:
        client = connected(wired, wired.client, POD_AT[0], Protocol.TCP, 4500)
        with client:
            server.turn()
            within(wired.pod, "nft", "add", "chain", "inet", "portranger", "extra")
            applied(wired.pod, vm("desktop", BOTH))
            client.sendall(b"still here?")
            server.turn()
            assert client.recv(64) == b"still here?"


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
