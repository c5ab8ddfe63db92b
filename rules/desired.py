"""From machines and the namespace they live in to the rules that should be there.

Touching and overlapping ranges of one machine are joined here and every other overlap is a
conflict (rules/conflicts.py), so no two rules of a chain match one packet, but for the guard behind
all others: their order cannot matter.
"""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address

from rules.model import (
    FORWARDED,
    Address,
    Chain,
    Claim,
    Desired,
    Family,
    Machine,
    Masquerade,
    Members,
    Peers,
    Pending,
    Protocol,
    Rule,
    Surroundings,
    Sysctl,
    is_link_name,
)
from rules.places import (
    LOOPBACK,
    LOOPBACK_NETWORK,
    POD_LINK,
    Place,
    entry_families,
    entry_link,
    place_of,
    route_localnet,
    why_pending,
)
from rules.ports import ALL_PORTS, PortRange, coalesce, subtract
from rules.values import replace

PROXY = IPv4Address("127.0.0.6")  # where Istio's proxy connects from, on behalf of those outside
UNPROXIED = PortRange(22, 22)  # TCP that Istio leaves alone, as KubeVirt tells it to
# Else what a guest says in a connection that was cut would begin it anew, the other way round: the
# source NAT gives it the very port that was closed.
STRICT = Sysctl("net.netfilter.nf_conntrack_tcp_loose", "0")
LABEL_BYTES = 128  # NFTNL_UDATA_COMMENT_MAXLEN: a rule's comment holds no more


Ports = tuple[Protocol | None, int, int]
Made = dict[object, dict[Ports, tuple[Rule, ...]]]


def desire(
    machines: Iterable[Machine], surroundings: Surroundings | None, made: Made | None = None
) -> Desired:
    """What a namespace with these machines should hold.

    Without surroundings there is no namespace to ask: both families are planned for a namespace
    as KubeVirt sets it up. The rules that were made the last time are the very same objects the
    next time, which makes thousands of them quick to make and to compare.
    """
    before, now = made or {}, Made()
    rules: set[Rule] = set()
    sysctls: set[Sysctl] = set()
    pending: list[Pending] = []
    kept: set[Rule] = set()
    notes: list[str] = []
    sets: dict[Peers, Members] = {}
    guests: set[Address] = set()
    behind: dict[str, dict[str, bool]] = {}  # each link, who must not say what he likes
    for machine in machines:
        masquerade = machine.masquerade
        if masquerade is None:
            continue
        owner = label(machine.owner)
        for guest in masquerade.guests:
            rules.update(_fences(machine, owner, guest.address))
        if machine.hears or machine.says:
            sysctls.add(STRICT)
        sets.update(pair for one in (machine.hears, machine.says) if one for pair in one.sets)
        notes += [
            f"{owner}: it {word} only what {fence.policies} allow"
            for word, fence in (("hears", machine.hears), ("says", machine.says))
            if fence is not None
        ]
        entry = entry_link(masquerade, surroundings)
        families = entry_families(entry, surroundings)
        if entry is None or not families:
            pending.append(Pending(owner, why_pending(masquerade, entry)))
            for guest in masquerade.guests:  # it keeps its rules, so what guards them stays, too
                near = masquerade.entry or entry or POD_LINK
                place = place_of(owner, guest, near, masquerade, surroundings)
                behind.setdefault(place.link, {})[owner] = machine.says is not None
            continue
        notes += [f"{owner}: {note}" for note in _notes(masquerade, surroundings)]
        for guest in masquerade.guests:
            place = place_of(owner, guest, entry, masquerade, surroundings)
            behind.setdefault(place.link, {})[owner] = machine.says is not None
            known, now[place] = before.get(place, {}), {}
            wanted = list(_rules(masquerade, place, known, now[place]))
            if place.family not in families:
                kept.update(wanted)  # an address that comes and goes must not cut connections
                continue
            rules.update(wanted)
            sysctls.update([STRICT] if wanted else ())
            guests.update([place.guest] if wanted else ())
            there = surroundings is None or any(x.name == place.link for x in surroundings.links)
            if not place.shared:
                lets_in = there and place.gateway is not None
                sysctls.update(_sysctls(place.family, place.link if lets_in else None))
            if not there:
                notes.append(f"{owner}: no link leads to the guest {guest.address} yet")
    rules.update(rule for link, whose in behind.items() for rule in _bars(link, whose))
    if made is not None:
        made.clear()
        made.update(now)
    return Desired(
        rules=frozenset(rules),
        sets=_named(sets, rules),
        sysctls=frozenset(sysctls),
        pending=tuple(sorted(pending, key=str)),
        kept=frozenset(kept),
        notes=tuple(sorted(notes)),
        guests=frozenset(guests),
    )


