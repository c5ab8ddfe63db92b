"""All that is fuzzed, by name."""

from __future__ import annotations

from tests.fuzz import cluster, edges, kernel, manifests
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    one.name: one for one in (*manifests.TARGETS, *kernel.TARGETS, *cluster.TARGETS, *edges.TARGETS)
}
