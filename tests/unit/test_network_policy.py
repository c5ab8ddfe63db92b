"""What NetworkPolicies, and the Namespaces and Pods that they choose by, are answered with: tables
of YAML, codes, and the fields they are found at. Document 001 is KEP-2079, endPort."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from agent.sources import yaml_text
from rules.manifests import Reading, read
from rules.model import Protocol
from rules.policies import (
    IpBlock,
    Namespace,
    NetworkPolicy,
    Operator,
    Peers,
    PolicyPort,
    PolicyRule,
    Requirement,
    Selector,
)
from rules.ports import HIGHEST, LOWEST, PortRange

POLICY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: ftp, namespace: shop}
spec: {%s}
"""
A_WEB = "{matchLabels: {app: web}}"
WITH_A = "{matchExpressions: [{key: a, operator: Exists}]}"
WEB = Selector((Requirement("app", Operator.IN, ("web",)),))


def parse(text: str) -> Any:
    documents, problems = yaml_text.parse(text)
    assert not problems, [str(problem) for problem in problems]
    [(document, _)] = documents
    return document


def policy(spec: str) -> Any:
    return parse(POLICY % spec)


def found(reading: Reading) -> list[tuple[str, str]]:
    return [(problem.code, problem.field) for problem in reading.problems]


def only(document: object) -> NetworkPolicy:
    """The one policy of a document without problems."""
    reading = read(document)
    assert [str(problem) for problem in reading.problems] == []
    [made] = reading.policies
    assert (reading.policy_places, reading.count, made.broken) == (((),), 1, False)
    return made


def broken(document: object) -> NetworkPolicy:
    """The one policy of a document that has problems: it allows nothing."""
    reading = read(document)
    assert reading.problems
    [made] = reading.policies
    assert (reading.policy_places, reading.count, made.broken) == (((),), 1, True)
    assert not made.ingress
    assert not made.egress
    return made


def rules(written: str) -> tuple[PolicyRule, ...]:
    made = only(policy(f"ingress: [{written}]")).ingress
    assert made is not None
    return made


# --------------------------------------------------------------------------- what is accepted


def test_everything_a_policy_says_is_read() -> None:
    document = parse("""
        apiVersion: networking.k8s.io/v1
        kind: NetworkPolicy
        metadata: {name: test-network-policy, namespace: default}
        spec:
          podSelector: {matchLabels: {role: db}}
          policyTypes: [Ingress, Egress]
          ingress:
          - from:
            - ipBlock: {cidr: 172.17.0.0/16, except: [172.17.1.0/24]}
            - namespaceSelector: {matchLabels: {project: myproject}}
            - podSelector: {matchLabels: {role: frontend}}
            ports: [{protocol: TCP, port: 6379}]
          egress:
          - to: [{ipBlock: {cidr: 10.0.0.0/24}}]
            ports: [{protocol: TCP, port: 5978}]
        """)
    made = only(document)
    assert made == NetworkPolicy(
        namespace="default",
        name="test-network-policy",
        selector=Selector((Requirement("role", Operator.IN, ("db",)),)),
        ingress=(
            PolicyRule(
                peers=(
                    IpBlock(ip_network("172.17.0.0/16"), (ip_network("172.17.1.0/24"),)),
                    Peers(
                        namespaces=Selector((Requirement("project", Operator.IN, ("myproject",)),))
                    ),
                    Peers(pods=Selector((Requirement("role", Operator.IN, ("frontend",)),))),
                ),
                ports=(PolicyPort(Protocol.TCP, PortRange(6379, 6379)),),
            ),
        ),
        egress=(
            PolicyRule(
                peers=(IpBlock(ip_network("10.0.0.0/24")),),
                ports=(PolicyPort(Protocol.TCP, PortRange(5978, 5978)),),
            ),
        ),
    )
    assert str(made) == "NetworkPolicy/default/test-network-policy"


EVERYTHING = (PolicyRule(),)

TYPES: dict[str, tuple[str, Any, Any]] = {
    "nothing at all": ("", (), None),
    "an empty list of types is none": ("policyTypes: []", (), None),
    "null is none": ("policyTypes: null, ingress: null, egress: null", (), None),
    "rules for ingress": ("ingress: [{}]", EVERYTHING, None),
    "rules for egress": ("egress: [{}]", (), EVERYTHING),
    "an empty list of rules for egress is none": ("egress: []", (), None),
    "types without rules": ("policyTypes: [Ingress, Egress]", (), ()),
    "only egress": ("policyTypes: [Egress]", None, ()),
    "only egress, and rules for both": (
        "policyTypes: [Egress], ingress: [{}], egress: [{}]",
        None,
        EVERYTHING,
    ),
    "only ingress, and rules for both": (
        "policyTypes: [Ingress], ingress: [{}], egress: [{}]",
        EVERYTHING,
        None,
    ),
    "one type twice": ("policyTypes: [Egress, Egress]", None, ()),
}


