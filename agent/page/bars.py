"""Which bars a lane has: one a range, as long as an eye can tell them apart. Where many lie closer
than that, one bar stands for them, and it does not pose as a range: it knows how many ports it has.
"""

from collections.abc import Iterator, Sequence

from rules.ports import PortRange, coalesce
from rules.values import Value

MOST_BARS = 200  # in a lane
GRAINS = 400  # of a lane: each is about two pixels of a wide screen
WIDE = 4  # grains of a range that stands for itself, whatever is beside it
PIECE = 20  # grains of a joined bar: it should say what is there, not what is everywhere


class Span(Value):
    """A range, and whose it is."""

    ports: PortRange
    owner: str


class Bar(Value, kw_only=True):
    """What is drawn in one piece."""

    ports: PortRange
    owner: str
    ranges: int = 1
    taken: int  # of these ports

    @property
    def has_gaps(self) -> bool:
        return self.taken < len(self.ports)


def bars(spans: Sequence[Span], domain: PortRange, most: int = MOST_BARS) -> list[Bar]:
    """Those of a lane that shows these ports, in their order."""
    ordered = sorted((one for one in spans if one.ports.overlaps(domain)), key=_place)
    grain = len(domain) // GRAINS
    found = [bar for near in _clusters(ordered, grain) for bar in _told_apart(near, domain, grain)]
    while len(found) > most:
        grain = max(1, 2 * grain)
        found = [_joined(near, domain) for near in _clusters(ordered, grain)]
    return found


def _place(span: Span) -> tuple[PortRange, str]:
    return span.ports, span.owner


def _clusters(ordered: Sequence[Span], grain: int) -> Iterator[list[Span]]:
    """Those that no eye sees a gap between, a piece at a time."""
    near: list[Span] = []
    last = 0
    for span in ordered:
        if near and not (
            span.ports.first - last <= grain + 1
            and max(last, span.ports.last) - near[0].ports.first < PIECE * grain
            and max(len(near[-1].ports), len(span.ports)) <= WIDE * grain
        ):
            yield near
            near, last = [], 0
        near.append(span)
        last = max(last, span.ports.last)
    if near:
        yield near


def _told_apart(near: Sequence[Span], domain: PortRange, grain: int) -> list[Bar]:
    """One by one, where together they hide no more free ports than an eye would miss anyway."""
    whole = _joined(near, domain)
    if len(whole.ports) - whole.taken > grain:
        return [whole]
    return [_joined([span], domain) for span in near]


def _joined(near: Sequence[Span], domain: PortRange) -> Bar:
    seen = coalesce(
        PortRange(max(one.ports.first, domain.first), min(one.ports.last, domain.last))
        for one in near
    )
    owners = {one.owner for one in near}
    return Bar(
        ports=near[0].ports if len(near) == 1 else PortRange(seen[0].first, seen[-1].last),
        owner=near[0].owner if len(owners) == 1 else "several",
        ranges=len(near),
        taken=len(near[0].ports) if len(near) == 1 else sum(map(len, seen)),
    )
