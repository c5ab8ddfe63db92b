"""The service in a booted machine: as confined as its unit makes it, it starts, forwards, ends, and
comes back."""

from __future__ import annotations

import time

import pytest

from tests.spaces import IPTABLES, eventually, require
from tests.systemd.machine import Machine
from tests.systemd.service import CONFIGURATION, MANIFESTS, Service, soon

RANGES = "1000-8000,1000-8000/udp"
PORT = 5000
EVERYTHING = (
    "CAP_SYS_ADMIN",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_NET_BROADCAST",
    "CAP_DAC_READ_SEARCH",
)
TICKS = 100  # of processor time a second
AFAR = """
set -e
ip netns add afar
ip link add to-afar type veth peer name eth0 netns afar
ip addr add 198.51.100.1/24 dev to-afar
ip link set to-afar up
ip -n afar addr add 198.51.100.2/24 dev eth0
ip -n afar link set eth0 up
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 5000, nodePort: 30080}]}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  name: other
  labels: {app: web}
  annotations: {portranger.io/address: 198.51.100.77}
spec:
  domain: {devices: {interfaces: [{name: red, bridge: {}}]}}
  networks: [{name: red, pod: {}}]
"""
KNOCK_HERE = ("python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 30080), 1)")
KNOCK = "import socket; socket.create_connection(('198.51.100.1', 9788), timeout=1)"


@pytest.fixture
def forwarding(service: Service) -> Service:
    """The service, and a namespace `red` in which it forwards."""
    service.declare("red", RANGES)
    service.wire("red")
    service.start()
    assert service.becomes_synced("red")
    return service


def test_it_is_ready_when_the_start_returns(service: Service) -> None:
    service.declare("red", RANGES)
    service.wire("red")
    service.start()
    assert service.synced() == ["red"]
    assert service.property("ActiveState") == "active"
    assert service.property("StatusText") == "Namespaces: 1 in sync"
    assert service.asked("/readyz")
    assert service.asked("/healthz")
    assert "portranger_" in service.asked("/metrics")


def test_a_namespace_made_after_the_start_is_forwarded(service: Service) -> None:
    service.declare("red", RANGES)
    service.declare("blue", RANGES)
    service.start()
    assert service.property("StatusText") == "Namespaces: 2 pending"
    for name in ("red", "blue"):
        service.wire(name)
        assert service.becomes_synced(name)
        assert "udp dport 1000-8000" in service.rules(name)
        assert service.forwards(name, PORT)


def test_a_manifest_put_there_after_the_start_is_applied(service: Service) -> None:
    service.wire("red")
    service.start()
    assert not service.rules("red")
    service.declare("red", RANGES)
    assert service.becomes_synced("red")
    assert service.forwards("red", PORT)


def test_a_deleted_namespace_is_let_go(forwarding: Service) -> None:
    machine = forwarding.machine
    machine.run("ip", "netns", "delete", "red")
    # When a namespace ends, so do its links, and the other ends of these.
    there = ("ip", "-n", "red-client", "link", "show", "eth0")
    assert soon(lambda: machine.run(*there, code=None).returncode != 0)
    mounts = machine.says("cat", f"/proc/{forwarding.pid()}/mountinfo")
    assert "/run/netns/red-client" in mounts
    assert "/run/netns/red " not in mounts


def test_killed_it_comes_back_in_sync_and_no_packet_is_lost(forwarding: Service) -> None:
    pid = forwarding.pid()
    with forwarding.stream("red", PORT) as told:
        forwarding.signal("KILL")
        assert soon(lambda: forwarding.is_another(pid))
        assert forwarding.becomes_synced("red")
    assert forwarding.property("NRestarts") == "1"
    assert told[0].sent > 100
    assert told[0].lost == 0
    plan = ("portranger", "plan", "-f", MANIFESTS, "--detailed-exitcode")
    assert "No changes." in forwarding.machine.says(*plan)


def test_a_stopped_process_is_replaced_by_the_watchdog(service: Service) -> None:
    service.drop_in("WatchdogSec=1", "TimeoutAbortSec=1")
    service.declare("red", RANGES)
    service.wire("red")
    service.start()
    pid = service.pid()
    with service.stream("red", PORT) as told:
        service.signal("STOP")
        assert soon(lambda: service.is_another(pid))
        assert service.becomes_synced("red")
    assert told[0].lost == 0
    assert service.said("Watchdog timeout")


