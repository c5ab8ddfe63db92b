"""portranger: in process, as a command, and as the daemon."""

import functools
from contextlib import contextmanager
from ipaddress import ip_address

from agent.kernel.live import LiveKernel
from agent.reconcile import converge
from bench.peers.peer import Doing, Peer, Step, Work
from bench.peers.place import (
    FIRST,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    LAST,
    Place,
    reached,
    refused,
    resident,
)
from bench.process import PORTRANGER, configure, manifest, running, save, until
from rules.desired import desire
from rules.model import (
    FORWARDED,
    Chain,
    Claim,
    Desired,
    Family,
    Guest,
    Machine,
    Masquerade,
    Protocol,
    Rule,
)
from rules.ports import PortRange
from rules.values import replace

BEFORE = (f"{FIRST}-{LAST}/tcp", f"{FIRST}-{LAST}/udp")
AFTER = (f"{FIRST}-{LAST + 1}/tcp", f"{FIRST}-{LAST}/udp")


def _machine(last: int) -> Machine:
    guest = Guest(ip_address(GUEST_ADDRESS), ip_address(GATEWAY_ADDRESS))
    claims = (
        Claim(Protocol.TCP, PortRange(FIRST, last)),
        Claim(Protocol.UDP, PortRange(FIRST, LAST)),
    )
    masquerade = Masquerade(name="red", entry=None, guests=(guest,), claims=claims)
    return Machine(
        kind="VirtualMachine", namespace="default", name="peer", netns="", masquerade=masquerade
    )


def _shifted(plain: Desired) -> Desired:
    """What a Service makes of a range whose target is elsewhere."""
    rules = [
        Rule(
            chain=Chain.PREROUTING,
            family=Family.IP,
            owner="Service/default/peer/shifted",
            protocol=protocol,
            ports=PortRange(9000, 9009),
            interface="eth0",
            to=ip_address(GUEST_ADDRESS),
            to_port=7000,
        )
        for protocol in FORWARDED
    ]
    return replace(plain, rules=frozenset(rules))


@contextmanager
def in_process(place: Place) -> Work:
    """From "desired state is known" to effective, looked at before and after."""
    with LiveKernel().opened(place.lab.pod) as namespace:
        links = namespace.surroundings()
        nothing = desire([], links)
        before, after = (desire([_machine(last)], links) for last in (LAST, LAST + 1))

        def towards(desired: Desired) -> Step:
            return lambda: converge(place.lab.pod, desired, namespace)

        yield Doing(
            set_up=towards(before),
            change=towards(after),
            remove=towards(nothing),
            shift=towards(_shifted(before)),
            unshift=towards(nothing),
        )


@contextmanager
def as_a_command(place: Place) -> Work:
    """`apply` and `clear`, each with the start of Python and the reading of the manifest."""
    pod = place.lab.pod
    for name, ranges in (("before", BEFORE), ("after", AFTER)):
        (place.folder / f"{name}.yaml").write_text(manifest("peer", pod, ranges))

    def apply(name: str) -> Step:
        file = str(place.folder / f"{name}.yaml")
        return functools.partial(place.run, PORTRANGER, "apply", "--yes", "-f", file)

    yield Doing(
        set_up=apply("before"),
        change=apply("after"),
        remove=functools.partial(place.run, PORTRANGER, "clear", "--yes", "--netns", pod),
    )


@contextmanager
def as_the_daemon(place: Place) -> Work:
    """From the saving of a manifest until a client gets through, or no more."""
    file = configure(place.folder) / "peer.yaml"
    lab = place.lab

    def set_up() -> None:
        save(file, manifest("peer", lab.pod, BEFORE))
        until(lambda: reached(lab, Protocol.TCP, LAST) == LAST)

    def change() -> None:
        save(file, manifest("peer", lab.pod, AFTER))
        until(lambda: reached(lab, Protocol.TCP, LAST + 1) == LAST + 1)

    def remove() -> None:
        file.unlink()
        until(lambda: refused(lab, LAST))

    with running(place.folder) as daemon:
        daemon.says("READY=1")
        yield Doing(
            set_up=set_up, change=change, remove=remove, memory=lambda: resident(daemon.pid)
        )


PEERS = (
    Peer(name="portranger, in process", needs=(), at_work=in_process, how="agent.reconcile"),
    Peer(
        name="portranger apply / clear",
        needs=(),
        at_work=as_a_command,
        how="a process each, and everything it starts with",
    ),
    Peer(
        name="portranger run",
        needs=(),
        at_work=as_the_daemon,
        how="the daemon, from a manifest saved until a client gets through",
    ),
)
