"""A shifted range goes port by port to its target, in the words of every backend."""

from ipaddress import ip_address

import pytest

from rules import nft_listing, nft_script, xtables
from rules.model import Chain, Family, Protocol, Rule
from rules.plan import Plan, Table
from rules.ports import PortRange
from rules.trace import explained
from rules.words import rule_json, target
from tests.unit.samples import encode

RANGE = Rule(
    chain=Chain.PREROUTING,
    family=Family.IP,
    owner="Service/default/sip/media",
    protocol=Protocol.UDP,
    ports=PortRange(9000, 9002),
    interface="eth0",
    to=ip_address("10.0.2.2"),
    to_port=7000,
)
PORT = Rule(
    chain=Chain.PREROUTING,
    family=Family.IP6,
    owner="Service/default/sip/signal",
    protocol=Protocol.TCP,
    ports=PortRange(5060, 5060),
    interface="eth0",
    to=ip_address("fd10:0:2::2"),
    to_port=15060,
)


@pytest.mark.parametrize("rule", [RANGE, PORT], ids=["a range", "a port"])
def test_nftables_gives_back_what_it_was_given(rule: Rule) -> None:
    plan = Plan(netns="x", table=Table.CREATE, chains=(Chain.PREROUTING,), add=(rule,))
    commands = encode(plan)
    written = commands[-1]["add"]["rule"]  # type: ignore[index]
    listed = [
        {"counter": {"packets": 1, "bytes": 2}} if "counter" in one else one
        for one in written["expr"]
    ]
    observed = nft_listing.decode([{"rule": {**written, "expr": listed, "handle": 4}}])
    assert [live.rule for live in observed.live] == [rule]


@pytest.mark.parametrize("rule", [RANGE, PORT], ids=["a range", "a port"])
def test_iptables_gives_back_what_it_was_given(rule: Rule) -> None:
    fields = {**xtables.encode(rule), "counters": (1, 2)}
    listing = {
        "chains": {"nat PORTRANGER-PREROUTING": [fields]},
        "jumps": {"nat PORTRANGER-PREROUTING": [0]},
    }
    observed = xtables.decode({rule.family: listing})
    assert [live.rule for live in observed.live] == [rule]


def test_a_range_that_collapses_is_not_ours() -> None:
    written = encode(Plan(netns="x", add=(RANGE,)))[-1]["add"]["rule"]  # type: ignore[index]
    written["expr"][-2] = {"counter": {"packets": 0, "bytes": 0}}
    written["expr"][-1]["dnat"]["port"]["map"]["data"]["set"][2] = [9002, 7000]
    assert nft_listing.decode([{"rule": {**written, "handle": 4}}]).live == ()


def test_the_words_of_each_backend_name_every_port() -> None:
    assert "dnat ip to 10.0.2.2: udp dport map { 9000 : 7000, 9001 : 7001, 9002 : 7002 }" in (
        nft_script.statement(RANGE)
    )
    assert "dnat ip6 to [fd10:0:2::2]:15060" in nft_script.statement(PORT)
    assert "--to-destination 10.0.2.2:7000-7002/9000" in xtables.statement(RANGE)
    assert "--to-destination [fd10:0:2::2]:15060" in xtables.statement(PORT)


def test_people_and_programs_see_the_target_ports() -> None:
    assert rule_json(RANGE)["to_port"] == "7000-7002"
    assert rule_json(PORT)["to_port"] == "15060"
    assert target(RANGE) == "10.0.2.2 7000-7002"
    (line,) = explained([RANGE], Protocol.UDP, 9002, ip_address("192.0.2.9"))
    assert "goes to 10.0.2.2:7002" in line
