"""The Debian package, made of what `make install PREFIX=/usr` puts below a folder: `make deb`.

Added are what a package has to have (its control files, the changelog and the copyright) and a bill
of materials; the manual is compressed; what only `make install` and `make uninstall` need goes:
pip, setuptools, and notes of their own. dpkg-deb does the rest: debhelper would decide nothing here
that is not decided above.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from release.sbom import bill, project

ROOT = Path(__file__).parents[1]
NOTES = (".pins", ".directories")
CONTROL = ROOT / "release/debian"
SCRIPTS = ("postinst", "prerm", "postrm")
DOCUMENTS = "usr/share/doc/portranger"
OVERRIDES = "usr/share/lintian/overrides/portranger"


def packed(tree: Path, target: Path) -> Path:
    """The package of what is in a tree, which is changed for it."""
    time = int(os.environ["SOURCE_DATE_EPOCH"])
    drop_tools(tree)
    compress(tree.glob("usr/share/man/man*/*.[1-9]"))
    add_documents(tree, time)
    add_control(tree)
    settle_times(tree, time)
    target.mkdir(parents=True, exist_ok=True)
    package = target / f"portranger_{version()}_{asked('dpkg', '--print-architecture')}.deb"
    # One thread: how many there are decides where blocks end.
    options = ("--root-owner-group", "-Zxz", "--threads-max=1")
    asked("dpkg-deb", *options, "--build", str(tree), str(package))
    return package


def version() -> str:
    """That of the changelog, and for which Debian: the package is for no other, and a repository
    may hold those of several."""
    return written() + suffix(platform.freedesktop_os_release())


def suffix(release: Mapping[str, str]) -> str:
    """What makes a version one for that release: older than one for the next, or for none yet."""
    name = {"debian": "deb"}.get(release["ID"], release["ID"])
    return f"~{name}{release['VERSION_ID']}" if "VERSION_ID" in release else ""


def written() -> str:
    """The version in the changelog, whose first part is that of the project."""
    [told] = re.findall(r"\Aportranger \((.+)\) ", (CONTROL / "changelog").read_text())
    upstream = project()["version"]
    if told.rpartition("-")[0] != upstream:
        raise SystemExit(f"make: release/debian/changelog is about {told}, not about {upstream}")
    return str(told)


def asked(*words: str) -> str:
    """What a command says."""
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


# ------------------------------------------------------------------------------- what is in it


def drop_tools(tree: Path) -> None:
    """Remove what installs and builds: nothing on a node is to be installed with it."""
    environment = tree / "usr/lib/portranger"
    for name in NOTES:
        (environment / name).unlink()
    python = environment / "bin/python"
    asked(str(python), "-IBm", "pip", "--quiet", "uninstall", "--yes", "setuptools", "pip")


def compress(paths: Iterator[Path]) -> None:
    """Put each file into an archive of its own, without its time and name."""
    for path in list(paths):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
        path.unlink()


def add_documents(tree: Path, time: int) -> None:
    """Add what Debian wants to be told about every package, and what is in this one."""
    folder = tree / DOCUMENTS
    shutil.copyfile(CONTROL / "copyright", folder / "copyright")
    changes = (CONTROL / "changelog").read_text()
    (folder / "changelog.Debian").write_text(changes.replace(written(), version(), 1))
    compress(folder.glob("changelog.Debian"))
    [packages] = tree.glob("usr/lib/portranger/lib/python3*/site-packages")
    (folder / "portranger.cdx.json").write_text(
        bill([str(packages)], ("runtime", "iptables"), time)
    )
    (tree / OVERRIDES).parent.mkdir(parents=True)
    shutil.copyfile(CONTROL / "lintian-overrides", tree / OVERRIDES)


def add_control(tree: Path) -> None:
    """Add what dpkg reads."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    sums = [(hashlib.md5(path.read_bytes(), usedforsecurity=False), path) for path in files]
    size = sum(-(-path.lstat().st_size // 1024) for path in tree.rglob("*"))
    folder = tree / "DEBIAN"
    folder.mkdir()
    for name in (*SCRIPTS, "conffiles"):
        shutil.copyfile(CONTROL / name, folder / name)
        (folder / name).chmod(0o755 if name in SCRIPTS else 0o644)
    lines = [f"{digest.hexdigest()}  {path.relative_to(tree)}\n" for digest, path in sums]
    (folder / "md5sums").write_text("".join(lines))
    (folder / "control").write_text(
        (CONTROL / "control")
        .read_text()
        .format(
            version=version(),
            architecture=asked("dpkg", "--print-architecture"),
            size=size,
            depends=", ".join(dependencies(tree)),
        )
    )


def dependencies(tree: Path) -> Iterator[str]:
    """What has to be on the machine.

    The environment is one of this minor version of Python, and so is the extension in it, which was
    built with this machine's C library. libnftables is loaded by its name at the start, so no tool
    could find it; and so are libxtables and libiptc, but only where iptables is in use.
    """
    [library] = tree.glob("usr/lib/portranger/lib/python3.*")
    minor = int(library.name.removeprefix("python3."))
    yield f"python3 (>= 3.{minor}~)"
    yield f"python3 (<< 3.{minor + 1}~)"
    libc = asked("dpkg-query", "--show", "--showformat=${source:Upstream-Version}", "libc6")
    yield f"libc6 (>= {libc})"
    yield "libnftables1"


def settle_times(tree: Path, time: int) -> None:
    """Let everything be of the same time; and the root as open as a root is."""
    tree.chmod(0o755)
    for path in (tree, *tree.rglob("*")):
        os.utime(path, (time, time), follow_symlinks=False)


if __name__ == "__main__":
    os.umask(0o022)
    made = packed(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"make: wrote {made}\n")
