"""Which tables of a namespace hold our rules: nftables, or the legacy tables of iptables.

Left to us, the choice follows what is live in the namespace, and what we chose before: it does not
change from one look to the next because of what others do.
"""

from contextlib import ExitStack
from typing import Protocol

from agent.errors import BackendMissing, Failure
from agent.kernel.foreign_rules import ForeignRules
from agent.kernel.iptables import Iptables
from agent.kernel.iptables import Workers as IptablesWorkers
from agent.kernel.kinds import Generation, Known
from agent.kernel.legacy_tables import any_in_use
from agent.kernel.libnftables import Libnftables
from agent.kernel.nftables import Nftables
from rules.model import Family, Observed
from rules.plan import Plan
from rules.words import counted

__all__ = ["ASKED", "AUTO", "IPTABLES", "NFTABLES", "Backends", "Workers", "chosen"]

AUTO, NFTABLES, IPTABLES = "auto", "nftables", "iptables"
ASKED = "asked for"


class Tables(Protocol):
    """Where rules are held."""

    def observe(self) -> Observed: ...
    def commit(self, plan: Plan) -> None: ...
    def close(self) -> None: ...


class Backends:
    """The tables that hold our rules here, and the others, if something of ours may be in them."""

    def __init__(self, name: str, reason: str, tables: Tables, other: Tables | None) -> None:
        self.name, self.reason = name, reason
        self.tables, self.other = tables, other

    @property
    def known(self) -> Known | None:
        """What nftables held at the last look."""
        modern = self.tables if isinstance(self.tables, Nftables) else self.other
        return modern.known if isinstance(modern, Nftables) else None

    def forget(self) -> None:
        """Take nothing for known: the next look lists the tables."""
        for tables in (self.tables, self.other):
            if isinstance(tables, Nftables):
                tables.known = None

    @property
    def kubevirt(self) -> frozenset[Family]:
        """In which families KubeVirt's own chains are live."""
        modern = self.tables if isinstance(self.tables, Nftables) else self.other
        return modern.kubevirt if isinstance(modern, Nftables) else frozenset()

    @property
    def generation(self) -> Generation | None:
        """Of the ruleset at the last look, where that tells all: the legacy tables have none."""
        known = self.known if self.other is None else None
        return known[0] if known else None

    def require(self, plan: Plan) -> None:
        """See that what is written goes where it should, before anything is."""
        if isinstance(self.tables, Iptables):
            self.tables.require(plan)

    def close(self) -> None:
        self.tables.close()
        if self.other is not None:
            self.other.close()


class Workers:
    """The processes for libraries, started when needed."""

    def __init__(self) -> None:
        self.iptables, self.libnftables = IptablesWorkers(), Libnftables()
        self.foreign = ForeignRules()

    def stop(self) -> None:
        self.iptables.stop()
        self.libnftables.stop()
        self.foreign.stop()


def chosen(
    asked: str, descriptor: int, workers: Workers, known: Known | None = None, why: str = ASKED
) -> Backends:
    """The backend of the namespace this thread is in; and why, where it is not left to us."""
    if asked == IPTABLES:
        other = _nftables_if_usable(descriptor, workers, known)
        if other is not None and other.kubevirt:
            other.close()
            raise Failure(
                "KubeVirt's own chains are live here, and iptables cannot come before them",
                "Use the backend nftables, or auto",
            )
        return Backends(IPTABLES, why, Iptables(descriptor, workers.iptables), other)
    legacy = Iptables(descriptor, workers.iptables) if legacy_is_live() else None
    with ExitStack() as undo:
        try:
            modern = Nftables(descriptor, workers.libnftables, known)
            undo.callback(modern.close)
            ours = modern.observe().table
        except BackendMissing as missing:
            if asked == NFTABLES or legacy is None:
                raise
            return Backends(IPTABLES, f"nftables cannot be used: {missing}", legacy, None)
        found = _chosen(asked, legacy, modern, ours=ours, why=why)
        undo.pop_all()
    return found


def _chosen(
    asked: str, legacy: Iptables | None, modern: Nftables, *, ours: bool, why: str
) -> Backends:
    if asked == NFTABLES:
        return _with_usable(legacy, why, modern)
    if ours:
        return _with_usable(legacy, "our table is there", modern)
    if modern.kubevirt:
        reason = "KubeVirt's own chains are there, and ours must come before them"
        return _with_usable(legacy, reason, modern)
    if legacy is not None:
        if legacy.observe().table:
            return Backends(IPTABLES, "our chains are in the legacy tables", legacy, modern)
        if legacy.others:
            reason = f"the legacy NAT tables hold {counted(legacy.others, 'rule')} of others"
            if not legacy.unfit:
                return Backends(IPTABLES, reason, legacy, modern)
            reason += f", but python-iptables does not work with this machine's {legacy.unfit}"
            return Backends(NFTABLES, reason, modern, None)
    reason = "no legacy NAT rules here; what iptables-nft writes is nftables, too"
    return Backends(NFTABLES, reason, modern, None)


def legacy_is_live() -> bool:
    """Whether somebody has used the legacy NAT tables in the namespace this thread is in."""
    return any_in_use({"nat"})


def _with_usable(legacy: Iptables | None, reason: str, modern: Nftables) -> Backends:
    """nftables, with the legacy tables where they can be asked. Only who must have nftables, or has
    it already, may go on without: otherwise rules of ours could stay in there unseen."""
    try:
        if legacy is not None:
            legacy.observe()
    except BackendMissing:
        return Backends(NFTABLES, f"{reason}; the legacy tables cannot be read", modern, None)
    return Backends(NFTABLES, reason, modern, legacy)


def _nftables_if_usable(descriptor: int, workers: Workers, known: Known | None) -> Nftables | None:
    try:
        return Nftables(descriptor, workers.libnftables, known)
    except BackendMissing:
        return None
