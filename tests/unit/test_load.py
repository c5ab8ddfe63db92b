"""How busy a range is: which flows are its own, what changed since the last look, and the table."""

from __future__ import annotations

import re
from ipaddress import ip_address

import pytest

from rules.holdings import holdings
from rules.load import Load, Look, Tracked, Tracking, Way, loads
from rules.load_text import SORTS, View, enabling, rate, screen, table
from rules.model import NUMBERS, OWN, Chain, Family, Live, Protocol, Rule
from tests.unit.samples import forward, from_inside, ports

GUEST, POD = "10.0.2.2", "192.0.2.2"
SETTING = "sysctl -w net.netfilter.nf_conntrack_acct=1"


def flow(  # noqa: PLR0913 - every option has a default
    what: str,
    *,
    to: str = POD,
    guest: str = GUEST,
    key: str = "",
    answered: bool = True,
    over: bool = False,
    counted: tuple[int, int] | None = None,
) -> Tracked:
    """A flow to `tcp 22` at that address, that the guest answers."""
    protocol, _, port = what.partition(" ")
    way = Way(
        family=Family.of(ip_address(to)),
        protocol=NUMBERS[Protocol(protocol)] if protocol != "icmp" else 1,
        port=int(port or 0),
        destination=ip_address(to).packed,
        answerer=ip_address(guest).packed,
    )
    name = (key or what).encode()
    return Tracked(key=name, way=way, answered=answered, over=over, counted=counted)


def look(
    *rules: Rule | Live, flows: tuple[Tracked, ...] = (), at: float = 0.0, accounted: bool = True
) -> Look:
    live = [one if isinstance(one, Live) else Live(one, 1) for one in rules]
    own = frozenset([ip_address(POD)])
    tracking = Tracking(flows, accounted)
    return Look(at=at, held=tuple(holdings(live)), tracking=tracking, own=own)


def opened(*found: Load) -> dict[str, int]:
    return {one.holding.what: one.open for one in found}


def test_a_flow_belongs_to_the_range_that_holds_its_port_and_leads_to_who_answers() -> None:
    now = look(
        forward("tcp 22"),
        from_inside("tcp 22"),
        forward("tcp 1000-8000"),
        forward("udp 1000-8000"),
        flows=(
            flow("tcp 22", key="a"),
            flow("tcp 22", key="b", to="127.0.0.1"),
            flow("tcp 8000"),
            flow("tcp 8001"),
            flow("udp 1000"),
            flow("tcp 1000", guest="10.0.2.3"),
            flow("icmp"),
        ),
    )
    assert opened(*loads("x", now, None)) == {"tcp 22": 2, "tcp 1000-8000": 1, "udp 1000-8000": 1}


def test_who_forwards_everything_has_what_no_range_has() -> None:
    flows = (flow("tcp 22"), flow("udp 9"), flow("icmp"))
    now = look(forward("tcp 22"), forward(None), flows=flows)
    assert opened(*loads("x", now, None)) == {"tcp 22": 1, "everything": 2}


def test_published_ports_have_the_flows_that_were_sent_to_their_address() -> None:
    def published(at: str | None, owner: str) -> Rule:
        return Rule(
            chain=Chain.PREROUTING,
            family=Family.IP,
            owner=owner,
            protocol=Protocol.TCP,
            ports=ports("80-90"),
            destination=ip_address(at) if at else OWN[Family.IP],
            to=ip_address(GUEST),
        )

    now = look(
        published(None, "node"),
        published("203.0.113.7", "external"),
        flows=(
            flow("tcp 80"),
            flow("tcp 81", to="203.0.113.7"),
            flow("tcp 82", to="203.0.113.7"),
            flow("tcp 83", to="203.0.113.9"),  # of somebody else
        ),
    )
    assert [one.is_for_own for one in now.held] == [False, True]
    assert {one.holding.owner: one.open for one in loads("x", now, None)} == {
        "node": 1,
        "external": 2,
    }


