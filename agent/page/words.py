"""How times and numbers are written on the page."""

from datetime import UTC, datetime

from agent.page.markup import Html, element
from agent.status import moment

UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def counted(number: int, noun: str) -> str:
    """1 range, 1,000 ranges."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ago(at: float, now: float) -> Html:
    """3 min ago; the time itself is in the tooltip, and for machines."""
    lapse = _lapse(now - at)
    return _time(at, f"{lapse} ago" if lapse else "just now")


def lasting(at: float, now: float) -> Html:
    """For 3 min."""
    return _time(at, f"for {_lapse(now - at) or 'a moment'}")


def clock(at: float) -> Html:
    """The time of day."""
    exact = datetime.fromtimestamp(at, UTC)
    return element("time", exact.strftime("%H:%M:%S UTC"), datetime=moment(at))


def day(at: float) -> Html:
    """The time of a day."""
    exact = datetime.fromtimestamp(at, UTC)
    return element("time", exact.strftime("%Y-%m-%d %H:%M UTC"), datetime=moment(at))


def _time(at: float, words: str) -> Html:
    exact = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return element("time", words, datetime=moment(at), title=exact)


def _lapse(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds) // size} {unit}"
    return ""
