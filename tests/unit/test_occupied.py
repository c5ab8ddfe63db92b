"""What a node already uses is found in what others wrote, and a range that meets it is told so.

The listings are what nft 1.0.6 and iptables 1.8.9 said of real rules.
"""

import json
from collections.abc import Iterable
from ipaddress import ip_address

import pytest

from rules.model import OWN, Family, Protocol
from rules.occupied import Listener, Occupied, Translation
from rules.ports import ALL_PORTS, PortRange
from rules.saved_translations import saved
from rules.translations import listed

HERE, THERE = ip_address("192.0.2.2"), ip_address("198.51.100.7")
HERE6, LOCALHOST = ip_address("2001:db8::2"), ip_address("127.0.0.1")

Json = dict[str, object]


def ports(text: str) -> PortRange:
    first, _, last = text.partition("-")
    return PortRange(int(first), int(last or first))


def told(found: Iterable[Translation]) -> list[str]:
    return [
        f"{one.family.value if one.family else 'both'} "
        f"{one.protocol.value if one.protocol else 'any'} "
        f"{','.join(map(str, one.ports)) or 'any'} {one.destination or '*'}"
        for one in found
    ]


def rules(*exprs: object, family: str = "ip") -> list[Json]:
    """A listing of a table with these rules, and with a few sets and maps."""
    place = {"family": family, "table": "nat"}
    chain = {**place, "name": "pre", "type": "nat", "hook": "prerouting", "prio": -100}
    made: list[Json] = [{"metainfo": {"version": "1.0.6"}}, {"chain": chain}]
    made += [{"map": {**place, "name": name, "elem": elem}} for name, elem in SETS.items()]
    made += [{"rule": {**place, "chain": "pre", "handle": 1, "expr": expr}} for expr in exprs]
    return made


SETS: dict[str, list[object]] = {
    "ports": [[80, {"concat": ["10.0.0.1", 8080]}], [443, {"concat": ["10.0.0.1", 8443]}]],
    "ranges": [[{"range": [1000, 2000]}, "10.0.0.1"], [3000, "10.0.0.2"]],
    "both": [
        [{"concat": ["192.0.2.2", 80]}, {"concat": ["10.0.0.1", 8080]}],
        [{"concat": ["192.0.2.2", 81]}, {"concat": ["10.0.0.1", 8080]}],
        [{"concat": ["192.0.2.3", 81]}, {"concat": ["10.0.0.1", 8080]}],
    ],
    "proto": [[{"concat": ["tcp", 80]}, "10.0.0.1"], [{"concat": ["udp", 53]}, "10.0.0.1"]],
    "s": [{"range": [20, 21]}, {"elem": {"val": 990, "comment": "ftps"}}],
    "none": [],
}


def field(protocol: str, name: str) -> Json:
    return {"payload": {"protocol": protocol, "field": name}}


def match(left: object, right: object, op: str = "==") -> Json:
    return {"match": {"op": op, "left": left, "right": right}}


def dport(right: object, protocol: str = "tcp", op: str = "==") -> Json:
    return match(field(protocol, "dport"), right, op)


def daddr(right: object, protocol: str = "ip", op: str = "==") -> Json:
    return match(field(protocol, "daddr"), right, op)


def l4proto(right: object, op: str = "==") -> Json:
    return match({"meta": {"key": "l4proto"}}, right, op)


def dnat_by(key: object, data: object) -> Json:
    return {"dnat": {"addr": {"map": {"key": key, "data": data}}}}


REDIRECT: Json = {"redirect": {"port": 5353}}
DNAT: Json = {"dnat": {"addr": "10.0.0.1"}}
XT: Json = {"xt": {"type": "target", "name": "DNAT"}}
MULTIPORT: Json = {"xt": {"type": "match", "name": "multiport"}}
COUNTER: Json = {"counter": {"packets": 0, "bytes": 0}}
LOCAL = match({"fib": {"result": "type", "flags": ["daddr"]}}, "local")
LOOPBACK = {"prefix": {"addr": "127.0.0.0", "len": 8}}
NETWORK = {"prefix": {"addr": "192.0.2.0", "len": 24}}
TCP_PORT, UDP_PORT = field("tcp", "dport"), field("udp", "dport")
BOTH_KEYS = {"concat": [field("ip", "daddr"), TCP_PORT]}
PROTO_KEYS = {"concat": [{"meta": {"key": "l4proto"}}, field("th", "dport")]}

