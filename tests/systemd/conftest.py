"""One machine for all tests of this folder that only use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systemd.machine import Machine, booted, why_not


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    if reason := why_not():
        pytest.skip(reason)
    with booted() as made:
        yield made
