"""What a new flow costs on its way through a pod: in both shapes of the ranges, against a bare
`dnat`, routing, and a rule for each port.

    client c0 ── eth0 pod 0 k6t-eth0 ── g0 guest
           c1 ── eth0 pod 1 k6t-eth0 ── g1

Each way of forwarding has a pod of its own. A veth hands its packets on at once, so all the work
for a packet until the guest drops it is done while the client sends it, and is processor time of
ours. What of it the sending takes is measured, too: at a pod that drops all it is sent.
"""

import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import TextIO

from agent.kernel import sysctl
from agent.kernel.conntrack import CT_DELETE, NETLINK_NETFILTER
from agent.kernel.lab import Lab, built
from agent.kernel.netlink import NLM_F_ACK, ask
from agent.kernel.netns import inside, opened
from bench.machines import machine
from bench.measure import Number, Table, numbers, ratio, table, undisturbed
from bench.packets import SLICES, Packets
from bench.process import until
from rules import nft_script
from rules.desired import desire
from rules.model import Claim, Family, Guest, Machine, Observed, Protocol
from rules.plan import diff
from rules.ports import PortRange
from rules.shapes import gathered, lookup_of
from rules.values import Value, replace

FIRST, STEP, WIDTH = 1000, 12, 6  # of ranges that touch nowhere: 5,000 fit
POD, BEHIND, BESIDE = "192.0.2.2", "10.0.2.2", "10.0.2.3"
ROUNDS = 100
PACKETS = 1000  # a round, where a packet takes a few microseconds
LENGTHY = 300  # rules in a row, from which on fewer packets tell as much
FEW_PACKETS = 50
STREAMS = 9
STREAM = 256 << 20  # bytes
STREAM_LEAST = 0.9  # of routing: that much is noise
STREAM_PATIENCE = 30.0  # seconds
CHUNK = bytes(1 << 20)
BOUND = 1.15  # of a bare dnat
COUNTS = (1, 8, 16, 64, 100, 1000, 5000)
PROMISED = (1, 100, 1000, 5000)
CROSSING = (4, 8, 12, 16, 24, 32)
PER_PORT = 7001
SENDER, ROUTING, IDLE, BARE = "sending alone", "routing, no nat", "nat, no rule hits", "bare dnat"
RETURN = "bare dnat, our way back"
PACKET_QDISC_BYPASS = 20
SOL_PACKET = 263
PREROUTING = (
    "add table inet portranger\nadd chain inet portranger prerouting"
    " { type nat hook prerouting priority -101; policy accept; }\n"
)
POSTROUTING = (
    "add chain inet portranger postrouting"
    " { type nat hook postrouting priority 99; policy accept; }\n"
)
ADD = "add rule inet portranger"
DROP = "{ type filter hook ingress devices = { %s } priority 0; policy drop; }"


class Way(Value, kw_only=True):
    """A way through a pod: its rules for nft, and where packets are sent."""

    script: str
    port: int
    to: str = POD
    packets: int = PACKETS


def udp() -> Table:
    """The first packet of UDP flows."""
    return _compared("UDP: the first packet of a flow, processor time", Protocol.UDP)


def tcp() -> Table:
    """The SYN of TCP connections."""
    return _compared("TCP: the SYN of a connection, processor time", Protocol.TCP)


def crossover() -> Table:
    """From how many ranges on a map is better than a rule for each, leaving out the sending."""
    ways = plain(Protocol.UDP)
    ways = {name: ways[name] for name in (SENDER, BARE)}
    for count in CROSSING:
        ways |= _shaped(Protocol.UDP, count)
    taken = measured(Protocol.UDP, ways, ROUNDS)
    made = table("Where a map begins to be better than a rule for each range", taken, "µs", BARE)
    unsent = _unsent(taken)
    lead = [ratio(unsent[f"{count} rules"], unsent[f"map of {count}"]) for count in CROSSING]
    found = [
        Number(name=f"{count} rules, of a map", value=value, unit="x")
        for count, value in zip(CROSSING, lead, strict=True)
    ]
    return _with_series(numbers(made, found), taken, CROSSING)


