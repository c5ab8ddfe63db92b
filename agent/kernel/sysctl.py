"""Kernel settings of the namespace this thread is in."""

import errno
import os
from collections.abc import Iterable

from agent.errors import NotPermitted, TryAgain

NODES = "/host/proc/sys"  # in a container, whose own is read-only: see kubernetes/base
LATER = "net.netfilter."  # settings that come with the first rule that needs conntrack
ROOM = 1 << 16  # bytes; all reserved ports one by one would be three times as many
SWAP = str.maketrans("./", "/.")  # in a dotted name, a slash stands for a dot of a link's name


def read(names: Iterable[str]) -> dict[str, str]:
    """The settings that are there."""
    values: dict[str, str] = {}
    for name in names:
        try:
            values[name] = text(_path(name)).strip()
        except FileNotFoundError:
            continue
    return values


def text(path: str) -> str:
    """What a small file of /proc says; through pathlib it would take three times as long. Some
    settings are told by one read, cut to its size, and no other: a full one is made anew."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    room = ROOM
    try:
        while len(told := os.pread(descriptor, room, 0)) == room:
            room *= 4
        return told.decode()
    finally:
        os.close(descriptor)


def write(name: str, value: str) -> None:
    """Make a setting."""
    try:
        try:
            _put(_path(name), value)
        except OSError as error:
            if error.errno != errno.EROFS or not os.path.isdir(NODES):  # noqa: PTH112 - a string
                raise
            _put(f"{NODES}/{name.translate(SWAP)}", value)
    except FileNotFoundError as error:
        if name.startswith(LATER):
            return  # it is there when the rules are, which the next look sees
        raise _missing(name) from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise NotPermitted(
            f"may not set {name}={value}: {error.strerror}",
            "Run as root with /proc/sys writable, or set it yourself beforehand",
        ) from error


def require(names: Iterable[str]) -> None:
    """See that settings are there which are to be made later."""
    for name in names:
        if name not in read([name]):
            raise _missing(name)


def _missing(name: str) -> TryAgain:
    return TryAgain(f"there is no setting {name} (its link went away)")


def _put(path: str, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        left = value.encode() or b"\n"  # nothing at all would be no change
        while left and (done := os.write(descriptor, left)):
            left = left[done:]  # of a long list the kernel takes 4 KiB at a time
    finally:
        os.close(descriptor)


def _path(name: str) -> str:
    return f"/proc/sys/{name.translate(SWAP)}"
