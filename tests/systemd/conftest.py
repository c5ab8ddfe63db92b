"""One machine for all tests here that do it no harm, and its service, as new for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systemd.machine import Machine, booted, why_not
from tests.systemd.service import Service


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    if reason := why_not():
        pytest.skip(reason)
    with booted() as made:
        yield made


@pytest.fixture
def service(machine: Machine) -> Iterator[Service]:
    """Whatever happens to it, it never leaves a traceback in the journal."""
    made = Service(machine)
    try:
        yield made
        assert not made.said("Traceback")
    finally:
        made.clear()
