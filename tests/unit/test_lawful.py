"""What is left of NetworkPolicies, Pods and Namespaces, who of them is meant, and what becomes of
that when a server answers late, in the wrong order, or not at all."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.sources import kubernetes, lawful
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.kubernetes import Cluster
from agent.sources.lawful import Lawful
from agent.sources.meaning import Meaning
from agent.sources.parties import (
    NAMESPACES,
    PODS,
    Alike,
    Choice,
    Wanted,
    Wards,
    home,
    known,
    pod,
    trimmed_namespace,
    trimmed_pod,
    wanted,
)
from agent.sources.policies import PATH as POLICIES
from agent.sources.policies import heard, trimmed, understood
from agent.sources.store import Store
from agent.sources.vmis import NODE as ON_NODE
from agent.sources.vmis import PATH as VMIS
from rules.fences import Laws, fenced
from rules.manifests import read
from rules.model import Protocol
from rules.policies import METADATA_NAME, NetworkPolicy, Operator, Peers, Requirement, Selector
from rules.services import Pod
from tests.answering import answering, refused
from tests.scripted import Script, listed
from tests.spaces import eventually
from tests.unit.samples import link, space

Json = Any
NODE = "n1"
UID = "11111111-2222-3333-4444-555555555555"
CLIENTS = {"podSelector": {"matchLabels": {"role": "client"}}}
TEAM = {"namespaceSelector": {"matchLabels": {"team": "x"}}}
NAMED = {"namespaceSelector": {"matchLabels": {METADATA_NAME: "ops"}}}
BLOCK = {"ipBlock": {"cidr": "192.0.2.0/24"}}


def policy(name: str = "web", *peers: Json, version: int = 7, **spec: Json) -> Json:
    """One that selects our machine, and lets these peers in to a range, as a watch tells of it."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "namespace": "ns",
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": str(version),
            "generation": 3,
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 1000},
            "managedFields": [{"fieldsV1": {"f:spec": {}}}],
        },
        "spec": {
            "podSelector": {"matchLabels": {"app": "phone"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": list(peers), "ports": [{"port": 80, "endPort": 89}]}],
            **spec,
        },
    }


def a_pod(
    name: str = "c-1",
    *addresses: str,
    namespace: str = "ns",
    phase: str = "Running",
    version: int = 8,
    labels: Json = None,
    **spec: Json,
) -> Json:
    texts = addresses or ("10.0.0.1",)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": str(version),
            "labels": {"role": "client"} if labels is None else labels,
            "annotations": {"portrange.alpha.kubernetes.io/port-end-x": "nonsense"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "c"}],
        },
        "spec": {
            "nodeName": "n7",
            "containers": [{"name": "c", "image": "i", "env": [{"name": "A", "value": "B"}]}],
            "volumes": [{"ephemeral": {"volumeClaimTemplate": {"metadata": {}, "spec": {}}}}],
            **spec,
        },
        "status": {
            "phase": phase,
            "podIP": texts[0],
            "podIPs": [{"ip": text} for text in texts],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def namespace(name: str, version: int = 9, **labels: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": str(version),
            "labels": {METADATA_NAME: name, **labels},
            "annotations": {"x": "y"},
        },
        "spec": {"finalizers": ["kubernetes"]},
        "status": {"phase": "Active"},
    }


def machine(name: str = "vm", space: str = "ns", **labels: str) -> Json:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "namespace": space,
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": "5",
            "labels": {ON_NODE: NODE, **(labels or {"app": "phone"})},
            "annotations": {"portranger.io/port-ranges": "80-100"},
        },
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {"phase": "Running", "nodeName": NODE, "activePods": {UID: NODE}},
    }


def told(thing: Json) -> Pod | None:
    return pod(trimmed_pod(thing, Alike()))


def there(thing: Json) -> Pod:
    found = told(thing)
    assert found
    return found


def meant(thing: Json) -> NetworkPolicy:
    [found] = read(trimmed(thing)).policies
    return found


# ------------------------------------------------------------------------------ what is left


def test_of_a_policy_what_it_says_is_left() -> None:
    whole = policy("web", CLIENTS)
    identity = {"namespace": "ns", "name": "web", "uid": "u-web", "resourceVersion": "7"}
    for one in (whole, listed(whole)):
        assert trimmed(one) == {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": identity,
            "spec": whole["spec"],
        }
    found = heard(trimmed(whole))
    again = heard(trimmed(listed(policy("web", CLIENTS, version=8))))
    assert found
    assert again
    assert found.content == again.content
    assert again.reference.resource_version == "8"
    assert (found.reference.api_version, found.reference.kind) == (
        "networking.k8s.io/v1",
        "NetworkPolicy",
    )
    changed = heard(trimmed(policy("web", BLOCK)))
    assert changed
    assert changed.content != found.content
    said, problems = understood(found)
    assert (str(said), said.origin) == ("NetworkPolicy/ns/web", "NetworkPolicy/ns/web:0")
    assert problems == ()
    assert not said.broken


