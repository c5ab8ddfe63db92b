"""Services with port ranges in view of a real API server: what is known of them and of what is
behind them, and what stays known whatever happens. There are no controllers: what they would write,
a test writes itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from agent.sources.api import Api
from agent.sources.kubeconfig import load
from agent.sources.meaning import Meaning, Tiding
from agent.sources.store import Store
from rules.ports import PortRange
from rules.services import Service
from tests.kubernetes.agents import comes_to_say
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import (
    EVENTS,
    RIGHTS,
    SERVICES,
    SLICES,
    Asked,
    Machines,
    asking,
    instance,
)
from tests.spaces import eventually, run, unused_name

Json = Any
Start = Callable[[], AbstractContextManager[Asked]]
ALL = (RIGHTS, EVENTS, SERVICES, SLICES)
END = "portrange.alpha.kubernetes.io/port-end-"
FOR_MACHINES = 4  # requests: two lists, two watches
ANYWHERE = "10.1.2.3"


class Services:
    """In one namespace of a cluster, with what is behind them."""

    def __init__(self, cluster: Cluster, namespace: str, node: str) -> None:
        self.cluster, self.namespace, self.node = cluster, namespace, node
        self.path = f"/api/v1/namespaces/{namespace}/services"
        self.slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def make(self, name: str, end: int | None = 10004, **spec: Json) -> Json:
        """A range of UDP ports, unless it has no end, on a node port that the API server gives."""
        return self.cluster.ask("POST", self.path, service(name, end, **spec))

    def annotate(self, name: str, end: str | None, port: str = "rtp") -> Json:
        change = {"metadata": {"annotations": {f"{END}{port}": end}}}
        return self.cluster.ask("PATCH", f"{self.path}/{name}", change)

    def remove(self, name: str) -> None:
        self.cluster.ask("DELETE", f"{self.path}/{name}")

    def put(
        self, of: str, *backs: Json, name: str = "", port: int = 20000, family: str = "IPv4"
    ) -> None:
        """A slice is to be there, of a Service of that name."""
        called = name or f"{of}-1"
        document = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": called, "labels": {"kubernetes.io/service-name": of}},
            "addressType": family,
            "ports": [{"name": "rtp", "protocol": "UDP", "port": port}],
            "endpoints": list(backs),
        }
        self.cluster.ask("APPLY", f"{self.slices}/{called}", document)

    def back(self, address: str = ANYWHERE, *, here: bool = True, **conditions: bool) -> Json:
        node = self.node if here else "elsewhere"
        return {"addresses": [address], "nodeName": node, "conditions": conditions}

    def label(self, name: str) -> str:
        return f"Service/{self.namespace}/{name}"

    def known(self, meaning: Meaning) -> dict[str, Service]:
        """Of this namespace, by name: all tests share a cluster."""
        return {one.name: one for one in meaning.services if one.namespace == self.namespace}

    def behind(self, meaning: Meaning, name: str) -> list[str]:
        """Where the first port of a Service leads; a star marks what is on this node."""
        assert meaning.endpoints is not None
        return [
            f"{one.address} {one.port}{'*' if one.local else ''}"
            for one in meaning.endpoints[self.label(name)][0]
        ]

    def ranges(self, meaning: Meaning) -> dict[str, list[str]]:
        """Of each Service with a range, where that leads."""
        return {
            name: self.behind(meaning, name)
            for name, one in self.known(meaning).items()
            if one.ports[0].ranged
        }

    def are(self, asked: Asked, **expected: list[str]) -> Meaning:
        """Once these are the Services with ranges, and lead there."""
        return asked.until(lambda it: not it.services_unknown and self.ranges(it) == expected)


def service(name: str, end: int | None, **spec: Json) -> Json:
    port = {"name": "rtp", "protocol": "UDP", "port": 10000, "targetPort": 20000}
    annotations = {f"{END}rtp": str(end)} if end is not None else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"type": "NodePort", "selector": {"app": name}, "ports": [port], **spec},
    }


@pytest.fixture
def node() -> str:
    return unused_name()


@pytest.fixture
def services(cluster: Cluster, namespace: str, node: str) -> Iterator[Services]:
    cluster.grant("portranger", *ALL)
    yield Services(cluster, namespace, node)
    cluster.start_apiserver()
    cluster.grant("portranger", RIGHTS)


@pytest.fixture
def start(services: Services, tmp_path: Path) -> Start:
    credentials = load(str(services.cluster.kubeconfig("portranger")), {})
    return lambda: asking(credentials, services.node, tmp_path / "state", services=True)


@pytest.fixture
def asked(start: Start) -> Iterator[Asked]:
    with start() as made:
        yield made


# ------------------------------------------------------------------------------ what is heard


def test_a_service_comes_changes_and_goes(services: Services, asked: Asked) -> None:
    services.put("sip", services.back(ready=True))
    made = services.make("sip", externalTrafficPolicy="Local", sessionAffinity="ClientIP")
    meaning = services.are(asked, sip=["10.1.2.3 20000*"])
    found = services.known(meaning)["sip"]
    first = made["spec"]["ports"][0]["nodePort"]
    [port] = found.ports
    assert (port.ports, port.target) == (PortRange(10000, 10004), PortRange(20000, 20004))
    assert port.node_ports == PortRange(first, first + 4)
    assert (found.local, found.affinity, found.headless) == (True, 10800, False)
    assert str(found) == services.label("sip")
    reference = asked.source.reference(str(found))
    assert reference is not None
    assert (reference.kind, reference.uid) == ("Service", made["metadata"]["uid"])
    services.annotate("sip", "10009")
    asked.until(lambda it: services.known(it)["sip"].ports[0].target == PortRange(20000, 20009))
    services.remove("sip")
    assert services.known(services.are(asked)) == {}
    assert services.label("sip") not in (asked.meaning.endpoints or {})


def test_what_is_there_at_the_start_is_known_at_the_first_look(
    services: Services, start: Start
) -> None:
    services.make("sip")
    services.put("sip", services.back(ready=True))
    with start() as asked:
        assert services.ranges(asked.meaning) == {"sip": ["10.1.2.3 20000*"]}
        assert asked.meaning.services_unknown == ""
        assert asked.looks == 1


def test_a_range_comes_and_goes_with_its_annotation(services: Services, asked: Asked) -> None:
    services.make("sip", None)
    services.put("sip", services.back(ready=True))
    asked.until(lambda it: "sip" in services.known(it))
    assert services.behind(asked.meaning, "sip") == []  # nobody has asked
    services.annotate("sip", "10004")
    services.are(asked, sip=["10.1.2.3 20000*"])
    services.annotate("sip", None)
    meaning = services.are(asked)
    assert [len(one.ports) for one in services.known(meaning)["sip"].ports] == [1]
    services.annotate("sip", "10001")
    services.are(asked, sip=["10.1.2.3 20000*"])


def test_where_nobody_has_a_range_no_slice_is_ever_asked_for(
    services: Services, start: Start
) -> None:
    services.cluster.grant("portranger", RIGHTS, SERVICES)
    services.make("plain", None)
    services.put("plain", services.back(ready=True))
    with start() as asked:
        asked.until(lambda it: "plain" in services.known(it))
        services.make("more", None)
        asked.until(lambda it: "more" in services.known(it))
        services.put("plain", services.back("10.1.2.4", ready=True))
        assert not asked.turn(0.5)
        assert asked.source.requests == FOR_MACHINES + 2
        assert (asked.meaning.services_unknown, asked.meaning.services_away) == ("", "")
        services.cluster.grant("portranger", *ALL)
        services.make("sip")
        services.are(asked, sip=[])
        assert asked.source.requests == FOR_MACHINES + 4


def test_only_what_holds_something_of_a_node_is_kept(services: Services, asked: Asked) -> None:
    port = [{"name": "x", "port": 80}]
    services.make("inside", None, type="ClusterIP", ports=port)
    services.make("headless", None, type="ClusterIP", clusterIP="None", ports=port)
    services.make("outside", None, type="ClusterIP", ports=port, externalIPs=["192.0.2.7"])
    services.make("held", None)
    services.make("sip")
    meaning = services.are(asked, sip=[])
    asked.until(lambda it: len(services.known(it)) == 3)
    assert sorted(services.known(meaning)) == ["held", "outside", "sip"]
    assert [port.ranged for port in services.known(meaning)["held"].ports] == [False]
    given = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}}}
    balanced = service("balanced", None, type="LoadBalancer", allocateLoadBalancerNodePorts=False)
    services.cluster.ask("POST", services.path, balanced)
    services.cluster.ask("PATCH", f"{services.path}/balanced/status", given)
    asked.until(lambda it: "balanced" in services.known(it))
    found = services.known(asked.meaning)["balanced"]
    assert ([str(one) for one in found.ingress], found.allocates) == (["192.0.2.8"], False)


def test_what_concerns_nobody_wakes_nobody(services: Services, asked: Asked) -> None:
    services.make("sip")
    services.are(asked, sip=[])
    while asked.turn():
        pass
    change = {"metadata": {"annotations": {"other.example/x": "y"}, "labels": {"a": "b"}}}
    told = services.cluster.ask("PATCH", f"{services.path}/sip", change)
    services.make("inside", None, type="ClusterIP")
    services.put("another", services.back(ready=True))
    assert not asked.turn(0.5)
    reference = asked.source.reference(services.label("sip"))
    assert reference is not None
    assert reference.resource_version == told["metadata"]["resourceVersion"]


# --------------------------------------------------------------------------- who is behind it


def test_who_is_behind_it_is_followed(services: Services, asked: Asked) -> None:
    services.make("sip")
    services.are(asked, sip=[])
    services.put("sip", services.back(ready=False))
    services.put("sip", services.back(ready=True))
    services.are(asked, sip=["10.1.2.3 20000*"])
    services.put("sip", services.back(ready=False))
    services.are(asked, sip=[])
    moved = services.back("10.1.9.9", here=False, ready=True)
    services.put("sip", services.back(ready=True), moved)
    services.are(asked, sip=["10.1.2.3 20000*", "10.1.9.9 20000"])
    leaving: Json = {"ready": False, "serving": True, "terminating": True}
    services.put("sip", services.back(**leaving), moved)
    services.are(asked, sip=["10.1.9.9 20000"])
    services.put("sip", services.back(**leaving))
    services.are(asked, sip=["10.1.2.3 20000*"])
    services.cluster.ask("DELETE", f"{services.slices}/sip-1")
    services.are(asked, sip=[])


def test_several_slices_are_one(services: Services, asked: Asked) -> None:
    services.make("sip")
    services.put("sip", services.back("10.1.2.9", ready=True), services.back(ready=True))
    services.put("sip", services.back(ready=True), services.back("10.1.2.1"), name="sip-2")
    services.put("sip", services.back("2001:db8::7", here=False), name="sip-6", family="IPv6")
    services.put("sip", services.back("x.example"), name="sip-names", family="FQDN")
    services.put("other", services.back("10.1.2.66"))
    services.are(
        asked,
        sip=["10.1.2.1 20000*", "10.1.2.3 20000*", "10.1.2.9 20000*", "2001:db8::7 20000"],
    )


def test_the_api_server_itself_refuses_what_we_leave_out(services: Services) -> None:
    for address in ("127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0"):
        with pytest.raises(AssertionError, match="422"):
            services.put("sip", services.back(address, ready=True))


def test_the_same_name_in_another_namespace_is_another(
    cluster: Cluster, services: Services, asked: Asked
) -> None:
    services.make("sip")
    services.put("sip", services.back(ready=True))
    with cluster.namespace() as name:
        other = Services(cluster, name, services.node)
        other.make("sip")
        other.put("sip", other.back("10.1.7.7", ready=True))
        other.are(asked, sip=["10.1.7.7 20000*"])
        services.are(asked, sip=["10.1.2.3 20000*"])
        other.annotate("sip", None)
        other.are(asked)
        assert services.ranges(asked.meaning) == {"sip": ["10.1.2.3 20000*"]}


def test_a_named_target_is_what_the_slice_says(services: Services, asked: Asked) -> None:
    named = {"name": "rtp", "protocol": "UDP", "port": 10000, "targetPort": "media"}
    services.make("sip", 10000, ports=[named])  # a range of one
    services.put("sip", services.back(ready=True), port=4242)
    services.put("sip", services.back("10.1.2.4", ready=True), name="sip-2", port=5353)
    services.are(asked, sip=["10.1.2.3 4242*", "10.1.2.4 5353*"])
    assert services.known(asked.meaning)["sip"].ports[0].target == "media"


def test_many_that_come_at_once_are_asked_for_in_a_few_requests(
    services: Services, asked: Asked
) -> None:
    names = [f"s-{number}" for number in range(40)]
    for name in names:
        services.put(name, services.back(ready=True))
    requests = asked.source.requests
    for name in names:
        services.make(name)
        asked.turn(0)
    services.are(asked, **{name: ["10.1.2.3 20000*"] for name in names})
    assert asked.source.requests - requests <= 40  # less than one for each, list and watch


# ------------------------------------------------------------------------- what cannot be read


def test_what_turns_bad_goes_on_and_is_told_where_it_is_looked_for(
    services: Services, asked: Asked
) -> None:
    services.make("sip")
    services.put("sip", services.back(ready=True))
    services.are(asked, sip=["10.1.2.3 20000*"])
    services.annotate("sip", "9999")
    meaning = asked.until(lambda it: services.label("sip") in it.held)
    [problem] = [one for one in meaning.problems if one.file == services.label("sip")]
    assert (problem.code, problem.line) == ("end-before-start", 0)
    assert services.ranges(meaning) == {"sip": ["10.1.2.3 20000*"]}
    services.put("sip", services.back("10.1.2.4", ready=True))
    services.are(asked, sip=["10.1.2.4 20000*"])
    asked.source.tell(problem.file, Tiding.REJECTED, "it ends before it starts")
    machines = Machines(services.cluster, services.namespace)
    assert comes_to_say(machines, "sip", Tiding.REJECTED.value, "it ends before")
    shown = services.cluster.kubectl("describe", "service", "sip", "-n", services.namespace)
    assert "it ends before it starts" in shown.partition("Events:")[2]
    services.annotate("sip", "10001")
    asked.until(lambda it: not it.held and not it.problems)
    assert len(services.known(asked.meaning)["sip"].ports[0].ports) == 2


def test_what_was_never_understood_is_what_kube_proxy_makes_of_it(
    services: Services, asked: Asked
) -> None:
    made = services.make("sip", 9999)
    meaning = asked.until(lambda it: "sip" in services.known(it))
    [port] = services.known(meaning)["sip"].ports
    held = made["spec"]["ports"][0]["nodePort"]
    assert (port.ranged, port.node_ports) == (False, PortRange(held, held))
    assert [one.file for one in meaning.problems] == [services.label("sip")]
    assert meaning.held == ()


# ------------------------------------------------------------------------------------ troubles


def test_without_the_right_to_services_machines_are_served(
    services: Services, start: Start
) -> None:
    cluster = services.cluster
    machines = Machines(cluster, services.namespace)
    services.make("sip")
    services.put("sip", services.back(ready=True))
    cluster.grant("portranger", RIGHTS)
    with start() as asked:
        assert asked.meaning.unreadable == ""
        assert "Let the agent's service account list services" in asked.meaning.services_unknown
        assert (asked.meaning.services, asked.meaning.endpoints) == ((), {})
        machines.make(instance("vm", services.node))
        asked.has("vm")
        assert asked.meaning.services_unknown
        cluster.grant("portranger", RIGHTS, SERVICES)
        wanted = "account list endpointslices.discovery.k8s.io"
        asked.until(lambda it: wanted in it.services_unknown, 60)
        assert asked.meaning.services == ()
        machines.annotate("vm", port_ranges="7")
        asked.has("vm")
        cluster.grant("portranger", *ALL)
        asked.until(lambda it: not it.services_unknown, 60)
        assert services.ranges(asked.meaning) == {"sip": ["10.1.2.3 20000*"]}
        assert asked.meaning.unreadable == ""


def test_where_they_are_not_wanted_they_are_not_asked_for(
    services: Services, start: Start, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    services.make("sip")
    with start() as asked:
        services.are(asked, sip=[])
        assert services.label("sip") in Store(str(state), print).load()
    credentials = load(str(services.cluster.kubeconfig("portranger")), {})
    with asking(credentials, services.node, state) as asked:
        told = asked.has()
        assert Store(str(state), print).load() == {}
        assert (told.services, told.endpoints, told.services_unknown) == ((), {}, "")
        assert eventually(lambda: asked.source.requests == FOR_MACHINES)
        while asked.turn(0.5):
            pass
        assert asked.source.requests == FOR_MACHINES


def test_an_api_server_that_goes_away_and_comes_back_changes_nothing(
    services: Services, start: Start
) -> None:
    cluster = services.cluster
    with start() as asked:
        services.make("sip")
        services.put("sip", services.back(ready=True))
        before = services.are(asked, sip=["10.1.2.3 20000*"])
        cluster.kill_apiserver()
        away = asked.until(lambda it: "Connection refused" in it.services_away)
        assert away.services_unknown == ""
        assert (away.services, away.endpoints) == (before.services, before.endpoints)
        with start() as another:  # which never hears from it
            told = another.meaning
            assert "Connection refused" in told.services_unknown
            assert (told.services, told.endpoints) == ((), {})
            cluster.start_apiserver()
            services.put("sip", services.back("10.1.2.4", ready=True))
            services.are(another, sip=["10.1.2.4 20000*"])
        services.are(asked, sip=["10.1.2.4 20000*"])
        asked.until(lambda it: not it.services_away, 60)
        services.make("more")
        services.are(asked, sip=["10.1.2.4 20000*"], more=[])


def test_what_the_api_server_has_forgotten_is_made_up_for(services: Services, asked: Asked) -> None:
    for name in ("kept", "gone"):
        services.make(name)
    services.put("kept", services.back(ready=True))
    services.are(asked, kept=["10.1.2.3 20000*"], gone=[])
    services.cluster.compact()
    services.remove("gone")
    services.make("new")
    services.put("kept", services.back("10.1.2.4", ready=True))
    services.are(asked, kept=["10.1.2.4 20000*"], new=[])


# ------------------------------------------------------------------------------------- numbers

MEMORY = """
import json, sys
from agent.sources.kubeconfig import load
from agent.sources.kubernetes import Cluster
from agent.sources.store import Store

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4

