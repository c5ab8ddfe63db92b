"""The whole agent on a node of a real API server: what is declared there is forwarded into the
launcher's namespace, with packets; what is edited there is edited here, while flows go on."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agent.kernel.lab import POD, Lab
from agent.kernel.probe import asks, connected, echoing, reached
from rules.model import FORWARDED, Family, Protocol
from tests import faulty
from tests.daemon.running import comes_to_forward, forwarded, handles
from tests.kubernetes.agents import USER, Agents, agents, comes_to_say, launched
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import Machines, instance, pod_uid
from tests.kubevirt import programmed
from tests.launcher import launcher, launchers
from tests.spaces import LINKS, eventually, ip, lab, nft, pod, space

TCP, UDP = Protocol.TCP, Protocol.UDP
AT = next(address.ip for address in POD if Family.of(address) is Family.IP)
MANY = 300


@pytest.fixture
def machines(cluster: Cluster, namespace: str) -> Machines:
    return Machines(cluster, namespace)


@pytest.fixture
def node(cluster: Cluster, tmp_path: Path) -> Iterator[Agents]:
    with agents(cluster, tmp_path, f"node-{tmp_path.name[-8:].strip('_').lower()}") as made:
        yield made


@pytest.fixture
def wired() -> Iterator[Lab]:
    with lab() as made:
        yield made


def comes_to_reach(wired: Lab, protocol: Protocol, port: int, *, answer: bool = True) -> bool:
    return eventually(lambda: (reached(wired, wired.client, AT, protocol, port) == port) is answer)


def answers(client: socket.socket) -> bool:
    try:
        return bool(asks(client))
    except OSError:
        return False


# ----------------------------------------------------------------------------------- one machine


def test_an_instance_is_served_edited_while_it_runs_and_let_go(
    machines: Machines, node: Agents, wired: Lab
) -> None:
    flows = [(protocol, port) for protocol in FORWARDED for port in (1000, 1500, 3000)]
    made = instance("vm", node.name, "1000-2000,1000-2000/udp")
    with (
        node.daemons.running() as daemon,
        echoing(wired, wired.guest, flows),
        launched(node, machines, made, wired.pod),
    ):
        assert comes_to_reach(wired, TCP, 1500)
        assert comes_to_say(machines, "vm", "PortsApplied", "tcp 1000-2000, udp 1000-2000")
        with (
            closing(connected(wired, wired.client, AT, TCP, 1000)) as kept,
            closing(connected(wired, wired.client, AT, UDP, 1500)) as cut,
        ):
            assert (asks(kept), asks(cut)) == (1000, 1500)
            machines.annotate("vm", port_ranges="1000-1200,3000")
            assert comes_to_reach(wired, TCP, 3000)
            assert comes_to_reach(wired, TCP, 1500, answer=False)
            assert asks(kept) == 1000  # the guest was not restarted, and its flow goes on
            cut.settimeout(0.5)
            assert eventually(lambda: not answers(cut))
        machines.remove("vm")
        assert comes_to_forward(wired.pod)
        assert eventually(lambda: daemon.status()["namespaces"] == [])


def test_a_launcher_may_come_after_its_instance(machines: Machines, node: Agents) -> None:
    uid = pod_uid()
    with node.daemons.running() as daemon, pod() as netns:
        made = machines.make(instance("vm", node.name, "22", pods={uid: node.name}))
        assert daemon.is_in("pending", f"pod:{uid}")
        with launcher(node.kubelet, uid, netns, instance=made["metadata"]["uid"]):
            assert comes_to_forward(netns, "tcp 22", seconds=5)
            assert daemon.is_in("in sync", f"pod:{uid}")


def test_bad_ranges_are_told_on_the_instance_and_what_ran_goes_on(
    machines: Machines, node: Agents
) -> None:
    with (
        pod() as netns,
        node.daemons.running() as daemon,
        launched(node, machines, instance("vm", node.name, "22"), netns),
    ):
        assert comes_to_forward(netns, "tcp 22")
        machines.annotate("vm", port_ranges="22,9000-8000")
        assert comes_to_say(machines, "vm", "PortsRejected", "9000-8000")
        assert forwarded(netns) == {"tcp 22"}
        (problem,) = daemon.status()["problems"]
        assert problem["file"].endswith("/vm")
        machines.annotate("vm", port_ranges="22,8000-9000")
        assert comes_to_forward(netns, "tcp 22", "tcp 8000-9000")
        text = machines.cluster.kubectl(
            "describe", "virtualmachineinstance", "vm", "-n", machines.namespace
        )
        assert "PortsRejected" in text
        assert "PortsApplied" in text


def test_no_annotation_leads_into_another_namespace(machines: Machines, node: Agents) -> None:
    with pod() as netns, pod() as victim, node.daemons.running():
        made = instance("vm", node.name, "22", annotations={"netns": victim})
        with launched(node, machines, made, netns):
            assert comes_to_say(machines, "vm", "PortsRejected", "bare metal")
            machines.annotate("vm", netns=None)
            assert comes_to_forward(netns, "tcp 22")
            assert not forwarded(victim)


def test_drift_is_repaired_and_told(machines: Machines, node: Agents) -> None:
    made = instance("vm", node.name, "22")
    with pod() as netns, node.daemons.running(), launched(node, machines, made, netns):
        assert comes_to_forward(netns, "tcp 22")
        nft(netns, "flush ruleset")
        assert comes_to_forward(netns, "tcp 22", seconds=5)
        assert comes_to_say(machines, "vm", "PortsDriftRepaired", "nft (pid ")


# -------------------------------------------------------------------------------- beside KubeVirt


@pytest.mark.parametrize("theirs", ["", "22"], ids=["catch-all", "ports"])
def test_beside_kubevirt_only_what_is_declared_is_open(
    machines: Machines, node: Agents, wired: Lab, theirs: str
) -> None:
    with (
        node.daemons.running() as daemon,
        echoing(wired, wired.guest, [(TCP, 22), (TCP, 1500), (TCP, 8080)]),
        launched(node, machines, instance("vm", node.name, "1000-2000"), wired.pod) as uid,
    ):
        assert comes_to_reach(wired, TCP, 1500)
        programmed(wired.pod, theirs)  # virt-handler may come after us
        assert eventually(lambda: daemon.standing(f"pod:{uid}").get("mode") == "extend")
        assert comes_to_reach(wired, TCP, 1500)
        assert reached(wired, wired.client, AT, TCP, 8080) is None
        assert reached(wired, wired.client, AT, TCP, 22) is None
        machines.annotate("vm", port_ranges=None)
        assert eventually(lambda: not handles(wired.pod))
        assert comes_to_reach(wired, TCP, 22)


def test_what_is_declared_so_that_nobody_understands_it_opens_nothing(
    machines: Machines, node: Agents, wired: Lab
) -> None:
    """KubeVirt knows no ranges here, and forwards everything."""
    programmed(wired.pod)
    with (
        node.daemons.running() as daemon,
        echoing(wired, wired.guest, [(TCP, 1500), (TCP, 8080)]),
    ):
        assert reached(wired, wired.client, AT, TCP, 8080) == 8080
        made = instance("vm", node.name, "2000-1000")
        with launched(node, machines, made, wired.pod) as uid:
            assert comes_to_say(machines, "vm", "PortsRejected", "no port of it is open")
            assert comes_to_reach(wired, TCP, 8080, answer=False)
            assert daemon.is_in("in sync", f"pod:{uid}")
            machines.annotate("vm", port_ranges="1000-2000")
            assert comes_to_reach(wired, TCP, 1500)
            assert reached(wired, wired.client, AT, TCP, 8080) is None


def test_an_instance_that_meets_a_bug_of_ours_is_guarded_and_the_others_are_served(
    machines: Machines, node: Agents, wired: Lab, tmp_path: Path
) -> None:
    programmed(wired.pod)
    closed = instance("boom", node.name, "1000-2000")
    with (
        pod() as netns,
        node.daemons.running(environment=faulty.environment(tmp_path / "custom")) as daemon,
        launched(node, machines, instance("vm", node.name, "22"), netns),
        echoing(wired, wired.guest, [(TCP, 1500), (TCP, 8080)]),
    ):
        assert reached(wired, wired.client, AT, TCP, 8080) == 8080
        with launched(node, machines, closed, wired.pod) as uid:
            assert comes_to_say(machines, "boom", "PortsRejected", "ZeroDivisionError")
            assert comes_to_reach(wired, TCP, 8080, answer=False)
            assert daemon.is_in("in sync", f"pod:{uid}")
            assert comes_to_forward(netns, "tcp 22")
            machines.change("vm", {"metadata": {"labels": {"boom": "x"}}})
            machines.annotate("vm", port_ranges="80")
            assert comes_to_say(machines, "vm", "PortsRejected", "ZeroDivisionError")
            assert forwarded(netns) == {"tcp 22"}
            machines.change("vm", {"metadata": {"labels": {"boom": None}}})
            assert comes_to_forward(netns, "tcp 80")


def test_a_pod_that_has_ended_is_not_pending_although_kubevirt_still_names_it(
    machines: Machines, node: Agents
) -> None:
    """After a migration there and back, and when a launcher ends before its instance."""
    ended, gone, now = pod_uid(), pod_uid(), pod_uid()
    node.kubelet.start(ended)
    node.kubelet.finish(ended)
    named = {"vm": {ended: node.name, gone: node.name, now: node.name}}
    with pod() as netns, node.daemons.running() as daemon:
        made = machines.make(instance("vm", node.name, "22", pods=named["vm"]))
        assert daemon.is_in("pending", f"pod:{now}")
        assert daemon.is_in("pending", f"pod:{gone}")  # of two that are not here, nobody knows
        assert daemon.standing(f"pod:{ended}") == {}
        with launcher(node.kubelet, now, netns, instance=made["metadata"]["uid"]):
            node.kubelet.start(now)
            assert comes_to_forward(netns, "tcp 22")
            assert eventually(lambda: daemon.standing(f"pod:{gone}") == {})
            assert [one["state"] for one in daemon.status()["namespaces"]] == ["in sync"]
        node.kubelet.finish(now)
        assert eventually(lambda: daemon.status()["namespaces"] == [])
        assert daemon.status()["ready"]


# ------------------------------------------------------------------------------------ what fails


def test_what_runs_goes_on_while_the_api_server_is_away(
    cluster: Cluster, machines: Machines, node: Agents
) -> None:
    with (
        pod() as netns,
        pod() as later,
        launched(node, machines, instance("vm", node.name, "22"), netns),
    ):
        with node.daemons.running() as daemon:
            assert comes_to_forward(netns, "tcp 22")
            cluster.kill_apiserver()
            nft(netns, "flush ruleset")
            assert comes_to_forward(netns, "tcp 22", seconds=5)
            assert eventually(lambda: daemon.status()["unreadable"])
        before = handles(netns)
        with node.daemons.running() as daemon:  # which was started without an API server
            assert daemon.status()["unreadable"]
            assert handles(netns) == before
            nft(netns, "flush ruleset")
            assert comes_to_forward(netns, "tcp 22", seconds=5)
            cluster.start_apiserver()
            with launched(node, machines, instance("another", node.name, "80"), later):
                assert comes_to_forward(later, "tcp 80")
            assert eventually(lambda: not daemon.status()["unreadable"])
            machines.remove("vm")
            assert comes_to_forward(netns)


def stop(cluster: Cluster) -> None:
    cluster.signal_apiserver(signal.SIGSTOP)


@pytest.mark.parametrize("stored", [True, False], ids=["", "state directory not writable"])
@pytest.mark.parametrize("lose", [Cluster.kill_apiserver, stop], ids=["killed", "stopped"])
def test_reload_while_the_api_server_is_unavailable_opens_no_port(
    machines: Machines, node: Agents, wired: Lab, lose: Callable[[Cluster], None], stored: bool
) -> None:
    """KubeVirt's catch-all is behind the guard of an instance that was never valid."""
    cluster = machines.cluster
    programmed(wired.pod)
    if not stored:
        node.daemons.state.mkdir()
        (node.daemons.state / "last-good").write_text("no directory")
    closed = instance("closed", node.name, "2000-1000")
    with (
        pod() as netns,
        node.daemons.running() as daemon,
        launched(node, machines, instance("vm", node.name, "22"), netns),
        echoing(wired, wired.guest, [(TCP, 8080)]),
        launched(node, machines, closed, wired.pod) as uid,
    ):
        assert comes_to_forward(netns, "tcp 22")
        assert daemon.is_in("in sync", f"pod:{uid}")
        assert comes_to_reach(wired, TCP, 8080, answer=False)
        before = handles(netns), handles(wired.pod)
        lose(cluster)
        try:
            for _ in range(2):
                daemon.reload()
                status = daemon.status()
                assert status["unreadable"]
                assert {one["state"] for one in status["namespaces"]} == {"in sync"}
                assert len(status["namespaces"]) == 2
                assert (handles(netns), handles(wired.pod)) == before
                assert reached(wired, wired.client, AT, TCP, 8080) is None
                [problem] = status["problems"]
                assert problem["file"].endswith("/closed")
            node.daemons.configure(source="files", manifests=str(node.daemons.folder / "away"))
            daemon.reload()
            assert (handles(netns), handles(wired.pod)) == before
            node.daemons.configure(source="kubernetes")
            daemon.reload()
            assert (handles(netns), handles(wired.pod)) == before
        finally:
            cluster.signal_apiserver(signal.SIGCONT)
            cluster.start_apiserver()
        assert eventually(lambda: not daemon.status()["unreadable"])
        assert (handles(netns), handles(wired.pod)) == before
        machines.annotate("vm", port_ranges="22-21")
        assert comes_to_say(machines, "vm", "PortsRejected", "22-21")
        daemon.reload()
        assert eventually(lambda: not daemon.status()["unreadable"])
        assert forwarded(netns) == {"tcp 22"}  # its last valid version is still known
        machines.remove("closed")
        assert comes_to_reach(wired, TCP, 8080)  # it is no longer an instance's pod


