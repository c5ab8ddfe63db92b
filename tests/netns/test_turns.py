"""Taking turns with others of us, and what becomes of it when somebody never ends his."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel import turns
from agent.kernel.turns import Turns


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[int]]:
    """Nine files, each opened twice: by us, and by who holds its lock."""
    made = []
    for number in range(9):
        path = tmp_path / str(number)
        path.touch()
        made += [os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)]
    yield made
    for descriptor in made:
        os.close(descriptor)


def test_who_holds_many_locks_makes_us_wait_once(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.5)
    for theirs in opened[1::2]:
        fcntl.flock(theirs, fcntl.LOCK_EX)
    ours, began = Turns(), time.monotonic()
    for descriptor in opened[::2]:
        with ours.taken(descriptor):
            pass
    assert 0.5 <= time.monotonic() - began < 9 * 0.5


def test_patience_comes_back(opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    now = [0.0]
    ours = Turns(lambda: now[0] + time.monotonic())
    fcntl.flock(opened[1], fcntl.LOCK_EX)
    with ours.taken(opened[0]):
        pass
    now[0] += turns.GRUDGE + 1
    began = time.monotonic()
    with ours.taken(opened[0]):
        assert time.monotonic() - began >= 0.05


def test_one_of_us_at_a_time(opened: list[int]) -> None:
    inside, most = 0, 0

    def work(descriptor: int) -> None:
        nonlocal inside, most
        for _ in range(20):
            with Turns().taken(descriptor):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work, args=[one]) for one in opened[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (inside, most) == (0, 1)
