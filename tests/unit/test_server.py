"""The daemon's HTTP server, asked over real connections by the kind and by the hostile."""

import http.client
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from agent import server as module
from agent.errors import Failure, NotPermitted
from agent.revision import Revision
from agent.server import MOST_CONNECTIONS, Server
from agent.status import Standing, State, Status, status_json
from agent.waiting import Bell
from rules.model import Live
from rules.values import replace
from tests.spaces import eventually
from tests.unit.samples import forward

Address = tuple[str, int]


class Daemon:
    """What a server is told by its daemon, and what it told its log."""

    def __init__(self) -> None:
        live = (Live(forward("tcp 1000-8000"), 4),)
        blue = Standing(netns="blue", state=State.IN_SYNC, since=1.0, live=live)
        self.current = Status(version="1", pid=2, started=0.0, ready=True, namespaces=(blue,))
        self.last_beat = time.monotonic()
        self.lines: list[str] = []
        self.text: Callable[[], bytes] = lambda: b"# HELP x y\n"
        self.bell = Bell()
        self.looked = threading.Event()  # whether somebody has asked for the status

    def metrics_text(self) -> bytes:
        return self.text()

    def status(self) -> Status:
        self.looked.set()
        return self.current

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Server:
        return Server(
            host,
            port,
            status=self.status,
            beat=lambda: self.last_beat,
            metrics_text=self.metrics_text,
            log=self.lines.append,
            limit=30.0,
            bell=self.bell,
        )


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def server(daemon: Daemon) -> Iterator[Server]:
    with closing(daemon.serve()) as made:
        yield made


class Answer:
    """What came back."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.code, self.headers = response.status, response.headers
        self.body = response.read()


def ask(address: Address, path: str, method: str = "GET", body: bytes = b"") -> Answer:
    with closing(http.client.HTTPConnection(*address, timeout=20)) as connection:
        connection.request(method, path, body or None)
        return Answer(connection.getresponse())


def send(address: Address, data: bytes) -> bytes:
    """What comes back to these bytes, until the other side closes."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return everything(connection)


def everything(connection: socket.socket) -> bytes:
    found = b""
    while more := connection.recv(1 << 16):
        found += more
    return found


# --------------------------------------------------------------------------------------- pages


def test_who_waits_is_answered_when_it_is_applied(daemon: Daemon, server: Server) -> None:
    daemon.current = replace(daemon.current, revision=Revision(wanted=7, applied=6, checked=True))
    answers: list[Answer] = []
    waiting = threading.Thread(
        target=lambda: answers.append(ask(server.address, "/wait?timeout=20"))
    )
    waiting.start()
    assert daemon.looked.wait(20)
    assert not answers
    daemon.current = replace(daemon.current, revision=Revision(wanted=8, applied=7, checked=True))
    daemon.bell.ring()
    waiting.join()
    answer = json.loads(answers[0].body)
    assert (answer["done"], answer["revision"], answer["wanted"]) == (True, 7, 8)


def test_who_waits_in_vain_is_answered_in_the_end(daemon: Daemon, server: Server) -> None:
    unapplied = {"blue": "failing: no"}
    revision = Revision(wanted=7, applied=6, checked=True, unapplied=unapplied)
    daemon.current = replace(daemon.current, revision=revision)
    answer = json.loads(ask(server.address, "/wait?timeout=0.05").body)
    assert not answer["done"]
    assert answer["waiting"] == ["namespace blue: failing: no"]


def test_a_loop_that_is_stuck_is_named_to_who_waits(daemon: Daemon, server: Server) -> None:
    daemon.last_beat -= 100
    answer = json.loads(ask(server.address, "/wait").body)
    assert "stuck for 100 s" in answer["waiting"][0]


@pytest.mark.parametrize("query", ["timeout=x", "timeout=61", "revision=-", "x=1", "a&b"])
def test_a_wait_that_makes_no_sense_is_refused(server: Server, query: str) -> None:
    assert ask(server.address, f"/wait?{query}").code == 400


def test_who_waits_keeps_nobody_out(daemon: Daemon, server: Server) -> None:
    """And who goes away is not waited for."""
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(server.address))
            one.sendall(b"GET /wait?timeout=60 HTTP/1.0\r\n\r\n")
        assert eventually(lambda: at_work() == MOST_CONNECTIONS + 1)
        assert ask(server.address, "/healthz").code == 200
        assert at_work() >= MOST_CONNECTIONS - 1
    assert eventually(lambda: at_work() == 1)
    assert daemon.lines == []