@pytest.mark.parametrize(("spec", "ingress", "egress"), TYPES.values(), ids=TYPES)
def test_the_directions_that_a_policy_speaks_of(spec: str, ingress: object, egress: object) -> None:
    made = only(policy(spec))
    assert (made.ingress, made.egress) == (ingress, egress)
    assert made.selector == Selector()


PORTS: dict[str, tuple[str, list[tuple[Protocol, str | PortRange | None]] | None]] = {
    "no list is everything": ("{}", None),
    "null is everything": ("{ports: null}", None),
    "an empty list is everything": ("{ports: []}", None),
    "an empty port is all of TCP": ("{ports: [{}]}", [(Protocol.TCP, None)]),
    "a protocol is all of it": (
        "{ports: [{protocol: UDP}, {protocol: SCTP}]}",
        [(Protocol.UDP, None), (Protocol.SCTP, None)],
    ),
    "a number": ("{ports: [{port: 80}]}", [(Protocol.TCP, PortRange(80, 80))]),
    "a name": ("{ports: [{port: web, protocol: UDP}]}", [(Protocol.UDP, "web")]),
    "a range": ("{ports: [{port: 80, endPort: 90}]}", [(Protocol.TCP, PortRange(80, 90))]),
    "a range of one": ("{ports: [{port: 80, endPort: 80}]}", [(Protocol.TCP, PortRange(80, 80))]),
    "every port": (
        "{ports: [{port: 1, endPort: 65535}]}",
        [(Protocol.TCP, PortRange(LOWEST, HIGHEST))],
    ),
    "nulls": (
        "{ports: [{port: 80, endPort: null, protocol: null}, {port: null}]}",
        [(Protocol.TCP, PortRange(80, 80)), (Protocol.TCP, None)],
    ),
}


@pytest.mark.parametrize(("written", "expected"), PORTS.values(), ids=PORTS)
def test_ports_are_read(
    written: str, expected: list[tuple[Protocol, str | PortRange | None]] | None
) -> None:
    [rule] = rules(written)
    assert rule.peers is None
    assert rule.ports == (tuple(PolicyPort(*one) for one in expected) if expected else None)


PEERS: dict[str, tuple[str, tuple[IpBlock | Peers, ...] | None]] = {
    "no list is everybody": ("{}", None),
    "null is everybody": ("{from: null}", None),
    "an empty list is everybody": ("{from: []}", None),
    "every pod of the namespace": ("{from: [{podSelector: {}}]}", (Peers(),)),
    "every pod of every namespace": (
        "{from: [{namespaceSelector: {}}]}",
        (Peers(namespaces=Selector()),),
    ),
    "some of some": (
        f"{{from: [{{podSelector: {A_WEB}, namespaceSelector: {WITH_A}, ipBlock: null}}]}}",
        (Peers(pods=WEB, namespaces=Selector((Requirement("a", Operator.EXISTS),))),),
    ),
    "two entries are two peers": (
        "{from: [{podSelector: {matchLabels: {app: web}}}, {namespaceSelector: {}}]}",
        (Peers(pods=WEB), Peers(namespaces=Selector())),
    ),
    "a network of IPv6": (
        "{from: [{ipBlock: {cidr: '2001:db8::/32', except: ['2001:db8:1::/48']}}]}",
        (IpBlock(ip_network("2001:db8::/32"), (ip_network("2001:db8:1::/48"),)),),
    ),
    "bits behind the prefix count for nothing": (
        "{from: [{ipBlock: {cidr: 10.1.2.3/8, except: [10.1.2.3/16]}}]}",
        (IpBlock(ip_network("10.0.0.0/8"), (ip_network("10.1.0.0/16"),)),),
    ),
    "no exceptions": (
        "{from: [{ipBlock: {cidr: 0.0.0.0/0, except: }}, {ipBlock: {cidr: '::/0', except: []}}]}",
        (IpBlock(ip_network("0.0.0.0/0")), IpBlock(ip_network("::/0"))),
    ),
}


@pytest.mark.parametrize(("written", "expected"), PEERS.values(), ids=PEERS)
def test_peers_are_read(written: str, expected: tuple[IpBlock | Peers, ...] | None) -> None:
    [rule] = rules(written)
    assert (rule.peers, rule.ports) == (expected, None)


def test_all_ways_to_compare_labels_are_read_in_one_order() -> None:
    made = only(
        policy("""podSelector: {matchExpressions: [
            {key: d, operator: DoesNotExist, values: []},
            {key: example.org/c, operator: Exists, values: null},
            {key: b, operator: NotIn, values: [y, x, y]},
            {key: a, operator: In, values: ['']}
        ], matchLabels: {z: 'yes', a: ''}}""")
    )
    assert made.selector == Selector(
        (
            Requirement("a", Operator.IN, ("",)),
            Requirement("b", Operator.NOT_IN, ("x", "y")),
            Requirement("d", Operator.DOES_NOT_EXIST),
            Requirement("example.org/c", Operator.EXISTS),
            Requirement("z", Operator.IN, ("yes",)),
        )
    )


