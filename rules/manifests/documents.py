"""The entry to the manifests: a plain document, as YAML or JSON gives it, is taken apart if it is
a List, and each object in it goes to the reader of its kind."""

from collections.abc import Mapping

from rules.manifests.fields import LONGEST_KEY_COMPARED, MOST_PROBLEMS, Fields, told
from rules.manifests.virtual_machine import KINDS, read_machine
from rules.model import Machine
from rules.policies import Namespace, NetworkPolicy
from rules.problems import Path, Problem, printable
from rules.services import Pod, Service
from rules.values import Value

# All 65535 ports, one by one, of both protocols are still served.
MOST_ENTRIES = 131072
_GROUP = "kubevirt.io"
_VERSIONS = ("v1", "v1alpha1", "v1alpha2", "v1alpha3", "v1beta1")
SERVICE, POD = _CORE = ("Service", "Pod")
NAMESPACE, POLICY = "Namespace", "NetworkPolicy"
_POLICY_GROUPS = ("networking.k8s.io", "extensions")  # the second is where it first was
_ALL_KINDS = (*KINDS, *_CORE, NAMESPACE, POLICY)
_FOLDED_KINDS = {kind.casefold(): kind for kind in _ALL_KINDS}


class Skipped(Value):
    """An object of a kind that is not read."""

    kind: str
    name: str
    path: Path
    api: str = ""  # of one that has the name of a kind that is

    def __str__(self) -> str:
        name = f"{self.kind}/{self.name}" if self.name else self.kind
        of = f" of apiVersion {self.api}" if self.api else ""
        return f"{printable(f'{name}{of}', 320)} is not read by this version"


