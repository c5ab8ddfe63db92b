"""The keeper: which namespaces it looks at, when, and how each stands; in a kernel in memory, with
a clock that moves when told."""

from __future__ import annotations

import io
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent import keeper as keeping
from agent import publisher as publishing
from agent.backoff import FAILURES, REPAIRS
from agent.errors import Failure, NoNamespace, NotPermitted
from agent.keeper import (
    LONGEST_REST,
    NO_LAWS,
    NODE_REPORT,
    NODE_WAIT,
    REPORT,
    TIMED_LOOK,
    Keeper,
)
from agent.kept import LOOKS
from agent.kernel.kinds import Generation, Glimpse, Known
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from agent.log import Log
from agent.metrics import Metrics
from agent.publisher import Publisher
from agent.reconcile import FENCES_STAY, UNLAWFUL
from agent.sources.boundary import sound
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from agent.status import Standing, State, Status
from agent.workqueue import Inline, Work, thread_name
from rules.fences import Laws, fenced
from rules.model import NODE, POLICED, Chain, Foreign, Machine, Observed, Rule, Surroundings
from rules.node_ports import Bands
from rules.plan import Plan
from rules.ports import PortRange
from rules.publish import Publishing
from rules.services import Pod
from rules.values import replace
from tests.unit.samples import BRIDGE, LO, POD, forward, link, machine, space
from tests.unit.test_policies import policy
from tests.unit.test_publish import service

STRANGER = Foreign("prerouting", 0, "accept")
NFT = ("nft", 4711)
A_MOMENT = 60.0  # seconds: a bound, which only a test that fails waits for


class Numbered(MemoryNamespace):
    """A namespace whose rules have generations, as nftables' have."""

    def __init__(self) -> None:
        super().__init__(POD)
        self.made = 1

    @property
    def generation(self) -> Generation | None:
        return Generation(7, self.made)

    def commit(self, plan: Plan) -> None:
        super().commit(plan)
        self.made += 1

    def stir(self, change: Callable[[Numbered], None]) -> None:
        """What a stranger does."""
        change(self)
        self.made += 1


class Watched(MemoryKernel):
    """A kernel that counts how often a namespace was opened, and can refuse to open it."""

    def __init__(self, spaces: dict[str, MemoryNamespace]) -> None:
        super().__init__(spaces)
        self.opens: list[str] = []
        self.glimpses = 0
        self.refused: dict[str, Exception] = {}

    @contextmanager
    def opened(self, netns: str, known: Known | None = None) -> Iterator[MemoryNamespace]:
        self.opens.append(netns)
        if netns in self.refused:
            raise self.refused[netns]
        with super().opened(netns, known) as one:
            yield one

    def glimpse(self, netns: str, before: Glimpse) -> Glimpse:
        self.glimpses += 1
        with super().opened(netns) as one:
            return Glimpse(
                identity=one.identity,
                generation=one.generation,
                surroundings=one.surroundings(),
                sysctls=one.observe(before.sysctls).sysctls,
            )


class House:
    """A keeper, and all that it deals with."""

    def __init__(self, *names: str, store: Store | None = None) -> None:
        self.kernel = Watched({name: Numbered() for name in names})
        self.now, self.date = 1000.0, 1e9
        self.written = io.StringIO()
        self.metrics = Metrics(lambda: Status(version="", pid=0, started=0.0), lambda _: {})
        how = Publishing(), Bands(PortRange(30000, 32767))
        self.publisher = Publisher(store, self.metrics, *how) if store else None
        self.unheard: Exception | None = None  # what telling anybody comes to
        self.keeper = Keeper(
            self.kernel,
            Log(self.written, clock=lambda: self.date),
            self.metrics,
            publisher=self.publisher,
            clock=lambda: self.now,
            calendar=lambda: self.date,
            tell=self.told,
        )

    def told(self, *_: object) -> None:
        if self.unheard is not None:
            raise self.unheard

    def __getitem__(self, netns: str) -> Numbered:
        one = self.kernel.spaces[netns]
        assert isinstance(one, Numbered)
        return one

    def want(
        self, *machines: Machine, unclaimed_stay: bool = False, laws: Laws | None = NO_LAWS
    ) -> None:
        self.keeper.want(machines, unclaimed_stay=unclaimed_stay, laws=laws)
        self.work()

    def work(self) -> list[str]:
        """Do what is due; which namespaces that were."""
        self.kernel.opens.clear()
        self.keeper.work(lambda: None, lambda: False)
        return list(self.kernel.opens)

    def stirred(self, netns: str, change: Callable[[Numbered], None]) -> None:
        """A stranger does something, and the kernel tells of it."""
        self[netns].stir(change)
        self.keeper.moved(self[netns].nsid, self[netns].made, NFT)

    def standing(self, netns: str) -> Standing:
        (found,) = (one for one in self.keeper.standings if one.netns == netns)
        return found

    def ports(self, netns: str) -> set[str]:
        return {str(live.rule.ports) for live in self[netns].held.live if live.rule.ports}

    def filters(self, netns: str) -> list[Rule]:
        rules = (live.rule for live in self[netns].held.live)
        return [rule for rule in rules if rule.chain in POLICED]

    def members(self, netns: str) -> list[str]:
        """Of all sets there."""
        return sorted(str(one) for some in self[netns].held.sets.values() for one in some)

    def metric(self, name: str) -> float:
        line = next(
            line for line in self.metrics.text().decode().splitlines() if line.startswith(name)
        )
        return float(line.split()[-1])


def vm(*claims: str, netns: str = "blue", name: str = "") -> Machine:
    return machine(*(claims or ("tcp 22",)), netns=netns, name=name or f"in-{netns}")


def scribble(one: Numbered) -> None:
    one.insert(STRANGER)


def flush(one: Numbered) -> None:
    one.held = Observed()


# ------------------------------------------------------------------------- what is wanted


def test_what_is_wanted_is_made_once() -> None:
    house = House("blue", "red")
    house.want(vm(), vm(netns="red"))
    assert house.standing("blue").state is State.IN_SYNC
    assert house.ports("blue") == house.ports("red") == {"22"}
    assert house.keeper.due == math.inf
    assert house.work() == []
    house.want(vm(), vm(netns="red"))
    assert house.kernel.opens == []
    assert house.metric("portranger_commits_total") == 2


