"""The sdist and the wheel: `make dist`.

setuptools makes both; what would differ from one build to the next is set here: the times, owners,
modes and order of what is in them. The wheel is made from the sdist, so the sdist has all it takes.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
GENERATED = (
    *(".git", ".venv", "__pycache__", "build", "dist", "*.egg-info"),
    *(".*_cache", ".coverage*", ".fuzz", ".hypothesis"),
)


def built(source: Path, target: Path) -> None:
    """Put the sdist and the wheel of a source tree into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        scratch = Path(name)
        ignored = shutil.ignore_patterns(*GENERATED)
        shutil.copytree(source, scratch / "copy", ignore=ignored, symlinks=True)
        made = backend(scratch / "copy", "build_sdist", scratch)
        settled = target / made.name
        settled.write_bytes(normal(made.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))
        shutil.unpack_archive(settled, scratch / "unpacked")  # our own: nothing to be wary of
        [unpacked] = (scratch / "unpacked").iterdir()
        wheel = backend(unpacked, "build_wheel", scratch)
        shutil.copyfile(wheel, target / wheel.name)


def backend(source: Path, hook: str, target: Path) -> Path:
    """What a hook of the build backend makes (PEP 517)."""
    script = f"import setuptools.build_meta as b, sys; b.{hook}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)],
        cwd=source,
        check=False,
        capture_output=True,
        text=True,
        umask=0o022,
    )
    if done.returncode != 0:
        raise SystemExit(f"make: setuptools failed: {done.stdout}{done.stderr}")
    suffix = {"build_sdist": "*.tar.gz", "build_wheel": "*.whl"}[hook]
    [made] = target.glob(suffix)
    return made


def normal(archive: bytes, time: int) -> bytes:
    """The same files in an archive that tells nothing of who made it, and when."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as given,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as made,
    ):
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            member.pax_headers = {}
            member.mtime, member.mode = time, normal_mode(member)
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            made.addfile(member, given.extractfile(member) if member.isreg() else None)
    return gzip.compress(plain.getvalue(), 9, mtime=time)


def normal_mode(member: tarfile.TarInfo) -> int:
    """What a clone with the usual umask would have."""
    return 0o755 if member.isdir() or member.mode & 0o100 else 0o644


if __name__ == "__main__":
    built(ROOT, Path(sys.argv[1]))
