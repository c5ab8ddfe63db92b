"""Pods: found by the launcher's socket or by their processes; and nothing that a pod's user can
put in the way leads into another namespace."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.errors import Failure, NoNamespace, NotPermitted
from agent.kernel import aside
from agent.kernel import pods as module
from agent.kernel.aside import Unreadable
from agent.kernel.pods import Pods, Tampered
from agent.kernel.processes import instance_of, pod_of
from tests.launcher import HOME, NEW, Node, cgroup_of, cgroups, launcher, launchers, really_in
from tests.spaces import eventually, home, ip, run, space, within

RED, BLUE = "0f5a3c1e-7b6d-4e2f-9a8b-1c2d3e4f5a6b", "a1b2c3d4-0000-4111-8222-333344445555"
MINE, THEIRS = "5eed0001-0000-4111-8222-333344445555", "5eed0002-0000-4111-8222-333344445555"
NOWHERE = "0::/system.slice/containerd.service\n"


@pytest.fixture(scope="module")
def spaces() -> Iterator[tuple[str, str]]:
    with space() as red, space() as blue:
        yield red, blue


@pytest.fixture
def red(spaces: tuple[str, str]) -> str:
    return spaces[0]


@pytest.fixture
def blue(spaces: tuple[str, str]) -> str:
    return spaces[1]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before, count = home(), descriptors()
    yield
    assert home() == before
    assert descriptors() == count


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def number(netns: str) -> tuple[int, int]:
    path = Path("/run/netns", netns) if netns else Path("/proc/self/ns/net")
    return path.stat().st_dev, path.stat().st_ino


def look(node: Node, instance: str = "") -> Pods:
    """As an agent that has just started, to which that instance was said to be the first pod's."""
    pods = Pods(node.kubelet_root, node.proc)
    pods.instances = {RED: instance} if instance else {}
    return pods


def entered(pods: Pods, uid: str = RED) -> tuple[int, int]:
    with pods.opened(uid) as descriptor:
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino


def assert_refused(pods: Pods, uid: str = RED, why: str = "") -> None:
    """Also when it is asked again, and also by whoever only wants to know."""
    for _ in range(2):
        assert pods.identity(uid) is None
        with pytest.raises(Tampered, match=why):
            entered(pods, uid)


def assert_pending(pods: Pods, uid: str = RED) -> None:
    assert pods.identity(uid) is None
    with pytest.raises(NoNamespace, match=uid) as failure:
        entered(pods, uid)
    assert failure.value.exit_code == 75


# ------------------------------------------------------------------------------ the first way


def test_a_pod_is_found_by_the_socket_of_its_launcher(node: Node, red: str, blue: str) -> None:
    with launcher(node, RED, red), launcher(node, BLUE, blue):
        pods = look(node)
        assert pods.identity(RED) == entered(pods) == pods.identity(RED) == number(red)
        assert entered(pods, BLUE) == pods.identity(BLUE) == number(blue)


def test_the_folder_is_where_the_socket_appears(node: Node, red: str) -> None:
    folder = Path(look(node).folder(RED))
    with launcher(node, RED, red) as one:
        assert one.socket.parent == folder
        assert one.socket.is_socket()


def test_a_pod_is_pending_until_its_launcher_listens(node: Node, red: str) -> None:
    pods = look(node)
    assert_pending(pods)
    node.sockets(RED).parents[2].mkdir(parents=True)
    assert_pending(pods)
    node.sockets(RED).mkdir(parents=True)
    assert_pending(pods)
    with launcher(node, RED, red):
        assert entered(pods) == number(red)


def test_a_launcher_that_dies_leaves_nothing_and_the_next_is_found(
    node: Node, red: str, blue: str
) -> None:
    pods = look(node)
    with launcher(node, RED, red) as one:
        assert pods.identity(RED) == number(red)
        one.kill()
        assert one.socket.is_socket()
        assert_pending(pods)
    with launcher(node, RED, blue):
        assert pods.identity(RED) == entered(pods) == number(blue)


def test_a_launcher_that_goes_to_another_namespace_is_followed(node: Node, red: str) -> None:
    """As far as may be: `ns` of another process stands for it."""
    pods = look(node)
    with launcher(node, RED, red) as one, launcher(node, BLUE, NEW) as other:
        assert pods.identity(RED) == number(red)
        repoint(node, one.pid, "ns", f"/proc/{other.pid}/ns")
        assert pods.identity(RED) == entered(pods) == entered(pods, BLUE)
        repoint(node, one.pid, "ns", f"/proc/{os.getpid()}/ns")
        assert_refused(pods, why="the node's own")


def test_who_listens_from_a_namespace_that_is_not_the_pods_is_refused(
    node: Node, red: str, blue: str
) -> None:
    """A process of the pod can make a namespace, and a socket; it cannot be the first there."""
    with launcher(node, BLUE, red, does="nothing", cgroup=cgroup_of(RED)) as first:
        younger_than(first.pid)
        with launcher(node, RED, blue):
            assert_refused(look(node), why="is not in its namespace")
        pods = look(node)
        with launcher(node, RED, red):
            assert entered(pods) == number(red)


