"""The ports of Services and containers: single ones in Kubernetes' own fields, of which a port-end
annotation makes ranges. Whatever else such a port names, a target or a port of the node, moves on
with it, port by port."""

from collections.abc import Iterable, Sequence

from rules.manifests.fields import Fields, folded
from rules.manifests.metadata import PORT_END, Annotations
from rules.manifests.port_annotations import (
    annotated_end,
    decimal,
    ends_behind,
    no_such_port,
)
from rules.manifests.ports import NAME_FIX, is_service_name, number, protocol_of
from rules.model import Protocol
from rules.ports import HIGHEST, PortRange
from rules.problems import dotted, shown

TRANSPORTS = {transport.name: transport for transport in Protocol}
LONGEST_KEY = 63  # of an annotation, behind its slash
LONGEST_NAME = LONGEST_KEY - len(PORT_END.partition("/")[2])
_ENDS = ("end", "endport", "portend", "last", "lastport")


class Port:
    """One port as it is written, and the range that it begins."""

    __slots__ = ("fields", "first", "followers", "last", "name", "protocol", "ranged")

    def __init__(self, fields: Fields, name: str, protocol: Protocol | None) -> None:
        self.fields = fields
        self.name = name
        self.protocol = protocol
        self.first: int | None = None  # None: it is no port number
        self.last = 0
        self.ranged = False  # whether an annotation says where it ends
        self.followers: dict[str, int | str | None] = {}  # by key; None: not given

    @property
    def length(self) -> int:
        return self.last - (self.first or 0) + 1

    def ports(self) -> PortRange:
        """The ports of one that is known to be right."""
        return PortRange(self.first or 0, self.last)

    def following(self, key: str) -> PortRange | None:
        """The ports that one of its other numbers leads to."""
        number = self.followers[key]
        if not isinstance(number, int):
            return None
        return PortRange(number, number + self.length - 1)

    def spans(self, key: str) -> tuple[int, int] | None:
        """Where the ports of that key begin and end; None where that is not known, or too far."""
        number = self.followers.get(key, self.first)
        if not isinstance(number, int) or self.first is None:
            return None
        last = number + self.length - 1
        return (number, last) if last <= HIGHEST else None


def read_port(
    fields: Fields, key: str, name: str, followers: Sequence[str], known: tuple[str, ...]
) -> Port:
    """A port whose number is at that key, and the numbers that follow it."""
    _only(fields, known, name)
    port = Port(fields, name, protocol_of(fields, TRANSPORTS))
    port.first = number(fields, key)
    port.last = port.first or 0
    for other in followers:
        port.followers[other] = following(fields, other)
    return port


def _only(fields: Fields, known: tuple[str, ...], name: str) -> None:
    """Note unknown keys; an end, which many will look for, with the way to write it."""
    for key in fields.values:
        if isinstance(key, str) and folded(key) in _ENDS:
            fields.problem(
                "unknown-key",
                "is not a known key here: the API has no ranges",
                f"Write the annotation {PORT_END}{name or '<port name>'} instead.",
                at=(key,),
            )
        elif key not in known:
            fields.unknown(key, known)


def following(fields: Fields, key: str) -> int | str | None:
    """The number of a key, or for a target the name; none, nought and an empty name are not given,
    as in Kubernetes."""
    value = fields.values.get(key)
    if not value and not isinstance(value, bool | list | dict):
        return None
    return number_or_name(fields, key) if key == "targetPort" else number(fields, key)


def number_or_name(fields: Fields, key: str) -> int | str | None:
    """The number of a port, or the name that it has elsewhere."""
    value = fields.values[key]
    if type(value) is not str:
        return number(fields, key)
    if is_service_name(value):
        return value
    fields.problem(
        "bad-port-name",
        "is neither a port number nor the name of a port",
        "Write the number without quotes." if decimal(value) else NAME_FIX,
        at=(key,),
        value=value,
    )
    return None


