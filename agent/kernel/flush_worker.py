"""A process of its own that walks conntrack. To take hundreds of thousands of flows apart takes
seconds of Python, which the thread that repairs namespaces must not wait for.

Run by agent.kernel.deferred; not for people.
"""

import base64
import pickle
import socket
import sys
from collections.abc import Sequence

from agent.kernel import rtnetlink
from agent.kernel.flush import Found, delete, find, still
from agent.kernel.worker import Json, serve
from rules.model import Address
from rules.stale import Due

FIND, DELETE = "find", "delete"
PROCESSOR = 120  # seconds; a walk over four million flows takes 50


class Pass:
    """One pass at a time, in two steps. Between them the daemon may have led some of what was found
    to its guest again: it says in the second what is still due."""

    def __init__(self) -> None:
        self._found: list[Found] = []

    def answer(self, question: Json) -> Json:
        """Whether there are more flows than were found, or how many of these were forgotten."""
        # Only the process that started us can write to the socket.
        text = base64.b64decode(str(question["due"]))
        due: Sequence[Due] | None = pickle.loads(text) if text else None  # noqa: S301 - see above
        if question["step"] == FIND:
            self._found, more = find(due or (), _own())
            return {"found": len(self._found), "more": more}
        found, self._found = self._found, []
        return {"count": delete(found if due is None else still(found, due, _own()))}


def _own() -> set[Address]:
    return {address.ip for link in rtnetlink.surroundings().links for address in link.addresses}


def main() -> None:
    """Serve the socket named on the command line."""
    serve(socket.socket(fileno=int(sys.argv[1])), Pass().answer, processor=PROCESSOR)


if __name__ == "__main__":
    main()
