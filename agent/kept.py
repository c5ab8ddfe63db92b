"""One namespace that the keeper keeps: what is known of it, and when it is to be looked at."""

import math

from agent.backoff import FAILURES, REPAIRS, Backoff
from agent.kernel.kinds import Glimpse, Known
from agent.reconcile import Outcome
from agent.status import Standing, State
from agent.workqueue import Work
from rules.desired import Made
from rules.model import Desired, Machine, Surroundings
from rules.values import Value, replace

LOOKS = Backoff(first=0.05, longest=1.0, free=20, forgiven_after=5.0)  # at others' commits

Culprit = tuple[str, int]  # the name and pid of a process


class Look(Value, kw_only=True):
    """What a look at a namespace came to."""

    outcome: Outcome
    identity: object
    known: Known | None
    backend: str
    reason: str


class Kept:
    """A namespace, and what is known of it."""

    def __init__(self, netns: str, now: float, *, leaving: bool = False) -> None:
        self.netns = netns
        self.machines: list[Machine] = []
        self.leaving = leaving  # nobody wants anything there any more: to be cleared
        self.look, self.urgent, self.relinked = True, True, False
        self.timer = math.inf
        self.seen: object = None  # what the name stood for when it was last looked at
        self.identity: object = None
        self.nsid: object = None
        self.desired: Desired | None = None
        self.proven: Glimpse | None = None  # when it last held exactly that
        self.links: Surroundings | None = None  # at that time
        self.known: Known | None = None
        self.made: Made = {}  # the rules that were wanted at the last look
        self.sure = False  # that nothing of ours is there but what this run put there
        self.heard: list[tuple[int, Culprit]] = []  # generations that came while it was looked at
        self.culprits: list[Culprit] = []
        self.failures, self.repairs, self.looks = FAILURES, REPAIRS, LOOKS
        self.work: Work[Look | None] | None = None  # a look that is not done yet
        self.began = 0.0  # when it was begun
        self.report = math.inf  # when to report that it is not done
        self.void = False  # what it finds is not about this namespace any more
        self.rests = self.distrusted = -math.inf  # until when, after a look that took long
        self.tried = False
        self.applied = False  # whether it held what was wanted since that last changed
        why = "it was not looked at yet"
        self.standing = Standing(netns=netns, state=State.PENDING, since=now, why=why)

    @property
    def due(self) -> float:
        """When it is to be looked at, or reported that a look is not done."""
        if self.work is not None:
            return self.report
        if not self.look:
            return self.timer
        if self.urgent:
            return -math.inf
        if self.relinked:
            return self.looks.until
        return max(self.failures.until, self.repairs.until, self.looks.until, self.rests)

    def forget(self) -> None:
        """What was there may be no more, or be another by now."""
        self.desired = self.proven = self.known = self.links = None
        self.identity = self.nsid = None
        self.heard = []
        self.sure = False
        self.void = True
        self.failures, self.repairs, self.looks = FAILURES, REPAIRS, LOOKS
        self.standing = replace(self.standing, change=None, drift=None, drifts=0)
        self.look = self.urgent = True
