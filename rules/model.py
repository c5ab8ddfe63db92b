"""The values everything else speaks in: what manifests declare, what a namespace looks like,
and the rules that lie between the two."""

import enum
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from types import MappingProxyType

from rules.ports import PortRange
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

NODE = "node:self"  # what the namespace that the agent runs in is called
NODE_KEY = "node"  # of the sets of its addresses, in which policies never forbid anything
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
InterfaceAddress = IPv4Interface | IPv6Interface


class Word(enum.Enum):
    """One of a few words; hashed by identity, as there is only one of each (Enum is slower)."""

    __hash__ = object.__hash__


class Family(Word):
    """An address family, by the name nftables gives it."""

    IP = "ip"
    IP6 = "ip6"

    @staticmethod
    def of(address: Address | InterfaceAddress) -> "Family":
        return Family.IP if address.version == 4 else Family.IP6


class Protocol(Word):
    """A transport protocol that has ports."""

    TCP = "tcp"
    UDP = "udp"
    SCTP = "sctp"


NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}  # in packets
FORWARDED = (Protocol.TCP, Protocol.UDP)  # to machines: KubeVirt knows no other


class Chain(Word):
    """A place on the packet's way where we hold rules, by the name of its chain in nftables.

    What a guest may send and what it may receive are two verdicts, and a flow between two guests
    needs both: so they are two chains, as an accept in one of them does not end the other.
    """

    RAW = "prerouting-raw"  # before conntrack and all translations
    PREROUTING = "prerouting"
    OUTPUT = "output"
    POSTROUTING = "postrouting"
    EGRESS = "forward-egress"
    FORWARD = "forward"  # ingress

    @property
    def hook(self) -> str:
        """The hook of netfilter that it is attached to."""
        return HOOKS.get(self, self.value)


HOOKS = {Chain.RAW: "prerouting", Chain.EGRESS: "forward"}  # of those that are not called by it
POLICED = frozenset({Chain.EGRESS, Chain.FORWARD})  # chains that hold verdicts of policies
FILTERS = POLICED | {Chain.RAW}  # chains that accept or drop, and translate nothing

PLACES = {chain: place for place, chain in enumerate(Chain)}  # in output


class Claim(Value):
    """Ports of one protocol that a machine wants forwarded."""

    protocol: Protocol
    ports: PortRange


class Guest(Value):
    """The guest's address in one family, and the gateway its network gives it."""

    address: Address
    gateway: Address | None = None  # None: the guest was placed outside the VM network


class Masquerade(Value, kw_only=True):
    """The interface of a machine that is ours to forward to."""

    name: str
    entry: str | None  # the link traffic enters on; None: to be found in the namespace
    guests: tuple[Guest, ...]
    claims: tuple[Claim, ...] | None  # None: nothing is declared, so everything is forwarded
    reserved: tuple[Claim, ...] = ()  # of the pod itself: never the guest's, whatever is declared
    proxied: bool = (
        False  # a proxy of Istio takes the TCP that enters, and opens its own to the guest
    )
    guarded: bool = False  # what is not declared stays shut, whoever else may come to forward it


class NotOurs(Value):
    """A valid interface that gets no rule from us, and why."""

    interface: str
    reason: str
    resource: str = ""  # of a device plugin, that connects it


class Peers(Value):
    """A set of addresses by its name, which stays what it is when they come and go."""

    family: Family
    key: str  # hexadecimal digits, or the node's

    def __str__(self) -> str:
        return f"peers-{self.family.value}-{self.key}"


Members = frozenset[Network]


class Grant(Value, kw_only=True):
    """What some policies allow a machine in one direction: flows with these peers, to these
    ports."""

    family: Family
    peers: Peers | None  # None: anybody
    protocol: Protocol | None  # None: any, also those without ports
    ports: PortRange | None  # None: any
    policies: str  # their names


class Fence(Value, kw_only=True):
    """That a machine is cut off from all but what is granted."""

    policies: str  # that say so
    grants: tuple[Grant, ...] = ()
    sets: tuple[tuple[Peers, Members], ...] = ()  # that the grants name


