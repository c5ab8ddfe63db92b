"""How much a NetworkPolicy says, counted in what is written before anything is made of it: what it
costs, it costs every node, and again for every machine that it selects."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from rules.policies import Direction

PEERS_KEY = {Direction.INGRESS: "from", Direction.EGRESS: "to"}
BLOCK, PODS, NAMESPACES = PEER_KEYS = ("ipBlock", "podSelector", "namespaceSelector")


def says_more_than(limit: int, spec: object) -> bool:
    """Whether the specification of a policy says more than can be meant; no more of it is looked at
    than it takes to know."""
    return _exceeds(limit, _said(spec))


def selects_by_more_than(limit: int, spec: object) -> bool:
    """The same of the labels alone by which it selects whom it is for."""
    return _exceeds(limit, _selector(spec, PODS))


def _exceeds(limit: int, sizes: Iterable[int]) -> bool:
    return any(count > limit for count in accumulate(sizes))


def _said(spec: object) -> Iterator[int]:
    """How many rules, peers, exceptions, ports and labels there are, list by list."""
    yield from _selector(spec, PODS)
    for direction, key in PEERS_KEY.items():
        rules = _listed(spec, direction.value)
        yield len(rules)
        for rule in rules:
            peers = _listed(rule, key)
            yield len(peers) + len(_listed(rule, "ports"))
            for peer in peers:
                yield len(_listed(_at(peer, BLOCK), "except"))
                yield from _selector(peer, PODS)
                yield from _selector(peer, NAMESPACES)


def _selector(holder: object, key: str) -> Iterator[int]:
    selector = _at(holder, key)
    labels, expressions = _at(selector, "matchLabels"), _listed(selector, "matchExpressions")
    yield len(expressions) + (len(labels) if isinstance(labels, dict) else 0)
    for expression in expressions:
        yield len(_listed(expression, "values"))


def _at(holder: object, key: str) -> object:
    """What is at a key; it may be of any type, or nothing."""
    return holder.get(key) if isinstance(holder, dict) else None


def _listed(holder: object, key: str) -> list[object]:
    value = _at(holder, key)
    return value if isinstance(value, list) else []
