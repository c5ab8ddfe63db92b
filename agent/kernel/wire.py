"""Messages between the agent and its worker processes: JSON with its length in front, and with a
request the descriptor of the namespace it is about."""

import json
import socket
import struct
import time

LENGTH = struct.Struct("=I")
LONGEST = 1 << 28  # a quarter of a gigabyte is a million rules


def send(channel: socket.socket, message: object, descriptor: int | None = None) -> None:
    """One message."""
    data = json.dumps(message).encode()
    header = LENGTH.pack(len(data))
    if descriptor is None:
        channel.sendall(header + data)
    else:
        socket.send_fds(channel, [header], [descriptor])
        channel.sendall(data)


def received(channel: socket.socket, patience: float) -> dict[str, object]:
    """One message, whole within that many seconds; raises for whatever else arrives."""
    deadline = time.monotonic() + patience
    size = LENGTH.unpack(exactly(channel, LENGTH.size, deadline))[0]
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(exactly(channel, size, deadline))
    if not isinstance(message, dict):
        raise TypeError("a message that is no mapping")
    return message


def exactly(channel: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """That many bytes, however they arrive."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = channel.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed")
        data += piece
    return bytes(data)
