"""What holds for every test: who may run here, and that a skip in CI is a failure.

Tests that build network namespaces need root and a kernel that lets root unshare one. Where that
is missing they are skipped with the reason. CI has everything, so there a skip means that something
was not installed, and it fails the run.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS_THAT_NEED_ROOT = ("netns", "datapath", "faults", "daemon", "systemd", "vm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips",
        action="store_true",
        default=os.environ.get("CI", "").lower() not in ("", "0", "false"),
        help="a skipped test fails (the default when CI is set)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell has what it runs in the background ignore it, and so would all that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "needs_root: builds network namespaces; implied in"
        f" tests/{{{','.join(FOLDERS_THAT_NEED_ROOT)}}}",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in FOLDERS_THAT_NEED_ROOT:
            item.add_marker(pytest.mark.needs_root)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_root") and (reason := why_no_namespaces()):
        pytest.skip(reason)


@functools.cache
def why_no_namespaces() -> str | None:
    """The reason why this process cannot make a network namespace, or None if it can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces cannot be made by an ordinary user"
    try:
        attempt = subprocess.run(
            ["unshare", "--net", "--mount", "true"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except FileNotFoundError:
        return "needs the command unshare (Debian: util-linux)"
    if attempt.returncode != 0:
        return f"cannot make a network namespace: {attempt.stderr.strip()}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("forbid_skips"):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if collector.config.getoption("forbid_skips"):
        fail_if_skipped(report)
    return report


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that tells its reason; an expected failure stays what it is."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: no test may be skipped in this run. {reason}"
