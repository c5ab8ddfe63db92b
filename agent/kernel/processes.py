"""What /proc tells of a process, read by a path or below a descriptor of its folder: of which pod
it is, for which instance it was started, and when, and its network namespace.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHERS = ("virt-launcher", "virt-launcher-monitor")
AT_ONCE, MOST_READ = 1 << 13, 1 << 17  # bytes

READ = os.O_RDONLY | os.O_CLOEXEC
# The kubelet names a pod's cgroup pod<u-i-d>, or for systemd kubepods-burstable-pod<u_i_d>.slice
NAMED = re.compile(rb"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?!\w)")
# It is below the kubelet's own; seen from a pod, that may be an ancestor, which has no name there.
KUBELETS = re.compile(rb"[/-]kubepods[-./]|:(?:/\.\.)+(?:/burstable|/besteffort)?/$")
USERS = re.compile(rb"/user[-.@/]")  # user.slice/user-1000.slice/user@1000.service, or /user of old

Identity = tuple[int, int]


def pod_of(cgroup: bytes) -> str:
    """The pod whose process has that /proc/<pid>/cgroup; empty: none, or more than one.

    Of each line the outermost name counts: below it, whoever is in the pod may make cgroups of any
    name. So may users of the node below those that they are given when they log in. Seen from a
    cgroup namespace of our own, a path begins at the first ancestor in common, which is above both
    pods.
    """
    matches = [NAMED.search(line) for line in cgroup.split(b"\n") if b"pod" in line]
    named = {
        match[1].replace(b"_", b"-").decode()
        for match in matches
        if match and _is_kubelets(match.string[: match.start()])
    }
    return named.pop() if len(named) == 1 else ""


def _is_kubelets(above: bytes) -> bool:
    """Whether the kubelet names cgroups there, and nobody else."""
    return KUBELETS.search(above) is not None and USERS.search(above) is None


def instance_of(cmdline: bytes) -> str:
    """The UID of the instance that a launcher was started for; empty: it is no launcher."""
    words = iter(cmdline.decode(errors="replace").split("\0"))
    if any(word.rpartition("/")[2] in LAUNCHERS for word in words):  # what follows are its options
        for word in words:
            option, _, value = word.partition("=")
            if option == "--uid":
                return value or next(words, "")
    return ""


@contextmanager
def opened(path: str, flags: int, place: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: str, place: int | None = None, most: int = MOST_READ) -> bytes:
    with opened(path, READ, place) as descriptor:
        return drained(descriptor, most)


def drained(descriptor: int, most: int) -> bytes:
    text = b""
    while len(text) < most and (more := os.read(descriptor, AT_ONCE)):
        text += more
    return text


def started_at(text: bytes) -> int:
    """From /proc/<pid>/stat; the name of a process, in brackets, may be anything."""
    return int(text[text.rindex(b")") + 2 :].split(maxsplit=20)[19])


def identity_of(namespace: str | int, place: int | None = None) -> Identity:
    # Asked for every pod whenever any comes or goes.
    status = os.stat(namespace, dir_fd=place)
    return status.st_dev, status.st_ino
