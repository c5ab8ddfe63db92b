"""A process of its own for a library that this one is not to be trusted with. It is started when it
is first needed and serves every namespace. One that dies, hangs or talks nonsense is replaced.

The other side is `serve`: it answers requests on a socket, each with the descriptor of a namespace,
and leaves that namespace again before it answers.

Two limits hold for a request. Processor time: what uses it up is too much work, whatever the
machine does besides. Wall-clock time: a worker that gets no processor, or waits in the kernel,
says nothing about what it was asked; that is a timeout and nothing else.
"""

import functools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.errors import TryAgain
from agent.kernel.netns import OWN, inside
from agent.kernel.wire import LENGTH, exactly, received, send

PATIENCE = 60.0  # seconds on the wall clock; only for one that gets no processor, or is blocked
PROCESSOR = 30  # seconds of processor time for a request; a replace of thousands of rules takes one
IDLE = 120.0  # seconds without a request after which a worker ends: it is memory
NO_MEMORY = 2  # how libnftables ends a process then
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # else each thread takes 64 MiB of a limited address space
OWN_FAULT = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}

Json = dict[str, object]


class Lost(TryAgain):
    """A worker did not answer, and was ended."""

    crashed = False  # by what it was asked, or for want of memory; not from outside
    overrun = False  # it used up its processor time
    unheard = False  # it had nothing to do for long, and had ended before it heard of it


@functools.cache
def home() -> int:
    """The network namespace of this process, as it is when the first worker is thought of. Workers
    are started there, whatever namespace the thread is in that needs one: a process keeps the
    namespace alive that it was started in."""
    try:
        return os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TryAgain(f"cannot open our own network namespace ({error})", "Try again") from error


@contextmanager
def at_home() -> Iterator[None]:
    if os.path.samestat(Path(OWN).stat(), os.fstat(home())):
        yield
    else:
        with inside(home(), "of our own"):
            yield


class Worker:
    """The process, as who asks it sees it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        words: Sequence[str] = (),
        patience: float = PATIENCE,
    ) -> None:
        home()
        self.began = 0.0
        self._name = name
        self._command, self._words = list(command), list(words)
        self._patience = patience
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def ask(self, descriptor: int, question: Json) -> Json:
        """Its answer for that namespace. Several threads may ask: one after the other."""
        if not self._turn.acquire(timeout=self._patience):
            raise TryAgain(f"{self._name} was busy for {self._patience:g} s", "Try again")
        try:
            return self._asked(descriptor, question)
        except Lost as lost:
            if not lost.unheard:
                raise
            return self._asked(descriptor, question)
        finally:
            self._turn.release()

    def _asked(self, descriptor: int, question: Json) -> Json:
        try:
            channel = self._channel or self._start()
        except OSError as error:
            raise TryAgain(f"cannot start {self._name} ({error})", "Try again") from error
        try:
            channel.settimeout(self._patience)  # what was left of it after the last answer
            send(channel, question, descriptor)
            return received(channel, self._patience)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise self._lost(error) from error

    def stop(self) -> None:
        """End the process; the next question starts another. Whoever waits for an answer in another
        thread hears that there is none."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()
        elif (process := self._process) is not None:
            process.kill()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # where it waits in the kernel
                self._process.wait(1)
        self._channel = self._process = None

    def _start(self) -> socket.socket:
        """At home: also a pair of sockets keeps the namespace alive that it was made in."""
        with at_home():
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._process = subprocess.Popen(
                        [*self._command, str(theirs.fileno()), *self._words],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
                    )
            except BaseException:
                ours.close()
                raise
        self._channel, self.began = ours, time.monotonic()
        return ours

    def _lost(self, error: Exception) -> Lost:
        ended = None
        if isinstance(error, ConnectionError) and self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                ended = self._process.wait(1)
        self._end()
        if isinstance(error, TimeoutError):
            return Lost(
                f"timed out: {self._name} did not answer within {self._patience:g} s", "Try again"
            )
        lost = Lost(f"{self._name} ended or answered nonsense ({error})", "Try again")
        lost.crashed = ended == NO_MEMORY or (ended is not None and -ended in OWN_FAULT)
        lost.overrun = ended == -signal.SIGXCPU
        lost.unheard = ended == 0
        return lost


def module(name: str) -> list[str]:
    """The command that runs it. -P: not from the directory that we happen to be in, which may be
    anybody's."""
    return [sys.executable, "-P", "-m", name]


def serve(
    channel: socket.socket,
    answer: Callable[[Json], Json],
    after: Callable[[], None] = lambda: None,
    *,
    processor: int = PROCESSOR,
) -> None:
    """Answer what is asked on a socket until it closes, or nobody asks for long; and what is left
    to do after an answer. The kernel ends who uses more processor time for one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what a tenant made end it is nothing to keep
    while True:
        channel.settimeout(IDLE)
        try:
            header, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
        except TimeoutError:
            return
        if not header:
            return
        channel.settimeout(None)
        descriptor = descriptors[0]
        _allow(processor)
        try:
            question = json.loads(exactly(channel, LENGTH.unpack(header)[0]))
            with inside(descriptor, "of the request"):
                said = answer(question)
        except Exception as error:  # whatever it is, the other side must hear of it
            said = {"error": type(error).__name__, "text": str(error)}
        finally:
            os.close(descriptor)
        send(channel, said)
        after()


def _allow(seconds: int) -> None:
    """So much processor time from now on, of which the kernel counts whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
