"""Closed port ranges and their algebra; every other module counts ports in these terms."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter

from rules.values import Value

LOWEST = 1
HIGHEST = 65535
_FIRST = attrgetter("first")
_ENDS = attrgetter("first", "last")  # to sort by: several times as fast as to compare ranges


class PortRange(Value, order=True):
    """The ports from first to last, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not LOWEST <= self.first <= self.last <= HIGHEST:
            raise ValueError(f"not a port range: {self.first}-{self.last}")

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def overlaps(self, other: "PortRange") -> bool:
        """Whether any port is in both."""
        return self.first <= other.last and other.first <= self.last

    def holds(self, other: "PortRange") -> bool:
        """Whether it has all ports of the other."""
        return self.first <= other.first and other.last <= self.last


ALL_PORTS = PortRange(LOWEST, HIGHEST)


def coalesce(ranges: Iterable[PortRange]) -> tuple[PortRange, ...]:
    """The fewest ranges, in ascending order, that hold exactly the ports of these."""
    joined: list[PortRange] = []
    for ports in sorted(ranges, key=_ENDS):
        if joined and ports.first <= joined[-1].last + 1:
            if ports.last > joined[-1].last:
                joined[-1] = PortRange(joined[-1].first, ports.last)
        else:
            joined.append(ports)
    return tuple(joined)


def subtract(ranges: Iterable[PortRange], holes: Iterable[PortRange]) -> tuple[PortRange, ...]:
    """The fewest ranges that hold the ports of the first that are in none of the second."""
    cuts, left, place = coalesce(holes), list[PortRange](), 0
    for ports in coalesce(ranges):
        first = ports.first
        while place < len(cuts) and cuts[place].last < first:
            place += 1
        at = place
        while at < len(cuts) and cuts[at].first <= ports.last:
            if first < cuts[at].first:
                left.append(PortRange(first, cuts[at].first - 1))
            first, at = cuts[at].last + 1, at + 1
        if first <= ports.last:
            left.append(PortRange(first, ports.last))
    return tuple(left)


def have(ranges: Sequence[PortRange], first: int, last: int) -> bool:
    """Whether ranges, which are in order and apart, have any of the ports from first to last."""
    after = bisect_right(ranges, last, key=_FIRST)
    return after > 0 and ranges[after - 1].last >= first
