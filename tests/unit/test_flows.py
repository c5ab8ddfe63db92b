"""A change forgets the flows it must, and leaves all others alone."""

from collections.abc import Sequence
from ipaddress import ip_address, ip_network

import pytest

from rules.flows import forbidden, forgotten, unmade
from rules.model import (
    Address,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.plan import Plan, diff
from rules.ports import PortRange
from rules.stale import Flow, Forbidden, Forgotten
from rules.values import replace

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


U = Protocol.UDP


@pytest.mark.parametrize(
    ("before", "after", "shut"),
    [
        pytest.param([rule(1, 9, U)], [], ["1-9"], id="nobody has them now"),
        pytest.param([rule(1, 9, U)], [rule(1, 5, U)], ["6-9"], id="some are left"),
        pytest.param([rule(1, 9, U)], [rule(1, 9, U, OTHER)], [], id="they moved"),
        pytest.param([rule(1, 9, U)], [rule(3, 4, U, OTHER)], ["1-2", "5-9"], id="some moved"),
        pytest.param([rule(1, 9, U)], [EVERYTHING], [], id="all are forwarded now"),
        pytest.param([rule(1, 9)], [], [], id="TCP begins with a SYN"),
        pytest.param(
            [rule(1, 9, U), rule(5, 9, U, OTHER)],
            [rule(5, 9, U, OTHER)],
            ["1-4"],
            id="somebody else had some of them all along",
        ),
        pytest.param([replace(rule(1, 9, U), destination=POD)], [], [], id="published on the node"),
    ],
)
def test_closed_is_what_nobody_has_now(
    before: list[Rule], after: list[Rule], shut: list[str]
) -> None:
    live = tuple(Live(one, place) for place, one in enumerate(before))
    plan = diff("x", Desired(rules=frozenset(after)), Observed(live=live, table=True))
    found = [one for one in forgotten(plan) if isinstance(one, Forgotten)]
    assert [str(ports) for one in found for ports in one.shut] == shut


@pytest.mark.parametrize(
    ("sender", "sending", "answered", "expected"),
    [
        pytest.param(GUEST, 3, 40000, True, id="seen at another port"),
        pytest.param(GUEST, 3, 3, False, id="seen at its own"),
        pytest.param(GUEST, 30, 40000, False, id="from a port that is not opened"),
        pytest.param(OTHER, 3, 40000, False, id="somebody else's"),
    ],
)
def test_what_a_guest_began_from_a_port_that_opens_is_forgotten_where_it_lost_the_port(
    sender: Address, sending: int, answered: int, expected: bool
) -> None:
    plan = diff("x", Desired(rules=frozenset({rule(1, 9, U)})), Observed(mapped={}))
    flow = Flow(
        family=Family.IP,
        protocol=UDP,
        port=5060,
        destination=ELSEWHERE,
        answerer=ELSEWHERE,
        sender=sender,
        sending_port=sending,
        answered_port=answered,
    )
    assert any(one.holds(flow, {POD}) for one in forgotten(plan)) is expected


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


# -------------------------------------------------------------------------------------- policies

CLIENT, STRANGER = ip_address("10.1.0.7"), ip_address("10.9.0.7")
WEB = Peers(Family.IP, "aa")
FRIENDS = {WEB: frozenset({ip_network("10.1.0.0/16")})}
RESUMING = Rule(chain=Chain.FORWARD, family=Family.IP, owner="o", accepts=True)
INTO = Rule(chain=Chain.FORWARD, family=Family.IP, owner="o", destination=GUEST)
OUT = replace(INTO, destination=None, source=GUEST)
GATE = replace(
    INTO, accepts=True, protocol=Protocol.TCP, ports=PortRange(80, 90), peers=WEB, owner="p"
)
WAY_OUT = replace(GATE, destination=None, source=GUEST)
FILTERS = [RESUMING, INTO, GATE, OUT, WAY_OUT]


def incoming(sender: Address = CLIENT, port: int = 80, protocol: int = TCP) -> Flow:
    """To a port of the pod, of which the guest has another number."""
    return Flow(
        family=Family.IP,
        protocol=protocol,
        port=9999,
        destination=POD,
        answerer=GUEST,
        sender=sender,
        answering_port=port,
    )


def outgoing(to: Address = CLIENT, port: int = 80, protocol: int = TCP) -> Flow:
    return Flow(
        family=Family.IP,
        protocol=protocol,
        port=port,
        destination=to,
        answerer=to,
        sender=GUEST,
        answering_port=port,
    )


def forbids(flow: Flow, rules: Sequence[Rule] = FILTERS) -> bool:
    return any(one.holds(flow, {POD}) for one in forbidden(rules, FRIENDS))


@pytest.mark.parametrize(
    ("flow", "expected"),
    [
        pytest.param(incoming(), False, id="from a peer to a port that is open"),
        pytest.param(incoming(port=91), True, id="to a port that is not"),
        pytest.param(incoming(STRANGER), True, id="from somebody else"),
        pytest.param(incoming(protocol=UDP), True, id="another protocol"),
        pytest.param(incoming(protocol=1, port=0), True, id="one without ports"),
        pytest.param(incoming(POD, 91), False, id="from the namespace itself"),
        pytest.param(replace(incoming(port=91), answerer=OTHER), False, id="to another guest"),
        pytest.param(replace(incoming(port=91), sender=None), False, id="from nobody knows whom"),
        pytest.param(replace(incoming(port=91), family=Family.IP6), False, id="of another family"),
        pytest.param(outgoing(), False, id="to a peer, at a port that is open"),
        pytest.param(outgoing(port=91), True, id="to another port of a peer"),
        pytest.param(outgoing(STRANGER), True, id="to somebody else"),
        pytest.param(outgoing(POD, 91), False, id="to the namespace itself"),
        pytest.param(replace(outgoing(port=91), sender=OTHER), False, id="from another guest"),
    ],
)
def test_a_flow_is_forbidden_that_could_not_begin_now(flow: Flow, expected: bool) -> None:
    assert forbids(flow) is expected


def test_where_a_fence_has_a_gate_for_everything_nothing_is_forbidden() -> None:
    everything = replace(GATE, protocol=None, ports=None, peers=None)
    for flow in (incoming(STRANGER, 7), incoming(protocol=1, port=0)):
        assert not forbids(flow, [INTO, everything])
        assert forbids(flow, [INTO, replace(everything, destination=OTHER)])


def test_where_there_are_no_sets_a_peer_is_in_the_rule() -> None:
    single = replace(GATE, peers=None, peer=ip_network("10.9.0.0/16"))
    assert forbids(incoming(CLIENT), [INTO, single])
    assert not forbids(incoming(STRANGER), [INTO, single])


def test_without_a_guard_nothing_is_forbidden() -> None:
    assert forbidden([RESUMING, GATE, rule(1, 9)], FRIENDS) == []


def change(before: list[Rule], after: list[Rule], was: str = "10.1.0.0/16", now: str = "") -> Plan:
    """From rules to rules, and from one set of peers to another."""
    live = tuple(Live(one, place) for place, one in enumerate(before, 1))
    sets = [{WEB: frozenset({ip_network(text)})} for text in (was, now or was)]
    chains = frozenset(Chain)
    return diff(
        "x",
        Desired(rules=frozenset(after), sets=sets[1]),
        Observed(live=live, table=True, chains=chains, sets=sets[0]),
    )


@pytest.mark.parametrize(
    ("plan", "cut"),
    [
        pytest.param(change(FILTERS, FILTERS), "", id="nothing"),
        pytest.param(change([], FILTERS), "incoming outgoing", id="a first fence"),
        pytest.param(change(FILTERS, []), "", id="no fence any more"),
        pytest.param(change(FILTERS, FILTERS, now="10.2.0.0/16"), "all", id="who is a peer"),
        pytest.param(
            change(FILTERS, [*FILTERS[:2], *FILTERS[3:]]), "all incoming outgoing", id="a gate less"
        ),
        pytest.param(
            change([*FILTERS, rule(1, 9)], FILTERS), "", id="a range that is not forwarded any more"
        ),
    ],
)
def test_flows_are_cut_that_a_change_of_filters_forbids(plan: Plan, cut: str) -> None:
    """Of those that were allowed before, `all` means one that was open."""
    due = [one for one in forgotten(plan) if isinstance(one, Forbidden)]
    held = {
        "incoming": any(one.holds(incoming(STRANGER), {POD}) for one in due),
        "outgoing": any(one.holds(outgoing(STRANGER), {POD}) for one in due),
        "all": any(one.holds(incoming(), {POD}) for one in due),
    }
    if plan.sets != plan.sets_before:  # then all that is not allowed now is looked for
        assert held == dict.fromkeys(held, True)
        assert not any(one.holds(incoming(ip_address("10.2.0.7")), {POD}) for one in due)
        return
    assert {name for name, is_cut in held.items() if is_cut} == set(cut.split())


def test_what_only_others_wanted_to_know_is_not_asked() -> None:
    """No look at open flows where no filter changed."""
    assert forgotten(change(FILTERS, [*FILTERS, EGRESS])) == ()


GUARD = Rule(chain=Chain.PREROUTING, family=Family.IP, owner="o", interface="eth0")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param([], True, id="a first guard"),
        pytest.param([GUARD], True, id="a guest to whom nothing led"),
        pytest.param([GUARD, rule(1, 9)], False, id="a guest behind the guard from before"),
    ],
)
def test_flows_of_others_to_a_guest_are_cut_when_it_comes_behind_a_guard(
    before: list[Rule], *, expected: bool
) -> None:
    wanted = Desired(rules=frozenset({GUARD, rule(1, 9), rule(20, 29)}), guests=frozenset({GUEST}))
    live = tuple(Live(one, place) for place, one in enumerate(before, 1))
    plan = diff("x", wanted, Observed(live=live, table=True, chains=frozenset(Chain)))
    flow = Flow(family=Family.IP, protocol=TCP, port=80, destination=POD, answerer=GUEST)
    assert any(one.holds(flow, {POD}) for one in forgotten(plan)) is expected
    served = replace(flow, port=25)
    assert not any(one.holds(served, {POD}) for one in forgotten(plan))


@pytest.mark.parametrize(
    ("port", "destination", "answerer", "expected"),
    [
        (80, ELSEWHERE, GUEST, False),
        (80, ELSEWHERE, OTHER, False),
        (80, ELSEWHERE, ip_address("10.0.2.4"), True),
        (81, ELSEWHERE, ip_address("10.0.2.4"), False),
        (80, POD, ip_address("10.0.2.4"), False),
    ],
)
def test_a_flow_to_a_published_port_is_unmade_if_no_endpoint_answers_it(
    port: int, destination: Address, answerer: Address, *, expected: bool
) -> None:
    published = [replace(rule(80, 80, to=to), destination=ELSEWHERE) for to in (GUEST, OTHER)]
    flow = Flow(
        family=Family.IP, protocol=TCP, port=port, destination=destination, answerer=answerer
    )
    assert any(one.holds(flow, {POD}) for one in unmade(published)) is expected
