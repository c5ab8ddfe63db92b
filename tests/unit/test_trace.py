"""A packet's way through the rules, and the same in words."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from rules.desired import desire
from rules.model import OWN, Chain, Family, Peers, Protocol, Rule
from rules.trace import Packet, admitting, explained, matches
from rules.values import replace
from tests.unit.samples import (
    ETH0,
    LO,
    OWNER,
    POD,
    answerable,
    egress,
    forward,
    from_inside,
    link,
    machine,
    ports,
    space,
    trace,
)

ENTERING = Packet(family=Family.IP, protocol=Protocol.TCP, port=22, interface="eth0")


@pytest.mark.parametrize(
    ("rule", "packet", "taken"),
    [
        pytest.param(forward(), ENTERING, True, id="its port on its link"),
        pytest.param(forward("tcp 20-30"), ENTERING, True, id="a port inside its range"),
        pytest.param(forward(None), ENTERING, True, id="everything"),
        pytest.param(forward(on=None), ENTERING, True, id="every link"),
        pytest.param(forward("tcp 23"), ENTERING, False, id="another port"),
        pytest.param(forward("udp 22"), ENTERING, False, id="another protocol"),
        pytest.param(forward(on="eth1"), ENTERING, False, id="another link"),
        pytest.param(forward(to="fd10:0:2::2"), ENTERING, False, id="another family"),
        pytest.param(forward(source="192.0.2.1"), ENTERING, False, id="a source it has not"),
        pytest.param(from_inside(), ENTERING, False, id="a destination it has not"),
        pytest.param(
            from_inside(),
            replace(ENTERING, destination=ip_address("127.0.0.1")),
            True,
            id="its destination",
        ),
        pytest.param(
            egress(), replace(ENTERING, source=ip_address("10.0.2.2")), True, id="its source"
        ),
    ],
)
def test_a_rule_takes_a_packet_that_has_all_it_asks_for(
    rule: Rule, packet: Packet, taken: bool
) -> None:
    assert matches(rule, packet) is taken


def test_a_trace_stays_in_its_chain() -> None:
    assert trace([from_inside(), forward()], Chain.PREROUTING, ENTERING) == forward()
    assert trace([from_inside()], Chain.PREROUTING, ENTERING) is None


# ------------------------------------------------------------------------------------- in words


def answer(
    rules: frozenset[Rule] | list[Rule], what: str = "tcp/22", sender: str | None = None
) -> list[str]:
    protocol, _, port = what.partition("/")
    source = ip_address(sender) if sender else None
    return list(
        explained(sorted(rules, key=lambda rule: rule.key), Protocol(protocol), int(port), source)
    )


RULES = desire([machine("tcp 22", "tcp 1000-8000")], POD).rules
EVERYTHING = desire([machine()], POD).rules


def test_a_declared_port_goes_to_the_guest_in_both_families() -> None:
    assert answer(RULES) == [
        f"{family} tcp/22 entering on eth0: goes to {to}:22, by the rule for tcp 22 of {OWNER}"
        for family, to in (("IPv4", "10.0.2.2"), ("IPv6", "[fd10:0:2::2]"))
    ]


def test_where_nothing_is_declared_everything_goes_to_the_guest() -> None:
    (line,) = answer(EVERYTHING, "udp/53", "192.0.2.1")
    assert line == (
        "IPv4 udp/53 entering on eth0 from 192.0.2.1: goes to 10.0.2.2:53,"
        f" by the rule for everything of {OWNER}"
    )


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        pytest.param("tcp/23", "no range holds it (the nearest declared is 22)", id="near 22"),
        pytest.param(
            "tcp/8001", "no range holds it (the nearest declared is 1000-8000)", id="past the end"
        ),
        pytest.param("udp/22", "no udp port is declared", id="no such protocol"),
    ],
)
def test_an_undeclared_port_is_told_why(what: str, reason: str) -> None:
    assert answer(RULES, what, "192.0.2.1") == [
        f"IPv4 {what} entering on eth0 from 192.0.2.1: is not forwarded: {reason}"
    ]


def test_a_packet_from_inside_goes_the_way_of_the_loopback() -> None:
    (line,) = answer(RULES, "tcp/22", "127.0.0.1")
    assert line == (
        "IPv4 tcp/22 to 127.0.0.1 from inside the namespace: goes to 10.0.2.2:22,"
        f" by the rule for tcp 22 of {OWNER}"
    )


def test_any_loopback_address_is_a_sender_from_inside() -> None:
    (line,) = answer(RULES, "tcp/22", "127.0.0.53")
    assert "goes to 10.0.2.2:22" in line


def test_over_ipv6_no_port_leads_from_inside_to_the_guest() -> None:
    (line,) = answer(RULES, "tcp/22", "::1")
    assert line == (
        "IPv6 tcp/22 to ::1 from inside the namespace:"
        " is not forwarded: from inside only 127.0.0.1 leads to the guest"
    )


def test_the_guests_own_traffic_leaves_with_another_address() -> None:
    (line,) = answer(RULES, "tcp/443", "10.0.2.2")
    assert line == (
        "IPv4 tcp/443 from the guest 10.0.2.2:"
        f" leaves with the address of the link it leaves on, by the rule of {OWNER}"
    )


def test_each_link_that_traffic_enters_on_has_its_answer() -> None:
    around = space(LO, ETH0, link("eth1", "192.0.2.9/24"))
    one = machine("tcp 22", name="one", entry="eth0")
    other = machine("tcp 80", name="other", entry="eth1")
    first, second = answer(desire([one, other], around).rules, "tcp/80", "192.0.2.1")
    assert first == (
        "IPv4 tcp/80 entering on eth0 from 192.0.2.1:"
        " is not forwarded: no range holds it (the nearest declared is 22)"
    )
    assert second == (
        "IPv4 tcp/80 entering on eth1 from 192.0.2.1:"
        f" goes to 10.0.2.2:80, by the rule for tcp 80 of {other.owner}"
    )


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        pytest.param(
            [], "nothing of ours is here: no packet is forwarded by us", id="no rule at all"
        ),
        pytest.param(
            [egress(), answerable()],
            "tcp/22 is not forwarded: no rule of ours lets it in",
            id="no rule for what enters",
        ),
    ],
)
def test_where_no_packet_enters_that_is_said(rules: list[Rule], line: str) -> None:
    assert answer(rules) == [line]


def test_a_sender_of_a_family_that_is_not_served_has_an_answer() -> None:
    assert answer([forward()], "tcp/22", "2001:db8::1") == [
        "tcp/22 is not forwarded: no rule of ours lets it in"
    ]


# ------------------------------------------------------------------------------------- policies

WEB, NTP = Peers(Family.IP, "aa"), Peers(Family.IP, "bb")
GUEST = ip_address("10.0.2.2")
SETS = {
    WEB: frozenset({ip_network("10.1.0.0/16"), ip_network("192.0.2.1")}),
    NTP: frozenset({ip_network("10.9.0.9")}),
}
PLAIN = Rule(chain=Chain.FORWARD, family=Family.IP, owner=OWNER)
INTO = replace(PLAIN, destination=GUEST)
OUT = replace(PLAIN, source=GUEST)
FROM_WEB = replace(
    INTO,
    owner="NetworkPolicy/default/web",
    accepts=True,
    protocol=Protocol.TCP,
    ports=ports("20-30"),
    peers=WEB,
)
FROM_ALL = replace(FROM_WEB, owner="NetworkPolicy/default/all", peers=None, ports=ports("25"))
TO_NTP = replace(
    OUT,
    owner="NetworkPolicy/default/ntp",
    accepts=True,
    protocol=Protocol.UDP,
    ports=ports("123"),
    peers=NTP,
)
INGRESS = [replace(PLAIN, accepts=True), INTO, FROM_WEB, FROM_ALL]
EGRESS = [replace(PLAIN, accepts=True), OUT, TO_NTP]


def let_in(port: int, peer: str | None = "192.0.2.1", **more: Any) -> list[Rule] | None:
    """Who lets TCP to that port of the guest in."""
    fields: Any = {"family": Family.IP, "protocol": Protocol.TCP, "port": port, **more}
    packet = Packet(**{"destination": GUEST, **fields})
    return admitting(INGRESS, SETS, packet, ip_address(peer) if peer else None)


@pytest.mark.parametrize(
    ("port", "peer", "expected"),
    [
        pytest.param(22, "192.0.2.1", [FROM_WEB], id="a peer"),
        pytest.param(22, "10.1.2.3", [FROM_WEB], id="one of a network"),
        pytest.param(22, "10.2.2.3", [], id="somebody else"),
        pytest.param(31, "192.0.2.1", [], id="another port"),
        pytest.param(25, "10.2.2.3", [FROM_ALL], id="where everybody may"),
        pytest.param(25, "192.0.2.1", [FROM_WEB, FROM_ALL], id="by two policies"),
        pytest.param(22, None, [FROM_WEB], id="one of whom nothing is known: for some"),
    ],
)
def test_who_lets_a_flow_in(port: int, peer: str | None, expected: list[Rule]) -> None:
    assert let_in(port, peer) == expected


def test_where_no_guard_is_nothing_is_forbidden() -> None:
    assert let_in(22, destination=ip_address("10.0.2.9")) is None
    packet = Packet(family=Family.IP, protocol=Protocol.TCP, port=22, source=GUEST)
    assert admitting(INGRESS, SETS, packet, None) is None
    assert (
        admitting([FROM_WEB], SETS, replace(packet, source=None, destination=GUEST), None) is None
    )


def test_neither_what_resumes_nor_another_protocol_lets_a_new_flow_in() -> None:
    assert let_in(22, protocol=Protocol.UDP) == []
    assert let_in(22, protocol=Protocol.SCTP) == []
    packet = Packet(family=Family.IP, protocol=Protocol.TCP, port=80, destination=GUEST)
    assert admitting(INGRESS[:2], SETS, packet, ip_address("192.0.2.1")) == []


def test_a_set_that_is_not_there_lets_nobody_in() -> None:
    packet = Packet(family=Family.IP, protocol=Protocol.TCP, port=22, destination=GUEST)
    assert admitting(INGRESS, {}, packet, ip_address("192.0.2.1")) == []


def test_where_there_are_no_sets_a_peer_is_in_the_rule() -> None:
    single = replace(FROM_WEB, peers=None, peer=ip_network("10.1.0.0/16"))
    packet = Packet(family=Family.IP, protocol=Protocol.TCP, port=22, destination=GUEST)
    for peer, passes in (("10.1.9.9", [single]), ("10.2.9.9", [])):
        assert admitting([INTO, single], {}, packet, ip_address(peer)) == passes


def judged(what: str, sender: str | None = None, rules: list[Rule] | None = None) -> list[str]:
    """What is said of a flow, from where policies come into it."""
    made = desire([machine("tcp 1-100", "udp 1-100")], POD).rules
    known = sorted([*made, *(INGRESS if rules is None else rules)], key=lambda rule: rule.key)
    protocol, _, port = what.partition("/")
    source = ip_address(sender) if sender else None
    lines = explained(known, Protocol(protocol), int(port), source, SETS)
    return [line.partition("; ")[2] for line in lines]


@pytest.mark.parametrize(
    ("what", "sender", "said"),
    [
        ("tcp/22", "192.0.2.1", "NetworkPolicy/default/web lets it in"),
        ("tcp/22", "10.2.2.3", "but no policy lets it in: it is dropped"),
        (
            "tcp/25",
            "192.0.2.1",
            "NetworkPolicy/default/all and NetworkPolicy/default/web let it in",
        ),
        ("udp/22", "192.0.2.1", "but no policy lets it in: it is dropped"),
        ("tcp/22", "127.0.0.1", ""),
        ("tcp/22", "2001:db8::1", ""),
        ("tcp/99", "192.0.2.1", "but no policy lets it in: it is dropped"),
        ("udp/123", "10.0.2.2", ""),
    ],
)
def test_of_what_enters_it_is_said_which_policy_lets_it_in(
    what: str, sender: str, said: str
) -> None:
    assert judged(what, sender) == [said]


def test_without_a_sender_it_is_said_whether_some_are_let_in() -> None:
    assert judged("tcp/22") == ["NetworkPolicy/default/web lets it in from some sources", ""]
    assert judged("tcp/31") == ["but no policy lets it in: it is dropped", ""]


def test_of_what_leaves_it_is_said_whether_some_may_be_spoken_to() -> None:
    assert judged("udp/123", "10.0.2.2", EGRESS) == [
        "NetworkPolicy/default/ntp lets it out to some destinations"
    ]
    assert judged("tcp/123", "10.0.2.2", EGRESS) == ["but no policy lets it out: it is dropped"]
    assert judged("tcp/22", "192.0.2.1", EGRESS) == [""]


def test_a_shifted_range_is_judged_by_the_port_of_the_guest() -> None:
    shifted = replace(forward("tcp 1022-1030"), to_port=22)
    lines = list(explained([shifted, *INGRESS], Protocol.TCP, 1022, ip_address("192.0.2.1"), SETS))
    assert lines[0].endswith("; NetworkPolicy/default/web lets it in")


def test_of_what_the_node_sends_it_is_said_that_it_is_always_let_in() -> None:
    own = Peers(Family.IP, "node")
    exempt = replace(INTO, owner="node:self", accepts=True, peers=own)
    sets = {own: frozenset({ip_network("192.0.2.100/32")})}
    rules = [forward(), INTO, exempt]

    def said(sender: str | None) -> str:
        source = ip_address(sender) if sender else None
        first = next(iter(explained(rules, Protocol.TCP, 22, source, sets)))
        return first.partition("; ")[2]

    assert said("192.0.2.100") == "the node itself is always let in"
    assert said("192.0.2.1") == "but no policy lets it in: it is dropped"
    assert said(None) == (
        "but no policy lets it in: it is dropped, unless it is from the node itself"
    )


def test_what_a_node_publishes_has_an_answer_for_each_address() -> None:
    at = [str(OWN[Family.IP]), "198.51.100.7"]
    rules = [forward(on=None, destination=one) for one in at]
    fate = f"goes to 10.0.2.2:22, by the rule for tcp 22 of {OWNER}"
    assert answer(rules, sender="192.0.2.1") == [
        f"IPv4 tcp/22 to {where} from 192.0.2.1: {fate}" for where in ("the node", "198.51.100.7")
    ]
    assert f"IPv4 tcp/22 to 198.51.100.7: {fate}" in answer(rules)
