"""Tells when the manifests in a directory may have changed, and which of them are being written.

Watched are the directory, every directory on the way to it, and the way to whatever its entries
link to: so it may appear later, be replaced, or be a link that is swapped, as Kubernetes does with
a ConfigMap's.
"""

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from agent import inotify
from agent.inotify import Inotify

STEPS = (
    inotify.CREATE
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.DELETE
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
    | inotify.ATTRIB
    | inotify.ONLYDIR
)
WRITES = inotify.CLOSE_WRITE | inotify.MODIFY
BEGINS = inotify.CREATE | inotify.MODIFY
PATIENCE = 10.0  # seconds without a word from a writer who has not closed its file
MOST_LINKS = 40  # as the kernel follows

Clock = Callable[[], float]
Names = set[str] | None  # that matter in a directory; None: every one
Warn = Callable[[str], None]


class Watch:
    """Of one directory of manifests."""

    def __init__(
        self, directory: str, clock: Clock = time.monotonic, warn: Warn = lambda _: None
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._warn = warn
        self._inotify = Inotify()
        self._names: dict[int, tuple[str, Names]] = {}  # by watch
        self._blind: float | None = None  # until when we go without a watch that we want
        self._writing: dict[str, float] = {}  # paths, and when we stop waiting for them
        self._stirred: set[str] | None = set()  # what was heard and not told yet; None: anything

    def fileno(self) -> int:
        return self._inotify.fileno()

    def close(self) -> None:
        self._inotify.close()

    @property
    def due(self) -> float | None:
        """When to ask again although nothing is to be read."""
        if self._stirred is None or self._stirred:
            return self._clock()
        blind = () if self._blind is None else (self._blind,)
        return min((*self._writing.values(), *blind), default=None)

    def is_written(self, paths: Iterable[str]) -> bool:
        """Whether somebody is known to be in the middle of writing one of these files."""
        return any(path in self._writing for path in paths)

    def follow(self, links: Collection[str]) -> bool:
        """Watch the directory and these links in it, as they lead now; whether that is more than
        before, so that something may have been missed."""
        found: dict[int, tuple[str, Names]] = {}
        self._blind = None
        for folder, names, mask in self._wanted(links):
            try:
                number = self._inotify.watch(folder, mask)
                found[number] = (folder, names)
            except OSError as error:  # else it is not there; what leads to it is watched
                if inotify.is_spent(error):
                    self._blind = self._clock() + inotify.PAUSE
        for number in self._names.keys() - found.keys():
            self._inotify.unwatch(number)
        more = bool(found.keys() - self._names.keys())
        self._names = found
        if self._blind is not None:
            self._warn(inotify.SPENT)
        return more

    def stirred(self) -> set[str] | None:
        """The paths that something happened to, or that were waited for in vain; they may be none.
        The directory itself is among them when it is time to look without having been told.
        None: anything may have happened."""
        self.hear()
        now = self._clock()
        for path in [path for path, until in self._writing.items() if until <= now]:
            self._over(path)
        if self._blind is not None and self._blind <= now:
            self._blind = None  # until it is followed again
            self._over(self._directory)
        stirred, self._stirred = self._stirred, set()
        return stirred

    def hear(self) -> None:
        """Take in what has happened up to now, to be told when asked."""
        for happened in self._inotify.read():
            folder, names = self._names.get(happened.watch, ("", set()))
            if happened.mask & (inotify.Q_OVERFLOW | inotify.DELETE_SELF | inotify.MOVE_SELF):
                self._stirred = None
            elif names is None or happened.name in names:
                path = os.path.join(folder, happened.name)
                if happened.mask & BEGINS and _is_plain(path):
                    self._writing[path] = self._clock() + PATIENCE
                else:
                    self._over(path)

    def _wanted(self, links: Collection[str]) -> Iterator[tuple[str, Names, int]]:
        """Every directory to watch, the names that matter in it, and with which mask."""
        wanted: dict[str, Names] = {}
        for path in (self._directory, *links):
            for folder, name in way(path):
                names = wanted.setdefault(folder, set())
                if names is not None:
                    names.add(name)
        wanted[os.path.realpath(self._directory)] = None
        files = {os.path.dirname(os.path.realpath(link)) for link in links}
        for folder, names in wanted.items():
            yield folder, names, STEPS | WRITES if names is None or folder in files else STEPS

    def _over(self, path: str) -> None:
        """It is as it will be for now."""
        self._writing.pop(path, None)
        if self._stirred is not None:
            self._stirred.add(path)


def way(path: str) -> Iterator[tuple[str, str]]:
    """Each directory that is looked into to find a path, and the name that is looked for there."""
    folder, rest, links = "/", path.split("/"), 0
    while rest:
        name = rest.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            folder = os.path.dirname(folder)
            continue
        yield folder, name
        here = os.path.join(folder, name)
        try:
            target = os.readlink(here)
        except OSError:  # no link, or not there
            folder = here
            continue
        links += 1
        if links > MOST_LINKS:
            return
        rest = target.split("/") + rest
        folder = "/" if target.startswith("/") else folder


def _is_plain(path: str) -> bool:
    """Whether it is a file that its writer will close; one that was linked here is written."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
