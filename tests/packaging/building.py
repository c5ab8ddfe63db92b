"""Copies of the clone that differ in what must not matter, and a Debian to build packages in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from release.dist import GENERATED
from rules.values import Value
from tests.spaces import run
from tests.systemd.trees import SOURCE, bare, stage

EPOCH = "1700000000"
LEFT_OUT = shutil.ignore_patterns(*GENERATED)

# Two builds at once: by `make deb`, and by its two steps from a copy elsewhere, of another age and
# with another umask. The tree of the second is kept as `make install` left it.
BUILD = f"""\
set -eu
export SOURCE_DATE_EPOCH={EPOCH}
# As a newer Python warns unasked.
export PYTHONWARNINGS='always:invalid escape sequence:DeprecationWarning'
(make --silent deb >/first.log 2>&1 || {{ cat /first.log; exit 1; }}) &
first=$!
umask 077
mkdir -p /srv/some
cp -r {SOURCE} /srv/some/where
find /srv/some/where -exec touch --date=2001-02-03 {{}} +
cd /srv/some/where
make --silent install PREFIX=/usr DESTDIR=/srv/tree PYTHON=/usr/bin/python3 >/second.log 2>&1 ||
    {{ cat /second.log; exit 1; }}
mkdir {SOURCE}/kept
cp -a /srv/tree {SOURCE}/kept/tree
python3 -m release.debian /srv/tree {SOURCE}/kept/again
wait $first
cat /first.log /second.log
"""


class Built(Value):
    """Two packages of the same clone, and what `make install` puts into a tree."""

    package: Path
    again: Path
    tree: Path
    told: str


def copied(source: Path, target: Path, *, date: str, mode: str) -> Path:
    """A copy of a clone, with other times and rights."""
    shutil.copytree(source, target, ignore=LEFT_OUT)
    run("chmod", "-R", mode, target)
    run("find", target, "-exec", "touch", f"--date={date}", "{}", "+")
    return target


def packages(folder: Path) -> Iterator[Built]:
    """Both packages, built once for all tests of a run."""
    with stage(bare()) as made:
        told = made.says(BUILD)
        [package] = (made.source / "dist").glob("*.deb")
        [again] = (made.source / "kept/again").glob("*.deb")
        run("cp", "-a", package, folder)
        yield Built(folder / package.name, again, made.source / "kept/tree", told)
