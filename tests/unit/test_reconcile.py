"""One pass: it ends with the kernel as desired, or says who or what is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import pytest

from agent.errors import Failure, Stale, TryAgain
from agent.kernel.memory import MemoryNamespace
from agent.reconcile import ATTEMPTS, by_namespace, converge, intend, intend_from_nothing, wish_of
from rules.desired import desire
from rules.foreign_filters import Filter
from rules.model import Address, Desired, Foreign, Members, Observed, Peers, Rule, Surroundings
from rules.plan import Plan, Table
from rules.publish import Node
from rules.values import replace
from tests.unit.samples import POD, forward, machine, space

WANTED = desire([machine("tcp 22")], POD)
STRANGER = Foreign("prerouting", 0, "accept")


class Hindered:
    """A namespace in which a stranger acts before each of the first commits."""

    backend = "memory"
    reason = "this is a test"
    nsid = generation = known = None
    legacy = b""

    def __init__(self, times: int) -> None:
        self.inner = MemoryNamespace(POD)
        self.left = times
        self.commits = 0
        self.alone = False

    @property
    def identity(self) -> object:
        return self.inner.identity

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.alone = True
        yield
        self.alone = False

    def surroundings(self) -> Surroundings:
        return self.inner.surroundings()

    def filters(self) -> tuple[Filter, ...]:
        return self.inner.filters()

    def node(self, endpoints: Iterable[Address], *, others: bool) -> Node:
        return self.inner.node(endpoints, others=others)

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        return self.inner.observe(sysctls)

    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        self.inner.sweep(rules, sets, guests)

    def commit(self, plan: Plan) -> None:
        assert self.alone, "others of us must wait while we look and commit"
        self.commits += 1
        if self.left > 0:
            self.left -= 1
            raise Stale("somebody was faster")
        self.inner.commit(plan)


class Undone(Hindered):
    """A namespace in which a stranger adds a rule after every commit."""

    def commit(self, plan: Plan) -> None:
        super().commit(plan)
        self.inner.insert(STRANGER)


class Deaf(Hindered):
    """A kernel that takes every commit and does nothing."""

    def commit(self, plan: Plan) -> None:  # noqa: ARG002 - that is what is wrong with it
        self.commits += 1


class Forgetful(Hindered):
    """A kernel that drops the settings of every commit."""

    def commit(self, plan: Plan) -> None:
        if not plan.same_rules:
            super().commit(replace(plan, sysctls=()))


def left(namespace: Hindered) -> Plan:
    return intend("blue", wish_of([machine("tcp 22")]), namespace).plan


# ------------------------------------------------------------------------------------- converge


def test_a_first_pass_makes_everything_and_a_second_nothing() -> None:
    namespace = Hindered(0)
    assert converge("blue", WANTED, namespace).table is Table.CREATE
    assert converge("blue", WANTED, namespace) == Plan(netns="blue")
    assert namespace.commits == 1


def test_the_settings_are_made_with_the_rules() -> None:
    namespace = Hindered(0)
    converge("blue", WANTED, namespace)
    assert namespace.inner.settings == {one.name: one.value for one in WANTED.sysctls}


@pytest.mark.parametrize("times", [1, ATTEMPTS - 1])
def test_a_stale_look_is_looked_again(times: int) -> None:
    namespace = Hindered(times)
    converge("blue", WANTED, namespace)
    assert namespace.commits == times + 1
    assert left(namespace).empty


def test_a_stranger_who_is_always_faster_is_given_up_on() -> None:
    namespace = Hindered(1000)
    with pytest.raises(TryAgain, match="somebody else keeps changing our table"):
        converge("blue", WANTED, namespace)
    assert namespace.commits == ATTEMPTS


def test_a_stranger_who_always_comes_back_is_named_by_what_he_leaves() -> None:
    namespace = Undone(0)
    with pytest.raises(Failure, match="- a foreign rule in prerouting: accept") as caught:
        converge("blue", WANTED, namespace)
    assert not isinstance(caught.value, TryAgain)
    assert namespace.commits == ATTEMPTS


def test_a_kernel_that_ignores_us_is_told_what_did_not_take() -> None:
    with pytest.raises(Failure, match="namespace blue did not become as planned") as caught:
        converge("blue", WANTED, Deaf(0))
    assert "+ ip   prerouting" in str(caught.value)
    assert "sysctl net.ipv4.ip_forward 0 -> 1" in str(caught.value)


def test_of_much_that_did_not_take_ten_are_named() -> None:
    many = Desired(rules=frozenset(forward(f"tcp {port}") for port in range(1, 100, 2)))
    with pytest.raises(Failure, match="and 40 more") as caught:
        converge("blue", many, Deaf(0))
    assert str(caught.value).count("; + ") == 9


def test_a_setting_that_does_not_take_is_named_alone() -> None:
    wanted = Desired(
        rules=frozenset({forward()}),
        sysctls=frozenset(one for one in WANTED.sysctls if one.name == "net.ipv4.ip_forward"),
    )
    with pytest.raises(Failure, match=r"attempts: ~ sysctl net.ipv4.ip_forward 0 -> 1\. "):
        converge("blue", wanted, Forgetful(0))


def test_the_last_commit_of_all_still_counts() -> None:
    namespace = Hindered(ATTEMPTS - 1)
    assert converge("blue", WANTED, namespace).add


def test_nothing_desired_clears_the_table() -> None:
    namespace = Hindered(0)
    converge("blue", WANTED, namespace)
    assert converge("blue", Desired(), namespace).table is Table.DELETE
    assert namespace.observe() == Observed()


# -------------------------------------------------------------------------------------- intents


def test_to_intend_changes_nothing() -> None:
    namespace = Hindered(0)
    intent = intend("blue", wish_of([machine("tcp 22")]), namespace)
    assert intent.desired == WANTED
    assert not intent.plan.empty
    assert namespace.commits == 0
    assert namespace.observe() == Observed()


def test_from_nothing_both_families_are_planned_and_settings_unknown() -> None:
    plan = intend_from_nothing("blue", desire([machine("tcp 22")], None)).plan
    assert {rule.family.value for rule in plan.add} == {"ip", "ip6"}
    assert {change.before for change in plan.sysctls} == {None}


def test_a_pending_machine_keeps_what_runs_for_it() -> None:
    namespace = Hindered(0)
    converge("blue", WANTED, namespace)
    namespace.inner.links = space()
    intent = intend("blue", wish_of([machine("tcp 22")]), namespace)
    assert intent.plan.empty
    assert len(intent.plan.unchanged) == len(WANTED.rules)


def test_filters_of_others_that_meet_a_bug_are_noted_and_stop_nothing() -> None:
    class Odd(Hindered):
        def filters(self) -> tuple[Filter, ...]:
            raise ZeroDivisionError("boom")

    intent = intend("blue", wish_of([machine("tcp 22")]), Odd(0))
    assert intent.desired.rules == WANTED.rules
    assert "ZeroDivisionError: boom" in str(intent.desired.notes)


def test_machines_are_grouped_by_namespace_and_in_order() -> None:
    given = [machine(name="b", netns="red"), machine(name="c"), machine(name="a", netns="red")]
    groups = by_namespace(given)
    assert [(netns, [one.name for one in group]) for netns, group in groups.items()] == [
        ("blue", ["c"]),
        ("red", ["a", "b"]),
    ]