def test_only_the_namespace_of_what_changed_is_opened() -> None:
    house = House("blue", "red")
    house.want(vm(), vm(netns="red"))
    house.want(vm("tcp 23"), vm(netns="red"))
    assert house.kernel.opens == ["blue"]
    assert house.ports("blue") == {"23"}
    change = house.standing("blue").change
    assert change is not None
    assert change.what == "3 added, 3 removed"


def test_what_is_wanted_no_more_is_cleared_and_forgotten() -> None:
    house = House("blue", "red")
    house.want(vm(), vm(netns="red"))
    house.want(vm())
    assert not house["red"].held.table
    assert [one.netns for one in house.keeper.standings] == ["blue"]
    assert house.keeper.leaving == frozenset()


def test_what_an_earlier_run_left_is_cleared() -> None:
    house = House("blue", "red")
    house["red"].insert(forward())
    house["red"].held = replace(house["red"].held, table=True)
    house.keeper.leave(["red", "gone"])
    assert house.keeper.leaving == {"red", "gone"}
    house.want(vm())
    assert not house["red"].held.table
    assert house.keeper.leaving == frozenset()


def test_what_cannot_be_cleared_is_tried_again() -> None:
    house = House("blue")
    house.want(vm())
    house.kernel.refused["blue"] = Failure("no")
    house.want()
    assert house.keeper.leaving == {"blue"}
    assert house.standing("blue").state is State.PENDING
    assert "cannot be cleared yet: no" in house.standing("blue").why
    house.kernel.refused.clear()
    house.now = house.keeper.due
    house.work()
    assert house.keeper.leaving == frozenset()
    assert not house["blue"].held.table


def test_what_may_not_be_entered_is_not_waited_for_when_nobody_wants_it() -> None:
    house = House("blue")
    house.kernel.refused["blue"] = NotPermitted("no")
    house.want(vm())
    assert house.standing("blue").state is State.FAILING
    house.want()
    assert house.keeper.leaving == frozenset()
    assert "not cleared" in house.written.getvalue()


def fight(house: House) -> None:
    """Until the next repair has to wait."""
    for _ in range(20):
        house["blue"].stir(lambda one: one.insert(STRANGER))
        house.keeper.moved(house["blue"].nsid, house["blue"].made, NFT)
        if not house.work():
            return
    raise AssertionError("it never backs off")


def test_who_waits_with_a_repair_says_that_it_is_not_in_sync() -> None:
    house = House("blue")
    house.want(vm())
    fight(house)
    assert house.standing("blue").state is State.FAILING
    assert "nft (pid 4711) keeps changing our rules" in house.standing("blue").why
    house.now = house.keeper.due
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_new_links_do_not_wait_for_a_repair() -> None:
    house = House("blue")
    house.want(vm())
    fight(house)
    house.keeper.relinked(house["blue"].nsid)
    assert house.work() == ["blue"]


def test_another_namespace_of_the_name_starts_without_the_quarrels_of_the_first() -> None:
    house = House("blue")
    house.want(vm())
    fight(house)
    house.kernel.spaces["blue"] = Numbered()
    house.keeper.arrived()
    house.work()
    standing = house.standing("blue")
    assert (standing.state, standing.drifts) == (State.IN_SYNC, 0)
    house["blue"].stir(lambda one: one.insert(STRANGER))
    house.keeper.moved(house["blue"].nsid, house["blue"].made, NFT)
    assert house.work() == ["blue"]


def test_moving_to_another_backend_is_nobodys_drift() -> None:
    house = House("blue")
    house.want(vm())
    house["blue"].held = Observed()
    house.keeper.use(house.kernel)
    house.keeper.renew()
    house.work()
    assert house.standing("blue").drifts == 0
    assert house["blue"].held.table


def test_those_to_be_cleared_come_last() -> None:
    """The machine has another name of its namespace now: it must not be without rules between."""
    house = House("z")
    house.want(vm(netns="z"))
    house.kernel.spaces["zz"] = house["z"]
    before = house["z"].held
    house.want(vm(netns="zz", name="in-z"))
    assert house.kernel.opens == ["zz", "z"]
    assert house["z"].held == before


# ------------------------------------------------------------------------- looks that take long


