"""Our nftables table in one namespace: read through libnftables, written to the kernel itself.

A socket belongs to the namespace it was made in and keeps that alive: close it soon.
"""

import functools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable

from agent.errors import BackendMissing, Failure, NotPermitted, Stale, TryAgain
from agent.kernel.grace import wait_for_packets
from agent.kernel.kinds import Generation, Known
from agent.kernel.libnftables import Libnftables, TooMuch, Unreadable, load
from agent.kernel.netlink import ask, attribute, attributes, transact
from rules.model import Family, Observed, Rule
from rules.nft import NAME, Json, commands
from rules.nft_batch import NEWRULE, batch, can_write
from rules.nft_foreseen import are_elements, carried_out, has_copies, is_for
from rules.nft_listing import decode
from rules.nft_steps import AddBridge, AddLookup, AddRule, Step, takes_away
from rules.nft_transactions import is_optional, transactions
from rules.plan import Plan, Table
from rules.shapes import PORTS

TABLE: Json = {"table": {"family": "inet", "name": NAME}}
KNOWN_RULES = 50_000  # decoded and remembered at the most; then from scratch
PAUSES = (0.01, 0.03, 0.1, 0.0)  # seconds before a listing is doubted once more
CHANGING = "the rules of this namespace keep changing while they are read"
MISSING = "No such file or directory"
NETLINK_NETFILTER = 12
NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETGEN = 0xA01, 0xA04, 0xA10
NFTA_GEN_ID, NFTA_TABLE_FLAGS, NFTA_RULE_HANDLE = 1, 2, 3
NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME = 1, 3
OUR_TABLE = struct.pack("=BBHHH12s", 1, 0, 0, 4 + len(NAME) + 1, 1, NAME.encode())  # inet, name
SO_NETNS_COOKIE = 71  # Linux 5.14
RULES = AddRule, AddLookup, AddBridge  # steps that have a handle
STALE = (
    MISSING,
    "File exists",
    "Device or resource busy",
    "Interrupted system call",
    "should be restarted",
)


class Nftables:
    """Made by a thread that is in the namespace; it stays there wherever that thread goes."""

    def __init__(self, descriptor: int, library: Libnftables, known: Known | None = None) -> None:
        """What is known from an earlier look spares another one, if nothing changed since."""
        load()
        self._descriptor, self._library = descriptor, library
        self._netlink = netlink()
        self._known = known
        self._foreseen: tuple[Generation, Callable[[], Observed]] | None = None
        self._rules: dict[tuple[str, str, str], Rule] = {}
        self.advanced: tuple[Generation, Generation] | None = None
        """The generations before and after the last commit, if nobody else has been there."""

    @property
    def known(self) -> Known | None:
        """What there was at the last look or, after a commit, what there is if nobody else has been
        there: worked out when somebody asks, and the rules are long effective."""
        if self._foreseen is not None:
            generation, foreseen = self._foreseen
            self.known = generation, foreseen()
        return self._known

    @known.setter
    def known(self, known: Known | None) -> None:
        self._known, self._foreseen = known, None

    @functools.cached_property
    def kubevirt(self) -> frozenset[Family]:
        """In which families KubeVirt's own chains are live, when first asked."""
        return kubevirt_in(self._netlink)

    def observe(self) -> Observed:
        """What our table holds, as far as its rules go: where no generation of the ruleset has
        passed since the last look, the same as then, counters included."""
        try:
            generation = generation_of(self._netlink)
        except PermissionError as error:  # libnftables would write to the terminal by itself
            raise failure(os.strerror(error.errno or 0), Table.KEEP) from error
        except OSError:
            return self._list()  # which says what is wrong, and what to do about it
        if self.known is None or self.known[0] != generation:
            self.known = generation, self._list(generation)
        return self.known[1]

    def _list(self, generation: Generation | None = None) -> Observed:
        """What libnftables lists. What takes too much to list counts as unsound, as somebody put it
        there for that; but not while others keep committing, which has it start over each time, nor
        when a worker timed out: both say nothing about the table."""
        try:
            if self._flags():
                return Observed(table=True, unsound="somebody set flags on the table", mapped={})
        except FileNotFoundError:
            return Observed(mapped={})  # no table
        for pause in PAUSES:
            try:
                listing, error = self._library.listed(self._descriptor, TABLE)
            except TooMuch as unreadable:
                if generation is not None and generation_of(self._netlink) != generation:
                    raise TryAgain(CHANGING, "Find out what does") from unreadable
                return Observed(table=True, unsound=unreadable.what, mapped={})
            except Unreadable as unreadable:
                return Observed(table=True, unsound=unreadable.what, mapped={})
            if MISSING in error:
                break
            if error:
                raise failure(error, Table.KEEP)
            if len(self._rules) > KNOWN_RULES:
                self._rules.clear()
            found = decode(listing, self._rules)
            if not pause or not (found.unsound or found.foreign) or not _may_lack(listing):
                return found
            time.sleep(pause)
        return Observed(mapped={})

    def _flags(self) -> int:
        """Asked beforehand: where a table has one flag, libnftables (1.0.6) writes it to JSON
        after freeing it, and the listing is garbage or the end of the process."""
        try:
            ((_, attributes),) = ask(self._netlink, NFT_MSG_GETTABLE, 0, OUR_TABLE, "=BBH")
        except FileNotFoundError:
            raise
        except OSError:
            return 0  # the listing says what is wrong
        return int(struct.unpack(">I", attributes[NFTA_TABLE_FLAGS])[0])

    def commit(self, plan: Plan) -> None:
        """Carry out the plan for the rules, each transaction all or nothing. Where there are
        several, or only elements change, which nothing tells from others, each is for the
        generation of the ruleset that we know. What is left behind by one who ends between two is
        found by the next look. What there is now is foreseen; that look takes it for granted only
        if the generation tells that nobody else has been there."""
        parts = transactions(plan)
        if not parts:
            return
        known = self.known
        exact = len(parts) > 1 or are_elements(plan)
        if known and exact and not is_for(plan, known[1]):
            raise Stale("the plan is for an earlier look at the table", "Try again")
        self.known = None  # who is wrong once is not asked again
        self.advanced = None
        handles: list[int] = []
        done: list[Step] = []
        generation = known[0] if known else None
        for turn, part in enumerate(parts):
            if done and takes_away(part, parts[turn - 1]):
                wait_for_packets()
            try:
                table = Table.KEEP if done else plan.table
                handles += self._carry_out(part, table, generation if exact else None)
            except Stale:
                raise
            except Failure:
                if not is_optional(part, parts[turn + 1 :]):
                    raise
                continue
            done += part
            generation = generation.after(1) if generation else None
        self.advanced = (known[0], generation) if known and generation else None
        told = len(handles) == sum(isinstance(step, RULES) for step in done)
        if known and generation and told and is_for(plan, known[1]) and not has_copies(known[1]):
            foreseen = functools.partial(carried_out, done, known[1], handles)
            self._foreseen = generation, foreseen

    def _carry_out(self, part: list[Step], table: Table, due: Generation | None) -> list[int]:
        """The handles of its rules, as far as they are told; refused in any generation but the one
        that is due."""
        if can_write(part):
            return self._write(batch(part, due.number if due else None), table)
        if due is not None:
            self._expect(due)
        self._run(commands(part), table)
        if due is not None:
            self._expect(due.after(1))
        return []

    def _expect(self, generation: Generation) -> None:
        if generation_of(self._netlink) != generation:
            raise Stale("the ruleset changed while we changed it", "Try again")

    def _write(self, content: bytes, table: Table) -> list[int]:
        """The handles of its rules."""
        try:
            echoed = transact(self._netlink, content)
        except OSError as error:
            raise failure(os.strerror(error.errno or 0), table) from error
        found = [attributes(body[4:])[NFTA_RULE_HANDLE] for kind, body in echoed if kind == NEWRULE]
        return [int.from_bytes(handle, "big") for handle in found]

    def _run(self, words: list[Json], table: Table) -> None:
        _, error = self._library.run(self._descriptor, *words)
        if error:
            if table is Table.CREATE and self._list().table:
                raise Stale("somebody else made the table while we looked", "Try again")
            raise failure(error, table)

    def close(self) -> None:
        """Let go of the namespace."""
        self._netlink.close()


