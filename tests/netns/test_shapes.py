"""Many ranges in the kernel: when they become elements of a map and when rules again, in how many
transactions, with what of them touched; what the raw batch writes and what is known after it; and
what a stranger may do to maps."""

from __future__ import annotations

import io
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise

import pytest

from agent.commands.explain import explain
from agent.commands.plan import plan as plan_command
from agent.commands.show import show
from agent.console import Console
from agent.errors import Stale
from agent.kernel.events import (
    ADD_MEMBERSHIP,
    NEWGEN,
    NFNLGRP_NFTABLES,
    SO_RCVBUFFORCE,
    SOL_NETLINK,
    Events,
    Moved,
    messages,
)
from agent.kernel.kinds import Namespace
from agent.kernel.netlink import HEADER, attribute, attributes, transact
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import NETLINK_NETFILTER
from agent.reconcile import converge
from rules.model import (
    CHAIN,
    Chain,
    Desired,
    Family,
    Live,
    Lookup,
    Observed,
    Pending,
    Protocol,
    Rule,
)
from rules.nft import commands
from rules.nft_batch import (
    ACK,
    BATCH_BEGIN,
    BATCH_END,
    CREATE,
    DELCHAIN,
    DELRULE,
    DELSETELEM,
    NEWCHAIN,
    NEWRULE,
    NEWSETELEM,
    REQUEST,
)
from rules.nft_foreseen import are_elements
from rules.nft_transactions import transactions
from rules.plan import Plan, Table, diff
from rules.shapes import Lives
from rules.values import replace
from tests.netns.arenas import NftablesArena
from tests.netns.test_script import carry_out, planned
from tests.netns.written import entered
from tests.spaces import (
    NFTABLES,
    applied,
    emptied,
    kernel,
    legacy,
    manifest,
    nft,
    observed,
    pod,
    run,
    space,
    using,
    vm,
    within,
)
from tests.unit.samples import egress, forward, from_inside

ENTERING = Lookup(Chain.PREROUTING, Family.IP, Protocol.TCP, "eth0", None)
NAME = "prerouting-ip-tcp-eth0"


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[str]:
    with using(NFTABLES) as asked_for:
        yield asked_for


@pytest.fixture(scope="module")
def pods() -> Iterator[tuple[str, str]]:
    with pod() as one, pod() as other:
        yield one, other


@pytest.fixture
def netns(pods: tuple[str, str]) -> str:
    return emptied(pods[0])


@pytest.fixture
def twins(pods: tuple[str, str]) -> tuple[str, str]:
    return emptied(pods[0]), emptied(pods[1])


def many(number: int, *, first: int = 1000, owner: str = "o") -> list[Rule]:
    """That many ranges of one lookup, four ports apart."""
    return [
        forward(f"tcp {port}-{port + 5}", owner=owner)
        for port in range(first, first + 10 * number, 10)
    ]


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset([*rules, egress()]))


def held(netns: str, *rules: Rule) -> Plan:
    """Make the namespace hold these, and our own masquerade."""
    with entered(netns) as namespace:
        return converge(netns, want(*rules), namespace)


def rules_of(seen: Observed) -> Counter[Rule]:
    return Counter(live.rule for live in seen.live)


def assert_holds(netns: str, *rules: Rule) -> None:
    seen = observed(netns)
    assert rules_of(seen) == Counter([*rules, egress()])
    assert (seen.foreign, seen.unsound) == ((), "")
    assert held(netns, *rules).empty


def is_map(netns: str) -> bool:
    """As nft itself tells, and as we do."""
    listed = NAME in within(netns, "nft", "list", "maps")
    assert listed is (ENTERING in (observed(netns).mapped or {}))
    return listed


