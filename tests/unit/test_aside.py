"""Reading what may never let itself be read: here pipes that nobody writes to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel import aside
from agent.kernel.aside import MOST_STUCK, PATIENCE, Aside, Unreadable
from tests.spaces import eventually


class Pipes:
    """Silent until they are closed."""

    def __init__(self) -> None:
        self._writers: list[int] = []

    def silent(self) -> int:
        reader, writer = os.pipe()
        self._writers.append(writer)
        return reader

    def close(self) -> None:
        for writer in self._writers:
            os.close(writer)
        self._writers = []
        assert eventually(lambda: not readers())


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    before, made = descriptors(), Pipes()
    yield made
    made.close()
    assert descriptors() == before


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "HASTE", 0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def readers() -> int:
    return sum(thread.name == "aside" for thread in threading.enumerate())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(*words: bytes) -> int:
    reader, writer = os.pipe()
    for one in words:
        os.write(writer, one)
    os.close(writer)
    return reader


def told(made: Aside, pod: str, words: bytes = b"x") -> bool:
    """On a busy machine it may take more than one question."""
    try:
        return made.read(pod, said(words)) == words
    except Unreadable:
        return False


def test_what_can_be_read_is_read(pipes: Pipes) -> None:
    made = Aside()
    assert made.read("a", said()) == b""
    assert made.read("a", said(b"one\0", b"two\0")) == b"one\0two\0"
    assert len(made.read("a", said(b"x" * 60_000), 10_000)) < 20_000
    with pytest.raises(IsADirectoryError):
        made.read("a", os.open("/", os.O_RDONLY))


def test_a_reader_that_gets_no_processor_time_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def laboured(_descriptor: int, _most: int) -> bytes:
        end = time.thread_time() + aside.PATIENCE + 0.3
        while time.thread_time() < end:
            pass
        return b"at last"

    monkeypatch.setattr(aside, "drained", laboured)
    assert Aside().read("a", said()) == b"at last"


def test_a_reader_that_waits_for_another_thread_of_ours_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As all threads wait for the interpreter's lock."""
    lock = threading.Lock()

    def held_up(_descriptor: int, _most: int) -> bytes:
        with lock:
            return b"at last"

    monkeypatch.setattr(aside, "drained", held_up)
    lock.acquire()
    threading.Timer(aside.PATIENCE + 0.3, lock.release).start()
    assert Aside().read("a", said()) == b"at last"


def test_who_keeps_many_from_being_read_makes_us_wait_once(pipes: Pipes) -> None:
    made, began = Aside(), time.monotonic()
    for number in range(MOST_STUCK):
        with pytest.raises(Unreadable, match=f"pod {number},"):
            made.read(str(number), pipes.silent())
    assert PATIENCE <= time.monotonic() - began < MOST_STUCK * PATIENCE / 2


def test_no_more_than_so_many_threads_are_stuck_and_one_for_a_pod(pipes: Pipes) -> None:
    made = Aside()
    for number in range(2 * MOST_STUCK):
        for _ in range(2):
            with pytest.raises(Unreadable):
                made.read(str(number), pipes.silent())
        assert readers() == min(number + 1, MOST_STUCK)
    with pytest.raises(Unreadable):
        made.read("another", said(b"x"))
    pipes.close()
    assert eventually(lambda: told(made, "another"))


def test_who_kept_us_waiting_is_not_asked_again_for_a_while(pipes: Pipes) -> None:
    clock = Clock()
    made = Aside(clock)
    with pytest.raises(Unreadable):
        made.read("a", pipes.silent())
    pipes.close()
    assert not told(made, "a")
    assert eventually(lambda: told(made, "b"))
    clock.now += aside.GRUDGE
    assert eventually(lambda: told(made, "a"))


def test_haste_is_not_held_against_anybody(pipes: Pipes) -> None:
    made = Aside(Clock())
    for pod in ("a", "b"):
        with pytest.raises(Unreadable):
            made.read(pod, pipes.silent())
    assert not told(made, "b")
    pipes.close()
    assert eventually(lambda: told(made, "b"))
    assert not told(made, "a")
