"""What others translate in the namespace this thread is in: in nftables, and in the legacy tables
of iptables where they are in use. It is only read.

The rules are taken from the kernel's own dump, without libnftables: that needs 3 KiB and 40 µs for
each rule, and cannot read the tables of every iptables. What is read is bounded by its size, not by
a clock. A table that cannot be read is named: nobody may take it for one without translations."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from agent.kernel.legacy_tables import in_use
from agent.kernel.netlink import (
    NLM_F_DUMP,
    Answer,
    Attributes,
    ask,
    attribute,
    picked,
)
from agent.kernel.nftables import (
    NFT_MSG_GETCHAIN,
    NFT_MSG_GETTABLE,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_TABLE,
    NFTA_TABLE_FLAGS,
    failure,
    netlink,
)
from rules.model import Family
from rules.netlink_rules import Elements, decoded, each, may_matter
from rules.nft import NAME
from rules.occupied import Translation
from rules.plan import Table
from rules.problems import printable
from rules.saved_translations import saved
from rules.translations import STRANGE, Branch, Chains, TooMany, branches
from rules.values import Value

NFT_MSG_GETRULE, NFT_MSG_GETSET, NFT_MSG_GETSETELEM = 0xA07, 0xA0A, 0xA0D
NFTA_TABLE_NAME, NFTA_CHAIN_HOOK, NFTA_CHAIN_TYPE = 1, 4, 7
NFTA_RULE_TABLE, NFTA_RULE_CHAIN, NFTA_RULE_EXPRESSIONS = 1, 2, 4
NFTA_SET_TABLE, NFTA_SET_NAME, NFTA_SET_FLAGS = 1, 2, 3
NFTA_ELEMENTS_TABLE, NFTA_ELEMENTS_SET, NFTA_ELEMENTS = 1, 2, 3
NFT_SET_INTERVAL = 4
HEADER = "=BBH"
ABSENT = (errno.EINVAL, errno.EOPNOTSUPP)  # what a kernel without nftables answers
DORMANT = 1
FAMILIES = {1: "inet", 2: "ip", 10: "ip6"}
CODES = {name: code for code, name in FAMILIES.items()}
PROGRAMS = {Family.IP: "iptables", Family.IP6: "ip6tables"}
MOST = 300_000  # rules and elements of a table that are read, all tries together
MOST_SAVED = 64 << 20  # bytes that iptables-save may write
PROCESSOR = 10  # seconds of it that iptables-save may use; for 100,000 rules it takes one
PATIENCE = 25.0  # seconds until it is given up whatever it does; fewer than a watchdog's
Name = tuple[str, str]  # family and name of a table
Expression = dict[str, Any]
Read = TypeVar("Read")


class Found(Value, kw_only=True):
    """What others translate, and the tables that cannot be read, each with the reason."""

    translations: tuple[Translation, ...] = ()
    unreadable: tuple[str, ...] = ()


class Unreadable(Exception):
    """Why a table cannot be read."""


def translations() -> Found:
    """All of them, in tables with a nat chain."""
    found: list[Translation] = []
    unreadable: list[str] = []
    try:
        tables = list(_tables())
    except InterruptedError:
        return Found(unreadable=("nftables: tables keep changing while they are listed",))
    except OSError as error:
        tables = []
        unreadable.append(f"nftables: {_reason(error)}")
    for family, name, chains in tables:
        where = printable(f"table {family} {name}", 120)
        try:
            found += TableReader((family, name), where, chains).translations()
        except (Unreadable, OSError) as error:
            unreadable.append(f"{where}: {_reason(error)}")
    for version in _legacy():
        where = f"legacy table {version.value} nat"
        try:
            found += saved(legacy_saved(version), version, where)
        except (Unreadable, TooMany) as error:
            unreadable.append(f"{where}: {_reason(error)}")
    return Found(
        translations=tuple(dict.fromkeys(found)), unreadable=tuple(dict.fromkeys(unreadable))
    )


def _legacy() -> list[Family]:
    """The families whose legacy table nat is in use."""
    return [family for family in Family if "nat" in in_use(family)]


def _reason(error: Exception) -> str:
    match error:
        case InterruptedError():
            return "it keeps changing while it is read"
        case TooMany():
            return "too many ways through its chains"
        case OSError():
            return os.strerror(error.errno or 0)
    return str(error)


def tables_of_others() -> list[Name]:
    """Those of nftables that are not ours, whatever is in them."""
    with netlink() as asking:
        tables = ask(asking, NFT_MSG_GETTABLE, NLM_F_DUMP, bytes(4), HEADER)
    names = [(FAMILIES.get(head[0], ""), text_of(one, NFTA_TABLE_NAME)) for head, one in tables]
    return [name for name in names if name != ("inet", NAME)]


def _tables() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Those of others that have a nat chain and do not sleep, with the kind of each base chain."""
    with netlink() as asking:
        try:
            tables = ask(asking, NFT_MSG_GETTABLE, NLM_F_DUMP, bytes(4), HEADER)
            chains = ask(asking, NFT_MSG_GETCHAIN, NLM_F_DUMP, bytes(4), HEADER)
        except PermissionError as error:
            raise failure(os.strerror(error.errno or 0), Table.KEEP) from error
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            return  # this kernel has no nftables
    kinds: dict[Name, dict[str, str]] = {}
    for header, found in chains:
        if NFTA_CHAIN_HOOK in found:
            table = (FAMILIES.get(header[0], ""), text_of(found, NFTA_CHAIN_TABLE))
            name, kind = text_of(found, NFTA_CHAIN_NAME), text_of(found, NFTA_CHAIN_TYPE)
            kinds.setdefault(table, {})[name] = kind
    for header, found in tables:
        family, name = FAMILIES.get(header[0], ""), text_of(found, NFTA_TABLE_NAME)
        sleeps = int.from_bytes(found.get(NFTA_TABLE_FLAGS, b""), "big") & DORMANT
        bases = kinds.get((family, name), {})
        if not sleeps and (family, name) != ("inet", NAME) and "nat" in bases.values():
            yield family, name, bases


