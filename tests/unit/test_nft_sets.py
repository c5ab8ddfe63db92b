"""Sets of peers: what makes them as they should be, as commands, words and bytes, and back from a
listing."""

from __future__ import annotations

import struct
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from rules.model import (
    SET,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.nft import OURS, commands
from rules.nft_batch import batch
from rules.nft_listing import decode as listed_table
from rules.nft_script import script, statement
from rules.nft_sets import (
    AT_ONCE,
    DropSet,
    Join,
    Leave,
    MakeSet,
    carried_out,
    command,
    decode,
    entering,
    leaving,
    line,
    messages,
    named,
)
from rules.nft_steps import AddRule, DropRule, DropStray, MakeChain
from rules.nft_transactions import transactions
from rules.plan import diff
from rules.values import replace
from tests.unit.samples import steps
from tests.unit.test_nft import CHAINS, COUNTER, TABLE, Json, field, listed
from tests.unit.test_plan import (
    FENCE,
    GATE,
    GUARD,
    RESUMING,
    WEB,
    fenced,
    held,
    holding,
    some,
    want,
)

WEB6, MAIL = Peers(Family.IP6, "aa"), Peers(Family.IP, "bb")
NAME = "peers-ip-aa"


# ---------------------------------------------------------------------------------------- steps


def test_sets_are_made_filled_and_emptied_in_order() -> None:
    before = {WEB: some("10.1.0.0/31", "10.1.0.5"), MAIL: some("10.9.0.0/16")}
    after = {WEB: some("10.1.0.0", "10.1.0.5"), WEB6: some("fd00::1")}
    assert entering(before, after) == [
        Leave(WEB, some("10.1.0.0/31")),
        Join(WEB, some("10.1.0.0")),
        MakeSet(WEB6),
        Join(WEB6, some("fd00::1")),
    ]
    assert leaving(before, after) == [DropSet(MAIL)]


def test_an_empty_set_is_made_and_not_filled() -> None:
    assert entering({}, {WEB: some()}) == [MakeSet(WEB)]
    assert entering({WEB: some()}, {WEB: some()}) == []


def test_steps_lead_from_the_one_to_the_other() -> None:
    before = {WEB: some("10.1.0.0/31"), MAIL: some("10.9.0.0/16")}
    after = {WEB: some("10.1.0.0"), WEB6: some()}
    done = [*entering(before, after), AddRule(GUARD), *leaving(before, after)]
    assert carried_out(done, before) == after


def test_strangers_go_first_and_what_is_not_named_any_more_last() -> None:
    """A rule that is new needs its set; one that goes must be gone before its set is."""
    stray = Foreign("", 0, f"set {NAME}", SET, NAME)
    before = replace(holding(*FENCE, bb=some("10.1.0.1")), foreign=(stray,))
    old = replace(GATE, peers=MAIL)
    before = replace(before, live=(*before.live[:1], Live(old, 2), before.live[2]))
    found = steps(diff("blue", fenced(*FENCE, aa=some("10.1.0.2")), before))
    assert found == [
        DropStray(SET, NAME),
        MakeSet(WEB),
        Join(WEB, some("10.1.0.2")),
        DropRule("forward", 2),
        AddRule(GATE, first=False, behind=1),
        DropSet(MAIL),
    ]


def test_a_new_set_is_filled_before_a_rule_looks_into_it() -> None:
    desired = fenced(*FENCE, aa=some("10.1.0.1"))
    parts = transactions(diff("blue", desired, held(RESUMING, GUARD)))
    assert parts == [
        [MakeSet(WEB), Join(WEB, some("10.1.0.1"))],
        [AddRule(GATE, first=False, behind=1)],
    ]


def test_in_a_first_table_sets_are_filled_before_anything_is_guarded() -> None:
    desired = fenced(*FENCE, aa=some("10.1.0.1"))
    first, then = transactions(diff("blue", desired, Observed(mapped={})))
    assert first[-1] == Join(WEB, some("10.1.0.1"))
    assert [*map(type, then)] == [AddRule] * 3


def test_for_elements_alone_once_is_enough() -> None:
    desired = fenced(*FENCE, aa=some("10.1.0.1"))
    (part,) = transactions(diff("blue", desired, holding(*FENCE, aa=some("10.1.0.9"))))
    assert part == [Leave(WEB, some("10.1.0.9")), Join(WEB, some("10.1.0.1"))]


def test_in_a_table_made_anew_all_sets_are_new() -> None:
    before = replace(
        holding(*FENCE, aa=some("10.1.0.1")), unsound="flags", chains=frozenset(), mapped={}
    )
    found = steps(diff("blue", fenced(*FENCE, aa=some("10.1.0.1")), before))
    assert [MakeSet(WEB), Join(WEB, some("10.1.0.1"))] == [
        one for one in found if isinstance(one, MakeSet | Join | Leave | DropSet)
    ]


def test_what_lets_open_flows_pass_comes_first_and_guards_last() -> None:
    found = steps(diff("blue", fenced(*FENCE, aa=some()), Observed(mapped={})))
    written = [one.rule for one in found if isinstance(one, AddRule)]
    assert written == [RESUMING, GATE, GUARD]


@pytest.mark.parametrize(
    ("there", "new", "first", "behind"),
    [
        pytest.param((RESUMING, GUARD), GATE, False, 1, id="a gate, behind what most packets take"),
        pytest.param((GUARD,), GATE, True, 0, id="a gate, before the guard"),
        pytest.param((GATE,), GUARD, False, 0, id="a guard, behind all"),
        pytest.param((GUARD, GATE), RESUMING, True, 0, id="what most packets take, before all"),
    ],
)
def test_a_rule_comes_where_it_belongs(
    there: tuple[Rule, ...], new: Rule, first: bool, behind: int
) -> None:
    plan = diff("blue", fenced(*there, new, aa=some()), holding(*there, aa=some()))
    assert [one for one in steps(plan) if isinstance(one, AddRule)] == [
        AddRule(new, first=first, behind=behind)
    ]


# --------------------------------------------------------------------------------- commands, words


@pytest.mark.parametrize(
    ("step", "told", "said"),
    [
        pytest.param(
            MakeSet(WEB),
            {"add": {"set": {"name": NAME, "type": "ipv4_addr", "flags": ["interval"]}}},
            f"add set inet portranger {NAME} {{ type ipv4_addr; flags interval; }}",
            id="made",
        ),
        pytest.param(
            MakeSet(WEB6),
            {"add": {"set": {"name": "peers-ip6-aa", "type": "ipv6_addr", "flags": ["interval"]}}},
            "add set inet portranger peers-ip6-aa { type ipv6_addr; flags interval; }",
            id="made for the other family",
        ),
        pytest.param(
            DropSet(WEB),
            {"delete": {"set": {"name": NAME}}},
            f"delete set inet portranger {NAME}",
            id="dropped",
        ),
        pytest.param(
            Join(WEB, some("10.9.0.0/16", "10.1.0.5")),
            {
                "add": {
                    "element": {
                        "name": NAME,
                        "elem": ["10.1.0.5", {"prefix": {"addr": "10.9.0.0", "len": 16}}],
                    }
                }
            },
            f"add element inet portranger {NAME} {{ 10.1.0.5/32, 10.9.0.0/16 }}",
            id="joined, in order",
        ),
        pytest.param(
            Leave(WEB6, some("fd00::1", "fd00::/64")),
            {
                "delete": {
                    "element": {
                        "name": "peers-ip6-aa",
                        "elem": [{"prefix": {"addr": "fd00::", "len": 64}}, "fd00::1"],
                    }
                }
            },
            "delete element inet portranger peers-ip6-aa { fd00::/64, fd00::1/128 }",
            id="left",
        ),
    ],
)
def test_a_step_reads(step: Any, told: Json, said: str) -> None:
    ((verb, target),) = told.items()
    ((kind, value),) = target.items()
    assert command(step, OURS) == {verb: {kind: {**OURS, **value}}}
    assert commands([step]) == [command(step, OURS)]
    assert line(step, "inet portranger") == said


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        pytest.param(
            RESUMING, "meta nfproto ipv4 ct state established,related counter accept", id="open"
        ),
        pytest.param(GUARD, "ip daddr 10.0.2.2 counter drop", id="a guard"),
        pytest.param(
            GATE, f"ip daddr 10.0.2.2 tcp dport 80-90 ip saddr @{NAME} counter accept", id="a gate"
        ),
        pytest.param(
            replace(GATE, destination=None, source=GUARD.destination),
            f"ip saddr 10.0.2.2 tcp dport 80-90 ip daddr @{NAME} counter accept",
            id="a gate for what leaves",
        ),
        pytest.param(
            replace(GATE, protocol=Protocol.SCTP, peers=None),
            "ip daddr 10.0.2.2 sctp dport 80-90 counter accept",
            id="a gate for everybody",
        ),
        pytest.param(
            replace(GATE, protocol=None, ports=None),
            f"ip daddr 10.0.2.2 ip saddr @{NAME} counter accept",
            id="a gate for everything",
        ),
    ],
)
def test_a_rule_reads(rule: Rule, said: str) -> None:
    assert statement(rule) == f'{said} comment "{rule.owner}"'


