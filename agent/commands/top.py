"""`portranger top`: how busy each range is, again and again: on the screen of a person until they
leave, or as so many tables one after the other."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from agent.commands.common import OK, failed
from agent.commands.screen import Viewer, frame, is_screen, size, taken, viewer
from agent.console import Console
from agent.errors import Failure, NoNamespace
from agent.kernel.kinds import Kernel, Known, Namespace
from rules.holdings import holdings
from rules.load import Load, Look, loads
from rules.load_text import SORTS, View, screen, table
from rules.model import Address
from rules.problems import printable
from rules.values import Value

LONGEST_LINE = 2000


class Wish(Value, kw_only=True):
    """What to see, and how often."""

    netns: tuple[str, ...] = ()  # none: all that hold something of ours
    interval: float = 1.0  # seconds
    count: int | None = None  # tables; None: until the viewer leaves
    sort: str = "open"


def top(wish: Wish, console: Console, *, kernel: Kernel) -> int:
    lookout = Lookout(wish.netns, kernel, time.monotonic)
    view, failures = lookout.look()
    if failures and not view.loads:
        return failed(console, failures)
    if wish.count is None and is_screen(console.out, sys.stdin):
        return _live(wish, console, lookout, view)
    return _plain(wish, console, lookout)


class Lookout:
    """Looks at namespaces, and remembers of each what the next look is compared with."""

    def __init__(self, netns: Sequence[str], kernel: Kernel, clock: Callable[[], float]) -> None:
        self._netns, self._kernel, self._clock = netns, kernel, clock
        self._known: dict[str, Known] = {}
        self._looks: dict[str, Look] = {}

    def look(self) -> tuple[View, list[Failure]]:
        """How busy everything is since the last look, and what could not be seen."""
        found: list[Load] = []
        failures: list[Failure] = []
        before, self._looks = self._looks, {}
        for name in self._netns or self._kernel.names():
            try:
                now = self._looked(name)
            except NoNamespace as failure:
                failures += [failure] if self._netns else []  # a name that outlived its namespace
            except Failure as failure:
                failures.append(failure)
            else:
                self._looks[name] = now
                found += loads(printable(name, LONGEST_LINE), now, before.get(name))
        silent = [
            name for name, look in self._looks.items() if look.held and not look.tracking.accounted
        ]
        told = dict.fromkeys(f"portranger: {failure}" for failure in failures)
        view = View(loads=tuple(found), unaccounted=tuple(silent), troubles=tuple(told))
        return view, failures

    def _looked(self, name: str) -> Look:
        """With rules that are listed only if they changed since the last time."""
        known = self._known.pop(name, None)
        with self._kernel.opened(name, known) as namespace:
            live = namespace.observe().live
            if known is not None and namespace.known is known:
                live = namespace.recounted(live)
            if namespace.known is not None:
                self._known[name] = namespace.known
            held = tuple(holdings(live))
            if not held:
                return Look(at=self._clock(), held=())
            own = _own(namespace) if any(one.is_for_own for one in held) else frozenset()
            return Look(at=self._clock(), held=held, tracking=namespace.tracked(), own=own)


def _own(namespace: Namespace) -> frozenset[Address]:
    return frozenset(a.ip for link in namespace.surroundings().links for a in link.addresses)


# ------------------------------------------------------------------------------------ tables


def _plain(wish: Wish, console: Console, lookout: Lookout) -> int:
    """Each table is about the time since the one before, so the first comes after a while."""
    code = OK
    with viewer() as me:
        for _ in range(wish.count or 1):
            _pause(me, wish.interval)
            if me.ended:
                break
            view, failures = lookout.look()
            for line in table(view, wish.sort, _now()):
                console.say(printable(line, LONGEST_LINE))
            console.out.flush()
            code = failed(console, failures)
    return code


def _pause(me: Viewer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not me.ended and (left := deadline - time.monotonic()) > 0:
        me.wait(left)


def _now() -> str:
    return time.strftime("%H:%M:%S")


# ------------------------------------------------------------------------------------ the screen


def _live(wish: Wish, console: Console, lookout: Lookout, view: View) -> int:
    out, keys = console.out.fileno(), sys.stdin.fileno()
    showing = _Showing(wish, console, lookout, view)
    with viewer(keys) as me:
        while not me.ended:
            with taken(out, keys):
                showing.until_left(me, out)
            if me.suspended:
                me.suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)  # until we are told to go on
    return OK


class _Showing:
    """What is on the screen, and by what it is sorted."""

    def __init__(self, wish: Wish, console: Console, lookout: Lookout, view: View) -> None:
        self._wish, self._console, self._lookout = wish, console, lookout
        self._view, self._sort, self._when = view, wish.sort, _now()
        self._due = time.monotonic() + wish.interval

    def until_left(self, me: Viewer, out: int) -> None:
        while not me.leaves:
            if time.monotonic() >= self._due:
                self._view, _ = self._lookout.look()
                self._when = _now()
                self._due = time.monotonic() + self._wish.interval
            space = size(self._console.out)
            lines = screen(self._view, self._sort, self._when, space)
            me.put(out, frame([printable(line, LONGEST_LINE) for line in lines], space[1]))
            for key in me.wait(self._due - time.monotonic()):
                self._sort = SORTS.get(key, self._sort)
