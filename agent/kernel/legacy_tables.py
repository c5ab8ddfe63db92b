"""The legacy tables of iptables in the namespace this thread is in: which are in use, and a
fingerprint that tells whether somebody changed their rules. These tables send no events and have no
generation. To ask the kernel for a table that is not in use would make it."""

import ctypes
import os
import socket
import struct
from collections.abc import Collection

from agent.kernel import sysctl
from rules.model import Family

NAMES = {Family.IP: "ip_tables_names", Family.IP6: "ip6_tables_names"}
FORWARDING = frozenset({"filter", "mangle", "security"})  # tables with a chain FORWARD
GET_INFO, GET_ENTRIES = 64, 65
INFO = struct.Struct("=32s13I")  # the last is the size of all entries
ENTRIES_AT = 40  # in the answer: behind a name, their size and padding
OFFSETS = struct.Struct("=HH")  # of an entry's target, and of the next entry
# By family: where to ask, and where an entry has its offsets and its counters.
PLACES = {
    Family.IP: (socket.AF_INET, socket.IPPROTO_IP, 88, 96),
    Family.IP6: (socket.AF_INET6, socket.IPPROTO_IPV6, 140, 152),
}
COUNTERS = 16  # bytes
UNKNOWN = b"not known"
LIBC = None  # the process itself, which has getsockopt


def in_use(family: Family) -> frozenset[str]:
    """The tables that somebody has used."""
    try:
        return frozenset(sysctl.text(f"/proc/thread-self/net/{NAMES[family]}").split())
    except OSError:
        return frozenset()


def any_in_use(tables: Collection[str]) -> bool:
    """Whether somebody has used one of these tables, in whichever family."""
    return any(not in_use(family).isdisjoint(tables) for family in Family)


def fingerprint(tables: Collection[str]) -> bytes:
    """Of the rules in those of these tables that are in use, without their counters; empty: none
    is. OSError: the kernel does not tell."""
    used = [(one, name) for one in Family for name in sorted(in_use(one).intersection(tables))]
    if not used:
        return b""
    from hashlib import blake2b  # where nobody has such tables, nobody pays for loading it

    found = blake2b(digest_size=16)
    for family, table in used:
        found.update(f"{family.value} {table}\0".encode())
        found.update(_entries(family, table))
    return found.digest()


def known_by(tables: Collection[str]) -> bytes:
    """The same, where it is enough to know that it is not known."""
    try:
        return fingerprint(tables)
    except OSError:
        return UNKNOWN


def _entries(family: Family, table: str) -> bytes:
    protocol, level, offsets_at, counters_at = PLACES[family]
    with socket.socket(protocol, socket.SOCK_DGRAM) as asking:
        name = table.encode().ljust(32, b"\0")
        info = ctypes.create_string_buffer(name, INFO.size)
        _ask(asking, level, GET_INFO, info)
        size = INFO.unpack(info.raw)[-1]
        answer = ctypes.create_string_buffer(name + struct.pack("=I", size), ENTRIES_AT + size)
        _ask(asking, level, GET_ENTRIES, answer)
    raw = bytearray(answer.raw[ENTRIES_AT:])
    start = 0
    while start + counters_at + COUNTERS <= len(raw):
        raw[start + counters_at : start + counters_at + COUNTERS] = bytes(COUNTERS)
        _, after = OFFSETS.unpack_from(raw, start + offsets_at)
        if not after:
            break  # nonsense, which might never end
        start += after
    return bytes(raw)


def _ask(asking: socket.socket, level: int, what: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    """Have it filled; Python's own getsockopt takes a kilobyte at the most."""
    length = ctypes.c_uint32(len(buffer))
    libc = ctypes.CDLL(LIBC, use_errno=True)
    if libc.getsockopt(asking.fileno(), level, what, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
