"""The codec of iptables: rules to dictionaries, words and steps, and what a worker lists back."""

from __future__ import annotations

from typing import Any

import pytest

from rules.model import Chain, Desired, Family, Foreign, Live, Observed, Rule
from rules.plan import Plan, Table, diff
from rules.values import replace
from rules.xtables import Json, built_in, decode, encode, name, script, statement, steps
from tests.property.strategies import THEIRS, ListedFamilies
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside

V6 = "fd10:0:2::2"
PREROUTING = "PORTRANGER-PREROUTING"
JUMP = "-m comment --comment portranger -j"
RETURN: Json = {"target": "RETURN", "counters": [0, 0]}


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset(rules))


def holding(*rules: Rule) -> ListedFamilies:
    table = ListedFamilies()
    table.commit(planned(table, *rules))
    return table


def planned(table: ListedFamilies, *rules: Rule) -> Plan:
    return diff("blue", want(*rules), table.observed())


def settled(table: ListedFamilies, *rules: Rule) -> bool:
    """Whether carrying out the plan leaves nothing to plan."""
    table.commit(planned(table, *rules))
    return planned(table, *rules).empty


# ---------------------------------------------------------------------------------------- rules

RULES = [
    pytest.param(
        forward("tcp 1000-8000"),
        "-i eth0 -p tcp -m tcp --dport 1000:8000",
        "-j DNAT --to-destination 10.0.2.2",
        {
            "in-interface": "eth0",
            "protocol": "tcp",
            "tcp": {"dport": "1000:8000"},
            "target": {"DNAT": {"to-destination": "10.0.2.2"}},
        },
        id="a range that enters",
    ),
    pytest.param(
        forward("udp 53", to=V6),
        "-i eth0 -p udp -m udp --dport 53",
        f"-j DNAT --to-destination {V6}",
        {
            "in-interface": "eth0",
            "protocol": "udp",
            "udp": {"dport": "53"},
            "target": {"DNAT": {"to-destination": V6}},
        },
        id="one port that enters, over IPv6",
    ),
    pytest.param(
        forward(None),
        "-i eth0",
        "-j DNAT --to-destination 10.0.2.2",
        {"in-interface": "eth0", "target": {"DNAT": {"to-destination": "10.0.2.2"}}},
        id="everything that enters",
    ),
    pytest.param(
        from_inside("tcp 22"),
        "-d 127.0.0.1 -p tcp -m tcp --dport 22",
        "-j DNAT --to-destination 10.0.2.2",
        {
            "dst": "127.0.0.1",
            "protocol": "tcp",
            "tcp": {"dport": "22"},
            "target": {"DNAT": {"to-destination": "10.0.2.2"}},
        },
        id="from inside",
    ),
    pytest.param(
        egress(),
        "-s 10.0.2.2",
        "-j MASQUERADE",
        {"src": "10.0.2.2", "target": "MASQUERADE"},
        id="the guest's own traffic",
    ),
    pytest.param(
        answerable(),
        "-o k6t-eth0 -s 127.0.0.1 -d 10.0.2.2",
        "-j SNAT --to-source 10.0.2.1",
        {
            "out-interface": "k6t-eth0",
            "src": "127.0.0.1",
            "dst": "10.0.2.2",
            "target": {"SNAT": {"to-source": "10.0.2.1"}},
        },
        id="an address that the guest can answer to",
    ),
]


@pytest.mark.parametrize(("rule", "matched", "done", "fields"), RULES)
def test_a_rule_reads_as_iptables_writes_it(
    rule: Rule, matched: str, done: str, fields: Json
) -> None:
    assert statement(rule) == f'{matched} -m comment --comment "{OWNER}" {done}'


@pytest.mark.parametrize(("rule", "matched", "done", "fields"), RULES)
def test_a_rule_is_a_dictionary_as_python_iptables_has_it(
    rule: Rule, matched: str, done: str, fields: Json
) -> None:
    assert encode(rule) == {"comment": {"comment": OWNER}, **fields}


@pytest.mark.parametrize(("rule", "matched", "done", "fields"), RULES)
def test_a_rule_comes_back_from_the_listing_with_its_place_and_counters(
    rule: Rule, matched: str, done: str, fields: Json
) -> None:
    listed = {"comment": {"comment": OWNER}, **fields, "counters": [3, 180]}
    seen = observed(rule.family, rule.chain, RETURN, listed)
    assert seen.live == (Live(rule, 1, packets=3, octets=180),)


