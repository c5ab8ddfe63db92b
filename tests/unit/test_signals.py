"""To stop has a bound, whatever keeps the main thread from it."""

from __future__ import annotations

import threading

from agent.signals import Deadline

PATIENCE = 10.0


def test_what_is_not_gone_in_time_after_a_signal_is_ended() -> None:
    late = threading.Event()
    deadline = Deadline(0.01, late.set)
    assert not late.wait(0.1), "nobody has told it to stop"
    deadline.begin()
    assert late.wait(PATIENCE)