class Reading(Value, kw_only=True):
    """What a document holds; paths lead from its root."""

    machines: tuple[Machine, ...] = ()
    places: tuple[Path, ...] = ()  # where each machine is written
    services: tuple[Service, ...] = ()
    service_places: tuple[Path, ...] = ()
    pods: tuple[Pod, ...] = ()
    pod_places: tuple[Path, ...] = ()
    policies: tuple[NetworkPolicy, ...] = ()  # the bad ones too: broken, so that they still close
    policy_places: tuple[Path, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    namespace_places: tuple[Path, ...] = ()
    problems: tuple[Problem, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    count: int = 0  # manifests of the kinds we read, the bad ones included

    @property
    def others(self) -> tuple[tuple[NetworkPolicy | Pod | Namespace, Path], ...]:
        """What gets no rules of its own, and where each is written."""
        return (
            *zip(self.policies, self.policy_places, strict=True),
            *zip(self.pods, self.pod_places, strict=True),
            *zip(self.namespaces, self.namespace_places, strict=True),
        )


def read(
    document: object,
    *,
    limit: int = MOST_ENTRIES,
    netns: str | None = None,
    tenant: bool = False,
    most_told: int = MOST_PROBLEMS,
) -> Reading:
    """Read a document of plain values; limit is the most ports and ranges of one interface, and
    most_told of one object's problems. In a tenant's, annotations that are for bare metal are
    refused."""
    machines: list[tuple[Machine, Path]] = []
    services: list[tuple[Service, Path]] = []
    pods: list[tuple[Pod, Path]] = []
    policies: list[tuple[NetworkPolicy, Path]] = []
    namespaces: list[tuple[Namespace, Path]] = []
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    count = 0
    objects = _objects(document, problems)
    problems = told(problems, (), most_told)
    for fields in objects:
        kind = _kind(fields)
        if kind in KINDS and _is_kubevirt(fields):
            count += 1
            machine = read_machine(fields, kind, limit=limit, netns=netns, tenant=tenant)
            machines += [(machine, fields.path)] if machine else []
        elif kind == SERVICE and _is_core(fields):
            from rules.manifests.service import read_service  # none of it for machines alone

            count += 1
            service = read_service(fields, limit=limit)
            services += [(service, fields.path)] if service else []
        elif kind == POD and _is_core(fields):
            from rules.manifests.pod import read_pod

            count += 1
            pod = read_pod(fields, limit=limit)
            pods += [(pod, fields.path)] if pod else []
        elif kind == NAMESPACE and _is_core(fields):
            from rules.manifests.namespace import read_namespace

            count += 1
            namespace = read_namespace(fields)
            namespaces += [(namespace, fields.path)] if namespace else []
        elif kind and _is_policy(fields, kind):
            from rules.manifests.network_policy import read_policy

            count += 1
            policy = read_policy(fields, limit=limit)
            policies += [(policy, fields.path)] if policy else []
        elif kind and not fields.found:
            api = fields.string("apiVersion") if kind in _ALL_KINDS else None
            skipped.append(Skipped(kind, _name(fields), fields.path, api or ""))
        problems += told(fields.found, fields.path, most_told)
    return Reading(
        machines=tuple(machine for machine, _ in machines),
        places=tuple(path for _, path in machines),
        services=tuple(service for service, _ in services),
        service_places=tuple(path for _, path in services),
        pods=tuple(pod for pod, _ in pods),
        pod_places=tuple(path for _, path in pods),
        policies=tuple(policy for policy, _ in policies),
        policy_places=tuple(path for _, path in policies),
        namespaces=tuple(namespace for namespace, _ in namespaces),
        namespace_places=tuple(path for _, path in namespaces),
        problems=tuple(problems),
        skipped=tuple(skipped),
        count=count,
    )


def kinds(document: object) -> list[tuple[str, Path]]:
    """The kind of every object in a document whose ports have spellings, and where it is."""
    return [
        (kind, fields.path)
        for fields in _objects(document, [])
        if isinstance(kind := fields.values.get("kind"), str)
        and ((kind in KINDS and _is_kubevirt(fields)) or (kind in _CORE and _is_core(fields)))
    ]


def _objects(document: object, problems: list[Problem]) -> list[Fields]:
    """The objects in a document, each with a list of its own for its problems."""
    if document is None or document == {}:
        return []
    if not isinstance(document, dict):
        problems.append(_no_object((), document))
        return []
    if not _is_list(document):
        return [Fields(document, (), [])]
    whole = Fields(document, (), problems)
    if "items" not in document:
        whole.missing("items", "the objects of the List")
    objects = []
    for fields in whole.mappings("items"):
        if _is_list(fields.values):
            fields.problem("nested-list", "is a List inside a List", "Put its items in its place.")
        elif fields.values:
            objects.append(Fields(fields.values, fields.path, []))
    return objects


def _is_list(document: Mapping[object, object]) -> bool:
    """Whether it is a List, or one of one kind as the API itself answers: VirtualMachineList."""
    return document.get("kind") in ("List", *(f"{kind}List" for kind in _ALL_KINDS))


def _no_object(path: Path, value: object) -> Problem:
    return Problem(
        code="not-a-mapping",
        path=path,
        what="a manifest must be a mapping",
        fix="Begin with apiVersion:, kind: and metadata:.",
        value=value,
    )


def _kind(fields: Fields) -> str | None:
    kind = fields.string("kind", required=True)
    if kind == "":
        fields.missing("kind", "the kind of the object, such as VirtualMachine")
    elif kind is not None and kind not in _ALL_KINDS and (meant := _meant(kind)):
        what, fix = "is not a kind, but nearly one", f"Write {meant}."
        fields.problem("unknown-kind", what, fix, at=("kind",), value=kind)
    return kind


def _meant(kind: str) -> str:
    """The kind that was probably meant. KubeVirt itself has others that are much like ours."""
    if kind.casefold() in _FOLDED_KINDS or len(kind) > LONGEST_KEY_COMPARED:
        return _FOLDED_KINDS.get(kind.casefold(), "")
    import difflib  # slow to load, and only other kinds need it

    return next(iter(difflib.get_close_matches(kind, _ALL_KINDS, 1, 0.95)), "")


def _is_kubevirt(fields: Fields) -> bool:
    """Whether an object that has one of our kinds is of our API; the oldest do not say."""
    api = fields.string("apiVersion")
    if api is None:
        return True
    group, _, version = api.partition("/")
    return group == _GROUP and version in _VERSIONS


def _is_core(fields: Fields) -> bool:
    """Whether an object is of Kubernetes' own API; Knative has a Service, too."""
    return fields.string("apiVersion") == "v1"


def _is_policy(fields: Fields, kind: str) -> bool:
    """Whether an object is a NetworkPolicy, if perhaps one that we cannot read: such a one must not
    be passed over. Those of network plugins, in groups of their own, are another thing."""
    api = fields.values.get("apiVersion")
    group = api.rpartition("/")[0] if isinstance(api, str) else ""
    return kind.casefold() == POLICY.casefold() and group in ("", *_POLICY_GROUPS)


def _name(fields: Fields) -> str:
    metadata = fields.values.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""
