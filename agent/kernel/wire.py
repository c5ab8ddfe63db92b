"""Messages between the agent and its worker processes: JSON with its length in front, and with a
request the descriptor of the namespace it is about."""

import json
import socket
import struct

LENGTH = struct.Struct("=I")


def send(channel: socket.socket, message: object, descriptor: int | None = None) -> None:
    """One message."""
    data = json.dumps(message).encode()
    header = LENGTH.pack(len(data))
    if descriptor is None:
        channel.sendall(header + data)
    else:
        socket.send_fds(channel, [header], [descriptor])
        channel.sendall(data)


def exactly(channel: socket.socket, size: int) -> bytes:
    """That many bytes, however they arrive."""
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed")
        data += piece
    return bytes(data)
