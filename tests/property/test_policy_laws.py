"""Laws of NetworkPolicies: random ones mean, packet by packet, what the plain reading of the
documentation says; they only add; and their order does not matter."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, collapse_addresses, ip_address, ip_network
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rules.isolation import Register
from rules.manifests import CODES, read
from rules.model import Family, Machine, Protocol
from rules.policies import Direction, IpBlock, Namespace, NetworkPolicy, Party, Selector
from tests.isolation import Allowance, Question, admitting, isolation
from tests.policies import Packet, Pod, World, allowing
from tests.property.strategies import mutilated

# --------------------------------------------------------------------- a world that is all corners

# So few of everything that they often meet, and all packets can be tried.
SPACES = ("shop", "bank", "farm")
KEYS, WORDS = ("app", "tier"), ("x", "y", "")
IPS = (
    *(f"10.0.0.{last}" for last in (0, 1, 2, 3, 4, 7, 8)),
    *("10.0.1.0", "11.0.0.0", "fd00::", "fd00::1", "fd00::2", "fd00::4", "fd01::"),
)
CIDRS = (
    *("0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8", "10.0.0.0/29", "10.0.0.4/30"),
    *("10.0.0.0/31", "10.0.0.2/31", "10.0.0.2/32", "10.0.0.3/30", "::/0", "fd00::/126"),
    *("fd00::/127", "fd00::2/127", "fd00::1/128"),
)
PORTS = (1, 2, 3, 5, 8, 9, 65534, 65535)
NAMES = ("web", "dns")
PROTOCOLS = ("TCP", "UDP", "SCTP")

PACKETS = [
    Packet(direction, ip, protocol, port)
    for direction, ip in product(("Ingress", "Egress"), IPS)
    for protocol, port in [*product(PROTOCOLS[:2], (0, *PORTS)), ("SCTP", 5), ("ICMP", None)]
]

labels = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(WORDS))
expressions: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(KEYS),
            "operator": st.sampled_from(["In", "NotIn"]),
            "values": st.lists(st.sampled_from(WORDS), min_size=1, max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {"key": st.sampled_from(KEYS), "operator": st.sampled_from(["Exists", "DoesNotExist"])},
        optional={"values": st.just([])},
    ),
)


def selectors(known: st.SearchStrategy[dict[str, str]] = labels) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {}, optional={"matchLabels": known, "matchExpressions": st.lists(expressions, max_size=2)}
    )


space_selectors = selectors(
    labels
    | st.fixed_dictionaries({"kubernetes.io/metadata.name": st.sampled_from([*SPACES, "sea"])})
)


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    cidr = draw(st.sampled_from(CIDRS))
    whole = ip_network(cidr, strict=False)
    others = [ip_network(one, strict=False) for one in CIDRS]
    fit = [str(one) for one in others if one != whole and one.network_address in whole]
    fit = [one for one in fit if ip_network(one).prefixlen > whole.prefixlen]
    holes = st.lists(st.sampled_from(fit), max_size=3) if fit else st.just([])
    return {
        "ipBlock": {"cidr": cidr, **draw(st.fixed_dictionaries({}, optional={"except": holes}))}
    }


peers = st.one_of(
    blocks(),
    st.fixed_dictionaries({"podSelector": selectors()}),
    st.fixed_dictionaries({"namespaceSelector": space_selectors}),
    st.fixed_dictionaries({"namespaceSelector": space_selectors, "podSelector": selectors()}),
)


@st.composite
def ports(draw: st.DrawFn) -> dict[str, Any]:
    made = draw(st.fixed_dictionaries({}, optional={"protocol": st.sampled_from(PROTOCOLS[:2])}))
    kind = draw(st.sampled_from(["all", "name", "one", "range", "range"]))
    if kind == "name":
        made["port"] = draw(st.sampled_from(NAMES))
    elif kind != "all":
        ends = sorted(draw(st.tuples(st.sampled_from(PORTS), st.sampled_from(PORTS))))
        made |= {"port": ends[0], "endPort": ends[1]} if kind == "range" else {"port": ends[0]}
    return made


def rules(key: str) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {}, optional={key: st.lists(peers, max_size=3), "ports": st.lists(ports(), max_size=4)}
    )


specs: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "podSelector": st.just({}) | selectors(),
        "policyTypes": st.lists(st.sampled_from(["Ingress", "Egress"]), max_size=2),
        "ingress": st.lists(rules("from"), max_size=3),
        "egress": st.lists(rules("to"), max_size=3),
    },
)


@st.composite
def policies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": draw(st.sampled_from(["shop", "shop", "bank"]))},
        "spec": draw(specs),
    }


named_ports = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(PROTOCOLS[:2]), st.sampled_from(PORTS)),
    max_size=2,
    unique_by=lambda one: one[:2],
)
pods = st.builds(
    Pod,
    st.sampled_from(SPACES),
    labels,
    st.lists(st.sampled_from(IPS), max_size=2, unique=True),
    named_ports,
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(0, 4))
    return World(
        [draw(policies(f"p{number}")) for number in range(count)],
        draw(st.lists(pods, max_size=6)),
        draw(st.dictionaries(st.sampled_from(SPACES), labels)),
    )


subjects = st.builds(Pod, st.just("shop"), labels, st.just(()), named_ports)


# ------------------------------------------------------------------------------- the same as values


def understood(documents: Iterable[object]) -> list[NetworkPolicy]:
    reading = read({"kind": "List", "items": list(documents)})
    assert [str(problem) for problem in reading.problems] == []
    return list(reading.policies)


def sorted_labels(one: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(one.items()))


def port_names(pod: Pod) -> tuple[tuple[str, Protocol, int], ...]:
    return tuple((name, Protocol[protocol], port) for name, protocol, port in pod.ports)


def parties(world: World) -> list[Party]:
    return [
        Party(
            namespace=pod.namespace,
            labels=sorted_labels(dict(pod.labels)),
            addresses=tuple(map(ip_address, pod.ips)),
            names=port_names(pod),
        )
        for pod in world.pods
    ]


def namespaces(world: World) -> list[Namespace]:
    return [Namespace(name=n, labels=sorted_labels(dict(t))) for n, t in world.namespaces.items()]


def register(world: World) -> Register:
    return Register(understood(world.policies), parties(world), namespaces(world))


def machine(pod: Pod) -> Machine:
    return Machine(
        kind="VirtualMachineInstance",
        namespace=pod.namespace,
        name="vm",
        netns="vm",
        masquerade=None,
        labels=sorted_labels(dict(pod.labels)),
        names=port_names(pod),
    )


def isolations(known: Register, pod: Pod) -> dict[str, frozenset[Allowance] | None]:
    return {
        direction.value.capitalize(): isolation(known, machine(pod), direction)
        for direction in Direction
    }


def question(packet: Packet) -> Question:
    address = ip_address(packet.peer)
    protocol = Protocol[packet.protocol] if packet.protocol in PROTOCOLS else None
    return Family.of(address), address, protocol, packet.port


def passing(one: frozenset[Allowance] | None, packets: Iterable[Packet]) -> set[Packet]:
    return {packet for packet in packets if one is None or admitting(one, question(packet))}


def all_passing(known: Register, pod: Pod) -> set[Packet]:
    return {
        packet
        for direction, one in isolations(known, pod).items()
        for packet in passing(one, (some for some in PACKETS if some.direction == direction))
    }


# --------------------------------------------------------------------------------------------- laws


@given(worlds(), subjects)
def test_every_packet_is_judged_as_the_documentation_says(world: World, pod: Pod) -> None:
    known = isolations(register(world), pod)
    for packet in PACKETS:
        expected = allowing(world, pod, packet)
        found = known[packet.direction]
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            continue
        names = {f"NetworkPolicy/shop/{name}" for name in expected}
        assert admitting(found, question(packet)) == names


@given(worlds(), subjects)
def test_a_machine_is_isolated_just_where_a_policy_selects_it(world: World, pod: Pod) -> None:
    for direction in Direction:
        selecting = {
            policy
            for policy in understood(world.policies)
            if policy.namespace == "shop"
            and policy.rules(direction) is not None
            and policy.selector.matches(sorted_labels(dict(pod.labels)))
        }
        assert set(register(world).selecting(machine(pod), direction)) == selecting


@given(worlds(), policies("another"), subjects)
def test_to_who_is_isolated_another_policy_only_adds(
    world: World, another: dict[str, Any], pod: Pod
) -> None:
    before = isolations(register(world), pod)
    more = world._replace(policies=[*world.policies, another])
    after = isolations(register(more), pod)
    for direction, one in before.items():
        some = [packet for packet in PACKETS if packet.direction == direction]
        if one is not None:
            assert passing(one, some) <= passing(after[direction], some)
        if after[direction] is None:
            assert one is None


@given(worlds(), subjects, st.randoms(use_true_random=False))
def test_no_order_matters(world: World, pod: Pod, chance: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(inner)) for key, inner in value.items()]
            return dict(chance.sample(items, len(items)))
        if isinstance(value, list):
            return [shuffled(one) for one in chance.sample(value, len(value))]
        return value

    other = World(
        shuffled(list(world.policies)), shuffled(list(world.pods)), shuffled(dict(world.namespaces))
    )
    assert isolations(register(world), pod) == isolations(register(other), pod)


@given(worlds(), subjects)
def test_what_is_known_twice_is_known_once(world: World, pod: Pod) -> None:
    found, others = understood(world.policies), parties(world)
    twice = Register(found * 2, others * 2, namespaces(world) * 2)
    assert isolations(twice, pod) == isolations(register(world), pod)


@given(worlds(), subjects, st.data())
def test_a_broken_policy_opens_nothing(world: World, pod: Pod, data: st.DataObject) -> None:
    found = understood(world.policies)
    shut = [policy.shut() if data.draw(st.booleans()) else policy for policy in found]
    sound = Register(found, parties(world), namespaces(world))
    partly = Register(shut, parties(world), namespaces(world))
    assert all_passing(partly, pod) <= all_passing(sound, pod)
    for direction in Direction:
        still, before = (one.selecting(machine(pod), direction) for one in (partly, sound))
        assert list(map(str, still)) == list(map(str, before))


@given(worlds(), subjects, st.sampled_from(SPACES))
def test_labels_that_nobody_knows_open_nothing(world: World, pod: Pod, space: str) -> None:
    """Whatever the labels are that could not be read, no more passes than would with them."""
    others = {name: some for name, some in world.namespaces.items() if name != space}
    rest = namespaces(world._replace(namespaces=others))
    unread = Register(
        understood(world.policies), parties(world), [*rest, Namespace(name=space, labels=None)]
    )
    least = all_passing(unread, pod)
    for some in ({}, {"app": "x"}, {"app": "y", "tier": "x"}, {"app": "", "tier": ""}):
        assert least <= all_passing(
            register(world._replace(namespaces=others | {space: some})), pod
        )


# ------------------------------------------------------------------------------------------- blocks


@given(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 63), st.integers(0, 5)), max_size=6))
def test_a_block_is_its_network_without_its_exceptions(
    size: int, holes: list[tuple[int, int]]
) -> None:
    whole = IPv4Network((10 << 24, 32 - size))
    inside = [
        IPv4Network((10 << 24 | (place % (1 << size)) >> bits << bits, 32 - bits))
        for place, bits in holes
        if bits < size
    ]
    block = IpBlock(whole, tuple(inside))
    made = list(block.networks())
    left = {address for address in whole if not any(address in hole for hole in inside)}
    assert {address for one in made for address in one} == left
    assert made == list(collapse_addresses(IPv4Network(address) for address in left))
    assert {address for address in whole if address in block} == left


# -------------------------------------------------------------------------- whatever may be written


def check(document: object) -> None:
    """What cannot be understood selects, and allows nothing; and whatever it is, it is answered."""
    reading = read(document)
    assert {problem.code for problem in reading.problems} <= set(CODES)
    assert all(problem.fix.endswith(".") for problem in reading.problems)
    assert all(str(problem).isprintable() for problem in reading.problems)
    assert len(reading.policies) == len(reading.policy_places) <= reading.count
    for policy in reading.policies:
        assert policy.broken == bool(reading.problems)
        if policy.broken:
            assert policy.ingress in (None, ())
            assert policy.egress in (None, ())
            assert () in (policy.ingress, policy.egress)


@given(policies("p"), st.data())
def test_a_mutilated_policy_is_whole_or_closes(policy: dict[str, Any], data: st.DataObject) -> None:
    document = policy | {"spec": data.draw(mutilated(policy["spec"]))}
    check(document)
    reading = read(document)
    assert len(reading.policies) == 1  # its namespace can be read, so it is there
    [made] = reading.policies
    assert (made.namespace, made.name) == (policy["metadata"]["namespace"], "p")
    if any(problem.path[:2] == ("spec", "podSelector") for problem in reading.problems):
        assert made.selector == Selector()


@given(policies("p"), st.data())
def test_whatever_is_written_is_answered(policy: dict[str, Any], data: st.DataObject) -> None:
    check(data.draw(mutilated(policy)))
