"""The ports that annotations declare: ranges for clusters whose API has no portRanges, and ends
for named ports."""

from collections.abc import Iterable

from rules.manifests.metadata import PORT_END, PORT_RANGES, Annotations
from rules.manifests.ports import PORT_FIX, PROTOCOLS, Entry, too_many
from rules.model import Protocol
from rules.ports import HIGHEST, LOWEST
from rules.problems import dotted, shown

_LONGEST_PORT = len(str(HIGHEST))


def lengthen(annotations: Annotations, entries: Iterable[Entry]) -> None:
    """Let named ports become ranges where a port-end annotation says so."""
    keys = [key for key in annotations.texts if key.startswith(PORT_END)]
    if not keys:
        return
    by_name = {entry.name: entry for entry in entries}
    for key in keys:
        name = key[len(PORT_END) :]
        last = annotated_end(annotations, key)
        entry = by_name.get(name)
        if entry is None:
            no_such_port(annotations, key, name)
        elif entry.ended:
            annotations.problem(
                key,
                "end-and-annotation",
                f"is also said by end in {dotted(entry.path)}",
                "Keep one of the two.",
            )
        elif last is not None and ends_behind(annotations, key, last, entry.first):
            entry.last, entry.range, entry.ended = last, last != entry.first, True


def annotated_end(annotations: Annotations, key: str) -> int | None:
    """The port that a port-end annotation names, if it is one."""
    number = decimal(annotations.text(key) or "")
    if number is None:
        annotations.problem(key, "not-an-integer", "must be a whole number", PORT_FIX)
    elif not LOWEST <= number <= HIGHEST:
        annotations.problem(key, "port-out-of-range", "is not a port number", PORT_FIX)
    else:
        return number
    return None


def ends_behind(annotations: Annotations, key: str, last: int, first: int) -> bool:
    """Whether a range that begins there may end so."""
    if last < first:
        annotations.problem(
            key,
            "end-before-start",
            f"is below the port it starts at, which is {first}",
            f"Write a number from {first} to {HIGHEST}.",
        )
    return last >= first


def no_such_port(annotations: Annotations, key: str, name: str) -> None:
    annotations.problem(
        key,
        "no-such-port",
        f"is for a port named {shown(name)}, and there is none",
        "Give the port that name, or remove the annotation.",
    )


def decimal(text: str) -> int | None:
    """The number in plain decimal digits that a text is; one beyond all ports if it is long."""
    if not (text.isascii() and text.isdigit()) or (text[0] == "0" and text != "0"):
        return None
    return int(text) if len(text) <= _LONGEST_PORT else HIGHEST + 1


def annotated(annotations: Annotations, limit: int) -> list[Entry]:
    """What the port-ranges annotation declares."""
    text = annotations.text(PORT_RANGES)
    if text is None:
        return []
    items = text.split(",")
    if len(items) > limit:
        _, path = annotations.texts[PORT_RANGES]
        too_many(annotations.document, path[len(annotations.document.path) :], len(items), limit)
        return []
    entries = [_item(annotations, item.strip()) for item in items]
    return [entry for entry in entries if entry]


def _item(annotations: Annotations, item: str) -> Entry | None:
    ports, slash, protocol_text = item.partition("/")
    protocol = PROTOCOLS.get(protocol_text.upper()) if slash else Protocol.TCP
    start, dash, end = ports.partition("-")
    first = decimal(start)
    last = decimal(end) if dash else first
    fix = "Write items such as 22, 1000-8000 or 1000-8000/udp with commas between them."
    if first is None or last is None:
        problem = "bad-annotation", "is neither a port nor a range of ports"
    elif protocol is None:
        problem = "bad-protocol", "must end in /tcp or /udp, or in neither"
    elif not (LOWEST <= first <= HIGHEST and LOWEST <= last <= HIGHEST):
        problem = "port-out-of-range", f"has a port outside {LOWEST} to {HIGHEST}"
    elif last < first:
        problem = "end-before-start", "ends below its start"
    else:
        return Entry(protocol, first, last, annotations.texts[PORT_RANGES][1])
    annotations.problem(PORT_RANGES, *problem, fix, item)
    return None
