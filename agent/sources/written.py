"""Plain values as text again: YAML in blocks, or JSON, keys in their order. What is read from it is
what was written, by any reader."""

import json
import math
import re

from agent.sources.yaml_text import resolve
from rules.problems import OddNumeral

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_BOOLEANS_OF_OLD = frozenset("yYnN")  # to some readers of YAML 1.1
_STEP = 2
_MOST_LITERAL = 1 << 20  # characters


def json_of(value: object, indent: int | None, depth: int = 0) -> str:
    """JSON; without an indent it is all on one line."""
    if not value or not isinstance(value, dict | list):
        return str(value) if isinstance(value, OddNumeral) else _json_scalar(value)
    comma, start, end = ", ", "", ""
    if indent is not None:
        start = "\n" + " " * indent * (depth + 1)
        comma, end = f",{start}", "\n" + " " * indent * depth
    if isinstance(value, dict):
        inner = (
            f"{_json_scalar(key)}: {json_of(one, indent, depth + 1)}" for key, one in value.items()
        )
        return f"{{{start}{comma.join(inner)}{end}}}"
    return f"[{start}{comma.join(json_of(one, indent, depth + 1) for one in value)}{end}]"


def _json_scalar(value: object) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # how it can only have been written
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)  # half a pair, for one


def block(value: object, column: int, dash: int = _STEP) -> list[str]:
    """The lines of a value that begins at that column; lists are so much further in."""
    pad = " " * column
    if isinstance(value, dict) and value:
        return [
            line
            for key, inner in value.items()
            for line in _entry(f"{pad}{scalar(key)}:", inner, column, dash)
        ]
    if isinstance(value, list) and value:
        made: list[str] = []
        for inner in value:
            first, *rest = block(inner, column + _STEP, dash)
            made += [f"{pad}- {first[column + _STEP :]}", *rest]
        return made
    return [
        pad + line if number == 0 else line
        for number, line in enumerate(_scalar_lines(value, column))
    ]


def _entry(head: str, value: object, column: int, dash: int) -> list[str]:
    if isinstance(value, dict | list) and value:
        further = dash if isinstance(value, list) else _STEP
        return [head, *block(value, column + further, dash)]
    first, *rest = _scalar_lines(value, column)
    return [f"{head} {first}", *rest]


def _scalar_lines(value: object, column: int) -> list[str]:
    """A scalar, texts of several lines as such where nothing is lost."""
    if not isinstance(value, str) or isinstance(value, OddNumeral) or "\n" not in value:
        return [scalar(value)]
    lines = value.removesuffix("\n").split("\n")
    if (
        len(value) > _MOST_LITERAL
        or not lines[0].strip()
        or lines[0][0] in " \t"
        or not lines[-1].strip()
        or not all(line.isprintable() or line.replace("\t", " ").isprintable() for line in lines)
    ):
        return [scalar(value)]
    pad = " " * (column + _STEP)
    head = "|" if value.endswith("\n") else "|-"
    return [head, *(pad + line if line else "" for line in lines)]


def scalar(value: object) -> str:
    """A scalar, or an empty collection, on one line."""
    if isinstance(value, OddNumeral):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)  # numbers, [] and {}


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and resolve(text) == text and text not in _BOOLEANS_OF_OLD:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    code = ord(letter)
    return {"\n": "\\n", "\t": "\\t"}.get(letter) or (
        f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