def one_map(count: int, rounds: int) -> float:
    """What a flow through our map of so many ranges costs, of a bare dnat."""
    ways = plain(Protocol.UDP)
    ways = {name: ways[name] for name in (SENDER, BARE)}
    ways[f"map of {count}"] = _shaped(Protocol.UDP, count)[f"map of {count}"]
    taken = measured(Protocol.UDP, ways, rounds)
    return ratio(taken[f"map of {count}"], taken[BARE])


def _compared(title: str, protocol: Protocol) -> Table:
    ways = plain(protocol)
    for count in COUNTS:
        ways |= _shaped(protocol, count)
    taken = measured(protocol, ways, ROUNDS)
    found: list[Number] = []
    unsent = _unsent(taken)
    for count in PROMISED:
        name, ours = f"our {_ours(protocol, count)}, of a bare dnat", _ours(protocol, count)
        whole, rest = ratio(taken[ours], taken[BARE]), ratio(unsent[ours], unsent[BARE])
        found += [
            Number(name=name, value=whole, unit="x", bound=BOUND),
            Number(name=f"  {ours}: leaving out the sending", value=rest, unit="x"),
        ]
    return _with_series(numbers(table(title, taken, "µs", BARE), found), taken, COUNTS)


def stream() -> Table:
    """A connection that is open: thousands of ranges in a map, against routing."""
    prefix = f"prbench-{os.getpid()}"
    with built(f"{prefix}-a", (Family.IP,)) as ours, built(f"{prefix}-b", (Family.IP,)) as other:
        with _within(ours.pod):
            _nft(_script(_machine(Protocol.TCP, COUNTS[-1]), mapped=True))
        for lab in (ours, other):
            with _within(lab.pod):
                sysctl.write("net.ipv4.ip_forward", "1")
        route = ["route", "add", "10.0.2.0/24", "via", POD]
        subprocess.run(["ip", "-n", other.client, *route], check=True)
        port = FIRST + STEP * (COUNTS[-1] - 1) + 2
        ends = {ROUTING: (other, BEHIND), f"map of {COUNTS[-1]}": (ours, POD)}
        speeds: dict[str, list[float]] = {name: [] for name in ends}
        for _ in range(STREAMS):
            for name, (lab, to) in ends.items():
                speeds[name].append(_speed(lab, to, port))
    made = table(f"A TCP stream of {STREAM >> 20} MiB", speeds, "GB/s")
    name = f"through a map of {COUNTS[-1]}, of routing"
    value = ratio(speeds[f"map of {COUNTS[-1]}"], speeds[ROUTING])
    return numbers(made, [Number(name=name, value=value, unit="x", least=STREAM_LEAST)])


