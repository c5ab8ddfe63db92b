"""From Services and machines to what is behind each Service, where no API server says so: the
machines that have its labels, at the addresses that the node reaches them at."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rules.desired import claimed
from rules.endpoints import is_within, limited, staying
from rules.model import FORWARDED, Address, Family, Machine, Protocol, Surroundings
from rules.places import entry_link, global_addresses
from rules.ports import PortRange, coalesce, subtract
from rules.problems import shown
from rules.services import Endpoint, Publication, Service, ServicePort, ServiceType
from rules.values import Value, replace

MOST_NAMED = 5  # machines, or ports of them, in one note

# Why a machine gives no endpoint; what follows is the machine.
_ABSENT = "it waits for the namespace of"
_UNREACHED = "it waits for a link with a global address at"
_UNSAID = "it needs portranger.io/address, as there is no masquerade interface, on"
_LATER = "it is looked up on the node where to reach"


class Selection(Value, kw_only=True):
    """Every Service that can be published, with its endpoints, and what a person should know."""

    publications: tuple[Publication, ...] = ()
    notes: tuple[str, ...] = ()


def select(
    services: Iterable[Service],
    machines: Iterable[Machine],
    surroundings: Mapping[str, Surroundings] | None,
    unknown: Collection[str] = (),
) -> Selection:
    """What is behind each Service.

    Surroundings are those of the namespaces that were looked at, and unknown are those that may be
    there and could not be: for machines in them, what is behind a Service is not known. Without
    surroundings there is nobody to ask, and only what is written down is known.
    """
    wanted = sorted(services, key=str)
    if not wanted:
        return Selection()
    register = _Register(machines, surroundings, unknown)
    publications: list[Publication] = []
    notes: list[str] = []
    for service in wanted:
        why = _why_unpublished(service)
        if why:
            notes.append(f"{service}: {why}")
            continue
        crowd = register.crowd(service)
        publications.append(_publication(service, crowd))
        notes += [f"{service}: {note}" for note in _notes(service, crowd)]
    return Selection(publications=tuple(publications), notes=tuple(notes))


def limit(
    publications: Iterable[Publication],
    machines: Iterable[Machine],
    surroundings: Mapping[str, Surroundings],
) -> Selection:
    """The same where an API server says what is behind a Service: of the machines of its namespace
    that are here, each takes what it declares."""
    crowds: dict[str, list[_Found]] = {}
    for machine in sorted(machines, key=lambda machine: (str(machine), machine.netns)):
        crowds.setdefault(machine.namespace, []).append(_find(machine, surroundings, ()))
    known = {namespace: _Crowd(found) for namespace, found in crowds.items()}
    made: list[Publication] = []
    notes: dict[str, None] = {}
    for one in publications:
        crowd = known.get(one.service.namespace)
        if crowd is None or not any(one.endpoints):
            made.append(one)
            continue
        ends = []
        for port, some in zip(one.service.ports, one.endpoints, strict=True):
            less = tuple(
                limited(end, len(port.ports), crowd.taken(end.address, port.protocol))
                if end.local
                else end
                for end in some
            )
            ends.append(less)
            for end in less:
                if end.only is not None and port.ranged:
                    whole = PortRange(end.port, end.port + len(port.ports) - 1)
                    lost = [f"{port.protocol.value} {p}" for p in subtract([whole], end.only)]
                    whose = [str(x.machine) for x in crowd.whose[end.address]]
                    words = f"{_listed(lost)} not forwarded by {_listed(whose)}"
                    notes[f"{one.service}: {words}"] = None
        made.append(replace(one, endpoints=tuple(ends)))
    return Selection(publications=tuple(made), notes=tuple(notes))


def remaining(before: Selection, after: Selection) -> Selection:
    """The first, without the endpoints that the second has not; where none would be left, or it is
    not known what there will be, all stay."""
    known = {one.service: one for one in after.publications if not one.pending}
    return replace(
        before,
        publications=tuple(
            replace(
                old,
                endpoints=tuple(
                    map(staying, old.service.ports, old.endpoints, known[old.service].endpoints)
                ),
            )
            if old.service in known
            else old
            for old in before.publications
        ),
    )


def _why_unpublished(service: Service) -> str:
    if service.type is ServiceType.EXTERNAL_NAME:
        return "it only stands for a name, so nothing is published"
    if service.headless:
        return "it is headless, so nothing is published"
    return "" if service.ports else "it has no ports, so nothing is published"


class _Found:
    """A machine, and where the node reaches it, or why that is not known."""

    __slots__ = ("_forwarded", "addresses", "lack", "local", "machine", "names", "unknown")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.names = {(name, protocol): port for name, protocol, port in machine.names}
        self.addresses: tuple[Address, ...] = machine.addresses
        self.local = True
        self.lack = ""
        self.unknown = False
        self._forwarded: dict[Protocol, list[PortRange] | None] = {}

    def __str__(self) -> str:
        return f"{self.machine} ({self.machine.netns})"

    def forwarded(self, protocol: Protocol) -> list[PortRange] | None:
        """The ports that reach the guest, in order; None: all of them."""
        if protocol not in self._forwarded:
            masquerade = self.machine.masquerade
            everything = masquerade is None or (
                masquerade.claims is None and not masquerade.reserved and not masquerade.proxied
            )
            self._forwarded[protocol] = None if everything else claimed(self.machine, protocol)
        return self._forwarded[protocol]

    def taken(self, protocol: Protocol) -> list[PortRange] | None:
        """The ports that are the guest's or the pod's own, where the machine declares any; None:
        all of them, or none can be declared."""
        masquerade = self.machine.masquerade
        if masquerade is None or masquerade.claims is None or protocol not in FORWARDED:
            return None
        own = [one.ports for one in masquerade.reserved if one.protocol is protocol]
        return [*claimed(self.machine, protocol), *own]


def _find(
    machine: Machine, surroundings: Mapping[str, Surroundings] | None, unknown: Collection[str]
) -> _Found:
    found = _Found(machine)
    around = surroundings.get(machine.netns) if surroundings is not None else None
    absent = surroundings is not None and around is None and machine.netns not in unknown
    if found.addresses:
        found.local = not absent  # where there is no such namespace, it is another host
    elif machine.masquerade is None:
        found.lack = _UNSAID
    elif absent:
        found.lack = _ABSENT
    elif surroundings is None:
        found.lack = _LATER
    elif around is None:
        found.unknown = True
    else:
        entry = entry_link(machine.masquerade, around)
        found.addresses = tuple(
            min(known)
            for family in Family
            if entry and (known := global_addresses(entry, family, around))
        )
        found.lack = "" if found.addresses else _UNREACHED
    return found


class _Register:
    """All machines by their labels; each is looked for once, and each selector answered once."""

    __slots__ = ("_crowds", "_found", "_labelled", "_surroundings", "_unknown")

    def __init__(
        self,
        machines: Iterable[Machine],
        surroundings: Mapping[str, Surroundings] | None,
        unknown: Collection[str],
    ) -> None:
        self._surroundings = surroundings
        self._unknown = frozenset(unknown)
        self._labelled: dict[tuple[str, tuple[str, str]], list[Machine]] = {}
        self._found: dict[int, _Found] = {}
        self._crowds: dict[tuple[str, tuple[tuple[str, str], ...]], _Crowd] = {}
        for machine in sorted(machines, key=lambda machine: (str(machine), machine.netns)):
            for pair in machine.labels:
                self._labelled.setdefault((machine.namespace, pair), []).append(machine)

    def crowd(self, service: Service) -> "_Crowd":
        """The machines that a Service selects."""
        key = service.namespace, service.selector
        if key not in self._crowds:
            self._crowds[key] = _Crowd([self._locate(one) for one in self._selected(*key)])
        return self._crowds[key]

    def _selected(self, namespace: str, selector: Sequence[tuple[str, str]]) -> list[Machine]:
        groups = [self._labelled.get((namespace, pair), []) for pair in selector]
        rarest = min(groups, key=len, default=[])
        return [one for one in rarest if all(pair in one.labels for pair in selector)]

    def _locate(self, machine: Machine) -> _Found:
        if id(machine) not in self._found:
            self._found[id(machine)] = _find(machine, self._surroundings, self._unknown)
        return self._found[id(machine)]


class _Crowd:
    """The machines that a selector chooses, and the endpoints that they are for each port."""

    __slots__ = ("_at", "_local", "_mates", "_takes", "found", "whose")

    def __init__(self, found: Sequence[_Found]) -> None:
        self.found = found
        local: dict[Address, bool] = {}
        self.whose: dict[Address, list[_Found]] = {}
        self._mates: dict[str, list[_Found]] = {}  # of one namespace, that share its addresses
        for one in found:
            for address in one.addresses:
                local[address] = one.local or local.get(address, False)
                self.whose.setdefault(address, []).append(one)
            if one.machine.masquerade:
                self._mates.setdefault(one.machine.netns, []).append(one)
        self._local = dict(sorted(local.items(), key=lambda known: _order(known[0])))
        self._at: dict[tuple[Protocol, PortRange], tuple[Endpoint, ...]] = {}
        self._takes: dict[tuple[Address, Protocol], tuple[PortRange, ...] | None] = {}

    def endpoints(self, port: ServicePort) -> tuple[Endpoint, ...]:
        """Where a port leads, by address."""
        if isinstance(port.target, str):
            return self._named(port.target, port)
        key = port.protocol, port.target
        if key not in self._at:
            first = port.target.first
            self._at[key] = tuple([self._end(address, first, port) for address in self._local])
        return self._at[key]

    def _named(self, name: str, port: ServicePort) -> tuple[Endpoint, ...]:
        made = {
            self._end(address, number, port)
            for one in self.found
            if (number := one.names.get((name, port.protocol)))
            for address in one.addresses
        }
        return tuple(sorted(made, key=lambda end: (*_order(end.address), end.port)))

    def _end(self, address: Address, number: int, port: ServicePort) -> Endpoint:
        end = Endpoint(address=address, port=number, local=self._local[address])
        return limited(end, len(port.ports), self.taken(address, port.protocol))

    def taken(self, address: Address, protocol: Protocol) -> tuple[PortRange, ...] | None:
        """What the machines of this node take that are at an address, or their pods; None: all."""
        key = address, protocol
        if key not in self._takes:
            every = [x.taken(protocol) if x.local else None for x in self.whose.get(address, ())]
            known = [some for some in every if some is not None]
            every_known = known and len(known) == len(every)
            self._takes[key] = coalesce(p for some in known for p in some) if every_known else None
        return self._takes[key]

    def lost(self, one: _Found, wanted: Mapping[Protocol, Sequence[PortRange]]) -> str:
        """Those of the wanted ports that no guest in a machine's namespace gets."""
        lost = [
            f"{protocol.value} {left}"
            for protocol, ranges in wanted.items()
            for left in self._left(one, protocol, ranges)
        ]
        return _listed(lost)

    def _left(
        self, one: _Found, protocol: Protocol, ranges: Sequence[PortRange]
    ) -> Sequence[PortRange]:
        reached = one.forwarded(protocol)
        if reached is None or all(is_within(ports, reached) for ports in ranges):
            return ()
        every = [mate.forwarded(protocol) for mate in self._mates[one.machine.netns]]
        if any(some is None for some in every):
            return ()
        return subtract(ranges, [ports for some in every for ports in some or ()])


