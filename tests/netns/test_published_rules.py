"""The rules of a node in the kernel: shares, the node's own addresses, shifted maps and detours,
however they are written. What is read back is what was meant, what is known without a look is what
another finds who looks, and what a stranger does to them is undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import product
from typing import Any

import pytest

from agent.reconcile import converge
from rules.model import (
    OWN,
    Address,
    Chain,
    Desired,
    Detour,
    Family,
    Lookup,
    Observed,
    Protocol,
    Rule,
    Share,
)
from rules.nft_batch import can_write
from rules.plan import Plan, Table, diff
from rules.ports import PortRange
from rules.publish import Publishing, desire_node
from rules.shapes import lookup_of, name, port_name
from rules.values import replace
from tests.netns import written
from tests.netns.arenas import NftablesArena
from tests.netns.written import (
    Three,
    assert_as_foreseen,
    by_bytes,
    by_script,
    entered,
)
from tests.spaces import NFTABLES, nft, observed, using, within
from tests.unit.samples import steps
from tests.unit.test_publish import face, node

VIPS = {Family.IP: "203.0.113.7", Family.IP6: "2001:db8:9::7"}
ENDS = {
    Family.IP: ("10.1.0.11", "10.1.0.12", "10.1.0.13"),
    Family.IP6: ("fd01::11", "fd01::12", "fd01::13"),
}


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[str]:
    with using(NFTABLES) as asked_for:
        yield asked_for


@pytest.fixture
def netns(three: Three) -> str:
    return three[0]


def want(rules: Sequence[Rule] | frozenset[Rule]) -> Desired:
    return Desired(rules=frozenset(rules))


def held(netns: str, rules: Sequence[Rule] | frozenset[Rule]) -> Plan:
    """Make the namespace hold these."""
    with entered(netns) as namespace:
        return converge(netns, want(rules), namespace)


def rules_of(seen: Observed) -> Counter[Rule]:
    return Counter(live.rule for live in seen.live)


def assert_holds(netns: str, rules: Sequence[Rule] | frozenset[Rule]) -> None:
    seen = observed(netns)
    assert (seen.foreign, seen.unsound) == ((), "")
    assert rules_of(seen) == Counter(rules)
    assert diff(netns, want(rules), seen).empty


def assert_all_alike(three: Three, rules: frozenset[Rule]) -> None:
    """Whoever writes the rules, the same are there afterwards, and those that are wanted."""
    written.assert_all_alike(three, want(rules), lambda netns: assert_holds(netns, rules))


# ------------------------------------------------------------------------------ all combinations

SHAPES = {
    "one port": ["30100"],
    "a range": ["30100-30109"],
    "many ports": [str(first) for first in range(30100, 30200, 10)],
    "many ranges": [f"{first}-{first + 4}" for first in range(30100, 30200, 10)],
    "ports and ranges": ["30100", "30110-30114", "30120", "65530-65535"],
}


def shown(  # noqa: PLR0913 - all that makes a difference
    spans: Sequence[str],
    *,
    family: Family,
    protocol: Protocol,
    own: bool,
    endpoints: int,
    sticky: bool,
    shifted: bool,
) -> frozenset[Rule]:
    """What a Service with these ports comes to."""
    at = "" if own else VIPS[family]
    found = [
        face(
            f"p{place} {protocol.value} {span}{f'>{1000 + 10 * place}' if shifted else ''}",
            *ENDS[family][:endpoints],
            at=at,
            affinity=60 if sticky else None,
        )
        for place, span in enumerate(spans)
    ]
    return desire_node(found, None, Publishing()).rules


@pytest.mark.parametrize("spans", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shifted", [False, True], ids=["straight", "shifted"])
@pytest.mark.parametrize(
    ("endpoints", "sticky"),
    [(1, False), (2, False), (2, True), (3, False), (3, True)],
    ids=["one", "two", "two, sticky", "three", "three, sticky"],
)
def test_every_combination_is_found_again_however_it_is_written(
    three: Three, endpoints: int, sticky: bool, shifted: bool, spans: list[str]
) -> None:
    """Of every protocol and family, at the node's own addresses and at another."""
    made = partial(shown, spans, endpoints=endpoints, sticky=sticky, shifted=shifted)
    rules: frozenset[Rule] = frozenset()
    for family, own in product(Family, [True, False]):
        for protocol in Protocol:
            rules |= made(protocol=protocol, family=family, own=own)
        by_bytes(three[0], want(rules))
    assert len(rules) == 2 * 12 * endpoints * len(spans)
    assert_all_alike(three, rules)
    assert can_write(steps(diff(three[0], want(rules), Observed(mapped={})))) is not sticky


