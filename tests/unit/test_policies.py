"""What policies leave of the world for one machine: the three user stories of document 001
(KEP-2079, endPort), and tables of peers, ports and what they become."""

from __future__ import annotations

import time
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from agent.sources import yaml_text
from rules.fences import Laws, fenced
from rules.manifests import read
from rules.model import Family, Fence, Grant, Machine, Members, Peers, Protocol
from rules.policies import (
    Direction,
    IpBlock,
    Namespace,
    NetworkPolicy,
    Operator,
    Party,
    PolicyRule,
    Requirement,
    Selector,
)
from rules.services import Pod, PodPort
from rules.values import replace
from tests.unit.samples import machine, ports

INGRESS, EGRESS = Direction
TCP, UDP, SCTP = Protocol
Labels = tuple[tuple[str, str], ...]

POLICY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: %s, namespace: shop}
spec: {%s}
"""


def policy(spec: str, name: str = "p") -> NetworkPolicy:
    [(document, _)], _ = yaml_text.parse(POLICY % (name, spec))
    reading = read(document)
    assert [str(problem) for problem in reading.problems] == []
    [made] = reading.policies
    return made


def vm(labels: Labels = (("app", "ftp"),), *names: tuple[str, Protocol, int]) -> Machine:
    return replace(machine(), namespace="shop", labels=labels, names=names)


def pod(
    at: str = "", namespace: str = "shop", *names: tuple[str, Protocol, int], **labels: str
) -> Pod:
    """A pod at these addresses, with ports of these names."""
    return Pod(
        namespace=namespace,
        name="pod",
        labels=tuple(sorted(labels.items())),
        addresses=tuple(map(ip_address, at.split())),
        ports=tuple(
            PodPort(container="", name=name, protocol=protocol, ports=ports(str(number)))
            for name, protocol, number in names
        ),
    )


def told(fence: Fence, family: Family = Family.IP) -> list[str]:
    """The grants of one family, as `tcp 80-90 with 10.0.0.0/8 by a,b`."""
    sets = dict(fence.sets)
    return sorted(shown(grant, sets) for grant in fence.grants if grant.family is family)


def shown(grant: Grant, sets: dict[Peers, Members]) -> str:
    spoken = grant.protocol.value if grant.protocol else "any"
    whom = "everybody"
    if grant.peers is not None:
        assert grant.peers.family is grant.family
        whom = " ".join(sorted(map(str, sets[grant.peers]))) or "nobody"
    names = ",".join(name.rpartition("/")[2] for name in grant.policies.split(","))
    return f"{spoken} {grant.ports or 'all'} with {whom} by {names}"


def fences(
    *policies: NetworkPolicy,
    pods: tuple[Pod, ...] = (),
    namespaces: tuple[Namespace, ...] = (),
    of: Machine | None = None,
    all_labels: bool = True,
) -> dict[Direction, Fence | None]:
    laws = Laws(policies=policies, pods=pods, namespaces=namespaces, all_labels=all_labels)
    [found] = fenced([of or vm()], laws, {})
    return {INGRESS: found.hears, EGRESS: found.says}


def isolated(*policies: NetworkPolicy, direction: Direction = INGRESS, **known: Any) -> Fence:
    found = fences(*policies, **known)[direction]
    assert found
    return found


# ----------------------------------------------------------------- document 001: three user stories


def test_story_1_egress_to_the_node_ports_of_another_cluster() -> None:
    spec = "policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: "
    found = isolated(policy(spec + "[{port: 30000, endPort: 32767}]}]"), direction=EGRESS)
    assert told(found) == ["tcp 30000-32767 with 198.51.100.0/24 by p"]
    assert told(found, Family.IP6) == []


def test_story_2_everything_but_two_insecure_ports() -> None:
    spans = ((1, 110), (112, 444), (446, 65535))
    ranges = [f"{{port: {first}, endPort: {last}}}" for first, last in spans]
    found = isolated(policy(f"egress: [{{ports: [{', '.join(ranges)}]}}]"), direction=EGRESS)
    for family in Family:
        assert told(found, family) == [
            f"tcp {first}-{last} with everybody by p" for first, last in spans
        ]


def test_story_3_passive_ftp_and_nothing_else() -> None:
    deny = policy("podSelector: {}", "default-deny")
    ftp = policy(
        "podSelector: {matchLabels: {app: ftp}},"
        " ingress: [{ports: [{port: 21}, {port: 49152, endPort: 65535}]}]",
        "ftp",
    )
    found = isolated(deny, ftp)
    assert found.policies == "NetworkPolicy/shop/default-deny,NetworkPolicy/shop/ftp"
    for family in Family:
        assert told(found, family) == [
            "tcp 21 with everybody by ftp",
            "tcp 49152-65535 with everybody by ftp",
        ]
    assert isolated(deny, ftp, of=vm(())).grants == ()  # another machine stays shut
    assert fences(deny, ftp)[EGRESS] is None


# ---------------------------------------------------------------------------------- who is isolated


@pytest.mark.parametrize(
    ("spec", "ingress", "egress"),
    [
        ("", True, False),
        ("podSelector: {matchLabels: {app: ftp}}", True, False),
        ("podSelector: {matchLabels: {app: web}}", False, False),
        ("policyTypes: [Egress]", False, True),
        ("policyTypes: [Ingress, Egress]", True, True),
        ("egress: [{}]", True, True),
    ],
)
def test_selecting_isolates(spec: str, ingress: bool, egress: bool) -> None:
    found = fences(policy(spec))
    assert (found[INGRESS] is not None) is ingress
    assert (found[EGRESS] is not None) is egress
    elsewhere = fences(policy(spec), of=replace(vm(), namespace="bank"))
    assert set(elsewhere.values()) == {None}


def test_a_policy_that_is_shut_speaks_of_the_same_directions() -> None:
    shut = policy("ingress: [{}]").shut()
    assert (shut.ingress, shut.egress, shut.broken) == ((), None, True)
    shut = policy("policyTypes: [Egress], egress: [{}]").shut()
    assert (shut.ingress, shut.egress, shut.broken) == (None, (), True)


LABELS: Labels = (("app", "web"), ("tier", ""))

REQUIREMENTS = [
    (Requirement("app", Operator.IN, ("db", "web")), True),
    (Requirement("app", Operator.IN, ("db",)), False),
    (Requirement("zone", Operator.IN, ("web",)), False),
    (Requirement("tier", Operator.IN, ("",)), True),
    (Requirement("app", Operator.NOT_IN, ("db",)), True),
    (Requirement("app", Operator.NOT_IN, ("db", "web")), False),
    (Requirement("zone", Operator.NOT_IN, ("db",)), True),
    (Requirement("tier", Operator.EXISTS), True),
    (Requirement("zone", Operator.EXISTS), False),
    (Requirement("zone", Operator.DOES_NOT_EXIST), True),
    (Requirement("tier", Operator.DOES_NOT_EXIST), False),
]


@pytest.mark.parametrize(("requirement", "holds"), REQUIREMENTS, ids=map(str, REQUIREMENTS))
def test_labels_are_compared(requirement: Requirement, holds: bool) -> None:
    assert Selector((requirement,)).matches(LABELS) is holds
    always = Requirement("app", Operator.EXISTS)
    never = Requirement("app", Operator.DOES_NOT_EXIST)
    assert Selector((always, requirement)).matches(LABELS) is holds
    assert not Selector((requirement, never)).matches(LABELS)


def test_a_selector_that_requires_nothing_matches_everybody() -> None:
    assert Selector().matches(())


# -------------------------------------------------------------------------------------------- peers

EVERYBODY = (
    pod("10.0.0.1 fd00::1", app="web"),
    pod("10.0.0.2", app="db"),
    pod("10.0.0.3"),
    pod("", app="web"),
    pod("10.1.0.1", "bank", app="web"),
    pod("10.1.0.2", "bank", app="db"),
    pod("10.2.0.1", "farm", app="web"),
)
KNOWN = (
    Namespace(name="bank", labels=(("team", "cash"),)),
    Namespace(name="shop", labels=(("team", "sales"),)),
)

PEERS = {
    "pods of the namespace": (
        "{podSelector: {matchLabels: {app: web}}}",
        ["10.0.0.1/32", "fd00::1/128"],
    ),
    "all of the namespace": (
        "{podSelector: {}}",
        ["10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32", "fd00::1/128"],
    ),
    "namespaces by a label": (
        "{namespaceSelector: {matchLabels: {team: cash}}}",
        ["10.1.0.1/32", "10.1.0.2/32"],
    ),
    "namespaces by their name": (
        "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: farm}}}",
        ["10.2.0.1/32"],
    ),
    "namespaces without a label, also those of which no object is known": (
        "{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [sales]}]}}",
        ["10.1.0.1/32", "10.1.0.2/32", "10.2.0.1/32"],
    ),
    "pods of namespaces": (
        "{namespaceSelector: {}, podSelector: {matchLabels: {app: db}}}",
        ["10.0.0.2/32", "10.1.0.2/32"],
    ),
    "pods, or namespaces": (
        "{podSelector: {matchLabels: {app: db}}}, {namespaceSelector: {matchLabels: {team: cash}}}",
        ["10.0.0.2/32", "10.1.0.1/32", "10.1.0.2/32"],
    ),
    "nobody": ("{podSelector: {matchLabels: {app: mail}}}", []),
    "addresses": ("{ipBlock: {cidr: 10.0.0.0/8}}", ["10.0.0.0/8"]),
    "addresses but for some": (
        "{ipBlock: {cidr: 10.0.0.0/30, except: [10.0.0.1/32]}}",
        ["10.0.0.0/32", "10.0.0.2/31"],
    ),
    "addresses but for those at both ends": (
        "{ipBlock: {cidr: 10.0.0.0/29, except: [10.0.0.0/31, 10.0.0.6/31, 10.0.0.7/32]}}",
        ["10.0.0.2/31", "10.0.0.4/31"],
    ),
    "no addresses, as all are excepted in parts": (
        "{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/9, 10.128.0.0/9]}}",
        [],
    ),
    "addresses in a network and beside it": (
        "{ipBlock: {cidr: 10.0.0.0/31}}, {podSelector: {}}",
        ["10.0.0.0/31", "10.0.0.2/32", "10.0.0.3/32", "fd00::1/128"],
    ),
    "what one excepts and another does not": (
        "{ipBlock: {cidr: 10.0.0.0/30, except: [10.0.0.1/32]}}, {podSelector: {}}",
        ["10.0.0.0/32", "10.0.0.1/32", "10.0.0.2/31", "fd00::1/128"],
    ),
    "all that there are of a family": ("{ipBlock: {cidr: 0.0.0.0/0}}", ["everybody"]),
    "all in halves": (
        "{ipBlock: {cidr: '::/1'}}, {ipBlock: {cidr: '8000::/1'}}",
        ["everybody"],
    ),
}


@pytest.mark.parametrize(("written", "expected"), PEERS.values(), ids=PEERS)
@pytest.mark.parametrize(("direction", "key"), [(INGRESS, "from"), (EGRESS, "to")])
def test_peers_become_networks(
    written: str, expected: list[str], direction: Direction, key: str
) -> None:
    made = policy(f"{direction.value}: [{{{key}: [{written}]}}]")
    found = isolated(made, direction=direction, pods=EVERYBODY, namespaces=KNOWN)
    assert {(one.protocol, one.ports) for one in found.grants} <= {(None, None)}
    texts = [line.split(" with ")[1].split(" by ")[0] for f in Family for line in told(found, f)]
    assert [word for text in texts for word in text.split() if word != "nobody"] == expected


def test_the_same_words_mean_others_in_another_namespace() -> None:
    made = policy("ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]")
    both = made, replace(made, namespace="bank")
    for namespace, address in (("shop", "10.0.0.1/32"), ("bank", "10.1.0.1/32")):
        of = replace(vm(), namespace=namespace)
        found = isolated(*both, pods=EVERYBODY, namespaces=KNOWN, of=of)
        assert told(found) == [f"any all with {address} by p"]


@pytest.mark.parametrize(
    ("written", "opens"),
    [
        ("{}", True),
        ("{matchLabels: {kubernetes.io/metadata.name: bank}}", True),
        ("{matchLabels: {kubernetes.io/metadata.name: shop}}", False),
        ("{matchLabels: {team: cash}}", False),
        ("{matchExpressions: [{key: team, operator: DoesNotExist}]}", False),
        ("{matchExpressions: [{key: team, operator: NotIn, values: [sales]}]}", False),
    ],
)
@pytest.mark.parametrize(
    "known",
    [
        (Namespace(name="bank", labels=None),),
        (Namespace(name="bank"), Namespace(name="bank", labels=(("team", "cash"),))),
        (Namespace(name="bank", labels=None), Namespace(name="bank")),
        (Namespace(name="bank"), Namespace(name="bank", labels=None), Namespace(name="bank")),
    ],
    ids=["unread", "two that differ", "one unread", "the second unread"],
)
def test_labels_that_are_not_known_open_nothing(
    written: str, opens: bool, known: tuple[Namespace, ...]
) -> None:
    made = policy(f"ingress: [{{from: [{{namespaceSelector: {written}}}]}}]")
    found = isolated(made, pods=(pod("10.1.0.1", "bank"),), namespaces=known)
    assert told(found) == [f"any all with {'10.1.0.1/32' if opens else 'nobody'} by p"]
    listing = isolated(made, pods=(pod("10.1.0.1", "bank"),), all_labels=False)
    assert told(listing) == told(found)


def test_a_label_cannot_give_a_namespace_the_name_of_another() -> None:
    forged = Namespace(name="bank", labels=(("kubernetes.io/metadata.name", "shop"),))
    named = "matchLabels: {kubernetes.io/metadata.name: shop}"
    made = policy(f"ingress: [{{from: [{{namespaceSelector: {{{named}}}}}]}}]")
    found = isolated(made, pods=(pod("10.1.0.1", "bank"),), namespaces=(forged,))
    assert told(found) == ["any all with nobody by p"]


# -------------------------------------------------------------------------------------------- ports

PORTS = {
    "everything": ("", ["any all"]),
    "all of two protocols": ("{}, {protocol: UDP}", ["tcp all", "udp all"]),
    "ranges that touch": ("{port: 80, endPort: 89}, {port: 90}", ["tcp 80-90"]),
    "ranges that overlap": (
        "{port: 80, endPort: 95}, {port: 90, endPort: 99}, {port: 85}",
        ["tcp 80-99"],
    ),
    "ranges that do not": ("{port: 80}, {port: 82, endPort: 83}", ["tcp 80", "tcp 82-83"]),
    "ranges of two protocols": (
        "{port: 80, protocol: SCTP}, {port: 81, protocol: UDP}",
        ["sctp 80", "udp 81"],
    ),
    "a range in all of a protocol": ("{port: 80}, {}", ["tcp all"]),
    "all ports are not all of a protocol": ("{port: 1, endPort: 65535}", ["tcp 1-65535"]),
    "all protocols are not everything": (
        "{}, {protocol: UDP}, {protocol: SCTP}",
        ["sctp all", "tcp all", "udp all"],
    ),
    "a name": ("{port: web}", ["tcp 8080"]),
    "a name beside a neighbour": ("{port: web}, {port: 8081}", ["tcp 8080-8081"]),
    "a name of another protocol": ("{port: web, protocol: UDP}", []),
    "a name that nobody has": ("{port: mail}", []),
    "a name that nobody has, and a number": ("{port: mail}, {port: 25}", ["tcp 25"]),
}


@pytest.mark.parametrize(("written", "expected"), PORTS.values(), ids=PORTS)
def test_ports_become_ranges(written: str, expected: list[str]) -> None:
    made = policy(f"ingress: [{{from: [{{ipBlock: {{cidr: 10.0.0.0/8}}}}], ports: [{written}]}}]")
    found = isolated(made, of=vm((), ("web", TCP, 8080), ("dns", UDP, 53)))
    assert told(found) == [f"{one} with 10.0.0.0/8 by p" for one in expected]


def test_a_name_is_looked_up_at_each_machine() -> None:
    named = policy("ingress: [{ports: [{port: web}]}]")
    for number in (80, 8080):
        found = isolated(named, of=vm((), ("web", TCP, number)))
        assert told(found) == [f"tcp {number} with everybody by p"]
    assert isolated(named, of=vm(())).grants == ()


NAMED = (
    pod("10.0.0.1 fd00::1", "shop", ("web", TCP, 80), app="web"),
    pod("10.0.0.2", "shop", ("web", TCP, 8080), ("web", UDP, 81), app="web"),
    pod("10.0.0.3", "shop", ("web", TCP, 80)),
    pod("10.0.0.4", "shop", app="web"),
    pod("10.1.0.1", "bank", ("web", TCP, 80), ("web", TCP, 99), app="web"),
)

NAMES = {
    "of pods": (
        "to: [{podSelector: {matchLabels: {app: web}}}]",
        [
            "tcp 80 with 10.0.0.1/32 by p",
            "tcp 8080 with 10.0.0.2/32 by p",
            "tcp 80 with fd00::1/128 by p",
        ],
    ),
    "of addresses": (
        "to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.1/32]}}]",
        ["tcp 80 with 10.0.0.3/32 10.1.0.1/32 by p", "tcp 8080 with 10.0.0.2/32 by p"],
    ),
    "of everybody": (
        "",
        [
            "tcp 80 with 10.0.0.1/32 10.0.0.3/32 10.1.0.1/32 by p",
            "tcp 8080 with 10.0.0.2/32 by p",
            "tcp 80 with fd00::1/128 by p",
        ],
    ),
}


@pytest.mark.parametrize(("written", "expected"), NAMES.values(), ids=NAMES)
def test_a_name_in_egress_is_looked_up_at_each_peer(written: str, expected: list[str]) -> None:
    rule = f"{written}, ports: [{{port: web}}]".removeprefix(", ")
    found = isolated(
        policy(f"egress: [{{{rule}}}]"),
        direction=EGRESS,
        pods=NAMED,
        of=vm((("app", "ftp"),), ("web", TCP, 7777)),
    )
    lines = [line for family in Family for line in told(found, family)]
    assert [line for line in lines if "nobody" not in line] == expected


# --------------------------------------------------------------------------------- several policies

A = "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [%s]}]"
B = "ingress: [{from: [{ipBlock: {cidr: %s}}], ports: [%s]}]"

SEVERAL = {
    "ranges of one set of peers are joined": (
        [A % "{port: 1, endPort: 5}", A % "{port: 6, endPort: 9}", A % "{port: 11}"],
        ["tcp 1-9 with 10.0.0.0/8 by a,b", "tcp 11 with 10.0.0.0/8 by c"],
    ),
    "those of different peers stay apart": (
        [A % "{port: 1, endPort: 5}", B % ("192.0.2.0/24", "{port: 1, endPort: 5}")],
        ["tcp 1-5 with 10.0.0.0/8 by a", "tcp 1-5 with 192.0.2.0/24 by b"],
    ),
    "what others allow only some of stays whole": (
        [A % "{port: 1, endPort: 5}", B % ("10.1.0.0/16", "{port: 2, endPort: 6}")],
        ["tcp 1-5 with 10.0.0.0/8 by a", "tcp 2-6 with 10.1.0.0/16 by b"],
    ),
    "another protocol is something else": (
        [A % "{port: 1}", B % ("10.1.0.0/16", "{port: 1, protocol: UDP}")],
        ["tcp 1 with 10.0.0.0/8 by a", "udp 1 with 10.1.0.0/16 by b"],
    ),
    "nothing takes nothing away": (
        [A % "{port: 1}", "ingress: []"],
        ["tcp 1 with 10.0.0.0/8 by a"],
    ),
}


@pytest.mark.parametrize(("specs", "expected"), SEVERAL.values(), ids=SEVERAL)
def test_policies_add_up(specs: list[str], expected: list[str]) -> None:
    made = [policy(spec, name) for spec, name in zip(specs, "abc", strict=False)]
    assert told(isolated(*made)) == expected
    assert told(isolated(*reversed(made))) == expected


# ------------------------------------------------------------------------------------------- values


def test_a_pod_is_known_by_its_labels_addresses_and_names() -> None:
    announced = (
        PodPort(container="c", name="rtp", protocol=UDP, ports=ports("5000-5010"), ranged=True),
        PodPort(container="c", name="", protocol=TCP, ports=ports("80")),
    )
    assert Party.of_pod(replace(pod("10.0.0.1", app="web"), ports=announced)) == Party(
        namespace="shop",
        labels=(("app", "web"),),
        addresses=(ip_address("10.0.0.1"),),
        names=(("rtp", UDP, 5000),),
    )


def test_a_machine_is_known_where_it_is_found_or_else_said_to_be() -> None:
    one = replace(vm((("app", "ftp"),), ("web", TCP, 80)), addresses=(ip_address("10.0.0.1"),))
    assert Party.of_machine(one) == Party(
        namespace="shop",
        labels=(("app", "ftp"),),
        addresses=(ip_address("10.0.0.1"),),
        names=(("web", TCP, 80),),
    )
    found = Party.of_machine(one, (ip_address("10.0.0.9"),))
    assert found.addresses == (ip_address("10.0.0.9"),)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Requirement, {"key": "a", "operator": Operator.IN}),
        (Requirement, {"key": "a", "operator": Operator.EXISTS, "values": ("x",)}),
        (IpBlock, {"network": ip_network("10.0.0.0/8"), "excepted": (ip_network("10.0.0.0/8"),)}),
        (PolicyRule, {"peers": ()}),
        (PolicyRule, {"ports": ()}),
        (
            NetworkPolicy,
            {
                "namespace": "a",
                "name": "a",
                "selector": Selector(),
                "ingress": (PolicyRule(),),
                "egress": None,
                "broken": True,
            },
        ),
    ],
)
def test_a_value_that_would_mean_something_else_cannot_be_made(
    kind: Any, values: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        kind(**values)


# -------------------------------------------------------------------------------- how long it takes


def test_thousands_of_peers_and_ranges_take_no_longer_than_they_should() -> None:
    """What a tenant can write must not hold up a node: minutes, where this is quadratic."""
    written = [f"{{port: {port}}}" for port in range(1, 10001, 2)]
    crowd = tuple(pod(f"10.{n >> 8}.{n & 255}.1", app="web") for n in range(5000))
    begun = time.process_time()
    found = isolated(
        policy(
            f"ingress: [{{from: [{{podSelector: {{}}}}], ports: [{', '.join(written)}]}},"
            " {from: [{podSelector: {matchLabels: {app: web}}}], ports: [{protocol: UDP}]}]"
        ),
        pods=crowd,
    )
    assert len(found.grants) == 2 * 5001
    assert {len(members) for _, members in found.sets} == {0, 5000}
    assert time.process_time() - begun < 5
