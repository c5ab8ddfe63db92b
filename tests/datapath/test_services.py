"""Services on the node, proved by packets: every port leads to its own, flows spread or stay with
their machine, and the machine sees who asks. The real daemon, on a node with machines behind it."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rules.model import FORWARDED, NODE, Family, Protocol
from tests.daemon.running import Node
from tests.datapath.publishing import (
    AT,
    FLOWS,
    FROM,
    RANGE,
    TCP,
    UDP,
    answerers,
    asking,
    everywhere,
    flow_to,
    publishing,
)
from tests.datapath.traffic import sockets
from tests.nodes import NODE4, Net, asked, net, service_manifest, vm_manifest
from tests.spaces import ip

# A telephone exchange: signalling, media, and two of TCP. The machines forward more than that, so
# that it is the node that keeps the neighbours shut.
RANGES = "5000-12000/udp,1-8000"
PORTS = (
    "name: sip, protocol: UDP, port: 5060, nodePort: 20060",
    "name: rtp, protocol: UDP, port: 10000, nodePort: 21000",
    "name: http, port: 80, nodePort: 20080",
    "name: data, port: 7000, nodePort: 24000",
)
ENDS = "rtp: 10999, data: 7099"
LEADS = {
    UDP: {20060: 5060, **{21000 + one: 10000 + one for one in range(1000)}},
    TCP: {20080: 80, **{24000 + one: 7000 + one for one in range(100)}},
}
NEIGHBOURS = {
    UDP: {20059: 5059, 20061: 5061, 20999: 9999, 22000: 11000, 5060: 5060, 10000: 10000},
    TCP: {20079: 79, 20081: 81, 23999: 6999, 24100: 7100, 80: 80, 7000: 7000},
}
SERVED = [
    (protocol, port)
    for protocol in FORWARDED
    for port in sorted({*LEADS[protocol].values(), *NEIGHBOURS[protocol].values()})
]
CLIENTS = 12


@pytest.fixture(
    scope="module", params=["", "externalTrafficPolicy: Local"], ids=["Cluster", "Local"]
)
def phones(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Net]:
    """Two machines that answer on every port, whichever of them a flow gets. All of what is known
    from files is on this node, so that either policy is the same."""
    service = service_manifest(PORTS, ends=ENDS, more=request.param)
    folder = tmp_path_factory.mktemp("phones") / "node"
    with (
        net(2) as lab,
        everywhere(lab, SERVED),
        publishing(folder, lab, service, RANGES),
    ):
        yield lab


# ------------------------------------------------------------------------- every port to its own


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_every_port_leads_to_its_own_and_the_sender_is_the_client(
    phones: Net, family: Family, protocol: Protocol
) -> None:
    answers = {
        port: asked(phones.client, protocol, AT[family], port).partition(" ")
        for port in LEADS[protocol]
    }
    assert {port: rest for port, (_, _, rest) in answers.items()} == {
        port: f"{target} {FROM[family]}" for port, target in LEADS[protocol].items()
    }
    assert {who for who, *_ in answers.values()} == {"one", "two"}


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_the_neighbours_of_a_range_stay_shut(
    phones: Net, family: Family, protocol: Protocol
) -> None:
    for port in NEIGHBOURS[protocol]:
        assert asked(phones.client, protocol, AT[family], port) == "", port


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_new_flows_of_one_client_spread_evenly(
    phones: Net, family: Family, protocol: Protocol
) -> None:
    port = random.Random(family.value).choice([*LEADS[protocol]])
    counted = Counter(answerers(phones.client, protocol, AT[family], port, 300))
    assert counted.total() == counted["one"] + counted["two"]
    assert 105 <= counted["one"] <= 195, counted


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_the_node_itself_is_served_at_its_addresses_but_not_at_loopback(
    phones: Net, family: Family, protocol: Protocol
) -> None:
    inner = "10.1.0.1" if family is Family.IP else "fd01::1"  # where the machines are
    loopback = "127.0.0.1" if family is Family.IP else "::1"
    for port, target in list(LEADS[protocol].items())[:20]:
        for at in (AT[family], inner):
            assert asked(phones.node, protocol, at, port).split()[1:] == [str(target), at]
    assert asked(phones.node, protocol, loopback, next(iter(LEADS[protocol]))) == ""


# ---------------------------------------------------------------------------- a client's machine


def test_with_affinity_signalling_and_media_of_a_client_are_at_one_machine(tmp_path: Path) -> None:
    service = service_manifest(PORTS, ends=ENDS, more="sessionAffinity: ClientIP")
    clients = {
        Family.IP: [f"198.51.100.{20 + number}" for number in range(CLIENTS)],
        Family.IP6: [f"2001:db8:5::{20 + number}" for number in range(CLIENTS)],
    }
    with (
        net(2) as lab,
        everywhere(lab, SERVED),
        publishing(tmp_path / "node", lab, service, RANGES),
    ):
        for family, rest in ((Family.IP, "/24 dev eth0"), (Family.IP6, "/64 dev eth0 nodad")):
            ip(lab.client, *(f"addr add {one}{rest}" for one in clients[family]))
        for family in Family:
            own = {one: _machines_of(lab, one, family) for one in clients[family]}
            assert {len(machines) for machines in own.values()} == {1}, own
            assert set.union(*own.values()) == {"one", "two"}
        every = [asked(lab.client, UDP, NODE4, port, clients[Family.IP][0]) for port in LEADS[UDP]]
        assert len({answer.split()[0] for answer in every}) == 1


def _machines_of(lab: Net, client: str, family: Family) -> set[str]:
    """The machines that answer a client, on a few ports of every range, new flows each."""
    rest = random.Random(client).sample(sorted(LEADS[UDP]), 40)
    wanted = [(UDP, port) for port in (20060, 21000, 21999, *rest)]
    wanted += [(TCP, port) for port in (20080, 24000, 24050, 24099)]
    answers = [asked(lab.client, protocol, AT[family], port, client) for protocol, port in wanted]
    assert all(answer.split()[2:] == [client] for answer in answers), answers
    return {answer.split()[0] for answer in answers}


# ---------------------------------------------------------------------------- what is declared


def test_a_port_leads_only_to_machines_that_declare_its_target(tmp_path: Path) -> None:
    """Also while that changes: who answers a flow goes on with it."""
    service = service_manifest(["name: data, port: 7000, nodePort: 24000"], ends="data: 7009")
    with net(2) as lab, everywhere(lab, [(TCP, port) for port in range(7000, 7010)]):
        node = Node(tmp_path / "node", lab.node, **RANGE)
        node.save("one.yaml", vm_manifest(lab.vms[0], "7000-7007"))
        node.save("two.yaml", vm_manifest(lab.vms[1], "7000-7003"))
        node.save("service.yaml", service)

        def who(port: int) -> set[str]:
            return set(answerers(lab.client, TCP, NODE4, port, 30))

        with node.running() as daemon:
            assert daemon.is_in("conflict", NODE)
            found = daemon.standing(NODE)
            assert [one["reason"] for one in found["refused"]] == [
                "tcp 24008-24009 is left out: no backend declares tcp 7008-7009"
            ]
            told = f"tcp 7004-7009 not forwarded by VirtualMachine/default/vm2 ({lab.vms[1].pod})"
            assert f"Service/default/phone: {told}" in found["notes"]
            assert who(24000) == who(24003) == {"one", "two"}
            assert who(24004) == who(24007) == {"one"}
            assert who(24008) == {""}

            flows = [flow_to(name, lab.client, TCP, NODE4, 24001) for name in ("one", "two")]
            with closing(flows[0]), closing(flows[1]), asking(*flows) as answers:
                node.save("one.yaml", vm_manifest(lab.vms[0], "7000-7003"))
                node.save("two.yaml", vm_manifest(lab.vms[1], "7000-7009"))
                assert daemon.is_in("in sync", NODE)
                assert who(24004) == who(24009) == {"two"}
            assert [{one.partition(" ")[0] for one in some} for some in answers] == [
                {"one"},
                {"two"},
            ]


# ------------------------------------------------------------------------------------------ SCTP


@pytest.mark.parametrize("family", list(Family))
def test_sctp_arrives_at_the_machines_namespace_and_its_answer_at_the_client(
    tmp_path: Path, family: Family
) -> None:
    """By hand, as not every kernel has sockets for it; guests get none, as KubeVirt knows none."""
    service = service_manifest(
        ["name: signal, protocol: SCTP, port: 9000, nodePort: 23000"], ends="signal: 9009"
    )
    with (
        net(1) as lab,
        publishing(tmp_path / "node", lab, service, "80"),
        sockets(lab.client, family, socket.SOCK_RAW, 1, SCTP_NUMBER)[0] as client,
        sockets(lab.vms[0].pod, family, socket.SOCK_RAW, 1, SCTP_NUMBER)[0] as server,
    ):
        for port, target in ((23000, 9000), (23004, 9004), (23009, 9009)):
            client.sendto(initiation(40000 + port - 23000, port, tag=7), (AT[family], 0))
            packet, sender = received(server, family)
            assert sender == FROM[family]
            assert struct.unpack("!HH", packet[:4]) == (40000 + port - 23000, target)
            assert packet == sealed(packet), "its checksum is wrong"
            server.sendto(acknowledgement(target, 40000 + port - 23000, tag=7), (sender, 0))
            answer, node = received(client, family)
            assert node == AT[family]
            assert struct.unpack("!HH", answer[:4]) == (port, 40000 + port - 23000)
        server.settimeout(0.3)
        for port in (22999, 23010, 9000):
            client.sendto(initiation(40000, port, tag=7), (AT[family], 0))
            with pytest.raises(TimeoutError):
                server.recv(100)


SCTP_NUMBER = 132


def initiation(source: int, to: int, tag: int) -> bytes:
    """The first packet of an association."""
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, tag, 65536, 1, 1, 1)
    return sealed(struct.pack("!HHII", source, to, 0, 0) + chunk)


def acknowledgement(source: int, to: int, tag: int) -> bytes:
    """The answer to that, without the cookie that nobody here would send back."""
    chunk = struct.pack("!BBHIIHHI", 2, 0, 20, 9, 65536, 1, 1, 1)
    return sealed(struct.pack("!HHII", source, to, tag, 0) + chunk)


def sealed(packet: bytes) -> bytes:
    """With its checksum: CRC32c (RFC 9260, appendix A), bit by bit."""
    bare = packet[:8] + bytes(4) + packet[12:]
    rest = 0xFFFFFFFF
    for byte in bare:
        rest ^= byte
        for _ in range(8):
            rest = (rest >> 1) ^ (0x82F63B78 if rest & 1 else 0)
    return bare[:8] + struct.pack("<I", rest ^ 0xFFFFFFFF) + bare[12:]


def received(one: socket.socket, family: Family) -> tuple[bytes, str]:
    """A packet from its transport header on, and who sent it; IPv4 gives its own header, too."""
    packet, sender = one.recvfrom(200)
    return packet[20 if family is Family.IP else 0 :], sender[0]
