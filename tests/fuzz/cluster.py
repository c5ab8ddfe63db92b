"""What an API server says, and through it every tenant: objects with anything in them, and answers
that break off, lie about their length or never end."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from agent import config
from agent.errors import Failure
from agent.publisher import published_from_nothing, publishing
from agent.sources import parties, policies, services, slices, vmis
from agent.sources.api import Api, Trim
from agent.sources.credentials import Credentials, Endpoint, Plain
from rules.desired import desire
from rules.fences import Laws, fenced
from rules.manifests import read
from rules.model import Machine, Observed
from rules.plan import diff
from rules.problems import Problem
from rules.selection import Selection
from rules.services import Publication, Service
from tests.fuzz.choices import Choices, mutated
from tests.fuzz.manifests import AROUND, is_told, is_written_for_nft
from tests.fuzz.samples import INSTANCE, NAMESPACE, POD, POLICY, SERVICE, SLICE, TOLD
from tests.fuzz.target import Run, Target, simple

PATIENCE = 5.0  # seconds until something is stuck
TRIMS: dict[str, Trim] = {
    "instances": vmis.trimmed,
    "services": services.trimmed,
    "slices": slices.trimmed,
    "policies": policies.trimmed,
    "pods": lambda thing: parties.trimmed_pod(thing, parties.Alike()),
    "namespaces": parties.trimmed_namespace,
}


def told(data: bytes) -> None:
    """An object from the API server, near a good one, as one who listens to any kind hears it."""
    choices = Choices(data)
    trim = choices.pick([*TRIMS.values()])
    heard(json.loads(json.dumps(mutated(choices.pick(TOLD), choices)), object_hook=trim))


def heard(thing: Any) -> None:
    """What each listener makes of it."""
    if not isinstance(thing, dict):
        return
    instance(thing)
    published(thing)
    policy = policies.heard(thing)
    if policy is not None:
        found, problems = policies.understood(policy)
        are_told(problems, policy.label)
        for one in fenced(_machines(), Laws(policies=(found,)), {}):
            is_written_for_nft(diff("", desire([one], AROUND), Observed(mapped={})))
    for kind in (parties.pod(thing), parties.home(thing)):
        if kind is not None:
            hash(kind)


@functools.cache
def _machines() -> tuple[Machine, ...]:
    return read(INSTANCE).machines


@functools.cache
def _service() -> Service:
    (service,) = read(SERVICE).services
    return service


def instance(thing: dict[str, object]) -> None:
    """A machine, whatever its tenant writes, is in its own pods and nowhere else."""
    vmi = vmis.heard(thing)
    if vmi is None:
        return
    document = vmis.decoded(vmi.text)
    machines, problems = vmis.understood(vmi, document)
    are_told(problems, vmi.label)
    where = vmis.place(document, "node")
    for machine in (*machines, *vmis.shut(vmi, document)):
        assert machine.netns == vmi.label, machine
        assert not machine.addresses, machine
        for pod in where.pods:
            placed = vmis.placed(machine, where, pod)
            assert placed.netns == f"pod:{pod}", placed
            is_written_for_nft(diff("", desire([placed], AROUND), Observed(mapped={})))
    kept = vmis.kept(document, document, where.pods, "node")
    again = vmis.recalled(kept)
    assert again is None or (again.uid, again.name) == (vmi.uid, vmi.name)
    assert vmis.pods_of(kept) <= {f"pod:{pod}" for pod in where.pods}
    vmi.newer(vmi)


def published(thing: dict[str, object]) -> None:
    """A Service, and where a slice says that it leads."""
    found: list[Service] = []
    one = services.heard(thing)
    if one is not None:
        service, problems = services.understood(one)
        are_told(problems, one.label)
        found += [each for each in (service, services.plain(one)) if each is not None]
    there = slices.heard(thing, "node", {"phone"})
    found += [_service()] if there is not None else []
    how, bands = publishing(config.Config(source="kubernetes"))
    for service in found:
        ends = slices.endpoints(service, [there] if there is not None else [])
        publication = Publication(service=service, endpoints=ends)
        desired = published_from_nothing(Selection(publications=(publication,)), how, bands)
        is_written_for_nft(diff("node:self", desired, Observed(mapped={})))


def are_told(problems: tuple[Problem, ...], label: str) -> None:
    for problem in problems:
        assert problem.file == label
        is_told(problem.at("x", 1), file="x")


@contextmanager
def answered() -> Iterator[Run]:
    """An API server that answers with anything, byte for byte, over a real connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        answer = [b""]
        thread = threading.Thread(target=_answer, args=(server, answer), daemon=True)
        thread.start()
        who = Endpoint("http", "127.0.0.1", server.getsockname()[1])

        def run(data: bytes) -> None:
            answer[0] = data[1:]
            began = time.monotonic()
            with closing(Api(Credentials(who, Plain()), patience=2.0)) as api, suppress(Failure):
                _asked(api, data[:1])
            assert time.monotonic() - began < PATIENCE

        try:
            yield run
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