@pytest.mark.parametrize(
    ("spec", "directions"),
    [
        ({"ingress": [{"ports": [{"port": 9, "endPort": 8}]}]}, (True, False)),
        ({"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}]}, (True, False)),
        ({"policyTypes": ["Sideways"]}, (True, True)),
        ({"later": {}}, (True, False)),
        ({"ingress": [{"ports": [{"port": n} for n in range(1, 4098)]}]}, (True, False)),
    ],
)
def test_what_cannot_be_understood_selects_and_allows_nothing(
    spec: Json, directions: tuple[bool, bool]
) -> None:
    found = heard(trimmed(policy("web", **spec)))
    assert found
    said, problems = understood(found)
    assert said.broken
    assert {one.file for one in problems} == {"NetworkPolicy/ns/web"}
    assert (said.ingress, said.egress) == tuple(() if one else None for one in directions)
    assert said.selector == Selector((Requirement("app", Operator.IN, ("phone",)),))


def test_a_policy_without_a_specification_shuts_everybody() -> None:
    whole = policy()
    del whole["spec"]
    found = heard(trimmed(whole))
    assert found
    said, problems = understood(found)
    assert problems
    assert (said.selector, said.ingress, said.egress) == (Selector(), (), ())


def test_of_a_pod_who_it_is_is_left() -> None:
    ports = [
        {"name": "web", "containerPort": 8080},
        {"containerPort": 9},
        {"name": "dns", "containerPort": 53, "protocol": "UDP", "hostPort": 53},
        {"name": "odd", "containerPort": 70000},
        {"name": "odd", "containerPort": "80"},
        {"name": "odd", "containerPort": 80, "protocol": "QUIC"},
    ]
    whole = a_pod(
        "c-1",
        *("10.0.0.1", "fd00::1"),
        containers=[{"name": "c", "ports": ports}, {"name": "bare"}],
        initContainers=[{"ports": [{"name": "first", "containerPort": 1}]}],
    )
    for one in (whole, listed(whole)):
        left = trimmed_pod(one, Alike())
        assert left.keys() == {"metadata", "pod"}
        assert left["metadata"] == {"namespace": "ns", "name": "c-1", "resourceVersion": "8"}
        found = there(one)
        assert str(found) == "Pod/ns/c-1"
        assert found.labels == (("role", "client"),)
        assert found.addresses == (ip_address("10.0.0.1"), ip_address("fd00::1"))
        assert [(port.name, port.protocol, port.ports.first) for port in found.ports] == [
            ("web", Protocol.TCP, 8080),
            ("dns", Protocol.UDP, 53),
            ("first", Protocol.TCP, 1),
        ]


def test_it_is_who_a_manifest_says_it_is() -> None:
    """As the reader of manifests has it, but for what is nobody's but the node's."""
    whole = a_pod("c-1", "10.0.0.1", "fd00::1")
    whole["metadata"]["annotations"] = {}
    [read_so] = read(whole).pods
    assert there(whole) == read_so


@pytest.mark.parametrize(
    "other",
    [
        a_pod(phase="Succeeded"),
        a_pod(phase="Failed"),
        a_pod(hostNetwork=True),
        a_pod("c-1", "127.0.0.1"),
        a_pod("c-1", "169.254.1.1", "fe80::1"),
        a_pod("c-1", "nonsense"),
        {**a_pod(), "status": {"phase": "Pending"}},
        {**a_pod(), "status": {"podIPs": None, "podIP": None}},
        {**a_pod(), "status": "text", "spec": "text"},
    ],
)
def test_who_has_no_address_of_his_own_is_left_out(other: Json) -> None:
    left = trimmed_pod(other, Alike())
    assert pod(left) is None
    assert left["metadata"] == {"namespace": "ns", "name": "c-1", "resourceVersion": "8"}


def test_one_address_is_enough_where_the_server_tells_no_more() -> None:
    whole = a_pod()
    del whole["status"]["podIPs"]
    assert there(whole).addresses == (ip_address("10.0.0.1"),)


def test_what_is_equal_is_there_once() -> None:
    alike = Alike()
    one, other = (pod(trimmed_pod(a_pod(name), alike)) for name in ("a", "b"))
    assert one
    assert other
    assert one.labels is other.labels
    assert one.ports is other.ports
    assert alike.one("7") == "7"


def relabelled(turn: int, labels: int) -> Json:
    whole = a_pod()
    whole["metadata"]["labels"] = {f"{turn}.{n}/{'b' * 60}": "c" * 60 for n in range(labels)}
    return whole


@pytest.mark.parametrize(("labels", "times"), [(1, 40_000), (10, 10_000), (4000, 20)])
def test_what_no_pod_has_any_more_does_not_pile_up(labels: int, times: int) -> None:
    alike = Alike()
    tracemalloc.start()
    try:
        for turn in range(times):
            trimmed_pod(relabelled(turn, labels), alike)
        assert tracemalloc.get_traced_memory()[0] < 12 << 20
    finally:
        tracemalloc.stop()


def test_of_a_namespace_its_labels_are_left() -> None:
    whole = namespace("ops", team="x")
    for one in (whole, listed(whole)):
        found = home(trimmed_namespace(one))
        assert found
        assert found.name == "ops"
        assert found.labels == ((METADATA_NAME, "ops"), ("team", "x"))
        assert found.content == home(trimmed_namespace(namespace("ops", 12, team="x")))
    del whole["metadata"]["labels"]
    bare = home(trimmed_namespace(whole))
    assert bare
    assert bare.labels == ()


def test_what_is_none_of_them_is_left_as_it_is() -> None:
    things: list[Json] = [
        {"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": []},
        {"kind": "Status", "metadata": {}, "code": 410},
        {"type": "ADDED", "object": {}},
        {"metadata": "text", "spec": "text"},
    ]
    for thing in things:
        assert trimmed(thing) == thing
        assert trimmed_namespace(thing) == thing
        assert trimmed_pod(thing, Alike()) == thing
    for kind in ("Pod", "Namespace", "NetworkPolicy"):
        mark: Json = {"kind": kind, "metadata": {"resourceVersion": "9"}, "spec": {}}
        assert trimmed(mark)["metadata"] == {"resourceVersion": "9"}
        assert heard(trimmed(mark)) is None
        assert home(trimmed_namespace(mark)) is None
        assert pod(trimmed_pod(mark, Alike())) is None


# --------------------------------------------------------------------------------- who is meant

WARDS: Wards = frozenset({("ns", (("app", "phone"),))})


def test_only_policies_that_select_a_machine_here_want_anybody() -> None:
    elsewhere = policy("web", CLIENTS)
    elsewhere["metadata"]["namespace"] = "other"
    others = policy("web", CLIENTS, podSelector={"matchLabels": {"app": "db"}})
    for one in (elsewhere, others, policy("web", BLOCK), policy("deny", ingress=[])):
        assert wanted([meant(one)], WARDS) == Wanted()
    assert wanted([meant(policy("web", CLIENTS))], frozenset()) == Wanted()
    found = wanted([meant(elsewhere), meant(policy("web", CLIENTS))], WARDS)
    clients = Peers(pods=Selector((Requirement("role", Operator.IN, ("client",)),)))
    assert found == Wanted(peers=frozenset({("ns", clients)}))
    assert (found.pods, found.namespaces) == (True, False)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (CLIENTS, False),
        ({"namespaceSelector": {}}, False),
        (NAMED, False),
        (TEAM, True),
        ({**TEAM, **CLIENTS}, True),
        ({"namespaceSelector": {"matchExpressions": [
            {"key": METADATA_NAME, "operator": "NotIn", "values": ["ns"]}]}}, False),
    ],
)  # fmt: skip
def test_namespaces_are_needed_where_more_than_their_names_counts(
    peer: Json, expected: bool
) -> None:
    found = wanted([meant(policy("web", peer))], WARDS)
    assert (found.pods, found.namespaces) == (True, expected)