def test_metrics_are_served_as_they_are(daemon: Daemon, server: Server) -> None:
    answer = ask(server.address, "/metrics")
    assert (answer.code, answer.body) == (200, b"# HELP x y\n")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    daemon.text = lambda: b"x 1\n" * 1_000_000
    assert len(ask(server.address, "/metrics?format=x").body) == 4_000_000


def test_the_status_is_what_the_daemon_says(daemon: Daemon, server: Server) -> None:
    answer = ask(server.address, "/status")
    assert answer.code == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(answer.body) == status_json(daemon.current)
    assert json.loads(answer.body)["namespaces"][0]["ranges"][0]["ports"] == "1000-8000"


def test_a_loop_that_beats_is_healthy(server: Server) -> None:
    answer = ask(server.address, "/healthz")
    assert (answer.code, answer.body) == (200, b"ok\n")


def test_a_loop_that_is_stuck_is_not_and_for_how_long(daemon: Daemon, server: Server) -> None:
    daemon.last_beat -= 100
    answer = ask(server.address, "/healthz")
    assert answer.code == 503
    assert b"stuck for 100 s" in answer.body


def test_a_node_that_serves_all_is_ready(daemon: Daemon, server: Server) -> None:
    assert ask(server.address, "/readyz").code == 200
    waiting = Standing(netns="x", state=State.PENDING, since=0.0, why="no link yet")
    daemon.current = Status(version="1", pid=2, started=0.0, ready=True, namespaces=(waiting,))
    assert ask(server.address, "/readyz").code == 200


def test_a_node_that_does_not_says_why_in_a_line_each(daemon: Daemon, server: Server) -> None:
    bad = Standing(netns="red", state=State.FAILING, since=0.0, why="not permitted\x1b[2J\nreally")
    daemon.current = Status(
        version="1", pid=2, started=0.0, namespaces=(bad, *daemon.current.namespaces)
    )
    answer = ask(server.address, "/readyz")
    lines = answer.body.decode().splitlines()
    assert answer.code == 503
    assert len(lines) == 1
    assert "red" in lines[0]
    assert "not permitted" in lines[0]
    assert "\x1b" not in lines[0]
    daemon.current = Status(version="1", pid=2, started=0.0)
    assert "tried" in ask(server.address, "/readyz").body.decode()
    daemon.current = Status(version="1", pid=2, started=0.0, unreadable="/m cannot be read")
    assert ask(server.address, "/readyz").body.decode() == "/m cannot be read\n"


def test_the_index_names_every_page(server: Server) -> None:
    answer = ask(server.address, "/")
    pages = [line.split()[0] for line in answer.body.decode().splitlines()[1:]]
    assert pages == ["/metrics", "/healthz", "/readyz", "/status", "/wait"]
    assert {ask(server.address, page).code for page in pages} == {200}


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/metrics/", "/../etc/passwd", "/%6detrics", "x", "*", "http://[::1]/status"],
)
def test_there_is_nothing_else(server: Server, path: str) -> None:
    assert ask(server.address, path).code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_nothing_can_be_done_but_read(server: Server, method: str) -> None:
    answer = ask(server.address, "/metrics", method, b"x" * 200_000)
    assert answer.code == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_who_sends_more_than_is_read_still_gets_the_answer(server: Server) -> None:
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n")
        assert connection.recv(1, socket.MSG_PEEK) == b"H"  # it is answered already
        for _ in range(20):
            connection.sendall(b"x" * 100_000)
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection).startswith(b"HTTP/1.0 405 ")


def test_head_has_the_headers_of_get_and_no_body(server: Server) -> None:
    for path in ("/metrics", "/healthz", "/readyz", "/status", "/", "/nothing"):
        got, head = ask(server.address, path), ask(server.address, path, "HEAD")
        assert head.code == got.code
        assert head.body == b""
        assert head.headers["Content-Length"] == str(len(got.body))


