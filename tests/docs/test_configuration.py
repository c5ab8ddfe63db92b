"""portranger.toml(5) and the example say what the code does with the configuration."""

from __future__ import annotations

import re
import tomllib

import pytest

from agent.config import LONGEST_RESYNC, MOST_BYTES, Config, Kubernetes, NodePorts, Policy, read
from rules.values import Value
from tests.docs.mdoc import blocks, sections, unescaped
from tests.spaces import ROOT

PAGE = ROOT / "docs" / "portranger.toml.5"
EXAMPLE = ROOT / "examples" / "portranger.toml"
TABLES: dict[str, type[Value]] = {
    "Above all tables": Config,
    "[node_ports]": NodePorts,
    "[kubernetes]": Kubernetes,
    "[policy]": Policy,
}
TYPES = {str: "Text", int: "Number", bool: "True or false", list: "List of texts"}
ITEM = re.compile(r"^\.It Cm (.+)\n", re.MULTILINE)
SECTIONS = sections(PAGE.read_text(), "Sh")
GROUPS = sections(SECTIONS["KEYS"], "Ss")
EXAMPLES = blocks(SECTIONS["EXAMPLES"])


def described(group: str) -> dict[str, tuple[object, str]]:
    """Each key of a table in the page: its default, and the text on it."""
    parts = ITEM.split(GROUPS[group])[1:]
    found = {}
    for line, text in zip(parts[::2], parts[1::2], strict=True):
        [(key, value)] = tomllib.loads(unescaped(line)).items()
        found[key] = value, text
    return found


def keys(kind: type[Value]) -> list[str]:
    """The keys of a table that the configuration has, without those that are tables."""
    tables = {name.strip("[]") for name in TABLES}
    return [key for key in kind.__match_args__ if key not in tables]


def test_it_has_every_table() -> None:
    assert list(GROUPS) == list(TABLES)
    fields: tuple[str, ...] = Config.__match_args__
    nested = [one.strip("[]") for one in TABLES if one.startswith("[")]
    assert [key for key in fields if key in nested] == nested
    assert read("".join(f"{one}\n" for one in TABLES if one.startswith("[")), "a") == Config()


@pytest.mark.parametrize("group", TABLES)
def test_it_has_every_key_and_none_that_does_not_exist(group: str) -> None:
    assert list(described(group)) == keys(TABLES[group])


@pytest.mark.parametrize("group", TABLES)
def test_what_a_key_is_shown_with_is_its_default(group: str) -> None:
    text = "" if group == "Above all tables" else f"{group}\n"
    shown = "\n".join(unescaped(line) for line in ITEM.findall(GROUPS[group]))
    assert read(text + shown, "the page") == Config()
    written = tomllib.loads(EXAMPLE.read_text())
    table = written if not text else written[group.strip("[]")]
    assert {key: value for key, (value, _) in described(group).items()} == {
        key: table[key] for key in keys(TABLES[group])
    }


@pytest.mark.parametrize("group", TABLES)
def test_the_text_on_a_key_begins_with_its_type(group: str) -> None:
    for key, (value, text) in described(group).items():
        kind = bool if key == "enforce" else type(value)
        assert text.startswith(TYPES[kind]), key


@pytest.mark.parametrize(("key", "words"), [("source", 2), ("backend", 3)])
def test_the_words_that_a_key_takes_are_all_named(key: str, words: int) -> None:
    said = re.findall(r"^\.Ql (\w+)", described("Above all tables")[key][1], re.MULTILINE)
    taken = []
    for word in dict.fromkeys(said):
        assert getattr(read(f'{key} = "{word}"\n', "a"), key) == word
        taken.append(word)
    assert len(taken) == words


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"1 to {LONGEST_RESYNC}" in described("Above all tables")["resync_seconds"][1]
    assert f"at most {MOST_BYTES // 1024} KiB" in SECTIONS["DESCRIPTION"]


def test_there_are_examples_for_bare_metal_and_for_kubernetes() -> None:
    assert {read(text, "an example").source for text in EXAMPLES} == {"files", "kubernetes"}


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_configuration_that_differs_from_the_defaults(text: str) -> None:
    assert read(text, "an example") != Config()