def test_a_script_makes_the_chain_the_sets_and_the_rules() -> None:
    text = script(diff("blue", fenced(*FENCE, aa=some("10.1.0.1")), Observed(mapped={})))
    assert [row.split(" {")[0].split(" comment")[0] for row in text.splitlines()[2:]] == [
        "# transaction 1 of 2",
        "create table inet portranger",
        "add chain inet portranger forward",
        f"add set inet portranger {NAME}",
        f"add element inet portranger {NAME}",
        "# transaction 2 of 2",
        f"add rule inet portranger forward {statement(RESUMING).partition(' comment')[0]}",
        f"add rule inet portranger forward {statement(GATE).partition(' comment')[0]}",
        f"add rule inet portranger forward {statement(GUARD).partition(' comment')[0]}",
    ]
    assert "{ type filter hook forward priority -1; policy accept; }" in text


# ---------------------------------------------------------------------------------------- bytes


def attributes(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while data:
        size, kind = struct.unpack_from("=HH", data)
        assert size >= 4
        found.append((kind & 0x3FFF, data[4:size]))
        data = data[size + -size % 4 :]
    return found


def ends(body: bytes) -> list[tuple[str, bool]]:
    """The keys of the elements in a message, and whether each is the end of an interval."""
    found = []
    for _, element in attributes(dict(attributes(body))[3]):
        parts = dict(attributes(element))
        key = dict(attributes(parts[1]))[1]
        found.append((str(ip_address(key)), parts.get(3) == b"\0\0\0\1"))
    return found


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param(some("10.1.0.5"), [("10.1.0.5", False), ("10.1.0.6", True)], id="an address"),
        pytest.param(
            some("10.9.0.0/16"), [("10.9.0.0", False), ("10.10.0.0", True)], id="a network"
        ),
        pytest.param(some("255.255.255.255"), [("255.255.255.255", False)], id="the last address"),
        pytest.param(some("128.0.0.0/1"), [("128.0.0.0", False)], id="up to the last address"),
        pytest.param(some("0.0.0.0/0"), [("0.0.0.0", False)], id="all addresses"),
        pytest.param(some("ffff::/16"), [("ffff::", False)], id="up to the last one of IPv6"),
        pytest.param(
            some("10.0.0.2", "10.0.0.1"),
            [("10.0.0.1", False), ("10.0.0.2", True), ("10.0.0.2", False), ("10.0.0.3", True)],
            id="neighbours, in order",
        ),
    ],
)
def test_an_interval_ends_behind_its_last_address(
    members: Members, expected: list[tuple[str, bool]]
) -> None:
    family = Family.of(next(iter(members)).network_address)
    for step in (Join(Peers(family, "aa"), members), Leave(Peers(family, "aa"), members)):
        ((_, _, body),) = messages(step, b"")
        assert ends(body) == expected


