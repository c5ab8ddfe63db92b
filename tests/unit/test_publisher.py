"""What the node is to hold, from Services to rules, with a kernel in memory."""

from __future__ import annotations

import pytest

from agent.foreign_nat import Others
from agent.kernel.memory import MemoryNamespace
from agent.publisher import Published, published
from rules.model import Chain
from rules.node_ports import Bands
from rules.plan import diff
from rules.ports import ALL_PORTS, PortRange
from rules.publish import Publishing
from rules.selection import Selection
from tests.unit.test_publish import AROUND, behind, service

CLUSTER = Publishing(ranges_only=True)


def on(namespace: MemoryNamespace, *texts: str) -> Published:
    """What Services that an API server knows become; `b sip udp 5060-5061@30005`."""
    named = [text.split(" ", 1) for text in texts]
    given = [behind(service(words, name=name), "10.1.0.11") for name, words in named]
    return published(Selection(publications=tuple(given)), namespace, CLUSTER, Bands(ALL_PORTS))


def owners(found: Published) -> set[str]:
    return {rule.owner for rule in found.desired.rules if rule.ports}


@pytest.mark.parametrize("wide", ["a", "c"], ids=["named before", "named after"])
def test_a_run_never_takes_the_first_port_that_an_api_server_gave_to_another(wide: str) -> None:
    """It knows nothing of runs, and kube-proxy serves that port."""
    namespace = MemoryNamespace(AROUND)
    first = on(namespace, f"{wide} rtp udp 10000-10009@30000")
    assert owners(first) == {f"Service/shop/{wide}/rtp"}
    namespace.commit(diff("node", first.desired, namespace.observe()))
    both = on(namespace, f"{wide} rtp udp 10000-10009@30000", "b sip udp 5060-5061@30005")
    assert owners(both) == {"Service/shop/b/sip"}
    assert [one.owner for one in both.desired.refused] == [f"Service/shop/{wide}/rtp"]
    assert "Service/shop/b" in both.desired.refused[0].reason


def test_runs_that_do_not_meet_are_all_published() -> None:
    found = on(MemoryNamespace(AROUND), "a rtp udp 10000-10009@30000", "b sip udp 5060-5061@30010")
    assert owners(found) == {"Service/shop/a/rtp", "Service/shop/b/sip"}
    assert found.desired.refused == ()
    assert sorted(found.allotment.allocations.held.values()) == [
        PortRange(30000, 30009),
        PortRange(30010, 30011),
    ]


def test_a_pending_service_keeps_all_its_rules() -> None:
    """Its translations, and what brings the answers back that would go another way."""
    namespace = MemoryNamespace(AROUND)
    of = service("rtp udp 10000-10009@30000", name="a")
    for pending in ("", "its machine cannot be looked at"):
        ends = () if pending else ("10.1.0.11", "10.1.0.12 away")
        given = Selection(publications=(behind(of, *ends, pending=pending),))
        found = published(given, namespace, CLUSTER, Bands(ALL_PORTS))
        namespace.commit(diff("node", found.desired, namespace.observe()))
        chains = {live.rule.chain for live in namespace.held.live}
        assert chains == {Chain.PREROUTING, Chain.OUTPUT, Chain.POSTROUTING}
        ways = [live.rule.detour for live in namespace.held.live if live.rule.detour]
        assert sorted(bool(way.remote) for way in ways) == [False, True]


def test_what_others_translate_is_read_again_at_a_reload_however_long_it_takes() -> None:
    now = iter(range(0, 1000, 10))  # each time that somebody asks: to read takes ten seconds
    others, namespace = Others(lambda: next(now)), MemoryNamespace(AROUND)
    assert others.seen(namespace, [], fresh=False)[1]
    assert not others.seen(namespace, [], fresh=False)[1]
    others.forget()
    assert others.seen(namespace, [], fresh=False)[1]
