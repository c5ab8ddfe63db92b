"""YAML text becomes plain values: mappings, lists and scalars, built here from the parser's events
so that nothing in a text can construct anything else, and what readers disagree on is kept apart.
"""

import re

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from rules.problems import OddNumeral, Path, Problem, shown

Document = tuple[object, int]  # the value, and the line it begins on
Lines = dict[Path, int]

MOST_VALUES = 1_000_000
DEEPEST = 100
_LONGEST_NUMBER = 400  # more digits than any number has that is worth telling wrong

_WORDS = {
    spelling: meaning
    for meaning, words in (
        (None, ("null",)),
        (True, ("true", "yes", "on")),
        (False, ("false", "no", "off")),
    )
    for word in words
    for spelling in (word, word.capitalize(), word.upper())
} | {"": None, "~": None}
_NUMBER_STARTS = frozenset("0123456789+-.")
_NOT_FINITE = {
    f"{sign}.{word}": float(f"{sign}{word}")
    for sign in ("", "+", "-")
    for word in ("inf", "Inf", "INF", "nan", "NaN", "NAN")
}
_INTEGER = re.compile("-?(?:0|[1-9][0-9]*)")
_ODD = re.compile(
    r"""[-+]? (?: 0[0-9_]+ | 0[bB][01_]+ | 0[oO][0-7_]+ | 0[xX][0-9a-fA-F_]+
        | [1-9][0-9]*_[0-9_]* | [1-9][0-9_]*(?: :[0-5]?[0-9] )+(?: \.[0-9_]* )? )
        | [+](?: 0 | [1-9][0-9]* )""",
    re.VERBOSE,
)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")

_MERGE = "<<"
_TAGS = "tag:yaml.org,2002:"
_PLAIN = "Write plain values: no mapping, list or text needs a tag."


class _NoUseError(Exception):
    """There is no use in reading on."""


def parse(text: str, *, most: int = MOST_VALUES) -> tuple[list[Document], list[Problem]]:
    """The documents of a text, and every problem met; their paths and lines are filled in."""
    builder = _Builder(text, most, None)
    return builder.documents(), builder.problems


def lines(text: str) -> list[Lines]:
    """The line of every key and list item, a mapping from paths per document."""
    found: list[Lines] = []
    _Builder(text, MOST_VALUES, found).documents()
    return found


