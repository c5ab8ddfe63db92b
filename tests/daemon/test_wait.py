"""`portranger wait`: what was written is in the kernel, and its flows are flushed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.kernel.conntrack import NETLINK_NETFILTER
from agent.kernel.lab import GUEST, POD
from agent.kernel.netns import inside, opened
from tests.daemon.running import PATIENCE, Node, forwarded
from tests.daemon.test_namespaces import bound
from tests.netns.test_forgetting import fill, tracked
from tests.spaces import ROOT, ip, manifest, nft, run, unused_name

MANY = 20_000  # flows, whose flushing takes a good part of a second
DONE, FAILED, USAGE, BAD, LATE = 0, 1, 64, 65, 75


@pytest.fixture
def node(node: Node) -> Node:
    """Its daemon listens where the command finds it; the namespace is its own."""
    node.configure(listen="127.0.0.1:9788")
    return node


def command(node: Node, *words: str | Path) -> tuple[str | Path, ...]:
    entry = (sys.executable, "-m", "agent.entry", "wait", "-c", node.config)
    return ("nsenter", f"--net=/run/netns/{node.home}", *entry, *words)


def wait(node: Node, *words: str | Path, code: int = DONE) -> subprocess.CompletedProcess[str]:
    return run(*command(node, *words), code=code)


def test_what_a_file_says_is_in_the_kernel_when_the_wait_returns(node: Node, blue: str) -> None:
    with node.running() as daemon:
        for ports in ("22", "22,80", "443", "1000-2000"):
            file = node.save("a.yaml", manifest(blue, ports))
            done = wait(node, "-f", file)
            assert forwarded(blue) == {f"tcp {one}" for one in ports.split(",")}
            applied = daemon.status()["revision"]["applied"]
            assert done.stdout == f"Revision {applied} is applied; namespaces: 1 in sync.\n"
            assert done.stderr == ""


def test_flows_of_closed_ports_are_flushed_when_the_wait_returns(node: Node, blue: str) -> None:
    file = node.save("a.yaml", manifest(blue, "1000-2000,7000-7010"))
    with (
        node.running(),
        opened(blue) as descriptor,
        inside(descriptor, blue),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink,
    ):
        fill(netlink, MANY, 7000, to=POD[0].ip, answerer=GUEST[0].ip)
        node.save("a.yaml", manifest(blue, "1000-2000"))
        wait(node, "-f", file)
        assert tracked() < MANY // 100


def test_a_removed_manifest_is_waited_for_by_its_directory(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running():
        node.remove("a.yaml")
        wait(node, "-f", node.manifests)
        assert forwarded(blue) == set()


def test_a_copy_of_the_file_will_do(node: Node, blue: str, tmp_path: Path) -> None:
    copy = tmp_path / "a.yaml"
    copy.write_text(manifest(blue, "22"))
    with node.running():
        node.save("a.yaml", copy.read_text())
        wait(node, "-f", copy)
        assert forwarded(blue) == {"tcp 22"}


def test_a_file_that_is_not_there_yet_is_waited_for(node: Node, blue: str, tmp_path: Path) -> None:
    copy = tmp_path / "a.yaml"
    copy.write_text(manifest(blue, "22"))
    with node.running():
        waiting = subprocess.Popen(
            [str(word) for word in command(node, "-f", copy)], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        try:
            node.save("a.yaml", copy.read_text())
            assert waiting.wait(PATIENCE) == DONE
        finally:
            waiting.kill()
        assert forwarded(blue) == {"tcp 22"}


def test_who_waits_in_vain_is_told_what_is_missing_and_why(
    node: Node, blue: str, tmp_path: Path
) -> None:
    nowhere = unused_name()
    file = node.save("a.yaml", manifest(nowhere, "22"))
    other = node.save("b.yaml", manifest(blue, "22", "two"))
    with node.running():
        late = wait(node, "-f", file, "--timeout", "0.2", code=LATE)
        assert late.stderr.startswith(
            f"portranger: not applied after 0.2 s: namespace {nowhere} is pending: "
        )
        wait(node, "-f", other)
        wait(node)  # a namespace that does not exist holds nothing that is wrong
        changed = tmp_path / "b.yaml"
        changed.write_text(manifest(blue, "23", "two"))
        late = wait(node, "-f", changed, "--timeout", "0", code=LATE)
        assert late.stderr == (
            "portranger: not applied yet: the daemon has read another version of b.yaml.\n"
        )


def test_a_manifest_that_is_rejected_is_not_waited_for(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running():
        file = node.save("a.yaml", manifest(blue, "22").replace("start: 22", "start: 70000"))
        bad = wait(node, "-f", file, code=BAD)
        assert f"{file}:" in bad.stderr
        assert "70000" in bad.stderr
        assert bad.stdout == ""


def test_a_revision_of_an_earlier_run_is_applied_once_a_later_one_is(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        earlier = daemon.status()["revision"]["wanted"]
        wait(node, "--revision", str(earlier))
    nft(blue, "flush ruleset")
    with node.running() as daemon:
        wait(node, "--revision", str(earlier))
        assert forwarded(blue) == {"tcp 22"}
        later = daemon.status()["revision"]["wanted"]
        assert later > earlier
        late = wait(node, "--revision", str(later + 1), "--timeout", "0", code=LATE)
        assert f"revision {later + 1} is not taken yet" in late.stderr


def test_a_failing_namespace_holds_up_its_own_files_and_the_revision_but_no_others(
    node: Node, blue: str, red: str
) -> None:
    """Two names of one namespace: the second one fails."""
    good = node.save("good.yaml", manifest(red, "22", "good"))
    node.save("one.yaml", manifest(blue, "22", "one"))
    alias = Path("/run/netns", unused_name())
    with bound(blue, alias), node.running() as daemon:
        twin = node.save("two.yaml", manifest(alias.name, "23", "two"))
        assert daemon.is_in("failing", alias.name)
        wait(node, "-f", good)
        for words in ((), ("-f", twin)):
            late = wait(node, *words, "--timeout", "0", code=LATE)
            assert f"namespace {alias.name}: failing: " in late.stderr
        revision = daemon.status()["revision"]
        assert {one["netns"] for one in revision["unapplied"]} == {alias.name}
        assert revision["applied"] != revision["wanted"]
        node.remove(twin.name)
        assert daemon.applied()
        wait(node)


def test_a_daemon_that_does_not_run_is_not_waited_for(node: Node) -> None:
    late = wait(node, code=LATE)
    assert "does not answer at 127.0.0.1:9788" in late.stderr


def test_a_wait_that_makes_no_sense_is_refused(node: Node, tmp_path: Path) -> None:
    assert "Give either" in wait(node, "-f", tmp_path, "--revision", "1", code=USAGE).stderr
    assert "standard input" in wait(node, "-f", "-", code=USAGE).stderr
    assert "cannot be read" in wait(node, "-f", tmp_path / "none.yaml", code=BAD).stderr


def test_the_applied_revision_is_a_metric(node: Node, blue: str) -> None:
    with node.running() as daemon:
        node.save("a.yaml", manifest(blue, "22"))
        assert daemon.applied()
        revision = daemon.status()["revision"]
        assert revision["wanted"] == revision["applied"]
        assert daemon.metric("revision_applied") == revision["applied"]
        assert daemon.metric("revision_wanted") == revision["wanted"]


def test_a_namespace_that_is_made_anew_is_waited_for(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        run("ip", "netns", "del", blue)
        assert daemon.is_in("pending", blue)
        wait(node)
        run("ip", "netns", "add", blue)
        ip(blue, "link set lo up")
        late = wait(node, "-f", node.manifests, "--timeout", "0", code=LATE)
        assert f"namespace {blue}" in late.stderr
