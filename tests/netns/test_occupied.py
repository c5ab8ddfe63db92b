"""What a namespace already uses is found in the kernel: real sockets, real rules of others."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.kernel.netns import inside, opened
from agent.kernel.sockets import ephemeral, listeners, named, reserved
from agent.kernel.sysctl import write
from agent.kernel.translations import translations
from rules.model import Family, Protocol
from rules.occupied import Listener
from rules.ports import PortRange
from tests.spaces import (
    NFTABLES,
    applied,
    emptied,
    eventually,
    kernel,
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
    library = kernel(NFTABLES)._workers.libnftables
    with opened(netns) as descriptor, inside(descriptor, netns):
        return sorted(map(str, translations(partial(library.listed, descriptor))))


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
