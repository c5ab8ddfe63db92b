"""Laws of conversion: whatever the spelling, the same ports lead to the same places; there and back
is where it began; and what stands in a text around the ports stays as it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.sources import yaml_text
from agent.sources.edited import edited
from agent.sources.written import block, json_of
from rules.convert import ANNOTATIONS, PORTS, RANGES, SPELLINGS, convert
from rules.manifests import Reading, read
from rules.manifests.ports import is_service_name
from rules.ports import HIGHEST, PortRange, coalesce

END = "portrange.alpha.kubernetes.io/port-end-"
Document = dict[str, Any]
Port = tuple[object, ...]

# ------------------------------------------------------------------------------------- documents

# Names that run into each other once they are numbered, and some of the greatest length.
CROWDED = ["a", "b", "a0", "a1", "a10", "a-0", "a-1", "tcp", "udp-a", "x99", "abcdefghijklmn"]
CROWDED += ["abcdefghijklmno", "abcdefghijklmnp", "a2", "a3", "a00", "b5", "b6", "b7"]
APART = ["sip", "rtp", "http", "ftp-data", "media", "signalling"]


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Ports and ranges, of which none of one protocol share a port, and many touch."""
    found: list[tuple[str, int, int]] = []
    for protocol in ("TCP", "UDP"):
        at = draw(st.sampled_from([1, 8, 95, 990]))
        for _ in range(draw(st.integers(0, 5))):
            length = draw(st.sampled_from([1, 1, 1, 2, 3, 12]))
            found.append((protocol, at, at + length - 1))
            at += length + draw(st.sampled_from([0, 0, 0, 1, 5]))
    return draw(st.permutations(found))


@st.composite
def services(draw: st.DrawFn, names: list[str]) -> Document:
    ports = []
    annotations = {"else": "x"} if draw(st.booleans()) else {}
    given = draw(st.permutations(names))
    shift, node = draw(st.sampled_from([None, 0, 1000])), draw(st.sampled_from([None, 30000]))
    for name, (protocol, first, last) in zip(given, draw(spans()), strict=False):
        port: Document = {"name": name, "port": first, "protocol": protocol}
        if shift is not None:
            port["targetPort"] = first + shift
        elif first == last and draw(st.booleans()):
            port["targetPort"] = "named"
        if node is not None:
            port["nodePort"] = first + node
        if last > first or (names is CROWDED and draw(st.integers(0, 9)) == 0):
            port["targetPort"] = port["targetPort"] if shift is not None else first
            annotations[END + name] = str(last)
        ports.append(dict(draw(st.permutations(list(port.items())))))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "annotations": annotations} if annotations else {"name": "s"},
        "spec": {"type": "NodePort", "ports": ports, "selector": {"app": "x"}},
    }


@st.composite
def pods(draw: st.DrawFn, names: list[str]) -> Document:
    containers: list[Document] = [{"name": "one", "ports": []}, {"name": "two", "ports": []}]
    annotations = {}
    given = draw(st.permutations(names))
    for name, (protocol, first, last) in zip(given, draw(spans()), strict=False):
        port: Document = {"containerPort": first, "protocol": protocol}
        if last > first or names is APART or draw(st.booleans()):
            port["name"] = name
        if draw(st.booleans()):
            port["hostPort"] = first + 20000
        if last > first:
            annotations[END + name] = str(last)
        draw(st.sampled_from(containers))["ports"].append(port)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": annotations} if annotations else {"name": "p"},
        "spec": {"initContainers": containers[1:], "containers": containers[:1]},
    }


