"""The packages, which take longest: built once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.packaging.building import Built, packages
from tests.systemd.machine import why_not


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    if reason := why_not():
        pytest.skip(reason)
    yield from packages(tmp_path_factory.mktemp("packages"))
