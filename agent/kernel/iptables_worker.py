"""A process of its own for python-iptables, one per address family: its tables are singletons of a
process, IPv4 and IPv6 cannot share one, and it redirects the standard output while it reads.

Run by agent.kernel.iptables; not for people.
"""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from ipaddress import ip_interface
from itertools import groupby
from pathlib import Path
from typing import Any

from agent.kernel.worker import serve
from rules.model import Chain
from rules.xtables import JUMP_COMMENT, NAT, PREFIX, TABLES, name, table

UNUSABLE = ""  # why python-iptables is
try:
    import iptc
    import iptc.easy
except Exception as error:  # without Debian's package iptables: it looks for it as it is imported
    UNUSABLE = str(error) or repr(error)

OURS = {one: {name(chain) for chain in Chain if table(chain) == one} for one in reversed(TABLES)}
LOCK = "/run/xtables.lock"
LOCK_PATIENCE = 5.0  # seconds to wait for another program that holds the lock
NAMES = {"ip": "ip_tables_names", "ip6": "ip6_tables_names"}
IPTABLES = "/usr/sbin/iptables"

Json = dict[str, Any]

# Rules with all that is lost where python-iptables and iptables do not go together.
SAMPLES: list[Json] = [
    {
        "in-interface": "eth0",
        "protocol": protocol,
        protocol: {"dport": "1000:8000"},
        "comment": {"comment": JUMP_COMMENT},
    }
    for protocol in ("tcp", "udp")
]
TO = {"ip": "192.0.2.1", "ip6": "2001:db8::1"}


def main() -> None:
    """Serve the socket named on the command line."""
    family = sys.argv[2]
    serve(socket.socket(fileno=int(sys.argv[1])), lambda question: _answer(question, family))


def _answer(question: Json, family: str) -> Json:
    if UNUSABLE:
        return {"error": "Unusable", "text": UNUSABLE}
    with _locked(), contextlib.closing(Tables(family)) as tables:
        listing = _listing(tables, family)
        if "steps" not in question:
            return listing
        if question["digest"] != listing["digest"]:
            return {"error": "Stale", "text": "our chains changed since they were looked at"}
        if question["steps"] != [["drop"]] and _unfit(family):
            return {"error": "Unfit", "text": _unfit(family)}
        for one, due in _commits(question["steps"], family):
            for step, *details in due:
                _STEPS[step](tables[one], family, *details)
            tables.commit(one)
        return {}


