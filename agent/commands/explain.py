"""`portranger explain`: which rule takes a packet where, or why none does."""

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from agent.commands.common import BAD_MANIFEST, failed, on_the_node, reported
from agent.commands.show import held
from agent.console import Console
from agent.errors import Failure, Usage
from agent.kernel.kinds import Kernel
from agent.reconcile import by_namespace
from agent.sources.files import Snapshot, load
from rules.desired import desire
from rules.fences import fenced
from rules.foreign_filters import flows, warnings
from rules.model import NODE, OWN, Address, Desired, Family, Protocol
from rules.ports import HIGHEST, LOWEST, PortRange
from rules.trace import explained
from rules.values import replace
from rules.words import counted


def explain(  # noqa: PLR0913 - the options of the command
    what: str,
    console: Console,
    *,
    paths: Sequence[str] = (),
    kernel: Kernel | None = None,
    netns: str | None = None,
    source: str | None = None,
) -> int:
    protocol, port = protocol_and_port(what)
    sender = address_of(source) if source else None
    rules: dict[str, Desired] = {}
    failures: list[Failure] = []
    if kernel is not None:
        found, failures = held([netns] if netns else [], kernel)
        for name, one in found.items():
            if one.observed.leftovers:
                left = counted(len(one.observed.leftovers), "rule")
                console.say(f"namespace {name}: {left} left over in the other backend")
        rules = {
            name: Desired(rules=frozenset(x.rule for x in one.live), sets=one.observed.sets)
            for name, one in found.items()
        }
    else:
        snapshot = load(paths, console.stdin)
        if reported(snapshot, console):
            return BAD_MANIFEST
        rules = {name: made for name, made in _declared(snapshot) if netns in (None, name)}
        if snapshot.services and netns in (None, NODE):
            for note in on_the_node(snapshot, None).desired.notes:
                console.say(f"note in namespace {NODE}: {note}")
        for machine in snapshot.machines:
            for other in machine.not_ours:
                console.say(f"not ours: {machine}/{other.interface}: {other.reason}")
    for name in rules:
        console.say(f"namespace {name}")
        lines = [*_devices(name, kernel)]
        known = sorted(rules[name].rules, key=lambda rule: rule.key)
        lines += explained(known, protocol, port, sender, rules[name].sets)
        lines += [f"note: {one}" for one in _filtered(name, rules[name], protocol, port, kernel)]
        lines += [f"note: {one}" for one in _used(name, protocol, port, kernel)]
        for line in lines:
            console.say(f"  {line}")
    if not rules and not failures:
        where = f" in namespace {netns}" if netns else ""
        console.say(f"Nothing of ours is {'live' if kernel else 'declared'}{where}.")
    return failed(console, failures)


def _declared(snapshot: Snapshot) -> Iterator[tuple[str, Desired]]:
    # Which addresses the node has is not known here, but that it is exempt.
    laws = replace(snapshot.laws, node=frozenset())
    machines = fenced(snapshot.machines, laws, {})
    for name, group in by_namespace(machines).items():
        yield name, desire(group, None)
    if snapshot.services:
        yield NODE, on_the_node(snapshot, None).desired


def _devices(netns: str, kernel: Kernel | None) -> Iterator[str]:
    for resource, link in (kernel.resources(netns) if kernel else {}).items():
        yield f"not ours: {resource} is the device {link}"


def _filtered(
    netns: str, made: Desired, protocol: Protocol, port: int, kernel: Kernel | None
) -> Iterator[str]:
    """Filters of others that may drop what is sent on of that port."""
    if kernel is not None:
        asked = [
            replace(
                rule,
                protocol=protocol,
                ports=PortRange(port, port),
                to_port=rule.to_ports and rule.to_ports.first + port - rule.ports.first,
            )
            for rule in made.rules
            if rule.ports is not None and port in rule.ports and rule.protocol is protocol
        ]
        asked += [rule for rule in made.rules if rule.ports is None]
        with kernel.opened(netns) as namespace:
            yield from warnings(namespace.filters(), flows(asked, namespace.surroundings()))


def _used(netns: str, protocol: Protocol, port: int, kernel: Kernel | None) -> Iterator[str]:
    """Who else has the port, where Services are published."""
    if kernel is None or netns != NODE:
        return
    with kernel.opened(netns) as namespace:
        occupied = namespace.node([], others=True).occupied
    ports = PortRange(port, port)
    found = [str(x) for f in Family for x in occupied.meeting(protocol, f, ports, OWN[f])]
    yield from dict.fromkeys(found)


def protocol_and_port(what: str) -> tuple[Protocol, int]:
    protocol, _, port = what.lower().partition("/")
    known = protocol in {one.value for one in Protocol}
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not known or not LOWEST <= number <= HIGHEST:
        raise Usage(f"{what!r} is not a protocol and port", "Write, say, tcp/8080 or udp/53")
    return Protocol(protocol), number


def address_of(text: str) -> Address:
    try:
        return ip_address(text)
    except ValueError as error:
        raise Usage(f"{text!r} is not an address", "Write, say, 192.0.2.7 or ::1") from error