def test_many_members_take_several_messages_of_which_none_is_too_long() -> None:
    crowd = frozenset(ip_network(f"fd00::{number:x}") for number in range(1, 2 * AT_ONCE + 2))
    bodies = [body for _, _, body in messages(Join(WEB6, crowd), b"")]
    assert [len(ends(body)) // 2 for body in bodies] == [AT_ONCE, AT_ONCE, 1]
    assert all(len(body) < 65536 for body in bodies)


def test_a_batch_holds_what_the_sets_need() -> None:
    found = steps(diff("blue", fenced(*FENCE, aa=some("10.1.0.1")), Observed(mapped={})))
    data = batch(found, 7)
    kinds = []
    while data:
        size, kind = struct.unpack_from("=IH", data)
        kinds.append(kind & 0xFF)
        data = data[size:]
    assert kinds == [16, 0, 3, 9, 12, 6, 6, 6, 17]  # begin, table, chain, set, elements, rules, end


# ----------------------------------------------------------------------------------------- back


@pytest.mark.parametrize(
    ("name", "peers"),
    [
        (NAME, WEB),
        ("peers-ip6-0123456789abcdef", Peers(Family.IP6, "0123456789abcdef")),
        *((other, None) for other in ("peers-ip-", "peers-ip-xyz", "peers-arp-aa", "ip-aa", "")),
        *((other, None) for other in ("peers-ip-AA", "peers-ip-a-a", "Peers-ip-aa", None, 7)),
    ],
)
def test_a_name_is_one_of_ours_or_not(name: object, peers: Peers | None) -> None:
    assert named(name) == peers
    assert peers is None or str(peers) == name


SPEC: Json = {**OURS, "name": NAME, "type": "ipv4_addr", "flags": ["interval"], "handle": 5}


@pytest.mark.parametrize(
    ("elements", "members"),
    [
        pytest.param([], some(), id="nobody"),
        pytest.param(["10.1.0.5"], some("10.1.0.5"), id="an address"),
        pytest.param(
            [{"prefix": {"addr": "10.9.0.0", "len": 16}}, "10.1.0.5"],
            some("10.9.0.0/16", "10.1.0.5"),
            id="a network",
        ),
        pytest.param([{"range": ["10.0.0.1", "10.0.0.6"]}], None, id="a range"),
        pytest.param([{"elem": {"val": "10.0.0.1", "comment": "x"}}], None, id="a comment"),
        pytest.param(["fd00::1"], None, id="another family"),
        pytest.param([{"prefix": {"addr": "fd00::", "len": 8}}], None, id="another family's net"),
        pytest.param([{"prefix": {"addr": "10.0.0.1", "len": 8}}], None, id="a crooked network"),
        pytest.param([7], None, id="a number"),
        pytest.param(7, None, id="no list"),
        pytest.param([None], None, id="nothing"),
    ],
)
def test_a_set_holds(elements: object, members: Members | None) -> None:
    assert decode({**SPEC, "elem": elements}, WEB, OURS) == members


def test_a_set_without_elements_is_empty() -> None:
    assert decode(SPEC, WEB, OURS) == some()
    assert decode({**SPEC, "flags": "interval"}, WEB, OURS) == some()  # as nft 1.1.4 lists it


@pytest.mark.parametrize(
    "other",
    [
        {"type": "ipv6_addr"},
        {"flags": ["interval", "timeout"]},
        {"flags": []},
        {"flags": "constant"},
        {"timeout": 60},
        {"size": 65535},
        {"stmt": [{"counter": None}]},
        {"name": "peers-ip-bb"},
        {"table": "other"},
    ],
    ids=str,
)
def test_a_set_that_is_not_as_we_make_it_is_not_ours(other: Json) -> None:
    assert decode({**SPEC, **other}, WEB, OURS) is None


def row(rule: Rule, handle: int, *matches: Json, verdict: str) -> Json:
    expr = [*matches, COUNTER, {verdict: None}]
    return listed(*expr, chain="forward", handle=handle, comment=rule.owner)


NFPROTO: Json = {"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv4"}}
STATE: Json = {
    "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}
}
RESUMES = row(RESUMING, 7, NFPROTO, STATE, verdict="accept")
LETS_IN = row(
    GATE,
    8,
    field("ip", "daddr", "10.0.2.2"),
    field("tcp", "dport", {"range": [80, 90]}),
    field("ip", "saddr", f"@{NAME}"),
    verdict="accept",
)
DROPS = row(GUARD, 9, field("ip", "daddr", "10.0.2.2"), verdict="drop")
ELEMENTS: Json = {"set": {**SPEC, "elem": ["10.1.0.1"]}}


