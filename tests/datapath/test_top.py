"""`portranger top` over real flows, and on a real terminal: what it shows, how it is left, and that
the terminal is then as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.commands.screen import ENTER, LEAVE, taken
from agent.kernel.lab import POD, Lab
from agent.kernel.probe import asks, connected, echoing
from rules.model import Family, Protocol
from tests.spaces import BACKENDS, ROOT, applied, eventually, lab, portranger, vm, within

PATIENCE = 30.0  # seconds; nothing here takes three
COMMAND = (sys.executable, "-m", "agent.entry", "top", "--interval", "0.2")
RANGES = "1000-1999,2222/tcp,5000-5999/udp"
SERVERS = [(Protocol.TCP, 1500), (Protocol.TCP, 2222), (Protocol.UDP, 5500)]
ACCOUNTING = "net.netfilter.nf_conntrack_acct"


@pytest.fixture(scope="module")
def place() -> Iterator[Lab]:
    with lab() as made, echoing(made, made.guest, SERVERS):
        applied(made.pod, vm("desktop", RANGES), backend="nftables")
        yield made


def row(text: str, what: str) -> list[str]:
    """The numbers of a range in the last table."""
    found = [line for line in text.splitlines() if f"  {what}  " in line]
    return found[-1].split()


# ---------------------------------------------------------------------------------------- packets


@pytest.mark.parametrize("backend", BACKENDS)
def test_open_connections_are_counted_for_their_range(backend: str) -> None:
    with lab() as made, echoing(made, made.guest, SERVERS), contextlib.ExitStack() as stack:
        applied(made.pod, vm("desktop", RANGES), backend=backend)
        for address in (POD[0].ip, POD[0].ip, POD[1].ip):
            flow = connected(made, made.client, address, Protocol.TCP, 1500)
            assert asks(stack.enter_context(flow)) == 1500
        for protocol, port in ((Protocol.TCP, 2222), (Protocol.UDP, 5500)):
            flow = connected(made, made.client, POD[0].ip, protocol, port)
            assert asks(stack.enter_context(flow)) == port
        with connected(made, made.client, POD[0].ip, Protocol.TCP, 1500) as ended:
            assert asks(ended) == 1500
        silent = stack.enter_context(made.socket(made.client, Family.IP, socket.SOCK_DGRAM))
        silent.sendto(b"nobody is there", (str(POD[0].ip), 5999))

        done = portranger("top", "--netns", made.pod, "-n", "1", "--backend", backend)
        assert (done.returncode, done.stderr) == (0, "")
        assert row(done.stdout, "tcp 1000-1999")[:2] == ["3", "0"]
        assert row(done.stdout, "tcp 2222")[:2] == ["1", "0"]
        assert row(done.stdout, "udp 5000-5999")[:2] == ["2", "1"]
        assert row(done.stdout, "tcp 1000-1999")[3:5] == ["-", "-"]
        assert f"ip netns exec {made.pod} sysctl -w {ACCOUNTING}=1" in done.stdout
        assert within(made.pod, "sysctl", "-n", ACCOUNTING).strip() == "0"


def test_packets_and_bytes_are_those_of_the_time_between_two_looks(place: Lab) -> None:
    within(place.pod, "sysctl", "-qw", f"{ACCOUNTING}=1")
    try:
        with (
            connected(place, place.client, POD[0].ip, Protocol.UDP, 5500) as flow,
            subprocess.Popen(
                [*COMMAND, "--netns", place.pod, "--interval", "2", "-n", "1"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            ) as child,
        ):
            deadline = time.monotonic() + PATIENCE
            sent = 0
            while child.poll() is None and time.monotonic() < deadline:
                assert asks(flow, b"x" * 972) == 5500  # 1,000 bytes with its headers
                sent += 1
                time.sleep(0.01)
            text = child.communicate(timeout=PATIENCE)[0]
        _, _, _, packets, octets, *_ = row(text, "udp 5000-5999")
        # Of all that was sent, some came before the first look or after the last.
        assert 0 < number(packets) <= 2 * sent / 2
        assert 900 < number(octets) / number(packets) < 1100
    finally:
        within(place.pod, "sysctl", "-qw", f"{ACCOUNTING}=0")


def number(text: str) -> float:
    units = {"k": 1e3, "M": 1e6}
    return float(text.rstrip("kM")) * units.get(text[-1], 1.0)


def test_new_flows_are_counted_between_two_tables(place: Lab) -> None:
    words = [*COMMAND, "--netns", place.pod, "-n", "100"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        tables = (line.split() for line in child.stdout if "  tcp 2222  " in line)
        assert next(tables)[2] == "0"
        with connected(place, place.client, POD[0].ip, Protocol.TCP, 2222) as flow:
            assert asks(flow) == 2222
            changed = next(line for line in tables if line[2] != "0")
            still = next(tables)
        child.terminate()
        child.communicate(timeout=PATIENCE)  # or it would meet a pipe that nobody reads
    assert changed[0] == still[0] == "1"
    assert 0 < number(changed[2]) <= 5  # one in the fifth of a second, or a little longer
    assert still[2] == "0"
    assert child.returncode == 0


def test_a_reader_who_leaves_early_gets_no_traceback(place: Lab) -> None:
    words = " ".join([*COMMAND, "--netns", place.pod, "-n", "100"])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "sorted by open" in done.stdout
    assert done.stderr == ""


# --------------------------------------------------------------------------------- the terminal


class Terminal:
    """A terminal with a process on it, whose controlling terminal it is."""

    def __init__(self, *words: str, term: str = "xterm") -> None:
        self.mine, self.theirs = pty.openpty()
        self.resize(100, 24)
        self.modes = termios.tcgetattr(self.theirs)
        self.shown = b""
        self.child = subprocess.Popen(
            ["setsid", "--ctty", *words],
            cwd=ROOT,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**os.environ, "TERM": term, "COLUMNS": "", "LINES": ""},
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.mine, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.mine, keys)

    def shows(self, true: Callable[[bytes], object], seconds: float = PATIENCE) -> bool:
        """Whether what it shows becomes so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not true(self.shown):
            if select.select([self.mine], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self.mine, 1 << 16)
                except OSError:  # all have left
                    break
        return bool(true(self.shown))

    def ended(self) -> int:
        """Its exit code, and all that was shown until then."""
        assert self.shows(lambda _: self.child.poll() is not None), self.shown[-500:]
        self.shows(lambda shown: shown.endswith(LEAVE), 1.0)
        return self.child.returncode

    def close(self) -> None:
        self.child.kill()
        self.child.wait(PATIENCE)
        for descriptor in (self.mine, self.theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def terminal(place: Lab) -> Iterator[Terminal]:
    """On which top runs, and has drawn its first screen."""
    made = Terminal(*COMMAND, "--netns", place.pod)
    try:
        assert made.shows(lambda shown: b"sorted by" in shown and b"udp 5000" in shown), made.shown
        yield made
    finally:
        made.close()


def is_given_back(terminal: Terminal) -> bool:
    return (
        termios.tcgetattr(terminal.theirs) == terminal.modes
        and terminal.shown.count(ENTER) == terminal.shown.count(LEAVE)
        and terminal.shown.endswith(LEAVE)
    )


def test_a_terminal_is_taken_over_drawn_on_and_given_back(terminal: Terminal) -> None:
    assert terminal.shown.startswith(ENTER)
    modes = termios.tcgetattr(terminal.theirs)
    assert not modes[3] & termios.ECHO
    assert b"q quits" in terminal.shown
    before = terminal.shown.count(b"sorted by")
    assert terminal.shows(lambda shown: shown.count(b"sorted by") > before + 1)  # it goes on
    terminal.type(b"q")
    assert terminal.ended() == 0
    assert is_given_back(terminal)


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda one: one.type(b"\x03"), id="Ctrl-C"),
        pytest.param(lambda one: one.type(b"\x04"), id="Ctrl-D"),
        pytest.param(lambda one: one.child.terminate(), id="SIGTERM"),
        pytest.param(lambda one: one.child.send_signal(signal.SIGHUP), id="SIGHUP"),
    ],
)
def test_whoever_leaves_in_another_way_gets_the_terminal_back_too(
    terminal: Terminal, leave: Callable[[Terminal], None]
) -> None:
    leave(terminal)
    assert terminal.ended() == 0
    assert is_given_back(terminal)


