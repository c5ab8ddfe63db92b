"""An EndpointSlice as the API server tells of it, cut down to where a Service leads: who counts of
those it names, as with kube-proxy, and what that makes of the Service's ports. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address

from agent.sources.answers import Object
from agent.sources.services import KIND as SERVICE
from agent.sources.told import IDENTITY, mapping, mappings, some
from rules.manifests.metadata import is_elsewhere
from rules.model import Address, Protocol
from rules.ports import HIGHEST, LOWEST
from rules.services import Endpoint, Service, ServicePort
from rules.values import Value

PATH = "/apis/discovery.k8s.io/v1/endpointslices"
KIND = "EndpointSlice"
NAME = "kubernetes.io/service-name"  # a label: whose it is
LONGEST_SELECTOR = 8192  # characters of a URL that whatever is on the way is sure to take

_VERSIONS = {"IPv4": 4, "IPv6": 6}
_PROTOCOLS = {one.name: one for one in Protocol}

Port = tuple[str, Protocol, int]


class Back(Value, kw_only=True):
    """Somebody behind a Service whom connections may be sent to, now or if there is no other."""

    address: Address
    local: bool
    ready: bool  # else it serves those that it has, and is about to go


class Slice(Value, kw_only=True):
    """Some of those behind a Service, and their ports."""

    service: str
    ports: tuple[Port, ...]
    backs: tuple[Back, ...]

    @property
    def content(self) -> "Slice":
        """By which it is told whether there is something new in it."""
        return self


def selector(names: Collection[str]) -> str:
    """The slices of Services of these names, in whatever namespace; all, if there are too many."""
    chosen = f"{NAME} in ({','.join(sorted(names))})"
    return chosen if len(chosen) <= LONGEST_SELECTOR else NAME


def trimmed(thing: Object) -> Object:
    """For whoever decodes JSON, as with Services."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not ("endpoints" in thing or thing.get("kind") == KIND):
        return thing
    return {
        "metadata": {**some(metadata, IDENTITY), NAME: mapping(metadata, "labels").get(NAME)},
        "addressType": thing.get("addressType"),
        "ports": thing.get("ports"),
        "endpoints": [
            some(one, ("addresses", "conditions", "nodeName"))
            for one in mappings(thing, "endpoints")
        ],
    }


def heard(thing: Mapping[str, object], node: str, names: Collection[str]) -> Slice | None:
    """The slice that a trimmed object is, seen from that node; None where it is of no Service of
    these names, or its addresses are names."""
    metadata = mapping(thing, "metadata")
    version = _VERSIONS.get(str(thing.get("addressType")))
    name = metadata.get(NAME)
    if version is None or not isinstance(name, str) or name not in names:
        return None
    backs = [_back(one, version, node) for one in mappings(thing, "endpoints")]
    ports = [_port(one) for one in mappings(thing, "ports")]
    return Slice(
        service=f"{SERVICE}/{metadata.get('namespace')}/{name}",
        ports=tuple(one for one in ports if one is not None),
        backs=tuple(one for one in backs if one is not None),
    )


def endpoints(service: Service, slices: Iterable[Slice]) -> tuple[tuple[Endpoint, ...], ...]:
    """Where each port of a Service leads."""
    known = list(slices)
    if not known:  # as of thousands that kube-proxy serves
        return ((),) * len(service.ports)
    return tuple(_endpoints(port, service.local, known) for port in service.ports)


def _endpoints(port: ServicePort, local: bool, slices: Iterable[Slice]) -> tuple[Endpoint, ...]:
    found = [
        (number, back)
        for one in slices
        for name, protocol, number in one.ports
        if (name, protocol) == (port.name, port.protocol)
        and number + len(port.ports) - 1 <= HIGHEST
        for back in one.backs
    ]
    taken = _counting(found)
    if local:  # where nobody else may help out, those who are about to go are better than none
        taken += _counting([place for place in found if place[1].local])
    here = {(number, back.address) for number, back in taken if back.local}
    return tuple(
        Endpoint(address=address, port=number, local=(number, address) in here)
        for number, address in sorted(
            {(number, back.address) for number, back in taken},
            key=lambda place: (place[1].version, place[1], place[0]),
        )
    )


def _counting(found: Iterable[tuple[int, Back]]) -> list[tuple[int, Back]]:
    """Whoever is ready; where nobody is, of a family of addresses, those who are about to go."""
    families: dict[int, list[tuple[int, Back]]] = {}
    for place in found:
        families.setdefault(place[1].address.version, []).append(place)
    return [
        place
        for places in families.values()
        for place in [one for one in places if one[1].ready] or places
    ]


def _port(thing: Object) -> Port | None:
    """What one port of a slice is; None: any, or none that we know."""
    protocol = _PROTOCOLS.get(str(thing.get("protocol") or "TCP"))
    number = thing.get("port")
    if protocol is None or type(number) is not int or not LOWEST <= number <= HIGHEST:
        return None
    return str(thing.get("name") or ""), protocol, number


def _back(thing: Object, version: int, node: str) -> Back | None:
    """None where it is not there for anybody, or at an address that only the node itself, or none,
    can have: a tenant may have written it."""
    addresses = thing.get("addresses")
    conditions = mapping(thing, "conditions")
    ready = conditions.get("ready") is not False
    leaving = conditions.get("terminating") is True and conditions.get("serving") is not False
    if not (ready or leaving) or not isinstance(addresses, list) or not addresses:
        return None
    try:
        address = ip_address(addresses[0]) if isinstance(addresses[0], str) else None
    except ValueError:
        return None
    if address is None or address.version != version or is_elsewhere(address):
        return None
    return Back(address=address, local=thing.get("nodeName") == node, ready=ready)
