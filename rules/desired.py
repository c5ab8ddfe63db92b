"""From machines and the namespace they live in to the rules that should be there.

Touching and overlapping ranges of one machine are joined here and every other overlap is a
conflict, so no two rules of a chain match one packet: their order cannot matter.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address

from rules.model import (
    Address,
    Chain,
    Claim,
    Desired,
    Family,
    Guest,
    Machine,
    Masquerade,
    Pending,
    Protocol,
    Rule,
    Surroundings,
    Sysctl,
    is_link_name,
)
from rules.ports import ALL_PORTS, PortRange, coalesce
from rules.problems import Problem
from rules.values import Value

# IPv4 only: Linux has no way back to ::1 for a packet that comes in on a link (decisions.md).
LOOPBACK = IPv4Address("127.0.0.1")
POD_LINK = "eth0"
LABEL_BYTES = 128  # NFTNL_UDATA_COMMENT_MAXLEN: a rule's comment holds no more


Ports = tuple[Protocol | None, int, int]
Made = dict[tuple[object, ...], dict[Ports, tuple[Rule, ...]]]


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
    for machine in machines:
        masquerade = machine.masquerade
        if masquerade is None:
            continue
        owner = label(machine.owner)
        entry = _entry(masquerade, surroundings)
        families = _families(entry, surroundings)
        if entry is None or not families:
            pending.append(Pending(owner, _why_pending(masquerade, entry)))
            continue
        if masquerade.claims is None:
            notes.append(f"{owner}: neither ports nor ranges are declared, so all are forwarded")
        for guest in masquerade.guests:
            link, gateway = _guest_side(guest, entry, surroundings)
            place = (owner, guest.address, entry, link, gateway)
            known, now[place] = before.get(place, {}), {}
            wanted = _rules(owner, masquerade, guest, entry, link, gateway, known, now[place])
            if Family.of(guest.address) not in families:
                kept.update(wanted)  # an address that comes and goes must not cut connections
            else:
                rules.update(wanted)
                there = surroundings is None or any(x.name == link for x in surroundings.links)
                lets_in = there and gateway is not None
                sysctls.update(_sysctls(Family.of(guest.address), link if lets_in else None))
                if not there:
                    notes.append(f"{owner}: no link leads to the guest {guest.address} yet")
    if made is not None:
        made.clear()
        made.update(now)
    return Desired(
        rules=frozenset(rules),
        sysctls=frozenset(sysctls),
        pending=tuple(sorted(pending, key=str)),
        kept=frozenset(kept),
        notes=tuple(sorted(notes)),
    )


def label(owner: str) -> str:
    """The owner as a rule's comment holds it: cut, and closed with a hash, where it is too long."""
    if len(owner.encode()) <= LABEL_BYTES:
        return owner
    from hashlib import sha256  # only the rare long name pays for loading it

    digest = sha256(owner.encode()).hexdigest()[:16]
    kept = owner.encode()[: LABEL_BYTES - len(digest) - 1].decode(errors="ignore")
    return f"{kept}~{digest}"


def conflicts(machines: Iterable[Machine]) -> tuple[Problem, ...]:
    """Every pair of machines of one namespace that claim the same port; neither is guessed."""
    return tuple(clash.problem() for clash in clashes(machines))


class Clash(Value):
    """Two machines of one namespace, and the ports of a protocol that both claim."""

    protocol: Protocol
    ports: PortRange
    one: Machine
    other: Machine

    def problem(self, at: Machine | None = None) -> Problem:
        """What is wrong, told at one of the two."""
        here = at or self.other
        there = self.one if here is self.other else self.other
        file, colon, line = here.origin.rpartition(":")
        return Problem(
            code="conflict",
            path=(),
            what=(
                f"in namespace {here.netns}, {self.protocol.value}"
                f" {_claimed(here, self)} of {here.owner}"
                f" meets {self.protocol.value} {_claimed(there, self)} of {there.owner}"
                + (f" ({there.origin})" if there.origin else "")
            ),
            fix="Give each port to one machine, or each machine a namespace of its own.",
            file=file,
            line=int(line) if colon and line.isdecimal() else 0,
        )


def _claimed(machine: Machine, clash: Clash) -> PortRange:
    """The range of a machine that the clash is about."""
    return next(ports for ports in claimed(machine, clash.protocol) if ports.overlaps(clash.ports))


def claimed(machine: Machine, protocol: Protocol) -> list[PortRange]:
    """The ports of that protocol that a machine claims."""
    if machine.masquerade is None:
        return []
    return [one.ports for one in _claims(machine.masquerade) if one.protocol is protocol]


