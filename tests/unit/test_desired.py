"""Machines and what is around them become rules, settings, things to wait for, and conflicts."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from rules.conflicts import conflicts
from rules.desired import LABEL_BYTES, STRICT, Made, desire, label
from rules.model import (
    Chain,
    Desired,
    Family,
    Fence,
    Guest,
    Machine,
    Pending,
    Rule,
    Surroundings,
    Sysctl,
)
from rules.places import is_global
from rules.problems import Problem
from rules.values import replace
from tests.unit.samples import (
    BRIDGE,
    ETH0,
    LO,
    OWNER,
    POD,
    answerable,
    egress,
    forward,
    from_inside,
    link,
    machine,
    space,
)

IPV4_ONLY = space(LO, link("eth0", "10.244.1.7/24", "fe80::7/64"), BRIDGE)
IPV6_ONLY = space(LO, link("eth0", "fd00:10:244::7/64"), BRIDGE)
V4_FORWARDING = Sysctl("net.ipv4.ip_forward", "1")
V6_FORWARDING = Sysctl("net.ipv6.conf.all.forwarding", "1")


def localnet(name: str) -> Sysctl:
    return Sysctl(f"net.ipv4.conf.{name}.route_localnet", "1")


def entering(rules: frozenset[Rule]) -> set[Rule]:
    return {rule for rule in rules if rule.chain is Chain.PREROUTING}


def family(rules: frozenset[Rule], wanted: Family) -> set[Rule]:
    return {rule for rule in rules if rule.family is wanted}


# ------------------------------------------------------------------------------------ the rules


def test_one_range_is_five_rules_of_ipv4_and_two_of_ipv6() -> None:
    # Not five of each: there is no way back to ::1, so none leads from there.
    assert desire([machine("tcp 1000-8000")], POD).rules == {
        forward("tcp 1000-8000"),
        from_inside("tcp 1000-8000"),
        egress(),
        answerable(),
        shield(),
        forward("tcp 1000-8000", to="fd10:0:2::2"),
        egress("fd10:0:2::2"),
    }


def test_who_is_behind_the_guests_link_does_not_reach_loopback() -> None:
    """Neither beside KubeVirt's chains, which set route_localnet as well; but where KubeVirt does
    everything there is nothing of ours."""
    for around in (POD, replace(POD, kubevirt=frozenset(Family))):
        assert shield() in desire([machine("tcp 22")], around).rules
    assert not desire([machine()], replace(POD, kubevirt=frozenset(Family))).rules


def shield() -> Rule:
    return Rule(
        chain=Chain.RAW,
        family=Family.IP,
        owner=OWNER,
        interface="k6t-eth0",
        peer=ip_network("127.0.0.0/8"),
    )


def test_nothing_declared_forwards_everything() -> None:
    assert family(desire([machine()], POD).rules, Family.IP) == {
        forward(None),
        from_inside(None),
        egress(),
        answerable(),
        shield(),
    }


@pytest.mark.parametrize(
    ("declared", "forwarded"),
    [
        pytest.param(["tcp 80", "tcp 81"], ["tcp 80-81"], id="touching"),
        pytest.param(["tcp 80", "tcp 80"], ["tcp 80"], id="twice"),
        pytest.param(["tcp 80", "udp 81"], ["tcp 80", "udp 81"], id="protocols stay apart"),
        pytest.param(["udp 9", "tcp 80-90", "tcp 85-99"], ["udp 9", "tcp 80-99"], id="overlap"),
    ],
)
def test_a_machine_has_one_forward_per_contiguous_range(
    declared: list[str], forwarded: list[str]
) -> None:
    rules = desire([machine(*declared)], IPV4_ONLY).rules
    assert entering(rules) == {forward(text) for text in forwarded}


def test_a_machine_without_masquerade_gets_no_rule() -> None:
    bare = replace(machine(), masquerade=None)
    assert desire([bare], POD).rules == frozenset()
    assert bare.owner == str(bare) == "VirtualMachine/default/vm"


def test_a_long_owner_is_cut_in_every_rule() -> None:
    long = machine("tcp 22", name="v" * 200)
    assert {rule.owner for rule in desire([long], POD).rules} == {label(long.owner)}


# ------------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("around", "families"),
    [
        pytest.param(POD, {Family.IP, Family.IP6}, id="both addresses"),
        pytest.param(IPV4_ONLY, {Family.IP}, id="a link-local IPv6 address does not count"),
        pytest.param(IPV6_ONLY, {Family.IP6}, id="IPv6 alone"),
        pytest.param(None, {Family.IP, Family.IP6}, id="no namespace to ask"),
    ],
)
def test_a_family_is_served_where_the_entry_has_an_address_of_it(
    around: Surroundings | None, families: set[Family]
) -> None:
    assert {rule.family for rule in desire([machine("tcp 22")], around).rules} == families


@pytest.mark.parametrize(
    ("address", "is_so"),
    [
        ("10.244.1.7", True),
        ("192.0.2.7", True),
        ("fd00::1", True),
        ("2001:db8::1", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("169.254.1.1", False),
        ("fe80::1", False),
        ("224.0.0.1", False),
        ("ff02::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("255.255.255.255", False),
    ],
)
def test_a_global_address_is_one_that_others_can_reach(address: str, is_so: bool) -> None:
    assert is_global(ip_address(address)) is is_so


# ------------------------------------------------------------------------------------ the entry


@pytest.mark.parametrize(
    ("annotated", "around", "entry"),
    [
        pytest.param(None, POD, "eth0", id="eth0 where there is one"),
        pytest.param(
            None,
            space(ETH0, link("ens3", "192.0.2.1/24"), default="ens3"),
            "eth0",
            id="eth0 before the default route",
        ),
        pytest.param(
            None,
            space(LO, link("ens3", "192.0.2.1/24"), default="ens3"),
            "ens3",
            id="else the link of the default route",
        ),
        pytest.param(
            "ens4",
            space(ETH0, link("ens4", "192.0.2.1/24"), default="eth0"),
            "ens4",
            id="the annotation before everything",
        ),
        pytest.param("ens4", None, "ens4", id="the annotation where there is nothing to ask"),
        pytest.param(None, None, "eth0", id="KubeVirt's where there is nothing to ask"),
    ],
)
def test_traffic_enters_on(annotated: str | None, around: Surroundings | None, entry: str) -> None:
    rules = desire([machine("tcp 22", entry=annotated)], around).rules
    assert {rule.interface for rule in entering(rules)} == {entry}


@pytest.mark.parametrize(
    ("annotated", "around", "reason"),
    [
        pytest.param(
            None,
            space(LO),
            "there is neither a link eth0 nor a default route yet",
            id="an empty namespace",
        ),
        pytest.param("ens4", POD, "there is no link ens4 yet", id="the annotated link is missing"),
        pytest.param(
            None,
            space(link("eth0", "fe80::7/64")),
            "eth0 has no global address yet",
            id="an entry without an address",
        ),
        pytest.param(
            None,
            space(LO, default="ens3"),
            "there is neither a link eth0 nor a default route yet",
            id="a default route over a link that went",
        ),
        pytest.param(
            None,
            space(LO, link("ens*", "192.0.2.1/24"), default="ens*"),
            "there is neither a link eth0 nor a default route yet",
            id="a default route over a link that nft would take for many",
        ),
    ],
)
def test_what_is_not_there_yet_is_waited_for(
    annotated: str | None, around: Surroundings, reason: str
) -> None:
    desired = desire([machine("tcp 22", entry=annotated)], around)
    assert desired.rules == frozenset()
    assert desired.sysctls == frozenset()
    assert desired.pending == (Pending(OWNER, reason),)


@pytest.mark.parametrize(
    ("around", "families"),
    [
        pytest.param(POD, [], id="both have an address"),
        pytest.param(None, [], id="there is no namespace to ask"),
        pytest.param(IPV4_ONLY, [Family.IP6], id="IPv6 has none"),
    ],
)
def test_a_family_without_an_address_keeps_what_it_has(
    around: Surroundings | None, families: list[Family]
) -> None:
    kept = desire([machine("tcp 22")], around).kept
    assert {rule.family for rule in kept} == set(families)
    assert all(rule.owner == OWNER and rule.interface in (None, "eth0") for rule in kept)


def test_a_person_is_told_of_what_no_rule_says() -> None:
    assert desire([machine("tcp 22")], POD).notes == ()
    assert desire([machine()], POD).notes == (
        f"{OWNER}: neither ports nor ranges are declared, so all are forwarded",
    )
    assert desire([machine("tcp 22")], space(LO, ETH0)).notes == (
        f"{OWNER}: no link leads to the guest 10.0.2.2 yet",
        f"{OWNER}: no link leads to the guest fd10:0:2::2 yet",
    )


def test_one_pending_machine_does_not_hold_up_another() -> None:
    waiting = machine("tcp 80", name="waiting", entry="ens4")
    desired = desire([waiting, machine("tcp 22")], POD)
    assert [pending.owner for pending in desired.pending] == [waiting.owner]
    assert {rule.owner for rule in desired.rules} == {OWNER}


SILENT = Fence(policies="NetworkPolicy/shop/p")


def bars(desired: Desired) -> set[Rule]:
    """What drops what guests say under other addresses than their own."""
    return {rule for rule in desired.rules if rule.chain is Chain.EGRESS and rule.interface}


def test_pending_machines_that_share_a_link_keep_what_drops_forged_addresses() -> None:
    pair = [replace(machine("tcp 80", name=name), says=SILENT) for name in ("one", "two")]
    there = desire(pair, POD)
    assert len(bars(there)) == len(Family)
    for less in (space(LO, BRIDGE), space(LO), space(LO, BRIDGE, link("eth0"))):
        waiting = desire(pair, less)
        assert len(waiting.pending) == 2
        assert bars(waiting) == bars(there)


def test_a_pending_machine_that_may_say_anything_is_not_cut_off_by_another() -> None:
    silent = replace(machine("tcp 80", name="one"), says=SILENT)
    waiting = machine("tcp 81", name="two", entry="ens4")
    assert not bars(desire([silent, waiting], POD))


# ------------------------------------------------------------------------------ the guest's side

PLACED = (Guest(ip_address("192.168.7.9")),)  # by annotation, outside the VM network


def test_the_guest_is_behind_the_link_whose_network_holds_it() -> None:
    around = space(LO, ETH0, BRIDGE, link("br1", "192.168.7.1/24"))
    desired = desire([machine("tcp 22", guests=PLACED)], around)
    assert answerable("192.168.7.9", via="br1", gateway="192.168.7.1") in desired.rules
    assert localnet("br1") in desired.sysctls


def test_of_two_links_the_one_with_the_smaller_network_is_the_guests() -> None:
    # A second pod network on 10.0.0.0/8 comes first in the list, and holds the guest as well.
    around = space(LO, ETH0, link("net1", "10.9.9.9/8"), BRIDGE)
    desired = desire([machine("tcp 22")], around)
    assert answerable(via="k6t-eth0", gateway="10.0.2.1") in desired.rules
    assert localnet("net1") not in desired.sysctls


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(space(LO, ETH0), id="no other link"),
        pytest.param(space(LO, link("eth0", "192.168.7.1/24")), id="only the entry's network"),
        pytest.param(space(LO, ETH0, link("br1", "192.168.7.9/24")), id="the address is our own"),
        pytest.param(
            space(link("lo", "127.0.0.1/8", "192.168.7.1/24"), ETH0), id="only on the loopback"
        ),
        pytest.param(
            space(LO, ETH0, link("br*", "192.168.7.1/24")), id="a link that nft takes for many"
        ),
        pytest.param(None, id="nothing to ask"),
    ],
)
def test_a_guest_placed_where_no_link_leads_is_not_reached_from_inside(
    around: Surroundings | None,
) -> None:
    desired = desire([machine("tcp 22", guests=PLACED)], around)
    assert desired.rules == {
        forward("tcp 22", to="192.168.7.9"),
        egress("192.168.7.9"),
    }
    assert desired.sysctls == {STRICT, V4_FORWARDING}


def test_a_bridge_that_is_not_there_yet_has_its_rule_but_no_setting() -> None:
    desired = desire([machine("tcp 22")], space(LO, ETH0))
    assert answerable() in desired.rules
    assert desired.sysctls == {STRICT, V4_FORWARDING, V6_FORWARDING}


def test_a_bridge_whose_name_no_link_can_have_is_not_waited_for() -> None:
    # k6t- makes 16 bytes of it: nft would refuse the rule, and with it the transaction.
    rules = desire([machine("tcp 22", entry="enp0s31f6np0")], None).rules
    assert {rule.chain for rule in rules} == {Chain.PREROUTING, Chain.POSTROUTING}
    assert {rule.interface for rule in rules} == {"enp0s31f6np0", None}


def test_two_guests_behind_one_link_keep_each_its_gateway() -> None:
    other = Guest(ip_address("10.0.3.2"), ip_address("10.0.3.1"))
    bridge = link("k6t-eth0", "10.0.2.1/24", "10.0.3.1/24")
    desired = desire(
        [machine("tcp 22"), machine("tcp 23", name="vm2", guests=(other,))],
        space(LO, ETH0, bridge),
    )
    snat = {rule for rule in desired.rules if rule.chain is Chain.POSTROUTING and rule.interface}
    assert family(frozenset(snat), Family.IP) == {
        answerable(),
        answerable("10.0.3.2", gateway="10.0.3.1", owner=machine(name="vm2").owner),
    }


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("around", "settings"),
    [
        pytest.param(POD, {V4_FORWARDING, V6_FORWARDING, localnet("k6t-eth0")}, id="both"),
        pytest.param(IPV4_ONLY, {V4_FORWARDING, localnet("k6t-eth0")}, id="IPv4"),
        pytest.param(IPV6_ONLY, {V6_FORWARDING}, id="IPv6 has no route_localnet"),
        pytest.param(None, {V4_FORWARDING, V6_FORWARDING, localnet("k6t-eth0")}, id="on paper"),
    ],
)
def test_the_settings_are_those_of_the_families(
    around: Surroundings | None, settings: set[Sysctl]
) -> None:
    assert desire([machine("tcp 22")], around).sysctls == {STRICT, *settings}


def test_a_dot_in_a_links_name_is_a_slash_in_its_setting() -> None:
    around = space(link("eth0.7", "192.0.2.1/24"), link("br.7", "10.0.2.1/24"), default="eth0.7")
    assert localnet("br/7") in desire([machine("tcp 22")], around).sysctls


# --------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param("VirtualMachine/default/vm/default", id="short"),
        pytest.param("v" * 128, id="as long as can be"),
        pytest.param("ü" * 64, id="as many bytes as can be"),
    ],
)
def test_an_owner_that_fits_is_its_own_label(owner: str) -> None:
    assert label(owner) == owner


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param("v" * 129, id="one byte too many"),
        pytest.param("ü" * 65, id="two bytes a letter"),
        pytest.param("v" + "ü" * 300, id="cut inside a letter"),
    ],
)
def test_an_owner_that_does_not_fit_is_cut_and_closed_with_a_hash(owner: str) -> None:
    kept, _, digest = label(owner).rpartition("~")
    assert len(label(owner).encode()) <= LABEL_BYTES
    assert owner.startswith(kept)
    assert len(digest) == 16


def test_long_owners_that_differ_only_at_the_end_have_different_labels() -> None:
    assert label("v" * 200 + "a") != label("v" * 200 + "b")


# ------------------------------------------------------------------------------------ conflicts


def found(*machines: Machine) -> list[str]:
    return [problem.what for problem in conflicts(machines)]


@pytest.mark.parametrize(
    "machines",
    [
        pytest.param([machine("tcp 22", "tcp 22-80")], id="a machine with itself"),
        pytest.param(
            [machine("tcp 22"), machine("udp 22", name="other")], id="different protocols"
        ),
        pytest.param([machine("tcp 22"), machine("tcp 23", name="other")], id="touching"),
        pytest.param(
            [machine("tcp 22"), machine("tcp 22", name="other", netns="red")],
            id="different namespaces",
        ),
        pytest.param(
            [machine(), replace(machine(name="other"), masquerade=None)], id="one of them not ours"
        ),
    ],
)
def test_there_is_no_conflict_between(machines: list[Machine]) -> None:
    assert found(*machines) == []


def test_a_conflict_names_both_machines_and_both_ranges() -> None:
    one = machine("tcp 1000-2000", name="one", origin="a.yaml:1")
    other = machine("tcp 1500-3000", name="other", origin="b.yaml:7")
    assert conflicts([other, one]) == (
        Problem(
            code="conflict",
            path=(),
            what="in namespace blue, tcp 1500-3000 of VirtualMachine/default/other/default"
            " meets tcp 1000-2000 of VirtualMachine/default/one/default (a.yaml:1)",
            fix="Give each port to one machine, or each machine a namespace of its own.",
            file="b.yaml",
            line=7,
        ),
    )


def test_a_machine_that_claims_everything_meets_every_other() -> None:
    (what,) = found(machine(), machine("udp 53", name="other"))
    assert what == (
        "in namespace blue, udp 53 of VirtualMachine/default/other/default"
        " meets udp 1-65535 of VirtualMachine/default/vm/default"
    )


def test_two_machines_that_claim_everything_meet_in_both_protocols() -> None:
    assert len(found(machine(), machine(name="other"))) == 2


def test_every_pair_is_a_conflict_of_its_own() -> None:
    assert len(found(*(machine("tcp 22", name=name) for name in "abc"))) == 3


def test_a_file_name_with_a_colon_is_still_a_file_name() -> None:
    one, other = machine("tcp 22"), machine("tcp 22", name="vm2", origin="odd:name.yaml:12")
    (problem,) = conflicts([one, other])
    assert (problem.file, problem.line) == ("odd:name.yaml", 12)


# -------------------------------------------------------------------------- made once, known again


def test_what_was_made_the_last_time_is_the_very_same_the_next_time() -> None:
    made: Made = {}
    first = desire([machine("tcp 22", "tcp 1000-8000")], POD, made)
    again = desire([machine("tcp 22", "tcp 1000-8001")], POD, made)
    assert again == desire([machine("tcp 22", "tcp 1000-8001")], POD)
    known = {id(rule) for rule in first.rules}
    same = {str(rule.ports) for rule in again.rules if rule.ports and id(rule) in known}
    assert same == {"22"}


def test_what_is_no_longer_wanted_is_no_longer_remembered() -> None:
    made: Made = {}
    desire([machine("tcp 22", "tcp 1000-8000")], POD, made)
    desire([machine("tcp 22")], POD, made)
    kept = {str(rule.ports) for rules in made.values() for same in rules.values() for rule in same}
    assert kept == {"22"}
    desire([], POD, made)
    assert made == {}
