"""Throwaway network namespaces for tests, and the few words that are said about them.

Every namespace has a name no other run can have, and goes with the block that made it.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_interface
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.kernel import rtnetlink, sysctl
from agent.kernel.iptables import Iptables, Workers
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.reconcile import converge
from agent.workqueue import INITIAL_PIDS
from rules.desired import desire
from rules.model import (
    Claim,
    Desired,
    Family,
    Guest,
    Link,
    Machine,
    Masquerade,
    Observed,
    Protocol,
    Surroundings,
)
from rules.plan import Plan
from rules.ports import PortRange

if TYPE_CHECKING:
    from agent.kernel.lab import Lab

ROOT = Path(__file__).parents[1]
PATIENCE = 60  # seconds a command may take; none takes one
NFTABLES, IPTABLES = "nftables", "iptables"
BACKENDS = (NFTABLES, IPTABLES)
LEGACY = {Family.IP: "iptables-legacy", Family.IP6: "ip6tables-legacy"}

LINKS: dict[str, tuple[str, ...]] = {
    "eth0": ("192.0.2.2/24", "2001:db8::2/64"),
    "eth0.100": ("198.51.100.2/24",),
    "eth6": ("2001:db8:6::2/64",),
    "k6t-eth0": ("10.0.2.1/24", "fd10:0:2::1/120"),
    "k6t-x": ("172.16.9.1/29", "fd77:9::1/64"),
    "lo": ("127.0.0.1/8", "::1/128"),
}
"""The links of a pod as `pod` makes it; the default route leaves by eth0."""

SURROUNDINGS = Surroundings(
    tuple(Link(name, tuple(map(ip_interface, texts))) for name, texts in LINKS.items()), "eth0"
)


def unused_name() -> str:
    """A short name that nobody else has."""
    return f"t{uuid.uuid4().hex[:9]}"


def run(
    *words: str | Path,
    stdin: str = "",
    code: int | None = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; unless told otherwise it must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if code is not None:
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def portranger(*words: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command line, as a process of its own."""
    return run(sys.executable, "-m", "agent.entry", *words, stdin=stdin, code=None)


def within(netns: str, *words: str, stdin: str = "", code: int | None = 0) -> str:
    """What a command says inside a namespace."""
    return run("ip", "netns", "exec", netns, *words, stdin=stdin, code=code).stdout


def nft(netns: str, script: str) -> None:
    """Do what a stranger would do with nft in that namespace."""
    within(netns, "nft", "-f", "-", stdin=script)


def legacy(netns: str, *lines: str, families: Sequence[Family] = tuple(Family)) -> None:
    """Do what a stranger would do with iptables-legacy in the table nat, in one commit a family."""
    script = "".join(f"{line}\n" for line in ("*nat", *lines, "COMMIT"))
    for family in families:
        within(netns, f"{LEGACY[family]}-restore", "-w", "--noflush", stdin=script)


def saved(netns: str, *, policies: bool = False) -> str:
    """Everything in the legacy tables of both families, with its counters, byte for byte but for
    the comments, which tell the time, and (unless asked for) the counters of built-in chains:
    these the kernel moves by itself, announcing its addresses to its links."""
    texts = [within(netns, f"{command}-save", "-c") for command in LEGACY.values()]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    return text if policies else re.sub(r"(?m)^(:\S+ ACCEPT) .*$", r"\1", text)


def ip(netns: str, *lines: str) -> None:
    """Run `ip` in that namespace, a line a command."""
    run("ip", "-n", netns, "-batch", "-", stdin="\n".join(lines))


@contextmanager
def space() -> Iterator[str]:
    """A new namespace, with nothing but a sleeping loopback."""
    name = unused_name()
    run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        run("ip", "netns", "del", name, code=None)  # the test may have deleted it itself


@contextmanager
def pod() -> Iterator[str]:
    """A namespace with LINKS, none of which leads anywhere."""
    with space() as name:
        lines = [f"link add {link} type bridge" for link in LINKS if link != "lo"]
        lines += [f"link set {link} addrgenmode none" for link in LINKS]
        lines += [f"link set {link} up" for link in LINKS]
        lines += [
            f"addr add {address} dev {link} {'nodad' if ':' in address else ''}"
            for link, addresses in LINKS.items()
            if link != "lo"
            for address in addresses
        ]
        ip(name, *lines, "route add default via 192.0.2.1")
        yield name


def emptied(netns: str) -> str:
    """The namespace of a pod, as new; making another one would take longer."""
    nft(netns, "flush ruleset")
    for family, names in ((Family.IP, "ip_tables_names"), (Family.IP6, "ip6_tables_names")):
        there = within(netns, "cat", f"/proc/net/{names}", code=None).split()
        for table in {"nat", "mangle"}.intersection(there):
            within(netns, f"{LEGACY[family]}-restore", "-w", stdin=f"*{table}\nCOMMIT\n")
    with opened(netns) as descriptor, inside(descriptor, netns):
        for name in ("ipv4.ip_forward", "ipv4.conf.k6t-eth0.route_localnet"):
            sysctl.write(f"net.{name}", "0")
        sysctl.write("net.ipv6.conf.all.forwarding", "0")
        sysctl.write("net.netfilter.nf_conntrack_tcp_loose", "1")
    return netns


