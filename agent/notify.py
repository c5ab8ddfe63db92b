"""What the daemon tells systemd about itself: sd_notify(3), which is one datagram a message."""

import os
import socket
import time
from collections.abc import Mapping

from rules.problems import printable
from rules.values import Value

LONGEST_STATUS = 400
FOR_EVER = 2**64 - 1  # systemd's USEC_INFINITY


class Notifier(Value):
    """Sends to the service manager, if there is one; what cannot be sent is left, never raised.

    Every method tells whether the message went out, so that a READY=1 that met a full socket can
    be sent again. The environment stays as it is: a child that inherits NOTIFY_SOCKET could speak
    in our name, so the unit says NotifyAccess=main (the default of Type=notify), under which
    systemd drops what anybody but the main process sends. WATCHDOG_USEC does not confuse children
    that look at WATCHDOG_PID, as we do. Give a child that speaks sd_notify itself an environment
    without the three.
    """

    address: str = ""  # a path, or a name in the abstract namespace after an @; empty: nobody
    watchdog_seconds: float | None = None  # the longest silence that systemd takes for life

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Notifier":
        """As systemd set us up; without its variables, one that does nothing."""
        return cls(environ.get("NOTIFY_SOCKET", ""), _watchdog_seconds(environ))

    def ready(self, status: str) -> bool:
        """We are up, or done with reloading."""
        return self._send("READY=1", _status(status))

    def reloading(self) -> bool:
        """We read our configuration anew; ready() ends it."""
        # Type=notify-reload tells a new reload from an old one by this clock, and by no other.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self) -> bool:
        """We are going down."""
        return self._send("STOPPING=1")

    def status(self, text: str) -> bool:
        """A line for people who ask systemctl status."""
        return self._send(_status(text))

    def watchdog(self) -> bool:
        """We are alive."""
        return self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> bool:
        """Starting, reloading or stopping takes this much longer from now on."""
        return self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    def _send(self, *lines: str) -> bool:
        if not self.address.startswith(("/", "@")):
            return False
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(), address)
        except (OSError, ValueError):
            return False
        return True


def _status(text: str) -> str:
    """On one line: a second one would be a message of its own."""
    return f"STATUS={printable(text, LONGEST_STATUS)}"


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # it is for the process that started us
    text = environ.get("WATCHDOG_USEC", "")
    given = (
        int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(FOR_EVER)) else 0
    )
    return given / 1_000_000 if 0 < given < FOR_EVER else None
