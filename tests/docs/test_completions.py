"""What the TAB key offers in the real shells, with the scripts where `make install` puts them."""

from __future__ import annotations

import os
import pty
import resource
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.cli import portranger
from agent.completion import SCRIPTS
from tests.docs.readme import PREPARE
from tests.spaces import run

BIN = Path(sys.executable).parent
PLACES = {
    "bash": "bash-completion/completions/portranger",
    "zsh": "zsh/site-functions/_portranger",
    "fish": "fish/vendor_completions.d/portranger.fish",
}
BASH_COMPLETION = Path("/usr/share/bash-completion/bash_completion")
PATIENCE = 20.0
SECONDS = 0.3
NAMESPACES = "ip netns add desktop; ip netns add display; ip netns add 'a b;c'"

# Each turns a key into all that TAB could offer, and another into the line as it is then.
BASH_KEYS = rf"""
source {BASH_COMPLETION}
bind '"\C-xa": insert-completions' 'set bell-style none'
bind -x '"\C-xr": printf "[[%s]]\n" "$READLINE_LINE"'
"""
ZSH_KEYS = r"""
fpath=($SHARE/zsh/site-functions $fpath)
autoload -U compinit
compinit -u -D
every() { _main_complete; compstate[insert]=all }
zle -C every complete-word every
bindkey '^Xa' every
report() { print -r -- "[[$BUFFER]]" }
zle -N report
bindkey '^Xr' report
bindkey '^U' kill-whole-line
"""
COMMAND = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
KEYS = {"bash": BASH_KEYS, "zsh": ZSH_KEYS}

Offered = Callable[[str], list[str]]


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def type(self, keys: str, until: str) -> str:
        """What is shown until that is."""
        os.write(self._descriptor, keys.encode())
        seen = ""
        end = time.monotonic() + PATIENCE
        while until not in seen:
            if not select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no {until!r} in {seen!r}")
            seen += os.read(self._descriptor, 65536).decode(errors="replace")
        return seen

    def offered(self, line: str) -> list[str]:
        """The words that stand where the last one of the line was."""
        seen = self.type(f"\x15{line}\x18a\x18r", "]]\r\n")
        made = seen.partition("]]\r\n")[0].rpartition("[[")[2]
        return shlex.split(made)[len(shlex.split(f"{line}.")) - 1 :]


