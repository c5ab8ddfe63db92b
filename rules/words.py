"""Rules as people and programs read them: the columns of a line, JSON, and how many there are."""

from collections.abc import Sequence

from rules.model import (
    FILTERS,
    OWN,
    PLACES,
    POLICED,
    Chain,
    Detour,
    Live,
    Rule,
    Share,
)

Json = dict[str, object]
MOST_SAID = 10  # of one kind, where people read it


def counted(number: int, noun: str) -> str:
    """1 manifest, 2 manifests."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def few(said: Sequence[str]) -> list[str]:
    """The first of what is to be said, and how much more there is: people read no longer lists."""
    rest = len(said) - MOST_SAID
    return [*said[:MOST_SAID], *([f"and {rest} more"] if rest > 0 else [])]


def rule_json(rule: Rule) -> Json:
    """A rule as a plan's JSON has it; what is absent means any."""
    fields: Json = {
        "owner": rule.owner,
        "chain": rule.chain.hook,
        "direction": direction(rule) or None,
        "family": rule.family.value,
        "action": action(rule),
        "protocol": rule.protocol.value if rule.protocol else None,
        "ports": str(rule.ports) if rule.ports else None,
        "interface": rule.interface,
        "source": str(rule.source) if rule.source else None,
        "destination": destination(rule) if rule.destination or rule.chain is Chain.RAW else None,
        "to": str(rule.to) if rule.to else None,
        "to_port": str(rule.to_ports) if rule.to_ports else None,
        "peers": _peers(rule) or None,
        "share": share(rule.share) if rule.share else None,
        "sent_back": list(rule.detour.links) or None if rule.detour else None,
        "sent_on": [str(one) for one in rule.detour.remote] or None if rule.detour else None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def live_text(live: Sequence[Live]) -> list[str]:
    """Rules as they are, a line each, with what went through them: by the names of their chains,
    and in the order in which these ask them."""
    rows = []
    for one in sorted(live, key=_turn):
        family, _, *words = rule_words(one.rule)
        chain = one.rule.chain.value
        rows.append([family, chain, *words, f"{one.packets} packets", f"{one.octets} bytes"])
    return aligned(rows)


def _turn(live: Live) -> tuple[object, ...]:
    """Open flows first, and last what is for all that no other rule takes."""
    rule = live.rule
    return rule.family.value, PLACES[rule.chain], not rule.resumes, rule.guards, rule.key


def rule_words(rule: Rule) -> list[str]:
    """A rule in the columns of a line: where, what, where to, whose."""
    what = f"{rule.protocol.value} {rule.ports}" if rule.protocol else "everything"
    if rule.chain in FILTERS:
        what = _filtered(rule, what)
    elif rule.source is not None:
        what += f" from {rule.source}"
    if rule.destination is not None and rule.chain not in FILTERS:
        what += f" to {destination(rule)}"
    if rule.share is not None:
        what += f" ({share(rule.share)})"
    if rule.detour is not None:
        what = f"{detour(rule.detour)}"
    if rule.interface is not None:
        what += f" {'via' if rule.chain is Chain.POSTROUTING else 'on'} {rule.interface}"
    return [rule.family.value, rule.chain.hook, what, f"-> {target(rule)}", rule.owner]


def _filtered(rule: Rule, what: str) -> str:
    """What a rule of a filter is about, and between whom."""
    if rule.resumes:
        return f"what belongs to open flows ({direction(rule)})"
    if rule.chain is Chain.RAW:
        return f"{what} to {destination(rule)}"
    others = _peers(rule) or "anybody"
    if rule.destination is not None:
        return f"{what} to {rule.destination} from {others}"
    return f"{what} from {rule.source or 'any other address'} to {others}"


def _peers(rule: Rule) -> str:
    """Who is at the other end of what a policy allows; empty: anybody."""
    return str(rule.peers or rule.peer or "") if rule.chain in POLICED else ""


def direction(rule: Rule) -> str:
    """Which verdict of a policy it belongs to, seen from the guest; empty: to none."""
    if rule.chain not in POLICED:
        return ""
    sent = rule.source is not None or rule.interface is not None  # once both were in one chain
    return "egress" if rule.chain is Chain.EGRESS or sent else "ingress"


def destination(rule: Rule) -> str:
    """The address, or the network, that packets are for."""
    if rule.chain is Chain.RAW:
        return str(rule.peer)
    own = rule.destination == OWN[rule.family]
    return "the node" if own else str(rule.destination)


def share(part: Share) -> str:
    """How many of the flows go there."""
    return f"{len(part.at)} of {part.of} {'clients' if part.client else 'flows'}"


def detour(way: Detour) -> str:
    """Which flows are given an address of ours, so that their answers come back to us."""
    if way.links:
        return f"sent back over {', '.join(way.links)}"
    return f"sent on to {', '.join(map(str, way.remote))}"


def target(rule: Rule) -> str:
    """Where a rule sends a packet, or whose address it gives it."""
    if rule.chain in FILTERS:
        return action(rule)
    if rule.to is None:
        return "itself (guard)" if rule.guards else "masquerade"
    if rule.chain is Chain.POSTROUTING:
        return f"from {rule.to}"
    return f"{rule.to} {rule.to_ports}" if rule.to_ports else str(rule.to)


def action(rule: Rule) -> str:
    """What a rule does with a packet."""
    if rule.chain in FILTERS:
        return "accept" if rule.accepts else "drop"
    if rule.chain is not Chain.POSTROUTING:
        return "guard" if rule.guards else "dnat"
    return "masquerade" if rule.to is None else "snat"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to one width; a row of one word stands for itself."""
    width: dict[int, int] = {}
    for row in rows:
        for column, word in enumerate(row[:-1]):
            width[column] = max(width.get(column, 0), len(word))
    return [
        "  ".join([*(f"{word:{width[i]}}" for i, word in enumerate(row[:-1])), row[-1]])
        for row in rows
    ]
