"""The unit by itself: nothing in it is unknown to systemd, and little is left open."""

from __future__ import annotations

import re

from tests.systemd.machine import Machine

UNIT = "/usr/local/lib/systemd/system/portranger.service"
HIGHEST_EXPOSURE = 2.5


def test_systemd_has_nothing_to_remark_about_the_unit(machine: Machine) -> None:
    verified = machine.run("systemd-analyze", "verify", UNIT)
    assert (verified.stdout, verified.stderr) == ("", "")


def test_the_exposure_is_low(machine: Machine) -> None:
    told = machine.run("systemd-analyze", "security", "--no-pager", "portranger.service").stdout
    level = re.search(r"Overall exposure level for portranger.service: ([0-9.]+)", told)
    assert level is not None, told
    assert float(level[1]) <= HIGHEST_EXPOSURE, told
