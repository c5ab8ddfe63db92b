"""Tells people about their instance where they look: as Events, which `kubectl describe` shows.

Nobody waits for it: what is to be said goes into a queue, and a thread of its own says it. What is
said again is counted instead, one object that has too much to say is cut short, and all together
never ask more of the API server than it can spare.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Event, Thread

from agent.backoff import Backoff
from agent.errors import Failure
from agent.sources.answers import Away, Denied, Missing, Refused
from agent.sources.api import Api
from agent.sources.told import Reference
from rules.values import Value, replace

COMPONENT = "portranger"
NORMAL, WARNING = "Normal", "Warning"
MOST_WAITING = 1000
LONGEST_MESSAGE = 1024  # bytes, as the API server allows
LONGEST_NAME = 253
SAME = 600.0  # seconds in which the same words are the same event
PATCHES = 60.0  # seconds between two times that one is counted up
MOST_REMEMBERED = 4096
OLDEST = 600.0  # seconds after which nobody wants to know
DENIED = 60.0  # seconds: an API server that has just started may not know our rights yet
RETRIES = Backoff(first=0.5, longest=30.0)
CONFLICTING = 409

Clock = Callable[[], float]
Warn = Callable[[str], None]


class Bucket(Value, kw_only=True):
    """Tokens that come back with time: so many at once, and so many a second. Pure."""

    most: float
    rate: float
    left: float
    at: float

    def wait(self, now: float) -> float:
        """The seconds until there is one."""
        return max(0.0, (1.0 - self._filled(now)) / self.rate)

    def taken(self, now: float) -> "Bucket":
        """After one more was taken; it may have to be given back."""
        return replace(self, left=self._filled(now) - 1.0, at=now)

    def _filled(self, now: float) -> float:
        return min(self.most, self.left + (now - self.at) * self.rate)


def per_object(now: float) -> Bucket:
    """Ten, then one a minute."""
    return Bucket(most=10.0, rate=1 / 60, left=10.0, at=now)


def over_all(now: float) -> Bucket:
    """A hundred, then five a second."""
    return Bucket(most=100.0, rate=5.0, left=100.0, at=now)


class _Said(Value, kw_only=True):
    """What is to be said, or was."""

    reference: Reference
    type: str
    reason: str
    message: str
    at: float  # of the calendar

    @property
    def key(self) -> tuple[str, ...]:
        return self.reference.uid, self.type, self.reason, self.message


class _Entry:
    """An event that was written, and what has happened since."""

    def __init__(self, name: str, said: _Said, now: float) -> None:
        self.name, self.said = name, said
        self.count = self.told = 1
        self.again = self.patched = now  # when it last happened, and was last written


class Feedback:
    """Events on instances; `say` may be called from any thread, and never waits."""

    def __init__(
        self,
        server: Api,
        node: str,
        *,
        clock: Clock = time.monotonic,
        calendar: Clock = time.time,
        warn: Warn = lambda _: None,
    ) -> None:
        """`warn` is told, from another thread, when events fail that did not, or for another
        reason."""
        self._api, self._node, self._clock, self._calendar = server, node, clock, calendar
        self._warn = warn
        self._queue: Queue[_Said | None] = Queue(MOST_WAITING)  # None: there is no more
        self._written: OrderedDict[tuple[str, ...], _Entry] = OrderedDict()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._late: dict[str, _Said] = {}  # by object, the last that it had no tokens left for
        self._all = over_all(clock())
        self._stop = Event()
        self._unheard = 0
        self._cut = 0
        self.sent = self.failed = 0
        self.trouble = ""  # why the last one failed, if it did
        self._thread = Thread(target=self._run, name="feedback", daemon=True)
        self._thread.start()

    def say(self, reference: Reference, type_: str, reason: str, message: str) -> None:
        """Put it on that object, soon."""
        said = _Said(
            reference=reference,
            type=type_,
            reason=reason,
            message=shortened(message, LONGEST_MESSAGE),
            at=self._calendar(),
        )
        try:
            self._queue.put_nowait(said)
        except Full:
            self._unheard += 1

    @property
    def dropped(self) -> int:
        """How many were not even tried."""
        return self._unheard + self._cut

    def close(self, seconds: float = 1.0) -> None:
        """What is not said by then is not said."""
        with suppress(Full):  # then it is far from done
            self._queue.put_nowait(None)
            self._thread.join(seconds)
        self._stop.set()
        self._api.interrupt()
        self._thread.join(seconds)

    # ------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with suppress(Empty):
                    said = self._queue.get(timeout=self._pause())
                    if said is None:
                        break
                    self._tell(said)
                self._count_up()
            except Exception as error:  # a bug must not silence us
                self._troubled(f"unexpected {type(error).__name__}: {error}")
                self.failed += 1
        self._api.close()

    def _pause(self) -> float | None:
        """Until the next thing to be counted up, if there is one."""
        due = [one.patched + PATCHES for one in self._written.values() if one.count > one.told]
        due += [self._clock() + self._buckets[uid].wait(self._clock()) for uid in self._late]
        return max(0.0, min(due) - self._clock()) if due else None

    def _tell(self, said: _Said) -> None:
        now = self._clock()
        entry = self._written.get(said.key)
        if entry is not None and now - entry.again < SAME:
            entry.count += 1
            entry.again, entry.said = now, said
            self._written.move_to_end(said.key)
            return
        bucket = self._buckets.pop(said.reference.uid, None) or per_object(now)
        if bucket.wait(now) > 0:
            self._cut += said.reference.uid in self._late
            self._late[said.reference.uid] = said
            self._buckets[said.reference.uid] = bucket
            return
        self._buckets[said.reference.uid] = bucket.taken(now)
        self._cut += self._late.pop(said.reference.uid, None) is not None
        entry = _Entry(_name(said), said, now)
        if self._written_down(entry, self._create):
            self._written[said.key] = entry
        for known in (self._written, self._buckets):
            while len(known) > MOST_REMEMBERED:
                gone, _ = known.popitem(last=False)
                self._late.pop(str(gone), None)

    def _count_up(self) -> None:
        """Tell how often what was said has happened since; forget what has not for long."""
        now = self._clock()
        for uid, said in list(self._late.items()):
            if self._buckets[uid].wait(now) <= 0:
                del self._late[uid]
                self._tell(said)
        for key, entry in list(self._written.items()):
            if entry.count > entry.told and now - entry.patched >= PATCHES:
                entry.patched = now
                self._written_down(entry, self._patch)
            elif entry.count == entry.told and now - entry.again >= SAME:
                del self._written[key]

    def _written_down(self, entry: _Entry, write: Callable[[_Entry], None]) -> bool:
        """Whether the API server has it; one that is away is waited for."""
        retries = RETRIES
        while not self._stop.wait(self._all.wait(self._clock())):
            self._all = self._all.taken(self._clock())
            count = entry.count
            try:
                write(entry)
            except (Away, Denied) as failure:
                self._troubled(str(failure))
                retries = retries.struck(max(self._clock(), retries.until))
                pause = random.uniform(0, retries.wait)  # noqa: S311 - no secret
                longest = DENIED
                if isinstance(failure, Away):
                    pause, longest = pause + failure.retry_after, OLDEST
                if self._calendar() - entry.said.at + pause > longest:
                    break
                self._stop.wait(pause)
            except Failure as failure:
                self._troubled(str(failure))
                break
            else:
                self.sent += 1
                self.trouble = ""
                entry.told = count
                return True
        self.failed += 1
        return False

    def _troubled(self, why: str) -> None:
        news, self.trouble = why != self.trouble, why
        if news:
            self._warn(f"events on instances cannot be written: {why}")

    # -------------------------------------------------------------------------------- events

    def _create(self, entry: _Entry) -> None:
        said = entry.said
        path = f"/api/v1/namespaces/{said.reference.namespace}/events"
        try:
            self._api.create(path, _event(entry, self._node))
        except Refused as refused:
            if refused.code != CONFLICTING:  # it arrived before the connection broke
                raise

    def _patch(self, entry: _Entry) -> None:
        namespace = entry.said.reference.namespace
        path = f"/api/v1/namespaces/{namespace}/events/{entry.name}"
        change: dict[str, object] = {"count": entry.count, "lastTimestamp": _moment(entry.said.at)}
        try:
            self._api.patch(path, change)
        except Missing:  # the API server keeps events for an hour
            entry.name = _name(entry.said)
            self._create(entry)


def _event(entry: _Entry, node: str) -> dict[str, object]:
    said, about = entry.said, entry.said.reference
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": entry.name, "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "namespace": about.namespace,
            "name": about.name,
            "uid": about.uid,
            "resourceVersion": about.resource_version,
        },
        "type": said.type,
        "reason": said.reason,
        "message": said.message,
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": _moment(said.at),
        "lastTimestamp": _moment(said.at),
        "count": entry.count,
    }


def _name(said: _Said) -> str:
    """As others name events: after the object, and by a number that nobody else has."""
    number = f".{random.getrandbits(64):016x}"
    return said.reference.name[: LONGEST_NAME - len(number)].rstrip(".-") + number


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def shortened(text: str, most: int) -> str:
    """A text of at most so many bytes; what is cut is cut between characters."""
    content = text.encode(errors="replace")
    if len(content) <= most:
        return content.decode()
    mark = "\N{HORIZONTAL ELLIPSIS}"
    return content[: most - len(mark.encode())].decode(errors="ignore") + mark