def test_a_launcher_that_is_too_busy_to_answer_is_not_waited_for(node: Node, red: str) -> None:
    with launcher(node, RED, red, does="listens"), ExitStack() as stack:
        fill(node, RED, stack)
        began = time.monotonic()
        assert entered(look(node)) == number(red)
        assert time.monotonic() - began < 5


def fill(node: Node, uid: str, stack: ExitStack) -> None:
    """Connect until the launcher's queue is full."""
    place = os.open(node.sockets(uid), os.O_PATH | os.O_DIRECTORY)
    stack.callback(os.close, place)
    for _ in range(100):
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.setblocking(False)
        try:
            client.connect(f"/proc/self/fd/{place}/launcher-sock")
        except BlockingIOError:
            return
    pytest.fail("the queue has no end")


# -------------------------------------------------------------------------------- tampering


def test_a_link_to_the_socket_of_another_pod_is_not_followed(
    node: Node, red: str, blue: str
) -> None:
    with launcher(node, RED, red) as one, launcher(node, BLUE, blue) as other:
        one.socket.unlink()
        one.socket.symlink_to(other.socket)
        assert_refused(look(node), why="is no socket")
        assert look(node).identity(BLUE) == number(blue)


@pytest.mark.parametrize("depth", range(4))
def test_a_link_on_the_way_to_the_socket_is_not_followed(
    node: Node, red: str, blue: str, depth: int
) -> None:
    with launcher(node, RED, red) as one, launcher(node, BLUE, blue) as other:
        step, elsewhere = one.socket.parents[depth], other.socket.parents[depth]
        step.rename(step.with_name("aside"))
        step.symlink_to(elsewhere)
        assert_refused(look(node), why=f"{step.name} is no directory")
        step.unlink()
        step.with_name("aside").rename(step)
        assert entered(look(node)) == number(red)


def test_a_link_to_its_own_socket_is_not_followed_either(node: Node, red: str) -> None:
    with launcher(node, RED, red) as one:
        aside = one.socket.rename(one.socket.with_name("aside"))
        one.socket.symlink_to(aside)
        assert_refused(look(node), why="is no socket")
        one.socket.unlink()
        aside.unlink()


def make_file(path: Path) -> None:
    path.write_text("")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_file, make_loop, os.mkfifo, Path.mkdir])
def test_what_is_no_socket_is_refused_and_not_opened(
    node: Node, make: Callable[[Path], None]
) -> None:
    node.sockets(RED).mkdir(parents=True)
    make(node.sockets(RED) / "launcher-sock")
    assert_refused(look(node), why="is no socket")


def test_a_socket_of_another_type_is_refused(node: Node, red: str) -> None:
    with launcher(node, RED, red, does="datagrams"):
        assert_refused(look(node), why="cannot be connected to")


@pytest.mark.parametrize(
    ("cgroup", "whose"),
    [
        (cgroup_of(BLUE), f"of pod {BLUE}"),
        (NOWHERE, "of no pod"),
        ("", "of no pod"),
        (cgroup_of(BLUE).strip() + f"/kubepods-pod{RED.replace('-', '_')}.slice\n", f"pod {BLUE}"),
        (f"0::/kubepods/burstable/pod{BLUE}/x/kubepods/burstable/pod{RED}/y\n", f"pod {BLUE}"),
        (f"5:memory:/kubepods/pod{RED}/x\n4:pids:/kubepods/pod{BLUE}/x\n", "of no pod"),
    ],
    ids=["another pod", "no pod", "nothing", "nested", "nested without systemd", "in two pods"],
)
def test_a_socket_that_another_process_listens_on_is_refused(
    node: Node, blue: str, cgroup: str, whose: str
) -> None:
    with launcher(node, RED, blue, cgroup=cgroup):
        assert_refused(look(node), why=whose)


def test_the_socket_of_another_pod_under_our_name_is_refused(
    node: Node, red: str, blue: str
) -> None:
    """A hard link, as could be made within one file system."""
    with launcher(node, RED, red) as one, launcher(node, BLUE, blue) as other:
        one.socket.unlink()
        one.socket.hardlink_to(other.socket)
        assert_refused(look(node), why=f"of pod {BLUE}")


def test_the_namespace_of_the_node_is_never_entered(node: Node) -> None:
    with launcher(node, RED, HOME):
        assert_refused(look(node), why="the node's own network namespace")


def test_neither_is_our_own_where_that_is_another(tmp_path: Path, red: str, blue: str) -> None:
    node = Node(tmp_path, red)
    with launcher(node, RED, red), launcher(node, BLUE, HOME):
        pods = look(node)
        assert_refused(pods, RED, "the node's own")
        assert_refused(pods, BLUE, "the node's own")
    with launcher(node, RED, blue):
        assert entered(pods) == number(blue)


