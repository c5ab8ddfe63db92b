"""The codec: what a plan says to nftables, and what is ours, foreign or unsound in a listing."""

from __future__ import annotations

import json
from ipaddress import ip_address
from typing import Any

import pytest

from rules.model import (
    Chain,
    Desired,
    Detour,
    Family,
    Foreign,
    Live,
    Lookup,
    Observed,
    Protocol,
    Rule,
    Share,
)
from rules.nft import commands, lookup_verdict
from rules.nft_listing import decode
from rules.nft_script import script, statement
from rules.nft_terms import detour_json, share_json
from rules.nft_transactions import transactions
from rules.plan import Plan, Table, diff
from rules.values import replace
from tests.unit.samples import OWNER, answerable, egress, encode, forward, from_inside

Json = dict[str, Any]

TABLE: Json = {"table": {"family": "inet", "name": "portranger", "handle": 1}}


def base_chain(name: str, priority: int, **more: object) -> Json:
    value = {"family": "inet", "table": "portranger", "name": name, "handle": 2, "type": "nat"}
    return {"chain": value | {"hook": name, "prio": priority, "policy": "accept"} | more}


PREROUTING = base_chain("prerouting", -101)
OUTPUT = base_chain("output", -101)
POSTROUTING = base_chain("postrouting", 99)
FORWARD = base_chain("forward", -1, type="filter")
EGRESS = base_chain("forward-egress", -2, type="filter", hook="forward")
RAW = base_chain("prerouting-raw", -301, type="filter", hook="prerouting")
CHAINS = [RAW, PREROUTING, OUTPUT, POSTROUTING, EGRESS, FORWARD]