def test_the_watchdog_leaves_a_living_process_alone(service: Service) -> None:
    service.drop_in("WatchdogSec=200ms")
    service.start()
    pid = service.pid()
    fed = service.property("WatchdogTimestampMonotonic")
    assert soon(lambda: service.property("WatchdogTimestampMonotonic") > fed)
    assert not eventually(lambda: service.is_another(pid), 1)
    assert not service.said("Watchdog timeout")


def test_a_reload_takes_up_the_new_configuration(forwarding: Service) -> None:
    pid = forwarding.pid()
    forwarding.declare("blue", RANGES, "/etc/portranger/elsewhere")
    forwarding.wire("blue")
    forwarding.configure('manifests = "/etc/portranger/elsewhere"')
    forwarding.machine.run("systemctl", "reload", "portranger")
    assert forwarding.becomes_synced("blue")
    assert forwarding.forwards("blue", PORT)
    assert forwarding.pid() == pid
    assert forwarding.property("NRestarts") == "0"


def test_a_reload_of_a_bad_configuration_changes_nothing(forwarding: Service) -> None:
    pid = forwarding.pid()
    forwarding.configure("resync_seconds = 0")
    forwarding.machine.run("systemctl", "reload", "portranger")
    assert soon(lambda: forwarding.said("bad configuration"))
    assert forwarding.pid() == pid
    assert forwarding.synced() == ["red"]


def test_stopping_is_quick_and_leaves_the_rules(forwarding: Service) -> None:
    rules = forwarding.rules("red")
    with forwarding.stream("red", PORT) as told:
        begun = time.monotonic()
        forwarding.machine.run("systemctl", "stop", "portranger")
        assert time.monotonic() - begun < 1
    assert told[0].lost == 0
    assert forwarding.property("Result") == "success"
    assert forwarding.property("ExecMainStatus") == "0"
    assert rules.count("dnat") == forwarding.rules("red").count("dnat") > 0
    assert forwarding.forwards("red", PORT)


def test_what_was_broken_while_it_was_away_is_mended_by_the_start(forwarding: Service) -> None:
    forwarding.machine.run("systemctl", "stop", "portranger")
    forwarding.machine.run("ip", "netns", "exec", "red", "nft", "flush", "ruleset")
    forwarding.start()
    assert forwarding.forwards("red", PORT)


def test_whoever_ends_it_without_systemd_gets_it_back(forwarding: Service) -> None:
    pid = forwarding.pid()
    forwarding.signal("TERM")
    assert soon(lambda: forwarding.is_another(pid))


def test_a_second_one_refuses_and_names_the_first(forwarding: Service) -> None:
    second = forwarding.machine.run("portranger", "run", code=75)
    assert f"pid {forwarding.pid()} is running" in second.stderr
    assert forwarding.synced() == ["red"]


def test_without_root_it_says_what_is_missing(machine: Machine) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    refused = machine.run(*nobody, "portranger", "run", code=77)
    assert "CAP_" in refused.stderr


@pytest.mark.parametrize("capability", EVERYTHING[:4])
def test_without_one_of_its_capabilities_it_says_so_and_stays_down(
    service: Service, capability: str
) -> None:
    if capability == "CAP_NET_RAW":
        service.configure('backend = "iptables"')
    rest = [one for one in EVERYTHING if one != capability]
    service.drop_in("CapabilityBoundingSet=", f"CapabilityBoundingSet={' '.join(rest)}")
    service.start(code=1)
    assert service.property("ExecMainStatus") == "77"
    assert service.property("SubState") == "failed"
    assert service.said(capability)


def test_a_manifest_that_somebody_keeps_to_himself_is_read(service: Service) -> None:
    service.declare("red", RANGES)
    service.machine.run("chmod", "600", f"{MANIFESTS}/red.yaml")
    service.machine.run("chown", "nobody", f"{MANIFESTS}/red.yaml")
    service.wire("red")
    service.start()
    assert service.synced() == ["red"]


