"""A filter of somebody else that drops what we forward is named, with the remedy, in the plan, in
the status and by explain; and the warning goes with the packets' way: it is there exactly where a
packet is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rules.model import Protocol
from tests.daemon.publishing import (
    SELF,
    by_hand,
    publishes,
    publishing,
    service,
    wired,
)
from tests.daemon.running import Node
from tests.nodes import NODE4, Net, answering, asked
from tests.spaces import eventually, nft, within

TCP = Protocol.TCP
NATIVE = """
table inet theirs {{
    chain through {{
        type filter hook forward priority 0; policy {};
        {}
    }}
}}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    with wired() as made:
        yield made


@pytest.fixture
def node(lab: Net, tmp_path: Path) -> Iterator[Node]:
    with publishing(lab, tmp_path / "node") as made:
        made.save("a.yaml", service("a", 5000, count=10, at=30100))
        yield made


def iptables(*rules: str) -> str:
    lines = "".join(f"-A FORWARD {rule}\n" for rule in rules)
    return f"*filter\n:FORWARD DROP [0:0]\n:DOCKER - [0:0]\n{lines}COMMIT\n"


DOCKER = (
    "-o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-o docker0 -j DOCKER",
    "-i docker0 ! -o docker0 -j ACCEPT",
)
ESTABLISHED = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
CASES = {  # what is there, and whether it drops what we forward
    "policy drop": (NATIVE.format("drop", ""), True),
    "policy accept": (NATIVE.format("accept", "ip saddr 192.0.2.77 drop"), False),
    "last rule drops": (NATIVE.format("accept", "ct state established accept; drop"), True),
    "last rule rejects": (NATIVE.format("accept", "reject"), True),
    "translated flows accepted": (NATIVE.format("drop", "ct status dnat accept"), False),
    "new flows accepted": (NATIVE.format("drop", "ct state new,established accept"), False),
    "destination accepted": (
        NATIVE.format(
            "drop",
            "ip daddr 10.0.0.0/8 accept; ip6 daddr fd01::/64 accept; ct state established accept",
        ),
        False,
    ),
    "other destination": (NATIVE.format("drop", "ip daddr 172.16.0.0/12 accept"), True),
    "ports accepted": (
        NATIVE.format("drop", "tcp dport 5000-5999 accept; ct state established accept"),
        False,
    ),
    "one of the ports dropped": (NATIVE.format("accept", "tcp dport 5004 drop"), True),
    "docker": (iptables(*DOCKER), True),
    "remedied docker": (iptables("-m conntrack --ctstate DNAT -j ACCEPT", *DOCKER), False),
}


def load(netns: str, script: str, variant: str = "nft") -> None:
    if script.startswith("*"):
        within(netns, f"iptables-{variant}-restore", stdin=script)
    else:
        nft(netns, script)


@pytest.mark.parametrize(("script", "drops"), CASES.values(), ids=CASES.keys())
def test_a_filter_on_the_node_is_warned_of_where_it_drops(
    node: Node, lab: Net, script: str, drops: bool
) -> None:
    with (
        node.running() as daemon,
        answering(lab.vms[0].guest, "guest", [(TCP, port) for port in range(5000, 5010)]),
    ):
        publishes(daemon, "a")
        load(lab.node, script)
        answer = asked(lab.client, TCP, NODE4, 30104)
        assert answer.startswith("guest 5004 ") != drops

        def warned() -> list[str]:
            return [one for one in daemon.standing(SELF)["notes"] if "may drop" in one]

        if drops:
            assert eventually(lambda: bool(warned())), daemon.standing(SELF)
            assert "chain" in warned()[0]
        else:
            daemon.reload()  # nothing else tells that it has looked, and warns of nothing
            assert not warned()
        live = by_hand(lab.node, "explain", "--live", "--netns", SELF, "tcp/30104")[1]
        assert ("may drop" in live) == drops
        planned = by_hand(lab.node, "plan", "-f", node.manifests)[1]
        assert ("may drop" in planned) == drops
        if drops:  # the remedy is one, and iptables can still read the tables that it wrote
            within(lab.node, *warned()[0].rpartition(": ")[2].split())
            assert asked(lab.client, TCP, NODE4, 30104).startswith("guest 5004 ")
            assert eventually(lambda: not warned()), daemon.standing(SELF)
            if script.startswith("*"):
                within(lab.node, "iptables-nft", "-S", "FORWARD")


def test_explain_warns_of_a_filter_only_for_a_port_that_it_drops(node: Node, lab: Net) -> None:
    with node.running() as daemon:
        publishes(daemon, "a")
        nft(lab.node, NATIVE.format("accept", "tcp dport 5004 drop"))
        told = [
            by_hand(lab.node, "explain", "--live", "--netns", SELF, f"tcp/{port}")[1]
            for port in (30103, 30104)
        ]
        assert ["(tcp 5004 to" in one for one in told] == [False, True]


@pytest.mark.parametrize(
    ("script", "drops"),
    [(iptables(*DOCKER), True), (iptables(ESTABLISHED, "-d 10.1.0.0/16 -j ACCEPT"), False)],
    ids=["docker", "accepted"],
)
def test_the_legacy_tables_are_read_where_they_are_in_use(
    node: Node, lab: Net, script: str, drops: bool
) -> None:
    load(lab.node, script, "legacy")
    try:
        planned = by_hand(lab.node, "plan", "-f", node.manifests)[1]
        assert ("legacy table ip filter, chain FORWARD may drop" in planned) == drops
        assert "filter" not in within(lab.node, "cat", "/proc/net/ip6_tables_names", code=None)
    finally:
        within(lab.node, "iptables-legacy", "-P", "FORWARD", "ACCEPT")
        within(lab.node, "iptables-legacy", "-F")


@pytest.mark.parametrize("table", ["filter", "mangle"])
def test_a_legacy_filter_that_comes_and_goes_is_noticed_without_a_resync(
    node: Node, lab: Net, table: str
) -> None:
    words = ("iptables-legacy", "-t", table)
    with (
        node.running() as daemon,
        answering(lab.vms[0].guest, "guest", [(TCP, port) for port in range(5000, 5010)]),
    ):
        publishes(daemon, "a")
        assert asked(lab.client, TCP, NODE4, 30104).startswith("guest 5004 ")

        def warned() -> str:
            return " ".join(one for one in daemon.standing(SELF)["notes"] if "may drop" in one)

        assert warned() == ""
        within(lab.node, *words, "-P", "FORWARD", "DROP")
        try:
            assert not asked(lab.client, TCP, NODE4, 30104)
            where = f"legacy table ip {table}, chain FORWARD"
            assert eventually(lambda: where in warned()), daemon.standing(SELF)
            within(lab.node, *warned().rpartition(": ")[2].split())
            assert asked(lab.client, TCP, NODE4, 30104).startswith("guest 5004 ")
            assert eventually(lambda: warned() == ""), daemon.standing(SELF)
        finally:
            within(lab.node, *words, "-P", "FORWARD", "ACCEPT")
            within(lab.node, *words, "-F")


def test_a_filter_in_the_namespace_of_a_machine_is_warned_of(node: Node, lab: Net) -> None:
    pod = lab.vms[0].pod
    with node.running() as daemon:
        assert daemon.applied()
        nft(pod, NATIVE.format("drop", ""))
        assert eventually(lambda: "may drop" in str(daemon.standing(pod)["notes"]))
        nft(pod, "delete table inet theirs")
        assert eventually(lambda: "may drop" not in str(daemon.standing(pod)["notes"]))