@contextmanager
def telling(netns: str) -> Iterator[Callable[[], Counter[int]]]:
    """What the kernel tells of our commits: how many rules, maps and so on came and went, by the
    type of its message; of elements, their ends are counted."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        listener = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    with listener:
        listener.bind((0, 0))
        listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
        listener.setsockopt(SOL_NETLINK, ADD_MEMBERSHIP, NFNLGRP_NFTABLES)
        yield partial(_told, listener)


def _told(listener: socket.socket) -> Counter[int]:
    found: Counter[int] = Counter()
    for _ in range(100_000):
        try:
            data = memoryview(listener.recv(1 << 18, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return found
        for kind, body in messages(data):
            if kind in (NEWSETELEM, DELSETELEM):
                elements = attributes(memoryview(body)[4:]).get(3, b"")
                found[kind] += sum(1 for _ in _listed(elements))
            else:
                found[kind] += 1
    raise AssertionError("it never ends")


def _listed(raw: bytes) -> Iterator[bytes]:
    while raw:
        (length,) = struct.unpack_from("=H", raw)
        yield raw[4:length]
        raw = raw[(length + 3) & ~3 :]


# ------------------------------------------------------------------------------------ the shapes


def test_from_8_on_it_is_a_map_and_down_to_4_it_is_rules_again(netns: str) -> None:
    expected = [
        "1 rules",
        "7 rules",
        "8 map",
        "9 map",
        "8 map",
        "7 map",
        "5 map",
        "4 rules",
        "5 rules",
        "7 rules",
        "8 map",
        "40 map",
        "5 map",
        "0 rules",
    ]
    for number, shape in (words.split() for words in expected):
        held(netns, *many(int(number)))
        assert is_map(netns) is (shape == "map"), f"{number} should be {shape}"
        assert_holds(netns, *many(int(number)))


@pytest.fixture
def events(netns: str) -> Iterator[Callable[[], list[int]]]:
    """The generations that were told of the namespace since one last asked."""
    with ExitStack() as stack:
        node = stack.enter_context(space())
        with opened(node) as descriptor, inside(descriptor, node):
            made = stack.enter_context(closing(Events()))
        with opened(netns) as descriptor:
            number = made.nsid(descriptor)
        yield lambda: [
            event.generation
            for event in made.read()
            if isinstance(event, Moved) and event.nsid == number
        ]


@pytest.mark.parametrize(
    ("before", "after", "transactions"),
    [
        # A map is filled before its rule is there, and goes after it: see nft_transactions.
        pytest.param([7], 8, 2, id="rules become a map"),
        pytest.param([1], 40, 2, id="a rule becomes a map"),
        pytest.param([0], 40, 1, id="nothing becomes a map"),
        pytest.param([8, 5], 4, 2, id="a map becomes rules"),
        pytest.param([40], 1, 2, id="a map becomes a rule"),
        pytest.param([40], 0, 1, id="a map goes"),
        pytest.param([40], 41, 1, id="a map grows"),
        pytest.param([40], 5, 1, id="a map shrinks"),
    ],
)
def test_a_change_of_shape_is_told_as_so_many_transactions(
    netns: str,
    events: Callable[[], list[int]],
    before: list[int],
    after: int,
    transactions: int,
) -> None:
    for number in before:
        held(netns, *many(number))
    with entered(netns) as namespace:
        namespace.observe()
        assert namespace.generation is not None
        number = namespace.generation.number
    events()
    held(netns, *many(after))
    assert events() == [number + 1 + step for step in range(transactions)]
    assert_holds(netns, *many(after))
    assert events() == []


def test_a_first_map_comes_with_its_table_in_one_transaction(
    netns: str, events: Callable[[], list[int]]
) -> None:
    events()
    held(netns, *many(40))
    assert len(events()) == 1
    assert_holds(netns, *many(40))


def test_a_map_that_was_filled_and_left_behind_is_used_or_goes(netns: str) -> None:
    """As by a process that was killed between the two transactions."""
    for number in (8, 3):
        emptied(netns)
        held(netns, *many(7))
        first, _ = transactions(diff(netns, want(*many(8)), observed(netns)))
        within(netns, "nft", "-j", "-f", "-", stdin=json.dumps({"nftables": commands(first)}))
        held(netns, *many(number))
        assert is_map(netns) is (number == 8)
        assert_holds(netns, *many(number))


@pytest.mark.parametrize("done", [1, 2, 3])
@pytest.mark.parametrize("anew", [False, True], ids=["edited", "made anew"])
def test_what_a_kill_leaves_between_transactions_is_found_and_goes(
    netns: str, done: int, anew: bool
) -> None:
    held(netns, *many(20))
    if anew:
        nft(netns, "add chain inet portranger mine")
    grown = [forward("tcp 1000-1008", owner="o"), *many(20)[1:]]
    parts = transactions(diff(netns, want(*grown), observed(netns)))
    assert len(parts) == (4 if anew else 3)
    for part in parts[:done]:
        within(netns, "nft", "-j", "-f", "-", stdin=json.dumps({"nftables": commands(part)}))
    seen = observed(netns)
    left = [one.text for one in seen.foreign if one.kind == CHAIN]
    between = done < len(parts)
    assert bool(left) is between
    assert bool(seen.unsound) is (anew and done == 1)
    held(netns, *grown)
    assert_holds(netns, *grown)
    assert "bridge" not in within(netns, "nft", "list", "ruleset")


def test_one_range_more_or_less_is_one_element_and_the_others_count_on(netns: str) -> None:
    held(netns, *many(20))
    NftablesArena(netns).brand()
    branded = {live.rule: live.packets for live in observed(netns).live if not live.handle}
    assert sorted(branded.values()) == list(range(1000, 1020))
    grown = forward("tcp 1000-1006", owner="o")
    two = {NEWGEN: 1}  # an interval has two ends
    bridged = dict.fromkeys((NEWCHAIN, DELCHAIN, NEWRULE, DELRULE), 1) | {NEWGEN: 3}
    steps: list[tuple[list[Rule], dict[int, int]]] = [
        ([*many(21)], {NEWSETELEM: 2, **two}),
        ([*many(20)], {DELSETELEM: 2, **two}),
        ([grown, *many(20)[1:]], {DELSETELEM: 2, NEWSETELEM: 2, **bridged}),
        ([*many(20)[1:]], {DELSETELEM: 2, **two}),
        ([*many(20)[2:]], {DELSETELEM: 2, **two}),
        ([forward("tcp 65000-65535"), *many(20)[2:]], {NEWSETELEM: 1, **two}),
        ([*many(20)[2:]], {DELSETELEM: 1, **two}),
    ]
    for rules, expected in steps:
        with telling(netns) as told:
            held(netns, *rules)
            assert told() == expected
        seen = {live.rule: live.packets for live in observed(netns).live if not live.handle}
        assert all(seen[rule] == branded[rule] for rule in many(20)[2:])


def test_every_lookup_has_its_own_shape(netns: str) -> None:
    others = [
        *(forward(f"udp {port}") for port in range(1, 40, 2)),
        *(forward(f"tcp {port}", to="fd10:0:2::2") for port in range(1, 15, 2)),
        *(from_inside(f"tcp {port}") for port in range(1, 17, 2)),
    ]
    held(netns, *many(3), *others)
    assert {str(lookup.chain.value) for lookup in observed(netns).mapped or {}} == {
        "prerouting",
        "output",
    }
    assert within(netns, "nft", "list", "maps").count("type inet_service : ipv4_addr") == 2
    assert "ipv6_addr" not in within(netns, "nft", "list", "maps")
    assert_holds(netns, *many(3), *others)


# ------------------------------------------------------------------------------- the raw batch


ODD = [
    forward("tcp 1", owner="ü" * 64),
    forward("tcp 2-3", owner="a", to="10.0.9.9"),
    forward("tcp 4", owner="b"),
    forward("tcp 5-999", owner="c"),
    forward("tcp 65000-65534", owner="c"),
    forward("tcp 65535", owner="c", to="10.0.9.9"),
]


def raw(netns: str, namespace: Namespace, *rules: Rule) -> Plan:
    """What converge does, where that must be a change of elements only."""
    desired = want(*rules)
    plan = diff(netns, desired, namespace.observe())
    assert are_elements(plan)
    with telling(netns) as told:
        namespace.commit(plan)
        found = told()
    assert found.pop(NEWGEN) == len(transactions(plan))
    assert found[NEWRULE] == found[DELRULE]  # of a bridge
    assert +found
    assert (+found).keys() - {NEWCHAIN, DELCHAIN, NEWRULE, DELRULE} <= {NEWSETELEM, DELSETELEM}
    return plan


def assert_as_predicted(netns: str, namespace: Namespace) -> None:
    """What is known without a look is what another finds who looks."""
    predicted = namespace.known
    with entered(netns) as another:
        found = another.observe()
        generation = another.generation
    assert predicted is not None
    assert predicted[0] == generation
    known = predicted[1]
    assert rules_of(known) == rules_of(found)
    assert isinstance(known.live, Lives)
    assert isinstance(found.live, Lives)
    assert +known.live.weights == +found.live.weights
    assert known.live.by_rule.keys() == found.live.by_rule.keys()
    assert {live.rule: live.handle for live in known.live} == {
        live.rule: live.handle for live in found.live
    }
    for key in ("foreign", "chains", "table", "unsound", "mapped"):
        assert getattr(known, key) == getattr(found, key)


def test_nft_reads_what_the_batch_has_written(netns: str) -> None:
    six = [replace(rule, owner="6") for rule in (forward(f"tcp {p}", to="fd10::2") for p in SIXES)]
    held(netns, *many(20), *six)
    with entered(netns) as namespace:
        raw(netns, namespace, *many(20), *ODD, *six[1:], forward("tcp 65000-65535", to="fd10::9"))
        assert_as_predicted(netns, namespace)
    assert_holds(netns, *many(20), *ODD, *six[1:], forward("tcp 65000-65535", to="fd10::9"))
    listing = within(netns, "nft", "-n", "list", "table", "inet", "portranger")
    for rule in ODD:
        assert (
            f'{rule.ports} counter packets 0 bytes 0 comment "{rule.owner}" : {rule.to}' in listing
        )
    assert "65000-65535 counter packets 0 bytes 0" in listing
    with entered(netns) as namespace:
        raw(netns, namespace, *many(20), *six)
        assert_as_predicted(netns, namespace)
    assert_holds(netns, *many(20), *six)


SIXES = range(1, 50, 2)


def test_any_set_of_ranges_leads_to_any_other(netns: str) -> None:
    """Neighbours, ends of the number space, whatever order: a hundred sets, each by a batch."""
    picked = random.Random(5)
    held(netns, *many(8))
    with entered(netns) as namespace:
        for number in range(100):
            edges = sorted(picked.sample([1, *range(2, 200), *range(65400, 65536), 65536], 60))
            spans = list(zip(edges[::2], edges[1::2], strict=True))
            spans += [(last, first) for (_, last), (first, _) in pairwise(spans)][::3]
            rules = [
                forward(f"tcp {first}-{last - 1}", to=f"10.0.9.{picked.choice([2, 3])}")
                for first, last in spans
            ]
            raw(netns, namespace, *rules)
            if number % 10 == 9:
                assert_as_predicted(netns, namespace)
                assert_holds(netns, *rules)


def test_5000_ranges_go_in_and_out_in_one_batch(
    netns: str, events: Callable[[], list[int]]
) -> None:
    held(netns, *many(20))
    events()
    with entered(netns) as namespace:
        assert len(raw(netns, namespace, *many(5000)).add) == 4980
        assert_as_predicted(netns, namespace)
        assert len(events()) == 1
        assert len(raw(netns, namespace, *many(20)).remove) == 4980
        assert_as_predicted(netns, namespace)
        assert len(events()) == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("add table ip other", id="outside our table"),
        pytest.param(f"add element inet portranger {NAME} {{ 7 : 10.0.2.9 }}", id="in our map"),
        pytest.param(f"delete element inet portranger {NAME} {{ 1000-1005 }}", id="of what goes"),
    ],
)
def test_a_batch_for_an_old_generation_writes_nothing(netns: str, script: str) -> None:
    held(netns, *many(20))
    with entered(netns) as namespace:
        plan = diff(netns, want(*many(21)[1:]), namespace.observe())
        assert are_elements(plan)
        nft(netns, script)
        before = within(netns, "nft", "list", "ruleset")
        with pytest.raises(Stale) as refusal:
            namespace.commit(plan)
        assert refusal.value.exit_code == 75
        assert within(netns, "nft", "list", "ruleset") == before
        assert rules_of(namespace.observe()) == rules_of(observed(netns))


class Surprised:
    """A namespace in which something happens just before the first commits."""

    def __init__(self, namespace: Namespace, *surprises: Callable[[], None]) -> None:
        self._namespace = namespace
        self._surprises = list(surprises)
        self.commits = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._namespace, name)

    def commit(self, plan: Plan) -> None:
        self.commits += 1
        if self._surprises:
            self._surprises.pop(0)()
        self._namespace.commit(plan)


def test_a_foreign_change_in_between_is_looked_at_and_undone(netns: str) -> None:
    held(netns, *many(20))
    strangers = [
        f"add element inet portranger {NAME} {{ 7 : 10.0.2.9 }}",
        f"delete element inet portranger {NAME} {{ 1100-1105 }}",
        f"flush map inet portranger {NAME}",
    ]
    with entered(netns) as namespace:
        surprised = Surprised(namespace, *(partial(nft, netns, script) for script in strangers))
        converge(netns, want(*many(21)), surprised)  # type: ignore[arg-type]  # it passes all on
    assert surprised.commits == 4
    assert_holds(netns, *many(21))


def test_a_plan_for_an_earlier_look_changes_nothing(netns: str) -> None:
    held(netns, *many(20))
    with entered(netns) as namespace:
        plan = diff(netns, want(*many(20)[1:]), namespace.observe())
        nft(
            netns,
            f"delete element inet portranger {NAME} {{ 1000-1005 }}\n"
            f'add element inet portranger {NAME} {{ 1000-1005 comment "x" : 10.0.2.9 }}',
        )
        seen = namespace.observe()
        with pytest.raises(Stale):
            namespace.commit(plan)
        assert namespace.observe() == seen
        assert converge(netns, want(*many(20)[1:]), namespace).remove


def test_a_wrong_idea_is_refused_whole_and_not_believed_again(netns: str) -> None:
    """As if the kernel had not done what it acknowledged: two maps, an error in each."""
    udp = [forward(f"udp {port}") for port in range(1, 41, 2)]
    held(netns, *many(20), *udp)
    phantoms = (forward("tcp 7"), forward("udp 7"))
    with entered(netns) as namespace:
        namespace.observe()
        assert namespace.known is not None
        generation, seen = namespace.known
        wrong = replace(seen, live=Lives([*seen.live[:-1], *(Live(x, 0) for x in phantoms)]))
    with entered(netns, (generation, wrong)) as namespace:
        assert rules_of(namespace.observe())[phantoms[0]] == 1
        plan = diff(netns, want(*many(20), *udp), namespace.observe())
        assert are_elements(plan)
        with pytest.raises(Stale):
            namespace.commit(plan)
        assert rules_of(namespace.observe()) == Counter([*many(20), *udp, egress()])
        assert namespace.generation == generation
        assert converge(netns, want(*many(20), *udp), namespace).empty


# ----------------------------------------------------------------------------------- what is known


def test_what_is_known_spares_a_look_until_something_changes(netns: str) -> None:
    held(netns, *many(20))
    with entered(netns) as namespace:
        live = namespace.observe().live
        known = namespace.known
    with entered(netns) as namespace:
        assert namespace.observe().live is not live, "something is remembered that should not be"
    with entered(netns, known) as namespace:
        assert namespace.observe().live is live
        nft(netns, "add table ip other")
        assert namespace.observe().live is not live
        assert rules_of(namespace.observe()) == Counter([*many(20), egress()])
    nft(netns, f"add element inet portranger {NAME} {{ 7 : 10.0.2.9 }}")
    with entered(netns, known) as namespace:
        assert sum(rules_of(namespace.observe()).values()) == 22


def test_what_was_written_is_known_without_a_look(netns: str) -> None:
    held(netns, *many(20))
    with entered(netns) as namespace:
        converge(netns, want(*many(21)), namespace)
        known = namespace.known
        assert known is not None
        live = known[1].live
    with entered(netns, known) as namespace:
        assert namespace.observe().live is live
        assert converge(netns, want(*many(21)), namespace).empty


def test_another_namespace_of_the_same_name_is_never_taken_for_the_old_one() -> None:
    with pod() as name:
        held(name, *many(20))
        with entered(name) as namespace:
            namespace.observe()
            known = namespace.known
        assert known is not None
        run("ip", "netns", "del", name)
        run("ip", "netns", "add", name)
        for _ in range(20):
            with entered(name) as namespace:
                namespace.observe()
                assert namespace.generation is not None
                number = namespace.generation.number
            if number == known[0].number:
                break
            nft(name, f"add table ip x{number}")
        with entered(name, known) as namespace:
            assert not namespace.observe().table
            assert namespace.generation is not None
            assert namespace.generation.number == known[0].number
            assert namespace.generation.cookie != known[0].cookie


def test_a_commit_that_writes_no_element_predicts_nothing(netns: str) -> None:
    """What is left over in the legacy tables goes, and no generation comes of it: else the next
    one, a stranger's, would be taken for ours."""
    held(netns, *many(20))
    legacy(netns, ":PORTRANGER-PREROUTING -")
    with entered(netns) as namespace:
        plan = converge(netns, want(*many(20)), namespace)
        assert plan.leftovers
        assert (plan.add, plan.change, plan.remove) == ((), (), ())
        nft(netns, f"add element inet portranger {NAME} {{ 7 : 10.0.2.9 }}")
        assert len(diff(netns, want(*many(20)), namespace.observe()).remove) == 1


