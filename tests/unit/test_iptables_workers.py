"""The worker processes of the iptables backend, played by small programs that misbehave."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import BackendMissing, Failure, NotPermitted, Stale, TryAgain
from agent.kernel import iptables
from agent.kernel.iptables import Iptables, Worker, Workers, failure
from rules.model import Desired, Family, Foreign, Live, Observed, Rule
from rules.plan import Plan, Table, diff
from tests.property.strategies import ListedChains, ListedFamilies
from tests.unit.samples import egress, forward

LISTEN = "import os, sys, time; c = int(sys.argv[1]); os.read(c, 4); os.read(c, 9999);"
SAY = "say = lambda text: os.write(c, len(text).to_bytes(4, sys.byteorder) + text);"
WELL = (
    "import os, sys; c = int(sys.argv[1]);" + SAY + "\n"
    "while os.read(c, 4):\n"
    "    os.read(c, 9999)\n"
    """    say(b'{"pid": %d, "family": "%s"}' % (os.getpid(), sys.argv[2].encode()))"""
)
DIES = "pass"
DIES_LATE = LISTEN
HANGS = "import time; time.sleep(60)"
HANGS_MIDWAY = LISTEN + r'os.write(c, b"\x09\0\0\0{"); time.sleep(60)'
GARBAGE = LISTEN + SAY + r'say(b"\xff{not json")'
LIST = LISTEN + SAY + 'say(b"[1, 2]")'
HUGE = LISTEN + r'os.write(c, b"\xff" * 8); time.sleep(60)'
HUGE_AND_GONE = LISTEN + r'os.write(c, b"\xff" * 8)'
NESTED = LISTEN + SAY + 'say(b"[" * 100_000)'
TRICKLES = (
    LISTEN
    + r"""os.write(c, b"\xff\0\0\0")
for _ in range(600): os.write(c, b" "); time.sleep(0.1)"""
)
ERROR = LISTEN + SAY + """say(b'{"error": "IPTCError", "text": "no luck"}'); os.read(c, 4)"""


@pytest.fixture(autouse=True)
def _python_iptables_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """These workers need none, so the tests run where it is not installed."""
    monkeypatch.setattr(iptables, "find_spec", lambda name: name)


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.open("/dev/null", os.O_RDONLY)
    yield number
    os.close(number)


def playing(program: str, patience: float = 30) -> Worker:
    # Without the libraries of the site, Python starts in a few milliseconds.
    return Worker(Family.IP, [sys.executable, "-I", "-S", "-c", program], patience)


def children() -> set[str]:
    """Every process that this one has started and not waited for, zombies too."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_answer_comes_from_a_process_that_stays(descriptor: int) -> None:
    worker = playing(WELL)
    first, again = (worker.ask(descriptor, {"steps": []}) for _ in range(2))
    worker.stop()
    assert first == again
    assert first["family"] == "ip"
    assert first["pid"] != os.getpid()


def test_a_worker_is_never_what_lies_in_the_directory_we_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptor: int
) -> None:
    folder = tmp_path / "agent" / "kernel"
    folder.mkdir(parents=True)
    for package in (tmp_path / "agent", folder):
        (package / "__init__.py").touch()
    (folder / "iptables_worker.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    worker = Worker(Family.IP, patience=20)
    with pytest.raises(Failure):  # /dev/null is no namespace
        worker.ask(descriptor, {})
    worker.stop()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("program", "patience", "what"),
    [
        pytest.param(DIES, 30, "ended or answered nonsense", id="dies at once"),
        pytest.param(DIES_LATE, 30, "ended or answered nonsense", id="dies when it is asked"),
        pytest.param(HANGS, 0.2, "did not answer within 0.2 s", id="hangs"),
        pytest.param(HANGS_MIDWAY, 0.2, "did not answer within 0.2 s", id="hangs in its answer"),
        pytest.param(GARBAGE, 30, "ended or answered nonsense", id="answers garbage"),
        pytest.param(LIST, 30, "ended or answered nonsense", id="answers a list"),
        pytest.param(NESTED, 30, "ended or answered nonsense", id="answers a deep nest"),
        pytest.param(TRICKLES, 0.5, "did not answer within 0.5 s", id="trickles"),
        pytest.param(HUGE, 0.2, "nonsense|did not answer", id="announces 4 GiB"),
        pytest.param(HUGE_AND_GONE, 30, "answered nonsense", id="announces 4 GiB and ends"),
    ],
)
def test_a_worker_that_fails_is_replaced(
    descriptor: int, program: str, patience: float, what: str
) -> None:
    worker = playing(program, patience)
    before = children(), descriptors()
    with pytest.raises(TryAgain, match=f"the iptables worker for ip .*({what})") as caught:
        worker.ask(descriptor, {})
    assert "Try again." in str(caught.value)
    assert caught.value.exit_code == 75
    assert (children(), descriptors()) == before
    worker._command, worker._patience = playing(WELL)._command, 30.0  # the next one is better
    assert worker.ask(descriptor, {})["family"] == "ip"
    worker.stop()
    assert (children(), descriptors()) == before


