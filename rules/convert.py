"""Between the spellings of port ranges: every port by itself, named ports with port-end
annotations, and the portRanges of a virtual machine. A plain document goes in, one comes out that
means the same; keys keep their order, and what has nothing to do with ports is left alone."""

from collections.abc import Iterable

from rules.manifests.documents import POD, SERVICE, kinds
from rules.manifests.metadata import PORT_END, PORT_RANGES
from rules.manifests.pod import CONTAINERS
from rules.port_lists import (
    MACHINE,
    Ends,
    Item,
    Shape,
    expanded,
    fresh,
    joined,
    name_of,
    number_of,
    protocol_of,
    shared,
)
from rules.port_lists import POD as POD_SHAPE
from rules.port_lists import SERVICE as SERVICE_SHAPE
from rules.ports import PortRange, coalesce, subtract

PORTS, ANNOTATIONS, RANGES = SPELLINGS = ("ports", "annotations", "ranges")

Spans = dict[str, list[PortRange]]  # by protocol


def convert(document: object, to: str) -> object:
    """The same document in another spelling; it must be one in which `read` finds no problem."""
    made = _copied(document)
    for kind, path in kinds(made):
        thing = made
        for step in path:
            thing = thing[step]  # type: ignore[index]  # where `kinds` found a mapping
        assert isinstance(thing, dict)  # noqa: S101 - for type checkers
        if kind == SERVICE:
            _lists(thing, [_below(thing, "spec")], SERVICE_SHAPE, to)
        elif kind == POD:
            spec = _below(thing, "spec")
            containers = [one for key in CONTAINERS for one in _list(spec, key)]
            _lists(thing, containers, POD_SHAPE, to)
        else:
            _machine(thing, kind, to)
    return made


