"""Finds namespaces that hold rules of portranger although no valid manifest names them.

While a manifest is invalid and has no last valid version, nobody can tell which namespaces it is
for. Their rules stay, are not repaired and not removed; this is what reports them.
"""

import math
from collections.abc import Callable, Collection

from agent.errors import Failure
from agent.kernel.kinds import Kernel
from agent.status import Standing, State
from agent.teller import unmanaged_reason

SURVEY = 10.0  # seconds between two surveys: rules of unmanaged namespaces send no events

Clock = Callable[[], float]


class Unmanaged:
    """The unmanaged namespaces of a node, as of the last survey."""

    def __init__(self, clock: Clock, calendar: Clock) -> None:
        self._clock, self._calendar = clock, calendar
        self._found: dict[str, Standing] = {}
        self._unknown: frozenset[str] | None = None  # manifests that may declare what is found
        self.due = math.inf

    @property
    def standings(self) -> tuple[Standing, ...]:
        return tuple(self._found.values())

    def want(self, unknown: Collection[str] | None) -> None:
        """Survey while a manifest is unknown that was so when this run first read the manifests:
        one that came later has no rules yet. None: the manifests cannot be read now."""
        if unknown is None:
            return
        known = frozenset(unknown) if self._unknown is None else self._unknown
        self._unknown = known.intersection(unknown)
        if not self._unknown:
            self._found, self.due = {}, math.inf
        elif self.due == math.inf:
            self.due = -math.inf

    def survey(self, kernel: Kernel, managed: Collection[str]) -> bool:
        """Look at every namespace with a name that is not managed, if it is time; return whether
        the result is another than before."""
        if self._clock() < self.due:
            return False
        self.due = self._clock() + SURVEY
        before, found = self._found, dict[str, Standing]()
        identities = {kernel.identity(netns) for netns in managed}
        for netns in kernel.names():
            if netns in managed or kernel.identity(netns) in identities:
                continue
            if self._holds_rules(kernel, netns):
                found[netns] = before.get(netns) or self._standing(netns)
        if self.due == math.inf:  # nobody wants to know any more
            return False
        self._found = found
        return found.keys() != before.keys()

    def _holds_rules(self, kernel: Kernel, netns: str) -> bool:
        try:
            return kernel.holds_rules(netns)
        except Failure:  # it went meanwhile, or may not be entered: then it cannot be served either
            return False

    def _standing(self, netns: str) -> Standing:
        return Standing(
            netns=netns,
            state=State.UNMANAGED,
            since=self._calendar(),
            why=f"{unmanaged_reason(netns)}; fix the invalid manifests, or remove the rules with "
            f"portranger clear --netns {netns}",
        )
