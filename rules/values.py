"""Frozen, slotted values, as @dataclass(frozen=True, slots=True) would make them.

The standard decorator compiles source for every class and imports inspect: together 20 ms before
the first manifest is read, twice what starting Python takes. This needs 1 ms. Type checkers are
told that the two are the same.
"""

from operator import attrgetter

TYPE_CHECKING = False  # typing itself would cost 4 ms
if TYPE_CHECKING:
    from typing import Any, ClassVar, TypeVar, dataclass_transform

    Made = TypeVar("Made", bound="Value")
else:

    def dataclass_transform(**_):
        return lambda made: made


@dataclass_transform(frozen_default=True)
class _Maker(type):
    """Turns the annotations of a class into its slots and the arguments of its constructor."""

    _setters: "tuple[Any, ...]"
    _content: "Any"

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: "dict[str, Any]", **_options: bool
    ) -> "_Maker":
        fields = tuple(_annotations(body)) if bases else ()
        body["_defaults"] = {field: body.pop(field) for field in fields if field in body}
        body["__match_args__"] = fields
        body["__slots__"] = (*fields, *body.get("__slots__", ())) if bases else ("_hash",)
        made = super().__new__(mcs, name, bases, body)
        made._setters = tuple(getattr(made, field).__set__ for field in fields)
        made._content = attrgetter(*fields) if fields else lambda _: ()
        return made

    def __init__(
        cls, name: str, bases: tuple[type, ...], body: "dict[str, Any]", **_: bool
    ) -> None:
        super().__init__(name, bases, body)


def _annotations(body: "dict[str, Any]") -> "dict[str, Any]":
    """Of a class in the making; Python 3.14 and later hold them back in a function."""
    evaluate = body.get("__annotate_func__")
    found: dict[str, Any] = evaluate(1) if evaluate else body.get("__annotations__", {})
    return found


class Value(metaclass=_Maker):
    """What is equal and hashed by its content, and never changes.

    The options of a subclass (kw_only, order) are for type checkers, who hold us to them. Slots
    that it names itself are for what it remembers, and no fields.
    """

    __match_args__: "ClassVar[tuple[str, ...]]"
    _defaults: "ClassVar[dict[str, Any]]"
    if TYPE_CHECKING:
        _hash: ClassVar[int]  # in truth a slot, but no field

    def __init__(self, *given: "Any", **named: "Any") -> None:
        cls = type(self)
        if named or len(given) != len(cls._setters):
            given = cls._arranged(given, named)
        for set_field, value in zip(cls._setters, given, strict=True):
            set_field(self, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Where a subclass checks what always holds."""

    @classmethod
    def _arranged(cls, given: "tuple[Any, ...]", named: "dict[str, Any]") -> "tuple[Any, ...]":
        fields = cls.__match_args__
        values = {**cls._defaults, **dict(zip(fields, given, strict=False)), **named}
        twice = named and given and not named.keys().isdisjoint(fields[: len(given)])
        if not twice and len(given) <= len(fields) == len(values):
            try:
                return tuple([values[field] for field in fields])
            except KeyError:
                pass
        raise TypeError(f"{cls.__name__} takes {fields}, not {given} and {named}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        content = type(self)._content
        return bool(content(self) == content(other))

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:  # the first time; addresses and the like are slow to hash
            object.__setattr__(self, "_hash", hash(type(self)._content(self)))
            return self._hash

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} never changes: {name} stays")

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
        return f"{type(self).__name__}({fields})"

    if not TYPE_CHECKING:  # type checkers grant it to subclasses with order=True

        def __lt__(self, other):
            if type(other) is not type(self):
                return NotImplemented
            content = type(self)._content
            return content(self) < content(other)

    def __reduce__(self) -> "tuple[Any, ...]":
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)


def replace(value: "Made", **changes: "Any") -> "Made":
    """The same value with some fields changed."""
    names = value.__match_args__
    if not changes.keys() <= set(names):
        raise TypeError(f"{type(value).__name__} has {names}, not {tuple(changes)}")
    return type(value)(*[changes[n] if n in changes else getattr(value, n) for n in names])
