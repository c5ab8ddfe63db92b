"""Namespaces to write the same rules into, by three ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.written import Three
from tests.spaces import nft, space


@pytest.fixture(scope="module")
def three_spaces() -> Iterator[Three]:
    with space() as one, space() as two, space() as three:
        yield one, two, three


@pytest.fixture
def three(three_spaces: Three) -> Three:
    for one in three_spaces:
        nft(one, "flush ruleset")
    return three_spaces
