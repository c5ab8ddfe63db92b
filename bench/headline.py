"""The table of the README: a few of the numbers in docs/bench/results.json, as they are there."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.measure import Figures
from bench.report import FOLDER, RESULTS

README = FOLDER.parents[1] / "README.md"
BOUNDS = ("at most", "at least")
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
ROWS = (
    ("TCP and UDP 1000-8000 set up", "control-range", "set-up, of iptables-legacy-restore"),
    ("one of them changed", "control-range", "change, of iptables-legacy-restore"),
    ("both removed", "control-range", "removal, of iptables-legacy-restore"),
    ("one of them changed", "control-range", "change, of nft -f"),
    ("both removed", "control-range", "removal, of nft -f"),
    ("a range changed", "control-ports", "change, 60,000 ports, of 10"),
    ("5,000 ranges from nothing", "control-many", "of nft -f"),
    ("a range changed", "control-one-of", "one of 5000, more than one of 10"),
    ("a new UDP flow, processor time", "flows-udp", "our map of 5000, of a bare dnat"),
    ("a new TCP connection, the same", "flows-tcp", "our map of 5000, of a bare dnat"),
    ("an open TCP stream", "flows-stream", "through a map of 5000, of routing"),
    ("2,000 ranges of 200 Services", "services-flows", "rate with 2,000 ranges, of one (shifted)"),
    ("1,000 namespaces of 4 ranges", "daemon-crowd", "start until ready, rules to be made"),
    ("the same, nothing to do", "daemon-crowd", "resync, nothing to do"),
    ("one manifest of 1,000 saved", "daemon-crowd", "one file saved until its rules are there"),
    ("the daemon, 100 namespaces", "daemon-some", "resident memory, idle"),
)


def renewed(text: str, results: Mapping[str, object]) -> str:
    """A README with the table of these results."""
    begin, end = re.escape(BEGIN), re.escape(END)
    lines = "\n".join(table(results))
    return re.sub(f"{begin}.*?{end}", lambda _: f"{BEGIN}\n{lines}\n{END}", text, flags=re.DOTALL)


def table(results: Mapping[str, object]) -> Iterator[str]:
    """The lines of the table; what was not measured is left out."""
    sections = results.get("sections")
    yield "| | | measured | goal | `make bench ARGS=` |"
    yield "|---|---|---|---|---|"
    for what, section, name in ROWS:
        figures = sections.get(section, {}).get("figures", {}) if isinstance(sections, dict) else {}
        if name in figures:
            said = _said(figures[name])
            yield f"| {what} | {name} | {said} | `{section}` |"


def _said(figure: Figures) -> str:
    """What was measured, and what it should be."""
    value, unit = float(figure["value"]), figure["unit"]
    bounds = [f"{kind} {figure[kind]} {unit}" for kind in BOUNDS if kind in figure]
    most, least = (float(figure.get(kind, value)) for kind in BOUNDS)
    missed = not least <= value <= most
    return f"{value:.3g} {unit} | {'; '.join(bounds)}{': missed' if missed else ''}"


def renew(readme: Path = README) -> Path:
    """Bring the README up to date with what was measured last."""
    results = json.loads((FOLDER / RESULTS).read_text())
    readme.write_text(renewed(readme.read_text(), results))
    return readme
