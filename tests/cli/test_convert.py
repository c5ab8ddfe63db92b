"""`portranger convert`, and what the other commands say of Services and Pods."""

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli import run
from agent.commands.convert import convert
from agent.console import Console
from agent.entry import guarded
from agent.sources import yaml_text
from tests.spaces import ROOT

SERVICE = """\
# The telephone exchange.
apiVersion: v1
kind: Service
metadata:
  name: exchange
  annotations:
    portrange.alpha.kubernetes.io/port-end-sip: "5062"
spec:
  type: NodePort
  ports:
    - name: sip   # signalling
      port: 5060
      targetPort: 7060
      nodePort: 30060
      protocol: UDP
"""
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: exchange}
spec:
  containers:
    - name: a
      ports: [{containerPort: 80}]
"""
SINGLE = """\
# The telephone exchange.
apiVersion: v1
kind: Service
metadata:
  name: exchange
spec:
  type: NodePort
  ports:
    - name: sip0   # signalling
      port: 5060
      targetPort: 7060
      nodePort: 30060
      protocol: UDP
    - name: sip1
      port: 5061
      targetPort: 7061
      nodePort: 30061
      protocol: UDP
    - name: sip2
      port: 5062
      targetPort: 7062
      nodePort: 30062
      protocol: UDP
"""

Answer = tuple[int, str, str]
Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command line in this process: exit code, output, diagnostics."""

    def asked(*arguments: object) -> Answer:
        code = guarded(lambda: run([*map(str, arguments)]))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return asked


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return path


def test_a_service_becomes_single_ports(ask: Ask, service: Path) -> None:
    assert ask("convert", "-f", service, "--to", "ports") == (0, SINGLE, "")


@pytest.mark.parametrize("to", ["annotations", "ranges"])
def test_single_ports_become_a_range_again(ask: Ask, service: Path, to: str) -> None:
    service.write_text(SINGLE)
    assert ask("convert", "-f", service, "--to", to) == (0, SERVICE, "")
    assert service.read_text() == SINGLE


def test_standard_input_is_converted() -> None:
    out, err = io.StringIO(), io.StringIO()
    code = convert(["-"], Console(out, err, SERVICE.encode), to="ports")
    assert (code, out.getvalue(), err.getvalue()) == (0, SINGLE, "")


def test_several_files_become_several_documents_and_json_among_them_yaml(
    ask: Ask, service: Path
) -> None:
    other = service.with_name("another.json")
    other.write_text(json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "b\tc"}}))
    code, out, err = ask("convert", "-f", service.parent, "--to", "ports")
    assert code == 0
    assert out == f'apiVersion: v1\nkind: ConfigMap\ndata:\n  a: "b\\tc"\n---\n{SINGLE}'
    assert err == f"{other}: ConfigMap is not read by this version, and left as it is\n"


def test_one_file_of_json_stays_json(ask: Ask, service: Path) -> None:
    [(document, _)], _ = yaml_text.parse(SERVICE)
    path = service.with_suffix(".json")
    path.write_text(json.dumps(document, indent=4))
    code, out, _ = ask("convert", "-f", path, "--to", "ports")
    [(single, _)], _ = yaml_text.parse(SINGLE)
    assert (code, out) == (0, json.dumps(single, indent=4) + "\n")


def test_a_bad_manifest_is_answered_with_every_problem_and_nothing_else(
    ask: Ask, service: Path
) -> None:
    service.write_text(SERVICE.replace('"5062"', '"5059"').replace("30060", "70000"))
    code, out, err = ask("convert", "-f", service, "-f", "/nowhere", "--to", "ports")
    assert (code, out) == (65, "")
    assert f"{service}:7: metadata.annotations[" in err
    assert err.count("[end-before-start]") == 1
    assert f"{service}:14: spec.ports[0].nodePort: is not a port number (it is 70000)" in err
    assert "/nowhere: cannot be read" in err
    assert err.endswith("3 problems in 1 manifest.\n")


