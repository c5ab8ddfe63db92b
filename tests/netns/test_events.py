"""What the daemon is woken by: the kernel tells of commits, links and ends of namespaces, with the
right namespace and writer, and nothing of what does not matter; and arrivals are never missed."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from agent.kernel.arrivals import Arrivals
from agent.kernel.events import (
    LISTEN_ALL_NSID,
    NETLINK_NETFILTER,
    NEWGEN,
    SOL_NETLINK,
    Event,
    Events,
    Gone,
    Lost,
    Moved,
    Relinked,
    going,
    messages,
    moving,
    origin,
)
from agent.kernel.netlink import HEADER, ask, attribute
from agent.kernel.netns import inside, opened
from tests.spaces import (
    PATIENCE,
    ROOT,
    eventually,
    has_initial_pids,
    ip,
    nft,
    process,
    run,
    space,
    unused_name,
)
from tests.spaces import pod as pod_with_links

GETGEN = (10 << 8) | 16


@contextmanager
def listening(node: str, **options: int) -> Iterator[Events]:
    """Events of a node of its own: what others do on this machine has no number there."""
    with opened(node) as descriptor, inside(descriptor, node):
        events = Events(**options)
    with closing(events):
        yield events


@pytest.fixture
def node() -> Iterator[str]:
    with space() as name:
        yield name


@pytest.fixture
def events(node: str) -> Iterator[Events]:
    with listening(node) as made:
        yield made


def numbered(events: Events, netns: str) -> int:
    with opened(netns) as descriptor:
        number = events.nsid(descriptor)
    assert number is not None
    return number


@pytest.fixture
def pod(events: Events) -> Iterator[str]:
    """A namespace that came after the sockets, and has its number."""
    with space() as name:
        numbered(events, name)
        yield name


def generation(netns: str) -> int:
    """Of the rules of that namespace, as the kernel says when asked."""
    with (
        opened(netns) as descriptor,
        inside(descriptor, netns),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink,
    ):
        ((_, found),) = ask(netlink, GETGEN, 0, bytes(4), "=BBH")
    return int.from_bytes(found[1], "big")


def waited(events: Events, true: Callable[[Event], bool]) -> list[Event]:
    """Everything that is told up to the first that is meant, woken by the descriptors alone."""
    found: list[Event] = []
    deadline = time.monotonic() + 10
    with closing(select.epoll()) as epoll:
        for number in events.filenos():
            epoll.register(number, select.EPOLLIN)
        while not any(map(true, found)):
            assert epoll.poll(max(0, deadline - time.monotonic())), f"only {found}"
            found += events.read()
    return found


def settled(events: Events) -> None:
    """Past what is still to come of what was done."""
    for _ in range(50):
        if not select.select(events.filenos(), [], [], 0.1)[0]:
            return
        events.read()
    raise AssertionError("it never ends")


# ------------------------------------------------------------------------------------- commits


def test_a_commit_is_told_with_its_namespace_generation_and_writer(
    events: Events, pod: str
) -> None:
    words = ("ip", "netns", "exec", pod, "nft", "add table ip x")
    child = subprocess.Popen(words, cwd=ROOT)  # `ip` becomes `nft`: one process
    assert child.wait(PATIENCE) == 0
    [moved] = events.read()
    assert isinstance(moved, Moved)
    assert (moved.nsid, moved.generation) == (numbered(events, pod), generation(pod))
    assert moved.process == "nft"
    assert moved.pid == child.pid if has_initial_pids() else moved.pid > 0


IN_A_CONTAINER = """
import sys
from agent.kernel.events import Moved
from agent.workqueue import Workqueue
from tests.netns.test_events import listening, numbered
from tests.spaces import applied, nft, vm

node, pod = sys.argv[1:]
queue = Workqueue()
with listening(node) as events:
    numbered(events, pod)
    work = queue.start(lambda: applied(pod, vm("desktop", "22"), backend="nftables"))
    assert work.wait(60)
    work.result()
    [ours] = {(one.process, one.pid) for one in events.read() if isinstance(one, Moved)}
    nft(pod, "add table ip x")
    [theirs] = {(one.process, one.pid) for one in events.read()}
    assert queue.threads.include(*ours), ours
    assert not queue.threads.include(*theirs), theirs
