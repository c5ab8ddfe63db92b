"""A VirtualMachineInstance as the API server tells of it, cut down to what concerns us: an object
of 30 KB leaves one or two, as a text that is compared, kept and stored. Pure.
"""

import json
import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_network

from agent.sources import told
from agent.sources.answers import Object
from agent.sources.boundary import FAULT, fault_of, guarded
from agent.sources.told import MOST_PROBLEMS, Reference, mapping, mappings, some
from rules.manifests import read
from rules.manifests.metadata import PORT_END, PORT_RANGES
from rules.manifests.neighbours import INJECT
from rules.manifests.networks import CIDRS
from rules.model import Guest, Machine, Masquerade, is_link_name
from rules.policies import Labels
from rules.problems import Problem, shown
from rules.values import Value, replace

KIND = "VirtualMachineInstance"
PATH = "/apis/kubevirt.io/v1/virtualmachineinstances"
NODE = "kubevirt.io/nodeName"
TARGET = "kubevirt.io/migrationTargetNodeName"  # there while a migration to that node lasts
# Labels that KubeVirt gives the pod of every instance, beside the instance's own.
APP, CREATED_BY = "kubevirt.io", "kubevirt.io/created-by"
HOST, INSTANCE = "vm.kubevirt.io/name", "vmi.kubevirt.io/id"
LAUNCHER = "virt-launcher"
FINAL = ("Succeeded", "Failed")
MOST_RANGES = 1024  # and ports of one instance: all on a node share its memory
MOST_PODS = 64  # of one instance on a node: two while it migrates, and what nobody has cleared away
POD = "pod:"
STORED = "instance"

# Of what is not named here nothing is kept; how a network card looks to the guest is KubeVirt's.
_METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp", "labels")
_APPEARANCE = ("acpiIndex", "bootOrder", "dhcpOptions", "macAddress", "model", "pciAddress", "tag")
_STATUS = ("activePods", "migrationTransport", "nodeName", "phase")
_MIGRATION = ("completed", "failed", "sourceNode", "targetNode")
_INTERFACE = ("name", "podInterfaceName")
_PORTS = ("ports", "portRanges")
_LONGEST_LABEL = 63
_UID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Vmi(Value, kw_only=True):
    """One instance, as last heard of."""

    namespace: str
    name: str
    uid: str
    version: str  # of the object; as text, because it is the server's business
    text: str  # what concerns us, as JSON; the same as long as nothing of it changes
    deleted: bool = False  # somebody wants it gone
    fault: str = ""  # a bug of ours that it met before it could be read

    @property
    def label(self) -> str:
        """Its name in messages, where a manifest has that of its file."""
        return f"{KIND}/{self.namespace}/{self.name}"

    @property
    def reference(self) -> Reference:
        return Reference(
            namespace=self.namespace, name=self.name, uid=self.uid, resource_version=self.version
        )

    def newer(self, other: "Vmi") -> bool:
        """Whether this is the later word; of two that cannot be told apart, it is."""
        return _number(self.version) >= _number(other.version)


class Place(Value):
    """Where an instance is on a node, and what it is selected by there."""

    pods: tuple[str, ...]  # their UIDs
    links: Mapping[str, str]  # by interface, the link of the pod that it is connected to
    odd: tuple[str, ...]  # what is not right about the pods that are named
    labels: Labels = ()


def trimmed(thing: Object) -> Object:
    """For whoever decodes JSON: an instance becomes what concerns us as soon as it is decoded, so
    that never more than one is there as a whole."""
    if thing.get("kind") != KIND or not isinstance(thing.get("metadata"), dict):
        return thing
    metadata = mapping(thing, "metadata")
    annotations = mapping(metadata, "annotations")
    ours = {key: annotations[key] for key in annotations if _concerns_us(key)}
    spec, status = mapping(thing, "spec"), mapping(thing, "status")
    devices = mapping(mapping(spec, "domain"), "devices")
    interfaces = [_without(one, _dropped(one)) for one in mappings(devices, "interfaces")]
    kept_devices = some(devices, ("autoattachPodInterface",))
    if interfaces:
        kept_devices["interfaces"] = interfaces
    kept_status = some(status, _STATUS)
    if found := [some(one, _INTERFACE) for one in mappings(status, "interfaces")]:
        kept_status["interfaces"] = found
    if migration := some(mapping(status, "migrationState"), _MIGRATION):
        kept_status["migrationState"] = migration
    kept_metadata = some(metadata, _METADATA)
    if ours:
        kept_metadata["annotations"] = ours
    return {
        **some(thing, ("apiVersion", "kind")),
        "metadata": kept_metadata,
        "spec": {**some(spec, ("hostname", "networks")), "domain": {"devices": kept_devices}},
        "status": kept_status,
    }


