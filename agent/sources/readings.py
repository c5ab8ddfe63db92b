"""The objects of one kind that an API server told of, each as last read. What cannot be understood
keeps what it meant when it last was: to us, or to an earlier run, as long as it is the same object.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, TypeVar

from agent.sources.answers import Object
from agent.sources.boundary import guarded, problem
from agent.sources.meaning import Enough, Progress
from agent.sources.store import Store, Texts
from agent.sources.told import Told, is_kept, kept, recalled
from rules.problems import Problem
from rules.values import Value, replace

Meant = TypeVar("Meant")


class _Reading(Value, Generic[Meant], kw_only=True):
    """One object, and what it says."""

    told: Told
    meant: Meant
    problems: tuple[Problem, ...]


class Readings(Generic[Meant]):
    """All of one kind."""

    def __init__(  # noqa: PLR0913 - the rest by name
        self,
        heard: Callable[[Object], Told | None],
        understood: Callable[[Told], tuple[Meant, tuple[Problem, ...]]],
        closed: Callable[[Told], Meant],
        texts: Texts[str],
        lasts: Callable[[Told], bool] = lambda _: True,
        *,
        left: Mapping[str, str] | None = None,
    ) -> None:
        """What meets a bug means what `closed` makes of it, unless it was understood before. Of
        those that do not last, nothing is kept when they turn bad. `left` are the last good
        texts that the source before this one knew, whether they are stored or not."""
        self._heard, self._understood, self._closed = heard, understood, closed
        self._texts, self._lasts = texts, lasts
        self._left: Mapping[str, str] = left or {}
        self._known: dict[str, _Reading[Meant]] = {}
        self._good: dict[str, _Reading[Meant]] = {}  # how each was last understood
        self._wanted: Mapping[str, str] | None = None  # what to store; None: nobody knows yet

    @property
    def meant(self) -> list[tuple[Told, Meant]]:
        """Each with what it last meant, or else what is made of it."""
        return [(one.told, self._good.get(label, one).meant) for label, one in self._known.items()]

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(problem for one in self._known.values() for problem in one.problems)

    @property
    def held(self) -> tuple[str, ...]:
        """Those that go on with their last good meaning."""
        return tuple(label for label in self._bad if label in self._good)

    @property
    def lost(self) -> tuple[str, ...]:
        """Those that cannot be understood, and never could."""
        return tuple(label for label in self._bad if label not in self._good)

    @property
    def _bad(self) -> list[str]:
        return [label for label, one in self._known.items() if one.problems]

    def look(self, seen: Iterable[Told], beat: Progress, *, anew: bool) -> None:
        """These are all there are; only those in which something changed are read again."""
        before, self._known = self._known, {}
        good, self._good = self._good, {}
        for told in sorted(seen, key=lambda one: one.label):
            label = told.label
            known = before.get(label)
            if known is None or known.told.content != told.content or anew:
                known = self._read(told)
                beat()
            self._known[label] = known if known.told is told else replace(known, told=told)
            if not known.problems:
                self._good[label] = known
            elif self._lasts(told) and (last := self._last(told, good)):
                self._good[label] = last
        self._wanted = {
            label: one.told.text
            for label, one in self._good.items()
            if self._lasts(self._known[label].told)
        }
        self._left = {}

    def texts(self) -> Mapping[str, str]:
        """The last good texts, as they would be stored."""
        if self._wanted is None:
            return {**self._texts.earlier, **self._left}
        return {
            label: kept(self._known[label].told.kind, text) for label, text in self._wanted.items()
        }

    def remember(self, beat: Progress, enough: Enough) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        return self._wanted is None or self._texts.remember(self._wanted, beat, enough)

    def _read(self, told: Told) -> _Reading[Meant]:
        label = told.label
        read = guarded(lambda: self._understood(told), label)
        if told.fault:
            read = problem(label, told.fault)
        if isinstance(read, Problem):
            return _Reading(told=told, meant=self._closed(told), problems=(read,))
        meant, problems = read
        return _Reading(told=told, meant=meant, problems=problems)

    def _last(self, told: Told, good: Mapping[str, _Reading[Meant]]) -> _Reading[Meant] | None:
        """How that very object was last understood; another of the same name has no past."""
        last = good.get(told.label) or self._recalled(told)
        return None if last is None or last.problems or last.told.uid != told.uid else last

    def _recalled(self, told: Told) -> _Reading[Meant] | None:
        """What an earlier source left under that name, or an earlier run stored."""
        text = self._left.get(told.label) or self._texts.earlier.get(told.label, "")
        document = recalled(told.kind, text)
        earlier = None if document is None else guarded(lambda: self._heard(document), told.label)
        if isinstance(earlier, Problem):
            return None
        return self._read(earlier) if earlier and earlier.label == told.label else None


def left_of(kind: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Those of a kind, out of what the source before this one left."""
    return {label: text for label, text in texts.items() if is_kept(kind, text)}


def texts_of(kind: str, store: Store, earlier: dict[str, str]) -> Texts[str]:
    """Those of a kind, out of what an earlier run left."""
    found = {label: text for label, text in earlier.items() if is_kept(kind, text)}
    for label in found:
        del earlier[label]
    return Texts(store, found, partial(kept, kind))