def test_without_knowing_the_namespace_of_the_node_none_is_entered(node: Node, red: str) -> None:
    (node.place(1) / "ns/net").unlink()
    with launcher(node, RED, red):
        pods = look(node)
        assert pods.identity(RED) is None
        with pytest.raises(Failure, match="process 1"):
            entered(pods)


@pytest.mark.parametrize(
    "uid",
    [
        "",
        ".",
        "..",
        f"../pods/{RED}",
        f"{RED}/../{RED}",
        f"./{RED}",
        f"{RED}/",
        f"{RED}\n",
        f"{RED}\0",
        RED.upper(),
        RED[:-1],
        RED + "0",
        "-" * 36,
        RED.replace("-", "_"),
        "x" * 100_000,
    ],
)
def test_what_is_no_uid_is_refused_before_any_path_is_touched(
    node: Node, red: str, uid: str
) -> None:
    with launcher(node, RED, red):
        pods = Pods("/dev/null/nowhere", node.proc)
        assert_refused(pods, uid, "not the UID of a pod")
        with pytest.raises(Tampered) as failure:
            pods.folder(uid)
        assert len(str(failure.value)) < 200
        assert str(failure.value).isprintable()
        assert pods.resources(uid) == {}


# ------------------------------------------------------------------------------- whose pod it is


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_a_pod_is_entered_for_the_instance_that_its_launcher_was_started_for(
    node: Node, red: str, does: str
) -> None:
    """Also where it does not listen yet, as that of a migration's target."""
    with launcher(node, RED, red, does=does, instance=MINE):
        pods = look(node, MINE)
        assert pods.identity(RED) == entered(pods) == pods.identity(RED) == number(red)
        assert pods.serves(RED) == MINE
        assert_refused(look(node, THEIRS), why=f"by instance {THEIRS}, and serves '{MINE}'")


def test_a_pod_that_is_no_launchers_is_entered_for_no_instance(node: Node, red: str) -> None:
    """A database, say: whoever may write an instance may name it in there."""
    with launcher(node, RED, red, does="nothing"):
        assert_pending(look(node, MINE))
        assert look(node).serves(RED) == ""
        assert entered(look(node)) == number(red)  # for root, who need not name one


@pytest.mark.parametrize("how", ["it listens", "its bridge is there"])
def test_a_launcher_that_does_not_tell_whose_it_is_is_known_by_what_it_does(
    node: Node, how: str
) -> None:
    """Until one of the pod tells."""
    clock = Clock()
    pods = Pods(node.kubelet_root, node.proc, clock=clock)
    pods.instances = {RED: THEIRS}
    does = {"it listens": "accepts", "its bridge is there": "nothing"}[how]
    with space() as own, launcher(node, RED, own, does=does):
        if does == "nothing":
            assert_pending(pods)
            ip(own, "link add k6t-net1 type bridge")
        assert pods.identity(RED) == entered(pods) == number(own)
        with launcher(node, str(uuid.uuid4()), own, cgroup=cgroup_of(RED), instance=MINE):
            clock.now += module.SCAN_LASTS
            assert_refused(pods, why=f"and serves '{MINE}'")


def test_a_launcher_that_does_not_listen_is_found_beside_the_elder_processes_of_its_pod(
    node: Node, red: str
) -> None:
    clock = Clock()
    owner, thief = (Pods(node.kubelet_root, node.proc, clock=clock) for _ in range(2))
    owner.instances, thief.instances = {RED: MINE}, {RED: THEIRS}
    with launcher(node, BLUE, red, does="nothing", cgroup=cgroup_of(RED)) as pause:
        assert_pending(owner)
        assert_pending(thief)
        younger_than(pause.pid)
        with launcher(node, RED, red, does="nothing", instance=MINE) as one:
            clock.now += module.SCAN_LASTS
            assert owner.identity(RED) == entered(owner) == number(red)
            assert owner.serves(RED) == thief.serves(RED) == MINE
            assert_refused(thief, why=f"and serves '{MINE}'")
            younger_than(one.pid)
            with launcher(node, str(uuid.uuid4()), red, cgroup=cgroup_of(RED), instance=THEIRS):
                clock.now += module.SCAN_LASTS
                assert_refused(thief, why=f"and serves '{MINE}'")


def test_what_was_found_for_one_instance_is_not_found_for_another(node: Node, red: str) -> None:
    pods = look(node, MINE)
    with launcher(node, RED, red, instance=MINE):
        assert entered(pods) == number(red)
        pods.instances = {RED: THEIRS}
        assert_refused(pods, why=f"and serves '{MINE}'")
        pods.instances = {}  # nobody's any more: it is cleared
        assert entered(pods) == number(red)
        pods.instances = {RED: THEIRS}
        assert_refused(pods, why=f"and serves '{MINE}'")
        pods.instances = {RED: MINE}
        assert pods.identity(RED) == entered(pods) == number(red)


