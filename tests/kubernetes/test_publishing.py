"""Services of a real API server, published by the whole agent on a node with machines behind it:
what is written there is reached here, with packets. There are no controllers and no kube-proxy:
what they would write, a test writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rules.model import FORWARDED, NODE, Chain, Family, Protocol
from tests.daemon.running import Running, comes_to_forward, handles
from tests.datapath.publishing import (
    AT,
    FLOWS,
    FROM,
    TCP,
    UDP,
    Flow,
    answerers,
    asking,
    flow_to,
    serving,
)
from tests.kubernetes.agents import USER, Agents, agents, comes_to_say, events, launched
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import EVENTS, RIGHTS, SERVICES, SLICES, Machines, instance
from tests.nodes import CLIENT4, CLIENT6, NODE4, Net, asked, net
from tests.spaces import NFTABLES, eventually, ip, nft, observed, pod, space, unused_name, within

Json = Any

PATIENCE = 10.0  # seconds
END = "portrange.alpha.kubernetes.io/port-end-"
PORT, TARGET, COUNT = 10000, 20000, 5  # the first of the Service's, and of the machines'
NAMES = {UDP: "rtp", TCP: "data"}  # of the ports
SERVED = [(protocol, TARGET + number) for protocol in FORWARDED for number in range(10)]
FAR = "198.51.100.3"  # a pod on another node, in that node's own network
STRANGE = "192.0.2.7"  # an address of nobody, to which the node is the client's way


# ------------------------------------------------------------------------------------- the node


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    """Two pods behind the node, `one` and `two`, and `far`, a pod on another node; that one is
    beside the client, and answers it without asking our node."""
    with net(2) as made, space() as other, ExitStack() as stack:
        ip(
            made.client,
            "link add br0 type bridge mcast_snooping 0",
            "addr flush dev eth0",
            "link set eth0 master br0",
            f"addr add {CLIENT4}/24 dev br0",
            f"addr add {CLIENT6}/64 dev br0 nodad",
            "link set br0 up",
            f"route add {STRANGE}/32 via {NODE4}",
            f"link add other type veth peer name eth0 netns {other}",
            "link set other master br0 up",
        )
        ip(
            other,
            "link set lo up",
            f"addr add {FAR}/24 dev eth0",
            "link set eth0 up",
        )
        for name in (made.node, other, *(vm.pod for vm in made.vms)):
            # Whoever asks for a closed port is told so each time: else that is waited for.
            names = ("net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
            within(name, "sysctl", "-qw", *names)
        for name, where in (("one", made.vms[0].pod), ("two", made.vms[1].pod), ("far", other)):
            stack.enter_context(serving(where, name, SERVED))
        yield made


@pytest.fixture
def node(cluster: Cluster, lab: Net, tmp_path: Path) -> Iterator[Agents]:
    """Its agents publish, and nothing of them is left."""
    try:
        with agents(cluster, tmp_path, unused_name(), services=True, netns=lab.node) as made:
            yield made
    finally:
        for name in (lab.node, *(vm.pod for vm in lab.vms)):
            nft(name, "flush ruleset")


@pytest.fixture
def services(cluster: Cluster, namespace: str, node: Agents, lab: Net) -> Services:
    return Services(cluster, namespace, node.name, lab)


class Services:
    """In one namespace of a cluster, with what is behind them, as seen from the client."""

    def __init__(self, cluster: Cluster, namespace: str, node: str, lab: Net) -> None:
        self.cluster, self.namespace, self.node, self.lab = cluster, namespace, node, lab
        self.path = f"/api/v1/namespaces/{namespace}/services"
        self.slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    # ------------------------------------------------------------------------- what is written

    def make(
        self,
        name: str,
        *,
        ranged: tuple[Protocol, ...] = FORWARDED,
        ports: tuple[Protocol, ...] = FORWARDED,
        at: int = 0,
        **spec: Json,
    ) -> int:
        """Both protocols, with a range each unless told otherwise; the node port that both have,
        which the API server gives unless one is wished for."""
        listed = [
            {
                "name": NAMES[protocol],
                "protocol": protocol.name,
                "port": PORT,
                "targetPort": TARGET,
                **({"nodePort": at} if at else {}),
            }
            for protocol in ports
        ]
        ends = {f"{END}{NAMES[protocol]}": str(PORT + COUNT - 1) for protocol in ranged}
        document = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "annotations": ends},
            "spec": {"type": "NodePort", "selector": {"app": name}, "ports": listed, **spec},
        }
        made = self.cluster.ask("POST", self.path, document)
        given = {port.get("nodePort", 0) for port in made["spec"]["ports"]}
        assert len(given) == 1, given
        return int(given.pop())

    def lengthen(self, name: str, last: int | None) -> None:
        """Both ranges end there; None: there are none any more."""
        end = None if last is None else str(last)
        ends = {f"{END}{port}": end for port in NAMES.values()}
        self.change(name, {"metadata": {"annotations": ends}})

    def change(self, name: str, changes: Json) -> None:
        self.cluster.ask("PATCH", f"{self.path}/{name}", changes)

    def remove(self, name: str) -> None:
        self.cluster.ask("DELETE", f"{self.path}/{name}")

    def put(self, of: str, *backs: Json, family: Family = Family.IP) -> None:
        """What is behind a Service."""
        called = f"{of}-{family.value}"
        document = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": called, "labels": {"kubernetes.io/service-name": of}},
            "addressType": {Family.IP: "IPv4", Family.IP6: "IPv6"}[family],
            "ports": [
                {"name": name, "protocol": protocol.name, "port": TARGET}
                for protocol, name in NAMES.items()
            ],
            "endpoints": list(backs),
        }
        self.cluster.ask("APPLY", f"{self.slices}/{called}", document)

    def put_machines(self, of: str, *ready: bool) -> None:
        """The first, and maybe the second machine, in both families."""
        for family in Family:
            backs = [
                self.back(vm.address if family is Family.IP else vm.address6, ready=one)
                for vm, one in zip(self.lab.vms, ready, strict=False)
            ]
            self.put(of, *backs, family=family)

    def back(self, address: str, *, here: bool = True, ready: bool = True) -> Json:
        name = self.node if here else "elsewhere"
        return {"addresses": [address], "nodeName": name, "conditions": {"ready": ready}}

    # -------------------------------------------------------------------------- what comes of it

    def owner(self, name: str, protocol: Protocol = UDP) -> str:
        return f"Service/{self.namespace}/{name}/{NAMES[protocol]}"

    @property
    def published(self) -> dict[str, str]:
        """What the node's kernel publishes, by its owner."""
        return {
            live.rule.owner: str(live.rule.ports)
            for live in observed(self.lab.node, NFTABLES).live
            if live.rule.chain is Chain.PREROUTING
        }

    def are(self, **runs: int) -> None:
        """Whether both protocols of these, and nothing else, come to be published from there."""
        wanted = {
            self.owner(name, protocol): f"{first}-{first + COUNT - 1}"
            for name, first in runs.items()
            for protocol in FORWARDED
        }
        assert eventually(lambda: self.published == wanted, PATIENCE), self.published

    def lead_to(self, *addresses: str) -> None:
        """Whether all that is published comes to lead to these, and nowhere else."""

        def found() -> set[str]:
            rules = [live.rule for live in observed(self.lab.node, NFTABLES).live]
            return {str(rule.to) for rule in rules if rule.chain is Chain.PREROUTING}

        assert eventually(lambda: found() == set(addresses), PATIENCE), found()

    def ask(self, protocol: Protocol, port: int, to: str = NODE4) -> str:
        return asked(self.lab.client, protocol, to, port)

    def flow(self, who: str, protocol: Protocol, port: int, family: Family = Family.IP) -> Flow:
        return flow_to(who, self.lab.client, protocol, AT[family], port)


