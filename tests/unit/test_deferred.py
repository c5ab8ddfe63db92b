"""What is put off until all namespaces have their rules: every part of it is done, in its order and
whatever becomes of another, it is tried until it succeeds, and how far it has come is told."""

from __future__ import annotations

import base64
import os
import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.errors import Failure, NoNamespace
from agent.kernel.deferred import MOST_TO_CLOSE, Deferred, Flush, Identity, identity_of
from agent.kernel.flush_worker import DELETE
from agent.kernel.kinds import Beat, Flushed
from agent.kernel.worker import Json
from agent.status import State
from rules.model import Chain, Family, Protocol, Rule
from rules.plan import Plan
from rules.ports import PortRange
from rules.stale import Due, Flow, Forgotten
from tests.spaces import eventually, vm
from tests.unit.test_keeper import House

A_MOMENT = 60.0  # seconds: a bound, which only a test that fails waits for
GUEST = ip_address("10.0.2.2")


def port(number: int) -> Forgotten:
    """Flows to that port."""
    ports = (PortRange(number, number),)
    return Forgotten(family=Family.IP, protocol=Protocol.TCP, ports=ports, answerer=GUEST)


def opening(number: int) -> Plan:
    """What leads that port to the guest again."""
    rule = Rule(
        chain=Chain.PREROUTING,
        family=Family.IP,
        owner="o",
        protocol=Protocol.TCP,
        ports=PortRange(number, number),
        to=GUEST,
    )
    return Plan(netns="", add=(rule,))


def flow(number: int) -> Flow:
    """That leads to that port of the guest."""
    return Flow(
        family=Family.IP,
        protocol=6,
        port=number,
        destination=ip_address("192.0.2.2"),
        answerer=GUEST,
        answering_port=number,
    )


def numbers(ports: PortRange) -> range:
    return range(ports.first, ports.last + 1)


class Walker:
    """Who would walk conntrack: takes what is due in each namespace, and answers as it is told."""

    def __init__(self) -> None:
        self.walked: list[tuple[int, list[int]]] = []  # where, and for which ports
        self.due: list[tuple[Due, ...]] = []
        self.changed: list[tuple[Due, ...] | None] = []  # what was due in the end, if it changed
        self.found: Json = {}
        self.answers: dict[int, list[Json | Failure]] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = threading.Semaphore(0)

    def ask(self, descriptor: int, question: Json) -> Json:
        where = identity_of(descriptor)[1]
        text = base64.b64decode(str(question["due"]))
        if question["step"] == DELETE:
            self.changed.append(pickle.loads(text) if text else None)  # noqa: S301 - of this test
            return self.found
        self.asked.release()
        assert self.goes_on.wait(A_MOMENT)
        due = pickle.loads(text)  # noqa: S301 - of this test
        ports = sorted(number for one in due for each in one.ports for number in numbers(each))
        self.walked.append((where, ports))
        self.due.append(due)
        answers = self.answers.get(where, [])
        done: Json = {"count": len(ports), "more": False}
        answer = answers.pop(0) if answers else done
        if isinstance(answer, Failure):
            raise answer
        self.found = answer
        return answer

    def stop(self) -> None:
        """There is no process."""


