"""A steady stream of datagrams through a forwarded port, counted; runs in the machine, with nothing
but the standard library: `python3 stream.py CLIENT GUEST ADDRESS PORT`.

Each tick sends two: one on a flow that stands, and one on a flow of its own, which no entry of
conntrack helps past the rules. It goes on until its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import sys
import time

CLONE_NEWNET = 0x40000000
LONGEST = 60.0  # seconds
TICK = 0.002
LATE = 2.0

libc = ctypes.CDLL(None, use_errno=True)


def enter(netns: str) -> None:
    descriptor = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {netns}")
    os.close(descriptor)


def datagrams() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(LATE)
    return made


def echoed(client: socket.socket, guest: socket.socket, target: tuple[str, int], word: str) -> bool:
    """Whether a datagram reaches the guest, and its answer the client."""
    try:
        client.sendto(word.encode(), target)
        heard, sender = guest.recvfrom(100)
        guest.sendto(heard, sender)
        return client.recv(100) == word.encode()
    except OSError:
        return False


def main() -> None:
    client, guest, address, port = sys.argv[1:]
    target = (address, int(port))
    enter(guest)
    server = datagrams()
    server.bind(("", int(port)))
    enter(client)
    standing = datagrams()
    sent = lost = 0
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        with datagrams() as fresh:
            for sender in (standing, fresh):
                sent += 1
                lost += not echoed(sender, server, target, str(sent))
        if sent == 2:
            print("flowing", flush=True)  # noqa: T201 - whoever started it waits for this
        if select.select([sys.stdin], [], [], TICK)[0]:
            break
    print(json.dumps({"sent": sent, "lost": lost}), flush=True)  # noqa: T201 - the result


if __name__ == "__main__":
    main()