def test_an_api_server_that_hangs_is_found_out_within_half_a_minute_without_a_request(
    cluster: Cluster, machines: Machines, node: Agents
) -> None:
    made = instance("vm", node.name, "22")
    with (
        pod() as netns,
        node.daemons.running() as daemon,
        launched(node, machines, made, netns),
    ):
        assert comes_to_forward(netns, "tcp 22")
        assert comes_to_say(machines, "vm", "PortsApplied")
        before, requests = handles(netns), daemon.metric("kubernetes_requests_total")
        stop(cluster)
        try:
            started = time.monotonic()
            assert eventually(lambda: daemon.status()["unreadable"], 60)
            assert time.monotonic() - started < 30
            assert daemon.metric("kubernetes_requests_total") == requests
            assert "hangs" in daemon.status()["unreadable"]
            assert handles(netns) == before
            nft(netns, "flush ruleset")
            assert comes_to_forward(netns, "tcp 22")
        finally:
            cluster.signal_apiserver(signal.SIGCONT)
        assert eventually(lambda: not daemon.status()["unreadable"], 60)
        machines.annotate("vm", port_ranges="23")
        assert comes_to_forward(netns, "tcp 23")


def test_a_socket_of_another_is_refused_and_told(machines: Machines, node: Agents) -> None:
    mine, theirs = pod_uid(), pod_uid()
    with (
        pod() as netns,
        launcher(node.kubelet, theirs, netns) as victim,
        node.daemons.running() as daemon,
    ):
        folder = node.kubelet.sockets(mine)
        folder.mkdir(parents=True)
        (folder / "launcher-sock").symlink_to(victim.socket)
        machines.make(instance("thief", node.name, "22", pods={mine: node.name}))
        assert daemon.is_in("refused", f"pod:{mine}")
        assert comes_to_say(machines, "thief", "PortsRefused")
        assert daemon.metric("pods_refused_total") >= 1
        assert not forwarded(netns)


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_an_instance_cannot_take_the_pod_that_serves_another(
    machines: Machines, node: Agents, does: str
) -> None:
    """Whoever may edit an instance may write any pod into its status."""
    uid = pod_uid()
    with pod() as netns, node.daemons.running() as daemon:
        thief = machines.make(instance("thief", node.name, "22", pods={uid: node.name}))
        with launcher(node.kubelet, uid, netns, does=does, instance=pod_uid()):
            assert daemon.is_in("refused", f"pod:{uid}")
            assert comes_to_say(machines, "thief", "PortsRefused", "serves")
            assert not handles(netns)
        with launcher(node.kubelet, uid, netns, does=does, instance=thief["metadata"]["uid"]):
            assert comes_to_forward(netns, "tcp 22")


