"""The command line: options in, exit codes out. What a command does is in agent.commands."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click
from click.shell_completion import ShellComplete

from agent import completion as shells
from agent.commands.plan import OUTPUTS
from agent.console import this_process
from agent.errors import Failure, Usage
from agent.kernel.kinds import Kernel
from agent.options import (
    _files,
    _namespaces,
    a_number,
    backend,
    color,
    config,
    each_netns,
    examples,
    files,
    many_netns,
    most,
    one_netns,
    printed,
    yes,
)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments and (question := shells.asked(os.environ)):
        return _answered(question)
    try:
        return portranger.main(list(arguments), "portranger", standalone_mode=False) or 0
    except click.exceptions.Abort:
        click.echo("portranger: interrupted.", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return Usage.exit_code


def _answered(question: shells.Question) -> int:
    """What a key that completes is to find."""
    completer = ShellComplete(portranger, {}, "portranger", shells.ASKED)
    items = completer.get_completions(list(question.words), question.word)
    if not items and question.at_an_option:
        items = completer.get_completions(list(question.words), "-")
    found = [(str(item.type), str(item.value), item.help or "") for item in items]
    for line in shells.answer(question, found):
        click.echo(line)
    return 0


def _kernel(backend: str, *netns: str | None) -> Kernel:
    """The kernel, for a command that was given these namespaces; where the pods among them are,
    the daemon's configuration tells, which nobody else needs."""
    from agent.kernel.live import LiveKernel
    from agent.kernel.pods import POD, Pods

    pods = None
    if any(name and name.startswith(POD) for name in netns):
        from agent.config import load

        node = load(None).kubernetes
        pods = Pods(node.kubelet_root, node.proc)
    kernel = LiveKernel(backend, pods=pods, proving=True)
    click.get_current_context().call_on_close(kernel.close)
    return kernel


def _daemon() -> Any:
    """How the daemon of this machine is configured, as far as anybody can tell."""
    from agent.config import Config, load

    try:
        return load(None)
    except Failure:
        return Config()


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
        sys.stdout.flush()  # what is asked about comes first, also where both go to one file
        try:
            return bool(click.confirm(question, err=True))
        except (click.exceptions.Abort, RuntimeError, UnicodeDecodeError):  # no answer, or none
            click.echo(err=True)
            return False

    return ask


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit codes: 0 done, 1 failed, 2 changes (plan --detailed-exitcode), 64 usage, "
    "65 bad manifest, 69 backend missing, 75 try again, 77 not permitted, 78 bad configuration.",
)
@click.version_option(package_name="portranger")
def portranger() -> None:
    """One DNAT rule per contiguous port range of a virtual machine, in the right namespace.

    Begin with `portranger demo`, or with `portranger plan --against empty -f FILE`, which needs no
    root. `man portranger` tells the rest.
    """


@portranger.command(epilog=examples("validate -f manifests/", "validate -f - < desktop.yaml"))
@files
@most
def validate(paths: tuple[str, ...], most: int) -> int:
    """Check manifests, and tell every problem.

    Each is told with its file, line and field, what is wrong, and what to write instead.
    """
    from agent.commands.validate import validate as command

    return command(paths, this_process(), most=most)


@portranger.command(
    epilog=examples(
        "plan -f desktop.yaml",
        "plan -f manifests/ --against empty -o json",
        "plan -f desktop.yaml --netns desktop --detailed-exitcode",
    )
)
@files
@most
@one_netns
@click.option(
    "--against",
    type=click.Choice(["live", "empty"]),
    default="live",
    help="Compare with the kernel, or with nothing, which needs neither root nor a kernel.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(OUTPUTS),
    default="text",
    help="For people, for programs, or a script for nft -f or iptables-restore.",
)
@click.option("--detailed-exitcode", is_flag=True, help="Exit with 2 if there are changes.")
@click.option("-v", "--verbose", is_flag=True, help="Say which backend was chosen, and why.")
@backend
@color
def plan(**options: Any) -> int:
    """Show what apply would change.

    Nothing is changed.
    """
    from agent.commands.plan import plan as command

    chosen = backend_for(options)
    return command(
        options["paths"],
        this_process(options["color"]),
        kernel=_kernel(chosen, options["netns"]) if options["against"] == "live" else None,
        netns=options["netns"],
        most=options["most"],
        output=options["output"],
        detailed=options["detailed_exitcode"],
        verbose=options["verbose"],
    )


