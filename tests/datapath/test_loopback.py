"""Services that listen on 127.0.0.1 of a namespace are not for whoever is behind the guest's link,
although loopback leads to the guest from inside. With packets, in both backends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from agent.kernel.iptables import Iptables
from agent.kernel.lab import Lab
from agent.kernel.nftables import Nftables
from rules.model import Chain, Protocol
from rules.plan import Plan
from tests.datapath.policing import Ask, answered
from tests.kubevirt import programmed
from tests.nodes import KINDS, answering, socket_in
from tests.spaces import (
    BACKENDS,
    NFTABLES,
    applied,
    asked,
    ip,
    lab,
    observed,
    portranger,
    using,
    vm,
    within,
)
from tests.spaces import run as command

TCP, UDP = Protocol.TCP, Protocol.UDP
SECRET = 7000  # a port that only programs of the namespace are to reach
BRIDGE = "k6t-eth0"


@pytest.fixture(scope="module", params=BACKENDS)
def wired(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A guest without loopback addresses, that sends what is for 127.0.0.0/8 to its gateway."""
    with using(request.param), lab() as made:
        within(made.guest, "sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1")
        ip(made.guest, "addr flush dev lo", "route add 127.0.0.0/8 via 10.0.2.1 dev eth0")
        yield made


@contextmanager
def listening(where: str) -> Iterator[None]:
    """Services of that namespace for itself alone."""
    with (
        socket_in(where, "127.0.0.1", KINDS[TCP]) as stream,
        socket_in(where, "127.0.0.1", KINDS[UDP]) as datagrams,
    ):
        over = threading.Event()
        for one in (stream, datagrams):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", SECRET))
            one.settimeout(0.1)
        stream.listen(8)

        def serve() -> None:
            while not over.is_set():
                with suppress(OSError):
                    connection, _ = stream.accept()
                    with connection:
                        connection.settimeout(0.5)
                        if connection.recv(10):
                            connection.sendall(b"secret")
                with suppress(OSError):
                    _, peer = datagrams.recvfrom(10)
                    datagrams.sendto(b"secret", peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(5)


def asks(where: str) -> list[Ask]:
    return [Ask(where, "", protocol, "127.0.0.1", SECRET) for protocol in (TCP, UDP)]


def test_a_guest_does_not_reach_services_on_loopback(wired: Lab) -> None:
    applied(wired.pod, vm("a", "22"))
    assert localnet(wired.pod) == "1"  # so that 127.0.0.1 leads to the guest
    with listening(wired.pod):
        assert answered(asks(wired.pod), asks(wired.pod)) == {*asks(wired.pod)}
        assert answered(asks(wired.guest)) == set()
        drops = [one for one in observed(wired.pod).live if one.rule.chain is Chain.RAW]
        assert [one.rule.interface for one in drops] == [BRIDGE]
        assert sum(one.packets for one in drops) >= 2


def test_loopback_still_leads_to_the_guest(wired: Lab) -> None:
    applied(wired.pod, vm("a", "22,22/udp"))
    wanted = [Ask(wired.pod, "", protocol, "127.0.0.1", 22) for protocol in (TCP, UDP)]
    with answering(wired.guest, "guest", [(TCP, 22), (UDP, 22)], v6=False):
        assert answered(wanted, wanted) == {*wanted}


def test_when_its_rules_are_removed_a_guest_does_not_reach_services_on_loopback(
    wired: Lab,
) -> None:
    """Neither after an edit, nor after `clear`."""
    for removed in (applied, cleared):
        applied(wired.pod, vm("a", "22"))
        removed(wired.pod)
        assert not observed(wired.pod).live
        with listening(wired.pod):
            assert answered(asks(wired.guest)) == set()
            assert answered(asks(wired.pod), asks(wired.pod)) == {*asks(wired.pod)}
        assert localnet(wired.pod) == "0"


def test_loopback_is_shut_before_the_drop_goes(wired: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    applied(wired.pod, vm("a", "22"))
    when_committed: list[str] = []
    for tables in (Nftables, Iptables):
        commit = tables.commit

        def watched(self: Any, plan: Plan, commit: Any = commit) -> None:
            when_committed.append(localnet(wired.pod))
            commit(self, plan)

        monkeypatch.setattr(tables, "commit", watched)
    applied(wired.pod)
    applied(wired.pod, vm("a", "22"))
    assert when_committed == ["0", "0"]
    assert localnet(wired.pod) == "1"


def test_a_setting_of_kubevirt_stays_when_our_rules_go() -> None:
    with using(NFTABLES), lab() as made:
        programmed(made.pod, "22")
        applied(made.pod, vm("a", "22"))
        assert [one for one in observed(made.pod).live if one.rule.chain is Chain.RAW]
        applied(made.pod)
        assert not observed(made.pod).live
        assert localnet(made.pod) == "1"


def cleared(netns: str) -> None:
    done = portranger("clear", "--netns", netns, "--yes", "--backend", asked())
    assert done.returncode == 0, done.stderr
    assert f"~ sysctl net.ipv4.conf.{BRIDGE}.route_localnet 1 -> 0" in done.stdout


def localnet(netns: str) -> str:
    return within(netns, "sysctl", "-n", f"net.ipv4.conf.{BRIDGE}.route_localnet").strip()


def test_without_the_rule_the_guest_would_reach_them(wired: Lab) -> None:
    """So the test above shows something."""
    applied(wired.pod, vm("a", "22"))
    (drop,) = [one for one in observed(wired.pod).live if one.rule.chain is Chain.RAW]
    commands = {
        "nftables": f"nft delete rule inet portranger prerouting-raw handle {drop.handle}",
        "iptables": "iptables-legacy -t mangle -F PORTRANGER-PREROUTING",
    }
    there = within(wired.pod, "iptables-legacy", "-t", "mangle", "-S", code=None)
    backend = "iptables" if "PORTRANGER-PREROUTING" in there else "nftables"
    command("ip", "netns", "exec", wired.pod, *commands[backend].split())
    with listening(wired.pod):
        assert answered(asks(wired.guest), asks(wired.guest)) == {*asks(wired.guest)}
