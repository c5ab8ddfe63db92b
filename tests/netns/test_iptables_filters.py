"""Rules in forward in the legacy tables: what others have there, what the kernel lists, what only
iptables has, and packets."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address, ip_network

import pytest

from agent.errors import Stale
from agent.kernel.lab import CLIENT, GUEST, POD, Lab
from agent.kernel.live import LiveKernel
from agent.kernel.probe import KINDS, asks, connected, echoing
from agent.reconcile import converge, intend, keep
from rules.desired import desire
from rules.flattened import flattened
from rules.model import (
    Address,
    Chain,
    Desired,
    Family,
    Members,
    Observed,
    Peers,
    Protocol,
    Rule,
    Surroundings,
)
from rules.plan import Plan, diff
from rules.ports import PortRange
from rules.values import replace
from rules.xtables import script
from tests.spaces import IPTABLES, LEGACY, NFTABLES, kernel, pod, require, saved, vm, within
from tests.spaces import lab as built

OWNER = "NetworkPolicy/default/web"
GUESTS = {Family.of(one): one.ip for one in GUEST}
CLIENTS = {Family.of(one): one.ip for one in CLIENT}
PODS = {Family.of(one): one.ip for one in POD}
TCP, UDP = Protocol.TCP, Protocol.UDP


def chain_of(end: str) -> Chain:
    return Chain.FORWARD if end == "destination" else Chain.EGRESS


def guarded(
    *let: Rule, end: str = "destination", families: tuple[Family, ...] = tuple(Family)
) -> Desired:
    """The guests, with nothing let through at one end but by these rules."""
    rules = set(let)
    for family in families:
        rule = Rule(chain=chain_of(end), family=family, owner=OWNER)
        rules |= {replace(rule, accepts=True), replace(rule, **{end: GUESTS[family]})}
    return Desired(rules=frozenset(rules))


def gate(  # noqa: PLR0913 - every option has a default
    protocol: Protocol,
    first: int,
    last: int | None = None,
    *,
    family: Family = Family.IP,
    peer: str | None = None,
    end: str = "destination",
) -> Rule:
    """Ports to or from the guest, for one peer or everybody."""
    rule = Rule(
        chain=chain_of(end),
        family=family,
        owner=OWNER,
        protocol=protocol,
        ports=PortRange(first, last or first),
        accepts=True,
        peer=ip_network(peer) if peer else None,
    )
    return replace(rule, **{end: GUESTS[family]})


def applied(netns: str, desired: Desired) -> Plan:
    with kernel(IPTABLES).opened(netns) as namespace:
        return converge(netns, desired, namespace)


def seen(netns: str) -> Observed:
    with kernel(IPTABLES).opened(netns) as namespace:
        return namespace.observe()


def restored(netns: str, text: str, *families: Family) -> None:
    for family in families or tuple(Family):
        within(netns, f"{LEGACY[family]}-restore", "-w", "--noflush", stdin=text)


def in_filter(netns: str, *lines: str, family: Family = Family.IP) -> None:
    """What a stranger does, in one commit."""
    restored(netns, "".join(f"{line}\n" for line in ("*filter", *lines, "COMMIT")), family)


@pytest.fixture
def netns() -> Iterator[str]:
    with pod() as name:
        yield name


# ------------------------------------------------------------------------------------ the tables


def alive(netns: str) -> list[list[str]]:
    names = ("ip_tables_names", "ip6_tables_names")
    return [sorted(within(netns, "cat", f"/proc/net/{name}").split()) for name in names]


def test_the_table_filter_comes_to_life_only_where_something_is_filtered() -> None:
    """By fresh workers: those of a command are."""
    require(IPTABLES)
    with pod() as netns, closing(LiveKernel(IPTABLES)) as fresh:
        with fresh.opened(netns) as namespace:
            converge(netns, desire([vm("a", "22")], namespace.surroundings()), namespace)
            converge(netns, Desired(), namespace)
        assert alive(netns) == [["mangle", "nat"], ["nat"]]  # mangle keeps loopback from guests
        with fresh.opened(netns) as namespace:
            converge(netns, guarded(families=(Family.IP,)), namespace)
        assert alive(netns) == [["filter", "mangle", "nat"], ["nat"]]


OTHERS = """*filter
:INPUT ACCEPT [3:4]
:FORWARD ACCEPT [0:0]
:HIS - [0:0]
:PORTRANGER-OUTPUT - [0:0]
[5:6] -A FORWARD -i eth0 -p tcp -m tcp --dport 1000:8000 -j HIS
[7:8] -A FORWARD -p udp -j DROP
[9:10] -A HIS -m limit --limit 5/min -j LOG --log-prefix "x "
[11:12] -A PORTRANGER-OUTPUT -p tcp -j ACCEPT
COMMIT
*nat
:PORTRANGER-FORWARD - [0:0]
[13:14] -A PORTRANGER-FORWARD -p tcp -j RETURN
COMMIT
"""


def without_ours(text: str) -> str:
    """Without what is of our making: the jump, and the chain and its rules in the table filter."""
    parts = text.split("*nat")
    for number in range(len(parts)):
        filters, found, rest = parts[number].partition("*filter")
        lines = [
            line for line in rest.splitlines(keepends=True) if "PORTRANGER-FORWARD" not in line
        ]
        parts[number] = filters + found + "".join(lines)
    return "*nat".join(parts)


def test_what_others_filter_stays_byte_for_byte_with_its_counters(netns: str) -> None:
    for command in LEGACY.values():
        within(netns, f"{command}-restore", "-w", "-c", stdin=OTHERS)
    before = saved(netns)
    for rules in ((gate(TCP, 80),), (gate(TCP, 80), gate(UDP, 53)), (), (gate(TCP, 1, 65535),)):
        applied(netns, guarded(*rules))
        assert saved(netns) != before
        assert without_ours(saved(netns)) == before
    applied(netns, Desired())
    assert saved(netns) == before


def test_our_jump_comes_first_and_a_second_one_goes(netns: str) -> None:
    in_filter(netns, "-A FORWARD -p udp -j DROP")
    applied(netns, guarded())
    jump = "-A FORWARD -m comment --comment portranger -j PORTRANGER-FORWARD"
    theirs = "-A FORWARD -p udp -j DROP"
    in_filter(netns, jump)
    assert hooked(netns) == [jump, theirs, jump]
    applied(netns, guarded())
    assert hooked(netns) == [jump, theirs]
    in_filter(netns, jump.replace("-A", "-D"))
    assert applied(netns, guarded()).chains == (Chain.FORWARD,)
    assert hooked(netns) == [jump, theirs]


def test_our_jump_stays_first_whoever_comes_before_it(netns: str) -> None:
    applied(netns, guarded())
    jump = "-A FORWARD -m comment --comment portranger -j PORTRANGER-FORWARD"
    for number in (1, 2):
        in_filter(netns, f"-I FORWARD -p udp --dport {number} -j ACCEPT")
        assert hooked(netns)[0] != jump
        assert applied(netns, guarded()).chains == (Chain.FORWARD,)
        assert hooked(netns)[0] == jump
        assert len(hooked(netns)) == number + 1
        assert applied(netns, guarded()).empty


def hooked(netns: str) -> list[str]:
    text = within(netns, "iptables-legacy-save", "-t", "filter")
    return [line for line in text.splitlines() if line.startswith("-A FORWARD")]


def test_the_order_in_our_chain(netns: str) -> None:
    desired = guarded(gate(TCP, 80, 90, peer="10.1.0.0/16"), gate(UDP, 53))
    applied(netns, desired)
    applied(netns, replace(desired, rules=desired.rules | {gate(TCP, 443, peer="10.3.4.5/32")}))
    text = within(netns, "iptables-legacy-save", "-t", "filter").replace('"', "")
    found = re.findall(r"(?m)^-A PORTRANGER-FORWARD (.*)$", text)
    assert [line.replace(f" -m comment --comment {OWNER}", "") for line in found] == [
        "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN",
        "-s 10.1.0.0/16 -d 10.0.2.2/32 -p tcp -m tcp --dport 80:90 (ingress) -j RETURN",
        "-d 10.0.2.2/32 -p udp -m udp --dport 53 -j RETURN",
        "-s 10.3.4.5/32 -d 10.0.2.2/32 -p tcp -m tcp --dport 443 (ingress) -j RETURN",
        "-d 10.0.2.2/32 -j DROP",
    ]


RESUMING = "-m conntrack --ctstate {} -m comment --comment " + OWNER
STRANGE = {
    "a mask with gaps": "-s 10.0.0.0/255.0.255.0 -d 10.0.2.2 -m comment --comment"
    f' "{OWNER} (ingress)" -j RETURN',
    "no direction": f"-s 10.1.0.0/16 -d 10.0.2.2 -m comment --comment {OWNER} -j RETURN",
    "all but some": f"! -s 10.1.0.0/16 -d 10.0.2.2 -m comment --comment {OWNER} -j RETURN",
    "new flows": f"{RESUMING.format('NEW')} -j RETURN",
    "more than open flows": f"{RESUMING.format('NEW,RELATED,ESTABLISHED')} -j RETURN",
    "all but open flows": f"-m conntrack ! --ctstate RELATED,ESTABLISHED -m comment"
    f" --comment {OWNER} -j RETURN",
    "fragments": f"-f -d 10.0.2.2 -m comment --comment {OWNER} -j DROP",
    "a way out": f"-o eth0 -d 10.0.2.2 -m comment --comment {OWNER} -j RETURN",
    "all of one protocol": f"-d 10.0.2.2 -p tcp -m comment --comment {OWNER} -j RETURN",
    "a rejection": f"-d 10.0.2.2 -m comment --comment {OWNER} -j REJECT",
    "past all others": f"-d 10.0.2.2 -m comment --comment {OWNER} -j ACCEPT",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_a_filter_that_we_never_make_is_removed_and_ours_stay(shared: str, line: str) -> None:
    desired = guarded(gate(TCP, 80))
    applied(shared, desired)
    before = within(shared, "iptables-legacy-save", "-t", "filter").count("-A PORTRANGER")
    in_filter(shared, f"-I PORTRANGER-FORWARD 2 {line}")
    found = seen(shared)
    assert len(found.foreign) == 1
    assert {live.rule for live in found.live} == desired.rules
    applied(shared, desired)
    assert not seen(shared).foreign
    assert within(shared, "iptables-legacy-save", "-t", "filter").count("-A PORTRANGER") == before


def test_two_hosts_that_may_both_speak_to_each_other(netns: str) -> None:
    """Of the same two addresses, in either role: the packets are the same, the rules are not."""
    into = gate(TCP, 80, peer="10.0.3.2/32")
    out = replace(
        into, destination=None, source=ip_address("10.0.3.2"), peer=ip_network("10.0.2.2/32")
    )
    desired = Desired(rules=frozenset({into, out}))
    applied(netns, desired)
    assert {live.rule for live in seen(netns).live} == desired.rules
    assert applied(netns, desired).empty


# ------------------------------------------------------------------------------------ both tables


def both(netns: str, ports: str, *let: Rule) -> Desired:
    with kernel(IPTABLES).opened(netns) as namespace:
        ranges = desire([vm("a", ports)], namespace.surroundings())
    return replace(ranges, rules=ranges.rules | guarded(*let).rules)


@pytest.mark.parametrize("wanted", ["changed", "gone"])
@pytest.mark.parametrize(
    "damage",
    [
        "*filter\n-F PORTRANGER-FORWARD\nCOMMIT\n",
        "*filter\n-D FORWARD 1\n-I PORTRANGER-FORWARD -j ACCEPT\nCOMMIT\n",
        "*filter\n-A FORWARD -m comment --comment portranger -j PORTRANGER-FORWARD\nCOMMIT\n",
        "*filter\n-F\n-X PORTRANGER-FORWARD\nCOMMIT\n*nat\n-F PORTRANGER-PREROUTING\nCOMMIT\n",
        "",
    ],
)
def test_the_script_mends_what_apply_would(netns: str, damage: str, wanted: str) -> None:
    applied(netns, both(netns, "80,443", gate(TCP, 80), gate(UDP, 53)))
    if damage:
        restored(netns, damage)
    after = Desired()
    if wanted == "changed":
        after = both(netns, "80,8443", gate(TCP, 80), gate(TCP, 8443, peer="10.0.0.0/8"))
        after = replace(after, sysctls=frozenset())
    restored(netns, script(diff(netns, after, seen(netns))))
    left = seen(netns)
    assert diff(netns, after, left).empty
    assert {live.rule for live in left.live} == after.rules


def test_filters_go_with_a_change_of_backends(netns: str) -> None:
    desired = both(netns, "80", gate(TCP, 80))
    applied(netns, desired)
    assert "PORTRANGER-FORWARD" in saved(netns)
    with kernel(NFTABLES).opened(netns) as namespace:
        converge(netns, desired, namespace)
        assert {live.rule for live in namespace.observe().live} == desired.rules
    assert "PORTRANGER" not in saved(netns)


def test_a_plan_for_filters_that_changed_meanwhile_changes_neither_table(netns: str) -> None:
    applied(netns, both(netns, "80", gate(TCP, 80)))
    with kernel(IPTABLES).opened(netns) as namespace:
        plan = diff(netns, both(netns, "443", gate(TCP, 443)), namespace.observe())
        in_filter(netns, "-I PORTRANGER-FORWARD -j RETURN", family=Family.IP6)
        before = uncounted(netns)
        with pytest.raises(Stale, match="changed"):
            namespace.commit(plan)
        assert uncounted(netns) == before


def uncounted(netns: str) -> str:
    """What is in the tables but for the counters: links announce themselves now and then."""
    return re.sub(r"(?m)^\[\d+:\d+\] ", "", saved(netns))


def test_one_commit_of_ours_does_it_all_in_both_tables(netns: str) -> None:
    """Without the second try that would follow in a daemon."""
    steps = [
        both(netns, "80", gate(TCP, 80)),
        both(netns, "443", gate(TCP, 443), gate(UDP, 53)),
        replace(both(netns, "443"), rules=both(netns, "443").rules - guarded().rules),
        Desired(),
    ]
    for desired in steps:
        with kernel(IPTABLES).opened(netns) as namespace:
            namespace.commit(diff(netns, desired, namespace.observe()))
            found = namespace.observe([one.name for one in desired.sysctls])
        assert diff(netns, desired, found).empty
        assert {live.rule for live in found.live} == desired.rules


def test_a_chain_with_the_name_of_one_of_ours_in_the_other_table_is_not_ours(netns: str) -> None:
    jump = "OUTPUT -m comment --comment portranger -j PORTRANGER-OUTPUT"
    in_filter(netns, "-N PORTRANGER-OUTPUT", "-A PORTRANGER-OUTPUT -j ACCEPT", f"-A {jump}")
    theirs = within(netns, "iptables-legacy-save", "-t", "filter")
    desired = both(netns, "80")
    desired = replace(desired, rules=desired.rules - guarded().rules)
    applied(netns, desired)
    restored(netns, f"*nat\n-D {jump}\nCOMMIT\n", Family.IP)
    assert applied(netns, desired).chains == (Chain.OUTPUT,)
    assert f"-A {jump}" in within(netns, "iptables-legacy-save", "-t", "nat")
    applied(netns, Desired())
    assert rules_of(within(netns, "iptables-legacy-save", "-t", "filter")) == rules_of(theirs)


def rules_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("-A")]


def test_sets_are_flattened_for_these_tables_alone(netns: str) -> None:
    peers = Peers(Family.IP, "a1")
    members: Members = frozenset(map(ip_network, ("10.1.0.0/16", "10.3.4.5/32")))
    named = replace(gate(TCP, 80), peers=peers)
    desired = Desired(rules=guarded().rules | {named}, sets={peers: members})

    def wish(_: object, __: Surroundings) -> Desired:
        return desired

    with kernel(IPTABLES).opened(netns) as namespace:
        intent = intend(netns, wish, namespace)
        assert intent.desired == flattened(desired)
        assert not intent.desired.sets
        outcome = keep(netns, wish, namespace, before=None)
        assert {live.rule for live in outcome.live} == flattened(desired).rules
        assert intend(netns, wish, namespace).plan.empty
        assert keep(netns, wish, namespace, before=outcome.desired).drift == 0
        converge(netns, Desired(), namespace)
    with kernel(NFTABLES).opened(netns) as namespace:
        assert intend(netns, wish, namespace).desired == desired


# ---------------------------------------------------------------------------------------- packets

PORTS = "1500-1600,1500-1600/udp"
SERVED = [(protocol, port) for protocol in (TCP, UDP) for port in (1500, 1550, 1600)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with built() as made, echoing(made, made.guest, SERVED):
        yield made


def enforced(lab: Lab, desired: Desired) -> Plan:
    with kernel(IPTABLES).opened(lab.pod) as namespace:
        ranges = desire([vm("a", PORTS)], namespace.surroundings())
        return converge(lab.pod, replace(ranges, rules=ranges.rules | desired.rules), namespace)


def answers(lab: Lab, to: Address, protocol: Protocol, port: int, where: str = "") -> bool:
    """Whether there is an answer; what is dropped is not waited for as long as in a probe."""
    with lab.socket(where or lab.client, Family.of(to), KINDS[protocol]) as client:
        client.settimeout(0.5)
        try:
            client.connect((str(to), port))
            return asks(client) == port
        except OSError:
            return False


@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize("family", Family)
def test_what_is_let_in_passes_and_nothing_else(
    lab: Lab, family: Family, protocol: Protocol
) -> None:
    to, other = PODS[family], UDP if protocol is TCP else TCP
    enforced(lab, Desired())
    assert all(answers(lab, to, protocol, port) for port in (1500, 1600))
    enforced(lab, guarded(gate(protocol, 1500, 1555, family=family)))
    assert answers(lab, to, protocol, 1500)
    assert answers(lab, to, protocol, 1550)
    assert not answers(lab, to, protocol, 1600)
    assert not answers(lab, to, other, 1500)
    other_family = Family.IP6 if family is Family.IP else Family.IP
    assert not answers(lab, PODS[other_family], protocol, 1500)
    enforced(lab, guarded())
    assert not answers(lab, to, protocol, 1500)


NEAR = {Family.IP: ("192.0.2.0/25", "192.0.2.1/32"), Family.IP6: ("2001:db8::/64", "2001:db8::1")}
FAR = {Family.IP: ("192.0.2.128/25", "192.0.2.9"), Family.IP6: ("2001:db8:1::/48", "2001:db8::9")}


@pytest.mark.parametrize("family", Family)
def test_who_may_come_in_is_told_by_the_address(lab: Lab, family: Family) -> None:
    for near in NEAR[family]:
        enforced(lab, guarded(gate(TCP, 1500, family=family, peer=near)))
        assert answers(lab, PODS[family], TCP, 1500)
    far = [gate(TCP, 1500, family=family, peer=one) for one in FAR[family]]
    enforced(lab, guarded(*far))
    assert not answers(lab, PODS[family], TCP, 1500)


@pytest.mark.parametrize("family", Family)
def test_what_the_guest_may_say_is_told_by_port_and_address(lab: Lab, family: Family) -> None:
    let = [
        gate(TCP, 1700, family=family, peer=NEAR[family][1], end="source"),
        gate(TCP, 1800, family=family, peer=FAR[family][0], end="source"),
    ]
    enforced(lab, guarded(*let, end="source"))
    with echoing(lab, lab.client, [(TCP, 1700), (TCP, 1800)]):
        assert answers(lab, CLIENTS[family], TCP, 1700, lab.guest)
        assert not answers(lab, CLIENTS[family], TCP, 1800, lab.guest)
        assert answers(lab, PODS[family], TCP, 1500), "what it hears is not limited"


@pytest.mark.parametrize("family", Family)
def test_open_flows_lose_no_packet_over_edits_that_still_allow_them(
    lab: Lab, family: Family
) -> None:
    stays = gate(TCP, 1500, family=family), gate(UDP, 1500, family=family)
    enforced(lab, Desired())
    lost: list[OSError] = []
    done = threading.Event()

    def talk(protocol: Protocol) -> None:
        try:
            with connected(lab, lab.client, PODS[family], protocol, 1500) as client:
                while not done.is_set():
                    assert asks(client) == 1500
        except OSError as error:
            lost.append(error)

    threads = [threading.Thread(target=talk, args=[protocol]) for protocol in (TCP, UDP)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            more = gate(TCP, 1501 + number, 1550 + number, family=family)
            enforced(lab, guarded(*stays, more))
            if number % 5 == 4:
                enforced(lab, Desired())
    finally:
        done.set()
        for thread in threads:
            thread.join(10)
    assert lost == []


@pytest.mark.parametrize("family", Family)
def test_open_flows_that_are_forbidden_now_are_cut_and_others_are_not(
    lab: Lab, family: Family
) -> None:
    enforced(lab, Desired())
    to = PODS[family]
    with (
        connected(lab, lab.client, to, TCP, 1500) as stays,
        connected(lab, lab.client, to, TCP, 1600) as goes,
    ):
        assert (asks(stays), asks(goes)) == (1500, 1600)
        enforced(lab, guarded(gate(TCP, 1500, family=family, peer=str(CLIENTS[family]))))
        assert asks(stays) == 1500
        goes.settimeout(0.4)
        with pytest.raises(OSError, match=r"reset|timed out"):
            asks(goes)


def test_counters_of_filters_go_on_over_edits(lab: Lab) -> None:
    enforced(lab, Desired())
    for number in range(5):
        enforced(lab, guarded(gate(TCP, 1500), gate(TCP, 1510 + number)))
        assert answers(lab, PODS[Family.IP], TCP, 1500)
        assert not answers(lab, PODS[Family.IP], TCP, 1600)
    with kernel(IPTABLES).opened(lab.pod) as namespace:
        found = {live.rule: live for live in namespace.observe().live}
    assert found[gate(TCP, 1500)].packets == 5, "the first packet of each flow"
    guard = next(rule for rule in found if rule.guards and rule.family is Family.IP)
    assert found[guard].packets >= 5
    resuming = next(rule for rule in found if rule.resumes and rule.family is Family.IP)
    assert found[resuming].octets > found[gate(TCP, 1500)].octets
