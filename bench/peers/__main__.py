"""`make bench-peers`: one table of portranger beside its neighbours, also written into docs/bench.

`make bench-peers ARGS=nft` takes the peers whose names begin so, and writes nothing.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers import containers, firewalld, ours, tables
from bench.peers.harness import rows
from bench.peers.report import Row, as_json, lines

DOCS = Path(__file__).parents[2] / "docs" / "bench"
PEERS = (*ours.PEERS, *tables.PEERS, *firewalld.PEERS, *containers.PEERS)
PACKAGES = (
    "nftables",
    "iptables",
    "firewalld",
    "netavark",
    "containernetworking-plugins",
    "podman",
    "passt",
)


def main(words: Sequence[str]) -> None:
    """Measure what is asked for, or all."""
    if os.geteuid():
        sys.exit("bench: run it as root: it makes network namespaces")
    own = os.getpid()
    signal.signal(signal.SIGTERM, lambda number, _: _end(own, 128 + number))
    chosen = [peer for peer in PEERS if not words or peer.name.startswith(tuple(words))]
    if not chosen:
        sys.exit(f"bench: there are: {'; '.join(peer.name for peer in PEERS)}")
    found = rows(chosen, _say)
    machine = _machine()
    text = "\n".join(lines(found, machine))
    print(text)
    if not words:
        _write(text, found, machine)


def _end(own: int, code: int) -> None:
    """Take down what was built, where it was built: pyroute2 ends processes that it forked off us
    by a signal."""
    if os.getpid() == own:
        sys.exit(code)
    os._exit(code)


def _say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


def _write(text: str, found: Sequence[Row], machine: Sequence[str]) -> None:
    DOCS.mkdir(exist_ok=True)
    (DOCS / "peers.md").write_text(
        "# The same job by portranger and by its neighbours\n\n"
        f"Written by `make bench-peers`; run it to have your own.\n\n{text}\n"
    )
    (DOCS / "peers.json").write_text(json.dumps(as_json(found, machine), indent=1) + "\n")


def _machine() -> tuple[str, ...]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    kernel = ".".join(platform.release().split(".")[:2])
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    today = time.strftime("%Y-%m-%d")
    return (
        (
            f"{today}, {os.cpu_count()} cores of {processor}, Linux {kernel}, {system}, "
            f"Python {platform.python_version()}; {', '.join(_versions())}."
        ),
    )


def _versions() -> list[str]:
    try:
        done = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ["no Debian packages"]
    words = [line.split() for line in done.stdout.splitlines()]
    return [" ".join(one) for one in words if len(one) == 2]


if __name__ == "__main__":
    main(sys.argv[1:])
