"""What tests of a daemon that publishes Services begin with, and the words they say about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rules.model import Chain
from rules.ports import PortRange
from tests.daemon.running import Json, Node, Running
from tests.nodes import Net, net, service_manifest, vm_manifest
from tests.spaces import NFTABLES, eventually, nft, observed, run, within

SELF = "node:self"
PORTS = "80,443,5000-5999,5000-5999/udp,30100"
RESERVED, RANDOM = "net.ipv4.ip_local_reserved_ports", "net.ipv4.ip_local_port_range"


@contextmanager
def wired() -> Iterator[Net]:
    """A node with one machine behind it, for all tests of a module."""
    with net(1) as made:
        yield made


@contextmanager
def publishing(lab: Net, folder: Path, **settings: object) -> Iterator[Node]:
    """Files for a daemon on that node, with the machine's manifest; the node is as new at the
    end."""
    made = Node(folder, lab.node, **settings)
    made.save("vm.yaml", vm_manifest(lab.vms[0], PORTS))
    try:
        yield made
    finally:
        for name in (lab.node, lab.vms[0].pod):
            nft(name, "flush ruleset")
        set_sysctl(lab.node, RESERVED, "")
        set_sysctl(lab.node, RANDOM, "32768 60999")


def set_sysctl(netns: str, name: str, value: str) -> None:
    within(netns, "sysctl", "-qw", f"{name}={value}")


def service(  # noqa: PLR0913 - what a Service can say
    name: str,
    first: int = 80,
    *,
    count: int = 1,
    at: int = 0,
    protocol: str = "TCP",
    kind: str = "NodePort",
    more: str = "",
) -> str:
    """One with so many ports in a row; at: the first of the node ports that it wishes for."""
    wish = f", nodePort: {at}" if at else ""
    return service_manifest(
        [f"name: p, protocol: {protocol}, port: {first}{wish}"],
        name=name,
        kind=kind,
        ends=f"p: {first + count - 1}" if count > 1 else "",
        more=more,
    )


def owner(name: str) -> str:
    return f"Service/default/{name}/p"


def given(netns: str) -> dict[str, PortRange]:
    """The ports that the kernel publishes, by the name of the Service."""
    found: dict[str, PortRange] = {}
    for live in observed(netns, NFTABLES).live:
        rule = live.rule
        if rule.chain is Chain.PREROUTING and rule.ports:
            known = found.setdefault(rule.owner.split("/")[2], rule.ports)
            assert known == rule.ports, f"{rule.owner} has {known} and {rule.ports}"
    return found


def faces(netns: str) -> set[tuple[str, str]]:
    """What is published, as the name of the Service and the family."""
    return {
        (live.rule.owner.split("/")[2], live.rule.family.value)
        for live in observed(netns, NFTABLES).live
        if live.rule.chain is Chain.PREROUTING
    }


Spot = tuple[str, str, int]


def spots(netns: str) -> set[Spot]:
    """What is published, as the name of the Service, the family and each port."""
    return {
        (live.rule.owner.split("/")[2], live.rule.family.value, port)
        for live in observed(netns, NFTABLES).live
        if live.rule.chain is Chain.PREROUTING and live.rule.ports
        for port in range(live.rule.ports.first, live.rule.ports.last + 1)
    }


def published(daemon: Running) -> dict[str, PortRange]:
    """The ports that the kernel publishes, once the manifests of the daemon are applied."""
    assert daemon.applied(), daemon.waited()["waiting"]
    return given(daemon.home)


def publishes(daemon: Running, *names: str) -> dict[str, PortRange]:
    """The ports of these Services: they, and no others, are published with the manifests."""
    found = published(daemon)
    assert found.keys() == set(names), refusals(daemon)
    return found


def refusals(daemon: Running) -> dict[str, str]:
    """Why what is not published, by the name of the Service."""
    told = daemon.standing(SELF).get("refused", [])
    return {one["owner"].split("/")[2]: one["reason"] for one in told}


def refuses(daemon: Running, *names: str) -> dict[str, str]:
    """Why these are not published, once the manifests of the daemon are applied."""
    assert daemon.applied(), daemon.waited()["waiting"]
    found = refusals(daemon)
    assert found.keys() == set(names), found
    return found


def comes_to_refuse(daemon: Running, *names: str) -> dict[str, str]:
    """The same, where something else than manifests has changed."""
    assert eventually(lambda: refusals(daemon).keys() == set(names)), refusals(daemon)
    return refusals(daemon)


def written(node: Node) -> dict[str, PortRange]:
    """What is stored, by the name of the Service."""
    content = json.loads((node.state / "node-ports.json").read_text())["content"]
    return {one[0].split("/")[2]: PortRange(one[3], one[4]) for one in content}


def by_hand(netns: str, *words: str | Path) -> tuple[int, str, str]:
    """The command line on that node: its exit code, and what it says."""
    entry = (sys.executable, "-m", "agent.entry")
    done = run("ip", "netns", "exec", netns, *entry, *words, code=None)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def planned(netns: str, path: Path) -> tuple[int, Json]:
    """The plan of these manifests, and its exit code."""
    code, said, _ = by_hand(netns, "plan", "-f", path, "-o", "json")
    return code, dict(json.loads(said))
