"""The options that several commands share, and how shells complete them."""

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


def not_empty(_context: object, _option: object, value: Any) -> Any:
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter("is empty: write a name, a path, pid:N or pod:UID.")
    return value


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
    callback=not_empty,
    shell_complete=_namespaces,
    help="Put every manifest into this namespace: a name, a path, pid:N or pod:UID.",
)

many_netns = click.option(
    "--netns",
    multiple=True,
    callback=not_empty,
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
