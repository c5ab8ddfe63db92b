"""How what is published on a node ends, and how it does not: with its manifests, or by hand; not
with the daemon, nor for want of something to read."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rules.ports import PortRange
from tests.daemon.publishing import (
    SELF,
    by_hand,
    given,
    owner,
    planned,
    published,
    publishes,
    publishing,
    refuses,
    service,
    wired,
    written,
)
from tests.daemon.running import Node, Running, forwarded, handles
from tests.nodes import Net, vm_manifest
from tests.spaces import nft, run, within

TABLE = "table inet portranger"
BAD = service("a").replace("port: 80", "port: 80000")


@pytest.fixture
def lab() -> Iterator[Net]:
    with wired() as made:
        yield made


@pytest.fixture
def node(lab: Net, tmp_path: Path) -> Iterator[Node]:
    with publishing(lab, tmp_path / "node") as made:
        yield made


def is_clear(netns: str) -> bool:
    return TABLE not in within(netns, "nft", "list", "tables")


# ------------------------------------------------------------------------- a look that takes long

FOREIGN = """
table ip theirs {
    chain pre { type nat hook prerouting priority -100; tcp dport 31000 dnat to 10.0.0.1; }
}
"""


def test_neither_what_is_new_nor_a_stop_waits_for_a_look_at_the_node_that_takes_long(
    node: Node, lab: Net
) -> None:
    nft(lab.node, FOREIGN)
    node.save("a.yaml", service("a", at=30080))
    with node.running() as daemon:
        publishes(daemon, "a")
        [reader] = daemon.workers("foreign_rules_worker")
        os.kill(reader, signal.SIGSTOP)
        nft(lab.node, "add rule ip theirs pre tcp dport 31001 dnat to 10.0.0.1")
        node.save("b.yaml", service("b", 443, at=30443))  # whose port others may translate
        node.save("vm.yaml", vm_manifest(lab.vms[0], "80,443,7000"))
        assert daemon.applied("vm.yaml")
        assert forwarded(lab.vms[0].pod) == {"tcp 80", "tcp 443", "tcp 7000"}
        assert given(lab.node).keys() == {"a"}
        daemon.stop()
    with node.running() as daemon:
        publishes(daemon, "a", "b")


# --------------------------------------------------------------------------------- what is told


def test_the_node_is_outdated_while_the_last_valid_version_of_a_service_is_in_use(
    node: Node, lab: Net
) -> None:
    file = node.save("a.yaml", service("a"))
    with node.running() as daemon:
        publishes(daemon, "a")
        node.save("a.yaml", BAD)
        assert daemon.applied()
        assert daemon.standing(SELF)["state"] == "outdated"
        assert daemon.standing(SELF)["why"] == f"using the last valid version of {file}"
        assert daemon.metric("namespaces", state="outdated") == 1
        node.save("a.yaml", service("a"))
        assert daemon.applied()
        assert daemon.standing(SELF)["state"] == "in sync"


def test_who_waits_for_a_service_is_told_that_it_is_refused(node: Node, lab: Net) -> None:
    node.configure(listen="127.0.0.1:9788")
    file = node.save("a.yaml", service("a", at=30080))
    words = ("-m", "agent.entry", "wait", "-c", node.config, "-f", file)
    with node.running():
        assert "is applied" in run(*entered(node, *words)).stdout
        nft(lab.node, FOREIGN)
        node.save("a.yaml", service("a", 443, at=31000))
        told = run(*entered(node, *words), code=1)
        assert "not published: Service/" in told.stderr
        assert "31000" in told.stderr


def entered(node: Node, *words: str | Path) -> tuple[str | Path, ...]:
    return ("nsenter", f"--net=/run/netns/{node.home}", sys.executable, *words)


# --------------------------------------------------------------------------------------- the end


def test_what_is_published_goes_with_the_last_manifest(node: Node, lab: Net) -> None:
    node.save("a.yaml", service("a"))
    node.save("b.yaml", service("b", 5000, count=5))
    with node.running() as daemon:
        publishes(daemon, "a", "b")
        guest = handles(lab.vms[0].pod)
        node.remove("a.yaml")
        publishes(daemon, "b")
        node.remove("b.yaml")
        assert daemon.applied()
        assert is_clear(lab.node)
        assert not daemon.standing(SELF)
        assert not (node.state / "node-ports.json").exists()
        assert handles(lab.vms[0].pod) == guest
        node.save("a.yaml", service("a"))
        publishes(daemon, "a")
        assert daemon.standing(SELF)["state"] == "in sync"


@pytest.mark.parametrize("end", [Running.stop, Running.kill])
def test_what_is_published_outlives_the_daemon_and_goes_at_its_next_start(
    node: Node, lab: Net, end: Callable[[Running], None]
) -> None:
    node.save("a.yaml", service("a"))
    with node.running() as daemon:
        publishes(daemon, "a")
        before = handles(lab.node)
        end(daemon)
    assert handles(lab.node) == before
    node.remove("a.yaml")
    with node.running() as daemon:
        assert is_clear(lab.node)
        assert not daemon.standing(SELF)
        assert not (node.state / "node-ports.json").exists()


# ------------------------------------------------------------------------- what cannot be read


def forget_nothing(_: Node) -> None:
    """The state is whole."""


def forget_texts(node: Node) -> None:
    """As when the daemon was killed before it could store them."""
    shutil.rmtree(node.state / "last-good")


def forget_everything(node: Node) -> None:
    shutil.rmtree(node.state)


FORGETTING = (forget_nothing, forget_texts, forget_everything)


@pytest.mark.parametrize("forget", FORGETTING)
def test_a_directory_that_cannot_be_read_changes_nothing(
    node: Node, lab: Net, forget: Callable[[Node], None]
) -> None:
    node.save("a.yaml", service("a", 5000, count=5))
    with node.running() as daemon:
        before = publishes(daemon, "a")
        there = handles(lab.node)
    forget(node)
    away = node.manifests.rename(node.folder / "away")
    with node.running() as daemon:
        assert "cannot be read" in daemon.status()["unreadable"]
        daemon.reload()
        assert handles(lab.node) == there
        away.rename(node.manifests)
        assert daemon.shows(lambda status: not status["unreadable"])
        assert daemon.applied()
        assert daemon.standing(SELF)["state"] == "in sync"
        assert handles(lab.node) == there
        assert written(node) == before
        node.remove("a.yaml")
        assert daemon.applied()
        assert is_clear(lab.node)


@pytest.mark.parametrize("forget", FORGETTING)
def test_a_bad_manifest_keeps_what_it_published(
    node: Node, lab: Net, forget: Callable[[Node], None]
) -> None:
    node.save("a.yaml", service("a", at=30100))
    node.save("b.yaml", service("b"))
    with node.running() as daemon:
        before = publishes(daemon, "a", "b")
        there = handles(lab.node)
        node.save("a.yaml", BAD)
        assert daemon.applied()
        assert daemon.status()["problems"]
        assert handles(lab.node) == there
    forget(node)
    with node.running() as daemon:
        assert daemon.status()["problems"]
        assert handles(lab.node) == there
        assert daemon.is_in("outdated" if forget is forget_nothing else "unmanaged", SELF)
        node.save("c.yaml", service("c"))  # others go on
        node.remove("b.yaml")
        # Where nothing tells what was in the bad file, b may have been, too.
        left = ("a", "c") if forget is forget_nothing else ("a", "b", "c")
        after = publishes(daemon, *left)
        assert after["a"] == before["a"]
        node.save("z.yaml", service("z", at=30100))  # nobody gets what is still in use
        reasons = refuses(daemon, "z")
        assert "30100" in reasons["z"]
        assert given(lab.node) == after
        node.save("a.yaml", service("a", at=30101))
        expected = {"a": PortRange(30101, 30101), "c": after["c"], "z": PortRange(30100, 30100)}
        assert published(daemon) == expected
        assert daemon.standing(SELF)["state"] == "in sync"


def test_endpoints_of_an_invalid_manifest_without_a_last_valid_version_stay(
    node: Node, lab: Net
) -> None:
    """As where the state could not be written: nothing tells any more what the file declared."""
    node.save("a.yaml", service("a", 5000, count=5))
    good = (node.manifests / "vm.yaml").read_text()
    with node.running() as daemon:
        publishes(daemon, "a")
    there, inner = handles(lab.node), handles(lab.vms[0].pod)
    shutil.rmtree(node.state / "last-good")
    node.save("vm.yaml", "kind: VirtualMachine\nmetadata: [")
    with node.running() as daemon:
        assert daemon.status()["problems"]
        assert handles(lab.node) == there
        assert handles(lab.vms[0].pod) == inner
        kept = f"{lab.vms[0].address}, {lab.vms[0].address6} kept: an invalid manifest may"
        assert any(kept in note for note in daemon.standing(SELF)["notes"])
        assert daemon.is_in("unmanaged", SELF)
        assert daemon.standing(SELF)["why"] == (
            f"rules of {owner('a')} are left as they are: "
            "no valid manifest declares them or their backends"
        )
        assert daemon.metric("namespaces", state="unmanaged") >= 1
        node.save("b.yaml", service("b", 80))  # nobody knows what is behind it
        node.save("a.yaml", service("a", 5000, count=5, more="sessionAffinity: None"))
        assert daemon.applied()
        assert "nothing is behind it yet" in str(daemon.standing(SELF)["notes"])
        assert handles(lab.node) == there
        node.save("vm.yaml", good)
        publishes(daemon, "a", "b")
        assert daemon.standing(SELF)["state"] == "in sync"
        assert there <= handles(lab.node)
        node.remove("vm.yaml")
        assert not published(daemon)


# ---------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("forget", FORGETTING[1:])
def test_a_node_whose_only_service_is_invalid_and_forgotten_is_unmanaged(
    node: Node, lab: Net, forget: Callable[[Node], None]
) -> None:
    node.save("a.yaml", service("a"))
    with node.running() as daemon:
        publishes(daemon, "a")
        there = handles(lab.node)
    forget(node)
    node.save("a.yaml", BAD)
    with node.running() as daemon:
        # Without any state nothing tells that it is the node's: it is found by its name.
        place = lab.node if forget is forget_everything else SELF
        assert daemon.is_in("unmanaged", place), daemon.status()
        assert "no valid manifest declares them" in daemon.standing(place)["why"]
        assert handles(lab.node) == there
        node.save("a.yaml", service("a"))
        assert daemon.applied()
        assert daemon.standing(SELF)["state"] == "in sync"
        assert handles(lab.node) == there


def test_a_daemon_without_services_leaves_the_node_alone(node: Node, lab: Net) -> None:
    made = node.folder / "by-hand.yaml"
    made.write_text((node.manifests / "vm.yaml").read_text() + service("hand"))
    assert by_hand(lab.node, "apply", "--yes", "-f", made)[0] == 0
    there = handles(lab.node)
    with node.running() as daemon:
        daemon.reload()
        assert handles(lab.node) == there
        assert not daemon.standing(SELF)
        # With one, all of the table is the daemon's, as in any namespace.
        node.save("a.yaml", service("a"))
        publishes(daemon, "a")


def test_what_was_given_by_hand_stays_when_the_daemon_takes_over(node: Node, lab: Net) -> None:
    made = node.folder / "by-hand.yaml"
    machine = (node.manifests / "vm.yaml").read_text()
    made.write_text(machine + service("hand"))
    assert by_hand(lab.node, "apply", "--yes", "-f", made)[0] == 0
    drawn = given(lab.node)["hand"]
    nft(lab.node, "flush ruleset")
    made.write_text(machine + service("x", at=drawn.first))
    assert by_hand(lab.node, "apply", "--yes", "-f", made)[0] == 0
    made.write_text(machine + service("x", at=drawn.first) + service("hand"))
    assert by_hand(lab.node, "apply", "--yes", "-f", made)[0] == 0
    ports = given(lab.node)["hand"]
    assert ports != drawn  # as somebody else had that when it came
    node.save("hand.yaml", service("hand"))
    with node.running():
        assert given(lab.node) == {"hand": ports}


def test_the_node_can_be_shown_and_cleared_by_its_name(node: Node, lab: Net) -> None:
    node.save("a.yaml", service("a", 5000, count=5, at=30100))
    assert by_hand(lab.node, "apply", "--yes", "-f", node.manifests)[0] == 0
    code, said, _ = by_hand(lab.node, "show", "--netns", SELF)
    assert code == 0
    assert f"namespace {SELF} (nftables" in said
    assert "30100-30104" in said
    assert owner("a") in said
    guest = handles(lab.vms[0].pod)
    code, said, _ = by_hand(lab.node, "clear", "--netns", SELF, "--yes")
    assert code == 0
    assert f"Cleared namespace {SELF}" in said
    assert is_clear(lab.node)
    assert handles(lab.vms[0].pod) == guest
    code, said, _ = by_hand(lab.node, "clear", "--netns", SELF, "--yes")
    assert (code, said) == (0, "Nothing to clear.\n")


def test_a_node_without_a_name_is_shown_without_being_named(node: Node) -> None:
    """As a node is: `ip netns` knows nothing of its own namespace."""
    node.save("vm.yaml", ELSEWHERE)
    node.save("a.yaml", service("a", 5000, count=5, at=30100))
    portranger = f"{sys.executable} -m agent.entry"
    script = f"""
        mount -t tmpfs none /run/netns
        ip link add eth0 type bridge && ip link set eth0 up && ip addr add 192.0.2.1/24 dev eth0
        {portranger} apply --yes -f {node.manifests} >&2 || exit 9
        {portranger} show
        {portranger} clear --yes
        {portranger} show
    """
    said = run("unshare", "--net", "--mount", "--propagation=private", "sh", "-c", script).stdout
    shown, cleared, rest = re.split(r"(?m)^(?=namespace|Nothing)", said)[1:]
    assert shown.startswith(f"namespace {SELF} (nftables")
    assert "30100-30104" in shown
    assert f"Cleared namespace {SELF}" in cleared
    assert rest.startswith("Nothing of ours is live.")


ELSEWHERE = """\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: far, annotations: {portranger.io/address: 192.0.2.77}}
spec:
  template:
    metadata: {labels: {app: phone}}
    spec:
      domain: {devices: {interfaces: [{name: red, bridge: {}}]}}
      networks: [{name: red, pod: {}}]
