"""What qemu boots: a kernel with its modules, and a Debian with the dependencies of the tests.

Each is made once and kept in the user's cache. The clone is not part of them: it comes on a disk of
its own with every boot.
"""

from __future__ import annotations

import shlex
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kernels.packages import Archive, Unavailable, done
from tests.spaces import ROOT
from tests.systemd.trees import cached, codename, debootstrap, runtime_packages, stage
from tests.vm.image import Entry, archive, module_files

HERE = Path(__file__).parent
SUITES = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "trixie"}
"""The releases of Debian, by the version of their kernel."""
NEEDED = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic")  # to mount the root
PACKAGES = ("make", "nftables", "iptables", "conntrack", "kmod", "procps")
ENVIRONMENT = "/opt/portranger"
ROOT_SIZE = "4G"  # of a file with holes: what is used of it is less than a third

# As `make venv` does it. What is compiled here need not be compiled by an emulated processor.
INSTALL = f"""
set -eu
python3 -m venv {ENVIRONMENT}
pip() {{ {ENVIRONMENT}/bin/python -m pip -q "$@"; }}
pip install --require-hashes -r requirements/build.txt
pip install --require-hashes --no-build-isolation -r requirements/runtime.txt \
    -r requirements/iptables.txt -r requirements/dev.txt
rm -f {ENVIRONMENT}/lib/python3*/site-packages/__init__.py
pip install --no-build-isolation --no-deps -e .
install -m 755 tests/kernels/start /sbin/start-job
python3 -m compileall -q /usr/lib/python3* || true
{ENVIRONMENT}/bin/python -W ignore -m compileall -q {ENVIRONMENT}/lib || true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel to boot: the kernel, what mounts the root, and a file system with its modules."""

    version: str
    release: str
    image: Path
    initramfs: Path
    modules: Path


def kernel(version: str) -> Kernel:
    """The kernel of one release of Debian, fetched if it is not in the cache."""
    if version not in SUITES:
        raise Unavailable(f"no kernel {version}: there are {', '.join(SUITES)}")
    base = tree()
    made_of = [SUITES[version], (HERE / "init").read_text(), *NEEDED]
    folder = cached(f"kernel-{version}", made_of, lambda path: fetch(SUITES[version], base, path))
    return Kernel(
        version=version,
        release=(folder / "release").read_text(),
        image=folder / "kernel",
        initramfs=folder / "initramfs",
        modules=folder / "modules.ext4",
    )


def fetch(suite: str, base: Path, path: Path) -> None:
    """Make the folder of a kernel from packages of Debian."""
    path.mkdir()
    with TemporaryDirectory() as scratch:
        files, apt = Path(scratch, "files"), Path(scratch, "apt")
        found = Archive(suite, apt)
        found.unpack([found.kernel(), "busybox-static"], files)
        (busybox,) = files.glob("**/bin/busybox")
        (image,) = files.glob("boot/vmlinuz-*")
        (folder,) = {one.parent for one in files.glob("**/lib/modules/*/kernel")}
        release = folder.name
        (path / "release").write_text(release)
        shutil.copy(image, path / "kernel")
        (path / "initramfs").write_bytes(archive(initramfs(files, busybox)))
        (Path(scratch) / "lib/modules").mkdir(parents=True)
        folder.rename(Path(scratch, "lib/modules", release))
        # This machine may have no depmod, and the tree has one.
        script = 'mount --bind "$1" "$2/mnt" && chroot "$2" depmod -b /mnt "$3"'
        done("unshare", "--mount", "sh", "-c", script, "sh", scratch, str(base), release)
        modules = Path(scratch, "lib/modules")
        done(*filesystem(modules, path / "modules.ext4", "1G"))


def initramfs(files: Path, busybox: Path) -> Iterator[Entry]:
    """What finds the root: busybox, the modules of a disk and of its file system, and a script."""
    program, text = stat.S_IFREG | 0o755, stat.S_IFREG | 0o644
    for name in ("bin", "dev", "lib", "lib/modules", "proc", "root"):
        yield Entry(name=name, mode=stat.S_IFDIR | 0o755)
    yield Entry(name="dev/console", mode=stat.S_IFCHR | 0o600, device=(5, 1))
    yield Entry(name="init", mode=program, content=(HERE / "init").read_bytes())
    yield Entry(name="bin/busybox", mode=program, content=busybox.read_bytes())
    for number, (name, content) in enumerate(module_files(files, NEEDED).items()):
        yield Entry(name=f"lib/modules/{number:02}-{name}.ko", mode=text, content=content)


def root() -> Path:
    """The file system with Debian and all dependencies, made if there is none."""
    base = tree()
    sources = [HERE / "start", ROOT / "pyproject.toml", *sorted(ROOT.glob("requirements/*.txt"))]
    made_of = [base.name, INSTALL, ROOT_SIZE, *(path.read_text() for path in sources)]
    return cached("kernels-root", made_of, lambda path: install(base, path)) / "root.ext4"


def tree() -> Path:
    """A Debian with what the tests call, made if there is none."""
    suite = codename()
    packages = sorted({*PACKAGES, *runtime_packages()})
    return cached(
        f"kernels-base-{suite}", packages, lambda path: debootstrap(suite, packages, path)
    )


def install(base: Path, path: Path) -> None:
    """Make the root's file system: the tree, and what pip installs into it."""
    path.mkdir()
    with stage(base) as made:
        then = shlex.join(filesystem(made.scratch / "root", path / "root.ext4", ROOT_SIZE))
        made.says(INSTALL, then=then)


def filesystem(tree: Path, path: Path, size: str) -> list[str]:
    """The command that writes a folder into a new file system."""
    return ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(tree), str(path), size]
