"""What files, directories and standard input become, and that none of them is a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.sources import CODES
from agent.sources.files import MOST_BYTES, STDIN, Other, Snapshot, label, laws_of, load, whole
from rules.fences import Laws

ROOT = Path(__file__).parents[2]

MACHINE = """\
kind: VirtualMachineInstance
metadata: {name: %s}
spec:
  domain:
    devices:
      interfaces:
      - name: red
        masquerade: {}
        portRanges:
        - start: %s
          end: 8000
  networks:
  - name: red
    pod: {}
"""


SERVICE = """\
apiVersion: v1
kind: Service
metadata: {name: %s}
spec:
  selector: {app: web}
  ports:
  - port: %s
"""


POLICY = """\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: %s}
spec:
  podSelector: {}
  ingress: [{ports: [{port: %s}]}]
"""
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: web}}
spec: {containers: []}
status: {podIPs: [{ip: 10.1.0.7}]}
"""
NAMESPACE = """\
apiVersion: v1
kind: Namespace
metadata: {name: %s, labels: {team: a}}
"""


def policy(name: str = "web", port: str = "80") -> str:
    return POLICY % (name, port)


def service(name: str = "web", port: str = "80") -> str:
    return SERVICE % (name, port)


def machine(name: str = "web", start: str = "1000") -> str:
    return MACHINE % (name, start)


def no_stdin() -> bytes:
    raise AssertionError("nobody asked for standard input")


def snapshot(*paths: Path | str, stdin: bytes | None = None) -> Snapshot:
    return load([str(path) for path in paths], no_stdin if stdin is None else lambda: stdin)


def codes(found: Snapshot) -> list[str]:
    return [problem.code for problem in found.problems]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_machine_knows_where_it_is_written(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "---\n# first\n" + machine("a") + "---\n" + machine("b"))
    found = snapshot(file)
    assert [one.origin for one in found.machines] == [f"{file}:3", f"{file}:18"]
    assert (found.count, found.problems, found.skipped) == (2, (), ())


