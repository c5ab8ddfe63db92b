"""Plans and rules as text and JSON."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, ip_network
from typing import Any

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
    Protocol,
    Rule,
    Sysctl,
)
from rules.plan import Plan, SysctlChange, Table, diff
from rules.ports import PortRange
from rules.problems import OddNumeral, Problem
from rules.render import plan_json, plan_text, problem_json, summary
from rules.values import replace
from rules.words import live_text, rule_json, rule_words
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside
from tests.unit.test_plan import FENCE, GATE, GUARD, GUEST, RESUMING, fenced, holding, some

ALL_CHAINS = frozenset(Chain)


def plan(*wanted: Rule, held: tuple[Rule, ...] = (), foreign: tuple[Foreign, ...] = ()) -> Plan:
    """From these rules to those."""
    live = tuple(Live(rule, number) for number, rule in enumerate(held, 1))
    observed = Observed(live=live, foreign=foreign, chains=ALL_CHAINS, table=bool(live or foreign))
    return diff("blue", Desired(rules=frozenset(wanted)), observed)


# ----------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        pytest.param(
            forward("tcp 1000-8000"),
            "ip prerouting | tcp 1000-8000 on eth0 | -> 10.0.2.2",
            id="a range that enters",
        ),
        pytest.param(
            forward(None, to="fd10:0:2::2"),
            "ip6 prerouting | everything on eth0 | -> fd10:0:2::2",
            id="everything that enters",
        ),
        pytest.param(
            from_inside("udp 53"),
            "ip output | udp 53 to 127.0.0.1 | -> 10.0.2.2",
            id="from inside",
        ),
        pytest.param(
            egress(),
            "ip postrouting | everything from 10.0.2.2 | -> masquerade",
            id="the guest's own traffic",
        ),
        pytest.param(
            answerable(),
            "ip postrouting | everything from 127.0.0.1 to 10.0.2.2 via k6t-eth0"
            " | -> from 10.0.2.1",
            id="an address that the guest can answer to",
        ),
    ],
)
def test_a_rule_reads(rule: Rule, words: str) -> None:
    family, chain, what, target, owner = rule_words(rule)
    assert f"{family} {chain} | {what} | {target}" == words
    assert owner == OWNER


@pytest.mark.parametrize(
    ("rule", "words", "also"),
    [
        pytest.param(
            RESUMING,
            "what belongs to open flows (ingress) | -> accept",
            {"action": "accept", "direction": "ingress"},
            id="what belongs to open flows",
        ),
        pytest.param(
            GUARD,
            "everything to 10.0.2.2 from anybody | -> drop",
            {"action": "drop", "direction": "ingress", "destination": "10.0.2.2"},
            id="a guard",
        ),
        pytest.param(
            GATE,
            "tcp 80-90 to 10.0.2.2 from peers-ip-aa | -> accept",
            {
                "action": "accept",
                "direction": "ingress",
                "destination": "10.0.2.2",
                "protocol": "tcp",
                "ports": "80-90",
                "peers": "peers-ip-aa",
            },
            id="a gate",
        ),
        pytest.param(
            replace(GATE, chain=Chain.EGRESS, destination=None, source=GUEST, peers=None),
            "tcp 80-90 from 10.0.2.2 to anybody | -> accept",
            {
                "action": "accept",
                "direction": "egress",
                "source": "10.0.2.2",
                "protocol": "tcp",
                "ports": "80-90",
            },
            id="a gate for what leaves",
        ),
        pytest.param(
            replace(GATE, peers=None, peer=ip_network("10.1.0.0/16")),
            "tcp 80-90 to 10.0.2.2 from 10.1.0.0/16 | -> accept",
            {
                "action": "accept",
                "direction": "ingress",
                "destination": "10.0.2.2",
                "protocol": "tcp",
                "ports": "80-90",
                "peers": "10.1.0.0/16",
            },
            id="a gate where there are no sets",
        ),
    ],
)
def test_a_filter_reads(rule: Rule, words: str, also: dict[str, str]) -> None:
    family, chain, *rest, owner = rule_words(rule)
    assert (family, chain, " | ".join(rest), owner) == ("ip", "forward", words, rule.owner)
    assert rule_json(rule) == {"owner": rule.owner, "chain": "forward", "family": "ip", **also}


# ----------------------------------------------------------------------------------------- sets


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(None, some("10.1.0.1"), "+ set peers-ip-aa: 10.1.0.1/32", id="new"),
        pytest.param(None, some(), "+ set peers-ip-aa: nobody", id="new and empty"),
        pytest.param(
            some("10.1.0.1"),
            some("10.1.0.1", "10.1.0.9"),
            "~ set peers-ip-aa: + 10.1.0.9/32",
            id="somebody comes",
        ),
        pytest.param(
            some("10.1.0.9", "10.1.0.1"),
            some(),
            "~ set peers-ip-aa: - 10.1.0.1/32, 10.1.0.9/32",
            id="all go",
        ),
        pytest.param(
            some("10.1.0.0/31"),
            some("10.1.0.0"),
            "~ set peers-ip-aa: + 10.1.0.0/32; - 10.1.0.0/31",
            id="a network becomes smaller",
        ),
        pytest.param(
            some(),
            frozenset(ip_network(f"10.1.{number}.1") for number in range(12)),
            "~ set peers-ip-aa: + "
            + ", ".join(f"10.1.{number}.1/32" for number in range(10))
            + " and 2 more",
            id="a crowd comes",
        ),
    ],
)
def test_a_set_that_changes_is_a_line_and_a_change(
    before: Members | None, after: Members, said: str
) -> None:
    there = holding(*FENCE) if before is None else holding(*FENCE, aa=before)
    made = diff("blue", fenced(*FENCE, aa=after), there)
    assert plan_text(made) == ["namespace blue", f"  {said}"]
    (change,) = changes_of(made)
    assert change == {
        "action": "add" if before is None else "change",
        "netns": "blue",
        "kind": "set",
        "before": None if before is None else set_json(before),
        "after": set_json(after),
    }
    word = "1 to add, 0 to change" if before is None else "0 to add, 1 to change"
    assert summary([made]) == f"Plan: {word}, 0 to remove; 3 unchanged."


def set_json(members: Members) -> dict[str, object]:
    ordered = sorted(members, key=lambda one: (one.network_address, one.prefixlen))
    return {"name": "peers-ip-aa", "members": [str(one) for one in ordered]}


def changes_of(made: Plan) -> list[Any]:
    found: Any = plan_json([made], [])["changes"]
    json.dumps(found)
    return list(found)


def test_a_set_that_goes_is_told_also_where_the_table_goes() -> None:
    made = diff("blue", fenced(RESUMING, GUARD), holding(*FENCE, aa=some("10.1.0.1")))
    assert plan_text(made)[-1] == "  - set peers-ip-aa"
    gone = diff("blue", Desired(), holding(*FENCE, aa=some("10.1.0.1")))
    assert plan_text(gone)[-1] == "  - set peers-ip-aa"
    for one in (made, gone):
        assert changes_of(one)[-1] == {
            "action": "remove",
            "netns": "blue",
            "kind": "set",
            "before": set_json(some("10.1.0.1")),
            "after": None,
        }


def test_other_peers_are_told_as_what_they_were() -> None:
    other = replace(GATE, peer=ip_network("10.1.0.0/16"), peers=None)
    line = plan_text(plan(replace(other, peer=ip_network("10.2.0.0/16")), held=(other,)))[1]
    assert line.startswith("  ~ ip  forward  tcp 80-90 to 10.0.2.2 from 10.2.0.0/16")
    assert line.endswith("(was 10.1.0.0/16)")


def test_a_plan_has_a_heading_and_aligned_columns() -> None:
    assert plan_text(plan(forward("tcp 22"), forward("tcp 1000-8000"), egress())) == [
        "namespace blue",
        f"  + ip  prerouting   tcp 22 on eth0            -> 10.0.2.2    {OWNER}",
        f"  + ip  prerouting   tcp 1000-8000 on eth0     -> 10.0.2.2    {OWNER}",
        f"  + ip  postrouting  everything from 10.0.2.2  -> masquerade  {OWNER}",
    ]


def test_every_action_has_its_glyph_and_strangers_come_last() -> None:
    lines = plan_text(
        plan(
            forward("tcp 22-23"),
            forward("udp 53"),
            held=(forward("tcp 22"), egress()),
            foreign=(Foreign("output", 9, "accept"),),
        )
    )
    assert [line.split()[0] for line in lines[1:]] == ["~", "+", "-", "-"]
    assert lines[-1] == "  - a foreign rule in output: accept"


@pytest.mark.parametrize(
    ("before", "after", "was"),
    [
        pytest.param(forward("tcp 22"), forward("tcp 22-23"), "22", id="other ports"),
        pytest.param(forward(to="10.0.2.9"), forward(), "10.0.2.9", id="another target"),
        pytest.param(forward(on=None), forward(), "any link", id="every link"),
        pytest.param(forward(on="eth1"), forward(), "eth1", id="another link"),
        pytest.param(egress("10.0.2.9"), egress(), "10.0.2.9", id="another source"),
        pytest.param(answerable("10.0.2.9"), answerable(), "10.0.2.9", id="another destination"),
        pytest.param(forward(owner="mine"), forward(), "mine", id="another owner"),
        pytest.param(
            forward("tcp 22", to="10.0.2.9", owner="mine"),
            forward("tcp 22-23"),
            "22, 10.0.2.9, mine",
            id="several things",
        ),
    ],
)
def test_a_changed_rule_says_what_it_was(before: Rule, after: Rule, was: str) -> None:
    (_, line) = plan_text(plan(after, held=(before,)))
    assert line.lstrip().startswith("~ ")
    assert line.endswith(f"  (was {was})")


def test_settings_are_shown_with_what_they_were() -> None:
    sysctls = (SysctlChange("a", "0", "1"), SysctlChange("b", None, "1"))
    assert plan_text(Plan(netns="blue", sysctls=sysctls)) == [
        "namespace blue",
        "  ~ sysctl a 0 -> 1",
        "  ~ sysctl b ? -> 1",
    ]


def test_a_table_made_anew_says_why_before_everything_else() -> None:
    remade = Plan(
        netns="blue",
        table=Table.REMAKE,
        unsound="somebody set flags on the table",
        sysctls=(SysctlChange("a", "0", "1"),),
    )
    assert plan_text(remade)[1] == (
        "  ~ table inet portranger is made anew: somebody set flags on the table"
    )


def test_a_chain_put_back_is_told_where_its_rules_stay() -> None:
    mended = Plan(netns="blue", chains=(Chain.OUTPUT,), unchanged=(Live(from_inside(), 1),))
    assert plan_text(mended) == ["namespace blue", "  ~ chain output is put back"]
    assert summary([mended]) == "Plan: 0 to add, 1 to change, 0 to remove; 1 unchanged."
    assert plan_json([mended], [])["changes"] == [
        {
            "action": "change",
            "netns": "blue",
            "kind": "chain",
            "before": {},
            "after": {"chain": "output"},
        }
    ]


@pytest.mark.parametrize("table", [Table.CREATE, Table.KEEP, Table.REMAKE])
def test_a_chain_that_comes_with_its_rules_is_not_told(table: Table) -> None:
    made = Plan(netns="blue", table=table, chains=(Chain.PREROUTING,), add=(forward(),))
    assert not any("put back" in line for line in plan_text(made))


def test_what_the_other_backend_holds_is_told_last() -> None:
    moved = Plan(
        netns="blue",
        table=Table.CREATE,
        chains=(Chain.POSTROUTING,),
        add=(egress(),),
        leftovers=(Live(forward(), 4), Foreign("output", 9, "accept")),
    )
    first, second, third = plan_text(moved)[1:]
    assert first.startswith("  + ip  postrouting")
    assert second.startswith("  - ip ")
    assert second.endswith(f"{OWNER}  (left over in the other backend)")
    assert third.split("  ")[1] == "- a foreign rule in output: accept"
    assert third.endswith("(left over in the other backend)")
    assert summary([moved]) == "Plan: 1 to add, 0 to change, 2 to remove; 0 unchanged."
    common = {"action": "remove", "netns": "blue", "kind": "leftover", "after": None}
    changes = plan_json([moved], [])["changes"]
    assert isinstance(changes, list)
    assert changes[1:] == [
        {**common, "before": rule_json(forward())},
        {**common, "before": {"owner": None, "chain": "output", "foreign": "accept"}},
    ]


def test_nothing_to_do_is_nothing_to_read() -> None:
    assert plan_text(plan(egress(), held=(egress(),))) == []


def test_the_removal_of_an_empty_table_is_told() -> None:
    removal = diff("blue", Desired(), Observed(table=True))
    assert plan_text(removal) == ["namespace blue", "  - an empty table"]
    assert summary([removal]) == "Plan: 0 to add, 0 to change, 1 to remove; 0 unchanged."


def test_the_removal_of_a_table_with_rules_is_that_of_its_rules() -> None:
    removal = plan(held=(forward(), egress()))
    assert removal.table is Table.DELETE
    assert [line.split()[0] for line in plan_text(removal)[1:]] == ["-", "-"]
    assert summary([removal]) == "Plan: 0 to add, 0 to change, 2 to remove; 0 unchanged."


@pytest.mark.parametrize(
    ("plans", "line"),
    [
        pytest.param([], "No changes. 0 rules match.", id="no namespace"),
        pytest.param(
            [plan(egress(), held=(egress(),)), plan(forward(), held=(forward(),))],
            "No changes. 2 rules match.",
            id="nothing to do in two namespaces",
        ),
        pytest.param(
            [
                plan(egress(), forward("tcp 22-23"), held=(forward("tcp 22"), egress())),
                plan(from_inside(), held=(forward(),)),
            ],
            "Plan: 1 to add, 1 to change, 1 to remove; 1 unchanged.",
            id="something of everything",
        ),
        pytest.param(
            [diff("blue", Desired(sysctls=frozenset({Sysctl("a", "1")})), Observed())],
            "Plan: 0 to add, 1 to change, 0 to remove; 0 unchanged.",
            id="a setting",
        ),
    ],
)
def test_the_summary_counts_over_all_labels(plans: list[Plan], line: str) -> None:
    assert summary(plans) == line


def test_live_rules_are_shown_in_order_with_what_went_through_them() -> None:
    live = [Live(egress(), 5, packets=12, octets=960), Live(forward(), 4)]
    assert live_text(live) == [
        f"ip  prerouting   tcp 22 on eth0            -> 10.0.2.2    {OWNER}  0 packets   0 bytes",
        f"ip  postrouting  everything from 10.0.2.2  -> masquerade  {OWNER}  12 packets  960 bytes",
    ]


def test_live_rules_are_shown_by_their_chains_and_in_the_order_in_which_these_ask_them() -> None:
    flows = Rule(chain=Chain.EGRESS, family=Family.IP, owner="vm", accepts=True)
    drop = replace(flows, accepts=False, source=IPv4Address("10.0.2.2"))
    web = replace(drop, accepts=True, protocol=Protocol.TCP, ports=PortRange(80, 80))
    guard = replace(forward(), protocol=None, ports=None, to=None)
    live = [Live(one, 1) for one in (drop, web, flows, guard, forward())]
    assert [" ".join(line.split()[1:4]) for line in live_text(live)] == [
        "prerouting tcp 22",
        "prerouting everything on",
        "forward-egress what belongs",
        "forward-egress tcp 80",
        "forward-egress everything from",
    ]


# ----------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        pytest.param(
            forward("tcp 1000-8000"),
            {
                "chain": "prerouting",
                "family": "ip",
                "action": "dnat",
                "protocol": "tcp",
                "ports": "1000-8000",
                "interface": "eth0",
                "to": "10.0.2.2",
            },
            id="a range that enters",
        ),
        pytest.param(
            from_inside(None, to="fd10:0:2::2"),
            {
                "chain": "output",
                "family": "ip6",
                "action": "dnat",
                "destination": "::1",
                "to": "fd10:0:2::2",
            },
            id="everything from inside",
        ),
        pytest.param(
            egress(),
            {
                "chain": "postrouting",
                "family": "ip",
                "action": "masquerade",
                "source": "10.0.2.2",
            },
            id="the guest's own traffic",
        ),
        pytest.param(
            answerable(),
            {
                "chain": "postrouting",
                "family": "ip",
                "action": "snat",
                "interface": "k6t-eth0",
                "source": "127.0.0.1",
                "destination": "10.0.2.2",
                "to": "10.0.2.1",
            },
            id="an address that the guest can answer to",
        ),
    ],
)
def test_a_rule_in_json_has_what_it_matches_and_no_more(
    rule: Rule, fields: dict[str, object]
) -> None:
    assert rule_json(rule) == {"owner": OWNER, **fields}


def test_a_plan_in_json_has_every_change_before_and_after() -> None:
    changed = plan(
        forward("tcp 22-23"),
        egress(),
        held=(forward("tcp 22"), from_inside()),
        foreign=(Foreign("output", 9, "accept"),),
    )
    answer = plan_json([changed], [])
    assert answer["format_version"] == "1.0"
    assert answer["changes"] == [
        {
            "action": "change",
            "netns": "blue",
            "before": rule_json(forward("tcp 22")),
            "after": rule_json(forward("tcp 22-23")),
        },
        {"action": "remove", "netns": "blue", "before": rule_json(from_inside()), "after": None},
        {"action": "add", "netns": "blue", "before": None, "after": rule_json(egress())},
        {
            "action": "remove",
            "netns": "blue",
            "before": {"owner": None, "chain": "output", "foreign": "accept"},
            "after": None,
        },
    ]
    assert answer["summary"] == {"add": 1, "change": 1, "remove": 2, "unchanged": 0}


def test_changes_of_another_kind_say_so() -> None:
    remade = Plan(
        netns="blue",
        table=Table.REMAKE,
        unsound="flags",
        sysctls=(SysctlChange("a", None, "1"),),
    )
    common = {"action": "change", "netns": "blue"}
    assert plan_json([remade], [])["changes"] == [
        {**common, "kind": "table", "before": {"reason": "flags"}, "after": {}},
        {
            **common,
            "kind": "sysctl",
            "before": {"name": "a", "value": None},
            "after": {"name": "a", "value": "1"},
        },
    ]


def test_the_removal_of_an_empty_table_is_a_change_of_its_own_kind() -> None:
    removal = diff("blue", Desired(), Observed(table=True))
    assert plan_json([removal], [])["changes"] == [
        {"action": "remove", "netns": "blue", "kind": "table", "before": {}, "after": None}
    ]


# --------------------------------------------------------------------------------------- shapes

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
CROWD = [forward(f"tcp {port}-{port + 7}") for port in range(1000, 1200, 10)]


def reshaped(before: list[Rule], after: list[Rule], *, as_map: bool = False) -> Plan:
    """From these ranges, in a map or as rules, to those."""
    live = tuple(Live(rule, 0 if as_map else place) for place, rule in enumerate(before, 1))
    observed = Observed(
        live=(*live, Live(egress(), 99)),
        chains=ALL_CHAINS,
        table=True,
        mapped={ENTERING: 77} if as_map else {},
    )
    return diff("blue", Desired(rules=frozenset([*after, egress()])), observed)


BECOME_MAP = "  ~ ip prerouting tcp on eth0: 7 ranges that stay become elements of one map"
BECOME_RULES = "  ~ ip prerouting tcp on eth0: 4 ranges that stay become rules again"


@pytest.mark.parametrize(
    ("plan", "lines", "last"),
    [
        pytest.param(
            reshaped(CROWD[:7], CROWD[:8]),
            ["  + ip  prerouting  tcp 1070-1077 on eth0", BECOME_MAP],
            "Plan: 1 to add, 1 to change, 0 to remove; 8 unchanged.",
            id="rules that become elements",
        ),
        pytest.param(
            reshaped(CROWD[:5], CROWD[:4], as_map=True),
            ["  - ip  prerouting  tcp 1040-1047 on eth0", BECOME_RULES],
            "Plan: 0 to add, 1 to change, 1 to remove; 5 unchanged.",
            id="elements that become rules",
        ),
        pytest.param(
            reshaped([], CROWD[:8]),
            [f"  + ip  prerouting  tcp {rule.ports} on eth0" for rule in CROWD[:8]],
            "Plan: 8 to add, 0 to change, 0 to remove; 1 unchanged.",
            id="elements that are all new",
        ),
        pytest.param(
            reshaped(CROWD[:9], [], as_map=True),
            [f"  - ip  prerouting  tcp {rule.ports} on eth0" for rule in CROWD[:9]],
            "Plan: 0 to add, 0 to change, 9 to remove; 1 unchanged.",
            id="elements that all go",
        ),
        pytest.param(
            reshaped([], [], as_map=True),
            ["  ~ ip prerouting tcp on eth0: an empty map goes"],
            "Plan: 0 to add, 1 to change, 0 to remove; 1 unchanged.",
            id="a map that nothing is in",
        ),
        pytest.param(
            reshaped(CROWD, CROWD[1:], as_map=True),
            ["  - ip  prerouting  tcp 1000-1007 on eth0"],
            "Plan: 0 to add, 0 to change, 1 to remove; 20 unchanged.",
            id="an element that goes",
        ),
    ],
)
def test_ranges_are_told_in_whatever_shape(plan: Plan, lines: list[str], last: str) -> None:
    heading, *told = plan_text(plan)
    assert heading == "namespace blue"
    assert [line.partition("  -> ")[0].rstrip() for line in told] == lines
    assert summary([plan]) == last


def test_a_change_of_shape_is_a_change_of_its_own_kind() -> None:
    changes: Any = plan_json([reshaped(CROWD[:7], CROWD[:8])], [])["changes"]
    assert [change["action"] for change in changes] == ["add", "change"]
    assert changes[0]["after"] == rule_json(CROWD[7])
    assert changes[1] == {
        "action": "change",
        "netns": "blue",
        "kind": "shape",
        "before": {},
        "after": {"map": True},
        "what": BECOME_MAP.strip(" ~"),
    }


def test_an_element_is_shown_as_a_rule_would_be() -> None:
    rules, elements = ([Live(rule, handle, 3, 180) for rule in CROWD] for handle in (5, 0))
    assert live_text(elements) == live_text(rules)


# ------------------------------------------------------------------------------------- problems


def problem(**more: Any) -> Problem:
    return Problem(
        code="bad", path=("spec", 0, "end"), what="is bad", fix="Mend it.", file="a.yaml", **more
    )


def test_a_problem_in_json_has_its_place_and_its_way_out() -> None:
    assert plan_json([], [problem(line=7)])["problems"] == [
        {
            "file": "a.yaml",
            "line": 7,
            "field": "spec[0].end",
            "problem": "is bad",
            "fix": "Mend it.",
            "code": "bad",
        }
    ]


@pytest.mark.parametrize(
    ("value", "in_json"),
    [
        pytest.param(70000, "70000", id="a number"),
        pytest.param(1.5, "1.5", id="a fraction"),
        pytest.param("8080", '"8080"', id="text"),
        pytest.param(True, "true", id="a boolean"),
        pytest.param(None, "null", id="null"),
        pytest.param({"a": 1}, '"a mapping"', id="a mapping"),
        pytest.param([1], '"a list"', id="a list"),
        pytest.param(OddNumeral("0o17"), '"0o17"', id="an odd numeral"),
        pytest.param(float("nan"), '"nan"', id="NaN, which JSON has not"),
        pytest.param(float("-inf"), '"-inf"', id="infinity, which JSON has not"),
        pytest.param(
            1 << 20000, '"a number of more than 76 digits"', id="more digits than Python writes"
        ),
    ],
)
def test_the_value_of_a_problem_is_always_json(value: object, in_json: str) -> None:
    assert json.dumps(problem_json(problem(value=value))["value"], allow_nan=False) == in_json
