"""`portranger run`: waits for something to happen, and has it looked at.

One thread decides everything. It sleeps in one epoll over the manifests' directory, the names of
namespaces, the kernel's events and signals. What may block in a namespace is done by other threads,
one at a time for each namespace; another answers HTTP from a value that this one replaces.
"""

import gc
import math
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from agent import lock, signals
from agent.config import Config, load
from agent.devices import Devices
from agent.errors import BadConfiguration, Failure, TryAgain
from agent.keeper import Keeper
from agent.kernel import counters
from agent.kernel.arrivals import Arrivals
from agent.kernel.deferred import Deferred
from agent.kernel.events import Events, Gone, Lost, Moved, Relinked
from agent.kernel.live import LiveKernel
from agent.kernel.netns import RUN
from agent.kernel.pods import POD, Pods
from agent.log import Log
from agent.metrics import Metrics
from agent.news import News
from agent.node_addresses import NodeAddresses
from agent.notify import Notifier
from agent.publisher import Publisher, publishing
from agent.revision import Revision, Revisions
from agent.server import Busy, Server
from agent.sources.boundary import described
from agent.sources.directory import Directory
from agent.sources.handover import Handover
from agent.sources.last_valid import LastValid
from agent.sources.meaning import Meaning, Source, Tiding, outdated
from agent.sources.store import Store
from agent.sources.watch import Watch
from agent.status import Standing
from agent.workqueue import Bounded, Workqueue
from rules.fences import Laws
from rules.shapes import lookup_of, name
from rules.values import replace
from rules.words import few

SLICE = 0.1  # seconds of writing down between two looks at what happens
STUCK = 60.0  # seconds without progress in the middle of work
COUNTING = 1.0  # seconds for the counters of one namespace
STOP = 8.0  # seconds from a signal to the end; service managers kill after ten
LISTEN_AGAIN = 10.0  # seconds until an address is tried again that somebody else has
SELDOM = 20_000, 50, 50  # when cycles are looked for: there are few, and much that is none


class _Stopped(Exception):
    """We were told to stop in the middle of reading or storing manifests."""


