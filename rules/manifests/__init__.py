"""Plain mappings become the model here, one file a kind; every problem found on the way has a
code from `CODES`, a path, and what to write instead."""

from rules.manifests.codes import CODES
from rules.manifests.documents import MOST_ENTRIES, Reading, Skipped, read

__all__ = ["CODES", "MOST_ENTRIES", "Reading", "Skipped", "read"]