def test_an_instance_cannot_take_a_pod_that_is_no_launchers(
    machines: Machines, node: Agents
) -> None:
    """A database, say, with a network of its own; the other pods of the instance are served."""
    theirs, mine = pod_uid(), pod_uid()
    with (
        pod() as database,
        pod() as netns,
        node.daemons.running() as daemon,
        launcher(node.kubelet, theirs, database, does="nothing"),
    ):
        ip(database, *(f"link del {name}" for name in LINKS if name.startswith("k6t-")))
        pods = {theirs: node.name, mine: node.name}
        thief = machines.make(instance("thief", node.name, "5432", pods=pods))
        with launcher(node.kubelet, mine, netns, instance=thief["metadata"]["uid"]):
            assert comes_to_forward(netns, "tcp 5432")
            assert daemon.is_in("pending", f"pod:{theirs}")
            assert "no launcher of instance" in daemon.standing(f"pod:{theirs}")["why"]
            assert not handles(database)


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_of_two_that_name_one_pod_it_is_whose_the_launcher_serves(
    machines: Machines, node: Agents, does: str
) -> None:
    uid = pod_uid()
    with pod() as netns, node.daemons.running():
        machines.make(instance("thief", node.name, "22", pods={uid: node.name}))
        victim = machines.make(instance("victim", node.name, "80", pods={uid: node.name}))
        with launcher(node.kubelet, uid, netns, does=does, instance=victim["metadata"]["uid"]):
            assert comes_to_forward(netns, "tcp 80")
            assert comes_to_say(machines, "thief", "PortsConflict", "victim")


