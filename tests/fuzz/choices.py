"""Decisions read from bytes, and what they change in a text or a tree.

All fuzzers here take bytes, so that hypothesis can shrink them and libFuzzer can guide them. Where
a structure is wanted the bytes are decisions: which sample, where in it, what to put there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

Thing = TypeVar("Thing")

NUMBERS = (
    *(0, 1, -1, 22, 80, 8000, 10, 7, 65534, 65535, 65536, 30000, 32767, 32768, 131073),
    *(2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400),
)
TEXTS = (
    "", " ", "a", "eth0", "default", "masquerade", "TCP", "udp", "SCTP", "ICMP", "0", "1-2",
    "1000-1080/tcp,1000-1080/udp,22", "8000-1000", "022", "0x16", "1e3", "1:30", "٢٢", "²", "+5",
    "10.0.2.2", "10.0.2.0/24", "fd10:0:2::2", "::ffff:1.2.3.4", "fe80::1%eth0", "::1", "0.0.0.0",
    "127.0.0.1", "10.0.2.0/31", "::/0", "255.255.255.255", "%", "..", ".", "/", "/proc/self/ns/net",
    "../../etc/passwd", "/run/netns/../x", "pid:1", "pod:x", "node:self", "-", "-j ACCEPT",
    'x" drop comment "', "x'; flush ruleset; #", "x\nflush ruleset", "x\r\ny", "x\0y", "x\ty", "{}",
    "{ x }", "$(id)", "`id`", "\\", '\\"', "*", "eth*", "@peers", "\N{RIGHT-TO-LEFT OVERRIDE}", "é",
    "\x1b[31m", "\x7f", "\x85", "\u2028", "\ud800", "\ufeff", "a" * 64, "a" * 300, "a." * 130 + "a",
    "null", "true", "~", "<<", "&a", "*a", "!!python/object:os.system", "VirtualMachine", "Service",
    "NetworkPolicy", "List", "kubernetes.io/metadata.name", "In", "Exists", "NotIn", "DoesNotExist",
    "portranger.io/port-ranges", "portranger.io/netns", "portranger.io/interface",
    "portranger.io/guest", "portranger.io/address", "portrange.alpha.kubernetes.io/port-end-x",
)  # fmt: skip
SCALARS: tuple[Any, ...] = (None, True, False, 0.5, float("inf"), float("nan"), *NUMBERS, *TEXTS)
DEEP = 60


class Choices:
    """One decision after the other; when the bytes are used up, each is the first there is."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        """A number from nought on."""
        size = 1 if count <= 256 else 2 if count <= 65536 else 8
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "big") % count if count else 0

    def pick(self, things: Sequence[Thing]) -> Thing:
        return things[self.below(len(things))]

    def some(self, most: int) -> range:
        """To do something so often."""
        return range(self.below(most + 1))

    @property
    def left(self) -> bytes:
        """What nothing was decided by yet."""
        return self._data[self._at :]


def scalar(choices: Choices) -> Any:
    """A value that is often where something goes wrong, or is made up."""
    match choices.below(8):
        case 0:
            return choices.below(2**16)
        case 1:
            return "".join(chr(choices.below(0x2100)) for _ in choices.some(12))
        case 2:
            return f"{choices.pick(TEXTS)}{choices.pick(TEXTS)}"
        case _:
            return choices.pick(SCALARS)


def garbage(choices: Choices, depth: int = 3) -> Any:
    """A value of any type."""
    match choices.below(8 if depth else 5):
        case 5:
            return [garbage(choices, depth - 1) for _ in choices.some(4)]
        case 6:
            return {str(scalar(choices)): garbage(choices, depth - 1) for _ in choices.some(4)}
        case 7:
            made: Any = scalar(choices)
            for _ in choices.some(DEEP):
                made = [made]
            return made
        case _:
            return scalar(choices)


def mutated(tree: Any, choices: Choices, most: int = 6) -> Any:
    """The same with a few things in it taken out, put in, doubled, moved or made into garbage."""
    for _ in choices.some(most):
        tree = _changed(tree, choices)
    return tree


def _changed(tree: Any, choices: Choices) -> Any:
    if isinstance(tree, list) and tree and choices.below(12):
        return _changed_list(tree, choices)
    if isinstance(tree, dict) and tree and choices.below(12):
        return _changed_mapping(tree, choices)
    if isinstance(tree, int) and not isinstance(tree, bool) and choices.below(2):
        return tree + choices.pick((1, -1, 2, 100, 65535))
    if isinstance(tree, str) and choices.below(2):
        return edited(tree, choices)
    return garbage(choices)


def _changed_list(tree: list[Any], choices: Choices) -> list[Any]:
    at = choices.below(len(tree))
    match choices.below(12):
        case 0:
            return [*tree[:at], *tree[at + 1 :]]
        case 1:
            return [*tree[:at], tree[at], *tree[at:]]
        case 2:
            return [*tree[:at], garbage(choices), *tree[at:]]
        case _:
            return [*tree[:at], _changed(tree[at], choices), *tree[at + 1 :]]


def _changed_mapping(tree: dict[str, Any], choices: Choices) -> dict[str, Any]:
    key = choices.pick(list(tree))
    rest = {name: value for name, value in tree.items() if name != key}
    match choices.below(14):
        case 0:
            return rest
        case 1:
            return rest | {str(scalar(choices)): tree[key]}
        case 2:
            return tree | {str(scalar(choices)): garbage(choices)}
        case 3:
            return tree | {choices.pick(list(tree)): tree[key]}
        case _:
            return rest | {key: _changed(tree[key], choices)}


def edited(text: str, choices: Choices) -> str:
    """A text with something cut out, put in or doubled."""
    start = choices.below(len(text) + 1)
    end = min(len(text), start + choices.below(5))
    put = choices.pick((choices.pick(TEXTS), text[start:end] * 2, "", chr(choices.below(0x300))))
    return text[:start] + put + text[end:]


def spoilt(data: bytes, choices: Choices, words: Sequence[bytes]) -> bytes:
    """Bytes with a few changes: cut off, flipped, put in, doubled, overwritten by a word."""
    for _ in choices.some(5):
        at = choices.below(len(data) + 1)
        match choices.below(8):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + bytes([choices.below(256)]) + data[at + 1 :]
            case 2:
                data = data[:at] + bytes(choices.below(256) for _ in choices.some(8)) + data[at:]
            case 3:
                size = choices.below(200)
                data = (
                    data[:at]
                    + data[at : at + size] * choices.pick((0, 2, 3, 40))
                    + data[at + size :]
                )
            case 4:
                word = choices.pick(words)
                data = data[:at] + word + data[at + len(word) :]
            case _:
                data = data[:at] + choices.pick(words) + data[at:]
    return data
