"""`portranger status`: what a daemon says of itself, for people and for scripts."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agent.cli import run
from agent.commands import status as module
from agent.commands.status import status_text
from agent.entry import guarded
from agent.server import Server
from agent.status import Change, Drift, Policies, Standing, State, Status, status_json
from rules.model import Live, Pending, Share
from rules.values import replace
from tests.spaces import portranger
from tests.unit.samples import DESKTOP, PROBLEM, egress, forward, forwards, from_inside

Answer = tuple[int, str, str]
Ask = Callable[..., Answer]

NOW = 1_800_000_000.0
LAPTOP = "VirtualMachine/default/laptop/red"


BLUE = Standing(
    netns="blue",
    state=State.IN_SYNC,
    since=NOW - 200,
    backend="nftables",
    reason="the kernel has it",
    live=(
        *forwards("tcp 1000-8000", "udp 1000-8000"),
        *forwards("tcp 22", owner=LAPTOP)[:1],
        Live(from_inside(), 90),
        Live(egress(), 91),
    ),
    change=Change(NOW - 7300, "9 rules added"),
    drift=Drift(at=NOW - 200, process="nft", pid=123, changes=4),
    drifts=3,
    notes=("a note",),
)
RED = Standing(
    netns="red",
    state=State.FAILING,
    since=NOW - 5,
    why="not permitted",
    pending=(Pending(LAPTOP, "there is no link eth0 yet"),),
    drift=Drift(at=NOW - 3 * 86400, changes=1),
    drifts=1,
)
NODE = Status(
    version="1.2.3",
    pid=4711,
    started=NOW - 3 * 3600 - 5,
    ready=True,
    source="/etc/m",
    manifests=2,
    problems=(PROBLEM,),
    last_valid={"/etc/m/laptop.yaml": NOW - 60},
    policies=Policies(enforced=True, count=3),
    namespaces=(BLUE, RED),
)
TEXT = """\
portranger 1.2.3, pid 4711, up since 2027-01-15 04:59:55 UTC (3 h ago), ready, \
2 manifests from /etc/m, 1 problem
namespaces: 1 in sync, 1 failing
policies: 3 enforced
problem: /etc/m/laptop.yaml:16: spec.end: is not a port number (it is 70000). \
Write a number from 1 to 65535. [port-out-of-range]
using the last valid version of /etc/m/laptop.yaml since 2027-01-15 07:59:00 UTC (1 min ago)

namespace blue: in sync since 2027-01-15 07:56:40 UTC (3 min ago)
  nftables: the kernel has it
  3 ranges in 7 rules
    VirtualMachine/default/desktop/red: tcp 1000-8000, udp 1000-8000 -> 10.0.2.2, fd10:0:2::2
    VirtualMachine/default/laptop/red: tcp 22 -> 10.0.2.2
  last change 2 h ago: 9 rules added
  repaired 3 min ago: nft (pid 123) changed 4 rules; 3 times in all
  note: a note

namespace red: failing since 2027-01-15 07:59:55 UTC (5 s ago): not permitted
  repaired 3 d ago: somebody changed 1 rule
  pending: VirtualMachine/default/laptop/red: there is no link eth0 yet