def observed(family: Family, chain: Chain, *rules: Json, jumps: int = 1) -> Observed:
    """What is seen where our one chain holds these rules."""
    listing = {"chains": {name(chain): list(rules)}, "jumps": {name(chain): list(range(jumps))}}
    nothing: Json = {"chains": {}, "jumps": {}}
    other = Family.IP if family is Family.IP6 else Family.IP6
    return decode({family: listing, other: nothing})


def listed(**more: object) -> Json:
    """Our rule for tcp 22, as it is listed, with some of it otherwise; None takes it out."""
    fields = encode(forward("tcp 22")) | {"counters": (0, 0)}
    fields |= {key.replace("_", "-"): value for key, value in more.items()}
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("text", ["10.0.2.2", "10.0.2.2/32", "10.0.2.2/255.255.255.255"], ids=str)
def test_a_host_is_a_host_however_it_is_listed(text: str) -> None:
    fields = encode(egress()) | {"src": text, "counters": (0, 0)}
    assert observed(Family.IP, Chain.POSTROUTING, fields).live == (Live(egress(), 0),)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="nothing at all"),
        pytest.param(RETURN, id="another target"),
        pytest.param(listed(counters=None), id="no counters"),
        pytest.param(listed(counters=["a", "b"]), id="counters that are no numbers"),
        pytest.param(listed(counters=7), id="one counter"),
        pytest.param(listed(comment=None), id="no comment"),
        pytest.param(listed(comment={"comment": ["a", "b"]}), id="two comments"),
        pytest.param(listed(comment={"comment": "\x1b[2J"}), id="a comment that is no text"),
        pytest.param(listed(comment="a"), id="a comment without its name"),
        pytest.param(listed(in_interface=["eth0"]), id="a list of links"),
        pytest.param(listed(out_interface="eth0"), id="a link to leave on"),
        pytest.param(listed(src="10.0.0.0/8"), id="a network of sources"),
        pytest.param(listed(src="!10.0.2.9/32"), id="every source but one"),
        pytest.param(listed(src="fd10::2/128"), id="a source of the other family"),
        pytest.param(listed(dst=None, mac={"mac-source": "02:00:00:00:00:01"}), id="more matched"),
        pytest.param(listed(protocol="sctp"), id="another protocol"),
        pytest.param(listed(protocol=["tcp"]), id="a list of protocols"),
        pytest.param(listed(protocol="udp"), id="a protocol without its ports"),
        pytest.param(listed(tcp={"dport": "22", "sport": "1"}), id="a source port"),
        pytest.param(listed(tcp={"dport": "!22"}), id="every port but one"),
        pytest.param(listed(tcp={"dport": "22:22"}), id="a range of one, which nobody lists"),
        pytest.param(listed(tcp={"dport": "30:20"}), id="a range that ends before it begins"),
        pytest.param(listed(tcp={"dport": 22}), id="a port as a number"),
        pytest.param(listed(tcp="22"), id="ports without their name"),
        pytest.param(listed(target=None), id="no target"),
        pytest.param(listed(target="MASQUERADE"), id="masquerade for what enters"),
        pytest.param(listed(target={"SNAT": {"to-source": "10.0.2.2"}}), id="source NAT there"),
        pytest.param(
            listed(target={"DNAT": {"to-destination": "10.0.2.2", "random": ""}}),
            id="a target with an option",
        ),
        pytest.param(
            listed(target={"DNAT": {"to-destination": "10.0.2.2-10.0.2.9"}}),
            id="a range of targets",
        ),
        pytest.param(
            listed(target={"DNAT": {"to-destination": V6}}), id="a target of the other family"
        ),
        pytest.param(listed(goto="FOREIGN"), id="something that we do not know"),
    ],
)
def test_what_we_could_not_have_written_is_foreign(fields: Json) -> None:
    seen = observed(Family.IP, Chain.PREROUTING, fields)
    assert seen.live == ()
    (foreign,) = seen.foreign
    assert (foreign.chain, foreign.handle) == ("ip PORTRANGER-PREROUTING", 0)
    assert foreign.text


def test_a_foreign_rule_is_told_by_what_is_in_it() -> None:
    (foreign,) = observed(Family.IP, Chain.PREROUTING, listed(goto="FOREIGN")).foreign
    assert foreign.text == "comment goto in-interface protocol target tcp"
    (empty,) = observed(Family.IP, Chain.PREROUTING, {"counters": [0, 0]}).foreign
    assert empty.text == "an empty rule"


