"""The guest's kernel and its first file system: from packages of Debian that are never installed.

What is taken from them is kept in the user's cache. The file system is an initramfs: busybox, the
modules that a virtio network card needs, and the program that answers.
"""

from __future__ import annotations

import lzma
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rules.values import Value
from tests.systemd.trees import PATIENCE, cached, codename

HERE = Path(__file__).parent
MACHINE = "x86_64"
QEMU = "qemu-system-x86_64"
KERNEL = "linux-image-cloud-amd64"  # which depends on the kernel itself, whose name has a version
BUSYBOX = "busybox-static"
MODULES = ("virtio_pci", "virtio_net")
SOURCES = ("image.py", "answer.c", "init", "lease")


class Unavailable(Exception):
    """The guest cannot be had on this machine, and why."""


class Image(Value, kw_only=True):
    """What qemu boots, and a busybox for its surroundings."""

    kernel: Path
    initramfs: Path
    busybox: Path


class Entry(Value, kw_only=True):
    """A file of an initramfs."""

    name: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def image() -> Image:
    """The image, made if there is none."""
    if reason := why_not():
        raise Unavailable(reason)
    # Any kernel will do, not only the newest one: asking apt for that takes seconds each time.
    made_of = [codename(), *((HERE / name).read_text() for name in SOURCES)]
    folder = cached("guest", made_of, make)
    return Image(
        kernel=folder / "kernel", initramfs=folder / "initramfs", busybox=folder / "busybox"
    )


def why_not() -> str | None:
    """The reason why this machine cannot make or run the guest, or None if it can."""
    if platform.machine() != MACHINE:
        return f"the guest is for {MACHINE}, and this machine is {platform.machine()}"
    if not shutil.which("apt-get"):
        return "the guest is made of packages of Debian, and there is no apt-get here"
    if not shutil.which(QEMU):
        return f"needs {QEMU} (Debian: qemu-system-x86)"
    return None


# ------------------------------------------------------------------------------------- packages


def unpack(folder: Path) -> None:
    """Download the packages, and lay their files into that folder."""
    with TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)  # apt downloads as a user of its own
        try:
            _download(Path(scratch))
        except Unavailable:  # the lists of packages were never read, or are too old for the mirror
            _done("flock", "/var/lib/dpkg", "apt-get", "update", "-qq")
            _download(Path(scratch))
        for package in Path(scratch).glob("*.deb"):
            _done("dpkg-deb", "--extract", str(package), str(folder))


def _download(folder: Path) -> None:
    named = re.findall(r"Depends: (linux-image-\d\S+)", _done("apt-cache", "depends", KERNEL))
    if not named:
        raise Unavailable(f"apt knows no {KERNEL}")
    _done("apt-get", "download", "-qq", named[0], BUSYBOX, folder=folder)


def _done(*words: str, folder: Path = HERE) -> str:
    """What a command says that must succeed."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------------------------ the image


def make(path: Path) -> None:
    """Write the image into a new directory."""
    path.mkdir()
    with TemporaryDirectory() as scratch:
        tree = Path(scratch)
        unpack(tree)
        program = tree / "answer"
        flags = ("-static", "-O2", "-Wall", "-Wextra", "-Werror")
        _done("gcc", *flags, "-o", str(program), str(HERE / "answer.c"))
        (busybox,) = tree.glob("**/bin/busybox")
        (kernel,) = tree.glob("boot/vmlinuz-*")
        programs = _programs((busybox, program, HERE / "lease"))
        (path / "initramfs").write_bytes(archive([*_folders(), *programs, *_modules(tree)]))
        shutil.copy(kernel, path / "kernel")
        shutil.copy(busybox, path / "busybox")


def _folders() -> Iterator[Entry]:
    for name in ("bin", "dev", "lib", "lib/modules", "proc"):
        yield Entry(name=name, mode=stat.S_IFDIR | 0o755)
    # The kernel opens it for the first process, before that can mount anything.
    yield Entry(name="dev/console", mode=stat.S_IFCHR | 0o600, device=(5, 1))


def _programs(paths: Iterable[Path]) -> Iterator[Entry]:
    mode = stat.S_IFREG | 0o755
    yield Entry(name="init", mode=mode, content=(HERE / "init").read_bytes())
    for path in paths:
        yield Entry(name=f"bin/{path.name}", mode=mode, content=path.read_bytes())


def _modules(tree: Path) -> Iterator[Entry]:
    """The modules, named so that each comes after those it needs."""
    for number, (name, content) in enumerate(module_files(tree, MODULES).items()):
        place = f"lib/modules/{number:02}-{name}.ko"
        yield Entry(name=place, mode=stat.S_IFREG | 0o644, content=content)


def module_files(tree: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Modules of the kernel in a tree with all they depend on, each after those it needs."""
    found = {
        path.name.partition(".")[0].replace("-", "_"): path
        for path in tree.glob("**/lib/modules/**/*.ko*")
    }
    contents: dict[str, bytes] = {}
    for name in names:
        _gather(name, found, contents)
    return contents


def _gather(name: str, found: dict[str, Path], contents: dict[str, bytes]) -> None:
    """Add a module after what it depends on; what is no file is part of the kernel."""
    if name in contents or name not in found:
        return
    packed = found[name].read_bytes()
    content = (
        lzma.decompress(packed) if found[name].suffix == ".xz" else packed
    )  # from Debian 13 on
    needs = re.search(rb"\0depends=([^\0]*)\0", content)
    for other in needs[1].decode().split(",") if needs else ():
        _gather(other, found, contents)
    contents[name] = content


def archive(entries: Iterable[Entry]) -> bytes:
    """The cpio archive that Linux reads: see initramfs-buffer-format in its documentation."""
    ending = Entry(name="TRAILER!!!", mode=0)
    return b"".join(_packed(*pair) for pair in enumerate([*entries, ending], 1))


def _packed(number: int, entry: Entry) -> bytes:
    name = entry.name.encode() + b"\0"
    fields = (
        *(number, entry.mode, 0, 0, 1, 0, len(entry.content)),
        *(0, 0, *entry.device, len(name), 0),
    )
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + name) + _padded(entry.content)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 4)