def link(name: str) -> Json:
    return {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": name}}


ON_ETH0 = link("eth0")
VIA_ETH0: Json = {"match": {"op": "==", "left": {"meta": {"key": "oifname"}}, "right": "eth0"}}
IPV4: Json = {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv4"}}
COUNTER: Json = {"counter": {"packets": 3, "bytes": 180}}
TO_GUEST: Json = {"dnat": {"family": "ip", "addr": "10.0.2.2"}}
MASQUERADE: Json = {"masquerade": None}
WAY = Detour(published=(ip_address("192.0.2.1"),), links=("\x1b[2J",))


def field(protocol: str, name: str, right: object, op: str = "==") -> Json:
    left = {"payload": {"protocol": protocol, "field": name}}
    return {"match": {"op": op, "left": left, "right": right}}


SSH = field("tcp", "dport", 22)
FROM_GUEST = field("ip", "saddr", "10.0.2.2")

BACK = [*detour_json(replace(WAY, links=("eth0",)), Family.IP)]
TRANSLATED = BACK[1]
HALF = share_json(Share(2, (1,)), Family.IP, Protocol.TCP)


def altered(condition: Json, right: object, **number: object) -> Json:
    """A condition on another value, or on another number of a flow."""
    match = condition["match"] | {"right": right}
    if number:
        match["left"] = {"jhash": match["left"]["jhash"] | {"seed": 1} | number}
    return {"match": match}


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
    made, after = ([gist(one) for one in commands(part)] for part in transactions(plan))
    bridges = "bridge-behind-prerouting", "bridge-behind-postrouting"
    assert made[2:] == [
        "add chain prerouting",
        "add chain postrouting",
        *(f"add chain {bridge}" for bridge in bridges),
        *(f"add rule {bridge}" for bridge in bridges),
        "add rule prerouting",
        "add rule postrouting",
    ]
    assert after == [f"delete chain {bridge}" for bridge in bridges]
    assert "\ndelete table inet portranger\nadd table inet portranger\n" in script(plan)
    assert "handle" not in script(plan)


def test_a_table_that_is_no_longer_wanted_goes_in_one_command() -> None:
    plan = diff("blue", want(), LIVE)
    assert encode(plan) == [DELETE_TABLE]
    assert script(plan) == "delete table inet portranger\n"


# ------------------------------------------------------------------------------------- listings


def test_an_empty_listing_is_no_table() -> None:
    assert decode([]) == Observed(mapped={})


def test_a_sound_table_has_its_chains() -> None:
    assert observed() == Observed(chains=frozenset(Chain), table=True, mapped={})


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
            listed(link("\x1b[2J"), IPV4, COUNTER, TO_GUEST), id="a link that cannot be shown"
        ),
        pytest.param(listed(link("eth*"), IPV4, COUNTER, TO_GUEST), id="links by their beginning"),
        pytest.param(listed(link(""), IPV4, COUNTER, TO_GUEST), id="a link without a name"),
        pytest.param(
            listed(*detour_json(WAY, Family.IP), COUNTER, MASQUERADE, chain="postrouting"),
            id="a way back by links that cannot be shown",
        ),
        pytest.param(
            listed(TRANSLATED, *BACK, COUNTER, MASQUERADE, chain="postrouting"),
            id="a part of a way back twice",
        ),
        pytest.param(
            listed(*BACK[:2], COUNTER, MASQUERADE, chain="postrouting"),
            id="a way back without what was published",
        ),
        pytest.param(
            listed(BACK[0], BACK[2], COUNTER, MASQUERADE, chain="postrouting"),
            id="a way back of what was not translated",
        ),
        pytest.param(
            listed(
                altered(BACK[0], {"set": [{"concat": ["eth0", "eth1"]}]}),
                *BACK[1:],
                COUNTER,
                MASQUERADE,
                chain="postrouting",
            ),
            id="a way back by another link",
        ),
        pytest.param(
            listed(
                *BACK[:2],
                altered(BACK[2], {"set": ["2001:db8::1"]}),
                COUNTER,
                MASQUERADE,
                chain="postrouting",
            ),
            id="a way back for addresses of the other family",
        ),
        pytest.param(
            listed(IPV4, altered(HALF, 1, mod=3), SSH, COUNTER, TO_GUEST),
            id="a share by another number",
        ),
        pytest.param(listed(IPV4, HALF, COUNTER, TO_GUEST), id="a share of no protocol"),
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
            listed(IPV4, field("dccp", "dport", 22), COUNTER, TO_GUEST), id="another protocol"
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
        pytest.param(
            listed({"drop": None}, handle=1 << 64),
            Foreign("prerouting", 0, "drop"),
            id="a handle that is none",
        ),
        pytest.param(
            listed({"drop": None}, handle=-1), Foreign("prerouting", 0, "drop"), id="one below"
        ),
        pytest.param(
            listed({"drop": None}, handle=(1 << 64) - 1),
            Foreign("prerouting", (1 << 64) - 1, "drop"),
            id="the last handle",
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
            [TABLE, {"counter": {"family": "inet", "name": "mine", "table": "portranger"}}],
            "there is a counter 'mine' in it, not ours",
            id="a counter",
        ),
        pytest.param(
            [TABLE, {"set": {"family": "inet", "name": "my set; x", "table": "portranger"}}],
            "there is a set 'my set; x' in it, not ours",
            id="a set whose name nft would not take",
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


# ------------------------------------------------------------------------------------------ maps

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
NAME = "prerouting-ip-tcp-eth0"
CROWD = [forward(f"tcp {port}-{port + 7}") for port in range(1000, 1200, 10)]
PORT: Json = {"payload": {"protocol": "tcp", "field": "dport"}}
LOOKED_UP: Json = {"dnat": {"family": "ip", "addr": {"map": {"key": PORT, "data": f"@{NAME}"}}}}


def bare(*expr: object, **more: object) -> Json:
    """A rule without a comment."""
    rule = listed(*expr, **more)
    del rule["rule"]["comment"]
    return rule


LOOKUP = bare(ON_ETH0, IPV4, COUNTER, LOOKED_UP, handle=30)


def pair(ports: object, to: object = "10.0.2.2", **more: object) -> list[object]:
    """An element as it is listed."""
    inner = {"val": ports, "comment": OWNER, "counter": {"packets": 3, "bytes": 180}}
    return [{"elem": inner | more}, to]


def listed_map(*pairs: object, **more: object) -> Json:
    value = {"family": "inet", "name": NAME, "table": "portranger", "type": "inet_service"}
    value |= {"handle": 29, "map": "ipv4_addr", "flags": ["interval"]}  # type: ignore[dict-item]
    return {"map": value | {"stmt": [{"counter": None}], "elem": list(pairs)} | more}


def mapped(*elements: Rule, rules: tuple[Rule, ...] = ()) -> Observed:
    live = [Live(rule, number) for number, rule in enumerate(rules, 40)]
    live += [Live(rule, 0) for rule in elements]
    return replace(LIVE, live=tuple(live), foreign=(), mapped={ENTERING: 30})


def test_many_ranges_become_a_map_before_the_rule_that_looks_into_it() -> None:
    plan = diff("blue", want(*CROWD), Observed(mapped={}))
    commands = encode(plan)
    assert [gist(command) for command in commands] == [
        "create table portranger",
        "add chain prerouting",
        f"add map {NAME}",
        f"add element {NAME}",
        "add rule prerouting",
    ]
    assert commands[2] == {
        "add": {
            "map": {
                "family": "inet",
                "table": "portranger",
                "name": NAME,
                "type": "inet_service",
                "map": "ipv4_addr",
                "flags": ["interval"],
                "stmt": [{"counter": None}],
            }
        }
    }
    elements: Any = commands[3]["add"]
    assert elements["element"]["elem"][0] == [
        {"elem": {"val": {"range": [1000, 1007]}, "comment": OWNER}},
        "10.0.2.2",
    ]
    assert len(elements["element"]["elem"]) == len(CROWD)
    assert commands[4] == {
        "add": {
            "rule": {
                "family": "inet",
                "table": "portranger",
                "chain": "prerouting",
                "expr": [ON_ETH0, IPV4, {"counter": None}, LOOKED_UP],
            }
        }
    }
    pairs = ", ".join(f'{rule.ports} comment "{OWNER}" : 10.0.2.2' for rule in CROWD)
    assert script(plan).partition("policy accept; }\n")[2] == (
        f"add map inet portranger {NAME}"
        " { type inet_service : ipv4_addr; flags interval; counter; }\n"
        f"add element inet portranger {NAME} {{ {pairs} }}\n"
        'add rule inet portranger prerouting iifname "eth0" meta nfproto ipv4 counter'
        f" dnat ip to tcp dport map @{NAME}\n"
    )


def test_a_lookup_from_inside_is_by_its_destination() -> None:
    inside = [from_inside(f"udp {port}") for port in range(1, 40, 2)]
    lines = script(diff("blue", want(*inside), Observed(mapped={}))).splitlines()
    assert lines[-1] == (
        "add rule inet portranger output ip daddr 127.0.0.1 counter"
        " dnat ip to udp dport map @output-ip-udp-127.0.0.1"
    )
    assert "add element inet portranger output-ip-udp-127.0.0.1 { 1 comment" in lines[-2]


def test_rules_that_become_elements_go_when_their_map_is_filled() -> None:
    rules = CROWD[:7]
    observed = replace(LIVE, foreign=(), mapped={})
    observed = replace(observed, live=tuple(Live(rule, 100 + i) for i, rule in enumerate(rules)))
    plan = diff("blue", want(*CROWD[:8]), observed)
    assert [gist(command) for command in encode(plan)] == [
        f"add map {NAME}",
        f"add element {NAME}",
        *(f"delete rule {100 + i}" for i in range(7)),
        "add rule prerouting",
    ]
    elements: Any = encode(plan)[1]["add"]
    assert len(elements["element"]["elem"]) == 8


def test_a_map_is_filled_before_its_rule_takes_the_place_of_others() -> None:
    """Some kernels show packets what is in a new map only after they use its rule."""
    observed = replace(LIVE, live=tuple(Live(rule, 7) for rule in CROWD[:7]), mapped={})
    plan = diff("blue", want(*CROWD[:8]), observed)
    first, second = map(commands, transactions(plan))
    assert [gist(command) for command in first] == [f"add map {NAME}", f"add element {NAME}"]
    assert [gist(command) for command in second] == [
        "delete rule 9",
        *["delete rule 7"] * 7,
        "add rule prerouting",
    ]
    assert sorted(map(str, [*first, *second])) == sorted(map(str, encode(plan)))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        pytest.param(CROWD, Observed(mapped={}), id="in a new table"),
        pytest.param(CROWD, replace(LIVE, mapped={}), id="where no range of the map was served"),
        pytest.param(CROWD[1:], mapped(*CROWD), id="where elements change"),
        pytest.param([], mapped(*CROWD), id="where all goes"),
        pytest.param(CROWD[:3], LIVE, id="where there is no map"),
    ],
)
def test_everything_else_is_one_transaction(wanted: list[Rule], found: Observed) -> None:
    plan = diff("blue", want(*wanted), found)
    assert [commands(part) for part in transactions(plan)] == [encode(plan)]


