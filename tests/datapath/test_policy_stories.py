"""What policies are for, with packets: the three stories of KEP-2079, that a policy cuts what it is
to cut and nothing that belongs to the namespace or tells of an error, and that one can ask why."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.traffic import DROPPED
from rules.model import FORWARDED, Family
from tests.datapath.policing import (
    ALL4,
    ALL6,
    BOTH,
    CLOSED,
    FIRST,
    LABELS,
    PHONE,
    POLICY,
    STRANGER,
    Town,
    address,
    answered,
    at,
    machine,
    outside,
    policed,
    policy,
    served,
    wired,
)
from tests.datapath.publishing import AT, FROM, TCP, UDP, serving
from tests.datapath.test_service_ftp import PASSIVE, server
from tests.datapath.traffic import pinged
from tests.nodes import asked, service_manifest, socket_in
from tests.spaces import eventually, ip, portranger, run, within

GATEWAY = {Family.IP: ip_address("10.0.2.1"), Family.IP6: ip_address("fd10:0:2::1")}
GUEST = {Family.IP: ip_address("10.0.2.2"), Family.IP6: ip_address("fd10:0:2::2")}
CONTENT = os.urandom(1 << 20)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with wired() as lab, policed(folder / "node", lab) as made:
        yield made


@pytest.fixture
def town(shared: Town) -> Iterator[Town]:
    """With the files that it had, and no policy, whatever the test before did."""
    yield shared
    shared.node.save("vm1.yaml", machine(shared.first, FIRST, LABELS))
    for name in {POLICY, "service.yaml"} & {path.name for path in shared.node.manifests.iterdir()}:
        shared.node.remove(name)
    shared.settle()


# -------------------------------------------------------------------------------- three stories


def heard_outside(town: Town, *ports: int) -> set[str]:
    """Which of these ports of a stranger the machine reaches: `tcp 80`, in both families alike."""
    asks = {
        town.asked("out", STRANGER, protocol, port, family): (family, f"{protocol.value} {port}")
        for family in Family
        for protocol in FORWARDED
        for port in ports
    }
    heard = [asks[ask] for ask in answered(list(asks))]
    of = {family: {words for one, words in heard if one is family} for family in Family}
    assert of[Family.IP] == of[Family.IP6]
    return of[Family.IP]


def test_a_machine_may_reach_the_node_ports_of_another_cluster_only(town: Town) -> None:
    ports = (80, 29999, 30000, 31234, 32767, 32768)
    with outside(town.lab, [(protocol, port) for protocol in FORWARDED for port in ports]):
        assert len(heard_outside(town, *ports)) == 2 * len(ports)
        to = f"[{ALL4}, {ALL6}], ports: [{{port: 30000, endPort: 32767}}]"
        town.save(policy(f"{PHONE}, policyTypes: [Egress], egress: [{{to: {to}}}]"))
        assert heard_outside(town, *ports) == {"tcp 30000", "tcp 31234", "tcp 32767"}
    assert town.granted() == {"ip tcp 30000-32767", "ip6 tcp 30000-32767"}
    with serving(town.first.guest, "one", [(TCP, 80)]):
        assert town.passes("in", STRANGER, TCP, 80)  # nobody spoke of that


def test_a_machine_may_reach_everything_but_two_ports(town: Town) -> None:
    ports = (1, 80, 110, 111, 112, 444, 445, 446, 65535)
    ranges = "1 110", "112 444", "446 65535"
    listed = ", ".join(
        "{{protocol: {}, port: {}, endPort: {}}}".format(protocol.name, *ends.split())
        for protocol in FORWARDED
        for ends in ranges
    )
    with outside(town.lab, [(protocol, port) for protocol in FORWARDED for port in ports]):
        assert len(heard_outside(town, *ports)) == 2 * len(ports)
        town.save(policy(f"{PHONE}, policyTypes: [Egress], egress: [{{ports: [{listed}]}}]"))
        wanted = {f"{one.value} {port}" for one in FORWARDED for port in ports}
        assert heard_outside(town, *ports) == wanted - {
            *("tcp 111", "tcp 445"),
            *("udp 111", "udp 445"),
        }
    assert town.granted() == {
        f"{family.value} {protocol.value} {ends.replace(' ', '-')}"
        for family in Family
        for protocol in FORWARDED
        for ends in ranges
    }


def test_passive_ftp_beside_a_default_deny(town: Town, tmp_path: Path) -> None:
    """By real ends: from outside, and from another machine of the cluster."""
    if not shutil.which("curl"):
        pytest.skip("needs curl (Debian: curl)")
    if run("/usr/bin/python3", "-c", "import pyftpdlib", code=None).returncode:
        pytest.skip("needs a server of FTP (Debian: python3-pyftpdlib)")
    clients = [town.lab.client, town.lab.vms[1].guest]
    first, last = PASSIVE
    ports = ("port: 80", "port: 21", f"port: {first}, end: {last}")
    town.save(machine(town.first, ports, LABELS), "vm1.yaml")
    deny = policy("podSelector: {}, policyTypes: [Ingress]", "default-deny")
    control = policy(f"{PHONE}, ingress: [{{ports: [{{port: 21}}]}}]", "ftp")
    both = f"{PHONE}, ingress: [{{ports: [{{port: 21}}, {{port: {first}, endPort: {last}}}]}}]"
    with (
        server(town.first.guest, tmp_path / "files"),
        serving(town.first.guest, "one", [(TCP, 80)]),
    ):
        assert transferred(clients, town, tmp_path) == [("230", 0)] * 4
        town.save(deny)
        assert transferred(clients, town, tmp_path, "2") == [("", 28)] * 4
        town.save(deny + control)
        assert transferred(clients, town, tmp_path, "2") == [("230", 28)] * 4
        town.save(deny + policy(both, "ftp"))
        assert transferred(clients, town, tmp_path) == [("230", 0)] * 4
        assert not town.passes("in", STRANGER, TCP, 80)
    passive = f"tcp {first}-{last}"
    assert town.granted() == {"ip tcp 21", f"ip {passive}", "ip6 tcp 21", f"ip6 {passive}"}


def transferred(
    clients: list[str], town: Town, folder: Path, seconds: str = "20"
) -> list[tuple[str, int]]:
    """Sends a file up and down again, from all of them at once; what the server said to the login,
    and the exit code of curl: 28 is that it waited in vain."""

    def transfer(number: int) -> tuple[str, int]:
        where, family = clients[number // 2], list(Family)[number % 2]
        source, back = folder / f"source{number}", folder / f"back{number}"
        source.write_bytes(CONTENT)
        host = f"[{at(town.first, family)}]" if family is Family.IP6 else at(town.first, family)
        words = ("curl", "-sSvg", "--noproxy", "*", "--max-time", seconds, "--user", "user:secret")
        for more in (("-T", str(source)), ("-o", str(back))):
            url = f"ftp://{host}/file{number}"
            done = run("ip", "netns", "exec", where, *words, *more, url, code=None)
            if done.returncode:
                return "230" if "\n< 230 " in done.stderr else "", done.returncode
        assert back.read_bytes() == CONTENT
        return "230", 0

    with ThreadPoolExecutor() as pool:
        return list(pool.map(transfer, range(2 * len(clients))))


# ------------------------------------------------------------------ what a policy is about, exactly


def test_a_policy_speaks_of_the_ports_of_the_machine(town: Town) -> None:
    """Also where the node publishes them as others."""
    port = "name: web, port: 80, targetPort: 85, nodePort: 30443"
    town.node.save("service.yaml", service_manifest([port]))
    with serving(town.first.guest, "one", [(TCP, 85)]):

        def heard() -> list[str]:
            return [asked(town.lab.client, TCP, AT[family], 30443) for family in Family]

        seen = [f"one 85 {FROM[family]}" for family in Family]
        assert eventually(lambda: heard() == seen)
        for others in (30443, 80):
            town.save(policy(f"{PHONE}, ingress: [{{ports: [{{port: {others}}}]}}]"))
            assert heard() == ["", ""]
        town.save(policy(f"{PHONE}, ingress: [{{ports: [{{port: 85}}]}}]"))
        assert heard() == seen


def test_what_is_the_namespaces_own_is_not_cut(town: Town) -> None:
    """Its programs and the guest, its programs and others, and who has which address."""
    guest, pod = town.first.guest, town.first.pod
    town.save(CLOSED)
    for where, links in ((guest, ["eth0"]), (pod, ["k6t-eth0", "eth0"])):
        ip(where, *(f"neigh flush dev {link}" for link in links))
    for family in Family:
        assert pinged(guest, GATEWAY[family])
        assert pinged(pod, GUEST[family])
    with (
        serving(guest, "one", [(TCP, 443), (UDP, 53)]),
        serving(pod, "launcher", [(TCP, 49152), (UDP, 49152)]),
        outside(town.lab, [(TCP, 80), (UDP, 53)]),
    ):
        for protocol, port in ((TCP, 443), (UDP, 53)):
            assert asked(pod, protocol, "127.0.0.1", port) == f"one {port} 10.0.2.1"
            assert asked(pod, protocol, "10.0.2.2", port) == f"one {port} 10.0.2.1"
            assert asked(pod, protocol, "fd10:0:2::2", port) == f"one {port} fd10:0:2::1"
            assert not town.passes("in", STRANGER, protocol, port)
        for family in Family:
            own, theirs = at(town.first, family), address(STRANGER, family)
            for protocol in FORWARDED:
                answer = asked(town.lab.client, protocol, own, 49152, theirs)
                assert answer == f"launcher 49152 {theirs}"
                answer = asked(guest, protocol, str(GATEWAY[family]), 49152)
                assert answer == f"launcher 49152 {GUEST[family]}"
            assert asked(pod, TCP, theirs, 80) == f"outside 80 {own}"
            assert asked(pod, UDP, theirs, 53) == f"outside 53 {own}"


@pytest.mark.parametrize("family", Family, ids=lambda one: one.value)
def test_that_a_port_is_closed_is_told_although_nothing_may_leave(
    town: Town, family: Family
) -> None:
    town.save(policy(f"{BOTH}, ingress: [{{ports: [{{protocol: UDP, port: 5001}}]}}]"))
    with socket_in(town.lab.client, at(town.first, family), socket.SOCK_DGRAM) as client:
        client.connect((at(town.first, family), 5001))
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(100)


KNOWN_MTU = {
    Family.IP: (socket.IPPROTO_IP, 10, 14),  # IP_MTU_DISCOVER, IP_MTU
    Family.IP6: (socket.IPPROTO_IPV6, 23, 24),
}


@pytest.mark.parametrize("family", Family, ids=lambda one: one.value)
def test_that_a_packet_is_too_big_is_told_although_nothing_may_enter(
    town: Town, family: Family
) -> None:
    level, discover, mtu = KNOWN_MTU[family]
    town.save(policy(f"{BOTH}, egress: [{{ports: [{{protocol: UDP, port: 53}}]}}]"))
    ip(town.lab.node, "link set eth0 mtu 1400")
    try:
        with socket_in(town.first.guest, address(STRANGER, family), socket.SOCK_DGRAM) as guest:
            guest.setsockopt(level, discover, 2)  # never in pieces
            guest.connect((address(STRANGER, family), 53))
            assert guest.getsockopt(level, mtu) == 1500
            guest.send(bytes(1440))
            assert eventually(lambda: guest.getsockopt(level, mtu) == 1400)
    finally:
        ip(town.lab.node, "link set eth0 mtu 1500")


def test_an_echo_is_for_who_may_hear_everything(town: Town) -> None:
    """It has no port, so rules with ports do not speak of it. The machine declares no ports: then
    all that enters is the guest's."""
    town.save(machine(town.first, (), LABELS), "vm1.yaml")
    every = "[{}, {protocol: UDP}, {protocol: SCTP}]"
    assert pings(town) == (62, 62, 62, 62)
    town.save(CLOSED)
    assert pings(town) == (None, None, None, None)
    town.save(
        policy(f"{BOTH}, ingress: [{{ports: {every}}}], egress: [{{to: [{ALL4}], ports: {every}}}]")
    )
    assert pings(town) == (None, None, None, None)
    town.save(policy(f"{BOTH}, ingress: [{{from: [{ALL6}]}}], egress: [{{to: [{ALL4}]}}]"))
    assert pings(town) == (None, 62, 62, None)
    town.save(policy(f"{BOTH}, ingress: [{{from: [{ALL4}]}}]"))
    assert pings(town) == (62, None, None, None)