def clashes(machines: Iterable[Machine]) -> list[Clash]:
    """Every two machines of one namespace that claim the same ports."""
    found: list[Clash] = []
    ours = [machine for machine in machines if machine.masquerade is not None]
    crowds = Counter(machine.netns for machine in ours)
    spans = sorted(
        (
            (machine.netns, protocol.value, ports, machine)
            for machine in ours
            if crowds[machine.netns] > 1
            for protocol in Protocol
            for ports in claimed(machine, protocol)
        ),
        key=lambda span: (span[0], span[1], span[2], span[3].owner, span[3].origin),
    )
    open_spans: list[tuple[str, str, PortRange, Machine]] = []
    for span in spans:
        netns, protocol, ports, machine = span
        open_spans = [
            earlier
            for earlier in open_spans
            if earlier[:2] == (netns, protocol) and earlier[2].last >= ports.first
        ]
        found.extend(
            Clash(
                Protocol(protocol),
                PortRange(ports.first, min(ports.last, earlier[2].last)),
                earlier[3],
                machine,
            )
            for earlier in open_spans
            if earlier[3] is not machine
        )
        open_spans.append(span)
    return found


def _claims(masquerade: Masquerade) -> tuple[Claim, ...]:
    """The fewest claims that hold exactly the declared ports, or all there are."""
    if masquerade.claims is None:
        return tuple(Claim(protocol, ALL_PORTS) for protocol in Protocol)
    return tuple(
        Claim(protocol, ports)
        for protocol in Protocol
        for ports in coalesce(c.ports for c in masquerade.claims if c.protocol is protocol)
    )


def _entry(masquerade: Masquerade, surroundings: Surroundings | None) -> str | None:
    if surroundings is None:
        return masquerade.entry or POD_LINK
    names = {link.name for link in surroundings.links if is_link_name(link.name)}
    if masquerade.entry is not None:
        return masquerade.entry if masquerade.entry in names else None
    if POD_LINK in names:
        return POD_LINK
    return surroundings.default_link if surroundings.default_link in names else None


def _families(entry: str | None, surroundings: Surroundings | None) -> set[Family]:
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


def _why_pending(masquerade: Masquerade, entry: str | None) -> str:
    if entry is not None:
        return f"{entry} has no global address yet"
    if masquerade.entry is not None:
        return f"there is no link {masquerade.entry} yet"
    return f"there is neither a link {POD_LINK} nor a default route yet"


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


def _rules(  # noqa: PLR0913, PLR0917 - one argument for each thing a rule is made of
    owner: str,
    masquerade: Masquerade,
    guest: Guest,
    entry: str,
    link: str,
    gateway: Address | None,
    known: dict[Ports, tuple[Rule, ...]],
    now: dict[Ports, tuple[Rule, ...]],
) -> Iterator[Rule]:
    family = Family.of(guest.address)
    from_inside = family is Family.IP and gateway is not None
    matches: list[tuple[Protocol | None, PortRange | None]] = [(None, None)]
    if masquerade.claims is not None:
        matches = [(claim.protocol, claim.ports) for claim in _claims(masquerade)]
    for protocol, ports in matches:
        key = protocol, ports.first if ports else 0, ports.last if ports else 0
        now[key] = known.get(key) or (
            _entering(owner, guest.address, entry, protocol, ports),
            *([_inside(owner, guest.address, protocol, ports)] if from_inside else ()),
        )
        yield from now[key]
    yield Rule(chain=Chain.POSTROUTING, family=family, owner=owner, source=guest.address)
    if from_inside:
        yield Rule(
            chain=Chain.POSTROUTING,
            family=family,
            owner=owner,
            interface=link,
            source=LOOPBACK,
            destination=guest.address,  # of two guests behind one link, each has its gateway
            to=gateway,
        )


def _entering(
    owner: str, guest: Address, entry: str, protocol: Protocol | None, ports: PortRange | None
) -> Rule:
    return Rule(  # type: ignore[call-arg]  # in the order of its fields, as thousands are made
        Chain.PREROUTING,
        Family.of(guest),
        owner,
        protocol,
        ports,
        entry,
        None,
        None,
        guest,
        None,
    )


def _inside(owner: str, guest: Address, protocol: Protocol | None, ports: PortRange | None) -> Rule:
    return Rule(  # type: ignore[call-arg]  # in the order of its fields, as thousands are made
        Chain.OUTPUT,
        Family.of(guest),
        owner,
        protocol,
        ports,
        None,
        None,
        LOOPBACK,
        guest,
        None,
    )


def _sysctls(family: Family, link: str | None) -> Iterator[Sysctl]:
    if family is Family.IP6:
        yield Sysctl("net.ipv6.conf.all.forwarding", "1")
        return
    yield Sysctl("net.ipv4.ip_forward", "1")
    if link is not None:
        yield Sysctl(f"net.ipv4.conf.{link.replace('.', '/')}.route_localnet", "1")