"""


def told(status: Status) -> str:
    answer = json.loads(json.dumps(status_json(status)))
    return "".join(f"{line}\n" for line in status_text(answer, NOW))


def test_people_read_all_of_it() -> None:
    assert told(NODE) == TEXT


@pytest.mark.parametrize("word", ["pending", "refused"])
def test_of_what_is_pending_or_refused_people_read_ten_and_how_many_there_are(word: str) -> None:
    some = tuple(Pending(f"Service/a/b{n}/rtp", "somebody listens") for n in range(12))
    text = told(replace(NODE, namespaces=(replace(RED, **{word: some}),)))
    lines = [line for line in text.splitlines() if line.startswith(f"  {word}: ")]
    assert lines[0] == f"  {word}: Service/a/b0/rtp: somebody listens"
    assert lines[9:] == [f"  {word}: Service/a/b9/rtp: somebody listens", f"  {word}: and 2 more"]


def test_a_range_of_several_endpoints_counts_once() -> None:
    live = tuple(
        Live(replace(forward("tcp 80", to=f"192.0.2.{n}"), share=Share(2, (n - 1,))), n)
        for n in (1, 2)
    )
    text = told(replace(NODE, namespaces=(replace(RED, live=live),)))
    assert "  1 range in 2 rules\n" in text


def test_why_a_namespace_is_in_conflict_is_told_once() -> None:
    refused = (
        Pending("Service/a/b/rtp", "udp 7 is left out: somebody listens", partly=True),
        Pending("Service/a/c/rtp", "udp 9 cannot be published: somebody listens"),
    )
    why = "; ".join(f"{one.owner}: {one.reason}" for one in refused)
    one = Standing(netns="x", state=State.CONFLICT, since=NOW, why=why, refused=refused)
    text = told(replace(NODE, namespaces=(one,)))
    assert text.endswith(
        "namespace x: conflict since 2027-01-15 08:00:00 UTC (just now)\n"
        "  refused: Service/a/c/rtp: udp 9 cannot be published: somebody listens\n"
        "  partly published: Service/a/b/rtp: udp 7 is left out: somebody listens\n"
    )


def test_ranges_are_told_in_their_order() -> None:
    live = forwards("udp 7", "tcp 1094", "tcp 104-110", "tcp 22")
    text = told(replace(NODE, namespaces=(replace(RED, live=live),)))
    assert ": tcp 22, tcp 104-110, tcp 1094, udp 7 -> 10.0.2.2, fd10:0:2::2\n" in text


def test_a_shifted_range_is_told_with_the_ports_that_it_leads_to() -> None:
    shifted = replace(forward("udp 31000-31099", to="192.0.2.10"), to_port=10000)
    text = told(replace(NODE, namespaces=(replace(RED, live=(Live(shifted, 7),)),)))
    assert "udp 31000-31099 -> 192.0.2.10 10000-10099\n" in text


def test_rules_that_were_not_read_are_not_told_as_none() -> None:
    lost = Standing(netns="lost", state=State.UNMANAGED, since=NOW, why="rules are left")
    text = told(replace(NODE, namespaces=(lost,)))
    assert "0 rules" not in text
    assert "  portranger show --netns lost lists its rules\n" in text


def test_what_the_daemon_lacks_itself_is_said() -> None:
    text = told(replace(NODE, outdated="line 1 is bad", unwritable="cannot write x: it is full"))
    assert "\nconfiguration: line 1 is bad\nstate: cannot write x: it is full\n" in text


def test_a_node_at_its_start_says_so() -> None:
    fresh = Status(version="1.2.3", pid=4711, started=NOW, unreadable="it is not there")
    assert told(fresh) == (
        "portranger 1.2.3, pid 4711, up since 2027-01-15 08:00:00 UTC (just now), not ready, "
        "0 manifests, 0 problems\nnamespaces: none\nsource: it is not there\n"
        "policies: left to the network plugin ([policy] enforce = true enforces them)\n"
    )


@pytest.mark.parametrize(
    ("policies", "text", "answer"),
    [
        (Policies(enforced=True), "0 enforced", {"enforced": True, "count": 0}),
        (
            Policies(enforced=True, count=2, why="it is away"),
            "2 enforced; it is away",
            {"enforced": True, "count": 2, "why": "it is away"},
        ),
        (
            Policies(count=2),
            "left to the network plugin ([policy] enforce = true enforces them)",
            {"enforced": False, "count": 2},
        ),
    ],
)
def test_whether_policies_are_enforced_is_said(
    policies: Policies, text: str, answer: dict[str, object]
) -> None:
    status = Status(version="1", pid=1, started=NOW, policies=policies)
    assert f"\npolicies: {text}\n" in told(status)
    assert status_json(status)["policies"] == answer


def test_an_older_daemon_says_nothing_of_policies() -> None:
    answer = status_json(NODE)
    del answer["policies"]
    assert not any(line.startswith("policies") for line in status_text(answer, NOW))


def test_namespaces_are_counted_by_how_they_stand() -> None:
    states = [State.PENDING, State.FAILING, State.IN_SYNC, State.PENDING, State.IN_SYNC]
    states += [State.REFUSED, State.CONFLICT, State.PENDING]
    standings = tuple(
        Standing(netns=f"n{place}", state=state, since=NOW) for place, state in enumerate(states)
    )
    status = Status(version="1", pid=1, started=NOW, ready=True, namespaces=standings)
    said = "namespaces: 2 in sync, 3 pending, 1 failing, 1 refused, 1 conflict"
    assert told(status).splitlines()[1] == said
    answer = status_json(status)
    answer["namespaces"] = [{"netns": "x", "state": "of a newer daemon", "since": None}]
    assert list(status_text(answer, NOW))[1] == "namespaces: 1 of a newer daemon"


def test_everything_is_a_word_of_its_own() -> None:
    live = (Live(forward(None, owner=DESKTOP), 1),)
    one = Standing(netns="x", state=State.IN_SYNC, since=NOW, live=live)
    status = Status(version="1", pid=1, started=NOW, namespaces=(one,))
    assert f"{DESKTOP}: everything -> 10.0.2.2\n" in told(status)


def test_many_ranges_are_cut_and_counted() -> None:
    live = forwards(*(f"tcp {port}" for port in range(1000, 1100)))
    one = Standing(netns="x", state=State.IN_SYNC, since=NOW, live=live)
    text = told(Status(version="1", pid=1, started=NOW, namespaces=(one,)))
    assert "100 ranges in" in text  # of both families
    assert "tcp 1000, tcp 1001, " in text
    assert "and 76 more" in text


# ----------------------------------------------------------------------------- over a connection


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Ask the daemon at an address; exit code, output, diagnostics."""

    def asked(listen: str, *words: str) -> Answer:
        file = tmp_path / "portranger.toml"
        file.write_text(f'listen = "{listen}"\n')
        code = guarded(lambda: run(["status", "-c", str(file), *words]))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return asked