def test_a_terminal_that_takes_nothing_more_does_not_keep_it(terminal: Terminal) -> None:
    for _ in range(200):  # each is a screen to be drawn
        terminal.type(b"o")
        time.sleep(0.005)
    terminal.child.terminate()
    assert terminal.child.wait(PATIENCE) == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.modes


def test_a_terminal_that_is_closed_ends_it(terminal: Terminal) -> None:
    os.close(terminal.mine)
    assert terminal.child.wait(PATIENCE) in (0, -signal.SIGHUP)


def test_a_resized_terminal_is_drawn_anew_in_its_size(terminal: Terminal) -> None:
    def whole(shown: bytes) -> list[bytes]:
        """The lines of the last screen that was drawn to its end."""
        frames = shown.split(b"\x1b[H")
        return re.sub(rb"\x1b\[[?0-9]*[A-Za-z]", b"", frames[-2]).split(b"\r\n")

    assert terminal.shows(lambda shown: len(whole(shown)) == 24)
    terminal.resize(60, 7)
    assert terminal.shows(lambda shown: len(whole(shown)) == 7)
    assert max(map(len, whole(terminal.shown))) == 60
    assert any(line.endswith(b">") for line in whole(terminal.shown))


def test_a_key_changes_what_comes_first(terminal: Terminal) -> None:
    assert b"sorted by open" in terminal.shown
    terminal.type(b"b")
    assert terminal.shows(lambda shown: b"sorted by bytes" in shown)
    terminal.type(b"xr")
    assert terminal.shows(lambda shown: b"sorted by range" in shown)


