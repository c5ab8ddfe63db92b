"""What others send to the daemon's port, and what is in the files that we read when we start: our
own state, kubeconfigs and our configuration."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from agent import config
from agent.errors import BadConfiguration
from agent.server import Server
from agent.sources import kubeconfig
from agent.sources.store import LEAVING, NODE_PORTS, TEXTS, Store, digest
from agent.status import Status
from rules.node_ports import Bands, rebuild
from rules.ports import PortRange
from tests.fuzz import cluster
from tests.fuzz.choices import Choices, mutated, spoilt
from tests.fuzz.samples import ROOT
from tests.fuzz.target import Run, Target, simple

MEMORY = "/dev/shm"  # noqa: S108 - a folder in it, made for us
PATIENCE = 5.0  # seconds until something is stuck
BANDS = Bands(PortRange(30000, 32767))

# --------------------------------------------------------------------------- the daemon's port


@contextmanager
def served() -> Iterator[Run]:
    """The daemon's server; what it is sent is answered in its own words, and breaks nothing."""
    complaints: list[str] = []
    status = Status(version="1", pid=2, started=0.0, ready=True)
    server = Server(
        "127.0.0.1",
        0,
        status=lambda: status,
        beat=time.monotonic,
        metrics_text=lambda: b"# HELP x y\n",
        log=complaints.append,
    )

    def run(data: bytes) -> None:
        with socket.create_connection(server.address, PATIENCE) as connection:
            with suppress(OSError):  # it need not read all of it
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):
                while more := connection.recv(1 << 16):
                    answer += more
        assert not complaints, complaints
        is_an_answer(answer)

    with closing(server):
        yield run


def is_an_answer(answer: bytes) -> None:
    """Nothing, to who asked nothing; else a head, and as much as it says there is."""
    if not answer:
        return
    head, gap, body = answer.partition(b"\r\n\r\n")
    assert gap, answer
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1."), answer
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert all(name.replace(b"-", b"").isalpha() for name in names), answer
    assert len(names) == len(set(names)), answer
    (length,) = [int(line[15:]) for line in lines if line.startswith(b"Content-Length:")]
    assert len(body) in (0, length), answer


def requests() -> Iterator[bytes]:
    for path in (b"/", b"/metrics", b"/status", b"/healthz", b"/readyz", b"/nowhere?a=b"):
        yield b"GET %s HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n" % path
    yield b"HEAD /status HTTP/1.0\r\n\r\n"
    yield b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    yield b"GET /\r\n\r\n"


# ----------------------------------------------------------------------------------- our state


@contextmanager
def stored() -> Iterator[Run]:
    """Whatever is in our state, we go on without it, say so, and give no port to two."""
    # What is given is on the disk before anybody hears of it, which on a real one takes a while.
    with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as folder:
        yield lambda data: _stored(Path(folder), data)


def _stored(folder: Path, data: bytes) -> None:
    warnings: list[str] = []
    choices = Choices(data)
    store = Store(str(folder), warnings.append)
    store.keep("a.yaml", "text")
    store.leave(["blue"])
    store.keep_node_ports([])
    for name in (
        NODE_PORTS,
        LEAVING,
        str(next((folder / TEXTS).glob("*.json")).relative_to(folder)),
    ):
        _spoil(folder / name, choices)
    again = Store(str(folder), warnings.append)
    texts = again.load()
    assert all(isinstance(text, str) for pair in texts.items() for text in pair), texts
    assert all(isinstance(one, str) for one in again.leaving), again.leaving
    held = again.node_ports()
    allocations = rebuild(BANDS, held)
    taken: set[tuple[str, int]] = set()
    for holder, ports in allocations.pairs:
        numbers = {(holder.protocol.value, number) for number in range(ports.first, ports.last + 1)}
        assert not numbers & taken, allocations
        taken |= numbers
    again.keep_node_ports(allocations.pairs)
    assert rebuild(BANDS, again.node_ports()) == allocations
    assert all(warning.isprintable() for warning in warnings), warnings