RULES: dict[str, tuple[list[Json], list[str]]] = {
    "one port": ([dport(22), DNAT], ["ip tcp 22 *"]),
    "a range": ([dport({"range": [100, 200]}, "udp"), REDIRECT], ["ip udp 100-200 *"]),
    "a set of ports": (
        [dport({"set": [25, 143, {"range": [5000, 5010]}, 26]}), DNAT],
        ["ip tcp 25-26,143,5000-5010 *"],
    ),
    "a named set": ([dport("@s"), {"redirect": None}], ["ip tcp 20-21,990 *"]),
    "a named set with nothing in it": ([dport("@none"), REDIRECT], []),
    "a named set that is not listed": ([dport("@gone"), REDIRECT], []),
    "all ports but one": ([dport(22, op="!="), REDIRECT], ["ip tcp 1-21,23-65535 *"]),
    "all ports but some": (
        [dport({"set": [{"range": [1, 99]}, 200]}, op="!="), REDIRECT],
        ["ip tcp 100-199,201-65535 *"],
    ),
    "ports from one on": ([dport(60000, op=">="), REDIRECT], ["ip tcp 60000-65535 *"]),
    "ports above one": ([dport(60000, op=">"), REDIRECT], ["ip tcp 60001-65535 *"]),
    "ports below one": ([dport(5, op="<"), REDIRECT], ["ip tcp 1-4 *"]),
    "ports up to one": ([dport(5, op="<="), REDIRECT], ["ip tcp 1-5 *"]),
    "between several": (
        [dport(1000, op=">="), dport(2000, op="<"), dport(1500, op="!="), REDIRECT],
        ["ip tcp 1000-1499,1501-1999 *"],
    ),
    "no port of an address": ([daddr("192.0.2.2"), dport("@none"), REDIRECT], []),
    "port zero among others": ([dport({"set": [0, 80]}), REDIRECT], ["ip tcp 80 *"]),
    "port zero": ([dport(0), REDIRECT], []),
    "from port zero": ([dport({"range": [0, 9]}), REDIRECT], ["ip tcp 1-9 *"]),
    "two protocols": (
        [l4proto({"set": ["tcp", "udp"]}), dport(53, "th"), REDIRECT],
        ["ip tcp 53 *", "ip udp 53 *"],
    ),
    "a protocol by its number": ([l4proto(132), dport(54, "th"), REDIRECT], ["ip sctp 54 *"]),
    "two protocols at once": ([l4proto("udp"), dport(54), REDIRECT], []),
    "another protocol": ([l4proto("icmp"), daddr("192.0.2.2"), REDIRECT], []),
    "ports of another protocol": ([dport(54, "dccp"), REDIRECT], []),
    "any protocol but one": ([l4proto("icmp", "!="), dport(54, "th"), DNAT], ["ip any 54 *"]),
    "any own address": ([LOCAL, dport(90), REDIRECT], ["ip tcp 90 *"]),
    "one address": ([daddr("192.0.2.2"), dport(94), DNAT], ["ip tcp 94 192.0.2.2"]),
    "several addresses": (
        [daddr({"set": ["192.0.2.2", "192.0.2.3"]}), dport(91), REDIRECT],
        ["ip tcp 91 192.0.2.2", "ip tcp 91 192.0.2.3"],
    ),
    "a network": ([daddr(NETWORK), dport(92), REDIRECT], ["ip tcp 92 *"]),
    "all but a network": ([daddr(LOOPBACK, op="!="), dport(93), REDIRECT], ["ip tcp 93 *"]),
    "all ports of an address": ([daddr("192.0.2.2"), DNAT], ["ip any any 192.0.2.2"]),
    "all ports of a network": ([daddr(NETWORK), DNAT], []),
    "neither port nor address": ([l4proto("tcp"), {"dnat": {"addr": "10.0.0.1", "port": 80}}], []),
    "a map of addresses": (
        [dnat_by(field("ip", "daddr"), {"set": [["192.0.2.7", "10.0.0.7"]]})],
        ["ip any any 192.0.2.7"],
    ),
    "a map of ports": ([dnat_by(TCP_PORT, "@ports")], ["ip tcp 80,443 *"]),
    "a map of ranges": ([dnat_by(TCP_PORT, "@ranges")], ["ip tcp 1000-2000,3000 *"]),
    "a map in the rule": (
        [dnat_by(UDP_PORT, {"set": [[53, "10.0.0.1"], [{"range": [100, 200]}, "10.0.0.2"]]})],
        ["ip udp 53,100-200 *"],
    ),
    "a map with a rest": (
        [dnat_by(UDP_PORT, {"set": [[53, "10.0.0.1"], ["*", "10.0.0.2"]]})],
        ["ip udp 1-65535 *"],
    ),
    "a map from port to port": (
        [
            l4proto("tcp"),
            {"redirect": {"port": {"map": {"key": TCP_PORT, "data": {"set": [[70, 80]]}}}}},
        ],
        ["ip tcp 70 *"],
    ),
    "a map of addresses and ports": (
        [dnat_by(BOTH_KEYS, "@both")],
        ["ip tcp 80-81 192.0.2.2", "ip tcp 81 192.0.2.3"],
    ),
    "a map of addresses and ports with a rest": (
        [dnat_by(BOTH_KEYS, {"set": [["*", "10.0.0.1"]]})],
        ["ip tcp 1-65535 *"],
    ),
    "a map of protocols and ports": (
        [dnat_by(PROTO_KEYS, "@proto")],
        ["ip tcp 80 *", "ip udp 53 *"],
    ),
    "a set of addresses and ports": (
        [
            match(
                BOTH_KEYS,
                {
                    "set": [
                        {"concat": ["192.0.2.2", 96]},
                        {"concat": ["192.0.2.2", {"range": [97, 98]}]},
                    ]
                },
            ),
            DNAT,
        ],
        ["ip tcp 96-98 192.0.2.2"],
    ),
    "with a counter and a log": (
        [dport(94), COUNTER, {"log": {"prefix": "x"}}, DNAT],
        ["ip tcp 94 *"],
    ),
    "by iptables": ([dport(8080), COUNTER, XT], ["ip tcp 8080 *"]),
    "by iptables, with another match of it": (
        [dport(8080), {"xt": {"type": "match", "name": "addrtype"}}, XT],
        ["ip tcp 8080 *"],
    ),
    "by iptables, without ports": ([l4proto("tcp"), COUNTER, XT], []),
    "tproxy, which need not be the last": (
        [dport(4), {"tproxy": {"port": 50000}}, {"accept": None}],
        ["ip tcp 4 *"],
    ),
    "no translation": ([dport(4), {"accept": None}], []),
    "a jump": ([dport(4), {"jump": {"target": "other"}}], []),
    "another target of iptables": ([dport(4), {"xt": {"type": "target", "name": "MARK"}}], []),
    "a verdict map": ([{"vmap": {"key": BOTH_KEYS, "data": "@both"}}], []),
}