class Blocked(Inline):
    """Some namespaces keep us waiting until they are let go."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.held: list[Work[Any]] = []
        self.holds: set[str] = set()
        self._house = house
        house.keeper._workqueue = self

    def start(self, task: Callable[[], Any]) -> Work[Any] | None:
        kept = getattr(task, "args", [None])[0]
        if getattr(kept, "netns", "") not in self.holds:
            return super().start(task)
        self.held.append(Work(task))
        return self.held[-1]

    def let_go(self, *, took: float = 1.0) -> None:
        self.holds.clear()
        self._house.now += took
        for work in self.held:
            work.run()
        self.held.clear()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    """In which blue and red have their rules."""
    monkeypatch.setattr(keeping, "BUDGET", 0.0)
    made = House("blue", "red")
    made.want(vm(), vm(netns="red"))
    return made


def test_a_look_that_takes_long_keeps_no_other_waiting_and_is_begun_once(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm("tcp 24", netns="red"))
    assert house.ports("red") == {"24"}
    house.keeper.renew()
    assert house.work() == ["red"]
    assert len(blocked.held) == 1
    blocked.let_go()
    house.work()
    assert house.ports("blue") == {"23"}


def test_a_look_that_is_not_done_is_reported_as_failing_until_it_is(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    assert house.standing("blue").state is State.IN_SYNC
    assert house.keeper.due == house.now + REPORT
    house.now += REPORT
    house.work()
    assert house.standing("blue").state is State.FAILING
    assert "not done after 10 s" in house.standing("blue").why
    assert house.keeper.due == math.inf
    blocked.let_go()
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_what_is_wanted_while_a_look_takes_long_is_made_after_it(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    house.want(vm("tcp 24"), vm(netns="red"))
    blocked.let_go()
    house.work()
    house.work()
    assert house.ports("blue") == {"24"}
    assert house.standing("blue").state is State.IN_SYNC


def test_the_event_of_our_own_commit_is_none_while_the_look_is_not_done(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    blocked.let_go()
    house.keeper.moved(house["blue"].nsid, house["blue"].made, (thread_name(), os.getpid()))
    house.work()
    assert house.ports("blue") == {"23"}
    house.now += LONGEST_REST
    assert house.work() == []


def test_what_others_commit_while_a_look_takes_long_is_looked_at_after_it(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    blocked.let_go()
    house.stirred("blue", flush)
    house.work()
    house.now += LONGEST_REST
    house.work()
    assert house.ports("blue") == {"23"}
    assert house.standing("blue").drifts == 1


def test_what_is_wanted_no_more_while_a_look_takes_long_is_cleared_after_it(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    house.want(vm(netns="red"))
    assert house.keeper.leaving == {"blue"}
    blocked.let_go()
    house.work()
    house.work()
    assert not house["blue"].held.table
    assert house.keeper.leaving == frozenset()


def test_what_a_look_finds_of_a_namespace_that_went_meanwhile_is_not_taken(house: House) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    old, house.kernel.spaces["blue"] = house["blue"], Numbered()
    house.keeper.gone(old.nsid)
    house.keeper.arrived()
    house.kernel.spaces["blue"], new = old, house["blue"]
    blocked.let_go()
    house.kernel.spaces["blue"] = new
    house.work()
    assert house.ports("blue") == {"23"}
    assert house.standing("blue").drifts == 0


def test_a_namespace_whose_looks_take_long_rests_as_long_and_is_not_waited_for(
    house: House,
) -> None:
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(vm("tcp 23"), vm(netns="red"))
    blocked.let_go(took=7.0)
    house.work()
    house.stirred("blue", flush)
    assert house.keeper.due == house.now + 7.0
    house.now += 7.0
    assert house.work() == ["blue"]
    assert house.ports("blue") == {"23"}


@pytest.mark.parametrize("served", [True, False])
def test_a_look_in_the_middle_of_news_takes_no_half_of_them(
    house: House, monkeypatch: pytest.MonkeyPatch, *, served: bool
) -> None:
    """Machines whose laws are not known are not taken for machines that no law is for."""
    house["blue"].links = at("10.1.0.1")
    house.want(*([shop()] if served else []), laws=LAWS)
    assert bool(house.filters("blue")) is served
    blocked = Blocked(house)
    blocked.holds = {"blue"}
    house.want(shop("tcp 23"), laws=LAWS)
    (look,) = blocked.held
    thread = threading.Thread(target=look.run)
    place = house.keeper._place

    def placed(wanted: Mapping[str, list[Machine]]) -> None:
        place(wanted)
        thread.start()
        look.wait(0.1)  # it is to be done only when all is known

    monkeypatch.setattr(house.keeper, "_place", placed)
    house.keeper.want([shop("tcp 24")], laws=None)
    thread.join(A_MOMENT)
    assert look.done
    assert bool(house.filters("blue")) is served
    assert ("24" in house.ports("blue")) is served


def test_where_too_many_keep_us_waiting_it_is_tried_again(house: House) -> None:
    blocked = Blocked(house)
    blocked.start = lambda _: None  # type: ignore[method-assign,assignment]
    house.want(vm("tcp 23"), vm(netns="red"))
    assert house.standing("blue").state is State.FAILING
    assert "too many namespaces" in house.standing("blue").why
    assert house.keeper.due > house.now


# ------------------------------------------------------------------------- what nobody may claim


def stranded(house: House, netns: str) -> None:
    """A rule of ours whose owner nobody knows."""
    rule = forward("tcp 99", owner="VirtualMachine/default/lost/default")
    house[netns].insert(rule)
    house[netns].held = replace(
        house[netns].held, table=True, chains=house[netns].held.chains | {rule.chain}
    )


def test_what_nobody_claims_stays_while_there_are_files_we_cannot_read() -> None:
    house = House("blue", "red")
    for netns in ("blue", "red"):
        stranded(house, netns)
    house.keeper.leave(["red"])
    house.want(vm(), unclaimed_stay=True)
    assert house.ports("blue") == {"22", "99"}
    assert house.ports("red") == {"99"}
    house.want(vm())
    assert house.ports("blue") == {"22"}
    assert house.ports("red") == set()


def test_a_bug_met_while_unmanaged_rules_are_looked_for_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names() -> list[str]:
        raise PermissionError("no")

    house = House("blue")
    monkeypatch.setattr(house.kernel, "names", names)
    house.keeper.want([vm()], unclaimed_stay=True, unknown=["bad.yaml"])
    house.work()
    assert house.ports("blue") == {"22"}
    assert "PermissionError: no" in house.written.getvalue()
    assert house.keeper.due > house.now


def test_what_we_know_to_be_given_up_goes_whatever_else_cannot_be_read() -> None:
    house = House("blue", "red")
    house.want(vm(name="one"), vm("tcp 23", name="two"), vm(netns="red"))
    house.want(vm(name="one"), unclaimed_stay=True)
    assert house.ports("blue") == {"22"}
    assert not house["red"].held.table
    assert [one.netns for one in house.keeper.standings] == ["blue"]


def test_what_we_made_ourselves_meanwhile_goes_too() -> None:
    house = House("blue")
    house.want(unclaimed_stay=True)
    house.want(vm(), unclaimed_stay=True)
    house.want(unclaimed_stay=True)
    assert not house["blue"].held.table


def test_a_namespace_that_is_another_by_now_is_not_known() -> None:
    house = House("blue")
    house.want(vm())
    house.kernel.spaces["blue"] = Numbered()
    stranded(house, "blue")
    house.keeper.arrived()
    house.want(vm(), unclaimed_stay=True)
    assert house.ports("blue") == {"22", "99"}


# -------------------------------------------------------------------------------- they come and go


def test_a_namespace_that_is_not_there_is_waited_for() -> None:
    house = House()
    house.want(vm())
    assert house.standing("blue").state is State.PENDING
    assert house.keeper.due == math.inf
    assert house.keeper.tried
    house.kernel.spaces["blue"] = Numbered()
    house.keeper.arrived()
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_an_arrival_elsewhere_is_no_reason_to_look() -> None:
    house = House("blue")
    house.want(vm(), vm(netns="red"))
    house.kernel.spaces["green"] = Numbered()
    house.keeper.arrived()
    assert house.work() == []


def test_what_no_event_tells_of_is_asked_for_now_and_then() -> None:
    netns = "/run/x/ns"
    house = House()
    house.want(vm(netns=netns))
    assert house.keeper.due == house.now + TIMED_LOOK
    house.now += TIMED_LOOK
    assert house.work() == [netns]


@pytest.mark.parametrize("how", ["arrived", "gone"])
def test_a_namespace_under_an_old_name_is_a_new_one(how: str) -> None:
    house = House("blue")
    house.want(vm())
    old = house["blue"].nsid
    house.kernel.spaces["blue"] = Numbered()
    if how == "arrived":
        house.keeper.arrived()
    else:
        house.keeper.gone(old)
    house.work()
    assert house.ports("blue") == {"22"}
    assert house.standing("blue").drift is None, "nobody broke anything"


def test_a_namespace_that_goes_is_forgotten_until_it_is_back() -> None:
    house = House("blue")
    house.want(vm())
    gone = house.kernel.spaces.pop("blue")
    house.keeper.arrived()
    house.work()
    standing = house.standing("blue")
    assert standing.state is State.PENDING
    assert standing.live == ()
    assert standing.identity is None
    house.kernel.spaces["blue"] = gone  # of the very same number
    house.keeper.arrived()
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_one_that_vanished_while_we_looked_may_come_back_with_its_old_number() -> None:
    house = House("blue")
    house.kernel.refused["blue"] = NoNamespace("it has just gone")
    house.want(vm())
    assert house.standing("blue").state is State.PENDING
    house.kernel.refused.clear()
    house.keeper.arrived()
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_links_that_change_are_looked_at() -> None:
    house = House("blue")
    house["blue"].links = space()
    house.want(vm())
    assert house.standing("blue").state is State.PENDING
    assert "yet" in house.standing("blue").why
    house["blue"].links = POD
    house.keeper.relinked(house["blue"].nsid)
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


def test_two_names_of_one_namespace_are_told_and_the_first_goes_on() -> None:
    house = House("blue")
    house.kernel.spaces["red"] = house["blue"]
    house.want(vm(), vm("tcp 80", netns="red"))
    assert house.standing("blue").state is State.IN_SYNC
    assert house.standing("red").state is State.FAILING
    assert "one and the same" in house.standing("red").why
    assert house.ports("blue") == {"22"}
    house.kernel.spaces["red"] = Numbered()
    house.keeper.arrived()
    house.work()
    assert house.standing("red").state is State.IN_SYNC
    assert house.ports("red") == {"80"}


# ------------------------------------------------------------------------------------------ drift


@pytest.mark.parametrize("change", [scribble, flush])
def test_drift_is_repaired_and_told_with_who_did_it(change: Callable[[Numbered], None]) -> None:
    house = House("blue", "red")
    house.want(vm(), vm(netns="red"))
    rules = {live.rule for live in house["blue"].held.live}
    house.stirred("blue", change)
    assert house.keeper.due <= house.now
    assert house.work() == ["blue"]
    assert {live.rule for live in house["blue"].held.live} == rules
    drift = house.standing("blue").drift
    assert drift is not None
    assert (drift.process, drift.pid) == NFT
    assert drift.changes >= 1
    assert house.metric('portranger_drift_repaired_total{process="nft"}') == 1
    assert house.standing("red").drift is None


def test_of_what_we_know_already_nothing_is_made() -> None:
    house = House("blue")
    house.want(vm())
    for generation in range(1, house["blue"].made + 1):
        house.keeper.moved(house["blue"].nsid, generation, NFT)
    assert house.keeper.due == math.inf
    house.keeper.moved("another number", house["blue"].made + 1, NFT)
    assert house.keeper.due == math.inf


def test_generations_that_begin_again_are_newer_all_the_same() -> None:
    house = House("blue")
    house["blue"].made = 2**32 - 2
    house.want(vm())
    assert house["blue"].made == 2**32 - 1
    house.keeper.moved(house["blue"].nsid, 2**32 - 1, NFT)
    assert house.keeper.due == math.inf
    house.keeper.moved(house["blue"].nsid, 1, NFT)
    assert house.keeper.due <= house.now


def test_a_glimpse_spares_the_look_where_only_others_moved_and_are_back() -> None:
    house = House("blue")
    house.want(vm())
    house.keeper.look_at_all()
    assert house.work() == []
    assert house.kernel.glimpses == 1
    house["blue"].stir(lambda _: None)
    house.keeper.look_at_all()
    assert house.work() == ["blue"]
    assert house.standing("blue").drift is None


def test_a_setting_that_somebody_changed_is_found_by_a_glimpse() -> None:
    house = House("blue")
    house.want(vm())
    house["blue"].settings["net.ipv4.ip_forward"] = "0"
    house.keeper.look_at_all()
    house.work()
    assert house["blue"].settings["net.ipv4.ip_forward"] == "1"
    assert house.standing("blue").drift is not None


def test_where_there_are_no_generations_the_rules_themselves_are_looked_at_by_timer() -> None:
    house = House()
    plain = MemoryNamespace(POD)
    house.kernel.spaces["blue"] = plain
    house.want(vm())
    assert house.keeper.due == house.now + TIMED_LOOK
    plain.held = Observed()
    house.now += TIMED_LOOK
    assert house.work() == ["blue"]
    assert plain.held.table
    assert house.standing("blue").drifts == 1


def test_our_own_pid_is_no_culprit() -> None:
    """Another thread of ours, or a stale event: then nobody is named rather than ourselves."""
    house = House("blue")
    house.want(vm())
    house["blue"].stir(flush)
    house.keeper.moved(house["blue"].nsid, house["blue"].made, (thread_name(), os.getpid()))
    house.work()
    drift = house.standing("blue").drift
    assert drift is not None
    assert (drift.process, drift.pid) == ("", 0)


def test_what_is_repaired_later_is_not_applied() -> None:
    house = House("blue")
    house.want(vm())
    for _ in range(REPAIRS.free + 1):
        house.stirred("blue", flush)
        house.work()
        assert house.keeper.unapplied == {}
    house.stirred("blue", flush)
    house.work()
    assert not house.ports("blue")
    assert "keeps changing our rules" in house.keeper.unapplied["blue"]


def test_who_fights_us_waits_longer_and_longer() -> None:
    house = House("blue")
    house.want(vm())
    waits = []
    for _ in range(REPAIRS.free + 12):
        house.stirred("blue", flush)
        waits.append(max(0.0, house.keeper.due - house.now))
        house.now = max(house.now, house.keeper.due)
        assert house.work() == ["blue"]
        assert house.ports("blue") == {"22"}
    assert waits[: REPAIRS.free] == [0.0] * REPAIRS.free
    assert max(waits) == REPAIRS.longest
    assert waits == sorted(waits)


def test_a_change_of_ours_does_not_wait_for_who_fights_us() -> None:
    house = House("blue")
    house.want(vm())
    for _ in range(REPAIRS.free + 8):
        house.stirred("blue", flush)
        house.now = max(house.now, house.keeper.due)
        house.work()
    house.stirred("blue", flush)
    assert house.keeper.due > house.now
    house.want(vm("tcp 23"))
    assert house.ports("blue") == {"23"}


def test_others_who_commit_all_the_time_are_not_looked_at_all_the_time() -> None:
    house = House("blue")
    house.want(vm())
    looks = 0
    for _ in range(10_000):
        house.now += 0.001
        house.stirred("blue", lambda _: None)
        looks += len(house.work())
    assert LOOKS.free < looks < LOOKS.free + 30
    assert house.standing("blue").drift is None


def test_only_so_many_culprits_are_remembered() -> None:
    house = House("blue")
    house.want(vm())
    house["blue"].stir(flush)
    for pid in range(100_000):
        house.keeper.moved(house["blue"].nsid, house["blue"].made + pid, ("nft", 1_000_000 + pid))
    house.now += LOOKS.longest
    house.work()
    drift = house.standing("blue").drift
    assert drift is not None
    assert drift.pid == 1_099_999


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotPermitted("may not", "Run as root"), "may not. Run as root."),
        (Failure("cannot"), "cannot."),
        (ZeroDivisionError("a bug"), "unexpected ZeroDivisionError: a bug."),
    ],
)
def test_one_that_fails_waits_by_itself_and_keeps_no_other_waiting(
    error: Exception, why: str
) -> None:
    house = House("blue", "red")
    house.kernel.refused["blue"] = error
    house.want(vm(), vm(netns="red"))
    assert house.standing("red").state is State.IN_SYNC
    standing = house.standing("blue")
    assert (standing.state, standing.why) == (State.FAILING, why)
    waits = []
    for _ in range(12):
        waits.append(house.keeper.due - house.now)
        house.now = house.keeper.due
        assert house.work() == ["blue"]
    assert waits[0] == pytest.approx(FAILURES.first)
    assert max(waits) == FAILURES.longest
    assert house.written.getvalue().count("event=failing") == 1
    assert house.metric("portranger_failures_total") == 13
    house.kernel.refused.clear()
    house.now = house.keeper.due
    house.work()
    assert house.standing("blue").state is State.IN_SYNC
    assert house.keeper.due == math.inf


def test_a_bug_met_after_all_was_done_is_a_failure_of_that_namespace() -> None:
    house = House("blue")
    house.unheard = ZeroDivisionError("a bug")
    house.want(vm())
    standing = house.standing("blue")
    assert (standing.state, standing.why) == (
        State.FAILING,
        "unexpected ZeroDivisionError: a bug.",
    )
    house.unheard, house.now = None, house.keeper.due
    house.work()
    assert house.standing("blue").state is State.IN_SYNC


@pytest.mark.parametrize("stage", ["select", "faces"], ids=["what is behind it", "its rules"])
def test_a_service_that_meets_a_bug_is_left_as_it_is_and_the_others_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    house = House(NODE, "blue", store=Store(str(tmp_path), print))
    assert house.publisher
    old = service("web tcp 80@30080", name="boom", selector=(("app", "web"),))
    behind = replace(
        vm("tcp 80", "tcp 81"),
        namespace="shop",
        labels=(("app", "web"),),
        addresses=(ip_address("10.9.0.1"),),
    )
    house.publisher.want(Meaning(services=(old,)))
    house.want(behind)
    assert house.ports(NODE) == {"30080"}
    real = getattr(publishing, stage)

    def met(given: Any, *words: Any, **more: Any) -> Any:
        if any("boom" in str(getattr(one, "service", one)) for one in given):
            raise ZeroDivisionError("a bug")
        return real(given, *words, **more)

    monkeypatch.setattr(publishing, stage, met)
    others = [
        service(f"web tcp 81@{port}", name=f"s{port}", selector=(("app", "web"),))
        for port in range(30090, 30095)
    ]
    house.publisher.want(Meaning(services=(*others[:3], replace(old, affinity=60), *others[3:])))
    house.want(behind)
    assert house.ports(NODE) == {"30080", *map(str, range(30090, 30095))}
    found = house.standing(NODE)
    assert found.state is State.CONFLICT
    assert found.why == (
        "Service/shop/boom/web: it cannot be published because of a bug in portranger "
        "(unexpected ZeroDivisionError: a bug)"
    )
    monkeypatch.setattr(publishing, stage, real)
    house.publisher.want(Meaning(services=tuple(others)))
    house.want(behind)
    assert house.ports(NODE) == set(map(str, range(30090, 30095)))
    assert house.standing(NODE).state is State.IN_SYNC


def test_two_services_that_only_together_meet_a_bug_cost_the_second_of_them() -> None:
    def together(things: Sequence[int]) -> list[int]:
        if {2, 5} <= set(things) or 7 in things:
            raise ZeroDivisionError("a bug")
        return list(things)

    found, faults = sound(range(10), together)
    assert found == [0, 1, 2, 3, 4, 6, 8, 9]
    assert [one for one, _ in faults] == [5, 7]


def test_a_bug_met_in_services_leaves_the_node_as_it_is_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is met whatever they are."""
    house = House(NODE, "blue", store=Store(str(tmp_path), print))
    assert house.publisher
    house[NODE].insert(forward())
    house[NODE].held = held = replace(house[NODE].held, table=True)
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "select", lambda: None)  # which is given more
        _with_a_bug_in_services(house, held)
    house.publisher.want(Meaning())
    house.want(vm())
    assert not house[NODE].held.table