def seen(*entries: Json) -> Observed:
    return listed_table([TABLE, *CHAINS, *entries])


def test_a_listing_has_its_rules_and_sets() -> None:
    found = seen(ELEMENTS, RESUMES, LETS_IN, DROPS)
    assert [(live.rule, live.handle) for live in found.live] == [
        (RESUMING, 7),
        (GATE, 8),
        (GUARD, 9),
    ]
    assert found.sets == {WEB: some("10.1.0.1")}
    assert (found.foreign, found.unsound) == ((), "")


def test_a_guard_before_others_is_not_ours() -> None:
    found = seen(ELEMENTS, DROPS, RESUMES, LETS_IN)
    assert [(one.handle, one.text) for one in found.foreign] == [
        (9, f"guard of {GUARD.owner} before other rules")
    ]


def test_a_set_of_another_kind_goes_with_the_rules_that_look_into_it() -> None:
    found = seen({"set": {**SPEC, "flags": ["interval", "timeout"]}}, RESUMES, LETS_IN, DROPS)
    assert [(one.kind, one.handle, one.name) for one in found.foreign] == [
        ("rule", 8, ""),
        (SET, 0, NAME),
    ]
    assert found.sets == {}
    assert steps(diff("blue", fenced(*FENCE, aa=some()), found)) == [
        DropRule("forward", 8),
        DropStray(SET, NAME),
        MakeSet(WEB),
        AddRule(GATE, first=False, behind=7),
    ]


