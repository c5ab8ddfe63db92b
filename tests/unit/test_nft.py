"""The codec: what a plan says to nftables, and what is ours, foreign or unsound in a listing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rules.model import Chain, Desired, Foreign, Live, Observed, Rule
from rules.nft import encode, script, statement
from rules.nft_listing import decode
from rules.plan import Plan, diff
from rules.values import replace
from tests.unit.samples import OWNER, answerable, egress, forward, from_inside

Json = dict[str, Any]

TABLE: Json = {"table": {"family": "inet", "name": "portranger", "handle": 1}}


def base_chain(name: str, priority: int, **more: object) -> Json:
    value = {"family": "inet", "table": "portranger", "name": name, "handle": 2, "type": "nat"}
    return {"chain": value | {"hook": name, "prio": priority, "policy": "accept"} | more}


PREROUTING = base_chain("prerouting", -101)
OUTPUT = base_chain("output", -101)
POSTROUTING = base_chain("postrouting", 99)
CHAINS = [PREROUTING, OUTPUT, POSTROUTING]

ON_ETH0: Json = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "eth0"}}
VIA_ETH0: Json = {"match": {"op": "==", "left": {"meta": {"key": "oifname"}}, "right": "eth0"}}
IPV4: Json = {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv4"}}
COUNTER: Json = {"counter": {"packets": 3, "bytes": 180}}
TO_GUEST: Json = {"dnat": {"family": "ip", "addr": "10.0.2.2"}}
MASQUERADE: Json = {"masquerade": None}


def field(protocol: str, name: str, right: object, op: str = "==") -> Json:
    left = {"payload": {"protocol": protocol, "field": name}}
    return {"match": {"op": op, "left": left, "right": right}}


SSH = field("tcp", "dport", 22)
FROM_GUEST = field("ip", "saddr", "10.0.2.2")


def listed(*expr: object, chain: object = "prerouting", **more: object) -> Json:
    value: Json = {"family": "inet", "table": "portranger", "chain": chain, "handle": 7}
    return {"rule": value | {"comment": OWNER, "expr": list(expr)} | more}


def observed(*entries: Json) -> Observed:
    return decode([{"metainfo": {"version": "1.0.6"}}, TABLE, *CHAINS, *entries])


# ---------------------------------------------------------------------------------------- rules

RULES = [
    pytest.param(
        forward("tcp 1000-8000"),
        'iifname "eth0" meta nfproto ipv4 tcp dport 1000-8000 counter dnat ip to 10.0.2.2',
        id="a range that enters",
    ),
    pytest.param(
        forward("udp 53", to="fd10:0:2::2"),
        'iifname "eth0" meta nfproto ipv6 udp dport 53 counter dnat ip6 to fd10:0:2::2',
        id="one port that enters, over IPv6",
    ),
    pytest.param(
        forward(None),
        'iifname "eth0" meta nfproto ipv4 counter dnat ip to 10.0.2.2',
        id="everything that enters",
    ),
    pytest.param(
        from_inside("tcp 22"),
        "ip daddr 127.0.0.1 tcp dport 22 counter dnat ip to 10.0.2.2",
        id="from inside",
    ),
    pytest.param(
        from_inside(None, to="fd10:0:2::2"),
        "ip6 daddr ::1 counter dnat ip6 to fd10:0:2::2",
        id="everything from inside, over IPv6",
    ),
    pytest.param(egress(), "ip saddr 10.0.2.2 counter masquerade", id="the guest's own traffic"),
    pytest.param(
        answerable(),
        'oifname "k6t-eth0" ip saddr 127.0.0.1 ip daddr 10.0.2.2 counter snat ip to 10.0.2.1',
        id="an address that the guest can answer to",
    ),
]


@pytest.mark.parametrize(("rule", "words"), RULES)
def test_a_rule_reads_as_nft_writes_it(rule: Rule, words: str) -> None:
    assert statement(rule) == f'{words} comment "{OWNER}"'


@pytest.mark.parametrize(("rule", "words"), RULES)
def test_a_rule_comes_back_from_the_listing_with_its_counters(rule: Rule, words: str) -> None:
    plan = Plan(netns="blue", add=(rule,))
    (command,) = encode(plan)
    value: Json = json.loads(json.dumps(command))["add"]["rule"]
    value["handle"] = 12
    value["expr"] = [COUNTER if "counter" in item else item for item in value["expr"]]
    assert observed({"rule": value}).live == (Live(rule, 12, packets=3, octets=180),)


def test_a_rule_says_to_libnftables_what_its_words_say() -> None:
    (command,) = encode(Plan(netns="blue", add=(forward("tcp 1000-8000"),)))
    assert command == {
        "add": {
            "rule": {
                "family": "inet",
                "table": "portranger",
                "chain": "prerouting",
                "comment": OWNER,
                "expr": [
                    ON_ETH0,
                    IPV4,
                    field("tcp", "dport", {"range": [1000, 8000]}),
                    {"counter": None},
                    TO_GUEST,
                ],
            }
        }
    }


# --------------------------------------------------------------------------------- transactions

ADD_TABLE = {"add": {"table": {"family": "inet", "name": "portranger"}}}
DELETE_TABLE = {"delete": {"table": {"family": "inet", "name": "portranger"}}}
LIVE = Observed(
    live=(Live(forward(), 4), Live(egress(), 5)),
    foreign=(Foreign("output", 9, "accept"),),
    chains=frozenset(Chain),
    table=True,
)


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset(rules))


def gist(command: Json) -> str:
    """The verb, the object, and what tells it from others."""
    ((verb, target),) = command.items()
    ((kind, value),) = target.items()
    return f"{verb} {kind} {value.get('handle') or value.get('chain') or value['name']}"


def test_nothing_to_do_is_no_transaction() -> None:
    plan = diff("blue", want(forward(), egress()), replace(LIVE, foreign=()))
    assert encode(plan) == []
    assert script(plan) == ""


def test_a_first_plan_makes_table_chains_and_rules_in_that_order() -> None:
    plan = diff("blue", want(forward(), egress()), Observed())
    assert [gist(command) for command in encode(plan)] == [
        "create table portranger",
        "add chain prerouting",
        "add chain postrouting",
        "add rule prerouting",
        "add rule postrouting",
    ]
    assert encode(plan)[0] == {"create": ADD_TABLE["add"]}  # which a table that is there refuses
    assert script(plan) == (
        "create table inet portranger\n"
        "add chain inet portranger prerouting"
        " { type nat hook prerouting priority -101; policy accept; }\n"
        "add chain inet portranger postrouting"
        " { type nat hook postrouting priority 99; policy accept; }\n"
        f"add rule inet portranger prerouting {statement(forward())}\n"
        f"add rule inet portranger postrouting {statement(egress())}\n"
    )


def test_a_change_deletes_by_handle_before_it_adds() -> None:
    plan = diff("blue", want(forward("tcp 22-23"), egress()), LIVE)
    assert [gist(command) for command in encode(plan)] == [
        "delete rule 9",
        "delete rule 4",
        "add rule prerouting",
    ]
    assert script(plan) == (
        "delete rule inet portranger output handle 9\n"
        "delete rule inet portranger prerouting handle 4\n"
        f"add rule inet portranger prerouting {statement(forward('tcp 22-23'))}\n"
    )


def test_a_table_made_anew_holds_the_unchanged_rules_again() -> None:
    plan = diff("blue", want(forward(), egress()), replace(LIVE, unsound="flags"))
    assert encode(plan)[:2] == [DELETE_TABLE, ADD_TABLE]
    assert [gist(command) for command in encode(plan)[2:]] == [
        "add chain prerouting",
        "add chain postrouting",
        "add rule prerouting",
        "add rule postrouting",
    ]
    assert script(plan).startswith("delete table inet portranger\nadd table inet portranger\n")
    assert "handle" not in script(plan)


def test_a_table_that_is_no_longer_wanted_goes_in_one_command() -> None:
    plan = diff("blue", want(), LIVE)
    assert encode(plan) == [DELETE_TABLE]
    assert script(plan) == "delete table inet portranger\n"


# ------------------------------------------------------------------------------------- listings


def test_an_empty_listing_is_no_table() -> None:
    assert decode([]) == Observed()


def test_a_sound_table_has_its_chains() -> None:
    assert observed() == Observed(chains=frozenset(Chain), table=True)


def test_the_order_of_matches_does_not_matter() -> None:
    assert observed(listed(SSH, IPV4, ON_ETH0, COUNTER, TO_GUEST)).live == (
        Live(forward(), 7, packets=3, octets=180),
    )


def test_an_edited_comment_is_another_owner() -> None:
    (live,) = observed(listed(ON_ETH0, IPV4, SSH, COUNTER, TO_GUEST, comment="mine")).live
    assert live.rule == forward(owner="mine")


def test_a_rule_without_a_comment_has_no_owner() -> None:
    rule = listed(ON_ETH0, IPV4, SSH, COUNTER, TO_GUEST)
    del rule["rule"]["comment"]
    assert [live.rule.owner for live in observed(rule).live] == [""]


def test_a_remembered_rule_is_the_one_that_was_read() -> None:
    known: dict[tuple[str, str, str], Rule] = {}
    listing = [TABLE, *CHAINS, listed(ON_ETH0, IPV4, SSH, COUNTER, TO_GUEST)]
    first, again = decode(listing, known), decode(listing, known)
    assert first == again
    assert again.live[0].rule is first.live[0].rule


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(listed(), id="no expression"),
        pytest.param(listed(expr=None), id="no list of expressions"),
        pytest.param(listed(expr="counter"), id="expressions that are a word"),
        pytest.param(listed("counter", TO_GUEST), id="an expression that is a word"),
        pytest.param(listed(None, TO_GUEST), id="an expression that is nothing"),
        pytest.param(listed(ON_ETH0, IPV4, SSH, COUNTER), id="no verdict"),
        pytest.param(listed(ON_ETH0, IPV4, SSH, TO_GUEST), id="no counter"),
        pytest.param(listed(IPV4, COUNTER, COUNTER, TO_GUEST), id="two counters"),
        pytest.param(listed(IPV4, {"counter": "mine"}, TO_GUEST), id="a named counter"),
        pytest.param(listed(ON_ETH0, SSH, COUNTER, {"accept": None}), id="another verdict"),
        pytest.param(listed(IPV4, COUNTER, TO_GUEST, {"accept": None}), id="a second verdict"),
        pytest.param(listed(IPV4, COUNTER, TO_GUEST, SSH), id="a match after the verdict"),
        pytest.param(listed(IPV4, {"log": None}, COUNTER, TO_GUEST), id="another statement"),
        pytest.param(listed(IPV4, {**SSH, "log": None}, COUNTER, TO_GUEST), id="two in one"),
        pytest.param(listed(IPV4, {"match": None}, COUNTER, TO_GUEST), id="a match of nothing"),
        pytest.param(listed(IPV4, {"match": {}}, COUNTER, TO_GUEST), id="an empty match"),
        pytest.param(
            listed(COUNTER, {"dnat": {"family": "ip", "addr": "10.0.2.2"}, "log": None}),
            id="a verdict with something beside it",
        ),
        pytest.param(
            listed(IPV4, COUNTER, {"dnat": {"family": "ip", "addr": "10.0.2.2", "port": 23}}),
            id="one port for every port",
        ),
        pytest.param(
            listed(IPV4, COUNTER, {"dnat": {"family": "ip", "addr": {"range": ["10.0.2.2", "b"]}}}),
            id="a range of targets",
        ),
        pytest.param(
            listed(IPV4, COUNTER, {"dnat": {"family": "ip", "addr": 167772674}}),
            id="a target that is a number",
        ),
        pytest.param(listed(IPV4, COUNTER, {"dnat": {"addr": "10.0.2.2"}}), id="no family"),
        pytest.param(
            listed(COUNTER, {"dnat": {"family": "inet", "addr": "10.0.2.2"}}), id="another family"
        ),
        pytest.param(
            listed(COUNTER, {"dnat": {"family": "ip6", "addr": "10.0.2.2"}}),
            id="a target of the other family",
        ),
        pytest.param(listed(IPV4, COUNTER, {"dnat": None}), id="no target"),
        pytest.param(
            listed(
                {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv6"}},
                COUNTER,
                TO_GUEST,
            ),
            id="one family matched, the other written",
        ),
        pytest.param(listed(IPV4, COUNTER, MASQUERADE), id="masquerade in prerouting"),
        pytest.param(
            listed(FROM_GUEST, COUNTER, {"masquerade": {"flags": "random"}}, chain="postrouting"),
            id="masquerade with flags",
        ),
        pytest.param(listed(FROM_GUEST, COUNTER, TO_GUEST, chain="postrouting"), id="dnat leaving"),
        pytest.param(listed(COUNTER, MASQUERADE, chain="postrouting"), id="of no family"),
        pytest.param(
            listed(
                {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "arp"}},
                COUNTER,
                MASQUERADE,
                chain="postrouting",
            ),
            id="of an unknown family",
        ),
        pytest.param(listed(VIA_ETH0, IPV4, COUNTER, TO_GUEST), id="the link left on, entering"),
        pytest.param(
            listed(
                {
                    "match": {
                        "op": "==",
                        "left": {"meta": {"key": "iifname"}},
                        "right": {"set": ["eth0", "eth1"]},
                    }
                },
                IPV4,
                COUNTER,
                TO_GUEST,
            ),
            id="a set of links",
        ),
        pytest.param(
            listed(IPV4, field("tcp", "dport", 22, op="!="), COUNTER, TO_GUEST),
            id="every port but one",
        ),
        pytest.param(
            listed(IPV4, field("tcp", "dport", {"set": [22, 23]}), COUNTER, TO_GUEST),
            id="a set of ports",
        ),
        pytest.param(
            listed(IPV4, field("tcp", "dport", "ssh"), COUNTER, TO_GUEST), id="a port by name"
        ),
        pytest.param(
            listed(IPV4, field("tcp", "dport", {"range": [9, 1]}), COUNTER, TO_GUEST),
            id="a range backwards",
        ),
        pytest.param(
            listed(IPV4, field("tcp", "dport", {"range": [1]}), COUNTER, TO_GUEST),
            id="half a range",
        ),
        pytest.param(listed(IPV4, field("tcp", "dport", 0), COUNTER, TO_GUEST), id="port zero"),
        pytest.param(listed(IPV4, field("tcp", "sport", 22), COUNTER, TO_GUEST), id="source port"),
        pytest.param(
            listed(IPV4, field("sctp", "dport", 22), COUNTER, TO_GUEST), id="another protocol"
        ),
        pytest.param(listed(IPV4, SSH, SSH, COUNTER, TO_GUEST), id="a port twice"),
        pytest.param(
            listed(
                {"match": {"op": "==", "left": {"ct": {"key": "state"}}, "right": "new"}},
                COUNTER,
                TO_GUEST,
            ),
            id="another kind of match",
        ),
        pytest.param(
            listed(
                {
                    "match": {
                        "op": "==",
                        "left": {"payload": {"protocol": "tcp", "field": "dport", "base": "th"}},
                        "right": 22,
                    }
                },
                IPV4,
                COUNTER,
                TO_GUEST,
            ),
            id="a payload with more to it",
        ),
        pytest.param(
            listed(
                field("ip", "saddr", {"prefix": {"addr": "10.0.2.0", "len": 24}}),
                COUNTER,
                MASQUERADE,
                chain="postrouting",
            ),
            id="a network of sources",
        ),
        pytest.param(
            listed(field("ip", "saddr", "fd10::2"), COUNTER, MASQUERADE, chain="postrouting"),
            id="a source of the other family",
        ),
        pytest.param(
            listed(IPV4, COUNTER, TO_GUEST, comment="\x1b[2J"), id="a comment that is no text"
        ),
        pytest.param(listed(IPV4, COUNTER, TO_GUEST, chain="input"), id="in an unknown chain"),
        pytest.param(listed(IPV4, COUNTER, TO_GUEST, chain=None), id="in no chain"),
        pytest.param(listed(IPV4, COUNTER, TO_GUEST, chain=["x"]), id="in several chains"),
    ],
)
def test_what_we_could_not_have_written_is_foreign(rule: Json) -> None:
    seen = observed(rule)
    assert seen.live == ()
    assert [foreign.handle for foreign in seen.foreign] == [7]


@pytest.mark.parametrize(
    ("rule", "foreign"),
    [
        pytest.param(
            listed(ON_ETH0, SSH, {"accept": None}),
            Foreign("prerouting", 7, "iifname dport accept"),
            id="what it looks at, and what it does",
        ),
        pytest.param(
            listed({"match": {"left": {"meta": {"key": "a\x1bb"}}}}, {"\x1b": None}),
            Foreign("prerouting", 7, "match ?"),
            id="what cannot be shown",
        ),
        pytest.param(
            listed({"match": {"left": {"fib": [], "ct": {"key": "state"}}}}, {"match": None}),
            Foreign("prerouting", 7, "state match"),
            id="a match of another form",
        ),
        pytest.param(listed(), Foreign("prerouting", 7, "an empty rule"), id="none"),
        pytest.param(listed({}, "odd"), Foreign("prerouting", 7, "? ?"), id="nothing to name"),
        pytest.param(
            listed({"drop": None}, chain="x\x1b[2J"), Foreign("?", 7, "drop"), id="an odd chain"
        ),
        pytest.param(
            listed({"drop": None}, handle="x"), Foreign("prerouting", 0, "drop"), id="no handle"
        ),
    ],
)
def test_a_foreign_rule_is_told_in_a_few_words(rule: Json, foreign: Foreign) -> None:
    assert observed(rule).foreign == (foreign,)


@pytest.mark.parametrize(
    ("listing", "why"),
    [
        pytest.param(
            [{"table": TABLE["table"] | {"flags": ["dormant"]}}, *CHAINS],
            "somebody set flags on the table",
            id="a dormant table",
        ),
        pytest.param(
            [TABLE, base_chain("prerouting", -101, policy="drop")],
            "chain 'prerouting' is not as we make it",
            id="another policy",
        ),
        pytest.param(
            [TABLE, base_chain("prerouting", -100)],
            "chain 'prerouting' is not as we make it",
            id="another priority",
        ),
        pytest.param(
            [TABLE, base_chain("prerouting", -101, type="filter")],
            "chain 'prerouting' is not as we make it",
            id="another type",
        ),
        pytest.param(
            [TABLE, base_chain("prerouting", -101, hook="input")],
            "chain 'prerouting' is not as we make it",
            id="another hook",
        ),
        pytest.param(
            [TABLE, {"chain": {"family": "inet", "table": "portranger", "name": "mine"}}],
            "chain 'mine' is not as we make it",
            id="a chain that is not ours",
        ),
        pytest.param(
            [TABLE, {"set": {"family": "inet", "name": "mine", "table": "portranger"}}],
            "there is a set 'mine' in it that is not ours",
            id="a set",
        ),
        pytest.param(
            [TABLE, {"chain": {"name": "b"}}, {"chain": {"name": "a"}}, {"chain": {"name": "b"}}],
            "chain 'a' is not as we make it; chain 'b' is not as we make it",
            id="several reasons, each once and in order",
        ),
    ],
)
def test_a_table_that_is_not_as_we_make_it_is_unsound(listing: list[Json], why: str) -> None:
    seen = decode(listing)
    assert (seen.table, seen.unsound, seen.chains) == (True, why, frozenset())


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"rule": None}, id="a rule of nothing"),
        pytest.param({"table": "portranger"}, id="a table that is a word"),
        pytest.param({"metainfo": {"version": "9"}}, id="metainfo"),
    ],
)
def test_an_entry_that_says_nothing_is_passed_over(entry: Json) -> None:
    assert observed(entry) == observed()
