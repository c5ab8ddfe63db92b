"""WebSocket (RFC 6455), as much of it as a client needs that only listens: the handshake, messages
from the server, and pings. Pure.

The API server answers a ping from the very process that serves the watch. Over plain HTTP/1.1 a
watch of an idle cluster is silent, and one that hangs looks the same.
"""

import base64
import os
from collections.abc import Iterator
from hashlib import sha1

from rules.values import Value

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FINAL, _MASKED = 0x80, 0x80
_LENGTH = 0x7F
_TWO, _EIGHT = 126, 127  # in place of a length: it follows, in so many bytes
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_CONTROL = 0x8  # the kinds that are not parts of messages
_MOST_CONTROL = 125  # bytes


class Broken(ValueError):
    """What came is no WebSocket, or more than is read."""


class Frame(Value):
    """A whole message, or one of those about the connection."""

    kind: int
    data: bytes


def handshake(key: str, origin: str) -> dict[str, str]:
    """The headers that ask for it."""
    return {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
        "Origin": origin,
    }


def new_key() -> str:
    return base64.b64encode(os.urandom(16)).decode()


def is_accepted(key: str, accepted: str) -> bool:
    """Whether an answer that accepts this is one to the handshake with that key."""
    return accepted == accepting(key)


def accepting(key: str) -> str:
    """What a server answers that has read the key."""
    return base64.b64encode(sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def framed(kind: int, data: bytes = b"") -> bytes:
    """A control frame of a client, which has to be masked."""
    mask = os.urandom(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data[:_MOST_CONTROL]))
    return bytes((_FINAL | kind, _MASKED | len(masked))) + mask + masked


class Frames:
    """What the pieces that come from a server amount to."""

    def __init__(self, most: int) -> None:
        """A message may have so many bytes."""
        self._most = most
        self._left = bytearray()
        self._message = bytearray()  # the parts of one that has not ended

    def of(self, piece: bytes) -> Iterator[Frame]:
        """The frames that end in this piece."""
        self._left += piece
        while (found := self._next()) is not None:
            final, kind, data = found
            if kind >= _CONTROL:
                yield Frame(kind, data)
                continue
            self._message += data
            if len(self._message) > self._most:
                raise Broken(f"a message has more than {self._most >> 20} MiB")
            if final:
                whole = bytes(self._message)
                self._message.clear()
                yield Frame(TEXT, whole)

    def _next(self) -> tuple[bool, int, bytes] | None:
        """The first frame, taken off; None: it is not all there yet."""
        left = self._left
        if len(left) < 2:
            return None
        final, kind, length, start = bool(left[0] & _FINAL), left[0] & 0xF, left[1] & _LENGTH, 2
        if left[1] & _MASKED or left[0] & 0x70:
            raise Broken("a frame is masked or extended, as none of a server is here")
        if length in (_TWO, _EIGHT):
            start += 2 if length == _TWO else 8
            if len(left) < start:
                return None
            length = int.from_bytes(left[2:start])
        if length > self._most:
            raise Broken(f"a frame has more than {self._most >> 20} MiB")
        if len(left) < start + length:
            return None
        data = bytes(left[start : start + length])
        del left[: start + length]
        return final, kind, data