def test_a_service_knows_where_it_is_written_and_has_no_namespace(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", machine("a") + "---\n" + service("b") + "---\n" + service())
    found = load([str(file)], no_stdin, netns="blue")
    assert [(one.name, one.origin) for one in found.services] == [
        ("b", f"{file}:16"),
        ("web", f"{file}:24"),
    ]
    assert [one.netns for one in found.machines] == ["blue"]
    assert (found.count, found.problems, found.skipped) == (3, (), ())


def test_a_pod_is_one_whom_policies_may_speak_of() -> None:
    text = service() + "---\n" + "apiVersion: v1\nkind: Pod\nspec: {containers: []}\n"
    found = snapshot("-", stdin=text.encode())
    assert [(str(pod), pod.origin) for pod in found.laws.pods] == [
        ("Pod/default/unnamed", f"{STDIN}:9")
    ]
    assert (found.count, found.skipped, found.problems) == (2, (), ())


def test_a_problem_knows_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", machine("a") + "---\n" + machine("b", "9000"))
    [problem] = snapshot(file).problems
    assert (problem.code, problem.file, problem.line) == ("end-before-start", str(file), 26)
    assert str(problem).startswith(f"{file}:26: spec.domain.devices.interfaces[0].portRanges[0]")


def test_a_missing_field_has_the_line_of_what_should_hold_it(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", machine().replace("- start: 1000\n          end", "- end"))
    [problem] = snapshot(file).problems
    assert (problem.code, problem.line) == ("missing", 10)


def test_nothing_of_a_file_with_a_problem_is_taken(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.yaml", machine("a") + "---\n" + machine("b", "x"))
    good = write(tmp_path / "good.yaml", machine("c"))
    found = snapshot(bad, good)
    assert [one.name for one in found.machines] == ["c"]
    assert found.count == 3
    assert codes(found) == ["not-an-integer"]


@pytest.mark.parametrize("bad", [machine("b", "x"), service("b", "x"), "[\n"])
def test_neither_machines_nor_services_of_a_file_with_a_problem_are_taken(
    tmp_path: Path, bad: str
) -> None:
    text = machine("a") + "---\n" + service("a") + "---\n" + bad
    one = write(tmp_path / "bad.yaml", text)
    two = write(tmp_path / "good.yaml", service("c"))
    found = snapshot(one, two)
    assert found.machines == ()
    assert [one.name for one in found.services] == ["c"]
    assert len(found.problems) == 1


def test_problems_come_in_the_order_of_their_lines(tmp_path: Path) -> None:
    text = machine("A", "x") + "---\n" + machine("b") + "  networks: []\n---\n[\n"
    found = snapshot(write(tmp_path / "a.yaml", text))
    assert [(one.code, one.line) for one in found.problems] == [
        ("bad-name", 2),
        ("not-an-integer", 10),
        ("yaml-duplicate-key", 30),
        ("yaml-syntax", 33),
    ]


def test_what_the_text_spoils_is_told_once(tmp_path: Path) -> None:
    found = snapshot(write(tmp_path / "a.yaml", machine(start="!!int 1000")))
    assert codes(found) == ["yaml-tag"]


def test_json_is_read_without_yaml(tmp_path: Path) -> None:
    document = {"kind": "VM", "metadata": {"name": "web"}, "spec": {}}
    file = write(tmp_path / "a.json", json.dumps({"kind": "List", "items": [document]}, indent=1))
    script = (
        "import sys; from agent.sources.files import load;"
        f"print([m.origin for m in load([{str(file)!r}], bytes).machines], 'yaml' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == f"['{file}:4'] False"


def test_text_that_only_looks_like_json_is_yaml(tmp_path: Path) -> None:
    assert snapshot(write(tmp_path / "a.json", "{kind: VM, spec: {}}")).count == 1


def test_a_problem_in_json_knows_its_line(tmp_path: Path) -> None:
    text = '{"kind": "VM",\n"spec": 5,\n"kind": "VM"}'
    found = snapshot(write(tmp_path / "a.json", text))
    assert [(one.code, one.line) for one in found.problems] == [
        ("not-a-mapping", 2),
        ("json-duplicate-key", 3),
    ]


def test_other_kinds_are_named_with_their_place(tmp_path: Path) -> None:
    text = "kind: Service\nmetadata: {name: web}\n---\nkind: List\nitems:\n- {kind: Pod}\n"
    file = write(tmp_path / "a.yaml", text)
    assert snapshot(file).skipped == (
        f"{file}:1: Service/web is not read by this version",
        f"{file}:6: Pod is not read by this version",
    )


def test_a_directory_is_the_manifests_directly_in_it(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yaml", "c.json", ".hidden.yaml", "notes.txt"):
        write(tmp_path / name, machine(name.split(".")[0] or "hidden"))
    (tmp_path / "d.yaml").mkdir()
    write(tmp_path / "d.yaml" / "e.yaml", machine("e"))
    assert [one.name for one in snapshot(tmp_path).machines] == ["a", "b", "c"]


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    assert snapshot(tmp_path) == Snapshot()


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", machine())
    assert len(snapshot(tmp_path, file, file).machines) == 1


def test_standard_input_is_a_dash(tmp_path: Path) -> None:
    found = snapshot("-", "-", stdin=machine().encode())
    assert [one.origin for one in found.machines] == [f"{STDIN}:1"]


def test_the_namespace_of_the_caller_is_everybodys(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", machine())
    assert load([str(file)], no_stdin, netns="blue").machines[0].netns == "blue"


@pytest.mark.parametrize("name", ["missing.yaml", "", "a\0b", "a.yaml/b.yaml", "x" * 5000])
def test_what_is_not_there_is_unreadable(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.yaml", machine())
    found = snapshot(f"{tmp_path}/{name}" if name else "")
    assert codes(found) == ["unreadable"]
    assert found.problems[0].line == 0


def test_links_that_lead_nowhere_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert codes(snapshot(tmp_path / "gone.yaml", tmp_path / "loop.yaml")) == ["unreadable"] * 2
    assert "unreadable" in codes(snapshot(tmp_path))


def test_standard_input_that_fails_is_unreadable() -> None:
    def fail() -> bytes:
        raise OSError("no such luck")

    found = load(["-"], fail)
    assert codes(found) == ["unreadable"]
    assert "no such luck" in str(found.problems[0])


def test_a_pipe_or_device_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert codes(snapshot(tmp_path, "/dev/zero")) == ["unreadable"] * 2


def test_what_a_shell_substitutes_is_read() -> None:
    reading, writing = os.pipe()
    text = machine().encode()

    def feed() -> None:
        os.write(writing, text)
        os.close(writing)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        assert len(snapshot(f"/dev/fd/{reading}").machines) == 1
    finally:
        thread.join()
        os.close(reading)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    assert codes(snapshot(large)) == ["too-large"]
    assert codes(snapshot("-", stdin=b" " * (MOST_BYTES + 1))) == ["too-large"]


@pytest.mark.parametrize(
    "content", [b"\x7fELF\0\0", b"a: \xff\n", b"\xff\xfea\0", b"a: \xed\xa0\x80"]
)
def test_what_is_not_text_is_a_problem(content: bytes) -> None:
    assert codes(snapshot("-", stdin=content)) == ["not-text"]


def test_a_byte_order_mark_is_no_problem() -> None:
    assert snapshot("-", stdin=b"\xef\xbb\xbf" + machine().encode()).count == 1


def test_a_name_that_cannot_be_printed_is_printed_all_the_same(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.yaml")
    write(Path(name), "[")
    [problem] = snapshot(name).problems
    assert str(problem).isprintable()


def test_the_same_machine_in_two_places_is_taken_from_neither(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", machine("a"))
    two = write(tmp_path / "2.yaml", machine("b") + "---\n" + machine("a"))
    three = write(tmp_path / "3.yaml", machine("c"))
    found = snapshot(one, two, three)
    assert codes(found) == ["duplicate-machine"] * 2
    assert [problem.place for problem in found.problems] == [f"{one}:1", f"{two}:16"]
    assert f"{two}:16" in found.problems[0].what
    assert f"{one}:1" in found.problems[1].what
    assert [machine.name for machine in found.machines] == ["c"]


def test_the_same_service_in_two_places_is_taken_from_neither(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", machine("a") + "---\n" + service("a"))
    two = write(tmp_path / "2.yaml", service("b") + "---\n" + service("a"))
    three = write(tmp_path / "3.yaml", machine("b") + "---\n" + service("c"))
    found = snapshot(one, two, three)
    assert codes(found) == ["duplicate-service"] * 2
    assert [problem.place for problem in found.problems] == [f"{one}:16", f"{two}:9"]
    assert found.problems[0].what == (f"Service/default/a is written here and at {two}:9")
    assert [machine.name for machine in found.machines] == ["b"]
    assert [service.name for service in found.services] == ["c"]


def test_the_same_service_twice_in_one_file_is_told_at_both(tmp_path: Path) -> None:
    other = service().replace("name: web", "name: web, namespace: other")
    file = write(tmp_path / "a.yaml", "---\n".join([service(), service(port="81"), other]))
    found = snapshot(file)
    assert [problem.place for problem in found.problems] == [f"{file}:1", f"{file}:9"]
    assert codes(found) == ["duplicate-service"] * 2
    assert found.services == ()


# -------------------------------------------------------------------------------------- policies


def test_policies_and_whom_they_speak_of_know_where_they_are_written(tmp_path: Path) -> None:
    parts = [policy(), POD % "a", NAMESPACE % "shop", machine("a")]
    file = write(tmp_path / "a.yaml", "---\n".join(parts))
    found = snapshot(file)
    laws = found.laws
    everything: list[Other] = [*laws.policies, *laws.pods, *laws.namespaces]
    assert [(str(one), one.origin) for one in everything] == [
        ("NetworkPolicy/default/web", f"{file}:1"),
        ("Pod/default/a", f"{file}:8"),
        ("Namespace/shop", f"{file}:14"),
    ]
    assert laws.namespaces[0].labels == (("team", "a"),)
    assert [str(at) for at in laws.pods[0].addresses] == ["10.1.0.7"]
    assert (found.count, found.problems, found.skipped) == (4, (), ())


def test_laws_are_sorted_by_their_kind() -> None:
    found = snapshot("-", stdin=(POD % "a" + "---\n" + policy() + "---\n" + POD % "b").encode())
    pods, policies = found.laws.pods, found.laws.policies
    assert laws_of([pods[0], policies[0], pods[1]]) == Laws(policies=policies, pods=pods)
    assert laws_of([]) == Laws()


@pytest.mark.parametrize("bad", [policy("b", "0"), machine("b", "x"), "[\n"])
def test_no_law_of_a_file_with_a_problem_is_taken(tmp_path: Path, bad: str) -> None:
    """Whoever asks is told of the problem, and nothing is done."""
    text = "---\n".join([policy("a"), POD % "a", NAMESPACE % "a", bad])
    one = write(tmp_path / "bad.yaml", text)
    two = write(tmp_path / "good.yaml", policy("c"))
    found = snapshot(one, two)
    assert [str(law) for law in found.laws.policies] == ["NetworkPolicy/default/c"]
    assert (found.laws.pods, found.laws.namespaces) == ((), ())
    assert len(found.problems) == 1


def test_the_same_policy_in_two_places_is_told_at_both(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", policy("a"))
    two = write(tmp_path / "2.yaml", policy("b") + "---\n" + policy("a", "81"))
    found = snapshot(one, two)
    assert codes(found) == ["duplicate-policy"] * 2
    assert [problem.place for problem in found.problems] == [f"{one}:1", f"{two}:8"]
    assert found.laws == Laws()


def test_the_same_pod_or_namespace_twice_is_no_problem() -> None:
    """As `kubectl get` may list them; whose labels are not the same is nobody's guess."""
    text = "---\n".join([POD % "a", POD % "a", NAMESPACE % "b", NAMESPACE % "b"])
    found = snapshot("-", stdin=text.encode())
    assert (len(found.laws.pods), len(found.laws.namespaces), found.problems) == (2, 2, ())


def test_a_list_of_everything_is_read() -> None:
    documents = [policy(), POD % "a", NAMESPACE % "b"]
    items = "".join("- " + text.replace("\n", "\n  ").rstrip() + "\n" for text in documents)
    found = snapshot("-", stdin=f"kind: List\nitems:\n{items}".encode())
    laws = found.laws
    assert (len(laws.policies), len(laws.pods), len(laws.namespaces)) == (1, 1, 1)
    assert laws.pods[0].origin == f"{STDIN}:9"


def test_every_code_in_use_is_documented() -> None:
    sources = ROOT / "agent" / "sources"
    text = "".join(
        (sources / name).read_text()
        for name in ("files.py", "boundary.py", "yaml_text.py", "json_text.py")
    )
    # Those of duplicates are made of the word for what is written twice.
    assert all(f'"{code.removeprefix("duplicate-")}"' in text for code in CODES)


def test_names_that_differ_are_told_apart_whatever_bytes_they_have(tmp_path: Path) -> None:
    odd = [b"\xe4", b"\xf6", b"\\xe4", "ä".encode(), b"\n", b"\\n"]
    labels = {label(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)) for name in odd}
    assert len(labels) == len(odd)
    assert all(one.isprintable() for one in labels)


def test_what_would_have_us_wait_is_not_read() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        with os.fdopen(reading, "rb") as file, pytest.raises(BlockingIOError):
            whole(file)
    finally:
        os.close(writing)
