"""What is said about the service in a machine, and about namespaces to forward in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rules.values import Value
from tests.spaces import PATIENCE, eventually, manifest
from tests.systemd.machine import Machine

UNIT = "portranger.service"
CONFIGURATION = "/etc/portranger/portranger.toml"
MANIFESTS = "/etc/portranger/manifests.d"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/test.conf"
STREAM = Path(__file__).with_name("stream.py").read_text()

WIRED = """
set -e
for netns in "$1-client" "$1" "$1-guest"; do
    ip netns add "$netns"
    ip -n "$netns" link set lo up
done
ip -n "$1" link add eth0 type veth peer name eth0 netns "$1-client"
ip -n "$1" link add k6t-eth0 type veth peer name eth0 netns "$1-guest"
ip -n "$1" link set k6t-eth0 up
ip -n "$1-guest" addr add 10.0.2.2/24 dev eth0
ip -n "$1-guest" link set eth0 up
ip -n "$1-guest" route add default via 10.0.2.1
ip -n "$1-client" addr add 192.0.2.1/24 dev eth0
ip -n "$1-client" link set eth0 up
ip -n "$1" addr add 10.0.2.1/24 dev k6t-eth0
ip -n "$1" addr add 192.0.2.2/24 dev eth0
ip -n "$1" link set eth0 up
"""
"""A client, the namespace of a virtual machine, and its guest, on IPv4. There is no bridge: for as
long as the kernel takes to remove one, nobody else may change links."""


def soon(true: Callable[[], bool]) -> bool:
    """Whether it becomes true; a kernel that is busy with others may take its time."""
    return eventually(true, PATIENCE)


class Flow(Value):
    """How a stream of datagrams fared."""

    sent: int
    lost: int


class Service:
    """portranger.service of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._cursor = machine.says("journalctl", "-n1", "-o", "json", "--output-fields=_PID")

    # ------------------------------------------------------------------------------ the unit

    def start(self, code: int = 0) -> None:
        self.machine.run("systemctl", "start", UNIT, code=code)

    def property(self, name: str) -> str:
        return self.machine.says("systemctl", "show", "--value", f"--property={name}", UNIT)

    def pid(self) -> int:
        return int(self.property("MainPID"))

    def signal(self, name: str) -> None:
        self.machine.run("systemctl", "kill", "--kill-whom=main", f"--signal={name}", UNIT)

    def is_another(self, pid: int) -> bool:
        """Whether it is up again, as another process."""
        return self.property("ActiveState") == "active" and self.pid() not in (0, pid)

    def drop_in(self, *lines: str) -> None:
        """Change the unit."""
        self.machine.write(DROP_IN, "\n".join(["[Service]", *lines, ""]))
        self.machine.run("systemctl", "daemon-reload")

    def journal(self) -> list[dict[str, str]]:
        """What it wrote since the test began."""
        cursor = json.loads(self._cursor)["__CURSOR"]
        lines = self.machine.says(
            "journalctl", f"--after-cursor={cursor}", f"--unit={UNIT}", "--output=json"
        )
        return [json.loads(line) for line in lines.splitlines()]

    def said(self, text: str) -> bool:
        """Whether a line of its journal holds that text."""
        return any(text in line["MESSAGE"] for line in self.journal())

    # ----------------------------------------------------------------------------- its work

    def configure(self, *lines: str) -> None:
        self.machine.write(CONFIGURATION, "\n".join([*lines, ""]))

    def declare(self, netns: str, ranges: str, folder: str = MANIFESTS) -> None:
        """Let a manifest say that these ranges of a machine in that namespace are forwarded."""
        self.machine.write(f"{folder}/{netns}.yaml", manifest(netns, ranges, netns))

    def wire(self, netns: str) -> None:
        """Make that namespace, between a client and a guest."""
        self.machine.run("sh", "-c", WIRED, "sh", netns)

    def rules(self, netns: str) -> str:
        """What nft says about our table there; nothing if there is none."""
        words = ("ip", "netns", "exec", netns, "nft", "list", "table", "inet", "portranger")
        return self.machine.run(*words, code=None).stdout

    def becomes_synced(self, *netns: str) -> bool:
        return soon(lambda: {*netns} <= {*self.synced()})

    def synced(self) -> list[str]:
        """The namespaces that the daemon says are in sync."""
        spaces = json.loads(self.asked("/status") or "{}").get("namespaces", [])
        return [space["netns"] for space in spaces if space["state"] == "in sync"]

    def asked(self, path: str) -> str:
        """What its HTTP server answers; nothing if it does not say that all is well."""
        script = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        words = ("python3", "-c", script, f"http://127.0.0.1:9788{path}")
        return self.machine.run(*words, code=None).stdout

    @contextmanager
    def stream(self, netns: str, port: int) -> Iterator[list[Flow]]:
        """Datagrams through that port while the block runs; the list holds how they fared."""
        words = (f"{netns}-client", f"{netns}-guest", "192.0.2.2", str(port))
        told: list[Flow] = []
        with self.machine.start("python3", "-c", STREAM, *words) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "flowing\n"
                yield told
                output, _ = child.communicate(timeout=PATIENCE)
                told.append(Flow(**json.loads(output)))
            finally:
                child.kill()

    def forwards(self, netns: str, port: int) -> bool:
        """Whether datagrams to that port arrive and are answered."""
        with self.stream(netns, port) as told:
            pass
        return told[0].lost == 0

    # ----------------------------------------------------------------------------- clearing

    def clear(self) -> None:
        """Leave the machine as it was before."""
        shipped = "/usr/local/share/portranger/portranger.toml"
        script = f"""
            systemctl stop {UNIT}
            systemctl reset-failed {UNIT} 2>/dev/null
            ip -all netns delete
            rm -rf {MANIFESTS}/* {DROP_IN} /var/lib/portranger
            cp {shipped} {CONFIGURATION}
            systemctl daemon-reload
        """
        self.machine.run("sh", "-c", script)