@pytest.mark.parametrize("path", ["/metrics", "/status", "/nothing", "/readyz"])
def test_no_answer_names_the_server_or_may_be_kept(server: Server, path: str) -> None:
    headers = ask(server.address, path).headers
    assert "Server" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_what_breaks_inside_is_one_line_in_the_log(
    daemon: Daemon, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon.text = lambda: bytes(1 // 0)
    answer = ask(server.address, "/metrics")
    assert answer.code == 500
    assert b"Traceback" not in answer.body
    assert b"division" not in answer.body
    (line,) = daemon.lines
    assert line.startswith("/metrics could not be answered: ZeroDivisionError")
    assert ask(server.address, "/healthz").code == 200
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------- hostile

GARBAGE = [
    b"\0" * 100 + b"\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/x\r\n\r\n",
    b"GET / SPDY/1.1\r\n\r\n",
    b"GET / HTTP/1.1 and more\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"A" * 1_000_000,
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:20]))
def test_garbage_is_refused_in_words_of_ours(
    daemon: Daemon, server: Server, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        answer = send(server.address, data)
    except (BrokenPipeError, ConnectionResetError):  # there was more of it than is listened to
        assert len(data) >= 500_000
    else:
        assert answer.startswith((b"HTTP/1.0 4", b"HTTP/1.0 505"))
        assert b"GARBAGE" not in answer
        assert b"nosniff" in answer
    assert ask(server.address, "/healthz").code == 200
    assert daemon.lines == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "data",
    [b"GET /healthz HTTP/1.0\n\n", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz\r\n\r\n"],
)
def test_a_sloppy_request_is_understood(server: Server, data: bytes) -> None:
    assert send(server.address, data).endswith(b"\r\n\r\nok\n")


def test_who_says_nothing_and_goes_is_nobody(daemon: Daemon, server: Server) -> None:
    for _ in range(50):
        assert eventually(lambda: send(server.address, b"") == b"")
    assert daemon.lines == []
    assert ask(server.address, "/healthz").code == 200


def test_who_goes_before_the_answer_is_no_line_in_the_log(
    daemon: Daemon, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon.text = lambda: b"x" * 20_000_000
    for _ in range(10):
        connection = socket.create_connection(server.address)
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    assert eventually(lambda: ask(server.address, "/healthz").code == 200)
    assert eventually(lambda: at_work() == 1)
    assert daemon.lines == []
    assert capfd.readouterr() == ("", "")


def at_work() -> int:
    """How many threads listen or answer."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name == "http" or "process_request_thread" in name for name in names)


def test_who_sends_a_byte_now_and_then_has_no_more_time_than_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    with socket.create_connection(server.address, timeout=0.05) as connection:
        start = time.monotonic()
        answer = b""
        for _ in range(200):
            connection.send(b"G")
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            break
        assert answer.startswith(b"HTTP/1.0 408 ")
        assert 0.4 < time.monotonic() - start < 5


def test_who_does_not_read_the_answer_is_left(
    daemon: Daemon, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    daemon.text = lambda: b"x" * 20_000_000
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert eventually(lambda: at_work() == 2)
        assert eventually(lambda: at_work() == 1)
    assert daemon.lines == []


@contextmanager
def silent(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send half a request."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(count)
        ]
        for one in made:
            one.send(b"GET /metr")
        yield made


def test_who_says_nothing_keeps_nobody_out_and_is_hung_up_on(server: Server) -> None:
    with silent(server.address, MOST_CONNECTIONS) as held:
        assert eventually(lambda: at_work() == MOST_CONNECTIONS + 1)
        for _ in range(3):
            assert ask(server.address, "/healthz").code == 200
        assert at_work() <= MOST_CONNECTIONS + 1
        assert held[0].recv(1) == b"", "the one that was silent for longest"
        held[-1].sendall(b"ics HTTP/1.0\r\n\r\n")
        assert everything(held[-1]).startswith(b"HTTP/1.0 200 ")
    assert eventually(lambda: at_work() == 1)


def test_who_does_not_read_the_answer_keeps_nobody_out(daemon: Daemon, server: Server) -> None:
    daemon.text = lambda: b"x" * 20_000_000
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(server.address))
            one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert eventually(lambda: at_work() == MOST_CONNECTIONS + 1)
        time.sleep(0.2)  # until all are being answered
        for _ in range(3):
            assert ask(server.address, "/healthz").code == 200


def test_however_many_do_not_read_a_large_status_it_is_there_once(
    daemon: Daemon, server: Server
) -> None:
    size = 10_000_000
    daemon.current = replace(daemon.current, source="x" * size)
    tracemalloc.start()
    try:
        with ExitStack() as stack:
            for _ in range(MOST_CONNECTIONS):
                one = stack.enter_context(socket.create_connection(server.address))
                one.sendall(b"GET /status HTTP/1.0\r\n\r\n")
                assert one.recv(1) == b"H"
            assert tracemalloc.get_traced_memory()[0] < 3 * size
    finally:
        tracemalloc.stop()
    daemon.current = replace(daemon.current, source="y")
    assert json.loads(ask(server.address, "/status").body) == status_json(daemon.current)


def test_only_so_many_are_served_at_once_and_then_others_again(
    daemon: Daemon, server: Server
) -> None:
    release = threading.Event()

    def slowly() -> bytes:
        release.wait(20)
        return b""

    daemon.text = slowly
    with silent(server.address, MOST_CONNECTIONS) as held:
        for one in held:
            one.sendall(b"ics HTTP/1.0\r\n\r\n")
        assert eventually(lambda: at_work() == MOST_CONNECTIONS + 1)
        time.sleep(0.2)  # until all are read
        with socket.create_connection(server.address, timeout=20) as one:
            answer = everything(one)
        assert answer == b"" or answer.startswith(b"HTTP/1.0 503 ")
        assert at_work() == MOST_CONNECTIONS + 1
        release.set()
        assert everything(held[0]).startswith(b"HTTP/1.0 200 ")
        assert ask(server.address, "/healthz").code == 200
    assert eventually(lambda: at_work() == 1)


def test_thirty_who_ask_at_once_are_answered_or_refused(daemon: Daemon, server: Server) -> None:
    codes: list[int] = []

    def curious() -> None:
        try:
            codes.append(ask(server.address, "/metrics").code)
        except (OSError, http.client.HTTPException):
            codes.append(0)

    threads = [threading.Thread(target=curious) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(codes) == 30
    assert set(codes) <= {0, 200, 503}
    assert codes.count(200) >= 1
    assert ask(server.address, "/healthz").code == 200
    assert daemon.lines == []


# ------------------------------------------------------------------------- listening, and ending


def test_it_sleeps_while_nobody_asks(server: Server) -> None:
    assert ask(server.address, "/healthz").code == 200
    assert eventually(lambda: at_work() == 1)
    (thread,) = [one for one in threading.enumerate() if one.name == "http"]
    switches = Path(f"/proc/self/task/{thread.native_id}/status")

    def woken() -> int:
        return int(switches.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def is_still() -> bool:
        before = woken()
        return not eventually(lambda: woken() > before, 0.8)

    assert eventually(is_still)


def test_it_listens_on_ipv6(daemon: Daemon) -> None:
    with closing(daemon.serve("::1")) as made:
        assert made.address[0] == "::1"
        assert ask(made.address, "/healthz").code == 200


@pytest.mark.parametrize(("host", "ask_at"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_it_listens_on_every_address(daemon: Daemon, host: str, ask_at: str) -> None:
    with closing(daemon.serve(host)) as made:
        assert ask((ask_at, made.address[1]), "/healthz").code == 200


def test_it_listens_by_name(daemon: Daemon) -> None:
    with closing(daemon.serve("localhost")) as made:
        assert ask(made.address, "/healthz").code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_in_use_is_named_with_the_way_out(daemon: Daemon, host: str) -> None:
    with closing(daemon.serve(host)) as made, pytest.raises(Failure) as failure:
        daemon.serve(host, made.address[1])
    said = str(failure.value)
    assert f"{host}:{made.address[1]}".replace("::1:", "[::1]:") in said
    assert "listen" in said
    assert "configuration" in said


def test_an_address_that_is_not_ours_is_said_so(daemon: Daemon) -> None:
    with pytest.raises(Failure, match=r"192\.0\.2\.77") as failure:
        daemon.serve("192.0.2.77")
    assert not isinstance(failure.value, NotPermitted)


def test_a_port_can_be_taken_again_at_once(daemon: Daemon) -> None:
    made = daemon.serve()
    with socket.create_connection(made.address) as connection:  # which lingers on our side
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert everything(connection).endswith(b"ok\n")
    made.close()
    with closing(daemon.serve(port=made.address[1])) as again:
        assert again.address == made.address
        assert ask(again.address, "/healthz").code == 200


def test_it_ends_at_once_also_with_connections_open(daemon: Daemon) -> None:
    made = daemon.serve()
    with silent(made.address, 8) as held:
        assert eventually(lambda: at_work() == 9)
        start = time.monotonic()
        made.close()
        assert time.monotonic() - start < 4
        for one in held:
            assert everything(one) == b""
    assert eventually(lambda: at_work() == 0)
    with pytest.raises(ConnectionRefusedError):
        ask(made.address, "/healthz")
    made.close()  # a second time does nothing
