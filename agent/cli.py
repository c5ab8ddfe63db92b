"""The command line: options in, exit codes out. What a command does is in agent.commands."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from agent.commands.plan import OUTPUTS
from agent.console import this_process
from agent.errors import Failure, Usage
from agent.kernel.kinds import Kernel
from rules.manifests import MOST_ENTRIES


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        return portranger.main(list(arguments), "portranger", standalone_mode=False) or 0
    except click.exceptions.Abort:
        click.echo("portranger: interrupted.", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return Usage.exit_code


def _kernel(backend: str) -> Kernel:
    from agent.kernel.live import LiveKernel

    kernel = LiveKernel(backend, proving=True)
    click.get_current_context().call_on_close(kernel.close)
    return kernel


def backend_for(options: dict[str, Any]) -> str:
    """A script in the words of one backend is a plan for that backend."""
    implied = {"nft": "nftables", "iptables": "iptables"}.get(options["output"], "auto")
    asked = str(options["backend"])
    if "auto" not in (implied, asked) and implied != asked:
        raise click.UsageError(f"-o {options['output']} does not go with --backend {asked}.")
    return implied if asked == "auto" else asked


def _confirm(yes: bool) -> Callable[[str], bool]:
    def ask(question: str) -> bool:
        if yes:
            return True
        try:
            return bool(click.confirm(question, err=True))
        except click.exceptions.Abort:
            click.echo(err=True)
            return False

    return ask


files = click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    required=True,
    metavar="PATH",
    help="A manifest, a directory of them, or - for standard input; may be repeated.",
)


most = click.option(
    "--max-ranges",
    "most",
    type=click.IntRange(min=1),
    default=MOST_ENTRIES,
    show_default=True,
    metavar="N",
    help="Refuse an interface that declares more ports and ranges than this.",
)


def _not_empty(_context: object, _option: object, value: Any) -> Any:
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter("is empty: write a name, a path or pid:N.")
    return value


one_netns = click.option(
    "--netns",
    metavar="NS",
    callback=_not_empty,
    help="Put every manifest into this namespace: a name, a path or pid:N.",
)
many_netns = click.option(
    "--netns",
    multiple=True,
    callback=_not_empty,
    metavar="NS",
    help="A namespace by name, path or pid:N; may be repeated. Without it, all that have a name.",
)
backend = click.option(
    "--backend",
    type=click.Choice(["auto", "nftables", "iptables"]),
    default="auto",
    help="Which tables of the kernel to use.",
)
color = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    is_flag=False,
    flag_value="always",
    default="auto",
    help="Whether to colour the plan.",
)
config = click.option(
    "-c",
    "--config",
    metavar="FILE",
    help="The daemon's configuration; without it, /etc/portranger/portranger.toml if there is one.",
)
yes = click.option("--yes", is_flag=True, help="Do not ask.")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 changes (plan --detailed-exitcode), 64 usage, "
    "65 bad manifest, 69 backend missing, 75 try again, 77 not permitted, 78 bad configuration.",
)
@click.version_option(package_name="portranger")
def portranger() -> None:
    """One DNAT rule per contiguous port range of a virtual machine, in the right namespace."""


@portranger.command()
@files
@most
def validate(paths: tuple[str, ...], most: int) -> int:
    """Check manifests: every problem in them, or that all are valid."""
    from agent.commands.validate import validate as command

    return command(paths, this_process(), most=most)


@portranger.command()
@files
@most
@one_netns
@click.option(
    "--against",
    type=click.Choice(["live", "empty"]),
    default="live",
    help="Compare with the kernel, or with nothing (needs no root and no kernel).",
)
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="text")
@click.option("--detailed-exitcode", is_flag=True, help="Exit with 2 if there are changes.")
@click.option("-v", "--verbose", is_flag=True, help="Say which backend was chosen, and why.")
@backend
@color
def plan(**options: Any) -> int:
    """Show what apply would change, and change nothing."""
    from agent.commands.plan import plan as command

    return command(
        options["paths"],
        this_process(options["color"]),
        kernel=_kernel(backend_for(options)) if options["against"] == "live" else None,
        netns=options["netns"],
        most=options["most"],
        output=options["output"],
        detailed=options["detailed_exitcode"],
        verbose=options["verbose"],
    )


@portranger.command()
@files
@most
@one_netns
@backend
@color
@yes
def apply(**options: Any) -> int:
    """Make the namespaces of these manifests hold what they declare, and nothing else of ours."""
    from agent.commands.apply import apply as command

    return command(
        options["paths"],
        this_process(options["color"]),
        kernel=_kernel(options["backend"]),
        netns=options["netns"],
        most=options["most"],
        confirm=_confirm(options["yes"]),
    )


@portranger.command()
@many_netns
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@backend
def show(netns: tuple[str, ...], output: str, backend: str) -> int:
    """Show what is live, with packets and bytes of each range."""
    from agent.commands.show import show as command

    return command(netns, this_process(), kernel=_kernel(backend), output=output)


@portranger.command()
@config
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def status(config: str | None, output: str) -> int:
    """Ask the running daemon how everything stands."""
    import contextlib
    import time

    from agent.commands.status import status as command
    from agent.config import Config, load
    from agent.errors import BadConfiguration

    console = this_process()
    try:
        return command(load(config), console, output=output, now=time.time())
    except BadConfiguration as bad:  # the daemon may well go on with the one it had before
        with contextlib.suppress(Failure):
            code = command(Config(), console, output=output, now=time.time())
            console.warn(f"portranger: {bad}")
            return code
        raise


@portranger.command()
@click.option("-f", "--file", "paths", multiple=True, metavar="PATH", help="Manifests to ask.")
@click.option("--live", is_flag=True, help="Ask the kernel instead of manifests.")
@click.option("--netns", metavar="NS", callback=_not_empty, help="Only this namespace.")
@click.option("--from", "source", metavar="ADDR", help="Who sends; 127.0.0.1 for the inside.")
@click.argument("what", metavar="PROTO/PORT")
@backend
def explain(**options: Any) -> int:
    """Say which rule of which owner takes a packet where, or why none does."""
    if bool(options["paths"]) == options["live"]:
        raise click.UsageError("Give either -f PATH or --live.")
    from agent.commands.explain import explain as command

    return command(
        options["what"],
        this_process(),
        paths=options["paths"],
        kernel=_kernel(options["backend"]) if options["live"] else None,
        netns=options["netns"],
        source=options["source"],
    )


@portranger.command()
@files
@click.option(
    "--to",
    type=click.Choice(["ranges", "ports", "annotations"]),
    required=True,
    help="portRanges where there are such, every port by itself, or named ports with annotations.",
)
def convert(paths: tuple[str, ...], to: str) -> int:
    """Print manifests with their port ranges in another spelling."""
    from agent.commands.convert import convert as command

    return command(paths, this_process(), to=to)


@portranger.command()
@many_netns
@backend
@yes
def clear(netns: tuple[str, ...], yes: bool, backend: str) -> int:
    """Remove everything of ours from namespaces."""
    from agent.commands.clear import clear as command

    return command(netns, this_process(), kernel=_kernel(backend), confirm=_confirm(yes))


@portranger.command("run")
@config
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="How to write the log: name=value pairs, or JSON; a line per event.",
)
def run_daemon(config: str | None, log_format: Literal["text", "json"]) -> int:
    """Watch manifests and namespaces, and keep the rules true until stopped."""
    from agent.daemon import Daemon
    from agent.log import this_process_log
    from agent.notify import Notifier

    log = this_process_log(log_format)
    try:
        return Daemon(config, log, Notifier.from_environment(os.environ)).run()
    except OSError as error:
        raise Failure(
            f"the daemon cannot go on ({error})", "Look at the limits of this machine: ulimit -a"
        ) from error


@portranger.command()
def demo() -> int:
    """Build namespaces of its own, forward ports, prove it with packets, clean up."""
    from agent.demo import demonstrate

    return demonstrate(this_process())


@portranger.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script of a shell; try: source <(portranger completion bash)."""
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None  # noqa: S101 - click knows the shells of the choice above
    click.echo(completer(portranger, {}, "portranger", "_PORTRANGER_COMPLETE").source())
    return 0
