"""What a new flow costs on its way through a node that publishes Services: 2,000 ranges over 200
machines, against one range of one. The field is that of bench/flows.py, with the node in the place
of the pod."""

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Interface, ip_address

from bench.flows import BARE, BEHIND, BESIDE, POD, ROUNDS, SENDER, Way, measured, plain
from bench.measure import Number, Table, numbers, ratio, table
from rules import nft_script
from rules.allotment import allot
from rules.model import Link, Observed, Protocol, Surroundings
from rules.node_ports import Allocations, Bands
from rules.plan import diff
from rules.ports import PortRange
from rules.publish import Node, Publishing, desire_node, faces
from rules.services import Endpoint, Publication, Service, ServicePort, ServiceType

FIRST, STEP, WIDTH, SHIFT = 10_000, 12, 6, 20_000
MACHINES, EACH = 200, 10
LEAST = 0.9  # of the rate of one range


def flows() -> Table:
    """The first packet of UDP flows to node ports."""
    ways = {name: way for name, way in plain(Protocol.UDP).items() if name in (SENDER, BARE)}
    kinds: Mapping[str, tuple[int, int, bool]] = {
        "same ports": (0, 1, False),
        "shifted": (SHIFT, 1, False),
        "two machines each": (SHIFT, 2, False),
        "two each, clients keep theirs": (SHIFT, 2, True),
    }
    for kind, (shift, behind, sticky) in kinds.items():
        ways[f"one range, {kind}"] = _way(1, 1, shift, behind, sticky=sticky)
        ways[f"2,000, {kind}"] = _way(MACHINES, EACH, shift, behind, sticky=sticky)
    taken = measured(Protocol.UDP, ways, ROUNDS)
    found = [
        Number(
            name=f"rate with 2,000 ranges, of one ({kind})",
            value=ratio(taken[f"one range, {kind}"], taken[f"2,000, {kind}"]),
            unit="x",
            least=None if kind.startswith("two each") else LEAST,
        )
        for kind in kinds
    ]
    title = "UDP: the first packet of a flow to a node port, processor time"
    return numbers(table(title, taken, "µs", BARE), found)


def _way(machines: int, each: int, shift: int, behind: int, *, sticky: bool) -> Way:
    """The last of all ranges is used; all endpoints of that one are the guest."""
    return Way(
        script=_script(machines, each, shift, behind, sticky=sticky),
        port=FIRST + STEP * (machines * each - 1) + 2,
    )


def _script(machines: int, each: int, shift: int, behind: int, *, sticky: bool) -> str:
    """What the agent would write."""
    publications = [
        _publication(number, machines, each, shift, behind, sticky=sticky)
        for number in range(machines)
    ]
    bands = Bands(PortRange(FIRST, 65535))
    allocations = allot(Allocations(bands), publications).allocations
    own = frozenset([ip_address(POD)])
    shown, _ = faces(publications, allocations, own, Publishing())
    links = (Link("eth0", (IPv4Interface(f"{POD}/24"),)),)
    routes = {
        end.address: "k6t-eth0" if str(end.address) in GUESTS else f"vm{int(end.address) % 9973}"
        for face in shown
        for end in face.endpoints
    }
    node = Node(surroundings=Surroundings(links), routes=routes)
    return nft_script.script(diff("bench", desire_node(shown, node, Publishing()), NOTHING))


GUESTS = (BEHIND, BESIDE)
NOTHING = Observed(mapped={})


def _publication(  # noqa: PLR0913 - one of so many, and of which kind
    number: int, machines: int, each: int, shift: int, behind: int, *, sticky: bool
) -> Publication:
    firsts = [FIRST + STEP * (number * each + place) for place in range(each)]
    service = Service(
        namespace="default",
        name=f"s{number}",
        type=ServiceType.NODE_PORT,
        affinity=10800 if sticky else None,
        ports=tuple(_port(first, shift) for first in firsts),
    )
    addresses = [IPv4Address(f"10.3.{number}.{place + 1}") for place in range(behind)]
    if number == machines - 1:
        addresses = [IPv4Address(at) for at in (BEHIND, BESIDE)[:behind]]
    ends = tuple(
        tuple(Endpoint(address=at, port=port.ports.first) for at in addresses)
        for port in service.ports
    )
    return Publication(service=service, endpoints=ends)


def _port(first: int, shift: int) -> ServicePort:
    ports = PortRange(first, first + WIDTH - 1)
    target = PortRange(ports.first + shift, ports.last + shift)
    return ServicePort(
        name=f"p{first}",
        protocol=Protocol.UDP,
        ports=target,
        target=target,
        node_ports=ports,
        ranged=True,
    )