# ------------------------------------------------------------------------------------- strangers

LOOKS = f"meta nfproto ipv4 counter dnat ip to tcp dport map @{NAME}"
LOOKUP = f'iifname "eth0" {LOOKS}'
ADD, DELETE = (f"{verb} element inet portranger {NAME}" for verb in ("add", "delete"))
RULE = "rule inet portranger prerouting"

REPAIRED = {
    "an element": f"{ADD} {{ 7 : 10.0.2.9 }}",
    "an element with a foreign comment": f'{ADD} {{ 7-9 comment "mine" : 10.0.2.9 }}',
    "neighbours of our elements": f"{ADD} {{ 999 : 10.0.2.9, 1006-1009 : 10.0.2.2 }}",
    "an element up to the last port": f"{ADD} {{ 60000-65535 : 10.0.2.9 }}",
    "an element less": f"{DELETE} {{ 1000-1005 }}",
    "another target": f'{DELETE} {{ 1000-1005 }}\n{ADD} {{ 1000-1005 comment "o" : 10.0.2.9 }}',
    "another comment": f'{DELETE} {{ 1000-1005 }}\n{ADD} {{ 1000-1005 comment "x" : 10.0.2.2 }}',
    "no comment": f"{DELETE} {{ 1000-1005 }}\n{ADD} {{ 1000-1005 : 10.0.2.2 }}",
    "another range": f'{DELETE} {{ 1000-1005 }}\n{ADD} {{ 990-1007 comment "o" : 10.0.2.2 }}',
    "half a range": f'{DELETE} {{ 1000-1005 }}\n{ADD} {{ 1000-1002 comment "o" : 10.0.2.2 }}',
    "no element at all": f"flush map inet portranger {NAME}",
    "a rule that is in the map": (
        f'insert {RULE} iifname "eth0" meta nfproto ipv4 tcp dport 1000-1005 counter'
        ' dnat ip to 10.0.2.2 comment "o"'
    ),
    "a rule that is not in the map": (
        f'add {RULE} iifname "eth0" meta nfproto ipv4 tcp dport 7 counter dnat ip to 10.0.2.9'
    ),
    "a rule that looks for other ports": (
        f"insert {RULE} meta nfproto ipv4 counter dnat ip to tcp sport map @{NAME}"
    ),
    "a lookup with a comment": f'add {RULE} {LOOKUP} comment "mine"',
    "a lookup on any link": f"add {RULE} {LOOKS}",
    "port zero": f"{ADD} {{ 0 : 10.0.2.9 }}",
    "a comment that is no text": f'{ADD} {{ 7 comment "\x1b[2J" : 10.0.2.9 }}',
    "another map": "add map inet portranger mine { type inet_service : ipv4_addr; }",
    "a map of a name that we may need": (
        "add map inet portranger prerouting-ip-udp-eth0"
        " { type inet_service : ipv4_addr; flags interval; counter; }"
    ),
    "a set": "add set inet portranger mine { type inet_service; }",
    "a second lookup": f"add {RULE} {LOOKUP}",
    "no lookup": "flush chain inet portranger prerouting",
    "another lookup": f"flush chain inet portranger prerouting\nadd {RULE} {LOOKUP} persistent",
    "no counter in the lookup": (
        f"flush chain inet portranger prerouting\nadd {RULE} {LOOKUP.replace('counter ', '')}"
    ),
}
MADE_ANEW = {
    "a map without counters": (
        "flush chain inet portranger prerouting\n"
        f"delete map inet portranger {NAME}\n"
        f"add map inet portranger {NAME} {{ type inet_service : ipv4_addr; flags interval; }}\n"
        f"{ADD} {{ 1000-1005 : 10.0.2.2 }}\n"
        f"add {RULE} {LOOKUP}"
    ),
    "another chain": "add chain inet portranger mine",
    "flags of the table": "add table inet portranger { flags dormant; }",
}


