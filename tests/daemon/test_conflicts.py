"""A published range never takes what the node, or somebody on it, uses already: that is said before
it hurts, in `plan`, in the log and in the status, with the name of who is in the way; and it is
published as soon as nobody is."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rules.model import Family, Protocol
from rules.ports import PortRange
from tests.daemon.publishing import (
    RANDOM,
    RESERVED,
    SELF,
    Spot,
    by_hand,
    comes_to_refuse,
    given,
    owner,
    planned,
    publishes,
    publishing,
    refusals,
    refuses,
    service,
    set_sysctl,
    spots,
    wired,
)
from tests.daemon.running import Node
from tests.nodes import KINDS, NODE4, NODE6, Net, answering, asked, socket_in
from tests.spaces import eventually, legacy, nft, within

TCP, UDP = Protocol.TCP, Protocol.UDP


@pytest.fixture
def lab() -> Iterator[Net]:
    with wired() as made:
        yield made


@pytest.fixture
def node(lab: Net, tmp_path: Path) -> Iterator[Node]:
    with publishing(lab, tmp_path / "node") as made:
        yield made


@contextmanager
def listening(netns: str, at: str, port: int, protocol: Protocol = TCP) -> Iterator[str]:
    """A socket of this process there, and how it is named; one of `::` is of both families."""
    with socket_in(netns, at, KINDS[protocol]) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((at, port))
        if protocol is TCP:
            made.listen()
        name = Path("/proc/self/comm").read_text().strip()
        yield f"{name} (pid {os.getpid()}) listens on {protocol.value} {port}"


def published_in_plan(node: Node) -> tuple[int, set[Spot], list[str]]:
    """The exit code of a plan, what it would publish, and what is wrong."""
    code, plan = planned(node.home, node.manifests)
    rules = [one["after"] for one in plan["changes"] if one["netns"] == SELF and one.get("after")]
    ends = [one["ports"].split("-") for one in rules if one.get("ports")]
    found = {
        (one["owner"].split("/")[2], one["family"], port)
        for one, both in zip([one for one in rules if one.get("ports")], ends, strict=True)
        for port in range(int(both[0]), int(both[-1]) + 1)
    }
    return code, found, [one["problem"] for one in plan["problems"]]


LISTENERS = {  # who listens where, and in which families that is in the way of tcp 30100-30104
    "all4": (TCP, "0.0.0.0", 30100, {"ip"}),
    "both": (TCP, "::", 30104, {"ip", "ip6"}),
    "at4": (TCP, NODE4, 30102, {"ip"}),
    "at6": (TCP, NODE6, 30102, {"ip6"}),
    "loopback": (TCP, "127.0.0.1", 30100, set()),
    "loopback6": (TCP, "::1", 30100, set()),
    "beside": (TCP, "0.0.0.0", 30105, set()),
    "before": (TCP, "0.0.0.0", 30099, set()),
    "udp": (UDP, "0.0.0.0", 30103, set()),
    "datagrams": (UDP, "0.0.0.0", 30101, {"ip"}),  # of a Service that is udp, too
}


def test_who_listens_on_the_node_keeps_its_port(node: Node, lab: Net) -> None:
    """One Service for each kind of listener, side by side."""
    everything: set[Spot] = set()
    met: dict[Spot, str] = {}
    with ExitStack() as sockets:
        for place, (name, (protocol, at, port, hurts)) in enumerate(LISTENERS.items()):
            asks, first = "UDP" if name == "datagrams" else "TCP", 30100 + 10 * place
            node.save(f"{name}.yaml", service(name, 5000, count=5, at=first, protocol=asks))
            words = sockets.enter_context(listening(lab.node, at, port + 10 * place, protocol))
            everything |= {
                (name, family.value, port) for family in Family for port in range(first, first + 5)
            }
            met |= {(name, family, port + 10 * place): words for family in hurts}
        code, planned_spots, problems = published_in_plan(node)
        assert (code, planned_spots) == (1, everything - met.keys())
        for (name, _, port), words in met.items():
            start = f"{owner(name)} is partly published: "
            told = [one for one in problems if one.startswith(start)]
            assert told, problems
            assert all(words in one and f" {port}" in one for one in told), told
        with node.running() as daemon:
            assert spots(lab.node) == everything - met.keys()
            reasons = refuses(daemon, *{name for name, _, _ in met})
            for (name, _, _), words in met.items():
                assert words in reasons[name]
                assert "is left out" in reasons[name]
                said = daemon.said("partly published", what=owner(name))
                assert any(words in one["why"] for one in said), said
            assert daemon.standing(SELF)["state"] == "conflict"
            sockets.close()
            assert daemon.is_in("in sync", SELF)  # after a timed look
            assert spots(lab.node) == everything
            assert not refusals(daemon)
    assert published_in_plan(node) == (0, set(), [])


def test_the_text_of_a_plan_tells_who_is_refused_and_plans_the_rest(node: Node, lab: Net) -> None:
    node.save("all.yaml", service("a", at=30100) + service("b", at=30200))
    with listening(lab.node, "0.0.0.0", 30100) as words:
        code, said, told = by_hand(lab.node, "plan", "-f", node.manifests)
    assert code == 1
    assert f"portranger: {owner('a')} is refused: tcp 30100 cannot be published: {words}" in told
    assert "30200" in said
    assert "+ tcp 30100" not in said  # but for IPv6, where nobody listens


# What others translate, each at a port of its own: by plain nftables, by docker's iptables-nft, and
# by the legacy tables, in the words of who is refused for it.
STRANGERS = {30300: "table ip mine", 30310: "table ip nat", 30320: "legacy table ip nat"}
MINE = """
table ip mine {{
    chain pre {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local tcp dport {} dnat to 198.51.100.99:80
    }}
}}
"""


@contextmanager
def strangers(netns: str) -> Iterator[None]:
    """Who is there already."""
    iptables = ("iptables-nft", "-w", "-t", "nat")
    for program in ("iptables-nft", "iptables-legacy"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the command {program} (Debian: iptables)")
    plain, docker, old = STRANGERS
    dnat = ("-p", "tcp", "--dport", str(docker), "-j", "DNAT", "--to-destination", "172.17.0.2:80")
    nft(netns, MINE.format(plain))
    within(netns, *iptables, "-N", "DOCKER")
    within(
        netns,
        *iptables,
        "-A",
        "PREROUTING",
        "-m",
        "addrtype",
        "--dst-type",
        "LOCAL",
        "-j",
        "DOCKER",
    )
    within(netns, *iptables, "-A", "DOCKER", "!", "-i", "docker0", *dnat)
    rule = f"-A PREROUTING -p tcp -m tcp --dport {old} -j DNAT --to-destination 172.17.0.3"
    legacy(netns, rule, families=[Family.IP])
    try:
        yield
    finally:
        within(netns, "iptables-legacy", "-w", "-t", "nat", "-F")


def test_what_others_translate_is_left_to_them(node: Node, lab: Net) -> None:
    for port in STRANGERS:
        node.save(f"{port}.yaml", service(f"at{port}", 5000, count=5, at=port - 2))
    node.save("free.yaml", service("free", 5000, count=5, at=30400))
    firsts = {f"at{port}": port - 2 for port in STRANGERS} | {"free": 30400}
    everything = {
        (name, family.value, port)
        for name, first in firsts.items()
        for family in Family
        for port in range(first, first + 5)
    }
    with strangers(lab.node):
        before = within(lab.node, "nft", "list", "ruleset")
        left = everything - {(f"at{port}", "ip", port) for port in STRANGERS}
        code, found, problems = published_in_plan(node)
        assert (code, found) == (1, left)
        with node.running() as daemon:
            assert spots(lab.node) == left
            reasons = refuses(daemon, *(f"at{port}" for port in STRANGERS))
            for port, where in STRANGERS.items():
                words = f"tcp {port} is left out: {where}"
                assert words in reasons[f"at{port}"]
                assert f"translates tcp {port}" in reasons[f"at{port}"]
                told = f"{owner(f'at{port}')} is partly published: {words}"
                assert any(told in one for one in problems)
            others = within(lab.node, "nft", "list", "ruleset").partition("table inet portranger")
            assert others[0].strip() == before.strip()
            nft(lab.node, "delete table ip mine")
            plain = next(iter(STRANGERS))
            comes_to_refuse(daemon, *(f"at{port}" for port in STRANGERS if port != plain))
            assert (f"at{plain}", "ip", plain) in spots(lab.node)


def test_nobody_is_moved_onto_what_others_translate(node: Node, lab: Net) -> None:
    """Who is published already is asked about others again where it wishes for other ports, grows,
    or is to be at another address."""
    node.configure(**{"node_ports.external": ["203.0.113.0/24"]})
    node.save("wish.yaml", service("wish", at=30250))
    node.save("grow.yaml", service("grow", 5000, count=4, at=30296))
    node.save("ext.yaml", service("ext", 443))
    with strangers(lab.node), node.running() as daemon:
        publishes(daemon, "wish", "grow", "ext")
        nft(lab.node, MINE.format(443).replace("ip mine", "ip more"))
        node.save("wish.yaml", service("wish", at=30310))
        assert "translates tcp 30310" in refuses(daemon, "wish")["wish"]
        node.save("grow.yaml", service("grow", 5000, count=5, at=30296))
        assert "translates tcp 30300" in refuses(daemon, "grow", "wish")["grow"]
        node.save("ext.yaml", service("ext", 443, more="externalIPs: [203.0.113.7]"))
        why = refuses(daemon, "ext", "grow", "wish")["ext"]
        assert "tcp 443 at 203.0.113.7 cannot be published: table ip more" in why


HOST_PORT = """\
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-x - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "a pod" -m multiport --dports 30104 -j CNI-DN-x
-A CNI-DN-x -p tcp -m tcp --dport 30104 -j REDIRECT --to-ports 8080
COMMIT
"""


def test_a_host_port_that_appears_in_a_published_range_gets_its_port(node: Node, lab: Net) -> None:
    """As the portmap plugin makes it: that port is released, the rest of the run stays, and it is
    taken back when the pod has gone."""
    node.save("t.yaml", service("t", 5000, count=10, at=30100))
    every = {("t", family.value, port) for family in Family for port in range(30100, 30110)}
    served = answering(lab.vms[0].guest, "guest", [(TCP, port) for port in range(5000, 5010)])
    with node.running() as daemon, served, answering(lab.node, "pod", [(TCP, 8080)]):
        publishes(daemon, "t")
        assert asked(lab.client, TCP, NODE4, 30104).startswith("guest 5004 ")
        within(lab.node, "iptables-nft-restore", "--noflush", stdin=HOST_PORT)
        why = "tcp 30104 is left out: table ip nat, chain CNI-DN-x translates tcp 30104"
        assert comes_to_refuse(daemon, "t") == {"t": why}
        assert spots(lab.node) == every - {("t", "ip", 30104)}
        assert asked(lab.client, TCP, NODE4, 30104).startswith("pod 8080 ")
        for port in (30103, 30105):
            assert asked(lab.client, TCP, NODE4, port).startswith(f"guest {port - 25100} ")
        assert daemon.said("partly published", what=owner("t"), why=why)
        left = "is not forwarded: it is left out of tcp 30100-30109 of Service/default/t/p"
        _, said, _ = by_hand(lab.node, "explain", "--live", "--netns", SELF, "tcp/30104")
        assert f"  IPv4 tcp/30104 to the node: {left}" in said
        assert "  note: table ip nat, chain CNI-DN-x translates tcp 30104" in said
        code, _, told = by_hand(lab.node, "plan", "-f", node.manifests)
        assert code == 1
        assert f"portranger: {owner('t')} is partly published: {why}" in told
        assert daemon.standing(SELF)["state"] == "conflict"
        within(lab.node, "iptables-nft", "-t", "nat", "-F", "CNI-DN-x")
        assert daemon.is_in("in sync", SELF)
        assert spots(lab.node) == every
        assert asked(lab.client, TCP, NODE4, 30104).startswith("guest 5004 ")


def test_a_legacy_rule_that_appears_in_a_published_range_gets_its_port(
    node: Node, lab: Net
) -> None:
    """The legacy tables send no events: it is seen at a timed look."""
    legacy(lab.node, "-A PREROUTING -p tcp --dport 1 -j REDIRECT", families=[Family.IP])
    node.save("t.yaml", service("t", 5000, count=10, at=30100))
    with node.running() as daemon:
        publishes(daemon, "t")
        legacy(lab.node, "-A PREROUTING -p tcp --dport 30104 -j REDIRECT", families=[Family.IP])
        assert "legacy table ip nat" in comes_to_refuse(daemon, "t")["t"]
        assert ("t", "ip", 30104) not in spots(lab.node)
        assert ("t", "ip", 30105) in spots(lab.node)


def test_nobody_is_given_what_is_in_use(node: Node, lab: Net) -> None:
    """Of sixteen ports all but three are used, one by one, by whoever there is."""
    node.configure(**{"node_ports.range": "30300-30315"})
    free = {30302, 30307, 30312}
    used = {30301, 30303, 30304, 30305, 30306}
    with ExitStack() as stack:
        for port in used:
            stack.enter_context(listening(lab.node, "0.0.0.0", port))
        stack.enter_context(listening(lab.node, "127.0.0.1", 30308))
        stack.enter_context(listening(lab.node, "::", 30309, UDP))
        stack.enter_context(strangers(lab.node))  # 30300 and 30310
        legacy(
            lab.node,
            "-A PREROUTING -p udp --dport 30313:30315 -j REDIRECT --to-ports 53",
            families=[Family.IP6],
        )
        stack.callback(within, lab.node, "ip6tables-legacy", "-w", "-t", "nat", "-F")
        nft(lab.node, MINE.format(30311).replace("ip mine", "ip more"))
        with node.running() as daemon:
            for number in range(3):
                node.save(f"{number}.yaml", service(f"s{number}"))
                publishes(daemon, *(f"s{one}" for one in range(number + 1)))
            assert {ports.first for ports in given(lab.node).values()} == free
            node.save("more.yaml", service("more"))
            assert "no node port is free" in refuses(daemon, "more")["more"]


def test_what_another_service_holds_is_refused_with_its_name(node: Node, lab: Net) -> None:
    """At node ports, and at an address of the node's that both would have."""
    node.configure(**{"node_ports.external": ["203.0.113.0/24"]})
    for name, more in (("z", ""), ("y", ""), ("x", "externalIPs: [203.0.113.7]")):
        first, at = {"z": (80, 30100), "y": (443, 30200), "x": (5000, 0)}[name]
        kind = "ClusterIP" if name == "x" else "NodePort"
        node.save(
            f"{name}.yaml",
            service(name, first, count=5 if first == 5000 else 1, at=at, kind=kind, more=more),
        )
    with node.running() as daemon:
        before = publishes(daemon, "x", "y", "z")
        at_node, there = f"externalIPs: [{NODE4}]", "externalIPs: [203.0.113.7]"
        node.save("a.yaml", service("a", 30100, kind="ClusterIP", more=at_node))
        node.save("b.yaml", service("b", 5004, kind="ClusterIP", more=there))
        node.save("c.yaml", service("c", at=30200))
        node.save("d.yaml", service("d", 5005, kind="ClusterIP", more=there))  # right beside
        reasons = refuses(daemon, "a", "b", "c")
        assert reasons["a"] == f"tcp 30100 at {NODE4} is held by {owner('z')} (tcp 30100)"
        assert f"is held by {owner('x')} (tcp 5000-5004 at 203.0.113.7)" in reasons["b"]
        assert "is held by Service/default/y" in reasons["c"]
        assert given(lab.node) == before | {"d": PortRange(5005, 5005)}
        code, _, problems = published_in_plan(node)
        assert code == 1
        assert f"{owner('a')} is refused: {reasons['a']}" in problems
        for name in "xyz":
            node.remove(f"{name}.yaml")
        publishes(daemon, *"abcd")
        assert daemon.standing(SELF)["state"] == "in sync"


