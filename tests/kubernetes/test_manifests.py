"""The manifests of kubernetes/ render, a real API server takes them, and they let the agent have
what it needs and no more. That it runs with that is found out with the image."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config import Config, Listen, Policy, read
from rules.values import replace
from tests.kubernetes.cluster import VMIS, Cluster, rights
from tests.nodes import net, service_manifest, vm_manifest
from tests.spaces import ROOT, legacy, run, saved, within

Json = Any

ALL, FILES = ROOT / "kubernetes", ROOT / "kubernetes/overlays/files"
NAMES = ("kubernetes", "files")
FOLDERS = dict(zip(NAMES, (ALL, FILES), strict=True))
IN_NAMESPACES = {"SYS_ADMIN", "NET_ADMIN", "NET_BROADCAST"}
TO_PODS = {"SYS_PTRACE", "DAC_OVERRIDE"}


class Rendered:
    """What `kubectl apply -k` would apply."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.text = run(cluster.programs.kubectl, "kustomize", folder).stdout
        self.documents: list[Json] = list(yaml.safe_load_all(self.text))

    def of_kind(self, kind: str) -> list[Json]:
        return [one for one in self.documents if one["kind"] == kind]

    @property
    def pod(self) -> Json:
        [daemon_set] = self.of_kind("DaemonSet")
        return daemon_set["spec"]["template"]["spec"]

    @property
    def container(self) -> Json:
        [container] = self.pod["containers"]
        return container

    def mounted(self, name: str) -> Json:
        """How a volume is mounted."""
        [mount] = [one for one in self.container["volumeMounts"] if one["name"] == name]
        return mount

    def files(self, name: str) -> dict[str, str]:
        """What is in the volume that a ConfigMap is."""
        [volume] = [one for one in self.pod["volumes"] if one["name"] == name]
        called = volume["configMap"]["name"]
        [data] = [
            one["data"] for one in self.of_kind("ConfigMap") if one["metadata"]["name"] == called
        ]
        return dict(data)

    def config(self) -> Config:
        return read(self.files("config")["portranger.toml"], "portranger.toml")


@pytest.fixture(scope="module", params=NAMES)
def either(request: pytest.FixtureRequest, cluster: Cluster) -> Rendered:
    return Rendered(cluster, FOLDERS[request.param])


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Rendered:
    return Rendered(cluster, ALL)


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Rendered:
    """Without KubeVirt."""
    return Rendered(cluster, FILES)


def with_component(folder: Path, *names: str) -> Path:
    """As the comment says that one gets it."""
    made = shutil.copytree(ALL, folder / "-".join(names))
    file = made / "kustomization.yaml"
    commented = rf"(?m)^# (components:|  - components/({'|'.join(names)}))$"
    text, count = re.subn(commented, r"\1", file.read_text())
    assert count == 1 + len(names)
    file.write_text(text)
    return made


@pytest.fixture
def monitored(cluster: Cluster, tmp_path: Path) -> Rendered:
    return Rendered(cluster, with_component(tmp_path, "podmonitor"))


@pytest.fixture
def publishing(cluster: Cluster, tmp_path: Path) -> Rendered:
    return Rendered(cluster, with_component(tmp_path, "services"))


@pytest.fixture
def enforcing(cluster: Cluster, tmp_path: Path) -> Rendered:
    return Rendered(cluster, with_component(tmp_path, "policy"))


# ------------------------------------------------------------------------------- they are taken


