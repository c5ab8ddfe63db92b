"""A range forwarded into a real virtual machine, told as a story: `make demo-vm`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from rules.model import FORWARDED, Protocol
from tests.daemon.running import handles
from tests.spaces import manifest, portranger
from tests.vm.guest import POD, accelerators
from tests.vm.image import Unavailable, image, why_not
from tests.vm.world import (
    ABOVE,
    AFTER,
    BEFORE,
    FIRST,
    KEPT,
    LAST,
    LISTENING,
    REFUSED,
    SILENT,
    World,
    built,
    family,
    said,
)

OPEN_BEFORE = {protocol: range(FIRST, LAST + 1) for protocol in FORWARDED}
OPEN_AFTER = OPEN_BEFORE | {Protocol.TCP: range(SILENT, ABOVE + 1)}


def demonstrate() -> bool:
    """Whether everything was as it should be."""
    say("1. A client, a pod and a guest: Debian's cloud kernel and busybox, in qemu, with DHCP")
    say("   (the first time, 30 MB of packages are downloaded; they are not installed)\n")
    made = image()
    with built(made) as world:
        say(f"   client {world.client} -- eth0 [pod {world.pod}] k6t-eth0 -- tap0 -- guest\n")
        boot(world)
        good = forward(world) and edit(world) and reboot(world) and stop(world)
    say("\nThe machine and the namespaces are gone again. Its image stays, for the next time:")
    size = sum(path.stat().st_size for path in made.kernel.parent.iterdir())
    say(f"{size / 1e6:.0f} MB in {made.kernel.parent}.")
    return good


def boot(world: World) -> None:
    started = time.monotonic()

    def tell(words: str) -> None:
        say(f"   {time.monotonic() - started:3.0f} s: {words}")

    world.guest.start(accelerators(), tell)
    tell("it is up, and said:\n")
    for line in world.guest.said():
        if line.startswith("guest:"):
            say(f"   {line}")


def forward(world: World) -> bool:
    say("\n2. portranger run watches a directory, and this manifest is saved there:\n")
    for line in filter(None, manifest(world.pod, BEFORE).splitlines()):
        say(f"   {line}")
    forwarded = world.declare(BEFORE)
    say("\n3. The guest listens on every port below. What does the client reach?\n")
    good = table(world, OPEN_BEFORE)
    answered = world.answer(Protocol.TCP, POD[0], KEPT)
    say(f"\n   tcp/{KEPT} says: {answered}")
    say(f"   (its own kernel, and whom it sees; this machine has {os.uname().release})")
    refused = world.answer(Protocol.TCP, POD[0], SILENT) == REFUSED
    shown = judged(refused, True, REFUSED, "answered")
    say(f"   tcp/{SILENT}, in the range, where the guest does not listen: {shown}")
    say("\n4. portranger show\n")
    live = portranger("show", "--netns", world.pod)
    say("".join(f"   {line}\n" for line in live.stdout.splitlines()))
    return good and forwarded and refused and live.returncode == 0


def edit(world: World) -> bool:
    say(f"5. A connection to tcp/{KEPT} is opened, and the TCP range edited to {SILENT}-{ABOVE}:\n")
    with world.connected(Protocol.TCP, POD[0], KEPT) as flow:
        before = said(flow)
        forwarded = world.declare(AFTER)
        alive = answers(flow, before)
    good = table(world, OPEN_AFTER)
    say(f"\n   the connection from before: {judged(alive, True, 'alive', 'cut')}")
    return good and forwarded and alive


def reboot(world: World) -> bool:
    say("\n6. The guest is reset, and boots again:\n")
    rules = handles(world.pod)
    world.guest.reboot()
    same = handles(world.pod) == rules
    good = table(world, OPEN_AFTER)
    say(f"\n   the rules in the pod: {judged(same, True, 'the same', 'others')}")
    return good and same


def stop(world: World) -> bool:
    say("\n7. The guest is switched off:\n")
    rules = handles(world.pod)
    world.guest.stop()
    same = handles(world.pod) == rules
    answered = world.answer(Protocol.TCP, POD[0], KEPT)
    say(f"   tcp/{KEPT}: {answered}")
    say(f"   the rules in the pod: {judged(same, True, 'the same', 'others')}")
    return same and answered != world.expected(Protocol.TCP, POD[0], KEPT)


def answers(flow: socket.socket, words: str) -> bool:
    try:
        return said(flow) == words
    except OSError:
        return False


def table(world: World, open_ports: dict[Protocol, range]) -> bool:
    """What is reachable, and whether that is what should be."""
    good = True
    say(f"   {'':10}" + "".join(f"{port:>12}" for port in LISTENING))
    for protocol in FORWARDED:
        for address in POD:
            cells = []
            for port in LISTENING:
                answered = world.answer(protocol, address, port)
                reached = answered == world.expected(protocol, address, port)
                should = port in open_ports[protocol]
                good = good and reached is should
                cells.append(judged(reached, should, "reached", answered))
            say(
                f"   {protocol.value + ' ' + family(address):10}"
                + "".join(f"{c:>12}" for c in cells)
            )
    return good


def judged(was: bool, should: bool, word: str, otherwise: str) -> str:
    told = word if was else otherwise
    return told if was is should else f"WRONG:{told}"


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it speaks to a person at a terminal


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("demo-vm: told to stop"))
    if os.geteuid() != 0:
        sys.exit("demo-vm: it builds network namespaces. Run it as root.")
    if reason := why_not():
        sys.exit(f"demo-vm: {reason}")
    try:
        good = demonstrate()
    except Unavailable as problem:
        sys.exit(f"demo-vm: {problem}")
    except KeyboardInterrupt:
        sys.exit("demo-vm: interrupted; what it made is gone again")
    except AssertionError as problem:
        sys.exit(f"demo-vm: it did not go as it should: {problem}")
    if not good:
        sys.exit("demo-vm: it did not go as it should: look for WRONG above")
    say("Everything was as it should be.")


if __name__ == "__main__":
    main()
