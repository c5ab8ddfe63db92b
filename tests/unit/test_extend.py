"""Beside KubeVirt's own chains, and beside what else has ports in the pod: which rules there are,
what becomes of a packet, and which flows a new guard cuts."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from rules.desired import STRICT, claimed, desire
from rules.flows import forgotten, unmade
from rules.manifests import read
from rules.model import (
    Chain,
    Claim,
    Desired,
    Family,
    Live,
    Machine,
    Observed,
    Protocol,
    Rule,
    Surroundings,
)
from rules.nft_script import script
from rules.plan import diff
from rules.ports import PortRange
from rules.stale import Due, Flow
from rules.trace import Packet, explained
from rules.values import replace
from rules.words import action, target
from tests.unit.samples import POD, claim, machine, trace

BESIDE = replace(POD, kubevirt=frozenset(Family))
GUEST = ip_address("10.0.2.2")
PROXY_PORT = "tcp 15006"


def proxied(*claims: str, reserved: tuple[str, ...] = (PROXY_PORT,)) -> Machine:
    made = machine(*claims)
    assert made.masquerade
    own = tuple(map(claim, reserved))
    return replace(made, masquerade=replace(made.masquerade, reserved=own, proxied=True))


def verdict(
    rules: frozenset[Rule], chain: Chain, protocol: Protocol, port: int, **where: object
) -> str:
    packet = Packet(family=Family.IP, protocol=protocol, port=port, **where)  # type: ignore[arg-type]
    rule = trace(rules, chain, packet)
    if rule is None:
        return "untouched"
    return "kept" if rule.guards else str(rule.to)


def entering(rules: frozenset[Rule], protocol: Protocol, port: int) -> str:
    return verdict(rules, Chain.PREROUTING, protocol, port, interface="eth0")


def inside(rules: frozenset[Rule], port: int, at: str) -> str:
    return verdict(rules, Chain.OUTPUT, Protocol.TCP, port, destination=ip_address(at))


# ----------------------------------------------------------------------------------- the guard


def test_what_is_not_declared_is_kept_from_their_chains() -> None:
    rules = desire([machine("tcp 1000-8000")], BESIDE).rules
    assert entering(rules, Protocol.TCP, 1000) == str(GUEST)
    assert entering(rules, Protocol.TCP, 22) == "kept"
    assert entering(rules, Protocol.UDP, 1000) == "kept"
    assert inside(rules, 1000, "127.0.0.1") == str(GUEST)
    assert inside(rules, 22, "127.0.0.1") == "kept"
    assert not [rule for rule in rules if rule.source == GUEST]  # theirs to masquerade


def test_beside_them_no_setting_is_made_but_that_what_is_closed_stays_so() -> None:
    desired = desire([machine("tcp 22")], BESIDE)
    assert desired.sysctls == {STRICT}
    assert any("KubeVirt's own chains are live" in note for note in desired.notes)


def test_where_nothing_is_declared_they_do_it_all() -> None:
    desired = desire([machine()], BESIDE)
    assert not desired.rules
    assert not desired.sysctls
    assert any("KubeVirt forwards all of them" in note for note in desired.notes)


def test_one_family_may_be_theirs_and_the_other_ours() -> None:
    rules = desire([machine("tcp 22")], replace(POD, kubevirt=frozenset([Family.IP6]))).rules
    assert {rule.family for rule in rules if rule.guards and rule.peer is None} == {Family.IP6}
    assert {rule.family for rule in rules if rule.source == GUEST} == {Family.IP}


def test_a_guard_is_said_in_words() -> None:
    rules = desire([machine("tcp 22")], BESIDE).rules
    guard = next(rule for rule in rules if rule.guards and rule.peer is None)
    assert (action(guard), target(guard)) == ("guard", "itself (guard)")
    (line, *_) = explained(list(rules), Protocol.TCP, 23, None)
    assert "the guard of VirtualMachine/default/vm/default keeps it from the guest" in line


def test_what_is_added_later_goes_before_the_guard() -> None:
    before = desire([machine("tcp 22")], BESIDE)
    live = tuple(Live(rule, place) for place, rule in enumerate(before.rules, 1))
    chains = frozenset(Chain)
    found = Observed(live=live, table=True, chains=chains, mapped={})
    text = script(diff("x", desire([machine("tcp 22", "tcp 80")], BESIDE), found))
    assert all(line.startswith("insert rule") for line in text.splitlines())
    first = script(diff("x", before, Observed(mapped={})))
    chain = [line for line in first.splitlines() if " prerouting " in line and "rule" in line]
    assert [("redirect" in line) for line in chain] == [False, False, True, True]


# ------------------------------------------------------------------------------------- flows


def flow(port: int, answerer: object = GUEST) -> Flow:
    return Flow(
        family=Family.IP,
        protocol=6,
        port=port,
        destination=ip_address("10.244.1.7"),
        answerer=answerer,  # type: ignore[arg-type]
    )


def held(found: tuple[Due, ...], port: int) -> bool:
    return any(one.holds(flow(port), set()) for one in found)


def test_a_new_guard_cuts_the_flows_that_they_made() -> None:
    plan = diff("x", desire([machine("tcp 22")], BESIDE), Observed(mapped={}))
    assert held(forgotten(plan), 8080)
    assert not held(forgotten(plan), 22)


def test_after_an_interruption_flows_are_cut_that_no_rule_stands_for() -> None:
    rules = desire([machine("tcp 22", "udp 53")], POD).rules
    assert held(unmade(rules), 8080)
    assert not held(unmade(rules), 22)
    shadow = replace(flow(53), protocol=17, answerer=ip_address("10.244.1.7"))
    assert any(one.holds(shadow, {ip_address("10.244.1.7")}) for one in unmade(rules))


# ------------------------------------------------------------------------- what is the pod's own


@pytest.mark.parametrize("around", [POD, BESIDE], ids=["own", "extend"])
def test_tcp_is_for_the_proxy_and_udp_for_the_guest(around: Surroundings) -> None:
    desired = desire([proxied("tcp 1-20000", "udp 1000-2000")], around)
    rules = desired.rules
    assert entering(rules, Protocol.TCP, 8080) == "untouched"
    assert entering(rules, Protocol.TCP, 22) == str(GUEST)
    assert entering(rules, Protocol.UDP, 1500) == str(GUEST)
    assert entering(rules, Protocol.UDP, 53) == ("kept" if around is BESIDE else "untouched")
    for address in ("127.0.0.1", "10.244.1.7"):
        assert inside(rules, 8080, address) == str(GUEST)
        assert inside(rules, 15006, address) == ("kept" if around is BESIDE else "untouched")
    senders = {str(r.source) for r in rules if r.chain is Chain.POSTROUTING and r.to is not None}
    assert senders == {"127.0.0.1", "127.0.0.6"}
    assert any("proxy of Istio" in note for note in desired.notes)
    assert any("tcp 15006 are the pod's own" in note for note in desired.notes)


def test_ssh_that_is_not_declared_stays_shut_beside_the_proxy() -> None:
    assert entering(desire([proxied("udp 53")], BESIDE).rules, Protocol.TCP, 22) == "kept"


def test_without_a_declaration_all_is_forwarded_but_the_pods_own() -> None:
    made = proxied()
    assert [str(one) for one in claimed(made, Protocol.TCP)] == ["1-15005", "15007-65535"]
    assert not claimed(replace(made, masquerade=None), Protocol.TCP)
    assert inside(desire([made], None).rules, 15006, "127.0.0.1") == "untouched"


def manifest(**more: object) -> dict[str, object]:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", **more.pop("metadata", {})},  # type: ignore[dict-item]
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
        },
        **more,
    }


def reserved(document: object) -> tuple[bool, set[Claim]]:
    (made,) = read(document).machines
    assert made.masquerade
    return made.masquerade.proxied, set(made.masquerade.reserved)


MIGRATION = Claim(Protocol.TCP, PortRange(49152, 49153))


def test_a_manifest_tells_what_else_is_in_the_pod() -> None:
    assert reserved(manifest()) == (False, set())
    assert reserved(manifest(status={"activePods": {"u": "n"}})) == (False, {MIGRATION})
    unix = {"activePods": {"u": "n"}, "migrationTransport": "Unix"}
    assert reserved(manifest(status=unix)) == (False, set())
    for where in ("annotations", "labels"):
        istio = manifest(metadata={where: {"sidecar.istio.io/inject": "true"}})
        is_proxied, ports = reserved(istio)
        assert is_proxied
        assert claim(PROXY_PORT) in ports
    off = {"annotations": {"sidecar.istio.io/inject": "false"}}
    assert reserved(manifest(metadata=off)) == (False, set())


def test_a_plan_that_takes_nothing_away_says_so() -> None:
    assert diff("x", desire([machine("tcp 22")], POD), Observed(mapped={})).only_adds
    live = tuple(Live(rule, 1) for rule in desire([machine("tcp 22")], POD).rules)
    assert not diff("x", Desired(), Observed(live=live, table=True, mapped={})).only_adds
