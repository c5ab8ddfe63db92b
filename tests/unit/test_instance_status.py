"""What can be concluded of an instance from its declaration and from what agents have said."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from agent.commands.instance import Instance
from agent.commands.instance_status import Said, concluded
from agent.sources.files import Snapshot
from rules.manifests import read

Json = Any
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
MANY = ",".join(map(str, range(1000, 1050, 2)))
TOLD_MANY = ", ".join(f"tcp {port}" for port in range(1000, 1040, 2))


def instance(ranges: str | None = "22", interface: str = "masquerade", **given: str) -> Instance:
    document: Json = {
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "web",
            "annotations": {"portranger.io/port-ranges": ranges} if ranges else {},
            "labels": {"sidecar.istio.io/inject": given.pop("proxied", "false")},
        },
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "red", interface: {}}]}},
            "networks": [{"name": "red", "pod": {}}],
        },
        "status": {
            "phase": "Running",
            "nodeName": "n1",
            "migrationTransport": "Unix",
            **given,
        },
    }
    reading = read(document, tenant=True)
    snapshot = Snapshot(machines=reading.machines, problems=reading.problems, count=1)
    return Instance(label="web", namespace="ns", document=document, snapshot=snapshot)


ZERO = str(instance("0").snapshot.problems[0])


def said(reason: str, message: str = "", minute: int = 0, node: str = "n1") -> Said:
    moment = f"2026-05-01T11:{minute:02}:00Z"
    return Said(
        last=moment,
        version=minute,
        first=moment,
        node=node,
        reason=reason,
        message=message,
        count=1,
    )


def applied(what: str, minute: int = 0, node: str = "n1") -> Said:
    return said("PortsApplied", f"forwards {what} in pod:uid (2 added, 1 setting)", minute, node)


@pytest.mark.parametrize(
    ("what", "told", "state"),
    [
        (instance(), [], "unknown"),
        (instance(), [applied("tcp 22")], "forwarded"),
        (instance(), [applied("tcp 22"), said("PortsDriftRepaired", "", 1)], "forwarded"),
        (instance(), [applied("tcp 22", node="n2")], "unknown"),
        (instance(), [applied("tcp 220")], "waiting"),
        (instance(), [applied("tcp 22"), applied("tcp 22, tcp 80", 1)], "waiting"),
        (instance("22,80"), [applied("tcp 22"), applied("tcp 80, tcp 22", 1)], "forwarded"),
        (instance(MANY), [applied(f"{TOLD_MANY}, 25 in all")], "forwarded"),
        (instance(MANY), [applied(f"{TOLD_MANY}, 26 in all")], "waiting"),
        # What was rejected, and mended to what it was before, is nothing to tell for an agent.
        (instance(), [applied("tcp 22"), said("PortsRejected", "", 1)], "forwarded"),
        (instance("22,0"), [applied("tcp 22")], "rejected"),
        (instance("22,0"), [applied("tcp 22"), said("PortsRejected", "", 1)], "rejected"),
        (instance(), [applied("tcp 22"), said("PortsConflict", "", 1)], "refused"),
        (instance(), [said("PortsRefused"), applied("tcp 22", 1)], "forwarded"),
        (instance("22,1000-2000/udp", proxied="true"), [applied("tcp 22")], "forwarded"),
        (instance(None), [], "open"),
        (instance(None), [applied("everything")], "forwarded"),
        (instance(None, "bridge"), [], "not ours"),
        (instance(nodeName=""), [], "not running"),
        (instance(phase="Succeeded"), [applied("tcp 22")], "not running"),
    ],
)
def test_how_it_stands(what: Instance, told: list[Said], state: str) -> None:
    assert concluded(what, told, NOW)[0] == state


@pytest.mark.parametrize(
    ("what", "told", "words"),
    [
        (instance(), [applied("tcp 22")], "since 2026-05-01 11:00:00 UTC (1 h ago)"),
        (
            instance("0"),
            [said("PortsRejected", ZERO, 30)],
            "rejected since 2026-05-01 11:30:00 UTC",
        ),
        (instance("0"), [said("PortsRejected", "another", 30)], "to be rejected: "),
        (instance(), [said("PortsRefused", "the socket is not its own", 59)], "not its own"),
        (instance(), [applied("tcp 80")], "node n1 forwards what was declared at 2026-05-01"),
        (instance(), [], "is portranger running on node n1?"),
    ],
)
def test_it_is_told_with_its_time_or_its_reason(
    what: Instance, told: list[Said], words: str
) -> None:
    assert words in concluded(what, told, NOW)[1]