def test_a_chain_with_our_prefix_that_is_not_ours_is_passed_over() -> None:
    listing = {"chains": {"PORTRANGER-ELSEWHERE": [RETURN]}, "jumps": {}}
    assert decode({Family.IP: listing, Family.IP6: listing}) == Observed()


# ----------------------------------------------------------------------------- chains and jumps


def test_chains_are_named_for_the_place_they_hang_at() -> None:
    assert [(name(chain), built_in(chain)) for chain in Chain] == [
        ("PORTRANGER-PREROUTING", "PREROUTING"),
        ("PORTRANGER-OUTPUT", "OUTPUT"),
        ("PORTRANGER-POSTROUTING", "POSTROUTING"),
    ]


def test_a_first_plan_makes_chains_then_rules_in_each_family_that_has_some() -> None:
    plan = diff("blue", want(forward(), egress(), forward(to=V6)), Observed())
    assert steps(plan, Family.IP) == [
        ["ensure", PREROUTING, "PREROUTING"],
        ["ensure", "PORTRANGER-POSTROUTING", "POSTROUTING"],
        ["append", PREROUTING, encode(forward())],
        ["append", "PORTRANGER-POSTROUTING", encode(egress())],
    ]
    assert steps(plan, Family.IP6) == [
        ["ensure", PREROUTING, "PREROUTING"],
        ["append", PREROUTING, encode(forward(to=V6))],
    ]


def test_where_a_family_has_nothing_to_do_nothing_is_asked_of_it() -> None:
    table = holding(forward(), forward(to=V6))
    plan = planned(table, forward("tcp 22-23"), forward(to=V6))
    assert steps(plan, Family.IP)
    assert steps(plan, Family.IP6) == []
    left_over = replace(planned(table, forward(), forward(to=V6)), leftovers=(Live(egress(), 1),))
    assert [steps(left_over, family) for family in Family] == [[], []]


def test_a_change_deletes_from_the_last_place_on_before_it_appends() -> None:
    table = holding(forward("tcp 1"), forward("tcp 5"), forward("tcp 9"), egress())
    plan = planned(table, forward("tcp 5-6"), egress())
    assert steps(plan, Family.IP) == [
        ["delete", PREROUTING, 2],
        ["delete", PREROUTING, 1],
        ["delete", PREROUTING, 0],
        ["ensure", PREROUTING, "PREROUTING"],
        ["append", PREROUTING, encode(forward("tcp 5-6"))],
    ]
    assert settled(table, forward("tcp 5-6"), egress())


def test_nothing_wanted_drops_everything_of_ours_and_nothing_else() -> None:
    table = holding(forward(), egress(), forward(to=V6))
    plan = planned(table)
    assert plan.table is Table.DELETE
    assert [steps(plan, family) for family in Family] == [[["drop"]], [["drop"]]]
    table.commit(plan)
    assert table.lists() == [[THEIRS, THEIRS]] * 6
    assert table.observed() == Observed()


def test_a_second_jump_is_removed_and_the_first_stays() -> None:
    table = holding(forward())
    table[Family.IP].chains["PREROUTING"].append(PREROUTING)
    seen = table.observed()
    assert seen.foreign == (Foreign("ip PREROUTING", 3, "a second jump to our chain"),)
    assert settled(table, forward())
    assert table[Family.IP].chains["PREROUTING"] == [PREROUTING, THEIRS, THEIRS]


def test_a_jump_that_is_missing_is_put_back_in_its_family_alone() -> None:
    table = holding(forward(), forward(to=V6))
    table[Family.IP].chains["PREROUTING"].remove(PREROUTING)
    plan = planned(table, forward(), forward(to=V6))
    assert (plan.chains, plan.add, plan.remove) == ((Chain.PREROUTING,), (), ())
    assert not plan.same_rules
    assert settled(table, forward(), forward(to=V6))
    for family in Family:
        assert table[family].chains["PREROUTING"] == [PREROUTING, THEIRS, THEIRS]


def test_a_jump_put_back_beside_a_removal_moves_no_place() -> None:
    table = holding(forward("tcp 1"), forward("tcp 5"))
    table[Family.IP].chains["PREROUTING"].remove(PREROUTING)
    table[Family.IP].chains[PREROUTING].insert(0, dict(RETURN))
    assert settled(table, forward("tcp 5"))
    assert [live.rule for live in table.observed().live] == [forward("tcp 5")]


