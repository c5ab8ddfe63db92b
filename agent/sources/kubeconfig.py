"""A kubeconfig becomes credentials: several files are merged as kubectl merges them, and a plugin
that makes tokens is run as kubectl runs it. Whoever writes a kubeconfig decides what we run, as it
is with kubectl: it is the user's own, or root's.
"""

import base64
import binascii
import json
import os
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from agent.errors import BadConfiguration, TryAgain
from agent.sources import json_text
from agent.sources.credentials import (
    SERVICE_ACCOUNT,
    Chain,
    Credentials,
    Endpoint,
    Material,
    Plain,
    User,
    checked,
    content,
    endpoint,
    in_cluster,
)
from rules.problems import printable, shown
from rules.values import Value

AUTHENTICATION = "client.authentication.k8s.io/"
VERSIONS = (AUTHENTICATION + "v1", AUTHENTICATION + "v1beta1")
PLUGIN_PATIENCE = 60.0  # seconds
MOST_ANSWERED = 1 << 20
EARLY = 10.0  # seconds before a token expires, another is asked for

Fields = Mapping[str, object]


def load(
    kubeconfig: str,
    environ: Mapping[str, str],
    *,
    context: str = "",
    service_account: str = SERVICE_ACCOUNT,
) -> Credentials:
    """From that file; where none is named from the pod we are in, from $KUBECONFIG, or from where
    kubectl looks at last."""
    if not kubeconfig and not context:
        found = in_cluster(environ, service_account)
        if found is not None:
            return found
    named = kubeconfig or environ.get("KUBECONFIG", "")
    paths = [path for path in named.split(":") if path] if not kubeconfig else [kubeconfig]
    home = environ.get("HOME", "")
    if not paths and home:
        paths = [f"{home}/.kube/config"]
    merged = _Merged(paths, must=bool(kubeconfig))
    if not merged.files:
        raise _bad(
            "no API server is known: this is no pod with a service account, and there is no"
            f" kubeconfig{' at ' + ', '.join(paths) if paths else ''}",
            "Set $KUBECONFIG, or name one: with --kubeconfig, or for an agent below [kubernetes]",
        )
    return merged.credentials(context or merged.current())


class _Entry(Value):
    """A cluster, user or context, and the folder that its paths start from."""

    fields: Fields
    folder: str

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise _bad(f"{key} is not a text in the kubeconfig", "Put it in quotes")
        return value

    def path(self, key: str) -> str:
        path = self.text(key)
        return str(Path(self.folder, path)) if path else ""

    def material(self, key: str) -> Material | None:
        """A file, or the text itself in base64, which counts more."""
        data = self.text(f"{key}-data")
        if data:
            return Material(text=_decoded(data, f"{key}-data"))
        path = self.path(key)
        return Material(path=path) if path else None


class _Merged:
    """Several kubeconfigs as one: whatever comes first in them counts."""

    def __init__(self, paths: list[str], *, must: bool) -> None:
        self.files: list[tuple[str, Fields]] = []
        for path in paths:
            try:
                text = content(path)
            except FileNotFoundError:
                if must:
                    raise _bad(f"{path} is not there", "Name a kubeconfig that is") from None
                continue
            except (OSError, ValueError) as error:
                raise _bad(f"{path} cannot be read: {error}", "Name a kubeconfig") from error
            self.files.append((str(Path(path).absolute().parent), _parsed(text, path)))

    def current(self) -> str:
        for _, fields in self.files:
            name = fields.get("current-context")
            if isinstance(name, str) and name:
                return name
        raise _bad("the kubeconfig has no current-context", "kubectl config use-context sets one")

    def credentials(self, name: str) -> Credentials:
        context = self._entry("context", name)
        cluster = self._entry("cluster", context.text("cluster"))
        who = context.text("user")
        user = self._entry("user", who) if who else _Entry({}, "")
        server = endpoint(cluster.text("server"))
        warnings = []
        if cluster.text("proxy-url"):
            warnings.append("proxy-url of the kubeconfig is not used: we ask the server itself")
        authority = cluster.material("certificate-authority")
        return Credentials(
            server,
            _user(user, server, authority),
            authority=authority,
            server_name=cluster.text("tls-server-name"),
            unverified=cluster.fields.get("insecure-skip-tls-verify") is True,
            warnings=tuple(warnings),
            namespace=context.text("namespace") or "default",
        )

    def _entry(self, kind: str, name: str) -> _Entry:
        for folder, fields in self.files:
            entries = fields.get(f"{kind}s")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and entry.get("name") == name:
                    inner = entry.get(kind)
                    return _Entry(inner if isinstance(inner, dict) else {}, folder)
        fix = "kubectl config view shows those that there are"
        raise _bad(f"the kubeconfig has no {kind} {shown(name)}", fix)


def _parsed(text: str, path: str) -> Fields:
    parsed = json_text.parse(text)
    if parsed is None:
        from agent.sources import yaml_text

        parsed = yaml_text.parse(text)
    documents, problems = parsed
    document = documents[0][0] if documents else None
    if problems or not isinstance(document, dict):
        what = str(problems[0]) if problems else "it is no mapping"
        raise _bad(f"{printable(path, 400)} is no kubeconfig: {what}", "Name another one")
    return document


