"""A Service becomes what it publishes: ports and ranges, where they lead, and where it is to be
reached."""

from ipaddress import ip_address

from rules.manifests import metadata
from rules.manifests.fields import Fields, nearest
from rules.manifests.metadata import OURS, PORT_END, Annotations, is_label, is_subdomain
from rules.manifests.named_ports import (
    Port,
    check_names,
    check_overlaps,
    lengthen,
    read_port,
)
from rules.manifests.ports import NAME_FIX, too_many
from rules.model import Address, Family, Protocol
from rules.services import Service, ServicePort, ServiceType

PORT_KEYS = ("name", "protocol", "port", "targetPort", "nodePort", "appProtocol")
FOLLOWERS = ("targetPort", "nodePort")
TYPES = {one.value: one for one in ServiceType}
AFFINITIES = ("None", "ClientIP")
POLICIES = ("Cluster", "Local")
FAMILIES = {"IPv4": Family.IP, "IPv6": Family.IP6}
HEADLESS = "None"
AFFINITY_SECONDS = 10800  # where nothing else is said, as in Kubernetes
_LONGEST_AFFINITY = 86400


def read_service(document: Fields, *, limit: int) -> Service | None:
    """The Service of a manifest; None where the document has a problem."""
    own_metadata = document.mapping("metadata")
    namespace, name = metadata.identity(own_metadata)
    annotations = Annotations(document)
    annotations.collect(own_metadata)
    _refuse_others(annotations)
    spec = document.mapping("spec")
    kind = TYPES.get(_choice(spec, "type", tuple(TYPES)), ServiceType.CLUSTER_IP)
    headless = _headless(spec, kind)
    _check_external_name(spec, kind)
    allocates = _allocates(spec, kind)
    ports = _ports(spec, kind, limit)
    _check_given(document, headless or kind is ServiceType.EXTERNAL_NAME)
    lengthen(annotations, ports)
    for key in ("port", "nodePort"):
        check_overlaps(ports, key)
    selector = metadata.labels(spec.mapping("selector"))
    external = _external(spec)
    affinity = _affinity(spec)
    families = _families(spec)
    restricted = bool(spec.sequence("loadBalancerSourceRanges"))
    local = _choice(spec, "externalTrafficPolicy", POLICIES) == "Local"
    if document.found:
        return None
    return Service(
        namespace=namespace,
        name=name,
        type=kind,
        ports=tuple(map(_published, ports)),
        selector=selector,
        headless=headless,
        external=external,
        ingress=_ingress(document),
        affinity=affinity,
        families=families,
        restricted=restricted,
        allocates=allocates,
        local=local,
    )


def _check_given(document: Fields, portless: bool) -> None:
    """Note that there is no specification, or no port in it."""
    spec = document.values.get("spec")
    if spec is None:
        document.missing("spec", "the Service's specification")
    elif isinstance(spec, dict) and spec.get("ports") is None and not portless:
        document.mapping("spec").missing("ports", "the ports of the Service")


def _refuse_others(annotations: Annotations) -> None:
    """Note the annotations of ours that are for machines: here they would be without effect."""
    for key in OURS:
        if key in annotations.texts:
            annotations.problem(
                key,
                "bad-annotation",
                "is for virtual machines, and means nothing on a Service",
                f"Remove it; a range of a Service is a named port with {PORT_END}<port name>.",
            )


def _ports(spec: Fields, kind: ServiceType, limit: int) -> list[Port]:
    values = spec.values.get("ports")
    if isinstance(values, list) and len(values) > limit:
        too_many(spec, ("ports",), len(values), limit)
        return []
    written = spec.mappings("ports")
    ports = [_port(fields, kind) for fields in written]
    for fields in written if len(written) > 1 else ():
        if not fields.given("name") or fields.values["name"] == "":
            fields.problem(
                "missing", "is missing, and there are several ports", NAME_FIX, at=("name",)
            )
    check_names(ports)
    return ports


def _port(fields: Fields, kind: ServiceType) -> Port:
    name = fields.text("name")
    if name and not is_label(name):
        fields.problem(
            "bad-port-name",
            "is not a valid name for a port of a Service",
            "Use at most 63 lower-case letters, digits and dashes, no dash at either end.",
            at=("name",),
            value=name,
        )
    port = read_port(fields, "port", name, FOLLOWERS, PORT_KEYS)
    if port.followers["nodePort"] and kind is ServiceType.CLUSTER_IP:
        fields.problem(
            "node-port-type",
            "is for a Service of type NodePort or LoadBalancer, and this is ClusterIP",
            "Add type: NodePort to the spec, or remove the nodePort.",
            at=("nodePort",),
            value=port.followers["nodePort"],
        )
    return port


