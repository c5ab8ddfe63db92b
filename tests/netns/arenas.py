"""The backends of the contract suite: a namespace of each kind of kernel, all with the same links,
and what a stranger may do to our rules there.

A new backend is a class with these methods and a line in ARENAS.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Address
from typing import Protocol

from agent.kernel.kinds import Kernel, Namespace
from agent.kernel.live import LiveKernel
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from agent.kernel.netns import inside, opened
from rules.model import Chain, Family, Foreign, Live, Observed, Rule
from rules.model import Protocol as Transport
from rules.nft import statement
from rules.trace import Packet, trace
from rules.values import replace
from tests.spaces import SURROUNDINGS, emptied, nft, pod


class Arena(Protocol):
    """One namespace, with a stranger in it."""

    name: str
    kernel: Kernel

    def reset(self) -> None:
        """Begin anew, with nothing in it."""

    def write(self, rule: Rule) -> None:
        """The stranger adds a rule that looks like one of ours."""

    def scribble(self) -> None:
        """The stranger adds a rule that we never make."""

    def rewrite(self, old: Live, new: Rule) -> None:
        """The stranger edits a rule."""

    def erase(self, live: Live) -> None:
        """The stranger removes a rule."""

    def flush(self) -> None:
        """The stranger removes every rule."""

    def drop(self) -> None:
        """The stranger removes everything of ours."""

    def knock(self, port: int) -> None:
        """A packet from inside the namespace goes to 127.0.0.1, UDP, that port."""


class MemoryArena:
    """In the kernel in memory."""

    name = "memory"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._space = MemoryNamespace(SURROUNDINGS)
        self.kernel: Kernel = MemoryKernel({self.name: self._space})

    def write(self, rule: Rule) -> None:
        self._space.insert(rule)

    def scribble(self) -> None:
        self._space.insert(Foreign(Chain.PREROUTING.value, 0, "a scribble"))

    def rewrite(self, old: Live, new: Rule) -> None:
        self.erase(old)
        self.write(new)

    def erase(self, live: Live) -> None:
        left = tuple(one for one in self._space.held.live if one.handle != live.handle)
        self._space.held = replace(self._space.held, live=left)

    def flush(self) -> None:
        self._space.held = replace(self._space.held, live=(), foreign=())

    def drop(self) -> None:
        self._space.held = Observed()

    def knock(self, port: int) -> None:
        self._space.held = replace(
            self._space.held,
            live=tuple(
                replace(live, packets=live.packets + 1) if _takes(live.rule, port) else live
                for live in self._space.held.live
            ),
        )


def _takes(rule: Rule, port: int) -> bool:
    packet = Packet(
        family=Family.IP, protocol=Transport.UDP, port=port, destination=IPv4Address("127.0.0.1")
    )
    return trace([rule], Chain.OUTPUT, packet) is rule


class NftablesArena:
    """In a namespace of this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernel: Kernel = LiveKernel()

    def reset(self) -> None:
        emptied(self.name)

    def write(self, rule: Rule) -> None:
        nft(self.name, f"add rule inet portranger {rule.chain.value} {statement(rule)}")

    def scribble(self) -> None:
        nft(self.name, "insert rule inet portranger prerouting tcp dport 99 counter accept")

    def rewrite(self, old: Live, new: Rule) -> None:
        place = f"{old.rule.chain.value} handle {old.handle}"
        nft(self.name, f"replace rule inet portranger {place} {statement(new)}")

    def erase(self, live: Live) -> None:
        place = f"{live.rule.chain.value} handle {live.handle}"
        nft(self.name, f"delete rule inet portranger {place}")

    def flush(self) -> None:
        nft(self.name, "flush table inet portranger")

    def drop(self) -> None:
        nft(self.name, "delete table inet portranger")

    def knock(self, port: int) -> None:
        with opened(self.name) as descriptor, inside(descriptor, self.name):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with sender:
            sender.sendto(b"knock", ("127.0.0.1", port))


@contextmanager
def memory() -> Iterator[Arena]:
    yield MemoryArena()


@contextmanager
def nftables() -> Iterator[Arena]:
    with pod() as name:
        yield NftablesArena(name)


ARENAS: dict[str, Callable[[], AbstractContextManager[Arena]]] = {
    "memory": memory,
    "nftables": nftables,
}


@contextmanager
def entered(arena: Arena) -> Iterator[Namespace]:
    """The namespace, opened as reconcile opens it."""
    with arena.kernel.opened(arena.name) as namespace:
        yield namespace
