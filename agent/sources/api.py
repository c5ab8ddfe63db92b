"""A Kubernetes API server, as much of it as we ask for: lists in pages, watches, and the writing of
events. On http.client: three verbs are not worth a client library of 20 MiB.

One connection, kept open, and one request at a time; whoever wants two at once has two of these.
Every answer has a time limit and a size limit. A watch is a WebSocket where the server has them, so
that one that hangs is found out by a ping, which is no request. What goes wrong is one of five
failures.
"""

import http.client
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from urllib.parse import urlencode

from agent.sources.answers import Away, Denied, Object, Refused, away, failure
from agent.sources.connection import Connection
from agent.sources.credentials import Credentials
from agent.sources.streams import PIECE, TooLarge, lines, messages
from agent.sources.websocket import Broken, handshake, is_accepted, new_key
from rules.values import Value

PAGE = 500  # objects; a server that answers from its cache sends all at once
PATIENCE = 30.0  # seconds of silence in the middle of an answer
WHOLE = 120.0  # seconds for an answer that is not a watch
WATCHES = (290, 350)  # seconds; at random, so that nodes that start together do not go on so
LATE = 15.0  # seconds after the server should have ended a watch
QUIET = 10.0  # seconds of silence after which a server is asked whether it is there
ANSWER = 15.0  # seconds that it has to say so; its kernel would, also while it hangs
UNWILLING = (400, 405, 426)  # answers of who lets no WebSocket through
MOST_LISTED = 256 << 20  # bytes of a page
MOST_LINE = 16 << 20  # bytes of one event; no object has more than 2 MiB
MOST_SAID = 64 << 10  # bytes of why something was refused
MOST_PAGES = 10_000
DROPPED = (ConnectionResetError, BrokenPipeError, http.client.BadStatusLine, ssl.SSLEOFError)

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

Trim = Callable[[Object], object]  # of each mapping in an answer, the innermost first
Query = Mapping[str, str]


class Event(Value):
    """Something that happened to an object that is watched."""

    type: str  # ADDED, MODIFIED, DELETED or BOOKMARK
    object: Object


class Listed(Value):
    """Objects, and the version of the whole at which they are those."""

    items: tuple[object, ...]
    version: str


