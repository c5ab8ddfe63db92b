"""The same for iptables: plans to steps on rule dictionaries or a restore script, listings back.

A listing is what the worker of one family finds of ours: our chains with their rules, and the
jumps to them. A rule's handle is its place in its chain; a commit carries the digest of the listing
it was planned on, so a place always means the rule that stood there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index

from rules.flattened import each
from rules.model import Chain, Family, Foreign, Live, Observed, Rule
from rules.plan import Plan, Table
from rules.values import Value, replace
from rules.xtables_between import Between, between, lets_in
from rules.xtables_rules import (
    CHAINS,
    FILTER,
    MANGLE,
    NAT,
    PREFIX,
    TABLES,
    Json,
    built_in,
    decode_rule,
    encode,
    name,
    spot,
    statement,
    table,
)

__all__ = [
    "CHAINS",
    "FILTER",
    "JUMP_COMMENT",
    "MANGLE",
    "NAT",
    "PREFIX",
    "TABLES",
    "Json",
    "Step",
    "built_in",
    "decode",
    "encode",
    "name",
    "script",
    "spot",
    "statement",
    "steps",
    "table",
]

JUMP_COMMENT = "portranger"

Step = list[object]
Old = Live | Foreign


class Delete(Value):
    """Whatever stands at that place of a chain, which is named with its table."""

    chain: str
    place: int


class Ensure(Value):
    """That a chain of ours is there, and jumped to before anything else."""

    chain: Chain


class Put(Value):
    """A rule at that place of its chain; None: behind all others."""

    rule: Rule
    place: int | None = None


Edit = Delete | Ensure | Put


def steps(plan: Plan, family: Family) -> list[Step]:
    """What the worker of that family has to do; empty where it is nothing. What follows on each
    other in one table is one commit."""
    if plan.table is Table.DELETE:
        return [["drop"]]
    return [_step(edit) for _, turn in _turns(plan, family) for edit in turn]


def _step(edit: Edit) -> Step:
    """Each with its table and chain."""
    match edit:
        case Delete(where, place):
            return ["delete", *where.split(), place]
        case Ensure(chain):
            return ["ensure", *spot(chain).split(), built_in(chain)]
        case Put(rule, None):
            return ["append", *spot(rule.chain).split(), encode(rule)]
        case Put(rule, place):
            return ["insert", *spot(rule.chain).split(), place, encode(rule)]


def _turns(plan: Plan, family: Family) -> list[tuple[str, list[Edit]]]:
    """What is done in the tables of the filters, then in nat, and then in the filters again. What
    follows on each other in one table is one commit, also where nothing is done in between.

    A commit is for one table, so between two of them packets meet the one as it will be and the
    other as it was. What lets nobody new in comes first, and what lets in comes last: a port that
    is translated only now meets filters that are closed already, and one that is translated no
    longer is gone before they open; and what one guest sends to another passes no filter as it
    will be and another as it was, neither of which would have been enough. Who is let in before and
    after is let in all the time. Flows that are open lose no packet: what resumes them comes first
    and goes last.
    """
    gone = [old for old in _gone(plan) if _family(old) is family]
    new = [rule for rule in _written(plan) if rule.family is family]
    ensured = _ensured(plan, new, family)
    stay = [live for live in plan.unchanged if live.rule.family is family]
    rows = _rows((*stay, *gone))
    meant = Between()
    if len(_tables(plan)) > 1:
        olds = [old.rule for old in gone if isinstance(old, Live)]
        meant = between([live.rule for live in stay], olds, new)

    def turn(one: str, *, opening: bool | None) -> tuple[str, list[Edit]]:
        """What is done in a table: all of it or, of a filter, what closes or what opens."""
        old = [each for each in gone if _table(each) == one]
        fresh = [rule for rule in new if table(rule.chain) == one]
        made = [chain for chain in ensured if table(chain) == one]
        extra: list[Rule] = []
        if opening is not None:
            old = [each for each in old if _goes_last(each, meant) is opening]
            fresh = [rule for rule in fresh if _comes_last(rule, meant) is opening]
            made = [] if opening else made
            extra = [rule for rule in meant.meanwhile if table(rule.chain) == one]
        if not opening:
            return one, _turn(rows, old, made, [*fresh, *extra])
        return one, _turn(rows, [*old, *extra], made, fresh)

    return [
        turn(MANGLE, opening=False),
        turn(FILTER, opening=False),
        turn(NAT, opening=None),
        turn(FILTER, opening=True),
        turn(MANGLE, opening=True),
    ]


def _tables(plan: Plan) -> set[str]:
    """Those that change."""
    chains = {*plan.chains, *(rule.chain for rule in _written(plan))}
    return {*map(table, chains), *map(_table, _gone(plan))}


def _goes_last(old: Old, meant: Between) -> bool:
    """What opens by going, as it lets nobody in, and what lets in those who are to stay."""
    return isinstance(old, Live) and (not lets_in(old.rule) or old.rule in meant.late)


def _comes_last(rule: Rule, meant: Between) -> bool:
    return lets_in(rule) and rule not in meant.early


# What stands in each of our chains, from the first place on.
Rows = dict[str, list[Old | Rule]]


def _rows(found: Iterable[Old]) -> Rows:
    rows: Rows = {where: [] for where in CHAINS}
    for one in sorted(found, key=lambda one: one.handle):
        if _chain(one) in rows:  # and not a second jump
            rows[_chain(one)].append(one)
    return rows


def _turn(
    rows: Rows, gone: Sequence[Old | Rule], ensured: Sequence[Chain], new: Sequence[Rule]
) -> list[Edit]:
    """The edits of one commit, and the rows as they are then. Deletions are first, from the last
    place on: a jump that is put back would move the places behind it."""
    edits: list[Edit] = []
    for chain_name in sorted({_chain(old) for old in gone}):
        leaving = {_mark(old) for old in gone if _chain(old) == chain_name}
        row = rows.get(chain_name)
        if row is None:
            jumps = (old for old in gone if isinstance(old, Foreign) and _chain(old) == chain_name)
            places = sorted((jump.handle for jump in jumps), reverse=True)
        else:
            places = [i for i in reversed(range(len(row))) if _mark(row[i]) in leaving]
            for place in places:
                del row[place]
        edits += [Delete(chain_name, place) for place in places]
    edits += [Ensure(chain) for chain in ensured]
    guards = {chain_name: sum(map(_guards, row)) for chain_name, row in rows.items()}
    for rule in sorted(new, key=lambda rule: rule.guards):
        row = rows[spot(rule.chain)]
        place = 0 if rule.resumes else len(row) - guards[spot(rule.chain)]
        if rule.guards or place == len(row):
            edits.append(Put(rule))
            row.append(rule)
        else:
            edits.append(Put(rule, place))
            row.insert(place, rule)
    return edits


def _mark(one: Old | Rule) -> object:
    """What tells it from others of its row: what is there, by its place, and what was written."""
    return one if isinstance(one, Rule) else one.handle


def _guards(one: Old | Rule) -> bool:
    """Whether nothing that sends or lets packets on may come behind it."""
    return one.guards if isinstance(one, Rule) else isinstance(one, Live) and one.rule.guards


def decode(listings: Mapping[Family, Mapping[str, object]]) -> Observed:
    """What the listings of both families hold of ours."""
    live: list[Live] = []
    foreign: list[Foreign] = []
    made: set[Chain] = set()
    broken: set[Chain] = set()
    standing: set[tuple[Family, Chain]] = set()
    jumped: set[tuple[Family, Chain]] = set()
    behind: set[tuple[Family, Chain]] = set()
    for family, listing in listings.items():
        chains: dict[str, list[Json]] = listing["chains"]  # type: ignore[assignment]
        jumps: dict[str, list[int]] = listing["jumps"]  # type: ignore[assignment]
        for where, rules in chains.items():
            if where not in CHAINS:
                continue
            chain = CHAINS[where]
            places = [index(place) for place in jumps.get(where, [])]
            standing.add((family, chain))
            if places:
                jumped.add((family, chain))
            if rules and places and places[0] > 0:  # others decide first
                behind.add((family, chain))
            if places or rules:  # an empty chain that nothing leads to is as good as none
                (made if places and (family, chain) not in behind else broken).add(chain)
            hook = f"{family.value} {table(chain)} {built_in(chain)}"
            foreign += [Foreign(hook, place, "a second jump to our chain") for place in places[1:]]
            for found in _decode_chain(family, chain, rules):
                if isinstance(found, Live):
                    live.append(found)
                else:
                    foreign.append(found)
    return Observed(
        live=tuple(live),
        foreign=tuple(foreign),
        chains=frozenset(made - broken),
        table=bool(standing),
        standing=frozenset(standing),
        jumped=frozenset(jumped),
        behind=frozenset(behind),
    )


def _decode_chain(family: Family, chain: Chain, rules: Sequence[Json]) -> Iterator[Live | Foreign]:
    """A guard before a rule that sends packets on would keep them from it: it is not ours."""
    found = [decode_rule(family, chain, place, fields) for place, fields in enumerate(rules)]
    last = max((one.handle for one in found if not _guards(one)), default=-1)
    for one in found:
        if isinstance(one, Live) and one.rule.guards and one.handle < last:
            text = f"guard of {one.rule.owner} before other rules"
            yield Foreign(f"{family.value} {spot(chain)}", one.handle, text)
        else:
            yield one


def script(plan: Plan) -> str:
    """The same change for both `iptables-restore --noflush` and `ip6tables-restore --noflush`: each
    passes over the lines of the other family."""
    blocks = _dropping(plan) if plan.table is Table.DELETE else _changing(_flat(plan))
    written = [(one, lines) for one, lines in blocks if lines] or [(NAT, [])]
    return "".join(f"{line}\n" for one, lines in written for line in (f"*{one}", *lines, "COMMIT"))


FLAGS = {Family.IP: "-4", Family.IP6: "-6"}


def _flat(plan: Plan) -> Plan:
    """One that was made without asking a namespace knows no backend, and may name sets."""
    if not any(rule.peers for rule in plan.add):
        return plan
    return replace(plan, add=tuple(sorted(each(plan.add, plan.sets), key=lambda rule: rule.key)))


def _changing(plan: Plan) -> list[tuple[str, list[str]]]:
    """The lines for each commit."""
    commits: list[tuple[str, list[str]]] = []
    for turns in zip(*(_turns(plan, family) for family in Family), strict=True):
        lines = [
            f"{FLAGS[family]} {line}"
            for family, (_, edits) in zip(Family, turns, strict=True)
            for edit in edits
            for line in _lines(plan, family, edit)
        ]
        one = turns[0][0]
        if lines and commits and commits[-1][0] == one:
            commits[-1][1].extend(lines)
        elif lines:
            commits.append((one, lines))
    return commits


def _lines(plan: Plan, family: Family, edit: Edit) -> Iterator[str]:
    match edit:
        case Delete(where, place):
            yield f"-D {where.split()[1]} {place + 1}"
        case Ensure(chain):
            if (family, chain) not in plan.standing:
                yield f"-N {name(chain)}"
            if (family, chain) in plan.behind:
                yield f"-D {built_in(chain)} {_jump(chain)}"
            if (family, chain) not in plan.jumped - plan.behind:
                yield f"-I {built_in(chain)} {_jump(chain)}"
        case Put(rule, None):
            yield f"-A {name(rule.chain)} {statement(rule)}"
        case Put(rule, int(place)):
            yield f"-I {name(rule.chain)} {place + 1} {statement(rule)}"


def _dropping(plan: Plan) -> list[tuple[str, list[str]]]:
    """Translations go before the filters in front of what they lead to."""
    return [
        (
            one,
            [
                f"{FLAGS[family]} {line}"
                for family in Family
                for line in _dropped(plan, family, one)
            ],
        )
        for one in reversed(TABLES)
    ]


def _dropped(plan: Plan, family: Family, one: str) -> Iterator[str]:
    jumps = [
        old
        for old in _gone(plan)
        if _family(old) is family and _table(old) == one and _chain(old) not in CHAINS
    ]
    for jump in sorted(jumps, key=lambda old: (_chain(old), -old.handle)):  # the second ones
        yield f"-D {_chain(jump).split()[1]} {jump.handle + 1}"
    for chain in Chain:
        if table(chain) != one or (family, chain) not in plan.standing:
            continue
        if (family, chain) in plan.jumped:
            yield f"-D {built_in(chain)} {_jump(chain)}"
        yield f"-F {name(chain)}"
        yield f"-X {name(chain)}"


def _jump(chain: Chain) -> str:
    return f"-m comment --comment {JUMP_COMMENT} -j {name(chain)}"


def _ensured(plan: Plan, new: Iterable[Rule], family: Family) -> list[Chain]:
    """The chains that may have to be made, or jumped to: those that are written to, and those
    that are to be put back, with what they still hold."""
    held = [live.rule for live in plan.unchanged if live.rule.chain in plan.chains]
    used = {rule.chain for rule in (*new, *held) if rule.family is family}
    return [chain for chain in Chain if chain in used]


def _written(plan: Plan) -> list[Rule]:
    return [*(rule for _, rule in plan.change), *plan.add]


def _gone(plan: Plan) -> list[Old]:
    return [*plan.remove, *(live for live, _ in plan.change)]


def _family(old: Old) -> Family:
    return old.rule.family if isinstance(old, Live) else Family(old.chain.partition(" ")[0])


def _chain(old: Old | Rule) -> str:
    """Where it stands, ours or the kernel's own, with its table."""
    if isinstance(old, Rule):
        return spot(old.chain)
    return spot(old.rule.chain) if isinstance(old, Live) else old.chain.partition(" ")[2]


def _table(old: Old) -> str:
    return _chain(old).partition(" ")[0]