def test_nothing_to_do_is_not_even_one_transaction() -> None:
    assert transactions(diff("blue", want(*CROWD), mapped(*CROWD))) == []


def test_elements_that_become_rules_go_with_their_map_after_those_are_there() -> None:
    plan = diff("blue", want(*CROWD[:4]), mapped(*CROWD[:5]))
    first, second = map(commands, transactions(plan))
    assert [gist(command) for command in first] == [
        "delete rule 30",
        *["add rule prerouting"] * 4,
    ]
    assert [gist(command) for command in second] == [f"delete map {NAME}"]
    lines = script(plan).splitlines()
    assert lines[2:4] == [
        "# transaction 1 of 2",
        "delete rule inet portranger prerouting handle 30",
    ]
    assert lines[-2:] == ["# transaction 2 of 2", f"delete map inet portranger {NAME}"]


def test_a_change_of_elements_deletes_by_port_before_it_adds_while_a_rule_serves_them() -> None:
    plan = diff("blue", want(*CROWD[1:], forward("tcp 1000-1008")), mapped(*CROWD))
    before, change, after = map(commands, transactions(plan))
    bridge = "bridge-before-prerouting"
    assert [gist(command) for command in before] == [f"add chain {bridge}", f"add rule {bridge}"]
    assert [gist(command) for command in after] == [f"delete chain {bridge}"]
    assert change == [
        {
            "delete": {
                "element": {
                    "family": "inet",
                    "table": "portranger",
                    "name": NAME,
                    "elem": [{"range": [1000, 1007]}],
                }
            }
        },
        {
            "add": {
                "element": {
                    "family": "inet",
                    "table": "portranger",
                    "name": NAME,
                    "elem": [
                        [
                            {"elem": {"val": {"range": [1000, 1008]}, "comment": OWNER}},
                            "10.0.2.2",
                        ]
                    ],
                }
            }
        },
    ]
    hooked = "type nat hook prerouting priority -102"
    assert script(plan).splitlines()[2:] == [
        "# transaction 1 of 3",
        f"add chain inet portranger {bridge} {{ {hooked}; policy accept; }}",
        f"add rule inet portranger {bridge} {statement(forward('tcp 1000-1008'))}",
        "# transaction 2 of 3",
        f"delete element inet portranger {NAME} {{ 1000-1007 }}",
        f'add element inet portranger {NAME} {{ 1000-1008 comment "{OWNER}" : 10.0.2.2 }}',
        "# transaction 3 of 3",
        f"delete chain inet portranger {bridge}",
    ]


