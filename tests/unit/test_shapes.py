"""How many ranges are held: which can be elements, from how many on they are, and until when."""

from __future__ import annotations

import re
from ipaddress import ip_address

import pytest

from rules.model import FORWARDED, Chain, Family, Live, Lookup, Protocol, Rule
from rules.shapes import FEW, MANY, Lives, count, gathered, lookup_of, name, spot
from rules.values import replace
from tests.unit.samples import answerable, egress, forward, from_inside

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
INSIDE = Lookup(Chain.OUTPUT, Family.IP, Protocol.UDP, None, ip_address("127.0.0.1"))


def many(number: int, first: int = 1000) -> list[Rule]:
    """That many ranges of one lookup, a port apart."""
    return [forward(f"tcp {port}-{port + 8}") for port in range(first, first + 10 * number, 10)]


# ------------------------------------------------------------------------- what can be an element


@pytest.mark.parametrize(
    ("rule", "lookup"),
    [
        pytest.param(forward("tcp 1000-8000"), ENTERING, id="a range that enters"),
        pytest.param(forward("tcp 22"), ENTERING, id="one port that enters"),
        pytest.param(
            forward("udp 53", to="fd10:0:2::2"),
            replace(ENTERING, family=Family.IP6, protocol=Protocol.UDP),
            id="of another family and protocol",
        ),
        pytest.param(forward("tcp 22", on="eth1"), replace(ENTERING, interface="eth1"), id="link"),
        pytest.param(forward("tcp 22", to="10.0.9.9"), ENTERING, id="to whomever it leads"),
        pytest.param(forward("tcp 22", owner="another"), ENTERING, id="whosever it is"),
        pytest.param(from_inside("udp 53"), INSIDE, id="from inside"),
        pytest.param(forward(None), None, id="everything"),
        pytest.param(forward("tcp 22", source="10.0.0.1"), None, id="from one source only"),
        pytest.param(
            replace(forward("tcp 22"), to_port=23), replace(ENTERING, shifted=True), id="shifted"
        ),
        pytest.param(egress(), None, id="masquerade"),
        pytest.param(answerable(), None, id="source NAT"),
        pytest.param(
            forward("tcp 22", chain=Chain.POSTROUTING, to="10.0.2.1"),
            None,
            id="source NAT of ports",
        ),
    ],
)
def test_the_lookup_of_a_rule(rule: Rule, lookup: Lookup | None) -> None:
    assert lookup_of(rule) == lookup


def test_lookups_are_counted_over_all_their_ranges() -> None:
    assert count([*many(3), from_inside("udp 53"), egress(), forward(None)]) == {
        ENTERING: 3,
        INSIDE: 1,
    }


# --------------------------------------------------------------------------------------- names


def test_every_lookup_that_we_make_has_a_map_of_its_own_name() -> None:
    links = ["eth0", "eth0.100", "a-b_c.d", "e" * 15]
    lookups = [
        Lookup(Chain.PREROUTING, family, protocol, link)
        for family in Family
        for protocol in FORWARDED
        for link in links
    ]
    lookups += [
        Lookup(Chain.OUTPUT, Family.of(address), protocol, None, address)
        for protocol in FORWARDED
        for address in map(ip_address, ("127.0.0.1", "::1", "2001:db8::ffff:1", "10.0.2.2"))
    ]
    names = [name(lookup) for lookup in lookups]
    assert len(set(names)) == len(lookups)
    assert all(re.fullmatch(r"[a-z][a-z0-9._-]{0,127}", one) for one in names)


# ---------------------------------------------------------------------------- from how many on


@pytest.mark.parametrize(
    ("number", "there", "after"),
    [
        pytest.param(0, False, False, id="none"),
        pytest.param(MANY - 1, False, False, id="not many yet"),
        pytest.param(MANY, False, True, id="many"),
        pytest.param(MANY, True, True, id="many, and there"),
        pytest.param(MANY - 1, True, True, id="one less, and there"),
        pytest.param(FEW + 1, True, True, id="nearly few, and there"),
        pytest.param(FEW, True, False, id="few, and there"),
        pytest.param(0, True, False, id="none, and there"),
    ],
)
def test_a_lookup_is_worth_it(number: int, there: bool, after: bool) -> None:
    counts = {ENTERING: number} if number else {}
    found = gathered(counts, [ENTERING] if there else [])
    assert found == (frozenset({ENTERING}) if after else frozenset())


