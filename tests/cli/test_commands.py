"""The command line as its users and their scripts know it: words, JSON and exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli import run
from agent.entry import dry_run, guarded

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
DESKTOP = str(EXAMPLES / "desktop.yaml")

Answer = tuple[int, str, str]
Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run a command line in this process: exit code, output, diagnostics."""
    monkeypatch.chdir(ROOT)

    def asked(*arguments: str) -> Answer:
        code = guarded(lambda: run(arguments))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return asked


def portranger(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "agent.entry", *arguments]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_valid_manifests_are_counted(ask: Ask) -> None:
    code, out, _ = ask("validate", "-f", str(EXAMPLES))
    count = len(list(EXAMPLES.glob("*.yaml")))
    assert (code, out) == (0, f"{count} manifests, all valid\n")


def test_every_problem_is_told_at_once(ask: Ask, tmp_path: Path) -> None:
    bad = Path(DESKTOP).read_text().replace("8000", "80000").replace("UDP", "SCTP")
    Path(tmp_path, "bad.yaml").write_text(bad)
    code, out, err = ask("validate", "-f", str(tmp_path))
    assert code == 65
    assert out == ""
    assert err.count("[port-out-of-range]") == 2
    assert err.count("[bad-protocol]") == 1
    assert f"{tmp_path}/bad.yaml:16: spec.template" in err


def test_a_plan_in_json_has_the_promised_shape(ask: Ask) -> None:
    code, out, _ = ask("plan", "--against", "empty", "-o", "json", "-f", DESKTOP)
    plan = json.loads(out)
    assert code == 0
    assert plan["format_version"] == "1.0"
    assert plan["summary"] == {"add": 10, "change": 4, "remove": 0, "unchanged": 0}
    assert (plan["problems"], plan["pending"]) == ([], [])
    rules = [change for change in plan["changes"] if "kind" not in change]
    assert {
        "action": "add",
        "netns": "desktop",
        "before": None,
        "after": {
            "owner": "VirtualMachine/default/desktop/red",
            "chain": "prerouting",
            "family": "ip",
            "action": "dnat",
            "protocol": "udp",
            "ports": "1000-8000",
            "interface": "eth0",
            "to": "10.0.2.2",
        },
    } in rules
    assert {change["kind"] for change in plan["changes"] if "kind" in change} == {"sysctl"}


@pytest.mark.parametrize("words", [("validate",), ("plan", "--against", "empty"), ("explain",)])
def test_a_path_that_is_not_there_is_as_bad_as_what_could_be_in_it(
    ask: Ask, tmp_path: Path, words: tuple[str, ...]
) -> None:
    asked = ("tcp/22",) if words == ("explain",) else ()
    code, out, err = ask(*words, "-f", f"{tmp_path}/none.yaml", *asked)
    assert (code, out) == (65, "")
    assert f"{tmp_path}/none.yaml: cannot be read" in err