@pytest.mark.parametrize("script", REPAIRED.values(), ids=REPAIRED)
def test_what_a_stranger_does_in_a_map_is_undone_and_nothing_else(netns: str, script: str) -> None:
    held(netns, *many(20))
    NftablesArena(netns).brand()
    branded = {live.rule: live.packets for live in observed(netns).live if not live.handle}
    nft(netns, script)
    untouched = {live.rule for live in observed(netns).live if live.packets >= 1000}
    done = held(netns, *many(20))
    assert done.table is Table.KEEP
    assert is_map(netns)
    seen = {live.rule: live.packets for live in observed(netns).live}
    assert all(seen[rule] == branded[rule] for rule in untouched)
    assert_holds(netns, *many(20))


@pytest.mark.parametrize("script", MADE_ANEW.values(), ids=MADE_ANEW)
def test_what_cannot_be_undone_is_made_anew(
    netns: str, events: Callable[[], list[int]], script: str
) -> None:
    held(netns, *many(20))
    nft(netns, script)
    assert observed(netns).unsound
    events()
    assert held(netns, *many(20)).table is Table.REMAKE
    assert events()
    assert is_map(netns)
    assert_holds(netns, *many(20))
    assert "bridge" not in within(netns, "nft", "list", "ruleset")


def test_an_element_for_all_other_ports_is_seen_and_goes(netns: str) -> None:
    held(netns, *many(20))
    with opened(netns) as descriptor, inside(descriptor, netns):
        stranger = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    with stranger:
        transact(stranger, CATCH_ALL)
    assert "* counter" in within(netns, "nft", "list", "map", "inet", "portranger", NAME)
    assert held(netns, *many(20)).table is Table.REMAKE  # it has no ports to name it by
    assert_holds(netns, *many(20))