def _with_a_bug_in_services(house: House, held: Observed) -> None:
    assert house.publisher
    house.publisher.want(Meaning(services=(service("web tcp 80@30080"),)))
    house.want(vm())
    assert house.standing("blue").state is State.IN_SYNC
    assert house.standing(NODE).state is State.FAILING
    assert house.standing(NODE).why.startswith("unexpected TypeError: ")
    waits = []
    for _ in range(12):
        waits.append(house.keeper.due - house.now)
        house.work()  # whoever else has something to do does not make it sooner
        house.now = house.keeper.due
        house.work()
    assert waits[0] == pytest.approx(FAILURES.first)
    assert max(waits) == FAILURES.longest
    assert house[NODE].held == held
    assert house.metric("portranger_failures_total") == 13


class Slow(Work[Any]):
    """Takes so many seconds, of a clock that goes on by one whenever somebody waits."""

    def __init__(self, house: House, task: Callable[[], Any], seconds: float) -> None:
        super().__init__(task)
        self._house, self._until = house, house.now + seconds

    def wait(self, seconds: float) -> bool:
        self._house.now += 1.0
        return super().wait(seconds * 0)

    def come(self) -> None:
        """See whether it is done."""
        if self._house.now >= self._until and not self.done:
            self.run()


def slowly(house: House, seconds: float) -> list[Slow]:
    """Looks at the node take so long; those that were begun."""
    begun: list[Slow] = []
    inline = Blocked(house)

    def start(task: Any) -> Work[Any]:
        if getattr(task, "args", [None])[0] is not house.keeper._kept.get(NODE):
            work = Work(task)
            work.run()
            return work
        begun.append(Slow(house, task, seconds))
        return begun[-1]

    inline.start = start  # type: ignore[method-assign]
    return begun


