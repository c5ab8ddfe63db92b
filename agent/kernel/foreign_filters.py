"""Filters of others at the forward hook of the namespace this thread is in: in nftables, also those
that iptables-nft made, and in the legacy tables. They are only read, to warn of them: what cannot
be read is left out."""

from contextlib import suppress

from agent.kernel.legacy_tables import FORWARDING, in_use
from agent.kernel.netlink import NLM_F_DUMP, ask, attributes
from agent.kernel.nftables import (
    NFT_MSG_GETCHAIN,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_TABLE,
    netlink,
)
from agent.kernel.translations import (
    FAMILIES,
    HEADER,
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_TYPE,
    Expression,
    TableReader,
    Unreadable,
    legacy_saved,
    text_of,
)
from rules.foreign_filters import Filter, remedy
from rules.model import Family
from rules.nft import NAME
from rules.problems import printable
from rules.saved_filters import saved_filters

NFTA_CHAIN_POLICY, NFTA_HOOK_HOOKNUM = 5, 1
FORWARD = 2
MOST = 5_000  # rules and elements, at 45 µs each: whoever writes more gets no warning
LIMIT = 120
KNOWN = {"ip": frozenset({Family.IP}), "ip6": frozenset({Family.IP6}), "inet": frozenset(Family)}


def filters() -> tuple[Filter, ...]:
    """Those that others have there. To ask for a legacy table that is not in use would make it."""
    found = list(_of_nftables())
    for family in Family:
        if not in_use(family).isdisjoint(FORWARDING):
            with suppress(Unreadable):
                text = legacy_saved(family)
                found += saved_filters(text, family) if text.count("\n-A ") <= MOST else []
    return tuple(found)


def _of_nftables() -> tuple[Filter, ...]:
    try:
        with netlink() as asking:
            chains = ask(asking, NFT_MSG_GETCHAIN, NLM_F_DUMP, bytes(4), HEADER)
    except OSError:
        return ()
    found: list[Filter] = []
    rules: dict[tuple[str, str], dict[str, list[list[Expression]]]] = {}
    left = MOST
    for header, chain in chains:
        table = (FAMILIES.get(header[0], ""), text_of(chain, NFTA_CHAIN_TABLE))
        hook = attributes(chain.get(NFTA_CHAIN_HOOK, b"")).get(NFTA_HOOK_HOOKNUM, b"")
        ours = table == ("inet", NAME)
        if not table[0] or ours or not hook or int.from_bytes(hook, "big") != FORWARD:
            continue
        if text_of(chain, NFTA_CHAIN_TYPE) != "filter":
            continue
        if table not in rules:
            reader = TableReader(table, most=left)
            try:
                rules[table] = _rules(reader)
            except (Unreadable, OSError):
                continue
            finally:
                left = max(reader.left, 0)
        name = text_of(chain, NFTA_CHAIN_NAME)
        where = f"{table[0]} {table[1]}"
        policy = int.from_bytes(chain.get(NFTA_CHAIN_POLICY, b"\1"), "big")
        found.append(
            Filter(
                where=printable(f"table {where}, chain {name}", LIMIT),
                remedy=printable(remedy(table, name), 2 * LIMIT),
                families=KNOWN[table[0]],
                chain=name,
                drops=policy == 0,
                rules=rules[table],
            )
        )
    return tuple(found)


def _rules(reader: TableReader) -> dict[str, list[list[Expression]]]:
    found: dict[str, list[list[Expression]]] = {}
    for chain, expressions in reader.expressions():
        found.setdefault(chain, []).append(expressions)
    return found
