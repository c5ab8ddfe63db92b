"""What every kernel offers, whichever holds the rules: the seam that reconcile works through."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from rules.model import Observed, Surroundings
from rules.plan import Plan


class Namespace(Protocol):
    """An opened namespace; which backend holds our rules there, and why."""

    backend: str
    reason: str

    @property
    def identity(self) -> object:
        """The same for two names of one namespace."""

    def surroundings(self) -> Surroundings: ...
    def observe(self, sysctls: Iterable[str] = ()) -> Observed: ...
    def commit(self, plan: Plan) -> None: ...
    def exclusive(self) -> AbstractContextManager[None]: ...


class Kernel(Protocol):
    """Where namespaces are."""

    def names(self) -> list[str]: ...
    def opened(self, netns: str) -> AbstractContextManager[Namespace]: ...
