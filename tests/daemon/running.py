"""The real daemon as a process of its own, the files it lives on, and what one says about both."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families as families

from agent.kernel.netns import inside, opened
from agent.revision import combined, digest
from agent.sources.files import content, each_once, label
from rules.model import Chain, Family
from tests.spaces import ROOT, eventually, ip, observed, require, run, space

PATIENCE = 60.0  # seconds for what takes a few tenths
TICKS = os.sysconf("SC_CLK_TCK")

Json = dict[str, Any]
Words = tuple[str, ...]


def forwarded(netns: str, *families: Family) -> set[str]:
    """What the kernel forwards from outside: `tcp 22`, `udp 1000-8000` or `everything`."""
    return {
        f"{live.rule.protocol.value} {live.rule.ports}" if live.rule.protocol else "everything"
        for live in observed(netns).live
        if live.rule.chain is Chain.PREROUTING
        and not live.rule.guards
        and live.rule.family in (families or tuple(Family))
    }


def comes_to_forward(netns: str, *ranges: str, seconds: float = PATIENCE) -> bool:
    """Whether these, and no others, come to be forwarded."""
    return eventually(lambda: forwarded(netns) == set(ranges), seconds)


def handles(netns: str) -> set[int]:
    """What tells the rules of a namespace from others that would be written in their place."""
    return {live.handle for live in observed(netns).live}


class Process(Protocol):
    """As much of a process as is needed here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int, /) -> None: ...