def test_problems_are_in_the_json_of_a_plan(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    path.write_text(Path(DESKTOP).read_text().replace("end: 8000", "end: 70000", 1))
    code, out, _ = ask("plan", "--against", "empty", "-o", "json", "-f", str(path))
    plan = json.loads(out)
    assert code == 65
    assert (plan["changes"], plan["pending"]) == ([], [])
    assert plan["problems"] == [
        {
            "file": str(path),
            "line": 16,
            "field": "spec.template.spec.domain.devices.interfaces[0].portRanges[0].end",
            "problem": "is not a port number",
            "fix": "Write a number from 1 to 65535.",
            "code": "port-out-of-range",
            "value": 70000,
        }
    ]


def test_detailed_exit_code_tells_of_changes(ask: Ask) -> None:
    assert ask("plan", "--against", "empty", "-f", DESKTOP)[0] == 0
    assert ask("plan", "--against", "empty", "--detailed-exitcode", "-f", DESKTOP)[0] == 2


def test_the_same_machine_twice_is_a_conflict_that_names_both(ask: Ask, tmp_path: Path) -> None:
    text = Path(DESKTOP).read_text()
    other = tmp_path / "other.yaml"
    other.write_text(text.replace("name: desktop", "name: laptop"))
    code, _, err = ask(
        "plan", "--against", "empty", "--netns", "x", "-f", DESKTOP, "-f", str(other)
    )
    assert code == 65
    assert "VirtualMachine/default/desktop/red" in err
    assert "VirtualMachine/default/laptop/red" in err
    assert err.count("[conflict]") == 2


def test_what_is_not_ours_is_named_with_the_reason(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    text = Path(DESKTOP).read_text().replace("masquerade", "bridge")
    path.write_text(
        text[: text.index("              portRanges")] + text[text.index("      networks") :]
    )
    code, out, _ = ask("plan", "--against", "empty", "-f", str(path))
    assert code == 0
    assert "No changes. 0 rules match." in out
    assert "not ours: VirtualMachine/default/desktop/red: bridge" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["plan"],
        ["plan", "-f", DESKTOP, "--against", "moon"],
        ["explain", "tcp/1"],
        ["explain", "-f", DESKTOP, "--live", "tcp/1"],
        ["explain", "-f", DESKTOP, "icmp/1"],
        ["explain", "-f", DESKTOP, "tcp/0"],
        ["explain", "-f", DESKTOP, "tcp/٣"],
        ["explain", "-f", DESKTOP, "tcp/99999999999999999999"],
        ["explain", "-f", DESKTOP, "tcp/80", "--from", "somewhere"],
        ["plan", "--against", "empty", "-o", "nft", "-f", str(EXAMPLES)],
    ],
    ids=" ".join,
)
def test_a_senseless_command_line_is_a_usage_error(ask: Ask, arguments: list[str]) -> None:
    code, out, err = ask(*arguments)
    assert code == 64
    assert out == ""
    assert err.strip()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["tcp/1000"], "goes to 10.0.2.2:1000, by the rule for tcp 1000-8000"),
        (["tcp/1000"], "goes to [fd10:0:2::2]:1000"),
        (["udp/8001"], "is not forwarded: no range holds it (the nearest declared is 1000-8000)"),
        (["tcp/80", "--from", "127.0.0.1"], "to 127.0.0.1 from inside the namespace: is not"),
        (["tcp/80", "--from", "10.0.2.2"], "leaves with the address of the link"),
    ],
    ids=str,
)
def test_explain_answers_in_words(ask: Ask, arguments: list[str], answer: str) -> None:
    code, out, _ = ask("explain", "-f", DESKTOP, *arguments)
    assert code == 0
    assert answer in out


@pytest.mark.parametrize("form", [[], ["-o", "json"], ["-o", "text"]], ids=str)
def test_the_quick_dry_run_answers_as_the_command_line_does(
    ask: Ask, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    arguments = ["plan", "--against", "empty", "-f", DESKTOP, "-f", str(EXAMPLES), *form]
    quick = dry_run(arguments)
    assert quick is not None
    code = guarded(quick)
    printed = capsys.readouterr()
    assert ask(*arguments) == (code, printed.out, printed.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "-f", DESKTOP],
        ["plan", "--against", "live", "-f", DESKTOP],
        ["plan", "--against", "empty"],
        ["plan", "--against", "empty", "-f"],
        ["plan", "--against", "empty", "-f", DESKTOP, "-o", "yaml"],
        ["plan", "--against", "empty", "-f", DESKTOP, "--help"],
        ["validate", "-f", DESKTOP],
        [],
    ],
    ids=str,
)
def test_whatever_is_not_plain_goes_to_the_command_line(arguments: list[str]) -> None:
    assert dry_run(arguments) is None


def test_the_dry_run_loads_no_library_of_the_kernel() -> None:
    code = (
        "import sys, agent.entry as e;"
        f"e.guarded(e.dry_run(['plan', '--against', 'empty', '-f', {DESKTOP!r}]));"
        "print(sorted({'pyroute2', 'nftables', 'click', 'inspect'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"[]"


def test_standard_input_is_a_source() -> None:
    done = portranger("validate", "-f", "-", input=Path(DESKTOP).read_text())
    assert (done.returncode, done.stdout) == (0, "1 manifests, all valid\n")


def test_a_reader_who_leaves_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m agent.entry plan --against empty -f {DESKTOP} | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("options", "environment", "colored"),
    [
        ([], {}, False),
        (["--color=always"], {"NO_COLOR": "1"}, True),
        (["--color"], {"TERM": "dumb"}, True),
        (["--color", "never"], {}, False),
    ],
    ids=str,
)
def test_colour_is_decided_by_the_option_first(
    options: list[str], environment: dict[str, str], colored: bool
) -> None:
    arguments = ["plan", "--against", "empty", *options, "-f", DESKTOP]
    done = portranger(*arguments, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert ("\033[32m" in done.stdout) is colored


def test_every_command_has_help(ask: Ask) -> None:
    code, out, _ = ask("--help")
    assert code == 0
    for command in ("validate", "plan", "apply", "show", "explain", "clear", "demo"):
        assert command in out
        assert ask(command, "--help")[0] == 0
