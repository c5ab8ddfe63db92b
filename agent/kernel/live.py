"""The kernel of this machine, a namespace at a time: what reconcile observes and commits to."""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from agent.errors import Failure
from agent.kernel import netns as namespaces
from agent.kernel import rtnetlink, sysctl
from agent.kernel.backends import AUTO, Workers, chosen
from agent.kernel.conntrack import Conntrack, is_idle
from rules.flows import Forgotten, forgotten
from rules.model import Foreign, Observed, Surroundings
from rules.plan import Plan, Table
from rules.values import replace

PATIENCE = 5.0  # seconds to wait for another of us in the same namespace


class LiveNamespace:
    """An opened namespace; closing it lets it die if it must."""

    def __init__(self, netns: str, descriptor: int, backend: str, workers: Workers) -> None:
        self._netns = netns
        self._descriptor = descriptor
        with self._inside():
            self._backends = chosen(backend, descriptor, workers)
        self.backend, self.reason = self._backends.name, self._backends.reason
        self._conntrack: Conntrack | None = None
        self._due: tuple[Forgotten, ...] = ()  # flows to forget after the next whole commit
        status = os.fstat(descriptor)
        self.identity = (status.st_dev, status.st_ino)

    def surroundings(self) -> Surroundings:
        with self._inside():
            return rtnetlink.surroundings()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        with self._inside():
            settings = sysctl.read(sysctls)
        other = self._backends.other.observe() if self._backends.other else Observed()
        leftovers = (*other.live, *other.foreign)
        if other.table and not leftovers:
            leftovers = (Foreign("its tables", 0, "nothing in a place of ours"),)
        return replace(self._backends.tables.observe(), sysctls=settings, leftovers=leftovers)

    def commit(self, plan: Plan) -> None:
        """Settings first: where they may not be made, the rules would lead nowhere. What the other
        backend holds goes last: a flow that the first one has translated is left alone by the
        second, so for that moment no port is forwarded twice, and at no moment none."""
        with self._inside():
            for change in plan.sysctls:
                sysctl.write(change.name, change.after)
        self._due = (*self._due, *forgotten(plan))  # a stale commit may have done a part of it
        self._backends.tables.commit(plan)
        if plan.leftovers and self._backends.other:
            gone = Plan(netns=plan.netns, table=Table.DELETE, remove=plan.leftovers)
            self._backends.other.commit(gone)
        due, self._due = self._due, ()
        if due:
            with self._inside():
                self._forget(due)

    def _forget(self, due: tuple[Forgotten, ...]) -> None:
        if is_idle():
            return
        if self._conntrack is None:
            self._conntrack = Conntrack()
        links = rtnetlink.surroundings().links
        self._conntrack.forget(due, {a.ip for link in links for a in link.addresses})

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Others of us wait their turn. It is a courtesy: whoever can open the namespace can hold
        its lock, so after a while we go on without, and a lost race is a stale commit as ever."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        self._backends.close()
        if self._conntrack is not None:
            self._conntrack.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            with namespaces.inside(self._descriptor, self._netns):
                yield
        except OSError as error:
            raise Failure(f"cannot work in namespace {self._netns}: {error}") from error


class LiveKernel:
    """Every namespace of this machine."""

    def __init__(self, backend: str = AUTO) -> None:
        self._backend = backend
        self._workers = Workers()

    def names(self) -> list[str]:
        return namespaces.names()

    @contextmanager
    def opened(self, netns: str) -> Iterator[LiveNamespace]:
        with namespaces.opened(netns) as descriptor:
            namespace = LiveNamespace(netns, descriptor, self._backend, self._workers)
            try:
                yield namespace
            finally:
                namespace.close()

    def close(self) -> None:
        """End the worker processes, if any were needed."""
        self._workers.stop()
