"""Whether a daemon keeps namespaces that a command has just written to, and so undoes it."""

import time
from collections.abc import Mapping
from contextlib import suppress

from agent.commands.status import asked
from agent.config import Config
from agent.errors import Failure, TryAgain
from agent.kernel.kinds import Kernel
from agent.lock import holder
from agent.reconcile import stands
from agent.status import range_json
from rules.model import Chain, Desired

A_MOMENT = 0.5  # seconds; a daemon repairs in a tenth of it


def undone(written: Mapping[str, Desired], kernel: Kernel, daemon: Config | None) -> list[Failure]:
    """Where a daemon runs that keeps these namespaces otherwise, it has put that back by now, or
    will: it may wait for somebody who keeps changing them, or look at legacy tables seldom."""
    who = holder(daemon.state_dir) if written and daemon else ""
    if not who or daemon is None:
        return []
    time.sleep(A_MOMENT)
    keeps = _kept_by(daemon)
    failures: list[Failure] = []
    for name, desired in written.items():
        what = ""
        with suppress(Failure), kernel.opened(name) as namespace:
            what = "" if stands(name, desired, namespace) else "has undone it in"
        if not what and name in keeps and keeps[name] != _forwards(desired):
            what = "will undo it: other ranges are its own in"
        if what:
            told = f"portranger run ({who}) {what} namespace {name}"
            failures.append(TryAgain(told, "Stop it first, or change its manifests instead"))
    return failures


def _kept_by(daemon: Config) -> dict[str, set[str]]:
    """The ranges of each namespace that a daemon keeps; of one that does not answer, nothing."""
    try:
        answer = asked(daemon.listen) if daemon.listen and daemon.listen.port else {}
        return {
            str(one["netns"]): {str(sorted(some.items())) for some in one["ranges"]}
            for one in answer.get("namespaces", ())
        }
    except (Failure, AttributeError, LookupError, TypeError):
        return {}


def _forwards(desired: Desired) -> set[str]:
    rules = [one for one in desired.rules if one.chain is Chain.PREROUTING and not one.guards]
    return {str(sorted(range_json(one).items())) for one in rules}
