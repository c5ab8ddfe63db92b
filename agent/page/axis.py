"""Port ranges drawn to scale: an SVG a picture, a lane a protocol, a bar a range.

Places are percentages of the width, so that a picture fits every screen and its bars are where
their ports are. The table beside it says the same in words.
"""

from collections.abc import Iterable, Mapping, Sequence

from agent.page.markup import Html, element
from rules.ports import ALL_PORTS, PortRange
from rules.values import Value

MOST_BARS = 40  # in a lane; more would be narrower than what lies between them
LANE, BAR = 16, 10  # pixels
TINTS = 3
TICKS = tuple(range(10_000, 60_001, 10_000))


class Span(Value):
    """A range, and whose it is."""

    ports: PortRange
    owner: str


Lanes = Mapping[str, Sequence[Span]]


def picture(key: str, what: str, lanes: Lanes, domain: PortRange = ALL_PORTS) -> Html:
    """The lanes, one below the other; `key` is what no other picture of the page has."""
    height = LANE * len(lanes)
    ticks = TICKS if domain == ALL_PORTS else ()
    tints = _tints(lanes)
    svg = element(
        "svg",
        element("title", what, id=f"{key}-title"),
        element("desc", _told(lanes), id=f"{key}-desc"),
        [_line(tick, domain, height) for tick in ticks],
        [_lane(place, *lane, domain, tints) for place, lane in enumerate(lanes.items())],
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
    place: int, lane: str, spans: Sequence[Span], domain: PortRange, tints: Mapping[str, int]
) -> Html:
    y, inside = (
        str(LANE * place + (LANE - BAR) // 2),
        [one for one in spans if _within(one, domain)],
    )
    middle = str(LANE * place + LANE // 2)
    return element(
        "g",
        element("line", x1="0", x2="100%", y1=middle, y2=middle, class_="rail"),
        [_bar(lane, span, y, domain, tints) for span in _few(inside)],
    )


def _bar(lane: str, span: Span, y: str, domain: PortRange, tints: Mapping[str, int]) -> Html:
    first, last = max(span.ports.first, domain.first), min(span.ports.last, domain.last)
    width = (last - first + 1) / len(domain) * 100
    return element(
        "rect",
        element("title", f"{lane} {span.ports}: {span.owner}"),
        x=_percent(first, domain),
        width=f"{width:.3f}%",
        y=y,
        height=str(BAR),
        class_=f"bar t{tints.get(span.owner, 0)}",
    )


def _percent(port: int, domain: PortRange) -> str:
    """Where a port begins."""
    return f"{(port - domain.first) / len(domain) * 100:.3f}%"


def _within(span: Span, domain: PortRange) -> bool:
    return span.ports.overlaps(domain)


def _tints(lanes: Lanes) -> dict[str, int]:
    """A shade for each owner, so that neighbours can be told apart."""
    owners = dict.fromkeys(span.owner for spans in lanes.values() for span in spans)
    return {owner: place % TINTS for place, owner in enumerate(owners)}


def _few(spans: Sequence[Span]) -> list[Span]:
    """As many bars as can be told apart: where there are more, those nearest each other are one."""
    drawn = sorted(spans, key=lambda one: one.ports)
    gap = 16
    while len(drawn) > MOST_BARS:
        drawn, gap = _joined(drawn, gap), gap * 2
    return drawn


def _joined(spans: Iterable[Span], gap: int) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        before = found[-1] if found else None
        if before is None or span.ports.first - before.ports.last > gap:
            found.append(span)
            continue
        last = max(before.ports.last, span.ports.last)
        owner = before.owner if before.owner == span.owner else "several"
        found[-1] = Span(PortRange(before.ports.first, last), owner)
    return found


def _told(lanes: Lanes) -> str:
    """The picture in a sentence."""
    said = [
        f"{lane}: {', '.join(str(one.ports) for one in spans[:8])}"
        + (f" and {len(spans) - 8:,} more" if len(spans) > 8 else "")
        for lane, spans in lanes.items()
    ]
    return "; ".join(said) or "No ports."