def standing(daemon: Running, state: str, *words: str) -> bool:
    """Whether the node comes to stand so, with these words among its notes and reasons."""

    def told() -> bool:
        found = daemon.standing(NODE)
        text = "\n".join([found.get("why") or "", *found.get("notes", ())])
        return found.get("state") == state and all(one in text for one in words)

    return eventually(told, PATIENCE)


def is_in_trouble(daemon: Running) -> bool:
    """Whether it says why it does not hear of Services."""
    return any(note.startswith("Services: ") for note in daemon.standing(NODE)["notes"])


# ----------------------------------------------------------------------------------- what is said


def test_a_run_is_reached_one_to_one_and_its_endpoints_come_and_go(
    services: Services, node: Agents, lab: Net
) -> None:
    first = services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running() as daemon, ExitStack() as stack:
        services.are(phone=first)
        for family, protocol in FLOWS:
            answers = [services.ask(protocol, first + n, AT[family]) for n in range(-1, COUNT + 1)]
            led = [f"one {TARGET + number} {FROM[family]}" for number in range(COUNT)]
            assert answers == ["", *led, ""], (family, protocol)

        services.put_machines("phone", True, True)
        one, two = lab.vms
        services.lead_to(one.address, one.address6, two.address, two.address6)
        for family, protocol in FLOWS:
            heard = answerers(lab.client, protocol, AT[family], first + 2, 60)
            assert min(map(heard.count, ("one", "two"))) > 10, heard

        staying = [services.flow("one", protocol, first + 1, of) for of, protocol in FLOWS]
        going = [services.flow("two", protocol, first + 1, of) for of, protocol in FLOWS]
        for flow in (*staying, *going):
            stack.enter_context(closing(flow))
        with asking(*staying) as answers_of:
            services.put_machines("phone", True, False)
            for (_, protocol), flow in zip(FLOWS, going, strict=True):
                if protocol is UDP:
                    assert eventually(lambda flow=flow: flow.who == "one", PATIENCE)  # type: ignore[misc]
                else:
                    assert flow.is_cut()
            for family, protocol in FLOWS:
                heard = answerers(lab.client, protocol, AT[family], first + 2, 20)
                assert set(heard) == {"one"}
        assert answers_of == [{f"one {TARGET + 1} {FROM[family]}"} for family, _ in FLOWS]
        assert standing(daemon, "in sync")


