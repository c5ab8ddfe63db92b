"""Laws of the manifest reader: it answers everything, and claims exactly what is declared."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources import json_text, yaml_text
from agent.sources.files import load
from rules.manifests import CODES, Reading, read
from rules.ports import HIGHEST
from rules.problems import OddNumeral

# ------------------------------------------------------------------------------- plain values

ODD_NUMERALS = st.sampled_from(["0x10", "017", "1_000", "+80", "1:30"]).map(OddNumeral)
WORDS = st.sampled_from(
    [
        *("kind", "List", "items", "VM", "VirtualMachine", "VirtualMachineInstance", "metadata"),
        *("name", "namespace", "annotations", "spec", "template", "domain", "devices"),
        *("interfaces", "networks", "masquerade", "bridge", "pod", "multus", "resource", "ports"),
        *("portRanges", "port", "start", "end", "protocol", "TCP", "portranger.io/guest"),
        *("portranger.io/port-ranges", "portrange.alpha.kubernetes.io/port-end-a", "1-5,7/udp"),
        *("vmNetworkCIDR", "10.0.2.0/24", "apiVersion", "kubevirt.io/v1", "macAddress", "model"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 65536)
    | st.just(10**80)
    | st.floats()
    | st.text(max_size=8)
    | ODD_NUMERALS
    | WORDS
)
KEYS = WORDS | st.text(max_size=5) | st.integers() | st.none() | st.booleans()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=30,
)


def check(reading: Reading) -> None:
    """What holds for every reading, whatever was read."""
    for problem in reading.problems:
        assert problem.code in CODES
        assert problem.fix.endswith(".")
        assert str(problem).isprintable()
    assert len(reading.places) == len(reading.machines)
    assert len(reading.machines) <= reading.count
    assert all(str(skipped) for skipped in reading.skipped)


@given(PLAIN)
def test_anything_plain_is_answered(document: object) -> None:
    check(read(document))


@given(st.dictionaries(KEYS, PLAIN), st.sampled_from(["VM", "VirtualMachine", "List"]))
def test_anything_plain_of_our_kinds_is_answered(document: dict[Any, object], kind: str) -> None:
    check(read({**document, "kind": kind}))


# ---------------------------------------------------------------------------- valid manifests


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges in any order, none of which share a port; some touch."""
    most = 2 * draw(st.integers(1, 8))
    ports = st.integers(1, HIGHEST)
    edges = sorted(draw(st.lists(ports, min_size=2, max_size=most, unique=True)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    return draw(st.permutations(pairs))


PER_PROTOCOL = st.fixed_dictionaries({"TCP": ranges(), "UDP": ranges()})
SPELLINGS = st.sampled_from(["portRanges", "ports", "annotation"])


def manifest(declared: dict[str, list[tuple[int, int]]], spelling: str) -> dict[str, Any]:
    """A machine that declares these ranges, spelt so."""
    flat = [(name, *pair) for name, pairs in declared.items() for pair in pairs]
    interface: dict[str, Any] = {"name": "red", "masquerade": {}}
    annotations = {}
    if spelling == "portRanges":
        interface[spelling] = [{"protocol": p, "start": a, "end": b} for p, a, b in flat]
    elif spelling == "ports":
        interface[spelling] = [{"protocol": p, "port": a, "end": b} for p, a, b in flat]
    else:
        text = ", ".join(f"{a}-{b}/{p.lower()}" for p, a, b in flat)
        annotations["portranger.io/port-ranges"] = text
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {
            "template": {
                "metadata": {"annotations": annotations},
                "spec": {
                    "domain": {"devices": {"interfaces": [interface]}},
                    "networks": [{"name": "red", "pod": {"vmNetworkCIDR": "10.9.0.0/24"}}],
                },
            }
        },
    }


def claimed(reading: Reading) -> dict[str, list[tuple[int, int]]]:
    """The ends of everything that is claimed, by protocol."""
    [machine] = reading.machines
    assert machine.masquerade
    ends: dict[str, list[tuple[int, int]]] = {}
    for claim in machine.masquerade.claims or ():
        ends.setdefault(claim.protocol.name, []).append((claim.ports.first, claim.ports.last))
    return ends


def single(pairs: list[tuple[int, int]]) -> set[int]:
    """Every single port."""
    none: set[int] = set()
    return none.union(*(range(first, last + 1) for first, last in pairs))


@settings(deadline=None)  # port by port, up to 131070 of them
@given(PER_PROTOCOL, SPELLINGS)
def test_exactly_the_declared_ports_are_claimed(
    declared: dict[str, list[tuple[int, int]]], spelling: str
) -> None:
    reading = read(manifest(declared, spelling))
    assert reading.problems == ()
    claims = claimed(reading)
    assert claims.keys() <= declared.keys()
    for name, pairs in declared.items():
        assert single(claims.get(name, [])) == single(pairs)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), max_size=8), SPELLINGS)
