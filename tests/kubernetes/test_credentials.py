"""Who we are to a real API server, by every way that there is to say it."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.errors import Failure, TryAgain
from agent.sources.answers import Away, Denied
from agent.sources.api import Api, Listed
from agent.sources.credentials import Credentials, in_cluster
from agent.sources.kubeconfig import load
from tests.kubernetes.cluster import KUBEVIRT, LOOPBACK, VMIS, Cluster
from tests.kubernetes.instances import RIGHTS
from tests.spaces import run

Json = Any
PATH = f"{KUBEVIRT}/{VMIS}"


@pytest.fixture
def granted(cluster: Cluster) -> Cluster:
    cluster.grant("portranger", RIGHTS)
    return cluster


def listed(credentials: Credentials) -> Listed:
    with closing(Api(credentials)) as api:
        return api.listed(PATH, {})


def written(path: Path, cluster: Cluster, user: Json, **server: Json) -> str:
    """A kubeconfig in which some things are otherwise."""
    document = yaml.safe_load(cluster.kubeconfig("portranger").read_text())
    document["users"][0]["user"] = user
    document["clusters"][0]["cluster"] |= server
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize("certificate", [False, True])
def test_a_kubeconfig_lets_us_in(granted: Cluster, certificate: bool) -> None:
    file = granted.kubeconfig("portranger", certificate=certificate)
    assert listed(load(str(file), {})).version
    assert listed(load("", {"KUBECONFIG": f"/nowhere:{file}"})).version


def test_what_is_in_files_may_be_in_the_kubeconfig_itself(granted: Cluster, tmp_path: Path) -> None:
    files = yaml.safe_load(granted.kubeconfig("portranger", certificate=True).read_text())
    user = files["users"][0]["user"]
    data = {
        f"{key}-data": base64.b64encode(Path(path).read_bytes()).decode()
        for key, path in {**user, "certificate-authority": granted.ca}.items()
    }
    authority = data.pop("certificate-authority-data")
    file = written(
        tmp_path / "config",
        granted,
        data,
        **{"certificate-authority": "/nowhere", "certificate-authority-data": authority},
    )
    before = os.listdir(tmp_path)  # noqa: PTH208 - names
    assert listed(load(file, {})).version
    assert os.listdir(tmp_path) == before  # noqa: PTH208 - no key was written down


def test_paths_are_those_of_the_file_they_stand_in(granted: Cluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(granted.tokens["portranger"])
    (tmp_path / "ca").write_bytes(granted.ca.read_bytes())
    file = written(
        tmp_path / "config",
        granted,
        {"tokenFile": "token", "token": "of no use"},
        **{"certificate-authority": "ca"},
    )
    assert listed(load(file, {})).version


def test_a_pod_is_let_in(granted: Cluster, tmp_path: Path) -> None:
    port = granted.server.rpartition(":")[2]
    environ = {"KUBERNETES_SERVICE_HOST": LOOPBACK, "KUBERNETES_SERVICE_PORT": port}
    assert in_cluster(environ, str(tmp_path)) is None
    (tmp_path / "token").write_text(granted.issue_token("portranger", "portranger"))
    (tmp_path / "ca.crt").write_bytes(granted.ca.read_bytes())
    (tmp_path / "namespace").write_text("portranger")
    found = load("", {**environ, "KUBECONFIG": "/nowhere"}, service_account=str(tmp_path))
    assert listed(found).version
    assert found.namespace == "portranger"
    assert found.warnings == ()


def test_a_server_that_we_do_not_know_is_not_told_who_we_are(
    granted: Cluster, tmp_path: Path
) -> None:
    run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-subj", "/CN=other", "-keyout", tmp_path / "key", "-out", tmp_path / "other",
    )  # fmt: skip
    token = {"token": granted.tokens["portranger"]}
    other = {"certificate-authority": str(tmp_path / "other")}
    file = written(tmp_path / "config", granted, token, **other)
    with pytest.raises(Away, match="CERTIFICATE_VERIFY_FAILED"):
        listed(load(file, {}))
    (tmp_path / "other").write_text("")
    with pytest.raises(Away, match="authority of the API server is empty"):
        listed(load(file, {}))
    named = written(tmp_path / "config", granted, token, **{"tls-server-name": "other.example"})
    with pytest.raises(Away, match="CERTIFICATE_VERIFY_FAILED"):
        listed(load(named, {}))
    named = written(tmp_path / "config", granted, token, **{"tls-server-name": "kubernetes"})
    assert listed(load(named, {})).version


def test_to_trust_anybody_is_possible_and_warned_of(granted: Cluster, tmp_path: Path) -> None:
    token = {"token": granted.tokens["portranger"]}
    off = {"insecure-skip-tls-verify": True, "certificate-authority": None}
    found = load(written(tmp_path / "config", granted, token, **off), {})
    assert listed(found).version
    [warning] = found.warnings
    assert "is not verified" in warning


def test_who_may_not_is_told_which_right_is_missing(granted: Cluster) -> None:
    with pytest.raises(Denied, match='User "nobody" cannot list') as raised:
        listed(load(str(granted.kubeconfig("nobody")), {}))
    assert raised.value.verb == "list"


# ------------------------------------------------------------------------------------- plugins


PLUGIN = """#!{python}
import json, os, pathlib, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
log = pathlib.Path(sys.argv[1])
with log.open("a") as file:
    file.write(json.dumps([info, os.environ["WHO"]]) + "\\n")
