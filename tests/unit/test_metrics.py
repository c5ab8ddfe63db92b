"""Metrics: what the loop counts, how the node stands, and range counters that never run backwards,
as a parser of Prometheus reads them."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from agent.errors import Failure
from agent.metrics import MOST_PROCESSES, Metrics
from agent.status import Standing, State, Status
from agent.traffic import MOST_SERIES, REMEMBERED, Odometer
from rules.model import Chain, Live, Protocol, Rule
from rules.node_ports import Allocations, Bands, Holder
from rules.ports import PortRange
from rules.problems import Problem
from rules.values import replace
from tests.unit.samples import OWNER, egress, forward, from_inside

Counted = Mapping[object, tuple[int, int]]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

HERE = (4, 1)
SSH = Live(forward("tcp 22"), 7)


def standing(*live: Live, netns: str = "blue", backend: str = "nftables") -> Standing:
    return Standing(
        netns=netns, state=State.IN_SYNC, since=0.0, backend=backend, live=live, identity=HERE
    )


def node(*standings: Standing) -> Status:
    return Status(version="1.2.3", pid=1, started=0.0, ready=True, namespaces=standings)


class Node:
    """A daemon that stands still, with a clock and counters that a test moves."""

    def __init__(self, *standings: Standing) -> None:
        self.status = node(*standings)
        self.counted: Callable[[Standing], Counted] = lambda _: {}
        self.asked = 0
        self.now = 1000.0
        self.metrics = Metrics(lambda: self.status, self._counters, lambda: self.now)

    def _counters(self, one: Standing) -> Counted:
        self.asked += 1
        return self.counted(one)

    def scrape(self, later: float = 10.0) -> Samples:
        self.now += later
        return samples(self.metrics)

    def packets(self, counted: Counted) -> float:
        """What the ranges have seen in all, after the kernel says this."""
        self.counted = lambda _: counted
        return total(self.scrape(), "portranger_range_packets_total")


def samples(metrics: Metrics) -> Samples:
    """Every sample; that no series is there twice is part of the answer."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in families(metrics.text().decode())
        for sample in family.samples
    ]
    assert not [series for series, count in Counter(key for key, _ in found).items() if count > 1]
    return dict(found)


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def total(found: Samples, name: str) -> float:
    return sum(number for (one, _), number in found.items() if one == name)


def series(found: Samples, name: str) -> list[dict[str, str]]:
    return [dict(labels) for one, labels in found if one == name]


def test_every_metric_has_our_name_a_help_and_a_type() -> None:
    made = Node(standing(SSH)).metrics
    made.drifted("nft")
    text = made.text().decode()
    found = list(families(text))
    assert len(found) >= 28
    for family in found:
        assert family.name.startswith("portranger_")
        assert len(family.documentation) > 10, family.name
        assert family.documentation.endswith(".") or "process" in family.name, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert family.samples, family.name
    assert "_created" not in text


def test_what_the_loop_does_is_counted() -> None:
    made = Node().metrics
    for seconds in (0.002, 0.2):
        made.reconciled(seconds)
    for _ in range(3):
        made.committed()
    made.failed()
    made.forgot(41)
    made.forgot(0)
    made.lost_events()
    made.passed()
    made.passed()
    made.drifted("nft")
    found = samples(made)
    name = "portranger_reconcile_duration_seconds"
    assert value(found, f"{name}_count") == 2
    assert value(found, f"{name}_sum") == pytest.approx(0.202)
    assert value(found, f"{name}_bucket", le="0.005") == 1
    assert value(found, "portranger_commits_total") == 3
    assert value(found, "portranger_failures_total") == 1
    assert value(found, "portranger_conntrack_forgotten_total") == 41
    assert value(found, "portranger_events_lost_total") == 1
    assert value(found, "portranger_passes_total") == 2
    assert value(found, "portranger_drift_repaired_total", process="nft") == 1


