"""Plans and rules as people and programs read them: text and JSON."""

from collections.abc import Sequence
from math import isfinite

from rules.model import (
    OWN,
    RULE,
    Chain,
    Foreign,
    Live,
    Lookup,
    Members,
    Network,
    Peers,
    Rule,
)
from rules.plan import Plan, Table
from rules.problems import ABSENT, Problem, shown
from rules.shapes import count
from rules.words import (
    Json,
    aligned,
    detour,
    rule_json,
    rule_words,
    share,
)

FORMAT_VERSION = "1.0"
NAMED = 10  # members of a set in a line


def plan_json(plans: Sequence[Plan], problems: Sequence[Problem]) -> Json:
    """The whole answer of `plan -o json`."""
    changes = [change for plan in plans for change in _changes(plan)]
    return {
        "format_version": FORMAT_VERSION,
        "changes": changes,
        "summary": {
            **{
                action: sum(change["action"] == action for change in changes)
                for action in ("add", "change", "remove")
            },
            "unchanged": sum(len(plan.unchanged) for plan in plans),
        },
        "problems": [problem_json(problem) for problem in problems],
    }


def plan_text(plan: Plan) -> list[str]:
    """A heading and a line for each change; nothing where there is none."""
    lines = [f"~ sysctl {s.name} {s.before or '?'} -> {s.after}" for s in plan.sysctls]
    if plan.table is Table.REMAKE:
        lines.insert(0, f"~ table inet portranger is made anew: {plan.unsound}")
    if _deletes_only_the_table(plan):
        lines.append("- an empty table")
    lines += aligned([_line(*entry) for entry in _entries(plan)])
    lines += [_set_line(one) for one in _set_changes(plan)]
    lines += [f"~ chain {chain.value} {_how(plan, chain)}" for chain in _put_back(plan)]
    lines += [f"~ {words}" for words in _reshaped(plan).values()]
    lines += aligned(
        [[*_line(old, None), "(left over in the other backend)"] for old in plan.leftovers]
    )
    return [f"namespace {plan.netns}", *(f"  {line}" for line in lines)] if lines else []


def changes(plan: Plan) -> int:
    """How many a plan makes."""
    return len(_changes(plan))


def summary(plans: Sequence[Plan]) -> str:
    """The last line of a plan."""
    counts = {"add": 0, "change": 0, "remove": 0}
    for plan in plans:
        for change in _changes(plan):
            counts[str(change["action"])] += 1
    unchanged = sum(len(plan.unchanged) for plan in plans)
    if not any(counts.values()):
        return f"No changes. {unchanged} rules match."
    return (
        f"Plan: {counts['add']} to add, {counts['change']} to change,"
        f" {counts['remove']} to remove; {unchanged} unchanged."
    )


def problem_json(problem: Problem) -> Json:
    """A problem as JSON; value is there only where the field is."""
    fields: Json = {
        "file": problem.file,
        "line": problem.line,
        "field": problem.field,
        "problem": problem.what,
        "fix": problem.fix,
        "code": problem.code,
    }
    if problem.value is not ABSENT:
        plain = _is_plain(problem.value)
        fields["value"] = problem.value if plain else shown(problem.value)
    return fields


def _is_plain(value: object) -> bool:
    """Whether JSON has it: it knows no NaN, and Python writes no number of 4,301 digits."""
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, int):
        return value.bit_length() <= 256
    return value is None or isinstance(value, str)


Old = Live | Foreign | None


def _entries(plan: Plan) -> list[tuple[Old, Rule | None]]:
    """Every rule that changes, as before and after, in the order of output."""
    entries: list[tuple[Old, Rule | None]] = [
        *((None, rule) for rule in plan.add),
        *plan.change,
        *((old, None) for old in plan.remove),
    ]
    return sorted(entries, key=_entry_order)


def _entry_order(entry: tuple[Old, Rule | None]) -> tuple[object, ...]:
    old, rule = entry
    if isinstance(old, Foreign):
        return ("~", old.chain, old.handle, old.text)  # after every family
    return (rule or old.rule).key  # type: ignore[union-attr]  # one of the two is there


def _action(old: Old, rule: Rule | None) -> str:
    if old is None:
        return "add"
    return "remove" if rule is None else "change"


def _line(old: Old, rule: Rule | None) -> list[str]:
    if isinstance(old, Foreign):
        return [f"- a foreign {_stranger(old)}"]
    if rule is None:
        return _glyphed("-", old.rule) if old else []
    if old is None:
        return _glyphed("+", rule)
    return [*_glyphed("~", rule), f"(was {_was(old.rule, rule)})"]


def _stranger(old: Foreign) -> str:
    return f"rule in {old.chain}: {old.text}" if old.kind == RULE else old.text


def _glyphed(glyph: str, rule: Rule) -> list[str]:
    family, *words = rule_words(rule)
    return [f"{glyph} {family}", *words]


def _was(before: Rule, after: Rule) -> str:
    """What a changed rule was, in as few words as tell it apart."""
    return ", ".join(
        str(old) if old is not None else f"any {name}"
        for name, old, new in (
            ("port", before.ports, after.ports),
            ("link", before.interface, after.interface),
            ("source", before.source, after.source),
            ("destination", before.destination, after.destination),
            ("target", before.to, after.to),
            ("target port", before.to_ports, after.to_ports),
            ("owner", before.owner, after.owner),
            ("peers", before.peers or before.peer, after.peers or after.peer),
            ("share", before.share and share(before.share), after.share and share(after.share)),
            ("way", before.detour and detour(before.detour), after.detour and detour(after.detour)),
        )
        if old != new
    )


