"""What the answers of an API server amount to where they are not the wanted ones: one of five
failures, each with its words and a way out.
"""

import http.client
import math

from agent.errors import Failure, NotPermitted, TryAgain
from rules.problems import printable

LONGEST_RETRY = 120.0  # seconds
TOO_LARGE = "ResourceVersionTooLarge"
TERMINATING = "NamespaceTerminating"  # no right would help

Object = dict[str, object]


class Away(TryAgain):
    """The server cannot be reached, or cannot answer now; in some seconds, if it said so."""

    def __init__(self, what: str, fix: str = "", retry_after: float = 0.0) -> None:
        super().__init__(what, fix)
        self.retry_after = retry_after


class Gone(TryAgain):
    """The server has forgotten (or does not know yet) the version that was asked for: list anew."""


class Denied(NotPermitted):
    """The server does not know us, or does not let us."""

    def __init__(self, what: str, fix: str = "", *, verb: str = "", known: bool = True) -> None:
        super().__init__(what, fix)
        self.verb = verb  # the right that is missing
        self.known = known  # False: we could not even say who we are


class Missing(Failure):
    """There is nothing at that path."""


class Refused(Failure):
    """The server understood, and will not: what we sent is wrong, or meets something else."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


def failure(
    server: str, code: int, status: Object, verb: str, retry_after: str | None = None
) -> Failure:
    """Of a status other than the wanted one, and what came with it."""
    words = printable(str(status.get("message") or f"HTTP {code}"), 600)
    if code == 410 or _says(status, TOO_LARGE):
        return Gone(f"{server}: {words}")
    if code == 401:
        fix = "Check the token or the certificate"
        return Denied(f"{server} does not know us", fix, verb=verb, known=False)
    if code == 403 and not _says(status, TERMINATING):
        return Denied(f"{server}: {words}", verb=verb)
    if code == 404:
        return Missing(f"{server}: {words}")
    if code == 429 or code >= 500:
        return Away(f"{server} cannot answer now: {words}", retry_after=_seconds(retry_after))
    return Refused(f"{server}: {words}", code)


def away(server: str, error: Exception) -> Away:
    """Of what happened on the way to an answer."""
    file = getattr(error, "filename", None)
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, http.client.HTTPException):
        why = f"it breaks off ({type(error).__name__})"
    elif isinstance(error, TimeoutError):
        why = str(error) if "end" in str(error) else "it does not answer in time"
    elif file or not isinstance(error, OSError):  # a token, a certificate
        words = f"{file}: {why}" if file else why
        return Away(f"{server} cannot be asked: {printable(str(words), 300)}")
    return Away(f"{server} cannot be reached: {printable(str(why), 300)}")


def _says(status: Object, reason: str) -> bool:
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return isinstance(causes, list) and any(
        isinstance(cause, dict) and cause.get("reason") == reason for cause in causes
    )


def _seconds(text: str | None) -> float:
    """Of a Retry-After; its other form, a date, is not used here."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_RETRY) if math.isfinite(seconds) and seconds > 0 else 0.0