def test_what_is_in_a_set_is_known_also_where_the_table_is_unsound() -> None:
    """What stays is put back into the new one."""
    found = seen(ELEMENTS, RESUMES, LETS_IN, DROPS, {"chain": {"name": "mine"}})
    assert found.unsound
    assert found.sets == {WEB: some("10.1.0.1")}


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            row(GATE, 8, field("ip", "saddr", f"@{NAME}"), verdict="accept"),
            id="peers without a machine",
        ),
        pytest.param(
            row(
                GATE,
                8,
                field("ip", "daddr", "10.0.2.2"),
                field("ip", "daddr", f"@{NAME}"),
                verdict="accept",
            ),
            id="peers at the end of the machine",
        ),
        pytest.param(
            row(
                GATE,
                8,
                field("ip", "daddr", "10.0.2.2"),
                field("ip", "saddr", f"@{NAME}", op="!="),
                verdict="accept",
            ),
            id="all but the peers",
        ),
        pytest.param(
            row(GATE, 8, field("ip", "saddr", "@mine"), verdict="accept"), id="another set"
        ),
        pytest.param(
            row(GATE, 8, field("ip6", "saddr", f"@{NAME}"), verdict="accept"),
            id="a set of the other family",
        ),
        pytest.param(row(GUARD, 8, NFPROTO, STATE, verdict="drop"), id="open flows dropped"),
        pytest.param(
            row(GATE, 8, field("ip", "daddr", "10.0.2.2"), STATE, verdict="accept"),
            id="open flows of one machine",
        ),
        pytest.param(row(GATE, 8, verdict="accept"), id="everything"),
        pytest.param(row(GATE, 8, NFPROTO, verdict="continue"), id="another verdict"),
    ],
)
def test_what_we_never_write_is_not_ours(entry: Json) -> None:
    found = seen(ELEMENTS, entry)
    assert [one.handle for one in found.foreign] == [8]
    assert found.live == ()


def test_no_verdict_of_a_filter_is_ours_elsewhere() -> None:
    entry = listed(field("ip", "daddr", "10.0.2.2"), COUNTER, {"drop": None}, chain="prerouting")
    assert seen(entry).live == ()


def test_without_any_filter_there_is_no_set() -> None:
    first, then = transactions(diff("blue", want(), holding(*FENCE, aa=some("10.1.0.1"))))
    assert [*map(type, first)] == [DropRule] * 3  # what asks the sets
    assert len(then) == 1  # the table goes, and all sets with it
    assert carried_out([], {}) == {}
    assert steps(diff("blue", Desired(), Observed(mapped={}))) == []


def test_the_chain_is_a_filter_one_step_before_those_of_others() -> None:
    place = {"type": "filter", "hook": "forward", "prio": -1, "policy": "accept"}
    assert commands([MakeChain(Chain.FORWARD)]) == [
        {"add": {"chain": {**OURS, "name": "forward", **place}}}
    ]
