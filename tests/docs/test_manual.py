"""The manual names every command and every option, and none that does not exist."""

from __future__ import annotations

import re

import click
import pytest

from agent.cli import portranger
from tests.spaces import ROOT

MANUAL = ROOT / "docs" / "portranger.8"
SPELLING = re.compile(r"\bFl (-?[a-z][a-z-]*)")
COMMANDS = sorted(portranger.commands)


def sections(text: str, macro: str) -> dict[str, str]:
    """The sections of the manual by their headings; `macro` is Sh or, below that, Ss."""
    parts = re.split(rf"^\.{macro} (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def spelt(text: str) -> set[str]:
    """The options in a piece of the manual, as one types them."""
    return {f"-{name}" for name in SPELLING.findall(text)}


def options(command: click.Command) -> list[set[str]]:
    """The spellings of each option of a command, but for --help, which all have."""
    given = [one for one in command.params if isinstance(one, click.Option)]
    return [{*one.opts, *one.secondary_opts} for one in given]


@pytest.fixture(scope="module")
def manual() -> dict[str, str]:
    return sections(MANUAL.read_text(), "Sh")


def test_it_has_a_section_on_each_command(manual: dict[str, str]) -> None:
    assert sorted(sections(manual["COMMANDS"], "Ss")) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_exactly_the_options_that_it_is_said_to_have(
    manual: dict[str, str], name: str
) -> None:
    said = spelt(sections(manual["COMMANDS"], "Ss")[name])
    real = options(portranger.commands[name])
    assert said <= set().union(*real)
    for spellings in real:
        assert said & spellings, f"{name}: {spellings} is missing"


def test_every_spelling_of_every_option_is_in_it(manual: dict[str, str]) -> None:
    real = [options(command) for command in (portranger, *portranger.commands.values())]
    every = {spelling for command in real for option in command for spelling in option}
    assert every <= spelt(MANUAL.read_text())


def test_the_exit_codes_are_those_of_the_help(manual: dict[str, str]) -> None:
    said = re.findall(r"^\.It (\d+)$", manual["EXIT STATUS"], re.MULTILINE)
    assert said == re.findall(r"\b\d+\b", portranger.epilog or "")
