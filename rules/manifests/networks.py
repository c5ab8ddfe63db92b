"""The networks and interfaces of a machine, each by itself and the two against each other: what
is ours to forward to, and what is not."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network

from rules.manifests.fields import Fields, nearest
from rules.manifests.metadata import is_special
from rules.manifests.ports import misplaced
from rules.problems import dotted, shown

Network = IPv4Network | IPv6Network

BINDINGS = {
    "masquerade": "",
    "bridge": "bridge binding: the guest has the pod's own address, nothing to translate",
    "slirp": "slirp binding: QEMU forwards the ports itself, in user space",
    "sriov": "sriov binding: the guest has the device itself, its packets pass no rule here",
    "macvtap": "macvtap binding: the guest is on the node's network itself, nothing to translate",
    "passt": "passt binding: passt forwards the ports itself, in user space",
    "binding": "plugin binding: the plugin decides how packets reach the guest",
    "passtBinding": "passt binding: passt forwards the ports itself, in user space",
}
# KubeVirt takes no machine with these from 1.3 on, nor one with slirp, which the documents have.
DISCONTINUED = {"macvtap": "bridge", "passt": "passtBinding"}
NETWORK_TYPES = {
    "pod": "",
    "multus": "multus network: a secondary network, connected without translation",
    "resource": "resource network: its device plugin connects the guest, without translation",
    "resourceClaim": "claimed network: its device connects the guest, without translation",
}
POD_ONLY = ("masquerade", "passtBinding")
STATES = ("up", "down", "absent")
BRIDGE_MAC = "02:00:00:00:00:00"  # what KubeVirt gives the bridge in the pod
MODELS = ("e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139", "virtio")
POD_KEYS = ("vmNetworkCIDR", "vmIPv6NetworkCIDR")
CIDRS = (("vmNetworkCIDR", 4, "10.0.2.0/24"), ("vmIPv6NetworkCIDR", 6, "fd10:0:2::/120"))

_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_HEX = frozenset("0123456789abcdefABCDEF")
_LONGEST_NAME = 63
_FEW = 64  # different networks of machines: most have the default


class Part:
    """An interface or a network: its name, its binding or type, and what that holds; of a pod
    network also the guest's subnets, one per family."""

    __slots__ = ("fields", "inner", "kind", "name", "subnets")

    def __init__(self, fields: Fields, code: str, kinds: dict[str, str], usual: str) -> None:
        self.fields = fields
        self.name = _name(fields)
        self.kind = _only_one(fields, code, kinds, usual)
        self.inner = fields.mapping(self.kind or "")
        self.subnets: list[Network] = []
        misplaced(self.inner)


def read_interfaces(devices: Fields, *, admitted: bool = False) -> list[Part]:
    """The interfaces, each checked for what it says of itself. What a cluster has admitted may have
    a binding that is no longer taken: it runs."""
    read: list[Part] = []
    for fields in devices.mappings("interfaces"):
        _check_model(fields)
        _check_pci_address(fields)
        interface = Part(fields, "binding", BINDINGS, "masquerade")
        _check_mac(interface)
        _check_state(interface)
        if interface.kind in DISCONTINUED and not admitted:
            _discontinued(fields, interface.kind)
        read.append(interface)
    return read


def read_networks(spec: Fields) -> list[Part]:
    """The networks, each checked for what it says of itself."""
    read: list[Part] = []
    for fields in spec.mappings("networks"):
        misplaced(fields)
        network = Part(fields, "network-type", NETWORK_TYPES, "pod")
        if network.kind == "resource":
            _check_resource(network.inner)
        elif network.kind == "multus":
            if network.inner.string("networkName", required=True) == "":
                network.inner.missing("networkName", "a string")
            network.inner.boolean("default")
        elif network.kind == "pod":
            network.subnets = _vm_networks(network.inner)
        read.append(network)
    return read


def _name(fields: Fields) -> str | None:
    name = fields.string("name", required=True)
    if name is not None and not (0 < len(name) <= _LONGEST_NAME and _NAME_LETTERS.issuperset(name)):
        fields.problem(
            "bad-name",
            "is not a valid name for an interface or a network",
            "Use at most 63 letters, digits, dashes and underscores.",
            at=("name",),
            value=name,
        )
    return name


