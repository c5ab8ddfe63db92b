"""A table of policies and of what passes under each, with packets: every line is asked in IPv4 and
in IPv6 of the real daemon's rules. What is written here was judged by hand; the plain evaluator of
tests/policies.py, that shares nothing with the product, has to agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import yaml

from rules.model import Family, Protocol
from tests.datapath.policing import (
    FIRST,
    MACHINE,
    NEIGHBOURS,
    PODS,
    POLICY,
    SECOND,
    SERVED,
    SPACES,
    Town,
    address,
    answered,
    at,
    policed,
    policy,
    served,
    wired,
)
from tests.datapath.policy_table import TABLE
from tests.policies import Packet, Pod, World, allowing


class Case(NamedTuple):
    """A flow, and whether it passes."""

    way: str
    who: str
    protocol: Protocol
    port: int
    family: Family
    passes: bool


def cases(lines: str) -> list[Case]:
    found = re.findall(r"(in|out) +(\w+) +(\w+)/(\d+) +([+-]) ([+-])\n", lines)
    assert len(found) == lines.count("\n") - 1
    return [
        Case(way, who, Protocol(protocol), int(port), family, sign == "+")
        for way, who, protocol, port, *signs in found
        for family, sign in zip(Family, signs, strict=True)
    ]


ALL = {name: (specs, cases(lines)) for name, (specs, lines) in TABLE.items()}


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with wired() as lab, served(lab), policed(folder / "node", lab) as made:
        yield made


def test_without_policies_everything_passes(town: Town) -> None:
    """So what does not, in the table, is held back by policies."""
    asks = [
        town.asked(way, who, protocol, port, family)
        for way in ("in", "out")
        for who in (*NEIGHBOURS, MACHINE)
        for protocol, port in SERVED
        for family in Family
    ]
    assert answered(asks, asks) == set(asks)
    assert not town.fences()


@pytest.mark.parametrize("name", ALL)
def test_what_passes(town: Town, name: str) -> None:
    specs, wanted = ALL[name]
    text = "".join(policy(spec, f"p{number}") for number, spec in enumerate(specs))
    world, machines = known(town, text)
    for case in wanted:
        assert judged(town, world, machines, case) is case.passes, case
    town.save(text)
    asks = {town.asked(*case[:5]): case for case in wanted}
    heard = answered(list(asks), [ask for ask, case in asks.items() if case.passes])
    assert {asks[ask] for ask in heard} == {case for case in wanted if case.passes}


def test_a_policy_of_another_namespace_is_none_of_ours(town: Town) -> None:
    town.save(policy("podSelector: {}, policyTypes: [Ingress, Egress]", namespace="friends"))
    assert town.passes("in", "stranger", Protocol.TCP, 80)
    assert town.passes("out", "stranger", Protocol.TCP, 80)


def test_when_the_policy_goes_all_is_open_again(town: Town) -> None:
    town.save(policy("podSelector: {}, policyTypes: [Ingress, Egress]"))
    assert not town.passes("in", "stranger", Protocol.TCP, 80)
    town.node.remove(POLICY)
    town.settle()
    assert town.passes("in", "stranger", Protocol.TCP, 80)
    assert not town.fences()


def test_the_table_is_as_large_as_it_should_be() -> None:
    every = [case for _, wanted in ALL.values() for case in wanted]
    assert len(ALL) >= 45
    assert len(every) >= 400
    for family in Family:
        for protocol in (Protocol.TCP, Protocol.UDP):
            for way in ("in", "out"):
                some = [case for case in every if case[:1] == (way,) and case.family is family]
                signs = {case.passes for case in some if case.protocol is protocol}
                assert signs == {True, False}


# ---------------------------------------------------------------------------- the plain evaluator


def known(town: Town, text: str) -> tuple[World, dict[str, Pod]]:
    """Everything as the evaluator knows it, and the two machines."""
    one, two = town.lab.vms
    machines = {
        "one": machine("app: phone, tier: back", [at(one, family) for family in Family], FIRST),
        MACHINE: machine("role: client", [at(two, family) for family in Family], SECOND),
    }
    pods = [
        Pod(
            namespace,
            labels(text),
            [address(name, family) for family in Family],
            [named(f"{{{ports}}}".replace("containerPort", "port"))],
        )
        for name, (namespace, text, ports) in PODS.items()
    ]
    policies = [one for one in yaml.safe_load_all(text) if one]
    spaces = {name: labels(text) for name, text in SPACES.items()}
    return World(policies, [*machines.values(), *pods], spaces), machines


def machine(text: str, addresses: list[str], ports: tuple[str, ...]) -> Pod:
    return Pod("default", labels(text), addresses, [named(f"{{{port}}}") for port in ports])


def labels(text: str) -> dict[str, str]:
    return dict(yaml.safe_load(f"{{{text}}}"))


def named(text: str) -> tuple[str, str, int]:
    port = yaml.safe_load(text)
    return port.get("name", ""), port.get("protocol", "TCP"), port["port"]


def judged(town: Town, world: World, machines: dict[str, Pod], case: Case) -> bool:
    """Whether both ends let it pass."""
    first = machines["one"]
    theirs = Pod("", {}, [address(case.who, case.family)]) if case.who != MACHINE else None
    other = theirs or machines[MACHINE]
    receiver, sender = (first, other) if case.way == "in" else (other, first)
    place = list(Family).index(case.family)
    mine, yours = (pod.ips[place if len(pod.ips) > 1 else 0] for pod in (sender, receiver))
    protocol = case.protocol.name
    ends = [
        (receiver, Packet("Ingress", mine, protocol, case.port)),
        (sender, Packet("Egress", yours, protocol, case.port)),
    ]
    verdicts = [allowing(world, pod, packet) for pod, packet in ends if pod is not theirs]
    return all(verdict is None or verdict for verdict in verdicts)