class Api:
    """A connection to an API server."""

    def __init__(self, credentials: Credentials, *, patience: float = PATIENCE) -> None:
        self._credentials, self._patience = credentials, patience
        self._connection: Connection | None = None
        self._closed = False
        self._upgrades = True  # whether a watch may be a WebSocket
        self._dropped = False  # whether the last one that was asked for was cut off
        self._spoke = False  # whether the last request was sent
        self.requests = self.received = 0  # how many, and bytes of their answers

    def another(self) -> "Api":
        """To the same server, for a request beside one that lasts."""
        return Api(self._credentials, patience=self._patience)

    def __str__(self) -> str:
        return str(self._credentials.endpoint)

    # --------------------------------------------------------------------------------- verbs

    def get(self, path: str, query: Query | None = None, *, verb: str = "get") -> Object:
        """One object."""
        return self._answered("GET", path, query or {}, verb)

    def listed(self, path: str, query: Query, trim: Trim | None = None) -> Listed:
        """All objects there, page by page."""
        items: list[object] = []
        asked = {**query, "limit": str(PAGE)}
        for _ in range(MOST_PAGES):
            page = self._answered("GET", path, asked, "list", trim)
            found, metadata = page.get("items"), page.get("metadata")
            if not isinstance(metadata, dict) or not isinstance(found, list | None):
                raise Away(f"{self} answered with no list")
            items += found or []
            token = metadata.get("continue")
            if not token:
                return Listed(tuple(items), str(metadata.get("resourceVersion", "")))
            # The version is in the token, and must not be said twice.
            asked = {**query, "limit": str(PAGE), "continue": str(token)}
            for key in ("resourceVersion", "resourceVersionMatch"):
                asked.pop(key, None)
        raise Away(f"{self} never comes to the end of its list")

    def watch(
        self, path: str, query: Query, version: str, trim: Trim | None = None
    ) -> Iterator[Event]:
        """What happens after that version, until the server ends it, as it does every few minutes.
        Once this returns it has begun; it is over when the iterator is exhausted or closed."""
        seconds = random.randint(*WATCHES)  # noqa: S311 - spreads load, hides nothing
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        response, key = self._watched(path, asked)
        if response.status == http.client.SWITCHING_PROTOCOLS and not is_accepted(
            key, response.getheader("Sec-WebSocket-Accept", "")
        ):
            self._end(response, close=True)
            raise Away(f"{self} answered with another WebSocket than was asked for")
        return self._events(response, seconds + LATE, trim)

    def create(self, path: str, body: Object) -> Object:
        """Write a new object."""
        return self._answered("POST", path, {}, "create", body=body)

    def patch(self, path: str, body: Object) -> Object:
        """Change some fields of an object."""
        return self._answered("PATCH", path, {}, "patch", body=body)

    def close(self) -> None:
        """By who used it."""
        self._closed = True
        self._hang_up()

    def interrupt(self) -> None:
        """From another thread: who waits for an answer is told that there is none, now or later."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    # ------------------------------------------------------------------------------ requests

    def _watched(self, path: str, query: Query) -> tuple[http.client.HTTPResponse, str]:
        """A watch that has begun, as a WebSocket if that can be, with the key that it was asked for
        with. Whoever is on the way and lets none through is not asked again; one that drops the
        connection instead, or forbids it as Envoy does, is asked without it the next time."""
        if not self._upgrades or self._dropped:
            self._dropped = False
            return self._sent("GET", path, query, None, "watch"), ""
        key = new_key()
        try:
            asking = handshake(key, self._credentials.endpoint.origin)
            return self._sent("GET", path, query, None, "watch", asking), key
        except Refused as refused:
            if refused.code not in UNWILLING:
                raise
            self._upgrades = False
            return self._sent("GET", path, query, None, "watch"), ""
        except Denied as denied:
            self._dropped = denied.known
            raise
        except Away as failure:
            self._dropped = self._spoke and failure.__cause__ is not None
            raise

    def _answered(  # noqa: PLR0913, PLR0917 - all that a request consists of
        self,
        method: str,
        path: str,
        query: Query,
        verb: str,
        trim: Trim | None = None,
        body: Object | None = None,
    ) -> Object:
        response = self._sent(method, path, query, body, verb)
        try:
            text = self._body(response, MOST_LISTED)
            answer = json.loads(text, object_hook=trim)
        except (OSError, http.client.HTTPException) as error:
            raise away(str(self), error) from error
        except (ValueError, RecursionError) as error:
            raise Away(f"{self} answered with no JSON") from error
        finally:
            self._end(response)
        if not isinstance(answer, dict):
            raise Away(f"{self} answered with no object")
        return answer

    def _sent(  # noqa: PLR0913, PLR0917 - all that a request consists of
        self,
        method: str,
        path: str,
        query: Query,
        body: Object | None,
        verb: str,
        more: Mapping[str, str] = NO_HEADERS,
    ) -> http.client.HTTPResponse:
        """The answer to a request, its head only; whoever is not known asks once more."""
        response = self._tried(method, path, query, body, more)
        if response.status == http.client.UNAUTHORIZED:
            self._end(response, close=True)  # a certificate belongs to the connection
            self._credentials.refused()
            response = self._tried(method, path, query, body, more)
        if response.status >= 300:
            try:
                self._refuse(response, verb)
            finally:
                self._end(response)
        return response

    def _tried(
        self, method: str, path: str, query: Query, body: Object | None, more: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """On the connection that is open, which the server may have closed meanwhile, or a new
        one."""
        target = f"{self._credentials.endpoint.path}{path}"
        target += f"?{urlencode(query)}" if query else ""
        content = None if body is None else json.dumps(body).encode()
        try:
            headers = {**self._headers(method), **more}
            kept = self._connection is not None
            try:
                return self._asked(method, target, content, headers)
            except DROPPED:
                self._hang_up()
                if not kept or self._closed:
                    raise
                return self._asked(method, target, content, headers)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._hang_up()
            raise away(str(self), error) from error

    def _asked(
        self, method: str, target: str, content: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        self._spoke = False
        if self._connection is None:
            connection = Connection(self._credentials, self._patience)
            connection.connect()
            self._connection = connection
        if self._closed:
            raise ConnectionAbortedError("it was closed by us")
        self.requests += 1
        self._connection.be_patient(self._patience)
        self._connection.request(method, target, content, dict(headers))
        self._spoke = True
        return self._connection.getresponse()

    def _headers(self, method: str) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "portranger"}
        authorization = self._credentials.authorization()
        if authorization is not None:
            headers["Authorization"] = authorization
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        elif method == "POST":
            headers["Content-Type"] = "application/json"
        return headers

    # ------------------------------------------------------------------------------- answers

    def _body(self, response: http.client.HTTPResponse, most: int) -> bytes:
        deadline = time.monotonic() + WHOLE
        pieces: list[bytes] = []
        size = 0
        while piece := response.read1(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise Away(f"{self} answered with more than {most >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError("the answer does not come to its end")
        self.received += size
        if response.length:  # which http.client does not mind here
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(pieces)

    def _events(
        self, response: http.client.HTTPResponse, longest: float, trim: Trim | None
    ) -> Iterator[Event]:
        """What a watch tells, until it ends."""
        upgraded = response.status == http.client.SWITCHING_PROTOCOLS
        deadline = time.monotonic() + longest
        try:
            connection = self._connection
            if connection is None:
                return
            connection.be_patient(longest)
            told = lines(response, MOST_LINE, deadline, self._count)
            if upgraded:
                silence = QUIET, ANSWER
                told = messages(connection, response, MOST_LINE, deadline, silence, self._count)
            for text in told:
                yield self._event(text, trim)
        except TimeoutError as error:
            if upgraded:
                raise Away(f"{self} hangs: it does not answer to a ping") from error
        except (Broken, TooLarge) as error:
            raise Away(f"{self} told of an event that is none: {error}") from error
        except (OSError, http.client.HTTPException):
            return  # however it was cut off: that is as good as any end
        finally:
            self._end(response, close=upgraded)

    def _count(self, size: int) -> None:
        self.received += size

    def _event(self, line: bytes, trim: Trim | None) -> Event:
        try:
            told = json.loads(line, object_hook=trim)
        except (ValueError, RecursionError) as error:
            raise Away(f"{self} told of an event that is no JSON") from error
        kind, thing = (told.get("type"), told.get("object")) if isinstance(told, dict) else (0, 0)
        if not isinstance(kind, str) or not isinstance(thing, dict):
            raise Away(f"{self} told of an event that is none")
        if kind == "ERROR":
            code = thing.get("code")
            raise failure(str(self), code if isinstance(code, int) else 500, thing, "watch")
        return Event(kind, thing)

    def _refuse(self, response: http.client.HTTPResponse, verb: str) -> None:
        try:
            status = json.loads(self._body(response, MOST_SAID))
        except (OSError, ValueError, RecursionError, Away, http.client.HTTPException):
            status = None
        said = status if isinstance(status, dict) else {}
        retry = response.headers.get("Retry-After")
        raise failure(str(self), response.status, said, verb, retry)

    # ---------------------------------------------------------------------------- connections

    def _end(self, response: http.client.HTTPResponse, *, close: bool = False) -> None:
        """Done with an answer; where some of it is left, the connection is of no more use."""
        unfinished = not response.isclosed() and response.length != 0
        response.close()
        if close or unfinished or response.will_close:
            self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
