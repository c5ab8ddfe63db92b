"""Namespaces come and go, and so do links and addresses in them: what waits for them is applied
when they are there, and what is gone is let go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rules.model import Family
from tests.daemon.running import Node, Running, comes_to_forward, forwarded, handles
from tests.spaces import eventually, ip, manifest, pod, process, run, space, unused_name

POD = (
    "link add eth0 type bridge",
    "link set eth0 up",
    "addr add 192.0.2.2/24 dev eth0",
    "link add k6t-eth0 type bridge",
    "link set k6t-eth0 up",
    "addr add 10.0.2.1/24 dev k6t-eth0",
)


@pytest.fixture
def absent() -> Iterator[str]:
    """The name of a namespace that is not there, and will be gone at the end."""
    name = unused_name()
    yield name
    run("ip", "netns", "del", name, code=None)


def why(daemon: Running, netns: str) -> str:
    return str(daemon.standing(netns).get("why"))


# ------------------------------------------------------------------------------------ they appear


def test_a_namespace_that_appears_is_served_within_a_moment(node: Node, absent: str) -> None:
    node.save("a.yaml", manifest(absent, "22"))
    with node.running() as daemon:
        assert daemon.standing(absent)["state"] == "pending"
        assert "there is no network namespace" in why(daemon, absent)
        assert daemon.metric("namespaces", state="pending") == 1
        assert daemon.get("/readyz")[0] == 200
        run("ip", "netns", "add", absent)
        ip(absent, *POD)
        assert comes_to_forward(absent, "tcp 22")
        assert daemon.is_in("in sync", absent)
        assert not daemon.said("drift repaired")


def test_a_pod_is_served_once_it_has_its_link_and_address(node: Node, absent: str) -> None:
    node.save("a.yaml", manifest(absent, "22"))
    with node.running() as daemon:
        run("ip", "netns", "add", absent)
        assert eventually(lambda: "neither a link eth0" in why(daemon, absent))
        ip(absent, "link add eth9 type bridge", "addr add 192.0.2.2/24 dev eth9")
        ip(absent, "link set eth9 name eth0")
        assert comes_to_forward(absent, "tcp 22")
        assert daemon.is_in("in sync", absent)


def test_an_address_of_another_family_brings_its_rules(node: Node) -> None:
    with space() as netns:
        ip(netns, *POD)
        node.save("a.yaml", manifest(netns, "22"))
        with node.running() as daemon:
            assert forwarded(netns, Family.IP) == {"tcp 22"}
            assert forwarded(netns, Family.IP6) == set()
            before = handles(netns)
            ip(netns, "addr add 2001:db8::2/64 dev eth0 nodad")
            assert eventually(lambda: forwarded(netns, Family.IP6) == {"tcp 22"})
            assert before < handles(netns)
            assert not daemon.said("drift repaired")


def test_a_link_that_goes_takes_no_rules_with_it_until_another_takes_its_place(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        ip(blue, "link set eth0 down", "link set eth0 name old0")
        assert daemon.is_in("pending", blue)
        assert handles(blue) == before
        ip(blue, "link add eth0 type bridge", "addr add 192.0.2.9/24 dev eth0")
        assert daemon.is_in("in sync", blue)


# -------------------------------------------------------------------------------------- they go


def test_a_namespace_that_comes_back_under_its_name_is_a_new_one(node: Node, absent: str) -> None:
    node.save("a.yaml", manifest(absent, "22"))
    with node.running() as daemon:
        for _ in range(3):
            run("ip", "netns", "add", absent)
            ip(absent, *POD)
            assert comes_to_forward(absent, "tcp 22")
            run("ip", "netns", "del", absent)
            # Its links go before its rules do.
            assert eventually(lambda: daemon.standing(absent).get("rules") == 0)
            assert daemon.is_in("pending", absent)
        run("ip", "netns", "add", absent)
        ip(absent, *POD)
        run("ip", "netns", "del", absent)
        run("ip", "netns", "add", absent)  # whether or not it saw that one go
        ip(absent, *POD)
        assert comes_to_forward(absent, "tcp 22")
        assert daemon.said("applied", netns=absent)
        assert not daemon.said("drift repaired")


def test_a_namespace_that_is_deleted_is_not_kept_alive(node: Node, absent: str) -> None:
    """A link whose other end was in it goes only when the namespace itself does."""
    run("ip", "netns", "add", absent)
    ip(absent, *POD)
    node.save("a.yaml", manifest(absent, "22"))
    with space() as outside, node.running() as daemon:
        ip(outside, f"link add there type veth peer name here netns {absent}")
        for ports in ("23", "24", "25"):
            node.save("a.yaml", manifest(absent, ports))
            assert comes_to_forward(absent, f"tcp {ports}")
        assert daemon.metric("ranges", netns=absent) == 1
        run("ip", "netns", "del", absent)
        assert eventually(lambda: "there" not in links(outside))
        assert daemon.is_in("pending", absent)


def test_a_namespace_that_is_deleted_in_the_middle_of_changes_is_not_kept_alive(
    node: Node, absent: str
) -> None:
    node.save("a.yaml", manifest(absent, "22"))
    with space() as outside, node.running() as daemon:
        for turn in range(5):
            run("ip", "netns", "add", absent)
            ip(absent, *POD, f"link add here type veth peer name there{turn} netns {outside}")
            node.save("a.yaml", manifest(absent, f"{100 + turn}-{200 + turn}"))
            run("ip", "netns", "del", absent)
        assert eventually(lambda: "there" not in links(outside))
        assert daemon.is_in("pending", absent)
        assert daemon.metric("failures_total") == 0


def links(netns: str) -> str:
    return run("ip", "-n", netns, "-br", "link").stdout


# ------------------------------------------------------------------------------ by other names


@contextmanager
def bound(netns: str, path: Path) -> Iterator[None]:
    path.touch()
    run("mount", "--bind", f"/run/netns/{netns}", path)
    try:
        yield
    finally:
        run("umount", path, code=None)


def test_two_names_of_one_namespace_are_named_and_the_first_goes_on(
    node: Node, blue: str, absent: str
) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    with bound(blue, Path("/run/netns", absent)), node.running() as daemon:
        node.save("b.yaml", manifest(absent, "80", "two"))
        assert daemon.is_in("failing", absent)
        assert f"{blue} and {absent} are one and the same" in why(daemon, absent)
        assert forwarded(blue) == {"tcp 22"}
        assert daemon.standing(blue)["state"] == "in sync"
        node.remove("b.yaml")
        assert eventually(lambda: not daemon.standing(absent))
        assert forwarded(blue) == {"tcp 22"}


def test_a_machine_that_is_given_another_name_of_its_namespace_keeps_its_rules(
    node: Node, blue: str, absent: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with bound(blue, Path("/run/netns", absent)), node.running() as daemon:
        before = handles(blue)
        node.save("a.yaml", manifest(absent, "22"))
        assert daemon.is_in("in sync", absent)
        assert handles(blue) == before
        assert eventually(lambda: not daemon.standing(blue))
        assert handles(blue) == before


def test_a_namespace_that_is_named_by_a_path(node: Node, blue: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    path = folder / "ns"
    node.save("a.yaml", manifest(str(path), "22"))
    with node.running() as daemon:
        assert daemon.standing(str(path))["state"] == "pending"
        folder.mkdir(parents=True)
        with bound(blue, path):
            assert comes_to_forward(blue, "tcp 22")
            assert daemon.is_in("in sync", str(path))
        assert daemon.is_in("pending", str(path))
        path.unlink()
        path.symlink_to(f"/run/netns/{blue}")
        assert daemon.is_in("in sync", str(path))
        assert daemon.standing(str(path))["ranges"]


def test_a_namespace_of_a_process(node: Node, blue: str) -> None:
    with process("sleep", "60", netns=blue) as sleeper:
        path = f"/proc/{sleeper.pid}/ns/net"
        node.save("a.yaml", manifest(path, "22"))
        with node.running() as daemon:
            assert daemon.standing(path)["state"] == "in sync"
            assert forwarded(blue) == {"tcp 22"}


def test_a_path_that_leads_to_no_namespace_keeps_nobody_waiting(node: Node) -> None:
    plain = node.folder / "a-plain-file"
    plain.touch()
    node.save("a.yaml", manifest(str(plain), "22", "first"))
    with pod() as other:
        node.save("b.yaml", manifest(other, "22", "second"))
        with node.running() as daemon:
            assert forwarded(other) == {"tcp 22"}
            assert daemon.standing(str(plain))["state"] == "pending"
            node.save("b.yaml", manifest(other, "23", "second"))
            assert comes_to_forward(other, "tcp 23")
