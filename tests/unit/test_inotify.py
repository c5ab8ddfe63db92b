"""What happens in a directory is told by name, all of it or that some of it was lost."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import inotify
from agent.inotify import Happened, Inotify

IGNORED, DONT_FOLLOW, ISDIR = 0x8000, 0x2000000, 0x40000000
STEPS = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO
WRITES = inotify.MODIFY | inotify.CLOSE_WRITE


@pytest.fixture
def watcher() -> Iterator[Inotify]:
    made = Inotify()
    yield made
    made.close()


def test_each_thing_that_happens_is_told_with_its_name(watcher: Inotify, tmp_path: Path) -> None:
    number = watcher.watch(str(tmp_path), STEPS | WRITES | inotify.ATTRIB)
    file = tmp_path / "a"
    file.write_text("x")
    file.rename(tmp_path / "b")
    (tmp_path / "b").chmod(0o600)
    (tmp_path / "b").unlink()
    assert watcher.read() == [
        Happened(number, inotify.CREATE, "a"),
        Happened(number, inotify.MODIFY, "a"),
        Happened(number, inotify.CLOSE_WRITE, "a"),
        Happened(number, inotify.MOVED_FROM, "a"),
        Happened(number, inotify.MOVED_TO, "b"),
        Happened(number, inotify.ATTRIB, "b"),
        Happened(number, inotify.DELETE, "b"),
    ]


def test_a_directory_is_told_as_one(watcher: Inotify, tmp_path: Path) -> None:
    number = watcher.watch(str(tmp_path), STEPS)
    (tmp_path / "a").mkdir()
    assert watcher.read() == [Happened(number, inotify.CREATE | ISDIR, "a")]


def test_where_nothing_happened_there_is_nothing_to_read(watcher: Inotify, tmp_path: Path) -> None:
    watcher.watch(str(tmp_path), STEPS)
    assert watcher.read() == []
    assert select.select([watcher], [], [], 0)[0] == []
    (tmp_path / "a").touch()
    assert select.select([watcher], [], [], 0)[0] == [watcher]
    assert watcher.read() != []
    assert watcher.read() == []
    assert select.select([watcher], [], [], 0)[0] == []


def test_one_read_tells_everything(watcher: Inotify, tmp_path: Path) -> None:
    watcher.watch(str(tmp_path), STEPS)
    names = [f"{number:0200}" for number in range(1_000)]
    for name in names:
        (tmp_path / name).touch()
    assert [event.name for event in watcher.read()] == names
    assert watcher.read() == []


def test_what_was_too_much_is_told_as_lost(watcher: Inotify, tmp_path: Path) -> None:
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    watcher.watch(str(tmp_path), inotify.ATTRIB)
    files = [tmp_path / "a", tmp_path / "b"]  # two in turn: the same twice would be told once
    for file in files:
        file.touch()
    for _ in range(room // 2 + 1):
        for file in files:
            os.utime(file)
    assert watcher.read()[-1] == Happened(-1, inotify.Q_OVERFLOW, "")
    os.utime(files[0])
    assert [event.name for event in watcher.read()] == ["a"]


@pytest.mark.parametrize(
    "raw", [b"caf\xe9", "café".encode(), b"\xff\xfe", b"new\nline", b"x" * 255]
)
def test_any_name_comes_back_as_it_is(watcher: Inotify, tmp_path: Path, raw: bytes) -> None:
    watcher.watch(str(tmp_path), STEPS)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + raw)).touch()
    [event] = watcher.read()
    assert os.fsencode(event.name) == raw
    assert (tmp_path / event.name).exists()


def test_what_cannot_be_watched_is_said_with_its_path(watcher: Inotify, tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    with pytest.raises(FileNotFoundError, match=str(missing)):
        watcher.watch(str(missing), STEPS)
    with pytest.raises(NotADirectoryError, match=str(file)):
        watcher.watch(str(file), STEPS | inotify.ONLYDIR)
    with pytest.raises(OSError, match="Invalid argument"):
        watcher.watch(f"{tmp_path}\0/elsewhere", STEPS)
    (tmp_path / "a").touch()
    assert watcher.read() == []


def test_a_link_is_followed_unless_told_otherwise(watcher: Inotify, tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir()
    link.symlink_to(there)
    number = watcher.watch(str(there), STEPS)
    assert watcher.watch(str(link), STEPS) == number
    assert watcher.watch(str(link), STEPS | DONT_FOLLOW) != number


def test_a_watch_ends_when_told_to(watcher: Inotify, tmp_path: Path) -> None:
    number = watcher.watch(str(tmp_path), STEPS)
    watcher.unwatch(number)
    (tmp_path / "a").touch()
    assert watcher.read() == [Happened(number, IGNORED, "")]
    watcher.unwatch(number)  # and no error the second time


def test_a_watch_ends_with_what_it_watched(watcher: Inotify, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    number = watcher.watch(str(folder), STEPS | inotify.DELETE_SELF | inotify.MOVE_SELF)
    folder = folder.rename(tmp_path / "moved")
    folder.rmdir()
    assert watcher.read() == [
        Happened(number, inotify.MOVE_SELF, ""),
        Happened(number, inotify.DELETE_SELF, ""),
        Happened(number, IGNORED, ""),
    ]
    watcher.unwatch(number)


def test_it_never_waits_and_is_not_inherited(watcher: Inotify) -> None:
    assert not os.get_blocking(watcher.fileno())
    assert not os.get_inheritable(watcher.fileno())


def test_closed_it_holds_no_descriptor() -> None:
    watcher = Inotify()
    number = watcher.fileno()
    watcher.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