@pytest.mark.parametrize(("expr", "expected"), RULES.values(), ids=RULES.keys())
def test_a_rule_translates_what_it_says(expr: list[Json], expected: list[str]) -> None:
    assert told(listed(rules(expr))) == expected


IPV6 = match({"meta": {"key": "nfproto"}}, "ipv6")
INET_RULES: dict[str, tuple[list[Json], list[str]]] = {
    "of any family": ([dport(1), REDIRECT], ["both tcp 1 *"]),
    "of a family": ([IPV6, dport(1), REDIRECT], ["ip6 tcp 1 *"]),
    "to a family": ([dport(1), {"dnat": {"family": "ip", "addr": "10.0.0.4"}}], ["ip tcp 1 *"]),
    "for an address": (
        [daddr("2001:db8::1", "ip6"), dport(1), REDIRECT],
        ["ip6 tcp 1 2001:db8::1"],
    ),
    "not for an address": ([daddr("::1", "ip6", "!="), dport(1), REDIRECT], ["ip6 tcp 1 *"]),
    "for no family at all": ([IPV6, daddr("192.0.2.1"), dport(1), REDIRECT], []),
}


@pytest.mark.parametrize(("expr", "expected"), INET_RULES.values(), ids=INET_RULES.keys())
def test_a_rule_of_both_families_translates_what_it_says(
    expr: list[Json], expected: list[str]
) -> None:
    assert told(listed(rules(expr, family="inet"))) == expected


