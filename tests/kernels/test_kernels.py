"""How `make test-kernels` reads what guests report, and what it makes of it."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.kernels import guest, job
from tests.kernels.job import Result, Step
from tests.kernels.matrix import Row, counts, matrix, write
from tests.kernels.suites import CONTROL, DEMO, HITLESS, TESTS, Kind, kinds, summary

PRINTED = """\
Flows lost by changes, Linux 6.1.0
                             changes      flows    flows/s    refused  timed out        cut
one of 50 grows and shrinks    1,300    110,527        400          1          2          0
  refused (reset): tcp 1202 (IPv6) from 2001:db8::1 port 18594, sent at 1.0; +14.3 ms
a VM of two is removed            20        900        400          0          0          3
bench: 3 flows lost
"""
LOST = Result(name=HITLESS, code=1, seconds=60, output=PRINTED)
FINE = Result(name=DEMO, code=0, seconds=20, output="Everything was as it should be.")


def test_counts_are_read_from_the_table_of_the_hitless_suite() -> None:
    assert kinds(LOST) == [
        Kind(
            name="one of 50 grows and shrinks",
            changes=1300,
            flows=110527,
            refused=1,
            timed_out=2,
        ),
        Kind(name="a VM of two is removed", changes=20, flows=900, refused=0, timed_out=0),
    ]
    assert summary(LOST) == "failed: 3 of 111,427 flows lost in 1,320 changes"


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (FINE, "passed"),
        (replace(FINE, code=1), "failed"),
        (replace(FINE, code=None), "stopped at its time limit"),
        (Result(name=DEMO), "did not run"),
        (
            replace(LOST, name=CONTROL),
            "3 of 111,427 flows lost in 1,320 changes, as expected",
        ),
        (replace(FINE, name=CONTROL), "inconclusive: no flow lost"),
        (
            Result(name=TESTS, code=1, seconds=9, output="F.s\n1 failed, 74 passed in 306.93s\n"),
            "1 failed, 74 passed",
        ),
    ],
)
def test_the_matrix_says_how_a_suite_ended(result: Result, told: str) -> None:
    assert summary(result) == told


def test_a_kernel_is_good_if_all_suites_passed_whatever_the_control_lost() -> None:
    control = replace(LOST, name=CONTROL)
    row = Row(version="6.1", release="6.1.0-50", results=[FINE, control])
    assert row.good
    assert not replace(row, results=[FINE, LOST]).good
    assert not replace(row, results=[Result(name=DEMO)]).good


def test_the_page_holds_both_tables(tmp_path: Path) -> None:
    rows = [Row(version="6.1", release="6.1.0-50", results=[FINE, LOST])]
    write(rows, tmp_path / "kernels.md")
    text = (tmp_path / "kernels.md").read_text()
    assert matrix(rows) in text
    assert counts(rows) in text


def test_a_job_runs_every_step_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        Step(name="loud", words=("-c", "print('heard')"), seconds=60, loud=True),
        Step(name="fails", words=("-c", "raise SystemExit(3)"), seconds=60),
        Step(name="slow", words=("-c", "import time; time.sleep(60)"), seconds=0),
        Step(
            name="asks",
            words=("-c", "import os; print(os.environ['WORD'])"),
            seconds=60,
            environment={"WORD": "said"},
        ),
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps([asdict(step) for step in steps]))
    folder = tmp_path / "results"
    folder.mkdir()
    job.main(folder)
    assert f"{job.MARK}loud: heard" in capsys.readouterr().out.splitlines()
    with tarfile.open(tmp_path / "disk", "w") as tar:
        tar.add(folder, arcname=".")
    found = guest.results(tmp_path / "disk")
    assert [(one.name, one.code) for one in found] == [
        ("loud", 0),
        ("fails", 3),
        ("slow", None),
        ("asks", 0),
    ]
    assert found[3].output == "said\n"


def test_a_guest_that_wrote_nothing_has_no_results(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(10240))
    assert guest.results(disk) == []
