"""Writes the locks anew, with the newest versions: `make lock`.

Which versions belong together is what pip finds, part by part, in an environment of its own. The
hashes are those that the index names beside each file: nothing of what is locked is trusted more
than the index was at that moment, and nothing else is, ever after.
"""

from __future__ import annotations

import ast
import json
import os
import ssl
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from release.locks import PARTS, Locked, canonical, path, written
from rules.values import Value

ROOT = Path(__file__).parents[1]
WANTED: Mapping[str, tuple[str, ...]] = {
    "build": ("--upgrade", "pip", "setuptools"),
    "runtime": ("--no-build-isolation", "--editable", "."),
    "iptables": ("--no-build-isolation", "--editable", ".[iptables]"),
    "dev": ("--no-build-isolation", "--editable", ".[iptables,dev]"),
}
PATIENCE = 60  # seconds for an answer of the index


class File(Value):
    """A file of the index, and its SHA-256."""

    name: str
    digest: str


class Links(HTMLParser):
    """The files that a page of the index names."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = urlsplit(dict(attrs).get("href") or "") if tag == "a" else urlsplit("")
        kind, _, digest = address.fragment.partition("=")
        if kind == "sha256":
            self.files.append(File(unquote(address.path.rpartition("/")[2]), digest))


def resolved(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Part, name and version of all that pip chooses."""
    venv.create(folder, with_pip=True)
    known: set[str] = set()
    for part in PARTS:
        _pip(folder, "install", "--quiet", *WANTED[part])
        listed = json.loads(_pip(folder, "list", "--format=json", "--exclude-editable"))
        for one in listed:
            if one["name"] not in known:
                known.add(one["name"])
                yield part, one["name"], one["version"]


def _pip(folder: Path, *words: str) -> str:
    python = folder / "bin/python"
    return subprocess.run(
        [python, "-m", "pip", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def files_of(name: str, version: str, page: str) -> tuple[str, ...]:
    """The hashes of all files of a version, of those that a page names."""
    links = Links()
    links.feed(page)
    ours = {(canonical(name), version)}
    found = tuple(file.digest for file in links.files if {_is_of(file.name)} == ours)
    if not found:
        raise SystemExit(f"make: the index has no file of {name} {version} with a SHA-256")
    return found


def _is_of(file: str) -> tuple[str, str]:
    """The name and version that a file's name tells."""
    if file.endswith(".whl"):
        name, version = file.split("-")[:2]
    else:
        name, _, version = file.removesuffix(".tar.gz").removesuffix(".zip").rpartition("-")
    return canonical(name), version


def index(folder: Path) -> str:
    """The index that pip is told to ask."""
    for line in _pip(folder, "config", "list").splitlines():
        key, _, value = line.partition("=")
        if key.endswith(".index-url"):
            return str(ast.literal_eval(value)).rstrip("/")
    return "https://pypi.org/simple"


def asked(index: str, name: str) -> str:
    """The page of the index about a distribution."""
    if not index.startswith("https://"):
        raise SystemExit(f"make: hashes are taken over https only, and the index is {index}")
    request = Request(f"{index}/{canonical(name)}/", headers={"Accept": "text/html"})  # noqa: S310 - https, as said
    trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urlopen(request, timeout=PATIENCE, context=trusted) as answer:  # noqa: S310
        return str(answer.read().decode())


def main() -> None:
    """Write all locks, once everything for them is known."""
    with TemporaryDirectory() as scratch:
        chosen = list(resolved(Path(scratch)))
        source = index(Path(scratch))
    locked = [
        Locked(
            part=part,
            name=name,
            version=version,
            hashes=files_of(name, version, asked(source, name)),
        )
        for part, name, version in chosen
    ]
    for part in PARTS:
        path(part).write_text(written(part, [one for one in locked if one.part == part]))
    sys.stdout.write(f"make: wrote {len(locked)} versions into requirements/\n")


if __name__ == "__main__":
    main()