def test_who_stops_it_has_the_terminal_until_it_goes_on(terminal: Terminal) -> None:
    terminal.type(b"\x1a")  # Ctrl-Z
    assert terminal.shows(lambda shown: shown.endswith(LEAVE))
    assert termios.tcgetattr(terminal.theirs) == terminal.modes
    stat = Path(f"/proc/{terminal.child.pid}/stat")
    assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    terminal.child.send_signal(signal.SIGCONT)
    assert terminal.shows(lambda shown: b"sorted by" in shown.rpartition(LEAVE)[2])
    terminal.type(b"q")
    assert terminal.ended() == 0
    assert is_given_back(terminal)


KEYLESS = ("sh", "-c", 'exec "$@" < /dev/null', "sh")


@pytest.mark.parametrize(
    ("before", "term", "more"),
    [((), "dumb", ()), ((), "xterm", ("-n", "1")), (KEYLESS, "xterm", ())],
    ids=["a dumb one", "a count", "no keys"],
)
def test_a_terminal_is_left_alone_where_a_table_is_enough(
    place: Lab, before: tuple[str, ...], term: str, more: tuple[str, ...]
) -> None:
    plain = Terminal(*before, *COMMAND, "--netns", place.pod, *more, term=term)
    try:
        assert plain.ended() == 0
        assert b"sorted by open" in plain.shown
        assert b"\x1b" not in plain.shown
    finally:
        plain.close()


def test_a_failure_in_the_middle_gives_the_terminal_back() -> None:
    def fail() -> None:
        with taken(theirs, theirs):
            assert termios.tcgetattr(theirs) != before
            raise ZeroDivisionError

    mine, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with pytest.raises(ZeroDivisionError):
            fail()
        assert termios.tcgetattr(theirs) == before
        shown = b""
        while len(shown) < len(ENTER + LEAVE) and select.select([mine], [], [], PATIENCE)[0]:
            shown += os.read(mine, 1000)
        assert shown == ENTER + LEAVE
    finally:
        os.close(mine)
        os.close(theirs)
