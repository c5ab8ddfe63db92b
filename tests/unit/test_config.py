"""The daemon's configuration: what a file becomes, and what is said about a bad one."""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.config import MOST_BYTES, Config, Kubernetes, Listen, NodePorts, Policy, load, read
from agent.errors import BadConfiguration
from rules.ports import PortRange

ROOT = Path(__file__).parents[2]

EVERYTHING = """\
source = "files"
manifests = "/srv/machines"
backend = "iptables"
listen = "[::1]:80"
state_dir = "/srv/state"
resync_seconds = 1
[node_ports]
range = "20000-20099"
addresses = ["192.0.2.1", "2001:db8::1", "192.0.2.1"]
[kubernetes]
kubeconfig = "/root/config"
node_name = "blue"
kubelet_root = "/srv/kubelet"
services = false
[policy]
enforce = false
"""


def problems(text: str) -> list[str]:
    """What is said about a bad text, a line for each problem."""
    with pytest.raises(BadConfiguration) as caught:
        read(text, "a.toml")
    assert caught.value.exit_code == 78
    return str(caught.value).split("\n")


def told(text: str) -> list[tuple[str, str]]:
    """Of each problem, the line with its key, and the code."""
    return [
        (line.split(": ")[0].removeprefix("a.toml:"), line[:-1].rpartition("[")[2])
        for line in problems(text)
    ]


def test_an_empty_file_means_the_defaults() -> None:
    assert read("", "a.toml") == Config()
    assert read("[node_ports]\n[kubernetes]\n", "a.toml") == Config()


def test_the_example_is_the_defaults_and_names_every_key() -> None:
    import tomllib

    text = (ROOT / "examples" / "portranger.toml").read_text()
    assert read(text, "a.toml") == Config()
    written = tomllib.loads(text)
    assert tuple(written) == Config.__match_args__
    assert tuple(written["node_ports"]) == NodePorts.__match_args__
    assert tuple(written["kubernetes"]) == Kubernetes.__match_args__
    assert tuple(written["policy"]) == Policy.__match_args__


def test_every_key_is_read_into_its_value() -> None:
    assert read(EVERYTHING, "a.toml") == Config(
        source="files",
        manifests="/srv/machines",
        backend="iptables",
        listen=Listen("::1", 80),
        state_dir="/srv/state",
        resync_seconds=1,
        node_ports=NodePorts(
            range=PortRange(20000, 20099),
            addresses=(ip_address("192.0.2.1"), ip_address("2001:db8::1")),
        ),
        kubernetes=Kubernetes(
            kubeconfig="/root/config",
            node_name="blue",
            kubelet_root="/srv/kubelet",
            services=False,
        ),
        policy=Policy(enforce=False),
    )


@pytest.mark.parametrize(
    ("enforce", "files", "cluster"),
    [
        ("", True, False),
        ("policy.enforce = 'auto'", True, False),
        ("policy.enforce = true", True, True),
        ("policy.enforce = false", False, False),
    ],
)
def test_policies_of_files_are_enforced_and_those_of_a_cluster_are_left_to_it(
    enforce: str, files: bool, cluster: bool
) -> None:
    assert read(enforce, "a.toml").enforces is files
    assert read(f"source = 'kubernetes'\n{enforce}", "a.toml").enforces is cluster


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("", None),
        ("127.0.0.1:9788", Listen("127.0.0.1", 9788)),
        ("[::1]:9788", Listen("::1", 9788)),
        ("localhost:0", Listen("localhost", 0)),
        ("node-1.example.org:65535", Listen("node-1.example.org", 65535)),
    ],
)
def test_where_to_listen_is_a_host_and_a_port(text: str, listen: Listen | None) -> None:
    assert read(f'listen = "{text}"', "a.toml").listen == listen
    assert listen is None or str(listen) == text


@pytest.mark.parametrize(
    "text",
    [
        *("9788", ":9788", "localhost", "localhost:", "localhost:http", "localhost:65536"),
        *("localhost:-1", "localhost:080", "::1:9788", "[::1]", "[127.0.0.1]:9788", "[::1:9788"),
        *("127.0.0.256:9788", "127.1:9788", "a..b:9788", "-a:9788", "a b:9788", "http://a:9788"),
        *(f"{'x' * 64}:9788", "ä:9788", "²:9788", "a:²", "[]:9788"),
    ],
)
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    assert told(f'listen = "{text}"') == [("1", "bad-value")]


@pytest.mark.parametrize(
    ("text", "ports"), [("1-65535", PortRange(1, 65535)), ("30000", PortRange(30000, 30000))]
)
def test_node_ports_are_a_range(text: str, ports: PortRange) -> None:
    assert read(f'node_ports.range = "{text}"', "a.toml").node_ports.range == ports