def test_whoever_listens_on_a_port_that_is_to_be_published_is_named(service: Service) -> None:
    service.declare("red", RANGES)
    service.wire("red")
    squat = ("systemd-run", "--uid=nobody", "--unit=squatter", "python3", "-m", "http.server")
    service.machine.run(*squat, "30080")
    try:
        assert soon(lambda: service.machine.run(*KNOCK_HERE, code=None).returncode == 0)
        service.machine.write(f"{MANIFESTS}/web.yaml", SERVICE)
        service.start()
        assert soon(lambda: service.said("somebody listens on tcp 30080")), service.journal()
        service.machine.run("systemctl", "stop", "portranger")
        service.drop_in("CapabilityBoundingSet=CAP_SYS_PTRACE")
        service.start()
        pid = service.machine.says("systemctl", "show", "-P", "MainPID", "squatter")
        words = f"python3 (pid {pid}) listens on tcp 30080"
        assert soon(lambda: service.said(words)), service.journal()
    finally:
        service.machine.run("systemctl", "stop", "squatter", code=None)


def test_a_bad_configuration_is_told_and_not_tried_again(service: Service) -> None:
    service.configure('backend = "ipchains"', "resync_seconds = 0")
    service.start(code=1)
    assert service.property("ExecMainStatus") == "78"
    assert service.property("SubState") == "failed"
    assert service.property("NRestarts") == "0"
    assert service.said(f"{CONFIGURATION}:1")
    assert service.said(f"{CONFIGURATION}:2")


def test_bad_usage_is_not_tried_again(service: Service) -> None:
    service.drop_in("ExecStart=", "ExecStart=/usr/local/bin/portranger run --fast")
    service.start(code=1)
    assert service.property("ExecMainStatus") == "64"
    assert service.property("SubState") == "failed"


def test_the_journal_knows_how_grave_a_line_is(forwarding: Service) -> None:
    forwarding.machine.write(f"{MANIFESTS}/bad.yaml", "kind: VirtualMachine\n")
    assert soon(lambda: forwarding.said("bad manifest"))
    lines = [(line["PRIORITY"], line["MESSAGE"]) for line in forwarding.journal()]
    assert {grade for grade, text in lines if "bad manifest" in text} == {"4"}
    assert {grade for grade, text in lines if "event=ready" in text} == {"6"}
    assert not [text for _, text in lines if text.startswith("<")]


def test_iptables_works_as_confined_as_it_is(service: Service) -> None:
    require(IPTABLES)  # the machine has the same iptables
    service.configure('backend = "iptables"')
    service.declare("red", RANGES)
    service.wire("red")
    service.start()
    assert service.synced() == ["red"]
    assert not service.rules("red")
    saved = service.machine.says("ip", "netns", "exec", "red", "iptables-legacy-save")
    assert "PORTRANGER-PREROUTING" in saved
    assert service.forwards("red", PORT)


def test_nearly_everything_is_read_only_to_it(forwarding: Service) -> None:
    inside = ("nsenter", f"--target={forwarding.pid()}", "--mount")
    for path in ("/etc/x", "/run/x", "/usr/x", "/var/lib/x", "/proc/sys/vm/swappiness"):
        refused = forwarding.machine.run(*inside, "touch", path, code=1)
        assert "Read-only file system" in refused.stderr
    assert forwarding.machine.says("stat", "-c", "%a", "/var/lib/portranger") == "700"


def test_other_machines_reach_it_only_where_the_unit_allows_them(service: Service) -> None:
    service.machine.run("sh", "-c", AFAR)
    service.configure('listen = "0.0.0.0:9788"')
    service.start()
    asked = ("ip", "netns", "exec", "afar", "python3", "-c", KNOCK)
    assert "timed out" in service.machine.run(*asked, code=1).stderr
    service.drop_in("IPAddressAllow=198.51.100.0/24")
    service.machine.run("systemctl", "restart", "portranger")
    service.machine.run(*asked)


def test_it_is_small_and_idle_when_there_is_nothing_to_do(service: Service) -> None:
    names = [f"vm{number}" for number in range(10)]
    for name in names:
        service.declare(name, RANGES)
        service.wire(name)
    service.start()
    assert service.becomes_synced(*names)
    limit = int(service.property("MemoryMax"))
    assert peak_memory(service) < limit / 4
    before = processor_time(service)
    time.sleep(1)  # nothing is to happen now, and that is what is measured
    assert processor_time(service) - before <= 0.05


def peak_memory(service: Service) -> int:
    """The most memory that it ever had, in bytes; the kernel's limit may not be enforced here."""
    lines = service.machine.says("cat", f"/proc/{service.pid()}/status").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return int(told["VmHWM"].split()[0]) * 1024


def processor_time(service: Service) -> float:
    """Seconds of processor time that it has used."""
    fields = service.machine.says("cat", f"/proc/{service.pid()}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
