"""What JSON text is read as, and what is left to the YAML reader."""

from __future__ import annotations

import json

import pytest

from agent.sources.json_text import lines, parse
from rules.problems import OddNumeral


def test_an_object_is_read_with_its_line() -> None:
    assert parse('\n\t{"a": [1, -2, 1.5, true, null, "x"]}\n') == (
        [({"a": [1, -2, 1.5, True, None, "x"]}, 2)],
        [],
    )


def test_tabs_and_escapes_are_fine() -> None:
    assert parse('{\t"a":\t"\\ud83d\\ude00 \\ud800 \\"\\\\"}') == (
        [({"a": '\N{GRINNING FACE} \ud800 "\\'}, 1)],
        [],
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "a: 1", '"text"', "5", "{a: 1}", "[1, 2", '{"a": 1}{"b": 2}', '{"a": 1,}'),
        *('{"a": NaN}', "[Infinity]", "[01]", "[0x10]", "[" * 100_000, '{"a": 1}\n---\nb: 2\n'),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_not_json_is_left_to_others(text: str) -> None:
    assert parse(text) is None


def test_a_text_of_too_many_values_is_left_to_the_reader_that_counts() -> None:
    assert parse("[" + "1," * 1_000_001 + "1]") is None


@pytest.mark.parametrize("digits", ["9" * 21, "-" + "9" * 20, "9" * 100_000], ids=len)
def test_a_number_beyond_64_bits_is_kept_as_it_is_written(digits: str) -> None:
    parsed = parse(f"[{digits}]")
    assert parsed
    [(document, _)], _ = parsed
    assert document == [digits]
    assert isinstance(document, list)
    assert isinstance(document[0], OddNumeral)


def test_a_key_written_twice_is_a_problem_at_its_second_line() -> None:
    parsed = parse('{"a": {"b": 1},\n "c": [{"b": 1,\n "b": {"b": 2}}]}')
    assert parsed
    assert [(problem.code, problem.field, problem.line) for problem in parsed[1]] == [
        ("json-duplicate-key", "c[0].b", 3)
    ]


def test_every_key_and_item_knows_its_line() -> None:
    text = '\n{"a": {},\n "b\\n": [1,\n  {"c": "]}"},\n [], [[2]]],\n"d": 3}'
    assert lines(text) == [
        {
            (): 2,
            ("a",): 2,
            ("b\n",): 3,
            ("b\n", 0): 3,
            ("b\n", 1): 4,
            ("b\n", 1, "c"): 4,
            ("b\n", 2): 5,
            ("b\n", 3): 5,
            ("b\n", 3, 0): 5,
            ("b\n", 3, 0, 0): 5,
            ("d",): 6,
        }
    ]


def test_the_lines_of_a_large_text_are_found_in_no_time() -> None:
    text = json.dumps([{"a": list(range(10))}] * 5000, indent=1)
    assert lines(text)[0][(4999,)] == 4999 * 14 + 2
