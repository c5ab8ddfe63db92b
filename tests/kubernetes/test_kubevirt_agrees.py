"""KubeVirt's own admitter judges the same machines as `validate`. Where the two differ, the reason
is in the table of differences; any other is a bug of ours."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rules.manifests import read
from rules.manifests.networks import BINDINGS, MODELS
from rules.problems import Problem
from rules.values import Value
from tests.kubernetes.assets import Unavailable, find_admitter

Json = Any
Judge = Callable[[Json], list[str]]
MASQUERADE: Json = {"masquerade": {}}
BRIDGE: Json = {"bridge": {}}
POD: Json = {"pod": {}}
MULTUS: Json = {"multus": {"networkName": "net"}}

RANGE: Json = {"start": 1000, "end": 8000, "protocol": "TCP"}
VALIDATE, KUBEVIRT = "validate", "KubeVirt"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """What KubeVirt says to a specification, each with the field it is about."""
    try:
        program = find_admitter()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as on:
        assert on.stdin
        assert on.stdout
        asked, told = on.stdin, on.stdout

        def judged(spec: Json) -> list[str]:
            asked.write(json.dumps(spec) + "\n")
            asked.flush()
            return [
                f"{one['message']} at {one.get('field')}" for one in json.loads(told.readline())
            ]

        yield judged
        asked.close()


def machine(spec: Json) -> Json:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "web"},
        "spec": spec,
    }


def attached(*pairs: tuple[Json, Json]) -> Json:
    """A specification with these interfaces, each on its network."""
    names = [f"net{n}" for n, _ in enumerate(pairs)]
    return {
        "domain": {
            "devices": {
                "interfaces": [
                    {"name": name, **one} for name, (one, _) in zip(names, pairs, strict=True)
                ]
            }
        },
        "networks": [{"name": name, **net} for name, (_, net) in zip(names, pairs, strict=True)],
    }


def pod(**keys: Json) -> Json:
    """A masquerade interface on the pod network, with these keys."""
    return attached((MASQUERADE | keys, POD))


def other(**keys: Json) -> Json:
    """The same, and a bridge on another network that has them."""
    return attached((MASQUERADE, POD), (BRIDGE | keys, MULTUS))


class Difference(Value, kw_only=True):
    """A machine that one of the two refuses and the other takes, and why that stays so. The
    documents are those of docs/documents.md."""

    refused_by: str
    spec: Json
    why: str


DIFFERENCES = {
    "a range without protocol": Difference(
        refused_by=KUBEVIRT,
        spec=pod(portRanges=[{"start": 1, "end": 2}]),
        why="VEP 168 has the protocol of a range optional, TCP by default",
    ),
    "a range with an empty protocol": Difference(
        refused_by=KUBEVIRT,
        spec=pod(portRanges=[RANGE | {"protocol": ""}]),
        why="an empty text is no value in the API, and so the same",
    ),
    "eleven ranges": Difference(
        refused_by=KUBEVIRT,
        spec=pod(portRanges=[RANGE | {"start": n, "end": n} for n in range(1, 12)]),
        why="many ranges are one map here, and cost no rule each",
    ),
    "ranges beside an empty list of ports": Difference(
        refused_by=KUBEVIRT,
        spec=pod(portRanges=[RANGE], ports=[]),
        why="an empty list declares nothing",
    ),
    "an empty list of ranges on a bridge": Difference(
        refused_by=KUBEVIRT,
        spec=attached((BRIDGE | {"portRanges": []}, POD)),
        why="an empty list declares nothing",
    ),
    "slirp": Difference(
        refused_by=KUBEVIRT,
        spec=attached(({"slirp": {}}, POD)),
        why="the document about interfaces has it: no rule, and the reason",
    ),
    "a resource network": Difference(
        refused_by=KUBEVIRT,
        spec=attached((BRIDGE, {"resource": {"resourceName": "a/b"}})),
        why="the document about interfaces has it: no rule, and the reason",
    ),
    "options of DHCP": Difference(
        refused_by=KUBEVIRT,
        spec=pod(dhcpOptions={"ntpServers": ["x"]}),
        why="what the guest is told of its network is KubeVirt's alone",
    ),
    "a claim without names": Difference(
        refused_by=KUBEVIRT,
        spec=attached((BRIDGE, {"resourceClaim": {}})),
        why="what a claim is made of is KubeVirt's alone",
    ),
    "a port with an end below it": Difference(
        refused_by=VALIDATE,
        spec=pod(ports=[{"port": 80, "end": 79}]),
        why="end is the alternative of VEP 168, which KubeVirt does not have",
    ),
    "a misspelt list": Difference(
        refused_by=VALIDATE,
        spec=pod(portRange=[RANGE]),
        why="the API drops what it does not know, and without the list every port is open",
    ),
    "a bad port on another network": Difference(
        refused_by=VALIDATE,
        spec=other(ports=[{"port": 70000}]),
        why="KubeVirt looks at no ports there; the document has 1 to 65535 for every interface",
    ),
    "both lists on another network": Difference(
        refused_by=VALIDATE,
        spec=other(ports=[{"port": 80}], portRanges=[RANGE]),
        why="KubeVirt looks at no ports there; VEP 168 has the two exclude each other everywhere",
    ),
    "a port name on two interfaces": Difference(
        refused_by=VALIDATE,
        spec=attached(
            (MASQUERADE | {"ports": [{"name": "a", "port": 1}]}, POD),
            (BRIDGE | {"ports": [{"name": "a", "port": 1}]}, MULTUS),
        ),
        why="VEP 168 has names unique within the pod",
    ),
    "a MAC address with dots": Difference(
        refused_by=VALIDATE,
        spec=pod(macAddress="dead.0000.beaf"),
        why="the document about interfaces has the two other notations",
    ),
    "a name of 64 letters": Difference(
        refused_by=VALIDATE,
        spec={
            "domain": {"devices": {"interfaces": [{"name": "x" * 64, "masquerade": {}}]}},
            "networks": [{"name": "x" * 64, "pod": {}}],
        },
        why="it is in the comments of rules and the labels of metrics, where space is limited",
    ),
    "a network that is too small": Difference(
        refused_by=VALIDATE,
        spec=attached((MASQUERADE, {"pod": {"vmNetworkCIDR": "10.0.0.0/31"}})),
        why="KubeVirt finds out when the machine starts, and then it has no network",
    ),
}
PORT_CODES = (
    *("bad-port-name", "bad-protocol", "duplicate-port-name", "end-before-start", "missing"),
    "not-an-integer",
    *("overlap", "port-out-of-range", "ports-and-ranges"),
)

END_CODES = ("end-before-start", "name-on-range", "overlap", "ranges-need-masquerade")


def interface_of(spec: Json, path: Iterable[object]) -> tuple[Json, Json]:
    """The interface that a path leads to, and its network."""
    interfaces = spec["domain"]["devices"]["interfaces"]
    index = next((part for part in path if isinstance(part, int)), 0)
    one = interfaces[index]
    return one, next((net for net in spec["networks"] if net["name"] == one["name"]), {})


def is_ours_alone(spec: Json, problem: Problem) -> bool:
    """Whether KubeVirt is known to take what `validate` has a problem with."""
    interface, network = interface_of(spec, problem.path)
    ended = any("end" in port for port in interface.get("ports") or [])
    elsewhere, in_a_list = "pod" not in network, {"ports", "portRanges"} & set(problem.path)
    named_twice = problem.code == "duplicate-port-name" and len(spec["networks"]) > 1
    return bool(
        problem.code in ("unknown-key", "bad-cidr")
        or named_twice
        or (problem.code in PORT_CODES and in_a_list and elsewhere)
        or (ended and (problem.code in END_CODES or problem.path[-1] == "end"))
        or (problem.code == "bad-mac" and "." in interface["macAddress"])
    )


def is_theirs_alone(spec: Json, cause: str) -> bool:
    """Whether `validate` is known to take what KubeVirt refuses with these words."""
    interface, _ = interface_of(spec, [int(n) for n in re.findall(r"interfaces\[(\d+)\]", cause)])
    if "Cannot define both" in cause:
        return not (interface["ports"] and interface["portRanges"])
    if "only supported on masquerade" in cause:
        return not interface["portRanges"]
    if "must have exactly one binding" in cause:
        return bool(interface.keys() & BINDINGS.keys() == {"slirp"})
    if "should have a network type" in cause:
        return any("resource" in net for net in spec["networks"])
    known = ("Slirp interface", "No more than 10", "resourceClaim", "claimName", "DRA")
    return any(words in cause for words in known)


def in_their_terms(spec: Json) -> Json:
    """The same with the protocols that KubeVirt wants to be there."""
    made = copy.deepcopy(spec)
    for interface in made["domain"]["devices"]["interfaces"]:
        for one in interface.get("portRanges") or []:
            one["protocol"] = one.get("protocol") or "TCP"
    return made


def check(judge: Judge, spec: Json) -> None:
    """Both take it, or both refuse it, but for what is known."""
    theirs, ours = judge(in_their_terms(spec)), read(machine(spec)).problems
    if theirs and not ours:
        assert [one for one in theirs if not is_theirs_alone(spec, one)] == []
    if ours and not theirs:
        assert [str(one) for one in ours if not is_ours_alone(spec, one)] == []


# ------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES)
def test_an_accepted_difference_is_still_one(judge: Judge, difference: Difference) -> None:
    problems = read(machine(difference.spec)).problems
    assert bool(judge(difference.spec)) == (difference.refused_by == KUBEVIRT)
    assert bool(problems) == (difference.refused_by == VALIDATE), list(map(str, problems))


TEXTS = ("", None, "up", "down", "absent", "Absent", "x")
SAME = {
    "nothing": {"domain": {"devices": {}}},
    "a port": pod(ports=[{"port": 22}]),
    "an empty name": pod(ports=[{"port": 22, "name": ""}, {"port": 23, "name": ""}]),
    "no name": pod(ports=[{"port": 22, "name": None}]),
    "an empty protocol": pod(ports=[{"port": 22, "protocol": ""}]),
    "no protocol": pod(ports=[{"port": 22, "protocol": None}]),
    "half a port": pod(ports=[{"port": 22.5}]),
    "a port with a fraction": pod(ports=[{"port": 80.0}]),
    "a port in quotes": pod(ports=[{"port": "80"}]),
    "a range": pod(portRanges=[RANGE]),
    "ten ranges": pod(portRanges=[RANGE | {"start": n, "end": n} for n in range(1, 11)]),
    "ranges on a bridge": attached((BRIDGE | {"portRanges": [RANGE]}, POD)),
    "ranges on another network": other(portRanges=[RANGE]),
    "masquerade on another network": attached((MASQUERADE, MULTUS)),
    "passt on another network": attached(({"passtBinding": {}}, MULTUS)),
    "a claimed device": {
        **attached(({"sriov": {}}, {"resourceClaim": {"claimName": "a", "requestName": "b"}})),
        "resourceClaims": [{"name": "a"}],
    },
    "two pod networks": attached((MASQUERADE, POD), (BRIDGE, POD)),
    "two default networks": attached(
        (MASQUERADE, POD), (BRIDGE, {"multus": {"networkName": "a", "default": True}})
    ),
    "another network without a name": attached((BRIDGE, {"multus": {"networkName": ""}})),
    "no binding": attached(({}, POD)),
    "two bindings": attached((MASQUERADE | BRIDGE, POD)),
    "no network type": attached((MASQUERADE, {})),
    "two network types": attached((BRIDGE, POD | MULTUS)),
    **{
        f"{kind} on {network}": attached(({kind: {}}, net))
        for kind in ("masquerade", "bridge", "sriov", "macvtap", "passt", "binding", "passtBinding")
        for network, net in (("the pod network", POD), ("multus", MULTUS))
    },
    **{
        f"{key} {value!r} of {kind}": attached(({kind: {}, key: value}, net))
        for kind, net in (
            ("masquerade", POD),
            ("bridge", POD),
            ("bridge", MULTUS),
            ("sriov", MULTUS),
        )
        for key, values in (
            ("state", TEXTS),
            ("model", (*MODELS, "", None, "x")),
            (
                "macAddress",
                ("", None, "02:00:00:00:00:00", "de:ad:00:00:be:af", "DE-AD-00-00-BE-AF"),
            ),
            ("macAddress", ("x", "de:ad:00:00:be", "de:ad:00:00:be:af:01:02", "de:ad-00:00:be:af")),
            ("pciAddress", ("", None, "0000:81:01.0", "abCD:EF:0a.7", "0000:81:01.8", "81:01.0")),
            ("pciAddress", ("x", "0000:81:01:0", "0000.81.01.0", "0000:81:01.0\n", "00000:1:01.0")),
        )
        for value in values
    },
}


@pytest.mark.parametrize("spec", SAME.values(), ids=SAME)
def test_validate_takes_what_kubevirt_takes(judge: Judge, spec: Json) -> None:
    theirs, ours = judge(spec), read(machine(spec)).problems
    assert bool(theirs) == bool(ours), (theirs, list(map(str, ours)))


# ----------------------------------------------------------------------------------- any machine

NUMBERS = st.one_of(st.integers(1, 9), st.sampled_from((0, -1, 1, 65535, 65536, 2**31, None)))
TEXT = st.sampled_from(("TCP", "UDP", "TCP", "UDP", "", "tcp", "SCTP", " TCP"))
NAMES = st.one_of(
    st.sampled_from(("", "a", "b", "http", "A", "1", "a--b", "-a", "a-", "x" * 15, "x" * 16)),
    st.from_regex(r"[a-z0-9A-Z-]{0,16}", fullmatch=True),
)
PORTS = st.fixed_dictionaries(
    {"port": NUMBERS}, optional={"protocol": TEXT, "name": NAMES, "end": st.integers(1, 9)}
)
RANGES = st.fixed_dictionaries({"start": NUMBERS, "end": NUMBERS}, optional={"protocol": TEXT})
BINDING = st.sampled_from(
    (*[MASQUERADE] * 4, *({kind: {}} for kind in BINDINGS), {}, MASQUERADE | BRIDGE)
)
NETWORK = st.sampled_from(
    (
        *[POD] * 3,
        *(MULTUS, {"multus": {"networkName": "b", "default": True}}, {"multus": {}}),
        *({"resource": {"resourceName": "a/b"}}, {}, POD | MULTUS),
    )
)
HEX = st.sampled_from("0123456789abcdefABCDEF:-.g")
APPEARANCE = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from((*MODELS, "", "x")),
        "state": st.sampled_from(TEXTS),
        "macAddress": st.one_of(
            st.from_regex(r"([0-9a-f]{2}[:-]){5,7}[0-9A-Fg]{1,2}", fullmatch=True), st.text(HEX)
        ),
        "pciAddress": st.one_of(
            st.from_regex(r"[0-9a-fg]{3,5}:[0-9A-F]{1,3}:[0-9a-f]{2}[.:][0-8]", fullmatch=True),
            st.text(HEX),
        ),
    },
)


@st.composite
def machines(draw: st.DrawFn) -> Json:
    """Mostly right, with a few things that may not be."""
    pairs = []
    for _ in range(draw(st.integers(1, 2))):
        interface = dict(draw(BINDING))
        if draw(st.booleans()):
            interface |= draw(APPEARANCE)
        if draw(st.booleans()):
            interface["ports"] = draw(st.lists(PORTS, max_size=3))
        elif draw(st.booleans()):
            interface["portRanges"] = draw(st.lists(RANGES, max_size=3))
        pairs.append((interface, draw(NETWORK)))
    spec = attached(*pairs)
    if draw(st.integers(0, 9)) == 0:
        spec["networks"][0]["name"] = draw(st.sampled_from(("net1", "x", "", "a.b", "a_B-9")))
    return spec


@settings(
    max_examples=400,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=list(HealthCheck),
)
@given(machines())
def test_validate_takes_of_any_machine_what_kubevirt_takes(judge: Judge, spec: Json) -> None:
    check(judge, spec)
