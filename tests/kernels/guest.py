"""Boot a kernel under qemu by software emulation, let it do a job, and read the results.

The guest has four disks: the root, to which writes are forgotten; the kernel's modules; a tar with
the clone and the job; and an empty one for a tar with the results. It switches itself off.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kernels.images import Kernel
from tests.kernels.job import JOB, MARK, RESULTS, Result, Step
from tests.kernels.packages import Unavailable, done
from tests.spaces import ROOT
from tests.vm.image import QEMU

LEFT_OUT = (".*", "__pycache__", "build", "dist", "*.egg-info")
RESULT_BYTES = 64 << 20
PROCESSORS = 2
BOOT_SECONDS = 240  # to the first line of the job; a quiet machine needs twelve
TICK = 1.0
# With `-cpu max` alone 6.12 panics (cmpxchg16b); without no_timer_check it may hang under load.
MACHINE = (
    *("-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"),
    *("-machine", "q35", "-cpu", "max,la57=off,cx16=off", "-m", "2048"),
    *("-accel", "tcg,thread=multi,tb-size=512", "-smp", str(PROCESSORS)),
)
COMMAND_LINE = "console=ttyS0 quiet mitigations=off panic=-1 no_timer_check net.ifnames=0"


def run(
    kernel: Kernel,
    root: Path,
    steps: Iterable[Step],
    extra: dict[str, Path],
    tell: Callable[[str], None],
) -> list[Result]:
    """Do the steps on a kernel; `extra` are files for the clone, by where they go there."""
    steps = list(steps)
    with TemporaryDirectory(prefix="portranger-kernels-") as name:
        folder = Path(name)
        pack(folder, steps, extra)
        with (folder / "results").open("wb") as file:
            file.truncate(RESULT_BYTES)
        boot(kernel, root, folder, sum(step.seconds for step in steps), tell)
        found = {one.name: one for one in results(folder / "results")}
    return [found.get(step.name, Result(name=step.name)) for step in steps]


def pack(folder: Path, steps: list[Step], extra: dict[str, Path]) -> None:
    """Write a tar with the clone, compiled, and the job."""
    clone = folder / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name, path in extra.items():
        shutil.copy(path, clone / name)
    (clone / JOB).write_text(json.dumps([asdict(step) for step in steps]))
    # If the Python of the root is another version, it ignores this, and is slower.
    words = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
    done(sys.executable, *words, "-s", str(clone), "-p", "/usr/src/portranger", str(clone))
    with tarfile.open(folder / "job", "w") as tar:
        tar.add(clone, arcname=".")
    shutil.rmtree(clone)


def boot(
    kernel: Kernel, root: Path, folder: Path, seconds: int, tell: Callable[[str], None]
) -> None:
    """Run the guest until it switches itself off, and pass on its progress."""
    console, complaints = folder / "console", folder / "qemu.log"
    console.touch()
    words = (
        *("setpriv", "--pdeathsig", "KILL", "nice", "-n", "5", QEMU, *MACHINE),
        *("-serial", f"file:{console}"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.initramfs)),
        *("-append", COMMAND_LINE),
        *disk(root, "snapshot=on"),
        *disk(kernel.modules, "snapshot=on"),
        *disk(folder / "job", "readonly=on"),
        *disk(folder / "results", "cache=unsafe"),
    )
    with complaints.open("w") as log:
        qemu = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        follow(qemu, console, BOOT_SECONDS, seconds, tell)
    finally:
        qemu.kill()
        qemu.wait()
    if qemu.returncode > 0:
        raise Unavailable(f"{QEMU}: {complaints.read_text().strip()}")


def disk(path: Path, option: str) -> tuple[str, ...]:
    return ("-drive", f"file={path},format=raw,if=virtio,{option}")


def follow(
    qemu: subprocess.Popen[bytes],
    console: Path,
    boot_seconds: int,
    job_seconds: int,
    tell: Callable[[str], None],
) -> None:
    """Wait for the end of the guest, which has one time to come up, and another for its job."""
    end, up, rest = time.monotonic() + boot_seconds, False, ""
    said: list[str] = []
    with console.open(errors="replace") as lines:
        while time.monotonic() < end:
            ended = qemu.poll() is not None
            *whole, rest = (rest + lines.read()).split("\n")
            said += whole
            for line in whole:
                if line.startswith(MARK):
                    tell(line.removeprefix(MARK).rstrip())
                    if not up:
                        end, up = time.monotonic() + job_seconds, True
            if ended:
                break
            time.sleep(TICK)
        else:
            tell("stopped: its time is up")
    if not up:
        tell("the guest did not come up; its console ends with:")
        for line in said[-20:]:
            tell(f"  {line.rstrip()}")


def results(path: Path) -> list[Result]:
    """What the guest wrote, with the output of each step; nothing if it did not come to its end."""
    try:
        with tarfile.open(path) as tar:
            files = {
                Path(one.name).name: taken.read().decode(errors="replace")
                for one in tar
                if (taken := tar.extractfile(one))
            }
    except tarfile.ReadError:
        return []
    found = [Result(**one) for one in json.loads(files.get(RESULTS, "[]"))]
    return [replace(one, output=files.get(f"{one.name}.log", "")) for one in found]