class Place:
    """Files that stand for namespaces, and somebody who walks there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.walker = Walker()
        self.deferred = Deferred(worker=self.walker)
        self.gone: set[str] = set()

    @contextmanager
    def found(self, netns: str) -> Iterator[int]:
        if netns in self.gone:
            raise NoNamespace(f"there is no network namespace {netns}")
        descriptor = os.open(self.folder / netns, os.O_RDONLY | os.O_CREAT)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def identity(self, netns: str) -> Identity:
        with self.found(netns) as descriptor:
            return identity_of(descriptor)

    def forget(self, netns: str, *ports: int, plans: Sequence[Plan] = ()) -> None:
        flush = Flush(
            netns=netns,
            identity=self.identity(netns),
            due=lambda: [port(number) for number in ports],
            plans=tuple(plans),
        )
        self.deferred.forget(flush, -1)

    def told(self) -> Flushed:
        return self.deferred.flushed(lambda: None, self.found)

    def walked(self, netns: str) -> list[list[int]]:
        inode = self.identity(netns)[1]
        return [ports for where, ports in self.walker.walked if where == inode]

    def answer(self, netns: str, *answers: Json | Failure) -> None:
        self.walker.answers[self.identity(netns)[1]] = list(answers)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.walker.goes_on.set()
    made.deferred.stop()


def test_nothing_is_forgotten_before_all_labels_have_their_rules(place: Place) -> None:
    place.forget("blue", 1)
    assert not place.walker.asked.acquire(timeout=0.05)
    place.told()
    assert place.deferred.wait(A_MOMENT)
    assert place.walked("blue") == [[1]]


def test_who_repairs_does_not_wait_for_flows(place: Place) -> None:
    place.walker.goes_on.clear()
    place.forget("blue", 1)
    assert place.told() == Flushed(asked=1, done=0, open=frozenset({"blue"}))
    assert place.walker.asked.acquire(timeout=A_MOMENT)
    place.forget("red", 2)
    assert place.told() == Flushed(asked=2, done=0, open=frozenset({"blue", "red"}))
    place.walker.goes_on.set()
    assert place.deferred.wait(A_MOMENT)
    assert place.told() == Flushed(asked=2, done=2, count=2)


def test_what_fails_is_tried_again_until_it_succeeds_and_others_do_not_wait_for_it(
    place: Place,
) -> None:
    place.answer("blue", Failure("no"), {"error": "OSError", "text": "not now"})
    place.forget("blue", 1)
    place.forget("red", 2)
    place.told()
    assert eventually(lambda: place.walked("red") == [[2]])
    assert eventually(lambda: place.told().waiting == {"blue": "not now"})
    told = place.told()
    assert (told.asked, told.done) == (2, 0), "the first is not done"
    assert eventually(lambda: len(place.walked("blue")) == 3)
    assert place.deferred.wait(A_MOMENT)
    assert place.told().waiting == {}
    assert place.told().done == 2
    assert place.walked("red") == [[2]]


def test_a_later_commit_waits_for_an_earlier_one_of_its_namespace(place: Place) -> None:
    place.answer("blue", Failure("no"))
    place.forget("blue", 1)
    place.told()
    assert eventually(lambda: place.told().waiting == {"blue": "no"})
    place.forget("blue", 2)
    place.told()
    assert place.deferred.wait(A_MOMENT) or eventually(lambda: not place.told().waiting)
    assert place.walked("blue") == [[1], [1, 2]]


def test_what_a_later_commit_leads_there_again_is_left_alone(place: Place) -> None:
    """While it could not be forgotten: it may be a new flow by now."""
    place.answer("blue", Failure("no"))
    place.forget("blue", 1, 2)
    place.told()
    assert eventually(lambda: place.told().waiting == {"blue": "no"})
    place.forget("blue", 3, plans=[opening(2)])
    place.told()
    assert eventually(lambda: place.told().done == 2)
    due = place.walker.due[-1]
    assert [any(one.holds(flow(number), set()) for one in due) for number in (1, 2, 3)] == [
        True,
        False,
        True,
    ]


def test_what_a_commit_leads_there_while_flows_are_looked_for_is_left_alone(place: Place) -> None:
    """Also if the commit then fails: what it did not lead is forgotten in another pass."""
    place.walker.goes_on.clear()
    place.forget("blue", 1, 2)
    place.told()
    assert place.walker.asked.acquire(timeout=A_MOMENT)
    place.deferred.announce("blue", place.identity("blue"), opening(2))
    place.walker.goes_on.set()
    assert eventually(lambda: len(place.walker.changed) == 1)
    (due,) = place.walker.changed
    assert due is not None
    assert [any(one.holds(flow(number), set()) for one in due) for number in (1, 2)] == [
        True,
        False,
    ]
    assert not place.walker.asked.acquire(timeout=0.05), "the commit is not over"
    assert place.told().done == 0
    place.deferred.conclude("blue", place.identity("blue"))
    assert place.deferred.wait(A_MOMENT)
    assert place.walked("blue") == [[1, 2], [1, 2]]
    assert place.walker.changed[1] is None


def test_whoever_has_many_flows_keeps_no_other_namespace_waiting(place: Place) -> None:
    more: Json = {"count": 10, "more": True}
    place.answer("blue", more, more, more)
    place.walker.goes_on.clear()
    place.forget("blue", 1)
    place.told()
    assert place.walker.asked.acquire(timeout=A_MOMENT)
    place.forget("red", 2)
    place.told()
    place.walker.goes_on.set()
    assert place.deferred.wait(A_MOMENT)
    inodes = [place.identity(name)[1] for name in ("blue", "red")]
    assert [inodes.index(where) for where, _ in place.walker.walked] == [0, 1, 0, 0, 0]
    assert place.told().count == 32


@pytest.mark.parametrize("how", ["no namespace has the name", "another namespace has the name"])
def test_nothing_is_kept_for_a_namespace_that_is_gone(place: Place, how: str) -> None:
    place.answer("blue", *[Failure("no")] * 100)
    place.forget("blue", 1)
    place.told()
    assert eventually(lambda: place.told().waiting == {"blue": "no"})
    if how == "no namespace has the name":
        place.gone.add("blue")
    else:
        (place.folder / "blue").rename(place.folder / "old")
    assert eventually(lambda: place.told().done == 1)
    assert place.told().waiting == {}


def test_nothing_is_left_to_forget_where_there_is_no_flow(place: Place) -> None:
    place.answer("blue", *[Failure("no")] * 100)
    place.forget("blue", 1)
    place.told()
    assert eventually(lambda: place.told().waiting == {"blue": "no"})
    place.deferred.idle("blue", place.identity("blue"))
    assert place.told() == Flushed(asked=1, done=1)


def test_what_comes_after_there_was_no_flow_is_forgotten_as_well(place: Place) -> None:
    """Also where a pass for what was due before is still under way."""
    place.walker.goes_on.clear()
    place.forget("blue", 1)
    place.told()
    assert place.walker.asked.acquire(timeout=A_MOMENT)
    place.deferred.idle("blue", place.identity("blue"))
    place.forget("blue", 2)
    place.told()
    place.walker.goes_on.set()
    assert place.deferred.wait(A_MOMENT)
    assert place.walked("blue") == [[1], [2]]


def test_no_thread_to_be_had_is_told_and_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    place.forget("blue", 1)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        assert place.told().failures == ("cannot forget flows: can't start new thread",)
    assert place.told() == Flushed(asked=1, done=0, open=frozenset({"blue"}))
    assert place.deferred.wait(A_MOMENT)
    assert place.walked("blue") == [[1]]


def test_a_bug_met_in_one_namespace_does_not_keep_the_others_from_being_done(place: Place) -> None:
    def due() -> list[Due]:
        raise RuntimeError("a bug")

    place.forget("blue", 1)
    place.deferred.forget(Flush(netns="x", identity=place.identity("x"), due=due), -1)
    place.forget("red", 2)
    (why,) = place.told().failures
    assert why == "cannot forget flows in namespace x: unexpected RuntimeError: a bug"
    assert place.deferred.wait(A_MOMENT)
    assert [ports for _, ports in place.walker.walked] == [[1], [2]]
    assert place.told().failures == ()


def test_a_sign_of_life_is_given_before_each(place: Place) -> None:
    beats: list[None] = []
    place.forget("blue", 1)
    place.forget("red", 1)
    place.deferred.flushed(lambda: beats.append(None), place.found)
    assert len(beats) == 2


def test_who_is_stopped_waits_for_what_can_be_done_and_not_for_what_fails(place: Place) -> None:
    place.answer("red", *[Failure("no")] * 100)
    place.forget("red", 2)
    place.forget("blue", 1)
    place.told()
    assert not place.deferred.stop()
    assert place.walked("blue") == [[1]]


# ------------------------------------------------------------------------------ what is told of it


def test_flows_that_are_not_flushed_yet_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House("blue")
    latest = Flushed(count=7, asked=3, done=1, waiting={"blue": "not permitted"})

    def afterwards(beat: Beat) -> Flushed:
        beat()
        return latest

    monkeypatch.setattr(house.kernel, "afterwards", afterwards)
    fed: list[None] = []
    house.keeper.want([vm("a", "22", netns="blue")])
    house.keeper.work(lambda: fed.append(None), lambda: False)
    assert len(fed) == 2, "for the namespace, and for its flows"
    assert house.metric("portranger_conntrack_forgotten_total") == 7
    assert house.metric("portranger_conntrack_unflushed") == 1
    assert (house.keeper.flushing.asked, house.keeper.flushing.done) == (3, 1)
    (standing,) = house.keeper.standings
    assert standing.state is State.IN_SYNC
    assert "flows not flushed yet: not permitted" in standing.notes
    assert 'event="flows not flushed yet" netns=blue' in house.written.getvalue()
    assert house.keeper.news()
    latest = Flushed(asked=3, done=3)
    house.work()
    assert house.keeper.news()
    (standing,) = house.keeper.standings
    assert not standing.notes
    assert house.metric("portranger_conntrack_unflushed") == 0
    assert 'event="flows flushed" netns=blue' in house.written.getvalue()


def test_what_cannot_be_closed_keeps_nothing_else_open() -> None:
    """However many they are: nobody ever waits for a thread that has ended."""
    closed: queue.Queue[int] = queue.Queue()

    def refuse() -> None:
        raise OSError("no")

    deferred = Deferred()
    for number in range(2 * MOST_TO_CLOSE):
        deferred.close(refuse)
        deferred.close(lambda number=number: closed.put(number))  # type: ignore[misc]  # of a loop
        assert closed.get(timeout=A_MOMENT) == number
