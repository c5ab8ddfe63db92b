"""Manifests from files, directories and standard input: one snapshot of everything that is written
there, in which a source that cannot be read is a problem and never the same as an empty one.

It does without pathlib, whose import takes as long as reading a dozen manifests.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence

from agent.sources import json_text
from agent.sources.boundary import guarded
from rules.fences import Laws
from rules.manifests import MOST_ENTRIES, read
from rules.model import Machine
from rules.policies import Namespace, NetworkPolicy
from rules.problems import Path, Problem
from rules.services import Pod, Service
from rules.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

MOST_BYTES = 32 * 1024 * 1024
STDIN = "<stdin>"
NAMED = 3  # of the other places where the same is written
_SUFFIXES = (".yaml", ".yml", ".json")
_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what shells write for <(command)
# Where the text has one of these, what the manifest says there is not worth another word.
_SPOILS = ("yaml-alias", "yaml-key", "yaml-merge", "yaml-tag")

Lines = dict[Path, int]
Other = NetworkPolicy | Pod | Namespace
Declared = Machine | Service | Other


class Snapshot(Value, kw_only=True):
    """Everything the sources held at one moment."""

    machines: tuple[Machine, ...] = ()
    services: tuple[Service, ...] = ()
    laws: Laws = Laws()
    problems: tuple[Problem, ...] = ()
    skipped: tuple[str, ...] = ()
    count: int = 0  # manifests of the kinds we read, the bad ones included


class Text(Value, kw_only=True):
    """What one text says, before it is held against the others."""

    file: str  # its name for messages
    machines: tuple[Machine, ...] = ()
    services: tuple[Service, ...] = ()
    others: tuple[Other, ...] = ()  # where it has problems, policies in it are shut
    problems: tuple[Problem, ...] = ()
    skipped: tuple[str, ...] = ()
    count: int = 0

    @property
    def declared(self) -> tuple[Declared, ...]:
        """All that it says, which holds as a whole or not at all."""
        return self.machines + self.services + self.others


class _UnusableError(Exception):
    """A source from which nothing can be had."""

    def __init__(self, code: str, what: str, fix: str) -> None:
        self.code, self.what, self.fix = code, what, fix
        super().__init__(what)

    def problem(self, file: str) -> Problem:
        return Problem(code=self.code, path=(), what=self.what, fix=self.fix, file=file)


def load(
    paths: Sequence[str],
    stdin: Callable[[], bytes],
    *,
    netns: str | None = None,
    most: int = MOST_ENTRIES,
) -> Snapshot:
    """Read every path; `-` is standard input, a directory the manifests directly in it. `most` is
    how many ports and ranges one interface may declare."""
    texts: list[Text] = []
    for name in each_once(paths):
        text = content(name, stdin)
        if isinstance(text, Problem):
            texts.append(Text(file=label(name), problems=(text,)))
        else:
            texts.append(understood(label(name), text, netns, most))
    machines, left = without_instances([one for text in texts for one in text.machines])
    services = [one for text in texts for one in text.services]
    problems = [problem for text in texts for problem in text.problems]
    others = [one for text in texts for one in text.others]
    policies = [one for one in others if isinstance(one, NetworkPolicy)]
    problems += [problem for problem, _ in duplicates([*machines, *services, *policies])]
    bad = {problem.file for problem in problems}
    return Snapshot(
        machines=tuple(machine for machine in machines if file_of(machine) not in bad),
        services=tuple(service for service in services if file_of(service) not in bad),
        laws=laws_of(one for one in others if file_of(one) not in bad),
        problems=tuple(problems),
        skipped=(*(line for text in texts for line in text.skipped), *left),
        count=sum(text.count for text in texts),
    )


def laws_of(others: Iterable[Other]) -> Laws:
    """What policies say, and of whom."""
    found = list(others)
    return Laws(
        policies=tuple(one for one in found if isinstance(one, NetworkPolicy)),
        pods=tuple(one for one in found if isinstance(one, Pod)),
        namespaces=tuple(one for one in found if isinstance(one, Namespace)),
    )


def content(name: str, stdin: Callable[[], bytes] | None = None) -> str | Problem:
    """The text of a file, or why there is none."""
    try:
        return _text(_bounded(stdin()) if stdin and name == "-" else _content(name))
    except _UnusableError as error:
        return error.problem(label(name))
    except (OSError, ValueError) as error:
        return _unreadable(error).problem(label(name))


def file_of(one: Declared) -> str:
    """The file it is written in, as its messages name it."""
    return one.origin.rpartition(":")[0]


def label(name: str) -> str:
    """The name for messages: whatever bytes a file name has, it can be printed on one line."""
    if name == "-":
        return STDIN
    # Two names never become one: whoever keeps what files mean knows them by this.
    return "".join(c if c.isprintable() and c != "\\" else ascii(c)[1:-1] for c in name)


def each_once(paths: Iterable[str]) -> list[str]:
    """The files that are named, directly or by their directory, none of them twice."""
    names: dict[str, str] = {}
    for path in paths:
        for name in [path] if path == "-" else _inside(path):
            names.setdefault(_identity(name), name)
    return list(names.values())


def _inside(path: str) -> list[str]:
    """The manifests in a directory; a path that is none is itself."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if is_manifest(entry))
    except (OSError, ValueError):
        return [path]  # opening it will tell what is wrong, if anything is


def is_manifest(entry: "os.DirEntry[str]") -> bool:
    named = entry.name.endswith(_SUFFIXES) and not entry.name.startswith(".")
    return named and not _is_directory(entry)


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or through a file: to read it will tell
        return False


def _identity(name: str) -> str:
    if name == "-" or name.startswith(_PIPES):
        return name
    try:
        return os.path.realpath(name)
    except (OSError, ValueError):
        return name


