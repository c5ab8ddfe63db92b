"""What others put into our table, with the rights that they have in their own namespace. At some of
it libnftables aborts, or reads where it must not. That ends a worker, and nothing else: the table
is made anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.errors import TryAgain
from agent.kernel import libnftables
from agent.kernel.libnftables import Libnftables, Unreadable
from agent.kernel.netlink import transact
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import TABLE, netlink
from rules import nft_batch as raw
from rules.nft_batch import NEWCHAIN, NEWSET, NEWSETELEM, OURS, Message
from rules.nft_sets import attribute, number
from tests.spaces import applied, emptied, kernel, nft, observed, pod, portranger, vm, within

MACHINE = vm("desktop", "22,1000-8000/udp")
NFTA_CHAIN_NAME, NFTA_SET_TABLE_NAME = 3, 2
MAP = 8  # a flag
ADDRESS, PORT, UNHEARD_OF = 7, 13, 9999  # types of libnftables
KINDS = range(40)  # of expressions, in what a set says of its own type


def made(name: bytes, key: int, length: int, *more: bytes, flags: int = 0) -> Message:
    """A set or map, as no program of ours would make it."""
    numbers = {3: flags, 4: key, 5: length, 10: 1}
    content = b"".join(attribute(kind, number(value)) for kind, value in numbers.items())
    name = attribute(NFTA_SET_TABLE_NAME, name + b"\0")
    return NEWSET, 0x401, OURS + name + content + b"".join(more)


def element(name: bytes, key: bytes, data: bytes = b"") -> Message:
    inner = raw._nested(1, attribute(1, key)) + (
        raw._nested(2, attribute(1, data)) if data else b""
    )
    listed = raw._nested(3, raw._nested(1, inner))
    return NEWSETELEM, 0x401, OURS + attribute(NFTA_SET_TABLE_NAME, name + b"\0") + listed


def pair(kind: int, content: bytes) -> bytes:
    """As libnftables keeps what it wants to know of a set."""
    return bytes((kind, len(content))) + content


def typed(kind: int) -> Message:
    one = (1).to_bytes(4, "little")
    inner = pair(0, kind.to_bytes(4, "little")) + pair(1, b"".join(pair(n, one) for n in range(3)))
    return made(b"typed%d" % kind, PORT, 2, attribute(13, pair(3, inner)))


NOWHERE = (attribute(6, number(UNHEARD_OF)), attribute(7, number(4)))
HOSTILE: dict[str, list[Message]] = {
    "a chain whose name is no text": [
        (NEWCHAIN, 0x401, OURS + attribute(NFTA_CHAIN_NAME, b"\xff\xfe\0"))
    ],
    "a set whose name is no text": [made(b"\xff\xfe", PORT, 2)],
    "addresses that are too long": [made(b"s", ADDRESS, 16), element(b"s", b"\1" * 16)],
    "a map to what nobody knows": [
        made(
            b"m",
            PORT,
            2,
            *(attribute(n, number(v)) for n, v in ((6, UNHEARD_OF), (7, 4))),
            flags=MAP,
        ),
        element(b"m", b"\0\1", b"\1" * 4),
    ],
    "sets of every odd type": [typed(kind) for kind in KINDS],
}


def put(netns: str, messages: list[Message]) -> None:
    edge = b"\0\0\0\x0a"
    *most, (kind, flags, body) = messages
    whole = [(16, 1, edge), *most, (kind, flags | 4, body), (17, 1, edge)]
    with opened(netns) as descriptor, inside(descriptor, netns), netlink() as here:
        transact(here, b"".join(raw._message(*one) for one in whole))


@pytest.fixture(scope="module")
def only() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    applied(emptied(only), MACHINE)
    return only


def assert_is_mended(netns: str) -> None:
    seen = observed(netns)
    assert seen.unsound or seen.foreign
    applied(netns, MACHINE)
    assert applied(netns, MACHINE).empty
    assert "udp dport 1000-8000" in within(netns, "nft", "list", "table", "inet", "portranger")


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_is_put_into_the_table_it_is_made_anew(netns: str, name: str) -> None:
    put(netns, HOSTILE[name])
    assert_is_mended(netns)


def test_a_link_whose_name_is_no_text_is_no_harm(netns: str) -> None:
    harm(netns)
    assert_is_mended(netns)


def harm(netns: str) -> None:
    script = b'add rule inet portranger prerouting iifname "\xff" accept\n'
    words = ["ip", "netns", "exec", netns, "nft", "-f", "-"]
    subprocess.run(words, input=script, check=True, timeout=60)


def test_a_table_that_makes_libnftables_fail_is_shown_and_cleared(netns: str) -> None:
    harm(netns)
    put(netns, HOSTILE["addresses that are too long"])
    shown = portranger("show", "--netns", netns)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert portranger("clear", "--netns", netns, "--yes").returncode == 0
    assert within(netns, "nft", "list", "tables") == ""


def test_a_worker_that_crashed_is_replaced(netns: str) -> None:
    put(netns, HOSTILE["addresses that are too long"])
    assert observed(netns).unsound == "libnftables crashed"
    assert [one._process for one in kernel("auto")._workers.libnftables._all] == [None]
    applied(netns, MACHINE)
    assert observed(netns).unsound == ""


def test_a_worker_that_gets_no_processor_time_is_a_timeout_and_no_tampering(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft(netns, "add rule inet portranger prerouting counter")
    observed(netns)  # now there is one
    (worker,) = kernel("auto")._workers.libnftables._all
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    nft(netns, "add rule inet portranger prerouting counter")
    before = within(netns, "nft", "-a", "list", "table", "inet", "portranger")
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_patience", 0.3)
        with pytest.raises(TryAgain, match=r"timed out: .* within 0.3 s") as caught:
            applied(netns, MACHINE)
    assert caught.value.exit_code == 75
    assert within(netns, "nft", "-a", "list", "table", "inet", "portranger") == before
    assert_is_mended(netns)


HUNGRY = """
import agent.kernel.libnftables_worker as worker
worker.PROCESSOR = 0
worker.Contexts.answer = lambda *_: sum(1 for _ in iter(int, 1))
worker.main()
"""


@contextmanager
def hungry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the block runs, a listing takes more processor time than it may."""
    library = kernel("auto")._workers.libnftables
    library.stop()
    command = [sys.executable, "-c", HUNGRY]
    with monkeypatch.context() as patch:
        patch.setattr(library, "_idle", [])
        patch.setattr(library, "_all", [])
        patch.setattr(libnftables, "module", lambda _: command)
        yield
        library.stop()


