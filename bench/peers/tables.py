"""nft and iptables by hand: a rule per range, a rule per port; and KubeVirt's one nft process per
object."""

import functools
from collections.abc import Iterable, Sequence
from contextlib import contextmanager

from bench.peers.peer import Doing, Peer, Sample, Step, Work
from bench.peers.place import FIRST, GATEWAY_ADDRESS, GUEST_ADDRESS, LAST, Place

PROTOCOLS = ("tcp", "udp")
SAMPLE = 50  # ports of each protocol, where all would take minutes
CHAIN = "add table ip peer; add chain ip peer pre { type nat hook prerouting priority -100; };\n"
RANGE, PORT = f"{FIRST}-{LAST}", range(FIRST, LAST + 1)


def _nft(place: Place, script: str) -> Step:
    return functools.partial(place.run, "nft", "-f", "-", stdin=script)


def _dnat(protocol: str, ports: object, to: str = GUEST_ADDRESS) -> str:
    return f'add rule ip peer pre iifname "eth0" {protocol} dport {ports} dnat to {to}\n'


def _nft_shifted() -> str:
    """As everyone writes it first."""
    target = f"{GUEST_ADDRESS}:7000-7009"
    return CHAIN + "".join(_dnat(one, "9000-9009", target) for one in PROTOCOLS)


@contextmanager
def nft_range(place: Place) -> Work:
    longer = f"flush chain ip peer pre\n{_dnat('tcp', f'{FIRST}-{LAST + 1}')}{_dnat('udp', RANGE)}"
    delete = _nft(place, "delete table ip peer")
    yield Doing(
        set_up=_nft(place, CHAIN + "".join(_dnat(one, RANGE) for one in PROTOCOLS)),
        change=_nft(place, longer),
        remove=delete,
        shift=_nft(place, _nft_shifted()),
        unshift=delete,
    )


@contextmanager
def nft_ports(place: Place) -> Work:
    yield Doing(
        set_up=_nft(place, CHAIN + "".join(_dnat(one, p) for one in PROTOCOLS for p in PORT)),
        change=_nft(place, _dnat("tcp", LAST + 1)),
        remove=_nft(place, "delete table ip peer"),
    )


def _restore(place: Place, variant: str, lines: Iterable[str]) -> Step:
    script = "".join(f"{line}\n" for line in ("*nat", *lines, "COMMIT"))
    words = (f"iptables-{variant}-restore", "--noflush")
    return functools.partial(place.run, *words, stdin=script)


def _forward(protocol: str, ports: object, to: str = GUEST_ADDRESS) -> str:
    return f"PREROUTING -i eth0 -p {protocol} --dport {ports} -j DNAT --to-destination {to}"


@contextmanager
def iptables_range(place: Place, variant: str) -> Work:
    flush = _restore(place, variant, ["-F PREROUTING"])
    longer = _forward("tcp", f"{FIRST}:{LAST + 1}").replace("PREROUTING", "PREROUTING 1", 1)
    shifted = [
        f"-A {_forward(one, '9000:9009', f'{GUEST_ADDRESS}:7000-7009')}" for one in PROTOCOLS
    ]
    yield Doing(
        set_up=_restore(
            place, variant, [f"-A {_forward(one, f'{FIRST}:{LAST}')}" for one in PROTOCOLS]
        ),
        change=_restore(place, variant, [f"-R {longer}"]),
        remove=flush,
        shift=_restore(place, variant, shifted),
        unshift=flush,
    )


@contextmanager
def iptables_ports(place: Place, variant: str) -> Work:
    yield Doing(
        set_up=_restore(
            place, variant, [f"-A {_forward(one, p)}" for one in PROTOCOLS for p in PORT]
        ),
        change=_restore(place, variant, [f"-A {_forward('tcp', LAST + 1)}"]),
        remove=_restore(place, variant, ["-F PREROUTING"]),
    )


NAT = "add table ip nat"
BASE = (
    "add chain ip nat prerouting { type nat hook prerouting priority -100; }",
    "add chain ip nat input { type nat hook input priority 100; }",
    "add chain ip nat output { type nat hook output priority -100; }",
    "add chain ip nat postrouting { type nat hook postrouting priority 100; }",
    "add chain ip nat KUBEVIRT_PREINBOUND",
    "add chain ip nat KUBEVIRT_POSTINBOUND",
    f"add rule ip nat postrouting ip saddr {GUEST_ADDRESS} counter masquerade",
    "add rule ip nat prerouting iifname eth0 counter jump KUBEVIRT_PREINBOUND",
    "add rule ip nat postrouting oifname k6t-eth0 counter jump KUBEVIRT_POSTINBOUND",
)


def _three(protocol: str, ports: object) -> tuple[str, ...]:
    return (
        (
            f"add rule ip nat KUBEVIRT_POSTINBOUND {protocol} dport {ports} ip saddr 127.0.0.1"
            f" counter snat to {GATEWAY_ADDRESS}"
        ),
        (
            f"add rule ip nat KUBEVIRT_PREINBOUND {protocol} dport {ports}"
            f" counter dnat to {GUEST_ADDRESS}"
        ),
        (
            f"add rule ip nat output ip daddr 127.0.0.1 {protocol} dport {ports}"
            f" counter dnat to {GUEST_ADDRESS}"
        ),
    )


def _one_by_one(place: Place, commands: Iterable[str]) -> None:
    for command in commands:
        place.run("nft", command)


def _kubevirt(place: Place, ports: Sequence[object], sample: Sample | None) -> Doing:
    rules = [rule for one in PROTOCOLS for p in ports for rule in _three(one, p)]
    return Doing(
        set_up=functools.partial(_one_by_one, place, [NAT, *BASE, *rules]),
        change=lambda: None,
        remove=functools.partial(place.run, "nft", "delete table ip nat"),
        sample=sample,
    )


@contextmanager
def kubevirt_range(place: Place) -> Work:
    yield _kubevirt(place, [RANGE], None)


@contextmanager
def kubevirt_ports(place: Place) -> Work:
    objects, more = len((NAT, *BASE)), 3 * len(PROTOCOLS)
    factor = (objects + more * len(PORT)) / (objects + more * SAMPLE)
    yield _kubevirt(place, range(FIRST, FIRST + SAMPLE), Sample(SAMPLE, factor))


def _variant(variant: str) -> tuple[Peer, ...]:
    needs = (f"iptables-{variant}-restore",)
    return (
        Peer(
            name=f"iptables-{variant}-restore",
            needs=needs,
            at_work=functools.partial(iptables_range, variant=variant),
            how="one rule per range",
        ),
        Peer(
            name=f"iptables-{variant}-restore, per port",
            needs=needs,
            at_work=functools.partial(iptables_ports, variant=variant),
            how="one rule per port",
        ),
    )


PEERS = (
    Peer(name="nft -f", needs=("nft",), at_work=nft_range, how="one rule per range"),
    Peer(name="nft -f, per port", needs=("nft",), at_work=nft_ports, how="one rule per port"),
    *_variant("legacy"),
    *_variant("nft"),
    Peer(
        name="KubeVirt's way, portRanges",
        needs=("nft",),
        at_work=kubevirt_range,
        how="one nft process per table, chain and rule, as KubeVirt 1.9 does it",
        no_change="none, the guest is restarted",
        no_removal="with the pod",
    ),
    Peer(
        name="KubeVirt's way, ports",
        needs=("nft",),
        at_work=kubevirt_ports,
        how="the same with the ports listed one by one",
        no_change="none, the guest is restarted",
        no_removal="with the pod",
    ),
)