def message(kind: int, flags: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, flags, 0, 0) + body


# nft 1.0.6 dies of writing one, so the stranger does it himself: with a flag and a target, no key.
_ELEMENT = attribute(3, bytes([0, 0, 0, 2])) + attribute(
    2, attribute(1, bytes([10, 0, 2, 9])), nested=True
)
CATCH_ALL = (
    message(BATCH_BEGIN, REQUEST, bytes([0, 0, 0, 10]))
    + message(
        NEWSETELEM,
        REQUEST | CREATE | ACK,
        bytes([1, 0, 0, 0])
        + attribute(1, b"portranger\0")
        + attribute(2, NAME.encode() + b"\0")
        + attribute(3, attribute(1, _ELEMENT, nested=True), nested=True),
    )
    + message(BATCH_END, REQUEST, bytes([0, 0, 0, 10]))
)


@pytest.mark.parametrize("harm", ["port zero", "another map", "another chain", "a second lookup"])
def test_a_machine_that_waits_keeps_its_elements_whatever_is_repaired(
    netns: str, harm: str
) -> None:
    away = many(6, owner="away")
    held(netns, *away, *many(8, first=2000))
    nft(netns, {**REPAIRED, **MADE_ANEW}[harm])
    desired = replace(want(*many(8, first=2000)), pending=(Pending("away", "no address yet"),))
    with entered(netns) as namespace:
        anew = converge(netns, desired, namespace).table is Table.REMAKE
        assert anew is (harm in MADE_ANEW)
        assert converge(netns, desired, namespace).empty
    assert is_map(netns)
    assert rules_of(observed(netns)) == Counter([*away, *many(8, first=2000), egress()])