class TableReader:
    """A table that is being read: rules on one socket, and on another the sets they look into."""

    def __init__(
        self, name: Name, where: str = "", bases: Iterable[str] = (), most: int | None = None
    ) -> None:
        self._name, self.left = name, MOST if most is None else most
        self._code = bytes([CODES[name[0]], 0, 0, 0])
        self._chains = Chains(where)
        for chain in bases:
            self._chains.base(chain)
        self._sets: dict[str, Elements] = {}
        self._intervals: set[str] = set()

    def expressions(self) -> Iterator[tuple[str, list[Expression]]]:
        """Every rule, with the chain it is in."""
        yield from self._dump(self._whole)

    def _whole(self, answer: Answer) -> tuple[str, list[Expression]]:
        self._count(1)
        raw = answer[1].get(NFTA_RULE_EXPRESSIONS, b"")
        try:
            return text_of(answer[1], NFTA_RULE_CHAIN), decoded(raw, self._elements)
        except STRANGE as error:
            raise Unreadable(f"a rule is not understood ({error!r})") from error

    def _dump(self, read: Callable[[Answer], Read | None]) -> list[Read]:
        table = os.fsencode(self._name[1]) + b"\0"
        with netlink() as rules, netlink() as self._asking:
            body = self._code + attribute(NFTA_SET_TABLE, table)
            for _, found in ask(self._asking, NFT_MSG_GETSET, NLM_F_DUMP, body, HEADER):
                if int.from_bytes(found.get(NFTA_SET_FLAGS, b""), "big") & NFT_SET_INTERVAL:
                    self._intervals.add(text_of(found, NFTA_SET_NAME))
            body = self._code + attribute(NFTA_RULE_TABLE, table)
            return picked(rules, NFT_MSG_GETRULE, NLM_F_DUMP, body, HEADER, read)

    def translations(self) -> list[Translation]:
        """What the table translates."""
        for chain, some in self._dump(self._read):
            self._chains.add(chain, some)
        try:
            return list(self._chains.translations())
        except TooMany as error:
            raise Unreadable(_reason(error)) from error

    def _read(self, answer: Answer) -> tuple[str, list[Branch]] | None:
        """What a rule does, made out as it comes: taken apart, 100,000 of them would be hundreds of
        megabytes. None: nothing of interest."""
        _, found = answer
        self._count(1)
        raw = found.get(NFTA_RULE_EXPRESSIONS, b"")
        if text_of(found, NFTA_RULE_TABLE) != self._name[1] or not may_matter(raw):
            return None
        family, table = self._name
        chain = text_of(found, NFTA_RULE_CHAIN)
        try:
            rule = {"family": family, "table": table, "expr": decoded(raw, self._elements)}
            return chain, branches(rule, {})
        except STRANGE as error:
            raise Unreadable(
                f"a rule of its chain {chain} is not understood ({error!r})"
            ) from error

    def _elements(self, name: str) -> Elements:
        if name not in self._sets:
            self._sets[name] = Elements(name in self._intervals, tuple(self._dumped(name)))
        else:  # each rule that looks into it takes all of them apart again
            self._count(len(self._sets[name].raw))
        return self._sets[name]

    def _dumped(self, name: str) -> Iterator[bytes]:
        body = self._code + attribute(NFTA_ELEMENTS_TABLE, os.fsencode(self._name[1]) + b"\0")
        body += attribute(NFTA_ELEMENTS_SET, os.fsencode(name) + b"\0")
        for _, found in ask(self._asking, NFT_MSG_GETSETELEM, NLM_F_DUMP, body, HEADER):
            for _, element in each(found.get(NFTA_ELEMENTS, b"")):
                self._count(1)
                yield element

    def _count(self, more: int) -> None:
        self.left -= more
        if self.left < 0:
            raise Unreadable(f"it holds more than {MOST:,} rules and elements")


def text_of(found: Attributes, kind: int) -> str:
    return found.get(kind, b"").rstrip(b"\0").decode(errors="surrogateescape")


def legacy_saved(family: Family) -> str:
    """What iptables-legacy-save says of the tables that are in use. A new process is
    in the namespace of the thread that starts it."""
    program = f"/usr/sbin/{PROGRAMS[family]}-legacy-save"
    try:
        with subprocess.Popen(  # noqa: S603 - a constant path
            [program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            with suppress(OSError, ValueError):  # it has ended already
                resource.prlimit(child.pid, resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR))
            try:
                said, error = child.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired as late:
                child.kill()
                raise Unreadable(f"{program} did not finish in {PATIENCE:g} s") from late
    except FileNotFoundError as failed:
        raise Unreadable(f"{program} is not installed") from failed
    except OSError as failed:
        raise Unreadable(f"cannot run {program} ({failed})") from failed
    if child.returncode:
        gist = printable(error.decode(errors="replace").strip(), 200)
        raise Unreadable(f"{program} failed ({gist or f'exit status {child.returncode}'})")
    if len(said) > MOST_SAVED:
        raise Unreadable(f"{program} wrote more than {MOST_SAVED >> 20} MiB")
    return said.decode(errors="replace")
