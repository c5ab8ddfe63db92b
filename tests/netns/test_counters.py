"""The counters of our rules, read at a scrape: the same numbers that nft tells, from any thread."""

import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from agent.errors import NotPermitted
from agent.kernel.counters import Counted, read
from agent.metrics import Metrics
from agent.status import Standing, State, Status
from rules.model import Family, Protocol
from tests.datapath.traffic import listening, probed, sockets
from tests.spaces import (
    applied,
    eventually,
    home,
    ip,
    lab,
    nft,
    observed,
    pod,
    run,
    space,
    vm,
    within,
)

TABLE = """
table inet portranger {{
    chain prerouting {{
        type nat hook prerouting priority -101;
{}
    }}
}}
"""


def identity(netns: str) -> tuple[int, int]:
    status = Path("/run/netns", netns).stat()
    return status.st_dev, status.st_ino


def counted(netns: str) -> Counted:
    return read(netns, identity(netns))


def told_by_nft(netns: str) -> Counted:
    listed = json.loads(within(netns, "nft", "-j", "list", "table", "inet", "portranger"))
    rules = [entry["rule"] for entry in listed["nftables"] if "rule" in entry]
    return {
        rule["handle"]: (one["counter"]["packets"], one["counter"]["bytes"])
        for rule in rules
        for one in rule["expr"]
        if "counter" in one
    }


@pytest.fixture(scope="module")
def netns() -> Iterator[str]:
    with pod() as name:
        yield name


def programmed(netns: str, *rules: str) -> None:
    """Our table with these rules, written by nft itself."""
    lines = "\n".join(rules)
    nft(netns, "table inet portranger\ndelete table inet portranger\n" + TABLE.format(lines))


def test_packets_are_counted_as_nft_counts_them() -> None:
    with lab() as made:
        applied(made.pod, vm("a", "1000-1003,2000/udp"))
        before = counted(made.pod)
        assert before == told_by_nft(made.pod)
        for protocol, ports in ((Protocol.TCP, (1000, 1002)), (Protocol.UDP, (2000,))):
            for family, address in ((Family.IP, "192.0.2.2"), (Family.IP6, "2001:db8::2")):
                with listening(made.guest, family, protocol, ports) as servers:
                    answers = probed(made.client, ip_address(address), protocol, servers)
                assert all(answers.values())
        found = counted(made.pod)
        assert found == told_by_nft(made.pod)
        ranges: dict[object, tuple[Protocol | None, str]] = {
            live.handle: (live.rule.protocol, live.rule.chain.value)
            for live in observed(made.pod).live
        }
        flows = {Protocol.TCP: 2, Protocol.UDP: 1}
        through = [
            (packets - before[handle][0], octets - before[handle][1], ranges[handle][0])
            for handle, (packets, octets) in found.items()
            if ranges[handle][1] == "prerouting"
        ]
        assert len(through) == 4
        for packets, octets, of in through:
            assert of is not None
            assert packets == flows[of]
            assert octets >= 28 * packets


def test_numbers_are_read_in_full(netns: str) -> None:
    largest = 2**64 - 1
    programmed(
        netns,
        f"tcp dport 1-9 counter packets {largest} bytes 1 dnat ip to 10.0.2.2",
        f"tcp dport 22 counter packets 1 bytes {largest} dnat ip to 10.0.2.2",
        "tcp dport 23 counter packets 72623859790382856 bytes 578437695752307201 accept",
    )
    assert sorted(counted(netns).values()) == [  # nft would say -1 for the largest
        (1, largest),
        (72623859790382856, 578437695752307201),
        (largest, 1),
    ]


def test_what_others_wrote_does_not_confuse(netns: str) -> None:
    pairs = ", ".join(f"{port} : {port + 5000}" for port in range(9000, 9400))
    programmed(
        netns,
        "tcp dport 1 accept",
        'iifname "counter" tcp dport 2 counter packets 2 bytes 20 accept comment "counter"',
        "tcp dport 3 counter packets 3 bytes 30 counter packets 99 bytes 99 accept",
        'log prefix "counter" accept',
        "tcp dport 9000-9399 counter packets 4 bytes 40"
        f" dnat ip to 10.0.2.2 : tcp dport map {{ {pairs} }}",
        "meta l4proto { tcp, udp } th dport { 5, 6, 7-9 } counter packets 5 bytes 50 accept",
    )
    nft(
        netns,
        "add table inet another\nadd chain inet another x\nadd rule inet another x counter\n"
        "add table ip portranger\nadd chain ip portranger x\nadd rule ip portranger x counter",
    )
    found = counted(netns)
    assert sorted(found.values()) == [(2, 20), (3, 30), (4, 40), (5, 50)]
    told = told_by_nft(netns)
    assert found.keys() == told.keys()


def test_thousands_of_rules_are_all_read(netns: str) -> None:
    programmed(
        netns,
        *(
            f'tcp dport {port} counter packets {port} bytes {2 * port} accept comment "{"x" * 99}"'
            for port in range(1, 3001)
        ),
    )
    found = counted(netns)
    assert len(found) == 3000
    assert found == told_by_nft(netns)


