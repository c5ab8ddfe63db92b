"""An API server of which a test holds every string: what is listed, and what a watch tells."""

from __future__ import annotations

import queue
import threading
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.answering import PATIENCE, Answer, Answering, Handler, line, said
from tests.spaces import eventually

Json = Any
TARGET = "migrationTarget"


class Streams:
    """The watches that are open, each by a name: the newest of that name is the one told."""

    def __init__(self, server: Answering) -> None:
        self.server = server
        self._told: dict[str, queue.Queue[bytes | None]] = {}

    def stream(self, handler: Handler, name: str = "") -> None:
        """Hold one open; without a name it says nothing."""
        told: queue.Queue[bytes | None] = queue.Queue()
        if name:
            self._told[name] = told
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while not self.server.over.is_set():
            try:
                piece = told.get(timeout=0.02)
            except queue.Empty:
                continue
            if piece is None:
                break
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    def tell(self, name: str, kind: str, thing: Json) -> None:
        assert eventually(lambda: name in self._told)
        self._told[name].put(line(kind, thing))

    def end(self, name: str) -> None:
        """The next one has another stream."""
        assert eventually(lambda: name in self._told)
        self._told.pop(name).put(None)


def listing(items: list[Json]) -> Answer:
    return said({"kind": "List", "metadata": {"resourceVersion": "10"}, "items": items})


class Script(Streams):
    """By path; nothing ever migrates here."""

    def __init__(self, server: Answering, lists: dict[str, list[Json]]) -> None:
        super().__init__(server)
        self.lists = lists
        self.refusals: dict[str, list[Answer]] = {}
        self.held: dict[str, threading.Event] = {}  # a list that waits for it
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        server.then(self._answer)

    def _answer(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        path, query = parts.path, dict(parse_qsl(parts.query, keep_blank_values=True))
        ours = TARGET not in query.get("labelSelector", "")
        what = "watch" if "watch" in query else "list"
        self.asked.append((what, path, query))
        if self.refusals.get(path):
            self.refusals[path].pop(0)(handler)
        elif what == "watch":
            self.stream(handler, path if ours else "")
        else:
            if path in self.held:
                self.held[path].wait(PATIENCE)
            found = self.lists.get(path, []) if ours else []
            listing([listed(one) for one in found])(handler)

    def count(self, what: str, path: str) -> int:
        return sum(one[:2] == (what, path) for one in self.asked)

    def query(self, path: str) -> dict[str, str]:
        """Of the last list."""
        return [one[2] for one in self.asked if one[:2] == ("list", path)][-1]


def listed(thing: Json) -> Json:
    """The same as a list tells of it; those of custom kinds say what they are."""
    if thing["kind"] == "VirtualMachineInstance":
        return thing
    return {key: value for key, value in thing.items() if key not in ("kind", "apiVersion")}