def _may_lack(listing: Iterable[Json]) -> bool:
    """Whether a listing may lack what is there. The map from port to port is a hash table that the
    kernel enlarges behind our back, and who lists it meanwhile misses elements: seen with 32,767 of
    them on 6.18, once in 40 times on a busy machine. To take that for tampering would make the
    table anew."""
    maps = [one["map"] for one in listing if "map" in one]
    return any(isinstance(one, dict) and str(one.get("name")).endswith(PORTS) for one in maps)


def netlink() -> socket.socket:
    """A socket to ask the nftables of the namespace this thread is in."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)


def generation_of(asking: socket.socket) -> Generation:
    """The generation of the ruleset there: every change of it makes another."""
    ((_, attributes),) = ask(asking, NFT_MSG_GETGEN, 0, bytes(4), "=BBH")
    return Generation(cookie_of(asking), int.from_bytes(attributes[NFTA_GEN_ID], "big"))


def has_table(asking: socket.socket) -> bool:
    """Whether our table is there."""
    try:
        ask(asking, NFT_MSG_GETTABLE, 0, OUR_TABLE, "=BBH")
    except FileNotFoundError:
        return False
    return True


def cookie_of(asking: socket.socket) -> int:
    """Of the namespace that a socket is in."""
    cookie = asking.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
    return int.from_bytes(cookie, sys.byteorder)


def kubevirt_in(asking: socket.socket) -> frozenset[Family]:
    """The families in which KubeVirt's own chains are live there."""
    found = set()
    for family, code in ((Family.IP, socket.AF_INET), (Family.IP6, socket.AF_INET6)):
        try:
            ask(asking, NFT_MSG_GETCHAIN, 0, bytes([code, 0, 0, 0]) + KUBEVIRT_CHAIN, "=BBH")
        except OSError:  # there is none; or nobody may ask, which whoever lists our table tells
            continue
        found.add(family)
    return frozenset(found)


# It is jumped to by the first rule that KubeVirt (from 0.59 to 1.9 at least) makes for a machine.
KUBEVIRT_CHAIN = attribute(NFTA_CHAIN_TABLE, b"nat\0") + attribute(
    NFTA_CHAIN_NAME, b"KUBEVIRT_PREINBOUND\0"
)


def failure(error: str, table: Table) -> Failure:
    """What an error of libnftables means for the user."""
    gist = next((line for line in error.splitlines() if line.strip()), "no reason given")
    if "Operation not permitted" in error:
        return NotPermitted("nftables may not be used", "Run as root, or with CAP_NET_ADMIN")
    if "not supported" in error or (table is Table.CREATE and MISSING in error):
        return BackendMissing(
            f"this kernel cannot do NAT in an inet table ({gist})",
            "It needs Linux 5.2 or later with nf_tables and nft_chain_nat",
        )
    if any(words in error for words in STALE):
        return Stale(f"the table changed while we looked at it ({gist})", "Try again")
    return Failure(f"nftables refused ({gist})")