status = json.loads(log.with_name("status").read_text())
print(json.dumps({{"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}}))
"""


class Plugged:
    """A kubeconfig with a plugin that says what a file says."""

    def __init__(self, cluster: Cluster, folder: Path, **more: Json) -> None:
        self.folder, self.log = folder, folder / "log"
        script = folder / "plugin"
        script.write_text(PLUGIN.format(python=sys.executable))
        script.chmod(stat.S_IRWXU)
        entry = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./plugin",
            "args": [str(self.log)],
            "env": [{"name": "WHO", "value": "me"}],
            "interactiveMode": "Never",
            **more,
        }
        self.credentials = load(written(folder / "config", cluster, {"exec": entry}), {})

    def says(self, **status: str) -> None:
        (self.folder / "status").write_text(json.dumps(status))

    @property
    def asked(self) -> list[Json]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def test_a_plugin_says_who_we_are_until_that_is_refused(granted: Cluster, tmp_path: Path) -> None:
    plugged = Plugged(granted, tmp_path)
    token = granted.tokens["portranger"]
    plugged.says(token=token)
    for _ in range(2):
        assert listed(plugged.credentials).version
    [[info, who]] = plugged.asked
    assert info["spec"] == {"interactive": False}
    assert who == "me"
    plugged.says(token=token[::-1])
    plugged.credentials.refused()
    with pytest.raises(Denied):
        listed(plugged.credentials)
    plugged.says(token=token)
    assert listed(plugged.credentials).version  # without being told that it is to ask again


def test_what_a_plugin_says_expires(granted: Cluster, tmp_path: Path) -> None:
    plugged = Plugged(granted, tmp_path, provideClusterInfo=True)
    token = granted.tokens["portranger"]
    for expiry, times in (("2020-01-01T00:00:00Z", 2), ("2099-01-01T00:00:00Z", 1)):
        plugged.log.write_text("")
        plugged.says(token=token, expirationTimestamp=expiry)
        for _ in range(2):
            plugged.credentials.authorization()
        assert len(plugged.asked) == times
    cluster = plugged.asked[0][0]["spec"]["cluster"]
    assert cluster["server"] == granted.server
    assert base64.b64decode(cluster["certificate-authority-data"]) == granted.ca.read_bytes()


def test_a_plugin_may_give_a_certificate(granted: Cluster, tmp_path: Path) -> None:
    files = yaml.safe_load(granted.kubeconfig("portranger", certificate=True).read_text())
    user = files["users"][0]["user"]
    plugged = Plugged(granted, tmp_path)
    plugged.says(
        clientCertificateData=Path(user["client-certificate"]).read_text(),
        clientKeyData=Path(user["client-key"]).read_text(),
    )
    assert listed(plugged.credentials).version


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"command": "/nowhere/plugin"}, "No such file"),
        ({"command": "false"}, "exit code is 1"),
        ({"command": "echo", "args": ["no json"]}, "is no JSON"),
        ({"command": "echo", "args": ["{}"]}, "gave no ExecCredential"),
        ({"command": "false", "installHint": "apt install it"}, "apt install it"),
    ],
)
def test_a_plugin_that_fails_says_why(
    granted: Cluster, tmp_path: Path, more: Json, words: str
) -> None:
    with pytest.raises(TryAgain, match=words):
        listed(Plugged(granted, tmp_path, **more).credentials)


def test_what_a_plugin_says_is_for_who_runs_it_and_not_for_who_reads_our_status(
    granted: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-c", "echo log in first >&2; exit 1", "--token=secret"]
    with pytest.raises(TryAgain) as failure:
        listed(Plugged(granted, tmp_path, command="sh", args=words).credentials)
    assert "log in first" in capfd.readouterr().err
    assert "log in" not in str(failure.value)
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, "not known"),
        ({"command": ""}, "has no command"),
        ({"interactiveMode": "Always"}, "talk to a person"),
    ],
)
def test_a_plugin_that_cannot_be_run_is_bad_configuration(
    granted: Cluster, tmp_path: Path, more: Json, words: str
) -> None:
    with pytest.raises(Failure, match=words) as raised:
        Plugged(granted, tmp_path, **more)
    assert raised.value.exit_code == 78
