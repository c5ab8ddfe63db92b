"""A row for each namespace: how it stands, since when, and its ranges on the axis of all ports.

Those that need somebody come first, the worst at the top; the quiet ones follow, folded away where
there are many.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from agent.page.axis import legend, picture, ruler
from agent.page.bars import MOST_BARS, Span
from agent.page.markup import Html, discreet, element, joined, name
from agent.page.words import ago, counted, lasting
from agent.status import Drift, Standing, State
from rules.model import NODE, Live, Pending
from rules.ports import ALL_PORTS

MOST_TROUBLED, MOST_QUIET = 60, 120  # rows
PAGE_BARS, FEWEST_BARS = 4000, 40  # of all rows together; and in a lane, even of many rows
FEW = 12  # quiet ones that are shown without being asked for
MOST_RANGES = 16  # of a namespace, that are written out
MOST_REMARKS = 6
RECENT = 3600.0  # seconds for which a drift is something to look at

UNKNOWN = (State.FAILING, State.REFUSED)  # so that nobody knows what the kernel holds now
ORDER = (
    State.FAILING,
    State.REFUSED,
    State.CONFLICT,
    State.UNMANAGED,
    State.OUTDATED,
    State.PENDING,
    State.IN_SYNC,
)
URGENCY = (*ORDER[:5], None, State.IN_SYNC, State.PENDING)  # None: repaired of late
KINDS = {  # how serious it is; the word is always there, too
    State.IN_SYNC: "good",
    State.PENDING: "wait",
    State.FAILING: "bad",
    State.REFUSED: "bad",
    State.CONFLICT: "warn",
    State.OUTDATED: "warn",
    State.UNMANAGED: "warn",
}

Lines = dict[tuple[str, str, str], list[str]]


def section(standings: Sequence[Standing], now: float) -> Html:
    """All of them, or as many as make a page."""
    ordered = sorted(standings, key=lambda one: (_urgency(one, now), one.netns))
    troubled = [one for one in ordered if not _is_quiet(one, now)]
    calm = [one for one in ordered if _is_quiet(one, now)]
    if not standings:
        words = "No manifest names a namespace, and no Service needs this node."
        return _titled(element("p", words, class_="quiet"))
    shown = len(troubled[:MOST_TROUBLED]) + len(calm[:MOST_QUIET])
    most = max(FEWEST_BARS, min(MOST_BARS, PAGE_BARS // shown))
    rows = joined(
        [_row(one, now, most) for one in troubled[:MOST_TROUBLED]],
        _rest(troubled[MOST_TROUBLED:], "unseen"),
    )
    quiet = joined(
        [_row(one, now, most) for one in calm[:MOST_QUIET]],
        _rest(calm[MOST_QUIET:], "unseen-quiet"),
    )
    if len(calm) > FEW:
        words = f"{len(calm):,} {'more ' if troubled else ''}in sync, with nothing to say"
        quiet = element("details", element("summary", words), quiet, id="quiet", class_="fold")
    return _titled(tally(standings), legend(rows, quiet), ruler(), rows, quiet)


def _titled(*content: Html | None) -> Html:
    return element("section", element("h2", "Namespaces"), *content, id="namespaces")


def tally(standings: Sequence[Standing]) -> Html:
    """How many are in each state."""
    said = [
        element("li", element("strong", f"{count:,}"), f" {state.value}", class_=KINDS[state])
        for state, count in _counts(standings).items()
    ]
    return element("ul", said, class_="tally")


def _counts(standings: Sequence[Standing]) -> dict[State, int]:
    counts = {state: sum(one.state is state for one in standings) for state in ORDER}
    return {state: count for state, count in counts.items() if count}


def _is_quiet(one: Standing, now: float) -> bool:
    return (
        one.state is State.IN_SYNC
        and not (one.pending or one.refused or one.notes)
        and not _was_repaired(one, now)
    )


def _was_repaired(one: Standing, now: float) -> bool:
    return one.drift is not None and now - one.drift.at <= RECENT


def _urgency(one: Standing, now: float) -> int:
    """What is wrong, then what was mended of late, then what has something to say, then what only
    waits: if some are not shown, let it be those that nobody need do anything about."""
    calm = one.state in (State.PENDING, State.IN_SYNC)
    return URGENCY.index(None if calm and _was_repaired(one, now) else one.state)


def _rest(unseen: Sequence[Standing], key: str) -> Html | None:
    """Not shown: 42 pending, 1 in sync."""
    if not unseen:
        return None
    said = ", ".join(f"{count:,} {state.value}" for state, count in _counts(unseen).items())
    told = joined(f"Not shown: {said}; ", element("code", "portranger status"), " tells them all")
    return element("p", told, class_="more", id=key)


def _row(one: Standing, now: float, most: int) -> Html:
    key = _key(one.netns)
    where = element("span", " the node itself", class_="quiet") if one.netns == NODE else None
    state = element("span", one.state.value, class_=f"state {KINDS[one.state]}")
    return element(
        "article",
        element(
            "div",
            element("h3", name(one.netns, 120), where),
            element("p", state, " ", lasting(one.since, now), class_="stand"),
            class_="who",
        ),
        element(
            "div",
            _drawn(key, one, most),
            _why(one),
            _remarks(one, now),
            _details(key, one, now),
            class_="what",
        ),
        id=key,
        class_="row",
    )


def _key(netns: str) -> str:
    """A name for the row that no name of a namespace can spoil."""
    return "n" + blake2b(netns.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _drawn(key: str, one: Standing, most: int) -> Html | None:
    """Both families have the same ports, mostly: each is drawn once."""
    lanes: dict[str, dict[Span, None]] = {}
    for live in sorted(one.ranges, key=_by_port):
        rule = live.rule
        lane = rule.protocol.value if rule.protocol else "any"
        span = Span(rule.ports or ALL_PORTS, rule.owner)
        lanes.setdefault(lane, {})[span] = None
    what = f"Ports forwarded in {one.netns}{_when(one)}"
    found = {lane: tuple(spans) for lane, spans in sorted(lanes.items())}
    if not found:
        return None
    drawn = picture(key, what, found, most=most)
    if one.state not in UNKNOWN:
        return drawn
    words = "Drawn as last seen; what the kernel holds now is not known."
    return joined(element("div", drawn, class_="past"), element("p", words, class_="quiet"))


def _when(one: Standing) -> str:
    return ", as last seen" if one.state in UNKNOWN else ""


def _by_port(live: Live) -> tuple[str, int, int]:
    rule = live.rule
    ports = rule.ports or ALL_PORTS
    return rule.protocol.value if rule.protocol else "", ports.first, ports.last


def _why(one: Standing) -> Html | None:
    """Unless what follows says the same."""
    told = any(other.reason in one.why for other in (*one.pending, *one.refused))
    return element("p", discreet(one.why), class_="why") if one.why and not told else None


def _remarks(one: Standing, now: float) -> Html | None:
    drift = [_drift(one.drift, one.drifts, now)] if one.drift else []
    part = [some for some in one.refused if some.partly]
    none = [some for some in one.refused if not some.partly]
    kinds = (
        (drift, [*drift]),
        (part, _listed("Partly published", part[:MOST_REMARKS])),
        (none, _listed("Refused", none[:MOST_REMARKS])),
        (one.pending, _listed("Pending", one.pending[:MOST_REMARKS])),
        (one.notes, [_item("Note", discreet(note)) for note in one.notes[:MOST_REMARKS]]),
    )
    said = [item for _, items in kinds for item in items][:MOST_REMARKS]
    if not said:
        return None
    more = sum(len(all_of) for all_of, _ in kinds) - len(said)
    rest = element("li", f"and {more:,} more: portranger status", class_="quiet")
    return element("ul", said, rest if more > 0 else None, class_="remarks")


def _item(kind: str, *content: str) -> Html:
    return element("li", element("span", kind, class_="kind"), element("span", *content))


def _listed(kind: str, those: Iterable[Pending]) -> list[Html]:
    return [_item(kind, name(one.owner), ": ", discreet(one.reason)) for one in those]


def _drift(drift: Drift, drifts: int, now: float) -> Html:
    """nft (pid 123) changed 4 rules 3 min ago: undone."""
    who = name(drift.process, 40) if drift.process else "somebody"
    pid = f" (pid {drift.pid})" if drift.pid else ""
    often = f"; {drifts:,} times in all" if drifts > 1 else ""
    changes = f" changed {counted(drift.changes, 'rule')} "
    return _item("Drift", who, pid, changes, ago(drift.at, now), f": undone{often}")


def _details(key: str, one: Standing, now: float) -> Html | None:
    if not one.live and not one.change and not one.backend:
        return None
    lines = _lines(one.ranges)
    ranges, rules = counted(len(lines), "range"), counted(len(one.live), "rule")
    beside = ", beside KubeVirt's own" if one.beside else ""
    change = one.change
    last = joined(" · changed ", ago(change.at, now), f": {change.what}") if change else None
    backend = f"{one.backend}: {one.reason or 'as configured'}" if one.backend else ""
    return element(
        "details",
        element("summary", f"{ranges} in {rules}{beside}{_when(one)}", last),
        element("p", discreet(backend), class_="quiet") if backend else None,
        _table(lines),
        id=f"{key}-more",
    )


def _lines(ranges: Sequence[Live]) -> Lines:
    """What goes where, by ports, protocol and owner: the same of both families share a line."""
    lines: Lines = {}
    for live in sorted(ranges, key=_by_port):
        rule = live.rule
        protocol = rule.protocol.value if rule.protocol else "any"
        shifted = f" port {rule.to_ports}" if rule.to_ports else ""
        ports = str(rule.ports) if rule.ports else "all"
        lines.setdefault((ports, protocol, rule.owner), []).append(f"{rule.to}{shifted}")
    return lines


def _table(lines: Lines) -> Html | None:
    rows = [
        element(
            "tr",
            element("td", ports, class_="ports"),
            element("td", protocol),
            element("td", ", ".join(dict.fromkeys(to))),
            element("td", name(owner)),
        )
        for (ports, protocol, owner), to in list(lines.items())[:MOST_RANGES]
    ]
    if not rows:
        return None
    heads = [element("th", head, scope="col") for head in ("Ports", "Protocol", "To", "Owner")]
    more = len(lines) - MOST_RANGES
    rest = element("p", f"and {more:,} more: portranger status -o json", class_="more")
    table = element("table", element("thead", element("tr", heads)), element("tbody", rows))
    return joined(element("div", table, class_="scroll"), rest if more > 0 else None)
