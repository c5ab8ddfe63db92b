"""Closed port ranges and their algebra; every other module counts ports in these terms."""

from collections.abc import Iterable

from rules.values import Value

LOWEST = 1
HIGHEST = 65535


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


ALL_PORTS = PortRange(LOWEST, HIGHEST)


def coalesce(ranges: Iterable[PortRange]) -> tuple[PortRange, ...]:
    """The fewest ranges, in ascending order, that hold exactly the ports of these."""
    joined: list[PortRange] = []
    for ports in sorted(ranges):
        if joined and ports.first <= joined[-1].last + 1:
            if ports.last > joined[-1].last:
                joined[-1] = PortRange(joined[-1].first, ports.last)
        else:
            joined.append(ports)
    return tuple(joined)


def subtract(ranges: Iterable[PortRange], holes: Iterable[PortRange]) -> tuple[PortRange, ...]:
    """The fewest ranges that hold the ports of the first that are in none of the second."""
    left = list(coalesce(ranges))
    for hole in coalesce(holes):
        pieces: list[PortRange] = []
        for ports in left:
            if not ports.overlaps(hole):
                pieces.append(ports)
                continue
            if ports.first < hole.first:
                pieces.append(PortRange(ports.first, hole.first - 1))
            if ports.last > hole.last:
                pieces.append(PortRange(hole.last + 1, ports.last))
        left = pieces
    return tuple(left)
