"""The Vagrantfile: Vagrant takes it, it says what the README says, and what it names is there.

No machine is booted here: that takes a hypervisor, and boxes and images from the network.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.readme import README
from tests.spaces import ROOT, run

VAGRANTFILE = ROOT / "Vagrantfile"


def steps() -> list[str]:
    """The commands that provision the machines."""
    scripts = re.findall(r"<<~SHELL\n(.*?)\n *SHELL\n", VAGRANTFILE.read_text(), re.DOTALL)
    return [line.strip() for script in scripts for line in script.splitlines()]


def targets() -> list[str]:
    return [step.removeprefix("make ") for step in steps() if step.startswith("make ")]


def documented(heading: str) -> list[str]:
    """The commands in the first block below a heading of the README, without their comments."""
    section = README.read_text().partition(f"\n## {heading}\n")[2]
    block = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert block, heading
    return [line.partition("#")[0].strip() for line in block[0].splitlines()]


def installable(package: str) -> bool:
    """Whether apt could install it here."""
    return (
        bool(shutil.which("apt-cache"))
        and run("apt-cache", "show", package, code=None).returncode == 0
    )


def test_vagrant_finds_it_valid(tmp_path: Path) -> None:
    if not shutil.which("vagrant"):
        if not installable("vagrant"):
            pytest.xfail("there is no vagrant here, and apt has none to install")
        pytest.skip("needs vagrant (Debian: vagrant)")
    folders = {
        "VAGRANT_HOME": str(tmp_path / "home"),
        "VAGRANT_DOTFILE_PATH": str(tmp_path / "dot"),
    }
    # What a provider takes is known to the plugin of that provider only.
    done = run(
        *("vagrant", "validate", "--ignore-provider"),
        environment=folders | {"VAGRANT_CHECKPOINT_DISABLE": "1", "VAGRANT_CWD": str(ROOT)},
    )
    assert "validated successfully" in done.stdout


def test_what_it_downloads_is_pinned() -> None:
    text = VAGRANTFILE.read_text()
    assert text.count("vm.box =") == text.count("vm.box_version =") == 1
    rule = "print-pins:; @echo $(K3S) $(KUBEVIRT)"
    k3s, kubevirt = run("make", "--silent", f"--eval={rule}", "print-pins").stdout.split()
    assert re.fullmatch(r"v\d+\.\d+\.\d+\+k3s\d+", k3s)
    assert re.fullmatch(r"v\d+\.\d+\.\d+", kubevirt)


def test_its_machines_are_made_by_targets_of_make() -> None:
    assert targets() == ["install", "cluster", "deploy"]
    for target in targets():
        script = run("make", "--dry-run", target).stdout
        run("bash", "-n", stdin=script)


def test_every_file_that_it_names_is_in_the_repository() -> None:
    named = [word for step in steps() for word in step.split() if re.match(r"[\w.]+/\w", word)]
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path


def test_bare_metal_is_installed_and_tried_as_the_readme_says() -> None:
    missing = [step for step in documented("On bare metal") if step not in steps()]
    assert not missing


def test_the_image_has_the_name_that_the_daemonset_asks_for() -> None:
    rule = "print-image:; @echo $(IMAGE)"
    image = run("make", "--silent", f"--eval={rule}", "print-image").stdout.strip()
    kustomization = (ROOT / "kubernetes" / "base" / "kustomization.yaml").read_text()
    pairs = dict(re.findall(r"(newName|newTag): (\S+)", kustomization))
    assert image == f"docker.io/library/{pairs['newName']}:{pairs['newTag']}"
