"""What the daemon says of its source."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Any

from agent.devices import Devices
from agent.log import Log
from agent.news import News
from agent.notify import Notifier
from agent.sources.directory import Directory
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from agent.sources.watch import Watch
from rules.fences import Laws
from rules.values import replace
from tests.unit.samples import machine


def test_a_bug_met_in_policies_does_not_keep_the_rest_from_being_told(tmp_path: Path) -> None:
    written = io.StringIO()
    log = Log(written, clock=lambda: 1e9)
    news = News(log, Notifier(), Devices(lambda _: {}, print), lambda: True)
    store, watch = Store(str(tmp_path / "state"), print), Watch(str(tmp_path))
    with closing(Directory(str(tmp_path), store, watch)) as source:
        broken: Any = ("no policy",)
        bridged = replace(machine(), masquerade=None)
        source.meaning = Meaning(
            machines=(bridged,), laws=Laws(policies=broken), skipped=("something",)
        )
        news.tell(source)
    assert "event=skipped what=something" in written.getvalue()
    assert "policy without effect" not in written.getvalue()
