"""Beside KubeVirt's own chains, proved by packets: our forwards come first, what is not declared
stays shut even where KubeVirt would forward everything, and nothing of KubeVirt's is touched."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from agent.errors import Failure
from agent.kernel import deferred
from agent.kernel.lab import CLIENT, POD, Lab
from agent.kernel.probe import asks, connected, echoing, reached
from agent.reconcile import keep, wish_of
from rules.model import FORWARDED, Address, Chain, Claim, Family, Live, Machine, Protocol
from rules.places import LOOPBACK
from rules.ports import PortRange
from rules.values import replace
from tests.datapath.traffic import sockets
from tests.kubevirt import programmed
from tests.spaces import IPTABLES, applied, kernel, lab, nft, observed, vm, within

FLOWS = [(family, protocol) for family in Family for protocol in FORWARDED]
POD_AT = {Family.of(address): address.ip for address in POD}
PORTS = (22, 1000, 1005, 8080)
BOTH = [(protocol, port) for protocol in FORWARDED for port in PORTS]
DECLARED = "1000-1009,1000-1009/udp"


@pytest.fixture
def wired() -> Iterator[Lab]:
    with lab() as made:
        yield made


def open_ports(wired: Lab, where: str, addresses: tuple[Address, ...]) -> set[tuple[str, int]]:
    """What of BOTH is answered by the guest, asked from there at all of these addresses."""
    with echoing(wired, wired.guest, BOTH):
        return {
            (protocol.value, port)
            for protocol, port in BOTH
            if all(reached(wired, where, address, protocol, port) for address in addresses)
        }


def served(ports: str) -> set[tuple[str, int]]:
    return {
        (claim.protocol.value, port)
        for claim in vm("x", ports).masquerade.claims  # type: ignore[union-attr]
        for port in PORTS
        if port in claim.ports
    }


EVERYTHING = {(protocol.value, port) for protocol, port in BOTH}
AT_POD = tuple(POD_AT.values())


@pytest.mark.parametrize("theirs", ["", "22", "1000,1000/udp,22"], ids=["all", "ssh", "some"])
def test_only_what_is_declared_reaches_the_guest(wired: Lab, theirs: str) -> None:
    programmed(wired.pod, theirs)
    assert open_ports(wired, wired.client, AT_POD) == (served(theirs) if theirs else EVERYTHING)
    applied(wired.pod, vm("desktop", DECLARED))
    assert open_ports(wired, wired.client, AT_POD) == served(DECLARED)


def test_the_same_holds_inside_the_namespace(wired: Lab) -> None:
    programmed(wired.pod)
    assert open_ports(wired, wired.pod, (LOOPBACK,)) == EVERYTHING
    applied(wired.pod, vm("desktop", DECLARED))
    assert open_ports(wired, wired.pod, (LOOPBACK,)) == served(DECLARED)


@pytest.mark.parametrize("family", Family)
def test_a_port_that_is_not_declared_answers_like_a_closed_one(wired: Lab, family: Family) -> None:
    programmed(wired.pod)
    applied(wired.pod, vm("desktop", DECLARED))
    with (
        echoing(wired, wired.guest, [(Protocol.TCP, 8080)]),
        pytest.raises(ConnectionRefusedError),
    ):
        connected(wired, wired.client, POD_AT[family], Protocol.TCP, 8080)


def test_the_pods_own_services_are_still_its_own(wired: Lab) -> None:
    programmed(wired.pod)
    applied(wired.pod, vm("desktop", DECLARED))
    with echoing(wired, wired.pod, [(Protocol.TCP, 9999), (Protocol.UDP, 9999)]):
        for family, protocol in FLOWS:
            assert reached(wired, wired.client, POD_AT[family], protocol, 9999) == 9999


def test_nothing_of_theirs_is_touched_and_little_of_ours_is_there(wired: Lab) -> None:
    programmed(wired.pod)
    before = [
        within(wired.pod, "nft", "-s", "list", "table", family.value, "nat") for family in Family
    ]
    applied(wired.pod, vm("desktop", DECLARED))
    assert before == [
        within(wired.pod, "nft", "-s", "list", "table", family.value, "nat") for family in Family
    ]
    sources = [one.rule.source for one in observed(wired.pod).live if one.rule.source]
    assert sources == [LOOPBACK]  # the guest's own traffic is KubeVirt's to masquerade


def test_nothing_declared_is_left_to_kubevirt(wired: Lab) -> None:
    programmed(wired.pod)
    assert applied(wired.pod, vm("desktop", None)).empty
    assert open_ports(wired, wired.client, AT_POD) == EVERYTHING


def test_a_range_added_later_comes_before_the_guard(wired: Lab) -> None:
    programmed(wired.pod)
    applied(wired.pod, vm("desktop", DECLARED))
    wider = DECLARED + ",8080"
    plan = applied(wired.pod, vm("desktop", wider))
    assert {rule.ports for rule in plan.add} == {PortRange(8080, 8080)}
    assert open_ports(wired, wired.client, AT_POD) == served(wider)
    many = ",".join(str(port) for port in range(2000, 2100, 2)) + "," + wider
    applied(wired.pod, vm("desktop", many))
    assert open_ports(wired, wired.client, AT_POD) == served(many)


def guards(wired: Lab) -> list[Live]:
    """What keeps packets from KubeVirt's chains."""
    return [one for one in observed(wired.pod).live if one.rule.guards and one.rule.peer is None]


