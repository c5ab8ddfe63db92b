"""A Kubernetes API for tests: a real kube-apiserver and its etcd, on loopback.

There is nothing else of Kubernetes: no pod runs, no account `default` is made, and nothing removes
what is in a namespace that goes. What a test needs of that, it does itself.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import random
import re
import secrets
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from agent.kernel.netns import inside, opened
from rules.values import Value
from tests.kubernetes import assets
from tests.spaces import eventually, run, unused_name

Json = Any

LOOPBACK = "127.0.0.1"
PATIENCE = 120  # seconds until a program is up; it takes a few
PORTS = range(20000, 30000)  # the kernel gives none of them to whoever connects to somewhere
SPARING = {"GOGC": "40"}  # 220 MiB instead of 260, and no slower to start
CRD = Path(__file__).with_name("crd.yaml")
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RBAC_GROUP = "rbac.authorization.k8s.io"
RBAC = f"/apis/{RBAC_GROUP}/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
KUBEVIRT = "/apis/kubevirt.io/v1"
VMIS = "virtualmachineinstances"
VMS = "virtualmachines"
KINDS = (f"{KUBEVIRT}/{VMIS}", f"{KUBEVIRT}/{VMS}")
CONTENTS = (
    *(f"{KUBEVIRT}/namespaces/{{}}/{kind}" for kind in (VMIS, VMS)),
    *(f"/api/v1/namespaces/{{}}/{kind}" for kind in ("pods", "events", "services")),
    "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
)
TYPES = {"PATCH": "application/merge-patch+json", "APPLY": "application/apply-patch+yaml"}


class User(Value):
    """Who the API server takes somebody for."""

    name: str
    groups: tuple[str, ...] = ()


def account(namespace: str, name: str) -> User:
    """The user that a ServiceAccount is."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return User(f"system:serviceaccount:{namespace}:{name}", groups)


@functools.cache
def why_not() -> str | None:
    """The reason why there can be no cluster here, or None if there can."""
    if not shutil.which("openssl"):
        return "needs the command openssl (Debian: openssl)"
    try:
        assets.find()
    except assets.Unavailable as problem:
        return str(problem)
    return None


@contextmanager
def running() -> Iterator[Cluster]:
    """A cluster of its own, that knows KubeVirt's kinds, and goes with the block.

    Its programs die with the thread that starts them, which is what the kernel takes for their
    parent: a test that restarts one does that in the thread it runs in itself.
    """
    with TemporaryDirectory(prefix="portranger-") as folder:
        made = Cluster(assets.find(), Path(folder))
        try:
            made.start_etcd()
            made.start_apiserver()
            made.define()
            yield made
        finally:
            made.stop()