"""


@pytest.mark.parametrize(
    "apart", [(), ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")]
)
def test_a_commit_of_our_own_threads_is_known_also_in_a_container(
    node: str, apart: tuple[str, ...]
) -> None:
    with pod_with_links() as pod:
        run(*apart, sys.executable, "-c", IN_A_CONTAINER, node, pod)


def test_every_commit_is_told(events: Events, pod: str) -> None:
    before = generation(pod)
    for number in range(5):
        nft(pod, f"add table ip x{number}")
    told = [event.generation for event in events.read() if isinstance(event, Moved)]
    assert told == list(range(before + 1, before + 6))


def test_a_commit_that_fails_is_not_told(events: Events, pod: str) -> None:
    run("ip", "netns", "exec", pod, "nft", "delete table ip nothing", code=1)
    assert events.read() == []


def test_a_commit_wakes_whoever_polls(events: Events, pod: str) -> None:
    settled(events)
    with ExitStack() as stack:
        words = ("ip", "netns", "exec", pod, "nft", "add table ip x")
        child = stack.enter_context(subprocess.Popen(words, cwd=ROOT))
        stack.callback(child.wait, PATIENCE)
        [moved] = waited(events, lambda event: isinstance(event, Moved))
    assert isinstance(moved, Moved)


def test_a_namespace_without_a_number_is_not_heard(events: Events) -> None:
    with space() as name:
        nft(name, "add table ip x")
        assert events.read() == []
        number = numbered(events, name)
        nft(name, "add table ip y")
        assert [event.nsid for event in events.read() if isinstance(event, Moved)] == [number]


def test_namespaces_are_told_apart(events: Events, pod: str) -> None:
    with space() as other:
        numbers = [numbered(events, other), numbered(events, pod)]
        assert len(set(numbers)) == 2
        nft(other, "add table ip x")
        nft(pod, "add table ip x")
        assert [event.nsid for event in events.read() if isinstance(event, Moved)] == numbers


def test_our_own_namespace_has_no_number(node: str, events: Events) -> None:
    with opened(node) as descriptor:
        assert events.nsid(descriptor) is None
    nft(node, "add table ip x")
    [moved] = events.read()
    assert isinstance(moved, Moved)
    assert (moved.nsid, moved.generation) == (None, generation(node))
    ip(node, "link set lo up")
    assert events.read() == [Relinked(None)]


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
def test_our_own_namespace_has_no_number_even_if_somebody_gives_it_one(
    node: str, earlier: bool
) -> None:
    with ExitStack() as stack:
        if earlier:
            ip(node, f"netns set {node} 7")
        events = stack.enter_context(listening(node))
        if not earlier:
            ip(node, f"netns set {node} 7")
        nft(node, "add table ip x")
        ip(node, "link set lo up")
        [moved, relinked] = events.read()
        assert isinstance(moved, Moved)
        assert (moved.nsid, relinked) == (None, Relinked(None))
        with opened(node) as descriptor:
            assert events.nsid(descriptor) is None
        with space() as other:
            number = numbered(events, other)
            run("ip", "netns", "del", other)
            assert Gone(number) in waited(events, lambda event: isinstance(event, Gone))


def test_twenty_thousand_rules_are_one_event(events: Events, pod: str) -> None:
    rules = "".join(f"add rule ip x c tcp dport {port} accept\n" for port in range(1, 20_001))
    nft(pod, f"add table ip x\nadd chain ip x c\n{rules}")
    [moved] = events.read()
    assert isinstance(moved, Moved)
    assert moved.generation == generation(pod)


def test_what_only_pretends_to_be_the_kernel_is_not_heard(events: Events, pod: str) -> None:
    body = bytes(4) + attribute(1, bytes(4)) + attribute(2, bytes(4)) + attribute(3, b"forged\0")
    with opened(pod) as descriptor, inside(descriptor, pod):
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    with netlink:
        message = HEADER.pack(HEADER.size + len(body), NEWGEN, 0, 0, 0) + body
        netlink.sendto(message, (0, 1 << 6))
    assert select.select(events.filenos(), [], [], 0)[0], "it was sent, and reached our socket"
    assert events.read() == []


# ----------------------------------------------------------------------------------- too much


def test_what_was_too_much_is_told_as_lost_and_then_all_is_well(node: str) -> None:
    with listening(node, room=1) as events, space() as name:
        number = numbered(events, name)
        for table in range(12):
            nft(name, f"add table ip x{table}")
        told = events.read()
        assert told[0] == Lost()
        assert told.count(Lost()) == 1
        assert len(told) < 12
        nft(name, "add table ip y")
        [moved] = events.read()
        assert isinstance(moved, Moved)
        assert (moved.nsid, moved.generation) == (number, generation(name))


def test_too_much_of_links_is_told_as_lost(node: str) -> None:
    with listening(node, room=1) as events:
        ip(node, "link set lo up", *(f"addr add 127.1.0.{host} dev lo" for host in range(1, 50)))
        assert events.read() == [Lost(), Relinked(None)]
        ip(node, "addr add 127.2.0.1 dev lo")
        assert events.read() == [Relinked(None)]


def test_what_is_lost_after_it_was_told_is_told_again(node: str) -> None:
    """The kernel says it once, and goes on leaving out until we have read all that it kept."""
    with listening(node, room=1, most=2) as events:
        for table in range(12):
            nft(node, f"add table ip x{table}")
        assert Lost() in events.read()
        nft(node, "add table ip y")  # is left out, silently
        later = [events.read() for _ in range(12)]
        known = [event.generation for some in later for event in some if isinstance(event, Moved)]
        assert generation(node) not in known
        told = [some for some in later if some]
        assert told
        assert all(Lost() in some for some in told)
        nft(node, "add table ip z")
        [moved] = events.read()
        assert isinstance(moved, Moved)


def test_one_read_is_bounded_and_the_rest_is_kept(node: str) -> None:
    with listening(node, most=3) as events:
        before = generation(node)
        for table in range(5):
            nft(node, f"add table ip x{table}")
        told = [events.read(), events.read(), events.read()]
        assert [len(some) for some in told] == [3, 2, 0]
        generations = [e.generation for some in told for e in some if isinstance(e, Moved)]
        assert generations == list(range(before + 1, before + 6))


# --------------------------------------------------------------------------------------- links


def test_changes_of_links_addresses_and_default_routes_are_told(events: Events, pod: str) -> None:
    relinked = [Relinked(numbered(events, pod))]
    steps = (
        "link add eth0 type bridge\nlink set eth0 addrgenmode none",
        "link set eth0 name net0",
        "addr add 192.0.2.2/24 dev net0",
        "addr add 2001:db8::2/64 dev net0 nodad",
        "link set net0 up",
        "route add default via 192.0.2.1",
        "route add default via 2001:db8::1",
        "route del default",
        "route del default via 2001:db8::1",
        "addr del 192.0.2.2/24 dev net0",
        "link del net0",
    )
    for step in steps:
        events.read()
        ip(pod, step)
        assert events.read() == relinked, step


def test_other_routes_are_not_told(events: Events, pod: str) -> None:
    ip(pod, "link set lo up", "addr add 192.0.2.2/24 dev lo", "addr add 2001:db8::2/64 dev lo")
    settled(events)
    nets = [f"10.{net >> 8}.{net & 255}.0/24 dev lo" for net in range(5_000)]
    ip(pod, *(f"route add {net}" for net in nets), "route add 2001:db8:1::/64 dev lo")
    assert events.read() == []
    ip(pod, *(f"route del {net}" for net in nets), "route del 2001:db8:1::/64 dev lo")
    assert events.read() == []
    ip(pod, "route add default dev lo")
    assert events.read() == [Relinked(numbered(events, pod))]


def test_many_changes_are_told_once_for_each_namespace(node: str, events: Events, pod: str) -> None:
    for name in (pod, node):
        ip(name, "link set lo up", *(f"addr add 127.1.0.{host} dev lo" for host in range(1, 200)))
    assert events.read() == [Relinked(numbered(events, pod)), Relinked(None)]


# ------------------------------------------------------------------------------ coming and going


def test_a_number_stays(events: Events, pod: str) -> None:
    assert len({numbered(events, pod) for _ in range(3)}) == 1


def test_a_number_that_somebody_gave_is_taken_as_it_is(node: str, events: Events) -> None:
    with space() as name:
        ip(node, f"netns set {name} 4711")
        assert numbered(events, name) == 4711


def test_a_namespace_is_not_kept_alive_and_its_end_is_told(events: Events) -> None:
    with space() as name:
        number = numbered(events, name)
        nft(name, "add table ip x")  # and what is said of it stays unread
        ip(name, "link set lo up")
        run("ip", "netns", "del", name)
        assert Gone(number) in waited(events, lambda event: isinstance(event, Gone))


def test_a_namespace_that_is_still_in_use_is_not_gone(events: Events) -> None:
    with space() as name, process("sleep", "60", netns=name) as child:
        number = numbered(events, name)
        run("ip", "netns", "del", name)
        words = ("nsenter", f"--net=/proc/{child.pid}/ns/net", "nft", "add table ip x")
        run(*words)
        assert [type(event) for event in events.read()] == [Moved]
        child.kill()
        assert Gone(number) in waited(events, lambda event: isinstance(event, Gone))


def test_numbers_of_other_namespaces_are_none_of_ours(events: Events, pod: str) -> None:
    with space() as name:
        ip(pod, f"netns set {name} 4711")
        number = numbered(events, name)
        run("ip", "netns", "del", name)
        told = waited(events, lambda event: isinstance(event, Gone))
        ip(pod, "link set lo up")
        told += waited(events, lambda event: isinstance(event, Relinked))
        assert [event for event in told if isinstance(event, Gone)] == [Gone(number)]


def test_what_is_no_namespace_has_no_number(events: Events, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            events.nsid(descriptor)
    finally:
        os.close(descriptor)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closed_it_holds_nothing(node: str) -> None:
    before = descriptors()
    with listening(node):
        assert descriptors() > before
    assert descriptors() == before


# -------------------------------------------------------------------------- what cannot be read

MADE = """
from agent.errors import NotPermitted
from agent.kernel.events import Events
try:
    Events().close()
