"""Our chains in the legacy tables of one namespace, through a worker process per address family.

Whatever becomes of a worker, a commit is one atomic replace of a table in the kernel, so nothing is
half done in it.
"""

import socket
import time
from collections.abc import Sequence
from importlib.util import find_spec

from agent.errors import BackendMissing, Failure, NotPermitted, Stale, TryAgain
from agent.kernel import worker
from agent.kernel.worker import PATIENCE, Json, module
from rules.model import Family, Live, Observed
from rules.plan import Plan, Table
from rules.xtables import decode, steps

PAUSE = 30.0  # seconds until another worker may find what this one lacks
WORKER = "agent.kernel.iptables_worker"


class Worker(worker.Worker):
    """The process of one family."""

    def __init__(
        self, family: Family, command: Sequence[str] = (), patience: float = PATIENCE
    ) -> None:
        name = f"the iptables worker for {family.value}"
        super().__init__(name, command or module(WORKER), [family.value], patience)

    def ask(self, descriptor: int, question: Json) -> Json:
        _find()
        answer = super().ask(descriptor, question)
        if "error" in answer:
            if answer["error"] == "Unusable" and time.monotonic() - self.began > PAUSE:
                self.stop()  # somebody may have installed it
            raise failure(str(answer["error"]), str(answer.get("text")))
        return answer


class Workers:
    """One for each family, started when needed."""

    def __init__(self) -> None:
        self._workers = {family: Worker(family) for family in Family}

    def __getitem__(self, family: Family) -> Worker:
        return self._workers[family]

    def stop(self) -> None:
        for one in self._workers.values():
            one.stop()


class Iptables:
    """Our chains in one namespace."""

    def __init__(self, descriptor: int, workers: Workers) -> None:
        self._descriptor = descriptor
        self._workers = workers
        self._digests: dict[Family, object] = {}
        self._seen = Observed()
        # At the last look: rules of other people in the nat tables, and why we could write none.
        self.others, self.unfit = 0, ""

    def observe(self) -> Observed:
        """What our chains hold, in both families."""
        listings = {f: self._workers[f].ask(self._descriptor, {}) for f in Family}
        try:
            self._digests = {family: listing["digest"] for family, listing in listings.items()}
            self.others = sum(int(str(listing["others"])) for listing in listings.values())
            self.unfit = next((str(one["unfit"]) for one in listings.values() if one["unfit"]), "")
            self._seen = decode(listings)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._workers.stop()
            raise TryAgain(
                f"an iptables worker answered nonsense ({error!r})", "Try again"
            ) from error
        return self._seen

    def commit(self, plan: Plan) -> None:
        """Carry out the plan: one atomic replace per family, or up to five where several
        tables change. Whether the plan still fits is asked for both families before
        the first is changed."""
        if not self._fits(plan):
            raise Stale("a rule went or moved while we looked at it", "Try again")
        due = {family: made for family in Family if (made := steps(plan, family))}
        for family in list(due)[1:]:
            if self._workers[family].ask(self._descriptor, {})["digest"] != self._digests[family]:
                raise Stale("our chains changed while we looked at them", "Try again")
        for family, made in due.items():
            question: Json = {"steps": made, "digest": self._digests[family]}
            self._workers[family].ask(self._descriptor, question)

    def require(self, plan: Plan) -> None:
        """See that it can be carried out, before anything else is done for it."""
        if self.unfit and plan.table is not Table.DELETE:
            raise failure("Unfit", self.unfit)

    def _fits(self, plan: Plan) -> bool:
        """Whether what the plan rewrites stands where it says, at the last look: the digest tells
        only what came after that."""
        if plan.table is Table.DELETE:
            return True
        there = {(live.rule, live.handle) for live in self._seen.live}
        olds = (*plan.remove, *(live for live, _ in plan.change))
        return all(
            (old.rule, old.handle) in there if isinstance(old, Live) else old in self._seen.foreign
            for old in olds
        )

    def close(self) -> None:
        """Nothing is held: the workers leave the namespace after each request."""


def require() -> None:
    """Whether the workers could do anything at all."""
    _find()
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    except PermissionError as error:
        raise _not_permitted() from error


def _find() -> None:
    if find_spec("iptc") is None:
        raise BackendMissing("python-iptables is not installed", "Run: pip install python-iptables")


def _not_permitted() -> NotPermitted:
    return NotPermitted(
        "iptables may not be used", "Run as root, or with CAP_NET_ADMIN and CAP_NET_RAW"
    )


def failure(kind: str, text: str) -> Failure:
    """What an error of the worker means for the user."""
    if kind == "Unfit":
        what = f"python-iptables does not work with this machine's {text}"
        return BackendMissing(f"{what}; no rule was written", "Use --backend nftables")
    if kind == "Unusable" or text.startswith("can't find"):
        return BackendMissing(
            f"python-iptables cannot be used ({text})",
            "Install Debian's package iptables, or use --backend nftables",
        )
    if kind in ("Stale", "BlockingIOError") or "Resource temporarily unavailable" in text:
        return Stale(f"the iptables tables are busy or changed meanwhile ({text})", "Try again")
    if "ermission" in text or "not permitted" in text:
        return _not_permitted()
    if "does not exist" in text or "not found" in text or kind == "ModuleNotFoundError":
        return BackendMissing(
            f"iptables cannot be used ({text})",
            "Run: apt install iptables, and see that the kernel has iptable_nat, iptable_filter and"
            " iptable_mangle",
        )
    return Failure(f"iptables refused ({text})")