class Daemon:
    """From start to stop."""

    def __init__(self, path: str | None, log: Log, notifier: Notifier) -> None:
        self._path = path
        self._config = load(path)
        self._log = log
        self._notifier = notifier
        self._stop = self._reload = False
        self._read = True  # whether the source is to be looked at
        self._taken: Meaning | None = None  # what it last said
        self._stored = True  # whether what it says is written down
        self._resync = 0.0
        self._progress: float | None = None  # when work last went on; None: waiting for some
        self._fed = -math.inf
        self._started = False
        self._revision = Revision()  # how far it has come

    def run(self) -> int:
        """Until told to stop; rules stay."""
        gc.set_threshold(*SELDOM)
        self._deadline = signals.Deadline(STOP, self._give_up)
        with ExitStack() as stack:
            stack.enter_context(lock.held(self._config.state_dir, self._warn))
            self._wake = stack.enter_context(signals.heard(self._signalled))
            with suppress(_Stopped):
                self._set_up(stack)
                self._first()
                while not self._stop:
                    self._turn()
            self._notifier.stopping()
            self._log.info("stopping", rules="stay")
        return 0

    # ------------------------------------------------------------------------------- set-up

    def _set_up(self, stack: ExitStack) -> None:
        config = self._config
        self._metrics = Metrics(lambda: self._news.status, self._counted)
        self._events = Events()
        stack.callback(self._events.close)
        self._arrivals = Arrivals(self._warn)
        stack.callback(self._arrivals.close)
        self._epoll = stack.enter_context(select.epoll())
        self._epoll.register(self._wake.fileno(), select.EPOLLIN)
        for descriptor in self._events.filenos():
            self._epoll.register(descriptor, select.EPOLLIN)
        for descriptor, mask in self._arrivals.filenos():
            self._epoll.register(descriptor, mask)
        self._workqueue, self._counting = Workqueue(), Bounded(COUNTING)
        self._epoll.register(self._workqueue.fileno(), select.EPOLLIN)
        self._flushed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        stack.callback(os.close, self._flushed)
        self._epoll.register(self._flushed, select.EPOLLIN)
        self._later = Deferred(lambda: os.eventfd_write(self._flushed, 1))
        stack.callback(self._stop_flushing)
        self._kernel = self._made_kernel()
        devices = Devices(self._resources, self._warn)
        self._epoll.register(devices.fileno(), select.EPOLLIN)
        self._news = News(self._log, self._notifier, devices, lambda: self._config.enforces)
        self._revisions = Revisions(self._news.status.started)
        self._store = Store(config.state_dir, self._warn)
        self._publisher = Publisher(
            self._store,
            self._metrics,
            *publishing(config),
            elsewhere=[f"{config.kubernetes.proc}/1/ns/net"],
        )
        self._last_valid = LastValid(self._store)
        self._keeper = Keeper(
            self._kernel,
            self._log,
            self._metrics,
            publisher=self._publisher,
            tell=self._told,
            workqueue=self._workqueue,
            node=NodeAddresses(lambda: self._config.node_namespaces, self._warn),
        )
        self._use(self._made_source())
        own = (
            {self._publisher.place} if self._store.has_published or not config.publishes else set()
        )
        self._keeper.leave({*self._store.leaving, *self._source.namespaces, *own})
        self._server: Server | None = None
        stack.callback(self._end)
        self._serve_if_free()

    def _stop_flushing(self) -> None:
        if not self._later.stop():
            so = "the next start sweeps them"
            self._log.warning("flows not flushed yet", reason="stopped", consequence=so)

    def _end(self) -> None:
        """Of what a reload may have replaced."""
        self._kernel.close()
        self._source.close()
        self._hang_up()

    def _made_source(self, left: Handover | None = None) -> Source:
        """The one that is configured now; it begins with what the one before it knew."""
        config = self._config
        if config.source == "kubernetes":
            from agent.sources.kubernetes import connected

            cluster = connected(
                config.kubernetes,
                self._store,
                self._reads,
                self._serves,
                is_over=self._is_over,
                policies=config.enforces,
                left=left,
                warn=self._warn,
            )
            for warning in cluster.warnings:
                self._warn(warning)
            return cluster
        watch = Watch(config.manifests, warn=self._warn)
        return Directory(config.manifests, self._store, watch, self._reads, left=left)

    def _use(self, source: Source) -> None:
        self._source, self._made_of = source, _source_of(self._config)
        for descriptor in source.filenos():
            self._epoll.register(descriptor, select.EPOLLIN)

    def _made_kernel(self) -> LiveKernel:
        """What cannot even look at its own namespace would fail in every other."""
        config = self._config
        pods = Pods(config.kubernetes.kubelet_root, config.kubernetes.proc)
        kernel = LiveKernel(config.backend, later=self._later, events=self._events, pods=pods)
        kernel.check()
        return kernel

    def _serve(self) -> None:
        listen = self._config.listen
        if listen is None or self._server is not None:
            return
        self._server = Server(
            listen.host,
            listen.port,
            status=lambda: self._news.status,
            beat=self._beat,
            metrics_text=self._metrics.text,
            log=self._warn,
            limit=STUCK,
            bell=self._news.bell,
        )
        host, port = self._server.address
        self._log.info("listening", address=host, port=port)

    def _serve_if_free(self) -> None:
        """Whoever took our port first, be it somebody without rights, keeps us from telling how
        things stand, but not from forwarding."""
        self._listen = math.inf
        try:
            self._serve()
        except Busy as busy:
            self._listen = time.monotonic() + LISTEN_AGAIN
            self._log.once("listen", "error", "not listening", why=busy, so="all else goes on")

    def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _first(self) -> None:
        self._log.info(
            "started",
            version=self._news.status.version,
            pid=os.getpid(),
            source=self._source,
            backend=self._config.backend,
        )
        self._work_until_settled()
        self._ready("start")
        self._remember()

    def _ready(self, after: str) -> None:
        """Every namespace was tried: that is what a service manager waits for. Whether all went
        well is in the log, and at /readyz."""
        self._started = True
        if not self._stop:
            self._notifier.ready(self._news.summary)
            self._news.tell_readiness(after)

    # -------------------------------------------------------------------------------- a turn

    def _turn(self) -> None:
        self._wait()
        self._hear()
        if self._reload and not self._stop:
            self._reload = False
            self._renew()
            self._work_until_settled()
            self._ready("reload")
            self._remember()
        elif not self._stop:
            self._work()
            self._remember()

    def _wait(self) -> None:
        due = [self._resync, self._listen, self._store.due]
        due += [] if self._taken is None else [self._keeper.due]
        due += [one for one in (self._source.due, self._arrivals.due) if one is not None]
        due += [] if self._stored else [-math.inf]
        if self._notifier.watchdog_seconds:
            due.append(self._fed + self._notifier.watchdog_seconds / 3)
        self._progress = None
        self._epoll.poll(max(0.0, min(due) - time.monotonic()))
        self._progressed()

    def _hear(self) -> None:
        self._hear_kernel()
        self._read |= self._source.heard()
        now = time.monotonic()
        if now >= self._resync:
            self._read = True
            self._keeper.look_at_all()
        signals.drain(self._wake)
        self._workqueue.drain()
        with suppress(BlockingIOError):
            os.eventfd_read(self._flushed)

    def _hear_kernel(self) -> None:
        for event in self._events.read():
            match event:
                case Moved(nsid, generation, pid, process):
                    self._keeper.moved(nsid, generation, (process, pid))
                case Relinked(nsid):
                    self._keeper.relinked(nsid)
                case Gone(nsid):
                    self._keeper.gone(nsid)
                case Lost():
                    self._metrics.lost_events()
                    self._log.warning("events lost", so="everything is looked at")
                    self._keeper.look_at_all()
        if self._arrivals.stirred():
            self._keeper.arrived()
            if self._source.is_another():
                self._source.renew()
                self._read = True

    def _work(self) -> None:
        now = time.monotonic()
        if now >= self._resync:
            self._resync = now + self._config.resync_seconds
        if now >= self._listen:
            self._serve_if_free()
        if self._read:
            self._read = False
            self._take(self._looked_at())
        if self._taken is None:
            return
        self._store.leave(self._keeper.leaving)
        looked = self._keeper.work(self._progressed, lambda: self._stop, self._hear_kernel)
        self._arrivals.follow(self._folders())
        if looked:
            self._metrics.passed()
        if self._keeper.news() or looked or self._news.more() or not self._revision.checked:
            self._revision = self._come_to(self._taken)
            self._publish()

    def _come_to(self, meaning: Meaning) -> Revision:
        """How far it has come, after namespaces were looked at and flows flushed."""
        unapplied, flushing = self._keeper.unapplied, self._keeper.flushing
        self._revisions.advance(settled=not unapplied, asked=flushing.asked, done=flushing.done)
        return Revision(
            wanted=self._revisions.wanted,
            applied=self._revisions.applied,
            checked=True,
            unapplied=unapplied,
            unflushed=flushing.open,
            leaving=self._keeper.leaving,
            files=meaning.files,
        )

    def _work_until_settled(self) -> None:
        """Until every namespace was looked at; one that keeps us waiting for long is reported as
        failing and not waited for."""
        self._work()
        while self._keeper.unsettled and not self._stop:
            self._wait()
            self._hear()
            self._work()
            self._remember()

    def _looked_at(self) -> Meaning | None:
        """What the source says now. A bug that it meets in what objects say together, which cannot
        be told of one of them, leaves all as it was; None: nothing is known of that, either."""
        try:
            return self._source.look(self._reads)
        except _Stopped:
            raise
        except Exception as error:  # as in the keeper
            self._metrics.failed()
            why = f"because of a bug in portranger ({described(error)})"
            known = self._taken or self._source.meaning  # of a source that was never read: nothing
            self._source.meaning = replace(known, unreadable=why)
            return None if self._taken is None else self._source.meaning

    def _publish(self) -> None:
        self._news.publish(
            self._source,
            self._keeper,
            self._store.trouble,
            self._revision,
            self._last_valid.since,
        )

    def _remember(self) -> None:
        """For the next run; whoever waits for rules need not wait for that."""
        if not self._stop:
            until = time.monotonic() + SLICE
            self._stored = self._source.remember(self._reads, lambda: time.monotonic() > until)
            self._store.leave(self._keeper.leaving)
            self._store.report()
            if self._store.trouble != self._news.status.unwritable:
                self._publish()

    def _take(self, meaning: Meaning | None) -> None:
        """Make what the manifests say now what is wanted; None: whatever is there stays."""
        if meaning is not None:
            self._taken = meaning
            self._want(meaning)
            wanted = self._revisions.take()
            self._revision = replace(
                self._revision, wanted=wanted, checked=False, files=meaning.files
            )
        self._news.tell(self._source)
        self._publish()

    def _want(self, meaning: Meaning) -> None:
        self._kernel.pods.instances = meaning.instances
        unknown = meaning.unreadable or meaning.services_unknown or meaning.laws_unknown
        self._last_valid.hear(meaning.held, complete=not unknown)
        self._publisher.want(meaning)
        self._keeper.want(
            meaning.machines,
            unclaimed_stay=bool(meaning.unknown),
            unknown=None if meaning.unreadable else meaning.unknown,
            contested=meaning.contested,
            outdated=outdated(meaning, self._last_valid.since),
            laws=self._laws(meaning),
        )

    def _laws(self, meaning: Meaning) -> Laws | None:
        """The policies that are ours to enforce; None: they are not known."""
        if not self._config.enforces:
            return Laws()
        return None if meaning.laws_unknown else meaning.laws

    def _told(self, whom: Iterable[object], tiding: Tiding, message: str) -> None:
        for one in whom:
            self._source.tell(str(one), tiding, message)

    def _folders(self) -> set[str]:
        """Where namespaces come and go that are named by a path, or are a pod's that is not found
        yet."""
        names = {machine.netns for machine in self._source.meaning.machines}
        found = {os.path.dirname(name) for name in names if "/" in name}  # noqa: PTH120 - a string
        found = {folder for folder in found if not folder.startswith("/proc")} - {str(RUN)}
        pods = [name for name in self._keeper.unfound if name.startswith(POD)]
        return found | {self._kernel.pods.folder(name.removeprefix(POD)) for name in pods}

    # ------------------------------------------------------------------------------ signals

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload = True
        elif not self._stop:
            self._stop = True
            self._deadline.begin()

    def _give_up(self) -> None:
        """By another thread, where stopping takes too long: each step of it has a limit, but not
        all of them together. Nothing is lost: the next start finds out what is left to do."""
        so = "what is left is done by the next start"
        self._log.warning("stopped early", reason=f"not done after {STOP:g} s", consequence=so)
        os._exit(0)

    def _renew(self) -> None:
        """Read the configuration, and everything else, again; a bad one changes nothing."""
        self._notifier.reloading()
        try:
            config = load(self._path)
            self._change_to(config)
            self._publisher.use(*publishing(self._config))
            self._log.info("reloaded", source=self._source, backend=config.backend)
            self._news.outdated = ""
        except BadConfiguration as bad:
            lines = str(bad).splitlines()
            for line in lines:
                self._log.error("bad configuration", problem=line, so="the old one goes on")
            self._news.outdated = f"the one from before goes on: {'; '.join(few(lines))}"
        except (Failure, OSError) as failure:
            self._log.error("reload failed", why=failure, so="the old configuration goes on")
            self._news.outdated = f"the one from before goes on: {failure}"
        self._keeper.renew()
        self._source.renew()
        self._read = True
        self._resync = 0.0

    def _change_to(self, config: Config) -> None:
        """All of it, or nothing: what is new is there before what is old is let go."""
        old = self._config
        if config.state_dir != old.state_dir:
            self._log.warning("restart to change it", key="state_dir", still=old.state_dir)
            config = replace(config, state_dir=old.state_dir)
        self._config = config
        with ExitStack() as undo:
            undo.callback(self._go_on_with, old)
            kernel, source = self._kernel, self._source
            if (config.backend, config.kubernetes) != (old.backend, old.kubernetes):
                kernel = self._made_kernel()
                undo.callback(kernel.close)
            # What a kubeconfig names may have changed in place.
            if _source_of(config) != self._made_of or config.source == "kubernetes":
                left = Handover(meaning=source.meaning, texts=source.texts(), enforced=old.enforces)
                source = self._made_source(left)
                undo.callback(source.close)
            if config.listen != old.listen:
                self._hang_up()
                self._serve()
            undo.pop_all()
        if kernel is not self._kernel:
            self._kernel.close()
            self._kernel = kernel
            self._keeper.use(kernel)
        if source is not self._source:
            for descriptor in self._source.filenos():
                self._epoll.unregister(descriptor)
            self._source.close()
            self._use(source)

    def _go_on_with(self, old: Config) -> None:
        self._config = old
        self._serve_if_free()

    # ----------------------------------------------------------------------------- progress

    def _progressed(self) -> None:
        """Something was done: nobody need think that we are stuck."""
        now = self._progress = time.monotonic()
        seconds = self._notifier.watchdog_seconds
        if seconds and now - self._fed >= seconds / 4:
            self._fed = now
            self._notifier.watchdog()
            if not self._started:
                self._notifier.extend(seconds)

    def _reads(self) -> None:
        """One more manifest was read or stored: there may be thousands, and no time for all."""
        self._progressed()
        if self._stop:
            raise _Stopped

    def _beat(self) -> float:
        """When we last were seen alive, to whoever asks: who waits for work is not stuck."""
        progress = self._progress
        return time.monotonic() if progress is None else progress

    def _counted(self, standing: Standing) -> counters.Counted:
        """For whoever asks, in whichever thread."""
        lookups = {lookup_of(one.rule) for one in standing.live if not one.handle}
        maps = sorted(name(lookup) for lookup in lookups if lookup)
        netns, found = standing.netns, self._kernel.found
        try:
            task = partial(counters.read, netns, standing.identity, maps, found)
            return self._counting.run(netns, task)
        except TimeoutError as error:  # whoever holds nftables there must not hold up a scrape
            raise TryAgain(f"the counters of namespace {netns} cannot be read now") from error

    def _serves(self, uid: str) -> str:
        return self._kernel.pods.serves(uid)

    def _is_over(self, uid: str) -> bool | None:
        return self._kernel.pods.is_over(uid)

    def _resources(self, netns: str) -> Mapping[str, str]:
        """For whoever asks, in whichever thread."""
        return self._kernel.resources(netns)

    def _warn(self, what: str) -> None:
        self._log.seldom(what)


def _source_of(config: Config) -> tuple[object, ...]:
    """What it takes another source to change."""
    if config.source == "kubernetes":
        return config.source, config.kubernetes
    return config.source, config.manifests