def test_an_edit_takes_effect_while_flows_go_on(services: Services, node: Agents) -> None:
    first = services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running(), ExitStack() as stack:
        services.are(phone=first)

        def flows(port: int) -> list[Flow]:
            made = [services.flow("one", protocol, port, family) for family, protocol in FLOWS]
            return [stack.enter_context(closing(flow)) for flow in made]

        staying, going = flows(first + 1), flows(first + 4)
        with asking(*staying) as answers:
            services.lengthen("phone", PORT + 9)
            last = f"one {TARGET + 9} {CLIENT4}"
            for protocol in FORWARDED:
                assert eventually(lambda of=protocol: services.ask(of, first + 9) == last)  # type: ignore[misc]
            assert {flow.ask() for flow in going} == {
                f"one {TARGET + 4} {one}" for one in FROM.values()
            }
            services.lengthen("phone", PORT + 2)
            assert all(flow.is_cut() for flow in going)
            for protocol in FORWARDED:
                assert services.ask(protocol, first + 2) == f"one {TARGET + 2} {CLIENT4}"
                assert services.ask(protocol, first + 3) == ""
        assert answers == [{f"one {TARGET + 1} {FROM[family]}"} for family, _ in FLOWS]
        services.lengthen("phone", None)
        services.are()
        assert all(flow.is_cut() for flow in staying)


def test_status_follows_what_is_published_and_says_if_nothing_is_heard(
    services: Services, node: Agents, lab: Net
) -> None:
    services.make("phone")
    services.put_machines("phone", True)
    one, two = lab.vms
    with node.daemons.running() as daemon:
        services.lead_to(one.address, one.address6)
        services.put_machines("phone", False, True)
        services.lead_to(two.address, two.address6)
        led = {two.address, two.address6}
        assert eventually(lambda: {at["to"] for at in daemon.standing(NODE)["ranges"]} == led)
        services.cluster.kill_apiserver()
        assert standing(daemon, "in sync", "Services: ")


# ---------------------------------------------------------------------------- what others have

KUBE_PROXY = """
table ip kube-proxy {{
    chain service-two {{
        dnat to 10.1.0.12
    }}
    map no-endpoint-nodeports {{
        type inet_proto . inet_service : verdict
    }}
    map service-nodeports {{
        type inet_proto . inet_service : verdict
        elements = {{ {elements} }}
    }}
    chain services {{
        fib daddr type local meta l4proto . th dport vmap @service-nodeports
    }}
    chain nat-prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        jump services
    }}
}}
"""


