"""Packages of any release of Debian, from the mirror that this machine's apt uses.

apt gets a configuration of its own for it: its lists and its cache are not those of the machine,
and nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.systemd.trees import PATIENCE, codename, mirror

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
KERNEL = "linux-image-cloud-amd64"  # depends on the package of the kernel, whose name has a version


class Unavailable(Exception):
    """A kernel cannot be booted on this machine, and why."""


class Archive:
    """One release of Debian, read by apt with its files in a folder."""

    def __init__(self, suite: str, folder: Path) -> None:
        self._folder = folder
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
        uris = mirror(codename())
        if not uris:
            raise Unavailable("apt on this machine has no mirror of Debian among its sources")
        (folder / "sources.list").write_text(f"deb {signed}{uris[0]} {suite} main\n")
        self._apt("apt-get", "update", "-qq")

    def unpack(self, names: list[str], into: Path) -> None:
        """Download packages and lay their files into a folder."""
        self._apt("apt-get", "download", "-qq", *names)
        for package in self._folder.glob("*.deb"):
            done("dpkg-deb", "--extract", str(package), str(into))
            package.unlink()

    def kernel(self) -> str:
        """The package of the newest kernel."""
        named = re.findall(
            r"Depends: (linux-image-\d\S+)", self._apt("apt-cache", "depends", KERNEL)
        )
        if not named:
            raise Unavailable(f"apt knows no {KERNEL}")
        return str(named[0])

    def _apt(self, program: str, *words: str) -> str:
        options = {
            "Dir::Etc::SourceList": self._folder / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": self._folder / "lists",
            "Dir::Cache": self._folder / "cache",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",  # the folder need not be readable by others
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return done(program, *given, *words, folder=self._folder)


def done(*words: str, folder: Path | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    result = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if result.returncode != 0:
        raise Unavailable(f"{' '.join(words)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
