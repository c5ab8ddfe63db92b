"""How far the forgetting of flows has come, for the log, the metrics and `portranger status`."""

from agent.kernel.kinds import Flushed
from agent.log import Log
from agent.metrics import Metrics
from agent.status import Standing
from rules.values import replace


class Flushing:
    """Of all namespaces of a node. Every commit that may leave flows behind has a number."""

    def __init__(self, log: Log, metrics: Metrics) -> None:
        self._log, self._metrics = log, metrics
        self._latest = Flushed()

    @property
    def asked(self) -> int:
        """The number of the last commit that may have left flows behind."""
        return self._latest.asked

    @property
    def done(self) -> int:
        """All flows are forgotten that commits up to this one left behind."""
        return self._latest.done

    @property
    def open(self) -> frozenset[str]:
        """The namespaces in which flows are still to be forgotten."""
        return self._latest.open

    def heard(self, flushed: Flushed) -> bool:
        """Whether that has come further, or some namespace stands otherwise for it."""
        last, self._latest = self._latest, flushed
        before = last.waiting
        self._metrics.forgot(flushed.count)
        self._metrics.unflushed(len(flushed.waiting))
        for why in flushed.failures:
            self._metrics.failed()
            self._log.warning("flows not flushed", reason=why)
        for netns, why in flushed.waiting.items():
            if netns not in before:
                self._metrics.failed()
            self._log.once(
                ("flows", netns), "warning", "flows not flushed yet", netns=netns, reason=why
            )
        for netns in before.keys() - flushed.waiting.keys():
            self._log.settled(("flows", netns))
            self._log.info("flows flushed", netns=netns)
        return (last.done, last.open, before) != (flushed.done, flushed.open, flushed.waiting)

    def noted(self, standing: Standing) -> Standing:
        """With what a person should know of its flows."""
        why = self._latest.waiting.get(standing.netns)
        if why is None:
            return standing
        return replace(standing, notes=(*standing.notes, f"flows not flushed yet: {why}"))