def _changes(plan: Plan) -> list[Json]:
    changes: list[Json] = []
    if plan.table is Table.REMAKE:
        changes.append({"kind": "table", "before": {"reason": plan.unsound}, "after": {}})
    for s in plan.sysctls:
        before, after = {"name": s.name, "value": s.before}, {"name": s.name, "value": s.after}
        changes.append({"kind": "sysctl", "before": before, "after": after})
    changes = [{"action": "change", "netns": plan.netns, **change} for change in changes]
    if _deletes_only_the_table(plan):
        gone: Json = {"kind": "table", "before": {}, "after": None}
        changes.append({"action": "remove", "netns": plan.netns, **gone})
    for old, rule in _entries(plan):
        changes.append(
            {
                "action": _action(old, rule),
                "netns": plan.netns,
                "before": _before(old),
                "after": rule_json(rule) if rule else None,
            }
        )
    for peers, was, now in _set_changes(plan):
        named: Json = {
            "kind": "set",
            "before": _set_json(peers, was),
            "after": _set_json(peers, now),
        }
        what = "add" if was is None else "remove" if now is None else "change"
        changes.append({"action": what, "netns": plan.netns, **named})
    for chain in _put_back(plan):
        chained: Json = {"kind": "chain", "before": {}, "after": {"chain": chain.value}}
        changes.append({"action": "change", "netns": plan.netns, **chained})
    for lookup, words in _reshaped(plan).items():
        shape: Json = {"kind": "shape", "before": {}, "after": {"map": lookup in plan.maps}}
        changes.append({"action": "change", "netns": plan.netns, **shape, "what": words})
    for old in plan.leftovers:
        left: Json = {"kind": "leftover", "before": _before(old), "after": None}
        changes.append({"action": "remove", "netns": plan.netns, **left})
    return changes


_SetChange = tuple[Peers, Members | None, Members | None]


def _set_changes(plan: Plan) -> list[_SetChange]:
    """The sets that change, as they were and as they are to be."""
    before, after = plan.sets_before, plan.sets
    if plan.table is Table.DELETE:
        after = {}
    both = sorted({*before, *after}, key=str)
    found = [(one, before.get(one), after.get(one)) for one in both]
    return [each for each in found if each[1] != each[2]]


def _set_line(change: _SetChange) -> str:
    peers, was, now = change
    if was is None:
        return f"+ set {peers}: {_members(now or frozenset())}"
    if now is None:
        return f"- set {peers}"
    came, went = now - was, was - now
    parts = [f"+ {_members(came)}"] if came else []
    parts += [f"- {_members(went)}"] if went else []
    return f"~ set {peers}: {'; '.join(parts)}"


def _members(members: Members) -> str:
    found = [str(one) for one in _sorted(members)]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more or "nobody"


def _sorted(members: Members) -> list[Network]:
    return sorted(members, key=lambda one: (int(one.network_address), one.prefixlen))


def _set_json(peers: Peers, members: Members | None) -> Json | None:
    if members is None:
        return None
    return {"name": str(peers), "members": [str(one) for one in _sorted(members)]}


def _how(plan: Plan, chain: Chain) -> str:
    moved = any(chain is one for _, one in plan.behind)
    return "is moved before rules of others" if moved else "is put back"


def _put_back(plan: Plan) -> list[Chain]:
    """Chains that went, are no longer jumped to, or come after others, and whose rules are still
    there."""
    written = {rule.chain for rule in plan.add}
    return [chain for chain in plan.chains if plan.table is Table.KEEP and chain not in written]


def _reshaped(plan: Plan) -> dict[Lookup, str]:
    """The lookups of which some ranges stay, but are held in another way, and those that go without
    a word about any range: a stranger emptied their maps."""
    if plan.table is not Table.KEEP:
        return {}
    staying = count(live.rule for live in plan.unchanged)
    told = count(one for old, new in _entries(plan) for one in _told(old, new))
    words: dict[Lookup, str] = {}
    for lookups, what in (
        (plan.gathering, "elements of one map"),
        (plan.spreading, "rules again"),
    ):
        for lookup in lookups:
            if staying[lookup]:
                words[lookup] = f"{staying[lookup]} ranges that stay become {what}"
            elif not told[lookup]:
                words[lookup] = "an empty map goes"
    return {lookup: f"{_packets(lookup)}: {said}" for lookup, said in words.items()}


def _told(old: Old, new: Rule | None) -> list[Rule]:
    """The rules that an entry is about."""
    return [*([old.rule] if isinstance(old, Live) else ()), *([new] if new else ())]


def _packets(lookup: Lookup) -> str:
    words = [lookup.family.value, lookup.chain.value, lookup.protocol.value]
    if lookup.destination:
        own = lookup.destination == OWN[lookup.family]
        words.append("to the node" if own else f"to {lookup.destination}")
    words += [f"on {lookup.interface}"] if lookup.interface else []
    return " ".join(words)


def _deletes_only_the_table(plan: Plan) -> bool:
    return plan.table is Table.DELETE and not plan.remove


def _before(old: Old) -> Json | None:
    if isinstance(old, Foreign):
        where = {"chain": old.chain} if old.kind == RULE else {}
        return {"owner": None, **where, "foreign": old.text}
    return rule_json(old.rule) if old else None
