"""Ranges into a real virtual machine: its own kernel behind a tap, with an address by DHCP.

It boots once for all tests here, by software emulation, so that it is the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rules.model import FORWARDED, Protocol
from tests.daemon.running import handles
from tests.spaces import eventually, space
from tests.vm.guest import POD, Guest
from tests.vm.image import Image, Unavailable, image, why_not
from tests.vm.world import (
    ABOVE,
    AFTER,
    BEFORE,
    BELOW,
    FIRST,
    KEPT,
    LAST,
    NO_ANSWER,
    REFUSED,
    SILENT,
    World,
    built,
    family,
    said,
)

TCP, UDP = Protocol.TCP, Protocol.UDP
each_way = pytest.mark.parametrize(
    ("protocol", "address"),
    [
        pytest.param(protocol, address, id=f"{protocol.value} {family(address)}")
        for protocol in FORWARDED
        for address in POD
    ],
)


@pytest.fixture(scope="module")
def booted() -> Iterator[World]:
    try:
        made = image()
    except Unavailable as problem:
        pytest.skip(str(problem))
    with built(made) as world:
        world.guest.start()
        yield world


@pytest.fixture
def world(booted: World) -> World:
    """With the ranges that every test begins with."""
    assert booted.declare(BEFORE)
    return booted


def test_a_machine_that_does_not_run_is_told_with_the_reason(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    nothing = Image(kernel=tmp_path, initramfs=tmp_path, busybox=tmp_path)
    told: list[str] = []
    with space() as pod, pytest.raises(AssertionError, match="does not come up"):
        Guest(pod, nothing, [], tmp_path).start(tell=told.append)
    assert told[0] == "booting by tcg"
    assert re.fullmatch("qemu ended: .*could not load kernel.*", told[1])


def test_the_guest_has_its_address_from_the_server_on_the_bridge(world: World) -> None:
    assert "guest: 10.0.2.2/24 by DHCP" in world.guest.said()


@each_way
def test_the_guest_answers_on_the_ports_of_its_range(
    world: World, protocol: Protocol, address: str
) -> None:
    for port in (FIRST, KEPT, LAST):
        answer = world.answer(protocol, address, port)
        assert answer == world.expected(protocol, address, port)
    assert world.guest.release.endswith("-cloud-amd64")


@each_way
def test_a_port_outside_the_range_is_refused_though_the_guest_listens_there(
    world: World, protocol: Protocol, address: str
) -> None:
    assert [world.answer(protocol, address, port) for port in (BELOW, ABOVE)] == [REFUSED] * 2


@each_way
def test_a_port_of_the_range_where_the_guest_does_not_listen_is_refused(
    world: World, protocol: Protocol, address: str
) -> None:
    assert world.answer(protocol, address, SILENT) == REFUSED


@pytest.mark.parametrize("address", POD, ids=family)
def test_a_connection_into_the_guest_survives_an_edit_of_its_range(
    world: World, address: str
) -> None:
    with world.connected(TCP, address, KEPT) as flow, world.connected(UDP, address, KEPT) as other:
        before = said(flow), said(other)
        assert world.declare(AFTER)
        assert (said(flow), said(other)) == before
        assert world.answer(TCP, address, ABOVE) == world.expected(TCP, address, ABOVE)
        assert world.answer(TCP, address, FIRST) == REFUSED
        assert world.answer(UDP, address, ABOVE) == REFUSED


@pytest.mark.parametrize("address", POD, ids=family)
def test_an_idle_connection_through_a_port_that_is_taken_away_is_cut(
    world: World, address: str
) -> None:
    with world.connected(TCP, address, FIRST) as flow:
        assert said(flow)
        assert world.tracks(flow)
        assert world.declare(AFTER)
        # Not asked meanwhile: an answer that is under way would open the flow again.
        assert eventually(lambda: not world.tracks(flow))
        with pytest.raises(ConnectionResetError):
            said(flow)


def test_rules_stay_while_the_guest_reboots_and_lead_to_it_again(world: World) -> None:
    rules = handles(world.pod)
    world.guest.reboot()
    assert handles(world.pod) == rules
    for protocol in FORWARDED:
        for address in POD:
            answer = world.answer(protocol, address, KEPT)
            assert answer == world.expected(protocol, address, KEPT)


def test_rules_stay_while_the_guest_is_stopped_and_lead_to_the_next_one(world: World) -> None:
    rules = handles(world.pod)
    world.guest.stop()
    assert world.answer(TCP, POD[0], KEPT) == NO_ANSWER
    world.guest.start()
    assert handles(world.pod) == rules
    # Who asked while nobody was there may have the kernel give up on it once more.
    wanted = world.expected(TCP, POD[0], KEPT)
    assert eventually(lambda: world.answer(TCP, POD[0], KEPT) == wanted)
