"""The programs of a Kubernetes control plane, and KubeVirt's judge of networks: built once with Go,
and kept in the user's cache.

`go install k8s.io/kubernetes/cmd/kube-apiserver@…` is refused, because go.mod there replaces its
libraries by directories of its own repository. So we build in a module of our own with the same
go.mod, where they are replaced by what is published of them. It names an etcd, too. KubeVirt does
the same; of it we need one package, which admitter/main.go calls.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from rules.values import Value
from tests.spaces import eventually
from tests.systemd.trees import taken

VERSION = "1.34.4"  # of the last branch that needs no newer Go than Debian 13 has
OLDEST_GO = (1, 24)
KUBEVIRT = "1.9.0"  # asks for Go 1.26, which an older one fetches like any other module
ADMITTER = Path(__file__).parent / "admitter" / "main.go"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "portranger", "kube")
PATIENCE = 7200  # seconds for one command of Go, or for another run that builds
TICK = 10  # seconds between two lines about how far it is
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}
MAJOR, MINOR, PATCH = VERSION.split(".")
SAID = {"gitVersion": f"v{VERSION}", "gitMajor": MAJOR, "gitMinor": MINOR}
LINKED = [f"-X k8s.io/component-base/version.{name}={said}" for name, said in SAID.items()]
PLAIN = ("-trimpath", "-ldflags=-s -w")
FLAGS = ("-trimpath", f"-ldflags=-s -w {' '.join(LINKED)}")
NO_GO = """{}
They are built with Go {}.{} or newer, which is looked for in PATH and in /usr/local/go/bin.
Debian 13 has it (apt-get install golang-go), and so has https://go.dev/dl for all others.
Or let KUBEBUILDER_ASSETS name a directory with kube-apiserver, etcd and kubectl in it."""


class Unavailable(Exception):
    """The programs are not to be had, and why."""


class Assets(Value, kw_only=True):
    """Where the programs are."""

    etcd: Path
    apiserver: Path
    kubectl: Path


def find() -> Assets:
    """The programs, if they are here."""
    missing = not_given()
    ours = place(missing)
    if missing and not ours.is_dir():
        raise Unavailable(f"needs {', '.join(missing)}, which `make kube-assets` builds")
    paths = given() | {name: ours / name for name in missing}
    return Assets(etcd=paths["etcd"], apiserver=paths["kube-apiserver"], kubectl=paths["kubectl"])


def find_admitter() -> Path:
    """KubeVirt's judge, if it is here."""
    path = admitter_given() or admitter_place() / "admitter"
    if not path.is_file():
        raise Unavailable("needs KubeVirt's admitter, which `make kube-assets` builds")
    return path


def admitter_given() -> Path | None:
    """The one beside the programs that the environment names."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder, "admitter").absolute() if folder else None
    return path if path and path.is_file() else None


def given() -> dict[str, Path]:
    """Those that the environment names."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return {}
    found = {name: path for name in PACKAGES if (path := Path(folder, name).absolute()).is_file()}
    if missing := sorted({"etcd", "kube-apiserver"} - found.keys()):
        raise Unavailable(
            f"KUBEBUILDER_ASSETS is {folder}, which has no {' and no '.join(missing)}"
        )
    return found


def not_given() -> list[str]:
    """Those that have to be built."""
    return sorted(PACKAGES.keys() - given().keys())


def place(names: Iterable[str]) -> Path:
    """Where these programs are kept; what is built in another way has another place."""
    recipe = "\0".join([platform.machine(), *FLAGS, *(PACKAGES[name] for name in names)])
    return CACHE / f"{VERSION}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def admitter_place() -> Path:
    """The same of the judge."""
    recipe = "\0".join([platform.machine(), *PLAIN, ADMITTER.read_text()])
    return CACHE / f"kubevirt-{KUBEVIRT}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def build() -> None:
    """Build what is not here."""
    names = not_given()
    if names:
        build_once(place(names), lambda workshop: workshop.make(names))
    if admitter_given():
        return
    try:
        build_once(admitter_place(), Workshop.make_admitter)
    except Unavailable as problem:
        if names:
            raise
        tell(f"no judge of KubeVirt's, and its tests are skipped: {problem}")


def build_once(path: Path, make: Callable[[Workshop], None]) -> None:
    """Build what belongs there. Two that want this at once build it once."""
    if path.is_dir():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        take(lock)
        if not path.is_dir():
            # What a run left that was interrupted: Go goes on from there.
            unfinished = path.with_name(f"{path.name}.unfinished")
            (unfinished / "bin").mkdir(parents=True, exist_ok=True)
            make(Workshop(unfinished))
            (unfinished / "bin").rename(path)
            shutil.rmtree(unfinished)


def take(lock: IO[str]) -> None:
    """Hold the lock, which whoever builds holds until its process ends."""
    if not taken(lock.fileno()):
        tell("another run is building them: waiting for it")
    if not eventually(lambda: taken(lock.fileno()), PATIENCE):
        raise Unavailable(f"another run has been building them for {PATIENCE} s")


