"""What outlives the daemon: whole or not at all, and never a reason to fail."""

from __future__ import annotations

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

    def open(self) -> Store:
        return Store(str(self.folder), self.warnings.append)

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
    assert "cannot write" in kept.warnings[0]
    assert not path.exists()


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
    assert "cannot write" in kept.warnings[0]
    assert kept.open().node_ports() == [first]
    in_the_way.rmdir()
    store.keep_node_ports([first, second])
    assert kept.open().node_ports() == [first, second]