def _dropped(interface: Mapping[str, object]) -> tuple[str, ...]:
    """What is not kept of an interface; of its states, one matters: it is being unplugged."""
    return _APPEARANCE if interface.get("state") == "absent" else (*_APPEARANCE, "state")


def heard(thing: Mapping[str, object]) -> Vmi | None:
    """The instance that a trimmed object is; None where it is none that could be named."""
    metadata = dict(mapping(thing, "metadata"))
    version, deleted = metadata.pop("resourceVersion", ""), metadata.pop("deletionTimestamp", None)
    names = [metadata.get(key) for key in ("namespace", "name", "uid")]
    if not all(isinstance(one, str) and one for one in names):
        return None
    namespace, name, uid = map(str, names)
    return Vmi(
        namespace=namespace,
        name=name,
        uid=uid,
        version=str(version),
        text=json.dumps({**thing, "metadata": metadata}, sort_keys=True, separators=(",", ":")),
        deleted=deleted is not None,
        fault=fault_of(thing),
    )


def carefully_heard(thing: Object) -> Vmi | None:
    """The same, but that a bug met in an instance leaves who and where it is, and the bug."""
    found = guarded(lambda: heard(thing), "")
    if not isinstance(found, Problem):
        return found
    metadata = {**told.identity(thing), **some(mapping(thing, "metadata"), ("labels",))}
    return heard({"metadata": metadata, "status": mapping(thing, "status"), FAULT: found.what})


def decoded(text: str) -> Object:
    """What the text of an instance says."""
    document = json.loads(text)
    return document if isinstance(document, dict) else {}


def understood(vmi: Vmi, document: Object) -> tuple[tuple[Machine, ...], tuple[Problem, ...]]:
    """The machine that it declares, not placed anywhere yet, and what is wrong with it."""
    reading = read(
        document, netns=vmi.label, tenant=True, limit=MOST_RANGES, most_told=MOST_PROBLEMS
    )
    problems = tuple(problem.at(vmi.label, 0) for problem in reading.problems)
    return tuple(replace(one, origin=f"{vmi.label}:0") for one in reading.machines), problems


def closed(vmi: Vmi, document: Object) -> tuple[Machine, ...]:
    """What is to be made of an instance that cannot be understood; where that meets a bug, too, or
    nobody knows what it declares, a machine that is only there to be guarded."""
    found = guarded(lambda: shut(vmi, document), vmi.label)
    if not isinstance(found, Problem) and "spec" in document:
        return found
    networks = [ip_network(text) for _, _, text in CIDRS]
    guests = tuple(Guest(one[2], one[1]) for one in networks)
    masquerade = Masquerade(name="default", entry=None, guests=guests, claims=())
    return (
        Machine(
            kind=KIND,
            namespace=vmi.namespace,
            name=vmi.name,
            netns=vmi.label,
            masquerade=masquerade,
            origin=f"{vmi.label}:0",
        ),
    )


def shut(vmi: Vmi, document: Object) -> tuple[Machine, ...]:
    """The same machine without a port: what is to be made of one that declares some, in a way that
    cannot be understood. None, where it declares none or is no machine either way."""
    metadata, spec = mapping(document, "metadata"), mapping(document, "spec")
    annotations = mapping(metadata, "annotations")
    devices = mapping(mapping(spec, "domain"), "devices")
    interfaces = mappings(devices, "interfaces")
    ranges = [key for key in annotations if key == PORT_RANGES or key.startswith(PORT_END)]
    if not ranges and not any(one.get(key) for one in interfaces for key in _PORTS):
        return ()
    others = {key: text for key, text in annotations.items() if key == INJECT}
    bare = {**devices, "interfaces": [_without(one, _PORTS) for one in interfaces]}
    stripped = {
        **document,
        "metadata": {**metadata, "annotations": others},
        "spec": {**spec, "domain": {"devices": bare}},
    }
    machines, _ = understood(vmi, stripped)
    return tuple(
        replace(one, masquerade=replace(one.masquerade, claims=()))
        for one in machines
        if one.masquerade
    )


