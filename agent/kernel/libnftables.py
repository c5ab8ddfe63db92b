"""libnftables, in a worker process: commands in JSON for any namespace, and what it answers."""

import ctypes
import functools
import json

from agent.errors import BackendMissing, Failure, TryAgain
from agent.kernel.worker import Lost, Worker, module
from rules.nft import Json

LIBRARY = "libnftables.so.1"
WORKER = "agent.kernel.libnftables_worker"
PATIENCE = 10.0  # seconds, in which nobody else is served; to list 50,000 rules takes two


class Unreadable(Failure):
    """What is there makes libnftables fail."""


class Libnftables:
    """Started when first needed."""

    def __init__(self) -> None:
        self._worker = Worker("the worker for libnftables", module(WORKER), patience=PATIENCE)

    def run(self, descriptor: int, *commands: Json) -> tuple[list[Json], str]:
        """What is listed, and what went wrong, in that namespace."""
        try:
            answer = self._worker.ask(descriptor, {"commands": commands})
        except Lost as lost:
            if lost.crashed:
                raise Unreadable("libnftables crashed") from lost
            raise
        if answer.get("error") == "UnicodeDecodeError":
            raise Unreadable("libnftables lists what is no text")
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
