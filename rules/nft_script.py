"""Plans to scripts for nft: the transactions that rules/nft.py tells libnftables, as text."""

from collections.abc import Iterable, Iterator

from rules import nft_sets
from rules.model import Chain, Family, Lookup, Rule
from rules.nft import (
    ADDRESSES,
    NAME,
    NFPROTO,
    PRIORITY,
    TYPES,
    bridge_name,
    bridge_priority,
    link_key,
    map_name,
    peers_end,
    port_pairs,
    put,
    shifted_ports,
    verb,
    verdict_word,
)
from rules.nft_sets import SetStep
from rules.nft_steps import (
    AddBridge,
    AddLookup,
    AddRule,
    BridgeStep,
    DropBridge,
    DropMap,
    DropRule,
    DropStray,
    DropTable,
    Erase,
    EraseStray,
    Fill,
    FlushBridge,
    MakeBridge,
    MakeChain,
    MakeMap,
    MakeTable,
    RuleStep,
    Step,
)
from rules.nft_terms import destination_words, detour_words, share_words
from rules.nft_transactions import transactions
from rules.plan import Plan
from rules.shapes import name, port_name

SEVERAL = """\
# {} transactions, so that no new connection is refused meanwhile: give each
# to nft by itself, a tenth of a second after the one before
"""


def script(plan: Plan) -> str:
    """The transactions as text for `nft -f`, each below a line that says which one it is, if there
    are several."""
    found = transactions(plan)
    if len(found) < 2:
        return "".join(map(_script, found))
    blocks = (
        f"# transaction {turn} of {len(found)}\n{_script(steps)}"
        for turn, steps in enumerate(found, 1)
    )
    return "".join([SEVERAL.format(len(found)), *blocks])


def _script(steps: Iterable[Step]) -> str:
    return "".join(f"{_line(step)}\n" for step in steps)


def _line(step: Step) -> str:
    if isinstance(step, SetStep):
        return nft_sets.line(step, f"inet {NAME}")
    return _bridge_line(step) if isinstance(step, BridgeStep) else _rule_line(step)


def _rule_line(step: RuleStep) -> str:
    match step:
        case DropTable():
            return f"delete table inet {NAME}"
        case MakeTable(exclusive):
            return f"{'create' if exclusive else 'add'} table inet {NAME}"
        case MakeChain(chain):
            return _chain_line(chain, chain.value, PRIORITY[chain])
        case DropRule(chain, handle):
            return f"delete rule inet {NAME} {chain} handle {handle}"
        case DropStray(kind, stray):
            return f"delete {kind} inet {NAME} {stray}"
        case EraseStray(stray, (first, last)):
            return f"delete element inet {NAME} {stray} {{ {first}-{last} }}"
        case DropMap(lookup, ports):
            return f"delete map inet {NAME} {map_name(lookup, ports)}"
        case Erase(lookup, rules, ports):
            found = shifted_ports(rules) if ports else [rule.ports for rule in rules]
            keys = ", ".join(map(str, found))
            return f"delete element inet {NAME} {map_name(lookup, ports)} {{ {keys} }}"
        case MakeMap(lookup, ports):
            return f"add map inet {NAME} {map_words(lookup, ports)}"
        case Fill(lookup, rules, ports):
            pairs = ", ".join(_pair_words(rules) if ports else map(_element_words, rules))
            return f"add element inet {NAME} {map_name(lookup, ports)} {{ {pairs} }}"
        case AddRule(rule, first, behind):
            at = f" handle {behind}" if behind else ""
            return f"{put(first)} rule inet {NAME} {rule.chain.value}{at} {statement(rule)}"
        case AddLookup(lookup, first):
            where = f"{put(first)} rule inet {NAME} {lookup.chain.value}"
            return f"{where} {lookup_statement(lookup)}"


