"""Which instance has which pod. KubeVirt writes that into the status of an instance, but does not
keep others from writing there: whoever may edit an instance can name anybody's pod. Pure.
"""

from collections.abc import Callable, Iterable, Mapping

from agent.sources.vmis import KIND, POD
from rules.problems import Problem
from rules.values import Value


class Granted(Value, kw_only=True):
    """Each pod with the instance that has it, and what is wrong with the others."""

    holders: Mapping[str, str]
    problems: tuple[Problem, ...]
    contested: Mapping[str, str]  # namespaces that nobody has, with what is wrong there


def grant(
    named: Mapping[str, Iterable[str]],
    before: Mapping[str, str],
    served: Callable[[str], str] = lambda _: "",
) -> Granted:
    """To every instance the pods that it names; where two name the same it is whose the launcher in
    it serves. Where that is not known it stays with whoever had it before, and of two who did not,
    neither is guessed."""
    wanted: dict[str, list[str]] = {}
    for label, pods in named.items():
        for pod in pods:
            wanted.setdefault(pod, []).append(label)
    holders: dict[str, str] = {}
    problems: list[Problem] = []
    contested: dict[str, str] = {}
    for pod, labels in sorted(wanted.items()):
        holder = labels[0]
        if len(labels) > 1:
            serves = served(pod)
            holder = serves if serves in labels else before.get(pod, "")
        refused = [_contested(label, pod, labels) for label in labels if label != holder]
        if holder in labels:
            holders[pod] = holder
        else:
            contested[f"{POD}{pod}"] = str(refused[0])
        problems += refused
    return Granted(holders=holders, problems=tuple(problems), contested=contested)


def _contested(label: str, pod: str, labels: Iterable[str]) -> Problem:
    others = ", ".join(other for other in labels if other != label)
    return Problem(
        code="pod-claimed-twice",
        path=("status", "activePods", pod),
        what=f"is a pod that {others} names as well",
        fix=f"Find out who wrote it there: a pod belongs to one {KIND}.",
        file=label,
    )
