"""A fake node: the kubelet's folder, processes that listen like virt-launcher, and their /proc.

Everything about the processes is real (they live, die, listen, and are in network namespaces) but
for their cgroups, which not every machine lets us make. So a node has a /proc of its own: of each
launcher a folder with links to what the real one says of it, and a `cgroup` that we write; process
1 is in the node's namespace. Where the machine has a cgroup2 that can be written, `really_in` puts
a launcher into a real cgroup instead, and nothing of it is made up.

`Node.kubelet_root` and `Node.proc` are for `Pods`, and for the configuration of an agent.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.spaces import PATIENCE, eventually, unused_name

SOCKETS = "volumes/kubernetes.io~empty-dir/sockets"
SOCKET = "launcher-sock"
HOME = ""  # as a namespace: that of the tests, which is the node's
NEW = "new"  # as a namespace: one without a name, which goes with its launcher

# One process for all launchers of a call, and each a child of it: three hundred Pythons would take
# a while to start. They die with their parent, and it with its standard input. A child that is to
# be an instance's writes that over an argument of its own that is left free for it: what it was
# started with is then what KubeVirt starts a launcher with.
ROOM = "-" * len(f"/usr/bin/virt-launcher --uid {uuid.UUID(int=0)}")
LAUNCHERS = """
import ctypes, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def serve(instance):
    words = f"/usr/bin/virt-launcher\\0--uid\\0{instance}".encode()
    with open("/proc/self/cmdline", "rb") as file:
        *_, free, _ = file.read().split(b"\\0")
        at = file.tell() - len(free) - 1
    assert len(words) == len(free)
    with open("/proc/self/stat") as file:
        at += int(file.read().rsplit(")", 1)[1].split()[45])  # arg_start
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(at)
        memory.write(words)