def _fences(machine: Machine, owner: str, guest: Address) -> Iterator[Rule]:
    """What is granted to a guest, and that all else is not; flows that were let pass go on."""
    family = Family.of(guest)
    for fence, chain, end in (
        (machine.hears, Chain.FORWARD, "destination"),
        (machine.says, Chain.EGRESS, "source"),
    ):
        if fence is None:
            continue
        yield Rule(chain=chain, family=family, owner=owner, accepts=True)
        guard = Rule(chain=chain, family=family, owner=owner)
        yield replace(guard, **{end: guest})
        for grant in fence.grants:
            if grant.family is family:
                ports = grant.ports or (ALL_PORTS if grant.protocol else None)
                yield replace(
                    guard,
                    **{end: guest},
                    owner=grant.policies,
                    protocol=grant.protocol,
                    ports=ports,
                    peers=grant.peers,
                    accepts=True,
                )


def _bars(link: str, whose: Mapping[str, bool]) -> Iterator[Rule]:
    """What a guest says under another address than its own is not accepted either: a guest can give
    itself any. Not where one is behind the same link who may say what he likes."""
    if all(whose.values()) and is_link_name(link):
        owner = label(",".join(sorted(whose)))
        for family in Family:
            yield Rule(chain=Chain.EGRESS, family=family, owner=owner, interface=link)


def _named(sets: Mapping[Peers, Members], rules: Iterable[Rule]) -> Mapping[Peers, Members]:
    """Those sets that some rule names."""
    names = {rule.peers for rule in rules if rule.peers is not None} if sets else set()
    return {peers: members for peers, members in sets.items() if peers in names}


def label(owner: str) -> str:
    """The owner as a rule's comment holds it: cut, and closed with a hash, where it is too long."""
    if len(owner.encode()) <= LABEL_BYTES:
        return owner
    from hashlib import sha256  # only the rare long name pays for loading it

    digest = sha256(owner.encode()).hexdigest()[:16]
    kept = owner.encode()[: LABEL_BYTES - len(digest) - 1].decode(errors="ignore")
    return f"{kept}~{digest}"


def claimed(machine: Machine, protocol: Protocol) -> list[PortRange]:
    """The ports of that protocol that a machine claims."""
    if machine.masquerade is None:
        return []
    return [one.ports for one in _claims(machine.masquerade) if one.protocol is protocol]


def _claims(masquerade: Masquerade) -> tuple[Claim, ...]:
    """The fewest claims that hold exactly the declared ports, or all there are, but for those that
    are the pod's own."""
    claims = masquerade.claims
    if claims is None:
        claims = tuple(Claim(protocol, ALL_PORTS) for protocol in FORWARDED)
    return tuple(
        Claim(protocol, ports)
        for protocol in FORWARDED
        for ports in subtract(
            coalesce(c.ports for c in claims if c.protocol is protocol),
            [c.ports for c in masquerade.reserved if c.protocol is protocol],
        )
    )


def _notes(masquerade: Masquerade, surroundings: Surroundings | None) -> Iterator[str]:
    shared = bool(surroundings and surroundings.kubevirt)
    if masquerade.claims is None and shared:
        yield "neither ports nor ranges are declared, so KubeVirt forwards all of them"
    elif masquerade.claims is None:
        yield "neither ports nor ranges are declared, so all are forwarded"
    elif shared:
        yield "KubeVirt's own chains are live here: ours come first, and keep other ports shut"
    if masquerade.reserved and masquerade.claims != ():
        ports = ", ".join(f"{one.protocol.value} {one.ports}" for one in masquerade.reserved)
        yield f"{ports} are the pod's own, and not forwarded"
    if masquerade.proxied:
        yield "TCP comes through the proxy of Istio"