@pytest.mark.parametrize("arguments", [["-f", "x"], ["--to", "ports"], ["-f", "x", "--to", "nft"]])
def test_a_senseless_command_line_is_a_usage_error(ask: Ask, arguments: list[str]) -> None:
    code, out, err = ask("convert", *arguments)
    assert (code, out) == (64, "")
    assert err


@pytest.mark.parametrize("depth", [50, 700, 960, 5000])
def test_a_text_that_is_nested_deeply_is_left_as_it_is_or_refused(
    ask: Ask, service: Path, depth: int
) -> None:
    path = service.with_name("deep.json")
    text = '{"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 1}]}, "x":%s}\n'
    path.write_text(text % ("[" * depth + "]" * depth))
    code, out, err = ask("convert", "-f", path, "--to", "ports")
    if code or depth > 1000:  # how deep Python goes is a matter of its version
        assert depth > 50
        assert (code, out) == (65, "")
        assert "deep" in err
    else:
        assert (out, err) == (path.read_text(), "")


def test_the_examples_come_back_to_what_they_mean(ask: Ask, tmp_path: Path) -> None:
    """What is forwarded does not depend on the spelling."""
    for example in sorted((ROOT / "examples").glob("*.yaml")):
        plans = set()
        for to in ("ports", "annotations", "ranges"):
            code, out, err = ask("convert", "-f", example, "--to", to)
            assert (code, err) == (0, "")
            path = tmp_path / f"{to}-{example.name}"
            path.write_text(out)
            code, out, _ = ask("plan", "--against", "empty", "-f", path)
            assert code == 0
            plans.add(out)
        assert len(plans) == 1


def test_services_and_pods_are_validated_and_counted(ask: Ask, service: Path) -> None:
    pod = service.with_name("a.yaml")
    pod.write_text(POD)
    code, out, err = ask("validate", "-f", service.parent)
    assert (code, out, err) == (0, "2 manifests, all valid\n", "")
    pod.write_text(POD.replace("80", "0"))
    code, _, err = ask("validate", "-f", service.parent)
    assert code == 65
    assert "1 problem in 2 manifests." in err


def test_a_service_is_a_plan_s_business_and_never_skipped(ask: Ask, service: Path) -> None:
    assert ask("plan", "--against", "empty", "-f", service)[::2] == (0, "")


SCRAPS = [
    "\t",
    ": ",
    "- ",
    "*a",
    "&a ",
    "<<: *a",
    "{",
    "]",
    '"',
    "0o17",
    "  ",
    "#",
    "|",
    "~",
    "---\n",
]


def test_no_text_makes_it_fail_otherwise_than_it_says() -> None:
    chance = random.Random(4)
    codes: Counter[int] = Counter()
    for number in range(600):
        lines = (SERVICE, SINGLE, POD)[number % 3].splitlines(keepends=True)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(lines))
            place = chance.randrange(len(lines[at]) + 1)
            damage = chance.randrange(4)
            if damage == 0:
                lines[at] = lines[at][:place] + chance.choice(SCRAPS) + lines[at][place:]
            elif damage == 1:
                lines.insert(at, chance.choice(lines))
            elif damage == 2:
                lines[at] = lines[at].replace("0", chance.choice("0123456789"), 1)
            elif len(lines) > 1:
                del lines[at]
        out, err = io.StringIO(), io.StringIO()
        content = "".join(lines).encode()
        to = chance.choice(["ports", "annotations", "ranges"])
        code = convert(["-"], Console(out, err, lambda content=content: content), to=to)  # type: ignore[misc]
        codes[code] += 1
        assert bool(code) != bool(out.getvalue())
        if not code:
            assert yaml_text.parse(out.getvalue())[1] == []
    assert set(codes) == {0, 65}
    assert min(codes.values()) > 60
