"""The laws of the codec of iptables, over lists that stand for its tables."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address, ip_network
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rules.flattened import flattened
from rules.model import (
    FILTERS,
    POLICED,
    Chain,
    Desired,
    Family,
    Foreign,
    Live,
    Network,
    Observed,
    Peers,
    Protocol,
    Rule,
)
from rules.plan import Plan, Table, diff
from rules.ports import PortRange
from rules.values import replace
from rules.xtables import (
    CHAINS,
    FILTER,
    MANGLE,
    NAT,
    decode,
    encode,
    script,
    spot,
    statement,
    steps,
    table,
)
from tests.property import strategies
from tests.property.legacy_tables import FLAGS, LegacyFamilies, commits
from tests.property.strategies import (
    ADDRESSES,
    THEIRS,
    claims,
    desireds,
    garbage,
    hook_of,
    mutilated,
    owners,
    words,
)

NETWORKS: dict[Family, list[Network]] = {
    Family.IP: [*map(ip_network, ("10.0.2.2/32", "10.0.3.2/32", "10.0.2.0/31", "128.0.0.0/1"))],
    Family.IP6: [*map(ip_network, ("fd10:0:2::2", "::a00:202", "fd10::/16", "8000::/1"))],
}


@st.composite
def filters(draw: st.DrawFn) -> Rule:
    """Any rule in forward: that lets in or out, with or without a peer, drops, or resumes."""
    family = draw(st.sampled_from(Family))
    claim = draw(st.none() | claims)
    found = Rule(
        chain=draw(st.sampled_from(sorted(POLICED, key=str))),
        family=family,
        owner=draw(owners),
        protocol=claim.protocol if claim else None,
        ports=claim.ports if claim else None,
        interface=draw(st.sampled_from([None, None, "eth0"])),
        accepts=draw(st.booleans()),
    )
    if found.accepts and draw(st.integers(0, 3)) == 0:
        return found
    end = draw(st.sampled_from(["source", "destination"]))
    found = replace(found, **{end: draw(st.sampled_from(ADDRESSES[family]))})
    return replace(found, peer=draw(st.none() | st.sampled_from(NETWORKS[family])))


def rules() -> st.SearchStrategy[Rule]:
    """Any rule that the codec can write."""
    translations = strategies.rules().filter(lambda rule: rule.chain not in POLICED)
    return translations | filters()


arbitrary_desireds = st.frozensets(rules(), max_size=12).map(lambda some: Desired(rules=some))
either_desired = desireds | arbitrary_desireds
families = st.sampled_from(Family)
chain_names = st.sampled_from(sorted(CHAINS))
places = st.integers(0, 20)

odd_rules = st.sampled_from([{"target": "ACCEPT"}, {}, {"protocol": "tcp", "target": "RETURN"}])
insertions = st.tuples(
    st.just("insert"), families, chain_names, places, rules().map(encode) | odd_rules
)
mischief = st.lists(
    insertions
    | st.tuples(
        st.sampled_from(["jump again", "unhook", "overtake", "lose", "flush"]),
        families,
        chain_names,
        places,
    ),
    max_size=6,
)


def holding(desired: Desired) -> LegacyFamilies:
    table = LegacyFamilies()
    table.commit(diff("blue", desired, table.observed()))
    return table


def disturb(table: LegacyFamilies, tricks: list[tuple[Any, ...]]) -> None:
    """What strangers do to our chains and jumps, and to the places of theirs."""
    for trick, family, chain_name, place, *more in tricks:
        chains = table[family].chains
        hook = chains[hook_of(chain_name)]
        if chain_name not in chains:
            continue
        if trick == "insert":
            chains[chain_name].insert(place, {**more[0], "counters": [0, 0]})
        elif trick == "jump again":
            hook.insert(place, chain_name)
        elif trick == "unhook" and chain_name in hook:
            hook.remove(chain_name)
        elif trick == "overtake" and chain_name in hook:
            hook.remove(chain_name)
            hook.append(chain_name)
        elif trick == "lose" and place < len(chains[chain_name]):
            del chains[chain_name][place]
        elif trick == "flush":
            chains[chain_name].clear()


def rules_only(desired: Desired) -> Desired:
    """Rules are all that these lists hold."""
    return replace(desired, sysctls=frozenset())


def theirs(table: LegacyFamilies) -> list[int]:
    return [rules.count(THEIRS) for rules in table.lists() if THEIRS in rules]


@given(either_desired)
def test_what_is_encoded_decodes_to_the_same(desired: Desired) -> None:
    observed = holding(desired).observed()
    assert {live.rule for live in observed.live} == desired.rules
    assert len(observed.live) == len(desired.rules)
    assert observed.foreign == ()
    assert observed.table == bool(desired.rules)
    assert observed.chains == {rule.chain for rule in desired.rules}


@given(either_desired, either_desired, mischief)
def test_the_steps_lead_from_anything_to_what_is_desired(
    before: Desired, after: Desired, tricks: list[tuple[Any, ...]]
) -> None:
    table = holding(before)
    disturb(table, tricks)
    seen = table.observed()
    plan = diff("blue", rules_only(after), seen)
    table.commit(plan)
    now = table.observed()
    assert diff("blue", rules_only(after), now).empty
    assert after.rules <= {live.rule for live in now.live}
    assert theirs(table) == [2] * 2 * len(Chain)
    waiting = {one.owner for one in after.pending}
    for family in Family:
        for chain_name, held in table[family].chains.items():
            if chain_name in CHAINS and held:
                hook = table[family].chains[hook_of(chain_name)]
                waits = all(
                    live.rule in after.kept or live.rule.owner in waiting
                    for live in now.live
                    if live.rule.family is family and spot(live.rule.chain) == chain_name
                )
                assert hook.count(chain_name) == 1 or (waits and hook.count(chain_name) == 0)
    # What stays keeps its counters, wherever it now stands.
    kept = [replace(live, handle=0) for live in now.live]
    assert all(replace(live, handle=0) in kept for live in plan.unchanged)


@given(either_desired, either_desired, mischief)
def test_a_family_is_asked_for_something_exactly_where_something_changes(
    before: Desired, after: Desired, tricks: list[tuple[Any, ...]]
) -> None:
    table = holding(before)
    disturb(table, tricks)
    plan = diff("blue", after, table.observed())
    due = [steps(plan, family) for family in Family]
    assert plan.same_rules == (not any(due))
    if plan.table is not Table.DELETE:
        for family, made in zip(Family, due, strict=True):
            touched = (*plan.add, *(rule for _, rule in plan.change))
            there = any(rule.family is family for rule in touched)
            gone = any(of(old) is family for old in plan.remove)
            assert bool(made) == (there or gone) or plan.chains


def of(old: Live | Foreign) -> Family:
    return old.rule.family if isinstance(old, Live) else Family(old.chain.partition(" ")[0])


@given(either_desired, either_desired, st.lists(insertions, max_size=4))
def test_the_script_leads_where_the_steps_lead(
    before: Desired, after: Desired, tricks: list[tuple[Any, ...]]
) -> None:
    one, other = holding(before), holding(before)
    disturb(one, tricks)
    disturb(other, tricks)
    plan = diff("blue", after, one.observed())
    one.commit(plan)
    other.restore(plan)
    for family in Family:
        assert one[family].chains.keys() == other[family].chains.keys()
        for chain_name, held in one[family].chains.items():
            assert worded(family, chain_name, held) == worded(
                family, chain_name, other[family].chains[chain_name]
            )


def worded(family: Family, chain_name: str, held: list[Any]) -> list[str]:
    """The rules of a chain in the words of iptables."""
    return [
        rule if isinstance(rule, str) else statement(only(family, chain_name, rule).rule)
        for rule in held
    ]


def only(family: Family, chain_name: str, rule: dict[str, Any]) -> Live:
    (live,) = listed(family, chain_name, rule).live
    return live


def listed(family: Family, chain_name: str, *held: Any) -> Observed:
    return decode({family: {"chains": {chain_name: list(held)}, "jumps": {chain_name: [0]}}})


@given(either_desired, either_desired)
def test_a_script_has_one_line_for_each_rule_and_says_its_family(
    before: Desired, after: Desired
) -> None:
    plan = diff("blue", after, holding(before).observed())
    lines = [line.split() for line in script(plan).splitlines() if line.startswith("-")]
    assert {line[0] for line in lines} <= {"-4", "-6"}
    ours = {where.split()[1] for where in CHAINS}
    written = [line for line in lines if line[1] in ("-A", "-I") and line[2] in ours]
    assert sorted(placeless(line) for line in written) == sorted(
        f"{FLAGS[rule.family]} {spot(rule.chain).split()[1]} {statement(rule)}"
        for rule in (*plan.add, *(new for _, new in plan.change))
    )
    if plan.table is not Table.DELETE:
        gone = [line for line in lines if line[1] == "-D"]
        assert len(gone) == len(plan.remove) + len(plan.change)


def placeless(line: list[str]) -> str:
    """Without the command, and the place that it may name."""
    flag, command, chain_name, *rest = line
    return " ".join([flag, chain_name, *(rest[1:] if command == "-I" else rest)])


@given(either_desired, either_desired)
def test_a_script_commits_in_turn_as_the_steps_do(before: Desired, after: Desired) -> None:
    plan = diff("blue", after, holding(before).observed())
    titles = [line for line in script(plan).splitlines() if line.startswith("*")]
    if plan.table is Table.DELETE:
        assert titles == [one for one in ("*nat", "*filter", "*mangle") if one in titles]
        return
    turns = [[f"*{one}" for one, _ in commits(plan, family)] for family in Family]
    for due in (titles, *turns):
        rest = iter(["*mangle", "*filter", "*nat", "*filter", "*mangle"])
        assert all(title in rest for title in due), "in this order"
        assert all(one != other for one, other in pairwise(due)), "and never in two commits"
    assert {*titles} == ({title for due in turns for title in due} or {"*nat"})


@given(arbitrary_desireds, arbitrary_desireds, st.lists(insertions, max_size=3))
def test_between_two_commits_all_that_holds_up_before_or_after_is_there(
    before: Desired, after: Desired, tricks: list[tuple[Any, ...]]
) -> None:
    one = holding(before)
    disturb(one, tricks)
    seen = one.observed()
    plan = diff("blue", after, seen)
    if plan.table is Table.DELETE:
        return
    found = {live.rule for live in seen.live}
    for family in Family:
        due = commits(plan, family)
        assert len(due) <= 5
        for number, (title, part) in enumerate(due, 1):
            in_between = [title for title, _ in due[number:]]
            one[family].run(part)
            if in_between[:1] == [NAT] or (title == NAT and in_between):
                kept = {rule for rule in found | after.rules if holds_up(rule, family)}
                assert kept <= {live.rule for live in one.observed().live}


GUESTS = [ip_address(f"10.0.{n}.2") for n in (2, 3)]
LINK = "k6t-eth0"
PEERS = [None, *map(ip_network, ("10.9.0.0/24", "10.9.0.0/25", "10.9.0.1/32", "10.8.0.0/16"))]
SOURCES = [*map(ip_address, ("10.9.0.1", "10.9.0.2", "10.9.0.200", "10.8.0.1")), *GUESTS]
PORTS = [7, 12, 17, 22, 27, 32, 37]


class Sent(NamedTuple):
    """The first packet of a flow, when it is forwarded."""

    source: Any
    destination: Any
    port: int
    protocol: Protocol = Protocol.TCP


SENT = [
    Sent(source, destination, port, protocol)
    for peer in SOURCES
    for guest in GUESTS
    for source, destination in ((peer, guest), (guest, peer))
    for port in PORTS
    for protocol in (Protocol.TCP, Protocol.UDP)
]


def fenced(random: Any, guest: Any, chain: Chain) -> set[Rule]:
    """What policies make of a guest in one direction."""
    owner = f"VirtualMachine/default/{guest}/default"
    end = "destination" if chain is Chain.FORWARD else "source"
    resuming = Rule(chain=chain, family=Family.IP, owner=owner, accepts=True)
    guard = replace(resuming, accepts=False, **{end: guest})
    found = {resuming, guard}
    for _ in range(random.randint(0, 4)):
        accept = replace(guard, accepts=True, peer=random.choice(PEERS), owner=random.choice("pq"))
        if random.random() < 0.8:
            first = random.randint(5, 35)
            ports = PortRange(first, random.randint(first, 40))
            kind = random.choice([Protocol.TCP, Protocol.TCP, Protocol.UDP])
            accept = replace(accept, protocol=kind, ports=ports)
        found.add(accept)
    return found


def translated(random: Any) -> set[Rule]:
    """Ports that are led to guests."""
    ends = sorted(random.sample(range(5, 40), 2 * random.randint(0, 4)))
    return {
        Rule(
            chain=Chain.PREROUTING,
            family=Family.IP,
            owner="a",
            protocol=Protocol.TCP,
            ports=PortRange(first, last),
            interface="eth0",
            to=random.choice(GUESTS),
        )
        for first, last in zip(ends[::2], ends[1::2], strict=True)
    }


def parts_of(random: Any) -> dict[object, set[Rule]]:
    """What a namespace with two guests holds: translations, and fences of some."""
    found: dict[object, set[Rule]] = {NAT: translated(random)}
    for guest in GUESTS:
        for chain in sorted(POLICED, key=str):
            found[guest, chain] = fenced(random, guest, chain) if random.random() < 0.7 else set()
    if all(found[guest, Chain.EGRESS] for guest in GUESTS):
        bar = Rule(chain=Chain.EGRESS, family=Family.IP, owner="bar", interface=LINK)
        found["bar"] = {bar}
    return found


@st.composite
def policy_edits(draw: st.DrawFn, *, same: Collection[object] = ()) -> tuple[Desired, Desired]:
    """Some of it stays, and all of these parts."""
    random = draw(st.randoms(use_true_random=False))
    before, other = parts_of(random), parts_of(random)
    after = {
        key: before[key] if key in before and random.random() < 0.3 else other[key] for key in other
    }
    for key, some in after.items():
        if key in same:
            after[key] = before[key]
        elif key in before and random.random() < 0.3:
            mixed = sorted(before[key] | some, key=lambda rule: rule.key)
            after[key] = {rule for rule in mixed if random.random() < 0.8}
    made = (frozenset().union(*one.values()) for one in (before, after))
    first, last = (Desired(rules=frozenset(rules)) for rules in made)
    return first, last


def verdict(rules: Collection[Rule], chain: Chain, sent: Sent) -> bool:
    """Whether a chain of filters lets it pass."""
    met = [rule for rule in rules if rule.chain is chain and takes(rule, sent)]
    return any(map(lets_in, met)) or not any(rule.guards for rule in met)


def takes(rule: Rule, sent: Sent) -> bool:
    other = sent.source if rule.chain is Chain.FORWARD else sent.destination
    link = LINK if sent.source in GUESTS else "eth0"
    return (
        rule.source in (None, sent.source)
        and rule.destination in (None, sent.destination)
        and rule.protocol in (None, sent.protocol)
        and (rule.ports is None or sent.port in rule.ports)
        and (rule.peer is None or other in rule.peer)
        and rule.interface in (None, link)
    )


@given(policy_edits())
def test_while_translations_change_filters_let_in_exactly_who_comes_in_before_and_after(
    edit: tuple[Desired, Desired],
) -> None:
    """Each table is a commit of its own. Next to that of nat, each chain of filters lets a packet
    pass exactly if it does so before and after. So whoever is translated to the same end before and
    after and may come in both times is never kept out, and none is let in by an older translation
    and newer filters, or the other way around. At every other moment it lets pass all of these, and
    none that it lets pass neither before nor after."""
    one = holding(edit[0])
    plan = diff("blue", edit[1], one.observed())
    if plan.table is Table.DELETE:
        return
    due = commits(plan, Family.IP)
    titles = [title for title, _ in due]
    where = titles.index(NAT) if NAT in titles else -2
    fates = {
        (chain, sent): [verdict(each.rules, chain, sent) for each in edit]
        for chain in POLICED
        for sent in SENT
    }
    for number, (_, part) in enumerate(due):
        now = {live.rule for live in one.observed().live}
        for (chain, sent), (was, will) in fates.items():
            passes = verdict(now, chain, sent)
            if number in (where, where + 1):
                assert passes == (was and will)
            assert (was and will) <= passes <= (was or will)
        one[Family.IP].run(part)
    assert {live.rule for live in one.observed().live} == edit[1].rules


@given(policy_edits() | policy_edits(same=[NAT]))
def test_no_filter_of_before_and_after_together_let_in_or_keep_out_anybody(
    edit: tuple[Desired, Desired],
) -> None:
    """What guests send is filtered in one table, and what they receive in another. A packet that is
    to pass both before and after passes at every moment between, and one that is to pass at neither
    time passes at none; also where nothing but filters changes."""
    one = holding(edit[0])
    plan = diff("blue", edit[1], one.observed())
    if plan.table is Table.DELETE:
        return
    fates = [[passes(each.rules, sent) for each in edit] for sent in SENT]
    for _, part in commits(plan, Family.IP):
        one[Family.IP].run(part)
        now = {live.rule for live in one.observed().live}
        for sent, (was, will) in zip(SENT, fates, strict=True):
            assert (was and will) <= passes(now, sent) <= (was or will), sent


def passes(rules: Collection[Rule], sent: Sent) -> bool:
    """Whether all chains of filters let it pass."""
    return all(verdict(rules, chain, sent) for chain in POLICED)


def lets_in(rule: Rule) -> bool:
    return rule.accepts and not rule.resumes


def holds_up(rule: Rule, family: Family) -> bool:
    """What drops packets, or lets those of open flows pass."""
    return rule.family is family and rule.chain in POLICED and not lets_in(rule)


@given(arbitrary_desireds, arbitrary_desireds)
def test_guards_stand_behind_and_what_resumes_before_all_others(
    before: Desired, after: Desired
) -> None:
    one = holding(before)
    one.commit(diff("blue", after, one.observed()))
    for family in Family:
        for chain_name in set(one[family].chains) & set(CHAINS):
            held = listed(family, chain_name, *one[family].chains[chain_name]).live
            ranks = [2 if x.rule.guards else 0 if x.rule.resumes else 1 for x in held]
            assert ranks == sorted(ranks)


@given(arbitrary_desireds, arbitrary_desireds)
def test_a_commit_is_for_one_table_and_no_table_has_chains_of_the_other(
    before: Desired, after: Desired
) -> None:
    plan = diff("blue", after, holding(before).observed())
    chains = {rule.chain for rule in (*before.rules, *after.rules)}
    if plan.table is not Table.DELETE and not FILTERS & chains:
        assert {title for family in Family for title, _ in commits(plan, family)} <= {NAT}
    assert {chain for chain in Chain if table(chain) == FILTER} == {Chain.FORWARD}
    assert {chain for chain in Chain if table(chain) == MANGLE} == {Chain.RAW, Chain.EGRESS}


@given(filters().filter(lets_in), st.sets(st.integers(0, 3)))
def test_a_rule_for_a_set_is_one_for_each_of_its_members(rule: Rule, chosen: set[int]) -> None:
    peers = Peers(rule.family, "a1")
    members = frozenset(NETWORKS[rule.family][number] for number in chosen)
    named = Desired(rules=frozenset({replace(rule, peer=None, peers=peers)}), sets={peers: members})
    flat = flattened(named)
    assert {live.rule for live in holding(flat).observed().live} == {
        replace(rule, peer=member) for member in members
    }
    assert script(diff("blue", named, Observed())) == script(diff("blue", flat, Observed()))


@given(families, chain_names, st.lists(st.dictionaries(words, garbage, max_size=6), max_size=4))
def test_no_garbage_is_taken_for_a_rule(
    family: Family, chain_name: str, held: list[dict[str, Any]]
) -> None:
    observed = listed(family, chain_name, *held)
    assert observed.live == ()
    assert [foreign.handle for foreign in observed.foreign] == list(range(len(held)))
    plan = diff("blue", Desired(), observed)
    assert len(plan.remove) == len(held)


@given(rules(), st.data())
def test_a_mutilated_rule_is_foreign_or_another_rule_that_says_what_it_does(
    rule: Rule, data: st.DataObject
) -> None:
    whole = encode(rule) | {"counters": [1, 60]}
    broken = data.draw(mutilated(whole))
    if not isinstance(broken, dict):
        return
    observed = listed(rule.family, spot(rule.chain), broken)
    diff("blue", Desired(rules=frozenset({rule})), observed)  # whatever it is can be compared
    for live in observed.live:
        assert live.rule.family is rule.family
        assert encode(live.rule) == plain(broken)
        if live.rule == rule:
            assert plain(broken) == encode(rule)


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "counters"}


@given(rules())
def test_a_rule_stands_in_the_chain_that_it_is_for(rule: Rule) -> None:
    for chain in Chain:
        observed = listed(rule.family, spot(chain), encode(rule) | {"counters": [0, 0]})
        assert all(live.rule.chain is chain for live in observed.live)
        if chain is rule.chain:
            assert observed.live == (Live(rule, 0),)


@given(arbitrary_desireds)
def test_a_plan_of_leftovers_alone_asks_nothing_of_these_chains(desired: Desired) -> None:
    unchanged = tuple(Live(rule, place) for place, rule in enumerate(desired.rules))
    plan = Plan(netns="blue", unchanged=unchanged, leftovers=(Foreign("output", 1, "accept"),))
    assert not plan.same_rules
    assert [steps(plan, family) for family in Family] == [[], []]
    assert script(plan) == "*nat\nCOMMIT\n"