def test_a_table_made_anew_is_plain_rules_until_its_maps_are_filled() -> None:
    observed = replace(mapped(*CROWD, rules=(egress(),)), unsound="flags", mapped={})
    plan = diff("blue", want(*CROWD, egress()), replace(observed, chains=frozenset()))
    assert plan.table is Table.REMAKE
    parts = transactions(plan)
    before, made, ours, after = ([gist(one) for one in commands(part)] for part in parts)
    serving = "bridge-before-prerouting"
    assert before == [
        f"add chain {serving}",
        f"flush chain {serving}",
        *[f"add rule {serving}"] * len(CROWD),
    ]
    bridges = "bridge-behind-prerouting", "bridge-behind-postrouting"
    assert made == [
        "delete table portranger",
        "add table portranger",
        "add chain prerouting",
        "add chain postrouting",
        f"add map {NAME}",
        f"add element {NAME}",
        *(f"add chain {bridge}" for bridge in bridges),
        f"add rule {bridges[1]}",
        *[f"add rule {bridges[0]}"] * len(CROWD),
    ]
    assert ours == ["add rule postrouting", "add rule prerouting"]
    assert after == [f"delete chain {bridge}" for bridge in bridges]


def test_elements_come_back_from_the_listing_with_their_counters() -> None:
    seen = observed(listed_map(pair(22), pair({"range": [1000, 1007]}, "10.0.9.9")), LOOKUP)
    assert seen.live == (
        Live(forward("tcp 22"), 0, packets=3, octets=180),
        Live(forward("tcp 1000-1007", to="10.0.9.9"), 0, packets=3, octets=180),
    )
    assert (seen.mapped, seen.foreign, seen.unsound) == ({ENTERING: 30}, (), "")


