"""A fault that is put into a running agent: reading a manifest raises an exception if it is marked
by its name or a label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rules import manifests
from tests.spaces import ROOT

MARK = "boom"  # the label, or how the name begins
TOGETHER = "quarrel"  # the name of a machine that cannot be held against others
SAID = "injected by a test"

# Python runs this before anything else of the agent is imported.
CUSTOM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rules import manifests
from rules import conflicts
from tests.faulty import faulty, quarrelling
manifests.read = faulty(manifests.read)
conflicts.clashes = quarrelling(conflicts.clashes)
"""


def faulty(read: Any) -> Any:
    """The same reader, but for what is marked."""

    def tried(document: Any, **options: Any) -> manifests.Reading:
        if is_marked(document):
            raise ZeroDivisionError(SAID)
        found: manifests.Reading = read(document, **options)
        return found

    return tried


def quarrelling(clashes: Any) -> Any:
    """What machines mean together cannot be told while one has a certain name."""

    def tried(machines: Any) -> Any:
        if any(one.name == TOGETHER for one in machines):
            raise ZeroDivisionError(SAID)
        return clashes(machines)

    return tried


def is_marked(document: Any) -> bool:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    named = str(metadata.get("name")) if isinstance(metadata, dict) else ""
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return named.startswith(MARK) or (isinstance(labels, dict) and MARK in labels)


def environment(folder: Path) -> Mapping[str, str]:
    """For a daemon that is to have that fault."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CUSTOM)
    return {"PYTHONPATH": str(folder)}
