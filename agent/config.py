"""The daemon's configuration: a TOML file becomes values once, here at the edge, or every problem
in it is told at once. Behind this module no port, range or address is a text."""

import pathlib
import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from agent.errors import BadConfiguration
from rules.manifests.fields import nearest
from rules.manifests.port_annotations import decimal
from rules.model import NODE, Address, Network
from rules.ports import HIGHEST, LOWEST, PortRange
from rules.problems import ABSENT, Path, Problem, printable, shown
from rules.values import Value

DEFAULT_FILE = "/etc/portranger/portranger.toml"
MOST_BYTES = 256 * 1024
LONGEST_RESYNC = 86400
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")

Lines = dict[Path, int]
Reader = Callable[[object], object]


class Listen(Value):
    """Where metrics, health and status are served."""

    host: str
    port: int  # 0: any that is free

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class NodePorts(Value, kw_only=True):
    """Which ports the node publishes Services on, and at which of its addresses."""

    range: PortRange = PortRange(30000, 32767)
    addresses: tuple[Address, ...] = ()  # none: all but loopback
    external: tuple[Network, ...] = ()  # that Services may name although they are not the node's
    reserve: bool = False  # whether programs are kept from getting published ports at random


class Kubernetes(Value, kw_only=True):
    """How to reach the API server, and who this node is to it."""

    kubeconfig: str = ""  # empty: in-cluster, then $KUBECONFIG
    node_name: str = ""  # empty: $NODE_NAME, then the host name
    kubelet_root: str = "/var/lib/kubelet"
    proc: str = "/proc"  # where the node's processes are seen, if not in our own
    services: bool = True  # whether Services with port ranges are published on the node


class Policy(Value, kw_only=True):
    """Whether NetworkPolicies are enforced, and whether the node itself is exempt from them."""

    enforce: bool | None = None  # None: those of files are; in a cluster its network plugin does it
    allow_node: bool = True


class Config(Value, kw_only=True):
    """All that `portranger run` is told."""

    source: str = "files"
    manifests: str = "/etc/portranger/manifests.d"
    backend: str = "auto"
    listen: Listen | None = Listen("127.0.0.1", 9788)
    state_dir: str = "/var/lib/portranger"
    resync_seconds: int = 600
    node_ports: NodePorts = NodePorts()
    kubernetes: Kubernetes = Kubernetes()
    policy: Policy = Policy()

    @property
    def enforces(self) -> bool:
        """Whether NetworkPolicies are enforced."""
        given = self.policy.enforce
        return self.source == "files" if given is None else given

    @property
    def publishes(self) -> bool:
        """Whether Services are published on the node."""
        return self.source == "files" or self.kubernetes.services

    @property
    def node_namespaces(self) -> list[str] | None:
        """Where the addresses are with which policies always allow traffic: in the namespace that
        the agent runs in and, where that may be the one of a pod, in that of process 1. None: there
        are no such addresses."""
        if not self.policy.allow_node:
            return None
        return [NODE, *([f"{self.kubernetes.proc}/1/ns/net"] if self.source != "files" else [])]


def load(path: str | None, default: str = DEFAULT_FILE) -> Config:
    """The configuration in that file; without a path the default's, if there is such a file."""
    file = default if path is None else path
    try:
        text = _content(file)
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError) and not pathlib.Path(file).is_symlink()
        if path is None and absent:
            return Config()
        raise BadConfiguration(str(_unreadable(file, error))) from error
    return read(text, _label(file))


def _content(file: str) -> str:
    if not file.startswith(("/dev/", "/proc/")) and pathlib.Path(file).is_fifo():
        raise ValueError("it is a pipe")  # reading it would wait for its writer
    with pathlib.Path(file).open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES // 1024} KiB")
    return content.decode("utf-8-sig")


def _unreadable(file: str, error: Exception) -> Problem:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Problem(
        code="unreadable",
        path=(),
        what=f"cannot be read: {reason}",
        fix="Name a text file in UTF-8 that this user may read.",
        file=_label(file),
    )


def _label(file: str) -> str:
    return printable(file, 4096) or "''"


