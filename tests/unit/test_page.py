"""The daemon's page: what it shows, what it hides, and that no text of others is ever markup."""

from __future__ import annotations

import http.client
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser

import pytest

from agent.page.bars import MOST_BARS, Bar, Span, bars
from agent.page.markup import LONGEST, discreet, element
from agent.page.namespaces import FEW, FEWEST_BARS, MOST_QUIET, MOST_TROUBLED
from agent.page.whole import COLOURS, asset, document
from agent.server import Server
from agent.status import Change, Drift, Policies, Standing, State, Status, status_json
from rules.model import Live, Pending, Protocol
from rules.node_ports import Allocations, Bands, Holder
from rules.ports import ALL_PORTS, PortRange
from rules.problems import Problem, printable
from rules.values import replace
from tests.unit.samples import DESKTOP, PROBLEM, forward, forwards

NOW = 1_800_000_000.0
VOID = ("link", "meta")
HOSTILE = [
    "</script><script>hacked()</script>",
    '"><img src=x onerror=hacked()>',
    "' onmouseover='hacked()",
    "<svg/onload=hacked()>",
    "--><!doctype html><base href=//evil.example>",
    "{{7*7}} ${7*7} &lt;b&gt; &amp;",
    "\N{RIGHT-TO-LEFT OVERRIDE}gpj.exe\N{LEFT-TO-RIGHT ISOLATE}",
    "line\nbreak\ttab\0nul\x1b[2Jescape",
    "\ud800 alone",
    "😀👩‍🚀" * 30,
    "ש" * 128,
]