def _asked(api: Api, verb: bytes) -> None:
    """A list, or a watch, with what is made of its events; or something else."""
    which = verb[0] if verb else 0
    trim = [*TRIMS.values()][which // 4 % len(TRIMS)]
    if which % 4 == 0:
        for item in api.listed("/x", {}, trim).items:
            heard(item)
    elif which % 4 == 1:
        api.get("/x")
    else:
        for event in api.watch("/x", {}, "1", trim):
            assert isinstance(event.object, dict)
            heard(event.object)


def _answer(server: socket.socket, answer: list[bytes]) -> None:
    """Whatever is asked, until the server is shut down."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(PATIENCE)
            asked = b""
            while b"\r\n\r\n" not in asked and (more := connection.recv(4096)):
                asked += more
            connection.sendall(answer[0])


def answers() -> Iterator[bytes]:
    page = {"metadata": {"resourceVersion": "9"}, "items": [INSTANCE, SERVICE, POLICY]}
    text = json.dumps(page).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    yield b"\0" + head % len(text) + text
    events = [
        json.dumps({"type": "ADDED", "object": one}).encode() + b"\n"
        for one in (INSTANCE, SERVICE, SLICE, POLICY, POD, NAMESPACE)
    ]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in events)
    for number in range(len(TRIMS)):
        yield bytes([2 + 4 * number]) + CHUNKED + chunks + b"0\r\n\r\n"
    status = json.dumps({"kind": "Status", "code": 410, "message": "gone", "details": {}}).encode()
    yield b"\1HTTP/1.1 429 Slow\r\nRetry-After: 1e9\r\nContent-Length: 2\r\n\r\n{}"
    yield (
        b"\2"
        + CHUNKED
        + b"%x\r\n%s\r\n" % (len(status) + 31, b'{"type":"ERROR","object":' + status)
    )


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WORDS = (
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\0", b"HTTP/1.1 ", b"HTTP/9.9 ", b"401 x", b"410 Gone", b"99"),
    *(b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"ffffffffffffffff"),
    *(b"Transfer-Encoding: chunked\r\n", b"Retry-After: nan\r\n", b"-1\r\n", b"x: " + b"y" * 70000),
    *(b'"continue": "x",', b'{"type":"ERROR"}', b"[" * 3000, b'{"a":' * 3000, b"1e999", b"NaN"),
    *(
        b"GET / HTTP/1.1",
        b"HEAD /",
        b"POST /metrics",
        b"//",
        b"/../",
        b"%00",
        b"\xff\xfe",
        b": ",
        b" ",
    ),
)


TARGETS = (
    Target(name="api-objects", opened=simple(told), examples=200),
    Target(name="api-answers", opened=answered, seeds=answers, words=WORDS, examples=80),
)