def read(text: str, file: str) -> Config:
    """The configuration that a text is; every problem in it is told, each with its line."""
    import tomllib

    try:
        written = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number too long, or lists too deep, are those
        raise BadConfiguration(str(_syntax(error, text).at(file, _line(error, text)))) from error
    found: list[Problem] = []
    config = _config(written, found)
    if found:
        lines = _lines(text)
        placed = [problem.at(file, _nearest_line(lines, problem.path)) for problem in found]
        placed.sort(key=lambda problem: problem.line)
        raise BadConfiguration("\n".join(map(str, placed)))
    return config


def _syntax(error: Exception, text: str) -> Problem:
    reason = _PLACE.sub("", str(error)) or "unreadable"
    return Problem(
        code="toml-syntax",
        path=(),
        what=f"is not TOML: {printable(reason, 200)}",
        fix="Write key = value, each key once, and every text in quotes.",
        value=text.split("\n")[_line(error, text) - 1].strip() or ABSENT,
    )


def _line(error: Exception, text: str) -> int:
    """tomllib tells it in its message only."""
    place = _PLACE.search(str(error))
    if not place:
        return 1
    return int(place[1]) if place[1] else text.rstrip().count("\n") + 1


def _lines(text: str) -> Lines:
    """The line of every table header and `key =`, which tomllib does not tell.

    It looks at each line for itself, so in a text of several lines it may see a key that is none.
    """
    found: Lines = {}
    table: Path = ()
    for number, line in enumerate(text.split("\n"), 1):
        name, equals, _ = line.strip().partition("=")
        if name.startswith("["):
            table = path = _steps(name.lstrip("[").partition("]")[0])
        elif equals:
            path = table + _steps(name)
        else:
            continue
        for length in range(1, len(path) + 1):
            found.setdefault(path[:length], number)
    return found


def _steps(name: str) -> Path:
    return tuple(step.strip().strip("\"'") for step in name.split("."))


def _nearest_line(lines: Lines, path: Path) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


class _Wrong(Exception):
    """What is wrong with a value, and what to write instead."""

    def __init__(self, code: str, what: str, fix: str) -> None:
        self.code, self.what, self.fix = code, what, fix
        super().__init__(what)


def _config(written: Mapping[str, object], found: list[Problem]) -> Config:
    fields = _fields(written, (), _TOP, found)
    for name, (kind, readers) in _TABLES.items():
        fields[name] = kind(**_fields(fields.get(name, {}), (name,), readers, found))
    return Config(**fields)


def _fields(
    table: Mapping[str, object], path: Path, readers: Mapping[str, Reader], found: list[Problem]
) -> dict[str, Any]:
    """The values of one table, as far as they can be read."""
    made: dict[str, Any] = {}
    for key, value in table.items():
        if key not in readers:
            found.append(_unknown(key, value, path))
            continue
        try:
            made[key] = readers[key](value)
        except _Wrong as wrong:
            at = (*path, key)
            found.append(
                Problem(code=wrong.code, path=at, what=wrong.what, fix=wrong.fix, value=value)
            )
    return made


