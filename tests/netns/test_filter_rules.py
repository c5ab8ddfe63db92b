"""Rules in forward and their sets in the kernel, however they are written: what is read back is
what was meant, what is known without a look is what another finds who looks, what a stranger does
to them is undone, and an address that comes or goes touches no rule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

import pytest

from agent.errors import Stale
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import generation_of, netlink
from agent.reconcile import converge
from rules.desired import desire
from rules.fences import Laws, fenced
from rules.model import (
    POLICED,
    Chain,
    Desired,
    Family,
    Fence,
    Grant,
    Live,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.nft_batch import can_write
from rules.nft_foreseen import carried_out
from rules.nft_script import statement
from rules.nft_sets import Join, Leave
from rules.nft_transactions import transactions
from rules.plan import Plan, Table, diff
from rules.policies import collapsed
from rules.ports import PortRange
from rules.services import Pod
from rules.values import replace
from tests.netns import written
from tests.netns.written import (
    Three,
    assert_as_foreseen,
    by_bytes,
    by_commands,
    by_script,
    entered,
    identity,
    listing,
)
from tests.spaces import NFTABLES, SURROUNDINGS, nft, observed, using, vm, within
from tests.unit.samples import steps
from tests.unit.test_policies import policy

GUESTS = {Family.IP: ip_address("10.0.2.2"), Family.IP6: ip_address("fd10:0:2::2")}
ENDS = ("destination", "source")
POLICY = "NetworkPolicy/default/web"
SOME = ("10.1.0.0/16", "10.3.4.5/32", "fd00:1::/32", "2001:db8::7/128")


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[str]:
    with using(NFTABLES) as asked_for:
        yield asked_for


@pytest.fixture
def netns(three: Three) -> str:
    return three[0]


# ----------------------------------------------------------------------------------- what is wanted


def peers(family: Family, key: str = "a1") -> Peers:
    return Peers(family, key)


def members(*texts: str, family: Family) -> Members:
    found = [one for one in map(ip_network, texts) if Family.of(one.network_address) is family]
    return frozenset(collapsed(found))


def rule(family: Family = Family.IP, **more: Any) -> Rule:
    return Rule(**{"chain": Chain.FORWARD, "family": family, "owner": POLICY, **more})


def chain_of(end: str) -> Chain:
    return Chain.FORWARD if end == "destination" else Chain.EGRESS


def gate(text: str, family: Family = Family.IP, end: str = "destination", **more: Any) -> Rule:
    """`tcp 80-90`, `tcp` for all its ports, or nothing for everything."""
    protocol, _, numbers = text.partition(" ")
    first, _, last = numbers.partition("-")
    ports = PortRange(int(first or 1), int(last or first or 65535)) if protocol else None
    fields = {"accepts": True, end: GUESTS[family], "ports": ports}
    kind = Protocol(protocol) if protocol else None
    return rule(family, protocol=kind, **{"chain": chain_of(end), **fields, **more})


def fence(
    *texts: str,
    whom: tuple[str, ...] | None = SOME,
    end: str = "destination",
    key: str = "a1",
) -> Desired:
    """The guest is cut off at one end, but for these ports with these peers; None: with anybody."""
    rules: set[Rule] = set()
    sets: dict[Peers, Members] = {}
    for family in Family:
        name = None if whom is None else peers(family, key)
        plain = rule(family, chain=chain_of(end))
        rules |= {replace(plain, accepts=True), replace(plain, **{end: GUESTS[family]})}
        rules |= {gate(text, family, end, peers=name) for text in texts}
        if name is not None and texts:
            sets[name] = members(*(whom or ()), family=family)
    return Desired(rules=frozenset(rules), sets=sets)


def both(*wishes: Desired) -> Desired:
    return Desired(
        rules=frozenset(rule for one in wishes for rule in one.rules),
        sets={peers: held for one in wishes for peers, held in one.sets.items()},
    )


RANGES = replace(desire([vm("a", "22,1000-8000/udp")], SURROUNDINGS), sysctls=frozenset())
CROWD = replace(
    desire([vm("a", ",".join(map(str, range(100, 300, 10))))], SURROUNDINGS), sysctls=frozenset()
)
NOBODY = Desired()


# ----------------------------------------------------------------------------------- what is held


def assert_holds(netns: str, desired: Desired) -> None:
    seen = observed(netns)
    assert (seen.foreign, seen.unsound) == ((), "")
    assert Counter(live.rule for live in seen.live) == Counter(desired.rules)
    assert seen.sets == desired.sets
    assert diff(netns, desired, seen).empty
    assert_guards_come_last(netns)


def assert_guards_come_last(netns: str) -> None:
    for chain in within(netns, "nft", "list", "ruleset").split("\tchain ")[1:]:
        lines = [one.strip() for one in chain.splitlines()]
        verdicts = [" drop " in one for one in lines if " accept comment" in one or " drop " in one]
        assert verdicts == sorted(verdicts)


def assert_all_alike(three: Three, desired: Desired) -> None:
    """Whoever writes it, the same is there afterwards, and that which is wanted."""
    assert can_write(steps(diff(three[0], desired, observed(three[0]))))
    written.assert_all_alike(three, desired, lambda netns: assert_holds(netns, desired))


def generation(netns: str) -> int:
    with opened(netns) as descriptor, inside(descriptor, netns), netlink() as asking:
        return generation_of(asking).number


# ---------------------------------------------------------------------------------- every shape

EDGES = (
    *("0.0.0.0/32", "10.0.0.0/32", "10.0.0.1/32", "10.0.0.2/32", "10.0.0.4/30", "10.0.0.8/29"),
    *("126.0.0.0/7", "128.0.0.0/2", "255.255.255.254/32", "255.255.255.255/32"),
    *("::/128", "fd00::1/128", "fd00::2/128", "fd00::4/126", "fe00::/7"),
)
SHAPES: dict[str, Desired] = {
    "no gate": fence(),
    "a gate for everything": fence(""),
    "a gate for everybody": fence("tcp 80", whom=None),
    "a gate for everything and everybody": fence("", whom=None),
    "a gate for nobody": fence("tcp 80", whom=()),
    "gates": fence("tcp 80", "tcp 1000-8000", "udp 53", "sctp 7", "sctp 100-200"),
    "all ports of a protocol": fence("tcp", "udp", "sctp"),
    "the first and the last port": fence("tcp 1", "tcp 65535", "udp 1-2", "udp 65534-65535"),
    "neighbours, and the ends of all addresses": fence("tcp 80", whom=EDGES),
    "all addresses": fence("tcp 80", whom=("0.0.0.0/0", "::/0")),
    "halves of all addresses": fence("tcp 80", whom=("128.0.0.0/1", "8000::/1")),
    "what leaves": fence("tcp 80", "udp 53", end="source"),
    "both ends": both(fence("tcp 80"), fence("udp 53", end="source", key="b2")),
    "both ends with the same peers": both(fence("tcp 80"), fence("udp 53", end="source")),
    "two sets at one end": both(fence("tcp 80"), fence("tcp 80", key="0123456789abcdef")),
    "beside ranges": both(fence("tcp 80"), RANGES),
    "beside a map": both(fence("tcp 80"), CROWD),
    "an owner of 128 bytes": Desired(
        rules=frozenset(
            {
                rule(accepts=True, owner="ü" * 64),
                rule(destination=GUESTS[Family.IP], owner="ü" * 64),
            }
        )
    ),
}


@pytest.mark.parametrize("desired", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_found_again_however_it_is_written(three: Three, desired: Desired) -> None:
    assert_all_alike(three, desired)
    for netns in three:
        with entered(netns) as namespace:
            assert converge(netns, desired, namespace) == Plan(netns=netns)


def test_a_thousand_members_of_each_family_take_one_commit(three: Three) -> None:
    """More than a message holds."""
    far = [f"10.{i >> 8}.{i & 255}.1/32" for i in range(1000)]
    far += [f"fd00::{i:x}:1/128" for i in range(1000)]
    desired = fence("tcp 80", whom=tuple(far))
    assert_all_alike(three, desired)
    nobody = fence("tcp 80", whom=())
    assert_all_alike(three, nobody)


def test_what_policies_say_is_found_again(three: Three) -> None:
    """From manifests, with two machines of one namespace."""
    spec = (
        "ingress: [{from: [{podSelector: {matchLabels: {app: web}}}, {ipBlock: {cidr: 10.0.0.0/8,"
        " except: [10.9.0.0/16]}}], ports: [{port: 80}, {port: 8000, endPort: 8999},"
        " {port: 53, protocol: UDP}]}, {from: [{namespaceSelector: {}}]}],"
        " egress: [{ports: [{protocol: TCP}]}, {to: [{podSelector: {}}]}]"
    )
    pods = tuple(
        Pod(
            namespace="shop",
            name=f"web-{number}",
            ports=(),
            labels=(("app", "web"),),
            addresses=(ip_address(f"172.16.0.{number}"), ip_address(f"fd00::{number}")),
        )
        for number in range(1, 8)
    )
    machines = [
        replace(vm("a", "80"), namespace="shop"),
        replace(vm("b", "81", ipv4="10.0.3.0/24", ipv6="fd10:0:3::/120"), namespace="shop"),
    ]
    for some in (pods, pods[:3], pods[2:], ()):
        known = Laws(policies=(policy(spec), policy("podSelector: {}", "shut")), pods=some)
        desired = desire(fenced(machines, known, {}), SURROUNDINGS)
        assert_all_alike(three, replace(desired, sysctls=frozenset()))


# ------------------------------------------------------------------------- from one to another

LIFE: list[Desired] = [
    fence("tcp 80"),
    fence("tcp 80", "tcp 443"),
    fence("tcp 80-90", "tcp 443"),
    fence("tcp 80-90", "tcp 443", whom=SOME[1:]),
    fence("tcp 80-90", "tcp 443", whom=(*SOME, "10.9.9.9/32")),
    fence("tcp 80-90", whom=("10.0.0.0/8", "fd00::/8")),
    fence("tcp 80-90", whom=("10.0.0.0/9", "fd00::/9")),
    fence("tcp 80-90", whom=("10.128.0.0/9", "fd80::/9")),
    fence("tcp 80-90", whom=()),
    fence("tcp 80-90", whom=EDGES),
    fence("tcp 80-90", whom=None),
    both(fence("tcp 80-90", whom=None), fence("udp 53", end="source")),
    both(fence("tcp 80"), fence("udp 53", end="source", key="b2"), RANGES),
    both(fence("udp 53", end="source", key="b2"), RANGES),
    RANGES,
    both(fence("tcp 80"), CROWD),
    fence(),
    NOBODY,
    both(fence("tcp 80"), RANGES),
]


def test_a_fence_lives_through_everything_however_it_is_written(
    three: Three,
) -> None:
    for desired in LIFE:
        assert_all_alike(three, desired)


def test_what_is_known_is_right_through_all_of_it(netns: str) -> None:
    """By one who keeps the namespace open, and looks only where it must."""
    with entered(netns) as namespace:
        for desired in (*LIFE, *reversed(LIFE)):
            plan = diff(netns, desired, namespace.observe())
            namespace.commit(plan)
            assert_as_foreseen(netns, namespace)
            assert_holds(netns, desired)


def test_what_stays_keeps_its_handle(netns: str) -> None:
    for before, after in product(LIFE, LIFE[::4]):
        nft(netns, "flush ruleset")
        with entered(netns) as namespace:
            converge(netns, before, namespace)
            was = dict(map(identity, namespace.observe().live))
            plan = diff(netns, after, namespace.observe())
            converge(netns, after, namespace)
            now = dict(map(identity, namespace.observe().live))
        if plan.table is Table.KEEP and not (plan.gathering or plan.spreading):
            assert {one: was[one] for one in was.keys() & now.keys()}.items() <= now.items()


# ------------------------------------------------------------------------------ elements alone


def test_who_comes_or_goes_is_an_element_in_one_generation_and_touches_no_rule(
    netns: str,
) -> None:
    """A hundred come, a hundred go, and some networks become parts of others."""
    crowd = [f"10.7.{i}.{2 * i + 1}/32" for i in range(100)] + [
        f"fd07::{i}:1/128" for i in range(100)
    ]
    wishes = [
        fence("tcp 80", "udp 53"),
        fence("tcp 80", "udp 53", whom=(*SOME, *crowd)),
        fence("tcp 80", "udp 53", whom=tuple(crowd)),
        fence("tcp 80", "udp 53", whom=("10.0.0.0/8", "fd00::/8")),
        fence("tcp 80", "udp 53", whom=tuple(crowd[50:150])),
        fence("tcp 80", "udp 53", whom=()),
        fence("tcp 80", "udp 53"),
    ]
    with entered(netns) as namespace:
        converge(netns, wishes[0], namespace)
    mark_counters(netns)
    was = observed(netns).live
    assert all(live.packets == 1000 + place for place, live in enumerate(was))
    for desired in wishes[1:]:
        before = generation(netns)
        with entered(netns) as namespace:
            plan = diff(netns, desired, namespace.observe())
            assert (plan.add, plan.change, plan.remove) == ((), (), ())
            assert all(isinstance(step, Join | Leave) for step in steps(plan))
            assert len(transactions(plan)) == 1
            namespace.commit(plan)
            assert_as_foreseen(netns, namespace)
        assert generation(netns) == before + 1
        assert observed(netns).live == was, "handles, counters and order of rules"
        assert observed(netns).sets == desired.sets


def mark_counters(netns: str) -> None:
    """Give every rule a count that one written anew would not have."""
    for place, live in enumerate(observed(netns).live):
        words = statement(live.rule).replace("counter", f"counter packets {1000 + place} bytes 7")
        at = f"{live.rule.chain.value} handle {live.handle}"
        nft(netns, f"replace rule inet portranger {at} {words}")


def test_a_gate_more_leaves_the_counters_of_others(netns: str) -> None:
    with entered(netns) as namespace:
        converge(netns, fence("tcp 80"), namespace)
    mark_counters(netns)
    was = {(live.rule, live.packets) for live in observed(netns).live}
    with entered(netns) as namespace:
        converge(netns, fence("tcp 80", "tcp 443"), namespace)
    assert was < {(live.rule, live.packets) for live in observed(netns).live}
    assert_holds(netns, fence("tcp 80", "tcp 443"))


def test_a_crowd_that_comes_and_goes_at_random_is_always_as_wanted(netns: str) -> None:
    """Neighbours that become one network, and networks that fall apart: the kernel is told only of
    what differs, and refuses what overlaps."""
    chance = random.Random(2079)
    near = [ip_network(f"10.0.0.{last}") for last in range(64)]
    near += [ip_network(f"fd00::{last:x}") for last in range(64)]
    near += [ip_network(one) for one in ("255.255.255.255", "255.255.255.254", "0.0.0.0", "::")]
    with entered(netns) as namespace:
        for _ in range(60):
            some = chance.sample(near, chance.randint(0, len(near)))
            desired = fence("tcp 80", whom=tuple(map(str, some)))
            plan = diff(netns, desired, namespace.observe())
            foreseen = carried_out(steps(plan), namespace.observe(), range(1, 99))
            namespace.commit(plan)
            assert foreseen.sets == desired.sets
            assert observed(netns).sets == desired.sets


@pytest.mark.parametrize("how", ["bytes", "commands", "script"])
def test_networks_that_fall_apart_or_join_are_taken_however_it_is_written(
    netns: str, how: str
) -> None:
    write = {"bytes": by_bytes, "commands": by_commands, "script": by_script}[how]
    for whom in (
        *(("10.0.0.0/30",), ("10.0.0.0/32", "10.0.0.2/31"), ("10.0.0.1/32", "10.0.0.2/32")),
        *(("10.0.0.0/29",), ("10.0.0.0/29", "10.0.0.8/32"), ("10.0.0.0/28",), ("0.0.0.0/0",)),
        *(("128.0.0.0/1",), ("255.255.255.255/32",), ("192.0.0.0/2", "10.0.0.0/30")),
    ):
        desired = fence("tcp 80", whom=whom)
        write(netns, desired)
        assert_holds(netns, desired)


# ------------------------------------------------------------------------------------ strangers

WEB = fence("tcp 80-90", "tcp 443")
IP_SET, IP6_SET = (str(peers(family)) for family in Family)


def the(netns: str, **fields: Any) -> Live:
    """Some rule in forward that has these."""
    return next(
        live
        for live in observed(netns).live
        if live.rule.chain in POLICED
        and all(getattr(live.rule, key) == value for key, value in fields.items())
    )


def strange(words: str, netns: str) -> None:
    nft(netns, "\n".join(f"{line.strip()}" for line in words.split(";;")))


def guard_first(netns: str) -> None:
    guard = the(netns, guards=True, family=Family.IP)
    nft(
        netns,
        f"delete rule inet portranger forward handle {guard.handle}\n"
        f"insert rule inet portranger forward {statement(guard.rule)}",
    )


def guard_between(netns: str) -> None:
    guard = the(netns, guards=True, family=Family.IP)
    one = the(netns, protocol=Protocol.TCP, family=Family.IP)
    nft(
        netns,
        f"delete rule inet portranger forward handle {guard.handle}\n"
        f"insert rule inet portranger forward position {one.handle} {statement(guard.rule)}",
    )


def guard_gone(netns: str) -> None:
    nft(netns, f"delete rule inet portranger forward handle {the(netns, guards=True).handle}")


def guard_copied(netns: str) -> None:
    nft(netns, f"insert rule inet portranger forward {statement(the(netns, guards=True).rule)}")


def without_resuming(netns: str) -> None:
    nft(netns, f"delete rule inet portranger forward handle {the(netns, resumes=True).handle}")


def resuming_last(netns: str) -> None:
    one = the(netns, resumes=True)
    nft(
        netns,
        f"delete rule inet portranger forward handle {one.handle}\n"
        f"add rule inet portranger forward {statement(one.rule)}",
    )


def gate_for_everybody(netns: str) -> None:
    one = the(netns, protocol=Protocol.TCP, family=Family.IP)
    words = statement(replace(one.rule, peers=None))
    nft(netns, f"replace rule inet portranger forward handle {one.handle} {words}")


def made_anew(kind: str, netns: str) -> None:
    """A set of another kind under our name, and our own rules that look into it, all in one."""
    lives = [live for live in observed(netns).live if str(live.rule.peers) == IP_SET]
    lines = [f"delete rule inet portranger forward handle {live.handle}" for live in lives]
    lines += [f"delete set inet portranger {IP_SET}", f"add set inet portranger {IP_SET} {kind}"]
    last = the(netns, resumes=True, family=Family.IP).handle
    lines += [
        f"add rule inet portranger forward position {last} {statement(live.rule)}" for live in lives
    ]
    nft(netns, "\n".join(lines))


def of_another_type(netns: str) -> None:
    """Rules of ours could not look into it."""
    lives = [live for live in observed(netns).live if str(live.rule.peers) == IP_SET]
    lines = [f"delete rule inet portranger forward handle {live.handle}" for live in lives]
    lines += [
        f"delete set inet portranger {IP_SET}",
        f"add set inet portranger {IP_SET} {{ type inet_service; }}",
        f"add rule inet portranger forward tcp dport @{IP_SET} accept",
    ]
    nft(netns, "\n".join(lines))


def a_map_of_our_name(netns: str) -> None:
    lives = [live for live in observed(netns).live if str(live.rule.peers) == IP_SET]
    lines = [f"delete rule inet portranger forward handle {live.handle}" for live in lives]
    lines += [
        f"delete set inet portranger {IP_SET}",
        f"add map inet portranger {IP_SET} {{ type ipv4_addr : verdict; }}",
        f"add rule inet portranger forward ip saddr vmap @{IP_SET}",
    ]
    nft(netns, "\n".join(lines))


STRANGERS: dict[str, Any] = {
    "adds an element": partial(strange, f"add element inet portranger {IP_SET} {{ 192.0.2.7 }}"),
    "adds a network": partial(strange, f"add element inet portranger {IP_SET} {{ 192.0.2.0/24 }}"),
    "adds a range": partial(
        strange, f"add element inet portranger {IP_SET} {{ 192.0.2.1-192.0.2.6 }}"
    ),
    "adds an element with a comment": partial(
        strange, f'add element inet portranger {IP_SET} {{ 192.0.2.7 comment "mine" }}'
    ),
    "deletes an element": partial(
        strange, f"delete element inet portranger {IP6_SET} {{ 2001:db8::7 }}"
    ),
    "deletes all": partial(strange, f"flush set inet portranger {IP_SET}"),
    "replaces one": partial(
        strange,
        f"delete element inet portranger {IP_SET} {{ 10.1.0.0/16 }};;"
        f"add element inet portranger {IP_SET} {{ 10.1.0.0/17 }}",
    ),
    "adds a set": partial(strange, "add set inet portranger mine { type ipv4_addr; }"),
    "adds a set with a name like ours": partial(
        strange,
        "add set inet portranger peers-ip-beef { type ipv4_addr; flags interval;"
        " elements = { 10.0.0.0/8 }; }",
    ),
    "adds a set of another type with a name like ours": partial(
        strange, "add set inet portranger peers-ip-beef { type inet_service; }"
    ),
    "adds a set of the other family with a name like ours": partial(
        strange, "add set inet portranger peers-ip6-beef { type ipv4_addr; flags interval; }"
    ),
    "adds a rule": partial(strange, "insert rule inet portranger forward accept"),
    "adds a rule for all peers": partial(
        strange, f"insert rule inet portranger forward ip saddr @{IP_SET} counter accept"
    ),
    "turns a set around": partial(
        strange, f"insert rule inet portranger forward ip saddr != @{IP_SET} counter accept"
    ),
    "adds a rule of another set": partial(
        strange,
        "add set inet portranger mine { type ipv4_addr; };;"
        "insert rule inet portranger forward ip saddr @mine counter accept",
    ),
    "adds a chain": partial(strange, "add chain inet portranger mine"),
    "puts the guard first": guard_first,
    "puts the guard before an accepting rule": guard_between,
    "takes the guard away": guard_gone,
    "copies the guard": guard_copied,
    "takes away what lets open flows pass": without_resuming,
    "lets open flows pass behind the guard": resuming_last,
    "opens a gate for everybody": gate_for_everybody,
    "has a set of another type under our name": of_another_type,
    "has a map under our name": a_map_of_our_name,
    "has a set without networks under our name": partial(
        made_anew, "{ type ipv4_addr; elements = { 192.0.2.7 }; }"
    ),
    "has a set with a timeout under our name": partial(
        made_anew, "{ type ipv4_addr; flags interval,timeout; timeout 1h; }"
    ),
    "has a set with a counter under our name": partial(
        made_anew, "{ type ipv4_addr; flags interval; counter; }"
    ),
    "has a constant set under our name": partial(
        made_anew, "{ type ipv4_addr; flags constant,interval; elements = { 10.0.0.0/8 }; }"
    ),
    "has a set that joins networks under our name": partial(
        made_anew, "{ type ipv4_addr; flags interval; auto-merge; }"
    ),
    "flushes the chain": partial(strange, "flush chain inet portranger forward"),
    "flushes the table": partial(strange, "flush table inet portranger"),
    "deletes the table": partial(strange, "delete table inet portranger"),
    "deletes the chain": partial(
        strange,
        "flush chain inet portranger forward;;delete chain inet portranger forward",
    ),
    "deletes a set": partial(
        strange,
        f"flush chain inet portranger forward;;delete set inet portranger {IP_SET}",
    ),
    "makes the chain lenient": partial(
        strange,
        "flush chain inet portranger forward;;delete chain inet portranger forward;;"
        "add chain inet portranger forward { type filter hook forward priority 5; }",
    ),
    "sets the policy of the chain": partial(
        strange, "add chain inet portranger forward { policy drop; }"
    ),
    "puts the table to sleep": partial(strange, "add table inet portranger { flags dormant; }"),
}


@pytest.mark.parametrize("ranges", [NOBODY, RANGES], ids=["alone", "beside ranges"])
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_what_a_stranger_does_is_undone(netns: str, stranger: Any, ranges: Desired) -> None:
    desired = both(WEB, ranges)
    with entered(netns) as namespace:
        converge(netns, desired, namespace)
        assert_as_foreseen(netns, namespace)
        known = namespace.known
    clean = listing(netns)
    stranger(netns)
    with entered(netns, known) as namespace:  # who knew it so far finds out
        assert not diff(netns, desired, namespace.observe()).empty
        converge(netns, desired, namespace)
    assert_holds(netns, desired)
    assert told(listing(netns)) == told(clean)


def told(lines: list[str]) -> set[str]:
    """Without counters; and that a set joins networks is not in the JSON of libnftables (1.0.6)."""
    return {line for line in lines if "packets" not in line and "auto-merge" not in line}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_what_a_stranger_did_is_undone_by_the_script_as_well(netns: str, stranger: Any) -> None:
    with entered(netns) as namespace:
        converge(netns, WEB, namespace)
    stranger(netns)
    by_script(netns, WEB)
    assert_holds(netns, WEB)


def test_a_set_that_joins_networks_does_no_harm(netns: str) -> None:
    """What a stranger told nft about our set is nothing to the kernel."""
    desired = fence("tcp 80", whom=EDGES)
    with entered(netns) as namespace:
        converge(netns, desired, namespace)
    made_anew("{ type ipv4_addr; flags interval; auto-merge; }", netns)
    for wish in (desired, fence("tcp 80", whom=EDGES[:3]), desired):
        with entered(netns) as namespace:
            converge(netns, wish, namespace)
        assert_holds(netns, wish)


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_whatever_a_stranger_did_it_can_all_go(netns: str, stranger: Any) -> None:
    with entered(netns) as namespace:
        converge(netns, WEB, namespace)
    stranger(netns)
    with entered(netns) as namespace:
        converge(netns, NOBODY, namespace)
    assert "portranger" not in within(netns, "nft", "list", "ruleset")


def test_what_is_enforced_stays_while_it_is_not_known_what_is_allowed(netns: str) -> None:
    with entered(netns) as namespace:
        converge(netns, both(WEB, RANGES), namespace)
        was = set(map(identity, namespace.observe().live))
        converge(netns, Desired(filters_stay=True), namespace)
        now = set(map(identity, namespace.observe().live))
    assert now == {one for one in was if one[0].chain in POLICED}
    assert observed(netns).sets == WEB.sets


def test_what_is_enforced_stays_also_where_the_table_is_made_anew(netns: str) -> None:
    with entered(netns) as namespace:
        converge(netns, WEB, namespace)
    nft(netns, "add chain inet portranger mine")
    with entered(netns) as namespace:
        converge(netns, Desired(filters_stay=True), namespace)
    assert_holds(netns, WEB)


def test_an_element_that_went_meanwhile_makes_a_commit_fail_whole(netns: str) -> None:
    with entered(netns) as namespace:
        converge(netns, WEB, namespace)
        fewer = fence("tcp 80-90", "tcp 443", "tcp 22", whom=SOME[1:])
        plan = diff(netns, fewer, namespace.observe())
        nft(netns, f"flush set inet portranger {IP_SET}")
        with pytest.raises(Stale):
            namespace.commit(plan)
        assert not any(live.rule in plan.add for live in observed(netns).live)
        converge(netns, fewer, namespace)
    assert_holds(netns, fewer)


def test_grants_and_fences_as_values_become_what_the_kernel_holds(netns: str) -> None:
    """Whatever a policy says: one grant of each kind."""
    for protocol, ports, whom in product(
        (None, *Protocol), (None, PortRange(80, 90)), (None, peers(Family.IP))
    ):
        if protocol is None and ports is not None:
            continue
        grant = Grant(family=Family.IP, peers=whom, protocol=protocol, ports=ports, policies=POLICY)
        known = ((whom, members(*SOME, family=Family.IP)),) if whom else ()
        fenced_in = Fence(policies=POLICY, grants=(grant,), sets=known)
        machine = replace(vm("a", "80"), hears=fenced_in, says=fenced_in)
        desired = replace(desire([machine], SURROUNDINGS), sysctls=frozenset())
        with entered(netns) as namespace:
            converge(netns, desired, namespace)
        assert_holds(netns, desired)


def test_an_empty_observation_and_a_first_look_agree(netns: str) -> None:
    assert observed(netns) == Observed(mapped={})