def test_a_wide_range_behind_narrow_ones_is_found() -> None:
    rules = [forward("tcp 1-60000", owner="wide")]
    rules += [forward(f"tcp {port}", owner="narrow", to="10.0.2.3") for port in range(10, 5000, 10)]
    flows = (flow("tcp 59999"), flow("tcp 20"), flow("tcp 20", key="b", guest="10.0.2.3"))
    found = loads("x", look(*rules, flows=flows), None)
    assert [one.holding.what for one in found if one.open] == ["tcp 1-60000", "tcp 20"]
    assert [one.open for one in found if one.open] == [2, 1]


def test_what_has_ended_is_not_open_and_what_nobody_answers_is_told() -> None:
    flows = (
        flow("tcp 22", key="a"),
        flow("tcp 22", key="b", answered=False),
        flow("tcp 22", key="c", over=True),
    )
    (found,) = loads("x", look(forward("tcp 22"), flows=flows), None)
    assert (found.open, found.unanswered) == (2, 1)


def test_rates_are_of_the_time_between_two_looks() -> None:
    rule = forward("udp 5000-5999")
    before = look(
        Live(rule, 1, 100, 9000),
        flows=(flow("udp 5000", counted=(10, 1000)), flow("udp 5001", counted=(5, 50))),
    )
    now = look(
        Live(rule, 1, 106, 9500),
        flows=(flow("udp 5000", counted=(30, 5000)), flow("udp 5002", counted=(4, 400))),
        at=2.0,
    )
    (found,) = loads("x", now, before)
    assert (found.new, found.packets, found.octets) == (3.0, 12.0, 2200.0)


def test_the_first_look_has_no_rates() -> None:
    (found,) = loads("x", look(forward("tcp 22"), flows=(flow("tcp 22", counted=(9, 9)),)), None)
    assert (found.open, found.new, found.packets, found.octets) == (1, None, None, None)


def test_a_rule_that_was_rewritten_has_no_rate_below_nothing() -> None:
    rule = forward("tcp 22")
    (found,) = loads("x", look(Live(rule, 2, 1), at=1.0), look(Live(rule, 1, 500)))
    assert found.new == 0.0


def test_packets_that_nobody_counts_are_not_nothing() -> None:
    before = look(forward("tcp 22"), accounted=False)
    now = look(forward("tcp 22"), flows=(flow("tcp 22"),), at=1.0, accounted=False)
    (found,) = loads("x", now, before)
    assert (found.packets, found.octets, found.uncounted) == (None, None, 1)


# -------------------------------------------------------------------------------------- the table


def busy(what: str, **numbers: float | None) -> Load:
    (held,) = holdings([Live(forward(what, owner="vm/red"), 1)])
    return Load(netns="blue", holding=held, **numbers)  # type: ignore[arg-type]


SOME = (
    busy("tcp 22", open=3, new=0.5, packets=12.0, octets=900.0),
    busy("tcp 80", open=12, unanswered=1, new=2.0, packets=2500.0, octets=1.2e6),
    busy("udp 1000-8000", open=0, new=40.0, packets=None, octets=None),
)


def test_the_table_has_a_line_for_each_range_the_busiest_first() -> None:
    lines = table(View(loads=SOME), "open", "12:00:00")
    assert (
        "\n".join(lines)
        == """\
12:00:00  1 namespace: 3 ranges, 15 open, 1 unanswered, 42 new/s; sorted by open
open  unanswered  new/s  packets/s  bytes/s  range          namespace  to        owner
  12           1      2       2.5k     1.2M  tcp 80         blue       10.0.2.2  vm/red
   3           0    0.5         12      900  tcp 22         blue       10.0.2.2  vm/red
   0           0     40          -        -  udp 1000-8000  blue       10.0.2.2  vm/red"""
    )


@pytest.mark.parametrize(
    ("sort", "first"),
    [("open", "80"), ("new", "1000-8000"), ("packets", "80"), ("bytes", "80"), ("range", "22")],
)
def test_it_is_sorted_by_what_is_asked_for(sort: str, first: str) -> None:
    assert sort in SORTS.values()
    assert table(View(loads=SOME), sort, "")[2].split()[6] == first