def _unknown(key: str, value: object, path: Path) -> Problem:
    """A key that means nothing where it stands, and where or how it was probably meant."""
    known: dict[Path, dict[str, Reader]] = {(): _TOP}
    known |= {(name,): readers for name, (_, readers) in _TABLES.items()}
    homes = [home for home, readers in known.items() if key in readers]
    if homes and homes[0]:
        fix = f"Write it below [{homes[0][0]}]."
    elif homes:
        fix = "Write it above the first [table]: below one it belongs to that."
    elif close := nearest(key, known[path]):
        fix = f"Did you mean {close}?"
    else:
        fix = f"Remove it; the known ones are: {', '.join(known[path])}."
    noun = "table" if isinstance(value, dict) else "key"
    return Problem(
        code="unknown-key", path=(*path, key), what=f"is not a known {noun} here", fix=fix
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _Wrong("wrong-type", "must be a text", "Put it in quotes.")


def _truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _Wrong("wrong-type", "must be true or false", "Write true or false, without quotes.")


def _truth_or_auto(value: object) -> bool | None:
    if value == "auto":
        return None
    if isinstance(value, bool):
        return value
    raise _Wrong("wrong-type", 'must be true, false or "auto"', 'Write true, false or "auto".')


def _table(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    what = "must be a table"
    raise _Wrong("wrong-type", what, "Write its name as [name] on a line, and its keys below.")


def _one_of(*words: str) -> Callable[[object], str]:
    fix = "Write one of: " + ", ".join(f'"{word}"' for word in words) + "."

    def read_word(value: object) -> str:
        if _text(value) not in words:
            raise _Wrong("bad-value", "is not a word known here", fix)
        return str(value)

    return read_word


def _absolute(value: object) -> str:
    path = _text(value)
    if not path.startswith("/") or "\0" in path:
        raise _Wrong("bad-value", "must be an absolute path", "Write the whole path, from / on.")
    return path


def _absolute_or_empty(value: object) -> str:
    return _absolute(value) if value != "" else ""


def _seconds(value: object) -> int:
    fix = f"Write a number from 1 to {LONGEST_RESYNC}, without quotes."
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Wrong("wrong-type", "must be a whole number", fix)
    if not 1 <= value <= LONGEST_RESYNC:
        raise _Wrong("bad-value", "is out of bounds", fix)
    return value


def _listen(value: object) -> Listen | None:
    text = _text(value)
    if not text:
        return None
    host, _, number = text.rpartition(":")
    port = decimal(number)
    if port is None or port > HIGHEST or not _is_host(host):
        fix = 'Write one such as "127.0.0.1:9788" or "[::1]:9788", or "" for none.'
        raise _Wrong("bad-value", "is not a host and a port", fix)
    return Listen(host.strip("[]"), port)


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            IPv6Address(host[1:-1])
        elif host.rpartition(".")[2].isdigit():
            IPv4Address(host)
        else:
            return bool(_HOST_NAME.fullmatch(host))
    except ValueError:
        return False
    return True


def _range(value: object) -> PortRange:
    first_text, dash, last_text = _text(value).partition("-")
    first, last = decimal(first_text), decimal(last_text if dash else first_text)
    if first is None or last is None or not LOWEST <= first <= last <= HIGHEST:
        fix = f'Write its first and last port, {LOWEST} to {HIGHEST}, such as "30000-32767".'
        raise _Wrong("bad-value", "is not a port range", fix)
    return PortRange(first, last)


def _addresses(value: object) -> tuple[Address, ...]:
    fix = 'Write addresses of this node, such as ["192.0.2.1"], or [] for all of them.'
    if not isinstance(value, list):
        raise _Wrong("wrong-type", "must be a list of addresses", fix)
    made = [_address(item) for item in value]
    strange = [shown(item) for item, address in zip(value, made, strict=True) if not address]
    if strange:
        raise _Wrong("bad-value", f"holds what is no node's address: {', '.join(strange)}", fix)
    return tuple(dict.fromkeys(address for address in made if address))


def _networks(value: object) -> tuple[Network, ...]:
    fix = 'Write addresses or networks, such as ["203.0.113.7", "203.0.113.64/26"].'
    if not isinstance(value, list):
        raise _Wrong("wrong-type", "must be a list of addresses or networks", fix)
    made: list[Network] = []
    for item in value:
        try:
            made.append(ip_network(_text(item)))
        except (ValueError, _Wrong) as error:
            raise _Wrong("bad-value", f"holds what is no network: {shown(item)}", fix) from error
    return tuple(dict.fromkeys(made))


def _address(value: object) -> Address | None:
    """The address that a text is; no zone, no group, and not the one that stands for all."""
    try:
        address = ip_address(_text(value))
    except (ValueError, _Wrong):
        return None
    usable = not (address.is_unspecified or address.is_multicast or "%" in str(address))
    return address if usable else None


_TABLES: dict[str, tuple[Callable[..., Value], dict[str, Reader]]] = {
    "node_ports": (
        NodePorts,
        {
            "range": _range,
            "addresses": _addresses,
            "external": _networks,
            "reserve": _truth,
        },
    ),
    "kubernetes": (
        Kubernetes,
        {
            "kubeconfig": _absolute_or_empty,
            "node_name": _text,
            "kubelet_root": _absolute,
            "proc": _absolute,
            "services": _truth,
        },
    ),
    "policy": (Policy, {"enforce": _truth_or_auto, "allow_node": _truth}),
}
_TOP: dict[str, Reader] = {
    "source": _one_of("files", "kubernetes"),
    "manifests": _absolute,
    "backend": _one_of("auto", "nftables", "iptables"),
    "listen": _listen,
    "state_dir": _absolute,
    "resync_seconds": _seconds,
    **dict.fromkeys(_TABLES, _table),
}
