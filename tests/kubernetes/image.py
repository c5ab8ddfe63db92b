"""The image that the Containerfile makes, on a Debian that debootstrap made: no registry is needed.

Podman works on a node of its own: with mounts that nobody else has, storage in memory, and
processes of which the first takes all others with it. So nothing of it is left behind, and the
user's own images and containers are never seen.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.spaces import PATIENCE, run, space, unused_name
from tests.systemd import trees

Json = Any

BASE = "localhost/base"
CONTEXT = (
    *(".containerignore", "Containerfile", "requirements", "pyproject.toml"),
    *("LICENSE", "README.md", "agent", "rules"),
)
EPOCH = "1577836800"  # as in the Containerfile
# What is mounted on one side appears on the other, as on every node. crun knows no cgroup2 that is
# mounted elsewhere. Last come the places that podman writes to whatever it is told.
HOLD = """\
set -eu
mount --make-rshared /
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
for place in /dev/shm /run/crun /var/lib/containers /var/tmp "$1"; do
    mkdir -p "$place"
    mount -t tmpfs -o mode=700 tmpfs "$place"
done
mkdir "$1/hooks"
echo "$2" >"$1/hooks/shared.json"
echo holding
read -r _ || true
"""
LEFT_OUT = (  # as Debian's own slim images do
    *("dev", "proc", "sys", "var/cache/apt", "var/lib/apt/lists"),
    *("usr/share/doc", "usr/share/locale", "usr/share/man"),
)
# Without cgroups, podman refuses to let a container see other processes. This edits what the
# runtime is told: it makes no namespace for the processes of containers that ask for that.
SHARED = "portranger.tests.shared"
HOOK = {
    "version": "1.0.0",
    "hook": {"path": "/bin/sed", "args": ["sed", "-E", """s/[{]"type":"pid"[}],?//"""]},
    "when": {"annotations": {f"^{SHARED}$": "true"}},
    "stages": ["precreate"],
}
UNLIMITED = ("--cgroups=disabled", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")


class Podman:
    """Its commands, on a node that goes with it."""

    def __init__(self, folder: Path, holder: int) -> None:
        self._folder, self._holder = folder, holder

    def __call__(self, *words: str, stdin: str = "", code: int | None = 0) -> str:
        """What it says, on both its streams."""
        done = run(*self.command(*words), stdin=stdin, code=code)
        return done.stdout + done.stderr

    def command(self, *words: str) -> list[str]:
        places = [f"--{name}={self._folder / name}" for name in ("root", "runroot", "tmpdir")]
        always = ("--cgroup-manager=cgroupfs", "--events-backend=none", "--storage-driver=overlay")
        hooks = f"--hooks-dir={self._folder / 'hooks'}"
        return [*self.on_node("podman"), *places, *always, hooks, *words]

    def on_node(self, *words: str) -> list[str]:
        """The command, as one that runs there."""
        spaces = f"/proc/{self._holder}/ns"
        enter = ("nsenter", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children")
        return [*enter, *words]

    def take(self, tree: Path, name: str) -> None:
        """Make an image of a directory."""
        left_out = [f"--exclude=./{path}/*" for path in LEFT_OUT]
        packing = shlex.join(["tar", "-C", str(tree), *left_out, "-c", "."])
        run("sh", "-c", f"{packing} | {shlex.join(self.command('import', '-', name))}")

    def build(self, context: Path, name: str) -> str:
        """The identity of the image that is made, which is a digest of everything in it."""
        always = ("--isolation=chroot", "--network=host", "--layers=false", *UNLIMITED[1:])
        given = (f"--build-arg=BASE={BASE}", f"--timestamp={EPOCH}", f"--tag={name}")
        done = subprocess.run(
            self.command("build", *always, *given, *pip_settings(context), str(context)),
            capture_output=True,
            text=True,
            timeout=trees.PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return self("image", "inspect", "--format={{.Id}}", name).strip()

    @contextmanager
    def running(self, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A container that runs until the block ends; what it says goes into the log."""
        name = unused_name()
        command = self.command("run", "--rm", f"--name={name}", *UNLIMITED, *words)
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            yield child
            self("stop", "--ignore", name)
        finally:
            self("rm", "--force", "--ignore", "--time=0", name)
            child.wait(PATIENCE)


@contextmanager
def podman() -> Iterator[Podman]:
    """One that knows a base image, and nothing else."""
    if not shutil.which("podman"):
        pytest.skip("needs the command podman (Debian: podman)")
    with space():  # from the first one on, what is mounted in /run/netns is seen on the node
        pass
    with TemporaryDirectory(prefix="portranger-") as name:
        folder = Path(name)
        pipe = subprocess.PIPE
        apart = (
            "unshare",
            "--mount-proc",
            "--propagation=slave",
            "--pid",
            "--fork",
            "--kill-child",
        )
        words = (*apart, "sh", "-c", HOLD, "sh", name, json.dumps(HOOK))
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdout is not None
            try:
                assert holder.stdout.readline() == "holding\n"
                made = Podman(folder, holder.pid)
                made.take(base(), BASE)
                yield made
            finally:
                holder.kill()


def base() -> Path:
    """A Debian such as images begin with, made if there is none."""
    suite, packages = trees.codename(), ["apt"]  # it cannot be told to include none
    make = functools.partial(trees.debootstrap, suite, packages)
    return trees.cached(f"image-{suite}", packages, make)


def built_twice(podman: Podman, *names: str) -> list[str]:
    """Build the image under each of these names, at the same time, from copies of what is here now:
    it may be edited meanwhile. How old the copies are must not matter, so they differ in that."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        contexts = [Path(folder, str(number)) for number in range(len(names))]
        contexts[0].mkdir()
        run("cp", "-r", *CONTEXT, contexts[0])
        for later in contexts[1:]:
            run("cp", "-r", contexts[0], later)
            run("find", later, "-exec", "touch", "--date=2001-02-03", "{}", "+")
        return list(pool.map(podman.build, contexts, names))


def pip_settings(folder: Path) -> Iterator[str]:
    """How pip on this machine reaches its index, as options of a build."""
    told = run(sys.executable, "-m", "pip", "config", "list").stdout.splitlines()
    pairs = [line.split("=", 1) for line in sorted(told, key=lambda line: line.startswith(":env:"))]
    settings = {key.rpartition(".")[2]: ast.literal_eval(value) for key, value in pairs}
    settings.setdefault("cert", os.environ.get("REQUESTS_CA_BUNDLE", ""))
    settings.pop("cache-dir", None)
    lines = ["[global]"]
    for key, value in settings.items():
        words = str(value).split()
        for number, word in enumerate(words):
            if word.startswith("/") and Path(word).exists():
                words[number] = f"/mnt/{key}-{number}"
                yield f"--volume={word}:{words[number]}:ro"
        lines += [f"{key} = {' '.join(words)}"] if words else []
    file = folder / f"{unused_name()}.conf"
    file.write_text("\n".join(lines) + "\n")
    yield f"--volume={file}:/etc/pip.conf:ro"


# --------------------------------------------------------------------------- pods, as containers


def options(spec: Json, places: Mapping[str, Path], *, without: str = "") -> list[str]:
    """How podman is to run the only container of a pod, but for its network. Volumes are taken from
    the given places, except for what only the node itself has. Podman's own profile for seccomp
    stands for that of other runtimes."""
    [container] = spec["containers"]
    security = container["securityContext"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    words = [f"--annotation={SHARED}=true"] if spec.get("hostPID") else []
    words += ["--privileged"] if security.get("privileged") else []
    words += ["--read-only", "--read-only-tmpfs=false"] * security["readOnlyRootFilesystem"]
    words += ["--security-opt=no-new-privileges"] * (not security["allowPrivilegeEscalation"])
    words += [f"--user={security['runAsUser']}:{security['runAsGroup']}"]
    words += [
        f"--env={one['name']}={FIELDS[one['valueFrom']['fieldRef']['fieldPath']]}"
        for one in container.get("env", ())
    ]
    words += [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
    words += [f"--cap-add={name}" for name in security["capabilities"]["add"] if name != without]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        source = places.get(mount["name"]) or NODE_ITSELF[volume["hostPath"]["path"]]
        how = "ro" if mount.get("readOnly") else "rw"
        spread = {"HostToContainer": "rslave"}.get(mount.get("mountPropagation", ""), "rprivate")
        words.append(f"--volume={source}:{mount['mountPath']}:{how},{spread}")
    return words


NODE = "node-of-the-image"
FIELDS = {"spec.nodeName": NODE}
NODE_ITSELF = {path: Path(path) for path in ("/proc/sys/net", "/run/netns")}
