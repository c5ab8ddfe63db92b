"""What can go wrong outside the core, each with an exit code and a way out for the user."""


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
    """A network namespace is not there, or is there no longer."""


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
