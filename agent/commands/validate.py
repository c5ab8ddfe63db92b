"""`portranger validate`: every problem, or that there is none."""

from collections.abc import Sequence

from agent.commands.common import BAD_MANIFEST, OK, reported
from agent.console import Console
from agent.sources.files import load
from rules.manifests import MOST_ENTRIES


def validate(paths: Sequence[str], console: Console, *, most: int = MOST_ENTRIES) -> int:
    snapshot = load(paths, console.stdin, most=most)
    if reported(snapshot, console):
        return BAD_MANIFEST
    console.say(f"{snapshot.count} manifests, all valid")
    return OK
