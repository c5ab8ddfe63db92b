"""Values that many tests begin with, written as briefly as they are read."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_interface

from rules.model import (
    Chain,
    Claim,
    Family,
    Guest,
    Link,
    Live,
    Machine,
    Masquerade,
    Protocol,
    Rule,
    Surroundings,
)
from rules.nft import Json, commands
from rules.nft_script import script
from rules.nft_steps import Step
from rules.nft_transactions import transactions
from rules.plan import Plan
from rules.ports import PortRange
from rules.problems import Problem
from rules.trace import Packet, traced

OWNER = "VirtualMachine/default/vm/default"
DESKTOP = "VirtualMachine/default/desktop/red"
PROBLEM = Problem(
    code="port-out-of-range",
    path=("spec", "end"),
    what="is not a port number",
    fix="Write a number from 1 to 65535.",
    value=70000,
    file="/etc/m/laptop.yaml",
    line=16,
)
GUESTS = (
    Guest(ip_address("10.0.2.2"), ip_address("10.0.2.1")),
    Guest(ip_address("fd10:0:2::2"), ip_address("fd10:0:2::1")),
)


def ports(text: str) -> PortRange:
    """22 or 1000-8000."""
    first, _, last = text.partition("-")
    return PortRange(int(first), int(last or first))


def claim(text: str) -> Claim:
    """tcp 22 or udp 1000-8000."""
    protocol, _, numbers = text.partition(" ")
    return Claim(Protocol(protocol), ports(numbers))


def machine(
    *claims: str,
    name: str = "vm",
    netns: str = "blue",
    entry: str | None = None,
    guests: tuple[Guest, ...] = GUESTS,
    origin: str = "",
) -> Machine:
    """A machine that claims these ports; without any, it claims everything."""
    masquerade = Masquerade(
        name="default",
        entry=entry,
        guests=guests,
        claims=tuple(map(claim, claims)) if claims else None,
    )
    return Machine(
        kind="VirtualMachine",
        namespace="default",
        name=name,
        netns=netns,
        masquerade=masquerade,
        origin=origin,
    )


def link(name: str, *addresses: str) -> Link:
    return Link(name, tuple(map(ip_interface, addresses)))


def space(*links: Link, default: str | None = None) -> Surroundings:
    return Surroundings(links, default)


LO = link("lo", "127.0.0.1/8", "::1/128")
ETH0 = link("eth0", "10.244.1.7/24", "fd00:10:244::7/64", "fe80::7/64")
BRIDGE = link("k6t-eth0", "10.0.2.1/24", "fd10:0:2::1/120")
POD = space(LO, ETH0, BRIDGE, default="eth0")


def forward(  # noqa: PLR0913 - every option has a default
    text: str | None = "tcp 22",
    *,
    chain: Chain = Chain.PREROUTING,
    on: str | None = "eth0",
    source: str | None = None,
    destination: str | None = None,
    to: str | None = "10.0.2.2",
    owner: str = OWNER,
) -> Rule:
    """A rule for what `text` says, or for everything; its family is that of its addresses."""
    what = claim(text) if text else None
    addresses = [ip_address(one) for one in (source, destination, to) if one]
    return Rule(
        chain=chain,
        family=Family.of(addresses[0]),
        owner=owner,
        protocol=what.protocol if what else None,
        ports=what.ports if what else None,
        interface=on,
        source=ip_address(source) if source else None,
        destination=ip_address(destination) if destination else None,
        to=ip_address(to) if to else None,
    )


def forwards(*texts: str, owner: str = DESKTOP) -> tuple[Live, ...]:
    """What is live for these in both families."""
    guests = [str(guest.address) for guest in GUESTS]
    rules = [forward(text, to=to, owner=owner) for to in guests for text in texts]
    return tuple(Live(rule, handle) for handle, rule in enumerate(rules))


def from_inside(text: str | None = "tcp 22", *, to: str = "10.0.2.2", owner: str = OWNER) -> Rule:
    """The way of a packet from inside the namespace to the guest."""
    loopback = "::1" if ":" in to else "127.0.0.1"
    return forward(text, chain=Chain.OUTPUT, on=None, destination=loopback, to=to, owner=owner)


def egress(guest: str = "10.0.2.2", *, owner: str = OWNER) -> Rule:
    """What gives the guest's own traffic the namespace's address."""
    return forward(None, chain=Chain.POSTROUTING, on=None, source=guest, to=None, owner=owner)


def answerable(
    guest: str = "10.0.2.2", *, via: str = "k6t-eth0", gateway: str = "10.0.2.1", owner: str = OWNER
) -> Rule:
    """What gives a packet from inside an address that the guest can answer to."""
    loopback = "::1" if ":" in guest else "127.0.0.1"
    return forward(
        None,
        chain=Chain.POSTROUTING,
        on=via,
        source=loopback,
        destination=guest,
        to=gateway,
        owner=owner,
    )


def trace(rules: Iterable[Rule], chain: Chain, packet: Packet) -> Rule | None:
    """The rule of that chain that takes the packet."""
    return next(iter(traced(rules, chain, packet)), None)


def encode(plan: Plan) -> list[Json]:
    """A plan as the commands of all its transactions; empty where the rules need nothing done."""
    return commands(steps(plan))


def steps(plan: Plan) -> list[Step]:
    """Those of all its transactions."""
    return [step for found in transactions(plan) for step in found]


def script_lines(plan: Plan) -> list[str]:
    """The lines of its script, without what is said about them."""
    return [line for line in script(plan).splitlines() if not line.startswith("#")]
