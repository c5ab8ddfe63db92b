"""Port ranges drawn to scale: an SVG a picture, a lane a protocol, a bar a range.

Places are percentages of the width, so that a picture fits every screen and its bars are where
their ports are. A bar that stands for many, with free ports between them, is hatched. The table
beside it says the same in words.
"""

from collections.abc import Iterable, Mapping, Sequence

from agent.page.bars import MOST_BARS, Bar, Span, bars
from agent.page.markup import Html, element, joined
from agent.page.words import counted
from rules.ports import ALL_PORTS, PortRange

LANE, BAR = 16, 10  # pixels
TINTS = 3
TICKS = tuple(range(10_000, 60_001, 10_000))
HATCH = "url(#hatch)"

Lanes = Mapping[str, Sequence[Span]]


def picture(
    key: str, what: str, lanes: Lanes, domain: PortRange = ALL_PORTS, most: int = MOST_BARS
) -> Html:
    """The lanes, one below the other; `key` is what no other picture of the page has, and `most`
    how many bars a lane may have."""
    height = LANE * len(lanes)
    ticks = TICKS if domain == ALL_PORTS else ()
    tints = _tints(lanes)
    svg = element(
        "svg",
        element("title", what, id=f"{key}-title"),
        element("desc", _told(lanes), id=f"{key}-desc"),
        [_line(tick, domain, height) for tick in ticks],
        [
            _lane(place, lane, bars(spans, domain, most), domain, tints)
            for place, (lane, spans) in enumerate(lanes.items())
        ],
        class_="axis",
        role="img",
        width="100%",
        height=str(height),
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-desc",
    )
    return _plot(lanes, svg)


def ruler() -> Html:
    """The numbers above pictures of all ports."""
    numbers = [
        element(
            "text", f"{tick // 1000}k", x=_percent(tick, ALL_PORTS), y="11", text_anchor="middle"
        )
        for tick in TICKS
    ]
    first = element("text", "1", x="0", y="11")
    last = element("text", "65535", x="100%", y="11", text_anchor="end", class_="end")
    return _plot((), element("svg", first, numbers, last, width="100%", height="16"), "ruler")


def ends(domain: PortRange) -> Html:
    """The numbers below a picture of some ports."""
    first = element("text", str(domain.first), x="0", y="11")
    last = element("text", str(domain.last), x="100%", y="11", text_anchor="end")
    return _plot((), element("svg", first, last, width="100%", height="14"), "ruler")


def hatching() -> Html:
    """What hatched bars are filled with: one for all of the page."""
    ground = element("path", d="M0 0h5v5h-5z", class_="ground")
    lines = element("path", d="M-1 1 1-1M-1 6 6-1M4 6 6 4")
    pattern = element(
        "pattern", ground, lines, id="hatch", patternUnits="userSpaceOnUse", width="5", height="5"
    )
    return element("svg", pattern, class_="unseen", width="0", height="0", aria_hidden="true")


def legend(*drawn: Html | None) -> Html | None:
    """What hatched bars mean, where any is drawn. No text of others can look like one: its quotes
    are escaped."""
    if f'fill="{HATCH}"' not in joined(*drawn):
        return None
    sample = element("path", d=f"M0 0h28v{BAR}h-28z", class_="bar many", fill=HATCH)
    return element(
        "p",
        element("svg", sample, width="28", height=str(BAR), aria_hidden="true"),
        " many small ranges with free ports between them, too close to be drawn one by one",
        class_="legend quiet",
    )


def _plot(lanes: Iterable[str], svg: Html, more: str = "") -> Html:
    names = [element("span", lane) for lane in lanes]
    return element(
        "div",
        element("div", names, class_="lanes", aria_hidden="true"),
        svg,
        class_=f"plot {more}".strip(),
        aria_hidden="true" if more else None,
    )


def _line(port: int, domain: PortRange, height: int) -> Html:
    x = _percent(port, domain)
    return element("line", x1=x, x2=x, y1="0", y2=str(height), class_="tick")


def _lane(
    place: int, lane: str, drawn: Sequence[Bar], domain: PortRange, tints: Mapping[str, int]
) -> Html:
    y = str(LANE * place + (LANE - BAR) // 2)
    middle = str(LANE * place + LANE // 2)
    return element(
        "g",
        element("line", x1="0", x2="100%", y1=middle, y2=middle, class_="rail"),
        [_bar(lane, bar, y, domain, tints) for bar in drawn],
    )


def _bar(lane: str, bar: Bar, y: str, domain: PortRange, tints: Mapping[str, int]) -> Html:
    first, last = max(bar.ports.first, domain.first), min(bar.ports.last, domain.last)
    width = (last - first + 1) / len(domain) * 100
    return element(
        "rect",
        element("title", f"{_meant(lane, bar)}: {bar.owner}"),
        x=_percent(first, domain),
        width=f"{width:.3f}%",
        y=y,
        height=str(BAR),
        class_=f"bar t{tints.get(bar.owner, 0)}" if not bar.has_gaps else "bar many",
        fill=HATCH if bar.has_gaps else None,
    )


def _meant(lane: str, bar: Bar) -> str:
    """tcp 1000-8000; or 57 ranges, 57 ports within tcp 1000-4541."""
    ports = f"{lane} {bar.ports}".strip()
    if bar.ranges == 1:
        return ports
    taken = f"{counted(bar.taken, 'port')} within" if bar.has_gaps else "all of"
    return f"{counted(bar.ranges, 'range')}, {taken} {ports}"


def _percent(port: int, domain: PortRange) -> str:
    """Where a port begins."""
    return f"{(port - domain.first) / len(domain) * 100:.3f}%"


def _tints(lanes: Lanes) -> dict[str, int]:
    """A shade for each owner, so that neighbours can be told apart."""
    owners = dict.fromkeys(span.owner for spans in lanes.values() for span in spans)
    return {owner: place % TINTS for place, owner in enumerate(owners)}


def _told(lanes: Lanes) -> str:
    """The picture in a sentence."""
    said = [
        f"{lane}: {', '.join(str(one.ports) for one in spans[:8])}"
        + (f" and {len(spans) - 8:,} more" if len(spans) > 8 else "")
        for lane, spans in lanes.items()
    ]
    return "; ".join(said) or "No ports."