def test_ports_without_a_range_are_left_to_kube_proxy(services: Services, node: Agents) -> None:
    first = services.make("phone", ranged=(UDP,))
    plain = services.make("web", ranged=(), at=30010)  # where none is given
    for name in ("phone", "web"):
        services.put_machines(name, True)
    with node.daemons.running() as daemon:
        run = {services.owner("phone"): f"{first}-{first + COUNT - 1}"}
        assert eventually(lambda: services.published == run), services.published
        assert standing(daemon, "in sync")
        left = [(TCP, first), (TCP, plain), (UDP, plain)]
        assert [services.ask(*each) for each in left] == ["", "", ""]
        # It serves the first of each run, too, and leads to another machine.
        mine = [*left, (UDP, first)]
        elements = ", ".join(f"{of.value} . {port} : goto service-two" for of, port in mine)
        nft(services.lab.node, KUBE_PROXY.format(elements=elements))
        with serving(services.lab.vms[1].pod, "proxied", left):
            for protocol, port in left:
                assert services.ask(protocol, port) == f"proxied {port} {CLIENT4}"
        assert services.ask(UDP, first) == f"one {TARGET} {CLIENT4}"
    nft(services.lab.node, "delete table inet portranger")
    with node.daemons.running() as daemon:  # which finds kube-proxy's rules there
        assert eventually(lambda: services.published == run), daemon.standing(NODE)
        assert standing(daemon, "in sync")
        assert services.ask(UDP, first) == f"one {TARGET} {CLIENT4}"


def test_a_port_that_is_released_to_somebody_else_is_an_event_on_the_service(
    services: Services, node: Agents
) -> None:
    """As by a hostPort: the rest of the run goes on."""
    machines = Machines(services.cluster, services.namespace)
    first = services.make("phone", ranged=(UDP,), ports=(UDP,))
    services.put_machines("phone", True)
    with node.daemons.running() as daemon, serving(services.lab.node, "pod", [(UDP, 8080)]):
        assert eventually(lambda: bool(services.ask(UDP, first + 2)), PATIENCE)
        rule = f"udp dport {first + 2} redirect to :8080"
        chain = "type nat hook prerouting priority dstnat;"
        nft(services.lab.node, f"table ip hostports {{\nchain p {{\n{chain} {rule}\n}}\n}}")
        why = f"udp {first + 2} is left out: table ip hostports, chain p"
        assert standing(daemon, "conflict", why)
        assert comes_to_say(machines, "phone", "PortsConflict", why)
        assert services.ask(UDP, first + 2).startswith("pod 8080 ")
        assert services.ask(UDP, first + 3) == f"one {TARGET + 3} {CLIENT4}"
        [event] = [one for one in events(machines, "phone") if why in one["message"]]
        assert event["type"] == "Warning"
        assert event["involvedObject"]["kind"] == "Service"

        nft(services.lab.node, "delete table ip hostports")
        assert standing(daemon, "in sync")
        assert services.ask(UDP, first + 2) == f"one {TARGET + 2} {CLIENT4}"


def test_a_run_never_takes_the_node_port_of_another_service(
    services: Services, node: Agents
) -> None:
    """Whichever was there first: the API server gave that port away."""
    machines = Machines(services.cluster, services.namespace)
    taken = services.make("web", ranged=())
    first = services.make("phone", at=taken - 2)  # which comes first in order of names
    services.put_machines("phone", True)
    holder = f"Service/{services.namespace}/web"
    with node.daemons.running() as daemon:
        assert standing(daemon, "conflict", services.owner("phone"), str(taken), holder)
        refused = {one["owner"] for one in daemon.standing(NODE)["refused"]}
        assert refused == {services.owner("phone", protocol) for protocol in FORWARDED}
        assert services.published == {}
        assert comes_to_say(machines, "phone", "PortsConflict", holder)
        assert not events(machines, "web")
        assert services.ask(UDP, first) == ""

        services.remove("web")
        services.are(phone=first)
        assert standing(daemon, "in sync")
        assert services.ask(UDP, taken) == f"one {TARGET + 2} {CLIENT4}"

        services.make("web", ranged=(), at=taken)
        services.are()
        assert standing(daemon, "conflict", holder)
        assert services.ask(UDP, taken) == ""
        services.remove("phone")
        assert standing(daemon, "in sync")


