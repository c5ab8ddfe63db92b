"""Many ranges, proved by packets: every port of them arrives where it should and no other does, in
whichever shape they are held; and no flow, old or new, notices how that changes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from agent.kernel import sysctl
from agent.kernel.lab import CLIENT, POD, Lab
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.probe import asks, connected, echoing
from agent.reconcile import converge
from rules.desired import desire
from rules.model import FORWARDED, Address, Family, Machine, Protocol
from rules.plan import Plan
from tests.datapath.traffic import Seen, listening, probed
from tests.spaces import LOOPBACK, NFTABLES, applied, ip, lab, observed, space, using, vm

FLOWS = [(family, protocol) for family in Family for protocol in FORWARDED]
POD_AT = dict(zip(Family, (address.ip for address in POD), strict=True))
CLIENT_AT = dict(zip(Family, (str(address.ip) for address in CLIENT), strict=True))
PATIENCE = 20.0  # seconds for an answer
SERVER = {"ipv4": "10.0.3.0/24", "ipv6": "fd10:0:3::/120"}


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[str]:
    with using(NFTABLES) as asked_for:
        yield asked_for


@pytest.fixture(scope="module")
def wired() -> Iterator[Lab]:
    with lab() as made:
        with opened(made.pod) as descriptor, inside(descriptor, made.pod):
            for state in BRIEF:  # thousands of flows that ended are not to be waded through
                sysctl.write(f"net.netfilter.nf_conntrack_{state}", "1")
            for state in ("udp_timeout", "udp_timeout_stream"):
                # An answer that comes later than this would be a flow of its own, and lost.
                sysctl.write(f"net.netfilter.nf_conntrack_{state}", str(int(PATIENCE)))
            for name in ("ipv4.icmp_ratelimit", "ipv6.icmp.ratelimit"):
                sysctl.write(f"net.{name}", "0")  # else a refusal is waited for
        yield made


BRIEF = (
    "tcp_timeout_time_wait",
    "tcp_timeout_close",
    "tcp_timeout_fin_wait",
    "tcp_timeout_last_ack",
)


@pytest.fixture(scope="module")
def second(wired: Lab) -> Iterator[str]:
    """A second guest, behind the same bridge."""
    with space() as name:
        ip(
            wired.pod,
            f"link add tap1 type veth peer name eth0 netns {name}",
            "link set tap1 master k6t-eth0 up",
            "addr add 10.0.3.1/24 dev k6t-eth0",
            "addr add fd10:0:3::1/120 dev k6t-eth0 nodad",
        )
        ip(
            name,
            "addr add 10.0.3.2/24 dev eth0",
            "addr add fd10:0:3::2/120 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.0.3.1",
            "route add ::/0 via fd10:0:3::1",
        )
        yield name


def both(ranges: list[str]) -> str:
    """As TCP and as UDP."""
    return ",".join([*ranges, *(f"{one}/udp" for one in ranges)])


def ports_of(ranges: list[str]) -> set[int]:
    ends = [[int(end) for end in one.split("-")] for one in ranges]
    return {port for first, *last in ends for port in range(first, (last or [first])[0] + 1)}


def shape(made: Lab) -> int:
    """How many maps there are."""
    return len(observed(made.pod).mapped or {})


# --------------------------------------------------------------------------- what is forwarded

# From the first port to the last; some touch, and then lead to different machines.
DESKTOP = ["1-3", "7", "65530-65535"]
DESKTOP += [f"{first}-{first + 4}" for first in range(1000, 1400, 20)]
BESIDE = ["4-6", "9-10", "65520-65529"]
BESIDE += [f"{first + 5}-{first + 7}" for first in range(1000, 1340, 20)]
MACHINES = (vm("desktop", both(DESKTOP)), vm("server", both(BESIDE), **SERVER))
PROBED = sorted(
    near
    for near in {port + step for port in ports_of([*DESKTOP, *BESIDE]) for step in (-1, 0, 1)}
    if 0 < near < 65536
)


@pytest.mark.parametrize(("family", "protocol"), FLOWS)
def test_every_port_of_many_ranges_arrives_at_its_machine_and_no_other_does(
    wired: Lab, second: str, family: Family, protocol: Protocol
) -> None:
    assert len(DESKTOP) + len(BESIDE) >= 40
    applied(wired.pod, *MACHINES)
    assert shape(wired) == 6, "of two families and two protocols, and two more from inside"
    with (
        listening(wired.guest, family, protocol, PROBED) as desktop,
        listening(second, family, protocol, PROBED) as server,
    ):
        expecting = {
            port: server[port] if port in ports_of(BESIDE) else desktop[port] for port in PROBED
        }
        answers = probed(wired.client, POD_AT[family], protocol, expecting)
        assert answers == forwarded(CLIENT_AT[family], CLIENT_AT[family])
        if family is Family.IP:
            answers = probed(wired.pod, LOOPBACK[0], protocol, expecting)
            assert answers == forwarded("10.0.2.1", "10.0.3.1")


def forwarded(to_desktop: str, to_server: str) -> dict[int, Seen | None]:
    """What each port answers, if the machines see these clients."""
    seen: dict[int, Seen | None] = dict.fromkeys(PROBED)
    seen |= {port: Seen(port, to_desktop) for port in ports_of(DESKTOP)}
    return seen | {port: Seen(port, to_server) for port in ports_of(BESIDE)}


# ----------------------------------------------------------------------------- while shapes change

CHANGES = 48
KEPT = ["5000-5009"]
FEW, MANY = ([f"{first}" for first in range(2, 2 * number, 2)] for number in (3, 150))
# A range that grows and shrinks while its first ports are asked for, in rules and in a map.
TURNS = [
    [*KEPT, "7000-7009", *MANY],
    [*KEPT, "7000-7019", *MANY],
    [*KEPT, "7000-7019", *FEW],
    [*KEPT, "7000-7009", *FEW],
]
ASKED = (5005, 7005)


def test_no_flow_notices_a_change_of_shape(wired: Lab) -> None:
    applied(wired.pod, vm("desktop", both(TURNS[-1])))
    stop = threading.Event()
    failures, rounds = list[object](), list[int]()
    servers = [(protocol, port) for protocol in FORWARDED for port in ASKED]
    with echoing(wired, wired.guest, servers), ExitStack() as stack:
        flows = {
            (address, protocol, port): stack.enter_context(
                connected(wired, wired.client, address, protocol, port)
            )
            for address in POD_AT.values()
            for protocol, port in servers
        }
        ask = threading.Thread(
            target=asking, args=(wired, flows, stop, failures, rounds), daemon=True
        )
        ask.start()
        try:
            shapes = reshaped(wired, lambda: bool(failures))
        finally:
            stop.set()
            ask.join(3 * PATIENCE)
    assert not failures
    assert shapes == [6, 6, 0, 0] * (CHANGES // 4)
    assert len(rounds) > CHANGES, f"only {len(rounds)} rounds went by"


def reshaped(made: Lab, enough: Callable[[], bool]) -> list[int]:
    """Change the shape again and again; returns how many maps there were after each change."""
    shapes: list[int] = []
    own = LiveKernel(NFTABLES)
    with closing(own), own.opened(made.pod) as namespace:
        for number in range(CHANGES):
            desired = desire([vm("desktop", both(TURNS[number % 4]))], namespace.surroundings())
            done = converge(made.pod, desired, namespace)
            assert not done.empty
            shapes.append(len(namespace.observe().mapped or {}))
            if enough():
                break
    return shapes


def asking(
    made: Lab,
    flows: dict[tuple[Address, Protocol, int], socket.socket],
    stop: threading.Event,
    failures: list[object],
    rounds: list[int],
) -> None:
    """Ask over the flows that are there, and over new ones, until told to stop. A datagram that is
    lost is never answered: to wait long for it hides nothing, and a busy machine is no loss."""
    while not stop.is_set() and not failures and len(rounds) < 20_000:
        for (address, protocol, port), flow in flows.items():
            old = answers(flow, PATIENCE)
            if old != port:
                failures.append(("old", address, protocol, port, old, len(rounds)))
            fresh = reaches(made, address, protocol, port)
            if fresh != port:
                failures.append(("new", address, protocol, port, fresh, len(rounds)))
        rounds.append(1)


# ----------------------------------------------------------------------------------- open flows


CROWD = [f"{first}-{first + 5}" for first in range(1000, 1200, 10)]


def crowd(*without: str) -> Machine:
    return vm("desktop", both([one for one in CROWD if one not in without]))


def reaches(made: Lab, address: Address, protocol: Protocol, port: int) -> int | None:
    """Who answers a new flow."""
    try:
        with connected(made, made.client, address, protocol, port) as client:
            return answers(client, PATIENCE)
    except OSError:
        return None


def answers(flow: socket.socket, seconds: float) -> int | None:
    flow.settimeout(seconds)
    try:
        return asks(flow)
    except OSError:
        return None


@pytest.mark.parametrize("family", Family)
def test_only_the_flows_of_an_element_that_goes_are_cut(wired: Lab, family: Family) -> None:
    servers = [(protocol, port) for protocol in FORWARDED for port in (1003, 1013, 1023)]
    with echoing(wired, wired.guest, servers), ExitStack() as stack:
        applied(wired.pod, crowd())
        assert shape(wired) == 6
        flows = {
            (protocol, port): stack.enter_context(
                connected(wired, wired.client, POD_AT[family], protocol, port)
            )
            for protocol, port in servers
        }
        assert {key: answers(flow, PATIENCE) for key, flow in flows.items()} == {
            (protocol, port): port for protocol, port in servers
        }
        assert_elements_only(applied(wired.pod, crowd("1010-1015")))
        cut = {
            (protocol, port)
            for (protocol, port), flow in flows.items()
            if answers(flow, 0.5 if port == 1013 else PATIENCE) is None
        }
        assert cut == {(protocol, 1013) for protocol in FORWARDED}


def assert_elements_only(plan: Plan) -> None:
    assert plan.remove
    assert plan.maps == plan.mapped.keys()
    assert not any(old.handle for old in plan.remove)


def test_a_port_that_moves_to_another_machine_takes_its_flows_along(
    wired: Lab, second: str
) -> None:
    with (
        echoing(wired, wired.guest, [(Protocol.UDP, 1013)]),
        listening(second, Family.IP, Protocol.UDP, (1013,)) as servers,
    ):
        applied(wired.pod, crowd())
        with connected(wired, wired.client, POD_AT[Family.IP], Protocol.UDP, 1013) as flow:
            assert answers(flow, PATIENCE) == 1013
            moved = vm("server", "1010-1015,1010-1015/udp", **SERVER)
            applied(wired.pod, crowd("1010-1015"), moved)
            flow.send(b"whom do I reach?")
            servers[1013].settimeout(2)
            said, client = servers[1013].recvfrom(64)
    assert said == b"whom do I reach?"
    assert client[0] == CLIENT_AT[Family.IP]
