"""The addresses of the node itself, with which policies always allow traffic: kubelet probes its
machines from there. They change seldom, and are read again when links of the node change."""

from collections.abc import Callable, Sequence

from agent.errors import Failure, NoNamespace
from agent.kernel.kinds import Kernel
from rules.model import Address
from rules.places import node_addresses


class NodeAddresses:
    """As they were found last."""

    def __init__(
        self, namespaces: Callable[[], Sequence[str] | None], warn: Callable[[str], None]
    ) -> None:
        """In which namespaces the node has its addresses: the agent's own and, where that may be a
        pod's, that of process 1. None: the node is nobody special."""
        self._namespaces, self._warn = namespaces, warn
        self._nsids: frozenset[object] = frozenset()
        self.known: frozenset[Address] | None = None
        self.stale = True  # whether they may be others by now

    def concerns(self, nsid: object) -> bool:
        """Whether that is how events name a namespace of the node."""
        return nsid in self._nsids

    def read(self, kernel: Kernel) -> bool:
        """Read them again; return whether they changed. What cannot be read stays as it was."""
        before, self.stale = self.known, False
        names = self._namespaces()
        if names is None:
            self.known, self._nsids = None, frozenset()
            return before is not None
        found: set[Address] = set()
        nsids: set[object] = set()
        for name in names:
            try:
                nsid, surroundings = kernel.links(name)
            except NoNamespace:  # processes of the node are not seen here
                continue
            except Failure as failure:
                found |= before or set()
                what = f"cannot read the addresses of the node: {failure.what}"
                self._warn(f"{what}; policies may cut off its kubelet")
                continue
            nsids.add(nsid)
            found |= node_addresses(surroundings)
        self.known, self._nsids = frozenset(found), frozenset(nsids)
        return self.known != before
