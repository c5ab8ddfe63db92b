"""Who we are to an API server, and how we know that it is the one: from the files that the kubelet
puts into a pod, or from a kubeconfig (`agent.sources.kubeconfig`).

Tokens and certificates are replaced while we run. So nothing is kept: a file is read for each
request, or for each connection, that needs it, and there are few of both.
"""

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from agent.errors import BadConfiguration, TryAgain
from rules.problems import printable, shown
from rules.values import Value

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
MOST_BYTES = 1 << 20  # of a token, a certificate or a kubeconfig


class Endpoint(Value):
    """Where an API server answers."""

    scheme: str
    host: str
    port: int
    path: str = ""  # before that of every request, where a proxy serves several clusters

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def origin(self) -> str:
        """As a WebSocket's handshake names where it comes from: the server itself."""
        return str(self).removesuffix(self.path)

    @property
    def keeps_secrets(self) -> bool:
        """Whether nobody on the way can read what is sent there."""
        return self.scheme == "https" or is_loopback(self.host)


class Material(Value):
    """A key, a certificate or several: the file that holds it, or the text itself."""

    path: str = ""
    text: str = ""

    def read(self) -> str:
        """What it is now."""
        return content(self.path) if self.path else self.text


class Chain(Value):
    """A client's certificate and its key."""

    certificate: Material
    key: Material


class User(Protocol):
    """How a client proves who it is."""

    def token(self) -> str | None: ...
    def chain(self) -> Chain | None: ...
    def refused(self) -> None:
        """The server did not know us: what was cached is to be asked for anew."""


class Plain:
    """A user whose token and certificate are written somewhere."""

    def __init__(self, token: Material | None = None, chain: Chain | None = None) -> None:
        self._token, self._chain = token, chain

    def token(self) -> str | None:
        return None if self._token is None else checked(self._token.read().strip())

    def chain(self) -> Chain | None:
        return self._chain

    def refused(self) -> None:
        """Nothing is cached."""


class Credentials:
    """All that a connection and a request need; it may be used from several threads."""

    def __init__(  # noqa: PLR0913 - as much as a kubeconfig says of a cluster
        self,
        endpoint: Endpoint,
        user: User,
        *,
        authority: Material | None = None,
        server_name: str = "",
        unverified: bool = False,
        warnings: tuple[str, ...] = (),
        namespace: str = "default",
    ) -> None:
        self.endpoint, self.namespace = endpoint, namespace
        self.server_name = server_name or endpoint.host
        self._user, self._authority, self._unverified = user, authority, unverified
        told = list(warnings)
        if unverified and endpoint.scheme == "https":
            told.append(
                f"whether {endpoint} is the API server is not verified, as the kubeconfig says"
            )
        if not endpoint.keeps_secrets:
            told.append(f"{endpoint} is not encrypted: no token is sent there")
        self.warnings = tuple(told)

    def authorization(self) -> str | None:
        """What goes into the header of that name, if anything does."""
        token = self._user.token() if self.endpoint.keeps_secrets else None
        return None if token is None else f"Bearer {token}"

    def refused(self) -> None:
        """The server did not know us."""
        self._user.refused()

    def tls(self) -> ssl.SSLContext | None:
        """How to encrypt a new connection; None: not at all."""
        if self.endpoint.scheme != "https":
            return None
        authority = None if self._authority is None else self._authority.read()
        if authority is not None and not authority.strip():  # which would be: trust everybody's
            raise ValueError("the certificate authority of the API server is empty")
        context = ssl.create_default_context(cadata=authority)
        # Since Python 3.13 it wants extensions that the certificates of many clusters do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self._unverified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        chain = self._user.chain()
        if chain is not None:
            with _files(chain) as names:
                context.load_cert_chain(*names, password=_no_password)
        return context


def in_cluster(environ: Mapping[str, str], folder: str = SERVICE_ACCOUNT) -> Credentials | None:
    """Those that the kubelet gives to a pod; None where we are in none."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return None
    namespace = _namespace(folder)
    if namespace is None:
        return None
    bracketed = f"[{host}]" if ":" in host else host
    return Credentials(
        endpoint(f"https://{bracketed}:{port}"),
        Plain(Material(path=f"{folder}/token")),
        authority=Material(path=f"{folder}/ca.crt"),
        namespace=namespace,
    )


def _namespace(folder: str) -> str | None:
    """That of the pod; None where it has no service account."""
    path = Path(folder, "namespace")
    try:
        if not Path(folder, "token").exists():
            return None
        return content(str(path)).strip() if path.exists() else "default"
    except (OSError, ValueError) as error:
        raise BadConfiguration(
            f"the service account in {folder} cannot be read: {error}. Look at how it is mounted."
        ) from error


def endpoint(url: str) -> Endpoint:
    """What a kubeconfig calls a server."""
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        port = parts.port or (80 if parts.scheme == "http" else 443)
        host = parts.hostname or ""
    except ValueError:
        host = ""
        port, parts = 0, urlsplit("")
    odd = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not host or odd:
        # Whoever puts a password or a token there must not find it in the log.
        secret = any(mark in url for mark in "@?#")
        what = "What has a user, a password, a query or a fragment" if secret else shown(url)
        raise BadConfiguration(
            f"{what} is not the address of an API server. Write one such as https://192.0.2.1:6443."
        )
    return Endpoint(parts.scheme, host, port, parts.path.rstrip("/"))


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def content(path: str) -> str:
    """The text of a small file, never waiting for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        read = file.read(MOST_BYTES + 1) or b""
    if len(read) > MOST_BYTES:
        raise ValueError(f"{printable(path, 200)} is larger than {MOST_BYTES >> 20} MiB")
    return read.decode()


def checked(token: str) -> str:
    """A token that can stand in a header."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token for the API server is empty, or is none")
    return token


@contextmanager
def _files(chain: Chain) -> Iterator[tuple[str, str]]:
    """The names under which OpenSSL, which reads files only, finds a certificate and its key. What
    is no file is one in memory meanwhile: a key is not written down."""
    with ExitStack() as stack:
        names: list[str] = []
        for material in (chain.certificate, chain.key):
            if material.path:
                names.append(material.path)
                continue
            descriptor = os.memfd_create("portranger", os.MFD_CLOEXEC)
            file = stack.enter_context(os.fdopen(descriptor, "wb", buffering=0))
            file.write(material.text.encode())
            names.append(f"/proc/self/fd/{descriptor}")
        yield names[0], names[1]


def _no_password() -> str:
    """Asked for by OpenSSL; without this it would ask at the terminal."""
    raise TryAgain(
        "the client's key for the API server is encrypted", "Name a key without a password"
    )
