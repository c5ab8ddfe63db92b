"""Which machines are behind which Service, and where: tables, and random ones against a selection
that asks every machine of every Service."""

from __future__ import annotations

from ipaddress import ip_address
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.model import Claim, Family, Machine, Protocol, Surroundings
from rules.ports import PortRange
from rules.selection import MOST_NAMED, Selection, select
from rules.services import Endpoint, Service, ServicePort, ServiceType
from rules.values import replace
from tests.unit.samples import BRIDGE, ETH0, LO, POD, link, machine, ports, space

WEB = (("app", "web"),)
IN_POD = ["10.244.1.7:80", "fd00:10:244::7:80"]


def vm(  # noqa: PLR0913 - every option has a default
    name: str = "vm",
    *claims: str,
    at: str = "",
    labels: tuple[tuple[str, str], ...] = WEB,
    names: tuple[tuple[str, Protocol, int], ...] = (),
    netns: str = "blue",
    namespace: str = "default",
    entry: str | None = None,
) -> Machine:
    """A machine with the labels of a web server, and perhaps the addresses that it is said to have;
    without claims, it forwards everything."""
    return replace(
        machine(*claims, name=name, netns=netns, entry=entry),
        namespace=namespace,
        labels=labels,
        names=names,
        addresses=tuple(map(ip_address, at.split())),
    )


def bridged(name: str = "vm", *, at: str = "") -> Machine:
    """A machine without an interface that we forward to."""
    return replace(vm(name, at=at), masquerade=None)


def port(text: str, target: str = "", protocol: Protocol = Protocol.TCP) -> ServicePort:
    """A port that leads to the same one, to a range, or to a name."""
    goal: PortRange | str = ports(text)
    if target:
        goal = ports(target) if target[0].isdigit() else target
    return ServicePort(name="", protocol=protocol, ports=ports(text), target=goal)


def service(
    *wanted: ServicePort,
    name: str = "web",
    namespace: str = "default",
    selector: tuple[tuple[str, str], ...] = WEB,
    kind: ServiceType = ServiceType.NODE_PORT,
    headless: bool = False,
) -> Service:
    return Service(
        namespace=namespace,
        name=name,
        type=kind,
        ports=wanted or (port("80"),),
        selector=selector,
        headless=headless,
    )


def told(selection: Selection) -> list[list[str]]:
    """The endpoints of each port of the only Service: address:port, other hosts behind a dash."""
    [publication] = selection.publications
    return [
        [f"{'' if one.local else '-'}{one.address}:{one.port}" for one in ends]
        for ends in publication.endpoints
    ]


THERE = {"blue": POD}
PREFIX = "Service/default/web: "
VM = "VirtualMachine/default/vm (blue)"


# -------------------------------------------------------------------------- who is selected

LABELS = {
    "the label": (WEB, WEB, True),
    "more labels than it asks for": (WEB, (("app", "web"), ("tier", "front")), True),
    "fewer labels than it asks for": ((*WEB, ("tier", "front")), WEB, False),
    "another value": (WEB, (("app", "db"),), False),
    "another value of one of two": (
        (*WEB, ("tier", "front")),
        (*WEB, ("tier", "back")),
        False,
    ),
    "no labels": (WEB, (), False),
    "an empty value": ((("app", ""),), (("app", ""),), True),
}


@pytest.mark.parametrize(("selector", "labels", "chosen"), LABELS.values(), ids=LABELS)
def test_who_has_every_label_is_chosen(
    selector: tuple[tuple[str, str], ...], labels: tuple[tuple[str, str], ...], chosen: bool
) -> None:
    selection = select([service(selector=selector)], [vm(labels=labels)], THERE)
    assert told(selection) == [IN_POD if chosen else []]
    assert bool(selection.notes) == (not chosen)


def test_nobody_of_another_namespace_is_chosen() -> None:
    selection = select([service()], [vm(namespace="other")], THERE)
    assert told(selection) == [[]]
    assert selection.notes == (PREFIX + "no machine in its namespace has the labels app=web",)


