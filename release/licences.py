"""The licences of what is locked: which are accepted, and the table of them in docs/.

The table has no versions, so it changes when a dependency comes, goes or changes its licence, and a
change of it is read by somebody.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from release.components import components
from release.locks import PARTS
from release.sbom import EMBEDDED, SYSTEM

ACCEPTED = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "MPL-2.0", "PSF-2.0"),
        *("GPL-2.0-only", "GPL-2.0-or-later"),
    }
)
"""Licences that somebody has looked at. The last line is that of netfilter's own libraries and of
what speaks to them."""

BEGIN, END = "<!-- licences: written by `make sbom` -->\n", "<!-- licences end -->\n"
USES = {**PARTS, "system": "loaded from the operating system"}


def rows() -> list[tuple[str, str, str]]:
    """Name, licence and use of everything, in the order of the parts."""
    found = components([here()], tuple(PARTS))
    order = list(USES)
    listed = [(order.index(one.part), one.name, one.licence) for one in found]
    listed += [(order.index("system"), name, licence) for name, (licence, _, _) in SYSTEM.items()]
    listed += [(order.index("runtime"), *told) for told in EMBEDDED.values()]
    return [(name, licence, order[number]) for number, name, licence in sorted(listed)]


def here() -> str:
    """Where the environment that this runs in keeps its packages."""
    return str(distribution("click").locate_file(""))


def not_accepted(expression: str) -> set[str]:
    """The licences in an expression that nobody has looked at."""
    words = expression.replace("(", " ").replace(")", " ").split()
    return {word for word in words if word not in ("AND", "OR", "WITH")} - ACCEPTED


def table() -> str:
    """The table, as Markdown."""
    lines = ["| name | licence | part |", "|---|---|---|"]
    lines += [f"| {name} | {licence} | {part} |" for name, licence, part in rows()]
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """The text of a page, with the table of today in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renewed(page.read_text()))
