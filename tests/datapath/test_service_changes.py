"""Services that change while packets flow: what stays loses nothing, what goes is cut or moves to
who is left, and what comes gets its share. The real daemon, told by files and by namespaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from rules.model import Family, Protocol
from tests.datapath.publishing import (
    AT,
    FLOWS,
    FROM,
    NAMES,
    PATIENCE,
    TCP,
    UDP,
    Flow,
    answerers,
    asking,
    everywhere,
    flow_to,
    publishing,
    serving,
)
from tests.nodes import NODE4, Net, Vm, _vm, asked, net, service_manifest, vm_manifest
from tests.spaces import eventually, ip, process, run

RANGES = "80,7000-7099,5060/udp,10000-11999/udp"
PORTS = (
    "name: sip, protocol: UDP, port: 5060, nodePort: 20060",
    "name: rtp, protocol: UDP, port: 10000, nodePort: 21000",
    "name: http, port: 80, nodePort: 20080",
    "name: data, port: 7000, nodePort: 24000",
)
ENDS = "rtp: 10999, data: 7099"
SERVICE = service_manifest(PORTS, ends=ENDS)
STICKY = service_manifest(PORTS, ends=ENDS, more="sessionAffinity: ClientIP")
SERVED = [
    *((UDP, port) for port in (5060, 10000, 10005, 10999, 11000, 11499, 11500)),
    *((TCP, port) for port in (80, 7000, 7050, 7099)),
]
PORT = {TCP: 24050, UDP: 21005}  # on the node


@pytest.fixture
def lab() -> Iterator[Net]:
    with net(2) as made, everywhere(made, SERVED):
        yield made


# ------------------------------------------------------------------------- an endpoint that goes


def flows_of(who: str, lab: Net, stack: ExitStack) -> list[Flow]:
    """A flow of each kind, that this machine answers."""
    return [
        stack.enter_context(closing(flow_to(who, lab.client, protocol, AT[family], PORT[protocol])))
        for family, protocol in FLOWS
    ]


def assert_stayed(answers: list[set[str]], who: str) -> None:
    """Each flow was answered throughout, by the same machine."""
    for (family, protocol), heard in zip(FLOWS, answers, strict=True):
        target = {TCP: 7050, UDP: 10005}[protocol]
        assert heard == {f"{who} {target} {FROM[family]}"}


def assert_new_flows_go(lab: Net, *machines: str) -> None:
    for family, protocol in FLOWS:
        heard = set(answerers(lab.client, protocol, AT[family], PORT[protocol], 40))
        assert heard == set(machines), (family, protocol)


def assert_went(lab: Net, gone: list[Flow]) -> None:
    """From the second machine to the first: datagrams at once, connections by being cut."""
    for (_, protocol), flow in zip(FLOWS, gone, strict=True):
        if protocol is UDP:
            assert eventually(lambda flow=flow: flow.who == "one", PATIENCE)  # type: ignore[misc]
        else:
            assert flow.is_cut()
    assert_new_flows_go(lab, "one")


@contextmanager
def comes_back(lab: Net, vm: Vm) -> Iterator[None]:
    """A machine that went, in a new namespace under the name that it had, once the kernel has done
    with the old one."""
    link = ("ip", "-n", lab.node, "link", "show", f"vm{vm.number}")
    assert eventually(lambda: run(*link, code=None).returncode != 0, PATIENCE)
    with _vm(lab.node, vm.number, bridged=True) as new, serving(new.guest, "two", SERVED):
        with process("sleep", "60", netns=new.pod) as inside:
            run("ip", "netns", "attach", vm.pod, str(inside.pid))
        for address in (vm.address, vm.address6):  # a machine would announce that it moved; and
            # whoever forgets all its neighbours drops what waits for one of them
            run("ip", "-n", lab.node, "neigh", "flush", "dev", "br0", "to", address)
        yield


def test_a_machine_whose_namespace_goes_takes_only_its_own_flows(lab: Net, tmp_path: Path) -> None:
    two = lab.vms[1]
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        staying, going = flows_of("one", lab, stack), flows_of("two", lab, stack)
        with asking(*staying) as answers:
            published.changed(lambda: run("ip", "netns", "del", two.pod))
            assert_went(lab, going)
        assert_stayed(answers, "one")

        with asking(*staying) as answers:
            published.changed(lambda: stack.enter_context(comes_back(lab, two)))
            assert_new_flows_go(lab, "one", "two")
        assert_stayed(answers, "one")


def test_a_machine_whose_manifest_goes_takes_only_its_own_flows(lab: Net, tmp_path: Path) -> None:
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        staying, going = flows_of("one", lab, stack), flows_of("two", lab, stack)
        with asking(*staying) as answers:
            published.changed(lambda: published.node.remove("vm2.yaml"))
            assert_went(lab, going)
        assert_stayed(answers, "one")

        with asking(*staying) as answers:
            text = vm_manifest(lab.vms[1], RANGES)
            published.changed(lambda: published.node.save("vm2.yaml", text))
            assert_new_flows_go(lab, "one", "two")
        assert_stayed(answers, "one")


def test_a_machine_that_loses_its_labels_is_no_longer_behind_the_service(
    lab: Net, tmp_path: Path
) -> None:
    """It goes on with what it forwards itself."""
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        staying, going = flows_of("one", lab, stack), flows_of("two", lab, stack)
        text = vm_manifest(lab.vms[1], RANGES, labels="app: retired")
        with asking(*staying) as answers:
            published.changed(lambda: published.node.save("vm2.yaml", text))
            assert_went(lab, going)
        assert_stayed(answers, "one")
        assert asked(lab.node, TCP, lab.vms[1].address, 80).startswith("two 80 ")


@pytest.mark.parametrize("service", [SERVICE, STICKY], ids=["None", "ClientIP"])
def test_new_flows_find_a_machine_at_every_moment_of_a_change(
    lab: Net, tmp_path: Path, service: str
) -> None:
    """One machine stops being behind the Service and is again, while it goes on answering. Of each
    kind one flow may be under way to it as it stops, and is cut as all of its flows are."""
    own = vm_manifest(lab.vms[1], RANGES)
    other = vm_manifest(lab.vms[1], RANGES, labels="app: retired")
    with publishing(tmp_path / "node", lab, service, RANGES) as published:
        for text, cut in ((other, 1), (own, 0), (other, 1), (own, 0)):
            with ExitStack() as stack:
                heard = [
                    stack.enter_context(opening(lab, protocol, AT[family]))
                    for family, protocol in FLOWS
                ]
                published.changed(lambda text=text: published.node.save("vm2.yaml", text))  # type: ignore[misc]
            for answers in heard:
                assert answers.count("") <= cut


@contextmanager
def opening(lab: Net, protocol: Protocol, to: str) -> Iterator[list[str]]:
    """Opens one flow after the other; what each was answered."""
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(asked(lab.client, protocol, to, PORT[protocol]))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        assert eventually(lambda: len(answers) > 10, PATIENCE)
        yield answers
        after = len(answers) + 10
        assert eventually(lambda: len(answers) > after, PATIENCE)
    finally:
        stop.set()
        thread.join(PATIENCE)


# --------------------------------------------------------------------- clients that keep theirs


def machines_of(lab: Net, clients: dict[Family, list[str]]) -> dict[str, str]:
    """Who answers each client, in new flows of two protocols."""
    found = {}
    for family in Family:
        for client in clients[family]:
            heard = {
                asked(lab.client, protocol, AT[family], PORT[protocol], client).partition(" ")[0]
                for protocol in (TCP, UDP)
            }
            (found[client],) = heard
    return found


def test_with_affinity_clients_keep_their_machine_while_others_come_and_go(
    tmp_path: Path,
) -> None:
    clients = {
        Family.IP: [f"198.51.100.{number}" for number in range(20, 44)],
        Family.IP6: [f"2001:db8:5::{number}" for number in range(20, 44)],
    }
    with (
        net(3) as lab,
        everywhere(lab, SERVED),
        publishing(tmp_path / "node", lab, STICKY, RANGES) as published,
        ExitStack() as stack,
    ):
        # Without nodad the kernel takes an address for tentative until a worker of it has run: to
        # bind to it fails until then, which is no packet lost.
        for family, rest in ((Family.IP, "/24 dev eth0"), (Family.IP6, "/64 dev eth0 nodad")):
            ip(lab.client, *(f"addr add {one}{rest}" for one in clients[family]))
        with_three = machines_of(lab, clients)
        assert set(with_three.values()) == set(NAMES), with_three

        published.changed(lambda: published.node.remove("vm3.yaml"))
        with_two = machines_of(lab, clients)
        assert set(with_two.values()) == {"one", "two"}
        moved = {client for client in with_two if with_two[client] != with_three[client]}
        assert moved == {client for client, who in with_three.items() if who == "three"}

        own = Flow(lab.client, UDP, NODE4, PORT[UDP])
        stack.enter_context(closing(own))
        with asking(own) as answers:
            text = vm_manifest(lab.vms[2], RANGES)
            published.changed(lambda: published.node.save("vm3.yaml", text))
            assert machines_of(lab, clients) == with_three
        assert len(answers[0]) == 1
        assert "" not in answers[0]


# ---------------------------------------------------------------------------- a Service's edits


def edited(ports: tuple[str, ...], ends: str) -> str:
    return service_manifest(ports, ends=ends)


def test_a_longer_range_serves_more_and_loses_nothing(lab: Net, tmp_path: Path) -> None:
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        open_flows = flows_of("one", lab, stack)
        assert asked(lab.client, UDP, NODE4, 22000) == ""
        longer = edited(PORTS, "rtp: 11499, data: 7099")
        with asking(*open_flows) as answers:
            published.changed(lambda: published.node.save("service.yaml", longer))
            for family in Family:
                for port, target in (
                    (21000, 10000),
                    (21999, 10999),
                    (22000, 11000),
                    (22499, 11499),
                ):
                    answer = asked(lab.client, UDP, AT[family], port)
                    assert answer.split()[1:] == [str(target), FROM[family]]
                assert asked(lab.client, UDP, AT[family], 22500) == ""
        assert_stayed(answers, "one")


def test_a_port_that_goes_is_cut_and_the_others_lose_nothing(lab: Net, tmp_path: Path) -> None:
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        staying = flows_of("one", lab, stack)
        going = [
            stack.enter_context(closing(Flow(lab.client, protocol, AT[family], port)))
            for family in Family
            for protocol, port in ((UDP, 20060), (TCP, 20080), (UDP, 21999))
        ]
        assert all(flow.ask() for flow in going)
        fewer = edited(PORTS[1:2] + PORTS[3:], "rtp: 10998, data: 7099")
        with asking(*staying) as answers:
            published.changed(lambda: published.node.save("service.yaml", fewer))
            assert all(flow.is_cut() for flow in going)
            for family in Family:
                assert asked(lab.client, UDP, AT[family], 20060) == ""
                assert asked(lab.client, TCP, AT[family], 20080) == ""
        assert_stayed(answers, "one")


def test_a_range_that_leads_elsewhere_takes_its_flows_along(lab: Net, tmp_path: Path) -> None:
    """The same node ports, to other ports of the machines."""
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        own = stack.enter_context(closing(Flow(lab.client, UDP, NODE4, 21000)))
        assert own.ask().split()[1] == "10000"
        shifted = "name: rtp, protocol: UDP, port: 10000, targetPort: 11000, nodePort: 21000"
        moved = edited((PORTS[0], shifted, *PORTS[2:]), "rtp: 10499, data: 7099")
        published.changed(lambda: published.node.save("service.yaml", moved))
        assert eventually(lambda: own.ask().split()[1:2] == ["11000"], PATIENCE)
        assert asked(lab.client, UDP, NODE4, 21499).split()[1] == "11499"


def test_without_its_service_nothing_is_left(lab: Net, tmp_path: Path) -> None:
    with publishing(tmp_path / "node", lab, SERVICE, RANGES) as published, ExitStack() as stack:
        going = flows_of("one", lab, stack) + flows_of("two", lab, stack)
        published.node.remove("service.yaml")
        assert all(flow.is_cut() for flow in going)
        for family, protocol in FLOWS:
            assert asked(lab.client, protocol, AT[family], PORT[protocol]) == ""
            assert asked(lab.node, protocol, AT[family], PORT[protocol]) == ""