GIVEN = [["Service/shop/phone", "rtp", "udp", 30000, 30100], ["x", "y", "tcp", 30050, 30060]]


def _spoil(path: Path, choices: Choices) -> None:
    """Another content with a seal that fits, or a file that is broken."""
    record = json.loads(path.read_text())
    if choices.below(2):
        content = mutated(choices.pick((GIVEN, record["content"])), choices)
        with suppress(ValueError):
            record = {**record, "content": content, "sha256": digest(content)}
        path.write_bytes(json.dumps(record).encode(errors="surrogatepass"))
    else:
        words = (b"[" * 5000, b"\0", b"null", b'"format": 2', b"\xff", b"{}")
        path.write_bytes(spoilt(path.read_bytes(), choices, words))


# ------------------------------------------------------------------------------- configuration


@contextmanager
def well_told(place: str = "") -> Iterator[None]:
    """What is wrong with a configuration is told, a line for each, which says where."""
    lines: list[str] = []
    try:
        yield
    except BadConfiguration as bad:
        lines = str(bad).split("\n")
    for line in lines:
        assert line.isprintable(), line
        assert line.startswith(place), line


@contextmanager
def clusters() -> Iterator[Run]:
    """A kubeconfig: taken, or told what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config")

        def run(data: bytes) -> None:
            path.write_bytes(data)
            with well_told():
                found = kubeconfig.load(str(path), {})
                assert str(found.endpoint).isprintable(), found.endpoint
                assert "".join(found.warnings).isprintable(), found.warnings

        yield run


KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u, namespace: shop}}]
clusters:
- name: c
  cluster: {server: "https://192.0.2.1:6443/path", certificate-authority-data: Y2E=}
users:
- name: u
  user:
    token: abc
    client-certificate-data: Y2E=
    client-key-data: Y2E=
- name: p
  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/false, args: [a]}}
"""


def toml(data: bytes) -> None:
    """A configuration: taken, or told what is wrong with it, each on a line of its own."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    with well_told("x.toml:"):
        config.read(text, "x.toml")


def tomls() -> list[bytes]:
    return [(ROOT / "examples" / "portranger.toml").read_bytes(), TOML.encode()]


TOML = """\
source = "kubernetes"
listen = "[::1]:9788"
resync_seconds = 60
[node_ports]
range = "30000-32767"
addresses = ["192.0.2.1"]
external = ["203.0.113.0/24"]
reserve = true
[kubernetes]
kubeconfig = "/x"
node_name = "n"
services = false
[policy]
enforce = "auto"
"""
TOML_WORDS = (
    *(b'"""', b"'''", b"\n", b"[", b"]", b"[[", b"{", b"}", b"=", b'"', b"\\u0000", b"\\uD800"),
    *(
        b"1979-05-27T07:32:00Z",
        b"nan",
        b"inf",
        b"0x10",
        b"9" * 5000,
        b"[" * 3000,
        b"\0",
        b"\r",
        b".",
    ),
    *(b"%eth0", b"::1%x", b"0.0.0.0", b"-", b"a.b.c", b"\x7f", b"\xc2\x85", b"\xe2\x80\xa8", b'""'),
)
YAML_WORDS = (
    b"&a",
    b"*a",
    b"<<: ",
    b"!!x",
    b"null",
    b"[]",
    b"{}",
    b"\n- ",
    b": ",
    b"\0",
    b"\xff",
    b"\t",
)

TARGETS = (
    Target(name="http-requests", opened=served, seeds=requests, words=cluster.WORDS),
    Target(name="stored-state", opened=stored),
    Target(
        name="kubeconfigs",
        opened=clusters,
        seeds=lambda: [KUBECONFIG.encode()],
        words=(*YAML_WORDS, b"https://", b"x@y", b"[::1", b":99999", b"\xe2\x84\xab"),
    ),
    Target(name="configuration", opened=simple(toml), seeds=tomls, words=TOML_WORDS, examples=200),
)
