"""How the daemon stands: a value that its loop replaces, and that metrics, health and `portranger
status` read from other threads."""

import enum
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from agent.revision import Revision
from rules.model import Chain, Live, Pending, Rule
from rules.node_ports import Allocations
from rules.ports import PortRange
from rules.problems import Problem
from rules.render import problem_json
from rules.values import Value

Json = dict[str, object]


class State(enum.Enum):
    """How a namespace stands."""

    IN_SYNC = "in sync"
    PENDING = "pending"  # it, or a link or address in it, is not there yet
    FAILING = "failing"  # the last try failed; another follows
    REFUSED = "refused"  # what was found in its place is not to be trusted
    CONFLICT = "conflict"  # some of its manifests are refused for what others of them claim
    OUTDATED = "outdated"  # a manifest of it is invalid, and its last valid version is in use
    UNMANAGED = "unmanaged"  # it holds rules that no valid manifest declares


def tally(states: Iterable[str]) -> str:
    """How many are in each: 3 in sync, 1 pending. A newer daemon may know more states."""
    counts = dict.fromkeys((state.value for state in State), 0)
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"


class Drift(Value, kw_only=True):
    """Somebody else's change that was undone."""

    at: float
    process: str = ""  # "" where nobody told us
    pid: int = 0
    changes: int


class Change(Value):
    """What we did last."""

    at: float
    what: str


class Standing(Value, kw_only=True):
    """One namespace; times are seconds of the epoch."""

    netns: str
    state: State
    since: float  # it is in that state
    why: str = ""
    backend: str = ""
    reason: str = ""
    live: tuple[Live, ...] = ()  # as last seen
    identity: object = None  # which namespace had that name when it was seen
    beside: bool = False  # KubeVirt's own chains are live there
    pending: tuple[Pending, ...] = ()
    refused: tuple[Pending, ...] = ()  # what would take what is somebody else's
    notes: tuple[str, ...] = ()
    unmanaged: tuple[str, ...] = ()  # owners of rules that no valid manifest declares
    change: Change | None = None
    drift: Drift | None = None
    drifts: int = 0

    @property
    def ranges(self) -> tuple[Live, ...]:
        """What is forwarded from outside."""
        return tuple(
            one for one in self.live if one.rule.chain is Chain.PREROUTING and not one.rule.guards
        )


class Policies(Value, kw_only=True):
    """What becomes of NetworkPolicies."""

    enforced: bool = False  # else the network plugin may do it
    count: int = 0  # that are known
    why: str = ""  # they are not, or nothing new of them


class Status(Value, kw_only=True):
    """The whole node."""

    version: str
    pid: int
    started: float
    ready: bool = False  # every namespace was tried since the start or the last reload
    synced: float | None = None  # when, at a look, all of it was last in sync or waiting
    revision: Revision = Revision()
    source: str = ""
    unreadable: str = ""  # why the source cannot be read, where it cannot
    outdated: str = ""  # why the configuration is another than the one in the file
    unwritable: str = ""  # why the state cannot be written, where it cannot
    manifests: int = 0
    problems: tuple[Problem, ...] = ()
    last_valid: Mapping[str, float] = MappingProxyType({})  # files whose last valid version is in
    # use, since the time at which they were found invalid
    policies: Policies = Policies()
    traffic: Mapping[str, int] = MappingProxyType({})  # with the source, in numbers
    allocations: Allocations | None = None  # of node ports; None: an API server gives them
    namespaces: tuple[Standing, ...] = ()


def status_json(status: Status) -> Json:
    """The answer to `portranger status -o json`."""
    return {
        "format_version": "1.0",
        "version": status.version,
        "pid": status.pid,
        "started": moment(status.started),
        "ready": status.ready,
        "last_sync": moment(status.synced),
        "revision": _revision_json(status.revision),
        "source": status.source,
        "unreadable": status.unreadable or None,
        "configuration": status.outdated or None,
        "state": status.unwritable or None,
        "manifests": status.manifests,
        "problems": [problem_json(problem) for problem in status.problems],
        "last_good": sorted(status.last_valid),
        "last_valid": [
            {"file": file, "since": moment(since)}
            for file, since in sorted(status.last_valid.items())
        ],
        "policies": _policies_json(status.policies),
        "node_ports": status.allocations and _allocations_json(status.allocations),
        "namespaces": [_standing_json(standing) for standing in status.namespaces],
    }


def _revision_json(revision: Revision) -> Json:
    flows = dict.fromkeys(revision.unflushed, "flows are not flushed yet")
    return {
        "wanted": revision.wanted or None,
        "applied": revision.applied or None,
        "unapplied": [
            {"netns": netns, "why": why}
            for netns, why in sorted({**flows, **revision.unapplied}.items())
        ],
    }


def _policies_json(policies: Policies) -> Json:
    why: Json = {"why": policies.why} if policies.why else {}
    return {"enforced": policies.enforced, "count": policies.count, **why}


def _allocations_json(known: Allocations) -> Json:
    bands = known.bands
    return {
        "range": str(bands.ports),
        "static": _band_json(known, bands.lower) if bands.lower else None,
        "dynamic": _band_json(known, bands.upper),
        "held": [
            {
                "owner": holder.owner,
                "port": holder.port or None,
                "protocol": holder.protocol.value,
                "ports": str(ports),
            }
            for holder, ports in known.pairs
        ],
    }


def _band_json(known: Allocations, band: PortRange) -> Json:
    return {"ports": str(band), "available": known.available(band)}


def _standing_json(standing: Standing) -> Json:
    return {
        "netns": standing.netns,
        "state": standing.state.value,
        "since": moment(standing.since),
        "why": standing.why or None,
        "backend": standing.backend or None,
        "reason": standing.reason or None,
        "mode": ("extend" if standing.beside else "own") if standing.live else None,
        "rules": len(standing.live),
        "ranges": [range_json(one.rule) for one in standing.ranges],
        "pending": [{"owner": one.owner, "reason": one.reason} for one in standing.pending],
        "refused": [
            {"owner": one.owner, "reason": one.reason, "partly_published": one.partly}
            for one in standing.refused
        ],
        "notes": list(standing.notes),
        "unmanaged": list(standing.unmanaged),
        "last_change": standing.change
        and {"at": moment(standing.change.at), "what": standing.change.what},
        "last_drift": standing.drift and _drift_json(standing.drift),
        "drifts": standing.drifts,
    }


def range_json(rule: Rule) -> Json:
    """What is forwarded from outside by a rule."""
    return {
        "owner": rule.owner,
        "family": rule.family.value,
        "protocol": rule.protocol.value if rule.protocol else None,
        "ports": str(rule.ports) if rule.ports else None,
        "to": str(rule.to),
        "to_port": str(rule.to_ports) if rule.to_ports else None,
    }


def _drift_json(drift: Drift) -> Json:
    return {
        "at": moment(drift.at),
        "process": drift.process or None,
        "pid": drift.pid or None,
        "changes": drift.changes,
    }


def moment(seconds: float | None) -> str | None:
    """A time as scripts and people read it."""
    if seconds is None:
        return None
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