def test_a_worker_is_not_waited_for_longer_than_its_patience(descriptor: int) -> None:
    worker = playing(HANGS, 0.2)
    began = time.monotonic()
    with pytest.raises(TryAgain):
        worker.ask(descriptor, {})
    assert 0.2 <= time.monotonic() - began < 30


def test_a_worker_that_cannot_be_started_is_said_so(descriptor: int) -> None:
    before = children(), descriptors()
    worker = Worker(Family.IP6, ["/nonexistent/python"])
    with pytest.raises(TryAgain, match="cannot start the iptables worker for ip6"):
        worker.ask(descriptor, {})
    assert (children(), descriptors()) == before


def test_an_error_is_an_answer_and_the_worker_stays(descriptor: int) -> None:
    worker = playing(ERROR)
    with pytest.raises(Failure, match=r"iptables refused \(no luck\)") as caught:
        worker.ask(descriptor, {})
    assert not isinstance(caught.value, TryAgain)
    assert len(children()) >= 1
    worker.stop()


def test_a_worker_without_the_package_is_replaced_after_a_while(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = playing(ERROR.replace("IPTCError", "Unusable"))
    before = children()
    with pytest.raises(BackendMissing, match="Install Debian's package iptables"):
        worker.ask(descriptor, {})
    assert children() != before, "each look would start one"
    worker.stop()
    monkeypatch.setattr(iptables, "PAUSE", 0.0)
    with pytest.raises(BackendMissing):
        worker.ask(descriptor, {})
    assert children() == before
    worker._command = playing(WELL)._command  # somebody has installed it
    assert worker.ask(descriptor, {})["family"] == "ip"
    worker.stop()


def test_a_worker_that_died_between_two_questions_is_replaced(descriptor: int) -> None:
    worker = playing(LISTEN + SAY + "say(b'{}'); sys.exit(3)")
    assert worker.ask(descriptor, {}) == {}
    with pytest.raises(TryAgain):
        worker.ask(descriptor, {})
    assert worker.ask(descriptor, {}) == {}
    worker.stop()


def test_a_worker_that_ended_for_want_of_work_is_replaced_and_nobody_need_know(
    descriptor: int,
) -> None:
    worker = playing(LISTEN + SAY + "say(b'{}')")
    for _ in range(3):
        assert worker.ask(descriptor, {}) == {}
        assert worker._process is not None
        assert worker._process.wait(30) == 0
    worker.stop()


def test_two_hundred_failures_leave_no_zombie_and_no_descriptor(descriptor: int) -> None:
    kinds = [*(playing(p) for p in (DIES, GARBAGE, HUGE_AND_GONE, LIST)), playing(HANGS, 0.02)]
    before = children(), descriptors()
    for cycle in range(200):
        with pytest.raises(TryAgain):
            kinds[cycle % len(kinds)].ask(descriptor, {})
    assert (children(), descriptors()) == before


def test_to_stop_what_never_started_is_nothing(descriptor: int) -> None:
    before = children(), descriptors()
    workers = Workers()
    workers.stop()
    workers.stop()
    assert (children(), descriptors()) == before


def test_without_python_iptables_no_worker_starts(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iptables, "find_spec", lambda _: None)
    before = children()
    with pytest.raises(BackendMissing, match="python-iptables is not installed"):
        Workers()[Family.IP].ask(descriptor, {})
    assert children() == before


@pytest.mark.parametrize(
    ("kind", "text", "meaning"),
    [
        ("Stale", "our chains changed since they were looked at", Stale),
        ("BlockingIOError", "[Errno 11]", Stale),
        ("IPTCError", "can't commit: b'Resource temporarily unavailable'", Stale),
        (
            "IPTCError",
            "can't initialize nat: b'Permission denied (you must be root)'",
            NotPermitted,
        ),
        ("PermissionError", "[Errno 1] Operation not permitted", NotPermitted),
        ("IPTCError", "can't initialize nat: b'Table does not exist'", BackendMissing),
        ("XTablesError", "xtables version not found", BackendMissing),
        ("Unusable", "can't find directory with extensions", BackendMissing),
        ("Unusable", "[Errno 13] Permission denied: '/sbin/ldconfig'", BackendMissing),
        ("XTablesError", "can't find match tcp", BackendMissing),
        (
            "Unfit",
            "iptables v1.8.11 (can't encode tcp {'dport': '22'}: it became None)",
            BackendMissing,
        ),
        ("ModuleNotFoundError", "No module named 'iptc'", BackendMissing),
        ("IPTCError", "can't commit: b'Invalid argument'", Failure),
    ],
)
def test_an_error_of_the_worker_means(kind: str, text: str, meaning: type[Failure]) -> None:
    found = failure(kind, text)
    assert type(found) is meaning
    assert str(found).endswith(".")


# ----------------------------------------------------------------------------------- our chains


class Answering(Worker):
    """A worker in this process, over lists that stand for the tables."""

    def __init__(self, family: Family, table: ListedChains) -> None:
        super().__init__(family)
        self.table = table
        self.asked: list[dict[str, Any]] = []

    def ask(self, descriptor: int, question: dict[str, object]) -> dict[str, object]:
        assert descriptor == 7
        self.asked.append(question)
        listing = self.table.listing()
        due: Any = question.get("steps")
        if due is None:
            return listing
        if question["digest"] != listing["digest"]:
            raise Stale("our chains changed")
        self.table.run(due)
        return {}


class Lists(Workers):
    def __init__(self) -> None:
        super().__init__()
        self.tables = ListedFamilies()
        self.workers = {family: Answering(family, self.tables[family]) for family in Family}

    def __getitem__(self, family: Family) -> Answering:
        return self.workers[family]


@pytest.fixture
def lists() -> Lists:
    return Lists()


V6 = forward(to="fd10:0:2::2")


def planned(chains: Iptables, *rules: Rule) -> Plan:
    return diff("blue", Desired(rules=frozenset(rules)), chains.observe())


def test_a_commit_is_seen_at_the_next_look(lists: Lists) -> None:
    chains = Iptables(7, lists)
    assert chains.observe() == Observed()
    chains.commit(planned(chains, forward(), egress(), V6))
    assert planned(chains, forward(), egress(), V6).empty
    chains.commit(planned(chains))
    assert chains.observe() == Observed()
    chains.close()


def test_rules_of_others_are_counted(lists: Lists) -> None:
    chains = Iptables(7, lists)
    chains.observe()
    assert chains.others == 12


def test_a_family_without_changes_is_not_written_to(lists: Lists) -> None:
    chains = Iptables(7, lists)
    chains.commit(planned(chains, forward(), V6))
    lists[Family.IP6].asked.clear()
    chains.commit(planned(chains, forward("tcp 22-23"), V6))
    assert all("steps" not in question for question in lists[Family.IP6].asked)


@pytest.mark.parametrize("family", Family)
def test_a_plan_for_what_is_no_longer_so_changes_neither_family(
    lists: Lists, family: Family
) -> None:
    chains = Iptables(7, lists)
    chains.commit(planned(chains, forward(), V6))
    plan = planned(chains, forward("tcp 22-23"), forward("tcp 22-23", to="fd10:0:2::2"))
    lists.tables[family].chains["nat PORTRANGER-PREROUTING"].insert(
        0, {"target": "RETURN", "counters": [0, 0]}
    )
    before = [list(rules) for rules in lists.tables.lists()]
    with pytest.raises(Stale):
        chains.commit(plan)
    assert lists.tables.lists() == before


@pytest.mark.parametrize(
    "old",
    [Live(egress(), 0), Foreign("ip nat PORTRANGER-OUTPUT", 0, "accept")],
    ids=["ours", "theirs"],
)
def test_a_plan_for_what_was_never_seen_is_stale(lists: Lists, old: Live | Foreign) -> None:
    chains = Iptables(7, lists)
    chains.commit(planned(chains, forward()))
    chains.observe()
    with pytest.raises(Stale, match="a rule went or moved"):
        chains.commit(Plan(netns="blue", remove=(old,)))


def test_to_remove_everything_asks_no_more_than_whether_it_is_as_seen(lists: Lists) -> None:
    chains = Iptables(7, lists)
    chains.commit(planned(chains, forward()))
    chains.observe()
    gone = Plan(netns="blue", table=Table.DELETE, remove=(Live(egress(), 9),))
    chains.commit(gone)
    assert chains.observe() == Observed()