def test_a_launcher_of_another_pod_does_not_speak_for_this_one(
    node: Node, red: str, blue: str
) -> None:
    with launcher(node, RED, red) as one, launcher(node, BLUE, blue, instance=MINE) as other:
        one.socket.unlink()
        one.socket.hardlink_to(other.socket)
        assert look(node).serves(RED) == ""
        assert_refused(look(node, MINE), why=f"of pod {BLUE}")


def test_who_is_known_to_serve_is_not_asked_again(node: Node, red: str) -> None:
    with launcher(node, RED, red, does="nothing", instance=MINE) as one:
        pods = look(node, MINE)
        assert entered(pods) == number(red)
        (node.place(one.pid) / "cmdline").unlink()
        assert pods.identity(RED) == entered(pods) == number(red)
        assert_pending(look(node, MINE))


LONG = 10.0  # seconds that no agent would wait


@contextmanager
def unreadable(node: Node, pid: int, name: str) -> Iterator[None]:
    """Whoever reads that file of the process waits, as where a page of it is in a file whose server
    does not answer; but not so long that a test would never end."""
    path, over = node.place(pid) / name, threading.Event()
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)

    def hold() -> None:
        over.wait(LONG)
        path.unlink()
        path.symlink_to(f"/proc/{pid}/{name}")
        os.close(writer)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()
        assert eventually(lambda: not readers())


def readers() -> int:
    return sum(thread.name == "aside" for thread in threading.enumerate())


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_a_process_that_does_not_let_itself_be_asked_holds_up_nobody_and_lets_nobody_in(
    node: Node, red: str, blue: str, does: str
) -> None:
    """Not even where it listens as a launcher does: it may be that of another instance."""
    clock = Clock()
    pods = Pods(node.kubelet_root, node.proc, clock=clock)
    pods.instances = {RED: MINE, BLUE: THEIRS}
    with (
        launcher(node, RED, red, does=does, instance=MINE) as one,
        launcher(node, BLUE, blue, instance=THEIRS),
    ):
        with unreadable(node, one.pid, "cmdline"):
            began = time.monotonic()
            for _ in range(5):
                assert pods.identity(RED) is None
                assert pods.serves(RED) == ""
                with pytest.raises(Unreadable, match=RED):
                    entered(pods)
            assert time.monotonic() - began < LONG
            assert readers() == 1
            assert eventually(lambda: pods.identity(BLUE) == number(blue))
            clock.now += aside.GRUDGE
            assert pods.identity(RED) is None
            assert readers() == 1
        assert pods.identity(RED) == entered(pods) == number(red)


def test_who_is_known_is_served_on_although_nobody_can_be_asked(node: Node, red: str) -> None:
    with launcher(node, RED, red, instance=MINE) as one:
        pods = look(node, MINE)
        assert entered(pods) == number(red)
        with unreadable(node, one.pid, "cmdline"):
            assert pods.identity(RED) == entered(pods) == number(red)


def test_an_environment_that_cannot_be_read_tells_nothing_and_holds_up_nobody(
    node: Node, red: str
) -> None:
    pods = look(node)
    with (
        launcher(node, BLUE, red, environment=ENVIRONMENT),
        launcher(node, RED, red) as one,
        unreadable(node, one.pid, "environ"),
    ):
        began = time.monotonic()
        assert pods.resources(RED) == {}
        assert time.monotonic() - began < LONG
        assert eventually(lambda: pods.resources(BLUE) == BACKING)


LAUNCHED = ["/usr/bin/virt-launcher-monitor", "--qemu-timeout", "5m", "--name", "vm", "--uid", MINE]


@pytest.mark.parametrize(
    ("words", "instance"),
    [
        ([*LAUNCHED, "--namespace", "default"], MINE),
        (["/usr/bin/virt-launcher", *LAUNCHED[1:]], MINE),
        (["/usr/bin/tini", "--", *LAUNCHED], MINE),
        (["virt-launcher", f"--uid={MINE}"], MINE),
        ([], ""),
        (LAUNCHED[:1], ""),
        (LAUNCHED[:-2], ""),
        (["/usr/bin/backup", *LAUNCHED[1:]], ""),
        (["/usr/bin/virt-launcher-backup", *LAUNCHED[1:]], ""),
        (["/usr/bin/backup", "--uid", MINE, "virt-launcher"], ""),
        (["virt-launcher", "--name", f"--uid-{MINE}"], ""),
    ],
)
def test_the_instance_of_a_process_is_what_a_launcher_was_told(
    words: list[str], instance: str
) -> None:
    assert instance_of("".join(f"{word}\0" for word in words).encode()) == instance


# ------------------------------------------------------------------- numbers that are given again


