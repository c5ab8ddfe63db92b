"""Where the hitless suite runs: throwaway namespaces, and the client that opens flows through them.

    client ── eth0 (198.51.100.2) node br0 (10.1.0.1) ── eth0 (10.1.0.11) pod 1 k6t-eth0 ── guest 1
                                                     ── eth0 (10.1.0.12) pod 2 k6t-eth0 ── guest 2

Client and guests have no addresses: bench/hitless.c makes their packets itself. Flows come from 16
addresses of 203.0.113.0/24 and 2001:db8:7::/64, which the node routes to the client.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.kernel import sysctl
from agent.kernel.conntrack import CT_DELETE
from agent.kernel.netlink import NLM_F_ACK, ask
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import netlink
from bench.process import until
from rules.values import Value

SOURCE = Path(__file__).with_name("hitless.c")
PREBUILT = "HITLESS_CLIENT"  # names the client, where there is no compiler
NODE4, NODE6 = "198.51.100.2", "2001:db8:5::2"
CLIENT4, CLIENT6 = "198.51.100.9", "2001:db8:5::9"
FROM4, FROM6 = "203.0.113.16", "2001:db8:7::10"  # the first of 16 each
SOURCES = 16
VMS = (1, 2)
PATIENCE = 60.0
MOST_SECONDS = 3600
WARM_UP = """
add table inet prwarm
add chain inet prwarm c { type nat hook prerouting priority 0; }
delete table inet prwarm
"""
TIMEOUT = 3  # seconds that a flow may wait for its answer


def settings(timeout: int) -> dict[str, int]:
    """Bound the conntrack table: a flow is over within milliseconds, unless the machine is kept
    from running. ICMP errors are answers, too."""
    return {
        "net.netfilter.nf_conntrack_tcp_timeout_syn_sent": timeout + 2,
        "net.netfilter.nf_conntrack_tcp_timeout_syn_recv": timeout + 2,
        "net.netfilter.nf_conntrack_tcp_timeout_close": 0,
        "net.netfilter.nf_conntrack_udp_timeout": timeout - 1,
        "net.netfilter.nf_conntrack_udp_timeout_stream": timeout - 1,
        "net.ipv4.icmp_ratelimit": 0,
        "net.ipv6.icmp.ratelimit": 0,
    }


class Net(Value, kw_only=True):
    """The names of the namespaces, and the node's address on the client's link."""

    client: str
    node: str
    pods: tuple[str, ...]
    guests: tuple[str, ...]
    hop: str
    timeout: int  # seconds that a flow may wait

    def pod_address(self, vm: int) -> tuple[str, str]:
        """At which a VM is reached from the node, in both families."""
        return f"10.1.0.{10 + vm}", f"fd01::{10 + vm}"


@contextmanager
def built(timeout: int = TIMEOUT) -> Iterator[Net]:
    """The namespaces, wired; removed at the end, also after a failure."""
    prefix = f"prhit-{os.getpid()}"
    client, node = f"{prefix}-client", f"{prefix}-node"
    pods = tuple(f"{prefix}-pod{vm}" for vm in VMS)
    guests = tuple(f"{prefix}-guest{vm}" for vm in VMS)
    with ExitStack() as stack:
        for name in (client, node, *pods, *guests):
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "netns", "add", name], check=True)
            addressed = name == node or name in pods
            set_all(
                name, {"net.ipv6.conf.all.accept_dad": 0, "net.ipv6.conf.default.accept_dad": 0}
            )
            set_all(name, {"net.ipv4.ip_forward": int(name == node)})
            if addressed:
                run_nft(name, WARM_UP)
                set_all(name, settings(timeout))
            else:
                set_all(name, {"net.ipv6.conf.default.disable_ipv6": 1})
        _wire_node(node, client)
        for vm, pod, guest in zip(VMS, pods, guests, strict=True):
            _wire_vm(node, vm, pod, guest)
        hop = _mac(node, "eth0")
        yield Net(client=client, node=node, pods=pods, guests=guests, hop=hop, timeout=timeout)


def set_all(netns: str, settings: dict[str, int]) -> None:
    """Write sysctls of a namespace."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        for name, value in settings.items():
            sysctl.write(name, str(value))


