"""What `make install` puts into a machine, and what `make uninstall` leaves of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spaces import run
from tests.systemd.machine import Machine, booted, why_not
from tests.systemd.service import CONFIGURATION, MANIFESTS, Service
from tests.systemd.trees import SOURCE, installed, network

ENVIRONMENT = "/usr/local/lib/portranger"
SHIPPED = "/usr/local/share/portranger/portranger.toml"
PACKAGED_UNIT = "/usr/lib/systemd/system/portranger.service"
STAGED = ("PREFIX=/opt/ranger", "DESTDIR=/stage")
EXAMPLES = "/usr/local/share/doc/portranger/examples"
MANUAL = "/usr/local/share/man/man8/portranger.8"


@pytest.fixture(scope="module")
def own() -> Iterator[Machine]:
    """A machine that may be harmed."""
    if reason := why_not():
        pytest.skip(reason)
    with booted() as made:
        yield made


def make(machine: Machine, *words: str, code: int = 0) -> str:
    """What make says to these words in the clone."""
    done = machine.run("make", "--silent", "-C", SOURCE, *words, code=code)
    return done.stdout + done.stderr


def files(machine: Machine, *folders: str) -> list[str]:
    """Every path below these, with the time of its last change."""
    return machine.says("find", *folders, "-printf", r"%p %T@\n").splitlines()


def test_nothing_names_the_place_where_it_was_built(machine: Machine) -> None:
    # The tree was installed with DESTDIR=/elsewhere first, then without.
    places = ("-e", "/elsewhere", "-e", "portranger.new", "-e", SOURCE)
    assert machine.run("grep", "-rlaF", *places, "/usr/local", code=1).stdout == ""
    assert (
        machine.says("head", "-n1", f"{ENVIRONMENT}/bin/portranger")
        == f"#!{ENVIRONMENT}/bin/python"
    )


def test_nothing_is_left_to_compile_at_the_start(machine: Machine) -> None:
    before = files(machine, ENVIRONMENT)
    assert "or portranger --help" in machine.says("portranger", "demo")
    assert files(machine, ENVIRONMENT) == before


def test_the_command_is_that_of_this_clone(machine: Machine) -> None:
    packages = f"{ENVIRONMENT}/lib/python3*/site-packages"
    for package in ("agent", "rules"):
        compared = f"diff -r -x __pycache__ {SOURCE}/{package} {packages}/{package}"
        assert machine.says("sh", "-c", compared) == ""


def test_the_manual_is_found_and_faultless(machine: Machine) -> None:
    found = machine.says("man", "-w", "portranger")
    assert machine.says("readlink", "-f", found) == MANUAL
    assert machine.run("mandoc", "-T", "lint", "-W", "warning", MANUAL).stdout == ""


def test_the_shell_completes_the_command(machine: Machine) -> None:
    script = """
        source /usr/local/share/bash-completion/completions/portranger
        COMP_LINE="portranger val" COMP_POINT=14
        _portranger portranger val portranger
        echo "${COMPREPLY[@]}"
    """
    assert machine.says("bash", "-c", script) == "validate"
    # tests/docs/test_completions.py tries that fish looks there.
    for path in (
        "/usr/local/share/zsh/site-functions/_portranger",
        "/etc/fish/completions/portranger.fish",
    ):
        assert "portranger" in machine.says("cat", path)


def test_the_examples_are_there(machine: Machine) -> None:
    assert machine.says("diff", "-r", f"{SOURCE}/examples", EXAMPLES) == ""


def test_installing_again_keeps_what_was_edited(own: Machine) -> None:
    own.write(CONFIGURATION, "resync_seconds = 60\n")
    own.run("sh", "-c", f"echo '# newer' >>{SOURCE}/examples/portranger.toml")
    assert f"kept {CONFIGURATION}" in make(own, "install")
    assert own.says("cat", CONFIGURATION) == "resync_seconds = 60"
    assert own.says("tail", "-n1", SHIPPED) == "# newer"


def test_installing_again_renews_what_was_not_edited(own: Machine) -> None:
    own.run("cp", SHIPPED, CONFIGURATION)
    own.run("sh", "-c", f"echo '# newest' >>{SOURCE}/examples/portranger.toml")
    make(own, "install")
    assert own.says("tail", "-n1", CONFIGURATION) == "# newest"
    assert own.says("tail", "-n1", SHIPPED) == "# newest"


@pytest.fixture(scope="module")
def staged(own: Machine) -> Machine:
    """With everything below /stage as well, for /opt/ranger."""
    # The environment is there beforehand, with the same pins: so no network is needed.
    own.run("mkdir", "-p", "/stage/opt/ranger/lib")
    own.run("cp", "-a", ENVIRONMENT, "/stage/opt/ranger/lib/")
    make(own, "install", *STAGED)
    return own


def test_another_prefix_is_in_everything(staged: Machine) -> None:
    staged.run("test", "!", "-e", "/opt/ranger")
    staged.run("cp", "-a", "/stage/opt/ranger", "/opt/ranger")
    script = staged.says("head", "-n1", "/opt/ranger/bin/portranger")
    assert script == "#!/opt/ranger/lib/portranger/bin/python"
    assert "version" in staged.says("/opt/ranger/bin/portranger", "--version")
    unit = "/stage/etc/systemd/system/portranger.service"
    staged.run("systemd-analyze", "verify", unit)
    assert "ExecStart=/opt/ranger/bin/portranger run\n" in staged.run("cat", unit).stdout


def test_uninstalling_keeps_what_was_edited_and_nothing_else(staged: Machine) -> None:
    edited = f"/stage{CONFIGURATION}"
    staged.write(edited, "resync_seconds = 60\n")
    assert f"kept {CONFIGURATION}" in make(staged, "uninstall", *STAGED)
    assert staged.says("find", "/stage", "-not", "-type", "d") == edited


def test_uninstalling_removes_the_directories_that_were_made_and_no_others(own: Machine) -> None:
    words = ("PREFIX=/opt/pr/anger", "DESTDIR=/scene")
    own.run("mkdir", "-p", "/scene/opt/pr/anger/bin", "/scene/opt/pr/anger/lib/portranger")
    own.run("mkdir", "-p", "/scene/etc/fish/completions", "/scene/etc/systemd/system")
    before = own.says("find", "/scene")
    own.run("cp", "-a", ENVIRONMENT, "/scene/opt/pr/anger/lib/")
    own.run("rm", "/scene/opt/pr/anger/lib/portranger/.directories")
    make(own, "install", *words)
    make(own, "install", *words)  # when all of them are there
    assert "removed portranger" in make(own, "uninstall", *words)
    gone = "/scene/opt/pr/anger/lib/portranger"
    left = [path for path in before.splitlines() if path != gone]
    # Of a bare system there are always some.
    usual = ["/scene/etc/tmpfiles.d"]
    assert sorted(own.says("find", "/scene").splitlines()) == sorted([*left, *usual])


@pytest.mark.parametrize("words", [("PREFIX=/nosuch",), ("PREFIX=/usr",), STAGED])
def test_uninstalling_what_is_not_there_touches_nothing(
    staged: Machine, words: tuple[str, ...]
) -> None:
    make(staged, "uninstall", *STAGED)
    staged.run("install", "-D", "-m644", "/dev/null", PACKAGED_UNIT)
    staged.run("mkdir", "-p", "/stage/etc/portranger")
    before = files(staged, "/usr", "/etc", "/stage")
    told = make(staged, "uninstall", *words)
    assert "nothing of portranger is below" in told
    assert "removed" not in told
    assert files(staged, "/usr", "/etc", "/stage") == before
    staged.run("rm", PACKAGED_UNIT)


@pytest.mark.parametrize("path", ["PREFIX=/root/here", "PREFIX=/home/joe", "PREFIX=here"])
def test_where_the_service_cannot_see_it_nothing_is_installed(own: Machine, path: str) -> None:
    before = files(own, "/usr/local", "/root", "/home")
    assert path.partition("=")[2] in make(own, "install", path, code=2)
    assert files(own, "/usr/local", "/root", "/home") == before


def test_uninstalling_stops_the_service_and_leaves_nothing_but_the_rules(own: Machine) -> None:
    service = Service(own)
    own.run("cp", SHIPPED, CONFIGURATION)
    service.declare("red", "1000-8000/udp")
    service.wire("red")
    own.run("systemctl", "enable", "--now", "portranger")
    assert service.becomes_synced("red")
    told = make(own, "uninstall")
    assert "portranger clear" in told
    assert f"kept {MANIFESTS}" in told
    assert service.forwards("red", 5000)
    assert (
        own.says("systemctl", "list-units", "--all", "--plain", "--no-legend", "portranger*") == ""
    )
    own.run("rm", "-r", "/etc/portranger", "/var/lib/portranger")
    assert "nothing of portranger" in make(own, "uninstall")
    assert paths_of(own) ^ paths_of_base() <= made_by_booting()


def paths_of(machine: Machine) -> set[str]:
    """Every path where something could have been installed."""
    return set(machine.says("find", "/usr", "/etc", "-xdev").splitlines())


def paths_of_base() -> set[str]:
    """The same, of the tree as debootstrap made it."""
    _, base = installed()
    found = run("find", base / "usr", base / "etc").stdout
    return set(found.replace(str(base), "").splitlines())


def made_by_booting() -> set[str]:
    """What the machine has that its base has not: mount points, and a mark of systemd."""
    options = [option.partition("=") for option in network()]
    bound = [path for name, _, path in options if name in ("--bind", "--bind-ro")]
    return {"/etc/.updated", SOURCE, *(path.rpartition(":")[2] for path in bound)}
