"""The map of a namespace's ports: what is drawn where, what the legend says, and that nothing is
lost, however narrow the terminal and however many the ranges."""

from __future__ import annotations

import re
from ipaddress import ip_address

import pytest

from rules.holdings import holdings
from rules.model import OWN, Chain, Family, Live, Protocol, Rule, Share
from rules.port_axis import LETTERS, Span, Style, ruler, span_of
from rules.port_map import port_map
from rules.ports import PortRange
from tests.unit.samples import egress, forward, from_inside, ports

ANOTHER = "VirtualMachine/default/another/red"


def live(rule: Rule, packets: int = 0) -> Live:
    return Live(rule, 1, packets, 60 * packets)


def drawn(*rules: Live, **style: object) -> list[str]:
    return list(port_map(holdings(rules), Style(**style)))  # type: ignore[arg-type]


def published(text: str, *, at: str = "", to: str = "10.1.0.11", to_port: int = 0) -> Rule:
    """Ports of a Service, at the node or at that address; one of two endpoints."""
    protocol, _, numbers = text.partition(" ")
    return Rule(
        chain=Chain.PREROUTING,
        family=Family.IP,
        owner=f"Service/default/phone/{protocol}",
        protocol=Protocol(protocol),
        ports=ports(numbers),
        destination=ip_address(at) if at else OWN[Family.IP],
        to=ip_address(to),
        to_port=to_port or None,
        share=Share(2, (int(to[-1]) % 2,)),
    )


def test_a_namespace_is_drawn_with_an_axis_for_each_protocol_and_a_legend() -> None:
    picture = drawn(
        live(forward("tcp 22"), 3),
        live(from_inside("tcp 22"), 4),
        live(forward("tcp 22", to="fd10:0:2::2")),
        live(forward("tcp 80"), 500),
        live(forward("tcp 1000-8000"), 1200),
        live(forward("tcp 8001", owner=ANOTHER)),
        live(forward("udp 5060"), 1),
        live(egress(), 99),
        width=72,
    )
    assert (
        "\n".join(picture)
        == """\
ports 1 to 9000, 129 ports a column
tcp on eth0: 4 ranges, 7004 of 65535 ports
  *......CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCD.......
  |1             |2000           |4000          |6000           |8000
  closer: 20 to 90, 1.0 ports a column
  .A.........................................................B..........
  |20      |30       |40       |50       |60       |70       |80
  *  several in one column
  .  1-21           21 free
  A  22              1 port     7 packets    420 bytes  #
     -> 10.0.2.2, fd10:0:2::2  VirtualMachine/default/vm/default
  .  23-79          57 free
  B  80              1 port   500 packets  30000 bytes  #####
     -> 10.0.2.2  VirtualMachine/default/vm/default
  .  81-999        919 free
  C  1000-8000   7001 ports  1200 packets  72000 bytes  ##########
     -> 10.0.2.2  VirtualMachine/default/vm/default
  D  8001            1 port     0 packets      0 bytes
     -> 10.0.2.2  VirtualMachine/default/another/red
  .  8002-65535  57534 free
udp on eth0: 1 range, 1 of 65535 ports
  .......................................A..............................
  |1             |2000           |4000          |6000           |8000
  .  1-5059       5059 free
  A  5060            1 port  1 packets  60 bytes  #
     -> 10.0.2.2  VirtualMachine/default/vm/default
  .  5061-65535  60475 free"""
    )


def test_the_ports_of_a_node_are_drawn_by_the_address_they_are_published_at() -> None:
    picture = drawn(
        live(published("udp 31000-31099", to_port=10000), 6),
        live(published("udp 31000-31099", to="10.1.0.12", to_port=10000), 4),
        live(published("udp 5060", at="203.0.113.7"), 1),
        width=100,
    )
    assert (
        "\n".join(picture)
        == """\
ports 1 to 65535, 669 ports a column
udp to 203.0.113.7: 1 range, 1 of 65535 ports
  .......A..........................................................................................
  |1            |10000         |20000         |30000         |40000         |50000         |60000
  .  1-5059       5059 free
  A  5060            1 port  1 packets  60 bytes  #  -> 10.1.0.11  Service/default/phone/udp
  .  5061-65535  60475 free
udp to the node: 1 range, 100 of 65535 ports
  ..............................................A...................................................
  |1            |10000         |20000         |30000         |40000         |50000         |60000
  .  1-30999      30999 free
  A  31000-31099   100 ports  10 packets  600 bytes  ##########
     -> 10.1.0.11 10000-10099, 10.1.0.12 10000-10099  Service/default/phone/udp
  .  31100-65535  34436 free"""
    )


def test_who_forwards_everything_holds_every_port() -> None:
    picture = drawn(live(forward(None), 2), width=24)
    assert picture[1] == "every protocol on eth0: 1 range, 65535 of 65535 ports"
    assert picture[2] == "  " + 22 * "A"
    assert not any("free" in line for line in picture)


def test_a_namespace_that_forwards_nothing_has_no_picture() -> None:
    assert drawn(live(egress(), 5)) == []


@pytest.mark.parametrize("width", [1, 20, 40, 79, 80, 200, 500])
def test_nothing_is_wider_than_the_terminal_but_what_cannot_be_broken(width: int) -> None:
    rules = [live(forward("tcp 22"), 7), live(forward("udp 1000-60000"), 10**6)]
    picture = drawn(*rules, width=width)
    axes = [line for line in picture if re.fullmatch(r"  [A-Z.*]+", line)]
    assert axes
    assert all(len(line) <= max(width, 22) for line in axes)
    if width >= 60:
        assert all(len(line) <= width for line in picture)
    text = "\n".join(picture)
    for word in ("22", "1000-60000", "1000000 packets", "10.0.2.2", rules[0].rule.owner):
        assert word in text


