"""NetworkPolicies in view of a real API server: what they say to the machines of a node, whom they
speak of, and what stays known whatever happens; at the end with packets. There are no controllers
and no kubelets: what they would write, a test writes itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from agent.kernel.lab import CLIENT, POD, Lab
from agent.kernel.probe import asks, connected, echoing, reached
from agent.sources.api import Api
from agent.sources.kubeconfig import load
from agent.sources.meaning import Meaning, Tiding
from agent.sources.store import Store
from rules.fences import Laws, fenced
from rules.model import POLICED, Family, Live, Protocol
from tests.daemon.running import handles
from tests.kubernetes.agents import USER, agents, comes_to_say, launched
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import (
    EVENTS,
    NAMESPACES,
    PODS,
    POLICIES,
    RIGHTS,
    Asked,
    Machines,
    asking,
    instance,
)
from tests.spaces import eventually, lab, observed, run, unused_name

Json = Any
Start = Callable[[], AbstractContextManager[Asked]]
ALL = (RIGHTS, EVENTS, POLICIES, PODS, NAMESPACES)
FOR_MACHINES = 4  # requests: two lists, two watches
CLIENTS = {"podSelector": {"matchLabels": {"role": "client"}}}
BLOCK = {"ipBlock": {"cidr": "192.0.2.0/24"}}
EVERYBODY = None
TCP = Protocol.TCP
AT = next(address.ip for address in POD if Family.of(address) is Family.IP)
FROM = next(str(address.ip) for address in CLIENT if Family.of(address) is Family.IP)


class Ruled:
    """A namespace of a cluster with a machine in it, and what is said of that."""

    def __init__(self, cluster: Cluster, namespace: str, node: str) -> None:
        self.cluster, self.namespace, self.node = cluster, namespace, node
        self.policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self.machines = Machines(cluster, namespace)

    def make_machine(self, **labels: str) -> None:
        made = instance("vm", self.node)
        made["metadata"]["labels"] |= labels or {"app": "phone"}
        self.machines.make(made)

    def let(self, name: str, *peers: Json, **spec: Json) -> Json:
        """A policy is to be there that lets these in, and nobody else."""
        return self.cluster.ask("APPLY", f"{self.policies}/{name}", policy(name, *peers, **spec))

    def drop(self, name: str) -> None:
        self.cluster.ask("DELETE", f"{self.policies}/{name}")

    def place(self, name: str, *addresses: str, namespace: str = "", **said: Json) -> None:
        """A Pod is to be there, and to run at these addresses."""
        path = f"/api/v1/namespaces/{namespace or self.namespace}/pods"
        self.cluster.ask("POST", path, pod(name, **said))
        self.move(name, *addresses, namespace=namespace)

    def move(self, name: str, *addresses: str, namespace: str = "", phase: str = "Running") -> None:
        path = f"/api/v1/namespaces/{namespace or self.namespace}/pods/{name}"
        status = {"phase": phase, "podIPs": [{"ip": text} for text in addresses]}
        if addresses:
            status["podIP"] = addresses[0]
        self.cluster.ask("PATCH", f"{path}/status", {"status": status})

    def relabel(self, name: str, **labels: str | None) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.cluster.ask("PATCH", path, {"metadata": {"labels": labels}})

    def remove(self, name: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}?gracePeriodSeconds=0"
        self.cluster.ask("DELETE", path)

    def label(self, name: str) -> str:
        return f"NetworkPolicy/{self.namespace}/{name}"

    def known(self, meaning: Meaning) -> list[str]:
        """The policies of this namespace: all tests share a cluster."""
        return sorted(one.name for one in meaning.laws.policies if one.namespace == self.namespace)

    def hears(self, meaning: Meaning) -> list[str] | None:
        """Whom the machine hears, by address; None: everybody."""
        [found] = fenced(meaning.machines, meaning.laws, {})
        if found.hears is None:
            return EVERYBODY
        return sorted(str(one) for _, members in found.hears.sets for one in members)

    def is_let(self, asked: Asked, *addresses: str) -> Meaning:
        """Once the machine hears these, and nobody else."""
        wide = {4: 32, 6: 128}
        expected = sorted(f"{one}/{wide[6 if ':' in one else 4]}" for one in addresses)
        return asked.until(
            lambda it: it.machines and not it.laws_unknown and self.hears(it) == expected
        )

    def is_open(self, asked: Asked) -> Meaning:
        return asked.until(
            lambda it: it.machines and not it.laws_unknown and self.hears(it) is EVERYBODY
        )


def policy(name: str, *peers: Json, **spec: Json) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": {"app": "phone"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": list(peers), "ports": [{"port": 1000, "endPort": 1999}]}],
            **spec,
        },
    }


def pod(name: str, *, labels: Json = None, **spec: Json) -> Json:
    return {
        "metadata": {"name": name, "labels": {"role": "client"} if labels is None else labels},
        "spec": {"containers": [{"name": "c", "image": "none"}], **spec},
    }


@pytest.fixture
def ruled(cluster: Cluster, namespace: str) -> Iterator[Ruled]:
    cluster.grant(USER, *ALL)
    yield Ruled(cluster, namespace, unused_name())
    cluster.start_apiserver()
    cluster.grant(USER, RIGHTS)


@pytest.fixture
def start(ruled: Ruled, tmp_path: Path) -> Start:
    credentials = load(str(ruled.cluster.kubeconfig(USER)), {})
    return lambda: asking(credentials, ruled.node, tmp_path / "state", policies=True)


@pytest.fixture
def asked(start: Start) -> Iterator[Asked]:
    with start() as made:
        yield made


# ------------------------------------------------------------------------------ what is heard


def test_a_policy_comes_changes_and_goes(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.is_open(asked)
    made = ruled.let("web", BLOCK)
    asked.until(lambda it: ruled.hears(it) == ["192.0.2.0/24"])
    [found] = [one for one in asked.meaning.laws.policies if str(one) == ruled.label("web")]
    assert found.ingress
    assert found.ingress[0].ports
    assert str(found.ingress[0].ports[0].port) == "1000-1999"
    reference = asked.source._lawful.reference(str(found)) if asked.source._lawful else None
    assert reference
    assert reference.uid == made["metadata"]["uid"]
    ruled.let("web", {"ipBlock": {"cidr": "2001:db8::/32"}})
    asked.until(lambda it: ruled.hears(it) == ["2001:db8::/32"])
    ruled.let("more", BLOCK)
    asked.until(lambda it: ruled.hears(it) == ["192.0.2.0/24", "2001:db8::/32"])
    ruled.drop("web")
    asked.until(lambda it: ruled.hears(it) == ["192.0.2.0/24"])
    ruled.drop("more")
    ruled.is_open(asked)
    assert ruled.known(asked.meaning) == []


def test_what_is_there_at_the_start_is_known_at_the_first_look(ruled: Ruled, start: Start) -> None:
    ruled.make_machine()
    ruled.let("web", CLIENTS, {"namespaceSelector": {"matchLabels": {"team": unused_name()}}})
    ruled.place("c", "10.9.0.1")
    with start() as asked:
        assert (asked.meaning.laws_unknown, asked.looks) == ("", 1)
        assert ruled.hears(asked.meaning) == ["10.9.0.1/32"]


def test_pods_that_come_and_go_change_whom_it_hears(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    ruled.is_let(asked)
    ruled.place("c-1", "10.9.0.1", "fd00:9::1")
    ruled.is_let(asked, "10.9.0.1", "fd00:9::1")
    ruled.place("c-2", "10.9.0.7")
    ruled.is_let(asked, "10.9.0.1", "10.9.0.7", "fd00:9::1")
    ruled.relabel("c-1", role="other")
    ruled.is_let(asked, "10.9.0.7")
    ruled.relabel("c-1", role="client")
    ruled.is_let(asked, "10.9.0.1", "10.9.0.7", "fd00:9::1")
    ruled.remove("c-1")
    ruled.is_let(asked, "10.9.0.7")
    ruled.move("c-2", "10.9.0.7", phase="Succeeded")
    ruled.is_let(asked)


def test_who_has_the_address_of_a_node_is_nobody(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    ruled.place("of-the-node", "10.9.0.66", hostNetwork=True)
    ruled.place("other", "10.9.0.67", labels={"role": "x"})
    ruled.place("ended", "10.9.0.68")
    ruled.move("ended", "10.9.0.68", phase="Failed")
    ruled.place("client", "10.9.0.1")
    ruled.is_let(asked, "10.9.0.1")


def test_namespaces_are_chosen_by_their_labels(ruled: Ruled, asked: Asked) -> None:
    team = unused_name()
    ruled.make_machine()
    with ruled.cluster.namespace() as other:
        ruled.place("c", "10.9.1.1", namespace=other)
        ruled.place("d", "10.9.1.9", namespace=other, labels={})
        ruled.place("e", "10.9.0.1")
        ruled.let("web", {"namespaceSelector": {"matchLabels": {"team": team}}, **CLIENTS})
        ruled.is_let(asked)
        path = f"/api/v1/namespaces/{other}"
        ruled.cluster.ask("PATCH", path, {"metadata": {"labels": {"team": team}}})
        ruled.is_let(asked, "10.9.1.1")
        ruled.let("web", {"namespaceSelector": {"matchLabels": {"team": team}}})
        ruled.is_let(asked, "10.9.1.1", "10.9.1.9")
        ruled.cluster.ask("PATCH", path, {"metadata": {"labels": {"team": None}}})
        ruled.is_let(asked)
        named = {"matchLabels": {"kubernetes.io/metadata.name": other}}
        ruled.let("web", {"namespaceSelector": named, **CLIENTS}, CLIENTS)
        ruled.is_let(asked, "10.9.0.1", "10.9.1.1")


def test_a_machine_is_selected_by_the_labels_it_has_now(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.let("web", BLOCK)
    asked.until(lambda it: it.machines and ruled.hears(it) == ["192.0.2.0/24"])
    ruled.machines.change("vm", {"metadata": {"labels": {"app": "db"}}})
    ruled.is_open(asked)


def test_only_what_is_needed_is_asked_for(ruled: Ruled, start: Start) -> None:
    cluster = ruled.cluster
    cluster.grant(USER, RIGHTS, EVENTS, POLICIES)
    ruled.let("web", CLIENTS)  # selects nobody here, yet
    with start() as asked:
        asked.until(lambda it: ruled.known(it) == ["web"])
        assert eventually(lambda: asked.source.requests == FOR_MACHINES + 2)
        ruled.make_machine(app="db")
        asked.has("vm")
        ruled.is_open(asked)
        while asked.turn(0.3):
            pass
        assert (asked.meaning.laws_unknown, asked.meaning.laws_away) == ("", "")
        assert asked.source.requests == FOR_MACHINES + 2
        cluster.grant(USER, *ALL)
        ruled.place("c", "10.9.0.1")
        ruled.machines.change("vm", {"metadata": {"labels": {"app": "phone"}}})
        ruled.is_let(asked, "10.9.0.1")
        assert eventually(lambda: asked.source.requests == FOR_MACHINES + 4)


def test_where_they_are_not_enforced_they_are_not_asked_for(
    ruled: Ruled, start: Start, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    with start() as asked:
        asked.until(lambda it: ruled.known(it) == ["web"])
        assert ruled.label("web") in Store(str(state), print).load()
    credentials = load(str(ruled.cluster.kubeconfig(USER)), {})
    with asking(credentials, ruled.node, state) as asked:
        told = asked.has("vm")
        left = Store(str(state), print).load()
        assert list(left) == [f"VirtualMachineInstance/{ruled.namespace}/vm"]
        assert (told.laws, told.laws_unknown, told.laws_away) == (Laws(), "", "")
        while asked.turn(0.5):
            pass
        assert asked.source.requests == FOR_MACHINES


# ------------------------------------------------------------------------- what cannot be read


def test_what_we_cannot_read_and_the_server_can_is_shut_and_told(
    ruled: Ruled, asked: Asked
) -> None:
    """To most it is 10.0.0.0/8, to C libraries 8.0.0.0/8."""
    ruled.make_machine()
    ruled.let("odd", {"ipBlock": {"cidr": "010.0.0.0/8"}})
    meaning = asked.until(lambda it: ruled.label("odd") in it.shut)
    [problem] = [one for one in meaning.problems if one.file == ruled.label("odd")]
    assert (problem.code, problem.line) == ("bad-cidr", 0)
    assert ruled.hears(meaning) == []
    asked.source.tell(problem.file, Tiding.REJECTED, "it is not a network")
    assert comes_to_say(ruled.machines, "odd", Tiding.REJECTED.value, "not a network")
    shown = ruled.cluster.kubectl("describe", "networkpolicy", "odd", "-n", ruled.namespace)
    assert "odd" in shown
    ruled.let("odd", BLOCK)
    asked.until(lambda it: not it.problems and ruled.hears(it) == ["192.0.2.0/24"])


def test_what_turns_bad_goes_on(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.let("web", BLOCK)
    asked.until(lambda it: it.machines and ruled.hears(it) == ["192.0.2.0/24"])
    ruled.let("web", {"ipBlock": {"cidr": "010.0.0.0/8"}})
    meaning = asked.until(lambda it: ruled.label("web") in it.held)
    assert ruled.hears(meaning) == ["192.0.2.0/24"]
    assert meaning.shut == ()
    ruled.drop("web")
    ruled.let("web", {"ipBlock": {"cidr": "010.0.0.0/8"}})  # another of that name
    meaning = asked.until(lambda it: ruled.label("web") in it.shut)
    assert ruled.hears(meaning) == []


# ------------------------------------------------------------------------------------ troubles


def test_without_the_right_to_policies_machines_are_served(ruled: Ruled, start: Start) -> None:
    cluster = ruled.cluster
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    ruled.place("c", "10.9.0.1")
    cluster.grant(USER, RIGHTS)
    with start() as asked:
        assert asked.meaning.unreadable == ""
        wanted = "Let the agent's service account list networkpolicies.networking.k8s.io"
        assert wanted in asked.meaning.laws_unknown
        assert asked.meaning.laws == Laws()
        asked.has("vm")
        cluster.grant(USER, RIGHTS, POLICIES)
        asked.until(lambda it: "account list pods" in it.laws_unknown, 60)
        assert asked.meaning.laws == Laws()
        cluster.grant(USER, *ALL)
        asked.until(lambda it: not it.laws_unknown, 60)
        assert ruled.hears(asked.meaning) == ["10.9.0.1/32"]


def test_a_policy_whose_peers_may_not_be_listed_lets_nobody_in(ruled: Ruled, start: Start) -> None:
    ruled.cluster.grant(USER, RIGHTS, EVENTS, POLICIES)
    ruled.make_machine()
    ruled.place("c", "10.9.0.1")
    with start() as asked:
        ruled.is_open(asked)
        ruled.let("web", CLIENTS)
        meaning = ruled.is_let(asked)
        assert "account list pods" in meaning.laws_away
        ruled.cluster.grant(USER, *ALL)
        asked.until(lambda it: ruled.hears(it) == ["10.9.0.1/32"], 60)
        asked.until(lambda it: not it.laws_away, 60)


def test_an_api_server_that_goes_away_and_comes_back_changes_nothing(
    ruled: Ruled, start: Start
) -> None:
    cluster = ruled.cluster
    ruled.make_machine()
    with start() as asked:
        ruled.let("web", CLIENTS)
        ruled.place("c", "10.9.0.1")
        before = ruled.is_let(asked, "10.9.0.1")
        cluster.kill_apiserver()
        away = asked.until(lambda it: "Connection refused" in it.laws_away)
        assert (away.laws_unknown, away.laws) == ("", before.laws)
        with start() as another:  # which never hears from it
            assert "Connection refused" in another.meaning.laws_unknown
            assert another.meaning.laws == Laws()
            cluster.start_apiserver()
            ruled.place("d", "10.9.0.8")
            ruled.is_let(another, "10.9.0.1", "10.9.0.8")
        ruled.is_let(asked, "10.9.0.1", "10.9.0.8")
        asked.until(lambda it: not it.laws_away, 60)
        ruled.drop("web")
        ruled.is_open(asked)


def test_what_the_api_server_has_forgotten_is_made_up_for(ruled: Ruled, asked: Asked) -> None:
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    for name, address in (("kept", "10.9.0.1"), ("gone", "10.9.0.4")):
        ruled.place(name, address)
    ruled.is_let(asked, "10.9.0.1", "10.9.0.4")
    ruled.cluster.compact()
    ruled.remove("gone")
    ruled.place("new", "10.9.0.8")
    ruled.let("more", BLOCK)
    asked.until(lambda it: ruled.hears(it) == ["10.9.0.1/32", "10.9.0.8/32", "192.0.2.0/24"], 60)


# ---------------------------------------------------------------------------------- with packets


@pytest.fixture
def wired() -> Iterator[Lab]:
    with lab() as made:
        yield made


def comes_to_reach(wired: Lab, port: int, *, answer: bool = True) -> bool:
    return eventually(lambda: (reached(wired, wired.client, AT, TCP, port) == port) is answer)


def phone(ruled: Ruled) -> Json:
    made = instance("vm", ruled.node, "1000-3000")
    made["metadata"]["labels"] |= {"app": "phone"}
    return made


def test_with_packets_from_a_policy_to_its_end(ruled: Ruled, wired: Lab, tmp_path: Path) -> None:
    with (
        agents(ruled.cluster, tmp_path, ruled.node) as node,
        launched(node, ruled.machines, phone(ruled), wired.pod),
        echoing(wired, wired.guest, [(TCP, 1500), (TCP, 2500)]),
    ):
        ruled.cluster.grant(USER, *ALL)
        node.daemons.configure(**{"policy.enforce": True})
        with node.daemons.running() as daemon:
            assert comes_to_reach(wired, 1500)
            assert daemon.status()["policies"]["enforced"] is True
            before = daemon.status()["policies"]["count"]
            ruled.let("web", CLIENTS)
            assert comes_to_reach(wired, 1500, answer=False)
            assert daemon.status()["policies"] == {"enforced": True, "count": before + 1}
            ruled.place("c", FROM)
            assert comes_to_reach(wired, 1500)
            assert reached(wired, wired.client, AT, TCP, 2500) is None
            with closing(connected(wired, wired.client, AT, TCP, 1500)) as kept:
                assert asks(kept) == 1500
                ruled.let("more", BLOCK, ingress=[{"ports": [{"port": 2500}]}])
                assert comes_to_reach(wired, 2500)
                assert asks(kept) == 1500
            ruled.remove("c")
            assert comes_to_reach(wired, 1500, answer=False)
            assert reached(wired, wired.client, AT, TCP, 2500) == 2500
            daemon.stop()
        assert reached(wired, wired.client, AT, TCP, 1500) is None  # what is enforced stays
        with node.daemons.running() as daemon:
            assert daemon.says("ready")
            assert reached(wired, wired.client, AT, TCP, 1500) is None
            for name in ("web", "more"):
                ruled.drop(name)
            assert comes_to_reach(wired, 1500)
            node.daemons.configure(**{"policy.enforce": False})
            ruled.let("web", CLIENTS)
            daemon.reload()
            assert comes_to_reach(wired, 1500)
            assert daemon.status()["policies"]["enforced"] is False


@pytest.mark.parametrize("beside", [False, True], ids=["on the node", "in a pod of its own"])
def test_default_deny_allows_probes_of_the_node(
    ruled: Ruled, wired: Lab, tmp_path: Path, beside: bool
) -> None:
    """The client's namespace is the node's, in which the agent is, or only process 1."""
    with (
        agents(ruled.cluster, tmp_path, ruled.node, netns="" if beside else wired.client) as node,
        launched(node, ruled.machines, phone(ruled), wired.pod),
        echoing(wired, wired.guest, [(TCP, 1500)]),
    ):
        ruled.cluster.grant(USER, *ALL)
        node.daemons.configure(**{"policy.enforce": True})
        first = Path(node.kubelet.proc) / "1/ns/net"
        first.unlink()
        first.symlink_to(f"/run/netns/{wired.client}")
        ruled.let("shut", ingress=[])
        with node.daemons.running():
            assert eventually(lambda: any(one.rule.guards for one in filters(wired.pod)))
            assert reached(wired, wired.client, AT, TCP, 1500) == 1500


def filters(netns: str) -> list[Live]:
    return [one for one in observed(netns).live if one.rule.chain in POLICED]


def test_an_agent_that_may_not_read_policies_says_so_and_keeps_what_is_enforced(
    ruled: Ruled, wired: Lab, tmp_path: Path
) -> None:
    with (
        agents(ruled.cluster, tmp_path, ruled.node) as node,
        launched(node, ruled.machines, phone(ruled), wired.pod) as uid,
        echoing(wired, wired.guest, [(TCP, 1500)]),
    ):
        ruled.cluster.grant(USER, *ALL)
        node.daemons.configure(**{"policy.enforce": True})
        ruled.let("web", CLIENTS)
        with node.daemons.running() as daemon:
            assert daemon.is_in("in sync", f"pod:{uid}")
            assert comes_to_reach(wired, 1500, answer=False)
        ruled.cluster.grant(USER, RIGHTS, EVENTS)
        with node.daemons.running() as daemon:
            assert daemon.says("policies away", so="what is enforced goes on")
            assert daemon.is_in("in sync", f"pod:{uid}")
            assert "list networkpolicies" in daemon.status()["policies"]["why"]
            assert reached(wired, wired.client, AT, TCP, 1500) is None
            ruled.cluster.grant(USER, *ALL)
            ruled.place("c", FROM)
            assert comes_to_reach(wired, 1500)


def test_a_policy_that_is_bad_cuts_and_lets_through_as_before_over_a_kill(
    ruled: Ruled, wired: Lab, tmp_path: Path
) -> None:
    label = ruled.label("web")
    wrong = {"ipBlock": {"cidr": "010.0.0.0/8"}}
    so = "the last good meaning of it goes on"

    def cuts_as_before() -> bool:
        answers = [reached(wired, wired.client, AT, TCP, port) for port in (1500, 2500)]
        return answers == [1500, None]

    with (
        agents(ruled.cluster, tmp_path, ruled.node) as node,
        launched(node, ruled.machines, phone(ruled), wired.pod) as uid,
        echoing(wired, wired.guest, [(TCP, 1500), (TCP, 2500)]),
    ):
        ruled.cluster.grant(USER, *ALL)
        node.daemons.configure(**{"policy.enforce": True})
        texts = node.daemons.state / "last-good"
        ruled.let("web", {"ipBlock": {"cidr": f"{FROM}/32"}})
        with node.daemons.running() as daemon:
            assert daemon.is_in("in sync", f"pod:{uid}")
            assert comes_to_reach(wired, 1500)
            assert cuts_as_before()
            assert eventually(lambda: any(label in one.read_text() for one in texts.glob("*.json")))
            ruled.let("web", wrong)
            assert daemon.says("bad manifest", so=so)
            daemon.kill()
        with (
            closing(connected(wired, wired.client, AT, TCP, 1500)) as flow,
            node.daemons.running() as daemon,
        ):
            assert daemon.says("bad manifest", so=so)
            assert daemon.is_in("outdated", f"pod:{uid}")
            assert label in daemon.status()["last_good"]
            assert cuts_as_before()
            assert asks(flow) == 1500
            daemon.reload()
            assert daemon.is_in("outdated", f"pod:{uid}")
            assert reached(wired, wired.client, AT, TCP, 1500) == 1500
            assert asks(flow) == 1500
            daemon.kill()
        ruled.drop("web")
        ruled.let("web", wrong)  # another of that name, which was never in order
        with node.daemons.running() as daemon:
            assert daemon.says("bad manifest")
            assert label not in daemon.status()["last_good"]
            assert comes_to_reach(wired, 1500, answer=False)
            ruled.drop("web")
            assert comes_to_reach(wired, 2500)


def test_reload_while_the_api_server_is_away_keeps_what_policies_say(
    ruled: Ruled, wired: Lab, tmp_path: Path
) -> None:
    """One is on its last valid version, another was never valid, and nothing could be stored."""
    wrong = {"ipBlock": {"cidr": "010.0.0.0/8"}}
    cluster = ruled.cluster

    def cuts_as_before() -> bool:
        answers = [reached(wired, wired.client, AT, TCP, port) for port in (1500, 2500)]
        return answers == [1500, None]

    with (
        agents(cluster, tmp_path, ruled.node) as node,
        launched(node, ruled.machines, phone(ruled), wired.pod) as uid,
        echoing(wired, wired.guest, [(TCP, 1500), (TCP, 2500)]),
    ):
        node.daemons.state.mkdir()
        (node.daemons.state / "last-good").write_text("no directory")
        cluster.grant(USER, *ALL)
        node.daemons.configure(**{"policy.enforce": True})
        ruled.let("web", {"ipBlock": {"cidr": f"{FROM}/32"}})
        with node.daemons.running() as daemon:
            assert daemon.is_in("in sync", f"pod:{uid}")
            assert comes_to_reach(wired, 1500)
            ruled.let("web", wrong)
            assert daemon.says("bad manifest")
            ruled.let("never", wrong)
            assert eventually(lambda: len(daemon.status()["problems"]) == 2)
            daemon.reload()
            before = handles(wired.pod)
            cluster.kill_apiserver()
            for _ in range(2):
                daemon.reload()
                assert cuts_as_before()
                assert handles(wired.pod) == before
                assert daemon.status()["last_good"] == [ruled.label("web")]
                assert len(daemon.status()["problems"]) == 2
            cluster.start_apiserver()
            assert eventually(lambda: not daemon.status()["unreadable"])
            assert cuts_as_before()
            assert daemon.status()["last_good"] == [ruled.label("web")]
            assert handles(wired.pod) == before


# ------------------------------------------------------------------------------------- numbers

MEMORY = """
import json, sys
from agent.sources.kubeconfig import load
from agent.sources.kubernetes import Cluster
from agent.sources.store import Store

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4