def test_a_guard_that_somebody_put_first_is_put_last_again(wired: Lab) -> None:
    programmed(wired.pod)
    applied(wired.pod, vm("desktop", DECLARED))
    (guard, *_) = (one for one in guards(wired) if one.rule.family is Family.IP)
    chain = guard.rule.chain.value
    nft(
        wired.pod,
        f"delete rule inet portranger {chain} handle {guard.handle}\n"
        f'insert rule inet portranger {chain} iifname "eth0" meta nfproto ipv4 counter redirect'
        f' comment "{guard.rule.owner}"',
    )
    assert open_ports(wired, wired.client, AT_POD) == set()
    applied(wired.pod, vm("desktop", DECLARED))
    assert open_ports(wired, wired.client, AT_POD) == served(DECLARED)


def test_their_chains_may_come_after_ours_and_go_again(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", DECLARED))
    assert not guards(wired)
    programmed(wired.pod)
    applied(wired.pod, vm("desktop", DECLARED))
    assert open_ports(wired, wired.client, AT_POD) == served(DECLARED)
    nft(wired.pod, "delete table ip nat; delete table ip6 nat")
    applied(wired.pod, vm("desktop", DECLARED))
    assert not guards(wired)
    assert open_ports(wired, wired.client, AT_POD) == served(DECLARED)


def test_a_flow_to_a_port_that_is_shut_now_is_cut_and_others_go_on(wired: Lab) -> None:
    programmed(wired.pod)
    flows = [(protocol, port) for protocol in FORWARDED for port in (1000, 8080)]
    with echoing(wired, wired.guest, flows), kernel("auto").opened(wired.pod) as namespace:
        clients = {
            (protocol, port): connected(wired, wired.client, POD_AT[Family.IP], protocol, port)
            for protocol, port in flows
        }
        for (_, port), client in clients.items():
            assert asks(client) == port
            client.settimeout(0.5)
        keep(wired.pod, wish_of([vm("desktop", DECLARED)]), namespace, before=None)
        for (_, port), client in clients.items():
            with closing(client):
                assert answers(client) == (port == 1000)


def shut(machine: Machine) -> Machine:
    """As a machine whose declaration cannot be read: nothing of it is forwarded."""
    assert machine.masquerade is not None
    return replace(machine, masquerade=replace(machine.masquerade, claims=(), guarded=True))


@pytest.mark.parametrize("inside", [False, True], ids=["from outside", "from inside"])
def test_a_guard_without_forwards_cuts_the_flows_that_kubevirt_made(
    wired: Lab, inside: bool
) -> None:
    """Also those of IPv6, whose guest no rule of ours names; what is declared later begins anew,
    and what was cut stays so."""
    programmed(wired.pod)
    where, addresses = (wired.pod, (LOOPBACK,)) if inside else (wired.client, AT_POD)
    flows = [(protocol, port) for protocol in FORWARDED for port in (1000, 8080)]
    with (
        echoing(wired, wired.guest, flows),
        echoing(wired, wired.client, [(Protocol.UDP, 9000)]),
        kernel("auto").opened(wired.pod) as namespace,
        ExitStack() as open_flows,
    ):
        clients = {
            (address, protocol, port): open_flows.enter_context(
                connected(wired, where, address, protocol, port)
            )
            for address in addresses
            for protocol, port in flows
        }
        for (_, _, port), client in clients.items():
            assert asks(client) == port
            client.settimeout(0.5)
        own = [
            open_flows.enter_context(connected(wired, wired.guest, to.ip, Protocol.UDP, 9000))
            for to in CLIENT
        ]
        assert [asks(one) for one in own] == [9000, 9000]
        keep(wired.pod, wish_of([shut(vm("desktop", "22"))]), namespace, before=None)
        assert not [one for one, client in clients.items() if answers(client)]
        assert [asks(one) for one in own] == [9000, 9000]


def test_what_survived_a_guard_does_not_survive_its_correction(wired: Lab) -> None:
    """As where nobody flushed flows when the guard came: forwards are added, and no guard."""
    programmed(wired.pod)
    with (
        echoing(wired, wired.guest, BOTH),
        kernel("auto").opened(wired.pod) as namespace,
        ExitStack() as open_flows,
    ):
        clients = {
            (address, protocol, port): open_flows.enter_context(
                connected(wired, wired.client, address, protocol, port)
            )
            for address in AT_POD
            for protocol, port in BOTH
        }
        for client in clients.values():
            client.settimeout(0.5)
            assert answers(client)
        bad, good = shut(vm("desktop", "22")), vm("desktop", DECLARED)
        with pytest.MonkeyPatch.context() as forgetful:
            forgetful.setattr(deferred, "forget", lambda *_: 0)
            outcome = keep(wired.pod, wish_of([bad]), namespace, before=None)
        assert all(answers(client) for client in clients.values())
        keep(wired.pod, wish_of([good]), namespace, before=outcome.desired)
        for (_, protocol, port), client in clients.items():
            assert answers(client) == ((protocol.value, port) in served(DECLARED))


def answers(client: socket.socket) -> bool:
    try:
        return bool(asks(client))
    except OSError:
        return False


def test_the_legacy_tables_cannot_come_before_kubevirt_and_say_so(wired: Lab) -> None:
    programmed(wired.pod)
    with pytest.raises(Failure, match="KubeVirt's own chains are live"):
        applied(wired.pod, vm("desktop", DECLARED), backend=IPTABLES)


# ------------------------------------------------------------------------- what is the pod's own


def proxied(machine: Machine, *reserved: int) -> Machine:
    assert machine.masquerade
    own = tuple(Claim(Protocol.TCP, PortRange(port, port)) for port in reserved)
    return replace(machine, masquerade=replace(machine.masquerade, reserved=own, proxied=True))


def istio(wired: Lab) -> None:
    """What Istio does to TCP that enters: all of it goes to the proxy, but for ssh."""
    nft(
        wired.pod,
        "add table inet istio\n"
        "add chain inet istio pre { type nat hook prerouting priority -100; }\n"
        "add rule inet istio pre tcp dport != { 22, 15006 } redirect to :15006",
    )


@pytest.mark.parametrize("theirs", [True, False], ids=["extend", "own"])
def test_tcp_goes_to_the_proxy_of_istio_and_udp_to_the_guest(wired: Lab, theirs: bool) -> None:
    istio(wired)
    if theirs:
        programmed(wired.pod, pod=str(POD_AT[Family.IP]))
    applied(wired.pod, proxied(vm("desktop", DECLARED + ",22"), 15006))
    at = POD_AT[Family.IP]
    with (
        echoing(wired, wired.guest, BOTH),
        echoing(wired, wired.pod, [(Protocol.TCP, 15006)]),
    ):
        assert reached(wired, wired.client, at, Protocol.TCP, 1005) == 15006
        assert reached(wired, wired.client, at, Protocol.TCP, 8080) == 15006
        assert reached(wired, wired.client, at, Protocol.TCP, 22) == 22
        assert reached(wired, wired.client, at, Protocol.UDP, 1005) == 1005
        assert reached(wired, wired.client, at, Protocol.UDP, 8080) is None
        assert as_proxy(wired, at, 1005) == 1005
        assert as_proxy(wired, at, 8080) is None


def as_proxy(wired: Lab, to: Address, port: int) -> int | None:
    """What the proxy reaches when it goes on to the guest, at the pod's own address."""
    (client,) = sockets(wired.pod, Family.IP, socket.SOCK_STREAM, 1)
    with client:
        client.bind(("127.0.0.6", 0))
        client.settimeout(1)
        try:
            client.connect((str(to), port))
            return asks(client)
        except OSError:
            return None


def test_ports_of_the_pod_are_carved_out_of_ranges(wired: Lab) -> None:
    machine = vm("desktop", "1000-1009")
    assert machine.masquerade
    own = (Claim(Protocol.TCP, PortRange(1005, 1005)),)
    applied(wired.pod, replace(machine, masquerade=replace(machine.masquerade, reserved=own)))
    assert open_ports(wired, wired.client, AT_POD) == {("tcp", 1000)}
    ranges = {
        str(one.rule.ports)
        for one in observed(wired.pod).live
        if one.rule.chain is Chain.PREROUTING
    }
    assert ranges == {"1000-1004", "1006-1009"}
