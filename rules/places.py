"""Where the rules for a guest stand: the link that traffic enters on, the one the guest is behind,
and the addresses at which it is reached."""

from ipaddress import IPv4Address, IPv4Network

from rules.model import (
    Address,
    Family,
    Guest,
    Masquerade,
    Surroundings,
    is_link_name,
)
from rules.values import Value

# IPv4 only: Linux has no way back to ::1 for a packet that comes in on a link (decisions.md).
LOOPBACK = IPv4Address("127.0.0.1")
LOOPBACK_NETWORK = IPv4Network("127.0.0.0/8")
POD_LINK = "eth0"
# Where kube-proxy in IPVS mode holds the addresses of all Services: the node answers for them, but
# what is behind them is not the node.
NOT_THE_NODES = frozenset({"kube-ipvs0"})


def route_localnet(link: str) -> str:
    """The setting that lets packets with a loopback address pass a link."""
    return f"net.ipv4.conf.{link.replace('.', '/')}.route_localnet"


def entry_link(masquerade: Masquerade, surroundings: Surroundings | None) -> str | None:
    """The link that traffic for it enters the namespace on; None: it is not there yet."""
    if surroundings is None:
        return masquerade.entry or POD_LINK
    names = {link.name for link in surroundings.links if is_link_name(link.name)}
    if masquerade.entry is not None:
        return masquerade.entry if masquerade.entry in names else None
    if POD_LINK in names:
        return POD_LINK
    return surroundings.default_link if surroundings.default_link in names else None


def entry_families(entry: str | None, surroundings: Surroundings | None) -> set[Family]:
    if surroundings is None:
        return set(Family)
    return {
        Family.of(address)
        for link in surroundings.links
        if link.name == entry
        for address in link.addresses
        if is_global(address.ip)
    }


def is_global(address: Address) -> bool:
    """Whether others can reach a namespace at this address (Go's IsGlobalUnicast)."""
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address == IPv4Address("255.255.255.255")
    )


def node_addresses(links: Surroundings) -> frozenset[Address]:
    """Those of a node by which it and others speak with each other over a router: IPv6 does not
    route addresses of one link."""
    return frozenset(
        address.ip
        for link in links.links
        if link.name not in NOT_THE_NODES
        for address in link.addresses
        if is_global(address.ip) or (address.version == 4 and address.ip.is_link_local)
    )


def why_pending(masquerade: Masquerade, entry: str | None) -> str:
    if entry is not None:
        return f"{entry} has no global address yet"
    if masquerade.entry is not None:
        return f"there is no link {masquerade.entry} yet"
    return f"there is neither a link {POD_LINK} nor a default route yet"


class Place(Value, kw_only=True):
    """Where the rules for one guest stand, and what they lead between."""

    owner: str
    guest: Address
    entry: str
    link: str  # behind which the guest is
    gateway: Address | None  # our own address there
    inside: tuple[Address, ...]  # at which programs of the namespace reach the guest
    shared: bool  # with KubeVirt, whose own chains are live
    proxied: bool  # TCP that enters is for a proxy first

    @property
    def family(self) -> Family:
        return Family.of(self.guest)


def place_of(
    owner: str,
    guest: Guest,
    entry: str,
    masquerade: Masquerade,
    surroundings: Surroundings | None,
) -> Place:
    family = Family.of(guest.address)
    link, gateway = _guest_side(guest, entry, surroundings)
    inside: tuple[Address, ...] = ()
    if family is Family.IP and gateway is not None:
        own = global_addresses(entry, family, surroundings) if masquerade.proxied else ()
        inside = (LOOPBACK, *own)
    return Place(
        owner=owner,
        guest=guest.address,
        entry=entry,
        link=link,
        gateway=gateway,
        inside=inside,
        shared=surroundings is not None and family in surroundings.kubevirt,
        proxied=masquerade.proxied,
    )


def _guest_side(
    guest: Guest, entry: str, surroundings: Surroundings | None
) -> tuple[str, Address | None]:
    """The link behind which the guest is, and our own address there.

    Of several networks that hold the guest the smallest counts, as it does for the kernel's
    routing: a second link on 10.0.0.0/8 must not be taken for the guest's.
    """
    facing = [
        (address.network.prefixlen, link.name, address.ip)
        for link in (surroundings.links if surroundings is not None else ())
        if link.name not in (entry, "lo") and is_link_name(link.name)
        for address in link.addresses
        if guest.address in address.network and guest.address != address.ip
    ]
    if facing:
        _, name, own = max(facing, key=lambda found: found[0])
        return name, own
    bridge = f"k6t-{entry}"
    return bridge, guest.gateway if is_link_name(bridge) else None  # nft refuses a longer name


def global_addresses(
    entry: str, family: Family, surroundings: Surroundings | None
) -> tuple[Address, ...]:
    """Of that family, at which others reach the namespace."""
    return tuple(
        address.ip
        for link in (surroundings.links if surroundings is not None else ())
        if link.name == entry
        for address in link.addresses
        if Family.of(address) is family and is_global(address.ip)
    )
