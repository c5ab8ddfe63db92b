"""A Pod becomes the ports that its containers announce. Kubernetes opens and closes nothing by
them; they say what is there, and a Service finds named ones. And it becomes its labels and its
addresses, by which policies find it."""

from collections.abc import Mapping
from ipaddress import ip_address

from rules.manifests import metadata
from rules.manifests.fields import Fields
from rules.manifests.metadata import Annotations
from rules.manifests.named_ports import (
    Port,
    check_names,
    check_overlaps,
    lengthen,
    read_port,
)
from rules.manifests.ports import NAME_FIX, is_service_name, too_many
from rules.model import Address, Protocol
from rules.services import Pod, PodPort

PORT_KEYS = ("name", "protocol", "containerPort", "hostPort", "hostIP")
FOLLOWERS = ("hostPort",)
CONTAINERS = ("containers", "initContainers")
ENDED = ("Succeeded", "Failed")


def read_pod(document: Fields, *, limit: int) -> Pod | None:
    """The Pod of a manifest; None where the document has a problem."""
    own_metadata = document.mapping("metadata")
    namespace, name = metadata.identity(own_metadata)
    annotations = Annotations(document)
    annotations.collect(own_metadata)
    labels = metadata.labels(own_metadata.mapping("labels"))
    if not document.given("spec"):
        document.missing("spec", "the Pod's specification")
    spec = document.mapping("spec")
    running, before = (
        [(container, _ports(container, limit)) for container in spec.mappings(key)]
        for key in CONTAINERS
    )
    every = [(container, port) for container, ports in (*running, *before) for port in ports]
    lengthen(annotations, [port for _, port in every])
    # Containers run side by side in one network; those before them have it to themselves.
    _check_overlaps([port for _, ports in running for port in ports])
    for _, ports in before:
        _check_overlaps(ports)
    if document.found:
        return None
    return Pod(
        namespace=namespace,
        name=name,
        ports=tuple(_announced(container, port) for container, port in every),
        labels=labels,
        addresses=() if spec.values.get("hostNetwork") else _addresses(document),
    )


def _addresses(document: Fields) -> tuple[Address, ...]:
    """Those of the host are everybody's there, and those of a Pod that has ended are soon
    another's."""
    status = document.values.get("status")
    if not isinstance(status, dict) or status.get("phase") in ENDED:
        return ()
    return given_addresses(status)


def given_addresses(status: Mapping[str, object]) -> tuple[Address, ...]:
    """What a Pod was given; nobody writes the status, so what is odd there is passed over."""
    several = status.get("podIPs")
    listed = several if isinstance(several, list) else []
    texts = [*(one.get("ip") for one in listed if isinstance(one, dict)), status.get("podIP")]
    found: list[Address] = []
    for text in dict.fromkeys(text for text in texts if isinstance(text, str)):
        try:
            address = ip_address(text)
        except ValueError:
            continue
        if address not in found and not metadata.is_elsewhere(address):
            found.append(address)
    return tuple(found)


def _ports(container: Fields, limit: int) -> list[Port]:
    values = container.values.get("ports")
    if isinstance(values, list) and len(values) > limit:
        too_many(container, ("ports",), len(values), limit)
        return []
    ports = [_port(fields) for fields in container.mappings("ports")]
    check_names(ports)
    return ports


def _port(fields: Fields) -> Port:
    name = fields.text("name")
    if name and not is_service_name(name):
        fields.problem(
            "bad-port-name", "is not a valid service name", NAME_FIX, at=("name",), value=name
        )
    return read_port(fields, "containerPort", name, FOLLOWERS, PORT_KEYS)


def _check_overlaps(ports: list[Port]) -> None:
    check_overlaps(ports, "containerPort", strict=False)
    check_overlaps(ports, "hostPort", also="hostIP")


def _announced(container: Fields, port: Port) -> PodPort:
    name = container.values.get("name")
    return PodPort(
        container=name if isinstance(name, str) else "",
        name=port.name,
        protocol=port.protocol or Protocol.TCP,
        ports=port.ports(),
        host_ports=port.following("hostPort"),
        ranged=port.ranged,
    )
