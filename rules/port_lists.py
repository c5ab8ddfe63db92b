"""Lists of ports as manifests write them, between their two spellings: every port by itself, or the
first of each range with an end elsewhere. Items are plain mappings, and keep what else is in them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from rules.manifests.metadata import is_label
from rules.manifests.named_ports import LONGEST_NAME
from rules.manifests.ports import is_service_name
from rules.values import Value

Item = dict[str, object]
Ends = dict[str, int]  # by the name of a port, the last of the range that it begins

_LONGEST = 15  # letters of a service name
_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Shape(Value):
    """Where the ports of one kind are written: the number, what moves with it, and what of that is
    the number itself where it is not given; whether names may be long."""

    number: str
    followers: tuple[str, ...] = ()
    same: str = ""
    long_names: bool = False


SERVICE = Shape("port", ("targetPort", "nodePort"), "targetPort", long_names=True)
POD = Shape("containerPort", ("hostPort",))
MACHINE = Shape("port")


def number_of(item: Item, key: str) -> int:
    """The number of a key; nought where it is not given."""
    value = item.get(key)
    return value if isinstance(value, int) else 0


def protocol_of(item: Item) -> str:
    return str(item.get("protocol") or "TCP")


def name_of(item: Item) -> str:
    return str(item.get("name") or "")


# --------------------------------------------------------------------------------- one by one


def expanded(items: Iterable[Item], shape: Shape, ends: Ends, taken: set[str]) -> list[Item]:
    """Every port by itself; `taken` are names in use elsewhere, to which the new ones are added."""
    made: list[Item] = []
    for item in items:
        first = number_of(item, shape.number)
        count = ends.get(name_of(item), first) - first + 1
        if count == 1:
            made.append(item)
            continue
        names = numbered(name_of(item), count, taken)
        taken.update(names)
        made += [_moved(item, shape, step, name) for step, name in enumerate(names)]
    return made


def _moved(item: Item, shape: Shape, step: int, name: str) -> Item:
    """The item of the port that is so many steps further on."""
    moving = (shape.number, *shape.followers)
    moved = {
        key: value + step if key in moving and isinstance(value, int) and value else value
        for key, value in item.items()
    }
    return {**moved, "name": name}


def numbered(name: str, count: int, taken: Collection[str]) -> list[str]:
    """Names for the ports of a range: its own with a number behind it, cut and varied as it must be
    to remain a service name that nobody else has."""
    width = _LONGEST - len(str(count - 1))
    several = ([f"{stem}{place}" for place in range(count)] for stem in _stems(name, width))
    return next(names for names in several if not any(one in taken for one in names))


def _stems(name: str, width: int) -> Iterator[str]:
    plain = "-".join(part for part in name.split("-") if part)
    for letters in _varied():
        stem = plain[: width - len(letters)] + letters
        yield stem if any(map(str.isalpha, stem)) else f"p{stem}"[:width]


def _varied() -> Iterator[str]:
    """Nothing, then every combination of letters, the short ones first."""
    shorter = [""]
    while True:
        yield from shorter
        shorter = [text + letter for text in shorter for letter in _LETTERS]


def fresh(protocol: str, taken: Collection[str]) -> str:
    """A name for a range that has none, that nobody else has."""
    base = protocol.lower()
    names = (f"{base}-{letters}" if letters else base for letters in _varied())
    return next(name for name in names if name not in taken)


# ----------------------------------------------------------------------------------- as ranges


def shared(items: Iterable[Item], shape: Shape) -> set[tuple[str, int]]:
    """What several items are for: no range may hold that."""
    counted = Counter((protocol_of(item), number_of(item, shape.number)) for item in items)
    return {port for port, count in counted.items() if count > 1}


class _Single(Value):
    """A port that could be part of a range, by its place in the list."""

    place: int
    item: Item
    name: str
    port: int
    kind: object  # what all ports of one range have in common


def joined(
    items: Sequence[Item],
    shape: Shape,
    ends: Ends,
    names: Collection[str],
    apart: Collection[tuple[str, int]] = (),
) -> tuple[list[Item], Ends]:
    """The fewest items that say the same, and the ends of the new ranges. `names` are all in use,
    each as often as it is, and what is to stay apart stays."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    singles = [
        _Single(place, item, name_of(item), number_of(item, shape.number), _kind(item, shape))
        for place, item in enumerate(items)
        if name_of(item) not in ends
        and name_of(item) not in twice
        and (protocol_of(item), number_of(item, shape.number)) not in apart
        and not isinstance(item.get(shape.same), str)
    ]
    left = dict(enumerate(items))
    used = set(names)
    made: Ends = {}
    for stem, run in _runs(singles):
        used.difference_update(one.name for one in run)
        name = _range_name(stem, run, shape, used)
        if not name:
            used.update(one.name for one in run)
            continue
        used.add(name)
        made[name] = run[-1].port
        for one in run:
            del left[one.place]
        item = run[0].item
        named = {**item, "name": name} if "name" in item else {"name": name, **item}
        left[min(one.place for one in run)] = named
    listed = [left[place] for place in sorted(left)]
    return listed, {name_of(item): made[name_of(item)] for item in listed if name_of(item) in made}


