"""Which ports of a Service lead to which endpoints, where these take only some of them."""

from ipaddress import ip_address

import pytest

from rules.endpoints import declared, limited, staying
from rules.model import OWN, Family, Protocol
from rules.ports import PortRange, coalesce
from rules.publish import Face
from rules.services import Endpoint, Service, ServicePort, ServiceType

PORT = ServicePort(
    name="data", protocol=Protocol.TCP, ports=PortRange(7000, 7009), target=PortRange(8000, 8009)
)
SERVICE = Service(namespace="default", name="web", type=ServiceType.NODE_PORT, ports=(PORT,))


def ranges(text: str) -> list[PortRange]:
    found = [one.partition("-") for one in text.split(",") if one]
    return list(coalesce(PortRange(int(a), int(b or a)) for a, _, b in found))


def end(number: int, takes: str | None = None, port: int = 8000) -> Endpoint:
    one = Endpoint(address=ip_address(f"10.0.0.{number}"), port=port)
    return limited(one, len(PORT.ports), None if takes is None else ranges(takes))


def face(*endpoints: Endpoint) -> Face:
    return Face(
        service=SERVICE,
        port=PORT,
        family=Family.IP,
        at=OWN[Family.IP],
        ports=PortRange(30000, 30009),
        endpoints=endpoints,
    )


def told(faces: list[Face]) -> list[str]:
    return [
        f"{one.ports}: " + " ".join(f"{x.address.packed[-1]}:{x.port}" for x in one.endpoints)
        for one in faces
    ]


PIECES = {
    "all take everything": ([None, "1-65535"], ["30000-30009: 1:8000 2:8000"], []),
    "each some": (
        ["8000-8007", "8000-8003"],
        ["30000-30003: 1:8000 2:8000", "30004-30007: 1:8004"],
        ["tcp 30008-30009 is left out: no backend declares tcp 8008-8009"],
    ),
    "one by one": (
        ["8000,8009", None],
        ["30000: 1:8000 2:8000", "30001-30008: 2:8001", "30009: 1:8009 2:8009"],
        [],
    ),
    "nobody": (
        ["22", ""],
        [],
        ["tcp 30000-30009 cannot be published: no backend declares tcp 8000-8009"],
    ),
}


@pytest.mark.parametrize(("takes", "shown", "reasons"), PIECES.values(), ids=PIECES)
def test_each_port_leads_to_those_who_declare_its_target(
    takes: list[str | None], shown: list[str], reasons: list[str]
) -> None:
    ends = [end(number, one) for number, one in enumerate(takes, 1)]
    kept, refused, notes = declared([face(*ends)])
    assert told(kept) == shown
    assert [one.reason for one in refused] == reasons
    assert not notes


def test_targets_that_differ_are_not_named() -> None:
    _, [refused], _ = declared([face(end(1, "22"), end(2, "22", port=9000))])
    assert refused.reason.endswith("cannot be published: no backend declares its target ports")


def test_what_is_declared_in_too_many_pieces_is_bounded() -> None:
    port = ServicePort(
        name="", protocol=Protocol.TCP, ports=PortRange(1, 60000), target=PortRange(1, 60000)
    )
    odd = [PortRange(number, number) for number in range(1, 60000, 4)]
    ends = [
        limited(Endpoint(address=ip_address(f"10.0.0.{number}"), port=1), 60000, odd)
        for number in range(1, 10)
    ]
    wide = Face(
        service=SERVICE,
        port=port,
        family=Family.IP,
        at=OWN[Family.IP],
        ports=port.ports,
        endpoints=tuple(ends),
    )
    kept, _, notes = declared([wide])
    assert {len(one.endpoints) for one in kept} == {2}
    assert "declared in too many pieces: 2 of 9 endpoints get flows" in notes[0]


STAYING = {
    "nothing changes": ([end(1, "8000-8003")], [end(1, "8000-8003")], [end(1, "8000-8003")]),
    "one goes": ([end(1), end(2)], [end(2)], [end(2)]),
    "the last one goes": ([end(1)], [], [end(1)]),
    "one takes more": (
        [end(1, "8000-8003"), end(2)],
        [end(1), end(2)],
        [end(1, "8000-8003"), end(2)],
    ),
    "one takes less": (
        [end(1), end(2)],
        [end(1, "8000-8003"), end(2)],
        [end(1, "8000-8003"), end(2)],
    ),
    "ports go from one to another": (
        [end(1, "8000-8004"), end(2, "8005-8009")],
        [end(1, "8003-8009"), end(2, "8000-8002")],
        [end(1, "8000-8004"), end(2, "8005-8009")],
    ),
}


@pytest.mark.parametrize(("old", "new", "left"), STAYING.values(), ids=STAYING)
def test_ports_are_withdrawn_from_who_will_not_take_them_if_another_does(
    old: list[Endpoint], new: list[Endpoint], left: list[Endpoint]
) -> None:
    assert staying(PORT, old, new) == tuple(left)
