"""What is made out of filters of others: which let pass what is sent on, in bounded work."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from rules import foreign_filters
from rules.foreign_filters import (
    MOST_FLOWS,
    MOST_STEPS,
    Filter,
    Flow,
    dropped,
    flows,
    remedy,
    warnings,
)
from rules.model import Family, Protocol
from rules.netlink_rules import DPORT
from rules.ports import PortRange
from rules.values import replace
from tests.unit.samples import egress, forward, from_inside, link, space

LINK = {"meta": {"key": "iifname"}}
STATE = {"ct": {"key": "state"}}
TO = {"payload": {"protocol": "ip", "field": "daddr"}}


def flow(first: int = 22, last: int = 80) -> Flow:
    return Flow(
        family=Family.IP,
        destination=ip_address("10.0.2.2"),
        protocol=Protocol.TCP,
        ports=PortRange(first, last),
        enters="eth0",
    )


def chains(**rules: list[list[dict[str, Any]]]) -> Filter:
    return Filter(
        where="table ip f",
        remedy="change it",
        families=frozenset({Family.IP}),
        chain="forward",
        drops=False,
        rules=rules,
    )


def match(left: object, *members: object) -> dict[str, Any]:
    return {"match": {"left": left, "op": "==", "right": {"set": list(members)}}}


def jumps(target: str, count: int = 1) -> list[list[dict[str, Any]]]:
    return [[{"jump": {"target": target}}]] * count


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each rule that was looked at."""
    found: list[None] = []
    applied = foreign_filters._applied

    def counted(*given: Any) -> Any:
        found.append(None)
        assert len(found) <= MOST_STEPS + 1
        return applied(*given)

    monkeypatch.setattr(foreign_filters, "_applied", counted)
    return found


def test_many_ways_through_chains_take_as_long_as_their_rules(steps: list[None]) -> None:
    """The kernel takes them within milliseconds, from whoever is root in a namespace."""
    ways = {f"c{place}": jumps(f"c{place + 1}", 8) for place in range(14)}
    table = chains(forward=jumps("c0"), **ways, c14=[[{"drop": None}]])
    assert dropped(table, flow()) == "a rule of chain c14 drops them"
    del ways["c13"]
    steps.clear()
    assert not dropped(chains(forward=jumps("c0"), **ways), flow())
    assert len(steps) == 1 + 13 * 8


def test_a_long_row_of_chains_is_followed_for_a_while() -> None:
    row = {f"c{place}": jumps(f"c{place + 1}") for place in range(3000)}
    assert not dropped(chains(forward=jumps("c0"), **row, c3000=[[{"drop": None}]]), flow())