@pytest.mark.parametrize("key", ["a", "A-b_c.9", "x" * 63, "example.org/a", "a" * 253 + "/a"])
@pytest.mark.parametrize("value", ["", "a", "A-b_c.9", "x" * 63])
def test_what_kubernetes_takes_for_a_label(key: str, value: str) -> None:
    document = policy("")
    document["spec"]["podSelector"] = {"matchLabels": {key: value}}
    assert only(document).selector == Selector((Requirement(key, Operator.IN, (value,)),))


# ---------------------------------------------------------- document 001: its rules for endPort

END_PORT: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "an endPort needs a port": ("{endPort: 90}", [("end-needs-port", "endPort")]),
    "an endPort needs a port that is not null": (
        "{port: null, endPort: 90}",
        [("end-needs-port", "endPort")],
    ),
    "not with a named port": ("{port: web, endPort: 90}", [("end-on-name", "endPort")]),
    "nor with a bad name": (
        "{port: '80', endPort: 90}",
        [("bad-port-name", "port"), ("end-on-name", "endPort")],
    ),
    "it is at least the port": ("{port: 80, endPort: 79}", [("end-before-start", "endPort")]),
    "it is a port": ("{port: 80, endPort: 65536}", [("port-out-of-range", "endPort")]),
    "nought is no end": ("{port: 80, endPort: 0}", [("port-out-of-range", "endPort")]),
    "nor is less": ("{port: 80, endPort: -1}", [("port-out-of-range", "endPort")]),
    "nor a text": ("{port: 80, endPort: '90'}", [("not-an-integer", "endPort")]),
    "nor a truth": ("{port: 80, endPort: true}", [("not-an-integer", "endPort")]),
    "nor what is read differently": (
        "{port: 80, endPort: 0777}",
        [("ambiguous-number", "endPort")],
    ),
    "two mistakes are told at once": (
        "{port: 0, endPort: 65536}",
        [("port-out-of-range", "port"), ("port-out-of-range", "endPort")],
    ),
    "an end by another name": ("{port: 80, end: 90}", [("unknown-key", "end")]),
    "an end in other letters": ("{port: 80, endport: 90}", [("unknown-key", "endport")]),
}


@pytest.mark.parametrize("direction", ["ingress", "egress"])
@pytest.mark.parametrize(("written", "expected"), END_PORT.values(), ids=END_PORT)
def test_the_rules_of_end_port(
    written: str, expected: list[tuple[str, str]], direction: str
) -> None:
    document = policy(f"{direction}: [{{}}, {{ports: [{{port: 1}}, {written}]}}]")
    place = f"spec.{direction}[1].ports[1]."
    assert found(read(document)) == [(code, place + key) for code, key in expected]
    broken(document)


# -------------------------------------------------------------------------- what else is wrong

PORT = "spec.ingress[0].ports[0]"
PEER = "spec.ingress[0].from[0]"
BLOCK = PEER + ".ipBlock"

