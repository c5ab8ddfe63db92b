"""The options that several commands share, and how shells complete them."""

import math
import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from agent import completion as shells
from rules.manifests import MOST_ENTRIES


def _files(_context: object, _option: object, word: str) -> list[CompletionItem[str]]:
    return [CompletionItem(word, type=shells.FILE)]


def _namespaces(
    context: click.Context, _option: object, word: str
) -> list[CompletionItem[str]] | list[str]:
    if "/" in word:
        return [CompletionItem(word, type=shells.FILE)]
    return shells.namespaces(word, node=context.command.name not in ("plan", "apply"))


def examples(*commands: str) -> str:
    """The end of a command's help."""
    noun = "Example" if len(commands) == 1 else "Examples"
    # Click keeps lines as they are behind a \b.
    return "\n".join(["\b", f"{noun}:", *(f"  portranger {command}" for command in commands)])


files = click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    required=True,
    metavar="PATH",
    shell_complete=_files,
    help="A manifest, a directory of them, or - for standard input; may be repeated.",
)

most = click.option(
    "--max-ranges",
    "most",
    type=click.IntRange(min=1),
    default=MOST_ENTRIES,
    metavar="N",
    help="Refuse an interface that declares more ports and ranges than this.",
)


def a_number(_context: object, _option: object, value: float) -> float:
    """Python's nan is within every range."""
    if math.isnan(value):
        raise click.BadParameter("is not a number of seconds.")
    return value


def each_netns(_context: object, _option: object, value: Any) -> Any:
    """One or several, as they are called elsewhere."""
    if isinstance(value, tuple):
        return tuple(_netns(one) for one in value)
    return None if value is None else _netns(value)


def _netns(text: str) -> str:
    """A number is a process, as for `ip netns`, unless a namespace has that name. A machine may be
    called so: hence here, and not where manifests are read."""
    if not text:
        raise click.BadParameter("is empty: write a name, a path, pid:N or pod:UID.")
    is_process = text.isdecimal() and not os.path.exists(f"/run/netns/{text}")  # noqa: PTH110
    return f"pid:{text}" if is_process else text


printed = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    help="For people, or for programs.",
)

one_netns = click.option(
    "--netns",
    metavar="NS",
    callback=each_netns,
    shell_complete=_namespaces,
    help="Put every manifest into this namespace: a name, a path, pid:N or pod:UID.",
)

many_netns = click.option(
    "--netns",
    multiple=True,
    callback=each_netns,
    metavar="NS",
    shell_complete=_namespaces,
    help="A namespace: a name, a path, pid:N or pod:UID; may be repeated. Without it, all that "
    "have a name, and the node's own.",
)

backend = click.option(
    "--backend",
    type=click.Choice(["auto", "nftables", "iptables"]),
    default="auto",
    help="Which tables of the kernel to use; auto takes what is in use in the namespace.",
)

color = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    is_flag=False,
    flag_value="always",
    default="auto",
    help="Whether to use colours; auto does so on a terminal.",
)

config = click.option(
    "-c",
    "--config",
    metavar="FILE",
    shell_complete=_files,
    help="The daemon's configuration; without it, /etc/portranger/portranger.toml if there is one.",
)

yes = click.option("--yes", is_flag=True, help="Do not ask before something is changed.")