DOCKER = """[
{"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}},
{"table": {"family": "ip", "name": "nat", "handle": 1}},
{"chain": {"family": "ip", "table": "nat", "name": "DOCKER", "handle": 1}},
{"chain": {"family": "ip", "table": "nat", "name": "PREROUTING", "handle": 2, "type": "nat",
 "hook": "prerouting", "prio": -100, "policy": "accept"}},
{"rule": {"family": "ip", "table": "nat", "chain": "DOCKER", "handle": 6, "expr": [
 {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "docker0"}},
 {"counter": {"packets": 0, "bytes": 0}}, {"return": null}]}},
{"rule": {"family": "ip", "table": "nat", "chain": "DOCKER", "handle": 7, "expr": [
 {"match": {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": "docker0"}},
 {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 8080}},
 {"counter": {"packets": 0, "bytes": 0}}, {"xt": {"type": "target", "name": "DNAT"}}]}},
{"rule": {"family": "ip", "table": "nat", "chain": "DOCKER", "handle": 8, "expr": [
 {"match": {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": "docker0"}},
 {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
  "right": "192.0.2.2"}},
 {"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}},
  "right": {"range": [5000, 5010]}}},
 {"counter": {"packets": 0, "bytes": 0}}, {"xt": {"type": "target", "name": "DNAT"}}]}},
{"rule": {"family": "ip", "table": "nat", "chain": "PREROUTING", "handle": 3, "expr": [
 {"xt": {"type": "match", "name": "addrtype"}}, {"counter": {"packets": 0, "bytes": 0}},
 {"jump": {"target": "DOCKER"}}]}},
{"rule": {"family": "ip", "table": "nat", "chain": "PREROUTING", "handle": 9, "expr": [
 {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
  "right": "192.0.2.2"}},
 {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "tcp"}},
 {"match": {"op": "==", "left": {"payload": {"protocol": "th", "field": "dport"}},
  "right": {"set": [81, {"range": [1000, 2000]}]}}}, {"counter": {"packets": 0, "bytes": 0}},
 {"xt": {"type": "target", "name": "DNAT"}}]}}
]"""


def test_the_rules_of_docker_are_found_by_chain_and_port() -> None:
    assert [str(one) for one in listed(json.loads(DOCKER))] == [
        "table ip nat, chain DOCKER translates tcp 8080",
        "table ip nat, chain DOCKER translates udp 5000-5010 at 192.0.2.2",
        "table ip nat, chain PREROUTING translates tcp 81,1000-2000 at 192.0.2.2",
    ]


def renamed(listing: list[Json], old: str, new: str) -> list[Json]:
    made: list[Json] = json.loads(json.dumps(listing).replace(old, new))
    return made


def test_our_own_table_is_not_of_others() -> None:
    for family, expected in (("inet", []), ("ip", ["ip tcp 22 *"])):
        listing = rules([dport(22), DNAT], family=family)
        assert told(listed(listing))
        assert told(listed(renamed(listing, '"table": "nat"', '"table": "portranger"'))) == expected


def test_a_table_without_a_nat_chain_translates_nothing() -> None:
    listing = rules([dport(22), DNAT])
    assert listed(renamed(listing, '"type": "nat"', '"type": "filter"')) == ()


