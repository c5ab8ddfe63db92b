"""Command lines as documents show them, read by the parser that would read them in earnest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from agent.cli import portranger

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4,}(\S.*)$", re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ENDS = {"|", "||", "&", "&&", ";", "(", ")"}
REDIRECTIONS = {"<", ">", ">>", "<<", "<<<"}


def lines(text: str) -> list[str]:
    """What a page has one type, line by line: in a console after the dollar, or in an indented
    block."""
    fenced = [line for kind, block in FENCE.findall(text) for line in _typed(kind, block)]
    return [*fenced, *INDENTED.findall(FENCE.sub("", text))]


def _typed(kind: str, block: str) -> list[str]:
    if kind == "console":
        return re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    return block.splitlines() if kind in ("sh", "bash", "shell") else []


def spans(text: str) -> list[str]:
    """What a page quotes within its sentences, each on one line."""
    prose = INDENTED.sub("", FENCE.sub("", text))
    return [" ".join(span.split()) for span in SPAN.findall(prose)]


def commands(line: str, name: str) -> Iterator[list[str]]:
    """The words of each call of that program in a line of the shell, also behind sudo."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    simple: list[str] = []
    try:
        words = [*reader, ";"]
    except ValueError:  # no shell: a picture, or a sentence
        return
    for word in words:
        if word not in ENDS:
            simple.append(word)
            continue
        program, *arguments = _unwrapped(simple) or [""]
        if program.rpartition("/")[2] == name:
            yield _arguments(arguments)
        simple = []


def _unwrapped(words: list[str]) -> list[str]:
    """Without what runs another program."""
    if words[:1] == ["sudo"]:
        return _unwrapped(words[1:])
    return _unwrapped(words[4:]) if words[:3] == ["ip", "netns", "exec"] else words


def _arguments(words: list[str]) -> list[str]:
    """Without what is the shell's: where output goes to, and input comes from."""
    for index, word in enumerate(words):
        if word in REDIRECTIONS:
            return words[: index - 1 if words[index - 1].isdecimal() else index]
    return words


def parse(arguments: list[str], *, whole: bool = True) -> None:
    """Raise what the command line would say; where it is only mentioned, something may lack."""
    try:
        name, *rest = arguments
        command = portranger.commands.get(name, portranger)
        command.make_context(name, arguments if command is portranger else rest).close()
        if command is portranger:
            raise click.UsageError(f"There is no command {name}.")
    except click.exceptions.Exit:  # of --help and --version
        return
    except (click.MissingParameter, click.BadOptionUsage):
        if whole:
            raise


def parsed(line: str) -> None:
    """Every call of ours in a line makes sense; and there is one."""
    found = list(commands(line, "portranger"))
    assert found, line
    for arguments in found:
        parse(arguments)