def test_a_service_that_selects_nobody_says_so() -> None:
    selection = select([service(port("80"), port("90"), selector=())], [vm()], THERE)
    assert told(selection) == [[], []]
    assert selection.notes == (PREFIX + "it has no selector, so nothing is behind it",)


UNPUBLISHED = {
    "a name": (service(kind=ServiceType.EXTERNAL_NAME), "it only stands for a name"),
    "headless": (service(headless=True, kind=ServiceType.CLUSTER_IP), "it is headless"),
    "no ports": (replace(service(), ports=()), "it has no ports"),
}


@pytest.mark.parametrize(("one", "why"), UNPUBLISHED.values(), ids=UNPUBLISHED)
def test_what_cannot_be_published_is_none(one: Service, why: str) -> None:
    selection = select([one], [vm()], THERE)
    assert selection == Selection(notes=(f"{PREFIX}{why}, so nothing is published",))


def test_without_services_nobody_is_looked_at() -> None:
    assert select([], [vm()], THERE) == Selection()


# -------------------------------------------------------------------------- where they are

TWO = space(LO, link("eth0", "10.0.0.20/24", "10.0.0.3/24", "fd00::20/64", "fd00::3/64"), BRIDGE)
ROUTED = space(LO, link("ens3", "10.0.0.3/24"), BRIDGE, default="ens3")
WHERE: dict[str, tuple[Machine, Surroundings, list[str], str]] = {
    "in a pod": (vm(), POD, IN_POD, ""),
    "behind one family": (vm(), space(link("eth0", "10.0.0.3/24")), ["10.0.0.3:80"], ""),
    "at the first of several addresses": (vm(), TWO, ["10.0.0.3:80", "fd00::3:80"], ""),
    "behind the default route": (vm(), ROUTED, ["10.0.0.3:80"], ""),
    "behind the link that is named": (
        vm(entry="ens3"),
        space(ETH0, link("ens3", "10.0.0.3/24")),
        ["10.0.0.3:80"],
        "",
    ),
    "behind a link that is not there": (
        vm(entry="ens4"),
        POD,
        [],
        f"it waits for a link with a global address at {VM}",
    ),
    "behind a link without an address": (
        vm(),
        space(link("eth0", "fe80::7/64", "169.254.1.1/16"), BRIDGE),
        [],
        f"it waits for a link with a global address at {VM}",
    ),
    "where it is said to be": (vm(at="192.0.2.9"), POD, ["192.0.2.9:80"], ""),
    "not masqueraded": (
        bridged(),
        POD,
        [],
        f"it needs portranger.io/address, as there is no masquerade interface, on {VM}",
    ),
    "not masqueraded and said": (bridged(at="192.0.2.9"), POD, ["192.0.2.9:80"], ""),
}


@pytest.mark.parametrize(("one", "around", "expected", "note"), WHERE.values(), ids=WHERE)
def test_where_the_node_reaches_a_machine(
    one: Machine, around: Surroundings, expected: list[str], note: str
) -> None:
    selection = select([service()], [one], {"blue": around})
    assert told(selection) == [expected]
    assert selection.notes == ((PREFIX + note,) if note else ())


UNKNOWN = {
    "absent": (vm(), {}, (), [], f"it waits for the namespace of {VM}", ""),
    "absent, and said": (
        vm(at="192.0.2.9 fd00::9"),
        {},
        (),
        ["-192.0.2.9:80", "-fd00::9:80"],
        "",
        "",
    ),
    "unknown": (vm(), {}, ("blue",), [], "", f"nobody could look into the namespace of {VM}"),
    "unknown, and said": (vm(at="192.0.2.9"), {}, ("blue",), ["192.0.2.9:80"], "", ""),
    "nobody to ask": (
        vm(),
        None,
        (),
        [],
        f"it is looked up on the node where to reach {VM}",
        "",
    ),
    "nobody to ask, and said": (vm(at="192.0.2.9"), None, (), ["192.0.2.9:80"], "", ""),
    "another is unknown": (vm(), THERE, ("red",), IN_POD, "", ""),
}


