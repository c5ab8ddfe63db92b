"""Changes in the legacy tables, with packets: ports and policies, which are several commits. Who
may come in before and after is not kept out in between, and nobody else is let in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from agent.kernel.iptables import Workers
from agent.kernel.netns import opened
from agent.reconcile import converge
from bench.hitless_net import Net, built, compiled, opening
from rules.desired import desire
from rules.flattened import flattened
from rules.model import Desired, Family, Fence, Grant, Machine, Protocol
from rules.plan import diff
from rules.ports import PortRange
from rules.values import replace
from tests.datapath.test_two_guests import OPEN, POLICY, SHUT, Pair, applied, machines, reached
from tests.datapath.test_two_guests import pair as two_guests
from tests.datapath.test_two_guests import wanted as wanted_by
from tests.property.legacy_tables import commits
from tests.spaces import IPTABLES, kernel, observed, vm

pair = two_guests
RATE = 3000


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with built() as made:
        yield made


def allowing(*ports: PortRange) -> Fence:
    """These ports, of both protocols and families."""
    return Fence(
        policies=POLICY,
        grants=tuple(
            Grant(family=family, peers=None, protocol=protocol, ports=one, policies=POLICY)
            for family in Family
            for protocol in (Protocol.TCP, Protocol.UDP)
            for one in ports
        ),
    )


def machine(ports: str, hears: Fence | None, says: Fence | None) -> Machine:
    both = ",".join(f"{one}/{kind}" for one in ports.split(",") for kind in ("tcp", "udp"))
    return replace(vm("a", both), hears=hears, says=says)


STATES = (  # all forward and allow 1000-1009, by other rules each
    machine("1000-1009,2000", allowing(PortRange(1000, 1009)), OPEN),
    machine("990-1020", allowing(PortRange(1, 1005), PortRange(1006, 1100)), SHUT),
    machine("1000-1009", OPEN, None),
    machine("1000-1015", None, SHUT),
    machine("1-1010", allowing(PortRange(995, 1009)), allowing(PortRange(1, 99))),
)


def test_ports_and_policies_that_change_together_lose_no_flow_that_is_allowed_before_and_after(
    net: Net,
) -> None:
    pod = net.pods[0]
    flows = ["tcp:1000-1009", "udp:1000-1009"]
    with kernel(IPTABLES).opened(pod) as namespace, compiled() as program:

        def become(one: Machine) -> None:
            plan = converge(pod, desire([one], namespace.surroundings()), namespace)
            assert plan.add

        become(STATES[0])
        with opening(program, net, net.pod_address(1), flows, RATE) as client:
            for one in itertools.islice(itertools.cycle(STATES), 1, 61):
                become(one)
            counts = client.end()
        converge(pod, Desired(), namespace)
    assert counts.overrun == 0
    assert counts.answered
    assert not counts.lost, "\n".join(map(str, counts.lost))


NEITHER = {  # what the first may send and the second receive, before and after
    "what is let out is not to come in": ((SHUT, OPEN), (OPEN, SHUT)),
    "what may come in is not let out": ((OPEN, SHUT), (SHUT, OPEN)),
    "what is let out is not to come in from now on": ((SHUT, None), (None, SHUT)),
}


@pytest.mark.parametrize("pair", [IPTABLES], indirect=True)
@pytest.mark.parametrize("case", NEITHER)
def test_what_no_policy_allows_passes_at_no_moment_between_two(pair: Pair, case: str) -> None:
    """One commit after another, with packets between them."""
    before, after = (
        wanted_by(pair, *machines((None, says), (hears, None))) for says, hears in NEITHER[case]
    )
    applied(pair, before)
    plan = diff(pair.lab.pod, flattened(after), observed(pair.lab.pod))
    workers = Workers()
    try:
        with opened(pair.lab.pod) as descriptor:
            for family in Family:
                for _, due in commits(plan, family):
                    digest = workers[family].ask(descriptor, {})["digest"]
                    workers[family].ask(descriptor, {"steps": due, "digest": digest})
                    assert "first to second" not in reached(pair)
    finally:
        workers.stop()
    assert diff(pair.lab.pod, flattened(after), observed(pair.lab.pod)).same_rules