@contextmanager
def daemon(status: Status = NODE, host: str = "127.0.0.1") -> Iterator[Server]:
    lines: list[str] = []
    made = Server(
        host, 0, status=lambda: status, beat=time.monotonic, metrics_text=bytes, log=lines.append
    )
    with closing(made):
        yield made
    assert lines == []


def test_the_daemon_is_asked_where_its_configuration_says(ask: Ask) -> None:
    with daemon() as made:
        code, out, err = ask(f"127.0.0.1:{made.address[1]}")
    assert (code, err) == (0, "")
    assert out.startswith("portranger 1.2.3, pid 4711, up since 2027-01-15 04:59:55 UTC (")
    assert len(out.splitlines()) == len(TEXT.splitlines())


def test_scripts_get_what_the_daemon_said(ask: Ask) -> None:
    with daemon() as made:
        code, out, _ = ask(f"127.0.0.1:{made.address[1]}", "-o", "json")
    assert code == 0
    assert json.loads(out) == status_json(NODE)
    assert out.startswith('{\n  "format_version": "1.0",\n')


def test_it_may_be_asked_for_some_namespaces(ask: Ask) -> None:
    with daemon() as made:
        where = f"127.0.0.1:{made.address[1]}"
        code, out, _ = ask(where, "--netns", "red")
        assert (code, out.count("\nnamespace red"), out.count("\nnamespace blue")) == (0, 1, 0)
        code, out, _ = ask(where, "--netns", "blue", "-o", "json")
        assert [one["netns"] for one in json.loads(out)["namespaces"]] == ["blue"]
        code, out, err = ask(where, "--netns", "rde")
    assert (code, out) == (1, "")
    assert "the daemon keeps no namespace rde. It keeps blue, red." in err


def test_a_daemon_that_is_not_ready_has_answered_all_the_same(ask: Ask) -> None:
    with daemon(Status(version="1", pid=1, started=NOW, namespaces=(RED,))) as made:
        code, out, _ = ask(f"127.0.0.1:{made.address[1]}")
    assert code == 0
    assert "not ready" in out
    assert "failing" in out


@pytest.mark.parametrize(
    ("host", "listen"),
    [("0.0.0.0", "0.0.0.0"), ("::", "[::]"), ("::1", "[::1]"), ("127.0.0.1", "localhost")],
)
def test_a_daemon_on_any_address_is_found(ask: Ask, host: str, listen: str) -> None:
    with daemon(host=host) as made:
        code, _, err = ask(f"{listen}:{made.address[1]}")
    assert (code, err) == (0, "")


