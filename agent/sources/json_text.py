"""JSON text becomes plain values through the standard library; what it does not tell, the lines and
the keys written twice, is found by a scan of its own when somebody asks."""

import json
import re
from collections.abc import Iterator

from rules.problems import OddNumeral, Path, Problem

Document = tuple[object, int]  # the value, and the line it begins on
Lines = dict[Path, int]

_BLANK = " \t\r\n"
_LONGEST_INTEGER = 20  # beyond 64 bits, where readers give up in different ways
_MOST_COMMAS = 1_000_000
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def parse(text: str) -> tuple[list[Document], list[Problem]] | None:
    """The document of a text, and every problem met; None if it is not JSON we would read."""
    start = len(text) - len(text.lstrip(_BLANK))
    if text[start : start + 1] not in ("{", "[") or text.count(",") > _MOST_COMMAS:
        return None
    repeated = False

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal repeated
        made = dict(pairs)
        repeated = repeated or len(made) < len(pairs)
        return made

    try:
        value = json.loads(
            text, object_pairs_hook=mapping, parse_int=_integer, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    line = 1 + text.count("\n", 0, start)
    return [(value, line)], _repeated(text) if repeated else []


def lines(text: str) -> list[Lines]:
    """The line of every key and list item of a JSON text, a mapping from paths per document."""
    found: Lines = {}
    for path, line, _ in _steps(text):
        found[path] = line
    return [found]


def _integer(text: str) -> int | OddNumeral:
    return int(text) if len(text) <= _LONGEST_INTEGER else OddNumeral(text)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _repeated(text: str) -> list[Problem]:
    return [
        Problem(
            code="json-duplicate-key",
            path=path,
            what="is written twice in one object",
            fix="Keep one of the two.",
            line=line,
        )
        for path, line, again in _steps(text)
        if again
    ]


def _steps(text: str) -> Iterator[tuple[Path, int, bool]]:
    """The root, every key and every list item of a valid text: its line, and whether it is there
    again."""
    path: list[str | int] = []
    keys: list[set[str]] = []
    key_next = False
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        mark = match.group()
        line += text.count("\n", position, match.start())
        position = match.start()
        if mark in "}]":
            path.pop()
            keys.pop()
        elif mark == ",":
            step = path[-1]
            key_next = isinstance(step, str)
            if isinstance(step, int):
                path[-1] = step + 1
        elif mark == ":":
            key_next = False
        elif key_next:
            path[-1] = key = json.loads(mark)
            yield tuple(path), line, key in keys[-1]
            keys[-1].add(key)
        else:
            if not path or isinstance(path[-1], int):
                yield tuple(path), line, False
            if mark in "{[":
                key_next = mark == "{"
                path.append("" if key_next else 0)
                keys.append(set())