def test_the_numbers_leave_room_between_them() -> None:
    assert (FEW, MANY) == (4, 8)  # as documented; `make bench` is where they are from


def test_one_lookup_does_not_count_for_another() -> None:
    assert gathered({ENTERING: MANY - 1, INSIDE: MANY - 1}, []) == frozenset()
    assert gathered({ENTERING: MANY, INSIDE: 1}, [INSIDE]) == frozenset({ENTERING})


# ------------------------------------------------------------------------------------ observed


def test_of_two_copies_the_first_is_the_rule() -> None:
    lives = Lives([Live(forward(), 4), Live(forward(), 7), Live(egress(), 5)])
    assert lives.by_rule == {forward(): Live(forward(), 4), egress(): Live(egress(), 5)}
    assert lives.weights == {ENTERING: 2}


def test_rules_that_are_there_become_the_very_objects() -> None:
    lives = Lives(Live(rule, 0) for rule in many(3))
    wanted = [*many(3)[:2], forward("tcp 7")]
    before = dict(lives.by_rule)
    lives.recognise(wanted)
    assert lives.by_rule == before
    known = {id(rule) for rule in lives.by_rule}
    assert [id(rule) in known for rule in wanted] == [True, True, False]
    after = lives.changed([lives[2]], [Live(wanted[2], 0)])
    assert {id(rule) for rule in after.by_rule} == {id(rule) for rule in wanted}
    assert after.recognised


def test_after_a_change_it_is_as_if_it_had_been_seen_so() -> None:
    before = Lives([Live(egress(), 5), *(Live(rule, 0, 7, 420) for rule in many(20))])
    gone, new = before[3:5], [forward("tcp 7"), from_inside("udp 53")]
    changed = before.changed(gone, [Live(rule, 0) for rule in new])
    seen = Lives([*(one for one in before if one not in gone), *(Live(rule, 0) for rule in new)])
    assert set(changed) == set(seen)
    assert len(changed) == len(seen) == 21
    assert changed.by_rule == seen.by_rule
    assert +changed.weights == +seen.weights
    assert (len(before), before.weights[ENTERING]) == (21, 20), "what was seen before has changed"


def test_where_something_is_in_its_table() -> None:
    spots = [spot(Live(forward("tcp 22"), 9)), spot(Live(egress(), 9)), spot(Live(forward(), 0))]
    assert spots == [9, 9, (name(ENTERING), 22)]
    assert len({spot(Live(rule, 0)) for rule in [*many(5), from_inside("tcp 1000-1008")]}) == 6


# --------------------------------------------------------------------------- rules as plain keys


DIFFERENT = [
    forward(),
    forward("tcp 22-23"),
    forward("udp 22"),
    forward(on="eth1"),
    forward(to="10.0.2.3"),
    forward(to="::a00:202"),  # the same number as 10.0.2.2
    forward(owner="another"),
    forward(source="10.0.0.1"),
    forward(destination="10.0.0.1"),
    forward(chain=Chain.OUTPUT),
    forward(None),
    replace(forward(), to_port=22),
    replace(forward(), to=None, destination=ip_address("10.0.2.2")),
]


def test_rules_are_equal_exactly_where_all_their_fields_are() -> None:
    again = [replace(rule) for rule in DIFFERENT]
    for i, one in enumerate(DIFFERENT):
        for j, other in enumerate(again):
            assert (one == other) == (i == j), (one, other)
    assert all(hash(one) == hash(other) for one, other in zip(DIFFERENT, again, strict=True))
    assert len({*DIFFERENT, *again}) == len(DIFFERENT)
    assert forward() != forward().key