MANY = tuple(busy(f"tcp {port}", open=port) for port in range(1, 301))


@pytest.mark.parametrize("width", [10, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 10, 24, 60])
def test_a_screen_is_never_larger_than_it_is(width: int, height: int) -> None:
    view = View(loads=MANY, unaccounted=("blue",), troubles=("portranger: x", "portranger: y"))
    lines = screen(view, "open", "12:00:00", (width, height))
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_a_line_that_is_cut_ends_with_a_sign() -> None:
    whole = screen(View(loads=SOME), "open", "12:00:00", (200, 7))[:2]
    cut = screen(View(loads=SOME), "open", "12:00:00", (60, 7))[:2]
    assert cut == [line if len(line) <= 60 else f"{line[:59]}>" for line in whole]
    assert any(line.endswith(">") for line in cut)


def held(netns: str, what: str, owner: str, **numbers: float | None) -> Load:
    rules = [forward(what, owner=owner), forward(what, owner=owner, to="fd10:0:2::2")]
    (one,) = holdings([Live(rule, 1) for rule in rules])
    return Load(netns=netns, holding=one, **numbers)  # type: ignore[arg-type]


def real(packets: float | None) -> tuple[Load, ...]:
    """Two machines, as people name them."""
    owners = ("VirtualMachine/default/desktop/default", "VirtualMachine/production/laptop/red")
    return tuple(
        held(owner.split("/")[2], what, owner, open=3, new=0.5, packets=packets, octets=packets)
        for owner in owners
        for what in ("tcp 22", "udp 10000-20000")
    )


def below_titles(
    loads: tuple[Load, ...], width: int, *, sort: str = "open", counted: bool = True
) -> list[list[str]]:
    """The titles, and the cells of the last range."""
    names = () if counted else tuple(dict.fromkeys(one.netns for one in loads))
    lines = screen(View(loads=loads, unaccounted=names), sort, "12:00:00", (width, 40))
    at = next(at for at, line in enumerate(lines) if line.startswith("range"))
    return [re.split("  +", line) for line in (lines[at], lines[at + len(loads)])]


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (40, {"range": "udp 10000-20000", "open": "3", "owner": "<ction/laptop/red"}),
        (
            80,
            {
                "range": "udp 10000-20000",
                "open": "3",
                "unanswered": "0",
                "new/s": "0.5",
                "namespace": "laptop",
                "owner": "production/laptop/red",
            },
        ),
        (
            100,
            {
                "range": "udp 10000-20000",
                "open": "3",
                "unanswered": "0",
                "new/s": "0.5",
                "namespace": "laptop",
                "to": "10.0.2.2, fd10:0:2::2",
                "owner": "production/laptop/red",
            },
        ),
        (
            200,
            {
                "range": "udp 10000-20000",
                "open": "3",
                "unanswered": "0",
                "new/s": "0.5",
                "namespace": "laptop",
                "to": "10.0.2.2, fd10:0:2::2",
                "owner": "VirtualMachine/production/laptop/red",
            },
        ),
    ],
)
def test_a_narrow_screen_has_the_range_first_and_whose_it_is(
    width: int, cells: dict[str, str]
) -> None:
    titles, last = below_titles(real(None), width, counted=False)
    assert dict(zip(titles, last, strict=True)) == cells


