"""What KubeVirt's own virt-handler leaves in a launcher's namespace: its NAT tables, as far as they
decide where packets go, and its settings."""

from __future__ import annotations

from collections.abc import Sequence

from agent.kernel import sysctl
from agent.kernel.netns import inside, opened
from rules.model import Family, Protocol
from tests.spaces import claims, nft

GUEST = {Family.IP: "10.0.2.2", Family.IP6: "fd10:0:2::2"}
GATEWAY = {Family.IP: "10.0.2.1", Family.IP6: "fd10:0:2::1"}
LOOPBACK = {Family.IP: "127.0.0.1", Family.IP6: "::1"}
SETTINGS = (
    "net.ipv4.ip_forward",
    "net.ipv6.conf.all.forwarding",
    "net.ipv4.conf.k6t-eth0.route_localnet",
)


def programmed(
    netns: str,
    ports: str = "",
    *,
    families: Sequence[Family] = tuple(Family),
    pod: str = "",
) -> None:
    """Program a namespace as KubeVirt does for these ports or, for none, for all there are; `pod`
    is the pod's IPv4 address where Istio's proxy is beside the guest."""
    for family in families:
        nft(netns, "\n".join(_lines(family, ports, pod)))
    with opened(netns) as descriptor, inside(descriptor, netns):
        for setting in SETTINGS:
            sysctl.write(setting, "1")


def _lines(family: Family, ports: str, pod: str) -> list[str]:
    table, guest = f"{family.value} nat", GUEST[family]
    lines = [f"add table {table}"]
    lines += [
        f"add chain {table} {hook} {{ type nat hook {hook} priority {priority}; }}"
        for hook, priority in (
            ("prerouting", -100),
            ("input", 100),
            ("output", -100),
            ("postrouting", 100),
        )
    ]
    lines += [f"add chain {table} KUBEVIRT_{name}INBOUND" for name in ("PRE", "POST")]
    lines += [
        f"add rule {table} postrouting {family.value} saddr {guest} counter masquerade",
        f"add rule {table} prerouting iifname eth0 counter jump KUBEVIRT_PREINBOUND",
        f"add rule {table} postrouting oifname k6t-eth0 counter jump KUBEVIRT_POSTINBOUND",
    ]
    proxied = bool(pod) and family is Family.IP
    inside_at = f"{LOOPBACK[family]}, {pod}" if proxied else LOOPBACK[family]
    senders = f"{LOOPBACK[family]}, 127.0.0.6" if proxied else LOOPBACK[family]
    matches = [f"{claim.protocol.value} dport {{ {claim.ports} }} " for claim in claims(ports)] or [
        ""
    ]
    for match in matches:
        entering = match if not pod else f"{Protocol.TCP.value} dport 22 "
        source = f"{family.value} saddr {{ {senders} }}"
        target = f"{family.value} daddr {{ {inside_at} }}"
        lines += [
            f"add rule {table} KUBEVIRT_PREINBOUND {entering}counter dnat to {guest}",
            f"add rule {table} KUBEVIRT_POSTINBOUND {match}{source} snat to {GATEWAY[family]}",
            f"add rule {table} output {target} {match}counter dnat to {guest}",
        ]
    return lines
