"""The laws of node ports, each against a count of single ports; and how runs wear the range out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from rules.model import FORWARDED, Protocol
from rules.node_ports import (
    Allocations,
    Bands,
    Held,
    Holder,
    allocate,
    assign,
    rebuild,
    release,
)
from rules.ports import PortRange, subtract
from rules.problems import Problem

# Few holders and ports, so that they often meet; some ranges have one band, some two.
holders = st.builds(
    Holder, st.sampled_from("abcd"), st.sampled_from(["", "x", "y"]), st.sampled_from(FORWARDED)
)
bands = st.builds(
    lambda first, size: Bands(PortRange(first, first + size - 1)),
    st.sampled_from([1, 30000, 65536 - 45]),
    st.integers(1, 45),
)
chances = st.randoms(use_true_random=False)


@st.composite
def runs(draw: st.DrawFn, around: Bands, beyond: int = 0) -> PortRange:
    """Ports of the range, or up to so many on either side of it."""
    first, last = max(1, around.ports.first - beyond), min(65535, around.ports.last + beyond)
    ends = sorted(draw(st.tuples(*[st.integers(first, last)] * 2)))
    return PortRange(ends[0], min(ends[1], ends[0] + draw(st.sampled_from([0, 0, 2, 6, 45]))))


@st.composite
def states(draw: st.DrawFn) -> Allocations:
    """As many steps have led to it: dynamic, static, and back."""
    known, chance = Allocations(draw(bands)), draw(chances)
    for holder in draw(st.lists(holders, max_size=16)):
        step = draw(st.sampled_from(["allocate", "allocate", "assign", "release"]))
        answer: Allocations | Problem
        if step == "allocate":
            answer = allocate(known, holder, draw(st.integers(1, 9)), chance.randrange)
        elif step == "assign":
            answer = assign(known, holder, draw(runs(known.bands)))
        else:
            answer = release(known, holder)
        known = answer if isinstance(answer, Allocations) else known
    return known


def numbers(ports: PortRange) -> set[int]:
    return set(range(ports.first, ports.last + 1))


def free_for(holder: Holder, known: Allocations, avoid: Iterable[PortRange] = ()) -> set[int]:
    others = [ports for other, ports in known.held.items() if other != holder]
    return numbers(known.bands.ports) - set[int]().union(*map(numbers, [*others, *avoid]))


def fitting(free: set[int], count: int) -> list[set[int]]:
    """Every run of that length, found by trying."""
    tried = (set(range(first, first + count)) for first in free)
    return [run for run in tried if run <= free]


def meet(one: Held, other: Held) -> bool:
    """Whether the two cannot both be held."""
    shared = one[0].owner == other[0].owner and one[0].protocol != other[0].protocol
    return bool(numbers(one[1]) & numbers(other[1])) and not shared


@given(states())
def test_no_number_is_held_twice_and_all_are_within_the_range(known: Allocations) -> None:
    assert not [two for two in combinations(known.pairs, 2) if meet(*two)]
    assert all(numbers(ports) <= numbers(known.bands.ports) for ports in known.held.values())


@given(states(), holders, st.integers(1, 50), chances, st.data())
def test_a_run_is_refused_only_if_there_is_none(
    known: Allocations, holder: Holder, count: int, chance: random.Random, data: st.DataObject
) -> None:
    known = release(known, holder)
    avoid = data.draw(st.lists(runs(known.bands, beyond=3), max_size=3))
    free = free_for(holder, known, avoid)
    answer = allocate(known, holder, count, chance.randrange, avoid)
    if isinstance(answer, Allocations):
        assert numbers(answer.held[holder]) in fitting(free, count)
        assert release(answer, holder) == known
    else:
        assert not fitting(free, count)
        longest = next((size for size in range(len(free), 0, -1) if fitting(free, size)), 0)
        assert answer.what.endswith(f"({longest})" if longest else "all are taken")


@given(states(), holders, st.integers(1, 20), chances)
def test_nobody_is_given_more_of_the_lower_band_than_needed(
    known: Allocations, holder: Holder, count: int, chance: random.Random
) -> None:
    known = release(known, holder)
    answer = allocate(known, holder, count, chance.randrange)
    if isinstance(answer, Allocations):
        lower = set(range(known.bands.ports.first, known.bands.upper.first))
        least = min(len(run & lower) for run in fitting(free_for(holder, known), count))
        assert len(numbers(answer.held[holder]) & lower) == least


@given(states(), holders, st.data())
def test_a_wish_is_refused_only_if_it_cannot_be(
    known: Allocations, holder: Holder, data: st.DataObject
) -> None:
    wish = data.draw(runs(known.bands, beyond=3))
    rest = release(known, holder)
    in_the_way = [one[0] for one in rest.pairs if meet(one, (holder, wish))]
    within = numbers(wish) <= numbers(known.bands.ports)
    answer = assign(known, holder, wish)
    if isinstance(answer, Allocations):
        assert within
        assert not in_the_way
        assert answer.held == {**rest.held, holder: wish}
    elif within:
        assert answer.what.endswith(f"is held by {in_the_way[0]}")
    else:
        assert answer.code == "node-port-outside"


@given(states(), chances)
def test_who_asks_again_changes_nothing(known: Allocations, chance: random.Random) -> None:
    for holder, ports in known.pairs:
        assert allocate(known, holder, len(ports), chance.randrange) == known
        assert assign(known, holder, ports) == known


@given(states(), st.integers(1, 12), chances)
def test_a_holder_stays_where_it_begins_if_it_can(
    known: Allocations, count: int, chance: random.Random
) -> None:
    for holder, ports in known.pairs:
        more = set(range(ports.last + 1, ports.first + count))
        answer = allocate(known, holder, count, chance.randrange)
        if more <= free_for(holder, known):
            assert isinstance(answer, Allocations)
            assert answer.held[holder].first == ports.first
        if isinstance(answer, Allocations):
            assert release(answer, holder) == release(known, holder)
            assert len(answer.held[holder]) == count


@given(states(), chances)
def test_all_can_be_rebuilt_from_what_lives_in_any_order(
    known: Allocations, chance: random.Random
) -> None:
    live = chance.sample(known.pairs, len(known.held))
    found = rebuild(known.bands, live)
    assert found == known
    assert found.pairs == known.pairs


@given(bands, st.data())
def test_of_whatever_is_found_only_what_fits_is_kept(around: Bands, data: st.DataObject) -> None:
    live = data.draw(st.lists(st.tuples(holders, runs(around, beyond=3)), max_size=10))
    found = rebuild(around, live)
    assert not [two for two in combinations(found.pairs, 2) if meet(*two)]
    assert all(numbers(ports) <= numbers(around.ports) for ports in found.held.values())
    for holder, ports in live:
        fits = numbers(ports) <= numbers(around.ports)
        alone = not any(meet((holder, ports), one) for one in found.pairs)
        assert holder in found.held or not (fits and alone)
    assert set(found.pairs) <= set(live)


@given(states(), st.data())
def test_what_is_available_is_what_nobody_holds(known: Allocations, data: st.DataObject) -> None:
    within = data.draw(runs(known.bands))
    nobody = Holder("nobody", "", Protocol.TCP)
    assert known.available(within) == len(free_for(nobody, known) & numbers(within))


# --------------------------------------------------------------------------------- fragmentation

Give = Callable[[Allocations, Holder, int, random.Random], Allocations]

LOAD, REQUESTS, SIZES = 0.7, 600, [1, 1, 1, 1, 5, 10, 50, 100]


def ours(known: Allocations, holder: Holder, count: int, chance: random.Random) -> Allocations:
    """The same in shape as the others: unchanged, if there is no room."""
    answer = allocate(known, holder, count, chance.randrange)
    return answer if isinstance(answer, Allocations) else known


def first_fit(known: Allocations, holder: Holder, count: int, _: random.Random) -> Allocations:
    wide = gaps(known, count)
    return put(known, holder, wide[0].first, count) if wide else known


def by_chance(known: Allocations, holder: Holder, count: int, chance: random.Random) -> Allocations:
    wide = gaps(known, count)
    if not wide:
        return known
    (gap,) = chance.choices(wide, [len(one) - count + 1 for one in wide])
    return put(known, holder, chance.randint(gap.first, gap.last - count + 1), count)


def gaps(known: Allocations, count: int) -> list[PortRange]:
    free = subtract([known.bands.ports], known.held.values())
    return [gap for gap in free if len(gap) >= count]


def put(known: Allocations, holder: Holder, first: int, count: int) -> Allocations:
    answer = assign(known, holder, PortRange(first, first + count - 1))
    assert isinstance(answer, Allocations)
    return answer


def churn(give: Give, seed: int) -> tuple[float, float]:
    """How many requests found no run, and how many got ports that had just been given back.

    Never more than the load is held, so an allocator that moved others about would refuse none.
    """
    chance, known = random.Random(seed), Allocations(Bands(PortRange(30000, 32767)))
    most = LOAD * len(known.bands.ports)
    used = refused = reused = 0
    back: set[int] = set()
    for request in range(REQUESTS):
        holder, count = Holder(str(request), "", Protocol.TCP), chance.choice(SIZES)
        while used + count > most:
            gone = chance.choice(list(known.held))
            back, known = numbers(known.held[gone]), release(known, gone)
            used -= len(back)
        known = give(known, holder, count, chance)
        got = numbers(known.held[holder]) if holder in known.held else set[int]()
        used += len(got)
        refused += not got
        reused += bool(got & back)
    return refused / REQUESTS, reused / REQUESTS


@settings(max_examples=2)
@given(st.integers(0, 10_000))
def test_runs_are_still_found_after_long_use_and_old_ports_rest(seed: int) -> None:
    """Singles and runs of up to 100 come and go, and fill 70 % of the range.

    Over 60 seeds we refused 0.3 % of them (2 % at worst), pure chance 19 %, first fit none. But
    first fit gave ports just given back, which clients may remember, to 14 %, we to 5 %.
    """
    refused, reused = churn(ours, seed)
    assert refused < 0.05
    assert refused * 2 < churn(by_chance, seed)[0]
    assert reused < churn(first_fit, seed)[1]
