"""What one source leaves to the next at a reload. Until the new source has read everything itself,
it declares what the old one declared: a source that cannot be read is never an empty one.
"""

from collections.abc import Mapping
from types import MappingProxyType

from agent.sources.meaning import Meaning
from rules.problems import Problem
from rules.values import Value, replace

_SERVICES, _LAWS = "Service/", "NetworkPolicy/"  # begin the labels of such objects of a cluster


class Handover(Value, kw_only=True):
    """What a source knew when another took its place."""

    meaning: Meaning
    texts: Mapping[str, str] = MappingProxyType({})  # last good ones, as they would be stored
    enforced: bool = True  # whether policies were; else it may never have asked for any


class Predecessor:
    """Completes what a new source says by what the one before it said, part by part, until that
    part was read for the first time."""

    def __init__(self, left: Handover | None) -> None:
        self._left = left
        before = left.meaning if left is not None else None
        self._machines = self._services = before
        self._laws = before if left is not None and left.enforced else None

    @property
    def texts(self) -> Mapping[str, str]:
        """The last good texts of what is not read yet."""
        return self._left.texts if self._left is not None and self._machines is not None else {}

    def with_machines(self, now: Meaning) -> Meaning:
        """With the machines from before, while the source cannot be read."""
        if not now.unreadable:
            self._machines = None
        before = self._machines
        if before is None:
            return now
        return replace(
            now,
            machines=before.machines,
            skipped=before.skipped,
            unknown=before.unknown,
            count=before.count,
            contested=before.contested,
            instances=before.instances,
            problems=tuple(one for one in before.problems if not _is_of(one.file)),
            held=tuple(label for label in before.held if not _is_of(label)),
            shut=tuple(label for label in before.shut if not _is_of(label)),
        )

    def with_services(self, now: Meaning, unknown: str) -> Meaning:
        """With the Services from before, while nothing is known of them. Where the kind of source
        changed, what is published stays as it is: who has which node ports is decided otherwise."""
        if not unknown:
            self._services = None
        before = self._services
        if before is None:
            return now
        if (before.endpoints is None) != (now.endpoints is None) or before.services_unknown:
            return replace(now, services_unknown=unknown)
        return replace(
            now,
            services=before.services,
            endpoints=before.endpoints,
            services_unknown="",
            services_away=unknown,
            problems=(*now.problems, *_problems(before, _SERVICES)),
            held=(*now.held, *_labels(before.held, _SERVICES)),
        )

    def with_laws(self, now: Meaning, unknown: str) -> Meaning:
        """With the policies from before, while nothing is known of them."""
        if not unknown:
            self._laws = None
        before = self._laws
        if before is None:
            return now
        if before.laws_unknown:
            return replace(now, laws_unknown=unknown)
        return replace(
            now,
            laws=before.laws,
            laws_unknown="",
            laws_away=unknown,
            problems=(*now.problems, *_problems(before, _LAWS)),
            held=(*now.held, *_labels(before.held, _LAWS)),
            shut=(*now.shut, *_labels(before.shut, _LAWS)),
        )

    def complete(self, now: Meaning) -> Meaning:
        """For a source whose parts are read together."""
        found = self.with_machines(now)
        return self.with_laws(self.with_services(found, now.unreadable), now.unreadable)


def _is_of(label: str) -> bool:
    """Whether it is of a Service or a policy of a cluster."""
    return label.startswith((_SERVICES, _LAWS))


def _labels(labels: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(label for label in labels if label.startswith(kind))


def _problems(meaning: Meaning, kind: str) -> tuple[Problem, ...]:
    return tuple(one for one in meaning.problems if one.file.startswith(kind))
