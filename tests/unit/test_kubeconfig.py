"""What a kubeconfig, or several, or none, amounts to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.errors import BadConfiguration
from agent.sources.answers import Away
from agent.sources.api import Api
from agent.sources.credentials import Chain, Credentials, Endpoint, Material, Plain, endpoint
from agent.sources.kubeconfig import load
from tests.answering import Authority, answering, said
from tests.spaces import run

Json = Any
YAML = """
apiVersion: v1
kind: Config
current-context: one
clusters:
- {name: c1, cluster: {server: "https://one.example:6443"}}
- {name: c2, cluster: {server: "https://two.example/k8s/", proxy-url: "http://proxy"}}
users:
- {name: u1, user: {token: first}}
contexts:
- {name: one, context: {cluster: c1, user: u1}}
- {name: two, context: {cluster: c2, user: u1, namespace: work}}
- {name: nobody, context: {cluster: c2}}
- {name: lost, context: {cluster: c3, user: u1}}
- {name: stray, context: {cluster: c1, user: u2}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "config"
    made.write_text(YAML)
    return made


def test_the_current_context_counts_unless_another_is_named(file: Path) -> None:
    found = load(str(file), {})
    assert found.endpoint == Endpoint("https", "one.example", 6443)
    assert (found.authorization(), found.namespace) == ("Bearer first", "default")
    found = load(str(file), {}, context="two")
    assert str(found.endpoint) == "https://two.example:443/k8s"
    assert found.namespace == "work"
    [warning] = found.warnings
    assert "proxy-url" in warning
    assert load(str(file), {}, context="nobody").authorization() is None


def test_of_several_files_what_comes_first_counts(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(
        json.dumps(
            {
                "current-context": "two",
                "users": [{"name": "u1", "user": {"token": "second"}}],
                "contexts": [],
            }
        )
    )
    found = load("", {"KUBECONFIG": f"/nowhere:{other}:{file}:"})
    assert found.authorization() == "Bearer second"
    assert found.endpoint.host == "two.example"


def test_at_last_it_is_where_kubectl_looks(file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    file.rename(home / ".kube" / "config")
    assert load("", {"HOME": str(home)}).endpoint.host == "one.example"


@pytest.mark.parametrize(
    ("text", "context", "words"),
    [
        (None, "", "is not there"),
        ("", "", "no mapping"),
        ("[", "", "is no kubeconfig"),
        ("a: 1\na: 2", "", "is no kubeconfig"),
        ("{}", "", "no current-context"),
        (YAML, "three", "no context 'three'"),
        (YAML, "lost", "no cluster 'c3'"),
        (YAML, "stray", "no user 'u2'"),
        (YAML.replace("one.example:6443", "one.example:99999"), "", "not the address"),
        (YAML.replace("https://one", "ftp://one"), "", "not the address"),
        (YAML.replace("https://one", "https://me:secret@one"), "", "not the address"),
        (YAML.replace("token: first", "token: 17"), "", "token is not a text"),
        (YAML.replace("token: first", "auth-provider: {name: gcp}"), "", "auth-provider"),
        (YAML.replace("token: first", "username: me"), "", "username"),
        (YAML.replace("token: first", "client-key-data: '*'"), "", "not base64"),
        ("\N{SNOWMAN}".encode("utf-16"), "", "cannot be read"),
        (b" " * (2 << 20), "", "larger than"),
    ],
)
def test_what_cannot_be_used_is_told(
    file: Path, text: str | bytes | None, context: str, words: str
) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadConfiguration, match=words):
        load(str(file), {}, context=context)


IN_POD = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": "6443"}


def test_the_namespace_of_a_pod_need_not_be_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    assert load("", IN_POD, service_account=str(tmp_path)).namespace == "default"
    (tmp_path / "namespace").write_text("work\n")
    assert load("", IN_POD, service_account=str(tmp_path)).namespace == "work"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "Is a directory", id="a directory"),
        pytest.param(b"\xff", "can't decode", id="no text"),
        pytest.param(b" " * (2 << 20), "larger than", id="too much"),
    ],
)
def test_a_service_account_whose_namespace_cannot_be_read_is_told(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    (tmp_path / "token").write_text("first")
    path = tmp_path / "namespace"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(BadConfiguration, match=words) as raised:
        load("", IN_POD, service_account=str(tmp_path))
    assert str(raised.value).startswith(f"the service account in {tmp_path} cannot be read")
    assert raised.value.exit_code == 78


def test_without_any_the_ways_to_name_one_are_told() -> None:
    with pytest.raises(BadConfiguration, match="no API server is known") as raised:
        load("", {"KUBECONFIG": "/nowhere/a:/nowhere/b"})
    assert "/nowhere/a, /nowhere/b" in str(raised.value)
    assert "Set $KUBECONFIG, or name one" in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://192.0.2.1:6443", "https://192.0.2.1:6443"),
        ("https://[2001:db8::1]:6443/", "https://[2001:db8::1]:6443"),
        ("192.0.2.1:6443", "https://192.0.2.1:6443"),
        ("https://Api.Example", "https://api.example:443"),
        ("http://localhost", "http://localhost:80"),
    ],
)
def test_an_address_is_read(url: str, shown: str) -> None:
    assert str(endpoint(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "https://admin:s3cret@api.example:6443",
        "https://admin:s3cret@api.example:99999",
        "https://s3cret@api.example",
        "admin:s3cret@api.example",
        "ftp://admin:s3cret@api.example",
        "https://admin:x?s3cret@api.example",
        "https://api.example/?token=s3cret",
        "https://api.example/?token=a@s3cret",
        "https://api.example/#s3cret",
    ],
)
def test_what_may_be_a_secret_in_an_address_is_not_repeated(url: str) -> None:
    with pytest.raises(BadConfiguration, match="not the address") as raised:
        endpoint(url)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://api.example", True),
        ("http://127.0.0.1:8001", True),
        ("http://[::1]:8001", True),
        ("http://localhost:8001", True),
        ("http://192.0.2.1:8001", False),
        ("http://api.example", False),
    ],
)
def test_a_token_is_never_sent_where_others_can_read_it(url: str, sent: bool) -> None:
    found = Credentials(endpoint(url), Plain(Material(text="secret")))
    assert (found.authorization() == "Bearer secret") is sent
    assert bool(found.warnings) is not sent


