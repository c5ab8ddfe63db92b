"""The hitless suite (bench/hitless.py): that it counts what lossy changes lose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bench import hitless
from bench.hitless_kinds import Kind, kinds
from bench.hitless_net import Net, built, compiled, opening
from tests.spaces import nft, within

RATE = 3000


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with built() as made:
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[str]:
    with compiled() as program:
        yield program


def named(net: Net, words: str) -> Kind:
    return next(one for one in kinds(net) if words in one.name)


def test_rules_that_are_deleted_and_added_again_are_seen_to_lose_flows(
    net: Net, client: str
) -> None:
    """In two transactions, between which nothing is forwarded."""
    kind = named(net, "one of 3 ranges")
    with hitless.working(net) as agent:
        agent.take(hitless.said(kind.states[0]))
        table = within(net.pods[0], "nft", "list", "table", "inet", "portranger")
        with opening(client, net, kind.to, kind.flows, RATE) as opened:
            for _ in range(20):
                nft(net.pods[0], "delete table inet portranger")
                nft(net.pods[0], table)
            counts = opened.end()
    assert counts.overrun == 0
    assert "refused" in {one.how for one in counts.lost}
    assert counts.answered


def test_a_service_that_leads_to_other_ports_is_seen_to_lead_flows_astray(
    net: Net, client: str
) -> None:
    kind = named(net, "an endpoint leaves and joins, shifted")
    with hitless.working(net) as agent:
        agent.take(hitless.said(kind.states[0]))
        wrong = [flow.replace("-13000", "-13001") for flow in kind.flows]
        with opening(client, net, kind.to, wrong, RATE) as opened:
            changes = itertools.islice(hitless.changes_of(kind, agent), 2)
            for change in changes:
                change()
            counts = opened.end()
    assert counts.answered == 0
    assert {one.how for one in counts.lost} == {"astray"}


KINDS = (
    "one of 50 grows and shrinks",
    "8 ranges become 4 and back",
    "an endpoint leaves and joins, shifted, beside others",
    "a VM of two is removed",
    "peers of a policy",
    "the table of 50 ranges",
    "the daemon is killed",
)
SOME = hitless.Effort(changes=30, seconds=2.5, rate=RATE)


@pytest.mark.parametrize("words", KINDS)
def test_changes_lose_no_flow_to_ports_that_stay_declared(
    net: Net, client: str, words: str
) -> None:
    result = hitless.run(named(net, words), net, client, SOME)
    assert not result.trouble
    assert result.changes
    assert not result.lost, "\n".join(hitless.losses(result))


def test_with_all_steps_in_one_transaction_changes_are_seen_to_lose_flows(
    net: Net, client: str
) -> None:
    """Sooner or later: a flow is lost where it meets the moment between two maps."""
    kind = named(net, "an endpoint leaves and joins, shifted")
    more = hitless.Effort(changes=60, seconds=6, rate=2 * RATE)
    with hitless.single_transaction():
        tries = (hitless.run(kind, net, client, more) for _ in range(20))
        assert any(result.number("refused") for result in tries)