@pytest.mark.parametrize("text", ["", "-", "5-4", "0-5", "1-65536", "1-", "-5", "a-b", "1 - 5"])
def test_what_is_no_range_is_refused(text: str) -> None:
    assert told(f'[node_ports]\nrange = "{text}"') == [("2", "bad-value")]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("source = 'Files'", "bad-value"),
        ("source = ['files']", "wrong-type"),
        ("backend = 'ipfw'", "bad-value"),
        ("backend = true", "wrong-type"),
        ("manifests = 'manifests.d'", "bad-value"),
        ("manifests = ''", "bad-value"),
        ('manifests = "/a\\u0000"', "bad-value"),
        ("state_dir = '~/state'", "bad-value"),
        ("state_dir = 5", "wrong-type"),
        ("listen = 9788", "wrong-type"),
        ("resync_seconds = 0", "bad-value"),
        ("resync_seconds = 86401", "bad-value"),
        ("resync_seconds = true", "wrong-type"),
        ("resync_seconds = 1.5", "wrong-type"),
        ("resync_seconds = '600'", "wrong-type"),
        ("node_ports = '30000-32767'", "wrong-type"),
        ("node_ports.addresses = '192.0.2.1'", "wrong-type"),
        ("node_ports.addresses = [5]", "bad-value"),
        ("node_ports.addresses = ['0.0.0.0']", "bad-value"),
        ("node_ports.addresses = ['ff02::1']", "bad-value"),
        ("node_ports.addresses = ['fe80::1%eth0']", "bad-value"),
        ("kubernetes = {kubeconfig = 'config'}", "bad-value"),
        ("kubernetes.kubelet_root = ''", "bad-value"),
        ("kubernetes.node_name = 5", "wrong-type"),
        ("kubernetes.services = 1", "wrong-type"),
        ("kubernetes.services = 'true'", "wrong-type"),
        ("[[kubernetes]]", "wrong-type"),
        ("policy.enforce = 'true'", "wrong-type"),
        ("policy.enforce = 'Auto'", "wrong-type"),
        ("policy.enforce = 1", "wrong-type"),
        ("policy = true", "wrong-type"),
        ("policy.enforced = true", "unknown-key"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(line: str, code: str) -> None:
    assert told(f"# first\n{line}") == [("2", code)]


def test_a_problem_says_where_what_and_how_to_mend_it() -> None:
    (line,) = problems("\nresync_seconds = 0\n")
    assert line == (
        "a.toml:2: resync_seconds: is out of bounds (it is 0). "
        "Write a number from 1 to 86400, without quotes. [bad-value]"
    )
    assert "is not a word known here (it is 'cluster')" in problems("source='cluster'")[0]


def test_every_problem_is_told_in_the_order_of_the_lines() -> None:
    text = """\
# listen = "nowhere"
backend = "ipfw" # listen = "here"
"listen" = "everywhere"
node_ports . range = "5-4"
[ kubernetes ] # a table
  kubelet_root = 5
[strange.tables]
"""
    assert told(text) == [
        ("2", "bad-value"),
        ("3", "bad-value"),
        ("4", "bad-value"),
        ("6", "wrong-type"),
        ("7", "unknown-key"),
    ]


def test_all_bad_addresses_are_named() -> None:
    (line,) = problems("node_ports.addresses = ['a', '192.0.2.1', 'b']")
    assert "'a', 'b'" in line


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("sorce = 'files'", "sorce: is not a known key here. Did you mean source?"),
        ("resync-seconds = 5", "Did you mean resync_seconds?"),
        ("[nodeports]", "nodeports: is not a known table here. Did you mean node_ports?"),
        ("[node_ports]\nadresses = []", "node_ports.adresses: is not a known key here. Did you"),
        ("range = '1-2'", "Write it below [node_ports]."),
        ("[node_ports]\nlisten = ''", "Write it above the first [table]"),
        ("zzz = 1", "the known ones are: source, manifests, backend"),
        ('"a\\nb" = 1', "is not a known key here"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(text: str, hint: str) -> None:
    (line,) = problems(text)
    assert hint in line
    assert line.endswith("[unknown-key]")
    assert line.startswith(f"a.toml:{text.count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nlisten = 127.0.0.1:9788\n", 2),
        ("backend = 'auto'\r\nbackend = 'auto'\r\n", 2),
        ("[node_ports]\naddresses = [\n  'a'\n\n", 3),
        ("\n\nlisten = '", 3),
        ("a = " + "[" * 100_000, 1),
        ("a = " + "9" * 5000, 1),
    ],
)
def test_what_is_not_toml_is_told_with_its_line(text: str, line: int) -> None:
    assert told(text) == [(str(line), "toml-syntax")]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_the_named_file_is_loaded(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.toml", EVERYTHING)) == read(EVERYTHING, "a.toml")
    assert load(write(tmp_path / "b.toml", b"\xef\xbb\xbflisten = ''\r\n")).listen is None


def test_without_a_name_the_default_file_counts_if_there_is_one(tmp_path: Path) -> None:
    default = tmp_path / "portranger.toml"
    assert load(None, str(default)) == Config()
    write(default, "resync_seconds = 7")
    assert load(None, str(default)).resync_seconds == 7


def test_a_default_file_that_cannot_be_read_is_not_the_same_as_none(tmp_path: Path) -> None:
    link = tmp_path / "portranger.toml"
    link.symlink_to("nowhere")
    for default in (link, tmp_path):
        with pytest.raises(BadConfiguration, match="cannot be read"):
            load(None, str(default))


@pytest.mark.parametrize("name", ["missing.toml", ".", "binary", "large", "a.toml/b.toml"])
def test_a_named_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.toml", "")
    write(tmp_path / "binary", b"\xff\xfe")
    write(tmp_path / "large", "#" * (MOST_BYTES + 1))
    path = os.path.join(tmp_path, name)  # noqa: PTH118 - pathlib would drop the dot
    with pytest.raises(BadConfiguration) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: cannot be read: ")
    assert str(caught.value).endswith("that this user may read. [unreadable]")
    assert caught.value.exit_code == 78


def test_a_problem_names_the_file_it_is_in_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a\nb.toml", "backend = 5")
    with pytest.raises(BadConfiguration, match=r"b\.toml:1: backend: ") as caught:
        load(path)
    assert str(caught.value).isprintable()
