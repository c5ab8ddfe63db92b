"""The sdist and the wheel: the same wherever they are built, complete, and fit for any Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.building import EPOCH, copied
from tests.spaces import ROOT, run
from tests.systemd.trees import PATIENCE

SDIST, WHEEL = "portranger-0.1.0.tar.gz", "portranger-0.1.0-py3-none-any.whl"


def build(source: Path, target: Path, *, umask: int, zone: str) -> Path:
    """Both, as `make dist` builds them, by somebody with these habits."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", "release.dist", str(target)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "TZ": zone, "PYTHONPATH": str(source)},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def here(folder: Path) -> Path:
    """The clone as it is now: it may be edited meanwhile."""
    return copied(ROOT, folder / "here", date="2001-02-03", mode="u+w,go=")


@pytest.fixture(scope="module")
def first(folder: Path, here: Path) -> Path:
    return build(here, folder / "first", umask=0o077, zone="Asia/Tokyo")


@pytest.fixture(scope="module")
def second(folder: Path, here: Path) -> Path:
    source = copied(here, folder / "some/where/else", date="2024-05-06", mode="ugo+rw")
    return build(source, folder / "second", umask=0o002, zone="UTC")


@pytest.mark.parametrize("name", [SDIST, WHEEL])
def test_it_is_the_same_wherever_it_is_built(first: Path, second: Path, name: str) -> None:
    assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_sdist_has_all_that_is_tracked(first: Path, here: Path) -> None:
    listed = run("git", "ls-files", code=None)
    if listed.returncode != 0:
        pytest.skip("needs git, and a clone: what is tracked is not known here")
    with tarfile.open(first / SDIST) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (here / name).is_file()}
    assert tracked - packed == set()
    assert [name for name in packed if "__pycache__" in name or name.startswith(".venv")] == []


def test_the_wheel_has_the_packages_and_the_licence_and_nothing_else(
    first: Path, here: Path
) -> None:
    with zipfile.ZipFile(first / WHEEL) as archive:
        names = archive.namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"agent", "rules", "portranger-0.1.0.dist-info"}
    assert "portranger-0.1.0.dist-info/licenses/LICENSE" in names
    ours = [path for top in ("agent", "rules") for path in here.glob(f"{top}/**/*.*")]
    expected = {str(path.relative_to(here)) for path in ours}
    assert expected - set(names) == set()


def test_the_wheel_works_in_a_bare_environment(first: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    pip = (tmp_path / "venv/bin/python", "-m", "pip", "install", "-q", "--no-compile")
    run(*pip, "--require-hashes", "-r", ROOT / "requirements/runtime.txt")
    run(*pip, "--no-deps", "--no-index", first / WHEEL)
    command = tmp_path / "venv/bin/portranger"
    assert run(command, "--version").stdout == "portranger, version 0.1.0\n"
    told = run(command, "validate", "-f", ROOT / "examples/desktop.yaml").stdout
    assert told == "1 manifests, all valid\n"
