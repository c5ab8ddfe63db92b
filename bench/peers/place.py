"""Where a peer does the job: a client, a pod and a guest of its own, and processes inside the pod
that end with us, whatever happens."""

import errno
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.kernel import sysctl
from agent.kernel.lab import GATEWAY, GUEST, POD, Lab, built
from agent.kernel.netns import inside, opened
from agent.kernel.probe import KINDS, asks
from bench.process import PATIENCE
from rules.model import Family, Protocol

POD_ADDRESS, GUEST_ADDRESS = str(POD[0].ip), str(GUEST[0].ip)
GATEWAY_ADDRESS = str(GATEWAY[0].ip)
CLIENT_ADDRESS = "192.0.2.1"
FIRST, LAST = 1000, 8000
SOURCES = range(20000, 21000)  # of new flows, which the guest drops; no ephemeral ports
FLOWS = 700  # a round: the table of flows belongs to the whole machine
DROP = (
    "add table ip quiet; add chain ip quiet arriving"
    " { type filter hook prerouting priority -400; };"
    f" add rule ip quiet arriving udp sport {SOURCES[0]}-{SOURCES[-1]} drop"
)
MIB = 1024 * 1024


class Unavailable(Exception):
    """A peer that cannot do the job here, and why."""


class Place:
    """A lab, a folder, and how to do something there."""

    def __init__(self, lab: Lab, descriptor: int, folder: Path, stack: ExitStack) -> None:
        self.lab, self.folder = lab, folder
        self._descriptor, self._stack = descriptor, stack
        self._sources = iter(SOURCES)

    def run(
        self, *words: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> str:
        """Run a command in the pod's namespace, as its own process and nothing else; it must
        succeed."""
        with inside(self._descriptor, self.lab.pod):
            done = subprocess.run(
                words,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
                env={**os.environ, **(environment or {})},
            )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise Unavailable(f"{Path(words[0]).name} failed: {said[-300:] or done.returncode}")
        return done.stdout

    def ip(self, netns: str, *lines: str) -> None:
        self.run("ip", "-n", netns, "-batch", "-", stdin="\n".join(lines))

    def reached(self, protocol: Protocol, port: int) -> int | None:
        """The guest's port that answers a client of that port of the pod; None: nobody does."""
        return reached(self.lab, protocol, port)

    def opened_flow(self, port: int) -> socket.socket:
        """A UDP flow that stays open."""
        client = self.lab.socket(self.lab.client, Family.IP, socket.SOCK_DGRAM)
        self._stack.callback(client.close)
        client.settimeout(0.3)
        client.connect((POD_ADDRESS, port))
        return client

    def flush(self) -> None:
        """What a stranger would do to everything."""
        self.run("nft", "flush", "ruleset")
        if self._legacy_is_live():
            self.run("iptables-legacy", "-t", "nat", "-F")

    def rules(self) -> int:
        """How many the kernel holds in the pod's namespace, in whichever tables."""
        listed = self.run("nft", "-a", "list", "ruleset").splitlines()
        count = sum("# handle" in line and not re.search(r"\{ # handle", line) for line in listed)
        if self._legacy_is_live():
            saved = self.run("iptables-legacy-save", "-t", "nat").splitlines()
            count += sum(line.startswith("-A") for line in saved)
        return count

    def _legacy_is_live(self) -> bool:
        with inside(self._descriptor, self.lab.pod):
            try:
                return "nat" in Path("/proc/thread-self/net/ip_tables_names").read_text().split()
            except FileNotFoundError:
                return False

    def new_flow(self, address: str) -> float:
        """Microseconds to send the first packet of a flow to that address, in the middle of all
        ports. Sending takes the packet through the pod at once, up to the guest, which drops it."""
        taken = []
        step = (LAST - FIRST) // FLOWS
        with self.lab.socket(self.lab.client, Family.IP, socket.SOCK_DGRAM) as client:
            client.bind(("", next(self._sources)))
            client.sendto(b"x", (address, LAST))
            for port in range(FIRST, LAST, step):
                started = time.perf_counter()
                client.sendto(b"x", (address, port))
                taken.append(time.perf_counter() - started)
        return statistics.median(taken) * 1e6

    @contextmanager
    def holder(self, *lines: str) -> Iterator["Holder"]:
        """A shell in the pod's namespace that is the first of its own processes and has mounts of
        its own, made by these lines. Where it ends, and it ends with us, all others in it do."""
        script = "\n".join(("set -eu", *lines, "echo ready", "exec cat"))
        unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        child = subprocess.Popen(
            ["ip", "netns", "exec", self.lab.pod, *unshare, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout
            assert child.stderr
            if child.stdout.readline() != "ready\n":
                raise Unavailable(f"no private place to run it: {child.stderr.read().strip()}")
            (first,) = _children(child.pid)
            yield Holder(first)
        finally:
            child.communicate(timeout=PATIENCE)


class Holder:
    """Processes that share mounts and pids with nobody else."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def words(self, *words: str) -> list[str]:
        """A command that runs there."""
        return ["nsenter", "--target", str(self._pid), "--mount", "--net", "--pid", *words]

    def run(self, *words: str, log: Path, **environment: str) -> None:
        """Run a command there; it must succeed, and what it leaves running may."""
        with log.open("w") as errors:
            done = subprocess.run(
                self.words(*words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **environment},
                timeout=PATIENCE,
                check=False,
            )
        if done.returncode:
            raise Unavailable(f"{words[0]} failed: {log.read_text().strip()[-300:]}")

    def memory(self, *names: str) -> float:
        """MiB that the processes of these names have resident."""
        return sum(map(resident, self.named(*names)))

    def child_of(self, name: str) -> int:
        """The one child of the one process of that name."""
        children = [pid for parent in self.named(name) for pid in _children(parent)]
        if len(children) != 1:
            raise Unavailable(f"{name} has {len(children)} children, where one was started")
        return children[0]

    def named(self, *names: str) -> list[int]:
        """The processes of these names that were left running there."""
        return [pid for pid in _descendants(self._pid) if _is_alive(pid, names)]


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return [*children, *(one for child in children for one in _descendants(child))]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_alive(pid: int, names: Sequence[str]) -> bool:
    """Nobody waits for those who have ended."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name in names and rest.split()[0] != "Z"


def resident(pid: int) -> float:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def reached(lab: Lab, protocol: Protocol, port: int) -> int | None:
    with lab.socket(lab.client, Family.IP, KINDS[protocol]) as client:
        client.settimeout(0.3)
        try:
            client.connect((POD_ADDRESS, port))
            return asks(client)
        except OSError:
            return None


def refused(lab: Lab, port: int) -> bool:
    """Whether the pod itself turns a TCP connection away."""
    with lab.socket(lab.client, Family.IP, socket.SOCK_STREAM) as client:
        client.settimeout(0.3)
        return client.connect_ex((POD_ADDRESS, port)) == errno.ECONNREFUSED


@contextmanager
def place(name: str, folder: Path) -> Iterator[Place]:
    """A new place. IPv4 only: not every peer does the other family. The pod forwards already, as a
    node that has containers does, and the client knows a way to the guest without translation."""
    with (
        built(f"prpeers-{os.getpid()}-{name}", (Family.IP,)) as lab,
        opened(lab.pod) as descriptor,
        ExitStack() as stack,
    ):
        made = Place(lab, descriptor, folder, stack)
        with inside(descriptor, lab.pod):
            sysctl.write("net.ipv4.ip_forward", "1")
        made.ip(lab.pod, f"route add default via {CLIENT_ADDRESS}")
        made.ip(lab.client, f"route add {GATEWAY[0].network} via {POD_ADDRESS}")
        with opened(lab.guest) as guest, inside(guest, lab.guest):
            subprocess.run(["nft", DROP], check=True)
        yield made


def missing(*commands: str) -> Sequence[str]:
    """Which of these programs are not there."""
    paths = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/usr/lib/podman", "/usr/lib/cni"]
    return [c for c in commands if not any(Path(path, c).is_file() for path in paths)]
