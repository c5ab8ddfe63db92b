"""As much of PromQL as tells which metrics an expression names, with which labels: enough to hold
dashboards and alerts to what is really there. Prometheus itself says whether it is PromQL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>[0-9][0-9.]*(?:[eE][+-]?[0-9]+)?[a-z]*)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){},@])
    )""",
    re.VERBOSE,
)
FUNCTIONS = frozenset(
    {"absent", "changes", "count", "histogram_quantile", "increase", "rate", "sum", "time", "topk"}
    | {"vector"}
)
GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
WORDS = frozenset({"and", "or", "unless", "bool", "offset"})


@dataclass
class Expression:
    """What an expression is about."""

    metrics: dict[str, set[str]] = field(
        default_factory=dict
    )  # with the labels that each is asked for
    grouped: set[str] = field(default_factory=set)  # the labels that are left, or matched on
    wanted: list[tuple[str, str, str, str]] = field(
        default_factory=list
    )  # metric, label, sign, value


def read(text: str) -> Expression:
    """What the expression names; ValueError where it is none."""
    tokens = list(_tokens(text))
    found, place = Expression(), 0
    while place < len(tokens):
        kind, word = tokens[place]
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind != "name" or word in WORDS:
            continue
        if word in GROUPING:
            labels, place = _listed(tokens, place)
            found.grouped |= labels
        elif word in FUNCTIONS:
            if after != "(" and after not in GROUPING:
                raise ValueError(f"{word} is a function: {text}")
        elif after == "(":
            raise ValueError(f"{word} is no function that is known: {text}")
        else:
            asked = found.metrics.setdefault(word, set())
            if after == "{":
                for label, sign, value in _matchers(tokens, place + 1):
                    asked.add(label)
                    found.wanted.append((word, label, sign, value))
                place = tokens.index(("sign", "}"), place) + 1
    return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        match = TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise ValueError(f"cannot be read from here on: {text[place:]}")
        yield match.lastgroup, match[match.lastgroup]
        place = match.end()


def _listed(tokens: list[tuple[str, str]], place: int) -> tuple[set[str], int]:
    """The names in brackets."""
    end = tokens.index(("sign", ")"), place)
    return {word for kind, word in tokens[place:end] if kind == "name"}, end + 1


def _matchers(tokens: list[tuple[str, str]], place: int) -> Iterator[tuple[str, str, str]]:
    """label, sign, value; up to the closing brace."""
    end = tokens.index(("sign", "}"), place)
    inside = [one for one in tokens[place:end] if one != ("sign", ",")]
    if len(inside) % 3:
        raise ValueError(f"these are no matchers: {inside}")
    for at in range(0, len(inside), 3):
        (_, label), (_, sign), (_, value) = inside[at : at + 3]
        yield label, sign, value[1:-1]
