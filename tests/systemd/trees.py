"""A Debian with portranger installed: made once, cached, and never written to again.

It lies in the user's cache in two parts. The base is what debootstrap makes. The layer is what a
first `make install` adds to it, and is made anew when the pins or the recipe change. A machine that
boots lays a tmpfs over both, so that any number of them can run at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rules.values import Value
from tests.spaces import ROOT, eventually, run, unused_name

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "portranger", "trees")
PACKAGES = ("systemd", "systemd-sysv", "dbus", "make", "nftables", "iptables", "man-db", "mandoc")
SOURCE = "/usr/src/portranger"
PATIENCE = 900  # seconds for what downloads are part of

MOUNT = """\
set -eu
mount --make-rprivate /
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
mount -t tmpfs -o mode=755 tmpfs "$SCRATCH"
mkdir "$SCRATCH/upper" "$SCRATCH/work" "$SCRATCH/root"
layers="lowerdir=$LOWER,upperdir=$SCRATCH/upper,workdir=$SCRATCH/work"
mount -t overlay -o "$layers" overlay "$SCRATCH/root"
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/$NAME
"""
JOIN = 'mkdir "$group"\necho $$ >"$group/cgroup.procs"\n'
LEAVE = 'find "$group" -depth -type d -exec rmdir {} +\n'


class Stage(Value, kw_only=True):
    """A root directory to run things in, with a control group of its own. Its mounts are seen by
    what runs in there only, and go with it."""

    name: str
    scratch: Path
    lower: tuple[Path, ...]
    source: Path

    def command(self, script: str) -> list[str]:
        """What runs a script on the stage."""
        return ["unshare", "--mount", "sh", "-c", MOUNT + script]

    def environment(self) -> dict[str, str]:
        """What the command needs to know."""
        lower = ":".join(map(str, self.lower))
        return {**os.environ, "NAME": self.name, "SCRATCH": str(self.scratch), "LOWER": lower}

    def nspawn(self, *words: str) -> str:
        """The line of a script that runs something with the stage as its root."""
        root, binding = self.scratch / "root", f"--bind={self.source}:{SOURCE}"
        always = ("--quiet", "--register=no", "--keep-unit", "--console=pipe", binding)
        return shlex.join(
            ["systemd-nspawn", *always, f"--machine={self.name}", f"--directory={root}", *words]
        )

    def install(self, *words: str) -> str:
        """The line of a script that installs the clone there, with the network of this machine."""
        return self.nspawn(*network(), f"--chdir={SOURCE}", *words)

    def says(self, script: str, then: str = "") -> str:
        """What a script says there while nothing is booted, in the copy of the clone; what is to
        be done with its tree `then` is done from outside."""
        line = self.install("sh", "-c", script)
        done = subprocess.run(
            self.command(f"{JOIN}{line}\n{then}"),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def stage(*lower: Path) -> Iterator[Stage]:
    """A stage with a copy of this clone; nothing of it is left behind."""
    with TemporaryDirectory(prefix="portranger-") as scratch, TemporaryDirectory() as source:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, source, ignore=ignored, dirs_exist_ok=True)
        made = Stage(
            name=f"portranger-{unused_name()}",
            scratch=Path(scratch),
            lower=lower,
            source=Path(source),
        )
        try:
            yield made
        finally:
            run(*made.command(LEAVE), environment=made.environment(), code=None)


def network() -> Iterator[str]:
    """How pip on this machine reaches its index, as options of systemd-nspawn."""
    cache = CACHE.parent / "pip"
    cache.mkdir(parents=True, exist_ok=True)
    yield f"--bind={cache}:/root/.cache/pip"
    names = [name for name in os.environ if is_about_network(name)]
    yield from (f"--setenv={name}" for name in names)
    configured = ["/etc/pip.conf", "/etc/ssl/certs", *(os.environ[name] for name in names)]
    there = [path for path in configured if path.startswith("/") and Path(path).exists()]
    yield from (f"--bind-ro={path}" for path in there)
    for path in (".config/pip/pip.conf", ".pip/pip.conf"):
        if Path.home().joinpath(path).exists():
            yield f"--bind-ro={Path.home() / path}:/root/{path}"


def is_about_network(name: str) -> bool:
    """Whether a variable of the environment says how to reach the network."""
    if name == "PIP_CACHE_DIR":
        return False
    about = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    return name.startswith("PIP_") or name.lower().endswith("_proxy") or name in about


def installed() -> tuple[Path, Path]:
    """The layer and the base of a tree with portranger installed, made if there are none."""
    base = bare()
    made_by = (ROOT / "Makefile", *sorted(ROOT.glob("requirements/*.txt")))
    recipe = [path.read_text() for path in made_by]
    layer = cached(f"{base.name}-layer", recipe, lambda path: first_install(base, path))
    return layer, base


def bare() -> Path:
    """A tree with what portranger needs, and without portranger, made if there is none."""
    suite = codename()
    packages = sorted({*PACKAGES, *runtime_packages()})
    return cached(f"base-{suite}", packages, lambda path: debootstrap(suite, packages, path))


def codename() -> str:
    """This machine's Debian, or a recent one."""
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    return release.get("VERSION_CODENAME", "") if release["ID"] == "debian" else "bookworm"


def runtime_packages() -> list[str]:
    """What the Makefile says that portranger needs."""
    rule = "print-packages:; @echo $(RUNTIME_PACKAGES)"
    return run("make", "--silent", f"--eval={rule}", "print-packages").stdout.split()


def cached(kind: str, made_of: Iterable[str], make: Callable[[Path], None]) -> Path:
    """A directory that is made of these; two runs that need it at once make it once."""
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:12]
    path = CACHE / f"{kind}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{kind}.lock").open("w") as lock:
        assert eventually(lambda: taken(lock.fileno()), PATIENCE)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            run("rm", "-rf", unfinished)
            make(unfinished)
            unfinished.rename(path)
        os.utime(path)
        forget_old(kind)
    return path


def forget_old(kind: str) -> None:
    """Remove what no run has used for a week."""
    for path in CACHE.glob(f"{kind}-*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > 7 * 86400:
            run("rm", "-rf", path)


def taken(descriptor: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def debootstrap(suite: str, packages: Iterable[str], path: Path) -> None:
    """A fresh Debian, from where this machine gets its own packages."""
    options = ["--variant=minbase", f"--include={','.join(packages)}"]
    uri = mirror(suite) or mirror(codename())  # a mirror has every release
    done = subprocess.run(
        ["unshare", "--mount", "debootstrap", *options, suite, str(path), *uri],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"debootstrap cannot make a Debian here: {done.stdout[-400:]}{done.stderr}")
    run("rm", "-rf", *path.glob("var/cache/apt/archives/*.deb"))


def mirror(suite: str) -> list[str]:
    """The mirror in this machine's own sources; none if it has no such: debootstrap knows one."""
    words = ("indextargets", "--format", "$(REPO_URI)", f"Codename: {suite}", "Label: Debian")
    if not shutil.which("apt-get"):
        return []
    named = run("apt-get", *words, code=None).stdout.split()
    return [uri for uri in named if uri.startswith(("http://", "https://", "file:/"))][:1]


def first_install(base: Path, path: Path) -> None:
    """What `make install` adds to a bare system. It is made elsewhere and then brought to its
    place, as a package would be: whatever still names the other place will not work."""
    with stage(base) as made:
        script = "make install DESTDIR=/elsewhere && cp -a /elsewhere/. / && rm -r /elsewhere"
        made.says(script, then=shlex.join(["cp", "-a", f"{made.scratch}/upper", str(path)]))


if __name__ == "__main__":
    installed()
