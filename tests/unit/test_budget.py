"""What published ranges may cost, and who is told that it is too much."""

from __future__ import annotations

import time

from rules.budget import MOST, MOST_ENDPOINTS, MOST_OF_A_FACE, affordable
from rules.publish import Publishing, desire_node
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


def test_of_one_port_so_many_endpoints_get_flows_and_the_others_are_told_of() -> None:
    most = face(SAME, *addresses(MOST_ENDPOINTS))
    assert affordable([most]) == ([most], [], [])
    more = face(SAME, *addresses(MOST_ENDPOINTS + 1))
    [kept], refused, [note] = affordable([more])
    assert kept.endpoints == more.endpoints[:MOST_ENDPOINTS] == most.endpoints
    assert refused == []
    assert f"1000 of 1001 get flows; no port has more than {MOST_ENDPOINTS}" in note
    assert "target ports" not in note


def test_however_many_endpoints_clients_could_keep_it_is_over_soon() -> None:
    wide = face(SAME, *addresses(20_000))
    sticky = replace(wide, service=replace(wide.service, affinity=10800))
    began = time.thread_time()
    kept, _, _ = affordable([sticky])
    made = desire_node(kept, None, Publishing())
    assert time.thread_time() - began < 2  # a tenth of that, while 20,000 would take twelve
    assert made.rules


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
