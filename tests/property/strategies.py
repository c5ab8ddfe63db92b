"""Arbitrary ports, machines, namespaces, rules and listings.

Ports are drawn from a few dozen, so that ranges often meet, touch, and miss each other by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Any

from hypothesis import strategies as st

from rules.conflicts import conflicts
from rules.desired import desire
from rules.model import (
    FILTERS,
    FORWARDED,
    Address,
    Chain,
    Claim,
    Desired,
    Family,
    Foreign,
    Guest,
    Lookup,
    Machine,
    Observed,
    Pending,
    Protocol,
    Rule,
    Surroundings,
)
from rules.nft import Json
from rules.nft_listing import decode
from rules.places import LOOPBACK_NETWORK
from rules.plan import Plan
from rules.ports import HIGHEST, LOWEST, PortRange
from rules.shapes import FEW, MANY, lookup_of
from rules.shapes import name as map_name
from rules.values import replace
from rules.xtables import PREFIX, Step, script, spot, steps
from rules.xtables import decode as decode_chains
from tests.unit.samples import BRIDGE, ETH0, LO, link, machine, space

# ---------------------------------------------------------------------------------------- ports

NUMBERS = [*range(LOWEST, 31), *range(HIGHEST - 5, HIGHEST + 1)]

port_numbers = st.sampled_from(NUMBERS)
port_ranges = st.tuples(port_numbers, port_numbers).map(lambda ends: PortRange(*sorted(ends)))
range_lists = st.lists(port_ranges, max_size=8)


# Every port at which something can begin or end, and those beside it: they stand for all.
PORTS = sorted(
    {near for port in NUMBERS for near in (port - 1, port, port + 1) if 0 < near < 65536}
)


def held(ranges: Iterable[PortRange]) -> set[int]:
    """Which of those ports the ranges hold, found out one by one."""
    given = tuple(ranges)
    return {port for port in PORTS if any(port in ports for ports in given)}


# ------------------------------------------------------------------------------------- machines

claims = st.builds(Claim, st.sampled_from(FORWARDED), port_ranges)
claim_lists = st.lists(claims, min_size=1, max_size=6).map(tuple) | st.none()

PLACES = [
    ("10.0.2.2", "10.0.2.1", "fd10:0:2::2", "fd10:0:2::1"),
    ("10.0.3.2", "10.0.3.1", "fd10:0:3::2", "fd10:0:3::1"),
    ("10.0.3.9", "10.0.3.1", "fd10:0:3::9", "fd10:0:3::1"),
    ("192.168.7.9", None, "fd00:7::9", None),
]


@st.composite
def machine_lists(draw: st.DrawFn, netns: tuple[str, ...] = ("blue",)) -> list[Machine]:
    """Machines of different names; they may well claim the same ports."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d" * 140]), unique=True, max_size=4))
    return [draw(machines(name, netns)) for name in names]


@st.composite
def machines(draw: st.DrawFn, name: str, netns: tuple[str, ...]) -> Machine:
    v4, v4_gateway, v6, v6_gateway = draw(st.sampled_from(PLACES))
    everything = machine(
        name=name,
        netns=draw(st.sampled_from(netns)),
        entry=draw(st.sampled_from([None, "eth0", "eth1"])),
        guests=(guest(v4, v4_gateway), guest(v6, v6_gateway)),
        origin=draw(st.sampled_from(["", f"{name}.yaml:7"])),
    )
    assert everything.masquerade is not None
    ours = replace(everything.masquerade, claims=draw(claim_lists))
    return replace(everything, masquerade=draw(st.sampled_from([ours, ours, ours, None])))


def guest(address: str, gateway: str | None) -> Guest:
    return Guest(ip_address(address), ip_address(gateway) if gateway else None)


def peaceable(given: list[Machine]) -> list[Machine]:
    """As many of the machines, from the first on, as have no conflict."""
    kept: list[Machine] = []
    for one in given:
        if not conflicts([*kept, one]):
            kept.append(one)
    return kept


peaceable_machines = machine_lists().map(peaceable)

# ------------------------------------------------------------------------------------ namespaces

LINKS = [
    LO,
    ETH0,
    link("eth1", "192.0.2.9/24"),
    link("net1", "10.9.9.9/8"),
    BRIDGE,
    link("br3", "10.0.3.1/24", "fd10:0:3::1/64"),
    link("br7", "192.168.7.1/24"),
    link("down0"),
]
surroundings = st.none() | st.builds(
    lambda links, default, theirs: replace(space(*links, default=default), kubevirt=theirs),
    st.lists(st.sampled_from(LINKS), unique=True),
    st.sampled_from([None, "eth0", "eth1"]),
    st.frozensets(st.sampled_from(Family)),
)
desireds = st.builds(desire, machine_lists(), surroundings)


