"""What the pages under docs/ name is there: files, tests, links and metrics. And what they show of
the command line is what it prints; `python -m tests.docs.test_documents` writes that anew."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.docs.readme import ROOT, rendered

DOCS = ROOT / "docs"
PAGES = {page.name: page for page in sorted(DOCS.glob("*.md"))}
OPERATIONS = DOCS / "operations.md"
DOCUMENTS = DOCS / "documents.md"
# What is written beside these roots is a file of the repository; `rules` alone is a word.
ROOTS = "agent|bench|docs|examples|kubernetes|rules|systemd|tests"
NAMED = re.compile(rf"(?:{ROOTS})/[\w./-]*\w(?:::\w+)?")
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without what is quoted from a terminal or a manifest."""
    return FENCE.sub("", page.read_text())


def named(page: Path) -> list[str]:
    """The files and tests that a page names in quotes."""
    words = (word for quoted in QUOTED.findall(prose(page)) for word in quoted.split())
    return [found[0] for word in words if (found := NAMED.fullmatch(word.strip(",.;:()")))]


@functools.cache
def functions_in(path: Path) -> frozenset[str]:
    """The names of the functions in a file, of which tests are some."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text())
    return frozenset(one.name for one in ast.walk(tree) if isinstance(one, functions))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES.values()], ids=lambda page: page.name)
def test_nobody_is_told_to_install_us_by_name_from_an_index(page: Path) -> None:
    told = re.findall(r"pipx? install[^`\n]*[\s'\"]portranger\b", page.read_text())
    assert told == []


def missing(name: str) -> bool:
    path, _, test = name.partition("::")
    there = ROOT / path
    return not there.exists() or bool(test and test not in functions_in(there))


def headings(page: Path) -> set[str]:
    """What a link can lead to on a page, as GitHub names it."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(page: Path) -> list[list[str]]:
    """The rows of the tables on a page, without their heads."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [
        row
        for index, row in enumerate(cells)
        if index not in heads and not set("".join(row)) <= {"-"}
    ]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_file_and_test_that_a_page_names_is_there(page: Path) -> None:
    assert [name for name in named(page) if missing(name)] == []


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(prose(page)):
        path, _, heading = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not there.exists() or (heading and heading not in headings(there)):
            lost.append(link)
    assert lost == []


def test_a_name_that_is_not_there_is_found_out() -> None:
    assert missing("rules/nothing.py")
    assert missing("tests/docs/test_documents.py::test_nothing")
    assert not missing("tests/docs/test_documents.py::test_a_name_that_is_not_there_is_found_out")


def test_every_point_of_the_source_documents_has_a_test_or_a_reason() -> None:
    bare = [
        row[0]
        for row in rows(DOCUMENTS)
        if "::test_" not in row[-1] and not re.search(r"not built: \w", row[-1])
    ]
    assert bare == []


def test_all_five_source_documents_are_gone_through() -> None:
    text = DOCUMENTS.read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert len(titles) == 5
    tables = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [table.count("::test_") > 8 for table in tables] == [True] * 5


@pytest.mark.needs_root
def test_every_example_of_operations_prints_what_the_page_says() -> None:
    assert rendered(OPERATIONS.read_text()) == OPERATIONS.read_text()


def test_the_map_names_every_module() -> None:
    page = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`(\w+)`", page[page.index("The modules, in the order") :]))
    folders = (ROOT / "agent", ROOT / "rules")
    modules = {path.stem for folder in folders for path in folder.rglob("*.py")} - {"__init__"}
    own = {path.stem for path in (ROOT / "agent/page").glob("*.py")}
    own |= {path.stem for path in (ROOT / "agent/commands").glob("*.py")}
    assert modules - named - own == set()


if __name__ == "__main__":
    OPERATIONS.write_text(rendered(OPERATIONS.read_text()))
