"""What a peer is to the harness: how it does each step, and what it is known to lack."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from bench.peers.place import Place
from rules.values import Value

Step = Callable[[], object]


class Sample(Value):
    """A part of the job that is done instead of the whole."""

    ports: int  # of each protocol, from the first on
    factor: float  # how much more the whole is


class Doing(Value, kw_only=True):
    """A peer at work in a place: the steps are taken in this order, and then all over again."""

    set_up: Step
    change: Step
    remove: Step
    shift: Step | None = None  # forward 9000-9009 to 7000-7009, with nothing else set up
    unshift: Step | None = None
    memory: Callable[[], float] | None = None  # MiB, of what stays resident while set up
    reload: Step | None = None  # the peer's own way back after somebody's flush, other than to
    # begin again
    sample: Sample | None = None
    guest: Callable[[], str] | None = None  # the guest's namespace, where the peer makes it
    guest_stays: bool = True  # with its link, when the ports are removed
    flows: bool = True  # whether sending takes a packet all the way to the guest


class Peer(Value, kw_only=True):
    """One row of the table."""

    name: str
    needs: tuple[str, ...]  # programs
    at_work: Callable[[Place], AbstractContextManager[Doing]]
    how: str = ""  # what the row stands for, where the name does not say it
    no_change: str = ""  # what there is instead
    no_removal: str = ""


Work = Iterator[Doing]