def published_slowly(house: House, seconds: float) -> list[Slow]:
    begun = slowly(house, seconds)
    assert house.publisher
    house.publisher.want(Meaning(services=(service("web tcp 80@30080"),)))
    return begun


def test_what_is_new_waits_a_bounded_time_for_a_look_at_the_node(tmp_path: Path) -> None:
    house = House(NODE, "blue", store=Store(str(tmp_path), print))
    begun = published_slowly(house, 30.0)
    house.want()
    assert house.now == 1000.0 + NODE_WAIT
    house.want(vm("tcp 23"))
    assert house.ports("blue") == {"23"}
    assert house.now == 1000.0 + NODE_WAIT, "it was waited for again"
    assert len(begun) == 1
    assert house.keeper.unsettled, "whoever waits for a start would not know of it"
    house.now = 1030.0
    begun[0].come()
    house.work()
    assert house.standing(NODE).state is State.IN_SYNC
    house.keeper.renew()
    house.work()
    assert len(begun) == 2
    assert house.now == 1031.0, "one that took so long was waited for again"


def test_a_look_at_the_node_that_never_ends_is_reported(tmp_path: Path) -> None:
    house = House(NODE, "blue", store=Store(str(tmp_path), print))
    begun = published_slowly(house, math.inf)
    house.want()
    assert house.standing(NODE).state is State.PENDING
    assert house.keeper.due == 1000.0 + NODE_REPORT
    house.now = house.keeper.due
    house.work()
    assert house.standing(NODE).state is State.FAILING
    assert "a look at the node is not done after 60 s" in house.standing(NODE).why
    assert not house.keeper.unsettled
    house.want(vm("tcp 23"))
    assert house.ports("blue") == {"23"}
    assert len(begun) == 1