def test_all_combinations_live_beside_each_other(three: Three) -> None:
    rules: set[Rule] = set()
    first = 1000
    for family, protocol, own, endpoints, sticky, shifted in product(
        Family, Protocol, [True, False], (1, 2, 3), [True, False], [True, False]
    ):
        rules |= shown(
            [f"{first}-{first + 3}", f"{first + 5}"],
            family=family,
            protocol=protocol,
            own=own,
            endpoints=endpoints,
            sticky=sticky,
            shifted=shifted,
        )
        first += 10
    rules |= WAYS
    assert_all_alike(three, frozenset(rules))
    for netns in three:
        assert held(netns, frozenset(rules)).empty


# ------------------------------------------------------------------------------------ odd shares


def rule(text: str, to: str = "10.1.0.11", *, at: str = "", **more: Any) -> Rule:
    protocol, _, numbers = text.partition(" ")
    first, _, last = numbers.partition("-")
    target = ip_address(to)
    fields: Any = {
        "chain": Chain.PREROUTING,
        "family": Family.of(target),
        "owner": "o",
        "protocol": Protocol(protocol),
        "ports": PortRange(int(first), int(last or first)),
        "destination": ip_address(at) if at else OWN[Family.of(target)],
        "to": target,
    }
    return Rule(**{**fields, **more})


def many(number: int = 10, width: int = 4, **more: Any) -> list[Rule]:
    """That many ranges of one lookup."""
    spans = (f"tcp {first}-{first + width}" for first in range(100, 100 + 10 * number, 10))
    return [rule(span, **more) for span in spans]


ODD: dict[str, list[Rule]] = {
    "one number of one": [rule("tcp 1", share=Share(1, (0,)))],
    "one client of many": [rule("tcp 1", share=Share(256, (255,), client=True))],
    "some numbers of flows": [rule("tcp 1", share=Share(7, (0, 3, 6)))],
    "all numbers": [rule("tcp 1", share=Share(256, tuple(range(256)), client=True))],
    "the last of a thousand": [rule("tcp 1", share=Share(1000, (999,)))],
    "a map for one client of many": many(share=Share(256, (255,), client=True)),
    "a map for some clients": many(share=Share(256, (1, 255), client=True)),
    "a map for some flows": many(share=Share(7, (0, 3, 6))),
    "a shifted map for one client": [
        replace(one, to_port=7) for one in many(share=Share(256, (9,), client=True))
    ],
    "maps for the last of thousands": [
        *many(share=Share(5000, (4999,))),
        *many(share=Share(5000, (4998,)), to_port=9),
    ],
    "maps whose shares could be taken for each other": [
        *many(share=Share(256, (14,), client=True)),
        *many(share=Share(256, (4,), client=True)),
        *many(share=Share(256, (2, 4), client=True)),
        *many(share=Share(256, (4,))),
    ],
    "on a link": [replace(one, interface="eth0.100") for one in many(share=Share(2, (1,)))],
    "at loopback": [rule("tcp 1", at="127.0.0.1"), rule("tcp 1", "fd01::11", at="::1")],
    "to no address in particular": [replace(one, destination=None) for one in many()],
    "port by port to the last": [rule("udp 65526-65535", to_port=1)],
    "port by port to itself": [rule("udp 100-109", to_port=100)],
    "half the ports there are": [rule("udp 1-32767", to_port=32768)],
    "an owner of 128 bytes": [rule("udp 5", owner="ü" * 64), *many(owner="ü" * 64, to_port=1)],
}


