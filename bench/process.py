"""The daemon as a process of its own: what it tells its service manager, and what it uses."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PORTRANGER = str(Path(sys.executable).parent / "portranger")
WITH_US = ("setpriv", "--pdeathsig", "TERM")  # it ends where we do, also where we are killed
PATIENCE = 60.0  # seconds for what takes a few at the most
PAUSE = 0.0002  # seconds between two looks: all that a latency can be wrong by
MIB = 1024 * 1024


class Daemon:
    """`portranger run`, from before it is ready."""

    def __init__(self, child: "subprocess.Popen[bytes]", manager: socket.socket, log: Path) -> None:
        self.pid = child.pid
        self.most_descriptors = 0  # as seen while waiting for it to say something
        self._child, self._manager, self._log = child, manager, log

    def hears_nothing(self) -> None:
        """Throw away what it said up to now: the socket has room for ten messages."""
        while select.select([self._manager], [], [], 0)[0]:
            self._manager.recv(4096)

    def says(self, words: str) -> None:
        """Wait until it says so."""
        deadline = time.monotonic() + PATIENCE
        while (left := deadline - time.monotonic()) > 0 and self._child.poll() is None:
            self.most_descriptors = max(self.most_descriptors, self.descriptors)
            if select.select([self._manager], [], [], min(left, 0.1))[0]:
                said = self._manager.recv(4096).decode()
                if words in said:
                    return
        raise TimeoutError(f"the daemon did not say {words!r}:\n{self._log.read_text()[-2000:]}")

    @property
    def processor_seconds(self) -> float:
        """Of all its threads: /proc tells the same in hundredths only. The number of this clock is
        what clock_getcpuclockid(3) makes of a pid."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def rests(self, seconds: float = 0.05) -> None:
        """Wait until it has used no processor for so long."""
        self._still(seconds)

    def works(self, seconds: float) -> tuple[float, float]:
        """Wait until it begins to work by itself, within so many seconds, and ends; how long that
        took, and how much of a processor."""
        before = self.processor_seconds
        until(lambda: self.processor_seconds > before, seconds)
        started = time.monotonic()
        return self._still(0.25) - started, self.processor_seconds - before

    def _still(self, seconds: float) -> float:
        """Wait until it has used no processor for so long; when that began."""
        seen, since = self.processor_seconds, time.monotonic()
        deadline = since + PATIENCE
        while (now := time.monotonic()) - since < seconds:
            if now > deadline:
                raise TimeoutError("the daemon does not come to rest")
            if (used := self.processor_seconds) > seen:
                seen, since = used, now
            time.sleep(PAUSE)
        return since

    @property
    def memory(self) -> float:
        """Resident, in MiB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def reload(self) -> None:
        """Have it read its configuration anew, and wait until it has."""
        self.hears_nothing()
        os.kill(self.pid, signal.SIGHUP)
        self.says("READY=1")


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder. Not below /tmp: what others write there would wake up the daemon, which watches
    the way to its manifests."""
    with tempfile.TemporaryDirectory(prefix="prbench-", dir="/var/lib") as name:
        yield Path(name)


@contextmanager
def running(folder: Path, prefix: Sequence[str] = ()) -> Iterator[Daemon]:
    """The daemon with the configuration in that folder; ended with the block."""
    address, log = folder / "notify", folder / "log"
    with ExitStack() as stack:
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(str(address))
        stack.callback(address.unlink)
        child = subprocess.Popen(
            [*prefix, *WITH_US, PORTRANGER, "run", "-c", str(folder / "portranger.toml")],
            env={**os.environ, "NOTIFY_SOCKET": str(address)},
            stderr=stack.enter_context(log.open("wb")),
        )
        stack.callback(_ended, child)
        yield Daemon(child, manager, log)


def _ended(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(PATIENCE)
    finally:
        child.kill()
        child.wait()


def configure(folder: Path, *, listen: str = "", resync_seconds: int = 600) -> Path:
    """Write the configuration of a daemon that keeps to this folder; where its manifests go."""
    manifests = folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (folder / "portranger.toml").write_text(
        f'manifests = "{manifests}"\n'
        f'state_dir = "{folder / "state"}"\n'
        f'listen = "{listen}"\n'
        f"resync_seconds = {resync_seconds}\n"
    )
    return manifests


def save(file: Path, text: str) -> None:
    """As most editors do: into a new file that takes the name."""
    scratch = file.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(file)


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Look tightly, for so long at the most."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(PAUSE)


def manifest(name: str, netns: str, ranges: Sequence[str]) -> str:
    """A machine with these ranges, each as `1000-8000/tcp`."""
    declared = "".join(
        f"\n                - {{start: {ports.split('-')[0]}, end: {ports.split('-')[1]}, "
        f"protocol: {protocol.upper()}}}"
        for ports, protocol in (one.split("/") for one in ranges)
    )
    return f"""\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: {name}
  annotations:
    portranger.io/netns: {netns}
spec:
  template:
    spec:
      domain:
        devices:
          interfaces:
            - name: red
              masquerade: {{}}
              portRanges:{declared}
      networks:
        - name: red
          pod: {{}}
"""
