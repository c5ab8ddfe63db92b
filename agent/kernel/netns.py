"""Network namespaces: finding them by name, path or process, and stepping in and out of them."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agent.errors import Failure, NoNamespace, NotPermitted
from rules.model import NODE

RUN = Path("/run/netns")
NAMED = str(RUN)
OWN = "/proc/thread-self/ns/net"
CLONE_NEWNET = 0x40000000


def names() -> list[str]:
    """The namespaces that have a name on this machine."""
    try:
        return sorted(entry.name for entry in RUN.iterdir())
    except FileNotFoundError:
        return []


def identity(netns: str) -> tuple[int, int] | None:
    """Which namespace has that name now; None where there is none (yet: `ip netns add` makes a
    plain file first). Numbers are given again when a namespace has died."""
    try:
        # As strings: it is asked for every namespace whenever any comes or goes.
        status = os.stat(_path(netns))  # noqa: PTH116
        own = os.stat(OWN)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if status.st_dev == own.st_dev else None


@contextmanager
def opened(netns: str) -> Iterator[int]:
    """A descriptor of the namespace; it keeps the namespace alive while it is open."""
    try:
        # Without O_NONBLOCK, a path that leads to a pipe would have us wait for its writer.
        descriptor = os.open(_path(netns), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError) as error:
        raise _missing(netns) from error
    except PermissionError as error:
        raise NotPermitted(
            f"may not open namespace {netns}", "Run as root, or with CAP_SYS_PTRACE"
        ) from error
    except OSError as error:
        raise Failure(f"cannot open namespace {netns}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inside(descriptor: int, netns: str) -> Iterator[None]:
    """This thread in that namespace; a thread that cannot come home must not go on."""
    home = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(descriptor, netns)
        try:
            yield
        finally:
            _come_home(home)
    finally:
        os.close(home)


def _enter(descriptor: int, netns: str) -> None:
    try:
        _setns(descriptor)
    except PermissionError as error:
        raise NotPermitted(
            f"may not enter namespace {netns}", "Run as root, or with CAP_SYS_ADMIN"
        ) from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise _missing(netns) from error
        raise Failure(f"cannot enter namespace {netns}: {error.strerror}") from error


def _come_home(home: int) -> None:
    try:
        _setns(home)
    except OSError as error:
        os.write(2, f"portranger: lost in a foreign namespace ({error}); ending\n".encode())
        os._exit(1)


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)


def _path(netns: str) -> str:
    if netns == NODE:
        return OWN
    if "/" in netns:
        return netns
    if netns.startswith("pid:"):
        return f"/proc/{netns.removeprefix('pid:')}/ns/net"
    return f"{NAMED}/{netns}"


def _missing(netns: str) -> NoNamespace:
    if netns.startswith("pid:"):
        return NoNamespace(f"there is no process or network namespace {netns}")
    fix = f"Create it (ip netns add {netns})" if "/" not in netns else "Create it"
    return NoNamespace(
        f"there is no network namespace {netns}",
        f"{fix}, or name another with --netns or the annotation portranger.io/netns",
        partial(_guess, netns),
    )


def _guess(netns: str) -> str:
    """The name that may have been meant, as a question."""
    import difflib  # which nobody else here needs

    try:
        known = names()
    except OSError:  # there may be no right to look
        known = []
    similar = difflib.get_close_matches(netns, set(known) - {netns}, n=1)
    return f"Did you mean {similar[0]}? " if similar else ""