@pytest.mark.parametrize("name", NAMES)
def test_an_api_server_takes_them(cluster: Cluster, name: str) -> None:
    """What it would do, it tells only of a namespace that is there."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "portranger"}}
    cluster.ask("APPLY", "/api/v1/namespaces/portranger", namespace)
    told = cluster.kubectl("apply", "-k", str(FOLDERS[name]), "--dry-run=server")
    lines = [line.split() for line in told.splitlines()]
    assert all(line[2:] == ["(server", "dry", "run)"] for line in lines), told
    kinds = sorted(line[0].partition("/")[0].partition(".")[0] for line in lines)
    rendered = Rendered(cluster, FOLDERS[name]).documents
    assert kinds == sorted(one["kind"].lower() for one in rendered)


def test_the_namespace_comes_first(either: Rendered) -> None:
    assert either.documents[0]["kind"] == "Namespace"
    assert {one["metadata"].get("namespace", "portranger") for one in either.documents} == {
        "portranger"
    }


def test_all_is_found_by_its_label(either: Rendered) -> None:
    labels = [one["metadata"]["labels"] for one in either.documents]
    assert {one["app.kubernetes.io/name"] for one in labels} == {"portranger"}


def test_the_image_is_that_of_this_version(either: Rendered) -> None:
    assert either.container["image"] == f"portranger:{version('portranger')}"


def test_the_policy_is_part_of_it(whole: Rendered, bare: Rendered) -> None:
    assert whole.of_kind("ValidatingAdmissionPolicyBinding")
    assert not bare.of_kind("ValidatingAdmissionPolicyBinding")


# -------------------------------------------------------------------------- what the agent may do


def test_the_agent_may_read_machines_and_write_events_and_no_more(whole: Rendered) -> None:
    [role] = whole.of_kind("ClusterRole")
    [binding] = whole.of_kind("ClusterRoleBinding")
    assert rights(role["rules"]) == {
        ("list", "kubevirt.io", VMIS),
        ("watch", "kubevirt.io", VMIS),
        ("create", "", "events"),
        ("patch", "", "events"),
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    who = {"kind": "ServiceAccount", "name": "portranger", "namespace": "portranger"}
    assert binding["subjects"] == [who]
    assert whole.pod["serviceAccountName"] == who["name"]
    kinds = {one["kind"] for one in whole.documents}
    assert {kind for kind in kinds if "Role" in kind} == {"ClusterRole", "ClusterRoleBinding"}


def test_without_kubevirt_it_may_ask_for_nothing(bare: Rendered) -> None:
    assert not any("Role" in one["kind"] for one in bare.documents)
    assert bare.pod["automountServiceAccountToken"] is False


def test_it_is_confined_as_far_as_it_can_be(either: Rendered) -> None:
    security = dict(either.container["securityContext"])
    assert security.pop("capabilities")["drop"] == ["ALL"]
    assert security == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "appArmorProfile": {"type": "Unconfined"},
    }
    assert not either.pod.keys() & {"hostNetwork", "hostIPC", "securityContext", "initContainers"}


def test_it_has_these_capabilities_and_sees_processes_only_for_kubevirt(
    whole: Rendered, bare: Rendered
) -> None:
    found = [set(one.container["securityContext"]["capabilities"]["add"]) for one in (whole, bare)]
    assert found == [IN_NAMESPACES | TO_PODS, IN_NAMESPACES]
    assert [one.pod["hostPID"] for one in (whole, bare)] == [True, False]


@pytest.mark.parametrize(
    "path",
    ["base/daemonset.yaml", "overlays/files/daemonset.yaml", "components/services/daemonset.yaml"],
)
def test_each_capability_has_its_reason(path: str) -> None:
    text = (ALL / path).read_text()
    [listed] = re.findall(r"add:\n((?: +- .*\n)+)", text)
    for line in listed.splitlines():
        assert re.fullmatch(r" +- [A-Z_]+ # \w.{20,}", line), line


def test_it_writes_nowhere_on_the_node_but_to_its_state_and_settings(either: Rendered) -> None:
    paths = {
        one["name"]: one["hostPath"]["path"] for one in either.pod["volumes"] if "hostPath" in one
    }
    mounts = either.container["volumeMounts"]
    writable = {paths[one["name"]] for one in mounts if not one.get("readOnly")}
    assert writable == {"/var/lib/portranger", "/proc/sys/net"}


# ---------------------------------------------------------------------- what it says fits together


def test_what_is_configured_is_where_it_is_mounted(whole: Rendered, bare: Rendered) -> None:
    for one in (whole, bare):
        assert one.mounted("config")["mountPath"] == "/etc/portranger"
        assert one.mounted("state")["mountPath"] == one.config().state_dir
        assert one.config().listen == Listen("0.0.0.0", one.container["ports"][0]["containerPort"])
    assert (whole.config().source, bare.config().source) == ("kubernetes", "files")
    pods = whole.mounted("pods")
    assert pods["mountPath"] == f"{whole.config().kubernetes.kubelet_root}/pods"
    assert bare.mounted("manifests")["mountPath"] == bare.config().manifests
    assert bare.mounted("namespaces")["mountPath"] == "/run/netns"
    for mount in (pods, bare.mounted("namespaces")):
        assert mount["mountPropagation"] == "HostToContainer"


def test_a_changed_configuration_is_rolled_out_and_manifests_are_not(bare: Rendered) -> None:
    names = [one["metadata"]["name"] for one in bare.of_kind("ConfigMap")]
    assert [bool(re.fullmatch(r"portranger-[0-9a-z]{10}", name)) for name in names] == [True, False]
    assert bare.files("manifests").keys() == {"desktop.yaml"}


def test_it_knows_which_node_it_is_on(whole: Rendered, bare: Rendered) -> None:
    [variable] = whole.container["env"]
    assert variable["name"] == "NODE_NAME"
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert not bare.container.get("env")


def test_it_is_on_every_node_and_stays_there(either: Rendered) -> None:
    assert either.pod["tolerations"] == [{"operator": "Exists"}]
    assert either.pod["priorityClassName"] == "system-node-critical"
    [daemon_set] = either.of_kind("DaemonSet")
    assert daemon_set["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "10%"},
    }


def test_it_is_asked_how_it_is_where_it_answers(either: Rendered) -> None:
    probes = {
        name: either.container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")
    }
    paths = [one["httpGet"] for one in probes.values()]
    ports = [one["name"] for one in either.container["ports"]]
    assert [one["path"] for one in paths] == ["/healthz", "/healthz", "/readyz"]
    assert {one["port"] for one in paths} == set(ports)


def test_it_has_no_limit_to_its_processor(either: Rendered) -> None:
    resources = either.container["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert resources["limits"].keys() == {"memory"}


# ------------------------------------------------------------------------------------- Services


def test_services_are_left_alone_where_they_cannot_be_published(whole: Rendered) -> None:
    assert whole.config().kubernetes.services is False
    assert not whole.pod.get("hostNetwork")


def test_to_publish_services_it_is_in_the_network_of_the_node(
    whole: Rendered, publishing: Rendered
) -> None:
    assert publishing.pod["hostNetwork"] is True
    assert publishing.pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert publishing.config().kubernetes.services is True
    assert publishing.config().source == "kubernetes"
    kept = {"kubelet_root", "node_name", "kubeconfig", "proc"}
    for key in kept:
        told = [getattr(one.config().kubernetes, key) for one in (whole, publishing)]
        assert told[0] == told[1], key
    same = {**publishing.pod, "containers": whole.pod["containers"]}
    for key in ("hostNetwork", "dnsPolicy"):
        del same[key]
    assert without_names(same) == without_names(whole.pod)


def test_on_the_node_it_answers_to_loopback_alone_where_it_is_asked(publishing: Rendered) -> None:
    listen = publishing.config().listen
    assert listen == Listen("127.0.0.1", publishing.container["ports"][0]["containerPort"])
    for name, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        asked = publishing.container[f"{name}Probe"]["httpGet"]
        assert asked == {"host": "127.0.0.1", "path": path, "port": "metrics"}


def test_to_publish_services_it_may_read_them_and_no_more(
    whole: Rendered, publishing: Rendered
) -> None:
    [few], [more] = (one.of_kind("ClusterRole") for one in (whole, publishing))
    assert rights(more["rules"]) - rights(few["rules"]) == {
        ("list", "", "services"),
        ("watch", "", "services"),
        ("list", "discovery.k8s.io", "endpointslices"),
        ("watch", "discovery.k8s.io", "endpointslices"),
    }
    assert rights(more["rules"]) > rights(few["rules"])
    assert more["metadata"] == few["metadata"]


def test_what_deleted_agents_left_on_the_nodes_can_be_cleaned_up(cluster: Cluster) -> None:
    """Applied and deleted for good, on a server without nodes; nothing else goes with it."""
    folder = ROOT / "kubernetes/overlays/cleanup"
    rendered = Rendered(cluster, folder)
    pod = rendered.pod
    assert pod["hostNetwork"] is True
    [clear], [done] = pod["initContainers"], pod["containers"]
    assert clear["args"] == ["clear", "--netns", "node:self", "--yes"]
    assert clear["image"] == done["image"] == Rendered(cluster, ALL).container["image"]
    assert clear["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert done["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    namespaces = {one["metadata"].get("namespace") for one in rendered.documents}
    assert namespaces == {None, "portranger-cleanup"}
    cluster.kubectl("apply", "-k", str(folder))
    told = cluster.kubectl("delete", "-k", str(folder), "--wait=false")
    assert sorted(line.split()[0].partition("/")[0].partition(".")[0] for line in told.splitlines())
    assert "portranger-cleanup" in told
    assert 'namespace "portranger" ' not in told


@pytest.mark.parametrize("legacy_tables", [False, True], ids=["nftables", "beside legacy rules"])
def test_the_command_of_the_cleanup_leaves_nothing_of_ours_on_a_node(
    cluster: Cluster, tmp_path: Path, legacy_tables: bool
) -> None:
    """With no more capabilities than its container has."""
    [clear] = Rendered(cluster, ROOT / "kubernetes/overlays/cleanup").pod["initContainers"]
    entry = (sys.executable, "-m", "agent.entry")
    added = [f"+{one.lower()}" for one in clear["securityContext"]["capabilities"]["add"]]
    only = ("setpriv", f"--bounding-set=-all,{','.join(added)}", "--no-new-privs")
    manifest = tmp_path / "phone.yaml"
    with net(1) as lab:
        service = service_manifest(["name: http, port: 80, nodePort: 30080"])
        manifest.write_text(f"{vm_manifest(lab.vms[0], '80')}---\n{service}")
        if legacy_tables:
            legacy(lab.node, "-A PREROUTING -p tcp --dport 31000 -j REDIRECT --to-ports 8080")
        others = saved(lab.node) if legacy_tables else ""
        within(lab.node, *entry, "apply", "-f", str(manifest), "--yes")
        assert "table inet portranger" in within(lab.node, "nft", "list", "tables")
        within(lab.node, *only, *entry, *clear["args"])
        assert within(lab.node, "nft", "list", "tables") == ""
        assert not legacy_tables or saved(lab.node) == others


@pytest.mark.parametrize("names", [("services",), ("policy",), ("services", "policy")])
def test_an_api_server_takes_it_with_components(
    cluster: Cluster, tmp_path: Path, names: tuple[str, ...]
) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "portranger"}}
    cluster.ask("APPLY", "/api/v1/namespaces/portranger", namespace)
    folder = with_component(tmp_path, *names)
    told = cluster.kubectl("apply", "-k", str(folder), "--dry-run=server").splitlines()
    kinds = sorted(line.partition("/")[0].partition(".")[0] for line in told)
    rendered = Rendered(cluster, folder).documents
    assert kinds == sorted(one["kind"].lower() for one in rendered)
    assert {one["metadata"].get("namespace", "portranger") for one in rendered} == {"portranger"}
    assert all("app.kubernetes.io/name" in one["metadata"]["labels"] for one in rendered)


# ------------------------------------------------------------------------------------- policies


def test_policies_are_left_to_the_network_plugin(whole: Rendered) -> None:
    assert whole.config().policy == Policy()
    assert whole.config().enforces is False


def test_to_enforce_policies_it_is_told_so_and_nothing_else(
    whole: Rendered, enforcing: Rendered
) -> None:
    assert enforcing.config().enforces is True
    assert replace(enforcing.config(), policy=Policy()) == whole.config()
    text = enforcing.files("config")["portranger.toml"]
    assert text.startswith(whole.files("config")["portranger.toml"])
    assert without_names(enforcing.pod) == without_names(whole.pod)
    assert [one["kind"] for one in enforcing.documents] == [one["kind"] for one in whole.documents]
    names = {one.of_kind("ConfigMap")[0]["metadata"]["name"] for one in (whole, enforcing)}
    assert len(names) == 2  # so that it is rolled out


def test_to_enforce_policies_it_may_read_whom_they_speak_of_and_no_more(
    whole: Rendered, enforcing: Rendered
) -> None:
    [few], [more] = (one.of_kind("ClusterRole") for one in (whole, enforcing))
    assert rights(more["rules"]) - rights(few["rules"]) == {
        (verb, group, kind)
        for verb in ("list", "watch")
        for group, kind in (
            ("networking.k8s.io", "networkpolicies"),
            ("", "pods"),
            ("", "namespaces"),
        )
    }
    assert rights(more["rules"]) > rights(few["rules"])
    assert more["metadata"] == few["metadata"]


def test_both_can_be_had(
    cluster: Cluster, tmp_path: Path, publishing: Rendered, enforcing: Rendered
) -> None:
    both = Rendered(cluster, with_component(tmp_path, "services", "policy"))
    assert replace(both.config(), policy=Policy()) == publishing.config()
    assert both.config().enforces is True
    assert without_names(both.pod) == without_names(publishing.pod)
    [role], *others = (one.of_kind("ClusterRole") for one in (both, publishing, enforcing))
    assert rights(role["rules"]) == {right for [one] in others for right in rights(one["rules"])}


def without_names(pod: Json) -> Json:
    """The pod, whatever the hash in the name of its configuration."""
    volumes = [one for one in pod["volumes"] if "configMap" not in one]
    return {**pod, "volumes": volumes}


def test_prometheus_finds_it(monitored: Rendered) -> None:
    [monitor] = monitored.of_kind("PodMonitor")
    [daemon_set] = monitored.of_kind("DaemonSet")
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["namespace"] == daemon_set["metadata"]["namespace"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [one["name"] for one in monitored.container["ports"]]
    assert endpoint["path"] == "/metrics"