BAD: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a port of nought": ("{ports: [{port: 0}]}", [("port-out-of-range", PORT + ".port")]),
    "a number in quotes": ("{ports: [{port: '80'}]}", [("bad-port-name", PORT + ".port")]),
    "a name that is none": ("{ports: [{port: a_b}]}", [("bad-port-name", PORT + ".port")]),
    "an empty name": ("{ports: [{port: ''}]}", [("bad-port-name", PORT + ".port")]),
    "half a port": ("{ports: [{port: 1.5}]}", [("not-an-integer", PORT + ".port")]),
    "a list for a port": ("{ports: [{port: [80]}]}", [("not-an-integer", PORT + ".port")]),
    "a protocol in small letters": (
        "{ports: [{protocol: tcp}]}",
        [("bad-protocol", PORT + ".protocol")],
    ),
    "an empty protocol": ("{ports: [{protocol: ''}]}", [("bad-protocol", PORT + ".protocol")]),
    "a false protocol": ("{ports: [{protocol: false}]}", [("bad-protocol", PORT + ".protocol")]),
    "a protocol without ports": (
        "{ports: [{protocol: ICMP}]}",
        [("bad-protocol", PORT + ".protocol")],
    ),
    "a number for a port's mapping": ("{ports: [80]}", [("not-a-mapping", PORT)]),
    "null for a port's mapping, which the API takes for all of TCP": (
        "{ports: [null]}",
        [("not-a-mapping", PORT)],
    ),
    "a mapping of ports": ("{ports: {port: 80}}", [("not-a-list", "spec.ingress[0].ports")]),
    "a peer that is nobody": ("{from: [{}]}", [("empty-peer", PEER)]),
    "a peer of nulls": ("{from: [{podSelector: null, ipBlock: null}]}", [("empty-peer", PEER)]),
    "null for a peer": ("{from: [null]}", [("not-a-mapping", PEER)]),
    "a mapping of peers": (
        "{from: {podSelector: {}}}",
        [("not-a-list", "spec.ingress[0].from")],
    ),
    "the peers of the other direction": (
        "{to: [{podSelector: {}}]}",
        [("unknown-key", "spec.ingress[0].to")],
    ),
    "addresses and labels": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]}",
        [("block-and-selector", BLOCK)],
    ),
    "addresses and namespaces": (
        "{from: [{namespaceSelector: {}, ipBlock: {cidr: 10.0.0.0/8}}]}",
        [("block-and-selector", BLOCK)],
    ),
    "no network": ("{from: [{ipBlock: {}}]}", [("missing", BLOCK + ".cidr")]),
    "an empty network": ("{from: [{ipBlock: {cidr: ''}}]}", [("bad-cidr", BLOCK + ".cidr")]),
    "an address": ("{from: [{ipBlock: {cidr: 10.0.0.1}}]}", [("bad-cidr", BLOCK + ".cidr")]),
    "a mask": ("{from: [{ipBlock: {cidr: 10.0.0.0/255.0.0.0}}]}", [("bad-cidr", BLOCK + ".cidr")]),
    "a prefix too long": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/33}}]}",
        [("bad-cidr", BLOCK + ".cidr")],
    ),
    "leading noughts": (
        "{from: [{ipBlock: {cidr: 010.0.0.0/8}}]}",
        [("bad-cidr", BLOCK + ".cidr")],
    ),
    "a zone": ("{from: [{ipBlock: {cidr: 'fe80::%eth0/64'}}]}", [("bad-cidr", BLOCK + ".cidr")]),
    "IPv4 in IPv6": (
        "{from: [{ipBlock: {cidr: '::ffff:10.0.0.0/104'}}]}",
        [("bad-cidr", BLOCK + ".cidr")],
    ),
    "a number for a network": ("{from: [{ipBlock: {cidr: 10}}]}", [("bad-cidr", BLOCK + ".cidr")]),
    "a text for a block": ("{from: [{ipBlock: 10.0.0.0/8}]}", [("not-a-mapping", BLOCK)]),
    "an unknown key of a block": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, excepts: []}}]}",
        [("unknown-key", BLOCK + ".excepts")],
    ),
    "all of it excepted": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}",
        [("except-outside", BLOCK + ".except[0]")],
    ),
    "more than it excepted": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 10.0.0.0/7]}}]}",
        [("except-outside", BLOCK + ".except[1]")],
    ),
    "others excepted": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/16]}}]}",
        [("except-outside", BLOCK + ".except[0]")],
    ),
    "another family excepted": (
        "{from: [{ipBlock: {cidr: 0.0.0.0/0, except: ['fd00::/64']}}]}",
        [("except-outside", BLOCK + ".except[0]")],
    ),
    "no networks excepted": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.1.1, 5, null]}}]}",
        [("bad-cidr", f"{BLOCK}.except[{index}]") for index in range(3)],
    ),
    "a text excepted": (
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: 10.1.0.0/16}}]}",
        [("not-a-list", BLOCK + ".except")],
    ),
    "bad exceptions of a bad network": (
        "{from: [{ipBlock: {cidr: x, except: [y]}}]}",
        [("bad-cidr", BLOCK + ".cidr"), ("bad-cidr", BLOCK + ".except[0]")],
    ),
    "an unknown key of a peer": (
        "{from: [{podselector: {}}]}",
        [("unknown-key", PEER + ".podselector"), ("empty-peer", PEER)],
    ),
    "a bad selector of a peer": (
        "{from: [{podSelector: {app: web}}]}",
        [("unknown-key", PEER + ".podSelector.app")],
    ),
    "a text for a selector of namespaces": (
        "{from: [{namespaceSelector: shop}]}",
        [("not-a-mapping", PEER + ".namespaceSelector")],
    ),
    "null for a rule, which the API takes for everything": (
        "null",
        [("not-a-mapping", "spec.ingress[0]")],
    ),
    "an unknown key of a rule": (
        "{port: [{port: 80}]}",
        [("unknown-key", "spec.ingress[0].port")],
    ),
}


