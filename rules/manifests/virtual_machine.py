"""A VirtualMachine, a VirtualMachineInstance or the VM of the oldest documents becomes a Machine:
the interface we forward to, with its claims, and those that are not ours, with the reason."""

from collections.abc import Set

from rules.manifests import metadata, neighbours, networks, port_annotations, ports
from rules.manifests.fields import Fields
from rules.manifests.metadata import GUEST, PORT_RANGES, Annotations
from rules.manifests.networks import Network, Part
from rules.manifests.ports import Entry
from rules.model import Address, Guest, Machine, Masquerade, NotOurs, Protocol
from rules.problems import dotted
from rules.values import replace

KINDS = ("VirtualMachine", "VirtualMachineInstance", "VM")
_DEFAULT_BRIDGE = NotOurs(
    "default", "no interface is written, so the default bridge: nothing to translate"
)
_DETACHED = NotOurs("", "no network is attached")

Names = tuple[tuple[str, Protocol, int], ...]


def read_machine(
    document: Fields, kind: str, *, limit: int, netns: str | None, tenant: bool = False
) -> Machine | None:
    """The machine of a manifest; None where the document has a problem. What a tenant wrote, and
    not root, may not say where it is to be applied."""
    own_metadata = document.mapping("metadata")
    namespace, name = metadata.identity(own_metadata)
    spec, template_metadata = _specification(document, kind)
    metadatas = (template_metadata, own_metadata) if template_metadata else (own_metadata,)
    annotations = Annotations(document)
    for one in metadatas:
        annotations.collect(one)
    if tenant:
        metadata.refuse_bare_metal(annotations)
    named_netns = metadata.netns(annotations)
    addresses = metadata.addresses(annotations, metadata.ADDRESS)
    labels = metadata.labels(*(one.mapping("labels") for one in metadatas))
    masquerade, not_ours, names = _attachments(spec, annotations, limit, admitted=tenant)
    if document.found:
        return None
    if masquerade:
        proxied = neighbours.is_proxied(metadatas)
        own = neighbours.reserved(document, proxied=proxied)
        masquerade = replace(masquerade, reserved=own, proxied=proxied)
    return Machine(
        kind=kind,
        namespace=namespace,
        name=name,
        netns=metadata.short(netns or named_netns or name),
        masquerade=masquerade,
        not_ours=not_ours,
        labels=labels,
        names=names,
        addresses=addresses,
    )


def _specification(document: Fields, kind: str) -> tuple[Fields, Fields | None]:
    """What specifies the machine, and the metadata of the template it is in, if it is in one."""
    if not document.given("spec"):
        document.missing("spec", "the machine's specification")
    spec = document.mapping("spec")
    if kind == "VirtualMachineInstance" or (kind == "VM" and not spec.given("template")):
        return spec, None
    template = spec.mapping("template")
    if not spec.given("template"):
        spec.missing("template", "the machine's specification under spec")
    elif not template.given("spec"):
        template.missing("spec", "the machine's specification")
    return template.mapping("spec"), template.mapping("metadata")


def _attachments(
    spec: Fields, annotations: Annotations, limit: int, *, admitted: bool
) -> tuple[Masquerade | None, tuple[NotOurs, ...], Names]:
    """The interface that is ours, those that are not, and the ports of all that have names."""
    devices = spec.mapping("domain").mapping("devices")
    ports.misplaced(devices)
    attached = devices.boolean("autoattachPodInterface")
    interfaces = networks.read_interfaces(devices, admitted=admitted)
    nets = networks.read_networks(spec)
    declared = [ports.declared(interface.fields, limit) for interface in interfaces]
    others = {net.name for net in nets if net.kind not in ("pod", None)}
    entries = _claimed(interfaces, declared, annotations, limit, others)
    entry = metadata.entry(annotations)
    addresses = metadata.addresses(annotations, GUEST)
    ours: Masquerade | None = None
    not_ours: list[NotOurs] = []
    for interface, network in networks.pairs(interfaces, nets):
        if interface.kind == "masquerade":
            ours = Masquerade(
                name=interface.name or "",
                entry=entry,
                guests=_guests(network.subnets, addresses, annotations),
                claims=ports.claims(entries) if entries else None,
            )
        else:
            why = networks.reason(interface, network)
            not_ours.append(NotOurs(interface.name or "", why, networks.resource(network)))
    if not interfaces and not nets:
        not_ours.append(_DETACHED if attached is False else _DEFAULT_BRIDGE)
    return ours, tuple(not_ours), _names(declared)


def _names(declared: list[list[Entry]]) -> Names:
    return tuple(
        (entry.name, entry.protocol, entry.first)
        for entries in declared
        for entry in entries
        if entry.name
    )


def _claimed(
    interfaces: list[Part],
    declared: list[list[Entry]],
    annotations: Annotations,
    limit: int,
    others: Set[str | None],
) -> list[Entry]:
    """What the masquerade interface forwards, in whichever spelling; nothing written: all. Ranges
    on other networks than the pod's mean nothing to KubeVirt, and so to us."""
    everything = [entry for entries in declared for entry in entries]
    ports.check_names(annotations.document, everything)
    port_annotations.lengthen(annotations, everything)
    claimed = port_annotations.annotated(annotations, limit)
    ports.check_overlaps(annotations.document, claimed)
    for interface, entries in zip(interfaces, declared, strict=True):
        ports.check_overlaps(annotations.document, entries)
        if interface.kind == "masquerade":
            claimed += entries
        elif interface.kind and interface.name not in others:
            ports.check_single(interface.fields, entries)
    if PORT_RANGES in annotations.texts:
        _check_annotation(interfaces, annotations)
    return claimed


def _check_annotation(interfaces: list[Part], annotations: Annotations) -> None:
    """Check that the port-ranges annotation has an interface to speak of, and speaks alone."""
    ours = [one.fields for one in interfaces if one.kind == "masquerade"]
    if not ours and all(one.kind for one in interfaces):
        annotations.problem(
            PORT_RANGES,
            "ranges-need-masquerade",
            "is for the machine's masquerade interface, and it has none",
            "Give an interface masquerade: {}, or remove the annotation.",
        )
    for interface in ours:
        for key in ("ports", "portRanges"):
            if interface.values.get(key):
                annotations.problem(
                    PORT_RANGES,
                    "annotation-and-spec",
                    f"is written beside {dotted((*interface.path, key))}",
                    "Keep one of the two.",
                )


def _guests(
    subnets: list[Network], addresses: tuple[Address, ...], annotations: Annotations
) -> tuple[Guest, ...]:
    """The guest in each family: the second host of its network, or where it is said to be."""
    placed = {address.version: address for address in addresses}
    guests: list[Guest] = []
    for subnet in subnets:
        gateway = subnet.network_address + 1
        address = placed.get(subnet.version, subnet.network_address + 2)
        if address not in subnet:
            guests.append(Guest(address))
            continue
        if address in (gateway, subnet.network_address) or (
            subnet.version == 4 and address == subnet.broadcast_address
        ):
            annotations.problem(
                GUEST,
                "bad-annotation",
                f"cannot be the guest's address in {subnet}, whose gateway is {gateway}",
                f"Write another address, such as {gateway + 1}.",
                str(address),
            )
        guests.append(Guest(address, gateway))
    return tuple(guests)