@st.composite
def machines(draw: st.DrawFn, names: list[str]) -> Document:
    interface: Document = {"name": "red", "masquerade": {}}
    annotations: Document = {}
    drawn = draw(spans())
    spelling = draw(st.sampled_from(["portRanges", "ports", "text"]))
    if names is APART or spelling == "ports":
        given = draw(st.permutations(names))
        interface["ports"] = []
        for name, (protocol, first, last) in zip(given, drawn, strict=False):
            port: Document = {"port": first, "protocol": protocol}
            if names is CROWDED and draw(st.booleans()):
                port |= {"end": last} if last > first or draw(st.booleans()) else {}
            else:
                port["name"] = name
                annotations |= {END + name: str(last)} if last > first else {}
            interface["ports"].append(port)
    elif spelling == "portRanges":
        interface["portRanges"] = [{"start": a, "end": b, "protocol": p} for p, a, b in drawn]
    elif drawn:
        text = ",".join(f"{a}-{b}/{p.lower()}" for p, a, b in drawn)
        annotations["portranger.io/port-ranges"] = text
    spec = {
        "domain": {"devices": {"interfaces": [interface]}},
        "networks": [{"name": "red", "pod": {}}],
    }
    metadata = {"annotations": annotations} if annotations else {}
    if draw(st.booleans()):
        kind, made = "VirtualMachineInstance", {"metadata": {"name": "m", **metadata}, "spec": spec}
    else:
        template = {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}
        kind, made = "VirtualMachine", {"metadata": {"name": "m"}, "spec": {"template": template}}
    return {"apiVersion": "kubevirt.io/v1", "kind": kind, **made}


CROWDS = services(CROWDED) | pods(CROWDED) | machines(CROWDED)
PLAIN = services(APART) | pods(APART) | machines(APART)
WAYS = st.sampled_from(SPELLINGS)


def claims(reading: Reading) -> set[Port]:
    """Where each single port leads, by whatever name."""
    assert [str(problem) for problem in reading.problems] == []
    found: set[Port] = set()
    for service in reading.services:
        for port in service.ports:
            for step in range(len(port.ports)):
                target = port.target if isinstance(port.target, str) else port.target.first + step
                node = port.node_ports and port.node_ports.first + step
                found.add((port.protocol, port.ports.first + step, target, node))
    for pod in reading.pods:
        for one in pod.ports:
            for step in range(len(one.ports)):
                host = one.host_ports and one.host_ports.first + step
                found.add((one.container, one.protocol, one.ports.first + step, host))
    for machine in reading.machines:
        assert machine.masquerade
        for claim in machine.masquerade.claims or ():
            for number in range(claim.ports.first, claim.ports.last + 1):
                found.add((claim.protocol, number))
    return found


def lists(document: Document) -> list[list[Document]]:
    """Every list of ports in a document."""
    spec = document["spec"]
    if document["kind"] == "Service":
        return [spec["ports"]]
    if document["kind"] == "Pod":
        return [one["ports"] for key in ("containers", "initContainers") for one in spec[key]]
    spec = spec.get("template", {"spec": spec})["spec"]
    return [one.get("ports", []) for one in spec["domain"]["devices"]["interfaces"]]


def names(document: Document) -> list[str]:
    return [port["name"] for ports in lists(document) for port in ports if "name" in port]


# ------------------------------------------------------------------------------------------- laws


@given(CROWDS, WAYS, WAYS)
def test_every_port_leads_where_it_led(document: Document, to: str, then: str) -> None:
    before = copy.deepcopy(document)
    once = convert(document, to)
    assert claims(read(once)) == claims(read(document))
    assert claims(read(convert(once, then))) == claims(read(document))
    assert document == before


@given(CROWDS, WAYS)
def test_what_is_converted_is_converted_for_good(document: Document, to: str) -> None:
    once = convert(document, to)
    assert json.dumps(convert(once, to)) == json.dumps(once)


@given(PLAIN)
def test_single_ports_and_back_is_where_it_began(document: Document) -> None:
    assert convert(convert(document, PORTS), ANNOTATIONS) == document


@given(CROWDS)
def test_single_ports_are_single_and_have_service_names_of_their_own(document: Document) -> None:
    made: Any = convert(document, PORTS)
    assert "port-end" not in str(made)
    assert "port-ranges" not in str(made)
    assert sum(map(len, lists(made))) == len(claims(read(document)))
    assert len(set(names(made))) == len(names(made))
    assert all(map(is_service_name, names(made)))


@given(CROWDS)
def test_annotations_and_back_lose_no_name_that_counting_can_make(document: Document) -> None:
    singles: Any = convert(document, PORTS)
    again: Any = convert(convert(singles, ANNOTATIONS), PORTS)
    assert sum(map(len, lists(again))) == sum(map(len, lists(singles)))
    assert len(set(names(again))) == len(names(again))
    uncounted = {name for name in names(singles) if not name[-1].isdigit()}
    assert uncounted <= set(names(again))