def test_the_same_rule_twice_is_said_once() -> None:
    assert told(listed(rules([dport(22), DNAT], [dport(22), DNAT]))) == ["ip tcp 22 *"]


GARBAGE: list[object] = [
    None,
    0,
    "",
    "@",
    "@none",
    [],
    {},
    -1,
    70000,
    "http",
    {"range": [5]},
    {"range": [9, 5]},
    {"range": ["a", None]},
    {"set": None},
    {"set": [None, {}, []]},
    {"concat": [1]},
    {"prefix": {"addr": 5}},
    {"elem": {}},
]


@pytest.mark.parametrize("strange", GARBAGE, ids=repr)
def test_what_cannot_be_read_is_left_out_and_hides_no_other(strange: object) -> None:
    exprs: list[object] = [
        [dport(strange), DNAT],
        [daddr(strange), DNAT],
        [l4proto(strange), dport(strange, "th"), DNAT],
        [dport(strange, op="!="), dport(strange, op="<"), DNAT],
        [{"match": strange}, DNAT],
        [match(strange, strange), DNAT],
        [{"match": {"op": strange, "left": strange, "right": strange}}, DNAT],
        [{"dnat": strange}],
        [{"dnat": {"family": strange, "addr": {"map": strange}}}],
        [dnat_by(strange, strange)],
        [dnat_by(BOTH_KEYS, {"set": [strange]})],
        [{"xt": strange}, DNAT],
        [{"xt": {"type": strange, "name": strange}}, DNAT],
        [strange, DNAT],
        strange,
    ]
    odd: list[Json] = [
        {kind: value}
        for kind in ("rule", "chain", "map", "set", "table")
        for value in (
            strange,
            {"family": strange, "table": strange, "name": strange, "elem": strange},
            {"family": "ip", "table": "nat", "name": strange, "expr": strange},
        )
    ]
    listing = [*rules(*exprs, [dport(4711), DNAT]), *odd, strange]
    assert "ip tcp 4711 *" in told(listed(listing))  # type: ignore[arg-type]


def test_a_rule_with_more_combinations_than_anybody_needs_is_left_out() -> None:
    many = [f"10.1.{high}.{low}" for high in range(8) for low in range(250)]
    pairs = match(BOTH_KEYS, {"set": [{"concat": [address, 80]} for address in many]})
    assert len(listed(rules([pairs, DNAT]))) == len(many)
    assert listed(rules([daddr({"set": many}), pairs, DNAT])) == ()


def test_a_name_cannot_spoil_the_terminal() -> None:
    listing = rules([dport(22), DNAT])
    (found,) = listed(renamed(listing, '"chain": "pre"', '"chain": "\\u001b["'))
    assert str(found).isprintable()


# ---------------------------------------------------------------------------------------- iptables

SAVED = {
    "one port": ("-A D ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT", ["ip tcp 8080 *"]),
    "a range of an address": (
        "-A P -d 192.0.2.2/32 -p udp -m udp --dport 5000:5010 -j DNAT",
        ["ip udp 5000-5010 192.0.2.2"],
    ),
    "several": (
        "-A P -p tcp -m multiport --dports 81,443,1000:2000 -j DNAT",
        ["ip tcp 81,443,1000-2000 *"],
    ),
    "all but one": ("-A P -p tcp -m tcp ! --dport 22 -j REDIRECT", ["ip tcp 1-21,23-65535 *"]),
    "a protocol by its number": ("-A P -p 132 -m sctp --dport 9 -j REDIRECT", ["ip sctp 9 *"]),
    "an address": ("-A P -d 192.0.2.9/32 -j DNAT", ["ip any any 192.0.2.9"]),
    "a network": ("-A P -d 192.0.2.0/24 -p tcp -m tcp --dport 7 -j DNAT", ["ip tcp 7 *"]),
    "a mask with gaps": ("-A P -d 10.0.0.1/255.0.0.255 -p tcp --dport 7 -j DNAT", ["ip tcp 7 *"]),
    "not an address": ("-A P ! -d 192.0.2.9/32 -p tcp -m tcp --dport 7 -j DNAT", ["ip tcp 7 *"]),
    "not a protocol": ("-A P ! -p icmp -d 192.0.2.9/32 -j DNAT", ["ip any any 192.0.2.9"]),
    "a comment that looks like more": (
        '-A P -p tcp -m comment --comment -d -m tcp --dport 7 -m comment --comment "\\"-j" -j DNAT',
        ["ip tcp 7 *"],
    ),
    "a target that looks like more": ("-A P -p tcp --dport 7 -j DNAT --dport 8", ["ip tcp 7 *"]),
    "an endpoint of kube-proxy": ("-A KUBE-SEP-X -p tcp -m tcp -j DNAT --to 10.0.0.1:80", []),
    "a jump": ("-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-X", []),
    "source ports": ("-A P -p tcp -m tcp --sport 7 -j DNAT", []),
    "our own": ("-A PORTRANGER-PREROUTING -p tcp -m tcp --dport 7 -j DNAT", []),
    "no end of a quote": ('-A P -p tcp --dport 7 -m comment --comment "x -j DNAT', []),
    "no port": ("-A P -p tcp --dport", []),
    "no number": ("-A P -p tcp --dport http -j DNAT", []),
    "no chain": ("-A ", []),
}