def _user(entry: _Entry, server: Endpoint, authority: Material | None) -> User:
    plugin = entry.fields.get("exec")
    if isinstance(plugin, dict):
        return Plugin(plugin, entry.folder, server, authority)
    for given_up in ("auth-provider", "username"):
        if entry.fields.get(given_up):
            raise _bad(
                f"the kubeconfig's user has {given_up}, which Kubernetes has given up",
                "Use a token, a client certificate or an exec plugin",
            )
    path, token = entry.path("tokenFile"), entry.text("token")
    certificate, key = entry.material("client-certificate"), entry.material("client-key")
    return Plain(
        Material(path=path) if path else Material(text=token) if token else None,
        Chain(certificate, key) if certificate and key else None,
    )


class Plugin:
    """A command that says who we are (ExecCredential); what it said is used until it expires, or
    the server refuses it."""

    def __init__(
        self, entry: Fields, folder: str, server: Endpoint, authority: Material | None
    ) -> None:
        said = _Entry(entry, folder)
        self._command, self._version = said.text("command"), said.text("apiVersion")
        self._hint = said.text("installHint")
        if "/" in self._command:
            self._command = said.path("command")
        arguments = entry.get("args")
        self._arguments = [str(one) for one in arguments] if isinstance(arguments, list) else []
        self._environment = _environment(entry.get("env"))
        self._cluster = (server, authority) if entry.get("provideClusterInfo") is True else None
        self._said: Fields = {}
        self._until = 0.0
        self._turn = Lock()
        if not self._command or self._version not in VERSIONS:
            raise _bad(
                "the kubeconfig's exec plugin has no command, or an apiVersion that is not known",
                f"Write one of {', '.join(VERSIONS)}",
            )
        if entry.get("interactiveMode") == "Always":
            raise _bad(
                f"the kubeconfig's exec plugin {self._command} wants to talk to a person",
                "Use one with interactiveMode: Never",
            )

    def token(self) -> str | None:
        token = self._current().get("token")
        return checked(token) if isinstance(token, str) else None

    def chain(self) -> Chain | None:
        said = self._current()
        certificate, key = said.get("clientCertificateData"), said.get("clientKeyData")
        if not isinstance(certificate, str) or not isinstance(key, str):
            return None
        return Chain(Material(text=certificate), Material(text=key))

    def refused(self) -> None:
        with self._turn:
            self._until = 0.0

    def _current(self) -> Fields:
        with self._turn:
            if time.time() >= self._until:
                self._said = self._asked()
                self._until = _expiry(self._said)
            return self._said

    def _asked(self) -> Fields:
        try:
            done = subprocess.run(  # noqa: S603 - what the user's own kubeconfig names
                [self._command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what it says besides is for the terminal, or the journal
                timeout=PLUGIN_PATIENCE,
                check=True,
                env={**os.environ, **self._environment, "KUBERNETES_EXEC_INFO": self._info()},
            )
            answer = json.loads(done.stdout) if len(done.stdout) <= MOST_ANSWERED else None
        except (OSError, ValueError, RecursionError, subprocess.SubprocessError) as error:
            # Whoever may read our status need not see what it was told.
            raise TryAgain(
                f"the kubeconfig's exec plugin {self._command} failed: {_reason(error)}",
                printable(self._hint, 400) or "Run it by hand to see why",
            ) from error
        said = answer if isinstance(answer, dict) else {}
        status = said.get("status")
        if not isinstance(status, dict) or said.get("apiVersion") != self._version:
            raise TryAgain(
                f"the kubeconfig's exec plugin {self._command} gave no ExecCredential",
                f"Let it answer with apiVersion {self._version}",
            )
        return status

    def _info(self) -> str:
        spec: dict[str, object] = {"interactive": False}
        if self._cluster is not None:
            server, authority = self._cluster
            spec["cluster"] = {"server": str(server)}
            if authority is not None:
                data = base64.b64encode(authority.read().encode()).decode()
                spec["cluster"] = {"server": str(server), "certificate-authority-data": data}
        return json.dumps({"apiVersion": self._version, "kind": "ExecCredential", "spec": spec})


def _environment(pairs: object) -> dict[str, str]:
    return {
        str(one["name"]): str(one["value"])
        for one in (pairs if isinstance(pairs, list) else ())
        if isinstance(one, dict) and "name" in one and "value" in one
    }


def _expiry(said: Fields) -> float:
    """Until when it can be used; where nothing is said of it, until it is refused."""
    text = said.get("expirationTimestamp")
    if not isinstance(text, str):
        return float("inf")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - EARLY


def _decoded(text: str, key: str) -> str:
    try:
        return base64.b64decode("".join(text.split()), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise _bad(f"{key} of the kubeconfig is not base64", "Write it as kubectl does") from error


def _bad(what: str, fix: str) -> BadConfiguration:
    return BadConfiguration(f"{what}. {fix}.")


def _reason(error: Exception) -> str:
    match error:
        case subprocess.CalledProcessError():
            return f"its exit code is {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"it took more than {PLUGIN_PATIENCE:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return "its answer is no JSON"