@contextmanager
def terminal(command: Sequence[str], set_up: str, folder: Path, share: Path) -> Iterator[Terminal]:
    """That shell, set up, in that folder; it ends with the block."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 2000))  # nothing is broken into lines
    (folder.parent / "keys").write_text(set_up)
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        cwd=folder,
        env=environment(share),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        shell = Terminal(ours)
        shell.type(f" source {folder.parent}/keys; echo rea''dy\n", "ready\r\n")
        yield shell
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(ours)


def environment(share: Path) -> dict[str, str]:
    """Where our command is found, and the scripts; nothing of whoever runs the tests."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    data = f"{share}:/usr/local/share:/usr/share"
    return {
        "PATH": path,
        "XDG_DATA_DIRS": data,
        "SHARE": str(share),
        "HOME": str(share),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts are, as `make install` has them below its prefix."""
    folder = tmp_path_factory.mktemp("share")
    for shell, place in PLACES.items():
        (folder / place).parent.mkdir(parents=True)
        script = subprocess.run(
            [BIN / "portranger", "completion", shell],
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        (folder / place).write_bytes(script.stdout)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With manifests and a configuration in it."""
    made = tmp_path_factory.mktemp("user") / "work"
    (made / "manifests").mkdir(parents=True)
    for name in ("manifests/desktop.yaml", "my machine.yaml", "portranger.toml"):
        (made / name).touch()
    return made


def why_not(shell: str) -> str | None:
    """What is missing to try that shell."""
    if not shutil.which(shell):
        return f"needs {shell} (Debian: {shell})"
    if shell == "bash" and not BASH_COMPLETION.exists():
        return "needs the completion of bash (Debian: bash-completion)"
    return None


@contextmanager
def asked(shell: str, folder: Path, share: Path, before: str = "") -> Iterator[Offered]:
    """A shell that says what it offers for a line; `before` is run in namespaces of its own."""
    if reason := why_not(shell):
        pytest.skip(reason)
    prefix = ["unshare", "--net", "--mount", "sh", "-c", f'{before}\nexec "$@"', "sh"]
    prefix = prefix if before else []
    if shell != "fish":
        with terminal([*prefix, *COMMAND[shell]], KEYS[shell], folder, share) as made:
            yield made.offered
        return

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            [*prefix, "fish", "-c", "complete -C $argv[1]", line],
            cwd=folder,
            env=environment(share),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        assert done.stderr == ""
        return [found.partition("\t")[0] for found in done.stdout.splitlines()]

    yield offered


@pytest.fixture(scope="module", params=sorted(SCRIPTS))
def offered(request: pytest.FixtureRequest, folder: Path, share: Path) -> Iterator[Offered]:
    with asked(request.param, folder, share) as made:
        yield made


def test_every_command_is_offered(offered: Offered) -> None:
    assert sorted(offered("portranger ")) == sorted(portranger.commands)
    assert offered("portranger val") == ["validate"]


def test_every_option_is_offered(offered: Offered) -> None:
    real = {word for one in portranger.commands["plan"].params for word in one.opts}
    assert set(offered("portranger plan -")) == {*real, "-h", "--help"}
    assert offered("portranger plan -f a.yaml --det") == ["--detailed-exitcode"]
    assert "--file" in offered("portranger plan ")


def test_the_words_that_an_option_takes_are_offered(offered: Offered) -> None:
    assert offered("portranger plan --backend ") == ["auto", "nftables", "iptables"]
    assert offered("portranger plan --backend nf") == ["nftables"]
    assert offered("portranger plan --backend=nf") == ["--backend=nftables"]
    assert offered("portranger plan -o n") == ["nft"]
    assert offered("portranger completion ") == ["bash", "zsh", "fish"]


def test_files_are_offered_where_one_is_meant(offered: Offered) -> None:
    everything = {word.rstrip("/") for word in offered("portranger plan -f ")}
    assert everything == {"manifests", "my machine.yaml", "portranger.toml"}
    assert offered("portranger plan --file manifests/d") == ["manifests/desktop.yaml"]
    assert offered("portranger explain -f my\\ m") == ["my machine.yaml"]
    assert offered("portranger run -c port") == ["portranger.toml"]
    assert offered("portranger show --netns manifests/") == ["manifests/desktop.yaml"]


def test_a_file_is_offered_behind_an_equals_sign(offered: Offered) -> None:
    assert offered("portranger run --config=port") == ["--config=portranger.toml"]


def test_no_file_is_offered_where_none_is_meant(offered: Offered) -> None:
    assert "portranger.toml" not in offered("portranger plan --max-ranges ")


def test_the_node_itself_is_offered_to_those_that_look(offered: Offered) -> None:
    assert offered("portranger show --netns node:s") == ["node:self"]
    assert offered("portranger clear --netns=node") == ["--netns=node:self"]


def test_the_same_is_offered_behind_a_command_that_runs_another(offered: Offered) -> None:
    assert offered("command portranger plan --backend nf") == ["nftables"]


@pytest.mark.needs_root
@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_namespaces_are_offered_by_name(shell: str, folder: Path, share: Path) -> None:
    with asked(shell, folder, share, f"{PREPARE}; {NAMESPACES}") as offered:
        assert offered("portranger plan --netns ") == ["desktop", "display"]
        assert offered("portranger show --netns dis") == ["display"]
        assert offered("portranger show --netns=desk") == ["--netns=desktop"]


@pytest.mark.needs_root
def test_fish_looks_where_it_is_installed_whatever_the_environment_says(share: Path) -> None:
    if reason := why_not("fish"):
        pytest.skip(reason)
    place = run("make", "--silent", "--eval=where:; @echo $(FISH_DIR)", "where").stdout.strip()
    put = f"mount -t tmpfs none {place} && cp {share}/{PLACES['fish']} {place}"
    script = f"{put} && fish -lc 'complete -C \"portranger s\"'"
    done = subprocess.run(
        ["unshare", "--mount", "env", "--unset=XDG_DATA_DIRS", "sh", "-c", script],
        env=environment(share),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["show", "status"]


@pytest.mark.needs_root
def test_who_may_not_see_the_namespaces_is_offered_none(share: Path) -> None:
    hidden = "chown 65534 /run/netns; chmod 700 /run/netns"
    plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"]
    done = answer("portranger show --netns ", share, f"{PREPARE}; {NAMESPACES}; {hidden}", plain)
    assert (done.stdout, done.stderr, done.returncode) == ("plain\tnode:self\t\n", "", 0)


def test_a_key_waits_for_less_than_it_takes_to_notice(share: Path) -> None:
    """On an idle machine: what others make it wait for is not its own time."""
    before = processor_seconds()
    assert answer("portranger plan --backend=nf", share).stdout == "plain\t--backend=nftables\t\n"
    assert processor_seconds() - before < SECONDS


@pytest.mark.parametrize(
    "line", ["", "portranger", "portranger nonsense ", "portranger plan -f 'a"]
)
def test_a_strange_line_is_no_error(share: Path, line: str) -> None:
    done = answer(line, share)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_a_script_is_one_that_its_shell_can_read(shell: str, share: Path) -> None:
    if reason := why_not(shell):
        pytest.skip(reason)
    check = {"fish": "--no-execute"}.get(shell, "-n")
    subprocess.run([shell, check, share / PLACES[shell]], check=True, timeout=PATIENCE)


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def answer(
    line: str, share: Path, before: str = "", prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """What our command says to a script that asks about that line."""
    command = [*prefix, str(BIN / "portranger")]
    if before:
        command = [
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            f'{before}\nexec "$@"',
            "sh",
            *command,
        ]
    return subprocess.run(
        command,
        env={**environment(share), "_PORTRANGER_COMPLETE": "bash", "_PORTRANGER_LINE": line},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
