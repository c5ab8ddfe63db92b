"""Who applies or clears beside a daemon that keeps the same namespace is told what came of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from agent.commands.apply import apply
from agent.commands.clear import clear
from agent.config import Config
from agent.console import Console
from tests.daemon.running import Node, forwarded
from tests.spaces import kernel, manifest

KEPT = {"tcp 22"}


def yes(_: str) -> bool:
    return True


@pytest.fixture
def other(tmp_path: Path, blue: str) -> str:
    path = tmp_path / "other.yaml"
    path.write_text(manifest(blue, "80"))
    return str(path)


def test_what_a_daemon_undoes_is_not_told_as_done(node: Node, blue: str, other: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    config = Config(state_dir=str(node.state), listen=None)
    how: Any = {"kernel": kernel("auto"), "daemon": config, "confirm": yes}
    with node.running() as daemon:
        for command, what in ((clear, blue), (apply, other)):
            warned = io.StringIO()
            assert command([what], Console(io.StringIO(), warned, bytes), **how) == 75
            who = f"portranger run (pid {daemon.process.pid})"
            assert f"{who} has undone it in namespace {blue}" in warned.getvalue()
        assert forwarded(blue) == KEPT


def test_beside_a_daemon_what_is_not_its_own_stands(
    node: Node, blue: str, red: str, other: str
) -> None:
    node.save("a.yaml", manifest(red, "22"))
    config = Config(state_dir=str(node.state), listen=None)
    how: Any = {"kernel": kernel("auto"), "daemon": config, "confirm": yes}
    with node.running():
        for command, what in ((apply, other), (clear, blue)):
            warned = io.StringIO()
            assert command([what], Console(io.StringIO(), warned, bytes), **how) == 0
            assert warned.getvalue() == ""