def repoint(node: Node, pid: int, name: str, target: str) -> None:
    path = node.place(pid) / name
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def test_a_process_with_the_number_of_one_that_died_is_not_taken_for_it(
    node: Node, red: str, blue: str
) -> None:
    """It is in the same namespace, so only the time of its start and its cgroup tell."""
    with launcher(node, RED, red) as one, launcher(node, BLUE, red) as other:
        pods = look(node)
        assert pods.identity(RED) == number(red)
        one.kill()
        for name in ("stat", "ns"):
            repoint(node, one.pid, name, f"/proc/{other.pid}/{name}")
        (node.place(one.pid) / "cgroup").write_text(cgroup_of(BLUE))
        stat_of_another = Path(f"/proc/{other.pid}/stat").read_text().split()
        stat_of_another[21] = str(int(stat_of_another[21]) + 1)
        (node.place(one.pid) / "stat").unlink()
        (node.place(one.pid) / "stat").write_text(" ".join(stat_of_another))
        one.socket.unlink()
        with launcher(node, RED, blue):
            assert entered(pods) == pods.identity(RED) == number(blue)
        assert_pending(pods)


def test_a_process_whose_start_alone_differs_is_verified_anew(node: Node, red: str) -> None:
    with launcher(node, RED, red) as one:
        pods = look(node)
        assert pods.identity(RED) == number(red)
        stat = Path(f"/proc/{one.pid}/stat").read_text()
        comm, rest = f"(a) {'b ' * 40}\n)", stat[stat.rindex(")") + 2 :].split()
        rest[19] = "7"
        (node.place(one.pid) / "stat").unlink()
        (node.place(one.pid) / "stat").write_text(f"{one.pid} {comm} {' '.join(rest)}\n")
        (node.place(one.pid) / "cgroup").write_text(NOWHERE)
        assert_refused(pods, why="of no pod")
        (node.place(one.pid) / "cgroup").write_text(cgroup_of(RED))
        assert pods.identity(RED) == entered(pods) == pods.identity(RED) == number(red)


def test_what_is_opened_is_proven_each_time(node: Node, red: str) -> None:
    with launcher(node, RED, red) as one:
        pods = look(node)
        assert entered(pods) == number(red)
        (node.place(one.pid) / "cgroup").write_text(cgroup_of(BLUE))
        with pytest.raises(Tampered, match=f"of pod {BLUE}"):
            entered(pods)


# ----------------------------------------------------------------------------- the second way


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("does", ["nothing", "binds"])
def test_a_pod_without_a_listener_is_found_by_its_processes(
    node: Node, red: str, blue: str, does: str
) -> None:
    with launcher(node, RED, red, does=does), launcher(node, BLUE, blue, does=does):
        pods = look(node)
        assert pods.identity(RED) == entered(pods) == number(red)
        assert pods.identity(BLUE) == entered(pods, BLUE) == number(blue)


def test_a_pod_is_found_by_its_processes_where_there_is_no_folder_of_it(
    node: Node, red: str
) -> None:
    with launcher(node, RED, red, does="nothing"):
        assert entered(Pods("/nowhere/at/all", node.proc)) == number(red)


def test_a_launcher_that_cannot_be_seen_leaves_it_to_the_other_processes(
    node: Node, red: str, blue: str
) -> None:
    """As when it has died, and a child of it holds the socket."""
    with launcher(node, RED, red) as one:
        node.dismiss(one.pid)
        assert_pending(look(node))
        with launcher(node, BLUE, blue, does="nothing", cgroup=cgroup_of(RED)):
            assert entered(look(node)) == number(blue)


def test_a_process_that_was_found_and_then_leaves_is_not_followed(
    node: Node, red: str, blue: str
) -> None:
    pods = look(node)
    with launcher(node, BLUE, red, does="nothing", cgroup=cgroup_of(RED)) as first:
        assert entered(pods) == number(red)
        with launcher(node, RED, red):
            (node.place(first.pid) / "ns").unlink()
            (node.place(first.pid) / "ns").mkdir()
            repoint(node, first.pid, "ns/net", f"/run/netns/{blue}")
            assert_refused(pods, why="is not in its namespace")


def test_of_its_processes_the_eldest_outside_the_namespace_of_the_node_tells(
    node: Node, red: str, blue: str
) -> None:
    """Before it is what the runtime keeps in the pod's cgroup, after it what left for elsewhere."""
    with ExitStack() as stack:
        others = [str(uuid.uuid4()) for _ in range(3)]
        netns = (HOME, red, blue, HOME)
        for uid, where in zip((others[0], RED, *others[1:]), netns, strict=True):
            one = stack.enter_context(
                launcher(node, uid, where, does="nothing", cgroup=cgroup_of(RED))
            )
            younger_than(one.pid)
        pods = look(node)
        assert pods.identity(RED) == entered(pods) == number(red)
        assert all(pods.identity(uid) is None for uid in others)


