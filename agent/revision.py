"""Revisions: each snapshot of desired state that the daemon takes has a number.

A revision is applied once every namespace that exists holds what it wants, and the flows that its
changes cut off are flushed. Numbers begin at the time of the daemon's start, in milliseconds of the
epoch, and grow by one: those of a later run are higher, and nothing has to be stored for that.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rules.values import Value

MOST_OPEN = 1000  # revisions whose flows are not flushed yet; an older one is applied with the next


class Taken(Value, kw_only=True):
    """A file as it was read for a revision."""

    sha256: str  # of its text; empty: it could not be read
    namespaces: frozenset[str] | None = frozenset()  # where its rules are; None: anywhere
    services: frozenset[str] = frozenset()


class Revision(Value, kw_only=True):
    """How far the daemon has come; 0 stands for no revision."""

    wanted: int = 0  # the newest snapshot
    applied: int = 0  # the newest that is in the kernel, with flows flushed
    checked: bool = False  # whether namespaces were compared since the newest was taken
    unapplied: Mapping[str, str] = MappingProxyType({})  # namespaces, with the reason
    unflushed: frozenset[str] = frozenset()  # namespaces in which flows are still to be flushed
    leaving: frozenset[str] = frozenset()  # namespaces that are to be cleared
    files: Mapping[str, Taken] | None = None  # None: manifests are not read from files


class Revisions:
    """Counts the revisions of one run."""

    def __init__(self, started: float) -> None:
        self.wanted, self.applied = int(started * 1000), 0
        self._open: deque[tuple[int, int]] = deque(maxlen=MOST_OPEN)

    def take(self) -> int:
        """Number a new snapshot."""
        self.wanted += 1
        return self.wanted

    def advance(self, *, settled: bool, asked: int, done: int) -> bool:
        """Return whether another revision is applied now. `settled`: every namespace holds what the
        newest wants; flows were to be flushed `asked` times by then, and were `done` times."""
        if settled and self.wanted not in (self.applied, *(one for one, _ in self._open)):
            self._open.append((self.wanted, asked))
        before = self.applied
        while self._open and self._open[0][1] <= done:
            self.applied = self._open.popleft()[0]
        return self.applied != before


def digest(text: str) -> str:
    """The SHA-256 of a manifest's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def combined(files: Iterable[tuple[str, str]]) -> str:
    """One digest for the names and digests of all files of a directory."""
    return digest("".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files)))
