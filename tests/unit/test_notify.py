"""What systemd hears from the daemon, on a real socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(10)
        # The kernel chooses an abstract name that nobody has if it is given none.
        listening.bind(str(tmp_path / "notify") if request.param == "path" else "")
        yield listening


def notifier(manager: socket.socket) -> Notifier:
    name = manager.getsockname()
    address = name if isinstance(name, str) else "@" + os.fsdecode(name[1:])
    return Notifier.from_environment({"NOTIFY_SOCKET": address})


def heard(manager: socket.socket) -> list[str]:
    return manager.recv(65536).decode().split("\n")


def test_every_message_is_one_datagram(manager: socket.socket) -> None:
    systemd = notifier(manager)
    assert systemd.ready("3 machines")
    assert heard(manager) == ["READY=1", "STATUS=3 machines"]
    assert systemd.status("größer")
    assert heard(manager) == ["STATUS=größer"]
    assert systemd.watchdog()
    assert heard(manager) == ["WATCHDOG=1"]
    assert systemd.extend(1.5)
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=1500000"]
    assert systemd.stopping()
    assert heard(manager) == ["STOPPING=1"]


def test_reloading_tells_the_time_of_the_monotonic_clock(manager: socket.socket) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notifier(manager).reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    reloading, clock = heard(manager)
    assert reloading == "RELOADING=1"
    assert before <= int(clock.removeprefix("MONOTONIC_USEC=")) <= after


def test_a_status_cannot_be_another_message(manager: socket.socket) -> None:
    assert notifier(manager).status("a\nSTOPPING=1\udcff" + "x" * 100_000)
    (line,) = heard(manager)
    assert line.startswith("STATUS=a")
    assert len(line) < 1000


def test_a_manager_that_does_not_listen_makes_nobody_wait(manager: socket.socket) -> None:
    systemd = notifier(manager)
    most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 2
    sent: list[bool] = []

    def speak() -> None:
        sent.extend(systemd.watchdog() for _ in range(most))

    speaking = threading.Thread(target=speak, daemon=True)
    speaking.start()
    speaking.join(10)
    assert not speaking.is_alive()
    assert sent[0]
    assert not sent[-1]
    heard(manager)
    assert systemd.watchdog()


def test_without_a_manager_nothing_is_sent() -> None:
    nobody = Notifier.from_environment({})
    assert nobody == Notifier()
    assert not nobody.ready("up")
    assert not nobody.watchdog()


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "@" + "x" * 200, "/a\0b"])
def test_an_address_where_nobody_is_raises_nothing(address: str) -> None:
    systemd = Notifier.from_environment({"NOTIFY_SOCKET": address})
    assert not systemd.ready("up")
    assert not systemd.reloading()
    assert not systemd.stopping()


@pytest.mark.parametrize(
    ("usec", "seconds"),
    [
        ("30000000", 30.0),
        ("500000", 0.5),
        ("0", None),
        ("", None),
        ("-1", None),
        ("soon", None),
        (str(2**64 - 1), None),
        ("9" * 5000, None),
    ],
)
def test_the_watchdog_waits_as_long_as_systemd_says(usec: str, seconds: float | None) -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": usec}).watchdog_seconds == seconds


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    for pid, seconds in ((os.getpid(), 5.0), (os.getppid(), None)):
        environ = {"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(pid)}
        assert Notifier.from_environment(environ).watchdog_seconds == seconds