def younger_than(pid: int) -> None:
    """Wait until whoever is started now starts later, as the kernel counts."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19])
    boot = time.CLOCK_BOOTTIME
    hertz = os.sysconf("SC_CLK_TCK")
    assert eventually(lambda: time.clock_gettime(boot) * hertz > ticks + 1)


def test_a_pod_with_processes_in_the_namespace_of_the_node_only_is_pending(node: Node) -> None:
    with launcher(node, RED, HOME, does="nothing"):
        assert_pending(look(node))


def test_a_cgroup_that_another_pod_made_in_our_name_does_not_count(node: Node, blue: str) -> None:
    nested = cgroup_of(BLUE).strip() + f"/kubepods-pod{RED.replace('-', '_')}.slice\n"
    with launcher(node, BLUE, blue, does="nothing", cgroup=nested):
        pods = look(node)
        assert_pending(pods, RED)
        assert entered(pods, BLUE) == number(blue)


def test_one_scan_serves_all_who_wait_and_lasts_a_moment(node: Node, red: str) -> None:
    clock = Clock()
    pods = Pods(node.kubelet_root, node.proc, clock=clock)
    assert_pending(pods)
    with launcher(node, RED, red, does="nothing"):
        assert_pending(pods)
        clock.now += module.SCAN_LASTS
        assert entered(pods) == number(red)


def test_a_scan_that_takes_long_lasts_longer(node: Node, red: str) -> None:
    """A clock that goes on by a second each time it is asked: so long does each scan take."""
    times = iter(range(1000))
    pods = Pods(node.kubelet_root, node.proc, clock=lambda: float(next(times)))
    assert pods.identity(RED) is None  # scanned from 0 to 1
    with launcher(node, RED, red, does="nothing"):
        for _ in range(2, 1 + module.SCAN_SHARE):
            assert pods.identity(RED) is None
        assert pods.identity(RED) == number(red)


UNDERSCORED = RED.replace("-", "_")
STATIC = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        ("", ""),
        ("0::/\n", ""),
        (cgroup_of(RED), RED),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-1.scope\n", RED),
        (f"0::/kubepods/besteffort/pod{RED}/abc\n", RED),
        (f"0::/kubepods/besteffort/pod{RED}\n", RED),
        (f"0::/../../pod{RED}/abc\n", RED),
        (f"0::/../../../burstable/pod{RED}/abc\n", RED),
        (f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice\n", RED),
        (f"0::/kubelet.slice/kubelet-kubepods-pod{UNDERSCORED}.slice/x\n", RED),
        (f"0::/kubelet/kubepods/burstable/pod{RED}/x\n", RED),
        (f"0::/system.slice/docker-{STATIC}.scope/kubelet/kubepods/pod{RED}/x\n", RED),
        (f"1:name=systemd:/kubepods/pod{RED}/a\n0::/\n", RED),
        (f"2:cpu,cpuacct:/a/kubepods-pod{UNDERSCORED}.slice:cri-containerd:abc\n", RED),
        (f"0::/kubepods/burstable/pod{STATIC}/abc\n", STATIC),
        (f"0::/kubepods/pod{RED}/pod{BLUE}\n", RED),
        (f"0::/kubepods/pod{RED}/x\rpod{BLUE}\x0b0::/pod{BLUE}\u2028/pod{BLUE}\n", RED),
        (f"2:a:/kubepods/pod{RED}/x\n1:b:/kubepods/pod{BLUE}/x\n", ""),
        (f"0::/machine.slice/libpod-{STATIC}{STATIC}.scope\n", ""),
        (f"0::/pod{STATIC}{STATIC}\n", ""),
        (f"0::/pod{RED}0\n", ""),
        (f"0::/{RED}\n", ""),
    ],
)
def test_the_pod_of_a_cgroup_is_the_outermost(cgroup: str, uid: str) -> None:
    assert pod_of(cgroup.encode()) == uid


USERS = "user.slice/user-1000.slice/user@1000.service/app.slice"  # systemd's, which he may fill


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/pod{RED}\n",
        f"0::/burstable/pod{RED}\n",
        f"0::/system.slice/x.service/pod{RED}\n",
        f"0::/../../x/pod{RED}\n",
        f"0::/{USERS}/pod{RED}\n",
        f"0::/{USERS}/kubepods/burstable/pod{RED}\n",
        f"0::/{USERS}/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/x\n",
        f"0::/../../../../{USERS}/kubepods/pod{RED}\n",
        f"0::/../user@1000.service/kubepods/pod{RED}\n",
        f"4:memory:/{USERS}\n1:name=systemd:/{USERS}/kubepods/pod{RED}\n0::/\n",
        f"4:memory:/user/somebody/0/kubepods/pod{RED}\n",
    ],
)
def test_a_cgroup_with_the_name_of_a_pod_counts_only_where_the_kubelet_makes_them(
    cgroup: str,
) -> None:
    assert pod_of(cgroup.encode()) == ""


# ------------------------------------------------------------------------------- real cgroups


def slice_of(top: Path, uid: str) -> Path:
    return top / "kubepods.slice" / f"kubepods-pod{uid.replace('-', '_')}.slice"


def test_in_real_cgroups_only_the_pod_that_a_process_is_in_counts(
    node: Node, red: str, blue: str
) -> None:
    with cgroups() as top, launcher(node, RED, red) as one, launcher(node, BLUE, blue) as other:
        really_in(slice_of(top, RED) / "cri-1.scope", one)
        really_in(slice_of(top, BLUE) / slice_of(top, RED).name, other)
        pods = look(node)
        assert entered(pods) == number(red)
        assert entered(pods, BLUE) == number(blue)
        one.socket.unlink()
        other.socket.rename(one.socket)
        assert_refused(look(node), why=f"of pod {BLUE}")
        one.socket.unlink()
        assert entered(look(node)) == number(red)


def test_a_user_of_the_node_cannot_give_his_processes_to_a_pod(
    node: Node, red: str, blue: str
) -> None:
    """His is the elder, and waits for the pod."""
    with cgroups() as top, launcher(node, BLUE, blue, does="nothing") as his:
        really_in(top / USERS / "kubepods.slice" / slice_of(top, RED).name, his)
        assert_pending(look(node))
        younger_than(his.pid)
        with launcher(node, RED, red) as one:
            really_in(slice_of(top, RED), one)
            assert entered(look(node)) == number(red)
            one.socket.unlink()
            assert entered(look(node)) == number(red)


IN_A_POD = """
import sys
from agent.kernel.pods import Pods
pods = Pods(*sys.argv[1:3])
for uid in sys.argv[3:]:
    print(pods.identity(uid))
