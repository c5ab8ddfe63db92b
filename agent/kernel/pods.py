"""From the UID of a pod to its network namespace, whatever the pod's user has put in our way.

virt-launcher listens on a socket in a volume of its pod: who listens there tells the process, and
the process its namespace. Where nobody listens, the node's processes are searched for those of the
pod. Its user can write into the volume, start processes, make cgroups below his own and leave
namespaces. What he cannot do is to be in another pod's cgroup: that is asked of every process,
through the same descriptor as its namespace, so that neither a link, nor somebody else's socket,
nor a number that is given again can lead us astray. Neither is the node's own namespace a pod's.
Where a pod is said to be an instance's, the launcher there must have been started for it: whoever
may write an instance can say that of any pod of the node. Where no process tells, somebody must
listen as a launcher does, or KubeVirt's bridge be there: so it is in no other pods. A process that
does not let itself be asked has not told that it is no launcher: then nobody gets in.

No descriptor outlives a call: none keeps a namespace alive, and a thousand pods cost none.
"""

import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from agent.errors import Failure, NoNamespace, NotPermitted
from agent.kernel.aside import Aside
from agent.kernel.netns import inside
from agent.kernel.processes import (
    MOST_READ,
    READ,
    Identity,
    identity_of,
    instance_of,
    opened,
    pod_of,
    read,
    started_at,
)
from rules.manifests.resources import backing_links
from rules.problems import shown
from rules.values import Value

POD = "pod:"  # begins the name of a namespace that is a pod's
VOLUME = ("volumes", "kubernetes.io~empty-dir", "sockets")
SOCKET = "launcher-sock"
BRIDGE = "k6t-"  # begins the names of the bridges that guests are behind
SCAN_LASTS = 1.0  # seconds
SCAN_SHARE = 20  # of the time, one part in so many at most goes into scans
MOST_ASKED = 256  # processes of a pod, for whom they were started; a launcher is among the eldest
MOST_REMEMBERED = 4096  # pods; a node has a few hundred, but over its life many more
MOST_ENVIRONMENT = 1 << 20  # bytes

PLACE = os.O_PATH | os.O_CLOEXEC
FOLDER = PLACE | os.O_DIRECTORY
GONE = (FileNotFoundError, ProcessLookupError)
CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")  # short: a static pod's


class Tampered(Failure):
    """What was found in the place of a pod's namespace must not be trusted."""


class Process(Value):
    """One of a pod's, and the namespace it is in; its number alone may be another's tomorrow."""

    pid: int
    started: int  # ticks after the boot
    identity: Identity
    instance: str  # that the pod was found to serve, as was said; empty: nobody told


