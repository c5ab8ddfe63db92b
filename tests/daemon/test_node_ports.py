"""Who has which node ports on bare metal, where the daemon gives them: the same from then on,
whatever happens to the daemon, to what it stores, or to others; and nobody what is somebody else's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from rules.model import Protocol
from rules.node_ports import Bands
from rules.ports import PortRange
from tests.daemon.publishing import (
    SELF,
    given,
    owner,
    published,
    publishes,
    publishing,
    refusals,
    refuses,
    service,
    wired,
    written,
)
from tests.daemon.running import Node, Running, handles
from tests.nodes import NODE4, NODE6, Net, answering, asked, service_manifest
from tests.spaces import nft

UDP, TCP = Protocol.UDP, Protocol.TCP
BANDS = Bands(PortRange(30000, 32767))  # the default


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    with wired() as made:
        yield made


@pytest.fixture
def node(lab: Net, tmp_path: Path) -> Iterator[Node]:
    with publishing(lab, tmp_path / "node") as made:
        yield made


def displaced(node: Node, daemon: Running) -> PortRange:
    """The ports of the Service `d`, which are not those it would be given now: somebody had these
    when it came, who has gone since."""
    node.save("d.yaml", service("d", 5000, count=10, protocol="UDP"))
    first = publishes(daemon, "d")["d"]
    node.remove("d.yaml")
    publishes(daemon)
    node.save("x.yaml", service("x", 5000, count=10, protocol="UDP", at=first.first))
    assert publishes(daemon, "x") == {"x": first}
    node.save("d.yaml", service("d", 5000, count=10, protocol="UDP"))
    second = publishes(daemon, "d", "x")["d"]
    assert not second.overlaps(first)
    node.remove("x.yaml")
    assert publishes(daemon, "d") == {"d": second}
    return second


def test_a_run_of_the_upper_band_is_given_and_leads_there_one_to_one(node: Node, lab: Net) -> None:
    node.save("a.yaml", service("a", 5000, count=10, protocol="UDP"))
    with node.running() as daemon:
        ports = publishes(daemon, "a")["a"]
        assert len(ports) == 10
        assert ports.first >= BANDS.upper.first
        assert ports.last <= BANDS.upper.last
        assert written(node) == {"a": ports}
        assert daemon.standing(SELF)["state"] == "in sync"
        with answering(lab.vms[0].guest, "guest", [(UDP, 5000), (UDP, 5009)]):
            for to in (NODE4, NODE6):
                for port, arrives in ((ports.first, 5000), (ports.last, 5009)):
                    assert asked(lab.client, UDP, to, port).startswith(f"guest {arrives} ")


def test_what_is_given_stays_over_edits_and_over_others_coming_and_going(node: Node) -> None:
    with node.running() as daemon:
        ports = displaced(node, daemon)
        for number in range(5):
            node.save(f"{number}.yaml", service(f"s{number}", 5100, count=200))
        everybody = publishes(daemon, "d", *(f"s{number}" for number in range(5)))
        assert everybody.pop("d") == ports
        node.remove("1.yaml")
        node.remove("3.yaml")
        expected = {name: everybody[name] for name in ("s0", "s2", "s4")} | {"d": ports}
        assert publishes(daemon, *expected) == expected
        text = service("d", 5000, count=10, protocol="UDP", more="sessionAffinity: ClientIP")
        node.save("d.yaml", text.replace("name: d", "name: d\n  labels: {tier: gold}"))
        daemon.reload()
        assert given(node.home) == expected


def test_a_range_that_is_edited_begins_where_it_began(node: Node) -> None:
    with node.running() as daemon:
        first = displaced(node, daemon).first
        for count in (12, 3, 10):
            node.save("d.yaml", service("d", 5000, count=count, protocol="UDP"))
            wanted = PortRange(first, first + count - 1)
            assert published(daemon) == {"d": wanted}
        node.save("d.yaml", service("d", 5200, count=10, protocol="UDP"))  # leads elsewhere
        assert published(daemon) == {"d": PortRange(first, first + 9)}


def reboot(node: Node) -> None:
    nft(node.home, "flush ruleset")


def lose_state(node: Node) -> None:
    shutil.rmtree(node.state)


def corrupt(node: Node) -> None:
    (node.state / "node-ports.json").write_text('{"format": 1, "content": [["Service/def')


def forge(node: Node) -> None:
    """A record that is whole, but no record of ports."""
    content: object = [["Service/default/d", "p", "udp", 0, 70000]]
    digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    record = {"format": 1, "sha256": digest, "content": content}
    (node.state / "node-ports.json").write_text(json.dumps(record))


MISHAPS: dict[str, tuple[Callable[[Running], None], Callable[[Node], None]]] = {
    "it is stopped": (Running.stop, lambda _: None),
    "it is killed": (Running.kill, lambda _: None),
    "the node is started anew": (Running.stop, reboot),
    "the node loses power": (Running.kill, reboot),
    "what it stored is lost": (Running.stop, lose_state),
    "what it stored is corrupt": (Running.kill, corrupt),
    "what it stored is somebody's": (Running.kill, forge),
}


def test_what_is_given_stays_whatever_happens_to_the_daemon(node: Node) -> None:
    with node.running() as daemon:
        ports = displaced(node, daemon)
    for what, (end, then) in MISHAPS.items():
        with node.running() as daemon:
            assert given(node.home) == {"d": ports}, what
            assert written(node) == {"d": ports}, what
            assert daemon.metric("nodeport_allocator_allocation_total") == 0, what
            end(daemon)
        then(node)
    with node.running() as daemon:
        assert given(node.home) == written(node) == {"d": ports}
        aside = node.state / "node-ports.json.corrupt"
        assert aside.exists()
        assert any(str(aside.name) in one["what"] for one in daemon.said("warning"))


def test_what_is_corrupted_under_a_running_daemon_is_written_anew(node: Node) -> None:
    with node.running() as daemon:
        ports = displaced(node, daemon)
        corrupt(node)
        daemon.reload()
        assert given(node.home) == written(node) == {"d": ports}
        (node.state / "node-ports.json").unlink()
        daemon.reload()
        assert given(node.home) == written(node) == {"d": ports}


def test_without_a_place_to_store_it_goes_on_and_says_so(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node.configure(state_dir=str(tmp_path / "file" / "state"))
    with node.running() as daemon:
        ports = displaced(node, daemon)
        words = "node-ports.json: Not a directory"
        assert any(one["what"].endswith(words) for one in daemon.said("warning"))
    with node.running() as daemon:
        assert given(node.home) == {"d": ports}
        assert daemon.standing(SELF)["state"] == "in sync"


def test_a_wish_that_is_taken_is_refused_and_granted_when_its_holder_goes(node: Node) -> None:
    node.save("z.yaml", service("z", at=30100))
    with node.running() as daemon:
        publishes(daemon, "z")
        before = handles(node.home)
        node.save("a.yaml", service("a", 5000, count=3, at=30099))  # whose name comes first
        why = refuses(daemon, "a")["a"]
        assert "30099-30101 cannot be given: node port 30100 is held by Service/default/z" in why
        standing = daemon.standing(SELF)
        assert standing["state"] == "conflict"
        assert standing["why"] == f"{owner('a')}: {why}"
        assert daemon.said("not published", what=owner("a"), why=why)
        assert handles(node.home) == before
        daemon.reload()
        assert handles(node.home) == before
        assert len(daemon.said("not published")) == 1
    with node.running() as daemon:  # the one who had it still has
        assert given(node.home) == {"z": PortRange(30100, 30100)}
        assert refuses(daemon, "a")
        node.remove("z.yaml")
        assert publishes(daemon, "a")
        assert given(node.home) == {"a": PortRange(30099, 30101)}
        assert daemon.standing(SELF)["state"] == "in sync"


def test_a_wish_changed_to_what_is_taken_leaves_its_holder_alone(node: Node) -> None:
    node.save("z.yaml", service("z", at=30100))
    node.save("a.yaml", service("a", at=30200))
    with node.running() as daemon:
        publishes(daemon, "a", "z")
        node.save("a.yaml", service("a", at=30100))
        assert "held by Service/default/z" in refuses(daemon, "a")["a"]
        assert given(node.home) == {"z": PortRange(30100, 30100)}
        node.save("a.yaml", service("a", at=30200))
        publishes(daemon, "a", "z")
        assert daemon.standing(SELF)["state"] == "in sync"


def test_two_may_swap_their_wishes(node: Node) -> None:
    one, other = PortRange(30100, 30100), PortRange(30200, 30200)
    node.save("both.yaml", service("a", at=30100) + service("b", at=30200))
    with node.running() as daemon:
        assert publishes(daemon, "a", "b") == {"a": one, "b": other}
        node.save("both.yaml", service("a", at=30200) + service("b", at=30100))
        expected = {"a": other, "b": one}
        assert published(daemon) == expected, refusals(daemon)
        assert written(node) == expected
        assert not daemon.said("not published")


def test_who_finds_no_run_is_told_the_longest_and_gets_one_when_there_is_room(node: Node) -> None:
    node.configure(**{"node_ports.range": "30000-30031"})
    node.save("s.yaml", service("s", 5000, count=10, at=30010))
    with node.running() as daemon:
        publishes(daemon, "s")
        node.save("d.yaml", service("d", 5000, count=13, protocol="UDP"))
        why = refuses(daemon, "d")["d"]
        assert "no 13 node ports in a row are free in 30000-30031" in why
        assert "the longest free run is 30020-30031 (12)" in why
        node.save("c.yaml", service("c", 5000, count=12, protocol="UDP"))  # which takes just that
        assert publishes(daemon, "c", "s")["c"] == PortRange(30020, 30031)
        assert "30000-30009 (10)" in refusals(daemon)["d"]
        node.remove("s.yaml")  # which frees its ports
        ports = publishes(daemon, "c", "d")["d"]
        assert len(ports) == 13
        assert ports.last <= 30019
        assert daemon.standing(SELF)["state"] == "in sync"


def test_two_protocols_of_one_port_share_a_number(node: Node, lab: Net) -> None:
    ports = ["name: udp, protocol: UDP, port: 5353", "name: tcp, port: 5353"]
    node.save("dns.yaml", service_manifest(ports, name="dns"))
    with node.running() as daemon:
        number = publishes(daemon, "dns")["dns"].first  # which says that all are the same
        assert daemon.metric("nodeport_allocator_allocated_ports") == 1
        assert daemon.metric("nodeport_allocator_allocation_total", scope="dynamic") == 2
        with answering(lab.vms[0].guest, "guest", [(UDP, 5353), (TCP, 5353)]):
            for protocol in (UDP, TCP):
                assert asked(lab.client, protocol, NODE4, number).startswith("guest 5353 ")
        node.save("a.yaml", service("a", protocol="UDP", at=number))
        assert "held by Service/default/dns" in refuses(daemon, "a")["a"]


def test_another_range_moves_only_who_is_outside_it(node: Node) -> None:
    node.save("all.yaml", "".join(service(name, 5000, count=4) for name in "abcdef"))
    node.save("s.yaml", service("s", at=30000))
    with node.running() as daemon:
        before = publishes(daemon, *"abcdefs")
        order = sorted("abcdef", key=lambda name: before[name].first)
        stay, low = order[3:], before[order[3]].first
        node.configure(**{"node_ports.range": f"{low}-32767"})
        daemon.reload()
        after = publishes(daemon, *"abcdef")
        assert {name: after[name] for name in stay} == {name: before[name] for name in stay}
        assert all(after[name].first >= low for name in order)
        assert f"30000 is not within the node ports {low}-32767" in refuses(daemon, "s")["s"]
        node.configure(**{"node_ports.range": "30000-32767"})
        daemon.reload()
        assert publishes(daemon, *"abcdefs") == after | {"s": before["s"]}


def test_the_metrics_of_the_allocator_count_what_happens_once(node: Node) -> None:
    def counted(daemon: Running) -> tuple[float, ...]:
        each = [
            daemon.metric(f"nodeport_allocator_{name}_total", scope=scope)
            for name in ("allocation", "allocation_errors")
            for scope in ("static", "dynamic")
        ]
        gauges = ("allocated_ports", "available_ports")
        return (*(daemon.metric(f"nodeport_allocator_{name}") for name in gauges), *each)

    node.configure(**{"node_ports.range": "30000-30099"})
    with node.running() as daemon:
        assert counted(daemon)[2:] == (0, 0, 0, 0)
        node.save("s.yaml", service("s", 5000, count=10, at=30000))
        publishes(daemon, "s")
        assert counted(daemon) == (10, 90, 1, 0, 0, 0)
        node.save("d.yaml", service("d", 5000, count=20, protocol="UDP"))
        publishes(daemon, "d", "s")
        assert counted(daemon) == (30, 70, 1, 1, 0, 0)
        node.save("bad.yaml", service("bad", at=30005))
        refuses(daemon, "bad")
        assert counted(daemon) == (30, 70, 1, 1, 1, 0)
        node.save("big.yaml", service("big", 5000, count=71, protocol="UDP"))
        refuses(daemon, "bad", "big")
        assert counted(daemon) == (30, 70, 1, 1, 1, 1)
        node.save("e.yaml", service("e"))  # shortens the longest run, of which the refusal tells
        publishes(daemon, "d", "e", "s")
        daemon.reload()
        assert counted(daemon) == (31, 69, 1, 2, 1, 1)
        node.remove("s.yaml")
        publishes(daemon, "bad", "d", "e")
        assert counted(daemon) == (22, 78, 2, 2, 1, 1)
        node.remove("bad.yaml")
        publishes(daemon, "d", "e")
        node.save("bad.yaml", service("bad", at=29999))
        refuses(daemon, "bad", "big")
        assert counted(daemon) == (21, 79, 2, 2, 2, 1)
        node.save("bad.yaml", service("bad", at=29998))
        assert refuses(daemon, "bad", "big")["bad"].startswith("29998 ")
        assert counted(daemon) == (21, 79, 2, 2, 3, 1)
    with node.running() as daemon:  # nobody is given anything
        assert counted(daemon) == (21, 79, 0, 0, 1, 1)