def test_ports_by_name_are_looked_up_at_whoever_is_spoken_to() -> None:
    named = [{"port": "web"}, {"port": "dns", "protocol": "UDP"}, {"port": 80}]
    names = frozenset({("web", Protocol.TCP), ("dns", Protocol.UDP)})
    for rule in ({"ports": named}, {"ports": named, "to": [BLOCK]}):
        out = policy("out", policyTypes=["Egress"], ingress=None, egress=[rule])
        assert wanted([meant(out)], WARDS) == Wanted(names=names)
    there_only = policy("out", egress=[{"ports": named, "to": [CLIENTS]}], policyTypes=["Egress"])
    there_only["spec"]["ingress"] = []
    found = wanted([meant(there_only)], WARDS)
    assert (found.names, len(found.peers)) == (frozenset(), 1)
    inwards = policy("in", ingress=[{"ports": named}])  # those are the machine's own
    assert wanted([meant(inwards)], WARDS) == Wanted()


def test_all_that_are_meant_are_chosen_and_few_that_are_not() -> None:
    """Whatever the choice leaves out makes no difference to the machine."""
    peers: list[Json] = [
        CLIENTS,
        TEAM,
        NAMED,
        {**TEAM, **CLIENTS},
        {**NAMED, **CLIENTS},
        {"namespaceSelector": {}},
        {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}},
    ]
    homes = {"ns": (), "ops": (("team", "y"),), "dev": (("team", "x"),)}
    spaces = (*homes, "unheard")
    labels: list[Json] = [{"role": "client"}, {"role": "other"}, {}]
    crowd = [
        there(a_pod(f"p-{number}", f"10.0.0.{number}", namespace=space, labels=some))
        for number, (space, some) in enumerate(itertools.product(spaces, labels), 1)
    ]
    machines = read(machine(), netns="x").machines
    left = set()
    for peer in peers:
        law = meant(policy("web", peer))
        want = wanted([law], WARDS)
        for told_of in (homes, {}):
            choice = Choice(want, told_of)
            chosen = tuple(one for one in crowd if choice.takes(one))
            left.add(len(crowd) - len(chosen))
            spaces_known = known(told_of) if want.namespaces else ()
            every, few = (
                fenced(
                    machines,
                    Laws(
                        policies=(law,),
                        pods=tuple(pods),
                        namespaces=spaces_known,
                        all_labels=False,
                    ),
                    {},
                )
                for pods in (crowd, chosen)
            )
            assert every == few
            assert every != machines
    assert len(left) > 3
    names = Choice(Wanted(names=frozenset({("web", Protocol.TCP)})), {})
    ports = {"ports": [{"name": "web", "containerPort": 80}]}
    assert names.takes(there(a_pod(containers=[ports])))
    assert not names.takes(there(a_pod()))


