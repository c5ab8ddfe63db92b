"""What is wrong with a manifest, said so that its author can mend it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

Path = tuple[str | int, ...]


class Absent:
    """The value of a field that is not there."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where it is written, and what to write instead."""

    code: str
    path: Path
    what: str
    fix: str
    value: object = ABSENT
    file: str = ""
    line: int = 0

    @property
    def field(self) -> str:
        """The path as people write it: spec.networks[0].name."""
        return dotted(self.path)

    def at(self, file: str, line: int) -> "Problem":
        """The same problem, with the place it was found at."""
        return replace(self, file=file, line=line)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file else ""
        field = f"{self.field}: " if self.path else ""
        value = "" if self.value is ABSENT else f" (it is {shown(self.value)})"
        return f"{place}{field}{self.what}{value}. {self.fix} [{self.code}]"


class ManifestError(Exception):
    """A manifest that cannot be used, with every problem in it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


def dotted(path: Path) -> str:
    """spec.networks[0].name; a key with dots of its own is written ['so']."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif "." in step or "/" in step:
            text += f"['{step}']"
        else:
            text += f".{step}" if text else step
    return text


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: short, on one line, without control characters."""
    text = repr(value) if not isinstance(value, dict | list) else f"a {_kind(value)}"
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _kind(value: dict[object, object] | list[object]) -> str:
    return "mapping" if isinstance(value, dict) else "list"
