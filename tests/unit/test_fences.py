"""What policies come to in front of a machine: sets that are called by what is said of their
members, ranges joined over policies, and a fence that stays whoever comes or goes."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from rules.desired import LABEL_BYTES, desire
from rules.fences import Laws, fenced, idle, unprotected
from rules.model import (
    POLICED,
    Chain,
    Desired,
    Family,
    Fence,
    Machine,
    Protocol,
    Rule,
    Surroundings,
)
from rules.nft_sets import named
from rules.policies import Namespace, NetworkPolicy
from rules.ports import ALL_PORTS
from rules.services import Pod
from rules.values import replace
from tests.unit.samples import BRIDGE, GUESTS, LO, POD, link, ports, space
from tests.unit.test_policies import pod, policy, told, vm

TCP, UDP, SCTP = Protocol
V4, V6 = (guest.address for guest in GUESTS)


def laws(*policies: NetworkPolicy, pods: tuple[Pod, ...] = (), **more: Namespace) -> Laws:
    return Laws(policies=policies, pods=pods, namespaces=tuple(more.values()))


def one(machine: Machine, known: Laws, links: Surroundings | None = None) -> Machine:
    """The machine with what the laws say of it."""
    (found,) = fenced([machine], known, {} if links is None else {machine.netns: links})
    return found


def hears(*policies: NetworkPolicy, pods: tuple[Pod, ...] = (), of: Machine | None = None) -> Fence:
    found = one(of or vm(), laws(*policies, pods=pods)).hears
    assert found is not None
    return found


def says(*policies: NetworkPolicy, pods: tuple[Pod, ...] = ()) -> Fence:
    found = one(vm(), laws(*policies, pods=pods)).says
    assert found is not None
    return found


def keys(fence: Fence) -> set[str]:
    return {peers.key for peers, _ in fence.sets}


FRIENDS = "ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 80}]}]"


# ----------------------------------------------------------------------------- what sets are called


def test_a_set_is_called_by_what_is_said_of_its_members_and_not_by_who_they_are() -> None:
    crowds = [
        (),
        (pod("10.1.0.1", app="web"),),
        (pod("10.1.0.1", app="web"), pod("10.1.0.2 fd01::2", app="web"), pod("10.1.0.3", app="db")),
        (pod("10.1.0.9", app="web"),),
    ]
    fences = [hears(policy(FRIENDS), pods=pods) for pods in crowds]
    assert len({fence.grants for fence in fences}) == 1
    assert len({frozenset(keys(fence)) for fence in fences}) == 1
    assert [told(fence)[0].split(" with ")[1] for fence in fences] == [
        *("nobody by p", "10.1.0.1/32 by p", "10.1.0.1/32 10.1.0.2/32 by p", "10.1.0.9/32 by p"),
    ]


def test_whoever_comes_or_goes_changes_no_rule() -> None:
    def wanted(*pods: Pod) -> Desired:
        return desire([one(vm(), laws(policy(FRIENDS), pods=pods))], POD)

    empty, full = wanted(), wanted(pod("10.1.0.1 fd01::1", app="web"))
    assert empty.rules == full.rules
    assert empty.sets.keys() == full.sets.keys()
    assert sorted(str(one) for some in full.sets.values() for one in some) == [
        *("10.1.0.1/32", "fd01::1/128"),
    ]
    assert not any(empty.sets.values())


def test_the_name_of_a_set_fits_and_is_found_again() -> None:
    for peers, _ in hears(policy(FRIENDS)).sets:
        assert named(str(peers)) == peers
        assert len(str(peers)) <= 31  # NFT_SET_MAXNAMELEN of the oldest kernels is 32


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("podSelector: {matchLabels: {app: db}}", id="another label"),
        pytest.param("podSelector: {matchLabels: {app: web, tier: x}}", id="one label more"),
        pytest.param("namespaceSelector: {}, podSelector: {matchLabels: {app: web}}", id="far"),
        pytest.param("ipBlock: {cidr: 10.0.0.0/8}", id="a block"),
        pytest.param("ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}", id="a block with a gap"),
    ],
)
def test_other_words_are_another_set(other: str) -> None:
    first = keys(hears(policy(FRIENDS)))
    second = keys(hears(policy(f"ingress: [{{from: [{{{other}}}], ports: [{{port: 80}}]}}]")))
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)


def test_the_order_of_words_does_not_matter() -> None:
    peers = ["{podSelector: {}}", "{ipBlock: {cidr: 10.0.0.0/8}}"]
    straight, turned = (
        hears(policy(f"ingress: [{{from: [{', '.join(some)}]}}]")) for some in (peers, peers[::-1])
    )
    assert straight == turned


def test_near_ones_of_two_namespaces_are_two_sets_and_far_ones_are_one() -> None:
    def of(space: str, spec: str) -> set[str]:
        there = replace(policy(spec), namespace=space)
        return keys(hears(there, of=replace(vm(), namespace=space)))

    near = "ingress: [{from: [{podSelector: {}}]}]"
    far = "ingress: [{from: [{namespaceSelector: {matchLabels: {team: a}}}]}]"
    assert of("shop", near).isdisjoint(of("bank", near))
    assert of("shop", far) == of("bank", far)


# ----------------------------------------------------------------------------------- what is joined


def test_the_same_peers_of_two_policies_share_a_set_and_their_ranges_are_joined() -> None:
    spec = FRIENDS.replace("{port: 80}", "{port: %s, endPort: %s}")
    fence = hears(
        policy(spec % (1000, 2000), "a"),
        policy(spec % (2001, 3000), "b"),
        policy(spec % (2500, 2600), "c"),
        policy(spec % (3002, 3003), "d"),
        pods=(pod("10.1.0.1", app="web"),),
    )
    assert told(fence) == [
        "tcp 1000-3000 with 10.1.0.1/32 by a,b,c",
        "tcp 3002-3003 with 10.1.0.1/32 by d",
    ]
    assert len(fence.sets) == 2  # one a family


def test_different_peers_are_not_joined() -> None:
    one, two = FRIENDS, FRIENDS.replace("web", "db")
    pods = pod("10.1.0.1", app="web"), pod("10.1.0.2", app="db")
    fence = hears(policy(one, "a"), policy(two.replace("80", "81"), "b"), pods=pods)
    assert told(fence) == ["tcp 80 with 10.1.0.1/32 by a", "tcp 81 with 10.1.0.2/32 by b"]


def test_neither_protocols_nor_families_are_joined() -> None:
    spec = "ingress: [{ports: [{port: 80}, {port: 81, protocol: UDP}, {port: 82, protocol: SCTP}]}]"
    for family in Family:
        assert told(hears(policy(spec)), family) == [
            *("sctp 82 with everybody by p", "tcp 80 with everybody by p"),
            "udp 81 with everybody by p",
        ]


def test_all_ports_make_ranges_needless() -> None:
    fence = hears(
        policy("ingress: [{ports: [{port: 80}]}]", "a"),
        policy("ingress: [{ports: [{protocol: TCP}]}]", "b"),
        policy("ingress: [{}]", "c"),
    )
    assert told(fence) == ["any all with everybody by c", "tcp all with everybody by b"]


# ---------------------------------------------------------------------------------- who is a member


def test_members_are_of_their_family() -> None:
    fence = hears(policy(FRIENDS), pods=(pod("10.1.0.1 fd01::1", app="web"),))
    assert told(fence) == ["tcp 80 with 10.1.0.1/32 by p"]
    assert told(fence, Family.IP6) == ["tcp 80 with fd01::1/128 by p"]
    assert all(
        Family.of(member.network_address) is peers.family
        for peers, members in fence.sets
        for member in members
    )


def test_a_member_that_comes_or_goes_changes_no_other() -> None:
    """Joined with its neighbours it would, and for a moment none of them would be in the set."""
    pods = tuple(pod(f"10.1.0.{last}", app="web") for last in range(4))
    members = [f"10.1.0.{last}/32" for last in range(4)]
    for number in (3, 4):
        assert told(hears(policy(FRIENDS), pods=pods[:number])) == [
            f"tcp 80 with {' '.join(members[:number])} by p"
        ]


def test_a_block_has_no_gate_in_the_other_family() -> None:
    fence = hears(policy("ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/30}}]}]"))
    assert told(fence) == ["any all with 10.0.0.0/30 by p"]
    assert told(fence, Family.IP6) == []


def test_what_is_excepted_is_no_member() -> None:
    block = "{ipBlock: {cidr: 10.0.0.0/30, except: [10.0.0.1/32]}}"
    assert told(hears(policy(f"ingress: [{{from: [{block}]}}]"))) == [
        "any all with 10.0.0.0/32 10.0.0.2/31 by p"
    ]


def test_everybody_takes_no_set() -> None:
    for spec in ("ingress: [{}]", "ingress: [{from: []}]"):
        fence = hears(policy(spec))
        assert fence.sets == ()
        assert [told(fence, family) for family in Family] == [["any all with everybody by p"]] * 2


def test_the_whole_of_a_family_is_everybody_in_it_and_nobody_in_the_other() -> None:
    fence = hears(policy("ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]"))
    assert told(fence) == ["any all with everybody by p"]
    assert told(fence, Family.IP6) == []
    halves = "{ipBlock: {cidr: 0.0.0.0/1}}, {ipBlock: {cidr: 128.0.0.0/1}}"
    assert told(hears(policy(f"ingress: [{{from: [{halves}]}}]"))) == [
        "any all with everybody by p"
    ]


def test_who_fills_the_gap_of_a_block_does_not_change_the_rule() -> None:
    block = "{ipBlock: {cidr: 0.0.0.0/0, except: [10.1.0.1/32]}}"
    spec = f"ingress: [{{from: [{block}, {{podSelector: {{}}}}]}}]"
    before, after = hears(policy(spec)), hears(policy(spec), pods=(pod("10.1.0.1"),))
    assert before.grants == after.grants
    assert dict(after.sets)[next(p for p, _ in after.sets if p.family is Family.IP)] == {
        ip_network("0.0.0.0/0")
    }


def test_machines_are_peers_as_well() -> None:
    other = replace(vm((("app", "web"),)), name="other", addresses=(ip_address("10.1.0.8"),))
    found, _ = fenced([vm(), other], laws(policy(FRIENDS)), {})
    assert found.hears is not None
    assert told(found.hears) == ["tcp 80 with 10.1.0.8/32 by p"]


# ----------------------------------------------------------------------- where machines are reached


ELSEWHERE = space(
    LO, link("net7", "10.7.0.7/24", "fd07::7/64", "fe80::7/64"), BRIDGE, default="net7"
)


@pytest.mark.parametrize(
    ("said", "links", "expected"),
    [
        pytest.param("", None, "nobody", id="unknown"),
        pytest.param("10.9.0.9", None, "10.9.0.9/32", id="as it is said"),
        pytest.param("", POD, "10.244.1.7/32", id="as its namespace has it"),
        pytest.param("", ELSEWHERE, "10.7.0.7/32", id="on the link of the default route"),
        pytest.param("", space(LO, BRIDGE), "nobody", id="no link that others enter on"),
        pytest.param("10.9.0.9", POD, "10.9.0.9/32", id="said, whatever its namespace has"),
    ],
)
def test_a_machine_is_where_it_is_said_or_found_to_be(
    said: str, links: Surroundings | None, expected: str
) -> None:
    """The bridge, loopback and link-local addresses are no place where others would reach it."""
    addresses = tuple(map(ip_address, said.split()))
    machine = replace(vm((("app", "web"),)), addresses=addresses)
    found = one(machine, laws(policy(FRIENDS)), links).hears
    assert found is not None
    assert told(found) == [f"tcp 80 with {expected} by p"]


def test_every_global_address_counts_of_both_families() -> None:
    found = one(vm((("app", "web"),)), laws(policy(FRIENDS)), ELSEWHERE).hears
    assert found is not None
    assert told(found, Family.IP6) == ["tcp 80 with fd07::7/128 by p"]


def test_a_machine_that_is_not_ours_is_a_peer_where_it_is_said_to_be() -> None:
    bridged = replace(vm((("app", "web"),)), masquerade=None, addresses=(ip_address("10.1.0.9"),))
    found, same = fenced([vm(), bridged], laws(policy(FRIENDS)), {bridged.netns: POD})
    assert found.hears is not None
    assert told(found.hears) == ["tcp 80 with 10.1.0.9/32 by p"]
    assert same is bridged


# ------------------------------------------------------------------------------------ ports by name


def test_a_named_port_of_the_machine_is_its_own_number() -> None:
    spec = "ingress: [{ports: [{port: web}, {port: web, protocol: UDP}]}]"
    of = vm((), ("web", TCP, 8080), ("web", TCP, 9090), ("dns", TCP, 53))
    assert told(hears(policy(spec), of=of)) == ["tcp 8080 with everybody by p"]
    assert told(hears(policy(spec), of=vm(()))) == []  # shut, not open


def test_the_number_of_an_own_port_is_not_in_the_name_of_the_set() -> None:
    spec = policy(FRIENDS.replace("80", "web"))
    fences = [hears(spec, of=vm((), ("web", TCP, number))) for number in (80, 81)]
    assert keys(fences[0]) == keys(fences[1])
    assert [told(fence) for fence in fences] == [
        ["tcp 80 with nobody by p"],
        ["tcp 81 with nobody by p"],
    ]


def test_a_named_port_of_others_is_a_set_for_each_number() -> None:
    pods = (
        pod("10.1.0.1", "shop", ("web", TCP, 80), app="web"),
        pod("10.1.0.2", "shop", ("web", TCP, 8080), app="web"),
        pod("10.1.0.3", "shop", ("web", TCP, 8080), app="web"),
        pod("10.1.0.4", "shop", app="web"),
        pod("10.1.0.5", "shop", ("web", TCP, 80), app="db"),
    )
    spec = "egress: [{to: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: web}]}]"
    fence = says(policy(spec), pods=pods)
    assert told(fence) == [
        "tcp 80 with 10.1.0.1/32 by p",
        "tcp 8080 with 10.1.0.2/32 10.1.0.3/32 by p",
    ]
    assert len(keys(fence)) == 2
    fewer = says(policy(spec), pods=pods[:2])
    assert fewer.grants == fence.grants
    assert told(says(policy(spec))) == []


def test_a_number_and_a_name_for_it_are_both_open() -> None:
    pods = pod("10.1.0.1", "shop", ("web", TCP, 80)), pod("10.1.0.2")
    spec = "egress: [{to: [{podSelector: {}}], ports: [{port: web}, {port: 80}, {port: 81}]}]"
    assert told(says(policy(spec), pods=pods)) == [
        "tcp 80 with 10.1.0.1/32 10.1.0.2/32 by p",
        "tcp 81 with 10.1.0.1/32 10.1.0.2/32 by p",
    ]


def test_those_who_have_a_name_for_a_number_do_not_overlap_those_for_whom_it_is_open() -> None:
    """The kernel would refuse the set."""
    pods = pod("10.1.0.2", "shop", ("web", TCP, 80)), pod("10.1.0.3")
    spec = "egress: [{to: [{podSelector: {}}], ports: [%s]}]"
    for names in ("{port: web}, {port: 80}", "{port: 80}, {port: web}"):
        assert told(says(policy(spec % names), pods=pods)) == [
            "tcp 80 with 10.1.0.2/32 10.1.0.3/32 by p"
        ]


def test_a_named_port_of_anybody_is_one_of_those_who_are_known() -> None:
    pods = (
        pod("10.1.0.1", "shop", ("web", TCP, 80)),
        pod("10.1.0.2 fd01::2", "bank", ("web", TCP, 80)),
    )
    fence = says(policy("egress: [{ports: [{port: web}]}]"), pods=pods)
    assert told(fence) == ["tcp 80 with 10.1.0.1/32 10.1.0.2/32 by p"]
    assert told(fence, Family.IP6) == ["tcp 80 with fd01::2/128 by p"]


# --------------------------------------------------------------------------------- who is fenced in


def test_whom_nobody_selects_is_the_very_same() -> None:
    other = policy("podSelector: {matchLabels: {app: mail}}")
    elsewhere = replace(policy("podSelector: {}"), namespace="bank")
    for known in (laws(), laws(other), laws(elsewhere)):
        machine = vm()
        assert one(machine, known) is machine


def test_what_is_not_ours_is_the_very_same() -> None:
    machine = replace(vm(), masquerade=None)
    assert one(machine, laws(policy("podSelector: {}"))) is machine


def test_each_direction_has_a_fence_of_its_own() -> None:
    both, heard, said = (
        one(vm(), laws(policy(f"policyTypes: [{types}]")))
        for types in ("Ingress, Egress", "Ingress", "Egress")
    )
    assert (both.hears, both.says) == (heard.hears, said.says)
    assert (heard.says, said.hears) == (None, None)
    assert heard.hears == Fence(policies="NetworkPolicy/shop/p")


def test_a_broken_policy_is_a_fence_without_a_gate() -> None:
    broken = policy(FRIENDS).shut()
    fence = hears(broken, pods=(pod("10.1.0.1", app="web"),))
    assert (fence.grants, fence.sets) == ((), ())
    assert fence.policies == "NetworkPolicy/shop/p"
    beside = hears(broken, policy("ingress: [{ports: [{port: 22}]}]", "q"))
    assert told(beside) == ["tcp 22 with everybody by q"]
    assert beside.policies == "NetworkPolicy/shop/p,NetworkPolicy/shop/q"


def test_many_policies_of_long_names_fit_into_a_comment() -> None:
    names = [f"{letter * 40}" for letter in "abcdefgh"]
    some = [policy("ingress: [{ports: [{port: 22}]}]", name) for name in names]
    fence, fewer = hears(*some), hears(*some[:-1])
    for words in (fence.policies, fence.grants[0].policies):
        assert len(words.encode()) <= LABEL_BYTES
    assert fence.policies != fewer.policies
    assert fence.grants[0].policies != fewer.grants[0].policies


# ----------------------------------------------------------------------------- the rules of a fence


def filters(*policies: NetworkPolicy, pods: tuple[Pod, ...] = ()) -> list[Rule]:
    made = desire([one(vm(), laws(*policies, pods=pods))], POD)
    return [rule for rule in made.rules if rule.chain in POLICED]


def test_owners_of_rules_are_the_policies_and_of_guards_the_machine() -> None:
    spec = FRIENDS.replace("{port: 80}", "{port: %s}")
    found = filters(policy(spec % 80, "a"), policy(spec % 81, "b"), policy(spec % 90, "c"))
    opened = {(str(rule.ports), rule.owner) for rule in found if rule.ports}
    stem = "NetworkPolicy/shop/"
    assert opened == {("80-81", f"{stem}a,{stem}b"), ("90", f"{stem}c")}
    assert {rule.owner for rule in found if rule.guards or rule.resumes} == {vm().owner}


def test_a_fence_is_four_kinds_of_rules_in_each_family() -> None:
    found = filters(policy(FRIENDS + ", egress: [{ports: [{protocol: UDP}]}]"))
    for family, guest in ((Family.IP, V4), (Family.IP6, V6)):
        here = {rule for rule in found if rule.family is family}
        hears = Rule(chain=Chain.FORWARD, family=family, owner=vm().owner)
        says = replace(hears, chain=Chain.EGRESS)
        granted = {"owner": "NetworkPolicy/shop/p", "accepts": True}
        (peers,) = {rule.peers for rule in here if rule.peers}
        to_web = {"destination": guest, "protocol": TCP, "ports": ports("80"), "peers": peers}
        assert here == {
            replace(hears, accepts=True),
            replace(hears, destination=guest),
            replace(hears, **to_web, **granted),
            replace(says, accepts=True),
            replace(says, source=guest),
            replace(says, interface="k6t-eth0"),
            replace(says, source=guest, protocol=UDP, ports=ALL_PORTS, **granted),
        }


def test_a_fence_stands_although_the_machine_has_to_wait() -> None:
    """What comes up first must not be open."""
    waiting = desire([one(vm(), laws(policy(FRIENDS)))], space(LO))
    assert waiting.pending
    assert {rule.chain for rule in waiting.rules} == {Chain.FORWARD}
    assert len(waiting.sets) == 2


def test_a_set_that_no_rule_names_is_not_there() -> None:
    """Of a guest that has only one family."""
    machine = vm()
    assert machine.masquerade is not None
    single = replace(machine, masquerade=replace(machine.masquerade, guests=GUESTS[:1]))
    made = desire([one(single, laws(policy(FRIENDS)))], POD)
    assert [peers.family for peers in made.sets] == [Family.IP]


def test_two_machines_of_one_namespace_share_what_is_said_of_both() -> None:
    guests = tuple(replace(guest, address=guest.address + 7) for guest in GUESTS)
    machine = vm()
    assert machine.masquerade is not None
    other = replace(machine, name="other", masquerade=replace(machine.masquerade, guests=guests))
    both = fenced([machine, other], laws(policy(FRIENDS), pods=(pod("10.1.0.1", app="web"),)), {})
    made = desire(both, POD)
    assert len(made.sets) == 2
    assert sum(rule.guards and rule.chain in POLICED for rule in made.rules) == 4


def test_it_is_said_whose_word_a_machine_is_held_to() -> None:
    [fenced_one] = fenced([vm()], Laws(policies=(policy(FRIENDS),)), {})
    stem = f"{vm().owner}: it"
    found = [note for note in desire([fenced_one], None).notes if note.startswith(stem)]
    assert found == [f"{stem} hears only what NetworkPolicy/shop/p allow"]


def test_policies_without_effect_are_named() -> None:
    bare = replace(vm(), masquerade=None)
    everybody = policy("podSelector: {}", "a")
    laws = Laws(policies=(everybody, replace(everybody, namespace="elsewhere", name="b")))
    [line] = unprotected([bare, vm()], laws)
    assert line.startswith(f"{bare}: {everybody} select it, without effect")
    [line] = idle([bare], laws)
    assert line.startswith("NetworkPolicy/elsewhere/b selects no machine")
    assert unprotected([vm()], laws) == unprotected([bare], Laws()) == []
