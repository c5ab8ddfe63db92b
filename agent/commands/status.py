"""`portranger status`: how the running daemon stands, as it says itself."""

import http.client
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from agent.commands.common import OK
from agent.config import Config, Listen
from agent.console import Console
from agent.errors import Failure, TryAgain
from agent.lock import holder
from agent.status import tally
from rules.problems import printable
from rules.words import counted, few

PATIENCE = 5.0  # seconds
MOST_BYTES = 256 << 20
LONGEST_LINE = 2000
MOST_RANGES = 24  # of one owner, that are written out
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - asked there, not listened on
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Json = dict[str, Any]  # what the daemon sent: another version may have sent less


class Busy(TryAgain):
    """The daemon has no room for another question."""


def status(
    config: Config,
    console: Console,
    *,
    netns: Sequence[str] = (),
    output: str = "text",
    now: float,
) -> int:
    listen = address(config)
    answer = asked(listen, config.state_dir)
    try:
        answer = _of(answer, netns) if netns else answer
    except (AttributeError, LookupError, TypeError) as error:
        raise stranger(listen) from error
    if output == "json":
        console.say_json(answer)
        return OK
    try:
        lines = list(status_text(answer, now))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise stranger(listen) from error
    for line in lines:
        console.say(printable(line, LONGEST_LINE))  # names in it come from tenants
    return OK


def address(config: Config) -> Listen:
    """Where the daemon answers."""
    if config.listen is None:
        raise Failure(
            "the daemon has no address to be asked at",
            'Set listen = "127.0.0.1:9788" in its configuration, and restart it',
        )
    if config.listen.port == 0:
        raise Failure(
            "the daemon listens on a port that only its log tells",
            'Set one: listen = "127.0.0.1:9788"',
        )
    return config.listen


def _of(answer: Json, netns: Sequence[str]) -> Json:
    """What it says, of these namespaces only."""
    known = {one["netns"]: one for one in answer["namespaces"]}
    if lost := [name for name in netns if name not in known]:
        raise Failure(
            f"the daemon keeps no namespace {', '.join(lost)}",
            f"It keeps {', '.join(few(sorted(known)))}" if known else "It keeps none",
        )
    return {**answer, "namespaces": [known[name] for name in dict.fromkeys(netns)]}


def asked(
    listen: Listen, state_dir: str = "", path: str = "/status", patience: float = PATIENCE
) -> Json:
    """What the daemon at that address says of itself; whose lock is in the state directory tells
    one that hangs from one that does not run."""
    connection = http.client.HTTPConnection(
        LOOPBACK.get(listen.host, listen.host), listen.port, timeout=patience
    )
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(MOST_BYTES)
    except (ConnectionResetError, BrokenPipeError) as error:  # it is stopping, or has no room
        late = _unanswered(error, listen, holder(state_dir) if state_dir else "")
        raise Busy(late.what, late.fix) from error
    except (OSError, http.client.HTTPException) as error:
        raise _unanswered(error, listen, holder(state_dir) if state_dir else "") from error
    finally:
        connection.close()
    if response.status == http.client.SERVICE_UNAVAILABLE:
        raise Busy(f"the daemon at {listen} is busy", "Ask again")
    if response.status != http.client.OK:
        raise stranger(listen)
    return _parsed(body, listen)


def stranger(listen: Listen) -> Failure:
    return Failure(
        f"what answers at {listen} is not a daemon of this version, or is broken",
        "See its log; if it listens elsewhere, name its configuration with -c",
    )