"""


def told(*prefix: str, node: Node, uids: tuple[str, ...]) -> list[str]:
    words = (sys.executable, "-c", IN_A_POD, node.kubelet_root, node.proc, *uids)
    return run(*prefix, *words).stdout.splitlines()


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_an_agent_in_a_cgroup_namespace_of_its_own_finds_the_same(
    node: Node, red: str, blue: str, does: str
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs the command unshare (Debian: util-linux)")
    where = {RED: red, BLUE: blue}
    with cgroups() as top, launchers(node, where, does=does) as found:
        really_in(slice_of(top, RED) / "cri-1.scope", found[RED])
        really_in(slice_of(top, BLUE) / slice_of(top, RED).name, found[BLUE])
        ours = slice_of(top, str(uuid.uuid4())) / "cri-1.scope"
        ours.mkdir(parents=True)
        enter = ("sh", "-c", f'echo $$ > {ours}/cgroup.procs && exec unshare --cgroup "$@"', "sh")
        seen = run(*enter, "cat", f"{node.proc}/{found[RED].pid}/cgroup").stdout
        assert f"0::/../../{slice_of(top, RED).name}/cri-1.scope\n" in seen
        names = [str(number(red)), str(number(blue))]
        assert told(*enter, node=node, uids=(RED, BLUE)) == names


# --------------------------------------------------------------------------------- permission

SAYS = """
import sys
from agent.errors import Failure
from agent.kernel.pods import Pods
try:
    with Pods(*sys.argv[1:3]).opened(sys.argv[3]):
        pass
except Failure as failure:
    sys.exit(f"{type(failure).__name__}: {failure}")
