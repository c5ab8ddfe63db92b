"""What two followers of one node make of streams that come in any order, and of a server that
answers in all the wrong ways."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from agent.sources import following
from agent.sources.api import Api
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.following import Follower, Shared, followed
from agent.sources.kubernetes import Cluster
from agent.sources.store import Store
from agent.sources.vmis import NODE, TARGET
from tests.answering import (
    PATIENCE,
    Answer,
    Answering,
    Handler,
    answering,
    line,
    refused,
    streamed,
)
from tests.scripted import Streams, listing
from tests.spaces import eventually, manifest

Json = Any
NAME = "VirtualMachineInstance/ns/web"


def vmi(version: int, name: str = "web", *, uid: str = "u", deleted: bool = False) -> Json:
    metadata: Json = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"kind": "VirtualMachineInstance", "metadata": metadata, "spec": {}}


class Script(Streams):
    """By the label that is asked for."""

    def __init__(self, server: Answering) -> None:
        super().__init__(server)
        self.lists: dict[str, list[Json]] = {NODE: [], TARGET: []}
        self.named: dict[str, list[Json]] = {NODE: [], TARGET: []}  # to whoever asks for one
        self.refusals: list[Answer] = []
        self.asked: list[tuple[str, str]] = []  # what for, and of which label
        server.then(self._answer)

    def _answer(self, handler: Handler) -> None:
        query = dict(parse_qsl(urlsplit(handler.path).query, keep_blank_values=True))
        label = query["labelSelector"].partition("=")[0]
        if self.refusals:
            self.asked.append(("refused", label))
            self.refusals.pop(0)(handler)
        elif "watch" in query:
            self.asked.append(("watch", label))
            self.stream(handler, label)
        elif "fieldSelector" in query:
            self.asked.append(("named", label))
            listing(self.named[label])(handler)
        else:
            self.asked.append((f"list {query['resourceVersion']}", label))
            listing(self.lists[label])(handler)

    def count(self, what: str, label: str = NODE) -> int:
        return self.asked.count((what, label))


class Heard:
    """Two followers, started."""

    def __init__(self, server: Answering) -> None:
        self.changes = 0
        self.shared = Shared("n1", self._changed)
        self.ours, self.coming = followed(
            Api(Credentials(endpoint(server.url), Plain())), self.shared
        )
        for one in (self.ours, self.coming):
            one.start()

    def _changed(self) -> None:
        self.changes += 1

    def has(self, follower: Follower, *versions: str) -> bool:
        return eventually(lambda: sorted(v.version for v in follower.seen.values()) == [*versions])

    @property
    def all(self) -> set[str]:
        with self.shared.turn:
            return {*self.ours.seen, *self.coming.seen}


@pytest.fixture
def script() -> Iterator[Script]:
    with answering() as server:
        yield Script(server)


@pytest.fixture
def heard(script: Script) -> Iterator[Heard]:
    made = Heard(script.server)
    yield made
    made.shared.stop.set()
    for one in (made.ours, made.coming):
        one.interrupt()
        assert one.ended(PATIENCE)


# --------------------------------------------------------------------------------- handing over


def test_what_leaves_one_stream_before_it_enters_the_other_is_never_out_of_sight(
    script: Script, heard: Heard
) -> None:
    script.tell(TARGET, "ADDED", vmi(11))
    assert heard.has(heard.coming, "11")
    script.named[NODE] = [vmi(12)]
    script.tell(TARGET, "DELETED", vmi(12))
    assert heard.has(heard.coming, "12")
    assert script.count("named") == 1
    assert heard.all == {NAME}
    script.tell(NODE, "ADDED", vmi(12))
    assert heard.has(heard.ours, "12")
    assert heard.coming.seen == {}
    script.tell(NODE, "DELETED", vmi(13, deleted=True))
    assert heard.has(heard.ours)
    assert heard.all == set()


def test_in_the_usual_order_nobody_is_asked(script: Script, heard: Heard) -> None:
    script.tell(TARGET, "ADDED", vmi(11))
    assert heard.has(heard.coming, "11")
    script.tell(NODE, "ADDED", vmi(12))
    assert heard.has(heard.ours, "12")
    script.tell(TARGET, "DELETED", vmi(13))
    assert heard.has(heard.coming)
    assert heard.all == {NAME}
    assert script.count("named") == 0


def test_what_nobody_has_is_gone(script: Script, heard: Heard) -> None:
    script.tell(NODE, "ADDED", vmi(11))
    assert heard.has(heard.ours, "11")
    script.named[TARGET] = [vmi(12, uid="another")]
    script.tell(NODE, "DELETED", vmi(12))
    assert heard.has(heard.ours)
    assert script.count("named", TARGET) == 1


def test_nothing_is_dropped_because_nobody_answers(script: Script, heard: Heard) -> None:
    script.tell(TARGET, "ADDED", vmi(11))
    assert heard.has(heard.coming, "11")
    script.named[NODE] = script.lists[NODE] = [vmi(12)]
    script.refusals.append(refused(500))
    script.tell(TARGET, "DELETED", vmi(12))
    assert eventually(lambda: heard.coming.listener.lists == 2)
    assert heard.has(heard.coming, "12")
    assert script.count("refused") == 1
    assert heard.changes > 0


def test_what_was_handed_over_and_never_taken_is_looked_for_with_each_watch(
    script: Script, heard: Heard
) -> None:
    script.tell(TARGET, "ADDED", vmi(11))
    assert heard.has(heard.coming, "11")
    script.named[NODE] = [vmi(12)]
    script.tell(TARGET, "DELETED", vmi(12))
    assert heard.has(heard.coming, "12")
    script.named[NODE] = []
    script.end(TARGET)
    assert heard.has(heard.coming)


def test_after_a_list_many_are_looked_for_at_once(script: Script, heard: Heard) -> None:
    for number in range(5):
        script.tell(TARGET, "ADDED", vmi(11 + number, f"vm-{number}", uid=f"u{number}"))
    assert eventually(lambda: len(heard.coming.seen) == 5)
    script.lists[NODE] = [vmi(20, "vm-3", uid="u3"), vmi(21, "vm-4", uid="other")]
    script.tell(TARGET, "ERROR", {"code": 410})
    assert heard.has(heard.coming, "20")
    assert script.count("list ", TARGET) == 1  # the newest, not what a cache has
    assert script.count("list 10", NODE) == 1
    assert script.count("named") == 0


# ---------------------------------------------------------------------------------- going on


def test_a_watch_goes_on_where_it_was(script: Script, heard: Heard) -> None:
    script.tell(NODE, "BOOKMARK", vmi(77))
    script.end(NODE)
    assert eventually(lambda: script.count("watch") == 2)
    watches = [one.query for one in script.server.asked if "watch" in one.query]
    versions = [q["resourceVersion"] for q in watches if q["labelSelector"].startswith(NODE)]
    assert versions == ["10", "77"]
    assert script.count("list 0") == 1
    assert heard.ours.seen == {}


def test_what_says_nothing_new_to_us_is_no_news(script: Script, heard: Heard) -> None:
    script.tell(NODE, "ADDED", vmi(11))
    assert heard.has(heard.ours, "11")
    changes = heard.changes
    script.tell(NODE, "MODIFIED", vmi(12) | {"status": {"guestOSInfo": {"id": "x"}}})
    assert heard.has(heard.ours, "12")
    assert heard.changes == changes
    script.tell(NODE, "MODIFIED", vmi(13) | {"status": {"phase": "Failed"}})
    assert heard.has(heard.ours, "13")
    assert heard.changes == changes + 1


def test_watches_that_end_at_once_are_not_begun_again_without_a_pause(
    script: Script, heard: Heard
) -> None:
    began = time.monotonic()
    for _ in range(4):
        script.end(NODE)
    assert eventually(lambda: script.count("watch") == 5)
    assert time.monotonic() - began > 0.05
    assert heard.ours.trouble is None


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SLOWLY", 0.2)


def test_a_kubevirt_that_is_not_installed_is_waited_for(
    hasty: None, script: Script, tmp_path: Path
) -> None:
    script.refusals += [refused(404)] * 6
    credentials = Credentials(endpoint(script.server.url), Plain())
    source = Cluster(credentials, "n1", Store(str(tmp_path), print))
    try:
        assert "KubeVirt is not installed" in source.look().unreadable
        assert eventually(lambda: source.heard() and not source.look().unreadable)
        assert script.count("refused") + script.count("refused", TARGET) == 6
    finally:
        source.close()


def test_a_server_that_asks_for_time_gets_it(script: Script) -> None:
    script.refusals += [refused(429, "slow down", Retry_After="1")] * 2
    began = time.monotonic()
    made = Heard(script.server)
    try:
        assert eventually(lambda: made.ours.listed and made.coming.listed)
        assert time.monotonic() - began >= 1.0
        assert made.ours.trouble is None
    finally:
        made.shared.stop.set()
        for one in (made.ours, made.coming):
            one.interrupt()
            assert one.ended(PATIENCE)


def test_troubles_are_told_once_with_their_beginning(script: Script, heard: Heard) -> None:
    assert eventually(lambda: all(script.count("watch", one) for one in (NODE, TARGET)))
    changes = heard.changes
    script.refusals += [refused(500, "oh")] * 4
    script.end(NODE)
    assert eventually(lambda: heard.ours.trouble is not None)
    trouble = heard.ours.trouble
    assert trouble
    assert eventually(lambda: script.count("refused") == 4 and heard.ours.trouble is None)
    assert "cannot answer now: oh" in trouble.why
    assert heard.changes == changes + 2


def test_waits_grow_and_are_never_longer_than_half_a_minute() -> None:
    shared = Shared("n1", lambda: None)
    follower = Follower(Api(Credentials(endpoint("http://127.0.0.1:9"), Plain())), NODE, shared)
    longest = 0.0
    for _ in range(20):
        wait = follower.listener.attempt()
        assert 0 <= wait <= 30
        longest = max(longest, wait)
    assert longest > 5  # one of the last twelve, which are up to half a minute each


def test_a_server_that_forgets_at_once_is_listed_at_once_only_the_first_time(
    script: Script,
) -> None:
    """Although it has told of something each time."""
    told = (line("BOOKMARK", vmi(11)), line("ERROR", {"code": 410, "message": "too old"}))
    script.refusals += [listing([]), streamed(*told)] * 12
    shared = Shared("n1", lambda: None)
    server = Api(Credentials(endpoint(script.server.url), Plain()))
    listener = Follower(server, NODE, shared).listener
    first, *others = [listener.attempt() for _ in range(12)]
    assert (listener.lists, listener.events) == (12, 12)
    assert first == 0
    assert min(others) > 0
    assert max(others) > 1  # one of the last six, which are up to 6 to 30 seconds each
    assert listener.trouble is None
    server.close()


# --------------------------------------------------------------------- what others have stored


def test_what_another_source_stored_is_let_go_of(script: Script, tmp_path: Path) -> None:
    """Somebody has changed `source` from files to kubernetes."""
    store = Store(str(tmp_path), print)
    assert store.keep("/etc/a.yaml", manifest("blue", "22"))
    credentials = Credentials(endpoint(script.server.url), Plain())
    source = Cluster(credentials, "n1", Store(str(tmp_path), print))
    try:
        assert source.namespaces == {"blue"}
        assert source.look().machines == ()
        source.remember()
        assert Store(str(tmp_path), print).load() == {}
    finally:
        source.close()


def test_on_request_everything_is_read_again(script: Script, tmp_path: Path) -> None:
    script.lists[NODE] = [vmi(1, f"vm-{number}") for number in range(5)]
    credentials = Credentials(endpoint(script.server.url), Plain())
    source = Cluster(credentials, "n1", Store(str(tmp_path), print))
    beats: list[None] = []
    try:
        assert source.wait(30)
        for renew, expected in ((False, 5), (False, 0), (True, 5), (False, 0)):
            if renew:
                source.renew()
            beats.clear()
            source.look(lambda: beats.append(None))
            assert len(beats) == expected
    finally:
        source.close()
