"""The backends of the contract suite: a namespace of each kind of kernel, all with the same links,
and what a stranger may do to our rules there.

A new backend is a class with these methods and a line in ARENAS.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Address
from typing import Protocol

from agent.kernel.kinds import Kernel, Namespace
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from agent.kernel.netns import inside, opened
from rules.flattened import flattened
from rules.model import Chain, Desired, Family, Foreign, Live, Observed, Rule
from rules.model import Protocol as Transport
from rules.nft_script import statement
from rules.shapes import lookup_of
from rules.shapes import name as map_name
from rules.trace import Packet
from rules.values import replace
from rules.xtables import FILTER, MANGLE, table
from rules.xtables import name as legacy_chain
from rules.xtables import statement as legacy_statement
from tests.spaces import (
    IPTABLES,
    LEGACY,
    NFTABLES,
    SURROUNDINGS,
    emptied,
    kernel,
    legacy,
    nft,
    pod,
    require,
    within,
)
from tests.unit.samples import trace


class Arena(Protocol):
    """One namespace, with a stranger in it."""

    name: str
    kernel: Kernel
    many: int  # ranges that it can take at once without keeping us waiting

    def identity(self, live: Live) -> int:
        """What tells a rule from another that was written in its place."""

    def brand(self) -> None:
        """Give every rule an identity, where they have none by themselves."""

    def reset(self) -> None:
        """Begin anew, with nothing in it."""

    def write(self, rule: Rule) -> None:
        """The stranger adds a rule that looks like one of ours."""

    def shove(self, rule: Rule) -> None:
        """The stranger adds a rule like ours before all others."""

    def scribble(self, chain: Chain = Chain.PREROUTING) -> None:
        """The stranger adds a rule that we never make."""

    def held(self, desired: Desired) -> Desired:
        """The same as its tables can hold it."""

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
    many = 5000

    def __init__(self) -> None:
        self.reset()

    def identity(self, live: Live) -> int:
        return live.handle

    def brand(self) -> None:
        """A handle is never given twice."""

    def reset(self) -> None:
        self._space = MemoryNamespace(SURROUNDINGS)
        self.kernel: Kernel = MemoryKernel({self.name: self._space})

    def write(self, rule: Rule) -> None:
        self._space.insert(rule)

    def shove(self, rule: Rule) -> None:
        self.write(rule)  # rules have no order here

    def scribble(self, chain: Chain = Chain.PREROUTING) -> None:
        self._space.insert(Foreign(chain.value, 0, "a scribble"))

    def held(self, desired: Desired) -> Desired:
        return flattened(desired)

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


class LiveArena:
    """In a namespace of this machine."""

    many = 5000

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.kernel: Kernel = kernel(backend)
        self._ports = itertools.count(40000)

    def reset(self) -> None:
        emptied(self.name)

    def identity(self, live: Live) -> int:
        return live.handle

    def brand(self) -> None:
        """A handle is never given twice."""

    def knock(self, port: int) -> None:
        with opened(self.name) as descriptor, inside(descriptor, self.name):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with sender:
            sender.bind(("127.0.0.1", next(self._ports)))  # a flow that is known is not counted
            sender.sendto(b"knock", ("127.0.0.1", port))


class NftablesArena(LiveArena):
    """Where nftables holds our rules, or many of them as elements of maps. An element has no
    handle; so it is known by a number that we write into its counter, as one written anew is not.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, NFTABLES)

    def identity(self, live: Live) -> int:
        return live.handle or live.packets

    def brand(self) -> None:
        with self.kernel.opened(self.name) as namespace:
            elements = [live for live in namespace.observe().live if not live.handle]
        maps: dict[str, list[Live]] = {}
        for number, live in enumerate(elements, 1000):
            maps.setdefault(_map(live), []).append(replace(live, packets=number))
        lines = [f"flush map inet portranger {name}" for name in maps]
        lines += [_element("add", *branded) for branded in maps.values()]
        if lines:
            nft(self.name, "\n".join(lines))

    def write(self, rule: Rule) -> None:
        nft(self.name, f"add rule inet portranger {rule.chain.value} {statement(rule)}")

    def shove(self, rule: Rule) -> None:
        nft(self.name, f"insert rule inet portranger {rule.chain.value} {statement(rule)}")

    def scribble(self, chain: Chain = Chain.PREROUTING) -> None:
        nft(self.name, f"insert rule inet portranger {chain.value} tcp dport 99 counter accept")

    def held(self, desired: Desired) -> Desired:
        return desired

    def rewrite(self, old: Live, new: Rule) -> None:
        if old.handle:
            place = f"{old.rule.chain.value} handle {old.handle}"
            nft(self.name, f"replace rule inet portranger {place} {statement(new)}")
        elif lookup_of(old.rule) == lookup_of(new):
            nft(self.name, f"{_element('delete', old)}\n{_element('add', Live(new, 0))}")
        else:
            self.erase(old)
            self.write(new)

    def erase(self, live: Live) -> None:
        if not live.handle:
            nft(self.name, _element("delete", live))
            return
        place = f"{live.rule.chain.value} handle {live.handle}"
        nft(self.name, f"delete rule inet portranger {place}")

    def flush(self) -> None:
        nft(self.name, "flush table inet portranger")

    def drop(self) -> None:
        nft(self.name, "delete table inet portranger")