# ----------------------------------------------------------------------------- how it is shown


def said(command: Callable[[Console], int]) -> str:
    out, err = io.StringIO(), io.StringIO()
    assert command(Console(out, err, bytes)) == 0, err.getvalue()
    return out.getvalue()


def test_ranges_in_a_map_are_shown_and_explained_as_rules_are(twins: tuple[str, str]) -> None:
    as_rules, as_map = twins
    few = ",".join(f"{first}-{first + 5},{first}/udp" for first in range(1000, 1060, 10))
    applied(as_rules, vm("desktop", few))
    applied(
        as_map, vm("desktop", f"{few},{','.join(f'{port},{port}/udp' for port in range(4, 12, 2))}")
    )
    applied(as_map, vm("desktop", few))
    assert not observed(as_rules).mapped
    assert len(observed(as_map).mapped or ()) == 6
    asked: list[Callable[[str, Console], int]] = [
        lambda netns, console: show([netns], console, kernel=kernel(NFTABLES)),
        lambda netns, console: show([netns], console, kernel=kernel(NFTABLES), output="json"),
        *(
            partial(_explained, question, sender)
            for question in ("tcp/1003", "tcp/1006", "udp/1050", "udp/1051")
            for sender in (None, "127.0.0.1", "192.0.2.7", "10.0.2.2")
        ),
        *(partial(_planned, output) for output in ("text", "json")),
    ]
    for ask in asked:
        one, other = (said(partial(ask, netns)).replace(netns, "NETNS") for netns in twins)
        assert one == other
    assert "goes to 10.0.2.2:1003" in said(partial(_explained, "tcp/1003", None, as_map))