def test_a_table_that_takes_too_much_processor_time_is_made_anew(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft(netns, "add rule inet portranger prerouting counter")
    with hungry(monkeypatch):
        assert observed(netns).unsound == "libnftables takes too much processor time"
    assert_is_mended(netns)


def test_a_namespace_where_others_keep_committing_is_tried_again_and_not_made_anew(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft(netns, "add rule inet portranger prerouting counter")
    stop = threading.Event()

    def commits() -> None:
        while not stop.wait(0.05):
            nft(netns, "add table ip others")

    thread = threading.Thread(target=commits)
    thread.start()
    try:
        with (
            hungry(monkeypatch),
            pytest.raises(TryAgain, match="keep changing while they are read"),
        ):
            observed(netns)
    finally:
        stop.set()
        thread.join()
        nft(netns, "delete table ip others")


SMALL = "import agent.kernel.libnftables_worker as worker; worker.{} = {}; worker.main()"


@pytest.mark.parametrize("limit", ["LONGEST = 100", "MEMORY = 30 << 20"])
def test_a_table_that_takes_too_much_to_list_is_unreadable(netns: str, limit: str) -> None:
    lines = (f"add rule inet portranger prerouting tcp dport {port}" for port in range(1, 3000))
    nft(netns, "\n".join(lines))
    library = Libnftables()
    name, _, number = limit.partition(" = ")
    worker = library._made()
    worker._command = [sys.executable, "-c", SMALL.format(name, number)]
    library._idle.append(worker)
    try:
        with opened(netns) as descriptor, pytest.raises(Unreadable):
            library.listed(descriptor, TABLE)
    finally:
        library.stop()
