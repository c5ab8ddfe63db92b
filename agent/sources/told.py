"""An object as an API server tells of it: who it is, and what of it concerns us, also to be stored.
Pure."""

import json
from collections.abc import Callable, Iterable, Mapping

from agent.sources.answers import Object
from agent.sources.boundary import FAULT, fault_of, guarded
from rules.problems import Problem
from rules.values import Value

MOST_PROBLEMS = 100  # of one object: a tenant writes it, and every node holds and logs them
IDENTITY = ("namespace", "name", "uid", "resourceVersion")


class Reference(Value, kw_only=True):
    """Which object an event is about."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    api_version: str = "kubevirt.io/v1"
    kind: str = "VirtualMachineInstance"


class Told(Value, kw_only=True):
    """One object, as last heard of."""

    api: str
    kind: str
    namespace: str
    name: str
    uid: str
    version: str  # of the object
    text: str  # what concerns us, as JSON; the same as long as nothing of it changes
    annotated: bool  # whether an annotation of ours is on it, be it misspelt
    fault: str = ""  # a bug of ours that it met before it could be read

    @property
    def label(self) -> str:
        """Its name in messages, as that of what it declares."""
        return f"{self.kind}/{self.namespace}/{self.name}"

    @property
    def content(self) -> tuple[str, str]:
        """By which it is told whether there is something new in it."""
        return self.uid, self.text

    @property
    def reference(self) -> Reference:
        return Reference(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            resource_version=self.version,
            api_version=self.api,
            kind=self.kind,
        )


def named(thing: Mapping[str, object], api: str, kind: str) -> Told | None:
    """What a trimmed object of that kind is; None where it is none that could be named."""
    metadata = dict(mapping(thing, "metadata"))
    version = metadata.pop("resourceVersion", "")
    names = [metadata.get(key) for key in ("namespace", "name", "uid")]
    if not all(isinstance(one, str) and one for one in names):
        return None
    namespace, name, uid = map(str, names)
    return Told(
        api=api,
        kind=kind,
        namespace=namespace,
        name=name,
        uid=uid,
        version=str(version),
        text=json.dumps({**thing, "metadata": metadata}, sort_keys=True, separators=(",", ":")),
        annotated=bool(mapping(metadata, "annotations")),
        fault=fault_of(thing),
    )


Heard = Callable[[Object], Told | None]


def carefully(heard: Heard, api: str, kind: str) -> Heard:
    """The same, but that a bug met in an object leaves its name, and the bug."""

    def tried(thing: Object) -> Told | None:
        found = guarded(lambda: heard(thing), "")
        if not isinstance(found, Problem):
            return found
        return named({"metadata": identity(thing), FAULT: found.what}, api, kind)

    return tried


def identity(thing: Mapping[str, object]) -> Object:
    """What tells an object from others."""
    return some(mapping(thing, "metadata"), IDENTITY)


def kept(what: str, text: str) -> str:
    """What to store of an object: as no manifest, so that nobody takes it for one."""
    return f"{_opening(what)}{text}}}"


def is_kept(what: str, text: str) -> bool:
    """Whether a text was stored as that."""
    return text.startswith(_opening(what))


def recalled(what: str, text: str) -> Object | None:
    """The object that an earlier run stored as that; None where it is none."""
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError):
        return None
    document = stored.get(what) if isinstance(stored, dict) else None
    return document if isinstance(document, dict) else None


def _opening(what: str) -> str:
    return f'{{"{what}":'


def name_of(thing: Mapping[str, object]) -> str:
    """Namespace and name of an object, as far as it has them."""
    metadata = mapping(thing, "metadata")
    return f"{metadata.get('namespace')}/{metadata.get('name')}"


def mapping(thing: Mapping[str, object], key: str) -> Mapping[str, object]:
    """What is at a key, if it is a mapping."""
    value = thing.get(key)
    return value if isinstance(value, dict) else {}


def mappings(thing: Mapping[str, object], key: str) -> list[Object]:
    """The mappings in the list at a key."""
    value = thing.get(key)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def some(thing: Mapping[str, object], keys: Iterable[str]) -> Object:
    """What is at these keys, as far as they are there."""
    return {key: thing[key] for key in keys if key in thing}
