"""The ports an interface declares in its own fields, `ports` with or without `end` and
`portRanges`, and what holds for declared ports in every spelling."""

from collections.abc import Iterable, Mapping

from rules.manifests.fields import Fields, folded, nearest
from rules.model import Claim, Protocol
from rules.ports import HIGHEST, LOWEST, PortRange
from rules.problems import Path, dotted

PORT_KEYS = ("name", "protocol", "port", "end")
RANGE_KEYS = ("protocol", "start", "end")
PROTOCOLS = {"TCP": Protocol.TCP, "UDP": Protocol.UDP}
_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_LONGEST_NAME = 15
PORT_FIX = f"Write a number from {LOWEST} to {HIGHEST}."
NAME_FIX = (
    "Use at most 15 lower-case letters, digits and single dashes, at least one letter, "
    "no dash at either end."
)
_INTERFACE_KEYS = frozenset(
    (
        *("name", "model", "macAddress", "ports", "portRanges", "acpiIndex", "bootOrder"),
        *("dhcpOptions", "pciAddress", "state", "tag", "masquerade", "bridge", "slirp", "sriov"),
        *("macvtap", "passt", "binding", "passtBinding"),
    )
)


class Entry:
    """One declared port or range, and where it is written."""

    __slots__ = ("ended", "first", "last", "name", "path", "protocol", "range")

    def __init__(self, protocol: Protocol, first: int, last: int, path: Path) -> None:
        self.protocol = protocol
        self.first = first
        self.last = last
        self.path = path
        self.range = first != last  # whether sharing a port with another is a mistake
        self.ended = False  # whether it is spelt with an end
        self.name = ""

    def __str__(self) -> str:
        ports = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{ports}/{self.protocol.value}"


def declared(interface: Fields, limit: int) -> list[Entry]:
    """What an interface declares in its own fields."""
    near_misses(interface)
    if interface.values.get("ports") and interface.values.get("portRanges"):
        interface.problem(
            "ports-and-ranges",
            "excludes ports, and both are written",
            "Keep one of the two; a single port is a range whose start and end are the same.",
            at=("portRanges",),
        )
    for key in ("ports", "portRanges"):
        values = interface.values.get(key)
        if isinstance(values, list) and len(values) > limit:
            too_many(interface, (key,), len(values), limit)
            return []
    entries = [_port(port) for port in interface.mappings("ports")]
    entries += [_range(ports) for ports in interface.mappings("portRanges")]
    return [entry for entry in entries if entry]


def near_misses(interface: Fields) -> None:
    """Note keys that were meant to be ports or portRanges: without them, every port is open."""
    for key in interface.values:
        if isinstance(key, str) and key not in _INTERFACE_KEYS:
            close = nearest(key, ("ports", "portRanges"), 0.75)
            if not close and "port" in folded(key):
                close = "ports"
            if close:
                interface.problem(
                    "unknown-key",
                    "is not a known key here, and without ports every port is forwarded",
                    f"Write {close} instead.",
                    at=(key,),
                )


def check_single(interface: Fields, entries: Iterable[Entry]) -> None:
    """Note the ranges of an interface that cannot forward them."""
    for entry in entries:
        if entry.ended:
            interface.problem(
                "ranges-need-masquerade",
                "is a range, and the interface has no masquerade binding",
                "Write single ports, or give the interface masquerade: {}.",
                at=entry.path[len(interface.path) :],
            )


def misplaced(fields: Fields) -> None:
    """Note ports or portRanges where they mean nothing, for the same reason."""
    for key in fields.values:
        if isinstance(key, str) and folded(key) in ("ports", "portrange", "portranges"):
            fields.problem(
                "unknown-key",
                "means nothing here",
                "Move it to the interface, next to its name and masquerade.",
                at=(key,),
            )


def _port(port: Fields) -> Entry | None:
    port.only(PORT_KEYS)
    name = _port_name(port)
    protocol = protocol_of(port, PROTOCOLS)
    first = number(port, "port")
    last = number(port, "end") if "end" in port.values else first
    entry = _entry(port, protocol, first, last, "port")
    if entry:
        entry.name, entry.ended = name, "end" in port.values
        if name and entry.range:
            port.problem(
                "name-on-range",
                "is only for single ports, and this is a range",
                "Remove the name, or the end.",
                at=("name",),
                value=name,
            )
    return entry


