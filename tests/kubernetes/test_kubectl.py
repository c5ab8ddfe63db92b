"""`kubectl portranger`, as users meet it: by kubectl itself, with the rights that they have, and
with what real agents have said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.errors import Usage
from agent.kubectl import outside
from agent.kubectl import run as run_plugin
from tests.answering import Answering, answering, refused, said, silent
from tests.kubernetes.agents import agents, comes_to_say
from tests.kubernetes.cluster import KUBEVIRT, VMIS, VMS, Cluster
from tests.kubernetes.instances import RANGES, Machines, instance, pod_uid, realistic
from tests.launcher import launcher
from tests.spaces import PATIENCE, ROOT, eventually, pod, run

Json = Any
Done = subprocess.CompletedProcess[str]
Ask = Callable[..., Done]
GET = {"apiGroups": ["kubevirt.io"], "resources": [VMIS], "verbs": ["get"]}
READ_EVENTS = {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]}
PLUGIN = (sys.executable, "-m", "agent.kubectl")
COMMANDS = (["plan"], ["status"], ["explain", "tcp/22"])  # the instance comes after the first word
SPELLINGS = (
    *("vmi", "vmis", "virtualmachineinstance", "virtualmachineinstances", "VirtualMachineInstance"),
    *("vmi.kubevirt.io", "virtualmachineinstance.kubevirt.io", "vmis.v1.kubevirt.io", "vm"),
)


@pytest.fixture
def machines(cluster: Cluster, namespace: str) -> Machines:
    return Machines(cluster, namespace)


@pytest.fixture
def ask(cluster: Cluster, namespace: str) -> Ask:
    """Run the plugin by itself, in the namespace of the test."""

    def asked(*words: str, user: str = "admin", code: int = 0) -> Done:
        environment = {"KUBECONFIG": str(cluster.kubeconfig(user))}
        done = run(*PLUGIN, *words, "-n", namespace, code=code, environment=environment)
        assert "Traceback" not in done.stderr
        return done

    return asked


def machine(name: str, ranges: str, **annotations: str) -> Json:
    """A VirtualMachine that does not run; the annotations are its own, not of its template."""
    made = instance(name, "nowhere")
    template = {"metadata": {"annotations": {RANGES: ranges}}, "spec": made["spec"]}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"runStrategy": "Halted", "template": template},
    }


# ------------------------------------------------------------------------------------- by kubectl


def test_kubectl_finds_it_and_hands_on_its_arguments_and_its_exit_code(
    cluster: Cluster, machines: Machines, ask: Ask, tmp_path: Path
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["kubectl-portranger"].partition(":")
    plugin = tmp_path / "kubectl-portranger"
    plugin.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    plugin.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KUBECONFIG": str(cluster.kubeconfig()),
    }

    def kubectl(*words: str, code: int = 0) -> Done:
        words = (*words, "-n", machines.namespace)
        return run(cluster.programs.kubectl, *words, code=code, environment=environment)

    machines.make(instance("good", "node-1"))
    machines.make(instance("bad", "node-1", "2000-1000"))
    assert kubectl("portranger", "plan", "good").stdout == ask("plan", "good").stdout
    assert "2000-1000" in kubectl("portranger", "plan", "bad", code=65).stderr
    listed = run(cluster.programs.kubectl, "plugin", "list", environment=environment)
    assert str(plugin) in listed.stdout


def test_the_namespace_is_that_of_the_context_unless_it_is_named(
    cluster: Cluster, machines: Machines, tmp_path: Path
) -> None:
    machines.make(instance("web", "node-1", "22"))
    document = yaml.safe_load(cluster.kubeconfig().read_text())
    (context,) = document["contexts"]
    here = context["context"] | {"namespace": machines.namespace}
    document["contexts"].append({"name": "here", "context": here})
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))

    def explained(*words: str, code: int = 0, **environment: str) -> str:
        done = run(*PLUGIN, "explain", "web", "tcp/22", *words, code=code, environment=environment)
        return done.stdout + done.stderr

    label = f"VirtualMachineInstance/{machines.namespace}/web\n"
    assert label in explained("--context", "here", KUBECONFIG=str(path))
    assert label in explained("--kubeconfig", str(path), "--context=here", KUBECONFIG="/nowhere")
    assert "namespace default" in explained(KUBECONFIG=str(path), code=1)
    assert label in explained("-n", machines.namespace, KUBECONFIG=str(path))


def test_in_a_pod_a_kubeconfig_counts_before_the_account_of_the_pod(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "HOME": str(tmp_path)}
    assert outside(pod) == pod
    assert outside(pod | {"KUBECONFIG": "mine"}) == {"HOME": str(tmp_path), "KUBECONFIG": "mine"}
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").touch()
    assert outside(pod) == {"HOME": str(tmp_path)}


# ------------------------------------------------------------------------------ plan and explain


def test_a_plan_tells_what_an_agent_would_forward(machines: Machines, ask: Ask) -> None:
    made = realistic("web", "node-1", "1000-2000,53/udp")
    made["status"]["interfaces"][0]["podInterfaceName"] = "ovn-udn1"
    machines.make(made)
    text = ask("plan", "web").stdout
    assert "prerouting   tcp 1000-2000 on ovn-udn1" in text
    assert "Where KubeVirt's own rules are live" in text
    told = json.loads(ask("plan", "web", "-o", "json").stdout)
    rules = [one["after"] for one in told["changes"] if "kind" not in one]
    assert {
        "owner": f"VirtualMachineInstance/{machines.namespace}/web/default",
        "chain": "prerouting",
        "family": "ip6",
        "action": "dnat",
        "protocol": "udp",
        "ports": "53",
        "interface": "ovn-udn1",
        "to": "fd10:0:2::2",
    } in rules


def test_every_problem_is_told_with_its_place_its_value_and_what_to_write(
    machines: Machines, ask: Ask
) -> None:
    made = instance("web", "node-1", "2000-1000,70000", annotations={"netns": "host"})
    machines.make(made)
    told = ask("plan", "web", code=65).stderr.splitlines()
    label = f"VirtualMachineInstance/{machines.namespace}/web: metadata.annotations"
    assert [line.startswith(label) for line in told] == [True, True, True, False]
    for words in ("'2000-1000'", "'70000'", "bare metal only"):
        assert any(words in line for line in told)
    problems = json.loads(ask("plan", "web", "-o", "json", code=65).stdout)["problems"]
    assert len(problems) == 3
    assert all(problem["fix"] and problem["field"] for problem in problems)
    assert ask("explain", "web", "tcp/22", code=65).stderr.splitlines() == told


def test_a_machine_that_does_not_run_is_planned_as_kubevirt_would_make_it(
    machines: Machines, ask: Ask
) -> None:
    path = f"{KUBEVIRT}/namespaces/{machines.namespace}/{VMS}"
    for made in (machine("off", "22", **{RANGES: "80"}), machine("bad", "80000")):
        machines.cluster.ask("POST", path, made)
    done = ask("plan", "off", "-o", "json")
    rules = [one["after"] for one in json.loads(done.stdout)["changes"] if "kind" not in one]
    assert {rule["ports"] for rule in rules if "ports" in rule} == {"22"}
    assert "There is no VirtualMachineInstance off" in done.stderr
    assert f"metadata.annotations['{RANGES}'] does not reach it" in done.stderr
    assert f"spec.template.metadata.annotations['{RANGES}']" in ask("plan", "bad", code=65).stderr
    assert ask("status", "off").stdout.splitlines() == [
        f"VirtualMachine/{machines.namespace}/off: not running",
        "  declares tcp 22",
        "not running: it is forwarded to while it runs",
    ]


def test_a_flow_is_explained(machines: Machines, ask: Ask) -> None:
    machines.make(instance("web", "node-1", "1000-2000"))
    there = ask("explain", "web", "tcp/1500", "--from", "192.0.2.7").stdout
    assert "from 192.0.2.7: goes to 10.0.2.2:1500, by the rule for tcp 1000-2000" in there
    gone = ask("explain", "web", "TCP/2001").stdout
    assert "is not declared: the guard of" in gone
    assert "a guard keeps shut what is not declared" in gone


def test_what_is_not_ours_is_said_to_be_so(machines: Machines, ask: Ask) -> None:
    made = instance("web", "node-1", None)
    made["spec"]["domain"]["devices"]["interfaces"] = [{"name": "default", "bridge": {}}]
    machines.make(made)
    for command in (["plan", "web"], ["status", "web"], ["explain", "web", "tcp/22"]):
        told = ask(*command).stdout
        assert "not ours" in told
        assert "guard" not in told


# ----------------------------------------------------------------------------------------- status


def kubevirt_says(machines: Machines, made: Json, reason: str) -> None:
    metadata = made["metadata"]
    event = {
        "metadata": {"name": f"{metadata['name']}.kubevirt"},
        "involvedObject": {key: metadata[key] for key in ("namespace", "name", "uid")},
        "source": {"component": "virtualmachine-controller", "host": "node-1"},
        "reason": reason,
    }
    machines.cluster.ask("POST", f"/api/v1/namespaces/{machines.namespace}/events", event)


def test_status_follows_what_the_agent_of_the_node_says(
    cluster: Cluster, machines: Machines, ask: Ask, tmp_path: Path
) -> None:
    def state() -> str:
        told: str = json.loads(ask("status", "web", "-o", "json").stdout)["state"]
        return told

    uid = pod_uid()
    many = ",".join(map(str, range(1000, 1050, 2)))
    made = machines.make(instance("web", "node-1", many, pods={uid: "node-1"}))
    kubevirt_says(machines, made, "SuccessfulCreate")
    told = ask("status", "web").stdout
    assert told.startswith(
        f"VirtualMachineInstance/{machines.namespace}/web: Running on node-1\n"
        f"  pod {uid} on node-1\n"
        "  declares tcp 1000, tcp 1002, "
    )
    assert "no word from an agent: is portranger running on node node-1?" in told
    assert "SuccessfulCreate" not in told
    with (
        agents(cluster, tmp_path, "node-1") as node,
        pod() as netns,
        launcher(node.kubelet, uid, netns, instance=made["metadata"]["uid"]),
        node.daemons.running(),
    ):
        assert eventually(lambda: state() == "forwarded")
        machines.annotate("web", port_ranges="22,1000-2000/udp")
        assert eventually(lambda: state() == "forwarded")
        assert "PortsApplied: forwards tcp 22, udp 1000-2000 in pod:" in ask("status", "web").stdout
        machines.annotate("web", port_ranges="22,9000-8000")
        assert comes_to_say(machines, "web", "PortsRejected")
        *_, last, conclusion = ask("status", "web").stdout.splitlines()
        assert ", node-1: PortsRejected: " in last
        assert "9000-8000" in last
        assert conclusion.startswith("rejected since 20")
    machines.annotate("web", port_ranges="22,80")
    assert state() == "waiting"  # there is no agent any more
    machines.annotate("web", port_ranges="22,1000-2000/udp")
    *_, conclusion = ask("status", "web").stdout.splitlines()
    assert conclusion.startswith("forwarded since 20")


# ------------------------------------------------------------------------------- when it fails


def test_of_a_name_that_is_not_there_those_that_are_like_it_are_told(
    machines: Machines, ask: Ask
) -> None:
    told = ask("plan", "web", code=1).stderr
    assert f"namespace {machines.namespace} has no VirtualMachineInstance web" in told
    assert "Name another namespace with -n." in told
    machines.make(instance("web-1", "node-1"))
    machines.make(instance("database", "node-1"))
    machines.cluster.ask(
        "POST", f"{KUBEVIRT}/namespaces/{machines.namespace}/{VMS}", machine("webb", "22")
    )
    for command in (["plan", "web"], ["status", "web"], ["explain", "web", "tcp/22"]):
        assert "There is webb, web-1." in ask(*command, code=1).stderr


def test_whoever_lacks_a_right_is_told_which(
    cluster: Cluster, machines: Machines, ask: Ask
) -> None:
    machines.make(instance("web", "node-1"))
    cluster.grant("nobody")
    told = ask("plan", "web", user="nobody", code=77).stderr
    assert f"get virtualmachineinstances in namespace {machines.namespace}" in told
    cluster.grant("nobody", GET)
    ask("plan", "web", user="nobody")
    done = ask("status", "web", user="nobody", code=77)
    assert "declares tcp 1000-2000\nwhat the agents have said cannot be read\n" in done.stdout
    assert f"the right to list events in namespace {machines.namespace}" in done.stderr
    assert "get virtualmachines" in ask("plan", "webb", user="nobody", code=77).stderr
    cluster.grant("nobody", GET, READ_EVENTS)
    ask("status", "web", user="nobody")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["plan"],
        ["plan", "web", "-o", "yaml"],
        ["plan", "../../../../api/v1/secrets"],
        ["plan", "vmi/../web"],
        ["plan", "vmi/"],
        ["status", "web", "-n", "a/b"],
        ["explain", "web", "icmp/1"],
        ["explain", "web", "tcp/80", "--from", "here"],
        ["status", "web", "--context"],
    ],
)
def test_a_command_that_makes_no_sense_is_answered_without_asking_anybody(words: list[str]) -> None:
    done = run(*PLUGIN, *words, code=64, environment={"KUBECONFIG": "/nowhere"})
    assert done.stderr.startswith("portranger: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_another_type_is_answered_with_what_to_write(words: list[str]) -> None:
    for kind in ("pod", "pods", "svc", "vmi.example.com", "vmi.v2.kubevirt.io", "..", ""):
        with pytest.raises(Usage) as refusal:
            run_plugin([words[0], f"{kind}/web", *words[1:]], {"KUBECONFIG": "/nowhere"})
        assert repr(kind) in refusal.value.what
        assert refusal.value.fix == "Write vmi/NAME, or NAME alone"


def test_help_tells_of_every_command() -> None:
    told = run(*PLUGIN, "--help").stdout
    for command in ("plan", "status", "explain"):
        assert f"    {command}  " in told
        assert "--kubeconfig" in run(*PLUGIN, command, "--help").stdout


@contextmanager
def stranger(folder: Path) -> Iterator[tuple[Answering, dict[str, str]]]:
    """Something that answers where a kubeconfig says that an API server is."""
    with answering() as server:
        document = {
            "clusters": [{"name": "it", "cluster": {"server": server.url}}],
            "contexts": [{"name": "it", "context": {"cluster": "it"}}],
            "current-context": "it",
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(document))
        yield server, {"KUBECONFIG": str(path)}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_an_instance_may_be_named_with_its_type_as_to_kubectl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with stranger(tmp_path) as (server, environment):
        server.then(said(instance("web", "node-1")))
        names = ["web", *(f"{kind}/web" for kind in SPELLINGS)]
        told = []
        for name in names:
            assert run_plugin([words[0], name, *words[1:]], environment) == 0
            told.append(capsys.readouterr())
    assert told == [told[0]] * len(names)
    assert {asked.path.rpartition("/")[2] for asked in server.asked} == {"web"}


def test_a_cluster_without_kubevirt_is_told_from_one_without_the_instance(tmp_path: Path) -> None:
    with stranger(tmp_path) as (server, environment):
        server.then(refused(404, "the server could not find the requested resource"))
        told = run(*PLUGIN, "plan", "web", code=1, environment=environment).stderr
    assert "knows no VirtualMachineInstance" in told


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({}, 0),
        ({"lastTimestamp": "yesterday"}, 1),
        ({"count": "often"}, 1),
        ({"metadata": {}}, 1),
    ],
)
def test_odd_answers_are_told_in_one_line(tmp_path: Path, event: Json, code: int) -> None:
    web = instance("web", "node-1")
    web["metadata"]["uid"] = pod_uid()
    metadata = {"resourceVersion": "7", "creationTimestamp": "2026-05-01T11:00:00Z"}
    event = {"metadata": metadata, "message": "\33[2J"} | event
    with stranger(tmp_path) as (server, environment):
        server.will(said(web), said({"metadata": {}, "items": [event]}))
        done = run(*PLUGIN, "status", "web", code=code, environment=environment)
    assert "\33" not in done.stdout
    assert done.stderr.count("\n") == code


def test_an_api_server_that_is_away_is_one_to_try_again(tmp_path: Path) -> None:
    with stranger(tmp_path) as (_, environment):
        pass
    told = run(*PLUGIN, "plan", "web", code=75, environment=environment).stderr
    assert "cannot be reached" in told
    run(*PLUGIN, "plan", "web", "--kubeconfig", "/nowhere", code=78, environment=environment)


def test_it_can_be_interrupted(tmp_path: Path) -> None:
    with stranger(tmp_path) as (server, environment):
        server.then(silent)
        with subprocess.Popen(
            [*PLUGIN, "status", "web"],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        ) as asking:
            assert eventually(lambda: bool(server.asked))
            asking.send_signal(signal.SIGINT)
            _, told = asking.communicate(timeout=PATIENCE)
    assert (asking.returncode, told) == (1, "portranger: interrupted.\n")
