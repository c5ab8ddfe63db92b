"""The kernel of this machine, a namespace at a time: what reconcile observes and commits to."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from agent.errors import Failure
from agent.kernel import netns as namespaces
from agent.kernel import rtnetlink, sysctl
from agent.kernel.nftables import Nftables
from rules.model import Observed, Surroundings
from rules.plan import Plan
from rules.values import replace


class LiveNamespace:
    """An opened namespace; closing it lets it die if it must."""

    def __init__(self, netns: str, descriptor: int) -> None:
        self._netns = netns
        self._descriptor = descriptor
        with self._inside():
            self._tables = Nftables()

    def surroundings(self) -> Surroundings:
        with self._inside():
            return rtnetlink.surroundings()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        with self._inside():
            settings = sysctl.read(sysctls)
        return replace(self._tables.observe(), sysctls=settings)

    def commit(self, plan: Plan) -> None:
        """Settings first: where they may not be made, the rules would lead nowhere."""
        with self._inside():
            for change in plan.sysctls:
                sysctl.write(change.name, change.after)
        self._tables.commit(plan)

    def close(self) -> None:
        self._tables.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            with namespaces.inside(self._descriptor, self._netns):
                yield
        except OSError as error:
            raise Failure(f"cannot work in namespace {self._netns}: {error}") from error


class LiveKernel:
    """Every namespace of this machine."""

    def names(self) -> list[str]:
        return namespaces.names()

    @contextmanager
    def opened(self, netns: str) -> Iterator[LiveNamespace]:
        with namespaces.opened(netns) as descriptor:
            namespace = LiveNamespace(netns, descriptor)
            try:
                yield namespace
            finally:
                namespace.close()