def _copied(value: object) -> object:
    """A copy that may be changed in one place without another following, as aliases would."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _below(holder: Item, key: str) -> Item:
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def _list(holder: Item, key: str) -> list[Item]:
    value = holder.get(key)
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------------------- Services and Pods


def _lists(thing: Item, holders: list[Item], shape: Shape, to: str) -> None:
    """Respell the ports of each holder; the API has no ranges, so these are annotations, too."""
    lists = [(holder, _list(holder, "ports")) for holder in holders]
    items = [item for _, ports in lists for item in ports]
    ends = _ends([thing])
    if to == PORTS:
        taken = set(_names(holders)) - _longer(items, shape, ends)
        for holder, ports in lists:
            if ports:
                holder["ports"] = expanded(ports, shape, ends, taken)
        _drop([thing])
        return
    apart = shared(items, shape)
    for holder, ports in lists:
        made, new = joined(ports, shape, ends, _names(holders), apart)
        if new:
            holder["ports"] = made
            ends |= new
            _annotate(thing, new)


def _names(holders: Iterable[Item]) -> list[str]:
    """The names of all ports, each as often as it is there."""
    return [name_of(item) for one in holders for item in _list(one, "ports") if name_of(item)]


def _longer(items: Iterable[Item], shape: Shape, ends: Ends) -> set[str]:
    """The names that begin a range of more than one port."""
    return {
        name_of(item)
        for item in items
        if ends.get(name_of(item), 0) > number_of(item, shape.number)
    }


# ------------------------------------------------------------------------------------ annotations


def _ends(holders: Iterable[Item]) -> Ends:
    """What the port-end annotations say; of two places, the first counts."""
    found: Ends = {}
    for holder in holders:
        for key, text in _annotations(holder).items():
            name = key.removeprefix(PORT_END)
            if name != key and name not in found:
                found[name] = int(str(text))
    return found


def _annotations(holder: Item) -> Item:
    return _below(_below(holder, "metadata"), "annotations")


def _annotate(holder: Item, ends: Ends) -> None:
    """Write ends into the metadata of a holder, which stands before its spec."""
    if not isinstance(holder.get("metadata"), dict):
        holder.pop("metadata", None)
        spec = holder.pop("spec")
        holder |= {"metadata": {}, "spec": spec}
    metadata = _below(holder, "metadata")
    if not isinstance(metadata.get("annotations"), dict):
        metadata["annotations"] = {}
    _annotations(holder).update({f"{PORT_END}{name}": str(last) for name, last in ends.items()})


def _drop(holders: Iterable[Item], prefixes: tuple[str, ...] = (PORT_END, PORT_RANGES)) -> None:
    """Remove the annotations that declare ports, and what is empty without them."""
    for holder in holders:
        metadata, annotations = _below(holder, "metadata"), _annotations(holder)
        ours = [key for key in annotations if key.startswith(prefixes)]
        for key in ours:
            del annotations[key]
        if ours and not annotations:
            del metadata["annotations"]
            if not metadata:
                del holder["metadata"]


# --------------------------------------------------------------------------------------- machines


def _machine(thing: Item, kind: str, to: str) -> None:
    """Respell what the masquerade interface forwards; the others have no ranges."""
    spec, holders = _below(thing, "spec"), [thing]
    if kind != "VirtualMachineInstance" and spec.get("template") is not None:
        template = _below(spec, "template")
        spec, holders = _below(template, "spec"), [template, thing]
    interfaces = _list(_below(_below(spec, "domain"), "devices"), "interfaces")
    for ours in interfaces:
        if ours.get("masquerade") is not None and _declares(ours, holders):
            names = _names(interfaces)
            _interface(ours, holders, names, to)


def _declares(ours: Item, holders: Iterable[Item]) -> bool:
    """Whether ports are declared at all: else everything is forwarded, in every spelling."""
    return bool(_list(ours, "ports") or _list(ours, "portRanges") or _annotated(holders))


def _interface(ours: Item, holders: list[Item], names: list[str], to: str) -> None:
    items = _list(ours, "ports")
    ranges = [*_list(ours, "portRanges"), *_annotated(holders)]
    ends = _ends(holders)
    if to == PORTS:
        singles = [one for item in items for one in _one_by_one(item, "port")]
        singles += [one for item in ranges for one in _one_by_one(item, "start")]
        taken = set(names) - _longer(singles, MACHINE, ends)
        _respell(ours, "ports", expanded(singles, MACHINE, ends, taken))
        _drop(holders)
    elif to == RANGES:
        made = [
            {"start": span.first, "end": span.last, "protocol": protocol}
            for protocol, spans in _spans([*items, *ranges], ends).items()
            for span in coalesce(spans)
        ]
        as_few = len(made) == len(_list(ours, "portRanges"))
        _respell(ours, "portRanges", _list(ours, "portRanges") if as_few else made)
        _drop(holders)
    else:
        made, new = _with_ends(items, ranges, ends, names)
        _respell(ours, "ports", made)
        _drop(holders, (PORT_RANGES,))
        if new:
            _annotate(holders[0], new)


def _annotated(holders: Iterable[Item]) -> list[Item]:
    """What the port-ranges annotation says, as portRanges would; of two, the first counts."""
    texts = [
        str(_annotations(one)[PORT_RANGES]) for one in holders if PORT_RANGES in _annotations(one)
    ]
    found: list[Item] = []
    for text in texts[0].split(",") if texts else ():
        ports, _, protocol = text.strip().partition("/")
        first, _, last = ports.partition("-")
        found.append(
            {
                "start": int(first),
                "end": int(last or first),
                "protocol": protocol.upper() or "TCP",
            }
        )
    return found


def _one_by_one(item: Item, key: str) -> list[Item]:
    """The ports of an item that says its end itself, else the item."""
    if "end" not in item:
        return [item]
    return [
        {
            "port" if other == key else other: port if other == key else value
            for other, value in item.items()
            if other != "end"
        }
        for port in range(number_of(item, key), number_of(item, "end") + 1)
    ]


def _respell(ours: Item, key: str, made: list[Item]) -> None:
    """Put a list where ports or portRanges were, or at the end if neither was there."""
    places = [one for one in ("ports", "portRanges") if ours.get(one)] or [key]
    old = dict(ours)
    ours.clear()
    for name, value in old.items():
        if name == places[0]:
            ours[key] = made
        elif name not in ("ports", "portRanges"):
            ours[name] = value
    ours.setdefault(key, made)


def _spans(items: Iterable[Item], ends: Ends) -> Spans:
    """The ports of items in any spelling, by protocol."""
    found: Spans = {}
    for item in items:
        first = number_of(item, "port") or number_of(item, "start")
        last = number_of(item, "end") or ends.get(name_of(item), first)
        found.setdefault(protocol_of(item), []).append(PortRange(first, last))
    return found


def _with_ends(
    items: list[Item], ranges: list[Item], ends: Ends, names: list[str]
) -> tuple[list[Item], Ends]:
    """The items with names for ranges, and the ends of those."""
    named = [one for item in items if name_of(item) for one in _one_by_one(item, "port")]
    nameless = [item for item in items if not name_of(item)]
    covered = _spans(named, ends)
    left = {
        protocol: subtract(spans, covered.get(protocol, ()))
        for protocol, spans in _spans([*nameless, *ranges], ends).items()
    }
    new: Ends = {}
    taken = set(names)
    made: list[Item] = []
    for protocol, spans in left.items():
        for span in spans:
            item: Item = {"port": span.first, "protocol": protocol}
            if len(span) > 1:
                name = fresh(protocol, taken)
                taken.add(name)
                new[name] = span.last
                item = {"name": name, **item}
            made.append(item)
    if not ranges and not new and len(made) == len(nameless):
        spelt = [one for item in items for one in _one_by_one(item, "port")]
    else:
        place = items.index(nameless[0]) if nameless else len(named)
        spelt = [*named[:place], *made, *named[place:]]
    spelt, more = joined(spelt, MACHINE, ends | new, [*names, *new], shared(spelt, MACHINE))
    return spelt, new | more