def _bridge_line(step: BridgeStep) -> str:
    match step:
        case MakeBridge(chain, behind):
            return _chain_line(chain, bridge_name(chain, behind), bridge_priority(chain, behind))
        case FlushBridge(chain, behind):
            return f"flush chain inet {NAME} {bridge_name(chain, behind)}"
        case DropBridge(chain, behind):
            return f"delete chain inet {NAME} {bridge_name(chain, behind)}"
        case AddBridge(rule, behind):
            return f"add rule inet {NAME} {bridge_name(rule.chain, behind)} {statement(rule)}"


def _chain_line(chain: Chain, called: str, priority: int) -> str:
    return (
        f"add chain inet {NAME} {called} {{ type {TYPES[chain]} hook {chain.hook}"
        f" priority {priority}; policy accept; }}"
    )


def statement(rule: Rule) -> str:
    """A rule in the words of nft."""
    words: list[str] = []
    if rule.interface is not None:
        words.append(f'{link_key(rule.chain)} "{rule.interface}"')
    if rule.chain is Chain.RAW:
        words.append(f"{rule.family.value} daddr {rule.peer}")
    elif rule.source is None and rule.destination is None:
        words.append(f"meta nfproto {NFPROTO[rule.family]}")
    if rule.source is not None:
        words.append(f"{rule.family.value} saddr {rule.source}")
    if rule.destination is not None:
        words.append(destination_words(rule.destination, rule.family))
    if rule.protocol is not None:
        words.append(f"{rule.protocol.value} dport {rule.ports}")
        if rule.share is not None:
            words.append(share_words(rule.share, rule.family, rule.protocol))
    if rule.detour is not None:
        words.append(detour_words(rule.detour, rule.family))
    if rule.peers is not None:
        words.append(f"{rule.family.value} {peers_end(rule)} @{rule.peers}")
    if rule.peer is not None and rule.chain is not Chain.RAW:
        words.append(f"{rule.family.value} {peers_end(rule)} {rule.peer}")
    if rule.resumes:
        words.append("ct state established,related")
    words.append("counter")
    words.append(verdict_word(rule) if rule.to is None else _translation(rule))
    words.append(f'comment "{rule.owner}"')
    return " ".join(words)


def lookup_statement(lookup: Lookup) -> str:
    """The rule of a map in the words of nft."""
    words = [f'iifname "{lookup.interface}"'] if lookup.interface is not None else []
    if lookup.destination is None:
        words.append(f"meta nfproto {NFPROTO[lookup.family]}")
    else:
        words.append(destination_words(lookup.destination, lookup.family))
    if lookup.share is not None:
        words.append(share_words(lookup.share, lookup.family, lookup.protocol))
    target = f"{lookup.protocol.value} dport map @{name(lookup)}"
    if lookup.shifted:
        target += f" : {lookup.protocol.value} dport map @{port_name(lookup)}"
    return " ".join([*words, "counter", f"dnat {lookup.family.value} to {target}"])


def map_words(lookup: Lookup, ports: bool = False) -> str:
    """A map as nft defines it; every element counts for itself."""
    if ports:
        return f"{port_name(lookup)} {{ type inet_service : inet_service; }}"
    kind = f"inet_service : {ADDRESSES[lookup.family]}"
    return f"{name(lookup)} {{ type {kind}; flags interval; counter; }}"


def _translation(rule: Rule) -> str:
    words = f"{verb(rule.chain)} {rule.family.value} to "
    if rule.ports is None or rule.to_port is None:
        return words + str(rule.to)
    words += f"[{rule.to}]:" if rule.family is Family.IP6 else f"{rule.to}:"
    if len(rule.ports) == 1:
        return words + str(rule.to_port)
    pairs = ", ".join(_pair_words([rule]))
    return f"{words} {rule.protocol.value if rule.protocol else ''} dport map {{ {pairs} }}"


def _pair_words(rules: Iterable[Rule]) -> Iterator[str]:
    return (f"{port} : {to}" for port, to in port_pairs(rules))


def _element_words(rule: Rule) -> str:
    return f'{rule.ports} comment "{rule.owner}" : {rule.to}'
