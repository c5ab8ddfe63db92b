"""What Services become on a node: which faces they show, who is refused for whom, and the rules,
settings and words that come of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from itertools import chain
from typing import Any

import pytest

from rules.allotment import allot, holder_of
from rules.desired import label
from rules.model import OWN, Chain, Desired, Detour, Family, Pending, Protocol, Rule, Share, Sysctl
from rules.node_ports import Allocations, Bands
from rules.occupied import Listener, Occupied, Translation
from rules.ports import ALL_PORTS, PortRange
from rules.publish import (
    FEWEST,
    Face,
    Node,
    Publishing,
    desire_node,
    faces,
)
from rules.service_conflicts import newcomers, refuse
from rules.services import Endpoint, Publication, Service, ServicePort, ServiceType
from rules.values import replace
from tests.unit.samples import LO, link, ports, space

NODE4, NODE6 = ip_address("198.51.100.2"), ip_address("2001:db8:5::2")
OWN4, OWN6 = OWN[Family.IP], OWN[Family.IP6]
VIP = ip_address("203.0.113.7")
BANDS = Bands(PortRange(30000, 32767))
CLUSTER_IP, NODE_PORT, LOAD_BALANCER = (
    ServiceType.CLUSTER_IP,
    ServiceType.NODE_PORT,
    ServiceType.LOAD_BALANCER,
)
AROUND = space(LO, link("eth0", f"{NODE4}/24", f"{NODE6}/64", "fe80::2/64"), default="eth0")
OWN_ADDRESSES = frozenset({NODE4, NODE6})
PLAINLY = Publishing()


def port(text: str) -> ServicePort:
    """`sip udp 5060`, or with where it leads and its node port: `rtp udp 100-109>200@30100`."""
    *name, protocol, numbers = text.split()
    numbers, _, given = numbers.partition("@")
    numbers, _, target = numbers.partition(">")
    own = ports(numbers)
    return ServicePort(
        name=" ".join(name),
        protocol=Protocol(protocol),
        ports=own,
        target=_run(int(target or own.first), len(own)),
        node_ports=_run(int(given), len(own)) if given else None,
        ranged=len(own) > 1,
    )


def _run(first: int, count: int) -> PortRange:
    return PortRange(first, first + count - 1)


def service(
    *texts: str, name: str = "phone", kind: ServiceType = NODE_PORT, **more: Any
) -> Service:
    return Service(namespace="shop", name=name, type=kind, ports=tuple(map(port, texts)), **more)


def endpoint(text: str, port: int) -> Endpoint:
    """At that address; `10.1.0.11 away` is on another node."""
    address, _, away = text.partition(" ")
    return Endpoint(address=ip_address(address), port=port, local=not away)


def behind(of: Service, *endpoints: str, pending: str = "") -> Publication:
    """All ports of a Service lead to these, each to the same ports of all."""
    return Publication(
        service=of,
        endpoints=tuple(
            tuple(endpoint(one, _first(port)) for one in endpoints) for port in of.ports
        ),
        pending=pending,
    )


def _first(port: ServicePort) -> int:
    assert isinstance(port.target, PortRange)
    return port.target.first


def held(*publications: Publication) -> Allocations:
    """What they wish for, or are given."""
    return allot(Allocations(BANDS), publications).allocations


def seen(
    *publications: Publication,
    own: frozenset[Any] | None = OWN_ADDRESSES,
    how: Publishing = PLAINLY,
    given: Allocations | None = None,
) -> tuple[list[Face], list[str]]:
    known = held(*publications) if given is None else given
    return faces(publications, known, own, how)


def words(found: Iterable[Face]) -> list[str]:
    """Where each is, and who is behind it."""
    return [
        f"{one.family.value} {one} > " + " ".join(f"{e.address}:{e.port}" for e in one.endpoints)
        for one in found
    ]


def face(
    text: str = "rtp udp 30100-30109>20000",
    *endpoints: str,
    at: str = "",
    name: str = "phone",
    **more: Any,
) -> Face:
    """One that shows the ports of the text; without endpoints, there is one at 10.1.0.11."""
    shown = port(text)
    given = endpoints or ("fd01::11" if ":" in at else "10.1.0.11",)
    found = [endpoint(one, _first(shown)) for one in given]
    family = Family.of(found[0].address)
    ours = more.pop("ours", True)
    of = Service(namespace="shop", name=name, type=NODE_PORT, ports=(shown,), **more)
    return Face(
        service=of,
        port=shown,
        family=family,
        at=ip_address(at) if at else OWN[family],
        ports=shown.ports,
        endpoints=tuple(found),
        ours=ours,
    )


def node(**more: Any) -> Node:
    """It has a route by br0 to all that the tests put behind Services."""
    routes = {
        ip_address(one): "br0"
        for one in ("10.1.0.11", "10.1.0.12", "10.1.0.13", "fd01::11", "fd01::12", "fd01::13")
    }
    return Node(**{"surroundings": AROUND, "routes": routes, **more})


# ----------------------------------------------------------------------------------------- faces


BOTH = ("10.1.0.11", "fd01::11")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(service("sip udp 5060@30060", kind=CLUSTER_IP), [], id="for the cluster only"),
        pytest.param(
            service("sip udp 5060>15060@30060"),
            ["ip udp 30060 > 10.1.0.11:15060", "ip6 udp 30060 > fd01::11:15060"],
            id="a node port",
        ),
        pytest.param(
            service("rtp udp 10000-10009>20000@30100"),
            ["ip udp 30100-30109 > 10.1.0.11:20000", "ip6 udp 30100-30109 > fd01::11:20000"],
            id="a range of node ports",
        ),
        pytest.param(
            service("sip udp 5060@30060", kind=LOAD_BALANCER),
            ["ip udp 30060 > 10.1.0.11:5060", "ip6 udp 30060 > fd01::11:5060"],
            id="a load balancer has node ports, too",
        ),
        pytest.param(
            service("a tcp 80@30080", "b tcp 81", kind=LOAD_BALANCER, allocates=False),
            ["ip tcp 30080 > 10.1.0.11:80", "ip6 tcp 30080 > fd01::11:80"],
            id="without allocation, only those that are written down",
        ),
        pytest.param(
            service("sip udp 5060", kind=LOAD_BALANCER, allocates=False, ingress=(NODE4,)),
            [f"ip udp 5060 at {NODE4} > 10.1.0.11:5060"],
            id="without allocation, it is at its ingress",
        ),
        pytest.param(
            service("sip udp 5060>15060", kind=CLUSTER_IP, external=(NODE4, NODE6)),
            [
                f"ip udp 5060 at {NODE4} > 10.1.0.11:15060",
                f"ip6 udp 5060 at {NODE6} > fd01::11:15060",
            ],
            id="external addresses, each of its family",
        ),
        pytest.param(
            service("sip udp 5060@30060", external=(NODE4,), ingress=(NODE4,)),
            [
                "ip udp 30060 > 10.1.0.11:5060",
                "ip6 udp 30060 > fd01::11:5060",
                f"ip udp 5060 at {NODE4} > 10.1.0.11:5060",
            ],
            id="one address, given twice",
        ),
        pytest.param(
            service("a tcp 80-89", "b udp 80", kind=CLUSTER_IP, external=(NODE4,)),
            [f"ip tcp 80-89 at {NODE4} > 10.1.0.11:80", f"ip udp 80 at {NODE4} > 10.1.0.11:80"],
            id="all ports, in their order",
        ),
        pytest.param(
            service("sip udp 5060", kind=CLUSTER_IP, headless=True, external=(NODE4,)),
            [],
            id="headless",
        ),
        pytest.param(
            service("sip udp 5060", kind=ServiceType.EXTERNAL_NAME, external=(NODE4,)),
            [],
            id="a name",
        ),
    ],
)
def test_a_service_shows(given: Service, expected: list[str]) -> None:
    found, notes = seen(behind(given, *BOTH))
    assert words(found) == expected
    assert notes == []
    assert all(one.ours and one.service == given and one.port in given.ports for one in found)


def test_a_node_port_is_the_one_that_was_given() -> None:
    one = behind(service("rtp udp 10000-10009>20000"), "10.1.0.11")
    given = held(one)
    (ports,) = given.held.values()
    assert [(each.at, each.ports) for each in seen(one, given=given)[0]] == [(OWN4, ports)]
    assert seen(one, given=Allocations(BANDS))[0] == [], "who holds none shows none"


def test_another_protocol_may_hold_the_same_numbers() -> None:
    one = behind(service("dns udp 53@30053", "dns-tcp tcp 53@30053"), "10.1.0.11")
    assert words(seen(one)[0]) == [
        "ip udp 30053 > 10.1.0.11:53",
        "ip tcp 30053 > 10.1.0.11:53",
    ]


@pytest.mark.parametrize(
    ("address", "allowed", "own", "counts"),
    [
        pytest.param(str(NODE4), (), OWN_ADDRESSES, True, id="its own"),
        pytest.param("198.51.100.3", (), OWN_ADDRESSES, False, id="a neighbour's"),
        pytest.param("203.0.113.7", ("203.0.113.0/24",), OWN_ADDRESSES, True, id="allowed"),
        pytest.param("203.0.114.7", ("203.0.113.0/24",), OWN_ADDRESSES, False, id="next to it"),
        pytest.param(
            "203.0.113.7", ("2001:db8::/32", "203.0.113.7/32"), OWN_ADDRESSES, True, id="2"
        ),
        pytest.param("2001:db8:9::1", ("203.0.113.0/24",), OWN_ADDRESSES, False, id="other family"),
        pytest.param("2001:db8:9::1", ("2001:db8:9::/64",), OWN_ADDRESSES, True, id="allowed, v6"),
        pytest.param("8.8.8.8", ("0.0.0.0/0",), OWN_ADDRESSES, True, id="everything allowed"),
        pytest.param("8.8.8.8", (), None, True, id="nobody to ask"),
    ],
)
@pytest.mark.parametrize("field", ["external", "ingress"])
def test_an_address_counts_where_it_is_the_nodes_or_allowed(
    field: str, address: str, allowed: tuple[str, ...], own: frozenset[Any] | None, counts: bool
) -> None:
    at = ip_address(address)
    how = Publishing(allowed=tuple(map(ip_network, allowed)))
    given: Any = {field: (at,)}
    one = service("sip udp 5060", kind=CLUSTER_IP, **given)
    found, notes = seen(behind(one, *BOTH), own=own, how=how)
    assert [one.at for one in found] == [at] * counts
    expected = f"Service/shop/phone: {at} is not the node's, and node_ports.external does not allow"
    assert [note.removesuffix(" it") for note in notes] == [expected] * (not counts)


def test_node_ports_are_at_the_configured_addresses_only() -> None:
    how = Publishing(addresses=(NODE4, ip_address("198.51.100.3")))
    found, _ = seen(behind(service("sip udp 5060@30060", external=(NODE6,)), *BOTH), how=how)
    assert [(str(one.at), str(one.ports)) for one in found] == [
        (str(NODE4), "30060"),
        ("198.51.100.3", "30060"),
        (str(NODE6), "5060"),
    ]


@pytest.mark.parametrize(
    ("given", "endpoints", "expected"),
    [
        pytest.param({}, ["10.1.0.11", "10.1.0.12 away"], ["10.1.0.11", "10.1.0.12"], id="any"),
        pytest.param(
            {"local": True}, ["10.1.0.11", "10.1.0.12 away"], ["10.1.0.11"], id="local ones"
        ),
        pytest.param({"local": True}, ["10.1.0.12 away"], [], id="none is local"),
        pytest.param({}, ["fd01::11"], [], id="of another family"),
        pytest.param({}, ["10.1.0.12", "10.1.0.11"], ["10.1.0.11", "10.1.0.12"], id="in order"),
        pytest.param({}, ["10.1.0.2", "10.1.0.11"], ["10.1.0.2", "10.1.0.11"], id="as numbers"),
        pytest.param({}, ["10.1.0.11", "10.1.0.11"], ["10.1.0.11"], id="one of them twice"),
    ],
)
def test_behind_a_face_are(given: Any, endpoints: list[str], expected: list[str]) -> None:
    one = behind(service("sip udp 5060@30060", **given), *endpoints)
    found = [one for one in seen(one)[0] if one.family is Family.IP]
    assert [[str(e.address) for e in each.endpoints] for each in found] == [expected] * bool(
        expected
    )


@pytest.mark.parametrize(
    ("pending", "endpoints", "notes"),
    [
        pytest.param("", [], ["Service/shop/phone/sip: nothing is behind it yet"], id="nothing"),
        pytest.param("no link yet", [], [], id="it is not known what"),
        pytest.param("", ["fd01::11"], [], id="something of the other family"),
        pytest.param("", ["10.1.0.11 away"], [], id="something on another node"),
    ],
)
def test_what_is_not_there_is_said(pending: str, endpoints: list[str], notes: list[str]) -> None:
    one = behind(service("sip udp 5060@30060", local=True), *endpoints, pending=pending)
    assert [face for face in seen(one)[0] if face.family is Family.IP] == []
    assert seen(one)[1] == notes


def test_beside_kube_proxy_only_ranges_are_ours_and_the_rest_is_held() -> None:
    how = Publishing(ranges_only=True)
    one = behind(service("rtp udp 100-109@30100", "sip udp 5060@30060"), "10.1.0.11")
    found, notes = seen(one, how=how)
    assert [(str(each), each.ours) for each in found] == [
        ("udp 30100-30109", True),
        ("udp 30060", False),
        ("udp 30060", False),  # of IPv6: kube-proxy holds it, whatever is behind it
    ]
    assert notes == []
    nobody = behind(service("rtp udp 100-109@30100", "sip udp 5060@30060"))
    found, notes = seen(nobody, how=how)
    assert [(str(each), each.ours) for each in found] == [("udp 30060", False)] * 2
    assert notes == ["Service/shop/phone/rtp: nothing is behind it yet"]


def test_a_range_of_one_is_ours_beside_kube_proxy_if_it_is_written_as_one() -> None:
    given = service("sip udp 5060@30060")
    ranged = replace(given, ports=(replace(given.ports[0], ranged=True),))
    (one, *_), _ = seen(behind(ranged, "10.1.0.11"), how=Publishing(ranges_only=True))
    assert one.ours


def test_a_face_is_named_after_its_port_and_owned_by_a_label() -> None:
    assert face("rtp udp 1").name == "Service/shop/phone/rtp"
    assert face("udp 1").name == "Service/shop/phone"
    long = face("rtp udp 1", name="x" * 200)
    assert long.owner == label(long.name) != long.name
    assert (str(face("rtp udp 1-2")), str(face("rtp udp 1-2", at="::7"))) == (
        "udp 1-2",
        "udp 1-2 at ::7",
    )


# ---------------------------------------------------------------------------------------- refuse


def rules_of(*shown: Face) -> frozenset[Rule]:
    return desire_node(shown, None, PLAINLY).rules


def listener(text: str, at: str = "", family: Family = Family.IP, **more: Any) -> Listener:
    protocol, number = text.split()
    return Listener(
        protocol=Protocol(protocol),
        family=family,
        address=ip_address(at) if at else None,
        port=int(number),
        **more,
    )


NGINX: Any = {"pid": 7, "program": "nginx"}


@pytest.mark.parametrize(
    ("one", "occupied", "refused"),
    [
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(listeners=(listener("tcp 8004", **NGINX),)),
            ["tcp 8004 is left out: nginx (pid 7) listens on tcp 8004"],
            id="a listener",
        ),
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(listeners=(listener("tcp 8000", **NGINX), listener("tcp 8009"))),
            [
                "tcp 8000 is left out: nginx (pid 7) listens on tcp 8000",
                "tcp 8009 is left out: somebody listens on tcp 8009",
            ],
            id="two listeners, each",
        ),
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(listeners=(listener("udp 8004"), listener("tcp 7999"), listener("tcp 8010"))),
            [],
            id="listeners of other ports",
        ),
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(listeners=(listener("tcp 8004", "127.0.0.1"),)),
            [],
            id="a listener on loopback",
        ),
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(listeners=(listener("tcp 8004", family=Family.IP6),)),
            [],
            id="a listener of the other family",
        ),
        pytest.param(
            face("a tcp 8000-8009", at=str(VIP)),
            Occupied(listeners=(listener("tcp 8004"),), own=OWN_ADDRESSES),
            [],
            id="an address that is not the node's",
        ),
        pytest.param(
            face("a tcp 8000-8009", at=str(NODE4)),
            Occupied(listeners=(listener("tcp 8004"),), own=OWN_ADDRESSES),
            [f"tcp 8004 at {NODE4} is left out: somebody listens on tcp 8004"],
            id="an address that is the node's",
        ),
        pytest.param(
            face("a tcp 8000-8009"),
            Occupied(
                translations=(
                    Translation(
                        where="table ip docker",
                        protocol=Protocol.TCP,
                        ports=(PortRange(8009, 8009),),
                    ),
                )
            ),
            ["tcp 8009 is left out: table ip docker translates tcp 8009"],
            id="a translation of somebody else",
        ),
    ],
)
def test_a_face_that_meets_somebody_is_refused(
    one: Face, occupied: Occupied, refused: list[str]
) -> None:
    kept, found, notes = refuse([one], [], occupied)
    assert found == [Pending("Service/shop/phone/a", why, "left out" in why) for why in refused]
    left = {int(why.split()[1]) for why in refused}
    shown = {port for piece in kept for port in range(piece.ports.first, piece.ports.last + 1)}
    assert shown == {*range(8000, 8010)} - left
    assert notes == []
    assert kept == [one] or refused


def translation(text: str, where: str = "table ip nat, chain DOCKER", **more: Any) -> Translation:
    protocol, numbers = text.split()
    return Translation(where=where, protocol=Protocol(protocol), ports=(ports(numbers),), **more)


def shown_by(kept: Iterable[Face]) -> list[str]:
    return [f"{one.ports}>{one.endpoints[0].port}" for one in kept]


@pytest.mark.parametrize("is_live", [False, True])
def test_a_port_that_somebody_translates_is_left_out_and_the_rest_leads_where_it_did(
    is_live: bool,
) -> None:
    one = face("a tcp 30000-30009>20000")
    occupied = Occupied(translations=(translation("tcp 30004"), translation("udp 30005")))
    kept, refused, notes = refuse([one], rules_of(one) if is_live else [], occupied)
    assert shown_by(kept) == ["30000-30003>20000", "30005-30009>20005"]
    assert [str(one.reason) for one in refused] == [
        "tcp 30004 is left out: table ip nat, chain DOCKER translates tcp 30004"
    ]
    assert notes == []
    again, told, _ = refuse([one], [*desire_node(kept, None, PLAINLY).rules], occupied)
    assert (again, told) == (kept, refused), "which is stable"


def test_what_is_all_translated_is_refused() -> None:
    one = face("a tcp 30000-30009")
    kept, refused, _ = refuse(
        [one], rules_of(one), Occupied(translations=(translation("tcp 29000-31000"),))
    )
    assert kept == []
    assert [one.reason for one in refused] == [
        "tcp 30000-30009 cannot be published: table ip nat, chain DOCKER translates tcp 29000-31000"
    ]


def test_the_first_port_of_a_run_is_its_proxys() -> None:
    """In a cluster the API server gave it to the Service, and kube-proxy serves it."""
    one = face("a tcp 30000-30009")
    theirs = translation("tcp 30000", "table ip nat, chain KUBE-NODEPORTS")
    assert refuse([one], [], Occupied(translations=(theirs,)), proxied=True) == ([one], [], [])
    wide = replace(theirs, ports=(ports("30000-30001"),))
    kept, _, _ = refuse([one], [], Occupied(translations=(wide,)), proxied=True)
    assert shown_by(kept) == ["30000>30000", "30002-30009>30002"]


def test_while_a_table_cannot_be_read_nothing_new_is_published_and_what_is_live_stays() -> None:
    old, new = face("a tcp 30000-30009", name="old"), face("a tcp 31000", name="new")
    occupied = Occupied(unreadable=("table ip theirs: it holds too much",))
    kept, refused, notes = refuse([old, new], rules_of(old), occupied)
    assert kept == [old]
    words = "a table of others may translate it, and cannot be read: table ip theirs"
    assert [one.owner for one in refused] == ["Service/shop/new/a"]
    assert refused[0].reason.startswith(f"tcp 31000 cannot be published: {words}")
    assert [words in note for note in notes] == [True]
    grown = face("a tcp 30000-30019", name="old")
    kept, refused, _ = refuse([grown], rules_of(old), occupied)
    assert shown_by(kept) == ["30000-30009>30000"]
    assert refused[0].reason.startswith(f"tcp 30010-30019 is left out: {words}")


def test_what_is_live_is_not_taken_away_by_who_comes_later_but_said() -> None:
    one = face("a tcp 8000-8009")
    occupied = Occupied(listeners=(listener("tcp 8004", **NGINX), listener("tcp 8005")))
    kept, refused, notes = refuse([one], rules_of(one), occupied)
    assert (kept, refused) == ([one], [])
    assert notes == [
        "Service/shop/phone/a: tcp 8000-8009 is published, but nginx (pid 7) listens on tcp 8004",
        "Service/shop/phone/a: tcp 8000-8009 is published, but somebody listens on tcp 8005",
    ]
    for other in (
        replace(one, at=NODE4),
        face("b tcp 8000-8009"),
        face("a tcp 8000-8009", name="other"),
    ):
        shown = shown_by(refuse([other], rules_of(one), occupied)[0])
        assert shown == ["8000-8003>8000", "8006-8009>8006"], f"{other} is not what is live"


MEETINGS = [
    ("a tcp 8000-8009", "", "b tcp 8009-8019", "", True),
    ("a tcp 8000-8009", "", "b tcp 8010-8019", "", False),
    ("a tcp 200-300", "", "b tcp 290-600", "", True),
    ("a tcp 1-65535", "", "b tcp 40000", "", True),
    ("a tcp 255", "", "b tcp 256-65535", "", False),
    ("a tcp 8000-8009", "", "b udp 8000-8009", "", False),
    ("a tcp 8000-8009", "", "b tcp 8000-8009", str(NODE4), True),
    ("a tcp 8000-8009", "", "b tcp 8000-8009", str(VIP), False),
    ("a tcp 8000-8009", str(VIP), "b tcp 8005", str(VIP), True),
    ("a tcp 8000-8009", str(VIP), "b tcp 8005", str(NODE4), False),
    ("a tcp 8000-8009", str(NODE6), "b tcp 8005", "", False),
    ("a tcp 8000-8009", str(NODE6), "b tcp 8005", "::", True),
]


@pytest.mark.parametrize(("one", "at", "other", "there", "meet"), MEETINGS)
@pytest.mark.parametrize("turned", [False, True])
def test_two_services_meet_where_a_packet_would_be_for_both(  # noqa: PLR0913 - a table
    one: str, at: str, other: str, there: str, *, meet: bool, turned: bool
) -> None:
    first, second = face(one, at=at, name="one"), face(other, at=there, name="other")
    occupied = Occupied(own=OWN_ADDRESSES)
    kept, refused, notes = refuse([second, first] if turned else [first, second], [], occupied)
    assert notes == []
    if not meet:
        assert (sorted(map(str, kept)), refused) == (sorted(map(str, [first, second])), [])
        return
    assert kept == [first]
    assert refused == [
        Pending("Service/shop/other/b", f"{second} is held by Service/shop/one/a ({first})")
    ]


def test_without_a_node_any_address_may_be_its_own() -> None:
    first, second = face("a tcp 80", name="one"), face("a tcp 80", at=str(VIP), name="two")
    assert refuse([first, second], [], Occupied())[0] == [first]
    assert refuse([first, second], [], Occupied(own=OWN_ADDRESSES))[0] == [first, second]


def test_who_is_live_first_keeps_whatever_its_name() -> None:
    early, late = face("a tcp 80", name="zzz"), face("a tcp 80-89", name="aaa")
    kept, refused, _ = refuse([late, early], rules_of(early), Occupied())
    assert kept == [early]
    assert refused == [
        Pending("Service/shop/aaa/a", "tcp 80-89 is held by Service/shop/zzz/a (tcp 80)")
    ]
    assert refuse([late, early], [], Occupied())[0] == [late], "by their names, else"


def test_one_face_at_several_addresses_of_the_node_is_no_conflict() -> None:
    given = service("a tcp 8080@8080", external=(NODE4,))
    here = Allocations(Bands(ALL_PORTS), {holder_of(given, given.ports[0]): PortRange(8080, 8080)})
    found, _ = seen(behind(given, "10.1.0.11"), given=here)
    assert [str(one) for one in found] == ["tcp 8080", f"tcp 8080 at {NODE4}"]
    assert refuse(found, [], Occupied(own=OWN_ADDRESSES))[:2] == (found, [])


def test_one_address_that_is_configured_and_external_is_one_face() -> None:
    given = service("a tcp 30080@30080", external=(NODE4,))
    found, _ = seen(behind(given, "10.1.0.11"), how=Publishing(addresses=(NODE4, NODE4)))
    assert [str(one) for one in found] == [f"tcp 30080 at {NODE4}"]
    assert refuse(found, [], Occupied(own=OWN_ADDRESSES)) == (found, [], [])


def test_a_service_can_be_in_its_own_way() -> None:
    """Its node ports at one address reach into its own ports there, which lead elsewhere."""
    given = service("a tcp 30005-30014@30000", external=(NODE4,))
    found, _ = seen(behind(given, "10.1.0.11"))
    kept, refused, _ = refuse(found, [], Occupied(own=OWN_ADDRESSES))
    assert [str(one) for one in kept] == ["tcp 30000-30009"]
    assert [one.reason for one in refused] == [
        f"tcp 30005-30014 at {NODE4} is held by Service/shop/phone/a (tcp 30000-30009)"
    ]


def test_what_kube_proxy_serves_is_held_against_everybody() -> None:
    theirs = face("web tcp 30005", name="zzz", ours=False)
    ours = face("a tcp 30000-30009", name="aaa")
    kept, refused, notes = refuse([ours, theirs], rules_of(ours), Occupied())
    assert (kept, notes) == ([], [])
    assert refused == [
        Pending("Service/shop/aaa/a", "tcp 30000-30009 is held by Service/shop/zzz/web (tcp 30005)")
    ]


def test_what_kube_proxy_serves_is_never_kept_nor_refused() -> None:
    theirs = [face("web tcp 30005", name=name, ours=False) for name in ("one", "two")]
    occupied = Occupied(listeners=(listener("tcp 30005"),))
    assert refuse(theirs, [], occupied) == ([], [], [])


def test_who_is_refused_stands_in_nobodys_way() -> None:
    first, second = face("a tcp 80", name="one"), face("a tcp 80-99", name="two")
    occupied = Occupied(listeners=(listener("tcp 80"),))
    assert shown_by(refuse([first, second], [], occupied)[0]) == ["81-99>81"]


def test_one_reason_is_told_once() -> None:
    at = [face("a tcp 80", at=str(one)) for one in (NODE4, NODE6)]
    occupied = Occupied(listeners=(listener("tcp 80"),))
    _, refused, _ = refuse([*at, at[0]], [], occupied)
    assert len(refused) == len(set(refused))


def test_newcomers_are_ours_and_not_live() -> None:
    old, new = face("a tcp 80", name="old"), face("a tcp 81", name="new")
    theirs = face("a tcp 82", name="theirs", ours=False)
    assert newcomers([old, new, theirs], rules_of(old)) == [new]


# ----------------------------------------------------------------------------------------- rules


def rule(text: str, to: str, *, at: str = "", owner: str = "", **more: Any) -> Rule:
    protocol, numbers = text.split()
    target = ip_address(to)
    family = Family.of(target)
    return Rule(
        **{
            "chain": Chain.PREROUTING,
            "family": family,
            "owner": owner or "Service/shop/phone/rtp",
            "protocol": Protocol(protocol),
            "ports": ports(numbers),
            "destination": ip_address(at) if at else OWN[family],
            "to": target,
            **more,
        }
    )


def both(*rules: Rule) -> frozenset[Rule]:
    """What comes in, and what the node itself sends."""
    return frozenset(chain(rules, (replace(one, chain=Chain.OUTPUT) for one in rules)))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param(
            face("rtp udp 100-109"), [rule("udp 100-109", "10.1.0.11")], id="to the same ports"
        ),
        pytest.param(
            face("rtp udp 100-109>200"),
            [rule("udp 100-109", "10.1.0.11", to_port=200)],
            id="shifted",
        ),
        pytest.param(
            face("rtp sctp 100>99", at="2001:db8::7"),
            [rule("sctp 100", "fd01::11", at="2001:db8::7", to_port=99)],
            id="one port, IPv6, SCTP, at an address",
        ),
        pytest.param(
            face("rtp udp 100", "10.1.0.11", "10.1.0.12"),
            [
                rule("udp 100", "10.1.0.11", share=Share(2, (0,))),
                rule("udp 100", "10.1.0.12", share=Share(2, (1,))),
            ],
            id="two endpoints",
        ),
        pytest.param(
            face("rtp udp 100>200", "10.1.0.11", "10.1.0.12", "10.1.0.13"),
            [
                rule("udp 100", "10.1.0.11", share=Share(3, (0,)), to_port=200),
                rule("udp 100", "10.1.0.12", share=Share(3, (1,)), to_port=200),
                rule("udp 100", "10.1.0.13", share=Share(3, (2,)), to_port=200),
            ],
            id="three endpoints, shifted",
        ),
        pytest.param(
            face("rtp udp 100", affinity=60), [rule("udp 100", "10.1.0.11")], id="one, sticky"
        ),
    ],
)
def test_the_rules_of_a_face(shown: Face, expected: list[Rule]) -> None:
    assert rules_of(shown) == both(*expected)


def test_endpoints_may_have_ports_of_their_own() -> None:
    """Two pods that call different ports by one name."""
    one = face("rtp udp 100", "10.1.0.11", "10.1.0.12")
    at = tuple(replace(e, port=port) for e, port in zip(one.endpoints, (100, 300), strict=True))
    assert rules_of(replace(one, endpoints=at)) == both(
        rule("udp 100", "10.1.0.11", share=Share(2, (0,))),
        rule("udp 100", "10.1.0.12", share=Share(2, (1,)), to_port=300),
    )


def test_two_at_one_address_both_get_clients() -> None:
    one = face("rtp udp 100", "10.1.0.11", "10.1.0.11", "10.1.0.12", affinity=60)
    ends = zip(one.endpoints, (100, 300, 100), strict=True)
    found = rules_of(replace(one, endpoints=tuple(replace(e, port=port) for e, port in ends)))
    assert {(str(each.to), each.to_port) for each in found} == {
        ("10.1.0.11", None),
        ("10.1.0.11", 300),
        ("10.1.0.12", None),
    }
    taken = Counter(number for each in found if each.share for number in each.share.at)
    assert taken == dict.fromkeys(range(FEWEST), 2), "once for what comes in, once from the node"


def shares(shown: Face) -> dict[str, Share]:
    found = {}
    for one in rules_of(shown):
        assert one.share is not None
        found[str(one.to)] = one.share
    return found


def test_clients_that_keep_their_endpoint_are_shared_out_by_address() -> None:
    found = shares(face("rtp udp 100-109", "10.1.0.11", "10.1.0.12", "10.1.0.13", affinity=60))
    assert {(one.of, one.client) for one in found.values()} == {(FEWEST, True)}
    assert sorted(chain(*(one.at for one in found.values()))) == list(range(FEWEST))
    assert all(one.at == tuple(sorted(one.at)) for one in found.values())
    assert all(200 < len(one.at) < 480 for one in found.values()), "about as many for each"


def test_the_signalling_and_the_media_of_a_client_have_one_endpoint() -> None:
    ends = ("10.1.0.11", "10.1.0.12", "10.1.0.13")
    sip = shares(face("sip udp 5060", *ends, affinity=60))
    rtp = shares(face("rtp udp 10000-10999>20000", *ends, at=str(VIP), affinity=60))
    assert sip == rtp


def test_who_comes_or_goes_moves_no_client_between_the_others() -> None:
    three = shares(face("a udp 1", "10.1.0.11", "10.1.0.12", "10.1.0.13", affinity=60))
    two = shares(face("a udp 1", "10.1.0.11", "10.1.0.13", affinity=60))
    for address, share in two.items():
        assert set(three[address].at) <= set(share.at)


def test_which_endpoint_a_number_is_for_stays_over_restarts() -> None:
    """Numbers that were drawn by another process of ours are in the kernel already."""
    found = shares(face("a udp 1", "10.1.0.11", "10.1.0.12", affinity=60))
    assert found["10.1.0.11"].at[:8] == (3, 8, 9, 10, 11, 12, 13, 15)


# --------------------------------------------------------------------------------------- detours


def detours(*shown: Face, at: Node) -> set[Detour]:
    found = desire_node(shown, at, PLAINLY).rules
    for one in found:
        assert (one.detour is not None) == (one.chain is Chain.POSTROUTING)
        if one.detour is not None:
            assert one == Rule(
                chain=Chain.POSTROUTING, family=one.family, owner="node", detour=one.detour
            )
    return {one.detour for one in found if one.detour}


def test_what_goes_back_over_its_link_is_given_an_address_of_ours() -> None:
    assert detours(face(), at=node()) == {Detour(published=(NODE4,), links=("br0",))}
    assert detours(face(at=str(VIP)), at=node()) == {Detour(published=(VIP,), links=("br0",))}


def test_a_detour_names_every_address_and_every_link() -> None:
    routes = {ip_address("10.1.0.11"): "br0", ip_address("10.1.0.12"): "a.100"}
    shown = face("a tcp 80", "10.1.0.11", "10.1.0.12"), face("b tcp 81", at=str(VIP))
    assert detours(*shown, at=node(routes=routes)) == {
        Detour(published=(NODE4, VIP), links=("a.100", "br0"))
    }


def test_each_family_has_its_detours() -> None:
    shown = face("a tcp 80"), face("a tcp 80", at="::")
    assert detours(*shown, at=node()) == {
        Detour(published=(NODE4,), links=("br0",)),
        Detour(published=(NODE6,), links=("br0",)),
    }


def test_what_is_sent_on_to_other_nodes_comes_back_to_us() -> None:
    shown = face("a tcp 80", "10.1.0.11", "10.1.0.13 away", "10.1.0.12 away")
    remote = ip_address("10.1.0.12"), ip_address("10.1.0.13")
    assert detours(shown, at=node()) == {
        Detour(published=(NODE4,), links=("br0",)),
        Detour(published=(NODE4,), remote=remote),
    }


def test_a_machine_that_its_bridge_sends_back_to_itself_is_given_an_address_of_ours() -> None:
    shown = face("a tcp 80", "10.1.0.11", "10.1.0.12"), face("a tcp 80", at="::")
    routes = {**node().routes, ip_address("10.1.0.12"): "br1"}
    plain = desire_node(shown, node(routes=routes), PLAINLY).rules
    found = desire_node(shown, node(routes=routes, bridging=("br0",)), PLAINLY).rules
    assert plain <= found
    assert found - plain == {
        Rule(
            chain=Chain.POSTROUTING,
            family=Family.of(one),
            owner="node",
            source=one,
            destination=one,
        )
        for one in (ip_address("10.1.0.11"), ip_address("fd01::11"))
    }


def test_while_a_service_is_pending_the_detours_stay_that_it_shares() -> None:
    """Its translations stay; without these its answers would go another way."""
    links = {"10.1.0.11": "br0", "10.1.0.12": "br1", "10.1.0.13": "br2"}
    here = node(routes={ip_address(at): link for at, link in links.items()})
    before = desire_node([face("a tcp 80"), face("b tcp 81", "10.1.0.12 away")], here, PLAINLY)
    waits = [Pending("Service/shop/phone/b", "who knows")]
    for shown in ([], [face("c tcp 82", "10.1.0.13")]):
        after = desire_node(shown, here, PLAINLY, pending=waits, live=before.rules)
        for old in [one for one in before.rules if one.detour]:
            assert old.detour is not None
            assert any(
                {*old.detour.published} <= {*new.detour.published}
                and {*old.detour.links} <= {*new.detour.links}
                and {*old.detour.remote} <= {*new.detour.remote}
                for new in after.rules
                if new.detour
            ), old
        assert len([one for one in after.rules if one.detour]) == 2
    settled = desire_node([], here, PLAINLY, live=before.rules)
    assert not [one for one in settled.rules if one.detour]


def test_where_there_is_no_way_there_is_no_detour() -> None:
    assert detours(face(), at=node(routes={})) == set()
    alone = node(surroundings=space(LO))
    assert detours(face(), at=alone) == set(), "a node without addresses"
    assert desire_node([face()], None, PLAINLY).rules == rules_of(face())


# -------------------------------------------------------------------------- settings and notes

FORWARDING = Sysctl("net.ipv4.ip_forward", "1")
FORWARDING_6 = Sysctl("net.ipv6.conf.all.forwarding", "1")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([face()], [FORWARDING], id="IPv4"),
        pytest.param(
            [face(at="::")],
            [
                FORWARDING_6,
                Sysctl("net.ipv6.conf.eth0.accept_ra", "2"),
                Sysctl("net.ipv6.conf.eth0/100.accept_ra", "2"),
            ],
            id="IPv6",
        ),
    ],
)
def test_a_node_that_publishes_is_a_router(shown: list[Face], expected: list[Sysctl]) -> None:
    there = node(advised=("eth0", "eth0.100"))
    assert desire_node(shown, there, PLAINLY).sysctls == set(expected)
    plain = {one for one in expected if "accept_ra" not in one.name}
    assert desire_node(shown, None, PLAINLY).sysctls == plain
    assert desire_node(shown, node(), PLAINLY).sysctls == plain


def test_published_ports_are_reserved_if_that_is_wanted_beside_what_is_already() -> None:
    there = node(reserved=(PortRange(8080, 8080), PortRange(30110, 30200)))
    shown = face("a udp 30100-30109"), face("b tcp 100")
    found = desire_node(shown, there, Publishing(reserve=True)).sysctls
    assert found == {FORWARDING, Sysctl("net.ipv4.ip_local_reserved_ports", "100,8080,30100-30200")}


@pytest.mark.parametrize(
    ("text", "reserved", "said"),
    [
        pytest.param("a udp 30100-30109", (), False, id="below"),
        pytest.param("a udp 30100-32768", (), True, id="reaches in"),
        pytest.param("a udp 40000", (), True, id="within"),
        pytest.param("a udp 61000", (), False, id="above"),
        pytest.param("a udp 40000-40009", (PortRange(40000, 40009),), False, id="reserved"),
        pytest.param("a udp 40000-40009", (PortRange(40000, 40008),), True, id="mostly reserved"),
        pytest.param(
            "a udp 30100-32768", (PortRange(32768, 32768),), False, id="what reaches in is reserved"
        ),
    ],
)
def test_ports_that_programs_are_given_at_random_are_told_of(
    text: str, reserved: tuple[PortRange, ...], said: bool
) -> None:
    occupied = Occupied(ephemeral=PortRange(32768, 60999))
    there = node(occupied=occupied, reserved=reserved)
    notes = desire_node([face(text)], there, PLAINLY).notes
    words = "meets the ports 32768-60999 that programs of the node are given at random"
    note = f"Service/shop/phone/a: {face(text)} {words} (net.ipv4.ip_local_port_range)"
    assert notes == (note,) * said


def test_ports_that_we_reserve_ourselves_are_not_told_of() -> None:
    there = node(occupied=Occupied(ephemeral=PortRange(32768, 60999)))
    assert desire_node([face("a udp 40000")], there, Publishing(reserve=True)).notes == ()


def test_an_endpoint_without_a_route_is_told_of_once() -> None:
    shown = face("a tcp 80", "10.1.0.11", "10.9.9.9"), face("a tcp 80", "10.9.9.9", at=str(VIP))
    notes = desire_node(shown, node(), PLAINLY).notes
    assert notes == ("Service/shop/phone/a: the node has no route to 10.9.9.9",)


def test_a_bridge_that_translates_is_told_of() -> None:
    (note,) = desire_node([face()], node(bridging=("br0",)), PLAINLY).notes
    assert note.startswith("br0 bridges translated packets itself")


@pytest.mark.parametrize(
    ("link", "said"), [("@s", "@s"), ("a*", "a*"), ("a\udcff", "a\N{REPLACEMENT CHARACTER}")]
)
def test_an_endpoint_behind_a_link_that_no_rule_can_name_is_served_and_told_of(
    link: str, said: str
) -> None:
    shown = face("a tcp 80", "10.1.0.11", "10.1.0.12", "10.1.0.13 away")
    routes = {one.address: link for one in shown.endpoints}
    routes[ip_address("10.1.0.12")] = "br0"
    found = desire_node([shown], node(routes=routes), PLAINLY)
    assert rules_of(shown) <= found.rules
    assert detours(shown, at=node(routes=routes)) == {
        Detour(published=(NODE4,), links=("br0",)),
        Detour(published=(NODE4,), remote=(ip_address("10.1.0.13"),)),
    }
    where = f"10.1.0.11 is behind the link {said}, which no rule can name"
    told = f"Service/shop/phone/a: {where}: who comes in by it may get no answer"
    assert found.notes == (told,)


def test_who_waits_is_told_in_order() -> None:
    waiting = [Pending("b", "x"), Pending("a", "y")]
    assert desire_node([], node(), Publishing(), pending=waiting).pending == (
        Pending("a", "y"),
        Pending("b", "x"),
    )


# ------------------------------------------------------------------------------------ in all


def test_the_order_of_what_is_given_does_not_matter() -> None:
    ends = [*BOTH, "10.1.0.12", "10.1.0.77 away", "fd01::77"]
    given = [
        behind(service("a tcp 80-89>90", "b udp 5", name=name, affinity=keeps), *ends)
        for name, keeps in (("one", None), ("two", 60), ("three", None))
    ]
    given += [
        behind(service("a tcp 8000-8009", name=f"x{i}", external=(VIP,)), *ends) for i in range(3)
    ]
    how = Publishing(allowed=(ip_network("203.0.113.0/24"),), reserve=True)
    there = node(occupied=Occupied(own=OWN_ADDRESSES, ephemeral=PortRange(1, 65535)))

    def made(turn: random.Random) -> tuple[Desired, list[Pending]]:
        shuffled = turn.sample(given, len(given))
        found, _ = seen(*shuffled, how=how)
        kept, refused, _ = refuse(turn.sample(found, len(found)), [], there.occupied)
        return desire_node(turn.sample(kept, len(kept)), there, how), refused

    first = made(random.Random(1))
    assert len(first[1]) == 2, "of three that want one address, two are refused"
    assert all(made(random.Random(turn)) == first for turn in range(2, 12))


def test_a_service_is_shown_in_its_own_families_only() -> None:
    one = service("http tcp 80@30080", families=(Family.IP6,))
    found, _ = faces([behind(one, *BOTH)], held(behind(one, *BOTH)), OWN_ADDRESSES, PLAINLY)
    assert {each.family for each in found} == {Family.IP6}


def test_an_ingress_that_is_not_for_everybody_is_not_published_and_that_is_said() -> None:
    one = service("http tcp 80@30080", ingress=(NODE4,), restricted=True)
    found, notes = faces([behind(one, *BOTH)], held(behind(one, *BOTH)), OWN_ADDRESSES, PLAINLY)
    assert {each.at for each in found} == {*OWN.values()}
    assert any("loadBalancerSourceRanges" in note for note in notes)
