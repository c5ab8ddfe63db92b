"""Which node ports Services have: who comes first, who keeps what, what is shared, what is refused
and in which words, and what can be told again from the state or from the kernel's own rules."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from rules.allotment import (
    Allotment,
    allot,
    holder_of,
    name_of,
    recalled,
    wishes,
)
from rules.desired import LABEL_BYTES, label
from rules.model import Chain, Pending, Protocol, Rule
from rules.node_ports import Allocations, Bands, Holder
from rules.ports import ALL_PORTS, PortRange
from rules.publish import Publishing, desire_node, faces
from rules.services import Publication, Service, ServiceType
from rules.values import replace
from tests.unit.samples import ports
from tests.unit.test_publish import (
    BANDS,
    CLUSTER_IP,
    LOAD_BALANCER,
    NODE4,
    PLAINLY,
    behind,
    service,
)

NOBODY = Allocations(BANDS)
NARROW = Bands(PortRange(30000, 30019))  # all of it is lower band but for 4


def asked(*services: Service) -> list[Publication]:
    return [behind(one) for one in services]


def given(*services: Service, known: Allocations = NOBODY, **more: Any) -> Allotment:
    return allot(known, asked(*services), **more)


def told(found: Allotment | Allocations) -> dict[str, str]:
    """What each port has, by its name."""
    known = found.allocations if isinstance(found, Allotment) else found
    return {
        f"{one.owner.removeprefix('Service/shop/')}/{one.port}": str(ports)
        for one, ports in known.held.items()
    }


def holding(bands: Bands = BANDS, **ranges: str) -> Allocations:
    """What Services of one port, a, hold."""
    held = {Holder(f"Service/shop/{n}", "a", Protocol.TCP): ports(r) for n, r in ranges.items()}
    return Allocations(bands, held)


# ------------------------------------------------------------------------------ who asks for any


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(service("a tcp 1", "b udp 2"), ["a", "b"], id="a node port"),
        pytest.param(service("a tcp 1", kind=CLUSTER_IP), [], id="for the cluster only"),
        pytest.param(service("a tcp 1", kind=ServiceType.EXTERNAL_NAME), [], id="a name"),
        pytest.param(service("a tcp 1", headless=True), [], id="headless"),
        pytest.param(service("a tcp 1", kind=LOAD_BALANCER), ["a"], id="a load balancer"),
        pytest.param(
            service("a tcp 1", "b tcp 2@30002", kind=LOAD_BALANCER, allocates=False),
            ["b"],
            id="a load balancer without",
        ),
        pytest.param(service("a tcp 1", allocates=False), ["a"], id="only there it counts"),
    ],
)
def test_these_ports_are_to_have_node_ports(one: Service, expected: list[str]) -> None:
    assert [port.name for port in wishes(one)] == expected
    assert sorted(told(given(one))) == [f"phone/{name}" for name in expected]


def test_a_holder_is_told_by_service_port_and_protocol() -> None:
    one = service("a tcp 1", "udp 2")
    assert holder_of(one, one.ports[0]) == Holder("Service/shop/phone", "a", Protocol.TCP)
    assert name_of(one, one.ports[0]) == "Service/shop/phone/a"
    assert name_of(one, one.ports[1]) == "Service/shop/phone"


# ------------------------------------------------------------------------------------ whose turn


def test_a_wish_is_granted_in_either_band() -> None:
    found = given(service("a tcp 80@30000", "b udp 100-109@32700"))
    assert told(found) == {"phone/a": "30000", "phone/b": "32700-32709"}
    assert (found.static.given, found.dynamic.given, found.refused) == (2, 0, ())


def test_who_wishes_for_none_is_given_some_of_the_upper_band() -> None:
    found = given(*(service(f"a tcp 80-{80 + n}", name=f"s{n}") for n in range(20)))
    taken = sorted(found.allocations.held.values())
    assert sorted(map(len, taken)) == [*range(1, 21)]
    assert all(one.first >= 30086 for one in taken)
    assert (found.static.given, found.dynamic.given) == (0, 20)


def test_wishes_come_before_draws_whatever_the_names() -> None:
    """All of the range is named by somebody: nobody is given what another names."""
    everyone = [service(f"a tcp 80@{number}", name=f"z{number}") for number in range(30000, 30020)]
    found = given(service("a tcp 80", name="aaa"), *everyone, known=Allocations(NARROW))
    assert [one.owner for one in found.refused] == ["Service/shop/aaa/a"]
    assert found.static.given == 20


def test_who_has_what_another_comes_to_wish_for_keeps_it() -> None:
    found = given(
        service("a tcp 80", name="zzz"),
        service("a tcp 80@30100", name="aaa"),
        known=holding(zzz="30100"),
    )
    assert told(found) == {"zzz/a": "30100"}
    assert (found.static.given, found.dynamic.given) == (0, 0)
    assert found.static.refused == (
        Pending(
            "Service/shop/aaa/a",
            "30100 cannot be given: node port 30100 is held by Service/shop/zzz port a (tcp)."
            " Choose another, or none to be given one.",
        ),
    )


def test_of_two_new_wishes_the_name_decides() -> None:
    one, other = (service("a tcp 80@30100", name=name) for name in ("one", "other"))
    for turn in ((one, other), (other, one)):
        assert told(given(*turn)) == {"one/a": "30100"}


def test_two_may_change_places_at_once() -> None:
    found = given(
        service("a tcp 80@30002", name="one"),
        service("a tcp 80@30001", name="two"),
        known=holding(one="30001", two="30002"),
    )
    assert told(found) == {"one/a": "30002", "two/a": "30001"}
    assert (found.static.given, found.refused) == (2, ())


def test_who_changes_places_comes_before_who_has_none() -> None:
    found = given(
        service("a tcp 80@30001", name="one"),
        service("a tcp 80@30000", name="two"),
        service("a tcp 80", name="zzz"),
        known=holding(Bands(PortRange(30000, 30001)), one="30000", two="30001"),
    )
    assert told(found) == {"one/a": "30001", "two/a": "30000"}
    assert [one.owner for one in found.refused] == ["Service/shop/zzz/a"]


def test_what_one_leaves_by_moving_another_gets_who_wished_for_it() -> None:
    known = holding(NARROW, aaa="30000-30003", wall="30004")
    found = given(
        service("a tcp 80-85", name="aaa"),
        service("a tcp 80@30004", name="wall"),
        service("a tcp 80@30001", name="zzz"),
        known=known,
    )
    assert found.refused == ()
    assert told(found)["zzz/a"] == "30001"


def test_who_grows_is_not_given_what_somebody_names() -> None:
    """It cannot grow where it is, so it moves: but only when wishes have been heard."""
    known = holding(NARROW, aaa="30000-30003", wall="30004")
    found = given(
        service("a tcp 80-85", name="aaa"),
        service("a tcp 80@30004", name="wall"),
        *(service(f"a tcp 80@{number}", name=f"z{number}") for number in range(30014, 30018)),
        known=known,
    )
    assert found.refused == ()
    assert told(found)["aaa/a"] == "30005-30010"


def test_who_grows_comes_before_who_has_none() -> None:
    known = holding(Bands(PortRange(30000, 30009)), zzz="30000-30004")
    found = given(
        service("a tcp 80-87", name="zzz"), service("a tcp 80-84", name="aaa"), known=known
    )
    assert told(found) == {"zzz/a": "30000-30007"}
    assert [one.owner for one in found.dynamic.refused] == ["Service/shop/aaa/a"]


# -------------------------------------------------------------------------- sharing of numbers


def test_another_protocol_of_the_same_ports_gets_the_same_numbers() -> None:
    found = told(given(service("dns udp 53", "dns-tcp tcp 53", "web tcp 80")))
    assert found["phone/dns"] == found["phone/dns-tcp"] != found["phone/web"]


def test_what_one_protocol_wishes_for_the_other_gets() -> None:
    found = given(service("a udp 53-62", "z tcp 53-62@30100"))
    assert set(told(found).values()) == {"30100-30109"}
    assert (found.static.given, found.dynamic.given) == (1, 1)


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(("a udp 53", "b tcp 54"), id="other ports"),
        pytest.param(("a udp 53-54", "b tcp 53"), id="another length"),
    ],
)
def test_other_ports_get_other_numbers(texts: tuple[str, str]) -> None:
    one, other = given(service(*texts)).allocations.held.values()
    assert not one.overlaps(other)


def test_another_service_never_shares() -> None:
    found = given(service("a udp 53", name="one"), service("a tcp 53@30053", name="two"))
    one, other = found.allocations.held.values()
    assert not one.overlaps(other)
    refused = given(service("a udp 53@30053", name="one"), service("a tcp 53@30053", name="two"))
    assert [one.owner for one in refused.refused] == ["Service/shop/two/a"]


def test_both_protocols_grow_together() -> None:
    before = given(service("a udp 5000-5004", "b tcp 5000-5004")).allocations
    after = told(given(service("a udp 5000-5009", "b tcp 5000-5009"), known=before))
    assert after["phone/a"] == after["phone/b"]


def test_both_protocols_shrink_together() -> None:
    before = given(service("a udp 5000-5009", "b tcp 5000-5009")).allocations
    after = told(given(service("a udp 5000-5004", "b tcp 5000-5004"), known=before))
    assert after["phone/a"] == after["phone/b"]
    assert before.held.keys() == given(service("a udp 1", "b tcp 1")).allocations.held.keys()


# ------------------------------------------------------------------------ what stays, what goes


def test_the_same_names_get_the_same_ports_without_any_state() -> None:
    """They are drawn by name: the plan before the first start says what will be."""
    many = [service(f"a udp 100-{100 + n}", name=f"s{n}") for n in range(30)]
    assert told(given(*many)) == told(given(*reversed(many)))
    assert told(given(many[7]))["s7/a"] == "31196-31203"


def test_nothing_changes_when_asked_again() -> None:
    many = [service(f"a udp 100-{100 + n}", "b tcp 7", name=f"s{n}") for n in range(30)]
    first = given(*many)
    again = given(*many, known=first.allocations)
    assert again.allocations == first.allocations
    assert (again.static, again.dynamic.given, again.refused) == (first.static, 0, ())


def test_who_is_new_takes_nothing_from_who_is_there() -> None:
    one = given(service("a udp 100-109"))
    more = given(
        service("a udp 100-109"), service("a udp 1-200", name="aaa"), known=one.allocations
    )
    assert told(more)["phone/a"] == told(one)["phone/a"]
    assert more.dynamic.given == 1


@pytest.mark.parametrize(
    "now",
    [
        pytest.param([], id="it goes"),
        pytest.param([service("b tcp 80", name="old")], id="its port has another name"),
        pytest.param([service("a udp 80", name="old")], id="its port has another protocol"),
        pytest.param([service("a tcp 80", name="old", kind=CLUSTER_IP)], id="another type"),
    ],
)
def test_what_is_no_longer_asked_for_is_free_again(now: list[Service]) -> None:
    found = given(*now, service("a tcp 80@30100", name="new"), known=holding(old="30100"))
    assert told(found)["new/a"] == "30100"
    assert found.refused == ()


def test_a_wish_that_is_taken_back_leaves_what_it_was() -> None:
    found = given(service("a tcp 80", name="one"), known=holding(one="30001"))
    assert told(found) == {"one/a": "30001"}
    assert (found.static.given, found.dynamic.given) == (0, 0)


def test_a_wish_for_others_is_a_move() -> None:
    found = given(service("a tcp 80@30002", name="one"), known=holding(one="30001"))
    assert told(found) == {"one/a": "30002"}
    assert found.static.given == 1


def test_who_wishes_for_what_is_taken_does_not_keep_the_old() -> None:
    known = holding(one="30001", two="30002")
    found = given(
        service("a tcp 80@30002", name="one"), service("a tcp 80", name="two"), known=known
    )
    assert told(found) == {"two/a": "30002"}
    assert [one.owner for one in found.static.refused] == ["Service/shop/one/a"]


# -------------------------------------------------------------------------------------- refusals


def test_what_is_outside_is_refused_and_the_range_is_named() -> None:
    found = given(service("a tcp 80-89@32760"))
    assert found.static.refused == (
        Pending(
            "Service/shop/phone/a",
            "32760-32769 is not within the node ports 30000-32767."
            " Choose from these, or change node_ports.range.",
        ),
    )
    assert found.dynamic.refused == ()


def test_a_run_that_is_too_long_is_refused_and_the_longest_free_one_is_named() -> None:
    known = holding(NARROW, wall="30010")
    found = given(service("a tcp 1", name="wall"), service("a tcp 1-12", name="long"), known=known)
    assert told(found) == {"wall/a": "30010"}
    assert found.dynamic.refused == (
        Pending(
            "Service/shop/long/a",
            "no 12 node ports in a row are free in 30000-30019: the longest free run is"
            " 30000-30009 (10). Ask for fewer, remove Services, or change node_ports.range.",
        ),
    )
    assert (found.static.refused, found.dynamic.given) == ((), 0)


def test_all_refusals_are_told_static_ones_first() -> None:
    found = given(
        service("a tcp 1-99", name="aaa"),
        service("a tcp 1@1", name="zzz"),
        known=Allocations(NARROW),
    )
    assert [one.owner for one in found.refused] == ["Service/shop/zzz/a", "Service/shop/aaa/a"]


def test_one_port_that_is_refused_leaves_the_others() -> None:
    found = given(service("a tcp 80@1", "b tcp 81@30001", "c tcp 82"))
    assert sorted(told(found)) == ["phone/b", "phone/c"]
    assert (found.static.given, found.dynamic.given, len(found.refused)) == (1, 1, 1)


def test_what_the_node_uses_is_not_drawn_but_a_wish_is_for_others_to_refuse() -> None:
    used = [PortRange(30000, 30017)]
    found = given(
        service("a tcp 1-2", name="drawn"),
        service("a tcp 1@30000", name="wish"),
        known=Allocations(NARROW),
        avoid=used,
    )
    assert told(found) == {"wish/a": "30000", "drawn/a": "30018-30019"}
    kept = given(
        service("a tcp 1-2", name="drawn"),
        service("a tcp 1@30000", name="wish"),
        known=found.allocations,
        avoid=[ALL_PORTS],
    )
    assert kept.allocations == found.allocations, "what is held is kept"


def test_in_a_cluster_what_the_api_server_gave_is_only_checked() -> None:
    everywhere = Allocations(Bands(ALL_PORTS))
    found = given(
        service("a tcp 80-89@8000"), service("a tcp 5@8005", name="two"), known=everywhere
    )
    assert told(found) == {"phone/a": "8000-8009"}
    assert [one.owner for one in found.refused] == ["Service/shop/two/a"]


def test_in_a_cluster_a_run_ends_where_the_node_ports_end() -> None:
    """Who may write a Service may write how long its run is; the API server gave the first only."""
    everywhere = Allocations(Bands(ALL_PORTS))
    wide = service("a tcp 1-35536@30000")
    found = given(wide, known=everywhere, runs_within=PortRange(30000, 32767))
    [refusal] = found.refused
    assert refusal.reason.startswith("30000-65535 is not within the node ports 30000-32767")
    single = service("a tcp 5@8005", name="two")
    found = given(single, known=everywhere, runs_within=PortRange(30000, 32767))
    assert told(found) == {"two/a": "8005"}, "what the API server gave is its own"


# -------------------------------------------------------------------------------------- recalled


def live(*services: Service, known: Allocations, how: Publishing = PLAINLY) -> list[Rule]:
    """The rules that there would be."""
    publications = [behind(one, "10.1.0.11", "fd01::11") for one in services]
    shown, _ = faces(publications, known, None, how)
    return [*desire_node(shown, None, how).rules]


LONG = service("media udp 100-109", name="x" * 180)


@pytest.mark.parametrize(
    "services",
    [
        pytest.param([service("a tcp 80-89>180", "b udp 5060")], id="two ports"),
        pytest.param([service("tcp 80")], id="a port without a name"),
        pytest.param([LONG], id="a long name"),
        pytest.param(
            [LONG, replace(LONG, name="x" * 181), replace(LONG, name="x" * 179 + "y")],
            id="long names that differ behind the cut",
        ),
        pytest.param([service("a tcp 53", "b udp 53")], id="shared numbers"),
        pytest.param([service("a tcp 80", external=(NODE4,))], id="an external address beside it"),
    ],
)
def test_what_is_lost_is_told_by_the_rules(services: list[Service]) -> None:
    known = given(*services).allocations
    assert recalled(BANDS, [], live(*services, known=known), services) == known
    assert recalled(BANDS, known.pairs, [], services) == known
    assert recalled(BANDS, [], [], services) == Allocations(BANDS)


def test_the_names_of_these_tests_are_cut() -> None:
    assert len(name_of(LONG, LONG.ports[0])) > LABEL_BYTES
    assert all(
        rule.owner == label(name_of(LONG, LONG.ports[0]))
        for rule in live(LONG, known=given(LONG).allocations)
    )


def test_what_was_written_down_counts_before_the_rules() -> None:
    one = service("a tcp 80", name="one")
    rules = live(one, known=holding(one="30001"))
    assert recalled(BANDS, holding(one="30002").pairs, rules, [one]) == holding(one="30002")
    stored = holding(two="30001").pairs
    assert recalled(BANDS, stored, rules, [one]) == holding(two="30001"), "what is taken is taken"


def test_only_rules_for_what_comes_to_the_node_tell() -> None:
    one = service("a tcp 80", name="one")
    rules = live(one, known=holding(one="30001"))
    assert recalled(BANDS, [], [r for r in rules if r.chain is Chain.OUTPUT], [one]).held == {}
    elsewhere = [replace(r, destination=NODE4) for r in rules]
    assert recalled(BANDS, [], elsewhere, [one]).held == {}
    assert recalled(BANDS, [], elsewhere, [one], [NODE4]) == holding(one="30001")


def test_what_does_not_fit_is_not_recalled() -> None:
    one = service("a tcp 80", name="one")
    rules = live(one, known=holding(one="30001"))
    longer, other = service("a tcp 80-81", name="one"), service("a tcp 80", name="two")
    elsewhere = Bands(PortRange(31000, 31999))
    assert recalled(BANDS, [], rules, [longer]).held == {}
    assert recalled(BANDS, [], rules, [other]).held == {}
    assert recalled(elsewhere, [], rules, [one]).held == {}
    assert recalled(BANDS, [], rules, [replace(one, type=CLUSTER_IP)]).held == {}


@pytest.mark.parametrize("bands", [BANDS, Bands(ALL_PORTS)], ids=["bare metal", "a cluster"])
def test_at_an_address_that_is_external_too_its_own_ports_are_not_taken_for_node_ports(
    bands: Bands,
) -> None:
    how = Publishing(addresses=(NODE4,))
    one = service("a tcp 80-89", name="one", external=(NODE4,))
    known = Allocations(bands, holding(one="30010-30019").held)
    rules = sorted(live(one, known=known, how=how), key=lambda rule: rule.key)
    assert {str(rule.ports) for rule in rules} == {"80-89", "30010-30019"}
    for turn in (rules, rules[::-1]):
        assert recalled(bands, [], turn, [one], how.addresses) == known


def test_rules_of_machines_are_nobodys_node_ports() -> None:
    one = service("a tcp 80", name="one")
    theirs = [replace(r, owner="one") for r in live(one, known=holding(one="30001"))]
    plain = [replace(r, destination=None, to=ip_address("10.0.2.2")) for r in theirs]
    assert recalled(BANDS, [], [*theirs, *plain], [one]).held == {}
