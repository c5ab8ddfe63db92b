"""`/wait`: whether the daemon has applied what a caller asks about, judged on a Status value.

A caller asks with the digests of files, or with the number of a revision, and is answered once that
is applied, or when its time is up. `Bell` wakes the threads that answer.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

from agent.revision import Revision, Taken, combined
from agent.status import Json, State, Status, tally
from rules.model import NODE
from rules.values import Value

LONGEST = 60.0  # seconds that one request may wait; its client asks again
NOT_FILES = "the daemon reads manifests from {source}, not from files"


class Question(Value, kw_only=True):
    """What has to be applied; without files and a revision: what is wanted when it is asked."""

    revision: int = 0
    files: tuple[tuple[str, str], ...] = ()  # names and digests
    directory: str = ""  # the digest of all files together
    seconds: float = 0.0


class Verdict(Value, kw_only=True):
    """How far that is."""

    done: bool = False
    revision: int = 0  # that has to be applied for it; 0: it is not taken yet
    waiting: tuple[str, ...] = ()  # what is not applied, and why
    rejected: tuple[str, ...] = ()  # problems of these files, for which they are not applied
    refused: tuple[str, ...] = ()  # ports of their Services that are not published, and why
    unsupported: str = ""
    namespaces: str = ""


class Bell:
    """Wakes every thread that waits for another status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: set[int] = set()

    @contextmanager
    def heard(self) -> Iterator[int]:
        """A descriptor that becomes readable when the bell rings."""
        descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with self._lock:
                self._heard.add(descriptor)
            yield descriptor
        finally:
            with self._lock:
                self._heard.discard(descriptor)
            os.close(descriptor)

    def ring(self) -> None:
        with self._lock:
            for descriptor in self._heard:
                os.eventfd_write(descriptor, 1)


def question(query: str) -> Question:
    """Parse the query of a URL; raise ValueError where it makes no sense."""
    given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=1000)
    if unknown := given.keys() - {"revision", "file", "directory", "timeout"}:
        raise ValueError(f"unknown parameter {min(unknown)}")
    seconds = float(given.get("timeout", ["0"])[-1])
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"timeout is not between 0 and {LONGEST:g}")
    pairs = [one.rpartition(":") for one in given.get("file", ())]
    return Question(
        revision=int(given.get("revision", ["0"])[-1]),
        files=tuple((name, sha256) for name, _, sha256 in pairs),
        directory=given.get("directory", [""])[-1],
        seconds=seconds,
    )


def judged(status: Status, asked: Question) -> Verdict:
    """Whether what was asked about is applied, as the daemon stands now."""
    revision = status.revision
    if asked.files or asked.directory:
        return _files_judged(status, asked)
    if not revision.wanted:
        return Verdict(waiting=(_unread(status),))
    awaited = asked.revision or revision.wanted
    if awaited > revision.wanted:
        newest = f"revision {awaited} is not taken yet; the newest is {revision.wanted}"
        return Verdict(revision=awaited, waiting=(newest,))
    live = not asked.revision or asked.revision == revision.wanted
    if revision.applied >= awaited and not (live and revision.unapplied):
        known = tally(one.state.value for one in status.namespaces)
        return Verdict(done=True, revision=awaited, namespaces=known)
    return Verdict(revision=awaited, waiting=_blocked(revision, frozenset()))


def _files_judged(status: Status, asked: Question) -> Verdict:
    """Only namespaces count that depend on these files, and those that are to be cleared."""
    revision = status.revision
    if not revision.wanted:
        return Verdict(waiting=(_unread(status),))
    if revision.files is None:
        return Verdict(unsupported=NOT_FILES.format(source=status.source))
    known = {name.rpartition("/")[2]: (name, taken) for name, taken in revision.files.items()}
    chosen = {name: known[name] for name, _ in asked.files if name in known}
    chosen = known if asked.directory else chosen
    if untaken := tuple(_untaken(known, asked)):
        unread = (status.unreadable,) if status.unreadable else ()
        return Verdict(waiting=(*unread, *untaken))
    labels = {label for label, _ in chosen.values()}
    if wrong := [str(one) for one in status.problems if one.file in labels]:
        return Verdict(rejected=tuple(wrong))
    places: set[str] | None = set()
    for _, taken in chosen.values():
        places = None if places is None or taken.namespaces is None else places | taken.namespaces
    standings = [one for one in status.namespaces if places is None or one.netns in places]
    others = {one.netns for one in status.namespaces} - revision.leaving
    others -= others if places is None else places
    pending = [
        f"namespace {one.netns} is pending: {one.why}"
        for one in standings
        if one.state is State.PENDING and one.netns not in {NODE, *revision.unapplied}
    ]
    if waiting := (*_blocked(revision, frozenset(others)), *pending):
        return Verdict(revision=revision.wanted, waiting=waiting)
    states = tally(one.state.value for one in standings)
    refused = tuple(
        f"{one.owner}: {one.reason}"
        for standing in standings
        for one in standing.refused
        if any(
            _is_of(one.owner, service) for _, taken in chosen.values() for service in taken.services
        )
    )
    return Verdict(done=True, revision=revision.wanted, refused=refused, namespaces=states)


def _is_of(owner: str, service: str) -> bool:
    """Whether a port, named by its owner, is one of a Service."""
    return owner == service or owner.startswith(f"{service}/")


def _unread(status: Status) -> str:
    return status.unreadable or "the daemon has not read its manifests yet"


def _untaken(known: dict[str, tuple[str, Taken]], asked: Question) -> Iterator[str]:
    """What the daemon has not read as it is now."""
    for name, sha256 in asked.files:
        if name not in known:
            yield f"the daemon has not read {name}"
        elif known[name][1].sha256 != sha256:
            yield f"the daemon has read another version of {name}"
    now = combined((name, taken.sha256) for name, (_, taken) in known.items())
    if asked.directory and asked.directory != now:
        yield "the daemon has read another version of the directory"


def _blocked(revision: Revision, others: frozenset[str]) -> tuple[str, ...]:
    """What is not applied yet, but for other namespaces."""
    if not revision.checked:
        return (f"revision {revision.wanted} is being applied",)
    flows = revision.unflushed - revision.unapplied.keys() - others
    return (
        *(
            f"namespace {netns}: {why}"
            for netns, why in sorted(revision.unapplied.items())
            if netns not in others
        ),
        *(f"namespace {netns}: flows are not flushed yet" for netns in sorted(flows)),
    )


def verdict_json(verdict: Verdict, status: Status) -> Json:
    """The answer to a request."""
    revision = status.revision
    return {
        "format_version": "1.0",
        "done": verdict.done,
        "revision": verdict.revision or None,
        "wanted": revision.wanted or None,
        "applied": revision.applied or None,
        "waiting": list(verdict.waiting),
        "rejected": list(verdict.rejected),
        "refused": list(verdict.refused),
        "unsupported": verdict.unsupported or None,
        "namespaces": verdict.namespaces,
    }
