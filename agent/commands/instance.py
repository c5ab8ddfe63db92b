"""`kubectl portranger plan` and `explain`: an instance as the API server tells of it, read with the
eyes of an agent, for its user, who has a kubeconfig and no node. The kernel is never asked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches

from agent.commands.common import BAD_MANIFEST, OK, intents, reported, say_notes, say_plans
from agent.console import Console
from agent.errors import Failure, NotPermitted
from agent.sources.answers import Denied, Missing, Object
from agent.sources.api import Api
from agent.sources.files import Snapshot
from agent.sources.vmis import KIND, MOST_RANGES, place, placed, trimmed
from rules.desired import desire
from rules.manifests import read
from rules.manifests.metadata import is_ours
from rules.model import Address, Machine, Protocol
from rules.problems import dotted
from rules.render import plan_json
from rules.trace import explained
from rules.values import Value, replace

VM = "VirtualMachine"
PLURAL = {KIND: "virtualmachineinstances", VM: "virtualmachines"}
TEMPLATE = ("spec", "template")
BESIDE = (
    "This is as declared. Where KubeVirt's own rules are live in the pod, ours come before them,"
    " and a guard keeps shut what is not declared."
)


class Instance(Value, kw_only=True):
    """What there is of a name."""

    label: str
    namespace: str
    document: Object  # of an instance that is there, or that would be
    snapshot: Snapshot  # what it says

    @property
    def guarded(self) -> bool:
        """Whether ports are declared, so that others stay shut."""
        ours = [machine.masquerade for machine in self.snapshot.machines if machine.masquerade]
        return any(one.claims is not None for one in ours)


def plan(instance: Instance, console: Console, *, output: str = "text") -> int:
    """What an agent would do for it where nothing is yet."""
    problems = reported(instance.snapshot, console)
    found, _ = intents(instance.snapshot, None)
    plans = [intent.plan for intent in found]
    if output == "json":
        console.say_json(plan_json(plans, problems))
    elif not problems:
        say_plans(console, plans)
        say_notes(console, instance.snapshot, found)
        if instance.guarded:
            console.say(BESIDE)
    return BAD_MANIFEST if problems else OK


def explain(
    instance: Instance, console: Console, what: tuple[Protocol, int], sender: Address | None
) -> int:
    """What becomes of a new flow to that port."""
    if reported(instance.snapshot, console):
        return BAD_MANIFEST
    rules = sorted(desire(instance.snapshot.machines, None).rules, key=lambda rule: rule.key)
    console.say(instance.label)
    for line in explained(rules, *what, sender):
        console.say(f"  {line}")
    say_notes(console, instance.snapshot, ())
    if instance.guarded:
        console.say(BESIDE)
    return OK


# ----------------------------------------------------------------------------------- the instance


def fetched(api: Api, namespace: str, name: str, console: Console) -> Instance:
    """The instance of that name, or the one that a VirtualMachine of that name would make."""
    kind, thing = KIND, _got(api, KIND, namespace, name)
    if thing is None:
        kind, thing = VM, _got(api, VM, namespace, name)
        if thing is None:
            raise _nowhere(api, namespace, name)
        console.warn(f"There is no {KIND} {name}: this is what its {VM} declares for the next one.")
        for key in filter(is_ours, of(of(thing, "metadata"), "annotations")):
            at = dotted(("metadata", "annotations", key))
            console.warn(f"{at} does not reach it: write it below spec.template.metadata.")
        thing = _made_from(thing)
    label, document = f"{kind}/{namespace}/{name}", trimmed(thing)
    reading = read(document, netns=label, tenant=True, limit=MOST_RANGES)
    below = TEMPLATE if kind == VM else ()
    problems = [replace(one.at(label, 0), path=(*below, *one.path)) for one in reading.problems]
    machines = [_entered(machine, document) for machine in reading.machines]
    snapshot = Snapshot(machines=tuple(machines), problems=tuple(problems), count=reading.count)
    return Instance(label=label, namespace=namespace, document=document, snapshot=snapshot)


def _got(api: Api, kind: str, namespace: str, name: str) -> Object | None:
    with suppress(Missing), permitted("get", PLURAL[kind], namespace):
        return api.get(f"{_folder(kind, namespace)}/{name}")
    return None


def _folder(kind: str, namespace: str) -> str:
    return f"/apis/kubevirt.io/v1/namespaces/{namespace}/{PLURAL[kind]}"


def _made_from(machine: Object) -> Object:
    """As KubeVirt makes it: with the template's metadata, and nothing of the machine's own."""
    template = of(of(machine, "spec"), "template")
    own = {key: of(machine, "metadata").get(key) for key in ("namespace", "name")}
    metadata = {**of(template, "metadata"), **own}
    made = {"apiVersion": machine.get("apiVersion"), "kind": KIND, "metadata": metadata}
    return {**made, "spec": template.get("spec")}


def _entered(machine: Machine, document: Object) -> Machine:
    """With the link that traffic enters on, where KubeVirt has told it."""
    where = place(document, str(of(document, "status").get("nodeName")))
    return replace(placed(machine, where, ""), netns=machine.netns)


def _nowhere(api: Api, namespace: str, name: str) -> Failure:
    names: set[str] = set()
    for kind in PLURAL:
        try:
            with suppress(Denied):
                listed = api.listed(_folder(kind, namespace), {}, _shortened)
                names |= {str(of(one, "metadata").get("name")) for one in listed.items}
        except Missing:
            return Failure(
                f"the cluster at {api} knows no {kind}", "Name one that has KubeVirt with --context"
            )
    near = get_close_matches(name, names, 3, 0.4) or sorted(names)[:3]
    return Failure(
        f"namespace {namespace} has no {KIND} {name}, and no {VM}",
        f"There is {', '.join(near)}" if near else "Name another namespace with -n",
    )


def _shortened(thing: Object) -> Object:
    return {"metadata": thing["metadata"]} if {"metadata", "spec"} <= thing.keys() else thing


@contextmanager
def permitted(verb: str, what: str, namespace: str) -> Iterator[None]:
    """Who may not do that is told what to ask for."""
    try:
        yield
    except Denied as denied:
        if not denied.known:
            raise
        right = f"the right to {verb} {what} in namespace {namespace}"
        fix = f"Ask for {right}, which the cluster role `view` includes"
        raise NotPermitted(denied.what, fix) from denied


def of(thing: object, key: str) -> Mapping[str, object]:
    """The mapping below a key; none is an empty one."""
    value = thing.get(key) if isinstance(thing, Mapping) else None
    return value if isinstance(value, Mapping) else {}
