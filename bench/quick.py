"""`make bench-quick`: the few ratios that matter, in a minute, each with as much again of room. It
is for finding out that something became slow, not how fast it is.
"""

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

from agent.kernel.deferred import Deferred
from agent.kernel.kinds import Glimpse
from agent.kernel.live import LiveKernel
from agent.reconcile import keep, wish_of
from bench import control, flows
from bench.machines import machine
from bench.measure import Number, Table, numbers, undisturbed
from rules.model import Claim, Guest, Machine, Protocol
from rules.ports import PortRange
from rules.values import replace

MARGIN = 2.0  # of ratios
TIME_MARGIN = 5.0  # of times, which are those of the machine, too
ROUNDS = 30
FEW_ROUNDS = 3  # where a round takes half a second
NAMESPACES = 50
RESYNC_BOUND = 500.0 / 1000  # ms for each of a thousand namespaces
FIRSTS = (1000, 3000, 5000, 7000)


def quick() -> Table:
    """All of them; what breaks its bound is measured once more, as others may have come between."""
    found: list[Number] = []
    for measured in (_race, _many, _one_of_many, _flow, _resync):
        taken = [eased(number) for number in measured()]
        if not all(number.kept for number in taken):
            taken = [_better(*pair) for pair in zip(taken, map(eased, measured()), strict=True)]
        found += taken
    margins = f"a ratio may be {MARGIN:g} times its bound, a time {TIME_MARGIN:g} times"
    title = f"The numbers that matter; {margins}"
    return numbers(Table((title,)), found)


def _better(one: Number, other: Number) -> Number:
    return one if one.kept else other


def _race() -> list[Number]:
    taken = control.race(ROUNDS, (control.OURS, control.NFT))
    return [control.against(taken, phase, control.NFT) for phase in control.PHASES]


def _many() -> list[Number]:
    return [control.from_nothing(FEW_ROUNDS)]


def _one_of_many() -> list[Number]:
    return [control.one_of_ten_and_many(ROUNDS)]


def _flow() -> list[Number]:
    dnat = flows.one_map(1000, ROUNDS * 2)
    name = "a flow, map of 1000, of bare dnat"
    return [Number(name=name, value=dnat, unit="x", bound=flows.BOUND)]


def _resync() -> list[Number]:
    return [resync()]


def eased(number: Number) -> Number:
    """With room for the noise of a machine that others use."""
    margin = MARGIN if number.unit == "x" else TIME_MARGIN
    return replace(
        number,
        bound=None if number.bound is None else number.bound * margin,
        least=None if number.least is None else number.least / margin,
    )


def resync() -> Number:
    """Namespaces in which nothing happened are glimpsed at, as the daemon does when its timer is
    up; a thousand of them may take half a second."""
    with _namespaces() as names, undisturbed():
        kernel = LiveKernel(later=Deferred())
        proven = {name: _proven(kernel, name) for name in names}
        taken: list[float] = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            glimpses = {name: kernel.glimpse(name, proven[name]) for name in names}
            taken.append((time.perf_counter() - started) * 1000 / NAMESPACES)
            assert glimpses == proven, "something happened"
    title = f"a resync, for each of {NAMESPACES} namespaces"
    return Number(name=title, value=statistics.median(taken), unit="ms", bound=RESYNC_BOUND)


def _proven(kernel: LiveKernel, name: str) -> Glimpse:
    with kernel.opened(name) as namespace:
        outcome = keep(name, wish_of([_machine()]), namespace, before=None)
        return Glimpse(
            identity=namespace.identity,
            generation=outcome.generation,
            surroundings=outcome.surroundings,
            sysctls={one.name: one.value for one in outcome.desired.sysctls},
        )


def _machine() -> Machine:
    claims = [Claim(Protocol.TCP, PortRange(first, first + 999)) for first in FIRSTS]
    return machine(claims, [Guest(IPv4Address("10.0.2.2"), IPv4Address("10.0.2.1"))])


@contextmanager
def _namespaces() -> Iterator[list[str]]:
    names = [f"prbench-{os.getpid()}-{number}" for number in range(NAMESPACES)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            control.wire(name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
