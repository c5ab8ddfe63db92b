"""A booted machine: systemd is its first process, and portranger is installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.spaces import eventually, run
from tests.systemd.trees import JOIN, Stage, installed, stage

PATIENCE = 60
NEEDED = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"}
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/root",
    "SYSTEMD_PAGER": "",
}


class Machine:
    """Runs commands in the machine."""

    def __init__(self, init: int) -> None:
        self._enter = ("nsenter", f"--target={init}", "--all", "--root", "--wd")

    def run(
        self, *words: str, stdin: str = "", code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root; unless told otherwise it must succeed."""
        done = subprocess.run(
            [*self._enter, *words],
            input=stdin,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if code is not None:
            told = f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
            assert done.returncode == code, told
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that is spoken with."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*self._enter, *words], env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True
        )

    def says(self, *words: str) -> str:
        """What a command says."""
        return self.run(*words).stdout.strip()

    def write(self, path: str, text: str) -> None:
        """Write a file as an editor does: complete at once."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'cat >"$1.new" && mv "$1.new" "$1"', "sh", path, stdin=text)


@contextmanager
def booted() -> Iterator[Machine]:
    """A machine of its own, with this clone installed, that goes with the block."""
    with stage(*installed()) as made:
        install = made.install("make", "--silent", "install")
        with started(made, install) as machine:
            yield machine


@contextmanager
def started(made: Stage, before: str = "true") -> Iterator[Machine]:
    """The machine of a stage; before it boots, a line of a script is run."""
    with running(made, before) as nspawn:
        machine = Machine(init_of(nspawn))
        up = ("running", "degraded")
        assert eventually(lambda: state(machine) in up, PATIENCE), state(machine)
        yield machine


@contextmanager
def running(made: Stage, before: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process that holds the machine."""
    # With bpf, systemd can enforce IPAddressDeny= and DevicePolicy= as it does on a real machine.
    allowed = ("--capability=CAP_BPF", "--system-call-filter=bpf")
    boot = made.nspawn("--boot", "--private-network", *allowed)
    script = f"{JOIN}{before}\nexec {boot}"
    log = made.source / ".boot.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *made.command(script)],
            env=made.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        assert eventually(lambda: init_of(child) > 0 or child.poll() is not None, PATIENCE)
        assert child.poll() is None, log.read_text()
        yield child
    finally:
        child.terminate()  # which systemd-nspawn takes for a press of the power button
        try:
            child.wait(PATIENCE)
        finally:
            child.kill()
            child.wait(PATIENCE)


def init_of(nspawn: subprocess.Popen[bytes]) -> int:
    """The first process of the machine, as this machine numbers it; 0 while there is none."""
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            told = dict(line.split(":", 1) for line in path.read_text().splitlines())
        except OSError:
            continue  # it ended meanwhile
        numbers = told["NSpid"].split()
        if int(told["PPid"]) == nspawn.pid and len(numbers) > 1 and numbers[-1] == "1":
            return int(numbers[0])
    return 0


def state(machine: Machine) -> str:
    """What systemd says of itself."""
    return machine.run("systemctl", "is-system-running", code=None).stdout.strip()


@functools.cache
def why_not() -> str | None:
    """The reason why no machine can boot here, or None if one can."""
    for command, package in NEEDED.items():
        if not shutil.which(command):
            return f"needs the command {command} (Debian: {package})"
    with TemporaryDirectory() as lower, stage(Path(lower)) as made:
        tried = run(*made.command(JOIN), environment=made.environment(), code=None)
    if tried.returncode != 0:
        return f"cannot mount what a machine needs: {tried.stderr.strip()}"
    return None
