"""What there is to see at each path: numbers for Prometheus, health for whoever watches over us,
JSON for programs and a page for people. `agent.server` brings it to them."""

import json
import os
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from threading import Lock

from agent.page.whole import asset, document
from agent.status import State, Status, status_json
from agent.waiting import Question, Verdict, judged, verdict_json
from rules.problems import printable
from rules.values import Value, replace

TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
HTML = "text/html; charset=utf-8"
INDEX = """\
portranger (in a browser, this is a page)
/metrics  for Prometheus
/healthz  whether the loop is alive
/readyz   whether every namespace is served
/status   how everything stands, as JSON; `portranger status` prints it
/wait     answers when what is wanted is applied; `portranger wait` asks it
"""


class Page(Value):
    """An answer."""

    code: int
    body: bytes
    kind: str = TEXT


class Pages:
    """What there is to see. `beat` is the monotonic time at which the loop last gave a sign, and
    `limit` how many seconds it may be silent."""

    def __init__(
        self,
        *,
        status: Callable[[], Status],
        beat: Callable[[], float],
        limit: float,
        metrics_text: Callable[[], bytes],
    ) -> None:
        self._status = status
        self._beat = beat
        self._limit = limit
        self._metrics_text = metrics_text
        self._node = os.environ.get("NODE_NAME") or socket.gethostname()
        self._style, self._script = asset("page.css"), asset("page.js")
        self._making = Lock()
        self._made: tuple[Status | None, bytes] = None, b""  # the last status that was asked for

    def page(self, path: str, *, html: bool = False) -> Page:
        """What is there; at / for who reads HTML, and for who does not."""
        match path:
            case "/" if html:
                return self._whole()
            case "/":
                return text(HTTPStatus.OK, INDEX)
            case "/page.css":
                return Page(HTTPStatus.OK, self._style, "text/css; charset=utf-8")
            case "/page.js":
                return Page(HTTPStatus.OK, self._script, "text/javascript; charset=utf-8")
            case "/metrics":
                return Page(HTTPStatus.OK, self._metrics_text(), METRICS)
            case "/healthz":
                return self._health()
            case "/readyz":
                return self._readiness()
            case "/status":
                return Page(HTTPStatus.OK, self._status_text(), "application/json")
            case _:
                return text(HTTPStatus.NOT_FOUND, "There is no such page; / lists them all.\n")

    def waited(self, asked: Question) -> tuple[Verdict, Page]:
        """Whether that is applied, and the answer to who asks."""
        status = self._status()
        verdict = judged(status, asked)
        if not verdict.done and (stuck := self._stuck()):
            verdict = replace(verdict, waiting=(stuck, *verdict.waiting))
        body = json.dumps(verdict_json(verdict, status)).encode()
        return verdict, Page(HTTPStatus.OK, body, "application/json")

    def _status_text(self) -> bytes:
        """Made once, however many ask, and shared by them: it may be megabytes."""
        with self._making:
            status = self._status()
            if self._made[0] is not status:
                self._made = None, b""  # not two at a time
                self._made = status, json.dumps(status_json(status)).encode()
            return self._made[1]

    def _whole(self) -> Page:
        body = document(self._status(), node=self._node, now=time.time(), stuck=self._stuck())
        return Page(HTTPStatus.OK, body, HTML)

    def _stuck(self) -> str:
        silent = time.monotonic() - self._beat()
        if silent < self._limit:
            return ""
        return f"The loop has been stuck for {silent:.0f} s; {self._limit:.0f} s are allowed."

    def _health(self) -> Page:
        stuck = self._stuck()
        code = HTTPStatus.SERVICE_UNAVAILABLE if stuck else HTTPStatus.OK
        return text(code, f"{stuck or 'ok'}\n")

    def _readiness(self) -> Page:
        status = self._status()
        reasons = [printable(status.unreadable, 1000)] if status.unreadable else []
        reasons += [
            printable(f"Namespace {one.netns} is failing: {one.why or 'no reason given'}", 1000)
            for one in status.namespaces
            if one.state is State.FAILING
        ]
        if not status.ready and not reasons:
            reasons = ["Not every namespace has been tried yet."]
        if reasons:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{x}\n" for x in reasons))
        return text(HTTPStatus.OK, "ready\n")


def text(code: int, words: str) -> Page:
    """An answer in plain words."""
    return Page(code, words.encode("utf-8", "replace"))