class Machine(Value, kw_only=True):
    """One VirtualMachine or VirtualMachineInstance."""

    kind: str
    namespace: str
    name: str
    netns: str
    masquerade: Masquerade | None
    not_ours: tuple[NotOurs, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()  # by which Services choose, sorted
    names: tuple[tuple[str, Protocol, int], ...] = ()  # of its ports
    addresses: tuple[Address, ...] = ()  # at which the node reaches it; none: to be found
    hears: Fence | None = None  # None: whatever anybody says
    says: Fence | None = None
    origin: str = ""  # file:line, for messages

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"

    @property
    def owner(self) -> str:
        """Who the machine's rules belong to."""
        return f"{self}/{self.masquerade.name}" if self.masquerade else str(self)


LINK_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
LONGEST_LINK_NAME = 15


def is_link_name(text: str) -> bool:
    """Whether it can name a link in a rule; nftables reads more into * @ and quotes."""
    return (
        0 < len(text) <= LONGEST_LINK_NAME
        and LINK_CHARACTERS.issuperset(text)
        and text not in (".", "..")
    )


def link_name(text: str) -> str:
    """The same text; raises ValueError for one that we would not have named a link by in a rule."""
    if not is_link_name(text):
        raise ValueError(text)
    return text


class Link(Value):
    """A network device in a namespace, with its addresses."""

    name: str
    addresses: tuple[InterfaceAddress, ...] = ()


class Surroundings(Value):
    """What a namespace has that forwarding depends on."""

    links: tuple[Link, ...]
    default_link: str | None = None  # where the default route leads
    kubevirt: frozenset[Family] = frozenset()  # in which KubeVirt's own chains are live


OWN: Mapping[Family, Address] = MappingProxyType(
    {Family.IP: IPv4Address(0), Family.IP6: IPv6Address(0)}
)  # as a destination: whichever of its own addresses, but for loopback


class Share(Value):
    """The part of all new flows that one of several endpoints gets. Every flow has a number below
    `of`, made from who sends it: from the address and port, so that all endpoints get as many, or
    where a client is to keep its endpoint, from the address alone."""

    of: int
    at: tuple[int, ...]  # the numbers that it gets, sorted
    client: bool = False

    def __post_init__(self) -> None:
        if not self.at or not 0 <= self.at[0] <= self.at[-1] < self.of:
            raise ValueError(f"{self.at} is no share of {self.of}")


class Detour(Value, kw_only=True):
    """Flows that we sent on, and whose answers would go another way if they saw the true sender.

    They came for one of the published addresses, and leave by the link of these that they came in
    on, or for one of these endpoints, that are on other nodes."""

    published: tuple[Address, ...]
    links: tuple[str, ...] = ()
    remote: tuple[Address, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.links) == bool(self.remote):
            raise ValueError("either by links or by endpoints")


class Lookup(Value):
    """Packets whose port one lookup can decide on; the ranges for them differ in ports and target.

    Where there are many, nftables holds them as elements of one map, else as a rule each.
    """

    chain: Chain
    family: Family
    protocol: Protocol
    interface: str | None = None
    destination: Address | None = None
    share: Share | None = None
    shifted: bool = False  # so that it takes another map, from port to port


class Rule(Value, kw_only=True):
    """One rule, whichever subsystem holds it.

    In prerouting and output it sends packets to `to`: each to the port it was for or, where the
    range is shifted, to the one as far behind `to_port` as it was behind the first of `ports`. In
    postrouting it gives them the source address `to`, or that of the link they leave on where `to`
    is None. In the other two, None is a guard: what no other rule of the chain sends on is the
    namespace's own, whatever chains of others would do with it. With a share it takes only that
    part of the flows; with a detour, none but those.

    In forward (for what a guest receives) and its twin for egress (for what it sends) it accepts
    new flows between its source or destination and its peers, or drops what no other rule of that
    chain accepts. One that accepts and names neither is for all that belongs to flows which were
    accepted before. In raw it drops what enters on a link for any of the addresses of `peer`.
    """

    chain: Chain
    family: Family
    owner: str
    protocol: Protocol | None = None
    ports: PortRange | None = None
    interface: str | None = None  # the link entered on; in postrouting, the link left on
    source: Address | None = None
    destination: Address | None = None  # or any of its own
    to: Address | None = None
    to_port: int | None = None
    share: Share | None = None
    detour: Detour | None = None
    peers: Peers | None = None  # who is at the other end; None: anybody
    accepts: bool = False
    # In place of a set, where the tables have none; in raw, the destinations.
    peer: Network | None = None

    # Thousands of rules are compared and sorted at each look: as plain numbers and texts, once
    # made, that is five times as fast as by the values of the fields.

    __slots__ = ("_key", "_lookup")
    if TYPE_CHECKING:
        _key: ClassVar[tuple[Any, ...]]
        _lookup: ClassVar[Lookup | None]

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Rule and self.key == other.key)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(self.key))
            return self._hash

    @property
    def key(self) -> "tuple[Any, ...]":
        """All that it is, and where it stands in output: by family, chain, link and port."""
        try:
            return self._key
        except AttributeError:
            object.__setattr__(self, "_key", self._made_key())
            return self._key

    def _made_key(self) -> "tuple[Any, ...]":
        ports, protocol = self.ports, self.protocol
        return (
            self.family._value_,
            PLACES[self.chain],
            self.interface or "",
            protocol._value_ if protocol else "",
            ports.first if ports else 0,
            ports.last if ports else 0,
            -1 if self.source is None else int(self.source),
            -1 if self.destination is None else int(self.destination),
            -1 if self.to is None else int(self.to),
            self.to_port or 0,
            self.owner,
            (share.of, share.client, share.at) if (share := self.share) else (),
            (way.published, way.links, way.remote) if (way := self.detour) else (),
            self.peers.key if self.peers else "",
            self.accepts,
            (int(peer.network_address), peer.prefixlen) if (peer := self.peer) else (),
        )

    @property
    def guards(self) -> bool:
        """Whether it only keeps packets from going anywhere; it comes after all that send them."""
        return self.to is None and self.chain is not Chain.POSTROUTING and not self.accepts

    @property
    def resumes(self) -> bool:
        """Whether it is for flows that were accepted before; it comes first, as most packets are
        of those."""
        return self.accepts and self.source is None and self.destination is None

    @property
    def lookup(self) -> "Lookup | None":
        """Where it could be an element."""
        try:
            return self._lookup
        except AttributeError:
            object.__setattr__(self, "_lookup", self._made_lookup())
            return self._lookup

    def _made_lookup(self) -> "Lookup | None":
        if (
            self.protocol is None
            or self.ports is None
            or self.to is None
            or self.source is not None
            or self.chain is Chain.POSTROUTING
        ):
            return None
        return _lookup(
            self.chain,
            self.family,
            self.protocol,
            self.interface,
            self.destination,
            self.share,
            self.to_port is not None,
        )

    @property
    def to_ports(self) -> PortRange | None:
        """The ports of the guest that a shifted range leads to."""
        if self.ports is None or self.to_port is None:
            return None
        return PortRange(self.to_port, self.to_port + len(self.ports) - 1)