def _kind(item: Item, shape: Shape) -> object:
    first = number_of(item, shape.number)
    shifts = []
    for key in shape.followers:
        number = number_of(item, key) or (first if key == shape.same else 0)
        shifts.append(number - first if number else None)
    own = ("name", "protocol", shape.number, *shape.followers)
    rest = sorted((key, repr(value)) for key, value in item.items() if key not in own)
    return protocol_of(item), tuple(shifts), tuple(rest)


class _Run(Value):
    """Ports one after the other, what their names have in common, and its rank among others that
    are as long: what `expanded` would make comes first, unless the numbers are the ports' own."""

    stem: str
    ports: list[_Single]
    rank: int = 1


def _runs(singles: Sequence[_Single]) -> Iterator[tuple[str, list[_Single]]]:
    """Neighbouring ports whose names count them, the longest first."""
    left = list(singles)
    while True:
        found = sorted(
            (*_from_nought(left), *_counted(left)), key=lambda one: (-len(one.ports), one.rank)
        )
        taken: set[int] = set()
        for stem, run in ((one.stem, one.ports) for one in found):
            if len(run) == 1:
                break
            if all(one.place not in taken for one in run):
                taken.update(one.place for one in run)
                yield stem, run
        if not taken:
            return
        left = [one for one in left if one.place not in taken]


def _from_nought(singles: Iterable[_Single]) -> Iterator[_Run]:
    """Those that `expanded` would name so; what they were named after may end in a digit itself."""
    by_name = {(one.name, one.kind): one for one in singles}
    for first in by_name.values():
        if not first.name.endswith("0"):
            continue
        stem, run = first.name[:-1], [first]
        while following := by_name.get((f"{stem}{len(run)}", first.kind)):
            if following.port != run[-1].port + 1:
                break
            run.append(following)
        yield _Run(stem, run, 2 if _number(first) == str(first.port) else 0)


def _number(one: _Single) -> str:
    """The digits at the end of a name."""
    return one.name[len(one.name.rstrip(_DIGITS)) :]


def _counted(singles: Iterable[_Single]) -> Iterator[_Run]:
    """Those that are counted in any way: from one, by the port itself, or without a name at all."""
    groups: dict[tuple[str, object], list[tuple[_Single, int]]] = {}
    for one in singles:
        digits = _number(one)
        if digits or not one.name:
            stem = one.name.removesuffix(digits)
            place = int(digits) if digits else one.port
            groups.setdefault((stem, one.kind), []).append((one, place))
    for (stem, _), members in groups.items():
        members.sort(key=lambda member: member[0].port)
        run: list[_Single] = []
        count = 0
        for one, place in members:
            if run and (one.port, place) != (run[-1].port + 1, count + 1):
                yield _Run(stem, run)
                run = []
            run.append(one)
            count = place
        yield _Run(stem, run)


def _range_name(stem: str, run: list[_Single], shape: Shape, used: Collection[str]) -> str:
    """A name for a range: what its ports have in common, else that of the first; none at all where
    no annotation could hold it."""
    if not run[0].name:
        return fresh(protocol_of(run[0].item), used)
    for name in (stem.rstrip("-"), run[0].name):
        valid = is_service_name(name) or (shape.long_names and is_label(name))
        if valid and name not in used and len(name) <= LONGEST_NAME:
            return name
    return ""
