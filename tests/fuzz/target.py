"""What is fuzzed: something that takes bytes, whatever they are, and raises only for a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rules.values import Value
from tests.fuzz.choices import Choices, spoilt

Run = Callable[[bytes], None]

LONGEST = 10.0  # seconds of processor time for one input of a few KB: most take a hundredth


class Target(Value, kw_only=True):
    """One fuzzer. Where the bytes are decisions (`tests.fuzz.choices`) there are no seeds."""

    name: str
    opened: Callable[[], AbstractContextManager[Run]]
    seeds: Callable[[], Iterable[bytes]] | None = None
    words: tuple[bytes, ...] = (b"x",)  # that the bytes are likely to have in them
    examples: int = 150  # in `make test`

    def inputs(self) -> Callable[[bytes], bytes]:
        """How random bytes become what it takes: where it has seeds, one of these, spoilt."""
        if self.seeds is None:
            return bytes
        seeds, words = list(self.seeds()), self.words

        def spoil(data: bytes) -> bytes:
            choices = Choices(data)
            return spoilt(choices.pick(seeds), choices, words)

        return spoil


def simple(run: Run) -> Callable[[], AbstractContextManager[Run]]:
    """Of what needs nothing around it."""

    @contextmanager
    def opened() -> Iterator[Run]:
        yield run

    return opened


def timed(run: Run) -> Run:
    """The same, for which to take long is a finding, too."""

    def timing(data: bytes) -> None:
        began = time.process_time()
        run(data)
        took = time.process_time() - began
        assert took < LONGEST, f"{len(data)} bytes took {took:.1f} s"

    return timing