@pytest.mark.parametrize(("written", "expected"), BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_rule(written: str, expected: list[tuple[str, str]]) -> None:
    document = policy(f"podSelector: {{matchLabels: {{app: web}}}}, ingress: [{written}, {{}}]")
    assert found(read(document)) == expected
    made = broken(document)
    assert (made.namespace, made.name, made.selector) == ("shop", "ftp", WEB)
    assert (made.ingress, made.egress) == ((), None)


SELECTOR = "spec.podSelector"
FIRST = SELECTOR + ".matchExpressions[0]"

BAD_SELECTORS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a text": ("web", [("not-a-mapping", SELECTOR)]),
    "labels without matchLabels": ("{app: web}", [("unknown-key", SELECTOR + ".app")]),
    "a list of labels": ("{matchLabels: [app]}", [("not-a-mapping", SELECTOR + ".matchLabels")]),
    "a number for a label": (
        "{matchLabels: {a: 5}}",
        [("not-a-string", SELECTOR + ".matchLabels.a")],
    ),
    "null for a label": (
        "{matchLabels: {a: null}}",
        [("not-a-string", SELECTOR + ".matchLabels.a")],
    ),
    "a value with a space": (
        "{matchLabels: {a: 'x y'}}",
        [("bad-label", SELECTOR + ".matchLabels.a")],
    ),
    "a value that ends in a dash": (
        "{matchLabels: {a: x-}}",
        [("bad-label", SELECTOR + ".matchLabels.a")],
    ),
    "a value too long": (
        f"{{matchLabels: {{a: {'x' * 64}}}}}",
        [("bad-label", SELECTOR + ".matchLabels.a")],
    ),
    "a key that begins with a dot": (
        "{matchLabels: {.a: x}}",
        [("bad-label", SELECTOR + ".matchLabels['.a']")],
    ),
    "an empty key": ("{matchLabels: {'': x}}", [("bad-label", SELECTOR + ".matchLabels['']")]),
    "a key with two slashes": (
        "{matchLabels: {a/b/c: x}}",
        [("bad-label", SELECTOR + ".matchLabels['a/b/c']")],
    ),
    "a key with nothing before the slash": (
        "{matchLabels: {/c: x}}",
        [("bad-label", SELECTOR + ".matchLabels['/c']")],
    ),
    "a key of capitals before the slash": (
        "{matchLabels: {Example.org/c: x}}",
        [("bad-label", SELECTOR + ".matchLabels['Example.org/c']")],
    ),
    "no list of expressions": (
        "{matchExpressions: {key: a}}",
        [("not-a-list", SELECTOR + ".matchExpressions")],
    ),
    "an empty expression": (
        "{matchExpressions: [{}]}",
        [("missing", FIRST + ".key"), ("missing", FIRST + ".operator")],
    ),
    "an operator that is none": (
        "{matchExpressions: [{key: a, operator: Equals, values: [x]}]}",
        [("bad-choice", FIRST + ".operator")],
    ),
    "an operator in other letters": (
        "{matchExpressions: [{key: a, operator: notin, values: [x]}]}",
        [("bad-choice", FIRST + ".operator")],
    ),
    "a number for an operator": (
        "{matchExpressions: [{key: a, operator: 5}]}",
        [("not-a-string", FIRST + ".operator")],
    ),
    "In without values": (
        "{matchExpressions: [{key: a, operator: In}]}",
        [("values-needed", FIRST + ".values")],
    ),
    "NotIn with none": (
        "{matchExpressions: [{key: a, operator: NotIn, values: []}]}",
        [("values-needed", FIRST + ".values")],
    ),
    "Exists with values": (
        "{matchExpressions: [{key: a, operator: Exists, values: [x]}]}",
        [("values-forbidden", FIRST + ".values")],
    ),
    "DoesNotExist with values": (
        "{matchExpressions: [{key: a, operator: DoesNotExist, values: [x]}]}",
        [("values-forbidden", FIRST + ".values")],
    ),
    "values that are no list": (
        "{matchExpressions: [{key: a, operator: In, values: x}]}",
        [("not-a-list", FIRST + ".values")],
    ),
    "values that are none": (
        "{matchExpressions: [{key: a, operator: In, values: [5, 'x y', ok]}]}",
        [("not-a-string", FIRST + ".values[0]"), ("bad-label", FIRST + ".values[1]")],
    ),
    "a key that is none": (
        "{matchExpressions: [{key: 'a b', operator: Exists}]}",
        [("bad-label", FIRST + ".key")],
    ),
    "an unknown key of an expression": (
        "{matchExpressions: [{key: a, operator: In, value: x}]}",
        [("unknown-key", FIRST + ".value"), ("values-needed", FIRST + ".values")],
    ),
    "null for an expression": ("{matchExpressions: [null]}", [("not-a-mapping", FIRST)]),
}


@pytest.mark.parametrize(("written", "expected"), BAD_SELECTORS.values(), ids=BAD_SELECTORS)
def test_a_selector_that_cannot_be_read_selects_everything(
    written: str, expected: list[tuple[str, str]]
) -> None:
    document = policy(f"podSelector: {written}, ingress: [{{}}]")
    assert found(read(document)) == expected
    made = broken(document)
    assert (made.selector, made.ingress, made.egress) == (Selector(), (), None)


