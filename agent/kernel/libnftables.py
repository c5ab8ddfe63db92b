"""libnftables, in worker processes: commands in JSON for any namespace, and what it answers."""

import ctypes
import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agent.errors import BackendMissing, Failure, TryAgain
from agent.kernel.worker import PATIENCE, Lost, Worker, home, module
from rules.nft import Json

LIBRARY = "libnftables.so.1"
WORKER = "agent.kernel.libnftables_worker"
WORKERS = 4  # at the most, where threads work in several namespaces: each is memory
UNREADABLE = {
    "UnicodeDecodeError": "what is no text",
    "MemoryError": "more than there is memory for",
    "TooLong": "more than anybody would have written",
}


class Unreadable(Failure):
    """What is there makes libnftables fail."""


class TooMuch(Unreadable):
    """What is there takes libnftables too long. It reads from the start whenever somebody commits
    meanwhile, so that may be the reason as well."""


class Libnftables:
    """Workers are started when first needed; each answers one thread at a time."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._idle: list[Worker] = []
        self._all: list[Worker] = []
        home()
        self._places = threading.BoundedSemaphore(WORKERS)

    def listed(self, descriptor: int, what: Json) -> tuple[list[Json], str]:
        """What there is of it in that namespace, and what went wrong."""
        return self.run(descriptor, {"list": what})

    def run(self, descriptor: int, *commands: Json) -> tuple[list[Json], str]:
        """What commands list, and what went wrong, in that namespace."""
        try:
            with self._lent() as worker:
                answer = worker.ask(descriptor, {"commands": commands})
        except Lost as lost:
            if lost.crashed:
                raise Unreadable("libnftables crashed") from lost
            if lost.overrun:
                raise TooMuch("libnftables takes too much processor time") from lost
            raise
        if answer.get("error") in UNREADABLE:
            raise Unreadable(f"libnftables lists {UNREADABLE[str(answer['error'])]}")
        if "error" in answer:
            raise TryAgain(f"libnftables cannot be used ({answer.get('text')})", "Try again")
        if answer["code"]:
            return [], str(answer["failure"]) or "no reason given"
        try:
            listed = json.loads(str(answer["output"]) or "{}").get("nftables", [])
        except ValueError as error:
            raise Unreadable("libnftables lists what is no JSON") from error
        return listed, ""

    @contextmanager
    def _lent(self) -> Iterator[Worker]:
        """A worker that nobody else asks meanwhile."""
        if not self._places.acquire(timeout=self.patience):
            raise TryAgain(f"timed out: {WORKERS} workers for libnftables are busy", "Try again")
        try:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = self._made()
            try:
                yield worker
            finally:
                self._idle.append(worker)
        finally:
            self._places.release()

    def _made(self) -> Worker:
        made = Worker("the worker for libnftables", module(WORKER), patience=self.patience)
        self._all.append(made)
        return made

    def stop(self) -> None:
        for worker in self._all:
            worker.stop()


@functools.cache
def load() -> None:
    """See that it is there; only the worker calls it."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendMissing(
            f"cannot load {LIBRARY} ({error})", "Run: apt install libnftables1"
        ) from error
