"""Policies that change while packets flow: what is forbidden from now on is cut, what is allowed as
before loses nothing, and peers that come and go are elements of sets and no rules."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest

from agent.kernel.netns import inside, opened
from agent.kernel.nftables import generation_of, netlink
from rules.model import NODE_KEY, Family, Protocol
from tests.datapath.policing import (
    ALL4,
    ALL6,
    BOTH,
    CLOSED,
    MACHINE,
    PHONE,
    POLICY,
    SECOND,
    STRANGER,
    Town,
    address,
    at,
    bound,
    machine,
    pod,
    policed,
    policy,
    served,
    wired,
)
from tests.datapath.publishing import FLOWS, PATIENCE, TCP, UDP, Flow, asking
from tests.nodes import socket_in
from tests.spaces import eventually, observed

GOING = {TCP: 85, UDP: 53}
STAYING = {TCP: 443, UDP: 5005}
SOME = "[{ports: [{port: 443}, {protocol: UDP, port: 5005}]}]"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with wired() as lab, served(lab), policed(folder / "node", lab) as made:
        yield made


@pytest.fixture
def town(shared: Town) -> Iterator[Town]:
    """With the files that it had, and no policy, whatever the test before did."""
    yield shared
    shared.node.save("vm2.yaml", machine(shared.lab.vms[1], SECOND, "role: client"))
    for path in shared.node.manifests.iterdir():
        if path.name not in ("vm1.yaml", "vm2.yaml", "everybody.yaml"):
            path.unlink()
    shared.settle()


# ------------------------------------------------------------------------------------ open flows


def flows(
    town: Town, stack: ExitStack, ports: dict[Protocol, int], ways: Sequence[str] = ("in", "out")
) -> list[Flow]:
    """Of each kind, with a stranger, in these ways."""
    asks = [town.asked(w, STRANGER, p, ports[p], f) for w in ways for f, p in FLOWS]
    made = [Flow(ask.where, ask.protocol, ask.to, ask.port) for ask in asks]
    for flow, ask in zip(made, asks, strict=True):
        stack.enter_context(closing(flow))
        assert flow.ask() == ask.answer
    return made


def assert_lost_nothing(answers: list[set[str]]) -> None:
    assert all(len(heard) == 1 and "" not in heard for heard in answers), answers


def test_flows_that_a_policy_forbids_are_cut_and_no_others(town: Town) -> None:
    with ExitStack() as stack:
        going, staying = flows(town, stack, GOING), flows(town, stack, STAYING)
        text = policy(f"{BOTH}, ingress: {SOME}, egress: {SOME}")
        with asking(*staying) as answers:
            town.cut(lambda: town.node.save(POLICY, text))
            assert all(flow.is_cut() for flow in going)
        assert_lost_nothing(answers)


def test_a_policy_for_one_way_leaves_the_other_alone(town: Town) -> None:
    with ExitStack() as stack:
        going = flows(town, stack, GOING, ["in"])
        staying = flows(town, stack, GOING, ["out"])
        with asking(*staying) as answers:
            town.cut(lambda: town.node.save(POLICY, policy(PHONE)))
            assert all(flow.is_cut() for flow in going)
        assert_lost_nothing(answers)


def test_flows_of_a_peer_that_is_none_any_more_are_cut(town: Town) -> None:
    """No rule changes for that, but an element of a set."""
    other = town.lab.vms[1]
    chosen = "{podSelector: {matchLabels: {role: client}}}"
    town.save(policy(f"{PHONE}, ingress: [{{from: [{chosen}, {ALL4}, {ALL6}]}}]"))
    with ExitStack() as stack:
        staying = flows(town, stack, STAYING, ["in"])
        asks = [town.asked("in", MACHINE, p, STAYING[p], f) for f, p in FLOWS]
        going = [Flow(ask.where, ask.protocol, ask.to, ask.port) for ask in asks]
        for flow in going:
            stack.enter_context(closing(flow))
        assert [flow.ask() for flow in going] == [ask.answer for ask in asks]
        before = handles(town)
        with asking(*staying) as answers:
            text = machine(other, SECOND, "role: retired")
            town.cut(lambda: town.node.save("vm2.yaml", text))
            assert all(flow.is_cut() for flow in going)
        assert_lost_nothing(answers)
        assert handles(town) == before


@pytest.mark.parametrize("family", Family, ids=lambda one: one.value)
def test_a_stream_that_the_guest_sends_is_cut_too(town: Town, family: Family) -> None:
    """It may not go on as if the guest had begun it, although the guest may say what it likes."""
    with (
        bound(town.first.guest, family, socket.SOCK_STREAM, 86) as server,
        socket_in(town.lab.client, at(town.first, family), socket.SOCK_STREAM) as client,
    ):
        server.listen(1)
        client.connect((at(town.first, family), 86))
        stream, _ = server.accept()
        with stream:
            stream.send(b"before")
            assert client.recv(100) == b"before"
            town.cut(lambda: town.node.save(POLICY, policy(PHONE)))
            stream.send(b"after")
            client.settimeout(1.0)
            with pytest.raises(OSError, match=r"timed out|reset"):
                client.recv(100)


# ------------------------------------------------------------------------------- edit after edit


class Numbers:
    """Datagrams that both ends of an open flow send each other, each with its number."""

    def __init__(self, town: Town, way: str, family: Family, stack: ExitStack) -> None:
        one = town.asked(way, STRANGER, UDP, 5001, family)
        far = town.first.guest if way == "in" else town.lab.client
        begins = stack.enter_context(socket_in(one.where, one.to, socket.SOCK_DGRAM))
        answers = stack.enter_context(bound(far, family, socket.SOCK_DGRAM, 5001))
        self.ends = [begins, answers]
        self.sent = 0
        self.heard: list[set[int]] = [set(), set()]
        begins.connect((one.to, one.port))
        begins.send(b"-1")
        _, peer = answers.recvfrom(100)
        answers.connect(peer)
        for end in self.ends:
            end.setblocking(False)

    def turn(self) -> None:
        """Another one each way, and hear what came."""
        for end in self.ends:
            end.send(b"%d" % self.sent)
        self.sent += 1
        self.hear()

    def hear(self) -> None:
        for end, heard in zip(self.ends, self.heard, strict=True):
            with suppress(BlockingIOError):
                while True:
                    heard.add(int(end.recv(100)))

    def is_whole(self) -> bool:
        self.hear()
        return all(heard >= set(range(self.sent)) for heard in self.heard)


def edits() -> Iterator[str]:
    """Policies that all allow 5001 of UDP, each by other rules, and something new each time."""
    ours = f"{ALL4}, {ALL6}"
    for number in itertools.count(20000):
        new = f"{{port: {number}}}"
        yield rules(f"{{ports: [{{protocol: UDP, port: 5001}}, {new}]}}")
        yield rules(
            f"{{PEERS: [{ours}, {{ipBlock: {{cidr: 10.9.{number % 250}.0/24}}}}],"
            f" ports: [{{protocol: UDP, port: 5000, endPort: 5006}}, {new}]}}"
        )
        yield rules(f"{{PEERS: [{ours}]}}, {{ports: [{new}]}}")
        yield CLOSED + rules(
            f"{{ports: [{{protocol: UDP, port: 5001, endPort: 5006}}, {new}]}}", "more"
        )


def rules(text: str, name: str = "web") -> str:
    ways = {"ingress": "from", "egress": "to"}
    both = ", ".join(f"{way}: [{text.replace('PEERS', key)}]" for way, key in ways.items())
    return policy(f"{PHONE}, {both}", name)


def test_200_edits_lose_no_packet_and_open_nothing(town: Town) -> None:
    stop, turns = threading.Event(), 0
    with ExitStack() as stack:
        town.save(next(edits()))
        numbered = [Numbers(town, way, family, stack) for way in ("in", "out") for family in Family]
        shut = [closed(town, family, stack) for family in Family]

        def work() -> None:
            nonlocal turns
            while not stop.is_set():
                for one in numbered:
                    one.turn()
                for sender, _ in shut:
                    sender.send(b"?")
                turns += 1
                time.sleep(0.001)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            for text in itertools.islice(edits(), 1, 201):
                town.changed(lambda text=text: town.node.save(POLICY, text), town.first)  # type: ignore[misc]
        finally:
            stop.set()
            thread.join(PATIENCE)
        assert turns > 1000
        assert eventually(lambda: all(one.is_whole() for one in numbered)), [
            [one.sent - len(heard) for heard in one.heard] for one in numbered
        ]
        for _, receiver in shut:
            with pytest.raises(BlockingIOError):
                receiver.recv(100)


def closed(town: Town, family: Family, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Who sends to a port that no policy allows to him, and who would hear it."""
    to = at(town.first, family)
    sender = stack.enter_context(socket_in(town.lab.vms[1].guest, to, socket.SOCK_DGRAM))
    receiver = stack.enter_context(bound(town.first.guest, family, socket.SOCK_DGRAM, 5009))
    receiver.setblocking(False)
    sender.connect((to, 5009))
    return sender, receiver