def test_the_names_of_processes_are_bounded() -> None:
    made = Node().metrics
    for number in range(MOST_PROCESSES + 30):
        made.drifted(f"p{number}")
    made.drifted("p0")
    found = samples(made)
    name = "portranger_drift_repaired_total"
    assert len(series(found, name)) == MOST_PROCESSES + 1
    assert value(found, name, process="other") == 30
    assert value(found, name, process="p0") == 2


def test_a_process_without_a_name_is_unknown() -> None:
    made = Node().metrics
    made.drifted("")
    assert value(samples(made), "portranger_drift_repaired_total", process="unknown") == 1


@pytest.mark.parametrize("name", ['"x"', "a\nb", "\\", "\udc80", "\x1b[31m", "x" * 9000, "ü"])
def test_no_name_spoils_the_answer(name: str) -> None:
    made = Node(standing(Live(forward(owner=name), 7), netns=name))
    made.status = replace(made.status, version=name)
    made.metrics.drifted(name)
    found = made.scrape()
    (labels,) = series(found, "portranger_range_packets_total")
    assert labels["netns"] == labels["owner"]
    assert len(labels["netns"]) <= 250
    assert labels["netns"].isprintable()
    assert labels["netns"] == name or not name.isprintable() or len(name) > 250


def test_how_the_node_stands_is_read_at_the_scrape() -> None:
    made = Node(standing(SSH, Live(egress(), 8)))
    found = made.scrape()
    assert value(found, "portranger_build_info", version="1.2.3") == 1
    assert value(found, "portranger_ready") == 1
    assert value(found, "portranger_source_readable") == 1
    assert value(found, "portranger_last_sync_timestamp_seconds") == 0
    assert value(found, "portranger_rules", netns="blue") == 2
    assert value(found, "portranger_ranges", netns="blue") == 1
    problem = Problem(code="x", path=(), what="is wrong", fix="Mend it.")
    made.status = replace(
        made.status,
        ready=False,
        synced=1234.5,
        unreadable="it is gone",
        manifests=9,
        problems=(problem, problem),
        last_valid={"a.yaml": 5.0},
    )
    found = made.scrape()
    assert value(found, "portranger_ready") == 0
    assert value(found, "portranger_source_readable") == 0
    assert value(found, "portranger_last_sync_timestamp_seconds") == 1234.5
    assert value(found, "portranger_manifests") == 9
    assert value(found, "portranger_manifest_problems") == 2
    assert value(found, "portranger_manifests_on_last_good") == 1


def test_all_states_are_told_always() -> None:
    name = "portranger_namespaces"
    made = Node()
    assert {one["state"] for one in series(made.scrape(), name)} == {
        "in_sync",
        "pending",
        "failing",
        "refused",
        "conflict",
        "outdated",
        "unmanaged",
    }
    made.status = node(
        standing(), replace(standing(netns="x"), state=State.FAILING), standing(netns="y")
    )
    found = made.scrape()
    assert value(found, name, state="in_sync") == 2
    assert value(found, name, state="failing") == 1
    assert value(found, name, state="pending") == 0


@pytest.mark.parametrize(
    ("ports", "taken", "free"),
    [
        ("30000-32767", {"static": 2, "dynamic": 11}, {"static": 84, "dynamic": 2671}),
        ("30084-30099", {"dynamic": 13}, {"dynamic": 3}),
    ],
    ids=["two bands", "one band"],
)
def test_node_ports_are_counted_by_band(
    ports: str, taken: dict[str, int], free: dict[str, int]
) -> None:
    held = {
        Holder("Service/default/phone", "sip", Protocol.UDP): PortRange(30084, 30095),
        Holder("Service/default/phone", "sips", Protocol.TCP): PortRange(30084, 30095),
        Holder("Service/default/web", "", Protocol.TCP): PortRange(30099, 30099),
    }
    made = Node()
    bands = Bands(PortRange(*map(int, ports.split("-"))))
    made.status = replace(made.status, allocations=Allocations(bands, held))
    found = made.scrape()
    for which, wanted in (("allocated", taken), ("available", free)):
        name = f"portranger_nodeport_band_{which}_ports"
        assert {one["band"]: value(found, name, **one) for one in series(found, name)} == wanted


