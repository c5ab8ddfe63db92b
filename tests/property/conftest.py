"""How hypothesis runs here: the same examples every time in CI, others every time at home; and few
where only coverage is asked for, as these tests are run again."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "portranger",
    max_examples=int(os.environ.get("EXAMPLES", "60")),  # others every time: many runs see many
    deadline=None,  # a busy machine is no failure
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("portranger")
