"""Manual pages as tests read them: their sections, and the blocks that are shown as they are."""

from __future__ import annotations

import re

SPECIAL = {r"\(dq": '"', r"\(aq": "'", r"\(ti": "~", r"\e": "\\", r"\-": "-", r"\&": ""}


def sections(text: str, macro: str) -> dict[str, str]:
    """The sections of a page by their headings; `macro` is Sh or, below that, Ss."""
    parts = re.split(rf"^\.{macro} (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str) -> list[str]:
    """What stands in literal blocks."""
    found = re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", text, re.MULTILINE | re.DOTALL)
    return [unescaped(block) for block in found]


def unescaped(text: str) -> str:
    """As a reader sees it."""
    return re.sub(r"\\(\(..|.)", lambda found: SPECIAL[found[0]], text)