class Running:
    """One run of the daemon."""

    def __init__(
        self, process: Process, home: str, log: Path, manifests: Callable[[], Path]
    ) -> None:
        """`manifests`: the directory that its configuration names now."""
        self.process, self.home, self.log, self.manifests = process, home, log, manifests

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def workers(self, module: str = "") -> list[int]:
        """Return the pids of its workers, or of those that run that module."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        found = [pid for one in children for pid in _text(one).split()]
        return [int(pid) for pid in found if module in _text(Path("/proc", pid, "cmdline"))]

    # ------------------------------------------------------------------------ what it says

    def said(self, event: str = "", **fields: object) -> list[Json]:
        """The records of its log with this event and these fields."""
        whole = [line for line in self.log.read_text().splitlines(keepends=True) if "\n" in line]
        found = [json.loads(line) for line in whole if line.startswith("{")]
        wanted = fields | ({"event": event} if event else {})
        return [one for one in found if wanted.items() <= one.items()]

    def says(self, event: str, *, times: int = 1, **fields: object) -> bool:
        """Whether it comes to say this, so often at least."""

        def told() -> bool:
            return len(self.said(event, **fields)) >= times

        eventually(lambda: told() or not self.alive, PATIENCE)
        return told()

    def passes(self, after: str = "start") -> int:
        """How often it was done with everything after a start or reload, with whatever success."""
        return len(self.said("ready", after=after)) + len(self.said("not ready", after=after))

    def is_up(self) -> bool:
        """Whether it comes to be done with everything for the first time."""
        eventually(lambda: self.passes() > 0 or not self.alive, PATIENCE)
        return self.passes() > 0

    @property
    def port(self) -> int:
        """Where it listens now; a reload may have changed that."""
        return int(self.said("listening")[-1]["port"])

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2 * PATIENCE)
        try:
            with opened(self.home) as descriptor, inside(descriptor, self.home):
                connection.connect()
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def waited(self, *query: tuple[str, object]) -> Json:
        """What it answers at /wait."""
        code, body = self.get(f"/wait?{urlencode(query)}")
        assert code == http.client.OK, body
        return dict(json.loads(body))

    def applied(self, *names: str) -> bool:
        """Whether what its manifests say now comes to be in the kernel, with flows flushed, in
        every namespace that exists; a manifest that it rejects counts as read. With names: whether
        those do, whatever becomes of others."""
        folder = str(self.manifests())
        texts = {name: content(name) for name in each_once([folder])}
        pairs = {
            label(name).rpartition("/")[2]: digest(text) if isinstance(text, str) else ""
            for name, text in texts.items()
        }
        files = [("file", f"{name}:{pairs[name]}") for name in names]
        if files:
            return bool(self.waited(*files, ("timeout", PATIENCE))["done"])

        def read() -> bool:
            answer = self.waited(("directory", combined(pairs.items())))
            return bool(answer["revision"] or answer["rejected"])

        return eventually(read) and bool(self.waited(("timeout", PATIENCE))["done"])

    def forwarded(self, netns: str, *families: Family) -> set[str]:
        """What the kernel forwards, once what its manifests say now is applied."""
        assert self.applied(), self.waited()["waiting"]
        return forwarded(netns, *families)

    def status(self) -> Json:
        code, body = self.get("/status")
        assert code == http.client.OK
        return dict(json.loads(body))

    def shows(self, true: Callable[[Json], object]) -> bool:
        """Whether its status comes to be so: for what no revision tells."""
        return eventually(lambda: bool(true(self.status())))

    def standing(self, netns: str) -> Json:
        """How it thinks that a namespace stands; nothing, where it knows none of that name."""
        found = [one for one in self.status()["namespaces"] if one["netns"] == netns]
        return dict(found[0]) if found else {}

    def is_in(self, state: str, netns: str, seconds: float = PATIENCE) -> bool:
        """Whether a namespace comes to stand so."""
        return eventually(lambda: self.standing(netns).get("state") == state, seconds)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with that name and these labels."""
        code, body = self.get("/metrics")
        assert code == http.client.OK
        return sum(
            sample.value
            for family in families(body.decode())
            for sample in family.samples
            if sample.name == f"portranger_{name}" and labels.items() <= sample.labels.items()
        )

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    # ------------------------------------------------------------------------- what it is told

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def reload(self) -> None:
        """Told to read everything again, and done with it."""
        before = self.passes("reload")
        self.tell(signal.SIGHUP)
        assert eventually(lambda: self.passes("reload") > before or not self.alive, PATIENCE)
        assert self.alive, self.log.read_text()

    def stop(self) -> None:
        """As systemd would: it ends by itself, soon, with nothing to complain about."""
        self.tell(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        text = self.log.read_text()
        assert code == 0, text
        assert self.said("stopping"), text
        assert "Traceback" not in text, text

    def kill(self) -> None:
        """As nobody should."""
        self.process.kill()
        self.process.wait(PATIENCE)


def _text(path: Path) -> str:
    """Return what a file of a thread or process says; nothing if that has ended meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


STEM = """
import os, sys, time
from agent.daemon import Daemon
from agent.log import Descriptor, Log
from agent.notify import Notifier
children = []
for line in sys.stdin:
    while children:
        os.waitpid(children.pop(), 0)
    children.append(os.fork())
    if not children[0]:
        number = os.open(line.strip(), os.O_WRONLY | os.O_CREAT)
        Daemon(sys.argv[1], Log(Descriptor(number), "json", clock=time.time), Notifier()).run()
        os._exit(0)
    print(children[0], flush=True)
"""


class Copy:
    """A process that is another's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return -1
        return -1 if state == "Z" else None

    def wait(self, timeout: float) -> int:
        assert eventually(lambda: self.poll() is not None, timeout)
        return -1

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:  # its number is not given again before its parent has heard of it
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Node:
    """What daemons live on, one after another: a namespace, configuration, manifests and state.

    The namespace is its own, so that nothing of this machine's, and nothing that others do here, is
    in the way.
    """

    def __init__(self, folder: Path, home: str, **settings: object) -> None:
        self.folder, self.home = folder, home
        self.manifests, self.state = folder / "manifests.d", folder / "state"
        self.config = folder / "portranger.toml"
        self.manifests.mkdir(parents=True)
        self._settings: dict[str, object] = {
            "manifests": str(self.manifests),
            "state_dir": str(self.state),
            "listen": "127.0.0.1:0",
        }
        self._runs = 0
        self.configure(**settings)

    def configure(self, **settings: object) -> None:
        """Write the configuration, with these settings and those from before."""
        require(str(settings.get("backend")))
        self._settings |= settings
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in self._settings.items())
        self.config.write_text("".join(lines))

    def source(self) -> Path:
        """The directory of manifests, as it is configured now."""
        return Path(str(self._settings["manifests"]))

    def save(self, name: str, text: str) -> Path:
        """As editors do that never leave half a file."""
        path = self.manifests / name
        scratch = self.folder / f"{name}.new"
        scratch.write_text(text)
        scratch.replace(path)
        return path

    def remove(self, name: str) -> None:
        (self.manifests / name).unlink()

    def words(self, *prefix: str) -> Words:
        """The command that runs a daemon here, through others that run it."""
        entry = (sys.executable, "-m", "agent.entry")
        enter = ("nsenter", f"--net=/run/netns/{self.home}")
        return (*enter, *prefix, *entry, "run", "-c", str(self.config))

    def refused(self, *prefix: str) -> tuple[int, str]:
        """The exit code of a daemon that should not start, and what it says."""
        done = run(*self.words(*prefix), code=None)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    def start(self, *prefix: str, environment: Mapping[str, str] | None = None) -> Running:
        """A daemon that nobody waits for, and that nobody stops."""
        self._runs += 1
        words = (*self.words(*prefix), "--log-format", "json")
        log = self.folder / f"log-{self._runs}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        return Running(process, self.home, log, self.source)

    @contextmanager
    def stem(self) -> Iterator[Callable[[], Running]]:
        """Starts daemons, one at a time, each a copy of a process that has loaded everything
        already: a tenth of what starting Python takes."""
        enter = ("nsenter", f"--net=/run/netns/{self.home}", sys.executable, "-c", STEM)
        stem = subprocess.Popen(
            [*enter, str(self.config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert stem.stdin is not None
        assert stem.stdout is not None
        asks, answers = stem.stdin, stem.stdout

        def start() -> Running:
            self._runs += 1
            log = self.folder / f"log-{self._runs}"
            log.touch()
            asks.write(f"{log}\n")
            asks.flush()
            return Running(Copy(int(answers.readline())), self.home, log, self.source)

        try:
            yield start
        finally:
            asks.close()
            stem.wait(PATIENCE)
            answers.close()

    @contextmanager
    def running(
        self, *prefix: str, environment: Mapping[str, str] | None = None
    ) -> Iterator[Running]:
        """A daemon that is ready, and is stopped at the end unless it has gone by then."""
        daemon = self.start(*prefix, environment=environment)
        try:
            assert daemon.is_up(), daemon.log.read_text()
            yield daemon
            if daemon.alive:
                daemon.stop()
        finally:
            daemon.kill()


@contextmanager
def made(folder: Path, **settings: object) -> Iterator[Node]:
    """A node of its own, for as long as the block runs."""
    with space() as home:
        ip(home, "link set lo up")
        yield Node(folder, home, **settings)
