"""How soon to try again: patience with what fails, and with those who keep breaking things."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.backoff import FAILURES, REPAIRS, Backoff


def waits(backoff: Backoff, strikes: int, pace: float = 0.0, now: float = 100.0) -> list[float]:
    """How long each attempt is put off, where the next strike follows it after `pace`."""
    found = []
    for _ in range(strikes):
        backoff = backoff.struck(now)
        found.append(round(backoff.until - now, 6))
        now = backoff.until + pace
    return found


def test_at_first_everything_is_due() -> None:
    assert FAILURES.due(-1e9)
    assert REPAIRS.due(0.0)


def test_failures_are_retried_ever_later_up_to_a_minute() -> None:
    doubling = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2]
    assert waits(FAILURES, 13) == [*doubling, 60, 60, 60]
    assert waits(FAILURES, 2000)[-1] == 60


def test_an_attempt_is_due_when_its_time_has_come() -> None:
    struck = FAILURES.struck(100.0)
    assert struck.until == pytest.approx(100.1)
    assert not struck.due(100.0)
    assert struck.due(struck.until)


def test_failures_are_forgiven_by_success_only() -> None:
    struck = FAILURES.struck(0.0).struck(1.0)
    assert struck.quiet(1e9) == struck
    assert struck.struck(1e9).wait == pytest.approx(0.4)


def test_the_first_repairs_are_immediate_then_ever_later() -> None:
    doubling = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6]
    assert waits(REPAIRS, 16, pace=0.1) == [0, 0, 0, 0, 0, *doubling, 30, 30]


def test_a_slow_hand_is_always_repaired_at_once() -> None:
    assert waits(REPAIRS, 50, pace=1.0) == [0] * 50


def test_who_was_quiet_for_a_minute_is_forgiven() -> None:
    struck = REPAIRS
    for _ in range(8):
        struck = struck.struck(struck.until if math.isfinite(struck.until) else 0.0)
    assert struck.wait == pytest.approx(0.4)
    assert struck.quiet(struck.until + 59.9) == struck
    assert struck.struck(struck.until + 59.9).wait == pytest.approx(0.8)
    assert struck.quiet(struck.until + 60.1) == REPAIRS
    assert struck.struck(struck.until + 60.1) == REPAIRS.struck(struck.until + 60.1)


def test_breaking_things_faster_does_not_put_off_their_repair() -> None:
    struck = FAILURES.struck(100.0)
    for tenth in range(10):
        assert struck.struck(100.0 + tenth / 100) == struck


def test_a_clock_that_stands_still_takes_the_free_ones_and_waits() -> None:
    struck = REPAIRS
    for _ in range(1000):
        struck = struck.struck(5.0)
    assert (struck.taken, struck.wait, struck.until) == (5, 0.1, 5.1)
    assert struck.quiet(5.0) == struck


@pytest.mark.parametrize(("first", "longest", "free"), [(0, 1, 0), (2, 1, 0), (1, 2, -1)])
def test_waits_that_could_not_grow_are_no_backoff(first: float, longest: float, free: int) -> None:
    with pytest.raises(ValueError, match="not a backoff"):
        Backoff(first=first, longest=longest, free=free)


gaps = st.just(0.0) | st.floats(0.0, 2.0) | st.floats(0.0, 200.0)
backoffs = st.sampled_from([FAILURES, REPAIRS]) | st.builds(
    Backoff,
    first=st.floats(0.01, 1.0),
    longest=st.floats(1.0, 100.0),
    free=st.integers(0, 5),
    row=st.floats(0.1, 5.0),
    forgiven_after=st.floats(1.0, 100.0),
)


@settings(deadline=None)
@given(backoffs, st.lists(gaps, max_size=60))
@example(REPAIRS, [0.0] * 60)
def test_whenever_strikes_come_an_attempt_is_neither_too_soon_nor_too_late(
    backoff: Backoff, pauses: list[float]
) -> None:
    fresh, now, immediate = backoff, 0.0, 0
    for pause in pauses:
        now += pause
        before, backoff = backoff, backoff.struck(now)
        put_off = backoff.until - now
        assert put_off <= backoff.longest + 1e-6
        if not before.due(now):
            assert backoff == before
        elif put_off == 0:
            immediate = 1 if before.quiet(now) == fresh else immediate + 1
            assert immediate <= fresh.free
        else:
            grown = before.quiet(now).wait * 2
            assert backoff.wait == min(max(grown, fresh.first), fresh.longest)
            assert put_off == pytest.approx(backoff.wait)
    assert backoff.quiet(now + 1000.0) == (backoff if fresh == FAILURES and backoff.wait else fresh)


@settings(deadline=None)
@given(backoffs)
@example(REPAIRS)
def test_who_breaks_things_all_the_time_gets_few_repairs(backoff: Backoff) -> None:
    patience = 1000.0
    most = backoff.free + math.log2(backoff.longest / backoff.first) + 2
    most += patience / backoff.longest
    now = 0.0
    for attempts in range(int(most) + 2):
        if now > patience:
            assert attempts <= most
            return
        backoff = backoff.struck(now)
        now = backoff.until
    pytest.fail(f"more than {most} attempts")
