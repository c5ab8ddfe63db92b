"""Filters of others at the forward hook of the legacy tables, from what iptables-save says of them,
in the form that rules/foreign_filters.py reads."""

from collections.abc import Mapping
from ipaddress import ip_network

from rules.foreign_filters import IPTABLES_REMEDY, Filter
from rules.model import NUMBERS, Family, Protocol
from rules.netlink_rules import ANYTHING, DPORT
from rules.translations import STRANGE
from rules.xtables import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Expression = dict[str, Any]

FORWARD = "FORWARD"
STATES = {"ESTABLISHED": 2, "RELATED": 4, "NEW": 8}
TARGETS = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "reject", "RETURN": "return"}
PROGRAMS = {Family.IP: "iptables-legacy", Family.IP6: "ip6tables-legacy"}


def saved_filters(text: str, family: Family) -> list[Filter]:
    """The chain FORWARD of each table that has one."""
    table, drops = "", dict[str, bool]()
    rules: dict[str, dict[str, list[list[Expression]]]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(f":{FORWARD} "):
            drops[table] = line.split()[1] == "DROP"
        elif line.startswith("-A ") and table in drops:
            try:
                chain, rule = _rule(line)
            except STRANGE:
                continue
            if not chain.startswith(PREFIX):
                rules.setdefault(table, {}).setdefault(chain, []).append(rule)
    return [
        Filter(
            where=f"legacy table {family.value} {name}, chain {FORWARD}",
            remedy=IPTABLES_REMEDY.format(_program(family, name), FORWARD),
            families=frozenset({family}),
            chain=FORWARD,
            drops=dropping,
            rules=rules.get(name, {}),
        )
        for name, dropping in drops.items()
    ]


def _program(family: Family, table: str) -> str:
    return PROGRAMS[family] if table == "filter" else f"{PROGRAMS[family]} -t {table}"


def _rule(line: str) -> "tuple[str, list[Expression]]":
    from shlex import split

    _, chain, *words = split(line)
    found: list[Expression] = []
    left = iter(words)
    for word in left:
        if word in ("-j", "-g"):
            target = next(left, "")
            if not target.startswith(PREFIX):
                kind = "goto" if word == "-g" else "jump"
                known = TARGETS.get(target)
                found.append({known: None} if known else {kind: {"target": target}})
            break  # the rest is for the target
        if word in OPTIONS:
            found.append(OPTIONS[word](next(left, "")))
        elif word == "-m":
            next(left, "")  # its options follow
        elif word == "--comment":
            next(left, "")
        elif word.startswith(("-", "!")):
            found.append(ANYTHING)
    return chain, found


def _match(key: "Expression", value: object, op: str = "==") -> "Expression":
    return {"match": {"left": key, "op": op, "right": value}}


def _protocol(word: str) -> "Expression":
    names = {one.value: NUMBERS[one] for one in Protocol}
    number = int(word) if word.isdecimal() else names.get(word, 0)
    return _match({"meta": {"key": "l4proto"}}, number)


def _destination(word: str) -> "Expression":
    network = ip_network(word)
    prefix = {"prefix": {"addr": str(network.network_address), "len": network.prefixlen}}
    return _match({"payload": {"field": "daddr"}}, prefix)


def _ports(word: str) -> "Expression":
    pairs = [part.partition(":") for part in word.split(",")]
    ranges = [{"range": [int(first), int(last or first)]} for first, _, last in pairs]
    return _match(DPORT, {"set": ranges})


def _states(word: str) -> "Expression":
    names = word.split(",")
    if "DNAT" in names:
        return _match({"ct": {"key": "status"}}, 32, "in")
    return _match({"ct": {"key": "state"}}, sum(STATES.get(name, 0) for name in names), "in")


def _link(key: str) -> "Callable[[str], Expression]":
    return lambda word: _match({"meta": {"key": key}}, word.replace("+", "*"))


OPTIONS: "Mapping[str, Callable[[str], Expression]]" = {
    "-p": _protocol,
    "-d": _destination,
    "-i": _link("iifname"),
    "-o": _link("oifname"),
    "--dport": _ports,
    "--dports": _ports,
    "--ctstate": _states,
    "--state": _states,
}