def test_what_nobody_counts_has_no_column_on_a_screen() -> None:
    titles, _ = below_titles(real(None), 200, counted=False)
    assert not {"packets/s", "bytes/s"} & set(titles)
    titles, _ = below_titles(real(None), 200)  # a first look
    assert {"packets/s", "bytes/s"} < set(titles)
    some = View(loads=real(2.0), unaccounted=("laptop",))
    assert any("packets/s" in line for line in screen(some, "open", "", (200, 24)))


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("sort", ["open", "new", "packets", "bytes"])
def test_what_it_is_sorted_by_is_on_every_screen(sort: str, width: int) -> None:
    titles, _ = below_titles(real(2.0), width, sort=sort)
    assert sort in [title.removesuffix("/s") for title in titles]
    assert titles[0] == "range"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_all_of_what_is_said_can_be_read_on_a_narrow_screen(width: int) -> None:
    trouble = "portranger: there is no network namespace with-a-name-that-is-rather-long."
    view = View(loads=SOME, unaccounted=("blue",), troubles=(trouble,))
    lines = screen(view, "open", "12:00:00", (width, 24))
    assert not any(line.endswith(">") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "42 new/s; sorted by open q quits;" in text
    assert "b bytes, r range" in text
    assert text.endswith(f"ip netns exec blue {SETTING} {trouble}")
    assert any(line.startswith("ip netns exec blue sysctl") for line in lines)


@pytest.mark.parametrize("height", range(5, 25))
@pytest.mark.parametrize("loads", [SOME, MANY], ids=["some", "many"])
def test_a_command_is_all_there_or_ends_with_a_sign(loads: tuple[Load, ...], height: int) -> None:
    lines = screen(View(loads=loads, unaccounted=("blue",)), "open", "12:00:00", (40, height))
    hints = [at for at, line in enumerate(lines) if line.startswith("to count packets")]
    assert len(hints) <= 1
    for at in hints:
        said = " ".join(" ".join(lines[at:]).split())
        assert said.endswith((f"ip netns exec blue {SETTING}", ">"))
    assert len(hints) == 1 or height < 6


def test_what_does_not_fit_the_screen_is_summed_up() -> None:
    many = tuple(busy(f"tcp {port}", open=port, new=1.0) for port in range(1, 101))
    lines = screen(View(loads=many), "open", "12:00:00", (200, 13))
    assert len(lines) == 13
    assert [line.split()[2] for line in lines[3:12]] == [str(n) for n in range(100, 91, -1)]
    assert lines[12] == "and 91 ranges, 4186 open, 0 unanswered, 91 new/s"


def test_what_fits_the_screen_is_not_summed_up() -> None:
    many = tuple(busy(f"tcp {port}") for port in range(1, 11))
    lines = screen(View(loads=many), "open", "12:00:00", (200, 13))
    assert len(lines) == 13
    assert "tcp 10" in lines[12]


def test_where_packets_are_not_counted_a_line_says_how_to_have_it_done() -> None:
    lines = table(View(loads=SOME, unaccounted=("blue", "red", "green")), "open", "")
    assert lines[-1] == (
        "to count packets and bytes of new flows (not counted: blue, red and 1 more):"
        f" ip netns exec blue {SETTING}"
    )


def test_flows_from_before_packets_were_counted_are_told() -> None:
    view = View(loads=(busy("tcp 22", open=3, uncounted=2, packets=0.0, octets=0.0),))
    assert "without 2 flows that began before" in table(view, "open", "")[-1]


def test_nothing_of_ours_is_said_so() -> None:
    assert table(View(), "open", "")[-1].startswith("Nothing of ours is live.")
    lines = screen(View(troubles=("portranger: no.",)), "open", "", (80, 24))
    assert lines[-1] == "portranger: no."
    assert not any("Nothing of ours" in line for line in lines)


@pytest.mark.parametrize(
    ("netns", "command"),
    [
        ("node:self", "sysctl -w"),
        ("/proc/7/ns/net", "nsenter --net=/proc/7/ns/net sysctl -w"),
        ("pid:7", "nsenter -t 7 -n sysctl -w"),
        ("desktop", "ip netns exec desktop sysctl -w"),
    ],
)
def test_the_command_for_it_is_one_for_that_namespace(netns: str, command: str) -> None:
    assert enabling(netns) == f"{command} net.netfilter.nf_conntrack_acct=1"


def test_where_no_command_leads_it_is_said_where_to_do_it() -> None:
    assert enabling("pod:1-2-3") == f"{SETTING} (in that namespace)"


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0.0, "0"), (0.25, "0.2"), (9.0, "9"), (10.4, "10"), (999.0, "999"),
     (1000.0, "1.0k"), (2.5e6, "2.5M"), (3e9, "3.0G"), (4e12, "4.0T")],
)  # fmt: skip
def test_a_rate_is_short(number: float | None, text: str) -> None:
    assert rate(number) == text