@pytest.mark.parametrize(
    ("one", "surroundings", "unknown", "expected", "note", "pending"),
    UNKNOWN.values(),
    ids=UNKNOWN,
)
def test_what_cannot_be_looked_at(  # noqa: PLR0913, PLR0917 - the columns of the table
    one: Machine,
    surroundings: dict[str, Surroundings] | None,
    unknown: tuple[str, ...],
    expected: list[str],
    note: str,
    pending: str,
) -> None:
    selection = select([service()], [one], surroundings, unknown)
    assert told(selection) == [expected]
    assert selection.notes == ((PREFIX + note,) if note else ())
    assert selection.publications[0].pending == pending


def test_one_machine_that_is_not_known_leaves_the_whole_service_open() -> None:
    """Else its flows would go to the others, and come back later."""
    machines = [vm("a", netns="red"), vm("b"), vm("c", at="192.0.2.9", netns="red")]
    wanted = [service(port("80"), port("90")), service(selector=(("app", "db"),), name="db")]
    selection = select(wanted, machines, THERE, ["red"])
    assert [str(one.service) for one in selection.publications] == [
        "Service/default/db",
        "Service/default/web",
    ]
    db, web = selection.publications
    assert web.endpoints == ((), ())
    assert web.pending == "nobody could look into the namespace of VirtualMachine/default/a (red)"
    assert not db.pending


def test_endpoints_are_in_the_order_of_their_addresses() -> None:
    at = ["10.0.0.9", "10.0.0.10", "9.0.0.11", "fd00::2", "1::9"]
    machines = [vm(f"vm{n}", at=one) for n, one in enumerate(at)]
    expected = [f"{one}:80" for one in (at[2], at[0], at[1], at[4], at[3])]
    assert told(select([service()], machines, {})) == [[f"-{one}" for one in expected]]
    assert told(select([service()], machines[::-1], THERE)) == [expected]


def test_machines_at_one_address_are_one_endpoint() -> None:
    machines = [vm("a", "tcp 80"), vm("b", "tcp 90")]
    selection = select([service(port("80"), port("90"))], machines, THERE)
    assert told(selection) == [IN_POD, [one.replace(":80", ":90") for one in IN_POD]]
    assert not selection.notes, "each forwards what the other does not"


def test_what_one_of_two_at_an_address_has_here_is_here() -> None:
    for machines in (
        [vm("a", at="10.0.0.1"), vm("b", at="10.0.0.1", netns="red")],
        [vm("a", at="10.0.0.1", netns="red"), vm("b", at="10.0.0.1")],
    ):
        assert told(select([service()], machines, THERE)) == [["10.0.0.1:80"]]


# -------------------------------------------------------------------------- at which ports

NAMES = (("web", Protocol.TCP, 8080), ("dns", Protocol.UDP, 53), ("web", Protocol.UDP, 4433))
TARGETS = {
    "the same": (port("80"), ["10.0.0.1:80"]),
    "another": (port("80", "8080"), ["10.0.0.1:8080"]),
    "a range": (port("1000-1999", "5000-5999"), ["10.0.0.1:5000"]),
    "a name": (port("80", "web"), ["10.0.0.1:8080"]),
    "a name of another protocol": (port("80", "web", Protocol.UDP), ["10.0.0.1:4433"]),
}


@pytest.mark.parametrize(("wanted", "expected"), TARGETS.values(), ids=TARGETS)
def test_where_a_port_leads(wanted: ServicePort, expected: list[str]) -> None:
    selection = select([service(wanted)], [vm(at="10.0.0.1", names=NAMES)], THERE)
    assert told(selection) == [expected]
    assert not selection.notes