def _content(name: str) -> bytes:
    """What a file holds, never more of it than is read, never waiting for a writer."""
    pipe = name.startswith(_PIPES)
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not (pipe or stat.S_ISREG(status.st_mode)):
            raise _UnusableError(
                "unreadable",
                "is neither a file nor a directory",
                "Name a file or a directory, or - for standard input.",
            )
        if status.st_size > MOST_BYTES:
            _refuse_size()
        return _bounded(whole(file))


def whole(file: "BinaryIO") -> bytes:
    """All of it that is read, and never what would have us wait, as /proc/kmsg does."""
    read: bytes | None = file.read(MOST_BYTES + 1)
    if read is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return read


def _bounded(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        _refuse_size()
    return content


def _refuse_size() -> None:
    raise _UnusableError(
        "too-large",
        f"is larger than {MOST_BYTES // 1024 // 1024} MiB",
        "Split it into several files, or name the right one.",
    )


def _text(content: bytes) -> str:
    fix = "Name a text file in UTF-8."
    if b"\0" in content:
        raise _UnusableError("not-text", "has NUL bytes, so it is not text", fix)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
        raise _UnusableError("not-text", what, fix) from error


def _unreadable(error: Exception) -> _UnusableError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _UnusableError(
        "unreadable", f"cannot be read: {reason}", "Check the path and its permissions."
    )


def understood(file: str, text: str, netns: str | None = None, most: int = MOST_ENTRIES) -> Text:
    """Read the documents of one text, and say of everything in them where it is."""
    parsed = guarded(lambda: _parse(text), file)
    if isinstance(parsed, Problem):
        return Text(file=file, problems=(parsed,))
    documents, problems, lines_of = parsed
    lines: list[Lines] = []

    def locate(index: int, path: Path) -> int:
        if not path:
            return documents[index][1]
        if not lines:
            lines.extend(lines_of(text))
        return nearest_line(lines[index], path)

    located = [problem.at(file, problem.line) for problem in problems]
    told = {(problem.path, problem.line) for problem in problems if problem.code in _SPOILS}
    machines: list[Machine] = []
    services: list[Service] = []
    others: list[Other] = []
    skipped: list[str] = []
    count = 0
    for index, (document, _) in enumerate(documents):
        reading = guarded(lambda: read(document, netns=netns, limit=most), file)  # noqa: B023 - now
        if isinstance(reading, Problem):
            located.append(reading.at(file, locate(index, ())))
            continue
        for problem in reading.problems:
            line = locate(index, problem.path)
            if (problem.path, line) not in told:
                located.append(problem.at(file, line))
        for machine, path in zip(reading.machines, reading.places, strict=True):
            machines.append(replace(machine, origin=f"{file}:{locate(index, path)}"))
        skipped += [f"{file}:{locate(index, one.path)}: {one}" for one in reading.skipped]
        for service, path in zip(reading.services, reading.service_places, strict=True):
            services.append(replace(service, origin=f"{file}:{locate(index, path)}"))
        for other, path in reading.others:
            others.append(replace(other, origin=f"{file}:{locate(index, path)}"))
        count += reading.count
    return Text(
        file=file,
        machines=tuple(machines),
        services=tuple(services),
        others=tuple(others),
        problems=tuple(sorted(located, key=lambda problem: problem.line)),
        skipped=tuple(skipped),
        count=count,
    )


def _parse(
    text: str,
) -> tuple[list[tuple[object, int]], list[Problem], Callable[[str], list[Lines]]]:
    parsed = json_text.parse(text)
    if parsed:
        return *parsed, json_text.lines
    from agent.sources import yaml_text  # JSON needs no YAML parser

    return *yaml_text.parse(text), yaml_text.lines


_WORDS = {Machine: "machine", Service: "service", NetworkPolicy: "policy"}


def nearest_line(lines: Lines, path: Path) -> int:
    """The line a path is written on, or the nearest thing around it that is written."""
    while path not in lines:
        path = path[:-1]
    return lines[path]


def without_instances(machines: Sequence[Machine]) -> tuple[list[Machine], list[str]]:
    """Of a VirtualMachine and its running instance, as `kubectl get vm,vmi` lists them, only the
    instance counts: it is what runs. Returns what counts, and a line for each that does not."""
    running = {
        (machine.namespace, machine.name)
        for machine in machines
        if machine.kind == "VirtualMachineInstance"
    }
    kept: list[Machine] = []
    left: list[str] = []
    for machine in machines:
        if machine.kind == "VirtualMachine" and (machine.namespace, machine.name) in running:
            left.append(f"{machine.origin}: {machine} is left to its running instance")
        else:
            kept.append(machine)
    return kept, left


def duplicates(
    declared: Iterable[Machine | Service | NetworkPolicy],
) -> list[tuple[Problem, Machine | Service | NetworkPolicy]]:
    """A problem for each of several places where the same object is written."""
    places: dict[str, list[Machine | Service | NetworkPolicy]] = {}
    for one in declared:
        places.setdefault(str(one), []).append(one)
    return [
        (_duplicate(one, [other.origin for other in same if other is not one]), one)
        for same in places.values()
        if len(same) > 1
        for one in same
    ]


def _duplicate(one: Machine | Service | NetworkPolicy, elsewhere: list[str]) -> Problem:
    more = f" and {len(elsewhere) - NAMED} more" if len(elsewhere) > NAMED else ""
    return Problem(
        code=f"duplicate-{_WORDS[type(one)]}",
        path=(),
        what=f"{one} is written here and at {', '.join(elsewhere[:NAMED])}{more}",
        fix="Keep one of them, or give each a metadata.name of its own.",
        file=file_of(one),
        line=int(one.origin.rpartition(":")[2]),
    )
