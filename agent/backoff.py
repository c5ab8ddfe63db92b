"""How soon to try again what failed, or to repair what somebody keeps breaking. Pure: the time is
passed in, in seconds of a monotonic clock."""

import math

from rules.values import Value, replace


class Backoff(Value, kw_only=True):
    """Waits that double from `first` up to `longest`.

    Before the first wait, `free` strikes in a row go without one; a pause of `row` seconds ends
    the row. Once there are waits, only `forgiven_after` quiet seconds end them (or starting from
    a fresh value, as after a success).
    """

    first: float
    longest: float
    free: int = 0
    row: float = 1.0
    forgiven_after: float = math.inf
    taken: int = 0  # of the free ones
    wait: float = 0.0  # before the attempt that is due at `until`
    until: float = -math.inf  # when the next attempt is due

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest or self.free < 0:
            raise ValueError(f"not a backoff: {self.first} to {self.longest} after {self.free}")

    def due(self, now: float) -> bool:
        """Whether the time for the next attempt has come."""
        return now >= self.until

    def struck(self, now: float) -> "Backoff":
        """After one more failure, or one more breakage.

        While an attempt is still to come, more of them change nothing: else whoever breaks things
        fast enough could put off their repair for ever.
        """
        if not self.due(now):
            return self
        calm = self.quiet(now)
        if calm.taken < calm.free:
            return replace(calm, taken=calm.taken + 1, until=now)
        wait = min(calm.wait * 2 or calm.first, calm.longest)
        return replace(calm, wait=wait, until=now + wait)

    def quiet(self, now: float) -> "Backoff":
        """What is left of it when nothing has happened since the last strike."""
        pause = self.forgiven_after if self.wait else self.row
        if now - self.until < pause:
            return self
        return replace(self, taken=0, wait=0.0, until=-math.inf)


FAILURES = Backoff(first=0.1, longest=60.0)
REPAIRS = Backoff(first=0.1, longest=30.0, free=5, forgiven_after=60.0)
