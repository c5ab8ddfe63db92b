"""What is in an environment: each distribution that is locked, with what it says of itself.

The lock tells versions and hashes; the metadata in the environment, licences and who needs whom.
Where the two disagree about a version, nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions

from release.locks import Locked, canonical, everything
from rules.values import Value

PROJECT = "portranger"

SPDX = {
    "Apache License, Version 2.0": "Apache-2.0",
    "License :: OSI Approved :: GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "Apache 2.0": "Apache-2.0",
}
"""What is written where metadata is older than SPDX expressions in it."""


class Component(Value, kw_only=True):
    """A distribution, and what it needs of the others."""

    part: str
    name: str
    version: str
    licence: str
    hashes: tuple[str, ...]
    needs: tuple[str, ...]


def components(paths: Sequence[str], parts: Sequence[str]) -> tuple[Component, ...]:
    """The locked distributions of these parts, as they are in the environment at these paths."""
    found = {canonical(one.metadata["Name"]): one for one in distributions(path=list(paths))}
    locked = {canonical(one.name): one for one in everything(*parts)}
    return tuple(_component(one, found, locked) for _, one in sorted(locked.items()))


def _component(
    locked: Locked, found: dict[str, Distribution], all_locked: Iterable[str]
) -> Component:
    name = canonical(locked.name)
    if name not in found or found[name].version != locked.version:
        there = found[name].version if name in found else "missing"
        raise SystemExit(f"make: {name} is locked as {locked.version}, and is {there}")
    return Component(
        part=locked.part,
        name=name,
        version=locked.version,
        licence=licence(found[name]),
        hashes=tuple(sorted(locked.hashes)),
        needs=needs(found[name], all_locked),
    )


def licence(found: Distribution) -> str:
    """The SPDX expression for it; what it says itself, where that is none we know."""
    words = [
        *told(found, "License"),
        *(line for line in told(found, "Classifier") if line.startswith("License :: ")),
    ]
    known = [SPDX[word] for word in words if word in SPDX]
    return (*told(found, "License-Expression"), *known, *words, "unknown")[0]


def told(found: Distribution, field: str) -> list[str]:
    """What its metadata says in that field."""
    return [str(one) for one in found.metadata.get_all(field) or ()]


def needs(found: Distribution, among: Iterable[str]) -> tuple[str, ...]:
    """Those among these that it requires, its own extras aside."""
    lines = [line for line in found.requires or () if "extra ==" not in line]
    return tuple(sorted(names(lines).intersection(among)))


def names(requirements: Iterable[str]) -> set[str]:
    """What these requirements are about."""
    return {canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in requirements}
