"""A packet's way through the rules, and the same in words."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from rules.desired import desire
from rules.model import Chain, Family, Protocol, Rule
from rules.plan import order
from rules.trace import Packet, explained, matches, trace
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
    space,
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
    return list(explained(sorted(rules, key=order), Protocol(protocol), int(port), source))


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
