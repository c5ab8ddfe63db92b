"""Lets an environment name the place where it will be, not the one where it was built.

Scripts begin with the path of their Python, and pip notes the hash of each of them in a RECORD.
Both are mended, so that nothing in the environment depends on where it was built.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path


def relocate(environment: Path, place: str) -> None:
    """Write the place instead of the path of the environment, wherever it stands."""
    for path in (environment / "pyvenv.cfg", *scripts(environment)):
        content = path.read_bytes()
        path.write_bytes(content.replace(str(environment).encode(), place.encode()))
    for record in environment.glob("lib/python3*/site-packages/*.dist-info/RECORD"):
        record.write_text(renewed(record), newline="")


def scripts(environment: Path) -> Iterator[Path]:
    """The commands of the environment that are files of its own."""
    for path in environment.joinpath("bin").iterdir():
        if path.is_file() and not path.is_symlink():
            yield path


def renewed(record: Path) -> str:
    """What a RECORD should say, now that scripts are others than pip had written."""
    folder = record.parents[1]
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    with record.open(newline="") as rows:
        for name, digest, size in csv.reader(rows):
            path = folder / name
            changed = name.startswith("../") and digest and path.is_file()
            writer.writerow((name, *told(path)) if changed else (name, digest, size))
    return lines.getvalue()


def told(path: Path) -> tuple[str, int]:
    """The hash and the size of a file, as a RECORD writes them."""
    content = path.read_bytes()
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}", len(content)


if __name__ == "__main__":
    relocate(Path(sys.argv[1]), sys.argv[2])