kubeconfig, node, state, policies = sys.argv[1:]
before = rss()
source = Cluster(load(kubeconfig, {}), node, Store(state, print), policies=policies == "yes")
meaning = source.look()
while meaning.laws_unknown:
    source.wait(0.1)
    meaning = source.look()
told = {"before": before, "after": rss(), "kept": len(meaning.laws.pods)}
print(json.dumps({**told, "received": source.received}))
source.close()
"""


def test_a_thousand_pods_take_little_memory(ruled: Ruled, tmp_path: Path) -> None:
    ruled.make_machine()
    ruled.let("web", CLIENTS)
    ruled.place("c", "10.9.0.1")
    credentials = load(str(ruled.cluster.kubeconfig()), {})
    path = f"/api/v1/namespaces/{ruled.namespace}/pods"
    address = "10.8.{}.{}".format

    def make(numbers: range) -> None:
        with closing(Api(credentials)) as api:
            for n in numbers:
                one = pod(f"p-{n}", labels={"app": f"a-{n // 5}", "role": "x", "tier": "back"})
                one["metadata"]["annotations"] = {"example.com/configuration": "x" * 2000}
                api.create(path, one)
                ip = address(n // 250, n % 250 + 1)
                status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
                api.patch(f"{path}/p-{n}/status", {"status": status})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, (range(first, 1000, 4) for first in range(4))))
    words = (sys.executable, "-c", MEMORY, ruled.cluster.kubeconfig(USER))
    with_them, without = (
        json.loads(run(*words, ruled.node, tmp_path / answer, answer).stdout)
        for answer in ("yes", "no")
    )
    print(with_them, without)  # noqa: T201 - shown with -s
    assert with_them["received"] > 1000 * 2000
    assert with_them["kept"] == 1
    cost = (with_them["after"] - with_them["before"]) - (without["after"] - without["before"])
    assert cost < 12 << 10