def test_names_of_tenants_cannot_spoil_the_terminal(ask: Ask) -> None:
    evil = "x\x1b[2J\r\nnamespace y: in sync\u202e"
    one = Standing(
        netns=evil,
        state=State.FAILING,
        since=NOW,
        why=evil,
        live=(Live(forward(owner=evil), 1),),
        pending=(Pending(evil, evil),),
        notes=(evil,),
        change=Change(NOW, evil),
        drift=Drift(at=NOW, process=evil, changes=1),
    )
    status = Status(version=evil, pid=1, started=NOW, last_valid={evil: NOW}, namespaces=(one,))
    with daemon(status) as made:
        code, out, _ = ask(f"127.0.0.1:{made.address[1]}")
    assert code == 0
    assert out.count("\n") == 12
    assert all(line.isprintable() for line in out.split("\n"))
    assert not any(line.startswith("namespace y") for line in out.splitlines())


@contextmanager
def answering(data: bytes | None) -> Iterator[str]:
    """Something that says this to whoever connects, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                if data is not None:
                    connection.sendall(data)
                else:
                    connection.recv(65536)  # until the other side has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
    assert not thread.is_alive()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_no_daemon_is_said_with_how_to_start_it(ask: Ask) -> None:
    code, out, err = ask(f"127.0.0.1:{free_port()}")
    assert (code, out) == (75, "")
    assert "connection refused" in err
    assert "systemctl start portranger" in err
    assert "portranger run" in err


@pytest.mark.parametrize("data", [b"", b"garbage\r\n\r\n", b"HTTP/1.0 200 OK\r\n" + b"x" * 100_000])
def test_half_an_answer_is_none(ask: Ask, data: bytes) -> None:
    with answering(data) as address:
        code, _, err = ask(address)
    assert code == 75
    assert err.startswith(f"portranger: the daemon does not answer at {address} (")
    assert err.count("\n") == 1


def test_a_daemon_that_says_nothing_is_not_waited_for(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.PATIENCE == 5.0
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    with answering(None) as address:
        code, _, err = ask(address)
    assert code == 75
    assert "timed out" in err


def test_a_daemon_that_is_busy_may_be_asked_again(ask: Ask) -> None:
    with answering(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n") as address:
        code, _, err = ask(address)
    assert code == 75
    assert "busy" in err


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "[]",
        "[" * 100_000,
        "{}",
        '{"format_version": "2.0"}',
        '{"format_version": "1.0", "namespaces": [{}]}',
        '{"format_version": "1.0", "namespaces": 7}',
        '{"format_version": "1.0", "started": "yesterday"}',
        '{"format_version": "1.0", "manifests": [], "started": 1}',
    ],
    ids=lambda body: body[:60],
)
def test_who_answers_but_is_no_daemon_is_said_so(ask: Ask, body: str) -> None:
    head = "HTTP/1.0 200 OK\r\n\r\n"
    with answering(f"{head}{body}".encode()) as address:
        code, out, err = ask(address)
    assert (code, out) == (1, "")
    assert f"what answers at {address} is not a daemon" in err


def test_another_web_server_is_no_daemon(ask: Ask) -> None:
    with answering(b"HTTP/1.0 404 Not Found\r\n\r\n<html>") as address:
        code, _, err = ask(address)
    assert code == 1
    assert "is not a daemon" in err


def test_a_daemon_without_an_address_says_what_to_set(ask: Ask) -> None:
    code, _, err = ask("")
    assert code == 1
    assert 'listen = "127.0.0.1:9788"' in err
    code, _, err = ask("127.0.0.1:0")
    assert code == 1
    assert "only its log tells" in err


def test_a_bad_configuration_ends_with_78(tmp_path: Path) -> None:
    file = tmp_path / "portranger.toml"
    file.write_text("listen = 7\n")
    done = portranger("status", "-c", file)
    assert done.returncode == 78
    assert f"{file}:1: listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_is_a_process_that_asks() -> None:
    with daemon() as made:
        done = portranger("status", "-o", "xml")
        assert done.returncode == 64
        file = Path("/dev/stdin")
        listen = f'listen = "127.0.0.1:{made.address[1]}"'
        done = portranger("status", "-c", file, stdin=listen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("portranger 1.2.3, ")
