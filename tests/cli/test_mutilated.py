"""Two thousand manifests, whole and mutilated, through validate and plan: never a traceback."""

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.commands.plan import plan
from agent.commands.validate import validate
from agent.console import Console

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.yaml"))
JUNK: list[object] = [
    None,
    True,
    "",
    "-1",
    "0x10",
    0,
    -1,
    65536,
    10**30,
    1.5,
    [],
    {},
    [[]],
    {"a": 1},
    "é\u2028\0",
    "*x",
]
SCRAPS = [
    "\t",
    ": ",
    "- ",
    "*a",
    "&a ",
    "!!python/object:os.system ",
    "<<: *a",
    "{",
    "]",
    '"',
    "\x07",
    "0o17",
]
COUNT = 2000


def of_text(chance: random.Random, text: str) -> str:
    """The text with lines lost, doubled, swapped or soiled."""
    lines = text.splitlines(keepends=True)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(lines))
        damage = chance.randrange(5)
        if damage == 0 and len(lines) > 1:
            del lines[at]
        elif damage == 1:
            lines.insert(at, lines[at])
        elif damage == 2:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif damage == 3:
            place = chance.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + chance.choice(SCRAPS) + lines[at][place:]
        else:
            lines[at] = lines[at].replace("0", str(chance.choice(JUNK)), 1)
    return "".join(lines)


def of_values(chance: random.Random, text: str) -> str:
    """The same document as JSON, with some values replaced, lost or moved."""
    import yaml

    document = yaml.safe_load(text)
    for _ in range(chance.randint(0, 3)):
        holder, node = None, document
        while isinstance(node, dict | list) and node and (holder is None or chance.random() < 0.8):
            key = (
                chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
            )
            holder, node = (node, key), node[key]
        if holder is not None:
            place, key = holder
            if chance.random() < 0.2:
                del place[key]
            else:
                place[key] = chance.choice(JUNK)
    return json.dumps(document)


@pytest.mark.parametrize("damage", [of_text, of_values], ids=lambda damage: damage.__name__)
def test_no_manifest_makes_a_command_fail_otherwise_than_it_says(
    damage: Callable[[random.Random, str], str],
) -> None:
    chance = random.Random(168)
    codes: Counter[int] = Counter()
    for number in range(COUNT // 2):
        original = EXAMPLES[number % len(EXAMPLES)].read_text()
        content = damage(chance, original).encode(errors="surrogatepass")
        for command in (validate, planned):
            out, err = io.StringIO(), io.StringIO()
            code = command(["-"], Console(out, err, lambda content=content: content))  # type: ignore[misc]
            codes[code] += 1
            assert bool(code) == bool(err.getvalue()) or "not read" in err.getvalue()
            assert all(line.isprintable() for line in err.getvalue().splitlines())
    assert set(codes) == {0, 65}
    assert min(codes.values()) > COUNT // 20


def planned(paths: list[str], console: Console) -> int:
    return plan(paths, console, kernel=None)
