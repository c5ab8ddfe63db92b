"""What happens in directories, as the kernel tells it: a descriptor to poll, and what it says.

Manifests that are written and namespaces that are named wake the daemon through this.
"""

import ctypes
import errno
import fcntl
import os
import struct
import termios

from agent.errors import TryAgain
from rules.values import Value

MODIFY, ATTRIB = 0x2, 0x4
CLOSE_WRITE = 0x8
MOVED_FROM, MOVED_TO = 0x40, 0x80
CREATE, DELETE = 0x100, 0x200
DELETE_SELF, MOVE_SELF = 0x400, 0x800
Q_OVERFLOW = 0x4000  # told without being asked for
ONLYDIR = 0x1000000

PAUSE = 10.0  # seconds from one look to the next where watches are not to be had
SPENT = (
    "the kernel gives this user no more inotify watches, so what changes is looked for every "
    f"{PAUSE:.0f} s: raise fs.inotify.max_user_watches on the node "
    "(sysctl -w fs.inotify.max_user_watches=1048576), or end what uses them up"
)

EVENT = struct.Struct("=iIII")  # watch, mask, cookie, length of the name


class Happened(Value):
    """One thing that happened, in what is watched under that number."""

    watch: int  # -1 with Q_OVERFLOW
    mask: int
    name: str  # in the directory; empty where it happened to the watched thing itself


class Inotify:
    """Never waits."""

    def __init__(self) -> None:
        number = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if number < 0 and ctypes.get_errno() == errno.EMFILE and _is_room():
            raise TryAgain(
                "the kernel gives this user no more inotify instances",
                "Raise fs.inotify.max_user_instances on the node "
                "(sysctl -w fs.inotify.max_user_instances=1024), or end what uses them up",
            )
        self._descriptor = _checked(number, "inotify")

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, path: str, mask: int) -> int:
        """The number of the watch: what is watched already (by whatever path) keeps its own, and
        the new mask takes the place of the old one. Where there are no more to be had, `is_spent`
        is true of what is raised."""
        raw = os.fsencode(path)
        if b"\0" in raw:  # C would read the path up to there, and watch something else
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return _checked(_libc.inotify_add_watch(self._descriptor, raw, mask), path)

    def unwatch(self, number: int) -> None:
        """A watch that ended with what it watched is no error."""
        _libc.inotify_rm_watch(self._descriptor, number)

    def read(self) -> list[Happened]:
        """Everything that has happened up to now; what happens meanwhile is left for next time."""
        size = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        waiting = int(struct.unpack("=i", size)[0])
        return _events(os.read(self._descriptor, waiting)) if waiting else []

    def close(self) -> None:
        os.close(self._descriptor)


def is_spent(error: OSError) -> bool:
    """Whether the kernel gives no more watches, whatever is to be watched."""
    return error.errno == errno.ENOSPC


def _is_room() -> bool:
    """Whether this process may open more: the kernel has one word for its limit and the user's."""
    try:
        os.close(os.eventfd(0))
    except OSError:
        return False
    return True


def _events(data: bytes) -> list[Happened]:
    found: list[Happened] = []
    start = 0
    while start < len(data):
        watch, mask, _, length = EVENT.unpack_from(data, start)
        end = start + EVENT.size + length
        name = data[start + EVENT.size : end].rstrip(b"\0")
        found.append(Happened(watch, mask, os.fsdecode(name)))
        start = end
    return found


def _checked(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


_libc = ctypes.CDLL(None, use_errno=True)