def test_a_single_flag_may_be_listed_by_itself() -> None:
    """As nft 1.1.4 and later do."""
    seen = observed(listed_map(pair(22), flags="interval"), LOOKUP)
    assert seen == observed(listed_map(pair(22)), LOOKUP)
    assert not seen.unsound


def test_an_empty_map_is_one_of_ours() -> None:
    empty = listed_map()
    del empty["map"]["elem"]
    seen = observed(empty, LOOKUP)
    assert (seen.live, seen.mapped, seen.unsound) == ((), {ENTERING: 30}, "")


def test_an_element_without_a_comment_has_no_owner() -> None:
    bare = pair(22)
    del bare[0]["elem"]["comment"]  # type: ignore[index]  # it is a dict
    assert [live.rule.owner for live in observed(listed_map(bare), LOOKUP).live] == [""]


def test_a_rule_beside_the_map_it_would_be_in_is_foreign() -> None:
    plain = listed(ON_ETH0, IPV4, SSH, COUNTER, TO_GUEST)
    elsewhere = listed(ON_ETH0, IPV4, COUNTER, TO_GUEST, handle=8)  # of all ports
    seen = observed(listed_map(pair(22)), LOOKUP, plain, elsewhere)
    assert [live.handle for live in seen.live] == [8, 0]
    assert seen.foreign == (Foreign("prerouting", 7, f"dport of {OWNER}"),)
    assert not seen.unsound


NOT_OURS = "map prerouting-ip-tcp-eth0 is not as we make it"
KEPT = pair({"range": [1000, 1007]})


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        pytest.param([LOOKUP], NOT_OURS, id="a lookup without its map"),
        pytest.param([listed_map(KEPT, map="ipv6_addr"), LOOKUP], NOT_OURS, id="other targets"),
        pytest.param([listed_map(KEPT, type="ipv4_addr"), LOOKUP], NOT_OURS, id="other keys"),
        pytest.param([listed_map(KEPT, flags=[]), LOOKUP], NOT_OURS, id="no intervals"),
        pytest.param(
            [listed_map(KEPT, flags=["interval", "timeout"]), LOOKUP], NOT_OURS, id="timeouts"
        ),
        pytest.param([listed_map(KEPT, stmt=None), LOOKUP], NOT_OURS, id="no counters"),
        pytest.param([listed_map(KEPT, size=99), LOOKUP], NOT_OURS, id="a size"),
        pytest.param([listed_map(KEPT, elem="x"), LOOKUP], NOT_OURS, id="elements that are a word"),
        pytest.param([listed_map(KEPT, pair("*")), LOOKUP], NOT_OURS, id="a catch-all"),
        pytest.param([listed_map(KEPT, pair("ssh")), LOOKUP], NOT_OURS, id="a port by name"),
        pytest.param([listed_map(KEPT, 22), LOOKUP], NOT_OURS, id="half an element"),
        pytest.param([listed_map(KEPT, pair(70000)), LOOKUP], NOT_OURS, id="no port at all"),
    ],
)
def test_a_map_that_is_not_as_we_make_it_is_unsound(entries: list[Json], why: str) -> None:
    seen = observed(*entries)
    assert (seen.unsound, seen.mapped, seen.foreign) == (why, {}, ())
    assert diff("blue", want(*CROWD), seen).table is Table.REMAKE


@pytest.mark.parametrize(
    ("strange", "ports"),
    [
        pytest.param(pair(0), (0, 0), id="port zero"),
        pytest.param(pair({"range": [0, 9]}), (0, 9), id="a range from port zero on"),
        pytest.param(pair(22, "fd10::2"), (22, 22), id="a target of the other family"),
        pytest.param(pair(22, ["a"]), (22, 22), id="many targets"),
        pytest.param(pair(22, timeout=9), (22, 22), id="an element that expires"),
        pytest.param(pair(22, comment="\x1b[2J"), (22, 22), id="an odd comment"),
        pytest.param([22, "10.0.2.2"], (22, 22), id="no counter"),
    ],
)
def test_a_strange_element_goes_by_its_ports_and_ours_stay(
    strange: object, ports: tuple[int, int]
) -> None:
    seen = observed(listed_map(KEPT, strange), LOOKUP)
    assert [(one.kind, one.name, one.ports) for one in seen.foreign] == [("element", NAME, ports)]
    assert (seen.mapped, seen.unsound, len(seen.live)) == ({ENTERING: 30}, "", 1)
    plan = diff("blue", want(*(live.rule for live in seen.live), *CROWD), seen)
    key = ports[0] if ports[0] == ports[1] else {"range": list(ports)}
    gone: Any = encode(plan)[0]["delete"]
    assert (plan.table, gone["element"]["name"], gone["element"]["elem"]) == (
        Table.KEEP,
        NAME,
        [key],
    )
    assert script(plan).startswith(f"delete element inet portranger {NAME} {{ {ports[0]}-")


