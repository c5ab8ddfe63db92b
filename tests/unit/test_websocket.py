"""Watches over WebSockets: messages however they are cut, pings both ways, a server that hangs, and
those on the way who let no WebSocket through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.sources import api
from agent.sources.answers import Away, Denied, Gone
from agent.sources.api import Api
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.websocket import CLOSE, PING, PONG, TEXT, Broken, Frame, Frames, accepting
from tests.answering import Answering, Handler, answering, hung_up, line, raw, refused, streamed
from tests.spaces import eventually

Json = Any
PATH = "/api/v1/things"
ONE, TWO = line("ADDED", {"n": 1}), line("MODIFIED", {"n": 2})


def frame(data: bytes, kind: int = TEXT, *, final: bool = True) -> bytes:
    """As a server sends it."""
    size = len(data)
    length = bytes((min(size, 125),))
    if size > 125:
        length = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return bytes(((0x80 if final else 0) | kind,)) + length + data


class Socket:
    """The server's side; `heard` is what the client sent, without its mask."""

    def __init__(self, *pieces: bytes, answers: bool = True, end: bool = True) -> None:
        self._pieces, self._answers, self._end = pieces, answers, end
        self.heard: list[tuple[int, bytes]] = []
        self.more = threading.Event()

    def __call__(self, handler: Handler) -> None:
        key = handler.headers["Sec-WebSocket-Key"]
        head = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accepting(key)}\r\n\r\n"
        )
        first, *others = self._pieces or (b"",)
        handler.wfile.write(head.encode() + first)  # in one piece, as may happen
        for piece in others:
            handler.wfile.flush()
            handler.wfile.write(piece)
        if self._end:
            handler.wfile.write(frame(b"\x03\xe8", CLOSE))
        while not handler.server.over.is_set() and (got := self._next(handler)):
            self.heard.append(got)
            if got[0] == PING and self._answers:
                handler.wfile.write(frame(got[1], PONG))
        handler.close_connection = True

    def _next(self, handler: Handler) -> tuple[int, bytes] | None:
        head = handler.rfile.read(6)
        if len(head) < 6:
            return None
        assert head[1] & 0x80, "a client has to mask"
        data = handler.rfile.read(head[1] & 0x7F)
        return head[0] & 0xF, bytes(byte ^ head[2 + at % 4] for at, byte in enumerate(data))


@pytest.fixture
def server() -> Iterator[Answering]:
    with answering() as made:
        yield made


@pytest.fixture
def client(server: Answering) -> Iterator[Api]:
    made = Api(Credentials(endpoint(server.url), Plain()), patience=5.0)
    yield made
    made.close()


def watched(client: Api) -> list[object]:
    return [event.object["n"] for event in client.watch(PATH, {}, "7")]


# ----------------------------------------------------------------------------------------- frames


def all_of(*pieces: bytes, most: int = 1 << 20) -> list[Frame]:
    frames = Frames(most)
    return [one for piece in pieces for one in frames.of(piece)]


