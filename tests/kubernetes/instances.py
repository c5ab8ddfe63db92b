"""VirtualMachineInstances for tests, as KubeVirt leaves them in the API, and a source that is asked
as the daemon asks it."""

from __future__ import annotations

import base64
import random
import select
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent.sources.api import Api
from agent.sources.credentials import Credentials
from agent.sources.kubeconfig import load
from agent.sources.kubernetes import Cluster as Source
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from tests.kubernetes.cluster import KUBEVIRT, LOOPBACK, VMIS, Cluster, pump
from tests.spaces import eventually

Json = Any
RIGHTS = {"apiGroups": ["kubevirt.io"], "resources": [VMIS], "verbs": ["list", "watch"]}
EVENTS = {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}
READ = ["list", "watch"]
SERVICES = {"apiGroups": [""], "resources": ["services"], "verbs": READ}
SLICES = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": READ}
POLICIES = {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": READ}
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": READ}
NAMESPACES = {"apiGroups": [""], "resources": ["namespaces"], "verbs": READ}
RANGES = "portranger.io/port-ranges"
NODE, TARGET = "kubevirt.io/nodeName", "kubevirt.io/migrationTargetNodeName"


def pod_uid() -> str:
    return str(uuid.uuid4())


def instance(  # noqa: PLR0913 - what differs between them
    name: str,
    node: str,
    ranges: str | None = "1000-2000",
    *,
    pods: dict[str, str] | None = None,
    target: str = "",
    phase: str = "Running",
    annotations: Mapping[str, str] = MappingProxyType({}),
) -> Json:
    """One that runs on a node, in a pod of its own unless others are named."""
    ours = {f"portranger.io/{key}": text for key, text in annotations.items()}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name,
            "labels": {NODE: node} | ({TARGET: target} if target else {}),
            "annotations": ({RANGES: ranges} if ranges is not None else {}) | ours,
        },
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {
            "phase": phase,
            "nodeName": node,
            "activePods": {pod_uid(): node} if pods is None else pods,
            "migrationTransport": "Unix",
            "interfaces": [{"name": "default", "podInterfaceName": "eth0"}],
        },
    }


def realistic(name: str, node: str, ranges: str | None = "1000-2000") -> Json:
    """One with everything that a real one has, 30 KB of it."""
    made = instance(name, node, ranges)
    secret = base64.b64encode(random.randbytes(14000)).decode()
    made["metadata"]["annotations"] |= {
        "kubevirt.io/latest-observed-api-version": "v1",
        "kubevirt.io/storage-observed-api-version": "v1",
        "kubevirt.io/vm-generation": "1",
        "vm.kubevirt.io/os": "fedora",
    }
    made["metadata"]["labels"] |= {"kubevirt.io/domain": name, "app": "desktop"}
    devices = made["spec"]["domain"]["devices"]
    devices["interfaces"][0] |= {"model": "virtio", "macAddress": "02:42:ac:11:00:02"}
    devices["disks"] = [
        {
            "name": f"disk-{number}",
            "disk": {"bus": "virtio"},
            "cache": "none",
            "serial": secret[:20],
        }
        for number in range(20)
    ]
    made["spec"] |= {
        "architecture": "amd64",
        "evacuationStrategy": "LiveMigrate",
        "terminationGracePeriodSeconds": 180,
        "volumes": [
            {"name": f"disk-{number}", "dataVolume": {"name": f"{name}-{number}"}}
            for number in range(19)
        ]
        + [{"name": "disk-19", "cloudInitNoCloud": {"userDataBase64": secret}}],
    }
    made["spec"]["domain"] |= {
        "cpu": {"cores": 2, "sockets": 1, "threads": 1, "model": "host-model"},
        "firmware": {"uuid": pod_uid(), "serial": pod_uid()},
        "memory": {"guest": "2Gi"},
        "features": {"acpi": {"enabled": True}, "smm": {"enabled": True}},
    }
    made["status"] |= {
        "conditions": [
            {"type": kind, "status": "True", "lastProbeTime": None, "reason": secret[:40]}
            for kind in ("Ready", "LiveMigratable", "StorageLiveMigratable", "AgentConnected")
        ],
        "guestOSInfo": {"id": "fedora", "kernelRelease": "6.5.6", "prettyName": "Fedora"},
        "volumeStatus": [
            {
                "name": f"disk-{number}",
                "target": f"vd{number}",
                "persistentVolumeClaimInfo": {
                    "accessModes": ["ReadWriteMany"],
                    "capacity": {"storage": "34087042032"},
                    "claimName": f"{name}-{number}",
                    "filesystemOverhead": "0.055",
                    "requests": {"storage": "34087042032"},
                    "volumeMode": "Block",
                },
            }
            for number in range(20)
        ],
        "phaseTransitionTimestamps": [
            {"phase": phase, "phaseTransitionTimestamp": "2026-01-01T00:00:00Z"}
            for phase in ("Pending", "Scheduling", "Scheduled", "Running")
        ],
        "virtualMachineRevisionName": f"revision-start-vm-{pod_uid()}-2",
        "selinuxContext": "system_u:object_r:container_file_t:s0:c107,c649",
    }
    return made


