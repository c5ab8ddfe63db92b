"""The lines of one YAML document, and what to put in their place so that they say something else.
It changes what is written in blocks, a line for every key; of anything else it says that it cannot.
"""

import re
from collections.abc import Iterator

from agent.sources import yaml_text
from agent.sources.written import block, scalar
from rules.problems import Path

Span = tuple[int, int]  # from this line, counted from nought, to before that one
Edit = tuple[int, int, list[str]]  # a span, and what to put there

_PREFIX = re.compile(r" *(?:- +)*")
_DASH = re.compile(r"( *)- +")
_FLOW_ITEM = re.compile(r"( *- +)\{[^#]*\}(\s*(?:\s#.*)?)")
_VALUE = re.compile(
    r"""(?P<head>[^:]*:\s+)(?P<value>"[^"\\]*"|'[^']*'|[^\s#"'&*!|>{\[][^#]*?)"""
    r"""(?P<tail>\s*(?:\s\#.*)?)"""
)
_NUMBERS = ("port", "containerPort")


def same(one: object, other: object) -> bool:
    """Whether two values are written alike: True is not 1, and the order of keys counts."""
    return repr(one) == repr(other)


class Page:
    """The lines of one document, and which of them say what."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        [self.places] = yaml_text.lines(text)
        self._return = "\r" if "\r\n" in text else ""
        end = (at for at, line in enumerate(self.lines) if at and line.startswith("..."))
        self._after = _afters(self.places, next(end, len(self.lines)))
        self.dash = self._find_dash()

    def with_edits(self, edits: list[Edit]) -> str:
        """The text, with these lines instead of those."""
        lines = list(self.lines)
        for start, end, instead in sorted(edits, key=lambda edit: edit[:2], reverse=True):
            lines[start:end] = [
                line if line.endswith(self._return) else line + self._return for line in instead
            ]
        return "\n".join(lines)

    def patch(self, path: Path, old: object, new: object) -> list[Edit] | None:
        """What to do with the lines of a value; None if it must be written anew as a whole."""
        if isinstance(old, dict) and isinstance(new, dict) and old and new:
            return self._mapping(path, old, new)
        if isinstance(old, list) and isinstance(new, list) and old and new:
            return self._sequence(path, old, new)
        return None

    # ------------------------------------------------------------------------------- mappings

    def _mapping(
        self, path: Path, old: dict[str, object], new: dict[str, object]
    ) -> list[Edit] | None:
        columns = {self._column((*path, key)) for key in old}
        column = columns.pop()
        if (
            columns
            or column is None
            or [k for k in old if k in new] != [k for k in new if k in old]
        ):
            return None
        edits: list[Edit] = []
        for key in old.keys() - new.keys():
            start, end = self._extent((*path, key))
            if self.lines[start][:column].strip():  # the dash of a list item is before it
                return None
            edits.append((start, end, []))
        for key, value in new.items():
            if key in old and not same(old[key], value):
                edits += self._value((*path, key), old[key], value, column)
        for before, added in _additions(old, new):
            start, end = self._extent((*path, before or next(iter(old))))
            if not before and self.lines[start][:column].strip():
                return None
            at = end if before else start
            edits.append((at, at, block(added, column, self.dash)))
        return edits

    def _value(self, path: Path, old: object, new: object, column: int) -> list[Edit]:
        """Change the value of a key, by its parts or as a whole."""
        edits = self.patch(path, old, new)
        if edits is not None:
            return edits
        start, end = self._extent(path)
        first = self.lines[start]
        if end == start + 1 and not isinstance(new, dict | list):
            return [(start, end, [first[:column] + _set(first[column:], str(path[-1]), new)])]
        made = block({str(path[-1]): new}, column, self.dash)
        return [(start, end, [first[:column] + made[0][column:], *made[1:]])]

    # ---------------------------------------------------------------------------------- lists

    def _sequence(self, path: Path, old: list[object], new: list[object]) -> list[Edit] | None:
        places = [(*path, at) for at in range(len(old))]
        if not all(place in self.places for place in places):  # it is an alias of another
            return None
        heads = [_DASH.match(self.lines[self.places[place] - 1]) for place in places]
        if None in heads or len({head[1] for head in heads if head}) > 1:
            return None
        spans = list(map(self._extent, places))
        if any(end <= start for start, end in spans):
            return None
        if len(old) == len(new) and list(map(_number, old)) == list(map(_number, new)):
            return self._one_by_one(path, spans, old, new)
        origins = _origins(old, new)
        if origins is None:
            return None
        return [(spans[0][0], spans[-1][1], self._list(spans, old, new, origins))]

    def _one_by_one(
        self, path: Path, spans: list[Span], old: list[object], new: list[object]
    ) -> list[Edit]:
        edits: list[Edit] = []
        for at, (start, end) in enumerate(spans):
            if same(old[at], new[at]):
                continue
            inner = self.patch((*path, at), old[at], new[at])
            if inner is None:
                inner = [(start, end, self._item((start, end), old[at], new[at], first=True))]
            edits += inner
        return edits

    def _list(
        self,
        spans: list[Span],
        old: list[object],
        new: list[object],
        origins: list[tuple[int, bool]],
    ) -> list[str]:
        """The lines of a list of ports: each item as the one that it comes from is written, and
        what stands between them where it stood."""
        made: list[str] = []
        reached = 0
        for value, (at, first) in zip(new, origins, strict=True):
            while first and reached < at:
                reached += 1
                gap = self.lines[spans[reached - 1][1] : spans[reached][0]]
                made += [line for line in gap if line.strip() or reached == at]
            made += self._item(spans[at], old[at], value, first=first)
        for after in range(reached + 1, len(spans)):
            made += [
                one for one in self.lines[spans[after - 1][1] : spans[after][0]] if one.strip()
            ]
        return made

    def _item(self, span: Span, old: object, new: object, *, first: bool) -> list[str]:
        """An item, written as another is; only the first that is made of it has its comments."""
        lines = self.lines[slice(*span)]
        if first and same(old, new):
            return lines
        head = _PREFIX.match(lines[0])
        column = head.end() if head else 0
        if not isinstance(new, dict) or any(isinstance(one, dict | list) for one in new.values()):
            return _dashed(block(new, column, self.dash), lines[0][:column])
        flow = _FLOW_ITEM.fullmatch(lines[0]) if len(lines) == 1 else None
        if flow:
            pairs = ", ".join(f"{scalar(key)}: {scalar(value)}" for key, value in new.items())
            return [f"{flow[1]}{{{pairs}}}{flow[2] if first else ''}"]
        texts = _texts(lines, column)
        made: list[str] = []
        for key, value in new.items():
            comments, text = texts.get(key, ([], f"{key}: x"))
            made += comments if first else []
            made.append(" " * column + _set(text, key, value, comment=first))
        return _dashed(made, lines[0][:column])

    # --------------------------------------------------------------------------------- places

    def _column(self, path: Path) -> int | None:
        """Where a key is written; None if other things are on its line before it."""
        if path not in self.places:
            return None
        line, key = self.lines[self.places[path] - 1], str(path[-1])
        found = _PREFIX.match(line)
        column = found.end() if found else 0
        begun = tuple(f"{quote}{key}{quote}:" for quote in ("", '"', "'"))
        return column if line.startswith(begun, column) else None

    def _extent(self, path: Path) -> Span:
        """The lines of a key or an item, without comments and empty lines behind it."""
        start, end = self.places[path] - 1, self._after[path]
        while end > start + 1 and _is_idle(self.lines[end - 1]):
            end -= 1
        return start, end

    def _find_dash(self) -> int:
        for path in self._after:
            if path and path[-1] == 0:
                key = self._column(path[:-1])
                dash = _DASH.match(self.lines[self.places[path] - 1])
                if key is not None and dash:
                    return len(dash[1]) - key
        return 2


def _afters(places: dict[Path, int], end: int) -> dict[Path, int]:
    """The line (from nought) on which something begins that is no part of what is at a path."""
    after: dict[Path, int] = {}
    waiting: list[Path] = []
    for path, line in places.items():
        while waiting and len(waiting[-1]) >= len(path):
            after[waiting.pop()] = line - 1
        waiting.append(path)
    return after | dict.fromkeys(waiting, end)


def _is_idle(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _additions(
    old: dict[str, object], new: dict[str, object]
) -> Iterator[tuple[str, dict[str, object]]]:
    """What is new in a mapping, by the key that it comes behind; none: it comes first."""
    groups: dict[str, dict[str, object]] = {}
    before = ""
    for key, value in new.items():
        if key in old:
            before = key
        else:
            groups.setdefault(before, {})[key] = value
    yield from groups.items()


def _number(item: object) -> object:
    if not isinstance(item, dict):
        return None
    protocol = item.get("protocol") or "TCP"
    return next(((item[key], protocol) for key in _NUMBERS if key in item), None)


def _origins(old: list[object], new: list[object]) -> list[tuple[int, bool]] | None:
    """For each new port the old one that it is made of: that of its number, else that of the one
    before; and whether it is the first."""
    places = {number: at for at, number in reversed(list(enumerate(map(_number, old))))}
    if None in places or None in map(_number, new):
        return None
    found: list[tuple[int, bool]] = []
    used: set[int] = set()
    last = 0
    for number in map(_number, new):
        at = places.get(number, last)
        found.append((at, number in places and at not in used))
        used.add(at)
        last = at
    return found


def _texts(lines: list[str], column: int) -> dict[str, tuple[list[str], str]]:
    """By key, what an item says of it, and the comments before."""
    found: dict[str, tuple[list[str], str]] = {}
    comments: list[str] = []
    for line in lines:
        if _is_idle(line):
            comments.append(line)
            continue
        key = line[column:].partition(":")[0].strip("\"'")
        found[key] = comments, line[column:]
        comments = []
    return found


def _dashed(lines: list[str], prefix: str) -> list[str]:
    """The lines of an item, with its dash before the first that is no comment."""
    at = next((number for number, line in enumerate(lines) if not _is_idle(line)), 0)
    lines[at] = prefix + lines[at][len(prefix) :]
    return lines


def _set(text: str, key: str, value: object, *, comment: bool = True) -> str:
    """`key: value # comment` with another value, quoted as before."""
    found = _VALUE.fullmatch(text)
    if found is None:
        return f"{scalar(key)}: {scalar(value)}"
    quote = found["value"][0]
    plain = scalar(value)
    if quote in "\"'" and isinstance(value, str) and plain == value:
        plain = f"{quote}{value}{quote}"
    return f"{found['head']}{plain}{found['tail'] if comment else ''}".rstrip()