# ------------------------------------------------------------------------------- a whole source


class Followed:
    """A source, looked at as the daemon looks at it: when it is woken."""

    def __init__(self, script: Script, folder: Path, *, policies: bool = True) -> None:
        credentials = Credentials(endpoint(script.server.url), Plain())
        self.source = Cluster(credentials, NODE, Store(str(folder), print), policies=policies)
        self.beats = self.looks = 0
        self.look()

    def look(self) -> Meaning:
        self.looks += 1
        return self.source.look(self._beat)

    def _beat(self) -> None:
        self.beats += 1

    @property
    def meaning(self) -> Meaning:
        return self.source.meaning

    @property
    def laws(self) -> Lawful:
        found = self.source._lawful
        assert found
        return found

    @property
    def policies(self) -> list[str]:
        return sorted(one.name for one in self.meaning.laws.policies)

    @property
    def pods(self) -> list[str]:
        return sorted(one.name for one in self.meaning.laws.pods)

    @property
    def allowed(self) -> list[str] | None:
        """Whom the machine hears, by address, as everything is known now; None: everybody."""
        [found] = fenced(self.meaning.machines, self.meaning.laws, {})
        if found.hears is None:
            return None
        return sorted(str(one) for _, members in found.hears.sets for one in members)

    def comes_to(self, true: Any) -> bool:
        def is_so() -> bool:
            if self.source.heard():
                self.look()
            return bool(true())

        return eventually(is_so)

    def comes_to_allow(self, *addresses: str) -> bool:
        networks = [f"{one}/{128 if ':' in one else 32}" for one in addresses]
        return self.comes_to(lambda: self.allowed == sorted(networks))

    def rests(self) -> None:
        """Until nothing more is heard."""

        def is_still() -> bool:
            if self.source.heard():
                self.look()
                return False
            return True

        assert eventually(is_still)


@pytest.fixture
def script() -> Iterator[Script]:
    with answering() as server:
        yield Script(server, {VMIS: [machine()]})


@contextmanager
def following(script: Script, folder: Path, *, policies: bool = True) -> Iterator[Followed]:
    made = Followed(script, folder, policies=policies)
    try:
        yield made
    finally:
        for event in script.held.values():
            event.set()
        made.source.close()


def test_the_first_look_knows_policies_and_whom_they_speak_of(
    script: Script, tmp_path: Path
) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS, TEAM)]
    script.lists[PODS] = [
        a_pod(),
        a_pod("c-2", "10.0.0.2", labels={}),
        a_pod("c-3", "10.0.0.3", namespace="dev", labels={}),
        a_pod("c-4", "10.0.0.4", namespace="ops"),
    ]
    script.lists[NAMESPACES] = [namespace("ns"), namespace("dev", team="x"), namespace("ops")]
    with following(script, tmp_path) as followed:
        meaning = followed.meaning
        assert (meaning.laws_unknown, meaning.laws_away, meaning.unreadable) == ("", "", "")
        assert (followed.policies, followed.pods) == (["web"], ["c-1", "c-3"])
        assert followed.allowed == ["10.0.0.1/32", "10.0.0.3/32"]
        assert [one.name for one in meaning.machines] == ["vm"]
        asked = script.query(PODS)
        assert asked["fieldSelector"] == "status.phase!=Succeeded,status.phase!=Failed"
        assert (asked["resourceVersion"], asked["limit"]) == ("", "500")  # page by page
        assert script.query(POLICIES)["resourceVersion"] == "0"


def test_the_first_look_waits_for_policies_and_then_for_whom_they_speak_of(
    script: Script, tmp_path: Path
) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod()]
    late = script.held[POLICIES] = threading.Event()
    timer = threading.Timer(0.3, late.set)
    timer.start()
    try:
        with following(script, tmp_path) as followed:
            assert followed.meaning.laws_unknown == ""
            assert followed.allowed == ["10.0.0.1/32"]
    finally:
        timer.join()


