"""`portranger convert`: manifests with their port ranges in another spelling, in their own text."""

import io
from collections.abc import Callable, Sequence

from agent.commands.common import BAD_MANIFEST, OK
from agent.console import Console
from agent.errors import BadManifest
from agent.sources.edited import edited, together
from agent.sources.files import content, each_once, label, understood
from rules.convert import convert as converted
from rules.manifests import read
from rules.problems import Problem
from rules.words import counted


def convert(paths: Sequence[str], console: Console, *, to: str) -> int:
    texts: list[tuple[str, str]] = []
    problems: list[Problem] = []
    count = 0
    for name in each_once(paths):
        text = content(name, console.stdin)
        if isinstance(text, Problem):
            problems.append(text)
            continue
        said = understood(label(name), text)
        problems += said.problems
        count += said.count
        texts.append((label(name), text))
    for problem in problems:
        console.warn(str(problem))
    if problems:
        console.warn(f"{counted(len(problems), 'problem')} in {counted(count, 'manifest')}.")
        return BAD_MANIFEST
    if isinstance(console.out, io.TextIOWrapper):  # a manifest is UTF-8, whatever the locale
        console.out.reconfigure(encoding="utf-8")
    console.out.write(together([_edited(file, text, to, console) for file, text in texts]))
    return OK


def _edited(file: str, text: str, to: str, console: Console) -> str:
    try:
        return edited(text, _change(file, to, console))
    except RecursionError:
        raise BadManifest(f"{file} is nested too deeply", "Write it more simply") from None


def _change(file: str, to: str, console: Console) -> Callable[[object], object]:
    def change(document: object) -> object:
        for one in read(document).skipped:
            console.warn(f"{file}: {one}, and left as it is")
        return converted(document, to)

    return change
