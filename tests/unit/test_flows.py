"""A change forgets the flows it must, and leaves all others alone."""

from ipaddress import ip_address

import pytest

from rules.flows import Flow, Forgotten, forgotten
from rules.model import Chain, Desired, Family, Foreign, Live, Observed, Protocol, Rule
from rules.plan import diff
from rules.ports import PortRange

GUEST = ip_address("10.0.2.2")
OTHER = ip_address("10.0.2.3")
POD = ip_address("192.0.2.2")
ELSEWHERE = ip_address("198.51.100.7")
TCP, UDP = 6, 17


def rule(
    first: int, last: int, protocol: Protocol = Protocol.TCP, to: object = GUEST, shift: int = 0
) -> Rule:
    return Rule(
        chain=Chain.PREROUTING,
        family=Family.IP,
        owner="o",
        protocol=protocol,
        ports=PortRange(first, last),
        interface="eth0",
        to=to,  # type: ignore[arg-type]
        to_port=first + shift if shift else None,
    )


EVERYTHING = Rule(chain=Chain.PREROUTING, family=Family.IP, owner="o", interface="eth0", to=GUEST)
EGRESS = Rule(chain=Chain.POSTROUTING, family=Family.IP, owner="o", source=GUEST)


def cut(before: list[Rule], after: list[Rule], port: int, protocol: int, answerer: object) -> bool:
    """Whether a flow to that port of the pod is forgotten by the change."""
    live = tuple(Live(one, place) for place, one in enumerate(before))
    plan = diff("x", Desired(rules=frozenset(after)), Observed(live=live, table=True))
    flow = Flow(
        family=Family.IP,
        protocol=protocol,
        port=port,
        destination=ELSEWHERE if answerer == ELSEWHERE else POD,
        answerer=answerer,  # type: ignore[arg-type]
    )
    return any(one.holds(flow, {POD}) for one in forgotten(plan))


@pytest.mark.parametrize(
    ("before", "after", "port", "protocol", "answerer", "expected"),
    [
        ([rule(1, 9)], [rule(1, 5)], 6, TCP, GUEST, True),
        ([rule(1, 9)], [rule(1, 5)], 5, TCP, GUEST, False),
        ([rule(1, 9)], [rule(1, 5)], 6, UDP, GUEST, False),
        ([rule(1, 9)], [rule(1, 5)], 6, TCP, OTHER, False),
        ([rule(1, 9)], [rule(1, 5)], 6, TCP, POD, False),
        ([rule(1, 9)], [rule(1, 4), rule(6, 9)], 5, TCP, GUEST, True),
        ([rule(1, 4), rule(6, 9)], [rule(1, 9)], 6, TCP, GUEST, False),
        ([rule(1, 9)], [rule(1, 9, to=OTHER)], 3, TCP, GUEST, True),
        ([rule(1, 9)], [rule(1, 9, shift=100)], 3, TCP, GUEST, True),
        ([rule(1, 9)], [], 3, TCP, GUEST, True),
        ([EVERYTHING], [rule(1, 9)], 3, 132, GUEST, True),
        ([EVERYTHING], [rule(1, 9)], 3, TCP, GUEST, False),
        ([EVERYTHING], [rule(1, 9)], 10, TCP, GUEST, True),
        ([rule(1, 9)], [EVERYTHING], 3, TCP, GUEST, False),
        ([rule(1, 9), EGRESS], [rule(1, 9)], 3, TCP, GUEST, False),
        ([], [rule(1, 9, Protocol.UDP)], 3, UDP, POD, True),
        ([], [rule(1, 9, Protocol.UDP)], 3, UDP, ELSEWHERE, False),
        ([], [rule(1, 9, Protocol.UDP)], 30, UDP, POD, False),
        ([], [rule(1, 9)], 3, TCP, POD, False),
        ([], [EVERYTHING], 3, UDP, POD, True),
    ],
    ids=[
        "a port that is taken away",
        "a port that stays",
        "another protocol",
        "another guest",
        "a flow that was never translated",
        "a hole in a range",
        "ranges that grow together",
        "a port that leads to another guest",
        "a port that leads to another port",
        "everything of it goes",
        "everything was forwarded: a protocol without ports",
        "everything was forwarded: a port that still is",
        "everything was forwarded: a port that no longer is",
        "everything is forwarded now, and the port was before",
        "only the guest's own way out goes",
        "a UDP flow from before the port was forwarded",
        "the guest's own flow to such a port elsewhere",
        "a UDP flow to another port",
        "TCP, which begins anew by itself",
        "everything is forwarded now",
    ],
)
def test_what_is_forgotten(  # noqa: PLR0913, PLR0917 - a table
    before: list[Rule],
    after: list[Rule],
    port: int,
    protocol: int,
    answerer: object,
    expected: bool,
) -> None:
    assert cut(before, after, port, protocol, answerer) is expected


def test_a_flow_of_the_other_family_stays() -> None:
    plan = diff("x", Desired(), Observed(live=(Live(rule(1, 9), 0),), table=True))
    flow = Flow(family=Family.IP6, protocol=TCP, port=3, destination=POD, answerer=GUEST)
    assert not any(one.holds(flow, {POD}) for one in forgotten(plan))


def test_a_foreign_rule_that_goes_takes_no_flow_along() -> None:
    foreign = (Foreign("prerouting", 1, "accept"),)
    assert forgotten(diff("x", Desired(), Observed(foreign=foreign, table=True))) == ()


def test_a_flow_that_was_sent_to_the_guest_itself_stays() -> None:
    plan = diff("x", Desired(), Observed(live=(Live(rule(1, 9), 0),), table=True))
    flow = Flow(family=Family.IP, protocol=TCP, port=3, destination=GUEST, answerer=GUEST)
    assert not any(one.holds(flow, {POD}) for one in forgotten(plan))


def test_what_is_left_over_elsewhere_counts_as_forwarded_before() -> None:
    leftovers = (Live(rule(1, 9), 0),)
    plan = diff("x", Desired(rules=frozenset({rule(1, 5)})), Observed(leftovers=leftovers))
    cut_ports = [
        str(ports) for one in forgotten(plan) if isinstance(one, Forgotten) for ports in one.ports
    ]
    assert cut_ports == ["6-9"]
