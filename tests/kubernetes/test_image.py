"""The image is small, the same however often it is built, and serves with what the DaemonSet lets
it have: with less of it, it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from agent.kernel import sysctl
from agent.kernel.netns import inside, opened
from agent.sources.credentials import SERVICE_ACCOUNT
from tests.daemon.running import Running, comes_to_forward
from tests.kubernetes import assets
from tests.kubernetes.agents import comes_to_say
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.image import (
    BASE,
    NODE,
    NODE_ITSELF,
    UNLIMITED,
    Podman,
    built_twice,
    options,
    podman,
)
from tests.kubernetes.instances import Machines, instance
from tests.launcher import LAUNCHERS, ROOM, SOCKET, SOCKETS, cgroups
from tests.spaces import PATIENCE, ROOT, ip, manifest, nft, pod, run, space, within

Json = Any

IMAGE, AGAIN = "localhost/portranger", "localhost/again"
MOST_ADDED = 64 << 20  # bytes, to a Debian
UNWANTED = ("pip", "pip3", "gcc", "cc", "make", "curl", "wget", "git", "nft", "iptables", "ip")

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    with podman() as made:
        yield made


@pytest.fixture(scope="module")
def identities(engine: Podman) -> list[str]:
    return built_twice(engine, IMAGE, AGAIN)


@pytest.fixture(scope="module")
def image(engine: Podman, identities: list[str]) -> Podman:
    """What can run it."""
    return engine


def rendered(folder: str) -> list[Json]:
    try:
        kubectl = assets.find().kubectl
    except assets.Unavailable as problem:
        pytest.skip(str(problem))
    return list(yaml.safe_load_all(run(kubectl, "kustomize", ROOT / folder).stdout))


def once(podman: Podman, *words: str, entry: str = "", **more: Any) -> str:
    """What a container says that nobody gave anything to."""
    nothing = ("--read-only", "--cap-drop=ALL", "--network=none", "--user=65534", "--interactive")
    entries = (f"--entrypoint={entry}",) if entry else ()
    return podman("run", "--rm", *UNLIMITED, *nothing, *entries, IMAGE, *words, **more)


# --------------------------------------------------------------------------------- what is in it


def test_what_needs_no_kernel_runs_as_any_user(image: Podman) -> None:
    assert once(image, "--version") == f"portranger, version {version('portranger')}\n"
    text = (ROOT / "examples/desktop.yaml").read_text()
    plan = once(image, "plan", "--against", "empty", "-f", "-", stdin=text)
    assert "prerouting   tcp 1000-8000 on eth0" in plan
    assert once(image, "validate", "-f", "-", stdin="kind: VM\n", code=65)


def test_it_is_the_same_however_often_it_is_built(identities: list[str]) -> None:
    assert len(set(identities)) == 1


def test_it_adds_little_to_debian(image: Podman) -> None:
    sizes = [int(image("image", "inspect", "--format={{.Size}}", name)) for name in (IMAGE, BASE)]
    assert sizes[0] - sizes[1] < MOST_ADDED


def test_it_has_nothing_to_build_or_load_anything_with(image: Podman) -> None:
    lookup = f"for name in {' '.join(UNWANTED)}; do command -v $name; done; true"
    assert once(image, "-c", lookup, entry="sh") == ""
    commands = once(image, "-c", "ls /opt/portranger/bin", entry="sh").split()
    assert [name for name in commands if not name.startswith("python")] == ["portranger"]
    assert "No module named pip" in once(image, "-m", "pip", entry="python3", code=1)


def test_it_reads_the_legacy_tables_of_a_node(image: Podman, home: str) -> None:
    rule = ("-p", "tcp", "--dport", "30080", "-j", "DNAT", "--to-destination", "10.0.0.1")
    within(home, "iptables-legacy", "-t", "nat", "-A", "PREROUTING", *rule)
    patch = yaml.safe_load((ROOT / "kubernetes/components/services/daemonset.yaml").read_text())
    [container] = patch["spec"]["template"]["spec"]["containers"]
    allowed = [f"--cap-add={name}" for name in container["securityContext"]["capabilities"]["add"]]
    confined = ("--read-only", "--cap-drop=ALL", "--user=0", f"--network=ns:/run/netns/{home}")
    entry = "--entrypoint=/opt/portranger/bin/python"
    read = (
        "from agent.kernel.translations import translations as found; print(*found().translations)"
    )
    words = ("run", "--rm", *UNLIMITED, *confined, *allowed, entry, IMAGE, "-c", read)
    told = "legacy table ip nat, chain PREROUTING translates tcp 30080"
    assert told in image(*words)


def test_nothing_is_compiled_when_it_starts(image: Podman) -> None:
    """Nothing could be kept of it, so it would be again at every start."""
    python = "/opt/portranger/bin/python -v -c 'import agent.daemon, agent.sources.kubernetes'"
    count = f"{python} 2>&1 | grep -c '^# code object from /.*[.]py$'"
    assert once(image, "-c", count, entry="sh", code=1) == "0\n"
    elsewhere = f"export PYTHONPYCACHEPREFIX=/nowhere; {count}"
    assert int(once(image, "-c", elsewhere, entry="sh")) > 100


# ------------------------------------------------------------------------------- what it can do


class Deployed:
    """A node of ours, on which the pod of rendered manifests is run."""

    def __init__(self, podman: Podman, documents: list[Json], folder: Path, home: str) -> None:
        self.podman, self._folder, self.home = podman, folder, home
        self.spec = next(
            one["spec"]["template"]["spec"] for one in documents if one["kind"] == "DaemonSet"
        )
        self.given: tuple[str, ...] = ()  # what else the kubelet gives to every pod
        self.places = {
            one["name"]: folder / one["name"]
            for one in self.spec["volumes"]
            if one.get("hostPath", {}).get("path") not in NODE_ITSELF
        }
        for place in self.places.values():
            place.mkdir()
        files = {one["metadata"]["name"]: one["data"] for one in documents if "data" in one}
        for one in self.spec["volumes"]:
            for name, text in files.get(one.get("configMap", {}).get("name"), {}).items():
                (self.places[one["name"]] / name).write_text(text)

    def manifest(self, netns: str, ports: str) -> None:
        """Let there be this manifest, and no other."""
        self.places["manifests"].joinpath("desktop.yaml").write_text(manifest(netns, ports))

    @contextmanager
    def running(self, *, without: str = "") -> Iterator[Running]:
        """Without that capability."""
        log = self._folder / "log"
        words = (*options(self.spec, self.places, without=without), *self.given)
        network = f"--network=ns:/run/netns/{self.home}"
        args = self.spec["containers"][0]["args"]
        with self.podman.running(*words, network, IMAGE, *args, log=log) as child:
            manifests = self.places.get("manifests", self._folder)
            yield Running(child, self.home, log, lambda: manifests)


@pytest.fixture
def home() -> Iterator[str]:
    """The network of the agent's pod."""
    with space() as name:
        ip(name, "link set lo up")
        yield name