def test_a_name_is_another_port_on_each_machine() -> None:
    machines = [
        vm("a", at="10.0.0.1", names=(("web", Protocol.TCP, 8080),)),
        vm("b", at="10.0.0.2", names=(("web", Protocol.TCP, 80),)),
        vm("c", at="10.0.0.3", names=(("web", Protocol.UDP, 80),)),
        vm("d", at="10.0.0.1", names=(("web", Protocol.TCP, 443),)),
        vm("e", at="10.0.0.1", names=(("web", Protocol.TCP, 443),)),
    ]
    selection = select([service(port("80", "web"), port("81"))], machines, THERE)
    assert told(selection) == [
        ["10.0.0.1:443", "10.0.0.1:8080", "10.0.0.2:80"],
        ["10.0.0.1:81", "10.0.0.2:81", "10.0.0.3:81"],
    ]
    assert selection.notes == (
        PREFIX + "there is no tcp port named 'web' on VirtualMachine/default/c (blue)",
    )


TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
NOWHERE: dict[str, tuple[Machine, list[ServicePort], str]] = {
    "everything is forwarded": (vm(), [port("80"), port("81", "", SCTP)], ""),
    "it is forwarded": (vm("vm", "tcp 80"), [port("80")], ""),
    "the target is forwarded": (vm("vm", "tcp 8000-8080"), [port("1-81", "8000-8080")], ""),
    "in two ranges that touch": (vm("vm", "tcp 80-89", "tcp 90-99"), [port("85-95")], ""),
    "it is not forwarded": (vm("vm", "tcp 81"), [port("80")], "tcp 80"),
    "the target is not": (vm("vm", "tcp 80"), [port("80", "8080")], "tcp 8080"),
    "of another protocol": (vm("vm", "udp 80"), [port("80")], "tcp 80"),
    "SCTP is never declared": (vm("vm", "tcp 80"), [port("80", "", SCTP)], "sctp 80"),
    "in part": (vm("vm", "tcp 82-83"), [port("80-89")], "tcp 80-81, tcp 84-89"),
    "but for the last": (vm("vm", "tcp 80-88"), [port("80-89")], "tcp 89"),
    "but for the first": (vm("vm", "tcp 81-89"), [port("80-89")], "tcp 80"),
    "of several ports": (
        vm("vm", "tcp 80"),
        [port("80"), port("82"), port("81"), port("90", "", UDP)],
        "tcp 81-82, udp 90",
    ),
    "of more ports than one wants to read": (
        vm("vm", "udp 1"),
        [port(str(number)) for number in range(10, 30, 2)],
        "tcp 10, tcp 12, tcp 14, tcp 16, tcp 18 and 5 more",
    ),
    "a name of another interface": (
        vm("vm", "tcp 80", names=(("web", TCP, 8080),)),
        [port("80", "web")],
        "tcp 8080",
    ),
    "nothing is to be forwarded": (bridged(at="10.0.0.1"), [port("80")], ""),
}


@pytest.mark.parametrize(("one", "wanted", "lost"), NOWHERE.values(), ids=NOWHERE)
def test_what_leads_nowhere_is_told(one: Machine, wanted: list[ServicePort], lost: str) -> None:
    selection = select([service(*wanted)], [one], THERE)
    note = f"{PREFIX}{lost} not forwarded by {VM}"
    assert selection.notes == ((note,) if lost else ())
    assert all(told(selection)), "it is for the machine to refuse"


def test_ports_of_the_pod_itself_lead_nowhere_either() -> None:
    one = vm()
    assert one.masquerade
    reserved = (Claim(Protocol.TCP, ports("15001")),)
    one = replace(one, masquerade=replace(one.masquerade, reserved=reserved))
    [note] = select([service(port("15000-15002"))], [one], THERE).notes
    assert note == f"{PREFIX}tcp 15001 not forwarded by {VM}"


def test_a_neighbour_without_masquerade_forwards_nothing_for_others() -> None:
    [note] = select([service()], [vm("vm", "tcp 81"), bridged("z", at="10.0.0.1")], THERE).notes
    assert note == f"{PREFIX}tcp 80 not forwarded by {VM}"


def test_many_with_one_trouble_are_one_note() -> None:
    machines = [vm(f"vm{number}", netns=f"n{number}") for number in range(MOST_NAMED + 3)]
    [note] = select([service()], machines, {}).notes
    assert note == (
        PREFIX
        + "it waits for the namespace of "
        + ", ".join(f"VirtualMachine/default/vm{n} (n{n})" for n in range(MOST_NAMED))
        + " and 3 more"
    )