def _explained(what: str, sender: str | None, netns: str, console: Console) -> int:
    return explain(what, console, kernel=kernel(NFTABLES), netns=netns, source=sender)


def _planned(output: str, netns: str, console: Console) -> int:
    """Of one range that grows, one that goes and one that comes, of six."""
    ranges = ["1000-1008", *(f"{first}-{first + 5}" for first in range(1020, 1060, 10)), "7"]
    udp = [f"{first}/udp" for first in range(1000, 1060, 10)]
    text = manifest(netns, ",".join([*ranges, *udp]))
    again = Console(console.out, console.err, text.encode)
    return plan_command(["-"], again, kernel=kernel(NFTABLES), output=output)


def test_counters_of_elements_are_shown(netns: str) -> None:
    applied(netns, vm("desktop", ",".join(f"{port}/udp" for port in range(1000, 1040, 2))))
    arena = NftablesArena(netns)
    for port in (1004, 1004, 1005):
        arena.knock(port)
    shown = said(lambda console: show([netns], console, kernel=kernel(NFTABLES)))
    (line,) = (line for line in shown.splitlines() if "output" in line and "udp 1004 " in line)
    assert "2 packets" in line
    assert shown.count(" 0 packets") == len(observed(netns).live) - 2  # the source NAT counts, too


