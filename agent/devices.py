"""Which link of a pod backs a network resource, asked for aside: the answer is in the memory of the
pod's own process, and whoever owns that can make reading it last as long as they like."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Full, Queue
from threading import Thread

MOST_WAITING = 256
MOST_KNOWN = 4096

Asked = Callable[[str], Mapping[str, str]]


class Devices:
    """Of the pods that were asked about; `fileno` tells when there is more to know."""

    def __init__(self, asked: Asked, warn: Callable[[str], None]) -> None:
        self._asked, self._warn = asked, warn
        self._known: dict[str, Mapping[str, str]] = {}
        self._waiting: Queue[str] = Queue(MOST_WAITING)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: Thread | None = None

    def fileno(self) -> int:
        return self._news

    def of(self, netns: str) -> Mapping[str, str]:
        """The link of each resource of a pod, as far as is known by now."""
        if netns not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            with suppress(Full):  # the next time
                self._waiting.put_nowait(netns)
                self._known[netns] = {}
            if self._thread is None:
                self._thread = Thread(target=self._ask, name="devices", daemon=True)
                self._thread.start()
        return self._known.get(netns, {})

    def news(self) -> bool:
        """Whether more is known than when this was last asked."""
        try:
            return bool(os.eventfd_read(self._news))
        except BlockingIOError:
            return False

    def _ask(self) -> None:
        while True:
            netns = self._waiting.get()
            try:
                self._known[netns] = self._asked(netns)
                os.eventfd_write(self._news, 1)
            except Exception as error:  # a bug met with one pod must not keep the others waiting
                name = type(error).__name__
                self._warn(f"the devices of {netns} are not known: unexpected {name}: {error}")