@pytest.mark.parametrize("rules", ODD.values(), ids=ODD)
def test_odd_ones_are_found_again_however_they_are_written(three: Three, rules: list[Rule]) -> None:
    assert_all_alike(three, frozenset(rules))


# --------------------------------------------------------------------------------------- detours

Some = tuple[Address, ...]


def addresses(family: Family, number: int, first: int) -> Some:
    stem = "10.9.0.{}" if family is Family.IP else "fd09::{}"
    return tuple(ip_address(stem.format(first + i)) for i in range(number))


def detour(family: Family, **way: Any) -> Rule:
    made = Detour(**way)
    return Rule(chain=Chain.POSTROUTING, family=family, owner="node", detour=made)


LINKS = ("br0", "br0.100", *(f"veth1a2b3c4d5e{number}" for number in range(9)))
WAYS: frozenset[Rule] = frozenset(
    detour(family, published=addresses(family, number, 1), **{kind: of[:some]})
    for family, number in product(Family, (1, 3))
    for kind, of in (("links", LINKS), ("remote", addresses(family, 40, 100)))
    for some in (1, 2, 40)
)


def test_detours_are_found_again_and_told_apart(three: Three) -> None:
    assert len(WAYS) == 24
    assert_all_alike(three, WAYS)


def test_a_node_with_links_and_other_nodes_is_found_again(three: Three) -> None:
    """As it comes from Services: with one endpoint elsewhere, with two, with none."""
    for away in (["10.1.0.13 away"], ["10.1.0.12 away", "10.1.0.13 away"], []):
        ends = ["10.1.0.11", *away]
        shown = [
            face("a tcp 30000-30009>100", *ends),
            face("b udp 30010", *ends, at=VIPS[Family.IP]),
            face("c tcp 30000", "fd01::11", "fd01::12 away", affinity=5),
        ]
        rules = desire_node(shown, node(), Publishing()).rules
        assert sum(one.detour is not None for one in rules) == (4 if away else 3)
        assert_all_alike(three, rules)


# ------------------------------------------------------------------------- from one to another


def phone(*ends: str, ranges: int = 3, shift: int = 0, sticky: bool = False) -> frozenset[Rule]:
    """A Service with so many ranges, at the node and at an address."""
    found = [
        face(f"p{first} udp {first}-{first + 4}>{first + shift}", *ends, at=at, affinity=keeps)
        for first in range(30000, 30000 + 10 * ranges, 10)
        for at in ("", VIPS[Family.IP])
        for keeps in (60 if sticky else None,)
    ]
    return desire_node(found, node(), Publishing()).rules


ONE, TWO, OTHER = ENDS[Family.IP]
LIFE: list[frozenset[Rule]] = [
    phone(ONE),
    phone(ONE, TWO),
    phone(ONE, TWO, OTHER),
    phone(ONE, OTHER),
    phone(ONE, OTHER, sticky=True),
    phone(ONE, TWO, OTHER, sticky=True),
    phone(TWO, OTHER, sticky=True),
    phone(TWO, sticky=True),
    phone(TWO, shift=7),
    phone(TWO, shift=8),
    phone(TWO, shift=8, ranges=20),
    phone(TWO, ONE, shift=8, ranges=20),
    phone(TWO, ONE, ranges=20),
    phone(TWO, ONE, ranges=5),
    phone(TWO, ONE, ranges=4),
    phone(TWO, f"{ONE} away", ranges=4),
    phone(f"{ONE} away", ranges=4),
    frozenset(),
    phone(ONE, TWO, OTHER, ranges=12, shift=-3, sticky=True),
]


def test_a_service_lives_through_everything_however_it_is_written(
    three: Three,
) -> None:
    for rules in LIFE:
        assert_all_alike(three, rules)