# ------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def asked(url: str, authority: Authority, chain: Chain | None = None, name: str = "") -> None:
    credentials = Credentials(
        endpoint(url),
        Plain(Material(text="t0ken"), chain),
        authority=Material(path=authority.certificate),
        server_name=name,
    )
    api = Api(credentials)
    try:
        api.get("/x")
    finally:
        api.close()


def test_a_server_is_known_by_its_name(authority: Authority) -> None:
    with answering(authority.server("DNS:api.example")) as server:
        server.then(said({}))
        asked(server.url, authority, name="api.example")
        assert len(server.asked) == 1
        with pytest.raises(Away, match="CERTIFICATE_VERIFY_FAILED"):
            asked(server.url, authority)
        assert len(server.asked) == 1


def test_a_new_certificate_is_used_by_the_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    """The kubelet renews them in place."""
    file, key = tmp_path / "crt", tmp_path / "key"
    seen: list[Json] = []
    with answering(authority.server()) as server:

        def answer(handler: Json) -> None:
            seen.append(dict(part[0] for part in handler.connection.getpeercert()["subject"]))
            said({})(handler)

        server.then(answer)
        for name in ("one", "two"):
            made, its_key = authority.signed(name, f"/CN={name}")
            file.write_bytes(Path(made).read_bytes())
            key.write_bytes(Path(its_key).read_bytes())
            chain = Chain(Material(path=str(file)), Material(path=str(key)))
            asked(server.url, authority, chain)
    assert seen == [{"commonName": "one"}, {"commonName": "two"}]


def test_a_key_with_a_password_is_not_asked_for_at_the_terminal(
    authority: Authority, tmp_path: Path
) -> None:
    made, key = authority.signed("locked", "/CN=locked")
    locked = tmp_path / "locked"
    run("openssl", "pkey", "-in", key, "-out", locked, "-aes256", "-passout", "pass:secret")
    chain = Chain(Material(path=made), Material(path=str(locked)))
    with answering(authority.server()) as server:
        with pytest.raises(Exception, match="is encrypted"):
            asked(server.url, authority, chain)
        assert server.asked == []
