"""The version of the Debian package: one repository may hold those for several releases."""

from __future__ import annotations

import itertools

from release.debian import suffix
from tests.spaces import run

RELEASES = (
    {"ID": "debian", "VERSION_ID": "12"},
    {"ID": "debian", "VERSION_ID": "13"},
    {"ID": "debian"},  # not released yet
)


def test_a_package_for_a_newer_debian_is_newer() -> None:
    versions = [f"0.1.0-1{suffix(release)}" for release in RELEASES]
    assert versions == ["0.1.0-1~deb12", "0.1.0-1~deb13", "0.1.0-1"]
    for older, newer in itertools.pairwise(versions):
        run("dpkg", "--compare-versions", older, "lt", newer)
    run("dpkg", "--compare-versions", versions[-1], "lt", "0.1.0-2~deb12")


def test_a_package_for_another_system_says_so() -> None:
    assert suffix({"ID": "ubuntu", "VERSION_ID": "24.04"}) == "~ubuntu24.04"