def place(document: Object, node: str) -> Place:
    """Where on that node an instance runs, or will: KubeVirt lists all pods it ever had, and tells
    of two while it migrates. One that has ended runs nowhere."""
    status = mapping(document, "status")
    if status.get("phase") in FINAL:
        return Place((), {}, ())
    here = sorted(uid for uid, name in mapping(status, "activePods").items() if name == node)
    pods = [uid for uid in here if _UID.fullmatch(uid)]
    return Place(
        tuple(pods[:MOST_PODS]),
        {
            str(one["name"]): str(one["podInterfaceName"])
            for one in mappings(status, "interfaces")
            if "name" in one and is_link_name(str(one.get("podInterfaceName", "")))
        },
        _odd(here, pods),
        _labels(document),
    )


def _labels(document: Object) -> Labels:
    """Those of its pod, as far as they are known: its own, and what KubeVirt adds to them."""
    metadata = mapping(document, "metadata")
    name = str(metadata.get("name", ""))
    host = mapping(document, "spec").get("hostname") or name.partition(".")[0][:_LONGEST_LABEL]
    added = {APP: LAUNCHER, CREATED_BY: metadata.get("uid"), HOST: host}
    if len(name) <= _LONGEST_LABEL:
        added[INSTANCE] = name
    found = {**mapping(metadata, "labels"), **added}
    return tuple(sorted((key, text) for key, text in found.items() if isinstance(text, str)))


def _odd(here: list[str], pods: list[str]) -> tuple[str, ...]:
    others = sorted({*here} - {*pods})
    found = [f"{shown(uid)} in status.activePods is no pod" for uid in others[:MOST_PODS]]
    if len(here) > len(found) + min(len(pods), MOST_PODS):
        found.append(f"status.activePods names {len(here)} pods here, and {MOST_PODS} count")
    return tuple(found)


def placed(machine: Machine, where: Place, pod: str) -> Machine:
    """The machine in one of its pods. What it declares may be of yesterday; which policies and
    Services select it is a matter of the labels that it has now."""
    netns = f"{POD}{pod}"
    masquerade = machine.masquerade
    if masquerade is None:
        return replace(machine, netns=netns, labels=where.labels)
    # KubeVirt's chains may come at any moment, and would forward everything.
    masquerade = replace(masquerade, guarded=True)
    if masquerade.name in where.links:
        masquerade = replace(masquerade, entry=where.links[masquerade.name])
    return replace(machine, netns=netns, masquerade=masquerade, labels=where.labels)


def kept(good: Object, now: Object, pods: Iterable[str], node: str) -> str:
    """What to store of an instance: its last good declaration, its labels, where it is now, and of
    the pods there only those that are granted to it. As no manifest, so that nobody takes it for
    one."""
    status = {**mapping(now, "status"), "activePods": dict.fromkeys(sorted(pods), node)}
    labels = mapping(mapping(now, "metadata"), "labels")
    metadata = {**mapping(good, "metadata"), "labels": labels}
    document = {**good, "metadata": metadata, "status": status}
    return told.kept(STORED, json.dumps(document, sort_keys=True, separators=(",", ":")))


def pods_of(text: str) -> frozenset[str]:
    """The namespaces of an instance that an earlier run stored, if it is one."""
    vmi = recalled(text)
    status = mapping(decoded(vmi.text), "status") if vmi else {}
    return frozenset(f"{POD}{uid}" for uid in mapping(status, "activePods") if _UID.fullmatch(uid))


def recalled(text: str) -> Vmi | None:
    """The instance that an earlier run stored; None where it is none."""
    document = told.recalled(STORED, text)
    return None if document is None else heard(document)


def _concerns_us(key: str) -> bool:
    return key.startswith("portrange") or key == INJECT


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdecimal() else 0


def _without(thing: Object, keys: Iterable[str]) -> Object:
    return {key: value for key, value in thing.items() if key not in keys}