def _published(port: Port) -> ServicePort:
    target = port.followers["targetPort"]
    ports = port.ports()
    return ServicePort(
        name=port.name,
        protocol=port.protocol or Protocol.TCP,
        ports=ports,
        target=target if isinstance(target, str) else port.following("targetPort") or ports,
        node_ports=port.following("nodePort"),
        ranged=port.ranged,
    )


def _choice(fields: Fields, key: str, choices: tuple[str, ...]) -> str:
    """One of several words; the first of them where none is given."""
    text = fields.string(key) if fields.given(key) else None
    if text and text not in choices:
        close = nearest(text, choices)
        fix = f"Write {close}." if close else f"Write one of {', '.join(choices)}."
        fields.problem("bad-choice", "is not a known word here", fix, at=(key,), value=text)
    return text if text in choices else choices[0]


def _headless(spec: Fields, kind: ServiceType) -> bool:
    """Whether only names lead to its endpoints; such a Service has no ports on any node."""
    headless = spec.values.get("clusterIP") == HEADLESS
    if headless and kind in (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER):
        spec.problem(
            "headless-type",
            f"makes it headless, and a Service of type {kind.value} cannot be",
            "Remove the clusterIP, or write type: ClusterIP.",
            at=("clusterIP",),
            value=HEADLESS,
        )
    return headless


def _check_external_name(spec: Fields, kind: ServiceType) -> None:
    """Note a Service that only stands for a name, and does not say which."""
    if kind is not ServiceType.EXTERNAL_NAME:
        return
    name = spec.string("externalName") if spec.given("externalName") else None
    if not spec.values.get("externalName"):
        spec.missing("externalName", "the name that the Service stands for")
    elif name and not is_subdomain(name.removesuffix(".")):
        spec.problem(
            "bad-name",
            "is not a name in the DNS",
            "Write one such as www.example.org.",
            at=("externalName",),
            value=name,
        )


def _allocates(spec: Fields, kind: ServiceType) -> bool:
    """Whether node ports that are not written down are to be found for it."""
    said = spec.boolean("allocateLoadBalancerNodePorts")
    if said is not None and kind is not ServiceType.LOAD_BALANCER:
        spec.problem(
            "node-port-type",
            f"is for a Service of type LoadBalancer, and this is {kind.value}",
            "Remove it, or write type: LoadBalancer.",
            at=("allocateLoadBalancerNodePorts",),
            value=said,
        )
    return said is not False


def _external(spec: Fields) -> tuple[Address, ...]:
    found: list[Address] = []
    for index, value in enumerate(spec.sequence("externalIPs")):
        address = _address(value)
        if address is None or metadata.is_elsewhere(address):
            spec.problem(
                "bad-address",
                "is not an address that packets from outside can have",
                "Write an IPv4 or IPv6 address in quotes, such as '192.0.2.7'.",
                at=("externalIPs", index),
                value=value,
            )
        else:
            found.append(address)
    return tuple(found)


def _ingress(document: Fields) -> tuple[Address, ...]:
    """What a load balancer has given; nobody writes the status, so what is odd there is no problem
    of the author, and is passed over."""
    there: object = document.values
    for key in ("status", "loadBalancer", "ingress"):
        there = there.get(key) if isinstance(there, dict) else None
    given = there if isinstance(there, list) else ()
    addresses = [_address(one.get("ip")) for one in given if isinstance(one, dict)]
    return tuple(one for one in addresses if one and not metadata.is_elsewhere(one))


def _address(value: object) -> Address | None:
    try:
        return ip_address(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _families(spec: Fields) -> tuple[Family, ...]:
    found: list[Family] = []
    for index, value in enumerate(spec.sequence("ipFamilies")):
        if isinstance(value, str) and value in FAMILIES:
            found.append(FAMILIES[value])
        else:
            fix = f"Write {' or '.join(FAMILIES)}."
            at = ("ipFamilies", index)
            spec.problem("bad-choice", "is no address family", fix, at=at, value=value)
    return tuple(found)


def _affinity(spec: Fields) -> int | None:
    wanted = _choice(spec, "sessionAffinity", AFFINITIES) == "ClientIP"
    client = spec.mapping("sessionAffinityConfig").mapping("clientIP")
    given = client.given("timeoutSeconds")
    seconds = client.integer("timeoutSeconds") if given else AFFINITY_SECONDS
    if seconds is not None and not 0 < seconds <= _LONGEST_AFFINITY:
        client.problem(
            "bad-choice",
            "is not a number of seconds up to a day",
            f"Write a number from 1 to {_LONGEST_AFFINITY}.",
            at=("timeoutSeconds",),
            value=seconds,
        )
    return seconds if wanted else None
