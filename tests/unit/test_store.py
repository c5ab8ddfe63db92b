"""What outlives the daemon: whole or not at all, and never a reason to fail."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agent.sources.store import Store
from rules.model import Protocol
from rules.node_ports import Holder
from rules.ports import PortRange


class Kept:
    """A store in a directory, and what it complained about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self.now = 1000.0

    def open(self) -> Store:
        return Store(str(self.folder), self.warnings.append, lambda: self.now)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "deep" / "state")


def test_what_is_kept_is_there_the_next_time(kept: Kept) -> None:
    texts = {"/m/a.yaml": "a: 1\n", "/m/b.json": '{"ü": "\u2028"}', "odd\udcff": ""}
    store = kept.open()
    for file, text in texts.items():
        store.keep(file, text)
    store.keep("/m/a.yaml", "a: 2\n")
    store.leave(["red", "blue"])
    again = kept.open()
    assert again.load() == texts | {"/m/a.yaml": "a: 2\n"}
    assert again.leaving == {"red", "blue"}
    assert kept.warnings == []


def test_only_its_owner_may_read_it(kept: Kept) -> None:
    kept.open().keep("a", "secret")
    assert (kept.folder / "last-good").stat().st_mode & 0o77 == 0


def test_nothing_is_there_the_first_time(kept: Kept) -> None:
    store = kept.open()
    assert store.load() == {}
    assert store.leaving == frozenset()
    assert kept.warnings == []
    assert not kept.folder.exists()


def test_what_is_dropped_is_gone(kept: Kept) -> None:
    store = kept.open()
    store.keep("a", "1")
    store.keep("b", "2")
    store.drop("a")
    store.drop("a")
    assert kept.open().load() == {"b": "2"}
    assert kept.warnings == []


def test_what_is_the_same_is_not_written_again(kept: Kept) -> None:
    store = kept.open()
    store.leave(["blue"])
    (path,) = kept.files()
    before = path.stat()
    store.leave({"blue"})
    assert path.stat().st_ino == before.st_ino
    store.leave([])
    assert path.stat().st_ino != before.st_ino
    assert kept.open().load() == {}


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\x00",
        b"[]",
        b"null",
        b"{}",
        b"[" * 50_000,
        b'{"format": 1, "sha256": "", "content": {}}',
        b'{"format": 2}',
    ],
)
@pytest.mark.parametrize("place", ["last-good/*.json", "leaving.json"])
def test_what_is_corrupt_is_set_aside_and_the_rest_goes_on(
    kept: Kept, place: str, damaged: bytes
) -> None:
    store = kept.open()
    store.keep("a", "1")
    store.leave(["blue"])
    (path,) = kept.folder.glob(place)
    path.write_bytes(damaged)
    again = kept.open()
    texts = again.load()
    assert (texts, again.leaving) in (({}, {"blue"}), ({"a": "1"}, frozenset()))
    assert len(kept.warnings) == 1
    assert f"setting {path} aside" in kept.warnings[0]
    assert Path(f"{path}.corrupt").read_bytes() == damaged
    assert not path.exists()
    assert kept.open().load() == texts
    assert len(kept.warnings) == 1


def test_a_record_under_anothers_name_is_set_aside(kept: Kept) -> None:
    store = kept.open()
    store.keep("a", "1")
    (path,) = kept.files()
    path.rename(path.with_name("0" * 32 + ".json"))
    assert kept.open().load() == {}
    assert "no record of ours" in kept.warnings[0]


def test_what_a_write_left_half_done_is_not_read(kept: Kept) -> None:
    store = kept.open()
    store.keep("a", "1")
    (path,) = kept.files()
    Path(f"{path}.new").write_text(path.read_text()[:20])
    assert kept.open().load() == {"a": "1"}
    assert kept.warnings == []
    kept.open().keep("a", "2")
    assert kept.open().load() == {"a": "2"}
    assert len(kept.files()) == 1