class Workshop:
    """A directory with a Go module, whose programs go into bin/."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
        # Gigabytes that nobody needs again: not in the user's own.
        self._environment = {**os.environ, "GOCACHE": str(folder / "compiled"), "GOWORK": "off"}
        self._started = time.monotonic()

    def make(self, names: list[str]) -> None:
        """Build these programs."""
        packages = [PACKAGES[name] for name in names]
        self._check_go()
        tell(f"downloading the sources of Kubernetes {VERSION}")
        self._write_module("k8s.io/kubernetes", VERSION, f"0.{MINOR}.{PATCH}")
        count = len(self._go("list", "-mod=mod", "-deps", *packages).split())
        tell(f"compiling {', '.join(names)}: {count} packages, except what Go still knows of them")
        words = ("build", "-mod=mod", "-v", *FLAGS)
        self._go(*words, f"-o={self._folder / 'bin'}/", *packages)
        for name, package in zip(names, packages, strict=True):
            compiled = re.sub(r"/v\d+$", "", package).rpartition("/")[2]
            (self._folder / "bin" / compiled).rename(self._folder / "bin" / name)
        tell(f"done after {self._seconds()} s")

    def make_admitter(self) -> None:
        """Build KubeVirt's judge."""
        self._check_go()
        tell(f"downloading the sources of KubeVirt {KUBEVIRT}, for its admitter")
        self._environment["GOTOOLCHAIN"] = "auto"
        self._write_module("kubevirt.io/kubevirt", KUBEVIRT, KUBEVIRT)
        shutil.copy(ADMITTER, self._folder)
        count = len(self._go("list", "-mod=mod", "-deps", ".").split())
        tell(f"compiling the admitter: {count} packages")
        self._environment["CGO_ENABLED"] = "0"
        self._go("build", "-mod=mod", "-v", *PLAIN, f"-o={self._folder / 'bin' / 'admitter'}", ".")
        tell(f"done after {self._seconds()} s")

    def _check_go(self) -> None:
        if not self._program:
            raise Unavailable(NO_GO.format("There is no Go on this machine.", *OLDEST_GO))
        # From 1.21 on, Go may have leave to fetch the version that a module asks for.
        major, minor = OLDEST_GO
        (self._folder / "go.mod").write_text(f"module assets\n\ngo {major}.{minor}.0\n")
        said = self._go("env", "GOVERSION").strip()
        numbers = re.match(r"go(\d+)\.(\d+)", said)
        if numbers and tuple(map(int, numbers.groups())) < OLDEST_GO:
            raise Unavailable(NO_GO.format(f"{self._program} is {said}.", *OLDEST_GO))

    def _write_module(self, name: str, version: str, libraries: str) -> None:
        """With what that module itself requires, and its checksums."""
        told = self._go("mod", "download", "-json", f"{name}@v{version}")
        origin = Path(json.loads(told)["Dir"])
        text = published((origin / "go.mod").read_text(), libraries)
        (self._folder / "go.mod").write_text(f"{text}\nrequire {name} v{version}\n")
        (self._folder / "go.sum").write_text((origin / "go.sum").read_text())

    def _go(self, *words: str) -> str:
        """What Go says to that; while it works, what it is at is told now and then."""
        command = ["setpriv", "--pdeathsig", "KILL", "nice", str(self._program), *words]
        output, log = self._folder / "output", self._folder / "log"
        with output.open("w") as stdout, log.open("w") as stderr:
            child = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=stdout, stderr=stderr
            )
        try:
            while (code := self._waited(child)) is None:
                done = log.read_text().splitlines() or [f"go {words[0]}"]
                tell(f"{self._seconds()} s: {len(done)}. {done[-1]}")
        finally:
            child.kill()
            child.wait()
        if code != 0:
            raise Unavailable(f"go {words[0]} failed:\n{log.read_text()[-4000:]}")
        return output.read_text()

    def _waited(self, child: subprocess.Popen[bytes]) -> int | None:
        """Its exit code; None if it takes longer."""
        if self._seconds() > PATIENCE:
            raise Unavailable(f"Go is not done after {PATIENCE} s")
        try:
            return child.wait(TICK)
        except subprocess.TimeoutExpired:
            return None

    def _seconds(self) -> int:
        return round(time.monotonic() - self._started)


def published(module: str, libraries: str) -> str:
    """A go.mod for a module that is not in the repository of this one, whose libraries have that
    version."""
    text = re.sub(r"(?m)^module .*", "module assets", module)
    return re.sub(r"=> \./staging/src/(\S+)", rf"=> \1 v{libraries}", text)


def tell(text: str) -> None:
    """Tell whoever waits."""
    print(f"kube-assets: {text}", flush=True)  # noqa: T201 - it takes minutes, at a terminal


def main() -> None:
    try:
        build()
        made = find()
    except Unavailable as problem:
        sys.exit(f"kube-assets: {problem}")
    paths = [made.apiserver, made.etcd, made.kubectl]
    with suppress(Unavailable):  # build() has said why
        paths.append(find_admitter())
    for path in paths:
        tell(str(path))


if __name__ == "__main__":
    main()
