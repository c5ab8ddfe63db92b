"""The daemon's log: one line per event whatever it says, and never an exception."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.log import MOST_REMEMBERED, QUIET, Descriptor, Log, logfmt, read_by_journal
from rules.ports import PortRange

ROOT = Path(__file__).parents[2]
NOON = 1763265149.123
TIME = "2025-11-16T03:52:29.123Z"


def at_noon() -> float:
    return NOON


class Sheet(io.StringIO):
    """A stream to look at."""

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines(keepends=True)


def test_an_event_is_a_line_of_pairs() -> None:
    sheet = Sheet()
    Log(sheet, clock=at_noon).info("namespace in sync", netns="desktop", rules=6)
    expected = f'time={TIME} level=info event="namespace in sync" netns=desktop rules=6\n'
    assert sheet.getvalue() == expected


def test_an_event_is_an_object_of_json() -> None:
    sheet = Sheet()
    log = Log(sheet, "json", clock=at_noon)
    log.warning("drift", netns="a\nb", ports=PortRange(1, 9), seconds=0.5, by=None, also=("x", 2))
    (line,) = sheet.lines
    assert json.loads(line) == {
        "time": TIME,
        "level": "warning",
        "event": "drift",
        "netns": "a\nb",
        "ports": "1-9",
        "seconds": 0.5,
        "by": None,
        "also": ["x", 2],
    }


def test_for_the_journal_a_line_has_a_priority_and_no_time() -> None:
    sheet = Sheet()
    log = Log(sheet, journal=True, clock=at_noon)
    log.info("a")
    log.warning("b")
    log.error("c")
    assert sheet.lines == [
        "<6>level=info event=a\n",
        "<4>level=warning event=b\n",
        "<3>level=error event=c\n",
    ]
    sheet = Sheet()
    Log(sheet, "json", journal=True, clock=at_noon).error("c")
    assert sheet.lines == ['<3>{"level": "error", "event": "c"}\n']


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (0.9996, "1970-01-01T00:00:01.000Z"),
        (1700000000.05, "2023-11-14T22:13:20.050Z"),
    ],
)
def test_time_is_utc_to_the_millisecond(seconds: float, text: str) -> None:
    sheet = Sheet()
    Log(sheet, clock=lambda: seconds).info("a")
    assert sheet.getvalue().startswith(f"time={text} ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param("plain", "plain", id="plain"),
        pytest.param("", '""', id="empty"),
        pytest.param("a b", '"a b"', id="a space"),
        pytest.param('a"b', r'"a\"b"', id="a quote"),
        pytest.param("a=b", '"a=b"', id="an equals sign"),
        pytest.param("a\nb\t\\", r'"a\nb\t\\"', id="a newline, a tab, a backslash"),
        pytest.param("\x1b[31m", r'"\u001b[31m"', id="a terminal's colour"),
        pytest.param("a\x7f\u2028\u202e", r'"a\u007f\u2028\u202e"', id="breaks of other kinds"),
        pytest.param("/\udcff", r'"/\udcff"', id="a byte of a file name"),
        pytest.param("größe", "größe", id="letters"),
        pytest.param(True, "true", id="truth"),
        pytest.param(None, "null", id="nothing"),
        pytest.param(["a", 1, None], "a,1,null", id="a list"),
    ],
)
def test_a_value_is_quoted_where_it_has_to_be(value: object, text: str) -> None:
    assert logfmt({"x": value}) == f"x={text}"


@settings(deadline=None)
@given(st.text())
@example("\U000e0001")
def test_whatever_a_value_is_it_can_be_read_back_from_one_line(value: str) -> None:
    sheet = Sheet()
    Log(sheet, journal=True, clock=at_noon).info("a", x=value)
    (line,) = sheet.lines
    text = line.removeprefix("<6>level=info event=a x=").removesuffix("\n")
    assert text.isprintable()
    assert (json.loads(text) if text.startswith('"') else text) == value


def test_a_field_cannot_pose_as_level_or_event() -> None:
    sheet = Sheet()
    Log(sheet, journal=True, clock=at_noon).info("true", event="false", level="error")
    assert sheet.lines == ["<6>level=info event=true\n"]


def test_numbers_that_json_does_not_know_are_text() -> None:
    sheet = Sheet()
    Log(sheet, "json", journal=True, clock=at_noon).info("a", x=float("nan"), y=float("inf"))
    assert '"x": "nan", "y": "inf"' in sheet.getvalue()


def test_what_is_no_news_is_not_said_again() -> None:
    sheet = Sheet()
    log = Log(sheet, journal=True, clock=at_noon)
    for reason in ("gone", "gone", "busy", "busy", "gone"):
        log.once("blue", "error", "failed", reason=reason)
    log.once("red", "error", "failed", reason="gone")
    reasons = [line.strip().rpartition("=")[2] for line in sheet.lines]
    assert reasons == ["gone", "busy", "gone", "gone"]
    log.once("red", "warning", "failed", reason="gone")
    log.once("red", "warning", "still failing", reason="gone")
    assert len(sheet.lines) == 6


def test_another_exception_of_the_same_words_is_no_news() -> None:
    sheet = Sheet()
    log = Log(sheet, journal=True, clock=at_noon)
    for _ in range(3):
        log.once("listen", "error", "not listening", why=OSError("in use"))
    assert sheet.lines == ['<3>level=error event="not listening" why="in use"\n']


def test_what_has_settled_is_news_again() -> None:
    sheet = Sheet()
    log = Log(sheet, journal=True, clock=at_noon)
    log.settled("blue")
    log.once("blue", "info", "in sync")
    log.settled("blue")
    log.once("blue", "info", "in sync")
    assert len(sheet.lines) == 2


def test_a_warning_is_said_again_once_it_has_not_come_up_for_minutes() -> None:
    sheet, dates = Sheet(), iter([0.0, 500.0, 1000.0, 1000.0 + QUIET, 900.0])
    log = Log(sheet, journal=True, clock=lambda: next(dates))
    said = []
    for _ in range(5):
        log.seldom("no inotify")
        said.append(len(sheet.lines))
    assert said == [1, 1, 1, 2, 3]  # whose clock is set back is told once too often
    assert sheet.lines[0] == '<4>level=warning event=warning what="no inotify"\n'


def test_of_warnings_no_more_is_kept_than_there_is_room_for() -> None:
    sheet = Sheet()
    log = Log(sheet, journal=True, clock=at_noon)
    for number in range(10 * MOST_REMEMBERED):
        log.seldom(f"warning {number}")
        log.seldom("the same")
    assert len(sheet.lines) == 10 * MOST_REMEMBERED + 1
    log.seldom("warning 0")
    assert len(sheet.lines) == 10 * MOST_REMEMBERED + 2
    assert len(log._warned) == MOST_REMEMBERED


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that never makes its writer wait."""
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def test_a_full_pipe_loses_whole_lines_and_counts_them(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    log = Log(Descriptor(writing), journal=True, clock=at_noon)
    for number in range(10_000):
        log.info("line", number=number)
        if log.lost == 3:
            break
    assert log.lost == 3
    held = os.read(reading, 1 << 20).decode()
    log.info("after")
    assert held.endswith("\n")
    assert held.count("\n") == number + 1 - 3
    assert os.read(reading, 1 << 20) == b"<6>level=info event=after\n"


def test_after_half_a_line_the_next_begins_on_its_own(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    log = Log(Descriptor(writing), journal=True, clock=at_noon)
    log.info("long", x="x" * 1_000_000)
    assert log.lost == 1
    log.info("lost")
    assert log.lost == 2
    assert os.read(reading, 1 << 20).endswith(b"xxx")
    log.info("after")
    assert os.read(reading, 1 << 20) == b"\n<6>level=info event=after\n"


def test_what_was_lost_is_still_news(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    log = Log(Descriptor(writing), journal=True, clock=at_noon)
    log.info("long", x="x" * 1_000_000)
    log.once("blue", "error", "failed")
    os.read(reading, 1 << 20)
    log.once("blue", "error", "failed")
    assert b"event=failed" in os.read(reading, 1 << 20)


def test_a_pipe_without_a_reader_loses_the_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log = Log(Descriptor(writing), clock=at_noon)
    log.info("a")
    os.close(writing)
    log.info("b")
    assert log.lost == 2


def test_a_full_disk_and_a_closed_stream_lose_the_line() -> None:
    with Path("/dev/full").open("w") as full:
        log = Log(Descriptor(full.fileno()), clock=at_noon)
        log.info("a")
        assert log.lost == 1
    sheet = Sheet()
    sheet.close()
    log = Log(sheet, clock=at_noon)
    log.error("b")
    assert log.lost == 1


def test_a_stream_that_lacks_letters_loses_the_line() -> None:
    log = Log(io.TextIOWrapper(io.BytesIO(), "ascii"), clock=at_noon)
    log.info("größe")
    assert log.lost == 1


def test_the_journal_is_known_by_its_device_and_inode() -> None:
    with tempfile.TemporaryFile() as stream, tempfile.TemporaryFile() as other:
        status = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert read_by_journal(stream.fileno(), environ)
        assert not read_by_journal(other.fileno(), environ)
        assert not read_by_journal(stream.fileno(), {})
        assert not read_by_journal(stream.fileno(), {"JOURNAL_STREAM": "8:x"})
    assert not read_by_journal(-1, environ)


SCRIPT = """
from agent.log import this_process_log
log = this_process_log("text")
log.info("hello", name="gr\\u00f6\\u00dfe")
print(log.lost)
"""


@pytest.mark.parametrize("journal", [False, True])
def test_a_process_logs_to_its_standard_error(journal: bool) -> None:
    with tempfile.TemporaryFile() as stream:
        status = os.fstat(stream.fileno())
        ours = f"{status.st_dev}:{status.st_ino}"
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, "JOURNAL_STREAM": ours if journal else "1:2"},
            stderr=stream,
            timeout=60,
            check=True,
        )
        stream.seek(0)
        line = stream.read().decode()
    assert line.startswith("<6>level=info" if journal else "time=2")
    assert line.endswith(" event=hello name=größe\n")


def test_a_process_without_standard_error_logs_nothing_and_lives() -> None:
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "1\n"
