"""The promises of the project's own files: architecture, package contents, and skips in CI."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.trixie import EXPECTED, skipped, summary

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent", "rules")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and their configuration, to do harm to."""
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts in a tree that is found before the installed one."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else '"""Made up."""\n'
    path.write_text(f"{text}\n{line}\n")


def test_the_import_contracts_hold(tree: Path) -> None:
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("rules/ports.py", "import os", "rules is pure"),
        ("rules/ports.py", "from pathlib import Path", "rules is pure"),
        ("rules/manifests/fresh.py", "import time", "rules is pure"),
        ("rules/plan.py", "import agent.errors", "rules is pure"),
        ("rules/plan.py", "import yaml", "rules is pure"),
        ("agent/sources/fresh.py", "import agent.kernel", "cli > demo"),
        ("agent/kernel/fresh.py", "import agent.sources", "cli > demo"),
        ("agent/kernel/fresh.py", "import agent.reconcile", "cli > demo"),
        ("agent/reconcile.py", "import agent.cli", "cli > demo"),
        (
            "agent/reconcile.py",
            "import click",
            "click is imported by agent.cli and its options only",
        ),
        ("agent/reconcile.py", "import nftables", "nftables is imported by"),
        ("agent/kernel/nftables.py", "import pyroute2.netns", "pyroute2 is imported by"),
        ("agent/sources/files.py", "import yaml", "yaml is imported by"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(
    tree: Path, module: str, line: str, contract: str
) -> None:
    for needed in ("agent/errors.py", "agent/reconcile.py", "agent/cli.py"):
        append(tree / needed, "")
    append(tree / module, line)
    result = lint_imports(tree)
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(text.startswith(contract) for text in broken), result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("agent/cli.py", "import click"),
        ("agent/entry.py", "import agent.cli"),
        ("agent/kernel/libnftables_worker.py", "import nftables"),
        ("agent/kernel/lab.py", "import pyroute2"),
        ("agent/demo.py", "import agent.kernel.lab, agent.reconcile"),
        ("agent/sources/yaml_text.py", "import yaml"),
        ("agent/kernel/fresh.py", "import rules.ports, agent.errors"),
    ],
)
def test_an_allowed_import_breaks_nothing(tree: Path, module: str, line: str) -> None:
    for needed in ("errors.py", "reconcile.py", "cli.py", "kernel/lab.py"):
        append(tree / "agent" / needed, "")
    append(tree / module, line)
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_imports_the_standard_library_and_itself() -> None:
    # The contract names what it forbids; a third party it does not know would slip through.
    strangers = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "rules").rglob("*.py")
        for name in imported_packages(path)
        if name != "rules" and name not in sys.stdlib_module_names
    }
    assert not strangers


def imported_packages(path: Path) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_the_wheel_holds_the_two_packages_and_nothing_else(tree: Path) -> None:
    for stray in ("tests", "bench", "agents"):
        append(tree / stray / "__init__.py", "")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "-w", "out"], cwd=tree, check=True, timeout=120)
    (wheel,) = (tree / "out").glob("portranger-*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == set(PACKAGES)


SKIPS = """
import pytest

from tests.trixie import EXPECTED, skipped, summary

def test_runs():
    pass

@pytest.mark.skip(reason="marked")
def test_marked():
    pass

def test_called():
    pytest.skip("called")

@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    raise AssertionError
"""


def run_pytest(
    folder: Path, *options: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    outside = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=outside | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("ci", ["", "false", "0"])
def test_a_skip_is_no_failure_outside_ci(tmp_path: Path, ci: str) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    result = run_pytest(tmp_path, environment={"CI": ci})
    assert result.returncode == 0, result.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in result.stdout


@pytest.mark.parametrize(
    ("options", "environment"), [((), {"CI": "true"}), (("--forbid-skips",), {})]
)
def test_a_skip_is_a_failure_in_ci(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    result = run_pytest(tmp_path, *options, environment=environment)
    assert result.returncode == 1, result.stdout
    assert "test_skips.py::test_marked: no test may be skipped in this run" in result.stdout
    assert "Skipped: called" in result.stdout
    assert "1 passed, 1 xfailed" in result.stdout


def test_a_skipped_module_is_a_failure_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_thing')\n"
    )
    assert run_pytest(tmp_path, environment={"CI": "true"}).returncode != 0


def test_folders_that_need_root_are_skipped_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "netns"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_it():\n    pass\n")
    (folder / "conftest.py").write_text("import os\nos.geteuid = lambda: 1000\n")
    result = run_pytest(tmp_path, environment={})
    assert result.returncode == 0, result.stdout
    assert "needs root" in result.stdout
    assert "1 skipped" in result.stdout


def test_what_is_skipped_on_debian_13_is_counted_by_reason() -> None:
    output = (
        "SKIPPED [77] tests/spaces.py:225: no iptables backend: python-iptables (udp {'a': 'b'})\n"
        "SKIPPED [3] tests/netns/test_script.py:124: no iptables backend: python-iptables"
        " (udp {'a': 'b'})\n"
        "SKIPPED [1] tests/conftest.py:48: needs root\n"
        "2 failed, 507 passed, 81 skipped in 592.83s (0:09:52)\n"
    )
    known = "no iptables backend: python-iptables (udp {'a': 'b'})"
    assert skipped(output) == {known: 80, "needs root": 1}
    assert known.startswith(EXPECTED)
    assert summary(output) == "2 failed, 507 passed, 81 skipped"
    assert summary("") == "no result"
