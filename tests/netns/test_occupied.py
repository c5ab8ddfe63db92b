"""What a namespace already uses is found in the kernel: real sockets, real rules of others."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.kernel.foreign_filters import MOST as FEW
from agent.kernel.foreign_filters import filters
from agent.kernel.netns import inside, opened
from agent.kernel.sockets import ephemeral, listeners, named, reserved
from agent.kernel.sysctl import write
from agent.kernel.translations import translations
from rules.foreign_filters import Flow, warnings
from rules.model import Family, Protocol
from rules.occupied import Listener
from rules.ports import PortRange
from rules.translations import listed
from tests.spaces import (
    applied,
    emptied,
    eventually,
    legacy,
    nft,
    observed,
    pod,
    process,
    vm,
    within,
)

STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM
IPV4, IPV6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture(scope="module")
def only() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    return emptied(only)


@contextmanager
def entered(netns: str) -> Iterator[None]:
    with opened(netns) as descriptor, inside(descriptor, netns):
        yield


@pytest.fixture
def bind(netns: str) -> Iterator[Callable[..., socket.socket]]:
    """Opens sockets in the namespace, and closes them in the end."""
    with ExitStack() as stack:

        def made(family: int, kind: int, address: str, port: int, v6only: int = 0) -> socket.socket:
            with entered(netns):
                one = stack.enter_context(socket.socket(family, kind))
            if family == IPV6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((address, port))
            if kind == STREAM:
                one.listen()
            return one

        yield made


def heard(netns: str) -> list[str]:
    with entered(netns):
        return [
            f"{one.protocol.value} {one.family.value} {one.address or '*'} {one.port}"
            for one in listeners()
        ]


def told(netns: str) -> list[str]:
    with entered(netns):
        found = translations()
    assert found.unreadable == ()
    return sorted(map(str, found.translations))


CASES = {
    "tcp": ((IPV4, STREAM, "0.0.0.0", 22), ["tcp ip * 22"]),
    "udp": ((IPV4, DATAGRAM, "0.0.0.0", 53), ["udp ip * 53"]),
    "one address": ((IPV4, STREAM, "192.0.2.2", 80), ["tcp ip 192.0.2.2 80"]),
    "one address of IPv6": ((IPV6, DATAGRAM, "2001:db8::2", 80), ["udp ip6 2001:db8::2 80"]),
    "loopback": ((IPV4, STREAM, "127.0.0.1", 631), ["tcp ip 127.0.0.1 631"]),
    "both families": ((IPV6, STREAM, "::", 443), ["tcp ip * 443", "tcp ip6 * 443"]),
    "both families of udp": ((IPV6, DATAGRAM, "::", 443), ["udp ip * 443", "udp ip6 * 443"]),
    "IPv6 only": ((IPV6, STREAM, "::", 443, 1), ["tcp ip6 * 443"]),
    "IPv6 only of udp": ((IPV6, DATAGRAM, "::", 443, 1), ["udp ip6 * 443"]),
    "IPv4 through IPv6": ((IPV6, STREAM, "::ffff:192.0.2.2", 80), ["tcp ip 192.0.2.2 80"]),
    "any IPv4 through IPv6": ((IPV6, STREAM, "::ffff:0.0.0.0", 80), ["tcp ip * 80"]),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES.keys())
def test_who_listens_is_heard(
    netns: str,
    bind: Callable[..., socket.socket],
    given: tuple[object, ...],
    expected: list[str],
) -> None:
    assert heard(netns) == []
    bind(*given)
    assert heard(netns) == expected


def test_only_sockets_that_take_from_anybody_listen(
    netns: str, bind: Callable[..., socket.socket]
) -> None:
    server = bind(IPV4, STREAM, "192.0.2.2", 80)
    with entered(netns), socket.socket(IPV4, STREAM) as client:
        client.settimeout(5)
        client.connect(("192.0.2.2", 80))
        accepted, _ = server.accept()
        with accepted, socket.socket(IPV4, STREAM) as bound:
            bound.bind(("0.0.0.0", 99))
            bind(IPV4, DATAGRAM, "0.0.0.0", 53).connect(("192.0.2.9", 5353))
            assert heard(netns) == ["tcp ip 192.0.2.2 80"]


def test_sockets_that_share_a_port_are_one_listener(
    netns: str, bind: Callable[..., socket.socket]
) -> None:
    for _ in range(3):
        bind(IPV4, STREAM, "0.0.0.0", 80)
    assert heard(netns) == ["tcp ip * 80"]


def test_many_listeners_are_all_heard(netns: str, bind: Callable[..., socket.socket]) -> None:
    """More than one message of the kernel can hold."""
    for port in range(20001, 20601):
        bind(IPV4, DATAGRAM, "0.0.0.0", port)
    assert heard(netns) == [f"udp ip * {port}" for port in range(20001, 20601)]


LISTENING = """
import socket, sys, pathlib
one = socket.create_server(("", 8080))
pathlib.Path("/proc/self/comm").write_bytes(sys.argv[1].encode())
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("my server", "my server"),
        ("\x1b[31mred\n", "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_process_that_listens_is_named(netns: str, name: str, shown: str) -> None:
    with process(sys.executable, "-c", LISTENING, name, netns=netns) as child:
        comm = Path(f"/proc/{child.pid}/comm")
        assert eventually(lambda: comm.read_bytes() == name.encode() + b"\n")
        with entered(netns):
            (one,) = named(listeners())
        assert str(one) == f"{shown} (pid {child.pid}) listens on tcp 8080"
    assert heard(netns) == []


def test_our_own_sockets_are_named_and_others_stay_as_they_are(
    netns: str, bind: Callable[..., socket.socket]
) -> None:
    bind(IPV6, STREAM, "::", 443)
    with entered(netns):
        found = listeners()
    gone = Listener(
        protocol=Protocol.TCP, family=Family.IP, address=ip_address("192.0.2.2"), port=1, inode=1
    )
    *ours, stranger = named([*found, gone])
    assert {one.pid for one in ours} == {os.getpid()}
    assert stranger == gone


def test_the_ports_of_the_moment_are_those_of_the_namespace(netns: str) -> None:
    with entered(netns):
        write("net.ipv4.ip_local_port_range", "40000 41000")
        write("net.ipv4.ip_local_reserved_ports", "8080,9148-9150")
        try:
            assert ephemeral() == PortRange(40000, 41000)
            assert reserved() == (PortRange(8080, 8080), PortRange(9148, 9150))
        finally:
            write("net.ipv4.ip_local_reserved_ports", "\n")  # nothing at all is no change
        assert reserved() == ()


def test_a_list_of_reserved_ports_however_long_is_read_and_written_whole(netns: str) -> None:
    """The kernel tells it by one read, as far as there is room, and takes 4 KiB by one write."""
    every_second = ",".join(map(str, range(1, 65536, 2)))
    assert len(every_second) > 1 << 17
    with entered(netns):
        write("net.ipv4.ip_local_reserved_ports", every_second)
        try:
            assert len(reserved()) == 32768
        finally:
            write("net.ipv4.ip_local_reserved_ports", "\n")


# ------------------------------------------------------------------------------------ translations


def test_a_namespace_without_rules_translates_nothing(netns: str) -> None:
    assert told(netns) == []


def test_our_own_rules_are_not_of_others(netns: str) -> None:
    applied(netns, vm("desktop", "1000-8000,22/udp"))
    assert observed(netns).live
    assert told(netns) == []


NATIVE = """
table ip theirs {
    map ports { type inet_service : ipv4_addr . inet_service; elements = { 80 : 10.0.0.1 . 8080 }; }
    set some { type inet_service; flags interval; elements = { 20-21, 990 }; }
    chain pre {
        type nat hook prerouting priority -100;
        dnat to tcp dport map @ports
        tcp dport @some redirect
        ip daddr 192.0.2.2 udp dport { 53, 100-200 } dnat to 10.0.0.1
    }
}
table inet more {
    chain pre { type nat hook prerouting priority -90; tcp dport 8443 dnat ip6 to 2001:db8::5; }
}
table inet filter {
    chain in { type filter hook input priority 0; tcp dport 22 accept; }
}
"""
NATIVE_TOLD = [
    "table inet more, chain pre translates tcp 8443",
    "table ip theirs, chain pre translates tcp 20-21,990",
    "table ip theirs, chain pre translates tcp 80",
    "table ip theirs, chain pre translates udp 53,100-200 at 192.0.2.2",
]


def test_rules_of_nftables_are_found(netns: str) -> None:
    nft(netns, NATIVE)
    assert told(netns) == NATIVE_TOLD


def test_a_table_that_sleeps_translates_nothing(netns: str) -> None:
    nft(netns, NATIVE)
    nft(netns, "add table ip theirs { flags dormant; }")
    assert told(netns) == NATIVE_TOLD[:1]


OWNING = """
import sys
import nftables
context = nftables.Nftables("libnftables.so.1")
print(context.cmd(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_a_table_that_belongs_to_a_process_is_read_all_the_same(netns: str) -> None:
    script = NATIVE.replace("{\n    map", "{\n    flags owner;\n    map")
    with process(sys.executable, "-c", OWNING, script, netns=netns):
        assert eventually(lambda: told(netns) == NATIVE_TOLD)
    assert eventually(lambda: told(netns) == NATIVE_TOLD[:1])


def test_rules_of_iptables_over_nftables_are_found(
    netns: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """\
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER -p sctp -m sctp --dport 9 -j REDIRECT --to-ports 10
-A DOCKER -d 192.0.2.2/32 -p tcp -m multiport --dports 81,443,1000:2000 -j DNAT --to 172.17.0.2
COMMIT
"""
    within(netns, "iptables-nft-restore", stdin=script)
    assert told(netns) == [
        "table ip nat, chain DOCKER translates sctp 9",
        "table ip nat, chain DOCKER translates tcp 8080",
        "table ip nat, chain DOCKER translates tcp 81,443,1000-2000 at 192.0.2.2",
    ]
    assert capfd.readouterr() == ("", "")


def test_rules_of_the_legacy_tables_are_found_and_other_tables_are_not_made(netns: str) -> None:
    assert "nat" not in within(netns, "cat", "/proc/net/ip6_tables_names", code=None).split()
    rule = "-A PREROUTING -p tcp -m multiport --dports 81,443 -j REDIRECT --to-ports 1"
    legacy(netns, rule, families=[Family.IP])
    assert told(netns) == ["legacy table ip nat, chain PREROUTING translates tcp 81,443"]
    assert "nat" not in within(netns, "cat", "/proc/net/ip6_tables_names", code=None).split()
    legacy(netns, rule, families=[Family.IP6])
    assert told(netns) == [
        "legacy table ip nat, chain PREROUTING translates tcp 81,443",
        "legacy table ip6 nat, chain PREROUTING translates tcp 81,443",
    ]


PORTMAP = """\
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:CNI-DN-aaaa - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "a" -m multiport --dports 80,90 -j CNI-DN-aaaa
-A CNI-DN-aaaa -s 10.88.0.2/32 -p tcp -m tcp --dport 80 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-aaaa -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.88.0.2:80
-A CNI-DN-aaaa -p tcp -m tcp --dport 90 -j DNAT --to-destination 10.88.0.2:90
COMMIT
"""
KUBE_PROXY = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-EXT-X - [0:0]
:KUBE-SVC-X - [0:0]
:KUBE-SEP-1 - [0:0]
:KUBE-SEP-2 - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-X
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-X
-A KUBE-EXT-X -j KUBE-SVC-X
-A KUBE-SVC-X -m statistic --mode random --probability 0.5 -j KUBE-SEP-1
-A KUBE-SVC-X -j KUBE-SEP-2
-A KUBE-SEP-1 -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80
-A KUBE-SEP-2 -p tcp -m tcp -j DNAT --to-destination 10.0.0.2:80
COMMIT
"""
KUBE_PROXY_NFT = """
table ip kube-proxy {
    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.9 . tcp . 80 : goto service-x }
    }
    map service-nodeports {
        type inet_proto . inet_service : verdict
        elements = { tcp . 30080 : goto external-x, udp . 30053 : goto external-x }
    }
    chain endpoint-1 { meta l4proto tcp dnat to 10.0.0.1:80; }
    chain endpoint-2 { meta l4proto tcp dnat to 10.0.0.2:80; }
    chain service-x { numgen random mod 2 vmap { 0 : goto endpoint-1, 1 : goto endpoint-2 }; }
    chain external-x { goto service-x; }
    chain services {
        ip daddr . meta l4proto . th dport vmap @service-ips
        ip daddr != 127.0.0.0/8 fib daddr type local meta l4proto . th dport vmap @service-nodeports
    }
    chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
    chain nat-output { type nat hook output priority -100; jump services; }
}
"""
JUMPING = {
    "portmap": (PORTMAP, "chain CNI-DN-aaaa", ["tcp 80", "tcp 90"]),
    "kube-proxy": (
        KUBE_PROXY,
        "chain KUBE-",
        ["tcp 30080", "tcp 80 at 10.96.0.9"],
    ),
}


@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize(("script", "chain", "expected"), JUMPING.values(), ids=JUMPING.keys())
def test_a_port_that_is_matched_by_a_jump_is_found(
    netns: str, variant: str, script: str, chain: str, expected: list[str]
) -> None:
    within(netns, f"iptables-{variant}-restore", stdin=script)
    try:
        found = told(netns)
        assert all(chain in one for one in found), found
        assert [one.partition(" translates ")[2] for one in found] == expected
    finally:
        within(netns, f"iptables-{variant}", "-t", "nat", "-F")


def test_a_port_that_a_verdict_map_leads_to_a_translation_is_found(netns: str) -> None:
    nft(netns, KUBE_PROXY_NFT)
    assert told(netns) == [
        "table ip kube-proxy, chain services translates tcp 30080",
        "table ip kube-proxy, chain services translates tcp 80 at 10.96.0.9",
    ]


INTERVALS = """
table inet theirs {
    map spread { type ipv4_addr . inet_service : ipv4_addr; flags interval
        elements = { 192.0.2.2 . 1000-1999 : 10.0.0.1, 192.0.2.0/24 . 53 : 10.0.0.2 }; }
    set whole { type inet_service; flags interval; elements = { 0-65535 }; }
    set upper { type inet_service; flags interval; elements = { 100-199, 200, 60000-65535 }; }
    set nobody { type inet_service; }
    chain pre {
        type nat hook prerouting priority -100
        dnat ip to ip daddr . udp dport map @spread
        tcp dport @upper dnat ip6 to 2001:db8::5
        tcp dport @nobody redirect
        ip6 daddr 2001:db8::2 sctp dport @whole redirect
        tcp dport != { 1-100, 200-65535 } redirect
        meta l4proto { tcp, udp } th dport 53 redirect
    }
}
"""


def test_sets_of_intervals_are_read_as_they_are(netns: str) -> None:
    nft(netns, INTERVALS)
    where = "table inet theirs, chain pre translates "
    assert [one.removeprefix(where) for one in told(netns)] == [
        "sctp 1-65535 at 2001:db8::2",
        "tcp 100-200,60000-65535",
        "tcp 101-199",
        "tcp 53",
        "udp 1000-1999 at 192.0.2.2",
        "udp 53",  # of a network of IPv4
        "udp 53",  # of both families
    ]


def test_a_hundred_thousand_rules_are_read(netns: str) -> None:
    many = "\n".join(
        f"add rule ip theirs pre {protocol} dport {port} dnat to 10.0.0.1"
        for protocol in ("tcp", "udp")
        for port in range(10000, 60000)
    )
    base = (
        "add table ip theirs\nadd chain ip theirs pre { type nat hook prerouting priority -100; }"
    )
    nft(netns, f"{base}\n{many}")
    assert told(netns) == [
        "table ip theirs, chain pre translates tcp 10000-59999",
        "table ip theirs, chain pre translates udp 10000-59999",
    ]


def test_a_table_with_more_than_is_read_is_named(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft(netns, NATIVE)
    monkeypatch.setattr("agent.kernel.translations.MOST", 3)
    with entered(netns):
        found = translations()
    assert found.unreadable == ("table ip theirs: it holds more than 3 rules and elements",)
    assert [str(one) for one in found.translations] == NATIVE_TOLD[:1]


def test_looking_changes_nothing(netns: str) -> None:
    nft(netns, NATIVE)
    within(
        netns,
        "iptables-nft",
        "-t",
        "nat",
        "-A",
        "PREROUTING",
        "-p",
        "sctp",
        "--dport",
        "9",
        "-j",
        "REDIRECT",
    )
    before = within(netns, "nft", "-a", "list", "ruleset")
    assert told(netns)
    assert within(netns, "nft", "-a", "list", "ruleset") == before


@pytest.mark.parametrize(
    "rule",
    [
        'iifname { "eth*", "veth*" } accept',
        'oifname { "eth*", "lo" } accept',
        "tcp dport @some accept",
        "ct state { established, new } accept",
    ],
)
def test_wildcards_in_filters_of_others_are_read(netns: str, rule: str) -> None:
    nft(
        netns,
        "table inet f {\n"
        "set some { type inet_service; flags interval; elements = { 1-5, * }\n}\n"
        f"chain c {{ type filter hook forward priority 0; policy drop; {rule}\n}}\n}}",
    )
    flow = Flow(
        family=Family.IP,
        destination=ip_address("10.0.2.2"),
        protocol=Protocol.TCP,
        ports=PortRange(22, 22),
        enters="eth0",
        leaves="eth1",
    )
    with entered(netns):
        assert list(warnings(filters(), [flow])) == []


FORWARDED = Flow(
    family=Family.IP,
    destination=ip_address("10.0.2.2"),
    protocol=Protocol.TCP,
    ports=PortRange(22, 22),
    enters="eth0",
    leaves="eth1",
)
# Rules that accept some of the flows that are forwarded, and perhaps not those in question.
SOME = [
    "limit rate 10/second accept",
    "limit name slow accept",
    "quota 10 mbytes accept",
    "quota name little accept",
    "ct count 5 accept",
    "tcp sport 68 accept",
    "tcp sport { 68, 69 } accept",
    "tcp flags syn accept",
    "tcp option maxseg size 1000 accept",
    "ip daddr & 255.0.255.0 == 10.0.3.0 accept",
    "ip daddr & 255.0.255.0 == 10.0.2.0 tcp sport 1 accept",
    "rt classid 1 accept",
    "meta random <= 5 accept",
    "tcp dport 22 update @seen { ip saddr limit rate 1/second } accept",
]
ALL = [
    "counter log accept",
    "counter name everyone accept",
    "ct status dnat accept",
    "tcp dport 20-30 accept",
]
FILTERING = """table inet f {{
    limit slow {{ rate 10/second }}
    quota little {{ 10 mbytes }}
    counter everyone {{ }}
    set seen {{ type ipv4_addr; size 100; flags dynamic; }}
    chain c {{ type filter hook forward priority 0; policy drop; {}
    }}
}}"""


def warned(netns: str) -> list[str]:
    with entered(netns):
        return list(warnings(filters(), [FORWARDED]))


@pytest.mark.parametrize("rule", SOME)
def test_a_filter_of_others_that_accepts_only_some_flows_may_drop_others(
    netns: str, rule: str
) -> None:
    nft(netns, FILTERING.format(rule))
    assert len(warned(netns)) == 1
    nft(netns, f"flush ruleset; {FILTERING.format(f'{rule}; accept')}")
    assert warned(netns) == []


@pytest.mark.parametrize("rule", ALL)
def test_a_filter_of_others_that_accepts_all_flows_drops_none(netns: str, rule: str) -> None:
    nft(netns, FILTERING.format(rule))
    assert warned(netns) == []


# In the words of iptables, and whether all flows in question are accepted.
ACCEPTING = {
    "-p tcp -m tcp --sport 68": False,
    "-p tcp -m tcp --sport 68 --dport 22": False,
    "-p tcp -m tcp --dport 22 --tcp-flags SYN,ACK SYN": False,
    "-p tcp -m multiport --sports 68,69": False,
    "-p tcp -m multiport ! --sports 68,69": False,
    "-p tcp -m multiport --ports 68,69": False,
    "-p tcp -m multiport ! --ports 68,69": False,
    "-p tcp -m multiport --dports 22,69": True,
    "-p tcp -m multiport ! --dports 68,69": True,
    "-m limit --limit 1/second": False,
    "-d 10.0.2.0/255.0.255.0": False,
    "-d 10.0.3.0/255.0.255.0": False,
    "-d 10.0.2.0/24": True,
    "-m conntrack --ctstate DNAT,NEW": True,
    "-m conntrack --ctstate NEW": True,
    "-m conntrack --ctstate DNAT": True,
    "-m conntrack --ctstate DNAT,ESTABLISHED": True,
    "-m conntrack --ctstate SNAT,ESTABLISHED": False,
    "-m conntrack ! --ctstate DNAT,NEW": False,
    "-m comment --comment all": True,
}


@pytest.mark.parametrize(("words", "all_of_them"), ACCEPTING.items(), ids=ACCEPTING.keys())
def test_what_iptables_over_nftables_accepts_only_sometimes_may_be_dropped(
    netns: str, words: str, all_of_them: bool
) -> None:
    script = f"*filter\n:FORWARD DROP [0:0]\n-A FORWARD {words} -j ACCEPT\nCOMMIT\n"
    within(netns, "iptables-nft-restore", stdin=script)
    assert (warned(netns) == []) is all_of_them


# Translations under conditions: whatever else is asked, the port may be taken.
UNDER_CONDITIONS = [
    "tcp dport 81 limit rate 10/second dnat to 10.0.0.1",
    "tcp dport 81 quota 10 mbytes dnat to 10.0.0.1",
    "tcp dport 81 ct count 5 dnat to 10.0.0.1",
    "tcp sport 1 tcp dport 81 dnat to 10.0.0.1",
    "tcp sport . tcp dport { 1 . 81, 2 . 82 } dnat to 10.0.0.1",
    "tcp dport 81 socket transparent 1 redirect",
    "tcp dport 81 meta mark & 0x4 == 0x4 redirect",
    "tcp dport 81 ip daddr & 255.0.255.0 == 10.0.2.0 redirect",
    "ip daddr & 255.0.255.0 == 10.0.2.0 udp dport != 53 redirect",
    "tcp dport 81 ct state new redirect",
    "tcp dport 81 ip saddr 10.0.0.0/8 redirect",
    "tcp dport 81 rt classid 1 redirect",
    "tcp dport 81 numgen random mod 2 1 dnat to 10.0.0.1",
    "meta l4proto { tcp, udp } th dport { 81, 90-99 } redirect",
    "tcp dport 81 update @seen { ip saddr limit rate 1/second } redirect",
]


@pytest.mark.parametrize("rule", UNDER_CONDITIONS)
def test_a_port_that_may_be_translated_is_found_as_nft_lists_it(netns: str, rule: str) -> None:
    script = FILTERING.format("").replace("inet f", "ip f").replace("type filter", "type nat")
    nft(netns, script.replace("hook forward priority 0; policy drop;", f"{HOOK} {rule}"))
    found = told(netns)
    assert len(found) >= 1
    listing = json.loads(within(netns, "nft", "-j", "list", "ruleset"))["nftables"]
    assert found == sorted(map(str, listed(listing)))


HOOK = "hook prerouting priority -100;"


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "-p tcp -m tcp --sport 1 --dport 81": "tcp 81",
        "-p tcp -m tcp --dport 81 -m limit --limit 1/second": "tcp 81",
        "-p tcp -m multiport --ports 81,82": "tcp 81-82",
        "-p tcp -m multiport --sports 1,2 -m tcp --dport 81": "tcp 81",
        "-p tcp -m tcp --dport 81 -m conntrack --ctstate DNAT,NEW": "tcp 81",
        "-d 10.0.2.0/255.0.255.0 -p udp -m udp --dport 81": "udp 81",
    }.items(),
)
def test_a_port_that_iptables_may_translate_is_found(netns: str, words: str, expected: str) -> None:
    script = f"*nat\n-A PREROUTING {words} -j DNAT --to-destination 10.0.0.1\nCOMMIT\n"
    within(netns, "iptables-nft-restore", stdin=script)
    assert told(netns) == [f"table ip nat, chain PREROUTING translates {expected}"]