class Machines:
    """The instances in one namespace of a cluster, as KubeVirt and its users write them."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.path = f"{KUBEVIRT}/namespaces/{namespace}/{VMIS}"

    def make(self, made: Json) -> Json:
        return self.cluster.ask("POST", self.path, made)

    def make_all(self, many: list[Json]) -> None:
        """As fast as the API server takes them."""
        credentials = load(str(self.cluster.kubeconfig()), {})

        def some(mine: list[Json]) -> None:
            with closing(Api(credentials)) as api:
                for one in mine:
                    api.create(self.path, one)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(some, (many[start::4] for start in range(4))))

    def change(self, name: str, changes: Json) -> Json:
        return self.cluster.ask("PATCH", f"{self.path}/{name}", changes)

    def annotate(self, name: str, **annotations: str | None) -> Json:
        ours = {f"portranger.io/{key.replace('_', '-')}": t for key, t in annotations.items()}
        return self.change(name, {"metadata": {"annotations": ours}})

    def label(self, name: str, **labels: str | None) -> Json:
        keys = {"node": NODE, "target": TARGET}
        return self.change(
            name, {"metadata": {"labels": {keys[key]: text for key, text in labels.items()}}}
        )

    def remove(self, name: str) -> None:
        self.cluster.ask("DELETE", f"{self.path}/{name}")


class Asked:
    """A source, asked as the daemon does it; `looks` and `beats` count what that took."""

    def __init__(
        self,
        credentials: Credentials,
        node: str,
        state: Path,
        *,
        services: bool = False,
        policies: bool = False,
    ) -> None:
        self.warnings: list[str] = []
        self.looks = self.beats = 0
        store = Store(str(state), self.warnings.append)
        self.source = Source(credentials, node, store, services=services, policies=policies)
        self.meaning = self.look()

    def look(self) -> Meaning:
        self.looks += 1
        self.meaning = self.source.look(self._beat)
        self.source.remember()
        return self.meaning

    def turn(self, seconds: float = 0.2) -> bool:
        """Wait to be woken, and look; whether there was something."""
        due = self.source.due
        if due is not None:
            seconds = min(seconds, max(0.0, due - time.monotonic()))
        woken = bool(select.select(self.source.filenos(), [], [], seconds)[0]) or due is not None
        if woken and self.source.heard():
            self.look()
        return woken

    def until(self, true: Callable[[Meaning], object], seconds: float = 30.0) -> Meaning:
        """What it says once that is true, which nothing but being woken makes it see."""

        def tried() -> bool:
            if true(self.meaning):
                return True
            self.turn()
            return bool(true(self.meaning))

        assert eventually(tried, seconds), self.meaning
        return self.meaning

    def has(self, *names: str) -> Meaning:
        """Once it has exactly these machines, and knows that."""
        return self.until(lambda it: not it.unreadable and machines(it) == sorted(names))

    def _beat(self) -> None:
        self.beats += 1


def machines(meaning: Meaning) -> list[str]:
    return sorted(one.name for one in meaning.machines)


def claims(meaning: Meaning) -> dict[str, str]:
    """What each machine wants forwarded, by its name."""
    found: dict[str, str] = {}
    for one in meaning.machines:
        assert one.masquerade
        wanted = one.masquerade.claims or ()
        found[one.name] = ",".join(f"{claim.ports}/{claim.protocol.value}" for claim in wanted)
    return found


def pods(meaning: Meaning) -> set[str]:
    return {one.netns.removeprefix("pod:") for one in meaning.machines}


@contextmanager
def asking(
    credentials: Credentials,
    node: str,
    state: Path,
    *,
    services: bool = False,
    policies: bool = False,
) -> Iterator[Asked]:
    made = Asked(credentials, node, state, services=services, policies=policies)
    try:
        yield made
    finally:
        made.source.close()
        assert not made.warnings


class Cable:
    """The way to the API server, which can be cut; who is cut off is told so at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._sockets: list[socket.socket] = []
        self._whole = threading.Event()
        self._whole.set()
        cable = self

        class Way(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                cable._carry(self.request)

        self._server = socketserver.ThreadingTCPServer((LOOPBACK, 0), Way)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def cut(self) -> None:
        self._whole.clear()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole.set()

    def _carry(self, here: socket.socket) -> None:
        if not self._whole.is_set():
            return
        port = int(self.cluster.server.rpartition(":")[2])
        with suppress(OSError), socket.create_connection((LOOPBACK, port)) as there:
            self._sockets += [here, there]
            back = threading.Thread(target=pump, args=(there, here), daemon=True)
            back.start()
            pump(here, there)
            back.join()

    @contextmanager
    def laid(self) -> Iterator[Cable]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.cut()
            self._server.shutdown()
            thread.join()
            self._server.server_close()