@contextmanager
def prepared() -> Iterator[str]:
    """A namespace to forward in, with the settings for it."""
    names = ("ipv4.ip_forward", "ipv6.conf.all.forwarding", "ipv4.conf.k6t-eth0.route_localnet")
    with pod() as netns:
        with opened(netns) as descriptor, inside(descriptor, netns):
            for name in names:
                sysctl.write(f"net.{name}", "1")
        yield netns


@pytest.fixture
def blue() -> Iterator[str]:
    with prepared() as netns:
        yield netns


# ------------------------------------------------------------------------------ without KubeVirt


@pytest.fixture
def bare(image: Podman, tmp_path: Path, home: str) -> Deployed:
    return Deployed(image, rendered("kubernetes/overlays/files"), tmp_path, home)


def test_it_forwards_and_repairs_in_named_namespaces(bare: Deployed, blue: str) -> None:
    bare.manifest(blue, "1000-2000")
    with bare.running() as agent:
        assert comes_to_forward(blue, "tcp 1000-2000"), agent.log.read_text()
        nft(blue, "flush ruleset")
        assert agent.says("drift repaired", process="nft"), agent.log.read_text()
        assert agent.get("/readyz")[0] == HTTPStatus.OK
    assert agent.process.poll() == 0
    assert comes_to_forward(blue, "tcp 1000-2000")


def test_a_namespace_that_is_made_later_is_seen(bare: Deployed) -> None:
    with bare.running() as agent:
        assert agent.says("ready"), agent.log.read_text()
        with prepared() as netns:
            bare.manifest(netns, "22")
            assert agent.says("in sync", netns=netns), agent.log.read_text()