def test_where_they_are_not_wanted_nothing_is_asked(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    with following(script, tmp_path, policies=False) as followed:
        told_of = followed.meaning
        assert (told_of.laws, told_of.laws_unknown) == (Laws(), "")
        assert {path for _, path, _ in script.asked} == {VMIS}


def test_pods_and_namespaces_are_asked_for_while_a_policy_needs_them(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lawful, "LINGER", 0.2)
    elsewhere = policy("other", CLIENTS, TEAM)
    elsewhere["metadata"]["namespace"] = "other"
    script.lists[POLICIES] = [policy("web", BLOCK), elsewhere]
    script.lists[PODS] = [a_pod()]
    with following(script, tmp_path) as followed:
        assert followed.meaning.laws_unknown == ""
        assert followed.policies == ["other", "web"]
        assert {path for _, path, _ in script.asked} == {VMIS, POLICIES}
        script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=11))
        assert followed.comes_to_allow("10.0.0.1")
        assert (script.count("list", PODS), script.count("list", NAMESPACES)) == (1, 0)
        script.tell(POLICIES, "MODIFIED", policy("web", TEAM, version=12))
        assert followed.comes_to_allow()
        assert (script.count("list", PODS), script.count("list", NAMESPACES)) == (1, 1)
        script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=13))
        assert followed.comes_to_allow("10.0.0.1")
        script.tell(POLICIES, "DELETED", policy("web", version=14))
        assert followed.comes_to(lambda: followed.policies == ["other"])
        assert followed.pods == []
        assert followed.source.due is not None
        assert followed.comes_to(lambda: followed.source.due is None)
        assert not followed.laws._others
        assert not followed.laws._crowd._everybody
        assert not followed.laws.ears.part()
        requests = followed.source.requests
        assert requests >= len(script.asked)
        script.tell(POLICIES, "ADDED", policy("web", CLIENTS, version=15))
        assert followed.comes_to_allow("10.0.0.1")
        assert script.count("list", PODS) == 2
        assert followed.source.requests > requests


def test_what_is_needed_again_soon_is_not_listed_again(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod()]
    with following(script, tmp_path) as followed:
        assert followed.allowed == ["10.0.0.1/32"]
        for number in range(5):
            script.tell(POLICIES, "MODIFIED", policy("web", version=20 + number, ingress=[]))
            assert followed.comes_to(lambda: followed.pods == [])
            followed.look()
            assert followed.source.due is not None
            new = a_pod(f"d-{number}", f"10.0.1.{number}", version=30 + number)
            script.tell(PODS, "ADDED", new)
            script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=40 + number))
            assert followed.comes_to(lambda: len(followed.pods) == number + 2)  # noqa: B023
            assert followed.source.due is None
        assert script.count("list", PODS) == 1


def test_pods_come_and_go(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    with following(script, tmp_path) as followed:
        assert followed.allowed == []
        script.tell(PODS, "ADDED", a_pod("c-1", "10.0.0.1", "fd00::1"))
        assert followed.comes_to_allow("10.0.0.1", "fd00::1")
        script.tell(PODS, "MODIFIED", a_pod("c-1", "10.0.0.9", version=11))
        assert followed.comes_to_allow("10.0.0.9")
        script.tell(PODS, "ADDED", a_pod("c-2", "10.0.0.2", version=12))
        assert followed.comes_to_allow("10.0.0.2", "10.0.0.9")
        script.tell(PODS, "MODIFIED", a_pod("c-2", "10.0.0.2", version=13, phase="Succeeded"))
        assert followed.comes_to_allow("10.0.0.9")
        script.tell(PODS, "MODIFIED", a_pod("c-1", "10.0.0.9", version=14, labels={"role": "x"}))
        assert followed.comes_to_allow()
        script.tell(PODS, "MODIFIED", a_pod("c-1", "10.0.0.9", version=15))
        assert followed.comes_to_allow("10.0.0.9")
        script.tell(PODS, "DELETED", a_pod("c-1", "10.0.0.9", version=16))
        assert followed.comes_to_allow()
        before = followed.meaning.laws
        script.tell(POLICIES, "MODIFIED", policy("web", {"podSelector": {}}, version=17))
        assert followed.comes_to(lambda: followed.meaning.laws is not before)
        assert followed.allowed == []


def test_who_is_not_meant_wakes_nobody(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod()]
    with following(script, tmp_path) as followed:
        assert followed.allowed == ["10.0.0.1/32"]
        followed.rests()
        looks = followed.looks
        stranger = a_pod("x", "10.0.0.7", labels={"role": "x"}, version=20)
        script.tell(PODS, "ADDED", stranger)
        script.tell(PODS, "MODIFIED", a_pod(version=21))
        script.tell(PODS, "DELETED", stranger)
        script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=22))
        listener = followed.laws._others[PODS].listener
        assert eventually(lambda: listener.version == "20" and listener.events == 3)
        reference = followed.laws.reference
        assert eventually(
            lambda: (
                (one := reference("NetworkPolicy/ns/web")) is not None
                and one.resource_version == "22"
            )
        )
        assert not followed.source.heard()
        assert followed.looks == looks
        script.tell(POLICIES, "MODIFIED", policy("web", {"podSelector": {}}, version=23))
        script.tell(PODS, "ADDED", {**stranger, "metadata": {**stranger["metadata"]}})
        assert followed.comes_to_allow("10.0.0.1", "10.0.0.7")