"""


def said(*prefix: str, node: Node) -> str:
    words = (sys.executable, "-c", SAYS, node.kubelet_root, node.proc, RED)
    return run(*prefix, *words, code=None).stderr


@pytest.mark.parametrize("capability", ["sys_ptrace", "dac_override"])
def test_the_capability_that_is_missing_is_named(node: Node, red: str, capability: str) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs the command setpriv (Debian: util-linux)")
    with launcher(node, RED, red) as one:
        assert not said(node=node)
        os.chown(one.socket, 107, 107)
        one.socket.chmod(0o755)
        assert not said(node=node)
        prefix = ("setpriv", "--bounding-set", f"-{capability}", "--inh-caps", f"-{capability}")
        answer = said(*prefix, node=node)
        assert answer.startswith(NotPermitted.__name__)
        assert f"CAP_{capability.upper()}" in answer


def test_an_agent_that_cannot_see_the_processes_of_the_node_says_so(node: Node, red: str) -> None:
    with launcher(node, RED, red):
        answer = said("unshare", "--pid", "--fork", node=node)
        assert answer.startswith(NotPermitted.__name__)
        assert "hostPID" in answer


# ---------------------------------------------------------------------------------- resources


def variable(network: str, *links: str) -> str:
    interfaces = [{"name": link, "protocol": "Ethernet"} for link in links]
    return json.dumps({"name": f"bridge.network.kubevirt.io/{network}", "interfaces": interfaces})


ENVIRONMENT = {
    "NETWORK_INTERFACE_RESOURCES_red": variable("red", "eth-red01", "eth-red02"),
    "NETWORK_INTERFACE_RESOURCES_blue": variable("blue", "eth-blue"),
    "ODD": "\udcff=\udcfe",
}
BACKING = {
    "bridge.network.kubevirt.io/red": "eth-red01",
    "bridge.network.kubevirt.io/blue": "eth-blue",
}


@pytest.mark.parametrize("does", ["accepts", "nothing"])
def test_the_environment_of_the_launcher_tells_which_link_stands_for_a_resource(
    node: Node, red: str, does: str
) -> None:
    first = str(uuid.uuid4())  # as the runtime's, which is elder and knows of no resource
    with (
        launcher(node, first, red, does="nothing", cgroup=cgroup_of(RED)),
        launcher(node, RED, red, does=does, environment=ENVIRONMENT),
        launcher(node, BLUE, red),
    ):
        pods = look(node)
        assert pods.resources(RED) == BACKING
        assert pods.resources(BLUE) == pods.resources(first) == {}


def test_the_environment_of_another_pod_tells_nothing(node: Node, red: str) -> None:
    with launcher(node, RED, red, cgroup=cgroup_of(BLUE), environment=ENVIRONMENT) as one:
        assert look(node).resources(RED) == {}
        one.socket.unlink()
        assert look(node).resources(RED) == {}
        assert look(node).resources(BLUE) == BACKING


# -------------------------------------------------------------------------- letting go, and many


def test_a_deleted_namespace_is_not_kept_alive(node: Node) -> None:
    with space() as witness, space() as name:
        # A pair of veths dies with the namespace of either end.
        ip(name, f"link add tether type veth peer name tether netns {witness}")
        pods = look(node)
        with launcher(node, RED, name) as one:
            assert pods.identity(RED) == entered(pods) == number(name)
            run("ip", "netns", "del", name)
            assert "tether" in within(witness, "ip", "-br", "link")
            with pods.opened(RED):
                one.kill()
                assert "tether" in within(witness, "ip", "-br", "link")
            assert eventually(lambda: "tether" not in within(witness, "ip", "-br", "link"))
        assert_pending(pods)


def test_what_is_remembered_of_pods_has_an_end(
    node: Node, red: str, blue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_REMEMBERED", 1)
    with launchers(node, {RED: red, BLUE: blue}):
        pods = look(node)
        for _ in range(3):
            assert pods.identity(RED) == number(red)
            assert pods.identity(BLUE) == number(blue)
            assert len(pods._remembered) == 1


def timed(what: str, act: Callable[[str], object], uids: list[str]) -> list[object]:
    """What is said of each, which is little work: it must not take a second for all, of our own
    processor time."""
    began = time.thread_time()
    told = [act(uid) for uid in uids]
    took = time.thread_time() - began
    sys.stdout.write(f"{what}: {took / len(uids) * 1e6:.0f} µs a pod\n")
    assert took < 1
    return told


def test_three_hundred_pods_cost_no_descriptor_and_little_time(node: Node) -> None:
    uids = [str(uuid.uuid4()) for _ in range(300)]
    with launchers(node, dict.fromkeys(uids, NEW)) as found:
        real = {uid: Path(f"/proc/{one.pid}/ns/net").stat() for uid, one in found.items()}
        wanted = [(real[uid].st_dev, real[uid].st_ino) for uid in uids]
        assert len(set(wanted)) == 300
        pods, before = look(node), descriptors()
        assert timed("identity, first", pods.identity, uids) == wanted
        assert timed("identity, again", pods.identity, uids) == wanted
        assert timed("opened", lambda uid: entered(pods, uid), uids) == wanted
        for one in found.values():
            one.socket.unlink()
        again = look(node)
        assert timed("identity, by a scan", again.identity, uids) == wanted
        assert timed("resources", again.resources, uids) == [{}] * 300
        others = [str(uuid.uuid4()) for _ in uids]
        assert timed("identity, pending", again.identity, others) == [None] * 300
        assert descriptors() == before
    assert timed("identity, when all are gone", pods.identity, uids) == [None] * 300


# ----------------------------------------------------------------------------------- what has ended


def test_a_pod_is_over_when_the_kubelet_has_taken_its_volumes_away(node: Node, red: str) -> None:
    now = [0.0]
    pods = Pods(node.kubelet_root, node.proc, clock=lambda: now[0])
    assert pods.is_over(RED) is None
    node.sockets(RED).parent.mkdir(parents=True)
    assert pods.is_over(RED) is False  # its volumes are not mounted yet
    node.start(RED)
    assert pods.is_over(RED) is False
    with launcher(node, RED, red):
        now[0] += 60
        assert pods.is_over(RED) is False
        node.finish(RED)
        assert pods.is_over(RED) is False  # somebody is still there
    now[0] += 60
    assert pods.is_over(RED) is True
    node.delete(RED)
    assert pods.is_over(RED) is True
    assert Pods(node.kubelet_root, node.proc).is_over(RED) is None
    node.start(RED)
    assert pods.is_over(RED) is False


def test_of_a_pod_that_cannot_be_looked_at_no_end_is_known(node: Node) -> None:
    assert Pods(node.kubelet_root, f"{node.proc}/nowhere").is_over(RED) is False
    assert Pods(node.kubelet_root, node.proc).is_over("../x") is False
