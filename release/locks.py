"""The locks: in requirements/, for each part of an environment, all versions and their hashes.

pip installs nothing from them whose hash is not there (--require-hashes). The hashes are those of
all files of a version, for any platform and any Python: one lock serves Debian 12 and 13 alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rules.values import Value

FOLDER = Path(__file__).parents[1] / "requirements"

PARTS: Mapping[str, str] = {
    "build": "what builds and installs everything else",
    "runtime": "what the agent needs",
    "iptables": "what its iptables backend needs, which is built from source",
    "dev": "what `make check` and `make test` need",
}
"""Each part, and what it is for. Every part is installed after those before it."""

HEAD = """\
# {what}: versions, and the hashes of all their files.
# Written by `make lock`; a change of it makes .venv anew.
"""


class Locked(Value, kw_only=True):
    """One version of a distribution, and the SHA-256 of each of its files."""

    part: str
    name: str
    version: str
    hashes: tuple[str, ...]


def canonical(name: str) -> str:
    """The name as the index and purl write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def written(part: str, locked: Iterable[Locked]) -> str:
    """The text of a lock."""
    what = PARTS[part]
    lines = [HEAD.format(what=what[0].upper() + what[1:])]
    for one in sorted(locked, key=lambda one: canonical(one.name)):
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(one.hashes)]
        lines.append(" \\\n".join([f"{one.name}=={one.version}", *hashes]) + "\n")
    return "".join(lines)


def read(part: str, text: str) -> tuple[Locked, ...]:
    """What a lock says."""
    joined = text.replace("\\\n", " ")
    lines = [line.split() for line in joined.splitlines() if line and not line.startswith("#")]
    return tuple(_read_line(part, *words) for words in lines)


def _read_line(part: str, pin: str, *options: str) -> Locked:
    name, version = pin.split("==")
    hashes = tuple(option.removeprefix("--hash=sha256:") for option in options)
    return Locked(part=part, name=name, version=version, hashes=hashes)


def everything(*parts: str) -> tuple[Locked, ...]:
    """What is locked for these parts, or for all of them."""
    named = parts or tuple(PARTS)
    return tuple(one for part in named for one in read(part, path(part).read_text()))


def path(part: str) -> Path:
    """Where the lock of a part is."""
    return FOLDER / f"{part}.txt"