def test_many_rules_and_flows_are_compared_up_to_a_limit(steps: list[None]) -> None:
    many = chains(forward=[[match(DPORT, 60000), {"accept": None}]] * (MOST_STEPS // 10))
    sent = [flow(port, port) for port in range(1, MOST_FLOWS + 1)]
    assert list(warnings([many], sent)) == []
    assert len(steps) > MOST_STEPS // 10


def test_large_sets_are_compared_up_to_a_limit(steps: list[None]) -> None:
    large = [match(DPORT, *range(1000, 1000 + MOST_STEPS // 10)), {"accept": None}]
    assert list(warnings([chains(forward=[large] * 100)], [flow()])) == []
    assert len(steps) <= 11


@pytest.mark.parametrize(
    ("condition", "meets"),
    [
        (match(LINK, "eth*"), True),
        (match(LINK, "veth*", "lo"), False),
        (match(LINK, {"range": [None, None]}), False),  # nobody can tell
        (match(LINK, "*"), True),
        (match(DPORT, "*"), True),
        (match(TO, "*"), True),
        (match(STATE, 2, "*"), True),
    ],
)
def test_wildcards_of_links_and_sets_are_understood(
    condition: dict[str, Any], *, meets: bool
) -> None:
    assert bool(dropped(chains(forward=[[condition, {"drop": None}]]), flow())) is meets


def test_what_is_sent_on_is_known_by_its_end_and_its_links() -> None:
    near = space(
        link("eth0", "192.0.2.2/24"), link("br0", "10.0.0.1/8"), link("br1", "10.0.2.1/24")
    )
    rules = [forward("tcp 22"), forward("tcp 22", owner="another"), from_inside(), egress()]
    (found,) = flows(rules, near)
    assert found == replace(flow(22, 22), leaves="br1")
    assert str(found) == "tcp 22 to 10.0.2.2"


def test_nobody_knows_by_which_link_flows_leave_to_an_address_elsewhere() -> None:
    (found,) = flows([forward(None)], space(link("eth0", "192.0.2.2/24")))
    assert found.leaves is None
    assert str(found) == "10.0.2.2"


def test_a_shifted_range_is_known_by_the_ports_of_the_guest() -> None:
    (found,) = flows([replace(forward("tcp 8000-8009"), to_port=80)], space())
    assert found.ports == PortRange(80, 89)


@pytest.mark.parametrize(
    ("table", "chain", "words"),
    [
        (("ip", "filter"), "FORWARD", "iptables-nft -I FORWARD -m conntrack --ctstate DNAT"),
        (("ip6", "filter"), "FORWARD", "ip6tables-nft -I FORWARD -m conntrack --ctstate DNAT"),
        (("ip", "filter"), "forward", "nft insert rule ip filter forward ct status dnat"),
        (("inet", "fw"), "FORWARD", "nft insert rule inet fw FORWARD ct status dnat"),
    ],
)
def test_a_remedy_is_for_the_program_that_wrote_the_table(
    table: tuple[str, str], chain: str, words: str
) -> None:
    assert words in remedy(table, chain)


def compared(left: object, op: str, right: object) -> dict[str, Any]:
    return {"match": {"left": left, "op": op, "right": right}}


def test_a_filter_that_drops_some_of_the_ports_is_told_with_these() -> None:
    drop: dict[str, Any] = {"drop": None}
    for condition, ports in [
        (compared(DPORT, "==", 50), "50"),
        (compared(DPORT, "==", {"range": [1, 30]}), "22-30"),
        (compared(DPORT, ">=", 79), "79-80"),
        (match(DPORT, 443, 60), "60"),
        (compared(DPORT, "!=", {"range": [22, 79]}), "80"),
    ]:
        [told] = warnings([chains(forward=[[condition, drop]])], [flow()])
        assert f"(tcp {ports} to 10.0.2.2)" in told
    for condition in (compared(DPORT, "==", 443), compared(DPORT, "==", {"range": [None, None]})):
        assert not [*warnings([chains(forward=[[condition, drop]])], [flow()])]
    accepting = chains(forward=[[compared(DPORT, "==", {"range": [22, 60]}), {"accept": None}]])
    [told] = warnings([replace(accepting, drops=True)], [flow()])
    assert "(tcp 61-80 to 10.0.2.2)" in told


LEAVES = {"meta": {"key": "oifname"}}
FAMILY = {"meta": {"key": "nfproto"}}


@pytest.mark.parametrize(
    ("condition", "meets"),
    [
        (compared(DPORT, ">=", 22), True),
        (compared(DPORT, "<=", 80), True),
        (compared(DPORT, "<=", 21), False),
        (compared(DPORT, "!=", 443), True),
        (compared(DPORT, "!=", {"range": [1, 1000]}), False),
        (compared(DPORT, "!=", 50), None),  # some of them are
        (compared(DPORT, "==", 50), None),
        (compared(FAMILY, "==", "ipv4"), True),
        (compared(FAMILY, "==", "ipv6"), False),
        (compared(TO, "==", "10.0.2.2"), True),
        (compared(TO, "==", "10.0.2.3"), False),
        (compared(TO, "==", {"range": ["10.0.2.1", "10.0.2.9"]}), None),
        (compared(LINK, ">", "eth"), None),
        (compared(LEAVES, "==", "tap0"), None),  # by any
        ({"vmap": {"key": DPORT, "data": {"set": []}}}, None),
    ],
)
def test_a_condition_is_met_by_all_by_none_or_nobody_knows(
    condition: dict[str, Any], *, meets: bool | None
) -> None:
    """An accepting rule and a dropping one count only if all such flows meet the condition."""
    accepting = replace(chains(forward=[[condition, {"accept": None}]]), drops=True)
    assert bool(dropped(accepting, flow())) is (meets is not True)
    dropping = chains(forward=[[condition, {"drop": None}]])
    assert bool(dropped(dropping, flow())) is (meets is True)
    assert foreign_filters._applied([condition, {"drop": None}], flow()) == (
        ([], False) if meets is False else ([("drop", "")], meets is True)
    )


@pytest.mark.parametrize(
    ("target", "drops"), [("REJECT", True), ("DROP", True), ("LOG", False), ("TCPMSS", False)]
)
def test_targets_of_iptables_that_end_a_flow_are_known(target: str, *, drops: bool) -> None:
    table = chains(forward=[[{"xt": {"type": "target", "name": target}}]])
    assert bool(dropped(table, flow())) is drops