def test_messages_are_read_however_they_are_cut() -> None:
    long, longer = b"x" * 300, b"y" * 70_000
    text = frame(b"a") + frame(long) + frame(longer) + frame(b"", PING) + frame(b"b", 2)
    expected = [
        Frame(TEXT, b"a"),
        Frame(TEXT, long),
        Frame(TEXT, longer),
        Frame(PING, b""),
        Frame(TEXT, b"b"),
    ]
    for size in (1, 2, 3, 7, 1000, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert all_of(*pieces) == expected


def test_a_message_may_come_in_parts_with_others_between_them() -> None:
    text = frame(b"a", final=False) + frame(b"?", PING) + frame(b"b", 0) + frame(b"c")
    assert all_of(text) == [Frame(PING, b"?"), Frame(TEXT, b"ab"), Frame(TEXT, b"c")]


@pytest.mark.parametrize(
    "text",
    [
        frame(b"x" * 100),
        frame(b"x" * 40, final=False) + frame(b"x" * 40, 0),
        b"\x81\x84abcd" + b"wxyz",
        b"\xc1\x01x",
        b"\x81\x7f" + b"\xff" * 8,
    ],
    ids=["too large", "too large in parts", "masked", "extended", "endless"],
)
def test_what_no_server_sends_is_refused(text: bytes) -> None:
    with pytest.raises(Broken):
        all_of(text, most=64)


# ---------------------------------------------------------------------------------------- watches


def test_a_watch_is_a_websocket_where_the_server_has_them(server: Answering, client: Api) -> None:
    server.will(Socket(frame(ONE), frame(TWO[:9], final=False), frame(TWO[9:], 0)), Socket())
    assert watched(client) == [1, 2]
    assert watched(client) == []
    headers = server.asked[0].headers
    assert headers["Upgrade"] == "websocket"
    assert headers["Origin"] == server.url
    asked = dict(server.asked[0].query)
    assert 290 <= int(asked.pop("timeoutSeconds")) <= 350
    assert asked == {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "7"}


def test_what_comes_with_the_head_is_heard_at_once(server: Answering, client: Api) -> None:
    server.will(Socket(frame(ONE), end=False))
    started = time.monotonic()
    assert next(client.watch(PATH, {}, "7")).object == {"n": 1}
    assert time.monotonic() - started < 3


def test_a_server_that_hangs_is_found_out_by_a_ping_and_no_request(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "QUIET", 0.05)
    monkeypatch.setattr(api, "ANSWER", 2.0)
    there = Socket(frame(ONE), end=False)
    server.will(there)
    events = client.watch(PATH, {}, "7")
    assert next(events).object == {"n": 1}
    found: list[object] = []

    def listen() -> None:
        with pytest.raises(Away, match="hangs"):
            found.extend(events)

    thread = threading.Thread(target=listen)
    thread.start()
    assert eventually(lambda: [kind for kind, _ in there.heard].count(PING) > 5)
    there._answers = False
    thread.join(10)
    assert not thread.is_alive()
    assert found == []
    assert client.requests == 1


def test_a_server_that_asks_is_answered(server: Answering, client: Api) -> None:
    there = Socket(frame(b"who", PING) + frame(ONE), end=False)
    server.will(there)
    events = client.watch(PATH, {}, "7")
    next(events)
    assert eventually(lambda: (PONG, b"who") in there.heard)


def test_failures_are_those_of_any_watch(server: Answering, client: Api) -> None:
    gone = line("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    server.will(refused(410), Socket(frame(ONE) + frame(gone)), Socket(frame(ONE)), refused(403))
    with pytest.raises(Gone):
        client.watch(PATH, {}, "1")
    with pytest.raises(Gone, match="too old"):
        watched(client)
    assert watched(client) == [1]
    with pytest.raises(Denied):
        client.watch(PATH, {}, "1")
    assert all("Upgrade" in one.headers for one in server.asked)


@pytest.mark.parametrize("told", [b"{}", b"[]", b"x"])
def test_what_is_no_event_ends_the_watch(server: Answering, client: Api, told: bytes) -> None:
    server.will(Socket(frame(ONE), frame(told), frame(TWO)))
    with pytest.raises(Away):
        watched(client)


def test_an_answer_to_another_handshake_is_refused(server: Answering, client: Api) -> None:
    head = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
    server.will(raw(head + frame(ONE)))
    with pytest.raises(Away, match="WebSocket"):
        client.watch(PATH, {}, "7")


@pytest.mark.parametrize("status", [400, 405, 426])
def test_where_none_is_let_through_watches_are_plain(
    server: Answering, client: Api, status: int
) -> None:
    server.will(refused(status), streamed(ONE), streamed(TWO))
    assert watched(client) == [1]
    assert watched(client) == [2]
    assert ["Upgrade" in one.headers for one in server.asked] == [True, False, False]


def test_who_drops_the_connection_is_asked_for_a_plain_watch_the_next_time(
    server: Answering, client: Api
) -> None:
    server.will(hung_up, streamed(ONE), Socket(frame(TWO)))
    with pytest.raises(Away):
        watched(client)
    assert watched(client) == [1]
    assert watched(client) == [2]
    assert ["Upgrade" in one.headers for one in server.asked] == [True, False, True]


def test_who_forbids_a_websocket_is_asked_for_a_plain_watch_the_next_time(
    server: Answering, client: Api
) -> None:
    server.will(refused(403), streamed(ONE), Socket(frame(TWO)))
    with pytest.raises(Denied):
        watched(client)
    assert watched(client) == [1]
    assert watched(client) == [2]
    assert ["Upgrade" in one.headers for one in server.asked] == [True, False, True]


@pytest.mark.parametrize("end", [Api.interrupt, Api.close])
def test_closing_ends_what_another_thread_waits_for(
    server: Answering, client: Api, end: Callable[[Api], None]
) -> None:
    server.will(Socket(frame(ONE), end=False))
    events = client.watch(PATH, {}, "7")
    next(events)
    thread = threading.Thread(target=lambda: list(events))
    thread.start()
    Api.interrupt(client)
    end(client)
    thread.join(5)
    assert not thread.is_alive()
