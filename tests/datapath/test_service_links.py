"""Services whose machines are behind a link that no rule can name: a link may be called almost
anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.publishing import by_hand
from tests.datapath.publishing import AT, TCP
from tests.nodes import Net, answering, asked, net, service_manifest, vm_manifest
from tests.spaces import run

ODD = "b\udcff"  # with the byte 0xff, as Python passes it to programs
LINKS = {"@s": "@s", "a*": "a*", ODD: "b\N{REPLACEMENT CHARACTER}"}  # and how they are told
SERVICE = service_manifest(["name: web, port: 80, nodePort: 30080"])


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    with net(1) as made:
        yield made


@pytest.fixture(params=LINKS, ids=ascii)
def link(request: pytest.FixtureRequest, lab: Net) -> Iterator[str]:
    """What the bridge of the node is called meanwhile."""
    name: str = request.param
    rename(lab.node, "br0", name)
    yield name
    rename(lab.node, name, "br0")


def rename(netns: str, before: str, after: str) -> None:
    """For which a link has to be down, where it loses its IPv6 addresses."""
    run("ip", "-n", netns, "link", "set", before, "down")
    run("ip", "-n", netns, "link", "set", before, "name", after)
    run("ip", "-n", netns, "link", "set", after, "up")
    run("ip", "-n", netns, "addr", "add", "fd01::1/64", "dev", after, "nodad")


def test_a_service_is_published_whatever_the_link_to_its_machine_is_called(
    lab: Net, tmp_path: Path, link: str
) -> None:
    (tmp_path / "all.yaml").write_text(vm_manifest(lab.vms[0], "80") + SERVICE)
    code, said, told = by_hand(lab.node, "apply", "-f", tmp_path, "--yes")
    assert code == 0, told
    words = f"is behind the link {LINKS[link]}, which no rule can name: who comes in by it may get"
    assert f"10.1.0.11 {words} no answer" in said + told
    assert "no route" not in said + told
    with answering(lab.vms[0].guest, "one", [(TCP, 80)]):
        for at in AT.values():
            assert asked(lab.client, TCP, at, 30080).startswith("one 80 ")
    code, said, _ = by_hand(lab.node, "plan", "-f", tmp_path, "--detailed-exitcode")
    assert code == 0, said
