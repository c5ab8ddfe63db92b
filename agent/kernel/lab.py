"""Throwaway namespaces to try forwarding in: a client, a pod and a guest behind its bridge.

    client (192.0.2.1) ── eth0 (192.0.2.2) pod k6t-eth0 (10.0.2.1) ── guest (10.0.2.2)

They carry a prefix of their own and are removed at the end, also after a failure.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Interface, IPv6Interface

from pyroute2 import IPRoute, NetlinkError, netns
from pyroute2 import config as pyroute2

from agent.errors import NotPermitted
from agent.kernel import sysctl
from agent.kernel.netns import inside, opened
from rules.model import Family, InterfaceAddress
from rules.values import Value

CLIENT = (IPv4Interface("192.0.2.1/24"), IPv6Interface("2001:db8::1/64"))
POD = (IPv4Interface("192.0.2.2/24"), IPv6Interface("2001:db8::2/64"))
GATEWAY = (IPv4Interface("10.0.2.1/24"), IPv6Interface("fd10:0:2::1/120"))
GUEST = (IPv4Interface("10.0.2.2/24"), IPv6Interface("fd10:0:2::2/120"))

# Seconds: where the kernel takes down many namespaces, nobody gets a new one for a while.
pyroute2.default_communicate_timeout = 60


class Lab(Value):
    """The names of the three namespaces."""

    client: str
    pod: str
    guest: str

    def socket(self, where: str, family: Family, kind: socket.SocketKind) -> socket.socket:
        """A socket that lives in that namespace, whichever thread uses it."""
        version = socket.AF_INET if family is Family.IP else socket.AF_INET6
        with opened(where) as descriptor, inside(descriptor, where):
            return socket.socket(version, kind)


@contextmanager
def built(prefix: str, families: tuple[Family, ...] = tuple(Family)) -> Iterator[Lab]:
    """The three namespaces, wired; the pod side has addresses of these families only."""
    lab = Lab(f"{prefix}-client", f"{prefix}-pod", f"{prefix}-guest")
    with _permitted(), ExitStack() as stack:
        for name in (lab.client, lab.pod, lab.guest):
            stack.callback(_remove, name)  # first: it may be interrupted half-way
            netns.create(name)
            _trust_addresses(name)
        with IPRoute(netns=lab.pod) as ip:
            _veth(ip, "eth0", lab.client, "eth0")
            _veth(ip, "tap0", lab.guest, "eth0")
            ip.link("add", ifname="k6t-eth0", kind="bridge", br_mcast_snooping=0)
            bridge = _index(ip, "k6t-eth0")
            ip.link("set", index=_index(ip, "tap0"), master=bridge, state="up")
            _up(ip, "eth0", _of(POD, families))
            _up(ip, "k6t-eth0", GATEWAY)
            _up(ip, "lo", ())
        with IPRoute(netns=lab.client) as ip:
            _up(ip, "eth0", CLIENT)
            _up(ip, "lo", ())
        with IPRoute(netns=lab.guest) as ip:
            _up(ip, "eth0", GUEST)
            _up(ip, "lo", ())
            for gateway in GATEWAY:
                ip.route("add", dst=_everywhere(gateway), gateway=str(gateway.ip))
        yield lab


def _remove(name: str) -> None:
    with suppress(FileNotFoundError):
        netns.remove(name)


@contextmanager
def _permitted() -> Iterator[None]:
    try:
        yield
    except (NetlinkError, PermissionError) as error:
        if isinstance(error, NetlinkError) and error.code != errno.EPERM:
            raise
        raise NotPermitted(
            f"may not build a network ({error})",
            "It takes CAP_SYS_ADMIN and CAP_NET_ADMIN",
        ) from error


def _trust_addresses(name: str) -> None:
    """No duplicate detection: nobody else is on these links, and it would take a second."""
    with opened(name) as descriptor, inside(descriptor, name):
        for scope in ("all", "default"):
            sysctl.write(f"net.ipv6.conf.{scope}.accept_dad", "0")


def _veth(ip: IPRoute, name: str, other: str, other_name: str) -> None:
    ip.link("add", ifname=name, kind="veth", peer={"ifname": other_name, "net_ns_fd": other})


def _up(ip: IPRoute, name: str, addresses: tuple[InterfaceAddress, ...]) -> None:
    index = _index(ip, name)
    for address in addresses:
        prefix = address.network.prefixlen
        ip.addr("add", index=index, address=str(address.ip), prefixlen=prefix)
    ip.link("set", index=index, state="up")


def _index(ip: IPRoute, name: str) -> int:
    (index,) = ip.link_lookup(ifname=name)
    return int(index)


def _of(
    addresses: tuple[InterfaceAddress, ...], families: tuple[Family, ...]
) -> tuple[InterfaceAddress, ...]:
    return tuple(address for address in addresses if Family.of(address) in families)


def _everywhere(gateway: InterfaceAddress) -> str:
    return "0.0.0.0/0" if gateway.version == 4 else "::/0"