def test_a_kubeconfig_that_was_mended_is_taken_up_at_the_next_reload(
    cluster: Cluster, machines: Machines, node: Agents
) -> None:
    good = str(cluster.kubeconfig(USER))
    broken = node.daemons.folder / "broken"
    broken.write_text("{")
    with pod() as netns, node.daemons.running() as daemon:
        node.daemons.configure(
            **{"kubernetes.kubeconfig": str(broken), "kubernetes.node_name": "another"}
        )
        node.name = "another"
        daemon.reload()
        assert daemon.said("bad configuration")
        broken.write_text(Path(good).read_text())
        daemon.reload()
        with launched(node, machines, instance("vm", "another", "22"), netns):
            assert comes_to_forward(netns, "tcp 22")


def test_another_source_clears_what_this_one_left(machines: Machines, node: Agents) -> None:
    made = instance("vm", node.name, "22")
    with pod() as netns, launched(node, machines, made, netns):
        with node.daemons.running():
            assert comes_to_forward(netns, "tcp 22")
        node.daemons.configure(source="files")
        with node.daemons.running():
            assert comes_to_forward(netns)


def test_the_nodes_own_namespace_is_never_entered(machines: Machines, node: Agents) -> None:
    with (
        node.daemons.running() as daemon,
        launched(node, machines, instance("thief", node.name, "22"), node.daemons.home) as uid,
    ):
        assert daemon.is_in("refused", f"pod:{uid}")
        assert comes_to_say(machines, "thief", "PortsRefused", "node's own network namespace")
        assert not handles(node.daemons.home)


