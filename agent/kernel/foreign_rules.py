"""Rules of others on the node, read by a worker process and remembered: as long as nobody but us
commits to nftables there, and the legacy tables stay as they are, they are not read again."""

import base64
import pickle
from collections.abc import Collection

from agent.errors import TryAgain
from agent.kernel.foreign_rules_worker import FILTERS, NAT
from agent.kernel.kinds import Generation
from agent.kernel.legacy_tables import FORWARDING, any_in_use, fingerprint
from agent.kernel.nftables import generation_of, netlink
from agent.kernel.translations import Found, tables_of_others
from agent.kernel.worker import Lost, Worker, module
from rules.foreign_filters import Filter
from rules.values import Value, replace

WORKER = "agent.kernel.foreign_rules_worker"
PROCESSOR = 40  # seconds of processor time for one reading; 100,000 rules take 18
PATIENCE = (
    120.0  # seconds on the wall clock; a machine that is overloaded needs three times as long
)
TABLES = {NAT: frozenset({"nat"}), FILTERS: FORWARDING}  # legacy ones, by what is read


class _State(Value):
    """What the tables of a namespace are known by."""

    generation: Generation
    legacy: bytes


class _Unread(Exception):
    """Why nothing is known; lasting: until somebody changes the rules."""

    def __init__(self, why: str, *, lasting: bool) -> None:
        super().__init__(why)
        self.lasting = lasting


class ForeignRules:
    """Of one namespace, the node's; the thread that asks is in it."""

    def __init__(self, processor: int = PROCESSOR) -> None:
        name, limit = "the worker for rules of others", [str(processor)]
        self._limit = processor
        self._worker = Worker(name, module(WORKER), limit, patience=PATIENCE)
        self._known: dict[str, tuple[_State, object]] = {}

    def nat(self, descriptor: int) -> Found:
        """What others translate there; what cannot be read is named."""
        try:
            found = self._read(NAT, descriptor, Found())
        except _Unread as unread:
            return Found(unreadable=(f"rules of others: {unread}",))
        return found if isinstance(found, Found) else Found()

    def filters(self, descriptor: int) -> tuple[Filter, ...]:
        """Those of others at the forward hook; what cannot be read is left out."""
        try:
            found = self._read(FILTERS, descriptor, ())
        except _Unread:
            return ()
        return found if isinstance(found, tuple) else ()

    def committed(self, before: Generation, after: Generation) -> None:
        """We made these generations, if nobody else was there; else the number is another."""
        for what, (state, found) in list(self._known.items()):
            if state.generation == before:
                self._known[what] = replace(state, generation=after), found

    def stop(self) -> None:
        self._worker.stop()

    def _read(self, what: str, descriptor: int, nothing: object) -> object:
        tables = TABLES[what]
        before = _state(tables)
        known = self._known.pop(what, None)
        if known is None or known[0] != before:
            try:
                found = self._asked(what, descriptor) if _anything(tables) else nothing
            except _Unread as unread:
                if not unread.lasting:
                    raise
                found = unread
            known = None if before is None or before != _state(tables) else (before, found)
        else:
            found = known[1]
        if known is not None:
            self._known[what] = known
        if isinstance(found, _Unread):
            raise found
        return found

    def _asked(self, what: str, descriptor: int) -> object:
        try:
            answer = self._worker.ask(descriptor, {"what": what})
        except Lost as lost:
            why = lost.what
            if lost.overrun:
                why = f"to read them takes more than {self._limit} s of processor time"
            elif lost.crashed:
                why = "to read them takes more memory than there is for it"
            raise _Unread(why, lasting=lost.overrun or lost.crashed) from lost
        except TryAgain as failure:
            raise _Unread(failure.what, lasting=False) from failure
        if answer.get("error") == "MemoryError":
            raise _Unread("to read them takes more memory than there is for it", lasting=True)
        if "error" in answer:
            raise _Unread(f"{answer['error']}: {answer.get('text')}", lasting=False)
        # The worker is ours: nobody else can write to its socket.
        return pickle.loads(base64.b64decode(str(answer["found"])))  # noqa: S301 - see above


def _state(tables: Collection[str]) -> _State | None:
    """None: it cannot be told."""
    try:
        with netlink() as asking:
            return _State(generation_of(asking), fingerprint(tables))
    except OSError:
        return None


def _anything(tables: Collection[str]) -> bool:
    """Whether there is anything to read."""
    try:
        return any_in_use(tables) or bool(tables_of_others())
    except OSError:
        return True
