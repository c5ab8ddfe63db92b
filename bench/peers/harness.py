"""Takes a peer through the job: timed rounds first, then each of its promises tried by packets."""

import functools
import itertools
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from agent.errors import Failure
from agent.kernel.probe import asks, echoing
from bench.peers.peer import Doing, Peer, Step
from bench.peers.place import (
    FIRST,
    GUEST_ADDRESS,
    LAST,
    POD_ADDRESS,
    Place,
    Unavailable,
    missing,
    place,
)
from bench.peers.report import Row
from bench.peers.tables import SAMPLE
from bench.process import scratch, until
from rules.model import FORWARDED, Protocol

ROUNDS = 25
BUDGET = 4.0  # seconds of rounds that a peer gets; the round under way is finished
REPAIR = 1.0  # seconds that a peer gets to notice a flush, or to forget a flow
FLOW_ROUNDS = 5
SHIFTED = range(9000, 9010)
SHIFT = 2000
# As on every node: the kernel tracks flows, and goes on translating them, while there is any rule
# that translates.
BYSTANDER = (
    "add table ip bystander;"
    " add chain ip bystander other { type nat hook prerouting priority 0; };"
    " add rule ip bystander other tcp dport 1 dnat to 192.0.2.9"
)
Times = tuple[list[float], list[float], list[float]]
FAILURES = (Unavailable, Failure, OSError, subprocess.SubprocessError)


