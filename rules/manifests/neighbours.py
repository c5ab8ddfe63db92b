"""What lives in the pod beside the guest and has ports of its own there: the proxy of Istio, and
the connections of a live migration where KubeVirt does not carry them over a socket of the host."""

from collections.abc import Iterable

from rules.manifests.fields import Fields
from rules.model import Claim, Protocol
from rules.ports import PortRange

INJECT = "sidecar.istio.io/inject"  # KubeVirt reads the annotation, newer Istio the label
PROXY_PORTS = (15000, 15001, 15004, 15006, 15008, 15009, 15020, 15021, 15053, 15090)
MIGRATION_PORTS = PortRange(49152, 49153)


def is_proxied(metadatas: Iterable[Fields]) -> bool:
    """Whether Istio puts its proxy beside the guest; what the first of them says counts."""
    said = [
        metadata.mapping(kind).values.get(INJECT)
        for metadata in metadatas
        for kind in ("annotations", "labels")
    ]
    return next((str(one).lower() == "true" for one in said if one is not None), False)


def reserved(document: Fields, *, proxied: bool) -> tuple[Claim, ...]:
    """The ports that are the pod's own, whatever is declared for the guest."""
    found = [PortRange(port, port) for port in PROXY_PORTS] if proxied else []
    status = document.values.get("status")
    status = status if isinstance(status, dict) else {}
    if status.get("activePods") and status.get("migrationTransport") != "Unix":
        found.append(MIGRATION_PORTS)
    return tuple(Claim(Protocol.TCP, ports) for ports in found)
