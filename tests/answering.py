"""A real HTTP server that says what a test tells it to, byte for byte: for what a well-behaved API
server never does, or not when one is looking."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rules.values import Value
from tests.spaces import run

LOOPBACK = "127.0.0.1"
PATIENCE = 10.0  # seconds

Json = Any


class Asked(Value, kw_only=True):
    """A request."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Json
    connection: int  # the port it came from: the same for the same connection


Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Asks the server what to say."""

    protocol_version = "HTTP/1.1"
    server: Answering

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        self.server.asked.append(
            Asked(
                method=self.command,
                path=parts.path,
                query=dict(parse_qsl(parts.query, keep_blank_values=True)),
                headers=dict(self.headers.items()),
                body=json.loads(body) if body else None,
                connection=self.client_address[1],
            )
        )
        answer = self.server.next_answer()
        with suppress(OSError):  # who asked may have hung up, on purpose
            answer(self)

    do_GET = do_POST = do_PATCH = _any  # noqa: N815 - names that http.server looks for

    def log_message(self, *_: object) -> None:
        """Tests have their own words."""


class Answering(ThreadingHTTPServer):
    """The server; `asked` is what it was asked."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.over = threading.Event()
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._then: Answer | None = None
        self._context = context
        super().__init__((LOOPBACK, 0), Handler)

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://{LOOPBACK}:{self.server_port}"

    def will(self, *answers: Answer) -> None:
        """Give these answers, one a request."""
        for answer in answers:
            self._answers.put(answer)

    def then(self, answer: Answer) -> None:
        """Give this one to whatever is asked after them."""
        self._then = answer

    def next_answer(self) -> Answer:
        if self._then is not None and self._answers.empty():
            return self._then
        return self._answers.get(timeout=PATIENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up at any time; whatever else goes wrong is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._context is not None:
            try:
                request = self._context.wrap_socket(request, server_side=True)
            except OSError:
                return  # the client does not trust us
        super().finish_request(request, client_address)
        if self._context is not None:
            with suppress(OSError):
                request.close()


@contextmanager
def answering(context: ssl.SSLContext | None = None) -> Iterator[Answering]:
    """A server that runs until the block ends."""
    with Answering(context) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join(PATIENCE)


# ------------------------------------------------------------------------------------- answers


def said(body: Json, status: int = 200, **headers: str) -> Answer:
    """A whole answer, of a length that is told."""

    def answer(handler: Handler) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def refused(status: int, message: str = "", cause: str = "", **headers: str) -> Answer:
    """As the API server refuses."""
    details = {"causes": [{"reason": cause}]} if cause else {}
    body = {"kind": "Status", "code": status, "message": message, "details": details}
    return said(body, status, **headers)


def streamed(*pieces: bytes, whole: bool = True, hold: bool = False) -> Answer:
    """In chunks as they are written here; with their end or without; before that, for as long as
    the server lasts."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
        if hold:
            handler.server.over.wait(PATIENCE)
        if whole:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = not whole

    return answer


def raw(content: bytes) -> Answer:
    """Exactly these bytes, and no more."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(content)
        handler.close_connection = True

    return answer


def hung_up(handler: Handler) -> None:
    """Nothing at all."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def silent(handler: Handler) -> None:
    """Nothing, for as long as the server lasts."""
    handler.server.over.wait(PATIENCE)
    handler.close_connection = True


def closing(answer: Answer) -> Answer:
    """After which the connection is closed, which the client is not told."""

    def closed(handler: Handler) -> None:
        answer(handler)
        handler.close_connection = True

    return closed


def line(kind: str, thing: Json) -> bytes:
    """An event of a watch."""
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


# ---------------------------------------------------------------------------------- certificates


class Authority:
    """Who makes certificates; everything is in one directory."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self._made("ca", "-x509", "/CN=test authority", "basicConstraints=critical,CA:TRUE")

    @property
    def certificate(self) -> str:
        return str(self.folder / "ca.crt")

    def server(self, names: str = f"IP:{LOOPBACK},DNS:api.example") -> ssl.SSLContext:
        """For a server of these names; it looks at the certificates of its clients, if any."""
        certificate, key = self.signed("server", "/CN=server", f"subjectAltName={names}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(self.certificate)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def signed(self, name: str, subject: str, extension: str = "") -> tuple[str, str]:
        """The paths of a new certificate and its key."""
        return self._made(
            name, "-CA", self.certificate, "-CAkey", str(self.folder / "ca.key"),
            subject, extension or "extendedKeyUsage=clientAuth",
        )  # fmt: skip

    def _made(self, name: str, *words: str) -> tuple[str, str]:
        *options, subject, extension = words
        certificate, key = str(self.folder / f"{name}.crt"), str(self.folder / f"{name}.key")
        if options[0] == "-CA":
            options = ["-x509", *options]
        run(
            "openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", subject, "-addext", extension,
            "-keyout", key, "-out", certificate, *options,
        )  # fmt: skip
        return certificate, key
