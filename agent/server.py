"""What others may ask the daemon over HTTP: metrics, health and status, and a page for people.

It reads and never changes anything. Whoever reaches the port may send what they like: a request is
short, has little time and is one of a few at once, and nothing of it is ever repeated. A browser
may be sent here by a stranger: it is told to run, load and show nothing but what comes from here,
and where we listen on loopback, it must have asked for loopback.
"""

import contextlib
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from ipaddress import ip_address
from socketserver import TCPServer, ThreadingMixIn
from threading import Event, Lock, Semaphore, Thread
from typing import Any

from agent import waiting
from agent.errors import Failure, NotPermitted
from agent.pages import Page, Pages, text
from agent.status import Status
from agent.waiting import Bell
from rules.problems import printable
from rules.values import replace

MOST_CONNECTIONS = 16
PATIENCE = 5.0  # seconds for a request to come, and again for its answer to go
LINGER = 1.0  # seconds for whoever still sends to read the answer
LONGEST_REQUEST = 16 << 10
POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the icon in the tab, which tells how the node stands
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
ALWAYS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": POLICY,
    "Vary": "Accept",
}
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Busy(Failure):
    """Somebody else listens there."""


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
        bell: Bell | None = None,
    ) -> None:
        """`bell` rings when there is another status."""
        pages = Pages(status=status, beat=beat, limit=limit, metrics_text=metrics_text)
        try:
            family, address = _resolved(host, port)
            self._listener = _Listener(family, address, pages, log, host)
            self._listener.bell = bell or Bell()
        except PermissionError as error:
            raise NotPermitted(
                f"may not listen on {_named(host, port)}",
                "It takes CAP_NET_BIND_SERVICE for a port below 1024; " + WAY_OUT,
            ) from error
        except OSError as error:
            kind = Busy if error.errno == errno.EADDRINUSE else Failure
            raise kind(
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


ELSEWHERE = "This is loopback: ask for localhost, or for an address.\n"
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
    bell: Bell

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        pages: Pages,
        log: Callable[[str], None],
        host: str,
    ) -> None:
        self.address_family = family
        self.pages = pages
        self.names = frozenset({host.lower(), "localhost"}) if _is_loopback(address[0]) else None
        self.log = log
        self._free = Semaphore(MOST_CONNECTIONS)
        self._open: dict[socket.socket, bool] = {}  # eldest first; whether we wait for them
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
        if not self._free.acquire(blocking=False) and not self._relieved():
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

    def _relieved(self) -> bool:
        """Hang up on who has kept us waiting longest: who says nothing keeps nobody else out."""
        with self._lock:
            waited = next((one for one, waiting in self._open.items() if waiting), None)
            if waited is not None:
                self._open[waited] = False
                with contextlib.suppress(OSError):
                    waited.shutdown(socket.SHUT_RDWR)
        return waited is not None and self._free.acquire(timeout=LINGER)

    def awaits(self, request: Any, waiting: bool) -> None:
        """Whether it is they who have to do something now, and not we."""
        with self._lock:
            if request in self._open:
                self._open[request] = waiting

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = True
        try:
            if self._stopping.is_set():
                self.shutdown_request(request)
            else:
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[request]
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
        The answer is written down as a whole, too, and sent at the end; its body is not copied, as
        others may get the same."""
        self.command = ""
        self._problem, head = _received(self.request)
        self.server.awaits(self.request, False)
        self._written, self._body = BytesIO(), b""
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
        self.server.awaits(connection, True)  # now it is for them to read
        connection.settimeout(PATIENCE)
        connection.sendall(self._written.getvalue())
        connection.sendall(self._body)
        connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(LONGEST_REQUEST):
                return

    def _page(self) -> Page:
        if self.command not in ("GET", "HEAD"):
            return text(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are all there is.\n")
        if not _is_meant(self.headers.get_all("Host", []), self.server.names):
            return text(HTTPStatus.MISDIRECTED_REQUEST, ELSEWHERE)
        path, _, query = self.path.partition("?")
        try:
            if path == "/wait":
                return self._waited(query)
            html = "text/html" in self.headers.get("Accept", "")
            return self.server.pages.page(path, html=html)
        except Exception as error:  # whatever it is, the next one may ask again
            self.server.log(printable(f"{path} could not be answered: {error!r}", 1000))
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "Something went wrong: see the log.\n")

    def _waited(self, query: str) -> Page:
        """Answer once that is applied, or its time is up, or the client is gone. Meanwhile it gives
        way to others where connections are scarce."""
        try:
            asked = waiting.question(query)
        except ValueError as error:
            return text(HTTPStatus.BAD_REQUEST, printable(f"{error}\n", 200))
        deadline = time.monotonic() + asked.seconds
        with self.server.bell.heard() as bell:
            poll = select.poll()
            poll.register(bell, select.POLLIN)
            poll.register(self.request, select.POLLIN)
            self.server.awaits(self.request, True)
            while True:
                verdict, page = self.server.pages.waited(asked)
                left = deadline - time.monotonic()
                if verdict.done or verdict.rejected or verdict.unsupported or left <= 0:
                    break
                if verdict.revision and not (asked.files or asked.directory):
                    asked = replace(asked, revision=verdict.revision)
                if any(one != bell for one, _ in poll.poll(left * 1000)):
                    break  # hung up, by them or by us
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(bell)
            self.server.awaits(self.request, False)
            return page

    def _answer(self, page: Page) -> None:
        self.request_version = self.protocol_version  # or garbage would get no status line
        self.send_response_only(page.code)
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in ALWAYS.items():
            self.send_header(name, value)
        if page.code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self._body = page.body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - they repeat the garbage
        """What is wrong with a request, as parse_request or we found."""
        self._answer(text(code, f"{HTTPStatus(code).phrase}\n"))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the library
        """Nothing: it would be a line for every scrape."""


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _is_meant(hosts: Sequence[str], names: frozenset[str] | None) -> bool:
    """Whether a request is for us. A name that leads to loopback today is whoever's it is in DNS:
    with it, a page from there could read what we answer (DNS rebinding). An address is nobody's,
    and who names no host is no browser."""
    if names is None or not hosts:
        return True
    if len(hosts) > 1:
        return False
    name, _, port = hosts[0].strip().lower().rpartition(":")
    if not port.isdigit():  # none was given
        name = hosts[0].strip().lower()
    if name in names:
        return True
    try:
        return bool(ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


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