def test_where_an_api_server_gives_node_ports_there_are_no_bands() -> None:
    assert not [name for name, _ in Node().scrape() if "nodeport_band" in name]


def test_the_process_itself_is_measured() -> None:
    found = Node().scrape()
    assert value(found, "portranger_process_resident_memory_bytes") > 1e6
    assert value(found, "portranger_process_open_fds") > 0


# ------------------------------------------------------------------------------------- ranges


def test_a_range_has_the_packets_and_bytes_of_its_rule() -> None:
    inside, everything = Live(from_inside("udp 1000-8000"), 8), Live(forward(None), 9)
    made = Node(standing(SSH, inside, everything, Live(egress(), 10)))
    made.counted = lambda _: {7: (3, 180), 8: (1, 28), 9: (5, 50), 10: (99, 99), 11: (9, 9)}
    found = made.scrape()
    name = "portranger_range_packets_total"
    common = {"netns": "blue", "owner": OWNER, "family": "ip"}
    ssh = {**common, "chain": "prerouting", "protocol": "tcp", "ports": "22"}
    udp = {**common, "chain": "output", "protocol": "udp", "ports": "1000-8000"}
    rest = {**common, "chain": "prerouting", "protocol": "any", "ports": "any"}
    assert sorted(map(json.dumps, map(sorted_items, series(found, name)))) == sorted(
        map(json.dumps, map(sorted_items, (ssh, udp, rest)))
    )
    assert value(found, name, **ssh) == 3
    assert value(found, "portranger_range_bytes_total", **ssh) == 180
    assert value(found, name, **udp) == 1
    assert value(found, name, **rest) == 5


