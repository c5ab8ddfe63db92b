"""How hypothesis runs here: the same examples every time in CI, others every time at home. EXAMPLES
says how many: `make test-nightly` asks for ten times as many, always others, and coverage for few,
as these tests are run again."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

DEFAULT = 100
EXAMPLES = int(os.environ.get("EXAMPLES", DEFAULT))

settings.register_profile(
    "portranger",
    max_examples=EXAMPLES,
    deadline=None,  # a busy machine is no failure
    derandomize=bool(os.environ.get("CI")) and EXAMPLES <= DEFAULT,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("portranger")
