"""The difference: what is added, changed, removed and left, and what becomes of the table."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from ipaddress import ip_address, ip_network

import pytest

from rules.model import (
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Lookup,
    Members,
    Observed,
    Peers,
    Pending,
    Protocol,
    Rule,
    Sysctl,
)
from rules.plan import Plan, SysctlChange, Table, diff
from rules.values import replace
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside, ports

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


# ----------------------------------------------------------------------------------------- sets

WEB, MAIL = Peers(Family.IP, "aa"), Peers(Family.IP, "bb")
GUEST, NEIGHBOUR = ip_address("10.0.2.2"), ip_address("10.0.2.9")
RESUMING = Rule(chain=Chain.FORWARD, family=Family.IP, owner=OWNER, accepts=True)
GUARD = Rule(chain=Chain.FORWARD, family=Family.IP, owner=OWNER, destination=GUEST)
GATE = replace(
    GUARD,
    owner="NetworkPolicy/default/web",
    accepts=True,
    peers=WEB,
    protocol=Protocol.TCP,
    ports=ports("80-90"),
)
FENCE = (RESUMING, GATE, GUARD)


def some(*texts: str) -> Members:
    return frozenset(map(ip_network, texts))


def fenced(*rules: Rule, **sets: Members) -> Desired:
    """A set is called by its key."""
    return replace(want(*rules), sets={Peers(Family.IP, key): one for key, one in sets.items()})


def holding(*rules: Rule, **sets: Members) -> Observed:
    return replace(held(*rules), sets={Peers(Family.IP, key): one for key, one in sets.items()})


def test_the_same_rules_and_sets_are_nothing_to_do() -> None:
    plan = diff("blue", fenced(*FENCE, aa=some("10.1.0.1")), holding(*FENCE, aa=some("10.1.0.1")))
    assert plan.empty
    assert plan.only_adds


@pytest.mark.parametrize(
    ("before", "after", "only_adds"),
    [
        pytest.param(some(), some("10.1.0.1"), True, id="who comes"),
        pytest.param(some("10.1.0.1"), some(), False, id="who goes"),
        pytest.param(some("10.1.0.1"), some("10.1.0.2"), False, id="who comes for another"),
        pytest.param(some("10.1.0.0/31"), some("10.1.0.0/30"), False, id="a network that grows"),
    ],
)
def test_a_set_alone_is_a_difference(before: Members, after: Members, only_adds: bool) -> None:
    plan = diff("blue", fenced(*FENCE, aa=after), holding(*FENCE, aa=before))
    assert (plan.add, plan.change, plan.remove, plan.chains) == ((), (), (), ())
    assert not plan.same_rules
    assert not plan.empty
    assert (plan.sets_before, plan.sets) == ({WEB: before}, {WEB: after})
    assert plan.only_adds is only_adds
    assert len(plan.unchanged) == 3


def test_a_set_that_no_rule_names_goes() -> None:
    plan = diff("blue", fenced(*FENCE, aa=some()), holding(*FENCE, aa=some(), bb=some("10.1.0.1")))
    assert not plan.same_rules
    assert not plan.only_adds
    assert plan.sets == {WEB: some()}


def test_a_first_table_has_the_sets_that_are_wanted() -> None:
    plan = diff("blue", fenced(*FENCE, aa=some("10.1.0.1")), Observed(mapped={}))
    assert (plan.table, plan.chains) == (Table.CREATE, (Chain.FORWARD,))
    assert plan.sets == {WEB: some("10.1.0.1")}
    assert plan.only_adds


def test_other_peers_are_another_rule_and_other_ports_a_change() -> None:
    other = replace(GATE, peers=MAIL)
    desired = fenced(RESUMING, other, GUARD, bb=some())
    plan = diff("blue", desired, holding(*FENCE, aa=some()))
    assert (plan.add, handles(plan.remove), plan.change) == ((other,), [2], ())
    wider = replace(GATE, ports=ports("80-99"))
    desired = fenced(RESUMING, wider, GUARD, aa=some())
    plan = diff("blue", desired, holding(*FENCE, aa=some()))
    assert (plan.add, plan.remove) == ((), ())
    assert plan.change == ((Live(GATE, 2), wider),)


def test_what_accepts_never_changes_into_what_drops() -> None:
    turned = replace(GUARD, accepts=True)
    plan = diff("blue", fenced(RESUMING, GUARD), holding(RESUMING, turned))
    assert (plan.add, handles(plan.remove), plan.change) == ((GUARD,), [2], ())


def test_where_it_is_not_known_what_is_allowed_filters_and_their_sets_stay() -> None:
    before = holding(*FENCE, forward(), aa=some("10.1.0.1"), bb=some())
    plan = diff("blue", Desired(filters_stay=True), before)
    assert handles(plan.unchanged) == [1, 2, 3]
    assert handles(plan.remove) == [4]
    assert plan.sets == {WEB: some("10.1.0.1")}
    assert plan.table is Table.KEEP


def test_what_stays_is_put_back_with_its_set_into_a_table_made_anew() -> None:
    before = replace(
        holding(*FENCE, aa=some("10.1.0.1")), unsound="flags", chains=frozenset(), mapped={}
    )
    plan = diff("blue", Desired(filters_stay=True), before)
    assert plan.table is Table.REMAKE
    assert plan.sets == {WEB: some("10.1.0.1")}


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        pytest.param((), FENCE, id="nobody known is there"),
        pytest.param((forward(),), (GATE,), id="its machine is known, and has no fence"),
        pytest.param(
            (RESUMING, GUARD), (RESUMING, GUARD), id="its machine has a fence without a gate"
        ),
        pytest.param(
            (
                replace(RESUMING, owner="b"),
                replace(GUARD, owner="b", destination=NEIGHBOUR),
                replace(GATE, destination=NEIGHBOUR, peers=None),
            ),
            (GATE, GUARD),
            id="another machine has a fence, with a gate of the same policy",
        ),
        pytest.param(
            (replace(GUARD, owner="b", destination=None, source=GUEST),),
            FENCE,
            id="a fence at the other end",
        ),
    ],
)
def test_of_filters_that_nobody_claims_those_stay_that_are_in_nobodys_way(
    rules: tuple[Rule, ...], left: tuple[Rule, ...]
) -> None:
    """Else a machine whose manifest cannot be read would be open."""
    desired = replace(fenced(*rules), unclaimed_stay=True)
    plan = diff("blue", desired, holding(*FENCE, aa=some("10.1.0.1")))
    assert {live.rule for live in plan.unchanged} == set(left)
    assert plan.sets == ({WEB: some("10.1.0.1")} if GATE in left else {})


def test_thousands_that_nobody_claims_are_found_to_be_in_nobodys_way_soon() -> None:
    """At each look, as long as one manifest cannot be read: a minute, where each is compared with
    everything that is wanted."""
    wanted = frozenset(forward(f"tcp {port}", owner=f"a{port}") for port in range(1, 6001, 2))
    others = [forward(f"tcp {port}", owner=f"b{port}") for port in range(2, 6001, 2)]
    begun = time.process_time()
    plan = diff("blue", Desired(rules=wanted, unclaimed_stay=True), held(*wanted, *others))
    assert time.process_time() - begun < 5
    assert (len(plan.unchanged), plan.remove) == (6000, ())


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


def test_a_rule_that_pending_machines_share_stays() -> None:
    shared = Rule(chain=Chain.EGRESS, family=Family.IP, owner="a/x,b/x", interface="k6t-net1")
    held = Observed(live=(Live(shared, 1),), chains=frozenset(Chain), table=True)
    both = Desired(pending=(Pending("a/x", "no link"), Pending("b/x", "no link")))
    assert diff("pod", both, held).empty
    assert diff("pod", replace(both, pending=both.pending[:1]), held).remove


def test_a_pending_machine_keeps_nothing_of_another() -> None:
    plan = diff("blue", WAITING, held(forward(owner="another"), egress()))
    assert (handles(plan.remove), handles(plan.unchanged)) == ([1], [2])


@pytest.mark.parametrize(
    ("wanted", "stays"),
    [
        pytest.param("tcp 20-21", True, id="ports below"),
        pytest.param("tcp 20-22", False, id="the first of its ports"),
        pytest.param("tcp 25", False, id="a port of its"),
        pytest.param("tcp 29-30", False, id="the last of its ports"),
        pytest.param("tcp 30", True, id="ports above"),
        pytest.param("tcp 1-100", False, id="more than its ports"),
        pytest.param("udp 25", True, id="ports of another protocol"),
    ],
)
def test_what_waits_gives_way_to_who_wants_its_ports(wanted: str, stays: bool) -> None:
    waiting = forward("tcp 22-29")
    others = (forward("tcp 5", owner="b"), forward("tcp 90", owner="b"))
    for desired in (WAITING, Desired(kept=frozenset({waiting}))):
        rules = frozenset({*others, forward(wanted, owner="b")})
        plan = diff("blue", replace(desired, rules=rules), held(waiting))
        assert (handles(plan.unchanged) == [1]) is stays
        assert len(plan.add) + len(plan.change) == 3


def test_what_waits_does_not_give_way_to_who_wants_the_same_ports_elsewhere() -> None:
    rules = frozenset({forward(on="eth1", owner="b"), from_inside(owner="b")})
    plan = diff("blue", replace(WAITING, rules=rules), held(forward()))
    assert (handles(plan.unchanged), len(plan.add)) == ([1], 2)


# --------------------------------------------------------------------------------------- shapes

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
CROWD = [forward(f"tcp {port}-{port + 7}") for port in range(1000, 1400, 10)]


def gathered(*elements: Rule, rules: tuple[Rule, ...] = ()) -> Observed:
    """A table with these ranges in a map."""
    live = (*held(*rules).live, *(Live(rule, 0) for rule in elements))
    return replace(held(), live=live, mapped={ENTERING: 77})


def scattered(*rules: Rule) -> Observed:
    """A table with these ranges as rules, where they could be in a map."""
    return replace(held(*rules), mapped={})


@pytest.mark.parametrize(
    ("before", "after", "maps", "gathering", "spreading"),
    [
        pytest.param(scattered(*CROWD[:6]), 7, False, False, False, id="6 to 7 rules"),
        pytest.param(scattered(*CROWD[:7]), 8, True, True, False, id="7 rules to 8 elements"),
        pytest.param(scattered(), 40, True, True, False, id="nothing to 40 elements"),
        pytest.param(gathered(*CROWD[:8]), 9, True, False, False, id="8 to 9 elements"),
        pytest.param(gathered(*CROWD[:8]), 7, True, False, False, id="8 to 7 elements"),
        pytest.param(gathered(*CROWD[:8]), 5, True, False, False, id="8 to 5 elements"),
        pytest.param(gathered(*CROWD[:5]), 4, False, False, True, id="5 elements to 4 rules"),
        pytest.param(gathered(*CROWD[:5]), 1, False, False, True, id="5 elements to a rule"),
        pytest.param(gathered(), 5, True, False, False, id="an empty map to 5 elements"),
        pytest.param(gathered(), 4, False, False, True, id="an empty map to 4 rules"),
        pytest.param(scattered(*CROWD), 40, True, True, False, id="40 rules to 40 elements"),
        pytest.param(
            replace(gathered(*CROWD[:6]), unsound="flags", mapped={}),
            6,
            False,
            False,
            False,
            id="6 elements to 6 rules in a table made anew",
        ),
        pytest.param(held(*CROWD[:7]), 40, False, False, False, id="40 rules without maps"),
    ],
)
def test_ranges_are_held(
    before: Observed, after: int, maps: bool, gathering: bool, spreading: bool
) -> None:
    plan = diff("blue", want(*CROWD[:after]), before)
    assert plan.maps == (frozenset({ENTERING}) if maps else frozenset())
    assert plan.gathering == ([ENTERING] if gathering else [])
    assert plan.spreading == ([ENTERING] if spreading else [])


def test_another_shape_alone_is_a_difference() -> None:
    many = want(*CROWD)
    assert diff("blue", many, gathered(*CROWD)).empty
    reshaped = diff("blue", many, scattered(*CROWD))
    assert not reshaped.same_rules
    assert (reshaped.add, reshaped.change, reshaped.remove) == ((), (), ())
    assert len(reshaped.unchanged) == len(CROWD)


def test_a_copy_counts_once() -> None:
    few = CROWD[:7]
    plan = diff("blue", want(*few), scattered(*few, *few))
    assert (plan.maps, len(plan.remove)) == (frozenset(), 7)


def test_what_waits_counts_with_what_is_wanted() -> None:
    waiting = [replace(rule, owner="away") for rule in CROWD[:10]]
    desired = Desired(rules=frozenset(CROWD[10:16]), pending=(Pending("away", "no link"),))
    plan = diff("blue", desired, scattered(*waiting))
    assert (plan.gathering, len(plan.add), len(plan.unchanged)) == ([ENTERING], 6, 10)


def test_only_what_changes_of_a_map_is_in_a_plan() -> None:
    plan = diff("blue", want(*CROWD[1:], forward("tcp 1000-1008")), gathered(*CROWD))
    assert (plan.add, plan.remove) == ((), ())
    assert plan.change == ((Live(CROWD[0], 0), forward("tcp 1000-1008")),)
    assert len(plan.unchanged) == len(CROWD) - 1


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


@pytest.mark.parametrize(
    ("wanted", "observed", "expected"),
    [
        pytest.param(want(egress()), Observed(mapped={}), True, id="a first table"),
        pytest.param(want(egress(), forward()), scattered(egress()), True, id="a rule more"),
        pytest.param(want(egress()), scattered(egress(), forward()), False, id="a rule less"),
        pytest.param(want(egress()), held(egress(), unsound="flags"), False, id="a table anew"),
        pytest.param(want(), scattered(egress()), False, id="the end of the table"),
        pytest.param(want(*CROWD), scattered(*CROWD[:3]), False, id="rules become a map"),
        pytest.param(want(*CROWD), Observed(mapped={}), True, id="a first map"),
    ],
)
def test_a_plan_only_adds(wanted: Desired, observed: Observed, expected: bool) -> None:
    assert diff("blue", wanted, observed).only_adds is expected