@pytest.mark.parametrize(("line", "expected"), SAVED.values(), ids=SAVED.keys())
def test_a_rule_that_iptables_saved_translates_what_it_says(line: str, expected: list[str]) -> None:
    text = f"# Generated\n*nat\n:P ACCEPT [0:0]\n{line}\n-A P -p tcp --dport 4711 -j DNAT\nCOMMIT\n"
    assert sorted(told(saved(text, Family.IP, "x"))) == sorted([*expected, "ip tcp 4711 *"])


def test_only_the_table_nat_translates() -> None:
    line = "-A P -p tcp --dport 7 -j REDIRECT"
    text = f"*mangle\n{line}\nCOMMIT\n*nat\nCOMMIT\n"
    assert saved(text, Family.IP6, "x") == ()
    (one,) = saved(text.replace("mangle", "nat"), Family.IP6, "legacy table ip6 nat")
    assert (one.family, str(one)) == (Family.IP6, "legacy table ip6 nat, chain P translates tcp 7")


# ----------------------------------------------------------------------------------------- meeting


def listener(
    port: int,
    address: object = None,
    protocol: Protocol = Protocol.TCP,
    family: Family = Family.IP,
) -> Listener:
    return Listener(protocol=protocol, family=family, address=address, port=port)  # type: ignore[arg-type]


def translation(
    *ranges: str,
    destination: object = None,
    protocol: Protocol | None = Protocol.TCP,
    family: Family | None = Family.IP,
) -> Translation:
    return Translation(
        where="x",
        family=family,
        protocol=protocol,
        ports=tuple(map(ports, ranges)),
        destination=destination,  # type: ignore[arg-type]
    )


def meets(
    one: Listener | Translation,
    asked: str = "80-90",
    destination: object = None,
    protocol: Protocol = Protocol.TCP,
    family: Family = Family.IP,
) -> bool:
    """Whether it meets the range, on a node with the address HERE."""
    occupied = Occupied(
        listeners=(one,) if isinstance(one, Listener) else (),
        translations=(one,) if isinstance(one, Translation) else (),
        own=frozenset({HERE, HERE6, LOCALHOST}),
        ephemeral=PortRange(32768, 60999),
    )
    found = occupied.meeting(protocol, family, ports(asked), destination)  # type: ignore[arg-type]
    assert found in ((), (one,))
    return bool(found)


@pytest.mark.parametrize("port", [79, 80, 85, 90, 91])
def test_a_listener_meets_the_ranges_with_its_port(port: int) -> None:
    assert meets(listener(port)) is (port in (80, 85, 90))


