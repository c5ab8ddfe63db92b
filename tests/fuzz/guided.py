"""One fuzzer in a process of its own: python -m tests.fuzz.guided NAME FOLDER SECONDS."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 16
SIZES = (8, 32, 64, 160)  # of what decides by chance


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    atheris = found("atheris")
    if atheris is None:
        target, timed = loaded(name)
        by_chance(target, timed, folder, seconds)
    else:
        with atheris.instrument_imports(include=["agent", "rules"]):
            target, timed = loaded(name)
        guided(atheris, target, timed, folder, seconds)


def found(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def loaded(name: str) -> tuple[Any, Any]:
    """Only here: what was imported before is not looked into."""
    everything = importlib.import_module("tests.fuzz.everything")
    return everything.TARGETS[name], importlib.import_module("tests.fuzz.target").timed


def guided(atheris: Any, target: Any, timed: Any, folder: Path, seconds: int) -> None:
    corpus, findings = folder / "corpus" / target.name, folder / "findings" / target.name
    for path in (corpus, findings):
        path.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds() if target.seeds else (random.Random(9).randbytes(64),):
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = folder / f"{target.name}.dict"
    words.write_text("".join(f'"{escaped(word)}"\n' for word in target.words if word))
    options = [
        *(f"-max_total_time={seconds}", f"-artifact_prefix={findings}/", f"-dict={words}"),
        *(f"-max_len={MOST_BYTES}", "-timeout=30", "-rss_limit_mb=2048", "-print_final_stats=1"),
    ]
    with target.opened() as run:
        atheris.Setup([sys.argv[0], *options, str(corpus)], timed(run))
        atheris.Fuzz()


def escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word[:60])


def by_chance(target: Any, timed: Any, folder: Path, seconds: int) -> None:
    """Where nothing tells what an input reaches."""
    chance = random.Random()
    made = target.inputs()
    runs, end = 0, time.monotonic() + seconds
    with target.opened() as run:
        while time.monotonic() < end:
            data = made(chance.randbytes(chance.choice(SIZES)))
            runs += 1
            try:
                timed(run)(data)
            except Exception:
                kept(folder / "findings" / target.name, data)
                raise
    sys.stdout.write(f"{runs} runs\n")


def kept(findings: Path, data: bytes) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    (findings / f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)


if __name__ == "__main__":
    main()
