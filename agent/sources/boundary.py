"""The boundary between the agent and what tenants write: an unexpected exception while one object
is read costs that object its newest version, and no other object anything.

The object falls back to its last valid version, or is closed, and the exception is reported as a
problem of the object: in the log, in the status, and as an event on it. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agent.errors import Failure
from rules.problems import Problem, printable

CODE = "internal-error"
FAULT = (
    "portranger:fault"  # where an object that could not be cut down says why; no field is named so
)
_LONGEST = 300  # characters of what an exception says

Object = dict[str, object]
Read = TypeVar("Read")
Thing = TypeVar("Thing")
Faults = Sequence[tuple[Thing, Exception]]  # what met a bug, each with the exception


def guarded(read: Callable[[], Read], label: str) -> Read | Problem:
    """What is read of the object with that label; a problem where that raises an exception."""
    try:
        return read()
    except Exception as error:  # a bug met in one object must not stop the others
        return problem(label, described(error))


def sound(
    things: Sequence[Thing], attempt: Callable[[Sequence[Thing]], Read]
) -> tuple[Read, Faults[Thing]]:
    """What an attempt makes of those things that do not make it raise; and those that do, found by
    halves. Who is first stays, where only two together do. Failures of the machine are no bugs."""
    try:
        return attempt(things), ()
    except (Failure, OSError):
        raise
    except Exception:  # a bug met in one thing must not stop the others
        if not things:
            raise
    faults: list[tuple[Thing, Exception]] = []

    def grown(kept: list[Thing], rest: Sequence[Thing]) -> list[Thing]:
        try:
            attempt([*kept, *rest])
        except (Failure, OSError):
            raise
        except Exception as error:  # as above
            if len(rest) > 1:
                middle = len(rest) // 2
                return grown(grown(kept, rest[:middle]), rest[middle:])
            faults.append((rest[0], error))
            return kept
        return [*kept, *rest]

    return attempt(grown([], things)), faults


def trimming(trim: Callable[[Object], object]) -> Callable[[Object], object]:
    """The same for who cuts objects down while a list is decoded: what cannot be cut down stays
    whole, and says so."""

    def tried(thing: Object) -> object:
        try:
            return trim(thing)
        except Exception as error:  # else nothing of the list would be read
            return {**thing, FAULT: described(error)}

    return tried


def fault_of(thing: Mapping[str, object]) -> str:
    """Why an object could not be cut down; empty: it could."""
    return str(thing.get(FAULT, ""))


def described(error: Exception) -> str:
    return f"unexpected {type(error).__name__}: {printable(str(error), _LONGEST)}"


def problem(label: str, what: str) -> Problem:
    return Problem(
        code=CODE,
        path=(),
        what=f"cannot be read because of a bug in portranger ({what})",
        fix="Report the bug with this object; until it is fixed, write the object differently.",
        file=label,
    )
