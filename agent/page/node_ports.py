"""Which node ports Services have, drawn on the two bands of the range."""

from agent.page.axis import ends, legend, picture
from agent.page.bars import Span
from agent.page.markup import Html, element, joined, name
from agent.page.words import counted
from rules.node_ports import Allocations, Held
from rules.ports import PortRange

MOST_HELD = 50  # that are written out


def section(allocations: Allocations | None) -> Html | None:
    """Nothing where an API server gives them."""
    if allocations is None:
        return None
    bands, held = allocations.bands, sorted(allocations.held.items(), key=_place)
    drawn = (
        _band("static", "for those who name their ports", bands.lower, allocations, held),
        _band("dynamic", "for everybody else", bands.upper, allocations, held),
    )
    return element(
        "section",
        element("h2", "Node ports"),
        *drawn,
        legend(*drawn),
        _table(allocations, held) if held else element("p", "No Service has any.", class_="quiet"),
        id="node-ports",
    )


def _place(held: Held) -> tuple[int, int, str]:
    return held[1].first, held[1].last, str(held[0])


def _band(
    band: str, whom: str, ports: PortRange | None, known: Allocations, held: list[Held]
) -> Html | None:
    if ports is None:
        return None
    taken = len(ports) - known.available(ports)
    within = tuple(Span(one, str(holder)) for holder, one in held if one.overlaps(ports))
    what = f"{band} band {ports}: {taken:,} of {len(ports):,} taken"
    return element(
        "div",
        element(
            "p",
            element("strong", f"{band.capitalize()} band"),
            element("span", f" {ports}, {whom}", class_="quiet"),
            element("span", f"{taken:,} of {len(ports):,} taken", class_="count"),
            class_="band-head",
        ),
        picture(f"band-{band}", what, {"": within}, ports),
        ends(ports),
        class_="band",
        id=f"band-{band}",
    )


def _table(known: Allocations, held: list[Held]) -> Html:
    rows = [
        element(
            "tr",
            element("td", str(ports), class_="ports"),
            element("td", holder.protocol.value),
            element("td", _bands_of(known, ports)),
            element("td", name(holder.owner), f" port {holder.port}" if holder.port else ""),
        )
        for holder, ports in held[:MOST_HELD]
    ]
    heads = [element("th", head, scope="col") for head in ("Ports", "Protocol", "Band", "Service")]
    return element(
        "details",
        element("summary", counted(len(held), "allocation")),
        element(
            "div",
            element("table", element("thead", element("tr", heads)), element("tbody", rows)),
            class_="scroll",
        ),
        _rest(len(held) - MOST_HELD),
        id="node-ports-table",
    )


def _bands_of(known: Allocations, ports: PortRange) -> str:
    lower, upper = known.bands.lower, known.bands.upper
    found = ["static"] if lower and ports.overlaps(lower) else []
    return " and ".join([*found, *(["dynamic"] if ports.overlaps(upper) else [])])


def _rest(more: int) -> Html | None:
    if more <= 0:
        return None
    told = joined(f"and {more:,} more: ", element("code", "portranger status -o json"))
    return element("p", told, class_="more")
