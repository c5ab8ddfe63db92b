"""A process of its own that reads the rules of others on the node. To take a hundred thousand of
them apart takes many seconds of Python, which nobody else must wait for.

Run by agent.kernel.foreign_rules; not for people.
"""

import base64
import pickle
import resource
import socket
import sys
from pathlib import Path

from agent.kernel.foreign_filters import filters
from agent.kernel.translations import translations
from agent.kernel.worker import Json, serve

NAT, FILTERS = "nat", "filters"
READERS = {NAT: translations, FILTERS: filters}
MEMORY = 400 << 20  # bytes of addresses; 100,000 rules take 100 MiB
LARGE = 64 << 20  # bytes in use, after which the memory is given back, by ending


def answer(question: Json) -> Json:
    """What there is of it in the namespace that this thread is in."""
    found = READERS[str(question["what"])]()
    return {"found": base64.b64encode(pickle.dumps(found)).decode()}


def let_go() -> None:
    """End where much was read: it is started again when it is needed.

    The peak of getrusage will not do: it begins with that of the process that started this one.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * resource.getpagesize() > LARGE:
        sys.exit()


def main() -> None:
    """Serve the socket named on the command line, with so many seconds of processor time for each
    request."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    channel = socket.socket(fileno=int(sys.argv[1]))
    serve(channel, answer, let_go, processor=int(sys.argv[2]))


if __name__ == "__main__":
    main()