def _unanswered(error: Exception, listen: Listen, who: str) -> TryAgain:
    """`who` holds the lock of the daemon's state directory; empty: nobody, or it cannot be read."""
    if who and isinstance(error, TimeoutError):
        return TryAgain(
            f"the daemon ({who}) is running but not responding; see journalctl -u portranger, or "
            "restart it"
        )
    if who and isinstance(error, ConnectionRefusedError):
        return TryAgain(
            f"the daemon ({who}) is running but not listening at {listen}; see journalctl -u "
            "portranger, or name its configuration with -c"
        )
    return TryAgain(
        f"the daemon does not answer at {listen} ({_reason(error)})",
        "Start it with `systemctl start portranger`, or `portranger run`; if it listens "
        "elsewhere, name its configuration with -c",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return printable(str(error), 100) or type(error).__name__


def _parsed(body: bytes, listen: Listen) -> Json:
    try:
        answer = json.loads(body)
        if str(answer["format_version"]).startswith("1."):
            return dict(answer)
    except (KeyError, RecursionError, TypeError, ValueError):
        pass
    raise stranger(listen)


def status_text(answer: Json, now: float) -> Iterator[str]:
    """How it stands, for people."""
    yield _heading(answer, now)
    yield f"namespaces: {tally(one['state'] for one in answer.get('namespaces', ()))}"
    if (revision := answer.get("revision")) and revision.get("wanted"):
        yield f"revision: {_revision(revision)}"
    if answer.get("unreadable"):
        yield f"source: {answer['unreadable']}"
    for key in ("configuration", "state"):
        if answer.get(key):
            yield f"{key}: {answer[key]}"
    if policies := answer.get("policies"):
        yield f"policies: {_policies(policies)}"
    for problem in answer.get("problems", ()):
        yield f"problem: {_problem(problem)}"
    for one in answer.get("last_valid", ()):
        since = since_when(one.get("since"), now)
        yield f"using the last valid version of {one['file']} since {since}"
    for standing in answer.get("namespaces", ()):
        yield ""
        yield from _standing(standing, now)


def _heading(answer: Json, now: float) -> str:
    manifests = counted(answer.get("manifests", 0), "manifest")
    words = [
        f"portranger {answer.get('version')}, pid {answer.get('pid')}",
        f"up since {since_when(answer.get('started'), now)}",
        "ready" if answer.get("ready") else "not ready",
        f"{manifests} from {answer['source']}" if answer.get("source") else manifests,
        counted(len(answer.get("problems", ())), "problem"),
    ]
    return ", ".join(words)


def _revision(revision: Json) -> str:
    """1763441234567, applied."""
    wanted, applied = revision.get("wanted"), revision.get("applied")
    if wanted == applied:
        return f"{wanted}, applied"
    return f"{wanted}, not applied yet" + (f" ({applied} is)" if applied else "")


def _policies(policies: Json) -> str:
    if not policies["enforced"]:
        return "left to the network plugin ([policy] enforce = true enforces them)"
    why = f"; {policies['why']}" if policies.get("why") else ""
    return f"{policies['count']} enforced{why}"


def _problem(problem: Json) -> str:
    place = ":".join(str(problem[key]) for key in ("file", "line") if problem.get(key))
    value = f" (it is {json.dumps(problem['value'])})" if "value" in problem else ""
    words = [place, problem.get("field", ""), f"{problem.get('problem', '')}{value}."]
    return f"{': '.join(filter(None, words))} {problem.get('fix', '')} [{problem.get('code', '')}]"


def _standing(one: Json, now: float) -> Iterator[str]:
    why = f": {one['why']}" if one.get("why") and not _repeated(one) else ""
    yield f"namespace {one['netns']}: {one['state']} since {since_when(one.get('since'), now)}{why}"
    if one.get("backend"):
        yield f"  {one['backend']}: {one.get('reason') or 'as configured'}"
    ranges = one.get("ranges", ())
    beside = ", beside KubeVirt's own" if one.get("mode") == "extend" else ""
    if one["state"] == "unmanaged" and not one.get("rules"):  # there are some: they were not read
        yield f"  portranger show --netns {one['netns']} lists its rules"
    elif one.get("rules") or one["state"] == "in sync":
        count = len({(x["owner"], x.get("protocol"), x.get("ports")) for x in ranges})
        yield f"  {counted(count, 'range')} in {counted(one.get('rules', 0), 'rule')}{beside}"
    yield from (f"    {line}" for line in forwards_text(ranges))
    if change := one.get("last_change"):
        yield f"  last change {ago(change['at'], now)}: {change['what']}"
    if drift := one.get("last_drift"):
        yield f"  {_drift(drift, one.get('drifts', 1), now)}"
    refused = one.get("refused", ())
    for word, listed_ones in (
        ("pending", one.get("pending", ())),
        ("refused", [some for some in refused if not some.get("partly_published")]),
        ("partly published", [some for some in refused if some.get("partly_published")]),
    ):
        said = [f"{some['owner']}: {some['reason']}" for some in listed_ones]
        yield from (f"  {word}: {line}" for line in few(said))
    for note in one.get("notes", ()):
        yield f"  note: {note}"


def _repeated(one: Json) -> bool:
    """Whether what follows says why it stands so."""
    told = (*one.get("pending", ()), *one.get("refused", ()))
    return any(some["reason"] in one["why"] for some in told)


def _drift(drift: Json, drifts: int, now: float) -> str:
    """repaired 3 min ago: nft (pid 123) changed 4 rules."""
    who = drift.get("process") or "somebody"
    pid = f" (pid {drift['pid']})" if drift.get("pid") else ""
    often = f"; {drifts} times in all" if drifts > 1 else ""
    changes = counted(drift["changes"], "rule")
    return f"repaired {ago(drift['at'], now)}: {who}{pid} changed {changes}{often}"


def forwards_text(ranges: Iterable[Json]) -> Iterator[str]:
    """A line for each owner and target; the same ranges of both families share one."""
    claims: dict[tuple[str, str], list[str]] = {}
    for one in ranges:
        what = f"{one['protocol']} {one['ports']}" if one.get("protocol") else "everything"
        to = f"{one['to']} {one['to_port']}" if one.get("to_port") else str(one["to"])
        claims.setdefault((one["owner"], to), []).append(what)
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (owner, to), whats in claims.items():
        shared.setdefault((owner, tuple(sorted(set(whats), key=_place))), []).append(to)
    for (owner, same), targets in shared.items():
        yield f"{owner}: {listed(same)} -> {', '.join(targets)}"


def _place(what: str) -> tuple[str, int]:
    """In the order of protocols, and of ports: udp 1000-8000."""
    protocol, _, ports = what.partition(" ")
    first = ports.partition("-")[0]
    return protocol, int(first) if first.isdecimal() else 0


def listed(what: Sequence[str]) -> str:
    rest = len(what) - MOST_RANGES
    more = f" and {rest} more (-o json tells them)" if rest > 0 else ""
    return ", ".join(what[:MOST_RANGES]) + more


def since_when(moment: str | None, now: float) -> str:
    """2026-11-16 03:52:29 UTC (3 min ago)."""
    if moment is None:
        return "an unknown time"
    written = datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{written} ({ago(moment, now)})"


def ago(moment: str, now: float) -> str:
    seconds = int(now - datetime.fromisoformat(moment).timestamp())
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "just now"