@pytest.mark.parametrize(
    ("address", "destination", "expected"),
    [
        (None, None, True),
        (None, OWN[Family.IP], True),
        (None, HERE, True),
        (None, THERE, False),
        (HERE, None, True),
        (HERE, OWN[Family.IP], True),
        (HERE, HERE, True),
        (HERE, THERE, False),
        (THERE, None, True),
        (THERE, HERE, False),
        (ip_address("127.0.0.53"), None, False),
        (ip_address("224.0.0.251"), None, False),
    ],
)
def test_a_listener_meets_what_is_published_at_its_address(
    address: object, destination: object, expected: bool
) -> None:
    assert meets(listener(80, address), destination=destination) is expected


def test_a_listener_meets_its_own_protocol_and_family_only() -> None:
    one = listener(80, protocol=Protocol.UDP, family=Family.IP6)
    assert meets(one, protocol=Protocol.UDP, family=Family.IP6)
    assert not meets(one, protocol=Protocol.UDP)
    assert not meets(one, family=Family.IP6)


@pytest.mark.parametrize("port", [32767, 32768, 60999, 61000])
def test_a_udp_socket_with_a_port_of_the_moment_meets_nothing(port: int) -> None:
    outside = port in (32767, 61000)
    assert (
        meets(listener(port, protocol=Protocol.UDP), "30000-65535", protocol=Protocol.UDP)
        is outside
    )
    assert meets(listener(port), "30000-65535")


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (translation("1-79"), False),
        (translation("1-80"), True),
        (translation("90-99"), True),
        (translation("91-99"), False),
        (translation("1-2", "85", "100"), True),
        (translation("1-2", "100"), False),
        (translation(), True),
        (translation("85", protocol=Protocol.UDP), False),
        (translation("85", protocol=None), True),
        (translation("85", family=Family.IP6), False),
        (translation("85", family=None), True),
    ],
)
def test_a_translation_meets_the_ranges_with_a_port_of_it(one: Translation, expected: bool) -> None:
    assert meets(one) is expected


@pytest.mark.parametrize(
    ("address", "destination", "expected"),
    [
        (None, None, True),
        (None, HERE, True),
        (None, THERE, True),
        (HERE, None, True),
        (HERE, OWN[Family.IP], True),
        (HERE, HERE, True),
        (HERE, THERE, False),
        (THERE, None, False),
        (THERE, THERE, True),
        (LOCALHOST, None, False),
    ],
)
def test_a_translation_meets_what_is_published_at_its_destination(
    address: object, destination: object, expected: bool
) -> None:
    assert meets(translation("80", destination=address), destination=destination) is expected
    assert meets(translation(destination=address), destination=destination) is expected


def test_where_the_addresses_are_not_known_any_may_be_its_own() -> None:
    occupied = Occupied(
        listeners=(listener(80),), translations=(translation("81", destination=THERE),)
    )
    assert len(occupied.meeting(Protocol.TCP, Family.IP, ALL_PORTS, None)) == 2
    assert occupied.meeting(Protocol.TCP, Family.IP, ALL_PORTS, HERE) == (listener(80),)


def test_all_that_meet_are_told_and_no_other() -> None:
    inside = (listener(80), listener(85, HERE))
    occupied = Occupied(
        listeners=(listener(22), *inside, listener(443)),
        translations=(translation("85-100"), translation("8080")),
    )
    found = occupied.meeting(Protocol.TCP, Family.IP, ports("80-90"), None)
    assert found == (*inside, translation("85-100"))
    assert occupied.meeting(Protocol.TCP, Family.IP, ports("101-442"), None) == ()


def test_who_listens_is_named() -> None:
    sshd = Listener(
        protocol=Protocol.TCP, family=Family.IP, address=None, port=22, pid=812, program="sshd"
    )
    assert str(sshd) == "sshd (pid 812) listens on tcp 22"
    assert str(listener(53, HERE, Protocol.UDP)) == "somebody listens on udp 53 at 192.0.2.2"


def test_of_many_ranges_a_few_are_named() -> None:
    one = translation(*map(str, range(2, 18, 2)), protocol=None)
    assert str(one) == "x translates any protocol 2,4,6,8,10 and 3 more"
    assert str(translation(destination=HERE)) == "x translates tcp any port at 192.0.2.2"