def test_a_port_leads_only_to_machines_of_this_node_that_declare_its_target(
    services: Services, node: Agents
) -> None:
    """The first is no machine that we know of, and gets everything; of the second the guest
    answers, as what it declares is forwarded."""
    machines, second = Machines(services.cluster, services.namespace), services.lab.vms[1]
    first = services.make("phone", ranged=(UDP,), ports=(UDP,))
    services.put_machines("phone", True, True)
    made = instance("vm", node.name, f"{TARGET}-{TARGET + 1}/udp")

    def are_answered(port: int, *by: str) -> bool:
        """Whether new flows come to be answered by these; those of before are flushed a moment
        after the rules have changed."""
        found = (services.lab.client, UDP, NODE4, port, 30)
        return eventually(lambda: set(answerers(*found)) == {*by}, PATIENCE)

    with (
        launched(node, machines, made, second.pod),
        serving(second.guest, "guest", SERVED),
        node.daemons.running() as daemon,
    ):
        assert comes_to_forward(second.pod, f"udp {TARGET}-{TARGET + 1}")
        left = f"udp {TARGET + 2}-{TARGET + 4}"
        who_not = f"VirtualMachineInstance/{services.namespace}/vm"
        assert standing(daemon, "in sync", f"{left} not forwarded by {who_not}")
        assert are_answered(first + 1, "one", "guest")
        assert are_answered(first + 2, "one")

        services.put_machines("phone", False, True)
        why = f"udp {first + 2}-{first + 4} is left out: no backend declares {left}"
        assert standing(daemon, "conflict", why)
        assert comes_to_say(machines, "phone", "PortsConflict", why)
        assert are_answered(first, "guest")
        assert are_answered(first + 2, "")

        machines.annotate("vm", port_ranges="22")
        why = f"udp {first}-{first + 4} cannot be published: no backend declares udp"
        assert standing(daemon, "conflict", why)
        assert comes_to_say(machines, "phone", "PortsConflict", why)
        assert services.published == {}

        machines.annotate("vm", port_ranges=f"{TARGET}-{TARGET + 4}/udp")
        assert standing(daemon, "in sync")
        assert are_answered(first + 4, "guest")


def test_only_addresses_of_the_node_are_served(services: Services, node: Agents, lab: Net) -> None:
    external = [NODE4, STRANGE]
    services.make("phone", type="ClusterIP", externalIPs=external)
    services.put_machines("phone", True)

    def reached(to: str) -> list[str]:
        return [services.ask(UDP, PORT, to), services.ask(TCP, PORT + COUNT - 1, to)]

    answers = [f"one {TARGET} {CLIENT4}", f"one {TARGET + COUNT - 1} {CLIENT4}"]
    with node.daemons.running() as daemon:
        services.are(phone=PORT)
        assert reached(NODE4) == answers
        assert reached(STRANGE) == ["", ""]
        assert standing(daemon, "in sync", f"{STRANGE} is not the node's")
        destinations = {
            str(live.rule.destination)
            for live in observed(lab.node, NFTABLES).live
            if live.rule.chain in (Chain.PREROUTING, Chain.OUTPUT)
        }
        assert destinations == {NODE4}
        ip(lab.node, f"addr add {STRANGE}/32 dev lo")
        try:
            assert eventually(lambda: reached(STRANGE) == answers, PATIENCE)
        finally:
            ip(lab.node, f"addr del {STRANGE}/32 dev lo")
        assert eventually(lambda: reached(STRANGE) == ["", ""], PATIENCE)
        assert reached(NODE4) == answers


# ----------------------------------------------------------------------------------- other nodes


def test_an_endpoint_on_another_node_sees_this_one(services: Services, node: Agents) -> None:
    """So that its answers come back this way; and where only endpoints of this node may be, they
    see the client itself."""
    first = services.make("phone")
    one, two = (vm.address for vm in services.lab.vms)
    away = [services.back(address, here=False) for address in (two, FAR)]
    services.put("phone", services.back(one), *away)

    def heard(protocol: Protocol) -> set[str]:
        return {services.ask(protocol, first + 3) for _ in range(40)}

    port = TARGET + 3
    alone = {f"one {port} {CLIENT4}"}
    everybody = alone | {f"two {port} 10.1.0.1", f"far {port} {NODE4}"}
    with node.daemons.running():
        services.are(phone=first)
        for protocol in FORWARDED:
            assert heard(protocol) == everybody
        with closing(services.flow("far", UDP, first)) as gone:
            services.change("phone", {"spec": {"externalTrafficPolicy": "Local"}})
            assert eventually(lambda: gone.who == "one", PATIENCE)
        for protocol in FORWARDED:
            assert heard(protocol) == alone
        services.put("phone", *away)  # nobody is here: nobody is asked
        services.are()
        assert services.ask(UDP, first) == ""
        services.change("phone", {"spec": {"externalTrafficPolicy": "Cluster"}})
        services.are(phone=first)
        assert heard(TCP) == everybody - alone