def test_where_we_have_no_table_there_is_nothing() -> None:
    with space() as name:
        assert counted(name) == {}
        nft(name, "table inet portranger")
        assert counted(name) == {}


def test_a_namespace_that_has_gone_has_nothing() -> None:
    with space() as name:
        programmed(name, "tcp dport 1 counter accept")
        known = identity(name)
        assert len(read(name, known)) == 1
        run("ip", "netns", "del", name)
        assert read(name, known) == {}


def test_another_namespace_of_the_same_name_is_not_read() -> None:
    with space() as name, space() as keeper:
        programmed(name, "tcp dport 1 counter accept")
        known = identity(name)
        # While it is open its number is its own; afterwards a new namespace could get it.
        descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            run("ip", "netns", "del", name)
            run("ip", "netns", "add", name)
            programmed(name, "tcp dport 1 counter accept")
            assert read(name, known) == {}
            assert len(counted(name)) == 1
        finally:
            os.close(descriptor)
        assert read(keeper, None) == {}


def test_a_path_and_a_process_name_a_namespace_as_well(netns: str) -> None:
    programmed(netns, "tcp dport 1 counter packets 3 bytes 4 accept")
    assert list(read(f"/run/netns/{netns}", identity(netns)).values()) == [(3, 4)]
    assert read("pid:4194305", identity(netns)) == {}
    assert read("/dev/null", identity(netns)) == {}


def test_the_thread_comes_home_and_leaves_nothing_open(netns: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    programmed(netns, "tcp dport 1 counter accept")
    before, here = descriptors(), home()
    for _ in range(50):
        assert len(counted(netns)) == 1
        assert read(netns, None) == {}
    assert (descriptors(), home()) == (before, here)


def test_reading_keeps_no_namespace_alive() -> None:
    with space() as witness, space() as name:
        ip(name, f"link add tether type veth peer name tether netns {witness}")
        programmed(name, "tcp dport 1 counter accept")
        assert len(counted(name)) == 1
        run("ip", "netns", "del", name)
        assert eventually(lambda: "tether" not in within(witness, "ip", "-br", "link"))


def test_many_threads_read_while_rules_change(netns: str) -> None:
    programmed(netns, *(f"tcp dport {port} counter accept" for port in range(1, 101)))
    sizes: list[int] = []
    failures: list[BaseException] = []

    def reading() -> None:
        try:
            for _ in range(30):
                sizes.append(len(counted(netns)))  # noqa: PERF401 - up to a failure
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reading) for _ in range(4)]
    for thread in threads:
        thread.start()
    for port in range(200, 220):
        nft(netns, f"add rule inet portranger prerouting tcp dport {port} counter accept")
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(sizes) == 120
    assert all(100 <= size <= 120 for size in sizes)
    assert len(counted(netns)) == 120


NOT_ALLOWED = """
import sys
from agent.errors import NotPermitted
from agent.kernel.counters import read
try:
    read(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])))
except NotPermitted as failure:
    print(failure)
"""


@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
def test_who_may_not_is_told_which_capability_is_missing(netns: str, capability: str) -> None:
    without = ("setpriv", "--bounding-set", f"-{capability}", "--inh-caps", f"-{capability}")
    numbers = map(str, identity(netns))
    done = run(*without, sys.executable, "-c", NOT_ALLOWED, netns, *numbers)
    assert f"CAP_{capability.upper()}" in done.stdout
    assert NotPermitted.exit_code == 77


# ------------------------------------------------------------------ as the daemon puts it together


def packets(metrics: Metrics, ports: str) -> float:
    return sum(
        sample.value
        for family in families(metrics.text().decode())
        for sample in family.samples
        if sample.name == "portranger_range_packets_total"
        and sample.labels["ports"] == ports
        and sample.labels["chain"] == "prerouting"
        and sample.labels["family"] == "ip"
    )


def standing(netns: str) -> Status:
    """As the loop would put it after a look."""
    one = Standing(
        netns=netns,
        state=State.IN_SYNC,
        since=0.0,
        backend="nftables",
        live=observed(netns, "nftables").live,
        identity=identity(netns),
    )
    return Status(version="1", pid=1, started=0.0, namespaces=(one,))


def knock(client: str, times: int) -> None:
    """Datagrams to the pod, each a flow of its own."""
    for one in sockets(client, Family.IP, socket.SOCK_DGRAM, times):
        with one:
            one.sendto(b"x", ("192.0.2.2", 2000))


def test_a_range_goes_on_counting_where_its_rule_is_rewritten() -> None:
    clock = itertools.count(1, 2)
    with lab((Family.IP,)) as made:
        applied(made.pod, vm("a", "2000/udp"))
        status = [standing(made.pod)]
        metrics = Metrics(
            lambda: status[-1],
            lambda one: read(one.netns, one.identity),
            lambda: float(next(clock)),
        )
        assert packets(metrics, "2000") == 0
        knock(made.client, 3)
        assert eventually(lambda: packets(metrics, "2000") == 3)
        nft(made.pod, "delete table inet portranger")
        applied(made.pod, vm("a", "2000/udp"))
        assert packets(metrics, "2000") == 3
        status.append(standing(made.pod))
        knock(made.client, 2)
        assert eventually(lambda: packets(metrics, "2000") == 5)
