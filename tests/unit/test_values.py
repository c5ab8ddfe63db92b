"""Values: equal by content, fixed for good, and strict about what they are made of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from agent.kernel.events import Lost
from rules.model import Foreign, Live, Pending, Rule
from rules.ports import PortRange
from rules.values import replace
from tests.unit.samples import forward


def test_values_of_one_content_are_one_value() -> None:
    assert PortRange(1, 2) == PortRange(first=1, last=2)
    assert len({PortRange(1, 2), PortRange(1, 2)}) == 1


def test_values_of_different_content_or_kind_differ() -> None:
    assert PortRange(1, 2) != PortRange(1, 3)
    assert Pending("a", "b") != ("a", "b")


def test_values_without_content_are_one_value() -> None:
    assert Lost() == Lost()
    assert len({Lost(), Lost()}) == 1


def test_a_value_never_changes() -> None:
    with pytest.raises(AttributeError, match="a PortRange never changes"):
        PortRange(1, 2).last = 3  # type: ignore[misc]  # that it is refused is the point


def test_fields_that_are_not_given_have_their_default() -> None:
    assert Live(forward(), 4) == Live(forward(), handle=4, packets=0, octets=0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param(("prerouting", 4), {}, id="too little"),
        pytest.param(("prerouting", 4, "text", "a", "b", "c", "more"), {}, id="too much"),
        pytest.param(("prerouting", 4), {"texts": "text"}, id="an unknown name"),
        pytest.param(("prerouting", 4, "text"), {"text": "again"}, id="a field twice"),
    ],
)
def test_a_value_takes_exactly_its_fields(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Foreign takes"):
        Foreign(*given, **named)


def test_replacing_a_field_leaves_the_others_and_the_original() -> None:
    before = forward("tcp 22")
    after = replace(before, owner="another")
    assert (after.owner, after.ports, before.owner) == ("another", before.ports, forward().owner)


def test_a_replacement_keeps_what_always_holds() -> None:
    with pytest.raises(ValueError, match="not a port range"):
        replace(PortRange(5, 9), last=4)


def test_values_sort_by_their_fields_in_turn() -> None:
    assert sorted([PortRange(2, 3), PortRange(1, 9), PortRange(1, 5)]) == [
        PortRange(1, 5),
        PortRange(1, 9),
        PortRange(2, 3),
    ]


def test_values_of_different_kinds_have_no_order() -> None:
    with pytest.raises(TypeError):
        assert PortRange(1, 2) < (1, 2)  # type: ignore[operator]  # that it is refused is the point


def test_a_value_shows_its_fields() -> None:
    assert repr(Pending("a", "b")) == "Pending(owner='a', reason='b', partly=False)"


def test_copies_and_pickles_are_equal_to_the_original() -> None:
    rule: Rule = forward()
    assert copy.deepcopy(rule) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301 - our own bytes
