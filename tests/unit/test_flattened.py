"""What is desired, for tables without sets: one rule for each peer."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from rules.flattened import flattened
from rules.model import Chain, Desired, Family, Members, Observed, Peers, Protocol, Rule
from rules.plan import diff
from rules.ports import PortRange
from rules.values import replace
from rules.xtables import encode, script, statement
from tests.unit.samples import OWNER, forward

WEB, DNS = Peers(Family.IP, "aa"), Peers(Family.IP, "bb")
GUEST = ip_address("10.0.2.2")
INTO = Rule(
    chain=Chain.FORWARD,
    family=Family.IP,
    owner=OWNER,
    protocol=Protocol.TCP,
    ports=PortRange(80, 90),
    destination=GUEST,
    accepts=True,
    peers=WEB,
)
GUARD = Rule(chain=Chain.FORWARD, family=Family.IP, owner=OWNER, destination=GUEST)
RESUMING = Rule(chain=Chain.FORWARD, family=Family.IP, owner=OWNER, accepts=True)


def members(*texts: str) -> Members:
    return frozenset(map(ip_network, texts))


def peer(rule: Rule, text: str) -> Rule:
    return replace(rule, peers=None, peer=ip_network(text))


def test_a_rule_becomes_one_for_each_member_and_there_are_no_sets() -> None:
    desired = Desired(
        rules=frozenset({INTO, GUARD, RESUMING, forward()}),
        sets={WEB: members("10.1.0.0/16", "10.3.4.5/32")},
    )
    assert flattened(desired) == Desired(
        rules=frozenset(
            {peer(INTO, "10.1.0.0/16"), peer(INTO, "10.3.4.5/32"), GUARD, RESUMING, forward()}
        )
    )


@pytest.mark.parametrize("sets", [{}, {WEB: members()}, {DNS: members("10.0.0.0/8")}])
def test_what_nobody_is_in_accepts_nobody(sets: dict[Peers, Members]) -> None:
    flat = flattened(Desired(rules=frozenset({INTO, GUARD}), sets=sets))
    assert flat == Desired(rules=frozenset({GUARD}))


def test_what_is_kept_is_flattened_as_well() -> None:
    flat = flattened(Desired(kept=frozenset({INTO, GUARD}), sets={WEB: members("10.1.0.0/16")}))
    assert flat == Desired(kept=frozenset({peer(INTO, "10.1.0.0/16"), GUARD}))


def test_a_set_of_all_addresses_is_anybody_as_the_tables_list_it() -> None:
    flat = flattened(Desired(rules=frozenset({INTO}), sets={WEB: members("0.0.0.0/0")}))
    assert flat == Desired(rules=frozenset({replace(INTO, peers=None)}))


def test_what_names_no_sets_is_the_very_same() -> None:
    desired = Desired(rules=frozenset({GUARD, forward()}), unclaimed_stay=True)
    assert flattened(desired) is desired
    flat = flattened(Desired(rules=frozenset({INTO}), sets={WEB: members("10.0.0.0/8")}))
    assert flattened(flat) is flat


def test_a_rule_that_names_a_set_is_never_written_without_it() -> None:
    with pytest.raises(ValueError, match="these tables have no set peers-ip-aa"):
        encode(INTO)


def test_a_script_needs_no_namespace_to_know_that_there_are_no_sets() -> None:
    desired = Desired(rules=frozenset({INTO}), sets={WEB: members("10.1.0.0/16")})
    lines = script(diff("blue", desired, Observed(mapped={}))).splitlines()
    flat = statement(peer(INTO, "10.1.0.0/16"))
    assert [line for line in lines if "-A" in line] == [f"-4 -A PORTRANGER-FORWARD {flat}"]
