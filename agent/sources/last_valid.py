"""Since when manifests are invalid, so that their last valid version is in use: written down, as
that does not begin anew with the daemon."""

import time
from collections.abc import Callable, Iterable, Mapping

from agent.sources.store import Store

RECORD = "last-valid.json"


class LastValid:
    """By file or object, in seconds of the epoch."""

    def __init__(self, store: Store, calendar: Callable[[], float] = time.time) -> None:
        self._store, self._calendar = store, calendar
        self._stored = _times(store.record(RECORD))
        self.since: Mapping[str, float] = {}

    def hear(self, held: Iterable[str], *, complete: bool) -> None:
        """These are in use as they were when they were last valid; complete: there are no others
        that are not known yet."""
        now = self._calendar()
        self.since = {file: self._stored.get(file, now) for file in sorted(held)}
        wanted = {**({} if complete else self._stored), **self.since}
        if wanted == self._stored:
            return
        self._stored = wanted
        if wanted:
            self._store.keep_record(RECORD, wanted)
        else:
            self._store.drop_record(RECORD)


def _times(content: object) -> dict[str, float]:
    found = content.items() if isinstance(content, dict) else ()
    return {str(file): since for file, since in found if isinstance(since, float)}