class Entry:
    """A peer that takes part, until it fails."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.stack = ExitStack()
        self.times: Times = ([], [], [])
        self.spent = 0.0  # seconds

    def enter(self, number: int) -> None:
        folder = self.stack.enter_context(scratch())
        self.where = self.stack.enter_context(place(str(number), folder))
        self.doing = self.stack.enter_context(self.peer.at_work(self.where))
        self.stack.enter_context(_outside(self.where, self.doing))

    def round(self) -> None:
        steps = (self.doing.set_up, self.doing.change, self.doing.remove)
        for taken, step in zip(self.times, steps, strict=True):
            taken.append(_timed(step))
            self.spent += taken[-1] / 1000


def rows(peers: Sequence[Peer], say: Callable[[str], None]) -> list[Row]:
    """What each peer is like, or why that cannot be said here. They are all there at once and take
    turns: on a noisy machine only what was measured together can be compared."""
    found: dict[str, Row] = {}
    with ExitStack() as stack:
        routed = stack.enter_context(place("routed", stack.enter_context(scratch())))
        entries = []
        for number, peer in enumerate(peers):
            if absent := missing(*peer.needs):
                found[peer.name] = _without(peer, f"not installed: {', '.join(absent)}")
                continue
            entry = Entry(peer)
            stack.push(entry.stack)
            entries.append(entry)
            _attempt(entry, found, functools.partial(entry.enter, number))
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            for entry in entries:
                if entry.spent < BUDGET and entry.peer.name not in found:
                    _attempt(entry, found, entry.round)
        for entry in entries:
            if entry.peer.name not in found:
                say(entry.peer.name)
                _attempt(entry, found, functools.partial(_examine, entry, routed, found))
    return [found[peer.name] for peer in peers]


def _attempt(entry: Entry, found: dict[str, Row], step: Step) -> None:
    try:
        step()
    except FAILURES as error:
        found[entry.peer.name] = _without(entry.peer, str(error))
        entry.stack.close()


def _without(peer: Peer, reason: str) -> Row:
    return Row(name=peer.name, reason=reason)


def _examine(entry: Entry, routed: Place, found: dict[str, Row]) -> None:
    found[entry.peer.name] = _row(entry, routed)
    entry.stack.close()


def _row(entry: Entry, routed: Place) -> Row:
    peer, where, doing = entry.peer, entry.where, entry.doing
    rules, memory, ratio = _standing(where, doing, routed)
    _prove_change(peer, where, doing)
    left_open = _flow_after_removal(where, doing)
    shifted = _shifted(where, doing)
    flushed = _flushed(where, doing, rules)
    set_up, change, remove = map(statistics.median, entry.times)
    if doing.sample:
        set_up, rules = set_up * doing.sample.factor, round(rules * doing.sample.factor)
        change = set_up + remove
    return Row(
        name=peer.name,
        how=peer.how,
        set_up=set_up,
        change=None if peer.no_removal else change,
        remove=None if peer.no_removal else remove,
        measured=tuple(tuple(round(one, 3) for one in times) for times in entry.times),
        sample=doing.sample.ports if doing.sample else None,
        rules=rules,
        flow=ratio,
        memory=memory,
        shifted=shifted,
        flushed=flushed,
        left_open=left_open,
        notes=_notes(peer),
    )


def _notes(peer: Peer) -> tuple[str, ...]:
    said = {"change": peer.no_change, "removal": peer.no_removal}
    return tuple(f"{what}: {words}" for what, words in said.items() if words)


def _timed(step: Step) -> float:
    started = time.perf_counter()
    step()
    return (time.perf_counter() - started) * 1000


def _last(doing: Doing) -> int:
    return FIRST + doing.sample.ports - 1 if doing.sample else LAST


def _standing(where: Place, doing: Doing, routed: Place) -> tuple[int, float | None, float | None]:
    """Set up and proven: the rules, the memory, and what a new flow costs relative to routing."""
    doing.set_up()
    last = _last(doing)
    with _guest(where, doing):
        wanted = [(one, port) for one in FORWARDED for port in (FIRST, last)]
        for protocol, port in wanted:
            _demand(where.reached(protocol, port) == port, f"{protocol.value}/{port} is not there")
        _demand(where.reached(Protocol.TCP, last + 1) is None, f"tcp/{last + 1} is open too soon")
    memory = doing.memory() if doing.memory else None
    counted = doing.flows and not doing.sample
    return where.rules(), memory, _flow(where, routed) if counted else None


def _flow(where: Place, routed: Place) -> float:
    """What a new flow costs, relative to one that is only routed; each at its best."""
    turns = [
        (where.new_flow(POD_ADDRESS), routed.new_flow(GUEST_ADDRESS)) for _ in range(FLOW_ROUNDS)
    ]
    return min(ours for ours, _ in turns) / min(plain for _, plain in turns)


def _prove_change(peer: Peer, where: Place, doing: Doing) -> None:
    doing.change()
    last = _last(doing)
    with _guest(where, doing):
        added = peer.no_removal or where.reached(Protocol.TCP, last + 1) == last + 1
        _demand(bool(added), f"tcp/{last + 1} is not there after the change")


def _flow_after_removal(where: Place, doing: Doing) -> str:
    """Whether a UDP flow that was open goes on when its port is closed."""
    if not doing.guest_stays:
        doing.remove()
        return "goes with the guest"
    where.run("nft", BYSTANDER)
    flow = where.opened_flow(FIRST)
    _demand(_answers(flow), "a UDP flow could not be opened")
    doing.remove()
    _demand(where.reached(Protocol.TCP, FIRST) is None, f"tcp/{FIRST} is still there when removed")
    stays = not _comes(lambda: not _answers(flow))  # who forgets flows may do it a moment later
    where.run("nft", "delete table ip bystander")
    return "stays open" if stays else "closed"


def _answers(flow: socket.socket) -> bool:
    try:
        return asks(flow) == FIRST
    except OSError:
        return False


def _shifted(where: Place, doing: Doing) -> str:
    if doing.shift is None or doing.unshift is None:
        return ""
    try:
        doing.shift()
    except Unavailable as error:
        return f"refused: {error}"
    with _guest(where, doing):
        found = [(p, where.reached(one, p)) for one in FORWARDED for p in SHIFTED]
    doing.unshift()
    right = sum(arrived == port - SHIFT for port, arrived in found)
    if right == len(found):
        return "1:1"
    arrived = {one for _, one in found}
    if len(arrived) == 1 and None not in arrived:
        return f"NO: all at {arrived.pop()}"
    return f"NO: {right} of {len(found)}"


def _flushed(where: Place, doing: Doing, rules: int) -> str:
    """What comes of a stranger's flush of all rules."""
    doing.set_up()
    with _guest(where, doing):
        _demand(_open(where, doing), "the ports are not there before the flush")
        started = time.perf_counter()
        where.flush()
        if _back(where, doing):
            taken = (time.perf_counter() - started) * 1000
            return f"repaired, {taken:.0f} ms" if rules else "no rules to lose"
        if doing.reload is None:
            return "gone"
        try:
            taken = _timed(doing.reload)
        except Unavailable:
            return "gone; reload fails"
        return f"gone; reload {taken:.0f} ms" if _back(where, doing) else "gone, also by reload"


def _open(where: Place, doing: Doing) -> bool:
    return where.reached(Protocol.TCP, _last(doing)) == _last(doing)


def _back(where: Place, doing: Doing) -> bool:
    return _comes(lambda: _open(where, doing))


def _comes(true: Callable[[], bool]) -> bool:
    try:
        until(true, REPAIR)
    except TimeoutError:
        return False
    return True


def _demand(true: bool, otherwise: str) -> None:
    if not true:
        raise Unavailable(f"it did not do the job: {otherwise}")


@contextmanager
def _served(where: Place, guest: str) -> Iterator[None]:
    ends = (FIRST, FIRST + SAMPLE - 1, FIRST + SAMPLE, LAST, LAST + 1)
    ports = (*ends, *(port - SHIFT for port in SHIFTED))
    with echoing(where.lab, guest, itertools.product(Protocol, ports)):
        yield


def _outside(where: Place, doing: Doing) -> AbstractContextManager[None]:
    """The guest's servers, where the guest is there before the peer."""
    return nullcontext() if doing.guest else _served(where, where.lab.guest)


def _guest(where: Place, doing: Doing) -> AbstractContextManager[None]:
    """The guest's servers, where the peer has just made the guest."""
    return _served(where, doing.guest()) if doing.guest else nullcontext()