def test_an_empty_chain_that_nothing_leads_to_is_no_difference() -> None:
    table = holding(forward(), forward(to=V6))
    assert settled(table, forward())  # which leaves the chain of IPv6 empty
    table[Family.IP6].chains["PREROUTING"].remove(PREROUTING)
    assert planned(table, forward()).empty
    assert settled(table, forward(), forward(to=V6))
    assert settled(table)
    assert table.lists() == [[THEIRS, THEIRS]] * 6


def test_empty_chains_alone_are_ours_to_remove() -> None:
    table = holding(forward())
    table[Family.IP].chains[PREROUTING].clear()
    table[Family.IP].chains["PREROUTING"].remove(PREROUTING)
    observed = table.observed()
    assert (observed.table, observed.live, observed.chains) == (True, (), frozenset())
    assert settled(table)


def test_what_a_pending_machine_has_stays_in_its_place() -> None:
    table = holding(forward(), egress(owner="another"))
    desired = Desired(kept=frozenset({forward()}))
    plan = diff("blue", desired, table.observed())
    assert steps(plan, Family.IP) == [["delete", "PORTRANGER-POSTROUTING", 0]]


# --------------------------------------------------------------------------------------- script


def test_a_script_serves_both_families() -> None:
    plan = diff("blue", want(forward(), forward(to=V6)), Observed())
    assert script(plan).splitlines() == [
        "*nat",
        f"-4 -N {PREROUTING}",
        f"-4 -I PREROUTING {JUMP} {PREROUTING}",
        f"-4 -A {PREROUTING} {statement(forward())}",
        f"-6 -N {PREROUTING}",
        f"-6 -I PREROUTING {JUMP} {PREROUTING}",
        f"-6 -A {PREROUTING} {statement(forward(to=V6))}",
        "COMMIT",
    ]


def test_a_script_counts_places_from_one() -> None:
    table = holding(forward("tcp 1"), forward("tcp 5"), forward("tcp 9"))
    plan = planned(table, forward("tcp 5-6"), forward("tcp 9"))
    assert script(plan).splitlines() == [
        "*nat",
        f"-4 -D {PREROUTING} 2",
        f"-4 -D {PREROUTING} 1",
        f"-4 -A {PREROUTING} {statement(forward('tcp 5-6'))}",
        "COMMIT",
    ]


def test_a_script_puts_a_missing_jump_back() -> None:
    table = holding(forward())
    table[Family.IP].chains["PREROUTING"].remove(PREROUTING)
    assert script(planned(table, forward())).splitlines() == [
        "*nat",
        f"-4 -I PREROUTING {JUMP} {PREROUTING}",
        "COMMIT",
    ]


def test_a_script_makes_no_chain_that_a_foreign_rule_stands_in() -> None:
    table = holding(forward())
    table[Family.IP].chains[PREROUTING][:] = [dict(RETURN)]
    assert script(planned(table, forward())).splitlines() == [
        "*nat",
        f"-4 -D {PREROUTING} 1",
        f"-4 -A {PREROUTING} {statement(forward())}",
        "COMMIT",
    ]


def test_a_script_that_removes_everything_leaves_no_jump_and_no_chain() -> None:
    table = holding(forward(), egress(), forward(to=V6))
    table[Family.IP].chains["PREROUTING"].append(PREROUTING)
    plan = planned(table)
    assert script(plan).splitlines() == [
        "*nat",
        "-4 -D PREROUTING 4",
        f"-4 -D PREROUTING {JUMP} {PREROUTING}",
        f"-4 -F {PREROUTING}",
        f"-4 -X {PREROUTING}",
        f"-4 -D POSTROUTING {JUMP} PORTRANGER-POSTROUTING",
        "-4 -F PORTRANGER-POSTROUTING",
        "-4 -X PORTRANGER-POSTROUTING",
        f"-6 -D PREROUTING {JUMP} {PREROUTING}",
        f"-6 -F {PREROUTING}",
        f"-6 -X {PREROUTING}",
        "COMMIT",
    ]
    table.restore(plan)
    assert table.lists() == [[THEIRS, THEIRS]] * 6


def test_nothing_to_do_is_an_empty_script() -> None:
    table = holding(forward())
    assert script(planned(table, forward())) == "*nat\nCOMMIT\n"


def test_the_lists_stand_for_the_worker() -> None:
    # A place that holds somebody else's rule may never be deleted: the lists see to it.
    due: list[Any] = ["delete", "PREROUTING", 0]
    with pytest.raises(AssertionError):
        holding()[Family.IP].run([due])