def pings(town: Town) -> tuple[int | None, ...]:
    """Who answers, by the hops that are left: inwards in both families, then outwards."""
    asks = [(town.lab.client, at(town.first, family)) for family in Family]
    asks += [(town.first.guest, address(STRANGER, family)) for family in Family]
    with ThreadPoolExecutor(len(asks)) as pool:
        return tuple(pool.map(lambda ask: pinged(ask[0], ip_address(ask[1]), tries=1), asks))


# ------------------------------------------------------------------------------- what one is told


TOLD = (
    policy(f"{PHONE}, ingress: [{{ports: [{{port: 80, endPort: 86}}]}}]", "web")
    + policy(
        f"{PHONE}, ingress: [{{from: [{{podSelector: {{matchLabels: {{role: web}}}}}}],"
        " ports: [{port: 85, endPort: 89}]}], egress: [{ports: [{protocol: UDP, port: 53}]}]",
        "team",
    )
)  # fmt: skip
WEB, TEAM = "NetworkPolicy/default/web", "NetworkPolicy/default/team"
OWNER = "VirtualMachine/default/vm1/red"


@pytest.mark.parametrize("live", [False, True], ids=["files", "live"])
def test_explain_names_the_policy_or_says_that_there_is_none(town: Town, live: bool) -> None:
    town.save(TOLD)
    place = ("--live",) if live else ("-f", str(town.node.manifests))

    def said(asked: tuple[str, str]) -> str:
        done = portranger("explain", *place, "--netns", town.first.pod, "--from", *asked)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1].partition("; ")[2]

    (front, front6), (stranger, stranger6) = (
        [address(who, family) for family in Family] for who in ("front", STRANGER)
    )
    wanted = {
        (stranger, "tcp/80"): f"{WEB} lets it in",
        (front, "tcp/85"): f"{TEAM} and {WEB} let it in",
        (front6, "tcp/89"): f"{TEAM} lets it in",
        (stranger6, "tcp/89"): "but no policy lets it in: it is dropped",
        (stranger, "udp/53"): "but no policy lets it in: it is dropped",
        (str(GUEST[Family.IP]), "udp/53"): f"{TEAM} lets it out to some destinations",
        (
            str(GUEST[Family.IP6]),
            "tcp/80",
        ): "but no policy lets it out: it is dropped, unless it is for the node itself",
    }
    with ThreadPoolExecutor(4) as pool:
        assert dict(zip(wanted, pool.map(said, wanted), strict=True)) == wanted