def test_ports_that_programs_get_at_random_are_a_warning(node: Node, lab: Net) -> None:
    set_sysctl(lab.node, RANDOM, "30150 30999")
    node.save("all.yaml", service("a", 5000, count=60, at=30100) + service("b", at=30100 - 1))
    words = f"{owner('a')}: tcp 30100-30159 meets the ports 30150-30999"
    code, said, _ = by_hand(lab.node, "plan", "-f", node.manifests)
    assert code == 0
    assert f"note in namespace {SELF}: {words}" in said
    assert owner("b") + ":" not in said
    with node.running() as daemon:
        publishes(daemon, "a", "b")
        standing = daemon.standing(SELF)
        assert standing["state"] == "in sync"
        assert [one for one in standing["notes"] if one.startswith(words)]
        assert within(lab.node, "sysctl", "-n", RESERVED).strip() == ""


def test_ports_that_are_reserved_are_nobodys_at_random(node: Node, lab: Net) -> None:
    set_sysctl(lab.node, RANDOM, "30150 30999")
    set_sysctl(lab.node, RESERVED, "8080,30500-30510")
    node.configure(**{"node_ports.reserve": True})
    node.save("a.yaml", service("a", 5000, count=60, at=30100))
    with node.running() as daemon:
        publishes(daemon, "a")

        def reserved() -> str:
            return within(lab.node, "sysctl", "-n", RESERVED).strip()

        assert reserved() == "8080,30100-30159,30500-30510"
        assert "meets" not in str(daemon.standing(SELF)["notes"])
        node.save("b.yaml", service("b", at=30160))
        publishes(daemon, "a", "b")
        assert reserved() == "8080,30100-30160,30500-30510"
        assert daemon.standing(SELF)["state"] == "in sync"
        daemon.reload()
        assert "meets" not in str(daemon.standing(SELF)["notes"])
        assert not daemon.said("drift repaired")


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("end", ["range", "service", "setting"])
def test_reserved_ports_are_released_and_what_others_reserved_stays(
    node: Node, lab: Net, end: str, restarted: bool
) -> None:
    set_sysctl(lab.node, RESERVED, "8080,30105,30500-30510")
    node.configure(**{"node_ports.reserve": True})
    node.save("a.yaml", service("a", 5000, count=60, at=30100))

    def reserved() -> str:
        return within(lab.node, "sysctl", "-n", RESERVED).strip()

    def change() -> None:
        if end == "range":
            node.save("a.yaml", service("a", 5000, count=5, at=30100))
        elif end == "service":
            node.remove("a.yaml")
        else:
            node.configure(**{"node_ports.reserve": False})

    left = "8080,30100-30105,30500-30510" if end == "range" else "8080,30105,30500-30510"
    with node.running() as daemon:
        publishes(daemon, "a")
        assert reserved() == "8080,30100-30159,30500-30510"
        if not restarted:
            change()
            daemon.reload()
            assert daemon.applied()
            assert reserved() == left
    if restarted:
        change()
        with node.running() as daemon:
            assert daemon.applied()
            assert reserved() == left


