"""What the daemon lets others know: its log, the status that is served and that the service manager
shows, and words to whoever wrote a manifest."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from agent.devices import Devices
from agent.keeper import Keeper
from agent.kernel.pods import POD
from agent.log import Log
from agent.notify import Notifier
from agent.revision import Revision
from agent.sources.meaning import Meaning, Source, Tiding
from agent.status import Policies, Standing, State, Status, tally
from agent.waiting import Bell
from rules.fences import unprotected
from rules.problems import Problem
from rules.values import replace
from rules.words import counted, few

SETTLED = {State.IN_SYNC, State.PENDING}
INSTANCE = "VirtualMachineInstance/"  # where there are no files


class News:
    """Of one run; `status` is a value that is replaced, for other threads to read."""

    def __init__(
        self, log: Log, notifier: Notifier, devices: Devices, enforces: Callable[[], bool]
    ) -> None:
        """`enforces` tells whether policies are, as it is configured now."""
        self._log, self._notifier, self._devices = log, notifier, devices
        self._enforces = enforces
        self._problems: frozenset[Problem] = frozenset()
        self._skipped: frozenset[str] = frozenset()
        self._bare: frozenset[str] = frozenset()  # whom policies do not protect
        self._ready: bool | None = None  # as the log has it; None: the first pass is not done
        self._unready = "not every namespace was checked yet"
        self.bell = Bell()  # rings when there is another status
        self.outdated = ""  # why another configuration goes on than the one in the file
        self.status = Status(
            version=version("portranger"),
            pid=os.getpid(),
            started=time.time(),
            policies=Policies(enforced=enforces()),
        )

    def more(self) -> bool:
        """Whether more is known of devices than was published."""
        return self._devices.news()

    def _away(self, what: str, why: str, kept: str) -> None:
        """Something of the source cannot be heard of, or can again."""
        if why:
            so = f"what is {kept} goes on"
            self._log.once(what, "warning", f"{what} away", why=why, so=so)
        else:
            self._log.settled(what)

    def tell(self, source: Source) -> None:
        """What is new in what the source says: in the log, and to whoever wrote it there."""
        meaning = source.meaning
        if meaning.unreadable:
            fix = "what was running goes on"
            self._log.once("source", "warning", "source away", why=meaning.unreadable, so=fix)
        elif self.status.unreadable:
            self._log.settled("source")
            self._log.info("source back", source=source)
        self._away("services", meaning.services_unknown or meaning.services_away, "published")
        self._away("policies", meaning.laws_unknown or meaning.laws_away, "enforced")
        found = frozenset(meaning.problems)
        for problem in sorted(found - self._problems, key=str):
            so = "nothing of it is applied"
            if problem.file in meaning.held:
                so = "the last good meaning of it goes on"
            elif problem.file in meaning.shut:
                so = "until it is mended, its policies allow nothing to what they select"
                if problem.file.startswith(INSTANCE):
                    so = "until it is mended, no port of it is open"
            self._log.warning("bad manifest", problem=str(problem), so=so)
            conflict = problem.code in ("conflict", "pod-claimed-twice")
            tiding = Tiding.CONFLICT if conflict else Tiding.REJECTED
            source.tell(problem.file, tiding, f"{problem.at('', 0)} {so.capitalize()}.")
        for file in sorted({one.file for one in self._problems} - {one.file for one in found}):
            self._log.info("manifest mended or removed", file=file)
        self._problems = found
        for line in sorted(set(meaning.skipped) - self._skipped):
            self._log.info("skipped", what=line)
        self._skipped = frozenset(meaning.skipped)
        bare = self._unprotected(meaning)
        for line in sorted(bare - self._bare):
            self._log.warning("policy without effect", what=line)
        self._bare = bare

    def _unprotected(self, meaning: Meaning) -> frozenset[str]:
        """Whom policies select, without effect."""
        if not self._enforces():
            return frozenset()
        try:
            return frozenset(unprotected(meaning.machines, meaning.laws))
        except Exception:  # a bug met in one policy, which the keeper meets, too, and tells
            return self._bare

    def publish(
        self,
        source: Source,
        keeper: Keeper,
        unwritable: str,
        revision: Revision,
        last_valid: Mapping[str, float],
    ) -> None:
        """How everything stands now, for whoever asks."""
        meaning = source.meaning
        standings = self._with_devices(meaning, keeper.standings)
        states = {one.state for one in standings}
        readable = not meaning.unreadable
        self._unready = _unready(keeper, meaning, standings)
        self.status = replace(
            self.status,
            ready=not self._unready,
            synced=time.time()
            if keeper.tried and readable and not meaning.problems and states <= SETTLED
            else self.status.synced,
            revision=revision,
            source=str(source),
            traffic=source.traffic(),
            unreadable=meaning.unreadable,
            outdated=self.outdated,
            unwritable=unwritable,
            manifests=meaning.count,
            problems=meaning.problems,
            last_valid=last_valid,
            policies=Policies(
                enforced=self._enforces(),
                count=len(meaning.laws.policies),
                why=meaning.laws_unknown or meaning.laws_away,
            ),
            allocations=keeper.allocations,
            namespaces=standings,
        )
        self.bell.ring()
        self._notifier.status(self.summary)
        if self._ready is not None and self._ready != self.status.ready:
            self.tell_readiness("change")

    def tell_readiness(self, after: str) -> None:
        """Log what /readyz answers: after the start and each reload, then whenever it changes."""
        self._ready = self.status.ready
        if self._ready:
            self._log.info("ready", after=after, status=self.summary)
        else:
            self._log.warning("not ready", after=after, why=self._unready, status=self.summary)

    @property
    def summary(self) -> str:
        """All of it in a line."""
        said = tally(standing.state.value for standing in self.status.namespaces)
        problems = len(self.status.problems)
        wrong = f", {counted(problems, 'problem')} in manifests" if problems else ""
        return f"Namespaces: {said}{wrong}"

    def _with_devices(
        self, meaning: Meaning, standings: tuple[Standing, ...]
    ) -> tuple[Standing, ...]:
        """With a note on each network resource of a pod that was found: which device backs it."""
        found = {one.netns for one in standings if one.netns.startswith(POD) and one.identity}
        notes: dict[str, list[str]] = {}
        for machine in meaning.machines:
            for other in machine.not_ours if machine.netns in found else ():
                devices = self._devices.of(machine.netns) if other.resource else {}
                if link := devices.get(other.resource):
                    note = f"{machine}/{other.interface}: {other.resource} is the device {link}"
                    notes.setdefault(machine.netns, []).append(note)
        return tuple(
            replace(one, notes=(*one.notes, *notes[one.netns])) if one.netns in notes else one
            for one in standings
        )


def _unready(keeper: Keeper, meaning: Meaning, standings: Iterable[Standing]) -> str:
    """Why the node is not ready; nothing if it is."""
    if meaning.unreadable:
        return meaning.unreadable
    failing = [one.netns for one in standings if one.state is State.FAILING]
    if failing:
        return f"namespaces failing: {', '.join(few(failing))}"
    return "" if keeper.tried else "not every namespace was checked yet"
