"""Small servers and clients inside namespaces: proof by packet that a port is forwarded."""

import selectors
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from agent.kernel.lab import Lab
from rules.model import Address, Family, Protocol

KINDS = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}
PATIENCE = 2.0  # seconds; an answer takes far less than a thousandth of that


@contextmanager
def echoing(lab: Lab, where: str, ports: Iterable[tuple[Protocol, int]]) -> Iterator[None]:
    """Servers on these ports of that namespace that answer with their own port number and back."""
    with selectors.DefaultSelector() as selector:
        wake, woken = socket.socketpair()
        selector.register(woken, selectors.EVENT_READ, "stop")
        for protocol, port in ports:
            for family in Family:
                server = lab.socket(where, family, KINDS[protocol])
                selector.register(server, selectors.EVENT_READ, (protocol, port))
                if family is Family.IP6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("::" if family is Family.IP6 else "0.0.0.0", port))
                if protocol is Protocol.TCP:
                    server.listen(64)
                server.setblocking(False)
        thread = threading.Thread(target=_serve, args=(selector,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            wake.send(b"x")
            thread.join(PATIENCE)
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
            wake.close()


def _serve(selector: selectors.BaseSelector) -> None:
    while True:
        for key, _ in selector.select():
            if key.data == "stop":
                return
            with_peer: socket.socket = key.fileobj  # type: ignore[assignment]
            protocol, port = key.data
            try:
                _answer(selector, with_peer, protocol, port)
            except OSError:
                continue  # the client went away: its own test will say so


def _answer(
    selector: selectors.BaseSelector, server: socket.socket, protocol: Protocol | None, port: int
) -> None:
    if protocol is Protocol.TCP:
        connection, _ = server.accept()
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, (None, port))
    elif protocol is Protocol.UDP:
        data, peer = server.recvfrom(2048)
        server.sendto(_reply(port, data), peer)
    else:
        data = server.recv(2048)
        if data:
            server.sendall(_reply(port, data))
        else:
            selector.unregister(server)
            server.close()


def _reply(port: int, data: bytes) -> bytes:
    return b"%d:%s" % (port, data)


def connected(lab: Lab, where: str, to: Address, protocol: Protocol, port: int) -> socket.socket:
    """A flow from that namespace; for TCP the handshake is done."""
    client = lab.socket(where, Family.of(to), KINDS[protocol])
    client.settimeout(PATIENCE)
    try:
        client.connect((str(to), port))
    except OSError:
        client.close()
        raise
    return client


def asks(client: socket.socket, words: bytes = b"hello") -> int:
    """The port of the server that answers over this flow."""
    client.send(words)
    answer = client.recv(2048)
    port, _, said = answer.partition(b":")
    if said != words:
        raise OSError(f"a garbled answer: {answer!r}")
    return int(port)


def reached(lab: Lab, where: str, to: Address, protocol: Protocol, port: int) -> int | None:
    """The port of the guest that answered, or None where nobody did."""
    try:
        with connected(lab, where, to, protocol, port) as client:
            return asks(client)
    except OSError:
        return None