def has_table(netns: str) -> bool:
    return "table inet portranger" in within(netns, "nft", "list", "tables")


def test_where_services_are_switched_off_what_was_published_goes(
    services: Services, node: Agents
) -> None:
    services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running() as daemon:
        assert eventually(lambda: has_table(node.daemons.home), PATIENCE)
        node.daemons.configure(**{"kubernetes.services": False})
        daemon.reload()
        assert eventually(lambda: not has_table(node.daemons.home), PATIENCE)
        assert not daemon.standing(NODE)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same network", "network of a pod"])
def test_an_agent_that_starts_without_services_removes_what_was_published(
    services: Services, node: Agents, elsewhere: bool
) -> None:
    """Without the component it is no longer in the network of the node, but sees its process 1."""
    services.make("phone")
    services.put_machines("phone", True)
    home = node.daemons.home
    with node.daemons.running():
        assert eventually(lambda: has_table(home), PATIENCE)
    assert has_table(home), "an update takes no rule away"
    node.daemons.configure(**{"kubernetes.services": False})
    with ExitStack() as stack:
        if elsewhere:
            node.daemons.home = stack.enter_context(space())
            stack.enter_context(services.cluster.reachable_from(node.daemons.home))
        stack.enter_context(node.daemons.running())
        assert eventually(lambda: not has_table(home), PATIENCE)


# -------------------------------------------------------------------------------------- troubles


def test_without_the_right_to_services_machines_are_served_and_what_is_published_stays(
    services: Services, node: Agents
) -> None:
    cluster, lab = services.cluster, services.lab
    machines = Machines(cluster, services.namespace)
    first, made = services.make("phone"), instance("vm", node.name, "22")
    services.put_machines("phone", True)
    with node.daemons.running():
        services.are(phone=first)
    before = handles(lab.node)
    cluster.grant(USER, RIGHTS, EVENTS)

    def complains(words: str) -> bool:
        return any(words in str(one["why"]) for one in daemon.said("services away"))

    with (
        pod() as netns,
        launched(node, machines, made, netns),
        node.daemons.running() as daemon,
        closing(services.flow("one", UDP, first)) as flow,
        asking(flow) as answers,
    ):
        assert comes_to_forward(netns, "tcp 22")
        assert standing(daemon, "in sync", "Let the agent's service account list services")
        assert handles(lab.node) == before
        assert services.ask(TCP, first) == f"one {TARGET} {CLIENT4}"

        cluster.grant(USER, RIGHTS, EVENTS, SERVICES)
        assert eventually(lambda: complains("account list endpointslices.discovery"), 60)
        assert handles(lab.node) == before
        machines.annotate("vm", port_ranges="23")
        assert comes_to_forward(netns, "tcp 23")

        cluster.grant(USER, RIGHTS, EVENTS, SERVICES, SLICES)
        services.put_machines("phone", True, True)
        assert eventually(lambda: services.ask(UDP, first).startswith("two "), 60)
        machines.annotate("vm", port_ranges="24")
        assert comes_to_forward(netns, "tcp 24")
        assert eventually(lambda: not is_in_trouble(daemon), PATIENCE), daemon.standing(NODE)
    assert answers == [{f"one {TARGET} {CLIENT4}"}]


def test_without_an_api_server_what_is_published_goes_on_and_is_repaired(
    services: Services, node: Agents
) -> None:
    cluster, lab = services.cluster, services.lab
    first = services.make("phone")
    services.put_machines("phone", True)
    drop = "delete table inet portranger"

    def is_served() -> bool:
        return all(services.ask(of, first) == f"one {TARGET} {CLIENT4}" for of in FORWARDED)

    with node.daemons.running() as daemon, closing(services.flow("one", TCP, first)) as flow:
        services.are(phone=first)
        with asking(flow) as answers:
            cluster.kill_apiserver()
            assert daemon.says("services away")
            assert is_served()
        assert answers == [{f"one {TARGET} {CLIENT4}"}]
        nft(lab.node, drop)
        assert daemon.says("drift repaired", netns=NODE, process="nft")
        services.are(phone=first)
        assert is_served()
    before = handles(lab.node)
    with node.daemons.running() as daemon:  # which has not heard of any Service
        assert standing(daemon, "in sync", "Services: ")
        assert handles(lab.node) == before
        assert is_served()
        cluster.start_apiserver()
        services.put_machines("phone", True, True)
        assert eventually(lambda: services.ask(UDP, first).startswith("two "), 60)
        nft(lab.node, drop)
        services.are(phone=first)
        assert eventually(lambda: not is_in_trouble(daemon), PATIENCE), daemon.standing(NODE)


