"""Translations of others in the legacy tables, from what iptables-save says of them."""

from collections.abc import Iterable, Mapping
from ipaddress import ip_network

from rules.model import Family
from rules.occupied import Translation
from rules.ports import ALL_PORTS, coalesce, subtract
from rules.translations import (
    ANY,
    STRANGE,
    TARGETS,
    Branch,
    Chains,
    Packets,
    ports_of,
    protocols_of,
)
from rules.xtables import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def saved(text: str, family: Family, table: str) -> tuple[Translation, ...]:
    """What others translate in the table nat."""
    chains = Chains(table)
    section = ""
    for line in text.splitlines():
        if line.startswith("*"):
            section = line.strip()
        elif section == "*nat" and line.startswith(":"):
            name, _, policy = line[1:].partition(" ")
            if not policy.startswith("-"):
                chains.base(name)
        elif section == "*nat" and line.startswith("-A "):
            try:
                chain, branches = _saved_rule(line, family)
            except STRANGE:
                continue
            if not chain.startswith(PREFIX):
                chains.add(chain, branches)
    return tuple(dict.fromkeys(chains.translations()))


def _saved_rule(line: str, family: Family) -> tuple[str, Iterable[Branch]]:
    from shlex import split

    # Most lines hold no quotes, and shlex goes over each character by itself.
    _, chain, *words = split(line) if set(line) & QUOTES else line.split()
    found, negated, target = Packets(families=frozenset({family})), False, ""
    left = iter(words)
    for word in left:
        if word in ("-j", "-g"):
            target = next(left, "")
            break  # the rest is for the target
        if word in OPTIONS:
            found &= OPTIONS[word](next(left, ""), negated)
        negated = word == "!"
    if not target or found.none:
        return chain, ()
    return chain, [(found, None if target in TARGETS else target)]


def _saved_protocol(word: str, negated: bool) -> Packets:
    number = int(word) if word.isdecimal() else word
    return ANY if negated else Packets(protocols=protocols_of(number))


def _saved_destination(word: str, negated: bool) -> Packets:
    try:
        network = ip_network(word)
    except ValueError:  # a mask with gaps: more than one
        return ANY
    plain = network.num_addresses == 1 and not negated
    return Packets(destination=network.network_address) if plain else ANY


def _saved_ports(word: str, negated: bool) -> Packets:
    pairs = [part.partition(":") for part in word.split(",")]
    ports = [
        each
        for first, _, last in pairs
        for each in ports_of({"range": [int(first), int(last or first)]})
    ]
    return Packets(ports=subtract([ALL_PORTS], ports) if negated else coalesce(ports))


QUOTES = frozenset("\"'\\")
OPTIONS: "Mapping[str, Callable[[str, bool], Packets]]" = {
    "-p": _saved_protocol,
    "-d": _saved_destination,
    "--dport": _saved_ports,
    "--dports": _saved_ports,
    "--ports": _saved_ports,
    "--comment": lambda _word, _negated: ANY,
}