def _only_one(fields: Fields, code: str, choices: Iterable[str], usual: str) -> str | None:
    given = [key for key in choices if fields.given(key)]
    if len(given) == 1:
        return given[0]
    if given:
        what, fix = f"has {' and '.join(given)}, which exclude each other", "Keep one of them."
    elif empty := [key for key in choices if key in fields.values]:
        what, fix = f"has {empty[0]}: without a value, which is none", f"Write {empty[0]}: {{}}."
    else:
        offered = [one for one in choices if one not in DISCONTINUED]
        what = f"has none of {', '.join(offered)}"
        fix = f"Add one of them, such as {usual}: {{}}."
    fields.problem(code, what, fix)
    return None


def _check_model(interface: Fields) -> None:
    model = interface.text("model")
    if model and model not in MODELS:
        interface.problem(
            "bad-model",
            "is not a known network card",
            f"Write one of {', '.join(MODELS)}.",
            at=("model",),
            value=model,
        )


def _check_mac(interface: Part) -> None:
    mac = interface.fields.text("macAddress")
    if mac and not is_mac(mac):
        interface.fields.problem(
            "bad-mac",
            "is not a MAC address",
            "Write six pairs of hexadecimal digits: de:ad:00:00:be:af or DE-AD-00-00-BE-AF.",
            at=("macAddress",),
            value=mac,
        )
    elif mac == BRIDGE_MAC and interface.kind == "masquerade":
        interface.fields.problem(
            "bad-mac",
            "is the address of the bridge in the pod",
            "Write another one, or none.",
            at=("macAddress",),
            value=mac,
        )


def _check_pci_address(interface: Fields) -> None:
    address = interface.text("pciAddress")
    if address and not is_pci_address(address):
        interface.problem(
            "bad-pci-address",
            "is not a PCI address",
            "Write domain, bus, slot and function: 0000:81:01.0.",
            at=("pciAddress",),
            value=address,
        )


def _check_state(interface: Part) -> None:
    state = interface.fields.text("state")
    if state and state not in STATES:
        _bad_state(interface, "is not a state", f"Write one of {', '.join(STATES)}.")
    elif state in ("up", "down") and interface.kind == "sriov":
        _bad_state(interface, "is not for sriov", "Remove it.")
    elif state == "absent" and interface.kind not in ("bridge", None):
        _bad_state(interface, "is for bridge only", "Remove the interface, or its state.")


def _bad_state(interface: Part, what: str, fix: str) -> None:
    value = interface.fields.values["state"]
    interface.fields.problem("bad-state", what, fix, at=("state",), value=value)


def _discontinued(interface: Fields, kind: str) -> None:
    interface.problem(
        "discontinued-binding",
        "was discontinued in KubeVirt 1.3",
        f"Write masquerade or {DISCONTINUED[kind]} instead.",
        at=(kind,),
    )


def is_pci_address(text: str) -> bool:
    """Whether it is one as Linux writes it, such as 0000:81:01.0."""
    parts = text.replace(".", ":").split(":")
    return (
        [len(part) for part in parts] == [4, 2, 2, 1]
        and text[7:11:3] == ":."
        and _HEX.issuperset("".join(parts))
        and parts[3] in "01234567"
    )


def is_mac(text: str) -> bool:
    """Whether it is a MAC address in one of the two notations."""
    pairs = text.split("-" if "-" in text else ":")
    return len(pairs) == 6 and all(len(pair) == 2 and _HEX.issuperset(pair) for pair in pairs)


def _check_resource(resource: Fields) -> None:
    name = resource.string("resourceName", required=True)
    if name is not None and not _is_resource_name(name):
        resource.problem(
            "bad-resource-name",
            "is not the name of a network resource",
            "Write <device plugin>/<network>, such as bridge.network.kubevirt.io/red.",
            at=("resourceName",),
            value=name,
        )


def _is_resource_name(name: str) -> bool:
    plugin, _, network = name.partition("/")
    return bool(plugin and network) and "/" not in network and not any(map(str.isspace, name))


def pairs(interfaces: list[Part], networks: list[Part]) -> list[tuple[Part, Part]]:
    """Every interface with its network, as far as the two fit together."""
    _check_pod_networks(networks)
    network_by_name = _by_name(networks)
    interface_by_name = _by_name(interfaces)
    if None not in (part.name for part in (*interfaces, *networks)):
        _check_partners(interface_by_name, network_by_name)
    found = [
        (interface, network_by_name[name])
        for name, interface in interface_by_name.items()
        if name in network_by_name
    ]
    return [pair for pair in found if _match(*pair)]