def test_a_second_lookup_goes_by_its_handle() -> None:
    again = {"rule": LOOKUP["rule"] | {"handle": 31}}
    seen = observed(listed_map(KEPT), LOOKUP, again)
    assert (seen.mapped, seen.unsound) == ({ENTERING: 30}, "")
    assert [(one.kind, one.handle) for one in seen.foreign] == [("rule", 31)]


def test_a_map_without_its_lookup_goes_by_its_name_before_it_is_made_anew() -> None:
    seen = observed(listed_map(KEPT))
    assert (seen.live, seen.mapped, seen.unsound) == ((), {}, "")
    assert [(one.kind, one.name) for one in seen.foreign] == [("map", NAME)]
    plan = diff("blue", want(*CROWD), seen)
    assert [gist(command) for command in encode(plan) if "map" in str(gist(command))] == [
        f"delete map {NAME}",
        f"add map {NAME}",
    ]


def test_an_orphan_of_the_same_name_goes_before_the_map_is_filled() -> None:
    """As after a kill between the two transactions that make rules a map."""
    orphan = Foreign("", 0, f"map {NAME}", "map", NAME)
    rules = tuple(Live(rule, 100 + i) for i, rule in enumerate(CROWD[:7]))
    observed = replace(LIVE, live=rules, foreign=(orphan,), mapped={})
    first, second = map(commands, transactions(diff("blue", want(*CROWD[:8]), observed)))
    assert [gist(command) for command in first] == [
        f"delete map {NAME}",
        f"add map {NAME}",
        f"add element {NAME}",
    ]
    assert [gist(command) for command in second] == [
        *(f"delete rule {100 + i}" for i in range(7)),
        "add rule prerouting",
    ]


@pytest.mark.parametrize(
    "strange",
    [pair(0), pair("*"), pair(22, comment="\x1b"), pair(22, "fd10::2"), [22, "10.0.2.2"], None],
)
def test_what_is_ours_beside_a_strange_element_is_still_known(strange: object) -> None:
    """Else a machine that waits would lose its ranges when the table is made anew."""
    seen = observed(listed_map(KEPT, strange), LOOKUP)
    assert [str(live.rule.ports) for live in seen.live] == ["1000-1007"]


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(listed(ON_ETH0, IPV4, COUNTER, LOOKED_UP), id="with a comment"),
        pytest.param(bare(ON_ETH0, IPV4, LOOKED_UP), id="without a counter"),
        pytest.param(bare(ON_ETH0, COUNTER, LOOKED_UP), id="of any family"),
        pytest.param(bare(ON_ETH0, IPV4, SSH, COUNTER, LOOKED_UP), id="of one port"),
        pytest.param(bare(FROM_GUEST, COUNTER, LOOKED_UP), id="of one source"),
        pytest.param(bare(IPV4, COUNTER, LOOKED_UP), id="on any link"),
        pytest.param(bare(ON_ETH0, IPV4, COUNTER, LOOKED_UP, chain="output"), id="elsewhere"),
        pytest.param(
            bare(
                ON_ETH0,
                IPV4,
                COUNTER,
                {
                    "dnat": {
                        "family": "ip",
                        "addr": {
                            "map": {
                                "key": {"payload": {"protocol": "tcp", "field": "sport"}},
                                "data": f"@{NAME}",
                            }
                        },
                    }
                },
            ),
            id="by the source port",
        ),
        pytest.param(
            bare(ON_ETH0, IPV4, COUNTER, {"dnat": LOOKED_UP["dnat"] | {"flags": "random"}}),
            id="with flags",
        ),
        pytest.param(
            bare(ON_ETH0, IPV4, COUNTER, LOOKED_UP, {"accept": None}), id="with another verdict"
        ),
    ],
)
def test_another_rule_that_looks_into_our_map_is_foreign(rule: Json) -> None:
    seen = observed(listed_map(KEPT), LOOKUP, rule)
    assert [foreign.handle for foreign in seen.foreign] == [7]
    assert (seen.mapped, seen.unsound) == ({ENTERING: 30}, "")


