"""What can go wrong outside the core, each with an exit code and a way out for the user."""

from collections.abc import Callable


class Failure(Exception):
    """Something failed; says what, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what}. {fix}." if fix else f"{what}.")


class Usage(Failure):
    """The command line makes no sense."""

    exit_code = 64


class BadManifest(Failure):
    """What the manifests say cannot be done."""

    exit_code = 65


class BackendMissing(Failure):
    """The kernel or a library lacks what we need."""

    exit_code = 69


class TryAgain(Failure):
    """The same call may succeed later."""

    exit_code = 75


class NoNamespace(TryAgain):
    """A network namespace is not there, or is there no longer. What may have been meant instead is
    looked for when it is told to somebody: a daemon meets thousands of them, and tells nobody."""

    def __init__(self, what: str, fix: str = "", guess: Callable[[], str] = str) -> None:
        super().__init__(what, fix)
        self._guess = guess

    def __str__(self) -> str:
        return f"{self.what}. {self._guess()}{self.fix}." if self.fix else super().__str__()


class Stale(TryAgain):
    """Somebody changed the tables between our look and our commit."""


class NotPermitted(Failure):
    """We lack a capability."""

    exit_code = 77


class BadConfiguration(Failure):
    """The configuration cannot be used; a line for each problem in it."""

    exit_code = 78

    def __str__(self) -> str:
        return self.what  # its lines end as they should
