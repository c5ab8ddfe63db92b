"""Two guests in one namespace, with packets: what one may send and what the other may receive are
two verdicts, and a flow between them needs both. In both backends, and after an upgrade from the
release that had both verdicts in one chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from agent.kernel.lab import Lab
from agent.reconcile import converge
from rules.desired import desire
from rules.model import Chain, Desired, Family, Fence, Grant, Machine, Protocol
from rules.values import replace
from tests.datapath.policing import Ask, answered
from tests.nodes import answering
from tests.spaces import BACKENDS, ip, kernel, lab, observed, space, using, vm

TCP, UDP = Protocol.TCP, Protocol.UDP
FIRST = {Family.IP: "10.0.2.2", Family.IP6: "fd10:0:2::2"}
SECOND = {Family.IP: "10.0.3.2", Family.IP6: "fd10:0:3::2"}
POLICY = "NetworkPolicy/default/p"
SHUT = Fence(policies=POLICY)
OPEN = Fence(
    policies=POLICY,
    grants=tuple(
        Grant(family=family, peers=None, protocol=None, ports=None, policies=POLICY)
        for family in Family
    ),
)


class Pair(NamedTuple):
    lab: Lab
    second: str  # the namespace of the other guest
    backend: str


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The second guest is behind a bridge of its own."""
    with using(request.param), lab() as made, space() as second:
        ip(
            made.pod,
            f"link add tap1 type veth peer name eth0 netns {second}",
            "link add k6t-two type bridge mcast_snooping 0",
            "link set tap1 master k6t-two up",
            "addr add 10.0.3.1/24 dev k6t-two",
            "addr add fd10:0:3::1/120 dev k6t-two nodad",
            "link set k6t-two up",
        )
        ip(
            second,
            "link set lo up",
            "addr add 10.0.3.2/24 dev eth0",
            "addr add fd10:0:3::2/120 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.0.3.1",
            "route add ::/0 via fd10:0:3::1",
        )
        served = [(TCP, 80), (UDP, 80)]
        with answering(made.guest, "first", served), answering(second, "second", served):
            yield Pair(made, second, request.param)


def machines(
    first: tuple[Fence | None, Fence | None], second: tuple[Fence | None, Fence | None]
) -> list[Machine]:
    """Each with what it may receive and send."""
    one, two = vm("a", "80"), vm("b", "81", ipv4="10.0.3.0/24", ipv6="fd10:0:3::/120")
    return [
        replace(machine, hears=hears, says=says)
        for machine, (hears, says) in ((one, first), (two, second))
    ]


def wanted(pair: Pair, *made: Machine) -> Desired:
    with kernel(pair.backend).opened(pair.lab.pod) as namespace:
        return desire(made, namespace.surroundings())


def applied(pair: Pair, desired: Desired) -> None:
    with kernel(pair.backend).opened(pair.lab.pod) as namespace:
        converge(pair.lab.pod, desired, namespace)


def reached(pair: Pair) -> set[str]:
    """Who is answered by whom: 'first to second', of both families and protocols alike."""
    ways = {
        Ask(where, "", protocol, to[family], 80): name
        for name, where, to in (
            ("first to second", pair.lab.guest, SECOND),
            ("second to first", pair.second, FIRST),
        )
        for protocol in (TCP, UDP)
        for family in Family
    }
    found = [ways[ask] for ask in answered(list(ways))]
    assert all(found.count(name) == 4 for name in found), found
    return set(found)


def test_without_policies_both_guests_reach_each_other(pair: Pair) -> None:
    applied(pair, wanted(pair, *machines((None, None), (None, None))))
    assert reached(pair) == {"first to second", "second to first"}


CASES = {
    "egress allowed, ingress denied": ((None, OPEN), (SHUT, None), {"second to first"}),
    "ingress allowed, egress denied": ((None, SHUT), (OPEN, None), {"second to first"}),
    "both allowed": ((None, OPEN), (OPEN, None), {"first to second", "second to first"}),
    "both denied": ((None, SHUT), (SHUT, None), {"second to first"}),
    "all allowed but what the second receives": ((OPEN, OPEN), (SHUT, OPEN), {"second to first"}),
    "all allowed but what the first sends": ((OPEN, SHUT), (OPEN, OPEN), {"second to first"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_flow_between_guests_needs_both_verdicts(pair: Pair, case: str) -> None:
    first, second, passes = CASES[case]
    applied(pair, wanted(pair, *machines(first, second)))
    assert reached(pair) == passes


def as_before(desired: Desired) -> Desired:
    """The rules of the release in which all verdicts were in one chain."""
    return replace(
        desired,
        rules=frozenset(
            replace(rule, chain=Chain.FORWARD) if rule.chain is Chain.EGRESS else rule
            for rule in desired.rules
        ),
    )


def test_rules_of_one_chain_become_two(pair: Pair) -> None:
    desired = wanted(pair, *machines((None, OPEN), (SHUT, None)))
    allowed = wanted(pair, *machines((None, OPEN), (OPEN, None)))
    for before, after, passes in (
        (as_before(desired), desired, {"second to first"}),
        (as_before(allowed), allowed, {"first to second", "second to first"}),
    ):
        applied(pair, Desired())
        applied(pair, before)
        assert {live.rule.chain for live in observed(pair.lab.pod).live} >= {Chain.FORWARD}
        assert "first to second" in reached(pair)  # as it was
        applied(pair, after)
        assert {live.rule for live in observed(pair.lab.pod).live} == after.rules
        assert reached(pair) == passes
