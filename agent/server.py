"""What others may ask the daemon over HTTP: metrics, health and status.

It reads and never changes anything. Whoever reaches the port may send what they like: a request is
short, has little time and is one of a few at once, and nothing of it is ever repeated.
"""

import contextlib
import errno
import json
import socket
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Event, Lock, Semaphore, Thread
from typing import Any

from agent.errors import Failure, NotPermitted
from agent.status import State, Status, status_json
from rules.problems import printable
from rules.values import Value

MOST_CONNECTIONS = 16
PATIENCE = 5.0  # seconds for a request to come, and again for its answer to go
LINGER = 1.0  # seconds for whoever still sends to read the answer
LONGEST_REQUEST = 16 << 10
TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
INDEX = """\
portranger
/metrics  for Prometheus
/healthz  whether the loop is alive
/readyz   whether every namespace is served
/status   how everything stands, as JSON; `portranger status` prints it
"""


class Page(Value):
    """An answer."""

    code: int
    body: bytes
    kind: str = TEXT


class Pages:
    """What there is to see. `beat` is the monotonic time at which the loop last gave a sign, and
    `limit` how many seconds it may be silent."""

    def __init__(
        self,
        *,
        status: Callable[[], Status],
        beat: Callable[[], float],
        limit: float,
        metrics_text: Callable[[], bytes],
    ) -> None:
        self._status = status
        self._beat = beat
        self._limit = limit
        self._metrics_text = metrics_text

    def page(self, path: str) -> Page:
        match path:
            case "/":
                return _text(HTTPStatus.OK, INDEX)
            case "/metrics":
                return Page(HTTPStatus.OK, self._metrics_text(), METRICS)
            case "/healthz":
                return self._health()
            case "/readyz":
                return self._readiness()
            case "/status":
                body = json.dumps(status_json(self._status())).encode()
                return Page(HTTPStatus.OK, body, "application/json")
            case _:
                return _text(HTTPStatus.NOT_FOUND, "There is no such page; / lists them all.\n")

    def _health(self) -> Page:
        silent = time.monotonic() - self._beat()
        if silent < self._limit:
            return _text(HTTPStatus.OK, "ok\n")
        words = f"The loop has been stuck for {silent:.0f} s; {self._limit:.0f} s are allowed.\n"
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, words)

    def _readiness(self) -> Page:
        status = self._status()
        reasons = [printable(status.unreadable, 1000)] if status.unreadable else []
        reasons += [
            printable(f"Namespace {one.netns} is failing: {one.why or 'no reason given'}", 1000)
            for one in status.namespaces
            if one.state is State.FAILING
        ]
        if not status.ready and not reasons:
            reasons = ["Not every namespace has been tried yet."]
        if reasons:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{x}\n" for x in reasons))
        return _text(HTTPStatus.OK, "ready\n")


def _text(code: int, text: str) -> Page:
    return Page(code, text.encode("utf-8", "replace"))


class Server:
    """Listens from the moment it is made until it is closed."""

    def __init__(  # noqa: PLR0913 - what is served, each by its name
        self,
        host: str,
        port: int,
        *,
        status: Callable[[], Status],
        beat: Callable[[], float],
        metrics_text: Callable[[], bytes],
        log: Callable[[str], None],
        limit: float = 60.0,
    ) -> None:
        pages = Pages(status=status, beat=beat, limit=limit, metrics_text=metrics_text)
        try:
            family, address = _resolved(host, port)
            self._listener = _Listener(family, address, pages, log)
        except PermissionError as error:
            raise NotPermitted(
                f"may not listen on {_named(host, port)}",
                "It takes CAP_NET_BIND_SERVICE for a port below 1024; " + WAY_OUT,
            ) from error
        except OSError as error:
            raise Failure(
                f"cannot listen on {_named(host, port)}: {_reason(error)}", WAY_OUT
            ) from error
        bound = self._listener.socket.getsockname()
        self.address: tuple[str, int] = bound[0], bound[1]  # a real port, also where any would do
        self._thread = Thread(target=self._listener.serve, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, also in the middle of answers."""
        self._listener.stop()
        self._thread.join(LINGER / 2)
        self._listener.server_close()


WAY_OUT = 'set another address with listen in the configuration, or "" for none'


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    found = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )
    family, _, _, _, address = found[0]
    return family, address


def _named(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return error.strerror or str(error)


class _Listener(ThreadingMixIn, TCPServer):
    """A thread for each connection, and no more than a few connections."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # what is left of connections to our predecessor
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        pages: Pages,
        log: Callable[[str], None],
    ) -> None:
        self.address_family = family
        self.pages = pages
        self.log = log
        self._free = Semaphore(MOST_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = Lock()
        self._stopping = Event()
        super().__init__(address, _Exchange)

    def serve(self) -> None:
        """Until `stop`; without waking up when nobody asks."""
        while not self._stopping.is_set():
            self.handle_request()

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for connection in (self.socket, *self._open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Where we are out of descriptors, the connection goes on waiting, and so must we.
            self._stopping.wait(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            request.settimeout(0)
            with contextlib.suppress(OSError):
                request.send(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        try:
            if self._stopping.is_set():
                self.shutdown_request(request)
            else:
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.discard(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - not ours
        error = sys.exception()
        if not isinstance(error, OSError):  # else whoever asked has gone
            self.log(f"an answer over HTTP failed: {error!r}")


class _Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: _Listener

    def setup(self) -> None:
        """Read the request as a whole: who sends a byte now and then has no more time than others.
        The answer is written down as a whole, too, and sent at the end."""
        self.command = ""
        self._problem, head = _received(self.request)
        self._written = BytesIO()
        self.rfile, self.wfile = BytesIO(head), self._written

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if self._problem is not None:
            self.send_error(self._problem)
        elif self.raw_requestline and self.parse_request():
            self._answer(self._page())

    def finish(self) -> None:
        """Send the answer, and let whoever still sends read it before the connection is reset."""
        connection = self.request
        connection.settimeout(PATIENCE)
        connection.sendall(self._written.getvalue())
        connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(LONGEST_REQUEST):
                return

    def _page(self) -> Page:
        if self.command not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are all there is.\n")
        path = self.path.partition("?")[0]
        try:
            return self.server.pages.page(path)
        except Exception as error:  # whatever it is, the next one may ask again
            self.server.log(printable(f"{path} could not be answered: {error!r}", 1000))
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "Something went wrong: see the log.\n")

    def _answer(self, page: Page) -> None:
        self.request_version = self.protocol_version  # or garbage would get no status line
        self.send_response_only(page.code)
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Connection", "close")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if page.code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - they repeat the garbage
        """What is wrong with a request, as parse_request or we found."""
        self._answer(_text(code, f"{HTTPStatus(code).phrase}\n"))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the library
        """Nothing: it would be a line for every scrape."""


def _received(connection: socket.socket) -> tuple[HTTPStatus | None, bytes]:
    """A request without its body, or what is wrong with it."""
    deadline = time.monotonic() + PATIENCE
    head = b""
    while not (b"\r\n\r\n" in head or b"\n\n" in head):
        left = deadline - time.monotonic()
        if left <= 0:
            return HTTPStatus.REQUEST_TIMEOUT, b""
        if len(head) > LONGEST_REQUEST:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""
        connection.settimeout(left)
        try:
            more = connection.recv(4096)
        except TimeoutError:
            return HTTPStatus.REQUEST_TIMEOUT, b""
        if not more:
            break
        head += more
    return None, head