@given(CROWDS)
def test_there_are_never_more_items_than_before(document: Document) -> None:
    made: Any = convert(convert(document, PORTS), ANNOTATIONS)
    assert sum(map(len, lists(made))) <= sum(
        map(len, lists(convert(document, ANNOTATIONS)))  # type: ignore[arg-type]
    )


@given(machines(CROWDED))
def test_port_ranges_are_the_fewest(document: Document) -> None:
    made: Any = convert(document, RANGES)
    spec = made["spec"].get("template", made)["spec"]
    [interface] = spec["domain"]["devices"]["interfaces"]
    held: dict[str, list[PortRange]] = {}
    for protocol, number in claims(read(document)):
        held.setdefault(str(protocol), []).append(PortRange(number, number))  # type: ignore[arg-type]
    fewest = sum(len(coalesce(ports)) for ports in held.values())
    assert len(interface.get("portRanges", [])) == fewest
    assert "ports" not in interface or not fewest


@given(st.integers(1, HIGHEST), st.integers(1, 300), st.text("abc-9", min_size=1, max_size=20))
def test_any_name_that_kubernetes_takes_can_be_numbered(first: int, count: int, name: str) -> None:
    last = min(first + count, HIGHEST)
    document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"annotations": {END + name: str(last)}},
        "spec": {"ports": [{"name": name, "port": first}]},
    }
    assume(not read(document).problems)
    made: Any = convert(document, PORTS)
    assert len(set(names(made))) == last - first + 1
    assert last == first or all(map(is_service_name, names(made)))


# ------------------------------------------------------------------------------------------- text


def in_blocks(document: Document) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False)


def in_braces_at_last(document: Document) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=1000)


def in_braces(document: Document) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=True)


def ours(document: Document) -> str:
    return "".join(f"{line}\n" for line in block(document, 0))


WRITERS = [in_blocks, in_braces_at_last, in_braces, ours, json.dumps, lambda one: json_of(one, 2)]


@st.composite
def commented(draw: st.DrawFn, text: str) -> str:
    """The text with comments wherever YAML in blocks can have them."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(lines) - 1))
        if draw(st.booleans()):
            lines.insert(at, " " * draw(st.integers(0, 9)) + draw(st.sampled_from(["# over", ""])))
        elif lines[at] and "#" not in lines[at]:
            lines[at] += "  # beside"
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n...\n"]))


@given(CROWDS, WAYS, st.data())
@pytest.mark.parametrize(
    "written", WRITERS, ids=["blocks", "items", "braces", "ours", "json", "js"]
)
def test_an_edited_text_says_what_it_is_to_say(
    written: Callable[[Document], str], document: Document, to: str, data: st.DataObject
) -> None:
    text = written(document)
    if not text.startswith("{"):
        text = data.draw(commented(text))
        other = in_blocks({"kind": "Secret", "metadata": {"name": "x"}})
        text = f"# first\n---\n{other}---\n{text}"
        text = text if not data.draw(st.booleans()) else text.replace("\n", "\r\n")
    made = edited(text, lambda value: convert(value, to))
    documents, problems = yaml_text.parse(made)
    assert problems == []
    assert json.dumps(documents[-1][0]) == json.dumps(convert(document, to))
    assert edited(made, lambda value: convert(value, to)) == made


STRINGS = st.text(max_size=20) | st.sampled_from(
    [
        "yes",
        "5",
        "0x5",
        "a: b",
        "- a",
        "#",
        "a #b",
        " a",
        "a ",
        "~",
        "null",
        "1e3",
        "a\nb",
        "a\n b\n",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([0, 2]))
def test_values_are_read_as_they_are_written(value: object, dash: int) -> None:
    text = "".join(f"{line}\n" for line in block(value, 0, dash))
    [(read_again, _)], problems = yaml_text.parse(text)
    assert problems == []
    assert repr(read_again) == repr(value)


@given(VALUES, st.sampled_from([None, 0, 2]))
def test_json_is_read_as_it_is_written(value: object, indent: int | None) -> None:
    text = json_of(value, indent)
    assert repr(json.loads(text)) == repr(value)
    text.encode()
