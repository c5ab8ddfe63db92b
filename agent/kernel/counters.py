"""What went through our rules, asked for by whoever wants to know: in any thread, without
libnftables, and without what the loop holds open. Listing a table that way takes milliseconds and
the loop's own context; the numbers alone are one question to the kernel.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from agent.errors import Failure, NoNamespace, NotPermitted
from agent.kernel.netlink import NLM_F_DUMP, Answer, Attributes, ask, attribute, attributes
from agent.kernel.netns import inside, opened
from rules.model import Live
from rules.nft import NAME
from rules.shapes import lookup_of, spot
from rules.shapes import name as map_name

NETLINK_NETFILTER = 12
NFPROTO_INET = 1
NFT_MSG_GETRULE, NFT_MSG_GETSETELEM = (10 << 8) | 7, (10 << 8) | 13  # of the subsystem nftables
NFTA_SET_ELEM_LIST_TABLE, NFTA_SET_ELEM_LIST_SET, NFTA_SET_ELEM_LIST_ELEMENTS = 1, 2, 3
NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_EXPR, NFTA_DATA_VALUE = 1, 7, 1
NFTA_RULE_TABLE, NFTA_RULE_HANDLE, NFTA_RULE_EXPRESSIONS = 1, 3, 4
NFTA_EXPR_NAME, NFTA_EXPR_DATA = 1, 2
NFTA_COUNTER_BYTES, NFTA_COUNTER_PACKETS = 1, 2
COUNTER = attribute(NFTA_EXPR_NAME, b"counter\0")
LENGTH = struct.Struct("=H")
OUR_RULES = struct.pack("=BBH", NFPROTO_INET, 0, 0) + attribute(
    NFTA_RULE_TABLE, NAME.encode() + b"\0"
)
OUR_ELEMENTS = struct.pack("=BBH", NFPROTO_INET, 0, 0) + attribute(
    NFTA_SET_ELEM_LIST_TABLE, NAME.encode() + b"\0"
)
PATIENCE = 2.0  # seconds; the kernel answers in less than a thousandth of it

Counted = dict[object, tuple[int, int]]
Finding = Callable[[str], AbstractContextManager[int]]  # a namespace by its name, opened


def read(
    netns: str, identity: object, maps: Iterable[str] = (), found: Finding = opened
) -> Counted:
    """The packets and bytes of each rule in our table and of each element of these maps, by what
    rules.shapes.spot says; nothing where the namespace has gone, or where its name is another's
    now."""
    try:
        with found(netns) as descriptor:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != identity:
                return {}
            with inside(descriptor, netns):
                return _counted(netns, maps)
    except NoNamespace:
        return {}


def recounted(netns: str, live: Sequence[Live]) -> tuple[Live, ...]:
    """These rules of the namespace that this thread is in, with what went through them by now."""
    lookups = {lookup_of(one.rule) for one in live if not one.handle}
    numbers = _counted(netns, [map_name(lookup) for lookup in lookups if lookup])
    return tuple(
        Live(one.rule, one.handle, *numbers.get(spot(one), (one.packets, one.octets)))
        for one in live
    )


def _counted(netns: str, maps: Iterable[str]) -> Counted:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
            netlink.settimeout(PATIENCE)
            answers = ask(netlink, NFT_MSG_GETRULE, NLM_F_DUMP, OUR_RULES, "=BBH")
            listed = dict(pair for name in maps for pair in _elements(netlink, name))
    except PermissionError as error:
        raise NotPermitted(
            f"may not read the counters of namespace {netns}",
            "Run as root, or with CAP_NET_ADMIN",
        ) from error
    except OSError as error:
        raise Failure(f"cannot read the counters of namespace {netns}: {error}") from error
    return dict(counted(answers)) | listed


def counted(answers: Iterable[Answer]) -> Iterator[tuple[object, tuple[int, int]]]:
    """What each rule of ours has counted, by its handle."""
    for _, rule in answers:
        numbers = _numbers(rule)
        if numbers is not None and NFTA_RULE_HANDLE in rule:
            yield _number(rule[NFTA_RULE_HANDLE]), numbers


def _elements(netlink: socket.socket, name: str) -> Iterator[tuple[object, tuple[int, int]]]:
    """By the map and the first port of each; nothing where the map has gone meanwhile."""
    body = OUR_ELEMENTS + attribute(NFTA_SET_ELEM_LIST_SET, name.encode() + b"\0")
    try:
        answers = ask(netlink, NFT_MSG_GETSETELEM, NLM_F_DUMP, body, "=BBH")
    except FileNotFoundError:
        return
    yield from elements(name, answers)


def elements(name: str, answers: Iterable[Answer]) -> Iterator[tuple[object, tuple[int, int]]]:
    """The same of the elements of a map."""
    for _, listed in answers:
        for raw in _listed(listed.get(NFTA_SET_ELEM_LIST_ELEMENTS, b"")):
            element = attributes(raw)
            key = attributes(element.get(NFTA_SET_ELEM_KEY, b"")).get(NFTA_DATA_VALUE)
            # The second of the two that make an interval has no counter.
            numbers = _counter(element.get(NFTA_SET_ELEM_EXPR, b""))
            if key is not None and numbers is not None:
                yield (name, _number(key)), numbers


def _listed(raw: bytes) -> Iterator[memoryview]:
    """The members of a list, one after the other."""
    start = 0
    while start <= len(raw) - LENGTH.size:
        (length,) = LENGTH.unpack_from(raw, start)
        yield memoryview(raw)[start + 4 : start + length]
        start += (length + 3) & ~3 or 4  # whatever it says, the end comes nearer


def _numbers(rule: Attributes) -> tuple[int, int] | None:
    """Of the first counter in the rule; None where it has none, so is not of our making. Only that
    one of the expressions is taken apart: all of them would be most of the work."""
    for expression in _listed(rule.get(NFTA_RULE_EXPRESSIONS, b"")):
        if expression[: len(COUNTER)] == COUNTER:  # the kernel writes the name first
            return _counter(expression)
    return None


def _counter(expression: memoryview | bytes) -> tuple[int, int] | None:
    data = attributes(attributes(expression).get(NFTA_EXPR_DATA, b""))
    if NFTA_COUNTER_PACKETS not in data or NFTA_COUNTER_BYTES not in data:
        return None
    return _number(data[NFTA_COUNTER_PACKETS]), _number(data[NFTA_COUNTER_BYTES])


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big")