@portranger.command(
    epilog=examples("apply -f desktop.yaml", "apply -f manifests/ --netns desktop --yes")
)
@files
@most
@one_netns
@backend
@color
@yes
def apply(**options: Any) -> int:
    """Make namespaces hold what manifests declare.

    Nothing else of ours stays in these namespaces; others are left alone. If a manifest is bad,
    nothing at all is changed.
    """
    from agent.commands.apply import apply as command

    return command(
        options["paths"],
        this_process(options["color"]),
        kernel=_kernel(options["backend"], options["netns"]),
        netns=options["netns"],
        most=options["most"],
        daemon=_daemon(),
        confirm=_confirm(options["yes"]),
    )


@portranger.command(
    epilog=examples(
        "show --netns desktop", "show --map --netns node:self", "show --netns node:self -o json"
    )
)
@many_netns
@click.option(
    "--map", "as_map", is_flag=True, help="Draw the ports: who holds which, what is free."
)
@printed
@backend
@color
def show(**options: Any) -> int:
    """Show what is live, and what it has counted.

    A NAT rule sees the first packet of each flow: new flows are counted, not all traffic.
    """
    if options["as_map"] and options["output"] != "text":
        raise click.UsageError("--map is a picture: it does not go with -o json.")
    from agent.commands.show import show as command

    return command(
        options["netns"],
        this_process(options["color"]),
        kernel=_kernel(options["backend"], *options["netns"]),
        output=options["output"],
        as_map=options["as_map"],
    )


@portranger.command(epilog=examples("top", "top --netns desktop --sort new", "top -n 1"))
@many_netns
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    callback=a_number,
    default=1.0,
    metavar="S",
    help="How many seconds from one look to the next.",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print so many tables and end; 1 where there is no terminal.",
)
@click.option(
    "--sort",
    type=click.Choice(["open", "new", "packets", "bytes", "range"]),
    default="open",
    help="What comes first.",
)
@backend
def top(**options: Any) -> int:
    """Watch the traffic of each range; q quits.

    New flows, open connections, packets and bytes, as they are now.
    """
    from agent.commands.top import Wish
    from agent.commands.top import top as command

    kernel = _kernel(options.pop("backend"), *options["netns"])
    return command(Wish(**options), this_process(), kernel=kernel)


@portranger.command(epilog=examples("status", "status --netns desktop", "status -o json"))
@config
@click.option(
    "--netns",
    multiple=True,
    metavar="NS",
    help="A namespace, as the daemon calls it; may be repeated. Without it, all.",
)
@printed
def status(config: str | None, netns: tuple[str, ...], output: str) -> int:
    """Ask the daemon how everything stands."""
    import contextlib
    import time

    from agent.commands.status import status as command
    from agent.config import Config, load
    from agent.errors import BadConfiguration

    console = this_process()
    try:
        return command(load(config), console, netns=netns, output=output, now=time.time())
    except BadConfiguration as bad:  # the daemon may well go on with the one it had before
        if config is not None and not os.path.exists(config):  # noqa: PTH110 - as it was typed
            raise
        with contextlib.suppress(Failure):
            code = command(Config(), console, netns=netns, output=output, now=time.time())
            console.warn(f"portranger: {bad}")
            return code
        raise


@portranger.command(
    epilog=examples(
        "wait -f /etc/portranger/manifests.d",
        "wait -f desktop.yaml --timeout 10",
        "wait --revision 1763441234567",
    )
)
@config
@click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    metavar="PATH",
    shell_complete=_files,
    help="A file of the daemon's manifests directory, or a copy of one, or all of the directory; "
    "may be repeated.",
)
@click.option(
    "--revision",
    type=click.IntRange(min=1),
    metavar="N",
    help="A revision, as `portranger status` reports it. Without it and -f, the newest.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86400),
    callback=a_number,
    default=60.0,
    metavar="S",
    help="Give up after so many seconds; 0 only asks.",
)
def wait(config: str | None, paths: tuple[str, ...], revision: int | None, timeout: float) -> int:
    """Wait until manifests are applied.

    They are once the kernel holds what the daemon makes of them, and the flows of ports that they
    close or move are flushed.
    """
    if paths and revision is not None:
        raise click.UsageError("Give either -f PATH or --revision N.")
    from agent.commands.wait import wait as command
    from agent.config import load

    return command(
        load(config), this_process(), paths=paths, revision=revision or 0, timeout=timeout
    )


