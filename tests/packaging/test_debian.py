"""The Debian package: the same wherever it is built, the same as `make install`, and gone when it
is purged. It is installed into a Debian that debootstrap made, booted and not."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.building import Built
from tests.spaces import ROOT, run
from tests.systemd.machine import Machine, started
from tests.systemd.service import CONFIGURATION, MANIFESTS, Service
from tests.systemd.trees import SOURCE, bare, stage

pytestmark = pytest.mark.needs_root

PACKAGE = "/var/tmp/portranger.deb"  # noqa: S108 - in a machine of our own
NEWER = "/var/tmp/newer.deb"  # noqa: S108
ONLY_IN_PACKAGE = re.compile(r"usr/share/(doc/portranger/(?!examples)|lintian)")
TOOLS = re.compile(
    r"/portranger/\.(pins|directories)|/bin/pip|/site-packages/((pip|setuptools|_distutils_hack)(/|-\d|$)|distutils-precedence)"
)
# What dpkg, systemd and man-db write for themselves, whatever is installed.
THEIRS = re.compile(r"/(dev|proc|run|sys|tmp|var/(cache|log|tmp|lib/(dpkg|systemd)))(/|$)")


@pytest.fixture(scope="module")
def machine(built: Built) -> Iterator[Machine]:
    """A machine that has the package at hand."""
    with stage(bare()) as made, started(made) as machine:
        name = "package.deb"
        run("cp", built.package, made.source / name)
        machine.run("cp", f"{SOURCE}/{name}", PACKAGE)
        yield machine


@pytest.fixture
def installed(machine: Machine) -> Iterator[Machine]:
    """With the package installed as new, until the test ends."""
    machine.run("dpkg", "--install", PACKAGE)
    try:
        yield machine
    finally:
        machine.run("dpkg", "--purge", "portranger")
        machine.run("ip", "-all", "netns", "delete")


def contents(tree: Path) -> dict[str, str]:
    """Every path in a tree, with its mode and what is in it; manuals as they are unpacked."""
    found: dict[str, str] = {}
    for path in tree.rglob("*"):
        name, mode = str(path.relative_to(tree)), oct(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = f"{mode} {path.readlink()}"
        elif path.is_dir():
            found[name] = mode
        else:
            content = path.read_bytes()
            if "/man/" in name and name.endswith(".gz"):
                name, content = name.removesuffix(".gz"), gzip.decompress(content)
            found[name] = f"{mode} {content!r}"
    return found


def everything(machine: Machine) -> set[str]:
    """Every path of the machine with its mode and size, but for what others write."""
    lines = machine.says("find", "/", "-xdev", "-printf", r"%p %m %y%s\n").splitlines()
    kept = (line for line in lines if not THEIRS.match(line.split(" ")[0]))
    # A directory's size is that of its file system's bookkeeping.
    return {re.sub(r" d\d+$", " d", line) for line in kept}


# ------------------------------------------------------------------------------ how it is built


def test_it_is_the_same_wherever_it_is_built(built: Built) -> None:
    assert built.package.name == built.again.name
    assert built.package.read_bytes() == built.again.read_bytes()


def test_it_holds_what_make_install_puts_there(built: Built, tmp_path: Path) -> None:
    run("dpkg-deb", "--extract", built.package, tmp_path)
    packed = {
        name: told for name, told in contents(tmp_path).items() if not ONLY_IN_PACKAGE.match(name)
    }
    put = {
        name: told for name, told in contents(built.tree).items() if not TOOLS.search(f"/{name}")
    }
    assert packed.keys() == put.keys()
    assert {name for name in put if put[name] != packed[name]} == set()


def test_it_names_no_place_where_it_was_built(built: Built, tmp_path: Path) -> None:
    run("dpkg-deb", "--raw-extract", built.package, tmp_path / "raw")
    places = ("-e", "/tmp/", "-e", SOURCE, "-e", "portranger.new", "-e", "direct_url")  # noqa: S108
    ours = [path for path in (tmp_path / "raw").rglob("*") if path.name in ("RECORD", "pyvenv.cfg")]
    scripts = list((tmp_path / "raw/usr/lib/portranger/bin").glob("*portranger"))
    assert scripts
    assert run("grep", "-lF", *places, *ours, *scripts, code=1).stdout == ""


def test_it_needs_the_python_that_it_was_built_for(built: Built, tmp_path: Path) -> None:
    depends = run("dpkg-deb", "--field", built.package, "Depends").stdout
    [minor] = re.findall(r"python3 \(>= 3\.(\d+)~\)", depends)
    assert f"python3 (<< 3.{int(minor) + 1}~)" in depends
    assert "libnftables1" in depends
    run("dpkg-deb", "--extract", built.package, tmp_path)
    assert (tmp_path / f"usr/lib/portranger/lib/python3.{minor}/site-packages/agent").is_dir()


def test_it_says_for_which_debian_it_is(built: Built, tmp_path: Path) -> None:
    version = run("dpkg-deb", "--field", built.package, "Version").stdout.strip()
    assert re.fullmatch(r"[\d.]+-\d+~deb\d+", version)
    assert f"_{version}_" in built.package.name
    run("dpkg-deb", "--extract", built.package, tmp_path)
    changes = tmp_path / "usr/share/doc/portranger/changelog.Debian.gz"
    assert gzip.decompress(changes.read_bytes()).startswith(f"portranger ({version}) ".encode())


def test_building_it_warns_of_nothing(built: Built) -> None:
    assert "Warning" not in built.told


# ------------------------------------------------------------------------------- how it is used


def test_it_works_and_waits_until_it_is_told_to_start(installed: Machine) -> None:
    assert installed.says("portranger", "--version").startswith("portranger, version ")
    text = (ROOT / "examples/desktop.yaml").read_text()
    told = installed.run("portranger", "validate", "-f", "-", stdin=text).stdout
    assert told == "1 manifests, all valid\n"
    for page in ROOT.glob("docs/*.[1-9]"):
        section, name = page.suffix[1:], page.stem
        assert installed.says("man", "-w", section, name).endswith(f"man{section}/{page.name}.gz")
    for path in (
        "bash-completion/completions/portranger",
        "zsh/vendor-completions/_portranger",
        "fish/vendor_completions.d/portranger.fish",
    ):
        installed.run("test", "-s", f"/usr/share/{path}")
    installed.run("portranger", "validate", "-f", "/usr/share/doc/portranger/examples/desktop.yaml")
    assert installed.run("systemctl", "is-enabled", "portranger", code=1).stdout == "disabled\n"
    assert installed.run("systemctl", "is-active", "portranger", code=3).stdout == "inactive\n"


def test_an_upgrade_restarts_what_runs_and_keeps_what_was_edited(installed: Machine) -> None:
    service = Service(installed)
    service.declare("red", "1000-8000/udp")
    service.wire("red")
    installed.run("sh", "-c", f"echo '# mine' >>{CONFIGURATION}")
    service.start()
    assert service.becomes_synced("red")
    before, rules = service.pid(), service.rules("red")
    installed.run("sh", "-c", repacked("0.1.0-2"))
    told = installed.run("dpkg", "--install", NEWER, code=None)
    assert told.returncode == 0, told.stderr
    assert service.pid() not in (0, before)
    assert service.becomes_synced("red")
    assert service.rules("red") == rules
    assert installed.says("tail", "-n1", CONFIGURATION) == "# mine"


def repacked(version: str) -> str:
    """What makes a package of another version of the one at hand."""
    return f"""
        set -e
        dpkg-deb --raw-extract {PACKAGE} /var/tmp/newer
        sed -i 's/^Version: .*/Version: {version}/' /var/tmp/newer/DEBIAN/control
        dpkg-deb -Znone --build /var/tmp/newer {NEWER}
        rm -r /var/tmp/newer
    """


def test_removing_it_keeps_the_configuration_and_the_rules(installed: Machine) -> None:
    service = Service(installed)
    service.declare("red", "1000-8000/udp")
    service.wire("red")
    installed.run("systemctl", "enable", "--now", "--quiet", "portranger")
    assert service.becomes_synced("red")
    told = installed.says("dpkg", "--remove", "portranger")
    assert re.search("`portranger clear` before .* package nftables", told.replace("\n", " "))
    assert service.forwards("red", 5000)
    installed.run("test", "-e", CONFIGURATION, "-a", "-e", f"{MANIFESTS}/red.yaml")
    installed.run("test", "!", "-e", "/usr/lib/portranger")
    assert installed.says("find", "/etc/systemd/system", "-name", "portranger*") == ""


def test_purging_it_while_it_runs_leaves_nothing(machine: Machine) -> None:
    machine.run("dpkg", "--purge", "portranger", code=None)
    before = everything(machine)
    machine.run("dpkg", "--install", PACKAGE)
    assert any("/usr/lib/portranger " in line for line in everything(machine) - before)
    service = Service(machine)
    service.declare("red", "22")
    service.wire("red")
    try:
        machine.run("systemctl", "enable", "--now", "--quiet", "portranger")
        assert service.becomes_synced("red")
        machine.run("dpkg", "--purge", "portranger")
    finally:
        machine.run("ip", "-all", "netns", "delete")
    assert everything(machine) ^ before == set()
    units = machine.says(
        "systemctl", "list-units", "--all", "--plain", "--no-legend", "portranger*"
    )
    assert units == ""


def test_it_comes_and_goes_where_no_systemd_runs(built: Built) -> None:
    """As where an image is made."""
    script = f"""
        set -e
        find / -xdev -not -path '/var/*' -not -path '{SOURCE}*' | sort >/var/before
        dpkg --install package.deb >/dev/null
        portranger --version
        dpkg --purge portranger >/dev/null
        find / -xdev -not -path '/var/*' -not -path '{SOURCE}*' | sort | diff /var/before -
        test ! -e /var/lib/portranger
    """
    with stage(bare()) as made:
        run("cp", built.package, made.source / "package.deb")
        assert "version" in made.says(script)
