"""A process of its own for libnftables. What others wrote into a table of ours can make it abort or
read where it must not, and the tables of a namespace are its tenants'.

Run by agent.kernel.libnftables; not for people.
"""

import json
import resource
import socket
import sys
import threading

import nftables

from agent.kernel.worker import Json, serve

LIBRARY = "libnftables.so.1"
MEMORY = 400 << 20  # bytes of addresses; to list 50,000 rules takes 290 MiB
PROCESSOR = 6  # seconds of processor time; to list 50,000 rules takes two
LONGEST = 64 << 20  # bytes of a listing
MOST_CLOSING = 8  # threads that wait for a namespace
STACK = 256 << 10  # bytes of a thread's
LARGE = 4 << 20  # after which the memory is given back, by ending


class TooLong(Exception):
    """A listing that is no use to anybody."""


class Contexts:
    """One for each request: a context belongs to the namespace that it was made in, and keeps that
    alive. To let go of it waits for whoever commits in that namespace, for as long as that takes,
    so a thread does it: the next request may be for another namespace."""

    def __init__(self) -> None:
        self._used: nftables.Nftables | None = None
        self._large = False

    def answer(self, question: Json) -> Json:
        self._used = nftables.Nftables(LIBRARY)
        self._used.set_handle_output(True)
        self._used.set_json_output(True)
        code, output, error = self._used.cmd(json.dumps({"nftables": question["commands"]}))
        self._large = len(output) > LARGE
        if len(output) > LONGEST:
            raise TooLong
        return {"code": code, "output": output, "failure": error}

    def let_go(self) -> None:
        if threading.active_count() <= MOST_CLOSING:
            held = [self._used]
            self._used = None
            threading.Thread(target=held.clear, daemon=True).start()
        self._used = None
        if self._large:
            sys.exit()


def main() -> None:
    """Serve the socket named on the command line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    contexts = Contexts()
    channel = socket.socket(fileno=int(sys.argv[1]))
    serve(channel, contexts.answer, contexts.let_go, processor=PROCESSOR)


if __name__ == "__main__":
    main()