BOTH: tuple[Any, Any] = ((), ())

BAD_SPECS: dict[str, tuple[str, list[tuple[str, str]], tuple[Any, Any]]] = {
    "a type that is none": (
        "policyTypes: [Ingres]",
        [("bad-choice", "spec.policyTypes[0]")],
        BOTH,
    ),
    "a type in small letters": (
        "policyTypes: [ingress, 5]",
        [("bad-choice", "spec.policyTypes[0]"), ("bad-choice", "spec.policyTypes[1]")],
        BOTH,
    ),
    "too many types": (
        "policyTypes: [Ingress, Ingress, Ingress]",
        [("bad-choice", "spec.policyTypes")],
        BOTH,
    ),
    "a text for types": ("policyTypes: Ingress", [("not-a-list", "spec.policyTypes")], BOTH),
    "a key that may have been egress": ("egres: [{}]", [("unknown-key", "spec.egres")], BOTH),
    "a key that may have been the selector": (
        "podSelectors: {}, policyTypes: [Ingress]",
        [("unknown-key", "spec.podSelectors")],
        ((), None),
    ),
    "no list of rules": ("ingress: {}", [("not-a-list", "spec.ingress")], ((), None)),
    "no list of rules for egress": ("egress: {}", [("not-a-list", "spec.egress")], BOTH),
    "bad rules for a direction that it does not speak of": (
        "policyTypes: [Egress], ingress: [{ports: [{port: 0}]}], egress: [{}]",
        [("port-out-of-range", PORT + ".port")],
        (None, ()),
    ),
    "bad rules for egress": (
        "egress: [{ports: [{port: 0}]}], ingress: [{}]",
        [("port-out-of-range", "spec.egress[0].ports[0].port")],
        BOTH,
    ),
}


@pytest.mark.parametrize(("spec", "expected", "left"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_the_directions_that_a_broken_policy_closes(
    spec: str, expected: list[tuple[str, str]], left: tuple[Any, Any]
) -> None:
    document = policy(spec)
    assert found(read(document)) == expected
    made = broken(document)
    assert (made.ingress, made.egress) == left


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, [("missing", "spec")]),
        ([], [("not-a-mapping", "spec")]),
        ("x", [("not-a-mapping", "spec")]),
    ],
)
def test_a_policy_without_a_specification_closes_everything(
    spec: object, expected: list[tuple[str, str]]
) -> None:
    document = {**policy(""), "spec": spec}
    assert found(read(document)) == expected
    made = broken(document)
    assert (made.selector, made.ingress, made.egress) == (Selector(), (), ())


def test_every_problem_is_told_at_once() -> None:
    document = policy(
        "podSelector: {a: b}, policyTypes: [x], ingress: [{from: [{}], ports: [{port: 0}]}],"
        " egress: [{to: [{ipBlock: {cidr: x}}], ports: [{endPort: 5}]}]"
    )
    assert found(read(document)) == [
        ("bad-choice", "spec.policyTypes[0]"),
        ("unknown-key", "spec.podSelector.a"),
        ("empty-peer", PEER),
        ("port-out-of-range", PORT + ".port"),
        ("bad-cidr", "spec.egress[0].to[0].ipBlock.cidr"),
        ("end-needs-port", "spec.egress[0].ports[0].endPort"),
    ]


def test_a_problem_says_what_to_write() -> None:
    [problem] = read(policy("ingress: [{ports: [{port: 90, endPort: 80}]}]")).problems
    assert str(problem) == (
        "spec.ingress[0].ports[0].endPort: is below port, which is 90 (it is 80)."
        " Write a number from 90 to 65535, or exchange the two. [end-before-start]"
    )


IN_A = "{key: a, operator: In, values: [b, c]}"
TOO_MUCH = {
    "ports of a rule": ("ingress: [{ports: [{port: 1}, {port: 2}]}]", 3),
    "ports of several": ("ingress: [{ports: [{port: 1}]}, {ports: [{port: 2}]}]", 4),
    "peers and ports": (
        "ingress: [{from: [{podSelector: {}}], ports: [{port: 1}]}], egress: [{ports: [{}]}]",
        5,
    ),
    "exceptions": (
        "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 10.2.0.0/16]}}]}]",
        4,
    ),
    "rules that say nothing": ("ingress: [{}, {}], egress: [{}]", 3),
    "labels of peers": ("ingress: [{from: [{podSelector: {matchLabels: {a: b, c: d}}}]}]", 4),
    "labels of their namespaces": (
        f"egress: [{{to: [{{namespaceSelector: {{matchExpressions: [{IN_A}]}}}}]}}]",
        5,
    ),
    "labels of the policy": (f"podSelector: {{matchExpressions: [{IN_A}, {IN_A}]}}", 6),
}