def _rules(
    masquerade: Masquerade,
    place: Place,
    known: dict[Ports, tuple[Rule, ...]],
    now: dict[Ports, tuple[Rule, ...]],
) -> Iterator[Rule]:
    """What should stand there for one guest."""
    everything = masquerade.claims is None
    if everything and place.shared:
        return  # KubeVirt does just that
    matches: list[tuple[Protocol | None, PortRange | None]] = [(None, None)]
    if not everything or masquerade.reserved or masquerade.proxied:
        matches = [(claim.protocol, claim.ports) for claim in _claims(masquerade)]
    family, owner = place.family, place.owner
    for protocol, ports in matches:
        key = protocol, ports.first if ports else 0, ports.last if ports else 0
        now[key] = known.get(key) or tuple(_forwards(place, protocol, ports))
        yield from now[key]
    if place.shared or (masquerade.guarded and not everything):
        yield from _guards(place)
    if not place.shared:
        yield Rule(chain=Chain.POSTROUTING, family=family, owner=owner, source=place.guest)
    if place.inside:
        # What leads from 127.0.0.1 to the guest takes route_localnet on its link, which would lead
        # whoever is behind that link to services that listen on loopback only.
        yield Rule(
            chain=Chain.RAW,
            family=family,
            owner=owner,
            interface=place.link,
            peer=LOOPBACK_NETWORK,
        )
    for source in (LOOPBACK, PROXY) if place.proxied else (LOOPBACK,):
        if place.inside:
            yield Rule(
                chain=Chain.POSTROUTING,
                family=family,
                owner=owner,
                interface=place.link,
                source=source,
                destination=place.guest,  # of two guests behind one link, each has its gateway
                to=place.gateway,
            )


def _forwards(place: Place, protocol: Protocol | None, ports: PortRange | None) -> Iterator[Rule]:
    """What leads one range to the guest: from outside, unless a proxy takes it first, and from
    inside."""
    entering = ports
    if place.proxied and protocol is Protocol.TCP:
        entering = UNPROXIED
    if entering is ports or (ports is not None and UNPROXIED.first in ports):
        yield Rule(  # type: ignore[call-arg]  # in the order of its fields, as thousands are made
            Chain.PREROUTING,
            place.family,
            place.owner,
            protocol,
            entering,
            place.entry,
            None,
            None,
            place.guest,
            None,
            None,
            None,
            None,
            False,
            None,
        )
    for address in place.inside:
        yield Rule(  # type: ignore[call-arg]  # in the order of its fields, as thousands are made
            Chain.OUTPUT,
            place.family,
            place.owner,
            protocol,
            ports,
            None,
            None,
            address,
            place.guest,
            None,
            None,
            None,
            None,
            False,
            None,
        )


def _guards(place: Place) -> Iterator[Rule]:
    """What keeps from KubeVirt's rules, which may forward everything, what is not declared."""
    guard = Rule(
        chain=Chain.PREROUTING, family=place.family, owner=place.owner, interface=place.entry
    )
    if not place.proxied:
        yield guard
    else:  # the rest of TCP is for the proxy to take
        yield replace(guard, protocol=Protocol.TCP, ports=UNPROXIED)
        yield replace(guard, protocol=Protocol.UDP, ports=ALL_PORTS)
    for address in place.inside:
        yield replace(guard, chain=Chain.OUTPUT, interface=None, destination=address)


def _sysctls(family: Family, link: str | None) -> Iterator[Sysctl]:
    if family is Family.IP6:
        yield Sysctl("net.ipv6.conf.all.forwarding", "1")
        return
    yield Sysctl("net.ipv4.ip_forward", "1")
    if link is not None:
        yield Sysctl(route_localnet(link), "1")
