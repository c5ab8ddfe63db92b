"""That namespaces may have come or gone: a hint to look, without names.

`ip netns add` makes a file and then mounts the namespace on it, which inotify does not see; the
list of mounts can be polled for that. Both are needed: a link to a namespace is no mount, and a
mount is no change of its directory.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from agent import inotify
from agent.inotify import Inotify
from agent.kernel.netns import RUN

MOUNTS = "/proc/self/mountinfo"
MOUNTED = select.EPOLLPRI | select.EPOLLERR
# One mask for all: a directory that is watched twice has the mask of the last time.
CHANGED = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.ONLYDIR

Clock = Callable[[], float]
Warn = Callable[[str], None]


class Arrivals:
    """Watches the named namespaces, the directories it is told to follow, and the mounts."""

    def __init__(self, warn: Warn = lambda _: None, clock: Clock = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self.due: float | None = None  # when to ask again although nothing is to be read
        with contextlib.ExitStack() as stack:
            self._inotify = stack.enter_context(contextlib.closing(Inotify()))
            # To poll is to take the news: what the caller polls tells him, but no longer us.
            self._theirs, self._ours = (stack.enter_context(Path(MOUNTS).open("rb")) for _ in "ab")
            self._poll = select.poll()
            self._poll.register(self._ours, select.POLLPRI)
            self._directories: tuple[str, ...] = ()
            self._watches: dict[int, set[str] | None] = {}  # names that matter there; None: all
            self._arm()
            self._descriptors = stack.pop_all()

    def filenos(self) -> tuple[tuple[int, int], ...]:
        """What to poll, each with the mask for epoll."""
        return (self._inotify.fileno(), select.EPOLLIN), (self._theirs.fileno(), MOUNTED)

    def follow(self, directories: Iterable[str]) -> None:
        """Watch these, too, instead of those of the last time; they need not be there yet."""
        wanted = tuple(sorted(set(directories)))
        if wanted != self._directories:
            self._directories = wanted
            self._arm()

    def stirred(self) -> bool:
        """Whether something happened since the last call, or may have happened unseen."""
        happened = [self._matters(event) for event in self._inotify.read()]
        mounted = bool(self._poll.poll(0))  # may also have hidden what is watched
        unseen = self.due is not None and self.due <= self._clock()
        if mounted or any(happened) or unseen:
            self.due = None
            self._arm()
            return True
        return False

    def close(self) -> None:
        self._descriptors.close()

    def _matters(self, event: inotify.Happened) -> bool:
        if event.mask & inotify.Q_OVERFLOW:
            return True
        if event.watch not in self._watches:  # told before we ended that watch, or of its end
            return False
        names = self._watches[event.watch]
        return names is None or not event.name or event.name in names

    def _arm(self) -> None:
        """Watch what is there now. From the root down, so that nothing appears unseen between one
        step and the next; and each step for as long as we follow, as any may be replaced."""
        watches: dict[int, set[str] | None] = {}
        for directory in (str(RUN), *self._directories):
            for number, name in self._steps(directory):
                names = watches.setdefault(number, set())
                if name is None or names is None:
                    watches[number] = None
                else:
                    names.add(name)
        for number in self._watches.keys() - watches.keys():
            self._inotify.unwatch(number)
        self._watches = watches

    def _steps(self, directory: str) -> Iterator[tuple[int, str | None]]:
        """The watch of each directory on the way that is there, and the name of the next."""
        for way in _ways(directory):
            steps = [*reversed(way.parents), way]
            for place, following in zip_longest(steps, steps[1:]):
                try:
                    number = self._inotify.watch(str(place), CHANGED)
                except OSError as error:  # not there, not a directory, not for us
                    if inotify.is_spent(error):
                        self._go_by_timer()
                    break
                yield number, following.name if following else None

    def _go_by_timer(self) -> None:
        """Until a look that was taken with every watch in place: what is followed meanwhile does
        not show what was missed before."""
        self._warn(inotify.SPENT)
        if self.due is None:
            self.due = self._clock() + inotify.PAUSE


def _ways(directory: str) -> Iterable[Path]:
    """As it is written, and as links lead there: either may come to lead elsewhere."""
    try:
        return dict.fromkeys((Path(directory).absolute(), Path(os.path.realpath(directory))))
    except ValueError:  # with a NUL in it: no such path can be
        return ()