"""


def test_plan_and_apply_agree_on_ports_that_nobody_named(node: Node, lab: Net) -> None:
    node.save("all.yaml", "".join(service(name, 5000, count=7) for name in "abc") + service("s"))
    code, plan = planned(lab.node, node.manifests)
    changes = [one["after"] for one in plan["changes"] if one["netns"] == SELF and one.get("after")]
    wanted = {one["owner"].split("/")[2]: one["ports"] for one in changes if "ports" in one}
    assert code == 0
    assert wanted.keys() == set("abcs")
    assert by_hand(lab.node, "apply", "--yes", "-f", node.manifests)[0] == 0
    assert {name: str(ports) for name, ports in given(lab.node).items()} == wanted
    there = handles(lab.node)
    code, said, _ = by_hand(lab.node, "apply", "--yes", "-f", node.manifests)
    assert code == 0
    assert "No changes." in said
    assert handles(lab.node) == there
    code, said, _ = by_hand(lab.node, "plan", "-f", node.manifests, "--detailed-exitcode")
    assert code == 0
    with node.running():  # and the daemon agrees
        assert handles(lab.node) == there


def test_a_plan_against_nothing_needs_nothing(node: Node, lab: Net) -> None:
    services = service("a", 5000, count=7) + service("s", at=30100) + service("t", at=30100)
    words = (*AS_NOBODY, "plan", "--against", "empty", "-f", "-", "-o", "json")
    done = run(*words, stdin=services + ELSEWHERE, code=1)
    assert "Service/default/t/p is refused" in done.stderr
    assert "held by Service/default/s" in done.stderr
    rules = [one["after"] for one in json.loads(done.stdout)["changes"] if one["netns"] == SELF]
    found = {one["owner"].split("/")[2]: one["ports"] for one in rules if one and "ports" in one}
    assert found.keys() == {"a", "s"}
    node.save("vm.yaml", ELSEWHERE)
    node.save("all.yaml", services)
    assert by_hand(lab.node, "apply", "--yes", "-f", node.manifests)[0] == 1
    assert {name: str(ports) for name, ports in given(lab.node).items()} == found


AS_NOBODY = (
    *("unshare", "--net"),
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"),
    *(sys.executable, "-m", "agent.entry"),
)
