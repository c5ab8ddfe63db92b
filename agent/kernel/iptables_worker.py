"""A process of its own for python-iptables, one per address family: its tables are singletons of a
process, IPv4 and IPv6 cannot share one, and it redirects the standard output while it reads.

It answers requests on a socket, each with the descriptor of a namespace, and leaves that namespace
again before it answers. Run by agent.kernel.iptables; not for people.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import iptc
import iptc.easy

from agent.kernel.netns import inside
from agent.kernel.wire import LENGTH, exactly, send
from rules.xtables import JUMP_COMMENT, PREFIX

OURS = {PREFIX + name for name in ("PREROUTING", "OUTPUT", "POSTROUTING", "FORWARD")}
LOCK = "/run/xtables.lock"
LOCK_PATIENCE = 5.0  # seconds to wait for another program that holds the lock

# To tell a chain from an extension, python-iptables looks for its name in every table, and so would
# bring all of them to life in the namespace, and keep that alive with a socket for each.
iptc.Table.ALL = iptc.Table6.ALL = ["nat"]

Json = dict[str, Any]


def main() -> None:
    """Serve the socket named on the command line until it closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    family = sys.argv[2]
    while (request := receive(channel)) is not None:
        question, descriptor = request
        try:
            with inside(descriptor, "of the request"):
                answer = _answer(question, family)
        except Exception as error:  # whatever it is, the other side must hear of it
            answer = {"error": type(error).__name__, "text": str(error)}
        finally:
            os.close(descriptor)
        send(channel, answer)


def receive(channel: socket.socket) -> tuple[Json, int] | None:
    """The next request with its namespace; None when there will be no more."""
    header, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
    if not header:
        return None
    return json.loads(exactly(channel, LENGTH.unpack(header)[0])), descriptors[0]


def _answer(question: Json, family: str) -> Json:
    with _locked():
        table = iptc.Table("nat") if family == "ip" else iptc.Table6("nat")
        table.autocommit = False
        table.refresh()
        try:
            return _served(table, question, family)
        finally:
            table.close()  # its socket would keep the namespace alive until the next request


def _served(table: Any, question: Json, family: str) -> Json:
    listing = _listing(table, family)
    if "steps" not in question:
        return listing
    if question["digest"] != listing["digest"]:
        return {"error": "Stale", "text": "our chains changed since they were looked at"}
    for step, *details in question["steps"]:
        _STEPS[step](table, family, *details)
    table.commit()
    return {}


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


def _listing(table: Any, family: str) -> Json:
    chains: dict[str, list[Json]] = {}
    jumps: dict[str, list[int]] = {}
    others = 0
    for chain in table.chains:
        entries = _entries(table, chain.name)
        if chain.name in OURS:
            chains[chain.name] = [_decoded(chain, entry, family) for entry, _ in entries]
            continue
        places = _jumps(chain, family)
        if places:
            jumps[PREFIX + chain.name] = places
        others += len(entries) - len(places)
    # Where a single jump stands is for others to move; of several, places are deleted.
    several = {name: places for name, places in jumps.items() if len(places) > 1}
    plain = {chain: [_plain(rule) for rule in rules] for chain, rules in chains.items()}
    content = json.dumps([plain, sorted(jumps), several])
    digest = sha256(content.encode()).hexdigest()
    return {"chains": chains, "jumps": jumps, "others": others, "digest": digest}


def _entries(table: Any, chain: str) -> list[tuple[Any, str]]:
    """The rules of a chain as the kernel has them, with their targets. To decode those of others
    would be slow, and would fail where we lack an extension that they use."""
    found: list[tuple[Any, str]] = []
    entry = table.first_rule(chain)
    while entry:
        found.append((entry, (table.get_target(entry) or b"").decode(errors="replace")))
        entry = table.next_rule(entry)
    return found


def _jumps(hook: Any, family: str) -> list[int]:
    """Where in a built-in chain our jump stands. Other jumps to our chains are the business of
    those who made them: they may stand in any chain, and under any condition."""
    name = PREFIX + hook.name
    return [
        place
        for place, (entry, target) in enumerate(_entries(hook.table, hook.name))
        if target == name and _plain(_decoded(hook, entry, family)) == _jump(name)
    ]


def _jump(name: str) -> Json:
    return {"comment": {"comment": JUMP_COMMENT}, "target": name}


def _decoded(chain: Any, entry: Any, family: str) -> Json:
    try:
        rule = chain.table.create_rule(entry, chain)
        found: Json = iptc.easy.decode_iptc_rule(rule, ipv6=family == "ip6")
    except (iptc.IPTCError, iptc.XTablesError) as error:
        return {"unreadable": str(error)}  # it needs an extension that is not on this machine
    return found


def _plain(rule: Json) -> Json:
    return {key: value for key, value in rule.items() if key != "counters"}


def _ensure(table: Any, family: str, name: str, built_in: str) -> None:
    if not table.is_chain(name):
        table.create_chain(name)
    hook = iptc.Chain(table, built_in)
    if not _jumps(hook, family):
        hook.insert_rule(_encoded(_jump(name), family))


def _delete(table: Any, _family: str, name: str, place: int) -> None:
    """By place: python-iptables itself offers only the first rule that looks the same."""
    if not table._iptc.iptc_delete_num_entry(name.encode(), place, table._handle):
        raise iptc.IPTCError(f"can't delete rule {place} of {name}: {table.strerror()}")


def _append(table: Any, family: str, name: str, rule: Json) -> None:
    iptc.Chain(table, name).append_rule(_encoded(rule, family))


def _encoded(rule: Json, family: str) -> Any:
    """python-iptables leaves out, without a word, what it cannot encode: a rule without one of its
    conditions would take everything."""
    made = iptc.easy.encode_iptc_rule(dict(rule), ipv6=family == "ip6")
    back = _plain(iptc.easy.decode_iptc_rule(made, ipv6=family == "ip6"))
    ends = ("src", "dst")  # which come back with a prefix
    same = all(back.get(key) == value for key, value in rule.items() if key not in ends)
    if not same or back.keys() != rule.keys():
        raise iptc.IPTCError(f"can't encode {rule}: it became {back}")
    return made


def _drop(table: Any, _family: str) -> None:
    for chain in table.chains:
        for place, (_, target) in reversed(list(enumerate(_entries(table, chain.name)))):
            if target in OURS:
                _delete(table, _family, chain.name, place)
    ours = [chain for chain in table.chains if chain.name in OURS]
    for chain in ours:
        chain.flush()
    for chain in ours:
        chain.delete()


_STEPS: dict[str, Callable[..., None]] = {
    "ensure": _ensure,
    "delete": _delete,
    "append": _append,
    "drop": _drop,
}


if __name__ == "__main__":
    main()