def test_what_is_known_is_right_through_all_of_it(netns: str) -> None:
    """By one who keeps the namespace open, and looks only where it must."""
    with entered(netns) as namespace:
        for rules in (*LIFE, *reversed(LIFE)):
            plan = diff(netns, want(rules), namespace.observe())
            namespace.commit(plan)
            if namespace.known is not None:
                assert_as_foreseen(netns, namespace)
            assert_holds(netns, rules)
            assert diff(netns, want(rules), namespace.observe()).empty


def test_most_of_it_is_written_as_bytes_and_foreseen(netns: str) -> None:
    plain = [phone(ONE), phone(ONE, TWO), phone(ONE, TWO, shift=5), phone(ONE, TWO, ranges=20)]
    ways = [frozenset(one for one in rules if one.detour is None) for rules in plain]
    with entered(netns) as namespace:
        for rules in ways:
            plan = diff(netns, want(rules), namespace.observe())
            assert can_write(steps(plan))
            namespace.commit(plan)
            assert_as_foreseen(netns, namespace)


# -------------------------------------------------------------------------------- what stays


def shifted_lookup(rules: Sequence[Rule] | frozenset[Rule]) -> Lookup:
    """The one for what comes in."""
    (found,) = {
        lookup
        for one in rules
        if (lookup := lookup_of(one)) and lookup.chain is Chain.PREROUTING and lookup.shifted
    }
    return found


@pytest.mark.parametrize("shift", [None, 7], ids=["straight", "shifted"])
@pytest.mark.parametrize("share", [None, Share(2, (1,)), Share(9, (1, 4), client=True)])
def test_another_range_changes_and_counters_and_handles_stay(
    netns: str, share: Share | None, shift: int | None
) -> None:
    def made(number: int, **more: Any) -> list[Rule]:
        return [
            one if shift is None else replace(one, to_port=one.ports.first + shift)
            for one in many(number, share=share, **more)
            if one.ports is not None
        ]

    beside = [rule("udp 53", share=Share(3, (2,))), *sorted(WAYS, key=lambda one: one.key)[:3]]
    before = [*made(12), *beside]
    held(netns, before)
    NftablesArena(netns).brand()
    branded = {one.rule: (one.handle, one.packets) for one in observed(netns).live}
    mapped = observed(netns).mapped
    assert mapped
    assert sum(packets >= 1000 for _, packets in branded.values()) == 12
    longer = made(1, width=5)[0]
    for rules in (
        [*made(13), *beside],
        [longer, *made(13)[1:], *beside],
        [*made(12)[1:], *beside],
        [*made(9)[1:], *beside[1:]],
    ):
        assert held(netns, rules).table is Table.KEEP
        seen = {one.rule: (one.handle, one.packets) for one in observed(netns).live}
        assert seen.keys() == set(rules)
        stay = seen.keys() & branded.keys()
        assert len(stay) >= 8
        assert all(seen[one] == branded[one] for one in stay)
        assert observed(netns).mapped == mapped
        assert_holds(netns, rules)


def test_an_endpoint_less_touches_no_range_of_another_service(netns: str) -> None:
    other = many(12, at=VIPS[Family.IP], share=Share(2, (0,)))
    held(netns, [*phone(ONE, TWO), *other])
    NftablesArena(netns).brand()
    before = {one.rule: one.packets for one in observed(netns).live}
    held(netns, [*phone(ONE), *other])
    after = {one.rule: one.packets for one in observed(netns).live}
    assert all(before[one] == after[one] >= 1000 for one in other)


# ------------------------------------------------------------------------------------- strangers

SHIFTED = [replace(one, to_port=one.ports.first + 900) for one in many(4) if one.ports is not None]
MAP, PORTS = name(shifted_lookup(SHIFTED)), port_name(shifted_lookup(SHIFTED))
PAIR, SPAN = f"element inet portranger {PORTS}", f"element inet portranger {MAP}"

