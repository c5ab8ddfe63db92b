"""What a source says, and what every source offers to who keeps it in view: a directory of
manifests, or the API of a cluster."""

import enum
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Protocol

from agent.revision import Taken
from rules.fences import Laws
from rules.model import NODE, Machine
from rules.problems import Problem
from rules.services import Endpoint, Service
from rules.values import Value
from rules.words import few

Progress = Callable[[], None]
Enough = Callable[[], bool]


class Meaning(Value, kw_only=True):
    """What the source says."""

    machines: tuple[Machine, ...] = ()
    services: tuple[Service, ...] = ()
    # What is behind each Service, by its text, for each of its ports; None: what they select.
    endpoints: Mapping[str, tuple[tuple[Endpoint, ...], ...]] | None = None
    services_unknown: str = ""  # why nothing is known of them: what there is for any stays
    services_away: str = ""  # why nothing new is heard of them: what was known goes on
    laws: Laws = Laws()
    laws_unknown: str = ""  # why nothing is known of policies: what is enforced stays
    laws_away: str = ""  # why nothing new is heard of them: what was known goes on
    problems: tuple[Problem, ...] = ()
    skipped: tuple[str, ...] = ()
    held: tuple[str, ...] = ()  # files that go on with their last good meaning
    shut: tuple[str, ...] = ()  # those without one, of which no port is open meanwhile
    unknown: tuple[str, ...] = ()  # bad files without one: what they declare may be running
    count: int = 0
    files: Mapping[str, Taken] | None = None  # by name; None: it is not from files
    unreadable: str = ""
    contested: Mapping[str, str] = MappingProxyType({})  # namespaces, with what is wrong there
    instances: Mapping[str, str] = MappingProxyType({})  # by pod, whose it is said to be; UIDs


def outdated(meaning: Meaning, since: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """The namespaces where the last valid version of an invalid manifest is in use, with the
    reason, and since when; `since` says so of each file. A policy is in use where it may apply."""
    held = frozenset(meaning.held)
    files: dict[str, set[str]] = {}
    for netns, origin in _places(meaning, held):
        if (file := _file(origin)) in held:
            files.setdefault(netns, set()).add(file)
    return {
        netns: (
            f"using the last valid version of {', '.join(few(sorted(names)))}",
            min(since[name] for name in names),
        )
        for netns, names in files.items()
    }


def _places(meaning: Meaning, held: Set[str]) -> Iterator[tuple[str, str]]:
    """Namespaces, each with where a manifest is that is for it."""
    yield from ((machine.netns, machine.origin) for machine in meaning.machines)
    yield from ((NODE, service.origin) for service in meaning.services)
    for policy in meaning.laws.policies:
        if _file(policy.origin) in held:
            for machine in meaning.machines:
                if machine.namespace == policy.namespace:
                    yield machine.netns, policy.origin


def _file(origin: str) -> str:
    return origin.rpartition(":")[0]


class Tiding(enum.Enum):
    """What may be told to whoever wrote a manifest, by the name that Kubernetes' events give it."""

    APPLIED = "PortsApplied"
    REJECTED = "PortsRejected"
    CONFLICT = "PortsConflict"
    REPAIRED = "PortsDriftRepaired"
    REFUSED = "PortsRefused"  # what was found in the pod's place cannot be trusted


class Source(Protocol):
    """Where manifests come from."""

    meaning: Meaning  # as of the last look

    @property
    def namespaces(self) -> frozenset[str]:
        """Where the machines are that it was last known to declare, also by an earlier run."""

    @property
    def due(self) -> float | None:
        """When to listen again although nothing is to be heard."""

    def filenos(self) -> tuple[int, ...]:
        """What to poll."""

    def heard(self) -> bool:
        """Listen; whether something is to be looked at."""

    def is_another(self) -> bool:
        """Whether what was mounted or unmounted has put another in its place."""

    def renew(self) -> None:
        """Whatever is known, all of it is to be read again."""

    def look(self, beat: Progress) -> Meaning:
        """What it says now."""

    def remember(self, beat: Progress, enough: Enough) -> bool:
        """Store what it last said, for the next run, until it is enough; whether that was all."""

    def texts(self) -> Mapping[str, str]:
        """The last good texts, as they would be stored, for the source that takes its place."""

    def tell(self, machine: str, tiding: Tiding, message: str) -> None:
        """Let whoever wrote the manifest of that machine know, if there is a way."""

    def traffic(self) -> Mapping[str, int]:
        """What it cost whoever serves it, by the name of a metric."""

    def close(self) -> None: ...
