"""A directory of manifests, kept in view: what its files mean together, now.

Only files that changed are read again. One that cannot be read or understood keeps its last good
meaning, also over a restart; a directory that cannot be read changes nothing.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping

from agent.revision import Taken, digest
from agent.sources.files import (
    Declared,
    Text,
    content,
    file_of,
    is_manifest,
    label,
    laws_of,
    understood,
)
from agent.sources.handover import Handover, Predecessor
from agent.sources.meaning import Enough, Meaning, Progress, Tiding
from agent.sources.settled import settle
from agent.sources.store import Store
from agent.sources.vmis import pods_of
from agent.sources.watch import Watch
from rules.model import NODE, Machine
from rules.policies import Namespace, NetworkPolicy
from rules.problems import Problem
from rules.services import Service
from rules.values import Value, replace

FOLD = 0.003  # seconds: what is saved together is read together
LOOKS = 3  # at a directory whose links lead to new places each time

Signature = tuple[int, ...]


class _File(Value):
    """A file as last read: its text where it has one, and what that says."""

    signature: Signature
    text: str | None
    says: Text


class Directory:
    """The manifests directly in a directory."""

    def __init__(
        self,
        path: str,
        store: Store,
        watch: Watch,
        beat: Progress = lambda: None,
        *,
        left: Handover | None = None,
    ) -> None:
        """`left` is what the source before this one knew."""
        self._path = path
        self._store = store
        self._watch = watch
        self._before = Predecessor(left)
        self._files: dict[str, _File] = {}  # by path
        self._seen: tuple[int, int] | None = None
        self._stirred: set[str] | None = None  # paths that are to be read again; None: all
        self._texts = store.load()  # the last good ones, by label
        self._unwritten: set[str] = set()  # which could not be
        self._said: dict[str, Text] = {}
        self._strange = frozenset(name for text in self._texts.values() for name in pods_of(text))
        for file, text in sorted(self._texts.items()):
            self._said[file] = understood(file, text)
            beat()
        self._meanings = {
            file: said.declared for file, said in self._said.items() if not said.problems
        }
        self.meaning = Meaning(unreadable="it was not read yet")

    def __str__(self) -> str:
        return self._path

    @property
    def namespaces(self) -> frozenset[str]:
        """Where the machines are that files were last known to declare."""
        return self._strange | {
            one.netns
            for said in self._meanings.values()
            for one in said
            if isinstance(one, Machine)
        }

    def read(self, stirred: Iterable[str] | None = None, beat: Progress = lambda: None) -> Meaning:
        """Look at what changed: at these paths, and at all that look different; None: at all."""
        forced = None if stirred is None else set(stirred)
        unreadable = ""
        for _ in range(LOOKS):
            try:
                self._files, links = self._scan(forced, beat)
                unreadable = ""
            except OSError as error:
                unreadable, links = f"{self._path} cannot be read: {error.strerror}", []
            if not self._watch.follow(links):
                break
        self.meaning = self._before.complete(self._settled(unreadable))
        return self.meaning

    def filenos(self) -> tuple[int, ...]:
        """What to poll."""
        return (self._watch.fileno(),)

    @property
    def due(self) -> float | None:
        """When to listen again although nothing is to be heard."""
        return self._watch.due

    def heard(self) -> bool:
        """Listen; whether something is to be read."""
        stirred = self._watch.stirred()
        if stirred is None or stirred:
            time.sleep(FOLD)
            more = self._watch.stirred()
            stirred = None if stirred is None or more is None else stirred | more
        if stirred is None:
            self._stirred = None
        elif self._stirred is not None:
            self._stirred |= stirred
        return stirred is None or bool(stirred)

    def renew(self) -> None:
        """Whatever is known, all of it is to be read again."""
        self._stirred = None

    def look(self, beat: Progress = lambda: None) -> Meaning:
        """Read what was heard of, and what looks different."""
        meaning = self.read(self._stirred, beat)
        self._stirred = set()
        return meaning

    def texts(self) -> Mapping[str, str]:
        """Of another directory the files have other names; only what is not read yet is left."""
        return self._before.texts

    def tell(self, machine: str, tiding: Tiding, message: str) -> None:
        """Who writes files reads the log."""

    def traffic(self) -> dict[str, int]:
        """Reading a directory costs nobody else."""
        return {}

    def close(self) -> None:
        self._watch.close()

    def is_another(self) -> bool:
        """Whether the path leads to another directory than it did: one that was mounted there."""
        return _identity(self._path) != self._seen

    def remember(self, beat: Progress = lambda: None, enough: Enough = lambda: False) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        if self.meaning.unreadable:
            return True
        bad = {*self.meaning.held, *self.meaning.unknown}
        now = {
            file.says.file: file.text
            for file in self._files.values()
            if file.text is not None and file.says.file not in bad
        }
        known = self._texts.keys() | self._unwritten
        for file in known - {one.says.file for one in self._files.values()}:
            self._store.drop(file)
            self._texts.pop(file, None)
            self._unwritten.discard(file)
        for file, text in now.items():
            if self._texts.get(file) != text:
                if enough():
                    return False
                self._texts.pop(file, None)  # what cannot be written is not there any more
                if self._store.keep(file, text):
                    self._texts[file] = text
                    self._unwritten.discard(file)
                else:
                    self._unwritten.add(file)  # the next time
                beat()
        return True

    def _scan(self, forced: set[str] | None, beat: Progress) -> tuple[dict[str, _File], list[str]]:
        """Every file as it is now, and those of them that are links."""
        self._seen = _identity(self._path)
        with os.scandir(self._path) as entries:
            links = {entry.path: entry.is_symlink() for entry in entries if is_manifest(entry)}
        real = os.path.realpath(self._path)
        found: dict[str, _File] = {}
        for path, link in sorted(links.items()):
            known = self._files.get(path)
            names = {os.path.join(real, os.path.basename(path))}  # as the watch tells them
            if link:
                names.add(os.path.realpath(path))
            file = known
            if not self._watch.is_written(names):
                file = self._look(path, known, forced is None or not forced.isdisjoint(names))
            if file is not known:
                self._watch.hear()
                file = known if self._watch.is_written(names) else file
            if file is not None:
                found[path] = file
            if file is not known:
                beat()
        return found, [path for path, link in links.items() if link]

    def _look(self, path: str, known: _File | None, forced: bool) -> _File | None:
        """A file as it is; None if it went meanwhile."""
        try:
            signature = _signature(path)
        except OSError:
            if not os.path.lexists(path):
                return None
            signature = ()
        if known and known.signature == signature and signature and not forced:
            return known
        text = content(path)
        if isinstance(text, Problem):
            return _File(signature, None, Text(file=label(path), problems=(text,)))
        if known and known.text == text:
            return replace(known, signature=signature)
        if self._texts.get(label(path)) == text and label(path) in self._said:
            return _File(signature, self._texts[label(path)], self._said.pop(label(path)))
        return _File(signature, text, self._understood(path, text))

    def _understood(self, path: str, text: str) -> Text:
        if text.strip():
            return understood(label(path), text)
        problem = Problem(
            code="empty-file",
            path=(),
            what="is empty",
            fix="Write a manifest into it; to take its ports away, remove the file.",
            file=label(path),
            line=1,
        )
        return Text(file=label(path), problems=(problem,))

    def _settled(self, unreadable: str) -> Meaning:
        files = self._files
        said = {
            file.says.file: None if file.says.problems else file.says.declared
            for file in files.values()
        }
        if unreadable:  # what it held is not known to be gone
            said = dict.fromkeys(self._meanings) | said
        settled = settle(self._meanings, said)
        unknown = sorted(file for file in settled.held if file not in self._meanings)
        self._meanings = {
            file: said
            for file, said in settled.meanings.items()
            if file not in settled.held or file in self._meanings
        }
        shut = list(self._shut())
        return Meaning(
            machines=settled.machines,
            services=settled.services,
            laws=laws_of([*settled.others, *shut]),
            shut=tuple(sorted({file_of(one) for one in shut})),
            problems=(
                *(problem for file in files.values() for problem in file.says.problems),
                *settled.problems,
            ),
            skipped=(
                *(line for file in files.values() for line in file.says.skipped),
                *settled.left,
            ),
            held=tuple(sorted(settled.held - set(unknown))),
            unknown=tuple(unknown),
            count=sum(file.says.count for file in files.values()),
            files={file.says.file: _taken(file) for file in files.values()},
            unreadable=unreadable,
            contested=settled.contested,
        )

    def _shut(self) -> Iterator[NetworkPolicy | Namespace]:
        """What is left of files that mean nothing, as they cannot be understood or quarrel with
        others, and never meant anything: policies that select, and allow nothing, and namespaces
        whose labels nobody knows. So with policies that are new in a file which means what it meant
        before."""
        for file in self._files.values():
            meant = self._meanings.get(file.says.file)
            if meant is None or file.says.problems:
                known = {str(one) for one in meant or ()}
                for one in file.says.others:
                    if isinstance(one, NetworkPolicy) and str(one) not in known:
                        yield one if one.broken else one.shut()
                    elif isinstance(one, Namespace) and str(one) not in known:
                        yield replace(one, labels=None)


def _taken(file: _File) -> Taken:
    sha256 = "" if file.text is None else digest(file.text)
    services = frozenset(str(one) for one in file.says.declared if isinstance(one, Service))
    return Taken(sha256=sha256, namespaces=_places(file.says.declared), services=services)


def _places(declared: Iterable[Declared]) -> frozenset[str] | None:
    """Where the rules of these are; None: anywhere, as policies apply to what others declare."""
    places: set[str] = set()
    for one in declared:
        if isinstance(one, Machine):
            places |= {one.netns} if one.masquerade else set()
        elif isinstance(one, Service):
            places.add(NODE)
        else:
            return None
    return frozenset(places)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _signature(path: str) -> Signature:
    status = os.stat(path)
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_mode,
    )
