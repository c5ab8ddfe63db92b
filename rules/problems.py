"""What is wrong with a manifest, said so that its author can mend it."""

from rules.values import Value, replace

Path = tuple[str | int, ...]


class Absent:
    """The value of a field that is not there."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


class OddNumeral(str):
    """A number spelt so that one YAML reader takes it for another number than the next."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Problem(Value, kw_only=True):
    """One thing that is wrong, where it is written, and what to write instead."""

    code: str
    path: Path
    what: str
    fix: str
    value: object = ABSENT
    file: str = ""
    line: int = 0  # 0: the whole file

    @property
    def field(self) -> str:
        """The path as people write it: spec.networks[0].name."""
        return dotted(self.path)

    @property
    def place(self) -> str:
        """file:line, as far as they are known."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    def at(self, file: str, line: int) -> "Problem":
        """The same problem, with the place it was found at."""
        return replace(self, file=file, line=line)

    def __hash__(self) -> int:
        """With the value, or its length: where one text has a thousand mistakes, nothing else tells
        them apart, and each would be compared with all others."""
        value = len(self.value) if isinstance(self.value, list | dict) else self.value
        return hash((self.code, self.path, self.what, value, self.file, self.line))

    def __str__(self) -> str:
        place = f"{self.place}: " if self.file else ""
        field = f"{self.field}: " if self.path else ""
        value = "" if self.value is ABSENT else f" (it is {shown(self.value)})"
        return f"{place}{field}{self.what}{value}. {self.fix} [{self.code}]"


def dotted(path: Path) -> str:
    """spec.networks[0].name; a key that is more than letters and digits is written ['so']."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.replace("-", "").replace("_", "").isalnum():
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step, 400)}]"
    return text


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: short, on one line, without control characters."""
    return printable(_written(value, limit), limit)


def printable(text: str, limit: int) -> str:
    """A text that cannot spoil a terminal or a log: short, on one line, without controls."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _written(value: object, limit: int) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 76 digits"  # Python itself refuses to write 4,301
    if isinstance(value, str) and not isinstance(value, OddNumeral):
        return repr(value[: limit + 1])
    return repr(value)
