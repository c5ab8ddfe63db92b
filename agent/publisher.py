"""What the node itself should hold: Services, what is behind them, and the node ports that they
have. What is given is written down before any rule says so, so that nobody else gets it; where that
is lost, the rules in the kernel still tell.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from agent.foreign_nat import Others
from agent.kernel.netns import identity
from agent.node_record import forget, record, recorded, reserved_in
from agent.sources.boundary import Faults, described, sound
from rules.allotment import DYNAMIC, STATIC, Allotment, allot, name_of, recalled
from rules.budget import affordable
from rules.desired import label
from rules.endpoints import declared
from rules.endpoints import unclaimed as unclaimed_ends
from rules.model import (
    NODE,
    OWN,
    Address,
    Chain,
    Desired,
    Machine,
    Pending,
    Rule,
    Surroundings,
    Sysctl,
)
from rules.node_ports import Allocations, Bands, Held
from rules.occupied import Listener, Occupied, Translation
from rules.ports import ALL_PORTS, PortRange, subtract
from rules.publish import (
    RESERVED,
    Face,
    Made,
    Publishing,
    desire_node,
    faces,
    reservation,
)
from rules.selection import Selection, limit, remaining, select
from rules.service_conflicts import newcomers, refuse
from rules.services import Endpoint, Publication, Service
from rules.shapes import lives
from rules.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.config import Config
    from agent.kernel.kinds import Generation, Namespace
    from agent.metrics import Metrics
    from agent.sources.meaning import Meaning
    from agent.sources.store import Store

Endpoints = Mapping[str, tuple[tuple[Endpoint, ...], ...]]


def publishing(config: "Config") -> tuple[Publishing, Bands]:
    """How Services are published; in a cluster, its API server gives them their ports."""
    ports, cluster = config.node_ports, config.source == "kubernetes"
    how = Publishing(
        addresses=ports.addresses,
        allowed=ports.external,
        ranges_only=cluster,
        runs_within=ports.range,
        reserve=ports.reserve,
    )
    return how, Bands(ALL_PORTS if cluster else ports.range)


class Published(Value):
    """What a node should hold, and who has which node ports then."""

    desired: Desired
    allotment: Allotment
    share: tuple[PortRange, ...] = ()  # of the reserved ports, that is ours


def published(  # noqa: PLR0913 - what is to be, what was, and where
    selection: Selection,
    namespace: "Namespace",
    how: Publishing,
    bands: Bands,
    stored: Iterable[Held] = (),
    *,
    unclaimed_stay: bool = False,
    made: Made | None = None,
    others: "Others | None" = None,
    share: tuple[PortRange, ...] = (),
    broken: Iterable[Pending] = (),
    met: Collection[Address] | None = None,
) -> Published:
    """What Services should become in this namespace, which is the node's own; where what nobody
    claims there stays, nobody gets its ports either. What is live of broken ones stays as it is.
    With the endpoints that were met, so do those that are live and were not."""
    others = Others() if others is None else others
    rules = list(lives(namespace.observe()).by_rule)
    publications: Sequence[Publication] = selection.publications
    orphans: list[Pending] = []
    if met is not None:
        publications, orphans = unclaimed_ends(publications, rules, met)
    known = recalled(bands, stored, rules, [one.service for one in publications], how.addresses)
    endpoints = {end.address for one in publications for port in one.endpoints for end in port}
    broken = tuple(broken)
    bugs = {one.owner for one in broken}
    left = [one for one in rules if unclaimed_stay or not bugs.isdisjoint(one.owner.split(","))]
    unclaimed = _unclaimed(publications, left)
    others.began(namespace.generation)
    fresh = False
    while True:
        node, fresh = others.seen(namespace, sorted(endpoints, key=str), fresh=fresh)
        theirs = (*node.occupied.translations, *unclaimed)
        node = replace(node, occupied=replace(node.occupied, translations=theirs), share=share)
        used = _used(node.occupied)
        allotment = allot(
            known, publications, used, runs_within=how.runs_within if how.ranges_only else None
        )
        found, notes = faces(publications, allotment.allocations, node.own, how)
        node = replace(node, occupied=_named(node.occupied, found))
        kept, refused, more = refuse(found, rules, node.occupied, proxied=how.ranges_only)
        kept, undeclared, scattered = declared(kept)
        if fresh or not (allotment.dynamic.given or newcomers(kept, rules)):
            break  # nothing is taken by what was known of others before
        fresh = True
    kept, costly, dear = affordable(kept)
    pending = [*_pending(publications), *broken]
    desired = desire_node(kept, node, how, pending=pending, made=made, live=rules)
    return Published(
        replace(
            desired,
            refused=(*broken, *allotment.refused, *refused, *undeclared, *costly),
            notes=(
                *selection.notes,
                *(f"{one.owner}: {one.reason}" for one in orphans),
                *notes,
                *more,
                *scattered,
                *dear,
                *desired.notes,
            ),
            orphaned=tuple(one.owner for one in orphans),
        ),
        allotment,
        reservation(kept, node, how, waiting=bool(desired.pending)),
    )


def published_from_nothing(selection: Selection, how: Publishing, bands: Bands) -> Desired:
    """What Services would become on a node that is not there to ask."""
    publications = selection.publications
    allotment = allot(recalled(bands, (), (), ()), publications)
    found, notes = faces(publications, allotment.allocations, None, how)
    kept, refused, more = refuse(found, (), Occupied())
    kept, undeclared, scattered = declared(kept)
    kept, costly, dear = affordable(kept)
    desired = desire_node(kept, None, how, pending=_pending(publications))
    return replace(
        desired,
        refused=(*allotment.refused, *refused, *undeclared, *costly),
        notes=(*selection.notes, *notes, *more, *scattered, *dear, *desired.notes),
    )


def _unclaimed(publications: Iterable[Publication], rules: Iterable[Rule]) -> list[Translation]:
    """What is live for who is in no manifest that we can read."""
    names = {
        label(name_of(one.service, port)) for one in publications for port in one.service.ports
    }
    return [
        Translation(
            where=f"{rule.owner}, whose manifest cannot be read,",
            family=rule.family,
            protocol=rule.protocol,
            ports=(rule.ports,),
            destination=None if rule.destination in OWN.values() else rule.destination,
            foreign=False,
        )
        for rule in rules
        if rule.chain is Chain.PREROUTING and rule.ports and rule.owner not in names
    ]


def _used(occupied: Occupied) -> list[PortRange]:
    """What nobody is given who does not ask for it."""
    listening = [PortRange(one.port, one.port) for one in occupied.listeners]
    return [*listening, *(ports for one in occupied.translations for ports in one.ports)]


def _named(occupied: Occupied, wanted: Iterable[Face]) -> Occupied:
    """With the processes of those listeners that are in somebody's way."""
    met = {
        one
        for face in wanted
        for one in occupied.meeting(face.port.protocol, face.family, face.ports, face.at)
        if isinstance(one, Listener)
    }
    if not met:
        return occupied
    from agent.kernel import sockets  # only who meets somebody asks for names

    rest = [one for one in occupied.listeners if one not in met]
    return replace(occupied, listeners=(*rest, *sockets.named(met)))


