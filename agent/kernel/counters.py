"""What went through our rules, asked for by whoever wants to know: in any thread, without
libnftables, and without what the loop holds open. Listing a table that way takes milliseconds and
the loop's own context; the numbers alone are one question to the kernel.
"""

import os
import socket
import struct

from agent.errors import Failure, NoNamespace, NotPermitted
from agent.kernel.netlink import NLM_F_DUMP, Attributes, ask, attribute, attributes
from agent.kernel.netns import inside, opened
from rules.nft import NAME

NETLINK_NETFILTER = 12
NFPROTO_INET = 1
NFT_MSG_GETRULE = (10 << 8) | 7  # of the subsystem nftables
NFTA_RULE_TABLE, NFTA_RULE_HANDLE, NFTA_RULE_EXPRESSIONS = 1, 3, 4
NFTA_EXPR_NAME, NFTA_EXPR_DATA = 1, 2
NFTA_COUNTER_BYTES, NFTA_COUNTER_PACKETS = 1, 2
COUNTER = attribute(NFTA_EXPR_NAME, b"counter\0")
LENGTH = struct.Struct("=H")
OUR_RULES = struct.pack("=BBH", NFPROTO_INET, 0, 0) + attribute(
    NFTA_RULE_TABLE, NAME.encode() + b"\0"
)
PATIENCE = 2.0  # seconds; the kernel answers in less than a thousandth of it

Counted = dict[int, tuple[int, int]]


def read(netns: str, identity: object) -> Counted:
    """The packets and bytes of each rule in our table, by its handle; nothing where the namespace
    has gone, or where its name is another's now."""
    try:
        with opened(netns) as descriptor:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != identity:
                return {}
            with inside(descriptor, netns):
                return _counted(netns)
    except NoNamespace:
        return {}


def _counted(netns: str) -> Counted:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
            netlink.settimeout(PATIENCE)
            answers = ask(netlink, NFT_MSG_GETRULE, NLM_F_DUMP, OUR_RULES, "=BBH")
    except PermissionError as error:
        raise NotPermitted(
            f"may not read the counters of namespace {netns}",
            "Run as root, or with CAP_NET_ADMIN",
        ) from error
    except OSError as error:
        raise Failure(f"cannot read the counters of namespace {netns}: {error}") from error
    return {
        _number(rule[NFTA_RULE_HANDLE]): numbers
        for _, rule in answers
        if (numbers := _numbers(rule)) is not None
    }


def _numbers(rule: Attributes) -> tuple[int, int] | None:
    """Of the first counter in the rule; None where it has none, so is not of our making. Only that
    one of the expressions is taken apart: all of them would be most of the work."""
    raw = rule.get(NFTA_RULE_EXPRESSIONS, b"")
    start = 0
    while start < len(raw):
        (length,) = LENGTH.unpack_from(raw, start)
        if raw.startswith(COUNTER, start + 4):  # the kernel writes the name first
            expression = attributes(memoryview(raw)[start + 4 : start + length])
            data = attributes(memoryview(expression[NFTA_EXPR_DATA]))
            return _number(data[NFTA_COUNTER_PACKETS]), _number(data[NFTA_COUNTER_BYTES])
        start += (length + 3) & ~3 or 4  # whatever it says, the end comes nearer
    return None


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big")
