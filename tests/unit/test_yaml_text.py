"""What YAML text is read as, and what in it is refused."""

from __future__ import annotations

import math
import time

import pytest
import yaml

from agent.sources import yaml_text
from agent.sources.yaml_text import DEEPEST, lines, parse, resolve
from rules.problems import OddNumeral


@pytest.fixture(params=["c", "python"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds for the parser in C and for the one in Python."""
    name: str = request.param
    if name == "python":
        monkeypatch.setattr(yaml_text, "_LOADER", yaml.SafeLoader)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("this PyYAML was built without libyaml")
    return name


def value(text: str) -> object:
    documents, problems = parse(text)
    assert problems == []
    [(found, _)] = documents
    return found


def codes(text: str) -> list[tuple[str, str, int]]:
    return [(problem.code, problem.field, problem.line) for problem in parse(text)[1]]


SCALARS: list[tuple[str, object]] = [
    *(("", None), ("~", None), ("null", None), ("Null", None), ("NULL", None), ("nUll", "nUll")),
    *(("true", True), ("Yes", True), ("ON", True), ("off", False), ("No", False), ("y", "y")),
    *(("0", 0), ("80", 80), ("-5", -5), ("-0", 0), ("65536", 65536), ("9" * 400, 10**400 - 1)),
    *(("1.5", 1.5), ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), ("-1.5E-3", -0.0015)),
    *((".inf", math.inf), ("-.INF", -math.inf), ("1.2.3", "1.2.3"), ("10.0.2.2/24", "10.0.2.2/24")),
    *(("a", "a"), ("-", "-"), ("+", "+"), (".", "."), ("2026-11-16", "2026-11-16")),
    *(("1000-8000", "1000-8000"), ("80/tcp", "80/tcp"), ("0o18", "0o18"), ("0x", "0x")),
    *(("0" * 500 + ".5", "0" * 500 + ".5"), ("1,000", "1,000")),
]
ODD = ["0o17", "017", "08", "00", "1_000", "0x1F", "0X1f", "0b10", "+80", "+0", "-017", "1:30"]
ODD += ["190:20:30", "1:30.5", "1_0:30", "0_7", "9" * 401, "-" + "9" * 400, "9" * 5000]


@pytest.mark.parametrize(
    ("text", "expected"), SCALARS, ids=[repr(text)[:20] for text, _ in SCALARS]
)
def test_a_scalar_is_what_every_reader_takes_it_for(text: str, expected: object) -> None:
    found = resolve(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("text", ODD, ids=[text[:20] for text in ODD])
def test_a_number_that_readers_disagree_on_is_kept_as_it_is_written(text: str) -> None:
    found = resolve(text)
    assert isinstance(found, OddNumeral)
    assert found == text


def test_not_a_number_is_a_float() -> None:
    found = resolve(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_quotes_make_text() -> None:
    assert value("['80', \"no\", !!str 80, ! 80, '<<']") == ["80", "no", "80", "80", "<<"]


def test_text_in_blocks_is_text() -> None:
    assert value("a: |\n  80\nb: >-\n  x\n  y\n") == {"a": "80\n", "b": "x y"}


def test_collections_nest() -> None:
    text = "a: [1, {b: 2}]\nc:\n- d: 3\n- !!seq [4]\n- !!map {e: 5}\n"
    assert value(text) == {"a": [1, {"b": 2}], "c": [{"d": 3}, [4], {"e": 5}]}


def test_a_text_has_many_documents_each_with_its_line() -> None:
    documents, problems = parse("# nothing yet\na: 1\n---\n\nb: 2\n---\n---\nc\n")
    assert problems == []
    assert documents == [({"a": 1}, 2), ({"b": 2}, 5), (None, 7), ("c", 8)]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "\n\n"])
def test_no_text_is_no_document(text: str) -> None:
    assert parse(text) == ([], [])


# --------------------------------------------------------------------- anchors, aliases, merges


def test_an_alias_is_the_value_of_its_anchor() -> None:
    assert value("a: &x [1]\nb: *x\n? &k key\n: 3\nc: *k") == {
        "a": [1],
        "b": [1],
        "key": 3,
        "c": "key",
    }


def test_an_alias_can_be_a_key() -> None:
    assert value("a: &x y\n*x : 2\n") == {"a": "y", "y": 2}


def test_a_merge_fills_in_what_is_not_written() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: *a, x: 3}\nd: {w: 0, <<: [*b, *a]}\n"
    found = value(text)
    assert isinstance(found, dict)
    assert found["c"] == {"x": 3, "y": 1}
    assert found["d"] == {"w": 0, "x": 1, "y": 2, "z": 2}


@pytest.mark.parametrize("merge", ["5", "[{a: 1}, 5]", "null"])
def test_only_mappings_are_merged(merge: str) -> None:
    assert codes(f"a:\n  <<: {merge}\n") == [("yaml-merge", "a['<<']", 2)]


def test_an_alias_without_an_anchor_is_a_problem() -> None:
    assert codes("a: 1\nb: *x\n") == [("yaml-alias", "b", 2)]


def test_anchors_end_with_their_document() -> None:
    assert codes("a: &x 1\n---\nb: *x\n") == [("yaml-alias", "b", 3)]


def test_an_anchor_cannot_hold_itself() -> None:
    assert codes("a: &x\n  b: [*x]\n") == [("yaml-alias", "a.b[0]", 2)]


def test_a_billion_laughs_are_not_laughed() -> None:
    laughs = "a0: &a0 [lol]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    started = time.process_time()
    [(code, field, _)] = codes(laughs)
    assert (code, field) == ("yaml-too-large", "")
    assert time.process_time() - started < 1


def test_the_number_of_values_is_bounded() -> None:
    documents, problems = parse("[1, 2, 3]\n---\n[1, 2, 3]\n", most=7)
    assert documents == [([1, 2, 3], 1)]
    assert [(problem.code, problem.line) for problem in problems] == [("yaml-too-large", 3)]


def test_merges_of_many_mappings_take_no_time() -> None:
    anchors = "".join(f"k{i}: &k{i} {{v{i}: {i}}}\n" for i in range(3000))
    text = f"{anchors}all:\n  <<: [{', '.join(f'*k{i}' for i in range(3000))}]\n"
    found = value(text)
    assert isinstance(found, dict)
    assert len(found["all"]) == 3000


# ---------------------------------------------------------------------------- what is refused


def test_a_key_written_twice_is_a_problem_and_the_first_stays() -> None:
    documents, problems = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert documents == [({"a": {"b": 1, "c": 2}}, 1)]
    assert [(one.code, one.field, one.line) for one in problems] == [
        ("yaml-duplicate-key", "a.b", 4)
    ]


@pytest.mark.parametrize(
    ("key", "field"),
    [("5", "a[5]"), ("yes", "a.yes"), ("~", "a['~']"), ("0x10", "a.0x10"), ("1.5", "a['1.5']")],
)
def test_a_key_is_a_string(key: str, field: str) -> None:
    field = field.replace("a[5]", "a.5")
    assert codes(f"a:\n  {key}: 1\n") == [("yaml-key", field, 2)]


@pytest.mark.parametrize("key", ["[1, 2]", "{a: 1}"])
def test_a_key_is_no_collection(key: str) -> None:
    assert codes(f"? {key}\n: 1\n") == [("yaml-key", "['?']", 1)]


@pytest.mark.parametrize(
    "tagged",
    [
        *(
            "!!int 80",
            "!!float 1",
            "!!bool x",
            "!!null x",
            "!!binary aGk=",
            "!!timestamp 2001-01-01",
        ),
        *("!mine x", "!!python/object/apply:os.system [id]", "!!python/name:os.system x"),
        *("!!set {a}", "!!omap [a: 1]", "!!str {a: 1}", "!!map [a]", "!!seq x", "!!str [a]"),
    ],
)
def test_a_tag_constructs_nothing(tagged: str) -> None:
    assert ("yaml-tag", "a", 1) in codes(f"a: {tagged}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\n", 2),
        ("a: 1\n b: 2\n", 2),
        ("a: b: c\n", 1),
        ("\ta: 1\n", 1),
        ("a: 'x\n", 2),
        ("a: 1\n%b\n", 2),
        ("a: 1\nb: \x01\n", 2),
        ("a: 1\n\nb: \ud800\n", 3),
        ("a: !x!y z\n", 1),
        ("@", 1),
    ],
)
def test_what_is_not_yaml_is_a_problem_with_its_line(text: str, line: int) -> None:
    [(code, field, found)] = codes(text)
    assert (code, field) == ("yaml-syntax", "")
    assert abs(found - line) <= 1  # the two parsers notice an unclosed bracket in different lines


def test_documents_before_a_mistake_are_kept() -> None:
    documents, problems = parse("a: 1\n---\nb: [\n")
    assert documents == [({"a": 1}, 1)]
    assert [problem.code for problem in problems] == ["yaml-syntax"]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "{? ", "[{"])
def test_a_text_that_nests_without_end_is_refused_at_once(opening: str) -> None:
    started = time.process_time()
    [(code, field, _)] = codes(opening * 100_000)
    assert (code, field) == ("yaml-too-deep", "")
    assert time.process_time() - started < 5


def test_a_text_may_nest_as_deep_as_any_manifest_does() -> None:
    assert value("[" * DEEPEST + "]" * DEEPEST)


# -------------------------------------------------------------------------------------- lines


def test_every_key_and_item_knows_its_line() -> None:
    text = "a:\n  b:\n  - c: 1\n    d: 2\n  - 3\n---\n[\n{e: 1,\nf: 2}]\n"
    first, second = lines(text)
    assert first == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 3,
        ("a", "b", 0, "c"): 3,
        ("a", "b", 0, "d"): 4,
        ("a", "b", 1): 5,
    }
    assert second == {(): 7, (0,): 8, (0, "e"): 8, (0, "f"): 9}


def test_the_first_of_two_equal_keys_has_the_line() -> None:
    assert lines("a: 1\na: 2\n") == [{(): 1, ("a",): 1}]
