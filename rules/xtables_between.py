"""What filters let in while translations change, which is another commit: exactly what they let in
both before and after. So nobody is let in who is not to be, neither by what is translated still nor
by what is translated already, and who may come in before and after is not kept out in between."""

from collections.abc import Collection, Iterable, Iterator

from rules.model import POLICED, Rule
from rules.ports import ALL_PORTS, PortRange
from rules.values import Value, replace


class Between(Value):
    """What lets in, and is written before translations change instead of behind; is deleted behind
    instead of before; and is there only meanwhile."""

    early: frozenset[Rule] = frozenset()
    late: frozenset[Rule] = frozenset()
    meanwhile: tuple[Rule, ...] = ()


def lets_in(rule: Rule) -> bool:
    """Whether new flows are accepted by it."""
    return rule.accepts and not rule.resumes


def between(stay: Collection[Rule], gone: Collection[Rule], new: Collection[Rule]) -> Between:
    """Of what stays, goes and comes. Who was not guarded was open to all, and who is guarded no
    longer will be."""
    before = frozenset(map(_end, filter(_is_guard, (*stay, *gone))))
    after = frozenset(map(_end, filter(_is_guard, (*stay, *new))))
    early = {rule for rule in new if lets_in(rule) and not _is_guarded(rule, before)}
    late = {rule for rule in gone if lets_in(rule) and not _is_guarded(rule, after)}
    found = [
        (old, rule, both)
        for old, rule in _pairs((rule for rule in gone if rule not in late), new)
        if rule not in early and (both := _common(old, rule)) is not None
    ]
    early.update(rule for _, rule, both in found if both == rule)
    late.update(old for old, _, both in found if replace(both, owner=old.owner) == old)
    rest = {both for old, rule, both in found if old not in late and rule not in early} - early
    meanwhile = tuple(sorted(rest, key=lambda rule: rule.key))
    return Between(frozenset(early), frozenset(late), meanwhile)


End = tuple[object, ...]


def _end(rule: Rule) -> End:
    return rule.chain, rule.family, rule.source, rule.destination


def _is_guard(rule: Rule) -> bool:
    return rule.guards and rule.chain in POLICED


def _is_guarded(rule: Rule, guards: frozenset[End]) -> bool:
    """Also by one for all that comes in on a link."""
    return _end(rule) in guards or (rule.chain, rule.family, None, None) in guards


def _pairs(gone: Iterable[Rule], new: Iterable[Rule]) -> Iterator[tuple[Rule, Rule]]:
    """Those that let in flows of the same guest."""
    olds: dict[End, list[Rule]] = {}
    for old in filter(lets_in, gone):
        olds.setdefault(_end(old), []).append(old)
    for rule in filter(lets_in, new):
        yield from ((old, rule) for old in olds.get(_end(rule), ()))


def _common(old: Rule, new: Rule) -> Rule | None:
    """What lets in who is let in by both."""
    if old.interface != new.interface:
        return None
    if old.protocol is not None and new.protocol not in (None, old.protocol):
        return None
    protocol, ports, peer = old.protocol or new.protocol, new.ports, new.peer
    if old.ports is not None:
        mine = ports or ALL_PORTS
        first, last = max(old.ports.first, mine.first), min(old.ports.last, mine.last)
        if first > last:
            return None
        ports = PortRange(first, last)
    if old.peer is not None:
        if peer is not None and not peer.overlaps(old.peer):
            return None
        if peer is None or peer.prefixlen < old.peer.prefixlen:
            peer = old.peer
    return replace(new, protocol=protocol, ports=ports, peer=peer)
