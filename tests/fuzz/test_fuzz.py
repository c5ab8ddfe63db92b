"""A few hundred inputs for each fuzzer, the same every time; `make fuzz` looks for others, guided
by what they reach. Hypothesis prints the bytes that break something, as few as it can."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.everything import TARGETS
from tests.fuzz.target import timed

SIZE = 64  # bytes: some dozen decisions


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_arrives_breaks_who_reads_it(name: str) -> None:
    target = TARGETS[name]
    made = target.inputs()
    with target.opened() as run:

        @settings(
            max_examples=target.examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.binary(min_size=SIZE, max_size=SIZE).map(made))
        def breaks_nothing(data: bytes) -> None:
            timed(run)(data)

        breaks_nothing()


@pytest.mark.parametrize("name", [name for name, one in TARGETS.items() if one.seeds])
def test_what_fuzzing_begins_with_breaks_nothing(name: str) -> None:
    target = TARGETS[name]
    assert target.seeds is not None
    with target.opened() as run:
        for seed in target.seeds():
            timed(run)(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_at_all_breaks_nothing(name: str) -> None:
    with TARGETS[name].opened() as run:
        run(b"")