# ------------------------------------------------------------------------------------ migration


def test_a_migration_finds_the_target_ready_before_it_switches_over(
    cluster: Cluster, machines: Machines, tmp_path: Path
) -> None:
    """Which has its rules as soon as its launcher runs, before that listens."""
    source_pod, target_pod = pod_uid(), pod_uid()
    both = {source_pod: "source", target_pod: "target"}
    with ExitStack() as stack:
        source = stack.enter_context(agents(cluster, tmp_path, "source"))
        target = stack.enter_context(agents(cluster, tmp_path, "target"))
        here, there = stack.enter_context(pod()), stack.enter_context(pod())
        stack.enter_context(source.daemons.running())
        stack.enter_context(target.daemons.running())
        made = machines.make(instance("vm", "source", "1000-2000", pods={source_pod: "source"}))
        uid = made["metadata"]["uid"]
        stack.enter_context(launcher(source.kubelet, source_pod, here, instance=uid))
        assert comes_to_forward(here, "tcp 1000-2000")
        runs = launcher(target.kubelet, target_pod, there, does="nothing", instance=uid)
        stack.enter_context(runs)
        machines.change("vm", {"status": {"activePods": both}})
        machines.label("vm", target="target")
        assert comes_to_forward(there, "tcp 1000-2000")
        assert forwarded(here) == {"tcp 1000-2000"}  # where the guest still runs
        before = handles(there)
        machines.change("vm", {"status": {"nodeName": "target"}})
        machines.label("vm", node="target", target=None)
        machines.change("vm", {"status": {"activePods": {source_pod: None}}})
        assert comes_to_forward(here)
        assert forwarded(there) == {"tcp 1000-2000"}
        assert handles(there) == before  # nothing was taken away and put back


