"""Texts that are small or simple, and would be endless or enormous if one took them at their word:
each is refused within seconds and a few hundred megabytes."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
MEMORY = 700 * MIB  # of addresses, of which Python and its libraries map a good part
SECONDS = 30  # of processor time; on a quiet machine none takes two
MOST_SAID = 4 * MIB

MACHINE = """\
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: x, annotations: {portranger.io/port-ranges: "%s"}}
spec:
  domain: {devices: {interfaces: [{name: a, masquerade: {}%s}]}}
  networks: [{name: a, pod: {}}]
"""


def nested(levels: int, inner: str) -> str:
    """Each level names the one before it nine times."""
    steps = (f"a{n}: &a{n} {inner % ((f'*a{n - 1}',) * 9)}\n" for n in range(1, levels))
    return "a0: &a0 {k: v}\n" + "".join(steps)


LIST = "[" + ",".join(["%s"] * 9) + "]"
MAPPING = "{" + ",".join(f"k{n}: %s" for n in range(8)) + ", <<: %s}"
KEYS = ",".join(f"k{n}: v" for n in range(2000))
BOMBS = {
    "aliases of aliases": nested(20, LIST),
    "merges of merges": nested(12, MAPPING),
    "one mapping merged into many": f"a: &a {{{KEYS}}}\nb:\n" + "- {<<: [*a, *a, *a, *a]}\n" * 400,
    "lists in lists": "[" * 200_000,
    "lists in lists, closed": "[" * 200_000 + "]" * 200_000,
    "mappings in mappings": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "keys of keys": "? " * 100_000,
    "indentation": "".join(" " * depth + "a:\n" for depth in range(2000)),
    "one long text": "a: " + "x" * (16 * MIB),
    "a long number in JSON": '{"a": ' + "9" * (8 * MIB) + "}",
    "a long number": "a: " + "9" * (8 * MIB),
    "a number in base sixty": "a: " + "1:" * (4 * MIB) + "1",
    "a long fraction": "a: 1." + "0" * (8 * MIB) + "e5",
    "tabs": "\t" * (16 * MIB),
    "an annotation of commas": MACHINE % ("," * (16 * MIB), ""),
    "ports that are none": MACHINE % ("", ", ports: [" + "{port: 0}," * 60_000 + "]"),
    "the same machine": (MACHINE % ("22", "") + "---\n") * 500,
    "too large": "x" * (32 * MIB + 1),
}


def few_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def told(text: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a command says of the text, with few resources."""
    path = folder / "bomb.yaml"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "agent.entry", *words, "-f", str(path)],
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
        check=False,
        preexec_fn=few_resources,
    )


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    done = told(BOMBS[name], tmp_path, "validate")
    assert done.returncode == 65, done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < MOST_SAID, done.stderr[:500]
    assert " in " in done.stderr.splitlines()[-1]  # 1 problem in 1 manifest.


POLICY = """\
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: large}
spec:
  podSelector: {}
  %s: [%s]
"""


def listed(count: int, entry: str, step: int = 1) -> str:
    """So many entries, each with a number and the two bytes of it."""
    numbers = range(1, count * step, step)
    return ",".join(entry.format(n=n, at=f"10.{n >> 8}.{n & 255}") for n in numbers)


PORTS = listed(2000, "{{port: {n}}}", step=2)
BLOCKS = listed(2000, "{{ipBlock: {{cidr: {at}.0/25}}}}")
SELECTED = "from: [{{podSelector: {{matchLabels: {{a: b{n}}}}}}}]"
LARGE = {
    "ports": ("ingress", f"{{ports: [{listed(30_000, '{{port: {n}}}', step=2)}]}}"),
    "ports for many": ("ingress", f"{{ports: [{PORTS}], from: [{BLOCKS}]}}"),
    "rules": ("ingress", listed(3000, f"{{{{ports: [{{{{port: {{n}}}}}}], {SELECTED}}}}}")),
    "exceptions": (
        "ingress",
        f"{{from: [{{ipBlock: {{cidr: 10.0.0.0/8, except: [{listed(4000, '{at}.0/25')}]}}}}]}}",
    ),
    "names": ("egress", f"{{ports: [{listed(4000, '{{port: n{n}}}')}]}}"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_policy_is_planned_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    text = MACHINE % ("1-65535", "") + POLICY % LARGE[name]
    done = told(text, tmp_path, "plan", "--against", "empty")
    assert done.returncode == 0, done.stderr[-500:]
    assert "only what NetworkPolicy/default/large allow" in done.stdout
