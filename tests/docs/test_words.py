"""What the pages have one type exists: commands, options, make targets; and so do their links."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from agent.cli import portranger
from tests.docs.words import FENCE, commands, lines, parse, parsed, spans
from tests.spaces import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`]*`")
HELP = dict(sorted(portranger.commands.items()))

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def ours(page: Path) -> list[list[str]]:
    """Every call of our command that a page has one type."""
    return [call for line in lines(page.read_text()) for call in commands(line, "portranger")]


def mentioned(page: Path) -> list[list[str]]:
    """The calls in its sentences: `portranger X …`, or `X …` with options behind it."""
    found: list[list[str]] = []
    for span in spans(page.read_text()):
        first, _, rest = span.partition(" ")
        if first == "portranger" and rest:
            found += commands(span, "portranger")
        elif first in portranger.commands and re.search(r"(^| )-", rest):
            found += commands(f"portranger {span}", "portranger")
    return [[word for word in call if word not in ("…", "...")] for call in found]


def anchors(page: Path) -> set[str]:
    """What a link can lead to on a page, as GitHub names it."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@by_page
def test_every_command_that_is_to_be_typed_parses(page: Path) -> None:
    for call in ours(page):
        parse(call)


@by_page
def test_every_command_that_is_mentioned_exists_with_its_options(page: Path) -> None:
    for call in mentioned(page):
        parse(call, whole=False)


def test_the_readme_shows_most_commands() -> None:
    used = {call[0] for call in [*ours(README), *mentioned(README)]}
    assert {"plan", "apply", "show", "explain", "clear", "run", "status", "validate"} <= used


@by_page
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = {one for code in [*lines(text), *spans(text)] for one in TARGET.findall(code)}
    real = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= real


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(CODE.sub("", FENCE.sub("", page.read_text()))):
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        if "://" in link:
            continue
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("line", ["portranger plann -f a", "portranger plan -f a --backend nope"])
def test_what_does_not_parse_is_found_out(line: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(line)


@pytest.mark.parametrize("name", HELP)
def test_every_option_has_a_help_text(name: str) -> None:
    for one in HELP[name].params:
        if isinstance(one, click.Option):
            assert one.help, one.name
            assert re.fullmatch(r"[A-Z].*[^.]\.", one.help), one.help


@pytest.mark.parametrize("name", HELP)
def test_every_command_is_told_in_a_line_that_fits(name: str) -> None:
    # In 45 characters, which completions have for it.
    assert HELP[name].get_short_help_str() == HELP[name].get_short_help_str(500)


@pytest.mark.parametrize("name", sorted(HELP.keys() - {"demo"}))
def test_the_help_of_a_command_ends_with_examples_that_can_be_typed(name: str) -> None:
    examples = [line.strip() for line in (HELP[name].epilog or "").splitlines()[2:]]
    assert examples
    for line in examples:
        assert line.startswith(f"portranger {name}")
        parsed(line)
        assert len(line) < 90