@portranger.command(
    epilog=examples(
        "explain --live --netns desktop tcp/8080",
        "explain -f desktop.yaml udp/5060 --from 192.0.2.7",
    )
)
@click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    metavar="PATH",
    shell_complete=_files,
    help="Manifests to ask: files, directories, or - for standard input; may be repeated.",
)
@click.option("--live", is_flag=True, help="Ask the kernel instead of manifests.")
@click.option(
    "--netns",
    metavar="NS",
    callback=each_netns,
    shell_complete=_namespaces,
    help="Only this namespace: a name, a path, pid:N or pod:UID.",
)
@click.option("--from", "source", metavar="ADDR", help="Who sends; 127.0.0.1 is the inside.")
@click.argument("what", metavar="PROTO/PORT")
@backend
def explain(**options: Any) -> int:
    """Say where a packet goes, and by which rule.

    Give a protocol and a port, such as tcp/8080; where no rule takes it, the answer is why.
    """
    if bool(options["paths"]) == options["live"]:
        raise click.UsageError("Give either -f PATH or --live.")
    from agent.commands.explain import explain as command

    return command(
        options["what"],
        this_process(),
        paths=options["paths"],
        kernel=_kernel(options["backend"], options["netns"]) if options["live"] else None,
        netns=options["netns"],
        source=options["source"],
    )


@portranger.command(epilog=examples("convert -f desktop.yaml --to annotations"))
@files
@click.option(
    "--to",
    type=click.Choice(["ranges", "ports", "annotations"]),
    required=True,
    help="Ranges as portRanges, every port by itself, or named ports with annotations.",
)
def convert(paths: tuple[str, ...], to: str) -> int:
    """Print manifests in another spelling."""
    from agent.commands.convert import convert as command

    return command(paths, this_process(), to=to)


@portranger.command(epilog=examples("clear --netns desktop", "clear --yes"))
@many_netns
@backend
@yes
def clear(netns: tuple[str, ...], yes: bool, backend: str) -> int:
    """Remove everything of ours from namespaces.

    A running daemon puts it back: stop it first. Of kernel settings, route_localnet goes back to
    0 on links of guests; the others stay as they are.
    """
    from agent.commands.clear import clear as command

    return command(
        netns,
        this_process(),
        kernel=_kernel(backend, *netns),
        daemon=_daemon(),
        confirm=_confirm(yes),
    )


@portranger.command("run", epilog=examples("run -c portranger.toml", "run --log-format json"))
@config
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="How to write the log: name=value pairs, or JSON; a line per event.",
)
def run_daemon(config: str | None, log_format: Literal["text", "json"]) -> int:
    """Keep the rules true until stopped.

    This is the daemon. It watches manifests and namespaces. SIGHUP makes it read everything again;
    when it ends, the rules stay.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # until somebody hears it
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
    """Show it with real packets, and clean up.

    It builds network namespaces of its own, forwards ports in them and proves it.
    """
    from agent.demo import demonstrate

    return demonstrate(this_process())


@portranger.command(
    epilog=examples(
        "completion bash > /usr/share/bash-completion/completions/portranger",
        "completion zsh > /usr/share/zsh/vendor-completions/_portranger",
        "completion fish > /usr/share/fish/vendor_completions.d/portranger.fish",
    )
)
@click.argument("shell", type=click.Choice(list(shells.SCRIPTS)))
def completion(shell: str) -> int:
    """Print the completion script of a shell.

    `make install` puts all three in their places.
    """
    click.echo(shells.SCRIPTS[shell], nl=False)
    return 0
