"""The locks hold what the project asks for, and what has another hash is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from release.lock import files_of
from release.locks import PARTS, Locked, canonical, everything, path, read, written
from tests.spaces import ROOT, run
from tests.systemd.trees import PATIENCE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("part", PARTS)
def test_a_lock_is_versions_and_hashes_and_names_no_place(part: str) -> None:
    text = path(part).read_text()
    assert "://" not in text
    assert "--index" not in text
    locked = read(part, text)
    assert locked
    for one in locked:
        assert one.hashes
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in one.hashes)
    assert written(part, locked) == text


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        ("runtime", PROJECT["dependencies"]),
        ("iptables", EXTRAS["iptables"]),
        ("dev", EXTRAS["dev"]),
        ("build", tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]),
    ],
)
def test_what_the_project_asks_for_is_locked(part: str, asked: list[str]) -> None:
    locked = {canonical(one.name): one.version for one in everything(part)}
    for text in asked:
        wanted = Requirement(text)
        assert locked[canonical(wanted.name)] in wanted.specifier, text


def test_nothing_is_locked_twice() -> None:
    names = [canonical(one.name) for one in everything()]
    assert len(names) == len(set(names))


def test_what_runs_these_tests_is_what_is_locked() -> None:
    assert {one.name: version(one.name) for one in everything()} == {
        one.name: one.version for one in everything()
    }


def test_all_files_of_a_version_count_and_no_others() -> None:
    page = """
        <a href="https://x/a/some_thing-1.2-py3-none-any.whl#sha256=aa">x</a>
        <a href="../../Some.Thing-1.2.tar.gz#sha256=bb">x</a>
        <a href="https://x/a/some_thing-1.2.1-py3-none-any.whl#sha256=cc">x</a>
        <a href="https://x/a/some_thing_else-1.2-py3-none-any.whl#sha256=dd">x</a>
        <a href="https://x/a/some_thing-1.2-cp313-cp313-linux.whl#md5=ee">x</a>
    """
    assert files_of("some-thing", "1.2", page) == ("aa", "bb")
    with pytest.raises(SystemExit, match="no file of other 1"):
        files_of("other", "1", page)


def test_what_was_written_is_what_is_read() -> None:
    one = Locked(part="dev", name="Thing", version="1.0.post1", hashes=("a" * 64, "b" * 64))
    assert read("dev", written("dev", [one])) == (one,)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make venv` reads of a clone."""
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    run("cp", "-r", *(ROOT / name for name in ("requirements", "release", "rules")), tmp_path)
    (tmp_path / "agent").mkdir()
    return tmp_path


def made(clone: Path, target: str, code: int) -> str:
    """What make says of an error. It downloads."""
    words = ("make", "--silent", "-C", str(clone), target, f"PYTHON={sys.executable}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def tamper(lock: Path) -> None:
    lock.write_text(re.sub(r"sha256:.{8}", "sha256:00000000", lock.read_text()))


def test_a_file_with_another_hash_is_not_installed(clone: Path) -> None:
    """Held to what make itself does, with a lock that somebody tampered with."""
    tamper(clone / "requirements/build.txt")
    assert "DO NOT MATCH THE HASHES" in made(clone, "venv", 2)
    assert not (clone / ".venv/.pins").exists()


def test_developer_tools_are_installed_only_where_they_are_needed(clone: Path) -> None:
    """`make demo` needs no more than `make venv`. Here the tools cannot be installed."""
    assert re.search(r"(?m)^demo:.* venv ", (clone / "Makefile").read_text())
    tamper(clone / "requirements/dev.txt")
    made(clone, "venv", 0)
    [packages] = clone.glob(".venv/lib/python3*/site-packages")
    installed = {canonical(path.name.split("-")[0]) for path in packages.glob("*.dist-info")}
    assert {canonical(one.name) for one in everything("runtime")} <= installed
    assert not installed & {canonical(one.name) for one in everything("dev")}
    assert "DO NOT MATCH THE HASHES" in made(clone, "venv-dev", 2)
    made(clone, "venv", 0)


def test_every_installation_from_a_lock_demands_hashes() -> None:
    for name in ("Makefile", "Containerfile"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        lines = [line for line in text.splitlines() if "requirements/" in line]
        commands = [
            part
            for line in lines
            for part in line.split("&&")
            if re.search(r"(pip|add) .*-r", part)
        ]
        assert commands
        assert [part for part in commands if "--require-hashes" not in part] == []