# ----------------------------------------------------------------------------------- many peers


def handles(town: Town) -> set[int]:
    return {live.handle for live in observed(town.first.pod).live}


def generation(town: Town) -> int:
    """How often rules or sets were changed in front of the machine."""
    name = town.first.pod
    with opened(name) as descriptor, inside(descriptor, name), closing(netlink()) as asking:
        return generation_of(asking).number


def crowd(first: int, real: str) -> dict[str, list[str]]:
    """A hundred addresses of each family, none beside another, one of them a neighbour's."""
    numbers = range(first, first + 198, 2)
    return {
        "ip": [*(f"10.77.{number}.1" for number in numbers), address(real, Family.IP)],
        "ip6": [*(f"fd77::{number}:1" for number in numbers), address(real, Family.IP6)],
    }


def pods(addresses: dict[str, list[str]]) -> str:
    pairs = zip(addresses["ip"], addresses["ip6"], strict=True)
    return "".join(
        pod(f"p{number}", "default", "role: crowd", "containerPort: 80", *pair)
        for number, pair in enumerate(pairs)
    )


def assert_are_members(town: Town, addresses: dict[str, list[str]]) -> None:
    found = observed(town.first.pod).sets
    assert {
        peers.family.value: sorted(str(one.network_address) for one in held)
        for peers, held in found.items()
        if peers.key != NODE_KEY
    } == {family: sorted(some) for family, some in addresses.items()}


def test_a_hundred_peers_for_a_hundred_others_are_one_transaction_and_no_rule(town: Town) -> None:
    some, others = crowd(1, "odd"), crowd(2, STRANGER)
    town.node.save("pods.yaml", pods(some))
    chosen = "podSelector: {matchLabels: {role: crowd}}"
    town.save(policy(f"{PHONE}, ingress: [{{from: [{{{chosen}}}], ports: [{{port: 443}}]}}]"))
    here, there = ("in", "odd", TCP, 443), ("in", STRANGER, TCP, 443)
    town.assert_open(here, shut=[there])
    assert_are_members(town, some)
    rules_before, before = handles(town), generation(town)

    town.changed(lambda: town.node.save("pods.yaml", pods(others)), town.first)
    assert (handles(town), generation(town)) == (rules_before, before + 1)
    assert_are_members(town, others)
    town.assert_open(there, shut=[here])

    fewer = {family: addresses[1:] for family, addresses in others.items()}
    town.changed(lambda: town.node.save("pods.yaml", pods(fewer)), town.first)
    assert (handles(town), generation(town)) == (rules_before, before + 2)
    assert_are_members(town, fewer)