def run_nft(netns: str, script: str) -> None:
    """Run a script of nft in a namespace."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


def forget_flows(net: Net) -> None:
    """Let nothing be tracked any more: the next client may use the same ports."""
    for netns in (net.node, *net.pods):
        with opened(netns) as descriptor, inside(descriptor, netns), netlink() as asking:
            ask(asking, CT_DELETE, NLM_F_ACK, bytes(4), "=BBH")


def _ip(netns: str, *lines: str) -> None:
    words = ["ip", "-n", netns, "-batch", "-"]
    subprocess.run(words, input="\n".join(lines), text=True, check=True)


def _mac(netns: str, link: str) -> str:
    words = ["ip", "-n", netns, "-json", "link", "show", link]
    done = subprocess.run(words, capture_output=True, check=True)
    return str(json.loads(done.stdout)[0]["address"])


def _wire_node(node: str, client: str) -> None:
    set_all(node, {"net.ipv6.conf.all.forwarding": 1})
    _ip(
        node,
        "link set lo up",
        f"link add eth0 type veth peer name eth0 netns {client}",
        f"addr add {NODE4}/24 dev eth0",
        f"addr add {NODE6}/64 dev eth0 nodad",
        "link set eth0 up",
        "link add br0 type bridge mcast_snooping 0",
        "addr add 10.1.0.1/24 dev br0",
        "addr add fd01::1/64 dev br0 nodad",
        "link set br0 up",
    )
    _ip(client, "link set eth0 up")
    mac = _mac(client, "eth0")
    _ip(
        node,
        f"neigh add {CLIENT4} lladdr {mac} dev eth0 nud permanent",
        f"neigh add {CLIENT6} lladdr {mac} dev eth0 nud permanent",
        f"route add 203.0.113.0/24 via {CLIENT4}",
        f"route add 2001:db8:7::/64 via {CLIENT6}",
    )


def _wire_vm(node: str, vm: int, pod: str, guest: str) -> None:
    _ip(
        node,
        f"link add vm{vm} type veth peer name eth0 netns {pod}",
        f"link set vm{vm} master br0 up",
    )
    _ip(
        pod,
        "link set lo up",
        f"addr add 10.1.0.{10 + vm}/24 dev eth0",
        f"addr add fd01::{10 + vm}/64 dev eth0 nodad",
        "link set eth0 up",
        "route add default via 10.1.0.1 dev eth0",
        "route add default via fd01::1 dev eth0",
        "link add k6t-eth0 type bridge mcast_snooping 0",
        "addr add 10.0.2.1/24 dev k6t-eth0",
        "addr add fd10:0:2::1/120 dev k6t-eth0",
        "link set k6t-eth0 up",
        f"link add tap0 type veth peer name eth0 netns {guest}",
        "link set tap0 master k6t-eth0 up",
    )
    _ip(guest, "link set eth0 up")
    mac = _mac(guest, "eth0")
    _ip(
        pod,
        f"neigh add 10.0.2.2 lladdr {mac} dev k6t-eth0 nud permanent",
        f"neigh add fd10:0:2::2 lladdr {mac} dev k6t-eth0 nud permanent",
    )


# -------------------------------------------------------------------------------------- the client


@contextmanager
def compiled() -> Iterator[str]:
    """The client, compiled here unless HITLESS_CLIENT names one."""
    if prebuilt := os.environ.get(PREBUILT):
        yield prebuilt
        return
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder, "hitless"))
        subprocess.run(["gcc", "-O2", "-Wall", "-o", made, str(SOURCE)], check=True)
        yield made


class Lost(Value, kw_only=True):
    """A flow that was not answered as it should be; times are of the monotonic clock."""

    how: str  # refused, timed out, cut or astray
    flow: str
    sent: float
    noticed: float
    more: str

    def __str__(self) -> str:
        more = f" ({self.more})" if self.more else ""
        return f"{self.how}{more}: {self.flow}, sent at {self.sent:.4f}"


class Counts(Value, kw_only=True):
    """What came of the flows of one run."""

    sent: int
    answered: int
    guests: tuple[int, ...]  # answered by each
    late: int
    overrun: int  # packets that the client itself was too slow to read
    seconds: float
    lost: tuple[Lost, ...]


class Client:
    """The client, from its first flow on."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self._process, self._output = process, output

    def end(self) -> Counts:
        """Open no more flows, wait for the answers of those that are open, and count."""
        self._process.communicate(timeout=PATIENCE)  # longer than a flow may wait
        assert self._process.returncode == 0, f"the client failed: {self._process.returncode}"
        _, *lines, last = map(json.loads, self._output.read_text().splitlines())
        found = [
            Lost(
                how=one["lost"],
                flow=f"{one['protocol']} {one['port']} (IPv{one['family']}) from {one['from']}"
                f" port {one['source']}",
                sent=one["sent"],
                noticed=one["noticed"],
                more=one["more"],
            )
            for one in lines
        ]
        return Counts(
            sent=last["sent"],
            answered=last["answered"],
            guests=tuple(last["guests"]),
            late=last["late"],
            overrun=last["overrun"],
            seconds=last["seconds"],
            lost=tuple(found),
        )


@contextmanager
def opening(
    program: str, net: Net, to: tuple[str, str], flows: Sequence[str], rate: int
) -> Iterator[Client]:
    """The client, opening flows to ports of these addresses: `tcp:80-89`, `udp:53-53+1000`."""
    words = [program, "-c", net.client, "-m", net.hop, "-4", to[0], "-6", to[1]]
    words += ["-s", FROM4, "-S", FROM6, "-r", str(rate), "-x", str(MOST_SECONDS)]
    words += ["-t", str(1000 * net.timeout)]
    for guest in net.guests:
        words += ["-g", guest]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as stream:
            process = subprocess.Popen([*words, *flows], stdin=subprocess.PIPE, stdout=stream)
        try:
            until(lambda: bool(output.stat().st_size) or process.poll() is not None)
            yield Client(process, output)
        finally:
            process.kill()
            process.communicate()
