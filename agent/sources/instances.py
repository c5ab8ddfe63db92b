"""What the VirtualMachineInstances of a node mean together: each as it was last understood, in the
pods that are its own.

What cannot be understood keeps its last good meaning, also over a restart; where it runs is taken
from the newest word, whatever else is wrong with it.
"""

from collections.abc import Callable, Mapping

from agent.sources import files
from agent.sources.answers import Object
from agent.sources.boundary import guarded, problem
from agent.sources.granting import grant
from agent.sources.meaning import Enough, Meaning, Progress
from agent.sources.readings import left_of
from agent.sources.settled import settle
from agent.sources.store import Store, Texts
from agent.sources.told import Reference
from agent.sources.vmis import (
    POD,
    STORED,
    Place,
    Vmi,
    closed,
    decoded,
    kept,
    place,
    placed,
    recalled,
    understood,
)
from rules.model import Machine
from rules.problems import Problem
from rules.values import Value, replace

Serves = Callable[[str], str]  # the UID of a pod → that of the instance that it serves
IsOver = Callable[[str], bool | None]  # the UID of a pod → whether it has ended; None: never here
_Over = frozenset[tuple[str, str]]  # instances with a pod that they name, and that has ended
_Made = tuple[Object, Object, tuple[str, ...]]  # of what a stored text is made: `kept` says how


class _Known(Value, kw_only=True):
    """An instance as last read."""

    vmi: Vmi
    document: Object
    says: tuple[Machine, ...]
    problems: tuple[Problem, ...]
    place: Place