def test_where_nothing_can_be_written_we_say_so_and_go_on(kept: Kept) -> None:
    kept.folder.parent.mkdir(parents=True)
    kept.folder.write_text("in the way")
    store = kept.open()
    assert store.load() == {}
    assert not store.keep("a", "1")
    store.leave(["blue"])
    store.report()
    store.drop("a")
    assert store.leaving == frozenset(), "so that it is tried again"
    assert all("cannot" in warning for warning in kept.warnings)
    assert len(kept.warnings) >= 3


def test_a_write_that_fails_leaves_nothing_that_is_no_longer_true(kept: Kept) -> None:
    store = kept.open()
    store.keep("a", "1")
    (path,) = kept.files()
    Path(f"{path}.new").mkdir()
    store.keep("a", "2")
    store.report()
    assert "cannot write" in kept.warnings[0]
    assert not path.exists()


def test_what_cannot_be_written_is_tried_again_with_back_off_and_told_in_one_line(
    kept: Kept,
) -> None:
    kept.folder.mkdir(parents=True)
    (kept.folder / "last-good").touch()  # as a disk that is read-only
    store = kept.open()
    files = [f"{number}.yaml" for number in range(300)]
    tried: list[float] = []
    for seconds in range(100):
        kept.now = 1000.0 + seconds
        assert {store.keep(file, "text") for file in files} == {False}
        store.report()
        if not tried or tried[-1] != store.due:
            tried.append(store.due)
    assert len(tried) == 7  # rounds in 100 s: after 1, 2, 4, 8, 16, 32 and 60 s
    (warning,) = kept.warnings
    assert "File exists (300 files)" in warning
    assert "(300 files)" in store.trouble
    (kept.folder / "last-good").unlink()
    assert not store.keep(files[0], "text"), "it is not time"
    assert store.keep(files[0], "another text"), "who writes another one need not wait"
    kept.now = store.due
    assert {store.keep(file, "text") for file in files} == {True}
    assert store.trouble == ""
    assert store.due == math.inf


def test_who_has_nothing_to_write_when_it_is_time_is_not_asked_at_once_again(kept: Kept) -> None:
    kept.folder.mkdir(parents=True)
    (kept.folder / "last-good").touch()
    store = kept.open()
    store.keep("a", "text")
    kept.now = store.due
    store.report()
    assert store.due > kept.now


def test_a_namespace_that_could_not_be_written_down_is_written_down_later(kept: Kept) -> None:
    store = kept.open()
    store.leave(["blue"])
    in_the_way = kept.folder / "leaving.json.new"
    in_the_way.mkdir()
    store.leave(["blue", "red"])
    in_the_way.rmdir()
    store.leave(["blue"])
    again = kept.open()
    again.load()
    assert again.leaving == {"blue"}


def test_node_ports_that_were_given_before_survive_a_disk_that_is_full(kept: Kept) -> None:
    first, second = (
        (Holder("Service/default/web", port, Protocol.TCP), PortRange(at, at + 9))
        for port, at in (("a", 31000), ("b", 31010))
    )
    store = kept.open()
    store.keep_node_ports([first])
    in_the_way = kept.folder / "node-ports.json.new"
    in_the_way.mkdir()
    store.keep_node_ports([first, second])
    store.report()
    assert "cannot write" in kept.warnings[0]
    assert kept.open().node_ports() == [first]
    in_the_way.rmdir()
    store.keep_node_ports([first, second])
    assert kept.open().node_ports() == [first, second]


def test_a_record_that_could_not_be_written_is_known_to_who_wrote_it(kept: Kept) -> None:
    store = kept.open()
    store.keep_record("node.json", {"reserved": [1]})
    in_the_way = kept.folder / "node.json.new"
    in_the_way.mkdir()
    store.keep_record("node.json", {"reserved": [1, 2]})
    assert store.record("node.json") == {"reserved": [1, 2]}
    in_the_way.rmdir()
    store.keep_record("node.json", {"reserved": [1]})
    assert store.record("node.json") == kept.open().record("node.json") == {"reserved": [1]}
    store.drop_record("node.json")
    assert store.record("node.json") is None
