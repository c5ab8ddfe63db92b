"""Passive FTP through the node, with a real server in the guest and a real client outside: control
and data are two ports of one Service, the second out of 16,384 and known to the server alone."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rules.model import Family
from tests.datapath.publishing import AT, publishing
from tests.nodes import NODE4, NODE6, Net, net, service_manifest, socket_in
from tests.spaces import eventually, ip, process, run

PASSIVE = (49152, 65535)
RANGES = "21,49152-65535"
ENDS = "passive: 65535"
EXTERNAL = service_manifest(
    ["name: control, port: 21", "name: passive, port: 49152"],
    kind="ClusterIP",
    ends=ENDS,
    more=f"externalIPs: [{NODE4}, '{NODE6}']\nsessionAffinity: ClientIP",
)
NODE_PORTS = service_manifest(
    ["name: control, port: 21, nodePort: 20021", "name: passive, port: 49152, nodePort: 49152"],
    ends=ENDS,
    more="sessionAffinity: ClientIP",
)
MANY = {"node_ports.range": "20000-65535"}
BY_ADDRESS = ("--disable-epsv", "--no-ftp-skip-pasv-ip")  # where the server says, to the letter
CONTENT = os.urandom(3 << 20)

# Debian's python3-pyftpdlib, so by Debian's Python. It tells the node's address, not its own.
SERVER = """
import sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
folder, address, first, last = sys.argv[1:]
FTPHandler.authorizer = DummyAuthorizer()
FTPHandler.authorizer.add_user("user", "secret", folder, perm="elradfmw")
FTPHandler.masquerade_address = address
FTPHandler.passive_ports = range(int(first), int(last) + 1)
FTPServer(("::", 21), FTPHandler).serve_forever()
"""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Both ends."""
    if not shutil.which("curl"):
        pytest.skip("needs curl (Debian: curl)")
    if run("/usr/bin/python3", "-c", "import pyftpdlib", code=None).returncode:
        pytest.skip("needs a server of FTP (Debian: python3-pyftpdlib)")


@contextmanager
def server(guest: str, folder: Path, passive: tuple[int, int] = PASSIVE) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    words = (str(folder), NODE4, *map(str, passive))
    with process("/usr/bin/python3", "-c", SERVER, *words, netns=guest):
        assert eventually(lambda: greets(guest))
        yield


def greets(guest: str) -> bool:
    with socket_in(guest, "127.0.0.1", socket.SOCK_STREAM) as client:
        try:
            client.connect(("127.0.0.1", 21))
            return client.recv(100).startswith(b"220 ")
        except OSError:
            return False


def curl(lab: Net, to: str, port: int, name: str, *words: str) -> list[str]:
    """What the server says of where the data goes."""
    host = f"[{to}]" if ":" in to else to
    done = run(
        *("ip", "netns", "exec", lab.client, "curl", "-sSvg", "--noproxy", "*", "--max-time", "20"),
        *("--user", "user:secret", *words, f"ftp://{host}:{port}/{name}"),
    )
    return re.findall(r"(?m)^< (22[79] .*)\r?$", done.stderr)


def transferred(lab: Net, to: str, port: int, folder: Path, *words: str) -> list[str]:
    """Sends a file there and back again; what the server said of where the data goes."""
    source, back = folder / "source", folder / "back"
    source.write_bytes(CONTENT)
    said = curl(lab, to, port, "file", "-T", str(source), *words)
    said += curl(lab, to, port, "file", "-o", str(back), *words)
    assert back.read_bytes() == CONTENT
    back.unlink()
    assert len(said) == 2
    return said


def port_in(said: str) -> int:
    """`227 Entering passive mode (198,51,100,2,193,7).` or `229 … (|||49415|).`"""
    numbers = [int(number) for number in re.findall(r"\d+", said)[1:]]
    return numbers[-2] * 256 + numbers[-1] if said.startswith("227") else numbers[-1]


PLACES = {"external address": (EXTERNAL, 21), "node ports": (NODE_PORTS, 20021)}


@pytest.mark.parametrize("place", PLACES)
def test_files_go_up_and_down_in_passive_mode(tmp_path: Path, place: str) -> None:
    service, control = PLACES[place]
    with net(1) as lab, publishing(tmp_path / "node", lab, service, RANGES, **MANY):
        folder = tmp_path / "files"
        for passive in (PASSIVE, PASSIVE[:1] * 2, PASSIVE[1:] * 2):
            with server(lab.vms[0].guest, folder, passive):
                old = transferred(lab, NODE4, control, tmp_path, *BY_ADDRESS)
                assert all("(198,51,100,2," in one for one in old)
                said = old + transferred(lab, NODE4, control, tmp_path)
                said += transferred(lab, NODE6, control, tmp_path)
            assert (folder / "file").read_bytes() == CONTENT
            assert all(passive[0] <= port_in(one) <= passive[1] for one in said), said


def test_control_and_data_of_a_client_are_at_one_of_two_machines(tmp_path: Path) -> None:
    clients = {
        Family.IP: [f"198.51.100.{number}" for number in range(20, 26)],
        Family.IP6: [f"2001:db8:5::{number}" for number in range(20, 26)],
    }
    folders = [tmp_path / "one", tmp_path / "two"]
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    with net(2) as lab, publishing(tmp_path / "node", lab, EXTERNAL, RANGES):
        for family, rest in ((Family.IP, "/24 dev eth0"), (Family.IP6, "/64 dev eth0 nodad")):
            ip(lab.client, *(f"addr add {one}{rest}" for one in clients[family]))
        with server(lab.vms[0].guest, folders[0]), server(lab.vms[1].guest, folders[1]):
            for family in Family:
                for client in clients[family]:
                    name = client.replace(":", "_")
                    curl(lab, AT[family], 21, name, "--interface", client, "-T", str(source))
    files = [{path.name for path in folder.iterdir()} for folder in folders]
    for family in Family:
        names = {client.replace(":", "_") for client in clients[family]}
        assert all(names & there for there in files)
        assert names <= files[0] ^ files[1]
    assert {path.read_bytes() for folder in folders for path in folder.iterdir()} == {CONTENT}
