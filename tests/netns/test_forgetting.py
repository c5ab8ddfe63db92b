"""Flows in their thousands, written to conntrack itself: those that are due are forgotten and the
others stay, and it takes little memory."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from typing import Any

import pytest

from agent.kernel import flush, rtnetlink, sysctl
from agent.kernel.conntrack import COUNT, CT_GET, CT_NEW, NETLINK_NETFILTER
from agent.kernel.flush import Found, delete, find, forget, still
from agent.kernel.netlink import (
    HEADER,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    RETRIES,
    Answer,
    ask,
    attribute,
    picked,
)
from agent.kernel.netns import inside, opened
from rules.flows import unmade
from rules.model import OWN, Address, Chain, Family, Protocol, Rule
from rules.ports import PortRange
from rules.stale import Due, Forbidden, Forgotten
from tests.spaces import ip, nft, run, space

FAMILY = struct.pack("=BBH", socket.AF_INET, 0, 0)
CREATE = 0x600
NODE, GUEST, OTHER = (ip_address(f"192.0.2.{last}") for last in (10, 20, 30))
MANY = 20_000
ROOM = 9000  # KiB; whole flows took 30,000
TRACKING = "table inet x { chain c { type nat hook prerouting priority 0; }; }"


@pytest.fixture
def netns() -> Iterator[str]:
    with space() as name:
        nft(name, TRACKING)
        with opened(name) as descriptor, inside(descriptor, name):
            yield name


@pytest.fixture
def asking(netns: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.settimeout(5)
        yield netlink


def direction(sender: bytes, receiver: bytes, sending: int, receiving: int) -> bytes:
    addresses = attribute(1, sender) + attribute(2, receiver)
    ports = attribute(1, b"\6") + attribute(2, struct.pack(">H", sending))
    ports += attribute(3, struct.pack(">H", receiving))
    return attribute(1, addresses, nested=True) + attribute(2, ports, nested=True)


def there(number: int, port: int, to: Address = NODE) -> bytes:
    client = (0x0B000000 + number).to_bytes(4, "big")
    return attribute(1, direction(client, to.packed, 40000, port), nested=True)


def flow(number: int, port: int, to: Address = NODE, answerer: Address = OTHER) -> bytes:
    """A TCP connection to that port of the node, which somebody else answers."""
    client = (0x0B000000 + number).to_bytes(4, "big")
    back = attribute(2, direction(answerer.packed, client, port, 40000), nested=True)
    lasting = attribute(7, struct.pack(">I", 600)) + attribute(
        3, struct.pack(">I", 1 << 3 | 1 << 1)
    )
    established = attribute(4, attribute(1, attribute(1, b"\3"), nested=True), nested=True)
    return FAMILY + there(number, port, to) + back + lasting + established


def fill(
    netlink: socket.socket, count: int, *ports: int, to: Address = NODE, answerer: Address = OTHER
) -> None:
    """So many flows, to these ports in turn."""
    for start in range(0, count, 100):
        some = range(start, start + 100)
        bodies = [flow(one, ports[one % len(ports)], to, answerer) for one in some]
        flags = NLM_F_REQUEST | CREATE
        netlink.send(
            b"".join(HEADER.pack(16 + len(one), CT_NEW, flags, 1, 0) + one for one in bodies)
        )
    assert tracked() >= count


def tracked() -> int:
    return int(sysctl.read([COUNT])[COUNT])


def due(ports: int, first: int = 30000) -> tuple[Forgotten, ...]:
    """What a node that publishes so many ports, each for the guest, would not have made."""
    return unmade(
        Rule(
            chain=Chain.PREROUTING,
            family=Family.IP,
            owner="o",
            protocol=Protocol.TCP,
            ports=PortRange(one, one),
            destination=OWN[Family.IP],
            to=GUEST,
        )
        for one in range(first, first + ports)
    )


# ----------------------------------------------------------------------------------------- flows


def test_of_thousands_of_flows_only_those_are_forgotten_that_are_due(
    asking: socket.socket,
) -> None:
    fill(asking, 3000, 443, 30000, 30499)
    assert forget(due(500), {NODE}) == 2000
    assert tracked() == 1000
    assert forget(due(500), {NODE}) == 0
    left = ask(asking, CT_GET, NLM_F_DUMP, bytes(4), "=BBH")
    assert {entry[1][-8:] for _, entry in left} == {attribute(3, struct.pack(">H", 443))}


def test_one_pass_finds_only_so_many_and_tells_that_there_are_more(
    asking: socket.socket,
) -> None:
    fill(asking, 1000, 443, 30000)
    found, more = find(due(1), {NODE}, 200)
    assert (len(found), more) == (200, True)
    assert delete(found) == 200
    assert delete(found) == 0, "they were forgotten twice"
    assert tracked() == 800
    found, more = find(due(1), {NODE}, 301)
    assert (len(found), more) == (300, False)
    assert forget(due(1), {NODE}, 7) == 300
    assert tracked() == 500


def test_what_is_no_longer_due_is_left_alone_although_it_was_found(asking: socket.socket) -> None:
    fill(asking, 1000, 30000, 30001)
    found, _ = find(due(2), {NODE})
    assert len(found) == 1000
    assert still(found, due(2), {NODE}) == found
    assert delete(still(found, due(1), {NODE})) == 500
    left = ask(asking, CT_GET, NLM_F_DUMP, bytes(4), "=BBH")
    assert {entry[1][-8:] for _, entry in left} == {attribute(3, struct.pack(">H", 30001))}


def test_who_lost_its_port_to_another_is_forgotten_after_it(
    asking: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, should it send in between, it would lose the port once more."""
    lost = Found(b"lost", b"", shuts=False, displaced=True)
    other = Found(b"other", b"", shuts=False, displaced=False)
    order: list[bytes] = []

    def note(_: socket.socket, key: bytes) -> int:
        order.append(key)
        return 1

    monkeypatch.setattr(flush, "_delete", note)
    assert delete([lost, other, lost]) == 3
    assert order == [b"other", b"lost", b"lost"]


