"""HTML that cannot be broken out of: a plain text is always escaped, whoever wrote it, and what is
not escaped was made by `element`."""

from collections.abc import Iterable
from html import escape
from re import compile as compiled

from rules.problems import printable

LONGEST = 600  # letters of one text
VOID = frozenset({"link", "meta"})
# Nothing here should hold a secret. But error texts are also what others wrote: a plug-in that
# fails, a server that refuses. What looks like a credential in them is left out.
SECRET = compiled(
    r"(?i)(?P<name>\b(?:bearer|basic)\s+|\b[\w-]{0,32}?(?:token|passw(?:or)?d|secret|api-?key)\b[\"']?\s*[=:]\s*)"
    r"[\"']?[^\s\"',;]{4,}"
    r"|(?P<user>://)[^\s/@]+@"
    r"|\beyJ[\w-]{8,}(?:\.[\w-]+)*"
)


class Html(str):
    """Markup, complete and escaped."""

    __slots__ = ()


Content = str | Iterable[str]


def element(tag: str, /, *content: Content | None, **attributes: str | bool | None) -> Html:
    """An element; `class_` and `aria_label` are written class and aria-label, and what is None or
    False is not there."""
    opening = tag + "".join(
        f" {_key(key)}" if value is True else f' {_key(key)}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{joined(*content)}</{tag}>")


def joined(*content: Content | None) -> Html:
    """One after the other."""
    return Html("".join(map(_markup, content)))


def name(text: str, limit: int = 200) -> Html:
    """What others named: kept apart, so that a name from right to left does not turn its
    neighbours around."""
    return element("bdi", _clean(text, limit))


def discreet(text: str) -> str:
    """A text by others, without what looks like a credential."""
    shorter = text[: 2 * LONGEST]
    return SECRET.sub(lambda found: f"{found['name'] or found['user'] or ''}[hidden]", shorter)


def _key(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _escaped(text: str) -> str:
    return escape(_clean(text, LONGEST), quote=True)


def _clean(text: str, limit: int) -> str:
    """As `printable` has it; most texts are short, and fit to be shown as they are."""
    if len(text) <= limit:
        return text if text.isprintable() else printable(text, limit)
    return printable(text, limit) if not text[:limit].isprintable() else f"{text[: limit - 1]}…"


def _markup(content: Content | None) -> str:
    if content is None:
        return ""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return _escaped(content)
    return "".join(map(_markup, content))
