"""The codec of iptables: rules to dictionaries, words and steps, and what a worker lists back."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from rules.model import Chain, Desired, Family, Foreign, Live, Observed, Rule
from rules.plan import Plan, Table, diff
from rules.render import plan_text
from rules.values import replace
from rules.xtables import (
    FILTER,
    MANGLE,
    NAT,
    Json,
    built_in,
    decode,
    encode,
    name,
    script,
    spot,
    statement,
    steps,
    table,
)
from tests.property.legacy_tables import LegacyFamilies, commits
from tests.property.strategies import THEIRS
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside

V6 = "fd10:0:2::2"
PREROUTING, PORTRANGER_PREROUTING = "nat PORTRANGER-PREROUTING", "PORTRANGER-PREROUTING"
FORWARD, PORTRANGER_FORWARD = "filter PORTRANGER-FORWARD", "PORTRANGER-FORWARD"
JUMP = "-m comment --comment portranger -j"
RETURN: Json = {"target": "RETURN", "counters": [0, 0]}


def filtered(  # noqa: PLR0913 - every option has a default
    text: str | None = None,
    *,
    into: str | None = None,
    out_of: str | None = None,
    peer: str | None = None,
    accepts: bool = True,
    owner: str = OWNER,
) -> Rule:
    """A rule in forward, for what enters or leaves a guest; for neither, what resumes flows."""
    guest = into or out_of or "10.0.2.2"
    found = forward(
        text, chain=Chain.FORWARD, on=None, source=out_of, destination=into, to=guest, owner=owner
    )
    network = ip_network(peer) if peer else None
    return replace(found, to=None, accepts=accepts, peer=network)


RESUMING = filtered()
INTO = filtered("tcp 80-90", into="10.0.2.2")
GUARD = filtered(into="10.0.2.2", accepts=False)


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset(rules))


def holding(*rules: Rule) -> LegacyFamilies:
    table = LegacyFamilies()
    table.commit(planned(table, *rules))
    return table


def planned(table: LegacyFamilies, *rules: Rule) -> Plan:
    return diff("blue", want(*rules), table.observed())


def settled(table: LegacyFamilies, *rules: Rule) -> bool:
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
    pytest.param(
        RESUMING,
        "-m conntrack --ctstate RELATED,ESTABLISHED",
        "-j RETURN",
        {"conntrack": {"ctstate": "RELATED,ESTABLISHED"}, "target": "RETURN"},
        id="what belongs to open flows",
    ),
    pytest.param(
        INTO,
        "-d 10.0.2.2 -p tcp -m tcp --dport 80:90",
        "-j RETURN",
        {
            "dst": "10.0.2.2",
            "protocol": "tcp",
            "tcp": {"dport": "80:90"},
            "target": "RETURN",
        },
        id="from anybody to the guest",
    ),
    pytest.param(
        filtered("sctp 7", out_of=V6),
        f"-s {V6} -p sctp -m sctp --dport 7",
        "-j RETURN",
        {"src": V6, "protocol": "sctp", "sctp": {"dport": "7"}, "target": "RETURN"},
        id="from the guest to anybody",
    ),
    pytest.param(
        GUARD,
        "-d 10.0.2.2",
        "-j DROP",
        {"dst": "10.0.2.2", "target": "DROP"},
        id="nothing else to the guest",
    ),
    pytest.param(
        filtered(out_of=V6, accepts=False),
        f"-s {V6}",
        "-j DROP",
        {"src": V6, "target": "DROP"},
        id="nothing else from the guest",
    ),
]
WITH_PEERS = [
    pytest.param(
        filtered("udp 53", into="10.0.2.2", peer="10.1.0.0/16"),
        '-s 10.1.0.0/16 -d 10.0.2.2 -p udp -m udp --dport 53 -m comment --comment "{} (ingress)"',
        {"src": "10.1.0.0/16", "dst": "10.0.2.2", "protocol": "udp", "udp": {"dport": "53"}},
        id="a network to the guest",
    ),
    pytest.param(
        filtered(out_of=V6, peer="fd00::/8"),
        f'-s {V6} -d fd00::/8 -m comment --comment "{{}} (egress)"',
        {"src": V6, "dst": "fd00::/8"},
        id="the guest to a network",
    ),
    pytest.param(
        filtered(into="10.0.2.2", peer="10.0.3.2/32"),
        '-s 10.0.3.2 -d 10.0.2.2 -m comment --comment "{} (ingress)"',
        {"src": "10.0.3.2", "dst": "10.0.2.2"},
        id="a host to the guest",
    ),
    pytest.param(
        filtered(out_of="10.0.3.2", peer="10.0.2.2/32"),
        '-s 10.0.3.2 -d 10.0.2.2 -m comment --comment "{} (egress)"',
        {"src": "10.0.3.2", "dst": "10.0.2.2"},
        id="the guest to a host",
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


@pytest.mark.parametrize(("rule", "words", "fields"), WITH_PEERS)
def test_a_rule_with_a_peer_says_in_its_comment_which_end_is_the_guest(
    rule: Rule, words: str, fields: Json
) -> None:
    assert statement(rule) == f"{words.format(OWNER)} -j RETURN"
    way = "egress" if rule.destination is None else "ingress"
    comment = {"comment": {"comment": f"{OWNER} ({way})"}}
    assert encode(rule) == {**comment, **fields, "target": "RETURN"}
    bits = 32 if rule.family is Family.IP else 128
    ends = {end: text if "/" in text else f"{text}/{bits}" for end, text in listed_ends(fields)}
    seen = observed(rule.family, rule.chain, {**encode(rule), **ends, "counters": [3, 180]})
    assert seen.live == (Live(rule, 0, packets=3, octets=180),)


def listed_ends(fields: Json) -> list[tuple[str, str]]:
    return [(end, str(fields[end])) for end in ("src", "dst") if end in fields]


def observed(family: Family, chain: Chain, *rules: Json, jumps: int = 1) -> Observed:
    """What is seen where our one chain holds these rules."""
    listing = {"chains": {spot(chain): list(rules)}, "jumps": {spot(chain): list(range(jumps))}}
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
        pytest.param(listed(in_interface="eth+"), id="links by their beginning"),
        pytest.param(listed(in_interface="eth 0"), id="a link that we would not name"),
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
    assert (foreign.chain, foreign.handle) == ("ip nat PORTRANGER-PREROUTING", 0)
    assert foreign.text


def let_in(**more: object) -> Json:
    """Our rule in forward for tcp 80-90 from a network, with some of it otherwise."""
    rule = filtered("tcp 80-90", into="10.0.2.2", peer="10.1.0.0/16")
    fields = encode(rule) | {"counters": (0, 0)} | more
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(let_in(comment={"comment": OWNER}), id="no word of which end is the guest"),
        pytest.param(let_in(dst="10.0.2.0/24"), id="a network at both ends"),
        pytest.param(let_in(comment={"comment": f"{OWNER} (egress)"}), id="the wrong end"),
        pytest.param(let_in(dst=None), id="a network to everybody"),
        pytest.param(let_in(src="!10.1.0.0/16"), id="everybody but a network"),
        pytest.param(let_in(src="10.1.0.7/16"), id="a network with more than its bits"),
        pytest.param(let_in(src="fd00::/8"), id="a peer of the other family"),
        pytest.param(let_in(target="REJECT"), id="a rejection"),
        pytest.param(let_in(target="ACCEPT"), id="past all others"),
        pytest.param(let_in(target="MASQUERADE"), id="a translation"),
        pytest.param(let_in(conntrack={"ctstate": "NEW"}), id="new flows"),
        pytest.param(let_in(conntrack={"ctstate": "RELATED,ESTABLISHED"}), id="open flows of some"),
        pytest.param(let_in(src=None, dst=None, tcp=None, protocol=None), id="everything"),
        pytest.param(
            encode(RESUMING) | {"conntrack": {"ctstate": "NEW,RELATED,ESTABLISHED"}},
            id="open flows and new ones",
        ),
        pytest.param(encode(RESUMING) | {"target": "DROP"}, id="open flows are dropped"),
        pytest.param(encode(GUARD) | {"limit": {"limit": "1/second"}}, id="a guard now and then"),
    ],
)
def test_what_we_could_not_have_written_in_forward_is_foreign(fields: Json) -> None:
    seen = observed(Family.IP, Chain.FORWARD, {"counters": (0, 0), **fields})
    assert seen.live == ()
    (foreign,) = seen.foreign
    assert (foreign.chain, foreign.handle) == (f"ip {FORWARD}", 0)


@pytest.mark.parametrize("verdict", ["RETURN", "DROP"])
@pytest.mark.parametrize("chain", list(Chain)[:4])
def test_a_filter_is_foreign_elsewhere(chain: Chain, verdict: str) -> None:
    fields = {"dst": "10.0.2.2", "comment": {"comment": OWNER}, "counters": [0, 0]}
    assert observed(Family.IP, chain, {**fields, "target": verdict}).live == ()
    assert observed(Family.IP, Chain.FORWARD, {**fields, "target": verdict}).foreign == ()


def test_a_foreign_rule_is_told_by_what_is_in_it() -> None:
    (foreign,) = observed(Family.IP, Chain.PREROUTING, listed(goto="FOREIGN")).foreign
    assert foreign.text == "comment goto in-interface protocol target tcp"
    (empty,) = observed(Family.IP, Chain.PREROUTING, {"counters": [0, 0]}).foreign
    assert empty.text == "an empty rule"


def test_a_chain_with_our_prefix_that_is_not_ours_is_passed_over() -> None:
    listing = {"chains": {"nat PORTRANGER-ELSEWHERE": [RETURN]}, "jumps": {}}
    assert decode({Family.IP: listing, Family.IP6: listing}) == Observed()


# ----------------------------------------------------------------------------- chains and jumps


def test_chains_are_named_for_the_place_they_hang_at() -> None:
    assert [(name(chain), built_in(chain)) for chain in Chain] == [
        ("PORTRANGER-PREROUTING", "PREROUTING"),
        ("PORTRANGER-PREROUTING", "PREROUTING"),
        ("PORTRANGER-OUTPUT", "OUTPUT"),
        ("PORTRANGER-POSTROUTING", "POSTROUTING"),
        ("PORTRANGER-FORWARD", "FORWARD"),
        ("PORTRANGER-FORWARD", "FORWARD"),
    ]
    assert [table(chain) for chain in Chain] == [MANGLE, NAT, NAT, NAT, MANGLE, FILTER]


def test_a_first_plan_makes_chains_then_rules_in_each_family_that_has_some() -> None:
    plan = diff("blue", want(forward(), egress(), forward(to=V6)), Observed())
    assert steps(plan, Family.IP) == [
        ["ensure", "nat", PORTRANGER_PREROUTING, "PREROUTING"],
        ["ensure", "nat", "PORTRANGER-POSTROUTING", "POSTROUTING"],
        ["append", "nat", PORTRANGER_PREROUTING, encode(forward())],
        ["append", "nat", "PORTRANGER-POSTROUTING", encode(egress())],
    ]
    assert steps(plan, Family.IP6) == [
        ["ensure", "nat", PORTRANGER_PREROUTING, "PREROUTING"],
        ["append", "nat", PORTRANGER_PREROUTING, encode(forward(to=V6))],
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
        ["delete", "nat", PORTRANGER_PREROUTING, 2],
        ["delete", "nat", PORTRANGER_PREROUTING, 1],
        ["delete", "nat", PORTRANGER_PREROUTING, 0],
        ["ensure", "nat", PORTRANGER_PREROUTING, "PREROUTING"],
        ["append", "nat", PORTRANGER_PREROUTING, encode(forward("tcp 5-6"))],
    ]
    assert settled(table, forward("tcp 5-6"), egress())


def test_nothing_wanted_drops_everything_of_ours_and_nothing_else() -> None:
    table = holding(forward(), egress(), forward(to=V6))
    plan = planned(table)
    assert plan.table is Table.DELETE
    assert [steps(plan, family) for family in Family] == [[["drop"]], [["drop"]]]
    table.commit(plan)
    assert table.lists() == [[THEIRS, THEIRS]] * 2 * len(Chain)
    assert table.observed() == Observed()


def test_a_second_jump_is_removed_and_the_first_stays() -> None:
    table = holding(forward())
    table[Family.IP].chains["nat PREROUTING"].append(PREROUTING)
    seen = table.observed()
    assert seen.foreign == (Foreign("ip nat PREROUTING", 3, "a second jump to our chain"),)
    assert settled(table, forward())
    assert table[Family.IP].chains["nat PREROUTING"] == [PREROUTING, THEIRS, THEIRS]


def test_a_jump_that_is_missing_is_put_back_in_its_family_alone() -> None:
    table = holding(forward(), forward(to=V6))
    table[Family.IP].chains["nat PREROUTING"].remove(PREROUTING)
    plan = planned(table, forward(), forward(to=V6))
    assert (plan.chains, plan.add, plan.remove) == ((Chain.PREROUTING,), (), ())
    assert not plan.same_rules
    assert settled(table, forward(), forward(to=V6))
    for family in Family:
        assert table[family].chains["nat PREROUTING"] == [PREROUTING, THEIRS, THEIRS]


def test_a_jump_that_others_came_before_is_first_again_in_its_family_alone() -> None:
    table = holding(forward(), forward(to=V6))
    table[Family.IP].chains["nat PREROUTING"].insert(0, THEIRS)
    plan = planned(table, forward(), forward(to=V6))
    assert (plan.chains, plan.add, plan.remove) == ((Chain.PREROUTING,), (), ())
    assert plan_text(plan)[1:] == ["  ~ chain prerouting is moved before rules of others"]
    jump = f"PREROUTING {JUMP} {PORTRANGER_PREROUTING}"
    assert script(plan).splitlines() == ["*nat", f"-4 -D {jump}", f"-4 -I {jump}", "COMMIT"]
    assert settled(table, forward(), forward(to=V6))
    assert table[Family.IP].chains["nat PREROUTING"] == [PREROUTING, THEIRS, THEIRS, THEIRS]
    assert table[Family.IP6].chains["nat PREROUTING"] == [PREROUTING, THEIRS, THEIRS]


def test_an_empty_chain_that_others_came_before_is_left_there() -> None:
    table = holding(forward(), forward(to=V6))
    assert settled(table, forward())  # which leaves the chain of IPv6 empty
    table[Family.IP6].chains["nat PREROUTING"].insert(0, THEIRS)
    assert planned(table, forward()).empty


def test_a_jump_put_back_beside_a_removal_moves_no_place() -> None:
    table = holding(forward("tcp 1"), forward("tcp 5"))
    table[Family.IP].chains["nat PREROUTING"].remove(PREROUTING)
    table[Family.IP].chains[PREROUTING].insert(0, dict(RETURN))
    assert settled(table, forward("tcp 5"))
    assert [live.rule for live in table.observed().live] == [forward("tcp 5")]


def test_an_empty_chain_that_nothing_leads_to_is_no_difference() -> None:
    table = holding(forward(), forward(to=V6))
    assert settled(table, forward())  # which leaves the chain of IPv6 empty
    table[Family.IP6].chains["nat PREROUTING"].remove(PREROUTING)
    assert planned(table, forward()).empty
    assert settled(table, forward(), forward(to=V6))
    assert settled(table)
    assert table.lists() == [[THEIRS, THEIRS]] * 2 * len(Chain)


def test_empty_chains_alone_are_ours_to_remove() -> None:
    table = holding(forward())
    table[Family.IP].chains[PREROUTING].clear()
    table[Family.IP].chains["nat PREROUTING"].remove(PREROUTING)
    observed = table.observed()
    assert (observed.table, observed.live, observed.chains) == (True, (), frozenset())
    assert settled(table)


def test_what_a_pending_machine_has_stays_in_its_place() -> None:
    table = holding(forward(), egress(owner="another"))
    desired = Desired(kept=frozenset({forward()}))
    plan = diff("blue", desired, table.observed())
    assert steps(plan, Family.IP) == [["delete", "nat", "PORTRANGER-POSTROUTING", 0]]


# -------------------------------------------------------------------------------------- filters

CLOSING = [
    ["ensure", "filter", PORTRANGER_FORWARD, "FORWARD"],
    ["append", "filter", PORTRANGER_FORWARD, encode(RESUMING)],
    ["append", "filter", PORTRANGER_FORWARD, encode(GUARD)],
]
TRANSLATING = [
    ["ensure", "nat", PORTRANGER_PREROUTING, "PREROUTING"],
    ["append", "nat", PORTRANGER_PREROUTING, encode(forward())],
]
OPENING = [["insert", "filter", PORTRANGER_FORWARD, 1, encode(INTO)]]


def test_filters_close_before_translations_come_and_open_behind_them() -> None:
    table = holding(GUARD, RESUMING)
    other = filtered(into="10.0.2.3", accepts=False)
    plan = planned(table, INTO, GUARD, other, RESUMING, forward())
    closing = [CLOSING[0], ["append", "filter", PORTRANGER_FORWARD, encode(other)]]
    assert commits(plan, Family.IP) == [(FILTER, closing), (NAT, TRANSLATING), (FILTER, OPENING)]
    assert commits(plan, Family.IP6) == []


def test_a_first_isolation_begins_with_what_it_lets_in() -> None:
    plan = diff("blue", want(INTO, GUARD, RESUMING, forward()), Observed())
    first = [*CLOSING[:2], ["append", "filter", PORTRANGER_FORWARD, encode(INTO)], CLOSING[2]]
    assert commits(plan, Family.IP) == [(FILTER, first), (NAT, TRANSLATING)]


def rows_between(table: LegacyFamilies, *wanted: Rule) -> list[list[Rule]]:
    """What our chain of filters holds after each commit, without what resumes flows."""
    found = []
    for _, part in commits(planned(table, *wanted), Family.IP):
        table[Family.IP].run(part)
        held = [live.rule for live in table.observed().live]
        found.append([one for one in held if one.chain is Chain.FORWARD and not one.resumes])
    return found


@pytest.mark.parametrize(
    ("ports", "meanwhile"),
    [
        ("tcp 80-95", "tcp 80-90"),
        ("tcp 82-88", "tcp 82-88"),
        ("tcp 85-95", "tcp 85-90"),
        (None, "tcp 80-90"),
        ("tcp 91-95", ""),
        ("udp 80-90", ""),
    ],
)
def test_ports_that_are_let_in_before_and_after_are_let_in_while_translations_change(
    ports: str | None, meanwhile: str
) -> None:
    table = holding(INTO, GUARD, RESUMING, forward())
    after = filtered(ports, into="10.0.2.2")
    *rows, last = rows_between(table, after, GUARD, RESUMING, forward("tcp 23"))
    let_in = [filtered(meanwhile, into="10.0.2.2")] if meanwhile else []
    assert all(row == [*let_in, GUARD] for row in [*rows, last][:2])
    assert last == [after, GUARD]


def test_peers_that_are_let_in_before_and_after_are_let_in_while_translations_change() -> None:
    wide, narrow = (filtered(into="10.0.2.2", peer=one) for one in ("10.9.0.0/24", "10.9.0.7/32"))
    for before, after in ((wide, narrow), (narrow, wide)):
        table = holding(before, GUARD, RESUMING, forward())
        rows = rows_between(table, after, GUARD, RESUMING, forward("tcp 23"))
        assert [narrow in row for row in rows[:2]] == [True, True]
        assert [wide in row for row in rows[1:2]] == [False]
        assert rows[-1] == [after, GUARD]


def test_filters_alone_are_one_commit() -> None:
    plan = diff("blue", want(INTO, GUARD, RESUMING), Observed())
    assert commits(plan, Family.IP) == [(FILTER, [*CLOSING, *OPENING])]
    assert commits(planned(holding(INTO, GUARD), GUARD), Family.IP) == [
        (FILTER, [["delete", "filter", PORTRANGER_FORWARD, 0]])
    ]


def test_translations_go_before_the_guards_in_front_of_what_they_lead_to() -> None:
    table = holding(INTO, GUARD, RESUMING, forward(), egress())
    plan = planned(table, egress())
    assert commits(plan, Family.IP) == [
        (NAT, [["delete", "nat", PORTRANGER_PREROUTING, 0]]),
        (FILTER, [["delete", "filter", PORTRANGER_FORWARD, place] for place in (2, 1, 0)]),
    ]
    assert settled(table, egress())
    assert table[Family.IP].chains[FORWARD] == []


def test_a_range_that_is_let_in_comes_before_guards_that_stay() -> None:
    more = filtered("tcp 443", into="10.0.2.2")
    table = holding(INTO, GUARD, RESUMING)
    before = {live.rule: live.packets for live in table.observed().live}
    assert commits(planned(table, INTO, more, GUARD, RESUMING), Family.IP) == [
        (
            FILTER,
            [
                ["ensure", "filter", PORTRANGER_FORWARD, "FORWARD"],
                ["insert", "filter", PORTRANGER_FORWARD, 2, encode(more)],
            ],
        )
    ]
    assert settled(table, INTO, more, GUARD, RESUMING)
    after = {live.rule: live.packets for live in table.observed().live}
    assert list(after) == [RESUMING, INTO, more, GUARD]
    assert before.items() <= after.items()  # which the kernel counts on


def test_what_resumes_flows_is_put_first() -> None:
    table = holding(INTO, GUARD)
    assert settled(table, INTO, GUARD, RESUMING)
    assert [live.rule for live in table.observed().live] == [RESUMING, INTO, GUARD]


@pytest.mark.parametrize("behind", [INTO, RESUMING], ids=["what lets in", "what resumes"])
def test_a_guard_before_others_is_put_behind_them(behind: Rule) -> None:
    table = holding(INTO, GUARD, RESUMING)
    row = table[Family.IP].chains[FORWARD]
    row.insert(0, row.pop())
    if behind is RESUMING:
        del row[2]
    (foreign,) = table.observed().foreign
    assert foreign == Foreign(f"ip {FORWARD}", 0, f"guard of {OWNER} before other rules")
    assert settled(table, INTO, GUARD, RESUMING)
    assert [live.rule for live in table.observed().live][-1] == GUARD


def test_a_guard_of_translations_stands_behind_them() -> None:
    guard = forward(None, destination="10.244.1.7", to=None)
    table = holding(guard, forward())
    assert settled(table, guard, forward(), forward("udp 53"))
    held = [live.rule for live in table.observed().live]
    assert held == [forward(), forward("udp 53"), guard]


def test_strangers_in_our_chain_of_filters_go_before_anything_opens() -> None:
    table = holding(INTO, GUARD, RESUMING, forward())
    row = table[Family.IP].chains[FORWARD]
    row.insert(1, {"target": "ACCEPT", "counters": [0, 0]})
    table[Family.IP].chains["filter FORWARD"].append(FORWARD)
    plan = planned(table, INTO, GUARD, RESUMING, forward("tcp 23"))
    assert commits(plan, Family.IP)[0] == (
        FILTER,
        [["delete", "filter", "FORWARD", 3], ["delete", "filter", PORTRANGER_FORWARD, 1]],
    )
    assert settled(table, INTO, GUARD, RESUMING, forward("tcp 23"))
    assert table[Family.IP].chains["filter FORWARD"] == [FORWARD, THEIRS, THEIRS]


def test_a_jump_to_filters_that_is_missing_is_put_back_first() -> None:
    table = holding(INTO, GUARD, RESUMING, forward())
    table[Family.IP].chains["filter FORWARD"].remove(FORWARD)
    plan = planned(table, INTO, GUARD, RESUMING, forward("tcp 23"))
    assert commits(plan, Family.IP)[0] == (
        FILTER,
        [["ensure", "filter", PORTRANGER_FORWARD, "FORWARD"]],
    )
    assert settled(table, INTO, GUARD, RESUMING, forward("tcp 23"))


def test_where_filters_stand_is_observed_as_of_others() -> None:
    seen = holding(INTO, filtered(into=V6, accepts=False)).observed()
    assert seen.standing == seen.jumped == {(family, Chain.FORWARD) for family in Family}
    assert seen.chains == {Chain.FORWARD}
    assert seen.sets == {}


def test_a_script_has_a_block_for_each_commit() -> None:
    plan = diff("blue", want(INTO, GUARD, forward(), filtered(into=V6, accepts=False)), Observed())
    assert script(plan).splitlines() == [
        "*filter",
        f"-4 -N {PORTRANGER_FORWARD}",
        f"-4 -I FORWARD {JUMP} {PORTRANGER_FORWARD}",
        f"-4 -A {PORTRANGER_FORWARD} {statement(INTO)}",
        f"-4 -A {PORTRANGER_FORWARD} {statement(GUARD)}",
        f"-6 -N {PORTRANGER_FORWARD}",
        f"-6 -I FORWARD {JUMP} {PORTRANGER_FORWARD}",
        f"-6 -A {PORTRANGER_FORWARD} {statement(filtered(into=V6, accepts=False))}",
        "COMMIT",
        "*nat",
        f"-4 -N {PORTRANGER_PREROUTING}",
        f"-4 -I PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-4 -A {PORTRANGER_PREROUTING} {statement(forward())}",
        "COMMIT",
    ]


def test_a_script_takes_back_what_is_let_in_only_meanwhile() -> None:
    table = holding(INTO, GUARD, RESUMING, forward())
    after = filtered("tcp 85-95", into="10.0.2.2")
    lines = script(planned(table, after, GUARD, RESUMING, forward("tcp 23"))).splitlines()
    both = filtered("tcp 85-90", into="10.0.2.2")
    assert [line for line in lines if PORTRANGER_FORWARD in line] == [
        f"-4 -D {PORTRANGER_FORWARD} 2",
        f"-4 -I {PORTRANGER_FORWARD} 2 {statement(both)}",
        f"-4 -D {PORTRANGER_FORWARD} 2",
        f"-4 -I {PORTRANGER_FORWARD} 2 {statement(after)}",
    ]


def test_a_script_for_filters_alone_has_one_block() -> None:
    table = holding(INTO, GUARD, forward())
    more = filtered("tcp 443", into="10.0.2.2")
    assert script(planned(table, more, GUARD, RESUMING, forward())).splitlines() == [
        "*filter",
        f"-4 -D {PORTRANGER_FORWARD} 1",
        f"-4 -I {PORTRANGER_FORWARD} 1 {statement(RESUMING)}",
        f"-4 -I {PORTRANGER_FORWARD} 2 {statement(more)}",
        "COMMIT",
    ]


def test_a_script_that_removes_everything_begins_with_translations() -> None:
    plan = planned(holding(GUARD, forward()))
    assert script(plan).splitlines() == [
        "*nat",
        f"-4 -D PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-4 -F {PORTRANGER_PREROUTING}",
        f"-4 -X {PORTRANGER_PREROUTING}",
        "COMMIT",
        "*filter",
        f"-4 -D FORWARD {JUMP} {PORTRANGER_FORWARD}",
        f"-4 -F {PORTRANGER_FORWARD}",
        f"-4 -X {PORTRANGER_FORWARD}",
        "COMMIT",
    ]


# --------------------------------------------------------------------------------------- script


def test_a_script_serves_both_families() -> None:
    plan = diff("blue", want(forward(), forward(to=V6)), Observed())
    assert script(plan).splitlines() == [
        "*nat",
        f"-4 -N {PORTRANGER_PREROUTING}",
        f"-4 -I PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-4 -A {PORTRANGER_PREROUTING} {statement(forward())}",
        f"-6 -N {PORTRANGER_PREROUTING}",
        f"-6 -I PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-6 -A {PORTRANGER_PREROUTING} {statement(forward(to=V6))}",
        "COMMIT",
    ]


def test_a_script_counts_places_from_one() -> None:
    table = holding(forward("tcp 1"), forward("tcp 5"), forward("tcp 9"))
    plan = planned(table, forward("tcp 5-6"), forward("tcp 9"))
    assert script(plan).splitlines() == [
        "*nat",
        f"-4 -D {PORTRANGER_PREROUTING} 2",
        f"-4 -D {PORTRANGER_PREROUTING} 1",
        f"-4 -A {PORTRANGER_PREROUTING} {statement(forward('tcp 5-6'))}",
        "COMMIT",
    ]


def test_a_script_puts_a_missing_jump_back() -> None:
    table = holding(forward())
    table[Family.IP].chains["nat PREROUTING"].remove(PREROUTING)
    assert script(planned(table, forward())).splitlines() == [
        "*nat",
        f"-4 -I PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        "COMMIT",
    ]


def test_a_script_makes_no_chain_that_a_foreign_rule_stands_in() -> None:
    table = holding(forward())
    table[Family.IP].chains[PREROUTING][:] = [dict(RETURN)]
    assert script(planned(table, forward())).splitlines() == [
        "*nat",
        f"-4 -D {PORTRANGER_PREROUTING} 1",
        f"-4 -A {PORTRANGER_PREROUTING} {statement(forward())}",
        "COMMIT",
    ]


def test_a_script_that_removes_everything_leaves_no_jump_and_no_chain() -> None:
    table = holding(forward(), egress(), forward(to=V6))
    table[Family.IP].chains["nat PREROUTING"].append(PREROUTING)
    plan = planned(table)
    assert script(plan).splitlines() == [
        "*nat",
        "-4 -D PREROUTING 4",
        f"-4 -D PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-4 -F {PORTRANGER_PREROUTING}",
        f"-4 -X {PORTRANGER_PREROUTING}",
        f"-4 -D POSTROUTING {JUMP} PORTRANGER-POSTROUTING",
        "-4 -F PORTRANGER-POSTROUTING",
        "-4 -X PORTRANGER-POSTROUTING",
        f"-6 -D PREROUTING {JUMP} {PORTRANGER_PREROUTING}",
        f"-6 -F {PORTRANGER_PREROUTING}",
        f"-6 -X {PORTRANGER_PREROUTING}",
        "COMMIT",
    ]
    table.restore(plan)
    assert table.lists() == [[THEIRS, THEIRS]] * 2 * len(Chain)


def test_nothing_to_do_is_an_empty_script() -> None:
    table = holding(forward())
    assert script(planned(table, forward())) == "*nat\nCOMMIT\n"


def test_the_lists_stand_for_the_worker() -> None:
    # A place that holds somebody else's rule may never be deleted: the lists see to it.
    due: list[Any] = ["delete", "nat", "PREROUTING", 0]
    with pytest.raises(AssertionError):
        holding()[Family.IP].run([due])