def reason(interface: Part, network: Part) -> str:
    """Why an interface other than masquerade on a pod network gets no rule from us."""
    if is_unplugged(interface):
        return "state: absent: the interface is being unplugged"
    return NETWORK_TYPES[network.kind or ""] or BINDINGS[interface.kind or ""]


def resource(network: Part) -> str:
    """The resource of a device plugin that a network is, if it is one."""
    name = network.inner.values.get("resourceName") if network.kind == "resource" else None
    return name if isinstance(name, str) else ""


def is_unplugged(interface: Part) -> bool:
    """Whether an interface is on its way out of a running machine."""
    return interface.fields.values.get("state") == "absent"


def _by_name(parts: Iterable[Part]) -> dict[str, Part]:
    named: dict[str, Part] = {}
    for part in parts:
        if part.name is None:
            continue
        first = named.setdefault(part.name, part)
        if first is not part:
            part.fields.problem(
                "duplicate-name",
                f"is also the name of {dotted(first.fields.path)}",
                "Give each a name of its own.",
                at=("name",),
                value=part.name,
            )
    return named


def _check_partners(interfaces: dict[str, Part], networks: dict[str, Part]) -> None:
    for name, interface in interfaces.items():
        if name not in networks:
            interface.fields.problem(
                "no-network",
                "has no network of its name",
                f"Add a network named {shown(name)} to networks, or correct the name.",
                at=("name",),
                value=name,
            )
    for name, network in networks.items():
        if name not in interfaces:
            network.fields.problem(
                "no-interface",
                "has no interface of its name",
                f"Add an interface named {shown(name)}, or remove the network.",
                at=("name",),
                value=name,
            )


def _match(interface: Part, network: Part) -> bool:
    if interface.kind is None or network.kind is None:
        return False
    if network.kind == "resource" and interface.kind != "bridge":
        interface.fields.problem(
            "resource-needs-bridge",
            f"has {interface.kind}, and its network is a resource, which goes with bridge only",
            "Write bridge: {} instead, or give it a pod network.",
        )
        return False
    if network.kind != "pod" and interface.kind in POD_ONLY:
        interface.fields.problem(
            "masquerade-needs-pod",
            f"has {interface.kind}, which goes with a pod network only, and its network is "
            f"{network.kind}",
            "Give its network pod: {}, or the interface another binding.",
        )
        return False
    if is_unplugged(interface) and interface.kind == "bridge" and _is_pods_own(network.fields):
        _bad_state(interface, "is not for the pod's own network", "Remove the state.")
        return False
    return True


def _check_pod_networks(networks: Iterable[Part]) -> None:
    own = [network.fields for network in networks if _is_pods_own(network.fields)]
    for network in own[1:]:
        network.problem(
            "second-pod-network",
            f"is the pod's own network, and so is {dotted(own[0].path)}",
            "Keep one of them.",
        )


def _is_pods_own(network: Fields) -> bool:
    multus = network.values.get("multus")
    return network.given("pod") or (isinstance(multus, dict) and multus.get("default") is True)


def _vm_networks(pod: Fields) -> list[Network]:
    for key in pod.values:
        if isinstance(key, str) and key not in POD_KEYS and nearest(key, POD_KEYS, 0.75):
            pod.unknown(key, POD_KEYS)
    read = [_vm_network(pod, *one) for one in CIDRS]
    return [one for one in read if one]


def _vm_network(pod: Fields, key: str, version: int, default: str) -> Network | None:
    text = pod.string(key) if pod.given(key) else default
    if text is None:
        return None
    network = _network(text, version)
    if isinstance(network, str):
        fix = f"Write an IPv{version} network such as {default}."
        pod.problem("bad-cidr", network, fix, at=(key,), value=text)
        return None
    return network


@lru_cache(_FEW)
def _network(text: str, version: int) -> Network | str:
    """The network, or what is wrong with it."""
    network = cidr(text)
    if network is None:
        return "is not a network address with its prefix length"
    if network.version != version:
        return f"is not an IPv{version} network"
    if network.num_addresses < 4:
        return "leaves no room for a gateway and a guest"
    if is_special(network.network_address + 2) or _needs_scope(network):
        return "is not a network that machines can be in"
    return network


def cidr(text: str) -> Network | None:
    """The network that a text is, with the length of its prefix; of no single link."""
    address, _, length = text.partition("/")
    if "%" in address or not (length.isascii() and length.isdigit()):
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _needs_scope(network: Network) -> bool:
    return network.version == 6 and network.is_link_local