def resolve(text: str) -> object:
    """What a scalar without quotes stands for."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_STARTS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= _LONGEST_NUMBER else OddNumeral(text)
    if _ODD.fullmatch(text):
        return OddNumeral(text)
    if len(text) <= _LONGEST_NUMBER and _FLOAT.fullmatch(text):
        return float(text)
    return _NOT_FINITE.get(text, text)


class _Builder:
    """Turns the events of one text into values, and keeps the path to where it is."""

    def __init__(self, text: str, most: int, found: list[Lines] | None) -> None:
        self.text = text
        self.left = self.most = most
        self.found = found
        self.problems: list[Problem] = []
        self.path: list[str | int] = []
        self.anchors: dict[str, tuple[object, int] | None] = {}  # None: still being read

    def documents(self) -> list[Document]:
        made: list[Document] = []
        try:
            self._read(made)
        except _NoUseError:
            pass
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._syntax(error.problem or "unreadable", mark.line + 1 if mark else 1)
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            self._syntax("a character that YAML does not allow", line)
        except UnicodeEncodeError as error:
            line = self.text.count("\n", 0, error.start) + 1
            self._syntax("half of a surrogate pair", line)
        return made

    def _read(self, made: list[Document]) -> None:
        loader = _LOADER(self.text)
        self.next = loader.get_event
        try:
            while not isinstance(event := self.next(), StreamEndEvent):
                if isinstance(event, DocumentStartEvent):
                    made.append(self._document(self.next()))
        finally:
            loader.dispose()

    def _document(self, event: Event) -> Document:
        self.anchors.clear()
        line = _line(event)
        if self.found is not None:
            self.found.append({(): line})
        return self._value(event), line

    def _value(self, event: Event) -> object:
        if isinstance(event, AliasEvent):
            return self._aliased(event)
        before = self.left
        self._count(1, event)
        value: object
        if isinstance(event, ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, CollectionStartEvent):
            value = self._collection(event)
        else:
            return None  # the parser puts no other event here
        if event.anchor:
            self.anchors[event.anchor] = value, before - self.left
        return value

    def _collection(self, event: CollectionStartEvent) -> object:
        if len(self.path) > DEEPEST:
            self._stop("yaml-too-deep", event, f"is nested more than {DEEPEST} deep")
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, MappingStartEvent):
            self._check_tag(event, "map")
            return self._mapping()
        self._check_tag(event, "seq")
        return self._sequence()

    def _sequence(self) -> list[object]:
        values: list[object] = []
        while not isinstance(event := self.next(), SequenceEndEvent):
            self._enter(len(values), event)
            values.append(self._value(event))
            self.path.pop()
        return values

    def _mapping(self) -> dict[str, object]:
        values: dict[str, object] = {}
        merged: list[dict[str, object]] = []
        while not isinstance(event := self.next(), MappingEndEvent):
            merge = isinstance(event, ScalarEvent) and event.value == _MERGE and event.implicit[0]
            key = self._key(event)
            self._enter(key, event)
            value = self._value(self.next())
            if merge:
                merged += self._merged(value, event)
            elif key in values:
                what = "is written twice in one mapping"
                self._problem("yaml-duplicate-key", event, what, "Keep one of the two.")
            else:
                values[key] = value
            self.path.pop()
        for mapping in merged:
            for key, value in mapping.items():
                values.setdefault(key, value)
        return values

    def _merged(self, value: object, event: Event) -> list[dict[str, object]]:
        mappings = value if isinstance(value, list) else [value]
        taken = [mapping for mapping in mappings if isinstance(mapping, dict)]
        if len(taken) < len(mappings):
            fix = "Write << with an alias of a mapping, or a list of such aliases."
            self._problem("yaml-merge", event, "merges something that is no mapping", fix)
        return taken

    def _key(self, event: Event) -> str:
        self.path.append("?")
        key = self._value(event)
        self.path.pop()
        if isinstance(key, str) and not isinstance(key, OddNumeral):
            return key
        name = event.value if isinstance(event, ScalarEvent) else "?"
        self.path.append(name)
        self._problem("yaml-key", event, "is a key that is not a string", "Put it in quotes.")
        self.path.pop()
        return name

    def _scalar(self, event: ScalarEvent) -> object:
        if event.tag is None and event.implicit[0]:
            return resolve(event.value)
        self._check_tag(event, "str")
        return event.value

    def _check_tag(self, event: ScalarEvent | CollectionStartEvent, name: str) -> None:
        if event.tag not in (None, "!", _TAGS + name):
            tag = shown(event.tag.replace(_TAGS, "!!"))
            self._problem("yaml-tag", event, f"has the tag {tag}", _PLAIN)

    def _aliased(self, event: AliasEvent) -> object:
        if event.anchor not in self.anchors:
            what = f"is an alias of {event.anchor}, which is no anchor before it"
        elif (known := self.anchors[event.anchor]) is None:
            what = f"is an alias of {event.anchor}, inside that very anchor"
        else:
            value, size = known
            self._count(size, event)
            return value
        self._problem("yaml-alias", event, what, "Write the value itself.")
        return None

    def _count(self, size: int, event: Event) -> None:
        self.left -= size
        if self.left < 0:
            self._stop("yaml-too-large", event, f"has more than {self.most} values")

    def _enter(self, step: str | int, event: Event) -> None:
        self.path.append(step)
        if self.found is not None:
            self.found[-1].setdefault(tuple(self.path), _line(event))

    def _stop(self, code: str, event: Event, what: str) -> None:
        self.path.clear()
        self._problem(code, event, f"the text {what}", "Split it, or write it more simply.")
        raise _NoUseError

    def _syntax(self, what: str, line: int) -> None:
        self.problems.append(
            Problem(
                code="yaml-syntax",
                path=(),
                what=f"this is not YAML: {what}",
                fix="Correct the text here or just before.",
                line=line,
            )
        )

    def _problem(self, code: str, event: Event, what: str, fix: str) -> None:
        path = tuple(self.path)
        line = _line(event)
        self.problems.append(Problem(code=code, path=path, what=what, fix=fix, line=line))


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


# The C parser is eight times faster; PyYAML built without libyaml does not have it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