def test_who_is_told_to_stop_does_not_wait_for_a_look_at_the_node(tmp_path: Path) -> None:
    house = House(NODE, store=Store(str(tmp_path), print))
    published_slowly(house, math.inf)
    house.keeper.want([])
    house.keeper.work(lambda: None, lambda: house.now > 1000.0)
    assert house.now == 1001.0


def test_a_look_at_the_node_goes_by_what_was_wanted_when_it_began(tmp_path: Path) -> None:
    """Else it would take half of what is new, as after a reload, when nobody has said yet what is
    behind any Service, and close the ports of all."""
    house = House(NODE, store=Store(str(tmp_path), print))
    assert house.publisher
    web = service("web tcp 80@30080", selector=(("app", "web"),))
    behind = replace(
        vm("tcp 80"),
        namespace="shop",
        labels=(("app", "web"),),
        addresses=(ip_address("10.9.0.1"),),
    )
    house.kernel.spaces["blue"] = Numbered()
    house.publisher.want(Meaning(services=(web,)))
    house.want(behind)
    assert targets(house) == {"10.9.0.1"}
    begun = slowly(house, 30.0)
    house.keeper.renew()
    house.work()
    house.publisher.use(Publishing(reserve=True), Bands(PortRange(30000, 32767)))
    house.now += 30.0
    begun[0].come()
    assert targets(house) == {"10.9.0.1"}


def test_others_are_repaired_while_a_look_at_the_node_takes_long(tmp_path: Path) -> None:
    house = House(NODE, "blue", "red", store=Store(str(tmp_path), print))
    assert house.publisher
    house.want(vm("tcp 22"), vm("tcp 22", netns="red"))
    waits: list[bool] = []  # whether blue held its rules, at each moment that we waited

    class Slow(Work[Any]):
        def wait(self, seconds: float) -> bool:
            house.now += 1.0
            waits.append(house["blue"].held.table)
            if len(waits) == 2:
                flush(house["blue"])
            if len(waits) == 5:
                self.run()
            return super().wait(seconds * 0)

    class AtOnce(Work[Any]):
        def wait(self, seconds: float) -> bool:
            if not self.done:
                self.run()
            return super().wait(seconds)

    blocked = Blocked(house)
    node = [True]
    blocked.start = lambda task: (  # type: ignore[method-assign]
        Slow(task) if node and node.pop() else AtOnce(task)
    )

    def hear() -> None:
        if len(waits) == 2:
            house.keeper.moved(house["blue"].nsid, 99, ("nft", 4711))

    house.publisher.want(Meaning(services=(service("web tcp 80@30080"),)))
    house.keeper.want([vm("tcp 22"), vm("tcp 22", netns="red")])
    house.keeper.work(lambda: None, lambda: False, hear)
    assert waits == [True] * 5
    assert house["blue"].held.live
    assert house.standing(NODE).state is State.IN_SYNC


def test_services_lead_away_from_a_port_before_it_is_closed(tmp_path: Path) -> None:
    house = House(NODE, "blue", "red", store=Store(str(tmp_path), print))
    assert house.publisher
    web = service("web tcp 80@30080", selector=(("app", "web"),))
    house.publisher.want(Meaning(services=(web,)))

    def endpoint(netns: str, *claims: str, at: str) -> Machine:
        return replace(
            vm(*claims, netns=netns),
            namespace="shop",
            labels=(("app", "web"),),
            addresses=(ip_address(at),),
        )

    blue, red = endpoint("blue", "tcp 80", at="10.9.0.1"), endpoint("red", "tcp 80", at="10.9.0.2")
    other = replace(vm("tcp 22", name="other"), namespace="shop")
    house.want(other, blue, red)
    assert targets(house) == {"10.9.0.1", "10.9.0.2"}
    closed: list[set[str]] = []
    shut = house["blue"].commit

    def closing(plan: Plan) -> None:
        closed.append(targets(house))
        shut(plan)

    house["blue"].commit = closing  # type: ignore[method-assign]
    house.want(other, red)
    assert closed == [{"10.9.0.2"}]
    house.want(other, blue, red)
    assert closed == [{"10.9.0.2"}] * 2, "a Service led to a port that was not open yet"
    assert targets(house) == {"10.9.0.1", "10.9.0.2"}


