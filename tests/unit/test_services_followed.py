"""What is left of Services and EndpointSlices, what they mean together, and what becomes of that
when a server answers late, in the wrong order, or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.sources import kubernetes, published
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.kubernetes import Cluster
from agent.sources.meaning import Meaning
from agent.sources.services import PATH as SERVICES
from agent.sources.services import heard, plain, trimmed, understood
from agent.sources.slices import LONGEST_SELECTOR, NAME, Slice, endpoints, selector
from agent.sources.slices import PATH as SLICES
from agent.sources.slices import heard as slice_heard
from agent.sources.slices import trimmed as slice_trimmed
from agent.sources.store import Store
from agent.sources.vmis import PATH as VMIS
from rules.ports import PortRange
from rules.services import Service, ServiceType
from tests.answering import answering, refused
from tests.scripted import Script, listed
from tests.spaces import eventually

Json = Any
NODE = "n1"
END = "portrange.alpha.kubernetes.io/port-end-"
IDENTITY = {"namespace": "ns", "name": "web", "uid": "u", "resourceVersion": "7"}


def service(name: str = "web", end: str | None = "10004", version: int = 7, **spec: Json) -> Json:
    """One that publishes a range, or a port, as a watch tells of it."""
    annotations = {f"{END}rtp": end} if end is not None else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            **IDENTITY,
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": str(version),
            "annotations": {**annotations, "kubectl.kubernetes.io/x": "y" * 1000},
            "managedFields": [{"fieldsV1": {"f:metadata": {}, "f:spec": {}}}],
        },
        "spec": {
            "type": "NodePort",
            "clusterIP": "10.96.0.7",
            "clusterIPs": ["10.96.0.7"],
            "internalTrafficPolicy": "Cluster",
            "selector": {"app": name},
            "ports": [
                {
                    "name": "rtp",
                    "protocol": "UDP",
                    "port": 10000,
                    "targetPort": 20000,
                    "nodePort": 30100,
                    "appProtocol": "x",
                }
            ],
            **spec,
        },
        "status": {"loadBalancer": {}},
    }


def slice_of(  # noqa: PLR0913 - what differs between them
    *backs: Json,
    of: str = "web",
    name: str = "web-1",
    port: Json = 20000,
    family: str = "IPv4",
    version: int = 8,
    ports: list[Json] | None = None,
) -> Json:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "ns",
            "name": name,
            "resourceVersion": str(version),
            "labels": {NAME: of, "other": "label"},
            "managedFields": [{"manager": "x"}],
        },
        "addressType": family,
        "ports": [{"name": "rtp", "protocol": "UDP", "port": port}] if ports is None else ports,
        "endpoints": list(backs),
    }


def back(address: str, node: str = NODE, **conditions: Json) -> Json:
    return {
        "addresses": [address, "192.0.2.99"],
        "nodeName": node,
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": "x"},
        "zone": "z",
    }


READY: Json = {"ready": True}
GONE: Json = {"ready": False}
LEAVING: Json = {"ready": False, "serving": True, "terminating": True}


def meant(thing: Json) -> Service:
    told = heard(trimmed(thing))
    assert told
    found, problems = understood(told)
    assert found, problems
    return found


def read_slice(thing: Json, *names: str) -> Slice:
    found = slice_heard(slice_trimmed(thing), NODE, names or ("web",))
    assert found
    return found


def behind(thing: Json, *slices: Json) -> list[tuple[str, ...]]:
    """For each port of a Service where it leads; a star marks what is on this node."""
    found = endpoints(meant(thing), [read_slice(one) for one in slices])
    return [
        tuple(f"{one.address}:{one.port}{'*' if one.local else ''}" for one in port)
        for port in found
    ]


# ------------------------------------------------------------------------------ what is left


def test_of_a_service_with_ranges_what_it_publishes_is_left() -> None:
    whole = service(
        sessionAffinity="ClientIP",
        externalTrafficPolicy="Local",
        externalIPs=["192.0.2.7"],
        healthCheckNodePort=31000,
    )
    whole["status"]["loadBalancer"]["ingress"] = [
        {"ip": "192.0.2.8", "ipMode": "VIP", "ports": []},
        {"ip": "192.0.2.9", "ipMode": "Proxy"},
        {"hostname": "x.example"},
    ]
    for told in (whole, listed(whole)):
        assert trimmed(told) == {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**IDENTITY, "uid": "u-web", "annotations": {f"{END}rtp": "10004"}},
            "spec": {
                "type": "NodePort",
                "selector": {"app": "web"},
                "sessionAffinity": "ClientIP",
                "externalTrafficPolicy": "Local",
                "externalIPs": ["192.0.2.7"],
                "ports": [
                    {
                        "name": "rtp",
                        "protocol": "UDP",
                        "port": 10000,
                        "targetPort": 20000,
                        "nodePort": 30100,
                    }
                ],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}},
        }
    found = meant(whole)
    [port] = found.ports
    assert (port.ports, port.target) == (PortRange(10000, 10004), PortRange(20000, 20004))
    assert (port.node_ports, port.ranged) == (PortRange(30100, 30104), True)
    assert (found.local, found.affinity) == (True, 10800)
    assert (found.external, found.ingress) == (
        (ip_address("192.0.2.7"),),
        (ip_address("192.0.2.8"),),
    )
    assert (str(found), found.origin) == ("Service/ns/web", "Service/ns/web:0")


def test_of_another_what_it_holds_of_a_node_is_left() -> None:
    told = trimmed(service(end=None))
    assert told["spec"] == {
        "type": "NodePort",
        "ports": [{"name": "rtp", "protocol": "UDP", "port": 10000, "nodePort": 30100}],
    }
    found = heard(told)
    assert found
    assert not found.annotated
    [port] = meant(service(end=None)).ports
    assert (port.node_ports, port.ranged) == (PortRange(30100, 30100), False)
    inside: Json = {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": False}
    assert not meant(service(end=None, **inside)).allocates
    elsewhere = service(type="ExternalName", externalName="x.example", ports=[])
    elsewhere["metadata"]["annotations"] = {}
    elsewhere["spec"]["externalIPs"] = ["192.0.2.7"]
    assert meant(elsewhere).type is ServiceType.EXTERNAL_NAME
    outside: Json = {"type": "ClusterIP", "ports": [{"port": 80}]}
    assert heard(trimmed(service(end=None, **outside, externalIPs=["192.0.2.7"])))


@pytest.mark.parametrize("node_port", [None, 0])
def test_of_most_services_nothing_is_left_but_their_names(node_port: int | None) -> None:
    ports = [{"port": 80} if node_port is None else {"port": 80, "nodePort": node_port}]
    told = trimmed(service(end=None, type="ClusterIP", ports=ports))
    assert told == {"metadata": {**IDENTITY, "uid": "u-web"}}
    assert heard(told) is None


def test_what_is_no_service_is_left_as_it_is() -> None:
    things: list[Json] = [
        {"kind": "ServiceList", "metadata": {"resourceVersion": "7"}, "items": []},
        {"kind": "Status", "metadata": {}, "code": 410},
        {"type": "ADDED", "object": {}},
        {"metadata": "text", "spec": "text"},
    ]
    for thing in things:
        assert trimmed(thing) == thing
        assert slice_trimmed(thing) == thing
    bookmark: Json = {
        "kind": "Service",
        "metadata": {"resourceVersion": "9"},
        "spec": {},
        "status": {},
    }
    assert trimmed(bookmark) == {"metadata": {"resourceVersion": "9"}}
    assert heard(trimmed(bookmark)) is None
    marked: Json = slice_trimmed(
        {"kind": "EndpointSlice", "metadata": {"resourceVersion": "9"}, "endpoints": None}
    )
    assert marked["metadata"]["resourceVersion"] == "9"
    assert slice_heard(marked, NODE, ("web", "None")) is None


def test_what_does_not_concern_us_makes_no_difference() -> None:
    other = service(version=9, ipFamilies=["IPv4"], clusterIP="10.96.0.9")
    other["status"]["conditions"] = [{"type": "x"}]
    told, again = heard(trimmed(service())), heard(trimmed(listed(other)))
    assert told
    assert again
    assert told.content == again.content
    assert again.reference.resource_version == "9"
    changed = heard(trimmed(service(selector={"app": "other"})))
    assert changed
    assert changed.content != told.content
    assert (told.reference.api_version, told.reference.kind) == ("v1", "Service")


def test_a_service_without_its_ranges_is_what_others_see() -> None:
    told = heard(trimmed(service(end="9")))
    assert told
    assert told.annotated
    found, [problem] = understood(told)
    assert found is None
    assert (problem.file, problem.line, problem.code) == ("Service/ns/web", 0, "end-before-start")
    instead = plain(told)
    assert instead
    assert [(one.node_ports, one.ranged) for one in instead.ports] == [
        (PortRange(30100, 30100), False)
    ]


# ---------------------------------------------------------------------------- who is behind it


@pytest.mark.parametrize(
    ("backs", "expected"),
    [
        ([], ()),
        ([{}, READY], ("10.0.0.1:20000*", "10.0.0.2:20000*")),
        ([{"ready": None}], ("10.0.0.1:20000*",)),
        ([GONE, READY], ("10.0.0.2:20000*",)),
        ([GONE], ()),
        ([LEAVING, READY], ("10.0.0.2:20000*",)),
        ([LEAVING, GONE], ("10.0.0.1:20000*",)),
        ([{**LEAVING, "serving": False}], ()),
        ([{"ready": False, "terminating": True}], ("10.0.0.1:20000*",)),
        ([{"ready": False, "serving": True}], ()),
    ],
)
def test_who_counts_is_as_with_kube_proxy(backs: list[Json], expected: tuple[str, ...]) -> None:
    told = [back(f"10.0.0.{number}", **one) for number, one in enumerate(backs, 1)]
    assert behind(service(), slice_of(*told)) == [expected]


def test_one_about_to_go_counts_where_nobody_else_of_its_family_is_ready() -> None:
    four = slice_of(back("10.0.0.1", **READY), back("10.0.0.2", **LEAVING))
    six = slice_of(back("2001:db8::1", **LEAVING), family="IPv6", name="web-6")
    assert behind(service(), four, six) == [("10.0.0.1:20000*", "2001:db8::1:20000*")]


def test_where_other_nodes_may_not_help_out_one_about_to_go_counts_here() -> None:
    told = slice_of(
        back("10.0.0.1", **LEAVING),
        back("10.0.0.2", "other", **READY),
        back("10.0.0.3", "other", **LEAVING),
    )
    assert behind(service(), told) == [("10.0.0.2:20000",)]
    local = service(externalTrafficPolicy="Local")
    assert behind(local, told) == [("10.0.0.1:20000*", "10.0.0.2:20000")]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "255.255.255.255", "0.1.2.3"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "ff02::1", "::ffff:10.0.0.1"),
        *("x.example", "", "10.0.0.1/32"),
    ],
)
def test_nobody_is_at_an_address_that_a_tenant_may_not_lead_to(address: str) -> None:
    family = "IPv6" if ":" in address else "IPv4"
    assert behind(service(), slice_of(back(address, **READY), family=family)) == [()]


def test_addresses_are_of_the_family_that_is_said() -> None:
    assert behind(service(), slice_of(back("2001:db8::1"), family="IPv4")) == [()]
    assert slice_heard(slice_trimmed(slice_of(family="FQDN")), NODE, ("web",)) is None
    odds: list[Json] = [{"addresses": []}, {"addresses": [7]}, {"addresses": None}, {}]
    for odd in odds:
        assert behind(service(), slice_of(odd)) == [()]


def test_the_port_of_the_same_name_and_protocol_says_the_number() -> None:
    ports = [
        {"name": "sip", "protocol": "UDP", "port": 5060, "targetPort": "sip", "nodePort": 30001},
        {"name": "web", "port": 80, "nodePort": 30002},
        {"name": "rtp", "protocol": "UDP", "port": 10000, "nodePort": 30100},
    ]
    told = [
        {"name": "rtp", "protocol": "UDP", "port": 40000},
        {"name": "sip", "protocol": "UDP", "port": 6000},
        {"name": "sip", "protocol": "TCP", "port": 6001},
        {"name": "web", "protocol": "UDP", "port": 8080},
        {"name": "web", "port": None},
        {"name": "web", "protocol": "QUIC", "port": 9},
    ]
    found = behind(service(ports=ports), slice_of(back("10.0.0.1"), ports=told))
    assert found == [("10.0.0.1:6000*",), (), ("10.0.0.1:40000*",)]
    unnamed: Json = {"ports": [{"port": 80, "nodePort": 30002}]}
    without = slice_of(back("10.0.0.1"), ports=[{"port": 8080}])
    assert behind(service(end=None, **unnamed), without) == [("10.0.0.1:8080*",)]


def test_a_range_that_would_run_past_the_last_port_is_left_out() -> None:
    fits, too_far = (slice_of(back("10.0.0.1"), port=port) for port in (65531, 65532))
    assert behind(service(), fits) == [("10.0.0.1:65531*",)]
    assert behind(service(), too_far) == [()]


def test_in_whatever_order_slices_are_told_they_mean_the_same() -> None:
    slices = [
        slice_of(back("10.0.0.9"), back("10.0.0.10", "other"), back("10.0.0.2", **GONE)),
        slice_of(back("10.0.0.10", "other"), back("10.0.0.2"), name="web-2"),
        slice_of(back("10.0.0.10", "other"), name="web-3", port=50),
        slice_of(back("2001:db8::a"), back("2001:db8::9"), name="web-4", family="IPv6"),
    ]
    expected = (
        "10.0.0.2:20000*",
        "10.0.0.9:20000*",
        "10.0.0.10:50",
        "10.0.0.10:20000",
        "2001:db8::9:20000*",
        "2001:db8::a:20000*",
    )
    for _ in range(20):
        random.shuffle(slices)
        assert behind(service(), *slices) == [expected]


def test_who_is_asked_for_is_named_as_long_as_that_is_not_too_long() -> None:
    assert selector({"b", "a"}) == f"{NAME} in (a,b)"
    many = {f"service-{number}" for number in range(1000)}
    assert len(selector(many)) < LONGEST_SELECTOR
    assert selector(many) == NAME
    assert slice_heard(slice_trimmed(slice_of(of="other")), NODE, many) is None


# ------------------------------------------------------------------------------- a whole source


class Followed:
    """A source, looked at as the daemon looks at it."""

    def __init__(self, script: Script, folder: Path, *, services: bool = True) -> None:
        credentials = Credentials(endpoint(script.server.url), Plain())
        store = Store(str(folder), print)
        self.source = Cluster(credentials, NODE, store, services=services)
        self.beats = 0
        self.look()

    def look(self) -> Meaning:
        return self.source.look(self._beat)

    def _beat(self) -> None:
        self.beats += 1

    @property
    def behind(self) -> dict[str, list[list[str]]]:
        """What is behind each Service that has a range, by its name."""
        told = self.source.meaning
        assert told.endpoints is not None
        return {
            one.name: [[str(place.address) for place in port] for port in told.endpoints[str(one)]]
            for one in told.services
            if any(port.ranged for port in one.ports)
        }

    def comes_to_know(self, count: int) -> bool:
        """Whether there come to be so many Services, whatever is behind them."""
        return eventually(lambda: self.source.heard() and len(self.look().services) == count)

    def comes_to(self, **expected: list[str]) -> bool:
        """Whether these come to be the ranged Services, with what is behind them; nothing but
        being woken makes us look."""

        def is_so() -> bool:
            if self.source.heard():
                self.look()
            return self.behind == {name: [places] for name, places in expected.items()}

        return eventually(is_so)


@pytest.fixture
def script() -> Iterator[Script]:
    with answering() as server:
        yield Script(server, {VMIS: [], SERVICES: [], SLICES: []})


@contextmanager
def following(script: Script, folder: Path, *, services: bool = True) -> Iterator[Followed]:
    made = Followed(script, folder, services=services)
    try:
        yield made
    finally:
        for event in script.held.values():
            event.set()
        made.source.close()


def test_the_first_look_knows_services_and_what_is_behind_them(
    script: Script, tmp_path: Path
) -> None:
    nothing = service("db", end=None, type="ClusterIP", ports=[{"port": 1}])
    script.lists[SERVICES] = [service(), service("plain", end=None), nothing]
    script.lists[SLICES] = [slice_of(back("10.0.0.1"))]
    with following(script, tmp_path) as followed:
        meaning = followed.source.meaning
        assert followed.behind == {"web": [["10.0.0.1"]]}
        assert list(map(str, meaning.services)) == ["Service/ns/plain", "Service/ns/web"]
        assert meaning.endpoints
        assert meaning.endpoints["Service/ns/plain"] == ((),)
        assert (meaning.unreadable, meaning.services_unknown, meaning.services_away) == ("", "", "")
        assert script.count("list", SLICES) == 1
        [query] = [q for what, path, q in script.asked if (what, path) == ("list", SLICES)]
        assert query["labelSelector"] == f"{NAME} in (web)"


def test_where_they_are_not_wanted_nothing_is_asked(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path, services=False) as followed:
        told = followed.source.meaning
        assert (told.services, told.endpoints, told.services_unknown) == ((), {}, "")
        assert followed.source.reference("Service/ns/web") is None
        assert {path for _, path, _ in script.asked} == {VMIS}


def test_where_nobody_has_a_range_no_slice_is_asked_for(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service("plain", end=None)]
    with following(script, tmp_path) as followed:
        assert followed.source.meaning.services_unknown == ""
        script.tell(SERVICES, "ADDED", service("other", end=None))
        assert eventually(lambda: followed.source.heard() and len(followed.look().services) == 2)
        assert script.count("list", SLICES) == 0


def test_what_concerns_nobody_wakes_nobody(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=[])
        while followed.source.heard():
            followed.look()
        beats = followed.beats
        db = service("db", end=None, type="ClusterIP", ports=[{"port": 1}])
        script.tell(SERVICES, "ADDED", db)
        script.tell(SERVICES, "MODIFIED", service(version=11))
        script.tell(SERVICES, "DELETED", db)
        assert eventually(
            lambda: (
                (known := followed.source.reference("Service/ns/web")) is not None
                and known.resource_version == "11"
            )
        )
        assert not followed.source.heard()
        script.tell(SERVICES, "MODIFIED", service(version=12, end="10001"))
        assert eventually(followed.source.heard)
        assert followed.look().services[0].ports[0].ports == PortRange(10000, 10001)
        assert followed.beats == beats + 1


def test_what_is_known_goes_on_until_the_new_list_is_there(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RELIEF", 0.0)
    script.lists[SERVICES] = [service()]
    script.lists[SLICES] = [slice_of(back("10.0.0.1"))]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=["10.0.0.1"])
        script.tell(SLICES, "BOOKMARK", slice_of(version=77))
        script.tell(SLICES, "MODIFIED", slice_of(back("10.0.0.9"), version=77))
        assert followed.comes_to(web=["10.0.0.9"])
        script.held[SLICES] = threading.Event()
        script.tell(SERVICES, "ADDED", service("sip", version=80))
        assert eventually(lambda: followed.source.heard() and len(followed.look().services) == 2)
        assert eventually(lambda: script.count("list", SLICES) == 2)
        assert followed.behind == {"web": [["10.0.0.9"]]}  # of the other it is not known yet
        script.tell(SLICES, "MODIFIED", slice_of(back("10.0.0.3"), version=81))
        assert followed.comes_to(web=["10.0.0.3"])  # who is to be relieved still listens
        meaning = followed.source.meaning
        assert (meaning.services_unknown, meaning.services_away) == ("", "")
        assert [port.ranged for one in meaning.services for port in one.ports] == [False, True]
        script.lists[SLICES] = [
            slice_of(back("10.0.0.3")),
            slice_of(back("10.0.0.4"), of="sip", name="sip-1"),
        ]
        script.held[SLICES].set()
        assert followed.comes_to(sip=["10.0.0.4"], web=["10.0.0.3"])
        query = [q for what, path, q in script.asked if (what, path) == ("list", SLICES)][-1]
        assert query["labelSelector"] == f"{NAME} in (sip,web)"
        assert (query["resourceVersion"], query["resourceVersionMatch"]) == ("77", "NotOlderThan")


def test_services_that_come_and_go_in_haste_are_asked_for_once_in_a_while(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RELIEF", 0.5)
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path) as followed:
        for number in range(20):
            script.tell(SERVICES, "ADDED", service(f"s-{number}", version=20 + number))
            assert followed.comes_to_know(number + 2)
        names = {f"s-{number}": list[str]() for number in range(20)}
        assert followed.comes_to(web=[], **names)
        assert 2 <= script.count("list", SLICES) <= 4
        assert followed.source.due is None
        requests = followed.source.requests
        for name in ("web", *names):
            script.tell(SERVICES, "DELETED", service(name, version=99))
        assert followed.comes_to()
        assert eventually(lambda: followed.source.requests >= requests)
        assert followed.source.meaning.services_unknown == ""


def test_a_denied_list_of_services_is_no_concern_of_machines(
    script: Script, tmp_path: Path
) -> None:
    script.lists[VMIS] = [
        {"kind": "VirtualMachineInstance", "metadata": {**IDENTITY, "name": "vm"}, "spec": {}}
    ]
    script.lists[SERVICES] = [service()]
    script.refusals[SERVICES] = [refused(403, "services is forbidden")]
    with following(script, tmp_path) as followed:
        told = followed.source.meaning
        assert (told.unreadable, told.count) == ("", 1)
        assert (told.services, told.endpoints) == ((), {})
        assert "services is forbidden" in told.services_unknown
        assert "Let the agent's service account list services in" in told.services_unknown
        assert followed.comes_to(web=[])
        assert followed.source.meaning.services_unknown == ""


def test_a_server_that_says_nothing_of_services_is_waited_for_no_longer_than_for_machines(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "FIRST", 0.3)
    script.held[SERVICES] = threading.Event()
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path) as followed:
        told = followed.source.meaning
        assert "were not listed yet" in told.services_unknown
        assert told.unreadable == ""
        script.held[SLICES] = threading.Event()
        script.held[SERVICES].set()
        assert eventually(followed.source.heard)
        told = followed.look()
        assert (told.services, told.endpoints) == ((), {})  # nor what is behind them
        assert "were not listed yet" in told.services_unknown
        script.held[SLICES].set()
        assert followed.comes_to(web=[])


def test_where_slices_are_denied_what_was_known_goes_on(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service()]
    script.refusals[SLICES] = [refused(403, "no slices for you")] * 2
    with following(script, tmp_path) as followed:
        told = followed.source.meaning
        assert "no slices for you" in told.services_unknown
        assert "list endpointslices.discovery.k8s.io in" in told.services_unknown
        assert told.services == ()
        assert followed.comes_to(web=[])
        script.tell(SLICES, "ADDED", slice_of(back("10.0.0.1")))
        assert followed.comes_to(web=["10.0.0.1"])
        script.refusals[SLICES] = [refused(403, "not any more")] * 2
        script.end(SLICES)
        assert eventually(
            lambda: followed.source.heard() and "not any more" in followed.look().services_away
        )
        assert followed.source.meaning.services_unknown == ""
        assert followed.behind == {"web": [["10.0.0.1"]]}
        assert eventually(lambda: followed.source.heard() and not followed.look().services_away)


def test_a_version_that_the_server_has_forgotten_is_listed_anew(
    script: Script, tmp_path: Path
) -> None:
    script.lists[SERVICES] = [service()]
    script.lists[SLICES] = [slice_of(back("10.0.0.1"))]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=["10.0.0.1"])
        script.lists[SLICES] = [slice_of(back("10.0.0.2"))]
        script.tell(SLICES, "ERROR", {"code": 410})
        assert followed.comes_to(web=["10.0.0.2"])
        script.lists[SERVICES] = [service(), service("sip")]
        script.tell(SERVICES, "ERROR", {"code": 410})
        assert followed.comes_to(sip=[], web=["10.0.0.2"])
        queries = [q["resourceVersion"] for what, path, q in script.asked
                   if (what, path) == ("list", SERVICES)]  # fmt: skip
        assert queries == ["0", ""]


@pytest.mark.parametrize("wrong", [{f"{END}rtp": "9"}, {f"{END[:-5]}-rtp": "10004"}])
def test_what_turns_bad_goes_on_as_it_was_and_what_is_new_is_plain(
    script: Script, tmp_path: Path, wrong: Json
) -> None:
    script.lists[SERVICES] = [service()]
    script.lists[SLICES] = [slice_of(back("10.0.0.1"))]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=["10.0.0.1"])
        bad, new = service(version=11), service("new", version=12)
        for one in (bad, new):
            one["metadata"]["annotations"] = wrong
            script.tell(SERVICES, "MODIFIED", one)
        assert eventually(lambda: followed.source.heard() and len(followed.look().problems) == 2)
        told = followed.source.meaning
        assert told.held == ("Service/ns/web",)
        assert sorted(one.file for one in told.problems) == ["Service/ns/new", "Service/ns/web"]
        assert followed.comes_to(web=["10.0.0.1"])
        [plainly] = [one for one in followed.source.meaning.services if one.name == "new"]
        assert plainly.ports[0].node_ports == PortRange(30100, 30100)
        script.tell(SERVICES, "MODIFIED", service(version=13, end=None))
        assert followed.comes_to()
        script.tell(SERVICES, "MODIFIED", bad)
        assert eventually(lambda: followed.source.heard() and len(followed.look().problems) == 2)
        assert followed.source.meaning.held == ("Service/ns/web",)
        assert followed.behind == {}  # what it last meant was no range
        again = service(version=14)
        again["metadata"] |= {"uid": "another", "annotations": wrong}
        script.tell(SERVICES, "MODIFIED", again)
        assert eventually(lambda: followed.source.heard() and not followed.look().held)


def test_on_request_services_are_read_again(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service(), service("plain", end=None)]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=[])
        for renew, expected in ((False, 0), (True, 2), (False, 0)):
            if renew:
                followed.source.renew()
            followed.beats = 0
            followed.look()
            assert followed.beats == expected
        assert followed.behind == {"web": [[]]}


def test_a_name_of_a_machine_is_none_of_a_service(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path) as followed:
        found = followed.source._published
        assert found
        assert found.reference("VirtualMachineInstance/ns/web") is None
        reference = found.reference("Service/ns/web")
        assert reference
        assert (reference.kind, reference.uid) == ("Service", "u-web")


def test_it_stops_at_once_whatever_it_waits_for(script: Script, tmp_path: Path) -> None:
    script.lists[SERVICES] = [service()]
    with following(script, tmp_path) as followed:
        assert followed.comes_to(web=[])
        script.held[SLICES] = threading.Event()
        script.tell(SERVICES, "ADDED", service("sip", version=80))

        def is_waiting() -> bool:
            if followed.source.heard():
                followed.look()
            return script.count("list", SLICES) == 2

        assert eventually(is_waiting)
        found = followed.source._published
        assert found
        began = time.monotonic()
        found.ears.interrupt()
        assert found.ears.ended(5.0)
        assert time.monotonic() - began < 5.0