def _map(live: Live) -> str:
    lookup = lookup_of(live.rule)
    assert lookup is not None
    return map_name(lookup)


def _element(verb: str, *elements: Live) -> str:
    """A command of nft for elements of one map, with their counters."""
    what = [
        f"{one.rule.ports}"
        if verb == "delete"
        else f"{one.rule.ports} counter packets {one.packets} bytes 0"
        f' comment "{one.rule.owner}" : {one.rule.to}'
        for one in elements
    ]
    return f"{verb} element inet portranger {_map(elements[0])} {{ {', '.join(what)} }}"


class IptablesArena(LiveArena):
    """Where the legacy tables hold them. A handle is a place there, and places shift; so rules are
    known by numbers that we write into their counters, which a rewritten rule would lose."""

    many = 300

    def __init__(self, name: str) -> None:
        super().__init__(name, IPTABLES)

    def identity(self, live: Live) -> int:
        return live.packets

    def reset(self) -> None:
        super().reset()
        for one in (FILTER, MANGLE):
            for family in self._filtered(one):
                within(self.name, f"{LEGACY[family]}-restore", "-w", stdin=f"*{one}\nCOMMIT\n")

    def brand(self) -> None:
        numbers = itertools.count(1000)
        for command in LEGACY.values():
            text = within(self.name, f"{command}-save", "-c")
            marked = re.sub(
                r"^\[\d+:\d+\] -A PORTRANGER-",
                lambda _: f"[{next(numbers)}:0] -A PORTRANGER-",
                text,
                flags=re.MULTILINE,
            )
            if marked != text:
                within(self.name, f"{command}-restore", "-w", "-c", stdin=marked)

    def write(self, rule: Rule) -> None:
        self._do(rule, f"-A {legacy_chain(rule.chain)} {legacy_statement(rule)}")

    def shove(self, rule: Rule) -> None:
        self._do(rule, f"-I {legacy_chain(rule.chain)} {legacy_statement(rule)}")

    def scribble(self, chain: Chain = Chain.PREROUTING) -> None:
        line = f"-I {legacy_chain(chain)} -p tcp -m tcp --dport 99 -j ACCEPT"
        self._restore(table(chain), [line], [Family.IP])

    def held(self, desired: Desired) -> Desired:
        return flattened(desired)

    def rewrite(self, old: Live, new: Rule) -> None:
        place = f"{legacy_chain(old.rule.chain)} {old.handle + 1}"
        self._do(old.rule, f"-R {place} {legacy_statement(new)}")

    def erase(self, live: Live) -> None:
        self._do(live.rule, f"-D {legacy_chain(live.rule.chain)} {legacy_statement(live.rule)}")

    def flush(self) -> None:
        legacy(self.name, "-F")
        for one in (FILTER, MANGLE):
            self._restore(one, ["-F"], self._filtered(one))

    def drop(self) -> None:
        legacy(self.name, "-F", "-X")
        for one in (FILTER, MANGLE):
            self._restore(one, ["-F", "-X"], self._filtered(one))

    def _filtered(self, table: str) -> list[Family]:
        """The families in which there is that table."""
        names = {Family.IP: "ip_tables_names", Family.IP6: "ip6_tables_names"}
        return [
            family
            for family, name in names.items()
            if table in within(self.name, "cat", f"/proc/net/{name}", code=None).split()
        ]

    def _do(self, rule: Rule, line: str) -> None:
        self._restore(table(rule.chain), [line], [rule.family])

    def _restore(self, where: str, lines: Sequence[str], families: Iterable[Family]) -> None:
        script = "".join(f"{line}\n" for line in (f"*{where}", *lines, "COMMIT"))
        for family in families:
            within(self.name, f"{LEGACY[family]}-restore", "-w", "--noflush", stdin=script)


@contextmanager
def memory() -> Iterator[Arena]:
    yield MemoryArena()


@contextmanager
def nftables() -> Iterator[Arena]:
    with pod() as name:
        yield NftablesArena(name)


@contextmanager
def iptables() -> Iterator[Arena]:
    require(IPTABLES)
    with pod() as name:
        yield IptablesArena(name)


ARENAS: dict[str, Callable[[], AbstractContextManager[Arena]]] = {
    "memory": memory,
    NFTABLES: nftables,
    IPTABLES: iptables,
}


@contextmanager
def entered(arena: Arena) -> Iterator[Namespace]:
    """The namespace, opened as reconcile opens it."""
    with arena.kernel.opened(arena.name) as namespace:
        yield namespace