# -------------------------------------------------------------------------- however many

PAIRS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=3).map(
    lambda pairs: tuple(sorted(dict(pairs).items()))
)
SPACES = st.sampled_from(["default", "other"])
ADDRESSES = {"n0": "10.0.0.9/24", "n1": "10.0.0.10/24", "n2": "fd00::1/64", "n3": "fe80::1/64"}
AROUND = {name: space(LO, link("eth0", one)) for name, one in ADDRESSES.items()}


@st.composite
def some_machines(draw: st.DrawFn) -> list[Machine]:
    drawn = draw(
        st.lists(
            st.tuples(
                SPACES,
                PAIRS,
                st.sampled_from([*ADDRESSES, "absent"]),
                st.sampled_from(["", "192.0.2.1", "192.0.2.2 fd00::2"]),
                st.sampled_from([(), (("web", TCP, 8080),), (("web", TCP, 80),)]),
            ),
            max_size=8,
        )
    )
    return [
        vm(f"vm{number}", namespace=space, labels=labels, netns=netns, at=at, names=names)
        for number, (space, labels, netns, at, names) in enumerate(drawn)
    ]


def naive(one: Service, machines: list[Machine], port: ServicePort) -> set[tuple[str, int]]:
    """What is behind a port, by asking everybody."""
    found = set()
    for other in machines:
        chosen = other.namespace == one.namespace and set(one.selector) <= set(other.labels)
        if not (chosen and one.selector):
            continue
        addresses = [str(address) for address in other.addresses]
        if not addresses and other.netns in ("n0", "n1", "n2"):
            addresses = [ADDRESSES[other.netns].partition("/")[0]]
        numbers = [port.target.first] if isinstance(port.target, PortRange) else []
        numbers += [number for name, _, number in other.names if name == port.target]
        found |= {(address, number) for address in addresses for number in numbers}
    return found


@given(some_machines(), st.lists(st.tuples(SPACES, PAIRS), max_size=5), st.randoms())
def test_as_many_as_asking_everybody_finds(
    machines: list[Machine], wanted: list[tuple[str, tuple[tuple[str, str], ...]]], random: Random
) -> None:
    services = [
        service(port("1", "80-80"), port("2", "web"), name=f"s{n}", namespace=at, selector=selector)
        for n, (at, selector) in enumerate(wanted)
    ]
    selection = select(services, machines, AROUND)
    assert len(selection.publications) == len(services)
    for publication in selection.publications:
        for one, ends in zip(publication.service.ports, publication.endpoints, strict=True):
            found = [(str(end.address), end.port) for end in ends]
            assert len(set(found)) == len(found)
            assert set(found) == naive(publication.service, machines, one)
            assert [_order(end) for end in ends] == sorted(map(_order, ends))
    random.shuffle(machines)
    assert select(services[::-1], machines, AROUND) == selection


def _order(end: Endpoint) -> tuple[bool, int, int]:
    return Family.of(end.address) is Family.IP6, int(end.address), end.port


def test_thousands_of_services_over_a_thousand_machines_are_soon_told_apart() -> None:
    """Everybody has the first label; asking each of each would be two million questions."""
    count, asked = 1000, 0

    class Label(str):
        """A value that counts how often it is compared."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal asked
            asked += 1
            return str.__eq__(self, other)

    machines = [
        vm(
            f"vm{number}",
            f"tcp {number + 1}",
            netns=f"n{number}",
            labels=(("app", "web"), ("number", Label(number))),
        )
        for number in range(count)
    ]
    around = dict.fromkeys((one.netns for one in machines), POD)
    services = [
        service(
            port(str(n % count + 1)), name=f"s{n}", selector=(*WEB, ("number", Label(n % count)))
        )
        for n in range(2 * count)
    ]
    selection = select(services, machines, around)
    assert asked < 20 * len(services)
    assert len(selection.publications) == 2 * count
    assert all(len(one.endpoints[0]) == 2 for one in selection.publications)
    assert not selection.notes
