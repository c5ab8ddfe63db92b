"""One connection to an API server: straight to it, kept alive, and such that another thread can
interrupt whoever waits for an answer."""

import http.client
import socket
from contextlib import suppress

from agent.sources.credentials import Credentials
from agent.sources.websocket import PING, framed

CONNECTING = 10.0  # seconds
KEEPALIVE = (  # a server that died without a word is found out in half a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Connection(http.client.HTTPConnection):
    """To the server itself, whatever proxies the environment names."""

    def __init__(self, credentials: Credentials, patience: float) -> None:
        endpoint = credentials.endpoint
        super().__init__(endpoint.host, endpoint.port, timeout=min(CONNECTING, patience))
        self._credentials = credentials
        self._ours: socket.socket | None = None  # http.client forgets it with the last answer

    def connect(self) -> None:
        context = self._credentials.tls()
        sock = socket.create_connection((self.host, self.port), self.timeout)
        try:
            for option in KEEPALIVE:
                sock.setsockopt(*option)
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname=self._credentials.server_name)
        except BaseException:
            sock.close()
            raise
        self.sock = self._ours = sock

    def be_patient(self, seconds: float) -> None:
        """How long to wait for the next byte."""
        if self._ours is not None:
            self._ours.settimeout(seconds)

    def heard(self, most: int, quiet: float, answer: float) -> bytes:
        """What comes next; after some silence a ping is sent, which is to be answered in time."""
        if self._ours is None:
            return b""
        try:
            self.be_patient(quiet)
            return self._ours.recv(most)
        except TimeoutError:
            self.be_patient(answer)
            self.say(framed(PING))
            return self._ours.recv(most)

    def say(self, data: bytes) -> None:
        """Send something while an answer is read."""
        if self._ours is not None:
            self._ours.sendall(data)

    def interrupt(self) -> None:
        """Ends what another thread waits for; TLS is left out, whose state is that thread's."""
        if self._ours is not None:
            with suppress(OSError):  # it is closed already
                socket.socket.shutdown(self._ours, socket.SHUT_RDWR)