def targets(house: House) -> set[str]:
    """Where Services lead."""
    rules = (live.rule for live in house[NODE].held.live)
    return {str(rule.to) for rule in rules if rule.chain is Chain.PREROUTING}


def test_since_when_it_stands_so_is_told() -> None:
    house = House("blue")
    house.kernel.refused["blue"] = Failure("no")
    house.want(vm())
    since = house.standing("blue").since
    house.date += 60
    house.now += 60
    house.work()
    assert house.standing("blue").since == since
    house.kernel.refused.clear()
    house.date += 60
    house.now += 60
    house.work()
    assert house.standing("blue").since == since + 120


def test_why_it_waits_is_told_of_ten_and_the_others_are_counted() -> None:
    house = House("blue")
    house.want(*(machine(f"tcp {n}", name=f"m{n:02}", entry="eth7") for n in range(1, 14)))
    why = house.standing("blue").why
    assert why.count("eth7") == 10
    assert why.endswith("; and 3 more")


def test_to_renew_waits_for_nobody() -> None:
    house = House("blue")
    house.kernel.refused["blue"] = Failure("no")
    house.want(vm())
    house.kernel.refused.clear()
    assert house.work() == []
    house.keeper.renew()
    assert house.work() == ["blue"]
    assert house.standing("blue").state is State.IN_SYNC


def test_who_is_told_to_stop_looks_at_nothing_more() -> None:
    names = [f"ns-{number}" for number in range(10)]
    house = House(*names)
    house.keeper.want([vm(netns=name) for name in names])
    beats = itertools.count(1)
    beaten = [0]

    def beat() -> None:
        beaten[0] = next(beats)

    house.keeper.work(beat, lambda: beaten[0] >= 3)
    assert house.kernel.opens == names[:3]
    assert not house.keeper.tried
    house.work()
    assert house.keeper.tried


# --------------------------------------------------------------------------------------- conflicts


def test_a_contested_namespace_is_told_and_untold() -> None:
    house = House("blue")
    house.want(vm())
    house.keeper.want([vm()], contested={"blue": "two want tcp 22"})
    assert house.work() == []
    standing = house.standing("blue")
    assert (standing.state, standing.why) == (State.CONFLICT, "two want tcp 22")
    assert house.ports("blue") == {"22"}
    house.want(vm())
    assert house.standing("blue").state is State.IN_SYNC


# ---------------------------------------------------------------------------------------- policies

FRIENDS = policy("ingress: [{from: [{podSelector: {}}], ports: [{port: 22}]}]")
SHUT = policy("podSelector: {}")
LAWS = Laws(policies=(FRIENDS,))


def shop(*claims: str, netns: str = "blue") -> Machine:
    """A machine of the namespace that the policies are of."""
    return replace(vm(*claims, netns=netns), namespace="shop")


def at(address: str) -> Surroundings:
    return space(LO, link("eth0", f"{address}/24"), BRIDGE, default="eth0")


def test_what_policies_say_is_enforced_where_they_select() -> None:
    house = House("blue", "red")
    house.want(shop(), vm(netns="red"), laws=Laws(policies=(SHUT,)))
    assert house.filters("red") == []
    assert sorted(rule.accepts for rule in house.filters("blue")) == [False, False, True, True]
    house.want(shop(), vm(netns="red"))
    assert house.kernel.opens == ["blue"]
    assert house.filters("blue") == []
    assert house.ports("blue") == {"22"}


def test_peers_are_known_by_what_was_found_in_their_namespaces_in_one_go() -> None:
    house = House("blue", "red")
    house["blue"].links, house["red"].links = at("10.1.0.1"), at("10.1.0.2")
    house.want(shop(), shop(netns="red"), laws=LAWS)
    for netns in ("blue", "red"):
        assert house.members(netns) == ["10.1.0.1/32", "10.1.0.2/32"]
        assert house.standing(netns).state is State.IN_SYNC
    assert house.work() == []
    assert house.keeper.due == math.inf


def test_a_peer_that_moves_is_another_element_and_the_rules_are_the_same() -> None:
    house = House("blue", "red")
    house["blue"].links, house["red"].links = at("10.1.0.1"), at("10.1.0.2")
    house.want(shop(), shop(netns="red"), laws=LAWS)
    was = house["blue"].held.live
    house["red"].links = at("10.1.0.9")
    house.keeper.relinked(house["red"].nsid)
    house.work()
    assert house.members("blue") == ["10.1.0.1/32", "10.1.0.9/32"]
    assert house["blue"].held.live == was
    assert house.standing("blue").drift is None


def test_a_peer_that_goes_is_nobody_any_more() -> None:
    house = House("blue", "red")
    house["blue"].links, house["red"].links = at("10.1.0.1"), at("10.1.0.2")
    house.want(shop(), shop(netns="red"), laws=LAWS)
    del house.kernel.spaces["red"]
    house.keeper.arrived()
    house.work()
    assert house.members("blue") == ["10.1.0.1/32"]
    house.want(shop(), laws=LAWS)
    assert house.members("blue") == ["10.1.0.1/32"]


def test_a_pod_that_comes_changes_nothing_elsewhere() -> None:
    house = House("blue", "red")
    house["blue"].links, house["red"].links = at("10.1.0.1"), at("10.1.0.2")
    house.want(shop(), vm(netns="red"), laws=LAWS)
    pod = Pod(namespace="shop", name="a", ports=(), addresses=(ip_address("10.1.0.7"),))
    house.want(shop(), vm(netns="red"), laws=replace(LAWS, pods=(pod,)))
    assert house.kernel.opens == ["blue"]
    assert house.members("blue") == ["10.1.0.1/32", "10.1.0.7/32"]


def test_where_no_policy_is_links_are_nobodys_business() -> None:
    house = House("blue", "red")
    house.want(shop(), shop(netns="red"))
    house["red"].links = at("10.1.0.9")
    house.keeper.relinked(house["red"].nsid)
    assert house.work() == ["red"]