class Tables:
    """Those that a request opened. Merely to open one brings it to life in the namespace, and its
    socket would keep that alive until the next request."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._open:
            opened = iptc.Table(name) if self._family == "ip" else iptc.Table6(name)
            opened.autocommit = False
            opened.refresh()
            self._open[name] = opened
            self._tell()
        return self._open[name]

    def commit(self, name: str) -> None:
        """What was done in it, at once; then it is to be opened anew."""
        self._open[name].commit()
        self._open.pop(name).close()
        self._tell()

    def _tell(self) -> None:
        """To tell a chain from an extension, python-iptables looks for its name in every table
        that is named here, and would open them all."""
        iptc.Table.ALL = iptc.Table6.ALL = [*self._open]

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()


def _commits(steps: list[Any], family: str) -> Iterator[tuple[str, list[Any]]]:
    """Each with its table."""
    if steps == [["drop"]]:
        yield from ((one, steps) for one in OURS if _is_in_use(one, family))
        return
    for one, due in groupby(steps, key=lambda step: step[1]):
        yield one, [[step, *details] for step, _, *details in due]


def _is_in_use(name: str, family: str) -> bool:
    """Whether to look into a table. The translations are what we are here for; of a filter that
    nobody ever asked for, the namespace is to be spared."""
    if name == NAT:
        return True
    try:
        return name in Path(f"/proc/thread-self/net/{NAMES[family]}").read_text().split()
    except FileNotFoundError:  # the kernel has none in any namespace
        return False
    except PermissionError:  # for root alone, other than the tables themselves
        return True


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """The lock that every iptables program takes; libiptc itself does not."""
    with Path(LOCK).open("w") as lock:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield


def _listing(tables: Tables, family: str) -> Json:
    chains: dict[str, list[Json]] = {}
    jumps: dict[str, list[int]] = {}
    others = 0  # in the table nat
    for one in [one for one in OURS if _is_in_use(one, family)]:
        for chain in _chains(tables[one]):
            if chain.name in OURS[one]:
                rules = [_decoded(chain, entry, family) for entry, _ in _entries(chain)]
                chains[f"{one} {chain.name}"] = rules
                continue
            places = _jumps(chain, family) if PREFIX + chain.name in OURS[one] else []
            if places:
                jumps[f"{one} {PREFIX}{chain.name}"] = places
            if one == NAT:
                others += len(_entries(chain)) - len(places)
    # Where a single jump stands is for others to move; of several, places are deleted.
    several = {name: places for name, places in jumps.items() if len(places) > 1}
    plain = {chain: [_plain(rule) for rule in rules] for chain, rules in chains.items()}
    content = json.dumps([plain, sorted(jumps), several])
    digest = sha256(content.encode()).hexdigest()
    found = {"chains": chains, "jumps": jumps, "others": others, "digest": digest}
    return {**found, "unfit": _unfit(family)}


def _chains(table: Any) -> list[Any]:
    """All of them. Names that others gave can be any bytes, at which python-iptables itself fails:
    such a name is kept as Python keeps those of files."""
    names: list[str] = []
    name = table._iptc.iptc_first_chain(table._handle)
    while name:
        names.append(os.fsdecode(name))
        name = table._iptc.iptc_next_chain(table._handle)
    return [iptc.Chain(table, name) for name in names]


def _entries(chain: Any) -> list[tuple[Any, str]]:
    """The rules of a chain as the kernel has them, with their targets. To decode those of others
    would be slow, and would fail where we lack an extension that they use."""
    found: list[tuple[Any, str]] = []
    table = chain.table
    first = table._iptc.iptc_first_rule(os.fsencode(chain.name), table._handle)
    entry = first[0] if first else None
    while entry:
        found.append((entry, os.fsdecode(table.get_target(entry) or b"")))
        entry = table.next_rule(entry)
    return found


def _jumps(hook: Any, family: str) -> list[int]:
    """Where in a built-in chain our jump stands. Other jumps to our chains are the business of
    those who made them: they may stand in any chain, and under any condition."""
    name = PREFIX + hook.name
    return [
        place
        for place, (entry, target) in enumerate(_entries(hook))
        if target == name and _plain(_decoded(hook, entry, family)) == _jump(name)
    ]


def _jump(name: str) -> Json:
    return {"comment": {"comment": JUMP_COMMENT}, "target": name}


def _decoded(chain: Any, entry: Any, family: str) -> Json:
    if _has_gaps(entry, family):
        return {"unreadable": "a mask with gaps"}  # of which python-iptables counts some bits
    try:
        rule = chain.table.create_rule(entry, chain)
        found: Json = iptc.easy.decode_iptc_rule(rule, ipv6=family == "ip6")
    except (iptc.IPTCError, iptc.XTablesError, ValueError) as error:
        # It needs an extension that is not on this machine, has a name or a comment that is not
        # UTF-8, or is so long that python-iptables sees the beginning of it alone.
        return {"unreadable": str(error)}
    return found


def _has_gaps(entry: Any, family: str) -> bool:
    """Whether one of its two masks is no prefix."""
    if family == "ip":
        masks = [bytes(mask) for mask in (entry.ip.smsk, entry.ip.dmsk)]
    else:
        masks = [bytes(mask) for mask in (entry.ipv6.smsk, entry.ipv6.dmsk)]
    hosts = [int.from_bytes(mask, "big") ^ ((1 << 8 * len(mask)) - 1) for mask in masks]
    return any(bits & (bits + 1) for bits in hosts)


def _plain(rule: Json) -> Json:
    return {key: value for key, value in rule.items() if key != "counters"}


def _ensure(table: Any, family: str, name: str, built_in: str) -> None:
    if not table.is_chain(name):
        table.create_chain(name)
    hook = iptc.Chain(table, built_in)
    places = _jumps(hook, family)
    if places[:1] == [0]:
        return
    for place in places[:1]:  # others have come before it, and would decide first
        _delete(table, family, built_in, place)
    hook.insert_rule(_encoded(_jump(name), family))


def _delete(table: Any, _family: str, name: str, place: int) -> None:
    """By place: python-iptables itself offers only the first rule that looks the same."""
    if not table._iptc.iptc_delete_num_entry(os.fsencode(name), place, table._handle):
        raise iptc.IPTCError(f"can't delete rule {place} of {name}: {table.strerror()}")


def _append(table: Any, family: str, name: str, rule: Json) -> None:
    iptc.Chain(table, name).append_rule(_encoded(rule, family))


def _insert(table: Any, family: str, name: str, place: int, rule: Json) -> None:
    iptc.Chain(table, name).insert_rule(_encoded(rule, family), place)


@cache
def _unfit(family: str) -> str:
    """Why rules cannot be written at all, before a first one is: this python-iptables may not know
    the iptables of this machine."""
    try:
        for sample in SAMPLES:
            _encoded(sample | {"target": {"DNAT": {"to-destination": TO[family]}}}, family)
    except (iptc.IPTCError, iptc.XTablesError) as error:
        return f"{_version()} ({error})"
    return ""


def _encoded(rule: Json, family: str) -> Any:
    """python-iptables leaves out, without a word, what it cannot encode: a rule without one of its
    conditions would take everything."""
    made = iptc.easy.encode_iptc_rule(dict(rule), ipv6=family == "ip6")
    back = _plain(iptc.easy.decode_iptc_rule(made, ipv6=family == "ip6"))
    ends = ("src", "dst")  # which come back with a prefix
    shown, asked = (
        {key: ip_interface(value) if key in ends else value for key, value in one.items()}
        for one in (back, rule)
    )
    for key in asked | shown:
        if shown.get(key) != asked.get(key):
            became = back.get(key)
            raise iptc.IPTCError(f"can't encode {key} {rule.get(key)}: it became {became}")
    return made


def _version() -> str:
    """What iptables says of itself: iptables v1.8.9."""
    try:
        said = subprocess.check_output(  # noqa: S603 - a constant path
            [IPTABLES, "--version"], timeout=LOCK_PATIENCE, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return "iptables"
    return b" ".join(said.split()[:2]).decode(errors="replace")


def _drop(table: Any, _family: str) -> None:
    chains = _chains(table)
    ours = [chain for chain in chains if chain.name in OURS[table.name]]
    for chain in chains if ours else ():
        for place, (_, target) in reversed(list(enumerate(_entries(chain)))):
            if target in OURS[table.name]:
                _delete(table, _family, chain.name, place)
    for chain in ours:
        chain.flush()
    for chain in ours:
        chain.delete()


_STEPS: dict[str, Callable[..., None]] = {
    "ensure": _ensure,
    "delete": _delete,
    "append": _append,
    "insert": _insert,
    "drop": _drop,
}


if __name__ == "__main__":
    main()
