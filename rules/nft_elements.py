"""Plans that only put elements into maps or take them out, as the bytes of a netlink batch.

libnftables reads a whole map before it adds to it: 30 ms for 5,000 ranges, where the kernel needs
microseconds. The batch names the generation of the ruleset that the plan was made for, and the
kernel refuses it whole if there has been another since.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import chain

from rules.model import Live, Lookup, Observed, Rule
from rules.nft import NAME
from rules.plan import Plan, Table
from rules.ports import HIGHEST
from rules.shapes import lives, lookup_of, name
from rules.values import replace

BATCH_BEGIN, BATCH_END = 16, 17
NEWSETELEM, DELSETELEM = (10 << 8) | 12, (10 << 8) | 14  # of the subsystem nftables
REQUEST, ACK, CREATE = 0x1, 0x4, 0x400
NESTED = 0x8000
BATCH_GENID = 1
LIST_TABLE, LIST_SET, LIST_ELEMENTS = 1, 2, 3
LIST_ELEM = 1
ELEM_KEY, ELEM_DATA, ELEM_FLAGS, ELEM_USERDATA = 1, 2, 3, 6
DATA_VALUE = 1
INTERVAL_END = struct.pack(">I", 1)
COMMENT = 0  # the kind of what nft keeps in an element's user data
AT_ONCE = 200  # elements in one message: an attribute holds 64 KiB at most
INET, SUBSYSTEM = 1, 10


def are_elements(plan: Plan) -> bool:
    """Whether a plan can be carried out this way; one that writes nothing makes no generation."""
    if plan.table is not Table.KEEP or plan.chains or plan.maps != plan.mapped.keys():
        return False
    olds, news = (*plan.remove, *(live for live, _ in plan.change)), _new(plan)
    return (
        bool(olds or news)
        and all(isinstance(old, Live) and not old.handle for old in olds)
        and all(lookup_of(rule) in plan.maps for rule in news)
    )


def is_for(plan: Plan, observed: Observed) -> bool:
    """Whether it takes away what is there, and adds what is not."""
    here = lives(observed).by_rule
    return all(old.rule in here for old in _gone(plan)) and here.keys().isdisjoint(_new(plan))


def batch(plan: Plan, generation: int) -> bytes:
    """The transaction. Only the last of its messages is acknowledged, whatever is refused is told
    anyway: a socket has no room for hundreds of answers."""
    gone = _by_lookup(old.rule for old in _gone(plan))
    new = _by_lookup(_new(plan))
    *bodies, (kind, flags, last) = [
        *_bodies(DELSETELEM, REQUEST, gone),
        *_bodies(NEWSETELEM, REQUEST | CREATE, new),
    ]
    begin = attribute(BATCH_GENID, struct.pack(">I", generation))
    edge = struct.pack(">BBH", 0, 0, SUBSYSTEM)
    content = [
        _message(BATCH_BEGIN, REQUEST, edge + begin),
        *(_message(*one) for one in bodies),
        _message(kind, flags | ACK, last),
        _message(BATCH_END, REQUEST, edge),
    ]
    return b"".join(content)


def carried_out(plan: Plan, observed: Observed) -> Observed:
    """What there is after such a plan, if nobody else did anything."""
    return replace(observed, live=lives(observed).changed(_gone(plan), _new(plan)))


def _gone(plan: Plan) -> list[Live]:
    olds = (*plan.remove, *(live for live, _ in plan.change))
    return [old for old in olds if isinstance(old, Live)]


def _new(plan: Plan) -> list[Rule]:
    return [*(rule for _, rule in plan.change), *plan.add]


def _by_lookup(rules: Iterable[Rule]) -> dict[Lookup, list[Rule]]:
    found: dict[Lookup, list[Rule]] = {}
    for rule in rules:
        lookup = lookup_of(rule)
        if lookup is not None:
            found.setdefault(lookup, []).append(rule)
    return found


def _bodies(
    kind: int, flags: int, groups: dict[Lookup, list[Rule]]
) -> Iterator[tuple[int, int, bytes]]:
    """The messages, yet without their headers."""
    for lookup, rules in groups.items():
        for start in range(0, len(rules), AT_ONCE):
            ends = (
                _ends(rule, whole=kind == NEWSETELEM) for rule in rules[start : start + AT_ONCE]
            )
            yield (
                kind,
                flags,
                struct.pack("=BBH", INET, 0, 0)
                + attribute(LIST_TABLE, NAME.encode() + b"\0")
                + attribute(LIST_SET, name(lookup).encode() + b"\0")
                + attribute(LIST_ELEMENTS | NESTED, b"".join(chain.from_iterable(ends))),
            )


def _ends(rule: Rule, *, whole: bool) -> Iterator[bytes]:
    """The kernel holds an interval as two elements: its first port, and the one after its last.
    Where the interval leads, and whose it is, is with the first of them."""
    if rule.ports is None or rule.to is None:
        raise ValueError(rule)
    content = attribute(ELEM_KEY | NESTED, _value(struct.pack(">H", rule.ports.first)))
    if whole:
        comment = rule.owner.encode() + b"\0"
        content += attribute(ELEM_DATA | NESTED, _value(rule.to.packed))
        content += attribute(ELEM_USERDATA, bytes((COMMENT, len(comment))) + comment)
    yield attribute(LIST_ELEM | NESTED, content)
    if rule.ports.last < HIGHEST:
        after = attribute(ELEM_KEY | NESTED, _value(struct.pack(">H", rule.ports.last + 1)))
        yield attribute(LIST_ELEM | NESTED, after + attribute(ELEM_FLAGS, INTERVAL_END))


def _value(content: bytes) -> bytes:
    return attribute(DATA_VALUE, content)


def attribute(kind: int, content: bytes) -> bytes:
    """Padded as the next one needs it."""
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body