class Instances:
    """Those that run on a node, or are about to. Where several name one pod, `serves` tells which
    it serves."""

    def __init__(  # noqa: PLR0913 - the rest by name
        self,
        node: str,
        store: Store,
        earlier: Mapping[str, str],
        serves: Serves,
        beat: Progress,
        *,
        is_over: IsOver | None = None,
        left: Mapping[str, str] | None = None,
    ) -> None:
        """`earlier` is what an earlier run stored, and `left` what the source before this one
        knew."""
        self._node, self._serves, self._is_over = node, serves, is_over
        self._over: _Over = frozenset()
        self._texts: Texts[_Made] = Texts(store, earlier, lambda made: kept(*made, node))
        self.recalled: dict[str, Vmi] = {}  # that an earlier run knew
        self._known: dict[str, _Known] = {}
        self._good: dict[str, Object] = {}  # what each said when it was last understood
        self._meanings: dict[str, tuple[Machine, ...]] = {}
        self._holders: Mapping[str, str] = {}  # of each pod, the instance that has it
        self._strange: set[str] = set()  # namespaces of what another source had stored
        self._placed: dict[tuple[str, str], tuple[Machine, Place, Machine]] = {}
        self.disputed = False  # whether it could not be told of some pod whose it is
        for label, text in sorted({**earlier, **left_of(STORED, left or {})}.items()):
            self._recall(label, text)
            beat()

    @property
    def namespaces(self) -> frozenset[str]:
        """Where the machines are that were last known, also to an earlier run."""
        return frozenset({f"{POD}{pod}" for pod in self._holders} | self._strange)

    def reference(self, label: str) -> Reference | None:
        known = self._known.get(label)
        return known.vmi.reference if known is not None else None

    def look(
        self, seen: Mapping[str, Vmi], beat: Progress, *, unreadable: str, anew: bool
    ) -> Meaning:
        """What these mean; only those of which something changed are read again."""
        self._look(seen, beat, anew=anew)
        self._over = self._ended()
        return self._settled(unreadable)

    def pods_ended(self) -> bool:
        """Whether pods have ended, or come back, since the last look: nobody tells of that."""
        return self._over != self._ended()

    def _ended(self) -> _Over:
        """KubeVirt names a pod for as long as it can be read, also one that has ended. One of which
        nothing is here is no more, either, where another of the same instance is: of one instance
        no two ever begin on one node."""
        is_over = self._is_over
        if is_over is None:
            return frozenset()
        found: set[tuple[str, str]] = set()
        for label, one in self._known.items():
            over = {pod: is_over(pod) for pod in one.place.pods}
            here = any(ended is False for ended in over.values())
            found |= {
                (label, pod)
                for pod, ended in over.items()
                if ended or (ended is None and (here or (label, pod) in self._over))
            }
        return frozenset(found)

    def remember(self, beat: Progress, enough: Enough) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        self.recalled = {}
        return self._texts.remember(self._wanted(), beat, enough)

    def texts(self) -> dict[str, str]:
        """The last good texts, as they would be stored."""
        return {label: kept(*made, self._node) for label, made in self._wanted().items()}

    def _wanted(self) -> dict[str, _Made]:
        return {
            label: (good, self._known[label].document, self._pods(label))
            for label, good in self._good.items()
        }

    def _recall(self, label: str, text: str) -> None:
        vmi = guarded(lambda: recalled(text), label)
        if isinstance(vmi, Problem):
            return
        if vmi is None or vmi.label != label:
            self._strange |= {one.netns for one in files.understood(label, text).machines}
            return
        known = self._understood(vmi)
        if not known.problems:
            self.recalled[label] = vmi
            self._known[label] = known
            self._good[label], self._meanings[label] = known.document, known.says
            self._holders = {**self._holders, **dict.fromkeys(known.place.pods, label)}

    def _look(self, seen: Mapping[str, Vmi], beat: Progress, *, anew: bool) -> None:
        before, self._known = self._known, {}
        for label, vmi in sorted(seen.items()):
            known = before.get(label)
            same = known is not None and (known.vmi.uid, known.vmi.text) == (vmi.uid, vmi.text)
            if known is not None and same and not anew:
                self._known[label] = known if known.vmi is vmi else replace(known, vmi=vmi)
                continue
            if known is not None and known.vmi.uid != vmi.uid:  # another of the same name
                self._forget(label)
            self._known[label] = self._understood(vmi, known)
            beat()
        for label in before.keys() - seen.keys():
            self._forget(label)

    def _forget(self, label: str) -> None:
        self._good.pop(label, None)
        self._meanings.pop(label, None)

    def _understood(self, vmi: Vmi, before: _Known | None = None) -> _Known:
        """What an instance says, and where it is. Where that meets a bug it says nothing, and is
        where it was before."""
        document = decoded(vmi.text)
        said = guarded(lambda: understood(vmi, document), vmi.label)
        if vmi.fault:
            said = problem(vmi.label, vmi.fault)
        says, problems = ((), (said,)) if isinstance(said, Problem) else said
        where = guarded(lambda: place(document, self._node), vmi.label)
        if isinstance(where, Problem):
            problems = (*problems, where)
            same = before is not None and before.vmi.uid == vmi.uid
            where = before.place if before is not None and same else Place((), {}, ())
        return _Known(vmi=vmi, document=document, says=says, problems=problems, place=where)

    def _settled(self, unreadable: str) -> Meaning:
        known = self._known
        settled = settle(
            self._meanings,
            {label: None if one.problems else one.says for label, one in known.items()},
        )
        self._good |= {
            label: one.document for label, one in known.items() if label not in settled.held
        }
        held = tuple(sorted(settled.held & self._meanings.keys()))
        # What one without a meaning declares can run in its own pods only, which nobody else has:
        # nobody else's rules need stay for it.
        self._meanings = {
            label: machines
            for label, machines in settled.meanings.items()
            if label not in settled.held or label in self._meanings
        }
        shut = {
            label: machines
            for label, one in known.items()
            if label not in self._meanings and (machines := closed(one.vmi, one.document))
        }
        granted = grant(
            {label: one.place.pods for label, one in known.items()}, self._holders, self._served
        )
        self._holders = granted.holders
        self.disputed = bool(granted.problems)
        return Meaning(
            machines=self._everywhere({**self._meanings, **shut}),
            shut=tuple(sorted(shut)),
            problems=(
                *(problem for one in known.values() for problem in one.problems),
                *settled.problems,
                *granted.problems,
            ),
            skipped=tuple(
                f"{label}: {odd}" for label, one in known.items() for odd in one.place.odd
            ),
            held=held,
            count=len(known),
            unreadable=unreadable,
            contested=granted.contested,
            instances={pod: known[label].vmi.uid for pod, label in granted.holders.items()},
        )

    def _served(self, pod: str) -> str:
        """The instance that the launcher in a pod was started for."""
        uid = self._serves(pod)
        labels = [label for label, one in self._known.items() if uid and one.vmi.uid == uid]
        return labels[0] if labels else ""

    def _everywhere(self, meanings: Mapping[str, tuple[Machine, ...]]) -> tuple[Machine, ...]:
        """Every machine in each of its pods; what did not change is the very same."""
        before, self._placed = self._placed, {}
        for label, machines in sorted(meanings.items()):
            where = self._known[label].place
            for machine in machines:
                for pod in self._pods(label):
                    known = before.get((label, pod))
                    if known is None or known[0] != machine or known[1] is not where:
                        known = machine, where, placed(machine, where, pod)
                    self._placed[label, pod] = known
        return tuple(known[2] for known in self._placed.values())

    def _pods(self, label: str) -> tuple[str, ...]:
        """The pods on this node that are an instance's, and nobody else's, and have not ended."""
        pods = [pod for pod in self._known[label].place.pods if (label, pod) not in self._over]
        return tuple(pod for pod in pods if self._holders.get(pod) == label)