except NotPermitted as failure:
    print(failure)
"""


@pytest.mark.parametrize(
    ("dropped", "said"),
    [
        ("-net_broadcast", "CAP_NET_BROADCAST"),
        ("-net_admin", "CAP_NET_ADMIN"),
        ("-sys_time", ""),
    ],
)
def test_a_missing_capability_is_named(node: str, dropped: str, said: str) -> None:
    words = ("setpriv", "--bounding-set", dropped, sys.executable, "-c", MADE)
    stdout = run("nsenter", f"--net=/run/netns/{node}", *words).stdout
    assert (said in stdout) if said else (stdout == "")


@pytest.mark.parametrize(
    ("numbers", "nsid"), [([], None), ([0], 0), ([5], 5), ([2**31 - 1], 2**31 - 1), ([-1], None)]
)
def test_a_message_without_a_number_is_of_our_own_namespace(
    numbers: list[int], nsid: int | None
) -> None:
    other = (socket.SOL_SOCKET, LISTEN_ALL_NSID, struct.pack("=i", 9))
    told = [(SOL_NETLINK, LISTEN_ALL_NSID, struct.pack("=i", number)) for number in numbers]
    assert origin([other, *told]) == nsid


BODY = bytes(4) + attribute(1, b"\0\0\0\x07") + attribute(2, b"\0\0\1\0") + attribute(3, b"nft\0")


def test_a_generation_is_read_as_the_kernel_writes_it() -> None:
    assert moving(3, BODY) == Moved(3, 7, 256, "nft")
    assert going(bytes(4) + attribute(1, (5).to_bytes(4, sys.byteorder))) == Gone(5)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [(b"a\x1b[2J\n\0", "a�[2J�"), (b"\xff\xfe\0", "��"), (b"x" * 200, f"{'x' * 63}…"), (b"", "")],
)
def test_a_process_may_be_called_anything(raw: bytes, shown: str) -> None:
    moved = moving(None, BODY[:20] + attribute(3, raw))
    assert moved is not None
    assert moved.process == shown


def test_what_is_cut_short_or_garbled_is_passed_over() -> None:
    whole = HEADER.pack(HEADER.size + len(BODY), NEWGEN, 0, 0, 0) + BODY
    for size in range(len(whole)):
        for kind, body in messages(memoryview(whole[:size])):
            assert (kind, moving(None, body), going(body)) == (NEWGEN, None, going(body))
    for place in range(len(whole)):
        for byte in (0x00, 0x01, 0x03, 0x7F, 0xFF):
            garbled = memoryview(whole[:place] + bytes([byte]) + whole[place + 1 :])
            for _, body in messages(garbled):
                moving(None, body)
                going(body)
    assert [kind for kind, _ in messages(memoryview(whole * 3))] == [NEWGEN] * 3


# ------------------------------------------------------------------------------------- arrivals


@pytest.fixture
def arrivals() -> Iterator[Arrivals]:
    with closing(Arrivals()) as made:
        yield made


@pytest.fixture
def epoll(arrivals: Arrivals) -> Iterator[select.epoll]:
    with closing(select.epoll()) as made:
        for number, mask in arrivals.filenos():
            made.register(number, mask)
        yield made


def calmed(arrivals: Arrivals, epoll: select.epoll) -> None:
    """Until nothing is told any more; others make namespaces on this machine, too."""
    assert eventually(lambda: not (epoll.poll(0.02), arrivals.stirred())[1])


def is_complete(name: str) -> bool:
    return Path("/run/netns", name).stat().st_dev == Path("/proc/self/ns/net").stat().st_dev


def test_a_namespace_that_is_complete_has_been_told(
    arrivals: Arrivals, epoll: select.epoll
) -> None:
    """The file comes first, and inotify tells of it; the namespace comes later, on top of it."""
    name = unused_name()
    file = Path("/run/netns", name)
    with space():  # which makes sure of the directory
        try:
            file.touch()
            calmed(arrivals, epoll)
            run("unshare", f"--net={file}", "true")
            assert is_complete(name)
            assert epoll.poll(0.05)
            assert arrivals.stirred()
        finally:
            run("ip", "netns", "del", name)


def test_adding_and_deleting_a_namespace_is_told(arrivals: Arrivals, epoll: select.epoll) -> None:
    calmed(arrivals, epoll)
    with space() as name:
        assert is_complete(name)
        assert epoll.poll(0.05)
        assert arrivals.stirred()
        calmed(arrivals, epoll)
        run("ip", "netns", "del", name)
        assert epoll.poll(0.05)
        assert arrivals.stirred()


def test_whoever_looks_when_told_ends_with_the_namespace_complete(
    arrivals: Arrivals, epoll: select.epoll
) -> None:
    """As the daemon does it: told, drain, then look; and no look without having been told."""
    name = unused_name()
    child = subprocess.Popen(["ip", "netns", "add", name])
    try:
        deadline = time.monotonic() + 10
        seen = False
        while not seen and time.monotonic() < deadline and epoll.poll(10):
            seen = arrivals.stirred() and Path("/run/netns", name).exists() and is_complete(name)
        assert seen
    finally:
        assert child.wait(PATIENCE) == 0
        run("ip", "netns", "del", name)


def told(arrivals: Arrivals, act: Callable[[], object]) -> bool:
    """Whether doing that is told; most of what is told at other times is not about it."""
    with closing(select.epoll()) as epoll:
        for number, mask in arrivals.filenos():
            epoll.register(number, mask)
        calmed(arrivals, epoll)
        act()
        return bool(epoll.poll(0.05)) and arrivals.stirred()


def ever_untold(arrivals: Arrivals, folder: Path) -> bool:
    """Whether of some new files in that directory one was not told; others, who make namespaces on
    this machine, cannot interfere every time."""
    files = (folder / f"new{number}" for number in range(100))
    return any(not told(arrivals, file.touch) for file in files)


def test_what_happens_in_a_followed_directory_is_told(arrivals: Arrivals, tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    arrivals.follow([str(folder)])
    assert told(arrivals, (folder / "a").touch)
    assert told(arrivals, lambda: (folder / "a").rename(outside))
    assert told(arrivals, lambda: outside.rename(folder / "b"))
    assert told(arrivals, (folder / "b").unlink)


def test_a_followed_directory_may_come_later(arrivals: Arrivals, tmp_path: Path) -> None:
    deep = tmp_path / "one" / "two" / "three"
    arrivals.follow([str(deep)])
    assert told(arrivals, lambda: deep.mkdir(parents=True))
    assert told(arrivals, (deep / "a").touch)


def test_a_followed_directory_may_come_by_a_rename(arrivals: Arrivals, tmp_path: Path) -> None:
    deep = tmp_path / "one" / "two"
    arrivals.follow([str(deep)])
    (tmp_path / "new" / "two").mkdir(parents=True)
    assert told(arrivals, lambda: (tmp_path / "new").rename(tmp_path / "one"))
    assert told(arrivals, (deep / "a").touch)


def test_a_followed_directory_may_come_step_by_step(arrivals: Arrivals, tmp_path: Path) -> None:
    deep = tmp_path / "one" / "two"
    arrivals.follow([str(deep)])
    assert told(arrivals, (tmp_path / "one").mkdir)
    assert told(arrivals, deep.mkdir)
    assert told(arrivals, (deep / "a").touch)


@pytest.mark.parametrize("step", ["one", "one/two"])
def test_a_followed_directory_may_be_replaced(
    arrivals: Arrivals, tmp_path: Path, step: str
) -> None:
    deep = tmp_path / "one" / "two"
    deep.mkdir(parents=True)
    (tmp_path / "new" / "two").mkdir(parents=True)
    arrivals.follow([str(deep)])
    new = tmp_path / "new" / Path(step).relative_to("one")
    old = (tmp_path / step).rename

    def replace() -> None:
        old(tmp_path / "old")
        new.rename(tmp_path / step)

    assert told(arrivals, replace)
    assert told(arrivals, (deep / "a").touch)


def test_a_followed_directory_may_go_and_come_again(arrivals: Arrivals, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    arrivals.follow([str(folder)])
    for _ in range(3):
        assert told(arrivals, folder.mkdir)
        assert told(arrivals, (folder / "a").touch)
        assert told(arrivals, (folder / "a").unlink)
        assert told(arrivals, folder.rmdir)


def test_a_followed_link_may_come_to_lead_elsewhere(arrivals: Arrivals, tmp_path: Path) -> None:
    link, there, later = tmp_path / "link", tmp_path / "there", tmp_path / "later"
    there.mkdir()
    link.symlink_to(there)
    arrivals.follow([str(link)])
    assert told(arrivals, (there / "a").touch)

    def relink() -> None:
        link.unlink()
        link.symlink_to(later)

    assert told(arrivals, relink)
    assert told(arrivals, later.mkdir)
    assert told(arrivals, (later / "a").touch)


def test_what_happens_beside_the_way_is_not_told(arrivals: Arrivals, tmp_path: Path) -> None:
    deep = tmp_path / "one" / "two"
    deep.parent.mkdir()
    arrivals.follow([str(deep)])
    assert ever_untold(arrivals, tmp_path)


def test_what_is_followed_no_longer_is_not_told(arrivals: Arrivals, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    arrivals.follow([str(one), str(two)])
    assert told(arrivals, (one / "a").touch)
    arrivals.follow([str(two)])
    assert told(arrivals, (two / "a").touch)
    assert ever_untold(arrivals, one)


def test_where_nothing_happens_nothing_is_told(arrivals: Arrivals, tmp_path: Path) -> None:
    """Ending a watch is told by inotify, too, but is no news."""
    for number in range(10):
        (tmp_path / str(number)).mkdir()

    def follow_another() -> None:
        arrivals.follow([str(tmp_path / str(next(numbers)))])

    numbers = iter(range(10))
    follow_another()
    assert any(not told(arrivals, follow_another) for _ in range(9))


def watches(arrivals: Arrivals) -> int:
    (number, _), _ = arrivals.filenos()
    return Path(f"/proc/self/fdinfo/{number}").read_text().count("inotify wd:")


def test_what_is_followed_no_longer_is_not_watched(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.follow([str(tmp_path)])
    before = watches(arrivals)
    folders = [tmp_path / str(number) for number in range(10)]
    for folder in folders:
        folder.mkdir()
    arrivals.follow(map(str, [tmp_path, *folders]))
    assert watches(arrivals) == before + 10
    arrivals.follow([str(tmp_path)])
    assert watches(arrivals) == before


@pytest.mark.parametrize(
    "path", ["no\0path", "\ud800", "/proc/self/mountinfo/x", "/" + "x" * 5_000]
)
def test_what_can_be_no_directory_is_no_error(
    arrivals: Arrivals, tmp_path: Path, path: str
) -> None:
    arrivals.follow([path, str(tmp_path)])
    assert told(arrivals, (tmp_path / "a").touch)


def test_more_than_the_kernel_remembers_is_told(arrivals: Arrivals, tmp_path: Path) -> None:
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    deep = tmp_path / "one" / "two"
    arrivals.follow([str(deep)])
    names = [tmp_path / "a", tmp_path / "b"]

    def flood() -> None:
        for _ in range(room // 4 + 1):
            for name in names:
                name.touch()
                name.unlink()
        deep.mkdir(parents=True)

    assert told(arrivals, flood)
    assert told(arrivals, (deep / "a").touch)


def test_a_mount_that_hides_a_followed_directory_is_seen_through(
    arrivals: Arrivals, tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    arrivals.follow([str(folder)])
    try:
        assert told(arrivals, lambda: run("mount", "-t", "tmpfs", "none", folder))
        assert told(arrivals, (folder / "a").touch)
    finally:
        run("umount", folder)
    assert told(arrivals, (folder / "a").touch)


def test_closed_it_watches_nothing() -> None:
    before = descriptors()
    arrivals = Arrivals()
    assert descriptors() == before + 3
    arrivals.close()
    assert descriptors() == before