@pytest.mark.parametrize(("spec", "size"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_policy_that_says_too_much_is_refused_whole(spec: str, size: int) -> None:
    assert found(read(policy(spec), limit=size)) == []
    reading = read(policy(spec), limit=size - 1)
    assert found(reading) == [("too-many-ranges", "spec")]
    assert [one.ingress for one in reading.policies] == [()]


def test_of_a_policy_that_says_too_much_nothing_is_made() -> None:
    reading = read(policy("ingress: [{ports: [{port: 0}]}, {}, {x: y}], egress: [[]]"), limit=3)
    assert found(reading) == [("too-many-ranges", "spec")]
    (made,) = reading.policies
    assert (made.selector, made.ingress, made.egress) == (Selector(), (), ())


def test_a_policy_that_says_too_much_still_closes_whom_it_selects() -> None:
    (made,) = read(policy(f"podSelector: {A_WEB}, ingress: [{{}}, {{}}]"), limit=2).policies
    assert (made.namespace, made.selector, made.ingress, made.egress) == ("shop", WEB, (), None)


def test_a_policy_that_selects_by_too_many_labels_selects_everybody() -> None:
    (made,) = read(policy(f"podSelector: {{matchExpressions: [{IN_A}]}}"), limit=2).policies
    assert (made.selector, made.broken) == (Selector(), True)


@pytest.mark.parametrize(
    "spec",
    [
        "ingress: {a: b}, egress: x",
        "ingress: [1, [], {from: {}, ports: 5}, {from: [1, {ipBlock: [], podSelector: []}]}]",
        "egress: [{to: [{ipBlock: {except: 1}, namespaceSelector: {matchLabels: [a, b]}}]}]",
        "podSelector: {matchLabels: 1, matchExpressions: [1, {values: {}}, {values: 7}]}",
    ],
)
def test_what_is_of_another_type_is_counted_as_far_as_it_can_be(spec: str) -> None:
    assert "too-many-ranges" not in dict(found(read(policy(spec))))
    assert broken(policy(spec)).selector == Selector()


# -------------------------------------------------------------------------------- what it is at all


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"apiVersion": "networking.k8s.io/v2"}, [("api-version", "apiVersion")]),
        ({"apiVersion": "networking.k8s.io"}, [("api-version", "apiVersion")]),
        ({"apiVersion": "extensions/v1beta1"}, [("api-version", "apiVersion")]),
        ({"apiVersion": "v1"}, [("api-version", "apiVersion")]),
        ({"apiVersion": 1}, [("api-version", "apiVersion")]),
        ({"apiVersion": None}, [("missing", "apiVersion")]),
        ({"kind": "networkpolicy"}, [("unknown-kind", "kind")]),
        ({"Spec": {}}, [("unknown-key", "Spec")]),
    ],
)
def test_a_policy_of_a_kind_that_we_do_not_know_closes(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    document = {**policy("podSelector: {matchLabels: {app: web}}, ingress: [{}]"), **changes}
    assert found(read(document)) == expected
    made = broken(document)
    assert (made.selector, made.ingress, made.egress) == (WEB, (), ())


@pytest.mark.parametrize("api", ["crd.projectcalico.org/v1", "crd.antrea.io/v1beta1"])
def test_a_policy_of_a_network_plugin_is_skipped(api: str) -> None:
    reading = read({**policy("podSelector: {}"), "apiVersion": api})
    assert (reading.policies, reading.problems, reading.count) == ((), (), 0)
    [line] = map(str, reading.skipped)
    assert line == f"NetworkPolicy/ftp of apiVersion {api} is not read by this version"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"name": "a\nb", "namespace": "shop"}, ("shop", "unnamed")),
        ({"name": 5, "namespace": "shop"}, ("shop", "unnamed")),
        ({"generateName": "a-"}, ("default", "unnamed")),
        ({"name": "a", "namespace": None}, ("default", "a")),
    ],
)
def test_a_policy_with_a_bad_name_closes(metadata: object, named: tuple[str, str]) -> None:
    made = broken({**policy("ingress: [{}]"), "metadata": metadata})
    assert (made.namespace, made.name) == named


@pytest.mark.parametrize("metadata", [{"namespace": 5}, {"namespace": "A"}, {"namespace": ""}, []])
def test_a_policy_of_nobody_knows_which_namespace_is_none(metadata: object) -> None:
    reading = read({**policy("ingress: [{}]"), "metadata": metadata})
    assert (len(reading.problems), reading.policies, reading.count) == (1, (), 1)


def test_a_policy_without_a_name_is_called_unnamed() -> None:
    document = {**policy("ingress: [{}]"), "metadata": None}
    assert str(only(document)) == "NetworkPolicy/default/unnamed"