def check_names(ports: Iterable[Port]) -> None:
    """Note every port that has the name of an earlier one."""
    firsts: dict[str, Port] = {}
    for port in ports:
        first = firsts.setdefault(port.name, port)
        if port.name and first is not port:
            port.fields.problem(
                "duplicate-port-name",
                f"is also the name of {dotted(first.fields.path)}",
                "Give each port a name of its own.",
                at=("name",),
                value=port.name,
            )


def lengthen(annotations: Annotations, ports: Iterable[Port]) -> None:
    """Let ports become ranges where an annotation says so."""
    keys = [key for key in annotations.texts if key.startswith(PORT_END)]
    named: dict[str, list[Port]] = {}
    for port in ports if keys else ():
        named.setdefault(port.name, []).append(port)
    for key in keys:
        name = key[len(PORT_END) :]
        last = annotated_end(annotations, key)
        meant = named.get(name, [])
        if len(meant) == 1:
            _lengthen(annotations, key, meant[0], last)
        elif meant:
            places = " and ".join(dotted(port.fields.path) for port in meant)
            annotations.problem(
                key,
                "duplicate-port-name",
                f"is for a port named {shown(name)}, and that is the name of {places}",
                "Give each port a name of its own.",
            )
        else:
            no_such_port(annotations, key, name)


def _lengthen(annotations: Annotations, key: str, port: Port, last: int | None) -> None:
    if len(port.name) > LONGEST_NAME:
        annotations.problem(
            key,
            "bad-annotation",
            f"has a key of more than {LONGEST_KEY} characters behind the slash",
            f"Give the port a name of at most {LONGEST_NAME} characters.",
        )
    if last is None or port.first is None or not ends_behind(annotations, key, last, port.first):
        return
    port.last, port.ranged = last, True
    for other, value in port.followers.items():
        _check_follower(port, other, value)


def _check_follower(port: Port, key: str, value: int | str | None) -> None:
    if isinstance(value, str) and port.length > 1:
        port.fields.problem(
            "named-target",
            f"is a name, and the port is a range of {port.length} ports",
            "Write the number of the first target port, or remove the annotation.",
            at=(key,),
            value=value,
        )
    elif isinstance(value, int) and value + port.length - 1 > HIGHEST:
        port.fields.problem(
            "range-too-high",
            f"is the first of {port.length} ports, and the last would be {value + port.length - 1}",
            f"Write a number up to {HIGHEST - port.length + 1}, or let the range end earlier.",
            at=(key,),
            value=value,
        )


def check_overlaps(ports: Iterable[Port], key: str, *, also: str = "", strict: bool = True) -> None:
    """Note ports of one protocol that share a number at that key, as far as they also share what is
    at the other; if not strict, two single ports may."""
    furthest: dict[object, tuple[int, int, Port]] = {}
    for (first, last), place, port in sorted(
        ((span, place, port) for place, port in enumerate(ports) if (span := port.spans(key))),
        key=lambda one: one[:2],
    ):
        group = port.protocol, str(port.fields.values.get(also) or "")
        before = furthest.get(group)
        if before and first <= before[0] and (strict or port.length > 1 or before[2].length > 1):
            _overlap(key, (before[1], before[2]), (place, port))
        if before is None or last > before[0]:
            furthest[group] = last, place, port


def _overlap(key: str, one: tuple[int, Port], other: tuple[int, Port]) -> None:
    (_, earlier), (_, later) = sorted((one, other), key=lambda placed: placed[0])
    later.fields.problem(
        "overlap",
        f"{_shown(later, key)} overlaps {_shown(earlier, key)} of {dotted(earlier.fields.path)}",
        "Join the two, or change one so that they share no port; touching is fine.",
        at=(key,),
    )


def _shown(port: Port, key: str) -> str:
    first, last = port.spans(key) or (0, 0)
    protocol = port.protocol.value if port.protocol else "?"
    return f"{first}/{protocol}" if first == last else f"{first}-{last}/{protocol}"
