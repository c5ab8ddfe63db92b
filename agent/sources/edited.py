"""Manifests changed in their own text: lines that say what they said before stay as they are, with
their comments; where the lines cannot be told apart, the smallest part around them is written anew.
Whatever was edited is read again, and must say what it is meant to say."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from agent.sources import json_text, yaml_text
from agent.sources.written import block, json_of
from agent.sources.yaml_lines import Page, same

Change = Callable[[object], object]

_MARKER = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_HEAD = re.compile(r"(?:---[ \t]*(?:#[^\n]*)?\r?\n)?(?:[ \t]*(?:#[^\n]*)?\r?\n)*")


def edited(text: str, change: Change) -> str:
    """The text with each of its documents changed; it must be one that can be read."""
    parsed = json_text.parse(text)
    if parsed:
        [(value, _)], _ = parsed
        wanted = change(value)
        return text if same(value, wanted) else json_of(wanted, _indent(text)) + "\n"
    return _edited_yaml(text, change)


def together(texts: Sequence[str]) -> str:
    """The texts as one; several are the documents of a YAML stream, whatever they were."""
    if len(texts) == 1:
        return texts[0]
    whole = ""
    for text in texts:
        parsed = json_text.parse(text)
        made = _lines_of(block(parsed[0][0][0], 0)) if parsed else text
        if whole and _DIRECTIVE.search(made):
            whole += "...\n"
        elif whole and not _MARKER.match(made):
            whole += "---\n"
        whole += made if made.endswith("\n") else f"{made}\n"
    return whole


def _indent(text: str) -> int | None:
    found = re.match(r"\s*[{\[]\r?\n( *)", text)
    return len(found[1]) if found else None


def _edited_yaml(text: str, change: Change) -> str:
    values = _values(text)
    wanted = [change(value) for value in values]
    if same(values, wanted):
        return text
    chunks = _chunks(text)
    read = [values] if len(chunks) == 1 else [_values(chunk) for chunk in chunks]
    if not same([value for part in read for value in part], values):  # directives, for one
        return "---\n".join(_lines_of(block(value, 0)) for value in wanted)
    following = iter(wanted)
    return "".join(
        _edited_chunk(chunk, part[0], next(following)) if part else chunk
        for chunk, part in zip(chunks, read, strict=True)
    )


def _values(text: str) -> list[object]:
    return [value for value, _ in yaml_text.parse(text)[0]]


def _chunks(text: str) -> list[str]:
    """The documents of a text, each with the marker before it."""
    starts = [0, *(found.start() for found in _MARKER.finditer(text) if found.start()), len(text)]
    return [text[start:end] for start, end in pairwise(starts)]


def _edited_chunk(text: str, old: object, new: object) -> str:
    if same(old, new):
        return text
    page = Page(text)
    edits = page.patch((), old, new)
    if edits is not None:
        made = page.with_edits(edits)
        documents, problems = yaml_text.parse(made)
        if not problems and len(documents) == 1 and same(documents[0][0], new):
            return made
    head = _HEAD.match(text)
    marker = "---\n" if text.startswith("---") and not (head and head[0]) else ""
    return (head[0] if head else "") + marker + _lines_of(block(new, 0, page.dash))


def _lines_of(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