def test_who_comes_to_listen_later_takes_nothing_away(node: Node, lab: Net) -> None:
    node.save("a.yaml", service("a", 443, at=30100))
    with node.running() as daemon:
        publishes(daemon, "a")
        with listening(lab.node, "0.0.0.0", 30100) as words:
            daemon.reload()
            standing = daemon.standing(SELF)
            assert standing["state"] == "in sync"
            assert f"{owner('a')}: tcp 30100 is published, but {words}" in standing["notes"]
            with answering(lab.vms[0].guest, "guest", [(TCP, 443)]):
                assert asked(lab.client, TCP, NODE4, 30100).startswith("guest 443 ")
            assert by_hand(lab.node, "plan", "-f", node.manifests)[0] == 0
        daemon.reload()
        assert not [one for one in daemon.standing(SELF)["notes"] if "listens" in one]


def test_what_listens_later_is_seen_at_the_next_resync(node: Node, lab: Net) -> None:
    node.configure(resync_seconds=1)
    node.save("a.yaml", service("a", 443, at=30100))
    with node.running() as daemon:
        publishes(daemon, "a")
        with listening(lab.node, "0.0.0.0", 30100) as words:
            assert eventually(lambda: words in str(daemon.standing(SELF)["notes"]))
        assert eventually(lambda: words not in str(daemon.standing(SELF)["notes"]))
