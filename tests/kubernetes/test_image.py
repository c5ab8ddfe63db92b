"""The image is small, the same however often it is built, and serves with what the DaemonSet lets it
have: with less of it, it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.kernel import sysctl
from agent.kernel.netns import inside, opened
from tests.daemon.running import Running, comes_to_forward
from tests.kubernetes import assets
from tests.kubernetes.image import BASE, UNLIMITED, Podman, built_twice, options, podman
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
    assert once(image, "--version") == "portranger, version 0.1.0\n"
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
    there = once(image, "-c", "ls /opt/portranger/bin; python3 -m pip; true", entry="sh")
    assert there.split("\n")[:4] == ["portranger", "python", "python3", "python3.11"]
    assert "No module named pip" in there


def test_nothing_is_compiled_when_it_starts(image: Podman) -> None:
    """Nothing could be kept of it, so it would be again at every start."""
    code = "import sys, agent.daemon, agent.sources.kubernetes, ssl; print(*sys.modules.values())"
    script = f"/opt/portranger/bin/python -v -c '{code}' 2>&1 | grep -c 'could not write\\|wrote'"
    assert once(image, "-c", script, entry="sh", code=1) == "0\n"


# ------------------------------------------------------------------------------- what it can do


class Deployed:
    """A node of ours, on which the pod of an overlay is run."""

    def __init__(self, podman: Podman, documents: list[Json], folder: Path, home: str) -> None:
        self._podman, self._folder, self.home = podman, folder, home
        self.spec = next(
            one["spec"]["template"]["spec"] for one in documents if one["kind"] == "DaemonSet"
        )
        files = {one["metadata"]["name"]: one["data"] for one in documents if "data" in one}
        self.places = {}
        for volume in self.spec["volumes"]:
            self.places[volume["name"]] = folder / volume["name"]
            if "configMap" in volume:
                self._write(volume["name"], files[volume["configMap"]["name"]])
        for own in ("settings", "namespaces"):
            self.places.pop(own, None)

    def _write(self, volume: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            self.places[volume].mkdir(exist_ok=True)
            (self.places[volume] / name).write_text(text)

    def manifest(self, netns: str, ports: str) -> None:
        """Let there be this manifest, and no other."""
        self.places["manifests"].joinpath("desktop.yaml").write_text(manifest(netns, ports))

    @contextmanager
    def running(self, *, without: str = "") -> Iterator[Running]:
        for place in self.places.values():
            place.mkdir(exist_ok=True)
        log = self._folder / "log"
        words = options(self.spec, self.places, without=without)
        [container] = self.spec["containers"]
        network = f"--network=ns:/run/netns/{self.home}"
        with self._podman.running(*words, network, IMAGE, *container["args"], log=log) as child:
            yield Running(child, self.home, log)


@contextmanager
def forwarding(netns: str) -> Iterator[None]:
    """With the settings made already that the agent would have to make."""
    names = ("ipv4.ip_forward", "ipv6.conf.all.forwarding", "ipv4.conf.k6t-eth0.route_localnet")
    with opened(netns) as descriptor, inside(descriptor, netns):
        for name in names:
            sysctl.write(f"net.{name}", "1")
    yield


@pytest.fixture
def home() -> Iterator[str]:
    with space() as name:
        ip(name, "link set lo up")
        yield name


@pytest.fixture
def deployed(image: Podman, tmp_path: Path, home: str) -> Deployed:
    """On a node without KubeVirt."""
    return Deployed(image, rendered("kubernetes/overlays/files"), tmp_path, home)


def test_it_forwards_and_repairs_without_kubevirt(deployed: Deployed) -> None:
    with pod() as netns, forwarding(netns):
        deployed.manifest(netns, "1000-2000")
        with deployed.running() as agent:
            assert agent.says("ready"), agent.log.read_text()
            assert comes_to_forward(netns, "tcp 1000-2000")
            nft(netns, "flush ruleset")
            assert agent.says("drift repaired", process="nft")
            assert agent.get("/readyz")[0] == 200
        assert agent.process.poll() == 0
        assert comes_to_forward(netns, "tcp 1000-2000")


def test_a_namespace_that_comes_later_is_seen(deployed: Deployed) -> None:
    deployed.manifest("later", "22")
    with deployed.running() as agent:
        assert agent.says("ready")
        with pod() as netns, forwarding(netns):
            deployed.manifest(netns, "22")
            assert comes_to_forward(netns, "tcp 22")


def test_it_makes_the_settings_that_forwarding_needs(deployed: Deployed) -> None:
    """Although a container has /proc/sys read-only."""
    with pod() as netns:
        deployed.manifest(netns, "22")
        with deployed.running() as agent:
            assert agent.is_in("in sync", netns), agent.log.read_text()
        assert within(netns, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"


@pytest.mark.parametrize("missing", ["SYS_ADMIN", "NET_ADMIN", "NET_BROADCAST"])
def test_without_one_of_its_capabilities_it_does_not_even_start(
    deployed: Deployed, missing: str
) -> None:
    with deployed.running(without=missing) as agent:
        assert agent.process.wait(PATIENCE) == 77
    assert f"CAP_{missing}" in agent.log.read_text()
