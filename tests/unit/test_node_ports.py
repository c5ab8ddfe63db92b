"""Node ports: two bands as in Kubernetes, runs of any length, and why somebody gets none."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rules.model import Protocol
from rules.node_ports import (
    Allocations,
    Bands,
    Holder,
    Pick,
    allocate,
    assign,
    rebuild,
    release,
)
from rules.ports import PortRange
from rules.problems import Problem
from tests.unit.samples import ports

DEFAULT = Bands(ports("30000-32767"))
SMALL = Bands(ports("100-139"))  # 16 and 24 ports
SIP = Holder("Service/default/sip", "sip", Protocol.UDP)
SIP_TCP = Holder("Service/default/sip", "sip-tcp", Protocol.TCP)
RTP = Holder("Service/default/sip", "rtp", Protocol.UDP)
WEB = Holder("Service/shop/web", "", Protocol.TCP)
FTP = Holder("Service/shop/ftp", "data", Protocol.TCP)


def chance(seed: int = 1) -> Pick:
    return random.Random(seed).randrange


def known(*held: tuple[Holder, str], bands: Bands = SMALL) -> Allocations:
    found = rebuild(bands, [(holder, ports(text)) for holder, text in held])
    assert len(found.held) == len(held)
    return found


def granted(answer: Allocations | Problem) -> Allocations:
    assert isinstance(answer, Allocations), str(answer)
    return answer


def refused(answer: Allocations | Problem) -> Problem:
    assert isinstance(answer, Problem)
    return answer


def given(
    before: Allocations,
    holder: Holder,
    count: int,
    seed: int = 1,
    avoid: Iterable[PortRange] = (),
) -> str:
    return str(granted(allocate(before, holder, count, chance(seed), avoid)).held[holder])


def holders(number: int) -> list[Holder]:
    return [Holder(f"Service/default/s{place}", "", Protocol.TCP) for place in range(number)]


# ---------------------------------------------------------------------------------------- bands


@pytest.mark.parametrize(
    ("text", "lower", "upper"),
    [
        pytest.param("30000-32767", "30000-30085", "30086-32767", id="example 1, the default"),
        pytest.param("20000-32767", "20000-20127", "20128-32767", id="example 2, large"),
        pytest.param("32567-32767", "32567-32582", "32583-32767", id="example 3, small"),
    ],
)
def test_the_examples_of_the_document(text: str, lower: str, upper: str) -> None:
    bands = Bands(ports(text))
    assert (bands.lower, bands.upper) == (ports(lower), ports(upper))


# The document counts the ports of its examples one too few (32767 - 30000). That changes none of
# them, but the size at which a band grows: there Kubernetes counts all ports, and so do we.
@pytest.mark.parametrize(
    ("size", "offset"),
    [
        (1, 0),
        (10, 0),
        (15, 0),
        (16, 0),
        (17, 16),
        (128, 16),
        (543, 16),
        (544, 17),
        (2047, 63),
        (2048, 64),
        (2768, 86),
        (4095, 127),
        (4096, 128),
        (4128, 128),
        (8192, 128),
        (35536, 128),
    ],
)
def test_the_lower_band_has_as_many_ports_as_in_kubernetes(size: int, offset: int) -> None:
    bands = Bands(PortRange(30000, 30000 + size - 1))
    assert bands.offset == offset
    assert len(bands.lower or ()) == offset
    assert len(bands.upper) == size - offset


def test_below_17_ports_there_is_one_band() -> None:
    bands = Bands(ports("30000-30015"))
    assert bands.lower is None
    assert bands.upper == bands.ports


# -------------------------------------------------------------------------------------- dynamic


def test_the_upper_band_is_used_up_before_the_lower() -> None:
    state, order, pick = Allocations(SMALL), list[int](), chance()
    for holder in holders(40):
        state = granted(allocate(state, holder, 1, pick))
        order.append(state.held[holder].first)
    assert set(order[:24]) == set(range(116, 140))
    assert set(order[24:]) == set(range(100, 116))
    assert order[:24] != sorted(order[:24])
    assert order[24:] != sorted(order[24:])


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        pytest.param("100-139", range(116, 140), id="the upper band"),
        pytest.param("100-109", range(100, 110), id="everything, where there is one band"),
    ],
)
def test_every_port_may_be_the_first_to_be_given(text: str, reached: range) -> None:
    empty = Allocations(Bands(ports(text)))
    assert {given(empty, WEB, 1, seed) for seed in range(500)} == set(map(str, reached))


def test_chance_alone_decides() -> None:
    empty = Allocations(DEFAULT)
    assert given(empty, RTP, 20, seed=5) == given(empty, RTP, 20, seed=5)
    assert len({given(empty, RTP, 20, seed) for seed in range(50)}) > 40


def test_the_last_free_port_is_found() -> None:
    state, pick = Allocations(Bands(ports("10000-10200"))), chance()
    for holder in holders(201):
        state = granted(allocate(state, holder, 1, pick))
    (owner,) = (holder for holder, held in state.pairs if 10005 in held)
    assert given(release(state, owner), WEB, 1) == "10005"


def test_nothing_is_given_when_all_is_taken() -> None:
    why = refused(allocate(known((WEB, "100-139")), RTP, 1, chance()))
    assert str(why) == (
        "no node port is free in 100-139: all are taken. Ask for fewer, remove Services, or change"
        " node_ports.range. [node-ports-exhausted]"
    )


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("state", [known(), known((RTP, "120-125"))])
def test_to_ask_for_no_ports_is_a_mistake(count: int, state: Allocations) -> None:
    with pytest.raises(ValueError, match="not a port range"):
        allocate(state, RTP, count, chance())


# ----------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("taken", "count", "run"),
    [
        pytest.param([], 24, "116-139", id="the whole upper band"),
        pytest.param([], 25, "115-139", id="one of the lower band"),
        pytest.param([], 40, "100-139", id="everything"),
        pytest.param(["120-139"], 5, "115-119", id="across, from where the upper is free"),
        pytest.param(["118", "121-139"], 3, "115-117", id="across, with two of three above"),
        pytest.param(["100-109", "117-139"], 3, "114-116", id="across, with one of three above"),
        pytest.param(["116-139", "100-110"], 5, "111-115", id="all of it in the lower band"),
        pytest.param(["116-127", "134-139"], 6, "128-133", id="the one gap that fits"),
    ],
)
def test_a_run_takes_the_least_of_the_lower_band(taken: list[str], count: int, run: str) -> None:
    state = known(*zip(holders(len(taken)), taken, strict=True))
    assert {given(state, RTP, count, seed) for seed in range(20)} == {run}


@pytest.mark.parametrize(
    ("taken", "count", "longest"),
    [
        pytest.param([], 41, "100-139 (40)", id="more than there are"),
        pytest.param(["120", "130"], 21, "100-119 (20)", id="across both bands"),
        pytest.param(["110-129"], 11, "100-109 (10)", id="the first of two"),
        pytest.param(["100-138"], 2, "139 (1)", id="a single port"),
    ],
)
def test_a_refusal_names_the_longest_free_run(taken: list[str], count: int, longest: str) -> None:
    state = known(*zip(holders(len(taken)), taken, strict=True))
    why = refused(allocate(state, RTP, count, chance()))
    assert why.what == (
        f"no {count} node ports in a row are free in 100-139: the longest free run is {longest}"
    )


def test_a_run_that_fills_much_of_a_gap_goes_to_an_end_of_it() -> None:
    empty = Allocations(DEFAULT)
    assert {given(empty, RTP, 1000, seed) for seed in range(20)} == {"30086-31085", "31768-32767"}


def test_the_shorter_gap_is_preferred() -> None:
    state = known((WEB, "30200"), bands=DEFAULT)  # 114 ports below it, 2,567 above
    below = [ports(given(state, RTP, 50, seed)).last < 30200 for seed in range(100)]
    assert sum(below) > 10  # 65 of 2,583 places: by chance alone, two or three of the hundred


def test_what_is_to_be_avoided_is_not_given() -> None:
    away = [ports("1-117"), ports("119-130"), ports("125-138"), ports("140-65535")]
    assert {given(known(), WEB, 1, seed, away) for seed in range(20)} == {"118", "139"}
    why = refused(allocate(known(), RTP, 2, chance(), away))
    assert why.what.endswith("the longest free run is 118 (1)")


# ---------------------------------------------------------------------------------------- holding


def test_who_asks_again_gets_what_it_holds() -> None:
    state = granted(allocate(known(), RTP, 5, chance(1)))
    assert allocate(state, RTP, 5, chance(2), avoid=[SMALL.ports]) is state
    assert assign(state, RTP, state.held[RTP]) is state


@pytest.mark.parametrize(
    ("others", "count", "run"),
    [
        pytest.param([], 3, "120-122", id="cut at its end"),
        pytest.param([], 8, "120-127", id="grown"),
        pytest.param(["128"], 8, "120-127", id="grown up to another"),
        pytest.param([], 20, "120-139", id="grown to the last port"),
        pytest.param(["127-139"], 11, "116-126", id="moved, over what it had"),
        pytest.param([], 24, "116-139", id="moved, as the range ends"),
    ],
)
def test_a_range_that_changes_its_length_stays_if_it_can(
    others: list[str], count: int, run: str
) -> None:
    state = known((RTP, "120-124"), *zip(holders(len(others)), others, strict=True))
    assert {given(state, RTP, count, seed) for seed in range(5)} == {run}


def test_a_range_does_not_grow_over_what_is_to_be_avoided() -> None:
    state = known((RTP, "120-124"), (WEB, "100-118"), (FTP, "131-139"))
    assert given(state, RTP, 6, avoid=[ports("120-124")]) == "120-125"
    assert given(state, RTP, 6, avoid=[ports("125")]) == "119-124"


def test_who_cannot_have_more_keeps_what_it_holds() -> None:
    state = known((RTP, "120-124"), (WEB, "125-139"), (FTP, "100-118"))
    why = refused(allocate(state, RTP, 7, chance()))
    assert why.what.endswith("the longest free run is 119-124 (6)")
    assert state == known((RTP, "120-124"), (WEB, "125-139"), (FTP, "100-118"))


def test_what_is_released_is_free_again() -> None:
    state = known((RTP, "120-124"), (WEB, "125"), (FTP, "126"))
    assert release(state, RTP, FTP) == known((WEB, "125"))
    assert release(state, SIP) is state


# --------------------------------------------------------------------------------------- wishes


@pytest.mark.parametrize("wish", ["100", "139", "100-115", "116-139", "110-120", "100-139"])
def test_a_wish_may_be_anywhere_in_the_range(wish: str) -> None:
    assert granted(assign(known(), WEB, ports(wish))).held == {WEB: ports(wish)}


@pytest.mark.parametrize("wish", ["99", "140", "99-100", "139-140", "1-65535", "22"])
def test_a_wish_outside_the_range_is_refused(wish: str) -> None:
    why = refused(assign(known(), WEB, ports(wish)))
    assert str(why) == (
        f"{wish} is not within the node ports 100-139."
        " Choose from these, or change node_ports.range. [node-port-outside]"
    )


@pytest.mark.parametrize("wish", ["120", "124", "119-120", "124-125", "121-123", "100-139"])
def test_a_wish_that_is_taken_is_refused_with_the_name_of_the_holder(wish: str) -> None:
    why = refused(assign(known((RTP, "120-124")), WEB, ports(wish)))
    assert str(why) == (
        f"{wish} cannot be given: node port 120-124 is held by Service/default/sip port rtp (udp)."
        " Choose another, or none to be given one. [node-port-taken]"
    )


def test_of_several_holders_always_the_same_is_named() -> None:
    for held in ([(RTP, "120"), (FTP, "121")], [(FTP, "121"), (RTP, "120")]):
        assert refused(assign(known(*held), WEB, ports("120-121"))).what.endswith(
            f"is held by {RTP}"
        )


def test_a_wish_replaces_what_was_held() -> None:
    state = granted(assign(known((WEB, "120-124")), WEB, ports("122-126")))
    assert state.held == {WEB: ports("122-126")}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        pytest.param(SIP, SIP_TCP, True, id="one Service, two protocols"),
        pytest.param(SIP, RTP, False, id="one Service, one protocol"),
        pytest.param(SIP, WEB, False, id="two Services, two protocols"),
        pytest.param(FTP, WEB, False, id="two Services, one protocol"),
    ],
)
def test_a_number_is_shared_within_a_service_only(
    first: Holder, second: Holder, both: bool
) -> None:
    answer = assign(known((first, "120-124")), second, ports("122-126"))
    assert isinstance(answer, Allocations) == both


def test_a_shared_number_stays_taken_until_both_let_go() -> None:
    state = known((SIP, "100"), (SIP_TCP, "100"))
    one = release(state, SIP)
    assert refused(assign(one, WEB, ports("100"))).what.endswith(f"is held by {SIP_TCP}")
    assert granted(assign(release(one, SIP_TCP), WEB, ports("100"))).held == {WEB: ports("100")}


def test_ports_that_share_numbers_can_grow_one_after_the_other() -> None:
    state = known((SIP, "120-124"), (SIP_TCP, "120-124"))
    grown = granted(allocate(state, SIP, 8, chance()))
    assert grown.held[SIP] == ports("120-127")
    assert granted(assign(grown, SIP_TCP, ports("120-127"))).held[SIP_TCP] == ports("120-127")


def test_a_port_that_shares_its_numbers_can_be_cut() -> None:
    state = known((SIP, "120-124"), (SIP_TCP, "120-124"), (WEB, "125"))
    assert {given(state, SIP, 3, seed) for seed in range(5)} == {"120-122"}


# -------------------------------------------------------------------------------------- rebuilt


def test_what_is_rebuilt_is_as_it_was_and_in_order() -> None:
    state = known((WEB, "101"), (SIP, "120"), (SIP_TCP, "120"), (RTP, "121-130"))
    assert state.pairs == [
        (RTP, ports("121-130")),
        (SIP, ports("120")),
        (SIP_TCP, ports("120")),
        (WEB, ports("101")),
    ]
    assert rebuild(SMALL, reversed(state.pairs)) == state
    assert rebuild(SMALL, [*state.pairs, *state.pairs]) == state


def test_the_earlier_word_counts() -> None:
    live = [
        (RTP, ports("120-129")),
        (WEB, ports("129-130")),  # taken
        (FTP, ports("139-140")),  # outside
        (RTP, ports("110")),  # another word about the first
        (SIP, ports("110")),
    ]
    assert rebuild(SMALL, live) == known((RTP, "120-129"), (SIP, "110"))


def test_who_was_refused_for_one_range_may_keep_another() -> None:
    assert rebuild(SMALL, [(WEB, ports("99")), (WEB, ports("100"))]) == known((WEB, "100"))


# -------------------------------------------------------------------------------------- metrics


def test_numbers_are_counted_per_band_and_once_for_all_protocols() -> None:
    state = known((SIP, "110-119"), (SIP_TCP, "110-114"), (WEB, "139"))
    lower, upper = SMALL.lower, SMALL.upper
    assert lower is not None
    assert [state.available(band) for band in (SMALL.ports, lower, upper)] == [29, 10, 19]
    assert known().available(SMALL.ports) == 40
    assert known((WEB, "100-139")).available(SMALL.ports) == 0


def test_a_holder_without_a_port_name_is_named_by_its_service() -> None:
    assert str(WEB) == "Service/shop/web (tcp)"
