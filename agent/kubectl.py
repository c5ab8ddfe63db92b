"""The command `kubectl-portranger`, which kubectl finds in PATH when it is told `portranger`: for
users with a kubeconfig, who are neither root nor on a node. On argparse: click has its one place,
and this is a command line of its own."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn

from agent.commands.explain import address_of, protocol_and_port
from agent.commands.instance import explain, fetched, plan
from agent.commands.instance_status import status
from agent.console import this_process
from agent.entry import guarded
from agent.errors import Failure, Usage
from agent.sources.api import Api
from agent.sources.kubeconfig import load
from rules.manifests.metadata import is_subdomain

KINDS = (
    *("vmi", "vmis", "virtualmachineinstance", "virtualmachineinstances"),
    *("vm", "vms", "virtualmachine", "virtualmachines"),
)
GROUPS = ("", "kubevirt.io", "v1.kubevirt.io")  # that may follow a kind, after a dot
IN_A_POD = "KUBERNETES_SERVICE_HOST"
EPILOG = (
    "Exit codes: 0 done, 1 failed, 64 usage, 65 bad ranges, 75 try again, 77 not permitted, "
    "78 bad kubeconfig."
)


def main() -> None:
    """Run the command line of this process."""
    sys.exit(guarded(lambda: run(sys.argv[1:], os.environ)))


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command and return its exit code."""
    try:
        return _answered(_parser().parse_args(arguments), environ)
    except SystemExit as end:  # of --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        raise Failure("interrupted") from None


def _answered(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    console = this_process()
    credentials = load(options.kubeconfig, outside(environ), context=options.context)
    for warning in credentials.warnings:
        console.warn(f"portranger: {warning}")
    with closing(Api(credentials)) as api:
        namespace = options.namespace or credentials.namespace
        found = fetched(api, namespace, options.name, console)
        if options.command == "plan":
            return plan(found, console, output=options.output)
        if options.command == "explain":
            return explain(found, console, options.what, options.source)
        return status(api, found, console, output=options.output, now=time.time())


def outside(environ: Mapping[str, str]) -> Mapping[str, str]:
    """In a pod a kubeconfig counts before the pod's own account, as it does for kubectl."""
    usual = f"{environ.get('HOME', '')}/.kube/config"
    known = environ.get("KUBECONFIG") or os.path.exists(usual)  # noqa: PTH110 - or may not be seen
    return {key: value for key, value in environ.items() if key != IN_A_POD or not known}


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: str) -> None:
        choices = list(action.choices or ())
        if action.dest == "command" and value not in choices:
            import difflib  # for who mistypes only

            similar = difflib.get_close_matches(value, choices, n=1)
            guess = f"Did you mean {similar[0]!r}? " if similar else ""
            raise Usage(f"no such command {value!r}", f"{guess}See `{self.prog} --help`")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise Usage(message, f"See `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib.metadata import version  # slow, and seldom asked for

        this_process().say(f"{parser.prog}, version {version('portranger')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kubectl portranger",
        description="The port ranges of your virtual machines, and what became of them.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, description in (
        ("plan", "Show what an agent would forward for it, or everything that is wrong with it."),
        ("status", "Show where it runs, what it declares, and what the agents have said of that."),
        ("explain", "Say what becomes of a new flow to one of its ports."),
    ):
        command = commands.add_parser(
            name, help=description, description=description, epilog=EPILOG, allow_abbrev=False
        )
        _add_arguments(command, name)
    return parser


def _add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    add = command.add_argument
    words = "NAME or vmi/NAME: an instance, or a machine that has none"
    add("name", metavar="VMI", type=_instance, help=words)
    if name == "explain":
        add("what", metavar="PROTO/PORT", type=protocol_and_port, help="such as tcp/8080")
        add("--from", dest="source", metavar="ADDR", type=address_of, help="who sends")
    else:
        words = "for people, or for programs"
        add("-o", "--output", choices=("text", "json"), default="text", help=words)
    add("-n", "--namespace", metavar="NS", type=_name, help="without it, the context's own")
    add("--context", default="", metavar="NAME", help="without it, the current one")
    add("--kubeconfig", default="", metavar="FILE", help="without it, found as kubectl does")


def _instance(text: str) -> str:
    """Also as kubectl prints and takes it: vmi/desktop, in capitals or not."""
    kind, slash, name = text.partition("/")
    if not slash:
        return _name(text)
    short, _, group = kind.lower().partition(".")
    if short not in KINDS or group not in GROUPS:
        raise Usage(f"{kind!r} is not a type of virtual machine", "Write vmi/NAME, or NAME alone")
    return _name(name)


def _name(text: str) -> str:
    if not is_subdomain(text):
        raise Usage(f"{text!r} is not a name in Kubernetes", "Write one as `kubectl get` lists it")
    return text


if __name__ == "__main__":
    main()