class Cluster:
    """An API server that a test may ask, kill and start again.

    Users are `admin`, who may do everything, `portranger`, who is the ServiceAccount of that name
    in the namespace of that name, and `nobody`; these two may do what they are granted.
    """

    def __init__(self, programs: assets.Assets, folder: Path) -> None:
        self.programs = programs
        self.folder = folder
        self.ca = folder / "certificates" / "apiserver.crt"  # which holds its issuer, too
        self.users = {
            "admin": User("admin", ("system:masters",)),
            "portranger": account("portranger", "portranger"),
            "nobody": User("nobody"),
        }
        self.tokens = {user: secrets.token_hex() for user in self.users}
        self._port, self._etcd_port = free_ports(2)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._apiserver: subprocess.Popen[bytes] | None = None
        self._write_tokens()
        self._certify("clients", "/CN=clients")

    @property
    def server(self) -> str:
        return f"https://{LOOPBACK}:{self._port}"

    @property
    def token(self) -> str:
        return self.tokens["admin"]

    # ----------------------------------------------------------------------------- processes

    def start_etcd(self) -> None:
        address = f"http://{LOOPBACK}:{self._etcd_port}"
        self._etcd = self._start(
            self.programs.etcd,
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={address}",
            f"--advertise-client-urls={address}",
            f"--listen-peer-urls=http://{LOOPBACK}:0",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self._wait(self._etcd, lambda: self._ask_etcd("maintenance/status") is not None)

    def start_apiserver(self) -> None:
        """Start it where it was before, unless it runs, and wait until it is ready."""
        if self._apiserver is None:
            key = self.ca.with_suffix(".key")
            self._apiserver = self._start(
                self.programs.apiserver,
                f"--etcd-servers=http://{LOOPBACK}:{self._etcd_port}",
                f"--bind-address={LOOPBACK}",
                f"--secure-port={self._port}",
                f"--cert-dir={self.ca.parent}",
                f"--client-ca-file={self.folder / 'clients.crt'}",
                f"--token-auth-file={self.folder / 'tokens.csv'}",
                # It makes this key itself, before it reads it here.
                f"--service-account-signing-key-file={key}",
                f"--service-account-key-file={key}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--authorization-mode=RBAC",
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
                "--profiling=false",
            )
        self._wait(self._apiserver, self.is_ready)

    def kill_apiserver(self) -> None:
        """End it as a crash does; what it knows is in etcd."""
        if self._apiserver is not None:
            end(self._apiserver)
            self._apiserver = None

    def signal_apiserver(self, number: signal.Signals) -> None:
        """Stop it, so that its kernel goes on to accept connections, or let it go on."""
        if self._apiserver is not None:
            self._apiserver.send_signal(number)

    def stop(self) -> None:
        self.kill_apiserver()
        if self._etcd is not None:
            end(self._etcd)

    def is_ready(self) -> bool:
        """Whether it would answer; having said that it is ready, it still refuses a moment (429)
        to list or watch kinds that were defined."""
        try:
            told = {self.request("GET", path)[0] for path in ("/readyz", *KINDS)}
        except (OSError, http.client.HTTPException):
            return False
        return told <= {200, 404}

    def compact(self) -> None:
        """From now on, to watch from any resourceVersion that was told before is answered with 410.

        To make etcd forget is not enough: an API server remembers what has changed since it was
        started, for minutes. So that is ended first, and begins with a version that is new."""
        self.kill_apiserver()
        key = base64.b64encode(b"portranger-tests").decode()
        told = self._ask_etcd("kv/put", key=key, value=key)
        self._ask_etcd("kv/compaction", revision=told["header"]["revision"], physical=True)
        self.start_apiserver()

    def log(self, lines: int = 30) -> str:
        """The end of what the programs wrote, but for what only informs."""
        told = []
        for path in sorted(self.folder.glob("*.log")):
            written = [line for line in path.read_text().splitlines() if not line.startswith("I")]
            told += [f"{path.name}:", *written[-lines:]]
        return "\n".join(told)

    def _start(self, program: Path, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{program.name}.log").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(program), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=SPARING,
            )

    def _wait(self, process: subprocess.Popen[bytes], up: Callable[[], bool]) -> None:
        """Until it is up, and no longer than it runs."""
        assert eventually(lambda: process.poll() is not None or up(), PATIENCE), self.log()
        assert process.poll() is None, self.log()

    def _ask_etcd(self, path: str, **body: Json) -> Json:
        """What etcd answers; None if it is away."""
        with closing(http.client.HTTPConnection(LOOPBACK, self._etcd_port, timeout=10)) as etcd:
            try:
                etcd.request("POST", f"/v3/{path}", json.dumps(body))
                answer = etcd.getresponse()
            except OSError:
                return None
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())

    # --------------------------------------------------------------------------------- asking

    def request(
        self, method: str, path: str, body: Json = None, user: str = "admin"
    ) -> tuple[int, Json]:
        """The status and the answer; an OSError if the API server is away.

        A body that goes with PATCH is merged with what is there. APPLY makes it be there as kubectl
        does with `apply --server-side`."""
        status, text = self._exchange(method, path, body, user)
        return status, json.loads(text) if text.startswith("{") else text

    def ask(self, method: str, path: str, body: Json = None, user: str = "admin") -> Json:
        """The answer to what must succeed."""
        status, answer = self.request(method, path, body, user)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return answer

    def watch(
        self, path: str, since: str, seconds: int = 1, user: str = "admin"
    ) -> tuple[int, list[Json]]:
        """The status, and the events after that resourceVersion, for as long as that."""
        query = f"?watch=1&resourceVersion={since}&timeoutSeconds={seconds}"
        status, text = self._exchange("GET", path + query, None, user)
        return status, [json.loads(line) for line in text.splitlines()]

    def kubectl(self, *words: str, input: str = "", user: str = "admin", code: int = 0) -> str:  # noqa: A002 - as subprocess names it
        """What kubectl says; what it complains about, if it is to fail with that code."""
        always = (f"--kubeconfig={self.kubeconfig(user)}", f"--cache-dir={self.folder / 'kubectl'}")
        done = run(
            self.programs.kubectl,
            *always,
            *words,
            stdin=input,
            code=code,
            environment={"KUBERC": "off"},
        )
        return done.stderr if code else done.stdout

    def kubeconfig(self, user: str = "admin", *, certificate: bool = False) -> Path:
        """A file that lets somebody in as that user, by token or by certificate."""
        name = f"{user.replace('/', '-')}{'-certificate' if certificate else ''}"
        identity = self._certificate(user, name) if certificate else {"token": self.tokens[user]}
        server = {"server": self.server, "certificate-authority": str(self.ca)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": server}],
            "users": [{"name": user, "user": identity}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
            "current-context": "tests",
        }
        path = self.folder / f"{name}.kubeconfig"
        new = path.with_suffix(".new")  # whoever reads it at this moment finds it whole
        new.write_text(yaml.safe_dump(document))
        new.chmod(0o600)
        return new.replace(path)

    @contextmanager
    def reachable_from(self, netns: str) -> Iterator[None]:
        """Within the block, what runs in that network namespace finds the API server at the same
        address; the namespace's loopback has to be up."""
        with opened(netns) as descriptor, inside(descriptor, netns):
            relay = Relay((LOOPBACK, self._port), Relayed)
        with relay:
            thread = threading.Thread(target=relay.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield
            finally:
                relay.shutdown()
                thread.join()

    def _exchange(self, method: str, path: str, body: Json, user: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self.tokens[user]}"}
        if body is not None:
            headers["Content-Type"] = TYPES.get(method, "application/json")
        if method == "APPLY":
            method, path = "PATCH", f"{path}?fieldManager=tests&force=true"
        context = ssl.create_default_context(cafile=self.ca)
        to = http.client.HTTPSConnection(LOOPBACK, self._port, timeout=PATIENCE, context=context)
        with closing(to) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    # -------------------------------------------------------------------------- what is there

    def define(self, *, prune: bool = False) -> None:
        """Let it know KubeVirt's kinds, and wait until it goes by that."""
        for definition in definitions(prune=prune):
            self.ask("APPLY", f"{DEFINITIONS}/{definition['metadata']['name']}", definition)
        assert eventually(lambda: self._prunes() is prune and self.is_ready(), PATIENCE), self.log()

    @contextmanager
    def pruning(self) -> Iterator[None]:
        """Within the block, `portRanges` is pruned, as it is up to KubeVirt 1.8."""
        self.define(prune=True)
        try:
            yield
        finally:
            self.define()

    def _prunes(self) -> bool | None:
        """None while it cannot be told."""
        ranges = [{"start": 22, "end": 22, "protocol": "TCP"}]
        interface = {"name": "red", "masquerade": {}, "portRanges": ranges}
        machine = {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "probe"},
            "spec": {
                "domain": {"devices": {"interfaces": [interface]}},
                "networks": [{"name": "red", "pod": {}}],
            },
        }
        path = f"{KUBEVIRT}/namespaces/default/{VMIS}?dryRun=All"
        status, answer = self.request("POST", path, machine)
        if status != 201:
            return None
        return "portRanges" not in answer["spec"]["domain"]["devices"]["interfaces"][0]

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A new namespace; what is in it goes with it, also if the API server was killed."""
        name = unused_name()
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            yield name
        finally:
            self.start_apiserver()
            for path in CONTENTS:
                self.ask("DELETE", f"{path.format(name)}?gracePeriodSeconds=0")
            left = self.ask("DELETE", f"/api/v1/namespaces/{name}")
            left["spec"] = {"finalizers": []}
            self.ask("PUT", f"/api/v1/namespaces/{name}/finalize", left)

    def issue_token(self, namespace: str, name: str, seconds: int = 3600) -> str:
        """A token such as a pod has, of a ServiceAccount that is made if there is none; from then
        on `namespace/name` is a user. The API gives none for less than 600 seconds."""
        path, known = "/api/v1", {"Namespace": namespace, "ServiceAccount": name}
        for kind, called in known.items():
            path = f"{path}/{kind.lower()}s/{called}"
            self.ask(
                "APPLY", path, {"apiVersion": "v1", "kind": kind, "metadata": {"name": called}}
            )
        told = self.ask("POST", f"{path}/token", {"spec": {"expirationSeconds": seconds}})
        token: str = told["status"]["token"]
        self.users[f"{namespace}/{name}"] = account(namespace, name)
        self.tokens[f"{namespace}/{name}"] = token
        return token

    def grant(self, user: str, *rules: Json) -> None:
        """Let a user do what these rules of a ClusterRole say, and no longer what was granted
        before; and wait until that holds."""
        name = f"granted:{self.users[user].name}"
        before = rights(self.request("GET", f"{RBAC}/clusterroles/{name}")[1].get("rules") or ())
        after = rights(rules)
        meta = {"apiVersion": f"{RBAC_GROUP}/v1", "metadata": {"name": name}}
        role = {**meta, "kind": "ClusterRole", "rules": list(rules)}
        self.ask("APPLY", f"{RBAC}/clusterroles/{name}", role)
        binding = {
            **meta,
            "kind": "ClusterRoleBinding",
            "roleRef": {"apiGroup": RBAC_GROUP, "kind": "ClusterRole", "name": name},
            "subjects": [
                {"apiGroup": RBAC_GROUP, "kind": "User", "name": self.users[user].name},
            ],
        }
        self.ask("APPLY", f"{RBAC}/clusterrolebindings/{name}", binding)
        for right in before | after:
            assert eventually(lambda: self.may(user, *right) is (right in after)), right  # noqa: B023

    def may(self, user: str, verb: str, group: str, resource: str) -> bool:
        """Whether a user may do that, in every namespace."""
        kind, _, subresource = resource.partition("/")
        what = {"verb": verb, "group": group, "resource": kind, "subresource": subresource}
        who = {"user": self.users[user].name, "groups": list(self.users[user].groups)}
        review = self.ask("POST", REVIEWS, {"spec": who | {"resourceAttributes": what}})
        allowed: bool = review["status"]["allowed"]
        return allowed

    # ------------------------------------------------------------------------------- secrets

    def _write_tokens(self) -> None:
        lines = [
            f'{self.tokens[name]},{user.name},{name},"{",".join(user.groups)}"\n'
            for name, user in self.users.items()
        ]
        (self.folder / "tokens.csv").write_text("".join(lines))

    def _certificate(self, user: str, name: str) -> dict[str, str]:
        """What a kubeconfig says of a certificate of that user."""
        signer = ("-CA", self.folder / "clients.crt", "-CAkey", self.folder / "clients.key")
        groups = "".join(f"/O={group}" for group in self.users[user].groups)
        subject = f"{groups}/CN={self.users[user].name}"
        certificate, key = self._certify(name, subject, *map(str, signer))
        return {"client-certificate": certificate, "client-key": key}

    def _certify(self, name: str, subject: str, *options: str) -> tuple[str, str]:
        """A certificate and its key; signed by itself, unless the options name another."""
        certificate, key = str(self.folder / f"{name}.crt"), str(self.folder / f"{name}.key")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-out", certificate, "-keyout", key)
        run("openssl", "req", "-x509", *curve, *files, "-days=2", "-subj", subject, *options)
        return certificate, key


def definitions(*, prune: bool = False) -> list[Json]:
    """KubeVirt's kinds. With pruning, `portRanges` and the `end` of a port are lost silently."""
    text = CRD.read_text()
    found: list[Json] = yaml.safe_load(re.sub(r".* # kept\n", "", text) if prune else text)["items"]
    return found


def rights(rules: Iterable[Json]) -> set[tuple[str, str, str]]:
    """The verb, group and resource of everything that rules of a role allow."""
    return {
        right
        for rule in rules
        for right in product(rule["verbs"], rule["apiGroups"], rule["resources"])
    }


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at."""
    with ExitStack() as stack:
        tried = (stack.enter_context(socket.socket()) for _ in PORTS)
        ports = zip(random.sample(PORTS, len(PORTS)), tried, strict=False)
        return list(islice((port for port, one in ports if is_free(one, port)), count))


def is_free(tried: socket.socket, port: int) -> bool:
    try:
        tried.bind((LOOPBACK, port))
    except OSError:
        return False
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(PATIENCE)


class Relay(socketserver.ThreadingTCPServer):
    """Listens in the namespace where it was made, and connects from where it is served."""

    allow_reuse_address = True
    daemon_threads = True


class Relayed(socketserver.BaseRequestHandler):
    """One connection, both ways."""

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(self.request.getsockname()) as there:
            here: socket.socket = self.request
            for one in (here, there):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=pump, args=(there, here), daemon=True)
            back.start()
            pump(here, there)
            back.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes, until either side ends; then both do."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
