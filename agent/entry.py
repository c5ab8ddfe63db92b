"""The command `portranger`.

The dry run of a pipeline is read here by hand, where its arguments are of the plain form: loading
click takes longer than all of its work. Everything else is for the command line proper.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence

from agent.errors import Failure, NotPermitted


def main() -> None:
    """Run the command line of this process."""
    arguments = sys.argv[1:]
    quick = dry_run(arguments)
    if quick is None:
        sys.exit(guarded(lambda: _click(arguments)))
    code = guarded(quick)
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(code)  # nothing is open: taking the interpreter down would be a tenth of the run


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, also where it fails."""
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
    except Failure as failure:
        return _told(str(failure), failure.exit_code)
    except KeyboardInterrupt:
        return _told("interrupted.", 1)
    except OSError as error:  # of the streams: all others were given a meaning where they arose
        if error.filename is not None:  # but for one of a file that nobody thought of
            code = NotPermitted.exit_code if isinstance(error, PermissionError) else 1
            return _told(f"{error.filename}: {error.strerror}.", code)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        quiet = isinstance(error, BrokenPipeError)
        return 1 if quiet else _told(f"cannot write the output: {error.strerror}.", 1)
    return code


def _told(what: str, code: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"portranger: {what}\n")
    return code


def dry_run(arguments: Sequence[str]) -> Callable[[], int] | None:
    """`plan --against empty -f FILE… [-o FORMAT]`, ready to run; None for anything else."""
    if arguments[:1] != ["plan"]:
        return None
    paths: list[str] = []
    given = {"--against": "live", "-o": "text"}
    rest = list(arguments[1:])
    while len(rest) >= 2 and rest[0] in ("-f", *given) and not rest[1].startswith("-"):
        name, value = rest.pop(0), rest.pop(0)
        if name == "-f":
            paths.append(value)
        else:
            given[name] = value
    if rest or not paths or given["--against"] != "empty" or given["-o"] not in ("text", "json"):
        return None
    return lambda: _plan(paths, given["-o"])


def _plan(paths: Sequence[str], output: str) -> int:
    gc.disable()  # over before anything is worth collecting
    from agent.commands.plan import plan
    from agent.console import this_process

    return plan(paths, this_process(), kernel=None, output=output)


def _click(arguments: Sequence[str]) -> int:
    from agent.cli import run

    return run(arguments)


if __name__ == "__main__":
    main()
