"""Threads for what may block: one that does keeps nobody else from being done."""

from __future__ import annotations

import select
import threading

import pytest

from agent.workqueue import MOST_IDLE, Bounded, Inline, Workqueue
from tests.spaces import eventually

A_MOMENT = 60.0  # seconds: a bound, which only a test that fails waits for


def readable(queue: Workqueue, seconds: float = A_MOMENT) -> bool:
    return bool(select.select([queue], [], [], seconds)[0])


@pytest.mark.parametrize("queue", [Inline(), Workqueue()])
def test_what_a_task_returns_or_raises_is_handed_over(queue: Inline | Workqueue) -> None:
    nothing: dict[str, int] = {}
    well, badly = queue.start(lambda: 17), queue.start(lambda: nothing["missing"])
    assert well is not None
    assert badly is not None
    assert well.wait(A_MOMENT)
    assert well.result() == 17
    assert badly.wait(A_MOMENT)
    with pytest.raises(KeyError):
        badly.result()


def test_a_task_that_blocks_keeps_no_other_from_being_done() -> None:
    queue, gate = Workqueue(), threading.Event()
    blocked = queue.start(lambda: gate.wait(A_MOMENT))
    assert blocked is not None
    try:
        assert not blocked.wait(0.01)
        other = queue.start(lambda: "done")
        assert other is not None
        assert other.wait(A_MOMENT)
        assert not blocked.done
    finally:
        gate.set()
    assert blocked.wait(A_MOMENT)


def test_whoever_polls_hears_that_a_task_has_ended() -> None:
    queue, gate = Workqueue(), threading.Event()
    queue.start(lambda: gate.wait(A_MOMENT))
    assert not readable(queue, 0.01)
    gate.set()
    assert readable(queue)
    queue.drain()
    assert not readable(queue, 0.01)


def test_no_more_than_so_many_are_begun_while_all_are_blocked() -> None:
    queue, gate = Workqueue(most=3), threading.Event()
    begun = [queue.start(lambda: gate.wait(A_MOMENT)) for _ in range(4)]
    gate.set()
    assert [one is not None for one in begun] == [True, True, True, False]
    assert eventually(lambda: queue._threads == MOST_IDLE)
    assert queue.start(lambda: None) is not None


def test_what_is_not_done_in_time_is_begun_once_and_holds_up_nobody_else() -> None:
    bounded, gate = Bounded(0.01), threading.Event()
    begun: list[str] = []

    def blocks() -> None:
        begun.append("blue")
        gate.wait(A_MOMENT)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            bounded.run("blue", blocks)
    patient = Bounded(A_MOMENT)
    assert patient.run("red", lambda: 17) == 17
    assert begun == ["blue"]
    gate.set()
    assert eventually(lambda: all(one.done for one in bounded._late.values()))
    with pytest.raises(ZeroDivisionError):
        patient.run("blue", lambda: 1 // 0)
