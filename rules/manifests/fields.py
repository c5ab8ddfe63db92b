"""Typed getters over one mapping of a manifest: every other module here asks its questions
through them, and what does not fit becomes a Problem with its path."""

from collections.abc import Iterable, Mapping

from rules.problems import ABSENT, OddNumeral, Path, Problem, shown

LONGEST_KEY_COMPARED = 64
MOST_PROBLEMS = 10_000  # of one object: a tenant's is a megabyte, and each node holds what is told


def told(found: list[Problem], path: Path, most: int) -> list[Problem]:
    """Those of the problems at a path that are told; where there are more, that is one, too."""
    if len(found) <= most:
        return found
    what = f"has {len(found)} problems, of which {most} are told"
    fix = "Correct those first."
    return [*found[:most], Problem(code="too-many-problems", path=path, what=what, fix=fix)]


class Fields:
    """A mapping, the path it stands at, and the list its problems go to."""

    __slots__ = ("found", "path", "values")

    def __init__(self, values: Mapping[object, object], path: Path, found: list[Problem]) -> None:
        self.values = values
        self.path = path
        self.found = found

    def problem(
        self, code: str, what: str, fix: str, *, at: Path = (), value: object = ABSENT
    ) -> None:
        """Note what is wrong at a path below this mapping. Where there is too much already, the
        last is noted again: how many there are is what some of our readers go by."""
        if len(self.found) >= MOST_PROBLEMS:
            self.found.append(self.found[-1])
            return
        path = self.path + at
        self.found.append(Problem(code=code, path=path, what=what, fix=fix, value=value))

    def given(self, key: str) -> bool:
        """Whether the key has a value; null is none, as it is in Kubernetes."""
        return self.values.get(key) is not None

    def mapping(self, key: str) -> "Fields":
        """The mapping of that key; an empty one where there is none."""
        value = self.values.get(key)
        if isinstance(value, dict):
            return Fields(value, (*self.path, key), self.found)
        if value is not None:
            self._not_a_mapping((key,), value)
        return Fields({}, (*self.path, key), self.found)

    def mappings(self, key: str) -> "list[Fields]":
        """The mappings in the list of that key."""
        made: list[Fields] = []
        for index, value in enumerate(self.sequence(key)):
            if isinstance(value, dict):
                made.append(Fields(value, (*self.path, key, index), self.found))
            else:
                self._not_a_mapping((key, index), value)
        return made

    def sequence(self, key: str) -> list[object]:
        """The list of that key; an empty one where there is none."""
        value = self.values.get(key)
        if isinstance(value, list):
            return value
        if value is not None:
            self.problem(
                "not-a-list", "must be a list", f"Write {key}: as a list.", at=(key,), value=value
            )
        return []

    def string(self, key: str, *, required: bool = False) -> str | None:
        """The text of that key."""
        value = self.values.get(key, ABSENT)
        if value is ABSENT:
            if required:
                self.missing(key, "a string")
            return None
        text = as_text(value)
        if text is None:
            self.problem(
                "not-a-string", "must be a string", "Put it in quotes.", at=(key,), value=value
            )
        return text

    def text(self, key: str) -> str:
        """The same where none, null and an empty text are all not given, as in Kubernetes."""
        return (self.string(key) or "") if self.given(key) else ""

    def boolean(self, key: str) -> bool | None:
        """The truth value of that key."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        self.problem(
            "not-a-boolean",
            "must be true or false",
            "Write true or false, without quotes.",
            at=(key,),
            value=value,
        )
        return None

    def integer(self, key: str) -> int | None:
        """The whole number of that key, which must be there and leave nothing to misread."""
        value = self.values.get(key, ABSENT)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is ABSENT:
            self.missing(key, "a number")
        elif isinstance(value, OddNumeral):
            self.problem(
                "ambiguous-number",
                "is written so that programs read different numbers in it",
                "Write it in plain decimal digits, such as 8080.",
                at=(key,),
                value=value,
            )
        else:
            self.problem(
                "not-an-integer",
                "must be a whole number",
                "Write it in plain decimal digits without quotes, such as 8080.",
                at=(key,),
                value=value,
            )
        return None

    def missing(self, key: str, wanted: str) -> None:
        """Note that a mandatory key is not there."""
        self.problem("missing", "is missing", f"Add {key}: with {wanted}.", at=(key,))

    def only(self, known: tuple[str, ...]) -> None:
        """Note every key that is not one of these."""
        for key in self.values:
            if key not in known:
                self.unknown(key, known)

    def unknown(self, key: object, known: Iterable[str]) -> None:
        """Note a key that means nothing here, and the one that was probably meant."""
        name = key if isinstance(key, str) else shown(key)
        known = tuple(known)
        close = nearest(name, known)
        fix = f"Write {close} instead." if close else f"The known ones are: {', '.join(known)}."
        self.problem("unknown-key", "is not a known key here", fix, at=(name,))

    def _not_a_mapping(self, at: Path, value: object) -> None:
        self.problem(
            "not-a-mapping", "must be a mapping", "Write key: value pairs.", at=at, value=value
        )


def as_text(value: object) -> str | None:
    """The text of a value, if every YAML reader of note finds text in it."""
    if isinstance(value, OddNumeral):
        # 10:20:30:40:50:59 is a number to YAML 1.1 in base sixty, but to Kubernetes it is text.
        return str(value) if ":" in value else None
    return value if isinstance(value, str) else None


def folded(key: str) -> str:
    """A key without what people mix up: case, dashes, underscores."""
    return key.casefold().replace("-", "").replace("_", "")


def nearest(key: str, known: Iterable[str], closeness: float = 0.6) -> str:
    """The known key that was probably meant, or nothing."""
    if len(key) > LONGEST_KEY_COMPARED:
        return ""
    by_fold = {folded(name): name for name in known}
    if folded(key) in by_fold:
        return by_fold[folded(key)]
    begun = [name for fold, name in by_fold.items() if fold.startswith(folded(key))]
    if len(begun) == 1:
        return begun[0]
    import difflib  # slow to load, and only bad manifests need it

    close = difflib.get_close_matches(folded(key), by_fold, n=1, cutoff=closeness)
    return by_fold[close[0]] if close else ""
