"""The page as a whole: the health line, what is wrong, and how everything stands."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agent.page import namespaces, node_ports
from agent.page.axis import hatching
from agent.page.markup import Html, discreet, element, joined, name
from agent.page.words import ago, clock, counted, day
from agent.status import Policies, State, Status
from rules.problems import Problem

FEW, MOST = 3, 30  # lines of a list that are seen at once; and if it is unfolded
COLOURS = {  # of the icon
    "good": "%232e7d4f",
    "warn": "%23c77700",
    "bad": "%23c0392b",
    "wait": "%237a828c",
}
LINKS = (
    ("metrics", "for Prometheus"),
    ("healthz", "whether the loop is alive"),
    ("readyz", "whether every namespace is served"),
    ("status", "all of this as JSON"),
)


def asset(file: str) -> bytes:
    """One of the files that the page names."""
    return Path(__file__).with_name(file).read_bytes()


def document(status: Status, *, node: str, now: float, stuck: str = "") -> bytes:
    """How everything stands; `node` is whose page it is, and `stuck` why the loop may be dead."""
    kind, words = _health(status, stuck)
    page = element(
        "html",
        _head(node, kind, words),
        element(
            "body",
            element("p", id="away", role="alert", hidden=True),
            hatching(),
            element(
                "div",
                _header(node, kind, words, now),
                element(
                    "main",
                    _attention(status),
                    namespaces.section(status.namespaces, now),
                    node_ports.section(status.allocations),
                    _facts(status, now),
                ),
                _footer(),
                id="live",
            ),
        ),
        lang="en",
        data_version=status.version,
    )
    return f"<!doctype html>\n{page}\n".encode("utf-8", "replace")


def _health(status: Status, stuck: str) -> tuple[str, str]:
    """How serious it is, and the line that everybody reads first."""
    failing = _number(status, State.FAILING)
    if stuck:
        return "bad", f"Not alive: {stuck[:1].lower()}{stuck[1:].rstrip('.')}"
    wrong = _wrong(status)
    if status.unreadable:
        return "bad", ", ".join(["Not ready: the manifests cannot be read", *wrong])
    if failing:
        are = "namespace is" if failing == 1 else "namespaces are"
        return "bad", ", ".join([f"Not ready: {failing:,} {are} failing", *wrong])
    if not status.ready:
        return "wait", ", ".join(["Not ready: not every namespace has been tried yet", *wrong])
    return "warn" if wrong else "good", ", ".join(["Ready", *wrong])


def _wrong(status: Status) -> list[str]:
    """What somebody has to look at although all else is served: 155 problems, 2 in conflict."""
    named = {
        state.value: _number(status, state)
        for state in (State.REFUSED, State.OUTDATED, State.UNMANAGED)
    }
    conflict = _number(status, State.CONFLICT)
    return [
        *(["a configuration that is not in use"] if status.outdated else []),
        *(["a state that cannot be written"] if status.unwritable else []),
        *([counted(len(status.problems), "problem")] if status.problems else []),
        *(f"{number:,} {state}" for state, number in named.items() if number),
        *([f"{conflict:,} in conflict"] if conflict else []),
    ]


def _number(status: Status, state: State) -> int:
    return sum(one.state is state for one in status.namespaces)


def _head(node: str, kind: str, words: str) -> Html:
    circle = f"%3Ccircle cx='8' cy='8' r='6' fill='{COLOURS[kind]}'/%3E"
    svg = f"%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E{circle}%3C/svg%3E"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("title", f"{words.partition(':')[0]} · {node} · portranger"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="robots", content="noindex"),
        element("link", rel="icon", id="icon", href=f"data:image/svg+xml,{svg}"),
        element("link", rel="stylesheet", href="page.css"),
        element("script", src="page.js", defer=True),
    )


def _header(node: str, kind: str, words: str, now: float) -> Html:
    return element(
        "header",
        element("h1", element("span", "portranger", class_="brand"), " ", name(node, 80)),
        element("p", words, class_=f"health state {kind}", id="health"),
        element(
            "p",
            "As of ",
            clock(now),
            element("noscript", " · ", element("a", "Reload", href="")),
            class_="quiet",
            id="as-of",
        ),
    )


# ----------------------------------------------------------------------------- what is wrong


def _attention(status: Status) -> Html | None:
    said = [*_source(status), *_problems(status.problems), *_last_valid(status.last_valid)]
    own = list(_own(status))
    if not said and not own:
        return None
    heading = element("h2", "Manifests") if said else None
    return element("section", own, heading, said, id="attention")


def _own(status: Status) -> Iterable[Html]:
    """What the daemon itself lacks."""
    for title, what in (
        ("The configuration in the file is not in use: ", status.outdated),
        ("The state cannot be written: ", status.unwritable),
    ):
        if what:
            yield element("p", element("strong", title), _sentence(what), class_="callout bad")


def _source(status: Status) -> Iterable[Html]:
    if status.unreadable:
        what = joined(element("strong", "They cannot be read. "), _sentence(status.unreadable))
        yield element("p", what, " What was running goes on.", class_="callout bad")


def _sentence(text: str) -> str:
    """An error of somebody else may end with no stop."""
    said = discreet(text).rstrip()
    return said if said.endswith((".", "!", "?")) else f"{said}."


def _problems(problems: tuple[Problem, ...]) -> Iterable[Html]:
    if not problems:
        return
    shown = [
        element(
            "li",
            element("span", name(one.place), class_="place") if one.place else None,
            element("span", discreet(str(one.at("", 0)))),
        )
        for one in sorted(problems, key=lambda one: (one.file, one.line, one.field))[:MOST]
    ]
    yield element("p", f"{counted(len(problems), 'problem')}:", class_="quiet")
    yield from _folded("problems", shown, len(problems))


def _last_valid(files: Mapping[str, float]) -> Iterable[Html]:
    if files:
        names = [
            element("li", name(file), " since ", day(since))
            for file, since in sorted(files.items())[:MOST]
        ]
        yield element("p", "Using the last valid version of:", class_="quiet")
        yield from _folded("last-valid", names, len(files))


def _folded(key: str, lines: Sequence[Html], number: int) -> Iterable[Html]:
    """The first few of that number of lines, and the others for who asks."""
    yield element("ul", lines[:FEW], class_="problems", id=key)
    if number <= FEW:
        return
    unseen = number - len(lines)
    rest = element("p", f"and {unseen:,} more: portranger status", class_="more")
    yield element(
        "details",
        element("summary", f"and {number - FEW:,} more"),
        element("ul", lines[FEW:], class_="problems"),
        rest if unseen else None,
        id=f"{key}-more",
    )


# ---------------------------------------------------------------------------------- the rest


def _facts(status: Status, now: float) -> Html:
    source = joined(counted(status.manifests, "manifest"), " from ", name(status.source))
    facts: list[tuple[str, str]] = [
        ("Source", source if status.source else "not known yet"),
        ("Policies", discreet(_policies(status.policies))),
        ("Last seen in sync", ago(status.synced, now) if status.synced else "not yet"),
        ("Started", ago(status.started, now)),
        ("Version", f"{status.version}, pid {status.pid}"),
    ]
    rows = [element("div", element("dt", term), element("dd", said)) for term, said in facts]
    return element("section", element("h2", "Daemon"), element("dl", rows), id="daemon")


def _policies(policies: Policies) -> str:
    if not policies.enforced:
        return "left to the network plugin"
    return f"{policies.count:,} enforced" + (f"; {policies.why}" if policies.why else "")


def _footer() -> Html:
    links = [
        element("li", element("a", f"/{path}", href=path), f" {words}") for path, words in LINKS
    ]
    return element("footer", element("ul", links))