# ------------------------------------------------------------------------- bad over a restart


def stored(node: Agents, label: str) -> bool:
    """Whether something of that comes to be written down for the next run."""
    folder = node.daemons.state / "last-good"
    return eventually(lambda: any(label in one.read_text() for one in folder.glob("*.json")))


def test_a_service_that_is_bad_goes_on_over_a_kill_and_is_followed(
    services: Services, node: Agents
) -> None:
    lab, label = services.lab, f"Service/{services.namespace}/phone"
    first = services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running() as daemon:
        services.are(phone=first)
        assert stored(node, label)
        services.lengthen("phone", PORT - 1)
        assert daemon.says("bad manifest", so="the last good meaning of it goes on", times=2)
        daemon.kill()
    before = handles(lab.node)
    with (
        closing(services.flow("one", TCP, first + 1)) as flow,
        asking(flow) as answers,
        node.daemons.running() as daemon,
    ):
        assert daemon.says("bad manifest", so="the last good meaning of it goes on", times=2)
        assert standing(daemon, "outdated")
        assert daemon.status()["last_good"] == [label]
        assert handles(lab.node) == before
        for protocol in FORWARDED:
            assert services.ask(protocol, first + 4) == f"one {TARGET + 4} {CLIENT4}"
        services.put_machines("phone", True, True)
        one, two = lab.vms
        services.lead_to(one.address, one.address6, two.address, two.address6)
        daemon.reload()
        services.are(phone=first)
        assert daemon.status()["last_good"] == [label]
        services.lengthen("phone", PORT + COUNT - 1)
        assert eventually(lambda: daemon.status()["last_good"] == [])
        daemon.kill()
    assert answers == [{f"one {TARGET + 1} {CLIENT4}"}]
    services.remove("phone")  # another of the same name, which was never in order
    first = services.make("phone", at=first)
    services.lengthen("phone", PORT - 1)
    with node.daemons.running() as daemon:
        services.are()
        assert daemon.status()["last_good"] == []
        assert services.ask(TCP, first + 1) == ""


def test_a_service_that_turns_bad_while_neither_agent_nor_api_server_runs_goes_on(
    services: Services, node: Agents
) -> None:
    cluster, lab, label = services.cluster, services.lab, f"Service/{services.namespace}/phone"
    first = services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running() as daemon:
        services.are(phone=first)
        assert stored(node, label)
        daemon.kill()
    before = handles(lab.node)
    services.lengthen("phone", PORT - 1)
    cluster.kill_apiserver()
    with node.daemons.running() as daemon:  # which does not know yet that it is there
        assert standing(daemon, "in sync", "Services: ")
        assert handles(lab.node) == before
        daemon.kill()
    assert stored(node, label)
    with node.daemons.running() as daemon:
        cluster.start_apiserver()
        assert eventually(lambda: daemon.status()["last_good"] == [label], 60)
        assert handles(lab.node) == before
        assert services.ask(UDP, first + 4) == f"one {TARGET + 4} {CLIENT4}"


def test_reload_while_the_api_server_is_away_keeps_services_although_nothing_is_stored(
    services: Services, node: Agents
) -> None:
    cluster, lab, label = services.cluster, services.lab, f"Service/{services.namespace}/phone"
    node.daemons.state.mkdir()
    (node.daemons.state / "last-good").write_text("no directory")
    first = services.make("phone")
    services.put_machines("phone", True)
    with node.daemons.running() as daemon:
        services.are(phone=first)
        services.lengthen("phone", PORT - 1)
        assert eventually(lambda: daemon.status()["last_good"] == [label])
        before = handles(lab.node)
        cluster.kill_apiserver()
        for _ in range(2):
            daemon.reload()
            assert handles(lab.node) == before
            assert daemon.status()["last_good"] == [label]
        nft(lab.node, "flush ruleset")  # also what is known of old is repaired
        assert eventually(lambda: services.ask(TCP, first + 1) == f"one {TARGET + 1} {CLIENT4}")
        cluster.start_apiserver()
        assert eventually(lambda: not daemon.status()["unreadable"])
        services.are(phone=first)
        assert daemon.status()["last_good"] == [label]
