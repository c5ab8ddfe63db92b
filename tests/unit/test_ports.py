"""Port ranges: what one is, and how several are joined and taken away from each other."""

from __future__ import annotations

import random

import pytest

from rules.ports import ALL_PORTS, PortRange, coalesce, subtract
from tests.unit.samples import ports


def ranges(text: str) -> tuple[PortRange, ...]:
    return tuple(map(ports, text.split()))


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 1, id="from zero"),
        pytest.param(-1, 1, id="below zero"),
        pytest.param(2, 1, id="backwards"),
        pytest.param(1, 65536, id="past the last port"),
        pytest.param(65536, 65536, id="beyond all ports"),
    ],
)
def test_no_range_is_made_of_what_are_no_ports(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="not a port range"):
        PortRange(first, last)


@pytest.mark.parametrize(
    ("range_", "text", "length"),
    [
        pytest.param(PortRange(22, 22), "22", 1, id="one port"),
        pytest.param(PortRange(1000, 8000), "1000-8000", 7001, id="several"),
        pytest.param(ALL_PORTS, "1-65535", 65535, id="all"),
    ],
)
def test_a_range_is_written_and_counted_as_people_do(
    range_: PortRange, text: str, length: int
) -> None:
    assert str(range_) == text
    assert len(range_) == length


def test_a_range_holds_both_its_ends_and_nothing_beyond() -> None:
    held = [port for port in range(1, 20) if port in PortRange(5, 9)]
    assert held == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        pytest.param("5-9", "9-12", True, id="a shared end"),
        pytest.param("5-9", "10-12", False, id="touching"),
        pytest.param("5-9", "6-7", True, id="one inside the other"),
        pytest.param("5-9", "5-9", True, id="the same"),
        pytest.param("5-9", "20", False, id="apart"),
    ],
)
def test_ranges_overlap_where_a_port_is_in_both(one: str, other: str, overlap: bool) -> None:
    assert ports(one).overlaps(ports(other)) is overlap
    assert ports(other).overlaps(ports(one)) is overlap


@pytest.mark.parametrize(
    ("given", "fewest"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("22", "22", id="one port"),
        pytest.param("80 81", "80-81", id="touching ports"),
        pytest.param("80 82", "80 82", id="a gap of one stays"),
        pytest.param("80 80 80", "80", id="duplicates"),
        pytest.param("1000-2000 2001-3000", "1000-3000", id="touching ranges"),
        pytest.param("1000-2000 1500-3000", "1000-3000", id="overlapping ranges"),
        pytest.param("1000-8000 2000-3000 4000", "1000-8000", id="ranges inside another"),
        pytest.param("3000 1000 2000", "1000 2000 3000", id="in ascending order"),
        pytest.param("1-32767 32768-65535", "1-65535", id="two halves of everything"),
        pytest.param("65535 65534", "65534-65535", id="up to the last port"),
    ],
)
def test_coalesce_gives_the_fewest_ranges(given: str, fewest: str) -> None:
    assert coalesce(ranges(given)) == ranges(fewest)


def test_seven_thousand_shuffled_ports_are_one_range() -> None:
    single = [PortRange(port, port) for port in range(1000, 8001)]
    random.Random(7).shuffle(single)
    assert coalesce(single) == (PortRange(1000, 8000),)


@pytest.mark.parametrize(
    ("given", "holes", "left"),
    [
        pytest.param("1-10", "", "1-10", id="nothing taken"),
        pytest.param("", "1-10", "", id="nothing to take from"),
        pytest.param("1-10", "1-10", "", id="everything taken"),
        pytest.param("5-9", "1-20", "", id="more taken than is there"),
        pytest.param("1-10", "4-6", "1-3 7-10", id="the middle"),
        pytest.param("1-10", "1-3", "4-10", id="the beginning"),
        pytest.param("1-10", "8-10", "1-7", id="the end"),
        pytest.param("1-10", "11-20", "1-10", id="next to it"),
        pytest.param("1-10 20-30", "5-25", "1-4 26-30", id="across two"),
        pytest.param("1-10", "2 4 6", "1 3 5 7-10", id="several holes"),
    ],
)
def test_subtract_leaves_what_is_in_no_hole(given: str, holes: str, left: str) -> None:
    assert subtract(ranges(given), ranges(holes)) == ranges(left)