def _range(ports: Fields) -> Entry | None:
    ports.only(RANGE_KEYS)
    protocol = protocol_of(ports, PROTOCOLS)
    entry = _entry(ports, protocol, number(ports, "start"), number(ports, "end"), "start")
    if entry:
        entry.range = entry.ended = True
    return entry


def _entry(
    fields: Fields, protocol: Protocol | None, first: int | None, last: int | None, start: str
) -> Entry | None:
    if first is None or last is None:
        return None
    if last < first:
        fields.problem(
            "end-before-start",
            f"is below {start}, which is {first}",
            f"Write a number from {first} to {HIGHEST}, or exchange the two.",
            at=("end",),
            value=last,
        )
        return None
    return Entry(protocol, first, last, fields.path) if protocol else None


def number(fields: Fields, key: str) -> int | None:
    """The port number of a key, which must be there."""
    given = fields.integer(key)
    if given is None or LOWEST <= given <= HIGHEST:
        return given
    fields.problem("port-out-of-range", "is not a port number", PORT_FIX, at=(key,), value=given)
    return None


def protocol_of(fields: Fields, known: Mapping[str, Protocol]) -> Protocol | None:
    """The protocol of a port; TCP where none is given, or an empty text, as in Kubernetes."""
    text = fields.values.get("protocol")
    return known_protocol(fields, "TCP" if text is None or text == "" else text, known)


def known_protocol(fields: Fields, text: object, known: Mapping[str, Protocol]) -> Protocol | None:
    """The one of that name, among those that may be said here."""
    protocol = known.get(text) if isinstance(text, str) else None
    if protocol is None:
        *others, last = known
        names = f"{', '.join(others)} or {last}"
        meant = text.strip().upper() if isinstance(text, str) else ""
        fix = f"Write {meant if meant in known else names}."
        fields.problem(
            "bad-protocol", f"must be exactly {names}", fix, at=("protocol",), value=text
        )
    return protocol


def _port_name(port: Fields) -> str:
    name = port.text("name")
    if name and not is_service_name(name):
        port.problem(
            "bad-port-name",
            "is not a valid service name",
            NAME_FIX,
            at=("name",),
            value=name,
        )
    return name


def is_service_name(name: str) -> bool:
    """Whether it is an IANA service name (RFC 6335), in lower case as Kubernetes wants it."""
    return (
        0 < len(name) <= _LONGEST_NAME
        and _NAME_LETTERS.issuperset(name)
        and not name.startswith("-")
        and not name.endswith("-")
        and "--" not in name
        and any(map(str.isalpha, name))
    )


def check_names(document: Fields, entries: Iterable[Entry]) -> None:
    """Note every port name that is not the only one of its kind in the machine."""
    first_by_name: dict[str, Entry] = {}
    for entry in entries:
        first = first_by_name.setdefault(entry.name, entry)
        if entry.name and first is not entry:
            document.problem(
                "duplicate-port-name",
                f"is also the name of {dotted(first.path)}",
                "Give each port a name of its own.",
                at=(*entry.path[len(document.path) :], "name"),
                value=entry.name,
            )


def check_overlaps(document: Fields, entries: Iterable[Entry]) -> None:
    """Note every range that shares ports with another of its protocol."""
    furthest: dict[Protocol, Entry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.first, entry.last)):
        before = furthest.get(entry.protocol)
        if before and entry.first <= before.last and (entry.range or before.range):
            _overlap(document, before, entry)
        if before is None or entry.last > before.last:
            furthest[entry.protocol] = entry


def _overlap(document: Fields, one: Entry, other: Entry) -> None:
    earlier, later = sorted((one, other), key=lambda entry: _order(entry.path))
    document.problem(
        "overlap",
        f"{later} overlaps {earlier} of {dotted(earlier.path)}",
        "Join the two, or change one so that they share no port; touching is fine.",
        at=later.path[len(document.path) :],
    )


def _order(path: Path) -> int:
    last = path[-1]
    return last if isinstance(last, int) else 0


def claims(entries: Iterable[Entry]) -> tuple[Claim, ...]:
    """The entries as the rest of the program speaks of them."""
    return tuple(Claim(entry.protocol, PortRange(entry.first, entry.last)) for entry in entries)


def too_many(fields: Fields, at: Path, count: int, limit: int) -> None:
    """Note that somebody, or something, has written more than can be meant."""
    fields.problem(
        "too-many-ranges",
        f"has {count} entries, and {limit} is the limit",
        "Write neighbouring ports as ranges.",
        at=at,
    )
