"""Commands that are given the UID of a pod look for it where the daemon's configuration says."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rules.ports import PortRange
from tests.launcher import Node, launcher
from tests.spaces import ROOT, applied, observed, pod, run, vm

DESKTOP = ROOT / "examples" / "desktop.yaml"
UID = str(uuid.uuid4())
# Nobody else sees this /etc.
CONFIGURED = """
set -eu
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" none /etc
mkdir -p /etc/portranger
printf '%s' "$2" >/etc/portranger/portranger.toml
shift 2
exec "$@"
"""

Done = subprocess.CompletedProcess[str]
Ask = Callable[..., Done]


@pytest.fixture(scope="module")
def netns() -> Iterator[str]:
    with pod() as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, netns: str) -> Iterator[Node]:
    """One whose kubelet and processes are elsewhere; it has one pod."""
    made = Node(tmp_path / "node")
    applied(netns, vm("desktop", "1000-2000"))
    with launcher(made, UID, netns):
        yield made


@pytest.fixture
def ask(tmp_path: Path, node: Node) -> Ask:
    """Run a command where the configuration says that; if nothing is given, where the pods are."""
    (tmp_path / "etc").mkdir()
    where = f'[kubernetes]\nkubelet_root = "{node.kubelet_root}"\nproc = "{node.proc}"\n'

    def asked(*words: str | Path, configuration: str = where, code: int = 0) -> Done:
        apart = ("unshare", "--mount", "--propagation=private", "sh", "-c", CONFIGURED, "sh")
        command = (sys.executable, "-m", "agent.entry", *words)
        return run(*apart, tmp_path / "etc", configuration, *command, code=code)

    return asked


def test_every_command_finds_a_pod_where_the_configuration_says(ask: Ask, netns: str) -> None:
    there = ("--netns", f"pod:{UID}")
    [shown] = json.loads(ask("show", *there, "-o", "json").stdout)["namespaces"]
    assert shown["netns"] == f"pod:{UID}"
    assert "goes to 10.0.2.2:1500" in ask("explain", "--live", *there, "tcp/1500").stdout
    assert "1000-2000" in ask("top", *there, "--interval", "0.1").stdout
    for command in (("plan",), ("apply", "--yes")):
        assert f"namespace pod:{UID}" in ask(*command, "-f", DESKTOP, *there).stdout
    assert PortRange(1000, 8000) in {one.rule.ports for one in observed(netns).live}
    ask("clear", "--yes", *there)
    assert observed(netns).live == ()


def test_a_pod_is_not_found_elsewhere(ask: Ask) -> None:
    told = ask("show", "--netns", f"pod:{UID}", configuration="", code=75).stderr
    assert f"nothing runs on this node in pod {UID}" in told


def test_a_bad_configuration_is_told_to_who_needs_it_only(ask: Ask, netns: str) -> None:
    bad = "kubelet_root = 7\n"
    told = ask("show", "--netns", f"pod:{UID}", configuration=bad, code=78).stderr
    assert "/etc/portranger/portranger.toml:1: kubelet_root" in told
    assert netns in ask("show", "--netns", netns, configuration=bad).stdout
