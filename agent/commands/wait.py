"""`portranger wait`: returns when the running daemon has applied what files, or a revision, say."""

import time
from collections.abc import Callable, Sequence
from urllib.parse import urlencode

from agent.commands.common import BAD_MANIFEST, OK
from agent.commands.status import LONGEST_LINE, PATIENCE, Busy, Json, address, asked, stranger
from agent.config import Config
from agent.console import Console
from agent.errors import Failure, TryAgain, Usage
from agent.revision import combined, digest
from agent.sources.files import content, each_once, label
from rules.problems import Problem, printable
from rules.words import few

NOT_PUBLISHED = 1
HOLD = 10.0  # seconds that one request waits: longer, and a daemon that hangs is noticed late
AGAIN = 0.2  # seconds until a daemon is asked again that had no room


def wait(  # noqa: PLR0913 - each by its name
    config: Config,
    console: Console,
    *,
    paths: Sequence[str] = (),
    revision: int = 0,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    listen = address(config)
    deadline = clock() + timeout
    query = _files(paths, console)
    if query is None:
        return BAD_MANIFEST
    while True:
        left = max(0.0, deadline - clock())
        hold = min(left, HOLD)
        known = {"revision": revision} if revision else {}
        path = f"/wait?{urlencode([*query, *known.items(), ('timeout', f'{hold:.3f}')])}"
        try:
            answer = asked(listen, config.state_dir, path, hold + PATIENCE)
        except Busy:
            if left <= AGAIN:
                raise
            time.sleep(AGAIN)
            continue
        try:
            code = _told(answer, console)
        except (LookupError, TypeError) as error:
            raise stranger(listen) from error
        if code is not None:
            return code
        if clock() >= deadline:
            raise _late(answer, timeout)
        if not paths:  # of revisions that follow, none is asked for
            revision = answer["revision"] or revision


def _files(paths: Sequence[str], console: Console) -> list[tuple[str, str]] | None:
    """What the files hold now, as the daemon is asked about it; None: one cannot be read."""
    query: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for path in paths:
        if path == "-":
            raise Usage("the daemon does not read standard input", "Name a file, or a directory")
        names = each_once([path])
        pairs: list[tuple[str, str]] = []
        for name in names:
            text = content(name)
            if isinstance(text, Problem):
                problems.append(text)
            else:
                pairs.append((label(name).rpartition("/")[2], digest(text)))
        if names == [path]:
            query += [("file", f"{name}:{sha256}") for name, sha256 in pairs]
        else:
            query.append(("directory", combined(pairs)))
    for problem in problems:
        console.warn(str(problem))
    return None if problems else query


def _told(answer: Json, console: Console) -> int | None:
    """The exit code; None: it is not applied yet."""
    if answer["unsupported"]:
        raise Failure(answer["unsupported"], "Wait without -f, or for a --revision")
    if answer["rejected"]:
        for line in answer["rejected"]:
            console.warn(printable(line, LONGEST_LINE))
        return BAD_MANIFEST
    if not answer["done"]:
        return None
    console.say(f"Revision {answer['revision']} is applied; namespaces: {answer['namespaces']}.")
    for line in answer["refused"]:
        console.warn(f"not published: {printable(line, LONGEST_LINE)}")
    return NOT_PUBLISHED if answer["refused"] else OK


def _late(answer: Json, timeout: float) -> TryAgain:
    reasons = "; ".join(few([printable(one, LONGEST_LINE) for one in answer["waiting"]]))
    after = f"after {timeout:g} s" if timeout else "yet"
    return TryAgain(f"not applied {after}: {reasons or 'no reason given'}")