def test_plan_lists_what_policies_become(town: Town) -> None:
    town.node.save(POLICY, TOLD)
    words = ("plan", "-f", town.node.manifests, "--against", "empty")
    lines = portranger(*words).stdout.splitlines()
    filters = [" ".join(line.split()) for line in lines if " forward " in line]
    assert f"+ ip forward tcp 80-86 to 10.0.2.2 from anybody -> accept {WEB}" in filters
    assert f"+ ip6 forward udp 53 from fd10:0:2::2 to anybody -> accept {TEAM}" in filters
    assert f"+ ip forward everything to 10.0.2.2 from anybody -> drop {OWNER}" in filters
    assert f"+ ip6 forward everything from fd10:0:2::2 to anybody -> drop {OWNER}" in filters
    assert sum("198.51.100.21" in line for line in lines if "+ set peers-ip-" in line) == 1
    town.settle()
    asked = ("plan", "-f", str(town.node.manifests), "--detailed-exitcode")
    said = within(town.lab.node, sys.executable, "-m", "agent.entry", *asked)
    assert said.startswith("No changes."), said


def test_rules_of_policies_count_flows(town: Town) -> None:
    """As ranges do: what was let in counts once, and what was not, each packet."""
    town.save(TOLD)
    with served(town.lab):
        for _ in range(3):
            assert town.passes("in", STRANGER, TCP, 80)
        assert town.passes("in", "front", TCP, 89)
        assert town.passes("out", STRANGER, UDP, 53)
        assert not town.passes("in", STRANGER, UDP, 5005)
    done = portranger("show", "--netns", town.first.pod, "-o", "json")
    (shown,) = json.loads(done.stdout)["namespaces"]
    rules = [one for one in shown["rules"] if one["chain"] == "forward"]
    for family in Family:
        mine = [one for one in rules if one["family"] == family.value]
        counts = {key_of(one): one["packets"] for one in mine}
        assert counts[WEB, "tcp", "80-86", "accept"] == 3
        assert counts[TEAM, "tcp", "85-89", "accept"] == 1
        assert counts[TEAM, "udp", "53", "accept"] == 1
        dropped = [one for one in mine if one["action"] == "drop"]
        assert {one["packets"] for one in dropped if "destination" in one} == {1}
        flows = [
            town.daemon.metric(
                "range_packets_total", family=family.value, owner=WEB, ports="80-86"
            ),
            town.daemon.metric("range_packets_total", family=family.value, chain=DROPPED),
        ]
        assert flows == [3, 1]
    text = portranger("show", "--netns", town.first.pod).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(f"tcp 80-86 to 10.0.2.2 from anybody -> accept {WEB} 3 packets" in x for x in lines)


def key_of(rule: dict[str, Any]) -> tuple[str, ...]:
    return rule["owner"], rule.get("protocol", ""), rule.get("ports", ""), rule["action"]
