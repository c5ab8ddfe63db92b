"""What every test of the daemon begins with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.running import Node, made
from tests.spaces import pod


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with made(tmp_path / "node") as one:
        yield one


@pytest.fixture
def blue() -> Iterator[str]:
    """A namespace to forward in."""
    with pod() as name:
        yield name


@pytest.fixture
def red() -> Iterator[str]:
    """Another one."""
    with pod() as name:
        yield name