@contextmanager
def lab(families: tuple[Family, ...] = tuple(Family)) -> Iterator[Lab]:
    """A client, a pod and a guest, wired."""
    from agent.kernel.lab import built  # which loads pyroute2: a quarter of a second

    with built(unused_name(), families) as made:
        yield made


def vm(  # noqa: PLR0913 - what a manifest can say
    name: str,
    ports: str | None,
    *,
    entry: str | None = None,
    ipv4: str = "10.0.2.0/24",
    ipv6: str = "fd10:0:2::/120",
    interface: str = "red",
    netns: str = "",
) -> Machine:
    """A machine that declares ports as the annotation would: `22,1000-8000/udp`; None: nothing."""
    v4, v6 = IPv4Network(ipv4), IPv6Network(ipv6)
    return Machine(
        kind="VirtualMachine",
        namespace="default",
        name=name,
        netns=netns,
        masquerade=Masquerade(
            name=interface,
            entry=entry,
            guests=(Guest(v4[2], v4[1]), Guest(v6[2], v6[1])),
            claims=None if ports is None else claims(ports),
        ),
    )


def claims(text: str) -> tuple[Claim, ...]:
    """`22,1000-8000/udp` as claims."""
    return tuple(_claim(part) for part in text.split(",") if part)


def _claim(text: str) -> Claim:
    ports, _, protocol = text.partition("/")
    first, _, last = ports.partition("-")
    return Claim(Protocol(protocol or "tcp"), PortRange(int(first), int(last or first)))


def require(backend: str = IPTABLES) -> None:
    """Skip the test where this machine cannot have the backend."""
    if backend == IPTABLES and (unfit := why_no_iptables()):
        pytest.skip(f"no iptables backend: python-iptables does not work with {unfit}")


@functools.cache
def why_no_iptables() -> str:
    """Why legacy tables cannot be written here; nothing, where they can."""
    with space() as netns, opened(netns) as descriptor, ExitStack() as stack:
        workers = Workers()
        stack.callback(workers.stop)
        tables = Iptables(descriptor, workers)
        tables.observe()
        return tables.unfit


@functools.cache
def kernel(backend: str) -> LiveKernel:
    """One for all tests of this process: starting its workers takes half a second."""
    require(backend)
    made = LiveKernel(backend)
    atexit.register(made.close)
    return made


_defaults = ["auto"]


@contextmanager
def using(backend: str) -> Iterator[str]:
    """Within the block, this is the backend of what is said here about namespaces."""
    require(backend)
    _defaults.append(backend)
    try:
        yield backend
    finally:
        _defaults.pop()


def asked() -> str:
    """The backend that the test is about."""
    return _defaults[-1]


def wanted(netns: str, machines: Sequence[Machine]) -> Desired:
    """What the machines want in that namespace, as it is now."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        return desire(machines, rtnetlink.surroundings())


def applied(netns: str, *machines: Machine, backend: str = "") -> Plan:
    """Make the namespace hold these machines."""
    with kernel(backend or asked()).opened(netns) as namespace:
        return converge(netns, desire(machines, namespace.surroundings()), namespace)


def observed(netns: str, backend: str = "") -> Observed:
    """What the namespace holds of ours."""
    with kernel(backend or asked()).opened(netns) as namespace:
        return namespace.observe()


def manifest(netns: str, ranges: str | None, name: str = "desktop") -> str:
    """The YAML of what `vm` makes."""
    declared = "".join(
        f"                - {{start: {claim.ports.first}, end: {claim.ports.last},"
        f" protocol: {claim.protocol.name}}}\n"
        for claim in claims(ranges or "")
    )
    return f"""\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: {name}
  annotations:
    portranger.io/netns: {netns}
spec:
  template:
    spec:
      domain:
        devices:
          interfaces:
            - name: red
              masquerade: {{}}
{"              portRanges:" if declared else ""}
{declared}
      networks:
        - name: red
          pod: {{}}
"""


def eventually(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether it becomes true. The time is a bound, and no measurement: it is long enough for the
    busiest machine, and only a test that fails waits for its end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.01)
    return true()


@contextmanager
def process(*words: str, netns: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs (in that namespace) until the block ends."""
    prefix = ("ip", "netns", "exec", netns) if netns else ()
    with ExitStack() as stack:
        child = subprocess.Popen([*prefix, *words], stdin=subprocess.PIPE, cwd=ROOT)
        stack.callback(child.communicate, timeout=PATIENCE)
        stack.callback(child.kill)
        if netns:
            there = Path("/run/netns", netns).stat().st_ino
            path = Path(f"/proc/{child.pid}/ns/net")
            assert eventually(lambda: path.stat().st_ino == there)
        yield child


def home() -> str:
    """The namespace this thread is in."""
    return str(Path("/proc/thread-self/ns/net").readlink())


def has_initial_pids() -> bool:
    """Return whether processes have the numbers here that the kernel's events tell."""
    return str(Path("/proc/self/ns/pid").readlink()) == INITIAL_PIDS


LOOPBACK = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