def _speed(lab: Lab, to: str, port: int) -> float:
    """Gigabytes in a second, from the first byte to the last."""
    with (
        lab.socket(lab.guest, Family.IP, socket.SOCK_STREAM) as guest,
        lab.socket(lab.client, Family.IP, socket.SOCK_STREAM) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for one in (guest, client):
            one.settimeout(STREAM_PATIENCE)
        guest.bind((BEHIND, port))
        guest.listen()
        client.connect((to, port))
        peer, _ = guest.accept()
        with peer:
            peer.settimeout(STREAM_PATIENCE)
            received = pool.submit(_receive_all, peer)
            started = time.perf_counter()
            for _ in range(STREAM // len(CHUNK)):
                client.sendall(CHUNK)
            client.shutdown(socket.SHUT_WR)
            assert received.result(STREAM_PATIENCE) == STREAM
            return STREAM / (time.perf_counter() - started) / 1e9


def _receive_all(peer: socket.socket) -> int:
    room, total = bytearray(len(CHUNK)), 0
    while got := peer.recv_into(room):
        total += got
    return total


def _unsent(taken: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """What is left without the sending."""
    alone = statistics.median(taken[SENDER])
    return {name: [one - alone for one in times] for name, times in taken.items()}


def _with_series(made: Table, taken: Mapping[str, list[float]], counts: Sequence[int]) -> Table:
    shapes = {"a rule for each range": _rules, "one map": "map of {}".format}
    series = {
        label: tuple((count, statistics.median(taken[name(count)])) for count in counts)
        for label, name in shapes.items()
    }
    for name in (BARE, ROUTING):
        if name in taken:
            middle = statistics.median(taken[name])
            series[name] = ((counts[0], middle), (counts[-1], middle))
    return replace(made, series=series)


# ------------------------------------------------------------------------------ ways through a pod


def plain(protocol: Protocol) -> dict[str, Way]:
    """What ranges are compared with."""
    words, port = protocol.value, FIRST + 2
    bare = f"{PREROUTING}{ADD} prerouting dnat ip to {BEHIND}\n"
    back = _script(_machine(protocol, 1), mapped=False)
    back = "".join(f"{line}\n" for line in back.splitlines() if " postrouting " in line)
    ports = range(FIRST, FIRST + PER_PORT)
    each = "".join(f"{ADD} prerouting {words} dport {n} dnat ip to {BEHIND}\n" for n in ports)
    deny = "add table netdev sending\nadd chain netdev sending in " + DROP % "eth0"
    miss = f"{PREROUTING}{ADD} prerouting {words} dport 7 dnat ip to {BEHIND}\n"
    return {
        SENDER: Way(script=deny, port=port),
        ROUTING: Way(script="", port=port, to=BEHIND),
        IDLE: Way(script=miss, port=port, to=BEHIND),
        BARE: Way(script=bare, port=port),
        RETURN: Way(script=bare + back, port=port),
        f"{PER_PORT} rules of a port": Way(
            script=PREROUTING + each, port=ports[-1], packets=FEW_PACKETS
        ),
    }


def _shaped(protocol: Protocol, count: int) -> dict[str, Way]:
    """So many ranges as rules and as a map, as the agent would write them; the last is used."""
    wide, port = _machine(protocol, count), FIRST + STEP * (count - 1) + 2
    packets = FEW_PACKETS if count > LENGTHY else PACKETS
    return {
        _rules(count): Way(script=_script(wide, mapped=False), port=port, packets=packets),
        f"map of {count}": Way(script=_script(wide, mapped=True), port=port),
    }


def _ours(protocol: Protocol, count: int) -> str:
    """What so many ranges are held as."""
    plan = diff("bench", desire([_machine(protocol, count)], None), Observed(mapped={}))
    return f"map of {count}" if plan.maps else _rules(count)


def _rules(count: int) -> str:
    return f"{count} rules" if count > 1 else "1 rule"


def _script(machine: Machine, *, mapped: bool) -> str:
    plan = diff("bench", desire([machine], None), Observed(mapped={}))
    lookups = {lookup for rule in plan.add if (lookup := lookup_of(rule))}
    maps = gathered(dict.fromkeys(lookups, 1 << 16), ()) if mapped else frozenset()
    return nft_script.script(replace(plan, maps=maps))


def _machine(protocol: Protocol, count: int) -> Machine:
    firsts = range(FIRST, FIRST + STEP * count, STEP)
    claims = [Claim(protocol, PortRange(first, first + WIDTH - 1)) for first in firsts]
    return machine(claims, [Guest(IPv4Address(BEHIND), IPv4Address("10.0.2.1"))])


# ------------------------------------------------------------------------------------- the field


def measured(protocol: Protocol, ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Microseconds for each new flow, in rounds of all ways."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with _field(ways) as pods, _on_one_processor(), undisturbed():
        loads = {
            name: Packets(protocol, way.to, way.port, way.packets) for name, way in ways.items()
        }
        for name, pod in pods.items():
            pod.passed(loads[name], ways[name].packets if name != SENDER else 0)
        for number in range(rounds):
            for name, pod in pods.items():
                if ways[name].packets == FEW_PACKETS and number % SLICES:
                    continue  # slow, and so slow that it need not be known well
                taken[name].append(loads[name].send(pod.way_in, number % SLICES))
            if number % SLICES == SLICES - 1:
                for pod in pods.values():
                    pod.forget_flows()
    return taken


class _Pod:
    """The way in, and what tells of the way out."""

    def __init__(
        self, way_in: socket.socket, conntrack: socket.socket, links: TextIO, link: str
    ) -> None:
        self.way_in = way_in
        self._conntrack, self._links, self._link = conntrack, links, link

    def forget_flows(self) -> None:
        ask(self._conntrack, CT_DELETE, NLM_F_ACK, bytes(4), "=BBH")

    def passed(self, packets: Packets, count: int) -> None:
        """See for once that so many get through to the guest: else something else is measured."""
        before = self._arrived()
        packets.send(self.way_in, 0)
        until(lambda: self._arrived() >= before + count, 2)
        assert self._arrived() <= before + count, "more arrived than may"
        self.forget_flows()

    def _arrived(self) -> int:
        """How many packets the guest has been given."""
        self._links.seek(0)
        lines = (line.split() for line in self._links)
        (words,) = (words for words in lines if words[0] == f"{self._link}:")
        return int(words[2])


@contextmanager
def _field(ways: Mapping[str, Way]) -> Iterator[dict[str, _Pod]]:
    """A client and a guest, with a pod between them for each way."""
    prefix = f"prbench-{os.getpid()}"
    client, guest = f"{prefix}-client", f"{prefix}-guest"
    pods = {name: f"{prefix}-{number}" for number, name in enumerate(ways)}
    with ExitStack() as stack:
        for netns in (client, guest, *pods.values()):
            stack.callback(subprocess.run, ["ip", "netns", "del", netns], check=False)
            subprocess.run(["ip", "netns", "add", netns], check=True)
            with _within(netns):
                sysctl.write("net.ipv6.conf.default.disable_ipv6", "1")  # it would talk by itself
                sysctl.write("net.ipv4.ip_forward", "1")
        for number, pod in enumerate(pods.values()):
            _links(client, pod, guest, number)
        with _within(guest):
            all_links = ", ".join(f"g{number}" for number in range(len(pods)))
            _nft("add table netdev end\nadd chain netdev end in " + DROP % all_links)
            dev = Path("/proc/thread-self/net/dev")
            listings = [stack.enter_context(dev.open()) for _ in pods]
        made: dict[str, _Pod] = {}
        for number, (name, pod) in enumerate(pods.items()):
            with _within(pod):
                _nft(ways[name].script)
                asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
            with _within(client):
                way_in = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
                way_in.bind((f"c{number}", 0))
                way_in.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)
            stack.callback(asking.close)
            stack.callback(way_in.close)
            made[name] = _Pod(way_in, asking, listings[number], f"g{number}")
        yield made


def _links(client: str, pod: str, guest: str, number: int) -> None:
    ends = f"peer name c{number} netns {client}", f"peer name g{number} address {{}} netns {guest}"
    near, far, outside = (f"02:00:00:00:00:0{n}" for n in (2, 3, 4))
    lines = f"""
        link add eth0 address {near} type veth {ends[0]}
        link add k6t-eth0 address {outside} type veth {ends[1].format(far)}
        link set eth0 up
        link set k6t-eth0 up
        addr add {POD}/24 dev eth0
        addr add 10.0.2.1/24 dev k6t-eth0
        neigh add {BEHIND} lladdr {far} dev k6t-eth0 nud permanent
        neigh add {BESIDE} lladdr {far} dev k6t-eth0 nud permanent
    """
    for netns, batch in (
        (pod, lines),
        (client, f"link set c{number} up"),
        (guest, f"link set g{number} up"),
    ):
        command = ["ip", "-n", netns, "-batch", "-"]
        subprocess.run(command, input=batch, text=True, check=True)


@contextmanager
def _within(netns: str) -> Iterator[None]:
    with opened(netns) as descriptor, inside(descriptor, netns):
        yield


def _nft(script: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


@contextmanager
def _on_one_processor() -> Iterator[None]:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)