def test_labels_of_namespaces_change_who_is_meant(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", TEAM)]
    script.lists[PODS] = [a_pod(namespace="dev"), a_pod("c-2", "10.0.0.2", namespace="ops")]
    script.lists[NAMESPACES] = [namespace("dev"), namespace("ops"), namespace("ns")]
    with following(script, tmp_path) as followed:
        assert (followed.allowed, followed.pods) == ([], [])
        script.tell(NAMESPACES, "MODIFIED", namespace("dev", 11, team="x"))
        assert followed.comes_to_allow("10.0.0.1")
        script.tell(NAMESPACES, "MODIFIED", namespace("ops", 12, team="x"))
        script.tell(NAMESPACES, "MODIFIED", namespace("dev", 13, team="y"))
        assert followed.comes_to_allow("10.0.0.2")
        script.tell(NAMESPACES, "DELETED", namespace("ops", 14))
        assert followed.comes_to_allow()


def test_a_namespace_that_is_told_of_late_seems_to_lack_nothing(
    script: Script, tmp_path: Path
) -> None:
    without = {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}
    script.lists[POLICIES] = [policy("web", {"namespaceSelector": without})]
    script.lists[PODS] = [a_pod(namespace="new")]
    with following(script, tmp_path) as followed:
        assert followed.meaning.laws_unknown == ""
        assert followed.allowed == []
        assert not followed.meaning.laws.all_labels
        script.tell(NAMESPACES, "ADDED", namespace("new", 11))
        assert followed.comes_to_allow("10.0.0.1")


@pytest.mark.parametrize(
    "expression",
    [
        {"key": "team", "operator": "NotIn", "values": ["prod"]},
        {"key": "team", "operator": "DoesNotExist"},
    ],
    ids=["NotIn", "DoesNotExist"],
)
def test_a_peer_is_not_admitted_while_its_namespace_is_being_listed(
    script: Script, tmp_path: Path, expression: Json
) -> None:
    """A policy that selected nobody here selects a machine that comes, and another machine of this
    node, whose address is known, is in a namespace that the policy does not let in."""
    peer = machine("peer", "prod", role="client")
    peer["status"]["activePods"] = {UID.replace("1", "2"): NODE}
    script.lists[VMIS] = [peer]
    script.lists[POLICIES] = [
        policy("web", {"namespaceSelector": {"matchExpressions": [expression]}})
    ]
    script.lists[NAMESPACES] = [namespace("prod", team="prod"), namespace("ns")]
    script.held[NAMESPACES] = threading.Event()
    at = {f"pod:{UID.replace('1', '2')}": space(link("eth0", "10.0.0.9/24"))}
    with following(script, tmp_path) as followed:
        script.tell(VMIS, "ADDED", machine())
        assert followed.comes_to(lambda: len(followed.meaning.machines) == 2)
        assert eventually(lambda: script.count("list", NAMESPACES) == 1)
        for _ in range(2):
            found = fenced(followed.meaning.machines, followed.meaning.laws, at)
            [web] = [one for one in found if one.namespace == "ns"]
            assert web.hears
            assert [*filter(None, (members for _, members in web.hears.sets))] == []
            script.held[NAMESPACES].set()
            assert followed.comes_to(lambda: followed.meaning.laws.namespaces)


@pytest.mark.parametrize(
    ("peer", "admitted"),
    [
        ({}, True),
        ({"matchLabels": {"role": "client"}}, True),
        ({"matchLabels": {"kubevirt.io": "virt-launcher"}}, True),
        ({"matchExpressions": [{"key": "role", "operator": "NotIn", "values": ["db"]}]}, True),
        ({"matchExpressions": [{"key": "mesh", "operator": "NotIn", "values": ["x"]}]}, False),
        ({"matchExpressions": [{"key": "mesh", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "kubevirt.io", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_machine_may_have_labels_of_its_pod_that_nobody_told_of(
    script: Script, tmp_path: Path, peer: Json, admitted: bool
) -> None:
    """What is in its pod besides, the pod itself tells once it is listed."""
    client = machine("client", role="client")
    client["status"]["activePods"] = {UID.replace("1", "2"): NODE}
    script.lists[VMIS] = [machine(), client]
    script.lists[POLICIES] = [policy("web", {"podSelector": peer})]
    at = {f"pod:{UID.replace('1', '2')}": space(link("eth0", "10.0.0.9/24"))}
    with following(script, tmp_path) as followed:
        found = fenced(followed.meaning.machines, followed.meaning.laws, at)
        [web] = [one for one in found if one.name == "vm"]
        assert web.hears
        assert any(members for _, members in web.hears.sets) is admitted


def test_a_policy_selects_by_the_labels_that_kubevirt_gives_a_pod(
    script: Script, tmp_path: Path
) -> None:
    for key, text in {"kubevirt.io": "virt-launcher", "vm.kubevirt.io/name": "vm"}.items():
        script.lists[POLICIES] = [policy("web", podSelector={"matchLabels": {key: text}})]
        with following(script, tmp_path) as followed:
            [found] = fenced(followed.meaning.machines, followed.meaning.laws, {})
            assert found.hears is not None


def test_a_machine_that_comes_is_shut_until_everybody_is_known(
    script: Script, tmp_path: Path
) -> None:
    script.lists[VMIS] = []
    script.lists[POLICIES] = [policy("web", CLIENTS, BLOCK)]
    script.lists[PODS] = [a_pod()]
    script.held[PODS] = threading.Event()
    with following(script, tmp_path) as followed:
        assert followed.meaning.laws_unknown == ""
        assert script.count("list", PODS) == 0
        script.tell(VMIS, "ADDED", machine())
        assert followed.comes_to(lambda: followed.meaning.machines)
        assert (followed.meaning.laws_unknown, followed.meaning.laws_away) == ("", "")
        assert followed.allowed == ["192.0.2.0/24"]
        assert eventually(lambda: script.count("list", PODS) == 1)
        script.held[PODS].set()
        assert followed.comes_to(lambda: followed.allowed == ["10.0.0.1/32", "192.0.2.0/24"])


def test_what_was_known_goes_on_until_a_new_policy_can_be_told(
    script: Script, tmp_path: Path
) -> None:
    """It would cut off those whom it allows."""
    script.lists[POLICIES] = [policy("web", BLOCK)]
    script.lists[PODS] = [a_pod()]
    script.held[PODS] = threading.Event()
    with following(script, tmp_path) as followed:
        assert followed.allowed == ["192.0.2.0/24"]
        script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=11))
        assert followed.comes_to(lambda: script.count("list", PODS) == 1)
        assert followed.allowed == ["192.0.2.0/24"]
        assert (followed.meaning.laws_unknown, followed.meaning.laws_away) == ("", "")
        script.held[PODS].set()
        assert followed.comes_to_allow("10.0.0.1")


@pytest.mark.parametrize(
    ("path", "kind"), [(PODS, "pods"), (NAMESPACES, "namespaces")], ids=["pods", "namespaces"]
)
def test_a_new_policy_that_can_never_be_told_allows_nobody(
    script: Script, tmp_path: Path, path: str, kind: str
) -> None:
    script.lists[POLICIES] = [policy("web", BLOCK)]
    script.lists[PODS] = [a_pod(namespace="dev")]
    script.lists[NAMESPACES] = [namespace("dev", team="x")]
    script.refusals[path] = [refused(403, "not for you")] * 3
    with following(script, tmp_path) as followed:
        assert followed.allowed == ["192.0.2.0/24"]
        script.tell(POLICIES, "MODIFIED", policy("web", TEAM, version=11))
        assert followed.comes_to_allow()
        assert followed.meaning.laws_unknown == ""
        assert "not for you" in followed.meaning.laws_away
        assert f"service account list {kind} in" in followed.meaning.laws_away
        assert followed.comes_to_allow("10.0.0.1")
        assert followed.comes_to(lambda: not followed.meaning.laws_away)


@pytest.mark.parametrize(
    ("path", "kind"),
    [(POLICIES, "networkpolicies.networking.k8s.io"), (PODS, "pods"), (NAMESPACES, "namespaces")],
    ids=["policies", "pods", "namespaces"],
)
def test_where_they_are_denied_from_the_start_nothing_is_known(
    script: Script, tmp_path: Path, path: str, kind: str
) -> None:
    script.lists[POLICIES] = [policy("web", TEAM)]
    script.lists[PODS] = [a_pod(namespace="dev")]
    script.lists[NAMESPACES] = [namespace("dev", team="x")]
    script.refusals[path] = [refused(403, "not for you")] * 2
    with following(script, tmp_path) as followed:
        told_of = followed.meaning
        assert "not for you" in told_of.laws_unknown
        assert f"service account list {kind} in" in told_of.laws_unknown
        assert (told_of.laws, told_of.laws_away, told_of.unreadable) == (Laws(), "", "")
        assert [one.name for one in told_of.machines] == ["vm"]
        assert followed.comes_to(lambda: not followed.meaning.laws_unknown)
        assert followed.allowed == ["10.0.0.1/32"]


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_for_machines(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "FIRST", 0.3)
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod()]
    for path in (POLICIES, PODS):
        script.held[path] = threading.Event()
    began = time.monotonic()
    with following(script, tmp_path) as followed:
        assert time.monotonic() - began < 8
        assert "were not listed yet" in followed.meaning.laws_unknown
        script.held[POLICIES].set()
        assert followed.comes_to(lambda: script.count("list", PODS) == 1)
        assert "were not listed yet" in followed.meaning.laws_unknown
        assert followed.meaning.laws == Laws()
        script.held[PODS].set()
        assert followed.comes_to(lambda: not followed.meaning.laws_unknown)
        assert followed.allowed == ["10.0.0.1/32"]


def test_what_is_known_goes_on_while_nobody_answers(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod()]
    with following(script, tmp_path) as followed:
        before = followed.meaning.laws
        assert before.policies
        for path in (POLICIES, PODS):
            script.refusals[path] = [refused(403, "not any more")] * 2
            script.end(path)
            assert followed.comes_to(lambda: "not any more" in followed.meaning.laws_away)
            assert followed.meaning.laws_unknown == ""
            assert followed.meaning.laws == before
            assert followed.comes_to(lambda: not followed.meaning.laws_away)
        assert followed.meaning.laws == before


def test_trouble_with_what_nobody_needs_any_more_is_none(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    with following(script, tmp_path) as followed:
        assert followed.allowed == []
        script.tell(POLICIES, "MODIFIED", policy("web", BLOCK, version=11))
        assert followed.comes_to(lambda: followed.allowed == ["192.0.2.0/24"])
        script.refusals[PODS] = [refused(403, "not any more")] * 9
        script.end(PODS)
        assert eventually(lambda: followed.laws._others[PODS].listener.trouble is not None)
        assert followed.look().laws_away == ""
        script.tell(POLICIES, "MODIFIED", policy("web", CLIENTS, version=12))
        assert followed.comes_to(lambda: "not any more" in followed.meaning.laws_away)


def test_a_version_that_the_server_has_forgotten_is_listed_anew(
    script: Script, tmp_path: Path
) -> None:
    script.lists[POLICIES] = [policy("web", CLIENTS)]
    script.lists[PODS] = [a_pod(), a_pod("c-2", "10.0.0.2")]
    with following(script, tmp_path) as followed:
        assert followed.comes_to_allow("10.0.0.1", "10.0.0.2")
        script.lists[PODS] = [a_pod("c-2", "10.0.0.2"), a_pod("c-3", "10.0.0.5")]
        script.tell(PODS, "ERROR", {"code": 410})
        assert followed.comes_to_allow("10.0.0.2", "10.0.0.5")
        script.lists[POLICIES] = []
        script.tell(POLICIES, "ERROR", {"code": 410})
        assert followed.comes_to(lambda: followed.policies == [])


def test_what_turns_bad_goes_on_as_it_was_and_what_is_new_is_shut(
    script: Script, tmp_path: Path
) -> None:
    wrong: Json = {"ingress": [{"ports": [{"port": 9, "endPort": 8}]}]}
    script.lists[POLICIES] = [policy("web", BLOCK)]
    with following(script, tmp_path) as followed:
        assert followed.allowed == ["192.0.2.0/24"]
        script.tell(POLICIES, "MODIFIED", policy("web", version=11, **wrong))
        assert followed.comes_to(lambda: followed.meaning.problems)
        told_of = followed.meaning
        assert (told_of.held, told_of.shut) == (("NetworkPolicy/ns/web",), ())
        assert [(one.file, one.code) for one in told_of.problems] == [
            ("NetworkPolicy/ns/web", "end-before-start")
        ]
        assert followed.allowed == ["192.0.2.0/24"]
        script.tell(POLICIES, "ADDED", policy("new", version=12, **wrong))
        assert followed.comes_to(lambda: followed.meaning.shut == ("NetworkPolicy/ns/new",))
        assert [(one.name, one.broken) for one in followed.meaning.laws.policies] == [
            ("new", True),
            ("web", False),
        ]
        again = policy("web", version=13, **wrong)
        again["metadata"]["uid"] = "another"
        script.tell(POLICIES, "MODIFIED", again)
        assert followed.comes_to(lambda: not followed.meaning.held)
        assert len(followed.meaning.shut) == 2
        assert all(one.broken for one in followed.meaning.laws.policies)
        assert followed.allowed == []
        script.tell(POLICIES, "DELETED", policy("new", version=14))
        script.tell(POLICIES, "MODIFIED", policy("web", BLOCK, version=15))
        assert followed.comes_to(lambda: not followed.meaning.problems)
        assert followed.allowed == ["192.0.2.0/24"]
        assert not followed.meaning.shut


def test_on_request_policies_are_read_again(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", BLOCK), policy("other", BLOCK)]
    with following(script, tmp_path) as followed:
        followed.rests()
        for renew, expected in ((False, 0), (True, 3), (False, 0)):
            if renew:
                followed.source.renew()
            followed.beats = 0
            followed.look()
            assert followed.beats == expected
        assert followed.policies == ["other", "web"]


def test_what_did_not_change_is_the_very_same(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", TEAM)]
    script.lists[PODS] = [a_pod(namespace="dev")]
    script.lists[NAMESPACES] = [namespace("dev", team="x")]
    with following(script, tmp_path) as followed:
        before = followed.meaning.laws
        assert before.pods
        assert followed.look().laws is before
        script.tell(PODS, "ADDED", a_pod("c-2", "10.0.0.2", namespace="dev", version=20))
        assert followed.comes_to_allow("10.0.0.1", "10.0.0.2")
        assert followed.meaning.laws is not before


def test_a_name_of_a_machine_is_none_of_a_policy(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", BLOCK)]
    with following(script, tmp_path) as followed:
        found = followed.laws
        assert found.reference("VirtualMachineInstance/ns/web") is None
        reference = found.reference("NetworkPolicy/ns/web")
        assert reference
        assert (reference.kind, reference.uid) == ("NetworkPolicy", "u-web")


def test_it_stops_at_once_whatever_it_waits_for(script: Script, tmp_path: Path) -> None:
    script.lists[POLICIES] = [policy("web", BLOCK)]
    script.held[PODS] = threading.Event()
    with following(script, tmp_path) as followed:
        script.tell(POLICIES, "MODIFIED", policy("web", TEAM, version=11))
        assert followed.comes_to(lambda: script.count("list", PODS) == 1)
        found = followed.laws
        began = time.monotonic()
        found.ears.interrupt()
        assert found.ears.ended(5.0)
        assert time.monotonic() - began < 5.0
