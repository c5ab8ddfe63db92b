"""What others translate in the namespace this thread is in: in nftables, and in the legacy tables
of iptables where they are in use. It is only read."""

import os
import subprocess
from collections.abc import Callable, Iterator

from agent.errors import TryAgain
from agent.kernel.backends import legacy_is_live
from agent.kernel.libnftables import Unreadable
from agent.kernel.netlink import NLM_F_DUMP, Attributes, ask
from agent.kernel.nftables import (
    MISSING,
    NFT_MSG_GETCHAIN,
    NFT_MSG_GETTABLE,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_TABLE,
    NFTA_TABLE_FLAGS,
    failure,
    netlink,
)
from rules import translations as rules
from rules.model import Family
from rules.nft import NAME, Json
from rules.occupied import Translation
from rules.plan import Table
from rules.problems import printable

NFTA_TABLE_NAME, NFTA_CHAIN_TYPE = 1, 7
DORMANT = 1
FAMILIES = {1: "inet", 2: "ip", 10: "ip6"}
PROGRAMS = {Family.IP: "iptables", Family.IP6: "ip6tables"}
Name = tuple[str, str]  # family and name of a table
PATIENCE = 10.0  # seconds; to save thousands of rules takes a tenth of one


Lister = Callable[[Json], tuple[list[Json], str]]


def translations(lister: Lister) -> tuple[Translation, ...]:
    """All of them, in tables with a nat chain."""
    listing = [entry for question in _questions() for entry in _listed(question, lister)]
    found = list(rules.listed(listing))
    for family in rules.hidden(listing):
        found += rules.saved(_save("nft", family), family, f"table {family.value} nat")
    if legacy_is_live():
        for family in Family:
            text = _save("legacy", family)
            found += rules.saved(text, family, f"legacy table {family.value} nat")
    return tuple(dict.fromkeys(found))


def _listed(what: Json, lister: Lister) -> list[Json]:
    """What libnftables lists of that; nothing, where it is not there or cannot be read: names of
    others can be any bytes."""
    try:
        listing, error = lister(what)
    except Unreadable:
        return []
    if error and MISSING not in error:
        raise failure(error, Table.KEEP)
    return listing


def _questions() -> Iterator[Json]:
    """What to list. The flags of a table are what libnftables (1.0.6) cannot write (see
    agent.kernel.nftables): of one that has some, all else is listed, part by part."""
    tables, chains = _dumped()
    for (family, name), flags in tables.items():
        kinds = chains.get((family, name), {})
        if flags & DORMANT or (family, name) == ("inet", NAME) or "nat" not in kinds.values():
            continue
        if not flags:
            yield {"table": {"family": family, "name": name}}
            continue
        table = {"family": family, "table": name}
        yield {"sets": table}
        yield {"maps": table}
        for chain in kinds:
            yield {"chain": {**table, "name": chain}}


def _dumped() -> tuple[dict[Name, int], dict[Name, dict[str, str]]]:
    """The flags of each table, and the kind of each chain."""
    with netlink() as asking:
        try:
            tables = ask(asking, NFT_MSG_GETTABLE, NLM_F_DUMP, bytes(4), "=BBH")
            chains = ask(asking, NFT_MSG_GETCHAIN, NLM_F_DUMP, bytes(4), "=BBH")
        except PermissionError as error:
            raise failure(os.strerror(error.errno or 0), Table.KEEP) from error
        except InterruptedError:
            raise
        except OSError:
            return {}, {}  # this kernel has no nftables
    flags = {
        (FAMILIES[header[0]], _text(found, NFTA_TABLE_NAME)): _number(found, NFTA_TABLE_FLAGS)
        for header, found in tables
        if header[0] in FAMILIES
    }
    kinds: dict[Name, dict[str, str]] = {}
    for header, found in chains:
        table = (FAMILIES.get(header[0], ""), _text(found, NFTA_CHAIN_TABLE))
        name, kind = _text(found, NFTA_CHAIN_NAME), _text(found, NFTA_CHAIN_TYPE)
        kinds.setdefault(table, {})[name] = kind
    return flags, kinds


def _text(found: Attributes, kind: int) -> str:
    return found.get(kind, b"").rstrip(b"\0").decode(errors="replace")


def _number(found: Attributes, kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), "big")


def _save(variant: str, family: Family) -> str:
    """What iptables-save says of the tables that are in use; nothing, where it is not there. A new
    process is in the namespace of the thread that starts it."""
    program = f"/usr/sbin/{PROGRAMS[family]}-{variant}-save"
    try:
        done = subprocess.run(  # noqa: S603 - a constant path
            [program], capture_output=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TryAgain(f"cannot run {program} ({error})", "Try again") from error
    if done.returncode:
        gist = printable(done.stderr.decode(errors="replace").strip(), 200)
        raise TryAgain(f"{program} failed ({gist})", "Try again")
    return done.stdout.decode(errors="replace")
