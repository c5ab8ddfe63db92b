"""What a node's own namespace already uses, so that a published range never takes it: sockets that
listen, and translations of others (read from their tables by rules/translations.py)."""

from bisect import bisect_right

from rules.model import Address, Family, Protocol
from rules.ports import ALL_PORTS, PortRange, coalesce
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

NAMED = 5  # ranges that are named in a message


class Listener(Value, kw_only=True):
    """A socket that takes what comes for a port."""

    protocol: Protocol
    family: Family
    address: Address | None  # None: any of that family
    port: int
    inode: int = 0  # by which the process is found that has it
    pid: int = 0
    program: str = ""

    @property
    def ranges(self) -> tuple[PortRange, ...]:
        """Its ports."""
        return (PortRange(self.port, self.port),)

    def __str__(self) -> str:
        who = f"{self.program or 'a program'} (pid {self.pid})" if self.pid else "somebody"
        at = f" at {self.address}" if self.address else ""
        return f"{who} listens on {self.protocol.value} {self.port}{at}"


class Translation(Value, kw_only=True):
    """A rule of somebody else that sends packets elsewhere, or those of one element of its map."""

    where: str
    family: Family | None = None  # None: both
    protocol: Protocol | None = None  # None: any
    ports: tuple[PortRange, ...] = ()  # none: any
    destination: Address | None = None  # None: any, or more than one
    foreign: bool = True  # else it is ours, for a manifest that cannot be read

    @property
    def ranges(self) -> tuple[PortRange, ...]:
        """Its ports."""
        return self.ports or (ALL_PORTS,)

    def __str__(self) -> str:
        protocol = self.protocol.value if self.protocol else "any protocol"
        ports = ",".join(map(str, self.ports[:NAMED])) or "any port"
        more = f" and {len(self.ports) - NAMED} more" if len(self.ports) > NAMED else ""
        at = f" at {self.destination}" if self.destination else ""
        return f"{self.where} translates {protocol} {ports}{more}{at}"


class Occupied(Value, kw_only=True):
    """All that a namespace uses."""

    listeners: tuple[Listener, ...] = ()
    translations: tuple[Translation, ...] = ()
    unreadable: tuple[str, ...] = ()  # tables of others that may translate anything
    own: frozenset[Address] | None = None  # its addresses; None: any address may be one
    ephemeral: PortRange | None = None  # what the kernel gives to who asks for no port

    __slots__ = ("_taken",)
    if TYPE_CHECKING:
        _taken: ClassVar[dict[tuple[Protocol, Family], tuple[PortRange, ...]]]

    def meeting(
        self, protocol: Protocol, family: Family, ports: PortRange, destination: Address | None
    ) -> tuple[Listener | Translation, ...]:
        """Who uses some of these ports of that destination; None: any own address but loopback."""
        if not self._overlaps(protocol, family, ports):
            return ()
        if destination is not None and destination.is_unspecified:
            destination = None
        return (
            *(
                one
                for one in self.listeners
                if (one.protocol, one.family) == (protocol, family)
                and one.port in ports
                and self._hears(one, destination)
            ),
            *(
                one
                for one in self.translations
                if one.protocol in (None, protocol)
                and one.family in (None, family)
                and (not one.ports or any(each.overlaps(ports) for each in one.ports))
                and self._takes(one, destination)
            ),
        )

    def _hears(self, one: Listener, destination: Address | None) -> bool:
        if (
            one.protocol is Protocol.UDP
            and self.ephemeral is not None
            and one.port in self.ephemeral
        ):
            return False  # who asks a name server has such a port for a moment
        if one.address is None:
            return destination is None or self.own is None or destination in self.own
        if one.address.is_loopback or one.address.is_multicast:
            return False  # nothing is published there
        return destination in (None, one.address)

    def _takes(self, one: Translation, destination: Address | None) -> bool:
        if one.destination is None or one.destination == destination:
            return True
        if destination is not None or one.destination.is_loopback:
            return False
        return self.own is None or one.destination in self.own

    def _overlaps(self, protocol: Protocol, family: Family, ports: PortRange) -> bool:
        """Whether anything is there at all: thousands of ranges are asked for, and few meet."""
        try:
            taken = self._taken
        except AttributeError:
            taken = {(each, of): self._all(each, of) for each in Protocol for of in Family}
            object.__setattr__(self, "_taken", taken)
        ranges = taken[protocol, family]
        place = bisect_right(ranges, ports.last, key=_first)
        return place > 0 and ranges[place - 1].last >= ports.first

    def _all(self, protocol: Protocol, family: Family) -> tuple[PortRange, ...]:
        ranges = {
            PortRange(one.port, one.port)
            for one in self.listeners
            if (one.protocol, one.family) == (protocol, family)
        }
        for one in self.translations:
            if one.protocol in (None, protocol) and one.family in (None, family):
                ranges.update(one.ports or [ALL_PORTS])
        return coalesce(ranges)


def _first(ports: PortRange) -> int:
    return ports.first