def test_a_bridge_that_an_edit_left_is_known_and_serves_the_next() -> None:
    called = "bridge-before-prerouting"
    chain = base_chain(called, -102, hook="prerouting")
    inside = listed(ON_ETH0, IPV4, SSH, COUNTER, TO_GUEST, chain=called)
    seen = observed(chain, inside, listed_map(KEPT), LOOKUP)
    assert [(one.kind, one.name) for one in seen.foreign] == [("chain", called)]
    assert (seen.unsound, len(seen.live)) == ("", 1)
    left = replace(mapped(*CROWD), foreign=seen.foreign)
    plan = diff("blue", want(*CROWD[1:], forward("tcp 1000-1008")), left)
    before, _, after = map(commands, transactions(plan))
    all_of_it = [f"add rule {called}"] * len(CROWD)  # as nobody knows what is in it
    assert [gist(command) for command in before] == [f"flush chain {called}", *all_of_it]
    assert [gist(command) for command in after] == [f"delete chain {called}"]


def test_what_others_may_have_served_is_in_the_map_before_it_is_guarded() -> None:
    guard = Rule(chain=Chain.PREROUTING, family=Family.IP, owner=OWNER)
    plan = diff("blue", want(*CROWD, forward("tcp 5000"), guard), mapped(*CROWD))
    assert [[gist(one) for one in commands(part)] for part in transactions(plan)] == [
        [f"add element {NAME}"],
        ["add rule prerouting"],
    ]


# ----------------------------------------------------------------------- maps from port to port

SHIFTED = replace(ENTERING, shifted=True)
LOOKUP_SHIFTED = bare(ON_ETH0, IPV4, COUNTER, lookup_verdict(SHIFTED), handle=30)
AWAY = listed_map(pair({"range": [1000, 1001]}), name=f"{NAME}/shifted")


def listed_ports(*pairs: object, **more: object) -> Json:
    value = {"family": "inet", "table": "portranger", "name": f"{NAME}/shifted/ports", "handle": 28}
    kinds = {"type": "inet_service", "map": "inet_service"}
    return {"map": value | kinds | {"elem": list(pairs)} | more}


def test_a_shifted_range_comes_back_from_its_two_maps() -> None:
    seen = observed(AWAY, listed_ports([1000, 7000], [1001, 7001]), LOOKUP_SHIFTED)
    assert [live.rule for live in seen.live] == [replace(forward("tcp 1000-1001"), to_port=7000)]
    assert (seen.mapped, seen.unsound, seen.foreign) == ({SHIFTED: 30}, "", ())


@pytest.mark.parametrize(
    "ports",
    [
        pytest.param([], id="none"),
        pytest.param([listed_ports([1000, 7000], [1001, 7001], flags=["timeout"])], id="flags"),
        pytest.param([listed_ports([1000, 7000], [1001, 7001], map="mark")], id="other targets"),
        pytest.param([listed_ports([1000, 7000], [1001, "afs"])], id="a port by name"),
        pytest.param([listed_ports([1000, 7000], 1001)], id="half an element"),
        pytest.param([listed_ports([1000, 7000], [1001, 7000])], id="a range that collapses"),
        pytest.param([listed_ports([1000, 7000], [1001, 7001], [9, 9])], id="a port of no range"),
    ],
)
def test_a_map_from_port_to_port_that_is_not_as_we_make_it_is_unsound(ports: list[Json]) -> None:
    seen = observed(AWAY, *ports, LOOKUP_SHIFTED)
    assert (seen.unsound, seen.mapped) == (f"map {NAME}/shifted is not as we make it", {})


def test_a_range_whose_ports_lead_nowhere_goes() -> None:
    seen = observed(AWAY, listed_ports(), LOOKUP_SHIFTED)
    assert [(one.kind, one.ports) for one in seen.foreign] == [("element", (1000, 1001))]
    assert (seen.live, seen.unsound) == ((), "")
