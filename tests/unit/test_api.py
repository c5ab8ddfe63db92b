"""The client against a real server that does what API servers do at their worst."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing as closed
from pathlib import Path

import pytest

from agent.errors import Failure
from agent.sources import api
from agent.sources.answers import Away, Denied, Gone, Missing, Refused
from agent.sources.api import Api, Listed
from agent.sources.credentials import Credentials, Material, Plain, endpoint
from tests.answering import (
    Answer,
    Answering,
    Handler,
    answering,
    closing,
    hung_up,
    line,
    raw,
    refused,
    said,
    silent,
    streamed,
)

PATH = "/apis/x/v1/things"
LIST = {"kind": "ThingList", "metadata": {"resourceVersion": "7"}, "items": [{"a": 1}]}
ONE, TWO = line("ADDED", {"n": 1}), line("MODIFIED", {"n": 2})


@pytest.fixture
def server() -> Iterator[Answering]:
    with answering() as made:
        yield made


@pytest.fixture
def client(server: Answering) -> Iterator[Api]:
    made = Api(Credentials(endpoint(server.url), Plain(Material(text="t0ken"))), patience=5.0)
    yield made
    made.close()


def watched(client: Api) -> list[object]:
    return [event.object.get("n") for event in client.watch(PATH, {}, "7")]


# ------------------------------------------------------------------------------------------ lists


def test_a_list_is_read_and_the_connection_kept(server: Answering, client: Api) -> None:
    server.will(said(LIST), streamed(b'{"metadata": {"resource', b'Version": "8"}, "items": []}'))
    assert client.listed(PATH, {"labelSelector": "a=b c"}) == Listed(({"a": 1},), "7")
    assert client.listed(PATH, {}) == Listed((), "8")
    first, second = server.asked
    assert (first.method, first.path) == ("GET", PATH)
    assert first.query == {"labelSelector": "a=b c", "limit": "500"}
    assert first.headers["Authorization"] == "Bearer t0ken"
    assert first.connection == second.connection
    assert client.requests == 2
    assert client.received > 100


def test_pages_are_put_together_and_ask_for_no_version(server: Answering, client: Api) -> None:
    page = {"metadata": {"continue": "next", "resourceVersion": "7"}, "items": [{"a": 0}]}
    server.will(said(page), said(LIST))
    query = {"resourceVersion": "5", "resourceVersionMatch": "NotOlderThan", "fieldSelector": "x"}
    assert client.listed(PATH, query) == Listed(({"a": 0}, {"a": 1}), "7")
    assert server.asked[1].query == {"limit": "500", "continue": "next", "fieldSelector": "x"}


def test_pages_without_end_are_given_up(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MOST_PAGES", 5)
    server.then(said({"metadata": {"continue": "again"}, "items": []}))
    with pytest.raises(Away, match="never comes to the end"):
        client.listed(PATH, {})
    assert len(server.asked) == 5


def test_what_is_listed_is_trimmed_while_it_is_decoded(server: Answering, client: Api) -> None:
    server.will(said({"metadata": {}, "items": [{"big": {"x": [1]}, "kind": "T"}] * 2}))

    def trim(thing: dict[str, object]) -> object:
        return "small" if "kind" in thing else thing

    assert client.listed(PATH, {}, trim).items == ("small", "small")


def test_a_connection_that_the_server_closed_meanwhile_is_made_anew(
    server: Answering, client: Api
) -> None:
    server.will(closing(said(LIST)), said(LIST))
    client.listed(PATH, {})
    there = client._connection
    assert there
    assert select.select([there.sock], [], [], 5)[0]  # its end has arrived
    assert client.listed(PATH, {}).version == "7"
    assert server.asked[0].connection != server.asked[1].connection


@pytest.mark.parametrize(
    ("answer", "failure", "words"),
    [
        (refused(410, "too old"), Gone, "too old"),
        (refused(504, "wait", "ResourceVersionTooLarge"), Gone, "wait"),
        (refused(403, 'User "x" cannot list'), Denied, 'User "x" cannot list'),
        (refused(404, "no such"), Missing, "no such"),
        (refused(409, "there is one"), Refused, "there is one"),
        (refused(500, "oh"), Away, "oh"),
        (refused(503), Away, "HTTP 503"),
        (said(b"<html>proxy</html>", 502), Away, "HTTP 502"),
        (said(b"moved", 302, Location="http://192.0.2.1/"), Refused, "HTTP 302"),
        (said(b"not json"), Away, "no JSON"),
        (said(b"[" * 100_000), Away, "no JSON"),
        (said([]), Away, "no object"),
        (said({"items": 3, "metadata": {}}), Away, "no list"),
        (said({"items": []}), Away, "no list"),
        (raw(b""), Away, "breaks off"),
        (hung_up, Away, "breaks off"),
        (raw(b"\x15\x03\x01\x00\x02\n"), Away, "breaks off"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{"), Away, "breaks off"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"), Away, "breaks off"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{"), Away, "breaks off"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000), Away, "breaks off"),
    ],
)
def test_whatever_else_is_answered_is_one_of_five_failures(
    server: Answering, client: Api, answer: Answer, failure: type[Failure], words: str
) -> None:
    server.will(answer)
    with pytest.raises(failure) as raised:
        client.listed(PATH, {})
    assert type(raised.value) is failure
    assert words in str(raised.value)
    assert server.url in str(raised.value)
    server.will(said(LIST))
    assert client.listed(PATH, {}).version == "7"  # nothing of it is left in the way


def test_a_denial_names_the_right_that_is_missing(server: Answering, client: Api) -> None:
    server.then(refused(403, "no"))
    asks: dict[str, Callable[[], object]] = {
        "get": lambda: client.get(PATH),
        "list": lambda: client.listed(PATH, {}),
        "watch": lambda: client.watch(PATH, {}, "1"),
        "create": lambda: client.create(PATH, {}),
        "patch": lambda: client.patch(PATH, {}),
    }
    for verb, ask in asks.items():
        with pytest.raises(Denied) as raised:
            ask()
        assert raised.value.verb == verb
        assert raised.value.known


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("17", 17.0), ("100000", 120.0), ("-1", 0.0), ("Wed, 21 Oct", 0.0), ("nan", 0.0), ("", 0.0)],
)
def test_when_to_come_back_is_told(
    server: Answering, client: Api, header: str, seconds: float
) -> None:
    server.will(refused(429, "too many", Retry_After=header))
    with pytest.raises(Away) as raised:
        client.listed(PATH, {})
    assert raised.value.retry_after == seconds


def test_an_answer_that_is_too_large_is_not_read(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MOST_LISTED", 1 << 20)
    server.will(said(b" " * (2 << 20)))
    with pytest.raises(Away, match="more than 1 MiB"):
        client.listed(PATH, {})


def test_a_server_that_says_nothing_is_not_waited_for(server: Answering) -> None:
    client = Api(Credentials(endpoint(server.url), Plain()), patience=0.2)
    server.will(silent)
    with pytest.raises(Away, match="not answer in time"):
        client.listed(PATH, {})


def test_a_server_that_says_a_little_again_and_again_is_not_waited_for(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "WHOLE", 0.3)

    def dripping(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while not server.over.wait(0.05):
            handler.wfile.write(b"1\r\n \r\n")

    server.will(dripping)
    with pytest.raises(Away, match="does not come to its end"):
        client.listed(PATH, {})


def test_nobody_there_is_away() -> None:
    with answering() as server:
        url = server.url
    with pytest.raises(Away, match="refused"):
        Api(Credentials(endpoint(url), Plain())).listed(PATH, {})
    with pytest.raises(Away, match=r"not known|resol"):
        Api(Credentials(endpoint("https://api.invalid"), Plain())).listed(PATH, {})


# ---------------------------------------------------------------------------------------- watches


def test_a_watch_tells_line_by_line_however_they_are_cut(server: Answering, client: Api) -> None:
    server.will(streamed(ONE + TWO[:5], TWO[5:9], TWO[9:] + b"\n" + ONE), streamed())
    assert watched(client) == [1, 2, 1]
    assert watched(client) == []
    asked = dict(server.asked[0].query)
    assert 290 <= int(asked.pop("timeoutSeconds")) <= 350
    assert asked == {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "7"}
    assert server.asked[0].connection == server.asked[1].connection


def test_a_watch_is_heard_while_it_lasts(server: Answering, client: Api) -> None:
    server.will(streamed(ONE, hold=True))
    events = client.watch(PATH, {}, "7")
    assert next(events).object == {"n": 1}


def test_half_an_event_has_not_happened(server: Answering, client: Api) -> None:
    server.will(
        streamed(ONE, TWO[:-4], whole=False),
        streamed(ONE, TWO[:-4], whole=True),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + ONE + b"{"),
        raw(b"HTTP/1.1 200 OK\r\n\r\n" + ONE + b'{"type'),
    )
    for _ in range(4):
        assert watched(client) == [1]


def test_a_version_that_is_forgotten_is_gone_at_once_or_later(
    server: Answering, client: Api
) -> None:
    server.will(
        refused(410),
        streamed(ONE, line("ERROR", {"kind": "Status", "code": 410, "message": "too old"})),
    )
    with pytest.raises(Gone):
        client.watch(PATH, {}, "1")
    events = client.watch(PATH, {}, "1")
    assert next(events).object == {"n": 1}
    with pytest.raises(Gone, match="too old"):
        next(events)


@pytest.mark.parametrize(
    "told",
    [
        b"{}\n",
        b"[]\n",
        b"x\n",
        b'{"type": "ADDED"}\n',
        b'{"type": 1, "object": {}}\n',
        line("ERROR", {"code": 500}),
        line("ERROR", {}),
        b"{" * 100_000 + b"\n",
    ],
)
def test_what_is_no_event_ends_the_watch(server: Answering, client: Api, told: bytes) -> None:
    server.will(streamed(ONE, told, TWO))
    with pytest.raises(Away):
        watched(client)


def test_an_event_that_is_too_large_ends_the_watch(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MOST_LINE", 1 << 20)
    server.will(streamed(*[b" " * 65536] * 40))
    with pytest.raises(Away, match="more than 1 MiB"):
        watched(client)


def test_a_watch_that_is_silent_beyond_its_time_is_over(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "WATCHES", (0, 0))
    monkeypatch.setattr(api, "LATE", 0.3)
    server.will(streamed(ONE, hold=True))
    events = client.watch(PATH, {}, "7")
    assert [event.object for event in events] == [{"n": 1}]


def test_closing_ends_what_another_thread_waits_for(server: Answering, client: Api) -> None:
    server.will(streamed(ONE, hold=True))
    events = client.watch(PATH, {}, "7")
    next(events)
    thread = threading.Thread(target=lambda: list(events))
    thread.start()
    client.interrupt()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(Away, match="closed"):
        client.listed(PATH, {})
    assert len(server.asked) == 1


def test_a_watch_that_is_left_in_the_middle_leaves_nothing_behind(
    server: Answering, client: Api
) -> None:
    server.will(streamed(ONE, TWO, hold=True), said(LIST))
    events = client.watch(PATH, {}, "7")
    next(events)
    events.close()  # type: ignore[attr-defined]  # a generator
    assert client.listed(PATH, {}).version == "7"


# ------------------------------------------------------------------------------------ who we are


def test_whoever_is_not_known_asks_again_with_the_newest_token(
    server: Answering, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")

    def rotate(handler: Handler) -> None:
        file.write_text("new\n")
        refused(401, "Unauthorized")(handler)

    server.will(rotate, said(LIST), refused(401), refused(401))
    with closed(Api(Credentials(endpoint(server.url), Plain(Material(path=str(file)))))) as client:
        assert client.listed(PATH, {}).version == "7"
        tokens = [one.headers["Authorization"] for one in server.asked]
        assert tokens == ["Bearer old", "Bearer new"]
        with pytest.raises(Denied) as raised:
            client.listed(PATH, {})
    assert not raised.value.known
    assert len(server.asked) == 4


@pytest.mark.parametrize("text", ["", "a b", "a\nb", "\N{SNOWMAN}", None])
def test_without_a_token_that_can_be_one_nothing_is_asked(
    server: Answering, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    client = Api(Credentials(endpoint(server.url), Plain(Material(path=str(file)))))
    words = "cannot be asked: .*token: No such file" if text is None else "token for the API"
    with pytest.raises(Away, match=words):
        client.listed(PATH, {})
    assert server.asked == []


def test_the_environment_s_proxies_are_not_asked(
    server: Answering, client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:9")
    server.will(said(LIST))
    assert client.listed(PATH, {}).version == "7"


# ---------------------------------------------------------------------------------------- writing


def test_objects_are_written(server: Answering, client: Api) -> None:
    server.will(said({"kind": "Event"}, 201), said({"kind": "Event"}))
    client.create("/api/v1/events", {"a": 1})
    client.patch("/api/v1/events/x", {"a": 2})
    created, patched = server.asked
    assert (created.method, created.body) == ("POST", {"a": 1})
    assert created.headers["Content-Type"] == "application/json"
    assert (patched.method, patched.body) == ("PATCH", {"a": 2})
    assert patched.headers["Content-Type"] == "application/merge-patch+json"
    assert created.connection == patched.connection