def test_it_makes_the_settings_that_forwarding_needs(bare: Deployed) -> None:
    """Although a container has /proc/sys read-only."""
    with pod() as netns:
        bare.manifest(netns, "22")
        with bare.running() as agent:
            assert agent.says("in sync", netns=netns), agent.log.read_text()
        assert within(netns, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"


@pytest.mark.parametrize("capability", ["SYS_ADMIN", "NET_ADMIN", "NET_BROADCAST"])
def test_it_needs_each_of_its_capabilities(bare: Deployed, capability: str) -> None:
    added = bare.spec["containers"][0]["securityContext"]["capabilities"]["add"]
    assert sorted(added) == ["NET_ADMIN", "NET_BROADCAST", "SYS_ADMIN"]
    with bare.running(without=capability) as agent:
        assert agent.process.wait(PATIENCE) == 77
    assert f"CAP_{capability}" in agent.log.read_text()


# --------------------------------------------------------------------------------- with KubeVirt


@pytest.fixture
def account(cluster: Cluster) -> Iterator[str]:
    """The token of the agent's account, which may do what the manifests let it."""
    token = cluster.issue_token("portranger", "portranger")
    cluster.grant("portranger")
    cluster.kubectl("apply", "-f", str(ROOT / "kubernetes/base/rbac.yaml"), "-n", "portranger")
    try:
        yield token
    finally:
        ours = ("-l", "app.kubernetes.io/name=portranger")
        cluster.kubectl("delete", "clusterroles,clusterrolebindings", *ours)


@pytest.fixture
def served(
    image: Podman, cluster: Cluster, account: str, tmp_path: Path, home: str
) -> Iterator[Deployed]:
    """A node whose pods have what the kubelet gives to them."""
    made = Deployed(image, rendered("kubernetes"), tmp_path, home)
    files = {"token": account, "ca.crt": cluster.ca.read_text(), "namespace": "portranger"}
    (tmp_path / "account").mkdir()
    for name, text in files.items():
        (tmp_path / "account" / name).write_text(text)
    server = urlsplit(cluster.server)
    made.given = (
        f"--volume={tmp_path / 'account'}:{SERVICE_ACCOUNT}:ro",
        f"--env=KUBERNETES_SERVICE_HOST={server.hostname}",
        f"--env=KUBERNETES_SERVICE_PORT={server.port}",
    )
    with cluster.reachable_from(home):
        yield made


@contextmanager
def launched(served: Deployed, machines: Machines, made: Json, netns: str) -> Iterator[str]:
    """An instance with its pod, of which this is the UID, in that namespace; its launcher is
    another user's, as KubeVirt's are."""
    serves = machines.make(made)["metadata"]["uid"]
    [uid] = made["status"]["activePods"]
    folder = served.places["pods"] / uid / SOCKETS
    folder.mkdir(parents=True)
    words = served.podman.on_node(sys.executable, "-ISc", LAUNCHERS, ROOM)
    pipe = subprocess.PIPE
    with (
        cgroups() as top,
        subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([[uid, str(folder), netns, "accepts", serves]]) + "\n")
        process.stdin.flush()
        pid = process.stdout.readline().removeprefix(uid).strip()
        group = top / f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        group.mkdir()
        there = f"/sys/fs/cgroup/{group.relative_to(top.parent)}/cgroup.procs"
        run(*served.podman.on_node("sh", "-c", f"echo {pid} >{there}"))
        os.chown(folder / SOCKET, 107, 107)
        (folder / SOCKET).chmod(0o755)
        yield uid
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def machines(cluster: Cluster, namespace: str) -> Machines:
    return Machines(cluster, namespace)


def test_it_serves_the_machines_of_its_node(
    served: Deployed, machines: Machines, blue: str
) -> None:
    made = instance("vm", NODE, "1000-2000")
    with launched(served, machines, made, blue), served.running() as agent:
        assert comes_to_forward(blue, "tcp 1000-2000"), agent.log.read_text()
        assert comes_to_say(machines, "vm", "PortsApplied", "tcp 1000-2000")
        machines.annotate("vm", port_ranges="3000")
        assert comes_to_forward(blue, "tcp 3000")
        nft(blue, "flush ruleset")
        assert agent.says("drift repaired", process="nft"), agent.log.read_text()
        assert agent.get("/readyz")[0] == HTTPStatus.OK
    assert comes_to_forward(blue, "tcp 3000")


@pytest.mark.parametrize("capability", ["SYS_PTRACE", "DAC_OVERRIDE"])
def test_it_needs_what_leads_to_a_pod(
    served: Deployed, machines: Machines, blue: str, capability: str
) -> None:
    made = instance("vm", NODE, "22")
    with (
        launched(served, machines, made, blue) as uid,
        served.running(without=capability) as agent,
    ):
        assert agent.says("failing", netns=f"pod:{uid}"), agent.log.read_text()
    [told] = agent.said("failing", netns=f"pod:{uid}")
    assert f"CAP_{capability}" in told["why"]
    assert comes_to_forward(blue)
