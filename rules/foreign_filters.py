"""Filters of others at the forward hook, and whether they let pass what we send on.

A chain that drops what no rule accepts (by its policy, or by a last rule without conditions) makes
a translation useless, though it is in order. The rules are in the form of rules/netlink_rules.py.
What a condition means for a new flow may be unknown: then an accepting rule does not count as one
that accepts it, nor a dropping rule as one that drops it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from itertools import chain, islice, pairwise

from rules.model import NUMBERS, Address, Chain, Family, Protocol, Rule, Surroundings
from rules.netlink_rules import DPORT
from rules.ports import ALL_PORTS, PortRange
from rules.translations import BOUNDS
from rules.values import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Expression = dict[str, Any]

NEW, DNAT = 8, 32  # ct state and ct status of the flows in question, as bits
MOST_EDGES = 200  # ports at which flows are parted
MOST_FLOWS = 64  # that are compared with each filter
DEEPEST = 32  # jumps
MOST_STEPS = 20_000  # rules and elements that flows are compared with, at 7 µs each
VERSIONS = {Family.IP: "ipv4", Family.IP6: "ipv6"}
REMEDY = "let it accept translated flows: nft insert rule {} ct status dnat accept"
IPTABLES_REMEDY = "let it accept translated flows: {} -I {} -m conntrack --ctstate DNAT -j ACCEPT"
IPTABLES_NFT = {("ip", "filter"): "iptables-nft", ("ip6", "filter"): "ip6tables-nft"}
"""The program that wrote a table. It cannot read the table again once nft has put a rule there."""


class Flow(Value, kw_only=True):
    """New flows that were translated: whom they are for, and by which links they come and leave."""

    family: Family
    destination: Address
    protocol: Protocol | None
    ports: PortRange | None
    enters: str | None = None  # None: by any
    leaves: str | None = None

    def __str__(self) -> str:
        what = f"{self.protocol.value} " if self.protocol else ""
        return f"{what}{self.ports} to {self.destination}" if self.ports else str(self.destination)


class Filter(Value, kw_only=True):
    """A base chain at the forward hook, with the chains of its table."""

    where: str  # as people are told
    remedy: str
    families: frozenset[Family]
    chain: str
    drops: bool  # what no rule decides on
    rules: "Mapping[str, list[list[Expression]]]"


def remedy(table: tuple[str, str], chain: str) -> str:
    """What lets a chain of nftables accept translated flows."""
    if table in IPTABLES_NFT and chain == "FORWARD":
        return IPTABLES_REMEDY.format(IPTABLES_NFT[table], chain)
    return REMEDY.format(f"{table[0]} {table[1]} {chain}")


def flows(rules: Iterable[Rule], links: Surroundings) -> list[Flow]:
    """What some rules send on from outside."""
    found = {
        Flow(
            family=rule.family,
            destination=rule.to,
            protocol=rule.protocol,
            ports=rule.to_ports or rule.ports,
            enters=rule.interface,
            leaves=_link_to(rule.to, links),
        )
        for rule in rules
        if rule.chain is Chain.PREROUTING and rule.to is not None
    }
    return sorted(found, key=str)[:MOST_FLOWS]


def _link_to(address: Address, links: Surroundings) -> str | None:
    facing = [
        (own.network.prefixlen, link.name)
        for link in links.links
        for own in link.addresses
        if address in own.network
    ]
    return max(facing)[1] if facing else None


def warnings(filters: Iterable[Filter], sent: Iterable[Flow]) -> Iterator[str]:
    """One for each filter that may drop some of these flows. Filters are written by tenants, too:
    what takes too long to compare is not warned of."""
    given, work = list(sent), _Work(MOST_STEPS)
    for one in filters:
        edges = _edges(one)
        for flow in chain.from_iterable(_pieces(flow, edges) for flow in given):
            reason = dropped(one, flow, work) if flow.family in one.families else ""
            if work.left < 0:
                return
            if reason:
                yield f"{one.where} may drop forwarded flows ({flow}): {reason}; {one.remedy}"
                break


def _edges(one: Filter) -> list[int]:
    """The ports at which conditions of a filter begin to hold, or end to."""
    found: set[int] = set()
    for rule in islice(chain.from_iterable(one.rules.values()), MOST_STEPS):
        for match in (item["match"] for item in rule if "match" in item):
            if match["left"] == DPORT and len(found) < MOST_EDGES:
                spans = filter(None, map(_span, _members(match)[:MOST_EDGES]))
                found.update(edge for first, last in spans for edge in (first, last + 1))
    return sorted(found)


def _pieces(flow: Flow, edges: Sequence[int]) -> Iterator[Flow]:
    """The flows in parts of which all ports meet the same conditions."""
    if flow.ports is None:
        yield flow
        return
    inside = edges[bisect_right(edges, flow.ports.first) : bisect_right(edges, flow.ports.last)]
    for first, after in pairwise([flow.ports.first, *inside, flow.ports.last + 1]):
        yield replace(flow, ports=PortRange(first, after - 1))


class _Work:
    """How much may still be compared."""

    def __init__(self, left: int) -> None:
        self.left = left


def dropped(one: Filter, flow: Flow, work: _Work | None = None) -> str:
    """Why such flows do not get through; empty: they may, or it takes too long to tell."""
    work = work or _Work(MOST_STEPS)
    verdict = _Walk(one, flow, work).through(one.chain)
    if work.left < 0:
        return ""
    if verdict == "" and one.drops:
        return "its policy is drop, and no rule accepts them"
    return "" if verdict in ("", "accept") else verdict


class _Walk:
    """Of such flows through the chains of a filter."""

    def __init__(self, one: Filter, flow: Flow, work: _Work) -> None:
        self._one, self._flow, self._work = one, flow, work
        self._known: dict[str, str] = {}  # many ways may lead to a chain: it is the same each time

    def through(self, chain: str, depth: int = 0) -> str:
        """`accept`, why it is dropped, or nothing: the chain does not decide."""
        if chain not in self._known and depth < DEEPEST:
            self._known[chain] = self._decided(chain, depth)
        return self._known.get(chain, "")

    def _decided(self, chain: str, depth: int) -> str:
        for rule in self._one.rules.get(chain, ()):
            self._work.left -= 1 + sum(map(_size, rule))
            if self._work.left < 0:
                break
            verdict, sure = _applied(rule, self._flow)
            for kind, target in verdict:
                if kind in ("drop", "reject") and sure:
                    return f"a rule of chain {chain} drops them"
                if kind == "accept" and sure:
                    return "accept"
                if kind == "return" and sure:
                    return ""
                if kind in ("jump", "goto"):
                    found = self.through(target, depth + 1)
                    if sure and (found or kind == "goto"):
                        return found
        return ""


def _size(item: "Expression") -> int:
    """How many elements a condition has."""
    right = item["match"]["right"] if "match" in item else None
    return len(right["set"]) if isinstance(right, dict) and "set" in right else 0


def _applied(rule: "list[Expression]", flow: Flow) -> tuple[list[tuple[str, str]], bool]:
    """The verdicts of a rule that may be for such flows, and whether it is for all of them."""
    sure, verdicts = True, list[tuple[str, str]]()
    for item in rule:
        if "match" in item:
            met = _meets(item["match"], flow)
            if met is False:
                return [], False
            sure = sure and met is True
        elif "vmap" in item:
            sure = False
        else:
            kind, value = next(iter(item.items()))
            if kind == "xt":
                kind = {"REJECT": "reject", "DROP": "drop"}.get(value["name"], "other")
            verdicts.append((kind, value["target"] if kind in ("jump", "goto") else ""))
    return verdicts, sure


def _meets(match: "Any", flow: Flow) -> bool | None:
    """Whether such flows meet a condition; None: some may."""
    op = "==" if match["op"] in BOUNDS and match["left"] == DPORT else match["op"]
    found = [_is(match["left"], one, flow) for one in _members(match)]
    met = True if True in found else None if None in found else False
    if op in ("==", "in"):
        return met
    if op == "!=":
        return None if met is None else not met
    return None


def _members(match: "Any") -> "list[Any]":
    """What a condition compares with."""
    right, op = match["right"], match["op"]
    if op in BOUNDS and match["left"] == DPORT:  # so are ranges written
        return [{"range": BOUNDS[op](right)}]
    return right["set"] if isinstance(right, dict) and "set" in right else [right]


def _is(key: "Any", value: "Any", flow: Flow) -> bool | None:
    if value == "*":  # the element of a set that stands for all others
        return True
    match key:
        case {"ct": {"key": "state"}}:
            return bool(value & NEW)
        case {"ct": {"key": "status"}}:
            return True if value & DNAT else None
        case {"meta": {"key": "iifname"}}:
            return None if flow.enters is None else _is_link(flow.enters, value)
        case {"meta": {"key": "oifname"}}:
            return None if flow.leaves is None else _is_link(flow.leaves, value)
        case {"meta": {"key": "nfproto"}}:
            return bool(value == VERSIONS[flow.family])
        case {"payload": {"field": "protocol" | "nexthdr"}} | {"meta": {"key": "l4proto"}}:
            return None if flow.protocol is None else bool(value == NUMBERS[flow.protocol])
        case {"payload": {"field": "daddr"}}:
            return _holds_address(value, flow.destination)
        case {"payload": {"field": "dport"}}:
            return _holds_ports(value, flow.ports or ALL_PORTS)
    return None


def _is_link(name: str, value: "Any") -> bool | None:
    if not isinstance(value, str):  # from one name to another
        return None
    return name.startswith(value[:-1]) if value.endswith("*") else name == value


def _holds_address(value: "Any", address: Address) -> bool | None:
    if isinstance(value, str):
        return ip_address(value) == address
    if "prefix" in value:
        network = ip_network(f"{value['prefix']['addr']}/{value['prefix']['len']}", strict=False)
        return address in network
    return None


def _holds_ports(value: "Any", ports: PortRange) -> bool | None:
    if (span := _span(value)) is None:
        return None
    first, last = span
    if first <= ports.first and ports.last <= last:
        return True
    return False if last < ports.first or ports.last < first else None


def _span(value: "Any") -> tuple[int, int] | None:
    """The first and the last port; None: nobody knows."""
    if value == "*":
        return ALL_PORTS.first, ALL_PORTS.last
    first, last = value["range"] if isinstance(value, dict) else (value, value)
    return None if first is None or last is None else (first, last)
