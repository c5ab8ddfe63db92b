"""The cluster of the tests is one: it keeps what it is given, forgets, refuses, and dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster import KUBEVIRT, VMIS, VMS, Cluster
from tests.spaces import ROOT, eventually, run, space, unused_name, within

Json = Any

INTERFACE = {
    "name": "red",
    "masquerade": {},
    "ports": [{"port": 22, "end": 25}],
    "portRanges": [{"start": 1000, "end": 8000, "protocol": "UDP"}],
}
MACHINE = {"domain": {"devices": {"interfaces": [INTERFACE]}}, "networks": [{"name": "red"}]}
OBJECTS: dict[str, Json] = {
    VMIS: {"kind": "VirtualMachineInstance", "spec": MACHINE},
    VMS: {
        "kind": "VirtualMachine",
        "spec": {"runStrategy": "Always", "template": {"spec": MACHINE}},
    },
}
READ = {"apiGroups": ["kubevirt.io"], "resources": [VMIS], "verbs": ["list", "watch"]}
ORPHAN = """
import sys
from pathlib import Path
from tests.kubernetes.assets import find
from tests.kubernetes.cluster import Cluster
made = Cluster(find(), Path(sys.argv[1]))
made.start_etcd()
print(made._etcd.pid, flush=True)
sys.stdin.read()
"""


def create(cluster: Cluster, namespace: str, plural: str = VMIS, **more: Json) -> str:
    """Make an object; where it is to be found."""
    path = f"{KUBEVIRT}/namespaces/{namespace}/{plural}"
    meta = {"apiVersion": "kubevirt.io/v1", "metadata": {"name": unused_name()}}
    made = cluster.ask("POST", path, meta | OBJECTS[plural] | more)
    return f"{path}/{made['metadata']['name']}"


def version(cluster: Cluster) -> str:
    """The resourceVersion of now."""
    return str(cluster.ask("GET", f"{KUBEVIRT}/{VMIS}")["metadata"]["resourceVersion"])


def whoami(cluster: Cluster, kubeconfig: Path) -> str:
    words = ("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
    return run(cluster.programs.kubectl, f"--kubeconfig={kubeconfig}", *words).stdout


# ---------------------------------------------------------------------------------- what it keeps


def test_it_is_new_enough_for_admission_policies(cluster: Cluster) -> None:
    told = cluster.ask("GET", "/version")
    assert (int(told["major"]), int(told["minor"].rstrip("+"))) >= (1, 30)


@pytest.mark.parametrize("plural", OBJECTS)
def test_an_object_is_kept_as_it_was_written(cluster: Cluster, namespace: str, plural: str) -> None:
    path = create(cluster, namespace, plural)
    assert cluster.ask("GET", path)["spec"] == OBJECTS[plural]["spec"]


def test_the_status_of_an_instance_is_written_like_the_rest(
    cluster: Cluster, namespace: str
) -> None:
    status = {"nodeName": "node1", "activePods": {"uid": "node1"}}
    path = create(cluster, namespace, status=status)
    assert cluster.ask("GET", path)["status"] == status
    cluster.ask("PATCH", path, {"status": {"nodeName": "node2"}})
    assert cluster.ask("GET", path)["status"] == status | {"nodeName": "node2"}
    name = path.rpartition("/")[2]
    assert "node2" in cluster.kubectl("get", "vmi", name, f"--namespace={namespace}")


def test_an_older_kubevirt_loses_what_it_does_not_know(cluster: Cluster, namespace: str) -> None:
    with cluster.pruning():
        instance = cluster.ask("GET", create(cluster, namespace))
        template = cluster.ask("GET", create(cluster, namespace, VMS))["spec"]
    for spec in (instance["spec"], template["template"]["spec"]):
        kept = {"name": "red", "masquerade": {}, "ports": [{"port": 22}]}
        assert spec["domain"]["devices"]["interfaces"] == [kept]
        assert spec["networks"] == MACHINE["networks"]


def test_a_namespace_goes_with_what_is_in_it(cluster: Cluster) -> None:
    with cluster.namespace() as name:
        path = create(cluster, name)
        cluster.kill_apiserver()
    for gone in (path, f"/api/v1/namespaces/{name}"):
        assert cluster.request("GET", gone)[0] == 404


# ----------------------------------------------------------------------------- what it goes through


def test_a_restart_loses_nothing(cluster: Cluster, namespace: str) -> None:
    path = create(cluster, namespace)
    before = cluster.ask("GET", path)
    cluster.kill_apiserver()
    with pytest.raises(ConnectionRefusedError):
        cluster.request("GET", path)
    cluster.start_apiserver()
    assert cluster.ask("GET", path) == before


def test_a_watch_from_before_a_compaction_is_told_that_its_version_is_gone(
    cluster: Cluster, namespace: str
) -> None:
    since = version(cluster)
    path = create(cluster, namespace)
    _, events = cluster.watch(f"{KUBEVIRT}/{VMIS}", since)
    assert [event["type"] for event in events] == ["ADDED"]
    last = version(cluster)
    cluster.compact()
    for old in (since, last):
        status, events = cluster.watch(f"{KUBEVIRT}/{VMIS}", old)
        told = [(event["type"], event["object"]["code"]) for event in events]
        assert (status, told) == (200, [("ERROR", 410)])
    assert cluster.ask("GET", path)


def test_it_dies_with_whoever_started_it(cluster: Cluster, tmp_path: Path) -> None:
    words = (sys.executable, "-c", ORPHAN, str(tmp_path))
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        running = Path("/proc", parent.stdout.readline().strip())
        assert (running / "stat").exists()
        parent.kill()
    assert eventually(lambda: not running.exists())


@pytest.mark.needs_root
def test_it_can_be_reached_from_a_namespace(cluster: Cluster) -> None:
    ask = (str(cluster.programs.kubectl), f"--kubeconfig={cluster.kubeconfig()}", "get", "--raw")
    with space() as netns:
        within(netns, "ip", "link", "set", "lo", "up")
        within(netns, *ask, "/readyz", code=1)
        with cluster.reachable_from(netns):
            assert within(netns, *ask, "/readyz") == "ok"
        within(netns, *ask, "/readyz", code=1)


# ------------------------------------------------------------------------------------ whom it knows


def test_a_user_may_do_what_was_granted_and_no_more(cluster: Cluster) -> None:
    path = f"{KUBEVIRT}/{VMIS}"
    assert cluster.request("GET", path, user="nobody")[0] == 403
    cluster.grant("nobody", READ)
    assert cluster.request("GET", path, user="nobody")[0] == 200
    assert cluster.request("GET", "/api/v1/pods", user="nobody")[0] == 403
    cluster.grant("nobody")
    assert cluster.request("GET", path, user="nobody")[0] == 403
    refused = cluster.kubectl("get", "vmis", user="nobody", code=1)
    assert 'User "nobody" cannot list resource' in refused


def test_a_stranger_is_nobody_at_all(cluster: Cluster) -> None:
    cluster.tokens["stranger"] = "guessed"
    assert cluster.request("GET", "/api/v1/pods", user="stranger")[0] == 401


def test_users_come_by_token_and_by_certificate(cluster: Cluster) -> None:
    name = "system:serviceaccount:portranger:portranger"
    assert whoami(cluster, cluster.kubeconfig("portranger")) == name
    assert whoami(cluster, cluster.kubeconfig("portranger", certificate=True)) == name


def test_the_token_of_an_account_has_what_was_granted_to_its_user(cluster: Cluster) -> None:
    cluster.issue_token("portranger", "portranger")
    cluster.grant("portranger", READ)
    path = f"{KUBEVIRT}/{VMIS}"
    assert cluster.request("GET", path, user="portranger/portranger")[0] == 200
    cluster.grant("portranger")
    assert cluster.request("GET", path, user="portranger/portranger")[0] == 403


# ------------------------------------------------------------------------------- what it is made of


def make_assets(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `make kube-assets` does where nothing was built yet."""
    words = (sys.executable, "-m", "tests.kubernetes.assets")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return run(*words, code=None, environment={"KUBEBUILDER_ASSETS": "", **cache, **environment})


def test_programs_that_are_given_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    ours = {
        "etcd": cluster.programs.etcd,
        "kube-apiserver": cluster.programs.apiserver,
        "kubectl": cluster.programs.kubectl,
    }
    (tmp_path / "judge").touch()  # which only has to be there
    ours["admitter"] = tmp_path / "judge"
    for name, path in ours.items():
        (tmp_path / name).symlink_to(path)
    done = make_assets(tmp_path, KUBEBUILDER_ASSETS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {
        str(tmp_path / name) for name in ours
    }
    assert not (tmp_path / "cache").exists()


def test_programs_that_should_be_given_are_missed(tmp_path: Path) -> None:
    (tmp_path / "etcd").touch()
    done = make_assets(tmp_path, KUBEBUILDER_ASSETS=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"kube-assets: KUBEBUILDER_ASSETS is {tmp_path}, which has no kube-apiserver\n"
    )


def test_a_go_that_is_too_old_is_told_with_what_to_install(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    done = make_assets(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert f"kube-assets: {go} is go1.19.8." in done.stderr
    assert "apt-get install golang-go" in done.stderr