def launch(uid, folder, netns, does, instance):
    if instance:
        serve(instance)
    checked(libc.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG
    if netns == "new":
        checked(libc.unshare(0x40000000))
    elif netns:
        checked(libc.setns(os.open("/run/netns/" + netns, os.O_RDONLY), 0x40000000))
    os.chdir(folder)  # its path may be longer than that of a socket
    kind = socket.SOCK_DGRAM if does == "datagrams" else socket.SOCK_STREAM
    server = socket.socket(socket.AF_UNIX, kind)
    if does != "nothing":
        server.bind("launcher-sock")
    if does in ("accepts", "listens"):
        server.listen(0 if does == "listens" else 64)
    os.write(1, f"{uid} {os.getpid()}\\n".encode())
    while True:
        if does == "accepts":
            server.accept()[0].close()
        else:
            signal.pause()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
pids = []
for words in json.loads(sys.stdin.readline()):
    pids.append(os.fork())
    if not pids[-1]:
        try:
            launch(*words)
        except BaseException as error:
            os.write(1, f"{error!r}\\n".encode())
        os._exit(1)
sys.stdin.read()
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
try:
    os.wait()  # for all of them, as they are not reaped one by one
except ChildProcessError:
    pass
"""


class Launcher:
    """A process that is virt-launcher to its pod."""

    def __init__(self, node: Node, uid: str, pid: int) -> None:
        self.node, self.uid, self.pid = node, uid, pid

    @property
    def socket(self) -> Path:
        return self.node.sockets(self.uid) / SOCKET

    def kill(self) -> None:
        """As when the guest was shut down: its socket stays."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert eventually(lambda: not Path(f"/proc/{self.pid}").exists())


class Node:
    """What an agent sees of a node, below a folder of ours."""

    def __init__(self, folder: Path, netns: str = HOME) -> None:
        """The namespace is that of the node itself."""
        self._kubelet, self._proc = folder / "kubelet", folder / "proc"
        (self._kubelet / "pods").mkdir(parents=True)
        first = self._proc / "1/ns/net"
        first.parent.mkdir(parents=True)
        first.symlink_to(f"/run/netns/{netns}" if netns else f"/proc/{os.getpid()}/ns/net")

    @property
    def kubelet_root(self) -> str:
        return str(self._kubelet)

    @property
    def proc(self) -> str:
        return str(self._proc)

    def sockets(self, uid: str) -> Path:
        """The folder in which the pod's launcher makes its socket."""
        return self._kubelet / "pods" / uid / SOCKETS

    def start(self, uid: str) -> None:
        """As the kubelet does before and when it starts the first container of a pod."""
        self.sockets(uid).mkdir(parents=True, exist_ok=True)
        (self._kubelet / "pods" / uid / "containers" / "compute").mkdir(parents=True)

    def finish(self, uid: str) -> None:
        """As the kubelet does when all containers of a pod have ended."""
        shutil.rmtree(self.sockets(uid))

    def delete(self, uid: str) -> None:
        """As the kubelet does when a pod that has ended is deleted."""
        shutil.rmtree(self._kubelet / "pods" / uid)

    def place(self, pid: int) -> Path:
        """The folder of a process."""
        return self._proc / str(pid)

    def enlist(self, pid: int, cgroup: str) -> None:
        """Show a process, as one of that cgroup."""
        place = self.place(pid)
        place.mkdir()
        for name in ("stat", "environ", "cmdline", "ns"):
            (place / name).symlink_to(f"/proc/{pid}/{name}")
        (place / "cgroup").write_text(cgroup)

    def dismiss(self, pid: int) -> None:
        place = self.place(pid)
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            shutil.rmtree(place)


def cgroup_of(uid: str) -> str:
    """What /proc says of a container of that pod, where systemd makes the cgroups."""
    slices = "kubepods.slice/kubepods-burstable.slice"
    pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return f"0::/{slices}/{pod}/cri-containerd-{'0a' * 32}.scope\n"


@contextmanager
def launchers(  # noqa: PLR0913 - the rest by name
    node: Node,
    pods: Mapping[str, str],
    *,
    does: str = "accepts",
    cgroup: str | None = None,
    environment: Mapping[str, str] | None = None,
    instances: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Launcher]]:
    """A launcher for each pod (UID), in that namespace: a name, HOME or NEW; KubeVirt started it
    for the instance (UID) that is named for that pod. Without one it is any process of a pod.

    Each `accepts` connections, or only `listens`, `binds`, `datagrams` or does `nothing`."""
    for uid in pods:
        node.sockets(uid).mkdir(parents=True, exist_ok=True)
    words = [
        [uid, str(node.sockets(uid)), netns, does, (instances or {}).get(uid, "")]
        for uid, netns in pods.items()
    ]
    parent = subprocess.Popen(
        [sys.executable, "-ISc", LAUNCHERS, ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        text=True,
    )
    found: dict[str, Launcher] = {}
    try:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps(words) + "\n")
        parent.stdin.flush()
        for line in [parent.stdout.readline() for _ in words]:
            uid, _, pid = line.strip().partition(" ")
            assert uid in pods, line
            found[uid] = Launcher(node, uid, int(pid))
            node.enlist(int(pid), cgroup_of(uid) if cgroup is None else cgroup)
        yield found
    finally:
        try:
            parent.communicate(timeout=PATIENCE)
        finally:
            parent.kill()
            parent.wait()
        for one in found.values():
            node.dismiss(one.pid)
            one.socket.unlink(missing_ok=True)


@contextmanager
def launcher(  # noqa: PLR0913 - the rest by name
    node: Node,
    uid: str,
    netns: str,
    *,
    does: str = "accepts",
    cgroup: str | None = None,
    environment: Mapping[str, str] | None = None,
    instance: str = "",
) -> Iterator[Launcher]:
    """One of them, that KubeVirt started for that instance (UID), if any is named."""
    with launchers(
        node,
        {uid: netns},
        does=does,
        cgroup=cgroup,
        environment=environment,
        instances={uid: instance},
    ) as found:
        yield found[uid]


# ----------------------------------------------------------------------------- real cgroups


@contextmanager
def cgroups() -> Iterator[Path]:
    """A real cgroup of our own, to make others in; it goes with all that are below it."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounted = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    if not mounted:
        pytest.skip("needs a cgroup2 file system")
    top = mounted[0] / f"portranger-{unused_name()}"
    try:
        top.mkdir()
    except OSError as error:
        pytest.skip(f"needs a cgroup2 file system that can be written: {error}")
    try:
        yield top
    finally:
        below = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in (*below, top):
            assert eventually(partial(_removed, path)), path


def _removed(path: Path) -> bool:
    """It cannot be while there is a process in it, if only a dying one."""
    with suppress(OSError):
        path.rmdir()
    return not path.exists()


def really_in(cgroup: Path, one: Launcher) -> None:
    """From now on the process is in that cgroup, and shown as it is."""
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "cgroup.procs").write_text(str(one.pid))
    one.node.dismiss(one.pid)
    one.node.place(one.pid).symlink_to(f"/proc/{one.pid}")