def _pending(publications: Iterable[Publication]) -> list[Pending]:
    """Whose rules stay as they are until more is known."""
    return [
        Pending(label(name_of(one.service, port)), one.pending)
        for one in publications
        if one.pending
        for port in one.service.ports
    ]


class _Wanted(Value, kw_only=True):
    """What is to be published, and how, as one value: a look that takes long goes by what was
    wanted when it began, whatever is wanted since."""

    selection: Selection = Selection()
    how: Publishing
    bands: Bands
    unknown: str = ""
    away: str = ""
    unread: str = ""
    broken: tuple[Pending, ...] = ()  # Services that met a bug
    unnamed: bool = False  # whether it is not known which rules are theirs
    met: frozenset[Address] | None = None  # the endpoints of this run, where machines tell them


class Publisher:
    """For who keeps the node: what it wants there, from look to look."""

    def __init__(
        self,
        store: "Store",
        metrics: "Metrics",
        how: Publishing,
        bands: Bands,
        elsewhere: Iterable[str] = (),
    ) -> None:
        """Elsewhere: where the node's network may be, if it is not our own."""
        self._store, self._metrics = store, metrics
        self._elsewhere = tuple(elsewhere)
        self._how, self._bands = how, bands
        self._services: tuple[Service, ...] = ()
        self._endpoints: Endpoints | None = None
        self._unknown = self._away = self._unread = ""
        self._selection: Selection | None = None
        self._met: set[Address] = set()  # the endpoints of this run
        self._wanted = _Wanted(how=how, bands=bands)
        self._refused: frozenset[tuple[str, str]] = frozenset()  # whom what, when last asked
        self._allocations: Allocations | None = None  # as last given
        self._made: Made = {}  # the rules that were wanted at the last look
        self._others = Others()

    @property
    def allocations(self) -> Allocations | None:
        """Who has which node ports; None where an API server gives them."""
        return None if self._how.ranges_only else self._allocations or Allocations(self._bands)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to keep on the node."""
        return bool(self._services or self._unknown)

    def want(self, meaning: "Meaning") -> None:
        """This is what the source says."""
        self._services, self._endpoints = meaning.services, meaning.endpoints
        self._unknown, self._away = meaning.services_unknown, meaning.services_away
        self._unread = meaning.unreadable if meaning.endpoints is None else ""
        if self._unread and not self._services and self._store.has_published:
            self._unknown = self._unread  # what an earlier run published may be wanted

    def use(self, how: Publishing, bands: Bands) -> None:
        """From now on it is published like this; what others translate is read again."""
        self._others.forget()
        if (how, bands) != (self._how, self._bands):
            self._how, self._bands = how, bands
            self._selection = self._allocations = None

    def select(
        self,
        machines: Iterable[Machine],
        surroundings: Mapping[str, Surroundings],
        unknown: Collection[str],
    ) -> bool:
        """Find what is behind each Service now; whether it is something else than before, or is
        to be told otherwise."""
        before, known = self._wanted, self._selection is not None
        self._selection, faults = self._found(machines, surroundings, unknown)
        for one in self._selection.publications:
            self._met.update(end.address for some in one.endpoints for end in some)
        self._decide(faults)
        return not known or self._wanted != before

    def withdraw(
        self,
        machines: Iterable[Machine],
        surroundings: Mapping[str, Surroundings],
        unknown: Collection[str],
    ) -> bool:
        """Leave out the endpoints that are about to go, as long as others are left, and return
        whether there are any: what leads to them goes before they do."""
        before = self._selection
        if before is None or self._unknown:
            return False
        found, _ = self._found(machines, surroundings, unknown)
        self._selection = remaining(before, found)
        self._wanted = replace(self._wanted, selection=self._selection)
        return self._selection != before

    def _found(
        self,
        machines: Iterable[Machine],
        surroundings: Mapping[str, Surroundings],
        unknown: Collection[str],
    ) -> tuple[Selection, Faults[Service]]:
        """What is behind those that do not make it raise; and those that do."""
        endpoints = self._endpoints

        def found(services: Sequence[Service]) -> Selection:
            if endpoints is None:
                return select(services, machines, surroundings, unknown)
            listed = [_listed(one, endpoints) for one in services]
            return limit(listed, machines, surroundings)

        return sound(self._services, found)

    def _decide(self, faults: Faults[Service]) -> None:
        broken, unnamed = _broken(faults)
        self._wanted = _Wanted(
            selection=self._selection or Selection(),
            how=self._how,
            bands=self._bands,
            unknown=self._unknown,
            away=self._away,
            unread=self._unread,
            broken=broken,
            unnamed=unnamed,
            met=frozenset(self._met) if self._endpoints is None else None,
        )

    def wish(
        self, namespace: "Namespace", _: Surroundings, *, unclaimed_stay: bool = False
    ) -> Desired:
        """What the node should hold; what is given is stored before any rule tells of it."""
        wanted = self._wanted
        if wanted.unknown:
            return Desired(unclaimed_stay=True, notes=(f"Services: {wanted.unknown}",))
        stored = self._store.node_ports()
        stay = unclaimed_stay or bool(wanted.unread) or wanted.unnamed
        share = reserved_in(self._store, namespace.identity)

        def become(
            publications: Sequence[Publication], broken: Iterable[Pending] = ()
        ) -> Published:
            return published(
                replace(wanted.selection, publications=tuple(publications)),
                namespace,
                wanted.how,
                wanted.bands,
                stored,
                unclaimed_stay=stay,
                made=self._made,
                others=self._others,
                share=share,
                broken=(*wanted.broken, *broken),
                met=wanted.met if stay else None,
            )

        found, faults = sound(wanted.selection.publications, become)
        if faults:
            broken, unnamed = _broken([(one.service, error) for one, error in faults])
            bad = [one for one, _ in faults]
            good = [
                one for one in wanted.selection.publications if all(one is not it for it in bad)
            ]
            stay = stay or unnamed
            found = become(good, broken)
        record(self._store, namespace.identity, found.share)
        self._store.keep_node_ports(found.allotment.allocations.pairs)
        self._allocations = found.allotment.allocations
        self._count(found.allotment)
        away = (f"Services: {wanted.away}",) if wanted.away else ()
        return replace(found.desired, unclaimed_stay=stay, notes=(*away, *found.desired.notes))

    @property
    def due(self) -> float:
        """When the node is to be looked at again for what others do there, on the monotonic
        clock."""
        return self._others.due

    def looked(self, generation: "Generation | None") -> None:
        """A look at the node ended well, at that generation of its rules."""
        self._others.ended(generation)

    @property
    def place(self) -> str:
        """The name of the namespace that an earlier run published in. That is no longer our own
        where the agent was in the node's network then and is in a pod's now."""
        known = recorded(self._store)
        for name in (NODE, *self._elsewhere):
            if known is not None and identity(name) == known.identity:
                return name
        return NODE

    def farewell(self, namespace: "Namespace", _: Surroundings) -> Desired:
        """What is to be in a namespace in which nothing is published any more: the ports that
        others reserved, without ours."""
        share = reserved_in(self._store, namespace.identity)
        if not share:
            return Desired()
        left = subtract(namespace.node([], others=False).reserved, share)
        return Desired(sysctls=frozenset({Sysctl(RESERVED, ",".join(map(str, left)))}))

    def left(self) -> None:
        """The node was cleared."""
        self._store.forget_node_ports()
        forget(self._store)
        self._refused, self._allocations = frozenset(), None

    def _count(self, allotment: Allotment) -> None:
        if self._how.ranges_only:
            return  # an API server gives them, and counts
        known, self._refused = self._refused, frozenset(map(_gist, allotment.refused))
        for scope, of in ((STATIC, allotment.static), (DYNAMIC, allotment.dynamic)):
            new = [one for one in of.refused if _gist(one) not in known]
            self._metrics.gave(scope, of.given, len(new))
        every = self._bands.ports
        available = allotment.allocations.available(every)
        self._metrics.allotted(len(every) - available, available)


def _broken(faults: Faults[Service]) -> tuple[tuple[Pending, ...], bool]:
    """What is told of Services that met a bug, for each of their ports; and whether that cannot be
    said of all of them."""
    found: list[Pending] = []
    unnamed = False
    for service, error in faults:
        why = f"it cannot be published because of a bug in portranger ({described(error)})"
        try:
            names = [name_of(service, port) for port in service.ports]
        except Exception:  # it is so broken that it has no ports
            names, unnamed = [f"{service}"], True
        found += [Pending(label(name), why) for name in names]
    return tuple(found), unnamed


def _gist(one: Pending) -> tuple[str, str]:
    """Whom what is refused; who is in the way of it, or what is left, changes with others."""
    return one.owner, one.reason.partition(":")[0]


def _listed(service: Service, endpoints: Endpoints) -> Publication:
    """As an API server tells it."""
    none = ((),) * len(service.ports)
    return Publication(service=service, endpoints=endpoints.get(str(service), none))
