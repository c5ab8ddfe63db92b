"""`make test-trixie`: the demo and the tests of three folders on Debian 13.

    python -m tests.trixie [PATH ...]

They run in a Debian that debootstrap made, with the kernel of this machine, mounts and a network of
their own, and a copy of this clone. The Debian and its Python environment stay in the user's cache.
A test may be skipped for the reasons in EXPECTED only; the exit code is 1 for any other, and if a
test failed. The last line has the counts.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

import pytest

from tests.spaces import ROOT, run
from tests.systemd.trees import SOURCE, Stage, cached, debootstrap, runtime_packages, stage

SUITE = "trixie"
FOLDERS = ("tests/unit", "tests/cli", "tests/netns")
PACKAGES = ("make", "nftables", "iptables", "conntrack", "procps", "openssl")
EXPECTED = ("no iptables backend: ",)  # python-iptables 1.2 cannot write with iptables 1.8.11
PATIENCE = 1500  # seconds for all tests; on two idle cores they take a tenth
JOBS = 2
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
# The first process takes all others with it. Of this machine only devices are seen, and no more
# than every container has.
ENTER = """\
set -eu
root=$SCRATCH/root
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
if [ -e /dev/net/tun ]; then
    mkdir "$root/dev/net"
    touch "$root/dev/net/tun"
    mount --bind /dev/net/tun "$root/dev/net/tun"
fi
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root$1"
mount --bind "$2" "$root$1"
ip link set lo up
shift 2
exec chroot "$root" "$@"
"""
SPACES = ("--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL")
SCRIPT = """\
set -eu
cd "$0"
echo "$(nft --version), $(iptables --version), $(.venv/bin/python -V)"
make --silent demo >/tmp/demo 2>&1 || { cat /tmp/demo; echo "make demo failed"; exit 1; }
tail -n 1 /tmp/demo
exec .venv/bin/python -m pytest -q -ra --tb=short -p no:cacheprovider "$@"
"""


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("test-trixie: stopped by a signal"))
    # What a shell starts in the background ignores it, and so would everything started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() != 0:
        sys.exit("test-trixie: run it as root: it mounts file systems")
    began = time.monotonic()
    try:
        base, environment = tree(), venv()
    except pytest.skip.Exception as problem:
        sys.exit(f"test-trixie: {problem}")
    prepared = time.monotonic()
    with stage(base) as made:
        run("cp", "-a", environment, made.source / ".venv")
        code, output = tested(made, [f"-n{JOBS}", "--dist=loadfile", *(words or FOLDERS)])
    skips = skipped(output)
    for reason, count in skips.items():
        say(f"test-trixie: {count} skipped: {reason}")
    unexpected = [reason for reason in skips if not reason.startswith(EXPECTED)]
    for reason in unexpected:
        say(f"test-trixie: no test may be skipped for this reason: {reason}")
    size = sum(int(run("du", "-sm", path).stdout.split()[0]) for path in (base, environment))
    say(
        f"test-trixie: {summary(output)}; {prepared - began:.0f} s for the tree of {size} MB,"
        f" {time.monotonic() - prepared:.0f} s for the rest"
    )
    return 1 if code or unexpected else 0


def tree() -> Path:
    """A Debian with what portranger and these tests need, made if there is none."""
    packages = sorted({*PACKAGES, *runtime_packages()})
    return cached(f"tests-{SUITE}", packages, lambda path: debootstrap(SUITE, packages, path))


def venv() -> Path:
    """Its .venv for a clone at SOURCE, made if there is none."""
    base = tree()
    made_by = (ROOT / "Makefile", ROOT / "pyproject.toml", *sorted(ROOT.glob("requirements/*.txt")))
    made_of = [base.name, *(path.read_text() for path in made_by)]
    return cached(f"venv-{SUITE}", made_of, lambda path: install(base, path))


def install(base: Path, path: Path) -> None:
    with stage(base) as made:
        made.says("make --silent venv-dev")
        run("cp", "-a", made.source / ".venv", path)


def tested(made: Stage, words: Sequence[str]) -> tuple[int, str]:
    """Run the demo and the tests; the exit code, and what was printed."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    inside = ["env", "-i", *variables, "sh", "-c", SCRIPT, SOURCE, *words]
    entering = ["unshare", *SPACES, "sh", "-c", ENTER, "sh", SOURCE, str(made.source), *inside]
    output = []
    with subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", *made.command(f"exec {shlex.join(entering)}")],
        env=made.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        limit = Timer(PATIENCE, child.kill)
        limit.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                say(line.rstrip("\n"))
                output.append(line)
            child.wait()
        finally:
            limit.cancel()
            child.kill()
    return child.returncode, "".join(output)


def skipped(output: str) -> Counter[str]:
    """How many tests were skipped, by reason."""
    found: Counter[str] = Counter()
    for count, reason in re.findall(r"(?m)^SKIPPED \[(\d+)\] \S+: (.+)$", output):
        found[reason] += int(count)
    return found


def summary(output: str) -> str:
    """The last line of pytest: 5975 passed, 204 skipped."""
    said = re.findall(r"(?m)^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output)
    return str(said[-1]) if said else "no result"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it speaks to a person at a terminal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