def _order(address: Address) -> tuple[int, int]:
    return address.version, int(address)


def _publication(service: Service, crowd: _Crowd) -> Publication:
    unknown = [str(one) for one in crowd.found if one.unknown]
    if unknown:
        return Publication(
            service=service,
            endpoints=((),) * len(service.ports),
            pending=f"nobody could look into the namespace of {_listed(unknown)}",
        )
    return Publication(service=service, endpoints=tuple(map(crowd.endpoints, service.ports)))


def _notes(service: Service, crowd: _Crowd) -> Iterator[str]:
    if not service.selector:
        yield "it has no selector, so nothing is behind it"
        return
    if not crowd.found:
        pairs = [f"{key}={text}" for key, text in service.selector]
        yield f"no machine in its namespace has the labels {_listed(pairs)}"
    why: dict[str, list[str]] = {}
    same = _targets(service)
    names = [port for port in service.ports if isinstance(port.target, str)]
    for one in crowd.found:
        if one.lack:
            why.setdefault(one.lack, []).append(str(one))
        for port in names:
            if (port.target, port.protocol) not in one.names:
                named = f"there is no {port.protocol.value} port named {shown(port.target)} on"
                why.setdefault(named, []).append(str(one))
        lost = crowd.lost(one, _targets(service, one) if names else same)
        if lost:
            why.setdefault(f"{lost} not forwarded by", []).append(str(one))
    for reason, whose in sorted(why.items()):
        yield f"{reason} {_listed(whose)}"


def _targets(service: Service, one: _Found | None = None) -> dict[Protocol, tuple[PortRange, ...]]:
    """The ports that a Service leads to, and with a machine also those that it only names."""
    found: dict[Protocol, list[PortRange]] = {}
    for port in service.ports:
        ranges = found.setdefault(port.protocol, [])
        if isinstance(port.target, PortRange):
            ranges.append(port.target)
        elif one and (number := one.names.get((port.target, port.protocol))):
            ranges.append(PortRange(number, number))
    return {protocol: coalesce(ranges) for protocol, ranges in found.items()}


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return ", ".join(items[:MOST_NAMED]) + more
