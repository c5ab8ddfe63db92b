"""`make bench ARGS=hitless`: whether changes lose flows. A client opens thousands of new flows a
second, TCP and UDP, IPv4 and IPv6, to ports that stay declared, while the agent makes one change
after another of each kind. A flow that is refused, not answered, or answered by the wrong port is
lost: it is printed with the change that was under way, and fails the run.

    python -m bench hitless [--changes N] [--seconds N] [--rate N] [--timeout SECONDS]
                            [--kinds WORDS ...] [--single-transaction]

It needs: root; Linux with nf_tables, nft_nat, nf_conntrack, veth and bridge; `nft` and `ip`; the
packages that the agent needs itself; and gcc, unless HITLESS_CLIENT names the compiled client
(`gcc -O2 -static -o hitless bench/hitless.c`). It takes one core and about 100 MB, makes eight
namespaces named prhit-*, and ends by itself: give it fewer --changes on a slow machine.

Changes are made in process by the daemon's own Keeper and Publisher, in the node's namespace, and
flows of closed ports are forgotten beside that, as the daemon does it; where the daemon is killed,
by daemons.
"""

import argparse
import bisect
import io
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from unittest import mock

from agent.config import Config
from agent.keeper import Keeper
from agent.kernel import nftables as kernel_nftables
from agent.kernel.deferred import Deferred
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.nftables import generation_of, netlink
from agent.log import Log
from agent.metrics import Metrics
from agent.publisher import Publisher, publishing
from agent.sources.files import laws_of, understood
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from agent.status import State, Status
from bench.hitless_daemon import Daemons
from bench.hitless_kinds import Kind, kinds
from bench.hitless_net import (
    TIMEOUT,
    Counts,
    Lost,
    Net,
    built,
    compiled,
    forget_flows,
    opening,
    run_nft,
)
from rules.nft_steps import BridgeStep, DropRule, DropTable, Step, takes_away
from rules.nft_transactions import transactions
from rules.plan import Plan
from rules.values import Value

CHANGES, RATE = 2000, 6000
PAUSE = 0.3  # seconds of flows before the first change and after the last
SHOWN = 10  # of the flows that one kind lost
PRIORITY = -10  # before others; the client is before us
TAMPERING = "add counter inet portranger stray"
LEAVER = "guest 1 "  # which of the guests leaves


class Result(Value, kw_only=True):
    """What one kind of change lost."""

    kind: str
    changes: int
    counts: Counts
    began: tuple[float, ...]  # when each change began
    ended: tuple[float, ...]
    leaves: bool = False

    @property
    def lost(self) -> tuple[Lost, ...]:
        return tuple(one for one in self.counts.lost if not self._excused(one))

    @property
    def cut(self) -> int:
        """Flows that were under way to an endpoint as it left, and were cut as all of its are."""
        return len(self.counts.lost) - len(self.lost)

    def _excused(self, one: Lost) -> bool:
        return self.leaves and one.how == "cut" and one.more.startswith(LEAVER)

    def number(self, *how: str) -> int:
        return sum(one.how in how for one in self.lost)

    def when(self, one: Lost) -> str:
        """Which change was under way when that flow was opened, or came next."""
        place = bisect.bisect_right(self.ended, one.sent)
        if place == self.changes:
            return "after the last change"
        place = min(place, len(self.began) - 1)
        return (
            f"{(one.sent - self.began[place]) * 1000:+.1f} ms from the start of change {place + 1}"
        )

    @property
    def trouble(self) -> str:
        """Why it says nothing."""
        if self.counts.overrun:
            return f"the client was too slow to read {self.counts.overrun} packets"
        if not self.counts.answered:
            return "no flow was answered"
        return ""


class Agent:
    """What the daemon does between reading manifests and sleeping, in this process."""

    def __init__(self, folder: str) -> None:
        config = Config(state_dir=folder)
        self._later = Deferred()
        self._kernel = LiveKernel(later=self._later)
        status = Status(version="", pid=os.getpid(), started=time.time())
        metrics = Metrics(lambda: status, lambda _: {})
        self._said = io.StringIO()
        log = Log(self._said, clock=time.time)
        store = Store(folder, log.warning)
        self._publisher = Publisher(store, metrics, *publishing(config))
        self._keeper = Keeper(self._kernel, log, metrics, publisher=self._publisher)

    def take(self, meaning: Meaning) -> None:
        """Make what manifests say what is wanted, and so."""
        self._publisher.want(meaning)
        self._keeper.want(meaning.machines, laws=meaning.laws)
        self.work()

    def look(self) -> None:
        """As if anything might have happened."""
        self._keeper.renew()
        self.work()

    def work(self) -> None:
        self._keeper.work(lambda: None, lambda: False)
        odd = [one for one in self._keeper.standings if one.state is not State.IN_SYNC]
        assert not odd, (
            f"{odd[0].netns} is {odd[0].state.value}: {odd[0].why}\n{self._said.getvalue()}"
        )

    def close(self) -> None:
        self._later.stop()
        self._kernel.close()


def said(text: str) -> Meaning:
    """What manifests say."""
    found = understood("hitless", text)
    assert not found.problems, found.problems
    return Meaning(machines=found.machines, services=found.services, laws=laws_of(found.others))


