"""What is made out of filters of others: which let pass what is sent on, in bounded work."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from rules import foreign_filters
from rules.foreign_filters import MOST_FLOWS, MOST_STEPS, Filter, Flow, dropped, warnings
from rules.model import Family, Protocol
from rules.netlink_rules import DPORT
from rules.ports import PortRange

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
