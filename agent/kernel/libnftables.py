"""libnftables, in a worker process: commands in JSON for any namespace, and what it answers."""

import ctypes
import functools
import json

from agent.errors import BackendMissing, Failure, TryAgain
from agent.kernel.worker import Lost, Worker, module
from rules.nft import Json

LIBRARY = "libnftables.so.1"
WORKER = "agent.kernel.libnftables_worker"
PATIENCE = 6.0  # seconds, in which nobody else is served; to list 50,000 rules takes two
UNREADABLE = {
    "UnicodeDecodeError": "what is no text",
    "MemoryError": "more than there is memory for",
    "TooLong": "more than anybody would have written",
}


class Unreadable(Failure):
    """What is there makes libnftables fail."""


class Libnftables:
    """Started when first needed."""

    def __init__(self) -> None:
        self._worker = Worker("the worker for libnftables", module(WORKER), patience=PATIENCE)

    def listed(self, descriptor: int, what: Json) -> tuple[list[Json], str]:
        """What there is of it in that namespace, and what went wrong. What takes too long or too
        much memory to list counts as unreadable: somebody put it there for that."""
        try:
            return self.run(descriptor, {"list": what})
        except Lost as lost:
            if lost.late:
                raise Unreadable("libnftables does not come to its end") from lost
            raise

    def run(self, descriptor: int, *commands: Json) -> tuple[list[Json], str]:
        """What commands list, and what went wrong, in that namespace."""
        try:
            answer = self._worker.ask(descriptor, {"commands": commands})
        except Lost as lost:
            if lost.crashed:
                raise Unreadable("libnftables crashed") from lost
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

    def stop(self) -> None:
        self._worker.stop()


@functools.cache
def load() -> None:
    """See that it is there; only the worker calls it."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendMissing(
            f"cannot load {LIBRARY} ({error})", "Run: apt install libnftables1"
        ) from error
