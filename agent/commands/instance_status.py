"""`kubectl portranger status`: where an instance is, what it declares, and what the agents have
said of that, which is all that can be known of a node from afar."""

from collections.abc import Iterator, Sequence

from agent.commands.common import failed
from agent.commands.instance import Instance, of, permitted
from agent.commands.status import LONGEST_LINE, ago, listed, since_when
from agent.console import Console
from agent.errors import Failure, NotPermitted
from agent.sources.api import Api
from agent.sources.feedback import COMPONENT
from agent.sources.meaning import Tiding
from agent.sources.vmis import FINAL
from rules.desired import claimed
from rules.model import FORWARDED, Machine
from rules.problems import printable
from rules.render import FORMAT_VERSION, problem_json
from rules.values import Value

APPLIED, REJECTED = Tiding.APPLIED.value, Tiding.REJECTED.value
BEGINNING = 200  # characters of a problem by which an event is known that tells of it
REFUSED = (Tiding.CONFLICT.value, Tiding.REFUSED.value)


class Said(Value, kw_only=True, order=True):
    """Something that an agent said of an instance."""

    last: str
    version: int  # of what was said in the same second, the later has the higher
    first: str
    node: str
    reason: str
    message: str
    count: int


def status(api: Api, instance: Instance, console: Console, *, output: str, now: float) -> int:
    denied: list[NotPermitted] = []
    said: list[Said] = []
    try:
        said = heard(api, instance)
        state, words = concluded(instance, said, now)
    except NotPermitted as failure:
        denied = [failure]
        state, words = "unknown", "what the agents have said cannot be read"
    if output == "json":
        console.say_json(_json(instance, said) | {"state": state, "conclusion": words})
    else:
        for line in (*_text(instance, said, now), words):
            console.say(printable(line, LONGEST_LINE))  # anybody may have written it
    return failed(console, denied)


def heard(api: Api, instance: Instance) -> list[Said]:
    """What agents have said of it, the newest last."""
    uid = of(instance.document, "metadata").get("uid")
    if not uid:  # it is yet to be made
        return []
    query = {"fieldSelector": f"involvedObject.uid={uid},source={COMPONENT}"}
    with permitted("list", "events", instance.namespace):
        listed = api.listed(f"/api/v1/namespaces/{instance.namespace}/events", query)
    try:
        return sorted(map(_said, listed.items))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise Failure(f"{api} told of events that are none") from error


def _said(event: object) -> Said:
    fields = dict(event) if isinstance(event, dict) else {}
    metadata = of(event, "metadata")
    last, first = (
        str(fields.get(key) or metadata.get("creationTimestamp"))
        for key in ("lastTimestamp", "firstTimestamp")
    )
    for moment in (last, first):
        ago(moment, 0.0)  # whether it is one
    return Said(
        last=last,
        version=int(str(metadata.get("resourceVersion"))),
        first=first,
        node=str(of(event, "source").get("host") or ""),
        reason=str(fields.get("reason")),
        message=str(fields.get("message")),
        count=int(fields.get("count") or 1),
    )


# ------------------------------------------------------------------------------------- conclusion


def concluded(instance: Instance, said: Sequence[Said], now: float) -> tuple[str, str]:
    """How it stands, in a word and in a sentence."""
    ours = next((one for one in instance.snapshot.machines if one.masquerade), None)
    node, phase = _where(instance)
    here = [one for one in said if one.node == node]
    if instance.snapshot.problems:
        problems = tuple(str(one.at("", 0))[:BEGINNING] for one in instance.snapshot.problems)
        told = [x for x in here if x.reason == REJECTED and x.message.startswith(problems)]
        when = f"rejected since {since_when(told[-1].first, now)}" if told else "to be rejected"
        return "rejected", f"{when}: what was forwarded before stays, if anything was"
    if ours is None:
        return "not ours", "nothing of it is ours to forward"
    if not node or phase in FINAL:
        return "not running", "not running: it is forwarded to while it runs"
    if here and here[-1].reason in REFUSED:
        return "refused", f"refused {ago(here[-1].last, now)}: {here[-1].message}"
    applied = [one for one in here if one.reason == APPLIED]
    if applied:
        since = since_when(applied[-1].last, now)
        if is_told(applied[-1].message, ours):
            return "forwarded", f"forwarded since {since}"
        return "waiting", f"declared anew, and node {node} forwards what was declared at {since}"
    if not instance.guarded:
        return "open", "no port is declared, so all are forwarded: by KubeVirt, or by an agent"
    return "unknown", (
        f"no word from an agent: is portranger running on node {node}? (What was said is forgotten"
        " after an hour; `portranger status` there tells what holds.)"
    )


def is_told(message: str, machine: Machine) -> bool:
    """Whether an agent says that it forwards just what is declared; of many ranges it names some,
    and none of those that are for a proxy to forward."""
    told = message.removeprefix("forwards ").rpartition(" in ")[0].split(", ")
    wanted = _declared(machine)
    if machine.masquerade and machine.masquerade.proxied:
        return True
    if told[-1] == f"{len(wanted)} in all":
        return set(told[:-1]) < set(wanted)
    return set(told) == set(wanted or ["nothing"])


def _declared(machine: Machine) -> list[str]:
    masquerade = machine.masquerade
    if masquerade and masquerade.claims is None and not masquerade.reserved:
        return ["everything"]
    return [f"{one.value} {ports}" for one in FORWARDED for ports in claimed(machine, one)]


# ----------------------------------------------------------------------------------------- output


def _where(instance: Instance) -> tuple[str, str]:
    status = of(instance.document, "status")
    return str(status.get("nodeName") or ""), str(status.get("phase") or "not running")


def _pods(instance: Instance) -> dict[str, str]:
    pods = of(of(instance.document, "status"), "activePods")
    return {uid: str(node) for uid, node in sorted(pods.items())}


def _text(instance: Instance, said: Sequence[Said], now: float) -> Iterator[str]:
    node, phase = _where(instance)
    yield f"{instance.label}: {phase}{f' on {node}' if node else ''}"
    for uid, home in _pods(instance).items():
        yield f"  pod {uid} on {home}"
    for problem in instance.snapshot.problems:
        yield f"  problem: {problem.at('', 0)}"
    for machine in instance.snapshot.machines:
        if machine.masquerade:
            yield f"  declares {listed(_declared(machine)) or 'nothing'}"
        for other in machine.not_ours:
            yield f"  not ours: {other.interface}: {other.reason}"
    for one in said:
        often = f" ({one.count} times)" if one.count > 1 else ""
        yield f"  {ago(one.last, now)}, {one.node}: {one.reason}: {one.message}{often}"


def _json(instance: Instance, said: Sequence[Said]) -> dict[str, object]:
    node, phase = _where(instance)
    machines = instance.snapshot.machines
    keys = ("first", "last", "count", "node", "reason", "message")
    return {
        "format_version": FORMAT_VERSION,
        "instance": instance.label,
        "node": node or None,
        "phase": phase,
        "pods": _pods(instance),
        "declared": [words for machine in machines for words in _declared(machine)],
        "not_ours": {one.interface: one.reason for it in machines for one in it.not_ours},
        "problems": [problem_json(problem) for problem in instance.snapshot.problems],
        "events": [{key: getattr(one, key) for key in keys} for one in said],
    }
