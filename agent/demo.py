"""The main job, for real, in namespaces of its own: forward, prove by packet, edit, clean up."""

import io
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from agent.commands.apply import apply
from agent.commands.show import show
from agent.console import Console
from agent.errors import Failure, NotPermitted
from agent.kernel.lab import POD, Lab, built
from agent.kernel.live import LiveKernel
from agent.kernel.probe import asks, connected, echoing, reached
from rules.model import FORWARDED, Protocol

MANIFEST = """\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: desktop
  annotations:
    portranger.io/netns: {netns}
spec:
  template:
    spec:
      domain:
        devices:
          interfaces:
            - name: red
              masquerade: {{}}
              portRanges:
                - {{start: 1000, end: {last}, protocol: TCP}}
                - {{start: 1000, end: 8000, protocol: UDP}}
      networks:
        - name: red
          pod: {{}}
"""
PROBED = (999, 1000, 4500, 8000, 8001)
KEPT = 4500  # in the range before and after the edit
SHORTER = 5000


def demonstrate(console: Console) -> int:
    """Run the demonstration; 0 if everything was as it should be."""
    if os.geteuid() != 0:
        raise NotPermitted("the demonstration builds network namespaces", "Run it as root")
    for number in (signal.SIGTERM, signal.SIGHUP):  # a terminal that is closed leaves nothing
        signal.signal(number, partial(_leave, os.getpid()))
    if isinstance(console.out, io.TextIOWrapper):
        console.out.reconfigure(line_buffering=True)  # in a pipe, too
    prefix = f"portranger-demo-{os.getpid()}"
    with built(prefix) as lab, tempfile.TemporaryDirectory() as folder:
        console.say("1. A client, a pod and a guest, each a network namespace of its own:")
        console.say(f"   {lab.client} -- eth0 [{lab.pod}] k6t-eth0 -- {lab.guest}\n")
        manifest = Path(folder, "vm.yaml")
        servers = [(protocol, port) for protocol in FORWARDED for port in PROBED]
        with echoing(lab, lab.guest, servers), closing(LiveKernel(proving=True)) as kernel:
            good = _forward(console, lab, manifest, kernel)
            good = good and _edit(console, lab, manifest, kernel)
    console.say("\nThe namespaces are gone again.")
    if not good:
        raise Failure("the demonstration did not go as it should", "Look for WRONG above")
    console.say(f"Everything was as it should be. Next: README, or {typed(sys.argv[0])} --help.")
    return 0


def typed(command: str) -> str:
    """How a shell is told to run this command: by its name, where it is in PATH."""
    name = os.path.basename(command)  # noqa: PTH119 - as it was typed
    return name if shutil.which(name) == os.path.abspath(command) else command  # noqa: PTH100


def _leave(ours: int, number: int, _: object) -> None:
    if os.getpid() != ours:  # in a child of pyroute2, which ends its children so
        os._exit(128 + number)
    raise KeyboardInterrupt


def _forward(console: Console, lab: Lab, manifest: Path, kernel: LiveKernel) -> bool:
    text = MANIFEST.format(netns=lab.pod, last=8000)
    manifest.write_text(text)
    console.say("2. The manifest:\n")
    console.say("".join(f"   {line}\n" for line in text.splitlines()))
    console.say("3. portranger apply -f vm.yaml --yes\n")
    _apply(console, manifest, kernel)
    console.say("\n4. The guest listens on every port below. Who is reachable from the client?\n")
    good = _table(console, lab, {protocol: range(1000, 8001) for protocol in FORWARDED})
    console.say("\n5. portranger show: packets and bytes of each range\n")
    show([lab.pod], console, kernel=kernel)
    return good


def _edit(console: Console, lab: Lab, manifest: Path, kernel: LiveKernel) -> bool:
    console.say(
        f"\n6. A connection to tcp/{KEPT} is opened, then the TCP range is cut to {SHORTER}:\n"
    )
    with connected(lab, lab.client, POD[0].ip, Protocol.TCP, KEPT) as before:
        asks(before)
        manifest.write_text(MANIFEST.format(netns=lab.pod, last=SHORTER))
        _apply(console, manifest, kernel)
        alive = _answers(before)
    console.say(f"\n   the connection from before the edit: {_judged(alive, True, 'alive')}\n")
    open_ports = {Protocol.TCP: range(1000, SHORTER + 1), Protocol.UDP: range(1000, 8001)}
    return _table(console, lab, open_ports) and alive


def _apply(console: Console, manifest: Path, kernel: LiveKernel) -> None:
    code = apply([str(manifest)], console, kernel=kernel, confirm=lambda _: True)
    if code != 0:
        raise Failure(f"apply ended with {code}")


def _answers(flow: socket.socket) -> bool:
    try:
        return asks(flow) == KEPT
    except OSError:
        return False


def _table(console: Console, lab: Lab, open_ports: dict[Protocol, range]) -> bool:
    """What was reachable, and whether that is what should be."""
    good = True
    console.say(f"   {'':10}" + "".join(f"{port:>12}" for port in PROBED))
    for protocol in FORWARDED:
        for address in POD:
            cells = []
            for port in PROBED:
                answer = reached(lab, lab.client, address.ip, protocol, port)
                should = port in open_ports[protocol]
                good = good and answer == (port if should else None)
                cells.append(_judged(answer == port, should, "reached"))
            name = f"{protocol.value} IPv{address.version}"
            console.say(f"   {name:10}" + "".join(f"{cell:>12}" for cell in cells))
    return good


def _judged(was: bool, should: bool, word: str) -> str:
    if was is should:
        return word if was else "closed"
    return f"WRONG:{word if was else 'closed'}"
