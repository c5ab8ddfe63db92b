"""JSON text becomes plain values through the standard library; what it does not tell, the lines and
the keys written twice, is found by a scan of its own when somebody asks."""

import json
import re
from collections.abc import Iterator

from rules.problems import OddNumeral, Path, Problem

Lines = dict[Path, int]

_LONGEST_INTEGER = 20
_MOST_COMMAS = 1_000_000
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


class _RepeatedError(Exception):
    """An object has a key twice."""


def parse(text: str) -> tuple[list[tuple[object, int]], list[Problem]] | None:
    """The document of a text, and every problem met; None if it is not JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    if text.count(",") > _MOST_COMMAS:
        return None
    repeated: list[bool] = []

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            repeated.append(True)
        return made

    try:
        value = json.loads(
            text, object_pairs_hook=mapping, parse_int=_integer, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    line = text.count("\n", 0, len(text) - len(text.lstrip())) + 1
    return [(value, line)], _duplicates(text) if repeated else []
