"""The VirtualMachineInstances of one node, kept in view: what they mean together, now; the Services
of the cluster, where they are to be published; and its policies, where they are to be enforced.

To the daemon it is what a directory of manifests is, with an instance in the place of a file. What
cannot be understood keeps its last good meaning, also over a restart; where it runs is taken from
the newest word, whatever else is wrong with it. An API server that does not answer changes nothing.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from agent.config import Kubernetes
from agent.sources.api import Api
from agent.sources.credentials import Credentials
from agent.sources.ears import Ears
from agent.sources.feedback import NORMAL, WARNING, Feedback, Warn
from agent.sources.following import Follower, Shared, followed
from agent.sources.handover import Handover, Predecessor
from agent.sources.instances import Instances, IsOver, Serves
from agent.sources.kubeconfig import load
from agent.sources.lawful import Lawful
from agent.sources.listening import troubles
from agent.sources.meaning import Enough, Meaning, Progress, Tiding
from agent.sources.policies import KIND as POLICY
from agent.sources.published import Published
from agent.sources.readings import left_of, texts_of
from agent.sources.services import KIND as SERVICE
from agent.sources.store import Store
from agent.sources.told import Reference
from agent.sources.vmis import Vmi
from rules.values import replace

FOLD = 0.003  # seconds: what is told within so short a time is read together
LONGEST_FOLD = 0.05
FIRST = 2.0  # seconds that the first look waits for the API server
AGAIN = 1.0  # seconds until whose a pod is, that several name, is found out again
PODS_AGAIN = 5.0  # seconds until it is looked again which pods have ended
GOODBYE = 0.2  # seconds for a thread to end


class Cluster:
    """The instances that run on a node, or are about to."""

    def __init__(  # noqa: PLR0913 - the rest by name
        self,
        credentials: Credentials,
        node: str,
        store: Store,
        beat: Progress = lambda: None,
        *,
        serves: Serves = lambda _: "",
        is_over: IsOver | None = None,
        services: bool = False,
        policies: bool = False,
        left: Handover | None = None,
        clock: Callable[[], float] = time.monotonic,
        warn: Warn = lambda _: None,
    ) -> None:
        """Where several instances name one pod, `serves` tells by its UID which it serves; and
        `is_over` whether one that is still named has ended. Services are asked for only by who
        wants to publish them, and policies by who enforces them. `left` is what the source before
        this one knew."""
        self._node, self._clock = node, clock
        self._ask_again: float | None = None  # when, whose a pod is
        # When, which pods have ended; None: nobody could tell.
        self._pods_again = clock() + PODS_AGAIN if is_over else None
        self.warnings = credentials.warnings
        self._before = Predecessor(left)
        known = self._before.texts
        earlier = store.load()
        of_services = texts_of(SERVICE, store, earlier) if services else None
        of_policies = texts_of(POLICY, store, earlier) if policies else None
        # What nobody asks for any more is among what is left, and goes.
        self._instances = Instances(node, store, earlier, serves, beat, is_over=is_over, left=known)
        self.meaning = Meaning(unreadable="it was not read yet")
        self._anew = False  # whether all is to be read again
        self._looked = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._shared = Shared(node, self._changed)
        self._api = Api(credentials)
        self._feedback = Feedback(self._api.another(), node, warn=warn)
        self._followers = followed(self._api, self._shared)
        self._published = (
            Published(
                self._api.another(),
                node,
                self._changed,
                of_services,
                left=left_of(SERVICE, known),
                clock=clock,
            )
            if of_services is not None
            else None
        )
        self._lawful = (
            Lawful(
                self._api.another(),
                self._changed,
                of_policies,
                left=left_of(POLICY, known),
                clock=clock,
            )
            if of_policies is not None
            else None
        )
        for follower in self._followers:
            follower.start()

    # ------------------------------------------------------------------- what the daemon uses

    def __str__(self) -> str:
        return f"{self._api} (node {self._node})"

    @property
    def namespaces(self) -> frozenset[str]:
        """Where the machines are that were last known, also to an earlier run."""
        return self._instances.namespaces

    @property
    def due(self) -> float | None:
        """The threads that listen make themselves heard; a launcher does not."""
        due = (self._due_to_look, self._pods_again)
        return min((at for at in due if at is not None), default=None)

    @property
    def _due_to_look(self) -> float | None:
        others = [one.due for one in (self._published, self._lawful) if one]
        return min((at for at in (self._ask_again, *others) if at is not None), default=None)

    def filenos(self) -> tuple[int, ...]:
        """What to poll."""
        return (self._wake,)

    def heard(self) -> bool:
        """Whether there is something new; a burst is let pass, so that it is read at once."""
        deadline = self._clock() + LONGEST_FOLD
        due, now = self._due_to_look, self._clock()
        new = due is not None and due <= now
        if self._pods_again is not None and self._pods_again <= now:
            self._pods_again = now + PODS_AGAIN
            new |= self._instances.pods_ended()
        while self._drained() and self._clock() < deadline:
            new = True
            time.sleep(FOLD)
        return new

    def renew(self) -> None:
        """Whatever is known, all of it is to be read again."""
        self._anew = True

    def look(self, beat: Progress = lambda: None) -> Meaning:
        """What is known now; only instances of which something changed are read again."""
        deadline = self._clock() + FIRST
        first, self._looked = not self._looked, True
        if first:
            self.wait(FIRST, beat)
        with self._shared.turn:
            views = [one.seen for one in self._followers]
            listed = all(one.listed for one in self._followers)
            away = troubles(*(one.listener for one in self._followers))
        seen: dict[str, Vmi] = {} if listed else dict(self._instances.recalled)
        for view in views:
            for label, vmi in view.items():
                if label not in seen or vmi.newer(seen[label]):
                    seen[label] = vmi
        if not listed and not away:
            away = f"the instances of node {self._node} were not listed yet"
        anew, self._anew = self._anew, False
        meaning = self._instances.look(seen, beat, unreadable=away, anew=anew)
        meaning = self._before.with_machines(meaning)
        self._ask_again = self._clock() + AGAIN if self._instances.disputed else None
        meaning = self._with_services(meaning, beat, anew=anew)
        if first and self._lawful is not None:
            # Only who knows the machines knows whom else to ask for.
            self._lawful.look(meaning.machines, beat)
            self._await(self._lawful.answered, deadline - self._clock(), beat)
        self.meaning = self._with_laws(meaning, beat, anew=anew)
        return self.meaning

    def wait(self, seconds: float, beat: Progress = lambda: None) -> bool:
        """For the first word of the API server, good or bad; whether there was one."""
        return self._await(self._answered, seconds, beat)

    def _await(self, answered: Callable[[], bool], seconds: float, beat: Progress) -> bool:
        deadline = self._clock() + seconds
        while not answered():
            left = deadline - self._clock()
            if left <= 0:
                return False
            time.sleep(min(left, FOLD))
            beat()
        return True

    def _answered(self) -> bool:
        if self._published is not None and not self._published.answered():
            return False
        if self._lawful is not None and not self._lawful.answered():
            return False
        return all(one.listed or one.trouble for one in self._followers)

    def is_another(self) -> bool:
        """A directory may be mounted over; a cluster is the one it was."""
        return False

    def remember(self, beat: Progress = lambda: None, enough: Enough = lambda: False) -> bool:
        """Store what changed of the last good texts, for the next run, until it is enough; whether
        that was all."""
        if not self.meaning.unreadable and not self._instances.remember(beat, enough):
            return False
        others = [one for one in (self._published, self._lawful) if one]
        return all(one.remember(beat, enough) for one in others)

    def texts(self) -> dict[str, str]:
        """The last good texts, as they would be stored, for the source that takes its place."""
        parts = (self._instances, self._published, self._lawful)
        return {
            label: text for one in parts if one is not None for label, text in one.texts().items()
        }

    def tell(self, machine: str, tiding: Tiding, message: str) -> None:
        """As an event on the instance, the Service or the policy."""
        reference = self.reference(machine)
        if reference is not None:
            kind = NORMAL if tiding in (Tiding.APPLIED, Tiding.REPAIRED) else WARNING
            self._feedback.say(reference, kind, tiding.value, message)

    def reference(self, label: str) -> Reference | None:
        """The object of that name: an instance by its machine's, a Service or a policy."""
        for one in (self._instances, self._published, self._lawful):
            if one is not None and (found := one.reference(label)) is not None:
                return found
        return None

    def traffic(self) -> dict[str, int]:
        """With the API server."""
        return {
            "kubernetes_requests": self.requests,
            "kubernetes_received_bytes": self.received,
            "kubernetes_events_sent": self._feedback.sent,
            "kubernetes_events_dropped": self._feedback.dropped,
            "kubernetes_events_failed": self._feedback.failed,
        }

    def close(self) -> None:
        """Stop listening."""
        self._shared.stop.set()
        for one in self._threads:
            one.interrupt()
        self._feedback.close(GOODBYE / 2)
        if all(one.ended(GOODBYE) for one in self._threads):
            os.close(self._wake)  # else somebody might still write to whatever has its number then

    @property
    def requests(self) -> int:
        """That were made of the API server."""
        return sum(one.requests for one in self._threads)

    @property
    def received(self) -> int:
        """Bytes that it answered."""
        return sum(one.received for one in self._threads)

    @property
    def _threads(self) -> list[Follower | Ears]:
        return [*self._followers, *(one.ears for one in (self._published, self._lawful) if one)]

    # ------------------------------------------------------------------------------- reading

    def _changed(self) -> None:
        """Called by the threads that listen."""
        with suppress(OSError):  # closed, or full and so readable anyway
            os.eventfd_write(self._wake, 1)

    def _drained(self) -> bool:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        return True

    def _with_services(self, meaning: Meaning, beat: Progress, *, anew: bool) -> Meaning:
        """Whatever is wrong with Services, machines are served all the same."""
        published = self._published
        if published is None:
            return replace(meaning, endpoints={})
        view = published.look(beat, anew=anew)
        unknown = published.unknown
        found = replace(
            meaning,
            services=view.services,
            endpoints=view.endpoints,
            services_unknown=unknown,
            services_away="" if unknown else published.away,
            problems=(*meaning.problems, *view.problems),
            held=(*meaning.held, *view.held),
        )
        return self._before.with_services(found, unknown)

    def _with_laws(self, meaning: Meaning, beat: Progress, *, anew: bool) -> Meaning:
        """Whatever is wrong with policies, machines are served all the same."""
        lawful = self._lawful
        if lawful is None:
            return meaning
        view = lawful.look(meaning.machines, beat, anew=anew)
        unknown = lawful.unknown
        found = replace(
            meaning,
            laws=view.laws,
            laws_unknown=unknown,
            laws_away="" if unknown else lawful.away,
            problems=(*meaning.problems, *view.problems),
            held=(*meaning.held, *view.held),
            shut=(*meaning.shut, *view.shut),
        )
        return self._before.with_laws(found, unknown)


def connected(  # noqa: PLR0913 - the rest by name
    config: Kubernetes,
    store: Store,
    beat: Progress,
    serves: Serves,
    *,
    is_over: IsOver | None = None,
    policies: bool = False,
    left: Handover | None = None,
    warn: Warn,
) -> Cluster:
    """The source that a configuration names, in the place of the one that left this."""
    credentials = load(config.kubeconfig, os.environ)
    node = config.node_name or os.environ.get("NODE_NAME") or socket.gethostname()
    return Cluster(
        credentials,
        node,
        store,
        beat,
        serves=serves,
        is_over=is_over,
        services=config.services,
        policies=policies,
        left=left,
        warn=warn,
    )