def sorted_items(labels: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(labels.items())


def test_rules_that_differ_in_nothing_told_are_one_series() -> None:
    made = Node(standing(Live(forward(on="eth0"), 7), Live(forward(on="eth1"), 8)))
    assert made.packets({7: (3, 0), 8: (4, 0)}) == 7
    assert made.packets({7: (3, 0), 8: (6, 0)}) == 9


def test_a_rewritten_rule_goes_on_counting() -> None:
    made = Node(standing(SSH))
    assert made.packets({7: (10, 0)}) == 10
    made.status = node(standing(Live(SSH.rule, 12)))  # a new handle
    assert made.packets({12: (2, 0)}) == 12
    assert made.packets({12: (5, 0)}) == 15
    assert made.packets({12: (1, 0)}) == 16  # the table was made anew


def test_a_larger_number_behind_another_handle_is_not_the_same_rule() -> None:
    made = Node(standing(SSH))
    assert made.packets({7: (10, 0)}) == 10
    made.status = node(standing(Live(SSH.rule, 12)))
    assert made.packets({12: (11, 0)}) == 21


def test_another_namespace_of_the_same_name_goes_on_counting() -> None:
    made = Node(standing(SSH))
    assert made.packets({7: (10, 0)}) == 10
    made.status = node(replace(standing(SSH), identity=(4, 2)))
    assert made.packets({7: (30, 0)}) == 40


def test_what_could_not_be_read_stands_still_and_is_not_counted_twice() -> None:
    made = Node(standing(SSH))
    assert made.packets({7: (10, 0)}) == 10
    assert made.packets({}) == 10
    assert made.packets({99: (5, 5)}) == 10  # the loop has not seen that one yet
    assert made.packets({7: (11, 0)}) == 11


def test_a_range_is_there_before_its_first_packet_and_before_its_first_reading() -> None:
    made = Node(standing(SSH))
    assert [one["ports"] for one in series(made.scrape(), "portranger_range_packets_total")] == [
        "22"
    ]


def test_a_namespace_that_cannot_be_read_does_not_hide_the_others() -> None:
    made = Node(standing(SSH, netns="bad"), standing(SSH, netns="good"))

    def counted(one: Standing) -> Counted:
        if one.netns == "bad":
            raise Failure("it is locked")
        return {7: (3, 0)}

    made.counted = counted
    found = made.scrape()
    assert total(found, "portranger_range_packets_total") == 3
    assert value(found, "portranger_counters_unreadable") == 1


def test_who_has_few_ranges_does_not_lose_them_for_who_has_many() -> None:
    made = Node(standing(*crowd(MOST_SERIES + 100), netns="a"), standing(SSH, netns="z"))
    found = series(made.scrape(), "portranger_range_packets_total")
    assert [one["ports"] for one in found if one["netns"] == "z"] == ["22"]
    assert len(found) == MOST_SERIES + 1


def test_a_range_that_went_is_forgotten_after_an_hour_and_not_before() -> None:
    made = Node(standing(SSH))
    assert made.packets({7: (10, 0)}) == 10
    made.status = node()
    assert not series(made.scrape(REMEMBERED - 60), "portranger_range_packets_total")
    made.status = node(standing(SSH))
    assert made.packets({7: (12, 0)}) == 12
    made.status = node()
    made.scrape(REMEMBERED + 60)
    made.status = node(standing(SSH))
    assert made.packets({}) == 0


def test_an_odometer_does_not_grow_with_what_is_gone() -> None:
    odometer = Odometer()
    for number in range(5000):
        odometer.advance((f"range {number}",), {number: (1, 1)}, float(number))
        odometer.forget(number - 100, 1000)
    assert len(odometer) == 101


def test_an_odometer_lets_go_of_the_longest_unfed_where_there_are_too_many() -> None:
    odometer = Odometer()
    for number in range(100):
        odometer.advance((f"range {number:02}",), {number: (1, 1)}, float(number))
    odometer.forget(0, 10)
    assert len(odometer) == 10
    assert odometer.total(("range 89",)) == (0, 0)
    assert odometer.total(("range 90",)) == (1, 1)


def test_iptables_is_not_asked_for_what_came_with_its_rules() -> None:
    shifted = Live(forward("tcp 80"), 2, 5, 500)
    made = Node(standing(Live(forward("tcp 22"), 1, 3, 300), shifted, backend="iptables"))
    assert total(made.scrape(), "portranger_range_bytes_total") == 800
    assert made.asked == 0
    # The handle is a place in the chain: it becomes another's when the rule before it goes.
    made.status = node(standing(replace(shifted, handle=1, octets=600), backend="iptables"))
    found = made.scrape()
    assert total(found, "portranger_range_bytes_total") == 600
    assert made.asked == 0


def test_a_namespace_without_ranges_is_not_asked() -> None:
    made = Node(standing(Live(egress(), 3)), replace(standing(SSH, netns="x"), identity=None))
    made.scrape()
    assert made.asked == 0


def test_scrapes_within_a_second_read_once() -> None:
    made = Node(standing(SSH))
    made.packets({7: (1, 0)})
    made.counted = lambda _: {7: (2, 0)}
    assert total(made.scrape(0.9), "portranger_range_packets_total") == 1
    assert made.asked == 1
    assert total(made.scrape(0.2), "portranger_range_packets_total") == 2
    assert made.asked == 2


# -------------------------------------------------------------------------------------- bounds


def crowd(count: int) -> list[Live]:
    return [Live(forward(f"tcp {port}"), port) for port in range(10_000, 10_000 + count)]


def ones(live: Iterable[Live], packets: int = 1) -> Counted:
    return {one.handle: (packets, 100 * packets) for one in live}


def test_the_series_of_ranges_are_bounded_and_lose_no_packet() -> None:
    live = crowd(MOST_SERIES + 100)
    made = Node(standing(*live))
    assert made.packets(ones(live)) == MOST_SERIES + 100
    found = made.scrape()
    name = "portranger_range_packets_total"
    assert len(series(found, name)) == MOST_SERIES + 1
    labels = dict.fromkeys(("netns", "owner", "family", "chain", "protocol", "ports"), "other")
    assert value(found, name, **labels) == 100
    assert value(found, "portranger_range_series_left_out") == 100


def test_the_sum_of_the_rest_never_falls() -> None:
    live = crowd(MOST_SERIES + 100)
    made = Node(standing(*live))
    labels = dict.fromkeys(("netns", "owner", "family", "chain", "protocol", "ports"), "other")

    def rest() -> float:
        return value(made.scrape(), "portranger_range_bytes_total", **labels)

    made.counted = lambda _: ones(live)
    assert rest() == 10_000
    made.status = node(standing(*live[:-50]))
    assert rest() == 10_000
    made.status = node(standing(*live[-50:]))
    assert rest() == 10_000
    assert value(made.scrape(), "portranger_range_series_left_out") == 0
    made.status = node(standing(*live))
    made.counted = lambda _: ones(live, 2)
    assert rest() == 20_000


def test_the_series_of_namespaces_are_bounded_and_add_up() -> None:
    many = [standing(SSH, netns=f"n{number:05}") for number in range(MOST_SERIES + 5)]
    made = Node(*many, standing(SSH, Live(egress(), 8), netns="other"))
    found = made.scrape()
    assert len(series(found, "portranger_rules")) == MOST_SERIES + 1
    assert total(found, "portranger_rules") == MOST_SERIES + 7
    assert total(found, "portranger_ranges") == MOST_SERIES + 6
    assert value(found, "portranger_netns_series_left_out") == 6


def test_a_namespace_called_other_is_no_second_series() -> None:
    made = Node(
        standing(SSH, netns="other"), *(standing(netns=f"x{n}") for n in range(MOST_SERIES + 3))
    )
    assert value(made.scrape(), "portranger_rules", netns="other") == 1


# ------------------------------------------------------------------------------------- threads


def test_the_loop_may_write_while_others_read() -> None:
    lock, packets = threading.Lock(), [0]
    status = node(standing(*(Live(one.rule, one.handle) for one in crowd(20))))
    clock = iter(range(1, 10**9))

    def counters(_: Standing) -> Counted:
        with lock:
            packets[0] += 1
            return ones(status.namespaces[0].live, packets[0])

    made = Metrics(lambda: status, counters, lambda: float(next(clock)))
    seen: list[list[float]] = [[] for _ in range(4)]
    failures: list[BaseException] = []

    def write() -> None:
        for number in range(2000):
            made.committed()
            made.drifted(f"p{number % 100}")
            made.reconciled(0.001)

    def read(into: list[float]) -> None:
        for _ in range(20):
            into.append(total(samples(made), "portranger_range_packets_total"))  # noqa: PERF401

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    acts: list[Callable[[], None]] = [write, write, *(lambda s=one: read(s) for one in seen)]
    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for values in seen:
        assert len(values) == 20
        assert values == sorted(values)
    found = samples(made)
    assert value(found, "portranger_commits_total") == 4000
    assert total(found, "portranger_drift_repaired_total") == 4000
    assert total(found, "portranger_range_packets_total") == 20 * packets[0]


def test_only_forwards_are_ranges() -> None:
    rules: list[Rule] = [forward(), from_inside(), egress()]
    made = Node(standing(*(Live(rule, place) for place, rule in enumerate(rules))))
    chains = {one["chain"] for one in series(made.scrape(), "portranger_range_packets_total")}
    assert chains == {Chain.PREROUTING.value, Chain.OUTPUT.value}