@pytest.mark.parametrize("kind", ["List", "NetworkPolicyList", "NamespaceList"])
def test_a_list_is_taken_apart_and_its_bad_policies_are_kept(kind: str) -> None:
    items = [policy(""), {"kind": "Other"}, policy("ingress: 5"), namespace("{name: a}")]
    reading = read({"kind": kind, "items": items})
    assert [one.broken for one in reading.policies] == [False, True]
    assert reading.policy_places == (("items", 0), ("items", 2))
    assert reading.namespace_places == (("items", 3),)
    assert found(reading) == [("not-a-list", "items[2].spec.ingress")]
    assert (reading.count, len(reading.skipped)) == (3, 1)


# ------------------------------------------------------------------------------ namespaces and pods


def namespace(metadata: str) -> Any:
    return parse(f"{{apiVersion: v1, kind: Namespace, metadata: {metadata}}}")


NAMESPACES: dict[str, tuple[str, Namespace | None, list[tuple[str, str]]]] = {
    "labels": (
        "{name: shop, labels: {b: x, a: ''}}",
        Namespace(name="shop", labels=(("a", ""), ("b", "x"))),
        [],
    ),
    "no labels": ("{name: shop, labels: null}", Namespace(name="shop"), []),
    "labels that cannot be read": (
        "{name: shop, labels: {a: 5, b: x}}",
        Namespace(name="shop", labels=None),
        [("not-a-string", "metadata.labels.a")],
    ),
    "no mapping of labels": (
        "{name: shop, labels: [a]}",
        Namespace(name="shop", labels=None),
        [("not-a-mapping", "metadata.labels")],
    ),
    "no name": ("{labels: {a: x}}", None, [("missing", "metadata.name")]),
    "no name that can be one": ("{name: A}", None, [("bad-name", "metadata.name")]),
    "no metadata": ("null", None, [("missing", "metadata.name")]),
}


@pytest.mark.parametrize(("metadata", "made", "expected"), NAMESPACES.values(), ids=NAMESPACES)
def test_namespaces_are_read(
    metadata: str, made: Namespace | None, expected: list[tuple[str, str]]
) -> None:
    reading = read(namespace(metadata))
    assert found(reading) == expected
    assert reading.namespaces == ((made,) if made else ())
    assert reading.namespace_places == (((),) if made else ())
    assert reading.count == 1
    if made:
        assert str(made) == "Namespace/shop"


def test_what_only_has_the_name_of_a_namespace_is_skipped() -> None:
    reading = read({"apiVersion": "example.org/v1", "kind": "Namespace"})
    assert (reading.count, len(reading.skipped)) == (0, 1)


PODS: dict[str, tuple[str, str, list[str]]] = {
    "none": ("{}", "null", []),
    "one": ("{}", "{podIP: 10.1.0.7}", ["10.1.0.7"]),
    "one of each family": (
        "{}",
        "{podIP: 10.1.0.7, podIPs: [{ip: 10.1.0.7}, {ip: 'fd00::7'}]}",
        ["10.1.0.7", "fd00::7"],
    ),
    "what is odd": (
        "{}",
        "{podIP: 5, podIPs: [{ip: x}, {ip: 127.0.0.1}, {ip: 'fe80::1'}, 5, {}, {ip: 10.0.0.1}]}",
        ["10.0.0.1"],
    ),
    "what is no list": ("{}", "{podIPs: 10.1.0.7}", []),
    "the host's": ("{hostNetwork: true}", "{podIP: 10.1.0.7}", []),
    "its own": ("{hostNetwork: false}", "{podIP: 10.1.0.7}", ["10.1.0.7"]),
    "of one that runs": ("{}", "{phase: Running, podIP: 10.1.0.7}", ["10.1.0.7"]),
    "of one that has ended": ("{}", "{phase: Succeeded, podIP: 10.1.0.7}", []),
    "of one that has failed": ("{}", "{phase: Failed, podIP: 10.1.0.7}", []),
}


@pytest.mark.parametrize(("spec", "status", "expected"), PODS.values(), ids=PODS)
def test_the_addresses_of_pods(spec: str, status: str, expected: list[str]) -> None:
    of = "apiVersion: v1, kind: Pod, metadata: {name: a, labels: {b: x, a: 'yes'}}"
    [made] = read(parse(f"{{{of}, spec: {spec}, status: {status}}}")).pods
    assert made.addresses == tuple(map(ip_address, expected))
    assert made.labels == (("a", "yes"), ("b", "x"))


def test_a_pod_with_labels_that_cannot_be_read_is_nobody() -> None:
    text = "{apiVersion: v1, kind: Pod, metadata: {labels: {a: 5}}, spec: {}}"
    reading = read(parse(text))
    assert found(reading) == [("not-a-string", "metadata.labels.a")]
    assert reading.pods == ()
