"""The difference: what is added, changed, removed and left, and what becomes of the table."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rules.model import Chain, Desired, Foreign, Live, Observed, Pending, Rule, Sysctl
from rules.plan import Plan, SysctlChange, Table, diff
from rules.values import replace
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside

ALL_CHAINS = frozenset(Chain)
STRANGER = Foreign("prerouting", 99, "accept")


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset(rules))


def held(*rules: Rule, foreign: tuple[Foreign, ...] = (), unsound: str = "") -> Observed:
    """A table with these rules, numbered from 1."""
    return Observed(
        live=tuple(Live(rule, number) for number, rule in enumerate(rules, 1)),
        foreign=foreign,
        chains=frozenset() if unsound else ALL_CHAINS,
        table=True,
        unsound=unsound,
    )


def handles(old: Iterable[Live | Foreign]) -> list[int]:
    return [one.handle for one in old]


# ------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    ("desired", "observed", "fate"),
    [
        pytest.param(want(), Observed(), Table.KEEP, id="nothing wanted, nothing there"),
        pytest.param(want(egress()), Observed(), Table.CREATE, id="wanted, and not there"),
        pytest.param(want(egress()), held(egress()), Table.KEEP, id="wanted and there"),
        pytest.param(want(egress()), held(), Table.KEEP, id="wanted, there and empty"),
        pytest.param(want(), held(egress()), Table.DELETE, id="there, and no longer wanted"),
        pytest.param(want(), held(), Table.DELETE, id="empty, and not wanted"),
        pytest.param(
            want(egress()), held(egress(), unsound="flags"), Table.REMAKE, id="wanted, but unsound"
        ),
        pytest.param(want(), held(unsound="flags"), Table.DELETE, id="unsound, and not wanted"),
    ],
)
def test_the_table_is(desired: Desired, observed: Observed, fate: Table) -> None:
    plan = diff("blue", desired, observed)
    assert plan.table is fate
    assert plan.unsound == observed.unsound


def test_a_first_plan_creates_the_chains_it_needs_and_no_other() -> None:
    plan = diff("blue", want(forward(), egress()), Observed())
    assert plan.chains == (Chain.PREROUTING, Chain.POSTROUTING)


def test_a_chain_that_is_missing_is_created_with_its_rules() -> None:
    observed = Observed(
        live=(Live(forward(), 1),), chains=frozenset({Chain.PREROUTING}), table=True
    )
    plan = diff("blue", want(forward(), egress()), observed)
    assert (plan.chains, plan.add) == ((Chain.POSTROUTING,), (egress(),))


def test_a_chain_that_went_without_its_rules_is_a_difference() -> None:
    observed = replace(held(forward(), egress()), chains=frozenset({Chain.POSTROUTING}))
    plan = diff("blue", want(forward(), egress()), observed)
    assert (plan.chains, plan.add, plan.table) == ((Chain.PREROUTING,), (), Table.KEEP)
    assert not plan.same_rules
    assert not plan.empty


# ------------------------------------------------------------------- what the other backend holds


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        pytest.param(want(egress()), held(egress()), id="beside what is wanted"),
        pytest.param(want(), Observed(), id="alone"),
    ],
)
def test_what_the_other_backend_holds_is_removed_there(
    desired: Desired, observed: Observed
) -> None:
    left = (Live(forward(), 7), STRANGER)
    plan = diff("blue", desired, replace(observed, leftovers=left))
    assert plan.leftovers == left
    assert (plan.table, plan.add, plan.change, plan.remove) == (Table.KEEP, (), (), ())
    assert not plan.same_rules
    assert not plan.empty


# ------------------------------------------------------------------------------------ the rules


def test_what_is_there_and_wanted_stays() -> None:
    plan = diff("blue", want(forward(), egress()), held(egress(), forward()))
    assert plan.empty
    assert handles(plan.unchanged) == [1, 2]


def test_a_second_copy_of_a_rule_is_removed() -> None:
    plan = diff("blue", want(forward()), held(forward(), forward()))
    assert (handles(plan.unchanged), handles(plan.remove)) == ([1], [2])


def test_what_is_foreign_is_removed_after_what_is_ours() -> None:
    plan = diff("blue", want(egress()), held(egress(), forward(), foreign=(STRANGER,)))
    assert handles(plan.remove) == [2, 99]
    assert not plan.same_rules


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        pytest.param("tcp 1000-8000", "tcp 1000-9000", True, id="a longer range"),
        pytest.param("tcp 1000-8000", "tcp 8000-9000", True, id="one port in common"),
        pytest.param("tcp 1000-8000", "tcp 8001-9000", False, id="no port in common"),
        pytest.param("tcp 22", "udp 22", False, id="another protocol"),
        pytest.param(None, "tcp 22", False, id="from everything to one port"),
    ],
)
def test_a_change_is_a_rule_that_goes_on_serving_some_port(
    before: str | None, after: str, changed: bool
) -> None:
    plan = diff("blue", want(forward(after)), held(forward(before)))
    expected = ((Live(forward(before), 1), forward(after)),) if changed else ()
    assert plan.change == expected
    assert (len(plan.add), len(plan.remove)) == ((0, 0) if changed else (1, 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(forward(), forward(to="10.0.2.9"), id="another target"),
        pytest.param(forward(), forward(on="eth1"), id="another link"),
        pytest.param(forward(), forward(owner="another"), id="an edited comment"),
        pytest.param(egress(), egress("10.0.2.9"), id="another guest"),
        pytest.param(answerable(), answerable(gateway="10.0.2.9"), id="another gateway"),
    ],
)
def test_the_same_ports_otherwise_are_a_change(before: Rule, after: Rule) -> None:
    assert diff("blue", want(after), held(before)).change == ((Live(before, 1), after),)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(forward(), from_inside(), id="another chain"),
        pytest.param(forward(), forward(to="fd10:0:2::2"), id="another family"),
        pytest.param(egress(), answerable(), id="another kind of source NAT"),
    ],
)
def test_a_rule_elsewhere_is_another_rule(before: Rule, after: Rule) -> None:
    plan = diff("blue", want(after), held(before))
    assert (plan.add, plan.change, handles(plan.remove)) == ((after,), (), [1])


def test_of_many_ranges_each_old_one_is_paired_once() -> None:
    before = [forward("tcp 10-20"), forward("tcp 30-40"), forward("tcp 50-60")]
    after = [forward("tcp 5"), forward("tcp 15-35"), forward("tcp 55"), forward("tcp 90")]
    plan = diff("blue", want(*after), held(*before))
    assert [(str(live.rule.ports), str(rule.ports)) for live, rule in plan.change] == [
        ("10-20", "15-35"),
        ("50-60", "55"),
    ]
    assert [str(rule.ports) for rule in plan.add] == ["5", "90"]
    assert handles(plan.remove) == [2]


def test_the_order_of_a_listing_does_not_matter() -> None:
    wanted = want(*(forward(f"tcp {port}-{port + 2}") for port in range(11, 110, 4)))
    listing = [Live(forward(f"tcp {port}"), port) for port in range(10, 90, 3)]
    shuffled = random.Random(7).sample(listing, len(listing))
    one, other = (
        diff("blue", wanted, Observed(live=tuple(live), chains=ALL_CHAINS, table=True))
        for live in (listing, shuffled)
    )
    assert one == other
    assert one.add
    assert one.change
    assert one.remove


# -------------------------------------------------------------------------------------- pending


WAITING = Desired(pending=(Pending(OWNER, "there is no link yet"),))


def test_the_rules_of_a_pending_machine_stay_as_they_are() -> None:
    plan = diff("blue", WAITING, held(forward(), egress()))
    assert plan.empty
    assert handles(plan.unchanged) == [1, 2]


def test_the_rules_of_a_family_that_waits_stay_and_those_of_the_other_change() -> None:
    v6 = forward("tcp 22", to="fd10:0:2::2")
    desired = Desired(rules=frozenset({egress()}), kept=frozenset({v6}))
    plan = diff("blue", desired, held(forward(), egress(), v6))
    assert (handles(plan.remove), handles(plan.unchanged)) == ([1], [2, 3])


def test_the_rules_of_a_pending_machine_come_back_in_a_table_made_anew() -> None:
    plan = diff("blue", WAITING, held(forward(), unsound="flags"))
    assert plan.table is Table.REMAKE
    assert handles(plan.unchanged) == [1]


def test_a_pending_machine_keeps_nothing_of_another() -> None:
    plan = diff("blue", WAITING, held(forward(owner="another"), egress()))
    assert (handles(plan.remove), handles(plan.unchanged)) == ([1], [2])


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("observed", "changes"),
    [
        pytest.param({"a": "1"}, (), id="already so"),
        pytest.param({"a": "0"}, (SysctlChange("a", "0", "1"),), id="otherwise"),
        pytest.param({}, (SysctlChange("a", None, "1"),), id="not to be asked"),
    ],
)
def test_a_setting_is_changed_where_it_is_not_as_wanted(
    observed: dict[str, str], changes: tuple[SysctlChange, ...]
) -> None:
    desired = Desired(sysctls=frozenset({Sysctl("a", "1")}))
    plan = diff("blue", desired, Observed(sysctls=observed))
    assert plan.sysctls == changes
    assert plan.same_rules
    assert plan.empty is (changes == ())


def test_settings_are_in_order_of_their_names() -> None:
    desired = Desired(sysctls=frozenset(Sysctl(name, "1") for name in "cab"))
    assert [change.name for change in diff("blue", desired, Observed()).sysctls] == ["a", "b", "c"]


def test_a_plan_with_nothing_in_it_is_empty() -> None:
    assert Plan(netns="blue").empty
