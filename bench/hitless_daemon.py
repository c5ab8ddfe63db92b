"""Daemons that are killed in the middle of a change, and started again, for the hitless suite."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.process import configure, save, scratch, until

ROOT = Path(__file__).parent.parent
MOST_SECONDS = 0.08  # from a saved manifest until the daemon is killed
AT_REST = 0.3  # of the changes: the others come while flows of an earlier run are still looked at
NODE_IN_SYNC, READY = '"in sync", "netns": "node:self"', '"event": "ready"'
# Copies of one process that has loaded everything: a tenth of what starting Python takes.
STEM = """
import os, signal, sys, time
from agent.daemon import Daemon
from agent.log import Descriptor, Log
from agent.notify import Notifier
import agent.sources.directory, agent.sources.watch, agent.publisher, agent.sources.yaml_text
child = 0
for line in sys.stdin:
    if child:
        os.waitpid(child, 0)
    child = os.fork()
    if not child:
        number = os.open(line.strip(), os.O_WRONLY | os.O_CREAT)
        Daemon(sys.argv[1], Log(Descriptor(number), "json", clock=time.time), Notifier()).run()
        os._exit(0)
    print(child, flush=True)
if child:
    os.kill(child, signal.SIGKILL)
"""


class Daemons:
    """One daemon after the other, on one node."""

    def __init__(self, folder: Path, stem: "subprocess.Popen[str]") -> None:
        self._log, self._manifest = folder / "log", configure(folder) / "all.yaml"
        self._stem = stem
        self._chosen = random.Random(1)

    @classmethod
    @contextmanager
    def on(cls, node: str) -> Iterator["Daemons"]:
        """Daemons of that namespace; the last goes with the block."""
        with scratch() as folder:
            words = ["nsenter", f"--net=/run/netns/{node}", sys.executable, "-c", STEM]
            stem = subprocess.Popen(
                [*words, str(folder / "portranger.toml")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            with stem:
                yield cls(folder, stem)

    def changes(self, states: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Each saves the next state, kills the daemon at some moment of making it so, and starts
        another, which goes on from there."""
        for text in itertools.cycle([*states[1:], states[0]]):
            yield partial(self._change, text)

    def begin(self, text: str) -> None:
        """Start the first, with these manifests."""
        save(self._manifest, text)
        self._start()

    def _change(self, text: str) -> None:
        if self._chosen.random() < AT_REST:
            self._says(READY)
        save(self._manifest, text)
        time.sleep(self._chosen.uniform(0, MOST_SECONDS))
        os.kill(self._pid, signal.SIGKILL)
        self._start()

    def _start(self) -> None:
        """Start a daemon, and wait until it has made the rules of the node, which are its last."""
        assert self._stem.stdin
        assert self._stem.stdout
        self._log.write_text("")
        self._stem.stdin.write(f"{self._log}\n")
        self._stem.stdin.flush()
        self._pid = int(self._stem.stdout.readline())
        self._says(NODE_IN_SYNC)

    def _says(self, words: str) -> None:
        until(lambda: words in self._log.read_text())