@lru_cache(256)
def _lookup(*content: "Any") -> Lookup:
    """One object for the same packets: there are few, and each is asked for thousands of times."""
    return Lookup(*content)


class Sysctl(Value, order=True):
    """A kernel setting of a namespace, by its dotted name; a link's own dots are slashes."""

    name: str
    value: str


RULE, ELEMENT, MAP, SET, CHAIN = (
    "rule",
    "element",
    "map",
    "set",
    "chain",
)  # kinds of what is foreign


class Live(Value):
    """A rule as the kernel holds it."""

    rule: Rule
    handle: int  # 0: an element of a map, which has none
    packets: int = 0
    octets: int = 0


class Foreign(Value):
    """A rule in our table that is not of our making; or a set, a map, or an element of a map, which
    are known by their name instead of a handle."""

    chain: str
    handle: int
    text: str
    kind: str = RULE
    name: str = ""
    ports: tuple[int, int] = (0, 0)  # of an element, which may be for no port at all


class Observed(Value, kw_only=True):
    """What a namespace holds of ours."""

    live: tuple[Live, ...] = ()
    foreign: tuple[Foreign, ...] = ()
    chains: frozenset[Chain] = frozenset()
    table: bool = False
    unsound: str = ""  # why the table must be made anew, if it must
    leftovers: tuple[Live | Foreign, ...] = ()  # rules of ours that the other backend holds
    standing: frozenset[tuple[Family, Chain]] = frozenset()  # of iptables: our chains
    jumped: frozenset[tuple[Family, Chain]] = frozenset()  # of iptables: those that are jumped to
    behind: frozenset[tuple[Family, Chain]] = frozenset()  # of these: behind rules of others
    sysctls: Mapping[str, str] = MappingProxyType({})
    # Of nftables: the lookups that are there, with the handles of their rules; None: it has none.
    mapped: Mapping[Lookup, int] | None = None
    sets: Mapping[Peers, Members] = MappingProxyType({})


class Pending(Value):
    """A machine that cannot be served yet; what already runs for it stays. Or a port of a Service
    that is refused; partly: the rest of its range is published."""

    owner: str
    reason: str
    partly: bool = False


class Desired(Value, kw_only=True):
    """What a namespace should hold."""

    rules: frozenset[Rule] = frozenset()
    sets: Mapping[Peers, Members] = MappingProxyType({})  # that they name
    sysctls: frozenset[Sysctl] = frozenset()
    pending: tuple[Pending, ...] = ()
    kept: frozenset[Rule] = frozenset()  # not wanted now, but left where they are
    unclaimed_stay: bool = (
        False  # so do rules of owners who are not known, if nobody is in their way
    )
    filters_stay: bool = False  # and all in forward, where it is not known what is allowed
    refused: tuple[Pending, ...] = ()  # what would take what is somebody else's
    notes: tuple[str, ...] = ()  # what a person should know, and no rule says
    guests: frozenset[Address] = frozenset()  # that some rule is for, even if none names them
    orphaned: tuple[str, ...] = ()  # owners of rules that lead to what no valid manifest declares
