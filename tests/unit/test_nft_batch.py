"""Steps as bytes, told in the words of `nft --debug=netlink`, which says the same of such rules;
tests/netns has the kernel read them, and nft list them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from agent.kernel.netlink import attributes
from rules.model import Chain, Desired, Foreign, Live, Observed, Rule
from rules.nft_batch import (
    ACK,
    DELCHAIN,
    DELRULE,
    DELSET,
    DELSETELEM,
    DELTABLE,
    ECHO,
    EXCL,
    MOST_ECHOED,
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    batch,
    can_write,
)
from rules.nft_foreseen import carried_out
from rules.nft_steps import AddRule, Fill
from rules.plan import diff
from rules.values import replace
from tests.unit.samples import answerable, egress, forward, from_inside, steps

META = {6: "iifname", 7: "oifname", 15: "nfproto", 16: "l4proto"}
HEADERS = {1: "network", 2: "transport"}
COMPARED = {0: "eq", 3: "lte", 5: "gte"}


def messages(data: bytes) -> Iterator[tuple[int, int, dict[int, bytes]]]:
    """All but the frame."""
    while data:
        length, kind, flags, _, _ = struct.unpack_from("=IHHII", data)
        if kind > 255:
            yield kind, flags, attributes(data[20:length])
        data = data[(length + 3) & ~3 :]


def expressions(raw: bytes) -> Iterator[str]:
    while raw:
        (length,) = struct.unpack_from("=H", raw)
        found = attributes(raw[4:length])
        yield told(found[1].rstrip(b"\0").decode(), attributes(found[2]))
        raw = raw[(length + 3) & ~3 :]


def told(kind: str, found: dict[int, bytes]) -> str:
    numbers = {key: int.from_bytes(value, "big") for key, value in found.items()}
    match kind:
        case "meta":
            return f"meta load {META[numbers[2]]}"
        case "payload":
            return f"payload {numbers[4]}b @ {HEADERS[numbers[2]]} + {numbers[3]}"
        case "cmp":
            return f"cmp {COMPARED[numbers[2]]} {attributes(found[3])[1].hex()}"
        case "immediate":
            return f"immediate {attributes(found[2])[1].hex()}"
        case "nat":
            return f"nat {('snat', 'dnat')[numbers[1]]} {numbers[2]}"
        case "lookup":
            name = found[1].decode().rstrip(chr(0))
            return f"lookup {name}"
    return kind


def written(*rules: Rule, observed: Observed | None = None) -> bytes:
    plan = diff("blue", Desired(rules=frozenset(rules)), observed or Observed(mapped={}))
    return batch(steps(plan))


def rule_of(*rules: Rule) -> list[str]:
    (found,) = (found for kind, _, found in messages(written(*rules)) if kind == NEWRULE)
    return [*expressions(found[4])]


ETH0 = ["meta load iifname", "cmp eq " + b"eth0".ljust(16, b"\0").hex()]
IPV4, IPV6 = (["meta load nfproto", f"cmp eq {version}"] for version in ("02", "0a"))
TCP, UDP = (
    ["meta load l4proto", f"cmp eq {number}", "payload 2b @ transport + 2"]
    for number in ("06", "11")
)
GUEST = "0a000202"
TO_GUEST = [f"immediate {GUEST}", "nat dnat 2"]
TO_LOOPBACK = ["payload 4b @ network + 16", "cmp eq 7f000001"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(
            forward("tcp 1000-8000"),
            [*ETH0, *IPV4, *TCP, "cmp gte 03e8", "cmp lte 1f40", "counter", *TO_GUEST],
            id="a range",
        ),
        pytest.param(
            forward("udp 22", to="fd10::2"),
            [
                *ETH0,
                *IPV6,
                *UDP,
                "cmp eq 0016",
                "counter",
                f"immediate fd10{2:028x}",
                "nat dnat 10",
            ],
            id="a port, of IPv6",
        ),
        pytest.param(forward(None), [*ETH0, *IPV4, "counter", *TO_GUEST], id="all"),
        pytest.param(
            from_inside("tcp 22"),
            [*IPV4, *TO_LOOPBACK, *TCP, "cmp eq 0016", "counter", *TO_GUEST],
            id="from inside",
        ),
        pytest.param(
            egress(),
            [*IPV4, "payload 4b @ network + 12", "cmp eq " + GUEST, "counter", "masq"],
            id="masquerade",
        ),
    ],
)
def test_a_rule_is_written_as_nft_writes_it(rule: Rule, expected: list[str]) -> None:
    assert rule_of(rule) == expected


def test_source_nat_is_on_the_link_that_a_packet_leaves_by() -> None:
    said = rule_of(answerable())
    assert said[0] == "meta load oifname"
    assert said[-1] == "nat snat 2"


CROWD = [forward(f"tcp {port}") for port in range(10, 40, 2)]


def test_a_first_table_is_one_batch_of_which_only_the_last_is_acknowledged() -> None:
    found = list(messages(written(*CROWD, egress())))
    assert [kind for kind, _, _ in found] == [
        NEWTABLE,
        *[NEWCHAIN] * 2,
        NEWSET,
        NEWSETELEM,
        *[NEWRULE] * 2,
    ]
    assert [bool(flags & ACK) for _, flags, _ in found] == [False] * 6 + [True]
    assert found[0][1] & EXCL
    assert "lookup prerouting-ip-tcp-eth0" in [*expressions(found[-1][2][4])]


@pytest.mark.parametrize("number", [MOST_ECHOED - 1, MOST_ECHOED + 1])
def test_handles_are_asked_for_unless_there_would_be_no_room_for_the_answers(number: int) -> None:
    owners = [replace(egress(), owner=str(n)) for n in range(number)]
    echoed = {
        bool(flags & ECHO) for kind, flags, _ in messages(written(*owners)) if kind == NEWRULE
    }
    assert echoed == {number <= MOST_ECHOED}


def held(*live: Live, **more: object) -> Observed:
    return replace(Observed(live=live, chains=frozenset(Chain), table=True, mapped={}), **more)


def test_what_goes_is_named_by_its_handle_name_or_ports() -> None:
    strays = (
        Foreign("output", 9, "accept"),
        Foreign("", 0, "set mine", "set", "mine"),
        Foreign("", 0, "element", "element", "a-map", (0, 9)),
        Foreign("", 0, "element", "element", "a-map", (9, 65535)),
    )
    seen = held(Live(forward(), 4), Live(egress(), 5), foreign=strays)
    found = list(messages(written(egress(), observed=seen)))
    kinds = [kind for kind, _, _ in found]
    assert kinds == [DELRULE, DELSETELEM, DELSETELEM, DELSET, DELRULE]
    assert [int.from_bytes(found[n][2][3], "big") for n in (0, 4)] == [9, 4]
    assert found[3][2][2] == b"mine\0"
    assert [len(found[n][2][3]) for n in (1, 2)] == [40, 16]  # an interval may have no end


def test_a_table_goes_and_is_made_anew() -> None:
    anew = list(messages(written(egress(), observed=held(unsound="flags"))))
    made = [DELTABLE, NEWTABLE, NEWCHAIN, NEWCHAIN, NEWRULE, NEWRULE]
    assert [kind for kind, _, _ in anew] == [*made, DELCHAIN]
    gone = list(messages(written(observed=held(Live(egress(), 5)))))
    assert [kind for kind, _, _ in gone] == [DELTABLE]


def test_a_shifted_range_is_for_libnftables() -> None:
    shifted = replace(forward("tcp 9000-9009"), to_port=7000)
    assert not can_write([AddRule(egress()), AddRule(shifted)])
    assert can_write([AddRule(egress()), AddRule(forward())])


def test_what_cannot_be_an_element_is_not_written_as_one() -> None:
    lookup = forward().lookup
    assert lookup is not None
    with pytest.raises(ValueError, match="Rule"):
        batch([Fill(lookup, [egress()])])


# ------------------------------------------------------------------------------- what is foreseen


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([], [forward(), egress()], id="from nothing to rules"),
        pytest.param([], [*CROWD, egress()], id="from nothing to a map"),
        pytest.param([forward(), egress()], [egress(), from_inside()], id="rules come and go"),
        pytest.param(CROWD[:7], CROWD, id="rules become a map"),
        pytest.param(CROWD, CROWD[:3], id="a map becomes rules"),
        pytest.param(CROWD, [], id="all goes"),
    ],
)
def test_after_a_plan_there_is_what_it_says(before: list[Rule], after: list[Rule]) -> None:
    """And from there nothing is left to do."""
    seen = Observed(mapped={})
    for number, rules in enumerate((before, after), 1):
        plan = diff("blue", Desired(rules=frozenset(rules)), seen)
        seen = carried_out(steps(plan), seen, range(100 * number, 100 * number + 99))
        assert {live.rule for live in seen.live} == set(rules)
        assert diff("blue", Desired(rules=frozenset(rules)), seen).same_rules
