"""The daemon meets its faults where its other tests are: on a node, in namespaces to forward in."""

from tests.daemon.conftest import blue, node, red

__all__ = ["blue", "node", "red"]