def link_names(around: Surroundings | None) -> list[str]:
    return [one.name for one in around.links] if around else ["eth0", "eth1", "k6t-eth0"]


# ----------------------------------------------------------------------------------------- rules

ADDRESSES: dict[Family, list[Address]] = {
    Family.IP: [IPv4Address(text) for text in ("127.0.0.1", "10.0.2.2", "10.0.2.1", "10.0.3.2")],
    Family.IP6: [IPv6Address(text) for text in ("::1", "fd10:0:2::2", "fd10:0:2::1", "::a00:202")],
}
owners = st.sampled_from(["", "a", "VirtualMachine/default/vm/default", 'q"\\', "ü" * 60])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Any rule that the codec can write, whether or not we ever would."""
    chain, family = draw(st.sampled_from(Chain)), draw(st.sampled_from(Family))
    if chain is Chain.RAW:
        link = draw(st.sampled_from(["eth0", "k6t-eth0"]))
        shield = {"chain": chain, "family": Family.IP, "interface": link, "peer": LOOPBACK_NETWORK}
        return Rule(owner=draw(owners), **shield)  # type: ignore[arg-type]  # of several types
    addresses = st.sampled_from(ADDRESSES[family])
    source, destination = draw(st.none() | addresses), draw(st.none() | addresses)
    claim = draw(st.none() | claims)
    return Rule(
        chain=chain,
        family=family,
        owner=draw(owners),
        protocol=claim.protocol if claim else None,
        ports=claim.ports if claim else None,
        interface=draw(st.sampled_from([None, "eth0", "eth1", "k6t-eth0"])),
        source=source,
        destination=destination,
        to=None if chain in FILTERS else draw(addresses | st.none()),
    )


strangers = rules() | st.builds(
    Foreign, st.sampled_from([chain.value for chain in Chain]), st.just(0), st.just("accept")
)
arbitrary_desireds = st.frozensets(rules(), max_size=12).map(lambda some: Desired(rules=some))

# ---------------------------------------------------------------------------------------- shapes

LOOKUPS = [
    Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0"),
    Lookup(Chain.PREROUTING, Family.IP6, Protocol.UDP, "eth0"),
    Lookup(Chain.OUTPUT, Family.IP, Protocol.TCP, None, IPv4Address("127.0.0.1")),
]
SLOTS = [*range(10, 450, 10), HIGHEST - 9]  # each as wide as from one to the next


@st.composite
def crowds(draw: st.DrawFn, lookup: Lookup) -> frozenset[Rule]:
    """Up to 40 ranges of one lookup, often as many as their shape changes at; some touch."""
    turning = st.sampled_from([0, FEW, FEW + 1, MANY - 1, MANY])
    number = draw(turning | st.integers(0, 40))
    random = draw(st.randoms(use_true_random=False))
    return frozenset(
        Rule(
            chain=lookup.chain,
            family=lookup.family,
            owner=random.choice(["a", "b"]),
            protocol=lookup.protocol,
            ports=PortRange(first, first + random.choice([0, 3, 9])),
            interface=lookup.interface,
            destination=lookup.destination,
            to=random.choice(ADDRESSES[lookup.family][1:3]),
        )
        for first in random.sample(SLOTS, number)
    )


@st.composite
def crowded_desireds(draw: st.DrawFn) -> Desired:
    """Crowds in one or two places, something else beside them, and owners that may have to wait."""
    places = draw(st.lists(st.sampled_from(LOOKUPS), min_size=1, max_size=2, unique_by=map_name))
    crowd = frozenset(rule for lookup in places for rule in draw(crowds(lookup)))
    others = draw(st.frozensets(rules().filter(lambda one: not lookup_of(one)), max_size=3))
    waiting = draw(st.sampled_from(["", "", "b"]))
    return Desired(
        rules=frozenset(rule for rule in crowd | others if rule.owner != waiting),
        pending=(Pending(waiting, "no link yet"),) if waiting else (),
    )


# -------------------------------------------------------------------------------------- listings


class ListedTable:
    """What libnftables would list after these commands: enough of it to hold us to our word."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.handle = 0

    def run(self, commands: list[Json]) -> None:
        for command in json.loads(json.dumps(commands)):
            ((verb, target),) = command.items()
            ((kind, value),) = target.items()
            if verb == "create":
                assert not any(kind in entry for entry in self.entries)
            if verb in ("add", "create"):
                self._add(kind, value)
            elif verb == "insert":
                self._add(kind, value)
                first = next(i for i, entry in enumerate(self.entries) if "rule" in entry)
                self.entries.insert(first, self.entries.pop())
            elif verb == "flush":
                self._flush(value["name"])
            else:
                self._delete(kind, value)

    def _flush(self, chain: str) -> None:
        assert chain in [one["name"] for one in self.of("chain")]
        ours = [one for one in self.of("rule") if one["chain"] == chain]
        self.entries = [entry for entry in self.entries if entry.get("rule") not in ours]

    def _add(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "element":
            self._put(value)
            return
        there = [one for one in self.of(kind) if one.get("name") == value.get("name")]
        if kind != "rule" and there:  # as nft has it: to add what is there is no mistake
            assert kind != "set" or {**there[0], **value} == there[0]
            return
        assert kind == "table" or self.of("table")
        if kind == "rule":
            assert value["chain"] in [one["name"] for one in self.of("chain")]
            assert looked_into(value) <= {one["name"] for one in [*self.of("map"), *self.of("set")]}
            counted = {"counter": self._counted()}
            value["expr"] = [counted if "counter" in item else item for item in value["expr"]]
        self.handle += 1
        self.entries.append({kind: value | {"handle": self.handle}})

    def _put(self, value: dict[str, Any]) -> None:
        elements = self._elements(value)
        if value["name"] in [one["name"] for one in self.of("set")]:
            for one in value["elem"]:
                assert not any(_network(one).overlaps(_network(other)) for other in elements)
                elements.append(one)
            return
        for key, to in value["elem"]:
            inner = key["elem"]
            ports = _ports(inner["val"])
            assert not any(ports.overlaps(_ports(one[0]["elem"]["val"])) for one in elements)
            elements.append([{"elem": inner | {"counter": self._counted()}}, to])

    def _elements(self, value: dict[str, Any]) -> list[Any]:
        both = [*self.of("map"), *self.of("set")]
        (found,) = (one for one in both if one["name"] == value["name"])
        elements: list[Any] = found.setdefault("elem", [])
        return elements

    def _counted(self) -> dict[str, int]:
        """A number that only what is counted here has: what is written anew has another."""
        self.handle += 1
        return {"packets": self.handle, "bytes": 60 * self.handle}

    def _delete(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "table":
            assert self.entries
            self.entries.clear()
        elif kind == "element":
            elements = self._elements(value)
            for key in value["elem"]:
                (found,) = (one for one in elements if key in (one, _key(one)))
                elements.remove(found)
        elif kind == "chain":
            self._flush(value["name"])  # as the kernel does
            (gone,) = (one for one in self.of(kind) if one["name"] == value["name"])
            self.entries.remove({kind: gone})
        elif kind in ("map", "set"):
            assert not any(value["name"] in looked_into(rule) for rule in self.of("rule"))
            (gone,) = (one for one in self.of(kind) if one["name"] == value["name"])
            self.entries.remove({kind: gone})
        else:
            place = value["chain"], value["handle"]
            (gone,) = (one for one in self.of(kind) if (one["chain"], one["handle"]) == place)
            self.entries.remove({kind: gone})

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Everything of one kind."""
        return [entry[kind] for entry in self.entries if kind in entry]

    def observed(self) -> Observed:
        return decode([{"metainfo": {"json_schema_version": 1}}, *self.entries])


def _key(element: Any) -> object:
    """Of an element of a map."""
    return element[0]["elem"]["val"] if isinstance(element, list) else None


def _network(element: Any) -> IPv4Network | IPv6Network:
    """That an element of a set is."""
    if isinstance(element, str):
        return ip_network(element)
    return ip_network((element["prefix"]["addr"], element["prefix"]["len"]))


def looked_into(rule: dict[str, Any]) -> set[str]:
    """The names of the maps and sets that a rule looks into."""
    return set(re.findall(r"'@([^']+)'", str(rule["expr"])))


def _ports(value: Any) -> PortRange:
    return PortRange(value, value) if isinstance(value, int) else PortRange(*value["range"])


THEIRS = "a rule of somebody else"


def hook_of(name: str) -> str:
    """The kernel's own chain that leads to ours."""
    return name.replace(PREFIX, "")


def placed(details: list[Any]) -> list[Any]:
    """The details of a step, with its table and chain in one."""
    return [f"{details[0]} {details[1]}", *details[2:]] if details else []


class ListedChains:
    """The tables of one family as the worker handles it: places, jumps, and others' rules. Chains
    are named with their table, also where they are jumped to."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.chains: dict[str, list[Any]] = {
            hook_of(spot(chain)): [THEIRS, THEIRS] for chain in Chain
        }
        self.count = 0

    def run(self, due: list[Step]) -> None:
        take: dict[str, Callable[..., None]] = {
            "ensure": self._ensure,
            "delete": self._delete,
            "append": self._append,
            "drop": self._drop,
        }
        for step, *details in json.loads(json.dumps(due)):
            take[step](*placed(details))

    def restore(self, text: str) -> None:
        """What iptables-restore --noflush does with a script; a rule is the words that made it."""
        first, *lines, last = text.splitlines()
        assert last == "COMMIT"
        for line in lines:
            flag, command, bare, *words = line.split(" ")
            name = f"{first.removeprefix('*')} {bare}"
            if flag != {Family.IP: "-4", Family.IP6: "-6"}[self.family]:
                continue
            jumps = words[-1:] and words[-1].startswith(PREFIX)
            rule = f"{first.removeprefix('*')} {words[-1]}" if jumps else " ".join(words)
            if command == "-N":
                assert name not in self.chains
                self.chains[name] = []
            elif command == "-I":
                assert rule in self.chains
                self.chains[name].insert(0, rule)
            elif command == "-A":
                self.chains[name].append(rule)
            elif command == "-D" and rule.isdecimal():
                self._delete(name, int(rule) - 1)
            elif command == "-D":
                self.chains[name].remove(rule)
            elif command == "-F":
                self.chains[name].clear()
            else:
                assert command == "-X"
                self._make_away_with(name)

    def _ensure(self, name: str, built_in: str) -> None:
        assert hook_of(name).endswith(f" {built_in}")
        self.chains.setdefault(name, [])
        hook = self.chains[hook_of(name)]
        if hook[:1] != [name]:
            if name in hook:
                hook.remove(name)
            hook.insert(0, name)

    def _delete(self, name: str, place: int) -> None:
        assert self.chains[name][place] != THEIRS
        del self.chains[name][place]

    def _append(self, name: str, rule: dict[str, Any]) -> None:
        self.count += 1
        listed = {key: f"{rule[key]}/{self._bits}" for key in ("src", "dst") if key in rule}
        counters = {"counters": [self.count, 60 * self.count]}
        self.chains[name].append(rule | listed | counters)

    @property
    def _bits(self) -> int:
        return 32 if self.family is Family.IP else 128

    def _drop(self) -> None:
        ours = [name for name in self.chains if PREFIX in name]
        for rules in self.chains.values():
            rules[:] = [rule for rule in rules if rule not in ours]
        for name in ours:
            self.chains[name].clear()
            self._make_away_with(name)

    def _make_away_with(self, name: str) -> None:
        assert not any(name in rules for rules in self.chains.values())
        assert self.chains.pop(name) == []

    def listing(self) -> dict[str, Any]:
        ours = {name: rules for name, rules in self.chains.items() if PREFIX in name}
        jumps = {
            name: [place for place, rule in enumerate(rules) if rule == name]
            for name in ours
            for rules in [self.chains[hook_of(name)]]
            if name in rules
        }
        plain = [[{**rule, "counters": ()} for rule in rules] for rules in ours.values()]
        told = {"others": 6, "unfit": "", "digest": str([plain, jumps])}
        listed = {"chains": ours, "jumps": jumps, **told}
        found: dict[str, Any] = json.loads(json.dumps(listed))
        return found


class ListedFamilies:
    """Both of them, as one backend."""

    def __init__(self) -> None:
        self.families = {family: ListedChains(family) for family in Family}

    def __getitem__(self, family: Family) -> ListedChains:
        return self.families[family]

    def commit(self, plan: Plan) -> None:
        for family, table in self.families.items():
            table.run(steps(plan, family))

    def restore(self, plan: Plan) -> None:
        for table in self.families.values():
            table.restore(script(plan))

    def observed(self) -> Observed:
        return decode_chains({f: table.listing() for f, table in self.families.items()})

    def lists(self) -> list[list[Any]]:
        return [rules for table in self.families.values() for rules in table.chains.values()]


WORDS = """
    table chain rule set expr match counter dnat snat masquerade op left right meta key payload
    protocol field range addr family handle comment name flags == tcp udp ip ip6 ipv4 dport saddr
    iifname prerouting output postrouting eth0 10.0.2.2 portranger src dst target counters DNAT
    MASQUERADE in-interface out-interface to-destination to-source 22 1:30
"""
words = st.sampled_from(WORDS.split())
scalars = st.none() | st.booleans() | st.integers(-1, 70000) | st.floats(0, 9) | words | st.text()
garbage: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutilated(draw: st.DrawFn, entry: Any) -> Any:
    """The same, with something in it taken out, put in or replaced by garbage."""
    if not isinstance(entry, dict | list) or not entry or draw(st.integers(0, 5)) == 0:
        return draw(garbage)
    if isinstance(entry, list):
        place = draw(st.integers(0, len(entry) - 1))
        middle = draw(
            st.sampled_from([[], [entry[place]] * 2])
            | mutilated(entry[place]).map(lambda new: [new])
        )
        return [*entry[:place], *middle, *entry[place + 1 :]]
    key = draw(st.sampled_from(sorted(entry)))
    rest = {name: value for name, value in entry.items() if name != key}
    new_key = draw(st.sampled_from([key, key, key, *rest]) | words)
    return rest | draw(st.just({}) | mutilated(entry[key]).map(lambda new: {new_key: new}))