def test_overlaps_are_found_where_two_ranges_share_a_port(
    drawn: list[tuple[int, int]], spelling: str
) -> None:
    pairs = [(first, first + length + 1) for first, length in drawn]
    shared = any(
        one[0] <= other[1] and other[0] <= one[1]
        for index, one in enumerate(pairs)
        for other in pairs[:index]
    )
    reading = read(manifest({"TCP": pairs, "UDP": [(1, 2)]}, spelling))
    assert {problem.code for problem in reading.problems} == ({"overlap"} if shared else set())


# ------------------------------------------------------------------------------- mutilations


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a value."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


@st.composite
def mutilated(draw: st.DrawFn) -> Any:
    """A valid manifest to which one to three things were done."""
    document: Any = {"root": manifest(draw(PER_PROTOCOL), draw(SPELLINGS))}
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(document["root"], ("root",))))
        holder = document
        for step in way:
            holder = holder[step]
        change = draw(st.sampled_from(["remove", "replace", "rename", "double"]))
        if change == "replace" or last == "root":
            holder[last] = draw(PLAIN)
        elif change == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            holder[draw(KEYS)] = holder.pop(last)
    return document["root"]


@given(mutilated())
def test_a_mutilated_manifest_is_answered(document: object) -> None:
    check(read(document))


# --------------------------------------------------------------------------------------- text

YAML_PIECES = st.sampled_from(
    [
        *(
            "a",
            "kind: VM",
            ": ",
            "- ",
            "\n",
            "  ",
            "{",
            "}",
            "[",
            "]",
            ",",
            "&a ",
            "*a",
            "<<: ",
            "? ",
        ),
        *(
            "'",
            '"',
            "!!str ",
            "!x ",
            "|",
            ">",
            "---\n",
            "...\n",
            "#",
            "%",
            "0x1",
            "\t",
            "\\u",
            "~",
            ":",
        ),
    ]
)
TEXTS = st.text() | st.lists(YAML_PIECES | st.text(max_size=3)).map("".join)


@given(TEXTS)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_any_text_is_answered_by_the_yaml_reader(loader: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_text, "_LOADER", getattr(yaml, loader))
        documents, problems = yaml_text.parse(text)
        assert len(yaml_text.lines(text)) >= len(documents)
    for problem in problems:
        assert problem.line >= 1
        assert str(problem).isprintable()
    for document, line in documents:
        assert line >= 1
        check(read(document))


@given(TEXTS)
def test_any_text_is_answered_by_the_json_reader(text: str) -> None:
    json_text.parse(text)


@given(st.binary() | TEXTS.map(lambda text: text.encode(errors="replace")))
def test_any_bytes_are_answered(content: bytes) -> None:
    found = load(["-"], lambda: content)
    assert all(str(problem).isprintable() for problem in found.problems)
    assert not (found.problems and found.machines)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
).filter(lambda value: isinstance(value, dict | list))


@given(JSON_VALUES, st.sampled_from([None, 1]))
def test_json_is_read_as_it_was_written_and_every_place_has_a_line(
    value: object, indent: int | None
) -> None:
    text = json.dumps(value, indent=indent)
    if "Infinity" in text:
        return
    assert json_text.parse(text) == ([(value, 1)], [])
    assert set(json_text.lines(text)[0]) == set(places(value))


@given(mutilated())
def test_yaml_is_read_as_pyyaml_reads_it(document: Any) -> None:
    text = yaml.safe_dump(json.loads(json.dumps(document, default=str, skipkeys=True)))
    [(value, _)], problems = yaml_text.parse(text)
    if not problems:
        assert repr(value) == repr(yaml.safe_load(text))
        assert set(yaml_text.lines(text)[0]) == set(places(value))