def test_where_laws_are_not_known_what_is_enforced_stays() -> None:
    house = House("blue")
    house["blue"].links = at("10.1.0.1")
    house.want(shop(), laws=LAWS)
    was, members = house["blue"].held.live, house.members("blue")
    house.want(shop("tcp 22", "tcp 80"), laws=None)
    assert set(house["blue"].held.live) > set(was)
    assert house.members("blue") == members
    assert house.ports("blue") == {"22", "80"}
    house.want(shop("tcp 22", "tcp 80"), laws=Laws(policies=(SHUT,)))
    assert {rule.peers for rule in house.filters("blue")} == {None}
    assert house.members("blue") == []
    house.want(shop("tcp 22", "tcp 80"), laws=None)
    house.want(shop("tcp 22", "tcp 80"))
    assert house.filters("blue") == []


def test_who_is_new_while_laws_are_not_known_waits_for_them() -> None:
    house = House("blue", "red")
    house.want(shop(), laws=LAWS)
    house.want(shop("tcp 22", "tcp 80"), shop(netns="red"), laws=None)
    assert house.ports("blue") == {"22", "80"}
    assert house.filters("blue")
    standing = house.standing("blue")
    assert (standing.state, standing.pending) == (State.IN_SYNC, ())
    assert FENCES_STAY in standing.notes
    assert house.ports("red") == set()
    standing = house.standing("red")
    assert standing.state is State.PENDING
    assert standing.why == f"VirtualMachine/shop/in-red/default: {UNLAWFUL}"
    house.want(shop("tcp 22", "tcp 80"), shop(netns="red"), laws=LAWS)
    assert house.ports("red") == {"22"}
    assert house.filters("red")
    for netns in ("blue", "red"):
        assert house.standing(netns).state is State.IN_SYNC
        assert FENCES_STAY not in house.standing(netns).notes


def test_who_loses_all_rules_while_laws_are_not_known_waits_for_them() -> None:
    """The fence went with them, and what it was is not known."""
    house = House("blue")
    house.want(shop(), laws=LAWS)
    house.want(shop(), laws=None)
    house.stirred("blue", flush)
    house.work()
    assert house.ports("blue") == set()
    assert house.standing("blue").state is State.PENDING
    assert house.standing("blue").drifts == 1


def test_a_first_run_that_knows_no_laws_leaves_what_an_earlier_one_enforced() -> None:
    house = House("blue")
    house.want(shop(), laws=LAWS)
    held = house["blue"].held
    later = House()
    later.kernel.spaces["blue"] = house["blue"]
    later.want(shop(), laws=None)
    assert later["blue"].held == held
    assert later.standing("blue").drift is None


@pytest.fixture
def lawless(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """A bug in policies, for as long as there is one in the list."""
    errors: list[Exception] = [ZeroDivisionError("a bug")]

    def met(*given: Any) -> tuple[Machine, ...]:
        if errors:
            raise errors[0]
        return fenced(*given)

    monkeypatch.setattr("agent.keeper.fenced", met)
    return errors


def test_a_bug_met_in_policies_leaves_the_last_fences_and_is_tried_again(
    lawless: list[Exception],
) -> None:
    house, bugs = House("blue", "red", "green"), list(lawless)
    lawless.clear()
    house.want(shop(), vm(netns="red"), laws=LAWS)
    held = {netns: house[netns].held for netns in ("blue", "red", "green")}
    lawless.extend(bugs)
    house.want(shop("tcp 22", "tcp 80"), vm(netns="green"), laws=Laws(policies=(SHUT,)))
    waits = []
    for _ in range(12):
        waits.append(house.keeper.due - house.now)
        house.now = house.keeper.due
        house.work()
    assert waits[0] == pytest.approx(FAILURES.first)
    assert max(waits) == FAILURES.longest
    assert {netns: house[netns].held for netns in held} == held
    assert house.written.getvalue().count("policies not understood") == 1
    assert house.metric("portranger_failures_total") == 13
    house.stirred("blue", flush)
    house.work()
    assert house.filters("blue")  # what was enforced is also repaired
    lawless.clear()
    house.now = max(house.now, house.keeper.due)
    house.work()
    assert house.ports("blue") == {"22", "80"}
    assert house.ports("green") == {"22"}
    assert not house["red"].held.table
    assert house.keeper.due == math.inf


def test_a_first_run_that_meets_a_bug_in_policies_clears_nothing(lawless: list[Exception]) -> None:
    house, later = House("blue"), House()
    bugs = list(lawless)
    lawless.clear()
    house.want(shop(), laws=LAWS)
    held = house["blue"].held
    lawless.extend(bugs)
    later.kernel.spaces["blue"] = house["blue"]
    later.keeper.leave(["blue"])  # unless somebody wants it
    later.want(shop(), laws=LAWS)
    assert later["blue"].held == held
    assert not later.keeper.tried
    assert later.keeper.due == pytest.approx(later.now + FAILURES.first)


def test_a_fence_that_somebody_breaks_is_drift() -> None:
    house = House("blue")
    house["blue"].links = at("10.1.0.1")
    house.want(shop(), laws=LAWS)
    held = house["blue"].held

    def empty(one: Numbered) -> None:
        one.held = replace(one.held, sets={peers: frozenset() for peers in one.held.sets})

    house.stirred("blue", empty)
    house.work()
    assert house["blue"].held == held
    drift = house.standing("blue").drift
    assert drift is not None
    assert drift.changes == 1


def test_a_namespace_that_nobody_wants_is_cleared_of_filters_too() -> None:
    house = House("blue")
    house.want(shop(), laws=LAWS)
    house.want(laws=LAWS)
    assert not house["blue"].held.table


def test_what_nobody_wants_is_cleared_also_while_laws_are_not_known() -> None:
    """It is forgotten then, so nobody would ever come back to clear it."""
    house = House("blue")
    house.want(shop(), laws=LAWS)
    house.want(laws=None)
    house.want()
    assert not house["blue"].held.table


def test_the_node_is_looked_at_by_a_timer_for_the_first_legacy_rule(tmp_path: Path) -> None:
    """The legacy tables send no events, and nothing tells when somebody begins to use them."""
    house = House(NODE, store=Store(str(tmp_path), print))
    assert house.publisher
    house.publisher.want(Meaning(services=(service("web tcp 80@30080"),)))
    house.want()
    for _ in range(3):  # also when all is proven
        assert house.now < house.keeper.due <= house.now + TIMED_LOOK
        house.now = house.keeper.due
        house.work()
