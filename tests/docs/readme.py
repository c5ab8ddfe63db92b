"""The examples of the README, run; `python -m tests.docs.readme` writes their output into it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "next command of the README"
PREPARE = "mkdir -p /run/netns && mount -t tmpfs none /run/netns"


def commands(text: str) -> list[list[str]]:
    """The commands of each console block: the lines after a dollar sign."""
    return [re.findall(r"^\$ (.*)$", block, re.MULTILINE) for block in BLOCK.findall(text)]


def rendered(text: str) -> str:
    """The README with the output that its commands have now."""
    blocks = commands(text)
    outputs = iter(run([command for block in blocks for command in block]))
    bodies = iter("".join(f"$ {one}\n{next(outputs)}" for one in block) for block in blocks)
    return BLOCK.sub(lambda _: f"```console\n{next(bodies)}```", text)


def run(all_commands: list[str]) -> list[str]:
    """What each command prints, one after the other, on a node of its own."""
    script = "\n".join([PREPARE, *(f"echo {MARK}; {command}" for command in all_commands)])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "bash", "-c", f"exec 2>&1\n{script}"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split(f"{MARK}\n")[1:]


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
