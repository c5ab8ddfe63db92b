"""What the README shows is what happens."""

import pytest

from tests.docs.readme import README, commands, rendered


@pytest.mark.needs_root
def test_every_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    assert sum(map(len, commands(text))) > 10
    assert rendered(text) == text
