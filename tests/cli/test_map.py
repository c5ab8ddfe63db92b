"""`show --map`: the picture on what it is printed on: a pipe, a file, a terminal of any locale."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import termios
from collections.abc import Mapping

import pytest

from agent.cli import run
from agent.commands.screen import painter, size, speaks_unicode
from agent.commands.show import show
from agent.console import Console
from agent.entry import guarded
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from rules.model import Live, Observed
from tests.unit.samples import POD, egress, forward

UTF8 = {"LANG": "C.UTF-8"}


@pytest.fixture
def kernel() -> MemoryKernel:
    space = MemoryNamespace(POD)
    live = [forward("tcp 22"), forward("tcp 1000-8000"), forward("udp 5060"), egress()]
    space.held = Observed(live=tuple(Live(rule, n, 7, 420) for n, rule in enumerate(live)))
    return MemoryKernel({"desktop": space})


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES", "LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)


def printed(kernel: MemoryKernel, *, colored: bool = False) -> str:
    out = io.StringIO()
    assert show(["desktop"], Console(out, out, bytes, colored), kernel=kernel, as_map=True) == 0
    return out.getvalue()


def on_a_terminal(kernel: MemoryKernel, columns: int) -> str:
    """What a terminal of that width gets."""
    mine, theirs = pty.openpty()
    try:
        with open(theirs, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
            termios.tcsetwinsize(theirs, (24, columns))
            assert show(["desktop"], Console(out, out, bytes), kernel=kernel, as_map=True) == 0
        return everything(mine).replace("\r\n", "\n")
    finally:
        os.close(mine)


def everything(terminal: int) -> str:
    """What was written to a terminal, once nobody can write any more."""
    found = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            found += part
    return found.decode()


def test_a_map_is_eighty_columns_of_ascii_where_nobody_looks(kernel: MemoryKernel) -> None:
    text = printed(kernel)
    assert text.isascii()
    assert text.startswith("namespace desktop (memory: it is all there is)\n  ports 1 to 9000,")
    axes = [line for line in text.splitlines() if set(line.strip()) <= set("AB.*")]
    assert [len(line) for line in axes] == [80, 80]
    assert "VirtualMachine/default/vm/default" in text


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_a_map_is_as_wide_as_the_terminal(kernel: MemoryKernel, columns: int) -> None:
    lines = on_a_terminal(kernel, columns).splitlines()
    assert max(len(line) for line in lines if set(line.strip()) <= set("AB.*")) == columns


def test_columns_in_the_environment_say_how_wide(
    kernel: MemoryKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    lines = printed(kernel).splitlines()
    assert max(len(line) for line in lines if set(line.strip()) <= set("AB.*")) == 50
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert size(io.StringIO()) == (80, 24)


@pytest.mark.parametrize(
    ("environment", "fine"),
    [
        ({}, False),
        ({"LANG": "C"}, False),
        (UTF8, True),
        ({**UTF8, "LC_ALL": "C"}, False),
        ({**UTF8, "LC_ALL": "POSIX"}, False),
        ({"LANG": "de_DE.utf8"}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, True),
    ],
    ids=str,
)
def test_a_terminal_gets_more_than_ascii_only_if_its_locale_has_more(
    kernel: MemoryKernel,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    fine: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = on_a_terminal(kernel, 80)
    assert text.isascii() is not fine
    assert ("\u00b7" in text) is fine


def test_what_is_no_terminal_gets_ascii_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "C.UTF-8")
    assert not speaks_unicode(io.StringIO())


def test_colours_are_only_added(kernel: MemoryKernel) -> None:
    colored = printed(kernel, colored=True)
    assert "\033[36mA\033[0m" in colored
    assert "\033" not in printed(kernel)
    assert painter(colored=False)("A", 3) == "A"


def test_a_namespace_without_a_forward_says_so(kernel: MemoryKernel) -> None:
    kernel.spaces["desktop"].held = Observed(table=True)
    assert "nothing is forwarded" in printed(kernel)


def test_a_map_in_json_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: run(["show", "--map", "-o", "json"])) == 64
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--map is a picture: it does not go with -o json." in printed.err