@contextmanager
def working(net: Net) -> Iterator[Agent]:
    """An agent on the node; what it made goes with the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(net.node) as descriptor,
        inside(descriptor, net.node),
    ):
        agent = Agent(folder)
        try:
            yield agent
        finally:
            agent.take(Meaning())
            agent.close()


Change = Callable[[], None]


def changes_of(kind: Kind, agent: Agent) -> Iterator[Change]:
    """One change after the other; the first state is there before."""
    if kind.tampered:
        while True:
            run_nft(kind.tampered, TAMPERING)
            yield agent.look
    states = [said(text) for text in kind.states]
    for state in itertools.cycle([*states[1:], states[0]]):
        yield lambda state=state: agent.take(state)  # type: ignore[misc]


class Effort(Value, kw_only=True):
    """How much is done for each kind: changes, for so long at most, new flows a second, and how
    many seconds one may wait for its answer."""

    changes: int
    seconds: float
    rate: int
    timeout: int = TIMEOUT


def run(kind: Kind, net: Net, program: str, effort: Effort) -> Result:
    """Make changes of one kind while flows are opened."""
    with ExitStack() as stack:
        stack.callback(forget_flows, net)
        if kind.killed:
            daemons = stack.enter_context(Daemons.on(net.node))
            daemons.begin(kind.states[0])
            made = daemons.changes(kind.states)
        else:
            agent = stack.enter_context(working(net))
            agent.take(said(kind.states[0]))
            made = changes_of(kind, agent)
        client = stack.enter_context(opening(program, net, kind.to, kind.flows, effort.rate))
        time.sleep(PAUSE)
        began, ended = [], []
        end = time.monotonic() + effort.seconds
        for change in itertools.islice(made, effort.changes):
            if time.monotonic() > end:
                break
            before = generations(net)
            began.append(time.monotonic())
            change()
            ended.append(time.monotonic())
            assert kind.killed or generations(net) != before, "it changed nothing"
        time.sleep(PAUSE)
        counts = client.end()
    return Result(
        kind=kind.name,
        changes=len(ended),
        counts=counts,
        began=tuple(began),
        ended=tuple(ended),
        leaves=kind.leaves,
    )


def generations(net: Net) -> list[int]:
    """Of the rules of all namespaces that the agent works in."""
    found = []
    for netns in (net.node, *net.pods):
        with opened(netns) as descriptor, inside(descriptor, netns), netlink() as asking:
            found.append(generation_of(asking).number)
    return found


@contextmanager
def single_transaction() -> Iterator[None]:
    """All steps of a change in one transaction, as a naive agent would do it."""

    def merged(plan: Plan) -> list[list[Step]]:
        steps = chain(*transactions(plan))
        found: list[Step] = [step for step in steps if not isinstance(step, BridgeStep)]
        if DropTable() not in found:  # what goes is first, as a difference of lists would have it
            found.sort(key=lambda step: (not isinstance(step, DropRule), not takes_away([step])))
        return [found] if found else []

    with mock.patch.object(kernel_nftables, "transactions", merged):
        yield


# ------------------------------------------------------------------------------------------ report

COLUMNS = ("changes", "flows", "flows/s", "refused", "timed out", "cut")


def heading(width: int) -> str:
    return f"{'':{width}}" + "".join(f"{name:>11}" for name in COLUMNS)


def row(result: Result, width: int) -> str:
    counts = result.counts
    numbers = (
        result.changes,
        counts.sent,
        round(counts.sent / counts.seconds),
        result.number("refused"),
        result.number("timed out", "cut", "astray"),
        result.cut,
    )
    return f"{result.kind:{width}}" + "".join(f"{number:>11,}" for number in numbers)


def losses(result: Result) -> list[str]:
    """A line for each of the first flows that were lost."""
    lines = [f"  {one}; {result.when(one)}" for one in result.lost[:SHOWN]]
    more = len(result.lost) - len(lines)
    return [*lines, *([f"  and {more} more"] if more else [])]


def measure(chosen: Sequence[str], effort: Effort) -> list[Result]:
    """Run the kinds whose names hold one of these words, or all; print as it goes."""
    found = []
    with built(effort.timeout) as net, compiled() as program:
        every = kinds(net)
        wanted = [one for one in every if not chosen or any(word in one.name for word in chosen)]
        if not wanted:
            names = "\n  ".join(one.name for one in every)
            sys.exit(
                f"bench: no kind of change has {chosen[0]!r} in its name; there are:\n  {names}"
            )
        width = max(len(one.name) for one in wanted) + 2
        print(heading(width), flush=True)
        for kind in wanted:
            result = run(kind, net, program, effort)
            print("\n".join([row(result, width), *losses(result)]), flush=True)
            if result.trouble:
                print(f"  NOT MEASURED: {result.trouble}", flush=True)
            found.append(result)
    return found


def main(words: Sequence[str]) -> None:
    """Fail where a flow is lost, or nothing can be told."""
    parser = argparse.ArgumentParser(
        prog="bench hitless", description="Count flows lost by changes."
    )
    parser.add_argument("--changes", type=int, default=CHANGES, help="of each kind")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="at most, for the changes of one kind"
    )
    parser.add_argument("--rate", type=int, default=RATE, help="new flows a second")
    # Nothing is sent twice: that a machine is slow can be told from a loss by waiting longer.
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds for an answer")
    parser.add_argument("--kinds", nargs="+", default=[], help="words in the names of kinds")
    parser.add_argument("--single-transaction", action="store_true", help="show what that loses")
    options = parser.parse_args(words)
    print(f"Flows lost by changes, Linux {os.uname().release}", flush=True)
    os.nice(PRIORITY)
    with single_transaction() if options.single_transaction else ExitStack():
        effort = Effort(
            changes=options.changes,
            seconds=options.seconds,
            rate=options.rate,
            timeout=options.timeout,
        )
        found = measure(options.kinds, effort)
    lost = sum(len(one.lost) for one in found)
    if lost or any(one.trouble for one in found):
        sys.exit(f"bench: {lost} flows lost")
    print("No flow was lost.")


if __name__ == "__main__":
    main(sys.argv[1:])