HARM = {
    "the first pair of a range": f"delete {PAIR} {{ 100 }}",
    "a pair in the middle": f"delete {PAIR} {{ 102 }}",
    "the last pair of a range": f"delete {PAIR} {{ 104 }}",
    "all pairs of a range": f"delete {PAIR} {{ 100, 101, 102, 103, 104 }}",
    "all pairs": f"flush map inet portranger {PORTS}",
    "another first pair": f"delete {PAIR} {{ 100 }}\nadd {PAIR} {{ 100 : 7 }}",
    "another pair": f"delete {PAIR} {{ 102 }}\nadd {PAIR} {{ 102 : 1000 }}",
    "another last pair": f"delete {PAIR} {{ 104 }}\nadd {PAIR} {{ 104 : 1005 }}",
    "a range shifted otherwise": (
        f"delete {PAIR} {{ 100, 101, 102, 103, 104 }}\n"
        f"add {PAIR} {{ 100 : 1, 101 : 2, 102 : 3, 103 : 4, 104 : 5 }}"
    ),
    "a pair more": f"add {PAIR} {{ 9999 : 8 }}",
    "a pair that goes on a range": f"add {PAIR} {{ 105 : 1005 }}",
    "a range less": f"delete {SPAN} {{ 100-104 }}",
    "a range more": f"add {SPAN} {{ 9999 : 10.9.9.9 }}",
    "a range more with its pair": f"add {SPAN} {{ 9999 : 10.9.9.9 }}\nadd {PAIR} {{ 9999 : 8 }}",
    "a shorter range": (
        f'delete {SPAN} {{ 100-104 }}\nadd {SPAN} {{ 100-103 comment "o" : 10.1.0.11 }}'
    ),
    "all ranges": f"flush map inet portranger {MAP}",
    "both maps": f"flush map inet portranger {MAP}\nflush map inet portranger {PORTS}",
    "the lookup": "flush chain inet portranger prerouting",
    "a lookup without the pairs": (
        "insert rule inet portranger prerouting ip daddr != 127.0.0.0/8 fib daddr type local"
        f" counter dnat ip to tcp dport map @{MAP}"
    ),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_what_a_stranger_does_to_a_shifted_map_is_seen_and_undone(netns: str, harm: str) -> None:
    held(netns, SHIFTED)
    nft(netns, harm)
    seen = observed(netns)
    assert not diff(netns, want(SHIFTED), seen).empty, "it goes unseen"
    assert not held(netns, SHIFTED).empty
    assert_holds(netns, SHIFTED)
    listed = within(netns, "nft", "list", "map", "inet", "portranger", PORTS)
    for port, to in ((n, n + 900) for one in range(100, 140, 10) for n in range(one, one + 5)):
        assert f"{port} : {to}" in listed
    assert listed.count(" : ") == 1 + 20  # the first is its type


@pytest.mark.parametrize("harm", ["a pair in the middle", "another last pair", "a range less"])
def test_the_script_undoes_it_as_well(netns: str, harm: str) -> None:
    held(netns, SHIFTED)
    nft(netns, HARM[harm])
    by_script(netns, want(frozenset(SHIFTED)))
    assert_holds(netns, SHIFTED)


WRITTEN = {
    "another seed": "jhash ip saddr . tcp sport mod 2 seed 0x1 1",
    "an offset": "jhash ip saddr . tcp sport mod 2 seed 0x70727467 offset 1 1",
    "another modulus": "jhash ip saddr . tcp sport mod 3 seed 0x70727467 1",
    "another number": "jhash ip saddr . tcp sport mod 2 seed 0x70727467 0",
    "the address alone": "jhash ip saddr mod 2 seed 0x70727467 1",
    "another port": "jhash ip saddr . tcp dport mod 2 seed 0x70727467 1",
    "another address": "jhash ip daddr . tcp sport mod 2 seed 0x70727467 1",
    "all but one": "jhash ip saddr . tcp sport mod 2 seed 0x70727467 != 1",
    "no share": "",
}
OWN_WORDS = "ip daddr != 127.0.0.0/8 fib daddr type local"


@pytest.mark.parametrize("share", WRITTEN.values(), ids=WRITTEN)
def test_a_share_that_is_nearly_ours_is_not_taken_for_it(netns: str, share: str) -> None:
    ours = rule("tcp 80", share=Share(2, (1,)))
    held(netns, [ours])
    (live,) = observed(netns).live
    nft(
        netns,
        f"replace rule inet portranger prerouting handle {live.handle}"
        f' {OWN_WORDS} tcp dport 80 {share} counter dnat ip to 10.1.0.11 comment "o"',
    )
    assert ours not in rules_of(observed(netns))
    held(netns, [ours])
    assert_holds(netns, [ours])


OTHERS = {
    "loopback, too": "fib daddr type local tcp dport 80",
    "other addresses, too": "ip daddr != 127.0.0.0/8 tcp dport 80",
    "by the source": "ip daddr != 127.0.0.0/8 fib saddr type local tcp dport 80",
    "by the link as well": "ip daddr != 127.0.0.0/8 fib daddr . iif type local tcp dport 80",
    "not its own": "ip daddr != 127.0.0.0/8 fib daddr type != local tcp dport 80",
    "another loopback": "ip daddr != 127.0.0.0/16 fib daddr type local tcp dport 80",
    "of one address as well": f"ip daddr 192.0.2.1 {OWN_WORDS} tcp dport 80",
}


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_what_is_for_nearly_the_nodes_addresses_is_not_taken_for_ours(
    netns: str, words: str
) -> None:
    ours = rule("tcp 80")
    held(netns, [ours])
    (live,) = observed(netns).live
    nft(
        netns,
        f"replace rule inet portranger prerouting handle {live.handle} {words} counter"
        ' dnat ip to 10.1.0.11 comment "o"',
    )
    assert ours not in rules_of(observed(netns))
    held(netns, [ours])
    assert_holds(netns, [ours])


WAY = detour(Family.IP, published=addresses(Family.IP, 2, 1), links=("br0", "br1"))
BACK = 'iifname . oifname { "br0" . "br0", "br1" . "br1" }'
ASKED = "ct original ip daddr { 10.9.0.1, 10.9.0.2 }"
NEARLY = {
    "a link less": f'iifname . oifname {{ "br0" . "br0" }} ct status dnat {ASKED}',
    "from one link to another": f'iifname . oifname {{ "br0" . "br1" }} ct status dnat {ASKED}',
    "an address less": f"{BACK} ct status dnat ct original ip daddr {{ 10.9.0.1 }}",
    "a network": f"{BACK} ct status dnat ct original ip daddr {{ 10.9.0.0/30 }}",
    "of the answer": f"{BACK} ct status dnat ct reply ip daddr {{ 10.9.0.1, 10.9.0.2 }}",
    "whatever was translated": f"{BACK} {ASKED}",
    "whatever was asked for": f"meta nfproto ipv4 {BACK} ct status dnat",
    "to an endpoint": f"ip daddr 10.9.0.7 ct status dnat {ASKED}",
    "to an endpoint as well": f"{BACK} ip daddr 10.9.0.7 ct status dnat {ASKED}",
    "to a network": f"ip daddr {{ 10.9.0.0/24 }} ct status dnat {ASKED}",
    "of any flow": f"meta nfproto ipv4 {BACK}",
}


@pytest.mark.parametrize("words", NEARLY.values(), ids=NEARLY)
def test_a_detour_that_is_nearly_ours_is_not_taken_for_it(netns: str, words: str) -> None:
    held(netns, [WAY])
    (live,) = observed(netns).live
    nft(
        netns,
        f"replace rule inet portranger postrouting handle {live.handle} {words} counter masquerade"
        ' comment "node"',
    )
    assert WAY not in rules_of(observed(netns))
    held(netns, [WAY])
    assert_holds(netns, [WAY])
