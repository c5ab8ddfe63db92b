"""The manual names every command and every option, and none that does not exist; what it shows can
be typed, and its pages are ones that `man` can show."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from agent import kubectl
from agent.cli import portranger
from agent.errors import BadConfiguration, Usage
from tests.docs.mdoc import blocks, sections, unescaped
from tests.docs.words import commands, parsed
from tests.spaces import ROOT

DOCS = ROOT / "docs"
MANUAL = DOCS / "portranger.8"
PLUGIN = DOCS / "kubectl-portranger.1"
PAGES = sorted(page for page in DOCS.iterdir() if re.fullmatch(r"\.[1-8]", page.suffix))
SPELLING = re.compile(r"\bFl (-?[a-z][a-z-]*)")
COMMANDS = sorted(portranger.commands)
EXPECTED = ("FILES", "ENVIRONMENT", "EXAMPLES", "SIGNALS", "EXIT STATUS", "SEE ALSO")


def spelt(text: str) -> set[str]:
    """The options in a piece of the manual, as one types them."""
    return {f"-{name}" for name in SPELLING.findall(text)}


def options(command: click.Command) -> list[set[str]]:
    """The spellings of each option of a command, but for --help, which all have."""
    given = [one for one in command.params if isinstance(one, click.Option)]
    return [{*one.opts, *one.secondary_opts} for one in given]


def shown(text: str) -> list[str]:
    """The lines that the examples of a page have one type."""
    lines = [unescaped(line) for line in re.findall(r"^\.Dl (.*)$", text, re.MULTILINE)]
    return [*lines, *(line for block in blocks(text) for line in block.splitlines() if line)]


@pytest.fixture(scope="module")
def manual() -> dict[str, str]:
    return sections(MANUAL.read_text(), "Sh")


def test_it_has_a_section_on_each_command(manual: dict[str, str]) -> None:
    assert sorted(sections(manual["COMMANDS"], "Ss")) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_exactly_the_options_that_it_is_said_to_have(
    manual: dict[str, str], name: str
) -> None:
    said = spelt(sections(manual["COMMANDS"], "Ss")[name])
    real = options(portranger.commands[name])
    assert said <= set().union(*real)
    for spellings in real:
        assert said & spellings, f"{name}: {spellings} is missing"


def test_every_spelling_of_every_option_is_in_it(manual: dict[str, str]) -> None:
    real = [options(command) for command in (portranger, *portranger.commands.values())]
    every = {spelling for command in real for option in command for spelling in option}
    assert every <= spelt(MANUAL.read_text())


def test_the_exit_codes_are_those_of_the_help(manual: dict[str, str]) -> None:
    said = re.findall(r"^\.It (\d+)$", manual["EXIT STATUS"], re.MULTILINE)
    assert said == re.findall(r"\b\d+\b", portranger.epilog or "")


def test_it_has_the_sections_that_one_looks_for(manual: dict[str, str]) -> None:
    assert set(EXPECTED) <= set(manual)


def test_every_example_can_be_typed(manual: dict[str, str]) -> None:
    lines = [line for line in shown(manual["EXAMPLES"]) if line.startswith("portranger ")]
    assert len(lines) > 5
    for line in lines:
        parsed(line)


def test_the_capabilities_are_those_of_the_unit(manual: dict[str, str]) -> None:
    unit = (ROOT / "systemd" / "portranger.service").read_text()
    [given] = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    said = re.findall(r"^\.It Dv (CAP_\w+)$", manual["SECURITY CONSIDERATIONS"], re.MULTILINE)
    assert said == given.split()


def test_the_variables_are_those_that_are_read(manual: dict[str, str]) -> None:
    named = re.findall(r"^\.(?:It )?Ev (.*)$", manual["ENVIRONMENT"], re.MULTILINE)
    said = set(re.findall(r"[A-Z_]+", " ".join(named)))
    code = "".join(path.read_text() for path in (ROOT / "agent").rglob("*.py"))
    read = set(re.findall(r"""(?:environ\.get\(|environ\[|IN_A_POD = )"([A-Z_]+)\"""", code))
    assert read <= said
    assert [name for name in said if f'"{name}"' not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_faultless(page: Path) -> None:
    if not shutil.which("mandoc"):
        pytest.skip("needs mandoc (Debian: mandoc)")
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", page],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_man_shows_a_page_without_complaint(page: Path) -> None:
    if not shutil.which("man"):
        pytest.skip("needs man (Debian: man-db)")
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", page],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "PAGER": "cat"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith(page.stem.upper())
    lines = [re.sub(".\b", "", line) for line in done.stdout.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_pages_refer_to_others_that_are_there() -> None:
    ours = {(page.stem, page.suffix[1:]) for page in PAGES}
    for page in PAGES:
        for name, section in re.findall(r"^\.Xr (\S+) (\d)", page.read_text(), re.MULTILINE):
            assert "portranger" not in name or (name, section) in ours


def test_the_plugin_has_exactly_the_commands_and_options_that_its_page_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PLUGIN.read_text()
    names = re.findall(r"^\.It Cm (\w+)$", text, re.MULTILINE)
    given = set()
    for name in names:
        assert kubectl.run([name, "--help"], {}) == 0
        given |= set(re.findall(r"(?<=[\s,])--?[a-z][a-z-]*", capsys.readouterr().out))
    kubectl.run(["--help"], {})
    told = capsys.readouterr().out
    assert spelt(text) == given | set(re.findall(r"(?<=\n  )--[a-z]+", told))
    assert set(names) == set(re.findall(r"^    (\w+) ", told, re.MULTILINE))


def test_the_plugin_has_the_version_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert kubectl.run(["--version"], {}) == 0
    assert capsys.readouterr().out == f"kubectl portranger, version {version('portranger')}\n"


@pytest.mark.parametrize(("typed", "meant"), [("statsu", "status"), ("explian", "explain")])
def test_the_plugin_guesses_at_a_command_that_is_mistyped(typed: str, meant: str) -> None:
    with pytest.raises(Usage, match=rf"no such command '{typed}'\. Did you mean '{meant}'\?"):
        kubectl.run([typed, "desktop"], {})


def test_the_plugin_does_not_guess_wildly() -> None:
    with pytest.raises(Usage, match=r"no such command 'x'\. See `kubectl portranger --help`"):
        kubectl.run(["x"], {})


def test_every_example_of_the_plugin_can_be_typed() -> None:
    lines = shown(sections(PLUGIN.read_text(), "Sh")["EXAMPLES"])
    calls = [call for line in lines for call in commands(line, "kubectl")]
    ours = [call[1:] for call in calls if call[0] == "portranger"]
    assert len(ours) > 2
    for call in ours:
        with pytest.raises(BadConfiguration):  # it came as far as looking for the cluster
            kubectl.run([*call, "--kubeconfig", "/nowhere"], {})


def test_the_exit_codes_of_the_plugin_are_those_of_its_help() -> None:
    said = re.findall(r"^\.It (\d+)$", PLUGIN.read_text(), re.MULTILINE)
    assert said == re.findall(r"\b\d+\b", kubectl.EPILOG)