class Pods:
    """The pods of this node, by UID. It may be asked from several threads."""

    def __init__(
        self, kubelet_root: str, proc: str = "/proc", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._proc, self._clock = kubelet_root, proc, clock
        self._own = identity_of("/proc/thread-self/ns/net")
        self._remembered: dict[str, Process] = {}
        self._met: set[str] = set()  # pods that were here once
        self.instances: Mapping[str, str] = {}  # of which instance (UID) a pod is said to be
        self._scan: tuple[float, Mapping[str, list[int]]] = (0.0, {})  # until when, what
        self._aside = Aside(clock)

    # --------------------------------------------------------------------------- what it tells

    def folder(self, uid: str) -> str:
        """Where the socket appears, and something to look at with it."""
        return "/".join((self._root, "pods", _checked(uid), *VOLUME))

    def identity(self, uid: str) -> Identity | None:
        """Which namespace is the pod's now; None where there is none that we would enter."""
        known = self._remembered.get(uid)
        if known is not None and self._still_is(uid, known):
            return known.identity
        try:
            with self.opened(uid) as descriptor:
                return identity_of(descriptor)
        except Failure:
            return None

    @contextmanager
    def opened(self, uid: str) -> Iterator[int]:
        """A descriptor of the namespace; it keeps the namespace alive while it is open."""
        with _explained(_checked(uid)):
            process, descriptor = self._entered(uid)
        try:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[uid] = process
            self._meet(uid)
            yield descriptor
        finally:
            os.close(descriptor)

    def is_over(self, uid: str) -> bool | None:
        """Whether a pod was here, and has ended; None where nothing of it is here, and never was.
        While its user has a process left it is not over. The kubelet mounts volumes before it
        starts the first container, and takes them away when the last has ended; the folder itself
        stays until the pod is deleted."""
        try:
            folder = f"{self._root}/pods/{_checked(uid)}"
            there = os.path.isdir(folder)  # noqa: PTH112 - hundreds at a time
            over = uid in self._met
            if there:
                self._meet(uid)
                volume = os.path.lexists("/".join((folder, *VOLUME)))
                over = not volume and _has_entries(f"{folder}/containers")
            if there and not over:
                return False
            if self._eldest_first(uid):
                return False
        except (OSError, Failure):
            return False  # who cannot look does not know of an end
        return True if over else None

    def _meet(self, uid: str) -> None:
        if len(self._met) >= MOST_REMEMBERED:
            self._met.clear()
        self._met.add(uid)

    def serves(self, uid: str) -> str:
        """The UID of the instance that the pod's launcher was started for; empty: not known."""
        try:
            with _explained(_checked(uid)):
                return self._served(uid, self._listener(uid))
        except Failure:
            return ""

    def resources(self, uid: str) -> dict[str, str]:
        """Which link stands for each network resource, as the launcher's environment tells: what
        the pod says of itself. Not for a thread that others wait for: the memory that it is read
        from is the pod's, which could make the reading last."""
        try:
            with _explained(_checked(uid)):
                return self._told(uid)
        except Failure:  # opening the namespace says why
            return {}

    # ---------------------------------------------------------------------------- which process

    def _still_is(self, uid: str, known: Process) -> bool:
        if known.instance != self._said(uid):
            return False
        try:
            started = started_at(read(f"{self._proc}/{known.pid}/stat"))
            return (started, self._namespace_of(known.pid)) == (known.started, known.identity)
        except OSError:
            return False

    def _entered(self, uid: str) -> tuple[Process, int]:
        """A process of the pod, and its namespace, opened."""
        said = self._said(uid)
        known = self._remembered.pop(uid, None)
        if known is not None and known.instance == said:
            with suppress(*GONE, Tampered):  # its number may be somebody else's by now
                process, descriptor = self._enter(uid, known.pid, said)
                if process == known:
                    return process, descriptor
                os.close(descriptor)
        listener = self._listener(uid)
        served = self._served(uid, listener) if said else ""
        if served not in ("", said):
            raise _tampered(uid, f"it is named by instance {said}, and serves {shown(served)}")
        if listener is not None:
            with suppress(*GONE):
                process, descriptor = self._enter(uid, listener, served)
                try:
                    self._check_namespace(uid, process)
                except BaseException:
                    os.close(descriptor)
                    raise
                return process, descriptor
        for pid in self._eldest_first(uid):
            # What serves the pod from the node's namespace (conmon, a container about to start) is
            # in its cgroup, too; and a number may be somebody else's since the scan.
            with suppress(*GONE, Tampered):
                process, descriptor = self._enter(uid, pid, served)
                try:
                    if said and not served:
                        _check_bridge(descriptor, uid, said)
                except BaseException:
                    os.close(descriptor)
                    raise
                return process, descriptor
        raise NoNamespace(f"nothing runs on this node in pod {uid} (yet)")

    def _enter(self, uid: str, pid: int, instance: str) -> tuple[Process, int]:
        with self._of_pod(uid, pid) as process:
            started = started_at(read("stat", process))
            descriptor = os.open("ns/net", READ, dir_fd=process)
        try:
            identity = identity_of(descriptor)
            if identity in self._namespaces_of_the_node():
                raise _tampered(uid, f"its process {pid} is in the node's own network namespace")
        except BaseException:
            os.close(descriptor)
            raise
        return Process(pid, started, identity, instance), descriptor

    def _said(self, uid: str) -> str:
        return self.instances.get(uid, "")

    def _served(self, uid: str, listener: int | None) -> str:
        """The instance that the pod was made for, as the launcher that listens was told; where it
        does not listen, the eldest that was told any. Empty: none was (yet)."""
        if listener is not None:
            with suppress(*GONE):
                if found := self._told_to_serve(uid, listener):
                    return found
        for pid in self._eldest_first(uid)[:MOST_ASKED]:
            with suppress(*GONE, Tampered):
                if found := self._told_to_serve(uid, pid):
                    return found
        return ""

    def _told_to_serve(self, uid: str, pid: int) -> str:
        with self._of_pod(uid, pid) as process:
            return instance_of(self._memory(uid, "cmdline", process))

    def _memory(self, uid: str, name: str, process: int, most: int = MOST_READ) -> bytes:
        return self._aside.read(uid, os.open(name, READ, dir_fd=process), most)

    def _check_namespace(self, uid: str, process: Process) -> None:
        """Whoever runs in the pod may listen for the launcher, from a namespace of his own making.
        The one that the runtime made has the eldest process in it."""
        if uid not in self._scan[1]:
            self._scan = (0.0, {})  # it is newer than the scan
        for pid in self._eldest_first(uid):
            with suppress(*GONE, Tampered), self._of_pod(uid, pid) as eldest:
                identity = identity_of("ns/net", eldest)
                if identity == process.identity:
                    return
                if identity not in self._namespaces_of_the_node():
                    break
        else:
            return
        raise _tampered(uid, f"process {process.pid} listens for it, and is not in its namespace")

    @contextmanager
    def _of_pod(self, uid: str, pid: int) -> Iterator[int]:
        """A process by a descriptor of its folder, which no other process ever gets; proven to be
        one of that pod."""
        with opened(f"{self._proc}/{pid}", FOLDER) as process:
            named = pod_of(read("cgroup", process))
            if named != uid:
                whose = f"of pod {named}" if named else "of no pod"
                raise _tampered(uid, f"process {pid} speaks for it, which is {whose}")
            yield process

    def _namespace_of(self, pid: int) -> Identity:
        return identity_of(f"{self._proc}/{pid}/ns/net")

    def _namespaces_of_the_node(self) -> tuple[Identity, ...]:
        try:
            return self._own, self._namespace_of(1)
        except GONE as error:
            raise Failure(f"there is no process 1 in {self._proc}, as every node has") from error

    def _told(self, uid: str) -> dict[str, str]:
        listener = self._listener(uid)
        for pid in self._eldest_first(uid) if listener is None else (listener,):
            with suppress(*GONE, Tampered), self._of_pod(uid, pid) as process:
                text = os.fsdecode(self._memory(uid, "environ", process, MOST_ENVIRONMENT))
                pairs = (variable.partition("=") for variable in text.split("\0"))
                if found := backing_links((name, value) for name, _, value in pairs):
                    return found
        return {}

    # ------------------------------------------------------------------- the first way: a socket

    def _listener(self, uid: str) -> int | None:
        """The process that listens on the launcher's socket; None where none does."""
        try:
            with self._volume(uid) as volume, opened(SOCKET, PLACE | os.O_NOFOLLOW, volume) as at:
                if not stat.S_ISSOCK(os.fstat(at).st_mode):
                    raise _tampered(uid, f"{SOCKET} is no socket")
                return _asked_who_listens(uid, at)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise NotPermitted(
                f"may not reach {SOCKET} of pod {uid}", "Run as root, with CAP_DAC_OVERRIDE"
            ) from error

    @contextmanager
    def _volume(self, uid: str) -> Iterator[int]:
        """Walked to from the root step by step, none of which may be a link."""
        place = os.open(self._root, FOLDER)
        try:
            for step in ("pods", uid, *VOLUME):
                try:
                    following = os.open(step, FOLDER | os.O_NOFOLLOW, dir_fd=place)
                except NotADirectoryError as error:  # also of a link, to whatever it leads
                    raise _tampered(uid, f"{step} is no directory on the way to it") from error
                os.close(place)
                place = following
            yield place
        finally:
            os.close(place)

    # ------------------------------------------------------------------ the second way: a search

    def _eldest_first(self, uid: str) -> list[int]:
        """The pod's processes by age. What the runtime started first holds the namespace that it
        made for the pod; whoever entered another one, as a tenant may, came later."""
        found: list[tuple[int, int]] = []
        for pid in self._scanned().get(uid, ()):
            with suppress(*GONE):
                found.append((started_at(read(f"{self._proc}/{pid}/stat")), pid))
        return [pid for _, pid in sorted(found)]

    def _scanned(self) -> Mapping[str, list[int]]:
        """The processes of every pod, of a moment ago: one scan serves all who wait for a pod."""
        until, members = self._scan
        began = self._clock()
        if began < until:
            return members
        scanned: dict[str, list[int]] = {}
        for name in os.listdir(self._proc):  # noqa: PTH208 - thousands of names
            if name.isdecimal():
                with suppress(OSError):
                    uid = pod_of(read(f"{self._proc}/{name}/cgroup"))
                    if uid:
                        scanned.setdefault(uid, []).append(int(name))
        ended = self._clock()
        self._scan = ended + max(SCAN_LASTS, SCAN_SHARE * (ended - began)), scanned
        return scanned


def _has_entries(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except FileNotFoundError:
        return False


def _check_bridge(descriptor: int, uid: str, said: str) -> None:
    """Where KubeVirt has made its bridge, it is a launcher's pod, although none says so."""
    with inside(descriptor, f"{POD}{uid}"):
        if not any(name.startswith(BRIDGE) for _, name in socket.if_nameindex()):
            raise NoNamespace(f"no launcher of instance {said} runs in pod {uid} (yet)")


def _asked_who_listens(uid: str, place: int) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # where too many wait to be accepted, we would wait as well
        try:
            asking.connect(f"/proc/self/fd/{place}")  # what was checked, not what is there now
        except (ConnectionRefusedError, BlockingIOError):
            return None
        except PermissionError:
            raise
        except OSError as error:  # of another type than a launcher's
            raise _tampered(uid, f"{SOCKET} cannot be connected to: {error.strerror}") from error
        told = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid = int(CREDENTIALS.unpack(told)[0])  # of who called listen()
    if pid == 0:
        raise NotPermitted(
            f"the process that listens on {SOCKET} of pod {uid} cannot be seen from here",
            "Run the agent among the node's processes (hostPID: true)",
        )
    return pid


@contextmanager
def _explained(uid: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise NotPermitted(
            f"may not look at the namespaces of process 1 and of pod {uid}",
            "Run as root, with CAP_SYS_PTRACE",
        ) from error
    except OSError as error:
        raise Failure(f"cannot look for the namespace of pod {uid}: {error}") from error


def _checked(uid: str) -> str:
    """A UID, which is safe to be a part of a path."""
    if not UID.fullmatch(uid):
        raise Tampered(f"{shown(uid)} is not the UID of a pod")
    return uid


def _tampered(uid: str, what: str) -> Tampered:
    return Tampered(f"pod {uid}: {what}", "Nothing is done there; find out who runs in that pod")