def test_filters_of_others_that_look_into_a_large_set_again_and_again_are_left_out(
    netns: str,
) -> None:
    ports = ", ".join(map(str, range(1, 4000, 2)))
    rules = "\n".join(["tcp dport @some accept"] * 4)
    nft(
        netns,
        f"table inet f {{\nset some {{ type inet_service; elements = {{ {ports} }}\n}}\n"
        f"chain c {{ type filter hook forward priority 0; policy drop; {rules}\n}}\n}}",
    )
    with entered(netns):
        assert filters() == ()


def test_legacy_tables_that_cannot_be_read_are_named(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image without the programs of iptables."""
    rule = "-A PREROUTING -p tcp --dport 80 -j REDIRECT"
    legacy(netns, rule, families=[Family.IP])
    missing = dict.fromkeys(Family, "iptables-that-nobody-installed")
    monkeypatch.setattr("agent.kernel.translations.PROGRAMS", missing)
    with entered(netns):
        found = translations()
    why = found.unreadable[0]  # what an earlier test made of the other family stays in use
    assert why.startswith("legacy table ip nat: ")
    assert why.endswith("is not installed")


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_tables_that_cannot_be_listed_are_not_taken_for_none(
    netns: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def asked(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("agent.kernel.translations.ask", asked)
    with entered(netns):
        assert f"nftables: {os.strerror(code)}" in translations().unreadable


def test_legacy_filters_of_others_are_left_out_where_there_are_very_many(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(family: Family) -> str:
        rules = ["-A FORWARD -j DROP"] * (FEW if family is Family.IP else FEW + 1)
        return "\n".join(["*filter", ":FORWARD ACCEPT [0:0]", *rules, "COMMIT", ""])

    monkeypatch.setattr("agent.kernel.foreign_filters.in_use", lambda _: frozenset({"filter"}))
    monkeypatch.setattr("agent.kernel.foreign_filters.legacy_saved", saved)
    with entered(netns):
        assert [one.families for one in filters()] == [{Family.IP}]
