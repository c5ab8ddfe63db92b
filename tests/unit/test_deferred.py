"""What is put off until all namespaces have their rules: every part of it is done, whatever becomes
of another, and whoever waits is told that we are alive."""

from __future__ import annotations

import queue

import pytest

from agent.errors import Failure
from agent.kernel.kinds import Beat
from agent.kernel.live import MOST_TO_CLOSE, Deferred
from agent.kernel.memory import MemoryKernel
from tests.unit.test_keeper import House

A_MOMENT = 5.0  # seconds


def test_one_that_fails_does_not_keep_the_others_from_being_done() -> None:
    done: list[str] = []

    def forget(name: str, error: Exception | None = None) -> None:
        def task(_: Beat) -> int:
            done.append(name)
            if error is not None:
                raise error
            return 1

        deferred.forget(task)

    deferred = Deferred()
    forget("one")
    forget("two", RuntimeError("a bug"))
    forget("three", Failure("the kernel refused"))
    forget("four")
    with pytest.raises(Failure, match="unexpected RuntimeError: a bug"):
        deferred.forgotten(lambda: None)
    assert done == ["one", "two", "three", "four"]
    assert deferred.forgotten(lambda: None) == 0


def test_a_sign_of_life_is_given_before_each_and_passed_on_to_it() -> None:
    beats: list[str] = []

    def task(beat: Beat) -> int:
        beats.append("task")
        beat()
        return 2

    deferred = Deferred()
    deferred.forget(task)
    deferred.forget(task)
    assert deferred.forgotten(lambda: beats.append("beat")) == 4
    assert beats == ["beat", "task", "beat"] * 2


def test_the_watchdog_is_fed_while_flows_are_forgotten() -> None:
    class Busy(MemoryKernel):
        def afterwards(self, beat: Beat) -> int:
            for _ in range(3):
                beat()
            return 7

    house = House()
    house.keeper.use(Busy({}))
    fed: list[None] = []
    house.keeper.work(lambda: fed.append(None), lambda: False)
    assert len(fed) == 3
    assert house.metric("portranger_conntrack_forgotten_total") == 7


def test_what_cannot_be_closed_keeps_nothing_else_open() -> None:
    """However many they are: nobody ever waits for a thread that has ended."""
    closed: queue.Queue[int] = queue.Queue()

    def refuse() -> None:
        raise OSError("no")

    deferred = Deferred()
    for number in range(2 * MOST_TO_CLOSE):
        deferred.close(refuse)
        deferred.close(lambda number=number: closed.put(number))  # type: ignore[misc]  # of a loop
        assert closed.get(timeout=A_MOMENT) == number