# ------------------------------------------------------------------------------------ as a script


def text(number: int) -> str:
    return ",".join(f"{first}-{first + 5}" for first in range(1000, 1000 + 10 * number, 10))


def test_the_script_leads_through_every_shape_where_apply_leads(twins: tuple[str, str]) -> None:
    by_script, by_apply = twins
    steps: Sequence[str | None] = [
        text(7),
        text(8),
        f"{text(8)},65000-65535",
        text(5),
        text(4),
        f"{text(40)},7/udp",
        None,
        text(20),
        "22",
    ]
    for ranges in steps:
        carry_out(by_script, planned(by_script, ranges))
        applied(by_apply, vm("desktop", ranges))
        one, other = observed(by_script), observed(by_apply)
        assert rules_of(one) == rules_of(other)
        assert (one.mapped or {}).keys() == (other.mapped or {}).keys()
        assert planned(by_script, ranges, output="text").startswith("No changes. ")


@pytest.mark.parametrize("harm", ["an element", "no element at all", "no lookup", "port zero"])
def test_the_script_repairs_a_map(netns: str, harm: str) -> None:
    applied(netns, vm("desktop", text(20)))
    nft(netns, {**REPAIRED, **MADE_ANEW}[harm])
    carry_out(netns, planned(netns, text(20)))
    assert planned(netns, text(20), output="text").startswith("No changes. ")


def test_a_plan_of_many_ranges_against_nothing_is_accepted(netns: str) -> None:
    source = manifest(netns, text(20)).encode
    out, err = io.StringIO(), io.StringIO()
    assert plan_command(["-"], Console(out, err, source), kernel=None, output="nft") == 0
    assert out.getvalue().count("add map ") == 3
    carry_out(netns, out.getvalue())
    assert planned(netns, text(20), output="text").startswith("No changes. ")
    assert plan_command(["-"], Console(out, err, source), kernel=None, output="iptables") == 0
    drops = 1  # of what the guest's side sends to loopback
    assert out.getvalue().count("-A PORTRANGER-PREROUTING") == 2 * 20 + drops  # which has no maps