kubeconfig, node, state, services = sys.argv[1:]
before = rss()
source = Cluster(load(kubeconfig, {}), node, Store(state, print), services=services == "yes")
meaning = source.look()
assert not meaning.services_unknown
told = {"before": before, "after": rss(), "kept": len(meaning.services)}
print(json.dumps({**told, "received": source.received}))
source.close()
"""


def test_a_thousand_services_take_little_memory(services: Services, tmp_path: Path) -> None:
    """Of which a tenth holds a port of every node."""
    noise = {"example.com/configuration": "x" * 2000}
    many = [
        service(f"s-{n}", None, type="ClusterIP" if n % 10 else "NodePort") for n in range(1000)
    ]
    for one in many:
        one["metadata"]["annotations"] |= noise
    credentials = load(str(services.cluster.kubeconfig()), {})

    def make(some: list[Json]) -> None:
        with closing(Api(credentials)) as api:
            for one in some:
                api.create(services.path, one)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, (many[start::4] for start in range(4))))
    words = (sys.executable, "-c", MEMORY, services.cluster.kubeconfig("portranger"))
    with_them, without = (
        json.loads(run(*words, services.node, tmp_path / answer, answer).stdout)
        for answer in ("yes", "no")
    )
    print(with_them, without)  # noqa: T201 - shown with -s
    assert with_them["received"] > 1000 * 2000
    assert 100 <= with_them["kept"] < 200
    cost = (with_them["after"] - with_them["before"]) - (without["after"] - without["before"])
    assert cost < 12 << 10
