"""Element-only plans as bytes: which plans are, what the kernel is told, and what is known then.
tests/netns/test_shapes.py has the kernel read them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from agent.kernel.netlink import attributes
from rules.model import Chain, Desired, Family, Foreign, Live, Lookup, Observed, Protocol, Rule
from rules.nft_batch import (
    ACK,
    BATCH_BEGIN,
    BATCH_END,
    CREATE,
    DELSETELEM,
    NEWSETELEM,
    batch,
)
from rules.nft_foreseen import are_elements, carried_out, is_for
from rules.nft_steps import Step
from rules.nft_transactions import transactions
from rules.plan import Plan, diff
from rules.shapes import Lives
from rules.values import replace
from tests.unit.samples import egress, forward, from_inside, steps

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
ENTERING_6 = replace(ENTERING, family=Family.IP6)


def many(number: int, *, to: str = "10.0.2.2", owner: str = "o") -> list[Rule]:
    """That many ranges of one lookup, from 1000 on, two ports apart."""
    return [
        forward(f"tcp {port}-{port + 7}", to=to, owner=owner)
        for port in range(1000, 1000 + 10 * number, 10)
    ]


def held(*elements: Rule, rules: Sequence[Rule] = ()) -> Observed:
    """A table with one map for IPv4 and one for IPv6, and some rules beside them."""
    live = [Live(rule, number) for number, rule in enumerate(rules, 10)]
    return Observed(
        live=Lives([*live, *(Live(rule, 0) for rule in elements)]),
        chains=frozenset(Chain),
        table=True,
        mapped={ENTERING: 7, **({ENTERING_6: 8} if _has_6(elements) else {})},
    )


def _has_6(rules: Sequence[Rule]) -> bool:
    return any(rule.family is Family.IP6 for rule in rules)


def planned(observed: Observed, *rules: Rule) -> Plan:
    return diff("blue", Desired(rules=frozenset(rules)), observed)


# ------------------------------------------------------------------------------- which plans are


CROWD = many(20)
ALONE = held(*CROWD, rules=[egress()])


@pytest.mark.parametrize(
    ("wanted", "observed", "expected"),
    [
        pytest.param([egress(), *CROWD, forward("tcp 7")], ALONE, True, id="an element more"),
        pytest.param([egress(), *CROWD[1:]], ALONE, True, id="an element less"),
        pytest.param(
            [egress(), *CROWD[1:], forward("tcp 1000-1008", owner="o")],
            ALONE,
            True,
            id="an element that grows",
        ),
        pytest.param([egress(), *CROWD], ALONE, False, id="nothing"),
        pytest.param(
            [egress(), *CROWD],
            replace(ALONE, leftovers=(Foreign("x", 1, "y"),)),
            False,
            id="what the other backend holds",
        ),
        pytest.param([*CROWD], ALONE, False, id="a rule less"),
        pytest.param([egress(), *CROWD, forward(None)], ALONE, False, id="a rule more"),
        pytest.param(
            [egress(), *CROWD[1:], from_inside("tcp 1000-1007")], ALONE, False, id="a first rule"
        ),
        pytest.param([egress(), *CROWD[:4]], ALONE, False, id="too few for a map"),
        pytest.param(
            [egress(), *CROWD, *many(16, to="fd10:0:2::2")], ALONE, False, id="a second map"
        ),
        pytest.param(
            [egress(), *CROWD[1:]],
            replace(ALONE, foreign=(Foreign("output", 9, "accept"),)),
            False,
            id="a foreign rule beside it",
        ),
        pytest.param(
            [egress(), *CROWD[1:]], replace(ALONE, chains=frozenset()), False, id="chains beside it"
        ),
        pytest.param(
            [egress(), *CROWD[1:]],
            replace(ALONE, unsound="flags", mapped={}),
            False,
            id="a table made anew",
        ),
        pytest.param([], ALONE, False, id="the end of the table"),
        pytest.param(CROWD, Observed(mapped={}), False, id="the beginning of the table"),
    ],
)
def test_a_plan_is_of_elements_only(wanted: list[Rule], observed: Observed, expected: bool) -> None:
    assert are_elements(planned(observed, *wanted)) is expected


# ------------------------------------------------------------------------------ what is written


class Element(NamedTuple):
    """One of those that a message lists."""

    port: int
    ends: bool
    to: bytes
    comment: str


class Message(NamedTuple):
    """One of those of a batch."""

    kind: int
    flags: int
    table: bytes
    map: bytes
    elements: list[Element]


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    while data:
        length, kind, flags, _, _ = struct.unpack_from("=IHHII", data)
        yield kind, flags, data[16:length]
        data = data[(length + 3) & ~3 :]


def read(plan: Plan, generation: int = 7) -> list[Message]:
    """What a batch says, its frame apart."""
    return read_steps(steps(plan), generation)


def read_steps(found: Sequence[Step], generation: int = 7) -> list[Message]:
    begin, *between, end = messages(batch(found, generation))
    assert (begin[0], end[0]) == (BATCH_BEGIN, BATCH_END)
    (given,) = struct.unpack(">I", attributes(memoryview(begin[2])[4:])[1])
    assert given == generation
    return [_message(*one) for one in between]


def _message(kind: int, flags: int, body: bytes) -> Message:
    family, _, _ = struct.unpack_from("=BBH", body)
    assert family == 1, "not of the family inet"
    found = attributes(memoryview(body)[4:])
    return Message(kind, flags, found[1], found[2], [*_elements(found[3])])


def _elements(raw: bytes) -> Iterator[Element]:
    while raw:
        length, _ = struct.unpack_from("=HH", raw)
        inner = attributes(memoryview(raw)[4:length])
        comment = inner.get(6, b"")
        assert not comment or (comment[0], comment[1]) == (0, len(comment) - 2)
        yield Element(
            int.from_bytes(attributes(memoryview(inner[1]))[1], "big"),
            inner.get(3) == struct.pack(">I", 1),
            attributes(memoryview(inner[2]))[1] if 2 in inner else b"",
            comment[2:].rstrip(b"\0").decode(),
        )
        raw = raw[(length + 3) & ~3 :]


GUEST = bytes([10, 0, 2, 2])


def test_a_range_more_is_one_message_with_its_two_ends() -> None:
    (message,) = read(planned(held(*CROWD), *CROWD, forward("tcp 7-9", owner="me")))
    assert message.kind == NEWSETELEM
    assert (message.table, message.map) == (b"portranger\0", b"prerouting-ip-tcp-eth0\0")
    assert message.elements == [Element(7, False, GUEST, "me"), Element(10, True, b"", "")]


def test_a_range_less_is_one_message_with_its_two_ends() -> None:
    (message,) = read(planned(held(*CROWD), *CROWD[1:]))
    assert message.kind == DELSETELEM
    assert message.elements == [Element(1000, False, b"", ""), Element(1008, True, b"", "")]


def test_a_changed_range_goes_before_it_comes() -> None:
    plan = planned(held(*CROWD), *CROWD[1:], forward("tcp 1000-1008", owner="o"))
    _, change, _ = transactions(plan)
    gone, new = read_steps(change)
    assert (gone.kind, new.kind) == (DELSETELEM, NEWSETELEM)
    assert [one.port for one in (*gone.elements, *new.elements)] == [1000, 1008, 1000, 1009]


def test_a_range_up_to_the_last_port_has_no_end() -> None:
    (message,) = read(planned(held(*CROWD), *CROWD, forward("tcp 65000-65535", owner="me")))
    assert message.elements == [Element(65000, False, GUEST, "me")]


def test_every_map_has_messages_of_its_own() -> None:
    six = many(20, to="fd10:0:2::2")
    plan = planned(
        held(*CROWD, *six),
        *CROWD[1:],
        *six[:-1],
        forward("tcp 7", owner="o"),
        forward("tcp 7", to="fd10:0:2::9", owner="o"),
    )
    maps = (b"prerouting-ip-tcp-eth0\0", b"prerouting-ip6-tcp-eth0\0")
    assert [(one.kind, one.map) for one in read(plan)] == [
        *((DELSETELEM, one) for one in maps),
        *((NEWSETELEM, one) for one in maps),
    ]
    assert read(plan)[3].elements[0].to.hex() == "fd100000000200000000000000000009"


def test_only_the_last_message_is_acknowledged_and_only_what_is_new_is_created() -> None:
    plan = planned(held(*CROWD), *CROWD[1:], *many(900)[20:])
    flags = [(message.kind, message.flags) for message in read(plan)]
    assert len(flags) == 6
    assert [bool(flag & ACK) for _, flag in flags] == [False] * 5 + [True]
    assert all(bool(flag & CREATE) == (kind == NEWSETELEM) for kind, flag in flags)


@pytest.mark.parametrize("to", ["10.0.2.2", "fd10:0:2::2"])
def test_thousands_of_the_longest_elements_fit_into_their_messages(to: str) -> None:
    longest = "ü" * 64
    assert len(longest.encode()) == 128
    before, after = many(20, to=to, owner=longest), many(5000, to=to, owner=longest)
    observed = replace(held(*before), mapped={replace(ENTERING, family=before[0].family): 7})
    plan = planned(observed, *after)
    found = read(plan)
    assert all(len(body) < 1 << 16 for _, _, body in messages(batch(steps(plan), 7)))
    starts = [one for message in found for one in message.elements if not one.ends]
    assert sorted(one.port for one in starts) == [1000 + 10 * i for i in range(20, 5000)]
    assert {one.comment for one in starts} == {longest}
    for message in found:  # a range is never torn apart: kernels look at its ends together
        assert [one.ends for one in message.elements] == [False, True] * (
            len(message.elements) // 2
        )


def test_the_size_of_a_change_does_not_depend_on_how_many_ranges_stay() -> None:
    changed = forward("tcp 1000-1008", owner="o")
    batches = {
        number: batch(steps(planned(held(*many(number)), *many(number)[1:], changed)), 7)
        for number in (20, 5000)
    }
    assert batches[20] == batches[5000]
    assert len(batches[20]) < 1200


# ---------------------------------------------------------------------------- what is known then


def test_after_the_batch_there_is_what_the_plan_says() -> None:
    before = held(*CROWD, rules=[egress()])
    wanted = [egress(), *CROWD[2:], forward("tcp 1000-1008", owner="o"), forward("tcp 7")]
    plan = planned(before, *wanted)
    assert (len(plan.add), len(plan.change), len(plan.remove)) == (1, 1, 1)
    after = carried_out(steps(plan), before)
    assert {live.rule for live in after.live} == set(wanted)
    assert len(after.live) == len(wanted)
    assert planned(after, *wanted).empty
    assert replace(after, live=()) == replace(before, live=())
    assert {live.rule for live in before.live} == {egress(), *CROWD}, "what was seen has changed"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(held(*CROWD), True, id="what it was made for"),
        pytest.param(held(*CROWD, forward("tcp 9")), True, id="something else beside it"),
        pytest.param(held(*CROWD[1:]), False, id="what it takes away has gone"),
        pytest.param(
            held(*CROWD[1:], replace(CROWD[0], owner="another")),
            False,
            id="what it takes away is another's",
        ),
        pytest.param(held(*CROWD, forward("tcp 7")), False, id="what it adds is there"),
    ],
)
def test_a_plan_is_for_what_was_found(found: Observed, expected: bool) -> None:
    plan = planned(held(*CROWD), *CROWD[1:], forward("tcp 7"))
    assert is_for(plan, found) is expected
