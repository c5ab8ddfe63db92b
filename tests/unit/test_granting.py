"""Who has a pod that several instances name."""

from __future__ import annotations

import pytest

from agent.sources.granting import grant

A, B, C = (f"VirtualMachineInstance/ns/{name}" for name in "abc")


@pytest.mark.parametrize(
    ("named", "before", "holders", "refused", "contested"),
    [
        ({}, {}, {}, [], []),
        ({}, {"p": A}, {}, [], []),
        ({A: ["p", "q"], B: ["r"]}, {}, {"p": A, "q": A, "r": B}, [], []),
        ({A: ["p"], B: ["p"]}, {"p": A}, {"p": A}, [B], []),
        ({A: ["p"], B: ["p"], C: ["p"]}, {"p": B}, {"p": B}, [A, C], []),
        ({A: ["p"], B: ["p"]}, {}, {}, [A, B], ["pod:p"]),
        ({A: ["p"], B: ["p"]}, {"p": C}, {}, [A, B], ["pod:p"]),
        ({B: ["p"]}, {"p": A}, {"p": B}, [], []),
        ({A: ["p"], B: ["p", "q"]}, {"p": A}, {"p": A, "q": B}, [B], []),
    ],
)
def test_a_pod_stays_with_whoever_had_it(
    named: dict[str, list[str]],
    before: dict[str, str],
    holders: dict[str, str],
    refused: list[str],
    contested: list[str],
) -> None:
    granted = grant(named, before)
    assert granted.holders == holders
    assert [problem.file for problem in granted.problems] == refused
    assert list(granted.contested) == contested
    assert {problem.code for problem in granted.problems} <= {"pod-claimed-twice"}


def test_the_others_are_named() -> None:
    [problem, _] = grant({A: ["p"], B: ["p"]}, {}).problems
    assert str(problem).startswith(f"{A}: status.activePods.p: is a pod that {B} names as well. ")


def test_of_several_it_is_whose_the_launcher_serves() -> None:
    named = {"a": ["p"], "b": ["p"]}
    granted = grant(named, {"p": "a"}, lambda _: "b")
    assert granted.holders == {"p": "b"}
    assert [problem.file for problem in granted.problems] == ["a"]
    assert grant(named, {"p": "a"}, lambda _: "somebody else").holders == {"p": "a"}
    assert grant({"a": ["p"]}, {}, lambda _: "b").holders == {"p": "a"}  # refused where it is
