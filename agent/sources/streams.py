"""The stream of a watch, cut into its events: the lines of an answer that goes on, or the messages
of a WebSocket."""

import http.client
import time
from collections.abc import Callable, Iterator

from agent.sources.connection import Connection
from agent.sources.websocket import CLOSE, PING, PONG, TEXT, Frames, framed

PIECE = 64 << 10

Count = Callable[[int], None]  # is told how many bytes came


class TooLarge(ValueError):
    """An event that has more than is read."""


def lines(
    response: http.client.HTTPResponse, most: int, deadline: float, count: Count
) -> Iterator[bytes]:
    """Each of so many bytes at most, until then. What has no end has not happened yet."""
    line = bytearray()
    while piece := response.read1(PIECE):
        count(len(piece))
        *ended, rest = piece.split(b"\n")
        for end in ended:
            line += end
            if line.strip():
                yield bytes(line)
            line.clear()
        line += rest
        if len(line) > most:
            raise TooLarge(f"an event has more than {most >> 20} MiB")
        if time.monotonic() > deadline:
            return


def messages(  # noqa: PLR0913, PLR0917 - the stream, and its limits
    connection: Connection,
    response: http.client.HTTPResponse,
    most: int,
    deadline: float,
    silence: tuple[float, float],
    count: Count,
) -> Iterator[bytes]:
    """The same of a WebSocket. After so many seconds of silence a ping is sent, and something has
    to come in so many more: else it raises TimeoutError."""
    quiet, answer = silence
    frames = Frames(most)
    connection.be_patient(answer)
    connection.say(framed(PING))  # so that what was read ahead with the head has an end
    piece = response.fp.read1(PIECE)
    while piece:
        count(len(piece))
        for frame in frames.of(piece):
            if frame.kind == TEXT:
                yield frame.data
            elif frame.kind == CLOSE:
                return
            elif frame.kind == PING:
                connection.say(framed(PONG, frame.data))
        if time.monotonic() > deadline:
            return
        piece = connection.heard(PIECE, quiet, answer)
