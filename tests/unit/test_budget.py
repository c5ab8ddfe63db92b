"""What published ranges may cost, and who is told that it is too much."""

from __future__ import annotations

from rules.budget import MOST, MOST_OF_A_FACE, affordable
from rules.values import replace
from tests.unit.test_publish import face

WIDE = "rtp udp 1-32768>2"
SAME = "rtp udp 1-32768>1"


def addresses(count: int) -> list[str]:
    return [f"10.1.{number >> 8}.{number & 255}" for number in range(1, count + 1)]


def test_a_range_that_is_not_shifted_costs_one_for_each_endpoint() -> None:
    wide = face(SAME, *addresses(1000))
    assert affordable([wide] * 131) == ([wide] * 131, [], [])
    kept, refused, [note] = affordable([wide] * 132)
    assert (len(kept[-1].endpoints), refused) == (MOST - 131 * 1000, [])
    assert "72 of 1000 get flows" in note


def test_of_a_shifted_one_so_many_endpoints_get_flows_as_there_is_room_for() -> None:
    wide = face(WIDE, *addresses(10))
    [kept], refused, [note] = affordable([wide])
    assert len(kept.endpoints) == MOST_OF_A_FACE // 32768 == 2
    assert kept.endpoints == wide.endpoints[:2]
    assert refused == []
    assert "2 of 10 get flows" in note


def test_who_comes_when_there_is_no_room_is_refused_and_who_came_first_is_not() -> None:
    faces = [face(WIDE, *addresses(2), name=f"a{number}") for number in range(3)]
    kept, [refusal], notes = affordable(faces)
    assert kept == faces[: MOST // MOST_OF_A_FACE] == faces[:2]
    assert refusal.owner == faces[2].name
    assert "cannot be published" in refusal.reason
    assert notes == []


def test_endpoints_that_cost_little_are_kept_beside_those_that_cost_much() -> None:
    wide = face(WIDE, *addresses(5))
    same = face(SAME, "10.2.0.1")
    mixed = replace(wide, endpoints=(*same.endpoints, *wide.endpoints))
    [kept], _, _ = affordable([mixed])
    assert kept.endpoints == (*same.endpoints, *wide.endpoints[:1])