GUESTS: list[Due] = [
    Forgotten(family=Family.IP, protocol=Protocol.TCP, ports=(PortRange(1, 500),), answerer=GUEST),
    Forbidden(family=Family.IP, guest=GUEST, incoming=True, allowed=()),
    Forgotten(
        family=Family.IP, protocol=Protocol.TCP, ports=(PortRange(443, 443),), answerer=OTHER
    ),
]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["closed", "forbidden", "of another"])
def test_the_kernel_chooses_the_flows_that_may_be_due(
    asking: socket.socket, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """And where it does not, the same are found."""
    fill(asking, 500, 443, 30000)
    for one in range(500, 600):
        ask(asking, CT_NEW, NLM_F_ACK | CREATE, flow(one, 443, NODE, GUEST), "=BBH")
    told: list[Answer] = []
    monkeypatch.setattr(flush, "picked", partial(counting, told))
    whole, _ = find(GUESTS[which : which + 1], {NODE})
    assert len(told) == 600
    told.clear()
    chosen, _ = find(GUESTS[which : which + 1], {NODE}, worth=0)
    assert len(told) == (500 if which == 2 else 100)
    assert chosen == whole
    assert len(whole) == (250 if which == 2 else 100)
    monkeypatch.setattr(flush, "_asking", lambda _: struct.pack("=BBH", 2, 0, 0) + REFUSED)
    told.clear()
    assert find(GUESTS[which : which + 1], {NODE}, worth=0) == (whole, False)
    assert len(told) == 600


REFUSED = attribute(25, attribute(2, struct.pack("=I", 1 << 31)), nested=True)


def counting(told: list[Answer], *given: Any) -> list[None]:
    def pick(answer: Answer) -> None:
        told.append(answer)
        given[-1](answer)

    return picked(*given[:-1], pick)  # type: ignore[call-arg]  # as it was called


SMALL = """
import sys
from pathlib import Path
from agent.kernel.flush import forget
from tests.netns.test_forgetting import NODE, due

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

wanted, before = due(1000), most()
forgot = forget(wanted, {NODE})
print(forgot, most() - before)
"""


@pytest.mark.parametrize(
    ("ports", "forgotten"),
    [
        pytest.param([443], 0, id="few of very many"),
        pytest.param([30000, 30001], MANY, id="all of them"),
    ],
)
def test_little_is_kept_in_memory_however_many_flows_there_are(
    asking: socket.socket, ports: list[int], forgotten: int
) -> None:
    fill(asking, MANY, *ports)
    forgot, grew = map(int, run(sys.executable, "-c", SMALL).stdout.split())
    assert forgot == forgotten
    assert grew < ROOM, f"{grew} KiB for {MANY} flows"


def test_who_asks_for_one_flow_need_not_wait_for_more(asking: socket.socket) -> None:
    """Of which conntrack says that it is one of many."""
    fill(asking, 100, 443)
    for _ in range(2):
        [(_, entry)] = ask(asking, CT_GET, 0, FAMILY + there(7, 443), "=BBH")
        assert attribute(1, entry[1], nested=True) == there(7, 443)
    with pytest.raises(FileNotFoundError):
        ask(asking, CT_GET, 0, FAMILY + there(7, 444), "=BBH")
    ask(asking, CT_NEW, NLM_F_ACK | CREATE, flow(7, 444), "=BBH")
    assert tracked() == 101


# ----------------------------------------------------------------------------------------- dumps


STIR = ip_address("127.9.9.9")


@pytest.fixture
def addresses(netns: str) -> Iterator[socket.socket]:
    """To be asked for addresses, which are so many that they are told in several pieces."""
    ip(netns, *(f"addr add 127.1.{n // 200}.{n % 200 + 1}/8 dev lo" for n in range(1000)))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(5)
        yield netlink


def dumped(netlink: socket.socket, pick: Callable[[Answer], Answer]) -> list[Answer]:
    kind, body, layout = rtnetlink.ADDRESSES
    return picked(netlink, kind, NLM_F_DUMP, body, layout, pick)


def test_a_dump_during_which_something_changed_is_taken_again(
    netns: str, addresses: socket.socket
) -> None:
    seen: list[Answer] = []

    def pick(answer: Answer) -> Answer:
        if not seen:
            ip(netns, f"addr add {STIR}/8 dev lo")
        seen.append(answer)
        return answer

    found = dumped(addresses, pick)
    assert STIR.packed in [entry.get(rtnetlink.IFA_LOCAL) for _, entry in found]
    assert len(found) == 1001
    assert len(seen) > len(found), "nothing was interrupted"


def test_a_dump_during_which_something_always_changes_is_never_taken_for_a_whole_one(
    netns: str, addresses: socket.socket
) -> None:
    tries: list[str] = []

    def pick(answer: Answer) -> Answer:
        if answer[1].get(rtnetlink.IFA_LOCAL) == b"\x7f\1\0\1":  # the first of all
            tries.append("del" if len(tries) % 2 else "add")
            ip(netns, f"addr {tries[-1]} {STIR}/8 dev lo")
        return answer

    with pytest.raises(InterruptedError, match=f"something changed during each of {RETRIES} tries"):
        dumped(addresses, pick)
    assert len(tries) == RETRIES
    assert len(dumped(addresses, lambda answer: answer)) == 1000, "it can be asked again"
