"""Jumps are followed through the chains of others, with an end to all that they may hold."""

from ipaddress import ip_address

import pytest

from rules import translations
from rules.model import Family, Protocol
from rules.ports import PortRange
from rules.translations import ANY, DEEPEST, MANY, Chains, Packets, TooMany, listed

DPORT = {"payload": {"protocol": "tcp", "field": "dport"}}


def ports(first: int, last: int | None = None) -> Packets:
    return Packets(ports=(PortRange(first, last or first),))


def found(chains: Chains) -> list[str]:
    return [f"{one.where}: {', '.join(map(str, one.ports))}" for one in chains.translations()]


def test_a_chain_that_two_rules_jump_to_translates_for_both() -> None:
    chains = Chains("t")
    chains.base("in")
    chains.add("in", [(ports(80), "to"), (ports(90), "to")])
    chains.add("to", [(ANY, None)])
    assert found(chains) == ["t, chain in: 80", "t, chain in: 90"]


def test_a_jump_to_a_chain_that_does_not_take_such_packets_leads_nowhere() -> None:
    chains = Chains("t")
    chains.base("in")
    chains.add("in", [(ports(80), "to"), (ports(90), "to")])
    chains.add("to", [(ports(85, 95), None)])
    assert found(chains) == ["t, chain to: 90"]


def test_jumps_in_a_circle_end() -> None:
    chains = Chains("t")
    chains.base("a")
    chains.add("a", [(ports(80), "b")])
    chains.add("b", [(ANY, "a"), (ANY, None)])
    assert found(chains) == ["t, chain a: 80"]


@pytest.mark.parametrize("more", [0, 1])
def test_jumps_are_followed_to_a_depth(more: int) -> None:
    chains = Chains("t")
    chains.base("0")
    for depth in range(DEEPEST + more):
        chains.add(str(depth), [(ANY, str(depth + 1))])
    chains.add(str(DEEPEST + more), [(ports(80), None)])
    if more:
        with pytest.raises(TooMany):
            found(chains)
    else:
        assert found(chains) == [f"t, chain {DEEPEST}: 80"]


@pytest.mark.parametrize(("most", "enough"), [(4, True), (3, False)])
def test_only_so_many_ways_are_followed(
    most: int, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "MOST", most)
    chains = Chains("t")
    chains.base("in")
    chains.add("in", [(ANY, "to")])
    chains.add("to", [(ports(80), None), (ports(90), None)])  # two here, and two on the way
    if enough:
        assert found(chains) == ["t, chain to: 80", "t, chain to: 90"]
    else:
        with pytest.raises(TooMany):
            found(chains)


def test_more_translations_than_anybody_reads_are_told_together() -> None:
    chains = Chains("t")
    chains.base("in")
    chains.add("in", [(ports(2 * one), None) for one in range(1, MANY + 1)])
    chains.add("in", [(Packets(destination=ip_address("192.0.2.1")), None)])
    whole, together = chains.translations()
    assert (whole.destination, whole.ports) == (ip_address("192.0.2.1"), ())
    assert together.ports == tuple(PortRange(2 * one, 2 * one) for one in range(1, MANY + 1))


def test_a_verdict_map_leads_where_its_elements_say() -> None:
    place = {"family": "ip", "table": "nat"}
    chain = {**place, "name": "in", "type": "nat", "hook": "prerouting", "prio": -100}
    elements = [
        [80, {"jump": {"target": "web"}}],
        [{"elem": {"val": {"range": [8000, 8010]}, "comment": "web"}}, {"goto": {"target": "web"}}],
        [22, {"drop": None}],
        [{"range": [100, 200]}, None],
    ]
    spread = {"vmap": {"key": DPORT, "data": "@go"}}
    told = listed(
        [
            {"chain": chain},
            {"map": {**place, "name": "go", "elem": elements}},
            {"rule": {**place, "chain": "in", "expr": [spread]}},
            {"rule": {**place, "chain": "web", "expr": [{"dnat": {"addr": "10.0.0.1"}}]}},
        ]
    )
    assert [(one.family, one.protocol, one.ports) for one in told] == [
        (Family.IP, Protocol.TCP, (PortRange(80, 80), PortRange(8000, 8010)))
    ]