class Seen(HTMLParser):
    """The elements of a page with their attributes, and the text in each; it must be closed in the
    order in which it was opened."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self._open: list[str] = []
        self.feed(page.decode())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def text(self) -> str:
        return "".join(self.said)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]

    @property
    def shape(self) -> list[tuple[str, frozenset[str]]]:
        """Everything but what is text."""
        return [(tag, frozenset(attributes)) for tag, attributes in self.elements]


def seen(status: Status, stuck: str = "") -> Seen:
    return Seen(document(status, node="node-1", now=NOW, stuck=stuck))


def standing(netns: str, state: State = State.IN_SYNC, **more: object) -> Standing:
    return Standing(netns=netns, state=state, since=NOW - 200, **more)  # type: ignore[arg-type]


def node(*namespaces: Standing, **more: object) -> Status:
    fields = {"version": "1", "pid": 2, "started": NOW - 9, "ready": True, **more}
    return Status(namespaces=namespaces, **fields)  # type: ignore[arg-type]


ALLOCATIONS = Allocations(
    Bands(PortRange(30000, 32767)),
    {
        Holder("Service/default/phone", "sip", Protocol.UDP): PortRange(30001, 30002),
        Holder("Service/default/phone", "rtp", Protocol.UDP): PortRange(31000, 31999),
    },
)


# --------------------------------------------------------------------------------- what it shows


def test_what_the_daemon_lacks_itself_is_said_first() -> None:
    page = seen(node(outdated="line 1 is <bad>", unwritable="cannot write x: No space left"))
    assert "Ready, a configuration that is not in use, a state that cannot be written" in page.text
    assert "The configuration in the file is not in use: line 1 is <bad>." in page.text
    assert "The state cannot be written: cannot write x: No space left." in page.text


def test_problems_are_in_the_order_of_their_places_whatever_these_are_made_of() -> None:
    paths: list[tuple[str | int, ...]] = [("a", 0, "x"), ("a", "b"), (), ("a", 0)]
    problems = [replace(PROBLEM, path=path) for path in paths]
    page = seen(node(problems=tuple(problems)))
    assert "4 problems" in page.text


def test_it_says_how_everything_stands() -> None:
    blue = standing(
        "blue",
        live=forwards("tcp 1000-8000", "udp 1000-8000"),
        backend="nftables",
        reason="the kernel has it",
        change=Change(NOW - 7300, "9 added"),
        drift=Drift(at=NOW - 200, process="nft", pid=123, changes=4),
        drifts=3,
        notes=("a note",),
    )
    red = standing("red", State.FAILING, why="not permitted")
    green = standing(
        "green",
        State.CONFLICT,
        why="x: claimed twice",
        pending=(Pending("VirtualMachine/default/laptop/red", "there is no link eth0 yet"),),
        refused=(Pending("x", "claimed twice"),),
    )
    status = node(
        *(blue, red, green),
        source="/etc/m",
        manifests=2,
        problems=(PROBLEM,),
        last_valid={"/etc/m/laptop.yaml": NOW},
        policies=Policies(enforced=True, count=3),
        allocations=ALLOCATIONS,
    )
    text = " ".join(seen(status).text.split())
    for words in (
        "Not ready: 1 namespace is failing",
        "1 failing",
        "1 conflict",
        "1 in sync",
        "in sync for 3 min",
        "not permitted",
        "VirtualMachine/default/laptop/red: there is no link eth0 yet",
        "x: claimed twice",
        "nft (pid 123) changed 4 rules 3 min ago: undone; 3 times in all",
        "changed 2 h ago: 9 added",
        "nftables: the kernel has it",
        "2 ranges in 4 rules",
        "10.0.2.2, fd10:0:2::2",
        "a note",
        "/etc/m/laptop.yaml:16",
        "spec.end: is not a port number (it is 70000). Write a number from 1 to 65535.",
        "2 manifests from /etc/m",
        "3 enforced",
        "Static band 30000-30085",
        "2 of 86 taken",
        "Dynamic band 30086-32767",
        "1,000 of 2,682 taken",
        "Service/default/phone port rtp",
    ):
        assert words in text, words
    assert text.count("claimed twice") == 1


@pytest.mark.parametrize(
    ("status", "stuck", "line"),
    [
        (node(), "", "Ready"),
        (node(problems=(PROBLEM,)), "", "Ready, 1 problem"),
        (
            node(
                *(standing(f"a{number}", State.CONFLICT) for number in range(2)),
                standing("b", State.REFUSED),
                problems=(PROBLEM,) * 1155,
            ),
            "",
            "Ready, 1,155 problems, 1 refused, 2 in conflict",
        ),
        (
            node(standing("a", State.FAILING), standing("b", State.CONFLICT)),
            "",
            "Not ready: 1 namespace is failing, 1 in conflict",
        ),
        (node(ready=False), "", "Not ready: not every namespace has been tried yet"),
        (node(unreadable="/m is away"), "", "Not ready: the manifests cannot be read"),
        (node(), "The loop is stuck.", "Not alive: the loop is stuck"),
    ],
)
def test_the_health_line_says_the_worst(status: Status, stuck: str, line: str) -> None:
    page = seen(status, stuck)
    assert line in page.said
    assert page.said[1] == f"{line.partition(':')[0]} · node-1 · portranger"
    if status.unreadable:
        assert "/m is away" in page.text


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (node(standing("a", State.PENDING)), "good"),
        (node(problems=(PROBLEM,)), "warn"),
        (node(standing("a", State.CONFLICT)), "warn"),
        (node(standing("a", State.REFUSED)), "warn"),
        (node(standing("a", State.FAILING), problems=(PROBLEM,)), "bad"),
        (node(ready=False, problems=(PROBLEM,)), "wait"),
    ],
)
def test_a_node_with_something_wrong_is_not_green(status: Status, kind: str) -> None:
    page = seen(status)
    (health,) = (one for one in page.all("p") if one.get("id") == "health")
    assert health["class"] == f"health state {kind}"
    (icon,) = (one["href"] for one in page.all("link") if one["rel"] == "icon")
    assert COLOURS[kind] in str(icon)


def test_of_many_problems_the_first_few_are_seen_and_the_others_unfolded() -> None:
    problems = tuple(replace(PROBLEM, file=f"{number:03}.yaml") for number in range(155))
    files = [f"{number:03}.yaml" for number in range(40)]
    page = document(
        node(problems=problems, last_valid=dict.fromkeys(files, NOW)), node="n", now=NOW
    ).decode()
    attention = page.partition('id="attention"')[2] or page
    folded = re.findall("<details.*?</details>", attention)
    at_once = "".join(re.split("<details.*?</details>", attention.partition("</section>")[0]))
    assert at_once.count("<li>") == 2 * 3
    assert "and 152 more<" in folded[0]
    assert "and 125 more: portranger status" in folded[0]
    assert "and 37 more<" in folded[1]
    few = seen(node(problems=problems[:3], last_valid=dict.fromkeys(files[:3], NOW)))
    assert few.all("details") == []


@pytest.mark.parametrize(
    "why", ["/m: No such file or directory", "/m: No such file or directory.", "Why so?"]
)
def test_an_error_ends_before_what_we_say_about_it_begins(why: str) -> None:
    text = seen(node(unreadable=why)).text
    ended = why if why[-1] in ".?" else f"{why}."
    assert f"They cannot be read. {ended} What was running goes on." in text


def test_ports_are_drawn_where_they_are() -> None:
    page = seen(
        node(standing("blue", live=forwards("tcp 1-1", "tcp 32768-65535", "udp 6554-13106")))
    )
    drawn = [
        [float(str(bar[key]).rstrip("%")) for key in ("x", "width", "y")]
        for bar in page.all("rect")
    ]
    expected = [
        (0, 100 / 65535, 3),
        (32767 / 655.35, 32768 / 655.35, 3),
        (6553 / 655.35, 6553 / 655.35, 19),
    ]
    assert drawn == [pytest.approx(one, abs=1e-3) for one in expected]


@pytest.mark.parametrize("state", State)
def test_where_nobody_knows_what_the_kernel_holds_the_picture_is_of_the_last_look(
    state: State,
) -> None:
    page = seen(node(standing("blue", state, live=forwards("tcp 22-80"))))
    unknown = state in (State.FAILING, State.REFUSED)
    assert ("Drawn as last seen; what the kernel holds now is not known." in page.said) == unknown
    assert ("Ports forwarded in blue, as last seen" in page.said) == unknown
    assert ("1 range in 2 rules, as last seen" in page.said) == unknown
    assert ("past" in [one.get("class") for one in page.all("div")]) == unknown
    assert "as last seen" not in seen(node(standing("blue", state))).text


def test_every_picture_has_a_name_and_says_the_same_in_words() -> None:
    page = seen(node(standing("blue", live=forwards("tcp 22-80")), allocations=ALLOCATIONS))
    pictures = [one for one in page.all("svg") if one.get("role") == "img"]
    assert len(pictures) == 3
    ids = [one["id"] for _, one in page.elements if "id" in one]
    assert len(ids) == len(set(ids))
    for one in pictures:
        assert one["aria-labelledby"] in ids
        assert one["aria-describedby"] in ids
    assert "Ports forwarded in blue" in page.said
    assert "tcp: 22-80" in page.said
    assert "static band 30000-30085: 2 of 86 taken" in page.said


def spans(*ports: tuple[int, int], owner: str = "x") -> list[Span]:
    return [Span(PortRange(*one), owner) for one in ports]


APART = spans(*((port, port) for port in range(1000, 62381, 60)))  # too close for an eye


def test_a_bar_of_many_ranges_says_how_many_ports_it_has_and_is_hatched() -> None:
    live = forwards(*(f"tcp {span.ports}" for span in APART), owner=DESKTOP)
    page = seen(node(standing("blue", live=live)))
    drawn = page.all("rect")
    assert {(one["class"], one["fill"]) for one in drawn} == {("bar many", "url(#hatch)")}
    assert f"55 ranges, 55 ports within tcp 1000-4240: {DESKTOP}" in page.said
    assert not any(one.startswith("tcp 1000-") for one in page.said)
    assert "too close to be drawn one by one" in page.text


def test_where_nothing_is_hatched_nobody_is_told_what_it_means() -> None:
    page = seen(node(standing("blue", live=forwards("tcp 22", "tcp 80-90"))))
    assert [one.get("fill") for one in page.all("rect")] == [None, None]
    assert "too close" not in page.text
    hostile = seen(node(standing('fill="url(#hatch)"', live=forwards("tcp 22"))))
    assert "too close" not in hostile.text


@pytest.mark.parametrize("most", [FEWEST_BARS, MOST_BARS])
@pytest.mark.parametrize(
    "held",
    [
        APART,
        spans(*((port, port + 50) for port in range(1, 65000, 118))),
        spans(*((port, port) for port in range(1, 65536, 20))),
        spans(*((port, port) for port in range(30000, 32000)), owner="one"),
        [Span(ALL_PORTS, str(owner)) for owner in range(500)],
    ],
    ids=["single", "ranges", "dense", "touching", "everything, often"],
)
def test_bars_together_have_the_ports_of_all_ranges_and_are_few(
    held: list[Span], most: int
) -> None:
    drawn = bars(held, ALL_PORTS, most)
    assert 0 < len(drawn) <= most
    assert sum(bar.ranges for bar in drawn) == len(held)
    taken = sum(len(ports) for ports in {span.ports for span in held})
    assert sum(bar.taken for bar in drawn) == taken
    for span in held:
        assert any(bar.ports.holds(span.ports) for bar in drawn)


def test_what_an_eye_can_tell_apart_is_drawn_one_by_one() -> None:
    held = spans((1, 1), (80, 80), (1000, 8000), (8001, 8100), (8150, 8150))
    held += spans(*((port, port + 20) for port in range(20_000, 60_000, 250)))
    assert [bar.ports for bar in bars(held, ALL_PORTS)] == [span.ports for span in held]


def test_a_wide_range_is_itself_whatever_crowds_beside_it() -> None:
    crowd = spans(*((port, port) for port in range(8010, 9000, 30)))
    first, second = bars([*spans((1000, 8000)), *crowd], ALL_PORTS)
    assert first == Bar(ports=PortRange(1000, 8000), owner="x", taken=7001)
    assert (second.ports, second.ranges) == (PortRange(8010, crowd[-1].ports.last), len(crowd))
    assert second.has_gaps


def test_a_band_shows_as_taken_what_is_taken() -> None:
    taken = [*range(30100, 32700, 13), *range(30101, 31000, 13)]
    holders = {
        Holder(f"Service/default/s{port}", "", Protocol.TCP): PortRange(port, port)
        for port in taken
    }
    known = Allocations(Bands(PortRange(30000, 32767)), holders)
    domain = known.bands.upper
    drawn = bars([Span(one, str(who)) for who, one in holders.items()], domain)
    assert sum(len(bar.ports) for bar in drawn if not bar.has_gaps) <= len(taken)
    assert sum(bar.taken for bar in drawn) == len(taken) == len(domain) - known.available(domain)


def test_a_machine_that_has_everything_fills_the_axis() -> None:
    everything = forward("", owner=DESKTOP)
    page = seen(node(standing("blue", live=(Live(everything, 1),))))
    (bar,) = page.all("rect")
    assert (bar["x"], bar["width"]) == ("0.000%", "100.000%")
    assert "any" in page.said


def test_the_other_pages_are_one_click_away() -> None:
    assert [one["href"] for one in seen(node()).all("a")][1:] == [
        "metrics",
        "healthz",
        "readyz",
        "status",
    ]


def test_where_an_api_server_gives_node_ports_none_are_drawn() -> None:
    assert "Node ports" not in seen(node()).said
    assert status_json(node())["node_ports"] is None


def test_allocations_are_told_to_programs_too() -> None:
    assert status_json(node(allocations=ALLOCATIONS))["node_ports"] == {
        "range": "30000-32767",
        "static": {"ports": "30000-30085", "available": 84},
        "dynamic": {"ports": "30086-32767", "available": 1682},
        "held": [
            {
                "owner": "Service/default/phone",
                "port": "rtp",
                "protocol": "udp",
                "ports": "31000-31999",
            },
            {
                "owner": "Service/default/phone",
                "port": "sip",
                "protocol": "udp",
                "ports": "30001-30002",
            },
        ],
    }


# ------------------------------------------------------------------------------ what it cannot be


def said_everywhere(text: str) -> Status:
    """A node on which everything that somebody can name is named so."""
    where = Pending(text, text)
    one = standing(
        text,
        State.FAILING,
        why=text,
        live=forwards("tcp 22", owner=text),
        backend="nftables",
        reason=text,
        notes=(text,),
        pending=(where,),
        refused=(where,),
        change=Change(NOW, text),
        drift=Drift(at=NOW, process=text, pid=1, changes=1),
    )
    problem = Problem(code=text, path=(text,), what=text, fix=text, value=text, file=text, line=1)
    held = Holder(f"Service/{text}", text, Protocol.TCP)
    return node(
        one,
        unreadable=text,
        source=text,
        last_valid={text: NOW},
        problems=(problem,),
        policies=Policies(enforced=True, why=text),
        allocations=Allocations(Bands(PortRange(30000, 32767)), {held: PortRange(30000, 30001)}),
    )


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_others_name_is_text_wherever_it_stands(text: str) -> None:
    page, plain = seen(said_everywhere(text)), seen(said_everywhere("quite-plain"))
    assert page.shape == plain.shape
    assert [one.get("src") for one in page.all("script")] == ["page.js"]
    shown = page.text + "".join(str(value) for _, one in page.elements for value in one.values())
    assert not re.search("[\0\t\x1b\u202e\u2066\ud800]", shown)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_is_written_into_an_attribute_stays_in_it(text: str) -> None:
    made = Seen(element("a", title=text, href="x").encode())
    assert made.shape == [("a", frozenset({"title", "href"}))]
    assert made.elements[0][1]["title"] == printable(text, LONGEST)


def test_nothing_on_it_needs_more_than_the_policy_allows() -> None:
    page = seen(said_everywhere("x"))
    for tag, attributes in page.elements:
        assert tag not in ("style", "iframe", "img", "form", "object", "base")
        assert not any(key == "style" or key.startswith("on") for key in attributes), tag
        for key in ("href", "src"):
            assert not str(attributes.get(key) or "").startswith(("http", "//", "javascript:"))
    assert b"url(" not in asset("page.css")
    assert b"@import" not in asset("page.css")
    for sink in (b"innerHTML", b"eval", b"document.write", b"insertAdjacentHTML", b"DOMParser"):
        assert sink not in asset("page.js")


@pytest.mark.parametrize(
    "text",
    [
        "exec plugin failed: token=SESAME1234 is not known",
        'it said {"token": "SESAME1234"}',
        "Authorization: Bearer SESAME1234",
        "cannot reach https://admin:SESAME1234@api.example:6443/x",
        "password: 'SESAME1234'",
        "got eyJSESAME1234abc.eyJpc3MiOi.c2ln",
        "AWS_SECRET=SESAME1234",
    ],
)
def test_what_looks_like_a_credential_in_a_text_of_others_is_left_out(text: str) -> None:
    page = document(said_everywhere("x"), node="n", now=NOW)
    assert b"[hidden]" not in page
    shown = seen(node(standing("n", State.FAILING, why=text, notes=(text,)), unreadable=text)).text
    assert "SESAME1234" not in shown
    assert shown.count("[hidden]") == 3


# ------------------------------------------------------------------------------------- how much


def test_those_that_need_somebody_come_first_and_the_quiet_are_folded() -> None:
    quiet = [standing(f"q{number:03}") for number in range(FEW + 1)]
    late = standing("z", drift=Drift(at=NOW - 9999, changes=1))
    states = (State.PENDING, State.CONFLICT, State.REFUSED, State.FAILING)
    troubled = [standing(f"a{state.name}", state) for state in states]
    page = seen(node(*quiet, late, *troubled))
    names = [one for one in page.said if one[0] in "aqz" and len(one) < 12 and " " not in one]
    assert names[:4] == ["aFAILING", "aREFUSED", "aCONFLICT", "aPENDING"]
    assert f"{FEW + 2} more in sync, with nothing to say" in page.said
    assert "quiet" in [one.get("id") for one in page.all("details")]
    assert "quiet" not in [one.get("id") for one in seen(node(*quiet[:FEW])).all("details")]


def test_those_that_are_not_shown_only_wait_and_are_counted() -> None:
    waiting = [standing(f"w{number:03}", State.PENDING) for number in range(MOST_TROUBLED + 42)]
    drift = Drift(at=NOW - 60, changes=1)
    others = [
        standing("z-noted", notes=("a note",)),
        standing("z-repaired", drift=drift),
        standing("z-waiting-repaired", State.PENDING, drift=drift),
        *(standing(f"z{state.name}", state) for state in (State.CONFLICT, State.REFUSED)),
        standing("zFAILING", State.FAILING),
    ]
    page = seen(node(*waiting, *others))
    names = [one for one in page.said if one[0] in "wz" and " " not in one]
    assert names[:7] == [
        "zFAILING",
        "zREFUSED",
        "zCONFLICT",
        "z-repaired",
        "z-waiting-repaired",
        "z-noted",
        "w000",
    ]
    assert f"Not shown: {42 + len(others)} pending; " in page.said


def test_a_thousand_namespaces_in_trouble_make_a_page_of_bounded_size_in_bounded_time() -> None:
    live = forwards(*(f"tcp {1 + 900 * number}-{400 + 900 * number}" for number in range(64)))
    where = tuple(Pending("o" * 300, "r" * 900) for _ in range(20))
    bad = tuple(
        standing(
            f"vm-{number}",
            State.FAILING if number % 2 else State.IN_SYNC,
            why="w" * 3000,
            live=live,
            pending=where if number % 2 else (),
        )
        for number in range(1000)
    )
    problem = Problem(code="c", path=("p",), what="w" * 900, fix="f", value="v" * 900, file="x")
    held = {
        Holder(f"Service/default/s{number}", "", Protocol.TCP): PortRange(number, number)
        for number in range(30000, 32000)
    }
    status = node(
        *bad,
        problems=(problem,) * 2000,
        last_valid={f"{number:04}{'h' * 296}": NOW for number in range(2000)},
        allocations=Allocations(Bands(PortRange(30000, 32767)), held),
    )
    started = time.process_time()
    page = document(status, node="n", now=NOW)
    assert time.process_time() - started < 3
    assert len(page) < 1_500_000
    found = Seen(page)
    assert len(found.all("article")) == MOST_TROUBLED + MOST_QUIET
    assert f"Not shown: {500 - MOST_TROUBLED} failing; " in found.said
    assert f"Not shown: {500 - MOST_QUIET} in sync; " in found.said
    rows = MOST_TROUBLED + MOST_QUIET
    assert len(found.all("rect")) <= rows * FEWEST_BARS + 2 * MOST_BARS


# ------------------------------------------------------------------------------------ over HTTP


@pytest.fixture(params=["127.0.0.1", "::1", "localhost"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(serve(request.param)) as made:
        yield made


def serve(host: str) -> Server:
    return Server(
        host,
        0,
        status=lambda: node(standing("blue")),
        beat=time.monotonic,
        metrics_text=lambda: b"x 1\n",
        log=lambda _: None,
    )


def ask(
    server: Server, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    address = {"0.0.0.0": "127.0.0.1"}.get(server.address[0], server.address[0])
    connection = http.client.HTTPConnection(address, server.address[1], timeout=20)
    with closing(connection):
        connection.putrequest(method, path, skip_host="Host" in headers)
        for key, value in headers.items():
            for one in value.split("|"):
                connection.putheader(key, one)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_a_browser_gets_the_page_and_a_program_the_list(server: Server) -> None:
    code, headers, body = ask(server, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.startswith(b"<!doctype html>")
    code, headers, body = ask(server, Accept="*/*")
    assert (code, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert b"/metrics " in body
    assert headers["Vary"] == "Accept"
    code, _, body = ask(server, method="HEAD", Accept="text/html")
    assert (code, body) == (200, b"")
    assert ask(server, method="POST", Accept="text/html")[0] == 405


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/status", "/metrics", "/nothing"])
def test_a_browser_may_load_run_and_frame_nothing_else(path: str) -> None:
    with closing(serve("127.0.0.1")) as server:
        _, headers, _ = ask(server, path, Accept="text/html")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    for key in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[key] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("path", "kind"), [("/page.css", "text/css"), ("/page.js", "text/javascript")]
)
def test_what_the_page_names_is_served(path: str, kind: str) -> None:
    with closing(serve("127.0.0.1")) as server:
        code, headers, body = ask(server, path)
    assert (code, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
    assert body == asset(path[1:])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:9788",
        "127.0.0.1",
        "127.0.0.1:9788",
        "[::1]:9788",
        "[::1]",
        "10.0.0.7",
    ],
)
def test_on_loopback_it_answers_to_addresses_and_to_localhost(server: Server, host: str) -> None:
    assert ask(server, "/status", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9788",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example|localhost",
        "",
        ":9788",
        "[localhost]",
    ],
)
def test_on_loopback_no_other_name_leads_to_it(server: Server, host: str) -> None:
    """A page from there could else read all of it: DNS rebinding."""
    for path in ("/", "/status", "/metrics"):
        code, _, body = ask(server, path, Host=host, Accept="text/html")
        assert code == 421
        assert b"evil" not in body
        assert b"blue" not in body


def test_elsewhere_it_answers_to_every_name() -> None:
    with closing(serve("0.0.0.0")) as server:
        assert ask(server, "/metrics", Host="node-1.example:9788")[0] == 200


def test_who_names_no_host_is_no_browser(server: Server) -> None:
    address = server.address[0], server.address[1]
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 200 ")


def test_a_long_name_is_looked_at_for_credentials_in_no_time() -> None:
    began = time.process_time()
    for _ in range(20):
        discreet("a-" * 600)
    assert time.process_time() - began < 0.5
    assert "hunter" not in discreet("my-access-token=hunter22")