# ---------------------------------------------------------------------------------------- scale


def test_hundreds_of_instances_at_once(machines: Machines, node: Agents) -> None:
    """In namespaces with one link each; every one is served, and the daemon stays small."""
    with ExitStack() as stack:
        pods: dict[str, str] = {}
        for number in range(MANY):
            netns = stack.enter_context(space())
            linked(netns, number)
            pods[pod_uid()] = netns
        daemon = stack.enter_context(node.daemons.running())
        started = time.monotonic()
        machines.make_all(
            [
                instance(f"vm-{number}", node.name, "1000-2000,53/udp", pods={uid: node.name})
                for number, uid in enumerate(pods)
            ]
        )
        written = time.monotonic()
        made = machines.cluster.ask("GET", machines.path)["items"]
        instances = {
            uid: one["metadata"]["uid"] for one in made for uid in one["status"]["activePods"]
        }
        stack.enter_context(launchers(node.kubelet, pods, instances=instances))
        assert eventually(lambda: daemon.metric("namespaces", state="in_sync") == MANY, 60)
        took = time.monotonic() - written
        resident = daemon.metric("process_resident_memory_bytes") / 2**20
        print(  # noqa: T201
            f"{MANY} instances: written in {written - started:.1f} s, in sync {took:.1f} s later;"
            f" {resident:.0f} MiB, {daemon.descriptors()} descriptors"
        )
        assert resident < 100
        netns = next(iter(pods.values()))
        machines.annotate("vm-0", port_ranges="5000")
        assert comes_to_forward(netns, "tcp 5000")


def linked(netns: str, number: int) -> None:
    ip(
        netns,
        "link add eth0 type bridge",
        f"addr add 198.51.{number // 250}.{1 + number % 250}/16 dev eth0",
        "link set eth0 up",
    )


def test_status_tells_which_device_backs_a_resource_network(
    machines: Machines, node: Agents
) -> None:
    variable = json.dumps(
        {
            "name": "sriov/red",
            "interfaces": [{"name": "net7", "protocol": "Ethernet"}],
        }
    )
    made = instance("vm", node.name, "22")
    made["spec"]["domain"]["devices"]["interfaces"].append({"name": "red", "bridge": {}})
    made["spec"]["networks"].append({"name": "red", "resource": {"resourceName": "sriov/red"}})
    environment = {"NETWORK_INTERFACE_RESOURCES_SRIOV_RED": variable}
    with (
        pod() as netns,
        node.daemons.running() as daemon,
        launched(node, machines, made, netns, environment=environment) as uid,
    ):
        assert comes_to_forward(netns, "tcp 22")
        told = "red: sriov/red is the device net7"
        assert eventually(
            lambda: any(note.endswith(told) for note in daemon.standing(f"pod:{uid}")["notes"])
        )
