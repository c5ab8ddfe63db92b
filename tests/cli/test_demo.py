"""What the demonstration says at its end; what it does is tried by whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.demo import typed


def test_the_command_is_told_so_that_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / ".venv/bin/portranger"
    command.parent.mkdir(parents=True)
    command.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert typed(".venv/bin/portranger") == ".venv/bin/portranger"
    monkeypatch.setenv("PATH", str(command.parent))
    assert typed(str(command)) == "portranger"
