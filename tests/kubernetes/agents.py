"""Agents of nodes of a cluster, each a real daemon with a kubelet's folder and launchers of its
own; the API server is the real one, and each virt-launcher a process that listens on its socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.daemon.running import Node as Daemons
from tests.daemon.running import made
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import EVENTS, RIGHTS, SERVICES, SLICES, Json, Machines
from tests.launcher import Node as Kubelet
from tests.launcher import launcher
from tests.spaces import eventually

USER = "portranger"


class Agents:
    """What the agents of one node live on."""

    def __init__(self, name: str, daemons: Daemons, kubelet: Kubelet) -> None:
        self.name, self.daemons, self.kubelet = name, daemons, kubelet


@contextmanager
def agents(
    cluster: Cluster, folder: Path, name: str, *, services: bool = False, netns: str = ""
) -> Iterator[Agents]:
    """A node of that name, which may do in the cluster what an agent needs and nothing else; its
    network namespace is that one, or one of its own."""
    cluster.grant(USER, RIGHTS, EVENTS, *((SERVICES, SLICES) if services else ()))
    there = nullcontext(Daemons(folder / name, netns)) if netns else made(folder / name)
    with there as daemons, cluster.reachable_from(daemons.home):
        kubelet = Kubelet(folder / name / "node", daemons.home)
        daemons.configure(
            source="kubernetes",
            **{
                "kubernetes.kubeconfig": str(cluster.kubeconfig(USER)),
                "kubernetes.node_name": name,
                "kubernetes.kubelet_root": kubelet.kubelet_root,
                "kubernetes.proc": kubelet.proc,
                "kubernetes.services": services,
            },
        )
        yield Agents(name, daemons, kubelet)


@contextmanager
def launched(
    node: Agents,
    machines: Machines,
    made: Json,
    netns: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """An instance, and in its pod on that node, of which this is the UID, its launcher: as with
    KubeVirt the one is there before the other, which is told whose it is."""
    instance = machines.make(made)["metadata"]["uid"]
    [uid] = [pod for pod, name in made["status"]["activePods"].items() if name == node.name]
    with launcher(node.kubelet, uid, netns, instance=instance, environment=environment):
        yield uid


def events(machines: Machines, name: str) -> list[Json]:
    """What was said of an instance, for `kubectl describe` to show."""
    listed = machines.cluster.ask("GET", f"/api/v1/namespaces/{machines.namespace}/events")
    return [one for one in listed["items"] if one["involvedObject"]["name"] == name]


def comes_to_say(machines: Machines, name: str, reason: str, words: str = "") -> bool:
    """Whether an event of that reason, with these words, comes to be written."""
    return eventually(
        lambda: any(
            one["reason"] == reason and words in one["message"] for one in events(machines, name)
        )
    )