@pytest.mark.parametrize("port", [1, 2, 999, 32768, 65534, 65535])
@pytest.mark.parametrize("width", [24, 80, 133])
def test_a_single_port_is_seen_beside_ranges_that_touch_it(port: int, width: int) -> None:
    wide = [PortRange(1, port - 1)] if port > 1 else []
    wide += [PortRange(port + 1, 65535)] if port < 65535 else []
    rules = [live(forward(f"tcp {one}")) for one in (*wide, PortRange(port, port))]
    picture = drawn(*rules, width=width)
    axes = [line for line in picture if re.fullmatch(r"  [A-Z.*]+", line)]
    assert LETTERS[1 if port > 1 else 0] in "".join(axes)


def test_two_owners_of_the_same_ports_are_both_told() -> None:
    rules = [forward("tcp 1000-8000"), forward("tcp 1000-8000", to="fd10:0:2::2", owner=ANOTHER)]
    picture = drawn(*map(live, rules), width=60)
    assert set(picture[2].strip()) == {"*", "."}
    assert [line[2] for line in picture if "7001 ports" in line] == ["A", "B"]


def test_of_five_thousand_ranges_the_busiest_are_named_and_the_others_summed_up() -> None:
    rules = [live(forward(f"udp {10 * n + 5}-{10 * n + 9}"), n % 1000) for n in range(5000)]
    picture = drawn(*rules)
    assert len(picture) < 70
    named = [line for line in picture if re.match(r"  [A-Z]  ", line)]
    assert len(named) == 26
    assert {line.split()[4] for line in named} == {"999", "998", "997", "996", "995", "994"}
    rest = 5000 * 999 // 2 - sum(int(line.split()[4]) for line in named)
    assert f"  #  and 4974 more that are less busy: {rest} packets, {60 * rest} bytes" in picture
    assert "  .  40535 free; the largest gap is 50000-65535, 15536 ports" in picture
    assert "  *  several in one column" in picture


def test_many_ranges_that_leave_nothing_free_are_said_to() -> None:
    step = 65535 // 51
    picture = drawn(*(live(forward(f"tcp {n * step + 1}-{(n + 1) * step}")) for n in range(51)))
    assert "  .  no port is free" in picture
    assert "#" in picture[2]


def test_of_many_crowded_places_the_most_crowded_are_drawn_closer() -> None:
    numbers = [base + one for base in range(2000, 60000, 9000) for one in (0, 2)]
    rules = [live(forward(f"tcp {number}")) for number in (*numbers, 11004)]
    picture = drawn(*rules, width=80)
    closer = [line for line in picture if "closer" in line]
    assert closer[0] == "  closer: 11000 to 11010, 1 port a column"
    assert len(closer) == 3
    assert "  and 4 more places where several share a column" in picture


def test_ports_at_more_addresses_than_there_is_room_for_share_an_axis_and_say_where() -> None:
    rules = [live(published(f"tcp {80 + n}", at=f"203.0.113.{n}")) for n in range(1, 21)]
    rules += [live(published("tcp 80", at=f"203.0.113.{n}")) for n in range(1, 21)]
    picture = drawn(*rules, width=120)
    titles = [line for line in picture if line.startswith("tcp")]
    assert titles == ["tcp wherever it comes in: 21 ranges, 21 of 65535 ports"]
    assert any("80 to 203.0.113.1, to 203.0.113.10 and 18 more" in line for line in picture)
    assert any("92 to 203.0.113.12 " in line for line in picture)


def test_colours_change_no_sign() -> None:
    rules = [live(forward("tcp 22"), 3), live(forward("tcp 80-90"), 4)]
    colored = drawn(*rules, paint=lambda text, number: f"<{number}>{text}</>")
    assert [re.sub(r"<.*?>", "", line) for line in colored] == drawn(*rules)
    assert "<1>B</>" in "\n".join(colored)


def test_a_name_that_would_spoil_the_terminal_does_not() -> None:
    text = "\n".join(drawn(live(forward("tcp 22", owner="evil\033[2J\nname"))))
    assert "\033" not in text
    assert "evil\ufffd[2J\ufffdname" in text


@pytest.mark.parametrize(
    ("held", "span"),
    [
        ("22", (20, 30)),
        ("1", (1, 10)),
        ("65535", (65530, 65535)),
        ("30000-32767", (30000, 33000)),
        ("1000-8000", (1000, 9000)),
        ("1-40000", (1, 65535)),
        ("1-65535", (1, 65535)),
    ],
)
def test_the_axis_spans_what_is_used_or_everything(held: str, span: tuple[int, int]) -> None:
    found = span_of(holdings([live(forward(f"tcp {held}"))]), 70)
    assert (found.first, found.last) == span
    assert found.columns <= min(70, len(found))


@pytest.mark.parametrize("columns", [20, 76, 131])
@pytest.mark.parametrize(("first", "last"), [(1, 65535), (20, 90), (30000, 33000)])
def test_a_number_below_the_axis_begins_at_the_column_that_holds_its_port(
    columns: int, first: int, last: int
) -> None:
    span = Span(first, last, min(columns, last - first + 1))
    line = ruler(span, "|")
    assert len(line) <= span.columns
    marks = [(mark.start(), int(mark[1])) for mark in re.finditer(r"\|(\d+)", line)]
    assert len(marks) >= (2 if columns > 20 else 1)
    assert all(span.column(port) == column for column, port in marks)
