"""What others translate on the node, from look to look."""

import math
import time
from collections.abc import Callable, Sequence

from rules.model import Address
from rules.occupied import Occupied
from rules.publish import Node
from rules.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.kernel.kinds import Generation, Namespace

SPARE = 20  # times as long as it took to read what others translate, it is not read again


class Others:
    """What others translate on the node, as last read. To read it takes a while where there are
    thousands of rules, so that is done at a look only if it takes one part in 20 of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: Occupied | None = None
        self._due = -math.inf
        self._outdated = False  # others may have made changes since
        self._began: Generation | None = None

    @property
    def due(self) -> float:
        """When it is to be read again; never, if nothing is known to have changed."""
        return self._due if self._outdated else math.inf

    def forget(self) -> None:
        """Read it at the next look, however long that took before."""
        self._due = -math.inf

    def began(self, generation: "Generation | None") -> None:
        """A look begins, at that generation of the rules."""
        self._began = generation

    def ended(self, generation: "Generation | None") -> None:
        """It ended at this one; what anybody committed in between may have been read or not."""
        self._outdated |= generation is not None and generation != self._began

    def seen(
        self, namespace: "Namespace", endpoints: Sequence[Address], *, fresh: bool
    ) -> tuple[Node, bool]:
        """The node with what others translate there, and whether that was read just now."""
        known, now = self._known, self._clock()
        if fresh or known is None or now >= self._due:
            node = namespace.node(endpoints, others=True)
            self._known, self._outdated = node.occupied, False
            self._due = self._clock() + SPARE * (self._clock() - now)
            return node, True
        self._outdated = True
        node = namespace.node(endpoints, others=False)
        theirs = replace(
            node.occupied, translations=known.translations, unreadable=known.unreadable
        )
        return replace(node, occupied=theirs), False
